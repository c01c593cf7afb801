"""The bundled texts: excerpts of public-domain books (see texts/SOURCES.txt) or the user's file, cut into passages."""

import warnings
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Book:
    """A text to cut passages from.

    Args:
        name (`str`): of the file, without its ending.
        text (`str`): all of it.
    """

    name: str
    text: str


def bundled_books() -> list[Book]:
    """The excerpts that ship with the package, one per book."""
    folder = files(__package__).joinpath("texts")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt") and entry.name[0].islower())
    return [Book(name.removesuffix(".txt"), folder.joinpath(name).read_text(encoding="utf-8")) for name in names]


def read_book(path: Path) -> Book:
    """The user's own text file, UTF-8.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8 text, or empty.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--text: there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise ValueError(f"--text: {path} is empty")
    return Book(path.stem, text)


class Passages:
    """Passages of exact token lengths, special tokens included.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): of the model.
        books (`list[Book]`): tokenized once.
    """

    def __init__(self, tokenizer: Any, books: list[Book]) -> None:
        self.names = [book.name for book in books]
        self._ids = [_ids(tokenizer, book.text, special=False) for book in books]
        self._before, self._after = special_tokens(tokenizer)

    def pairs(self, length: int, per_book: int) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
        """Pairs of passages that follow each other, from places spread over every book.

        Args:
            length (`int`): tokens of each passage.
            per_book (`int`): pairs from each book; fewer where a book is too short for passages that do not overlap.

        Returns:
            `(torch.Tensor, torch.Tensor, list[str])`: first and second passages `(pairs, length)`, and their books.

        Raises:
            ValueError: fewer than three pairs in all.
        """
        room = self._own_tokens(length)
        first, second, names = [], [], []
        for name, ids in zip(self.names, self._ids, strict=True):
            count = min(per_book, len(ids) // (2 * room))
            for index in range(count):
                start = index * (len(ids) // count)
                first.append(self._passage(ids[start : start + room]))
                second.append(self._passage(ids[start + room : start + 2 * room]))
                names.append(name)
        if len(first) < 3:
            raise ValueError(
                f"the text is too short: three pairs of passages of {length} tokens need {6 * room:,} tokens, it has "
                f"{sum(map(len, self._ids)):,}; give a longer --text or shorter --lengths"
            )
        return torch.tensor(first), torch.tensor(second), names

    def longest(self, length: int) -> torch.Tensor:
        """The beginning of the book with the most tokens, `(1, length)`.

        Raises:
            ValueError: no book is so long.
        """
        room = self._own_tokens(length)
        ids = max(self._ids, key=len)
        if len(ids) < room:
            raise ValueError(
                f"the text is too short: {length:,} tokens are asked for, the longest text has {len(ids):,}; give a "
                "longer --text or shorter --lengths"
            )
        return torch.tensor([self._passage(ids[:room])])

    def spread(self, length: int, count: int) -> list[torch.Tensor]:
        """Passages that do not overlap, `(length,)` each, in turn from all books, from places spread over each.

        Args:
            length (`int`): tokens of each.
            count (`int`): passages; fewer where the books have no more.

        Raises:
            ValueError: not even one of that length.
        """
        room = self._own_tokens(length)
        books = [ids for ids in self._ids if len(ids) >= room]
        if books and (short := [name for name, ids in zip(self.names, self._ids, strict=True) if len(ids) < room]):
            warnings.warn(f"left out, for want of {length:,} tokens: {', '.join(short)}", stacklevel=2)
        places = []
        for ids in books:
            of_book = min(len(ids) // room, -(-count // len(books)))
            starts = (index * (len(ids) // of_book) for index in range(of_book))
            places.append([ids[start : start + room] for start in starts])
        turns = [passage for turn in zip_longest(*places) for passage in turn if passage is not None]
        if not turns:
            self.longest(length)  # raises, with the words for it
        return [torch.tensor(self._passage(ids)) for ids in turns[:count]]

    def _own_tokens(self, length: int) -> int:
        room = length - len(self._before) - len(self._after)
        if room < 1:
            raise ValueError(f"--lengths: {length} tokens leave no room for text beside the special tokens")
        return room

    def _passage(self, ids: list[int]) -> list[int]:
        return [*self._before, *ids, *self._after]


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    # verbose=False: the text is longer than the model takes, and is cut afterwards.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and after a text."""
    plain, marked = (_ids(tokenizer, "a", special=special) for special in (False, True))
    for start in range(len(marked) - len(plain) + 1):
        if marked[start : start + len(plain)] == plain:
            return marked[:start], marked[start + len(plain) :]
    return [], []
