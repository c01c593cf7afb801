"""Documents of a folder or of a file in JSON Lines: in a fixed order, read one at a time, never all at once."""

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_BYTES = 2**20
LONGEST_LINE_BYTES = 2**28
JSON_LINES = (".jsonl", ".ndjson")


class UnreadableError(ValueError):
    """A document that cannot be read as text, and why."""


@dataclass(frozen=True, slots=True)
class Document:
    """Where a document is.

    Args:
        id (`str` or another JSON value): path inside the folder, or the row's own id, else the number of its line.
        place (`int`): byte at which its line begins; 0 for a file.
        size (`int`): bytes of its line or file.
    """

    id: Any
    place: int
    size: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A document that is left out, or cut, and why; the fields are a line of the report."""

    id: Any
    what: str
    why: str


class Folder:
    """The files of a folder and its subfolders by their paths in order; hidden ones are left out.

    Args:
        path (`Path`): the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def documents(self) -> Iterator[Document | Skipped]:
        """Every file, in order."""
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path)
            if any(part.startswith(".") for part in name.parts):
                continue
            if path.is_file():
                yield Document(name.as_posix(), 0, path.stat().st_size)
            elif path.is_symlink() and not path.exists():
                yield Skipped(name.as_posix(), "skipped", "a link to nothing")

    def pieces(self, document: Document) -> Iterator[str]:
        """The text of a document, a block at a time.

        Raises:
            UnreadableError: it holds zero bytes, as binary files do, or is not UTF-8 as far as it was read.
        """
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        place = 0
        try:
            with (self.path / document.id).open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    if b"\0" in block:
                        raise UnreadableError(f"binary, or not UTF-8: byte {place + block.index(0)} is zero")
                    yield decoder.decode(block)
                    place += len(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            held = len(decoder.getstate()[0])  # of the block before
            raise UnreadableError(f"not UTF-8 text: {error.reason} at byte {place - held + error.start}") from None
        except OSError as error:
            raise UnreadableError(error.strerror or str(error)) from None

    def digest(self) -> str:
        """A hash of all names and contents."""
        whole = hashlib.sha256()
        for document in self.documents():
            whole.update(repr(document).encode("utf-8", "surrogateescape"))
            if isinstance(document, Document):
                try:
                    with (self.path / document.id).open("rb") as file:
                        whole.update(hashlib.file_digest(file, "sha256").digest())
                except OSError as error:
                    whole.update(str(error.errno).encode())
        return whole.hexdigest()


class JSONLines:
    """The rows of a file in JSON Lines.

    Args:
        path (`Path`): the file.
        text_field (`str`): the field with the text.
        id_field (`str`, *optional*): the field with the id. Default: `id`, and the number of the line where there is
            none.
    """

    def __init__(self, path: Path, text_field: str, id_field: str | None = None) -> None:
        self.path = path
        self.text_field = text_field
        self.id_field = id_field

    def documents(self) -> Iterator[Document | Skipped]:
        """Every row, in order; blank lines are none."""
        with self.path.open("rb") as file:
            number, place = 0, 0
            while line := file.readline(LONGEST_LINE_BYTES):
                number += 1
                size, rest = len(line), line
                while not rest.endswith(b"\n") and (rest := file.readline(LONGEST_LINE_BYTES)):
                    size += len(rest)
                if size > len(line):
                    yield Skipped(number, "skipped", f"the line has {size:,} bytes, at most {len(line):,} are read")
                elif line.strip():
                    try:
                        yield Document(self._id(self._row(line), number), place, size)
                    except UnreadableError as error:
                        yield Skipped(number, "skipped", str(error))
                place += size

    def pieces(self, document: Document) -> Iterator[str]:
        """The text of a document, a block at a time.

        Raises:
            UnreadableError: the row is no longer what it was, or its text is no Unicode.
        """
        with self.path.open("rb") as file:
            file.seek(document.place)
            text = self._row(file.read(document.size))[self.text_field]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnreadableError(f"the text is no Unicode: {error.reason} at character {error.start}") from None
        for start in range(0, len(text), BLOCK_BYTES):
            yield text[start : start + BLOCK_BYTES]

    def digest(self) -> str:
        """A hash of the file."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _row(self, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
            raise UnreadableError(f"no JSON in UTF-8 ({error})") from None
        if not isinstance(row, dict):
            raise UnreadableError("the line is no JSON object")
        if not isinstance(row.get(self.text_field), str):
            fields = ", ".join(map(repr, list(row)[:8]))
            raise UnreadableError(f"no text in the field {self.text_field!r}; the row has {fields or 'none'}")
        return row

    def _id(self, row: dict[str, Any], number: int) -> Any:
        name = "id" if self.id_field is None else self.id_field
        stored_id = row.get(name)
        if stored_id is None and self.id_field is not None:
            raise UnreadableError(f"no id in the field {self.id_field!r}")
        return number if stored_id is None else stored_id


def open_documents(path: Path, text_field: str | None = None, id_field: str | None = None) -> Folder | JSONLines:
    """The documents at a path.

    Args:
        path (`Path`): a folder of text files, or a file in JSON Lines.
        text_field (`str`, *optional*): of the rows. Default: `text`.
        id_field (`str`, *optional*): of the rows. Default: `id`, else the number of the line.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: another kind of file, or fields of rows where there are files.
    """
    if path.is_dir():
        if text_field is not None or id_field is not None:
            raise ValueError("--text-field and --id-field are for JSON Lines: a folder's files are texts as they are")
        return Folder(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no folder and no file {path}")
    if path.suffix.lower() not in JSON_LINES:
        raise ValueError(
            f"{path} is neither a folder nor JSON Lines ({' or '.join(JSON_LINES)}): put text files into a folder"
        )
    return JSONLines(path, text_field or "text", id_field)


def as_shown(identifier: Any) -> str:
    """An id as words; what is no Unicode in a file's name is replaced."""
    text = identifier if isinstance(identifier, str) else json.dumps(identifier, sort_keys=True)
    return text.encode("utf-8", "replace").decode()
