# Two commands: `make demo` trains a small model end to end, `make test` runs every check.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
LOWEST := .venv-lowest
NEWEST := .venv-newest
VLLM   := .venv-vllm
GYM    := .venv-gym
TRITON := .triton
WHEEL  := .venv-wheel

.PHONY: demo test test-browser test-deep test-lowest test-newest test-vllm test-gpu gpu-day test-gym test-ray test-triton test-wheel lint types docs models-table bench bench-peer bench-peer-sweep clean

demo: $(STAMP)
	@$(BIN)/oppo demo $(DEMO)

test: $(STAMP) lint types
	$(BIN)/pytest $(WORKERS) -m "not browser and not deep and not gpu and not gym and not ray and not triton and not vllm and not wheel" --durations=15

# A file's tests share what they have made, so each file is one worker's.
WORKERS ?= --numprocesses logical --maxprocesses 8 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy --num-workers auto

# More random examples, drawn anew where `make test` has the same each time; fewer are quicker: make test-deep SCHEDULES=2000
SCHEDULES ?= 10000
test-deep: $(STAMP)
	OPPO_SCHEDULES=$(SCHEDULES) $(BIN)/pytest $(WORKERS) -m "(deep or schedules or hypothesis) and not browser and not gpu and not gym and not ray and not triton and not vllm and not wheel" --timeout=1800 --durations=15 $(DEEP_TESTS)

# The lowest versions that pyproject.toml allows: the examples, what loads and serves models, whole runs.
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest $(WORKERS) -m "not browser and not deep and not gpu and not gym and not ray and not triton and not vllm and not wheel" --durations=5 $(LOWEST_TESTS)

# The newest versions that there are, which today exclude PEFT's adapters.
test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest $(WORKERS) -m "not adapters and not browser and not deep and not gpu and not gym and not ray and not triton and not vllm and not wheel" --durations=5 $(NEWEST_TESTS)

LOWEST_TESTS ?= tests/examples tests/graph tests/hf/kv/test_reader.py tests/hf/test_loading.py tests/hf/test_lora.py \
	tests/hf/test_servable.py tests/hf/train/test_trainer.py tests/report tests/run/test_checkpoint.py tests/config/test_settings.py \
	tests/run/test_train.py tests/test_cli.py tests/test_libraries.py tests/data \
	tests/docs/test_readme.py
NEWEST_TESTS ?= $(LOWEST_TESTS) tests/hf/test_architectures.py tests/hf/train/test_actor_critic.py

$(LOWEST)/.installed: RESOLUTION := lowest-direct
$(NEWEST)/.installed: RESOLUTION := highest
# But for torch, whose build stays the one that pip finds: another is a CUDA build of several GB.
$(LOWEST)/.installed $(NEWEST)/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(@D)/bin/pip list --disable-pip-version-check --format=freeze | grep '^torch==' > $(@D)/constraints.txt
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --upgrade --resolution $(RESOLUTION) \
		-c $(@D)/constraints.txt -e '.[examples,quantization,test,trackers]'
	@touch $@

# The real vLLM on a CPU, in an environment of its own; its modules warn of their own doings.
test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -W default -m vllm --durations=10 $(VLLM_TESTS)

VLLM_TESTS ?= tests/vllm/real

# Its pins come before those of the constraints, which name other versions of what both need.
$(VLLM)/.installed: pyproject.toml constraints.txt tests/vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	cat tests/vllm/requirements.txt constraints.txt | awk -F== '!/^#/ && !seen[tolower($$1)]++' > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c $(VLLM)/constraints.txt torch
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/vllm/requirements.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c $(VLLM)/constraints.txt -e '.[ray,test]'
	@touch $@

# The page of a run in Chromium, which is to be on the path: on Debian, apt-get install chromium.
test-browser: $(STAMP)
	$(BIN)/pytest -m browser -s --durations=5 tests/report/test_browser.py

# The built wheel, alone and with each extra alone. The environment has the pinned versions, extras the newest that fit.
test-wheel: $(STAMP) $(WHEEL)/.installed
	$(BIN)/pytest -m wheel --durations=10 tests/test_wheel.py

$(WHEEL)/.installed: pyproject.toml constraints.txt README.md $(shell find oppo -name '*.py' -o -name '*.toml' -o -name '*.js')
	test -x $(WHEEL)/bin/python || $(PYTHON) -m venv $(WHEEL)
	rm -rf $(WHEEL)/dist
	$(WHEEL)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch uv
	$(WHEEL)/bin/pip list --disable-pip-version-check --format=freeze | grep '^torch==' > $(WHEEL)/torch.txt
	$(WHEEL)/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(WHEEL)/dist .
	$(WHEEL)/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps $(WHEEL)/dist/oppo-*.whl
	$(WHEEL)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt $(WHEEL)/dist/oppo-*.whl
	@touch $@

# Clusters of several machines on this one.
test-ray: $(STAMP)
	$(BIN)/pytest -m ray --durations=10 tests/placement/ray

# Tasks of reasoning-gym, a taskset of verifiers, TRL's tool loop and servers of OpenEnv, in environments of their own:
# the first need a compiler, verifiers has no newer openai, and OpenEnv no newer mcp. Their modules warn of their own
# doings.
test-gym: $(GYM)/.installed
	$(GYM)/bin/python -m pytest $(WORKERS) -W default -m gym --durations=5 $(GYM_TESTS)

