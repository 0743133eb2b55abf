"""Losses that stand for the worst share of wrong answers, and for the divergence of TRADES."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import wassail as ws
from wassail.errors import InputError
from wassail.hardening.price import BALLS, balls, error

NORMS = [1.0, 2.0, math.inf]
ORDERS = [1.0, 2.0]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()


def perceptron(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return nn.Sequential(*layers).double()


def right(model: nn.Module, n: int = 40) -> tuple[Tensor, Tensor]:
    """Samples with the labels that the model gives them, but for every tenth."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(n, 4, dtype=torch.float64, generator=generator)
    y = model(x).argmax(1)
    y[::10] = (y[::10] + 1) % 2
    return x, y


def distances_of(model: nn.Module, x: Tensor, y: Tensor, norm: float) -> Tensor:
    """To the boundary of a linear model in all of space."""
    weight = model[1].weight
    dual = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[norm]
    size = torch.linalg.vector_norm(weight[0] - weight[1], ord=dual)
    return (-ws.losses.margin(model(x), y) / size).clamp(min=0).detach()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm", NORMS)
def test_the_balls_of_a_linear_model_add_up_to_the_dual(norm: float, order: float) -> None:
    """In a linear model a ball is proved up to the very distance, so with steep logits the bits are
    0 or large; capped at 1 their mean over the balls is `mean (1 - lam d^p)_+` but for one part of
    the grid. The dual is above the worst error, a linear program, whatever the price.
    """
    model = linear()
    x, y = right(model)
    found = distances_of(model, x, y, norm)
    eps = 0.2
    threat = ws.Threat(norm=norm, order=order, eps=eps, domain=None)
    cost = (found**order).numpy()[None]
    share = linprog(-np.ones(len(x)), cost, [len(x) * eps**order], bounds=(0, 1))
    worst = -share.fun / len(x)
    for part in (2.0, 3.0, 5.0):
        price = ws.Price()
        price.value = (part * eps) ** -order
        used, parts = balls(len(x), threat, price, None)
        gains = (1 - used * found**order).clamp(min=0)
        radii = (parts / used) ** (1 / order)
        inside = (radii >= found).double().mean(0)
        assert bool((inside >= gains - 1e-12).all())
        assert bool((inside <= gains + 1 / BALLS + 1e-12).all())
        steep = nn.Sequential(model[0], nn.Linear(4, 2)).double()
        with torch.no_grad():
            for mine, given in zip(steep.parameters(), model.parameters(), strict=True):
                mine.copy_(1e6 * given)
        bound = float(ws.certified_loss(steep, x, y, threat, "error", price).detach())
        assert bound >= used * eps**order + float(gains.mean()) - 1e-9
        assert bound >= worst - 1e-9


@pytest.mark.few(4)
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("norm", NORMS)
def test_a_bound_on_the_error_is_above_what_attacks_reach(norm: float, order: float) -> None:
    for seed in range(3):
        model = perceptron(seed)
        x, y = right(model, 20)
        threat = ws.Threat(norm=norm, order=order, eps=0.05)
        flips = ws.nearest(model, x, y, norm=norm, passes=60)
        attacked = 1 - ws.risk_curve(flips, order=order)(0.05)[1]
        for loss in ("error", "chance"):
            bound = float(ws.certified_loss(model, x, y, threat, loss).detach())
            climbed = float(ws.robust_loss(model, x, y, threat, loss).detach())
            assert attacked <= bound + 1e-9
            assert climbed <= bound + 1e-9


def test_a_chance_is_bounded_where_bits_are_not() -> None:
    """A sample that is lost beyond hope counts 2, and pulls at the weights no more."""
    for which in (ws.certified_loss, ws.robust_loss):
        model = perceptron()
        with torch.no_grad():
            for value in model.parameters():
                value *= 100
        x, y = right(model, 20)
        point = ws.Threat(norm="inf", order="inf", eps=0.5)
        assert which(model, x, y, point, "error").item() > 10
        chance = which(model, x, y, point, "chance")
        assert 0.5 < chance.item() <= 2
        chance.backward()
        assert max(float(value.grad.abs().max()) for value in model.parameters()) < 1e-3


