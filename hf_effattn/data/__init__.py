"""Data sets: the Long Range Arena."""

from .checksums import lra_checksum, verify_lra
from .encoding import LRACollator, lra_tokenizer
from .long_range_arena import TASKS, load_lra, lra_features, lra_settings

__all__ = [
    "TASKS",
    "LRACollator",
    "load_lra",
    "lra_checksum",
    "lra_features",
    "lra_settings",
    "lra_tokenizer",
    "verify_lra",
]
