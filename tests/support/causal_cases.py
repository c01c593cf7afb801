"""Cases of causal attention over clusters."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import padding

from hf_effattn.ops import causal_clustered_attention
from hf_effattn.ops.causal_clustered_attention import batched

METHODS = ("clustered", "i-clustered", "bi-clustered")


@dataclass(frozen=True)
class Case:
    """Sizes of one test; several segments, but where the name says otherwise."""

    name: str
    B: int = 2
    H: int = 2
    key_heads: int | None = None
    N: int = 37
    D: int = 8
    Dv: int = 8
    masks: str = "none"
    clusters: int = 5
    topk: int = 3
    key_clusters: int = 6
    segment_length: int = 4
    window: int = 4
    fit_queries: int = 16
    iterations: int = 3
    max_predicted_error: float | None = None
    dropout_p: float = 0.0
    sinks: bool = False


def make_inputs(case, dtype=torch.float64, seed=0):
    """Query, key and value as transformers hands them over, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    key_heads = case.key_heads or case.H
    tensors = [
        torch.randn(case.B, case.N, heads, dim, dtype=torch.float64, generator=generator).to(dtype).transpose(1, 2)
        for heads, dim in ((case.H, case.D), (key_heads, case.D), (key_heads, case.Dv))
    ]
    return *tensors, padding(case.masks, case.B, case.N)


def make_sinks(case, dtype=torch.float64):
    """A score for each head, or nothing: as heavy as many keys, as a few, as none."""
    return torch.linspace(-8.0, 4.0, case.H, dtype=torch.float64).to(dtype) if case.sinks else None


def attend(method, case, query, key, value, mask, **options):
    names = "clusters", "topk", "key_clusters", "segment_length", "window", "fit_queries", "iterations"
    chosen = {name: getattr(case, name) for name in (*names, "max_predicted_error", "dropout_p")}
    if case.sinks:
        chosen["sinks"] = make_sinks(case, query.dtype).to(query.device)
    torch.manual_seed(4)
    return causal_clustered_attention(query, key, value, method=method, key_mask=mask, **chosen | options)


def exact_heads(case):
    """How many heads of segments with distant keys run exactly in the form for a CPU, and how many there are."""
    found = []

    def made(segments, chunk, span):
        make(segments, chunk, span)
        if span.new.stop:
            found.append((sum(len(heads) for heads, _, _ in segments.exact_distant), len(chunk.query) * span.count))

    make = batched._Segments.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched._Segments, "__init__", made)
        attend("bi-clustered", case, *make_inputs(case), backend="batched")
    return [sum(counts) for counts in zip(*found, strict=True)]


def exact(query, key, value, mask, sinks=None):
    """Causal softmax attention with a key mask; rows that are masked are 0."""
    N = query.shape[2]
    visible = torch.ones(N, N, dtype=torch.bool).tril()
    if mask is not None:
        visible = visible & mask[:, None, None] & mask[:, None, :, None] | torch.eye(N, dtype=torch.bool)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if sinks is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    else:
        scores = (query @ key.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~visible, -torch.inf)
        columns = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], dim=3)
        output = columns.softmax(dim=3)[..., :-1] @ value
    return output if mask is None else output * mask[:, None, :, None]


EMPTY = Case("empty_clusters", B=1, H=1, N=64, clusters=6, segment_length=8, window=0)


PEAKED = Case("peaked", B=1, H=1, N=64, D=16, Dv=16, clusters=1, topk=1, segment_length=8, window=0)


def inputs_with_empty_clusters():
    """Two distinct queries leave four of six clusters empty; short ones are nearer to 0 than to their centroids."""
    _, key, value, mask = make_inputs(EMPTY)
    query = torch.tensor([3.0, 5.0]).double()[torch.arange(64) % 2, None] + torch.arange(8) / 8
    query[48:] *= 0.05
    return query[None, None], key, value, mask


def peaked_inputs(length):
    """One key takes nearly all of the attention of queries of this length, and little of that of every seventh."""
    _, key, value, mask = make_inputs(PEAKED)
    direction = torch.eye(16, dtype=torch.float64)[0]
    key = 0.1 * key
    key[0, 0, 0] += 6 * direction
    query = (length * direction).repeat(64, 1)
    query[::7] = 0.05 * direction
    return query[None, None], key, value, mask
