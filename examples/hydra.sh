#!/usr/bin/env bash
# Hydra heads, conditioned on the preceding draft tokens: distill, train, measure, choose a tree.
#
#     examples/hydra.sh                                    # the test target, minutes on two cores
#     examples/hydra.sh TARGET PROMPTS.jsonl FOLDER
#
# If interrupted, run the script again: each command resumes. Serving does not need the tree:
# vllm-medusa serve TARGET --speculative-model FOLDER/heads
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-tests/assets/target} prompts=${2:-tests/assets/prompts.jsonl} out=${3:-.demo/hydra}
medusa=${MEDUSA:-.venv/bin/vllm-medusa}
mkdir -p "$out"

$medusa distill "$target" --prompts "$prompts" --output "$out/records.jsonl" \
    --temperature 0.8 --samples 8 --max-tokens 96 \
    --engine-args '{"enforce_eager": true}'

$medusa train "$target" --data "$out/records.jsonl" --heldout-share 0.1 --output "$out/heads" \
    --num-heads 4 --epochs 4

$medusa calibrate "$target" "$out/heads" -i "$out/heads/training/heldout.jsonl"
$medusa tree "$out/heads" -n 15
