"""The classes that a patch gives to modules which compute attention themselves; read with the first such model."""

from collections.abc import Sequence

from torch import nn
from transformers.models.led.modeling_led import LEDEncoderSelfAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention, LongT5TransientGlobalAttention
from transformers.models.pegasus_x.modeling_pegasus_x import PegasusXGlobalLocalAttention

from .longformer import LEDEncoderInBlocks, LongformerInBlocks
from .longt5 import LongT5LocalInBlocks, LongT5TransientGlobalInBlocks
from .pegasus_x import PegasusXInBlocks

PATCHED: dict[type[nn.Module], type[nn.Module]] = {
    LongformerSelfAttention: LongformerInBlocks,
    LEDEncoderSelfAttention: LEDEncoderInBlocks,
    LongT5LocalAttention: LongT5LocalInBlocks,
    LongT5TransientGlobalAttention: LongT5TransientGlobalInBlocks,
    PegasusXGlobalLocalAttention: PegasusXInBlocks,
}


def run_in_blocks(modules: Sequence[nn.Module], *, patched: bool) -> None:
    """Give modules the class that attends in blocks, or the one that they had; others stay as they are."""
    classes = PATCHED if patched else {own: exact for exact, own in PATCHED.items()}
    for module in modules:
        module.__class__ = classes.get(type(module), type(module))
