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
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.exact.programs import LIFT
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Where
from wassail.certificates.loss.descent import descend
from wassail.certificates.loss.pairs import pairs_of
from wassail.certificates.loss.penalty import Penalty, Plan
from wassail.certificates.loss.problem import Problem, WorstCase
from wassail.certificates.loss.worst_others import OthersProblem
from wassail.errors import InputError
from wassail.losses import strongest_rival
from wassail.threat import parse_order
from wassail.transport.allocation import sample_weights


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
    label_cost: float = math.inf,
    subpopulation: float = 1.0,
) -> WorstCase:
    """The worst expected loss within Wasserstein-`order` distance `eps` of samples x `(N, n)`,
    labels y and weights mu `(N,)`.

    norm: ground norm r; domain: a box `(low, high)` or None for R^n; loss: "margin" or
    "cross_entropy". Stops when the bracket is narrower than `tolerance * max(1, |upper|)`, or at
    the time limit (seconds) with the bracket so far; a limit that ends before the cells are listed
    is an `InputError`. The upper side rests on that list (`enumerate_cells`: all cells that hold a
    ball of radius 1e-9). label_cost, at orders 1 and inf, and subpopulation: labels that change and
    people that are missing.
    """
    p = parse_order(order)
    if not 0 <= eps < math.inf:
        raise InputError(f"eps is {eps!r}, but a budget must be finite and not negative.")
    if label_cost < math.inf and p not in (1, math.inf):
        raise InputError(
            f"worst_case has label costs at orders 1 and inf, not {p:g}: use ws.loss_curve."
        )
    if label_cost < math.inf or subpopulation < 1:
        weights = sample_weights(mu, len(y))
        rows = pairs_of(x, y, weights, network.outputs, label_cost)
        with limited(time_limit):
            pairs = Problem(network, *rows[:2], norm, domain, loss, rows[2], cells_limit)
            others = (label_cost, subpopulation, p, eps)
            found = OthersProblem(pairs, y.cpu().long(), weights, *others).solve(tolerance)
        return _paid(found, eps)
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
