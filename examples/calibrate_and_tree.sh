#!/usr/bin/env bash
# Find the best tree for heads: measure their accuracy on texts that the target generated for
# held-out prompts, then build the tree, write it to the heads' config, and draw it with estimates.
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
$medusa tree "$out/heads" --num-draft-tokens 16

# Compare with plain vLLM for several tree sizes. (The heads were calibrated on these prompts; use
# other ones.)
$medusa compare "$target" "$out/heads" --prompts "$out/records.jsonl" --temperature 0.8 \
    --budgets 4 8 16 --limit 4
