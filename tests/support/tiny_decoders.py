"""Tiny random decoders of every causal model type in the table, with three layers of full attention."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": 1,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 60,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "initializer_range": 0.25,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "opt": COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.25},
    "gpt_neox": COMMON,
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "mistral": GROUPED | {"sliding_window": None},
    "gemma": GROUPED | {"num_key_value_heads": 1},
    "granite": GROUPED,
    "gemma3_text": GROUPED | {"query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 3},
    "olmo2": GROUPED,
    "olmo3": GROUPED | {"layer_types": ["full_attention"] * 3},
    "smollm3": GROUPED,
    "phi3": GROUPED | {"sliding_window": None},
}


def make_model(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES[model_type] | changes)
    return AutoModelForCausalLM.from_config(config).eval()
