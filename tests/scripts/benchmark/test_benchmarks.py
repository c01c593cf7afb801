"""The benchmark scripts run on small sizes and keep what they print; large data is looked up in one place."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from support.script_runs import rows_of

from hf_effattn.measuring import cost
from hf_effattn.measuring.environment import environment
from hf_effattn.patching.exact.windows import Window
from scripts.benchmark import _inputs, _timing
from scripts.benchmark import attention as benchmark_attention
from scripts.benchmark import builds as benchmark_builds
from scripts.benchmark import clustering as benchmark_clustering
from scripts.benchmark import crossover as measure_crossover
from scripts.benchmark import documents as benchmark_documents
from scripts.benchmark import embeddings as benchmark_embeddings
from scripts.benchmark import exact_models as benchmark_exact_models
from scripts.benchmark import images as benchmark_images
from scripts.benchmark import linear_layers as benchmark_linear_layers
from scripts.benchmark import models as benchmark_models
from scripts.benchmark import prefill as benchmark_prefill
from scripts.benchmark import sinks as benchmark_sinks
from scripts.benchmark import windows as benchmark_windows
from scripts.benchmark.exact_models import BLOCKS, MODELS
from scripts.shared import data as shared_data


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    """Of timing, and no profile of memory: what these say has tests of its own."""
    monkeypatch.setattr(cost, "MOST_ROUNDS_PER_REPEAT", 1)
    monkeypatch.setattr(_timing, "peak_memory_added", lambda call, device: (call(), 1))


@pytest.mark.slow
def test_benchmark_attention(real_model_folder, tmp_path):
    output = tmp_path / "attention.json"
    benchmark_attention.main("104,136", "float32,bfloat16", heads=2, head_dim=8, repeats=1, output=output)
    rows = rows_of(output)
    assert {(row["dtype"], row["length"]) for row in rows} == {
        (dtype, length) for dtype in ("float32", "bfloat16") for length in (104, 136)
    }
    assert {row["forward_fastest_exact"] for row in rows} <= {row["method"] for row in rows if row["exact"]}
    for row in rows:
        assert 0 <= row["real_error"] < (2e-3 if row["exact"] else 1), row
        assert row["forward_backward_peak_bytes"] > 0
        if row["method"] == row["forward_fastest_exact"]:
            assert row["forward_speedup"] == 1.0
    assert "flash-attn" in rows[0]["refused"]


@pytest.mark.slow
def test_benchmarks_without_the_model_have_no_real_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(_inputs, "default_model_folder", lambda: None)
    monkeypatch.setattr(_inputs, "RECORDED", tmp_path / "none")
    output = tmp_path / "benchmark_attention.json"
    benchmark_attention.main("104", heads=2, head_dim=8, repeats=1, output=output)
    rows = rows_of(output)
    assert {row["real_error"] for row in rows} == {None}
    assert all(row["random_error"] >= 0 for row in rows)


@pytest.mark.slow
def test_what_is_kept_of_the_model_gives_its_queries_keys_and_values(real_model_folder, tmp_path, monkeypatch):
    """But for the rounding of its weights to bfloat16; relative errors of up to 0.6 % were measured."""
    monkeypatch.setattr(_inputs, "RECORDED", tmp_path / "kept")
    monkeypatch.setattr(_inputs, "RECORDED_LENGTH", 700)
    expected = _inputs.attention_inputs(600)
    _inputs.main()
    monkeypatch.setattr(_inputs, "default_model_folder", lambda: None)
    for layer, kept in zip(expected, _inputs.attention_inputs(600), strict=True):
        for rows, actual in zip(layer, kept, strict=True):
            assert actual.shape == (1, _inputs.HEADS, 600, _inputs.HEAD_DIM)
            assert 0 < (rows - actual).norm() < 0.02 * rows.norm()
    with pytest.raises(ValueError, match="holds 700 tokens, 701 are asked for"):
        _inputs.attention_inputs(701)


def test_benchmark_models(tmp_path, monkeypatch):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setitem(benchmark_models.SHAPES, "base", small)
    output = tmp_path / "models.json"
    benchmark_models.main("base", "300", "float32", 1, output)
    rows = rows_of(output)
    assert [row["method"] for row in rows] == ["exact", *benchmark_models.METHODS]
    assert all(row["forward_ms"] > 0 and row["training_peak_bytes"] > 0 for row in rows)


@pytest.mark.slow
def test_benchmark_documents(tmp_path, monkeypatch):
    """Of small models: windows are counted apart, and have a row of their own."""
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    shapes = ("bge-m3", "ModernBERT-base")
    for shape in shapes:
        settings = benchmark_documents.SHAPES[shape] | small | {"max_position_embeddings": 64}
        monkeypatch.setitem(benchmark_documents.SHAPES, shape, settings)
    heads = {"heads": [[0, 2], [7, 1]], "error": 0.09}
    monkeypatch.setattr(benchmark_documents, "calibrated_heads", lambda length: heads)
    output = tmp_path / "documents.json"
    benchmark_documents.main(",".join(shapes), "300", "float32", repeats=1, output=output)
    of_heads, *rows = rows_of(output)
    assert of_heads["what"] == benchmark_documents.HEADS
    assert of_heads.items() >= heads.items()
    names = {shape: ["exact", *benchmark_documents.METHODS] for shape in shapes}
    names["ModernBERT-base"].insert(1, benchmark_documents.WINDOWS_ALONE)
    assert [row["method"] for row in rows] == [name for shape in shapes * 2 for name in names[shape]]
    timed, weighed = (
        [row for row in rows if row["what"] == what and row[field] > 0]
        for what, field in (("seconds", "seconds"), ("memory", "peak_bytes"))
    )
    assert len(timed) == len(weighed) == len(rows) // 2
    for row in timed:
        if row["method"] == "exact":
            assert 0 <= row["windowed_share"] < row["attention_share"] < 1
            assert (row["windowed_share"] > 0) == (row["shape"] == "ModernBERT-base")


@pytest.mark.slow
def test_benchmark_windows(tmp_path, monkeypatch):
    """Both ways give the same, also where heads share keys; lengths that run dense are refused."""
    monkeypatch.setattr(benchmark_windows, "WINDOWS", (Window(5, 5), Window(9, 0)))
    output = tmp_path / "windows.json"
    benchmark_windows.main("shortest,300", "float32", heads=2, sharing="1,2", head_dim=8, repeats=1, output=output)
    rows = rows_of(output)
    assert [(row["before"], row["sharing"], row["length"], row["batch"]) for row in rows] == [
        (5, 1, 148, 1), (5, 1, 222, 8), (5, 1, 300, 1),
        *[(9, sharing, length, batch) for sharing in (1, 2) for length, batch in ((146, 1), (219, 8), (300, 1))],
    ]  # fmt: skip
    for row in rows:
        assert row["error"] < 1e-6
        assert min(row["forward_speedup"], row["training_speedup"]) > 0
    with pytest.raises(typer.BadParameter, match="at least 148"):
        benchmark_windows.main("147", "float32", output=tmp_path / "other.json")
    with pytest.raises(typer.BadParameter, match="sharing must divide the 12 heads, got 5"):
        benchmark_windows.main("300", "float32", sharing="5", output=tmp_path / "other.json")


TINY = {
    "Longformer-base": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16, "attention_window": 16},
    "LED-base": {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "attention_window": 16}
    | {"decoder_attention_heads": 2},
    "LongT5-base": {"d_model": 32, "d_kv": 8, "num_heads": 2, "d_ff": 16, "local_radius": 7},
    "Pegasus-X-base": {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "block_size": 16}
    | {"decoder_attention_heads": 2},
    "privacy-filter": {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "sliding_window": 16}
    | {"intermediate_size": 16, "num_local_experts": 4},
    "Gemma-2-2b": {"hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 16, "sliding_window": 16, "initializer_range": 0.3},
    "T5-base": {"d_model": 32, "d_kv": 8, "num_heads": 2, "d_ff": 16},
    "MPNet-base": {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16},
}
TINY |= dict.fromkeys(("DeBERTa-v3-base", "Parakeet-0.6b", "w2v-bert-2.0", "Pixtral-12B"), TINY["MPNet-base"])
# Texts or images, a length, and whether a step is timed; of others one of 64 tokens.
CASES = {"privacy-filter": ((1, 192, False),), "LongT5-base": ((1, 64, False),), "T5-base": ((3, 50, True),)}
CASES |= {"MPNet-base": ((3, 50, False),), "Pixtral-12B": ((1, 16, True), (3, 9, False))}


@pytest.mark.slow
@pytest.mark.parametrize("file", dict.fromkeys(measured.file for measured in MODELS.values()))
def test_benchmark_exact_models(file, tmp_path, monkeypatch):
    """Both ways differ by rounding, also where texts are padded."""
    expected = []
    for name, measured in MODELS.items():
        cases = CASES.get(name, ((1, 64, name == "Longformer-base"),))
        monkeypatch.setitem(MODELS, name, measured._replace(sizes=measured.sizes | TINY[name], cases=cases))
        expected += [(name, *case) for case in cases if measured.file == file]
    names = ",".join(dict.fromkeys(name for name, *_ in expected))
    benchmark_exact_models.main(names, dtypes="float32", repeats=1, output=tmp_path)
    rows = rows_of(tmp_path / f"benchmark_{file}.json")
    assert [row["method"] for row in rows] == ["exact", BLOCKS] * len(expected)
    for exact, blocks, case in zip(rows[::2], rows[1::2], expected, strict=True):
        for row in (exact, blocks):
            assert (row["model"], row["texts"], row["length"], "training_ms" in row) == case
        assert blocks["error"] < 1e-5
    with pytest.raises(typer.BadParameter, match="unknown models"):
        benchmark_exact_models.main(models="GPT-2", output=tmp_path)


@pytest.mark.slow
def test_benchmark_images(tmp_path, monkeypatch):
    """Every encoder, exact and by the methods, interleaved."""
    tiny = {"hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 16}
    monkeypatch.setattr(benchmark_images, "measure", partial(benchmark_images.measure, **tiny))
    output = tmp_path / "images.json"
    benchmark_images.main("8,12", repeats=1, output=output)
    rows = rows_of(output)
    assert [(row["encoder"], row["patches"]) for row in rows[::3]] == [
        (name, patches) for name in benchmark_images.ENCODERS for patches in (64, 144)
    ]
    assert [row["method"] for row in rows[:3]] == ["exact", *benchmark_images.METHODS]
    assert all(row["forward_ms"] > 0 and (row["forward_speedup"] == 1) == (row["method"] == "exact") for row in rows)
    with pytest.raises(typer.BadParameter, match="unknown encoders"):
        benchmark_images.main(encoders="GPT-2", output=tmp_path / "other.json")


def test_benchmark_sinks(tmp_path, monkeypatch):
    """What is exact is what eager attention gives, which is left out where its scores would not fit."""
    monkeypatch.setattr(benchmark_sinks, "WINDOW", 5)
    for name, number in (("HEADS", 4), ("KEY_HEADS", 2), ("HEAD_DIM", 8), ("MOST_SCORE_BYTES", 4 * 4 * 500**2)):
        monkeypatch.setattr(benchmark_sinks, name, number)
    output = tmp_path / "sinks.json"
    benchmark_sinks.main("200,600", "float32", repeats=1, output=output)
    rows = rows_of(output)
    ways = {("full", 200): ["eager", "exact", "bi-clustered"], ("full", 600): ["exact", "bi-clustered"]}
    ways |= {("window", 200): ["eager", "exact"], ("window", 600): ["exact"]}
    for (layer, length), expected in ways.items():
        rows_of_layer = [row for row in rows if (row["layer"], row["length"]) == (layer, length)]
        assert [row["way"] for row in rows_of_layer] == expected
        for row in rows_of_layer:
            assert row["peak_bytes"] > 0
            assert (row["speedup"] is not None) == (length == 200)
            assert row.get("error", 0) < 1e-5


def test_tables_of_heads_fit_other_models():
    """Larger ones have neighbours alike; the heads of smaller ones what the dearest that they stand for have."""
    table = [[0, 1], [2, 7]]
    assert benchmark_documents.heads_like(table, 2, 2) == table
    assert benchmark_documents.heads_like(table, 5, 4) == [[0, 0, 1, 1]] * 3 + [[2, 2, 7, 7]] * 2
    assert benchmark_documents.heads_like(table, 2, 1) == [[1], [7]]
    assert benchmark_documents.heads_like([[3, 1, 5, 0], [2, 7, 0, 1]], 1, 2) == [[7, 5]]


@pytest.mark.slow
def test_benchmark_clustering(real_model_folder, tmp_path):
    output = tmp_path / "clustering.json"
    benchmark_clustering.main("96", clusters=12, topk=8, repeats=1, output=output)
    errors = {row["clustering"]: row["attention_error"] for row in rows_of(output)}
    assert len(errors) == len(benchmark_clustering.CLUSTERINGS)
    assert errors["K-means, keys' metric (default)"] < errors["LSH 32 bits, 10 iterations"]


@pytest.mark.slow
def test_benchmark_embeddings(real_model_folder, tmp_path, monkeypatch):
    sizes = {"clusters": 12, "topk": 8, "key_clusters": 10}
    monkeypatch.setattr(benchmark_embeddings, "SIZES", ((48, sizes),))
    output = tmp_path / "embeddings.json"
    benchmark_embeddings.main(output=output)
    rows = rows_of(output)
    assert len(rows) == 9
    assert all(0.5 < row["cosine_min"] <= row["cosine_mean"] < 1 for row in rows)


@pytest.mark.slow
def test_benchmark_builds(real_model_folder, tmp_path):
    """A build beside itself has its own errors and is about as fast."""
    output, method = tmp_path / "builds.json", "bi-clustered clusters=4 topk=8 key_clusters=4"
    sizes = {"lengths": "96", "repeats": 2, "heads": 2, "head_dim": 8, "method": [method], "output": output}
    benchmark_builds.main("HEAD", dtypes="float32,bfloat16", **sizes)
    benchmark_builds.main("HEAD", dtypes="float32", defaults=True, **sizes)
    *forced, by_default = rows_of(output)
    for row in forced:
        assert 0 < row["error"] == row["error_before"] < 0.5
        assert row["times_before"] > 0 < row["times_exact"]
    assert by_default["error"] is None
    assert rows_of(output)[0]["dtype"] == "float32"


@pytest.mark.slow
def test_benchmark_linear_layers(real_model_folder, tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    monkeypatch.setitem(benchmark_documents.SHAPES, "gte-base", {"model_type": "gte", **sizes})
    monkeypatch.setattr(benchmark_linear_layers, "held_out_tokens", lambda tokenizer: [torch.arange(5, 505)])
    few = ("i-clustered clusters=8 topk=8", "bi-clustered clusters=8 topk=8 key_clusters=8")
    monkeypatch.setattr(benchmark_linear_layers, "METHODS", few)
    output = tmp_path / "linear_layers.json"
    benchmark_linear_layers.main("96", "96", repeats=1, output=output)
    rows = rows_of(output)
    assert len(rows) == 2 * len(benchmark_linear_layers.FORMS) * 3
    cosines = {(row["form"], row["method"]): row["cosine_mean"] for row in rows if row["what"] == "vectors"}
    assert cosines["float32", "exact"] == pytest.approx(1, abs=1e-6)
    assert 0.9 < cosines["int8", "exact"] < 1 - 1e-6
    assert all(row["seconds"] > 0 for row in rows if row["what"] == "seconds")


@pytest.mark.slow
def test_benchmark_prefill(tmp_path, monkeypatch):
    small = {"clusters": 8, "topk": 8, "segment_length": 128, "window": 64}
    methods = {name: settings | small for name, settings in benchmark_prefill.METHODS.items()}
    monkeypatch.setattr(benchmark_prefill, "METHODS", methods)
    output = tmp_path / "prefill.json"
    sizes = {"heads": 4, "key_heads": 2, "head_dim": 8, "repeats": 1, "output": output}
    benchmark_prefill.main("512", **sizes)
    rows = rows_of(output)
    assert [row["method"] for row in rows] == ["SDPA", *benchmark_prefill.METHODS, benchmark_prefill.CALIBRATED]
    assert rows[0]["speedup"] == 1.0
    assert all(0 < row["real_error"] < 0.3 and row["peak_bytes"] > 0 for row in rows[1:-1]), rows
    benchmark_prefill.main("512", **sizes)
    assert rows_of(output) == rows


def test_measure_crossover_keeps_other_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_crossover, "LENGTHS", (104, 120))
    monkeypatch.setattr(measure_crossover, "SETTINGS", measure_crossover.SETTINGS[:3])
    output = tmp_path / "crossover.json"
    other = [{"method": "clustered", "clusters": 5, "min_length": 7}]
    output.write_text(json.dumps({"min_length": {"other": other}}), encoding="utf-8")
    measure_crossover.main(heads=1, head_dim=8, repeats=1, output=output)
    kept = json.loads(output.read_text(encoding="utf-8"))["min_length"]
    assert kept["other"] == other
    assert {row["clusters"] for row in kept["cpu"]} == {25, 100}  # more clusters than tokens are left out
    assert all(row["min_length"] in (104, 120) or row["min_length"] % 240 == 0 for row in kept["cpu"])


@pytest.mark.slow
def test_measure_crossover_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Nobody reads half a table: what is there stays until the whole one is measured. No file: that of the package."""
    monkeypatch.setattr(measure_crossover, "LENGTHS", (104, 120))
    output, small = tmp_path / "crossover.json", {"heads": 1, "head_dim": 8, "repeats": 1}
    before = json.loads(measure_crossover.CROSSOVER.read_text(encoding="utf-8"))
    speedups, tried = measure_crossover.speedups, []

    def stopped(length, *sizes, **options):
        tried.append(length)
        if tried == [104, 120]:
            raise KeyboardInterrupt
        return speedups(length, *sizes, **options)

    monkeypatch.setattr(measure_crossover, "speedups", stopped)
    with pytest.raises(KeyboardInterrupt):
        measure_crossover.main(**small, output=output)
    kept = json.loads(output.read_text(encoding="utf-8"))
    before |= {"measured_by": "scripts/benchmark/crossover.py"}  # whatever wrote it before
    assert {name: kept[name] for name in before} == before
    first = kept["unfinished"]["cpu"]["forward_speedup"]["104"]
    measure_crossover.main(**small, output=output)
    assert tried == [104, 120, 120]
    kept = json.loads(output.read_text(encoding="utf-8"))
    assert "unfinished" not in kept
    assert kept["causal_min_length"] == before["causal_min_length"]
    rows = kept["measurements"]["cpu"][environment(torch.device("cpu"))["device_name"]]["forward_speedup"]
    assert {str(n): row["speedup"]["104"] for n, row in enumerate(rows) if row["speedup"]} == first
    measure_crossover.main(**small, output=output)
    assert tried == [104, 120, 120, 104, 120]


