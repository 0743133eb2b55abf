"""Votes, attacks on them and losses for training on a second device: the figures of the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.devices import WAYS, differences, network, samples, there

pytestmark = pytest.mark.device

THREAT = ws.Threat(norm="inf", order=1, eps=0.1)


def votes(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return ws.smoothed(model, 0.2, draws=100).votes(x, y).hits


def attack(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    smooth = ws.smoothed(model, 0.2, draws=100, average=2)
    return ws.attack_smoothed(smooth, x, y, passes=6, stretches=(0.5, 1.0), eps=(0.2,))


def robust(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return ws.robust_loss(model, x, y, THREAT).detach()


def certified(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return ws.certified_loss(model, x, y, THREAT).detach()


def errors(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Balls are drawn on the CPU, wherever the batch is; the price learns from both losses."""
    draws = torch.Generator().manual_seed(0)
    price = ws.Price()
    found = []
    for which in (ws.robust_loss, ws.certified_loss):
        for _ in range(2):
            drawn = which(model, x, y, THREAT, "error", price=price, generator=draws)
            found += [drawn.detach(), which(model, x, y, THREAT, "error").detach()]
    found.append(ws.robust_loss(model, x, y, THREAT, "kl").detach())
    return torch.stack(found)


# A training loop puts its batch where the model is.
CASES = [(call, way) for call in (votes, attack) for way in WAYS[:2]]
CASES += [(robust, WAYS[0]), (certified, WAYS[0]), (errors, WAYS[0])]


@pytest.mark.parametrize(("call", "way"), CASES)
def test_the_figures_of_the_cpu(call: Callable[..., Any], way: str) -> None:
    model = network()
    x, y = samples(model)
    found, _ = there(call, model, x, y, way)
    assert differences(call(model, x, y), found) == []
