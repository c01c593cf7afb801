"""The Triton kernels of bi-clustered attention: on a GPU, or under Triton's interpreter, against the reference."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from support.attention_cases import Case, attend, make_inputs
from support.closeness import assert_close_to_reference, assert_equal_but_for_order

from hf_effattn.ops.shared.dropout import KINDS_OF_WEIGHTS, TOPK_AND_SUMMARY_WEIGHTS
from hf_effattn.ops.shared.triton import chips
from hf_effattn.ops.shared.triton.dropout import dropout_factor

OP = "bi_clustered_attention"
SEED = 2**40 + 17
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"B": 1, "N": 21, "M": 23, "clusters": 3}
CASES = (
    Case("one_query", **SMALL | {"N": 1}),
    Case("prime_lengths", B=1, H=1, N=53, M=101, clusters=2),
    Case("empty_clusters", B=1, H=1, N=9, M=13, clusters=32),
    Case("fewer_keys_than_key_clusters", **SMALL | {"M": 3}, key_clusters=11),
    Case("more_top_keys_and_key_clusters_than_a_tile", B=1, H=1, N=19, M=90, clusters=2, topk=37, key_clusters=41),
    Case("topk_beyond_keys", **SMALL, topk=50),
    Case("odd_dimensions", **SMALL, D=20, Dv=5),
    Case("value_wider_than_key", **SMALL, D=3, Dv=40),
    Case("left_padding", N=21, M=23, H=1, clusters=3, masks="left"),
    Case("holes", N=21, M=19, H=1, clusters=3, masks="holes"),
    Case("row_fully_padded", N=11, M=12, H=1, clusters=2, masks="row"),
    Case("fewer_keys_than_topk", N=11, M=12, H=1, clusters=2, masks="few", topk=9),
    Case("grouped_heads_and_holes", **SMALL | {"N": 17}, H=4, key_heads=2, masks="holes"),
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
TENSORS = ("query", "key", "value", "labels", "key_labels", "key_mask", "query_mask")


def kernel_inputs(case, dtype=torch.float32, seed=0):
    """Inputs of a case on the device of the kernels."""
    inputs = make_inputs(case, dtype, seed)
    for name in TENSORS:
        tensor = getattr(inputs, name)
        setattr(inputs, name, None if tensor is None else tensor.to(DEVICE))
    return inputs


def with_gradients(case, inputs, run=attend, **options):
    """Output and the gradients of query, key and value, for a fixed random gradient of the output."""
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    inputs.query, inputs.key, inputs.value = leaves
    output = run(OP, case, inputs, **options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, leaves, weights.to(output))
    return dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))


def assert_close(case, inputs, actual=None, **options):
    """Kernels against the reference in float64, allowing twice the error of the reference in their own dtype."""
    dtype = inputs.query.dtype
    expected = with_gradients(case, inputs.to(torch.float64), backend="reference", **options)
    baseline = with_gradients(case, inputs.to(dtype), backend="reference", **options)
    actual = with_gradients(case, inputs.to(dtype), backend="triton", **options) if actual is None else actual
    for name in expected:
        assert actual[name].dtype == dtype
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)


def separated(case, dtype):
    """Every cluster has `topk` keys far ahead of the rest, so that every dtype chooses the same."""
    inputs = kernel_inputs(case, dtype)
    inputs.key[:, :, : case.topk] *= 4.0
    heads = case.H // (case.key_heads or case.H)
    ahead = inputs.key[:, :, : case.topk].mean(dim=2, keepdim=True).repeat_interleave(heads, dim=1)
    inputs.query = (ahead + 0.1 * inputs.query).to(dtype)
    return inputs


@each_case
def test_equals_reference(case):
    assert_close(case, kernel_inputs(case))


@pytest.mark.slow_except("227-torch.float32-136")
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kib", [163, 227])
def test_block_sizes_of_large_chips(head_dim, dtype, kib, monkeypatch):
    """The interpreter runs what is launched on NVIDIA's chips, in which a tile holds other numbers of rows."""
    monkeypatch.setattr(chips, "INTERPRETER", chips.Chip("cuda", kib * chips.KIB))
    case = Case("large_chip", B=1, H=1, N=130, M=40, D=head_dim, Dv=head_dim, clusters=2, key_clusters=3, topk=40)
    assert_close(case, kernel_inputs(case, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [16, 60])
def test_dtypes(dtype, D):
    case = Case("separated", B=1, N=40, M=32, D=D, Dv=D, clusters=2, topk=4)
    assert_close(case, separated(case, dtype))


@pytest.mark.parametrize("one_label", [True, False])
def test_queries_of_a_cluster_beyond_a_tile_and_a_split(one_label, monkeypatch):
    """All queries in one cluster, and tiles as large as a GPU has them; the walk of the backward pass is split."""
    monkeypatch.setattr(import_module(f"hf_effattn.ops.{OP}.triton.backward"), "ROWS_OF_A_SPLIT", 32)
    case = Case("huge", B=1, H=1, N=150, M=40, clusters=3, topk=5)
    inputs = kernel_inputs(case)
    if one_label:
        inputs.labels.fill_(1)
    assert_close(case, inputs)


def test_heads_in_chunks(monkeypatch):
    """Counts of chosen keys that do not fit into memory at once: the key heads are walked in parts."""
    monkeypatch.setattr(import_module(f"hf_effattn.ops.{OP}.triton.forward"), "COUNTS_BYTES", 1)
    case = Case("chunks", B=2, H=4, key_heads=2, N=9, M=11, clusters=2)
    assert_close(case, kernel_inputs(case))


@pytest.mark.parametrize("masks", ["none", "right"])
def test_with_all_keys_recomputed_is_exact(masks):
    case = Case("exact", N=23, M=23, H=1, clusters=3, topk=23, masks=masks)
    inputs = kernel_inputs(case)
    assert_exact(inputs, attend(OP, case, inputs, backend="triton"))


def test_a_cluster_for_every_key_is_exact():
    case = Case("own_key_cluster", B=1, H=1, N=23, M=29, clusters=3, key_clusters=31, topk=7)
    inputs = kernel_inputs(case)
    inputs.key_labels = torch.randperm(31, device=DEVICE)[: case.M].expand(1, 1, -1)
    assert_exact(inputs, attend(OP, case, inputs, backend="triton"))


def assert_exact(inputs, actual):
    """Rows that count are those of SDPA, the others 0."""
    mask = None if inputs.key_mask is None else inputs.key_mask[:, None, None, :]
    exact = F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=mask)
    if inputs.query_mask is not None:
        exact = exact.masked_fill(~inputs.query_mask[:, None, :, None], 0.0)
    torch.testing.assert_close(actual, exact, rtol=0, atol=1e-6)


