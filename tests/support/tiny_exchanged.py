"""Tiny random models whose attention modules a patch exchanges for its own, which run exactly."""

from typing import Any

import torch
from support.tiny_models import TEXT
from transformers import AutoConfig, AutoModel, PreTrainedModel

SIZES: dict[str, dict[str, Any]] = {
    "t5": {"vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 3, "num_heads": 2},
    "mpnet": TEXT,
    "deberta-v2": TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
    "longformer": TEXT | {"attention_window": 8, "pad_token_id": 1},
}
SIZES["umt5"] = SIZES["t5"]


def make_model(model_type: str, **how: Any) -> PreTrainedModel:
    """In eval mode, of encoder and decoder the encoder; `how`: as `from_config` takes it."""
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **SIZES[model_type]), **how).eval()
    return model.get_encoder() if model.config.is_encoder_decoder else model


def output_of(model: PreTrainedModel, length: int = 40) -> torch.Tensor:
    """The last hidden state of what is not padding."""
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, length - 10 :] = 0
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
