"""Generation with the Composite Slice Transformer: the cache against full recomputation."""

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.cst_models import LENGTH, tiny_model, tokens

from hf_effattn.models import CSTForCausalLM
from hf_effattn.models.cst import CSTCache
from hf_effattn.models.cst.cache import CSTCacheLayer


@pytest.mark.parametrize("variant", ["paper", "three_levels", "global_tokens", "mlp", "full"])
def test_no_text_gives_no_logits(variant):
    model, mask = tiny_model(CSTForCausalLM, variant), torch.ones(0, LENGTH, dtype=torch.long)
    begun = model(tokens(0)[:, :5], attention_mask=mask[:, :5], use_cache=True)
    rest = model(tokens(0)[:, 5:], attention_mask=mask, past_key_values=begun.past_key_values)
    logits = torch.cat([begun.logits, rest.logits], dim=1)
    assert logits.shape == (0, LENGTH, model.config.vocab_size)
    logits.sum().backward()


def test_a_new_token_costs_no_more_than_its_window_and_one_row_per_slice():
    """What the cache holds: O(L + N / L) numbers per layer, not one key per token."""
    model = tiny_model(CSTForCausalLM, "half_extension", max_position_embeddings=4096, slice_length=32)
    with torch.no_grad():
        cache = model(tokens(1, 3000), use_cache=True, logits_to_keep=1).past_key_values
    held = []
    cache.layers[0].state.map(lambda tensor: held.append(tensor.numel()) or tensor)
    window, slices, width = 32 + 16, 4096 // 32, 16
    assert sum(held) == 1 + 2 * window * width + 32 * width + width + 1 + 2 * slices * width


def test_generate_uses_the_cache_and_feeds_one_token_a_step(monkeypatch):
    model = tiny_model(CSTForCausalLM)
    seen = []
    forward = model.cst.forward
    monkeypatch.setattr(model.cst, "forward", lambda ids, *args, **kwargs: seen.append(ids.shape[1]) or forward(
        ids, *args, **kwargs
    ))  # fmt: skip
    output = model.generate(tokens(2, 6), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert seen == [6, 1, 1, 1, 1]
    assert isinstance(output.past_key_values, CSTCache)


def test_generate_returns_the_hidden_states_of_every_step():
    model = tiny_model(CSTForCausalLM)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(tokens(2, 6), output_hidden_states=True, **options)
    layers = model.config.num_hidden_layers + 1
    seen = [[state.shape[1] for state in step] for step in output.hidden_states]
    assert seen == [[6] * layers, [1] * layers, [1] * layers]
    with pytest.raises(ValueError, match="no single attention matrix"):
        model.generate(tokens(2, 6), output_attentions=True, **options)


def test_generate_from_embeddings_and_several_samples():
    model = tiny_model(CSTForCausalLM)
    ids = tokens(2, 6)
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False)
    words = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=words, max_new_tokens=8, do_sample=False), greedy[:, 6:])
    torch.manual_seed(0)
    samples = model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    assert torch.equal(
        samples, model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=3, use_cache=False)
    )


@pytest.mark.parametrize("use_cache", [True, False])
def test_segments_of_the_prompt_are_kept(use_cache):
    """They were once dropped; what is generated goes on with the last."""
    model = tiny_model(CSTForCausalLM)
    ids, segments = tokens(2, 7), (torch.arange(7) > 3).long().expand(2, -1)
    actual = model.generate(ids, token_type_ids=segments, max_new_tokens=8, do_sample=False, use_cache=use_cache)
    expected = ids
    for _ in range(8):
        extended = torch.cat([segments, segments.new_ones(2, expected.shape[1] - 7)], dim=1)
        logits = model(expected, token_type_ids=extended, use_cache=False).logits
        expected = torch.cat([expected, logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, model.generate(ids, max_new_tokens=8, do_sample=False))
    words = model.get_input_embeddings()(ids)
    options = {"token_type_ids": segments, "max_new_tokens": 8, "do_sample": False, "use_cache": use_cache}
    if use_cache:  # without a cache transformers leaves the prompt out of later steps
        assert torch.equal(model.generate(inputs_embeds=words, **options), expected[:, 7:])


def test_a_foreign_cache_raises():
    model = tiny_model(CSTForCausalLM)
    cache = model(tokens(2, 5), use_cache=True).past_key_values
    other = tiny_model(CSTForCausalLM, num_hidden_layers=1)
    with pytest.raises(ValueError, match="must be a CSTCache of 1 layers"):
        other(tokens(2, 1), past_key_values=cache)


def test_more_tokens_than_positions_raise():
    model = tiny_model(CSTForCausalLM, max_position_embeddings=8)
    with pytest.raises(ValueError, match="9 tokens are more than max_position_embeddings = 8"):
        model(tokens(1, 9))
    cache = model(tokens(1, 8), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="9 tokens are more than max_position_embeddings = 8"):
        model(tokens(1, 1), past_key_values=cache)


def test_the_cache_says_which_models_it_is_not_for():
    with pytest.raises(TypeError, match="not keys and values: give it to such a model"):
        CSTCacheLayer().update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))


@pytest.mark.slow_except("global_tokens", "three_levels")
@pytest.mark.parametrize("variant", ["paper", "three_levels", "global_tokens", "mlp_global_local", "full"])
def test_crop_puts_the_cache_back_to_any_column_that_was_recorded(variant):
    """A state cannot be cut: what it was made of is kept while transformers asks for it, with padding anywhere."""
    model = tiny_model(CSTForCausalLM, variant)
    ids, mask = tokens(3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :5], mask[2, 3:6], mask[2, 14:16] = 0, 0, 0
    counted = mask.bool()
    with torch.no_grad():
        full = model(ids, attention_mask=mask, use_cache=False).logits
        for prompt, left in ((15, 15), (15, 14), (15, 4), (11, 13), (11, 11), (11, 9), (12, 1)):
            cache = CSTCache(model.config.num_hidden_layers)
            cache.activate_past_recording()
            drafts = torch.where(torch.arange(LENGTH) < left, ids, 9)
            model(drafts[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache)
            if prompt < 15:
                model(drafts[:, prompt:15], attention_mask=mask[:, :15], past_key_values=cache)
            cache.crop(left - 15)
            assert cache.get_seq_length() == left
            rest = model(ids[:, left:], attention_mask=mask, past_key_values=cache).logits
            assert_close_to_reference(
                f"{left} of {prompt}", rest[counted[:, left:]], full[:, left:][counted[:, left:]], rtol=1e-13
            )
