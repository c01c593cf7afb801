"""GPU kernels of the attentions over clusters: on a GPU, else under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from support.attention_cases import Case, Inputs, attend, make_inputs
from support.closeness import assert_close_to_reference

from hf_effattn import ops
from hf_effattn.ops.bi_clustered_attention import triton as bi_clustered
from hf_effattn.ops.clustered_attention import triton as clustered
from hf_effattn.ops.improved_clustered_attention import triton as improved
from hf_effattn.ops.shared.triton import centroids as triton_centroids
from hf_effattn.ops.shared.triton import chips, cluster_table

OPS = ("clustered_attention", "improved_clustered_attention", "bi_clustered_attention")
FIRST_ORDER = OPS[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("output", "query", "key", "value")
# On a GPU the gradients of keys and values are sums in no fixed order, unless torch is asked for one.
UNORDERED = {"key": 1e-6, "value": 1e-6} if DEVICE == "cuda" else {}

CASES = (
    Case("plain", B=1, N=37, M=37),
    Case("prime_lengths", B=1, H=1, N=83, M=101, clusters=3, topk=40),  # more top keys than a tile holds
    Case("fewer_queries_than_clusters", B=1, H=1, N=3, clusters=7),
    Case("topk_beyond_keys", B=1, H=1, clusters=2, topk=50),
    Case("odd_dimensions", B=1, D=20, Dv=40, N=41, M=23, clusters=3),
    Case("holes", H=1, masks="holes", N=61, M=47, clusters=3),
    Case("row_fully_padded", H=1, masks="row", clusters=2),
    Case("fewer_keys_than_topk", H=1, masks="few", clusters=2, topk=9),
    Case("one_key_head_and_holes", H=3, key_heads=1, N=29, clusters=2, masks="holes"),
)
SMALL = Case("small", B=1, H=2, key_heads=1, N=21, M=19, D=8, Dv=8, clusters=2, topk=4)
by_name = {"ids": lambda case: case.name if isinstance(case, Case) else str(case)}
# The first order has ten kernels more, which take the interpreter seconds: tests/ops/test_bi_clustered_kernels.py.
each_op = pytest.mark.parametrize("op", [*OPS[:2], pytest.param(FIRST_ORDER, marks=pytest.mark.slow)])
each_op_of_centroids = pytest.mark.parametrize("op", OPS[:2])  # whose weights are those of the centroids' attention


def on_device(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    moved = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in vars(inputs).items()}
    return replace(inputs, **moved).to(dtype)


def gradients(output, leaves):
    """Of a fixed random sum of the outputs."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(output, leaves, weights.to(output))


def run(op, case, inputs, **options):
    """Output and the gradients of query, key and value, on the CPU."""
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    inputs.query, inputs.key, inputs.value = leaves
    output = attend(op, case, inputs, **{"backend": "triton"} | options)
    found = (output.detach(), *gradients(output, leaves))
    return dict(zip(NAMES, (tensor.cpu() for tensor in found), strict=True))


def check(op, case, inputs, dtype=torch.float32):
    """The kernels' error in `dtype` is what plain PyTorch has there."""
    rounded = on_device(inputs, dtype)
    expected = run(op, case, rounded.to(torch.float64), backend="reference")
    baseline = run(op, case, rounded.to(dtype), backend="reference")
    actual = run(op, case, rounded.to(dtype))
    for name in NAMES:
        assert actual[name].dtype == dtype
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)
    return actual


@pytest.mark.slow_except(
    *(f"{case.name}-{OPS[0]}" for case in CASES),
    *(f"{name}-{OPS[1]}" for name in ("plain", "one_key_head_and_holes", "row_fully_padded", "topk_beyond_keys")),
    f"fewer_queries_than_clusters-{OPS[2]}",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, **by_name)
def test_kernels_equal_the_reference(op, case):
    check(op, case, make_inputs(case))


@pytest.mark.slow
@each_op
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kib", [163, 227])
def test_block_sizes_of_large_chips(op, head_dim, dtype, kib, monkeypatch):
    """The interpreter runs what is launched on NVIDIA's chips, in which a tile holds other numbers of rows."""
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = Case("large_chip", B=1, H=1, N=70, M=40, D=head_dim, Dv=head_dim, clusters=2, topk=40)
    check(op, case, make_inputs(case, dtype), dtype)


@each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(op, dtype):
    """All keys are recomputed: low precision could choose other top keys, and rightly differ."""
    case = Case("all_keys", B=1, H=1, N=40, M=32, D=32, clusters=3, topk=32)
    check(op, case, make_inputs(case, dtype), dtype)


