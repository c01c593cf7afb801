"""What an embedding run keeps in its folder: a manifest, a shard of vectors for each batch, and at the end one file.

Every file is written beside its place, forced to disk, and moved there: a kill leaves it whole or absent.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..atomic_files import PART, write_atomically
from .documents import Document, Skipped, as_shown
from .plan import Batch

FORMAT_VERSION = 2
MANIFEST, DOCUMENTS, SKIPPED, SHARDS, LOCK = "embed.json", "documents.jsonl", "skipped.jsonl", "shards", ".lock"
IDS, VECTORS = "ids.jsonl", {"npy": "vectors.npy", "parquet": "vectors.parquet"}
OWN = {MANIFEST, DOCUMENTS, SKIPPED, SHARDS, LOCK, IDS, *VECTORS.values()}


class RunFolder:
    """The folder of a run.

    Args:
        path (`Path`): need not exist before `make`.

    Raises:
        ValueError: it is a file, or holds something that no run wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise ValueError(f"--output: {path} is a file; name a folder")
        others = (
            [file.name for file in path.iterdir() if file.name.removesuffix(PART) not in OWN] if path.is_dir() else []
        )
        if others:
            raise ValueError(
                f"--output: {path} holds other things ({', '.join(sorted(others)[:3])}); name a new folder"
            )
        self.shards = path / SHARDS

    def make(self) -> None:
        """Make the folder if it is missing."""
        self.path.mkdir(parents=True, exist_ok=True)

    def manifest(self) -> dict[str, Any] | None:
        """What the run was begun with; None where it was not begun.

        Raises:
            ValueError: another version wrote it, or it is damaged.
        """
        try:
            manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
            version = manifest["format"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path / MANIFEST} is damaged ({error}): delete the folder and start anew"
            ) from None
        if version != FORMAT_VERSION:
            what = "update hf_effattn" if version > FORMAT_VERSION else "start anew in another folder"
            raise ValueError(f"{self.path / MANIFEST} has format {version}, and {FORMAT_VERSION} is read: {what}")
        return manifest

    def write_manifest(self, **values: Any) -> None:
        """Write it; what is kept beside it is written before."""
        self._write(MANIFEST, [json.dumps({"format": FORMAT_VERSION, **values}, indent=1) + "\n"])

    def write_documents(self, documents: Iterable[tuple[Document, int]], skipped: Iterable[Skipped]) -> None:
        """Keep the documents with their numbers of tokens, and the report of those that are skipped or cut."""
        self._write(DOCUMENTS, (json.dumps([*_values(document), tokens]) + "\n" for document, tokens in documents))
        self._write(SKIPPED, (json.dumps(asdict(skip)) + "\n" for skip in skipped))

    def documents(self) -> list[tuple[Document, int]]:
        """The documents, with the tokens of each."""
        with (self.path / DOCUMENTS).open(encoding="utf-8") as lines:
            return [(Document(*values), tokens) for *values, tokens in map(json.loads, lines)]

    def clear_shards(self) -> None:
        """Forget what an earlier run left without a manifest."""
        shutil.rmtree(self.shards, ignore_errors=True)
        self.shards.mkdir()

    def has(self, index: int) -> bool:
        """Whether the shard of a batch is there."""
        return self._shard(index).exists()

    def add(self, index: int, vectors: np.ndarray) -> None:
        """Keep the vectors of a batch, `(documents, d)` in the order of the batch."""
        write_atomically(self._shard(index), lambda file: np.save(file, vectors))

    def put_together(
        self, form: str, windows: Sequence[Sequence[Batch]], documents: Sequence[tuple[Document, int]]
    ) -> Path:
        """Write one file of all shards, rows in the order of the documents, and delete what it was made of.

        Args:
            form (`str`): `"npy"`, with the ids in `ids.jsonl` beside it, or `"parquet"`.
            windows (`Sequence[Sequence[Batch]]`): the plan; one window is in memory at a time.
            documents (`Sequence[tuple[Document, int]]`): the documents and their tokens.

        Returns:
            `Path`: the file.
        """
        path = self.path / VECTORS[form]
        width = np.load(self._shard(0), mmap_mode="r").shape[1]
        if form == "npy":
            rows = (json.dumps({"id": document.id, "tokens": tokens}) + "\n" for document, tokens in documents)
            self._write(IDS, rows)  # first: where the vectors are, everything is
            write_atomically(path, lambda file: _write_npy(file, self._rows(windows), (len(documents), width)))
        else:
            write_atomically(path, lambda file: _write_parquet(file, self._rows(windows), width, documents))
        return path

    def clean(self) -> None:
        """Delete what a finished run needs no more."""
        shutil.rmtree(self.shards, ignore_errors=True)
        (self.path / DOCUMENTS).unlink(missing_ok=True)

    def _rows(self, windows: Sequence[Sequence[Batch]]) -> Iterator[tuple[list[int], np.ndarray]]:
        """The documents of every window in order, and their vectors."""
        first = 0
        for window in windows:
            order = [index for batch in window for index in batch.documents]
            vectors = np.concatenate([np.load(self._shard(first + number)) for number in range(len(window))])
            yield sorted(order), vectors[np.argsort(order)]
            first += len(window)

    def _shard(self, index: int) -> Path:
        return self.shards / f"{index:07d}.npy"

    def _write(self, name: str, lines: Iterable[str]) -> None:
        write_atomically(self.path / name, lambda file: file.writelines(line.encode() for line in lines))


def _values(document: Document) -> tuple[Any, ...]:
    return document.id, document.place, document.size


def _write_npy(file: IO[bytes], rows: Iterable[tuple[list[int], np.ndarray]], shape: tuple[int, int]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for _, vectors in rows:
        file.write(np.ascontiguousarray(vectors, dtype=np.float32).tobytes())


def _write_parquet(
    file: IO[bytes],
    rows: Iterable[tuple[list[int], np.ndarray]],
    width: int,
    documents: Sequence[tuple[Document, int]],
) -> None:
    import pyarrow
    import pyarrow.parquet

    vector = pyarrow.list_(pyarrow.float32(), width)
    schema = pyarrow.schema([("id", pyarrow.string()), ("tokens", pyarrow.int64()), ("vector", vector)])
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for indices, vectors in rows:
            columns = [
                pyarrow.array([as_shown(documents[index][0].id) for index in indices]),
                pyarrow.array([documents[index][1] for index in indices], pyarrow.int64()),
                pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), type=vector),
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
