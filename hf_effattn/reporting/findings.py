"""The numbers of a report, without words and pictures: inputs, measurements, speed-ups, tables, JSON."""

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ..measuring.candidates import UNPATCHED
from ..measuring.cost import median, median_ratio
from ..measuring.errors import OutputChange
from ..measuring.json_numbers import finite_or_none, none_to_nan

if TYPE_CHECKING:
    import pandas

FORMAT_VERSION = 2
ERROR_OF = "hidden state"  # what `max_error` bounds
COLUMNS = ("input", "batch_size", "length", "valid_tokens", "method", "why_exact", "layer", "head", "metric", "value")


@dataclass
class MeasuredInput:
    """One batch. `length` counts its longest text; `valid_tokens` those that are not padding.

    Args:
        batch_size (`int`): texts.
        length (`int`): tokens per row, padding included; of several encoders those of the one with the most.
        valid_tokens (`int`): tokens that count, over the batch.
        shapes (`dict[str, list[int]]`): of the tensors that the model got.
        encoder_lengths (`dict[str, int]`): tokens per row of each encoder; empty where the model has one.
    """

    batch_size: int
    length: int
    valid_tokens: int
    shapes: dict[str, list[int]]
    encoder_lengths: dict[str, int] = field(default_factory=dict)


@dataclass
class Measurement:
    """One method, or exact attention, on one input; what was not measured is None or empty.

    Args:
        input (`int`): index of the input.
        method (`str`): label of the candidate, or `"unpatched"`.
        why_exact (`str`, *optional*): `"settings"` where there is nothing to approximate in any layer, else
            `"min_length"` where patching would run exact attention, of several encoders in one of them at least.
        attention_error (`dict[int, list[float]]`): per layer, one relative L2 error per head; 0 in the layers that the
            method is not for.
        change (`OutputChange`): of the model's output.
        attention_seconds (`list[float]`): of one layer's attention, one per round and layer.
        forward_seconds (`list[float]`): of the whole model, one per round.
        attention_peak_bytes (`int`, *optional*): memory that one layer's attention added at its peak.
        forward_peak_bytes (`int`, *optional*): memory that the whole model added at its peak.
        exact_heads (`dict[int, list[int]]`): per layer, the heads that attended exactly though the method ran, because
            it predicted a large error; layers without one are left out.
    """

    input: int
    method: str
    why_exact: str | None = None
    attention_error: dict[int, list[float]] = field(default_factory=dict)
    change: OutputChange = field(default_factory=OutputChange)
    attention_seconds: list[float] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    attention_peak_bytes: int | None = None
    forward_peak_bytes: int | None = None
    exact_heads: dict[int, list[int]] = field(default_factory=dict)

    @property
    def mean_attention_error(self) -> float | None:
        """Mean over layers and heads."""
        values = [value for heads in self.attention_error.values() for value in heads]
        return sum(values) / len(values) if values else None


