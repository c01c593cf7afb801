"""Derivatives that the references alone have, second ones and those of torch.func: the fast forms say so.

And first ones where a call does not look as if any were asked for.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_effattn import ops

LABELS = torch.arange(12).remainder(3)[None, None]
OPS: dict[str, Callable[..., torch.Tensor]] = {
    "clustered": lambda q, k, v, **o: ops.clustered_attention(q, k, v, LABELS, clusters=3, **o),
    "improved": lambda q, k, v, **o: ops.improved_clustered_attention(q, k, v, LABELS, clusters=3, topk=3, **o),
    "bi-clustered": lambda q, k, v, **o: ops.bi_clustered_attention(
        q, k, v, LABELS, LABELS, clusters=3, key_clusters=3, topk=3, **o
    ),
    "causal": lambda q, k, v, **o: ops.causal_clustered_attention(
        q, k, v, clusters=3, topk=3, segment_length=3, window=3, **o
    ),
    "slices": lambda q, k, v, **o: ops.slice_attention(q, k, v, slice_length=4, **o)[0],
    "blocks": lambda q, k, v, **o: ops.sorted_block_attention(q, k, v, torch.arange(12)[None], block_length=4, **o),
    "neural clustering": lambda q, k, v, **o: ops.neural_clustering(q[0], k[0, :, :3], **o)[0],
}
each_op = pytest.mark.parametrize("op", OPS)


def second_derivative(op: str, dtype: torch.dtype = torch.float64, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 12, 4, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]
    output = OPS[op](*inputs, **options).square().sum()
    (first,) = torch.autograd.grad(output, inputs[0], create_graph=True)
    return torch.autograd.grad(first.square().sum(), inputs[1])[0]


@each_op
def test_the_reference_has_them(op: str) -> None:
    second = second_derivative(op, backend="reference")
    assert second.isfinite().all()
    assert second.any()


@each_op
def test_the_fast_form_says_who_has_them(op: str) -> None:
    """torch named an internal op, whose formula was said to be missing."""
    with pytest.raises(NotImplementedError, match=r'first derivatives only; for second ones .* backend="reference"'):
        second_derivative(op)


@pytest.mark.parametrize("op", ["slices", "blocks", "neural clustering"])
def test_the_kernels_say_who_has_them(op: str) -> None:
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        second_derivative(op, torch.float32, backend="triton")


def per_sample(op: str, **options: Any) -> Callable[..., torch.Tensor]:
    """The gradient of the values of each item of a batch, as torch.func makes it."""

    def loss(value: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return OPS[op](query, key, value, **options).square().sum()

    return torch.func.vmap(torch.func.grad(loss))


@pytest.mark.compatibility("torch", "`torch.func.grad`, `jvp`", "refused")
@pytest.mark.parametrize("op", ["clustered", "improved", "bi-clustered", "causal", "slices", "blocks"])
def test_torch_func_is_told_what_to_do(op: str) -> None:
    """torch said that an autograd.Function of its own must override something."""
    inputs = [torch.randn(2, 1, 1, 12, 4) for _ in range(3)]
    with pytest.raises(ValueError, match=r'torch\.func\.grad .* need backend="reference"'):
        per_sample(op)(*inputs)
    with pytest.raises(ValueError, match=r'torch\.func\.grad .* need backend="reference"'):
        torch.func.grad(lambda v: torch.func.vmap(lambda v: OPS[op](v, v, v))(v).sum())(inputs[0])


def test_the_reference_has_gradients_of_torch_func() -> None:
    inputs = [torch.randn(1, 1, 12, 4) for _ in range(3)]
    gradient = torch.func.grad(lambda v: OPS["slices"](*inputs[:2], v, backend="reference").sum())(inputs[2])
    leaf = inputs[2].requires_grad_()
    (expected,) = torch.autograd.grad(OPS["slices"](*inputs[:2], leaf).sum(), leaf)
    torch.testing.assert_close(gradient, expected)


def test_clusters_carry_no_derivative_under_torch_func_either() -> None:
    query = torch.randn(1, 2, 12, 4)
    labels = ops.cluster_queries(query, 3, key=query)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        assert torch.equal(ops.cluster_queries(rows, 3, key=rows), labels)
        assert torch.equal(ops.kmeans(rows[0], 3)[0], ops.kmeans(query[0], 3)[0])
        return rows.sum()

    assert torch.equal(torch.func.grad(loss)(query), torch.ones_like(query))


@pytest.mark.parametrize("op", [op for op in OPS if op != "neural clustering"])
def test_forward_mode_is_the_references(op: str) -> None:
    """torch would take a derivative that the fast form does not have for 0."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 12, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    ones = (torch.ones_like(value),)
    tangent = torch.func.jvp(lambda v: OPS[op](query, key, v, backend="reference"), (value,), ones)[1]
    torch.testing.assert_close(tangent, torch.ones_like(tangent), rtol=0, atol=1e-14)  # weights sum to 1
    with pytest.raises(ValueError, match='need backend="reference"'):
        torch.func.jvp(lambda v: OPS[op](query, key, v, backend="batched"), (value,), ones)


@pytest.mark.compatibility("torch", "`vmap` over models, trained", "runs")
@each_op
def test_backward_through_vmap(op: str) -> None:
    """As where `stack_module_state` trains models together: tensors within `vmap` say that they need no gradient.

    Causal attention read what its forward pass had not kept; torch had no rule for an op that returns a list.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 1, 1, 12, 4, generator=generator).requires_grad_() for _ in range(3)]
    together = torch.func.vmap(OPS[op])(*inputs)
    apart = torch.stack([OPS[op](*of_one) for of_one in zip(*inputs, strict=True)])
    torch.testing.assert_close(together, apart, rtol=0, atol=0)
    learned = inputs[:2] if op == "neural clustering" else inputs
    actual, expected = (torch.autograd.grad(output.square().sum(), learned) for output in (together, apart))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.compatibility("torch", "a graph that was exported under `no_grad`, trained", "runs")
@pytest.mark.parametrize("op", ["bi-clustered", "causal"])
def test_backward_through_a_graph_exported_without_gradients(op: str) -> None:
    class Attention(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return OPS[op](query, key, value)

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, 12, 4, generator=generator) for _ in range(3)]
    with torch.no_grad():
        exported = torch.export.export(Attention(), tuple(inputs)).module()
    learned = [tensor.requires_grad_() for tensor in inputs]
    actual, expected = (torch.autograd.grad(run(*learned).square().sum(), learned) for run in (exported, OPS[op]))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
