"""Settings of their own for every head: each runs as its candidate does alone, through saving and loading too."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_decoders import make_model
from support.tiny_models import batch_for, encoded, tiny_model
from transformers import AutoConfig, AutoModel, PreTrainedModel

import hf_effattn
from hf_effattn.patching.exact.reference import causal_rows, exact_attention, visible_keys
from hf_effattn.patching.methods import Method, make_method
from hf_effattn.patching.methods.per_head import PerHead, Share, _grouping_cost, _runs_of_threads

CANDIDATES: list[dict[str, Any]] = [
    {"method": "i-clustered", "clusters": 4, "topk": 3},
    {"method": "bi-clustered", "clusters": 6, "topk": 8, "key_clusters": 7, "max_predicted_error": None},
]
# Three layers of two heads.
HEADS = [[0, 2], [1, 0], [2, 2]]
OF_DECODER: list[dict[str, Any]] = [
    {"method": "i-clustered", "clusters": 4, "exact_keys": 18, "segment_length": 4, "window": 4},
    {"method": "bi-clustered", "exact_keys": 18, "key_clusters": 4, "segment_length": 4, "window": 4}
    | {"max_predicted_error": None},
]


def per_head(heads: list[list[int]], candidates: list[dict[str, Any]] = CANDIDATES, **settings: Any) -> Method:
    return make_method("per-head", candidates=candidates, heads=heads, min_length=0, **settings)


def tensors(heads: int = 4, key_heads: int = 4, length: int = 45) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    counts = heads, key_heads, key_heads
    return [torch.randn(2, count, length, 8, generator=generator, dtype=torch.float64) for count in counts]


def patched(**settings: Any) -> PreTrainedModel:
    return hf_effattn.patch_attention(
        tiny_model("bert"), "per-head", candidates=CANDIDATES, heads=HEADS, min_length=0, **settings
    )


def padded(length: int = 45) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :9] = False
    return mask


@pytest.mark.parametrize("threads", [1, 2, 3, 20])
def test_threads_group_about_as_much_in_as_few_pieces_as_they_can(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    candidates: list[Method | None] = [make_method(**candidate) for candidate in CANDIDATES]
    shares: list[Share] = [(None, [5]), (candidates[1], [2, 3, 7, 9, 10]), (candidates[0], [0, 1, 4, 6, 8])]
    runs = _runs_of_threads(shares, torch.device("cpu"))
    assert len(runs) == threads
    assert sum(len(run) for run in runs if run) <= len(shares) + threads - 1
    costs = [sum(_grouping_cost(candidate) * len(heads) for candidate, heads in run) for run in runs]
    dearest = max(_grouping_cost(candidate) for candidate in candidates)
    assert max(costs) - sum(costs) / threads <= dearest
    for candidate, heads in shares:
        assert [head for run in runs for method, part in run if method == candidate for head in part] == heads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("group", "mask"), [(1, None), (2, padded())], ids=["alone", "two share keys, padded"])
def test_every_head_runs_as_its_candidate_alone(group: int, mask: torch.Tensor | None, causal: bool) -> None:
    row = [0, 2, 1, 0]
    candidates = OF_DECODER if causal else CANDIDATES
    method = per_head([row], candidates, causal=causal)
    query, key, value = tensors(4 * group)
    options: dict[str, Any] = {"key_mask": mask, "causal": causal}
    output = method.run(query, key, value, **options)
    for head, index in enumerate(row):
        inputs = query[:, group * head : group * (head + 1)], key[:, [head]], value[:, [head]]
        if index < len(candidates):
            alone = make_method(**candidates[index], causal=causal, min_length=0).run(*inputs, **options)
        else:
            visible = visible_keys(mask, query.shape[2], causal=causal)
            alone = exact_attention(*inputs, visible, scale=None, dropout_p=0.0, causal=causal)
            alone = alone if mask is None else alone * mask[:, None, :, None]
        torch.testing.assert_close(output[:, group * head : group * (head + 1)], alone)

    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    learned = method.run(*leaves, **options)
    torch.testing.assert_close(learned, output)
    gradients = torch.autograd.grad(learned.square().sum(), leaves)
    exact_part = torch.autograd.grad(method.run(*leaves, **options)[:, group : 2 * group].square().sum(), leaves)
    torch.testing.assert_close(exact_part[0][:, group : 2 * group], gradients[0][:, group : 2 * group])
    assert not exact_part[1][:, [0, 2, 3]].any()


@pytest.mark.parametrize("causal", [False, True])
def test_the_same_is_dropped_with_gradients_and_without(causal: bool, on_threads: Callable[[int], None]) -> None:
    """As the two passes of a checkpoint, `use_reentrant=True`, do."""
    method, outputs = per_head([[0, 2, 1, 1]], OF_DECODER if causal else CANDIDATES, causal=causal), []
    on_threads(2)
    for learns in (False, True):
        torch.manual_seed(0)
        inputs = [tensor.requires_grad_(learns) for tensor in tensors()]
        outputs.append(method.run(*inputs, causal=causal, dropout_p=0.3))
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.fixture
def three_threads(on_threads: Callable[[int], None]) -> None:
    on_threads(3)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
def test_rows_of_causal_attention_are_those_of_all(dtype: torch.dtype, tolerance: float) -> None:
    query, key, value = (tensor.to(dtype) for tensor in tensors(4, 2))  # pairs of query heads share keys
    exactly = (tensor.double() for tensor in (query, key, value))
    expected = exact_attention(*exactly, None, scale=0.3, dropout_p=0.0, causal=True)
    for rows in slice(0, 20), slice(20, 21), slice(13, 45):
        actual = causal_rows(query, key, value, rows, 0.3)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected[:, :, rows], rtol=tolerance, atol=tolerance)


def test_queries_of_exact_heads_are_divided_among_threads(
    three_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On more than two threads a head alone takes as long as all others together, and the others wait for it."""
    seen = []

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: slice, *options: Any) -> torch.Tensor:
        seen.append((rows.start, rows.stop))
        return causal_rows(query, key, value, rows, *options)

    monkeypatch.setattr("hf_effattn.patching.methods.per_head.causal_rows", noted)
    method = per_head([[0, 2, 1, 2]], OF_DECODER, causal=True)
    query, key, value = tensors()
    with torch.no_grad():
        whole = method.run(query, key, value, causal=True)
        method.run(query, key, value, key_mask=padded(), causal=True)  # masks are of whole heads
        method.run(query, key, value[..., :5], causal=True)  # so are values of another width
    assert sorted(seen) == [(0, 26), (26, 37), (37, 45)]  # about a third of the scores each
    exact = exact_attention(query, key, value, None, scale=None, dropout_p=0.0, causal=True)
    torch.testing.assert_close(whole[:, [1, 3]], exact[:, [1, 3]])


