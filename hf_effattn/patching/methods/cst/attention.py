"""Attention of a converted model: slices of a pretrained layer's own queries, keys and values.

Sizes: `B` batch, `H` heads, `N` length, `D` head_dim, `L` slice length, `S` slices.

The paper's sum of local and global attention (Lee 2023, Eq. 10) doubles the output of a layer that was trained with
exact attention, and takes the values through their projection twice. The merged form here approximates the one
softmax that the layer was trained with: tokens of the slice one by one, every other slice by the means of its keys and
values (and, unless causal, of its queries), weighted by the number of its tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ....ops import slice_attention
from ....ops.shared.graphs import in_a_graph
from ....ops.shared.precision import accumulation_dtype, fast_dtype, product_dtype
from ....ops.slice_attention import extension_tokens

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Terms = tuple[torch.Tensor | None, torch.Tensor | None]
NO_TERMS: Terms = (None, None)


@dataclass(kw_only=True)
class Slicing:
    """How a layer attends in slices.

    Args:
        slice_length (`int`): `L`.
        extension_ratio (`float`): `α` in [1, 3].
        causal (`bool`): whether later tokens are hidden.
        attend_ends (`bool`): whether every slice sees the first and (unless causal) the last token of the sequence.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        scale (`float`, *optional*): factor on the scores. Default `D ** -0.5`.
        local_terms (`tuple`): position terms `(H, L, D)` of queries and `(H, αL, D)` of keys in a slice, or None.
        slice_terms (`tuple`): position terms `(H, S, D)` of the slices' queries and keys, or None. These and the local
            ones are `(B, H, ...)` where they differ from text to text.
        dropout_p (`float`): dropout on the weights.
    """

    slice_length: int
    extension_ratio: float = 1
    causal: bool = False
    attend_ends: bool = True
    key_mask: torch.Tensor | None = None
    scale: float | None = None
    local_terms: Terms = NO_TERMS
    slice_terms: Terms = NO_TERMS
    dropout_p: float = 0.0

    @property
    def attend_in_slices(self) -> Callable[..., Any]:
        """`slice_attention`, or the same text by text where the position terms differ."""
        of_query = self.local_terms[0]
        return slice_attention if of_query is None or of_query.ndim == 3 else _text_by_text

    @property
    def local_options(self) -> dict[str, Any]:
        """What `attend_in_slices` is told of it, but for the ends of the text."""
        return {
            "slice_length": self.slice_length,
            "extension_ratio": self.extension_ratio,
            "causal": self.causal,
            "key_mask": self.key_mask,
            "scale": self.scale,
            "query_positions": self.local_terms[0],
            "key_positions": self.local_terms[1],
            "dropout_p": self.dropout_p,
            "return_lse": True,
        }


# What has a row for each text, of what `slice_attention` takes by name.
_OF_TEXTS = "key_mask", "sink_mask"
_TERMS = "query_positions", "key_positions"


def _text_by_text(*rows: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """`slice_attention` of queries, keys and values, with position terms `(B, H, ...)` of each text."""
    outputs = []
    for text in range(rows[0].shape[0]):
        cut = {name: options[name] if options[name] is None else options[name][text : text + 1] for name in _OF_TEXTS}
        terms = {name: options[name] if options[name] is None else options[name][text] for name in _TERMS}
        outputs.append(slice_attention(*(part[text : text + 1] for part in rows), **options | cut | terms))
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def first_and_last_tokens(key_mask: torch.Tensor | None, query: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """The sequence's first and, unless causal, last token, `(B, N)`: [CLS] and [SEP], which draw attention everywhere.

    Args:
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        query (`torch.Tensor`): `(B, H, N, D)`.
        causal (`bool`): whether the last token must stay hidden.
    """
    if key_mask is None:
        key_mask = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    rank = key_mask.cumsum(dim=1)
    ends = rank == 1
    if not causal:
        ends = ends | (rank == rank[:, -1:])
    return ends & key_mask


def slice_means(rows: torch.Tensor, key_mask: torch.Tensor | None, slice_length: int) -> torch.Tensor:
    """Masked mean of each slice, `(B, heads, S, D)`; 0 for a slice without a token.

    Args:
        rows (`torch.Tensor`): `(B, heads, N, D)`.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        slice_length (`int`): `L`.
    """
    if key_mask is not None:
        rows = rows.masked_fill(~key_mask[:, None, :, None], 0.0)
    slices = F.pad(rows, (0, 0, 0, -rows.shape[2] % slice_length)).unflatten(2, (-1, slice_length))
    sums = slices.sum(dim=3, dtype=accumulation_dtype(rows.dtype))
    return (sums / slice_sizes(rows, key_mask, slice_length).clamp(min=1)[:, None, :, None]).to(rows.dtype)


def slice_sizes(rows: torch.Tensor, key_mask: torch.Tensor | None, slice_length: int) -> torch.Tensor:
    """Tokens of each slice, `(B or 1, S)`, in the dtype of the rows.

    Args:
        rows (`torch.Tensor`): `(B, heads, N, D)`.
        key_mask (`torch.BoolTensor`, *optional*): `(B, N)`, True = token.
        slice_length (`int`): `L`.
    """
    N = rows.shape[2]
    mask = rows.new_ones(1, N) if key_mask is None else key_mask.to(rows.dtype)
    return F.pad(mask, (0, -N % slice_length)).unflatten(1, (-1, slice_length)).sum(dim=2)


def merged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    how: Slicing,
) -> torch.Tensor:
    """One softmax over the tokens of the extended slice and the means of all other slices.

    `Y_i = (1 − w_i) Y_l,i + w_i Y_g,s` for a token `i` of slice `s`, with `w_i = sigmoid(lse_g,s − lse_l,i)`. The
    global scores are `scale · q̄_s · k̄_t + log n_t`, `n_t` the tokens of slice `t`, over the slices that no token of
    `s` sees whole. Causal: only slices before, and the token's own query in place of the mean, of which later tokens
    are a part: then the keys and values of earlier tokens are all that a next one needs, see `merged_over_cache`.

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, H, N, D)`.
        value (`torch.Tensor`): `(B, H, N, Dv)`.
        how (`Slicing`): slices, mask and positions.

    Returns: `(B, H, N, Dv)`, 0 in masked rows.
    """
    causal, key_mask = how.causal, how.key_mask
    scale = query.shape[3] ** -0.5 if how.scale is None else how.scale
    sink_mask = first_and_last_tokens(key_mask, query, causal=causal) if how.attend_ends else None
    local, _, local_lse = how.attend_in_slices(query, key, value, **how.local_options, sink_mask=sink_mask)
    # Every slice sees the ends of the text one by one, so they are in no mean of keys: each key counts once.
    summarised = key_mask
    if sink_mask is not None:
        summarised = ~sink_mask if key_mask is None else key_mask & ~sink_mask
    slices = _Slices.of(key, value, summarised, how.slice_length, how.slice_terms[1])
    whole = _neighbours_seen_whole(how.slice_length, how.extension_ratio)
    of_token = torch.arange(query.shape[2], device=query.device) // how.slice_length
    # Of each row of coarse queries, a token or a slice, its own slice.
    own_slice = of_token if causal else torch.arange(slices.key.shape[2], device=query.device)
    coarse_query = query if causal else slice_means(query, key_mask, how.slice_length)
    if causal and key_mask is not None:
        coarse_query = coarse_query.masked_fill(~key_mask[:, None, :, None], 0.0)
    if how.slice_terms[0] is not None:
        coarse_query = coarse_query + (how.slice_terms[0].index_select(-2, of_token) if causal else how.slice_terms[0])
    distance = own_slice[:, None] - torch.arange(slices.key.shape[2], device=query.device)
    scores, visible = slices.scores(coarse_query * scale, (distance if causal else distance.abs()) > whole)
    scores = scores.to(local_lse.dtype)
    weights = F.dropout(scores.softmax(dim=-1).to(fast_dtype(value)), how.dropout_p)
    coarse = (weights @ slices.value.to(weights.dtype)).to(value.dtype)  # (B, H, N or S, Dv)
    coarse_lse = scores.logsumexp(dim=-1).masked_fill(~visible.any(dim=-1), -torch.inf)
    if not causal:
        coarse, coarse_lse = coarse.index_select(2, of_token), coarse_lse.index_select(2, of_token)
    share = (coarse_lse - local_lse).sigmoid().to(value.dtype)[..., None]
    output = local + share * (coarse - local)
    return output if key_mask is None else output.masked_fill(~key_mask[:, None, :, None], 0.0)


def merged_over_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    how: Slicing,
) -> torch.Tensor:
    """The rows of the last tokens in the causal `merged_attention`, from a cache of keys and values.

    Args:
        query (`torch.Tensor`): `(B, H, Q, D)`, of the last `Q` tokens.
        key (`torch.Tensor`): `(B, H, M, D)`, of all tokens so far; a static cache has empty rows behind them.
        value (`torch.Tensor`): `(B, H, M, Dv)`.
        visible (`torch.BoolTensor`, *optional*): `(B, Q, M)`, which keys a query sees: all tokens up to its own.
            Default: one query, which sees every row.
        how (`Slicing`): as of the whole, `slice_terms` for at least the slices of `M` rows; the mask is `visible`.

    Returns: `(B, H, Q, Dv)`.
    """
    B, H, Q, D = query.shape
    M = key.shape[2]
    scale = D**-0.5 if how.scale is None else how.scale
    if visible is None:
        visible = torch.ones(B, Q, M, dtype=torch.bool, device=query.device)
    token = visible[:, -1]
    order = tokens_first(token)
    if order is not None:
        key, value = take_rows(key, order), take_rows(value, order)
        token = token.gather(1, order)
    places = torch.arange(M, device=query.device)
    place = visible.sum(dim=2)[..., None] - 1  # (B, Q, 1), of each query among its text's tokens
    own_slice = place // how.slice_length
    extension = extension_tokens(how.slice_length, how.extension_ratio)
    at = places - own_slice * how.slice_length + extension  # (B, Q, M), place of a key in the query's window
    window = (at >= 0) & (places <= place)
    local_query = query
    if how.local_terms[0] is not None:
        local_query = query + take_rows(how.local_terms[0].expand(B, -1, -1, -1), place[..., 0] % how.slice_length)
    products = product_dtype(query)
    local_query = local_query.to(products) * scale
    scores = local_query @ key.to(products).transpose(2, 3)
    if how.local_terms[1] is not None:
        of_places = local_query @ how.local_terms[1].to(products).mT  # (B, H, Q, αL)
        index = at.clamp(0, of_places.shape[3] - 1)[:, None].expand(-1, H, -1, -1)
        scores = scores + of_places.gather(3, index).masked_fill(~window[:, None], 0.0)
    near = window | ((places == 0) & (places <= place)) if how.attend_ends else window
    summarised = token & (places > 0) if how.attend_ends else token
    slices = _Slices.of(key, value, summarised, how.slice_length, how.slice_terms[1])
    coarse_query = query
    if how.slice_terms[0] is not None:
        coarse_query = query + take_rows(how.slice_terms[0].expand(B, -1, -1, -1), own_slice[..., 0].clamp(min=0))
    distance = own_slice - torch.arange(slices.key.shape[2], device=query.device)
    coarse, _ = slices.scores(
        coarse_query * scale, distance > _neighbours_seen_whole(how.slice_length, how.extension_ratio)
    )
    scores = scores.masked_fill(~near[:, None], torch.finfo(scores.dtype).min)
    weights = torch.cat([scores, coarse], dim=3).softmax(dim=3, dtype=accumulation_dtype(query.dtype))
    near_weights, coarse_weights = weights.to(fast_dtype(value)).split([M, coarse.shape[3]], dim=3)
    values = value.masked_fill(~token[:, None, :, None], 0.0), slices.value
    near, others = (rows.to(near_weights.dtype) for rows in values)
    return (near_weights @ near + coarse_weights @ others).to(value.dtype)


@dataclass(frozen=True)
class _Slices:
    """Mean keys `(B, heads, S, D)` and values of all slices, and their sizes `(B or 1, S)`."""

    key: torch.Tensor
    value: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        key_mask: torch.Tensor | None,
        slice_length: int,
        term: torch.Tensor | None,
    ) -> "_Slices":
        mean_key = slice_means(key, key_mask, slice_length)
        if term is not None:
            mean_key = mean_key + term[..., : mean_key.shape[2], :]
        return cls(mean_key, slice_means(value, key_mask, slice_length), slice_sizes(key, key_mask, slice_length))

    def scores(self, scaled_query: torch.Tensor, allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the slices `(B, H, rows, S)`, and who sees which `(B or 1, 1, rows, S)`."""
        visible = (allowed & (self.sizes > 0)[:, None])[:, None]
        products = product_dtype(self.key)
        scores = scaled_query.to(products) @ self.key.to(products).transpose(2, 3)
        scores = scores + self.sizes.clamp(min=1).log()[:, None, None]
        # A finite fill: a row that sees no other slice must give no NaN, nor must its gradient.
        return scores.masked_fill(~visible, torch.finfo(scores.dtype).min), visible


def _neighbours_seen_whole(slice_length: int, extension_ratio: float) -> int:
    return 1 if extension_tokens(slice_length, extension_ratio) == slice_length else 0


def tokens_first(mask: torch.Tensor) -> torch.Tensor | None:
    """The order of rows `(B, N)` that puts each text's tokens first, or None where they are known to be.

    Slices are counted from the first token, so that padding before it changes nothing.

    Args:
        mask (`torch.BoolTensor`): `(B, N)`, True = token.
    """
    # A graph cannot ask, and on a GPU the question would stop the stream of kernels: rows are always put in order.
    if mask.device.type == "cpu" and not in_a_graph() and not (mask[:, 1:] & ~mask[:, :-1]).any():
        return None
    return (~mask).to(torch.int8).argsort(dim=1, stable=True)


def take_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows `(B, heads, N, D)` in an order `(B, N)`."""
    return rows.gather(2, order[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3]))


def summed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    project: Callable[[torch.Tensor], Projected],
    how: Slicing,
) -> torch.Tensor:
    """The paper's composition: `Y_l + ψ(Y_g)`, the global attention among the projected slice embeddings (Eq. 10, 15).

    Causal: the query of the slice before, and keys of slices before (Eq. 12 and below).

    Args:
        query (`torch.Tensor`): `(B, H, N, D)`.
        key (`torch.Tensor`): `(B, H, N, D)`.
        value (`torch.Tensor`): `(B, H, N, D)`.
        project (`Callable`): queries, keys and values `(B, H, S, D)` of slice embeddings `(B, S, H · D)`.
        how (`Slicing`): slices, mask and positions; attend_ends is for the local attention, and beyond the paper.

    Returns: `(B, H, N, D)`, 0 in masked rows.
    """
    causal, key_mask = how.causal, how.key_mask
    sink_mask = first_and_last_tokens(key_mask, query, causal=causal) if how.attend_ends else None
    local, means, _ = how.attend_in_slices(query, key, value, **how.local_options, sink_mask=sink_mask)
    slice_query, slice_key, slice_value = project(means.transpose(1, 2).flatten(2))
    if how.slice_terms[0] is not None and how.slice_terms[1] is not None:
        slice_query, slice_key = slice_query + how.slice_terms[0], slice_key + how.slice_terms[1]
    visible = (slice_sizes(query, key_mask, how.slice_length) > 0)[:, None, None]  # (B or 1, 1, 1, S)
    S = slice_query.shape[2]
    slices = torch.arange(S, device=query.device)
    if causal:
        visible = visible & (slices <= slices[:, None])
    # Every row sees its first place, also one without a token: SDPA has no finite result for no key.
    coarse = F.scaled_dot_product_attention(
        slice_query, slice_key, slice_value, visible | (slices == 0), dropout_p=how.dropout_p, scale=how.scale
    )
    if causal:
        coarse = F.pad(coarse[:, :, :-1], (0, 0, 1, 0))
    output = local + coarse.index_select(2, torch.arange(query.shape[2], device=query.device) // how.slice_length)
    return output if key_mask is None else output.masked_fill(~key_mask[:, None, :, None], 0.0)
