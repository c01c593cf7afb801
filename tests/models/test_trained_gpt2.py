"""What is claimed of causal attention on a trained model: real weights, a book it was not trained on."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_effattn import extend_positions, patch_attention
from hf_effattn.measuring.errors import relative_error
from hf_effattn.ops import causal_clustered_attention
from hf_effattn.samples.texts import bundled_books
from scripts.benchmark._inputs import causal_attention_inputs, load_causal_model
from scripts.benchmark._scores import counted_scores
from scripts.benchmark.causal_generation import SETTINGS, same_tokens

FOLDER = Path(__file__).resolve().parents[2] / "model_cards" / "gpt2-books"
HELD_OUT = "adventures-of-sherlock-holmes"
SEGMENTS = {"segment_length": 128, "window": 64}
SETTINGS_OF_OP = {"clusters": 8, "topk": 96, "key_clusters": 8} | SEGMENTS
# Which the method makes of these.
STRICT = {"method": "bi-clustered", "min_length": 0, "exact_keys": 144, "key_clusters": 32} | SEGMENTS


@pytest.fixture(scope="module")
def tokens():
    """The held-out book, `(1, N)`."""
    tokenizer = load_causal_model(FOLDER)[1]
    book = next(book for book in bundled_books() if book.name == HELD_OUT)
    return torch.tensor(tokenizer(book.text, verbose=False)["input_ids"])[None]


@pytest.fixture
def model():
    return load_causal_model(FOLDER)[0]


@torch.no_grad()
def loss(model, texts):
    """Mean loss of the tokens of texts `(B, N)`."""
    losses = []
    for text in texts:
        logits = model(text[None], use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits, text[1:], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.slow
def test_error_and_perplexity_at_a_share_of_the_scores(model, tokens):
    length = 2048
    layers = causal_attention_inputs(model, tokens[:, :length])
    errors, last = [], slice(length // 4, None)
    with counted_scores() as count:
        for query, key, value in layers:
            exact = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            actual = causal_clustered_attention(query, key, value, **SETTINGS_OF_OP)
            errors.append(relative_error(exact[:, :, last], actual[:, :, last]))
    assert sum(errors) / len(errors) <= 0.05
    assert count.share(len(layers) * layers[0][0].shape[1], length) <= 0.5
    texts = tokens[0, : 4 * 2048].view(-1, length)
    exact = loss(model, texts)
    assert exact < 5.0  # it knows more than frequencies of tokens
    patch_attention(model, **STRICT)
    assert abs(loss(model, texts) - exact) < 0.002


@pytest.mark.slow
def test_loss_at_four_times_the_trained_length(model, tokens):
    length = 4 * model.config.n_positions
    extend_positions(model, length)
    exact = loss(model, tokens[:, :length])
    patch_attention(model, "i-clustered", clusters=25, exact_keys=384, segment_length=128, window=64, min_length=0)
    assert loss(model, tokens[:, :length]) == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
def test_no_token_changes_what_comes_before_it(model, tokens):
    """Bit for bit, in both methods that a user would choose, at places within the first and in later segments."""
    text = tokens[:, :600]
    others = {name: value for name, value in STRICT.items() if name != "key_clusters"}
    for settings in (STRICT, others | {"method": "i-clustered", "clusters": 32}):
        patched = patch_attention(load_causal_model(FOLDER)[0], **settings)
        with torch.no_grad():
            before = patched(text).logits
            for place in (1, 127, 128, 300, 599):
                changed = text.clone()
                changed[0, place] = (changed[0, place] + 1) % model.config.vocab_size
                after = patched(changed).logits
                assert torch.equal(after[:, :place], before[:, :place]), (settings, place)
                assert not torch.equal(after[:, place:], before[:, place:])


@pytest.mark.slow
def test_greedy_text_is_that_of_exact_attention(model, tokens):
    """At three places, 200 tokens after a prompt of 900."""

    def write(start):
        prompt = tokens[:, start : start + 900]
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=200)

    starts = (5_000, 7_000, 9_000)
    exact = [write(start)[0, 900:] for start in starts]
    patch_attention(model, **SETTINGS["bi-clustered, finer"], min_length=0)
    assert [same_tokens(text, write(start)[0, 900:]) for text, start in zip(exact, starts, strict=True)] == [200] * 3


@pytest.mark.slow
@torch.no_grad()
def test_kernels_are_as_close_to_exact_attention_as_the_fast_form(model, tokens):
    """Their clusters are other ones, as good; two heads of each layer, under Triton's interpreter."""
    sizes = SETTINGS_OF_OP | {"topk": 32, "segment_length": 128, "window": 32}
    errors = {}
    for layer in causal_attention_inputs(model, tokens[:, :384]):
        given = [rows[:, :2] for rows in layer]
        exact = F.scaled_dot_product_attention(*given, is_causal=True)
        for backend in ("batched", "triton"):
            actual = causal_clustered_attention(*given, **sizes, backend=backend)
            errors.setdefault(backend, []).append(relative_error(exact, actual))
    assert sum(errors["triton"]) <= 1.1 * sum(errors["batched"])