def test_where_the_benchmark_was_slower_exact_attention_runs():
    """No default leaves a patched model clearly slower than it was (rows within 10 % are noise)."""
    kept = json.loads(
        (Path(benchmark_attention.__file__).parents[1] / "results" / "benchmark_attention.json").read_text()
    )
    slower = [row for row in kept["rows"] if not row["exact"] and row["forward_speedup"] < 0.9]
    assert slower
    for row in slower:
        forced = benchmark_attention.METHODS[row["method"]]
        assert dataclasses.replace(forced, min_length=None).is_exact(row["length"], "cpu"), row


@pytest.mark.parametrize(
    ("ratios", "length"),
    [
        ({1: 0.5, 2: 1.2, 4: 3.0}, 2),
        ({1: 1.1, 2: 0.9, 4: 3.0}, 4),
        ({1: 0.1, 2: 0.9}, 4),
        ({1: 0.1, 2: 0.4}, 8),
        ({1: 1.0, 2: 2.0}, 1),
    ],
)
def test_crossover_is_where_a_method_stays_faster(ratios, length):
    assert measure_crossover.crossover(ratios) == length
    assert measure_crossover.crossover({tokens: 1.1 * ratio for tokens, ratio in ratios.items()}, 1.1) == length


def test_the_slowest_machine_says_where_a_method_is_faster():
    machines = [
        {"forward_speedup": [{"method": "a", "clusters": n, "speedup": {"8": ratio, "16": 2.0}} for n in (1, 2)]}
        for ratio in (1.5, 0.5)
    ]
    machines[0]["forward_speedup"].append({"method": "a", "clusters": 3, "speedup": {}})
    assert measure_crossover.crossovers({"method": "a", "clusters": 2}, machines) == [8, 16]
    assert measure_crossover.crossovers({"method": "a", "clusters": 3}, machines) == []


