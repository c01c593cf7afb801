"""`calibrate`: the cheapest settings of every head that keep its error within a budget, measured on a user's texts."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..atomic_files import write_atomically
from ..measuring.candidate_errors import CandidateErrors, default_candidates
from ..measuring.candidates import candidate_names
from ..measuring.choosing import (
    ERROR_OF,
    OfHeads,
    OfLayers,
    Rule,
    budget_for,
    errors_of,
    held_out_coverage,
    least_margin,
    mean_of_layers,
    served_layers,
    speed_of,
)
from ..measuring.environment import environment
from ..measuring.errors import run_model
from ..measuring.inputs import check_inputs
from ..measuring.progress import Progress, progress_bar
from ..measuring.recording import Measured, recording
from ..patching.methods import Method, make_method
from ..patching.methods.crossover import why_never
from ..patching.methods.per_head import CausalPerHead, PerHead, described
from ..patching.model_types.stacks import Stack, model_type_of
from ..patching.planning import not_a_model
from ..patching.sentence_transformers import model_and_inputs
from ..patching.snapshot import as_it_was
from ..patching.stored import SETTINGS_FILE, base_model_of, read_settings, write_stored
from .numbers import count, percent
from .pictures import draw_head_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COVERAGE = 0.99
# What the coverage counts, by what `max_error` bounds.
COUNTED: dict[str, str] = {"head": "heads", "layer": "texts"}


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: `patch_attention(model, settings=calibration)`, `print(calibration)`.

    Args:
        settings (`PerHead`): the candidates, the table of heads, and in `calibration` how they were found. The keys:
            `max_error`, `error_of` (what it bounds), `lengths`, `texts`, `margin`, `held_out` (the part of the heads,
            or of the texts, that is within the error on texts left out), `errors` (the largest on these texts, by
            layer and head), with `error_of="layer"` `layers_error` (the largest mean of the layers on these texts),
            `speed` (against exact attention) and `training` (whether the speed is that of both passes).
        base_model (`str`, *optional*): the id on the Hub of the model.
    """

    settings: PerHead
    base_model: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `config.effattn` of a patched model holds."""
        return write_stored(self.settings, None, self.base_model)

    def save(self, path: str | Path) -> Path:
        """Write a small JSON file, which serves every fine-tune of the model; an older file stays until it is whole.

        Args:
            path (`str` or `Path`): the file; or a folder, for its `effattn.json`.
        """
        path = Path(path)
        if path.suffix != ".json":
            path.mkdir(parents=True, exist_ok=True)
            path = path / SETTINGS_FILE
        write_atomically(path, lambda file: file.write(json.dumps(self.to_dict(), indent=None).encode() + b"\n"))
        return path

    @classmethod
    def load(cls, settings: Any) -> "Calibration":
        """A calibration from where it was kept: a file, a folder, a repository on the Hub, a dict.

        Raises:
            ValueError: other settings than those of `calibrate`, or written by a newer version.
            OSError: nothing to be read there.
        """
        method, _, fields = read_settings(settings)
        per_head = make_method(method, **fields)
        if not isinstance(per_head, PerHead) or per_head.calibration is None:
            raise ValueError(f'{settings} holds settings of "{per_head.method}", which calibrate did not find')
        return cls(per_head)

    @property
    def max_error(self) -> float:
        """The error allowed."""
        return float((self.settings.calibration or {})["max_error"])

    def plot(self) -> "Figure":
        """The candidate of every layer and head, as a heat map; ImportError where matplotlib is missing."""
        return draw_head_settings(self.settings)

    def __str__(self) -> str:
        made = self.settings.calibration or {}
        lengths = ", ".join(f"{length:,}" for length in made["lengths"])
        about: dict[str, Any] = made.get("model", {})
        unused = {*about.get("windowed_layers", ()), *about.get("layers_without_attention", ())}
        heads = [index for layer, row in enumerate(self.settings.heads) if layer not in unused for index in row]
        names = candidate_names(self.settings)
        of = "of the heads on texts" if made["error_of"] == "head" else "of the texts, their layers' mean,"
        lines = [
            f"Within an error of {percent(made['max_error'])}: {percent(made['held_out'])} {of} left out "
            f"({count(made['texts'], 'text')} of {lengths} tokens, margin {made['margin']:.2f}); attention "
            f"{made['speed']:.2g} times as fast as exact{', both passes' if made.get('training') else ''}.",
            *(f"  {heads.count(index):>4} heads: {name}" for index, name in enumerate(names)),
        ]
        if shortest := self.settings.shortest_length(made["environment"]["device"]):
            lines.append(f"Texts of fewer than {shortest:,} tokens run exact attention.")
        return "\n".join(lines)


def calibrate(
    model: PreTrainedModel,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    max_error: float | None = None,
    *,
    error_of: str = "head",
    speed: float | None = None,
    training: bool = False,
    candidates: Sequence[Mapping[str, Any]] | None = None,
    coverage: float = COVERAGE,
    min_length: int | None = None,
    part: nn.Module | None = None,
    progress: bool | Progress | None = None,
) -> Calibration:
    """Find for each head the cheapest settings that keep the error of the attention output within a bound.

    Every candidate runs on the exact model's own queries, keys and values, and the error of every head is measured on
    each text. With `error_of="head"` a head gets the first candidate whose mean error, times a margin, is within
    `max_error`; a head without one stays exact. With `error_of="layer"` the heads get the candidates that take the
    least time, as measured here, while the mean error of the layers' outputs is within `max_error`. This is faster at
    the same error, but single heads that are a small part of their layer may exceed it. The margin is the smallest
    with which that part of the heads, or of the texts (`coverage`), is within `max_error` on each text left out, when
    the candidates are chosen on the others. Query heads that share keys share the candidate. Errors grow with the
    length: give texts as long as yours. The model is afterwards what it was.

    Args:
        model (`PreTrainedModel`): an encoder or decoder of a served model type, with or without a head; or a model of
            sentence-transformers.
        inputs (`Mapping` or `Sequence[Mapping]`): what the tokenizer returned with `return_tensors="pt"`, two texts or
            more, eight for a margin to rely on, of the lengths and the kinds that matter to you; for a model of
            sentence-transformers also texts.
        max_error (`float`, *optional*): the relative L2 error allowed to the attention output. Default: 0.1, unless
            `speed` is given.
        error_of (`str`): what `max_error` bounds: `"head"`, the output of each; or `"layer"`, the output of all heads
            of a layer together, in the mean of the layers, as the tables of the README do.
        speed (`float`, *optional*): instead of `max_error`: how many times faster than exact attention the heads
            shall be at the longest length; `max_error` is the smallest that is.
        training (`bool`): for a model that will learn: the times are those of both passes, in which exact heads cost
            more. Of heads they decide only with `speed`.
        candidates (`Sequence[dict]`, *optional*): the settings to choose from, the cheapest first, as of `report`.
            Default: seven of `"bi-clustered"`, where the future is masked in segments of 512 tokens; for the layers
            of an encoder one of `"clustered"`, one of `"i-clustered"` and six of `"bi-clustered"`.
        coverage (`float`): the part of the heads, or of the texts, that shall be within `max_error` on a text left
            out.
        min_length (`int`, *optional*): as of the methods: inputs with fewer tokens run exact attention. Default: each
            candidate's own; a candidate that runs exact attention at all the lengths given is left out.
        part (`nn.Module`, *optional*): of a model with several parts that attend, such as one for images and one for
            text, the one to calibrate; the whole model reads the inputs. Each image counts as a text.
        progress (`bool` or `Callable`, *optional*): show a progress bar on stderr; a function gets
            `(done, total, what)` instead. Default: where stderr is a terminal.

    Returns:
        `Calibration`: `patch_attention(model, settings=calibration)`, `.save("effattn.json")`, `.plot()`, `print`.

    Raises:
        ValueError: fewer than two texts, inputs that the model cannot take, a value outside its range, `max_error` and
            `speed` together, an unknown `error_of`, a speed that no error reaches, inputs on which every candidate
            runs exact attention or that do not reach the part, no layer whose attention is finite, a model of several
            parts and none named, or without attention to patch.
        TypeError: a value of the wrong type, something that is not a transformers model.

    Example:
        >>> import hf_effattn
        >>> from transformers import AutoModel, AutoTokenizer
        >>> tokenizer, model = AutoTokenizer.from_pretrained("BAAI/bge-m3"), AutoModel.from_pretrained("BAAI/bge-m3")
        >>> texts = [tokenizer(open(name).read(), return_tensors="pt") for name in ("long.txt", "other.txt")]
        >>> calibration = hf_effattn.calibrate(model, texts)
        >>> file = calibration.save("effattn.json")
        >>> model = hf_effattn.patch_attention(model, settings="effattn.json")
    """
    model, inputs = model_and_inputs(model, inputs)
    if not isinstance(getattr(model, "_orig_mod", model), PreTrainedModel):  # a compiled one is measured as it is
        raise not_a_model(model)
    budget = _checked_budget(max_error, speed, coverage)
    if error_of not in ERROR_OF:
        raise ValueError(f'error_of must be "head" or "layer", got {error_of!r}')
    shared = {} if min_length is None else {"min_length": min_length}
    measured = _part_to_calibrate(model, part)
    (stack,) = measured.stacks
    causal, device_type = stack.causal, model.device.type
    given = [
        dict(candidate) | shared for candidate in candidates or default_candidates(causal=causal, error_of=error_of)
    ]
    settings = list((CausalPerHead if causal else PerHead)(candidates=given).candidates)
    for candidate in settings:
        candidate.check_stack(stack)
    batches = check_inputs(model, inputs)
    if _reads_text(stack):  # of images each counts, which shows when they are seen
        _check_enough(sum(_texts_of(batch) for batch in batches))
    lengths = _lengths_of(batches, stack)
    if lengths and all(candidate.is_exact(N, device_type) for candidate in settings for N in lengths):
        raise _nothing_to_measure(settings, lengths, device_type, causal)
    collected = CandidateErrors(settings, training=training)
    with progress_bar(progress, len(batches) * len(measured.layers), "calibrate") as advance:

        def watch(seen: Any) -> torch.Tensor:
            exact = collected.watch(seen)
            if not seen.call:
                advance(f"layer {seen.layer}, {seen.query.shape[2]:,} tokens")
            return exact

        # Tensors that are made in inference mode can have no gradients, which `training` times.
        with as_it_was(model), torch.inference_mode(False), torch.no_grad():
            model.eval()
            for batch in batches:
                with recording(measured, watch):
                    run_model(model, batch)
                collected.first_text = len(collected.errors)
    if not collected.errors:
        raise ValueError(f"the inputs do not reach {type(stack.model).__name__}: give what it reads")
    _check_enough(len(collected.errors))
    return _chosen(collected, model, stack, error_of, budget, speed, coverage, min_length)


def _chosen(
    collected: CandidateErrors,
    model: PreTrainedModel,
    stack: Stack,
    error_of: str,
    budget: float | None,
    speed: float | None,
    coverage: float,
    min_length: int | None,
) -> Calibration:
    costs = collected.costs(training=collected.training)
    ran = costs[:-1].isfinite()
    if not ran.any():
        raise _nothing_to_measure(collected.candidates, collected.seconds, model.device.type, stack.causal)
    model_of = described(stack)
    candidates = [candidate for candidate, has_run in zip(collected.candidates, ran.tolist(), strict=True) if has_run]
    costs = torch.cat([costs[:-1][ran], costs[-1:]])
    errors, shares = (numbers[:, ran] for numbers in collected.stacked(model_of["layers"]))
    rule: Rule = OfHeads() if error_of == "head" else OfLayers(costs)
    counted = errors if error_of == "head" else shares
    served = served_layers(counted)
    if not served.any():
        raise _not_finite(collected)
    if spoilt := [layer for layer in sorted(collected.layers) if not served[layer]]:
        warnings.warn(f"attention is not finite in layers {spoilt}: they stay exact", stacklevel=3)
    if budget is None:
        budget = budget_for(counted, costs, speed or 0.0, coverage, rule)
        if budget is None:
            cheapest = torch.zeros(errors.shape[2:], dtype=torch.long)
            raise ValueError(
                f"no budget makes attention {speed:g} times faster than exact attention at {max(collected.seconds):,} "
                f"tokens: the cheapest candidate is {speed_of(cheapest, costs):.2g} times as fast"
            )
    margin = least_margin(counted, budget, coverage, rule)
    table = rule.choose(counted, budget, margin)
    kept = held_out_coverage(counted, budget, margin, rule)
    if kept < coverage:
        warnings.warn(
            f"{percent(kept)} of the {COUNTED[error_of]} keep the error of {budget:g} on texts left out, "
            f"{percent(coverage)} were asked for: the texts are too few or differ too much; give more, or patch "
            "with a tolerance, checked in each pass",
            stacklevel=3,
        )
    calibration = {
        "model": model_of,
        "max_error": budget,
        "error_of": error_of,
        "speed": round(speed_of(table, costs), 3),
        "training": collected.training,
        "lengths": sorted(collected.seconds),
        "texts": len(collected.errors),
        "coverage": coverage,
        "margin": margin,
        "held_out": round(kept, 4),
        "errors": [[round(value, 4) for value in row] for row in errors_of(table, errors).amax(dim=0).tolist()],
        "environment": environment(model.device),
    }
    if error_of == "layer":
        calibration["layers_error"] = round(float(mean_of_layers(table, shares).max()), 4)
    kind = CausalPerHead if stack.causal else PerHead
    settings = kind(candidates=candidates, heads=table.tolist(), calibration=calibration, min_length=min_length)
    return Calibration(settings, base_model_of(model.config))


def _checked_budget(max_error: float | None, speed: float | None, coverage: float) -> float | None:
    given = {"max_error": max_error, "speed": speed, "coverage": coverage}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    if coverage > 1:
        raise ValueError(f"coverage is a part of the heads, at most 1; got {coverage}")
    if max_error is not None and speed is not None:
        raise ValueError("give max_error or speed: the one decides the other")
    return 0.1 if max_error is None and speed is None else max_error


def _part_to_calibrate(model: nn.Module, part: nn.Module | None) -> Measured:
    if part is not None and not any(module is part for module in model.modules()):
        raise ValueError(f"part must be a module of the model, such as model.model.language_model, got {part!r:.60}")
    measured = Measured.of(model if part is None else part, to_record=True)
    if len(measured.stacks) > 1:
        paths = {module: path for path, module in model.named_modules()}
        parts = ", ".join(f"part=model.{paths[stack.model]}" for stack in measured.stacks)
        raise ValueError(f"{type(model).__name__} has several parts with their own attention; calibrate one: {parts}")
    return measured


def _reads_text(stack: Stack) -> bool:
    entry = model_type_of(stack.modules[0])
    return entry is not None and entry.reads in ("text", "protein")


def _check_enough(texts: int) -> None:
    if texts < 2:
        raise ValueError(
            "calibrate needs two texts or more, of which each tells how the settings chosen on the others do on it, "
            f"got {texts}; eight are enough"
        )


def _nothing_to_measure(candidates: Sequence[Method], lengths: Iterable[int], device: str, causal: bool) -> ValueError:
    lengths = list(lengths)
    said = f"every candidate runs exact attention on these inputs of at most {max(lengths):,} tokens"
    if all(candidate.counts_reach(N) for candidate in candidates for N in lengths):
        what = "one segment and its window, or exact_keys," if causal else "one of its counts"
        return ValueError(f"{said}, since {what} reaches so far, which min_length=0 does not change: give longer ones")
    if all(candidate.shortest_length(device) is None for candidate in candidates):
        return ValueError(f"{said}: {why_never(PerHead.method, device)} (on the command line --min-length 0)")
    return ValueError(
        f"{said}, as that is faster: give longer ones, or min_length=0 (on the command line --min-length 0) to force "
        "the candidates"
    )


def _not_finite(collected: CandidateErrors) -> ValueError:
    texts = [
        text
        for text, by_layer in collected.errors.items()
        if not all(errors.isfinite().all() for errors in by_layer.values())
    ]
    return ValueError(
        f"no error can be told of any layer, as attention is not finite on texts {texts} of {len(collected.errors)}, "
        "from 0: leave them out, or look for a bad weight or an overflow of half precision (dtype=torch.float32)"
    )


def _lengths_of(batches: Sequence[Mapping[str, Any]], stack: Stack) -> set[int]:
    """The numbers of tokens that the stack will see; empty where what it reads says none: images, sound."""
    if not _reads_text(stack) or any("input_ids" not in batch for batch in batches):
        return set()
    return {batch["input_ids"].shape[1] for batch in batches}


def _texts_of(batch: Mapping[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor))
