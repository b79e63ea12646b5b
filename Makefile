# make demo   install into .venv, then train the embedded model
# make test   install into .venv with the development tools, then lint, type-check, build the documentation and test
# make docs   build the documentation site into site/; a broken link or an undocumented page is an error
# make release   build sdist and wheel, and run the demo from the wheel in a fresh environment of each of PYTHONS
#
# PYTHON  Python interpreter that creates .venv
# TORCH   pip requirement for torch, installed first. Choose the build for your machine, for example
#         make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# TESTS   arguments of pytest
# WORKERS processes that run tests; some of them wait at any time, so one more than a small machine has cores
# PYTHONS interpreters that `make release` tests the wheel with

PYTHON ?= python3
TORCH ?= torch==2.13.0
TESTS ?=
WORKERS ?= 4
PYTHONS ?= python3.11 python3.13
VENV ?= .venv
BIN := $(VENV)/bin

export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
unexport PYTHONDONTWRITEBYTECODE

MAKEFLAGS += --jobs=2

.PHONY: demo test lint docs pytest release clean

demo: $(VENV)/.installed-demo
	$(BIN)/tunesmith demo

# Two at a time: documentation beside type checks, then tests beside what is left of them.
test: lint docs pytest

pytest: $(VENV)/.installed-test | docs
	$(BIN)/python -m pytest --workers $(WORKERS) $(TESTS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

release: $(VENV)/.installed-test
	$(BIN)/python -m pip install -e ".[release]"
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	PYTHONS="$(PYTHONS)" TORCH="$(TORCH)" .ci/check_wheel dist/*.whl

clean:
	rm -rf $(VENV) site dist

# uv takes seconds where pip takes minutes. pip chooses the wheel of torch, since its configuration may name the build for
# this machine, and installs where only it knows the package index.
$(VENV)/.installed-torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is required: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install uv \
		&& $(BIN)/python -m pip download --no-deps --dest $(VENV)/torch $(TORCH) \
		&& $(BIN)/uv pip install --python $(BIN)/python $(VENV)/torch/*.whl \
		|| $(BIN)/python -m pip install $(TORCH)
	rm -rf $(VENV)/torch
	touch $@

$(VENV)/.installed-demo: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/python -m pip install -e ".[agentscope]"
	touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/uv pip install --python $(BIN)/python -e ".[dev,docs]" || $(BIN)/python -m pip install -e ".[dev,docs]"
	touch $@
