"""What is claimed of the causal Composite Slice Transformer, on the weights of a trained one and a real text."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_effattn  # noqa: F401  tells transformers what the model is
from hf_effattn.samples.texts import bundled_books

FOLDER = Path(__file__).resolve().parents[2] / "model_cards" / "cst-wikitext2"


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokens(model):
    """The beginning of a book, `(8, N)`, N the longest input."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    text = bundled_books()[0].text[:20_000]
    longest = model.config.max_position_embeddings
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"][: 8 * longest]).view(8, longest)


@pytest.mark.slow_except("31", "64")
@torch.no_grad()
@pytest.mark.parametrize("place", [1, 31, 32, 64, 100, 255])
def test_no_token_changes_what_comes_before_it(model, tokens, place):
    changed = tokens[:2].clone()
    changed[:, place] = (changed[:, place] + 17) % model.config.vocab_size
    before, after = model(tokens[:2]).logits, model(changed).logits
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place:], after[:, place:])


@torch.no_grad()
def test_it_has_learned_the_order_of_words(model, tokens):
    shuffled = tokens[:, torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))]
    assert model(tokens, labels=tokens).loss + 1 < model(shuffled, labels=shuffled).loss


@pytest.mark.slow
def test_generation_with_the_cache_writes_what_it_writes_without(model, tokens):
    options = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}
    prompt = tokens[:2, :45]
    cached = model.generate(prompt, use_cache=True, **options)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **options))
    assert cached.shape == (2, 125)
