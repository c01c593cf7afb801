"""Composite Slice Transformer (Lee 2023), registered with the Auto classes of transformers."""

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ..auto_classes import register
from .cache import CSTCache
from .configuration_cst import CSTConfig
from .heads import (
    CSTForCausalLM,
    CSTForMaskedLM,
    CSTForPairClassification,
    CSTForQuestionAnswering,
    CSTForSequenceClassification,
    CSTForTokenClassification,
)
from .modeling_cst import CSTModel, CSTPreTrainedModel

register(
    CSTConfig,
    {
        AutoModel: CSTModel,
        AutoModelForMaskedLM: CSTForMaskedLM,
        AutoModelForCausalLM: CSTForCausalLM,
        AutoModelForSequenceClassification: CSTForSequenceClassification,
        AutoModelForTokenClassification: CSTForTokenClassification,
        AutoModelForQuestionAnswering: CSTForQuestionAnswering,
    },
)

__all__ = [
    "CSTCache",
    "CSTConfig",
    "CSTForCausalLM",
    "CSTForMaskedLM",
    "CSTForPairClassification",
    "CSTForQuestionAnswering",
    "CSTForSequenceClassification",
    "CSTForTokenClassification",
    "CSTModel",
    "CSTPreTrainedModel",
]
