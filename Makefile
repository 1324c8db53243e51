# Each goal does all its own set-up in .venv, from the pinned versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install quickstart test lint bench soak clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Rostra needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/installed-%: .venv/installed
	$(PIP) --editable '.[$*]'
	@touch $@

# The metadata of mosaicml-streaming forbids recent versions of what it stands on.
.venv/installed-test: .venv/installed
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps mosaicml-streaming
	@touch $@

quickstart: .venv/installed
	$(BIN)/rostra train examples/quickstart.yaml

test: .venv/installed-test
	$(BIN)/python -m pytest

soak: .venv/installed-test .venv/installed-bench
	$(BIN)/python -m pytest -m soak

lint: .venv/installed-lint .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-bench
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/activations.py --samples 8 --rounds 3 --bf16
	$(BIN)/python benchmarks/plan_time.py --calibrate

clean:
	rm -rf .venv runs
