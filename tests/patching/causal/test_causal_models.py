"""Models that mask the future: no leak, generation with caches, padding, packing, sliding windows, training."""

import json
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_vision_language as vision_language
from support.tiny_decoders import EAGER, MODELS, SINKING, SIZES, left_padded, make_model, tokens
from support.tiny_models import WITH_OWN_TESTS, as_one_graph
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

import hf_effattn
from hf_effattn.patching.methods import METHODS as EVERY_METHOD
from hf_effattn.patching.methods import crossover
from hf_effattn.patching.model_types.stacks import find_stacks
from hf_effattn.patching.model_types.table import MODEL_TYPES

SMALL: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 4},
    "i-clustered": {"clusters": 4, "exact_keys": 18},
    "bi-clustered": {"exact_keys": 18, "key_clusters": 3},
}
METHODS = tuple(SMALL)
TINY = [{"method": "bi-clustered", "exact_keys": 6, "key_clusters": 1, "segment_length": 4, "window": 4}]
LENGTH = 61
# Their routers, or layers without attention, calculate in float32 whatever the model's dtype.
FLOAT32_WITHIN = (
    "glm4_moe", "glm4_moe_lite", "minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid",
    "falcon_h1", "nemotron_h", "mimo_v2_flash", "exaone_moe", "laguna", "dots1", "hy_v3", "solar_open", "bamba",
    "bailing_hybrid", "kimi_linear", "olmo_hybrid",
)  # fmt: skip
# transformers itself lets packed sequences see each other there.
NOT_PACKED = ("opt", "biogpt", "granitemoehybrid", "gpt_oss", "afmoe")
FAST = ("gpt2", "llama", "opt", "gpt_oss")  # the others differ in projections and positions, not in what attends


def slow_but(fast: Collection[str], names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


each_model = pytest.mark.parametrize("model_type", slow_but(FAST, MODELS))
each_method = pytest.mark.parametrize("method", METHODS)
# Every type by its default; by every method those in which what attends differs: sinks, queries and keys wider than
# values, layers of another kind between.
ATTENDING = (*FAST, "mimo_v2_flash", "deepseek_v3", "qwen3_next")
MODELS_AND_METHODS = [
    (method, name) for method in METHODS for name in MODELS if method == "bi-clustered" or name in ATTENDING
]
each_model_and_cache = pytest.mark.parametrize(
    ("cache", "model_type"),
    [("dynamic", name) for name in MODELS] + [("static", name) for name in MODELS if name in ATTENDING],
)


def patch(model: Any, method: str = "bi-clustered", **settings: Any) -> Any:
    small = {"segment_length": 8, "window": 4, "min_length": 0} | SMALL[method]
    return hf_effattn.patch_attention(model, method, **small | settings)


def test_every_causal_model_type_and_method_is_covered() -> None:
    """Those that read images, too: tests/patching/causal/test_vision_language.py."""
    assert set(SMALL) == set(EVERY_METHOD) - set(WITH_OWN_TESTS)
    causal = {name for name, entry in MODEL_TYPES.items() if entry.causal}
    assert causal == {*SIZES, *(f"{name}_text" for name in vision_language.SIZES)}


@pytest.mark.slow_except("*32-clustered-llama|*32-i-clustered-llama|*32-bi-clustered-gpt_oss|*16-bi-clustered-gpt2")
@pytest.mark.parametrize(
    ("dtype", "method", "model_type"),
    [
        *((torch.float32, method, name) for method, name in MODELS_AND_METHODS),
        *((torch.bfloat16, method, name) for method, name in MODELS_AND_METHODS if name in ATTENDING),
    ],
    ids=str,
)
@torch.no_grad()
def test_no_logit_sees_a_later_token(model_type: str, method: str, dtype: torch.dtype, lengths: list[int]) -> None:
    model = patch(make_model(model_type).to(dtype), method)
    ids = tokens()
    mask = left_padded()
    before = model(ids, attention_mask=mask).logits
    assert len(lengths) == 3
    for position in (12, 37, 60) if model_type in ATTENDING else (37,):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 7) % 55 + 5
        after = model(changed, attention_mask=mask).logits
        # Of experts, how many tokens one reads tells the last bits of the others in a product.
        close = 8 * torch.finfo(dtype).eps if "num_experts" in SIZES[model_type] else 0.0
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=close)
        assert not torch.equal(before[:, position], after[:, position])


