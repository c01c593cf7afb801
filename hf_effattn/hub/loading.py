"""What loading by transformers leaves to its caller: quiet bars, and tokenizers that are none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers' own bars, of loading and saving weights, off the terminal."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def knows_words(tokenizer: Any) -> bool:
    """Whether a tokenizer is one: of a folder without its files transformers makes one that knows no word."""
    return len(tokenizer) > len(tokenizer.all_special_tokens)
