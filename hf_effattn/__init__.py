"""Efficient attention for the Hugging Face transformers model you already have.

Importing this package registers its attention functions with transformers, so that `attn_implementation="i-clustered"`
works, and its models `cst` and `clusterformer` with the Auto classes. It adds a line to what transformers reports when
it loads a converted model as an exact one; nothing else about transformers changes. Models that sentence-transformers
loads come back patched where they were saved so.
"""

from . import ops
from .hub import model_card, push_to_hub
from .models import (
    ClusterFormerConfig,
    ClusterFormerForCausalLM,
    ClusterFormerForConditionalGeneration,
    ClusterFormerForMaskedLM,
    ClusterFormerForPreTraining,
    ClusterFormerForQuestionAnswering,
    ClusterFormerForSequenceClassification,
    ClusterFormerForTokenClassification,
    ClusterFormerModel,
    CSTConfig,
    CSTForCausalLM,
    CSTForMaskedLM,
    CSTForPairClassification,
    CSTForQuestionAnswering,
    CSTForSequenceClassification,
    CSTForTokenClassification,
    CSTModel,
    log_clustering,
)
from .patching import (
    MeasuredError,
    extend_positions,
    from_pretrained,
    list_methods,
    measured_error,
    parallelize,
    patch_attention,
    unpatch_attention,
)
from .reporting import Calibration, Report, calibrate, report
from .version import __version__

__all__ = [
    "CSTConfig", "CSTForCausalLM", "CSTForMaskedLM", "CSTForPairClassification", "CSTForQuestionAnswering",
    "CSTForSequenceClassification", "CSTForTokenClassification", "CSTModel", "Calibration", "ClusterFormerConfig",
    "ClusterFormerForCausalLM", "ClusterFormerForConditionalGeneration", "ClusterFormerForMaskedLM",
    "ClusterFormerForPreTraining", "ClusterFormerForQuestionAnswering", "ClusterFormerForSequenceClassification",
    "ClusterFormerForTokenClassification", "ClusterFormerModel", "MeasuredError", "Report", "__version__",
    "calibrate", "extend_positions", "from_pretrained", "list_methods", "log_clustering", "measured_error",
    "model_card", "ops", "parallelize", "patch_attention", "push_to_hub", "report", "unpatch_attention",
]  # fmt: skip
