#!/usr/bin/env bash
# What to measure in fifteen minutes of one GPU, the most useful first: the kernels that DiffusionGemma needs are checked,
# a forward pass is profiled, whole models are timed, with loops as CUDA graphs and without, and the settings of kernels
# are tuned. Twelve minutes, and a second profile if there are two more.
#
#   benchmarks/gpu_minutes.sh OUT           rows go to OUT/rows.jsonl, pictures and logs beside it
#   benchmarks/gpu_minutes.sh OUT --small   the same on a machine without a GPU, with small shapes
#
# A step that has run is not run again, so the same command goes on where it was stopped. OUT/tuned holds the settings.
set -uo pipefail
out=${1:?the folder for what is measured} small=${2:-}
mkdir -p "$out" && out=$(realpath "$out") && cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export MERCURY_KERNEL_CHECKS=${MERCURY_KERNEL_CHECKS:-$out/kernels.json}
failed=0

step() { # name, seconds, words of a benchmark
  local name=$1 seconds=$2
  [ -z "$small" ] || seconds=$((4 * seconds)) # kernels are interpreted
  shift 2
  [ -e "$out/$name.done" ] && return
  printf '%s\n' "=== $name, at most $seconds s"
  # A benchmark keeps its budget; the limit is for one that hangs.
  if timeout $((seconds + 30)) "${PYTHON:-python3}" -m "$@" ${small:+--small} --budget "$seconds" \
    --out "$out/rows.jsonl" 2>&1 | tee "$out/$name.log"; then
    touch "$out/$name.done"
  else
    failed=1
  fi
}

# Parts of the names of cases, see `mercury bench gpu --help`. A small check leaves out products that take a minute each
# to interpret.
forms=(--only "attention-"{64,256,512}"-bfloat16 b" "grouped-"{bfloat16,int8,float8_e4m3fn}" rows"
  "grouped-"{bfloat16,int8,float8_e4m3fn}-gated norm routing dispatch heads graphs)
model="decoding diffusiongemma-26b-a4b, fp8_dynamic"
[ -z "$small" ] || { forms=(--only attention grouped-int8-gated norm routing dispatch heads graphs) model=decoding; }
picture() { # the options of a picture, where there is matplotlib: the image of a GPU machine may have none
  "${PYTHON:-python3}" -c "import matplotlib" 2>/dev/null && printf '%s\n' --png "$out/$1.png"
}
mapfile -t pass < <(picture profile)
mapfile -t pass_fp8 < <(picture profile-fp8)
# A first call of the 26B compiles for up to a minute.
step check 120 mercury_jax bench gpu check "${forms[@]}"
step profile 140 mercury_jax bench gpu profile --only int8 "${pass[@]}"
step decoding 160 benchmarks.gpu model --only "$model" # as XLA chooses, then as graphs
step tune 180 mercury_jax bench gpu tune
step grouped 40 benchmarks.gpu speed --only "grouped"
step graphs 80 benchmarks.gpu speed --only "kernels on"
[ -n "$small" ] || step profile-fp8 140 mercury_jax bench gpu profile --only fp8_dynamic "${pass_fp8[@]}"
exit "$failed"
