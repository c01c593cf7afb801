"""Speed and memory of the attention methods alone, against the fastest exact attention of the machine."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..patching.methods import METHODS, Method
from ..patching.methods.per_head import PerHead
from .candidates import make_candidates
from .cost import compare, peak_memory_added
from .environment import environment, usable_device
from .errors import relative_error
from .exact_kernels import exact_kernels
from .json_numbers import finite_or_none
from .progress import Progress, progress_bar

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[..., torch.Tensor]
DEFAULT_METHODS: tuple[dict[str, Any], ...] = (
    {"method": "clustered", "clusters": 100},
    {"method": "i-clustered", "clusters": 100, "topk": 32},
    {"method": "bi-clustered", "clusters": 32, "topk": 64, "key_clusters": 32},
)
DTYPES = ("float32", "bfloat16", "float16")


def bench(
    lengths: Sequence[int],
    methods: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    *,
    batch_size: int = 1,
    num_heads: int = 12,
    head_dim: int = 64,
    dtype: str = "float32",
    device: str | torch.device | None = None,
    backward: bool = True,
    repeats: int = 5,
    progress: bool | Progress | None = None,
) -> dict[str, Any]:
    """Time attention that sees all tokens, on random inputs, interleaved with exact attention, clustering included.

    Random queries and keys have no structure that clusters could use, so the errors are those of the worst case; speed
    hardly depends on the values. For errors on real text use `hf_effattn.report`.

    Args:
        lengths (`Sequence[int]`): tokens.
        methods (`Sequence[str | dict]`, *optional*): as of `hf_effattn.report`, but for conversions and settings of
            every head. Default: one setting of each other method. They are forced, whatever their `min_length`.
        batch_size (`int`): `B`.
        num_heads (`int`): `H`.
        head_dim (`int`): `D`.
        dtype (`str`): `"float32"`, `"bfloat16"` or `"float16"`.
        device (`str`, *optional*): Default: a GPU where there is one, else the CPU.
        backward (`bool`): whether the gradients are timed too.
        repeats (`int`): rounds of timing; short calls get more.
        progress (`bool` or `Callable`, *optional*): as of `hf_effattn.report`; a step is a length.

    Returns:
        `dict`: JSON values, `environment`, `settings` and `rows`: one per length and kernel or method, with
        `forward_ms`, `forward_speedup` against the fastest exact kernel, `forward_peak_bytes`, the same of
        `forward_backward`, and `random_error`, the relative L2 error of the output. A method that has nothing to
        approximate at a length has `why_exact` instead.

    Raises:
        ValueError: a count below 1, an unknown dtype or method, one that belongs to a model.
        TypeError: a value of the wrong type.
    """
    for name, count in {
        "batch_size": batch_size,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "repeats": repeats,
    }.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must hold numbers of tokens above 0, got {list(lengths)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    candidates = make_candidates(DEFAULT_METHODS if methods is None else methods)
    for candidate in candidates:
        if candidate.layers is not None:
            raise ValueError(f"{candidate.label}: there is no model here that has layers: leave them out")
        if METHODS[candidate.settings.method].needs_fine_tuning:
            raise ValueError(
                f"{candidate.label} is a conversion, whose attention belongs to a model: measure it with "
                "hf_effattn.report"
            )
        if candidate.settings.stays_exact:
            raise ValueError(
                f"{candidate.label} approximates nothing, and there are no windows here: measure it with "
                "hf_effattn.report on a model that has them"
            )
        if isinstance(candidate.settings, PerHead):
            raise ValueError(
                f"{candidate.label} has a setting for every head of a model, and there is none here: measure it with "
                "hf_effattn.report, or a setting of one of its heads"
            )
    chosen = usable_device(device)
    rows: list[dict[str, Any]] = []
    forced = {candidate.label: candidate.forced for candidate in candidates}
    parts = {"forward": repeats} | ({"forward_backward": repeats} if backward else {})
    with progress_bar(progress, len(lengths), "bench") as advance:
        for length in lengths:
            advance(f"{length:,} tokens")
            inputs = random_inputs(batch_size, length, num_heads, head_dim, getattr(torch, dtype), chosen)
            measured_rows, calls = measure_shape(forced, inputs, parts)
            exact = exact_output(inputs)
            for row in measured_rows:
                if "forward_ms" in row:
                    row["random_error"] = relative_error(exact, forward(calls[row["method"]], inputs))
            measured = {row["method"] for row in measured_rows}
            measured_rows += [{"method": name, "why_exact": "settings"} for name in forced if name not in measured]
            rows += [{"length": length, **row} for row in measured_rows]
    settings = {"batch_size": batch_size, "num_heads": num_heads, "head_dim": head_dim, "dtype": dtype}
    settings |= {"repeats": repeats, "methods": {candidate.label: candidate.to_dict() for candidate in candidates}}
    return {"environment": environment(chosen), "settings": settings, "rows": finite_or_none(rows)}


def random_inputs(
    batch_size: int, length: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Query, key and value in the layout in which transformers hands them over, `(B, H, N, D)`."""
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(batch_size, length, num_heads, head_dim, generator=generator).to(device, dtype).transpose(1, 2)
        for _ in range(3)
    )
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def forward(attend: Attend, inputs: Inputs) -> torch.Tensor:
    """Attention without gradients."""
    with torch.no_grad():
        return attend(*inputs)


