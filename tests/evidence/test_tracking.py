"""Trackers: the figures that they get are those of the run."""

from typing import Any

import numpy as np
import pytest
import torch

from support.forged import network, samples
from wassail.errors import InputError
from wassail.evidence.tracking import Evaluator, log_to_wandb, metrics, raw_model, tracked

OPTIONS: dict[str, Any] = {"eps": 0.05, "order": [1, "inf"], "passes": 20, "certify": "crown"}
BOX: dict[str, Any] = {"low": [0.0, 0.0], "high": [1.0, 1.0]}


def test_the_metrics_are_those_of_the_run() -> None:
    torch.set_num_threads(1)
    x, y = samples()
    run = tracked(network(), x.numpy(), y.numpy(), OPTIONS | BOX)
    found = metrics(run, [run.require("accuracy>=0.99 clean")])
    certified, attacked = run.curve(1)(0.05)
    assert found["wassail/certified/p1/eps0.05"] == certified
    assert found["wassail/attacked/p1/eps0.05"] == attacked
    assert found["wassail/requirement_1_holds"] == 0.0
    assert found["wassail/clean"] == pytest.approx(11 / 12)
    few = tracked(network(), x.numpy(), y.numpy(), OPTIONS | BOX | {"n": 4})
    assert len(few) == 4


def test_what_is_refused() -> None:
    x, y = samples()
    with pytest.raises(InputError, match="needs a budget"):
        tracked(network(), x.numpy(), y.numpy(), {})
    with pytest.raises(InputError, match="given predictions"):
        raw_model(None)
    with pytest.raises(InputError, match="scikit-learn and PyTorch"):
        raw_model(object())
    assert Evaluator.can_evaluate(model_type="classifier", evaluator_config=None)
    assert not Evaluator.can_evaluate(model_type="regressor", evaluator_config=None)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # MLflow warns of what its own libraries will drop
def test_mlflow(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    linear = pytest.importorskip("sklearn.linear_model")
    import pandas

    monkeypatch.chdir(tmp_path)  # where MLflow puts its artefacts
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'ml.db'}")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(rng.normal(size=(30, 2)), columns=["a", "b"])
    frame["y"] = np.where(frame.a > 0, "yes", "no")
    model = linear.LogisticRegression().fit(frame[["a", "b"]], frame.y)
    with mlflow.start_run() as run:
        info = mlflow.sklearn.log_model(model, name="model")
        config = {"targets": "y", "model_type": "classifier", "evaluators": "wassail"}
        found = mlflow.models.evaluate(info.model_uri, frame, evaluator_config=OPTIONS, **config)
    kept = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert kept["wassail/certified/p1/eps0.05"] == found.metrics["wassail/certified/p1/eps0.05"]


@pytest.mark.slow
def test_wandb(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    x, y = samples()
    run = tracked(network(), x.numpy(), y.numpy(), OPTIONS | BOX)
    with wandb.init(mode="offline", project="wassail") as into:
        log_to_wandb(run, into)
        assert into.summary["wassail/clean"] == run.clean
