"""What only the kernels of slice attention can get wrong: on a GPU, else under Triton's interpreter."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from support.op_cases import DEVICE
from support.slice_cases import Case, attend, make_inputs


def on_device(inputs):
    return {name: tensor.to(DEVICE) for name, tensor in inputs.items()}


@pytest.mark.parametrize("masked", [False, True])
def test_sinks_and_sizes_in_several_steps(monkeypatch, masked):
    sizes = import_module("hf_effattn.ops.slice_attention.triton.forward")
    monkeypatch.setattr(sizes, "MOST_AT_ONCE", 32)
    case = Case("many_sinks", B=2, N=150, L=7, sinks=True, masks="holes" if masked else "none")
    inputs = on_device(make_inputs(case, torch.float32))
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
