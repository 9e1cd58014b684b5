#!/usr/bin/env bash
# Train the demo's drafters: make drafters
#
# SmolLM2 generates both sides of conversations; Medusa heads, Hydra heads and an EAGLE-3 drafter are
# trained on its answers. If interrupted, the same command resumes.
#
#   CONVERSATIONS=8000 make drafters      more texts, with about 560 answer tokens each
#   KINDS="hydra medusa" make drafters    only these drafters (hydra, medusa, eagle3)
#   WORK=DIR make drafters                folder for texts and drafters (default: build/drafters)
#   START=.demo/drafters SEED=1000000 make drafters    train these further, on other texts
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BIN="${VENV:-.venv}/bin"
readonly TARGET="${TARGET:-.demo/target}" WORK="${WORK:-build/drafters}"
readonly CONVERSATIONS="${CONVERSATIONS:-4000}" KINDS="${KINDS:-eagle3 hydra medusa}"
readonly START="${START:-}" SEED="${SEED:-0}"

mkdir -p "$WORK"
"$BIN/vllm-medusa" distill "$TARGET" --self-talk --conversations "$CONVERSATIONS" --turns 1 \
    --temperature 0.7 0.7 0 --samples 3 --max-tokens 256 --max-model-len 1024 --batch 128 \
    --seed "$SEED" -o "$WORK/texts.jsonl"

train() { # KIND, more options
    local shape=(--draft-vocab 8192 --lm-heads shared)
    [[ -z $START ]] || shape=(--start-heads "$START/$1")
    "$BIN/vllm-medusa" train "$TARGET" -i "$WORK/texts.jsonl" -o "$WORK/$1" --drafter "$1" \
        --dtype bfloat16 --cache "$WORK/states" --epochs 1 "${shape[@]}" "${@:2}"
}
rate="$([[ -z $START ]] && echo 8e-4 || echo 6e-4)"
for kind in $KINDS; do  # eagle3 first: its hidden states include those of the others
    case $kind in
        eagle3) train eagle3 --num-heads 4 ;;
        hydra) train hydra --num-heads 3 --batch-tokens 512 --learning-rate "$rate" ;;
        medusa) train medusa --num-heads 2 --batch-tokens 512 --learning-rate "$rate" ;;
    esac
    [[ $kind == eagle3 ]] || "$BIN/vllm-medusa" calibrate "$TARGET" "$WORK/$kind" \
        -i "$WORK/$kind/training/heldout.jsonl" --dtype bfloat16 --positions 8192
    rm -rf "demo/drafters/$kind"
    "$BIN/python" -m demo.packed "$WORK/$kind" "demo/drafters/$kind" --target "$TARGET"
done