@pytest.mark.slow
@each_op_of_centroids
def test_half_precision_gradients_of_a_huge_cluster_stay_in_range(op):
    """A cluster's weights times its size are beyond float16 long before exact attention's gradients are."""
    case = Case("in_range", B=1, H=1, N=600, M=2, D=16, Dv=16, clusters=2, topk=2)
    inputs = make_inputs(case, torch.float16)
    inputs.labels = torch.zeros(1, 1, 600, dtype=torch.int64)
    inputs.labels[..., -1] = 1
    rounded = on_device(inputs, torch.float16)

    def gradients_of(dtype, backend):
        leaves = [getattr(rounded.to(dtype), name).detach().requires_grad_() for name in NAMES[1:]]
        options = {"clusters": 2} | ({"topk": 2} if op == "improved_clustered_attention" else {})
        output = getattr(ops, op)(*leaves, rounded.labels, backend=backend, **options)
        return torch.autograd.grad(output, leaves, torch.full_like(output, 100.0))

    for actual, expected in zip(
        gradients_of(torch.float16, "triton"), gradients_of(torch.float64, "reference"), strict=True
    ):
        assert actual.isfinite().all()
        assert (actual.double() - expected).norm() < 2 * torch.finfo(torch.float16).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_with_few_top_keys(dtype):
    """Every cluster has keys far ahead of the rest, so that every dtype chooses the same."""
    case = Case("separated", B=1, H=1, N=40, M=32, clusters=3, topk=4)
    inputs = make_inputs(case, dtype)
    inputs.key[:, :, :4] *= 4.0
    inputs.query = (inputs.key[:, :, :4].mean(dim=2, keepdim=True) + 0.1 * inputs.query).to(dtype)
    check("improved_clustered_attention", case, inputs, dtype)


@pytest.mark.slow_except(
    "a_gpu-improved_clustered_attention-torch.bfloat16", "a_cpu-clustered_attention-torch.float32"
)
@pytest.mark.usefixtures("autocast_rules")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_op
def test_autocast_changes_nothing(op, dtype):
    """A backward pass that ran under autocast once took its means in low precision."""
    case = Case("autocast", B=1, H=1, N=40, M=32, D=32, clusters=3, topk=8)
    inputs = on_device(make_inputs(case, dtype), dtype)
    expected = run(op, case, replace(inputs))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual = run(op, case, replace(inputs))
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=UNORDERED.get(name, 0))


@each_op
def test_one_token(op):
    """With a single key the gradients of query and key are 0 but for rounding."""
    case = Case("one_token", B=1, H=1, N=1, M=1)
    found = run(op, case, on_device(make_inputs(case), torch.float32))
    inputs = make_inputs(case)
    torch.testing.assert_close(found["output"].double(), inputs.value, rtol=1e-6, atol=0)
    for name in ("query", "key"):
        assert found[name].abs().max() < 1e-6


@each_op
def test_a_huge_cluster_and_empty_ones(op):
    case = Case("huge", B=1, H=1, N=150, M=40, clusters=4, topk=5)
    inputs = make_inputs(case)
    inputs.labels = torch.where(torch.arange(150) == 77, 3, 1).expand(1, 1, 150)
    check(op, case, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_queries_of_a_large_cluster_in_parts(monkeypatch, dropout_p):
    """Only the first part corrects what the centroid gave the top keys; most clusters have no other part."""
    case = Case("huge", B=1, H=2, key_heads=1, N=150, M=40, clusters=4, topk=5)
    inputs = on_device(make_inputs(case), torch.float32)
    inputs.labels[..., ::2] = 1
    torch.manual_seed(3)
    whole = run(OPS[1], case, inputs, dropout_p=dropout_p)
    monkeypatch.setattr(cluster_table, "ROWS_OF_A_SPLIT", 32)
    torch.manual_seed(3)
    split = run(OPS[1], case, inputs, dropout_p=dropout_p)
    for name in NAMES:
        assert_close_to_reference(name, split[name], whole[name].double(), rtol=3e-7)
    assert DEVICE == "cuda" or not torch.equal(split["key"], whole["key"])


@each_op
def test_parts_of_the_keys_bins_and_chunks_of_scores(op, monkeypatch):
    monkeypatch.setattr(triton_centroids, "PROGRAMS", 16)
    monkeypatch.setattr(triton_centroids, "BINS", 64)
    monkeypatch.setattr(triton_centroids, "SCORE_BYTES", 1000)
    case = Case("split", B=1, H=2, key_heads=1, N=20, M=300, clusters=2, topk=3, masks="holes")
    check(op, case, make_inputs(case))


@each_op
def test_labels_outside_the_range_are_in_no_cluster(op):
    """The kernels do not ask the host: such a query gets 0, as a masked one does, and nothing else changes."""
    case = replace(SMALL, masks="none")
    inputs, masked = (on_device(make_inputs(case), torch.float32) for _ in range(2))
    outside = torch.arange(case.N, device=DEVICE) % 5 == 2
    inputs.labels = inputs.labels.masked_fill(outside, case.clusters)
    inputs.labels[..., 2] = -1
    masked.query_mask = ~outside[None]
    actual, expected = run(op, case, inputs), run(op, case, masked)
    assert (actual["output"][:, :, outside.cpu()] == 0).all()
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=UNORDERED.get(name, 0))


