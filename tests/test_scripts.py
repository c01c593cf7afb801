"""The benchmark scripts run on small sizes and keep what they print; large data is looked up in one place."""

import dataclasses
import json
from pathlib import Path

import benchmark_attention
import benchmark_clustering
import benchmark_embeddings
import measure_crossover
import pytest
import shared_data
from typer.testing import CliRunner


def test_benchmark_attention(real_model_folder, tmp_path):
    output = tmp_path / "attention.json"
    benchmark_attention.main("104,128", heads=2, head_dim=8, repeats=1, output=output)
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert {row["length"] for row in rows} == {104, 128}
    exact, approximate = rows[0], rows[1]
    assert exact["forward_speedup"] == 1.0
    assert exact["real_attention_error"] == 0.0
    assert approximate["real_attention_error"] > 0
    assert approximate["forward_backward_peak_bytes"] > 0
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_benchmark_clustering(real_model_folder, tmp_path):
    output = tmp_path / "clustering.json"
    benchmark_clustering.main("96", clusters=12, topk=8, repeats=1, output=output)
    errors = {
        row["clustering"]: row["attention_error"] for row in json.loads(output.read_text(encoding="utf-8"))["rows"]
    }
    assert len(errors) == len(benchmark_clustering.CLUSTERINGS)
    assert errors["K-means, keys' metric (default)"] < errors["LSH 32 bits, 10 iterations"]


def test_benchmark_embeddings(real_model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_embeddings, "SIZES", ((48, 12, 8),))
    output = tmp_path / "embeddings.json"
    benchmark_embeddings.main(output=output)
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 6
    assert all(0.5 < row["cosine_min"] <= row["cosine_mean"] < 1 for row in rows)


def test_measure_crossover_keeps_other_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_crossover, "LENGTHS", (104, 120))
    output = tmp_path / "crossover.json"
    other = [{"method": "clustered", "clusters": 5, "min_length": 7}]
    output.write_text(json.dumps({"min_length": {"other": other}}), encoding="utf-8")
    measure_crossover.main(heads=1, head_dim=8, repeats=1, output=output)
    kept = json.loads(output.read_text(encoding="utf-8"))["min_length"]
    assert kept["other"] == other
    assert {row["clusters"] for row in kept["cpu"]} == {25, 100}  # more clusters than tokens are left out
    assert all(row["min_length"] in (104, 120, 240) for row in kept["cpu"])


def test_where_the_benchmark_was_slower_exact_attention_runs():
    """No default leaves a patched model clearly slower than it was (rows within 10 % are noise)."""
    kept = json.loads((Path(benchmark_attention.__file__).parent / "results" / "benchmark_attention.json").read_text())
    slower = [row for row in kept["rows"] if row["forward_speedup"] < 0.9]
    assert slower
    for row in slower:
        forced = benchmark_attention.METHODS[row["method"]]
        assert dataclasses.replace(forced, min_length=None).is_exact(row["length"], row["length"], "cpu"), row


@pytest.mark.parametrize(
    ("ratios", "length"),
    [({1: 0.5, 2: 1.2, 4: 3.0}, 2), ({1: 1.1, 2: 0.9, 4: 3.0}, 4), ({1: 0.1, 2: 0.9}, 4), ({1: 1.0, 2: 2.0}, 1)],
)
def test_crossover_is_where_a_method_stays_faster(ratios, length):
    assert measure_crossover.crossover(ratios) == length


def test_missing_data_says_what_and_where(tmp_path, monkeypatch):
    monkeypatch.setenv(shared_data.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"'books' is not there: HF_EFFATTN_DATA should name a folder"):
        shared_data.dataset_path("books")
    (tmp_path / "books").mkdir()
    assert shared_data.dataset_path("books") == tmp_path / "books"


@pytest.mark.parametrize(
    "script",
    [benchmark_attention, benchmark_clustering, benchmark_embeddings, measure_crossover],
    ids=lambda m: m.__name__,
)
def test_help_says_what_a_script_does(script):
    import typer

    app = typer.Typer()
    app.command()(script.main)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "--output" in result.output
