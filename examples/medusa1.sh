#!/usr/bin/env bash
# Medusa-1 on text that the target writes itself: distill, then train the heads alone.
#
#     examples/medusa1.sh                                  # the test target, minutes on two cores
#     examples/medusa1.sh TARGET PROMPTS.jsonl FOLDER
#
# Each command goes on where it was if it is stopped; repeat the script. More and longer texts make
# better heads: --samples, --max-tokens and --epochs are small here.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-tests/assets/target} prompts=${2:-tests/assets/prompts.jsonl} out=${3:-.demo/medusa1}
medusa=${MEDUSA:-.venv/bin/vllm-medusa}
mkdir -p "$out"

$medusa distill "$target" --prompts "$prompts" --output "$out/records.jsonl" \
    --temperature 0.8 --samples 8 --max-tokens 96 \
    --engine-args '{"enforce_eager": true}'

$medusa train "$target" --data "$out/records.jsonl" --heldout-share 0.1 --output "$out/heads" \
    --num-heads 4 --epochs 4

$medusa inspect "$out/heads" --target "$target"
