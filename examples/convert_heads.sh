#!/usr/bin/env bash
# Convert heads between formats: detect a checkpoint's format, convert it, and convert it back, with
# identical bits. Formats: native, vllm, v1 and v2 (the reference implementation's), tgi and
# tensorrt-llm.
#
#     examples/convert_heads.sh                            # the test model's heads
#     examples/convert_heads.sh HEADS TARGET FOLDER [FORMAT]
set -euo pipefail
cd "$(dirname "$0")/.."
heads=${1:-tests/assets/heads} target=${2:-tests/assets/target} out=${3:-.demo/converted} format=${4:-tgi}
medusa=${MEDUSA:-.venv/bin/vllm-medusa}
mkdir -p "$out"

$medusa inspect "$heads" --target "$target"
$medusa convert "$heads" --to "$format" --output "$out/$format" --target "$target" --overwrite
$medusa convert "$out/$format" --to native --output "$out/native" --target "$target" --overwrite
$medusa inspect "$out/native" --target "$target"
