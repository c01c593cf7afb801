"""The clustering of ClusterFormer alone, on a matrix of features (Source: Wang 2022, App. A)."""

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from rich.progress import track

from ...ops import neural_clustering
from ...ops.neural_clustering import SIMILARITIES
from ...ops.shared.arguments import check_count
from .sorting import cluster_loss, sorting_loss

try:
    from sklearn.base import (  # type: ignore[import-untyped]
        BaseEstimator,
        ClassNamePrefixFeaturesOutMixin,
        ClusterMixin,
        TransformerMixin,
    )
    from sklearn.utils.validation import (  # type: ignore[import-untyped]
        check_is_fitted,
        check_random_state,
        validate_data,
    )
except ImportError as error:  # pragma: no cover
    raise ImportError('NeuralClustering needs scikit-learn 1.6 or newer: pip install "scikit-learn>=1.6"') from error


class NeuralClustering(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, BaseEstimator):
    """Clusters the rows of a matrix by centroids that are trained with the paper's clustering losses.

    The centroids start at rows of the data. Every step draws a batch, updates the centroids by it (Eq. 2 and 3) and
    descends `μ L1 + ν L2` of the updated ones. `cluster_centers_` are those updated by all the rows; a row is in the
    cluster of the nearest of them, by the same similarity, so that its label does not depend on the rows beside it.

    With the cosine the clusters do not depend on the unit of the data: those of `X` and `255 X` are the same. With the
    inner product they do, because memberships are the sharper the larger the numbers are: `sharpness` is per square
    of the data's unit.

    Args:
        n_clusters (`int`): the paper's `k`.
        similarity (`str`): `"cosine"`, or `"dot"`, the paper's, whose losses have no bound.
        sharpness (`float`): factor on the similarity inside the memberships.
        cluster_loss_weight, sorting_loss_weight (`float`): the paper's μ and ν.
        max_iter (`int`): training steps, all of which are made.
        batch_size (`int`): rows per step.
        learning_rate (`float`): of Adam, about what a step changes a number of a centroid by: in units of the root
            mean square of all the numbers in the data.
        verbose (`bool`): a progress bar of the steps on the error stream, with the time that is left.
        random_state (`int`, `numpy.random.RandomState`, *optional*): for the start and the batches.

    Attributes:
        cluster_centers_: `(n_clusters, n_features)`, the updated centroids.
        labels_: `(n_samples,)`, of the rows that were fitted.
        n_iter_: steps that were made.
        losses_: `(n_iter_, 2)`, `L1` and `L2` of every step.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        similarity: str = "cosine",
        sharpness: float = 15.0,
        cluster_loss_weight: float = 1.0,
        sorting_loss_weight: float = 0.01,
        max_iter: int = 400,
        batch_size: int = 2000,
        learning_rate: float = 9e-2,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.similarity = similarity
        self.sharpness = sharpness
        self.cluster_loss_weight = cluster_loss_weight
        self.sorting_loss_weight = sorting_loss_weight
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.verbose = verbose
        self.random_state = random_state

    def fit(self, X: Any, y: None = None) -> Self:
        """Train the centroids.

        Args:
            X: `(n_samples, n_features)`.
            y: ignored.
        Returns: self.
        Raises: `ValueError` for fewer rows than clusters, a setting that is out of range, or a training that
            overflows; `TypeError` for a setting of another type.
        """
        self._check_settings()
        X = validate_data(self, X, dtype=(np.float64, np.float32), ensure_min_samples=1)
        if len(X) < self.n_clusters:
            raise ValueError(f"n_samples={len(X)} should be >= n_clusters={self.n_clusters}")
        random = check_random_state(self.random_state)
        cosine = self.similarity == "cosine"
        size = _root_mean_square(X)
        # Adam steps by the learning rate whatever the gradients are. Where the similarity allows it, the rows are
        # brought to the size of 1 instead, where no square of theirs underflows or overflows.
        unit, step = (size, self.learning_rate) if cosine else (1.0, self.learning_rate * size)
        with _training_on_the_cpu():
            rows = torch.from_numpy(np.divide(X, unit, order="C"))
            centroids, losses = self._train(rows, random, step)
            with torch.no_grad():
                updated, _ = self._update(rows[None], centroids)
        centers = updated[0].numpy()
        if not np.isfinite(centers).all():
            raise ValueError(
                f'training overflowed {X.dtype}: it needs a lower learning_rate, or with similarity="dot" smaller'
                " numbers in X"
            )
        self.cluster_centers_ = centers * X.dtype.type(unit)
        self.losses_ = np.array(losses)
        self.n_iter_ = self.max_iter
        self.labels_ = self._nearest(X)
        return self

    def _train(
        self, rows: torch.Tensor, random: np.random.RandomState, step: float
    ) -> tuple[torch.Tensor, list[list[float]]]:
        """The trained centroids `(n_clusters, n_features)`, not yet updated by rows, and both losses of every step."""
        cosine = self.similarity == "cosine"
        centroids = rows[random.permutation(len(rows))[: self.n_clusters]].clone().requires_grad_()
        optimizer = torch.optim.Adam([centroids], lr=step)
        losses = []
        steps = range(self.max_iter)
        for _ in track(steps, "clustering", disable=not self.verbose, console=_error_console()):
            batch = rows[random.randint(len(rows), size=min(self.batch_size, len(rows)))][None]
            updated, labels = self._update(batch, centroids)
            parts = cluster_loss(batch, updated, labels, None, cosine), sorting_loss(updated, cosine)
            loss = self.cluster_loss_weight * parts[0] + self.sorting_loss_weight * parts[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append([float(part.detach()) for part in parts])
        return centroids.detach(), losses

    def predict(self, X: Any) -> np.ndarray:
        """The cluster of each row `(n_samples, n_features)`: `(n_samples,)` in `0 .. n_clusters - 1`."""
        check_is_fitted(self)
        return self._nearest(validate_data(self, X, dtype=(np.float64, np.float32), reset=False))

    def transform(self, X: Any) -> np.ndarray:
        """The similarity of each row to each centroid, `(n_samples, n_clusters)`."""
        check_is_fitted(self)
        return self._similarities(validate_data(self, X, dtype=(np.float64, np.float32), reset=False))

    def _update(self, rows: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return neural_clustering(rows, centroids[None], similarity=self.similarity, sharpness=self.sharpness)

    def _similarities(self, X: np.ndarray) -> np.ndarray:
        if self.similarity == "cosine":
            return _directions(X) @ _directions(self.cluster_centers_).astype(X.dtype).T
        return X @ self.cluster_centers_.astype(X.dtype).T

    def _nearest(self, X: np.ndarray) -> np.ndarray:
        return self._similarities(X).argmax(axis=1)

    def _check_settings(self) -> None:
        """Raise unless every setting is one that training can work with.

        scikit-learn's own checks of parameters are private, and change with its releases.
        """
        for name in ("n_clusters", "max_iter", "batch_size"):
            check_count(name, getattr(self, name))
        if self.similarity not in SIMILARITIES:
            raise ValueError(
                f"similarity must be one of {', '.join(map(repr, SIMILARITIES))}, got {self.similarity!r}"
            )
        for name in ("sharpness", "learning_rate"):
            _check_number(name, getattr(self, name), zero=False)
        for name in ("cluster_loss_weight", "sorting_loss_weight"):
            _check_number(name, getattr(self, name), zero=True)
        if not isinstance(self.verbose, bool | np.bool_):
            raise TypeError(f"verbose must be True or False, got {self.verbose!r}")
        if self.similarity == "dot" and (self.cluster_loss_weight or self.sorting_loss_weight):
            warnings.warn(
                'similarity="dot" with clustering losses: the inner product has no bound, so the losses fall for ever'
                ' and the centroids collapse into one direction; use similarity="cosine", or weights of 0',
                stacklevel=3,
            )

    @property
    def _n_features_out(self) -> int:
        """How many names `get_feature_names_out` makes; only after `fit`."""
        return len(self.cluster_centers_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


def _check_number(name: str, value: Any, *, zero: bool) -> None:
    """Raise unless `value` is a finite number above 0, or 0 where `zero` allows it."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be a finite number {'of at least' if zero else 'above'} 0, got {value}")


def _root_mean_square(X: np.ndarray) -> float:
    """Of all numbers of `X` `(n, d)`, as a number above 0 of the type of `X`; 1 where all are zero."""
    largest = float(max(X.max(), -X.min()))
    if largest == 0:
        return 1.0
    shares = X / largest  # squares of the numbers themselves may underflow or overflow
    mean = np.einsum("ij,ij->i", shares, shares, dtype=np.float64).mean() / X.shape[1]
    # Rounded to the type of X it may be 0 next to the smallest numbers of the type.
    return float(X.dtype.type(largest * math.sqrt(mean))) or largest


def _directions(rows: np.ndarray) -> np.ndarray:
    """Rows `(n, d)` scaled to length 1; a row of length 0 stays 0."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    shares = rows / np.where(largest == 0, 1, largest)  # their squares neither underflow nor overflow
    lengths = np.linalg.norm(shares, axis=1, keepdims=True)
    return shares / np.where(lengths == 0, 1, lengths)


@contextmanager
def _training_on_the_cpu() -> Iterator[None]:
    """Gradients and tensors on the CPU in full precision, whatever the caller has set: rows come from numpy."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _error_console() -> Any:
    from rich.console import Console

    return Console(file=sys.stderr)
