# Every target makes what environment it needs. PYTHON chooses the interpreter: make test PYTHON=python3.13
PYTHON ?= python3
# .venv, unless it is there with another Python: then .venv-python3.13.
VENV := .venv$(if $(wildcard .venv/bin/python),$(if $(wildcard .venv/bin/$(notdir $(PYTHON))),,-$(notdir $(PYTHON))))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Pinned, so that where a CPU build of this torch is offered it is the one that is taken.
CONSTRAINTS := -c constraints.txt

.PHONY: same-python venv venv-test venv-bench bench docs demo test test-all test-quick test-unit chaos fuzz gpu test-matrix test-trl-next test-vllm chaos-vllm experiment-demo test-trackers test-qlora test-triton test-zero3 test-envs test-nodes chaos-nodes test-sagemaker bench-vllm clean

venv: $(VENV)/.installed
venv-test: $(VENV)/.installed-test
venv-bench: $(VENV)/.installed-bench

# Where PYTHON is given, an environment of another Python is not taken for one of this.
VERSION := -c "import sys; print(*sys.version_info[:2], sep=\".\")"
same-python:
ifneq ($(origin PYTHON),file)
	@test ! -x $(BIN)/python || { had=$$($(BIN)/python $(VERSION)) && asked=$$($(PYTHON) $(VERSION)) || exit 1; \
	test "$$had" = "$$asked" || { echo "$(VENV) has Python $$had, and $(PYTHON) is $$asked. Delete $(VENV), or" \
	"choose another folder: make $(MAKECMDGOALS) PYTHON=$(PYTHON) VENV=.venv-$$asked" >&2; exit 1; }; }
endif

$(VENV)/.installed: pyproject.toml src/async_grpo/constraints.txt | same-python
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch, TRL and what they need into $(VENV), 1 to 10 minutes; pip names each package as it comes."
	$(PIP) install --disable-pip-version-check $(CONSTRAINTS) torch
	$(PIP) install --disable-pip-version-check $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[test]"
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[docs]"
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP) install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[bench]"
	touch $@

demo: venv
	$(BIN)/python src/cli/train.py src/app/trainer_setup_tiny.py --distributed --num-workers 2 --eval-every 25

# Two tests at a time, one after another from the slow ones to the quick: most of them wait as often as they compute.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --maxschedchunk 1

LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/python scripts/house.py && $(BIN)/mypy && $(BIN)/lint-imports

# Unit tests, and the first test of each promise in docs/promises.md.
test: venv-test
	$(LINT)
	$(PYTEST) --promised

test-all: venv-test
	$(LINT)
	$(PYTEST)

# What imports no torch and starts no process, found by tests/quick.py; how many there are at least.
QUICK ?= 1500

test-quick: venv-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/python scripts/house.py
	$(PYTEST) tests/unit tests/fuzz --quick $(QUICK)

# How many random configurations are compared with plain TRL.
RANDOM_CONFIGURATIONS ?= 300

# How long the monkey strikes at real runs.
MONKEY_SECONDS ?= 600

# Without a whole run in it: make test-unit PYTHON=python3.13
test-unit: venv-test
	$(PYTEST) -m "not gpu and not slow and not integration" tests/unit

chaos: venv-test
	RANDOM_CONFIGURATIONS=$(RANDOM_CONFIGURATIONS) MONKEY_SECONDS=$(MONKEY_SECONDS) $(BIN)/python -m pytest -m slow tests --timeout 3600

# Model families, adapters and settings, each trained by us and by plain TRL: 5 to 10 minutes.
test-matrix: venv-test
	$(PYTEST) -m slow tests/integration/test_matrix.py --timeout 600

# The address that the site links to as its source.
REPOSITORY ?= $(shell git config --get remote.origin.url 2>/dev/null | grep '^https://')

docs: $(VENV)/.installed-docs
	$(BIN)/python scripts/site_pages.py
	REPOSITORY=$(REPOSITORY) $(BIN)/zensical build --strict --clean
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

# Which of benchmarks/*.py to run, one after another on a quiet machine, e.g. make bench BENCH=staleness
BENCH ?= weights job_queue sandbox tools start evaluation deltas chaos monkey async_vs_trl staleness turn_credit ppo guidance long_run as_they_come
# Options of one of them. These write tables of their own into docs/.
BENCH_async_vs_trl = --update-docs
BENCH_long_run = --update-docs
BENCH_as_they_come = --update-docs
BENCH_turn_credit = --update-docs
BENCH_ppo = --update-docs
BENCH_guidance = --docs
BENCH_staleness = --update-docs --plot docs/images/staleness.png

# vLLM lives in an environment of its own.
bench-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python benchmarks/generators.py --json benchmarks/results/generators.json
	.venv-vllm/bin/python benchmarks/tools.py --vllm --json benchmarks/results/tools_vllm.json
	.venv-vllm/bin/python benchmarks/to_docs.py

bench: venv-bench venv-test
	$(foreach name,$(BENCH),$(BIN)/python benchmarks/$(name).py --json benchmarks/results/$(name).json $(BENCH_$(name)) &&) \
	$(BIN)/python benchmarks/to_docs.py

# 10 minutes for each reader of files; FUZZ="--seconds 60 --only handle": one of them for a minute
FUZZ ?=

