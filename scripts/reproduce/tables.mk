# The papers' tables of model_cards/RESULTS.md that are trained for, at the budgets that they name: hours of a CPU each.
# What scripts/results holds already is not trained again.
DATA = $(or $(HF_EFFATTN_DATA),../shared/data)
TABLES := table-approximation table-language-models table-matched-complexity table-classifiers \
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
