# Two commands: `make demo` trains a small model end to end, `make test` runs every check.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PEER   := .venv-peer

.PHONY: demo test test-deep test-gpu lint types bench bench-peer bench-peer-sweep clean

demo: $(STAMP)
	@$(BIN)/oppo demo $(DEMO)

test: $(STAMP) lint types
	$(BIN)/pytest $(WORKERS) -m "not deep and not gpu" --durations=15

# A file's tests share what they have made, so each file is one worker's.
WORKERS ?= --numprocesses logical --maxprocesses 8 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy --num-workers auto

# Random schedules in all; fewer are quicker: make test-deep SCHEDULES=2000
SCHEDULES ?= 10000
test-deep: $(STAMP)
	OPPO_SCHEDULES=$(SCHEDULES) $(BIN)/pytest -m "(deep or schedules) and not gpu" --timeout=1800 --durations=15

# On the interpreter at hand, with what it has installed: for machines that come with their own CUDA build of torch.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu

# The ladder of modes, as a table and a picture: make bench BENCH="--workload paper --layout split"
bench: $(STAMP)
	$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[report]'
	$(BIN)/oppo bench --plot runs/bench.png $(BENCH)

# TRL's PPO trainer, in an environment of its own, beside ours: benchmarks/README.md.
PEER_MODES := serial,chunk
bench-peer: $(STAMP) $(PEER)/.installed
	$(BIN)/oppo bench --peer trl $(call unless_asked,--layout,shared) $(call unless_asked,--modes,$(PEER_MODES)) $(BENCH)

unless_asked = $(if $(filter $(1) $(1)=%,$(BENCH)),,$(1) $(2))

# The settings under which it is fastest, for the comparison: make bench-peer-sweep WORKLOADS="DIR ..."
bench-peer-sweep: $(STAMP) $(PEER)/.installed
	$(BIN)/python -m benchmarks.peer.sweep $(WORKLOADS)

$(PEER)/.installed: benchmarks/peer/requirements.txt
	test -x $(PEER)/bin/python || $(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# A torch that is already there and in range stays; otherwise the constraints decide.
HAS_TORCH := import importlib.metadata as m; v = m.version("torch").split("."); raise SystemExit(not ("2", 9) <= (v[0], int(v[1])) < ("3", 0))
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"oppo needs Python 3.11 or newer, this is {sys.version.split()[0]}"'
	test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null && echo --system-site-packages) $(VENV)
	if $(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null; then grep -v '^torch==' constraints.txt; else cat constraints.txt; fi > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) $(PEER) .mypy_cache .pytest_cache .ruff_cache .hypothesis
