"""What shall be embedded, and how."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measuring.candidates import make_candidates
from .kept import VECTORS

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """How texts become vectors.

    Args:
        model (`str`): Hub id or folder of a text encoder, or of a model of sentence-transformers.
        method (`dict`, *optional*): a method and its settings. Default: as the model was patched, or else exact,
            on a CPU by `"exact"` where it has windows.
        pooling (`str`, *optional*): `"mean"`, `"cls"` or `"last"`. Default: as stored with the model, else the mean.
        normalize (`bool`, *optional*): whether vectors get length 1. Default: as stored with the model, else no.
        prompt (`str`, *optional*): put before every document. Default: as stored with the model, else none.
        max_length (`int`, *optional*): tokens at which documents are cut. Default: longer ones than the model takes
            are an error.
        extend_positions (`bool`): repeat the model's learned positions up to the longest document.
        chunk (`int`, *optional*): tokens of the chunks that documents are divided into, whose vectors' mean they get.
        batch_tokens (`int`): the most tokens of a batch, padding included.
        dtype (`str`): of the weights.
        device (`str`, *optional*): default: a GPU where there is one.
    """

    model: str
    method: dict[str, Any] | None = None
    pooling: str | None = None
    normalize: bool | None = None
    prompt: str | None = None
    max_length: int | None = None
    extend_positions: bool = False
    chunk: int | None = None
    batch_tokens: int = 16_384
    dtype: str = "float32"
    device: str | None = None

    def check(self) -> None:
        """Raise ValueError where options contradict each other or are out of range."""
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("max_length", "chunk", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.chunk is not None and self.extend_positions:
            raise ValueError("--chunk keeps to the model's positions and --extend-positions repeats them: give one")
        if self.method is not None:
            make_candidates([self.method], kinds=(False, True))


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(EncodeOptions):
    """The options of a run.

    Args:
        documents (`Path`): a folder of text files, or a file in JSON Lines.
        output (`Path`): the folder of the run: new, or that of a run with the same options, which goes on.
        max_error (`float`, *optional*): choose the fastest method within this error of the last hidden state.
        text_field (`str`, *optional*): of JSON Lines.
        id_field (`str`, *optional*): of JSON Lines.
        form (`str`): of the vectors, `"npy"` or `"parquet"`.
    """

    documents: Path
    output: Path
    max_error: float | None = None
    text_field: str | None = None
    id_field: str | None = None
    form: str = "npy"

    def check(self) -> None:
        """Raise ValueError where options contradict each other or are out of range."""
        if self.form not in VECTORS:
            raise ValueError(f"--format must be one of {', '.join(VECTORS)}, got {self.form!r}")
        if self.method is not None and self.max_error is not None:
            raise ValueError("--method names a method and --max-error chooses one: give one of them")
        if self.max_error is not None and not self.max_error > 0:
            raise ValueError(f"--max-error must be above 0, got {self.max_error}: only exact attention has none")
        super().check()
        if self.output.resolve().is_relative_to(self.documents.resolve()):
            raise ValueError("--output lies among the documents: name a folder outside")
