"""The bundled books and the passages that are cut from them."""

import re
from importlib.resources import files

import pytest

from hf_effattn.samples.texts import Book, Passages, bundled_books, read_book


class Letters:
    """A tokenizer of one token per character, with 0 before and 1 after a text."""

    def __call__(self, text, *, add_special_tokens, verbose):
        ids = [ord(letter) for letter in text]
        return {"input_ids": [0, *ids, 1] if add_special_tokens else ids}


def test_books_are_enough_and_carry_no_licence_text():
    books = bundled_books()
    assert len(books) >= 4
    assert sum(len(book.text.encode()) for book in books) <= 600_000
    sources = files("hf_effattn.samples").joinpath("texts", "SOURCES.txt").read_text(encoding="utf-8")
    for book in books:
        assert not re.search(r"gutenberg|ebook|etext|copyright|https?:|www\.", book.text, re.IGNORECASE)
        assert f"{book.name}.txt" in sources


def test_pairs_follow_each_other_and_have_the_exact_length():
    book = Book("letters", "".join(chr(100 + index) for index in range(100)))
    first, second, names = Passages(Letters(), [book]).pairs(10, per_book=4)
    assert first.shape == second.shape == (4, 10)
    assert names == ["letters"] * 4
    assert first[:, 0].tolist() == [0] * 4
    assert second[:, -1].tolist() == [1] * 4
    assert (second[:, 1:9] - first[:, 1:9] == 8).all()
    assert first[:, 1].tolist() == [100, 125, 150, 175]


def test_a_text_that_is_too_short_is_named():
    passages = Passages(Letters(), [Book("letters", "a" * 40)])
    with pytest.raises(ValueError, match="three pairs of passages of 20 tokens need 108 tokens, it has 40"):
        passages.pairs(20, per_book=3)
    with pytest.raises(ValueError, match="1,000 tokens are asked for, the longest text has 40"):
        passages.longest(1000)
    with pytest.warns(UserWarning, match="left out, for want of 20 tokens: short$"):
        assert len(Passages(Letters(), [Book("letters", "a" * 40), Book("short", "a")]).spread(20, 4)) == 2


def test_a_file_is_read_and_its_faults_are_named(tmp_path):
    file = tmp_path / "own.txt"
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_book(file)
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_book(file)
    file.write_text(" \n")
    with pytest.raises(ValueError, match="is empty"):
        read_book(file)
    file.write_text("words")
    assert read_book(file) == Book("own", "words")
