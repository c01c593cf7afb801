"""Composite Slice Transformer (Lee 2023), registered with the Auto classes of transformers."""

import transformers

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
        transformers.AutoModel: CSTModel,
        transformers.AutoModelForMaskedLM: CSTForMaskedLM,
        transformers.AutoModelForCausalLM: CSTForCausalLM,
        transformers.AutoModelForSequenceClassification: CSTForSequenceClassification,
        transformers.AutoModelForTokenClassification: CSTForTokenClassification,
        transformers.AutoModelForQuestionAnswering: CSTForQuestionAnswering,
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
