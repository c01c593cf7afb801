"""How token vectors become one per text: a model's own pooling, as sentence-transformers stores it, or a named one.

Sizes: `B` texts, `N` tokens, `d` hidden size.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import cached_file

from ..measuring.errors import mean_pool

MODES = ("mean", "cls", "last")
# Sentence-transformers' names of them; older versions write a switch for each.
STORED_MODES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
STORED_SWITCHES = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
# The first of these prompts is put before a document, as `SentenceTransformer.encode_document` does.
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True)
class Pooling:
    """What is done to the last hidden states.

    Args:
        mode (`str`, *optional*): `"mean"`, `"cls"` (the first token), `"last"`; None where one of `layers` does it.
        layers (`tuple[nn.Module, ...]`): of sentence-transformers, after the model or after the pooling.
        normalize (`bool`): whether the model's vectors have length 1.
        prompts (`dict[str, str]`): what is put before a text, by the kind of text.
        default_prompt (`str`, *optional*): the key of the one for texts of no known kind.
    """

    mode: str | None = "mean"
    layers: tuple[nn.Module, ...] = ()
    normalize: bool = False
    prompts: dict[str, str] | None = None
    default_prompt: str | None = None

    @property
    def document_prompt(self) -> str:
        """What is put before a document."""
        return self._prompt(*DOCUMENT_PROMPTS)

    def _prompt(self, *names: str) -> str:
        prompts = self.prompts or {}
        return next((prompts[name] for name in (*names, self.default_prompt) if name in prompts), "")

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pool.

        Args:
            hidden (`torch.Tensor`): `(B, N, d)`.
            mask (`torch.Tensor`): bool `(B, N)`, True = a token; any side may be padded.

        Returns:
            `torch.Tensor`: `(B, d)`, or as wide as the last layer makes it; means are taken in float64.
        """
        features: dict[str, Any] = {"token_embeddings": hidden, "attention_mask": mask.long()}
        if self.mode is not None:
            pooled = _pooled(self.mode, hidden, mask)
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


def stored_pooling(model: str | Path, mode: str | None = None) -> Pooling:
    """The pooling that a model is stored with; the mean where it says nothing.

    Args:
        model (`str` or `Path`): Hub id or folder.
        mode (`str`, *optional*): one of `MODES`, in place of the stored one.

    Raises:
        ValueError: another mode, or a damaged file.
        ImportError: the model has layers that only sentence-transformers can load, and it is not installed.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"pooling must be one of {', '.join(MODES)}, got {mode!r}")
    modules = _stored(model, "modules.json")
    if modules is None:
        return Pooling(mode or "mean")
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    paths = [str(module["path"]) for module in modules if str(module["type"]).endswith(".Pooling")]
    config = (_stored(model, f"{paths[0]}/config.json") if paths else None) or {}
    if config.get("include_prompt") is False:
        raise ValueError(
            f"{model} leaves its prompt out of the pooling, which is not served: embed with sentence-transformers"
        )
    mode = mode or STORED_MODES.get(stored_mode(config))
    own = ("Transformer", "Normalize") if mode is None else ("Transformer", "Normalize", "Pooling")
    others = [kind for kind in kinds if kind not in own]
    layers = _layers_of_library(model, own, others) if others else ()
    texts = _stored(model, "config_sentence_transformers.json") or {}
    return Pooling(mode, layers, "Normalize" in kinds, texts.get("prompts"), texts.get("default_prompt_name"))


def stored_mode(config: dict[str, Any]) -> str:
    """The mode in a pooling's configuration, by sentence-transformers' name; several are joined with `+`."""
    found = config.get("pooling_mode")
    if found is None:
        prefix = "pooling_mode_"
        switches = [name.removeprefix(prefix) for name, on in config.items() if name.startswith(prefix) and on is True]
        found = [STORED_SWITCHES.get(switch, switch) for switch in switches] or ["mean"]
    return found if isinstance(found, str) else "+".join(found)


def _stored(model: str | Path, file: str) -> Any:
    """A JSON file of a model; None where it has none."""
    path = cached_file(model, file, _raise_exceptions_for_missing_entries=False)
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} of {model} is no JSON ({error})") from None


def _layers_of_library(model: str | Path, own: Sequence[str], others: Sequence[str]) -> tuple[nn.Module, ...]:
    """The layers that are not served here, as sentence-transformers loads them."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ImportError(
            f"{model} ends in layers that sentence-transformers loads ({', '.join(others)}): "
            "pip install sentence-transformers"
        ) from None
    loaded = SentenceTransformer(str(model), device="cpu")
    return tuple(module.eval() for module in loaded if type(module).__name__ not in own)
