"""The dashes of Pathfinder images: how one looks, what it keeps free around it, and where the next one may go.

A dash always starts at the centre of a pixel, so all that can be known about it depends on its direction only: the
directions are few, and everything is a table that is made once. A direction is a row of these tables: the first 360
are whole degrees, of a path's first dash; the others lead from the point between two dashes to a pixel `REACH` away.
Tables hold integers, so that no later step depends on the rounding of a machine.

Source: the generator of Linsley et al. 2018 and Kim et al. 2020, with the values the Long Range Arena states for its
32 x 32 images.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

IMAGE_SIZE = 32
PADDLE_LENGTH = 2
PADDLE_THICKNESS = 0.5
MARGIN = 1
SUPERSAMPLING = 2
MARKER_RADIUS = 1.5
CONTINUITY = 1.0
TARGET_CONTRAST = 2 * 0.75
DISTRACTOR_CONTRAST = 2.0
# From the point between two dashes to the far end of the next dash, and to the next such point.
REACH = PADDLE_LENGTH + MARGIN
STRIDE = PADDLE_LENGTH + 2 * MARGIN
# Pixels from the start of a dash to the edge of its window, and around an image so that no window leaves it.
WINDOW = PADDLE_LENGTH + math.ceil(PADDLE_THICKNESS) + MARGIN
BORDER = 8
SIDE = IMAGE_SIZE + 2 * BORDER
FULL = 255
_SEED_DIRECTIONS = 360


@dataclass(frozen=True)
class PaddleTables:
    """What follows from the direction of a dash; displacements are (down, right), in pixels.

    Attributes:
        ink: uint16 `(2, directions, window ** 2)`: the dash of a target and of a distractor, around its start; 255 is
            the brightness of a circle.
        margin: uint8 `(directions, window ** 2)`: how much of a pixel it keeps free of others.
        core: the pixels, as displacements from its start, that it keeps free entirely; one array a direction.
        stride: int64 `(directions, 2)`: from the point between two dashes to the next such point.
        seed_pivot: int64 `(360, 2)`: from the start of a path's first dash to the point before it.
        reach: int64 `(choices, 2)`: from such a point to the far ends that the next dash may have. The dash is drawn
            from there back.
        weights: int64 `(directions, choices)`: how likely each is after a dash of each direction, if it is free.
        marker: uint8 `(window ** 2,)`: the circle at the end of a path, its centre in the middle.
    """

    ink: np.ndarray
    margin: np.ndarray
    core: tuple[np.ndarray, ...]
    stride: np.ndarray
    seed_pivot: np.ndarray
    reach: np.ndarray
    weights: np.ndarray
    marker: np.ndarray


def _displacement(angle: np.ndarray, length: float) -> np.ndarray:
    """Whole pixels down and right, rounded up as published."""
    # Nine decimals, so that the sine of 180 degrees is zero on every machine.
    exact = np.round(length * np.stack([np.sin(angle), np.cos(angle)], axis=-1), 9)
    return np.ceil(exact).astype(np.int64)


def _lanczos(source: int, target: int) -> np.ndarray:
    """The matrix `(target, source)` that resamples a row by a Lanczos window of three lobes."""
    scale = source / target
    centers = (np.arange(target) + 0.5) * scale
    distance = (np.arange(source) + 0.5 - centers[:, None]) / scale
    weights = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    return weights / weights.sum(axis=1, keepdims=True)


def _resample(image: np.ndarray, size: int) -> np.ndarray:
    """A square image of 0 and 1 in another size, uint8 from 0 to 255."""
    matrix = _lanczos(image.shape[0], size)
    resampled = (matrix[:, None, :, None] * matrix[None, :, None, :] * image).sum(axis=(2, 3))
    return np.clip(np.floor(resampled * FULL + 0.5), 0, FULL).astype(np.uint8)


def _line(size: int, end: np.ndarray) -> np.ndarray:
    """A line, one pixel wide, from the centre of a square image."""
    image = np.zeros((size, size))
    steps = int(np.abs(end).max())
    for step in range(steps + 1):
        row, column = size // 2 + (2 * step * end + steps) // (2 * steps)
        image[row, column] = 1
    return image


def _disc(radius: int) -> list[tuple[int, int]]:
    around = range(-radius, radius + 1)
    return [(down, right) for down in around for right in around if down**2 + right**2 <= radius**2]


def _marker() -> np.ndarray:
    """A disc around the centre of the window."""
    size = 2 * WINDOW + 1
    place = np.arange(SUPERSAMPLING * size) - SUPERSAMPLING * WINDOW
    inside = place[:, None] ** 2 + place**2 <= (SUPERSAMPLING * MARKER_RADIUS) ** 2
    return _resample(inside.astype(float), size).ravel()


def _reach() -> np.ndarray:
    """The pixels on a circle around the point between two dashes, each once."""
    step = 1 / REACH  # an arc of one pixel
    angle = np.arange(0, 2 * math.pi, step)
    places = np.round(REACH * np.stack([np.sin(angle), np.cos(angle)], axis=-1), 9)
    return np.unique(np.floor(places).astype(np.int64), axis=0)


@cache
def paddle_tables() -> PaddleTables:
    """The tables, made once in a process.

    Returns: `PaddleTables`.
    """
    reach = _reach()
    towards = np.arctan2(reach[:, 0], reach[:, 1])
    angle = np.concatenate([np.deg2rad(np.arange(_SEED_DIRECTIONS) - 180.0), towards])
    # The first dash of a path is drawn along its direction, any other from its far end back.
    drawn = np.concatenate([angle[:_SEED_DIRECTIONS], towards + math.pi])
    fine = 2 * WINDOW * SUPERSAMPLING + 1
    ink, margin, core = [], [], []
    for end in _displacement(drawn, PADDLE_LENGTH * SUPERSAMPLING):
        line = _line(fine, end)
        wide = np.zeros_like(line)
        for down, right in _disc(MARGIN * SUPERSAMPLING):
            wide = np.maximum(wide, np.roll(line, (down, right), (0, 1)))
        ink.append(_resample(line, 2 * WINDOW + 1))
        margin.append(_resample(wide, 2 * WINDOW + 1))
        core.append(np.argwhere(margin[-1] == FULL) - WINDOW)
    turn = np.abs(towards - angle[:, None])
    turn = np.minimum(turn, 2 * math.pi - turn)
    # Half a right angle off is half as likely as straight on; beyond a right angle nothing is.
    likely = np.maximum(np.cos(np.minimum(turn * CONTINUITY, math.pi / 2)), 0) ** 2
    flat = np.stack(ink).reshape(len(angle), -1).astype(float)
    seeds = angle[:_SEED_DIRECTIONS]
    return PaddleTables(
        ink=np.stack(
            [np.floor(flat * contrast + 0.5).astype(np.uint16) for contrast in (TARGET_CONTRAST, DISTRACTOR_CONTRAST)]
        ),
        margin=np.stack(margin).reshape(len(angle), -1),
        core=tuple(core),
        stride=_displacement(angle, STRIDE),
        seed_pivot=_displacement(seeds, PADDLE_LENGTH) + _displacement(seeds + math.pi, REACH),
        reach=reach,
        weights=np.round(likely * 65535).astype(np.int64),
        marker=_marker(),
    )
