"""Tiny Composite Slice Transformers of every variant, for the tests of the model."""

from typing import Any

import torch
import transformers

from hf_effattn.models import CSTConfig, cst

# Written out anew: what the package registers is compared with it.
HEADS = {
    transformers.AutoModel: cst.CSTModel,
    transformers.AutoModelForMaskedLM: cst.CSTForMaskedLM,
    transformers.AutoModelForCausalLM: cst.CSTForCausalLM,
    transformers.AutoModelForSequenceClassification: cst.CSTForSequenceClassification,
    transformers.AutoModelForTokenClassification: cst.CSTForTokenClassification,
    transformers.AutoModelForQuestionAnswering: cst.CSTForQuestionAnswering,
}
LENGTH = 21
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "slice_length": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    # Weights this large give attention that is far from uniform, so that a wrong key or position shows.
    "initializer_range": 0.3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "half_extension": {"extension_ratio": 2},
    "whole_extension": {"extension_ratio": 3},
    "three_levels": {"slice_length": (4, 8), "extension_ratio": 2},
    "four_levels": {"slice_length": (2, 4, 16)},
    "max_pooling": {"pooling": "max"},
    "linear_pooling": {"pooling": "linear"},
    "parallel": {"composition": "parallel"},
    "global_local": {"composition": "global-local", "extension_ratio": 3},
    "mlp": {"local_mixing": "mlp", "local_mixing_size": 3},
    "mlp_global_local": {"local_mixing": "mlp", "local_mixing_size": 5, "composition": "global-local"},
    "separate_projections": {"share_projections": False},
    "mlp_separate_projections": {"local_mixing": "mlp", "share_projections": False, "slice_length": (4, 8)},
    "absolute_positions": {"position_embedding": "absolute"},
    # In the second slice they are in the window too, and count once.
    "global_tokens": {"num_global_tokens": 2, "extension_ratio": 3},
    "post_norm": {"pre_norm": False},
    "slices_of_one": {"slice_length": 1},
    "one_slice": {"slice_length": 64},
    "full": {"composition": "full", "position_embedding": "absolute"},
    "full_with_positions_of_keys": {"composition": "full"},
}


def tiny_config(variant: str = "paper", **changes: Any) -> CSTConfig:
    """A small config of a variant."""
    return CSTConfig(**SIZES | VARIANTS[variant] | changes)


def tiny_model(model_class: Any, variant: str = "paper", *, seed: int = 0, **changes: Any) -> Any:
    """A small random model in eval mode and float64; the same seed gives the same weights. No bias is 0."""
    torch.manual_seed(seed)
    model = model_class(tiny_config(variant, **changes)).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def tokens(B: int = 2, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    """Random tokens `(B, length)`, none of them padding."""
    return torch.randint(1, 50, (B, length), generator=torch.Generator().manual_seed(seed))
