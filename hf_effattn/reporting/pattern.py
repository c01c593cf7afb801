"""Attention patterns of chosen tokens: where a head looks, exactly and as the methods approximate it.

Sizes: `H` heads, `N` length, `R` chosen rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import max_pool1d
from transformers import PreTrainedModel

from ..measuring.candidates import UNPATCHED, Candidate, make_candidates
from ..measuring.errors import run_model
from ..measuring.inputs import check_inputs
from ..measuring.recording import Measured, SeenAttention, recording
from ..patching.exact.reference import exact_weights, visible_keys
from ..patching.snapshot import as_it_was

DEFAULT_METHODS: tuple[dict[str, Any], ...] = (
    {"method": "bi-clustered", "clusters": 25, "topk": 32, "key_clusters": 50},
    {"method": "i-clustered", "clusters": 25, "topk": 32},
    {"method": "clustered", "clusters": 25},
)
DECODER_METHODS: tuple[dict[str, Any], ...] = (
    {"method": "bi-clustered", "exact_keys": 192, "key_clusters": 25},
    {"method": "i-clustered", "clusters": 25, "exact_keys": 192},
    {"method": "clustered", "clusters": 25},
)
DEFAULT_ROWS = 12
NEIGHBOURS = 3
MISCOUNT = 2
COLUMNS_AT_ONCE = 256


@dataclass
class AttentionPattern:
    """The weights of one head for chosen queries.

    Args:
        layer (`int`): as in a report.
        head (`int`): of the layer.
        chosen (`bool`): whether layer or head were chosen by the data (`head_scores`) and not by the caller.
        rows (`list[int]`): positions of the queries.
        tokens (`list[str]`): all `N` tokens.
        special (`list[bool]`): which of them the tokenizer added ([CLS], [SEP], padding).
        is_pair (`bool`): whether the rows are the first of two segments.
        weights (`dict[str, torch.Tensor]`): `(R, N)` for `"unpatched"` and each candidate's label.
        exact_labels (`tuple[str, ...]`): candidates whose settings leave this input exact.
    """

    layer: int
    head: int
    chosen: bool
    rows: list[int]
    tokens: list[str]
    special: list[bool]
    is_pair: bool
    weights: dict[str, torch.Tensor]
    exact_labels: tuple[str, ...] = ()

    def most_attended(self, label: str) -> list[int]:
        """For each row the position with the largest weight, special tokens aside: many heads rest on those."""
        weights = self.weights[label]
        if all(self.special):
            return weights.argmax(dim=1).tolist()
        return weights.masked_fill(torch.tensor(self.special), -1).argmax(dim=1).tolist()


def find_pattern(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    *,
    methods: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    rows: Sequence[int] | None = None,
    layer: int | None = None,
    head: int | None = None,
    tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
) -> AttentionPattern:
    """The weights that `plot_attention` draws; its arguments and errors.

    `special` says of each token whether the tokenizer added it; without it, what a fast tokenizer keeps does.
    """
    measured = Measured.of(model, to_record=True)
    layers, kinds = measured.layers, {stack.causal for stack in measured.stacks}
    if methods is None:
        methods = DECODER_METHODS if kinds == {True} else DEFAULT_METHODS
    candidates = make_candidates(methods, kinds=kinds)
    (batch,) = check_inputs(model, inputs) if isinstance(inputs, Mapping) else check_inputs(model, [inputs])
    labels = _labels(inputs, batch, tokens)
    first, known = _segments(inputs, len(labels))
    special = known if special is None else list(special)
    chosen_rows = _checked_rows(rows, first, len(labels))
    if layer is not None and layer not in layers:
        raise ValueError(f"layer {layer} is not among the layers with attention to approximate: {list(layers)}")

    content = torch.tensor([not (is_special or is_first) for is_special, is_first in zip(special, first, strict=True)])
    best: tuple[float, SeenAttention, int, torch.Tensor] | None = None

    def keep_the_best(seen: SeenAttention) -> torch.Tensor:
        nonlocal best
        if layer in (None, seen.layer):
            if head is not None and not 0 <= head < seen.query.shape[1]:
                raise ValueError(f"head {head} does not exist: layer {seen.layer} has {seen.query.shape[1]} heads")
            weights = _exact_rows(seen, chosen_rows)  # (H, R, N)
            scores = head_scores(weights, chosen_rows, content.to(weights.device))
            candidate = int(scores.argmax()) if head is None else head
            if best is None or float(scores[candidate]) > best[0]:
                best = (float(scores[candidate]), seen, candidate, weights[candidate])
        return seen.exact()

    with as_it_was(model), torch.no_grad():
        model.eval()
        with recording(measured, keep_the_best):
            run_model(model, batch)
        if best is None:
            raise ValueError(f"the forward pass of {type(model).__name__} did not reach layer {layer}")
        _, seen, found_head, exact = best
        weights = {UNPATCHED: exact.float().cpu()}
        for method in candidates:
            weights[method.label] = _implied_rows(method, seen, found_head, chosen_rows).float().cpu()
    N = seen.query.shape[2]
    return AttentionPattern(
        layer=seen.layer,
        head=found_head,
        chosen=layer is None or head is None,
        rows=chosen_rows,
        tokens=labels,
        special=special,
        is_pair=any(first) and rows is None,
        weights=weights,
        exact_labels=tuple(
            method.label for method in candidates if method.by_kind.get(seen.causal, method.settings).counts_reach(N)
        ),
    )


def one_of_each(methods: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the methods of a report those to draw: each once, with its fewest clusters, `"clustered"` last.

    Fewest, because there the difference is easiest to see. A sum of two attentions is no matrix of weights, so a
    conversion with `composition="local-global"` is not among them.
    """
    settings = [setting for setting in methods.values() if setting.get("composition") != "local-global"]
    settings.sort(key=lambda setting: (setting["method"] == "clustered", setting.get("clusters", 0)))
    return list({setting["method"]: setting for setting in reversed(settings)}.values())[::-1]


