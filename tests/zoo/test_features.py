"""Features that are no pixels: the change of variables is exact, and names are kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import wassail as ws
from wassail.report.features import changes
from wassail.report.page import report
from wassail.testing import LinearClassifier
from wassail.zoo.datasets import open_data

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
        (lambda: ws.Features([0.0], [1.0], scale=[0.0]), "may not move"),
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
    about = {"features": ["age", "<b>"], "low": [20.0, 0.0], "scale": [80.0, 1.0]}
    text = changes(about, torch.tensor([0.25, 0.5]), torch.tensor([0.5, 0.5]))
    assert text is not None and "age" in text and ": 40 → 60" in text and "<b>" not in text
    assert changes({"features": ["a"]}, torch.zeros(2), torch.ones(2)) is None
    assert changes({}, torch.zeros(1, 2, 2), torch.ones(1, 2, 2)) is None
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
