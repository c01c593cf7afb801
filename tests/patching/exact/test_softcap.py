"""Logit softcapping, which SDPA does not support: Gemma 2 and VaultGemma, exactly, some rows at a time."""

from functools import partial
from typing import Any

import pytest
import torch
from support.products import product_dtypes
from support.tiny_decoders import FULL, MODELS, left_padded, make_model, tokens
from transformers import StaticCache

import hf_effattn
from hf_effattn.ops.shared import precision
from hf_effattn.patching.exact import softcap
from hf_effattn.patching.exact.reference import exact_weights
from hf_effattn.patching.exact.softcap import attend_with_softcap
from hf_effattn.patching.exact.windows import Window, dense_mask, seen_in_blocks

from .contract import METHOD, Kind, Near, check_recomputed_dropout, logits_of_seen, record, write_by_beams

LENGTH = 61
BENT = [name for name in ("gemma2", "vaultgemma") if name in MODELS]
# A bound that changes nearly all scores; the first two layers see all earlier tokens, the third a window.
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 2.0}
WINDOWED = {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "sliding_window": 17}


@pytest.fixture(params=[256, 7], ids=["all rows", "7 rows"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(softcap, "ROWS", request.param)
    return request.param


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and keys of every block of rows."""
    return record(monkeypatch, [(softcap, "_attend")], queries_and_keys)


def make_softcapped(model_type: str, **changes: Any) -> Any:
    model = make_model(model_type, **CAPPED | changes)
    model.set_attn_implementation("eager")  # by default in newer versions of transformers
    return model


def inputs_of(length: int = LENGTH, *, padded: bool = False) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(length)} | ({"attention_mask": left_padded(length)} if padded else {})


def queries_and_keys(query: torch.Tensor, **given: Any) -> tuple[int, int]:
    return query.shape[2], given["keys"].stop - given["keys"].start


def check_rows(calls: list[tuple[int, int]], inputs: dict[str, torch.Tensor]) -> None:
    """Eager scores of three layers would be as many; of windows a block of 64 rows sees 16 keys before it."""
    length = inputs["input_ids"].shape[1]
    assert calls
    assert sum(queries * keys for queries, keys in calls) <= 3 * length**2
    if length == 250:
        assert max(keys for queries, keys in calls if queries <= 64) <= 64 + 16


def weigh(model: Any) -> list[torch.Tensor]:
    """Those of rows of tokens that are no padding."""
    weighed = []
    for inputs in (inputs_of(250), inputs_of(250, padded=True)):
        real = inputs.get("attention_mask", torch.ones(2, 250)).bool()[:, None, :, None]
        weighed += [weights * real for weights in model(**inputs, output_attentions=True).attentions]
    return weighed


def kinds_of(model_type: str) -> list[Kind]:
    """Without windows and with."""
    alike: dict[str, Any] = {
        "near": Near(atol=1e-4),
        "slopes": Near(rtol=1e-3, atol=1e-3),
        "watched": ((softcap, "_attend"),),
        "recorded": queries_and_keys,
        "ran": check_rows,
        "unpatched": True,
    }
    return [
        Kind(
            model_type,
            partial(make_softcapped, model_type),
            inputs_of,
            logits_of_seen,
            says="bound their scores by a tanh",
            reports=(2, LENGTH, "eager"),
            compiled="eager" if model_type == "gemma2" else "",
            compiled_as={"num_hidden_layers": 1, "layer_types": ["full_attention"]},
            **alike,
        ),
        Kind(
            f"{model_type}, windows",
            partial(make_softcapped, model_type, **WINDOWED),
            partial(inputs_of, 250),
            logits_of_seen,
            weigh=weigh,
            weights_near=Near(atol=1e-5),
            causal=True,
            write=write_by_beams,
            **alike,
        ),
    ]


KINDS = [kind for model_type in BENT for kind in kinds_of(model_type)]


def drawn(dtype: torch.dtype = torch.float64, keys: int = 40, width: int = 8) -> tuple[torch.Tensor, ...]:
    """Query, key and value of four heads on two, scores of up to some 10."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 40, 8), (2, 2, keys, 8), (2, 2, keys, width)
    query, key, value = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return (3 * query).to(dtype), key.to(dtype), value.to(dtype)


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None, cap: float
) -> torch.Tensor:
    """Gemma 2's report, section 2: `cap * tanh(scores / cap)` before the softmax over what is seen."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = cap * torch.tanh(torch.einsum("bhnd,bhmd->bhnm", query, key) / query.shape[3] ** 0.5 / cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhnm,bhmd->bnhd", scores.softmax(dim=3), value)


def masks() -> dict[str, tuple[torch.Tensor | None, torch.Tensor | None, bool]]:
    """What is given, what it says, and whether the future is hidden beside it."""
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[0, 31:] = False
    dense = torch.rand(2, 1, 40, 40, generator=torch.Generator().manual_seed(3)) > 0.5
    dense |= torch.eye(40, dtype=torch.bool)
    added = torch.zeros(2, 1, 40, 40, dtype=torch.float64).masked_fill(~dense, torch.finfo(torch.float64).min)
    by_head = dense & (torch.rand(1, 4, 40, 40, generator=torch.Generator().manual_seed(4)) > 0.3)
    by_head |= torch.eye(40, dtype=torch.bool)
    one_row, least = padding[:, None, None], torch.finfo(torch.float64).min
    square = torch.ones(40, 40, dtype=torch.bool)
    cases: dict[str, tuple[torch.Tensor | None, torch.Tensor | None, bool]] = {
        "none": (None, None, False),
        "causal": (None, square.tril(), True),
        "keys": (padding, padding[:, None, None], False),
        "keys, causal": (padding, square.tril() & padding[:, None, None], True),
        "dense": (dense, dense, False),
        "added": (added, dense, False),
        "by head": (by_head, by_head, False),
        "by head, added": (torch.zeros(2, 4, 40, 40).double().masked_fill(~by_head, least), by_head, False),
        "one row": (one_row, one_row, False),
        "one row, added": (torch.zeros(2, 1, 1, 40).double().masked_fill(~one_row, least), one_row, False),
    }
    for name, window, causal in (("window", Window(5, 0), True), ("window, both sides", Window(5, 5), False)):

        def sees(
            text: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor, window: Window = window
        ) -> torch.Tensor:
            return (key >= query - window.before) & (key <= query + window.after)

        given = seen_in_blocks(window, sees, None, batch_size=2, length=40, device="cpu", block=16)
        cases[name] = (given, dense_mask(given, 40, causal=causal), causal)
    return cases


@pytest.mark.parametrize("mask", masks())
def test_values_gradients_and_weights(mask: str, rows: int, attended: list[tuple[int, int]]) -> None:
    given, seen, causal = masks()[mask]
    leaves = [tensor.requires_grad_() for tensor in drawn(width=6)]
    options: dict[str, Any] = {"softcap": 2.0, "scale": None, "dropout": 0.0, "causal": causal}
    expected = by_definition(*leaves, seen, 2.0)
    actual = attend_with_softcap(*leaves, given, **options)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double()
    ours, theirs = (torch.autograd.grad((output * weight).sum(), leaves) for output in (actual, expected))
    for gradient, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, wanted)
    with torch.no_grad():
        torch.testing.assert_close(attend_with_softcap(*leaves, given, **options), expected)
    # What no row of a block sees is not computed.
    if rows == 7 and (causal or "window" in mask):
        widest = {"causal": 40, "keys, causal": 40, "window": 12, "window, both sides": 17}[mask]
        assert max(keys for _, keys in attended) == widest
        assert sum(queries * keys for queries, keys in attended) < 0.65 * 2 * 40 * 40
    plain = None if seen is None else seen.expand(torch.broadcast_shapes(seen.shape, (2, 1, 40, 40)))
    query, key, value = leaves
    weights = exact_weights(query, key, plain, None, causal=False, softcap=2.0)
    torch.testing.assert_close((weights @ value.repeat_interleave(2, 1)).transpose(1, 2), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_in_float32_where_a_processor_has_no_others(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "CPU_MULTIPLIES_BFLOAT16", False)
    leaves = [tensor.requires_grad_() for tensor in drawn(dtype)]
    with product_dtypes() as dtypes:
        output = attend_with_softcap(*leaves, None, softcap=2.0, scale=None, dropout=0.0, causal=True)
        output.sum().backward()
    assert output.dtype == dtype
    assert set(dtypes) == {torch.float32}


def test_backward_through_vmap() -> None:
    """Scores within `vmap` say that they need no gradient, and were changed in place."""
    leaves = [tensor.requires_grad_() for tensor in drawn()]
    options: dict[str, Any] = {"softcap": 2.0, "scale": None, "dropout": 0.0, "causal": True}

    def attended(*given: torch.Tensor) -> torch.Tensor:
        return attend_with_softcap(*given, None, **options)

    together = torch.func.vmap(lambda *tensors: attended(*(part[None] for part in tensors))[0])(*leaves)
    actual, expected = (torch.autograd.grad(each.square().sum(), leaves) for each in (together, attended(*leaves)))
    torch.testing.assert_close(actual, expected)


def test_keys_of_another_text() -> None:
    """Cross-attention, and one token over a cache."""
    query, key, value = drawn(keys=23)
    options: dict[str, Any] = {"softcap": 2.0, "scale": 0.5, "dropout": 0.0, "causal": False}
    expected = by_definition(query * 0.5 * 8**0.5, key, value, None, 2.0)
    torch.testing.assert_close(attend_with_softcap(query, key, value, None, **options), expected)
    torch.testing.assert_close(attend_with_softcap(query[:, :, :1], key, value, None, **options), expected[:, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype: torch.dtype, rows: int) -> None:
    given = drawn(dtype)
    expected = by_definition(*(tensor.double() for tensor in given), torch.ones(40, 40).tril().bool(), 2.0)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            leaves = [tensor.clone().requires_grad_(grad) for tensor in given]
            actual = attend_with_softcap(*leaves, None, softcap=2.0, scale=None, dropout=0.0, causal=True)
        assert actual.dtype == dtype
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(dtype).eps


def test_rows_computed_again_lose_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softcap, "ROWS", 5)
    attend = partial(attend_with_softcap, mask=None, softcap=2.0, scale=None, causal=True)
    check_recomputed_dropout(attend, [(1, 1, 11, 2)] * 3, 1, monkeypatch)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("use_cache", [False, True])
@torch.no_grad()
def test_a_mask_to_be_added_is_added_as_without_the_patch(heads: int, use_cache: bool) -> None:
    """Also one of its own for each head, of which two share their keys."""
    model = make_softcapped("gemma2")
    assert model.config.num_attention_heads == 2 * model.config.num_key_value_heads
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    slopes = -torch.arange(1, heads + 1)[:, None, None] * later.T.float() / 8
    mask = slopes.expand(2, -1, -1, -1).masked_fill(later, torch.finfo(torch.float32).min)
    inputs: dict[str, Any] = {"input_ids": tokens(), "attention_mask": mask, "use_cache": use_cache}
    step = {"input_ids": tokens()[:, :1], "attention_mask": mask[:, :, -1:].new_zeros(2, heads, 1, LENGTH + 1)}
    step["attention_mask"][..., :9] = torch.finfo(torch.float32).min

    def outputs() -> list[torch.Tensor]:
        whole = model(**inputs, output_attentions=True)
        if not use_cache:
            return [whole.logits, *whole.attentions]
        return [whole.logits, model(**step, past_key_values=whole.past_key_values).logits]

    expected = outputs()
    for settings in ({"method": METHOD}, {"method": "bi-clustered", "min_length": 0}):
        hf_effattn.patch_attention(model, **settings)
        for actual, exact in zip(outputs(), expected, strict=True):
            torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_static_cache() -> None:
    model, written = make_softcapped("gemma2", **WINDOWED), []
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    for _ in range(2):
        cache = StaticCache(config=model.config, max_cache_len=64)
        written.append(model.generate(**inputs_of(30, padded=True), **options, past_key_values=cache))
        hf_effattn.patch_attention(model, METHOD)
    assert torch.equal(*written)


@torch.no_grad()
def test_no_bend_no_rows(attended: list[tuple[int, int]]) -> None:
    """Of a config without a softcap layers run as those of any other decoder."""
    model = make_model("gemma2", **FULL)
    exact = model(tokens()).logits
    hf_effattn.patch_attention(model, METHOD)
    torch.testing.assert_close(model(tokens()).logits, exact, rtol=0, atol=5e-5)
    assert attended == []
