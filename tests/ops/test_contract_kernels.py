"""What the kernels of every op with gradients promise: on a GPU, else under Triton's interpreter.

Causal attention's are compared with the reference in `test_causal_kernels.py`, where both get the same clusters.
"""

from dataclasses import replace

import pytest
import torch
from support import attention_cases, block_cases, causal_cases, clustering_cases, slice_cases
from support.backward_ops import check_ops
from support.closeness import assert_close_to_reference
from support.op_cases import (
    ATTENTION,
    BLOCKS,
    CAUSAL,
    CLUSTERED,
    DEVICE,
    NEURAL_CLUSTERING,
    SLICES,
    check_kernels,
    each,
    hidden_rows,
    leaves_of,
    rows_of_tokens,
    to_dtype,
    with_gradients,
)

from hf_effattn.ops.shared.triton import chips

OPS = (*CLUSTERED, SLICES, BLOCKS, NEURAL_CLUSTERING)  # compared with the reference here
ALL = (*OPS, *CAUSAL)
CENTROIDS = CLUSTERED[:2]  # whose weights are those of the centroids' attention
FIRST_ORDER = CLUSTERED[2]
QUICK = {
    CLUSTERED[0]: [case.name for case in attention_cases.KERNEL_CASES],
    CLUSTERED[1]: ["plain", "one_key_head_and_holes", "row_fully_padded", "topk_beyond_keys"],
    FIRST_ORDER: ["fewer_queries_than_clusters"],
    SLICES: [
        *("one_token", "one_slice", "holes", "many_sinks", "causal_extended", "grouped_heads", "odd_dimensions"),
    ],
    BLOCKS: [
        *("one_word", "odd_dimensions", "grouped_heads", "holes", "row_fully_padded", "strict_and_left_padding"),
        *("gated_causal", "tiles_strict"),
    ],
    NEURAL_CLUSTERING: ["few_none_dot", "few_left_cosine", "few_row_dot", "tiles_holes_dot", "tiles_holes_cosine"],
}
LOW_PRECISION = {
    CLUSTERED[0]: attention_cases.Case("low", B=1, H=1, N=40, M=32, D=32, clusters=3),
    CLUSTERED[1]: attention_cases.Case("few", B=1, H=1, N=40, M=32, D=32, clusters=3, topk=4, separated=True),
    # All keys are recomputed: low precision could choose other top keys, and rightly differ.
    FIRST_ORDER: attention_cases.Case("all", B=1, H=1, N=40, M=32, D=32, clusters=3, topk=32),
    SLICES: slice_cases.Case("holes", H=1, N=41, ratio=3, masks="holes", sinks=True, positions=True),
    BLOCKS: block_cases.Case("tiles", B=1, H=2, key_heads=1, N=90, clusters=4, D=40, Dv=24, masks="right", gated=True),
    NEURAL_CLUSTERING: clustering_cases.Case("tiles", 1, 90, 20, 70, "right", sharpness=0.2),
}
SMALL = {
    **dict.fromkeys(
        CLUSTERED,
        attention_cases.Case("small", key_heads=1, N=21, M=19, D=8, Dv=8, clusters=2, topk=4, masks="holes"),
    ),
    **dict.fromkeys(
        CAUSAL, causal_cases.Case("small", H=1, N=25, segment_length=8, window=8, masks="holes", sinks=True)
    ),
    SLICES: slice_cases.Case("small", H=1, N=29, masks="holes", ratio=2, sinks=True, positions=True),
    BLOCKS: block_cases.Case("small", H=1, N=23, masks="holes", gated=True),
    NEURAL_CLUSTERING: clustering_cases.Case("small", masks="holes", similarity="cosine"),
}
# On a GPU some gradients are sums in no fixed order, unless torch is asked for one.
ROUNDING = {"rtol": 0, "atol": 0 if DEVICE == "cpu" else 1e-6}


def small_case(op):
    return [SMALL[op]]


def cheap(op, case):
    """The others have ten kernels more, which take the interpreter seconds; test_attention_kernels.py has some."""
    return op is not FIRST_ORDER and op not in CAUSAL


def cheapest(op, case):
    return cheap(op, case) and op is not CENTROIDS[1]


@pytest.mark.slow_except(
    "clustered_*-plain|*_fully_padded|bi_*|sorted_*|neural_*",
    "*one_key_head_and_holes|slice_*-many_sinks|slice_*-causal_extended",
)
@each(OPS, lambda op: op.kernel_cases, lambda op, case: case.name in QUICK[op])
def test_values_and_gradients_equal_the_reference(op, case):
    check_kernels(op, case, op.make(case, torch.float32))


