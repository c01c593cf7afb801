"""Settings of their own for every head, as a method of patching: a list of other methods' candidate settings.

Sizes: `B` batch, `H` heads, `N` query length, `D` head_dim of query and key, `Dv` of value.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, ClassVar

import torch

from ...ops import bi_clustered_attention
from ...ops.derivatives import learns
from ...ops.shared.graphs import in_a_graph
from ...ops.shared.head_threads import for_every_chunk, heads_of_threads
from ..exact.reference import causal_rows
from ..model_types.stacks import Stack, is_bidirectional
from .base import Groups, Method, Options, attend_exactly
from .clustered import BiClustered

# What a head costs in addition to its counts, in the unit of those: one cluster costs 1.
COST_OF_A_HEAD = 160
COST_OF_CLUSTERING = 16  # what clustering a head's queries, or keys, costs in addition to its clusters
Share = tuple[Method | None, list[int]]  # settings, None for exact attention, and the key/value heads that have them
Shares = list[Share]  # named, as torch.compile evaluates the annotations of inner functions and knows no `list[...]`


@dataclass(frozen=True, kw_only=True)
class PerHead(Method):
    """Every key/value head with the settings that it needs, or exact: what `hf_effattn.calibrate` finds.

    Args:
        candidates (`Sequence[Method | dict]`): the settings, the cheapest first, as methods or as `{"method": name,
            **settings}`; none that is to be fine-tuned. Each runs exact attention below its own `min_length`.
        heads (`Sequence[Sequence[int]]`): for every layer and key/value head the index of its candidate,
            `len(candidates)` for exact attention. Query heads that share keys share the candidate.
        calibration (`dict`, *optional*): how the table was found, as JSON values; `hf_effattn.calibrate` writes it.
            Its `model` names what the table is for, and another model is refused.
    """

    method: ClassVar[str] = "per-head"
    causal: ClassVar[bool | None] = False
    summary: ClassVar[str] = "each head runs the cheapest settings that keep its error within a bound, or is exact"
    purpose: ClassVar[dict[str, str]] = {
        **Method.purpose,
        "candidates": "the settings that heads share, the cheapest first",
        "heads": "for every layer and key/value head the index of its candidate; one more than the last: exact",
        "calibration": "how the table of heads was found",
    }
    differs_by_layer: ClassVar[bool] = True
    unnamed: ClassVar[tuple[str, ...]] = (*Method.unnamed, "candidates", "heads", "calibration")

    candidates: Sequence[Any] = ()
    heads: Sequence[Sequence[int]] = ()
    calibration: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "candidates", tuple(map(self._candidate, _listed("candidates", self.candidates))))
        rows = tuple(tuple(_listed("heads", row)) for row in _listed("heads", self.heads))
        object.__setattr__(self, "heads", rows)
        for index in (index for row in rows for index in row):
            if isinstance(index, bool) or not isinstance(index, int):
                raise TypeError(f"heads must hold indices of candidates, got {index!r}")
            if not 0 <= index <= len(self.candidates):
                raise ValueError(
                    f"heads has {index}, but there are {len(self.candidates)} candidates: give an index from 0, or "
                    f"{len(self.candidates)} for exact attention"
                )
        if len(set(map(len, rows))) > 1:
            raise ValueError(f"heads must have as many heads in every layer, got {sorted(set(map(len, rows)))}")
        if self.calibration is not None and not isinstance(self.calibration, Mapping):
            raise TypeError(f"calibration must be a dict or None, got {self.calibration!r}")

    def _candidate(self, method: Any) -> Method:
        """A candidate as a method; `min_length`, where the heads share one, is the candidate's too."""
        from . import make_method

        if isinstance(method, Mapping) and "method" in method:
            method = make_method(**{"causal": self.causal, **method})
        if not isinstance(method, Method):
            raise TypeError(f'a candidate must be a method or a dict {{"method": name, **settings}}, got {method!r}')
        shared = [name for name in ("tolerance", "cuda_graph") if name in method.to_dict()]
        if method.needs_fine_tuning or method.stays_exact or isinstance(method, PerHead) or shared:
            has = "".join(f" with a {name}" for name in shared)
            raise ValueError(
                f'"{method.method}"{has} cannot be a candidate: candidates are approximations, and a tolerance and '
                "cuda_graph are those of all heads"
            )
        if method.causal != self.causal:
            kinds = ("an encoder", "a decoder")
            raise ValueError(
                f"a candidate has the settings of {kinds[bool(method.causal)]}, and the heads are those of "
                f"{kinds[bool(self.causal)]}: give candidates for it"
            )
        return method if self.min_length is None else replace(method, min_length=self.min_length)

    @property
    def label_parts(self) -> dict[str, Any]:
        """What names these settings beside the method."""
        max_error = (self.calibration or {}).get("max_error")
        return {"candidates": len(self.candidates)} | ({} if max_error is None else {"max_error": max_error})

    def to_dict(self) -> dict[str, Any]:
        candidates = [{"method": candidate.method, **candidate.to_dict()} for candidate in self.candidates]
        calibration = None if self.calibration is None else dict(self.calibration)
        return super().to_dict() | {
            "candidates": candidates,
            "heads": [list(row) for row in self.heads],
            "calibration": calibration,
        }

    def for_layers(self, layers: Sequence[int]) -> "PerHead | None":
        if not self.heads:
            raise ValueError(_NOTHING)
        # A module that serves several layers runs what the most demanding of them needs.
        return self._with_row(tuple(map(max, zip(*(self.heads[layer] for layer in layers), strict=True))))

    def for_share(self, rank: int | None, ranks: int) -> "PerHead | None":
        (row,) = self.heads
        heads, left = divmod(len(row), ranks)
        if rank is None or left:
            why = "they do not divide evenly" if left else "its weights do not tell which this process has"
            raise ValueError(
                f'"per-head" has settings for {len(row)} key/value heads, which this model has divided among {ranks} '
                f"processes, and {why}: patch it with one setting for all heads"
            )
        return self._with_row(row[rank * heads : (rank + 1) * heads])

    def _with_row(self, row: Sequence[int]) -> "PerHead | None":
        """The same for one module with these heads; None where all of them are exact."""
        return None if min(row) == len(self.candidates) else replace(self, heads=(row,))

    def _differences(self, stack: Stack) -> str:
        """How the model that the settings were made for differs from a stack, in words; empty where it does not."""
        this = {"bidirectional": False} | described(stack)
        made_for = {"layers": len(self.heads), "key_heads": len(self.heads[0]) if self.heads else 0}
        model = (self.calibration or {}).get("model")
        made_for = ({"bidirectional": False} | model if model else {}) | made_for
        different = [name for name in this if name in made_for and made_for[name] != this[name]]
        return ", ".join(f"{name} {made_for[name]!r} and not {this[name]!r}" for name in different)

    def is_for(self, stack: Stack) -> bool:
        return not self._differences(stack)

    def check_stack(self, stack: Stack) -> None:
        if not self.heads:
            raise ValueError(_NOTHING)
        if differences := self._differences(stack):
            raise ValueError(
                f"the settings are another model's ({differences}) and do not fit this {type(stack.model).__name__}; "
                "they serve fine-tunes of their model only. Calibrate this one: hf_effattn.calibrate(model, inputs, "
                "max_error=...)"
            )
        for candidate in self.candidates:
            candidate.check_stack(stack)

    def is_exact(self, length: int, device_type: str) -> bool:
        return all(candidate.is_exact(length, device_type) for candidate in self._used())

    def counts_reach(self, length: int) -> bool:
        return all(candidate.counts_reach(length) for candidate in self._used())

    def shortest_length(self, device_type: str) -> int | None:
        lengths = [candidate.shortest_length(device_type) for candidate in self._used()]
        if not lengths:
            return self.min_length or 0
        return min((length for length in lengths if length is not None), default=None)

    def _used(self) -> list[Method]:
        used = {index for row in self.heads for index in row}
        return [candidate for index, candidate in enumerate(self.candidates) if index in used]

    def exact_heads(
        self, query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, scale: float | None = None
    ) -> list[int]:
        if self.is_exact(query.shape[2], query.device.type):
            return []
        exact: list[int] = []
        group = query.shape[1] // key.shape[1]
        for candidate, heads in self._shares(key):
            query_heads = _query_heads(heads, group)
            inside = list(range(len(query_heads)))
            if candidate is not None:
                inside = candidate.exact_heads(query[:, query_heads], key[:, heads], key_mask, scale)
            exact += [query_heads[place] for place in inside]
        return sorted(exact)

    def graph_key(self, options: Options) -> Hashable | None:
        if any(candidate.graph_key(options) is None for candidate in self._used()):
            return None
        # What transformers' SDPA path, by which heads are exact, asks of the module.
        return (getattr(options.module, "num_key_value_groups", None),)

    def approximated_heads(self, group: int) -> list[int] | None:
        (row,) = self.heads
        if max(row) < len(self.candidates):
            return None
        return _query_heads([head for head, index in enumerate(row) if index < len(self.candidates)], group)

    def _shares(self, key: torch.Tensor) -> list[Share]:
        """The candidates in use with their key/value heads, the slowest first; None stands for exact attention."""
        (row,) = self.heads
        if len(row) != key.shape[1]:
            raise ValueError(f"the settings are for {len(row)} key/value heads, and the attention has {key.shape[1]}")
        candidates: list[Method | None] = [*self.candidates, None]
        shares = [
            (candidate, [head for head, at in enumerate(row) if at == index])
            for index, candidate in enumerate(candidates)
        ]
        return [(candidate, heads) for candidate, heads in reversed(shares) if heads]

    def _shares_of(self, query: torch.Tensor, key: torch.Tensor) -> list[Share]:
        """The shares for these inputs, on which some of the candidates may be exact."""
        N, device_type = query.shape[2], query.device.type
        exact: list[int] = []
        shares: list[Share] = []
        for candidate, heads in self._shares(key):
            if candidate is None or candidate.chooses_exact(N, device_type):
                exact += heads
            else:
                shares.append((candidate, heads))
        return [(None, sorted(exact)), *shares] if exact else shares

    def _group(
        self, query: torch.Tensor, key: torch.Tensor, options: Options, shares: list[Share]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Labels of all queries and keys, `(B, heads, N)`, and which heads are exact, `(B, key/value heads)`.

        Labels are 0 in heads whose candidate makes none.
        """
        labels = query.new_zeros(query.shape[:3], dtype=torch.int64)
        key_labels = key.new_zeros(key.shape[:3], dtype=torch.int64)
        exact_heads = key.new_zeros(key.shape[:2], dtype=torch.bool)
        group = query.shape[1] // key.shape[1]

        def group_share(share: Share) -> None:
            candidate, heads = share
            if candidate is None:
                for head in heads:  # a list would be copied to the device, for which the host waits
                    exact_heads[:, head] = True
                return
            query_heads = _query_heads(heads, group)
            inputs = _heads(query, query_heads), _heads(key, heads)
            query_labels, *key_groups = candidate.group(*inputs, options.key_mask, options.scale)
            _store(labels, query_heads, query_labels)
            for store, groups in zip((key_labels, exact_heads), key_groups, strict=False):
                _store(store, heads, groups)

        def group_shares(run: Shares) -> None:
            for share in run:
                group_share(share)

        alike: dict[Method | None, list[int]] = {}
        for candidate, heads in shares:
            # The number of exact keys changes no label, so candidates that differ in it alone are grouped together.
            alike.setdefault(
                replace(candidate, topk=1) if isinstance(candidate, BiClustered) else candidate, []
            ).extend(heads)
        shares = list(alike.items())
        if in_a_graph():
            group_shares(shares)
        else:
            for_every_chunk(group_shares, _runs_of_threads(shares, key.device), key.device)
        return labels, key_labels, exact_heads

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, groups: Groups = ()
    ) -> torch.Tensor:
        """Run every candidate on its heads; in training on a CPU all bi-clustered and exact heads in one call."""
        group, shares = query.shape[1] // key.shape[1], self._shares_of(query, key)
        if _in_parts(options, query, key, value):
            return self._attend_in_parts(query, key, value, options, shares)
        labels, key_labels, exact_heads = self._group(query.detach(), key.detach(), options, shares)
        one_call = [share for share in shares if isinstance(share[0], BiClustered)]
        if one_call and query.device.type == "cpu":
            one_call = [share for share in shares if share[0] is None or isinstance(share[0], BiClustered)]
        outputs: list[tuple[list[int], torch.Tensor]] = []
        if one_call:
            candidates = {head: candidate for candidate, heads in one_call for head in heads}
            heads = sorted(candidates)
            query_heads = _query_heads(heads, group)
            # The counts of an exact head are not read.
            clusters, topk, key_clusters = (
                [getattr(candidates[head], name, 1) for head in heads] for name in ("clusters", "topk", "key_clusters")
            )
            some_exact = any(
                candidate is None or getattr(candidate, "max_predicted_error", None)
                for candidate in candidates.values()
            )
            output = bi_clustered_attention(
                _heads(query, query_heads),
                _heads(key, heads),
                _heads(value, heads),
                _heads(labels, query_heads),
                _heads(key_labels, heads),
                clusters=clusters,
                key_clusters=key_clusters,
                topk=topk,
                key_mask=options.key_mask,
                query_mask=options.key_mask,
                exact_heads=_heads(exact_heads, heads) if some_exact else None,
                scale=options.scale,
                dropout_p=options.dropout_p,
            )
            outputs.append((query_heads, output))
        for candidate, heads in (share for share in shares if share not in one_call):
            query_heads = _query_heads(heads, group)
            inputs = _heads(query, query_heads), _heads(key, heads), _heads(value, heads)
            if candidate is None:
                output = _attend_exactly(*inputs, options)
            else:
                output = candidate.attend(*inputs, options, (_heads(labels, query_heads),))
            outputs.append((query_heads, output))
        return _joined(outputs)

    def attend_causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Every candidate on its heads."""
        shares = self._shares(key)
        if _in_parts(options, query, key, value):
            return self._attend_in_parts(query, key, value, options, shares)
        key_heads = [heads for _, heads in shares]
        query_heads = [_query_heads(heads, query.shape[1] // key.shape[1]) for heads in key_heads]
        inputs = zip(_split(query, query_heads), _split(key, key_heads), _split(value, key_heads), strict=True)
        outputs = [
            (heads, _attend(candidate, *tensors, _options_of(heads, options)))
            for (candidate, _), heads, tensors in zip(shares, query_heads, inputs, strict=True)
        ]
        return _joined(outputs)

    def _attend_in_parts(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, shares: list[Share]
    ) -> torch.Tensor:
        """Let every thread take a part of a share at a time, and group and attend in it."""
        output = query.new_empty(*query.shape[:3], value.shape[3])
        group, N = query.shape[1] // key.shape[1], query.shape[2]

        def attend_part(part: tuple[Share, slice]) -> None:
            (candidate, heads), rows = part
            query_heads = _query_heads(heads, group)
            inputs = _heads(query, query_heads), _heads(key, heads), _heads(value, heads)
            part_output = _attend(candidate, *inputs, _options_of(query_heads, options), rows)
            _store(output[:, :, rows], query_heads, part_output)

        # An exact head takes as long as all others together, so threads divide its queries and not the heads.
        runs = heads_of_threads(N, query.device)
        if options.causal:
            runs = _causal_runs(runs) if options.key_mask is None and key.shape[3] == value.shape[3] else runs[:0]
        divided = [share for share in shares if share[0] is None and len(runs) > 1]
        parts = [(share, rows) for share in divided for rows in runs]
        others = [share for share in shares if share not in divided]
        parts += [(part, slice(None)) for part in _of_threads(others, query.device)]
        for_every_chunk(attend_part, parts, query.device)
        return output


@dataclass(frozen=True, kw_only=True)
class CausalPerHead(PerHead):
    """The same for a decoder, whose candidates are settings of decoders."""

    causal: ClassVar[bool | None] = True
    decoder_loss: ClassVar[float | None] = 0.005


_NOTHING = (
    '"per-head" has no settings of its own: hf_effattn.calibrate(model, inputs, max_error=...) finds them, and '
    "patch_attention(model, settings=...) takes what it returns or saved"
)


# The names of the number of key/value heads in configs; the last is that of image models.
_HEADS = ("num_key_value_heads", "num_attention_heads", "num_heads")


def described(stack: Stack) -> dict[str, Any]:
    """What a table of heads is for, as JSON values: a fine-tune of the model has the same."""
    config: Any = stack.model.config
    windowed = [
        layer
        for module, served in zip(stack.modules, stack.layers, strict=True)
        for layer in served
        if stack.exact.window_of(module) is not None
    ]
    layers = stack.depth
    without_attention = sorted(set(range(layers)) - {layer for served in stack.layers for layer in served})
    layer_config = config
    if getattr(config, "is_heterogeneous", False):  # windowed layers may have other numbers of heads
        layer_config = config.per_layer_config[min(set(range(layers)) - set(windowed), default=0)]
    return {
        "model_type": config.model_type,
        "layers": layers,
        "key_heads": next((heads for name in _HEADS if (heads := getattr(layer_config, name, None))), None),
        "hidden_size": getattr(config, "hidden_size", None),
        "windowed_layers": windowed,
        **({"layers_without_attention": without_attention} if without_attention else {}),
        **({"bidirectional": True} if is_bidirectional(config) else {}),
    }


def _query_heads(heads: Iterable[int], group: int) -> list[int]:
    return [head * group + member for head in heads for member in range(group)]


def _attend_exactly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, rows: slice = slice(None)
) -> torch.Tensor:
    """Exact attention of some queries, 0 in rows that are masked."""
    if options.causal and rows != slice(None):
        return causal_rows(query, key, value, rows, options.scale, options.attention_sinks)
    exact = attend_exactly(query[:, :, rows], key, value, options)
    return exact if options.key_mask is None else exact * options.key_mask[:, None, rows, None]


def _causal_runs(runs: Sequence[slice]) -> list[slice]:
    """As many runs of queries, which take equally long under a causal mask."""
    length, count = runs[-1].stop, len(runs)
    edges = [round(length * (index / count) ** 0.5) for index in range(count + 1)]
    return [slice(*edge) for edge in pairwise(edges) if edge[0] < edge[1]]


def _options_of(heads: list[int], options: Options) -> Options:
    """The options for some of the query heads."""
    sinks = options.attention_sinks
    return options if sinks is None else replace(options, attention_sinks=_heads(sinks[None], heads)[0])


def _attend(
    candidate: Method | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Options,
    rows: slice = slice(None),
) -> torch.Tensor:
    """The output of heads that share a candidate, None: exact attention; `rows`: of these queries, where exact."""
    if candidate is None:
        return _attend_exactly(query, key, value, options, rows)
    return candidate.run(query, key, value, **vars(options))


def _in_parts(options: Options, *tensors: torch.Tensor) -> bool:
    """Whether threads of a CPU may share the work: no autograd and no graph has to follow.

    Nor with dropout: a checkpoint's first pass, without gradients, must draw what the second one draws.
    """
    on_cpu = tensors[0].device.type == "cpu"
    return on_cpu and options.dropout_p == 0 and not in_a_graph() and not learns(*tensors, options.attention_sinks)


def _of_threads(shares: Sequence[Share], device: torch.device) -> list[Share]:
    """The shares, each divided into a part for every thread; the slowest first, so that no thread waits long."""
    parts = [(candidate, heads[part]) for candidate, heads in shares for part in heads_of_threads(len(heads), device)]
    return sorted(parts, key=_cost, reverse=True)


def _cost(share: Share) -> float:
    """The time of a part compared with others, measured at 8,192 tokens."""
    candidate, heads = share
    if candidate is None:
        return math.inf
    return len(heads) * (COST_OF_A_HEAD + sum(getattr(candidate, name) for name in candidate.price))


def _runs_of_threads(shares: Sequence[Share], device: torch.device) -> list[list[Share]]:
    """Shares for every thread that are grouped in about the same time.

    The heads stand in a row that is cut between threads. It is cut as seldom as possible, because each part of a share
    repeats the small steps of its clustering, which take as long as the arithmetic of some heads.
    """
    row = [(candidate, head) for candidate, heads in shares for head in heads]
    ends = list(accumulate(_grouping_cost(candidate) for candidate, _ in row))
    runs = []
    for part in heads_of_threads(ends[-1], device):
        run: dict[Method | None, list[int]] = {}
        for (candidate, head), end in zip(row, ends, strict=True):
            if part.start < end - _grouping_cost(candidate) / 2 <= part.stop:
                run.setdefault(candidate, []).append(head)
        runs.append(list(run.items()))
    return runs


def _grouping_cost(candidate: Method | None) -> int:
    """The time that a head of this candidate takes to be grouped, in units of about 30 microseconds."""
    counts = [getattr(candidate, name, 0) for name in ("clusters", "key_clusters")]
    return 1 + sum(COST_OF_CLUSTERING + count for count in counts if count)


def _heads(tensor: torch.Tensor, heads: list[int]) -> torch.Tensor:
    """Some heads of `(B, heads, ...)`: neighbours as they lie, others copied, six times faster than by an index."""
    first, end = heads[0], heads[-1] + 1
    if heads == list(range(first, end)):
        return tensor[:, first:end]
    each = tensor.unbind(1)
    return torch.stack([each[head] for head in heads], dim=1)


def _split(tensor: torch.Tensor, parts: Sequence[list[int]]) -> list[torch.Tensor]:
    """The heads of every part, of `(B, heads, ...)`.

    All at once: backwards, each of them taken alone leaves a gradient of all heads, to be added up.
    """
    each = tensor.unbind(1)
    return [torch.stack([each[head] for head in heads], dim=1) for heads in parts]


def _store(store: torch.Tensor, heads: list[int], values: torch.Tensor) -> None:
    """Write the heads `(B, len(heads), ...)` to their places in `(B, heads, ...)`."""
    for head, of_head in zip(heads, values.unbind(1), strict=True):
        store[:, head] = of_head


def _joined(outputs: Sequence[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """The outputs `(B, heads, N, Dv)` of these query heads, which are all, in their order."""
    if len(outputs) == 1:
        return outputs[0][1]
    of_heads = [pair for heads, output in outputs for pair in zip(heads, output.unbind(1), strict=True)]
    return torch.stack([output for _, output in sorted(of_heads, key=itemgetter(0))], dim=1)


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {values!r}: {PerHead.purpose[name]}")
    return list(values)