@each_model
@torch.no_grad()
def test_a_window_over_all_is_the_exact_model(model_type: str, lengths: list[int]) -> None:
    eager = model_type in EAGER  # whose softmax is float32, beside masks that float32 has not
    model = make_model(model_type).to(torch.float32 if eager else torch.float64)
    mask = left_padded()
    ids = tokens()
    exact = model(ids, attention_mask=mask).logits
    # A longer window than the input would be handed to SDPA at once; this leaves the op one segment of older keys.
    patch(model, "bi-clustered", window=52, exact_keys=60)
    actual = model(ids, attention_mask=mask).logits
    assert len(lengths) == 3
    close = 5e-5 if eager else 4e-14
    torch.testing.assert_close(actual[mask.bool()], exact[mask.bool()], rtol=0, atol=close)
    patch(model, "bi-clustered", window=60)
    actual = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], exact[mask.bool()], rtol=0, atol=close * eager)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(model(ids, attention_mask=mask).logits, exact)


@pytest.mark.slow_except("i-clustered-gpt2", "bi-clustered-gpt_oss")
@pytest.mark.parametrize(("method", "model_type"), MODELS_AND_METHODS)
@torch.no_grad()
def test_a_padded_batch_is_its_texts_alone(model_type: str, method: str) -> None:
    model = patch(make_model(model_type).double(), method)
    ids = tokens()
    alone = model(ids[:1, 9:]).logits
    mask = left_padded()
    left = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    close = 1e-3 if model_type in FLOAT32_WITHIN else 1e-9
    torch.testing.assert_close(left[:1, 9:], alone, rtol=close, atol=close)
    rolled = ids.roll(-9, dims=1)
    right = model(rolled, attention_mask=mask.flip(1)).logits
    torch.testing.assert_close(right[:1, :-9], alone, rtol=close, atol=close)


@torch.no_grad()
def test_where_no_length_was_measured_the_model_stays_exact_and_says_so(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    """As on a GPU, where the kernels of the causal form have not been timed."""
    model, ids = make_model("llama"), tokens()
    exact = model(ids).logits
    patch(model, min_length=None)  # as on a CPU, before it moves
    monkeypatch.setattr(crossover, "CAUSAL_CROSSOVER", {"elsewhere": crossover.CAUSAL_CROSSOVER["cpu"]})
    never = (
        r'on "cpu" exact attention runs at every length.* timed on CPUs only since it has kernels.*pass min_length=0'
    )
    with pytest.warns(UserWarning, match=f"The patch approximates nothing: {never}") as said:
        assert torch.equal(model(ids).logits, exact)
    assert {warning.filename for warning in said} == {__file__}
    with pytest.warns(UserWarning, match=f"The patch will do nothing: {never}"):
        patch(model, min_length=None)
    assert lengths == []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The patch")
        model.to("meta")  # which says nothing of where it will run
        patch(model, min_length=None)
        model = make_model("llama")
        patch(model, min_length=LENGTH)
        assert not torch.equal(model(ids).logits, exact)
        assert len(lengths) == 3
        assert torch.equal(model(ids[:, 1:]).logits, hf_effattn.unpatch_attention(model)(ids[:, 1:]).logits)


@pytest.mark.slow_except("dynamic-gpt_oss", "static-gpt2")
@each_model_and_cache
@torch.no_grad()
def test_generation(model_type: str, cache: str, lengths: list[int]) -> None:
    """The prompt runs by the method, once per layer; every step after it exactly over the keys of the cache."""
    model = patch(make_model(model_type))
    ids = tokens(40)
    mask = left_padded(40)
    options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 1}
    kind = {"cache_implementation": "static"} if cache == "static" else {}
    written = model.generate(ids, attention_mask=mask, **options, **kind, disable_compile=True)
    assert lengths == [40, 40, 40]
    by_hand, past = ids, DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=past).logits
    for _ in range(6):
        chosen = logits[:, -1].index_fill(1, torch.tensor([3]), -torch.inf).argmax(dim=1, keepdim=True)
        by_hand = torch.cat([by_hand, chosen], dim=1)
        mask = torch.cat([mask, torch.ones_like(chosen)], dim=1)
        at = mask.sum(dim=1, keepdim=True) - 1
        logits = model(chosen, attention_mask=mask, position_ids=at, past_key_values=past).logits
    assert torch.equal(written, by_hand)


