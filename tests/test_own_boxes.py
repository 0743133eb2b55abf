"""Boxes of each feature and of each sample: closed forms, the same as a loop, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.errors import InputError
from wassail.geometry import clip, distances, project, steepest
from wassail.threat import boxes_of, fitted, parse_domain

DUAL = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}
Sides = tuple[Tensor, Tensor]


def linear(outputs: int = 3) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear classifier in float64, samples and its answers."""
    torch.manual_seed(3)
    model = nn.Linear(5, outputs).double()
    x = torch.rand(12, 5, dtype=torch.float64)
    return model, x, model(x).argmax(1)


def own_boxes(x: Tensor, width: float = 0.3) -> Sides:
    """A box around each sample, with feature 1 frozen, and all but feature 0 of sample 2."""
    generator = torch.Generator().manual_seed(0)
    low, high = (
        x.double() + side * width * torch.rand(x.shape, generator=generator) for side in (-1, 1)
    )
    low[:, 1] = high[:, 1] = x[:, 1].double()
    low[2, 1:] = high[2, 1:] = x[2, 1:].double()
    return low, high


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", DUAL)
def test_a_frozen_feature_has_no_weight(norm: float) -> None:
    model, x, _ = linear(1)
    z = model(x).detach()[:, 0]
    free = torch.tensor([0, 2, 4])
    low, high = torch.full((2, 12, 5), 0.0, dtype=torch.float64)
    low, high = low - 100, high + 100
    low[:, [1, 3]] = high[:, [1, 3]] = x[:, [1, 3]]
    length = torch.linalg.vector_norm(model.weight.detach()[0, free], DUAL[norm])
    exact = (0.2 - 0.05) / length
    right = ws.Specification.within(z + 0.05, 0.2)
    flips = ws.nearest(model, x, right, norm, (low, high))
    assert torch.allclose(flips.distances, exact.expand(12), rtol=1e-6)
    for method in ("auto", "crown", "exact"):
        found = ws.radii(model, x, right, norm, (low, high), method).values
        assert (found <= exact).all()
        assert torch.allclose(found, exact.expand(12), rtol=0.01 if method == "crown" else 1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", DUAL)
def test_own_boxes_are_a_loop_over_samples(norm: float) -> None:
    model, x, y = linear()
    low, high = own_boxes(x)
    flips = ws.nearest(model, x, y, norm, (low, high))
    radii = ws.radii(model, x, y, norm, (low, high))
    proved = ws.verify(model, x, y, ws.Threat(norm, math.inf, 0.1, (low, high)))
    assert torch.isfinite(flips.distances).any() and torch.isinf(flips.distances).any()
    for i in range(len(x)):
        one, box = slice(i, i + 1), (low[i], high[i])
        near = ws.nearest(model, x[one], y[one], norm, box)
        assert torch.equal(near.distances, flips.distances[one])
        assert torch.equal(near.points, flips.points[one])
        alone = ws.radii(model, x[one], y[one], norm, box)
        assert torch.allclose(alone.values, radii.values[one], rtol=1e-9)
        threat = ws.Threat(norm, math.inf, 0.1, box)
        assert ws.verify(model, x[one], y[one], threat).status == proved.status[one]
    assert (radii.values <= flips.distances).all()
    assert torch.equal(torch.isinf(radii.values), torch.isinf(flips.distances))


@pytest.mark.few(3)
@pytest.mark.parametrize("norm", DUAL)
@pytest.mark.parametrize("method", ["auto", "crown", "ball", "branch", "exact"])
def test_radii_in_one_box_for_all_are_those_of_the_pair(norm: float, method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x = torch.rand(6, 4)
    y = model(x).argmax(1)
    sides = torch.zeros(4), torch.ones(4)
    plain = ws.radii(model, x, y, norm, (0, 1), method, effort=0.1)
    other = ws.radii(model, x, y, norm, sides, method, effort=0.1)
    assert torch.allclose(plain.values, other.values, rtol=1e-9)


ATTACKS: list[Callable[..., ws.Distribution]] = [
    ws.wda,
    ws.wda_pp,
    ws.apgd,
    ws.fab,
    ws.square,
    ws.pgd,
    ws.fgsm,
    ws.deepfool,
]


@pytest.mark.few(6)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("norm", DUAL)
def test_every_attack_stays_in_own_boxes(
    attack: Callable[..., ws.Distribution], norm: float
) -> None:
    model, x, y = linear(2)  # of two classes: what is steepest for one loss is so for all
    model, x = model.float(), x.float()
    low, high = own_boxes(x)
    threat = ws.Threat(norm, math.inf, 0.15, (low, high))
    options = {"queries": 100} if attack is ws.square else {}
    found = attack(model, x, y, threat, **options)
    assert found.verify(model)
    points = found.points.double()
    assert ((points >= low) & (points <= high)).all()
    assert torch.equal(found.points[:, 1], x[:, 1])
    near = ws.nearest(model, x, y, norm, (low, high)).distances
    best, good = (float((near > share * 0.15).double().mean()) for share in (0.999, 0.7))
    assert best - 1e-9 <= found.accuracy <= good + 1e-9


@pytest.mark.parametrize("engine", ["fab", "deepfool", "fmn", "ddn", "apgd", "pdpgd"])
def test_every_engine_finds_what_the_first_finds(engine: str) -> None:
    model, x, y = linear()
    domain = own_boxes(x)
    best = ws.nearest(model, x, y, 2, domain).distances
    found = ws.nearest(model, x, y, 2, domain, engine).distances
    assert torch.equal(torch.isinf(found), torch.isinf(best))
    some = torch.isfinite(best) & (best > 0)
    assert (found[some] / best[some] < 1.05).all()


def test_boxes_of_images() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).eval()
    x = torch.rand(4, 2, 3, 3)
    y = model(x).argmax(1)
    channel = torch.tensor([0.0, -1.0])[:, None, None], torch.tensor([1.0, 2.0])[:, None, None]
    flips = ws.nearest(model, x, y, "inf", channel, passes=80, warn=False)
    radii = ws.radii(model, x, y, "inf", channel)
    assert (radii.values <= flips.distances).all()
    low, high = x - 0.1, x + 0.1
    low[:, 0] = high[:, 0] = x[:, 0]
    found = ws.square(model, x, y, ws.Threat(2, math.inf, 0.2, (low, high)), queries=50)
    assert found.verify(model)
    assert torch.equal(found.points[:, 0], x[:, 0])
    tight = ws.radii(model, x, y, "inf", (low, high))
    assert (tight.values >= radii.values).all()


@pytest.mark.parametrize("norm", DUAL)
def test_geometry_of_own_boxes_is_that_of_each(norm: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(6, 4, dtype=torch.float64, generator=generator)
    low, high = x - 0.2, x + 0.3
    low[:, 0] = high[:, 0] = x[:, 0]
    domain = fitted(parse_domain((low, high), own=True), x)
    away = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    near = project(x + away, x, norm, 0.25, domain)
    step = steepest(x, away, norm, 0.25, domain)
    for i in range(6):
        box = parse_domain((low[i], high[i]), own=True)
        one = slice(i, i + 1)
        assert torch.allclose(near[one], project(x[one] + away[one], x[one], norm, 0.25, box))
        assert torch.allclose(step[one], steepest(x[one], away[one], norm, 0.25, box))
    assert (distances(near, x, norm) <= 0.25 + 1e-12).all()
    assert torch.equal(clip(near, domain), near)
    assert torch.equal(near[:, 0], x[:, 0])


def test_boxes_are_rounded_inward() -> None:
    low = torch.tensor([0.1, 0.3], dtype=torch.float64)
    known = boxes_of(parse_domain((low, low + 0.2), own=True))
    assert known is not None
    there = known.like(torch.zeros(1, 2))
    assert (there.low.double() >= low).all() and (there.high.double() <= low + 0.2).all()
    assert (there.low.double() - low).max() < 1e-7


def test_results_keep_their_boxes(tmp_path: Path) -> None:
    model, x, y = linear()
    domain = own_boxes(x)
    flips = ws.nearest(model, x, y, 2, domain, eps=0.05, order=1)
    radii = ws.radii(model, x, y, 2, domain)
    flips.save(tmp_path / "flips")
    radii.save(tmp_path / "radii")
    assert ws.Flips.load(tmp_path / "flips").domain == flips.domain
    assert ws.Radii.load(tmp_path / "radii").domain == radii.domain
    curve = ws.risk_curve(ws.Flips.load(tmp_path / "flips"), radii, order=1)
    assert curve(0.05)[0] <= curve(0.05)[1]
    spent = ws.allocate(flips, 0.05, 1)
    spent.save(tmp_path / "spent")
    again = ws.Distribution.load(tmp_path / "spent")
    assert again.threat == spent.threat and again.verify(model)
    assert str(again.threat) == "Omega_1(0.05), ground norm l2, own boxes of 12 samples"
    assert "a box for each of 5 features" in str(ws.Threat(2, 1, 0.1, (x.amin(0), x.amax(0))))
    other = ws.nearest(model, x, y, 2, (domain[0] - 1, domain[1]), passes=20)
    with pytest.raises(InputError, match="differ in domain"):
        flips.merge(other)
    shorter = flips.shorten(model)
    assert (shorter.distances <= flips.distances).all()
    given = ws.Flips.from_points(model, x, y, flips.points, 2, domain)
    assert torch.equal(torch.isfinite(given.distances), torch.isfinite(flips.distances))


def test_a_bracket_in_own_boxes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    x = torch.rand(8, 5)
    y = model(x).argmax(1)
    closed = ws.sandwich(model, x, y, ws.Threat("inf", 1, 0.05, own_boxes(x)), effort=0.5)
    assert 0 <= closed.attacked - closed.certified < 0.01


def call(domain: object, function: str = "nearest") -> object:
    model, x, y = linear()
    return getattr(ws, function)(model, x, y, 2, domain=domain)


LOW, HIGH = torch.zeros(5), torch.ones(5)
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: call((LOW[:4], HIGH[:4])), r"the boxes have shape \(4,\) and the samples \(12, 5\)"),
    (lambda: call((LOW.expand(3, 5), HIGH.expand(3, 5))), r"the boxes have shape \(3, 5\)"),
    (lambda: call((LOW, torch.ones(4))), "needs low and high, with one number for each feature"),
    (lambda: call((HIGH, LOW)), "low at or below high"),
    (lambda: call((LOW, HIGH * math.nan)), "a box needs finite numbers"),
    (lambda: call((LOW, HIGH * math.inf)), "a box needs finite numbers"),
    (lambda: call((LOW, HIGH / 2)), "outside its box"),
    (lambda: call((LOW, HIGH), "certify"), "the domain has boxes of its own"),
    (lambda: call((LOW, HIGH), "loss_curve"), "the domain has boxes of its own"),
    (
        lambda: ws.a3(*linear(), ws.Threat(2, 1, 0.1, (LOW, HIGH))),
        "the domain has boxes of its own",
    ),
    (
        lambda: ws.radii(*linear(), domain=ws.Threat(2, 1, 0.1, (LOW, HIGH), scale=HIGH).domain),
        "a unit for each feature, which evaluate understands",
    ),
]


@pytest.mark.parametrize(("made", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_boxes_are_refused_in_a_sentence(made: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        made()
    assert str(caught.value).endswith(".")
