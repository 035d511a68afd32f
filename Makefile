# Everything sets itself up: a fresh clone and Python 3.11 or newer are enough for each of these.
#
#   make demo     three examples, one worker, about ten seconds
#   make test     the suite; one part of it: make test ARGS="tests/unit -k backoff"
#   make test-long     the tests that take long and rarely fail
#   make test-exhaustive   the same tests on more servers, and with more of their parameters: for hours
#   make soak     workers under faults on all four backends, and what came of it: make soak MINUTES=60
#   make lint     ruff (rules and format) and the import contracts
#   make types    mypy --strict
#   make docs     the documentation as a site, in build/docs: begin with build/docs/index.html
#   make bench    multiq on SQLite beside a plain loop over sqlite3
#   make bench-peers   the same work on Celery, RQ, Huey and others; a first look: make bench-peers ARGS=--quick
#   make clean    remove the environment and all caches

ARGS ?=
MINUTES ?= 60
# many tests wait (for leases, due times, servers that start), so more of them than cores run side by side; each process
# more costs ten seconds of CPU, to collect the tests and to start servers of its own
SIDE_BY_SIDE ?= -n 8 --dist worksteal
# thousands of interpreters are started: none of them may compile all modules again, whatever the shell has set
unexport PYTHONDONTWRITEBYTECODE
# in a fresh clone, each of the processes would compile all tests, which takes each of them half a minute
COMPILE = test -d tests/unit/__pycache__ || { echo "compiling the tests, once"; \
	$(BIN)/python -m pytest --collect-only --quiet --quiet -m "not long" >/dev/null || true; }
VENV := .venv
BIN := $(VENV)/bin

# the first interpreter that runs and is new enough; a version manager's stub may be there and not run
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)

# the demo needs little; where all of it is there already, nothing is installed again
DEMO_STAMP := $(if $(wildcard $(VENV)/.dev),$(VENV)/.dev,$(VENV)/.demo)

.PHONY: demo test test-long test-exhaustive soak lint types docs bench bench-peers clean

demo: $(DEMO_STAMP)
	@$(BIN)/python -m examples.demo

test: $(VENV)/.dev
	@.ci/install-servers
	@$(COMPILE)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not long" $(ARGS)

test-long: $(VENV)/.dev
	@.ci/install-servers
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --cache-clear -m "long and not exhaustive" $(ARGS) || $(BIN)/python tests/run_alone.py $$?

test-exhaustive: $(VENV)/.dev
	@.ci/install-servers
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --cache-clear -m exhaustive $(ARGS) || $(BIN)/python tests/run_alone.py $$?

soak: $(VENV)/.dev
	@.ci/install-servers
	$(BIN)/python tests/soak/run_soak.py --minutes $(MINUTES) --page $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --builder html docs build/docs $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/sqlite_beside_baseline.py $(ARGS)

bench-peers: $(VENV)/.dev
	@.ci/install-servers
	PYTHONPATH=benchmarks:tests $(BIN)/python -m peers $(ARGS)

clean:
	rm -rf $(VENV) benchmarks/peers/.envs build dist .tox .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# a stamp is the extra's name with a dot; pyproject.toml newer than the stamp: install again
$(VENV)/.%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "multiq needs Python 3.11 or newer, and none was found on the PATH." \
		"Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "multiq needs Python 3.11 or newer; $(PYTHON) is not." >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version): multiq[$*]"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
