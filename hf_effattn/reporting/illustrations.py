"""The pictures of a report's page, each with the words that stand for it where it cannot be seen or drawn."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..measuring.recording import Measured
from ..patching.sentence_transformers import is_sentence_transformer, model_and_inputs
from .drawn_text import DrawnText, NothingToDraw, text_to_draw
from .findings import Findings
from .pattern import find_pattern, one_of_each
from .pictures import draw_cost, draw_errors, draw_pattern
from .words import MOST_LENGTHS_APART

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 96


@dataclass(frozen=True)
class Picture:
    """One picture of a page.

    Args:
        source (`str`): the picture itself, as a `data:` address.
        alt (`str`): alternative text.
        width (`int`): in CSS pixels, at which its letters have the size of the page's.
    """

    source: str
    alt: str
    width: int


@dataclass
class Section:
    """A heading with pictures below it, or with what is missing.

    Args:
        title (`str`): the heading.
        text (`str`): how to read the pictures; of a section without any, why there are none.
        pictures (`list[Picture]`): in their order.
    """

    title: str
    text: str
    pictures: list[Picture] = field(default_factory=list)


def illustrate(report: Findings) -> list[Section]:
    """The pictures that need the report alone: cost against length, and the errors of layers and heads.

    Raises:
        ImportError: matplotlib is missing.
    """
    metrics = [report.metrics(m) for m in report.measurements]
    methods = ", ".join(report.methods)
    cost = Section("Time and memory", "Neither times nor memory of the whole model were measured.")
    for part, name, words in (("time", "forward_seconds", "Time"), ("memory", "forward_peak_bytes", "Peak memory")):
        if any(row[name] for row in metrics):
            alt = f"{words} of a forward pass against the length, exact attention and {methods}."
            cost.pictures.append(_picture(draw_cost(report, parts=[part]), alt))
            cost.text = "Both axes are logarithmic; the dashed line is exact attention."
    errors = Section("Error by layer and head", "The errors of the attention output were not measured in all layers.")
    if not report.layers:
        errors.text = "All layers run exactly."
    for length in drawn_lengths(report, MOST_LENGTHS_APART):
        where = "mean over all inputs" if length is None else f"{length:,} tokens"
        alt = f"Heat maps, {where}: error of the attention output, layers down, heads across, {methods}."
        errors.pictures.append(_picture(draw_errors(report, length=length, columns=1), alt))
        errors.text = "The darker, the further a head's output is from exact attention; one colour scale per picture."
    return [cost, errors]


def drawn_lengths(report: Findings, most: int) -> Sequence[int | None]:
    """The lengths at which some method was measured in all layers; one None for all together where they are more."""
    done = [m for m in report.measurements if m.attention_error and len(m.attention_error) == len(report.layers)]
    lengths = sorted({report.inputs[m.input].length for m in done})
    return [None] if len(lengths) > most else lengths


def illustrate_text(
    report: Findings,
    model: Any,
    inputs: Any,
    tokenizer: Any = None,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Section:
    """The pictures that need the model and a text; see `Report.to_html` for arguments and errors."""
    title = "Where the model looks"
    if model is None and inputs is None:
        return Section(title, "Not on this page: it was made without the model and a text.")
    if model is None or inputs is None:
        given, missing = ("inputs", "model") if model is None else ("model", "inputs")
        raise ValueError(f"pictures of a text need the model and its inputs; got {given} without {missing}")
    tokenizer = tokenizer or (model.tokenizer if is_sentence_transformer(model) else None)
    model, inputs = model_and_inputs(model, inputs)
    layers = Measured.of(model).layers
    if type(model).__name__ != report.environment.get("model") or layers != report.layers:
        raise ValueError(
            f"the report is of a {report.environment.get('model')} with {len(report.layers)} attention layers, but "
            f"model is another: a {type(model).__name__} with {len(layers)}"
        )
    try:
        text = text_to_draw(model, inputs, tokenizer)
    except NothingToDraw as reason:
        return Section(title, f"Not on this page: {reason}.")
    section = Section(title, "Not on this page: the weights of none of these methods can be shown.")
    methods = one_of_each(report.methods)
    if methods:
        pattern = find_pattern(
            model,
            text.inputs,
            methods=methods,
            rows=text.rows,
            layer=layer,
            head=head,
            tokens=text.tokens,
            special=text.special,
        )
        layer, head = pattern.layer, pattern.head
        section.text = (
            f"{_shown(text)} Weights of head {head} in layer {layer}, exactly and as the methods approximate them; of "
            "every method the settings with the fewest clusters."
        )
        alt = f"Attention of the first words to the text, exact and approximated, in layer {layer}, head {head}."
        section.pictures.append(_picture(draw_pattern(pattern, type(model).__name__), alt))
    return section


def _shown(text: DrawnText) -> str:
    shown = len(text.tokens)
    if shown < text.whole_length:
        return f"The first {shown} of the {text.whole_length:,} tokens of the first text, which the model read alone."
    return f"The first text, {shown} tokens."


def _picture(figure: "Figure", alt: str) -> Picture:
    """A figure as SVG: sharp at every size. As an image, so that the names inside are no concern of the page's."""
    import matplotlib

    drawn = io.BytesIO()
    # Without date and with a fixed salt the same report gives the same page.
    with matplotlib.rc_context({"svg.hashsalt": "hf_effattn"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    source = "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode("ascii")
    return Picture(source, alt, round(PIXELS_PER_INCH * figure.get_figwidth()))
