"""Tiny random models that read images among their text, whose decoders the table serves."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from .tiny_decoders import DELTA, EXPERTS, GROUPED

IMAGE, VIDEO, BEFORE, AFTER, *OF_VIDEO = 50, 51, 52, 53, 54, 55  # tokens
ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
TEXT: dict[str, Any] = GROUPED | {"rope_parameters": ROTARY}
ALL_ROTATED = TEXT | {"rope_parameters": ROTARY | {"partial_rotary_factor": 1.0}}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": 32,
    "intermediate_size": 16,
}
DEEP = VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
SIZES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": TEXT, "vision_config": VISION | {"hidden_size": 32, "embed_dim": 16}},
    "qwen2_5_vl": {
        "text_config": TEXT,
        "vision_config": VISION | {"fullatt_block_indexes": [1], "window_size": 16},
    },
    "qwen3_vl": {"text_config": TEXT, "vision_config": DEEP},
    "qwen3_5": {"text_config": DELTA | {"rope_parameters": ROTARY}, "vision_config": DEEP},
    "qwen3_5_moe": {"text_config": DELTA | EXPERTS | {"rope_parameters": ROTARY}, "vision_config": DEEP},
    "glm4v": {"text_config": ALL_ROTATED, "vision_config": VISION | {"image_size": 32}},
    "glm4v_moe": {"text_config": ALL_ROTATED | EXPERTS, "vision_config": VISION | {"image_size": 32}},
    "glm_ocr": {"text_config": ALL_ROTATED, "vision_config": VISION | {"image_size": 32}},
    "ernie4_5_vl_moe": {
        "text_config": TEXT | {"moe_intermediate_size": [16, 16], "moe_num_experts": 4, "moe_k": 2},
        "vision_config": VISION,
    },
    "paddleocr_vl": {
        "text_config": TEXT,
        "vision_config": VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32},
    },
    "qwen3_vl_moe": {
        "text_config": TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "vision_config": DEEP,
    },
}
MODELS = tuple(name for name in SIZES if name in CONFIG_MAPPING)  # older versions lack some
# Llama's, one of whose layers attends to images instead of text.
MLLAMA: dict[str, Any] = {
    "text_config": GROUPED | {"num_hidden_layers": 4, "cross_attention_layers": [1], "vocab_size": 52},
    "vision_config": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 8,
        "patch_size": 4,
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
        "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
    },
}


def make_mllama() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("mllama", **MLLAMA, image_token_index=IMAGE)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, gate in model.named_parameters():
        if "gate" in name and gate.numel() == 1:
            torch.nn.init.ones_(gate)  # images count
    return model


def make_model(model_type: str) -> Any:
    if model_type == "mllama":
        return make_mllama()
    torch.manual_seed(0)
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    places = {
        "vision_start_token_id": BEFORE,
        "vision_end_token_id": AFTER,
        "image_start_token_id": BEFORE,
        "image_end_token_id": AFTER,
        "video_start_token_id": OF_VIDEO[0],
        "video_end_token_id": OF_VIDEO[1],
    }
    config = AutoConfig.for_model(model_type, **SIZES[model_type], **tokens, **places)
    return AutoModelForImageTextToText.from_config(config, experts_implementation="eager").eval()


def image_and_text(model_type: str, length: int = 60, sides: tuple[int, ...] = (4,)) -> dict[str, torch.Tensor]:
    """A text of so many tokens with square images of so many patches a side, four to a token, from its tenth on."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 45, (1, length), generator=generator)
    if model_type == "mllama":
        ids[0, 3] = IMAGE
        seen = (torch.arange(length) >= 3).long()
        return {
            "input_ids": ids,
            "pixel_values": torch.randn(1, 1, 1, 3, 8, 8, generator=generator),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
            "cross_attention_mask": seen[None, :, None, None],
        }
    images = torch.tensor([token for side in sides for token in (BEFORE, *[IMAGE] * (side // 2) ** 2, AFTER)])
    ids[0, 10 : 10 + len(images)] = images
    pixels = torch.randn(sum(side**2 for side in sides), 3 * 4 * 4, generator=generator)
    return {
        "input_ids": ids,
        "pixel_values": pixels.view(-1, 3, 4, 4) if model_type == "paddleocr_vl" else pixels,
        "image_grid_thw": torch.tensor([[1, side, side] for side in sides]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
