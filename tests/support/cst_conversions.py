"""Tiny pretrained models converted to slice attention, for the tests of the conversion."""

from typing import Any

import torch
from support.tiny_models import tiny_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_effattn
from hf_effattn.patching.methods.cst.positions import NAME

CONVERTED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "gpt2")
SLICES: dict[str, Any] = {"slice_length": 4}
LENGTH = 27


def small_model(model_type: str, auto_class: Any = None, **changes: Any) -> Any:
    """A small random model in eval mode, of GPT-2 one with the head for text."""
    if model_type != "gpt2":
        return tiny_model(model_type, auto_class or AutoModel, **changes)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.25}
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **sizes | {"bos_token_id": 2, "eos_token_id": 3} | changes)
    return (auto_class or AutoModelForCausalLM).from_config(config).eval()


def convert(model: Any, *, trained: bool = True, **settings: Any) -> Any:
    """Converted to slices of 4; `trained`: its position tables are random, as after fine-tuning."""
    hf_effattn.patch_attention(model, "cst", **SLICES | settings)
    if trained:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for table in getattr(model.base_model, NAME).parameters():
                table.copy_(torch.randn(table.shape, generator=generator))
    return model


def tokens(length: int = LENGTH, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """Random tokens `(batch, length)`, none of them special."""
    return torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(length: int = LENGTH, padding: int = 6) -> torch.Tensor:
    """A mask of two texts, of which the first is padded."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :padding] = 0
    return mask


def first_output(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The last hidden state, or the logits."""
    return model(input_ids=ids, **inputs)[0]
