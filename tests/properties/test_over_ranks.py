"""What holds for attention over the ranks of a process group, whatever they hold."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from support.properties import property_test

from scripts.trust.parallel import Tokens, in_one_process, on_a_rank, on_ranks, random_tokens

TOGETHER = 25  # cases, as processes take longer to start than to attend
RANKS = 2


@dataclass(frozen=True)
class Case:
    """One call; of `N` tokens the first rank holds `first`. Magnitudes are powers of ten."""

    seed: int
    B: int
    key_heads: int
    group: int
    N: int
    first: int
    D: int
    masked: bool
    junk: float
    query_exponent: float
    key_exponent: float
    value_exponent: float
    clusters: int
    topk: int
    key_clusters: int
    fit_queries: int

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("clusters", "topk", "key_clusters", "fit_queries")}

    def tokens(self) -> Tokens:
        heads = {"heads": self.key_heads * self.group, "key_heads": self.key_heads}
        drawn = random_tokens(self.N, batch=self.B, head_dim=self.D, masked=self.masked, seed=self.seed, **heads)
        query, key, value = (
            rows * 10.0**exponent
            for rows, exponent in (
                (drawn.query, self.query_exponent),
                (drawn.key, self.key_exponent),
                (drawn.value, self.value_exponent),
            )
        )
        if self.masked:
            for mask in (drawn.query_mask, drawn.key_mask):
                mask[0, -1] = True  # where no query sees any key, the definition has no gradient
            query.masked_fill_(~drawn.query_mask[:, None, :, None], self.junk)
            for rows in (key, value):
                rows.masked_fill_(~drawn.key_mask[:, None, :, None], self.junk)
        return replace(drawn, query=query, key=key, value=value)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    N = draw(st.integers(1, 40))
    exponents = st.floats(-2, 1, width=16)  # beyond, rounding chooses keys
    return Case(
        seed=draw(st.integers(0, 2**20)),
        B=draw(st.sampled_from((1, 2))),
        key_heads=draw(st.sampled_from((1, 2))),
        group=draw(st.sampled_from((1, 1, 2))),
        N=N,
        first=draw(st.integers(0, N)),
        D=draw(st.integers(1, 9)),
        masked=draw(st.booleans()),
        junk=draw(st.sampled_from((0.0, float("nan"), float("inf"), -float("inf"), 6e4))),
        query_exponent=draw(exponents),
        key_exponent=draw(exponents),
        value_exponent=draw(exponents),
        clusters=draw(st.integers(1, 6)),
        topk=draw(st.integers(1, 9)),
        key_clusters=draw(st.integers(1, 6)),
        fit_queries=draw(st.integers(1, 40)),
    )


def attend_to_each(parts: list[tuple[Tokens, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What a rank finds for its part of every case."""
    return [on_a_rank(tokens, settings) for tokens, settings in parts]


def check(drawn: list[Case]) -> None:
    """Output and gradients are those of one process, by the definition in float64."""
    split = [case.tokens().split([case.first, case.N]) for case in drawn]
    parts = [
        [(of_case[rank], case.settings) for case, of_case in zip(drawn, split, strict=True)] for rank in range(RANKS)
    ]
    found = on_ranks([partial(attend_to_each, of_rank) for of_rank in parts])
    for number, case in enumerate(drawn):
        tokens = case.tokens()
        for name, expected in in_one_process(tokens, case.settings, backend="reference").items():
            actual = torch.cat([torch.from_numpy(of_rank[number][name]) for of_rank in found], dim=2)
            size = 1.0 + expected.abs().amax().item()
            torch.testing.assert_close(
                actual,
                expected,
                rtol=0,
                atol=1e-9 * size,
                msg=lambda m, name=name, case=case: f"{name} of {case}: {m}",
            )


@pytest.mark.slow
def test_attention_over_ranks():
    together = st.lists(cases(), min_size=TOGETHER, max_size=TOGETHER)
    property_test("sequence_parallel_bi_clustered_attention", check, together, share=1, together=TOGETHER)
