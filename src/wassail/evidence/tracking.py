"""Evaluations in the trackers that people have: an evaluator for MLflow, a table for Weights &
Biases. Both libraries are imported when they are used, and never required.

    mlflow.models.evaluate(model, frame, targets="y", model_type="classifier",
                           evaluators="wassail", evaluator_config={"eps": 0.02})
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wassail.errors import InputError, unknown
from wassail.evaluation.protocol import evaluate
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import Verdict, check
from wassail.report.card import model_card
from wassail.report.machine import as_json
from wassail.report.page import write_report
from wassail.threat import Threat
from wassail.writing import save
from wassail.zoo.estimators import Unseen, from_estimator
from wassail.zoo.features import Features
from wassail.zoo.samples import Data
from wassail.zoo.tables import is_frame

OPTIONS = (
    "eps",
    "norm",
    "order",
    "attacks",
    "certify",
    "effort",
    "passes",
    "n",
    "seed",
    "low",
    "high",
    "scale",
    "domain",
    "require",
)
FOLDER = "wassail"  # of the artefacts
NO_EPS = 'wassail needs a budget: evaluator_config={"eps": 0.02}.'


class Evaluator:
    """The evaluator `wassail` of `mlflow.models.evaluate`: robust accuracy from both sides.

    `evaluator_config` has `eps`, and perhaps `norm`, `order` (one or a list), `attacks`, `certify`,
    `effort`, `passes`, `n`, `seed`, `require` (a list of requirements); for tables `low`, `high`,
    `scale` (one number for each column; default the range of the data), for other samples `domain`.
    """

    @classmethod
    def can_evaluate(cls, *, model_type: str, evaluator_config: Any, **kwargs: Any) -> bool:
        """Whether the model is a classifier.

        Args:
            model_type: as MLflow names it.
            evaluator_config: of this evaluator.
            kwargs: what MLflow may add.
        """
        return model_type == "classifier"

    def evaluate(
        self,
        *,
        model_type: str,
        dataset: Any,
        run_id: str,
        evaluator_config: Mapping[str, Any] | None,
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluate, log metrics and the page, and return MLflow's result.

        Args:
            model_type: "classifier".
            dataset: MLflow's, with `features_data` and `labels_data`.
            run_id: of the run to log to.
            evaluator_config: see the class.
            model: a pyfunc model of scikit-learn or of PyTorch.
            kwargs: what MLflow may add.
        """
        from mlflow import MlflowClient
        from mlflow.models import EvaluationResult

        options = dict(evaluator_config or {})
        for name in options:
            if name not in OPTIONS:
                raise unknown("option of wassail's evaluator,", name, OPTIONS)
        raw = raw_model(model)
        run = tracked(raw, dataset.features_data, dataset.labels_data, options)
        verdicts = [check(run, text) for text in options.get("require", ())]
        found = metrics(run, verdicts)
        client = MlflowClient()
        for name, value in found.items():
            client.log_metric(run_id, name, value)
        with tempfile.TemporaryDirectory(prefix="wassail-") as made:
            for path in _artefacts(run, verdicts, Path(made)):
                client.log_artifact(run_id, str(path), FOLDER)
        return EvaluationResult(metrics=found, artifacts={}, run_id=run_id)


def raw_model(model: Any) -> Any:
    """The model inside MLflow's wrapper.

    Args:
        model: a pyfunc model.
    """
    if model is None:
        raise InputError("wassail evaluates a model, and was given predictions: give the model.")
    try:
        return model.get_raw_model()
    except (AttributeError, NotImplementedError):
        raise InputError(
            "wassail reads models of scikit-learn and PyTorch: log it as one of these."
        ) from None


def tracked(raw: Any, features: Any, labels: Any, options: Mapping[str, Any]) -> Evaluation:
    """The evaluation of a model of scikit-learn or PyTorch on a table or an array.

    Args:
        raw: the model.
        features: a data frame, or an array `(N, *shape)`.
        labels: `(N,)`, class numbers, or names of scikit-learn's classes.
        options: see `Evaluator`.
    """
    if "eps" not in options:
        raise InputError(NO_EPS)
    torch_model = isinstance(raw, nn.Module)
    model = raw if torch_model else from_estimator(raw)
    exact = not isinstance(model, Unseen)  # those have no structure to certify
    y = _numbered(labels, None if torch_model else raw.classes_)
    model, data, domain = _boxed(
        model, features, y, options, torch.float32 if torch_model else None
    )
    orders = options.get("order", (1, 2, math.inf))
    listed = orders if isinstance(orders, (list, tuple)) else (orders,)
    norm = options.get("norm", "inf")
    threats = [Threat(norm, order, options["eps"], domain) for order in listed]
    return evaluate(
        model,
        data,
        threats,
        options.get("attacks", ("nearest",)),
        certify=options.get("certify", "auto" if exact else None),
        effort=options.get("effort", 0.3) if exact else None,
        passes=options.get("passes", 100),
        seed=options.get("seed", 0),
        name=type(raw).__name__,
    )


