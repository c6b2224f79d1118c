# SPDX-License-Identifier: MIT OR Apache-2.0
# Every target makes its own .venv first, when it is missing or when pyproject.toml or constraints.txt have changed.
#
#   PYTHON    the interpreter for .venv, 3.11 or newer          make PYTHON=python3.12 test
#   PIP_ARGS  more arguments for pip, for example an index      make PIP_ARGS="--extra-index-url URL" demo
#   ARGS      more arguments for the command of the target      make test ARGS="tests/test_errors.py -x"
#   SEEDS     how many seeds to simulate                        make sim SEEDS=10000

PYTHON ?= python3
PIP_ARGS ?=
SEEDS ?= 2000
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(VENV)/.core

# One thread per process: several ranks share the cores, and sums then have the same bits on every machine.
export OMP_NUM_THREADS ?= 1
# The demo's model, about 1 GB while it is built, stays in this folder.
export METRALE_CACHE_DIR ?= $(CURDIR)/.cache

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test sim clusters lint check bench nightly clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: $(STAMP) $(CORE)  ## answer one question with two ranks of a small model on this machine
	$(BIN)/metrale-ray demo $(ARGS)

test: $(STAMP) $(CORE)  ## run the tests
	$(BIN)/python -m tests.run $(ARGS)

sim: $(STAMP) $(CORE)  ## run whole groups of ranks in one process each, in virtual time, under faults that SEEDS seeds draw
	$(BIN)/python -m pytest --simulation tests/simulation
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

clusters: $(STAMP) $(CORE)  ## run the tests of whole clusters and several hosts; as root
	$(BIN)/python -m tests.run -m clusters --clusters $(ARGS)

lint: $(STAMP)  ## check the format, the style and the types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## all that a change must pass: lint, then test

bench: $(STAMP) $(CORE)  ## run the benchmarks, beside the peers that bench/README.md says how to install; one page of tables
	@$(BIN)/python -m bench.report $(ARGS)

nightly: $(STAMP) $(CORE)  ## run all tests, the long ones too, with larger numbers, and the native core under sanitizers
	$(BIN)/python -m tests.run --nightly --timeout=3600 $(ARGS)
	$(BIN)/python -m tests.native.sanitizers

clean:  ## remove .venv and everything else that these targets make
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	find metrale_ray tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1 || true); metrale-ray needs Python 3.11 or newer." >&2; \
	  echo "Name another interpreter, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "== making $(VENV) (PyTorch and Ray are large: the first time takes some minutes)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "error: $(PYTHON) -m venv failed; on Debian and Ubuntu install the package python3-venv." >&2; exit 1; }
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@ $(CORE)
	@$(BIN)/python -m metrale_ray.native || true
	@echo "== $(VENV) is ready"

# Built with the package, and again when its sources change. Without a compiler all goes on, slower.
$(CORE): metrale_ray/native/compile.py $(wildcard metrale_ray/native/src/*) | $(STAMP)
	@$(BIN)/python -m metrale_ray.native.compile || echo "== going on with PyTorch's kernels" >&2
	@touch $@
