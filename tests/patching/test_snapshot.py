"""What patching leaves on a model is remembered whole, and put back: by a report, and where patching fails."""

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_effattn
from hf_effattn.patching import patch

I_CLUSTERED = {"method": "i-clustered", "clusters": 6, "exact_keys": 48, "min_length": 0}


def gpt2(patched: str | None) -> GPT2LMHeadModel:
    """A small random model of two layers, never patched or with a causal form."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=128, vocab_size=60)).eval()
    if patched == "cst":
        hf_effattn.patch_attention(model, "cst", slice_length=8)
    elif patched is not None:
        settings: dict[str, Any] = {**I_CLUSTERED, "segment_length": 8, "window": 0}
        hf_effattn.patch_attention(model, **settings)
    return model


def state(model: GPT2LMHeadModel) -> list[Any]:
    """All that a module has, with the identity of what is in it, and the config."""
    found: list[Any] = [copy.deepcopy(model.config.to_dict()), model.config._attn_implementation]
    for module in model.modules():
        for name, value in vars(module).items():
            entries = list(value.items()) if isinstance(value, dict) else value
            found.append((name, [(key, id(entry)) for key, entry in entries] if entries is not value else id(value)))
        found.append([(key, id(hook)) for key, hook in module._forward_pre_hooks.items()])
    return found


@pytest.mark.parametrize("candidate", ["i-clustered", "cst"])
@pytest.mark.parametrize("patched", [None, "i-clustered", "cst"])
def test_a_report_leaves_the_model_as_it_was(patched: str | None, candidate: str) -> None:
    model = gpt2(patched)
    before = state(model)
    method: dict[str, Any] = I_CLUSTERED if candidate != "cst" else {"method": "cst", "slice_length": 4}
    hf_effattn.report(model, {"input_ids": torch.arange(100)[None] % 60}, [method], repeats=1, progress=False)
    assert state(model) == before


@pytest.mark.parametrize("to", ["i-clustered", "cst"])
@pytest.mark.parametrize("patched", [None, "i-clustered", "cst"])
def test_a_patch_that_fails_leaves_the_model_as_it_was(
    patched: str | None, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    model = gpt2(patched)
    before = state(model)
    monkeypatch.setattr(patch, "write_stored", fail)
    settings: dict[str, Any] = I_CLUSTERED if to != "cst" else {"method": "cst", "slice_length": 4}
    with pytest.raises(RuntimeError, match="no"):
        hf_effattn.patch_attention(model, **settings)
    assert state(model) == before
