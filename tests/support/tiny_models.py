"""A small random model of every model type that can be patched, with inputs, for tests of patching."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

LENGTH = 40
# Settings with which each method runs on so few tokens, and approximates.
SMALL_SETTINGS: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 6, "min_length": 0},
    "i-clustered": {"clusters": 6, "topk": 8, "min_length": 0},
    "bi-clustered": {"clusters": 6, "topk": 8, "key_clusters": 7, "min_length": 0},
}
# The methods that approximate: a conversion ("cst") serves fewer models and has tests of its own.
APPROXIMATIONS = tuple(SMALL_SETTINGS)
WITH_TOPK = tuple(method for method, settings in SMALL_SETTINGS.items() if "topk" in settings)
TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    # Weights this large give attention that is far from uniform, so that an approximation differs visibly.
    "initializer_range": 0.25,
}
IMAGE = TEXT | {"image_size": 24, "patch_size": 4}
SPEECH = TEXT | {
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": TEXT,
    "roberta": TEXT,
    "xlm-roberta": TEXT,
    "camembert": TEXT,
    "electra": TEXT | {"embedding_size": 16},
    "distilbert": {
        "vocab_size": 60,
        "dim": 32,
        "n_layers": 3,
        "n_heads": 2,
        "hidden_dim": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.25,
    },
    "albert": TEXT | {"embedding_size": 16, "num_hidden_groups": 1},
    "modernbert": TEXT
    | {"global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 1, "initializer_cutoff_factor": 3.0},
    "vit": IMAGE,
    "deit": IMAGE,
    "wav2vec2": SPEECH,
    "hubert": SPEECH,
    "whisper": {
        "vocab_size": 60,
        "d_model": 32,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 8,
        "max_source_positions": LENGTH,
        "init_std": 0.25,
        "pad_token_id": 1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
}
MODEL_TYPES = tuple(SETTINGS)
IMAGES = ("vit", "deit")
SPEECHES = ("wav2vec2", "hubert")
TEXTS = tuple(name for name in MODEL_TYPES if name not in (*IMAGES, *SPEECHES, "whisper"))
# Images and sound have no left padding.
MODEL_TYPES_AND_PADDINGS = [
    (name, padding)
    for name in MODEL_TYPES
    for padding in (None, "left", "right")
    if padding != "left" or name in TEXTS
]
FULL_LAYERS = {"modernbert": (0, 2)}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config."""
    special = {} if model_type == "whisper" else {"bos_token_id": 2, "eos_token_id": 3}
    return AutoConfig.for_model(model_type, **special | SETTINGS[model_type] | changes)


def tiny_model(model_type: str, auto_class: Any = AutoModel, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A small random model in eval mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return auto_class.from_config(tiny_config(model_type, **changes)).eval()


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, and which rows of its encoder's output count, `(B, N)`; None: all."""

    inputs: dict[str, torch.Tensor]
    counts: torch.Tensor | None = None


def batch_for(model: PreTrainedModel, *, padding: str | None = None, length: int = LENGTH, seed: int = 1) -> Batch:
    """Two inputs; with padding "left" or "right" the first is shorter (images and Whisper's audio know no padding)."""
    generator = torch.Generator().manual_seed(seed)
    model_type = model.config.model_type
    if model_type in IMAGES:
        return Batch({"pixel_values": torch.randn(2, 3, 24, 24, generator=generator)})
    if model_type == "whisper":
        features = torch.randn(2, 8, 2 * LENGTH, generator=generator)
        return Batch({"input_features": features, "decoder_input_ids": torch.tensor([[3, 7, 9, 11], [3, 8, 5, 4]])})
    if model_type in SPEECHES:
        samples = 4 * length + 8
        audio = torch.randn(2, samples, generator=generator)
        if padding is None:
            return Batch({"input_values": audio})
        mask = _mask(samples, 4 * 11, "right")
        frames = model._get_feature_vector_attention_mask(length, mask).bool()
        return Batch({"input_values": audio * mask, "attention_mask": mask}, frames)
    tokens = torch.randint(5, 60, (2, length), generator=generator)
    if padding is None:
        return Batch({"input_ids": tokens})
    mask = _mask(length, 11, padding)
    tokens = tokens.masked_fill(mask == 0, model.config.pad_token_id or 0)
    return Batch({"input_ids": tokens, "attention_mask": mask}, mask.bool())


def _mask(length: int, padded: int, side: str) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    if side == "left":
        mask[0, :padded] = 0
    else:
        mask[0, length - padded :] = 0
    return mask


def encoded(model: PreTrainedModel, batch: Batch, **kwargs: Any) -> torch.Tensor:
    """The encoder's last hidden state on the rows that count, `(rows, hidden_size)`."""
    output = model(**batch.inputs, **kwargs)
    hidden = output.encoder_last_hidden_state if model.config.model_type == "whisper" else output.last_hidden_state
    return hidden.flatten(0, 1) if batch.counts is None else hidden[batch.counts]
