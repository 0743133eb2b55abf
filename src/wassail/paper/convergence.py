"""Figure: both sides of the loss against the budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.certificates.bound import Bound
from wassail.certificates.exact.cells import enumerate_cells
from wassail.certificates.exact.infinity import infinity, infinity_at
from wassail.certificates.graph.region import Region
from wassail.certificates.lipschitz.steepest import margin_rows
from wassail.certificates.loss.worst_case import anchor, worst_case
from wassail.geometry import maximiser, operator_norm, project
from wassail.paper.instance import BUDGETS, Instance, losses_at, spoken
from wassail.plots import INK, figure_of, legend_below, look
from wassail.threat import Number, Threat, dual, parse_eps, parse_norm, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Convergence:
    """The slopes of an instance, found mask by mask and exactly, and the worst expected loss
    against the budget.

    masks bool `(m, H)` in the order visited; cell_slopes `(m,)`: the steepest recession slope of
    each cell, 0 where it is bounded; cell_norms `(m,)`: `2^(1/r) ||J_D||_{r -> s}`; infinity (l),
    anchor (S): brackets; margin (Lm), paper (L); empirical: the loss on the samples; eps `(T,)`;
    lower, upper `(T,)`: the exact worst case over Omega_1(eps), between its two sides; pgd `(T,)`:
    the loss that PGD reaches, every sample moved by eps; budget: the eps of the first panel.
    """

    case: Instance
    norm: float
    loss: str
    masks: Tensor
    cell_slopes: Tensor
    cell_norms: Tensor
    infinity: Bound
    anchor: Bound
    margin: float
    paper: float
    empirical: float
    eps: Tensor
    lower: Tensor
    upper: Tensor
    pgd: Tensor
    budget: float

    @property
    def slopes(self) -> dict[str, float]:
        """The four slopes: l from below, the others from above."""
        return {
            "infinity": self.infinity.lower,
            "anchor": self.anchor.upper,
            "margin": self.margin,
            "paper": self.paper,
        }

    @property
    def infinity_so_far(self) -> Tensor:
        """The paper's l over the masks visited so far, `(m,)`."""
        return self.cell_slopes.cummax(0).values

    @property
    def paper_so_far(self) -> Tensor:
        """The paper's L over the masks visited so far, `(m,)`: an upper bound only when all
        have been.
        """
        return self.cell_norms.cummax(0).values

    def growth(self, losses: Tensor) -> float:
        """`(loss - E) / eps` at the budget."""
        return (float(losses[self.eps == self.budget]) - self.empirical) / self.budget


def convergence(
    case: Instance,
    norm: Number = 2,
    loss: str = "cross_entropy",
    *,
    eps: Sequence[float] = BUDGETS,
    budget: float = 0.25,
    seed: int = 0,
) -> Convergence:
    """The paper's figure of l and L over more and more masks (n = K = 2), with what it lacks: S, Lm
    and the exact worst case.

    The masks of all cells are visited in a random order (seed). The slope of a cell is the paper's
    `l_N` at a point inside it, for every label that occurs.
    """
    r = parse_norm(norm)
    network = case.network
    labels = case.labels
    value = losses_at(loss)[0]
    cells = enumerate_cells(network, Region.make(None, network.inputs))
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))
    jacobians = network.jacobian(cells.masks[order])
    slopes = [
        infinity_at(network, point.expand(len(labels), -1), torch.tensor(labels), r).lower
        for point in cells.points[order]
    ]
    gaps = margin_rows(network.outputs, labels) @ jacobians
    budgets = sorted({parse_eps(e) for e in (budget, *eps)})
    exact = [
        worst_case(network, case.x, case.y, Threat(r, 1.0, e, None), loss).bound for e in budgets
    ]
    return Convergence(
        case=case,
        norm=r,
        loss=loss,
        masks=cells.masks[order],
        cell_slopes=torch.tensor(slopes, dtype=torch.float64),
        cell_norms=2 ** (1 / r) * operator_norm(jacobians, r, dual(r)),
        infinity=infinity(network, r, labels),
        anchor=anchor(network, case.x, case.y, norm=r, loss=loss),
        margin=float(operator_norm(gaps, r, math.inf).max()),
        paper=2 ** (1 / r) * float(operator_norm(jacobians, r, dual(r)).max()),
        empirical=float(value(network.logits(case.x), case.y).mean()),
        eps=torch.tensor(budgets, dtype=torch.float64),
        lower=torch.tensor([bound.lower for bound in exact], dtype=torch.float64),
        upper=torch.tensor([bound.upper for bound in exact], dtype=torch.float64),
        pgd=torch.tensor([pgd_loss(case, r, loss, e) for e in budgets], dtype=torch.float64),
        budget=float(budget),
    )


