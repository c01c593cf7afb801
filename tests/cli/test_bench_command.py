"""`effattn bench`, and the measuring that it shares with the benchmark of the README."""

import json

import pytest
from typer.testing import CliRunner

from hf_effattn.cli import app
from hf_effattn.measuring.bench import bench

runner = CliRunner()
SMALL = ["--num-heads", "1", "--head-dim", "8", "--repeats", "1"]


def test_json_and_file_hold_a_row_for_every_length_and_method(tmp_path):
    methods = ["--method", "clustered clusters=4", "--method", "i-clustered clusters=4 topk=4"]
    arguments = ["bench", "--lengths", "32,48", *methods, *SMALL, "--json", "--output", str(tmp_path / "bench.json")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed == json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert result.stderr.splitlines() == ["1/2 32 tokens", "2/2 48 tokens"]
    ours = {(row["length"], row["method"]): row for row in printed["rows"] if not row["exact"]}
    names = ("clustered clusters=4", "i-clustered clusters=4 topk=4")
    assert set(ours) == {(length, name) for length in (32, 48) for name in names}
    for row in ours.values():
        assert row["forward_ms"] > 0
        assert row["forward_backward_ms"] > 0
        assert row["forward_peak_bytes"] > 0
        assert 0 < row["random_error"] < 1
    # The more exact method is the one with the smaller error.
    assert ours[48, names[1]]["random_error"] < ours[48, names[0]]["random_error"]
    exact = [row for row in printed["rows"] if row["exact"] and row["length"] == 32]
    assert {"SDPA", "SDPA math"} <= {row["method"] for row in exact}
    assert all(row["random_error"] < 1e-5 for row in exact)
    assert [row["forward_speedup"] for row in exact if row["method"] == row["forward_fastest_exact"]] == [1]


def test_the_table_of_forward_passes_alone():
    result = runner.invoke(
        app, ["bench", "--lengths", "32", "--method", "clustered clusters=4", *SMALL, "--forward-only"]
    )
    assert result.exit_code == 0, result.output
    assert "clustered clusters=4" in result.stdout
    assert "forward" in result.stdout
    assert "backward" not in result.stdout
    assert "random inputs: B=1, H=1, D=8" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--lengths", "no"], 2, "numbers of tokens"),
        (["--method", "cst"], 1, "is a conversion"),
        (["--method", "per-head"], 1, "there is none here"),
        (["--method", "clusterd"], 1, 'did you mean "clustered"'),
        (["--dtype", "int8"], 1, "dtype must be one of float32"),
        (["--device", "nowhere"], 1, "nowhere"),
        (["--num-heads", "0"], 1, "num_heads must be at least 1"),
        (
            ["--output", "no/such/folder.json", "--lengths", "16", "--method", "clustered clusters=4", *SMALL],
            1,
            "no/such",
        ),
    ],
)
def test_mistakes_are_told(arguments, status, message):
    result = runner.invoke(app, ["bench", *arguments])
    assert result.exit_code == status
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_method_with_nothing_to_approximate_says_so():
    table = bench([16], [{"method": "clustered", "clusters": 16}], num_heads=1, head_dim=8, repeats=1, backward=False)
    *exact, ours = table["rows"]
    assert all(row["exact"] for row in exact)
    assert ours == {"length": 16, "method": "clustered clusters=16", "why_exact": "settings"}
    result = runner.invoke(app, ["bench", "--lengths", "16", "--method", "clustered clusters=16", *SMALL])
    assert "is exact here" in result.stdout
