"""A report: its numbers, and how to print, plot and save them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..measuring.candidates import make_candidates
from . import words
from .findings import Findings
from .html import render_fragment, render_page
from .illustrations import drawn_lengths, illustrate, illustrate_text
from .pattern import one_of_each
from .pictures import draw_cost, draw_errors, draw_head_settings, plot_attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_NAME = "report.json"
MOST_HEAT_MAPS = 8


class Report(Findings):
    """The findings of `hf_effattn.report` in words, pictures and files; `print(report)` says them in words."""

    def save(self, folder: str | Path, *, pictures: bool = True) -> list[Path]:
        """Write `report.json` and the heat maps as PNG, of calibrated settings also who runs which candidate.

        Args:
            folder (`str` or `Path`): made if missing.
            pictures (`bool`): False writes the JSON alone and needs no matplotlib.

        Returns:
            `list[Path]`: the files.

        Raises:
            ImportError: pictures without matplotlib; the JSON is written before.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / FILE_NAME]
        files[0].write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        for length in drawn_lengths(self, MOST_HEAT_MAPS) if pictures else ():
            files.append(folder / f"attention_error{'' if length is None else f'_{length}'}.png")
            self.plot(length=length).savefig(files[-1])
        for place, settings in enumerate(settings for settings in self.methods.values() if "candidates" in settings):
            if pictures:
                files.append(folder / f"head_settings{'' if place == 0 else f'_{place + 1}'}.png")
                draw_head_settings(make_candidates(settings)[0].settings).savefig(files[-1])
        return files

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The report that `save` wrote to a folder."""
        return cls.from_dict(json.loads((Path(folder) / FILE_NAME).read_text(encoding="utf-8")))

    def plot(self, *, length: int | None = None, methods: Sequence[str] | None = None) -> "Figure":
        """Heat map of the error of the attention output by layer and head, one panel per method, one colour scale.

        Args:
            length (`int`, *optional*): only inputs of this many tokens. Default: mean over all inputs.
            methods (`Sequence[str]`, *optional*): labels to show. Default: all.

        Returns:
            `matplotlib.figure.Figure`: free of pyplot; `figure.savefig("error.png")`.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: nothing measured at that length.
            KeyError: a label that the report does not have.
        """
        return draw_errors(self, length=length, methods=methods)

    def plot_cost(self) -> "Figure":
        """Time and peak memory of a forward pass against the number of tokens, a line per method, exact among them.

        Returns:
            `matplotlib.figure.Figure`: free of pyplot; points instead of lines where one length was measured.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: neither times nor memory were measured.
        """
        return draw_cost(self)

    def plot_attention(self, model: Any, inputs: Any, **options: Any) -> "Figure":
        """Attention pattern of chosen tokens: exact above each method, clustered last.

        Args:
            model (`PreTrainedModel`): the model of this report.
            inputs (`BatchEncoding`): one encoded text, or question and context.
            options: of `hf_effattn.reporting.plot_attention`, such as `rows`, `layer`, `head`, `methods`.

        Returns:
            `matplotlib.figure.Figure`: free of pyplot.
        """
        if "methods" not in options:
            options["methods"] = one_of_each(self.methods) or list(self.methods.values())
        return plot_attention(model, inputs, **options)

    def to_html(
        self,
        model: Any = None,
        inputs: Any = None,
        tokenizer: Any = None,
        *,
        layer: int | None = None,
        head: int | None = None,
    ) -> str:
        """One page with the words, the numbers and the pictures, in a single file that loads nothing from elsewhere.

        With a model and inputs it also shows where the model looks in the first text (up to 256 tokens of it), exactly
        and by the methods. The model is afterwards what it was.

        Args:
            model (`PreTrainedModel`, *optional*): the model of this report. Default: without those pictures.
            inputs (`Mapping` or `Sequence[Mapping]`, *optional*): as `report` takes them; goes with `model`.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): for the tokens. Default: those that a fast tokenizer
                keeps in the inputs.
            layer (`int`, *optional*): layer to show. Default: chosen with the head.
            head (`int`, *optional*): head to show. Default: the one with the sharpest content pattern.

        Returns:
            `str`: the page; `Path("report.html").write_text(page, encoding="utf-8")`.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: a model without inputs or inputs without a model, a model that is not the report's, inputs that
                it cannot take, a layer or head that does not exist.
            TypeError: inputs that are not tensors.
        """
        text = illustrate_text(self, model, inputs, tokenizer, layer=layer, head=head)
        return render_page(self, [*illustrate(self), text])

    def _repr_html_(self) -> str:
        """What a notebook shows: the words and the table."""
        return render_fragment(self)

    def summary(self) -> str:
        """What was found, in plain words."""
        return words.summary(self)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        state = "" if self.complete else ", interrupted"
        return (
            f"Report({self.environment.get('model')}, {len(self.methods)} methods, {len(self.inputs)} inputs{state})"
        )
