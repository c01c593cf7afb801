"""The composite attention of the Composite Slice Transformer: equations, causality, padding, identities."""

from functools import partial
from math import ceil, erf, exp, sqrt

import pytest
import torch
import torch.nn.functional as F
from support.closeness import assert_close_to_reference
from support.cst_models import LENGTH, VARIANTS, tiny_model, tokens

from hf_effattn.measuring.cost import peak_memory_added
from hf_effattn.models import CSTForCausalLM, CSTModel

every_variant = pytest.mark.parametrize("variant", VARIANTS)
# All but those beyond the paper (more levels, global tokens) and those outside the attention (norms).
TWO_LEVELS = [
    "paper", "half_extension", "whole_extension", "max_pooling", "linear_pooling", "parallel", "global_local", "mlp",
    "mlp_global_local", "separate_projections", "absolute_positions", "slices_of_one", "one_slice",
]  # fmt: skip


def rows_times(rows, linear, with_bias=True):
    """`rows W + b` for lists of rows, one product at a time."""
    weight, bias = linear.weight.tolist(), linear.bias.tolist()
    return [
        [sum(x * w for x, w in zip(row, column, strict=True)) + (b if with_bias else 0.0) for column, b in
         zip(weight, bias, strict=True)]
        for row in rows
    ]  # fmt: skip


def add(first, second):
    return [[x + y for x, y in zip(a, b, strict=True)] for a, b in zip(first, second, strict=True)]


def attend(query, keys, values, heads):
    """softmax(q K^T / sqrt(d_h)) V of every head for one query (Eq. 2)."""
    size = len(query) // heads
    output = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        weights = [exp(sum(a * b for a, b in zip(query[part], key[part], strict=True)) / sqrt(size)) for key in keys]
        total = sum(weights)
        output += [sum(w * v[part][i] for w, v in zip(weights, values, strict=True)) / total for i in range(size)]
    return output


