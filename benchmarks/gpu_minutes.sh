#!/usr/bin/env bash
# What to measure in fifteen minutes of one GPU, the most useful first: the kernels that DiffusionGemma needs are checked,
# then a forward pass is profiled, then kernels and whole models are timed. Twelve minutes in all.
#
#   benchmarks/gpu_minutes.sh OUT           rows go to OUT/rows.jsonl, pictures and logs beside it
#   benchmarks/gpu_minutes.sh OUT --small   the same on a machine without a GPU, with small shapes
#
# A step that has run is not run again, so the same command goes on where it was stopped.
set -uo pipefail
out=${1:?the folder for what is measured} small=${2:-}
mkdir -p "$out" && out=$(realpath "$out") && cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export MERCURY_KERNEL_CHECKS=${MERCURY_KERNEL_CHECKS:-$out/kernels.json}
failed=0

step() { # name, seconds, words of a benchmark
  local name=$1 seconds=$2
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

# Parts of the names of cases, see `mercury bench gpu --help`.
if [ -n "$small" ]; then
  forms=(grouped-int8-gated norm) grouped=(dtype=int8) models=(decoding)
else
  forms=("attention-"{64,256,512}"-bfloat16 b" "grouped-"{bfloat16,int8}" rows" "grouped-"{bfloat16,int8}-gated norm routing dispatch heads)
  grouped=(grouped) models=("decoding diffusiongemma")
fi
step check 170 mercury_jax bench gpu check --only "${forms[@]}"
step profile 180 mercury_jax bench gpu profile --png "$out/profile.png"
step decoding 220 benchmarks.gpu model --only "${models[@]}"
step grouped 70 benchmarks.gpu speed --only "${grouped[@]}"
step graphs 70 benchmarks.gpu speed --only decoding
exit "$failed"
