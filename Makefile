# `make demo` and `make test` work on a fresh machine: each sets up what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo serve test test-slow check format clean

install: $(STAMP)

# torch first and pinned: left to itself, pip would fetch the newest build with its CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/bough generate --max-new-tokens 48 "The three primary colours are"

serve: $(STAMP)
	$(BIN)/bough serve

check: $(STAMP)
	$(BIN)/ruff check bough tests
	$(BIN)/ruff format --check bough tests
	$(BIN)/mypy

test: $(STAMP) check
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu"

format: $(STAMP)
	$(BIN)/ruff check --fix bough tests
	$(BIN)/ruff format bough tests

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
