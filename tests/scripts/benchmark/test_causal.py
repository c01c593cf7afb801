"""The scripts about causal models run on a small model and keep what they print."""

import json

import pytest
import torch
import torch.nn.functional as F
import typer
from transformers import GPT2Config, GPT2LMHeadModel

from hf_effattn.samples.texts import bundled_books
from hf_effattn.training import train_tokenizer
from scripts.benchmark import _inputs, causal_generation, causal_schemes, perplexity


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random GPT-2 of 256 positions with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = train_tokenizer([bundled_books()[0].text[:20_000]], 300)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "n_positions": 256, "n_embd": 16, "n_layer": 2, "n_head": 2}
    # As `Trainer` leaves it.
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def bundled_text(monkeypatch):
    def tokens(tokenizer, files=_inputs.HELD_OUT):
        return [
            torch.tensor(tokenizer(book.text[:120_000], verbose=False)["input_ids"]) for book in bundled_books()[:2]
        ]

    for script in (causal_generation, causal_schemes, perplexity):
        monkeypatch.setattr(script, "held_out_tokens", tokens)


def test_causal_attention_inputs_are_those_of_the_model(model_folder):
    model, tokenizer = _inputs.load_causal_model(model_folder)
    ids = torch.tensor([tokenizer("It was the best of times, it was the worst of times")["input_ids"]])
    layers = _inputs.causal_attention_inputs(model, ids)
    assert [query.shape for query, _, _ in layers] == [(1, 2, ids.shape[1], 8)] * 2
    hidden = model.transformer.h[0].ln_1(model.transformer.wte(ids) + model.transformer.wpe.weight[: ids.shape[1]])
    expected = model.transformer.h[0].attn.c_attn(hidden).split(16, dim=2)
    for actual, rows in zip(layers[0], expected, strict=True):
        torch.testing.assert_close(actual, rows.unflatten(2, (2, 8)).transpose(1, 2))
    assert model.config._attn_implementation == "sdpa"


def test_schemes_written_by_segment_are_exact_where_nothing_is_left_out():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 256, 8) for _ in range(3))
    exact = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    for old in ("bi-clustered, all again", "bi-clustered, per segment", "shared top keys"):
        actual = causal_schemes.by_segment(query, key, value, window=64, clusters=4, topk=256, old=old)
        torch.testing.assert_close(actual, exact, rtol=0, atol=2e-6)
    actual = causal_schemes.by_segment(query, key, value, window=256, clusters=4, topk=8, old="none")
    torch.testing.assert_close(actual, exact, rtol=0, atol=2e-6)


def test_scored_keys_of_the_window_alone_are_counted_one_by_one():
    seen = [position % 64 + 1 + min(position // 64 * 64, 64) for position in range(200)]
    assert causal_schemes.scored("none", 200, 64, 4, 8, 8) == pytest.approx(sum(seen) / 200)
    # 72 queries of two segments have older keys: 8 top keys, then 8 key clusters for 64 of them and 16 for the last 8.
    # One set of 4 centroids is scored against the 128 keys that are older for the last segment.
    more = (72 * 8 + 64 * 8 + 8 * 16 + 4 * 128) / 200
    actual = causal_schemes.scored("bi-clustered", 200, 64, 4, 8, 8)
    assert actual == pytest.approx(sum(seen) / 200 + more)


def test_causal_schemes(model_folder, tmp_path):
    output = tmp_path / "schemes.json"
    causal_schemes.main(model_folder, "256", output)
    rows = json.loads(output.read_text())["rows"]
    errors = {(row["scheme"], row["window"], row["rotary"]): row["error"] for row in rows}
    assert 0 < errors["bi-clustered", 64, False] < errors["none", 64, False]
    assert all(0 < row["scored_share"] < 1.5 for row in rows)


def test_perplexity(model_folder, tmp_path):
    output = tmp_path / "perplexity.json"
    perplexity.main(model_folder, "256,512", tokens=512, output=output)
    rows = {(row["length"], row["run"]): row for row in json.loads(output.read_text())["rows"]}
    assert len(rows) == 2 * (2 + len(perplexity.RUNS))
    assert rows[256, "exact"]["perplexity_change"] == 0
    assert 0 < abs(rows[512, "bi-clustered"]["perplexity_change"]) < 0.01
    prompts = [rows[512, f"bi-clustered, {kind}prompt"] for kind in ("", "prefill, ")]
    assert [row["loss"] for row in prompts] == [None, None]
    assert prompts[0]["last_quarter_loss"] != prompts[1]["last_quarter_loss"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_perplexity_needs_as_much_text_as_it_is_asked_for(model_folder, tmp_path):
    with pytest.raises(typer.BadParameter, match="too few"):
        perplexity.main(model_folder, "256", tokens=10**6, output=tmp_path / "perplexity.json")


def test_a_prompt_read_exactly_gives_the_exact_loss(model_folder):
    model, _ = _inputs.load_causal_model(model_folder)
    ids = torch.randint(300, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, after = perplexity.token_losses(model, ids), perplexity.losses_after_prompt(model, ids)
    torch.testing.assert_close(after, whole[-50:], rtol=1e-4, atol=1e-5)


def test_causal_generation(model_folder, tmp_path):
    output = tmp_path / "generation.json"
    causal_generation.main(model_folder, prompts=2, prompt_length=200, new_tokens=5, output=output)
    rows = json.loads(output.read_text())["rows"]
    assert [row["run"] for row in rows] == list(causal_generation.SETTINGS)
    assert all(len(row["same_tokens"]) == 2 for row in rows)


def test_same_tokens_are_counted_from_the_beginning():
    first, second = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 5, 4])
    assert causal_generation.same_tokens(first, second) == 2
    assert causal_generation.same_tokens(first, first) == 4
