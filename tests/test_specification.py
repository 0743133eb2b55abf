"""What right means: closed forms for linear models, the same bits as labels, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.errors import InputError

DUAL = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}


def regression(outputs: int = 1, samples: int = 24) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear model in float64, samples in [0, 1] and targets near its answers."""
    torch.manual_seed(outputs)
    model = nn.Linear(5, outputs).double()
    x = torch.rand(samples, 5, dtype=torch.float64)
    y = model(x).detach() + 0.3 * torch.randn(samples, outputs, dtype=torch.float64)
    return model, x, y


def network(seed: int, outputs: int, inputs: int = 4) -> nn.Module:
    """A small ReLU network in float32."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs)).eval()


def to_tolerance(model: nn.Linear, x: Tensor, y: Tensor, tolerance: float, norm: float) -> Tensor:
    """The distance to the first output that is off by the tolerance, 0 where one is already."""
    off = (model(x).detach() - y).abs()
    length = torch.linalg.vector_norm(model.weight.detach(), DUAL[norm], dim=1)
    return ((tolerance - off).clamp(min=0) / length).amin(1)


@pytest.mark.parametrize("norm", DUAL)
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_nearest_point_beyond_a_tolerance(norm: float, outputs: int) -> None:
    model, x, y = regression(outputs)
    right = ws.Specification.within(y[:, 0] if outputs == 1 else y, 0.6)
    exact = to_tolerance(model, x, y, 0.6, norm)
    flips = ws.nearest(model, x, right, norm, None)
    assert torch.equal(flips.distances == 0, exact == 0)
    assert (flips.distances >= exact).all()
    assert torch.allclose(flips.distances, exact, rtol=1e-6)
    assert torch.equal((flips.labels > 0), torch.ones(len(x), dtype=torch.bool))


@pytest.mark.parametrize("norm", DUAL)
def test_the_nearest_wrong_label_of_several(norm: float) -> None:
    model, x, _ = regression(4)
    z = model(x).detach()
    limit = torch.tensor([0.0, 0.1, -0.1, 0.2])
    y = z > limit
    y[:3, 0] = ~y[:3, 0]  # wrong already
    exact = (z - limit).abs() / torch.linalg.vector_norm(model.weight.detach(), DUAL[norm], dim=1)
    nearest = torch.where(torch.arange(len(x)) < 3, 0.0, exact.amin(1))
    flips = ws.nearest(model, x, ws.Specification.multilabel(y, limit), norm, None)
    assert torch.equal(flips.distances == 0, nearest == 0)
    assert torch.allclose(flips.distances, nearest, rtol=1e-6)
    wrong = 1 + exact.argmin(1)
    assert torch.equal(flips.labels[3:], wrong[3:])


@pytest.mark.parametrize("output", [0, 2])
def test_one_label_of_several_is_one_row(output: int) -> None:
    model, x, _ = regression(4)
    z = model(x).detach()[:, output]
    right = ws.Specification.threshold(z > 0.1, 0.1, output=output, outputs=4)
    length = torch.linalg.vector_norm(model.weight.detach()[output], 1)
    flips = ws.nearest(model, x, right, "inf", None)
    assert torch.allclose(flips.distances, (z - 0.1).abs() / length, rtol=1e-6)


ATTACKS: list[Callable[..., ws.Distribution]] = [
    ws.wda,
    ws.wda_pp,
    ws.apgd,
    ws.fab,
    ws.square,
    ws.pgd,
    ws.fgsm,
    ws.deepfool,
    ws.a3,
    ws.autoattack,
]


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("attack", "norm"),
    [(attack, norm) for attack in ATTACKS[:-3] for norm in DUAL]
    + [(attack, 2.0) for attack in ATTACKS[-3:]],
)
def test_every_attack_takes_a_specification(
    attack: Callable[..., ws.Distribution], norm: float
) -> None:
    model, x, y = regression()
    right = ws.Specification.within(y, 0.6)
    exact = to_tolerance(model, x, y, 0.6, norm)
    eps = float(exact.median())
    threat = ws.Threat(norm, math.inf, eps, None)
    options = {"queries": 300} if attack is ws.square else {}
    found = attack(model, x, right, threat, **options)
    assert found.verify(model)
    # No attack does better than the closed form, and each of them is near it.
    best, good = (float((exact > share * eps).double().mean()) for share in (1.0, 0.7))
    assert best - 1e-12 <= found.accuracy <= good + 1e-12
    assert found.clean_accuracy == pytest.approx(float((exact > 0).double().mean()), abs=1e-12)


@pytest.mark.parametrize("attack", [ws.wda_pp, ws.apgd, ws.fab])
def test_classes_are_labels_to_the_last_bit(attack: Callable[..., ws.Distribution]) -> None:
    model = network(0, 5)
    x = torch.rand(12, 4)
    y = torch.arange(12) % 5
    threat = ws.Threat("inf", math.inf, 0.1)
    plain = attack(model, x, y, threat)
    other = attack(model, x, ws.Specification.classes(y), threat)
    assert torch.equal(plain.points, other.points)
    assert torch.equal(plain.predicted, other.predicted)
    assert other.specification is None


def test_own_rows_of_classes_find_what_labels_find() -> None:
    model = network(1, 3)
    x = torch.rand(10, 4)
    y = model(x).argmax(1)
    eye = torch.eye(3)
    rows = torch.stack([torch.stack([eye[k] - eye[j] for j in range(3) if j != k]) for k in y])
    plain = ws.nearest(model, x, y, 2, None)
    other = ws.nearest(model, x, ws.Specification(rows), 2, None)
    assert torch.allclose(plain.distances, other.distances, rtol=1e-3)


def test_results_do_not_depend_on_the_batch() -> None:
    model = network(2, 2)
    x = torch.rand(9, 4)
    right = ws.Specification.within(model(x).detach(), 0.05)
    runs = [ws.nearest(model, x, right, "inf", batch_size=size).distances for size in (1, 4, 9)]
    assert torch.allclose(runs[0], runs[1], rtol=1e-5)
    assert torch.allclose(runs[0], runs[2], rtol=1e-5)


def test_a_result_keeps_its_specification(tmp_path: Path) -> None:
    model, x, y = regression(2)
    right = ws.Specification.within(y, 0.6)
    flips = ws.nearest(model, x, right, 2, None, passes=60)
    flips.save(tmp_path / "flips")
    again = ws.Flips.load(tmp_path / "flips")
    assert again.specification == right
    assert ws.allocate(again, 0.1, 1).verify(model)
    assert again.take(torch.arange(3)).specification == ws.Specification.within(y[:3], 0.6)
    given = ws.Flips.from_points(model, x, right, flips.points, 2, None, pull_in=False)
    assert torch.equal(given.distances, flips.distances)
    curve = ws.risk_curve(flips, order=1)
    assert curve(0.05)[1] == pytest.approx(ws.allocate(flips, 0.05, 1).accuracy)
    other = ws.nearest(model, x, ws.Specification.within(y, 0.5), 2, None, passes=60)
    with pytest.raises(InputError, match="differ in specification"):
        flips.merge(other)


def test_a_steered_search_and_a_start() -> None:
    model, x, y = regression()
    right = ws.Specification.within(y, 0.6)
    steered = ws.nearest(model, x, right, "inf", None, eps=0.05, order=1)
    assert steered.specification == right
    ws.nearest(model, x, right, "inf", None, start=steered, passes=20)
    with pytest.raises(InputError, match="differ in y"):
        ws.nearest(model, x, ws.Specification.within(y, 0.5), "inf", None, start=steered)
    classes = torch.zeros(len(x), dtype=torch.int64)
    with pytest.raises(InputError, match="differ in y"):
        ws.nearest(model, x, classes, "inf", None, start=steered)


def target() -> Tensor:
    return torch.zeros(4)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: ws.Specification.within(target(), 0), "the tolerance is 0: give a number above 0"),
    (lambda: ws.Specification.within(target(), math.nan), "the tolerances contain NaN"),
    (lambda: ws.Specification.within(target(), torch.ones(3)), "the tolerances have shape"),
    (lambda: ws.Specification.within(torch.zeros(2, 2, 2), 1.0), "the targets have shape"),
    (lambda: ws.Specification.within("many", 1.0), "the targets are a str"),  # type: ignore[arg-type]
    (lambda: ws.Specification.multilabel(target()), "give 0 or 1 for each of K labels"),
    (lambda: ws.Specification.multilabel(torch.full((2, 2), 3)), "give 0 or 1 for each"),
    (lambda: ws.Specification.multilabel(torch.ones(2, 2), torch.ones(3)), "the thresholds have"),
    (lambda: ws.Specification.threshold(torch.ones(2, 2)), "the labels have shape"),
    (lambda: ws.Specification.threshold(torch.ones(2), output=1), "output 1 of 1: count from 0"),
    (lambda: ws.Specification(), "the rows are None: give a tensor of numbers"),
    (lambda: ws.Specification(torch.ones(3)), "the rows have shape"),
    (lambda: ws.Specification(torch.ones(2, 3), torch.ones(3)), "the offsets have shape"),
    (lambda: ws.Specification(torch.ones(4, 2, 3), torch.ones(5, 2)), "each of 4 samples"),
]


@pytest.mark.parametrize(("made", "said"), BAD, ids=[said for _, said in BAD])
def test_a_bad_specification_is_refused_in_a_sentence(
    made: Callable[[], object], said: str
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        made()
    assert str(caught.value).endswith(".")


def test_a_specification_that_does_not_fit_is_refused() -> None:
    model, x, y = regression(2)
    threat = ws.Threat("inf", 1, 0.1, None)
    with pytest.raises(InputError, match="about 1 outputs and the model has 2"):
        ws.nearest(model, x, ws.Specification.within(y[:, 0], 1.0), "inf", None)
    with pytest.raises(InputError, match="24 samples but the specification is for 5"):
        ws.nearest(model, x, ws.Specification.within(y[:5], 1.0), "inf", None)
    with pytest.raises(InputError, match="a target is a class"):
        ws.pgd(model, x, ws.Specification.within(y, 1.0), threat, target=torch.ones(24).long())
    with pytest.raises(InputError, match="this takes labels only"):
        ws.certify(model, x, ws.Specification.within(y, 1.0))  # type: ignore[arg-type]
    flips = ws.nearest(model, x, ws.Specification.within(y, 1.0), "inf", None, passes=20)
    with pytest.raises(InputError, match="label_cost is the price of another class"):
        ws.allocate(flips, 0.1, 1, label_cost=0.3)


def test_a_tolerance_is_not_rounded_to_float32() -> None:
    right = ws.Specification.within(torch.zeros(1), 0.2)
    assert right.offsets is not None
    assert right.offsets.tolist() == [[0.2, 0.2]]