@pytest.mark.slow_except("*-torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each(OPS, lambda op: [LOW_PRECISION[op]], cheap)
def test_low_precision(op, case, dtype):
    check_kernels(op, case, op.make(case, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("kib", [163, 227])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("op", CENTROIDS, ids=str)
def test_block_sizes_of_large_chips(op, head_dim, dtype, kib, monkeypatch):
    """The interpreter runs what is launched on NVIDIA's chips, in which a tile holds other numbers of rows."""
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = attention_cases.Case("large", B=1, H=1, N=70, M=40, D=head_dim, Dv=head_dim, clusters=2, topk=40)
    check_kernels(op, case, op.make(case, dtype))


@pytest.mark.slow_except("improved*", "sorted*", "neural*")
@each(ALL, small_case, cheap)
def test_neither_masked_rows_nor_strides_change_anything(op, case):
    inputs = op.make(case, torch.float32)
    clean, dirty = with_gradients(op, case, inputs, backend="triton"), dict(inputs)
    for name in leaves_of(inputs):
        apart = torch.stack([inputs[name]] * 3, dim=-1)[..., 1]
        if (hidden := hidden_rows(name, inputs)) is not None:
            rows_of_tokens(name, apart)[hidden] = torch.nan
        dirty[name] = apart
    for name, tensor in with_gradients(op, case, dirty, backend="triton").items():
        torch.testing.assert_close(tensor, clean[name], **ROUNDING)
        of = name.removeprefix("gradient of ")
        if (hidden := hidden_rows(of, inputs)) is not None:
            assert not rows_of_tokens(of, tensor)[hidden].any()


@each(ALL, small_case, cheapest)
def test_a_text_of_padding_alone_gives_zeros_and_no_gradient(op, case):
    """Also where the keys alone are masked."""
    case = replace(case, masks="row")
    inputs = op.make(case, torch.float32)
    for given in [inputs] + [inputs | {"query_mask": None}] * ("query_mask" in inputs):
        for name, tensor in with_gradients(op, case, given, backend="triton").items():
            if len(tensor) == case.B and "position" not in name:
                assert not tensor[-1].any(), name
                assert tensor[0].any(), name


@each(ALL, small_case, cheapest)
def test_large_scores_stay_finite(op, case):
    inputs = op.make(case, torch.float32)
    first = leaves_of(inputs)[0]
    large = inputs | {first: inputs[first] * 300}
    assert all(tensor.isfinite().all() for tensor in with_gradients(op, case, large, backend="triton").values())


@pytest.mark.slow_except("a_gpu-*")
@pytest.mark.usefixtures("autocast_rules")
@each(OPS, small_case, lambda op, case: op is CENTROIDS[1])
def test_autocast_changes_nothing(op, case):
    """A backward pass that ran under autocast once took its means in low precision."""
    inputs = op.make(case, torch.bfloat16)
    expected = with_gradients(op, case, inputs, backend="triton")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual = with_gradients(op, case, inputs, backend="triton")
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], **ROUNDING)


@each((*CENTROIDS, BLOCKS), small_case, lambda op, case: op is not CENTROIDS[1])
def test_dropout_drops_weights_and_its_gradient_is_that_of_the_kept_ones(op, case):
    """With the identity as values the output is the matrix of dropped weights: it gives away the factors."""
    inputs = op.make(replace(case, masks="none", B=1), torch.float32)
    value = inputs["value"]
    eye = torch.eye(value.shape[2]).expand(*value.shape[:2], -1, -1).contiguous()
    matrix = with_gradients(op, case, inputs | {"value": eye}, backend="triton", dropout_p=0.4)["output"]
    exact = to_dtype(inputs, torch.float64)
    leaves = {name: exact[name].requires_grad_() for name in leaves_of(exact)}
    weights = op.call(case, exact | {"value": eye.double()}, backend="reference")["output"]
    seen = weights.detach() > 0
    factor = torch.where(seen, matrix / weights.detach().clamp(min=1e-30), 0.0).round(decimals=3)
    kept = factor == round(1 / 0.6, 3)
    assert (kept | (factor == 0)).all()
    assert 0.5 < kept[seen].double().mean() < 0.7

    expected = (weights * kept / 0.6) @ leaves["value"].repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    random = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, list(leaves.values()), random)
    actual = with_gradients(op, case, inputs, backend="triton", dropout_p=0.4)
    assert_close_to_reference("output", actual["output"], expected.detach(), rtol=1e-6)
    for name, gradient in zip(leaves, gradients, strict=True):
        assert_close_to_reference(name, actual[f"gradient of {name}"], gradient, rtol=1e-6)
    other = with_gradients(op, case, inputs, seed=8, backend="triton", dropout_p=0.4)
    assert not torch.equal(other["output"], actual["output"])
    if op in CENTROIDS:
        labels = inputs["labels"][..., None] == inputs["labels"][..., None, :]
        shared = (kept[..., None, :, :] == kept[..., :, None, :]) | ~labels[..., None]  # by two queries of a cluster
        # The rest of a cluster's keys is dropped for all its queries alike, the top keys for each query apart.
        apart = (~shared).any(dim=(2, 3)).sum()
        assert not apart if op is CENTROIDS[0] else 0 < apart <= 2 * case.clusters * case.topk


@each(ALL, small_case, lambda op, case: op in (CENTROIDS[0], NEURAL_CLUSTERING))
def test_compiles_as_one_graph(op, case):
    inputs = op.make(case, torch.float32)
    expected = with_gradients(op, case, inputs, backend="triton")
    torch._dynamo.reset()
    compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager")
    for name, tensor in with_gradients(op, case, inputs, run=compiled, backend="triton").items():
        torch.testing.assert_close(tensor, expected[name], **ROUNDING)


@pytest.mark.slow_except("clustered_attention-*", "neural_clustering-*")
@each(ALL, small_case, cheapest)
def test_registered_with_torch_library(op, case):
    """torch's own checks of what each op, forward and backward, says of its arguments and promises to the compiler."""
    options = {"dropout_p": 0.3} if op in ATTENTION else {}
    called = check_ops(lambda: with_gradients(op, case, op.make(case, torch.bfloat16), backend="triton", **options))
    assert called == [f"hf_effattn::{op.registered}_triton", f"hf_effattn::{op.registered}_triton_backward"]


@each(ALL, small_case)
def test_no_rows_at_all(op, case):
    for sizes in ({"B": 0}, {"N": 0}):
        empty = replace(case, masks="none", **sizes, **({"sinks": False} if op is SLICES else {}))
        inputs = op.make(empty, torch.float32)
        tensors = with_gradients(op, empty, inputs, backend="triton")
        assert not any(tensor.any() for tensor in tensors.values())
        assert all(tensors[f"gradient of {name}"].shape == inputs[name].shape for name in leaves_of(inputs))
