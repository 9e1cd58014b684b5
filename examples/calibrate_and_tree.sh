#!/usr/bin/env bash
# The tree that suits heads: measure them on text the target wrote for prompts they were not trained
# on, then build the tree, print what it will bring and draw it. The heads' config gets the tree.
#
#     examples/calibrate_and_tree.sh                       # a copy of the test model's heads
#     examples/calibrate_and_tree.sh TARGET HEADS PROMPTS.jsonl FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-tests/assets/target} heads=${2:-tests/assets/heads} prompts=${3:-tests/assets/prompts.jsonl} out=${4:-.demo/tree}
medusa=${MEDUSA:-.venv/bin/vllm-medusa}
mkdir -p "$out"
[ -d "$out/heads" ] || cp -r "$heads" "$out/heads"

$medusa distill "$target" --prompts "$prompts" --output "$out/records.jsonl" \
    --temperature 0.8 --samples 4 --max-tokens 96 --engine-args '{"enforce_eager": true}'
$medusa calibrate "$target" "$out/heads" --data "$out/records.jsonl"
$medusa tree "$out/heads" --num-draft-tokens 16 --draw "$out/tree.png"

# Beside plain vLLM, by the size of the tree. (Here on the calibration's prompts; use others.)
$medusa compare "$target" "$out/heads" --prompts "$out/records.jsonl" --temperature 0.8 \
    --budgets 4 8 16 --limit 4
