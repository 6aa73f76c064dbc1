# make demo      sets everything up and trains a small GPT with experts on four processes of this machine
# make test      sets everything up and runs the tests (GPU tests are skipped where there is no GPU)
# make test-all  the same, then C++ under sanitizers and the campaigns: complete matrices, many kills
# make test-aarch64  builds the C++ core for 64-bit Arm and runs its tests in an emulator (see CONTRIBUTING.md)
# make build     editable install for development
# make cuda      installs with the CUDA kernels, GPU or not, and tests what can be tested without a GPU
# make gpu-bundle  makes build/gpu-bundle, all that scripts/gpu_check.sh needs on a machine with a GPU and no network
# make docs      builds the documentation site in build/site and checks its links (half a minute)
# make lint / fmt / bench / clean
# make lint-quick  what lint checks without a build: ruff, formats, spelling (seconds; pre-commit runs it)
# make bench-peers   measures training steps beside transformers, torch.compile, Megatron-Core and torch's
#                    ways of data parallelism, in at most half an hour
#
# PIP_ARGS is passed to every pip call, e.g. to take torch's small CPU build on Linux:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
# MEGACORE_CUDA=ON|OFF|AUTO and MEGACORE_CUDA_ARCHS=90a,100a choose the device code; AUTO: for the GPUs at hand.
# MEGACORE_AVX512=OFF leaves out kernels for AVX-512; bench-peers then holds all libraries to AVX2.
# WERROR=ON makes compiler warnings of the extension errors, as continuous integration does.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
PIP_ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
WERROR ?=
export MEGACORE_CUDA ?= AUTO
export MEGACORE_CUDA_ARCHS ?=
export MEGACORE_AVX512 ?= ON
PROGRESS := $(PYTHON) scripts/progress.py
# For all installs alike: with other settings one would compile again what another has compiled.
INSTALL := $(PROGRESS) "Compiling and installing megacore" build/install.log \
    $(PIP) install --verbose $(PIP_ARGS) -c constraints.txt --no-build-isolation \
    $(if $(WERROR),--config-settings=cmake.define.MEGACORE_WERROR=$(WERROR))

SOURCES := $(shell find cpp cuda cmake third_party python -type f \
    -not -path '*/__pycache__/*' 2>/dev/null) CMakeLists.txt pyproject.toml VERSION
CPP_FILES := $(shell find cpp cuda tests/cpp -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-all test-cpp test-python test-asan test-aarch64 test-campaigns build install cuda gpu-bundle docs lint lint-quick fmt bench bench-peers clean help

help:
	@sed -n '1,/^$$/p' Makefile

# ---- environment --------------------------------------------------------------------------------
$(VENV)/.base: constraints.txt
	@scripts/system_packages.sh
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)  # pip comes last
	@$(PROGRESS) "Installing torch and the build tools" build/base.log \
	    $(PIP) install $(PIP_ARGS) -c constraints.txt scikit-build-core pybind11 ninja cmake torch
	@touch $@

$(VENV)/.tools: $(VENV)/.base
	@scripts/system_packages.sh tests
	@$(PROGRESS) "Installing the tools for tests" build/tools.log \
	    $(PIP) install $(PIP_ARGS) -c constraints.txt pytest pytest-xdist hypothesis tokenizers \
	    pyarrow tensorboard transformers wandb ruff mypy clang-format codespell pre-commit
	@$(PROGRESS) "Installing trl and peft, for tests" build/trl.log \
	    $(PIP) install $(PIP_ARGS) -c constraints.txt --no-deps trl peft accelerate psutil \
	    datasets dill multiprocess pandas python-dateutil
	@touch $@

# What the last install was made of: other settings, or a file more or less, are another install.
SETTINGS = $(MEGACORE_CUDA) $(MEGACORE_CUDA_ARCHS) $(MEGACORE_AVX512) $(WERROR) $(shell echo $(sort $(SOURCES)) | cksum)
$(VENV)/.settings: FORCE
	@mkdir -p $(VENV)
	@echo "$(SETTINGS)" | cmp -s - $@ || echo "$(SETTINGS)" > $@
FORCE:

# The build directory is kept between installs, so only what changed is compiled again. After `make
# build` the installation stays editable.
$(VENV)/.installed: $(VENV)/.base $(VENV)/.settings $(SOURCES)
	@$(INSTALL) $(if $(wildcard $(VENV)/.editable),-e) .
	@touch $@

install: $(VENV)/.installed

build: $(VENV)/.tools $(VENV)/.settings
	@rm -f $(VENV)/.installed
	@$(INSTALL) -e .
	@touch $(VENV)/.editable $(VENV)/.installed

# ---- what people run ----------------------------------------------------------------------------
demo: install
	rm -rf runs/demo
	$(BIN)/megacore train examples/demo.toml --nproc 4 --parallel.pp=1 --parallel.ep=4 --train.steps=60
	@echo; echo "The same run goes on with another layout: pipeline x expert parallel instead of experts over all four ranks."
	$(BIN)/megacore train examples/demo.toml --nproc 4 --checkpoint.resume=auto
	$(BIN)/megacore generate runs/demo --prompt "The built-in function " --max-new-tokens 200

test: test-cpp test-python

test-all: test test-asan test-campaigns

test-cpp: $(VENV)/.tools
	$(call run-cpp-tests,cpu,C++ tests)

