#!/usr/bin/env bash
# Count the lines of Python in the package, the tests, the benchmarks, the demo and their folders.
set -euo pipefail
cd "$(dirname "$0")/.."
lines() { find "$1" -name '*.py' -exec cat {} + | wc -l; }
for part in vllm_medusa tests benchmarks demo; do
    printf '%7d %s\n' "$(lines "$part")" "$part"
    for folder in "$part"/*/; do
        count="$(lines "$folder")"
        ((count == 0)) || printf '%7d   %s\n' "$count" "$folder"
    done
done
