"""`report`: what the methods cost and gain on one model and its user's inputs."""

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..measuring.candidates import UNPATCHED, Candidate, make_candidates
from ..measuring.cost import MEMORY_MEASURES, interleaved_rounds, peak_memory_added, timed
from ..measuring.environment import environment
from ..measuring.errors import ModelOutput, head_errors, output_change, run_model
from ..measuring.inputs import check_inputs
from ..measuring.progress import Progress, progress_bar
from ..measuring.recording import (
    BASELINE,
    EAGER,
    Measured,
    SeenAttention,
    make_exact,
    recording,
)
from ..patching.methods import Method
from ..patching.methods.exact import Exact
from ..patching.model_types.stacks import Stack, reads_sound
from ..patching.patch import apply_plans
from ..patching.planning import PatchPlan, not_a_model, plan_patch
from ..patching.sentence_transformers import model_and_inputs
from ..patching.snapshot import as_it_was
from .findings import MeasuredInput, Measurement
from .report import Report

SOUND = {"input_features", "input_values"}


def report(
    model: PreTrainedModel,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    methods: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    *,
    max_error: float | None = None,
    repeats: int = 3,
    memory: bool = True,
    progress: bool | Progress | None = None,
) -> Report:
    """Measure what efficient attention would cost and gain on this model and these inputs.

    For every input: the error of the attention output per layer and head, on the exact model's own queries, keys and
    values (taken one layer at a time while the exact model runs); the change of the model's output when all layers run
    the method; times against exact SDPA, interleaved; peak memory. Methods are forced also where the input is shorter
    than their `min_length`, and the report says that patching would run exact attention there. Of a model whose layers
    all run exactly, as Longformer's and T5's do, there is nothing to measure by layer. The model is afterwards what it
    was, patched or not, whatever happens. It runs in eval mode, without gradients. A conversion (`"cst"`) is meant to
    be fine-tuned, and the report says so.

    Ctrl-C stops the measurement and returns what has been measured so far, with `complete=False` and a warning.

    Args:
        model (`PreTrainedModel`): an encoder or a decoder of a served model type, with or without a head; or a model
            of sentence-transformers, of which the transformers model inside is measured.
        inputs (`Mapping` or `Sequence[Mapping]`): what the tokenizer, or the feature extractor of images or sound,
            returned with `return_tensors="pt"`, one batch or several, padded or not, of the lengths that matter to
            you; of images that a model attends to one by one the layers' errors and times are those of the first. For
            a model of sentence-transformers also a text or a list of texts (for a CrossEncoder pairs of texts), which
            are encoded one by one as `encode` does it.
        methods (`Sequence[str | dict]`, *optional*): names from `list_methods()`, alone or with settings
            (`"i-clustered clusters=100"`), dicts `{"method": name, **settings}`, with `"layers"` where only some are
            to be patched, or what `calibrate` returned. Default: every method with a few settings, `"exact"`
            where the model has windows, alone where it has nothing else.
        max_error (`float`, *optional*): allowed relative L2 change of the last hidden state, such as 0.05; the
            report then names the fastest of the methods that keep to it on every input, or says that none does.
        repeats (`int`): timed rounds (short inputs get more); 0 leaves the times out.
        memory (`bool`): False leaves peak memory out. On CUDA its measurement resets the device's peak statistics.
        progress (`bool` or `Callable`, *optional*): show a progress bar on stderr; a function gets
            `(done, total, what)` instead. Default: where stderr is a terminal.

    Returns:
        `Report`: `print(report)`, `.to_pandas()`, `.save(folder)`, `.plot()`, `.to_html()`.

    Raises:
        ValueError: no inputs, inputs that the model cannot take, unknown methods or settings, a model without
            attention to patch, a budget without times; none of `input_ids`, `inputs_embeds`, `input_features`,
            `input_values` for a model of windows or biases alone. Raised before anything runs.
        TypeError: something that is not a model, inputs that are not tensors, a value of the wrong type.

    Example:
        >>> import hf_effattn
        >>> from transformers import AutoModel, AutoTokenizer
        >>> tokenizer, model = AutoTokenizer.from_pretrained("BAAI/bge-m3"), AutoModel.from_pretrained("BAAI/bge-m3")
        >>> inputs = tokenizer(open("long.txt").read(), return_tensors="pt", truncation=True, max_length=8192)
        >>> found = hf_effattn.report(model, inputs, "bi-clustered")
        >>> folder = found.save("report")  # print(found) says the same in words
    """
    model, inputs = model_and_inputs(model, inputs)
    if not isinstance(model, PreTrainedModel):
        raise not_a_model(model)
    measured = Measured.of(model)
    stacks = measured.stacks
    if methods is None:
        methods = default_methods(measured)
        if not methods:
            raise ValueError(
                f"{type(model).__name__} has no attention to measure: all its layers {stacks[0].exact.why}, and no "
                "patch changes them"
            )
    candidates = make_candidates(methods, kinds={stack.causal for stack in stacks})
    plans = {
        candidate.label: [
            plan_patch(stack, replace(candidate.by_kind[stack.causal], min_length=0), candidate.layers)
            for stack in stacks
            if stack.causal in candidate.by_kind
        ]
        for candidate in candidates
    }
    batches = check_inputs(model, inputs)
    if not measured.layers:
        _check_tokens(batches)
    _check_options(max_error, repeats)
    findings = Report(
        environment=_environment(model, stacks, repeats, memory),
        layers=measured.layers,
        methods={candidate.label: candidate.to_dict() for candidate in candidates},
        max_error=max_error,
    )
    steps = len(batches) * (len(findings.layers) + (1 + len(candidates)) * (1 + repeats))
    with progress_bar(progress, steps, "report") as advance:
        try:
            with as_it_was(model) as put_back, torch.no_grad():
                model.eval()
                by_label = {candidate.label: candidate for candidate in candidates}
                for batch in batches:
                    _MeasureInput(measured, by_label, plans, batch, findings, repeats, memory, advance, put_back).run()
        except KeyboardInterrupt:
            findings.complete = False
            warnings.warn("report was interrupted: it holds the measurements made before that", stacklevel=2)
    return findings


