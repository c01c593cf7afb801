"""Converted GPT-2: no leak, and generation over caches that equals the whole computed anew."""

from typing import Any

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.cst_conversions import LENGTH, convert, left_padded, small_model, tokens
from transformers import DynamicCache, StaticCache

from hf_effattn.patching.model_types.stacks import find_stacks


@pytest.mark.slow_except("merged-1-*", "merged-3-*", "local-global-3-*")
@pytest.mark.parametrize(
    ("composition", "ratio", "dtype"),
    [
        *(("merged", ratio, torch.float32) for ratio in (1, 2, 3)),
        *(("local-global", ratio, torch.bfloat16) for ratio in (1, 3)),
    ],
)
@torch.no_grad()
def test_no_logit_sees_a_later_token(composition: str, ratio: int, dtype: torch.dtype) -> None:
    model = convert(small_model("gpt2").to(dtype), extension_ratio=ratio, composition=composition)
    ids, mask = tokens(), left_padded()
    before = model(ids, attention_mask=mask).logits
    for position in range(6, LENGTH):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 7) % 55 + 5
        after = model(changed, attention_mask=mask).logits
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.equal(after[:, position], before[:, position])


@pytest.mark.parametrize(
    ("cache", "attend_ends", "ratio"),
    [("dynamic", True, 1), ("dynamic", False, 3), ("static", True, 2), ("static", False, 1)],
)
@torch.no_grad()
def test_steps_and_chunks_over_a_cache_equal_the_whole(cache: str, attend_ends: bool, ratio: int) -> None:
    model = convert(small_model("gpt2").double(), extension_ratio=ratio, attend_ends=attend_ends)
    ids, mask = tokens(), left_padded()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=positions).logits
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=64)
    rows = []
    for first, last in [(0, 11), (11, 12), (12, 13), (13, 18), (18, 19), (19, LENGTH)]:
        at: dict[str, Any] = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
        rows.append(model(ids[:, first:last], past_key_values=past, **at).logits)
    valid = mask.bool()
    assert_close_to_reference("logits", torch.cat(rows, dim=1)[valid], whole[valid], rtol=1e-12)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generation_writes_what_it_would_without_a_cache(cache: str) -> None:
    model = convert(small_model("gpt2").double())
    ids, mask = tokens(23), left_padded(23)
    options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 1}
    kind = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    written = model.generate(ids, attention_mask=mask, **options, **kind)
    assert torch.equal(written, model.generate(ids, attention_mask=mask, use_cache=False, **options))
    alone = model.generate(ids[:1, 6:], **options)
    assert torch.equal(written[:1, 6:], alone)
    beams = {"num_beams": 2, "attention_mask": mask}
    assert torch.equal(
        model.generate(ids, **beams, **options), model.generate(ids, use_cache=False, **beams, **options)
    )


@torch.no_grad()
def test_min_length_counts_the_same_tokens_over_every_cache() -> None:
    """A static cache has room for more; beyond the 24th token both run the method."""
    model = convert(small_model("gpt2").double(), min_length=25)
    options = {"do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12, "pad_token_id": 1}
    options |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": left_padded(20)}
    dynamic = model.generate(tokens(20), **options).logits
    static = model.generate(tokens(20), cache_implementation="static", disable_compile=True, **options).logits
    for actual, wanted in zip(static, dynamic, strict=True):
        assert_close_to_reference("logits", actual, wanted, rtol=1e-12)


@torch.no_grad()
def test_the_papers_composition_generates_without_a_cache() -> None:
    model = convert(small_model("gpt2"), composition="local-global")
    options = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 1}
    with pytest.raises(ValueError, match=r'"local-global" needs the queries of earlier tokens .* use_cache=False'):
        model.generate(tokens(), **options)
    assert model.generate(tokens(), use_cache=False, **options).shape == (2, LENGTH + 3)


@torch.no_grad()
def test_attention_weights_of_a_step() -> None:
    """Those of the whole text, whose product with the values is what the layer projects to its output."""
    model = convert(small_model("gpt2").double())
    module: Any = find_stacks(model)[0].modules[0]
    ids, seen = tokens(), {}
    hooks = [
        module.c_proj.register_forward_pre_hook(lambda _, args: seen.update(attended=args[0][:, -LENGTH:])),
        module.c_attn.register_forward_hook(lambda _, args, output: seen.update(values=output[:, -LENGTH:, 64:])),
    ]
    weights = model(ids, output_attentions=True).attentions[0]
    for hook in hooks:
        hook.remove()
    values = seen["values"].unflatten(-1, (4, 8)).transpose(1, 2)
    assert_close_to_reference("output", (weights @ values).transpose(1, 2).flatten(2), seen["attended"], rtol=1e-12)
    assert not weights.triu(1).any()
    past = DynamicCache(config=model.config)
    model(ids[:, :-1], past_key_values=past)
    of_step = model(ids[:, -1:], past_key_values=past, output_attentions=True).attentions[0]
    assert_close_to_reference("weights", of_step, weights[:, :, -1:], rtol=1e-12)


@pytest.mark.parametrize(
    "options", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}], ids=str
)
@torch.no_grad()
def test_scaling_of_gpt2(options: dict[str, bool]) -> None:
    model = small_model("gpt2", **options).double()
    exact = model(tokens()).logits
    convert(model, trained=False, slice_length=LENGTH)
    assert_close_to_reference("logits", model(tokens()).logits, exact, rtol=1e-12)
