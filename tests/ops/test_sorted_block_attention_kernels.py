"""The kernels of attention within sorted blocks, under Triton's interpreter or on a GPU, against the reference."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from support.block_cases import CASES, Case, attend, make_inputs, on_device, with_gradients
from support.closeness import assert_close_to_reference

from hf_effattn.ops import cluster_order

# Two heads per key head where heads are grouped, one text where no mask tells texts apart: the interpreter is slow.
SMALL = [
    replace(case, N=min(case.N, 23), B=1 if case.masks == "none" else 2, H=2 if case.key_heads else 1)
    for case in (replace(case, key_heads=case.key_heads and 1) for case in CASES)
]


def run(case, inputs, **options):
    results = with_gradients(case, on_device(inputs), backend="triton", **options)
    return {name: tensor.cpu() for name, tensor in results.items()}


def assert_all_close(actual, expected, baseline):
    """Within twice what plain PyTorch has; where a gradient is 0 (a query with one key), rounding is all there is."""
    for name in expected:
        if expected[name].abs().max() < 1e-12:
            assert actual[name].abs().max() < 1e-6, name
        else:
            assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)


@pytest.mark.slow_except(
    "plain",
    "prime",
    "odd_dimensions",
    "grouped_heads",
    "holes",
    "row_fully_padded",
    "strict_and_left_padding",
    "gated_causal",
)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_kernels_equal_reference(case):
    """Output and every gradient in float32, within twice what plain PyTorch has."""
    inputs = make_inputs(case, torch.float32)
    expected = with_gradients(case, inputs.to(torch.float64), backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    actual = run(case, inputs)
    assert_all_close(actual, expected, baseline)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("tiles", B=1, H=1, N=150, clusters=4, D=40, Dv=24, masks="right"),
        Case("gated", B=1, H=2, key_heads=1, N=70, clusters=6, D=16, Dv=16, gated=True),
    ],
    ids=lambda case: case.name,
)
def test_low_precision(case, dtype):
    """More words than a tile, dimensions that fill none."""
    inputs = make_inputs(case, dtype)
    expected = with_gradients(case, inputs.to(torch.float64), backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    actual = run(case, inputs)
    assert all(tensor.dtype == dtype for tensor in actual.values())
    assert_all_close(actual, expected, baseline)


@pytest.mark.slow_except("causal", "strict")
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", B=2, H=1, N=90, clusters=2, D=8, causal=True, masks="holes"),
        Case("strict", B=2, H=1, N=80, clusters=2, D=8, causal=True, strict=True, block_length=35, masks="left"),
        Case("wide_window", B=2, H=1, N=110, clusters=3, D=8, window_blocks=3, masks="right", gated=True),
    ],
    ids=lambda case: case.name,
)
def test_blocks_longer_than_a_tile(case):
    """Rows and columns of a block in several tiles, the last of them short."""
    inputs = make_inputs(case, torch.float32)
    expected = with_gradients(case, inputs.to(torch.float64), backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    assert_all_close(run(case, inputs), expected, baseline)


def test_strict_outputs_do_not_depend_on_later_words():
    """Whatever the later words are and wherever they sort, to rounding. The paper's form is the negative control."""
    case = Case("strict", B=1, H=1, N=70, causal=True, strict=True, block_length=9, clusters=3)
    inputs, other, t = make_inputs(case, torch.float32), make_inputs(case, torch.float32, seed=7), 40
    mixed = {name: getattr(inputs, name).clone() for name in ("query", "key", "value", "labels")}
    for name in ("query", "key", "value"):
        mixed[name][:, :, t:] = getattr(other, name)[:, :, t:]
    mixed["labels"][:, t:] = other.labels[:, t:]
    changed = replace(inputs, **mixed, order=cluster_order(mixed["labels"]))
    for strict in (True, False):
        some = replace(case, strict=strict)
        before, after = (run(some, each)["output"][:, :, :t] for each in (inputs, changed))
        if strict:
            torch.testing.assert_close(after, before, rtol=0, atol=5e-7)
        else:
            assert (after - before).abs().max() > 1e-2


