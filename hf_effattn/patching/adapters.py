"""Whether PEFT has put adapters on a model, which is then saved without its other parameters."""

import sys

from torch import nn


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is one of PEFT, or has its layers inside, as transformers' `add_adapter` puts them."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, (PeftModel, BaseTunerLayer)) for module in model.modules())
