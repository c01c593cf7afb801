"""What every op with gradients promises in its forms for a CPU, whatever it computes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from packaging.version import parse
from support.backward_ops import check_ops
from support.closeness import assert_close_to_reference
from support.op_cases import (
    ATTENTION,
    BLOCKS,
    CAUSAL,
    CLUSTERED,
    OPS,
    SLICES,
    each,
    hidden_rows,
    last_item,
    leaves_of,
    rows_of_tokens,
    to_dtype,
    with_gradients,
)
from support.products import product_dtypes
from torch.fx.experimental.proxy_tensor import make_fx

from hf_effattn.measuring.cost import peak_memory_added
from hf_effattn.ops.bi_clustered_attention import reference as bi_clustered_reference
from hf_effattn.ops.causal_clustered_attention import batched as causal
from hf_effattn.ops.causal_clustered_attention import segment_batches
from hf_effattn.ops.shared import cluster_table, gradients, precision, row_chunks
from hf_effattn.ops.sorted_block_attention import batched as sorted_blocks

BACKENDS = ("reference", "batched")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


# Of causal attention, whose reference takes long: what no other case shows.
CAUSAL_QUICK = (
    *("plain", "one_token", "shorter_than_the_window", "first_token_beyond_the_window", "no_window", "odd_dimensions"),
    *("segments_of_one_token", "one_cluster_and_dropout", "one_cluster_some_heads_exact", "no_iterations"),
    *("more_clusters_than_queries", "topk_beyond_keys", "all_heads_exact", "some_heads_exact_and_holes"),
    *(
        "some_heads_exact_and_sinks",
        "row_fully_padded",
        "sinks_of_grouped_heads_and_holes",
        "dropout_and_left_padding",
    ),
)


def quick(op, case):
    """The causal methods are one code with more or less in it."""
    if op in CAUSAL:
        return case.name in (CAUSAL_QUICK if op is CAUSAL[2] else ("plain", "low"))
    return True


each_typical = partial(each, cases=lambda op: op.typical, quick=quick)


@each(OPS, lambda op: op.cases, quick)
def test_the_fast_form_equals_the_reference(op, case):
    inputs = op.make(case)
    actual, expected = (with_gradients(op, case, inputs, backend=backend) for backend in ("batched", "reference"))
    for name in expected:
        if expected[name].is_floating_point():
            assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)
        else:
            assert torch.equal(actual[name], expected[name])


@pytest.mark.slow_except("*-torch.bfloat16-*")
@pytest.mark.parametrize(
    ("dtype", "by_instructions"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)],
    ids=str,
)
@each(OPS, lambda op: op.low_precision)
def test_low_precision_is_as_good_as_plain_pytorch(op, case, dtype, by_instructions, monkeypatch):
    monkeypatch.setattr(precision, "CPU_MULTIPLIES_BFLOAT16", by_instructions)
    rounded = op.make(case, dtype)
    expected = with_gradients(op, case, to_dtype(rounded, torch.float64), backend="reference")
    baseline = with_gradients(op, case, rounded, backend="reference")
    for name, actual in with_gradients(op, case, rounded, backend="batched").items():
        if actual.is_floating_point():
            assert actual.dtype in (dtype, torch.float32 if name == "lse" else dtype)
            # Ours are the same numbers in torch 2.6 and 2.13; plain PyTorch happens to be closer in 2.6.
            factor = 2.0 if parse(torch.__version__) >= parse("2.7") else 3.0
            assert_close_to_reference(name, actual, expected[name], baseline[name], rtol=1e-6, factor=factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@each(OPS, lambda op: op.typical[:1], quick)
def test_products_are_in_float32_where_a_processor_has_no_others(op, case, dtype, monkeypatch):
    """In bfloat16 they would take some 30 times as long."""
    monkeypatch.setattr(precision, "CPU_MULTIPLIES_BFLOAT16", False)
    monkeypatch.setattr(gradients, "is_followed", lambda arguments: False)  # what runs inside of the op is seen
    options = {"dropout_p": 0.3} if op in ATTENTION else {}
    if op is CLUSTERED[2]:
        options["exact_heads"] = torch.tensor([[True, False], [False, True]])
    with product_dtypes() as dtypes:
        op.call(case, op.make(case, dtype), backend="batched", **options)
    assert set(dtypes) == {torch.float32}


@each([op for op in OPS if op.small is not None], lambda op: [op.small])
def test_gradients_of_the_reference_are_those_of_differences(op, case, monkeypatch):
    # A lift is no function of the inputs to the gradient, which holds it fixed: here it is 0.
    monkeypatch.setattr(bi_clustered_reference, "LARGEST_VARIANCE_CORRECTION", 0.0)
    inputs, options = op.make(case), {"dropout_p": 0.3} if op in ATTENTION else {}
    names = leaves_of(inputs)

    def run(*leaves):
        torch.manual_seed(5)
        outputs = op.call(case, inputs | dict(zip(names, leaves, strict=True)), backend="reference", **options)
        return tuple(x for x in outputs.values() if x.is_floating_point())

    assert torch.autograd.gradcheck(run, [inputs[name].requires_grad_() for name in names])


@pytest.mark.slow_except("*-batched", "clustered_attention-*")
@each_backend
@each_typical(OPS)
def test_what_masked_rows_hold_changes_nothing(op, case, backend):
    inputs = op.make(case)
    clean = with_gradients(op, case, inputs, backend=backend)
    for garbage in (float("nan"), float("inf"), 1e4)[: 1 if backend == "reference" else 3]:
        dirty = dict(inputs)
        for name in leaves_of(inputs):
            if (hidden := hidden_rows(name, inputs)) is not None:
                dirty[name] = inputs[name].clone()
                rows_of_tokens(name, dirty[name])[hidden] = garbage
        for name, tensor in with_gradients(op, case, dirty, backend=backend).items():
            torch.testing.assert_close(tensor, clean[name], rtol=0, atol=0)
    for name, tensor in clean.items():
        of = name.removeprefix("gradient of ")
        if (hidden := hidden_rows(of, inputs)) is not None:
            assert not rows_of_tokens(of, tensor)[hidden].any()


@pytest.mark.parametrize(
    ("masks", "backend"), [("right", "batched"), ("left", "batched"), ("holes", "batched"), ("right", "reference")]
)
@each_typical(OPS)
def test_a_padded_batch_gives_what_its_texts_give(op, case, backend, masks):
    if op is SLICES and masks != "right":
        return  # slices are counted from the first place of the batch
    case = replace(case, masks=masks)
    inputs = op.make(case)
    padded, alone = op.call(case, inputs, backend=backend), op.call(case, last_item(inputs), backend=backend)
    for name, expected in alone.items():
        hidden, actual = hidden_rows(name, inputs), padded[name][-1:]
        if name == "pooled":
            actual = actual[:, :, : expected.shape[2]]
        elif hidden is not None:
            actual, expected = (rows_of_tokens(name, x) for x in (actual, expected))
            actual = actual[:, ~hidden[-1]]
        torch.testing.assert_close(actual, expected, rtol=0, atol=4e-15)


@pytest.mark.slow_except("*-batched", "clustered_attention-*")
@each_backend
@each_typical(OPS)
def test_a_text_of_padding_alone_gives_zeros_and_no_gradient(op, case, backend):
    """As torch's attention does; also where the keys alone are masked."""
    case = replace(case, masks="row")
    inputs = op.make(case)
    for given in [inputs] + [inputs | {"query_mask": None}] * ("query_mask" in inputs):
        passes = with_gradients(op, case, given, backend=backend)
        for name in (*op.call(case, given), *(f"gradient of {name}" for name in leaves_of(given))):
            if len(passes[name]) == case.B and "position" not in name:
                assert not passes[name][-1].any(), name
                assert passes[name][0].any(), name


