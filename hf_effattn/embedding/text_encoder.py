"""The encoder of `effattn embed` as a function of batches, for libraries that call one in many processes."""

from typing import Any

import numpy as np
import pandas as pd
import torch

from ..settings_parsing import method_of
from .choice import exact_method
from .loaded import LoadedModel
from .options import EncodeOptions


class TextEncoder:
    """A function that adds the vectors of its texts to a batch, for `datasets.map`, Ray Data and Spark.

    It pickles as its arguments alone. Each copy loads the model at its first batch.

    Args:
        model (`str`): Hub id or folder of a text encoder, or of a model of sentence-transformers.
        column (`str`): the texts in a batch.
        threads (`int`, *optional*): of torch in the process that calls it. Default: as torch has it. With one process
            for each core give 1.
        method (`str` or `dict`, *optional*): such as `"bi-clustered clusters=64 topk=128"`. Default: as the model was
            patched, or else exact, on a CPU by `"exact"` where it has windows.
        options: the others of `EncodeOptions`, such as `max_length`, `chunk`, `pooling`, `normalize`. With
            `batch_tokens=1` each text runs alone, and its vector has the same bits in every batch.

    Raises:
        ValueError: options that contradict each other.

    Example:
        >>> from datasets import Dataset
        >>> from hf_effattn.embedding import TextEncoder
        >>> rows = Dataset.from_dict({"text": [open("long.txt").read(), "one more"]})
        >>> encode = TextEncoder("BAAI/bge-m3", threads=1)
        >>> rows.map(encode, batched=True, num_proc=2).column_names
        ['text', 'vector']
    """

    def __init__(
        self,
        model: str,
        *,
        column: str = "text",
        threads: int | None = None,
        method: str | dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        method = method_of(method) if isinstance(method, str) else method
        self._options = EncodeOptions(model=model, method=method, **options)
        self._options.check()
        if self._options.extend_positions and self._options.max_length is None:
            raise ValueError("extend_positions needs max_length: positions are repeated before the texts are known")
        self._column, self._threads = column, threads
        self._loaded: LoadedModel | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    def __call__(self, batch: Any) -> Any:
        """Encode a batch.

        Args:
            batch (`Mapping` or `pandas.DataFrame`): columns by name, as lists or arrays of one length.

        Returns:
            `dict` or `pandas.DataFrame`: the same columns and `vector`, an array `(texts, d)` in float32; a frame has
            a row of it in each cell.

        Raises:
            ValueError: a value that is no text or an empty one, a text longer than the model takes where no option
                cuts or divides it, a vector that is not finite.
        """
        if self._loaded is None:
            self._loaded = self._load()
        documents = [_sequences(self._loaded, number, text) for number, text in enumerate(batch[self._column])]
        # By length, so that little is padded.
        order = sorted(range(len(documents)), key=lambda number: (sum(map(len, documents[number])), number))
        vectors = self._loaded.encoder.encode([documents[number] for number in order])[np.argsort(order)]
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            raise ValueError(
                f"the vector of text {int(np.argmin(finite))} of the batch is not finite in {self._options.dtype}: "
                "try float32"
            )
        if isinstance(batch, pd.DataFrame):
            return batch.assign(vector=list(vectors))
        return {**batch, "vector": vectors}

    def _load(self) -> LoadedModel:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        loaded = LoadedModel(self._options)
        loaded.extend(loaded.most_tokens)
        chosen = self._options.method or exact_method(loaded.model)
        if chosen is not None:
            loaded.patch(chosen)
        return loaded


def _sequences(loaded: LoadedModel, number: int, text: Any) -> list[list[int]]:
    """The tokens of a text, as the sequences that the model reads one by one."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text {number} of the batch is {'empty' if isinstance(text, str) else repr(text)}")
    sequence, is_cut = loaded.sequence([text])
    if is_cut and not loaded.cuts:
        raise ValueError(
            f"text {number} of the batch has more than the {loaded.most_tokens:,} tokens that the model takes: chunk"
            " takes the mean of chunks, max_length cuts, extend_positions repeats learned positions"
        )
    return loaded.divided(sequence)
