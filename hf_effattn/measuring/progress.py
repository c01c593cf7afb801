"""How far a long measurement is: a bar in a terminal, or what the caller makes of it."""

import contextlib
from collections.abc import Callable, Iterator

Progress = Callable[[int, int, str], None]


@contextlib.contextmanager
def progress_bar(progress: bool | Progress | None, total: int, name: str) -> Iterator[Callable[[str], None]]:
    """A function that counts one step and says what it was.

    Args:
        progress (`bool` or `Callable`, *optional*): whether a bar is shown on stderr; a function gets
            `(done, total, what)` instead. Default: where stderr is a terminal.
        total (`int`): steps.
        name (`str`): of what the bar counts.
    """
    done = 0
    if callable(progress):

        def advance(what: str) -> None:
            nonlocal done
            done += 1
            progress(done, total, what)

        yield advance
        return
    if progress is False:
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    shown = console.is_terminal or console.is_jupyter if progress is None else True
    with Bar(console=console, disable=not shown, transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda what: bar.update(task, advance=1, description=what)
