"""Models that are trained from scratch, found by the Auto classes of transformers once this package is imported."""

from .clusterformer import (
    ClusterFormerConfig,
    ClusterFormerForCausalLM,
    ClusterFormerForConditionalGeneration,
    ClusterFormerForMaskedLM,
    ClusterFormerForPreTraining,
    ClusterFormerForQuestionAnswering,
    ClusterFormerForSequenceClassification,
    ClusterFormerForTokenClassification,
    ClusterFormerModel,
    log_clustering,
)
from .cst import (
    CSTConfig,
    CSTForCausalLM,
    CSTForMaskedLM,
    CSTForPairClassification,
    CSTForQuestionAnswering,
    CSTForSequenceClassification,
    CSTForTokenClassification,
    CSTModel,
)

__all__ = [
    "CSTConfig",
    "CSTForCausalLM",
    "CSTForMaskedLM",
    "CSTForPairClassification",
    "CSTForQuestionAnswering",
    "CSTForSequenceClassification",
    "CSTForTokenClassification",
    "CSTModel",
    "ClusterFormerConfig",
    "ClusterFormerForCausalLM",
    "ClusterFormerForConditionalGeneration",
    "ClusterFormerForMaskedLM",
    "ClusterFormerForPreTraining",
    "ClusterFormerForQuestionAnswering",
    "ClusterFormerForSequenceClassification",
    "ClusterFormerForTokenClassification",
    "ClusterFormerModel",
    "log_clustering",
]
