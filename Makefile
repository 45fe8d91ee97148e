# Every target makes the virtual environment that it needs: Python >= 3.11 with pip is enough.

VENV ?= .venv
PYTHON ?= python3
PYTEST_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu check format build clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	touch $@

demo: $(STAMP) ## search a plan for a small GPT, train it on 4 CPU ranks, compare with one device
	$(BIN)/python -m autoplan.demo

test: $(STAMP) ## the default test suite
	$(BIN)/python -m pytest -n auto --maxprocesses 2 $(PYTEST_ARGS)

test-slow: $(STAMP) ## the long tests: whole grids of models and plans, killed processes
	$(BIN)/python -m pytest -m 'slow and not gpu' $(PYTEST_ARGS)

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

check: $(STAMP) ## style, formatting, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(STAMP) ## wheel and source archive, in dist/
	$(BIN)/python -m build

clean: ## remove what was built (not the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
