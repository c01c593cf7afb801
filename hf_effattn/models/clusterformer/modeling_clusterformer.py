"""ClusterFormer: a Transformer whose attention sees the words that neural clustering put together (Wang 2022)."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, QuantizedCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple

from ...ops.derivatives import check_no_onnx
from ..cache_names import named_for_output, takes_cache
from ..classifying import masked_mean
from .attention import CentroidWeight, CrossAttention, FullSelfAttention, SortedBlockSelfAttention, cached_words
from .configuration_clusterformer import ClusterFormerConfig
from .outputs import ClusterFormerModelOutput, ClusteringReport
from .sorting import (
    CentroidProjection,
    Centroids,
    SortedWords,
    WordSorting,
    cluster_loss,
    cluster_statistics,
    sorting_loss,
)


class ClusterFormerEmbeddings(nn.Module):
    """Words, positions and token types; positions are counted among the words that count."""

    def __init__(self, config: ClusterFormerConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, words: torch.Tensor, token_type_ids: torch.Tensor | None, position_ids: torch.Tensor
    ) -> torch.Tensor:
        words = words + self.position_embeddings(position_ids)
        if token_type_ids is None:
            token_type_ids = position_ids.new_zeros(1, 1)
        return self.dropout(self.LayerNorm(words + self.token_type_embeddings(token_type_ids)))


class ClusterFormerLayer(GradientCheckpointingLayer):
    """Sort, attend within blocks, attend to the encoder where there is one, feed forward."""

    def __init__(self, config: ClusterFormerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        full = config.assignment == "full"
        self.sorting = None if full else WordSorting(config, layer_idx)
        self.attention = (FullSelfAttention if full else SortedBlockSelfAttention)(config, layer_idx)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if config.add_cross_attention:
            self.cross_attention = CrossAttention(config, layer_idx)
            self.cross_attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: torch.Tensor,
        centroids: torch.Tensor | None,
        mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        encoder_mask: torch.Tensor | None,
        past_key_values: Cache | None = None,
        output_clustering: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """New hidden states `(B, N, d)`, centroids for the next layer, and what the clustering reports.

        The report is one tensor: reentrant checkpointing loses the gradient of what is inside a container.
        """
        pre_norm = self.config.pre_norm
        own_cache, both_caches = past_key_values, None
        if isinstance(past_key_values, EncoderDecoderCache):
            own_cache, both_caches = past_key_values.self_attention_cache, past_key_values

        words = self.attention_norm(hidden_states) if pre_norm else hidden_states
        own_mask = mask if mask is None else mask[:, -words.shape[1] :]
        clustered: SortedWords | None = None
        report = None
        if self.sorting is not None:
            clustered = self.sorting(words, centroids, own_mask, output_clustering)
            report = self.report(words, self.sorting, clustered, own_mask) if output_clustering else None
            # The strict form cannot pass updated centroids on: they have seen all the words.
            centroids = centroids if self.sorting.strict else clustered.updated
        attended = self.attention(words, clustered, mask, own_cache)
        hidden_states = hidden_states + self.dropout(attended)
        hidden_states = hidden_states if pre_norm else self.attention_norm(hidden_states)

        if encoder_hidden_states is not None:
            words = self.cross_attention_norm(hidden_states) if pre_norm else hidden_states
            attended = self.cross_attention(words, encoder_hidden_states, encoder_mask, both_caches)
            hidden_states = hidden_states + self.dropout(attended)
            hidden_states = hidden_states if pre_norm else self.cross_attention_norm(hidden_states)

        words = self.output_norm(hidden_states) if pre_norm else hidden_states
        hidden_states = hidden_states + self.dropout(self.output(self.activation(self.intermediate(words))))
        hidden_states = hidden_states if pre_norm else self.output_norm(hidden_states)
        stacked = None
        if report is not None:
            stacked = torch.stack([number.to(report.word_cosine.dtype) for number in report if number is not None])
        return hidden_states, centroids, stacked

    def report(
        self, words: torch.Tensor, sorting: WordSorting, clustered: SortedWords, mask: torch.Tensor | None
    ) -> ClusteringReport | None:
        """The statistics of the clusters where there are any, and `L1` and `L2` where centroids are learned."""
        if not sorting.has_clusters:
            return None
        losses: tuple[torch.Tensor, ...] = ()
        if clustered.updated is not None:
            losses = (
                cluster_loss(words, clustered.updated, clustered.labels, mask, sorting.cosine),
                sorting_loss(clustered.updated, sorting.cosine, mask),
            )
        return ClusteringReport(*cluster_statistics(words, clustered.labels, self.config.clusters, mask), *losses)


class ClusterFormerPreTrainedModel(PreTrainedModel):
    """Initialisation and what transformers must know of the class."""

    config_class = ClusterFormerConfig
    base_model_prefix = "clusterformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ("ClusterFormerLayer",)
    # The clustering losses are means: Trainer must average them over accumulation steps as it does the loss.
    accepts_loss_kwargs = False

    def __init__(self, config: ClusterFormerConfig, *inputs: Any, **kwargs: Any) -> None:
        super().__init__(config.settled(), *inputs, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CentroidProjection):
            # From a random start the clusters are those of a random projection, and hardly leave them.
            init.eye_(module.weight)
        elif isinstance(module, Centroids):
            init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif isinstance(module, CentroidWeight):
            init.zeros_(module.weight)
        elif isinstance(module, WordSorting) and "drawn" in module._buffers:
            # A loaded model is built without memory: what no file holds is drawn again.
            init.copy_(module.drawn, module.draw())

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which lets every weight that it loads be trained: those that nothing trains are not."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).freeze_untrained_centroids()
        return loaded

    def asks_clustering(self, output_clustering: bool | None, labelled: bool = False) -> bool:
        """Whether the clustering reports, of which losses are made: as told, else while training and with labels."""
        return self.training or labelled if output_clustering is None else output_clustering

    def freeze_untrained_centroids(self) -> None:
        """Freeze the centroids that no loss depends on, for which DistributedDataParallel would wait."""
        for part in self.modules():
            if isinstance(part, ClusterFormerModel) and not part.config.trains_centroids:
                for name, parameter in part.named_parameters():
                    if "centroid" in name:
                        parameter.requires_grad_(False)


class ClusterFormerModel(ClusterFormerPreTrainedModel):
    """Embeddings and layers, as an encoder or (`config.is_decoder`) a decoder.

    Args:
        config (`ClusterFormerConfig`): the settings.
        add_pooling_layer (`bool`): a dense layer with tanh over the first word, as in BERT; it gives `pooler_output`.

    Raises:
        ValueError: the config is that of an encoder and decoder, whose weights have other names: none would be loaded.
    """

    def __init__(self, config: ClusterFormerConfig, add_pooling_layer: bool = True) -> None:
        if config.is_encoder_decoder:
            raise ValueError(
                "is_encoder_decoder: this is the config of a ClusterFormerForConditionalGeneration; load it with"
                " AutoModelForSeq2SeqLM, whose .encoder and .decoder are models like this one"
            )
        super().__init__(config)
        config = self.config
        self.embeddings = ClusterFormerEmbeddings(config)
        self.layers = nn.ModuleList(ClusterFormerLayer(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.pre_norm else None
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if add_pooling_layer else None
        self.centroids = None
        if config.assignment == "neural":
            self.centroids = Centroids(config)
        self.freeze_untrained_centroids()
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_clustering: bool | None = None,
        **kwargs: Any,
    ) -> ClusterFormerModelOutput:
        """Encode texts.

        Args:
            input_ids (`torch.LongTensor`): `(B, N)`; or `inputs_embeds`, `(B, N, hidden_size)`.
            attention_mask (`torch.Tensor`, *optional*): `(B, N)`, with a cache `(B, past + N)`; 0 = padding.
            token_type_ids (`torch.LongTensor`, *optional*): `(B, N)` or `(1, N)`. Default: all 0.
            position_ids (`torch.LongTensor`, *optional*): `(B, N)` or `(1, N)`. Default: the place among the words
                that count.
            encoder_hidden_states, encoder_attention_mask: `(B, M, hidden_size)` and `(B, M)`, for cross attention.
            past_key_values (`Cache`, *optional*): of a decoder with `causal="strict"`.
            use_cache (`bool`, *optional*): return a cache. Default: the config's, of such a decoder.
            output_hidden_states (`bool`, *optional*): the input of every layer and the output of the last.
            output_clustering (`bool`, *optional*): clustering losses and statistics. Default: while training, and
                with labels for a head, whose loss False leaves L1 and L2 out of.

        Returns:
            `ClusterFormerModelOutput`.

        Raises:
            ValueError: not exactly one of `input_ids` and `inputs_embeds`, a mask, types or positions of another
                shape, a text longer than `max_position_embeddings` or than what a static cache holds,
                `output_attentions`, a cache where the model cannot use one, `encoder_hidden_states` where it has no
                cross attention.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        if self.config.assignment != "full":
            check_no_onnx('use torch.export or torch.compile; assignment="full" alone has no such op')
        self._check_outputs_and_sources(kwargs.get("output_attentions"), encoder_hidden_states)
        words = self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        past_key_values = self._cache(past_key_values, use_cache)
        past = self._past(past_key_values, words.shape[1])
        mask = self._checked(words, past, attention_mask, position_ids, token_type_ids)
        encoder_mask = None
        if encoder_hidden_states is not None:
            sources = encoder_hidden_states.shape[1]
            encoder_mask = _as_mask("encoder_attention_mask", encoder_attention_mask, words, sources)
        if position_ids is None:
            position_ids = self._positions(words, mask, past)
        hidden_states = self.embeddings(words, token_type_ids, position_ids)

        output_clustering = self.asks_clustering(output_clustering)
        output_hidden_states = (
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        )
        centroids = None if self.centroids is None else self.centroids(words)
        seen = [hidden_states]
        reports = []
        for layer in self.layers:
            hidden_states, centroids, report = layer(
                hidden_states,
                centroids,
                mask,
                encoder_hidden_states,
                encoder_mask,
                past_key_values=past_key_values,
                output_clustering=output_clustering,
            )
            seen.append(hidden_states)
            if report is not None:
                reports.append(report)
        if self.final_norm is not None:
            hidden_states = self.final_norm(hidden_states)
            seen[-1] = hidden_states

        pooled = None if self.pooler is None else self.pooler(pool(hidden_states, mask, "first")).tanh()
        # Layers that a device_map spread have reported where they are.
        reports = [report.to(hidden_states.device) for report in reports]
        numbers = torch.stack(reports).mean(dim=0) if reports else ()
        clustering = dict(zip(ClusteringReport._fields, numbers, strict=False))  # losses stand last, where there are
        return ClusterFormerModelOutput(
            last_hidden_state=hidden_states,
            pooler_output=pooled,
            hidden_states=tuple(seen) if output_hidden_states else None,
            **named_for_output(past_key_values),
            **clustering,
        )

    def _check_outputs_and_sources(self, output_attentions: bool | None, sources: torch.Tensor | None) -> None:
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: attention is computed without a matrix of weights to return")
        if sources is not None and not self.config.add_cross_attention:
            raise ValueError(
                "encoder_hidden_states: this model has no cross attention; build it with is_decoder=True and"
                " add_cross_attention=True"
            )

    def _checked(
        self,
        words: torch.Tensor,
        past: int,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The mask as booleans, of a text whose length, positions and segments are checked."""
        length, most = past + words.shape[1], self.config.max_position_embeddings
        if length > most:
            raise ValueError(
                f"{length} words, but max_position_embeddings is {most}; cut the text or build the model with a larger"
                " max_position_embeddings"
            )
        _check_ids("position_ids", position_ids, words, most)
        _check_ids("token_type_ids", token_type_ids, words, self.config.type_vocab_size)
        return _as_mask("attention_mask", mask, words, length)

    def _cache(self, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        config = self.config
        strict = config.is_decoder and config.causal == "strict"
        if not strict:
            if past_key_values is not None:
                form = 'causal="paper" moves earlier words too' if config.is_decoder else "an encoder has none"
                raise ValueError(f"past_key_values: {form}; use_cache=False computes the text anew")
            return None
        use_cache = config.use_cache and not self.training if use_cache is None else use_cache
        self_cache = past_key_values
        self_cache = self_cache.self_attention_cache if isinstance(self_cache, EncoderDecoderCache) else self_cache
        if config.assignment != "full" and isinstance(self_cache, QuantizedCache):
            raise ValueError("a QuantizedCache keeps no clusters beside the keys; use a DynamicCache or a StaticCache")
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
            if config.add_cross_attention:
                past_key_values = EncoderDecoderCache(past_key_values, DynamicCache())
        return past_key_values

    def _past(self, past_key_values: Cache | None, words: int) -> int:
        """The number of words in the cache; refused where the new ones do not fit behind them."""
        past = cached_words(past_key_values)
        self_cache = past_key_values
        if isinstance(self_cache, EncoderDecoderCache):
            self_cache = self_cache.self_attention_cache
        room = [layer.max_cache_len for layer in getattr(self_cache, "layers", ()) if hasattr(layer, "max_cache_len")]
        if room and past + words > min(room):
            raise ValueError(
                f"{past} words and {words} more, but the cache holds at most {min(room)}; make it with a larger"
                " max_cache_len"
            )
        return past

    def _positions(self, words: torch.Tensor, mask: torch.Tensor | None, past: int) -> torch.Tensor:
        if mask is None:
            return torch.arange(past, past + words.shape[1], device=words.device)[None]
        return (mask.long().cumsum(dim=1) - 1).clamp(min=0)[:, past:]


def pool(hidden_states: torch.Tensor, mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """One vector per text `(B, d)`: the mean of its words that count, or the first of them."""
    if pooling == "mean":
        return masked_mean(hidden_states, mask)
    if mask is None:
        return hidden_states[:, 0]
    first = mask.to(hidden_states.device).long().argmax(dim=1)
    return hidden_states[torch.arange(len(first), device=first.device), first]


def _as_mask(name: str, mask: torch.Tensor | None, words: torch.Tensor, length: int) -> torch.Tensor | None:
    """The 0/1 mask as booleans; checked for its shape."""
    if mask is None:
        return None
    if tuple(mask.shape) != (len(words), length):
        raise ValueError(f"{name} must be (B, length) = ({len(words)}, {length}), got {tuple(mask.shape)}")
    return mask.bool()


def _check_ids(name: str, ids: torch.Tensor | None, words: torch.Tensor, choices: int) -> None:
    """Raise unless `ids` fit the words: of another shape they would be repeated, and the words with them."""
    if ids is None:
        return
    B, N, _ = words.shape
    if ids.ndim != 2 or ids.shape[0] not in (1, B) or ids.shape[1] != N:
        raise ValueError(f"{name} must be (B, N) = ({B}, {N}) or (1, {N}), got {tuple(ids.shape)}")
    # Reading them would make a GPU wait, and the embedding stops it there too.
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        smallest, largest = (int(bound) for bound in ids.aminmax())
        if smallest < 0 or largest >= choices:
            raise ValueError(f"{name} must lie in 0 .. {choices - 1}, got {smallest} .. {largest}")