def head_scores(weights: torch.Tensor, rows: Sequence[int], content: torch.Tensor) -> torch.Tensor:
    """How sharply each head tells the chosen tokens apart by content.

    For every row the largest weight on a content token that is not a neighbour, above what the other rows on average
    give to the same token (a head that looks at [SEP] or a full stop from everywhere) and above what a row next door
    gives to the same distance (a head that counts positions, a diagonal in the picture); the mean over rows.

    Args:
        weights (`torch.Tensor`): `(H, R, N)`, exact attention.
        rows (`Sequence[int]`): the `R` positions.
        content (`torch.BoolTensor`): `(N,)`, tokens that count.

    Returns:
        `torch.Tensor`: `(H,)`, from 0 to 1.
    """
    R, N = weights.shape[1:]
    positions = torch.arange(N, device=weights.device)
    starts = torch.tensor(rows, device=weights.device)
    distances = positions - starts[:, None]  # (R, N)
    others = max(R - 1, 1)
    same_token = (weights.sum(dim=1, keepdim=True) - weights) / others
    # A head that counts positions may miscount by a token or two.
    nearby = max_pool1d(weights, 2 * MISCOUNT + 1, stride=1, padding=MISCOUNT)
    same_distance = torch.zeros_like(weights)
    for other, start in enumerate(rows):
        shifted = start + distances
        near = (starts != start) & ((starts - start).abs() <= NEIGHBOURS)
        inside = (shifted >= 0) & (shifted < N) & near[:, None]
        same_distance = torch.maximum(same_distance, nearby[:, other][:, shifted.clamp(0, N - 1)] * inside)
    sharp = (weights - torch.maximum(same_token, same_distance)).clamp(min=0)
    return sharp.masked_fill(~((distances.abs() > NEIGHBOURS) & content), 0).amax(dim=2).mean(dim=1)


def _exact_rows(seen: SeenAttention, rows: list[int]) -> torch.Tensor:
    mask = visible_keys(seen.key_mask, seen.query.shape[2], causal=seen.causal)
    options: dict[str, Any] = {"causal": seen.causal, "rows": rows, "attention_sinks": seen.attention_sinks}
    return exact_weights(seen.query.float(), seen.key.float(), mask, seen.scale, **options)[0]


def _implied_rows(candidate: Candidate, seen: SeenAttention, head: int, rows: list[int]) -> torch.Tensor:
    """The weights that a method implies, `(R, N)`."""
    # In pieces, so that nothing of N×N exists for all heads.
    forced = candidate.forced if seen.causal in candidate.by_kind else None
    method = None if forced is None else forced.for_layers((seen.layer,))
    if method is None:
        return _exact_rows(seen, rows)[head]
    pieces = [
        method.weights(
            seen.query, seen.key, columns=slice(start, start + COLUMNS_AT_ONCE), module=seen.module, **seen.options
        )[0, head, rows]
        for start in range(0, seen.key.shape[2], COLUMNS_AT_ONCE)
    ]
    return torch.cat(pieces, dim=1)


def _labels(inputs: Any, batch: Mapping[str, Any], tokens: Sequence[str] | None) -> list[str]:
    shape = batch["input_ids"].shape if "input_ids" in batch else None
    if shape is not None and shape[0] != 1:
        raise ValueError(f"plot_attention draws one text, got a batch of {shape[0]}; encode the one to draw")
    if tokens is None and getattr(inputs, "encodings", None):
        tokens = inputs.tokens(0)
    if tokens is None:
        raise ValueError(
            "there are no tokens to label the picture with: pass the output of a fast tokenizer, unchanged, or tokens="
        )
    if shape is not None and len(tokens) != shape[1]:
        raise ValueError(f"tokens has {len(tokens)} labels, but the text has {shape[1]} tokens")
    return [str(token).replace("Ġ", "").replace("▁", "") for token in tokens]


def _segments(inputs: Any, length: int) -> tuple[list[bool], list[bool]]:
    """Which tokens are the first of two segments, and which are special; all False where that is unknown."""
    if not getattr(inputs, "encodings", None):
        return [False] * length, [False] * length
    segments = inputs.sequence_ids(0)
    special = [segment is None for segment in segments]
    return [1 in segments and segment == 0 for segment in segments], special


def _checked_rows(rows: Sequence[int] | None, first: list[bool], length: int) -> list[int]:
    if rows is None:
        return [position for position, is_first in enumerate(first) if is_first] or list(
            range(min(DEFAULT_ROWS, length))
        )
    chosen = [int(row) for row in rows]
    if not chosen:
        raise ValueError("rows is empty: name the positions of the tokens to draw, or leave it out")
    outside = [row for row in chosen if not 0 <= row < length]
    if outside:
        raise ValueError(f"rows has {outside[0]}, but the text has tokens 0 to {length - 1}")
    return chosen
