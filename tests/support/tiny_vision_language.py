"""Tiny random models that read images among their text, whose decoders the table serves."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from .tiny_decoders import GROUPED

IMAGE, VIDEO, BEFORE, AFTER = 50, 51, 52, 53  # tokens
TEXT: dict[str, Any] = GROUPED | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
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
    "qwen3_vl_moe": {
        "text_config": TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "vision_config": DEEP,
    },
}
MODELS = tuple(name for name in SIZES if name in CONFIG_MAPPING)  # older versions lack some


def make_model(model_type: str) -> Any:
    torch.manual_seed(0)
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    places = {"vision_start_token_id": BEFORE, "vision_end_token_id": AFTER}
    config = AutoConfig.for_model(model_type, **SIZES[model_type], **tokens, **places)
    return AutoModelForImageTextToText.from_config(config, experts_implementation="eager").eval()


def image_and_text(length: int = 60, sides: tuple[int, ...] = (4,)) -> dict[str, torch.Tensor]:
    """A text of so many tokens with square images of so many patches a side, four to a token, from its tenth on."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 45, (1, length), generator=generator)
    images = torch.tensor([token for side in sides for token in (BEFORE, *[IMAGE] * (side // 2) ** 2, AFTER)])
    ids[0, 10 : 10 + len(images)] = images
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(sum(side**2 for side in sides), 3 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, side, side] for side in sides]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }
