"""`effattn embed`: vectors of many documents of any length."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import lines_of_progress, method_of, mistakes_in_words

if TYPE_CHECKING:
    from ..embedding.run import Progress

SECONDS_BETWEEN_LINES = 10.0
HOW, LENGTH, DOCUMENTS = "Attention and vectors", "Length and memory", "Documents"


def embed(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a text encoder, or of sentence-transformers.")],
    documents: Annotated[Path, typer.Argument(help="Folder of UTF-8 text files, or a file in JSON Lines (.jsonl).")],
    output: Annotated[Path, typer.Option(help="Folder of the run: vectors, ids and what was skipped.")],
    format: Annotated[str, typer.Option(help="npy, with ids.jsonl beside it, or parquet.")] = "npy",
    method: Annotated[
        str | None,
        typer.Option(
            help='Such as "bi-clustered clusters=64 topk=128". Default: exact, windows in blocks, or as patched.',
            rich_help_panel=HOW,
        ),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Choose the fastest method whose error of the last hidden state on some of the longer documents is "
            "at most this, such as 0.1.",
            rich_help_panel=HOW,
        ),
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="mean, cls or last. Default: as stored with the model.", rich_help_panel=HOW)
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize", help="Vectors of length 1. Default: as stored.", rich_help_panel=HOW
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Put before every document. Default: as stored.", rich_help_panel=HOW)
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=HOW)] = "float32",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. Default: a GPU where there is one.", rich_help_panel=HOW)
    ] = None,
    extend_positions: Annotated[
        bool,
        typer.Option(
            "--extend-positions",
            help="Longer documents than the model takes: repeat its learned positions.",
            rich_help_panel=LENGTH,
        ),
    ] = False,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Divide documents into chunks of so many tokens; the vector is their mean.", rich_help_panel=LENGTH
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Cut documents at so many tokens; a stored max_seq_length cuts none.", rich_help_panel=LENGTH
        ),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens run at once: memory grows with them.", rich_help_panel=LENGTH)
    ] = 16_384,
    text_field: Annotated[
        str | None, typer.Option(help="Of JSON Lines. Default: text.", rich_help_panel=DOCUMENTS)
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option(help="Of JSON Lines. Default: id, else the number of the line.", rich_help_panel=DOCUMENTS),
    ] = None,
) -> None:
    """Turn a folder or a file of documents into vectors, of any length; a stopped run goes on.

    After Ctrl-C, a kill or a crash the same command goes on, to the same vectors bit for bit.

    It says first how long it will take. Empty and binary files are left out, and listed in skipped.jsonl.

    Several processes share the work if torchrun or accelerate starts them: torchrun --nproc-per-node 2 -m hf_effattn
    embed ... Those of several machines need one folder for the output, and the same documents.
    """
    # The arguments have the names of the options, but for this one.
    options = locals() | {"method": None if method is None else method_of(method), "form": format}
    del options["format"]
    from ..embedding.options import EmbedOptions
    from ..embedding.ranks import Rank
    from ..embedding.run import embed as run

    with mistakes_in_words():
        rank = Rank.from_environment()
        try:
            with _shown_progress(rank.leads) as progress:
                path = run(EmbedOptions(**options), progress, rank)
        except KeyboardInterrupt:
            if rank.leads:
                typer.secho("Interrupted; the same command goes on from here.", err=True)
            raise typer.Exit(130) from None
        if path is not None:
            typer.echo(f"written: {path}")


@contextmanager
def _shown_progress(leads: bool) -> "Iterator[Progress]":
    """A bar in a terminal, elsewhere a line every few seconds; of several ranks only rank 0 has a bar."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    from ..embedding.run import Progress

    lines = lines_of_progress()
    console = Console(stderr=True)
    with Bar(console=console, transient=True, disable=lines is not None or not leads) as bar:
        task = bar.add_task("reading", total=None)
        last = time.monotonic()

        def advance(done: int, total: int, what: str) -> None:
            nonlocal last
            bar.update(task, completed=done, total=total, description=what)
            if lines is not None and (done == total or time.monotonic() - last >= SECONDS_BETWEEN_LINES):
                last = time.monotonic()
                lines(done, total, what)

        def say(words: str) -> None:
            if lines is None:
                bar.console.print(words, highlight=False, markup=False)
            else:
                typer.echo(words, err=True)

        yield Progress(say, advance)
