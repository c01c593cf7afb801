"""Pathfinder: what an image shows agrees with its label, found in the pixels as far as they tell it."""

import numpy as np
import pytest

from scripts.lra.paddles import WINDOW, paddle_tables
from scripts.lra.pathfinder import PathfinderSettings, generate_pathfinder

SIZE = 32
SIDE = 2 * WINDOW + 1


@pytest.fixture(scope="module", params=[14, pytest.param(6, marks=pytest.mark.slow)], ids=["hard", "easy"])
def images(request):
    return generate_pathfinder(PathfinderSettings(contour_length=request.param), "train", 0)


def circles_in(image):
    """The places where an image has a whole circle, whatever its brightness."""
    marker = paddle_tables().marker.reshape(SIDE, SIDE).astype(int)
    padded = np.pad(image.reshape(SIZE, SIZE).astype(int), WINDOW)
    centre = image.reshape(SIZE, SIZE).astype(int)
    there = centre > 100
    for row, column in np.argwhere(marker >= 40):
        there &= padded[row : row + SIZE, column : column + SIZE] >= marker[row, column] * centre // 255 - 2
    return {tuple(place) for place in np.argwhere(there).tolist()}


def reachable(lit, start):
    """Pixels that a walk over lit ones reaches, which may step over two dark ones: the gap between two dashes."""
    steps = [(down, right) for down in range(-3, 4) for right in range(-3, 4)]
    seen, waiting = {start}, [start]
    while waiting:
        row, column = waiting.pop()
        for down, right in steps:
            place = (row + down, column + right)
            if place not in seen and min(place) >= 0 and max(place) < SIZE and lit[place]:
                seen.add(place)
                waiting.append(place)
    return seen


def alone(image, path):
    """What an image shows near one path: the pixels within two of a dash's ends."""
    near = np.zeros((SIZE + 4, SIZE + 4), dtype=bool)
    for row, column in path[:, 1:]:
        near[row : row + 5, column : column + 5] = True
    return np.where(near[2:-2, 2:-2], image.reshape(SIZE, SIZE), 0)


def test_there_are_two_circles_where_they_are_said_to_be(images):
    """And no others; where the two overlap, what they share may look like a third."""
    for image, circles in zip(images.pixels, images.circles.tolist(), strict=True):
        seen, (first, second) = circles_in(image), map(tuple, circles)
        assert seen >= {first, second}
        assert first != second
        if max(abs(first[0] - second[0]), abs(first[1] - second[1])) > 4:
            assert seen == {first, second}


@pytest.mark.slow
def test_joined_circles_are_connected_in_the_pixels(images):
    """By what is lit along the path that begins in the first circle; that path ends in the second, or elsewhere."""
    for image, label, circles, dashes in zip(
        images.pixels, images.labels, images.circles.tolist(), images.dashes, strict=True
    ):
        first, second = map(tuple, circles)
        (path,) = (path for path in dashes if tuple(path[0, 1:]) == first)
        shown = alone(image, path) >= 40
        end = tuple(path[-1, 1:].tolist())
        assert shown[end]
        assert end in reachable(shown, first)
        assert (end == second) == bool(label)


def test_a_chunk_depends_on_seed_split_and_number_only():
    settings = PathfinderSettings(contour_length=6)
    first = generate_pathfinder(settings, "train", 2).pixels
    generate_pathfinder(settings, "train", 1)
    assert (generate_pathfinder(settings, "train", 2).pixels == first).all()
    for others in (
        generate_pathfinder(settings, "train", 3),
        generate_pathfinder(settings, "test", 2),
        generate_pathfinder(PathfinderSettings(contour_length=6, seed=1), "train", 2),
    ):
        assert (others.pixels != first).any()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"validation_size": 0}, ValueError, "validation_size must be at least 1, got 0"),
        ({"contour_length": 2}, ValueError, "contour_length must be from 3 to 20, got 2"),
        ({"contour_length": 40}, ValueError, "contour_length must be from 3 to 20, got 40"),
        ({"seed": "0"}, TypeError, "seed must be a whole number, got '0'"),
    ],
)
def test_settings_that_cannot_be(settings, error, message):
    with pytest.raises(error, match=message):
        PathfinderSettings(**settings)
