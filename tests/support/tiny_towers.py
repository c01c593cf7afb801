"""Tiny random models that see for models that read images among their text: each image is attended to by itself."""

import importlib
from dataclasses import fields
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, PreTrainedModel

# Configs call the same things by different names; each takes what it knows.
SIZES: dict[str, Any] = {
    "depth": 3,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "embed_dim": 32,
    "num_heads": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "image_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "window_size": 8,
    "fullatt_block_indexes": [0, 1, 2],
    "initializer_range": 0.25,
}
CLASSES = {
    "qwen2_vl_vision": "Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl_vision": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen2_5_omni_vision_encoder": "Qwen2_5OmniVisionEncoder",
    "exaone4_5_vision": "Exaone4_5_VisionModel",
    "qwen3_vl_vision": "Qwen3VLVisionModel",
    "qwen3_vl_moe_vision": "Qwen3VLMoeVisionModel",
    "qwen3_5_vision": "Qwen3_5VisionModel",
    "qwen3_5_moe_vision": "Qwen3_5MoeVisionModel",
    "qwen3_omni_moe_vision_encoder": "Qwen3OmniMoeVisionEncoder",
    "qwen4_exp_vision": "Qwen4ExpVisionModel",
    "glm4v_vision": "Glm4vVisionModel",
    "glm4v_moe_vision": "Glm4vMoeVisionModel",
    "glm5_next_vision": "Glm5NextVisionModel",
    "glm_ocr_vision": "GlmOcrVisionModel",
    "glm_image_vision": "GlmImageVisionModel",
    "ernie4_5_vl_moe_vision": "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
    "paddleocr_vl_vision": "PaddleOCRVisionTransformer",
    "kimi_k25_vision": "Kimi_K25VisionModel",
    "video_llama_3_vision": "VideoLlama3VisionModel",
    "hunyuan_vl_vision": "HunYuanVLVisionTransformer",
    "minimax_m3_vl_vision": "MiniMaxM3VLVisionModel",
    "cosmos3_edge_vision": "Cosmos3EdgeVisionModel",
    "cohere_compass_vision": "CohereCompassVisionModel",
    "gemma4_vision": "Gemma4VisionModel",
    "pixtral": "PixtralVisionModel",
}
# Before, it alone took other arguments; the model around it did not.
FROM_5_23 = ("paddleocr_vl_vision",)
TOWERS = tuple(  # older versions lack some
    name
    for name in CLASSES
    if name in CONFIG_MAPPING and (name not in FROM_5_23 or Version(transformers.__version__) >= Version("5.23"))
)
GRIDS = (6, 6), (4, 8)  # patches of the two images
TOGETHER = ("gemma4_vision",)  # pads images to the largest instead
# Of patches as the models want them: (patches, pixels) unless said.
PATCHES = {"kimi_k25_vision": (-1, 3, 4, 4), "paddleocr_vl_vision": (1, -1, 3, 4, 4)}


def make_tower(model_type: str) -> PreTrainedModel:
    """A small random model in eval mode, always with the same weights."""
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in fields(config_class)}
    config = config_class(**{name: value for name, value in SIZES.items() if name in known})
    module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    torch.manual_seed(0)
    model = getattr(module, CLASSES[model_type])(config).eval()
    for weight in model.parameters():  # some begin with weights that are zero, or small whatever the config says
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2 if model_type == "pixtral" else 0.25)
    for part in model.modules():
        if model_type == "gemma4_vision" and hasattr(part, "q_norm"):  # unscaled: heads so sharp would run exactly
            part.q_norm.weight.data.mul_(0.15)
    return model


def pixels(seed: int = 1) -> torch.Tensor:
    """The patches of both images, one after the other, `(patches, channels x height x width)`."""
    return torch.randn(68, 48, generator=torch.Generator().manual_seed(seed))


def see(model: PreTrainedModel, patches: torch.Tensor, *grids: tuple[int, int]) -> torch.Tensor:
    """The last hidden state of images with so many patches, `(patches or fewer, hidden_size)`."""
    model_type = model.config.model_type
    if model_type in TOGETHER:
        return model(**_padded(patches, grids)).last_hidden_state
    if model_type == "pixtral":
        return model(**_as_images(patches, grids)).last_hidden_state[0]
    merged = {"merge_sizes": torch.tensor([2] * len(grids))} if model_type == "video_llama_3_vision" else {}
    shaped = patches.view(PATCHES.get(model_type, (-1, 48)))
    hidden = model(shaped, grid_thw=torch.tensor([(1, *grid) for grid in grids]), **merged).last_hidden_state
    return hidden.flatten(0, -2)


def _as_images(patches: torch.Tensor, grids: tuple[tuple[int, int], ...]) -> dict[str, torch.Tensor]:
    """Images of pixels, padded to the largest at the right and below."""
    sizes = 4 * torch.tensor(grids)
    padded = torch.zeros(len(grids), 3, *sizes.amax(dim=0).tolist())
    places = [rows * columns for rows, columns in grids]
    for image, of_image, grid in zip(padded, patches.split(places), grids, strict=True):
        cells = of_image.view(*grid, 3, 4, 4).permute(2, 0, 3, 1, 4)
        image[:, : 4 * grid[0], : 4 * grid[1]] = cells.reshape(3, 4 * grid[0], 4 * grid[1])
    return {"pixel_values": padded, "image_sizes": sizes}


def _padded(patches: torch.Tensor, grids: tuple[tuple[int, int], ...]) -> dict[str, torch.Tensor]:
    """Images padded to the largest, with places of -1."""
    places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in grids]
    images = patches.split([len(of_image) for of_image in places])
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(list(images), batch_first=True),
        "pixel_position_ids": torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=-1),
    }