@pytest.mark.parametrize("which", [ws.certified_loss, ws.robust_loss])
def test_one_ball_each_has_the_mean_of_many(which: object) -> None:
    """Draws average to the mean over a fine grid of balls, which is above the worst error."""
    assert callable(which)
    model = perceptron()
    x, y = right(model)
    threat = ws.Threat(norm="inf", order=1, eps=0.05)
    generator = torch.Generator().manual_seed(1)
    values = [which(model, x, y, threat, "error", generator=generator).item() for _ in range(200)]
    drawn = torch.tensor(values, dtype=torch.float64)
    places = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    fine = []
    for place in places:  # one radius for all samples: the point-wise threat
        point = ws.Threat(norm="inf", order="inf", eps=float(0.15 * place))
        fine.append(which(model, x, y, point, "error").item())
    expected = 1 / 3 + sum(fine) / len(fine)
    assert abs(float(drawn.mean()) - expected) <= 4 * float(drawn.std()) / math.sqrt(200) + 1e-4
    assert float(drawn.std()) > 1e-4  # it is a draw


def test_draws_come_from_the_generator_alone() -> None:
    model = perceptron()
    x, y = right(model)
    threat = ws.Threat(norm=2, order=2, eps=0.05)
    values = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        torch.rand(3)  # the global one is not used
        values.append(ws.certified_loss(model, x, y, threat, "error", generator=generator).item())
    assert values[0] == values[1]


def test_the_price_of_an_error_finds_the_marginal_sample() -> None:
    """Radii 0.02, 0.04, ..., 0.4 and a mean budget of 0.05: the ten cheapest of twenty cost 1.1,
    more than 20 times 0.05, so the tenth sample, at 0.2, is the last that is worth its price.
    """
    found = torch.linspace(0.02, 0.4, 20, dtype=torch.float64)
    threat = ws.Threat(norm="inf", order=1, eps=0.05)
    price = ws.Price(rate=0.05)
    generator = torch.Generator().manual_seed(0)
    tail = []
    for step in range(600):
        used, parts = balls(20, threat, price, generator)
        wrong = (parts / used >= found).double()
        value = error(2 * wrong, parts, threat, used, price)
        assert float(value) > 0
        if step >= 300:
            tail.append(1 / used)
    assert 0.16 < sum(tail) / len(tail) < 0.25


@pytest.mark.parametrize("loss", ["kl", "error", "chance"])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_gradients_are_finite_differences(loss: str, order: float) -> None:
    model = perceptron()
    x, y = right(model)
    threat = ws.Threat(norm="inf", order=order, eps=0.1)
    weight = model[0].weight
    # 1e-7: the points move with the weights only where the sign of a gradient does
    ws.robust_loss(model, x, y, threat, loss).backward()
    expected = weight.grad[2, 1].item()
    values = []
    for change in (-1e-7, 1e-7):
        with torch.no_grad():
            weight[2, 1] += change
            values.append(float(ws.robust_loss(model, x, y, threat, loss).detach()))
            weight[2, 1] -= change
    assert (values[1] - values[0]) / 2e-7 == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_divergence_of_a_linear_model_in_closed_form(norm: float) -> None:
    """The point-wise threat moves each logit difference by `eps |w|`, and the divergence is that of
    two coins.
    """
    model = linear()
    x, y = right(model)
    eps = 0.1
    weight = model[1].weight
    dual = {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[norm]
    shift = eps * torch.linalg.vector_norm(weight[0] - weight[1], ord=dual)
    margin = ws.losses.margin(model(x), y)
    before = torch.sigmoid(-margin)  # probability of the true label
    after = torch.sigmoid(-margin - shift)
    coins = before * (before / after).log() + (1 - before) * ((1 - before) / (1 - after)).log()
    expected = float((-before.log() + 6 * coins).mean().detach())
    threat = ws.Threat(norm=norm, order=math.inf, eps=eps, domain=None)
    found = ws.robust_loss(model, x, y, threat, "kl", steps=1)
    assert float(found.detach()) == pytest.approx(expected, rel=1e-9)
    # at order 1 the same budget may go to few samples: at least as much
    spread = ws.Threat(norm=norm, order=1, eps=eps, domain=None)
    assert float(ws.robust_loss(model, x, y, spread, "kl").detach()) >= expected - 1e-9


def test_bad_input() -> None:
    model = perceptron()
    x, y = right(model)
    threat = ws.Threat(norm="inf", order=1, eps=0.1)
    for which in (ws.robust_loss, ws.certified_loss):
        with pytest.raises(InputError, match="generator draws balls"):
            which(model, x, y, threat, "margin", generator=torch.Generator())
    with pytest.raises(InputError, match="kl"):
        ws.certified_loss(model, x, y, threat, "kl")
