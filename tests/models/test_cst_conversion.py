"""Attention of converted models: the merged form against one dense softmax, causality, padding, caches."""

from math import log

import pytest
import torch
import torch.nn.functional as F
from support.closeness import assert_close_to_reference
from support.products import product_dtypes

from hf_effattn.ops.shared import precision
from hf_effattn.patching.methods.cst.attention import (
    Slicing,
    first_and_last_tokens,
    merged_attention,
    merged_over_cache,
    summed_attention,
)

N, L = 27, 4


def rows(seed=0, B=2, H=2, length=N, D=8):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, H, length, D, dtype=torch.float64, generator=generator) for _ in range(3))


def mask_of(kind):
    mask = torch.ones(2, N, dtype=torch.bool)
    if kind == "right":
        mask[1, 14:] = False
    elif kind == "holes":
        mask = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) > 0.3
    return None if kind == "none" else mask


def merged_with_loops(query, key, value, b, h, extension, causal, attend_ends, mask):
    """One softmax per token over window, ends and the means of the other slices."""
    mask = torch.ones(2, N, dtype=torch.bool) if mask is None else mask
    query, key, value, token = query[b, h], key[b, h], value[b, h], mask[b]
    valid = token.nonzero()[:, 0].tolist()
    ends = {valid[0]} | (set() if causal else {valid[-1]}) if attend_ends else set()
    scale = query.shape[1] ** -0.5
    slices = [[t for t in range(first, min(first + L, N)) if token[t]] for first in range(0, N, L)]
    output = torch.zeros(N, value.shape[1], dtype=torch.float64)
    for i in valid:
        s, start = i // L, i // L * L
        stop = start + L + (0 if causal else extension)
        seen = [t for t in valid if start - extension <= t < stop or t in ends]
        seen = [t for t in seen if not causal or t <= i]
        scores = [query[i] @ key[t] * scale for t in seen]
        values = [value[t] for t in seen]
        reach = 1 if extension == L else 0
        coarse_query = query[i] if causal else query[slices[s]].mean(dim=0)
        for t, members in enumerate(slices):
            allowed = t < s - reach if causal else abs(t - s) > reach
            members = [t for t in members if t not in ends]  # ends are seen one by one
            if members and allowed:
                scores.append(coarse_query @ key[members].mean(dim=0) * scale + log(len(members)))
                values.append(value[members].mean(dim=0))
        output[i] = torch.stack(scores).softmax(dim=0) @ torch.stack(values)
    return output


