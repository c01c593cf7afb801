"""The demo's picture: time by length, and what a search finds with both vectors of the text."""

from typing import TYPE_CHECKING, Any

from ..reporting.numbers import duration, percent, ratio
from ..reporting.pictures import new_figure
from .run import EXACT, NEAREST, PATCHED, DemoResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {EXACT: "#555555", PATCHED: "#0072B2"}
CHANGED = "#D55E00"  # Okabe and Ito's, as the blue: they differ with any colour vision


def draw_demo(result: DemoResult) -> "Figure":
    """Draw what the demo measured.

    Args:
        result (`DemoResult`): the numbers.

    Returns:
        `matplotlib.figure.Figure`: free of pyplot.
    """
    figure = new_figure(12, 5)
    times, search = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_times(times, result)
    _draw_search(search, result)
    figure.suptitle(
        f"Reading {result.length:,} tokens: {ratio([result.speedup()])} as fast. Tokens moved by "
        f"{percent(result.hidden_error)}, their mean hardly (cosine {result.cosine():.4f})",
        fontsize=14,
        fontweight="bold",
    )
    return figure


def _draw_times(panel: Any, result: DemoResult) -> None:
    lengths = list(result.seconds[EXACT])
    lines = {attention: list(result.seconds[attention].values()) for attention in COLOURS}
    panel.fill_between(lengths, *lines.values(), color=COLOURS[PATCHED], alpha=0.08, linewidth=0)
    for attention, seconds in lines.items():
        panel.plot(lengths, seconds, marker="o", linewidth=2.5, color=COLOURS[attention])
        panel.annotate(
            f"{attention}\n{duration(seconds[-1])}",
            (lengths[-1], seconds[-1]),
            (10, 0),
            textcoords="offset points",
            color=COLOURS[attention],
            fontsize=13,
            fontweight="bold",
            va="center",
        )
    panel.set_xlim(0, 1.28 * lengths[-1])
    panel.set_ylim(0, 1.1 * max(map(max, lines.values())))
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    panel.set_xlabel("tokens")
    panel.set_ylabel("seconds of a forward pass, whole model")
    panel.grid(axis="y", color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title("The longer the text, the larger the gain", loc="left")


def _draw_search(panel: Any, result: DemoResult) -> None:
    """The nearest passages with both vectors, a line from each to itself."""
    sides = [list(result.nearest(attention)) for attention in COLOURS]
    for side, (attention, names, others) in enumerate(zip(COLOURS, sides, sides[::-1], strict=True)):
        aligned = "left" if side else "right"
        panel.text(side, -0.8, attention, ha=aligned, color=COLOURS[attention], fontsize=13, fontweight="bold")
        for place, name in enumerate(names):
            colour = "#222222" if name in others else CHANGED
            label = f" {place + 1}  {name}" if side else f"{name}  {place + 1} "
            panel.text(side, place, label, ha=aligned, va="center", color=colour, fontsize=11)
            panel.plot(side, place, "o", color=colour)
    for place, name in enumerate(sides[0]):
        if name in sides[1]:
            panel.plot((0, 1), (place, sides[1].index(name)), color=COLOURS[PATCHED], linewidth=2, zorder=0)
    panel.set_xlim(-1.6, 2.6)
    panel.set_ylim(NEAREST - 0.3, -1.2)
    panel.axis("off")
    panel.set_title(f"Searching {len(result.passages)} passages with the text: {result.stayed()}", loc="left")
