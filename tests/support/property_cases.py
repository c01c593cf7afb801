"""Random calls of the attention ops: any shape, mask, dtype, memory layout and magnitude, drawn by hypothesis."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from support.attention_cases import Inputs as AttentionInputs

from hf_effattn import ops

CAUSAL_METHODS = ("clustered", "i-clustered", "bi-clustered")
OPS = (
    "clustered_attention",
    "improved_clustered_attention",
    "bi_clustered_attention",
    "slice_attention",
    "sorted_block_attention",
    "causal_clustered_attention",
)
# They choose keys or clusters, and two that are nearly equal are told apart by rounding alone.
CHOOSES = ("improved_clustered_attention", "bi_clustered_attention", "causal_clustered_attention")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "strided", "expanded")
MASKS = ("none", "left", "right", "holes", "row")
JUNK = (0.0, float("nan"), float("inf"), -float("inf"), 6e4)
EXPONENTS = st.floats(-4, 4, width=16)


@dataclass(frozen=True)
class Case:
    """One call. Magnitudes are powers of ten; `equal` names the rows that are all the same."""

    op: str
    seed: int
    B: int
    key_heads: int
    group: int
    N: int
    M: int
    D: int
    Dv: int
    dtype: torch.dtype
    layout: str
    masks: str
    junk: float
    query_exponent: float
    key_exponent: float
    value_exponent: float
    equal: str
    scale: float | None
    clusters: int
    topk: int
    key_clusters: int
    length: int
    method: str
    flag: bool
    exact: bool

    @property
    def is_self_attention(self) -> bool:
        return self.op in ("slice_attention", "sorted_block_attention", "causal_clustered_attention")

    @property
    def is_causal(self) -> bool:
        """Whether no output may depend on a later token."""
        return self.op == "causal_clustered_attention" or (self.is_self_attention and self.flag)


@st.composite
def cases(draw: st.DrawFn, op: str) -> Case:
    least = 0 if op in OPS else 1  # without a point there is nothing to cluster
    N = draw(st.integers(least, 19))
    return Case(
        op,
        seed=draw(st.integers(0, 2**20)),
        B=draw(st.sampled_from((1, 2, 2, 3))),
        key_heads=draw(st.sampled_from((1, 2))),
        group=draw(st.sampled_from((1, 1, 2))),
        N=N,
        M=draw(st.integers(least, 19)),
        D=draw(st.integers(1, 9)),
        Dv=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        masks=draw(st.sampled_from(MASKS)),
        junk=draw(st.sampled_from(JUNK)),
        query_exponent=draw(EXPONENTS),
        key_exponent=draw(EXPONENTS),
        value_exponent=draw(EXPONENTS),
        equal=draw(st.sampled_from(("none", "none", "queries", "keys"))),
        scale=draw(st.none() | EXPONENTS.map(lambda exponent: 10.0**exponent)),
        clusters=draw(st.integers(1, 4)),
        topk=draw(st.integers(1, 9)),
        key_clusters=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 7)),
        method=draw(st.sampled_from(CAUSAL_METHODS)),
        flag=draw(st.booleans()),
        exact=draw(st.booleans()),
    )


@dataclass
class Inputs(AttentionInputs):
    """Tensors of a case; `tokens` `(B, M)` and `readers` `(B, N)` say which keys and queries count."""

    exact_heads: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @property
    def tokens(self) -> torch.Tensor:
        return torch.ones_like(self.key[:, 0, :, 0]).bool() if self.key_mask is None else self.key_mask

    @property
    def readers(self) -> torch.Tensor:
        return torch.ones_like(self.query[:, 0, :, 0]).bool() if self.query_mask is None else self.query_mask

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        """With all floating-point tensors changed."""
        return replace(self, query=change(self.query), key=change(self.key), value=change(self.value))

    def item(self, number: int) -> "Inputs":
        """One item of the batch alone."""
        parts = {name: None if x is None else x[number : number + 1] for name, x in vars(self).items()}
        return Inputs(**parts)


def draw_mask(kind: str, B: int, length: int, generator: torch.Generator) -> torch.Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(B, length, dtype=torch.bool)
    for item in range(B):
        count = int(torch.randint(length + 1, (1,), generator=generator))
        if kind == "left":
            mask[item, :count] = False
        elif kind == "right":
            mask[item, length - count :] = False
        elif kind == "holes":
            mask[item] = torch.rand(length, generator=generator) > 0.4
        elif item == B - 1:
            mask[item] = False
    return mask


def laid_out(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another place of memory."""
    if layout == "transposed":
        return rows.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([rows, torch.full_like(rows, float("nan"))], dim=-1).flatten(-2)[..., ::2]
    return rows


