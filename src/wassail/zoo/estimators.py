"""scikit-learn estimators as models: linear ones, perceptrons and scalers before them exactly, in
float64; any other one by its predictions, without gradients.

Nothing here imports scikit-learn: an estimator says by its class and its fitted attributes what it
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wassail.errors import InputError

LINEAR = (
    *("LogisticRegression", "LogisticRegressionCV", "LinearSVC", "SGDClassifier"),
    *("RidgeClassifier", "RidgeClassifierCV", "Perceptron"),
    *("PassiveAggressiveClassifier", "LinearDiscriminantAnalysis"),
)
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
}

LEAD = 1e-6  # of the class that is predicted, where probabilities do not give it one


class Scaled(nn.Module):
    """`x * factor + offset`, one of each for every feature."""

    factor: Tensor
    offset: Tensor

    def __init__(self, factor: Any, offset: Any, size: int) -> None:
        super().__init__()
        for name, values in (("factor", factor), ("offset", offset)):
            plain = torch.from_numpy(np.array(np.broadcast_to(values, (size,)), dtype=np.float64))
            self.register_buffer(name, plain)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled features, `(n, F) -> (n, F)`."""
        return x * self.factor + self.offset


class Unseen(nn.Module):
    """The probabilities, or else the votes, of an estimator: numbers without a gradient."""

    def __init__(self, estimator: Any) -> None:
        super().__init__()
        self.estimator = estimator

    def forward(self, x: Tensor) -> Tensor:
        """Scores `(n, K)` in float64; zero gradients.

        x: features, `(n, F)`.
        """
        rows = x.detach().cpu().double().numpy()
        classes = np.asarray(self.estimator.classes_)
        voted = np.asarray(self.estimator.predict(rows))[:, None] == classes[None, :]
        scores = voted.astype(np.float64)
        if hasattr(self.estimator, "predict_proba"):
            scores = np.asarray(self.estimator.predict_proba(rows), dtype=np.float64)
        scores = scores - 1 / len(classes)
        # The prediction decides, also where probabilities are tied or say something else.
        behind = np.where(voted, -np.inf, scores).max(1) + LEAD
        scores = np.where(voted, np.maximum(scores, behind[:, None]), scores)
        # A zero that depends on x: attacks ask for gradients, and get zeros.
        return torch.from_numpy(scores).to(x.device) + 0.0 * x.double().sum(1, keepdim=True)


def from_estimator(estimator: Any, gradients: bool | None = None) -> nn.Module:
    """A classifier of scikit-learn as a module from features `(n, F)` in float64 to logits
    `(n, K)`, in the order of its `classes_`.

    Linear classifiers, `MLPClassifier`, and pipelines of scalers before them are converted: the
    logits are those of `decision_function` to rounding (of two classes: half of it, with both
    signs), and for a perceptron those behind `predict_proba`. Radii and gradients then are those of
    the estimator. Any other estimator is called as it is, and can be attacked without gradients.

    Args:
        estimator: a fitted classifier, or a `Pipeline` that ends in one.
        gradients: True refuses what cannot be converted; False converts nothing; default None.
    """
    _check_fitted(estimator)
    steps = [step for _, step in estimator.steps] if hasattr(estimator, "steps") else [estimator]
    *before, last = [step for step in steps if step is not None and step != "passthrough"]
    known = all(_is_scaler(step) for step in before) and _kind(last) in (*LINEAR, "MLPClassifier")
    if gradients is False or not (known or gradients):
        return Unseen(estimator).eval()
    if not known:
        strange = next((s for s in before if not _is_scaler(s)), last)
        raise InputError(
            f"{type(strange).__name__} cannot be written in torch: leave gradients out, and it is "
            "attacked without."
        )
    size = int(np.asarray(getattr(last, "coefs_", [getattr(last, "coef_", None)])[0]).shape[-1])
    if _kind(last) == "MLPClassifier":
        size = int(np.asarray(last.coefs_[0]).shape[0])
        layers = _perceptron(last)
    else:
        layers = [_affine(np.atleast_2d(last.coef_), np.atleast_1d(last.intercept_))]
    if layers[-1].out_features == 1:
        layers.append(_affine(np.array([[-0.5], [0.5]]), np.zeros(2)))
    return nn.Sequential(*(_scaler(step, size) for step in before), *layers).eval()


def _kind(estimator: Any) -> str:
    """The class of an estimator of scikit-learn, "" for one of another library."""
    kind = type(estimator)
    return kind.__name__ if kind.__module__.split(".")[0] == "sklearn" else ""


def _check_fitted(estimator: Any) -> None:
    classes = getattr(estimator, "classes_", None)
    if classes is None or np.ndim(classes) != 1 or not hasattr(estimator, "predict"):
        raise InputError(
            f"{type(estimator).__name__} is no fitted classifier of one label: fit it first."
        )


def _is_scaler(step: Any) -> bool:
    kinds = ("StandardScaler", "MinMaxScaler", "MaxAbsScaler", "RobustScaler")
    return _kind(step) in kinds and not getattr(step, "clip", False)


def _scaler(step: Any, size: int) -> Scaled:
    """`x * factor + offset` of a fitted scaler."""
    if _kind(step) == "MinMaxScaler":
        return Scaled(step.scale_, step.min_, size)
    scale = getattr(step, "scale_", None)
    factor = 1.0 / np.asarray(1.0 if scale is None else scale, dtype=np.float64)
    centre = getattr(step, "mean_" if _kind(step) == "StandardScaler" else "center_", None)
    if centre is None or not getattr(step, "with_mean", True):
        centre = 0.0
    return Scaled(factor, -np.asarray(centre, dtype=np.float64) * factor, size)


def _affine(weight: Any, bias: Any) -> nn.Linear:
    weight = np.asarray(weight, dtype=np.float64)
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        shift = np.broadcast_to(np.asarray(bias, dtype=np.float64), (weight.shape[0],))
        layer.bias.copy_(torch.from_numpy(np.array(shift)))
    return layer


def _perceptron(last: Any) -> list[Any]:
    """The layers before the softmax, or before the logistic function of two classes."""
    if last.activation not in ACTIVATIONS or last.out_activation_ not in ("softmax", "logistic"):
        raise InputError(
            f"a perceptron with {last.activation!r} and {last.out_activation_!r} is not known: "
            "leave gradients out."
        )
    layers: list[Any] = []
    for place, (weight, bias) in enumerate(zip(last.coefs_, last.intercepts_)):
        layers += [ACTIVATIONS[last.activation]()] if place else []
        layers.append(_affine(np.asarray(weight).T, bias))
    return layers