def test_layers_of_exact_heads_are_not_patched(attended: list[str]) -> None:
    model = tiny_model("bert")
    batch = batch_for(model)
    exact = encoded(model, batch)
    with pytest.warns(UserWarning, match="The patch will do nothing"):
        hf_effattn.patch_attention(model, "per-head", candidates=CANDIDATES, heads=[[2, 2]] * 3, min_length=0)
    assert torch.equal(encoded(model, batch), exact)
    assert attended == []
    hf_effattn.patch_attention(model, "per-head", candidates=CANDIDATES, heads=HEADS, min_length=0)
    assert not torch.equal(encoded(model, batch), exact)
    assert attended.count("per-head") == 2
    assert attended.count("i-clustered") == 2
    assert torch.equal(encoded(hf_effattn.unpatch_attention(model), batch), exact)


def test_a_shared_module_runs_the_most_exact_of_its_layers() -> None:
    method = per_head(HEADS)
    assert isinstance(method, PerHead)
    assert method.for_layers((0,)) == per_head([[0, 2]])
    assert method.for_layers((0, 1)) == per_head([[1, 2]])
    assert method.for_layers((2,)) is None
    model = tiny_model("albert")
    batch = batch_for(model)
    hf_effattn.patch_attention(model, "per-head", candidates=CANDIDATES, heads=HEADS[:1] * 3, min_length=0)
    encoded(model, batch)


def test_each_candidate_is_exact_below_its_own_length() -> None:
    candidates = [CANDIDATES[0] | {"min_length": 40}, CANDIDATES[1] | {"min_length": 60}]
    method = make_method("per-head", candidates=candidates, heads=[[0, 1]])
    assert method.shortest_length("cpu") == 40
    assert method.is_exact(39, "cpu")
    assert not method.is_exact(40, "cpu")
    query, key, value = tensors(2, 2)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    errors = (method.run(query, key, value) - exact).square().sum(dim=(0, 2, 3)).sqrt()
    assert errors[0] > 0.01
    assert errors[1] < 1e-12
    # One length for all of them.
    assert replace(method, min_length=0).run(query, key, value)[:, 1].sub(exact[:, 1]).norm() > 0.01


def refused(model: PreTrainedModel, match: str, kind: type[Exception] = ValueError, **settings: Any) -> None:
    before, config = model.config._attn_implementation, model.config.to_dict()
    with pytest.raises(kind, match=match):
        hf_effattn.patch_attention(model, **settings)
    assert model.config._attn_implementation == before
    assert model.config.to_dict() == config


