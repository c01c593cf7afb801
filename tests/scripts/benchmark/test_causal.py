"""The scripts about causal models run on a small model and keep what they print."""

from pathlib import Path

import pytest
import torch
import typer
from support.script_runs import rows_of
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_effattn.measuring.candidate_errors import default_candidates
from hf_effattn.ops import causal_clustered_attention
from hf_effattn.patching.methods import DECODER_METHODS, make_method
from hf_effattn.reporting.calibration import Calibration
from hf_effattn.samples.texts import bundled_books
from hf_effattn.training import train_tokenizer
from scripts.benchmark import _inputs, causal_generation, language_model, prefill
from scripts.benchmark._scores import counted_scores


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

    for script in (causal_generation, language_model):
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


@pytest.mark.parametrize(("clusters", "max_predicted_error"), [(3, None), (1, None), (3, 0.0)])
def test_scores_are_counted_one_by_one(clusters, max_predicted_error):
    query, key, value = (torch.randn(1, heads, 200, 8) for heads in (4, 2, 2))
    with counted_scores() as count:
        sizes = {"clusters": clusters, "topk": 5, "key_clusters": 7, "segment_length": 64, "window": 32}
        causal_clustered_attention(query, key, value, **sizes, max_predicted_error=max_predicted_error)
    seen = sum(position % 64 + 1 + (32 if position >= 64 else 0) for position in range(200))
    older = {64: 32, 128: 96, 192: 160}  # of the segment that begins there
    if max_predicted_error is None:
        seen += sum(min(64, 200 - start) * (5 + 7 * (start // 64)) + clusters * keys for start, keys in older.items())
    else:
        seen += sum(min(64, 200 - start) * keys for start, keys in older.items())
    assert sum(count.parts) == 4 * seen
    assert count.share(4, 200) == pytest.approx(seen / (200 * 201 / 2))


def test_language_model(model_folder, tmp_path, monkeypatch):
    """On a small Llama in place of the real one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, num_key_value_heads=2, initializer_range=0.2, **sizes)
    loaded = LlamaForCausalLM(config).eval(), _inputs.load_causal_model(model_folder)[1]
    monkeypatch.setattr(language_model, "load", lambda: loaded)
    settings = {"segment_length": 64, "window": 32, "fit_queries": 64}
    for name, chosen in language_model.METHODS.items():
        small = settings | ({"clusters": 8} if name == "clustered" else {"exact_keys": 48})
        monkeypatch.setitem(language_model.METHODS, name, chosen | small)
    output = tmp_path / "language_model.json"
    names = f"pg98,{language_model.CODE}"
    language_model.main("300", names=names, methods="bi-clustered", output=output)
    language_model.main("300", names=names, methods="bi-clustered,clustered", output=output)
    rows = {(row["text"], row["name"]): row for row in rows_of(output)}
    assert len(rows) == len(rows_of(output)) == 6
    for text in names.split(","):
        ours, worse = rows[text, "bi-clustered"], rows[text, "clustered"]
        assert ours["perplexity_change"] != worse["perplexity_change"]
        assert 1 > ours["agreement"] > worse["agreement"]
        assert 0.3 < worse["scored_share"] < ours["scored_share"] < 1.5
    with pytest.raises(typer.BadParameter, match="unknown methods"):
        language_model.main(methods="cst", output=output)


@pytest.mark.slow
def test_a_method_without_memory_is_noted_and_the_others_go_on(model_folder, tmp_path, monkeypatch):
    def out_of_memory_by_bi_clustering(*inputs, method, **settings):
        if method == "bi-clustered":
            raise torch.OutOfMemoryError("Tried to allocate 1 TiB.\nMore of it")
        return causal_clustered_attention(*inputs, method=method, **settings)

    monkeypatch.setattr(prefill, "causal_clustered_attention", out_of_memory_by_bi_clustering)
    monkeypatch.setattr(prefill, "GPT2", model_folder)
    output = tmp_path / "prefill.json"
    prefill.main("300,310", heads=2, key_heads=1, head_dim=8, repeats=1, output=output)
    rows = rows_of(output)
    names = ["SDPA", *prefill.METHODS, prefill.CALIBRATED]
    assert [(row["length"], row["method"]) for row in rows] == [(N, name) for N in (300, 310) for name in names]
    for row in rows:
        refused = prefill.METHODS.get(row["method"], {}).get("method") == "bi-clustered"
        assert row.get("refused") == ("Tried to allocate 1 TiB." if refused else None)
        assert (row["real_error"] is None) == (refused or row["method"] in ("SDPA", prefill.CALIBRATED))
        assert refused or (row["ms"] > 0 and row["training_ms"] > 0)
        assert ("scored_share" in row) == (not refused and row["method"] in (*prefill.METHODS, prefill.CALIBRATED))


def test_the_shares_of_the_calibrated_heads_are_those_of_the_model():
    heads = prefill.calibrated_heads(90).heads
    table = Calibration.load(str(language_model.CALIBRATION)).settings.heads
    assert heads == (tuple(sorted(candidate for row in table for candidate in row)),)
    assert len(prefill.calibrated_heads(12).heads[0]) == 12


@pytest.mark.slow
def test_causal_generation(model_folder, tmp_path):
    output = tmp_path / "generation.json"
    causal_generation.main(model_folder, prompts=2, prompt_length=200, new_tokens=5, output=output)
    rows = rows_of(output)
    assert [row["run"] for row in rows] == list(causal_generation.SETTINGS)
    assert all(len(row["same_tokens"]) == 2 for row in rows)


def test_same_tokens_are_counted_from_the_beginning():
    first, second = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 5, 4])
    assert causal_generation.same_tokens(first, second) == 2
    assert causal_generation.same_tokens(first, first) == 4


@pytest.mark.parametrize("method", ["clustered", "i-clustered", "bi-clustered", "per-head"])
def test_the_warning_for_decoders_says_what_was_measured(method):
    kept = Path(language_model.__file__).parents[1] / "results" / "language_model.json"
    name = "calibrated" if method == "per-head" else method
    rows = [row for row in rows_of(kept) if row["name"] == name]
    assert DECODER_METHODS[method].decoder_loss == round(max(row["perplexity_change"] for row in rows), 3)


def test_the_kept_calibration_has_the_candidates_that_calibrate_tries_by_itself():
    kept = Calibration.load(str(language_model.CALIBRATION)).settings
    assert list(kept.candidates) == [
        make_method(**kwargs, causal=True, min_length=0) for kwargs in default_candidates(causal=True)
    ]
    assert {candidate.segment_length for candidate in kept.candidates} == {512}
    assert all("segment_length" not in kwargs for kwargs in default_candidates(causal=False))
