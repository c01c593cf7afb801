"""Attention sinks, which transformers' SDPA path has not: decoders, and a filter of private words, beside eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.causal_cases import exact
from support.tiny_decoders import EAGER, EXPERTS, GROUPED, MODELS, SINKING, class_of, left_padded, make_model, tokens
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForTokenClassification, DynamicCache

import hf_effattn
from hf_effattn.measuring.recording import Measured, SeenAttention, recording
from hf_effattn.patching.exact import call
from hf_effattn.patching.exact.reference import exact_attention, exact_weights
from hf_effattn.patching.methods import make_method

from .contract import METHOD, Kind, Near, each, logits_of_seen, shapes

LENGTH = 61
SMALL = {"exact_keys": 18, "key_clusters": 3, "segment_length": 4, "window": 4, "min_length": 0}
CANDIDATES = [{"method": "bi-clustered", **SMALL}, {"method": "bi-clustered", **SMALL, "exact_keys": 6}]
WINDOWED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9}
WITH_SINKS = [name for name in SINKING if name in MODELS]
each_model = pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in ("gpt_oss", "mimo_v2_flash") else pytest.mark.slow)
        for name in WITH_SINKS
    ],
)


def make_sinking(model_type: str = "gpt_oss", **changes: Any) -> Any:
    """A model whose sinks have from none to most of the weight."""
    model = make_model(model_type, max_position_embeddings=512, **changes)
    for module in model.modules():
        if getattr(module, "sinks", None) is not None:
            module.sinks.data = torch.linspace(-3, 5, len(module.sinks))
    return model


def drawn(length: int = LENGTH, dtype: torch.dtype = torch.float64, heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads_of, length, 8, generator=generator, dtype=torch.float64) for heads_of in (heads, 2, 2)
    )
    return *(tensor.to(dtype) for tensor in (query, key, value)), torch.linspace(-3, 4, heads).to(dtype)


@pytest.mark.slow
def test_types_without_sdpa_are_known() -> None:
    assert {name for name in MODELS if not class_of(name)._supports_sdpa} == set(EAGER) & set(MODELS)


@pytest.mark.parametrize("masks", [False, True])
def test_exact_attention_and_its_gradients(masks: bool) -> None:
    leaves = [tensor.requires_grad_() for tensor in drawn()]
    mask = left_padded().bool() if masks else None
    seen = None if mask is None else mask[:, None, None] & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    *given, sinks = leaves
    actual = exact_attention(*given, seen, scale=None, dropout_p=0.0, causal=True, attention_sinks=sinks)
    expected = exact(*given, mask, sinks)
    rows = torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(actual.transpose(1, 2)[rows], expected.transpose(1, 2)[rows])
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).double() * rows[:, None, :, None]
    ours, theirs = (torch.autograd.grad((output * weight).sum(), leaves) for output in (actual, expected))
    for actual, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_keeps_the_score_of_a_sink(dtype: torch.dtype) -> None:
    """A sink of 70 beside keys of nearly as much: 8 bits of it would be off by up to a quarter."""
    query, key, value, _ = drawn(dtype=dtype)
    sinks, ones = torch.full((4,), 70.3, dtype=torch.float32), torch.ones(2, LENGTH, 8, dtype=dtype)
    query, key = torch.full_like(query, 5.0), torch.full_like(key, 4.96)
    value = ones[:, None].expand_as(value)
    options: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "causal": True}
    actual = exact_attention(query, key, value, None, **options, attention_sinks=sinks)
    expected = exact(query.double(), key.double(), value.double(), None, sinks.double())
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_sink_of_minus_infinity_is_none(dtype: torch.dtype) -> None:
    query, key, value, sinks = drawn(dtype=dtype)
    none = torch.full_like(sinks, -torch.inf)
    options: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "causal": True}
    options["attention_sinks"] = none
    actual = exact_attention(query, key, value, None, **options)
    plain = exact_attention(query, key, value, None, **options | {"attention_sinks": None})
    close = 2 * torch.finfo(dtype).eps  # rows are wider, and their products sums of other parts
    torch.testing.assert_close(actual, plain, rtol=close, atol=close)


def test_weights() -> None:
    query, key, value, sinks = drawn()
    weights = exact_weights(query, key, None, None, causal=True, attention_sinks=sinks)
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), exact(query, key, value, None, sinks))
    settings = make_method("bi-clustered", causal=True, **SMALL)
    weights = settings.weights(query, key, causal=True, attention_sinks=sinks)
    actual = settings.run(query, key, value, causal=True, attention_sinks=sinks)
    torch.testing.assert_close(weights @ value.repeat_interleave(2, 1), actual)


@each_model
@torch.no_grad()
def test_generation_is_eager_generation_where_the_patch_is_exact(model_type: str) -> None:
    model = make_sinking(model_type)
    options = {"attention_mask": left_padded(), "do_sample": False, "max_new_tokens": 5, "pad_token_id": 1}
    expected = model.generate(tokens(), **options)
    hf_effattn.patch_attention(model, "exact")
    assert torch.equal(model.generate(tokens(), **options), expected)
    assert torch.equal(model.generate(tokens(), **options, cache_implementation="static"), expected)
    cache = DynamicCache(config=model.config)
    model(tokens()[:, :40], past_key_values=cache)
    chunk = model(tokens()[:, 40:], past_key_values=cache).logits
    hf_effattn.unpatch_attention(model)
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(chunk, model(tokens()).logits[:, 40:], rtol=0, atol=5e-5)


@each_model
@torch.no_grad()
def test_attention_weights_of_exact_attention(model_type: str) -> None:
    model = make_sinking(model_type)
    expected = model(tokens(), output_attentions=True).attentions
    hf_effattn.patch_attention(model, "exact")
    actual = model(tokens(), output_attentions=True).attentions
    for layer, (weights, other) in enumerate(zip(actual, expected, strict=True)):
        if model_type.startswith("granite"):  # which return them as they are without sinks
            sums, of_others = weights.sum(dim=3), other.sum(dim=3)
            assert (sums < of_others + 1e-5).all()
            assert (sums < of_others - 1e-3).any()
        else:
            torch.testing.assert_close(weights, other, rtol=0, atol=1e-5, msg=f"layer {layer}")


def test_training_reaches_the_sinks() -> None:
    """With a window over all the method attends as eager attention does, and its gradients are those."""
    gradients = {}
    for name in ("eager", "patched"):
        model = make_sinking().double()
        if name == "patched":
            hf_effattn.patch_attention(model, "bi-clustered", **SMALL | {"window": 52, "exact_keys": 60})
        model.train()(tokens(), labels=tokens(), attention_mask=left_padded()).loss.backward()
        gradients[name] = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert sum(key.endswith("sinks") for key in gradients["patched"]) == 3
    for key, expected in gradients["eager"].items():
        torch.testing.assert_close(gradients["patched"][key], expected, rtol=1e-9, atol=1e-12, msg=key)


@pytest.mark.parametrize("threads", [1, 3])
def test_every_head_has_its_own_sink(threads: int, on_threads: Callable[[int], None]) -> None:
    """Exact heads and candidates, with gradients and, in parts, without."""
    on_threads(threads)
    query, key, value, sinks = drawn()
    method = make_method("per-head", causal=True, candidates=CANDIDATES, heads=[[2, 0]]).for_layers((0,))
    assert method is not None
    with torch.no_grad():
        parts = method.run(query, key, value, causal=True, attention_sinks=sinks)
    whole = method.run(query.requires_grad_(), key, value, causal=True, attention_sinks=sinks)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(parts[:, :2], exact(query, key, value, None, sinks)[:, :2])
    alone = method.candidates[0].run(query[:, 2:], key[:, 1:], value[:, 1:], causal=True, attention_sinks=sinks[2:])
    torch.testing.assert_close(parts[:, 2:], alone)
    assert not torch.allclose(parts, method.run(query, key, value, causal=True))
    given = query.detach(), key, value
    torch.autograd.grad(
        method.run(*given, causal=True, attention_sinks=sinks.requires_grad_()).sum(), sinks
    )  # which alone learn


@torch.no_grad()
def test_a_tolerance_measures_beside_the_sinks() -> None:
    query, key, value, sinks = drawn(400)
    expected = exact(query, key, value, None, sinks)
    options: dict[str, Any] = {"causal": True, "attention_sinks": sinks, "module": torch.nn.Module().eval()}
    method = make_method("bi-clustered", causal=True, **SMALL, tolerance=1e-3)
    output = method.run(query, key, value, **options)
    measured = hf_effattn.patching.measured.last_measured(options["module"])
    assert measured is not None
    assert measured.exact.all()
    torch.testing.assert_close(output, expected)
    plain = make_method("bi-clustered", causal=True, **SMALL).run(query, key, value, **options)
    true = ((plain - expected).square().sum(dim=(2, 3)) / expected.square().sum(dim=(2, 3))).sqrt()
    assert ((measured.error / true > 0.5) & (measured.error / true < 2)).all()


@torch.no_grad()
def test_calibration_and_reports_compare_with_sinks() -> None:
    model = make_sinking(**WINDOWED)
    seen: list[SeenAttention] = []

    def look(qkv: SeenAttention) -> torch.Tensor:
        seen.append(qkv)
        return qkv.exact()

    expected = model(tokens()).logits
    with recording(Measured.of(model), look):
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=0, atol=5e-5)
    assert [qkv.layer for qkv in seen] == [0, 2]
    wide = make_method("bi-clustered", causal=True, **SMALL | {"window": 52, "exact_keys": 60})
    for qkv in seen:
        assert qkv.attention_sinks is model.model.layers[qkv.layer].self_attn.sinks
        by_hand = exact(qkv.query, qkv.key, qkv.value, None, qkv.attention_sinks)
        torch.testing.assert_close(qkv.exact().transpose(1, 2), by_hand, rtol=0, atol=1e-5)
        torch.testing.assert_close(wide.run(qkv.query, qkv.key, qkv.value, **qkv.options), by_hand, rtol=0, atol=1e-5)
    texts = [{"input_ids": tokens()[:1]}, {"input_ids": tokens()[1:]}]
    calibration = hf_effattn.calibrate(model, texts, max_error=0.2, candidates=CANDIDATES)
    assert model.config._attn_implementation == "eager"
    hf_effattn.patch_attention(model, settings=calibration)
    assert model.config._attn_implementation == "per-head"
    assert not torch.equal(model(tokens()).logits, expected)


# Of OpenAI, with windows to both sides, and sinks in all layers.
FILTER_TYPE = "openai_privacy_filter"
has_filters = pytest.mark.skipif(FILTER_TYPE not in CONFIG_MAPPING, reason="transformers is too old for it")
FILTER_SIZES: dict[str, Any] = (
    GROUPED
    | EXPERTS
    | {
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "sliding_window": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
)
BLOCKS = (2, 1, 6, 64, 64 + 2 * 16)  # of two texts of 300 tokens, one of them behind a gap


def make_privacy_filter(**changes: Any) -> Any:
    """A model whose sinks have from none to most of the weight."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(FILTER_TYPE, **FILTER_SIZES | changes)
    model = AutoModelForTokenClassification.from_config(config, experts_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data = torch.linspace(-3, 5, 4)
    return model


def two_texts(padding: str | None = "right", length: int = 300) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(1))}
    if padding is not None:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 90 :] = 0
        inputs["attention_mask"] = mask if padding == "right" else mask.flip(1)
    return inputs