def test_more_clusters_than_one_program_sums_gradients_of(monkeypatch):
    module = import_module("hf_effattn.ops.sorted_block_attention.triton")
    monkeypatch.setattr(module, "CLUSTER_COLUMNS", 16)
    case = Case("many_clusters", B=1, H=1, N=60, clusters=37, D=8, Dv=8, gated=True)
    inputs = make_inputs(case, torch.float32)
    expected = with_gradients(case, inputs.to(torch.float64), backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    assert_all_close(run(case, inputs), expected, baseline)


@pytest.mark.parametrize("head_dim", [100, 256])
def test_wide_heads(head_dim):
    case = Case("wide", B=1, H=1, N=40, clusters=3, D=head_dim, Dv=head_dim)
    inputs = make_inputs(case, torch.float32)
    expected = with_gradients(case, inputs.to(torch.float64), backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    actual = run(case, inputs)
    assert_all_close(actual, expected, baseline)


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("gated", [False, True])
def test_masked_garbage_changes_nothing_and_runs_repeat(gated):
    case = Case("garbage", B=2, H=1, N=41, masks="right", gated=gated)
    clean = run(case, make_inputs(case, torch.float32))
    inputs = make_inputs(case, torch.float32)
    hidden = ~inputs.key_mask[-1]
    for tensor in (inputs.query, inputs.key, inputs.value):
        tensor[-1, :, hidden] = float("nan")
    if gated:
        inputs.membership[-1, hidden] = float("inf")
    dirty = run(case, inputs)
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=0, atol=0)


@pytest.mark.parametrize("gated", [False, True])
def test_backward_drops_what_forward_dropped(gated):
    """The weights are read off with the identity as values; the definition with them fixed gives the gradients."""
    case = Case("dropout", B=1, H=2, N=21, clusters=3, Dv=21, gated=gated)
    inputs = make_inputs(case, torch.float32)
    inputs.value = torch.eye(21).expand(1, 2, -1, -1).contiguous()
    torch.manual_seed(3)
    actual = run(case, inputs, dropout_p=0.3)
    full = with_gradients(case, inputs.to(torch.float64), backend="reference")["output"]
    factor = torch.where(full > 0, actual["output"].double() / full.clamp(min=1e-30), 0.0)
    kept = factor > 0.5
    torch.testing.assert_close(factor[kept], torch.full_like(factor[kept], 1 / 0.7), rtol=1e-5, atol=0)
    assert 0.6 < kept[full > 0].double().mean() < 0.8
    exact = inputs.to(torch.float64)
    names = ("query", "key", "membership") if gated else ("query", "key")
    leaves = {name: getattr(exact, name).requires_grad_() for name in names}
    weights = attend(case, replace(exact, value=torch.eye(21).double().expand(1, 2, -1, -1)), backend="reference")
    grad = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(weights * kept / 0.7, list(leaves.values()), grad)
    for name, gradient in zip(leaves, gradients, strict=True):
        assert_close_to_reference(name, actual[name], gradient, rtol=1e-5)


def test_registered_with_torch_library():
    from hf_effattn.ops.sorted_block_attention import triton as _  # noqa: F401

    case = Case("opcheck", B=1, H=1, N=9, D=4, Dv=4, clusters=2, masks="holes", gated=True)
    inputs = on_device(make_inputs(case, torch.float32))
    leaves = [leaf.requires_grad_() for leaf in inputs.leaves()]
    settings = (inputs.order, inputs.block_length, 2, False, None, inputs.key_mask)
    arguments = (*leaves[:3], *settings, leaves[3], 0.3, 0.0, None)
    torch.library.opcheck(torch.ops.hf_effattn.sorted_block_attention_triton.default, arguments)
