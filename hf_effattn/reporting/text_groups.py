"""Which token of a text goes with which others: the clusters of one head's queries, or the slices of a conversion.

Sizes: `N` length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedModel

from ..measuring.candidates import Candidate
from ..measuring.errors import run_model
from ..measuring.inputs import check_inputs
from ..measuring.recording import SeenAttention, as_it_was, layer_names, recording, stacks_to_report
from ..patching.model_types import is_causal

MOST_TOKENS = 256
DRAWN_ROWS = 12


class NothingToDraw(Exception):  # noqa: N818 - no error: the page says it in words and goes on
    """Why there is no text to draw, as a sentence."""


@dataclass(frozen=True)
class Piece:
    """A token as a reader sees it.

    Args:
        text (`str`): without the tokenizer's own marks.
        space (`bool`): whether a space stands before it.
    """

    text: str
    space: bool


@dataclass(frozen=True)
class DrawnText:
    """The text that the pictures show: the first of the inputs, without padding, cut to `MOST_TOKENS`.

    Args:
        inputs (`dict[str, Any]`): for the model, a batch of one.
        pieces (`list[Piece]`): its `N` tokens.
        special (`list[bool]`): which of them the tokenizer added.
        rows (`list[int]`): whose attention is drawn: the first segment of a pair, else the first tokens of the text
            (the last ones where the future is masked).
        whole_length (`int`): tokens before it was cut.
    """

    inputs: dict[str, Any]
    pieces: list[Piece]
    special: list[bool]
    rows: list[int]
    whole_length: int


@dataclass
class TextGroups:
    """A text in groups, and whom it is so for.

    Args:
        methods (`list[str]`): labels of the methods that share these groups.
        what (`str`): what a group is called, `"cluster"` or `"slice"`.
        groups (`list[int]`): of each token; empty where there are none to show.
        why_missing (`str`): a sentence where there are none.
    """

    methods: list[str]
    what: str
    groups: list[int] = field(default_factory=list)
    why_missing: str = ""

    def sizes(self) -> dict[int, int]:
        """Tokens of each group that has any, the largest first, equal ones by their number."""
        counts = {group: self.groups.count(group) for group in sorted(set(self.groups))}
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def text_to_draw(model: PreTrainedModel, inputs: Any, tokenizer: Any = None) -> DrawnText:
    """The text that the pictures of a page show.

    Args:
        model (`PreTrainedModel`): the model of the report.
        inputs (`Mapping` or `Sequence[Mapping]`): as the report got them; the first text of the first batch is drawn.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for the tokens. Default: those that the inputs keep.

    Raises:
        NothingToDraw: the inputs are no text, or their tokens are not known.
        ValueError: inputs that the model cannot take.
        TypeError: inputs that are not tensors.
    """
    # Whatever is not a batch or a list of them is for the check to refuse.
    first: Any = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
    batch = check_inputs(model, first)[0]
    if "input_ids" not in batch:
        raise NothingToDraw("the inputs are no text")
    size = batch["input_ids"].shape
    ids = batch["input_ids"][0]
    mask = batch.get("attention_mask")
    valid = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[0].bool()
    kept = valid.nonzero()[:MOST_TOKENS, 0]
    places = kept.tolist()
    encodings = getattr(first, "encodings", None)
    segments = first.sequence_ids(0) if encodings else [0] * len(ids)
    if tokenizer is not None:
        tokens = tokenizer.convert_ids_to_tokens(ids[kept].tolist())
        added = set(tokenizer.all_special_ids)
        special = [int(ids[place]) in added for place in places]
    elif encodings:
        tokens = [first.tokens(0)[place] for place in places]
        special = [segments[place] is None for place in places]
    else:
        raise NothingToDraw("the tokens of the text are not known: give the tokenizer too")
    if not layer_names(model):
        raise NothingToDraw("all layers see a sliding window")
    own = [index for index, is_special in enumerate(special) if not is_special] or list(range(len(places)))
    masks_the_future = any(is_causal(module) for encoder in stacks_to_report(model) for module in encoder.modules)
    question = [index for index, place in enumerate(places) if segments[place] == 0] if 1 in segments else []
    return DrawnText(
        # The mask is left out: nothing of what is kept is padding.
        {
            name: _first_text(value, size, kept) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if name != "attention_mask"
        },
        as_pieces([str(token) for token in tokens], special),
        special,
        # Where the future is masked the first tokens see too few others: nothing is approximated there yet.
        question or (own[-DRAWN_ROWS:] if masks_the_future else own[:DRAWN_ROWS]),
        int(valid.sum()),
    )


def _first_text(value: torch.Tensor, size: torch.Size, kept: torch.Tensor) -> torch.Tensor:
    return value[:1, kept] if value.shape[:2] == size else value[:1]


def as_pieces(tokens: Sequence[str], special: Sequence[bool]) -> list[Piece]:
    """Tokens as a reader sees them, by the marks of the tokenizer's kind: byte-level, SentencePiece or WordPiece."""
    ordinary = [token for token, is_special in zip(tokens, special, strict=True) if not is_special]
    byte_level = any(token.startswith(("Ġ", "Ċ")) for token in ordinary)
    marked_words = any(token.startswith("▁") for token in ordinary)
    pieces = []
    for token, is_special in zip(tokens, special, strict=True):
        if is_special:
            text, space = token, True
        elif byte_level:
            decoded = ByteLevel().decode([token])
            text, space = decoded.removeprefix(" "), decoded.startswith(" ")
        elif marked_words:
            text, space = token.removeprefix("▁"), token.startswith("▁")
        else:
            text, space = token.removeprefix("##"), not token.startswith("##")
        pieces.append(Piece(text.replace("\n", "↵") if text.strip(" ") else "␣", space))
    return pieces


