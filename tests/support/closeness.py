"""How tests compare a result with its reference."""

import torch


def assert_close_to_reference(
    name: str,
    actual: torch.Tensor,
    reference: torch.Tensor,
    baseline: torch.Tensor | None = None,
    rtol: float = 1e-3,
    factor: float = 2.0,
) -> None:
    """Relative RMS error against a float64 `reference`, at most `rtol` or `factor` times that of `baseline`.

    An error that float64 itself makes of numbers around 1 is none: where the reference is 0, processors differ in it.
    `baseline` is plain PyTorch in the dtype of `actual`: what the dtype itself costs. No tolerance is picked by hand.
    """
    assert actual.shape == reference.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(reference.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    size = reference.square().mean().sqrt().clamp(min=1e-12)

    def relative_rms(other: torch.Tensor) -> float:
        return ((other.double() - reference).square().mean().sqrt() / size).item()

    if (actual.double() - reference).square().mean().sqrt() <= torch.finfo(torch.float64).eps:
        return
    limit = rtol if baseline is None else max(rtol, factor * relative_rms(baseline))
    assert relative_rms(actual) <= limit, f"{name}: relative error {relative_rms(actual):.2e}, allowed {limit:.2e}"
