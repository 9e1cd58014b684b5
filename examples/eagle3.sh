#!/usr/bin/env bash
# An EAGLE-3 drafter: distill, train, inspect. vLLM's own `eagle3` also loads the folder.
#
#     examples/eagle3.sh                                   # the test target, minutes on two cores
#     examples/eagle3.sh TARGET PROMPTS.jsonl FOLDER
#
# If interrupted, run the script again: each command resumes. To serve:
# speculative_config={"method": "eagle3", "model": "FOLDER/drafter", "tree": "dynamic"}
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-tests/assets/target} prompts=${2:-tests/assets/prompts.jsonl} out=${3:-.demo/eagle3}
medusa=${MEDUSA:-.venv/bin/vllm-medusa}
mkdir -p "$out"

$medusa distill "$target" --prompts "$prompts" --output "$out/records.jsonl" \
    --temperature 0.8 --samples 8 --max-tokens 96 \
    --engine-args '{"enforce_eager": true}'

$medusa train "$target" --data "$out/records.jsonl" --heldout-share 0.1 --output "$out/drafter" \
    --drafter eagle3 --num-heads 4 --epochs 4

$medusa inspect "$out/drafter" --target "$target"
