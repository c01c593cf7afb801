"""What an embedding run keeps in its folder: a manifest, a shard for each piece of work, and at the end one file.

Every file is written beside its place, forced to disk, and moved there: a kill leaves it whole or absent. Rank 0 alone
writes the manifest and the result; every rank writes shards.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..atomic_files import PART, write_atomically
from .documents import Document, Skipped, as_shown
from .plan import Batch

FORMAT_VERSION = 3
MANIFEST, SKIPPED, SHARDS, LOCK = "embed.json", "skipped.jsonl", "shards", ".lock"
IDS, VECTORS = "ids.jsonl", {"npy": "vectors.npy", "parquet": "vectors.parquet"}
OWN = {MANIFEST, SKIPPED, SHARDS, LOCK, IDS, *VECTORS.values()}


class Shards:
    """What came out of each piece of some work, in a file each; several processes may add the same one.

    Args:
        path (`Path`): their folder, which is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(parents=True, exist_ok=True)

    def has(self, index: int) -> bool:
        """Whether the shard of a piece is there."""
        return self.path(index).exists()

    def present(self) -> set[int]:
        """All that are there."""
        return {int(file.name) for file in self._path.iterdir() if file.name.isdigit()}

    def add(self, index: int, write: Callable[[IO[bytes]], object]) -> None:
        """Keep what `write` writes as the shard of a piece."""
        write_atomically(self.path(index), write, unique=True)

    def path(self, index: int) -> Path:
        """The file of a piece."""
        return self._path / f"{index:07d}"


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

    @property
    def is_finished(self) -> bool:
        """Whether the result is there."""
        manifest = self.manifest()
        return manifest is not None and bool(manifest["finished"])

    def write_skipped(self, skipped: Iterable[Skipped]) -> None:
        """Keep the report of the documents that are skipped or cut."""
        self._write(SKIPPED, (json.dumps(asdict(skip)) + "\n" for skip in skipped))

    def shards(self, work: str, identity: Any) -> Shards:
        """The shards of some work.

        Args:
            work (`str`): its name.
            identity: JSON values, all that its results depend on: shards of anything else lie elsewhere.
        """
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return Shards(self.path / SHARDS / f"{work}-{digest[:16]}")

    def put_together(
        self, form: str, shards: Shards, windows: Sequence[Sequence[Batch]], documents: Sequence[tuple[Document, int]]
    ) -> Path:
        """Write one file of all shards, rows in the order of the documents.

        Args:
            form (`str`): `"npy"`, with the ids in `ids.jsonl` beside it, or `"parquet"`.
            shards (`Shards`): the vectors of every batch, `(documents, d)` in the order of the batch.
            windows (`Sequence[Sequence[Batch]]`): the plan; one window is in memory at a time.
            documents (`Sequence[tuple[Document, int]]`): the documents and their tokens.

        Returns:
            `Path`: the file.
        """
        path = self.path / VECTORS[form]
        width = np.load(shards.path(0), mmap_mode="r").shape[1]
        if form == "npy":
            rows = (json.dumps({"id": document.id, "tokens": tokens}) + "\n" for document, tokens in documents)
            self._write(IDS, rows)  # first: where the vectors are, everything is
            write_atomically(path, lambda file: _write_npy(file, _rows(shards, windows), (len(documents), width)))
        else:
            write_atomically(path, lambda file: _write_parquet(file, _rows(shards, windows), width, documents))
        return path

    def clean(self) -> None:
        """Delete what a finished run needs no more."""
        shutil.rmtree(self.path / SHARDS, ignore_errors=True)

    def _write(self, name: str, lines: Iterable[str]) -> None:
        write_atomically(self.path / name, lambda file: file.writelines(line.encode() for line in lines))


def _rows(shards: Shards, windows: Sequence[Sequence[Batch]]) -> Iterator[tuple[list[int], np.ndarray]]:
    """The documents of every window in order, and their vectors."""
    first = 0
    for window in windows:
        order = [index for batch in window for index in batch.documents]
        vectors = np.concatenate([np.load(shards.path(first + number)) for number in range(len(window))])
        yield sorted(order), vectors[np.argsort(order)]
        first += len(window)


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