test-asan: $(VENV)/.tools
	$(call run-cpp-tests,asan,C++ tests under sanitizers)

test-aarch64: $(VENV)/.tools
	$(call run-cpp-tests,aarch64,C++ tests for 64-bit Arm)

define run-cpp-tests
@$(PROGRESS) "Configuring the $(2)" build/cmake-$(1).log $(BIN)/cmake --preset $(1) -Wno-dev
@$(PROGRESS) "Compiling the $(2)" build/compile-$(1).log $(BIN)/cmake --build --preset $(1) --parallel $(JOBS)
@$(PROGRESS) "Running the $(2)" build/ctest-$(1).log $(BIN)/ctest --preset $(1) --parallel $(JOBS)
endef

# What tests of kernels on a GPU can show without one, see tests/support/emulated_gpu.py.
KERNEL_TESTS := $(wildcard tests/gpu/test_*_kernel*.py) tests/gpu/test_adamw.py tests/gpu/test_fp8.py \
    tests/gpu/test_small_cases.py

test-python: $(VENV)/.tools install
	$(BIN)/python -m pytest -n $(JOBS) tests/unit
	$(BIN)/python -m pytest -n $(JOBS) -p tests.support.emulated_gpu $(KERNEL_TESTS)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/gpu tests/dist

test-campaigns: $(VENV)/.tools install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m campaign $(CAMPAIGNS)

CUDA_ARCHS ?= 80,90a,100a,120a

cuda:
	$(MAKE) install MEGACORE_CUDA=ON MEGACORE_CUDA_ARCHS=$(CUDA_ARCHS)
	$(MAKE) $(VENV)/.tools
	$(BIN)/python -m pytest tests/unit/test_stubs.py tests/unit/test_native_modules.py tests/unit/ops

# Sources, a wheel with kernels for BUNDLE_ARCHS made by PYTHON (use the GPU machine's version), what the
# tests need beside torch, and CUTLASS's headers in case the wheel does not import there.
BUNDLE := build/gpu-bundle
BUNDLE_ARCHS ?= 90a
BUNDLE_NEEDS := pydantic pydantic-core annotated-types typing-extensions typing-inspection rich markdown-it-py \
    mdurl pygments safetensors tomli-w pytest iniconfig packaging pluggy hypothesis sortedcontainers attrs \
    scikit-build-core pathspec pybind11

gpu-bundle: $(VENV)/.base
	rm -rf $(BUNDLE)
	mkdir -p $(BUNDLE)/wheels $(BUNDLE)/cutlass
	git archive HEAD | tar -x -C $(BUNDLE)
	$(PIP) download --quiet --no-deps nvidia-cutlass==4.2.0.0 -d build/cutlass-wheel
	test -d build/cutlass-wheel/unpacked || \
	    $(BIN)/python -m zipfile -e build/cutlass-wheel/nvidia_cutlass-*.whl build/cutlass-wheel/unpacked
	cp -rp build/cutlass-wheel/unpacked/cutlass_library/source/include $(BUNDLE)/cutlass/include
	CUTLASS_ROOT=$(CURDIR)/$(BUNDLE)/cutlass MEGACORE_CUDA=ON MEGACORE_CUDA_ARCHS=$(BUNDLE_ARCHS) \
	    $(PIP) wheel --quiet --no-deps --no-build-isolation -w $(BUNDLE)/wheels .
	$(PIP) download --quiet --no-deps --only-binary=:all: -c constraints.txt -d $(BUNDLE)/wheels $(BUNDLE_NEEDS)
	git rev-parse HEAD > $(BUNDLE)/COMMIT
	@size=$$(du -sm $(BUNDLE) | cut -f1); echo "$(BUNDLE): $$size MB"; test $$size -le 60

$(VENV)/.docs: $(VENV)/.base
	@$(PROGRESS) "Installing the tools for the documentation" build/docs-tools.log \
	    $(PIP) install $(PIP_ARGS) -c constraints.txt mkdocs-material mkdocstrings-python
	@touch $@

# Without the theme's announcement of its next major version.
docs: $(VENV)/.docs install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python scripts/docs_site.py build/site

# Three small tools: no torch, no compiler.
$(VENV)/.lint: constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(PROGRESS) "Installing the tools for formats and spelling" build/lint-tools.log \
	    $(PIP) install $(PIP_ARGS) -c constraints.txt ruff clang-format codespell
	@touch $@

lint-quick: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/codespell

lint: lint-quick $(VENV)/.tools install
	$(BIN)/mypy

fmt: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CPP_FILES)

bench: install
	for file in $(filter-out %/bench_peers.py,$(wildcard benchmarks/bench_*.py)); do $(BIN)/python $$file || exit 1; done

# The peers have an environment of their own: megacore's stays as it is.
build/peers/.installed: constraints.txt
	@test -x build/peers/bin/pip || $(PYTHON) -m venv --clear build/peers
	@$(PROGRESS) "Installing the peers" build/peers.log \
	    build/peers/bin/pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch numpy transformers
	@$(PROGRESS) "Installing Megatron-Core without its CUDA packages" build/megatron.log \
	    build/peers/bin/pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt --no-deps megatron-core
	@touch $@

bench-peers: install build/peers/.installed
	$(BIN)/python benchmarks/bench_peers.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/plot_history.py

clean:
	rm -rf build dist $(VENV)/.installed
