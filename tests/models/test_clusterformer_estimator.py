"""The clustering alone, as a scikit-learn estimator."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.metrics import adjusted_rand_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from hf_effattn.models.clusterformer.estimator import NeuralClustering


def directions(rows=300, groups=6, seed=0):
    """Rows around directions that are far apart, of any length, and which direction each is of."""
    random = np.random.default_rng(seed)
    centers = np.eye(groups, 8) + 0.1 * random.standard_normal((groups, 8))
    group = np.arange(rows) % groups
    noise = 0.05 * random.standard_normal((rows, 8))
    return (centers[group] + noise) * random.uniform(0.5, 2.0, (rows, 1)), group


@contextmanager
def default_device(device):
    """`torch.set_default_device` and the way back."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)  # a device here would stay a mode, which torch.compile sees


@pytest.mark.slow_except(
    "*_takes_y|*_object|*_nan_inf|*s_pickle|*_features_in|*_clustering|*_is_fitted|*_memmap_input|*d_1sample|*_invariance"
)
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
    assert np.array_equal(fitted.transform(X).argmax(axis=1), fitted.labels_)
    # No cluster has rows of two directions.
    assert all(len(np.unique(group[fitted.labels_ == j])) == 1 for j in np.unique(fitted.labels_))


def test_progress_is_shown_where_it_is_asked_for(capsys):
    X, _ = directions()
    NeuralClustering(6, max_iter=5, random_state=0, verbose=True).fit(X)
    assert "clustering" in capsys.readouterr().err
    NeuralClustering(6, max_iter=5, random_state=0).fit(X)
    assert capsys.readouterr().err == ""


@pytest.mark.slow_except("1e+300")
@pytest.mark.parametrize("unit", [1e-300, 255.0, 1e300])
def test_clusters_do_not_depend_on_the_unit_of_the_data(unit):
    """Adam's steps are absolute: on 255 times the data the centroids hardly moved from where they started."""
    X, _ = directions()
    model = NeuralClustering(6, max_iter=50, random_state=0)
    plain, scaled = model.fit(X), clone(model).fit(unit * X)
    assert np.array_equal(plain.labels_, scaled.labels_)
    np.testing.assert_allclose(scaled.cluster_centers_ / unit, plain.cluster_centers_, rtol=0, atol=4e-14)
    np.testing.assert_allclose(scaled.losses_, plain.losses_, rtol=0, atol=4e-15)
    np.testing.assert_allclose(scaled.transform(unit * X), plain.transform(X), rtol=0, atol=2e-14)


@pytest.mark.slow_except("1e-25")
@pytest.mark.parametrize("unit", [1e-25, 1e37])
def test_float32_rows_whose_squares_underflow_or_overflow(unit):
    X = directions()[0].astype(np.float32)
    fitted = NeuralClustering(6, max_iter=100, random_state=0).fit(np.float32(unit) * X)
    plain = NeuralClustering(6, max_iter=100, random_state=0).fit(X)
    assert fitted.cluster_centers_.dtype == np.float32
    assert np.isfinite(fitted.cluster_centers_).all()
    assert adjusted_rand_score(plain.labels_, fitted.labels_) > 0.99
    # The rows may also come in another precision than those of fit.
    assert np.array_equal(plain.predict(X.astype(np.float64)), plain.labels_)
    small = NeuralClustering(6, max_iter=20, random_state=0).fit(1e-60 * X.astype(np.float64))
    assert len(np.unique(small.predict(X))) > 1


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_data_of_zeros_only(dtype):
    X = np.zeros((10, 3), dtype)
    fitted = NeuralClustering(3, max_iter=3, random_state=0).fit(X)
    assert np.array_equal(fitted.labels_, np.zeros(10))
    assert np.array_equal(fitted.cluster_centers_, np.zeros((3, 3)))
    assert np.array_equal(fitted.transform(X), np.zeros((10, 3)))


def test_smallest_numbers_there_are():
    """The root mean square of data with few entries may be below the smallest number of their type."""
    X = np.zeros((40, 10), np.float32)
    X[np.arange(40), np.arange(40) % 2] = np.finfo(np.float32).smallest_subnormal
    fitted = NeuralClustering(2, max_iter=3, random_state=1).fit(X)
    assert np.isfinite(fitted.transform(X)).all()


def test_zero_rows_are_similar_to_nothing_and_do_not_disturb_the_others():
    X, group = directions()
    X[::10] = 0
    fitted = NeuralClustering(12, max_iter=200, random_state=0).fit(X)
    assert np.isfinite(fitted.cluster_centers_).all()
    assert np.array_equal(fitted.transform(X[::10]), np.zeros((30, 12)))
    others = group[np.arange(300) % 10 > 0], fitted.labels_[np.arange(300) % 10 > 0]
    assert all(len(np.unique(others[0][others[1] == j])) == 1 for j in np.unique(others[1]))


def test_inner_product():
    """Its memberships mean something in one unit only; the step is relative to the data there too."""
    X, _ = directions()
    with pytest.warns(UserWarning, match='similarity="dot" with clustering losses'):
        fitted = NeuralClustering(6, similarity="dot", max_iter=100, random_state=0).fit(X)
    assert fitted.losses_[-1, 0] < fitted.losses_[0, 0]
    np.testing.assert_allclose(fitted.transform(X), X @ fitted.cluster_centers_.T, rtol=1e-14)
    assert np.array_equal(fitted.predict(X), fitted.labels_)
    # The memberships of X with sharpness 15 are those of 10 X with sharpness .15.
    with pytest.warns(UserWarning, match="weights of 0"):
        scaled = NeuralClustering(6, similarity="dot", sharpness=0.15, max_iter=100, random_state=0).fit(10 * X)
    # But for Adam's epsilon, which is beside gradients of another size there.
    np.testing.assert_allclose(scaled.cluster_centers_ / 10, fitted.cluster_centers_, rtol=0, atol=8e-8)