def _numbered(labels: Any, classes: Any) -> Tensor:
    """Labels as class numbers."""
    given = np.asarray(labels)
    if classes is None:
        return torch.from_numpy(given.astype(np.int64))
    places = {value: place for place, value in enumerate(np.asarray(classes).tolist())}
    lost = [value for value in given.tolist() if value not in places]
    if lost:
        raise InputError(f"the model has no class {lost[0]!r}: give labels that it knows.")
    return torch.tensor([places[value] for value in given.tolist()])


def _boxed(
    model: Any, features: Any, y: Tensor, options: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[Any, Data | tuple[Tensor, Tensor], tuple[float, float]]:
    """Model, data and domain: tables in the variable in which all features have one box."""
    names = [str(name) for name in features.columns] if is_frame(features) else ()
    rows = features.to_numpy() if is_frame(features) else np.asarray(features)
    x = torch.from_numpy(np.array(rows, dtype=np.float64))
    if options.get("n") is not None:
        x, y = x[: options["n"]], y[: options["n"]]
    if x.ndim != 2:
        least, most = options.get("domain", (0.0, 1.0))
        return model, (x.to(dtype or x.dtype), y), (float(least), float(most))
    low, high = options.get("low", x.amin(0).tolist()), options.get("high", x.amax(0).tolist())
    box = Features(low, high, options.get("scale"), names)
    inner = box.model(model)
    return inner, box.data(x, y, "MLflow's data", dtype=dtype or torch.float64), box.domain


def metrics(run: Evaluation, verdicts: list[Verdict]) -> dict[str, float]:
    """Figures under names that trackers accept.

    Args:
        run: the evaluation.
        verdicts: the requirements that were checked.
    """
    found = {"wassail/clean": run.clean}
    for threat, *values in _rows(run):
        where = f"p{threat.order:g}/eps{threat.eps:g}"
        named = zip(("certified", "attacked", "population_at_least", "population_at_most"), values)
        found |= {f"wassail/{name}/{where}": value for name, value in named if value is not None}
    for place, verdict in enumerate(verdicts, 1):
        found[f"wassail/requirement_{place}_holds"] = float(bool(verdict))
    return found


def _rows(
    run: Evaluation,
) -> Iterator[tuple[Threat, float | None, float, float | None, float]]:
    """Each threat: both sides on the samples, then for all inputs; None where nothing is proved."""
    proved = run.radii is not None
    for threat in run.threats:
        curve = run.curve(threat.order)
        certified, attacked = curve(threat.eps)
        low, high = curve.population(0.95)(threat.eps)
        yield threat, certified if proved else None, attacked, low if proved else None, high


def _artefacts(run: Evaluation, verdicts: list[Verdict], folder: Path) -> list[Path]:
    """The page, the figures for machines and the section of a model card."""
    figures = json.dumps(as_json(run, verdicts), indent=1) + "\n"
    return [
        write_report(run, folder / "report.html"),
        save(folder / "evaluation.json", figures),
        save(folder / "card.md", model_card(run, verdicts)),
    ]


def log_to_wandb(run: Evaluation, into: Any = None) -> None:
    """Log the figures of a run as a table of Weights & Biases, and as summary values.

    Args:
        run: the evaluation.
        into: a run of `wandb.init`; default None, the current one.
    """
    try:
        import wandb
    except ImportError:
        raise InputError("this needs the package wandb: pip install wandb.") from None
    target = wandb.run if into is None else into
    if target is None:
        raise InputError("there is no run of Weights & Biases: call wandb.init first.")
    columns = ["threat", "certified", "attacked", "at least, all inputs", "at most, all inputs"]
    rows = [[str(threat), *values] for threat, *values in _rows(run)]
    target.log({"wassail": wandb.Table(columns=columns, data=rows), **metrics(run, [])})
