"""Features that are no pixels: the change of variables is exact, and names are kept."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wassail as ws
from wassail.cli.parser import main
from wassail.report.export import to_npz, to_pt
from wassail.report.page import report
from wassail.report.units import changes
from wassail.testing import LinearClassifier
from wassail.zoo.datasets import open_data
from wassail.zoo.weights import fingerprint

LOW = torch.tensor([0.0, -5.0, 100.0])
HIGH = torch.tensor([1.0, 5.0, 300.0])
SCALE = torch.tensor([1.0, 2.0, 50.0])


def nearest(w: np.ndarray, b: float, x: np.ndarray) -> float:
    """The least linf distance in units of SCALE at which `w x + b <= 0`, inside the box."""
    low = 0.0
    high = 20.0
    for _ in range(60):
        t = (low + high) / 2
        step = t * SCALE.numpy()
        down = np.clip(x - np.sign(w) * step, LOW.numpy(), HIGH.numpy())
        if w @ down + b <= 0:
            high = t
        else:
            low = t
    return high


def test_boxes_and_units_of_each_feature_are_exact() -> None:
    """A linear model whose nearest flip needs features that stop at their own box."""
    features = ws.Features(LOW, HIGH, SCALE)
    w = np.array([3.0, 0.2, 0.01])
    b = -2.3
    weight = torch.tensor(np.stack([np.zeros(3), w]))
    model = LinearClassifier(weight, torch.tensor([0.0, b], dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    x = LOW + (HIGH - LOW) * torch.rand(40, 3, generator=generator)
    x = x.double()[(x.double() @ torch.tensor(w)) + b > 0.05][:12]
    y = torch.ones(len(x), dtype=torch.int64)
    z = features.encode(x, dtype=torch.float64)
    assert torch.allclose(features.decode(z), x, atol=1e-4)
    wrapped = features.model(model)
    assert torch.allclose(wrapped(z), model(x), atol=1e-5)
    assert features.domain == (0.0, 5.0)
    truth = torch.tensor([nearest(w, b, row) for row in x.numpy()])
    flips = ws.nearest(wrapped, z, y, "inf", domain=features.domain, passes=100)
    radii = ws.radii(wrapped, z, y, "inf", domain=features.domain, method="crown")
    assert (flips.distances >= truth * (1 - 1e-6)).all()
    assert (radii.values <= truth * (1 + 1e-6)).all()
    assert (flips.distances <= truth * 1.05).float().mean() > 0.7
    inside = features.decode(flips.points)
    assert ((inside >= LOW - 1e-6) & (inside <= HIGH + 1e-3)).all()
    again = model(inside).argmax(1)
    assert (again[torch.isfinite(flips.distances)] == 0).float().mean() > 0.9


def test_the_default_unit_is_the_range_and_no_clip_is_needed() -> None:
    features = ws.Features(LOW, HIGH)
    assert features.domain == (0.0, 1.0)
    wrapped = features.model(nn.Linear(3, 2))
    assert not wrapped.clips
    assert features.encode(HIGH[None]).tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ws.Features([0.0], [1.0, 2.0]), "one number for each feature"),
        (lambda: ws.Features([2.0], [1.0]), "low at or below high"),
        (lambda: ws.Features([0.0], [math.inf]), "finite"),
        (lambda: ws.Features([0.0], [1.0], scale=[-1.0]), "may not move"),
        (lambda: ws.Features([0.0], [1.0], scale=[0.0]), "no feature may move"),
        (lambda: ws.Features([0.0], [1.0], names=["a", "b"]), "2 names for 1"),
        (lambda: ws.Features([0.0], [1.0]).encode([[2.0]]), "feature 0 = 2, outside"),
        (lambda: ws.Features([0.0], [1.0]).encode([[0.1, 0.2]]), "one column"),
        (lambda: ws.Features([0, 0], [1, 1]).encode([[0, 1], [1, 0]]), "one-hot"),
    ],
)
def test_what_cannot_be_right_is_refused(make, words: str) -> None:
    with pytest.raises(ws.InputError, match=words):
        make()


def test_one_logit_is_a_classifier_of_two_classes() -> None:
    inner = nn.Linear(2, 1)
    model = ws.OneLogit(inner)
    x = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(x).argmax(1), (inner(x)[:, 0] > 0).long())
    assert torch.allclose(model(x)[:, 1] - model(x)[:, 0], inner(x)[:, 0])
    flat = ws.OneLogit(lambda t: inner(t)[:, 0])
    assert torch.equal(flat(x), model(x))
    with pytest.raises(ws.InputError, match="one output"):
        ws.OneLogit(nn.Linear(2, 3))(x)
    y = model(x).argmax(1)
    exact = (inner(x)[:, 0].abs() / inner.weight.abs().sum()).detach().double()
    radii = ws.radii(model, x, y, "inf", domain=None, method="crown").values
    assert torch.allclose(radii, exact, rtol=1e-3)


def test_csv_files_with_names(tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("age,class,dose\n40,ill,0.5\n50,well,1.5\n\n60,ill,2.5\n")
    data = open_data(path)
    x, y = data.read(0, 3)
    assert x.tolist() == [[40, 0.5], [50, 1.5], [60, 2.5]] and y.tolist() == [0, 1, 0]
    assert data.classes == ("ill", "well") and data.info["features"] == ["age", "dose"]
    assert len(open_data(path, 2)) == 2
    for text, words in (
        ("a,b\n1\n", "1 values for 2"),
        ("a,b\nx,1\n", "where a number should be"),
        ("a,b\nnan,1\n", "where a number should be"),
        ("a,a\n1,1\n", "all different"),
        ("", "first line of names"),
        ("a,b\n", "no samples"),
    ):
        path.write_text(text)
        with pytest.raises(ws.InputError, match=words):
            open_data(path)


def test_the_page_says_which_features_change() -> None:
    about = {"features": ["age", "<b>"], "low": [20.0, 0.0], "high": [100.0, 1.0]}
    about["scale"] = [80.0, 1.0]
    found = changes(about, torch.tensor([0.25, 0.5]), torch.tensor([0.5, 0.5]))
    assert found == [("age", "40", "60")]
    assert changes({"features": ["a"]}, torch.zeros(2), torch.ones(2)) == []
    assert changes({}, torch.zeros(1, 2, 2), torch.ones(1, 2, 2)) == []
    odd = {"features": ["a", "b"], "low": ["x", 0], "scale": None}
    assert "a" in str(changes(odd, torch.zeros(2), torch.ones(2)))


def test_an_evaluation_of_features_speaks_their_units() -> None:
    features = ws.Features(LOW, HIGH, SCALE, ["size", "temperature", "pressure"])
    torch.manual_seed(0)
    x = LOW + (HIGH - LOW) * torch.rand(20, 3)
    model = nn.Linear(3, 2)
    y = model(x).argmax(1)
    run = ws.evaluate(
        features.model(model),
        features.data(x, y, "plant"),
        ws.Threat("inf", 1, 0.5, features.domain),
        ("nearest",),
        certify="crown",
        passes=20,
        look=False,
    )
    assert "pressure" in report(run)
    assert run.info["data"]["scale"] == SCALE.tolist()


def table_of_three(n: int = 24) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model on size, temperature and pressure in their own units, with some of its samples."""
    torch.manual_seed(0)
    first = nn.Linear(3, 8)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        first.weight /= (HIGH - LOW) / 8
        first.bias -= first.weight @ ((LOW + HIGH) / 2)
    x = LOW + (HIGH - LOW) * torch.rand(n, 3)
    return model, x, model(x).argmax(1)


