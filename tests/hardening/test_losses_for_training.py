"""Losses for training: linear models in closed form, bounds on both sides, gradients, errors."""

import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.errors import InputError
from wassail.hardening.price import batch_price, dual

NORMS = [1.0, 2.0, math.inf]


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()


def perceptron(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU(0.1))
    return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def convolutional() -> nn.Module:
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(4)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    layers = (nn.Conv2d(1, 4, 3, padding=1, stride=2), norm, nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 3)).double().eval()


def batch(shape: tuple[int, ...], classes: int, n: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(n, *shape, dtype=torch.float64, generator=generator)
    return x, torch.randint(classes, (n,), generator=generator)


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_model_in_all_of_space(norm: float, order: float) -> None:
    """The margin grows alike everywhere, so the worst case is `loss + slope eps`, and any split
    of the budget attains it at order 1. It is what `worst_case` gives.
    """
    model = linear()
    x, y = batch((4,), 2)
    threat = ws.Threat(norm=norm, order=order, eps=0.2, domain=None)
    found = ws.robust_loss(model, x, y, threat, "margin")
    exact = ws.worst_case(model, x, y, threat, "margin")
    assert float(found.detach()) == pytest.approx(exact.bound.lower, abs=1e-6)


@pytest.mark.few(4)
@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("norm", NORMS)
def test_both_sides_on_small_networks(norm: float, order: float, loss: str) -> None:
    """An upper bound is above what any loss climbs to, with prices kept or not."""
    x, y = batch((4,), 3)
    threat = ws.Threat(norm=norm, order=order, eps=0.1)
    for seed in range(5):
        model = perceptron(seed)
        clean = float(ws.robust_loss(model, x, y, ws.Threat(norm, math.inf, 1e-9), loss).detach())
        climbed = float(ws.robust_loss(model, x, y, threat, loss).detach())
        bound = float(ws.certified_loss(model, x, y, threat, loss).detach())
        assert clean - 1e-6 <= climbed <= bound + 1e-9
        other = ws.Price()
        other.value = 0.7
        assert float(ws.certified_loss(model, x, y, threat, loss, other).detach()) >= bound - 1e-9


@pytest.mark.parametrize("norm", NORMS)
def test_the_bound_is_above_the_exact_worst_case(norm: float) -> None:
    x, y = batch((4,), 3, n=3)
    threat = ws.Threat(norm=norm, order=1, eps=0.1)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    exact = ws.worst_case(model, x, y, threat, "margin").bound.lower
    assert float(ws.certified_loss(model, x, y, threat, "margin").detach()) >= exact - 1e-9
    assert float(ws.robust_loss(model, x, y, threat, "margin").detach()) <= exact + 1e-6


def test_points_of_balls_lie_below_the_bounds_of_a_convolutional_network() -> None:
    model = convolutional()
    x, y = batch((1, 8, 8), 3)
    generator = torch.Generator().manual_seed(5)
    for norm in NORMS:
        threat = ws.Threat(norm=norm, order=math.inf, eps=0.1)
        bound = ws.certified_loss(model, x, y, threat, "margin")
        for _ in range(50):
            step = torch.randn(x.shape, dtype=torch.float64, generator=generator)
            length = torch.linalg.vector_norm(step.flatten(1), ord=norm, dim=1)
            moved = (x + 0.1 * step / length.view(-1, 1, 1, 1)).clamp(0, 1)
            assert float((ws.losses.margin(model(moved), y).mean() - bound).detach()) <= 0


def test_a_ball_is_not_its_box() -> None:
    """The first layer sees the l2 ball: a linear model is bounded by its weights' norm."""
    model = linear()
    x, y = batch((4,), 2)
    x = 0.4 + 0.2 * x
    threat = ws.Threat(norm=2, order=math.inf, eps=0.01)
    clean = ws.losses.margin(model(x), y).mean()
    weight = model[1].weight
    slope = (weight[0] - weight[1]).norm()
    bound = ws.certified_loss(model, x, y, threat, "margin")
    assert float((bound - clean - 0.01 * slope).detach()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("which", [ws.robust_loss, ws.certified_loss])
def test_gradients_are_finite_differences(which: object) -> None:
    assert callable(which)
    model = perceptron()
    x, y = batch((4,), 3)
    threat = ws.Threat(norm="inf", order=1, eps=0.1)
    weight = model[1].weight
    which(model, x, y, threat).backward()
    expected = weight.grad[2, 1].item()
    values = []
    for change in (-1e-6, 1e-6):
        with torch.no_grad():
            weight[2, 1] += change
            values.append(float(which(model, x, y, threat).detach()))
            weight[2, 1] -= change
    assert (values[1] - values[0]) / 2e-6 == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("model", [linear(), perceptron()], ids=["linear", "perceptron"])
def test_all_gradients_are_finite_differences(model: nn.Module, order: float) -> None:
    """The price moves with the weights: the sample that gets a part of the budget counts."""
    x, y = batch((4,), 2)
    threat = ws.Threat(norm="inf", order=order, eps=0.1)
    weight = model[1].weight
    weight.grad = None
    ws.robust_loss(model, x, y, threat).backward()
    for place in range(weight.numel()):
        values = []
        for change in (-1e-6, 1e-6):
            with torch.no_grad():
                weight.view(-1)[place] += change
                values.append(float(ws.robust_loss(model, x, y, threat).detach()))
                weight.view(-1)[place] -= change
        expected = weight.grad.view(-1)[place].item()
        assert (values[1] - values[0]) / 2e-6 == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_price_of_a_batch_and_one_that_learns() -> None:
    losses = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0]])
    costs = torch.tensor([0.0, 1.0])
    # a third of the budget of all: the best sample goes, and the dual is its share
    price = batch_price(losses, costs, 1 / 3)
    assert float(dual(losses, costs, 1 / 3, price)) == pytest.approx(1.0, abs=1e-9)
    learned = ws.Price(rate=0.5)
    for _ in range(200):
        used = learned.of(losses, costs, 1 / 3)
    assert 1.9 < used < 3.1
    again = ws.Price()
    again.load_state_dict(learned.state_dict())
    assert again.value == learned.value


def test_training_with_it_helps() -> None:
    """A few steps on one batch lower the bound."""
    model = perceptron()
    x = batch((4,), 3, 40)[0]
    y = x[:, :3].argmax(1)
    threat = ws.Threat(norm="inf", order=1, eps=0.005)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    values = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = ws.certified_loss(model, x, y, threat)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < 0.8 * values[0]


def test_bad_input() -> None:
    x, y = batch((4,), 3)
    threat = ws.Threat(norm="inf", order=1, eps=0.1)
    free = ws.Threat(norm="inf", order=1, eps=0.1, domain=None)
    smooth = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3)).double()
    random = nn.Sequential(nn.Dropout(), nn.Linear(4, 3)).double()
    for ask in (
        lambda: ws.robust_loss(perceptron(), x, y, threat, "dlr"),
        lambda: ws.robust_loss(perceptron(), x, y, threat, steps=0),
        lambda: ws.robust_loss(perceptron(), x, y, threat, reach=(2, 1)),
        lambda: ws.certified_loss(perceptron(), x, y, threat, "dlr"),
        lambda: ws.certified_loss(perceptron(), x, y, free),
        lambda: ws.certified_loss(smooth, x, y, threat),
        lambda: ws.certified_loss(random, x, y, threat),
        lambda: ws.certified_loss(nn.Sequential(nn.ReLU()), x, y, threat),
    ):
        with pytest.raises(InputError):
            ask()
