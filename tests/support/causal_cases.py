"""Cases of causal attention over clusters."""

from dataclasses import dataclass, replace

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


SOME_EXACT = {"max_predicted_error": 0.04, "H": 6, "key_heads": 3, "clusters": 2, "key_clusters": 2}
CASES = (
    Case("plain"),
    Case("one_token", N=1),
    Case("shorter_than_the_window", N=7),
    Case("first_token_beyond_the_window", N=9),
    Case("whole_segments", N=64),
    Case("no_window", window=0),
    Case("window_of_many_segments", window=17),
    Case("segments_of_one_token", segment_length=1, window=3, N=23),
    Case("segments_in_halves", segment_length=193, window=30, N=600, H=4, key_heads=2),
    Case("segments_in_halves_and_dropout", segment_length=193, window=30, N=600, dropout_p=0.3),
    Case("odd_dimensions", D=5, Dv=3, segment_length=7, window=6),
    Case("one_cluster", clusters=1),
    Case("one_cluster_and_dropout", clusters=1, topk=11, dropout_p=0.3, H=4, key_heads=2, Dv=5),
    Case("one_cluster_some_heads_exact", **SOME_EXACT | {"clusters": 1, "max_predicted_error": 0.1}, masks="holes"),
    Case("more_clusters_than_queries", clusters=100),
    Case("topk_beyond_the_first_older_keys", topk=11),
    Case("topk_beyond_keys", topk=99),
    Case("one_key_cluster", key_clusters=1),
    Case("no_iterations", iterations=0),
    Case("all_heads_exact", max_predicted_error=0.0, H=4, key_heads=2, clusters=2, key_clusters=2),
    Case("some_heads_exact", **SOME_EXACT),
    Case("some_heads_exact_and_dropout", **SOME_EXACT, dropout_p=0.3),
    Case("some_heads_exact_and_holes", **SOME_EXACT, masks="holes"),
    Case("right_padding", masks="right"),
    Case("left_padding", masks="left", N=61),
    Case("holes", masks="holes"),
    Case("row_fully_padded", masks="row"),
    Case("grouped_heads", H=6, key_heads=2),
    Case("one_key_head_and_holes", H=3, key_heads=1, masks="holes"),
    Case("sinks", H=3, sinks=True),
    Case("sinks_of_grouped_heads_and_holes", H=6, key_heads=2, masks="holes", sinks=True),
    Case("some_heads_exact_and_sinks", **SOME_EXACT, sinks=True),
    Case("dropout", dropout_p=0.3),
    Case("dropout_and_sinks", dropout_p=0.3, sinks=True),
    Case("dropout_and_left_padding", dropout_p=0.3, masks="left", H=4, key_heads=2),
)
# Without masks a second item would only be another draw.
CASES = tuple(replace(case, B=1) if case.masks == "none" else case for case in CASES)

SMALL = Case("plain", B=1, N=37, segment_length=8, window=8)
FEW_CLUSTERS, GROUPED = {"clusters": 2, "key_clusters": 2}, {"H": 4, "key_heads": 2}


def small(name, **changes):
    return replace(SMALL, name=name, **changes)


KERNEL_CASES = (
    SMALL,
    small("first_token_beyond_the_window", N=17),
    small("whole_segments", N=32, window=3, H=1),
    small("no_window", window=0),
    small("window_of_many_segments", window=17, N=50),
    small("segments_of_one_token", segment_length=1, window=3, N=7),
    small("segments_of_many_tiles", H=1, segment_length=70, window=40, N=150, clusters=3, topk=40),
    small("odd_dimensions", D=20, Dv=40),
    small("one_cluster", clusters=1, key_clusters=1),
    small(
        "one_cluster_some_heads_exact",
        clusters=1,
        key_clusters=3,
        max_predicted_error=0.1,
        B=2,
        masks="left",
        **GROUPED,
    ),
    small("more_clusters_than_queries", clusters=40, H=1),
    small("topk_beyond_keys", topk=99),
    small("no_iterations", iterations=0),
    small("grouped_heads", **GROUPED),
    small("sinks_of_grouped_heads", **GROUPED, sinks=True),
    small("sinks_and_holes", B=2, N=29, masks="holes", sinks=True, **FEW_CLUSTERS),
    small("all_heads_exact", max_predicted_error=0.0),
    small("some_heads_exact", max_predicted_error=0.08, N=33, **GROUPED, **FEW_CLUSTERS),
    small("right_padding", B=2, H=1, masks="right"),
    small("row_fully_padded", B=2, H=1, masks="row", N=30),
    small("holes", B=2, H=1, masks="holes"),
    small("some_heads_exact_and_holes", B=2, max_predicted_error=0.06, key_heads=1, masks="holes", **FEW_CLUSTERS),
)


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
        chosen["attention_sinks"] = make_sinks(case, query.dtype).to(query.device)
    return causal_clustered_attention(query, key, value, method=method, key_mask=mask, **{**chosen, **options})


def exact_heads(case):
    """How many heads of segments with distant keys run exactly in the form for a CPU, and how many there are."""
    pairs = []

    def made(segments, chunk, span):
        make(segments, chunk, span)
        if span.new.stop:
            pairs.append((sum(len(heads) for heads, _, _ in segments.exact_distant), len(chunk.query) * span.count))

    make = batched._Segments.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched._Segments, "__init__", made)
        attend("bi-clustered", case, *make_inputs(case), backend="batched")
    return [sum(counts) for counts in zip(*pairs, strict=True)]


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
