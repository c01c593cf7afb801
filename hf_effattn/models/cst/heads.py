"""The Composite Slice Transformer with a head for each task.

Sizes: `B` batch, `N` length.
"""

import copy
import inspect
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.activations import ACT2FN
from transformers.generation import GenerationMode
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from ..cache_names import NEW, OLD, cache_of, named_for_output, takes_cache
from ..classifying import classifier_dropout, masked_mean
from .cache import CSTCache
from .configuration_cst import CSTConfig
from .modeling_cst import CSTModel, CSTPreTrainedModel

# As `generate` of the installed transformers names the cache.
CACHE_NAME = NEW if NEW in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else OLD
# Of the arguments of `generate` that reach a step.
NOT_FOR_FORWARD = ("labels", "is_first_iteration")


def _bidirectional(config: CSTConfig, name: str) -> CSTConfig:
    if config.is_decoder:
        raise ValueError(f"{name} sees both sides of a token; load it with is_decoder=False, or use CSTForCausalLM")
    return config


def _loss_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer passes on for the loss: with gradient accumulation the mean is over all its batches, and labels
    that were shifted before a text was cut into parts."""
    return {name: value for name, value in arguments.items() if name in ("num_items_in_batch", "shift_labels")}


class _LabelHead(CSTPreTrainedModel):
    """A head that takes `labels`, of a text or of each token: `_scores` makes logits, `_task_loss` their loss."""

    output_class: ClassVar[type[ModelOutput]]

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Logits `(B, N, vocab_size)` or `(B, N, num_labels)` of every token, or `(B, num_labels)` of a text.

        And the loss where `labels` are given: of tokens `(B, N)` (-100: not counted), of texts `(B,)` or
        `(B, num_labels)`.
        """
        output = self.cst(input_ids, attention_mask, token_type_ids, inputs_embeds, return_dict=True, **kwargs)
        logits = self._scores(output.last_hidden_state, attention_mask)
        loss = None if labels is None else self._task_loss(logits, labels, **_loss_arguments(kwargs))
        return self.output_class(loss=loss, logits=logits, hidden_states=output.hidden_states)


class CSTPredictionHead(nn.Module):
    """Dense layer, activation and LayerNorm before the vocabulary, as in BERT."""

    def __init__(self, config: CSTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `(B, N, d)` to logits `(B, N, vocab_size)`."""
        return self.decoder(self.norm(self.activation(self.dense(hidden))))


class CSTForMaskedLM(_LabelHead):
    """With a masked-language-model head."""

    output_class = MaskedLMOutput
    _tied_weights_keys = {"head.decoder.weight": "cst.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: CSTConfig) -> None:
        super().__init__(_bidirectional(config, "CSTForMaskedLM"))
        self.cst = CSTModel(config)
        self.head = CSTPredictionHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The layer that makes the logits."""
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Put another layer in."""
        self.head.decoder = new_embeddings

    def _scores(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.head(hidden)

    def _task_loss(self, logits: torch.Tensor, labels: torch.Tensor, **of_trainer: Any) -> torch.Tensor:
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **of_trainer)


class CSTForCausalLM(CSTPreTrainedModel, GenerationMixin):
    """With a language-model head; causal whatever `config.is_decoder` says."""

    _tied_weights_keys = {"lm_head.weight": "cst.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: CSTConfig) -> None:
        if not config.is_decoder:
            config = copy.deepcopy(config)
            config.is_decoder = True
        super().__init__(config)
        self.cst = CSTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache
    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        past_key_values: CSTCache | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        next_sequence_length: int | None = None,
        token_type_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Inputs of the next step: the columns that the cache has not seen.

        Args:
            input_ids (`torch.LongTensor`): `(B, all columns so far)`.
            past_key_values (`CSTCache`, *optional*): the cache.
            attention_mask (`torch.Tensor`, *optional*): `(B, all columns so far)`.
            inputs_embeds (`torch.Tensor`, *optional*): embeddings of the prompt, for the first step.
            use_cache (`bool`, *optional*): whether to keep a cache.
            next_sequence_length (`int`, *optional*): how many columns are new, where `generate` knows.
            token_type_ids (`torch.LongTensor`, *optional*): `(B, all columns so far)`, segments.
            kwargs: further arguments of `generate`, of which those of the output are handed on.

        Returns: the arguments of `forward`.
        """
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        inputs = {name: value for name, value in kwargs.items() if name not in NOT_FOR_FORWARD}
        inputs |= {"attention_mask": attention_mask, "use_cache": use_cache, "past_key_values": past_key_values}
        prompt = 0 if inputs_embeds is None else inputs_embeds.shape[1]
        if inputs_embeds is not None and past < prompt:
            # Behind the prompt: drafts, and without a cache what was generated.
            columns = prompt if attention_mask is None else attention_mask.shape[1]
            if columns > prompt:
                words = self.get_input_embeddings()(input_ids[:, prompt - columns :])
                inputs_embeds = torch.cat([inputs_embeds, words.to(inputs_embeds)], dim=1)
            inputs["inputs_embeds"], new = inputs_embeds[:, past:], columns - past
        else:
            if past and next_sequence_length is None:
                # After a prompt of embeddings input_ids hold only what was generated; the mask has every column.
                columns = input_ids.shape[1] if attention_mask is None else attention_mask.shape[1]
                next_sequence_length = columns - past
            inputs["input_ids"] = input_ids[:, -next_sequence_length:] if next_sequence_length else input_ids
            new = inputs["input_ids"].shape[1]
        if token_type_ids is not None:
            inputs["token_type_ids"] = token_type_ids[:, -new:]
        return inputs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
    ) -> None:
        """A cache of slice summaries, which assisted generation asks for before the model has run."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args)
        if not generation_config.use_cache:
            return
        cache = model_kwargs.get(CACHE_NAME)
        if cache is None:
            cache = model_kwargs[CACHE_NAME] = CSTCache(self.config.num_hidden_layers)
        drafts = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        if drafts and isinstance(cache, CSTCache):
            cache.activate_past_recording()

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: CSTCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token at every place, the cache, and the loss where `labels` `(B, N)` are given.

        Labels are shifted inside; `shift_labels` `(B, N)` among `kwargs` are taken as they are. `logits_to_keep` asks
        for the last so many places only, or for the places it lists.
        """
        output = self.cst(
            input_ids,
            attention_mask,
            token_type_ids,
            inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **_loss_arguments(kwargs))
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=output.hidden_states, **named_for_output(cache_of(output))
        )


