"""The Triton kernels of slice attention against the float64 reference, on a GPU or under Triton's interpreter."""

import dataclasses
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from support.closeness import assert_close_to_reference
from support.slice_cases import CASES, DEVICE, Case, attend, make_inputs, on_device, with_gradients

KERNEL_CASES = (
    *(case for case in CASES if case.H < 6),
    Case("grouped_heads", B=1, H=4, key_heads=2, N=19, ratio=2, positions=True, sinks=True, masks="holes"),
    Case("a_slice_of_several_tiles", B=1, N=150, L=140, ratio=1.1, positions=True, sinks=True),
    Case("causal_slice_of_several_tiles", B=1, N=150, L=80, ratio=1.5, positions=True, causal=True),
    Case("many_sinks", B=1, N=150, L=8, sinks=True),
)


def kernel_inputs(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    inputs = make_inputs(case, dtype)
    if case.name == "many_sinks":
        inputs["sink_mask"][:, ::2] = True
    return inputs


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_and_sizes_in_several_steps(monkeypatch, masked):
    sizes = import_module("hf_effattn.ops.slice_attention.triton.forward")
    monkeypatch.setattr(sizes, "MOST_AT_ONCE", 32)
    case = Case("many_sinks", B=2, N=150, L=7, sinks=True, masks="holes" if masked else "none")
    inputs = on_device(kernel_inputs(case, torch.float32))
    mask, sink_mask = inputs.get("key_mask"), inputs["sink_mask"].clone()
    fields = {"query": inputs["query"], "key_mask": mask, "sink_mask": sink_mask, "slice_length": 7}
    sinks, counts, inverse_sizes = sizes.sinks_and_sizes(SimpleNamespace(**fields))
    tokens = torch.ones_like(sink_mask) if mask is None else mask
    for text in range(2):
        expected = (sink_mask & tokens)[text].nonzero()[:, 0]
        assert counts[text] == len(expected) > 32
        assert torch.equal(sinks[text, : len(expected)], expected)
        of_slices = torch.stack([part.sum() for part in tokens[text].split(7)])
        torch.testing.assert_close(inverse_sizes[text], 1 / of_slices.clamp(min=1))


@pytest.mark.slow_except(
    "plain",
    "causal",
    "holes",
    "many_sinks",
    "causal_extended",
    "grouped_heads",
    "odd_dimensions",
    "left_padding",
    "one_slice",
)
@pytest.mark.parametrize("case", KERNEL_CASES, ids=lambda case: case.name)
def test_values_and_gradients(case):
    inputs = kernel_inputs(case, torch.float32)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    expected = with_gradients(case, double, backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    for name, actual in with_gradients(case, on_device(inputs), backend="triton").items():
        assert_close_to_reference(name, actual.cpu(), expected[name], baseline[name], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["extended", "causal_extended", "holes"])
def test_low_precision_is_as_good_as_plain_pytorch(name, dtype):
    case = dataclasses.replace(next(case for case in CASES if case.name == name), B=2, H=1)
    inputs = make_inputs(case, dtype)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    expected = with_gradients(case, double, backend="reference")
    baseline = with_gradients(case, inputs, backend="reference")
    for name, actual in with_gradients(case, on_device(inputs), backend="triton").items():
        assert_close_to_reference(name, actual.cpu(), expected[name], baseline[name], rtol=0)


@pytest.mark.parametrize("garbage", [float("inf"), float("nan")])
def test_values_of_masked_rows_change_nothing(garbage):
    case = Case("garbage", B=1, H=1, N=29, masks="holes", ratio=2, sinks=True, positions=True)
    clean = with_gradients(case, on_device(make_inputs(case, torch.float32)), backend="triton")
    inputs = make_inputs(case, torch.float32)
    for name in ("query", "key", "value"):
        inputs[name].transpose(1, 2)[~inputs["key_mask"]] = garbage
    dirty = with_gradients(case, on_device(inputs), backend="triton")
    assert all(torch.equal(dirty[name], clean[name]) for name in clean)


def test_causal_kernels_never_look_ahead():
    case = Case("causal", B=1, H=1, N=37, L=6, ratio=3, causal=True, positions=True, sinks=True)
    inputs = on_device(make_inputs(case, torch.float32))
    before = attend(case, inputs, backend="triton")
    for t in (5, 17, 36):
        changed = {name: tensor.clone() for name, tensor in inputs.items()}
        for name in ("query", "key", "value"):
            changed[name][:, :, t] += 3.0
        after = attend(case, changed, backend="triton")
        assert torch.equal(after[0][:, :, :t], before[0][:, :, :t])
        assert torch.equal(after[1][:, :, : t // case.L], before[1][:, :, : t // case.L])
        assert not torch.equal(after[0][:, :, t], before[0][:, :, t])


@pytest.mark.slow
def test_dropout_replays_and_its_gradient_is_that_of_its_own_draw():
    """The output is linear in the values for a fixed draw: its gradient must give it back (Euler)."""
    case = Case("dropout", B=1, H=2, key_heads=1, N=21, L=8, ratio=2, sinks=True, positions=True)
    inputs = on_device(make_inputs(case, torch.float32))
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        value = inputs["value"].detach().requires_grad_()
        output, pooled, _ = attend(case, inputs | {"value": value}, backend="triton", dropout_p=0.4)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        total = (output * weights).sum() + 0.3 * (pooled * pooled.detach()).sum()
        (gradient,) = torch.autograd.grad(total, value)
        error = (gradient * value).double().sum() - total.double()
        assert error.abs() < 1e-6 * (output * weights).abs().sum()
        outputs.append(output)
    assert torch.equal(*outputs)
    kept = attend(case, inputs, backend="triton")[0]
    assert not torch.equal(outputs[0], kept)


@pytest.mark.slow
def test_dropout_keeps_the_mean():
    case = Case("dropout", B=1, H=1, N=8, L=4, ratio=2)
    inputs = on_device(make_inputs(case, torch.float32))
    torch.manual_seed(0)
    draws = torch.stack([attend(case, inputs, dropout_p=0.2, backend="triton")[0] for _ in range(60)]).double()
    error = (draws.mean(dim=0) - attend(case, inputs, backend="triton")[0]).abs() / (draws.std(dim=0) / 60**0.5)
    assert error.max() < 5.5  # standard errors, over 128 values


def test_registered_with_torch_library():
    case = Case("opcheck", B=1, H=2, N=11, L=4, ratio=2, masks="holes", sinks=True, positions=True)
    inputs = on_device(make_inputs(case, torch.float32))
    leaves = {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    names = ("key_mask", "query_positions", "key_positions", "sink_mask")
    mask, query_positions, key_positions, sinks = (leaves[name] for name in names)
    tensors = leaves["query"], leaves["key"], leaves["value"]
    arguments = (*tensors, case.L, case.extension, False, mask, 0.3, query_positions, key_positions, sinks, 0.0, None)
    attend(case, inputs, backend="triton")
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.hf_effattn.slice_attention_triton.default, arguments, test_utils=tests)
