"""Cones above the errors of small ReLU regressions, for the dual at order 1 (THEORY 2 and 11).

    V(eps) = min_{lam >= 0} lam eps + sum_i mu_i psi_i(lam),
    psi_i(lam) = sup_x loss_i(x) - lam ||x - x_i||.

For each of a few multipliers near the best ones of the budgets, psi_i is the largest output less a
price of distance (`exact/penalised.py`), so the loss is at most `psi_i + lam d` everywhere. That
holds for any lam: a cone serves every budget, and every order. The points where psi_i is attained
are the atoms of the lower side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.exact.penalised import Highest, Shell, highest_less_price
from wassail.certificates.graph.specified import settled
from wassail.certificates.loss.curve import total_of
from wassail.certificates.loss.growth import Growth
from wassail.certificates.loss.points import Points
from wassail.certificates.loss.residual_stairs import closable, points_of, raised, target_of
from wassail.certificates.loss.samples import Samples
from wassail.geometry import sides
from wassail.records import Record
from wassail.rounding import UNIT
from wassail.threat import Boxes, box_at

SHARE = 0.01  # of the loss, what a sample's search may leave open
CLOSE = 0.015  # a budget whose bounds are this close has its cones
TURNS = 2  # multipliers for each budget, at most: the points of the first move the best one
RATIO = 2.0  # of the radii of a shell
EFFORT = 30 * clock.SECOND  # operations for a sample at a multiplier


@dataclass(frozen=True, eq=False)
class Cones(Record):
    """The loss at a distance d from its sample is at most `heights + rises d`.

    Args:
        heights: `(N, L)`.
        rises: `(L,)`.
    """

    heights: Tensor
    rises: Tensor

    def lines(self) -> list[tuple[Tensor, Tensor]]:
        """The height of each cone for every sample, and its rise, `(N, 1)` each."""
        columns = self.heights.T[:, :, None]
        return [(own, rise.expand_as(own)) for own, rise in zip(columns, self.rises)]

    def within(self, eps: float) -> Tensor:
        """The highest loss within eps of each sample, rounded up, `(N,)`.

        Args:
            eps: radius.
        """
        top = self.heights + self.rises * eps
        return (top + 4 * UNIT * (self.heights.abs() + top.abs())).amin(1)


def cones_above(
    samples: Samples,
    found: Points,
    above: Growth,
    mu: Tensor,
    budgets: Sequence[float],
    report: Callable[[float], None],
) -> Cones | None:
    """The cones of all samples, whose points are added to those found; None where searches are
    not affordable or say nothing of the loss.

    Args:
        samples: those of a regression.
        found: their points.
        above: other bounds on their growth.
        mu: sample weights.
        budgets: where the curve is to be closed.
        report: is given the share done.
    """
    if not budgets or not closable(samples, above):
        return None
    cones: list[tuple[Tensor, float]] = []
    for turn in range(TURNS):
        for place, eps in enumerate(budgets):
            points = points_of(found)
            target = target_of(points, mu, 1.0, eps, SHARE, SHARE * above.slope * eps)
            least = target.share / SHARE
            known = (total_of(mu, heights) + rise * eps for heights, rise in cones)
            if min(known, default=math.inf) <= least * (1 + CLOSE) or clock.out_of_time():
                continue
            rise = min(target.lam / eps, above.slope)
            cones.append((_heights(samples, found, points, above, rise, target.share), rise))
            report((turn * len(budgets) + place + 1) / (TURNS * len(budgets)))
    if not cones:
        return None
    heights = torch.stack([own for own, _ in cones], 1)
    return Cones(heights, torch.tensor([rise for _, rise in cones], dtype=torch.float64))


def _heights(
    samples: Samples,
    found: Points,
    points: list[list[tuple[float, float]]],
    above: Growth,
    rise: float,
    share: float,
) -> Tensor:
    """The heights of the cones of one rise, `(N,)`; the points where they are attained are
    added.
    """
    best = found.x.double().clone()
    heights = []
    for i, own in enumerate(points):
        left = len(points) - i
        with clock.limited(clock.seconds_left() / left, EFFORT):
            known = max(value - rise * d for value, d in own)
            one = _highest(samples, above, i, rise, known, share)
        heights.append(raised(one.upper, above.lift))
        if one.point is not None:
            best[i] = one.point.reshape(best.shape[1:]).to(best)
    found.add(best, None)
    return torch.tensor(heights, dtype=torch.float64)


def _highest(
    samples: Samples, above: Growth, i: int, rise: float, known: float, share: float
) -> Highest:
    """The largest `loss - rise d` of sample i: of outputs too high and too low, each with its
    weight.
    """
    x = samples.x[i].double().cpu()
    box = _box(samples, i)
    far = torch.maximum(x.flatten() - box.low, box.high - x.flatten())
    length = float(torch.linalg.vector_norm(far, samples.norm)) * (1 + (len(far) + 8) * UNIT)
    shells = _shells(above, i, rise, length)
    offsets = samples.residuals.offsets[i]
    high, low = torch.arange(1, len(offsets)).chunk(2)
    parts = [*zip(samples.residuals.weights, (high, low))]
    if samples.residuals.loss == "absolute":
        parts = [(1.0, torch.cat([high, low]))]
    value, upper, point = known, known, None
    for weight, half in parts:
        columns = torch.cat([torch.zeros_like(half[:1]), half])
        one = highest_less_price(
            settled(samples.graph, columns, offsets[columns]),
            x,
            samples.norm,
            box,  # type: ignore[arg-type]
            rise / weight * (1 - 2 * UNIT),  # a lower price is sound
            [replace(shell, most=_above(shell.most / weight)) for shell in shells],
            value / weight,
            share / weight,
        )
        upper = max(upper, _above(one.upper * weight))
        if one.point is not None:
            value, point = one.value * weight, one.point
    return Highest(value, upper, point)


def _box(samples: Samples, i: int) -> Boxes:
    """The box of sample i, for flat points."""
    rows = torch.tensor([i])
    x = samples.x[rows].double().cpu()
    low, high = sides(box_at(samples.domain, rows), x)
    ends = [torch.as_tensor(side, dtype=torch.float64).cpu().expand_as(x) for side in (low, high)]
    return Boxes(ends[0].flatten(), ends[1].flatten())


def _above(value: float) -> float:
    """No less than the number that was rounded to this one."""
    return value + 4 * UNIT * abs(value)


def _shells(above: Growth, i: int, rise: float, far: float) -> list[Shell]:
    """Shells around sample i up to the far end of its box, and what the growth says of them."""
    shells = []
    near, end = 0.0, float(above.grid[min(1, len(above.grid) - 1)])
    ceiling = above.ceiling[i].tolist()
    start = float(above.start[i])
    while near < far:
        end = min(end, far)
        place = int(torch.searchsorted(above.grid, end))
        cone = start + above.lift + above.slope * end
        top = min(ceiling[place], cone + 4 * UNIT * (abs(start) + abs(cone)))
        most = top - rise * near
        # Of a difference, relative to its terms.
        shells.append(Shell(near, end, most + 4 * UNIT * (abs(top) + rise * near)))
        near, end = end, end * RATIO
    return shells
