"""Long texts with short ones about them: meetings with queries and their answers, parts of books with passages beside.

None is of what `scripts/benchmark/retrieval.py` measures on: neither its meetings nor, of other meetings, its queries.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from hashlib import sha256
from itertools import accumulate, chain, product
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..benchmark._inputs import HELD_OUT, SKIPPED, book_text
from ..benchmark.retrieval import CHUNKS, CUT, EXACT, Meeting, rows_of, turns_of
from ..shared.data import dataset_path

JUDGED = ["test", "val"]  # splits of QMSum
BEFORE, AFTER = "before", "after"  # the training
PATCHED = "patched"
VECTORS = (CHUNKS, CUT, PATCHED, EXACT)
# The dearest last; the other vectors before the training are in the results of `scripts/benchmark/retrieval.py`.
JUDGEMENTS = ((AFTER, CHUNKS), (AFTER, CUT), (BEFORE, PATCHED), (AFTER, PATCHED), (AFTER, EXACT))
# What the vectors of whole texts, patched, by the trained model are compared with.
COMPARED = tuple(pair for pair in product((BEFORE, AFTER), VECTORS) if pair != (AFTER, PATCHED))
HELD_OUT_OF = 8  # of the meetings to train on, one in so many is for the choices
PASSAGE = 128  # tokens of a passage beside a part of a book
PASSAGES = 2  # before each part, and after it
SPECIAL = 2  # tokens around a text


@dataclass(frozen=True)
class Source:
    """A long text, and short ones that it is to be found by. All are token ids without the special ones.

    Args:
        name (`str`): its own.
        kind (`str`): texts of one kind are hard to tell apart.
        tokens (`list[int]`): of the long text.
        anchors (`list[list[int]]`): of the short texts.
        places (`list[int]`): of each short text, the token of the long one that it is about.
    """

    name: str
    kind: str
    tokens: list[int]
    anchors: list[list[int]]
    places: list[int]

    def part(self, length: int, draw: Random) -> tuple[list[int], list[int]]:
        """A part of the long text, drawn around the place of a short text.

        Args:
            length (`int`): tokens of the part at most, special ones included.
            draw (`Random`): decides where it is.

        Returns:
            `(list[int], list[int])`: the tokens of the part, and the numbers of all short texts about it.
        """
        room = length - SPECIAL
        place = draw.choice(self.places)
        begin = draw.randint(max(0, place - room + 1), min(place, max(0, len(self.tokens) - room)))
        about = [number for number, other in enumerate(self.places) if begin <= other < begin + room]
        return self.tokens[begin : begin + room], about


def ids_of(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of texts, without the special ones."""
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def read_training_meetings() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """QMSum's rows to train on, and those that are held out of them."""
    rows = list(rows_of(["train"]))
    return [row for number, row in enumerate(rows) if number % HELD_OUT_OF], rows[::HELD_OUT_OF]


def held_out_meeting(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, length: int) -> Meeting:
    """A meeting whose text has `length` tokens at most."""
    text = "\n".join(turns_of(row))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    beyond = encoded["offset_mapping"][length - SPECIAL :]
    queries = tuple(query["query"].strip() for query in row["specific_query_list"])
    return Meeting(row["meeting_id"], text[: beyond[0][0]] if beyond else text, queries)


def kind_of(meeting: str) -> str:
    """What a meeting is about, by its id: a product to be designed, research, politics."""
    return {"E": "product", "I": "product", "T": "product", "B": "research"}.get(meeting[0], "politics")


def meeting_sources(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Source]:
    """Meetings, with their specific queries and the answers to these, in the middle of the turns that answer them.

    Queries that several of the meetings have are left out, and those that a judged one has.

    Args:
        rows (`list[dict]`): of QMSum.
        tokenizer (`PreTrainedTokenizerBase`): of the model.
    """
    asked = Counter(query["query"].strip() for row in rows for query in row["specific_query_list"])
    asked.update(query["query"].strip() for row in rows_of(JUDGED) for query in row["specific_query_list"])
    for row in rows:
        turns = ids_of(tokenizer, turns_of(row))
        starts = [0, *accumulate(map(len, turns))]
        texts, places = [], []
        for query in row["specific_query_list"]:
            if asked[query["query"].strip()] > 1:
                continue
            spans = [range(int(first), int(last) + 1) for first, last in query["relevant_text_span"]]
            answering = list(chain(*spans))
            texts += [query["query"].strip(), query["answer"].strip()]
            places += 2 * [starts[min(answering[len(answering) // 2], len(turns) - 1)]]
        if texts:
            yield Source(
                row["meeting_id"], kind_of(row["meeting_id"]), list(chain(*turns)), ids_of(tokenizer, texts), places
            )


def training_books() -> list[Path]:
    """Files of the books that are not held out."""
    held_out = {Path(name).name for name in HELD_OUT}
    return [path for path in sorted(dataset_path("books").glob("*.txt.gz")) if path.name not in held_out]


def book_sources(
    paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase, count: int, length: int
) -> Iterator[Source]:
    """Parts spread over each book, with the passages that they continue and those that continue them.

    Args:
        paths (`Iterable[Path]`): files of Project Gutenberg, among the data sets.
        tokenizer (`PreTrainedTokenizerBase`): of the model.
        count (`int`): parts of each book; fewer where it has no more without overlap.
        length (`int`): tokens of a part, special ones included.
    """
    beside = PASSAGES * PASSAGE
    room = length - SPECIAL
    for path in paths:
        (tokens,) = ids_of(tokenizer, [book_text(f"books/{path.name}")])
        tokens = tokens[SKIPPED:]
        of_book = min(count, len(tokens) // (room + 2 * beside))
        for number in range(of_book):
            start = number * (len(tokens) // of_book)
            middle, end = start + beside, start + beside + room
            begins = [*range(start, middle, PASSAGE), *range(end, end + beside, PASSAGE)]
            passages = [tokens[begin : begin + PASSAGE] for begin in begins]
            places = PASSAGES * [0] + PASSAGES * [room - 1]
            yield Source(f"{path.name} {number}", path.name, tokens[middle:end], passages, places)


def described(sources: list[Source]) -> dict[str, Any]:
    """How many texts there are, and a checksum of them."""
    checksum = sha256(json.dumps([astuple(source) for source in sources]).encode()).hexdigest()
    return {"sources": len(sources), "anchors": sum(len(source.anchors) for source in sources), "sha256": checksum}