def test_a_machine_takes_nothing_from_another(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_crossover, "LENGTHS", (104, 120))
    monkeypatch.setattr(measure_crossover, "speedups", lambda *sizes, **options: {0: 2.0, 1: 2.0})
    output, tried = tmp_path / "crossover.json", measure_crossover.SETTINGS
    other = {"forward_speedup": [tried[0] | {"speedup": {"104": 0.5, "120": 1.5}}]}
    output.write_text(json.dumps({"measurements": {"cpu": {"other": other}}}), encoding="utf-8")
    measure_crossover.main(output=output)
    kept = json.loads(output.read_text(encoding="utf-8"))
    assert kept["min_length"]["cpu"] == [tried[0] | {"min_length": 120}, tried[1] | {"min_length": 104}]
    assert kept["measurements"]["cpu"]["other"] == other
    measure_crossover.main(output=output, dtype="bfloat16")
    machines = json.loads(output.read_text(encoding="utf-8"))["measurements"]["cpu"]
    assert [machine.get("dtype") for machine in machines.values()] == [None, "float32", "bfloat16"]
    assert {name: machines[name] for name in kept["measurements"]["cpu"]} == kept["measurements"]["cpu"]


def test_min_length_is_the_longest_of_all_machines():
    kept = json.loads(measure_crossover.CROSSOVER.read_text(encoding="utf-8"))
    for prefix, least in (("", 1.0), ("causal_", measure_crossover.LEAST_CAUSAL_SPEEDUP)):
        for device, machines in kept[f"{prefix}measurements"].items():
            for row in kept[f"{prefix}min_length"][device]:
                options = {name: value for name, value in row.items() if name != "min_length"}
                assert row["min_length"] == max(measure_crossover.crossovers(options, list(machines.values()), least))


def test_missing_data_says_what_and_where(tmp_path, monkeypatch):
    monkeypatch.setenv(shared_data.VARIABLE, str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"'books' is not there: HF_EFFATTN_DATA should name a folder"):
        shared_data.dataset_path("books")
    (tmp_path / "books").mkdir()
    assert shared_data.dataset_path("books") == tmp_path / "books"