def test_another_models_settings_are_refused(tmp_path: Path) -> None:
    model = tiny_model("bert")
    candidates = {"method": "per-head", "candidates": CANDIDATES}
    refused(model, "layers 2 and not 3", **candidates, heads=HEADS[:2])
    refused(model, "key_heads 3 and not 2", **candidates, heads=[[0, 1, 2]] * 3)
    made = {"model": {"model_type": "roberta", "layers": 3, "key_heads": 2, "hidden_size": 32}}
    refused(model, "model_type 'roberta' and not 'bert'", **candidates, heads=HEADS, calibration=made)
    refused(model, "hf_effattn.calibrate", method="per-head")
    refused(model, "heads has 3, but there are 2 candidates", **candidates, heads=[[0, 3]] * 3)
    refused(model, "as many heads in every layer", **candidates, heads=[[0, 1], [0], [0, 1]])
    refused(model, "indices of candidates", TypeError, **candidates, heads=[[0, 0.5]] * 3)
    refused(model, "cannot be a candidate", method="per-head", candidates=[{"method": "cst"}], heads=HEADS)
    for name, value in (("tolerance", 0.1), ("cuda_graph", "auto")):
        shared = [CANDIDATES[0] | {name: value}]
        refused(model, f"with a {name} cannot be", method="per-head", candidates=shared, heads=HEADS)
    refused(model, "candidate must be a method or", TypeError, method="per-head", candidates=["x"], heads=HEADS)
    refused(model, "name a method")

    newer = {"version": 4, **candidates, "heads": HEADS}
    file = tmp_path / "effattn.json"
    file.write_text(json.dumps(newer))
    refused(model, r"newer hf_effattn \(format 4", settings=file)
    file.write_text(json.dumps(newer | {"version": 3}))
    refused(model, 'of "per-head", and the method asked for is "clustered"', settings=file, method="clustered")
    file.write_text("{")
    refused(model, "is no JSON", settings=file)
    file.write_text("[1]")
    refused(model, "holds no settings of hf_effattn", settings=file)
    refused(model, "there are no settings at", FileNotFoundError, settings=tmp_path / "other.json")
    AutoConfig.for_model("bert").save_pretrained(tmp_path / "plain")
    refused(model, "holds no settings of hf_effattn", settings=tmp_path / "plain")
    refused(model, 'give it as method="bi-clustered"', settings="bi-clustered")  # no repository of that name


def test_the_name_alone_is_refused_by_the_forward_pass() -> None:
    """It ran exact attention without a word."""
    model = tiny_model("bert")
    model.set_attn_implementation("per-head")
    with pytest.raises(ValueError, match='"per-head" has no settings of its own'):
        model(**batch_for(model).inputs)


def test_saved_and_loaded_and_settings_of_a_file(tmp_path: Path) -> None:
    model = patched(tolerance=0.5, calibration={"max_error": 0.1, "error_of": "head", "errors": [[0.01, 0.0]] * 3})
    model.save_pretrained(tmp_path)
    batch = batch_for(model, padding="right")
    loaded = hf_effattn.from_pretrained(AutoModel, tmp_path).eval()
    other = hf_effattn.patch_attention(tiny_model("bert"), settings=tmp_path)
    for copy in (loaded, other):
        assert copy.config.effattn == model.config.effattn
        assert torch.equal(encoded(copy, batch), encoded(model, batch))
    hf_effattn.patch_attention(other, settings=tmp_path, tolerance=0.1)
    assert other.config.effattn["tolerance"] == 0.1
    hf_effattn.patch_attention(other, settings=other.config.effattn, layers=[0])
    assert other.config.effattn["layers"] == [0]


@torch.no_grad()
def test_the_weights_are_those_of_the_heads() -> None:
    model, plain = patched(), tiny_model("bert")
    plain.set_attn_implementation("eager")
    batch = batch_for(model)
    weights, exact = (encoder(**batch.inputs, output_attentions=True).attentions[0] for encoder in (model, plain))
    assert not torch.allclose(weights[:, 0], exact[:, 0], atol=1e-3)
    torch.testing.assert_close(weights[:, 1], exact[:, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_a_decoder_generates_after_a_prompt_by_its_heads(tolerance: float | None) -> None:
    model = make_model("llama")
    tokens = torch.randint(5, 60, (1, 50), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "pad_token_id": 0}
    exact = model.generate(tokens, return_dict_in_generate=True, **options).logits[0]
    hf_effattn.patch_attention(
        model, "per-head", candidates=OF_DECODER, heads=HEADS, min_length=0, tolerance=tolerance
    )
    logits = model.generate(tokens, return_dict_in_generate=True, **options).logits[0]
    # A prompt's outputs but the last are not read, so that the heads above the tolerance may be exact.
    assert torch.allclose(logits, exact, atol=1e-4) == (tolerance is not None)
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        tokens[0, 40:] = 7
        assert torch.equal(before[:, :40], model(tokens, use_cache=False).logits[:, :40])
