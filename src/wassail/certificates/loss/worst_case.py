"""Exact worst-case loss of small networks: `sup E_P[loss]` over a Wasserstein ball, from both sides
(THEORY 2 and 3).

    V(eps) = min_{lam >= 0} lam eps^p + sum_i mu_i h_i(lam),      h_i(lam) = sup_{x in X} [loss(x,
    y_i) - lam ||x - x_i||_r^p].

Pieces. On a cell `{G x <= g}` the logits are affine. The margin loss is the largest of `<q, theta>
- theta_k` over the corners q of the simplex of classes (without k). Cross entropy is the largest of
`<q, theta> - theta_k + H(q)` over all of the simplex (Gibbs), and H lies below its tangent at any
q0, `H(q) <= -<q, log q0>`. So on a part of the simplex with corners q_v it is at most `max_v <q_v,
theta> - theta_k - <q_v, log q0>`: affine pieces again, and better ones when the part is halved.

Certificates. For `f = <a, x> + b` on a cell any `u >= 0` gives, with `w = a - G^T u`, for EVERY
sample and every penalty phi

    sup_{x in cell} f(x) - phi(||x - x_i||_r) <= <w, x_i> + b + <u, g> + phi*(||w||_s),
    phi*(nu) = sup_t [nu t - phi(t)],

so one solved piece prunes for all samples and multipliers. The best u is the multiplier of a small
concave program, solved by HiGHS (r = 1, inf) or by projections (r = 2); whatever it returns, the
inequality is evaluated with outward rounding.

Outer problem. Each maximiser x found is a line `loss(x, y_i) - lam ||x - x_i||^p` below `h_i`. The
smallest value of the lines' upper envelope is a linear program whose solution is a distribution:
the lower side; the certificates at its multiplier are the upper side. For r = 1, inf, p = 1 and the
margin loss both meet after finitely many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.exact.programs import LIFT
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Where
from wassail.certificates.loss.checks import graph_of
from wassail.certificates.loss.descent import descend
from wassail.certificates.loss.loss_curve import loss_curve
from wassail.certificates.loss.others import OthersLossCurve
from wassail.certificates.loss.pairs import pairs_of
from wassail.certificates.loss.penalty import Penalty, Plan, TooManyCells
from wassail.certificates.loss.problem import Problem, WorstCase
from wassail.certificates.loss.residual_cells import ResidualProblem
from wassail.certificates.loss.samples import (
    DEFAULT_DELTA,
    DEFAULT_QUANTILE,
    Asked,
    with_errors,
)
from wassail.certificates.loss.worst_others import OthersProblem
from wassail.checks import check_data
from wassail.errors import InputError
from wassail.geometry import distances
from wassail.losses import strongest_rival
from wassail.names import ERRORS
from wassail.network import Model
from wassail.progress import Progress, Report, progress_bar
from wassail.threat import (
    Number,
    Threat,
    boxes_of,
    parse_label_cost,
    parse_order,
    parse_seconds,
    parse_subpopulation,
    parse_threat,
)
from wassail.transport.allocation import sample_weights, transport_cost

WORK = 60 * clock.SECOND  # operations when there is no time limit
NOTE = (
    "the default budget of work ended before the bracket was closed: give time_limit, in seconds, "
    "for more"
)


def worst_case(
    model: Model | Graph | Piecewise,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    loss: str = "margin",
    *,
    mu: Tensor | None = None,
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells: int = 100_000,
    quantile: Number = DEFAULT_QUANTILE,
    delta: Number = DEFAULT_DELTA,
    progress: Progress = False,
) -> WorstCase:
    """The worst expected loss over `Omega_p(eps)` of a small network, by its cells and the
    one-dimensional dual (THEORY 2).

    To `tolerance`, for the margin loss down to rounding; `result.bound` is the bracket, its lower
    side the loss of the distribution `result.atoms`, `result.masses`, whose transport cost is
    `result.cost`. Its programs are solved on the CPU, wherever the model is. Where the default
    budget of work ends first the bracket is open, and `bound.info["note"]` says how to get more;
    of a network with more cells than that budget pays for it is the bracket of `loss_curve`.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`; for the losses of regression targets, `(N,)` or
            `(N, K)`.
        threat: `Threat`: norm, order, eps and domain, perhaps a subpopulation, and at orders 1 and
            inf a label cost; for regression that is the price of moving a target by one unit.
        loss: "margin" (the default) or "cross_entropy"; "absolute", "pinball" or "huber" for
            regression.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        tolerance: absolute gap of the bracket; default 1e-06.
        time_limit: seconds; a limit that ends before the cells are listed is an error; default
            None, a budget of work (about a minute), so that the answer does not depend on the
            clock.
        cells: int, how many linear pieces are acceptable; default 100000.
        quantile: of the pinball loss; default 0.5.
        delta: of the Huber loss; default 1.
        progress: bool, or a callable that is given the share done; default False, no bar.
    """
    threat, label_cost, share = _split(threat, loss)
    limit = None if time_limit is None else clock.now() + parse_seconds(time_limit)
    asked = Asked(threat.norm, threat.order, loss, threat.domain, quantile, delta, mu=mu)
    asked = replace(asked, arithmetic="exact", label_cost=label_cost, subpopulation=share)
    if loss in ERRORS:
        network, make = _of_errors(model, x, y, asked)
        own = torch.zeros(len(x), dtype=torch.int64)
        label_cost = math.inf  # of a target: one more input
    else:
        x, own = check_data(x, y, threat.domain)
        network, make = _of_classes(model, x, own, asked, threat)
    with progress_bar(progress, "worst case") as report:
        others = (own.cpu().long(), sample_weights(mu, len(own)), label_cost, share)
        if limit is not None:
            with limited(limit - clock.now()):
                return _answer(make(cells), others, threat, tolerance, report)
        affordable = cells if isinstance(model, Piecewise) else _affordable(network)
        report.begin("cells")
        try:
            problem = make(min(cells, affordable))
        except TooManyCells:
            if affordable >= cells:
                raise
            return _by_curve(model, x, y, asked, threat)  # type: ignore[arg-type]
        report.begin("bounds")
        with clock.limited(None, WORK):
            found = _answer(problem, others, threat, tolerance, report)
            return found if clock.work_left() else _noted(found)


def _split(threat: Threat, loss: str) -> tuple[Threat, float, float]:
    """A threat without others, the label cost and the subpopulation."""
    label_cost, share = math.inf, 1.0
    if isinstance(threat, Threat) and threat.groups is None:
        label_cost, share = threat.label_cost, threat.subpopulation
        threat = replace(threat, label_cost=math.inf, subpopulation=1.0)
    threat = parse_threat(threat, own=loss in ERRORS)
    if loss not in ERRORS and label_cost < math.inf and threat.order not in (1, math.inf):
        raise InputError(
            f"worst_case has label costs at orders 1 and inf, not {threat.order:g}: use "
            "ws.loss_curve."
        )
    return threat, label_cost, share


def _of_classes(
    model: Model | Graph | Piecewise, x: Tensor, y: Tensor, asked: Asked, threat: Threat
) -> tuple[Piecewise, Callable[[int], Problem]]:
    """The network, and how its problem is made with so many cells at most."""
    if isinstance(model, Piecewise):
        network = model
    else:
        graph = graph_of(model, x)
        _refuse_smooth(graph)
        network = graph.piecewise()
    mu, labels = asked.mu, y.cpu()
    points = x.cpu().double().flatten(1)
    price = parse_label_cost(asked.label_cost)
    if price < math.inf or parse_subpopulation(asked.subpopulation) < 1:
        weights = sample_weights(mu, len(y))
        points, labels, mu = pairs_of(points, labels, weights, network.outputs, price)
    given = (network, points, labels, threat.norm, threat.domain, asked.loss, mu)
    return network, lambda cells: Problem(*given, cells)


def _of_errors(
    model: Model | Graph | Piecewise, x: Tensor, y: Any, asked: Asked
) -> tuple[Piecewise, Callable[[int], Problem]]:
    """The same for a loss of errors."""
    if isinstance(model, Piecewise):
        raise InputError("a worst-case error needs the model itself: give the callable.")
    if asked.loss == "squared":
        raise InputError(
            "worst_case goes through affine pieces, and the squared error has no largest slope: "
            "use ws.loss_curve, or loss='huber'."
        )
    given = replace(asked, grid=[1.0])
    samples, _ = with_errors(model, x, y, given, parse_label_cost(asked.label_cost))
    _refuse_smooth(samples.graph)
    own = boxes_of(samples.domain)
    if own is not None and len(own.low) > 1:
        raise InputError("worst_case has one box for all samples: use ws.loss_curve.")
    network = samples.graph.to(torch.device("cpu")).piecewise()
    return network, lambda cells: ResidualProblem(samples, network, asked.mu, cells)


def _refuse_smooth(graph: Graph) -> None:
    if graph.smooth:
        raise InputError(
            "worst_case goes through the cells of a ReLU network, and a smooth one has none: use "
            "ws.loss_curve or ws.certify."
        )


def _answer(
    problem: Problem,
    others: tuple[Tensor, Tensor, float, float],
    threat: Threat,
    tolerance: float,
    report: Report,
) -> WorstCase:
    """The worst case of a problem; others: labels and weights of the samples, label cost and
    subpopulation.
    """
    problem.tick = report
    y, weights, label_cost, share = others
    if label_cost == math.inf and share == 1:
        found = solved(problem, threat.eps, threat.order, tolerance)
    else:
        case = OthersProblem(problem, y, weights, label_cost, share, threat.order, threat.eps)
        found = _paid(case.solve(tolerance), threat.eps)
    report(1.0)
    return found


def _affordable(network: Piecewise) -> int:
    """How many cells the default budget pays for: of each neuron a least-distance problem decides
    whether it splits a cell, and of each output some programs bound it.
    """
    n = network.inputs
    problem = clock.STEP / 8 + 4 * (network.neurons + 2 * n) * n * n
    return int(WORK / ((network.neurons + 4 * network.outputs) * problem))


def _noted(found: WorstCase) -> WorstCase:
    """A bracket that the budget has left open, with the note that says so."""
    bound = found.bound
    return replace(found, bound=replace(bound, info={**bound.info, "note": NOTE}))


def _by_curve(model: Model | Graph, x: Tensor, y: Any, asked: Asked, threat: Threat) -> WorstCase:
    """The bracket of `loss_curve`, which needs no cells, with the distribution behind it."""
    curve = loss_curve(
        *(model, x, y, threat.norm, threat.order, asked.loss, threat.domain),
        arithmetic="exact",
        mu=asked.mu,
        label_cost=asked.label_cost,
        subpopulation=asked.subpopulation,
        quantile=asked.quantile,
        delta=asked.delta,
        eps=[threat.eps],
    )
    low, high = curve(threat.eps)
    rows, choice, masses = curve.plan(threat.eps)
    used = choice >= 0
    atoms = curve.x[rows].double()
    atoms[used] = curve.points[choice[used]].double()
    moved = distances(atoms, curve.x[rows], threat.norm)
    root = rows
    if isinstance(curve, OthersLossCurve):
        moved, root = moved + curve.extra[rows], rows // (len(curve.y) // len(curve.true))
    cost = transport_cost(masses, torch.ones_like(masses), moved, threat.order)
    info = {**curve.info, "norm": threat.norm, "loss": asked.loss, "order": threat.order}
    bound = Bound(low, high, "loss curve", None, info)
    found = WorstCase(bound, math.nan, atoms.flatten(1), curve.y[rows], masses, root, cost, False)
    return _noted(_paid(found, threat.eps))


def worst_case_network(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    *,
    norm: float,
    order: float,
    eps: float,
    domain: Where = None,
    loss: str = "margin",
    mu: Tensor | None = None,
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells_limit: int = 100_000,
) -> WorstCase:
    """The worst expected loss within Wasserstein-`order` distance `eps` of samples x `(N, n)`,
    labels y and weights mu `(N,)`.

    norm: ground norm r; domain: a box `(low, high)` or None for R^n; loss: "margin" or
    "cross_entropy". Stops when the bracket is narrower than `tolerance * max(1, |upper|)`, or at
    the time limit (seconds) with the bracket so far; a limit that ends before the cells are listed
    is an `InputError`. The upper side rests on that list (`enumerate_cells`: all cells that hold a
    ball of radius 1e-9).
    """
    p = parse_order(order)
    if not 0 <= eps < math.inf:
        raise InputError(f"eps is {eps!r}, but a budget must be finite and not negative.")
    with limited(time_limit):
        problem = Problem(network, x, y, norm, domain, loss, mu, cells_limit)
        return solved(problem, eps, p, tolerance)


def solved(problem: Problem, eps: float, p: float, tolerance: float) -> WorstCase:
    """The worst case of a problem."""
    # X is convex and Omega_p lies in Omega_1, so the margin slope holds for every order (THEORY 3).
    clean = problem.average(problem.clean + problem.errors)
    upper = clean + problem.steepest * eps * (1 + LIFT)
    lam = math.nan
    if p == math.inf or eps == 0 or problem.steepest == 0:
        penalty = Penalty(math.inf, eps)
        upper = min(upper, problem.dual(penalty, tolerance * max(1.0, abs(clean)) / 4))
        plan = problem.best(penalty)
    else:
        upper, lam, plan = _descend(problem, eps, p, upper, tolerance)
    return _paid(problem.report(plan, upper, lam, p), eps)


def _paid(found: WorstCase, eps: float) -> WorstCase:
    """A worst case whose distribution was checked to cost no more than the budget."""
    if found.cost > eps * (1 + 1e-12):
        raise AssertionError(
            f"a distribution costs {found.cost} where eps is {eps}; please report this bug."
        )
    return found


@contextmanager
def limited(time_limit: float | None) -> Iterator[None]:
    """A time limit; before the cells are listed nothing is known, so that there is nothing to
    keep.
    """
    with clock.limited(time_limit):
        try:
            yield
        except clock.Late:
            if time_limit is None:  # a limit that the caller has set
                raise
            raise InputError(
                "the cells were not listed within the time limit: give more time, or use "
                "loss_curve."
            ) from None


def _descend(
    problem: Problem, eps: float, p: float, upper: float, tolerance: float
) -> tuple[float, float, Plan]:
    """Cutting planes in the multiplier, from the first upper bound on: the final one, its
    multiplier, the distribution.
    """

    def best() -> tuple[Plan, float, float]:
        plan, lam = problem.allocate(eps**p, p)
        return plan, problem.value(plan), lam

    def dual(lam: float, fine: float) -> float:
        return problem.dual(Penalty(p, lam), fine)

    # The bound to start from is the dual value at this multiplier.
    steep = problem.steepest * eps ** (1 - p) / p
    return descend(problem, (best, dual), (eps, p), (upper, steep), tolerance)


def anchor(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    *,
    norm: float,
    domain: Where = None,
    loss: str = "margin",
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells_limit: int = 100_000,
) -> Bound:
    """The steepest chord `S = max(0, max_i sup_x [loss(x, y_i) - loss(x_i, y_i)] / ||x - x_i||_r)`
    (THEORY 3).

    By Dinkelbach's iteration: maximise `loss(x, y_i) - lam ||x - x_i||`, take the chord of the
    maximiser as the next lam, until no sample has a steeper one. The lower side is a chord between
    evaluated points. Above, a chord to a point at distance t is at most `lam + (h_i(lam) -
    loss(x_i)) / t`; nearer than that the loss is at most as steep as the pieces that lie so near.
    """
    with limited(time_limit):
        return _steepest_chord(
            Problem(network, x, y, norm, domain, loss, None, cells_limit), tolerance
        )


def anchor_and_offset(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    lam: float,
    *,
    norm: float,
    domain: Where = None,
    loss: str = "margin",
    mu: Tensor | None = None,
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells_limit: int = 100_000,
) -> tuple[Bound, float, tuple[Tensor, Tensor]]:
    """`anchor`, and an upper bound on `C(lam) = sum_i mu_i sup_x [loss(x, y_i) - lam ||x -
    x_i||_r]` from the same cells.

    On R^n `lam` must not be below the slope at infinity, where the supremum is infinite (THEORY 3).
    Last, the points evaluated on the way: the sample each belongs to `(M,)`, and the point `(M,
    n)`.
    """
    with limited(time_limit):
        problem = Problem(network, x, y, norm, domain, loss, mu, cells_limit)
        chord = _steepest_chord(problem, tolerance)
        offset = problem.dual(Penalty(1.0, lam), tolerance)
        roots = [torch.full((pool.size,), i) for i, pool in enumerate(problem.pools)]
        points = [torch.from_numpy(pool.rows[:, 2:].copy()) for pool in problem.pools]
        return chord, offset, (torch.cat(roots), torch.cat(points))


def _steepest_chord(problem: Problem, tolerance: float) -> Bound:
    problem.add_near_points()
    if problem.unbounded:
        problem.add_far_points()
    count = len(problem.clean)
    lam = max(problem.flattest, 1e-12 * problem.steepest)
    for i in range(count):
        lam = max(lam, problem.steepest_chord(i)[0])
        while not problem.late():
            problem.evaluate(i, Penalty(1.0, lam), problem.resolution(i, tolerance))
            chord = problem.steepest_chord(i)[0]
            if chord <= lam * (1 + 1e-13):
                break
            lam = chord
    heights = [
        problem.evaluate(i, Penalty(1.0, lam), problem.resolution(i, tolerance))
        for i in range(count)
    ]
    upper = max(problem.chord_above(i, lam, height) for i, height in enumerate(heights))
    chords = [problem.steepest_chord(i) for i in range(count)]
    sample = max(range(count), key=lambda i: chords[i][0])
    lower = chords[sample][0]
    witness = torch.from_numpy(chords[sample][1].copy())
    rival = int(
        strongest_rival(problem.network.logits(witness[None]), problem.y[sample : sample + 1])[1]
    )
    return Bound(
        below(lower, upper, "steepest chord"),
        upper,
        "cells",
        witness,
        {**problem.info, "cut": clock.out_of_time(), "sample": sample, "rival": rival},
    )
