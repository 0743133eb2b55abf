"""A positive factor on the logits changes no flip: tolerances are relative to the logits' own
size.
"""

import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.losses import flip_tolerance, predict
from wassail.testing import samples

INF = math.inf
NORMS = (1.0, 2.0, INF)
BINARY = (-40, -20, 20, 40)  # powers of two: nothing is rounded, so all digits agree
DECIMAL = (1e-12, 1e-6, 1e6, 1e12)


class Scaled(nn.Module):
    """A model whose logits are multiplied by a factor."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model = model
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.model(x)


def network(classes: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, classes)]
    return nn.Sequential(*layers).to(dtype)


def problem(dtype: torch.dtype = torch.float32):
    model = network(dtype=dtype)
    x = samples(16, (3, 4), 5)[0].to(dtype)
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 5
    return model, x, y


def same(a: ws.Flips, b: ws.Flips) -> None:
    assert torch.equal(a.points, b.points)
    assert torch.equal(a.distances, b.distances)
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.forwards, b.forwards) and torch.equal(a.backwards, b.backwards)


@pytest.mark.parametrize("norm", NORMS)
def test_powers_of_two_change_no_digit_of_nearest(norm: float) -> None:
    model, x, y = problem()
    plain = ws.nearest(model, x, y, norm, passes=120)
    assert plain.success.all()
    for power in BINARY:
        same(plain, ws.nearest(Scaled(model, 2.0**power), x, y, norm, passes=120))


@pytest.mark.parametrize("method", ["wda++", "fab", "deepfool", "fmn"])
def test_powers_of_two_change_no_digit_of_other_engines(method: str) -> None:
    model, x, y = problem(torch.float64)
    options = {"eps": 0.3} if method == "wda++" else {"passes": 60}
    plain = ws.nearest(model, x, y, 2, method=method, **options)
    assert plain.success.any()
    for power in BINARY:
        found = ws.nearest(Scaled(model, 2.0**power), x, y, 2, method=method, **options)
        same(plain, found)


@pytest.mark.parametrize("loss", ["dlr", "targeted"])
def test_powers_of_two_change_no_digit_of_apgd(loss: str) -> None:
    model, x, y = problem(torch.float64)
    threat = ws.Threat(2, INF, 0.1)
    plain = ws.apgd(model, x, y, threat, loss=loss, steps=8)
    for power in BINARY:
        found = ws.apgd(Scaled(model, 2.0**power), x, y, threat, loss=loss, steps=8)
        assert torch.equal(plain.points, found.points)


@pytest.mark.slow_cases("1.0", "2.0")
@pytest.mark.parametrize("norm", NORMS)
def test_other_factors_change_no_flip(norm: float) -> None:
    """The factor rounds the logits, so points move a little. Accuracies do not."""
    model, x, y = problem(torch.float64)
    plain = ws.nearest(model, x, y, norm, passes=150)
    for factor in DECIMAL:
        found = ws.nearest(Scaled(model, factor), x, y, norm, passes=150)
        assert torch.equal(plain.success, found.success)
        assert torch.equal(plain.labels, found.labels)
        assert torch.allclose(plain.distances, found.distances, rtol=1e-5)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_stored_flips_are_wrong_by_the_tolerance_at_every_scale(factor: float) -> None:
    model, x, y = problem()
    scaled = Scaled(model, factor)
    flips = ws.nearest(scaled, x, y, 2, passes=60)
    z = scaled(flips.points).detach()
    lead = z.gather(1, flips.labels[:, None])[:, 0] - z.gather(1, y[:, None])[:, 0]
    size = scaled(x).detach().abs().amax(1)
    assert (lead[1:] >= 0.9 * flip_tolerance(x.dtype) * size[1:]).all()


def test_logits_that_all_vanish_at_the_boundary_need_a_lead_too() -> None:
    """Two logits `(-f, f)`: relative to the logits at the point every lead would be large."""
    weight = torch.randn(12, generator=torch.Generator().manual_seed(1))

    def model(x: Tensor) -> Tensor:
        f = x.flatten(1) @ weight
        return torch.stack([-f, f], 1)

    x = samples(20, (12,), 2)[0].float()
    y = model(x).argmax(1)
    flips = ws.nearest(model, x, y, 2, None, passes=40)
    lead = (model(flips.points)[:, 1] - model(flips.points)[:, 0]) * (1 - 2 * y)
    assert flips.success.all()
    assert (lead >= 0.9e-5 * model(x).abs().amax(1)).all()


def test_a_saturated_network_is_judged_by_its_own_size() -> None:
    """Logits so large that softmax is 0 and 1 in float32: the flips are those of the small ones."""
    model, x, y = problem()
    plain = ws.nearest(model, x, y, INF, passes=100)
    huge = Scaled(model, 2.0**100)
    same(plain, ws.nearest(huge, x, y, INF, passes=100))


def test_predict_relative_to_the_size_of_the_logits() -> None:
    y = torch.tensor([0, 0, 0])
    z = torch.tensor([[1.0, 1.0 + 5e-4], [1.0, 1.0 + 2e-3], [-3.0, -3.0 + 2e-3]])
    for factor in (1e-12, 1e-3, 1.0, 1e12):
        assert predict((factor * z).double(), y, 1e-3).tolist() == [0, 1, 0]
        scale = factor * torch.tensor([0.1, 10.0, 0.1], dtype=torch.float64)
        assert predict((factor * z).double(), y, 1e-3, scale).tolist() == [0, 0, 0]
    assert predict(torch.zeros(3, 2), y, 1e-3, torch.ones(3)).tolist() == [0, 0, 0]
    assert predict(torch.zeros(3, 2), y).tolist() == [1, 1, 1], "a tie is an error"
