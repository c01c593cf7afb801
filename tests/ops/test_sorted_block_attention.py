"""Attention within sorted blocks: against loops, identities, masks, gradients, the causal forms."""

from dataclasses import replace
from functools import partial
from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.block_cases import CASES, Case, Inputs, attend, make_inputs, with_gradients
from support.closeness import assert_close_to_reference

from hf_effattn.measuring.cost import peak_memory_added
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
                own = [k for k in ranked if labels[k] == labels[q] and k <= q]
                seen = own[-((case.window_blocks - 1) * w + 1) :]
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


@each_case
def test_fast_form_equals_reference(case):
    expected = with_gradients(case, make_inputs(case), backend="reference")
    actual = with_gradients(case, make_inputs(case), backend="batched")
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-12)


@pytest.mark.parametrize("chunk_bytes", [1, 4000])
def test_chunks_do_not_matter(monkeypatch, chunk_bytes):
    """From all blocks of all rows at once down to one block at a time."""
    from hf_effattn.ops.sorted_block_attention import batched

    case = Case("chunks", gated=True, masks="holes", window_blocks=3, B=3)
    expected = with_gradients(case, make_inputs(case))
    monkeypatch.setattr(batched, "CHUNK_BYTES", chunk_bytes)
    actual = with_gradients(case, make_inputs(case))
    for name in expected:
        assert_close_to_reference(name, actual[name], expected[name], rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[10], CASES[14], CASES[21]], **by_name)
def test_dtypes_against_float64(dtype, case):
    rounded = make_inputs(case, dtype)
    expected = with_gradients(case, rounded.to(torch.float64), backend="reference")
    baseline = with_gradients(case, rounded, backend="reference")
    actual = with_gradients(case, rounded, backend="batched")
    for name in expected:
        assert actual[name].dtype == dtype
        assert_close_to_reference(name, actual[name], expected[name], baseline[name], rtol=1e-6)


@pytest.mark.slow_except("True-0.3-reference", "True-0.3-batched")
@each_backend
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck(backend, dropout_p, gated):
    case = Case("small", H=2, key_heads=1, N=7, D=3, Dv=2, clusters=3, masks="holes", gated=gated)
    inputs = make_inputs(case)
    leaves = [leaf.requires_grad_() for leaf in inputs.leaves() if leaf is not None]

    def run(*leaves):
        torch.manual_seed(5)
        q, k, v, *p = leaves
        changed = replace(inputs, query=q, key=k, value=v, membership=p[0] if p else None)
        return attend(case, changed, backend=backend, dropout_p=dropout_p)

    assert torch.autograd.gradcheck(run, leaves)


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
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("masks", ["right", "left", "holes"])
def test_a_padded_row_equals_the_row_alone(backend, masks, strict):
    length = 4 if strict else None
    case = Case("padded", masks=masks, gated=True, strict=strict, causal=strict, block_length=length)
    inputs = make_inputs(case)
    padded = attend(case, inputs, backend=backend)
    mask = inputs.key_mask[-1]
    alone = Inputs(
        *(x[-1:, :, mask] for x in (inputs.query, inputs.key, inputs.value)),
        inputs.membership[-1:, mask],
        cluster_order(inputs.labels[-1:, mask]),
        inputs.labels[-1:, mask],
        length or inputs.block_length[-1:],
        None,
    )
    expected = attend(case, alone, backend=backend)
    torch.testing.assert_close(padded[-1:, :, mask], expected, rtol=0, atol=3e-15)
    assert (padded[-1:, :, ~mask] == 0).all()


@each_backend
@pytest.mark.parametrize("garbage", [1e4, float("inf"), float("nan")])
def test_values_of_masked_rows_change_nothing(backend, garbage):
    case = Case("garbage", masks="right", gated=True)
    clean = with_gradients(case, make_inputs(case), backend=backend)
    inputs = make_inputs(case)
    hidden = ~inputs.key_mask[-1]
    for tensor in (inputs.query, inputs.key, inputs.value):
        tensor[-1, :, hidden] = garbage
    inputs.membership[-1, hidden] = garbage
    dirty = with_gradients(case, inputs, backend=backend)
    for name in clean:
        torch.testing.assert_close(dirty[name], clean[name], rtol=0, atol=0)
        if name != "membership":
            assert (dirty[name][-1, :, hidden] == 0).all()
    assert (dirty["membership"][-1, hidden] == 0).all()


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