@pytest.mark.slow_except("dynamic-llama", "dynamic-gpt_oss", "static-gpt2", "dynamic-opt")
@each_model_and_cache
@torch.no_grad()
def test_further_chunks_of_a_prompt_are_exact_over_the_cache(model_type: str, cache: str, lengths: list[int]) -> None:
    model = make_model(model_type).double()
    ids = tokens(40)

    def make_cache() -> Any:
        return DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=64)

    exact_cache = make_cache()
    model(ids[:, :25], past_key_values=exact_cache)
    exact = model(ids[:, 25:], past_key_values=exact_cache).logits
    # A window over the first chunk makes that one exact too, so that the second can be compared.
    patch(model, window=20, exact_keys=24)
    own_cache = make_cache()
    model(ids[:, :25], past_key_values=own_cache)
    assert lengths == [25] * 3
    lengths.clear()
    actual = model(ids[:, 25:], past_key_values=own_cache).logits
    assert lengths == []
    # Eager attention has a softmax in float32, but for gpt-oss.
    close = 5e-5 if model_type in EAGER and model_type != "gpt_oss" else 4e-14
    torch.testing.assert_close(actual, exact, rtol=0, atol=close)


@pytest.mark.parametrize(
    "model_type",
    slow_but((*FAST, "qwen3_next"), [name for name in MODELS if name not in NOT_PACKED]),
)
@torch.no_grad()
def test_packed_sequences_stay_exact(model_type: str, lengths: list[int]) -> None:
    model = make_model(model_type)
    ids = tokens()
    positions = torch.cat([torch.arange(30), torch.arange(31)]).expand(2, -1)
    exact = model(ids, position_ids=positions, use_cache=False).logits
    patch(model)
    actual = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, exact, rtol=0, atol=5e-5 * (model_type in EAGER))
    assert lengths == []


@pytest.mark.parametrize("model_type", slow_but(("phi3",), ["phi3", "phimoe", "mixtral", "ministral3", "starcoder2"]))
@torch.no_grad()
def test_a_window_that_no_input_is_longer_than_is_none(model_type: str, lengths: list[int]) -> None:
    """As in Phi-3-mini-128k, whose window is twice as long as its positions."""
    model, ids = make_model(model_type, sliding_window=256), tokens()
    mask = left_padded()
    patch(model)
    actual = model(ids, attention_mask=mask).logits
    assert lengths == [LENGTH] * 3
    without = patch(make_model(model_type, sliding_window=None))
    assert torch.equal(actual, without(ids, attention_mask=mask).logits)
    texts = [{"input_ids": ids[:1]}, {"input_ids": ids[1:]}]
    windowed = make_model(model_type, sliding_window=256)
    calibration = hf_effattn.calibrate(windowed, texts, max_error=0.9, min_length=0, candidates=TINY)
    assert "   6 heads: bi-clustered" in str(calibration)
    lengths.clear()
    further = tokens(300, batch=1)  # longer than all that the model is made for: the window cuts
    exact = make_model(model_type, sliding_window=256)
    exact.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(further).logits, exact(further).logits, rtol=0, atol=1e-4)
    assert lengths == []