def test_inner_product_without_losses_does_not_warn(recwarn):
    X, _ = directions()
    settings = {"similarity": "dot", "cluster_loss_weight": 0.0, "sorting_loss_weight": 0.0}
    NeuralClustering(6, max_iter=3, random_state=0, **settings).fit(X)
    NeuralClustering(6, max_iter=3, random_state=0).fit(X)
    assert len(recwarn) == 0


@pytest.mark.filterwarnings("ignore:similarity=.dot.:UserWarning")
@pytest.mark.parametrize(
    ("settings", "unit"), [({"similarity": "dot"}, 1e200), ({"learning_rate": 1e308}, 1.0)], ids=["dot", "step"]
)
def test_training_that_overflows_is_told(settings, unit):
    X, _ = directions()
    with pytest.raises(ValueError, match="training overflowed float64: it needs a lower learning_rate"):
        NeuralClustering(6, max_iter=10, random_state=0, **settings).fit(unit * X)


@pytest.mark.parametrize(
    "layout",
    [
        lambda X: np.ascontiguousarray(X[::-1])[::-1],
        lambda X: np.ascontiguousarray(X[:, ::-1])[:, ::-1],
        np.asfortranarray,
        lambda X: np.repeat(X, 2, axis=0)[::2],
    ],
    ids=["rows reversed", "columns reversed", "Fortran order", "every other row"],
)
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.filterwarnings("ignore:similarity=.dot.:UserWarning")
def test_any_layout_in_memory(layout, similarity):
    X, _ = directions()
    other = layout(X)
    assert np.array_equal(other, X)
    other.flags.writeable = False
    model = NeuralClustering(6, similarity=similarity, max_iter=10, random_state=0)
    plain, fitted = model.fit(X), clone(model).fit(other)
    assert np.array_equal(fitted.cluster_centers_, plain.cluster_centers_)
    assert np.array_equal(fitted.predict(other), plain.predict(X))
    np.testing.assert_allclose(fitted.transform(other), plain.transform(X), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: default_device("meta"),
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["no_grad", "inference_mode", "default device", "device context", "autocast"],
)
def test_settings_of_torch_do_not_matter(context):
    X, _ = directions()
    model = NeuralClustering(6, max_iter=10, random_state=0)
    plain = model.fit(X.astype(np.float32))
    with context():
        fitted = clone(model).fit(X.astype(np.float32))
        labels, similarities = fitted.predict(X), fitted.transform(X)
    assert np.array_equal(fitted.cluster_centers_, plain.cluster_centers_)
    assert np.array_equal(fitted.losses_, plain.losses_)
    assert np.array_equal(labels, plain.predict(X))
    assert np.array_equal(similarities, plain.transform(X))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"n_clusters": 2.0}, TypeError, "n_clusters must be an int, got float"),
        ({"max_iter": 0}, ValueError, "max_iter must be at least 1, got 0"),
        ({"batch_size": True}, TypeError, "batch_size must be an int, got bool"),
        ({"similarity": "euclidean"}, ValueError, "similarity must be one of 'dot', 'cosine', got 'euclidean'"),
        ({"sharpness": 0}, ValueError, "sharpness must be a finite number above 0, got 0"),
        ({"sharpness": np.inf}, ValueError, "sharpness must be a finite number above 0, got inf"),
        ({"sharpness": "15"}, TypeError, "sharpness must be a number, got str"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate must be a finite number above 0, got 0.0"),
        ({"learning_rate": -0.1}, ValueError, "learning_rate must be a finite number above 0, got -0.1"),
        ({"learning_rate": np.nan}, ValueError, "learning_rate must be a finite number above 0, got nan"),
        ({"learning_rate": None}, TypeError, "learning_rate must be a number, got NoneType"),
        ({"cluster_loss_weight": -1.0}, ValueError, "cluster_loss_weight must be a finite number of at least 0"),
        ({"cluster_loss_weight": np.nan}, ValueError, "cluster_loss_weight must be a finite number of at least 0"),
        ({"sorting_loss_weight": np.inf}, ValueError, "sorting_loss_weight must be a finite number of at least 0"),
        ({"sorting_loss_weight": True}, TypeError, "sorting_loss_weight must be a number, got bool"),
        ({"verbose": "yes"}, TypeError, "verbose must be True or False, got 'yes'"),
        ({"verbose": 2}, TypeError, "verbose must be True or False, got 2"),
        ({"random_state": "seed"}, ValueError, "seed"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_named(settings, error, message):
    X, _ = directions()
    with pytest.raises(error, match=message):
        NeuralClustering(**{"n_clusters": 6, "max_iter": 3} | settings).fit(X)


def test_numbers_of_numpy_are_settings_too():
    X, _ = directions()
    settings = {"sharpness": np.float32(15), "learning_rate": np.float64(0.1), "cluster_loss_weight": np.int64(1)}
    fitted = NeuralClustering(np.int64(6), max_iter=np.int32(3), verbose=np.False_, **settings).fit(X)
    assert fitted.cluster_centers_.shape == (6, 8)


def test_mistakes_are_named():
    X, _ = directions(rows=5)
    with pytest.raises(ValueError, match="n_samples=5 should be >= n_clusters=6"):
        NeuralClustering(6).fit(X)
    with pytest.raises(ValueError, match="n_clusters must be at least 1"):
        NeuralClustering(0).fit(X)
