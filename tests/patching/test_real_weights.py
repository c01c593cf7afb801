"""A pretrained BERT on real text: what patching promises, on the weights and the words it is made for."""

import gzip

import pytest
import torch
import torch.nn.functional as F
from shared_data import dataset_path

import hf_effattn
from hf_effattn.demo.models import load_model
from hf_effattn.demo.texts import Book, Passages, bundled_books

# Mean cosine of sentence embeddings with the exact model's, all layers patched: tokens, clusters, topk, at least.
PROMISED = [(128, 25, 32, 0.997), (256, 25, 32, 0.989), (256, 100, 64, 0.999), (512, 100, 64, 0.997)]


@pytest.fixture(scope="module")
def bert(real_model_folder):
    model, tokenizer, _ = load_model(str(real_model_folder))
    return model, Passages(tokenizer, bundled_books())


def embed(model, tokens, **inputs):
    with torch.no_grad():
        hidden = model(input_ids=tokens, **inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(tokens))[..., None]
    return F.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)


def cosine_with_exact(model, tokens, method, **settings):
    exact = embed(model, tokens)
    hf_effattn.patch_attention(model, method, min_length=0, **settings)
    patched = embed(model, tokens)
    hf_effattn.unpatch_attention(model)
    assert torch.equal(embed(model, tokens), exact)
    return (patched * exact).sum(dim=-1)


@pytest.mark.parametrize(("length", "clusters", "topk", "promised"), PROMISED)
def test_embeddings_stay_close(bert, length, clusters, topk, promised):
    model, passages = bert
    tokens, _, books = passages.pairs(length, per_book=3)
    assert len(books) >= 18
    assert len(set(books)) >= 3
    cosine = cosine_with_exact(model, tokens, "i-clustered", clusters=clusters, topk=topk)
    print(f"{length} tokens, C={clusters}, k={topk}: mean cosine {cosine.mean():.5f}, lowest {cosine.min():.5f}")
    assert cosine.mean() >= promised


def test_improved_is_closer_than_clustered_and_keys_metric_than_lsh(bert):
    model, passages = bert
    tokens, _, _ = passages.pairs(256, per_book=1)
    improved = cosine_with_exact(model, tokens, "i-clustered", clusters=25, topk=32).mean()
    clustered = cosine_with_exact(model, tokens, "clustered", clusters=25).mean()
    lsh = cosine_with_exact(model, tokens, "i-clustered", clusters=25, topk=32, clustering="lsh", iterations=10).mean()
    assert improved > lsh
    assert improved > clustered


def test_padding_changes_nothing(bert):
    model, passages = bert
    short, _, _ = passages.pairs(128, per_book=1)
    long, _, _ = passages.pairs(256, per_book=1)
    padded = long.clone()
    padded[:, :128], padded[:, 128:] = short, 0
    mask = (torch.arange(256) < 128).long().expand_as(padded)
    hf_effattn.patch_attention(model, "i-clustered", clusters=25, topk=32, min_length=0)
    torch.testing.assert_close(embed(model, padded, attention_mask=mask), embed(model, short), atol=1e-6, rtol=0)
    hf_effattn.unpatch_attention(model)


def test_books_of_the_large_data_sets(bert, real_model_folder):
    """The same promise on every long book that is at hand, not only on the excerpts."""
    try:
        folder = dataset_path("books")
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    books = []
    for path in sorted(folder.glob("*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
        books.append(Book(path.name, text[len(text) // 2 : len(text) // 2 + 20_000]))
    assert len(books) >= 10
    model, tokenizer, _ = load_model(str(real_model_folder))
    tokens, _, _ = Passages(tokenizer, books).pairs(256, per_book=2)
    cosine = cosine_with_exact(model, tokens, "i-clustered", clusters=25, topk=32)
    print(f"{len(tokens)} texts of {len(books)} books, 256 tokens, C=25, k=32: mean cosine {cosine.mean():.5f}")
    assert cosine.mean() >= 0.989
