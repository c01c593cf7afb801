"""The report on pretrained weights and real text."""

import pytest
from transformers import AutoModel, AutoTokenizer

import hf_effattn
from hf_effattn.reporting.pattern import find_pattern
from hf_effattn.samples.texts import bundled_books

METHODS = [
    {"method": "clustered", "clusters": 25},
    {"method": "i-clustered", "clusters": 25, "topk": 32},
    {"method": "bi-clustered", "clusters": 25, "topk": 32, "key_clusters": 50},
]
CLUSTERED, IMPROVED = "clustered clusters=25", "i-clustered clusters=25 topk=32"
BI_CLUSTERED = "bi-clustered clusters=25 topk=32 key_clusters=50"


@pytest.fixture(scope="module")
def real(real_model_folder):
    return AutoModel.from_pretrained(real_model_folder), AutoTokenizer.from_pretrained(real_model_folder)


@pytest.mark.slow
def test_improved_clustered_is_close_and_clustered_is_not(real):
    model, tokenizer = real
    books = bundled_books()
    batch = tokenizer(
        [books[0].text[:900], books[1].text[:500]], truncation=True, max_length=128, padding=True, return_tensors="pt"
    )
    report = hf_effattn.report(model, batch, METHODS, repeats=0, memory=False, progress=False)
    (improved,), (clustered,), (bi_clustered,) = (report.of(name) for name in (IMPROVED, CLUSTERED, BI_CLUSTERED))
    assert report.inputs[0].valid_tokens < 256
    assert improved.mean_attention_error < 0.15
    assert bi_clustered.mean_attention_error < 0.75 * improved.mean_attention_error
    assert clustered.mean_attention_error > 2 * improved.mean_attention_error
    assert min(improved.change.embedding_cosines) > 0.99


def test_the_pattern_of_a_question_follows_exact_attention(real):
    model, tokenizer = real
    (book,) = (book for book in bundled_books() if book.name == "great-expectations")
    question = "Where did Pip's father lie buried, and who was laid beside him?"
    encoded = tokenizer(question, book.text[:2000], truncation="only_second", max_length=200, return_tensors="pt")
    pattern = find_pattern(model, encoded)
    assert pattern.is_pair
    assert [pattern.tokens[row] for row in pattern.rows][:3] == ["where", "did", "pip"]
    exact = pattern.most_attended("unpatched")
    agreement = {
        label: sum(token == other for token, other in zip(exact, pattern.most_attended(label), strict=True))
        for label in (BI_CLUSTERED, IMPROVED, CLUSTERED)
    }
    assert min(agreement[BI_CLUSTERED], agreement[IMPROVED]) > agreement[CLUSTERED]
