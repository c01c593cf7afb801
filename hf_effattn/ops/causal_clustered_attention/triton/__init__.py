"""Causal attention over clusters on a GPU: all segments at once, in few launches."""

from math import inf, log
from typing import NamedTuple, cast

import torch

from ...shared.gradients import register_op
from ...shared.tables import empty_output, unwritten_output
from ...shared.triton.recorded import recorded
from ...shared.triton.sort import SortedRows
from ...shared.triton.tiles import tile_config
from ..reference import Settings
from ..sinks import HAVE_GRADIENTS, gradient_of_sinks
from .clusters import Clusters, find_clusters
from .distant_keys import attend_to_summaries, choose_keys, late_segments, make_tables, mark_keys
from .gradients import BackwardPass
from .layout import Compaction, Layout, Rows
from .local import attend_near


class Saved(NamedTuple):
    """What the forward pass keeps for the backward pass, besides its inputs and its output; `Clusters` and more."""

    lse: torch.Tensor  # base-2 log-sum-exp of every query's scores, `(B · H, tokens of whole segments)`
    top: torch.Tensor  # the exact keys of every late segment, `(L · B · H, topk)` int32
    labels: torch.Tensor
    centroids: torch.Tensor
    previous_starts: torch.Tensor
    # The next three: the late segments' queries, see `SortedRows`
    order: torch.Tensor
    starts: torch.Tensor
    tiles: torch.Tensor
    # The next three: the keys of every block
    key_order: torch.Tensor
    key_starts: torch.Tensor
    key_tiles: torch.Tensor
    exact: torch.Tensor  # empty where no head may be


