# `make train`: train on handwritten digits, from a fresh clone to an accuracy. `make test`: all quick tests. `make help`: everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup train test test-rest test-again test-campaigns test-search test-keras test-all test-lowest test-newest versions lock lint notebooks docs picture pictures gpu dist sbom clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/:/' | column -t -s ':'

$(INSTALLED): requirements-dev.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

setup: $(INSTALLED) ## make .venv and install everything into it

train: $(INSTALLED) ## ingest the bundled digits, train on 2 workers, evaluate, record, summarize
	$(BIN)/ray-app ingest --source digits --out datasets/digits
	$(BIN)/ray-app train --config conf/digits.yaml

# Two processes; one has the tests that share a Ray cluster. What takes longest begins first.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --durations 20

test: $(INSTALLED) ## the tests that run before every commit: all without Ray but the slow ones, and three runs on real Ray
	$(PYTEST) -m "not rest and not campaign and not search"

test-rest: $(INSTALLED) ## slow variants, one run on real Ray for each further guarantee, the commands of the pages, the wheel
	$(PYTEST) -m "rest and not search" $(if $(PART),--part $(PART))

test-again: $(INSTALLED) ## what failed last, one after the other
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-campaigns: $(INSTALLED) ## all other runs on real Ray: every drill, lost nodes and hosts, jobs, retraining; an hour or more
	$(PYTEST) -m "campaign and not search" $(if $(PART),--part $(PART))

test-search: $(INSTALLED) ## a thousand kills, 200,000 schedules, 100,000 damaged files, histories by the hundred: looks for what breaks a promise
	$(PYTEST) -m search

test-keras: $(INSTALLED) ## Keras' own tests of fit and of callbacks, from its wheel, with fit replaced; a few of them with a worker, too
	$(BIN)/python -m tests.support.keras_suite -n 2
	$(BIN)/python -m tests.support.keras_suite --fit worker

test-all: test test-rest test-campaigns test-search test-keras ## all tests

test-lowest: ## tests/pure, the strategies and killed workers with the lowest versions that pyproject.toml allows
test-newest: ## the same with the newest versions that exist
test-lowest test-newest: test-%: $(INSTALLED)
	$(BIN)/python docs/versions.py test $*

versions: $(INSTALLED) ## try each version of Ray, torch and Python in an environment of its own, and write docs/versions.md
	$(BIN)/python docs/versions.py table

notebooks: $(INSTALLED) ## execute the notebooks and store their outputs
	$(BIN)/python -m tests.support.notebooks

LOCK := $(BIN)/uv pip compile --quiet --no-header --generate-hashes --universal --fork-strategy fewest --python-version 3.11

lock: ## write requirements.lock and requirements-dev.lock: what the named versions need, each file with its hashes
	$(LOCK) requirements-dev.txt -o requirements-dev.lock
	$(LOCK) -c requirements-dev.lock requirements.txt -o requirements.lock

docs: $(INSTALLED) ## the documentation as a site in build/docs; a dead link, a missing anchor or an unknown field fails
	$(BIN)/python -m sphinx -E -W --keep-going -n -q -b html docs build/docs

pictures: $(INSTALLED) ## take the pictures of the documentation again (tmux, Chromium)
	$(BIN)/python docs/pictures/take.py

lint: $(INSTALLED) ## ruff, mypy (strict), import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

picture: $(INSTALLED) ## draw docs/architecture.svg from the imports
	PYTHONPATH=. $(BIN)/python docs/picture.py

DEVICE ?= cuda

gpu: ## what only a GPU can show, within eight minutes; DEVICE=cpu: that it runs
	$(BIN)/python benchmarks/gpu.py --device $(DEVICE)

dist: sbom ## source archive and wheel in build/dist, checked as an index would; and the SBOM
	rm -rf build/dist
	$(BIN)/python -m build --no-isolation --outdir build/dist
	$(BIN)/twine check --strict build/dist/*

sbom: $(INSTALLED) ## every installed library with its version, its licence and what needs it, as CycloneDX in build/sbom.json
	mkdir -p build
	@# In an environment of its own: it needs rfc3987-syntax, whose import would add seconds to each start of Ray here.
	$(BIN)/uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/sbom.json $(BIN)/python

clean: ## remove what the commands above made, but the environment and the runs
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
