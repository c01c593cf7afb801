"""The demo's measurements, printed while they are made, and what they mean."""

import time
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from ..measuring.errors import relative_error
from ..patching import extend_positions, patch_attention, unpatch_attention
from ..reporting.numbers import duration, percent, ratio
from ..samples.model import load_model
from ..samples.texts import Book, Passages, bundled_books

BOOK = "great-expectations"
LENGTHS = (2048, 4096, 8192)
PASSAGE_LENGTH = 512
PASSAGES_PER_BOOK = 8
NEAREST = 5
EXACT, PATCHED = "exact", "patched"

say = partial(print, flush=True)  # also into a file a line is there when its work begins


@dataclass
class DemoResult:
    """What the demo measured; every dict has the keys `"exact"` and `"patched"`.

    Args:
        seconds (`dict[str, dict[int, float]]`): of the fastest forward pass, by tokens.
        vectors (`dict[str, torch.Tensor]`): of the longest text, the mean of its tokens' last hidden states `(d,)`.
        hidden_error (`float`): relative L2 error of those states.
        passages (`dict[str, torch.Tensor]`): vectors of the passages to search `(d,)`, by name.
    """

    seconds: dict[str, dict[int, float]] = field(default_factory=lambda: {EXACT: {}, PATCHED: {}})
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    hidden_error: float = 0.0
    passages: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(self.seconds[EXACT])

    def speedup(self) -> float:
        """How many times as fast the patched model read the longest text."""
        return self.seconds[EXACT][self.length] / self.seconds[PATCHED][self.length]

    def cosine(self) -> float:
        """Between the exact and the patched vector of the longest text."""
        return float(cosine_similarity(self.vectors[EXACT], self.vectors[PATCHED], dim=0))

    def nearest(self, attention: str) -> dict[str, float]:
        """The passages nearest to the longest text, with their cosines, the nearest first."""
        cosines = {
            name: float(cosine_similarity(self.vectors[attention], vector, dim=0))
            for name, vector in self.passages.items()
        }
        return dict(sorted(cosines.items(), key=lambda item: -item[1])[:NEAREST])

    def stayed(self) -> str:
        """How many of the nearest passages are so with either vector."""
        before, after = list(self.nearest(EXACT)), list(self.nearest(PATCHED))
        if (same := len({*before} & {*after})) < NEAREST:
            return f"{same} of the {NEAREST} nearest passages stayed"
        return f"all {NEAREST} nearest passages stayed{'' if before == after else ', in another order'}"


@torch.no_grad()
def run_demo() -> DemoResult:
    """Read the beginning of a novel, exactly and patched in turns, and search the passages nearest to it.

    Raises:
        FileNotFoundError: the model is not installed.
    """
    say("Loading a small BERT, all-MiniLM-L6-v2, and repeating its 512 positions so that it takes long texts.")
    model, tokenizer, _ = load_model(None)
    model = extend_positions(model, LENGTHS[-1])
    books = {book.name: book.text for book in bundled_books()}
    middle = len(books[BOOK]) // 2
    beginning = Passages(tokenizer, [Book(BOOK, books[BOOK][:middle])])
    books[BOOK] = books[BOOK][middle:]  # what is searched has nothing of what is read
    result = DemoResult()

    say(f"Reading {len(books) * PASSAGES_PER_BOOK} passages of {PASSAGE_LENGTH} tokens from {len(books)} novels.")
    for name, text in books.items():
        passages = Passages(tokenizer, [Book(name, text)]).spread(PASSAGE_LENGTH, PASSAGES_PER_BOOK)
        means = model(torch.stack(passages)).last_hidden_state.mean(dim=1)
        result.passages |= {f"{titled(name)}, passage {place}": mean for place, mean in enumerate(means, 1)}

    states = {}
    for length in (*LENGTHS, LENGTHS[-1]):  # the longest, which counts, twice
        ids = beginning.longest(length)
        states[EXACT] = _timed(model, ids, result.seconds[EXACT], EXACT)
        patch_attention(model, "bi-clustered")
        states[PATCHED] = _timed(model, ids, result.seconds[PATCHED], PATCHED)
        unpatch_attention(model)
    result.vectors = {attention: hidden.mean(dim=0) for attention, hidden in states.items()}
    result.hidden_error = relative_error(states[EXACT], states[PATCHED])
    return result


def _timed(model: PreTrainedModel, ids: torch.Tensor, seconds: dict[int, float], attention: str) -> torch.Tensor:
    """The last hidden states of a text `(N, d)`; the time is said, and kept where it is the shortest."""
    length = ids.shape[1]
    say(f"Reading the first {length:,} tokens of {titled(BOOK)}, {attention}:", end=" ")
    start = time.perf_counter()
    hidden = model(ids).last_hidden_state[0]
    took = time.perf_counter() - start
    say(duration(took))
    seconds[length] = min(took, seconds.get(length, took))
    return hidden


def titled(name: str) -> str:
    """A book's title, of the name of its file."""
    return name.replace("-", " ").title().replace(" Of ", " of ").replace(" And ", " and ")


def words(result: DemoResult) -> str:
    """The numbers in tables, what they mean, and where to go from here."""
    speed, tokens = ratio([result.speedup()]), f"{result.length:,} tokens"
    gain = f"made this BERT {speed} as fast" if result.speedup() > 1 else f"made this BERT no faster ({speed})"
    lines = [f"{'':14}{EXACT:>8}{PATCHED:>10}"]
    for length, seconds in result.seconds[EXACT].items():
        times = f"{duration(seconds):>8}{duration(result.seconds[PATCHED][length]):>10}"
        lines.append(f"{f'{length:,} tokens':14}{times}")
    lines[-1] += f"   {speed} as fast"
    lines += ["", f"The nearest of {len(result.passages)} passages to the {tokens}, by cosine:"]
    lines.append(f"   {EXACT:38}{PATCHED}")
    nearest = (result.nearest(attention).items() for attention in (EXACT, PATCHED))
    for place, ((name, cosine), (other, of_other)) in enumerate(zip(*nearest, strict=True), 1):
        lines.append(f"{place}  {cosine:.3f} {name:32}{of_other:.3f} {other}")
    return (
        "\n".join(lines)
        + f"""

What this shows
- hf_effattn.patch_attention(model, "bi-clustered") {gain} on {tokens}.
  Nothing was retrained, and unpatch_attention(model) undoes it.
- Exact attention compares every token with every other: twice the tokens, four times the work.
  Clustered attention compares groups of similar tokens: twice the tokens, twice the work.
- The price: it approximates. The states of all tokens moved by {percent(result.hidden_error)} (relative L2).
  Their mean, the vector of the text, moved less: its cosine to the exact one is {result.cosine():.4f},
  and {result.stayed()}.
- So patch models for long texts that are read as a whole: embeddings, classification, retrieval.
  Where single words count, as in question answering, look at the error first.
- Short texts gain nothing. They run exact attention by themselves, as the shortest above.
- This BERT was trained on 512 tokens. For good vectors of long texts take a model made for them.

Next, with a model and a text of your own
  effattn report BAAI/bge-m3 --text my.txt --lengths 8192    its speed, memory and error
  hf_effattn.patch_attention(model, "bi-clustered")          in Python; README.md shows how"""
    )
