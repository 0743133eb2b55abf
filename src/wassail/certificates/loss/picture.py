"""The worst expected loss drawn: evaluated from below, certified from above."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from wassail.plots import figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, as in all figures: what is evaluated, what is certified.
EVALUATED = "#D55E00"
CERTIFIED = "#0072B2"


class Curve(Protocol):
    """What is drawn: a `LossCurve`."""

    @property
    def order(self) -> float:
        """The Wasserstein order."""

    @property
    def loss(self) -> str:
        """The name of the loss."""

    def __call__(self, eps: float) -> tuple[float, float]:
        """The worst expected loss from both sides."""


def draw_losses(curve: Curve, grid: Sequence[float]) -> Figure:
    """Both sides of the worst expected loss, and between them what is not known.

    grid: budgets at which the curve is evaluated, in rising order.
    """
    sides = [curve(eps) for eps in grid]
    low = [side[0] for side in sides]
    high = [side[1] for side in sides]
    figure = figure_of(5.6, 3.6)
    axes = figure.subplots()
    axes.fill_between(grid, low, high, color="0.88", lw=0, label="not known: between the two")
    axes.plot(grid, high, color=CERTIFIED, lw=1.9, label="certified: never above")
    axes.plot(grid, low, color=EVALUATED, lw=1.9, label="attained by a distribution")
    axes.set(xlabel="budget eps", ylabel=f"expected {curve.loss} loss", xlim=(0, max(grid)))
    axes.set_title(f"worst loss over Omega_{curve.order:g}(eps)", fontsize=10)
    axes.locator_params(axis="x", nbins=5)
    axes.legend(fontsize=9, frameon=False)
    return figure