@dataclass(repr=False)
class Findings:
    """The measurements of all methods on all inputs; `Report` adds words, pictures and files.

    Args:
        environment (`dict`): model, device, dtype, threads, versions, time, how memory was measured.
        layers (`dict[int, str]`): the layers compared, with the path of their attention module.
        methods (`dict[str, dict]`): label of each candidate and its settings, `"layers"` among them where not all are
            patched.
        inputs (`list[MeasuredInput]`): the batches.
        measurements (`list[Measurement]`): one per input and method, `"unpatched"` among them.
        max_error (`float`, *optional*): allowed relative L2 change of the last hidden state.
        complete (`bool`): False where the measurement was interrupted.
    """

    environment: dict[str, Any]
    layers: dict[int, str]
    methods: dict[str, dict[str, Any]]
    inputs: list[MeasuredInput] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    max_error: float | None = None
    complete: bool = True

    def of(self, method: str, index: int | None = None) -> list[Measurement]:
        """The measurements of one method.

        Args:
            method (`str`): a label from `methods`, or `"unpatched"`.
            index (`int`, *optional*): of the input. Default: all.

        Raises:
            KeyError: a label that the report does not have.
        """
        if method != UNPATCHED and method not in self.methods:
            raise KeyError(f"{method!r} is not in this report; it has {', '.join(map(repr, self.methods))}")
        return [m for m in self.measurements if m.method == method and index in (None, m.input)]

    def speedup(self, measurement: Measurement, part: str = "forward") -> float | None:
        """Exact attention's time divided by the method's: above 1 the method is faster. None where not measured.

        Args:
            measurement (`Measurement`): one of this report's.
            part (`str`): `"forward"`, the whole model, or `"attention"`, one layer's attention.
        """
        exact = self.of(UNPATCHED, measurement.input)
        name = f"{part}_seconds"
        return median_ratio(getattr(exact[0], name), getattr(measurement, name)) if exact else None

    def memory_ratio(self, measurement: Measurement) -> float | None:
        """The method's peak memory of the whole model over exact attention's: below 1 it takes less; None: unknown.

        Args:
            measurement (`Measurement`): one of this report's.
        """
        for exact in self.of(UNPATCHED, measurement.input):
            if exact.forward_peak_bytes and measurement.forward_peak_bytes is not None:
                return measurement.forward_peak_bytes / exact.forward_peak_bytes
        return None

    def fastest_within(self, max_error: float) -> str | None:
        """The fastest method whose change of the last hidden state stays within a budget on every input.

        Args:
            max_error (`float`): allowed relative L2 error.

        Returns:
            `str`, *optional*: its label; None where no method meets the budget and was timed on every input. Speed is
            the geometric mean of the speed-ups of the whole model. Settings that leave every input exact don't count.
        """
        best: tuple[float, str] | None = None
        for label in self.methods:
            measured = self.of(label)
            errors = [m.change.hidden_error for m in measured]
            speedups = [self.speedup(m) for m in measured]
            if len(measured) < len(self.inputs) or not measured or all(m.why_exact == "settings" for m in measured):
                continue
            if any(error is None or not error <= max_error for error in errors):  # NaN keeps to no budget
                continue
            if any(speedup is None for speedup in speedups):
                continue
            mean = math.exp(sum(math.log(speedup) for speedup in speedups if speedup) / len(speedups))
            if best is None or mean > best[0]:
                best = (mean, label)
        return None if best is None else best[1]

    def rows(self) -> list[dict[str, Any]]:
        """The table as a list of dicts, one number each, with the columns of `to_pandas`."""
        rows = []
        for m in self.measurements:
            measured = self.inputs[m.input]
            keys = {
                "input": m.input,
                "batch_size": measured.batch_size,
                "length": measured.length,
                "valid_tokens": measured.valid_tokens,
                "method": m.method,
                "why_exact": m.why_exact,
            }
            for layer, heads in m.attention_error.items():
                for head, value in enumerate(heads):
                    rows.append({**keys, "layer": layer, "head": head, "metric": "attention_error", "value": value})
            for layer, which in m.exact_heads.items():
                rows += [
                    {**keys, "layer": layer, "head": head, "metric": "exact_head", "value": 1.0} for head in which
                ]
            for metric, number in self.metrics(m).items():
                if number is not None:
                    rows.append({**keys, "layer": None, "head": None, "metric": metric, "value": float(number)})
        return rows

    def metrics(self, m: Measurement) -> dict[str, float | None]:
        """The numbers of a measurement that are of the whole model, by the names in `rows`; None: not measured."""
        cosines = m.change.embedding_cosines
        return {
            "hidden_error": m.change.hidden_error,
            "embedding_cosine_mean": sum(cosines) / len(cosines) if cosines else None,
            "embedding_cosine_min": min(cosines) if cosines else None,
            **{f"{name}_error": value for name, value in m.change.logits_error.items()},
            **{f"{name}_argmax_agreement": value for name, value in m.change.argmax_agreement.items()},
            "attention_seconds": median(m.attention_seconds),
            "attention_speedup": self.speedup(m, "attention"),
            "forward_seconds": median(m.forward_seconds),
            "forward_speedup": self.speedup(m),
            "attention_peak_bytes": m.attention_peak_bytes,
            "forward_peak_bytes": m.forward_peak_bytes,
            "forward_memory_ratio": self.memory_ratio(m),
        }

    def to_pandas(self) -> "pandas.DataFrame":
        """The table in tidy form, one number per row; `layer` and `head` are empty where it is of the whole model."""
        import pandas

        table = pandas.DataFrame(self.rows(), columns=list(COLUMNS))
        return table.astype({"layer": "Int64", "head": "Int64", "value": "float64"})

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, every single time included; what is not finite is None."""
        return {"format": FORMAT_VERSION, "error_of": ERROR_OF, **finite_or_none(asdict(self))}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The findings that `to_dict` wrote, also after a trip through JSON.

        Raises:
            ValueError: written by another version, or no report.
        """
        version = values.get("format") if isinstance(values, dict) else None
        if not isinstance(version, int):
            raise ValueError(
                "this is no report of hf_effattn: it names no format. Give a file written by Report.save or "
                "effattn report --output"
            )
        if version != FORMAT_VERSION:
            raise ValueError(
                f"the report has format {version}, and this hf_effattn reads {FORMAT_VERSION}: "
                f"{'update hf_effattn' if version > FORMAT_VERSION else 'measure it anew'}"
            )
        values = {name: value for name, value in values.items() if name not in ("format", "error_of")}
        try:
            values["layers"] = {int(layer): path for layer, path in values["layers"].items()}
            values["inputs"] = [MeasuredInput(**measured) for measured in values["inputs"]]
            values["measurements"] = [_measurement(m) for m in values["measurements"]]
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the report is damaged ({type(error).__name__}: {error}): measure it anew") from error


def _measurement(values: dict[str, Any]) -> Measurement:
    errors = {int(layer): none_to_nan(heads) for layer, heads in values["attention_error"].items()}
    exact = {int(layer): heads for layer, heads in values.get("exact_heads", {}).items()}
    change = _change(**values["change"])
    return Measurement(**values | {"attention_error": errors, "exact_heads": exact, "change": change})


def _change(
    hidden_error: float | None,
    embedding_cosines: list[float | None] | None,
    logits_error: dict[str, float | None],
    argmax_agreement: dict[str, float],
) -> OutputChange:
    """Measured numbers that were not finite are NaN again; with the hidden state its embeddings are measured."""
    if hidden_error is None and embedding_cosines is not None:
        hidden_error = math.nan
    cosines = None if embedding_cosines is None else none_to_nan(embedding_cosines)
    logits = dict(zip(logits_error, none_to_nan(logits_error.values()), strict=True))
    return OutputChange(hidden_error, cosines, logits, argmax_agreement)
