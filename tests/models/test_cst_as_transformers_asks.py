"""What transformers' own tests and Trainer ask of a model, of the Composite Slice Transformer."""

import pytest
import torch
import torch.nn.functional as F
from support.closeness import assert_close_to_reference
from support.cst_models import LENGTH, tiny_model, tokens

from hf_effattn.models import CSTForCausalLM, CSTModel
from hf_effattn.models.cst import CSTCache

# No text ends: without any end token the drafts of transformers before 5.8 fail.
NO_END = 10**6


@pytest.mark.parametrize("padded", [None, "nothing", "left"])
def test_hidden_states_lie_in_the_graph_of_the_output(padded):
    """With a mask they were copies, whose gradients stayed None."""
    model = tiny_model(CSTModel)
    mask = None if padded is None else torch.ones(2, LENGTH, dtype=torch.long)
    if padded == "left":
        mask[0, :6] = 0
    output = model(tokens(), attention_mask=mask, output_hidden_states=True)
    for state in output.hidden_states:
        state.retain_grad()
    output.last_hidden_state[0, -1, 0].backward()
    assert all(state.grad is not None and state.grad[0, -1].any() for state in output.hidden_states)
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    assert torch.equal(model(tokens(), attention_mask=mask).last_hidden_state, output.last_hidden_state)


def test_a_step_hands_on_what_it_does_not_know():
    model = tiny_model(CSTForCausalLM)
    given = {"output_hidden_states": True, "logits_to_keep": 1, "of_a_model_around_this_one": 42, "position_ids": None}
    kept = model.prepare_inputs_for_generation(tokens(), labels=tokens(), is_first_iteration=True, **given)
    assert given.items() <= kept.items()
    assert "labels" not in kept
    assert "is_first_iteration" not in kept


@pytest.mark.parametrize("padding", [0, 4])
def test_generate_goes_on_from_a_cache_and_longer_embeddings(padding):
    model = tiny_model(CSTForCausalLM)
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :padding] = 0
    words = model.get_input_embeddings()(ids)
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole = model.generate(inputs_embeds=words, attention_mask=mask, max_new_tokens=7, **options)
    begun = model.generate(inputs_embeds=words, attention_mask=mask, max_new_tokens=4, **options)
    words = torch.cat([words, model.get_input_embeddings()(begun.sequences)], dim=1)
    mask = F.pad(mask, (0, 4), value=1)
    continued = model.generate(
        inputs_embeds=words, attention_mask=mask, past_key_values=begun.past_key_values, max_new_tokens=3, **options
    )
    assert torch.equal(torch.cat([begun.sequences, continued.sequences], dim=1), whole.sequences)


def test_generate_from_embeddings_without_a_cache():
    """The prompt was read again and again without what followed it: the same word every time."""
    model = tiny_model(CSTForCausalLM)
    ids = tokens(2, 6)
    words = model.get_input_embeddings()(ids)
    greedy = model.generate(ids, max_new_tokens=8, do_sample=False)[:, 6:]
    plain = model.generate(inputs_embeds=words, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(plain, greedy)
    options = {"inputs_embeds": words[:1], "max_new_tokens": 8, "do_sample": False, "eos_token_id": NO_END}
    assert torch.equal(model.generate(input_ids=ids[:1], prompt_lookup_num_tokens=2, **options)[:, 6:], greedy[:1])


def test_a_state_that_was_not_recorded_cannot_be_put_back():
    model = tiny_model(CSTForCausalLM)
    cache = model(tokens(1, 9), use_cache=True).past_key_values
    before = cache.layers[0].state
    cache.crop(0)
    assert cache.layers[0].state is before
    with pytest.raises(ValueError, match=r"cannot take 2 columns out of this cache .* activate_past_recording\(\)"):
        cache.crop(-2)
    assert not cache.is_croppable
    cache.activate_past_recording()
    assert cache.is_croppable
    cache.crop(-9)
    assert cache.get_seq_length() == 0


def test_what_is_recorded_follows_the_rows():
    model = tiny_model(CSTForCausalLM, "three_levels")
    ids = tokens(3, LENGTH)
    order = torch.tensor([2, 0, 2])
    with torch.no_grad():
        for prompt in (17, 13):  # put back into the prompt, and to a step after it
            cache = CSTCache(model.config.num_hidden_layers)
            cache.activate_past_recording()
            model(ids[:, :prompt], past_key_values=cache)
            model(ids[:, prompt:17], past_key_values=cache) if prompt < 17 else None
            cache.reorder_cache(order)
            cache.crop(15 - 17)
            rest = model(ids[order, 15:], past_key_values=cache).logits
            assert_close_to_reference("reordered", rest, model(ids[order]).logits[:, 15:], rtol=1e-13)
