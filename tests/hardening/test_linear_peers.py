"""Linear models: training with our loss finds what the convex problem of `dro` and `skwdro` has.

For logistic loss at order 1 without a box the worst case is `mean loss + eps |w|_dual`
(Shafieezadeh-Abadeh et al. 2019). Both packages minimise it; where one is installed it is asked,
and the closed form is minimised by scipy in any case.
"""

import importlib.util
import math
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import wassail as ws

EPS = 0.1
DUAL = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}
FAR = (1.0, 1e2, 1e4, 1e6)


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    noise = 0.8 * torch.randn(40, dtype=torch.float64, generator=generator)
    return x, ((x @ torch.tensor([1.0, -0.5, 0.0]).double() + noise) > 0).long()


def classifier(theta: np.ndarray) -> nn.Module:
    """Two logits whose difference is `w x + b`."""
    model = nn.Sequential(nn.Linear(3, 2)).double()
    half = torch.as_tensor(theta) / 2
    with torch.no_grad():
        model[0].weight.copy_(torch.stack([-half[:3], half[:3]]))
        model[0].bias.copy_(torch.stack([-half[3], half[3]]))
    return model


def closed_form(theta: np.ndarray, norm: float) -> float:
    x, y = samples()
    sign = 2 * y.numpy() - 1
    loss = np.logaddexp(0, -sign * (x.numpy() @ theta[:3] + theta[3])).mean()
    return float(loss + EPS * np.linalg.norm(theta[:3], DUAL[norm]))


def least(norm: float) -> float:
    found = [
        minimize(closed_form, start, (norm,), "Nelder-Mead", options={"maxiter": 4000}).fun
        for start in (np.zeros(4), np.array([1.0, -0.5, 0.1, 0.0]))
    ]
    return float(min(found))


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_the_loss_is_the_closed_form(norm: float) -> None:
    """The supremum is reached far away only: a path that leads far comes close from below."""
    theta = np.array([1.5, -0.7, 0.2, 0.1])
    threat = ws.Threat(norm=norm, order=1, eps=EPS, domain=None)
    model = classifier(theta)
    expected = closed_form(theta, norm)
    exact = ws.worst_case(model, *samples(), threat, "cross_entropy").bound
    assert exact.lower - 1e-6 <= expected <= exact.upper + 1e-6
    found = float(ws.robust_loss(model, *samples(), threat, reach=FAR).detach())
    assert expected - 1e-4 <= found <= expected + 1e-9


@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_training_finds_the_robust_minimum(norm: float) -> None:
    model = classifier(np.array([0.1, 0.1, 0.1, 0.0]))
    threat = ws.Threat(norm=norm, order=1, eps=EPS, domain=None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    steps = 250
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        ws.robust_loss(model, *samples(), threat, reach=(1.0, 1e3), steps=1).backward()
        optimizer.step()
        schedule.step()
    weight = (model[0].weight[1] - model[0].weight[0]).detach()
    offset = (model[0].bias[1] - model[0].bias[0]).detach()
    theta = torch.cat([weight, offset[None]]).numpy()
    assert closed_form(theta, norm) <= least(norm) + 1e-3
    plain = minimize(
        lambda t: closed_form(t, norm) - EPS * np.linalg.norm(t[:3], DUAL[norm]), theta
    )
    assert closed_form(plain.x, norm) > least(norm) + 1e-2  # without it another model comes out


def part_of(package: str, module: str) -> ModuleType:
    """A module of a package whose other parts may need what is not installed."""
    if package not in sys.modules:
        found = importlib.util.find_spec(package)
        if found is None:
            pytest.skip(f"{package} is not installed")
        stand_in = ModuleType(package)
        stand_in.__path__ = list(found.submodule_search_locations or [])
        sys.modules[package] = stand_in
    return importlib.import_module(module)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [2.0, math.inf])
def test_dro_agrees(norm: float) -> None:
    solver = part_of("dro", "dro.linear_model.wasserstein_dro").WassersteinDRO(3, "logistic")
    solver.update({"eps": EPS, "p": "inf" if norm == math.inf else norm, "kappa": "inf"})
    x, y = samples()
    solver.fit(x.numpy(), 2 * y.numpy() - 1)
    theta = np.append(np.ravel(solver.theta), solver.b)
    threat = ws.Threat(norm=norm, order=1, eps=EPS, domain=None)
    bound = ws.worst_case(classifier(theta), x, y, threat, "cross_entropy").bound
    assert bound.upper == pytest.approx(least(norm), abs=1e-4)


@pytest.mark.slow
def test_skwdro_agrees() -> None:
    module = pytest.importorskip("skwdro.linear_models", reason="skwdro is not installed")
    solver = module.LogisticRegression(rho=EPS, cost="t-NLC-2-1", solver="dedicated")
    x, y = samples()
    solver.fit(x.numpy(), 2 * y.numpy() - 1)
    theta = np.append(np.ravel(solver.coef_), solver.intercept_)
    threat = ws.Threat(norm=2, order=1, eps=EPS, domain=None)
    bound = ws.worst_case(classifier(theta), x, y, threat, "cross_entropy").bound
    assert bound.upper == pytest.approx(least(2.0), abs=1e-3)
