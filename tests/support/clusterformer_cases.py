"""Small ClusterFormer models and inputs that the tests of them share."""

from typing import Any

import torch
import transformers

from hf_effattn.models import clusterformer
from hf_effattn.models.clusterformer import ClusterFormerConfig
from hf_effattn.models.clusterformer.attention import CentroidWeight

# Written out anew: what the package registers is compared with it.
HEADS = {
    transformers.AutoModel: clusterformer.ClusterFormerModel,
    transformers.AutoModelForCausalLM: clusterformer.ClusterFormerForCausalLM,
    transformers.AutoModelForMaskedLM: clusterformer.ClusterFormerForMaskedLM,
    transformers.AutoModelForPreTraining: clusterformer.ClusterFormerForPreTraining,
    transformers.AutoModelForQuestionAnswering: clusterformer.ClusterFormerForQuestionAnswering,
    transformers.AutoModelForSeq2SeqLM: clusterformer.ClusterFormerForConditionalGeneration,
    transformers.AutoModelForSequenceClassification: clusterformer.ClusterFormerForSequenceClassification,
    transformers.AutoModelForTokenClassification: clusterformer.ClusterFormerForTokenClassification,
}
VOCABULARY = 60
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "clusters": 5,
    # Weights this large give attention that is far from uniform, so that a mistake differs visibly.
    "initializer_range": 0.25,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 2,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "neural": {"gated": False},
    "gated": {"gated": True, "attend_centroids": False},
    "centroids": {"gated": False, "attend_centroids": True},
    "gated_centroids": {"gated": True, "attend_centroids": True},
    "weighted_centroids": {"gated": True, "attend_centroids": "weighted"},
    "dot": {"similarity": "dot", "gated": False, "cluster_loss_weight": 0.0, "sorting_loss_weight": 0.0},
    "post_norm": {"pre_norm": False},
    "wide_window": {"window_blocks": 3},
    "kmeans": {"assignment": "kmeans"},
    "lsh": {"assignment": "lsh"},
    "random": {"assignment": "random"},
    "identity": {"assignment": "identity"},
    "full": {"assignment": "full"},
}

# Of decoders, whose words may see no later one.
STRICT = {name: VARIANTS[name] for name in ("neural", "gated", "lsh", "dot", "full")} | {
    "short_reach": {"block_length": 2},
    "wide_window_of_single_words": {"window_blocks": 4, "block_length": 1},
}


def tiny_config(**changes: Any) -> ClusterFormerConfig:
    """A small config."""
    return ClusterFormerConfig(**SIZES | changes)


def tiny_model(model_class: Any, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A small random model in eval mode; the same seed gives the same weights.

    Weights on attention to the centroids, which start at 0, are as after a training.
    """
    torch.manual_seed(seed)
    model = model_class(tiny_config(**changes)).to(dtype).eval()
    for part in model.modules():
        if isinstance(part, CentroidWeight):
            part.weight.data = torch.linspace(-0.5, 1.5, len(part.weight), dtype=dtype)
    return model


def texts(B: int = 3, N: int = 23, seed: int = 1) -> torch.Tensor:
    """Random words `(B, N)`, none of them special."""
    return torch.randint(5, VOCABULARY, (B, N), generator=torch.Generator().manual_seed(seed))


def padded_texts(side: str, N: int = 23, padding: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of which the first has `padding` words less, and their mask."""
    words = texts(N=N)
    mask = torch.ones_like(words)
    mask[0, slice(0, padding) if side == "left" else slice(N - padding, N)] = 0
    return words.masked_fill(mask == 0, 0), mask