def test_weights_sum_to_one_and_masked_keys_have_none():
    """With the identity as values the output is the attention matrix itself."""
    case = Case("weights", H=1, N=19, M=17, Dv=17, clusters=3, masks="holes")
    inputs = kernel_inputs(case)
    inputs.value = torch.eye(case.M, device=DEVICE).expand(case.B, case.H, -1, -1)
    weights = attend(OP, case, inputs, backend="triton")
    torch.testing.assert_close(weights.sum(dim=-1), inputs.query_mask[:, None].float())
    assert (weights >= 0).all()
    assert (weights.transpose(2, 3)[~inputs.key_mask[:, None]] == 0).all()


def test_values_of_masked_rows_change_nothing():
    case = Case("garbage", H=1, N=15, M=15, clusters=2, masks="right")
    clean = with_gradients(case, kernel_inputs(case), backend="triton")
    inputs = kernel_inputs(case)
    inputs.key[-1, :, ~inputs.key_mask[-1]] = float("nan")
    inputs.value[-1, :, ~inputs.key_mask[-1]] = float("inf")
    inputs.query[-1, :, ~inputs.query_mask[-1]] = float("nan")
    inputs.labels[-1, :, ~inputs.query_mask[-1]] = -(2**40)
    inputs.key_labels[-1, :, ~inputs.key_mask[-1]] = 2**40
    dirty = with_gradients(case, inputs, backend="triton")
    assert_equal_but_for_order(dirty, clean)
    assert (dirty["key"][-1, :, ~inputs.key_mask[-1]] == 0).all()
    assert (dirty["value"][-1, :, ~inputs.key_mask[-1]] == 0).all()
    assert (dirty["query"][-1, :, ~inputs.query_mask[-1]] == 0).all()


