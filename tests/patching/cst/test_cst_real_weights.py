"""A pretrained BERT converted to slice attention, before any fine-tuning, on real text."""

import pytest
import torch
import torch.nn.functional as F

import hf_effattn
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Passages, bundled_books

LENGTH = 128


@pytest.fixture(scope="module")
def bert(real_model_folder):
    model, tokenizer, _ = load_model(str(real_model_folder))
    tokens, _, books = Passages(tokenizer, bundled_books()).pairs(LENGTH, per_book=4)
    assert len(books) >= 20
    return model, tokens


def embed(model, tokens, mask=None):
    with torch.no_grad():
        hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    weights = torch.ones_like(tokens) if mask is None else mask
    return F.normalize((hidden * weights[..., None]).sum(dim=1), dim=-1)


def cosine_with_exact(bert, **settings):
    model, tokens = bert
    exact = embed(model, tokens)
    hf_effattn.patch_attention(model, "cst", **settings)
    converted = embed(model, tokens)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(embed(model, tokens), exact)
    cosine = (converted * exact).sum(dim=-1)
    print(f"{settings}: mean cosine {cosine.mean():.4f}, lowest {cosine.min():.4f}")
    return cosine.mean()


@pytest.mark.slow_except("{'slice_length': 16}-0.82")
@pytest.mark.parametrize(
    ("settings", "promised"),
    [
        ({"slice_length": 16}, 0.82),
        ({"slice_length": 16, "extension_ratio": 3}, 0.91),
        ({"slice_length": 64}, 0.94),
        ({"slice_length": 64, "extension_ratio": 3}, 1 - 1e-5),
    ],
    ids=str,
)
def test_a_conversion_keeps_the_sentence_embeddings(bert, settings, promised):
    assert cosine_with_exact(bert, **settings) >= promised


@pytest.mark.slow
def test_what_the_merged_composition_and_the_sinks_are_for(bert):
    merged = cosine_with_exact(bert, slice_length=16)
    without_sinks = cosine_with_exact(bert, slice_length=16, sinks=False)
    paper = cosine_with_exact(bert, slice_length=16, composition="local-global")
    assert merged > without_sinks + 0.05
    assert without_sinks > paper + 0.3


def test_padding_changes_nothing(bert):
    model, tokens = bert
    padded = F.pad(tokens[:6], (0, 57))
    mask = F.pad(torch.ones_like(tokens[:6]), (0, 57))
    hf_effattn.patch_attention(model, "cst", slice_length=16)
    torch.testing.assert_close(embed(model, padded, mask), embed(model, tokens[:6]), atol=1e-6, rtol=0)
    hf_effattn.unpatch_attention(model)
