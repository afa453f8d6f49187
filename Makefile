# Needs Python 3.11 or newer, make and pip; everything else goes into .venv.
# Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.ready
BENCH_STAMP := $(VENV)/.ready-bench
# Sources as an installer lays them out, for the type checker.
TYPES := build/types

# Tests and benchmarks are to mean the same on every machine.
export JAX_PLATFORMS := cpu
# JAX's LAPACK calls go to SciPy's OpenBLAS, whose threads fight XLA's, all the
# more so with several test processes.
export OPENBLAS_NUM_THREADS := 1
# JAX's persistent compilation cache stays off. Continuous integration starts from a
# fresh clone, so that only what is compiled twice would gain (a tenth of the time);
# its entries are not written atomically, and writing one ended a run with a
# segmentation fault.

# A file's tests stay on one worker, with what they compile and their fixtures; the
# order of the files is that of tests/conftest.py, the slowest first.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench lint types clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) \
	  | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(STAMP) ## Run the demonstration, examples/demo.py
	$(PY) examples/demo.py

test: lint types ## Lint, check types, run the tests that are not slow
	$(PYTEST)

test-all: lint types ## The same with the slow tests
	$(PYTEST) -m "slow or not slow"

bench: $(BENCH_STAMP) ## Run the benchmarks side by side with peers
	$(PY) benchmarks/run_all.py

lint: $(STAMP) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow the mapping of models/ and guides/ into the package, so it
# reads an installed copy.
types: $(STAMP) ## Check types
	rm -rf $(TYPES) build/lib build/bdist.*
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --target $(TYPES) .
	MYPYPATH=$(TYPES) $(BIN)/mypy --package numpyro_gpx

clean: ## Remove the environment and everything made
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Set-up happens once, and again when pyproject.toml changes.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: '$(PYTHON)' not found; name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: numpyro_gpx needs Python 3.11 or newer; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1). Name another with make PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once; a few minutes, about 1 GB)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --editable '.[test]'
	@touch $@

$(BENCH_STAMP): $(STAMP)
	$(PY) -m pip install --editable '.[test,bench]'
	@touch $@
