"""What loading leaves to its caller: quiet bars, mistyped names, tokenizers that are none, models with modules."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, logging

from .module_folders import MODULES, stored_json

SETTINGS_OF_TRANSFORMER = "sentence_bert_config.json"
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
        if not any((path / config).is_file() for config in (CONFIG_NAME, ADAPTER_CONFIG_NAME, MODULES)):
            raise ValueError(f"{name} has no {CONFIG_NAME}: name a folder that save_pretrained wrote, or a Hub id")
        return
    if path.exists():
        raise ValueError(f"{name} is a file: name a folder that save_pretrained wrote, or a Hub id")
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            f"there is no folder {name}, and a Hub id is a name or owner/name: name a folder that save_pretrained "
            "wrote, or a Hub id such as FacebookAI/roberta-base"
        )


def library_is_installed() -> bool:
    """Whether sentence-transformers can be imported."""
    try:
        import sentence_transformers  # noqa: F401
    except ImportError:
        return False
    return True


def load_with_modules(source: str | Path, kind: str, **options: Any) -> Any:
    """A model that sentence-transformers saved, with all its modules, by that library, in eval mode on the CPU.

    Args:
        source (`str` or `Path`): Hub id or folder.
        kind (`str`): its class, from `saved_class`.
        options: keywords of `from_pretrained` of transformers; without `attn_implementation` what was saved patched
            is patched.

    Raises:
        ImportError: the library is not installed, or older than the class.
        ValueError, OSError: as of the library.
    """
    if not library_is_installed():
        raise _needs_library(source)
    import sentence_transformers

    if not hasattr(sentence_transformers, kind):
        raise ImportError(
            f"{source} is a {kind}, which sentence-transformers {sentence_transformers.__version__} does not have: "
            "pip install --upgrade sentence-transformers"
        )
    return getattr(sentence_transformers, kind)(str(source), device="cpu", model_kwargs=options).eval()


def check_loads_without_library(source: str | Path) -> None:
    """Raise where transformers alone would load what sentence-transformers saved as a model that reads other texts.

    Raises:
        ImportError: its first module is none of transformers', or makes texts lower-case.
    """
    read = stored_json(source, SETTINGS_OF_TRANSFORMER) or {}
    if stored_json(source, CONFIG_NAME) is None or read.get("do_lower_case"):
        raise _needs_library(source)


def _needs_library(source: str | Path) -> ImportError:
    return ImportError(f"{source} is a model of sentence-transformers: pip install sentence-transformers to load it")
