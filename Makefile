# Every target makes what environment it needs. PYTHON chooses the interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Pinned, so that where a CPU build of this torch is offered it is the one that is taken.
CONSTRAINTS := -c constraints.txt

.PHONY: venv venv-test demo test test-fast chaos gpu test-trl-next clean

venv: $(VENV)/.installed
venv-test: $(VENV)/.installed-test

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --disable-pip-version-check $(CONSTRAINTS) torch
	$(PIP) install --quiet --disable-pip-version-check $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[test]"
	touch $@

demo: venv
	$(BIN)/python src/cli/train.py src/app/trainer_setup_tiny.py --distributed --num-workers 2

LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

test: venv-test
	$(LINT)
	$(BIN)/python -m pytest

test-fast: venv-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports
	$(BIN)/python -m pytest tests/unit tests/queue tests/ipc -x

chaos: venv-test
	$(BIN)/python -m pytest -m slow tests/chaos tests/integration --timeout 3600

gpu: venv-test
	$(BIN)/python -m pytest -m gpu -rA

test-trl-next: venv-test
	test -x .venv-trl-next/bin/python || $(PYTHON) -m venv .venv-trl-next
	grep -v '^trl==' constraints.txt > .venv-trl-next/constraints.txt
	.venv-trl-next/bin/python -m pip install --quiet -c .venv-trl-next/constraints.txt torch
	.venv-trl-next/bin/python -m pip install --quiet -c .venv-trl-next/constraints.txt -e ".[test]" "trl>=1.16,<1.17"
	.venv-trl-next/bin/python -m pytest tests/integration/test_trl_contract.py

clean:
	rm -rf $(VENV) .venv-trl-next build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
