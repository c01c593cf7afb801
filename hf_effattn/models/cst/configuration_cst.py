"""Configuration of the Composite Slice Transformer."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...ops.shared.arguments import check_count
from ...ops.slice_attention import extension_tokens
from ..cache_names import NEW, OLD
from ..stored_config import StoredConfig

COMPOSITIONS = ("local-global", "parallel", "global-local", "full")
LOCAL_MIXINGS = ("attention", "mlp")
POOLINGS = ("mean", "max", "linear")
POSITION_EMBEDDINGS = ("ms-vipe", "absolute")
COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "max_position_embeddings",
)


class CSTConfig(StoredConfig):
    """Configuration of a Composite Slice Transformer (Lee 2023); every variant of its ablations is a value here.

    Args:
        vocab_size (`int`): tokens of the vocabulary.
        hidden_size (`int`): width of the model.
        num_hidden_layers (`int`): layers.
        num_attention_heads (`int`): heads; must divide `hidden_size`.
        intermediate_size (`int`): width of the feed-forward layers, and of the sequence classification head.
        hidden_act (`str`): activation of the feed-forward layers.
        hidden_dropout_prob (`float`): dropout on embeddings and on what each sublayer adds.
        attention_probs_dropout_prob (`float`): dropout on attention weights, local and global.
        max_position_embeddings (`int`): the longest input.
        type_vocab_size (`int`): kinds of segments (`token_type_ids`); 0 for none.
        slice_length (`int` or `Sequence[int]`): `L`. A rising sequence such as `(8, 64)`, each a multiple of the one
            before, gives more than two levels: slices of 64 tokens attend among their slices of 8, and only slices of
            64 attend to all others. Beyond the paper, which names it as future work.
        extension_ratio (`float`): `α` in [1, 3], the reach of a slice's keys; acts on the slices of tokens.
        position_embedding (`str`): `"ms-vipe"`, one pair of tables for all layers, added to the inputs of queries and
            keys of each level; or `"absolute"`, a learned table added once to the word embeddings.
        pooling (`str`): how a slice becomes one embedding: `"mean"`, `"max"` or `"linear"` (a projection of its rows).
        composition (`str`): `"local-global"`: the global attention runs on the slices' local output; `"parallel"`: on
            their input; `"global-local"`: the same, and its output is added to the input of the local attention;
            `"full"`: no slices, every token sees all others by SDPA, as in the Transformer that the paper compares
            with (what belongs to slices is not used then).
        local_mixing (`str`): `"attention"`, or `"mlp"`, a two-layer MLP over the places of a slice.
        local_mixing_size (`int`): hidden size of that MLP (the paper: 16 and 32).
        share_projections (`bool`): whether local and global attention share their projections (the paper: yes).
        num_global_tokens (`int`): the first so many tokens of the sequence ([CLS] is 1) are seen by every slice at
            full resolution and, unless causal, see every token. Beyond the paper.
        pre_norm (`bool`): LayerNorm before each sublayer (the paper's LRA models), else after it as in BERT.
        is_decoder (`bool`): causal attention (Eq. 12). `CSTForCausalLM` sets it.
        initializer_range (`float`): standard deviation of the initial weights.
        embedding_initializer_range (`float`, *optional*): that of the word embeddings; without a norm after them
            (`pre_norm`) small ones are drowned by what the first layers add, and classifiers learn slowly. 1.0 is
            that of the published code of Long Range Arena. Default: `initializer_range`, which tied heads need.
        layer_norm_eps (`float`): epsilon of the LayerNorms.
        use_cache (`bool`): whether a decoder returns its cache.
        classifier_dropout (`float`, *optional*): dropout before a classifier. Default `hidden_dropout_prob`.
        pad_token_id (`int`, *optional*): token that fills short rows.
        bos_token_id (`int`, *optional*): token that begins a text.
        eos_token_id (`int`, *optional*): token that ends a text.
        tie_word_embeddings (`bool`): whether language-model heads share the word embeddings.
        kwargs: what every transformers configuration takes.

    Raises:
        ValueError: a size below 1, values that do not fit together, or one that is not in the lists above.
        TypeError: a size or a slice length that is not an int.
    """

    model_type = "cst"
    keys_to_ignore_at_inference = [OLD, NEW]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 256,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        intermediate_size: int = 1024,
        hidden_act: str = "gelu",
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 4096,
        type_vocab_size: int = 2,
        slice_length: int | Sequence[int] = 16,
        extension_ratio: float = 1.0,
        position_embedding: str = "ms-vipe",
        pooling: str = "mean",
        composition: str = "local-global",
        local_mixing: str = "attention",
        local_mixing_size: int = 16,
        share_projections: bool = True,
        num_global_tokens: int = 0,
        pre_norm: bool = True,
        is_decoder: bool = False,
        initializer_range: float = 0.02,
        embedding_initializer_range: float | None = None,
        layer_norm_eps: float = 1e-12,
        use_cache: bool = True,
        classifier_dropout: float | None = None,
        pad_token_id: int | None = 0,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self._keep(locals())
        # A list: what JSON gives back.
        self.slice_length = list(slice_length) if isinstance(slice_length, Sequence) else slice_length
        self._check()
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            is_decoder=is_decoder,
            **kwargs,
        )

    @property
    def slice_lengths(self) -> tuple[int, ...]:
        """Tokens of a slice at each level, rising."""
        return tuple(self.slice_length) if isinstance(self.slice_length, list) else (self.slice_length,)

    @property
    def level_lengths(self) -> tuple[int, ...]:
        """Rows of a slice at each level, in embeddings of the level below; none where there are no slices."""
        if self.composition == "full":
            return ()
        lengths = self.slice_lengths
        return (lengths[0], *(large // small for small, large in pairwise(lengths)))

    @property
    def extension(self) -> int:
        """Keys that a slice of tokens sees of each neighbour."""
        if self.composition == "full":
            return 0
        return extension_tokens(self.slice_lengths[0], self.extension_ratio)

    @property
    def most_slices(self) -> int:
        """Slices of the last level in the longest input; its tokens where there are no slices."""
        longest = self.max_position_embeddings
        return longest if self.composition == "full" else math.ceil(longest / self.slice_lengths[-1])

    def _check(self) -> None:
        for name in COUNTS:
            check_count(name, getattr(self, name))
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if isinstance(self.slice_length, list) and not self.slice_length:
            raise ValueError("slice_length is empty; give one length, or one per level such as (8, 64)")
        for length in self.slice_lengths:
            check_count("slice_length", length)
        for small, large in pairwise(self.slice_lengths):
            if large % small or large == small:
                raise ValueError(
                    f"slice_length {self.slice_lengths} must rise, each a multiple of the one before; {large} is none "
                    f"of {small}"
                )
        extension_tokens(self.slice_lengths[0], self.extension_ratio)
        if self.embedding_initializer_range is not None and not self.embedding_initializer_range > 0:
            raise ValueError(f"embedding_initializer_range must be above 0, got {self.embedding_initializer_range}")
        check_count("num_global_tokens", self.num_global_tokens, minimum=0)
        check_count("local_mixing_size", self.local_mixing_size)
        for name, allowed in (
            ("composition", COMPOSITIONS),
            ("local_mixing", LOCAL_MIXINGS),
            ("pooling", POOLINGS),
            ("position_embedding", POSITION_EMBEDDINGS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        if self.composition == "full" and (
            self.local_mixing != "attention" or self.num_global_tokens or not self.share_projections
        ):
            raise ValueError(
                'composition="full" has no slices and one attention: it takes neither local_mixing="mlp" nor global '
                f"tokens ({self.num_global_tokens}) nor share_projections=False"
            )
        if self.local_mixing == "mlp" and (self.extension_ratio != 1 or self.num_global_tokens):
            raise ValueError(
                'local_mixing="mlp" mixes the places of one slice: it takes neither an extension_ratio '
                f"({self.extension_ratio}) other than 1 nor global tokens ({self.num_global_tokens})"
            )
