"""Attention within sorted blocks: against loops, identities, masks, gradients, the causal forms."""

from dataclasses import replace
from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from support.block_cases import CASES, Case, attend, make_inputs

from hf_effattn.ops import cluster_order

BACKENDS = ("reference", "batched")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


by_name = {"ids": lambda case: case.name if isinstance(case, Case) else str(case)}
each_case = pytest.mark.parametrize("case", CASES, **by_name)


def attend_with_loops(case, inputs, b, h):
    """Eq. 5 to 10 and App. B of one head in plain Python: sort, cut into blocks, attend, put back."""
    D, N = case.D, case.N
    kept = h // (case.H // (case.key_heads or case.H))
    query, key, value = inputs.query[b, h].tolist(), inputs.key[b, kept].tolist(), inputs.value[b, kept].tolist()
    counts = [True] * N if inputs.key_mask is None else inputs.key_mask[b].tolist()
    labels = inputs.labels[b].tolist()
    ranked = sorted((j for j in range(N) if counts[j]), key=lambda j: (labels[j], j))
    w = inputs.block_length if isinstance(inputs.block_length, int) else int(inputs.block_length[b])
    blocks = [ranked[start : start + w] for start in range(0, len(ranked), w)]
    output = [[0.0] * case.Dv for _ in range(N)]
    for i, block in enumerate(blocks):
        window = []
        for step in range(case.window_blocks):
            if (i - step) % len(blocks) not in window:
                window.append((i - step) % len(blocks))
        for q in block:
            seen = [k for j in window for k in blocks[j] if not case.causal or k <= q]
            if case.strict:
                members = [k for k in ranked if labels[k] == labels[q] and k <= q]
                seen = members[-((case.window_blocks - 1) * w + 1) :]
            raw = []
            for k in seen:
                score = sum(x * y for x, y in zip(query[q], key[k], strict=True)) * D**-0.5
                if case.gated:
                    pair = zip(inputs.membership[b, q].tolist(), inputs.membership[b, k].tolist(), strict=True)
                    score += log(sum(x * y for x, y in pair) + 1e-4)
                raw.append(exp(score))
            output[q] = [
                sum(r * value[k][a] for r, k in zip(raw, seen, strict=True)) / sum(raw) for a in range(case.Dv)
            ]
    return output


@each_backend
@each_case
def test_equals_the_definition_written_as_loops(backend, case):
    inputs = make_inputs(case)
    actual = attend(case, inputs, backend=backend)
    for b in range(case.B):
        for h in range(case.H):
            expected = torch.tensor(attend_with_loops(case, inputs, b, h), dtype=torch.float64)
            torch.testing.assert_close(actual[b, h], expected, rtol=0, atol=8e-15)


