"""ClusterFormer with the heads of an encoder or a decoder.

An output's `loss` has the losses of the clustering in it. What makes a loss of the logits alone leaves them out, as
transformers' `Trainer` does with `label_smoothing_factor`; `total_loss` adds them.
"""

import copy
import warnings
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from ..cache_names import cache_of, named_for_output, takes_cache
from ..classifying import classifier_dropout
from .configuration_clusterformer import ClusterFormerConfig
from .modeling_clusterformer import ClusterFormerModel, ClusterFormerPreTrainedModel, pool
from .outputs import (
    CLUSTERING_FIELDS,
    ClusterFormerCausalLMOutput,
    ClusterFormerMaskedLMOutput,
    ClusterFormerModelOutput,
    ClusterFormerPreTrainingOutput,
    ClusterFormerQuestionAnsweringOutput,
    ClusterFormerSequenceClassifierOutput,
    ClusterFormerTokenClassifierOutput,
    ClusteringOutput,
)
from .sorting import full_precision

IGNORED = -100


def total_loss(
    config: ClusterFormerConfig, task_loss: torch.Tensor | None, clustering: ClusteringOutput
) -> torch.Tensor | None:
    """`μ L1 + ν L2 + λ L3` (Eq. 17), or None without labels."""
    if task_loss is None:
        return None
    loss = config.task_loss_weight * task_loss
    for weight, part in (
        (config.cluster_loss_weight, clustering.cluster_loss),
        (config.sorting_loss_weight, clustering.sorting_loss),
    ):
        if weight and part is not None:
            loss = loss + weight * part
    return loss


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits `(..., classes)`, its mean over the labels that are not -100; 0 where none is."""
    logits, labels = full_precision(logits.flatten(0, -2)), labels.to(logits.device)
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / (labels != IGNORED).sum().clamp(min=1)


def shifted_loss(
    logits: torch.Tensor, labels: torch.Tensor | None, shifted: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Cross-entropy of each word's logits on the word after it; `shifted` are labels that stand there already."""
    if shifted is not None:
        return cross_entropy(logits, shifted)
    return None if labels is None else cross_entropy(logits[:, :-1], labels[:, 1:])


class WordHead(nn.Module):
    """Dense layer, activation and LayerNorm before the decoder that is tied to the embeddings, as in BERT."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.LayerNorm(self.activation(self.dense(hidden_states))))


class _Head(ClusterFormerPreTrainedModel):
    """What all heads share: the model that they stand on, and the losses of its clustering beside that of the task."""

    def _encoded(self, labelled: bool, *inputs: Any, **kwargs: Any) -> ClusterFormerModelOutput:
        """The model's output, with what its clustering reports where it is asked for or there are labels."""
        kwargs["output_clustering"] = self.asks_clustering(kwargs.get("output_clustering"), labelled)
        return self.clusterformer(*inputs, return_dict=True, **kwargs)

    def _fields(self, task_loss: torch.Tensor | None, encoded: ClusterFormerModelOutput) -> dict[str, Any]:
        """The fields that every output has."""
        clustering = {name: getattr(encoded, name) for name in CLUSTERING_FIELDS} | {"task_loss": task_loss}
        loss = total_loss(self.config, task_loss, encoded)
        return clustering | {"loss": loss, "hidden_states": encoded.hidden_states}


