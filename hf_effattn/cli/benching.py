"""`effattn bench`: speed and memory of the methods alone, without a model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .arguments import check_output_file, lengths_of, lines_of_progress, method_of, mistakes_in_words


def bench(
    lengths: Annotated[str, typer.Option(help="Numbers of tokens, with commas.")] = "1024,4096",
    method: Annotated[
        list[str] | None,
        typer.Option(help='Such as "i-clustered clusters=100 topk=32"; several times for several. Default: one each.'),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Texts at once.")] = 1,
    num_heads: Annotated[int, typer.Option(help="Attention heads.")] = 12,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU where there is one.")] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the gradients out.")] = False,
    repeats: Annotated[int, typer.Option(help="Timed rounds; short calls get more.")] = 5,
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """From which length on are the methods faster than exact attention? Random inputs, no model.

    Random inputs tell nothing about the error on text: measure it with `effattn report` and your model.
    """
    chosen = [method_of(description) for description in method or []] or None
    wanted = lengths_of(lengths) or ()
    from ..measuring.bench import bench as measure

    with mistakes_in_words():
        check_output_file(output)
        benchmark = measure(
            wanted,
            chosen,
            batch_size=batch_size,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            backward=not forward_only,
            repeats=repeats,
            progress=lines_of_progress(),
        )
    text = json.dumps(benchmark, indent=1)
    if output is not None:
        with mistakes_in_words():
            output.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
        return
    _show(benchmark)


def _show(benchmark: dict[str, Any]) -> None:
    """The table, and what it was measured on."""
    from ..reporting.numbers import megabytes
    from .tables import show_table

    parts = [part for part in ("forward", "forward_backward") if any(f"{part}_ms" in row for row in benchmark["rows"])]
    rows = []
    for row in benchmark["rows"]:
        cells = [
            f"{row[f'{part}_speedup']:.2f}× {row[f'{part}_ms']:.1f} ms" if f"{part}_ms" in row else ""
            for part in parts
        ]
        peak, error = row.get(f"{parts[-1]}_peak_bytes"), row.get("random_error")
        cells += ["" if peak is None else megabytes(peak), "" if error is None else f"{error:.3f}"]
        if "why_exact" in row:
            cells[0] = "is exact here"
        rows.append([f"{row['length']:,}", row["method"], *cells])
    show_table(["tokens", "attention", *(part.replace("_", " + ") for part in parts), "memory", "error"], rows)
    at, settings = benchmark["environment"], benchmark["settings"]
    typer.echo(
        "Times as fast as the fastest exact kernel, and the memory added, on random inputs: "
        f"B={settings['batch_size']}, H={settings['num_heads']}, D={settings['head_dim']}, {settings['dtype']}, "
        f"{at['device_name']}."
    )
