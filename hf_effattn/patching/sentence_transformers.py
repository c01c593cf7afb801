"""Models of sentence-transformers: the transformers models inside them, their texts, how they are loaded and saved.

The library is never imported from here: what a user hands over has imported it, and what it loads and saves is noticed
when it does.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .stored import FIELD
from .transformers_internals import document_route

LIBRARY = "sentence_transformers"
# The class that loads transformers models, since version 5.4.
LOADER_MODULE, LOADER = f"{LIBRARY}.base.modules.transformer", "Transformer"

# Of the model, its folder or name on the Hub, and the keywords of `from_pretrained`.
Loaded = Callable[[Any, Any, Mapping[str, Any]], None]
Saved = Callable[[Any, Path], None]  # of the model, its folder


def is_sentence_transformer(model: Any) -> bool:
    """Whether an object, or a class, is one of sentence-transformers: SentenceTransformer, CrossEncoder, a module."""
    kind = model if isinstance(model, type) else type(model)
    return any(base.__module__.partition(".")[0] == LIBRARY for base in kind.__mro__)


def models_inside(model: Any) -> list[Any]:
    """The transformers models that a model consists of: itself, or those in a model of sentence-transformers.

    Args:
        model (`nn.Module`): any.

    Raises:
        ValueError: a model of sentence-transformers that holds none, or runs an exported graph.
    """
    if not isinstance(model, nn.Module) or not is_sentence_transformer(model):
        return [model]
    models: list[PreTrainedModel] = []
    _collect(model, models, set())
    if models:
        return models
    backend = getattr(model, "backend", "torch")
    exported = f' with backend="{backend}", which runs an exported graph' if backend != "torch" else ""
    raise ValueError(
        f"{type(model).__name__} holds no transformers model{exported}, so it has no attention to patch; load one "
        'that has a Transformer module, with backend="torch"'
    )


def _collect(module: nn.Module, models: list[PreTrainedModel], seen: set[nn.Module]) -> None:
    if module in seen:
        return
    seen.add(module)
    if isinstance(module, PreTrainedModel):
        models.append(module)
        return
    for child in module.children():
        _collect(child, models, seen)


def cut_at(model: nn.Module) -> tuple[int, str] | None:
    """The tokens at which a model of sentence-transformers cuts texts, and the attribute that says so.

    Returns:
        `(int, str)`, *optional*: None for any other model, or where no text is cut.
    """
    if not is_sentence_transformer(model):
        return None
    lengths = {"document_length": _document_length(model), "max_seq_length": getattr(model, "max_seq_length", None)}
    cuts = ((length, name) for name, length in lengths.items() if isinstance(length, int) and length < sys.maxsize)
    return next(cuts, None)


def _document_length(model: nn.Module) -> int | None:
    """Where `encode_document` cuts texts, if elsewhere than at `max_seq_length`, as checkpoints of ColBERT do."""
    first = model if hasattr(model, "document_length") else next(model.children(), None)
    return getattr(first, "document_length", None)


def model_and_inputs(model: Any, inputs: Any) -> tuple[Any, Any]:
    """The transformers model and what it takes, of a model of sentence-transformers and its texts; others as they are.

    Args:
        model (`nn.Module`): any.
        inputs (`str`, `tuple`, `Sequence` of them or of `Mapping`): texts, or for a CrossEncoder pairs of them, each
            to be a batch of its own, cut and with the default prompt as `encode` has them, or where documents have a
            length of their own, cut there; or encoded inputs.

    Returns:
        `(PreTrainedModel, list)`: the model, and one encoding per text.

    Raises:
        ValueError: no transformers model inside, or more than one.
    """
    if not isinstance(model, nn.Module) or not is_sentence_transformer(model):
        return model, inputs
    inside = models_inside(model)
    if len(inside) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(inside)} transformers models; take one of them, as "
            "hf_effattn.patching.sentence_transformers.models_inside(model) lists them, and texts that its tokenizer "
            "encoded"
        )
    texts = inputs if isinstance(inputs, list) else [inputs]
    if not texts or not all(_is_text(text) for text in texts):
        return inside[0], inputs
    prompt = getattr(model, "prompts", {}).get(getattr(model, "default_prompt_name", None))
    return inside[0], [_encoded(model, inside[0], text, prompt) for text in texts]


def _is_text(text: Any) -> bool:
    pair = isinstance(text, list | tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)
    return pair or isinstance(text, str)


def _encoded(model: Any, inside: PreTrainedModel, text: Any, prompt: str | None) -> dict[str, Any]:
    options = {} if prompt is None else {"prompt": prompt}
    if _document_length(model) is not None:
        options["task"] = "document"
    features = model.preprocess([text], **options)
    taken = inspect.signature(inside.forward).parameters
    return {name: value for name, value in features.items() if name in taken}


def set_max_seq_length(model: Any, length: int) -> None:
    """Let a model of sentence-transformers cut texts at another length; any other model stays as it is."""
    if not is_sentence_transformer(model):
        return
    for module in model.modules():
        if isinstance(getattr(module, "auto_model", None), PreTrainedModel):  # others have a length that is fixed
            module.max_seq_length = length
            if module.tokenizer is not None:
                set_longest_text(module.tokenizer, length)
            if getattr(module, "document_length", None) is not None:  # a MultiVectorEncoder's own cut
                module.document_length = length


def set_longest_text(tokenizer: Any, length: int) -> None:
    """Let a tokenizer cut texts at another length, and so do what reads its saved `tokenizer.json` alone."""
    tokenizer.model_max_length = length
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.truncation is not None:
        backend.enable_truncation(**backend.truncation | {"max_length": length})


def document_modules(model: Any) -> list[Any]:
    """The modules that a document goes through, in order; of a Router those of its route.

    Args:
        model (`nn.Module`): of sentence-transformers.

    Raises:
        ValueError: a Router without a route for documents, or whose documents go through no transformers model.
    """
    modules: list[Any] = []
    for module in model.children():
        if hasattr(module, "sub_modules"):  # a Router
            modules += module.sub_modules[document_route(module)]
        else:
            modules.append(module)
    if not isinstance(getattr(modules[0], "auto_model", None), PreTrainedModel):
        raise ValueError(
            f"{type(model).__name__} reads documents by {type(modules[0]).__name__}, which is no transformers model "
            "and has no attention: name a model whose first module is a Transformer"
        )
    return modules


def after_loading_and_saving(
    loaded: Loaded, saved: Saved, while_loading: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Have functions called for every transformers model that sentence-transformers loads or saves from now on.

    Args:
        loaded (`Callable`): gets the model, the folder or the name on the Hub, and the keywords of `from_pretrained`.
        saved (`Callable`): gets the model and the folder.
        while_loading (`Callable`): makes a context for the time in which the model is loaded.
    """

    def watch(module: ModuleType) -> None:
        watch_loading(getattr(module, LOADER), loaded, while_loading)
        watch_saving(getattr(module, LOADER), saved)

    if LOADER_MODULE in sys.modules:
        watch(sys.modules[LOADER_MODULE])
    sys.meta_path.insert(0, _Import(watch))


