# make demo   install into .venv, then train the embedded model
# make test   install into .venv with the development tools, then lint, type-check and test
#
# PYTHON  Python interpreter that creates .venv
# TORCH   pip requirement for torch, installed first. Choose the build for your machine, for example
#         make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# TESTS   arguments of pytest

PYTHON ?= python3
TORCH ?= torch==2.13.0
TESTS ?=
VENV ?= .venv
BIN := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint clean

demo: $(VENV)/.installed-demo
	$(BIN)/tunesmith demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(VENV)/.installed-torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH)
	touch $@

$(VENV)/.installed-demo: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/python -m pip install -e ".[agentscope]"
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@
