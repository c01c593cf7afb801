"""The experiments about ClusterFormer run on small data, keep what they measure, and go on where they stopped."""

import gzip
from functools import partial

import numpy as np
import pytest
import torch
import typer
from support.script_runs import rows_of, write_gzip
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_effattn.ops import cluster_queries
from scripts.benchmark import clusterformer as benchmark_clusterformer
from scripts.reproduce import digits as mnist_clustering
from scripts.reproduce import partner_recall
from scripts.shared.runs import KeptRuns, mean_and_deviation


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    write_gzip(path, header + array.astype(np.uint8).tobytes())


@pytest.fixture
def digits(data_folder):
    """Images of 6×6 around ten prototypes, in the files of MNIST."""
    random = np.random.default_rng(0)
    prototypes = random.integers(0, 200, (10, 6, 6))
    for name, images in (("train", 400), ("t10k", 100)):
        classes = random.integers(0, 10, images)
        write_idx(data_folder / f"mnist/{name}-labels-idx1-ubyte.gz", classes)
        write_idx(
            data_folder / f"mnist/{name}-images-idx3-ubyte.gz",
            prototypes[classes] + random.integers(0, 50, (images, 6, 6)),
        )


def test_kept_runs_are_found_again_and_not_mixed(tmp_path):
    path = tmp_path / "results" / "runs.json"
    runs = [{"name": name, "settings": {"k": 5}, "seed": seed} for name in "ab" for seed in (0, 1)]
    kept = KeptRuns(path, {"steps": (3, 4)})
    assert kept.missing(runs) == runs
    kept.add(runs[1] | {"accuracy": 50.0})
    kept = KeptRuns(path, {"steps": (3, 4)})
    assert kept.missing(runs) == [runs[0], runs[2], runs[3]]
    assert kept.missing([runs[1] | {"settings": {"k": 6}}]) != []
    assert [row["accuracy"] for row in kept.matching({"name": "a"})] == [50.0]
    KeptRuns(path, {"steps": [3, 4]}).add(runs[2])  # another process
    kept.add(runs[3])
    assert [row["seed"] for row in rows_of(path)] == [1, 0, 1]
    assert not path.with_suffix(".part").exists()
    assert {row["torch"] for row in rows_of(path)} == {torch.__version__}
    for other in ({"steps": [3, 5]}, {"steps": [3, 4], "width": 1}, {}):
        with pytest.raises(ValueError, match=r"runs\.json holds runs with other settings \((steps|width)\)"):
            KeptRuns(path, other)


def test_mean_and_deviation_by_hand():
    assert mean_and_deviation([]) == ""
    assert mean_and_deviation([91.25], digits=2) == "91.25"
    assert mean_and_deviation([90.0, 92.0, 94.0]) == "92.0 ± 2.0 (3)"


@pytest.mark.slow
def test_mnist_clustering(digits, tmp_path, monkeypatch, capsys):
    output = tmp_path / "mnist.json"
    methods = "neural clustering,K-means,mini-batch K-means,spherical K-means"
    mnist_clustering.main("20", "0,1", methods, output=output)
    rows = rows_of(output)
    assert len(rows) == 8
    assert {row["method"] for row in rows} == set(methods.split(","))
    assert all(row["accuracy"] > 90 and 0 <= row["empty_clusters"] < 0.5 for row in rows), rows
    monkeypatch.setattr(mnist_clustering, "METHODS", {"K-means": (None, False)})
    mnist_clustering.main("20", "0,1", "K-means", output=output)  # nothing is run again: it could not be
    assert rows_of(output) == rows
    assert "neural clustering, paper" in capsys.readouterr().out


def test_the_self_organising_map_finds_the_prototypes(digits):
    data = mnist_clustering.load_mnist(None)
    row = mnist_clustering.measure({"method": "self-organising map", "clusters": 20, "seed": 0}, data)
    assert row["accuracy"] > 90


def test_mnist_is_read_as_it_was_written(data_folder, digits):
    train, classes, test, _ = mnist_clustering.load_mnist(30)
    assert (train.shape, classes.shape, test.shape) == ((30, 36), (30,), (30, 36))
    assert train.dtype == np.float32
    assert 0 <= train.min() < train.max() <= 1
    raw = gzip.decompress((data_folder / "mnist/train-images-idx3-ubyte.gz").read_bytes())
    assert train[1, 2] == np.float32(raw[16 + 36 + 2]) / 255


def test_majority_accuracy_by_hand():
    """Cluster 0 stands for class 3, cluster 1 for class 5; cluster 2 has no training row: class 5, as most have."""
    train_labels, train_classes = np.array([0, 0, 0, 1, 1]), np.array([3, 3, 5, 5, 5])
    test_labels, test_classes = np.array([0, 1, 1, 2]), np.array([3, 5, 3, 5])
    accuracy = mnist_clustering.majority_accuracy(3, train_labels, train_classes, test_labels, test_classes)
    assert accuracy == 0.75


def test_answers_are_the_partners_values():
    ids, values, answers = partner_recall.recall_texts(5, 12, torch.Generator().manual_seed(0))
    for row in range(5):
        assert sorted(ids[row].tolist()) == sorted([*range(6), *range(6)])
        for place in range(12):
            partner = next(other for other in range(12) if other != place and ids[row, other] == ids[row, place])
            assert answers[row, place] == values[row, partner]
    assert not torch.equal(ids[0], ids[1])


