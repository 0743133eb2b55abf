"""Radii and verdicts for specifications: closed forms, labels, and drawn networks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.exact import normal, perceptron
from support.rounding import MODES, fractions, rounded
from wassail.certificates.graph.specified import specified
from wassail.certificates.prove.problem import Problem
from wassail.errors import InputError
from wassail.geometry import distances, project

DUAL = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}
METHODS = ("auto", "crown", "ball", "branch", "exact")


def linear(outputs: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear model in float64, samples and its answers."""
    torch.manual_seed(outputs)
    model = nn.Linear(5, outputs).double()
    x = torch.rand(16, 5, dtype=torch.float64)
    return model, x, model(x).detach()


def lengths(rows: Tensor, model: nn.Linear, norm: float) -> Tensor:
    return torch.linalg.vector_norm(rows.double() @ model.weight.detach(), DUAL[norm], dim=-1)


@pytest.mark.few(14)
@pytest.mark.parametrize("norm", DUAL)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_tolerance_of_a_linear_model(norm: float, method: str, outputs: int) -> None:
    model, x, z = linear(outputs)
    y = z + 0.3 * torch.randn_like(z)
    right = ws.Specification.within(y, 0.5)
    spare = (0.5 - (z - y).abs()).clamp(min=0)
    exact = (spare / lengths(torch.eye(outputs), model, norm)).amin(1)
    found = ws.radii(model, x, right, norm, None, method)
    assert (found.values <= exact).all()
    assert torch.allclose(found.values, exact, rtol=1e-6)


@pytest.mark.few(5)
@pytest.mark.parametrize("norm", DUAL)
@pytest.mark.parametrize("method", METHODS)
def test_several_labels_and_own_rows_of_a_linear_model(norm: float, method: str) -> None:
    model, x, z = linear(4)
    limit = torch.tensor([0.0, 0.1, -0.1, 0.2])
    exact = ((z - limit).abs() / lengths(torch.eye(4), model, norm)).amin(1)
    several = ws.Specification.multilabel(z > limit, limit)
    found = ws.radii(model, x, several, norm, None, method).values
    assert (found <= exact).all()
    assert torch.allclose(found, exact, rtol=1e-6)
    rows = torch.randn(len(x), 3, 4)
    offsets = 0.5 - (rows.double() @ z[..., None])[..., 0].clamp(max=0)
    margin = (rows.double() @ z[..., None])[..., 0] + offsets
    exact = (margin / lengths(rows, model, norm)).amin(1)
    found = ws.radii(model, x, ws.Specification(rows, offsets), norm, None, method).values
    assert (found <= exact).all()
    assert torch.allclose(found, exact, rtol=1e-6)


def test_of_a_row_that_a_sample_has_twice_the_stricter_counts() -> None:
    model, x, z = linear(1)
    rows = torch.ones(1, 1)
    twice = ws.Specification(rows.expand(len(x), 2, 1), torch.stack([2 - z[:, 0], 1 - z[:, 0]], 1))
    once = ws.Specification(rows, 1 - z)
    found = [ws.radii(model, x, right, 2, None, "crown").values for right in (twice, once)]
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", MODES)
def test_bounds_pay_for_the_constants(mode: str) -> None:
    """At the sample itself a bound is below the exact margin, whichever way sums are rounded."""
    weight = normal(8, 40, seed=1)
    rows = normal(5, 8, seed=2)
    x = normal(6, 40, seed=3)
    offsets = 3 * normal(6, 5, seed=4)
    graph = specified(perceptron([weight], [normal(8, seed=5)]), rows)
    right = ws.Specification(rows, offsets)
    problem = Problem.of(perceptron([weight], [normal(8, seed=5)]), x, right, 2.0, None)
    assert problem.graph.outputs == graph.outputs == 6
    with rounded(mode):
        lower = problem.bounds(torch.zeros(6, dtype=torch.float64))
    bias = fractions(normal(8, seed=5))
    for i, sample in enumerate(fractions(x)):
        z = [sum(a * b for a, b in zip(w, sample)) + c for w, c in zip(fractions(weight), bias)]
        for j, row in enumerate(fractions(rows)):
            margin = sum(a * b for a, b in zip(row, z)) + Fraction(float(offsets[i, j]))
            assert Fraction(float(lower[i, 1 + j])) <= margin
            assert float(lower[i, 1 + j]) == pytest.approx(float(margin), abs=1e-9)


