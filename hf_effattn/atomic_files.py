"""Files that are whole or absent, whenever the process that writes them is killed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO
from uuid import uuid4

PART = ".part"


def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, unique: bool = False) -> None:
    """Let `write` fill a file that takes its place when it is whole and on disk; what was there stays till then.

    Args:
        path (`Path`): the file; its folder must exist.
        write (`Callable`): gets the open file, of bytes.
        unique (`bool`): whether the file has a name of its own until it is whole, so that several processes, on
            several machines, may write it at once. What a kill leaves of it then stays.
    """
    part = path.with_name(f"{path.name}.{uuid4().hex}{PART}" if unique else path.name + PART)
    with part.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    if os.name == "posix":  # the move too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
