# make demo    sets everything up and trains a small GPT with experts on four processes of this machine
# make test    sets everything up and runs all tests (GPU tests are skipped where there is no GPU)
# make build   editable install for development     make lint / fmt / bench / test-cpp / clean
#
# PIP_ARGS is passed to every pip call, e.g. to take torch's small CPU build on Linux:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# WERROR=ON makes compiler warnings of the extension errors, as continuous integration does. The build
# folder remembers it, and a change compiles everything again.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
PIP_ARGS ?=
JOBS ?= 2
WERROR ?=
# For all installs alike: with other settings one would compile again what another has compiled.
INSTALL := $(PIP) install --quiet $(PIP_ARGS) -c constraints.txt --no-build-isolation \
    $(if $(WERROR),--config-settings=cmake.define.MEGACORE_WERROR=$(WERROR))

SOURCES := $(shell find cpp cuda cmake third_party python -type f \
    -not -path '*/__pycache__/*' 2>/dev/null) CMakeLists.txt pyproject.toml VERSION
CPP_FILES := $(shell find cpp cuda tests/cpp -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test build install test-cpp test-python lint fmt bench clean help

help:
	@sed -n '1,/^$$/p' Makefile

# ---- environment --------------------------------------------------------------------------------
$(VENV)/.base: constraints.txt
	scripts/system_packages.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt scikit-build-core pybind11 ninja cmake torch
	touch $@

$(VENV)/.tools: $(VENV)/.base
	$(PIP) install --quiet $(PIP_ARGS) -c constraints.txt pytest pytest-xdist hypothesis tokenizers transformers ruff mypy \
	    clang-format codespell pre-commit
	touch $@

# The build directory is kept between installs, so only what changed is compiled again.
$(VENV)/.installed: $(VENV)/.base $(SOURCES)
	$(INSTALL) .
	touch $@

install: $(VENV)/.installed

build: $(VENV)/.tools
	$(INSTALL) -e .
	touch $(VENV)/.installed

# ---- what people run ----------------------------------------------------------------------------
demo: install
	rm -rf runs/demo
	$(BIN)/megacore train examples/demo.toml --nproc 4 --train.steps=60
	@echo; echo "The same run goes on with another layout: experts over all four ranks instead of pipeline x expert parallel."
	$(BIN)/megacore train examples/demo.toml --nproc 4 --parallel.pp=1 --parallel.ep=4 --checkpoint.resume=auto
	$(BIN)/megacore generate runs/demo --prompt "The built-in function " --max-new-tokens 200

test: test-cpp test-python

test-cpp: $(VENV)/.tools
	mkdir -p build
	$(BIN)/cmake --preset asan -Wno-dev > build/cmake-asan.log 2>&1 || { cat build/cmake-asan.log; exit 1; }
	$(BIN)/cmake --build --preset asan --parallel $(JOBS)
	$(BIN)/ctest --preset asan --parallel $(JOBS)

test-python: $(VENV)/.tools install
	$(BIN)/python -m pytest -n $(JOBS) tests/unit
	$(BIN)/python -m pytest tests/gpu tests/dist

lint: $(VENV)/.tools install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/codespell

fmt: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

bench: install
	for file in benchmarks/bench_*.py; do $(BIN)/python $$file || exit 1; done

clean:
	rm -rf build dist $(VENV)/.installed