@each_backend
@each_typical(OPS)
def test_large_scores_stay_finite(op, case, backend):
    inputs = op.make(case, torch.float32)
    for name in ("query", "words"):
        if name in inputs:
            inputs[name] = inputs[name] * 300
    assert all(tensor.isfinite().all() for tensor in with_gradients(op, case, inputs, backend=backend).values())


@each_typical([op for op in OPS if op.registered != "causal_clustered_attention"])
def test_float16_holds_scores_beyond_its_range(op, case):
    """Products beyond 65,504, which the scale or the length of words brings back into range."""
    case = replace(case, d=64) if "words" in op.make(case) else replace(case, D=64)
    inputs = op.make(case, torch.float16)
    left, right = ("centroids", "words") if "words" in inputs else ("query", "key")
    inputs[left], inputs[right] = inputs[left] * 100, inputs[right].abs() * 100
    results = with_gradients(op, case, inputs, backend="batched")
    assert all(tensor.isfinite().all() for tensor in results.values())


@each_typical(OPS)
def test_strides_do_not_matter_and_inputs_are_left_alone(op, case):
    inputs = op.make(case)
    expected = with_gradients(op, case, inputs)
    kept = op.make(case)
    assert all(torch.equal(inputs[name], x) for name, x in kept.items() if isinstance(x, torch.Tensor))
    names = leaves_of(inputs)
    apart = {name: torch.stack([inputs[name]] * 3, dim=-1)[..., 1] for name in names}
    for name, tensor in with_gradients(op, case, inputs | apart).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=4e-15)