def tile_rows(x: Settings) -> tuple[int, int]:
    """Rows of a tile of sorted queries, and of sorted keys: these have most sums in a step of the backward pass."""
    dims = x.query.shape[3], x.value.shape[3]
    two_sums = tile_config(x.query, *dims, backward=True, two_sums=True)
    return tile_config(x.query, *dims)["ROWS"], max(16, two_sums["ROWS"] // 2)


def laid_out(x: Settings, layout: Layout, compaction: Compaction | None) -> Rows:
    """Query, key and value as the kernels take them."""
    query, key, value = x.query, x.key, x.value
    if compaction is not None:
        query, key, value = (compaction.take(rows) for rows in (query, key, value))
    return Rows(layout.queries(query), layout.keys(key), layout.keys(value))


@recorded
def _forward(x: Settings) -> list[torch.Tensor]:
    """One softmax over the local keys, the exact keys, and summaries of the others at the nearest centroid."""
    if x.query.numel() == 0:
        return _fake(x)
    layout = Layout.of(x)
    compaction = None if x.key_mask is None else Compaction.of(x.key_mask)
    rows, output = laid_out(x, layout, compaction), unwritten_output(x.query, x.value)
    # Rows behind the last token have log-sum-exp inf, so that their weights are 0.
    lse = torch.full((rows.heads, layout.padded), inf, dtype=torch.float32, device=output.device)
    attend_near(layout, rows, output, lse, (0, min(layout.first_late, layout.segments)))
    saved = _fake(x)[2:]
    if layout.late:
        clusters = find_clusters(layout, rows, tile_rows(x))
        top = torch.empty(len(clusters.centroids), x.topk, dtype=torch.int32, device=output.device)
        for late in late_segments(layout, rows, clusters):
            keys = late.own(top)
            if x.topk:
                choose_keys(layout, rows, clusters, late, keys)
            tables = make_tables(layout, rows, clusters, late, mark_keys(layout, rows, late, keys), for_backward=False)
            attend_near(layout, rows, output, lse, (layout.first_late + late.first, late.segments), keys, late.exact)
            attend_to_summaries(layout, rows, clusters, late, tables, output, lse)
        exact = saved[-1] if clusters.exact is None else clusters.exact
        saved = [
            top, clusters.labels, clusters.centroids, clusters.starts, clusters.readers.order, clusters.readers.starts,
            clusters.readers.tiles, clusters.keys.order, clusters.keys.starts, clusters.keys.tiles, exact,
        ]  # fmt: skip
    if compaction is not None:
        output = compaction.put(output, cast("torch.Tensor", x.key_mask))
    return [output, lse, *saved]


def _fake(x: Settings) -> list[torch.Tensor]:
    """The output, 0, and tensors of the right sizes for the rest, without numbers."""
    (B, H, _, D), layout, tiles = x.query.shape, Layout.of(x), tile_rows(x)
    n, C, G, L = x.segment_length, x.clusters, x.key_clusters, layout.late
    queries, keys = L * B * H, L * B * x.key.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return x.query.new_empty(*shape, dtype=dtype)

    saved = Saved(
        lse=empty(B * H, layout.padded, dtype=torch.float32),
        top=empty(queries, x.topk),
        labels=empty(queries, n, dtype=torch.int64),
        centroids=empty(queries, C, D, dtype=x.query.dtype),
        previous_starts=empty(queries, C + 2),
        order=empty(queries, n),
        starts=empty(queries, C + 2),
        tiles=empty(queries, n // tiles[0] + C + 1),
        key_order=empty(keys, n),
        key_starts=empty(keys, G + 2),
        key_tiles=empty(keys, n // tiles[1] + G + 1),
        exact=empty(L if x.max_predicted_error < inf else 0, B * x.key.shape[1], dtype=torch.bool),
    )
    return [empty_output(x.query, x.value), *saved]


@recorded
def gradients(
    grad_output: torch.Tensor, forward: list[torch.Tensor], x: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and sinks, labels and exact keys held fixed; `forward` is what that op gave."""
    if x.query.numel() == 0:
        of_sinks = x.query.new_empty(0) if x.sinks is None else torch.zeros_like(x.sinks)
        return torch.zeros_like(x.query), torch.zeros_like(x.key), torch.zeros_like(x.value), of_sinks
    output, layout, tiles, saved = forward[0], Layout.of(x), tile_rows(x), Saved(*forward[1:])
    compaction = None if x.key_mask is None else Compaction.of(x.key_mask)
    rows, clusters = laid_out(x, layout, compaction), None
    if compaction is not None:
        grad_output, output = compaction.take(grad_output), compaction.take(output)
    if layout.late:
        readers = SortedRows(saved.order, saved.starts, saved.tiles, x.clusters, tiles[0])
        keys = SortedRows(saved.key_order, saved.key_starts, saved.key_tiles, x.key_clusters, tiles[1])
        exact = saved.exact if len(saved.exact) else None
        clusters = Clusters(saved.labels, saved.centroids, saved.previous_starts, readers, keys, None, exact)
    backward = BackwardPass(layout, rows, layout.queries(grad_output), layout.queries(output), saved.lse)
    backward.run(clusters, saved.top)
    of_query = backward.query.view(rows.query.shape)[:, :, : layout.length]
    of_keys = backward.keys[:, layout.shift : layout.shift + layout.length].unflatten(0, x.key.shape[:2])
    grads = [of_query, *of_keys.split([x.key.shape[3], x.value.shape[3]], dim=3)]
    if compaction is not None:
        grads = [compaction.put(part, cast("torch.Tensor", x.key_mask)) for part in grads]
    pairs = zip((x.query, x.key, x.value), grads, strict=True)
    of_query, of_key, of_value = (torch.empty_like(like).copy_(grad) for like, grad in pairs)
    of_sinks = backward.delta.new_empty(0)
    if x.sinks is not None:
        lse, delta = (part.unflatten(0, x.query.shape[:2]) for part in (saved.lse, backward.delta))
        of_sinks = gradient_of_sinks(x.sinks, lse * log(2), delta)
    return of_query, of_key, of_value, of_sinks


causal_clustered_attention = register_op(
    "causal_clustered_attention_triton", Settings, _forward, gradients, HAVE_GRADIENTS, fake=_fake, keeps=slice(None)
)
