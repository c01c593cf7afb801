"""Bi-clustered attention over tokens that 2 and 4 gloo processes hold is that of one process, and little travels."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hf_effattn.ops import sequence_parallel_bi_clustered_attention
from scripts.trust.parallel import (
    in_one_process,
    numbers_expected,
    on_a_rank,
    on_ranks,
    random_tokens,
)

SETTINGS = {"clusters": 5, "key_clusters": 4, "topk": 6, "fit_queries": 2048}
SIZES = {"heads": 2, "key_heads": 2, "head_dim": 8, "batch": 2}
GROUPED = SIZES | {"heads": 4, "masked": True}
# Sizes of the tokens, settings, and where each rank's part ends.
CASES = {
    "equal_parts": (SIZES, {}, [20, 40]),
    "grouped_heads_and_holes": (GROUPED, {"fit_queries": 24}, [13, 61]),
    "a_rank_without_tokens": (SIZES, {}, [0, 30]),
    "fewer_tokens_than_clusters": (SIZES, {"clusters": 32, "key_clusters": 16}, [5, 9]),
    "every_key_exact": (GROUPED, {"topk": 50}, [20, 41]),
    "fitted_on_few": (SIZES, {"fit_queries": 1}, [31, 90]),
    "four_equal_parts": (SIZES, {}, [10, 20, 30, 40]),
    "four_with_holes": (GROUPED, {"fit_queries": 24, "topk": 17}, [3, 20, 20, 61]),
}


def run(tokens, settings, ends):
    """What the ranks find, side by side, and each rank's traffic."""
    found = on_ranks([partial(on_a_rank, part, settings) for part in tokens.split(ends)])
    tensors = {
        name: torch.cat([torch.from_numpy(rank[name]) for rank in found], dim=2)
        for name in ("output", "query", "key", "value")
    }
    return tensors, [(rank["forward"], rank["backward"]) for rank in found]


@pytest.mark.slow_except("equal_parts", "grouped_heads_and_holes")
@pytest.mark.parametrize("case", CASES)
def test_ranks_give_what_one_process_gives(case):
    """Values and gradients in float64; any other label of a query or key, or exact key, would show."""
    sizes, changed, ends = CASES[case]
    tokens, settings = random_tokens(ends[-1], **sizes), SETTINGS | changed
    if tokens.key_mask is not None:
        tokens.key_mask[1] = False  # an item without keys
    actual, _ = run(tokens, settings, ends)
    expected = in_one_process(tokens, settings, backend="reference")
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}")
    assert expected["output"].abs().max() > 0.1


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_travels_is_the_formula_and_does_not_grow(ranks):
    settings = SETTINGS | {"fit_queries": 32}
    met = []
    for length in (16 * ranks, 64 * ranks):
        tokens = random_tokens(length, **GROUPED)
        _, traffic = run(tokens, settings, [length * (rank + 1) // ranks for rank in range(ranks)])
        assert all(one == traffic[0] for one in traffic)
        met.append(traffic[0])
    assert met[0] == met[1]
    forward, backward = met[0]
    assert (forward.pop("float64"), backward.pop("float64")) == numbers_expected(tokens, settings)
    # The rest: how many tokens of each item count, and the settings as bytes.
    assert forward["int64"] == 2 * SIZES["batch"] + 1
    assert set(forward) == {"int64", "uint8"}
    assert not backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision(dtype):
    """Sums are taken in float32: nothing but the inputs and the output is rounded to the dtype."""
    tokens = random_tokens(40, **SIZES)
    names = ("query", "key", "value")
    rounded = replace(tokens, **{name: getattr(tokens, name).to(dtype) for name in names})
    exactly = replace(rounded, **{name: getattr(rounded, name).float() for name in names})
    expected = in_one_process(exactly, SETTINGS)["output"].to(dtype)

    def output(part):
        found = sequence_parallel_bi_clustered_attention(part.query, part.key, part.value, **SETTINGS)
        assert found.dtype == dtype
        return found.float().numpy()

    found = on_ranks([partial(output, part) for part in rounded.split([17, 40])])
    actual = torch.cat([torch.from_numpy(part) for part in found], dim=2)
    torch.testing.assert_close(actual, expected.float(), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_no_process_group():
    tokens = random_tokens(8, **SIZES)
    with pytest.raises(ValueError, match="there is no process group: call"):
        sequence_parallel_bi_clustered_attention(tokens.query, tokens.key, tokens.value, **SETTINGS)


def refusal(tokens, changed):
    """What a rank says that calls the op with some of its arguments changed."""
    arguments = {"query": tokens.query, "key": tokens.key, "value": tokens.value} | SETTINGS | changed
    with pytest.raises((TypeError, ValueError)) as refused:
        sequence_parallel_bi_clustered_attention(**arguments)
    return str(refused.value)


DIFFERENT = {
    "clusters": ({"clusters": 6}, "clusters must be the same on every rank of the group, got 5 on rank 0 and 6 on"),
    "head_dim": ({"query": torch.zeros(2, 2, 3, 7)}, "rank 1 of the group refuses its arguments: "),
    "topk": ({"topk": 0}, "rank 1 of the group refuses its arguments: topk must be at least 1, got 0"),
    "mask": ({"key_mask": torch.ones(2, 3)}, "rank 1 of the group refuses its arguments: key_mask must be boolean"),
    "gradient": (
        {"query": torch.zeros(2, 2, 3, 8, dtype=torch.float64, requires_grad=True)},
        "requires_grad of query must be the same on every rank of the group, got False on rank 0 and True on rank 1",
    ),
    "batch": (
        {name: torch.zeros(3, 2, 3, 8, dtype=torch.float64) for name in ("query", "key", "value")},
        "(B, heads, head_dim) of query must be the same on every rank of the group, got (2, 2, 8) on rank 0 and (3, 2",
    ),
}


@pytest.mark.slow_except("clusters", "topk")
@pytest.mark.parametrize("what", DIFFERENT)
def test_where_one_rank_differs_all_refuse(what):
    """Before anything runs: a rank that waited for another would hang."""
    changed, expected = DIFFERENT[what]
    parts = random_tokens(8, **SIZES).split([4, 8])
    first, second = on_ranks([partial(refusal, parts[0], {}), partial(refusal, parts[1], changed)])
    assert expected in first
    assert (second in first) if "refuses" in expected else second == first


def outside(tokens):
    return refusal(tokens, {"group": dist.new_group([0])}) if dist.get_rank() == 1 else str(dist.new_group([0]))


def test_a_rank_outside_of_the_group_refuses():
    parts = random_tokens(8, **SIZES).split([4, 8])
    assert "this process is not in group" in on_ranks([partial(outside, part) for part in parts])[1]