@pytest.mark.parametrize("kind", ["none", "right", "holes"])
@pytest.mark.parametrize("attend_ends", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ratio", [1, 3])
def test_merged_form_is_one_softmax(ratio, causal, attend_ends, kind):
    query, key, value = rows()
    mask = mask_of(kind)
    slicing = {"slice_length": L, "extension_ratio": ratio, "causal": causal, "attend_ends": attend_ends}
    actual = merged_attention(query, key, value, Slicing(**slicing, key_mask=mask))
    for b in range(2):
        for h in range(2):
            expected = merged_with_loops(query, key, value, b, h, (ratio - 1) * L // 2, causal, attend_ends, mask)
            torch.testing.assert_close(actual[b, h], expected, rtol=0, atol=4e-15)


@pytest.mark.parametrize("causal", [False, True])
def test_whatever_a_window_covers_is_exact(causal):
    """So are slices of one token, whose means are the tokens themselves."""
    query, key, value = rows()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    for length, ratio in ((N, 1), (14, 3), (1, 1)):
        actual = merged_attention(
            query, key, value, Slicing(slice_length=length, extension_ratio=ratio, causal=causal)
        )
        assert_close_to_reference("output", actual, expected, rtol=1e-14)


@pytest.mark.parametrize("form", ["merged", "summed"])
@pytest.mark.parametrize("ratio", [1, 3])
def test_causal_forms_never_look_ahead(form, ratio):
    def run(query, key, value):
        slicing = Slicing(slice_length=L, extension_ratio=ratio, causal=True, attend_ends=form == "merged")
        if form == "merged":
            return merged_attention(query, key, value, slicing)
        return summed_attention(query, key, value, project, slicing)

    def project(embeddings):
        heads = embeddings.unflatten(-1, (2, -1)).transpose(1, 2)
        return heads, heads.roll(1, dims=-1), heads.flip(-1)

    tensors = rows()
    before = run(*tensors)
    for t in range(N):
        changed = [tensor.clone() for tensor in tensors]
        for tensor in changed:
            tensor[:, :, t] += 2.0
        after = run(*changed)
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert not torch.equal(after[:, :, t], before[:, :, t])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_products_are_in_float32_where_a_processor_has_no_others(causal, dtype, monkeypatch):
    monkeypatch.setattr(precision, "CPU_MULTIPLIES_BFLOAT16", False)
    tensors = [tensor.to(dtype).requires_grad_() for tensor in rows()]
    with product_dtypes() as dtypes:
        output = merged_attention(*tensors, Slicing(slice_length=L, causal=causal))
        output.sum().backward()
        if causal:
            last = [tensor.detach() for tensor in (tensors[0][:, :, -1:], *tensors[1:])]
            after = merged_over_cache(*last, None, Slicing(slice_length=L, causal=True))
            torch.testing.assert_close(after, output[:, :, -1:], rtol=0, atol=2e-2)
            assert after.dtype == dtype
    assert output.dtype == dtype
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("causal", [False, True])
def test_padding_has_no_influence_and_no_gradient(causal):
    mask = mask_of("right")
    clean, dirty = [tensor.requires_grad_() for tensor in rows()], []
    for tensor in clean:
        other = tensor.detach().clone()
        other[1, :, 14:] = float("nan")
        dirty.append(other.requires_grad_())
    outputs = [merged_attention(*x, Slicing(slice_length=L, causal=causal, key_mask=mask)) for x in (clean, dirty)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.sin().sum().backward()
    for first, second in zip(clean, dirty, strict=True):
        assert torch.equal(first.grad, second.grad)
        assert (second.grad[1, :, 14:] == 0).all()
    alone = merged_attention(*(x.detach()[1:, :, :14] for x in clean), Slicing(slice_length=L, causal=causal))
    assert_close_to_reference("padded", outputs[0][1:, :, :14].detach(), alone, rtol=1e-14)


def test_an_item_of_padding_alone_gives_zeros():
    mask = torch.tensor([True, False])[:, None].expand(2, N)
    tensors = [tensor.requires_grad_() for tensor in rows()]
    output = merged_attention(*tensors, Slicing(slice_length=L, key_mask=mask))
    output.sum().backward()
    assert (output[1] == 0).all()
    assert all((tensor.grad[1] == 0).all() for tensor in tensors)


def test_the_ends_are_the_first_and_the_last_token():
    mask = torch.tensor([[False, True, True, False, True, False], [True, False, False, False, False, False]])
    query = torch.zeros(2, 1, 6, 4)
    assert first_and_last_tokens(mask, query, causal=False).int().tolist() == [[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert first_and_last_tokens(mask, query, causal=True).int().tolist() == [[0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def position_terms(ratio, H=2, D=8):
    generator = torch.Generator().manual_seed(7)
    window, slices = L + (ratio - 1) * L, -(-N // L)

    def terms(*sizes):
        return tuple(torch.randn(H, size, D, dtype=torch.float64, generator=generator) for size in sizes)

    return terms(L, window), terms(slices, slices)


def test_position_terms_are_added_to_queries_and_keys():
    """In the own slice those of its places, among the slices those of the slices: here with one neighbour's half."""
    query, key, value = rows()
    local, coarse = position_terms(2)
    slicing = Slicing(slice_length=L, extension_ratio=2, attend_ends=False, local_terms=local, slice_terms=coarse)
    actual = merged_attention(query, key, value, slicing)
    slice_of = torch.arange(N) // L
    scale = 8**-0.5
    for i in (0, 9, 26):
        s = int(slice_of[i])
        near = [t for t in range(s * L - 2, s * L + L + 2) if 0 <= t < N]
        places = [t - s * L + 2 for t in near]
        local_query = query[0, 0, i] + local[0][0, i - s * L]
        scores = [(key[0, 0, near] + local[1][0, places]) @ local_query * scale]
        others = [t for t in range(slice_of[-1] + 1) if t != s]
        coarse_query = query[0, 0, slice_of == s].mean(dim=0) + coarse[0][0, s]
        for t in others:
            of_slice = key[0, 0, slice_of == t].mean(dim=0) + coarse[1][0, t]
            scores.append((coarse_query @ of_slice * scale + log((slice_of == t).sum()))[None])
        values = torch.cat([value[0, 0, near], *(value[0, 0, slice_of == t].mean(dim=0)[None] for t in others)])
        expected = torch.cat(scores).softmax(dim=0) @ values
        torch.testing.assert_close(actual[0, 0, i], expected, rtol=0, atol=2e-15)


@pytest.mark.parametrize("kind", ["none", "left", "room"])
@pytest.mark.parametrize("attend_ends", [False, True])
@pytest.mark.parametrize("with_terms", [False, True])
@pytest.mark.parametrize("ratio", [1, 3])
def test_a_cache_of_keys_and_values_gives_the_rows_of_the_whole(ratio, with_terms, attend_ends, kind):
    """One query or several over the cache, padding on the left, empty rows of a static cache behind the tokens."""
    query, key, value = rows()
    terms = position_terms(ratio) if with_terms else ((None, None), (None, None))
    options = {"slice_length": L, "extension_ratio": ratio, "attend_ends": attend_ends}
    options |= {"local_terms": terms[0], "slice_terms": terms[1]}
    whole = merged_attention(query, key, value, Slicing(causal=True, **options))
    before, after = (5, 0) if kind == "left" else (0, 6 if kind == "room" else 0)
    cached_key, cached_value = (F.pad(x, (0, 0, before, after), value=3.0) for x in (key, value))
    if with_terms and kind != "none":
        options["slice_terms"] = tuple(F.pad(x, (0, 0, 0, 2)) for x in terms[1])
    for first, last in [(i, i + 1) for i in range(N)] + [(9, 16)]:
        end = before + last + after
        columns = torch.arange(end)
        visible = (columns >= before) & (columns <= torch.arange(before + first, before + last)[:, None])
        visible = None if kind == "none" and last == first + 1 else visible.expand(2, -1, -1)
        slices = tuple(None if x is None else x[:, : -(-end // L)] for x in options["slice_terms"])
        actual = merged_over_cache(
            query[:, :, first:last],
            cached_key[:, :, :end],
            cached_value[:, :, :end],
            visible,
            Slicing(**options | {"slice_terms": slices}),
        )
        torch.testing.assert_close(actual, whole[:, :, first:last], rtol=0, atol=4e-15)


@pytest.mark.parametrize("causal", [False, True])
def test_the_papers_sum_can_see_the_ends_too(causal):
    """Then [CLS] reaches every slice's local attention, one by one."""
    query, key, value = rows()

    def silent(embeddings):
        return tuple(torch.zeros(2, 2, embeddings.shape[1], 8, dtype=torch.float64) for _ in range(3))

    outputs = []
    for change in (0.0, 2.0):
        changed = value.clone()
        changed[:, :, 0] += change
        outputs.append(summed_attention(query, key, changed, silent, Slicing(slice_length=L, causal=causal)))
    assert (outputs[0] != outputs[1]).all()