def test_partners_seen_by_hand():
    """Blocks of 2 in identity order; every word sees its own block and the one before, the first the last."""
    clustered = partner_recall.SortedWords(torch.arange(8)[None], torch.zeros(1, 8), 2, None, None)
    ids = torch.tensor([[0, 1, 0, 1, 2, 3, 3, 2]])
    # Words 2, 3 see 0, 1 and 6, 7 see 4, 5; the others look at the block before theirs.
    assert partner_recall.share_of_partners_seen(clustered, ids, 2) == 0.5
    assert partner_recall.share_of_partners_seen(clustered, ids, 4) == 1.0
    ids = torch.tensor([[0, 1, 2, 2, 3, 3, 0, 1]])
    assert partner_recall.share_of_partners_seen(clustered, ids, 1) == 0.5
    assert partner_recall.share_of_partners_seen(clustered, ids, 2) == 0.75


def test_partner_recall(tmp_path, monkeypatch):
    output = tmp_path / "recall.json"
    routings = "full attention,gated with losses,gate on a random order"
    small = {"windows": "2,3", "seeds": "0", "hidden_size": 16, "steps": 2, "words": 64, "output": output}
    partner_recall.main("16", routings=routings, **small)
    rows = rows_of(output)
    assert len(rows) == 5  # full attention has no window
    for row in rows:
        assert 0 <= row["accuracy"] <= 100
        assert len(row["partners_seen"]) == (0 if row["routing"] == "full attention" else 2)
    monkeypatch.setattr(partner_recall, "measure", None)
    partner_recall.main("16", routings=routings, **small)
    assert rows_of(output) == rows
    with pytest.raises(ValueError, match="other settings"):
        partner_recall.main("16", routings=routings, **small | {"steps": 3})
    with pytest.raises(typer.BadParameter, match="lengths 7, 65 are odd: every word has a partner"):
        partner_recall.main("7,16,65", routings=routings, **small)


@pytest.mark.slow
def test_full_attention_recalls_partners():
    run = {"length": 8, "clusters": 2, "window_blocks": 2, "routing": "full attention", "seed": 0}
    sizes = partner_recall.Sizes(hidden_size=32, steps=400, words=256, learning_rate=5e-3, dtype="float32")
    row = partner_recall.measure(run, sizes, torch.device("cpu"))
    assert row["accuracy"] > 95


def test_a_gate_on_a_random_order_does_not_sort():
    run = {"length": 16, "clusters": 4, "window_blocks": 2, "routing": "gate on a random order", "seed": 0}
    model = partner_recall.make_model(run, partner_recall.Sizes(16, 1, 1, 1e-3, "float32"))
    partner_recall.give_random_order(model, 0)
    orders = []
    for _, sorting in partner_recall.sortings(model):
        sorting.register_forward_hook(lambda module, inputs, output: orders.append(output.order))
    ids, values, _ = partner_recall.recall_texts(3, 16, torch.Generator().manual_seed(0))
    model(ids, token_type_ids=values)
    assert all(torch.equal(order[0], order[1]) for order in orders)
    assert sorted(orders[0][0].tolist()) == list(range(16))
    assert not torch.equal(orders[0], orders[1])


def test_what_has_no_kernels_on_a_gpu_is_refused_before_it_runs():
    with FakeTensorMode():  # needs no GPU
        words = torch.empty(1, 1, 64, 300, device="cuda")
        with pytest.raises(UserWarning, match="a head_dim up to 256, got 300"):
            benchmark_clusterformer.by_kernels(partial(cluster_queries, words, 4))()
    assert (
        benchmark_clusterformer.by_kernels(partial(cluster_queries, torch.randn(1, 1, 64, 300), 4))().shape[-1] == 64
    )


@pytest.mark.slow
def test_benchmark_clusterformer(tmp_path, monkeypatch):
    output = tmp_path / "layers.json"
    small = {"hidden_size": 16, "heads": 2, "repeats": 1, "output": output}
    benchmark_clusterformer.main("48", **small)
    first = rows_of(output)
    benchmark_clusterformer.main("48,100", **small)
    rows = rows_of(output)
    assert rows[: len(first)] == first
    assert [row["length"] for row in rows] == [48] * len(first) + [100] * len(first)
    assert len(first) == len(benchmark_clusterformer.ROUTINGS)
    assert rows[-1]["clusters"] == 14  # √(2·100)
    for row in rows:
        for timed in ("attention_forward", "attention_forward_backward", "layer_forward", "layer_forward_backward"):
            assert row[f"{timed}_ms"] > 0
            assert row[f"{timed}_peak_bytes"] > 0
            if row["routing"] == benchmark_clusterformer.EXACT:
                assert row[f"{timed}_speedup"] == 1.0
    with pytest.raises(ValueError, match="other settings"):
        benchmark_clusterformer.main("48", **small | {"hidden_size": 32})


@pytest.mark.parametrize("name", ["neural", "LSH"])
def test_a_timed_training_step_is_a_whole_one(name, monkeypatch):
    """All the gradients that training needs are there; both parts give what the layer gives."""
    words = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    timed = benchmark_clusterformer.TimedLayer(benchmark_clusterformer.ROUTINGS[name], sizes, words, 4)
    monkeypatch.setattr(timed.layer, "zero_grad", lambda **arguments: None)
    timed.forward_backward("layer")
    assert all(p.grad is not None for p in timed.layer.parameters())
    normed = timed.layer.attention_norm(words)
    timed.words = normed
    attended = words + timed.forward("attention")
    expected = attended + timed.layer.output(
        timed.layer.activation(timed.layer.intermediate(timed.layer.output_norm(attended)))
    )
    timed.words = words
    torch.testing.assert_close(timed.forward("layer"), expected)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (mnist_clustering, {"methods": "SOM"}, "unknown methods"),
        (partner_recall, {"routings": "som"}, "unknown routings"),
    ],
    ids=str,
)
def test_unknown_choices_are_named(script, arguments, message, tmp_path):
    with pytest.raises(typer.BadParameter, match=message):
        script.main(**arguments, output=tmp_path / "none.json")
