"""`effattn models`: what can be patched, and what is known and cannot."""

import json
from typing import Annotated

import typer

ROW_WIDTH = 200  # in a pipe a row is a line, for grep


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """List the model types (config.model_type) that can be patched, and known ones that cannot, with the reason."""
    from ..patching.model_types.table import (
        NOT_SERVED,
        NOT_SERVED_HEADER,
        SERVED_HEADER,
        not_served_rows,
        served_rows,
    )

    if as_json:
        served = {name: dict(zip(SERVED_HEADER[1:], cells, strict=True)) for name, *cells in served_rows()}
        typer.echo(json.dumps({"served": served, "not served": NOT_SERVED}, indent=1))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(ROW_WIDTH, console.width))
    for header, rows in ((SERVED_HEADER, served_rows()), (NOT_SERVED_HEADER, not_served_rows())):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in header:
            table.add_column(heading)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(
        "In layers with a window, and in every layer for inputs below min_length, attention stays exact. A model of "
        "several parts is served where a part is."
    )
