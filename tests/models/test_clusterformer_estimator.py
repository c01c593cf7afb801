"""The clustering alone, as a scikit-learn estimator."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from hf_effattn.models.clusterformer.estimator import NeuralClustering


def directions(rows=300, groups=6, seed=0):
    """Rows around directions that are far apart, of any length, and which direction each is of."""
    random = np.random.default_rng(seed)
    centers = np.eye(groups, 8) + 0.1 * random.standard_normal((groups, 8))
    group = np.arange(rows) % groups
    noise = 0.05 * random.standard_normal((rows, 8))
    return (centers[group] + noise) * random.uniform(0.5, 2.0, (rows, 1)), group


@parametrize_with_checks([NeuralClustering(n_clusters=2, max_iter=30, random_state=0)])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


def test_finds_directions_and_predicts_what_it_labelled():
    X, group = directions()
    fitted = NeuralClustering(12, max_iter=200, random_state=0).fit(X)
    assert fitted.cluster_centers_.shape == (12, 8)
    assert fitted.losses_.shape == (200, 2)
    assert fitted.losses_[-1, 0] < fitted.losses_[0, 0]
    assert np.array_equal(fitted.predict(X), fitted.labels_)
    # No cluster has rows of two directions.
    assert all(len(np.unique(group[fitted.labels_ == j])) == 1 for j in np.unique(fitted.labels_))


def test_a_label_does_not_depend_on_the_rows_beside_it():
    X, _ = directions()
    fitted = NeuralClustering(6, max_iter=20, random_state=0).fit(X)
    assert np.array_equal(np.concatenate([fitted.predict(row[None]) for row in X[:40]]), fitted.predict(X)[:40])
    assert np.array_equal(fitted.transform(X).argmax(axis=1), fitted.predict(X))


def test_same_seed_same_clusters():
    X, _ = directions()
    model = NeuralClustering(6, max_iter=20, random_state=3)
    first, second = (clone(model).fit(X) for _ in range(2))
    assert np.array_equal(first.cluster_centers_, second.cluster_centers_)


def test_progress_is_shown_where_it_is_asked_for(capsys):
    X, _ = directions()
    NeuralClustering(6, max_iter=5, random_state=0, verbose=True).fit(X)
    assert "clustering" in capsys.readouterr().err
    NeuralClustering(6, max_iter=5, random_state=0).fit(X)
    assert capsys.readouterr().err == ""


def test_mistakes_are_named():
    X, _ = directions(rows=5)
    with pytest.raises(ValueError, match="n_samples=5 should be >= n_clusters=6"):
        NeuralClustering(6).fit(X)
    with pytest.raises(ValueError, match="n_clusters must be at least 1"):
        NeuralClustering(0).fit(X)
