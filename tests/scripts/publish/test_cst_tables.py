"""The tables beside the papers' numbers, made of results that stand here."""

from support.stored_results import cells

from scripts.publish import cst_tables as paper_tables


def trained(task, model, seed=0, **metrics):
    return {
        "task": task,
        "model": model,
        "seed": seed,
        "steps": None,
        "arguments": {"num_train_epochs": "2"},
    } | metrics


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


def test_approximations_are_means_over_the_seeds_of_one_model(keep):
    values = [("full", 0.6, 0), ("i-clustered-25", 0.58, 0), ("i-clustered-25", 0.60, 0), ("i-clustered-25", 0.3, 1)]
    identity = {"task": "cola", "model": "m", "samples": None, "data": {"data_dir": "glue"}}
    rows = [
        identity | {"row": row, "value": value, "training_seed": seed, "longer_share": None if row == "full" else 0.02}
        for row, value, seed in values
    ]
    keep("approximation", rows, dtype="bfloat16")
    table = paper_tables.approximation()
    assert "exactly; bfloat16. " in table
    assert cells(table, "cola |") == ["0.600", "0.590 ± 0.014 (2)", "-1.00", "2%"]
    assert "| cola | | 0.300 | | 2% |" in table.replace("|  |", "| |").replace("|  |", "| |")
    keep("approximation", [rows[0] | {"task": "squad", "data": {"train_files": "squad/train-part.json"}}], dtype="x")
    assert "SQuAD: train-part.json. " in paper_tables.approximation()
    keep("approximation", [rows[0], rows[0] | {"model": "n"}], dtype="x")
    assert cells(paper_tables.approximation(), "cola, n")[0] == "0.600"
