"""Plots of the benchmarks, drawn from their JSON rows and from nothing else.

python -m scripts.benchmark._plots        # draws the plots of scripts/results anew
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..shared.command_line import run_with_help

RESULTS = Path(__file__).parents[1] / "results"
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")
CURVE_COLORS = ("black", *COLORS, "tab:cyan", "tab:gray")


def draw_lengths(rows: list[dict[str, Any]], output: Path, title: str) -> list[Path]:
    """Time, memory and speed-up against length, and error against speed-up: one PNG per dtype and batch size.

    The first shape's picture is named like `output`, the others have their shape in the name.
    """
    paths: list[Path] = []
    for dtype, batch in dict.fromkeys((row["dtype"], row["batch"]) for row in rows):
        mine = [row for row in rows if (row["dtype"], row["batch"]) == (dtype, batch)]
        suffix = "" if not paths else f"_{dtype}_batch{batch}"
        paths.append(output.with_name(f"{output.stem}{suffix}.png"))
        _draw_shape(mine, f"B={batch}, {dtype}, {title}, clustering included; random inputs, no head exact").savefig(
            paths[-1], dpi=110
        )
    return paths


def _draw_shape(rows: list[dict[str, Any]], title: str) -> Figure:
    figure = Figure(figsize=(15, 9), layout="constrained")
    panels = figure.subplots(2, 3)
    kernels = list(dict.fromkeys(row["method"] for row in rows if row["exact"]))
    methods = list(dict.fromkeys(row["method"] for row in rows if not row["exact"]))
    styles: dict[str, dict[str, Any]] = {
        name: {"color": "black", "linestyle": ("--", ":", "-.", (0, (1, 3)))[number % 4], "linewidth": 1}
        for number, name in enumerate(kernels)
    }
    styles |= {name: {"color": COLORS[number % 8], "marker": "o"} for number, name in enumerate(methods)}
    for panel, column, label, unit in (
        (panels[0, 0], "forward_ms", "forward, ms", 1),
        (panels[0, 1], "forward_backward_ms", "forward + backward, ms", 1),
        (panels[0, 2], "forward_backward_peak_bytes", "peak memory added, forward + backward, MiB", 2**20),
        (panels[1, 0], "forward_speedup", "forward: times faster than the fastest exact", 1),
        (panels[1, 1], "forward_backward_speedup", "forward + backward: times faster", 1),
    ):
        for name, style in styles.items():
            seen = [(row["length"], row[column] / unit) for row in rows if row["method"] == name and row.get(column)]
            panel.plot(*zip(*seen, strict=True) if seen else ((), ()), label=name, markersize=4, **style)
        _log_axes(panel, label, sorted({row["length"] for row in rows}))
    panels[1, 2].axis("off")
    panels[1, 2].legend(*panels[0, 0].get_legend_handles_labels(), loc="center")
    figure.suptitle(title)
    return figure


def _log_axes(panel: Axes, label: str, lengths: list[int]) -> None:
    panel.set(xscale="log", yscale="log", xlabel="tokens", title=label)
    panel.set_xticks(lengths, minor=False)
    panel.get_xaxis().set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.get_yaxis().set_major_formatter(lambda value, _: f"{value:g}")
    panel.tick_params(axis="x", rotation=45, which="major")
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.3)


def draw_frontier(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Error against time of every setting, with each method's frontier as a line: a panel per length.

    Rows without an error are left out; nothing is drawn where there is no other.
    """
    rows = [row for row in rows if row["error"] is not None]
    if not rows:
        return
    lengths = sorted({row["length"] for row in rows})
    figure = Figure(figsize=(6.5 * len(lengths), 5), layout="constrained")
    for panel, length in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
            mine = [row for row in rows if row["method"] == method and row["length"] == length]
            panel.scatter([r["ms"] for r in mine], [r["error"] for r in mine], s=12, alpha=0.5, color=COLORS[number])
            best = sorted((row["ms"], row["error"]) for row in mine if row["on_frontier"])
            panel.plot(*zip(*best, strict=True), color=COLORS[number], label=method, drawstyle="steps-post")
        panel.set(xscale="log", yscale="log", xlabel="forward, ms, clustering included", title=f"{length:,} tokens")
        panel.set_ylabel("relative error of the attention output")
        _plain_numbers(panel)
        panel.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


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
            found = [row for row in mine if row["method"] == method and row["speedup"]]
            color = CURVE_COLORS[number % len(CURVE_COLORS)]
            panel.scatter([1 / r["speedup"] for r in found], [r["error"] for r in found], s=8, alpha=0.3, color=color)
            best = sorted((1 / row["speedup"], row["error"]) for row in found if row["on_frontier"])
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


def _plain_numbers(panel: Axes) -> None:
    for axis in (panel.get_xaxis(), panel.get_yaxis()):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    panel.grid(alpha=0.3, which="both")


def main() -> None:
    """Draw every picture that has its JSON in `scripts/results`."""
    for path in sorted(RESULTS.glob("benchmark_attention*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        settings, machine = result["settings"], result["environment"]["device_name"]
        draw_lengths(result["rows"], path, f"H={settings['heads']}, D={settings['head_dim']}, {machine}")
    for name, draw in (("frontier", draw_frontier), ("other_methods", draw_other_methods)):
        for path in sorted(RESULTS.glob(f"benchmark_{name}*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            draw(result["rows"], path.with_suffix(".png"), result["environment"]["device_name"])


if __name__ == "__main__":
    run_with_help(main, __doc__)
