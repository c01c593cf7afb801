"""ClusterFormer (Wang 2022): configuration, models, and their registration with the Auto classes."""

from typing import Any

import transformers

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
        transformers.AutoModel: ClusterFormerModel,
        transformers.AutoModelForCausalLM: ClusterFormerForCausalLM,
        transformers.AutoModelForMaskedLM: ClusterFormerForMaskedLM,
        transformers.AutoModelForPreTraining: ClusterFormerForPreTraining,
        transformers.AutoModelForQuestionAnswering: ClusterFormerForQuestionAnswering,
        transformers.AutoModelForSeq2SeqLM: ClusterFormerForConditionalGeneration,
        transformers.AutoModelForSequenceClassification: ClusterFormerForSequenceClassification,
        transformers.AutoModelForTokenClassification: ClusterFormerForTokenClassification,
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
