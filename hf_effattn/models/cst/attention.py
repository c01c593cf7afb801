"""Composite slice attention: local attention in slices, global attention among their embeddings (Lee 2023, Eq. 8–15).

Sizes: `B` batch, `N` rows of a level, `S` slices of `L` rows, `d` width, `H` heads, `D` head_dim.

A level attends inside its slices and hands their embeddings to the level above, which is the same attention on a
shorter sequence; the last level attends to everything. The paper has two levels.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ...ops import slice_attention
from .cache import GlobalRows, GlobalState, LevelRows, LevelState, keep, put, take
from .configuration_cst import CSTConfig
from .slices import SliceMLP, SlicePooling, add_to_slices, slice_mask

Tables = dict[int, torch.Tensor] | None


class Projection(nn.Linear):
    """A linear layer that can leave out its bias: the weights of an offloaded one can be read nowhere but here."""

    def forward(self, rows: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias if biased else None)


class Projections(nn.Module):
    """Queries, keys and values of one attention; values alone where it is not attention that mixes them."""

    def __init__(self, config: CSTConfig, *, attends: bool = True) -> None:
        super().__init__()
        if attends:
            self.query = Projection(config.hidden_size, config.hidden_size)
            self.key = Projection(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)


class CSTAttention(nn.Module):
    """Attention within slices and between their means."""

    def __init__(self, config: CSTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.level_lengths, self.extension = config.level_lengths, config.extension
        self.extension_ratio = config.extension_ratio
        self.composition, self.pooling = config.composition, config.pooling
        self.causal, self.global_tokens = config.is_decoder, config.num_global_tokens
        self.dropout_p = config.attention_probs_dropout_prob
        self.most_slices = config.most_slices
        self.projections = Projections(config, attends=config.share_projections or config.local_mixing == "attention")
        self.global_projections = None if config.share_projections else Projections(config)
        self.pools = nn.ModuleList(SlicePooling(config, length) for length in self.level_lengths)
        self.mlp = SliceMLP(config) if config.local_mixing == "mlp" else None
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: torch.Tensor, tables: Tables, mask: torch.Tensor | None, with_rows: bool = False
    ) -> tuple[torch.Tensor, LevelRows | GlobalRows | None]:
        """Attention of all rows to all, or to all earlier ones where the model is causal.

        Args:
            hidden (`torch.Tensor`): `(B, N, d)`.
            tables (`dict[int, torch.Tensor]`, *optional*): MS-VIPE, the positions of each level: at 0 `P_l` `(αL, d)`
                of the tokens, above it those of the slices.
            mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token; the tokens of a row come first.
            with_rows (`bool`): asks for what a state to go on from is cut out of.

        Returns: the output `(B, N, d)` and, where asked for, that.
        """
        output, computed = self._compose(0, hidden, tables, mask)
        return self.output(output), computed if with_rows else None

    def step(
        self, hidden: torch.Tensor, tables: Tables, state: LevelState | GlobalState, active: torch.Tensor
    ) -> tuple[torch.Tensor, LevelState | GlobalState]:
        """Attention of one more token of each row.

        Args:
            hidden (`torch.Tensor`): `(B, d)`.
            tables (`dict[int, torch.Tensor]`, *optional*): as in `forward`.
            state (`LevelState` or `GlobalState`): after what came before: of
                `LevelRows.after`, or of the step before.
            active (`torch.BoolTensor`): `(B,)`, False = padding, which leaves the row's state as it is.

        Returns: the output `(B, d)` and the state after it.
        """
        output, after = self._step(0, hidden, tables, state, active)
        return self.output(output), after

    def _projections_of(self, level: int) -> Projections:
        return self.projections if level == 0 or self.global_projections is None else self.global_projections

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`(..., N, d)` as `(..., H, N, D)`."""
        return rows.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def _query_key_value(self, level: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        to = self._projections_of(level)
        return self._heads(to.query(rows)), self._heads(to.key(rows)), self._heads(to.value(rows))

    def _position_terms(
        self, level: int, tables: Tables, length: int | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`P W_q` and `P W_k` per head, `(H, rows, D)`: the biases are already in the projections of the rows."""
        if tables is None:
            return None, None
        to, table = self._projections_of(level), tables[level][:length]
        extension = self.extension if level == 0 else 0
        of_queries = table[extension : len(table) - extension]
        return self._heads(to.query(of_queries, biased=False)), self._heads(to.key(table, biased=False))

    def _compose(
        self, level: int, rows: torch.Tensor, tables: Tables, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, LevelRows | GlobalRows]:
        if level == len(self.level_lengths):
            return self._attend_to_all(level, rows, tables, mask)
        L = self.level_lengths[level]
        upper_mask = slice_mask(mask, L)
        if self.composition == "local-global":
            local, means, (key, value) = self._local(level, rows, tables, mask)
            if self.pooling != "mean" or means is None:
                means = self.pools[level](local, mask)
            upper, upper_rows = self._compose(level + 1, means, tables, upper_mask)
            coarse = self._seen_by_slices(upper)
            pooled_rows = local
        else:
            embeddings = self.pools[level](rows, mask)
            upper, upper_rows = self._compose(level + 1, embeddings, tables, upper_mask)
            coarse = self._seen_by_slices(upper)
            inner = add_to_slices(rows, coarse, L) if self.composition == "global-local" else rows
            local, _, (key, value) = self._local(level, inner, tables, mask)
            pooled_rows = rows
        extension, sinks = (self.extension, self.global_tokens) if level == 0 else (0, 0)
        computed = LevelRows(key, value, pooled_rows, upper, upper_rows, L, extension, sinks)
        if level == 0 and self.global_tokens and not self.causal:
            local = self._with_global_tokens(local, rows, mask)
        return add_to_slices(local, coarse, L), computed

    def _seen_by_slices(self, upper: torch.Tensor) -> torch.Tensor:
        """What each slice gets from the level above. Causal: the result for the slices before it, by the query of the
        last of them (Eq. 12 and below); the first slice gets nothing."""
        return F.pad(upper[:, :-1], (0, 0, 1, 0)) if self.causal else upper

    def _local(
        self, level: int, rows: torch.Tensor, tables: Tables, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor]]:
        """Local mixing `(B, N, d)`, its slices' means where they are at hand, and keys and values `(B, H, N, D)`."""
        if level == 0 and self.mlp is not None:
            value = self.projections.value(rows)
            return self.mlp(value, mask), None, (self._heads(value), self._heads(value))
        query, key, value = self._query_key_value(level, rows)
        of_queries, of_keys = self._position_terms(level, tables)
        sinks = None
        if level == 0 and self.global_tokens:
            sinks = (torch.arange(rows.shape[1], device=rows.device) < self.global_tokens).expand(rows.shape[:2])
        output, means = slice_attention(
            query,
            key,
            value,
            slice_length=self.level_lengths[level],
            extension_ratio=self.extension_ratio if level == 0 else 1,
            causal=self.causal,
            key_mask=mask,
            query_positions=of_queries,
            key_positions=of_keys,
            sink_mask=sinks,
            dropout_p=self.dropout_p if self.training else 0.0,
        )
        return output.transpose(1, 2).flatten(2), means.transpose(1, 2).flatten(2), (key, value)

    def _attend_to_all(
        self, level: int, rows: torch.Tensor, tables: Tables, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, GlobalRows]:
        """Attention among all slices (Eq. 15)."""
        query, key, value = self._query_key_value(level, rows)
        of_queries, of_keys = self._position_terms(level, tables, rows.shape[1])
        if of_queries is not None and of_keys is not None:
            query, key = query + of_queries, key + of_keys
        output = self._exact(query, key, value, mask, causal=self.causal)
        return output, GlobalRows(key, value, self.most_slices)

    def _exact(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        causal: bool = False,
    ) -> torch.Tensor:
        """SDPA, `(B, rows, d)`."""
        visible = None
        if mask is not None and not causal:  # tokens come first, so the causal mask hides padding from them
            # Every row sees its first place, also one without a token: SDPA has no finite result for no key.
            visible = (mask | (torch.arange(mask.shape[1], device=mask.device) == 0))[:, None, None]
        dropout_p = self.dropout_p if self.training else 0.0
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=dropout_p, is_causal=causal
        )
        return output.transpose(1, 2).flatten(2)

    def _with_global_tokens(self, local: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The first tokens' local output replaced by their attention to every token, by content alone."""
        query, key, value = self._query_key_value(0, rows)
        output = self._exact(query[:, :, : self.global_tokens], key, value, mask)
        if mask is not None:
            output = output.masked_fill(~mask[:, : self.global_tokens, None], 0.0)
        return torch.cat([output, local[:, self.global_tokens :]], dim=1)

    def _step(
        self, level: int, row: torch.Tensor, tables: Tables, state: LevelState | GlobalState, active: torch.Tensor
    ) -> tuple[torch.Tensor, LevelState | GlobalState]:
        """One more row `(B, d)` of a level."""
        if isinstance(state, GlobalState):
            return self._step_to_all(level, row, tables, state, active)
        return self._step_slice(level, row, tables, state, active)

    def _step_slice(
        self, level: int, row: torch.Tensor, tables: Tables, state: LevelState, active: torch.Tensor
    ) -> tuple[torch.Tensor, LevelState]:
        L = self.level_lengths[level]
        slot = state.lengths % L
        inner = row + state.coarse if self.composition == "global-local" else row
        state, local = self._step_local(level, inner, tables, state, slot, active)
        pooled_row = local if self.composition == "local-global" else row
        state = state.with_row(slot, pooled_row, active)
        output = local + state.coarse
        finished = active & (slot == L - 1)
        state = state.advanced(active)
        # On a GPU the question would stop the stream of kernels, so there the work is always done.
        if finished.is_cuda or finished.any():
            embedding = self.pools[level](state.rows, None)[:, 0]
            state = state.next_slice(finished, *self._step(level + 1, embedding, tables, state.upper, finished))
        return output, state

    def _step_local(
        self,
        level: int,
        row: torch.Tensor,
        tables: Tables,
        state: LevelState,
        slot: torch.Tensor,
        active: torch.Tensor,
    ) -> tuple[LevelState, torch.Tensor]:
        """Local mixing of one more row `(B, d)`, and the state with its key and value."""
        if level == 0 and self.mlp is not None:
            value = self._heads(self.projections.value(row)[:, None])
            state = state.with_key_and_value(slot, value, value, active)
            mixed = self.mlp(state.value.transpose(1, 2).flatten(2), None)
            return state, take(mixed, slot[:, None], 1)[:, 0]
        query, key, value = self._query_key_value(level, row[:, None])
        state = state.with_key_and_value(slot, key, value, active)
        of_queries, of_keys = self._position_terms(level, tables)
        keys, values, visible = state.key, state.value, state.visible(slot)
        if of_queries is not None and of_keys is not None:
            query = query + of_queries[:, slot].transpose(0, 1)[:, :, None]
            keys = keys + of_keys[:, : keys.shape[2]]
        if state.sinks is not None:
            keys, values = (torch.cat(rows, dim=2) for rows in zip((keys, values), state.sinks, strict=True))
            visible = torch.cat([visible, state.visible_sinks(slot, state.sinks[0].shape[2])], dim=1)
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible[:, None, None])
        return state, output.transpose(1, 2).flatten(1)

    def _step_to_all(
        self, level: int, row: torch.Tensor, tables: Tables, state: GlobalState, active: torch.Tensor
    ) -> tuple[torch.Tensor, GlobalState]:
        query, key, value = self._query_key_value(level, row[:, None])
        if tables is not None:
            # A row that is full already is not active, so its position does not count.
            table = tables[level]
            at = table.index_select(0, state.lengths.clamp(max=len(table) - 1))[:, None]
            to = self._projections_of(level)
            query = query + self._heads(to.query(at, biased=False))
            key = key + self._heads(to.key(at, biased=False))
        place = state.lengths.clamp(max=state.key.shape[2] - 1)
        keys, values = put(state.key, key, place, active), put(state.value, value, place, active)
        visible = torch.arange(keys.shape[2], device=keys.device) <= place[:, None]
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible[:, None, None])
        lengths = keep(active, state.lengths + 1, state.lengths)
        return output.transpose(1, 2).flatten(1), GlobalState(lengths, keys, values)
