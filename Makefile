# Everything a contributor runs. Each target works on a fresh clone with nothing but Python 3.11 or newer.
MAKEFLAGS += --no-print-directory
SHELL := /bin/bash

BIN := .venv/bin
STAMP := .venv/.installed
SEEDS ?= 2000
START ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup test check lint types fmt sim sim-cluster demo chaos chaos-log grow bench-log bench-e2e bench-snapshots bench-statemachine dev clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Make .venv and install everything into it (again only when pyproject.toml changes)
	@:

# A Python counts only if it can make a virtual environment: Debian's lacks ensurepip until python3-venv is installed.
$(STAMP): pyproject.toml
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
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

test: check ## Lint, check types, run every test: the whole of CI
	@echo "==> tests"
	@$(BIN)/python -m tests

check: lint types ## Lint and check types

lint: setup
	@echo "==> lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --diff .

types: setup
	@echo "==> types: mypy --strict"
	@$(BIN)/mypy --no-error-summary -p holdfast -p tests $(foreach folder,bench examples,$(if $(wildcard $(folder)/*.py),-p $(folder)))

fmt: setup ## Format the code and fix what can be fixed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

sim: setup ## Run the simulator on SEEDS=n seeds from START=s, one PROFILE=p or all in turn
	@$(BIN)/python -m tests.sim --seeds $(SEEDS) --start $(START) $(if $(PROFILE),--profile $(PROFILE)) $(if $(MUTANT),--mutant $(MUTANT))

demo: setup ## Three nodes on this machine under load, the leader killed every few seconds: SECONDS=60
	@$(BIN)/python -m holdfast.chaos.demo --seconds $(or $(SECONDS),60)

chaos: setup ## Faults on a whole cluster under load, and a verdict: SECONDS=180 NODES=3 SEED=n REPLICATION=n ONLY=words
	@$(BIN)/python -m holdfast.chaos --seconds $(or $(SECONDS),180) --nodes $(or $(NODES),3) $(if $(SEED),--seed $(SEED)) $(if $(REPLICATION),--replication $(REPLICATION)) $(if $(ONLY),--only "$(ONLY)")

sim-cluster: setup ## Simulate whole clusters on SEEDS=n seeds from START=s, one PROFILE=p or all in turn
	@$(BIN)/python -m tests.sim.cluster --seeds $(SEEDS) --start $(START) $(if $(PROFILE),--profile $(PROFILE)) $(if $(MUTANT),--mutant $(MUTANT))

grow: setup ## Real nodes join, leave and are replaced under load, and are killed meanwhile: SECONDS=120 SEED=n
	@$(BIN)/python -m tests.cluster.fleet --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED))

chaos-log: setup ## Ten minutes of faults on real processes of the replicated log
	@$(BIN)/python -m holdfast.chaos.log --seconds 600

bench-e2e: setup ## Measure whole invocations: HTTP to handler and back, on one node with fsync
	@$(BIN)/python bench/e2e.py

bench-log: setup ## Measure the replicated log: throughput, latency, idle CPU, failover
	@$(BIN)/python bench/log.py

bench-statemachine: setup ## Measure what applying costs: microseconds per command on LMDB
	@$(BIN)/python -m bench.statemachine

bench-snapshots: setup ## Measure snapshots: cut, upload, restore, restart, catching up, and how long the loop is held up
	@$(BIN)/python -m bench.snapshots
	@$(BIN)/python -m bench.snapshots_in_node

dev: setup ## Run one node with an example service: data in .holdfast/, Ctrl-C stops it
	@$(BIN)/holdfast dev --app examples.trips:app

clean: ## Remove .venv and every cache
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