class _LabelHead(_Head):
    """A head that takes `labels`, of a text or of each word: `_scores` makes logits, `_task_loss` their loss."""

    output_class: ClassVar[type[ModelOutput]]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Score the vocabulary or the classes for every word, or the classes of a text.

        Args:
            input_ids (`torch.LongTensor`): `(B, N)`.
            attention_mask (`torch.Tensor`, *optional*): `(B, N)`, 0 = padding.
            token_type_ids (`torch.LongTensor`, *optional*): `(B, N)`, segments.
            labels (`torch.Tensor`, *optional*): of words `(B, N)`, -100 = does not count; of texts as in transformers:
                `(B,)` classes; numbers where `num_labels` is 1; `(B, num_labels)` 0 or 1 in floating point, or where
                `config.problem_type` is `"multi_label_classification"`.
            others: what `ClusterFormerModel` takes.

        Returns: the class's output, logits `(B, N, vocab_size)`, `(B, N, num_labels)` or `(B, num_labels)`.
        """
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        encoded = self._encoded(labels is not None, *inputs, **kwargs)
        logits = self._scores(encoded.last_hidden_state, attention_mask)
        task_loss = None if labels is None else self._task_loss(logits, labels)
        return self.output_class(logits=logits, **self._fields(task_loss, encoded))

    def _task_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, labels)


class _WithWordHead(_Head):
    """A model whose `lm_head` scores the vocabulary."""

    _tied_weights_keys = {"lm_head.decoder.weight": "clusterformer.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head.decoder = value


def warn_of_decoder(config: ClusterFormerConfig) -> None:
    """Warn of a decoder where masked words are to be filled in, as BERT does: a saved language model is one."""
    if config.is_decoder:
        warnings.warn(
            "is_decoder=True: masked words are filled in from the words before them alone; with is_decoder=False,"
            " which from_pretrained takes too, also from those after them",
            stacklevel=3,
        )


class ClusterFormerForMaskedLM(_WithWordHead, _LabelHead):
    """ClusterFormer that fills masked words in."""

    output_class = ClusterFormerMaskedLMOutput

    def __init__(self, config: ClusterFormerConfig) -> None:
        warn_of_decoder(config)
        super().__init__(config)
        self.clusterformer = ClusterFormerModel(self.config, add_pooling_layer=False)
        self.lm_head = WordHead(config)
        self.post_init()

    def _scores(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.lm_head(hidden_states)


class ClusterFormerForPreTraining(_WithWordHead):
    """ClusterFormer with both heads of the paper's pre-training (App. F): masked words and next sentence."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        warn_of_decoder(config)
        super().__init__(config)
        self.clusterformer = ClusterFormerModel(self.config)
        self.lm_head = WordHead(config)
        self.next_sentence = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ClusterFormerPreTrainingOutput:
        """Score the vocabulary for every word, and whether the second text follows the first.

        Args:
            labels (`torch.LongTensor`, *optional*): `(B, N)`, the words; -100 = not to be guessed.
            next_sentence_label (`torch.LongTensor`, *optional*): `(B,)`, 0 = it follows, 1 = it does not.
            others: what `ClusterFormerModel` takes.

        Returns: `ClusterFormerPreTrainingOutput`; the loss is there with any of the two labels.
        """
        labelled = labels is not None or next_sentence_label is not None
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        encoded = self._encoded(labelled, *inputs, **kwargs)
        logits = self.lm_head(encoded.last_hidden_state)
        follows = self.next_sentence(encoded.pooler_output)
        scored = (logits, labels), (follows, next_sentence_label)
        parts = [cross_entropy(scores, classes) for scores, classes in scored if classes is not None]
        task_loss = torch.stack(parts).sum() if labelled else None
        return ClusterFormerPreTrainingOutput(
            prediction_logits=logits, seq_relationship_logits=follows, **self._fields(task_loss, encoded)
        )


