"""What a small model gives, and its gradients, on one process or divided among those of a group."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.tiny_decoders import make_model
from support.tiny_models import SMALL_SETTINGS, Batch, batch_for, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModel, PreTrainedModel

import hf_effattn

HEADS, LENGTH = 4, 45  # the tokens are no multiple of a number of ranks
CANDIDATES: list[dict[str, Any]] = [
    {"method": "i-clustered", "clusters": 4, "topk": 3},
    {"method": "bi-clustered", "clusters": 6, "topk": 8, "key_clusters": 7, "max_predicted_error": None},
]
# Of each layer: four heads, of which the ranks have different ones, and none that is approximated on rank 1 of two.
SETTINGS: dict[str, dict[str, Any]] = SMALL_SETTINGS | {
    "per-head": {"candidates": CANDIDATES, "heads": [[0, 1, 2, 1], [0, 1, 2, 2], [1, 0, 0, 2]], "min_length": 0}
}
OF_DECODER: dict[str, dict[str, Any]] = {
    "bi-clustered": {"exact_keys": 18, "key_clusters": 4, "segment_length": 4, "window": 4, "min_length": 0},
    "per-head": {
        "candidates": [
            {"method": "i-clustered", "clusters": 4, "exact_keys": 18, "segment_length": 4, "window": 4},
            {"method": "bi-clustered", "exact_keys": 18, "key_clusters": 4, "segment_length": 4, "window": 4},
        ],
        "heads": [[0, 1, 2, 1], [1, 2, 0, 2], [2, 0, 2, 2]],  # of four key/value heads
        "min_length": 0,
    },
}
Change = Callable[[PreTrainedModel], PreTrainedModel]
Arrays = dict[str, np.ndarray]  # tensors would be shared with a process that may have ended


def encoder(model_type: str = "roberta", auto_class: Any = AutoModel, **changes: Any) -> PreTrainedModel:
    """In float64, in which no rounding sends a query to another cluster."""
    return tiny_model(model_type, auto_class, num_attention_heads=HEADS, **changes).double()


def batch_of(model: PreTrainedModel, padding: str | None = "right") -> Batch:
    return batch_for(model, padding=padding, length=LENGTH)


def patched_by(method: str) -> Change:
    return lambda model: hf_effattn.patch_attention(model, method, **SETTINGS[method])


def divided(model: PreTrainedModel) -> PreTrainedModel:
    return hf_effattn.parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def whole(tensor: torch.Tensor) -> np.ndarray:
    """A copy of all of it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def gradients(model: PreTrainedModel) -> Arrays:
    """Of all parameters that have one."""
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def outcome(make: Callable[[], PreTrainedModel], *changes: Change, padding: str | None = "right") -> Arrays:
    """The last hidden state of an encoder on the rows that count, what is pooled, and all gradients.

    The weights of the loss differ by token, so that no two tokens can be exchanged.
    """
    model = make()
    for change in changes:
        model = change(model)
    batch = batch_of(model, padding)
    output = model(**batch.inputs)
    hidden = output.last_hidden_state
    assert type(hidden) is torch.Tensor
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3), dtype=hidden.dtype)
    counts = torch.ones(hidden.shape[:2], dtype=torch.bool) if batch.counts is None else batch.counts
    loss = (hidden * weights)[counts].sum()
    pooled = getattr(output, "pooler_output", None)
    if pooled is not None:
        loss = loss + (pooled * weights[:, 0]).sum()
    loss.backward()
    given = {"hidden": whole(hidden[counts])} | ({} if pooled is None else {"pooled": whole(pooled)})
    return given | gradients(model)


def decoder(folder: str, **options: Any) -> PreTrainedModel:
    return AutoModel.from_pretrained(folder, dtype=torch.float64, **options).eval()


def save_decoder(folder: str) -> None:
    make_model("llama", num_attention_heads=8, num_key_value_heads=4).model.save_pretrained(folder)


def of_decoder(folder: str, method: str, **options: Any) -> np.ndarray:
    """The last hidden state of a Llama whose key/value heads serve two query heads each."""
    model = hf_effattn.patch_attention(decoder(folder, **options), method, **OF_DECODER[method])
    ids = torch.randint(5, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return whole(hidden[mask.bool()])
