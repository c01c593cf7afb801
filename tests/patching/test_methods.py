"""Settings of the methods, and `Method.run` on plain tensors, those of no texts among them."""

import dataclasses
import json
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cst_conversions import small_model
from support.tiny_models import LENGTH, SMALL_SETTINGS, WITH_OWN_TESTS, tiny_model
from transformers import AttentionInterface

import hf_effattn
from hf_effattn.ops import (
    bi_clustered_attention,
    cluster_queries,
    clustered_attention,
    improved_clustered_attention,
    predicted_error,
    query_residuals,
)
from hf_effattn.ops.cluster_queries import DEFAULT_BITS, DEFAULT_ITERATIONS
from hf_effattn.patching.methods import METHODS as EVERY_METHOD
from hf_effattn.patching.methods import Method, make_method
from hf_effattn.patching.methods.crossover import CROSSOVER, crossover_length

SMALL = {"clustered": {}, "i-clustered": {"topk": 6}, "bi-clustered": {"topk": 6, "key_clusters": 7}}
METHODS = tuple(SMALL)


def tensors(length: int = 30, heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, heads, length, 8, generator=generator, dtype=dtype) for _ in range(3))


def left_padded(length: int = 30) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :7] = False
    return mask


def test_every_method_is_covered() -> None:
    """The causal forms' tests hold a list of their own: tests/patching/causal/test_causal_models.py."""
    assert set(SMALL) == set(SMALL_SETTINGS) == set(EVERY_METHOD) - set(WITH_OWN_TESTS)


def test_names_and_defaults() -> None:
    named = ("clustered", "i-clustered", "bi-clustered", "per-head", "cst", "exact")
    assert hf_effattn.list_methods() == named
    settings = make_method("i-clustered")
    assert settings.to_dict() == {
        "min_length": None,
        "clusters": 100,
        "clustering": "kmeans",
        "distance": "scores",
        "iterations": DEFAULT_ITERATIONS,
        "bits": DEFAULT_BITS,
        "fit_queries": None,
        "seed": 0,
        "check_finite": False,
        "topk": 32,
    }
    bi_clustered = make_method("bi-clustered").to_dict()
    own = {"clusters": 32, "topk": 64, "key_clusters": 32, "max_predicted_error": 0.5}
    assert bi_clustered == settings.to_dict() | own
    local = {"segment_length": 1024, "window": 256, "iterations": 1, "fit_queries": None, "seed": 0}
    shared = {"causal": True, "min_length": None, **local, "check_finite": False}
    assert make_method("clustered", causal=True).to_dict() == shared | {"clusters": 100}
    assert make_method("i-clustered", causal=True).to_dict() == shared | {"clusters": 100, "exact_keys": 192}
    counts = {"exact_keys": 384, "key_clusters": 16, "max_predicted_error": 2.0}
    assert make_method("bi-clustered", causal=True).to_dict() == shared | counts
    assert make_method("cst").to_dict() == {
        "min_length": 0,
        "slice_length": 16,
        "extension_ratio": 1.0,
        "composition": "merged",
        "attend_ends": True,
    }


def test_bi_clustered_is_fitted_on_more_queries_of_more_clusters() -> None:
    assert make_method("i-clustered", clusters=200).fitted_queries == 2048
    assert make_method("bi-clustered", clusters=32).fitted_queries == 2048
    assert make_method("bi-clustered", clusters=33).fitted_queries == 64 * 33
    assert make_method("bi-clustered", clusters=200, fit_queries=17).fitted_queries == 17


@pytest.mark.parametrize("method", METHODS)
def test_settings_are_frozen_comparable_and_json(method: str) -> None:
    settings = make_method(method, clusters=np.int64(7), min_length=np.int32(0))
    assert settings == make_method(method, clusters=7, min_length=0)
    assert make_method(method, **json.loads(json.dumps(settings.to_dict()))) == settings
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.clusters = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_setting_says_what_it_is_for(method: str) -> None:
    settings = EVERY_METHOD[method]
    assert set(settings.purpose) == {field.name for field in dataclasses.fields(settings)}


