"""The demo on the terminal: its progress, two tables, the paths of the pictures, and the conclusions."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..measuring.candidates import UNPATCHED
from ..measuring.cost import median
from ..reporting import Report
from ..reporting.numbers import count, duration, megabytes, percent, ratio
from .conclusions import conclusions
from .run import RESULT_FILE, DemoOptions, DemoResult, run_demo

TABLE_WIDTH = 80


def show_demo(options: DemoOptions) -> DemoResult:
    """Run the demo and print what it found.

    Args:
        options (`DemoOptions`): what to run on.

    Returns:
        `DemoResult`: the numbers; see `run_demo` for the errors.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(TABLE_WIDTH, console.width))  # a pipe or a log has no width to keep to
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        last = ""

        def advance(what: str, share: float) -> None:
            nonlocal last
            bar.update(task, completed=share, description=escape(what))
            if not console.is_terminal and what != last:
                console.print(escape(what), highlight=False, soft_wrap=True)
            last = what

        result = run_demo(options, advance)
    where = _environment(result)
    console.print(f"[bold]{escape(result.model)}[/bold], {escape(where)}\n")
    if result.short:
        console.print(_short_table(result))
    if result.long is not None:
        console.print(_long_table(result.long))
    console.print("[bold]Pictures and numbers[/bold]")
    for path in (*result.pictures, options.output / RESULT_FILE):
        console.print(f"  {escape(_shown(path))}", soft_wrap=True)
    console.print("\n[bold]What this means[/bold]")
    for paragraph in conclusions(result):
        console.print(Padding("- " + escape(paragraph), (0, 0, 0, 2)), highlight=False)
    return result


def _shown(path: Path) -> str:
    return str(path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path)


def _environment(result: DemoResult) -> str:
    found = result.short[0].report if result.short or result.long is None else result.long
    at = found.environment
    versions = at["versions"]
    return (
        f"{at['parameters'] / 1e6:.0f} M parameters, {at['dtype']} on {at['device']}, "
        f"{count(at['threads'], 'thread')}, torch {versions['torch']}, transformers {versions['transformers']}"
    )


def _table(title: str, caption: str, columns: tuple[str, ...]) -> Table:
    """A table that fits into 80 columns: one space between columns, headings on two lines."""
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("attention")  # wrapped between settings
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _short_table(result: DemoResult) -> Table:
    one = result.short[0]
    table = _table(
        "Sentence embeddings: exact attention against approximate",
        f"{one.passages} passages from {count(one.books, 'book')}. cosine: of the mean-pooled embedding with the "
        "exact model's, mean and lowest. itself first: its own exact embedding is the nearest one. nearest kept: the "
        "nearest other passage stays. finds next: the nearest of all second passages is the one that follows it in "
        "the book. errors: relative L2, of the attention output and of the last hidden state. speed: whole model, "
        "exact = 1.",
        (
            "cosine",
            "lowest",
            "itself\nfirst",
            "nearest\nkept",
            "finds\nnext",
            "attn.\nerror",
            "hidden\nerror",
            "speed",
        ),
    )
    for one in result.short:
        table.add_row(f"[bold]{one.length} tokens[/bold]")
        table.add_row(UNPATCHED, "1", "1", "100%", "100%", percent(one.next_found), "0%", "0%", "1×")
        for label, change in one.changes.items():
            (m,) = one.report.of(label)
            speed = one.report.speedup(m)
            table.add_row(
                label,
                f"{change.cosine_mean:.4f}",
                f"{change.cosine_min:.4f}",
                percent(change.same_first),
                percent(change.nearest_kept),
                percent(change.next_found),
                percent(m.mean_attention_error or 0),
                percent(change.hidden_error),
                "" if speed is None else ratio([speed]),
            )
        table.add_section()
    return table


def _long_table(found: Report) -> Table:
    table = _table(
        "One long text: time, memory and error of a forward pass",
        "speed: of the whole model and of its attention alone, exact SDPA = 1, medians of interleaved rounds. peak "
        "memory: the most bytes held above those at the start. errors: relative L2. cosine: of the mean-pooled "
        "embedding.",
        ("time", "speed", "attn.\nspeed", "peak\nmemory", "attn.\nerror", "hidden\nerror", "cosine"),
    )
    for index, measured in enumerate(found.inputs):
        table.add_row(f"[bold]{measured.length:,} tokens[/bold]")
        for label in (UNPATCHED, *found.methods):
            (m,) = found.of(label, index)
            is_exact = label == UNPATCHED
            speed, alone, seconds = found.speedup(m), found.speedup(m, "attention"), median(m.forward_seconds)
            cosines = m.change.embedding_cosines
            table.add_row(
                label,
                "" if seconds is None else duration(seconds),
                "1×" if is_exact else "" if speed is None else ratio([speed]),
                "1×" if is_exact else "" if alone is None else ratio([alone]),
                "" if m.forward_peak_bytes is None else megabytes(m.forward_peak_bytes),
                percent(m.mean_attention_error or 0),
                percent(m.change.hidden_error or 0),
                "1" if is_exact else "" if cosines is None else f"{min(cosines):.4f}",
            )
        table.add_section()
    return table
