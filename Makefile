# Everything a person does with a checkout. `make serve` and `make test` set up by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SHELL := /bin/bash
ARGS ?=
PIP_ARGS ?=

.PHONY: setup serve test test-all extras lint bench clients page-test demo-models demo-routers clean

setup: $(STAMP)

# Runs again only when the packaging files change.
$(STAMP): setup.cfg setup.py pyproject.toml constraints.txt $(wildcard trserve/models/native/*.h trserve/models/native/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "trserve needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# To compile all modules takes longer than to compile those that are imported, when they are.
	$(BIN)/pip install --quiet --no-compile $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

serve: $(STAMP)
	@exec $(BIN)/trserve launch $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP)
	@$(BIN)/python -m tests.stages $(ARGS)

# Packages of the extras gpu-test and cluster, beside the environment: kernels are then interpreted
# and compiled for their targets, and a cluster of raylets is started. Takes a GB; no GPU is needed.
EXTRAS := triton==3.6.0 ray==2.60.0
extras: .extras/.installed
.extras/.installed: $(STAMP)
	@rm -rf .extras
	$(BIN)/pip install --quiet $(PIP_ARGS) --target .extras $(EXTRAS)
	@touch $@

# Full counts; its output is committed, unless ARGS names some of the stages.
test-all: $(STAMP) extras
	@mkdir -p docs/results
	@set -o pipefail; TRSERVE_FULL=1 $(BIN)/python -m tests.stages $(ARGS) 2>&1 | \
	  tee $(if $(ARGS),/dev/null,docs/results/test-all.txt)

bench: $(STAMP)
	$(BIN)/python -m bench.startup --quick
	$(BIN)/python -m bench.pareto --quick

# Third-party clients that are too large for `test`, each in an environment of its own under
# .clients/ (5 GB in all, from the package indexes; some need Node 20). ARGS names some of them.
clients: $(STAMP)
	@mkdir -p docs/results
	@set -o pipefail; $(BIN)/python -m tests.clients_heavy $(ARGS) | \
	  tee $(if $(ARGS),/dev/null,docs/results/clients.txt)

# The web page in a real Chromium (Debian: chromium nodejs npm); pictures go to .page-test/shots/.
page-test: $(STAMP)
	@mkdir -p .page-test && cp tests/page/package.json .page-test/
	@cd .page-test && npm install --no-audit --no-fund --silent
	TRSERVE_FULL=1 $(BIN)/python -m pytest -rs -s tests/page $(ARGS)

demo-models: $(STAMP)
	$(BIN)/python -m trserve.demo.train $(ARGS)

demo-routers: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m trserve.training.demo $(ARGS)

clean:
	rm -rf $(VENV) .clients .page-test .extras build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
