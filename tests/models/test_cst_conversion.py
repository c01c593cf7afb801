"""Attention of converted models: the merged form against one dense softmax, causality, padding, a real BERT."""

from math import log
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from closeness import assert_close_to_reference
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.masking_utils import sdpa_mask

from hf_effattn.demo.texts import __file__ as demo_texts
from hf_effattn.patching.cst_attention import first_and_last_tokens, merged_attention, summed_attention

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


def merged_with_loops(query, key, value, b, h, extension, causal, sinks, mask):
    """One softmax per token over window, sinks and the means of the other slices."""
    mask = torch.ones(2, N, dtype=torch.bool) if mask is None else mask
    query, key, value, token = query[b, h], key[b, h], value[b, h], mask[b]
    valid = token.nonzero()[:, 0].tolist()
    ends = {valid[0]} | (set() if causal else {valid[-1]}) if sinks else set()
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
        of_query = s - 1 if causal else s
        for t, members in enumerate(slices):
            allowed = t < s - reach if causal else abs(t - s) > reach
            members = [t for t in members if t not in ends]  # sinks are seen one by one
            if members and allowed:
                mean_query = query[slices[of_query]].mean(dim=0) if slices[of_query] else torch.zeros_like(query[0])
                scores.append(mean_query @ key[members].mean(dim=0) * scale + log(len(members)))
                values.append(value[members].mean(dim=0))
        output[i] = torch.stack(scores).softmax(dim=0) @ torch.stack(values)
    return output


@pytest.mark.parametrize("kind", ["none", "right", "holes"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_merged_form_is_one_softmax(ratio, causal, sinks, kind):
    query, key, value = rows()
    mask = mask_of(kind)
    options = {"slice_length": L, "extension_ratio": ratio, "causal": causal, "sinks": sinks, "key_mask": mask}
    actual = merged_attention(query, key, value, **options)
    for b in range(2):
        for h in range(2):
            expected = merged_with_loops(query, key, value, b, h, (ratio - 1) * L // 2, causal, sinks, mask)
            torch.testing.assert_close(actual[b, h], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_whatever_a_window_covers_is_exact(causal):
    query, key, value = rows()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    for length, ratio in ((N, 1), (14, 3)):
        actual = merged_attention(query, key, value, slice_length=length, extension_ratio=ratio, causal=causal)
        assert_close_to_reference("output", actual, expected, rtol=1e-14)


def test_slices_of_one_token_are_exact():
    """Means of one token are the tokens themselves."""
    query, key, value = rows()
    expected = F.scaled_dot_product_attention(query, key, value)
    assert_close_to_reference("output", merged_attention(query, key, value, slice_length=1), expected, rtol=1e-14)


@pytest.mark.parametrize("form", ["merged", "summed"])
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_causal_forms_never_look_ahead(form, ratio):
    def run(query, key, value):
        options = {"slice_length": L, "extension_ratio": ratio, "causal": True}
        if form == "merged":
            return merged_attention(query, key, value, **options)
        return summed_attention(query, key, value, project, **options)

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


@pytest.mark.parametrize("causal", [False, True])
def test_padding_has_no_influence_and_no_gradient(causal):
    mask = mask_of("right")
    clean, dirty = [tensor.requires_grad_() for tensor in rows()], []
    for tensor in clean:
        other = tensor.detach().clone()
        other[1, :, 14:] = float("nan")
        dirty.append(other.requires_grad_())
    outputs = [merged_attention(*x, slice_length=L, causal=causal, key_mask=mask) for x in (clean, dirty)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.sin().sum().backward()
    for first, second in zip(clean, dirty, strict=True):
        assert torch.equal(first.grad, second.grad)
        assert (second.grad[1, :, 14:] == 0).all()
    alone = merged_attention(*(x.detach()[1:, :, :14] for x in clean), slice_length=L, causal=causal)
    assert_close_to_reference("padded", outputs[0][1:, :, :14].detach(), alone, rtol=1e-14)


def test_an_item_of_padding_alone_gives_zeros():
    mask = torch.tensor([True, False])[:, None].expand(2, N)
    tensors = [tensor.requires_grad_() for tensor in rows()]
    output = merged_attention(*tensors, slice_length=L, key_mask=mask)
    output.sum().backward()
    assert (output[1] == 0).all()
    assert all((tensor.grad[1] == 0).all() for tensor in tensors)


def test_sinks_are_the_first_and_the_last_token():
    mask = torch.tensor([[False, True, True, False, True, False], [True, False, False, False, False, False]])
    query = torch.zeros(2, 1, 6, 4)
    assert first_and_last_tokens(mask, query, causal=False).int().tolist() == [[0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]]
    assert first_and_last_tokens(mask, query, causal=True).int().tolist() == [[0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_a_converted_bert_keeps_its_sentence_embeddings(real_model_folder):
    """Before any fine-tuning, 128 tokens: cosine at least .82 with slices of 16, .91 with whole neighbours."""
    settings = {}

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        if settings.get("form") == "summed":

            def project(x):
                projections = module.query, module.key, module.value
                return tuple(to(x).unflatten(-1, (query.shape[1], -1)).transpose(1, 2) for to in projections)

            result = summed_attention(query, key, value, project, slice_length=settings["L"], scale=scaling)
        else:
            length, ratio = settings["L"], settings["ratio"]
            result = merged_attention(query, key, value, slice_length=length, extension_ratio=ratio, scale=scaling)
        return result.transpose(1, 2).contiguous(), None

    AttentionInterface.register("cst-under-test", attention)
    AttentionMaskInterface.register("cst-under-test", sdpa_mask)
    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    texts = sorted((Path(demo_texts).parent / "texts").glob("*.txt"))
    passages = []
    for path in texts:
        if path.name != "SOURCES.txt":
            ids = tokenizer(path.read_text()[4000:8000], add_special_tokens=False)["input_ids"][:126]
            passages.append([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id])
    ids = torch.tensor(passages)
    assert ids.shape == (6, 128)

    def embeddings(model):
        with torch.no_grad():
            return F.normalize(model(ids).last_hidden_state.mean(dim=1), dim=-1)

    exact = embeddings(AutoModel.from_pretrained(real_model_folder).eval())
    model = AutoModel.from_pretrained(real_model_folder, attn_implementation="cst-under-test").eval()
    cosines = {}
    for name, chosen in {
        "L=16": {"L": 16, "ratio": 1},
        "L=16, whole neighbours": {"L": 16, "ratio": 3},
        "paper": {"L": 16, "form": "summed"},
    }.items():
        settings.clear()
        settings.update(chosen)
        cosines[name] = (embeddings(model) * exact).sum(dim=-1).mean().item()
    assert cosines["L=16"] >= 0.82
    assert cosines["L=16, whole neighbours"] >= 0.91
    assert cosines["paper"] < 0.3
