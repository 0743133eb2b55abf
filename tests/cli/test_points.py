"""`--points`: anyone's adversarial examples join a run."""

from pathlib import Path

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.cli.parser import main
from wassail.zoo.points import read_points

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
    np.savez("adv.npz", y=y.numpy(), x_adv=points.numpy())
    np.savez_compressed("alone.npz", points.numpy())
    np.savez("whole.npz", points.long().numpy())
    np.savez("empty.npz")
    Path("junk.npz").write_bytes(b"junk")
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


def test_points_at_eps_in_float32_count_at_eps(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = (t[:10] for t in ws.zoo.data())
    flips = ws.nearest(model, x, y, INF, passes=200)
    full = (x + 0.1 * (flips.points - x).sign()).clamp(0, 1)
    lead = x + torch.where(flips.points == x, 0.0, full - x)
    left = float((model(lead).argmax(1) == y).double().mean())
    assert ((lead.double() - x.double()).abs().flatten(1).amax(1) > 0.1).any() and left < 0.5
    torch.save(lead, "lead.pt")
    words = "evaluate digits-mlp --data data.npz --eps 0.05 0.1 --order inf --no-look --quiet"
    assert main(f"{words} --attacks fgsm --points lead.pt --out run".split()) == 0
    found = ws.Evaluation.load("run")
    row = next(row for row in found.rows if row.attack == "points" and row.threat.eps == 0.1)
    assert row.accuracy == pytest.approx(left)
    assert not any("beyond eps" in finding.text for finding in found.findings)


@pytest.mark.parametrize("file", ["adv.npz", "alone.npz"])
def test_points_of_numpy_are_read(file: str, made: Path) -> None:
    assert torch.equal(read_points(file), torch.load("adv.pt"))
    assert run("--points", "adv.pt", "--out", "run") == run("--points", file, "--out", "other") == 0
    one, other = (ws.Evaluation.load(name) for name in ("run", "other"))
    assert torch.equal(one.distances, other.distances)


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
        ("whole.npz", "holds no points"),
        ("junk.npz", "cannot read points from 'junk.npz'"),
        ("empty.npz", "'empty.npz' has no arrays"),
        ("none.pt", "'none.pt': No such file"),
    ],
)
def test_points_that_do_not_fit(
    file: str, words: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--points", file) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
