SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE_ARGS ?=
PYTEST_ARGS ?=

.PHONY: help serve test lint format lock bench-commit clean

help: ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

serve: $(VENV)/.runtime ## Start the embedded engine and the gateway; Ctrl-C drains and stops both
	@exec $(BIN)/longleaf serve $(SERVE_ARGS)

test: $(VENV)/.dev ## Run every test that needs neither GPU nor torch
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## Lint, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev ## Format and apply the linter's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-commit: $(VENV)/.dev ## Measure commit_len, losslessness and speed; writes ops/results/commit.json
	$(BIN)/python -m ops.bench.commit

# tokenizers declares huggingface-hub for downloads from a hub, which nothing here does: it and what only it needs
# (30 MB) stay out of the lock. Hence pip's --no-deps below: the lock is the whole list.
HUB_ONLY := huggingface-hub hf-xet fsspec filelock httpx2 httpcore2 truststore pyyaml tqdm
COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-header --no-emit-index-url \
	--no-emit-find-links --no-emit-trusted-host
lock: $(VENV)/.dev ## Resolve the locked versions again
	$(COMPILE) $(HUB_ONLY:%=--unsafe-package %) --build-deps-for wheel --build-deps-for editable -o requirements.lock service/pyproject.toml
	$(COMPILE) --allow-unsafe -o requirements-dev.lock requirements-dev.in

clean: ## Remove the venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "longleaf needs Python 3.11 or newer, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV) || { echo "cannot make a venv with $(PYTHON): on Debian, apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.runtime: requirements.lock service/pyproject.toml | $(VENV)/bin/pip
	@echo "installing the service into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable service
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.runtime
	@echo "installing what tests and checks need into $(VENV)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-dev.lock
	@touch $@
