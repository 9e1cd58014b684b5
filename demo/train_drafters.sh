#!/usr/bin/env bash
# Train the demo's drafters: make drafters
#
# SmolLM2 generates both sides of conversations; Medusa heads, Hydra heads and an EAGLE-3
# drafter are trained on its answers. If interrupted, the same command resumes.
#
#   CONVERSATIONS=7500 make drafters      more texts, with about 600 answer tokens each
#   KINDS="hydra medusa" make drafters    only these drafters (hydra, medusa, eagle3)
#   WORK=DIR make drafters                folder for texts and drafters (default: build/drafters)
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BIN="${VENV:-.venv}/bin"
readonly TARGET="${TARGET:-.demo/target}" WORK="${WORK:-build/drafters}"
readonly CONVERSATIONS="${CONVERSATIONS:-2500}" KINDS="${KINDS:-hydra medusa eagle3}"

mkdir -p "$WORK"
"$BIN/vllm-medusa" distill "$TARGET" --self-talk --conversations "$CONVERSATIONS" --turns 2 \
    --temperature 0.7 0.7 0 --samples 3 --max-tokens 400 --max-model-len 2048 --batch 96 \
    -o "$WORK/texts.jsonl"

train() { # KIND, more options
    "$BIN/vllm-medusa" train "$TARGET" -i "$WORK/texts.jsonl" -o "$WORK/$1" --heads "$1" \
        --draft-vocab 8192 --dtype bfloat16 "${@:2}"
}
for kind in $KINDS; do
    case $kind in
        hydra) train hydra --num-heads 3 --epochs 2 --batch-tokens 512 --learning-rate 8e-4 \
            --cache "$WORK/states" ;;
        medusa) train medusa --num-heads 4 --learning-rate 7e-4 \
            --cache "$WORK/states" ;;
        eagle3) train eagle3 --lm-heads shared --num-heads 4 --epochs 1 ;;
    esac
    [[ $kind == eagle3 ]] || "$BIN/vllm-medusa" calibrate "$TARGET" "$WORK/$kind" \
        -i "$WORK/$kind/training/heldout.jsonl" --dtype bfloat16 --positions 8192
    rm -rf "demo/drafters/$kind"
    "$BIN/python" -m demo.packed "$WORK/$kind" "demo/drafters/$kind" --target "$TARGET"
done
