"""The tables beside the papers' numbers, made of results that stand here."""

import pytest
from support.kept_results import keeper

from scripts.publish import cst_tables as paper_tables


@pytest.fixture
def keep(tmp_path, monkeypatch):
    return keeper(tmp_path, monkeypatch)


def trained(task, model, seed=0, **metrics):
    return {
        "task": task,
        "model": model,
        "seed": seed,
        "steps": None,
        "arguments": {"num_train_epochs": "2"},
    } | metrics


def cells(table, row):
    """The cells of the row that begins so."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {row}"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_what_has_not_been_run_says_so(keep):
    for make in (paper_tables.language_models, paper_tables.converted, paper_tables.approximation):
        assert make() == paper_tables.NOT_RUN
    keep("cst_training", [])
    assert paper_tables.converted() == paper_tables.NOT_RUN


def test_converted_models_are_compared_seed_by_seed(keep):
    rows = [trained("SST-2", "BERT", seed, eval_accuracy=accuracy) for seed, accuracy in ((0, 0.90), (1, 0.92))]
    rows += [trained("SST-2", "BERT, CST", seed, eval_accuracy=accuracy) for seed, accuracy in ((1, 0.91), (0, 0.88))]
    keep("cst_training", rows)
    assert cells(paper_tables.converted(), "BERT, CST") == ["91.00, 88.00", "-1.50"]


def test_language_models_have_their_costs_and_the_papers_perplexity(keep):
    task, model = "WikiText-2, 256 tokens", "CST L=32 α=3"
    cost = {
        "task": task,
        "model": model,
        "measured": "step",
        "step_ms": 12.3,
        "step_peak_bytes": 2**21,
        "speedup": 1.5,
    }
    keep("cst_training", [trained(task, model, perplexity=50.0, word_perplexity=200.0, parameters=2e6), cost])
    found = cells(paper_tables.language_models(), f"{task}: {model}")
    assert found == ["50.0", "200.0", "2.00 M", "12 ms", "1.50×", "2 MiB", "34.18 (1.51×)"]


def test_matched_complexity_stands_in_the_papers_order(keep):
    rows = [
        trained(f"Books, {length:,} tokens", model, perplexity=perplexity, word_perplexity=200.0)
        for length, model, perplexity in ((1024, "Transformer", 40.0), (512, "CST L=64 α=3", 45.0))
    ]
    for row, length in zip(rows, ("1024", "512"), strict=True):
        row |= {"steps": 400, "arguments": {"block_length": length}}
    keep("cst_training", rows)
    table = paper_tables.matched_complexity()
    assert cells(table, "CST L=64 α=3, 512 tokens") == ["400", "45.0", "200.0", "17.61 (1.00×)"]
    assert cells(table, "Transformer, 256 tokens") == ["", "", "", "19.66 (1.00×)"]
    assert table.index("| CST L=64 α=3, 512 tokens") < table.index("| Transformer, 1,024 tokens")


def test_approximations_are_means_over_the_seeds_of_one_model(keep):
    values = [("full", 0.6, 0), ("i-clustered-25", 0.58, 0), ("i-clustered-25", 0.60, 0), ("i-clustered-25", 0.3, 1)]
    identity = {"task": "cola", "model": "m", "samples": None, "data": {"data_dir": "glue"}}
    rows = [
        identity | {"row": row, "value": value, "training_seed": seed, "longer_share": None if row == "full" else 0.02}
        for row, value, seed in values
    ]
    keep("approximation", rows, dtype="bfloat16")
    table = paper_tables.approximation()
    assert "exactly; bfloat16. The paper" in table
    assert cells(table, "cola |") == ["0.600", "0.590 ± 0.014 (2)", "-1.00", "2%", "0.601", "0.601"]
    assert "| cola | | 0.300 | | 2% | 0.601 | 0.601 |" in table.replace("|  |", "| |").replace("|  |", "| |")
    keep("approximation", [rows[0] | {"task": "squad", "data": {"train_files": "squad/train-part.json"}}], dtype="x")
    assert "SQuAD: train-part.json. " in paper_tables.approximation()
    keep("approximation", [rows[0], rows[0] | {"model": "n"}], dtype="x")
    assert cells(paper_tables.approximation(), "cola, n")[0] == "0.600"


def test_errors_of_layers_are_means_over_the_seeds(keep):
    row = {"task": "squad", "model": "m", "row": "clustered-25", "layer_errors": [0.2, 0.1]}
    keep(
        "approximation",
        [row, row | {"layer_errors": None}, row | {"layer_errors": [0.4, 0.1]}, row | {"task": "cola"}],
    )
    table = paper_tables.layer_errors()
    assert cells(table, "squad, clustered-25") == ["0.300", "0.100"]
    assert table.index("cola") < table.index("squad")


def test_the_long_range_arena_has_a_column_for_each_model_and_a_row_for_each_budget(keep):
    row = {"task": "image", "steps": 350, "batch_size": 32, "model": "CST L=8", "test_accuracy": 0.31, "samples": None}
    row |= {"learning_rate": 1e-4, "data_settings": ""}
    transformer = {"model": "Transformer", "test_accuracy": 0.3, "train_seconds": 132.0}
    keep("lra_table", [row, row | transformer, row | {"learning_rate": 1e-3}])
    table = paper_tables.long_range_arena()
    found = cells(table, "image: 350 steps of 32, learning rate 0.0001, 0.12% of the paper's examples")
    assert found[:3] == ["30.0 (44.25)", "31.0 (51.27)", "(51.39)"]
    assert cells(table, "image: minutes of training")[:2] == ["2", ""]
    found = cells(table, "image: 350 steps of 32, learning rate 0.001, 0.12% of the paper's examples")
    assert found[:2] == ["(44.25)", "31.0 (51.27)"]