@each_backend
@pytest.mark.parametrize("masks", ["none", "right", "left", "holes"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_block_is_exact_attention(backend, masks, causal):
    """k = 1, whatever the order."""
    case = Case("exact", clusters=1, masks=masks, causal=causal)
    inputs = make_inputs(case)
    generator = torch.Generator().manual_seed(3)
    inputs.order = cluster_order(torch.randint(9, (case.B, case.N), generator=generator), mask=inputs.key_mask)
    actual = attend(case, inputs, backend=backend)
    counts = torch.ones(case.B, case.N, dtype=torch.bool) if inputs.key_mask is None else inputs.key_mask
    mask = counts[:, None, None, :].expand(-1, 1, case.N, -1)
    mask = mask & torch.ones(case.N, case.N, dtype=torch.bool).tril() if causal else mask
    exact = F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=mask)
    for b in range(case.B):
        torch.testing.assert_close(actual[b][:, counts[b]], exact[b][:, counts[b]], rtol=0, atol=5e-15)


@each_backend
def test_words_in_another_sequence_give_the_same_outputs_there(backend):
    """Permute the words and the order with them: the outputs are permuted, nothing else changes."""
    case = Case("permuted", B=1, gated=True)
    inputs = make_inputs(case)
    shuffle = torch.randperm(case.N, generator=torch.Generator().manual_seed(2))
    back = shuffle.argsort()
    moved = replace(
        inputs,
        query=inputs.query[:, :, shuffle],
        key=inputs.key[:, :, shuffle],
        value=inputs.value[:, :, shuffle],
        membership=inputs.membership[:, shuffle],
        order=back[inputs.order],
    )
    expected = attend(case, inputs, backend=backend)
    torch.testing.assert_close(attend(case, moved, backend=backend)[:, :, back], expected, rtol=0, atol=1e-14)


@each_backend
def test_strict_outputs_do_not_depend_on_later_words(backend):
    """Whatever the later words are and wherever they sort, to rounding: these move the borders of the blocks, and so
    the order of sums. The paper's form is the negative control.
    """
    case = Case("strict", B=1, N=24, causal=True, strict=True, block_length=3, clusters=3)
    inputs, other = make_inputs(case), make_inputs(case, seed=7)
    expected = attend(case, inputs, backend=backend)
    published = attend(replace(case, strict=False), inputs, backend=backend)
    leaks = 0
    for t in range(1, case.N):
        mixed = {name: getattr(inputs, name).clone() for name in ("query", "key", "value", "labels")}
        for name in ("query", "key", "value"):
            mixed[name][:, :, t:] = getattr(other, name)[:, :, t:]
        mixed["labels"][:, t:] = other.labels[:, t:]
        changed = replace(inputs, **mixed, order=cluster_order(mixed["labels"]))
        actual = attend(case, changed, backend=backend)
        torch.testing.assert_close(actual[:, :, :t], expected[:, :, :t], rtol=0, atol=1e-15)
        leak = attend(replace(case, strict=False), changed, backend=backend)[:, :, :t] - published[:, :, :t]
        leaks += bool(leak.abs().max() > 1e-3)
    assert leaks > 5


@each_backend
def test_weights_sum_to_one_and_each_query_sees_its_window(backend):
    """With the identity as values the output is the attention matrix itself."""
    case = Case("weights", Dv=37, masks="holes")
    inputs = make_inputs(case)
    inputs.value = torch.eye(case.N, dtype=torch.float64).expand(case.B, case.H, -1, -1)
    weights = attend(case, inputs, backend=backend)
    total = inputs.key_mask[:, None, :].expand(-1, case.H, -1).double()
    torch.testing.assert_close(weights.sum(dim=-1), total, rtol=0, atol=2e-15)
    seen = (weights[:, 0] > 0).sum(dim=-1)
    most = (case.window_blocks * inputs.block_length)[:, None]
    assert (seen <= most).all()
    assert (seen == most).any()


def test_order_is_stable_and_puts_masked_words_last():
    labels = torch.tensor([[2, 0, 2, 1, 0, 1]])
    assert cluster_order(labels).tolist() == [[1, 4, 3, 5, 0, 2]]
    mask = torch.tensor([[True, False, True, True, True, True]])
    assert cluster_order(labels, mask=mask).tolist() == [[4, 3, 5, 0, 2, 1]]
    largest = torch.tensor([[255, 0, 255, 3]], dtype=torch.uint8)
    assert cluster_order(largest, mask=torch.tensor([[False, True, True, True]])).tolist() == [[1, 3, 2, 0]]


LABELS = torch.zeros(2, 5).long()
CASE = Case("mistakes", masks="right")
INPUTS = make_inputs(CASE)


@pytest.mark.parametrize(
    ("labels", "mask", "error", "message"),
    [
        (LABELS.float(), None, TypeError, r"labels must be integers, got torch\.float32"),
        (LABELS[0], None, ValueError, r"labels must have 2 dimensions \(B, N\), got \(5,\)"),
        (LABELS, torch.ones(2, 5).long(), TypeError, "mask must be boolean"),
        (LABELS, torch.ones(2, 4).bool(), ValueError, r"mask must have shape \(B, length\) = \(2, 5\)"),
    ],
)
def test_mistakes_in_labels_to_sort_are_named(labels, mask, error, message):
    with pytest.raises(error, match=message):
        cluster_order(labels, mask=mask)


@each_backend
@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ({"order": 0 * INPUTS.order}, {}, ValueError, "every row of order must be a permutation of 0 .. 36"),
        ({"order": cluster_order(INPUTS.labels)}, {}, ValueError, "words that count first"),
        ({"order": INPUTS.order[:1]}, {}, ValueError, r"order must be \("),
        ({"order": INPUTS.order.double()}, {}, TypeError, "order must be integers"),
        ({"key": INPUTS.key[:, :, 1:], "value": INPUTS.value[:, :, 1:]}, {}, ValueError, "as long as query"),
        ({}, {"causal": True, "labels": 4 - INPUTS.labels}, ValueError, "order must be stably sorted by labels"),
        ({}, {"labels": INPUTS.labels}, ValueError, "need causal=True"),
        ({}, {"block_length": torch.tensor([3, 0])}, ValueError, "block_length must be at least 1"),
        ({}, {"block_length": 0}, ValueError, "block_length must be at least 1"),
        ({}, {"window_blocks": 0}, ValueError, "window_blocks must be at least 1"),
        ({}, {"membership": torch.ones(2, 3, 4)}, ValueError, "membership must be"),
        ({}, {"membership": torch.ones(2, 37, 4)}, ValueError, "membership must share dtype"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named(inputs, options, error, message, backend):
    with pytest.raises(error, match=message):
        attend(CASE, replace(INPUTS, **inputs), backend=backend, **options)
