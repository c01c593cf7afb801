"""The table of what was measured on a GPU."""

import json

from support.stored_results import keeper

from scripts.publish import cst_tables, gpu_tables

GPU = cst_tables.RESULTS / "gpu"


def test_a_line_has_what_was_measured_and_the_host_s_share_of_it():
    row = {"forward_ms": 2.0, "forward_speedup": 0.5, "forward_graph_ms": 0.5, "forward_graph_speedup": 4.0}
    row |= {"forward_backward_speedup": 0.7, "real_error": 0.123}
    assert gpu_tables.cells("one", row) == ["one", "4.00×", "", "0.50×", "0.70×", "75%", "0.12"]
    no_graph = {"forward_ms": 2.0, "forward_speedup": 0.5}
    assert gpu_tables.cells("two", no_graph) == ["two", "", "", "0.50×", "", "", ""]
    # A graph that took longer, by chance.
    assert gpu_tables.cells("three", row | {"forward_graph_ms": 2.1})[5] == "0%"


def test_nothing_is_said_where_a_result_is_missing(tmp_path, monkeypatch):
    (tmp_path / "gpu").mkdir()
    keep = keeper(tmp_path, monkeypatch)
    keep("gpu/benchmark_cst", [])
    assert gpu_tables.kernels() == cst_tables.NOT_RUN


def test_the_verdict_is_that_of_the_numbers():
    """Its words say that no shorter input gains without a graph, and i-clustered attention does at the longest."""
    rows = json.loads((GPU / "benchmark_attention.json").read_text(encoding="utf-8"))["rows"]
    ours = [row for row in rows if not row["exact"]]
    assert max(row["forward_speedup"] for row in ours if row["length"] < max(gpu_tables.LENGTHS)) < 1
    longest = {row["method"]: row for row in ours if row["length"] == max(gpu_tables.LENGTHS)}
    few, i_clustered, *bi_clustered = (longest[name]["forward_speedup"] for name in gpu_tables.METHODS)
    assert min(few, i_clustered) > 1 > max(bi_clustered)


def test_all_was_measured_on_one_machine():
    files = [json.loads(path.read_text(encoding="utf-8")) for path in GPU.glob("*.json")]
    assert len(files) >= 4
    assert len({file["environment"]["device_name"] for file in files}) == 1
