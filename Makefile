# Everything a contributor runs. Each target works on a fresh clone with nothing but Python 3.11 or newer.
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash
# Tests start hundreds of processes. Without compiled files, each of them spends half a second on compiling ours again.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SEEDS ?= 2000
START ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup lock quick quick-tests room test-pythons test check lint types dependencies audit fmt modules metrics sql-page sync-client openapi-client sim sim-cluster sim-soak demo chaos chaos-log fuzz grow bench-log bench-e2e bench-queries bench-snapshots bench-statemachine bench-authentication dev clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-19s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Make .venv and install everything into it (again only when pyproject.toml or the lock file changes)
	@:

# A Python must be able to create a virtual environment: Debian's lacks ensurepip until python3-venv is installed.
$(STAMP): pyproject.toml requirements/dev.txt requirements/build.txt
	@set -e; \
	if [ ! -x $(BIN)/python ]; then \
		for candidate in python3.11 python3.12 python3.13 python3.14 python3; do \
			if $$candidate -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				python=$$candidate; break; \
			fi; \
		done; \
		if [ -z "$${python:-}" ]; then \
			echo "make setup: no Python 3.11 or newer with the venv module on PATH" \
			     "(Debian, Ubuntu: apt install python3-venv)" >&2; \
			exit 1; \
		fi; \
		echo "==> setup: .venv with $$($$python --version)"; \
		$$python -m venv .venv; \
	fi
	@echo "==> setup: installing holdfast and its development tools"
	@$(PIP) --require-hashes -r requirements/build.txt
	@$(PIP) --require-hashes --no-build-isolation -r requirements/dev.txt
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# Universal: one file for every platform and every Python from 3.11 on. UPGRADE=name takes a newer release of one, UPGRADE=all of all.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' $(if $(filter all,$(UPGRADE)),--upgrade,$(if $(UPGRADE),--upgrade-package $(UPGRADE)))

lock: setup ## Write the lock files (requirements/) from pyproject.toml: UPGRADE=name or UPGRADE=all for newer releases
	@$(PIP) 'uv>=0.9,<1'
	@$(LOCK) --all-extras --group build --output-file requirements/dev.txt pyproject.toml
	@$(LOCK) --extra server --extra s3 --extra otel --output-file requirements/image.txt pyproject.toml
	@$(LOCK) --group build --output-file requirements/build.txt

# In parallel: types on one core, tests on the other.
quick: setup ## Lint, types, pure rooms and structure: the inner loop, half a minute
	@$(MAKE) --jobs=2 --output-sync=target lint types quick-tests

quick-tests: setup ## Run only the tests of make quick
	@echo "==> quick tests"
	@$(BIN)/python -m tests --quick

room: setup ## Run all tests of one room: ROOM=sdk
	@$(if $(ROOM),,$(error which room? make room ROOM=sdk))
	@$(BIN)/python -m pytest -q $(if $(wildcard tests/$(ROOM)),tests/$(ROOM),$(error there is no tests/$(ROOM)))

test-pythons: setup ## Run the quick tests on every supported Python that this machine has
	@$(BIN)/python -m tests.pythons

test: check ## Lint, check types, run every test: the whole of CI
	@echo "==> tests"
	@$(BIN)/python -m tests

check: lint types dependencies ## Lint, check types, and compare the dependencies with known vulnerabilities

lint: setup
	@echo "==> lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --diff .

