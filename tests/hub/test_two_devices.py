"""Models whose layers a `device_map` puts on two GPUs: what a head adds up behind them may come from both.

Two places of a kind of device that nothing can run on stand for the GPUs: a fake tensor knows where it would be, and
refuses what lies elsewhere.
"""

from contextlib import nullcontext

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from support import clusterformer_cases, cst_models
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError
from transformers import BertConfig, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

import hf_effattn
from hf_effattn.models.classifying import masked_mean

FIRST, SECOND = torch.device("lazy:0"), torch.device("lazy:1")
FAMILIES = {"ClusterFormer": clusterformer_cases.tiny_config, "CST": cst_models.tiny_config}
PATCHES = {
    "clustered": {"clusters": 4},
    "i-clustered": {"clusters": 4, "topk": 4},
    "bi-clustered": {"clusters": 4, "key_clusters": 4, "topk": 4},
    "cst": {"slice_length": 4},
}
DECODER_PATCHES = {
    "i-clustered": {"clusters": 4, "exact_keys": 4, "segment_length": 8, "window": 4, "min_length": 0},
    "bi-clustered": {"key_clusters": 4, "exact_keys": 4, "segment_length": 8, "window": 4, "min_length": 0},
}
HEADS = ("ForCausalLM", "ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch):
    """The kind of device knows none; where the models switch it off it is off already."""
    monkeypatch.setattr(torch, "autocast", lambda device_type, enabled: nullcontext())


def spread(model: nn.Module, firsts: list[nn.Module | None]) -> None:
    """Put `firsts` on the first device and the rest on the second, each block with the hook of `dispatch_model`."""
    on_first = {id(module) for first in firsts if first is not None for module in first.modules()}
    for module in model.modules():
        device = FIRST if id(module) in on_first else SECOND
        for name, weight in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(torch.empty_like(weight, device=device))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device=device)
        whole = len({id(part) in on_first for part in module.modules()}) == 1
        if whole and next(module.parameters(), None) is not None:
            add_hook_to_module(module, AlignDevicesHook(execution_device=device))
    add_hook_to_module(model, AlignDevicesHook(execution_device=FIRST, io_same_device=True))


def labels_of(head: str, words: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the head is trained on."""
    if head == "ForQuestionAnswering":
        return {"start_positions": words[:, 0], "end_positions": words[:, 1]}
    return {"labels": words[:, 0] if head == "ForSequenceClassification" else words}


@pytest.mark.slow_except("CST-ForCausalLM", "ClusterFormer-ForSequenceClassification")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_on_two_devices(family, head):
    with FakeTensorMode():
        model = getattr(hf_effattn, family + head)(FAMILIES[family]()).eval()
        base = model.base_model
        spread(
            model,
            [base.embeddings, getattr(base, "positions", None), getattr(base, "centroids", None), base.layers[0]],
        )
        words = torch.zeros(2, 9, dtype=torch.long, device=FIRST)
        mask = torch.ones_like(words)
        assert model(words, attention_mask=mask)[0].device == FIRST
        assert model(words, attention_mask=mask, **labels_of(head, words)).loss.device == FIRST


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_pooling_and_losses_behind_layers_on_two_devices(pooling):
    with FakeTensorMode():
        config = clusterformer_cases.tiny_config(gated=False, pooling=pooling)
        model = hf_effattn.ClusterFormerForSequenceClassification(config).eval()
        spread(model, [model.base_model.embeddings, model.base_model.centroids, model.base_model.layers[0]])
        words = torch.zeros(2, 9, dtype=torch.long, device=FIRST)
        output = model(words, attention_mask=torch.ones_like(words), labels=words[:, 0])
        assert output.loss.device == output.cluster_loss.device == FIRST


@pytest.mark.slow
def test_encoder_and_decoder_on_two_devices():
    with FakeTensorMode():
        model = hf_effattn.ClusterFormerForConditionalGeneration(clusterformer_cases.tiny_config(gated=False)).eval()
        spread(model, [model.encoder])
        words = torch.zeros(2, 9, dtype=torch.long, device=FIRST)
        output = model(words, attention_mask=torch.ones_like(words), labels=words)
        assert output.loss.device == output.cluster_loss.device == FIRST


def test_fake_tensors_refuse_what_lies_elsewhere():
    with FakeTensorMode():
        hidden, mask = torch.zeros(2, 9, 4, device=SECOND), torch.ones(2, 9, device=FIRST)
        assert masked_mean(hidden, mask).device == SECOND
        with pytest.raises(FakeTensorDeviceMismatchError):
            hidden * mask[..., None]


@pytest.mark.slow_except("absolute_positions")
@pytest.mark.parametrize("variant", ["paper", "three_levels", "mlp", "absolute_positions"])
def test_a_cache_of_layers_on_two_devices(variant, monkeypatch):
    # A fake tensor has no value to ask for: slices end at every step.
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: True)
    with FakeTensorMode():
        model = hf_effattn.CSTForCausalLM(cst_models.tiny_config(variant, is_decoder=True)).eval()
        base = model.base_model
        spread(model, [base.embeddings, base.positions, base.layers[0]])
        words = torch.zeros(2, 9, dtype=torch.long, device=FIRST)
        cache = model(words, attention_mask=torch.ones_like(words)).past_key_values
        mask = torch.ones(2, 12, dtype=torch.long, device=FIRST)
        output = model(words[:, :3], attention_mask=mask, past_key_values=cache, output_hidden_states=True)
        assert output.logits.device == FIRST


@pytest.mark.slow_except("bi-clustered")
@pytest.mark.parametrize("method", PATCHES)
def test_patched_models_on_two_devices(method):
    settings = PATCHES[method] if method == "cst" else PATCHES[method] | {"min_length": 0}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with FakeTensorMode():
        words = torch.zeros(2, 40, dtype=torch.long, device=FIRST)
        encoder = BertForTokenClassification(BertConfig(vocab_size=60, **small)).eval()
        hf_effattn.patch_attention(encoder, method, **settings)
        spread(encoder, [encoder.bert.embeddings, encoder.bert.encoder.layer[0]])
        assert encoder(words, attention_mask=torch.ones_like(words)).logits.device == FIRST
        decoder = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
        hf_effattn.patch_attention(decoder, method, **DECODER_PATCHES.get(method, settings))
        spread(decoder, [decoder.transformer.wte, decoder.transformer.wpe, decoder.transformer.h[0]])
        assert decoder(words).logits.device == FIRST
