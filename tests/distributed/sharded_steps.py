"""Some training steps of a model whose layers are sharded over the processes; the losses go to a file, as JSON.

torchrun --nproc-per-node 2 sharded_steps.py KIND FILE
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
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
KINDS = {
    "cst": ("cst", {"slice_length": 4}, None),
    "clusterformer": ("clusterformer", {"clusters": 3}, None),
    "bi-clustered": ("bert", {}, {"clusters": 4, "topk": 4, "key_clusters": 5, "min_length": 0}),
    "converted": ("bert", {}, {"slice_length": 4}),
}


def losses(kind: str, rank: int, processes: int) -> list[float]:
    """The loss of each step, over the whole batch, of which a process has its share."""
    model_type, settings, method = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **settings)
    model = AutoModelForSequenceClassification.from_config(config)
    if method is not None:
        hf_effattn.patch_attention(model, "cst" if kind == "converted" else kind, **method)
    if processes > 1:
        for module in model.modules():
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = torch.randint(1, 40, (8, 21), generator=torch.Generator().manual_seed(1))
    labels = (words[:, 0] > 20).long()
    share = slice(rank * 8 // processes, (rank + 1) * 8 // processes)
    found = []
    for _ in range(4):
        loss = model(words[share], labels=labels[share]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if processes > 1:
            dist.all_reduce(total)
        found.append(float(total) / processes)
    return found


def main() -> None:
    """Run as one of several processes."""
    dist.init_process_group("gloo")
    found = losses(sys.argv[1], dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