def test_a_threat_may_have_a_box_and_a_unit_for_each_feature() -> None:
    model, x, y = table_of_three()
    options: dict[str, Any] = {"certify": "crown", "passes": 20, "look": False}
    threat = ws.Threat("inf", 1, 0.1, (LOW, HIGH), scale=SCALE)
    lists: Any = (LOW.tolist(), HIGH.tolist())
    assert "box for each of 3 features" in str(threat)
    assert threat == ws.Threat("inf", 1, 0.1, lists, scale=SCALE.tolist())
    assert hash(threat) is not None and dataclasses.replace(threat, eps=0.2).domain == threat.domain
    run = ws.evaluate(model, (x.double(), y), threat, ("nearest",), **options)
    features = ws.Features(LOW, HIGH, SCALE)
    by_hand = ws.evaluate(
        features.model(model),
        features.data(x.double(), y),
        ws.Threat("inf", 1, 0.1, features.domain),
        ("nearest",),
        **options,
    )
    assert torch.equal(run.distances, by_hand.distances)
    assert run.radii is not None and by_hand.radii is not None
    assert torch.equal(run.radii, by_hand.radii)
    assert run.info["data"]["low"] == LOW.tolist()
    found = run.verify(model, (x.double(), y), radii=True, seed=0)
    assert found, str(found)
    for call in (
        lambda: ws.nearest(model, x, y, "inf", domain=threat.domain),
        lambda: ws.radii(model, x, y, "inf", domain=threat.domain),
        lambda: ws.wda(model, x, y, threat),
        lambda: ws.landmarks(model, x, y, "inf", domain=(LOW, HIGH)),
    ):
        with pytest.raises(ws.InputError, match=r"ws\.Features"):
            call()