types: setup
	@echo "==> types: mypy --strict"
	@$(BIN)/mypy --no-error-summary -p holdfast -p tests $(foreach folder,bench docs examples,$(if $(wildcard $(folder)/*.py),-p $(folder)))

# Works without a network: the list is requirements/advisories.toml.
dependencies: setup
	@echo "==> dependencies: pip check, known vulnerabilities"
	@$(BIN)/python -m pip check --disable-pip-version-check > /dev/null || $(BIN)/python -m pip check --disable-pip-version-check
	@$(BIN)/python -m tests.advisories

# In an environment of its own: its dependencies are not ours.
audit: setup ## Ask the public databases for vulnerabilities of the dependencies (pip-audit; needs a network)
	@[ -x .venv-audit/bin/pip-audit ] || { $(BIN)/python -m venv .venv-audit && \
		.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.10,<3'; }
	@.venv-audit/bin/pip-audit --progress-spinner off --strict --disable-pip --require-hashes $(foreach lock,dev image build,-r requirements/$(lock).txt)

modules: setup ## Write docs/modules.md from the docstrings
	@$(BIN)/python -m tests.modules_page

metrics: setup ## Write docs/metrics.md from the collectors
	@$(BIN)/python -m docs.generate

sql-page: setup ## Write docs/sql.md from the tables of SQL queries
	@$(BIN)/python -m tests.sql_page

sync-client: setup ## Write sdk/client/synchronous.py from asynchronous.py
	@$(BIN)/python -m tests.sync_client

# In an environment of its own: neither the generator nor what it generates needs our packages, nor we theirs.
openapi-client: setup ## Generate clients from the OpenAPI documents of a node, and call it with them (needs a network)
	@[ -x .venv-openapi/bin/openapi-python-client ] || { $(BIN)/python -m venv .venv-openapi && \
		.venv-openapi/bin/python -m pip install --quiet --disable-pip-version-check 'openapi-python-client>=0.25,<1' 'ruff>=0.8,<1'; }
	@$(BIN)/python -m tests.openapi_client

fmt: setup ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

sim: setup ## Run the simulator on SEEDS=n seeds from START=s, one PROFILE=p or all in turn
	@$(BIN)/python -m tests.sim --seeds $(SEEDS) --start $(START) $(if $(PROFILE),--profile $(PROFILE)) $(if $(MUTANT),--mutant $(MUTANT))

demo: setup ## Run three nodes under load and kill the leader every few seconds: SECONDS=60
	@$(BIN)/python -m holdfast.chaos.demo --seconds $(or $(SECONDS),60)

chaos: setup ## Inject faults into a whole cluster under load and check the results: SECONDS=180 NODES=3 SEED=n REPLICATION=n ONLY=words
	@$(BIN)/python -m holdfast.chaos --seconds $(or $(SECONDS),180) --nodes $(or $(NODES),3) $(if $(SEED),--seed $(SEED)) $(if $(REPLICATION),--replication $(REPLICATION)) $(if $(ONLY),--only "$(ONLY)")

sim-cluster: setup ## Simulate whole clusters on SEEDS=n seeds from START=s, one PROFILE=p or all in turn
	@$(BIN)/python -m tests.sim.cluster --seeds $(SEEDS) --start $(START) $(if $(PROFILE),--profile $(PROFILE)) $(if $(MUTANT),--mutant $(MUTANT))

sim-soak: setup ## Run random seeds of both simulators at the lowest priority, adding to out/soak.json: HOURS=1 JOBS=1
	@$(BIN)/python -m tests.sim.soak --hours $(or $(HOURS),1) --jobs $(or $(JOBS),1)

grow: setup ## Join, remove and replace real nodes under load while nodes are killed: SECONDS=120 SEED=n
	@$(BIN)/python -m tests.cluster.fleet --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED))

fuzz: setup ## Search for messages that cost a node more than allowed: SECONDS=60 SEED=n
	@$(BIN)/python -m holdfast.chaos.fuzz --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

chaos-log: setup ## Inject faults into real processes of the replicated log for ten minutes
	@$(BIN)/python -m holdfast.chaos.log --seconds 600

bench-e2e: setup ## Measure whole invocations: HTTP to handler and back, on one node with fsync
	@$(BIN)/python bench/e2e.py

bench-log: setup ## Measure the replicated log: throughput, latency, idle CPU, failover
	@$(BIN)/python bench/log.py

bench-queries: setup ## Measure queries over a million invocations on three nodes: INVOCATIONS=n
	@$(BIN)/python -m bench.queries $(if $(INVOCATIONS),--invocations $(INVOCATIONS))

bench-statemachine: setup ## Measure the cost of applying: microseconds per command on LMDB
	@$(BIN)/python -m bench.statemachine

bench-authentication: setup ## Measure what tokens cost: microseconds per request
	@$(BIN)/python -m bench.authentication

bench-snapshots: setup ## Measure snapshots: cut, upload, restore, restart, catch-up, and pauses of the loop
	@$(BIN)/python -m bench.snapshots
	@$(BIN)/python -m bench.snapshots_in_node

dev: setup ## Run one node with an example service: data in .holdfast/, Ctrl-C stops it
	@$(BIN)/holdfast dev --app examples.trips:app

.PHONY: docs
docs: setup ## Build the site of docs/ into build/docs: a broken link, or a code block that does not run, fails
	@$(BIN)/python -m pytest -q tests/docs/test_guide.py
	@$(BIN)/python -m sphinx -b html -E -W --keep-going -q -d build/doctrees docs build/docs
	@echo "==> docs: build/docs/index.html"

clean: ## Remove .venv and every cache
	@rm -rf .venv .venv-3.* .venv-audit .venv-openapi .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist docs/reference