def group_text(
    model: PreTrainedModel, text: DrawnText, candidates: Sequence[Candidate], layer: int | None, head: int | None
) -> list[TextGroups]:
    """The groups that each method puts the tokens of a text into, in one head; methods with the same ones together.

    Args:
        model (`PreTrainedModel`): afterwards what it was.
        text (`DrawnText`): from `text_to_draw`.
        candidates (`Sequence[Candidate]`): the methods.
        layer (`int`, *optional*): whose queries are clustered; None leaves clusters out.
        head (`int`, *optional*): of the layer.
    """
    seen = None if layer is None or head is None else _attention_of(model, text, layer)
    found: list[TextGroups] = []
    for candidate in candidates:
        one = _groups_of(candidate, text, seen, head or 0)
        same = [other for other in found if (other.what, other.groups, other.why_missing) == _content(one)]
        if same:
            same[0].methods.append(candidate.label)
        else:
            found.append(one)
    return found


def _content(one: TextGroups) -> tuple[str, list[int], str]:
    return one.what, one.groups, one.why_missing


def _attention_of(model: PreTrainedModel, text: DrawnText, layer: int) -> SeenAttention | None:
    kept: list[SeenAttention] = []

    def keep(seen: SeenAttention) -> torch.Tensor:
        if seen.layer == layer:
            kept.append(seen)
        return seen.exact()

    with as_it_was(model), torch.no_grad():
        model.eval()
        with recording(model, keep):
            run_model(model, text.inputs)
    return kept[0] if kept and kept[0].query.shape[2] == len(text.pieces) else None


def _groups_of(candidate: Candidate, text: DrawnText, seen: SeenAttention | None, head: int) -> TextGroups:
    method, N = candidate.forced, len(text.pieces)
    if seen is not None and method.differs_by_layer:
        of_head = method.of_head(seen.layer, head, seen.query.shape[1])
        if of_head is None:
            return TextGroups([candidate.label], method.group_name, why_missing="this head is exact.")
        method = of_head
    fixed = method.fixed_groups(N)
    if fixed is not None:
        return TextGroups([candidate.label], method.group_name, fixed)
    missing = TextGroups([candidate.label], method.group_name)
    if not method.group_name:
        missing.why_missing = "it has neither clusters nor slices."
    elif seen is None:
        missing.why_missing = "the queries of this head could not be read."
    elif seen.causal:
        missing.why_missing = (
            "the model masks the future, so clusters are made anew while the text goes on, and a token has no one "
            "cluster to show."
        )
    elif method.is_exact(N, N, seen.query.device.type):
        missing.why_missing = f"one of its counts reaches the {N} tokens shown, so nothing is clustered on them."
    else:
        missing.groups = method.group(seen.query, seen.key, seen.key_mask)[0][0, head].tolist()
    return missing