@pytest.mark.parametrize(
    ("domain", "scale", "words"),
    [
        (([0.0, 0.0], [1.0]), [1.0, 1.0, 1.0], "one number for each feature"),
        (([0.0, 2.0], [1.0, 1.0]), None, "low at or below high"),
        (([0.0], [math.inf]), None, "finite"),
        (([0.0], [1.0]), [-1.0], "0 if fixed"),
        (None, [1.0], "scale needs a box"),
    ],
)
def test_boxes_that_make_no_sense_are_refused(domain, scale, words: str) -> None:
    with pytest.raises(ws.InputError, match=words):
        ws.Threat("inf", 1, 0.1, domain, scale=scale)


def test_a_feature_that_may_not_move_does_not() -> None:
    model, x, y = table_of_three()
    threat = ws.Threat("inf", 1, 0.1, (LOW, HIGH), scale=torch.tensor([1.0, 0.0, 50.0]))
    options: dict[str, Any] = {"certify": "crown", "passes": 20}
    run = ws.evaluate(model, (x, y), threat, ("nearest", "wda"), **options)
    assert run.info["data"]["fixed"] == ["feature 1"]
    free = ws.Features(LOW, HIGH, torch.tensor([1.0, 5.0, 50.0]))
    z = free.encode(x)
    moving = ws.radii(free.model(model), z, y, "inf", domain=free.domain, method="crown").values
    flips = run.flips()
    known = torch.isfinite(flips.distances) & (flips.distances > 0)
    assert int(known.sum()) > 5
    assert torch.equal(flips.points[known][:, 1], flips.x[known][:, 1])
    # The certificate knows it too: it proves more than one for which all features move.
    assert run.radii is not None
    assert float(run.radii.mean()) > 1.2 * float(moving.mean())
    assert (run.radii <= run.distances).all()
    features = ws.Features(LOW, HIGH, torch.tensor([1.0, 0.0, 50.0]))
    assert torch.allclose(features.decode(flips.x), x.double(), atol=1e-3)


def test_a_box_for_each_feature_on_the_command_line(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef net():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), "
        "torch.nn.Linear(8, 2))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [f"{20 + 2 * i},{i % 2},{100 + 10 * i}" for i in range(20)]
    data = tmp_path / "t.csv"
    data.write_text("\n".join(["age,label,dose", *rows]))
    box = tmp_path / "box.csv"
    box.write_text("feature,low,high,scale\ndose,0,400,\nage,0,100,0\n")
    base = ["evaluate", "mine:net", "--data", str(data), "--eps", "spread-5", "--order", "1"]
    base += ["--attacks", "nearest", "--passes", "10", "--no-look", "--quiet", "--json"]
    out = tmp_path / "run"
    assert main([*base, "--certify", "crown", "--box", str(box), "--out", str(out)]) == 0
    capsys.readouterr()
    run = ws.Evaluation.load(out)
    about = run.info["data"]
    assert about["features"] == ["age", "dose"] and about["high"] == [100, 400]
    assert about["fixed"] == ["age"]
    page = (out / "report.html").read_text()
    assert "dose" in page or not bool((run.distances > 0).any())
    assert main(["verify", str(out), "mine:net", "--data", str(data)]) == 0
    capsys.readouterr()
    np.savez(tmp_path / "box.npz", low=[0.0, 0.0], high=[100.0, 400.0])
    assert main([*base, "--box", str(tmp_path / "box.npz")]) == 0
    capsys.readouterr()
    for text, words in (
        ("feature,low\nage,0\n", "no high"),
        ("feature,low,high\nage,0,100\n", "boxes for 1 features"),
        ("feature,low,high\nage,0,30\ndose,0,400\n", "outside"),
        ("feature,low,high\nage,x,30\ndose,0,400\n", "not a number"),
    ):
        box.write_text(text)
        assert main([*base, "--box", str(box)]) == 2
        assert words in capsys.readouterr().err


