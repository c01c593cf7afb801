"""Does neural clustering alone beat other clusterings? The digits of MNIST (Source: Wang 2022, App. A, Table 6).

A cluster stands for the class that most of its training images have; the accuracy is that of the test images, put into
the clusters that were found without labels. Spherical K-means is K-means on images scaled to length 1: neural
clustering compares by the cosine, and what it gains over K-means has to be more than that. A self-organising map runs
where the package `minisom` is installed.

    python -m scripts.reproduce.digits                   # writes scripts/results/mnist_clustering.json
    python -m scripts.reproduce.digits --clusters 10,50,100,200,300,500
"""

import gzip
import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Self

import numpy as np
import pandas as pd
import typer
from rich.progress import track
from sklearn.cluster import KMeans, MiniBatchKMeans  # type: ignore[import-untyped]
from sklearn.preprocessing import normalize  # type: ignore[import-untyped]

from hf_effattn.models.clusterformer import NeuralClustering

from ..shared.command_line import check_names, run_with_help
from ..shared.data import dataset_path
from ..shared.runs import RESULTS, KeptRuns, mean_and_deviation, print_table

CLASSES = 10
MAP_EPOCHS = 5


class SelfOrganisingMap:
    """`minisom.MiniSom` on a grid as square as `n_clusters` allows, with the methods of an estimator."""

    def __init__(self, n_clusters: int, random_state: int) -> None:
        rows = max(n for n in range(1, int(n_clusters**0.5) + 1) if n_clusters % n == 0)
        self.shape = rows, n_clusters // rows
        self.random_state = random_state

    def fit(self, X: np.ndarray) -> Self:
        """Train the map on the rows of `X` in random order."""
        minisom = importlib.import_module("minisom")
        som = minisom.MiniSom(*self.shape, X.shape[1], random_seed=self.random_state)
        som.random_weights_init(X)
        som.train(X, MAP_EPOCHS * len(X), random_order=True)
        self.cluster_centers_ = som.get_weights().reshape(-1, X.shape[1]).astype(X.dtype)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """The nearest node of each row."""
        lengths = np.square(self.cluster_centers_).sum(axis=1)
        return (lengths - 2 * X @ self.cluster_centers_.T).argmin(axis=1)


# What makes the estimator, and whether rows are scaled to length 1 before it sees them. K-means runs until it
# converges; its batches have as many rows as neural clustering draws.
METHODS: dict[str, tuple[Callable[..., Any], bool]] = {
    "neural clustering": (NeuralClustering, False),
    "K-means": (partial(KMeans, n_init=1), False),
    "mini-batch K-means": (partial(MiniBatchKMeans, n_init=1, batch_size=2000), False),
    "spherical K-means": (partial(KMeans, n_init=1), True),
    "self-organising map": (SelfOrganisingMap, False),
}
NEEDS_MINISOM = "self-organising map"
PAPER = {
    "self-organising map": {10: 59.8, 50: 80.9, 100: 87.8, 200: 91.2, 300: 93.1},
    "K-means": {10: 59.2, 50: 82.5, 100: 87.7, 200: 90.7, 300: 92.0},
    "neural clustering": {10: 60.7, 50: 82.5, 100: 90.1, 200: 91.8, 300: 93.6},
}


def read_idx(path: Path) -> np.ndarray:
    """The array of bytes in an IDX file."""
    with gzip.open(path) as file:
        data = file.read()
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", count=dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def load_mnist(images: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images `(n, 784)` between 0 and 1 and their classes, then those of the test; the first so many."""
    folder = dataset_path("mnist")
    parts = []
    for name in ("train", "t10k"):
        pixels = read_idx(folder / f"{name}-images-idx3-ubyte.gz")[:images]
        classes = read_idx(folder / f"{name}-labels-idx1-ubyte.gz")[:images]
        parts += [pixels.reshape(len(pixels), -1).astype(np.float32) / 255, classes.astype(np.int64)]
    return parts[0], parts[1], parts[2], parts[3]


def majority_accuracy(
    clusters: int,
    train_labels: np.ndarray,
    train_classes: np.ndarray,
    test_labels: np.ndarray,
    test_classes: np.ndarray,
) -> float:
    """Share of test rows whose cluster's most frequent training class is theirs; an empty cluster has that of all."""
    counts = np.zeros((clusters, CLASSES), np.int64)
    np.add.at(counts, (train_labels, train_classes), 1)
    counts[counts.sum(axis=1) == 0] = counts.sum(axis=0)
    return float((counts.argmax(axis=1)[test_labels] == test_classes).mean())


def measure(run: dict[str, Any], data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> dict[str, Any]:
    """The run with its accuracy in percent, the share of clusters without a training image, and the seconds."""
    make, unit_rows = METHODS[run["method"]]
    train, train_classes, test, test_classes = data
    if unit_rows:
        train, test = normalize(train), normalize(test)
    start = perf_counter()
    fitted = make(run["clusters"], random_state=run["seed"]).fit(train)
    seconds = perf_counter() - start
    labels = fitted.predict(train)
    accuracy = majority_accuracy(run["clusters"], labels, train_classes, fitted.predict(test), test_classes)
    empty = 1 - len(np.unique(labels)) / run["clusters"]
    return run | {"accuracy": 100 * accuracy, "empty_clusters": empty, "fit_seconds": seconds}


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Accuracy by method and number of clusters, with the paper's rows."""
    frame = pd.DataFrame(rows)
    shown = frame.groupby(["method", "clusters"])["accuracy"].apply(mean_and_deviation).unstack()
    shown = shown.reindex([name for name in METHODS if name in shown.index])
    for name, numbers in PAPER.items():
        shown.loc[f"{name}, paper"] = [str(numbers.get(int(k), "")) for k in shown.columns]
    return shown.fillna("")


def main(
    clusters: Annotated[str, typer.Option(help="Comma-separated numbers of clusters.")] = "100,300",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0,1,2",
    methods: Annotated[str | None, typer.Option(help="Comma-separated; default: all that are installed.")] = None,
    images: Annotated[int | None, typer.Option(help="Only the first so many of training and test.")] = None,
    output: Path = RESULTS / "mnist_clustering.json",
) -> None:
    """Run what the output file does not hold yet, keep it as JSON after every run, and print the table."""
    installed = importlib.util.find_spec("minisom") is not None
    chosen = methods.split(",") if methods else [name for name in METHODS if installed or name != NEEDS_MINISOM]
    check_names("methods", chosen, METHODS)
    kept = KeptRuns(output, {"images": images})
    runs = [
        {"clusters": int(k), "method": name, "seed": int(seed)}
        for k in clusters.split(",")
        for seed in seeds.split(",")
        for name in chosen
    ]
    data = load_mnist(images)
    for run in track(kept.missing(runs), description="clusterings"):
        kept.add(measure(run, data))
    print_table(table(kept.rows), output, index=True)


if __name__ == "__main__":
    run_with_help(main, __doc__)
