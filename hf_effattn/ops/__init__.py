"""Attention ops: pure functions on `(B, H, N, D)` tensors, each with a plain reference and a fast form."""

from .cluster_queries import cluster_queries
from .clustered_attention import clustered_attention
from .improved_clustered_attention import improved_clustered_attention

__all__ = ["cluster_queries", "clustered_attention", "improved_clustered_attention"]