def test_points_and_exports_are_in_the_units_of_the_data(tmp_path: Path) -> None:
    """Flips that are taken out of a run with boxes and put into another are the same flips, with
    all features free and with one that may not move.
    """
    model, x, y = table_of_three()
    for held in ((), (1,)):
        threat = ws.Threat("inf", "inf", 0.1, (LOW, HIGH))
        options: dict[str, Any] = {"immutable": held, "look": False}
        found = ws.evaluate(model, (x, y), threat, ("nearest",), passes=50, **options)
        near = int((found.distances <= 0.1).sum())
        assert near > 3
        assert found.info["model"]["weights"] == fingerprint(model)  # the model's own, not rescaled
        assert found.verify(model, (x, y))
        done = to_pt(found, tmp_path / "points.pt", model=model)
        assert done.lost == 0 and done.flips == near
        points = torch.load(tmp_path / "points.pt", weights_only=True)
        assert bool(((points >= LOW) & (points <= HIGH)).all())
        assert int((model(points).argmax(1) != y).sum()) == near
        given = ws.evaluate(model, (x, y), threat, ("points",), points=points, **options)
        assert int((given.distances <= 0.1 * (1 + 1e-6)).sum()) == near
        to_npz(found, tmp_path / "flips.npz")
        every = torch.from_numpy(np.load(tmp_path / "flips.npz")["x_adv"])
        assert bool(((every >= LOW - 1e-3) & (every <= HIGH + 1e-3)).all())


def test_points_on_the_command_line_are_in_the_units_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tall.py").write_text(
        "import torch\n\ndef net():\n    model = torch.nn.Linear(2, 2)\n"
        "    model.weight.data = torch.tensor([[0.0, 1.0], [0.0, -1.0]])\n"
        "    model.bias.data = torch.tensor([-100.0, 100.0])\n    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    doses = [104.0, 96.0, 130.0, 70.0]  # class 0 above 100
    Path("t.csv").write_text(
        "age,dose,label\n" + "".join(f"30,{d},{int(d < 100)}\n" for d in doses)
    )
    Path("box.csv").write_text("feature,low,high\nage,0,100\ndose,0,400\n")
    torch.save(torch.tensor([[30.0, 96.0], [30.0, 104.0], [30.0, 122.0], [30.0, 78.0]]), "p.pt")
    words = "evaluate tall:net --data t.csv --eps 0.02 --order inf --attacks fgsm --no-look --quiet"
    for option in ("--box box.csv", "--box box.csv --immutable age"):
        out = Path(f"run{len(option)}")
        assert main([*words.split(), *option.split(), "--points", "p.pt", "--out", str(out)]) == 0
        assert "of 4 points 2 are flips" in capsys.readouterr().out
        assert (ws.Evaluation.load(out).distances <= 0.02 + 1e-6).tolist() == [True] * 2 + [
            False
        ] * 2


def test_units_in_words_are_the_same_where_a_feature_may_not_move() -> None:
    model, x, y = table_of_three()
    run = ws.evaluate(
        model, (x, y), ws.Threat("inf", 1, 0.02, (LOW, HIGH)), ("wda",), immutable=[1], look=False
    )
    assert "2 % of each feature's range" in run.headline


def test_a_box_ends_where_the_data_do() -> None:
    """A float32 sample at an end of its box is inside, though float32 rounds 20.56 down and 0.1
    up; one that is farther outside is not.
    """
    boxes = ws.Features([20.56, 0.0], [70.0, 0.1])
    z = boxes.encode(torch.tensor([[20.56, 0.1], [70.0, 0.0]]))
    assert bool((z >= 0).all() & (z <= boxes.top).all())
    for outside in ([[20.559, 0.1]], [[30.0, 0.1001]]):
        with pytest.raises(ws.InputError, match="outside"):
            boxes.encode(torch.tensor(outside))
    with pytest.raises(ws.InputError, match="outside"):  # in float64 nothing is rounded
        boxes.encode(torch.tensor([[20.56 - 1e-9, 0.1]], dtype=torch.float64))
