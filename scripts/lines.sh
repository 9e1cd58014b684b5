#!/usr/bin/env bash
# Lines of Python of the package, the tests, the benchmarks and the demo, and of their folders.
set -euo pipefail
cd "$(dirname "$0")/.."
lines() { find "$1" -name '*.py' -exec cat {} + | wc -l; }
for room in vllm_medusa tests benchmarks demo; do
    printf '%7d %s\n' "$(lines "$room")" "$room"
    for folder in "$room"/*/; do
        count="$(lines "$folder")"
        ((count == 0)) || printf '%7d   %s\n' "$count" "$folder"
    done
done