def test_float16_scores_beyond_its_range():
    """Products of queries and keys, of 200,000, were made in float16."""
    case = Case("float16", N=12, D=64, Dv=8)
    inputs = make_inputs(case, torch.float16)
    inputs.query, inputs.key = (rows.sign() * 160 for rows in (inputs.query, inputs.key))
    inputs.key = inputs.query.clone()
    results = with_gradients(case, inputs, backend="batched")
    assert all(tensor.isfinite().all() for tensor in results.values())


@pytest.mark.parametrize("case", [CASES[0], CASES[13], CASES[21], CASES[9]], **by_name)
def test_dropout_is_the_same_in_both_forms_and_replays(case):
    results = []
    for backend in (*BACKENDS, "batched"):
        torch.manual_seed(11)
        results.append(with_gradients(case, make_inputs(case), backend=backend, dropout_p=0.4))
    for name in results[0]:
        assert_close_to_reference(name, results[1][name], results[0][name], rtol=1e-12)
        assert torch.equal(results[1][name], results[2][name])
    assert not torch.equal(results[1]["output"], attend(case, make_inputs(case), dropout_p=0.4))


def test_dropout_keeps_the_mean():
    case = Case("dropout", B=1, H=1, N=13)
    inputs = make_inputs(case)
    torch.manual_seed(0)
    draws = torch.stack([attend(case, inputs, dropout_p=0.2) for _ in range(1000)])
    error = (draws.mean(dim=0) - attend(case, inputs)).abs() / (draws.std(dim=0) / 1000**0.5)
    assert error.max() < 4.5  # standard errors, over 104 values


@pytest.mark.parametrize("case", [CASES[0], CASES[21]], **by_name)
def test_compiles_as_one_graph(case):
    expected = with_gradients(case, make_inputs(case))
    compiled = torch.compile(with_gradients_of_output, fullgraph=True, backend="aot_eager")
    inputs = make_inputs(case)
    leaves = {name: getattr(inputs, name) for name in ("query", "key", "value", "membership")}
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items() if leaf is not None}
    output = compiled(case, inputs)
    torch.testing.assert_close(output.detach(), expected["output"], rtol=0, atol=0)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, list(leaves.values()), weights)
    for name, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def with_gradients_of_output(case, inputs):
    return attend(case, inputs)


@pytest.mark.parametrize("gated", [False, True])
def test_registered_with_torch_library(gated):
    case = Case("opcheck", N=11, masks="holes", gated=gated)
    inputs = make_inputs(case)
    leaves = [None if leaf is None else leaf.requires_grad_() for leaf in inputs.leaves()]
    settings = (inputs.order, inputs.block_length, 2, False, None, inputs.key_mask)
    arguments = (*leaves[:3], *settings, leaves[3], 0.3, 0.0, None)
    torch.library.opcheck(torch.ops.hf_effattn.sorted_block_attention.default, arguments)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 6), st.integers(1, 5)),
    clusters=st.integers(1, 12),
    block_length=st.one_of(st.none(), st.integers(1, 45)),
    window_blocks=st.integers(1, 6),
    kind=st.sampled_from(["plain", "causal", "strict"]),
    gated=st.booleans(),
    masks=st.sampled_from(["none", "right", "left", "holes", "row", "few"]),
    seed=st.integers(0, 2**16),
)
def test_any_sizes(sizes, clusters, block_length, window_blocks, kind, gated, masks, seed):
    B, N, D, Dv = sizes
    case = Case(
        "any",
        B=B,
        N=N,
        D=D,
        Dv=Dv,
        clusters=clusters,
        block_length=block_length,
        window_blocks=window_blocks,
        causal=kind != "plain",
        strict=kind == "strict",
        gated=gated,
        masks=masks,
    )
    expected = with_gradients(case, make_inputs(case, seed=seed), backend="reference")
    actual = with_gradients(case, make_inputs(case, seed=seed), backend="batched")
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-13)


