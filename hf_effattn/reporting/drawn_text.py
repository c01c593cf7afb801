"""The text whose attention a page draws, its tokens as a reader sees them.

Sizes: `N` length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedModel

from ..measuring.inputs import check_inputs
from ..measuring.recording import Measured
from ..patching.model_types.stacks import is_causal

MOST_TOKENS = 256
DRAWN_ROWS = 12


class NothingToDraw(Exception):  # noqa: N818 - no error: the page says it in words and goes on
    """Why there is no text to draw, as a sentence."""


@dataclass(frozen=True)
class DrawnText:
    """The text that the pictures show: the first of the inputs, without padding, cut to `MOST_TOKENS`.

    Args:
        inputs (`dict[str, Any]`): for the model, a batch of one.
        tokens (`list[str]`): its `N` tokens, without the marks of the tokenizer.
        special (`list[bool]`): which of them the tokenizer added.
        rows (`list[int]`): whose attention is drawn: the first segment of a pair, else the first tokens of the text
            (the last ones where the future is masked).
        whole_length (`int`): tokens before it was cut.
    """

    inputs: dict[str, Any]
    tokens: list[str]
    special: list[bool]
    rows: list[int]
    whole_length: int


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
    measured = Measured.of(model)
    if not measured.layers:
        raise NothingToDraw("all layers see a sliding window")
    text_tokens = [index for index, is_special in enumerate(special) if not is_special] or list(range(len(places)))
    masks_the_future = any(is_causal(module) for stack in measured.stacks for module in stack.modules)
    question = [index for index, place in enumerate(places) if segments[place] == 0] if 1 in segments else []
    return DrawnText(
        # The mask is left out: nothing of what is kept is padding.
        {
            name: _first_text(value, size, kept) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
            if name != "attention_mask"
        },
        without_marks([str(token) for token in tokens], special),
        special,
        # Where the future is masked the first tokens see too few others: nothing is approximated there yet.
        question or (text_tokens[-DRAWN_ROWS:] if masks_the_future else text_tokens[:DRAWN_ROWS]),
        int(valid.sum()),
    )


def _first_text(value: torch.Tensor, size: torch.Size, kept: torch.Tensor) -> torch.Tensor:
    return value[:1, kept] if value.shape[:2] == size else value[:1]


def without_marks(tokens: Sequence[str], special: Sequence[bool]) -> list[str]:
    """Tokens as a reader sees them, by the marks of the tokenizer's kind: byte-level, SentencePiece or WordPiece."""
    ordinary = [token for token, is_special in zip(tokens, special, strict=True) if not is_special]
    byte_level = any(token.startswith(("Ġ", "Ċ")) for token in ordinary)
    marked_words = any(token.startswith("▁") for token in ordinary)
    shown = []
    for token, is_special in zip(tokens, special, strict=True):
        text = token
        if not is_special and byte_level:
            text = ByteLevel().decode([token]).removeprefix(" ")
        elif not is_special:
            text = token.removeprefix("▁" if marked_words else "##")
        shown.append(text.replace("\n", "↵") if text.strip(" ") else "␣")
    return shown
