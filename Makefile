# Everything starts from a bare machine with Python 3.11 or 3.12: each target makes the environment first.
#   make train [ARGS="--data.path FILE --data.format criteo-tsv"]      make test [ARGS="tests/oracle -x"]
# BAGPIPE_DEVICE=cpu|cuda chooses the builds (default: cuda where nvidia-smi is found); PYTHON= the interpreter.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
CONFIG ?= trainer/configs/synthetic.toml
ARGS ?=
SOAK_S ?= 3600
BASE ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-full check lint format suite browser search chaos jepsen fuzz same-bits soak gpu docs docs-commands locks sbom setup clean

help: ## show this help
	@grep -hE '^[a-z][a-z%-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z%-]+):[^#]*## /\1|/' | \
	    while IFS='|' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

train: setup ## train (synthetic data unless ARGS says otherwise)
	@$(PY) -m trainer --config $(CONFIG) $(ARGS)

# mypy uses one core for most of a minute: beside the tests it fills the time in which they wait.
test: lint ## linters, types and the whole test suite
	@types=$$(mktemp); nice -n 5 $(PY) -m mypy > $$types 2>&1 & pid=$$!; \
	trap 'kill $$pid 2> /dev/null; rm -f $$types' EXIT; \
	$(MAKE) --no-print-directory suite; tests=$$?; \
	wait $$pid; checked=$$?; cat $$types; \
	[ $$tests = 0 ] && [ $$checked = 0 ]

check: lint ## ruff, formatting, mypy --strict
	$(PY) -m mypy

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# Tests with servers or processes wait for half of their time, those marked `alone` for most of it. The pure tests fill
# the gaps at a lower priority, so each may take longer; their output follows, and last the names of all tests that
# failed. Exit code 5 of pytest: no test of that part was chosen.
PYTEST := $(PY) -m pytest
ON_ALL_CORES := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# One worker more than cores: their tests wait for servers and processes. Each worker imports all files of its part.
WITH_PROCESSES := -n $$(( $$(nproc) < 4 ? $$(nproc) + 1 : 4 )) --dist loadfile --no-loadscope-reorder
suite: export PYTHONDONTWRITEBYTECODE = # hundreds of processes import the same files
suite: setup browser ## the test suite only (ARGS go to pytest)
	@pure=$$(mktemp); rest=$$(mktemp); \
	nice -n 5 $(PYTEST) $(ON_ALL_CORES) --timeout 600 -o faulthandler_timeout=900 \
	    -m "not (alone or redis or multiproc or gpu or slow)" $(ARGS) > $$pure 2>&1 & pid=$$!; \
	trap 'kill $$pid 2> /dev/null; cat $$pure; grep -hE "^(FAILED|ERROR) " $$rest $$pure; rm $$pure $$rest' EXIT; \
	$(PYTEST) -m "alone and not (gpu or slow)" $(ARGS) 2>&1 | tee -a $$rest; codes=$${PIPESTATUS[0]}; \
	$(PYTEST) $(WITH_PROCESSES) -m "(redis or multiproc) and not (alone or gpu or slow)" $(ARGS) 2>&1 | tee -a $$rest; \
	codes="$$codes $${PIPESTATUS[0]}"; \
	wait $$pid; codes="$$codes $$?"; \
	for code in $$codes; do [ $$code = 0 ] || [ $$code = 5 ] || exit $$code; done

test-full: test ## `make test`, then tests marked slow, full products of settings among them, and twice the random examples
	$(PYTEST) $(ON_ALL_CORES) --timeout 3600 -o faulthandler_timeout=3900 --hypothesis-profile full \
	    -m "(slow or hypothesis) and not gpu" $(ARGS) || [ $$? = 5 ]

browser: setup ## a headless browser for the report's test, where the machine has none and npm can fetch one
	@$(PY) -m tools.make_browser

search: setup ## property tests on new random examples, ten times as many
	$(PY) -m pytest --hypothesis-profile search --timeout 0 -o faulthandler_timeout=0 $(ARGS)

chaos: setup ## kill, rob and fool small jobs, and compare how they end (ARGS="--runs 20 --seed 7")
	$(PY) -m tests.harness.chaos $(if $(ARGS),$(ARGS),--runs 200)

jepsen: setup ## histories of a store under kills, cuts and takeovers, judged by a checker (ARGS="--runs 20 --seed 7")
	$(PY) -m tests.harness.histories $(if $(ARGS),$(ARGS),--runs 100)

fuzz: setup ## random jobs, each without a cache, with one, and killed and resumed (ARGS="--runs 20 --seed 7 --jobs 2")
	$(PY) -m tests.harness.fuzz $(if $(ARGS),$(ARGS),--runs 200)

same-bits: setup ## the results of another commit, compared with this checkout's (BASE=7bfa9477 ARGS="--jobs 2 --only chimera")
	$(PY) -m tests.harness.same_bits --base "$(BASE)" $(ARGS)

soak: setup ## one long job whose memory, descriptors and threads must stay flat (SOAK_S seconds, default an hour)
	$(PY) -m tests.harness.soak --seconds $(SOAK_S) $(ARGS)

# Not after `setup`: an interpreter that has torch for the card is used as it is, on a machine without the internet too.
gpu: ## tests on a CUDA device, then benchmarks/gpu (PYTHON= an interpreter with torch; ARGS=--rehearse: on the CPU)
	@$(or $(PYTHON),python3) tools/run_gpu.py $(if $(PYTHON),--this-python) $(ARGS)

format: setup ## format and fix what ruff can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup ## build the documentation site with the API reference into site/; warnings are errors
	@$(PY) -m tools.make_docs $(ARGS)

docs-commands: setup ## run the commands of README, docs and examples, in a checkout and from the wheel
	$(PYTEST) -o faulthandler_timeout=0 -m "slow or not slow" tests/docs/test_commands_run.py $(ARGS)

locks: setup ## write tools/locks anew from pyproject.toml (ARGS="--upgrade" or "--upgrade-package NAME")
	@$(PY) -m tools.make_locks $(ARGS)

sbom: setup ## write the bill of materials of .venv and the project, CycloneDX JSON, into dist/
	@$(PY) -m tools.make_sbom $(ARGS)

bench-%: setup ## run benchmarks/<name>, for example make bench-planner
	$(PY) -m benchmarks.$*.main $(ARGS)

# The script compares digests, so an environment that is ready costs a few milliseconds.
setup: ## make or update .venv
	@python=; for candidate in $(if $(PYTHON),$(PYTHON),python3 python3.12 python3.11); do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; \
	    then python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then echo "make: Python 3.11 or 3.12 is needed; name one with PYTHON=" >&2; exit 1; fi; \
	$$python tools/make_venv.py

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
