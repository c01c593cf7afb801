"""A small random model of every model type that can be patched, with inputs, for tests of patching."""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packaging.version import parse
from support.tiny_decoders import sharing
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedModel

from hf_effattn.patching.model_types.table import MODEL_TYPES as TABLE

LENGTH = 40
# Settings with which each method runs on so few tokens, and approximates.
SMALL_SETTINGS: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 6, "min_length": 0},
    "i-clustered": {"clusters": 6, "topk": 8, "min_length": 0},
    "bi-clustered": {"clusters": 6, "topk": 8, "key_clusters": 7, "min_length": 0},
}
# A conversion, other methods head by head, and none: tests/patching/cst, heads/test_per_head.py, exact.
WITH_OWN_TESTS = ("cst", "per-head", "exact")
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
WINDOWED = TEXT | {
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "num_key_value_heads": 1,
    "pad_token_id": 1,
}
IMAGE = TEXT | {"image_size": 24, "patch_size": 4}
VIDEO = IMAGE | {"num_frames": 2, "tubelet_size": 2}
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
# An encoder with a decoder.
TWO = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 3,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.25,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
SETTINGS: dict[str, dict[str, Any]] = {
    **sharing(TEXT, "bert", "roberta", "xlm-roberta", "camembert", "ernie", "data2vec-text"),
    **sharing(TEXT, "roberta-prelayernorm", "xlm-roberta-xl", "bert-generation", "gte", "jina_embeddings_v3"),
    **sharing(IMAGE, "vit", "deit", "dinov2", "dinov3_vit", "ijepa", "clip_vision_model", "siglip_vision_model"),
    **sharing(IMAGE, "idefics2_vision", "idefics3_vision", "owlvit_vision_model", "owlv2_vision_model"),
    **sharing(IMAGE, "smolvlm_vision", "radio", "pixio"),
    **sharing(SPEECH, "wav2vec2", "hubert", "unispeech", "unispeech-sat"),
    **sharing(TWO, "bart", "mbart", "pegasus", "marian", "m2m_100"),
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
    "data2vec-audio": SPEECH | {"conv_pos_kernel_size": 5},
    "whisper": TWO | {"num_mel_bins": 8, "max_source_positions": LENGTH},
    "xmod": TEXT | {"default_language": "en_XX"},
    "mobilebert": TEXT
    | {"initializer_range": 0.15, "embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "nomic_bert": TEXT | {"head_dim": 16},
    "eurobert": TEXT | {"num_key_value_heads": 1, "pad_token_id": 1, "mask_token_id": 4},
    "ultrabert": WINDOWED,
    "embedding_gemma2_text": WINDOWED
    | {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2, "embedding_dim": 32},
    "neomme": WINDOWED | {"head_dim": 16},
    "esm": TEXT | {"position_embedding_type": "rotary", "pad_token_id": 1},
    "esmc": TEXT | {"num_key_value_heads": 2, "head_dim": 16, "mask_token_id": 4},
    "dinov2_with_registers": IMAGE | {"num_register_tokens": 2},
    "vit_mae": IMAGE | {"mask_ratio": 0.0},
    "siglip2_vision_model": IMAGE | {"num_patches": 36},
    "yolos": IMAGE | {"image_size": [24, 24], "num_detection_tokens": 3},
    "sam3_vit_model": IMAGE | {"pretrain_image_size": 24, "window_size": 3, "global_attn_indexes": [0, 1]},
    "sapiens2": IMAGE | {"num_key_value_heads": 1},
    "videomae": VIDEO,
    "vivit": VIDEO | {"tubelet_size": [2, 4, 4]},
    "vjepa2": VIDEO
    | {
        "crop_size": 24,
        "frames_per_clip": 2,
        "pred_hidden_size": 32,
        "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 1,
    },
    "audio-spectrogram-transformer": TEXT
    | {"patch_size": 4, "max_length": 24, "num_mel_bins": 24, "frequency_stride": 4, "time_stride": 4},
}
MODEL_TYPES = tuple(name for name in SETTINGS if name in CONFIG_MAPPING)  # older versions lack some
READS = {name: TABLE[name].reads for name in MODEL_TYPES}
IMAGES = tuple(name for name in MODEL_TYPES if READS[name] == "image")
SPEECHES = ("wav2vec2", "hubert", "data2vec-audio", "unispeech", "unispeech-sat")
# Their images are padded to the largest, with a mask of patches.
PADDED_IMAGES = ("idefics2_vision", "idefics3_vision", "smolvlm_vision")
# Parts of other models that AutoModel does not make.
PARTS = {
    "idefics2_vision": "Idefics2VisionTransformer",
    "owlvit_vision_model": "OwlViTVisionModel",
    "owlv2_vision_model": "Owlv2VisionModel",
}
# Their encoders are asked, and their decoders run along.
WITH_DECODER = tuple(name for name in MODEL_TYPES if TABLE[name].has_decoder)
TEXTS = tuple(name for name in MODEL_TYPES if READS[name] in ("text", "protein"))
PADDED = (*TEXTS, *SPEECHES, *PADDED_IMAGES, "siglip2_vision_model")
# Images and sound have no left padding, most images none at all.
MODEL_TYPES_AND_PADDINGS = [
    (name, padding)
    for name in MODEL_TYPES
    for padding in (None, "left", "right")
    if padding is None or (name in PADDED and (padding == "right" or name in TEXTS))
]
FULL_LAYERS = {
    "modernbert": (0, 2),
    "ultrabert": (0, 2),
    "embedding_gemma2_text": (0, 2),
    "neomme": (0, 2),
    "sam3_vit_model": (0, 1),
    "vjepa2": (0, 1, 2, 3),  # the last is its predictor's
}
# They begin with weights, of the attention's output or of all, that are zero or small whatever the config says.
OWN_INITIALIZATION = ("neomme", "siglip_vision_model", "siglip2_vision_model", "vjepa2", "yolos")
# One of every way in which a model hands its attention queries, keys, masks and keywords; what tests show of these
# they show of all others too, which are left to `make test-slow` there.
KINDS = (
    "bert", "roberta", "distilbert", "albert", "modernbert", "vit", "wav2vec2", "whisper", "eurobert",
    "embedding_gemma2_text", "esm", "siglip2_vision_model", "bart",
)  # fmt: skip


as_one_graph = pytest.mark.skipif(parse(torch.__version__) < parse("2.7"), reason="torch 2.6 compiles no whole model")


def mostly_slow(cases: Iterable[Any]) -> list[Any]:
    """The cases, model types or tuples that begin with one, of which all but `KINDS` are slow."""
    marks: list[Any] = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks.append(case if values[0] in KINDS else pytest.param(*values, marks=pytest.mark.slow))
    return marks


def with_methods(methods: Iterable[str], cases: Iterable[Any] = MODEL_TYPES) -> list[Any]:
    """The cases times the methods, as `(*case, method)`; types outside `KINDS` run one, as no method asks the type."""
    tuples = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [(*case, method) for case in tuples for method in methods if case[0] in KINDS or method == "bi-clustered"]


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A small config."""
    special = {} if model_type in WITH_DECODER else {"bos_token_id": 2, "eos_token_id": 3}
    return AutoConfig.for_model(model_type, **special | SETTINGS[model_type] | changes)


def tiny_model(model_type: str, auto_class: Any = AutoModel, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A small random model in eval mode; the same seed gives the same weights."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **changes)
    if model_type in PARTS:
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
        model = getattr(module, PARTS[model_type])._from_config(config).eval()
    else:
        model = auto_class.from_config(config).eval()
    if model_type in OWN_INITIALIZATION:
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(std=0.25)
    if model_type == "embedding_gemma2_text":
        # It normalises queries and keys and does not scale their products: heads so sharp would run exactly.
        for module in model.modules():
            if hasattr(module, "q_norm"):
                module.q_norm.weight.data.mul_(0.15)
    return model


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, and which rows of its encoder's output count, `(B, N)`; None: all."""

    inputs: dict[str, torch.Tensor]
    counts: torch.Tensor | None = None


def batch_for(model: PreTrainedModel, *, padding: str | None = None, length: int = LENGTH, seed: int = 1) -> Batch:
    """Two inputs; with padding "left" or "right" the first is shorter, where the type knows padding (`PADDED`)."""
    generator = torch.Generator().manual_seed(seed)
    model_type = model.config.model_type
    if model_type == "siglip2_vision_model":
        shapes = torch.tensor([[6, 6] if padding is None else [5, 6], [6, 6]])
        mask = torch.arange(36) < shapes.prod(1, keepdim=True)
        patches = torch.randn(2, 36, 48, generator=generator) * mask[..., None]
        inputs = {"pixel_values": patches, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}
        return Batch(inputs, None if padding is None else mask)
    if model_type in PADDED_IMAGES:
        mask = torch.ones(2, 6, 6, dtype=torch.bool)
        mask[0, 5] = padding is None
        images = torch.randn(2, 3, 24, 24, generator=generator)
        inputs = {"pixel_values": images, "patch_attention_mask": mask}
        return Batch(inputs, None if padding is None else mask.flatten(1))
    if model_type in IMAGES:
        # Masked autoencoders shuffle the patches by this noise.
        noise = {"noise": torch.rand(2, 36, generator=generator)} if model_type == "vit_mae" else {}
        return Batch({"pixel_values": torch.randn(2, 3, 24, 24, generator=generator)} | noise)
    if READS[model_type] == "video":
        name = "pixel_values_videos" if model_type == "vjepa2" else "pixel_values"
        return Batch({name: torch.randn(2, 2, 3, 24, 24, generator=generator)})
    if model_type == "audio-spectrogram-transformer":
        return Batch({"input_values": torch.randn(2, 24, 24, generator=generator)})
    decoder = {"decoder_input_ids": torch.tensor([[3, 7, 9, 11], [3, 8, 5, 4]])} if model_type in WITH_DECODER else {}
    if model_type == "whisper":
        return Batch({"input_features": torch.randn(2, 8, 2 * LENGTH, generator=generator)} | decoder)
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
        return Batch({"input_ids": tokens} | decoder)
    mask = _mask(length, 11, padding)
    tokens = tokens.masked_fill(mask == 0, model.config.pad_token_id or 0)
    return Batch({"input_ids": tokens, "attention_mask": mask} | decoder, mask.bool())


def _mask(length: int, padded: int, side: str) -> torch.Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    if side == "left":
        mask[0, :padded] = 0
    else:
        mask[0, length - padded :] = 0
    return mask


def hidden_states(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """The encoder's last hidden state, `(B, N, hidden_size)`."""
    output = model(**inputs, **kwargs)
    return output.encoder_last_hidden_state if model.config.model_type in WITH_DECODER else output.last_hidden_state


def encoded(model: PreTrainedModel, batch: Batch, **kwargs: Any) -> torch.Tensor:
    """The encoder's last hidden state on the rows that count, `(rows, hidden_size)`."""
    hidden = hidden_states(model, batch.inputs, **kwargs)
    return hidden.flatten(0, 1) if batch.counts is None else hidden[batch.counts]
