"""The launches of the backward pass, in their order."""

import torch

from ...shared.triton.chips import block_width
from ...shared.triton.cluster_table import _cluster_table_bwd_summary_kernel, table_config
from ...shared.triton.tiles import LOG2_E, tile_config
from .backward import (
    _causal_attention_bwd_centroid_kernel,
    _causal_attention_bwd_near_key_kernel,
    _causal_attention_bwd_near_query_kernel,
    _causal_attention_bwd_older_key_kernel,
    _causal_attention_bwd_older_query_kernel,
    _causal_attention_bwd_top_kernel,
)
from .clusters import Clusters
from .distant_keys import Late, late_segments, make_tables, mark_keys
from .layout import Layout, Rows


class BackwardPass:
    """Sums in float32, laid out as the rows are.

    Attributes:
        query: gradient of the queries, `(B · H, tokens of whole segments, D)`.
        keys: those of keys and values side by side, `(P, shift + tokens, D + Dv)`.
    """

    def __init__(
        self, layout: Layout, rows: Rows, grad_output: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """`grad_output` and `output` `(B, H, tokens of whole segments, Dv)`, contiguous; `lse` `(B · H, tokens)`."""
        self.layout, self.rows, self.grad, self.lse = layout, rows, grad_output, lse
        self.delta = torch.linalg.vecdot(grad_output.float(), output.float()).flatten(0, 1)
        self.D, self.Dv = rows.query.shape[3], rows.value.shape[3]
        self.query = rows.query.new_zeros(rows.heads, layout.padded, self.D, dtype=torch.float32)
        places = rows.heads // rows.group, rows.key.shape[2]
        self.keys = rows.query.new_zeros(*places, self.D + self.Dv, dtype=torch.float32)
        settings = layout.settings
        self.factors = settings.scale, settings.scale * LOG2_E, settings.dropout_p
        self.seed = settings.dropout_seed
        self.config = tile_config(rows.query, self.D, self.Dv, backward=True)
        self.sums_config = tile_config(rows.query, self.D, self.Dv, backward=True, two_sums=True)
        # Dropout's random numbers take the registers of half of the columns.
        fewer = {"COLUMNS": 16} if settings.dropout_seed is not None else {}
        self.near_config = self.sums_config | fewer
        self.key_config = table_config(rows.query, self.D, self.Dv)

    def run(self, clusters: Clusters | None, top: torch.Tensor) -> None:
        """Launch everything. `clusters`: what the forward pass found, None where no segment is late."""
        layout, rows = self.layout, self.rows
        self._near_queries((0, min(layout.first_late, layout.segments)))
        self._near_keys(None if clusters is None else clusters.exact)
        if clusters is None:
            return
        for late in late_segments(layout, rows, clusters):
            late_top = late.own(top)
            self._near_queries((layout.first_late + late.first, late.segments), late_top, late.exact)
            self._exact_keys(late, late_top)
            self._distant(clusters, late, late_top)

    def _near_queries(
        self, segments: tuple[int, int], top: torch.Tensor | None = None, exact: torch.Tensor | None = None
    ) -> None:
        """As `attend_near`."""
        layout, rows, (first, count) = self.layout, self.rows, segments
        n, topk = layout.settings.segment_length, 0 if top is None else top.shape[1]
        tiles = -(-n // self.config["ROWS"])
        _causal_attention_bwd_near_query_kernel[(rows.heads * count * tiles,)](
            *rows, self.grad, self.seed, top if topk else None, exact, self.lse, self.delta, self.query,
            rows.group, layout.length, layout.padded, rows.key.shape[2], self.D, self.Dv, first, n,
            layout.settings.window, layout.shift, topk, count, tiles, *self.factors, **self.config,
        )  # fmt: skip

    def _near_keys(self, exact: torch.Tensor | None) -> None:
        layout, rows = self.layout, self.rows
        tiles = -(-layout.length // self.sums_config["ROWS"])
        _causal_attention_bwd_near_key_kernel[(len(self.keys) * tiles,)](
            *rows, self.grad, self.seed, exact, self.lse, self.delta, self.keys,
            rows.group, layout.length, layout.padded, rows.key.shape[2], self.D, self.Dv, layout.first_late,
            layout.settings.segment_length, layout.settings.window, layout.shift, tiles, *self.factors,
            **self.near_config,
        )  # fmt: skip

    def _exact_keys(self, late: Late, top: torch.Tensor) -> None:
        """Gradients of the exact keys `(L · B · H, topk)` of some late segments."""
        layout, rows, topk = self.layout, self.rows, top.shape[1]
        if not topk:
            return
        blocks = -(-topk // self.sums_config["ROWS"])
        shares = self.keys.new_empty(len(top), topk, self.D + self.Dv)
        _causal_attention_bwd_top_kernel[(len(top) * blocks,)](
            *rows, self.grad, self.seed, top, late.exact, self.lse, self.delta, shares,
            rows.heads, rows.group, layout.length, layout.padded, rows.key.shape[2], self.D, self.Dv,
            layout.first_late + late.first, layout.settings.segment_length, topk, blocks, *self.factors,
            **self.near_config,
        )  # fmt: skip
        # Places without a key hold 0, so they may be added to any row.
        first = torch.arange(len(self.keys), device=top.device) * self.keys.shape[1]
        first = first.repeat_interleave(rows.group).repeat(late.segments)[:, None]
        self.keys.view(-1, self.keys.shape[2]).index_add_(
            0, (top.clamp(min=0) + first).flatten(), shares.flatten(0, 1)
        )

    def _distant(self, clusters: Clusters, late: Late, top: torch.Tensor) -> None:
        """Gradients through the tables of some late segments."""
        layout, rows, (D, Dv), group = self.layout, self.rows, (self.D, self.Dv), self.rows.group
        C, G = late.centroids.shape[1], clusters.keys.clusters
        n, blocks = layout.settings.segment_length, late.blocks
        readers, keys, exact, start = late.readers, clusters.keys, late.exact, layout.first_late + late.first
        taken = mark_keys(layout, rows, late, top)
        tables = make_tables(layout, rows, clusters, late, taken, for_backward=True)
        table_grad_keys, table_grad_values, grad_bias = (torch.empty_like(table) for table in tables[:3])
        constant = torch.empty_like(grad_bias)
        summary_config = self.sums_config | {"ROWS": min(self.sums_config["ROWS"], 64 // rows.key.element_size())}
        query, grad = (layout.of_segments(part, start, late.segments) for part in (rows.query, self.grad))
        lse, delta = (
            layout.of_segments(part[None, ..., None], start, late.segments).contiguous()
            for part in (self.lse, self.delta)
        )
        columns, row_blocks = blocks * G, -(-blocks * G // summary_config["ROWS"])
        _cluster_table_bwd_summary_kernel[(len(late.centroids) * C * row_blocks,)](
            query, grad, late.seed, exact, readers.order, readers.starts, lse, delta, torch.zeros_like(delta),
            tables.keys, tables.values, tables.bias, late.centroids, table_grad_keys, table_grad_values, grad_bias,
            constant, *query.stride(), *grad.stride(), rows.heads, group, n, D, Dv, C, columns, 0, row_blocks,
            *self.factors, **summary_config,
        )  # fmt: skip
        if not layout.settings.linear_summaries:
            table_grad_keys.zero_()
        tiles = readers.tiles.shape[1]
        _causal_attention_bwd_older_query_kernel[(len(late.centroids) * tiles,)](
            rows.query, self.grad, late.seed, exact, readers.order, readers.starts, readers.tiles, *tables[:3],
            self.lse, self.delta, self.query, rows.heads, group, layout.length, layout.padded, D, Dv, C, G, late.first,
            start, n, columns, tiles, *self.factors, **self.config,
        )  # fmt: skip
        sizes = len(self.keys), group, group * C, rows.key.shape[2], D, Dv, C, G, late.first, n, blocks
        key_config = self.key_config | {"ROWS": keys.tile}
        tiles = keys.tiles.shape[1]
        _causal_attention_bwd_older_key_kernel[(blocks * len(self.keys) * tiles,)](
            late.centroids, rows.key, rows.value, taken, exact, readers.starts, keys.order, keys.starts, keys.tiles,
            tables.log_mass, constant, table_grad_keys, table_grad_values, self.keys,
            *sizes, late.segments, tiles, max(1.0, n / C), *self.factors[:2], **key_config,
        )  # fmt: skip
        key_config["ROWS"] = min(keys.tile, block_width(group * C))
        row_blocks = -(-group * C // key_config["ROWS"])
        parts = self.keys.new_empty(len(late.centroids) * C, blocks, D)
        _causal_attention_bwd_centroid_kernel[(late.segments * len(self.keys) * blocks * row_blocks,)](
            late.centroids, rows.key, rows.value, taken, exact, readers.starts, keys.order, keys.starts, tables.keys,
            tables.log_mass, constant, table_grad_keys, table_grad_values, grad_bias, parts,
            *sizes, row_blocks, *self.factors[:2],
            **key_config | ({"num_stages": 1} if rows.key.element_size() == 4 else {}),
        )  # fmt: skip
        self._previous_queries(clusters, late, parts.sum(dim=1))

    def _previous_queries(self, clusters: Clusters, late: Late, grad_centroids: torch.Tensor) -> None:
        """Give each previous query its share of the gradient of its centroid, `(L · B · H · C, D)`."""
        layout, labels = self.layout, late.own(clusters.labels)
        sizes = late.starts[:, :-1].diff(dim=1)
        of_members = grad_centroids / sizes.view(-1, 1).clamp(min=1)
        shares = of_members.view(len(labels), -1, self.D).gather(1, labels[..., None].expand(-1, -1, self.D))
        previous = layout.of_segments(self.query[None], layout.first_previous + late.first, late.segments)
        previous += shares.view_as(previous)