def begins_without_attention(sizes: dict[str, Any]) -> bool:
    kinds = sizes.get("layer_types", sizes.get("layers_block_type", ()))
    names_its_layers = "attn_layer_period" in sizes or "attn_layer_indices" in sizes  # Jamba, Bamba: from 1 on
    return names_its_layers or ("full_attention" not in kinds[:1] and "full_attention" in kinds)


HYBRIDS = [name for name in MODELS if begins_without_attention(SIZES[name])]


@pytest.mark.parametrize("model_type", slow_but(("qwen3_next",), HYBRIDS))
@torch.no_grad()
def test_layers_of_a_hybrid_keep_their_numbers(model_type: str, lengths: list[int]) -> None:
    model = make_model(model_type)
    layers = [module.layer_idx for module in find_stacks(model)[0].modules]
    ids = tokens()
    with pytest.raises(ValueError, match=rf"layer 0 of .* has no attention; .* full attention are \[{layers[0]}, "):
        patch(model, layers=[0, layers[0]])
    last = model.config.num_hidden_layers - 1
    if last not in layers:
        with pytest.raises(ValueError, match=rf"layer {last} of .* has no attention"):
            patch(model, layers=[-1])
    patch(model, layers=layers[1:2])
    model(ids)
    assert len(lengths) == 1
    texts = [{"input_ids": ids[:1]}, {"input_ids": ids[1:]}]
    calibration = hf_effattn.calibrate(model, texts, max_error=0.9, candidates=TINY, min_length=0)
    assert f"{3 * model.config.num_key_value_heads:>4} heads: bi-clustered" in str(calibration)
    assert "   0 heads: exact" in str(calibration)
    lengths.clear()
    hf_effattn.patch_attention(make_model(model_type), settings=calibration)(ids)
    assert len(lengths) == 3


@pytest.mark.parametrize(
    "options", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}], ids=str
)
@torch.no_grad()
def test_scaling_of_gpt2(options: dict[str, bool], lengths: list[int]) -> None:
    model = make_model("gpt2", **options).double()
    exact = model(tokens()).logits
    patch(model, window=52, exact_keys=60)
    torch.testing.assert_close(model(tokens()).logits, exact, rtol=0, atol=4e-14)
    assert lengths == [LENGTH] * 3


@torch.no_grad()
def test_cross_attention_of_gpt2_stays_exact(lengths: list[int]) -> None:
    model = patch(make_model("gpt2", add_cross_attention=True))
    model(tokens(), encoder_hidden_states=torch.randn(2, LENGTH, 32))
    assert len(lengths) == 3


@pytest.mark.slow_except("bi-clustered")
@each_method
def test_training(method: str, lengths: list[int]) -> None:
    model = patch(make_model("llama", num_hidden_layers=2), method).train()
    model.gradient_checkpointing_enable()
    ids = tokens()
    model(ids, labels=ids, use_cache=False).loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    model.zero_grad()
    model.gradient_checkpointing_disable()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


def test_dropout_of_training_is_drawn_and_replayed(lengths: list[int]) -> None:
    model = patch(make_model("gpt2", attn_pdrop=0.2, embd_pdrop=0.0, resid_pdrop=0.0)).train()

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(tokens()).logits

    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    assert lengths == [LENGTH] * 12


