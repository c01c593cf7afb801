"""The tables of ClusterFormer's results beside the paper's numbers, made of results that stand here."""

from support.stored_results import cells

from scripts.publish import clusterformer_tables
from scripts.publish import cst_tables as paper_tables
from scripts.reproduce.classification import settings_of


def header(table):
    return [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")][1:]


def classified(sweep, name, dataset, seed, **metrics):
    run = {"dataset": dataset, "settings": settings_of(sweep, name, dataset), "seed": seed}
    run |= {"epochs": 2, "max_length": 64, "train_samples": None}
    return run | {"seconds_per_epoch": 3.0} | metrics


def test_what_has_not_been_run_says_so(keep):
    tables = ("layers", "partner_recall", "clusterings", "routings", "clusters", "translation")
    for name in tables:
        assert getattr(clusterformer_tables, name)() == paper_tables.NOT_RUN
    keep("classification_table", [classified("routings", "LSH", "CR", 0, accuracy=80.0)], dtype="float32")
    assert clusterformer_tables.clusters() == paper_tables.NOT_RUN


def test_routings_are_compared_seed_by_seed(keep):
    rows = [
        classified("routings", name, "CR", seed, accuracy=accuracy)
        for name, accuracies in (("gated", (81.0, 80.0)), ("Transformer", (80.0, 82.0)))
        for seed, accuracy in enumerate(accuracies)
    ]
    rows.append(classified("routings", "gated", "WikiQA", 0, accuracy=99.0, map=61.5))
    rows.append(rows[0] | {"epochs": 1, "accuracy": 1.0})  # a try of another budget
    keep("classification_table", rows, dtype="float32")
    table = clusterformer_tables.routings()
    assert header(table) == ["CR", "WikiQA"]
    assert cells(table, "Transformer") == ["81.0 ± 1.4 (2)", ""]
    assert cells(table, "gated") == ["80.5 ± 0.7 (2) (-0.5)", "61.5"]
    assert "CR: 2 epochs, 64 tokens" in table


def test_the_sweep_of_clusters_has_time_and_memory_and_only_its_runs(keep):
    rows = [classified("clusters", "k=5", "20 Newsgroups", 0, accuracy=70.0, train_samples=1500)]
    rows.append(classified("routings", "K-means", "20 Newsgroups", 0, accuracy=60.0))
    costs = {"dataset": "20 Newsgroups", "settings": rows[0]["settings"], "measured": "step"}
    costs |= {"speedup": 1.25, "step_peak_bytes": 2**21}
    rows += [costs | {"max_length": 64}, costs | {"max_length": 512, "speedup": 9.0}]  # one of other texts
    keep("classification_table", rows, dtype="bfloat16")
    table = clusterformer_tables.clusters()
    assert cells(table, "k=5") == ["70.0", "1.25×", "2"]
    assert "K-means" not in table
    assert "on 1,500 texts" in table