def make_inputs(case: Case, junk: float | None = None) -> Inputs:
    """The tensors of a case; behind its own columns `value` has ones and an identity, which show the weights."""
    generator = torch.Generator().manual_seed(case.seed)
    M = case.N if case.is_self_attention else case.M
    heads = case.key_heads * case.group
    junk = case.junk if junk is None else junk
    largest = torch.finfo(case.dtype).max / 2
    key_mask = draw_mask(case.masks, case.B, M, generator)
    query_mask = key_mask if case.is_self_attention else draw_mask(case.masks, case.B, case.N, generator)

    def rows(count: int, length: int, width: int, exponent: float, equal: bool) -> torch.Tensor:
        distinct = 1 if case.layout == "expanded" else count
        drawn = torch.randn(case.B, distinct, 1 if equal else length, width, dtype=torch.float64, generator=generator)
        drawn = (drawn * 10.0**exponent).clamp(-largest, largest).expand(-1, -1, length, -1)
        return drawn.to(case.dtype)

    def finish(drawn: torch.Tensor, count: int, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is not None:
            drawn = drawn.masked_fill(~mask[:, None, :, None], junk)
        return laid_out(drawn, case.layout).expand(-1, count, -1, -1)

    query = rows(heads, case.N, case.D, case.query_exponent, case.equal == "queries")
    key = rows(case.key_heads, M, case.D, case.key_exponent, case.equal == "keys")
    value = rows(case.key_heads, M, case.Dv, case.value_exponent, False)
    shown = torch.cat([torch.ones(M, 1), torch.eye(M)], dim=1).to(case.dtype).expand(*value.shape[:2], -1, -1)
    value = torch.cat([value, shown], dim=3)
    return Inputs(
        finish(query, heads, query_mask),
        finish(key, case.key_heads, key_mask),
        finish(value, case.key_heads, key_mask),
        torch.randint(case.clusters, (case.B, heads, case.N), generator=generator),
        torch.randint(case.key_clusters, (case.B, case.key_heads, M), generator=generator),
        key_mask,
        query_mask,
        torch.rand(case.B, case.key_heads, generator=generator) < 0.3,
    )


def attend(case: Case, inputs: Inputs, backend: str | None = None) -> torch.Tensor:
    """Run the op of a case, `(B, H, N, Dv + 1 + M)`."""
    common = {"scale": case.scale, "backend": backend, "key_mask": inputs.key_mask}
    clustered = {"clusters": case.clusters, "query_mask": inputs.query_mask} | common
    if case.op == "clustered_attention":
        return ops.clustered_attention(*inputs.tensors, inputs.labels, **clustered)
    if case.op == "improved_clustered_attention":
        return ops.improved_clustered_attention(*inputs.tensors, inputs.labels, topk=case.topk, **clustered)
    if case.op == "bi_clustered_attention":
        return ops.bi_clustered_attention(
            *inputs.tensors,
            inputs.labels,
            inputs.key_labels,
            topk=case.topk,
            key_clusters=case.key_clusters,
            exact_heads=inputs.exact_heads if case.exact else None,
            **clustered,
        )
    if case.op == "slice_attention":
        sinks = torch.zeros_like(inputs.tokens)
        sinks[:, case.N // 2 :][:, :1] = True
        tokens = min(case.topk, case.length)  # of each neighbour
        return ops.slice_attention(
            *inputs.tensors,
            slice_length=case.length,
            extension_ratio=1 + 2 * tokens / case.length,
            causal=case.flag,
            sink_mask=sinks if case.exact else None,
            **common,
        )[0]
    if case.op == "sorted_block_attention":
        labels = inputs.labels[:, 0]
        return ops.sorted_block_attention(
            *inputs.tensors,
            ops.cluster_order(labels, mask=inputs.key_mask),
            block_length=case.length,
            window_blocks=case.key_clusters,
            causal=case.flag,
            labels=labels if case.flag and case.exact else None,
            **common,
        )
    return ops.causal_clustered_attention(
        *inputs.tensors,
        method=case.method,
        clusters=case.clusters,
        topk=case.topk,
        key_clusters=2 * case.key_clusters,
        segment_length=case.length,
        window=case.topk,
        max_predicted_error=0.05 if case.exact else None,
        **common,
    )


def exact_attention(case: Case, inputs: Inputs) -> torch.Tensor:
    """What PyTorch's exact attention makes of the inputs in their dtype; rows that see no key are 0."""
    heads = inputs.query.shape[1]
    query, key, value = (
        rows.masked_fill(~mask[:, None, :, None], 0.0).repeat_interleave(heads // rows.shape[1], dim=1)
        for rows, mask in zip(inputs.tensors, (inputs.readers, inputs.tokens, inputs.tokens), strict=True)
    )
    sees = inputs.tokens[:, None, None] & inputs.readers[:, None, :, None]
    nothing = ~sees.any(dim=3, keepdim=True)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=sees | nothing, scale=case.scale)
    return output.masked_fill(nothing, 0.0)


def largest_score(case: Case, inputs: Inputs) -> float:
    """A bound of what scores are made of, `scale · |Q_i| |K_t|`: rounding errors of scores grow with it."""
    lengths = [
        max(rows.double().masked_fill(~mask[:, None, :, None], 0.0).norm(dim=3).flatten().tolist(), default=0.0)
        for rows, mask in ((inputs.query, inputs.readers), (inputs.key, inputs.tokens))
    ]
    return lengths[0] * lengths[1] * (case.D**-0.5 if case.scale is None else case.scale)
