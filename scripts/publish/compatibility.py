"""The table of `hf_effattn/patching/COMPATIBILITY.md`: what the tests marked `compatibility` say that they show."""

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_effattn.reporting.table import markdown

ROOT = Path(__file__).resolve().parents[2]
MARK = "pytest.mark.compatibility"
VERDICTS = "runs", "refused", "told", "differs"


@dataclass(frozen=True)
class Row:
    """One mark of a test.

    Args:
        library (`str`): the name of a package.
        what (`str`): what of it is used beside a patch.
        verdict (`str`): what comes of it, one of `VERDICTS`.
        test (`str`): the test that shows it.
        path (`Path`): its file.
    """

    library: str
    what: str
    verdict: str
    test: str
    path: Path


def rows() -> list[Row]:
    """The marks of all tests, by library and in the order of the files."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    marks = [row for path in paths for row in _rows_of(path)]
    return sorted(marks, key=lambda row: row.library.lower())


def _rows_of(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8")
    if MARK not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARK:
                library, what, verdict = (ast.literal_eval(argument) for argument in mark.args)
                if verdict not in VERDICTS:
                    raise ValueError(f"{node.name} of {path.name} has the verdict {verdict!r}: give one of {VERDICTS}")
                yield Row(library, what, verdict, node.name, path)


def version_of(library: str) -> str:
    """The version of a package that the tests are run with."""
    pinned = re.search(
        rf"^{re.escape(library)}==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M | re.I
    )
    if pinned is None:
        raise ValueError(f"constraints.txt pins no {library}, of which a test says that it is compatible")
    return pinned[1]


def table() -> str:
    """Every row, with the version of its library."""
    page = ROOT / "hf_effattn" / "patching"
    cells = [
        (
            f"{row.library} {version_of(row.library)}",
            row.what,
            row.verdict,
            f"[{row.path.stem}]({Path(os.path.relpath(row.path, page)).as_posix()})",
        )
        for row in rows()
    ]
    return markdown(["beside", "what", "verdict", "test"], cells, right=())
