"""Plots of the benchmarks, drawn from their JSON rows and from nothing else.

python -m scripts.benchmark._plots        # draws the plots of scripts/results anew
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..shared.command_line import run_with_help

RESULTS = Path(__file__).parents[1] / "results"
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
CURVE_COLORS = ("black", *COLORS, "tab:cyan", "tab:gray")
# What README shows: the shape and, of each processor, the dtype in which its exact model is the faster.
SHAPE = "gte-base"
METHODS = ("exact", "bi-clustered, calibrated")
PROCESSORS = {"benchmark_documents": ("bfloat16", "AVX-512"), "benchmark_documents_avx2": ("float32", "AVX2")}
# By theme: text and axes, exact attention, patched.
THEMES = {"light": ("#1f2328", "#6e7781", "#0969da"), "dark": ("#f0f6fc", "#9198a1", "#58a6ff")}

STEPS_TOGETHER = 10


def draw_documents(processors: dict[str, pd.DataFrame], folder: Path) -> None:
    """Seconds of one document against its length, exact and patched: a light and a dark picture.

    Args:
        processors (`dict[str, pd.DataFrame]`): by the words on its lines the rows of one processor and dtype, with
            `method`, `length` and `seconds`.
        folder (`Path`): where `documents_light.png` and `documents_dark.png` go.
    """
    lines = [
        (name, style, patched, rows[(rows["method"] != "exact") == patched].sort_values("length"))
        for style, (name, rows) in zip(("-", "--"), processors.items(), strict=True)
        for patched in (False, True)
    ]
    lengths = sorted(set(pd.concat(processors.values())["length"]))
    for theme, (ink, *colors) in THEMES.items():
        figure = Figure(figsize=(4, 3), layout="constrained")
        panel = figure.subplots()
        for name, style, patched, line in lines:
            points = list(zip(line["length"], line["seconds"], strict=True))
            (length, seconds), color = points[-1], colors[patched]
            panel.plot(line["length"], line["seconds"], style, color=color, marker="o", linewidth=2)
            word, left = ("patched: " if patched else "exact: ", False) if length == lengths[-1] else ("", not patched)
            shift, align = (-6 if left else 7, -9 if patched else 3), "right" if left else "left"
            near: dict[str, Any] = {"textcoords": "offset points"}
            panel.annotate(f"{word}{seconds:.0f} s", points[-1], shift, color=color, ha=align, **near)
            if patched:
                panel.annotate(name, points[0], (0, -16), color=ink, ha="center", **near)
        panel.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.5, lengths[-1] * 5))
        panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
        panel.set_yticks((1, 10, 100), ["1 s", "10 s", "100 s"])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_locator(NullLocator())
        panel.tick_params(colors=ink)
        panel.spines[:].set_color(ink)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel("tokens of one document", color=ink, loc="left")
        figure.savefig(folder / f"documents_{theme}.png", dpi=200, transparent=True)


def draw_other_methods(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Each method's frontier of error against time as a share of SDPA's: a panel per length.

    Rows without a time are references, horizontal lines at their errors.
    """
    lengths = sorted({row["length"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows if row["speedup"]))
    figure = Figure(figsize=(6.5 * len(lengths), 6), layout="constrained")
    for panel, length in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        mine = [row for row in rows if row["length"] == length and row["error"] is not None]
        for number, method in enumerate(methods):
            runs = [row for row in mine if row["method"] == method and row["speedup"]]
            color = CURVE_COLORS[number % len(CURVE_COLORS)]
            panel.scatter([1 / r["speedup"] for r in runs], [r["error"] for r in runs], s=8, alpha=0.3, color=color)
            best = sorted((1 / row["speedup"], row["error"]) for row in runs if row["on_frontier"])
            width = 2.5 if number == 0 else 1.2
            panel.plot(*zip(*best, strict=True) if best else ((), ()), color=color, label=method, linewidth=width)
        for row in mine:
            if row["speedup"] is None:
                panel.axhline(row["error"], color="gray", linestyle=":", linewidth=1)
                text = f"{row['method']}, {row['name']}"
                panel.annotate(text, (0.01, row["error"]), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set(xscale="log", yscale="log", title=f"{length:,} tokens")
        panel.set_xlabel("forward time over SDPA's, clustering included")
        panel.set_ylabel("relative error of the attention output, mean of the layers")
        _plain_numbers(panel)
    figure.axes[0].legend(fontsize=7, loc="lower left")
    figure.suptitle(title, fontsize=9, wrap=True)
    figure.savefig(path, dpi=110)


def draw_steps(rows: list[dict[str, Any]], path: Path) -> None:
    """The loss of every step of trainings on the same batches, thin, and its mean of ten steps, thick.

    Args:
        rows (`list[dict]`): of each training, with `attention` and `losses`.
        path (`Path`): of the picture.
    """
    ink, *colors = THEMES["light"]
    figure = Figure(figsize=(5, 3), layout="constrained")
    panel = figure.subplots()
    for row, color, style in zip(rows, colors, ("-", "--"), strict=True):
        losses = pd.Series(row["losses"], index=range(1, len(row["losses"]) + 1))
        panel.plot(losses, style, color=color, linewidth=0.8, alpha=0.5)
        panel.plot(losses.rolling(STEPS_TOGETHER).mean(), style, color=color, linewidth=2.2, label=row["attention"])
    panel.legend(frameon=False, labelcolor=ink)
    panel.tick_params(colors=ink)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlabel("step", color=ink, loc="left")
    panel.set_ylabel(f"loss; thick: mean of {STEPS_TOGETHER} steps", color=ink)
    figure.savefig(path, dpi=150)


def _plain_numbers(panel: Axes) -> None:
    for axis in (panel.get_xaxis(), panel.get_yaxis()):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    panel.grid(alpha=0.3, which="both")


def main() -> None:
    """Draw every picture that has its JSON in `scripts/results`."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}
    draw_documents(
        {
            words: pd.DataFrame(results[name]["rows"]).query(
                "what == 'seconds' and shape == @SHAPE and dtype == @dtype and method in @METHODS"
            )
            for name, (dtype, words) in PROCESSORS.items()
        },
        RESULTS,
    )
    other = results["benchmark_other_methods"]
    path = RESULTS / "benchmark_other_methods.png"
    draw_other_methods(other["rows"], path, other["environment"]["device_name"])
    steps = [row for row in results["long_embedder"]["rows"] if row["phase"] == "steps"]
    draw_steps(steps, RESULTS / "long_embedder_steps.png")


if __name__ == "__main__":
    run_with_help(main, __doc__)
