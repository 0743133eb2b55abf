"""`mlflow.models.evaluate(..., evaluators="wassail")` against MLflow's own server and its stores.

MLflow is in no extra, so these run where it is installed beside an installed wassail.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

OPTIONS = {
    "eps": 0.05,
    "order": [1, "inf"],
    "passes": 20,
    "certify": "crown",
    "require": ["accuracy>=0.9 clean", "accuracy>=0.999 at eps 0.05 order 1 proved"],
}
SECONDS = 120  # for the server to answer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """MLflow's server on this machine, with a database and a folder of artefacts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    stores = ["--backend-store-uri", f"sqlite:///{tmp_path / 'ml.db'}"]
    stores += ["--artifacts-destination", (tmp_path / "artefacts").as_uri()]
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *stores]
    command = [sys.executable, "-m", "mlflow", *words]
    with open(tmp_path / "server.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process)
        yield address
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the server and its workers; without a word if they do not end of themselves."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait(address: str, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(SECONDS * 2):
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not answer in {SECONDS} s")


def frame_and_model() -> tuple[Any, Any]:
    """Two columns, names of classes, and a logistic regression."""
    pandas = pytest.importorskip("pandas")
    linear = pytest.importorskip("sklearn.linear_model")
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(30, 2)), columns=["a", "b"])
    frame["y"] = np.where(frame.a > 0, "yes", "no")
    return frame, linear.LogisticRegression().fit(frame[["a", "b"]], frame.y)


def evaluated() -> tuple[Any, str]:
    """MLflow's result of a logged model, and the run."""
    frame, model = frame_and_model()
    mlflow.set_experiment("wassail")
    with mlflow.start_run() as run:
        info = mlflow.sklearn.log_model(model, name="model", serialization_format="pickle")
        found = mlflow.models.evaluate(
            info.model_uri,
            frame,
            targets="y",
            model_type="classifier",
            evaluators="wassail",
            evaluator_config=OPTIONS,
        )
    return found, run.info.run_id


def check(found: Any, run_id: str, tmp_path: Path) -> None:
    """The metrics and artefacts are in the store, and they are those of the run."""
    import wassail as ws

    kept = mlflow.MlflowClient().get_run(run_id).data.metrics
    mine = {name: value for name, value in kept.items() if name.startswith("wassail/")}
    assert mine == found.metrics and mine["wassail/requirement_2_holds"] == 0
    assert mine["wassail/certified/p1/eps0.05"] <= mine["wassail/attacked/p1/eps0.05"] < 1
    names = {file.path for file in mlflow.MlflowClient().list_artifacts(run_id, "wassail")}
    assert names == {f"wassail/{name}" for name in ("report.html", "evaluation.json", "card.md")}
    folder = Path(mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path="wassail"))
    stated = json.loads((folder / "evaluation.json").read_text())
    assert (
        stated["clean"] == mine["wassail/clean"] and stated["versions"]["wassail"] == ws.__version__
    )
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_local_server(server: str, tmp_path: Path) -> None:
    mlflow.set_tracking_uri(server)
    found, run_id = evaluated()
    check(found, run_id, tmp_path)


def test_the_database_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'ml.db'}")
    found, run_id = evaluated()
    check(found, run_id, tmp_path)


def test_the_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    found, run_id = evaluated()
    check(found, run_id, tmp_path)
    assert list((tmp_path / "mlruns").rglob("wassail/report.html"))