fuzz: venv-test
	$(PIP) install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[fuzz]"
	$(BIN)/python benchmarks/fuzz.py $(FUZZ) --json benchmarks/results/fuzz.json
	$(BIN)/python benchmarks/to_docs.py

gpu: venv-test
	$(BIN)/python -m pytest -m gpu -rA

# CI calls it with the newest Python: make test-trl-next PYTHON=python3.13
$(VENV)-trl-next/.installed: $(VENV)/.installed-test src/async_grpo/constraints.txt scripts/env_beside.sh
	VENV=$(VENV) scripts/env_beside.sh $(VENV)-trl-next trl==1.16.0
	touch $@

test-trl-next: $(VENV)-trl-next/.installed
	$(VENV)-trl-next/bin/python -m pytest tests/integration/test_trl_contract*.py tests/integration/test_trl_contract.py tests/integration/test_trl_differential.py tests/integration/test_trl_corrections.py tests/integration/test_multi_task.py tests/integration/test_ppo_trainer.py tests/integration/test_padding.py

.venv-vllm/.installed: pyproject.toml src/async_grpo/constraints.txt scripts/vllm_cpu_env.sh
	PYTHON=$(PYTHON) scripts/vllm_cpu_env.sh .venv-vllm
	touch $@

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/with_vllm

chaos-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m slow tests/with_vllm --timeout 3600

# The clients of W&B and trackio lie beside .venv, where TRL would import them in each test's process.
.venv-trackers/.installed: $(VENV)/.installed-test src/async_grpo/constraints.txt scripts/env_beside.sh
	scripts/env_beside.sh .venv-trackers wandb trackio
	touch $@

# bitsandbytes lies beside .venv too: peft imports it wherever it is, which takes a sixth of a process's start.
.venv-qlora/.installed: $(VENV)/.installed-test src/async_grpo/constraints.txt scripts/env_beside.sh
	scripts/env_beside.sh .venv-qlora bitsandbytes
	touch $@

test-qlora: .venv-qlora/.installed
	.venv-qlora/bin/python -m pytest -k "qlora or quantised" tests/integration/test_lora.py

# A whole experiment, killed twice on the way. DEMO="--update-docs" puts its table and plot into the docs.
DEMO ?=

experiment-demo: venv-test
	$(BIN)/python scripts/experiment_demo.py $(DEMO)

test-trackers: .venv-trackers/.installed
	.venv-trackers/bin/python -m pytest tests/with_trackers

# Triton, which torch for CUDA brings, for its interpreter.
.venv-triton/.installed: $(VENV)/.installed-test scripts/env_beside.sh
	scripts/env_beside.sh .venv-triton triton
	touch $@

test-triton: .venv-triton/.installed
	.venv-triton/bin/python -m pytest tests/with_triton

# SageMaker's SDK 3 has an environment of its own. The test's conftest and settings are those of another one.
.venv-sagemaker/.installed: $(VENV)/.installed-test examples/sagemaker/requirements-sdk3.txt scripts/sagemaker_env.sh
	scripts/sagemaker_env.sh .venv-sagemaker
	touch $@

test-sagemaker: .venv-sagemaker/.installed
	.venv-sagemaker/bin/python -m pytest --noconftest -c /dev/null --rootdir . -p no:cacheprovider tests/with_sagemaker

# The packages of others' environments (verifiers, OpenEnv) lie beside .venv as well.
.venv-envs/.installed: $(VENV)/.installed-test pyproject.toml src/async_grpo/constraints.txt scripts/env_beside.sh
	scripts/env_beside.sh .venv-envs "verifiers[ta]" openenv-core
	touch $@

test-envs: .venv-envs/.installed
	.venv-envs/bin/python -m pytest tests/with_envs

# Ray lies beside .venv: runs with nodes, on a cluster of this machine.
.venv-ray/.installed: $(VENV)/.installed-test pyproject.toml src/async_grpo/constraints.txt scripts/env_beside.sh
	scripts/env_beside.sh .venv-ray "ray==2.60.*"
	touch $@

test-nodes: .venv-ray/.installed
	.venv-ray/bin/python -m pytest -n $(JOBS) --maxschedchunk 1 tests/with_ray tests/unit/nodes

# As root: machines in namespaces of their own, which share nothing but a link. How often they are killed and cut off.
NODE_KILLS ?= 50
NODE_LINKS ?= 10

chaos-nodes: .venv-ray/.installed
	NODE_KILLS=$(NODE_KILLS) NODE_LINKS=$(NODE_LINKS) .venv-ray/bin/python -m pytest -m slow -n $(JOBS) --maxschedchunk 1 tests/with_ray --timeout 3600

# DeepSpeed lies beside .venv, and borrows all else from it. It is built from its sources, which needs a C++ compiler.
.venv-zero3/.installed: $(VENV)/.installed-test src/async_grpo/constraints.txt scripts/deepspeed_env.sh
	scripts/deepspeed_env.sh .venv-zero3
	touch $@

test-zero3: .venv-zero3/.installed
	.venv-zero3/bin/python -m pytest -m slow tests/integration/test_zero3.py

clean:
	rm -rf .venv-ray .venv-envs .venv-sagemaker .venv-trackers .venv-qlora .venv-triton .venv-zero3 .venv-vllm site $(VENV) $(VENV)-trl-next build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
