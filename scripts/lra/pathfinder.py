"""Pathfinder images of the Long Range Arena: are the two circles joined by a dashed path?

Two long dashed paths start near the middle and avoid each other; short paths distract. A circle stands at one end of
one path, a second at the other end of the same path (label 1) or of the other path (label 0).

Source: Linsley et al. 2018; Kim et al. 2020 and the generator that is published with it; its parameters for 32 x 32
pixels as the Long Range Arena (Tay et al. 2020) states them. This is an implementation of its own. Where it differs:

- the published generator lets the newest dash of a path touch the newest dash of the other one, and a distractor the
  end of the first path; here no dash touches that of another path. As published, a path may pass between two dashes
  of another one: what tells them apart is that paths go straight on rather than bend;
- paths are grown for many images at once, and free places for distractors are found by trying 48 places instead of
  listing all, so the images are others, of the same kind;
- the square that the first path starts in lies exactly in the middle, not a pixel off it;
- single dashes as a third kind of distractor are left out, as they are in the published calls.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .checks import GeneratedSettings, check_range
from .paddles import BORDER, FULL, IMAGE_SIZE, SIDE, WINDOW, PaddleTables, paddle_tables
from .random_streams import RandomStream

CHUNK = 500
SEED_DISTANCE = 7
PADDING = 1
_PAIRS_AT_ONCE = 1024
_TRIES = 3  # draws of the far end of a dash
_DISTRACTOR_TRIES = 5
_PLACES = 48
# Two dashes touch where what they keep free adds up to this; a place is taken where more than that is kept free.
_TOUCHING = int(1.8 * FULL)
_TAKEN = int(0.3 * FULL)
# Numbers of the pixels of a dash's window, and of those next to a pixel, less that of the pixel.
_AROUND = (np.arange(-WINDOW, WINDOW + 1)[:, None] * SIDE + np.arange(-WINDOW, WINDOW + 1)).ravel()
_CROSS = np.array([0, 1, -1, SIDE, -SIDE])


@dataclass(frozen=True)
class PathfinderSettings(GeneratedSettings):
    """Settings of Pathfinder; the defaults are those of the benchmark, its `hard` images of 32 x 32 pixels.

    Attributes:
        contour_length: dashes of a long path: 6 in the published `easy` images, 9 in `intermediate`, 14 in `hard`. A
            distractor has a third of them, and there are 20 dashes of distractors.
    """

    train_size: int = 160_000
    validation_size: int = 20_000
    test_size: int = 20_000
    contour_length: int = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        # Beyond 20 dashes hardly any pair of paths fits.
        check_range("contour_length", self.contour_length, 3, 20)

    @property
    def distractor_length(self) -> int:
        """Dashes of a distractor."""
        return self.contour_length // 3

    @property
    def num_distractors(self) -> int:
        """Distractors that are tried; one that finds no room is left out."""
        return 20 // self.distractor_length


class PathfinderImages(NamedTuple):
    """Images, and how they came about.

    Attributes:
        pixels: uint8 `(images, 1024)`, row by row, 0 is black.
        labels: int64 `(images,)`.
        circles: int64 `(images, 2, 2)`: the two circles' rows and columns.
        dashes: int64 `(images, 2, contour_length, 3)`: of the two long paths, from the middle on: the direction (a row
            of the paddle tables), row and column of each dash.
        distractors: int64 `(images, dashes, 3)`: the same of the distractors; direction -1 where one is left out.
    """

    pixels: np.ndarray
    labels: np.ndarray
    circles: np.ndarray
    dashes: np.ndarray
    distractors: np.ndarray


def _number(images: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Number of a pixel in `(images, SIDE, SIDE)`, laid flat: int64 like `images`, for `places` `(..., 2)`."""
    return (images * SIDE + places[..., 0] + BORDER) * SIDE + places[..., 1] + BORDER


class _Canvas:
    """What is kept free in many images at once, uint8 `(images, SIDE, SIDE)`, and the dashes that still fit."""

    def __init__(self, kept_free: np.ndarray, tables: PaddleTables) -> None:
        self.kept_free = kept_free
        self._flat = kept_free.reshape(-1)
        self._tables = tables

    def put(self, images: np.ndarray, directions: np.ndarray, places: np.ndarray) -> None:
        """Keep free what the dashes need, at most one in an image."""
        window = _number(images, places)[:, None] + _AROUND
        self._flat[window] = np.maximum(self._flat[window], self._tables.margin[directions])

    def is_free(self, images: np.ndarray, places: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Whether pixels around the places are free: bool like `images`, for offsets `(..., pixels)`."""
        return (self._flat[_number(images, places)[..., None] + offsets] <= _TAKEN).all(axis=-1)

    def extend(
        self, stream: RandomStream, images: np.ndarray, pivots: np.ndarray, directions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The next dash of one path in each image, straight on rather than bent, where nothing is in its way.

        `pivots` `(paths, 2)` are the points before the last dashes. Returns whether there is room, bool `(paths,)`,
        and the new pivots, directions and places.
        """
        tables = self._tables
        pivots = pivots + tables.stride[directions]
        base = _number(images, pivots)
        ends = base[:, None] + tables.reach[:, 0] * SIDE + tables.reach[:, 1]
        # The end of a dash stays a pixel away from what others keep free.
        room = FULL - self._flat[ends[..., None] + _CROSS].max(axis=-1).astype(np.int64)
        upto = np.cumsum(room * tables.weights[directions], axis=1)
        total = upto[:, -1]
        drawn = (
            stream.words(_TRIES * len(images)).reshape(-1, _TRIES) * total[:, None].astype(np.uint64)
        ) >> np.uint64(32)
        extended = np.zeros(len(images), dtype=bool)
        chosen = np.zeros(len(images), dtype=np.int64)
        for attempt in range(_TRIES):
            choice = (upto <= drawn[:, attempt, None].astype(np.int64)).sum(axis=1)
            open_paths = np.flatnonzero(~extended & (total > 0))
            choice = choice[open_paths]
            window = ends[open_paths, choice][:, None] + _AROUND
            margin = tables.margin[_first_reached(tables) + choice].astype(np.int64)
            fits = (self._flat[window] + margin).max(axis=1) < _TOUCHING
            chosen[open_paths[fits]] = choice[fits]
            extended[open_paths[fits]] = True
        return extended, pivots, _first_reached(tables) + chosen, pivots + tables.reach[chosen]


def _first_reached(tables: PaddleTables) -> int:
    """The first direction that is not one of a path's first dash."""
    return len(tables.seed_pivot)


def _empty(count: int) -> np.ndarray:
    """Images in which all is free but the edge and what lies beyond."""
    kept_free = np.full((count, SIDE, SIDE), FULL, dtype=np.uint8)
    inner = slice(BORDER + PADDING, BORDER + IMAGE_SIZE - PADDING)
    kept_free[:, inner, inner] = 0
    return kept_free


def _first_dashes(stream: RandomStream, count: int, tables: PaddleTables) -> tuple[np.ndarray, np.ndarray]:
    """The dashes that two paths begin with: directions `(count, 2)` and places `(count, 2, 2)`.

    The first keeps within the middle of the image, so that the second fits wherever it is, at a fixed distance.
    """
    middle = range(2 * SEED_DISTANCE, IMAGE_SIZE - 2 * SEED_DISTANCE)
    square = np.array([(row, column) for row in middle for column in middle])
    options = [
        square[((square[:, None] + core >= middle.start) & (square[:, None] + core < middle.stop)).all(axis=(1, 2))]
        for core in tables.core[: _first_reached(tables)]
    ]
    possible = np.flatnonzero([len(places) for places in options])
    directions = np.stack(
        [possible[stream.integers(len(possible), count)], stream.integers(_first_reached(tables), count)], axis=1
    )
    starts = np.cumsum([0, *(len(places) for places in options)])
    lengths = np.diff(starts)[directions[:, 0]]
    drawn = (stream.words(count) * lengths.astype(np.uint64)) >> np.uint64(32)
    first = np.concatenate(options)[starts[directions[:, 0]] + drawn.astype(np.int64)]
    around = np.deg2rad(stream.integers(360, count))
    away = np.floor(np.round(SEED_DISTANCE * np.stack([np.sin(around), np.cos(around)], axis=1), 9) + 0.5)
    return directions, np.stack([first, first + away.astype(np.int64)], axis=1)


def _grow_pairs(stream: RandomStream, length: int, tables: PaddleTables) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of long paths, as many of those begun as do not run into anything.

    Returns: `dashes` as in `PathfinderImages`, and what they keep free, `(pairs, SIDE, SIDE)`.
    """
    count = _PAIRS_AT_ONCE
    directions, places = _first_dashes(stream, count, tables)
    dashes = np.full((count, 2, length, 3), -1)
    dashes[:, :, 0] = np.concatenate([directions[..., None], places], axis=2)
    pivots = places + tables.seed_pivot[directions]
    # What each path must not touch: the other one, and its own dashes but the last, which the next one comes close to.
    views = [_Canvas(_empty(count), tables) for _ in range(2)]
    alive = np.arange(count)
    for path in range(2):
        views[1 - path].put(alive, directions[:, path], places[:, path])
    for number in range(1, length):
        for path in range(2):
            extended, pivot, direction, place = views[path].extend(
                stream, alive, pivots[alive, path], dashes[alive, path, number - 1, 0]
            )
            last = dashes[alive[extended], path, number - 1]
            alive, pivot, direction, place = alive[extended], pivot[extended], direction[extended], place[extended]
            views[path].put(alive, last[:, 0], last[:, 1:])
            views[1 - path].put(alive, direction, place)
            pivots[alive, path] = pivot
            dashes[alive, path, number] = np.concatenate([direction[:, None], place], axis=1)
    return dashes[alive], np.maximum(views[0].kept_free[alive], views[1].kept_free[alive])


def _add_distractors(
    stream: RandomStream, kept_free: np.ndarray, settings: PathfinderSettings, tables: PaddleTables
) -> np.ndarray:
    """Short paths in what is still free; `distractors` as in `PathfinderImages`. Changes `kept_free`."""
    length = settings.distractor_length
    distractors = np.full((len(kept_free), settings.num_distractors, length, 3), -1)
    pixels = max(len(core) for core in tables.core)
    # A core with fewer pixels names its first one again.
    cores = np.stack([np.pad(core, ((0, pixels - len(core)), (0, 0)), "edge") for core in tables.core])
    offsets = cores[..., 0] * SIDE + cores[..., 1]
    for number in range(settings.num_distractors):
        missing = np.arange(len(kept_free))
        for _ in range(_DISTRACTOR_TRIES):
            if not missing.size:
                break
            canvas = _Canvas(kept_free[missing], tables)
            images = np.arange(missing.size)
            directions = stream.integers(_first_reached(tables), missing.size)
            tried = stream.integers(IMAGE_SIZE, missing.size, _PLACES, 2)
            free = canvas.is_free(
                np.broadcast_to(images[:, None], tried.shape[:2]), tried, offsets[directions][:, None]
            )
            images = images[free.any(axis=1)]
            directions = directions[images]
            places = tried[images, free[images].argmax(axis=1)]
            pivots = places + tables.seed_pivot[directions]
            path = np.full((missing.size, length, 3), -1)
            path[images, 0] = np.concatenate([directions[:, None], places], axis=1)
            for dash in range(1, length):
                extended, pivots, directions, places = canvas.extend(stream, images, pivots, path[images, dash - 1, 0])
                last = path[images[extended], dash - 1]
                images, pivots = images[extended], pivots[extended]
                canvas.put(images, last[:, 0], last[:, 1:])
                path[images, dash] = np.concatenate([directions[extended][:, None], places[extended]], axis=1)
            canvas.put(images, path[images, -1, 0], path[images, -1, 1:])
            kept_free[missing[images]] = canvas.kept_free[images]
            distractors[missing[images], number] = path[images]
            missing = np.delete(missing, images)
    return distractors.reshape(len(kept_free), -1, 3)


def _draw(dashes: np.ndarray, distractors: np.ndarray, circles: np.ndarray, tables: PaddleTables) -> np.ndarray:
    """The pixels of images, uint8 `(images, 1024)`."""
    count = len(dashes)
    canvas = np.zeros((count, SIDE, SIDE), dtype=np.uint16)
    flat = canvas.reshape(-1)
    for kind, strokes in enumerate((dashes.reshape(count, -1, 3), distractors)):
        for stroke in strokes.swapaxes(0, 1):
            images = np.flatnonzero(stroke[:, 0] >= 0)
            window = _number(images, stroke[images, 1:])[:, None] + _AROUND
            flat[window] = np.maximum(flat[window], tables.ink[kind, stroke[images, 0]])
    for places in circles.swapaxes(0, 1):
        window = _number(np.arange(count), places)[:, None] + _AROUND
        flat[window] = np.maximum(flat[window], tables.marker)
    inner = slice(BORDER, BORDER + IMAGE_SIZE)
    pixels = canvas[:, inner, inner].reshape(count, -1).astype(np.int64)
    # As published, the brightest pixel of an image is white; mostly one of a distractor.
    brightest = pixels.max(axis=1, keepdims=True)
    return ((pixels * FULL + brightest // 2) // brightest).astype(np.uint8)


def generate_pathfinder(settings: PathfinderSettings, split: str, chunk: int) -> PathfinderImages:
    """`CHUNK` images, with the geometry that the pixels were drawn from; a pure function of its arguments."""
    tables = paddle_tables()
    stream = RandomStream(settings.seed, split, chunk)
    grown: list[tuple[np.ndarray, np.ndarray]] = []
    while sum(len(dashes) for dashes, _ in grown) < CHUNK:
        grown.append(_grow_pairs(stream, settings.contour_length, tables))
    dashes, kept_free = (np.concatenate(parts)[:CHUNK] for parts in zip(*grown, strict=True))
    distractors = _add_distractors(stream, kept_free, settings, tables)
    labels = stream.integers(2, CHUNK)
    marked = stream.integers(2, CHUNK)
    images = np.arange(CHUNK)
    circles = np.stack(
        [dashes[images, marked, 0, 1:], dashes[images, np.where(labels, marked, 1 - marked), -1, 1:]], axis=1
    )
    return PathfinderImages(_draw(dashes, distractors, circles, tables), labels, circles, dashes, distractors)