def test_rows_with_labels_out_of_range_are_in_no_cluster():
    """Queries give 0; keys are in no mean, yet can be top keys."""
    case = Case("labels", B=1, H=1, N=15, M=14, clusters=2, key_clusters=3, topk=3)
    inputs = kernel_inputs(case)
    inputs.labels[..., :4] = torch.tensor([-1, 2, 2**40, -(2**40)], device=DEVICE)
    inputs.key_labels[..., 5:9] = torch.tensor([-1, 3, 2**40, -(2**40)], device=DEVICE)
    actual = with_gradients(case, inputs, backend="triton")
    assert (actual["output"][..., :4, :] == 0).all()
    assert (actual["query"][..., :4, :] == 0).all()
    expected = attend_with_loops(case, inputs, range(4, case.N))
    torch.testing.assert_close(actual["output"][0, 0, 4:], expected, rtol=0, atol=5e-7)


def attend_with_loops(case, inputs, queries):
    """The formula for some queries of one head; keys whose label is no key cluster's are in no mean."""
    query, key, value = (tensor[0, 0].double() for tensor in (inputs.query, inputs.key, inputs.value))
    rows = []
    for i in queries:
        members = inputs.labels[0, 0] == inputs.labels[0, 0, i]
        top = (query[members].mean(dim=0) @ key.T).topk(case.topk).indices
        scores, values = list(key[top] @ query[i] * case.D**-0.5), list(value[top])
        for c in range(case.key_clusters):
            inside = inputs.key_labels[0, 0] == c
            rest = inside.sum() - inside[top].sum()
            if rest:
                scores.append(key[inside].mean(dim=0) @ query[i] * case.D**-0.5 + rest.log())
                values.append(value[inside].mean(dim=0))
        rows.append(torch.stack(scores).softmax(dim=0) @ torch.stack(values))
    return torch.stack(rows).float()


def test_no_keys_and_no_queries():
    """Rows that see no key, and tensors without rows."""
    case = Case("no_keys", H=1, N=9, M=8, clusters=2)
    inputs = kernel_inputs(case)
    inputs.key_mask = torch.tensor([[True], [False]], device=DEVICE).expand(-1, case.M)
    results = with_gradients(case, inputs, backend="triton")
    assert all((tensor[1] == 0).all() for tensor in results.values())
    assert all((tensor[0] != 0).any() for tensor in results.values())
    for empty in (Case("M", N=3, M=0), Case("N", N=0, M=3), Case("B", B=0, N=3, M=3)):
        results = with_gradients(empty, kernel_inputs(empty), backend="triton")
        assert all((tensor == 0).all() for tensor in results.values())


def test_large_scores_stay_finite():
    case = Case("large", B=1, H=1, N=15, M=17, clusters=2)
    inputs = kernel_inputs(case)
    inputs.query *= 300
    assert all(tensor.isfinite().all() for tensor in with_gradients(case, inputs, backend="triton").values())


def test_strides_do_not_matter():
    case = Case("strided", B=1, N=15, M=15, clusters=2)
    inputs = kernel_inputs(case)
    expected = with_gradients(case, inputs, backend="triton")
    inputs = kernel_inputs(case)
    inputs.query, inputs.key, inputs.value = torch.stack([inputs.query, inputs.key, inputs.value], dim=-1).unbind(-1)
    inputs.labels, inputs.key_labels = torch.stack([inputs.labels, inputs.key_labels], dim=-1).int().unbind(-1)
    actual = with_gradients(case, inputs, backend="triton")
    assert_equal_but_for_order(actual, expected)


@pytest.mark.slow
def test_reruns_are_bit_equal_and_all_of_it_where_torch_is_told_so():
    case = Case("reruns", B=1, H=2, key_heads=1, N=33, M=29, clusters=3, masks="holes")
    first, second = (with_gradients(case, kernel_inputs(case), backend="triton") for _ in range(2))
    assert torch.equal(first["output"], second["output"])
    assert torch.equal(first["query"], second["query"])
    torch.use_deterministic_algorithms(True)
    try:
        ordered, again = (with_gradients(case, kernel_inputs(case), backend="triton") for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(ordered[name], again[name]) for name in ordered)
    assert_close(case, kernel_inputs(case), actual=ordered)


