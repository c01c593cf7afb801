"""Checks of settings, made before anything is read or written."""

from dataclasses import dataclass


def check_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise `TypeError` unless a setting is a whole number, `ValueError` unless it is within its range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {allowed}, got {value}")


@dataclass(frozen=True)
class GeneratedSettings:
    """What generated tasks share; a setting out of its range is a `ValueError`.

    Attributes:
        train_size: samples to train on.
        validation_size: samples to choose a model by.
        test_size: samples of the test.
        seed: another seed gives other samples.
    """

    train_size: int
    validation_size: int
    test_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for split, size in self.sizes.items():
            check_range(f"{split}_size", size, 1)
        check_range("seed", self.seed, 0)

    @property
    def sizes(self) -> dict[str, int]:
        """Samples of each split."""
        return {"train": self.train_size, "validation": self.validation_size, "test": self.test_size}
