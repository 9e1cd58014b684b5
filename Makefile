# make demo    a chat model in plain vLLM and with tree drafts: same tokens, fewer steps
# make test    every check: lint, format, types, the whole test suite
# Both do all the set-up first, in .venv (see scripts/setup.sh).
.DEFAULT_GOAL := help
SHELL := bash
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# Every test has one thread, and a file's tests share its engines. Three files at a time keep two
# cores busy while one of them waits for processes that it started.
PYTEST_WORKERS ?= 3
DEMO_ARGS ?=
MINUTES ?= 10
export VENV

.PHONY: help setup demo drafters test lint format unit fuzz wheel soak serve-example clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/ -/' | sort

setup:  ## the virtual environment with vLLM for CPU, no CUDA packages
	@scripts/setup.sh

demo: setup  ## a chat model in plain vLLM and with tree drafts, side by side
	@$(BIN)/python -m demo $(DEMO_ARGS)

drafters: setup  ## train the demo's drafters again (hours; CONVERSATIONS=7500 for more texts)
	@$(BIN)/python -m demo.smollm2 .demo/target
	@demo/train_drafters.sh

test: setup lint  ## all checks: ruff, mypy, the whole test suite
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder \
		$(PYTEST_ARGS)

lint: setup  ## lines by room, ruff and mypy
	@scripts/lines.sh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: setup  ## the quick tests: no engine is started
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

fuzz: setup  ## random engines and requests beside plain vLLM for MINUTES; ENGINE, REQUESTS again
	PYTHONPATH=tests $(BIN)/python -m support.fuzz --minutes $(MINUTES) \
		$(if $(ENGINE),--engine $(ENGINE)) $(if $(REQUESTS),--requests $(REQUESTS)) \
		$(if $(RUNNER),--runner $(RUNNER))

wheel:  ## the wheel alone, in a fresh environment, does what the README promises
	@scripts/check_wheel.sh

SOAK_ARGS ?=
soak: setup  ## 2,000 requests of all kinds to a server: answers, memory (some minutes)
	$(BIN)/python -m benchmarks soak --target tests/assets/target --drafter tests/assets/heads \
		--texts tests/assets/prompts.jsonl --eager --json build/soak.json $(SOAK_ARGS)

serve-example: setup  ## an OpenAI-compatible server with the test model, at port 8000
	$(BIN)/vllm-medusa serve tests/assets/target --speculative-model tests/assets/heads \
		--dtype float32 --gpu-memory-utilization 0.5 \
		--chat-template examples/plain_chat_template.jinja

clean:  ## remove caches and the virtual environment
	rm -rf $(VENV) .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
