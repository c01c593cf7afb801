"""Composite Slice Transformer (Lee 2023), registered with the Auto classes of transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache_cst import CSTCache
from .configuration_cst import CSTConfig
from .heads_cst import (
    CSTForCausalLM,
    CSTForMaskedLM,
    CSTForPairClassification,
    CSTForQuestionAnswering,
    CSTForSequenceClassification,
    CSTForTokenClassification,
)
from .modeling_cst import CSTModel, CSTPreTrainedModel

AutoConfig.register(CSTConfig.model_type, CSTConfig, exist_ok=True)
AutoModel.register(CSTConfig, CSTModel, exist_ok=True)
AutoModelForMaskedLM.register(CSTConfig, CSTForMaskedLM, exist_ok=True)
AutoModelForCausalLM.register(CSTConfig, CSTForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(CSTConfig, CSTForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(CSTConfig, CSTForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(CSTConfig, CSTForQuestionAnswering, exist_ok=True)

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
