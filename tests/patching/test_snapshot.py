"""What patching leaves on a model is remembered whole, and put back: by a report, and where patching fails."""

import copy
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LongformerConfig,
    LongformerModel,
    PreTrainedModel,
    VisionTextDualEncoderModel,
)

import hf_effattn
from hf_effattn.patching import patch

I_CLUSTERED = {"method": "i-clustered", "clusters": 6, "exact_keys": 48, "min_length": 0}


def small(patched: str | None) -> PreTrainedModel:
    """A small random model of two layers: one whose classes a patch exchanges, or a decoder, perhaps patched."""
    torch.manual_seed(0)
    if patched == "longformer":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        return LongformerModel(LongformerConfig(vocab_size=60, attention_window=16, pad_token_id=1, **sizes)).eval()
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=128, vocab_size=60)).eval()
    if patched == "cst":
        hf_effattn.patch_attention(model, "cst", slice_length=8)
    elif patched is not None:
        settings: dict[str, Any] = {**I_CLUSTERED, "segment_length": 8, "window": 0}
        hf_effattn.patch_attention(model, **settings)
    return model


def state(model: PreTrainedModel) -> list[Any]:
    """All that a module has, with the identity of what is in it, and the config."""
    found: list[Any] = [copy.deepcopy(model.config.to_dict()), model.config._attn_implementation]
    for module in model.modules():
        found.append(type(module))
        for name, value in vars(module).items():
            entries = list(value.items()) if isinstance(value, dict) else value
            found.append((name, [(key, id(entry)) for key, entry in entries] if entries is not value else id(value)))
        found.append([(key, id(hook)) for key, hook in module._forward_pre_hooks.items()])
    return found


@pytest.mark.parametrize(
    ("patched", "candidate"), [(None, "i-clustered"), ("i-clustered", "cst"), ("cst", "i-clustered"), ("cst", "cst")]
)
def test_a_report_leaves_the_model_as_it_was(patched: str | None, candidate: str) -> None:
    model = small(patched)
    before = state(model)
    method: dict[str, Any] = I_CLUSTERED if candidate != "cst" else {"method": "cst", "slice_length": 4}
    hf_effattn.report(model, {"input_ids": torch.arange(100)[None] % 60}, [method], repeats=1, progress=False)
    assert state(model) == before


@pytest.mark.parametrize(
    ("patched", "to"), [(None, "i-clustered"), ("cst", "i-clustered"), ("cst", "cst"), ("longformer", "exact")]
)
def test_a_patch_that_fails_leaves_the_model_as_it_was(
    patched: str | None, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("disk on fire")

    model = small(patched)
    before = state(model)
    monkeypatch.setattr(patch, "write_stored", fail)
    settings: dict[str, Any] = {"cst": {"method": "cst", "slice_length": 4}, "exact": {"method": "exact"}}
    with pytest.raises(RuntimeError, match="disk on fire"):
        hf_effattn.patch_attention(model, **settings.get(to, I_CLUSTERED))
    assert state(model) == before


def test_a_failure_in_the_second_of_two_encoders_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = VisionTextDualEncoderModel(vision_model=tiny_model("vit"), text_model=tiny_model("bert")).eval()
    before, write, calls = state(model), patch.write_stored, []

    def fail_the_second_time(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("disk on fire")
        return write(*args)

    monkeypatch.setattr(patch, "write_stored", fail_the_second_time)
    with pytest.raises(RuntimeError, match="disk on fire"):
        hf_effattn.patch_attention(model, "clustered", clusters=4, min_length=0)
    assert state(model) == before
