# On a machine with a GPU, with the Python that has its torch: make test-gpu PYTHON=python3
# What needs a GPU: real sizes, and the kernels, which `make test` runs under Triton's interpreter.
GPU_TESTS ?= tests/gpu tests/ops/test_*_kernels.py tests/ops/test_sorted_clusters.py tests/ops/test_clusterings.py
GPU_PROCESSES ?= 12
.PHONY: gpu test-gpu

test-gpu:
	OMP_NUM_THREADS=1 $(ON_GPU) -m pytest -m "" $(GPU_TESTS) \
		$$($(PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses $(GPU_PROCESSES) --dist worksteal)

# All that only a GPU can show: the tests, then every benchmark at its sizes (bfloat16), as JSON in the folder
# GPU_RESULTS. Each part can be made alone; a part that fails does not stop the others. What GPU_RESULTS already holds
# from this machine is not measured again, so that a part that was stopped goes on. Errors on real queries and keys need
# what scripts/benchmark/_inputs.py writes where the BERT is installed.
GPU_RESULTS ?= scripts/results/gpu
GPU_SECONDS ?= 570
GPU_PARTS := test-gpu gpu-attention gpu-attention-batch gpu-cst gpu-clusterformer gpu-prefill gpu-models \
	gpu-crossover gpu-crossover-causal gpu-clusterformer-paper gpu-windows gpu-exact-models gpu-sinks
# The scripts import the package, which is not installed there. Interrupted, pytest still says what failed.
ON_GPU = PYTHONPATH="$(CURDIR):$$PYTHONPATH" timeout --signal=INT --kill-after=15 $(GPU_SECONDS) $(PYTHON)
.PHONY: $(GPU_PARTS) gpu-first

# The first look, in at most seven minutes: what to do next, as JSON and in words. A process that a kernel brought down
# is followed by another, which goes on behind that step. Run again, it measures what is missing.
gpu-first: GPU_SECONDS = 420
gpu-first:
	end=$$(($$(date +%s) + 395)); for process in 1 2 3; do \
		$(ON_GPU) -m scripts.benchmark.gpu_first --seconds $$((end - $$(date +%s))) --output $(GPU_RESULTS)/first.json; \
		status=$$?; test $$status -eq 75 || test $$status -gt 128 || exit $$status; \
	done; exit $$status

gpu:
	$(MAKE) --keep-going --jobs=1 $(GPU_PARTS)

gpu-attention:
	$(ON_GPU) -m scripts.benchmark.attention --repeats 5 --batches 1 \
		--lengths 1024,2048,4096,8192,16384,32768,65536 --output $(GPU_RESULTS)/benchmark_attention.json

gpu-attention-batch:
	$(ON_GPU) -m scripts.benchmark.attention --repeats 5 --batches 6 \
		--lengths 1024,2048,4096,8192,16384,32768 --output $(GPU_RESULTS)/benchmark_attention.json

gpu-models:
	$(ON_GPU) -m scripts.benchmark.models --shapes base --repeats 5 --output $(GPU_RESULTS)/benchmark_models.json

gpu-prefill:
	$(ON_GPU) -m scripts.benchmark.prefill --output $(GPU_RESULTS)/benchmark_prefill.json

gpu-windows:
	$(ON_GPU) -m scripts.benchmark.windows --lengths shortest,8192,32768 \
		--output $(GPU_RESULTS)/benchmark_windows.json

gpu-exact-models:
	$(ON_GPU) -m scripts.benchmark.exact_models --output $(GPU_RESULTS)

gpu-sinks:
	$(ON_GPU) -m scripts.benchmark.sinks --output $(GPU_RESULTS)/benchmark_sinks.json

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