def weigh_privacy_filter(model: Any) -> list[torch.Tensor]:
    """Those of short texts, too; of rows of tokens that are no padding."""
    weighed = []
    for inputs in (two_texts("right", 120), two_texts("right")):
        output, real = model(**inputs, output_attentions=True), inputs["attention_mask"].bool()
        weighed += [output.logits[real], *(weights.transpose(1, 2)[real] for weights in output.attentions)]
    return weighed


def check_two_windows(calls: list[torch.Tensor], _: Any) -> None:
    assert shapes(calls) == [BLOCKS] * 2


FILTER = Kind(
    "privacy filter",
    make_privacy_filter,
    two_texts,
    logits_of_seen,
    slopes=Near(atol=1e-5, of_each=1e-5),
    cases=each(padding=(None, "left", "right")),
    watched=((call, "attend_in_blocks"),),
    ran=check_two_windows,
    learns=("sinks",),
    unpatched=True,
    auto=AutoModelForTokenClassification,
    load={"experts_implementation": "eager"},
    weigh=weigh_privacy_filter,
    weights_near=Near(atol=1e-5),
    retrained=Near(rtol=1e-4, atol=1e-4),
    whole=logits_of_seen,
    heard=True,
    says="see a sliding window only",
    reports=(2, 300, None),
    alone=True,
)
KINDS = [FILTER] if FILTER_TYPE in CONFIG_MAPPING else []


@has_filters
@torch.no_grad()
def test_a_layer_sees_its_window_and_no_more(in_blocks: list[torch.Size]) -> None:
    model, inputs = hf_effattn.patch_attention(make_privacy_filter(num_hidden_layers=1), METHOD), two_texts(None)
    before, changed = model(**inputs).logits, inputs["input_ids"].clone()
    changed[:, 150] = (changed[:, 150] + 7) % 55 + 5
    away = (model(input_ids=changed).logits - before).abs().amax(dim=(0, 2))
    assert away[134:167].min() > 0
    assert away[:134].max() == away[167:].max() == 0
    assert len(in_blocks) == 2


@has_filters
@torch.no_grad()
def test_autocast_runs_it_in_blocks(in_blocks: list[torch.Size]) -> None:
    model, inputs = hf_effattn.patch_attention(make_privacy_filter(), METHOD).train(), two_texts()
    (expected,) = logits_of_seen(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (logits,) = logits_of_seen(model, inputs)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    assert len(in_blocks) == 4