class ClusterFormerGenerationMixin(GenerationMixin):
    """What the models that write text change in transformers' `generate`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; `causal="paper"` computes the text anew for every word, for its clusters move."""
        if self.config.causal == "paper":
            if kwargs.get("assistant_model") is not None or kwargs.get("prompt_lookup_num_tokens") is not None:
                raise ValueError(
                    'assisted generation needs a cache, and causal="paper" has none; leave out assistant_model and'
                    " prompt_lookup_num_tokens"
                )
            kwargs["use_cache"] = False
        return super().generate(*args, **kwargs)

    @staticmethod
    def create_masks_for_generate(attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
        """The 0/1 mask as it is: transformers makes one of four dimensions of it where the cache is static."""
        return attention_mask

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        """Never: with a static cache it would be compiled, and anew for every word, because the keys are cut."""
        return False


class ClusterFormerForCausalLM(_WithWordHead, ClusterFormerGenerationMixin):
    """ClusterFormer that predicts the next word; `config.is_decoder` is set."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        if not config.is_decoder:
            config = copy.deepcopy(config)
            config.is_decoder = True
        # Built anew, so that what a decoder cannot have is refused.
        super().__init__(config.rebuilt())
        self.clusterformer = ClusterFormerModel(self.config, add_pooling_layer=False)
        self.lm_head = WordHead(self.config)
        self.post_init()

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ClusterFormerCausalLMOutput:
        """Score the vocabulary for the word after every word.

        Args:
            labels (`torch.LongTensor`, *optional*): `(B, N)`, the input; -100 = not to be predicted.
            past_key_values (`Cache`, *optional*), use_cache (`bool`, *optional*): with `causal="strict"`.
            logits_to_keep (`int` or `torch.LongTensor`): only the last so many words, 0 = all; or the places of
                those that are scored.
            others: what `ClusterFormerModel` takes, what concerns an encoder with `config.add_cross_attention`. And
                `shift_labels` `(B, N)`, the word after each word, instead of `labels`.

        Returns: `ClusterFormerCausalLMOutput`, logits `(B, N, vocab_size)`.
        """
        # What Trainer passes where a text is spread over processes.
        shifted = kwargs.pop("shift_labels", None)
        labelled = labels is not None or shifted is not None
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        of_encoder = encoder_hidden_states, encoder_attention_mask
        decoded = self._encoded(labelled, *inputs, *of_encoder, past_key_values, use_cache, **kwargs)
        scored = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(decoded.last_hidden_state[:, scored])
        task_loss = shifted_loss(logits, labels, shifted)
        return ClusterFormerCausalLMOutput(
            logits=logits, **named_for_output(cache_of(decoded)), **self._fields(task_loss, decoded)
        )


class ClusterFormerForSequenceClassification(_LabelHead):
    """ClusterFormer that classifies texts or pairs of texts (`token_type_ids` tells the two apart)."""

    output_class = ClusterFormerSequenceClassifierOutput

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__(config)
        self.clusterformer = ClusterFormerModel(self.config, add_pooling_layer=False)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def _scores(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        mask = None if attention_mask is None else attention_mask.bool()
        return self.classifier(self.dropout(pool(hidden_states, mask, self.config.pooling)))

    def _task_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        problem, logits = self.config.problem_type, full_precision(logits)
        if problem is None and self.config.num_labels > 1 and labels.dtype in (torch.int64, torch.int32):
            problem = "single_label_classification"
        if problem != "single_label_classification":
            labels = labels.to(logits.dtype)  # transformers' losses of numbers take no integers
        return self.loss_function(labels=labels, pooled_logits=logits, config=self.config)


class ClusterFormerForTokenClassification(_LabelHead):
    """ClusterFormer that classifies every word."""

    output_class = ClusterFormerTokenClassifierOutput

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__(config)
        self.clusterformer = ClusterFormerModel(self.config, add_pooling_layer=False)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def _scores(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(self.dropout(hidden_states))


class ClusterFormerForQuestionAnswering(_Head):
    """ClusterFormer that finds the first and the last word of an answer."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__(config)
        self.clusterformer = ClusterFormerModel(self.config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ClusterFormerQuestionAnsweringOutput:
        """Score every word as the first and as the last of the answer.

        Args:
            start_positions, end_positions (`torch.LongTensor`, *optional*): `(B,)`; beyond the text = does not count,
                below 0 = 0, as in transformers.
            others: what `ClusterFormerModel` takes.

        Returns: `ClusterFormerQuestionAnsweringOutput`, both logits `(B, N)`.
        """
        labelled = start_positions is not None and end_positions is not None
        inputs = input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        encoded = self._encoded(labelled, *inputs, **kwargs)
        start, end = self.qa_outputs(encoded.last_hidden_state).unbind(dim=-1)
        task_loss = None
        if start_positions is not None and end_positions is not None:
            task_loss = (self._place_loss(start, start_positions) + self._place_loss(end, end_positions)) / 2
        return ClusterFormerQuestionAnsweringOutput(
            start_logits=start, end_logits=end, **self._fields(task_loss, encoded)
        )

    def _place_loss(self, logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        places = places.to(logits.device).clamp(min=0)
        return cross_entropy(logits, places.where(places < logits.shape[1], IGNORED))
