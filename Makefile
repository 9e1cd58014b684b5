# make demo    a chat model in plain vLLM and with tree drafts: same tokens, fewer steps
# make test    every check: lint, format, types, the whole test suite
# Both run the set-up first, in .venv (see scripts/setup.sh).
.DEFAULT_GOAL := help
SHELL := bash
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Each test uses one thread, and the tests of a file share its engines. With three workers, two
# cores stay busy while one of them waits for its child processes.
PYTEST_WORKERS ?= 3
DEMO_ARGS ?=
MINUTES ?= 10
export VENV

.PHONY: help setup demo drafters test lint format unit docs fuzz wheel soak serve-example clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/ -/' | sort

setup:  ## create the virtual environment: vLLM for CPU, no CUDA packages
	@scripts/setup.sh

demo: setup  ## compare plain vLLM and tree drafts on a chat model, side by side
	@$(BIN)/python -m demo $(DEMO_ARGS)

drafters: setup  ## train the demo's drafters (hours; CONVERSATIONS=8000 for more texts)
	@$(BIN)/python -m demo.smollm2 .demo/target
	@demo/train_drafters.sh

test: setup lint  ## run all checks: ruff, mypy, the whole test suite
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder \
		$(PYTEST_ARGS)

lint: setup  ## count lines by folder, run ruff and mypy
	@scripts/lines.sh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: setup  ## run the fast tests, which start no engine
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

docs: setup  ## build the documentation site in build/site; broken links are errors
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || \
		$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: build/site/index.html"

fuzz: setup  ## compare random engines with plain vLLM for MINUTES; ENGINE and REQUESTS reproduce a failure
	PYTHONPATH=tests $(BIN)/python -m support.fuzz --minutes $(MINUTES) \
		$(if $(ENGINE),--engine $(ENGINE)) $(if $(REQUESTS),--requests $(REQUESTS)) \
		$(if $(RUNNER),--runner $(RUNNER))

wheel:  ## build sdist and wheel, and test them in a fresh environment
	@scripts/check_wheel.sh

SOAK_ARGS ?=
soak: setup  ## send 2,000 mixed requests to a server; check answers and memory (some minutes)
	$(BIN)/python -m benchmarks soak --target tests/assets/target --drafter tests/assets/heads \
		--texts tests/assets/prompts.jsonl --eager --json build/soak.json $(SOAK_ARGS)

serve-example: setup  ## serve the test model, OpenAI-compatible, on port 8000
	$(BIN)/vllm-medusa serve tests/assets/target --speculative-model tests/assets/heads \
		--dtype float32 --chat-template examples/plain_chat_template.jinja

clean:  ## remove caches and the virtual environment
	rm -rf $(VENV) .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
