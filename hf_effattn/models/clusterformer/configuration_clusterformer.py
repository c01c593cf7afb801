"""Configuration of ClusterFormer; impossible combinations raise before any weight exists."""

import copy
import re
import warnings
from math import isfinite
from typing import Any, ClassVar, Self

from transformers.activations import ACT2FN

from ...ops.neural_clustering import SIMILARITIES
from ...ops.shared.arguments import check_count
from ..cache_names import NEW, OLD
from ..stored_config import StoredConfig
from .outputs import CLUSTERING_FIELDS

ASSIGNMENTS = ("neural", "kmeans", "lsh", "random", "identity", "full")
CAUSAL_FORMS = ("strict", "paper")
POOLINGS = ("mean", "first")
WEIGHTED = "weighted"
# Of L1 and L2 where they alone train the centroids.
LOSS_WEIGHT = 1e-4
DIVERGES = (
    'similarity="dot" with clustering losses: the inner product has no bound, so the losses fall for ever and the'
    ' words collapse into one direction; use similarity="cosine", or weights of 0'
)
# Settings that count something.
COUNTS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "decoder_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size", "window_blocks", "clusters", "block_length"),
)


class ClusterFormerConfig(StoredConfig):
    """Settings of every ClusterFormer model (Source: Wang 2022).

    The defaults of the sizes are those of the paper's pre-training (App. F). `clusters`, `window_blocks`, the weights
    of the losses and `assignment` are what its tables vary.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, hidden_act,
        hidden_dropout_prob, attention_probs_dropout_prob, max_position_embeddings, type_vocab_size,
        initializer_range, layer_norm_eps, use_cache, tie_word_embeddings, classifier_dropout: as in BERT.
        pre_norm (`bool`): LayerNorm before each sublayer; False: after it, as in BERT.
        clusters (`int`, *optional*): the paper's `k`. Default: the square root of `max_position_embeddings`.
        window_blocks (`int`): blocks of sorted words that a word sees, its own included; the paper's is 2.
        assignment (`str`): what sorts the words: `"neural"`; `"kmeans"` (as the Routing Transformer does, but fitted
            on each text) or `"lsh"` (as the Reformer does), which learn nothing; `"random"` or `"identity"`, the
            controls; `"full"`: nothing is sorted, every word sees all others, as in the Transformer that the paper
            compares with.
        assignment_seed (`int`): seed of `"kmeans"`, `"lsh"` and `"random"`.
        similarity (`str`): `"cosine"`, or `"dot"`, the paper's, which is unbounded: its losses diverge.
        sharpness (`float`): factor on the cosine inside the memberships; the inner product is taken as it is.
        gated (`bool`, *optional*): adds the logarithm of how much two words' clusters overlap to their score, so that
            the task trains the clustering (ours, not in the paper; False is the paper's form). Default: True where
            `assignment="neural"`.
        attend_centroids (`bool` or `"weighted"`, *optional*): words also attend to the updated centroids, and the
            output of that is added: summaries of the whole text, for what lies outside of a word's window (ours, not
            in the paper). They have seen all words, so a decoder has none of this. `"weighted"`: times a number per
            head that is learned from 0; at full strength, True, the summaries outweigh the windows in a translation's
            encoder and make its words alike, while partner recall learns more from them. Default, decided as a model
            is built: True beside the gate in models without a decoder, whose classifiers equal the Transformer with
            it; False in those with one, for it made a translation much worse.
        cluster_loss_weight, sorting_loss_weight (`float`, *optional*): the paper's μ and ν (Eq. 17). Default: 0 with
            the gate, which trains the centroids without them: beside it 1e-4 made no task better beyond the noise of
            the seeds, and 0.01 kept words from finding each other. Else 1e-4: both also draw the words together, at
            0.01 so much that they no longer differed enough to translate or to find each other. With 0, and neither
            gate nor `attend_centroids`, nothing can train the centroids: they are frozen.
        task_loss_weight (`float`): the paper's λ.
        is_decoder (`bool`): words do not see later ones.
        causal (`str`): how: `"strict"`, or `"paper"` (App. B), where later words still move the clusters.
        block_length (`int`, *optional*): words before it that a word sees per block of the window, with
            `causal="strict"`, where it cannot depend on the length of the text. Default: `max_position_embeddings`
            over `clusters`.
        add_cross_attention (`bool`): decoder layers attend to an encoder.
        decoder_layers (`int`, *optional*): of `ClusterFormerForConditionalGeneration`. Default:
            `num_hidden_layers`.
        decoder_assignment (`str`, *optional*): what sorts the words of that model's decoder. Default: `assignment`. A
            word of a sorted decoder seldom sees the word before it; with `"full"` it does, which short outputs afford.
        pooling (`str`): how a text becomes one vector: the `"mean"` of its words or its `"first"`.
    """

    model_type = "clusterformer"
    DERIVED = ("gated", "attend_centroids", "cluster_loss_weight", "sorting_loss_weight", "block_length")
    keys_to_ignore_at_inference: ClassVar[list[str]] = [OLD, NEW, *CLUSTERING_FIELDS]

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 512,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 8,
        intermediate_size: int = 2048,
        hidden_act: str = "gelu",
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        pre_norm: bool = True,
        clusters: int | None = None,
        window_blocks: int = 2,
        assignment: str = "neural",
        assignment_seed: int = 0,
        similarity: str = "cosine",
        sharpness: float = 10.0,
        gated: bool | None = None,
        attend_centroids: bool | str | None = None,
        cluster_loss_weight: float | None = None,
        sorting_loss_weight: float | None = None,
        task_loss_weight: float = 1.0,
        is_decoder: bool = False,
        causal: str = "strict",
        block_length: int | None = None,
        add_cross_attention: bool = False,
        decoder_layers: int | None = None,
        decoder_assignment: str | None = None,
        pooling: str = "mean",
        classifier_dropout: float | None = None,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        pad_token_id: int | None = 0,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        decoder_start_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._keep(locals())
        for name in COUNTS:
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        choices = {
            "assignment": (assignment, ASSIGNMENTS),
            "decoder_assignment": (decoder_assignment or assignment, ASSIGNMENTS),
            "similarity": (similarity, SIMILARITIES),
            "causal": (causal, CAUSAL_FORMS),
            "pooling": (pooling, POOLINGS),
            "hidden_act": (hidden_act, tuple(ACT2FN)),
            "attend_centroids": (attend_centroids, (None, False, True, WEIGHTED)),
        }
        for name, (choice, allowed) in choices.items():
            if choice not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {choice!r}")
        self.gated = gated = assignment == "neural" if gated is None else gated
        sorted_by = (assignment, decoder_assignment)
        loss_weight = LOSS_WEIGHT if "neural" in sorted_by and not gated else 0.0
        self.cluster_loss_weight = loss_weight if cluster_loss_weight is None else cluster_loss_weight
        self.sorting_loss_weight = loss_weight if sorting_loss_weight is None else sorting_loss_weight
        for name in ("cluster_loss_weight", "sorting_loss_weight", "task_loss_weight"):
            weight = getattr(self, name)
            if not isfinite(weight) or weight < 0:
                raise ValueError(f"{name} must not be negative, and finite, got {weight}")
        if not isfinite(sharpness) or sharpness <= 0:
            raise ValueError(f"sharpness must be above 0, and finite, got {sharpness}")
        if pad_token_id is not None and not 0 <= pad_token_id < vocab_size:
            raise ValueError(
                f"pad_token_id must be None or lie in 0 .. vocab_size - 1 = {vocab_size - 1}, got {pad_token_id}"
            )
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size {hidden_size} must be a multiple of num_attention_heads {num_attention_heads}"
            )
        if add_cross_attention and not is_decoder:
            raise ValueError("add_cross_attention=True needs is_decoder=True")
        if gated and assignment != "neural":
            raise ValueError(
                f'gated=True needs assignment="neural", got {assignment!r}: the others have no memberships'
            )
        if attend_centroids and assignment != "neural":
            raise ValueError(
                f'attend_centroids=True needs assignment="neural", got {assignment!r}: the others have no centroids'
            )
        if attend_centroids and is_decoder:
            raise ValueError("attend_centroids=True needs is_decoder=False: the centroids have seen later words")
        strict = is_decoder and causal == "strict"
        if strict and assignment not in ("neural", "lsh", "full"):
            raise ValueError(
                f'causal="strict" needs assignment="neural", "lsh" or "full", got {assignment!r}: there later words'
                " move earlier ones to other clusters"
            )
        if strict and assignment != "full" and window_blocks < 2:
            raise ValueError('causal="strict" needs window_blocks of at least 2: with 1 a word would see only itself')
        if similarity == "dot" and "neural" in sorted_by and (self.cluster_loss_weight or self.sorting_loss_weight):
            warnings.warn(DIVERGES, stacklevel=2)
        self.clusters = round(max_position_embeddings**0.5) if clusters is None else clusters
        self.block_length = -(-max_position_embeddings // self.clusters) if block_length is None else block_length
        self.decoder_layers = num_hidden_layers if decoder_layers is None else decoder_layers
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    @classmethod
    def changed(cls, settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """Settings with changes; what these leave no room for is off, unless it is one of them.

        What is not sorted by `"neural"` has no gate and no centroids; nor does a decoder attend to centroids.
        """
        settings = settings | changes
        neural = settings.get("assignment", "neural") == "neural"
        possible = {"gated": neural, "attend_centroids": neural and not settings.get("is_decoder", False)}
        off = [name for name, can_be in possible.items() if settings.get(name) and not can_be and name not in changes]
        return settings | dict.fromkeys(off, False)

    def rebuilt(self, **changes: Any) -> "ClusterFormerConfig":
        """These settings with changes, checked like new ones; who wrote these has had his warning."""
        settings = self.changed(self.to_dict(), changes)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", re.escape(DIVERGES))
            return type(self)(**settings)

    def settled(self) -> Self:
        """These settings, `attend_centroids` decided: only the class of a model says whether it has a decoder."""
        if self.attend_centroids is not None:
            return self
        config = copy.deepcopy(self)
        config.attend_centroids = self.gated and not (self.is_decoder or self.is_encoder_decoder)
        return config

    @property
    def trains_centroids(self) -> bool:
        """Whether some loss depends on the centroids."""
        losses = self.cluster_loss_weight > 0 or self.sorting_loss_weight > 0
        attended = bool(self.settled().attend_centroids) and not self.is_decoder
        return self.assignment == "neural" and (losses or self.gated or attended)