@pytest.mark.slow_except("nan-clustered_attention")
@each_op
@pytest.mark.parametrize("garbage", [float("inf"), float("nan")])
def test_values_of_masked_rows_change_nothing(op, garbage):
    case = replace(SMALL, B=2, H=1, masks="right")
    inputs, clean = (on_device(make_inputs(case), torch.float32) for _ in range(2))
    inputs.key[-1, :, ~inputs.key_mask[-1]] = garbage
    inputs.value[-1, :, ~inputs.key_mask[-1]] = -garbage
    inputs.query[-1, :, ~inputs.query_mask[-1]] = garbage
    actual, expected = run(op, case, inputs), run(op, case, clean)
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0 if DEVICE == "cpu" else 1e-6)
        mask = inputs.query_mask if name in ("output", "query") else inputs.key_mask
        assert (actual[name][-1, :, ~mask[-1].cpu()] == 0).all()


@each_op
def test_queries_that_see_no_key_give_zero_output_and_gradient(op):
    case = replace(SMALL, B=2, H=1)
    inputs = on_device(make_inputs(case), torch.float32)
    inputs.key_mask = torch.tensor([True, False], device=DEVICE)[:, None].expand(-1, case.M)
    found = run(op, case, inputs)
    assert all((tensor[1] == 0).all() for tensor in found.values())
    assert all((tensor[0] != 0).any() for tensor in found.values())


@each_op
def test_strides_do_not_matter(op):
    inputs, packed = (on_device(make_inputs(SMALL), torch.float32) for _ in range(2))
    packed.query = torch.stack([inputs.query] * 3, dim=-1)[..., 1]  # inner stride 3
    packed.key = inputs.key.mT.contiguous().mT
    packed.value = inputs.value[..., :1].expand(-1, -1, -1, SMALL.Dv)  # stride 0
    inputs.value = packed.value.contiguous()
    expected, actual = (run(op, SMALL, some) for some in (inputs, packed))
    for name in NAMES:
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0 if DEVICE == "cpu" else 1e-6)


@each_op
def test_large_scores_stay_finite(op):
    inputs = on_device(make_inputs(SMALL), torch.float32)
    inputs.query *= 300
    assert all(tensor.isfinite().all() for tensor in run(op, SMALL, inputs).values())


@each_op_of_centroids
def test_float16_holds_scores_that_fit_after_scaling(op):
    case = replace(SMALL, D=64)
    inputs = on_device(make_inputs(case), torch.float16)
    inputs.query, inputs.key = inputs.query * 100, inputs.key.abs() * 100
    assert all(tensor.isfinite().all() for tensor in run(op, case, inputs).values())


@each_op
def test_reruns_are_equal(op):
    first, second = (run(op, SMALL, on_device(make_inputs(SMALL), torch.float32)) for _ in range(2))
    for name in ("output", "query"):
        assert torch.equal(first[name], second[name])


@pytest.mark.slow_except("0.0-improved_clustered_attention")
@pytest.mark.parametrize("op", OPS[1:])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_gradients_in_a_fixed_order_when_torch_is_asked_for_one(dropout_p, op):
    found = []
    for deterministic in (False, True, True):
        torch.use_deterministic_algorithms(deterministic)
        torch.manual_seed(3)
        try:
            inputs = on_device(make_inputs(SMALL), torch.float32)
            found.append(run(op, SMALL, inputs, dropout_p=dropout_p))
        finally:
            torch.use_deterministic_algorithms(False)
    for name in NAMES:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=0, atol=UNORDERED.get(name, 0))
        assert torch.equal(found[1][name], found[2][name])


