#!/usr/bin/env bash
# Medusa-2: heads and target trained together, on text that the target wrote (examples/medusa1.sh
# writes some). The result is a new target, merged, with its heads; the report says how far it is
# from the original, and the exit status is 1 if that is beyond --max-kl.
#
#     examples/medusa1.sh && examples/medusa2.sh           # the test target, minutes on two cores
#     examples/medusa2.sh TARGET RECORDS.jsonl FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-tests/assets/target} records=${2:-.demo/medusa1/records.jsonl} out=${3:-.demo/medusa2}
medusa=${MEDUSA:-.venv/bin/vllm-medusa}

$medusa train "$target" --method medusa-2 --data "$records" --heldout-share 0.1 --output "$out" \
    --num-heads 4 --epochs 2 --lora-rank 8

echo "serve it: $medusa serve $out/target --speculative-model $out"