WRONG: list[tuple[str, dict, type[Exception], str]] = [
    ("i-clustered", {"clusters": 0}, ValueError, "clusters must be at least 1, got 0: the number of query clusters"),
    ("i-clustered", {"clusters": -4}, ValueError, "clusters must be at least 1, got -4"),
    ("i-clustered", {"clusters": 2.5}, TypeError, "clusters must be an int, got 2.5"),
    ("i-clustered", {"clusters": True}, TypeError, "clusters must be an int, got True"),
    ("i-clustered", {"clusters": "10"}, TypeError, "clusters must be an int, got '10'"),
    ("i-clustered", {"clusters": None}, TypeError, "clusters must be an int, got None"),
    ("i-clustered", {"topk": 0}, ValueError, "topk must be at least 1, got 0: the number of keys"),
    ("i-clustered", {"iterations": -1}, ValueError, "iterations must be at least 0"),
    ("i-clustered", {"seed": 2**70}, ValueError, "seed must be at most"),
    ("i-clustered", {"bits": 0}, ValueError, "bits must be at least 1"),
    ("i-clustered", {"fit_queries": 0}, ValueError, "fit_queries must be at least 1"),
    ("i-clustered", {"check_finite": 1}, TypeError, "check_finite must be True or False, got 1"),
    ("i-clustered", {"seed": -1}, ValueError, "seed must be at least 0"),
    ("i-clustered", {"min_length": -1}, ValueError, "min_length must be at least 0, got -1: .* 0: force the method"),
    ("i-clustered", {"clustering": "KMeans"}, ValueError, 'one of "kmeans", "lsh", got .* .did you mean "kmeans"'),
    (
        "i-clustered",
        {"distance": "score"},
        ValueError,
        'distance must be one of "scores", "vectors", .*did you mean "scores"',
    ),
    (
        "i-clustered",
        {"cuda_graph": "always"},
        ValueError,
        'cuda_graph must be one of "auto", "never", got .*: whether',
    ),
    ("i-clustered", {"cuda_graph": True}, ValueError, 'cuda_graph must be one of "auto", "never", got True'),
    ("exact", {"cuda_graph": "auto"}, ValueError, '"exact" .* takes no cuda_graph; leave it out'),
    ("i-clustered", {"topks": 5}, ValueError, "'i-clustered' has no setting 'topks' .did you mean"),
    ("i-clustered", {"colour": 5}, ValueError, 'its settings are .*"clusters".*"topk"'),
    ("i-clustered", {"key_clusters": 4}, ValueError, "'i-clustered' has no setting 'key_clusters'"),
    ("bi-clustered", {"key_clusters": 0}, ValueError, "key_clusters must be at least 1, got 0: the number of key"),
    ("bi-clustered", {"key_clusters": 1.5}, TypeError, r"key_clusters must be an int, got 1\.5"),
    ("bi-clustered", {"topk": 0}, ValueError, "topk must be at least 1, got 0: the number of keys per cluster"),
    ("bi-clustered", {"max_predicted_error": "0.5"}, TypeError, "max_predicted_error must be a number or None, got"),
    ("bi-clustered", {"max_predicted_error": True}, TypeError, "max_predicted_error must be a number or None, got"),
    ("bi-clustered", {"max_predicted_error": [0.5]}, TypeError, "max_predicted_error must be a number or None, got"),
    ("bi-clustered", {"max_predicted_error": -0.1}, ValueError, "max_predicted_error must be at least 0, got"),
    ("bi-clustered", {"max_predicted_error": float("nan")}, ValueError, "max_predicted_error must be at least 0, got"),
    ("bi-clustered", {"causal": "prefill"}, ValueError, "causal says whether the settings are .*, got 'prefill'"),
    ("bi-clustered", {"causal": True, "segment_length": 0}, ValueError, "segment_length must be at least 1"),
    ("bi-clustered", {"causal": True, "window": -1}, ValueError, "window must be at least 0"),
    ("iclustered", {}, ValueError, r'unknown attention method .iclustered. .did you mean "i-clustered".*"clustered"'),
]


