"""Outputs of the ClusterFormer models: those of transformers, and what the clustering reports beside them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput

CLUSTERING_FIELDS = ("task_loss", "cluster_loss", "sorting_loss", "largest_cluster", "empty_clusters", "word_cosine")


class ClusteringReport(NamedTuple):
    """What a layer's clustering reports, as in `ClusteringOutput`; no losses where nothing is learned."""

    largest_cluster: torch.Tensor
    empty_clusters: torch.Tensor
    word_cosine: torch.Tensor
    cluster_loss: torch.Tensor | None = None
    sorting_loss: torch.Tensor | None = None


@dataclass
class ClusteringOutput(ModelOutput):
    """What the clustering reports; means over layers, None where it was not computed.

    Attributes:
        task_loss: the paper's `L3`, before its weight.
        cluster_loss: `L1`, before its weight.
        sorting_loss: `L2`, before its weight.
        largest_cluster: share of a text's words that are in its largest cluster.
        empty_clusters: share of the clusters that have no word of a text.
        word_cosine: mean cosine of two words of a text; near 1 the words have collapsed.
    """

    task_loss: torch.Tensor | None = None
    cluster_loss: torch.Tensor | None = None
    sorting_loss: torch.Tensor | None = None
    largest_cluster: torch.Tensor | None = None
    empty_clusters: torch.Tensor | None = None
    word_cosine: torch.Tensor | None = None


@dataclass
class ClusterFormerModelOutput(ClusteringOutput, BaseModelOutputWithPoolingAndCrossAttentions):
    """Output of `ClusterFormerModel`."""


@dataclass
class ClusterFormerMaskedLMOutput(ClusteringOutput, MaskedLMOutput):
    """Output of `ClusterFormerForMaskedLM`."""


@dataclass
class PreTrainingOutput(ModelOutput):
    """Output of a model with the heads of BERT's pre-training.

    Attributes:
        loss: the total.
        prediction_logits: `(B, N, vocab_size)`.
        seq_relationship_logits: `(B, 2)`, "is the next sentence" first.
        hidden_states: of every layer.
    """

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass
class ClusterFormerPreTrainingOutput(ClusteringOutput, PreTrainingOutput):
    """Output of `ClusterFormerForPreTraining`."""


@dataclass
class ClusterFormerCausalLMOutput(ClusteringOutput, CausalLMOutputWithCrossAttentions):
    """Output of `ClusterFormerForCausalLM`."""


@dataclass
class ClusterFormerSequenceClassifierOutput(ClusteringOutput, SequenceClassifierOutput):
    """Output of `ClusterFormerForSequenceClassification`."""


@dataclass
class ClusterFormerTokenClassifierOutput(ClusteringOutput, TokenClassifierOutput):
    """Output of `ClusterFormerForTokenClassification`."""


@dataclass
class ClusterFormerQuestionAnsweringOutput(ClusteringOutput, QuestionAnsweringModelOutput):
    """Output of `ClusterFormerForQuestionAnswering`."""


@dataclass
class ClusterFormerSeq2SeqLMOutput(ClusteringOutput, Seq2SeqLMOutput):
    """Output of `ClusterFormerForConditionalGeneration`."""