def mix_places(mlp, rows, causal):
    """The two-layer MLP over the places of a slice, for every channel of its rows (A.6.2)."""
    L = mlp.slice_length
    reads, writes = mlp.reader.weight.tolist(), mlp.writer.weight.tolist()
    units = range(len(reads))
    mixed = [[0.0] * len(rows[0]) for _ in rows]
    for channel in range(len(rows[0])):
        column = [row[channel] for row in rows] + [0.0] * (L - len(rows))
        hidden = []
        for j in units:
            last = j * L // len(units) if causal else L - 1
            total = sum(reads[j][t] * column[t] for t in range(last + 1)) + mlp.reader.bias[j].item()
            hidden.append(total * (1 + erf(total / sqrt(2))) / 2)
        for t in range(len(rows)):
            written = [j for j in units if not causal or j * L // len(units) <= t]
            mixed[t][channel] = sum(writes[t][j] * hidden[j] for j in written) + mlp.writer.bias[t].item()
    return mixed


def composite_slice_attention(module, x, local_table, global_table, causal):
    """Lee 2023, Eq. 8–15, token by token: `x` is one sequence as a list of rows, so are the tables, if any."""
    L, e, heads = module.level_lengths[0], module.extension, module.num_heads
    to, to_global = module.projections, module.global_projections or module.projections
    N, width = len(x), len(x[0])
    starts = list(range(0, N, L))

    def local(inputs):
        if module.mlp is not None:
            value = rows_times(inputs, to.value)
            return [row for start in starts for row in mix_places(module.mlp, value[start : start + L], causal)]
        query, key, value = (rows_times(inputs, w) for w in (to.query, to.key, to.value))
        table = local_table or [[0.0] * width] * (L + 2 * e)
        of_query = rows_times(table[e : e + L], to.query, with_bias=False)
        of_key = rows_times(table, to.key, with_bias=False)
        output = []
        for i in range(N):
            start = i // L * L
            window = [
                t for t in range(start - e, start + L + e)
                if 0 <= t < N and (not causal or t <= i)
            ]  # fmt: skip
            places = add([key[t] for t in window], [of_key[t - start + e] for t in window])
            output.append(attend(add([query[i]], [of_query[i - start]])[0], places, [value[t] for t in window], heads))
        return output

    def pooled(rows):
        slices = [rows[start : start + L] for start in starts]
        if module.pooling == "max":
            return [[max(row[d] for row in part) for d in range(width)] for part in slices]
        if module.pooling == "linear":
            filled = [[x for row in part for x in row] + [0.0] * width * (L - len(part)) for part in slices]
            return rows_times(filled, module.pools[0].projection)
        return [[sum(row[d] for row in part) / len(part) for d in range(width)] for part in slices]

    def across(slices):
        placed = add(slices, global_table[: len(slices)]) if global_table else slices
        query, key = rows_times(placed, to_global.query), rows_times(placed, to_global.key)
        value = rows_times(slices, to_global.value)
        if not causal:
            return [attend(q, key, value, heads) for q in query]
        # The query of the slice before, and only keys of slices before: Q_{g,t-1}, diagonal masked.
        return [[0.0] * width] + [attend(query[t - 1], key[:t], value[:t], heads) for t in range(1, len(slices))]

    if module.composition == "local-global":
        of_tokens = local(x)
        of_slices = across(pooled(of_tokens))
    else:
        of_slices = across(pooled(x))
        inner = add(x, [of_slices[i // L] for i in range(N)]) if module.composition == "global-local" else x
        of_tokens = local(inner)
    return rows_times(add(of_tokens, [of_slices[i // L] for i in range(N)]), module.output)


@pytest.mark.parametrize("model_class", [CSTModel, CSTForCausalLM], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("variant", TWO_LEVELS)
def test_equals_the_papers_equations_written_as_loops(variant, model_class):
    model = tiny_model(model_class, variant)
    module = getattr(model, "cst", model).layers[0].attention
    positions = getattr(model, "cst", model).positions
    tables = None if positions is None else positions()
    x = torch.randn(1, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    actual, _ = module(x, tables, None)
    causal = model_class is CSTForCausalLM
    lists = {} if tables is None else {level: table.tolist() for level, table in tables.items()}
    expected = composite_slice_attention(module, x[0].tolist(), lists.get(0), lists.get(1), causal)
    torch.testing.assert_close(actual[0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-14)


@pytest.mark.parametrize("mistake", ["no shift", "own slice as key"])
def test_the_perturbation_test_finds_the_leaks_it_is_for(mistake, monkeypatch):
    """Negative controls: without the shift of the query a slice sees the mean of its own later tokens."""
    model = tiny_model(CSTForCausalLM)
    attention = type(model.cst.layers[0].attention)
    if mistake == "no shift":
        monkeypatch.setattr(attention, "_seen_by_slices", lambda self, upper: upper)
    else:
        # The query is shifted as it must be, but its keys reach to the slice itself.
        exact = attention._exact

        def one_more_key(self, query, key, value, mask, *, causal=False):
            visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
            weights = (query @ key.transpose(2, 3) * query.shape[3] ** -0.5).masked_fill(~visible, -torch.inf)
            result = (weights.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
            return result if causal else exact(self, query, key, value, mask)

        monkeypatch.setattr(attention, "_exact", one_more_key)
    ids = tokens()
    before = model(ids).logits
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 7) % 49 + 1
    assert not torch.equal(model(changed).logits[:, 4:6], before[:, 4:6])


@pytest.mark.slow_except("paper|three_levels|global_tokens|*_pooling|mlp_global_local|full_*")
@every_variant
def test_what_stands_in_padding_changes_nothing(variant):
    """Neither the outputs nor the gradients, whatever the masked embeddings hold."""
    results = []
    for garbage in (0.0, float("nan"), float("inf")):
        model = tiny_model(CSTModel, variant)
        words = torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        mask = torch.ones(2, LENGTH, dtype=torch.long)
        mask[0, 15:], mask[1, :6] = 0, 0
        words[mask == 0] = garbage
        output, states = model(inputs_embeds=words, attention_mask=mask, output_hidden_states=True).to_tuple()
        for state in (output, *states):
            assert (state[mask == 0] == 0).all()
        output.sin().sum().backward()
        results.append([output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for dirty in results[1:]:
        for clean, other in zip(results[0], dirty, strict=True):
            assert torch.equal(clean, other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", ["full", "full_with_positions_of_keys"])
def test_without_slices_it_is_the_attention_of_a_transformer(variant, causal):
    model = tiny_model(CSTForCausalLM if causal else CSTModel, variant)
    model = getattr(model, "cst", model)
    module, tables = model.layers[0].attention, None if model.positions is None else model.positions()
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    placed = x if tables is None else x + tables[0][:13]
    to = module.projections
    query, key, value = (module._heads(rows) for rows in (to.query(placed), to.key(placed), to.value(x)))
    full = F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2).flatten(2)
    assert_close_to_reference("output", module(x, tables, None)[0], module.output(full), rtol=1e-14)


def test_a_global_token_sees_and_is_seen_at_full_resolution(monkeypatch):
    model = tiny_model(CSTModel, "global_tokens", position_embedding="absolute", composition="parallel")
    module = model.layers[0].attention
    x = torch.randn(1, LENGTH, 16, dtype=torch.float64)
    local = module._local(0, x, None, None)[0]
    query, key, value = module._query_key_value(0, x)
    full = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    assert_close_to_reference("sees", module._with_global_tokens(local, x, None)[:, :2], full[:, :2], rtol=1e-14)
    output, _ = module(x, None, None)
    monkeypatch.setattr(module, "_with_global_tokens", lambda local, rows, mask: local)
    plain, _ = module(x, None, None)
    more = F.linear((full - local)[:, :2], module.output.weight)
    assert_close_to_reference("in the whole", output[:, :2] - plain[:, :2], more, rtol=1e-12)
    assert torch.equal(output[:, 2:], plain[:, 2:])
    changed = x.clone()
    changed[:, 1] += 1.0
    assert (module._local(0, changed, None, None)[0][:, -4:] != local[:, -4:]).all()


def test_a_level_more_shortens_the_last_attention():
    """Three levels: the last one attends among slices of 8 tokens, not of 4."""
    model = tiny_model(CSTModel, "three_levels")
    assert [len(table) for table in model.positions().values()] == [8, 2, ceil(64 / 8)]


def test_memory_grows_with_length_not_with_its_square():
    peaks = []
    for N in (2048, 4096):
        model = tiny_model(CSTModel, slice_length=(16, 256), max_position_embeddings=4096).float()
        ids = tokens(1, N)
        step = partial(lambda model, ids: model(ids)[0].sum().backward(), model, ids)
        peaks.append(peak_memory_added(step, torch.device("cpu"))[1])
    assert 0 < peaks[1] < 2.2 * peaks[0]