@pytest.mark.parametrize("masks", ["none", "holes"])
def test_dropout_drops_the_same_weights_in_both_passes(masks, monkeypatch):
    """Against the reference with the factors that the kernels draw."""
    case = Case("dropout", B=1, H=2, key_heads=1, N=13, M=11, clusters=2, key_clusters=3, topk=4, masks=masks)
    dropout_p = 0.4
    columns = case.topk + case.key_clusters
    drawn = draw_factors(case, columns, dropout_p)
    torch.testing.assert_close(drawn.unique().cpu(), torch.tensor([0.0, 1 / (1 - dropout_p)]))
    reference = import_module(f"hf_effattn.ops.{OP}.reference")
    monkeypatch.setattr(
        reference, "dropout_factor", lambda _, like, p, seed, problem, weights: drawn[problem].to(like)
    )
    monkeypatch.setattr(reference, "top_keys", ascending(reference.top_keys))
    seed = torch.tensor([SEED], device=DEVICE)
    monkeypatch.setattr(import_module(f"hf_effattn.ops.{OP}"), "draw_seed", lambda *_: seed)
    assert_close(case, kernel_inputs(case), dropout_p=dropout_p)


def ascending(top_keys):
    """The kernels number the columns of top keys in the order of the keys, masked ones last."""

    def ordered(query, key, labels, clusters, topk, key_mask, *rest):
        top = top_keys(query, key, labels, clusters, topk, key_mask, *rest).sort(dim=-1).values
        if key_mask is None:
            return top
        masked = ~key_mask[:, None, None].expand(*top.shape[:3], -1).gather(3, top)
        return top.gather(3, masked.int().argsort(dim=-1, stable=True))

    return ordered


@triton.jit
def draw_factors_kernel(seed_ptr, factors_ptr, columns, dropout_p, KINDS: tl.constexpr, KIND: tl.constexpr):
    o_row = tl.program_id(0) + tl.arange(0, 1)
    o_column = tl.arange(0, 16)
    b_factor = dropout_factor(seed_ptr, o_row, o_column, columns, dropout_p, KINDS, KIND)
    tl.store(factors_ptr + o_row[:, None] * columns + o_column[None, :], b_factor, mask=(o_column < columns)[None, :])


def draw_factors(case, columns, dropout_p):
    """The factors `(H, N, columns)` of one batch item as the kernels' own function draws them."""
    factors = torch.zeros(case.H, case.N, columns, device=DEVICE)
    seed = torch.tensor([SEED], device=DEVICE)
    kinds = {"KINDS": KINDS_OF_WEIGHTS, "KIND": TOPK_AND_SUMMARY_WEIGHTS}
    draw_factors_kernel[(case.H * case.N,)](seed, factors, columns, dropout_p, **kinds)
    return factors


def test_compiles_as_one_graph():
    case = Case("compiled", B=1, H=1, N=13, M=11, clusters=2, masks="holes")
    expected = with_gradients(case, kernel_inputs(case), backend="triton")
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    actual = with_gradients(case, kernel_inputs(case), run=compiled, backend="triton")
    assert_equal_but_for_order(actual, expected)


def test_registered_with_torch_library():
    """torch's own check of the schemas, the fake functions and the autograd formula."""
    import_module(f"hf_effattn.ops.{OP}.triton")
    case = Case("opcheck", B=1, H=1, N=7, M=6, clusters=2, topk=2, masks="holes")
    inputs = kernel_inputs(case)
    leaves = [tensor.detach().requires_grad_() for tensor in (inputs.query, inputs.key, inputs.value)]
    masks = inputs.key_mask, inputs.query_mask
    settings = inputs.labels, inputs.key_labels, case.clusters, case.key_clusters, case.topk, *masks, 0.3, 0.0, None
    torch.library.opcheck(torch.ops.hf_effattn.bi_clustered_attention_triton.default, (*leaves, *settings))
