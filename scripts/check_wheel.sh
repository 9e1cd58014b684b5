#!/usr/bin/env bash
# Build the sdist, from it the wheel, install that with its extras into a fresh environment, and test
# what the README promises there, outside the clone. Takes about ten minutes; the exit status is 0 on success.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly PYTHON="${PYTHON:-python3}"
folder="$(mktemp -d)"
readonly folder
server=
trap '[[ -z "$server" ]] || kill "$server" 2>/dev/null; rm -rf "$folder"' EXIT

step() { printf '\nwheel: %s\n' "$*"; }

step "build and install"
"$PYTHON" -m venv "$folder/build"
"$folder/build/bin/pip" install -q --disable-pip-version-check build
"$folder/build/bin/python" -m build -o "$folder" . >/dev/null # the wheel is built from the sdist
wheels=("$folder"/*.whl)
VENV="$folder/venv" PACKAGE="${wheels[0]}[cpu,train,parquet]" scripts/setup.sh
cp -r tests/assets/target tests/assets/heads tests/assets/prompts.jsonl "$folder"
head -n 12 tests/assets/prompts.jsonl >"$folder/few.jsonl"
cp examples/plain_chat_template.jinja "$folder"
cd "$folder"
PATH="$folder/venv/bin:$PATH"
readonly SMALL='{"kv_cache_memory_bytes": 268435456, "enforce_eager": true}'
export VLLM_LOGGING_LEVEL=ERROR

step "every command's help, without torch"
for command in generate adapt distill train calibrate tree compare convert inspect doctor; do
    python -X importtime -m vllm_medusa.cli "$command" --help >help.txt 2>imports.txt
    ! grep -qE '\| +(torch|vllm)$' imports.txt || { echo "$command --help loads torch or vllm"; exit 1; }
done

step "version and doctor"
vllm-medusa --version
vllm-medusa doctor target heads

step "LLM(...) with heads: plain vLLM's tokens"
cat >both.py <<'PY'
from vllm import LLM, SamplingParams

def tokens(**more):
    llm = LLM(model="target", dtype="float32", enforce_eager=True, kv_cache_memory_bytes=1 << 28, **more)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=32)
    return [out.outputs[0].token_ids for out in llm.generate(["<s>def f(", "<s>import "], params)]

if __name__ == "__main__":
    tree = {"method": "medusa", "model": "heads", "tree": "mc_sim_7b_63", "num_speculative_tokens": 15}
    assert tokens(speculative_config=tree) == tokens()
PY
python both.py

step "generate, stopped and resumed"
run=(vllm-medusa generate target --speculative-model heads --prompts prompts.jsonl --max-tokens 32
    --output results.jsonl --temperature 0.7 --seed 1 --dtype float32 --engine-args "$SMALL")
timeout -s KILL 40 "${run[@]}" || true
"${run[@]}"
[[ "$(wc -l <results.jsonl)" == "$(wc -l <prompts.jsonl)" ]]

step "convert and inspect"
vllm-medusa convert heads --to tgi --output tgi --target target
vllm-medusa convert tgi --to native --output native
vllm-medusa inspect native --target target >/dev/null
vllm-medusa inspect tgi --target target >/dev/null

step "adapt: distill, train, calibrate, tree and compare"
vllm-medusa adapt target --prompts few.jsonl --output mine --dtype float32 --samples 4 \
    --max-tokens 32 --epochs 1 --budgets 4 --measure-tokens 16 --measure-seconds 10 \
    --engine-args "$SMALL"
[[ -s mine/report.md && -s mine/model.safetensors ]]

step "serve"
vllm-medusa serve target --speculative-model mine --dtype float32 --port 8765 \
    --kv-cache-memory-bytes 268435456 --enforce-eager --max-model-len 512 &
server=$!
python - <<'PY'
import json, time, urllib.request

ask = {"prompt": "<s>def f(", "max_tokens": 8, "temperature": 0, "model": "target"}
for attempt in range(120):
    try:
        request = urllib.request.Request(
            "http://127.0.0.1:8765/v1/completions",
            json.dumps(ask).encode(), {"Content-Type": "application/json"},
        )
        print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
        break
    except OSError:
        time.sleep(2)
else:
    raise SystemExit("the server did not answer within four minutes")
PY
step "all of it works"
