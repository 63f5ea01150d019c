# Two commands need nothing but Python 3.10+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

# Python keeps what it compiles, here too where it is told not to: tests start many processes that import torch.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-device lint docs notebooks dist bench clean

demo: $(VENV)/.demo
	$(BIN)/unde demo --out demo

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The tests of devices on one of this machine: make test-device DEVICE=cuda. What counts or limits is left out there.
test-device: $(VENV)/.dev
	UNDE_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -rs tests/devices

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check
	$(BIN)/mypy

# Into build/docs, without a network; a warning is an error.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs

# The .py files are the source; what they print is kept with them.
notebooks: $(VENV)/.dev
	$(PIP) -e '.[notebooks]'
	$(BIN)/python notebooks

# The wheel and the source archive, into dist.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Three minutes: short forms against the ratios in benchmarks/results; fails if one got worse.
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks check

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[examples]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[all]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) demo build dist *.egg-info src/*.egg-info .pytest_cache .ruff_cache
