"""Estimators of scikit-learn as modules: the same logits, and attacks on those that are none."""

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.errors import InputError
from wassail.zoo.estimators import from_estimator

sklearn = pytest.importorskip("sklearn")
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.linear_model import LogisticRegression, RidgeClassifier, SGDClassifier  # noqa: E402
from sklearn.neural_network import MLPClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import (  # noqa: E402
    MaxAbsScaler,
    MinMaxScaler,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)
from sklearn.svm import SVC, LinearSVC  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # fits that have not converged


def table(classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(classes)
    x = rng.normal(3, 2, (120, 4)) * [1, 10, 0.1, 5]
    y = np.digitize(x[:, 0] + x[:, 1] / 10, np.linspace(4, 8, classes - 1))
    return x, np.array(["a", "b", "c", "d"])[y]


LINEAR = [LogisticRegression(), LinearSVC(), SGDClassifier(random_state=0), RidgeClassifier()]
SCALERS = [None, StandardScaler(), StandardScaler(with_mean=False), MinMaxScaler((-1, 2))]
SCALERS += [MaxAbsScaler(), RobustScaler(), RobustScaler(with_centering=False)]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("scaler", SCALERS, ids=str)
@pytest.mark.parametrize("last", LINEAR, ids=lambda e: type(e).__name__)
def test_linear_ones_are_exact(classes: int, scaler: object, last: object) -> None:
    x, y = table(classes)
    whole = (make_pipeline(scaler, last) if scaler is not None else last).fit(x, y)
    z = from_estimator(whole, True)(torch.from_numpy(x)).detach().numpy()
    score = whole.decision_function(x)
    expected = np.stack([-score / 2, score / 2], 1) if classes == 2 else score
    assert np.abs(z - expected).max() <= 1e-12 * max(1, np.abs(expected).max())
    assert (whole.classes_[z.argmax(1)] == whole.predict(x)).all()


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("activation", ["identity", "relu", "tanh", "logistic"])
def test_perceptrons_are_exact(classes: int, activation: str) -> None:
    x, y = table(classes)
    net = MLPClassifier((8, 5), activation=activation, max_iter=30, random_state=0)
    whole = make_pipeline(StandardScaler(), net).fit(x, y)
    z = from_estimator(whole, True)(torch.from_numpy(x))
    assert np.abs(z.softmax(1).detach().numpy() - whole.predict_proba(x)).max() <= 1e-12


def test_a_converted_one_is_certified() -> None:
    x, y = table(2)
    whole = make_pipeline(MinMaxScaler(), LogisticRegression()).fit(x, y)
    model = from_estimator(whole)
    labels = torch.from_numpy(np.searchsorted(whole.classes_, y))
    points = torch.from_numpy(x)
    radii = ws.radii(model, points[:20], labels[:20], norm=2, domain=None, method="crown")
    score = whole.decision_function(x[:20])
    slope = whole[-1].coef_[0] * whole[0].scale_
    distance = np.abs(score) / np.linalg.norm(slope)
    right = whole.predict(x[:20]) == y[:20]
    assert np.allclose(radii.values.numpy()[right], distance[right], rtol=1e-6)
    assert (radii.values.numpy()[right] <= distance[right] * (1 + 1e-9)).all()


def test_others_are_attacked_without_gradients() -> None:
    x, y = table(3)
    x = (x - x.min(0)) / (x.max(0) - x.min(0))
    forest = RandomForestClassifier(8, random_state=0).fit(x, y)
    model = from_estimator(forest)
    points = torch.from_numpy(x[:10])
    labels = torch.from_numpy(np.searchsorted(forest.classes_, y[:10]))
    flips = ws.nearest(model, points, labels, norm="inf", passes=200)
    moved = torch.isfinite(flips.distances) & (flips.distances > 0)
    assert int(moved.sum()) >= 5
    said = forest.predict(flips.points[moved].numpy())
    assert (said != forest.classes_[labels[moved]]).all()
    svm = from_estimator(SVC().fit(x, y))  # no probabilities: votes
    assert (svm(points).argmax(1).numpy() == np.searchsorted(forest.classes_, y[:10])).mean() > 0.5
    assert (svm.estimator.classes_[svm(points).argmax(1)] == svm.estimator.predict(x[:10])).all()


def test_what_is_refused() -> None:
    x, y = table(2)
    with pytest.raises(InputError, match="no fitted classifier"):
        from_estimator(LogisticRegression())
    bent = make_pipeline(PolynomialFeatures(), LogisticRegression()).fit(x, y)
    with pytest.raises(InputError, match="PolynomialFeatures cannot be written"):
        from_estimator(bent, True)
    clipped = make_pipeline(MinMaxScaler(clip=True), LogisticRegression()).fit(x, y)
    assert type(from_estimator(clipped)).__name__ == "Unseen"
