"""Attention ops: pure functions on `(B, H, N, D)` tensors, each with a plain reference and a fast form."""

from .bi_clustered_attention import bi_clustered_attention, predicted_error, query_residuals
from .causal_clustered_attention import causal_clustered_attention
from .cluster_queries import cluster_queries
from .clustered_attention import clustered_attention
from .improved_clustered_attention import improved_clustered_attention
from .kmeans import kmeans
from .neural_clustering import neural_clustering
from .slice_attention import slice_attention
from .sorted_block_attention import cluster_order, sorted_block_attention

__all__ = [
    "bi_clustered_attention",
    "causal_clustered_attention",
    "cluster_order",
    "cluster_queries",
    "clustered_attention",
    "improved_clustered_attention",
    "kmeans",
    "neural_clustering",
    "predicted_error",
    "query_residuals",
    "slice_attention",
    "sorted_block_attention",
]
