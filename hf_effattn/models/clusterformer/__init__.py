"""ClusterFormer (Wang 2022): configuration, models, and their registration with the Auto classes."""

from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from ..auto_classes import register
from .configuration_clusterformer import ClusterFormerConfig
from .heads import (
    ClusterFormerForCausalLM,
    ClusterFormerForMaskedLM,
    ClusterFormerForPreTraining,
    ClusterFormerForQuestionAnswering,
    ClusterFormerForSequenceClassification,
    ClusterFormerForTokenClassification,
)
from .modeling_clusterformer import ClusterFormerModel, ClusterFormerPreTrainedModel
from .seq2seq import ClusterFormerForConditionalGeneration
from .training_log import log_clustering

register(
    ClusterFormerConfig,
    {
        AutoModel: ClusterFormerModel,
        AutoModelForCausalLM: ClusterFormerForCausalLM,
        AutoModelForMaskedLM: ClusterFormerForMaskedLM,
        AutoModelForPreTraining: ClusterFormerForPreTraining,
        AutoModelForQuestionAnswering: ClusterFormerForQuestionAnswering,
        AutoModelForSeq2SeqLM: ClusterFormerForConditionalGeneration,
        AutoModelForSequenceClassification: ClusterFormerForSequenceClassification,
        AutoModelForTokenClassification: ClusterFormerForTokenClassification,
    },
)


def __getattr__(name: str) -> Any:
    """`NeuralClustering`, imported on demand: it alone needs scikit-learn."""
    if name == "NeuralClustering":
        from .estimator import NeuralClustering

        return NeuralClustering
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ClusterFormerConfig",
    "ClusterFormerForCausalLM",
    "ClusterFormerForConditionalGeneration",
    "ClusterFormerForMaskedLM",
    "ClusterFormerForPreTraining",
    "ClusterFormerForQuestionAnswering",
    "ClusterFormerForSequenceClassification",
    "ClusterFormerForTokenClassification",
    "ClusterFormerModel",
    "ClusterFormerPreTrainedModel",
    "log_clustering",
]