class _Import(MetaPathFinder):
    """Notices the import of the module whose class loads, which may come long after that of this package."""

    def __init__(self, watch: Callable[[ModuleType], None]) -> None:
        self.watch = watch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != LOADER_MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((candidate for candidate in specs if candidate is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self.watch(module)


_watched: set[tuple[type, str]] = set()


def watch_loading(kind: Any, loaded: Loaded, while_loading: Callable[[], AbstractContextManager[Any]]) -> None:
    """Watch one class that loads; a second time changes nothing. Arguments as of `after_loading`."""
    if (kind, "__init__") in _watched:
        return
    _watched.add((kind, "__init__"))
    make = kind.__init__

    @wraps(make)
    def init(self: Any, model_name_or_path: Any, *args: Any, **kwargs: Any) -> None:
        options = kwargs.get("model_kwargs") or kwargs.get("model_args") or {}  # the latter is its earlier name
        with while_loading():
            make(self, model_name_or_path, *args, **kwargs)
        if isinstance(self.auto_model, PreTrainedModel):
            loaded(self.auto_model, model_name_or_path, options)
        elif hasattr(getattr(self.auto_model, "config", None), FIELD):
            warnings.warn(
                f"{model_name_or_path} was saved patched by hf_effattn, but an exported graph has the "
                'attention that it was exported with; load it with backend="torch" to have it patched',
                stacklevel=3,
            )

    kind.__init__ = init


def watch_saving(kind: Any, saved: Saved) -> None:
    """Watch one class that saves; a second time changes nothing. Arguments as of `after_loading_and_saving`."""
    if (kind, "save") in _watched:
        return
    _watched.add((kind, "save"))
    save = kind.save

    @wraps(save)
    def save_and_tell(self: Any, output_path: Any, *args: Any, **kwargs: Any) -> None:
        save(self, output_path, *args, **kwargs)
        saved(self.auto_model, Path(output_path))

    kind.save = save_and_tell
