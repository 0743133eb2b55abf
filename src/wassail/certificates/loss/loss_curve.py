"""The worst expected loss over `Omega_p(eps)` against eps, from both sides, for networks of any
size (THEORY 2, 6 and 11).

With `G_i(d) = sup { loss(x', y_i) : x' in X, ||x' - x_i||_r <= d }` the worst case is, for every
finite order p,

    V(eps) = max { sum_i mu_i G_i^(c_i) : sum_i mu_i c_i <= eps^p }          G_i^: concave envelope
    of G_i as a function of d^p
           = min_{lam >= 0} lam eps^p + sum_i mu_i sup_d [ G_i(d) - lam d^p ],

and for order inf `sum_i mu_i G_i(eps)`. Points that are evaluated lie below `G_i` (`points.py`);
with the first form they make a distribution, whose loss is the lower side. Bound propagation on a
grid of radii lies above `G_i` (`growth.py`); with the second form, at whatever lam, it makes the
upper side. The loss is one of classes (`labels.py`) or of errors (`residuals.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.loss.certificate import Certificate
from wassail.certificates.loss.curve import LossCurve, budget_of
from wassail.certificates.loss.grid import grid_of
from wassail.certificates.loss.growth import Growth, executed_lift, growth_above
from wassail.certificates.loss.labels import Labels
from wassail.certificates.loss.others import OthersLossCurve
from wassail.certificates.loss.pairs import pairs_of
from wassail.certificates.loss.points import Points, points_of_high_loss
from wassail.certificates.loss.recession import recession
from wassail.certificates.loss.residual_cones import cones_above
from wassail.certificates.loss.residual_curve import ResidualCurve
from wassail.certificates.loss.residual_stairs import stairs_above
from wassail.certificates.loss.samples import (
    DEFAULT_DELTA,
    DEFAULT_QUANTILE,
    Asked,
    Samples,
    labelled,
    with_errors,
)
from wassail.certificates.loss.slopes import ray_slope
from wassail.errors import InputError
from wassail.names import ERRORS
from wassail.network import Model, versions
from wassail.progress import Progress, progress_bar
from wassail.threat import (
    Domain,
    Number,
    parse_label_cost,
    parse_order,
    parse_seconds,
    parse_subpopulation,
)
from wassail.transport.allocation import sample_weights


def loss_curve(  # noqa: PLR0913
    model: Model | Graph,
    x: Tensor,
    y: Tensor,
    norm: Number = "inf",
    order: Number = 1,
    loss: str = "cross_entropy",
    domain: Domain = (0.0, 1.0),
    *,
    arithmetic: str = "auto",
    points: Sequence[Tensor] = (),
    grid: Sequence[Number] | None = None,
    mu: Tensor | None = None,
    steps: int = 0,
    time_limit: float | None = None,
    certificate: Certificate | None = None,
    label_cost: Number = math.inf,
    subpopulation: Number = 1,
    quantile: Number = DEFAULT_QUANTILE,
    delta: Number = DEFAULT_DELTA,
    eps: Sequence[Number] = (),
    progress: Progress = False,
) -> LossCurve:
    """The worst expected loss over `Omega_order(eps)` for every eps, from both sides (THEORY 2 and
    6).

    The lower side is made of evaluated points, the upper side of linear bounds on balls and of
    Lipschitz constants. The domain is [0, 1] by default as for `radii`; `certify`, for the paper's
    theorem, has R^n.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`; for the losses of regression targets, `(N,)`, or
            `(N, K)` for K outputs, whose largest loss counts.
        norm: ground norm r, 1, 2 or inf; default "inf".
        order: Wasserstein order p; any other comes from the result at no cost (`of_order`); default
            1.
        loss: "cross_entropy" (the default) or "margin"; "absolute", "pinball", "huber" or "squared"
            for regression.
        domain: box `(low, high)`, or None for R^n; default (0, 1). For regression also a box for
            each feature, or for each feature of each sample.
        arithmetic: as in `radii`; executed needs the model itself and a box, and its points are
            evaluated by the model; default "auto".
        points: further points for the lower side, each a tensor like x with one point a sample, for
            example `flips.points`; default none.
        grid: radii to look at; at order inf both sides are tightest at eps on the grid; default
            None, 22, geometric, up to the width of the domain.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        steps: int, steps of the optimisation of the linear bounds (alpha-CROWN); default 0.
        time_limit: seconds for everything; what was reached by then is kept, and `info["cut"]` says
            whether the clock stopped something; default None, a budget of work (about 10 s) for the
            Lipschitz constant of the margins, so that the curve does not depend on the clock.
        certificate: `Certificate` for the same samples and loss, on this domain or on R^n: its
            slopes and its line count, too; default None.
        label_cost: price of a changed label, in the units of eps; default inf. Every sample is then
            looked at with every label, which takes K times as long. For regression the price of
            moving a target by one unit, which counts as one more input; for models of one output.
        subpopulation: least share of the population that is there; default 1.
        quantile: of the pinball loss, which weighs outputs that are too low with it; default 0.5.
        delta: of the Huber loss, where it becomes linear; default 1.
        eps: budgets that matter, which join the grid. For "absolute" and "pinball" on small ReLU
            networks in a box the curve of this order is closed there, which takes seconds a sample:
            at order 1 by searches for the largest loss less a price of distance, else by distances
            to errors of many sizes; default none.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `LossCurve`: call it at any eps.
    """
    end = math.inf if time_limit is None else clock.now() + parse_seconds(time_limit)
    asked = Asked(norm, order, loss, domain, quantile, delta, arithmetic, points, grid, mu)
    asked = replace(asked, steps=steps, progress=progress, eps=eps)
    asked = replace(asked, label_cost=label_cost, subpopulation=subpopulation)
    if loss not in ERRORS:
        return _class_curve(model, x, y, asked, certificate, end)
    if certificate is not None:
        raise InputError("a curve of errors knows its own slopes: give no certificate.")
    return _error_curve(model, x, y, asked, end)


def _class_curve(
    model: Model | Graph,
    x: Tensor,
    y: Tensor,
    asked: Asked,
    certificate: Certificate | None,
    end: float,
) -> LossCurve:
    """The curve of a loss of classes; end: when the time is up."""
    order = parse_order(asked.order)
    price, share = parse_label_cost(asked.label_cost), parse_subpopulation(asked.subpopulation)
    samples = labelled(model, x, y, asked)
    labels = samples.loss.rows
    budgets = [budget for budget in map(budget_of, asked.eps) if budget > 0]
    radii = sorted({*grid_of(asked.grid, samples.x, samples.norm, samples.domain), *budgets})
    weights = sample_weights(asked.mu, len(labels))
    rows = weights
    others = price < math.inf or share < 1
    if certificate is not None:
        if others:
            raise InputError(
                "the lines of a certificate are for inputs that move and all people: give no "
                "certificate with label_cost or subpopulation."
            )
        _check_certificate(certificate, samples, weights)
    if others:
        given = (weights, samples.graph.outputs, price)
        points = [pairs_of(part, labels, *given)[0] for part in asked.points]
        pairs, own, _ = pairs_of(samples.x, labels, *given)
        samples = replace(samples, x=pairs, loss=Labels(asked.loss, own))
        asked, rows = replace(asked, points=points), sample_weights(None, len(own))
    with progress_bar(asked.progress, "loss curve") as report, clock.limited(end - clock.now()):
        found, above, _, cut = _sides(samples, radii, asked, report)
        cut |= clock.out_of_time()
    slope, line = _with_certificate(above.slope, certificate)
    known = _fields(samples, rows, order, found, replace(above, slope=slope, cut=cut), asked.steps)
    curve = LossCurve(**known, line=line)
    return OthersLossCurve.of(curve, labels.cpu(), weights, price, share) if others else curve


def _error_curve(model: Model | Graph, x: Tensor, y: Any, asked: Asked, end: float) -> LossCurve:
    """The curve of a loss of errors; end: when the time is up."""
    order = parse_order(asked.order)
    share = parse_subpopulation(asked.subpopulation)
    price = parse_label_cost(asked.label_cost)
    budgets = [budget for budget in map(budget_of, asked.eps) if budget > 0]
    samples, grid = with_errors(model, x, y, asked, price)
    radii = sorted({*grid, *budgets})
    weights = sample_weights(asked.mu, len(samples.x))
    with progress_bar(asked.progress, "loss curve") as report, clock.limited(end - clock.now()):
        found, above, shift, cut = _sides(samples, radii, asked, report)
        places = budgets if share == 1 else []  # the worst share knows no stairs
        given = (samples, found, above, weights)
        stairs = None if order == 1 else stairs_above(*given, order, places, report)
        cones = cones_above(*given, places, report) if order == 1 else None
        grows = asked.loss == "squared" and _grows(samples, price)
        cut |= clock.out_of_time()
    residuals = samples.residuals
    curve = ResidualCurve(
        **_fields(samples, weights, order, found, replace(above, cut=cut), asked.steps),
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


def _sides(
    samples: Samples, radii: list[float], asked: Asked, report: Callable[[float], None]
) -> tuple[Points, Growth, float, bool]:
    """Evaluated points, bounds on the growth, how far executed margins may be off, and whether the
    clock stopped any of it.
    """
    found, cut = points_of_high_loss(samples, radii, asked.points, report)
    with clock.limited(clock.seconds_left() / 2):
        lift = executed_lift(samples)
        cut |= clock.out_of_time()
    above = growth_above(samples, radii, asked.steps, lift, lambda done: report(0.3 + 0.7 * done))
    return found, above, lift, cut | above.cut


def _fields(
    samples: Samples, mu: Tensor, order: float, found: Points, above: Growth, steps: int
) -> dict[str, Any]:
    """The fields of a curve that all losses have."""
    points, root, value, distance, predicted = found.columns()
    labels = samples.loss.rows.cpu()
    return {
        "x": samples.x.cpu(),
        "y": labels,
        "mu": mu,
        "norm": samples.norm,
        "order": order,
        "loss": samples.loss.loss,
        "domain": samples.domain,
        "clean": found.clean.cpu(),
        "clean_predicted": found.clean_predicted.cpu(),
        "points": points,
        "root": root,
        "value": value,
        "distance": distance,
        "predicted": predicted,
        "start": above.start,
        "grid": above.grid,
        "ceiling": above.ceiling,
        "left": above.left,
        "rise": above.rise,
        "slope": above.slope,
        "info": {"versions": versions(), "steps": steps, "cut": above.cut},
        "arithmetic": samples.graph.arithmetic,
        "lift": above.lift,
    }


def _grows(samples: Samples, price: float) -> bool:
    """Whether the error is known to grow without bound: a target that moves, or a ray on R^n along
    which an output does. Where the time is up nothing is known.
    """
    if price < math.inf:
        return True
    far = None if samples.domain is not None else recession(samples.graph)
    if far is not None:
        with suppress(clock.Late):
            return ray_slope(far.to(samples.graph.device), samples.norm, [0]).lower > 0
    return False


def _of_share(curve: ResidualCurve, weights: Tensor, share: float) -> OthersLossCurve:
    """The curve where people may be missing: the mean of the worst share (THEORY 12)."""
    if curve.infinite:
        raise InputError(
            "the squared error is infinite at orders below 2 without a box: give a domain, or "
            "order 2."
        )
    known = {f.name: getattr(curve, f.name) for f in fields(LossCurve)}
    return OthersLossCurve.of(LossCurve(**known), curve.y, weights, math.inf, share)


def _with_certificate(
    slope: float, certificate: Certificate | None
) -> tuple[float, tuple[float, float] | None]:
    """The least slope that is known, and the line of a certificate."""
    if certificate is None:
        return slope, None
    slopes = (certificate.anchor, certificate.margin, certificate.paper)
    return min([slope, *(bound.upper for bound in slopes if bound is not None)]), certificate.line


def _check_certificate(certificate: Certificate, samples: Samples, mu: Tensor) -> None:
    """Refuse a certificate for something else: it must be about the same samples, and about all
    of the domain.
    """
    same = (
        torch.equal(certificate.x, samples.x.cpu())
        and torch.equal(certificate.y, samples.loss.rows.cpu())
        and torch.equal(certificate.mu, mu)
    )
    asked = (samples.norm, samples.loss.loss)
    if not same or (certificate.norm, certificate.loss) != asked:
        raise InputError(
            "the certificate is about other samples, weights, another norm or loss: make one for "
            "these."
        )
    if certificate.domain is not None and certificate.domain != samples.domain:
        raise InputError(
            f"the certificate is about {certificate.domain}, the curve about {samples.domain}: "
            "certify there or on R^n."
        )
