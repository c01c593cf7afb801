"""`effattn convert`: a patched or converted copy of a model."""

import textwrap
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import method_of, mistakes_in_words


def convert(
    model: Annotated[str, typer.Argument(help="Hub id or folder.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; must not hold a model yet.")],
    method: Annotated[
        str, typer.Option(help='Such as "i-clustered clusters=100" or "cst slice_length=16 extension_ratio=3".')
    ] = "bi-clustered",
    auto_class: Annotated[
        str | None,
        typer.Option(
            help="Class of transformers, such as AutoModelForSequenceClassification. Default: its own, or that of "
            "sentence-transformers, with all modules."
        ),
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens that the copy takes: positions are repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, float16.")] = "auto",
) -> None:
    """Write a copy of a model with its attention replaced, and its tokenizer: ready to load, to fine-tune, to push.

    A model of sentence-transformers keeps its modules, prompts and lengths; its model card stays behind.
    """
    settings = method_of(method)
    from ..hub import loading_code
    from ..hub.loading import check_source, without_progress_bars
    from ..hub.module_folders import MODULES, saved_class
    from ..patching import extend_positions, patch_attention
    from ..patching.methods import methods_for
    from ..patching.sentence_transformers import models_inside

    with mistakes_in_words(), without_progress_bars():
        # A mistake is told before a model is loaded.
        chosen = next(iter(methods_for(kinds=(False, True), **settings).values()))
        if output.exists() and not output.is_dir():
            raise ValueError(f"{output} is a file: name a folder")
        if any((output / name).exists() for name in ("config.json", MODULES)):
            raise ValueError(f"{output} holds a model already: name another folder")
        check_source(model)
        kind = saved_class(model)
        if kind is not None and auto_class is not None:
            typer.secho(f"{model} is a {kind}: --auto-class writes its transformer alone, without modules.", err=True)
            kind = None
        loaded = _load(model, auto_class, dtype) if kind is None else _load_modules(model, kind, dtype)
        if max_length is not None:
            loaded = extend_positions(loaded, max_length)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            patch_attention(loaded, **settings)
        if kind is None:
            loaded.save_pretrained(output)
            _save_reader(model, output, max_length)
        else:  # a card of the exact model would be wrong, and one that is there is the user's
            loaded.save_pretrained(str(output), create_model_card=False)
        for warning in caught:
            typer.secho(f"Warning: {warning.message}", fg=typer.colors.YELLOW, err=True)
        typer.echo(f"written: {output}. Load it with:\n")
        inside = models_inside(loaded)[0]
        typer.echo(textwrap.indent(loading_code(inside.config, type(inside).__name__, str(output), kind), "    "))
        if chosen.needs_fine_tuning:
            typer.echo("\nIt computes something else than before: fine-tune it on your task before you use it.")
        else:
            typer.echo(f"\nPush it with a model card: effattn push {output} NAME")


def _load(model: str, auto_class: str | None, dtype: str) -> Any:
    """A model by its own class of transformers, or a named one."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    _check_convertible(model, config)
    name = auto_class or (config.architectures or ["AutoModel"])[0]
    model_class: Any = getattr(transformers, name, None)
    if not hasattr(model_class, "from_pretrained"):
        raise ValueError(f"transformers has no class {name!r}: name one with --auto-class")
    return model_class.from_pretrained(model, dtype=dtype)


def _load_modules(model: str, kind: str, dtype: str) -> Any:
    """A model by its class of sentence-transformers, with its pooling, prompts and lengths."""
    from ..hub.loading import load_with_modules
    from ..patching.sentence_transformers import models_inside

    loaded = load_with_modules(model, kind, dtype=dtype)
    for inside in models_inside(loaded):
        _check_convertible(model, inside.config)
    return loaded


def _check_convertible(model: str, config: Any) -> None:
    """Raise where a model has no exact attention to replace."""
    from ..hub.card import patch_of
    from ..models import ClusterFormerConfig, CSTConfig

    if isinstance(config, CSTConfig | ClusterFormerConfig):
        raise ValueError(
            f"{model} is a {config.model_type} model from scratch, which has no other attention to replace: load "
            "it with transformers' Auto classes after import hf_effattn"
        )
    saved = patch_of(config)
    if saved is not None and saved.needs_fine_tuning:
        raise ValueError(
            f'{model} is converted to "{saved.method}" already, and its weights were fine-tuned for that: load it '
            "with hf_effattn.from_pretrained, or convert the exact model that it was made from"
        )


def _save_reader(model: str, output: Path, max_length: int | None) -> None:
    """Write the tokenizer or processor, if there is one."""
    from ..patching.sentence_transformers import set_longest_text

    reader = _reader_of_inputs(model)
    if reader is None:
        typer.secho(f"{model} has no tokenizer or processor, so none was written.", err=True)
        return
    if max_length is not None and getattr(reader, "model_max_length", max_length) < max_length:
        set_longest_text(reader, max_length)  # it would cut at the old length
    reader.save_pretrained(output)


def _reader_of_inputs(model: str) -> Any:
    """The tokenizer, image processor, feature extractor or processor of all; None where the model has none."""
    import transformers

    from ..hub.loading import knows_words

    kinds = (
        transformers.AutoProcessor,
        transformers.AutoTokenizer,
        transformers.AutoImageProcessor,
        transformers.AutoFeatureExtractor,
    )
    for kind in kinds:
        try:
            reader = kind.from_pretrained(model)
        except (OSError, ValueError, ImportError, KeyError, TypeError):
            continue  # of another kind, or not there
        if not isinstance(reader, transformers.PreTrainedTokenizerBase) or knows_words(reader):
            return reader
    return None
