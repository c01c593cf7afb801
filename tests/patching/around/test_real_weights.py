"""A pretrained BERT on real text: what patching promises, on the weights and the words it is made for."""

import gzip
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import hf_effattn
from hf_effattn.samples.model import load_model
from hf_effattn.samples.texts import Book, Passages, bundled_books

# Mean cosine of sentence embeddings with the exact model's, all layers patched: method, tokens, counts, at least.
PROMISED = [
    ("i-clustered", 128, {"clusters": 25, "topk": 32}, 0.997),
    ("i-clustered", 256, {"clusters": 25, "topk": 32}, 0.989),
    ("i-clustered", 256, {"clusters": 100, "topk": 64}, 0.999),
    ("i-clustered", 512, {"clusters": 100, "topk": 64}, 0.997),
    ("bi-clustered", 128, {"clusters": 25, "topk": 32, "key_clusters": 50}, 0.999),
    ("bi-clustered", 256, {"clusters": 25, "topk": 32, "key_clusters": 50}, 0.995),
    ("bi-clustered", 512, {"clusters": 100, "topk": 64, "key_clusters": 200}, 0.999),
]


@pytest.fixture(scope="module")
def bert(real_model_folder):
    model, tokenizer, _ = load_model(str(real_model_folder))
    return model, Passages(tokenizer, bundled_books())


@pytest.fixture(scope="module")
def excerpts(bert):
    """Tokens of three excerpts of every book, their books, and their exact embeddings, for a length."""
    model, passages = bert

    @cache
    def of_length(length):
        tokens, _, books = passages.pairs(length, per_book=3)
        return tokens, books, embed(model, tokens)

    return of_length


def embed(model, tokens, **inputs):
    with torch.no_grad():
        hidden = model(input_ids=tokens, **inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(tokens))[..., None]
    return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def cosine(model, tokens, exact, method, **settings):
    """Of the embeddings of a patched model with the exact ones."""
    hf_effattn.patch_attention(model, method, min_length=0, **settings)
    patched = embed(model, tokens)
    hf_effattn.unpatch_attention(model)
    return (patched * exact).sum(dim=-1)


@pytest.mark.slow_except("bi-clustered-128-counts4-0.999")
@pytest.mark.parametrize(("method", "length", "counts", "promised"), PROMISED)
def test_embeddings_stay_close(bert, excerpts, method, length, counts, promised):
    tokens, books, exact = excerpts(length)
    assert len(books) >= 18
    assert len(set(books)) >= 3
    found = cosine(bert[0], tokens, exact, method, **counts)
    print(f"{length} tokens, {method} {counts}: mean cosine {found.mean():.5f}, lowest {found.min():.5f}")
    assert found.mean() >= promised


@pytest.mark.slow
def test_bi_clustered_is_closer_than_improved_than_clustered_and_keys_metric_than_lsh(bert):
    model, passages = bert
    tokens, _, _ = passages.pairs(256, per_book=1)
    exact = embed(model, tokens)
    improved, clustered, bi_clustered, lsh = (
        cosine(model, tokens, exact, method, clusters=25, **settings).mean()
        for method, settings in (
            ("i-clustered", {"topk": 32}),
            ("clustered", {}),
            ("bi-clustered", {"topk": 32, "key_clusters": 50}),
            ("i-clustered", {"topk": 32, "clustering": "lsh", "iterations": 10}),
        )
    )
    assert improved > lsh
    assert improved > clustered
    assert bi_clustered > improved
    assert torch.equal(embed(model, tokens), exact)


@pytest.mark.parametrize("method", ["i-clustered", "bi-clustered"])
def test_padding_changes_nothing(bert, method):
    model, passages = bert
    short, _, _ = passages.pairs(128, per_book=1)
    long, _, _ = passages.pairs(256, per_book=1)
    padded = long.clone()
    padded[:, :128], padded[:, 128:] = short, 0
    mask = (torch.arange(256) < 128).long().expand_as(padded)
    exact = embed(model, short)
    hf_effattn.patch_attention(model, method, clusters=25, topk=32, min_length=0)
    torch.testing.assert_close(embed(model, padded, attention_mask=mask), embed(model, short), atol=1e-6, rtol=0)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(embed(model, short), exact)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "promised"), [("i-clustered", 0.989), ("bi-clustered", 0.995)])
def test_books_of_the_large_data_sets(bert, real_model_folder, large_data, method, promised):
    """The same promise on every long book that is at hand, not only on the excerpts."""
    folder = large_data("books")
    books = []
    for path in sorted(folder.glob("*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
        books.append(Book(path.name, text[len(text) // 2 : len(text) // 2 + 20_000]))
    assert len(books) >= 10
    model, tokenizer, _ = load_model(str(real_model_folder))
    tokens, _, _ = Passages(tokenizer, books).pairs(256, per_book=2)
    found = cosine(model, tokens, embed(model, tokens), method, clusters=25, topk=32)
    print(f"{len(tokens)} texts of {len(books)} books, 256 tokens, {method}: mean cosine {found.mean():.5f}")
    assert found.mean() >= promised
