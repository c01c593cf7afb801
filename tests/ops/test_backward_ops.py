"""Every backward op returns the shapes, dtypes and strides that its fake promises to `torch.compile`."""

from dataclasses import replace

import pytest
import torch
from ops import test_neural_clustering as clustering
from ops import test_slice_attention as slices
from ops import test_sorted_block_attention as blocks
from support import attention_cases as attention
from support.backward_ops import check_backward_ops
from support.block_cases import on_device as blocks_on_device
from support.slice_cases import on_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_backend = pytest.mark.parametrize("backend", ["batched", "triton"])
by_name = {"ids": lambda case: case.name}
SLICES = (
    slices.Case("plain"),
    slices.Case("extended", ratio=2),
    slices.Case("positions", positions=True),
    slices.Case("positions_and_two_parts", causal=True, ratio=2, positions=True),
    slices.Case("positions_and_three_parts", ratio=2, positions=True),
    slices.Case("everything", H=2, key_heads=1, ratio=2, positions=True, sinks=True, masks="holes"),
)
BLOCKS = (
    blocks.Case("plain"),
    blocks.Case("grouped_and_masked", H=2, key_heads=1, masks="holes"),
    blocks.Case("gated", gated=True),
    blocks.Case("gated_causal", gated=True, causal=True, masks="right"),
)


ATTENTION = (attention.Case("plain"), attention.Case("grouped_and_masked", H=2, key_heads=1, masks="holes"))


def names_of(op: str, backend: str) -> list[str]:
    return [f"hf_effattn::{op}{'_triton' if backend == 'triton' else ''}_backward"]


@pytest.mark.slow_except("plain-torch.float32-*", "everything-torch.float32-*")
@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SLICES, **by_name)
def test_slice_attention(case, dtype, backend):
    """Summed over parts, the gradients of keys and values once came in another layout than promised."""
    case = replace(case, B=1, N=12, L=4)
    inputs = on_device(slices.make_inputs(case, dtype))
    called = check_backward_ops(lambda: slices.with_gradients(case, inputs, backend=backend))
    assert called == names_of("slice_attention", backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize("transposed", [False, True])
def test_neural_clustering(similarity, masks, transposed, dtype, backend):
    words, centroids, mask = clustering.make_inputs(2, 7, 3, 4, masks=masks, dtype=dtype)
    words, centroids = words.to(DEVICE), centroids.to(DEVICE)
    if transposed:
        words, centroids = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (words, centroids))
    options = {"similarity": similarity, "mask": None if mask is None else mask.to(DEVICE), "backend": backend}
    called = check_backward_ops(lambda: clustering.with_gradients(words, centroids, **options))
    assert called == names_of("neural_clustering", backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", BLOCKS, **by_name)
def test_sorted_block_attention(case, dtype, backend):
    case = replace(case, B=1, N=9, D=4, Dv=4, clusters=2)
    inputs = blocks_on_device(blocks.make_inputs(case, dtype))
    called = check_backward_ops(lambda: blocks.with_gradients(case, inputs, backend=backend))
    assert called == names_of("sorted_block_attention", backend)


@pytest.mark.parametrize(
    ("op", "backend", "options"),
    [
        ("clustered_attention", "batched", {}),
        ("clustered_attention", "triton", {}),
        ("improved_clustered_attention", "batched", {}),
        ("improved_clustered_attention", "triton", {}),
        ("bi_clustered_attention", "batched", {}),
        ("bi_clustered_attention", "triton", {}),
        ("bi_clustered_attention", "batched", {"exact_heads": torch.tensor([[True, False]])}),
        pytest.param(
            *("bi_clustered_attention", "triton", {"exact_heads": torch.tensor([[True, False]])}),
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.parametrize("case", ATTENTION, **by_name)
def test_clustered_attention(case, op, backend, options):
    if options:
        case = replace(case, H=4, key_heads=2)
    case = replace(case, B=1, N=12, M=11, D=8, Dv=4, clusters=2)
    options = {name: tensor.to(DEVICE) for name, tensor in options.items()}
    inputs = attention.make_inputs(case, torch.float32)
    inputs = replace(inputs, **{name: None if x is None else x.to(DEVICE) for name, x in vars(inputs).items()})
    leaves = [tensor.requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    called = check_backward_ops(
        lambda: torch.autograd.grad(attention.attend(op, case, inputs, backend=backend, **options).sum(), leaves)
    )
    assert called == names_of(op, backend)