GYM_TESTS ?= tests/rewards/test_gym.py tests/examples/test_rlhf.py tests/examples/test_verifiers.py tests/test_openenv.py \
	tests/test_trl_environments.py tests/config/test_counts.py tests/config/test_sdpo.py

# pip would refuse the older openai, which the extra `test` excludes.
$(GYM)/.installed: pyproject.toml constraints.txt tests/gym-requirements.txt
	test -x $(GYM)/bin/python || $(PYTHON) -m venv $(GYM)
	cat tests/gym-requirements.txt constraints.txt | awk -F== '!/^#/ && !seen[tolower($$1)]++' > $(GYM)/constraints.txt
	$(GYM)/bin/pip install --quiet --disable-pip-version-check -c $(GYM)/constraints.txt torch uv
	$(GYM)/bin/uv pip install --quiet --python $(GYM)/bin/python -c $(GYM)/constraints.txt \
		--override tests/gym-requirements.txt -r tests/gym-requirements.txt -e '.[reasoning-gym,test,verifiers]'
	$(GYM)/bin/uv venv --quiet --allow-existing --python $(GYM)/bin/python $(GYM)/openenv
	$(GYM)/bin/uv pip install --quiet --python $(GYM)/openenv/bin/python openenv==0.10.0
	@touch $@

# Kernels, interpreted and compiled on the CPU. Triton comes with the builds of torch for CUDA: here it is beside one
# for the CPU, which has to find no compiler in the other tests.
test-triton: $(STAMP) $(TRITON)/.installed
	PYTHONPATH=.:$(TRITON) TRITON_CACHE_DIR=$(TRITON)/cache TRITON_INTERPRET=1 $(BIN)/pytest -m triton --durations=5 tests/hf/test_kernels.py

$(TRITON)/.installed:
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.7.1
	@touch $@

# On the interpreter at hand, with what it has installed: for machines that come with their own CUDA build of torch.
# The tests of places on Ray need ray, which such a machine may lack, and no GPU.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu --ignore tests/placement/ray

# All that a GPU on loan is for, within so many minutes: make gpu-day PARTS="--parts ladder,peer" MINUTES=9; make gpu-day
# DEVICE=cpu tries it. benchmarks/wheels.sh gathers what such a machine lacks.
MINUTES ?= 12
DEVICE  ?= cuda:0
gpu-day:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu_day --device $(DEVICE) --minutes $(MINUTES) $(PARTS)

# The site in site/: the pages of docs/ and an API reference made of the docstrings. A broken link is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m docs.make_journeys
	$(BIN)/zensical build --strict --clean

$(VENV)/.docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[docs]'
	@touch $@

# docs/models.md: every causal model of transformers, tried tiny. Two minutes, and vLLM's environment for its names.
models-table: $(STAMP) $(VLLM)/.installed
	$(BIN)/python -m docs.make_models $(VLLM)/bin/python

# The ladder of modes, as a table and a picture, and what live rollouts cost the engine: make bench BENCH="--workload paper --layout split"
bench: $(STAMP)
	$(BIN)/python -m benchmarks --plot runs/bench.svg $(BENCH)
	@$(BIN)/python -m benchmarks.engine

# A trainer of TRL beside ours, in an environment of its own: trl-grpo, or trl, the last one of PPO: benchmarks/README.md.
PEER ?= trl-grpo
PEER_VENV := .venv-$(PEER)
PEER_MODES := serial,chunk,fixed,adaptive
PEER_WORKLOAD := $(if $(filter trl,$(PEER)),paper,grpo)
bench-peer: $(STAMP) $(PEER_VENV)/.installed
	$(BIN)/python -m benchmarks --peer $(PEER) $(call unless_asked,--workload,$(PEER_WORKLOAD)) $(call unless_asked,--layout,shared) $(call unless_asked,--modes,$(PEER_MODES)) $(BENCH)

unless_asked = $(if $(filter $(1) $(1)=%,$(BENCH)),,$(1) $(2))

# The settings under which it is fastest, for the comparison: make bench-peer-sweep WORKLOADS="DIR ..."
bench-peer-sweep: $(STAMP) $(PEER_VENV)/.installed
	$(BIN)/python -m benchmarks.peer.sweep $(WORKLOADS)

$(PEER_VENV)/.installed: benchmarks/peer/requirements-$(PEER).txt benchmarks/peer/requirements.txt
	test -x $(PEER_VENV)/bin/python || $(PYTHON) -m venv $(PEER_VENV)
	$(PEER_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# A torch that is already there and in range stays; otherwise the constraints decide.
HAS_TORCH := import importlib.metadata as m; v = m.version("torch").split("."); raise SystemExit(not ("2", 9) <= (v[0], int(v[1])) < ("2", 14))
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"oppo needs Python 3.11 or newer, this is {sys.version.split()[0]}"'
	test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null && echo --system-site-packages) $(VENV)
	if $(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null; then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) $(PEER) $(LOWEST) $(NEWEST) $(VLLM) $(GYM) $(TRITON) site .mypy_cache .pytest_cache .ruff_cache .hypothesis
