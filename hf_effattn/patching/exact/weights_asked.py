"""Whether attention weights are asked for."""

import torch
from torch import nn
from transformers.utils.output_capturing import _active_collector


def matrices_are_collected(module: nn.Module) -> bool:
    """Whether attention matrices were asked for where no argument says so: GPT-2 and OPT keep it to themselves."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    # In a compiled layer of a model that is not compiled itself, the collector's state cannot be traced.
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False
    return "attentions" in (_active_collector.get() or ())
