"""The classes that a patch gives to modules with a forward of their own.

The folder is read with the first such model, because it reads modelling files of transformers.
"""

from collections.abc import Iterable

from torch import nn
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder, DisentangledSelfAttention
from transformers.models.led.modeling_led import LEDEncoderSelfAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention, LongT5TransientGlobalAttention
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention, ParakeetEncoderConvolutionModule
from transformers.models.pegasus_x.modeling_pegasus_x import PegasusXGlobalLocalAttention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerSelfAttention

from ...module_patch import swap_class
from .deberta import DebertaV2ByRows, DebertaV2EncoderByRows
from .longformer import LEDEncoderInBlocks, LongformerInBlocks
from .longt5 import LongT5LocalInBlocks, LongT5TransientGlobalInBlocks
from .parakeet import ParakeetByRows, ParakeetConvolution
from .pegasus_x import PegasusXInBlocks
from .t5_and_mpnet import MPNetByDistance, MPNetEncoderByDistance, MT5ByDistance, T5ByDistance, UMT5ByDistance
from .wav2vec2 import Wav2Vec2BertByRows, Wav2Vec2ConformerByRows

PATCHED: dict[type[nn.Module], type[nn.Module]] = {
    LongformerSelfAttention: LongformerInBlocks,
    LEDEncoderSelfAttention: LEDEncoderInBlocks,
    LongT5LocalAttention: LongT5LocalInBlocks,
    LongT5TransientGlobalAttention: LongT5TransientGlobalInBlocks,
    PegasusXGlobalLocalAttention: PegasusXInBlocks,
    T5Attention: T5ByDistance,
    MT5Attention: MT5ByDistance,
    UMT5Attention: UMT5ByDistance,
    MPNetSelfAttention: MPNetByDistance,
    DisentangledSelfAttention: DebertaV2ByRows,
    ParakeetEncoderAttention: ParakeetByRows,
    Wav2Vec2BertSelfAttention: Wav2Vec2BertByRows,
    Wav2Vec2ConformerSelfAttention: Wav2Vec2ConformerByRows,
}
# What makes the biases of all layers, or the distances, and what else reads matrices of them.
ALSO_REPLACED: dict[type[nn.Module], type[nn.Module]] = {
    MPNetEncoder: MPNetEncoderByDistance,
    DebertaV2Encoder: DebertaV2EncoderByRows,
    ParakeetEncoderConvolutionModule: ParakeetConvolution,
}


def swap_classes(model: nn.Module, modules: Iterable[nn.Module], *, on: bool) -> None:
    """Give modules the classes of a patch, or those that they had.

    Args:
        model (`nn.Module`): which may hold others that are replaced, too.
        modules (`Iterable[nn.Module]`): its self-attention.
        on (`bool`): whether to give or to take.
    """
    for classes, those in ((PATCHED, modules), (ALSO_REPLACED, model.modules())):
        for module in those:
            for exact, patched in classes.items():
                if isinstance(module, exact):
                    swap_class(module, exact, patched, on=on)