def pgd_loss(case: Instance, norm: float, loss: str, eps: float, steps: int = 40) -> float:
    """The mean of the largest losses that PGD (Madry et al. 2018) meets within eps of each sample;
    steps of `2.5 eps / steps`.

    Unlike `ws.pgd`, which is after misclassified points, it goes on climbing behind the decision
    boundary.
    """
    value, ascent = losses_at(loss)
    network = case.network
    y = case.y
    point = case.x
    best = value(network.logits(point), y)
    for _ in range(steps):
        weight = ascent(network.logits(point), y)[1]
        g = torch.einsum("ik,ikn->in", weight, network.jacobian(network.mask(point)))
        point = project(point + 2.5 * eps / steps * maximiser(g, norm), case.x, norm, eps, None)
        best = torch.maximum(best, value(network.logits(point), y))
    return float(best.mean())


def draw_convergence(data: Convergence) -> Figure:
    """Two panels: slopes over the masks visited, and the loss against eps; one legend for both."""
    figure = figure_of(11, 5.2)
    left, right = figure.subplots(1, 2)
    count = torch.arange(1, len(data.masks) + 1)
    for name, symbol, slopes, lw, zorder in (
        ("infinity", "l", data.infinity_so_far, 1.8, 4),
        ("paper", "L", data.paper_so_far, 3.4, 3),
    ):
        style: dict[str, Any] = {"color": INK[name], "lw": lw, "zorder": zorder}
        label = f"{symbol} so far, by masks visited"
        left.step(count, slopes, where="post", label=label, **style)
    names = {
        "infinity": "l, slope at infinity",
        "anchor": "S, steepest chord",
        "margin": "Lm, margins",
        "paper": "L, the paper's",
    }
    for name, slope in data.slopes.items():
        left.axhline(slope, label=f"{names[name]} = {slope:.4g}", **look(name))
    left.axhline(data.growth(data.upper), label="V, exact worst case", **look("exact"))
    left.axhline(data.growth(data.pgd), label="PGD, each sample moved", **look("pgd"))
    left.set(xlabel="masks visited", ylabel="growth of the expected loss per unit of eps")
    left.set(xlim=(1, len(count)), ylim=(0, 1.08 * data.paper))
    left.set_title(f"Slopes; V and PGD at eps = {show(data.budget)}", fontsize=10)

    eps = torch.cat([torch.zeros(1, dtype=torch.float64), data.eps])
    start = torch.tensor([data.empirical], dtype=torch.float64)
    for name, slope in data.slopes.items():
        right.plot(eps, data.empirical + slope * eps, **look(name))
    for name, losses in (("exact", data.upper), ("pgd", data.pgd)):
        right.plot(eps, torch.cat([start, losses]), **look(name))
    right.axvline(data.budget, color="0.75", lw=0.8, zorder=0)
    right.set(xlabel="budget eps (Wasserstein-1 distance from the samples)")
    right.set(ylabel=f"expected loss ({spoken(data.loss)})", xlim=(0, float(eps[-1])))
    right.set_ylim(bottom=0)
    right.set_title("Worst expected loss: E + slope times eps, and exactly", fontsize=10)
    legend_below(figure, [left], 4)
    verdict = (
        "The exact worst case V lies between the lines of l and S; the paper's are those "
        "of l and L."
    )
    if data.paper - data.infinity.lower <= 1e-6 * data.paper:
        verdict = "l = S = Lm = L: all lines are the exact worst case V."
    figure.suptitle(f"{data.case.about}; ground norm l{data.norm:g}.\n{verdict}", fontsize=10)
    return figure
