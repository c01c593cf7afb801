"""ClusterFormer as encoder and decoder: translation (Source: Wang 2022, section 4.1)."""

import copy
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import can_return_tuple

from ..cache_names import cache_of, named_for_output, takes_cache
from .configuration_clusterformer import ClusterFormerConfig
from .heads import IGNORED, ClusterFormerGenerationMixin, cross_entropy, total_loss
from .modeling_clusterformer import ClusterFormerModel, ClusterFormerPreTrainedModel
from .outputs import CLUSTERING_FIELDS, ClusterFormerSeq2SeqLMOutput, ClusteringOutput


class ClusterFormerForConditionalGeneration(ClusterFormerPreTrainedModel, ClusterFormerGenerationMixin):
    """An encoder of `num_hidden_layers`, and a decoder of `decoder_layers` that also attends to the encoder.

    Both sort their own words; the decoder by `config.decoder_assignment` and `config.causal`. Embeddings and scores
    of the vocabulary are tied. The weights of a `ClusterFormerModel` are loaded as those of the encoder.
    """

    base_model_prefix = "encoder"
    _tied_weights_keys = {  # noqa: RUF012
        "decoder.embeddings.word_embeddings.weight": "encoder.embeddings.word_embeddings.weight",
        "lm_head.weight": "encoder.embeddings.word_embeddings.weight",
    }

    def __init__(self, config: ClusterFormerConfig) -> None:
        if not config.is_encoder_decoder:
            config = copy.deepcopy(config)
            config.is_encoder_decoder = True
        super().__init__(config)
        config = self.config
        self.encoder = ClusterFormerModel(
            config.rebuilt(is_encoder_decoder=False, is_decoder=False, add_cross_attention=False),
            add_pooling_layer=False,
        )
        self.decoder = ClusterFormerModel(
            config.rebuilt(
                is_encoder_decoder=False,
                assignment=config.decoder_assignment or config.assignment,
                is_decoder=True,
                add_cross_attention=True,
                num_hidden_layers=config.decoder_layers,
            ),
            add_pooling_layer=False,
        )
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.encoder.set_input_embeddings(value)
        if self.config.tie_word_embeddings:
            self.decoder.set_input_embeddings(value)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers; where embeddings are not tied the decoder's own are resized too.

        Encoder and decoder know the new size: saved apart they could not be loaded otherwise.
        """
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if not self.config.tie_word_embeddings:
            self.decoder.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.encoder.config.vocab_size = self.decoder.config.vocab_size = self.config.vocab_size
        return embeddings

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self.encoder

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """The labels moved one place to the right, behind the word that starts every translation."""
        start = self.config.decoder_start_token_id
        if start is None:
            raise ValueError("config.decoder_start_token_id must be set: the word that every translation starts with")
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = start
        return shifted.masked_fill(shifted == IGNORED, self.config.pad_token_id or 0)

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_clustering: bool | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ClusterFormerSeq2SeqLMOutput:
        """Score the vocabulary for the next word of every translation.

        Args:
            input_ids (`torch.LongTensor`): `(B, M)`, the sources; or `inputs_embeds`; or `encoder_outputs`.
            attention_mask (`torch.Tensor`, *optional*): `(B, M)`, 0 = padding.
            decoder_input_ids (`torch.LongTensor`, *optional*): `(B, N)`; or `decoder_inputs_embeds`. Default: the
                labels moved one place to the right.
            decoder_attention_mask (`torch.Tensor`, *optional*): `(B, N)`, with a cache `(B, past + N)`. Default: up to
                the last label that counts; all where there are no labels, or of another shape.
            encoder_outputs (*optional*): what the encoder gave; its first entry is read.
            past_key_values (`Cache`, *optional*), use_cache (`bool`, *optional*): with `causal="strict"`.
            labels (`torch.LongTensor`, *optional*): `(B, N)`, the translations; -100 = does not count.
            output_hidden_states (`bool`, *optional*): of both parts.
            output_clustering (`bool`, *optional*): clustering losses and statistics, means over both parts. Default:
                while training, and with labels.
            token_type_ids, position_ids (`torch.LongTensor`, *optional*): `(B, M)`, of the sources.
            kwargs: what `ClusterFormerModel` takes, for both parts.

        Returns:
            `ClusterFormerSeq2SeqLMOutput`, logits `(B, N, vocab_size)`.
        """
        output_clustering = self.asks_clustering(output_clustering, labels is not None)
        # Encoder and decoder have configs of their own, which do not follow what is set here later.
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None and not self.config.use_cache:
            use_cache = False
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("give decoder_input_ids, decoder_inputs_embeds or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        given = decoder_inputs_embeds if decoder_input_ids is None else decoder_input_ids
        unmasked = decoder_attention_mask is None and past_key_values is None
        if unmasked and labels is not None and given is not None and labels.shape == given.shape[:2]:
            # What follows the last label would move clusters and blocks; the causal mask hides no padding there.
            decoder_attention_mask = (labels != IGNORED).flip(1).cumsum(dim=1).flip(1) > 0
        options = {"output_hidden_states": output_hidden_states, "output_clustering": output_clustering}
        options |= {"return_dict": True, **kwargs}
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds=inputs_embeds, **options
            )
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoder_outputs[0],
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **options,
        )
        logits = self.lm_head(decoded.last_hidden_state)
        task_loss = None if labels is None else cross_entropy(logits, labels)
        clustering = _mean_of(encoder_outputs, decoded)
        return ClusterFormerSeq2SeqLMOutput(
            loss=total_loss(self.config, task_loss, clustering),
            logits=logits,
            decoder_hidden_states=decoded.hidden_states,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            **named_for_output(cache_of(decoded)),
            **dict(clustering) | {"task_loss": task_loss},
        )


def _mean_of(encoded: Any, decoded: ClusteringOutput) -> ClusteringOutput:
    """What both parts report, averaged; the decoder's where the encoder ran without reporting."""
    fields = {}
    for name in CLUSTERING_FIELDS:
        numbers = [n for n in (getattr(encoded, name, None), getattr(decoded, name)) if n is not None]
        fields[name] = sum(n.to(numbers[-1].device) for n in numbers) / len(numbers) if numbers else None
    return ClusteringOutput(**fields)
