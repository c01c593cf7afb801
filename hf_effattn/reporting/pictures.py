"""The pictures of a report. Figures are made without pyplot, so no global state of the user's changes."""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..measuring.candidates import UNPATCHED, candidate_names
from .findings import Findings
from .numbers import duration, megabytes, percent
from .pattern import AttentionPattern, find_pattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 160
# One hue from light to dark: reads the same with any colour vision and in print.
ERROR_COLOURS = "YlOrBr"
ATTENTION_COLOURS = "Blues"
MOST_NUMBERED_CELLS = 12 * 16
TOKENS_BETWEEN_LABELS = 0.014
SMALLEST_NAMED = 0.04
# Okabe and Ito's colours, which differ with any colour vision; markers tell the lines apart too.
LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX<>*"
NARROW = 4
LETTER_WIDTH = 0.076  # inches, of a title's letters
NARROWEST_TITLE = 66  # letters that the title of the whole picture needs


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches; ImportError with what to install where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hf_effattn[plots]'") from error
    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")


def draw_errors(
    report: Findings, *, length: int | None = None, methods: Sequence[str] | None = None, columns: int | None = None
) -> "Figure":
    """Error of the attention output by layer and head, a panel per method; see `Report.plot`."""
    labels = list(report.methods) if methods is None else list(methods)
    grids = {label: grid for label in labels if (grid := _error_grid(report, label, length)) is not None}
    if not grids:
        where = "" if length is None else f" at {length} tokens"
        raise ValueError(f"the report holds no errors of the attention output{where}")
    layers = list(report.layers)
    heads = max(grid.shape[1] for grid in grids.values())
    if columns is None:
        columns = 1 if len(grids) in (1, 3) else 2
    lines = -(-len(grids) // columns)
    titles = {label: f"{label}: mean {percent(float(grid.nanmean()))}" for label, grid in grids.items()}
    title_width = LETTER_WIDTH * max(max(map(len, titles.values())), 0 if columns > 1 else NARROWEST_TITLE)
    width, height = max(3.6, 1.2 + 0.36 * heads, title_width), max(2.2, 0.9 + 0.3 * len(layers))
    figure = new_figure(columns * width + 0.9, lines * height + 0.7)
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
    highest = max(
        (float(grid[grid.isfinite()].max()) for grid in grids.values() if grid.isfinite().any()), default=1.0
    )
    highest = highest or 1.0
    for place, (panel, (label, grid)) in enumerate(zip(panels.flat, grids.items(), strict=False)):
        panel.imshow(grid.numpy(), cmap=ERROR_COLOURS, vmin=0, vmax=highest, aspect="auto")
        panel.set_title(titles[label], fontsize=10)
        panel.set_xticks(range(heads), range(heads), fontsize=8)
        panel.set_yticks(range(len(layers)), layers, fontsize=8)
        panel.tick_params(labelbottom=place + columns >= len(grids), labelleft=place % columns == 0)
        if grid.numel() <= MOST_NUMBERED_CELLS:
            _number_cells(panel, grid, highest)
    for panel in list(panels.flat)[len(grids) :]:
        panel.set_axis_off()
    figure.supxlabel("head", fontsize=10)
    figure.supylabel("layer", fontsize=10)
    bar = figure.colorbar(panels.flat[0].images[0], ax=panels, pad=0.015, fraction=0.04)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    bar.set_label("relative L2 error", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(_errors_title(report, length), fontsize=11)
    return figure


def _error_grid(report: Findings, label: str, length: int | None) -> torch.Tensor | None:
    """Mean error over the inputs, `(layers, heads)`; NaN where a layer has fewer heads than another."""
    measurements = [
        m
        for m in report.of(label)
        if (length is None or report.inputs[m.input].length == length) and len(m.attention_error) == len(report.layers)
    ]
    if not measurements or not report.layers:
        return None
    heads = max(len(errors) for errors in measurements[0].attention_error.values())
    grid = torch.full((len(report.layers), heads), float("nan"), dtype=torch.float64)
    for line, layer in enumerate(report.layers):
        errors = torch.tensor([m.attention_error[layer] for m in measurements], dtype=torch.float64).mean(dim=0)
        grid[line, : len(errors)] = errors
    return grid


def _number_cells(panel: Any, grid: torch.Tensor, highest: float) -> None:
    for line, values in enumerate(grid.tolist()):
        for column, value in enumerate(values):
            if value == value:  # not NaN
                colour = "white" if value > 0.6 * highest else "#333333"
                panel.text(column, line, f"{100 * value:.0f}", ha="center", va="center", fontsize=6.5, color=colour)


def _errors_title(report: Findings, length: int | None) -> str:
    lengths = sorted({batch.length for batch in report.inputs if length in (None, batch.length)})
    span = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    return (
        f"Error of each head's attention output in per cent, {plain(report.environment.get('model'))}, {span} tokens\n"
        "(against exact attention on the same queries, keys and values)"
    )


def draw_cost(report: Findings, *, parts: Sequence[str] = ("time", "memory")) -> "Figure":
    """Time and peak memory of a forward pass against the length, on log axes; see `Report.plot_cost`."""
    kinds = {
        "time": ("time of a forward pass", duration, _points(report, "forward_seconds")),
        "memory": (
            "peak memory added by a forward pass",
            lambda value: megabytes(round(value)),
            _points(report, "forward_peak_bytes"),
        ),
    }
    kinds = {kind: entry for kind, entry in kinds.items() if entry[2] and kind in parts}
    if not kinds:
        raise ValueError(f"the report holds no {' and no '.join(parts)} of the whole model")
    lengths = sorted({batch.length for batch in report.inputs})
    batches = {batch.batch_size for batch in report.inputs}
    sizes = f" (batches of {', '.join(map(str, sorted(batches)))} texts)" if len(batches) > 1 else ""
    labels = [UNPATCHED, *report.methods]
    legend_columns = len(kinds)
    figure = new_figure(5.4 * len(kinds), 3.7 + 0.18 * -(-len(labels) // legend_columns))
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for panel, (title, worded, lines) in zip(panels, kinds.values(), strict=True):
        for place, label in enumerate(labels):
            _draw_line(panel, lines.get(label, {}), label, place)
        _log_axes(panel, lengths, worded, [value for line in lines.values() for value in line.values()])
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(f"tokens per text{sizes}", fontsize=9)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=legend_columns, fontsize=8, frameon=False)
    figure.suptitle(f"{plain(report.environment.get('model'))} with exact attention and with each method", fontsize=11)
    return figure


def _points(report: Findings, name: str) -> dict[str, dict[int, float]]:
    """For each method its mean over the inputs of a length, by length; methods without any are left out."""
    lines: dict[str, dict[int, float]] = {}
    for label in (UNPATCHED, *report.methods):
        by_length: dict[int, list[float]] = {}
        for m in report.of(label):
            value = report.metrics(m)[name]
            if value:
                by_length.setdefault(report.inputs[m.input].length, []).append(value)
        if by_length:
            lines[label] = {length: sum(values) / len(values) for length, values in sorted(by_length.items())}
    return lines


def _draw_line(panel: Any, line: dict[int, float], label: str, place: int) -> None:
    colour = "#222222" if label == UNPATCHED else LINE_COLOURS[(place - 1) % len(LINE_COLOURS)]
    style = "--" if label == UNPATCHED else "-"
    marker = MARKERS[place % len(MARKERS)]
    panel.plot(list(line), list(line.values()), style, color=colour, marker=marker, markersize=5, label=plain(label))


def _log_axes(panel: Any, lengths: list[int], worded: Any, values: list[float]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
    panel.xaxis.set_minor_locator(NullLocator())
    low, high = min(values), max(values)
    if high < NARROW * low:  # so that there are ticks to read it by
        low, high = low / 2, high * 2
        panel.set_ylim(low, high)
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(lambda value, _: worded(value))
    panel.tick_params(axis="y", labelsize=8)
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)


def plain(text: object) -> str:
    """Text for a picture as it is: matplotlib would read what stands between two dollar signs as mathematics."""
    return str(text).replace("$", r"\$")


def plot_attention(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    *,
    methods: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    rows: Sequence[int] | None = None,
    layer: int | None = None,
    head: int | None = None,
    tokens: Sequence[str] | None = None,
) -> "Figure":
    """Draw the attention of chosen tokens, exact and approximated, one panel below the other on one colour scale.

    Redraws the qualitative comparison of Vyas 2020: question tokens on the left axis, their most attended token on the
    right. All panels use the exact model's own queries and keys of one head. The model is afterwards what it was.

    Args:
        model (`PreTrainedModel`): an encoder of a served model type.
        inputs (`BatchEncoding`): one encoded text, or question and context, with `return_tensors="pt"`.
        methods (`Sequence[str | dict]`, *optional*): as for `report`. Default: each method with 25 clusters.
        rows (`Sequence[int]`, *optional*): positions of the tokens to draw. Default: those of the first segment of a
            pair, else the first twelve.
        layer (`int`, *optional*): layer. Default: chosen with the head.
        head (`int`, *optional*): head of the layer. Default: the one with the sharpest content pattern, see
            `head_scores`.
        tokens (`Sequence[str]`, *optional*): labels of all tokens. Default: those that a fast tokenizer keeps.

    Returns:
        `matplotlib.figure.Figure`: free of pyplot.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: more than one text, rows, layer or head that do not exist, no tokens for labels, unknown methods.
    """
    pattern = find_pattern(model, inputs, methods=methods, rows=rows, layer=layer, head=head, tokens=tokens)
    return draw_pattern(pattern, type(model).__name__)


def draw_pattern(pattern: AttentionPattern, model_name: str) -> "Figure":
    """Attention of chosen tokens, a panel per method; see `plot_attention`."""
    rows, columns = len(pattern.rows), len(pattern.tokens)
    panel_height = 0.55 + 0.175 * rows
    figure = new_figure(11, len(pattern.weights) * panel_height + 1.5)
    panels = figure.subplots(len(pattern.weights), 1, squeeze=False, sharex=True)[:, 0]
    colours = _square_root_scale(max(float(weights.max()) for weights in pattern.weights.values()))
    exact = pattern.weights[UNPATCHED]
    for panel, (label, weights) in zip(panels, pattern.weights.items(), strict=True):
        panel.imshow(weights.numpy(), cmap=ATTENTION_COLOURS, norm=colours, aspect="auto", interpolation="none")
        panel.set_title(_pattern_title(pattern, label, weights, exact), fontsize=10, loc="left")
        panel.set_yticks(range(rows), [plain(pattern.tokens[row]) for row in pattern.rows], fontsize=8)
        right = panel.secondary_yaxis("right")
        tops = pattern.most_attended(label)
        right.set_yticks(range(rows), [plain(pattern.tokens[top]) for top in tops], fontsize=8)
        for line, (top, same) in enumerate(zip(tops, pattern.most_attended(UNPATCHED), strict=True)):
            right.get_yticklabels()[line].set_color("#333333" if top == same else "#B34700")
        for axis in (panel.yaxis, right.yaxis):
            axis.set_tick_params(length=2)
        panel.tick_params(axis="x", length=2)
    places = _labelled_columns(exact, columns)
    panels[-1].set_xticks(places, [plain(pattern.tokens[place]) for place in places], rotation=90, fontsize=7)
    panels[-1].set_xlabel(f"token attended to ({columns} in all; the most attended are named)", fontsize=9)
    bar = figure.colorbar(panels[0].images[0], ax=list(panels), pad=0.015, fraction=0.025)
    bar.set_label("attention weight (square-root scale)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    what = "the question's tokens over question and context" if pattern.is_pair else "the chosen tokens"
    how = ", the head with the sharpest content pattern" if pattern.chosen else ""
    figure.suptitle(
        f"Attention of {what}, {plain(model_name)}, layer {pattern.layer}, head {pattern.head}{how}\n"
        "left: the token that attends; right: the token it attends to most ([CLS] and the like aside), "
        "orange where exact attention has another",
        fontsize=10.5,
    )
    return figure


def _square_root_scale(highest: float) -> Any:
    """Square root between 0 and the highest weight: most weights are far below it and would all look alike."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(gamma=0.5, vmin=0, vmax=highest or 1.0)


def _pattern_title(pattern: AttentionPattern, label: str, weights: torch.Tensor, exact: torch.Tensor) -> str:
    if label == UNPATCHED:
        return UNPATCHED
    if label in pattern.exact_labels:
        return f"{label}: exact on so short a text"
    same = sum(map(operator.eq, pattern.most_attended(label), pattern.most_attended(UNPATCHED)))
    moved = float((weights - exact).abs().sum(dim=1).mean()) / 2
    return f"{label}: {same} of {len(exact)} most attended tokens as exact, {percent(moved)} of the weight elsewhere"


def _labelled_columns(weights: torch.Tensor, columns: int) -> list[int]:
    """Columns to name on the axis: by weight, those far enough from each other to be read."""
    spacing = max(1.0, TOKENS_BETWEEN_LABELS * columns)
    highest = weights.amax(dim=0)
    places: list[int] = []
    for column in highest.argsort(descending=True).tolist():
        if highest[column] >= SMALLEST_NAMED * highest.max() and all(
            abs(column - place) >= spacing for place in places
        ):
            places.append(column)
    return sorted(places)


def draw_head_settings(settings: Any) -> "Figure":
    """The candidate of every layer and head of `"per-head"` settings; see `Calibration.plot`."""
    grid = torch.tensor(settings.heads)
    layers, heads = grid.shape
    names = candidate_names(settings)
    figure = new_figure(max(4.2, 1.2 + 0.36 * heads) + 3, max(2.4, 1.1 + 0.3 * layers))
    panel = figure.subplots()
    image = panel.imshow(grid.numpy(), cmap=_steps(len(names)), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto")
    panel.set_xticks(range(heads), [str(head) for head in range(heads)], fontsize=8)
    panel.set_yticks(range(layers), [str(layer) for layer in range(layers)], fontsize=8)
    panel.set_xlabel("key/value head", fontsize=10)
    panel.set_ylabel("layer", fontsize=10)
    errors = (settings.calibration or {}).get("errors")
    if errors is not None and grid.numel() <= MOST_NUMBERED_CELLS:
        for line, column in ((line, column) for line in range(layers) for column in range(heads)):
            if grid[line, column] < len(settings.candidates):
                dark = "white" if int(grid[line, column]) > 0.6 * len(names) else "#333333"
                text = f"{100 * errors[line][column]:.0f}"
                panel.text(column, line, text, ha="center", va="center", fontsize=6.5, color=dark)
    bar = figure.colorbar(image, ax=panel, ticks=range(len(names)), pad=0.015)
    bar.ax.set_yticklabels(names, fontsize=8)
    max_error = (settings.calibration or {}).get("max_error")
    shares = "" if errors is None else "; numbers: largest error on the calibration texts, per cent"
    mean = " of the layers' mean" if (settings.calibration or {}).get("error_of") == "layer" else ""
    budget = "" if max_error is None else f" for an error{mean} of at most {percent(max_error)}"
    figure.suptitle(f"Settings of every head{budget}\n(dark: dear{shares})", fontsize=10)
    return figure


def _steps(count: int) -> Any:
    from matplotlib import colormaps

    return colormaps[ERROR_COLOURS].resampled(count)
