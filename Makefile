SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVE_ARGS ?=
OBSERVE_ARGS ?=
LOAD_ARGS ?= --url http://127.0.0.1:8080
PYTEST_ARGS ?=

TORCH_VENV := .venv-torch
CUDA_VENV := .venv-cuda
ENGINE_VENV := .venv-engine
LOAD_VENV := .venv-loadtest
CHECK_ARGS ?=

BENCH_ARGS ?=
TP ?= 2
ENGINE_MEASURED := build/engine-h200.json
KERNEL_BENCH = PYTHONPATH=kernels:service:. $(PYTHON) -m kernel_bench

.PHONY: help serve observe load bench-load dashboards test test-chart test-cluster test-image lint format lock bench-commit bench-gateway test-clients test-load clean kernels test-torch check-kernels \
	gpu-payload test-gpu bench-engine plot predict-engine check-tp \
	bench-budget test-engine bench-kernels plot-kernels predict-kernels sanitize-kernels

help: ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

serve: $(VENV)/.runtime ## Start the embedded engine and the gateway; Ctrl-C drains and stops both
	@exec $(BIN)/longleaf serve $(SERVE_ARGS)

observe: $(VENV)/.dev ## Run the service with Prometheus and Alertmanager beside it; OBSERVE_ARGS=--load sends requests too
	@PYTHONPATH=. $(BIN)/python -m ops.observe $(OBSERVE_ARGS)

load: $(LOAD_VENV)/.ready ## Send load to a running gateway; LOAD_ARGS="--plan loadtest/plans/mixed.toml --slo ttft_ms=2000" (see loadtest)
	@PYTHONPATH=loadtest:service $(LOAD_VENV)/bin/python -m longleaf_load $(LOAD_ARGS)

dashboards: $(VENV)/.dev ## Build the dashboards' JSON in ops/dashboards/json
	PYTHONPATH=. $(BIN)/python -m ops.dashboards.build

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

kernels: ## Compile the CUDA kernels in place; needs nvcc, no GPU
	$(PYTHON) kernels/cuda_build.py

test-torch: $(TORCH_VENV)/.ready ## Run the kernels' tests on the CPU, with torch
	$(TORCH_VENV)/bin/python -m pytest tests/kernels $(PYTEST_ARGS)

test-engine: $(ENGINE_VENV)/.ready ## Run the plugin's tests on the CPU, in the real SGLang 0.5.17 with stubs
	$(ENGINE_VENV)/bin/python -m pytest tests/engine $(PYTEST_ARGS)

test-chart: $(VENV)/.dev $(ENGINE_VENV)/.ready ## Run the chart's tests with Helm 3 and 4, SGLang's parser and schemas of Kubernetes 1.30 to 1.35; needs npm
	LONGLEAF_CHART_TOOLS="$$(tests/charts/tools.sh)" LONGLEAF_ENGINE_PYTHON="$(CURDIR)/$(ENGINE_VENV)/bin/python" $(BIN)/python -m pytest tests/charts tests/image/test_dockerfile.py $(PYTEST_ARGS)

test-image: $(VENV)/.dev $(ENGINE_VENV)/.ready $(CUDA_VENV)/.ready ## Build the gateway's image with buildah, chat with it as its own user; run the engine image's steps; needs root
	LONGLEAF_GATEWAY_IMAGE="$$(tests/image/build.sh)" LONGLEAF_ENGINE_PYTHON="$(CURDIR)/$(ENGINE_VENV)/bin/python" \
		LONGLEAF_CUDA_HOME="$$(cd $(CUDA_VENV)/lib/python3*/site-packages/nvidia/cu13 && pwd)" $(BIN)/python -m pytest tests/image $(PYTEST_ARGS)

test-cluster: $(VENV)/.dev ## Run the chart on a real control plane, built once from Debian's source package; needs root
	tests/cluster/run.sh $(PYTEST_ARGS)

check-kernels: $(CUDA_VENV)/.ready ## Compile for every target, hold registers, spills, instructions to kernels/resources.json
	@CUDA_HOME="$$(cd $(CUDA_VENV)/lib/python3*/site-packages/nvidia/cu13 && pwd)" \
		$(CUDA_VENV)/bin/python kernels/check_resources.py $(CHECK_ARGS)

bench-kernels: kernels ## Time the kernels on a GPU against their bars; writes ops/results/kernels-<gpu>.json, .png
	$(KERNEL_BENCH) $(BENCH_ARGS)

plot-kernels: ## Draw the roofline pictures of the committed results again; needs matplotlib
	for results in ops/results/kernels-*.json; do $(KERNEL_BENCH).roofline $$results; done

predict-kernels: ## Print what the model predicts for sm_120a; BENCH_ARGS=--readme renews the README's table
	$(KERNEL_BENCH).predict $(BENCH_ARGS)

sanitize-kernels: kernels ## Run memcheck and racecheck over a small set of launches on a GPU
	$(KERNEL_BENCH).sanitize

gpu-payload: $(VENV)/.dev ## Pack SGLang for a GPU host without a network (see ops/gpu/README.md)
	$(BIN)/python -m ops.gpu.payload

