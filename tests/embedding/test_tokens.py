"""Tokens of texts that are read in portions, cut, and divided."""

import pytest
from support.embedding_cases import save_encoder, text
from transformers import AutoTokenizer

from hf_effattn.embedding import tokens as module
from hf_effattn.embedding.tokens import Tokens, portions


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_encoder(tmp_path_factory.mktemp("encoder")))


def test_portions_are_the_text_and_end_between_words():
    whole = text(200) + "x" * 60 + " end"
    for sizes in (1, 7, 1000):
        pieces = [whole[start : start + sizes] for start in range(0, len(whole), sizes)]
        parts = list(portions(pieces, 40))
        assert "".join(parts) == whole
        assert all(len(part) <= 40 for part in parts)
        assert all(part[0] == " " for part in parts[1:] if "x" not in part)


def test_tokens_in_portions_are_those_of_the_whole_text(tokenizer, real_model_folder, monkeypatch):
    for of in (tokenizer, AutoTokenizer.from_pretrained(real_model_folder)):
        whole = text(500, 1) + "\n\nIt was the best of times,\tit was the worst. " * 20
        expected = of(whole, verbose=False)["input_ids"]
        monkeypatch.setattr(module, "PORTION", 100)
        assert Tokens(of).sequence([whole[:50], whole[50:]]) == (expected, False)


def test_a_text_is_read_no_further_than_it_is_needed(tokenizer):
    def pieces():
        yield from [text(200_000), text(200_000)]
        raise AssertionError("read on")

    sequence, cut = Tokens(tokenizer).sequence(pieces(), 50)
    assert cut
    assert sequence == tokenizer(text(48))["input_ids"]
    assert Tokens(tokenizer).sequence([text(48)], 50) == (sequence, False)


def test_chunks_hold_every_token_once(tokenizer):
    tokens = Tokens(tokenizer)
    sequence, _ = tokens.sequence([text(25)])
    chunks = tokens.chunks(sequence, 12)
    assert [len(chunk) for chunk in chunks] == [12, 12, 7]
    assert [token for chunk in chunks for token in chunk[1:-1]] == sequence[1:-1]
    assert {(chunk[0], chunk[-1]) for chunk in chunks} == {(sequence[0], sequence[-1])}
    assert tokens.chunks(sequence[:1] + sequence[-1:], 12) == [sequence[:1] + sequence[-1:]]
    with pytest.raises(ValueError, match="leave no room"):
        tokens.chunks(sequence, 2)


def test_blanks_are_no_text(tokenizer):
    tokens = Tokens(tokenizer)
    assert len(tokens.sequence([" \n", "\t"])[0]) == tokens.fewest == 2
    assert Tokens(tokenizer, "ba be ").fewest == 4
    assert Tokens(tokenizer, "ba be ").sequence(["bi"])[0] == tokenizer("ba be bi")["input_ids"]