def drawn(seed: int) -> tuple[nn.Module, Tensor, ws.Specification]:
    """A small network of random shape and activation, samples, and what right means."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def pick(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    inputs, outputs = pick(2, 3, 6), pick(1, 2, 3)
    act = (nn.ReLU, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.GELU)[pick(0, 1, 2, 3, 4)]
    layers: list[nn.Module] = []
    width = inputs
    for _ in range(pick(1, 2)):
        wider = pick(4, 8)
        layers += [nn.Linear(width, wider), act()]
        width = wider
    last = [nn.Linear(width, outputs)] if pick(0, 1, 2) else [nn.Linear(width, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, *last).eval()
    dtype = torch.float64 if pick(0, 1) else torch.float32
    model = model.to(dtype)
    x = torch.rand(5, inputs, generator=generator).to(dtype)
    with torch.no_grad():
        z = model(x)
    kind = pick(0, 1, 2, 3)
    if kind == 0:
        noise = 0.1 * torch.randn(z.shape, generator=generator).to(dtype)
        return model, x, ws.Specification.within(z + noise, 0.2)
    if kind == 1:
        limit = z.median(0).values.double() + 0.01
        return model, x, ws.Specification.multilabel(z > limit, limit)
    if kind == 2:
        limit = float(z[:, 0].double().median()) + 0.01
        return model, x, ws.Specification.threshold(z[:, 0] > limit, limit, outputs=outputs)
    rows = torch.randn(5, pick(1, 2, 4), outputs, generator=generator)
    margins = (rows.to(z) @ z[..., None])[..., 0]
    return model, x, ws.Specification(rows, 0.3 * margins.abs().clamp(min=0.1) - margins)


def margins_at(model: nn.Module, right: ws.Specification, points: Tensor) -> Tensor:
    """The least margin at one point for each sample."""
    with torch.no_grad():
        return right.margins(model(points)).amin(1)


def check_sound(seed: int) -> None:
    """No radius is above an attack's flip or a sampled violation, in three norms."""
    model, x, right = drawn(seed)
    fitted = right.fit(len(x))
    generator = torch.Generator().manual_seed(seed)
    for k, norm in enumerate(DUAL):
        domain = (0.0, 1.0) if (seed + k) % 2 else None
        method = METHODS[(seed + k) % len(METHODS)]
        found = ws.radii(model, x, right, norm, domain, method, effort=0.05)
        flips = ws.nearest(model, x, right, norm, domain, passes=120, warn=False)
        where = (seed, norm, method)
        assert (found.values <= flips.distances).all(), where
        assert ((found.values == 0) >= (flips.distances == 0)).all(), where
        proved = ws.verify(model, x, right, ws.Threat(norm, math.inf, 0.05, domain), effort=0.05)
        assert not (proved.proved & (flips.distances <= 0.05)).any(), where
        far = torch.where(torch.isfinite(found.values), found.values, 1.0)
        for _ in range(30):
            step = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            step = step.sign() if norm == math.inf else step
            points = project(x + 10 * step, x, norm, far.to(x), domain)
            inside = (distances(points, x, norm) <= found.values) & (found.values > 0)
            least = margins_at(model, fitted, points)
            assert (least[inside] > 0).all(), where
        at = torch.where(proved.falsified, margins_at(model, fitted, proved.points), -1.0)
        assert (at <= 0).all(), where


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_networks(seed: int) -> None:
    check_sound(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 200))
def test_two_hundred_drawn_networks(seed: int) -> None:
    check_sound(seed)


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", DUAL)
def test_classes_are_labels_to_the_last_bit(norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x, y = torch.rand(8, 4), torch.arange(8) % 3
    plain = ws.radii(model, x, y, norm)
    other = ws.radii(model, x, ws.Specification.classes(y), norm)
    assert torch.equal(plain.values, other.values)
    assert plain.proved_by == other.proved_by


def test_own_rows_of_classes_prove_what_labels_prove() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.rand(8, 4)
    y = model(x).argmax(1)
    eye = torch.eye(3)
    rows = torch.stack([torch.stack([eye[k] - eye[j] for j in range(3) if j != k]) for k in y])
    plain = ws.radii(model, x, y, 2)
    other = ws.radii(model, x, ws.Specification(rows), 2)
    assert torch.allclose(plain.values, other.values, rtol=1e-3)


def test_radii_do_not_depend_on_the_batch() -> None:
    model, x, right = drawn(3)
    runs = [ws.radii(model, x, right, 2, batch_size=size, effort=0.05) for size in (1, 3, 5)]
    assert torch.allclose(runs[0].values, runs[1].values, rtol=1e-9)
    assert torch.allclose(runs[0].values, runs[2].values, rtol=1e-9)


def test_a_bracket_closes_for_a_tolerance() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)).eval()
    x = torch.rand(12, 3)
    right = ws.Specification.within(model(x).detach()[:, 0], 0.1)
    closed = ws.sandwich(model, x, right, ws.Threat("inf", 1, 0.05))
    assert closed.attacked - closed.certified < 1e-3
    curve = ws.risk_curve(closed.flips, closed.radii, order=1)
    assert curve(0.05)[0] <= curve(0.05)[1]


def test_a_log_softmax_has_no_values_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1)).eval()
    x = torch.rand(4, 3)
    with pytest.raises(InputError, match="log-softmax"):
        ws.radii(model, x, ws.Specification.within(torch.zeros(4, 2), 5.0))
    rows = torch.tensor([[1.0, -1.0]])
    margin = (model(x) @ rows.T).detach()
    found = ws.radii(model, x, ws.Specification(rows, 0.1 - margin), "inf", None, "crown")
    assert (found.values > 0).all()