def forward_backward(attend: Attend, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Attention and the gradients of query, key and value."""
    output = attend(*inputs)
    return torch.autograd.grad(output, inputs, torch.ones_like(output))


def exact_output(inputs: Inputs) -> torch.Tensor:
    """Exact attention of the inputs, in float32."""
    query, key, value = (tensor.float() for tensor in inputs)
    return forward(F.scaled_dot_product_attention, (query, key, value))


PARTS: dict[str, Callable[[Attend, Inputs], Any]] = {"forward": forward, "forward_backward": forward_backward}


def measure_shape(
    methods: Mapping[str, Method], inputs: Inputs, repeats: Mapping[str, int]
) -> tuple[list[dict[str, Any]], dict[str, Attend]]:
    """Time and memory of every exact kernel that takes the inputs, and of every method, interleaved.

    Args:
        methods (`Mapping[str, Method]`): by name, with `min_length=0`.
        inputs (`Inputs`): query, key and value, with gradients where `"forward_backward"` is measured.
        repeats (`Mapping[str, int]`): rounds of timing by part, `"forward"` and `"forward_backward"`.

    Returns:
        `(list[dict], dict)`: a row per kernel and method, whose speed-ups are against the fastest exact kernel, the
        first with `refused`, the kernels and parts that did not run and why; and what was called, by name. Methods
        that have nothing to approximate at this length have no row.
    """
    query = inputs[0]
    length, device = query.shape[2], query.device
    exact, refused = exact_kernels(*inputs)
    calls: dict[str, Attend] = exact | {
        name: settings.run for name, settings in methods.items() if not settings.is_exact(length, device.type)
    }
    rows: dict[str, dict[str, Any]] = {name: {"method": name, "exact": name in exact} for name in calls}
    for part, rounds in repeats.items():
        runs: dict[str, Callable[[], object]] = {}
        for name, attend in calls.items():
            run = partial(PARTS[part], attend, inputs)
            try:  # the warm-up round too
                _, peak = peak_memory_added(run, device)
            except Exception as error:  # no memory, no backward pass, or a kernel that this chip has no room for
                refused[f"{name}, {part}"] = (str(error) or type(error).__name__).splitlines()[0]
                continue
            rows[name][f"{part}_peak_bytes"] = peak
            runs[name] = run
        for name, numbers in compare(runs, exact, device, rounds).items():
            rows[name] |= {f"{part}_{field}": value for field, value in numbers.items()}
    next(iter(rows.values()))["refused"] = refused
    return list(rows.values()), calls