# How many heads, segments, blocks, rows of them or scores are computed together.
TOGETHER = (
    *((op, row_chunks, "CHUNK_BYTES", 1) for op in CLUSTERED),
    *((op, cluster_table, "SCORES_BYTES", 1) for op in CLUSTERED[1:]),
    *((BLOCKS, sorted_blocks, "CHUNK_BYTES", size) for size in (1, 4000)),
    *(
        (CAUSAL[2], module, name, size)
        for module, name, size in ((segment_batches, "BATCH_NUMBERS", 300), (causal, "SQUARE", 3))
    ),
)


@pytest.mark.parametrize(("op", "module", "name", "size"), TOGETHER, ids=lambda x: getattr(x, "__name__", str(x)))
def test_how_much_is_done_at_once_changes_nothing(op, module, name, size, monkeypatch):
    for case in op.typical:
        inputs = op.make(case)
        expected = with_gradients(op, case, inputs, dropout_p=0.2)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, size)
            actual = with_gradients(op, case, inputs, dropout_p=0.2)
        for tensor in expected:
            assert_close_to_reference(tensor, actual[tensor], expected[tensor], rtol=1e-12)


@each_typical(ATTENTION)
def test_dropout_is_the_same_in_both_forms_and_replays(op, case):
    inputs = op.make(case)
    expected = with_gradients(op, case, inputs, backend="reference", dropout_p=0.4)
    actual, again = (with_gradients(op, case, inputs, backend="batched", dropout_p=0.4) for _ in range(2))
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)
        assert torch.equal(actual[name], again[name])
    other = with_gradients(op, case, inputs, seed=5, backend="batched", dropout_p=0.4)
    assert not torch.equal(other["output"], actual["output"])


@each([*CLUSTERED, SLICES, BLOCKS], lambda op: [op.cases[0]], lambda op, case: op is not CLUSTERED[2])
def test_dropout_keeps_the_mean(op, case):
    """Of one text that is in a batch very often, as each has draws of its own."""
    case = replace(case, B=1, H=1, N=13)
    inputs, texts = op.make(case), 300
    repeated = {name: x if x is None else x.expand(texts, *x.shape[1:]) for name, x in inputs.items()}
    torch.manual_seed(0)
    draws = op.call(case, repeated, dropout_p=0.2)["output"]
    error = (draws.mean(dim=0) - op.call(case, inputs)["output"][0]).abs() / (draws.std(dim=0) / texts**0.5)
    assert error.max() < 5.5  # standard errors


@each(OPS, lambda op: op.typical[:1], quick)
def test_compiles_as_one_graph(op, case):
    inputs = op.make(case)
    expected = with_gradients(op, case, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(op.call, fullgraph=True, backend="aot_eager")
    for name, tensor in with_gradients(op, case, inputs, run=compiled).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=4e-15)


@each_typical(OPS)
def test_registered_with_torch_library(op, case):
    """torch's own checks of what each op, forward and backward, says of its arguments and promises to the compiler."""
    options, inputs = {"dropout_p": 0.3} if op in ATTENTION else {}, op.make(case, torch.bfloat16)
    called = check_ops(lambda: with_gradients(op, case, inputs, backend="batched", **options))
    assert called == [f"hf_effattn::{op.registered}", f"hf_effattn::{op.registered}_backward"]


@each(OPS, lambda op: op.typical[:1], quick)
def test_of_tensors_without_numbers_it_tells_what_it_would_return(op, case):
    inputs = op.make(case, torch.float32)
    without = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    told = op.call(case, without)
    for name, output in op.call(case, inputs).items():
        without = told[name]
        assert without.is_meta
        assert (without.shape, without.stride(), without.dtype) == (output.shape, output.stride(), output.dtype)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@each(OPS, lambda op: op.typical[:1], quick)
def test_a_trace_without_gradients_holds_it_as_one_op(op, case, pre_dispatch):
    inputs = op.make(case, torch.float32)

    def call(leaf):
        return tuple(op.call(case, inputs | {leaves_of(inputs)[0]: leaf}).values())

    graph = make_fx(call, pre_dispatch=pre_dispatch)(inputs[leaves_of(inputs)[0]]).graph
    assert f"hf_effattn.{op.registered}.default" in {str(node.target) for node in graph.nodes}


@each([op for op in OPS if op.long is not None], lambda op: [op.long(2048)])
def test_memory_grows_with_length_not_with_its_square(op, case):
    """Bytes alive at the peak of forward and backward, counted by the allocator: doubling N at most doubles them."""
    peaks = []
    for longer in (case, op.long(4096)):
        step = partial(with_gradients, op, longer, op.make(longer, torch.float32))
        peaks.append(peak_memory_added(step, torch.device("cpu"))[1])
    assert 0 < peaks[1] < 2.2 * peaks[0]
