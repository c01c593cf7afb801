# Long: all tables of the README measured again, as JSON and plots beside the scripts, and written into it. Rows that
# are there already would be kept, so they go first.
.PHONY: benchmark first-minutes

benchmark: $(READY)
	rm -f scripts/results/benchmark_attention.json scripts/results/benchmark_models.json \
		scripts/results/benchmark_other_methods.json \
		scripts/results/benchmark_layer_budgets.json scripts/results/benchmark_clustering.json \
		scripts/results/benchmark_embeddings.json
	$(BIN)/python -m scripts.benchmark.attention
	$(BIN)/python -m scripts.benchmark.other_methods
	$(BIN)/python -m scripts.benchmark.layer_budgets
	$(BIN)/python -m scripts.benchmark.models --shapes base --lengths 1024,4096 --repeats 3
	$(BIN)/python -m scripts.benchmark.clustering
	$(BIN)/python -m scripts.benchmark.head_errors
	$(BIN)/python -m scripts.benchmark.embeddings
	$(BIN)/python -m scripts.benchmark.crossover
	$(BIN)/python -m scripts.benchmark.crossover --causal
	$(BIN)/python -m scripts.publish.readme

# What a new user waits for, from a clean clone of what is committed to `make test-slow`.
first-minutes: $(READY)
	$(BIN)/python -m scripts.benchmark.first_minutes