class CSTClassificationHead(nn.Module):
    """Two layers with ReLU between them (Lee 2023, A.6.1).

    Args:
        config (`CSTConfig`): sizes.
        inputs (`int`): how many vectors of `hidden_size` come in, one after the other.
    """

    def __init__(self, config: CSTConfig, inputs: int = 1) -> None:
        super().__init__()
        self.dropout = classifier_dropout(config)
        self.inner = nn.Linear(inputs * config.hidden_size, config.intermediate_size)
        self.outer = nn.Linear(config.intermediate_size, config.num_labels)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features `(B, inputs · d)` to logits `(B, num_labels)`."""
        return self.outer(torch.relu(self.inner(self.dropout(features))))


class CSTForSequenceClassification(_LabelHead):
    """With a classifier, or a regression head, on the mean of the tokens.

    Args:
        config (`CSTConfig`): sizes and variant; `num_labels` and `problem_type` as everywhere in transformers.
    """

    output_class = SequenceClassifierOutput

    # Of the losses on texts transformers divides only cross-entropy by the number of labels in a step: Trainer must
    # average all of them over accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: CSTConfig) -> None:
        super().__init__(config)
        self.cst = CSTModel(config)
        self.classifier = CSTClassificationHead(config)
        self.post_init()

    def _scores(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(masked_mean(hidden, attention_mask))

    def _task_loss(self, logits: torch.Tensor, labels: torch.Tensor, **of_trainer: Any) -> torch.Tensor:
        return self.loss_function(labels=labels, pooled_logits=logits, config=self.config)


class CSTForPairClassification(CSTPreTrainedModel):
    """With a classifier on two texts, each read alone by the same tower, as in the LRA Retrieval task.

    The classifier sees both means, their product and their difference."""

    accepts_loss_kwargs = False  # as above

    def __init__(self, config: CSTConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"
        self.cst = CSTModel(config)
        self.classifier = CSTClassificationHead(config, inputs=4)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        pair_input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pair_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits `(B, num_labels)` for `B` pairs of texts, `(B, N)` and `(B, M)` tokens, and the loss."""
        first, second = (
            masked_mean(self.cst(ids, mask, return_dict=True, **kwargs).last_hidden_state, mask)
            for ids, mask in ((input_ids, attention_mask), (pair_input_ids, pair_attention_mask))
        )
        logits = self.classifier(torch.cat([first, second, first * second, first - second], dim=-1))
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class CSTForTokenClassification(_LabelHead):
    """With a classifier on every token."""

    output_class = TokenClassifierOutput

    def __init__(self, config: CSTConfig) -> None:
        super().__init__(config)
        self.cst = CSTModel(config)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def _scores(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(self.dropout(hidden))

    def _task_loss(self, logits: torch.Tensor, labels: torch.Tensor, **of_trainer: Any) -> torch.Tensor:
        return self.loss_function(logits, labels, self.config, **of_trainer)


class CSTForQuestionAnswering(CSTPreTrainedModel):
    """With start and end logits on every token."""

    def __init__(self, config: CSTConfig) -> None:
        super().__init__(config)
        self.cst = CSTModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Start and end logits `(B, N)`, and the loss where both positions `(B,)` are given."""
        output = self.cst(input_ids, attention_mask, token_type_ids, inputs_embeds, return_dict=True, **kwargs)
        start, end = self.qa_outputs(output.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            places = start_positions.to(start.device), end_positions.to(end.device)
            loss = self.loss_function(start.contiguous(), end.contiguous(), *places, **_loss_arguments(kwargs))
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=output.hidden_states
        )