@pytest.mark.slow_except("clustered_attention")
@each_op_of_centroids
def test_dropout_drops_weights_and_its_gradient_is_that_of_the_kept_ones(op):
    """With the identity as values the output is the matrix of dropped weights: it gives away the factors."""
    case = replace(SMALL, N=33, M=31, topk=5, Dv=31)
    inputs = on_device(make_inputs(case), torch.float32)

    def dropped(value):
        torch.manual_seed(7)
        inputs.value = value
        return run(op, case, inputs, dropout_p=0.4)

    value = inputs.value.detach()
    eye = torch.eye(case.M, device=DEVICE).expand_as(value)
    matrix = dropped(eye)["output"]
    exact = on_device(make_inputs(case), torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (exact.query, exact.key, exact.value)]
    exact.value = eye.double()
    weights = attend(op, case, exact, backend="reference")
    factor = (matrix.to(DEVICE).double() / weights.detach()).round(decimals=3)
    kept = factor == round(1 / 0.6, 3)
    assert (kept | (factor == 0)).all()
    assert 0.5 < kept.double().mean() < 0.7

    expected = (weights * kept / 0.6) @ leaves[2].repeat_interleave(2, dim=1)
    found = dropped(value)
    for name, reference in zip(NAMES, (expected.detach(), *gradients(expected, leaves)), strict=True):
        assert_close_to_reference(name, found[name], reference.cpu(), rtol=1e-6)

    labels = inputs.labels[..., None] == inputs.labels[..., None, :]
    shared = (kept[..., None, :, :] == kept[..., :, None, :]) | ~labels[..., None]  # by two queries of a cluster
    if op == "clustered_attention":
        assert shared.all()
    else:
        # The rest of a cluster's keys is dropped for all its queries alike, the top keys for each query apart.
        assert 0 < (~shared).any(dim=(2, 3)).sum() <= 2 * case.clusters * case.topk
    torch.manual_seed(8)
    assert not torch.equal(attend(op, case, inputs, backend="triton", dropout_p=0.4).cpu(), found["output"])


@pytest.mark.slow_except("clustered_attention")
@each_op
def test_compiles_as_one_graph(op):
    inputs = on_device(make_inputs(SMALL), torch.float32)
    expected = run(op, SMALL, inputs)
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    inputs.query, inputs.key, inputs.value = leaves
    output = torch.compile(attend, fullgraph=True, backend="aot_eager")(op, SMALL, inputs, backend="triton")
    for name, tensor in zip(NAMES, (output.detach(), *gradients(output, leaves)), strict=True):
        torch.testing.assert_close(tensor.cpu(), expected[name], rtol=0, atol=0 if DEVICE == "cpu" else 1e-6)


@pytest.mark.slow_except("clustered_attention")
@each_op
def test_registered_with_torch_library(op):
    """torch's own check of the schema, the fake function and the autograd formula."""
    case = replace(SMALL, B=1, H=1, N=7, M=6, topk=2, masks="holes")
    inputs = on_device(make_inputs(case), torch.float32)
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    counts = {OPS[0]: (case.clusters, 0), OPS[1]: (case.clusters, case.topk)}
    labels, sizes, exact = (inputs.labels,), counts.get(op), ()
    if op == FIRST_ORDER:
        labels, sizes = (inputs.labels, inputs.key_labels), (case.clusters, case.key_clusters, case.topk)
        exact = (torch.zeros(1, 1, dtype=torch.bool, device=DEVICE),)
    arguments = (*leaves, *labels, *sizes, inputs.key_mask, inputs.query_mask, *exact, 0.3, 0.0, None)
    registered = getattr(torch.ops.hf_effattn, f"{op}_triton").default
    torch.library.opcheck(registered, arguments)
    if exact:
        # A head that is exact leaves its tables as the memory was: all but the comparison of two calls.
        arguments = (*arguments[:-4], ~exact[0], *arguments[-3:])
        without = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(registered, arguments, test_utils=without)


@pytest.mark.parametrize("module", [clustered, improved, bi_clustered], **by_name)
def test_no_rows_at_all(module):
    """Batches, queries and keys of length 0."""
    for B, N, M in ((0, 5, 5), (1, 0, 5), (1, 5, 0)):
        query, key, value = (torch.zeros(B, 1, length, 8, device=DEVICE) for length in (N, M, M))
        labels = torch.zeros(B, 1, N, dtype=torch.int64, device=DEVICE)
        arguments = [query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), labels]
        key_labels = torch.zeros(B, 1, M, dtype=torch.int64, device=DEVICE)
        arguments += [key_labels, [2], [2], [min(M, 3)], None] if module is bi_clustered else [2, 0]
        arguments[-1:] = [min(M, 3)] if module is improved else arguments[-1:]
        op = getattr(module, module.__name__.split(".")[-2])
        output = op(*arguments, None, None, 0.3, 0.0, None)
        assert torch.equal(output, torch.zeros(B, 1, N, 8, device=DEVICE))
        for leaf, gradient in zip(arguments[:3], gradients(output, arguments[:3]), strict=True):
            assert torch.equal(gradient, torch.zeros_like(leaf))