test-gpu: ## On the GPU host: run every test that needs a GPU; PYTEST_ARGS="-k lossless" selects
	bash ops/gpu/host.sh $(PYTHON) -m pytest tests/gpu $(PYTEST_ARGS)

bench-engine: ## On the GPU host: measure SGLang with DDTREE and without; writes ops/results/engine-h200.json
	bash ops/gpu/host.sh $(PYTHON) -m ops.gpu.measure --out $(ENGINE_MEASURED) $(BENCH_ARGS)
	PYTHONPATH=service:kernels:. $(PYTHON) -m ops.gpu.report $(ENGINE_MEASURED)

check-tp: ## On the GPU host: DDTREE on TP GPUs (default 2); writes ops/results/engine-tpN-h200.json
	bash ops/gpu/host.sh $(PYTHON) -m ops.gpu.tp_check --tp $(TP) --out build/engine-tp$(TP).json $(BENCH_ARGS)
	PYTHONPATH=service:kernels:. $(PYTHON) -m ops.gpu.tp_report build/engine-tp$(TP).json

predict-engine: $(VENV)/.dev ## Print what the model predicts for 8 x RTX PRO 6000; BENCH_ARGS=--readme renews ops/gpu/README.md
	PYTHONPATH=kernels:service:. $(BIN)/python -m ops.gpu.predict $(BENCH_ARGS)

plot: $(VENV)/.dev ## Draw step time against context from ops/results/engine-h200.json
	$(BIN)/python -m ops.gpu.plot

# tokenizers declares huggingface-hub, and tiktoken requests, for downloads, which nothing here does, and tiktoken regex
# for a lesson: they and what only they need (30 MB) stay out of the lock. Hence pip's --no-deps below: the lock is the whole list.
HUB_ONLY := huggingface-hub hf-xet fsspec filelock httpx2 httpcore2 truststore pyyaml tqdm \
	requests urllib3 charset-normalizer certifi regex
COMPILE := $(BIN)/pip-compile --quiet --generate-hashes --strip-extras --no-header --no-emit-index-url \
	--no-emit-find-links --no-emit-trusted-host
lock: $(VENV)/.dev ## Resolve the locked versions again
	$(COMPILE) $(HUB_ONLY:%=--unsafe-package %) --build-deps-for wheel --build-deps-for editable -o requirements.lock service/pyproject.toml
	$(COMPILE) --allow-unsafe -o requirements-dev.lock requirements-dev.in

bench-budget: $(VENV)/.dev ## Simulate the adaptive budget on recorded trees; writes ops/results/budget.json
	$(BIN)/python -m ops.bench.budget

test-clients: $(VENV)/.dev .venv-clients/.ready ## Test the gateway with clients of other projects
	$(BIN)/python -m pytest tests/gateway/test_real_clients.py $(PYTEST_ARGS)

test-load: $(VENV)/.dev $(LOAD_VENV)/.ready ## Test the load tests with Locust, from beginning to end
	$(BIN)/python -m pytest tests/loadtest/test_run.py tests/loadtest/test_close.py tests/loadtest/test_workers.py $(PYTEST_ARGS)

bench-gateway: $(VENV)/.dev .venv-peers/.ready .venv-litellm/.ready ## Measure the gateway beside its peers; writes ops/results/gateway.json
	$(BIN)/python -m ops.bench.gateway $(BENCH_ARGS)

bench-load: $(VENV)/.dev $(LOAD_VENV)/.ready .venv-clients/.ready ## Load the service to saturation and beyond, embedded and simulated; writes ops/results/load-*.json
	@PYTHONPATH=.:loadtest $(BIN)/python -m ops.bench.load $(BENCH_ARGS)

clean: ## Remove the venv and caches
	rm -rf $(VENV) $(TORCH_VENV) $(ENGINE_VENV) $(CUDA_VENV) $(LOAD_VENV) .venv-peers .venv-litellm .venv-clients build kernels/longleaf_kernels/lib .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

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

$(TORCH_VENV)/.ready: requirements-torch.txt
	@echo "installing torch into $(TORCH_VENV)"
	@$(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-torch.txt
	@touch $@

$(ENGINE_VENV)/.ready: requirements-torch.txt requirements-engine.txt
	@echo "installing SGLang into $(ENGINE_VENV)"
	@$(PYTHON) -m venv $(ENGINE_VENV)
	@$(ENGINE_VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements-torch.txt
	@$(ENGINE_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-engine.txt
	@touch $@

$(CUDA_VENV)/.ready: requirements-cuda.txt
	@echo "installing nvcc into $(CUDA_VENV)"
	@$(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements-cuda.txt
	@touch $@

$(LOAD_VENV)/.ready: loadtest/requirements.txt
	@echo "installing the load tests into $(LOAD_VENV)"
	@$(PYTHON) -m venv $(LOAD_VENV)
	@$(LOAD_VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r loadtest/requirements.txt
	@touch $@

.venv-%/.ready: requirements-%.txt
	@echo "installing $* into .venv-$*"
	@$(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/pip install --quiet --disable-pip-version-check -r requirements-$*.txt
	@touch $@