def test_wrong_settings_are_named() -> None:
    for method, changes, error, message in WRONG:
        with pytest.raises(error, match=message):
            make_method(method, **changes)


def test_a_predicted_error_is_a_number_or_none() -> None:
    for given, kept in ((np.float32(0.25), 0.25), (1, 1.0), (None, None)):
        settings = make_method("bi-clustered", max_predicted_error=given).to_dict()
        assert json.loads(json.dumps(settings))["max_predicted_error"] == kept


def test_a_method_without_a_measured_crossover_is_named() -> None:
    for device, causal in product(("cpu", "cuda"), (False, True)):
        with pytest.raises(ValueError, match='no shortest length of "new" has been measured: give min_length'):
            crossover_length("new", {"clusters": 4}, device, causal=causal)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_min_length_comes_from_the_measured_crossover(device: str) -> None:
    for row in CROSSOVER[device]:
        options = {name: value for name, value in row.items() if name not in ("method", "min_length")}
        measured = make_method(row["method"], **options).shortest_length(device)
        assert measured <= row["min_length"]
        assert make_method(row["method"], **options, min_length=17).shortest_length(device) == 17
        doubled = make_method(row["method"], **{name: 2 * value for name, value in options.items()})
        assert measured <= doubled.shortest_length(device) <= 2 * row["min_length"]


def test_min_length_of_a_device_never_measured_is_longer() -> None:
    settings = make_method("i-clustered", clusters=100, topk=32)
    longest = max(settings.shortest_length(device) for device in CROSSOVER)
    assert settings.shortest_length("a-device-never-measured") == 4 * longest
    # As far apart as the comment says.
    ratios = [gpu["min_length"] / cpu["min_length"] for cpu, gpu in zip(*CROSSOVER.values(), strict=True)]
    assert list(CROSSOVER) == ["cpu", "cuda"]
    assert [round(min(ratios)), round(max(ratios))] == [4, 13]


@pytest.mark.parametrize("device", ["cuda", "a-device-never-measured"])
@pytest.mark.parametrize("method", METHODS)
def test_no_length_is_the_default_of_a_causal_form_that_was_not_timed(method: str, device: str) -> None:
    settings = make_method(method, causal=True)
    assert settings.shortest_length(device) is None
    assert settings.is_exact(10**9, device)
    assert not make_method(method).is_exact(10**6, device)
    assert not dataclasses.replace(settings, min_length=2000).is_exact(2000, device)
    candidates = [{"method": method}, {"method": method, "seed": 7, "min_length": 2000}]
    for row, shortest in (([0, 0], None), ([0, 1], 2000)):
        per_head = make_method("per-head", causal=True, candidates=candidates, heads=[row])
        assert per_head.shortest_length(device) == shortest


@pytest.mark.parametrize(("model_type", "setting"), [("bert", "exact_keys"), ("gpt2", "topk")])
@pytest.mark.parametrize("method", ["i-clustered", "bi-clustered"])
def test_settings_of_the_other_kind_of_model_are_refused(method: str, model_type: str, setting: str) -> None:
    kinds = {"bert": ("encoders", "decoders"), "gpt2": ("decoders", "encoders")}[model_type]
    suggested = {"bert": "topk", "gpt2": "exact_keys"}[model_type]
    said = f"has no setting '{setting}' in {kinds[0]}, only in {kinds[1]}; {kinds[0]} have .*\"{suggested}\""
    model = small_model(model_type)
    with pytest.raises(ValueError, match=said) as refused:
        hf_effattn.patch_attention(model, method, **{setting: 4})
    assert len(str(refused.value)) <= 300
    saved = make_method(method, causal=model_type == "bert").to_dict()
    with pytest.raises(ValueError, match=r"the settings are those of .*, and this is|has no setting"):
        hf_effattn.patch_attention(model, settings={"method": method, **saved})
    assert not hasattr(model.config, "effattn")


