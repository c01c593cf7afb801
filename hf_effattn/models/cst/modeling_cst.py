"""The Composite Slice Transformer without a head (Source: Lee 2023).

Sizes: `B` batch, `N` length, `d` hidden_size.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from ...ops.derivatives import check_no_onnx
from ..cache_names import NEW, OLD, named_for_output, takes_cache
from .attention import CSTAttention, Tables
from .cache import CSTCache, GlobalState, LevelState
from .configuration_cst import CSTConfig


class WordEmbedding(nn.Embedding):
    """A class of its own because it may start from other numbers than other embeddings."""


class CSTEmbeddings(nn.Module):
    """Word embeddings, with segments and, where the config says so, absolute positions."""

    def __init__(self, config: CSTConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings: nn.Embedding = WordEmbedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
        self.position_embeddings = None
        if config.position_embedding == "absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, size)
        self.norm = nn.Identity() if config.pre_norm else nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, words: torch.Tensor, segments: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Add segments and positions.

        Args:
            words (`torch.Tensor`): `(B, N, d)`, embedded.
            segments (`torch.LongTensor`, *optional*): `(B, N)`. Default: 0.
            positions (`torch.LongTensor`): `(B or 1, N)`.

        Returns: `(B, N, d)`.
        """
        if self.token_type_embeddings is not None:
            if segments is None:
                segments = torch.zeros(words.shape[:2], dtype=torch.long, device=words.device)
            words = words + self.token_type_embeddings(segments)
        if self.position_embeddings is not None:
            words = words + self.position_embeddings(positions)
        return self.dropout(self.norm(words))


class CSTPositions(nn.Module):
    """MS-VIPE: positions at the scale of each level, one set of tables for all layers (Lee 2023, section 4.2)."""

    def __init__(self, config: CSTConfig) -> None:
        super().__init__()
        rows = [*config.level_lengths, config.most_slices]
        rows[0] += 2 * config.extension
        if config.local_mixing == "mlp":
            del rows[0]  # an MLP over the places of a slice knows the places
        self.levels = nn.ModuleList(nn.Embedding(count, config.hidden_size) for count in rows)
        self.first_level = len(config.level_lengths) + 1 - len(rows)

    def forward(self, device: torch.device | None = None) -> Tables:
        """The table `(rows, d)` of each level that has one, by the number of the level.

        Args:
            device (`torch.device`, *optional*): where the model computes, which offloaded tables cannot tell.
                Default: where the tables are.
        """
        tables = []
        for level in cast(list[nn.Embedding], list(self.levels)):
            # As embeddings of all places: the weights of an offloaded module are there only while it is called.
            tables.append(level(torch.arange(level.num_embeddings, device=device or level.weight.device)))
        return dict(enumerate(tables, start=self.first_level))


