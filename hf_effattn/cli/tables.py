"""Tables of words and numbers on the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

PIPE_WIDTH = 120
SHORTEST_NAME = 18


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column numbers the second, a name; a value is printed once where rows repeat it.

    Args:
        header (`Sequence[str]`): the headings.
        rows (`Sequence[Sequence[str]]`): cells, as many per row.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(PIPE_WIDTH, console.width))  # a pipe or a log has no width to keep to
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(header):
        if index == 1:
            table.add_column(heading, min_width=SHORTEST_NAME)
        else:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row[0]):
            table.add_section()
        first = "" if row[0] == before else row[0]
        table.add_row(first, *(escape(cell) for cell in row[1:]))
        before = row[0]
    console.print(table)
