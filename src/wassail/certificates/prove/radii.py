"""Certified radii: for each sample a distance within which nothing flips, proved (THEORY 6)."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.prove.exact import EXACT_UP_TO_UNSTABLE, search_exactly
from wassail.certificates.prove.ladder import (
    Attempt,
    Ladder,
    batch_of,
    check_method,
    parse_effort,
)
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.products import product_radii
from wassail.certificates.prove.radius_search import Growth, RadiusSearch
from wassail.certificates.prove.record import Radii
from wassail.certificates.search.frontier import Workers, crew
from wassail.errors import InputError, instance
from wassail.network import Model, versions
from wassail.progress import Progress, progress_bar
from wassail.specification import Labels
from wassail.threat import (
    Domain,
    Number,
    number,
    parse_domain,
    parse_eps,
    parse_norm,
    parse_order,
    parse_seconds,
    whole,
)
from wassail.transport.allocation import sample_weights

TOLERANCE = 0.01  # a radius is searched until it is known to this relative precision
SIFT = 4  # part of the time that the rounding errors at the samples take at most
PROVED_AGAIN = 1 - 1e-9  # of a radius by products, so that another batch's rounding proves it, too


def radii(  # noqa: PLR0913
    model: Model | Graph,
    x: Tensor,
    y: Labels,
    norm: Number = "inf",
    domain: Domain = (0.0, 1.0),
    method: str = "auto",
    *,
    arithmetic: str = "auto",
    upper: Tensor | None = None,
    start: Radii | None = None,
    eps: Number | None = None,
    order: Number | None = None,
    mu: Tensor | None = None,
    tolerance: Number = TOLERANCE,
    effort: Number | None = None,
    time_limit: float | None = None,
    batch_size: int | None = None,
    workers: Workers = None,
    progress: Progress = False,
) -> Radii:
    """For each sample the largest radius proved: no point of the domain that near to it is
    classified other than y.

    A radius is only ever rounded down; misclassified samples and ties have 0. eps and order steer:
    samples whose radius cannot change the certified accuracy over `Omega_order(eps)` any more are
    left as they are.

    Linear bounds are those of CROWN (Zhang et al. 2018), branching that of beta-CROWN (Wang et al.
    2021) and GenBaB (Shi et al. 2025).

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        norm: ground norm r, 1, 2 or inf; default "inf".
        domain: box `(low, high)`, or None for all of R^n; default (0, 1). Tensors are boxes of each
            feature, or of each feature of each sample: see `Threat`.
        method: "auto" (the default), the whole ladder as far as the effort goes: linear bounds and
            products of norms, the exact distance on small ReLU networks, balls at l2, quadratic
            bounds and branching. Or a part of it: "crown" (linear bounds), "ball" (then bounds that
            know how far all neurons of a layer move at once, l2), "branch" (then branch and bound
            on neurons, ReLU or smooth), "exact" (the distance itself, for small ReLU networks;
            larger ones are branched). `Radii.proved_by` tells which rung proved what.
        arithmetic: "executed": for the network as it runs in its own floating-point type, all
            margins proved above a bound on its rounding errors; "exact": for the exact function, of
            which the network that runs is a rounded copy; "auto" (the default): executed where the
            network is covered (piecewise linear, float32 or float64), else exact.
        upper: distances of known flips (`Flips.distances`), `(N,)`; no radius is sought beyond
            them; default None.
        start: `Radii` of the same samples, from which the search goes on; default None.
        eps: budget that steers; default None.
        order: Wasserstein order that steers; default None.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        tolerance: relative precision of the search by linear bounds; default 0.01.
        effort: what a sample may take beyond linear bounds, in seconds of one core, roughly; it is
            counted in operations, so that nothing depends on the clock; default None, 2, and no
            limit with a time limit. More effort never gives a smaller radius.
        time_limit: seconds for all samples; what is proved by then is kept, and `info["cut"]` says
            whether the clock stopped something; default None.
        batch_size: int, samples bounded at once; default None, 16, and 64 on small networks.
        workers: processes that share the search for ONE sample under "exact" and "branch", a number
            or a pool of `certificates.search.workers`: for a few hard samples; many are faster side
            by side (`evaluate` with a runner); default None.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Radii`: values, and which of them are exact.
    """
    r = parse_norm(norm)
    box = parse_domain(domain, own=True)
    began = clock.now()
    check_method(method)
    precision = _precision(tolerance)
    if batch_size is not None:
        whole(batch_size, "batch_size")
    if start is not None:
        instance(start, Radii, "start is", "the radii to go on with, as ws.radii returns them")
    budget = None if time_limit is None else parse_seconds(time_limit)
    each = parse_effort(effort, budget)
    goal = _goal(eps, order)
    problem = Problem.of(model, x, y, r, box, arithmetic)
    aim = None if goal is None else (*goal, sample_weights(mu, len(problem)))
    limit = None if budget is None else budget - (clock.now() - began)
    with (
        progress_bar(progress, "certified radii") as report,
        crew(workers) as pool,
        clock.limited(limit),
    ):
        size = batch_size or batch_of(problem.graph)
        search = RadiusSearch(problem, upper, aim, precision, size, report)
        with clock.timed(clock.seconds_left() / SIFT):
            seen = search.sift()
        if start is not None:
            search.resume(start)
        if start is None or method == "crown":
            parts = 1 if method == "crown" or not each else 2  # more comes after it
            with clock.limited(clock.seconds_left() / parts):
                search.run()
        search.note("crown")
        search.upper = search.flip.clone()  # too far for linear bounds may not be for the rest
        if method in ("auto", "ball"):
            search.raise_to(product_radii(problem, search.lower) * PROVED_AGAIN)
            search.note("products")
        ladder = Ladder(problem, method, pool=pool)
        if method in ("auto", "exact") and problem.small:
            _exactly(search, ladder, method, each)
            search.note("exact")
        if method != "crown":
            _climb(search, ladder, each)
    info = _info(search, clock.now() - began, each, seen)
    known = (search.lower, search.exact, method, r, problem.domain, search.points)
    arithmetic = problem.graph.arithmetic
    return Radii(*known, info, arithmetic, search.errors, tuple(search.proved_by))


def _info(search: RadiusSearch, seconds: float, effort: float, seen: str | None) -> dict[str, Any]:
    """What a search took, and its settings; seen: what `search.sift` returned."""
    aim = search.aim
    return {
        "seconds": seconds,
        "sweeps": search.sweeps,
        "rows": search.rows,
        "tolerance": search.tolerance,
        "effort": effort / clock.SECOND,
        "cut": search.cut,
        "domains": search.domains,
        "versions": versions(),
        **({"eps": aim[0], "order": aim[1]} if aim else {}),
        **({} if seen is None else {"errors": seen}),
    }


def _precision(tolerance: Number) -> float:
    """The relative precision of a search."""
    precision = number(tolerance, "tolerance")
    if precision <= 0:
        raise InputError(f"tolerance is {tolerance!r}: give a positive number, for example 0.01.")
    return precision


def _goal(eps: Number | None, order: Number | None) -> tuple[float, float] | None:
    """The budget and the order that steer, None for neither."""
    if (eps is None) != (order is None):
        raise InputError("eps and order steer together: give both or neither.")
    return None if eps is None or order is None else (parse_eps(eps), parse_order(order))


def _exactly(search: RadiusSearch, ladder: Ladder, method: str, effort: float) -> None:
    """The exact distances, under "auto" of the samples whose search is likely to end."""
    rows = (search.open & ~search.idle() & ~search.exact).nonzero()[:, 0]
    share = math.inf
    with clock.limited(clock.seconds_left() / 2), suppress(clock.Late):
        if method == "auto":
            share = effort
            far = torch.where(search.lower > 0, 2 * search.lower, search.first)
            far = torch.minimum(search.flip, far)
            parts = [torch.zeros(0, dtype=torch.float64)]
            for part in torch.split(rows, ladder.batch) if len(rows) else ():
                parts.append(ladder.begin(part, far[part], "none").unstable)
            rows = rows[torch.cat(parts) <= EXACT_UP_TO_UNSTABLE]
        search_exactly(search, rows, share, ladder.pool)


def _climb(search: RadiusSearch, ladder: Ladder, effort: float) -> None:
    """Larger radii by the ladder, the cheapest level of all samples first.

    A sample stops when its next attempt costs more than what is left of its effort, or when it has
    failed at every level.
    """
    far = search.flip
    goal = search.aim[0] if search.aim and search.aim[1] == math.inf else None
    growth = Growth(ladder, search.lower, far, goal)
    begin = torch.minimum(search.first, far) / 4
    count = len(ladder.levels)
    least = [ladder.least_price(k) for k in range(count)]
    prices = torch.tensor([*least, math.inf], dtype=torch.float64)
    first = 0
    with suppress(clock.Late):
        while True:
            radius = growth.radius(far, begin)
            able = search.open & ~search.exact & ~search.idle() & growth.open(far, radius)
            able &= (search.work + prices[growth.level] <= effort) & search.right
            left = able.nonzero()[:, 0]
            first = first or len(left)
            search.report(1 - len(left) / max(first, 1))
            if not len(left):
                return
            level = int(growth.level[left].min())
            same = left[growth.level[left] == level]
            for rows in torch.split(same, ladder.batch):
                clock.look()
                attempt = ladder.begin(rows, radius[rows])
                search.sweeps += 1
                ladder.climb(attempt, level, effort - search.work[rows])
                search.take(attempt, rows)
                _told(growth, attempt, rows, search.flip)
    search.cut |= clock.out_of_time()


def _told(growth: Growth, attempt: Attempt, rows: Tensor, far: Tensor) -> None:
    """Tell what an attempt says of some samples; far: the distances of flips of all samples."""
    said = (rows, attempt.radius, attempt.proved, far[rows], attempt.gain)
    for each in zip(*(part.tolist() for part in said)):
        growth.told(*each)