def test_exact_where_nothing_would_be_saved() -> None:
    settings = make_method("i-clustered", clusters=10, topk=12, min_length=11)
    assert settings.is_exact(10, "cpu")  # clusters >= N, N < min_length
    assert settings.is_exact(12, "cpu")  # topk >= M
    assert not settings.is_exact(13, "cpu")
    bi_clustered = make_method("bi-clustered", clusters=10, topk=8, key_clusters=12, min_length=0)
    assert bi_clustered.is_exact(10, "cpu")  # clusters >= N
    assert bi_clustered.is_exact(12, "cpu")  # key_clusters >= M: every key its own cluster
    assert not bi_clustered.is_exact(13, "cpu")
    assert dataclasses.replace(bi_clustered, topk=13).is_exact(13, "cpu")
    decoder = make_method("bi-clustered", causal=True, exact_keys=1281, min_length=0)
    assert decoder.is_exact(1281, "cpu")  # exact_keys >= M
    assert not decoder.is_exact(1282, "cpu")
    few = dataclasses.replace(decoder, exact_keys=1, window=1024)
    assert few.is_exact(2048, "cpu")  # one segment, and its window
    assert not few.is_exact(2049, "cpu")
    assert make_method("clustered", clusters=10, min_length=0).is_exact(10, "cpu")
    assert make_method("clustered", clusters=10, min_length=12).is_exact(11, "cpu")
    assert not make_method("clustered", clusters=10, min_length=11).is_exact(11, "cpu")


