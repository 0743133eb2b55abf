"""Both sides of a worst-case loss, and the dual that proves its upper one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wassail.certificates.loss.curve import LossCurve
from wassail.certificates.loss.grid import grid_of
from wassail.certificates.loss.loss_curve import loss_curve
from wassail.certificates.loss.others import OthersLossCurve
from wassail.certificates.loss.pairs import worst_share
from wassail.omega.answer import Certificate
from wassail.omega.property import Omega

ROOM = 1e-9  # of a peak and of 1: another batch's rounding stays below it
WIDEST = 60.0  # multipliers are tried between 2^-60 and 2^60 of the loss's unit
TRIES = 80  # of them


def curve_of(
    property_: Omega,
    rows: Tensor | None = None,
    *,
    grid: Sequence[float],
    steps: int,
    arithmetic: str = "auto",
    points: Sequence[Tensor] = (),
    time_limit: float | None = None,
) -> LossCurve:
    """The worst-case loss of some samples, all by default.

    Args:
        property_: that it is about.
        rows: indices of the samples.
        grid: radii of the balls on which the loss is bounded.
        steps: of the optimisation of the bounds.
        arithmetic: as for `ws.loss_curve`.
        points: further points, each like x.
        time_limit: seconds, or None.
    """
    own, threat = property_, property_.threat
    some = torch.arange(len(own.y)) if rows is None else rows
    return loss_curve(
        own.model,
        own.x[some],
        own.y[some],
        norm=threat.norm,
        order=threat.order,
        loss=own.measure,
        domain=threat.domain,
        arithmetic=arithmetic,
        points=points,
        grid=grid,
        mu=own.mu[some],
        steps=steps,
        time_limit=time_limit,
        label_cost=threat.label_cost,
        subpopulation=threat.subpopulation,
    )


def grid_for(property_: Omega) -> list[float]:
    """The radii of the balls: the usual ones, and at order inf what is asked for."""
    threat = property_.threat
    usual = grid_of(None, property_.x, threat.norm, threat.domain)
    if threat.order < math.inf:
        return usual
    wanted = [threat.eps, math.nextafter(threat.eps - threat.label_cost, math.inf)]
    return sorted({*usual, *(radius for radius in wanted if 0 < radius < math.inf)})


def peaks_of(curve: LossCurve, eps: float, multiplier: float) -> Tensor:
    """`sup_x [loss - lam (price / eps)^p]` of each sample, rounded up, float64 `(N,)`; order inf:
    its highest loss within eps.

    curve: as `loss_curve` returns it.
    """
    edge = torch.cat([torch.zeros(1, dtype=torch.float64), curve.grid])
    if not isinstance(curve, OthersLossCurve):
        if curve.order == math.inf:
            return curve.tops(eps, edge)
        return curve.peaks(eps, multiplier, edge)[0]
    if curve.order < math.inf:
        return curve.best(curve.peaks(eps, multiplier, edge, curve.extra[:, None])[0])[0]
    found = curve.tops(eps, edge)
    left = torch.full_like(found, -math.inf)
    if curve.label_cost <= eps:
        left = curve.tops(math.nextafter(eps - curve.label_cost, math.inf), edge)
    return curve.best(torch.where(curve.extra > 0, left, found))[0]


def certificate_of(curve: LossCurve, property_: Omega, steps: int) -> Certificate | None:
    """The upper side as a certificate at a good multiplier; None where nothing is bounded.

    property_: that it is about; steps: that the bounds were made with.
    """
    eps, share = property_.threat.eps, property_.threat.subpopulation

    def value(multiplier: float) -> float:
        peaks = peaks_of(curve, eps, multiplier)
        if not bool(torch.isfinite(peaks).all()):
            return math.inf
        return multiplier + worst_share(property_.mu, peaks, share)

    best = 0.0 if curve.order == math.inf else least(value)
    peaks = peaks_of(curve, eps, best)
    if not bool(torch.isfinite(peaks).all()):
        return None
    raised = peaks + ROOM * (1 + peaks.abs())
    grid = tuple(curve.grid.tolist())
    return Certificate(best, None, tuple(raised.tolist()), (), curve.arithmetic, grid, steps)


def least(value: Callable[[float], float]) -> float:
    """A multiplier at which a convex function of it is small; any is sound.

    value: of a multiplier >= 0, inf where it is too small.
    """
    tried = {0.0: value(0.0)}
    low, high = -WIDEST, WIDEST
    for _ in range(TRIES // 2):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        a, b = (tried.setdefault(2.0**end, value(2.0**end)) for end in (left, right))
        low, high = (low, right) if a < b else (left, high)
    return min(tried, key=lambda multiplier: tried[multiplier])
