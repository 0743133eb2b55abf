"""`loss_curve` for the losses of regression (THEORY 11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.batches import batch_logits, check_batches
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.loss.curve import LossCurve, budget_of
from wassail.certificates.loss.grid import grid_of
from wassail.certificates.loss.others import OthersLossCurve
from wassail.certificates.loss.recession import recession
from wassail.certificates.loss.residual_cones import cones_above
from wassail.certificates.loss.residual_curve import ResidualCurve
from wassail.certificates.loss.residual_growth import Errors, Points, executed_lift, growth_above
from wassail.certificates.loss.residual_stairs import stairs_above
from wassail.certificates.loss.residuals import (
    Residuals,
    beside_targets,
    signed_network,
    with_targets,
)
from wassail.certificates.loss.slopes import ray_slope
from wassail.certificates.relax.executed import arithmetic_of
from wassail.checks import check_data
from wassail.errors import InputError
from wassail.network import Model, versions
from wassail.progress import Progress, progress_bar
from wassail.threat import (
    Domain,
    Number,
    boxes_of,
    fitted,
    parse_domain,
    parse_label_cost,
    parse_norm,
    parse_order,
    parse_seconds,
    parse_subpopulation,
)
from wassail.transport.allocation import sample_weights

FAR = 10  # radii without a box beyond the grid, each 4 times the one before
DEFAULT_QUANTILE = 0.5
DEFAULT_DELTA = 1.0


@dataclass(frozen=True)
class Asked:
    """How a loss of errors is to be computed: the parameters of `loss_curve` of the same names."""

    norm: Number
    order: Number
    loss: str
    domain: Domain
    quantile: Number = DEFAULT_QUANTILE
    delta: Number = DEFAULT_DELTA
    arithmetic: str = "auto"
    points: Sequence[Tensor] = ()
    grid: Sequence[Number] | None = None
    mu: Tensor | None = None
    steps: int = 0
    time_limit: float | None = None
    label_cost: Number = math.inf
    subpopulation: Number = 1
    progress: Progress = False
    eps: Sequence[Number] = ()


def regression_curve(model: Model | Graph, x: Tensor, y: Any, asked: Asked) -> LossCurve:
    """The worst expected error for every eps, from both sides.

    Args:
        model: callable from a batch to outputs, or a graph that was read.
        x: samples.
        y: targets, `(N,)` or `(N, K)`.
        asked: everything else.
    """
    limit = math.inf if asked.time_limit is None else parse_seconds(asked.time_limit)
    end = clock.now() + limit
    order = parse_order(asked.order)
    share = parse_subpopulation(asked.subpopulation)
    price = parse_label_cost(asked.label_cost)
    budgets = [budget for budget in map(budget_of, asked.eps) if budget > 0]
    errors, radii = samples_of(model, x, y, asked, price)
    radii = sorted({*radii, *budgets})
    weights = sample_weights(asked.mu, len(errors.x))
    with progress_bar(asked.progress, "loss curve") as report, clock.limited(end - clock.now()):
        found, cut = _points(errors, radii, asked.points, report)
        with clock.limited(clock.seconds_left() / 2):
            shift = executed_lift(errors)
        above = growth_above(
            errors, radii, asked.steps, shift, lambda done: report(0.3 + 0.7 * done)
        )
        places = budgets if share == 1 else []  # the worst share knows no stairs
        given = (errors, found, above, weights)
        stairs = None if order == 1 else stairs_above(*given, order, places, report)
        cones = cones_above(*given, places, report) if order == 1 else None
        grows = asked.loss == "squared" and _grows(errors, price)
        cut |= above.cut or clock.out_of_time()
    residuals = errors.residuals
    curve = ResidualCurve(
        errors.x.cpu(),
        torch.zeros(len(errors.x), dtype=torch.int64),
        weights,
        errors.norm,
        order,
        asked.loss,
        errors.domain,
        found.clean.cpu(),
        found.clean_side.cpu(),
        *found.columns(),
        above.start,
        above.grid,
        above.ceiling,
        above.left,
        above.rise,
        above.slope,
        {"versions": versions(), "steps": asked.steps, "cut": cut},
        None,
        errors.graph.arithmetic,
        above.lift,
        targets=residuals.y,
        quantile=residuals.quantile,
        delta=residuals.delta,
        label_cost=price,
        margin=above.margin,
        shift=shift,
        grows=grows,
        stairs=stairs,
        cones=cones,
    )
    return curve if share == 1 else _of_share(curve, weights, share)


def samples_of(
    model: Model | Graph, x: Tensor, y: Any, asked: Asked, price: float
) -> tuple[Errors, list[float]]:
    """The samples, and the radii to look at.

    Args:
        model: callable, or a graph that was read.
        x: samples.
        y: targets.
        asked: how.
        price: of moving a target by one unit; inf where they stay.
    """
    norm = parse_norm(asked.norm)
    domain = parse_domain(asked.domain, own=True)
    count = len(x) if isinstance(x, Tensor) and x.ndim else 0
    x, _ = check_data(x, torch.zeros(count, dtype=torch.int64), domain)
    if not count:
        raise InputError(
            "there are no samples: a curve is about the loss on data, give at least one."
        )
    residuals = Residuals.of(asked.loss, y, asked.quantile, asked.delta, count)
    graph, run = signed_graph(model, x, residuals, asked.arithmetic, domain, price)
    domain = fitted(domain, x)
    radii = grid_of(asked.grid, x, norm, _around(domain))
    if price < math.inf:
        graph = with_targets(graph, price)
        x, domain = beside_targets(x, domain)
    x = x.to(graph.device)
    return Errors(graph, x, residuals, norm, domain, run), radii


def signed_graph(
    model: Model | Graph,
    x: Tensor,
    residuals: Residuals,
    arithmetic: str,
    domain: Domain,
    price: float,
) -> tuple[Graph, Model | None]:
    """The network with outputs `(0, f, -f)` in its arithmetic, and the model that evaluates points
    if it is the executed one.

    Args:
        model: callable, or a graph that was read.
        x: samples.
        residuals: their targets.
        arithmetic: as in `radii`.
        domain: box, boxes or None.
        price: of moving a target.
    """
    if isinstance(model, Graph):
        graph = model
    else:
        graph = read(model, tuple(x.shape[1:]), smooth=True, device=x.device, samples=x)
        check_batches(graph, x, batch_logits(model, x), True)
    outputs = residuals.y.shape[1]
    if graph.outputs != outputs:
        raise InputError(
            f"there are targets for {outputs} outputs and the model has {graph.outputs}: give one "
            "number for each output of each sample."
        )
    if price < math.inf and outputs > 1:
        raise InputError(
            f"targets move at a price for models of one output, and this one has {outputs}: leave "
            "label_cost out."
        )
    missing = (
        "the model itself"
        if isinstance(model, Graph)
        else "a box as its domain"
        if domain is None
        else "targets that stay"
        if price < math.inf
        else ""
    )
    if missing and arithmetic == "executed":
        raise InputError(
            f"a loss curve in executed arithmetic needs {missing}: give it, or use "
            "arithmetic='exact'."
        )
    chosen = "exact" if missing and arithmetic == "auto" else arithmetic
    graph = arithmetic_of(signed_network(graph), chosen, x.dtype)
    return graph, None if graph.arithmetic == "exact" or isinstance(model, Graph) else model


def _around(domain: Domain) -> Domain:
    """One box of numbers around all boxes."""
    own = boxes_of(domain)
    return domain if own is None else (float(own.low.min()), float(own.high.max()))


def _points(
    errors: Errors, radii: list[float], more: Sequence[Tensor], report: Any
) -> tuple[Points, bool]:
    """Evaluated points, and whether the clock stopped the search."""
    found = Points(errors)
    growth = 2.0 if errors.bounded else 4.0
    reach = [*radii, *(radii[-1] * growth**k for k in range(1, FAR + 1))]
    if errors.bounded:  # to the far end of the boxes
        reach = [radius for radius in reach if radius <= 2 * max(radii[-1], _diagonal(errors))]
    with clock.limited(clock.seconds_left() / 4):
        for place, radius in enumerate(reach):
            found.climb(radius)
            report(0.3 * (place + 1) / len(reach))
        cut = clock.out_of_time()
    for points in more:
        found.add(torch.as_tensor(points).detach(), None)
    return found, cut


def _diagonal(errors: Errors) -> float:
    """No less than the distance of two points of a box."""
    n = errors.x[0].numel()
    return errors.reach * (n ** (1 / errors.norm) if errors.norm < math.inf else 1.0)


def _grows(errors: Errors, price: float) -> bool:
    """Whether the error is known to grow without bound: a target that moves, or a ray on R^n along
    which an output does.
    """
    if price < math.inf:
        return True
    far = None if errors.domain is not None else recession(errors.graph)
    return far is not None and ray_slope(far.to(errors.graph.device), errors.norm, [0]).lower > 0


def _of_share(curve: ResidualCurve, weights: Tensor, share: float) -> OthersLossCurve:
    """The curve where people may be missing: the mean of the worst share (THEORY 12)."""
    if curve.infinite:
        raise InputError(
            "the squared error is infinite at orders below 2 without a box: give a domain, or "
            "order 2."
        )
    known = {f.name: getattr(curve, f.name) for f in fields(LossCurve)}
    return OthersLossCurve.of(LossCurve(**known), curve.y, weights, math.inf, share)
