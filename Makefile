# `make train`: train on handwritten digits, from a fresh clone to an accuracy. `make test`: all quick tests. `make help`: everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help setup train test test-all lint notebooks clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s ':'

$(INSTALLED): requirements.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

setup: $(INSTALLED) ## make .venv and install everything into it

train: $(INSTALLED) ## ingest the bundled digits, train on 2 workers, evaluate, record, summarize
	$(BIN)/python jobs/ingest.py --source digits --out datasets/digits
	$(BIN)/python jobs/train.py --config conf/digits.yaml

# Two test files at a time, each with its own Ray cluster; the slow ones come first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED) ## the test suite without its slow tests (real Ray, real MLflow), about half an hour on 2 cores
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED) ## the test suite with the slow tests
	$(PYTEST)

notebooks: $(INSTALLED) ## execute the notebooks and store their outputs
	$(BIN)/python -m tests.notebooks

lint: $(INSTALLED) ## ruff, mypy (strict), import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove what the commands above made, but the environment and the runs
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
