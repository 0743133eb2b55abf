"""The worst-case loss of a population against the budget, from both sides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from wassail.errors import InputError
from wassail.plots import figure_of
from wassail.threat import Number, number


@dataclass(frozen=True)
class PopulationLoss:
    """Limits on the worst expected loss of a population over `Omega_order(eps)`, for all eps.

    `LossCurve.population` makes it. The limits were computed at some eps, each with a share of the
    error probability; in between, the loss grows with eps, so the next one above is an upper limit
    and the last one below a lower limit. Each side holds with this confidence at all eps at once.

    Args:
        order: Wasserstein order p.
        eps: where the limits were computed, rising.
        lower: limits from below, of the evaluated points.
        upper: limits from above, certified.
        least: the least value that the loss can have.
        most: the greatest value that the loss can have.
        confidence: of each side, in (0, 1).
        samples: int, how many there were.
    """

    order: float
    eps: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    least: float
    most: float
    confidence: float
    samples: int

    def __call__(self, eps: Number) -> tuple[float, float]:
        """`(lower, upper)` at any `eps >= 0`.

        Args:
            eps: budget >= 0.
        """
        budget = number(eps, "eps")
        if budget < 0:
            raise InputError(f"eps is {eps!r}: a curve is defined for eps >= 0.")
        below = [value for place, value in zip(self.eps, self.lower) if place <= budget]
        above = [value for place, value in zip(self.eps, self.upper) if place >= budget]
        return max(below, default=self.least), min(above, default=self.most)

    def gap(self, eps: Number) -> float:
        """`upper - lower` at `eps >= 0`: sampling and what is not proved, together.

        Args:
            eps: budget >= 0.
        """
        low, high = self(eps)
        return high - low

    def inverse(self, loss: Number, side: str = "upper") -> float:
        """The largest eps up to which the loss stays at or below a level, 0 if nowhere.

        Args:
            loss: level.
            side: "upper" (the default): proved up to there. "lower": not known to be false.
        """
        level = number(loss, "loss")
        if side == "upper":
            return max((e for e, value in zip(self.eps, self.upper) if value <= level), default=0.0)
        if side != "lower":
            raise InputError(f"the curve has no side {side!r}: choose 'upper' or 'lower'.")
        return min((e for e, value in zip(self.eps, self.lower) if value > level), default=math.inf)

    def plot(self, ax: Any = None) -> Any:
        """Both sides against eps as steps, on matplotlib axes, which are returned.

        Args:
            ax: matplotlib axes to draw on; default None, a new figure.
        """
        axes = figure_of(5.6, 4.4).subplots() if ax is None else ax
        axes.step(self.eps, self.upper, where="pre", label="certified: never above")
        axes.step(self.eps, self.lower, where="post", label="some distribution is this bad")
        axes.set(xlabel="budget eps", ylabel="expected loss, all inputs")
        axes.legend(fontsize=9, frameon=False)
        return axes
