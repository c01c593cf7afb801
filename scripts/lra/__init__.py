"""The Long Range Arena: its tasks generated or read, its tokens and batches."""

from .checksums import lra_checksum, verify_lra
from .encoding import LRACollator, lra_tokenizer
from .load import TASKS, load_lra, lra_features, lra_settings

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
