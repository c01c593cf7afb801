"""Models that are trained from scratch, found by the Auto classes of transformers once this package is imported."""

from . import clusterformer, cst
from .clusterformer import *  # noqa: F403
from .cst import *  # noqa: F403

__all__ = clusterformer.__all__ + cst.__all__