class CSTFeedForward(nn.Module):
    """The feed-forward sublayer."""

    def __init__(self, config: CSTConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.outer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `(..., d)` to `(..., d)`."""
        return self.outer(self.activation(self.inner(hidden)))


class CSTLayer(GradientCheckpointingLayer):
    """Composite slice attention and a feed-forward network, each with a residual connection."""

    def __init__(self, config: CSTConfig) -> None:
        super().__init__()
        self.attention = CSTAttention(config)
        self.feed_forward = CSTFeedForward(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.pre_norm = config.pre_norm

    def forward(
        self,
        hidden: torch.Tensor,
        tables: Tables,
        mask: torch.Tensor | None,
        with_rows: bool = False,
        *rows: torch.Tensor,
    ) -> tuple[torch.Tensor, Any]:
        """The layer on whole sequences; arguments and what is returned as in `CSTAttention.forward`.

        `rows`, where given, are what `tables` hold: reentrant checkpointing finds no gradient inside a container.
        """
        if tables is not None and rows:
            tables = dict(zip(tables, rows, strict=True))
        attended, computed = self.attention(self._before(self.attention_norm, hidden), tables, mask, with_rows)
        return self._after(hidden, attended), computed

    def step(
        self, hidden: torch.Tensor, tables: Tables, state: LevelState | GlobalState, active: torch.Tensor
    ) -> tuple[torch.Tensor, LevelState | GlobalState]:
        """The layer on one more token of each row; arguments and state as in `CSTAttention.step`."""
        attended, state = self.attention.step(self._before(self.attention_norm, hidden), tables, state, active)
        return self._after(hidden, attended), state

    def _before(self, norm: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return norm(hidden) if self.pre_norm else hidden

    def _after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        if self.pre_norm:
            hidden = hidden + self.dropout(attended)
            return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        hidden = self.attention_norm(hidden + self.dropout(attended))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


class CSTPreTrainedModel(PreTrainedModel):
    """What every Composite Slice Transformer shares: loading, initialisation, what it supports."""

    config_class = CSTConfig
    config: CSTConfig
    base_model_prefix = "cst"
    supports_gradient_checkpointing = True
    _no_split_modules = ["CSTLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _skip_keys_device_placement = [OLD, NEW]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, WordEmbedding) and self.config.embedding_initializer_range is not None:
            init.normal_(module.weight, std=self.config.embedding_initializer_range)
            # The flag is the table's, not that of its row.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # generate leaves the cache to the model: a DynamicCache would keep every key and value.
        return False


class CSTModel(CSTPreTrainedModel):
    """The Composite Slice Transformer: embeddings, layers and, with pre-norm, a last LayerNorm.

    Args:
        config (`CSTConfig`): sizes and variant; causal where `config.is_decoder`.
    """

    def __init__(self, config: CSTConfig) -> None:
        super().__init__(config)
        self.embeddings = CSTEmbeddings(config)
        self.positions = CSTPositions(config) if config.position_embedding == "ms-vipe" else None
        self.layers = nn.ModuleList(CSTLayer(config) for _ in range(config.num_hidden_layers))
        size = config.hidden_size
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps) if config.pre_norm else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Put other word embeddings in."""
        self.embeddings.word_embeddings = value

    @can_return_tuple
    @takes_cache
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: CSTCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the tokens.

        Slices are counted from each row's first token: padding on the left, on the right or inside changes nothing.

        Args:
            input_ids (`torch.LongTensor`, *optional*): `(B, N)`; or give `inputs_embeds`.
            attention_mask (`torch.Tensor`, *optional*): `(B, N)`, 1 = token; with a cache `(B, past + N)`.
            token_type_ids (`torch.LongTensor`, *optional*): `(B, N)`, segments.
            inputs_embeds (`torch.Tensor`, *optional*): `(B, N, d)` in place of the word embeddings.
            past_key_values (`CSTCache`, *optional*): from an earlier call; the tokens go on from there.
            use_cache (`bool`, *optional*): whether a causal model returns its cache. Default `config.use_cache`, and
                never while training.
            output_hidden_states (`bool`, *optional*): whether to return every layer's hidden states.
            kwargs: ignored: what transformers passes to every model, such as `position_ids`.

        Returns:
            `BaseModelOutputWithPast`: `last_hidden_state` `(B, N, d)`, 0 in padding; the cache; the hidden states.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`, a mask that is not `(B, N)`, more tokens
                than `max_position_embeddings`, a cache of another model, `output_attentions`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if self.config.composition != "full":
            check_no_onnx('use torch.export or torch.compile; composition="full" alone has no such op')
        if kwargs.get("output_attentions"):
            raise ValueError("a Composite Slice Transformer has no single attention matrix to return")
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        words = self.embeddings.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        B, N = words.shape[:2]
        mask = self._mask(attention_mask, B, past, N)
        self._check_length(past, N)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        use_cache = use_cache and self.config.is_decoder
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if past:
            hidden, states = self._go_on(words, token_type_ids, mask, past_key_values)
        else:
            hidden, states, past_key_values = self._whole(
                words, token_type_ids, mask, use_cache, past_key_values, output_hidden_states
            )
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=states if output_hidden_states else None,
            **named_for_output(past_key_values if use_cache else None),
        )

    def _mask(self, attention_mask: torch.Tensor | None, B: int, past: int, N: int) -> torch.Tensor | None:
        """Which of the new columns are tokens, `(B, N)`."""
        if attention_mask is None:
            return None
        if attention_mask.shape not in ((B, N), (B, past + N)):
            raise ValueError(
                f"attention_mask must be (B, N) = {(B, past + N)}, 1 = token, got {tuple(attention_mask.shape)}"
            )
        return attention_mask[:, -N:].bool()

    def _check_length(self, past: int, N: int) -> None:
        most = self.config.max_position_embeddings
        if past + N > most:
            raise ValueError(
                f"{past + N} tokens are more than max_position_embeddings = {most}: truncate the input, or make a "
                "model with a larger max_position_embeddings"
            )

    def _tables(self, device: torch.device) -> Tables:
        return None if self.positions is None else self.positions(device)

    def _whole(
        self,
        words: torch.Tensor,
        segments: torch.Tensor | None,
        mask: torch.Tensor | None,
        use_cache: bool,
        cache: CSTCache | None,
        with_states: bool,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], CSTCache | None]:
        """All layers on whole sequences; each row's tokens stand first in between.

        The states, where asked for, lie between the layers in the graph too: their gradients can be kept.
        """
        B, N = words.shape[:2]
        order, columns = None, mask
        if mask is not None:
            order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
            words = self._reorder(words, order)
            segments = None if segments is None else segments.gather(1, order)
            mask = mask.gather(1, order)
            # Not even the gradient of a LayerNorm may meet what stands in padding.
            words = words.masked_fill(~mask[..., None], 0.0)
        hidden = self.embeddings(words, segments, torch.arange(N, device=words.device)[None])
        if use_cache:
            columns = torch.ones(B, N, dtype=torch.bool, device=words.device) if columns is None else columns
            cache = CSTCache(len(self.layers)) if cache is None else cache
        tables: Tables = self._tables(words.device)
        rows = () if tables is None else tuple(tables.values())
        states = []
        for index, layer in enumerate(self.layers):
            if with_states:
                states.append(self._in_place(hidden, order, mask))
                hidden = states[-1] if order is None else self._reorder(states[-1], order)
            hidden, computed = layer(hidden, tables, mask, use_cache, *rows)
            if use_cache and cache is not None:
                cache.layers[index].begin(computed, columns)
        hidden = self._in_place(self.norm(hidden), order, mask)
        return hidden, (*states, hidden), cache

    def _in_place(self, rows: torch.Tensor, order: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
        """Rows `(B, N, d)` whose tokens stand first as in the input, 0 in padding."""
        if order is None or mask is None:
            return rows
        # Layers that a device_map spread leave their states where they are.
        return self._reorder(rows.masked_fill(~mask[..., None].to(rows.device), 0.0), order.argsort(dim=1))

    @staticmethod
    def _reorder(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return rows.gather(1, order[..., None].to(rows.device).expand(-1, -1, rows.shape[2]))

    def _go_on(
        self, words: torch.Tensor, segments: torch.Tensor | None, mask: torch.Tensor | None, cache: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """All layers on the tokens that follow, one column at a time: O(L + N / L) for each."""
        if not isinstance(cache, CSTCache) or len(cache.layers) != len(self.layers):
            raise ValueError(f"past_key_values must be a CSTCache of {len(self.layers)} layers, got {cache!r}")
        tables, columns = self._tables(words.device), []
        for column in range(words.shape[1]):
            state = cache.layers[0].state
            if state is None:
                raise ValueError("past_key_values counts columns but holds no state; pass a new CSTCache, or None")
            positions = state.lengths.clamp(max=self.config.max_position_embeddings - 1)[:, None]
            at = slice(column, column + 1)
            hidden = self.embeddings(words[:, at], None if segments is None else segments[:, at], positions)[:, 0]
            active = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
            active = active if mask is None else mask[:, column]
            states = [hidden]
            for cache_layer, layer in zip(cache.layers, self.layers, strict=True):
                # A step is no call of the layer: where a device_map spread them, nothing else brings its inputs there.
                here = cache_layer.state.lengths.device
                rows = None if tables is None else {level: table.to(here) for level, table in tables.items()}
                hidden, state = cast(CSTLayer, layer).step(hidden.to(here), rows, cache_layer.state, active.to(here))
                cache_layer.step(state)
                states.append(hidden)
            states[-1] = self.norm(hidden)
            columns.append([row.masked_fill(~active[:, None].to(row.device), 0.0) for row in states])
        stacked = tuple(torch.stack(rows, dim=1) for rows in zip(*columns, strict=True))
        return stacked[-1], stacked
