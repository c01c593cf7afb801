"""Tiny random decoders of the causal model types in the table, with three layers of full attention."""

from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

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
FULL = {"layer_types": ["full_attention"] * 3}
UNBENT = GROUPED | FULL | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: dict[str, Any] = COMMON | {  # queries and keys twice as wide as values
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
HYBRID = GROUPED | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] + ["full_attention"] * 3}
CONVOLUTION = HYBRID | {"num_hidden_layers": 5, "layer_types": ["conv", *["full_attention"] * 3, "conv"]}
DELTA: dict[str, Any] = HYBRID | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
UNUSED = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LINEAR_AND_LATENT = LATENT | EXPERTS | {"num_hidden_layers": 4, "layer_types": HYBRID["layer_types"]}


def sharing(sizes: dict[str, Any], *names: str) -> dict[str, dict[str, Any]]:
    """Model types of the same sizes."""
    return dict.fromkeys(names, sizes)


SIZES: dict[str, dict[str, Any]] = {
    **sharing(GROUPED, "llama", "qwen2", "qwen3", "granite", "olmo2", "smollm3", "olmo", "phi", "cohere", "glm"),
    **sharing(GROUPED, "glm4", "ernie4_5", "seed_oss", "hunyuan_v1_dense", "emu3_text_model", "arcee", "nemotron"),
    **sharing(GROUPED, "stablelm", "hyperclovax", "internlm3", "jais2", "persimmon", "bitnet", "nanochat"),
    **sharing(GROUPED | {"sliding_window": None}, "mistral", "phi3", "starcoder2"),
    **sharing(GROUPED | EXPERTS | FULL, "qwen2_moe", "afmoe", "exaone_moe", "flint", "granitemoe_swa", "laguna"),
    **sharing(GROUPED | EXPERTS | FULL, "mellum", "gpt_oss"),
    **sharing(GROUPED | FULL, "ministral", "cohere2", "exaone4", "cwm", "granite_swa"),
    **sharing(GROUPED | EXPERTS, "granitemoe", "olmoe", "glm4_moe", "minimax_m2", "hunyuan_v1_moe", "hy_v3"),
    **sharing(GROUPED | EXPERTS, "solar_open", "flex_olmo"),
    **sharing(LATENT | EXPERTS, "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
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
    "llama4_text": GROUPED | EXPERTS | FULL | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
    "mistral4": LATENT
    | EXPERTS
    | {
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "partial_rotary_factor": 0.5,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
        },
    },
    "mllama_text_model": GROUPED | {"num_hidden_layers": 4, "cross_attention_layers": [1]},
    "gemma": GROUPED | {"num_key_value_heads": 1},
    # Methods run without softcapping; with it: tests/patching/exact/test_softcap.py.
    "gemma2": UNBENT,
    "vaultgemma": UNBENT,
    "gemma3_text": GROUPED | {"query_pre_attn_scalar": 8, "layer_types": ["full_attention"] * 3},
    "olmo3": GROUPED | {"layer_types": ["full_attention"] * 3},
    "gpt_bigcode": COMMON | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 48},
    "qwen3_moe": GROUPED | EXPERTS | {"sliding_window": None},
    "mixtral": GROUPED | EXPERTS | {"sliding_window": None},
    "ministral3": GROUPED
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
        },
    },
    "gemma4_text": GROUPED
    | FULL
    | {
        "vocab_size_per_layer_input": 60,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
    },
    "phi4_multimodal": GROUPED
    | {
        "sliding_window": None,
        "vision_config": UNUSED | {"image_size": 28, "crop_size": 28},
        "audio_config": UNUSED | {"num_blocks": 1},
    },
    "phimoe": GROUPED | EXPERTS | {"sliding_window": None},
    "ernie4_5_moe": GROUPED | EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "aria_text": GROUPED | EXPERTS | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "jetmoe": GROUPED | EXPERTS | {"kv_channels": 8},
    "biogpt": COMMON,
    "apertus": GROUPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gemma3n_text": GROUPED
    | FULL
    | {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 60,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": None,
    },
    "gemma4_unified_text": GROUPED | FULL | {"global_head_dim": 8},
    "dots1": GROUPED | EXPERTS | FULL | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "granitemoeshared": GROUPED | EXPERTS | {"shared_intermediate_size": 16},
    "youtu": LATENT,
    "mimo_v2_flash": GROUPED | EXPERTS | FULL | {"v_head_dim": 8},
    "modernbert-decoder": COMMON | FULL | {"cls_token_id": 2, "sep_token_id": 3},
    "cohere2_moe": GROUPED | EXPERTS | FULL | {"sliding_window": 4},
    "minicpm3": LATENT,
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "granitemoehybrid": HYBRID
    | EXPERTS
    | {
        "shared_intermediate_size": 16,
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "falcon_h1": GROUPED
    | {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "jamba": GROUPED
    | EXPERTS
    | {
        "num_hidden_layers": 6,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "nemotron_h": GROUPED
    | {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention", "full_attention"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "use_mamba_kernels": False,
    },
    "bamba": GROUPED
    | {
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 2, 3],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    },
    "bailing_hybrid": LINEAR_AND_LATENT,
    "kimi_linear": LINEAR_AND_LATENT,
    "olmo_hybrid": DELTA,
    "lfm3": CONVOLUTION | EXPERTS,
    "lfm2": CONVOLUTION | {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": CONVOLUTION | EXPERTS | {"num_dense_layers": 1},
}
# Before, transformers had other configs for them, caches that forget their past, or attention out of reach.
FROM_5_23 = (
    "nemotron", "modernbert-decoder", "gemma4_text", "falcon_h1", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "granitemoehybrid", "jamba", "nemotron_h", "lfm2", "lfm2_moe", "bamba", "olmo_hybrid", "gemma3n_text",
)  # fmt: skip
# Transformers runs them eagerly: with attention sinks, the last one in layers with windows only, or softcapping.
SINKING = ("gpt_oss", "granite_swa", "granitemoe_swa", "flint", "mimo_v2_flash")
EAGER = (*SINKING, "gemma2", "vaultgemma")
KNOWN = [name for name in SIZES if name in CONFIG_MAPPING]  # older versions lack some
MODELS = tuple(name for name in KNOWN if name not in FROM_5_23 or Version(transformers.__version__) >= Version("5.23"))


# Which AutoModelForCausalLM does not know by their configs.
CLASSES = {"mistral4": "Mistral4", "mllama_text_model": "Mllama", "emu3_text_model": "Emu3"}


def class_of(model_type: str) -> Any:
    prefix = CLASSES.get(model_type)
    if prefix is not None:
        return getattr(transformers, f"{prefix}ForCausalLM")
    return MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]


def make_model(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES[model_type] | changes)
    # Of the ways to run experts, the one in float64.
    return class_of(model_type)._from_config(config, experts_implementation="eager").eval()


def tokens(length: int = 61, batch: int = 2) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(1))


def left_padded(length: int = 61) -> torch.Tensor:
    """A mask of two texts, of which the first is padded."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :9] = 0
    return mask
