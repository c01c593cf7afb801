"""Some training steps of small models of every kind, whole on each process or with their layers sharded over them."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForSequenceClassification

import hf_effattn

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0}
CAUSAL = {"exact_keys": 24, "key_clusters": 3, "segment_length": 4, "window": 4, "min_length": 0}
BI_CLUSTERED = {"clusters": 4, "topk": 4, "key_clusters": 5, "min_length": 0}
# Model type, its settings, method and its settings.
KINDS: dict[str, tuple[str, dict[str, Any], str | None, dict[str, Any]]] = {
    "cst": ("cst", {"slice_length": 4}, None, {}),
    "clusterformer": ("clusterformer", {"clusters": 3}, None, {}),
    "clustered": ("bert", {}, "clustered", {"clusters": 4, "min_length": 0}),
    "i-clustered": ("bert", {}, "i-clustered", {"clusters": 4, "topk": 4, "min_length": 0}),
    "bi-clustered": ("bert", {}, "bi-clustered", BI_CLUSTERED),
    "causal": ("gpt2", GPT2, "bi-clustered", CAUSAL),
    "converted": ("bert", {}, "cst", {"slice_length": 4}),
}
WAYS = ("whole", "sharded")


def losses(kind: str, way: str | None = None) -> list[float]:
    """The loss of each step, over the whole batch, of which a process of the group has its share.

    Args:
        way: one of `WAYS`; None: in one process, without a group.
    """
    model_type, settings, method, method_settings = KINDS[kind]
    rank, processes = (0, 1) if way is None else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **SIZES | settings))
    if method is not None:
        hf_effattn.patch_attention(model, method, **method_settings)
    if way == "sharded":
        layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        assert len(layers) >= SIZES["num_hidden_layers"]
        for module in (*layers, model):
            fully_shard(module)
    run = DistributedDataParallel(model) if way == "whole" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(1, 40, (8, 21), generator=torch.Generator().manual_seed(1))
    labels = (words[:, 0] > 20).long()
    share = slice(rank * 8 // processes, (rank + 1) * 8 // processes)
    step_losses = []
    for _ in range(4):
        loss = run(words[share], labels=labels[share]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if way is not None:
            dist.all_reduce(total)
        step_losses.append(float(total) / processes)
    return step_losses
