"""The classes that a patch gives to modules which attend themselves; read with the first such model."""

from torch import nn
from transformers import PreTrainedModel
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

from ...model_types.stacks import Stack, adds_biases
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
BESIDE: dict[type[nn.Module], type[nn.Module]] = {
    MPNetEncoder: MPNetEncoderByDistance,
    DebertaV2Encoder: DebertaV2EncoderByRows,
    ParakeetEncoderConvolutionModule: ParakeetConvolution,
}


def run_own(stack: Stack, implementation: str, *, patched: bool) -> None:
    """Give the modules of a stack the classes of a patch, or those that they had.

    Args:
        stack (`Stack`): of a model that attends itself.
        implementation (`str`): under which transformers makes the masks of those with biases of distances, whose
            decoders have a config of their own; a method's are of `B * N`.
        patched (`bool`): whether to give or to take.
    """
    for classes, modules in ((PATCHED, stack.modules), (BESIDE, stack.model.modules())):
        for module in modules:
            for exact, own in classes.items():
                if isinstance(module, exact):
                    swap_class(module, exact, own, on=patched)
    if adds_biases(stack.modules[0]):
        parts = [part for part in stack.model.modules() if isinstance(part, PreTrainedModel)]
        innermost = {module: part for part in parts for module in part.modules()}
        for part in {innermost[module] for module in stack.modules}:
            part.config._attn_implementation = implementation