def default_methods(measured: Measured) -> list[dict[str, Any]]:
    """What a report measures of a model: a few settings of every method, and windows alone where it has some."""
    exactly = [{"method": Exact.method}] if any(stack.exact.gains() for stack in measured.stacks) else []
    kinds = {stack.causal for stack in measured.stacks}
    approximate = make_candidates(None, kinds=kinds) if measured.layers else []
    return [*(candidate.to_dict() for candidate in approximate), *exactly]


@dataclass
class _MeasureInput:
    """All measurements of one input, added to the report as they are made."""

    subject: Measured
    candidates: dict[str, Candidate]
    plans: dict[str, list[PatchPlan]]
    batch: dict[str, Any]
    report: Report
    repeats: int
    memory: bool
    advance: Callable[[str], None]
    put_back: Callable[[], None]
    key_mask: torch.Tensor | None = None
    measured: dict[str, Measurement] = field(default_factory=dict)
    reasons: dict[str, set[str | None]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        self.model, self.stacks = self.subject.model, self.subject.stacks
        paths = {module: path for path, module in self.model.named_modules()}
        self.encoder_of = {module: paths[stack.model] for stack in self.stacks for module in stack.modules}
        # The method of each module, without the modules that stay exact.
        self.patched = {
            label: {
                module: method
                for plan in plans
                for module, served in itertools.compress(
                    zip(plan.stack.modules, plan.stack.layers, strict=True), plan.patched
                )
                if (method := plan.method.for_layers(served)) is not None
            }
            for label, plans in self.plans.items()
        }

    def run(self) -> None:
        # The patch of another method takes away what a conversion was trained with.
        self.put_back()
        if self.report.layers:
            with recording(self.subject, self._watch_attention):
                run_model(self.model, self.batch)
        elif SOUND & self.batch.keys() and (heard := [stack for stack in self.stacks if reads_sound(stack.model)]):
            self._note_frames(heard[0])
        else:
            self._note_tokens()
        if not self.measured:
            raise ValueError(f"the forward pass of {type(self.model).__name__} reached none of its attention layers")
        self._compare_outputs()
        self._time_forward()

    def _watch_attention(self, seen: SeenAttention) -> torch.Tensor:
        if seen.call:  # the first image stands for all
            return seen.exact()
        is_first = not self.measured
        if is_first:
            self._start(seen.key_mask)
        self._note_length(seen)
        calls = {UNPATCHED: seen.exact}
        for label in self.candidates:
            method = self.patched[label].get(seen.module)
            calls[label] = seen.exact if method is None else self._attention_call(method, seen)
        if is_first and (self.repeats or self.memory):
            self._warm_up(calls, seen.query.device)
        for done in range(max(1, math.ceil(self.repeats / len(self.report.layers)))):
            seconds = {}
            for label, call in calls.items():
                output, seconds[label] = timed(call, seen.query.device)
                if label == UNPATCHED:
                    exact = output
                elif done == 0:
                    measurement, method = self.measured[label], self.patched[label].get(seen.module)
                    measurement.attention_error[seen.layer] = head_errors(exact, output, seen.key_mask)
                    if method is not None and not seen.causal:
                        heads = method.exact_heads(seen.query, seen.key, seen.key_mask, seen.scale)
                        measurement.exact_heads |= {seen.layer: heads} if heads else {}
            if self.repeats:
                for label, taken in seconds.items():
                    self.measured[label].attention_seconds.append(taken)
        self.advance(f"attention of layer {seen.layer}, {seen.query.shape[2]:,} tokens")
        return exact

    def _note_tokens(self) -> None:
        """Count the tokens of the input: all layers run exactly, so none is recorded."""
        mask = self.batch.get("attention_mask")
        self._start(None if mask is None else mask.bool())
        tokens = self.batch["input_ids"] if "input_ids" in self.batch else self.batch["inputs_embeds"]
        self._note_size(tokens.shape[0], tokens.shape[1], self.key_mask)

    def _note_frames(self, stack: Stack) -> None:
        """Count the frames of a recording, which the first layer sees, and those that are padding."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, mask = (*args, kwargs.get("hidden_states"))[0], kwargs.get("attention_mask")
            self._start(_keys_of(mask))
            self._note_size(hidden.shape[0], hidden.shape[1], self.key_mask)
            hook.remove()

        self._switch_to(UNPATCHED)
        hook = stack.modules[0].register_forward_pre_hook(note, with_kwargs=True)
        try:
            run_model(self.model, self.batch)
        finally:
            hook.remove()

    def _start(self, key_mask: torch.Tensor | None) -> None:
        self.key_mask = key_mask
        shapes = {name: list(value.shape) for name, value in self.batch.items() if isinstance(value, torch.Tensor)}
        self.measured = {label: Measurement(len(self.report.inputs), label) for label in (UNPATCHED, *self.candidates)}
        self.report.inputs.append(MeasuredInput(0, 0, 0, shapes))
        self.report.measurements.extend(self.measured.values())

    def _note_size(self, batch_size: int, length: int, key_mask: torch.Tensor | None) -> None:
        measured = self.report.inputs[-1]
        measured.batch_size, measured.length = batch_size, length
        measured.valid_tokens = batch_size * length if key_mask is None else int(key_mask.sum())

    def _note_length(self, seen: SeenAttention) -> None:
        """Note how many tokens a layer sees, which may differ among encoders, and which methods that makes exact."""
        B, _, N, _ = seen.query.shape
        measured = self.report.inputs[-1]
        if measured.length < N:
            self._note_size(B, N, seen.key_mask)
        if len(self.stacks) > 1:
            measured.encoder_lengths[self.encoder_of[seen.module]] = N
        for label, candidate in self.candidates.items():
            if seen.module in self.patched[label]:
                reasons = self.reasons[label]
                reasons.add(candidate.by_kind[seen.causal].why_exact(N, seen.query.device.type))
                forced = "min_length" if "min_length" in reasons else None
                self.measured[label].why_exact = "settings" if reasons == {"settings"} else forced

    @staticmethod
    def _attention_call(method: Method, seen: SeenAttention) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            output = method.run(seen.query, seen.key, seen.value, module=seen.module, **seen.options)
            # The layout that the model needs, which a patched model pays for too.
            return output.transpose(1, 2).contiguous()

        return call

    def _warm_up(self, calls: Mapping[str, Callable[[], torch.Tensor]], device: torch.device) -> None:
        for label, call in calls.items():
            call()
            if self.memory:
                self.measured[label].attention_peak_bytes = peak_memory_added(call, device)[1]

    def _switch_to(self, label: str) -> None:
        if label == UNPATCHED:
            make_exact(self.stacks)
        else:
            # Not patch_attention, which warns of trained tables that are left out: put_back restores them.
            self.put_back()
            apply_plans(self.plans[label])

    def _compare_outputs(self) -> None:
        """Run every method once, for its output and its memory; these runs also warm up the timed ones."""
        exact = ModelOutput()
        for label, measurement in self.measured.items():
            self._switch_to(label)
            if self.memory:
                output, added = peak_memory_added(lambda: run_model(self.model, self.batch), self.model.device)
                measurement.forward_peak_bytes = added
            else:
                output = run_model(self.model, self.batch)
            if label == UNPATCHED:
                exact = output
            else:
                measurement.change = output_change(exact, output, self.key_mask)
            self.advance(f"output with {label}, {self.report.inputs[-1].length:,} tokens")

    def _time_forward(self) -> None:
        if not self.repeats:
            return
        interleaved_rounds(
            dict.fromkeys(self.measured, lambda: run_model(self.model, self.batch)),
            self.model.device,
            self.repeats,
            before={label: lambda label=label: self._switch_to(label) for label in self.measured},  # type: ignore[misc]
            seconds={label: measurement.forward_seconds for label, measurement in self.measured.items()},
            after_call=lambda: self.advance(f"forward pass, {self.report.inputs[-1].length:,} tokens"),
        )


def _check_tokens(batches: Sequence[Mapping[str, Any]]) -> None:
    for index, batch in enumerate(batches):
        if not {"input_ids", "inputs_embeds", *SOUND} & batch.keys():
            raise ValueError(
                f"inputs[{index}] must hold input_ids, inputs_embeds, {' or '.join(sorted(SOUND))}, got "
                f"{', '.join(batch)}: all layers of the model run exactly, and do not tell the length of a text"
            )


def _keys_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The keys `(B, N)` that any query sees, by a mask of them or of pairs, boolean or to be added."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    return seen if seen.ndim == 2 else seen.any(dim=2)[:, 0]


def _check_options(max_error: float | None, repeats: int) -> None:
    if isinstance(repeats, bool) or not isinstance(repeats, int):
        raise TypeError(f"repeats must be an int, got {repeats!r}")
    if repeats < 0:
        raise ValueError(f"repeats must be at least 0, got {repeats}")
    if max_error is None:
        return
    if isinstance(max_error, bool) or not isinstance(max_error, int | float):
        raise TypeError(f"max_error must be a number such as 0.05, got {max_error!r}")
    if not max_error > 0:
        raise ValueError(f"max_error must be above 0, got {max_error}; only exact attention has no error")
    if repeats == 0:
        raise ValueError("max_error asks for the fastest method, so it needs times: repeats must be at least 1")


def _environment(model: PreTrainedModel, stacks: list[Stack], repeats: int, memory: bool) -> dict[str, Any]:
    # A stack that is recorded is compared with SDPA, or with its equal for attention sinks.
    eager = all(not stack.exact.is_recorded and stack.exact.baseline == EAGER for stack in stacks)
    return {
        "model": type(model).__name__,
        "model_type": getattr(model.config, "model_type", None),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "causal": any(stack.causal for stack in stacks),
        "repeats": repeats,
        "baseline": EAGER if eager else BASELINE,
        "memory_measure": MEMORY_MEASURES.get(model.device.type) if memory else None,
        **environment(model.device),
    }