def test_memory_grows_with_length_not_with_its_square():
    """Bytes alive at the peak of forward and backward, counted by the allocator, with blocks of one length."""
    peaks = []
    for N in (2048, 4096):
        case = Case("memory", B=1, H=2, N=N, D=16, Dv=16, clusters=N // 64)
        inputs = make_inputs(case, torch.float32)
        peaks.append(peak_memory_added(partial(with_gradients, case, inputs), torch.device("cpu"))[1])
    assert 0 < peaks[1] < 2.2 * peaks[0]
    assert peaks[1] < 4096 * 4096 * 4  # one head's matrix would already be more


def test_order_is_stable_and_puts_masked_words_last():
    labels = torch.tensor([[2, 0, 2, 1, 0, 1]])
    assert cluster_order(labels).tolist() == [[1, 4, 3, 5, 0, 2]]
    mask = torch.tensor([[True, False, True, True, True, True]])
    assert cluster_order(labels, mask=mask).tolist() == [[4, 3, 5, 0, 2, 1]]
    largest = torch.tensor([[255, 0, 255, 3]], dtype=torch.uint8)
    assert cluster_order(largest, mask=torch.tensor([[False, True, True, True]])).tolist() == [[1, 3, 2, 0]]


def test_mistakes_in_labels_to_sort_are_named():
    labels = torch.zeros(2, 5).long()
    with pytest.raises(TypeError, match=r"labels must be integers, got torch\.float32"):
        cluster_order(labels.float())
    with pytest.raises(ValueError, match=r"labels must have 2 dimensions \(B, N\), got \(5,\)"):
        cluster_order(labels[0])
    with pytest.raises(TypeError, match="mask must be boolean"):
        cluster_order(labels, mask=torch.ones(2, 5).long())
    with pytest.raises(ValueError, match=r"mask must have shape \(B, length\) = \(2, 5\)"):
        cluster_order(labels, mask=torch.ones(2, 4).bool())


@each_backend
def test_mistakes_are_named(backend):
    case = Case("mistakes", masks="right")
    inputs = make_inputs(case)
    with pytest.raises(ValueError, match=r"every row of order must be a permutation of 0 .. 36"):
        attend(case, replace(inputs, order=torch.zeros_like(inputs.order)), backend=backend)
    with pytest.raises(ValueError, match="words that count first"):
        attend(case, replace(inputs, order=cluster_order(inputs.labels)), backend=backend)
    other = 4 - inputs.labels
    with pytest.raises(ValueError, match="order must be stably sorted by labels"):
        attend(case, inputs, backend=backend, causal=True, labels=other)
    with pytest.raises(ValueError, match="block_length must be at least 1"):
        attend(case, inputs, backend=backend, block_length=torch.tensor([3, 0]))
    with pytest.raises(ValueError, match="block_length must be at least 1"):
        attend(case, inputs, backend=backend, block_length=0)
    with pytest.raises(ValueError, match="window_blocks must be at least 1"):
        attend(case, inputs, backend=backend, window_blocks=0)
    with pytest.raises(ValueError, match="need causal=True"):
        attend(case, inputs, backend=backend, labels=inputs.labels)
    with pytest.raises(ValueError, match=r"order must be \("):
        attend(case, replace(inputs, order=inputs.order[:1]), backend=backend)
    with pytest.raises(TypeError, match="order must be integers"):
        attend(case, replace(inputs, order=inputs.order.double()), backend=backend)
    with pytest.raises(ValueError, match="membership must be"):
        attend(case, inputs, backend=backend, membership=torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="membership must share dtype"):
        attend(case, inputs, backend=backend, membership=torch.ones(2, 37, 4))
    with pytest.raises(ValueError, match="as long as query"):
        attend(case, replace(inputs, key=inputs.key[:, :, 1:], value=inputs.value[:, :, 1:]), backend=backend)
