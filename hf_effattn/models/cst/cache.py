"""What a causal Composite Slice Transformer keeps to go on from: summaries of finished slices and the local window.

Sizes: `B` batch, `H` heads, `D` head_dim, `d` width, `L` rows of a slice, `e` keys seen of the slice before.

Rows may have different lengths (padded prompts), so every place is counted per row, and nothing depends on a number
that would have to be read back from a GPU. States are not changed in place: a step returns a new one.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, CacheLayerMixin


def keep(active: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The new rows where `active` `(B,)`, else the old ones."""
    return torch.where(active.view(-1, *[1] * (new.ndim - 1)), new, old)


def take(rows: torch.Tensor, places: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of `dim` at `places` `(B, n)`, each item its own; places outside give any row."""
    places = places.clamp(0, max(0, rows.shape[dim] - 1))
    index = places.view(len(places), *[1] * (dim - 1), places.shape[1], *[1] * (rows.ndim - dim - 1))
    sizes = [*rows.shape[:dim], places.shape[1], *rows.shape[dim + 1 :]]
    return rows.gather(dim, index.expand(sizes))


def put(table: torch.Tensor, row: torch.Tensor, place: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """`table` `(B, ..., n, c)` with `row` `(B, ..., 1, c)` at `place` `(B,)` of each active item."""
    at = (torch.arange(table.shape[-2], device=table.device) == place[:, None]) & active[:, None]
    return torch.where(at.view(len(place), *[1] * (table.ndim - 3), table.shape[-2], 1), row.to(table.dtype), table)


@dataclass(frozen=True)
class _State:
    """Tensors with the batch first, and states of the same kind."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The state with every tensor changed."""
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                changed[field.name] = change(value)
            elif isinstance(value, _State):
                changed[field.name] = value.map(change)
        return replace(self, **changed)


@dataclass(frozen=True)
class GlobalState(_State):
    """Keys and values of the finished slices, with their positions.

    Args:
        lengths (`torch.LongTensor`): `(B,)`, finished slices.
        key (`torch.Tensor`): `(B, H, most slices, D)`.
        value (`torch.Tensor`): like `key`.
    """

    lengths: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class LevelState(_State):
    """The slice that is being filled, at one level.

    Args:
        lengths (`torch.LongTensor`): `(B,)`, rows so far.
        key (`torch.Tensor`): `(B, H, e + L, D)` without positions: the end of the slice before, then this slice.
        value (`torch.Tensor`): like `key`.
        rows (`torch.Tensor`): `(B, L, d)`, what this slice's embedding is made of.
        coarse (`torch.Tensor`): `(B, d)`, what this slice gets from the level above.
        upper (`LevelState` or `GlobalState`): the state of the level above.
        sink_key (`torch.Tensor`, *optional*): `(B, H, global tokens, D)`.
        sink_value (`torch.Tensor`, *optional*): like `sink_key`.
    """

    lengths: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor
    coarse: torch.Tensor
    upper: "LevelState | GlobalState"
    sink_key: torch.Tensor | None = None
    sink_value: torch.Tensor | None = None

    @property
    def extension(self) -> int:
        """`e`."""
        return self.key.shape[2] - self.rows.shape[1]

    def visible(self, slot: torch.Tensor) -> torch.Tensor:
        """Which keys of the window the row in `slot` sees, `(B, e + L)`."""
        place = torch.arange(self.key.shape[2], device=slot.device)
        has_neighbour = (self.lengths >= self.rows.shape[1])[:, None]
        return (place <= slot[:, None] + self.extension) & ((place >= self.extension) | has_neighbour)

    @property
    def sinks(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of the global tokens; None without any."""
        return None if self.sink_key is None or self.sink_value is None else (self.sink_key, self.sink_value)

    def visible_sinks(self, slot: torch.Tensor, count: int) -> torch.Tensor:
        """Which of `count` global tokens lie before the window of the row in `slot`, `(B, count)`."""
        first = torch.arange(count, device=slot.device)
        return first < (self.lengths - slot - self.extension)[:, None]

    def with_key_and_value(
        self, slot: torch.Tensor, key: torch.Tensor, value: torch.Tensor, active: torch.Tensor
    ) -> "LevelState":
        """With one more key and value `(B, H, 1, D)`."""
        place = slot + self.extension
        state = replace(self, key=put(self.key, key, place, active), value=put(self.value, value, place, active))
        if state.sinks is None:
            return state
        rows = zip(state.sinks, (key, value), strict=True)
        sinks = [put(sink, row, self.lengths, active) for sink, row in rows]
        return replace(state, sink_key=sinks[0], sink_value=sinks[1])

    def with_row(self, slot: torch.Tensor, row: torch.Tensor, active: torch.Tensor) -> "LevelState":
        """With one more row `(B, d)` for the slice's embedding."""
        return replace(self, rows=put(self.rows, row[:, None], slot, active))

    def advanced(self, active: torch.Tensor) -> "LevelState":
        """With one row more."""
        return replace(self, lengths=self.lengths + active)

    def next_slice(
        self, finished: torch.Tensor, upper: torch.Tensor, upper_state: "LevelState | GlobalState"
    ) -> "LevelState":
        """Where `finished` `(B,)`: at the start of a new slice, which gets `upper` `(B, d)` from the level above."""
        shifted = (F.pad(x[:, :, self.rows.shape[1] :], (0, 0, 0, self.rows.shape[1])) for x in (self.key, self.value))
        key, value = (keep(finished, new, old) for new, old in zip(shifted, (self.key, self.value), strict=True))
        return replace(self, key=key, value=value, coarse=keep(finished, upper, self.coarse), upper=upper_state)


@dataclass(frozen=True)
class GlobalRows(_State):
    """What the last level computed for whole rows; no later row has changed an earlier one, so any start of them has
    its state here.

    Args:
        key (`torch.Tensor`): `(B, H, slices, D)`.
        value (`torch.Tensor`): like `key`.
        most (`int`): slices of the longest input.
    """

    key: torch.Tensor
    value: torch.Tensor
    most: int

    def after(self, lengths: torch.Tensor) -> GlobalState:
        """The state after the first `lengths` `(B,)` slices of each row."""
        key, value = (F.pad(rows, (0, 0, 0, self.most - rows.shape[2])) for rows in (self.key, self.value))
        return GlobalState(lengths, key, value)


@dataclass(frozen=True)
class LevelRows(_State):
    """What a level computed for whole rows; as in `GlobalRows`.

    Args:
        key (`torch.Tensor`): `(B, H, N, D)`.
        value (`torch.Tensor`): like `key`.
        rows (`torch.Tensor`): `(B, N, d)`, what the slices' embeddings are made of.
        coarse (`torch.Tensor`): `(B, slices, d)`, the output of the level above.
        upper (`LevelRows` or `GlobalRows`): what that level computed.
        slice_length (`int`): `L`.
        extension (`int`): `e`.
        global_tokens (`int`): how many first rows every slice sees.
    """

    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor
    coarse: torch.Tensor
    upper: "LevelRows | GlobalRows"
    slice_length: int
    extension: int
    global_tokens: int

    def after(self, lengths: torch.Tensor) -> LevelState:
        """The state after the first `lengths` `(B,)` of each row."""
        finished = lengths // self.slice_length
        window = torch.arange(-self.extension, self.slice_length, device=lengths.device)
        places = (finished * self.slice_length)[:, None] + window
        key, value = (take(x, places, 2) for x in (self.key, self.value))
        coarse = take(self.coarse, finished[:, None] - 1, 1)[:, 0] * (finished > 0)[:, None]
        sinks: tuple[torch.Tensor, ...] = ()
        if self.global_tokens:
            first = torch.arange(self.global_tokens, device=lengths.device).expand(len(lengths), -1)
            sinks = tuple(take(x, first, 2) for x in (self.key, self.value))
        rows = take(self.rows, places[:, self.extension :], 1)
        return LevelState(lengths, key, value, rows, coarse, self.upper.after(finished), *sinks)


@dataclass(frozen=True)
class Prompt(_State):
    """A whole input, from which a layer's state at any of its columns can be had.

    Args:
        rows (`LevelRows` or `GlobalRows`): what the layer computed, each row's tokens first.
        mask (`torch.BoolTensor`): `(B, N)`, which columns of the input are tokens.
    """

    rows: LevelRows | GlobalRows
    mask: torch.Tensor

    def after(self, columns: int) -> LevelState | GlobalState:
        """The state after so many columns."""
        return self.rows.after(self.mask[:, :columns].sum(dim=1))


class CSTCacheLayer(CacheLayerMixin):
    """The state of one layer, as `generate` wants to handle it.

    A state cannot be put back by cutting it. While the past is recorded, the states before it are kept too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state: LevelState | GlobalState | None = None
        self.columns = 0
        self.record_past = False
        self._prompt: Prompt | None = None
        self._earlier: list[LevelState | GlobalState] = []

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put back what follows."""
        return self.record_past

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs, until it is called."""
        self.record_past = True

    def begin(self, rows: LevelRows | GlobalRows, mask: torch.Tensor) -> None:
        """Keep the state after a whole input, of which `mask` `(B, N)` says which columns are tokens."""
        prompt = Prompt(rows, mask.to(rows.key.device))
        self.state, self.columns, self.is_initialized = prompt.after(mask.shape[1]), mask.shape[1], True
        self._prompt, self._earlier = prompt if self.record_past else None, []

    def step(self, state: LevelState | GlobalState) -> None:
        """Keep the state after one more column."""
        if self.record_past and self.state is not None:
            self._earlier.append(self.state)
        self.state = state
        self.columns += 1

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last columns away again, and forget what was recorded.

        Args:
            tokens_to_remove (`int`): how many, negative or 0; a positive one is the number of columns to be left, as
                in older transformers.

        Raises:
            ValueError: more columns than were recorded.
        """
        removed = -tokens_to_remove if tokens_to_remove <= 0 else max(0, self.columns - tokens_to_remove)
        left = self.columns - removed
        if not removed:
            pass
        elif left <= 0:
            self.reset()
        elif removed <= len(self._earlier):
            self.state, self.columns = self._earlier[-removed], left
        elif self._prompt is not None:
            self.state, self.columns = self._prompt.after(left), left
        else:
            raise ValueError(
                f"cannot take {removed} columns out of this cache of a CST model, {len(self._earlier)} are recorded: "
                "it keeps summaries, not tokens. Call its activate_past_recording() before the model reads what may be"
                " taken back; every crop forgets what was recorded"
            )
        self._prompt, self._earlier = None, []

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.state is not None:
            self.state = self.state.map(change)
        if self._prompt is not None:
            self._prompt = self._prompt.map(change)
        self._earlier = [state.map(change) for state in self._earlier]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the first state comes from the model."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """How other models add keys: refused, since the summaries here cannot hold them.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "this cache keeps the slice summaries of a CST model, not keys and values: give it to such a model, and "
            "any other model a transformers.DynamicCache"
        )

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Length and offset of the columns so far."""
        return self.columns, 0

    def get_seq_length(self, *args: Any) -> int:
        """Columns seen so far, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, under the name of older transformers."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.columns, self.is_initialized = None, 0, False
        self._prompt, self._earlier = None, []

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows in the order of the beams that go on."""
        self._change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the named rows."""
        self._change(lambda tensor: tensor[indices])

    def offload(self) -> None:
        """The state to the CPU."""
        self._change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Nothing: a layer's state is small."""


class CSTCache(Cache):
    """Cache of `CSTForCausalLM`: per layer the local window and one summary per finished slice.

    Args:
        num_hidden_layers (`int`): layers of the model.
    """

    def __init__(self, num_hidden_layers: int) -> None:
        super().__init__(layers=[CSTCacheLayer() for _ in range(num_hidden_layers)])

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs, until it is called; transformers before 5.14 has no such method."""
        for layer in self.layers:
            layer.activate_past_recording()
