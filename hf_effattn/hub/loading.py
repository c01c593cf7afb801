"""What loading by transformers leaves to its caller: quiet bars, mistyped names, and tokenizers that are none."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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


def check_source(name: str) -> None:
    """Raise where `name` is neither a folder with a model nor what a Hub id looks like, before the Hub is asked.

    Args:
        name (`str`): as `from_pretrained` of transformers takes it.

    Raises:
        ValueError: a file, a folder without a configuration, or a path where nothing is.
    """
    path = Path(name)
    if path.is_dir():
        if not any((path / config).is_file() for config in (CONFIG_NAME, ADAPTER_CONFIG_NAME)):
            raise ValueError(f"{name} has no {CONFIG_NAME}: name a folder that save_pretrained wrote, or a Hub id")
        return
    if path.exists():
        raise ValueError(f"{name} is a file: name a folder that save_pretrained wrote, or a Hub id")
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            f"there is no folder {name}, and a Hub id is a name or owner/name: name a folder that save_pretrained "
            "wrote, or a Hub id such as FacebookAI/roberta-base"
        )
