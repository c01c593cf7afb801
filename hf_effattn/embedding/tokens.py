"""Texts as tokens, whatever their length: read in portions, cut at a number of tokens, or divided into chunks."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import dropwhile
from typing import Any

from ..samples.texts import special_tokens

# Characters that become tokens at a time: a fast tokenizer takes about 200 bytes for each meanwhile.
PORTION = 2**18


def portions(pieces: Iterable[str], characters: int = PORTION) -> Iterator[str]:
    """The same text in portions of about so many characters, each but the first beginning with the white space
    before a word; words longer than a portion are cut."""
    held = ""
    for piece in pieces:
        held += piece
        while len(held) > characters:
            end = max(held.rfind(space, 1, characters) for space in (" ", "\n", "\t"))
            end = end if end > 0 else characters
            yield held[:end]
            held = held[end:]
    if held:
        yield held


class Tokens:
    """Texts as lists of token ids with the special tokens around them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): of the model.
        prompt (`str`): put before every text.
    """

    def __init__(self, tokenizer: Any, prompt: str = "") -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._before, self._after = special_tokens(tokenizer)

    @cached_property
    def fewest(self) -> int:
        """The tokens of an empty document: special ones and the prompt's."""
        return len(self.sequence([])[0])

    @property
    def special(self) -> int:
        """Special tokens of a sequence."""
        return len(self._before) + len(self._after)

    def sequence(self, pieces: Iterable[str], max_length: int | None = None) -> tuple[list[int], bool]:
        """The tokens of a text, special ones included.

        Args:
            pieces (`Iterable[str]`): the text, read no further than needed.
            max_length (`int`, *optional*): the most tokens that stay.

        Returns:
            `(list[int], bool)`: the tokens, and whether the text had more.
        """
        room = None if max_length is None else self.own_tokens(max_length)
        ids: list[int] = []
        for portion in portions(_prompted(self._prompt, pieces)):
            # verbose=False: a portion may be longer than the model takes.
            ids += self._tokenizer(portion, add_special_tokens=False, verbose=False)["input_ids"]
            if room is not None and len(ids) > room:
                return self._whole(ids[:room]), True
        return self._whole(ids), False

    def chunks(self, sequence: list[int], length: int) -> list[list[int]]:
        """A sequence as chunks of `length` tokens at most, each with the special tokens around it."""
        room = self.own_tokens(length)
        inner = sequence[len(self._before) : len(sequence) - len(self._after)]
        return [self._whole(inner[start : start + room]) for start in range(0, max(len(inner), 1), room)]

    def own_tokens(self, length: int) -> int:
        """The tokens of a text in a sequence of `length`.

        Raises:
            ValueError: special tokens leave no room.
        """
        room = length - self.special
        if room < 1:
            raise ValueError(f"{length} tokens leave no room for text beside {self.special} special tokens")
        return room

    def _whole(self, ids: list[int]) -> list[int]:
        return [*self._before, *ids, *self._after]


def _prompted(prompt: str, pieces: Iterable[str]) -> Iterator[str]:
    if prompt:
        yield prompt
    yield from dropwhile(lambda piece: not piece.strip(), pieces)  # blanks alone are no text
