"""Figure: which balls contain which."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.paper.runtime import ORDERS
from wassail.paper.tables import Columns
from wassail.plots import INK, figure_of, legend_below, mark_budget, note
from wassail.threat import show
from wassail.transport.allocation import knapsack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHARES = tuple(2.0**k for k in range(-6, 4))  # step sizes swept, in units of eps

# One hue, darker inside: sets, not methods.
SETS = {1.0: "#CFE3F3", 2.0: "#8DBCE0", math.inf: "#3D87BF"}

REGIONS = ("#FFFFFF", "#ECECEC", "#DCE9F2", "#F6E8DA")  # of the classes in the plane


@dataclass(frozen=True, eq=False)
class Inclusion:
    """Two samples on a line, with different labels, whose nearest flips lie at two distances, and
    every way to attack them.

    No mass can change its label, so the one coupling with finite cost pairs each sample with its
    own mass, and a distribution that moves the share a_i of sample i by t_i is at distance `(sum_i
    a_i |t_i|^p / 2)^(1/p)`, order inf: `max |t_i|`, exactly.

    eps: the budget of the sets drawn; distances `(2,)`; angles `(T,)`; whole, half `{order: (T,
    2)}`: the boundary of Omega_order(eps) among the moves t of whole samples (N points) and of half
    of each sample (2N points, kappa = 2); budgets `(B,)`; points_n, points_2n `{order: (B,)}`: the
    lowest accuracy with whole samples moved, and with any shares.
    """

    eps: float
    distances: Tensor
    whole: dict[float, Tensor]
    half: dict[float, Tensor]
    budgets: Tensor
    points_n: dict[float, Tensor]
    points_2n: dict[float, Tensor]


def inclusion(
    eps: float = 1.0, distances: Sequence[float] = (1.2, 2.2), *, points: int = 241
) -> Inclusion:
    """The paper's inclusion of the Wasserstein balls, on the smallest example that has all of
    it: N = 2.
    """
    d = torch.tensor(distances, dtype=torch.float64)
    budgets = torch.linspace(0, 1.1 * float(d.max()), points, dtype=torch.float64)
    bends = torch.stack(
        [_moved(d, chosen, order) for order in ORDERS for chosen in _subsets(len(d))]
    )
    before = torch.nextafter(bends, torch.zeros_like(bends))  # so that drops are drawn upright
    budgets = torch.tensor(
        sorted({float(eps), *budgets.tolist(), *bends.tolist(), *before.tolist()}),
        dtype=torch.float64,
    )
    return Inclusion(
        eps=float(eps),
        distances=d,
        whole={order: ball(eps, order, 1.0) for order in ORDERS},
        half={order: ball(eps, order, 0.5) for order in ORDERS},
        budgets=budgets,
        points_n={order: _undivided(d, budgets, order) for order in ORDERS},
        points_2n={
            order: torch.stack([1 - _shares(d, e, order).mean() for e in budgets])
            for order in ORDERS
        },
    )


def ball(eps: float, order: float, share: float, points: int = 361) -> Tensor:
    """The boundary of `{(t_1, t_2) : moving the share of each of two samples by t_i stays in
    Omega_order(eps)}`: `(T, 2)`.
    """
    angle = torch.linspace(0, 2 * math.pi, points, dtype=torch.float64)
    u = torch.stack([angle.cos(), angle.sin()], 1)
    return u * (eps / _moved(u.abs(), torch.full((2,), share, dtype=torch.float64), order))[:, None]


def _moved(t: Tensor, shares: Tensor, order: float) -> Tensor:
    """The Wasserstein distance of moves t `(..., N)` of shares `(N,)` from the samples."""
    if order == math.inf:
        return torch.where(shares > 0, t, 0.0).amax(-1)
    return (shares * t**order).mean(-1) ** (1 / order)


def _shares(d: Tensor, eps: Tensor, order: float) -> Tensor:
    return knapsack(d, float(eps), order) if eps > 0 else torch.zeros_like(d)


def _undivided(d: Tensor, budgets: Tensor, order: float) -> Tensor:
    """The lowest accuracy when samples move whole or not at all, by trying every subset: `(B,)`."""
    choices = _subsets(len(d))
    prices = torch.stack([_moved(d, chosen, order) for chosen in choices])
    return 1 - torch.where(prices <= budgets[:, None], choices.mean(1), 0.0).amax(1)


def _subsets(n: int) -> Tensor:
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)), dtype=torch.float64)


def draw_inclusion(data: Inclusion) -> Figure:
    """Three panels: the sets for N points, for 2N points, and the accuracy that each of them
    reaches against eps.
    """
    figure = figure_of(13.2, 5.2)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    reach = 1.12 * max(float(sets[1.0].abs().max()) for sets in (data.whole, data.half))
    _draw_sets(left, data, data.whole, reach)
    left.set_title("N points: both samples move whole", fontsize=10)
    _draw_sets(middle, data, data.half, reach)
    middle.set_title("2N points: half of each moves (kappa = 2)", fontsize=10)
    dashed: dict[str, Any] = {"where": "post", "lw": 1.3, "ls": (0, (4, 2))}
    for order, ink in zip(ORDERS, ("#56B4E9", "#0072B2", "#000000")):
        name = f"Omega_{order:g}"
        divided, whole = 100 * data.points_2n[order], 100 * data.points_n[order]
        right.plot(data.budgets, divided, color=ink, lw=2.2, label=f"{name}, 2N points")
        right.step(data.budgets, whole, color=ink, label=f"{name}, N points", **dashed)
    mark_budget(right, data.eps)
    note(right, f"eps = {show(data.eps)}", (data.eps, 2), (4, 0))
    right.set(xlabel="budget eps", ylabel="lowest accuracy %")
    right.set(xlim=(0, float(data.budgets[-1])), ylim=(-2, 103))
    right.set_title("What the sets reach", fontsize=10)
    right.legend(fontsize=8.5, frameon=False, loc="upper right")
    legend_below(figure, [left], 5, "left")
    first, second = (show(distance) for distance in data.distances.tolist())
    figure.suptitle(
        "Two samples on a line, of different classes, whose nearest flips are "
        f"{first} and {second} away.\n"
        "Omega_inf lies in Omega_2 in Omega_1; a share of a sample may go farther than the whole "
        "of it, except at order inf.",
        fontsize=10,
    )
    return figure


def _draw_sets(axes: Axes, data: Inclusion, sets: Mapping[float, Tensor], reach: float) -> None:
    for order in ORDERS:
        label = f"Omega_{order:g}({show(data.eps)})"
        axes.fill(*sets[order].T, facecolor=SETS[order], edgecolor="0.25", lw=0.8, label=label)
    first, second = data.distances.tolist()
    for side in (-1, 1):  # a flip on either side of each sample, named once
        names = ("sample 1 flips beyond", "sample 2 flips beyond") if side > 0 else (None, None)
        axes.axvline(side * first, color=INK["paper"], lw=1.3, label=names[0])
        axes.axhline(side * second, color=INK["margin"], lw=1.3, ls="--", label=names[1])
    axes.set(xlabel="$t_1$, move of sample 1", ylabel="$t_2$, move of sample 2", aspect="equal")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach))


def inclusion_tables(data: Inclusion) -> dict[str, Columns]:
    """The sets' boundaries and the accuracies, as columns."""
    d = ", ".join(f"{v!r}" for v in data.distances.tolist())
    about = (
        f"two samples on a line, of different classes, nearest flips at {d}; sets for eps "
        f"{data.eps!r}"
    )
    edges = {
        f"{kind}_{order:g}_t{i + 1}": sets[order][:, i].tolist()
        for kind, sets in (("whole", data.whole), ("half", data.half))
        for order in ORDERS
        for i in range(2)
    }
    lows = {
        f"{kind}_{order:g}": values[order].tolist()
        for kind, values in (("n_points", data.points_n), ("2n_points", data.points_2n))
        for order in ORDERS
    }
    return {
        "inclusion-sets": (about, edges),
        "inclusion-accuracy": (about, {"eps": data.budgets.tolist(), **lows}),
    }