@pytest.mark.parametrize(
    ("clustering", "distance", "masked"),
    [("kmeans", "scores", True), ("kmeans", "vectors", False), ("lsh", "scores", True)],
)
@pytest.mark.parametrize("method", METHODS)
def test_run_method_is_clustering_and_op(method: str, distance: str, clustering: str, masked: bool) -> None:
    query, key, value = tensors()
    mask = left_padded() if masked else None
    options = SMALL[method]
    settings = make_method(
        method, clusters=5, distance=distance, clustering=clustering, seed=3, min_length=0, **options
    )
    weighted = clustering == "kmeans" and distance == "scores"
    labels = cluster_queries(
        query,
        5,
        method=clustering,
        key=key if weighted else None,
        key_mask=mask if weighted else None,
        iterations=DEFAULT_ITERATIONS,
        bits=DEFAULT_BITS,
        query_mask=mask,
        seed=3,
    )
    masks = {"key_mask": mask, "query_mask": mask, "scale": 0.7}
    if method == "clustered":
        expected = clustered_attention(query, key, value, labels, clusters=5, **masks)
    elif method == "i-clustered":
        expected = improved_clustered_attention(query, key, value, labels, clusters=5, **options, **masks)
    else:
        # Keys in the metric of the queries' residuals from their centroids; heads of a large predicted error exactly.
        residuals, residuals_mask = query_residuals(query, labels, 5, query_mask=mask)
        G, metric_of_keys = options["key_clusters"], {"key": residuals, "key_mask": residuals_mask}
        key_labels = cluster_queries(key, G, **metric_of_keys, iterations=2, query_mask=mask, seed=3)
        predicted = predicted_error(residuals, residuals_mask, key, key_labels, G, key_mask=mask, scale=0.7)
        options = options | {"exact_heads": predicted > 0.5}
        expected = bi_clustered_attention(query, key, value, labels, key_labels, clusters=5, **options, **masks)
    actual = settings.run(query, key, value, key_mask=mask, scale=0.7)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_heads_of_a_large_predicted_error_attend_exactly(masked: bool, key_heads: int) -> None:
    """One head's queries are spread out, and those of all others are alike."""
    query, key, value = tensors(heads=4)
    key, value, mask = key[:, :key_heads], value[:, :key_heads], left_padded() if masked else None
    query = query * torch.tensor([0.1, 6.0, 0.1, 0.1])[:, None, None]
    settings = make_method("bi-clustered", clusters=5, topk=4, key_clusters=4, min_length=0)
    spread_out = 1 // (4 // key_heads)
    assert settings.exact_heads(query, key, mask) == [h for h in range(4) if h // (4 // key_heads) == spread_out]

    dense = None if mask is None else mask[:, None, None, :]
    exact = F.scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)
    some, none = settings, dataclasses.replace(settings, max_predicted_error=None)
    every = dataclasses.replace(settings, max_predicted_error=0)
    counts = torch.ones(2, 30, dtype=torch.bool) if mask is None else mask
    exactly = [head // (4 // key_heads) == spread_out for head in range(4)]
    for method, heads in ((some, exactly), (none, [False] * 4), (every, [True] * 4)):
        wrong = (method.run(query, key, value, key_mask=mask) - exact).abs() * counts[:, None, :, None]
        assert [error < 1e-14 for error in wrong.amax(dim=(0, 2, 3)).tolist()] == heads


def test_predicted_error_follows_the_scale() -> None:
    """A scale of a model's own decides as the default one does with queries as much larger."""
    query, key, _ = tensors()
    decided = []
    for limit in torch.logspace(-4, 2, 100).tolist():
        methods = [
            make_method("bi-clustered", clusters=5, topk=4, key_clusters=4, min_length=0, max_predicted_error=above)
            for above in (limit, 8 * limit)
        ]
        default, scaled = methods[0].group(query, key, None)[2], methods[1].group(query, key, None, 1.0)[2]
        assert torch.equal(default, scaled), limit
        decided.append(default.flatten())
    # Every head is exact below its predicted error, and not above it, and they are told apart.
    assert torch.stack(decided).int().diff(dim=0).sum(dim=0).eq(-1).all()
    assert torch.stack(decided).sum(dim=0).unique().numel() > 1


@pytest.mark.parametrize("method", METHODS)
def test_labels_carry_no_gradient_and_the_rest_does(method: str) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    settings = make_method(method, clusters=5, min_length=0, **SMALL[method])
    groups = settings.group(query, key, None)
    assert not any(group.requires_grad for group in groups)
    settings.run(query, key, value).square().sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("method", METHODS)
def test_attention_matrix_gives_the_output(method: str) -> None:
    query, key, value = tensors()
    mask = left_padded()
    settings = make_method(method, clusters=5, min_length=0, **SMALL[method])
    matrix = settings.weights(query, key, key_mask=mask)
    assert matrix.shape == (2, 2, 30, 30)
    torch.testing.assert_close(matrix @ value, settings.run(query, key, value, key_mask=mask), rtol=0, atol=2e-15)
    torch.testing.assert_close(matrix.sum(-1)[1], torch.ones(2, 30, dtype=matrix.dtype), rtol=0, atol=2e-15)
    assert (matrix[0, :, :, :7] == 0).all()


def test_cross_attention_is_refused() -> None:
    query, key, value = tensors()
    with pytest.raises(ValueError, match="as many; got 20 queries and 30 keys"):
        make_method("clustered", clusters=5, min_length=0).run(query[:, :, :20], key, value)


def test_check_finite_is_opt_in() -> None:
    query, key, value = tensors()
    query[0, 0, 3] = torch.inf
    make_method("i-clustered", clusters=5, topk=6, min_length=0).run(query, key, value)
    checked = make_method("i-clustered", clusters=5, topk=6, min_length=0, check_finite=True)
    with pytest.raises(ValueError, match="not finite: look for an overflow"):
        checked.run(query, key, value)


LOCAL = {"segment_length": 4, "window": 4, "min_length": 0}
OF_DECODERS: dict[str, dict[str, Any]] = {
    "clustered": LOCAL | {"clusters": 6},
    "i-clustered": LOCAL | {"clusters": 6, "exact_keys": 8},
    "bi-clustered": LOCAL | {"exact_keys": 8, "key_clusters": 4},
}
CANDIDATES = [{"method": name, **settings} for name, settings in SMALL_SETTINGS.items()]
EXACT = len(CANDIDATES)
# Of two heads: every candidate, exact heads beside one, and alone.
ROWS = [[0, 1], [2, EXACT], [EXACT, EXACT]]


def methods(causal: bool) -> list[Method]:
    settings = OF_DECODERS if causal else SMALL_SETTINGS
    candidates = [{"method": name, **options} for name, options in settings.items()]
    made = [make_method(name, causal=causal, **options) for name, options in settings.items()]
    made.append(make_method("bi-clustered", causal=causal, **settings["bi-clustered"], tolerance=0.1))
    rows = [make_method("per-head", causal=causal, candidates=candidates, heads=[row], min_length=0) for row in ROWS]
    return [*made, *rows]


PATCHES: dict[str, dict[str, Any]] = SMALL_SETTINGS | {
    "per-head": {"candidates": CANDIDATES, "heads": ROWS, "min_length": 0},
    "cst": {"slice_length": 8, "min_length": 0},
}


def outcome(model: torch.nn.Module) -> Any:
    """What comes of a forward pass on no texts: the size of the output, or the error."""
    try:
        return model(input_ids=torch.zeros(0, LENGTH, dtype=torch.long)).last_hidden_state.shape
    except RuntimeError as error:
        return str(error)


def check_no_rows(method: Method, group: int, *, compiled: bool = False, **options: Any) -> None:
    inputs = [torch.zeros(0, heads, 23, 8, requires_grad=True) for heads in (2 * group, 2, 2)]
    run = torch.compile(method.run, fullgraph=True, backend="eager") if compiled else method.run
    with torch.no_grad():
        assert run(*inputs, **options).shape == inputs[0].shape
    gradients = torch.autograd.grad(run(*inputs, **options).sum(), inputs)
    assert [tensor.shape for tensor in gradients] == [tensor.shape for tensor in inputs]


@pytest.mark.parametrize(("group", "masked"), [(1, False), (2, True)])
@pytest.mark.parametrize("causal", [False, True])
def test_methods_give_no_rows(causal: bool, group: int, masked: bool) -> None:
    options: dict[str, Any] = {"key_mask": torch.ones(0, 23, dtype=torch.bool) if masked else None, "causal": causal}
    for method in methods(causal):
        check_no_rows(method, group, **options)
        assert method.weights(torch.zeros(0, 2, 23, 8), torch.zeros(0, 2, 23, 8), **options).shape == (0, 2, 23, 23)


@pytest.mark.slow
def test_a_compiled_graph_gives_no_rows() -> None:
    """There queries and keys are grouped step by step."""
    mask = torch.ones(0, 23, dtype=torch.bool)
    check_no_rows(make_method("bi-clustered", **SMALL_SETTINGS["bi-clustered"]), 2, compiled=True, key_mask=mask)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patched_model_does_what_the_exact_one_does(name: str) -> None:
    """Both refuse, before attention: transformers' projections ask torch how many heads no text has."""
    model = tiny_model("bert")
    exact = outcome(model)
    hf_effattn.patch_attention(model, name, **PATCHES[name])
    assert outcome(model) == exact
    query, key, value = (torch.zeros(0, 2, LENGTH, 16) for _ in range(3))
    output, _ = AttentionInterface()[name](model.encoder.layer[0].attention.self, query, key, value, None)
    assert output.shape == (0, LENGTH, 2, 16)
