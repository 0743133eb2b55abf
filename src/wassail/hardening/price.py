"""The price of the budget: the multiplier of the dual that both losses share (theory 2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.threat import Threat, parse_level

ERRORS = ("error", "chance")  # losses that stand for the share of wrong answers
HALVINGS = 60
# The largest ball for the error, in units of eps. A model that is half right over the Wasserstein
# ball needs 2 to 4.
SMALLEST = 1.0
USUAL = 3.0
LARGEST = 5.0
BALLS = 4  # when none is drawn


class Price:
    """What a unit of the budget costs, learned from batch to batch.

    One batch sees a small part of the data, and the ball is around all of them. So the price that
    shares the budget is kept between batches: it rises where more was spent than there is.

    Args:
        rate: how fast it moves, 0 to 1; default 0.1.
    """

    def __init__(self, rate: float = 0.1) -> None:
        self.rate = parse_level(rate, "rate")
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
        self.learn(spending(losses, costs, used), budget)
        return used

    def within(self, low: float, high: float, first: float) -> float:
        """The price, kept between two; the first time `first`.

        Args:
            low: smallest price.
            high: largest price.
            first: where to start.
        """
        value = first if self.value is None else self.value
        self.value = min(high, max(low, value))
        return self.value

    def learn(self, spent: float, budget: float) -> None:
        """Rise if more was spent than there is, fall if less.

        Args:
            spent: mean cost at the price of today, the unit of the budget.
            budget: mean cost that is allowed.
        """
        step = max(-1.0, min(1.0, spent / budget - 1))
        self.value = max(self.value or 0.0, 1e-12) * math.exp(self.rate * step)


def spending(losses: Tensor, costs: Tensor, price: float) -> float:
    """The mean cost of the places that are worth their price."""
    costs = costs.expand_as(losses)
    best = (losses - price * costs).argmax(1, keepdim=True)
    return float(costs.gather(1, best).mean())


def batch_price(losses: Tensor, costs: Tensor, budget: float) -> float:
    """The price at which a batch spends its budget: where the dual is least, by bisection.

    losses: `(N, P)`; costs: `(N, P)` or `(P,)`, the first 0; budget: mean cost that is allowed.
    """
    return _bracket(losses.detach().double(), costs.detach().double(), budget)[1]


def _bracket(
    losses: Tensor, costs: Tensor, budget: float, slack: float = 0.0
) -> tuple[float, float]:
    """Two prices next to each other: the batch spends too much at one, and not at the other.

    Args:
        losses: `(N, P)`.
        costs: `(N, P)` or `(P,)`, the first 0.
        budget: mean cost that is allowed.
        slack: the search starts so much above the highest price that is worth paying, as a share of
            it: rounding must not make that one look cheap.
    """
    rise = (losses - losses[:, :1]).clamp(min=0)
    per = torch.where(costs > 0, rise / costs.clamp(min=1e-300), 0.0)
    low = 0.0
    high = float(per.max()) * (1 + slack) if per.numel() else 0.0
    if not math.isfinite(high) or spending(losses, costs, 0.0) <= budget:
        return 0.0, 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if spending(losses, costs, middle) > budget:
            low = middle
        else:
            high = middle
    return low, high


def allocated(losses: Tensor, costs: Tensor, budget: float) -> Tensor:
    """The best mean loss that a batch can buy, differentiable in the losses.

    The value is that of the dual at its best price. Between the two sides of that price the places
    change; both are mixed so that the budget is spent to the end, and the gradient is that of the
    mixture: the price moves with the losses, so the gradient at a fixed price is another one.

    losses: `(N, P)`; costs: `(N, P)` or `(P,)`, the first 0; budget: mean cost that is allowed.
    """
    wide = losses.detach().double()
    prices = _bracket(wide, costs.detach().double(), budget, slack=1e-9)
    each = costs.detach().double().expand_as(wide)
    chosen = [(wide - price * each).argmax(1, keepdim=True) for price in prices]
    spent = [float(each.gather(1, places).mean()) for places in chosen]
    means = [losses.gather(1, places).mean() for places in chosen]
    room = spent[0] - spent[1]
    share = min(1.0, max(0.0, (budget - spent[1]) / room)) if room > 0 else 0.0
    mixed: Tensor = share * means[0] + (1 - share) * means[1]
    return mixed


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


def balls(
    n: int, threat: Threat, price: Price | None, generator: torch.Generator | None
) -> tuple[float, Tensor]:
    """The price `lam` of an error, and which balls of radius `(u / lam)^(1/p)` to look at.

    A flip at distance `r` gains `max(0, 1 - lam r^p)`: the share of the `u` in 0 to 1 whose ball
    has it inside. Without a generator `u` takes the right ends of equal parts of 0 to 1, so that
    the mean over them is above the integral. With one, each sample has one `u`, uniform.

    Args:
        n: samples.
        threat: `Threat` of finite order.
        price: `Price` that is kept, or None.
        generator: `torch.Generator` on the CPU, or None.

    Returns:
        The price, and `u`, `(rows, n)`.
    """
    order = threat.order
    used = (USUAL * threat.eps) ** -order
    if price is not None:
        highest = (SMALLEST * threat.eps) ** -order
        lowest = (LARGEST * threat.eps) ** -order
        used = price.within(lowest, highest, first=used)
    if generator is None:
        ends = torch.arange(1, BALLS + 1, dtype=torch.float64) / BALLS
        return used, ends[:, None].expand(BALLS, n)
    # one in each n-th part of 0 to 1, in random order: less noise than free draws
    places = torch.randperm(n, generator=generator)
    return used, (places + torch.rand(n, generator=generator, dtype=torch.float64))[None] / n


def wrongness(losses: Tensor, loss: str) -> Tensor:
    """What is at least 1 where an answer is wrong: cross entropy in bits, or twice a chance.

    Args:
        losses: cross entropy, or bounds on it, any shape.
        loss: "error", in bits; "chance", twice the probability of the other classes, at most 2.
    """
    if loss == "chance":
        return -2 * torch.expm1(-losses)
    return losses / math.log(2)


def error(
    values: Tensor, parts: Tensor, threat: Threat, used: float, price: Price | None
) -> Tensor:
    """`lam eps^p + mean_i mean_u values`, and what the batch teaches the price.

    Args:
        values: `wrongness` in each ball, or bounds on it, `(rows, n)`: 1 or more if wrong.
        parts: the `u` of `balls`, `(rows, n)`.
        threat: `Threat` of finite order.
        used: the price of `balls`.
        price: `Price` that learns, or None.
    """
    budget = threat.eps**threat.order
    if price is not None:
        right = values.detach().cpu() < 1
        # A sample of radius (u / lam)^(1/p) spends u / lam if u < 1, else nothing: what is right in
        # all its balls, less what is right in the largest.
        largest = parts >= 0.9 * parts.amax()
        share = float(right.double().mean() - right[largest].double().mean())
        price.learn(max(0.0, share) / used, budget)
    value: Tensor = used * budget + values.mean()
    return value
