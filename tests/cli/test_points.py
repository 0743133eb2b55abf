"""`--points`: anyone's adversarial examples join a run."""

from pathlib import Path

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.cli.parser import main

INF = float("inf")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten samples, and points of which the first five are flips that no attack comes near."""
    monkeypatch.chdir(tmp_path)
    x, y = (t[:10] for t in ws.zoo.data())
    np.savez("data.npz", x=x.numpy(), y=y.numpy())
    flips = ws.nearest(ws.zoo.load("digits-mlp"), x, y, INF, passes=200)
    assert flips.success.all() and (flips.distances > 0).all()
    points = torch.where((torch.arange(10) < 5)[:, None, None, None], flips.points, x)
    torch.save(points, "adv.pt")
    torch.save(points[:7], "short.pt")
    torch.save(points.long(), "whole.pt")
    return tmp_path


def run(*words: str) -> int:
    return main(
        f"evaluate digits-mlp --data data.npz --eps 0.1 --order 1 inf --no-look --quiet "
        f"--attacks fgsm {' '.join(words)}".split()
    )


def test_points_are_looked_at_counted_and_used(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--points", "adv.pt", "--out", "run", "--chunk", "4") == 0
    said = capsys.readouterr().out
    assert "adv.pt: of 10 points 5 are flips of samples that were right" in said
    found = ws.Evaluation.load("run")
    flips = (found.distances > 0) & found.distances.isfinite()
    used = found.found_by[flips] == found.methods.index("points")
    assert f"{int(used.sum())} are the nearest flips known" in said and used.sum() > 0
    x, y = (t[:10] for t in ws.zoo.data())
    model = ws.zoo.load("digits-mlp")
    alone = ws.Flips.from_points(model, x, y, torch.load("adv.pt"), INF)
    assert (found.distances[:5] <= alone.distances[:5]).all()
    assert bool(found.verify(model, seed=0))


def test_points_join_a_run_that_is_there(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--out", "run") == 0
    before = ws.Evaluation.load("run").distances
    assert run("--out", "run", "--resume", "--points", "adv.pt") == 0
    after = ws.Evaluation.load("run").distances
    assert (after <= before).all() and (after < before).any()


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("short.pt", "the points have shape (7, 1, 8, 8)"),
        ("whole.pt", "holds no points"),
        ("data.npz", "cannot read points from 'data.npz'"),
        ("none.pt", "'none.pt': No such file"),
    ],
)
def test_points_that_do_not_fit(
    file: str, words: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--points", file) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
