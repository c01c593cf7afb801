"""Vectors of whole documents, many and long: read, planned, computed in shards that survive a kill, put together."""

from .text_encoder import TextEncoder

__all__ = ["TextEncoder"]