@as_one_graph
@pytest.mark.slow_except("cst", "exact")
@pytest.mark.parametrize("method", ["i-clustered", "cst", "exact"])
@torch.no_grad()
def test_a_graph_that_has_to_serve_packed_texts_says_that_it_is_exact(method: str) -> None:
    """Positions tell packed texts apart: which, no graph knows while it is traced."""
    model, ids = make_model("gpt2", n_layer=1), tokens()
    given = {"use_cache": False, "position_ids": torch.arange(ids.shape[1])[None]}
    exact = model(ids, **given).logits
    if method in SMALL:
        patch(model, method)
    else:
        hf_effattn.patch_attention(model, method)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = torch.export.export(model, (ids,), given)
    said = [str(warning.message) for warning in caught if f'"{method}" does not run in it' in str(warning.message)]
    torch.testing.assert_close(program.module()(ids, **given).logits, exact)
    assert bool(said) == (method != "exact")
    assert all("attention_mask=torch.ones_like" in warning for warning in said)


@pytest.mark.slow_except("gpt_oss")
@pytest.mark.parametrize("model_type", [name for name in MODELS if name in (*ATTENDING, *EAGER, *HYBRIDS)])
@torch.no_grad()
def test_attention_weights(model_type: str) -> None:
    """GPT-2 and OPT do not hand the question on."""
    model = make_model(model_type).double()
    patch(model)
    assert not model(tokens()).attentions
    weights = model(tokens(), output_attentions=True).attentions
    assert len(weights) == 3
    for layer in weights:
        assert layer.shape == (2, 4, LENGTH, LENGTH)
        assert (layer.triu(1) == 0).all()
        sums = layer.sum(dim=-1)
        if model_type in set(SINKING) - {"mimo_v2_flash"}:
            assert ((sums > 0) & (sums < 1)).all()  # a sink has the rest
        else:
            torch.testing.assert_close(sums, torch.ones(2, 4, LENGTH).double(), rtol=0, atol=4e-15)


@pytest.mark.slow
@as_one_graph
@torch.no_grad()
def test_compiled_layers_of_gpt2_ask_no_collector() -> None:
    """Its state is that of the model around them, which they cannot trace."""
    model = patch(make_model("gpt2", use_cache=False, n_layer=1).double())
    expected = model(tokens()).logits
    torch._dynamo.reset()
    for layer in model.transformer.h:
        layer.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(tokens()).logits, expected, rtol=0, atol=1e-15)


def test_mask_function() -> None:
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS["i-clustered"]
    config = make_model("llama").config
    mask = torch.ones(2, 20, dtype=torch.bool)
    options: dict[str, Any] = {"batch_size": 2, "config": config}
    assert make_mask(q_length=20, kv_length=20, attention_mask=mask, **options) is None
    mask[0, :4] = False
    assert torch.equal(make_mask(q_length=20, kv_length=20, attention_mask=mask, **options), mask)
    assert torch.equal(make_mask(q_length=20, kv_length=64, attention_mask=mask, **options), mask)
    assert torch.equal(
        make_mask(q_length=20, kv_length=64, q_offset=torch.tensor(0), attention_mask=mask, **options), mask
    )
    later = make_mask(q_length=8, kv_length=20, q_offset=12, attention_mask=mask, **options)
    assert torch.equal(later, sdpa_mask(2, 8, 20, q_offset=12, attention_mask=mask))


def test_what_a_language_model_loses_is_said(recwarn: pytest.WarningsRecorder) -> None:
    """By what was measured, which is in the results; calibrated settings lose least and are what is advised."""
    results = Path(__file__).parents[3] / "scripts" / "results" / "language_model.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    for method in ("clustered", "i-clustered", "bi-clustered"):
        worst = max(row["perplexity_change"] for row in rows if row["name"] == method)
        with pytest.warns(UserWarning, match=rf"by {worst:.1%}, .*settings=hf_effattn.calibrate\(model, "):
            patch(make_model("llama"), method)
    recwarn.clear()
    model = make_model("llama")
    heads = [[0] * model.config.num_key_value_heads] * model.config.num_hidden_layers
    candidates = [{"method": "bi-clustered"}]
    hf_effattn.patch_attention(model, "per-head", candidates=candidates, heads=heads, min_length=0)
    assert not [warned for warned in recwarn if "raised the perplexity" in str(warned.message)]
