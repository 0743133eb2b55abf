"""The price of the budget: the multiplier of the dual that both losses share (theory 2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

HALVINGS = 60


class Price:
    """What a unit of the budget costs, learned from batch to batch.

    One batch sees a small part of the data, and the ball is around all of them. So the price that
    shares the budget is kept between batches: it rises where more was spent than there is.

    Args:
        rate: how fast it moves, 0 to 1; default 0.1.
    """

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate
        self.value: float | None = None

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint keeps."""
        return {"rate": self.rate, "value": self.value}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Go on from a checkpoint.

        Args:
            state: what `state_dict` gave.
        """
        rate = state["rate"]
        self.rate = 0.1 if rate is None else rate
        self.value = state["value"]

    def of(self, losses: Tensor, costs: Tensor, budget: float) -> float:
        """The price to use for a batch, and what the batch teaches.

        Args:
            losses: of N samples at P places each, `(N, P)`.
            costs: what going there costs, `(N, P)` or `(P,)`, increasing from 0.
            budget: mean cost that is allowed.
        """
        best = batch_price(losses, costs, budget)
        if self.value is None or not math.isfinite(self.value):
            self.value = best
            return best
        used = self.value
        spent = spending(losses, costs, used)
        step = max(-1.0, min(1.0, spent / budget - 1))
        self.value = max(used, 1e-12) * math.exp(self.rate * step)
        return used


def spending(losses: Tensor, costs: Tensor, price: float) -> float:
    """The mean cost of the places that are worth their price."""
    costs = costs.expand_as(losses)
    best = (losses - price * costs).argmax(1, keepdim=True)
    return float(costs.gather(1, best).mean())


def batch_price(losses: Tensor, costs: Tensor, budget: float) -> float:
    """The price at which a batch spends its budget: where the dual is least, by bisection.

    Args:
        losses: `(N, P)`.
        costs: `(N, P)` or `(P,)`, the first 0.
        budget: mean cost that is allowed.
    """
    losses = losses.detach().double()
    costs = costs.detach().double()
    rise = (losses - losses[:, :1]).clamp(min=0)
    per = torch.where(costs > 0, rise / costs.clamp(min=1e-300), 0.0)
    low = 0.0
    high = float(per.max()) if per.numel() else 0.0
    if not math.isfinite(high) or spending(losses, costs, 0.0) <= budget:
        return 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if spending(losses, costs, middle) > budget:
            low = middle
        else:
            high = middle
    return high


def dual(losses: Tensor, costs: Tensor, budget: float, price: float) -> Tensor:
    """`price budget + mean_i max_k losses_ik - price costs_k`, differentiable in the losses.

    Args:
        losses: `(N, P)`.
        costs: `(N, P)` or `(P,)`.
        budget: mean cost that is allowed.
        price: any price >= 0.
    """
    worth: Tensor = (losses - price * costs).amax(1)
    return price * budget + worth.mean()
