"""How token vectors become one per text: a model's own pooling, as sentence-transformers has it, or a named one.

Sizes: `B` texts, `N` tokens, `d` hidden size.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..hub.module_folders import stored_json
from ..measuring.errors import mean_pool
from ..patching.sentence_transformers import document_modules

MODES = ("mean", "cls", "last")
# Sentence-transformers' names of them; older versions write a switch for each.
STORED_MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
STORED_SWITCHES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
PROMPT_LEFT_OUT = "{} leaves its prompt out of the pooling, which is not served: embed with sentence-transformers"
# What the first module of sentence-transformers makes of a text.
TOKEN_VECTORS = ("forward", "last_hidden_state")
# The first of these prompts is put before a document, as `SentenceTransformer.encode_document` does.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True)
class Pooling:
    """What is done to the last hidden states.

    Args:
        mode (`str`, *optional*): `"mean"`, `"cls"` (the first token), `"last"`; None where one of `layers` does it.
        before (`tuple[nn.Module, ...]`): of sentence-transformers, between the model and the pooling.
        layers (`tuple[nn.Module, ...]`): of sentence-transformers, after the pooling.
        normalize (`bool`): whether the model's vectors have length 1.
        truncate_dim (`int`, *optional*): how many of their numbers are kept.
        prompts (`dict[str, str]`): what is put before a text, by the kind of text.
        default_prompt (`str`, *optional*): the key of the one for texts of no known kind.
    """

    mode: str | None = "mean"
    before: tuple[nn.Module, ...] = ()
    layers: tuple[nn.Module, ...] = ()
    normalize: bool = False
    truncate_dim: int | None = None
    prompts: dict[str, str] | None = None
    default_prompt: str | None = None

    @property
    def document_prompt(self) -> str:
        """What is put before a document."""
        return self._prompt(*DOCUMENT_PROMPTS)

    def _prompt(self, *names: str) -> str:
        prompts = self.prompts or {}
        return next((prompts[name] for name in (*names, self.default_prompt) if name in prompts), None) or ""

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pool.

        Args:
            hidden (`torch.Tensor`): `(B, N, d)`.
            mask (`torch.Tensor`): bool `(B, N)`, True = a token; any side may be padded.

        Returns:
            `torch.Tensor`: `(B, d)`, or as wide as the last layer makes it; means are taken in float64.
        """
        features: dict[str, Any] = {"token_embeddings": hidden, "attention_mask": mask.long()}
        for layer in self.before:
            features = layer(features)
        if self.mode is not None:
            pooled = _pooled(self.mode, features["token_embeddings"], mask)
            # A layer has the model's dtype.
            features["sentence_embedding"] = pooled.to(hidden.dtype) if self.layers else pooled
        for layer in self.layers:
            features = layer(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors


def _pooled(mode: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mode == "mean":
        return mean_pool(hidden, mask)
    ones = mask.int()
    index = ones.argmax(dim=1) if mode == "cls" else mask.shape[1] - 1 - ones.flip(1).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), index]


def _check_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        raise ValueError(f"pooling must be one of {', '.join(MODES)}, got {mode!r}")


def pooling_of(model: Any, mode: str | None = None) -> Pooling:
    """The pooling of a model of sentence-transformers, for documents.

    Args:
        model (`SentenceTransformer`): loaded.
        mode (`str`, *optional*): one of `MODES`, in place of its own.

    Raises:
        ValueError: another mode, or a model that does not make one vector of a document's token vectors.
    """
    _check_mode(mode)
    name = type(model).__name__
    if name != "SentenceTransformer":
        raise ValueError(
            f"the model is a {name}, which does not make one dense vector of a document: call the library's {name}"
        )
    reader, *modules = document_modules(model)
    made = reader.modality_config.get("text") or {}
    if (made.get("method"), made.get("method_output_name")) != TOKEN_VECTORS:
        raise ValueError(f"{name} reads texts by {made or 'nothing'}, which is not served: embed with its encode")
    ends = bool(modules) and type(modules[-1]).__name__ == "Normalize"
    if ends:
        modules.pop()
    pools = [index for index, module in enumerate(modules) if type(module).__name__ == "Pooling"]
    place = pools[0] if pools else 0
    if pools:
        config = modules[place].get_config_dict()
        if config.get("include_prompt") is False:
            raise ValueError(PROMPT_LEFT_OUT.format(name))
        mode = mode or STORED_MODES.get(stored_mode(config))
    before, layers = ((), modules) if mode is None else (modules[:place], modules[place + bool(pools) :])
    truncate_dim = getattr(model, "truncate_dim", None)
    return Pooling(
        mode, tuple(before), tuple(layers), ends, truncate_dim, dict(model.prompts), model.default_prompt_name
    )


def stored_pooling(model: str | Path, mode: str | None = None) -> Pooling:
    """The pooling that a model is stored with, read without sentence-transformers; the mean where it says nothing.

    Args:
        model (`str` or `Path`): Hub id or folder.
        mode (`str`, *optional*): one of `MODES`, in place of the stored one.

    Raises:
        ValueError: another mode, or a damaged file.
        ImportError: the model has layers that only sentence-transformers can load.
    """
    _check_mode(mode)
    modules = stored_json(model, "modules.json")
    if modules is None:
        return Pooling(mode or "mean")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    paths = [str(module["path"]) for module in modules if str(module["type"]).endswith(".Pooling")]
    config = (stored_json(model, f"{paths[0]}/config.json") if paths else None) or {}
    if config.get("include_prompt") is False:
        raise ValueError(PROMPT_LEFT_OUT.format(model))
    mode = mode or STORED_MODES.get(stored_mode(config))
    loadable = ("Transformer", "Normalize") if mode is None else ("Transformer", "Normalize", "Pooling")
    others = [kind for kind in kinds if kind not in loadable]
    if others:
        raise ImportError(
            f"{model} ends in layers that sentence-transformers loads ({', '.join(others)}): "
            "pip install sentence-transformers"
        )
    texts = stored_json(model, "config_sentence_transformers.json") or {}
    return Pooling(
        mode,
        normalize="Normalize" in kinds,
        truncate_dim=texts.get("truncate_dim"),
        prompts=texts.get("prompts"),
        default_prompt=texts.get("default_prompt_name"),
    )


def stored_mode(config: dict[str, Any]) -> str:
    """The mode in a pooling's configuration, by sentence-transformers' name; several are joined with `+`."""
    mode = config.get("pooling_mode")
    if mode is None:
        prefix = "pooling_mode_"
        switches = [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True]
        mode = [STORED_SWITCHES.get(switch, switch) for switch in switches] or ["mean"]
    return mode if isinstance(mode, str) else "+".join(mode)
