"""The worst expected loss over `Omega_p(eps)` against eps, from both sides, for networks of any
size (THEORY 2 and 6).

With `G_i(d) = sup { loss(x', y_i) : x' in X, ||x' - x_i||_r <= d }` the worst case is, for every
finite order p,

    V(eps) = max { sum_i mu_i G_i^(c_i) : sum_i mu_i c_i <= eps^p }          G_i^: concave envelope
    of G_i as a function of d^p
           = min_{lam >= 0} lam eps^p + sum_i mu_i sup_d [ G_i(d) - lam d^p ],

and for order inf `sum_i mu_i G_i(eps)`. Points that are evaluated lie below `G_i`; with the first
form they make a distribution, whose loss is the lower side. Bound propagation on a grid of radii
lies above `G_i`; with the second form, at whatever lam, it makes the upper side. Between two radii,
`before < d <= radius`, the smaller of two bounds counts: the one on the ball of the farther radius,
and what the linear bounds of that ball, `margin_j >= base_j + <a_j, v>`, say nearer to the sample.
With `rho_j(d) = sup { -<a_j, v> : ||v||_r <= d, x + v in X }`, which is concave in d and 0 at 0,

    margin_j >= base_j - rho_j(d) >= base_j - rho_j(before) d / before        for d >= before,

and both losses are convex in d where the margins are linear in it: they lie below their chord.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss.certificate import Certificate
from wassail.certificates.loss.checks import check_labels, check_loss, check_samples, graph_of
from wassail.certificates.loss.chords import clean_above, loss_above
from wassail.certificates.loss.curve import LossCurve, budget_of
from wassail.certificates.loss.grid import each, grid_of, width
from wassail.certificates.loss.others import OthersLossCurve
from wassail.certificates.loss.pairs import pairs_of
from wassail.certificates.loss.regression import (
    DEFAULT_DELTA,
    DEFAULT_QUANTILE,
    Asked,
    regression_curve,
)
from wassail.certificates.loss.slopes import highest_loss, whole_box
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import arithmetic_of, margin_errors
from wassail.errors import InputError, JumpError
from wassail.geometry import column, maximiser, project, pull_inside, steepest
from wassail.geometry import distances as distances_between
from wassail.losses import ASCENTS, LIPSCHITZ, predict
from wassail.names import ERRORS
from wassail.network import BATCH_SIZE, Model, device_of, frozen, versions
from wassail.progress import Progress, progress_bar
from wassail.rounding import UNIT
from wassail.threat import (
    Domain,
    Number,
    parse_domain,
    parse_label_cost,
    parse_norm,
    parse_order,
    parse_seconds,
    parse_subpopulation,
)
from wassail.transport.allocation import sample_weights

WORK = 4 * clock.SECOND  # operations for the Lipschitz constant when there is no time limit
CLIMB = 8  # evaluations a sample and radius of the search for points of high loss
# radii on R^n beyond the grid, each 4 times the one before: where the slope at infinity shows
FAR = 10
NEAR = 2.0**-40  # of the first radius: a ball so small that the loss hardly changes in it


def loss_curve(
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
    if loss in ERRORS:
        if certificate is not None:
            raise InputError("a curve of errors knows its own slopes: give no certificate.")
        asked = Asked(norm, order, loss, domain, quantile, delta, arithmetic, points, grid, mu)
        asked = replace(asked, steps=steps, time_limit=time_limit, progress=progress)
        asked = replace(asked, label_cost=label_cost, subpopulation=subpopulation, eps=eps)
        return regression_curve(model, x, y, asked)
    r = parse_norm(norm)
    p = parse_order(order)
    domain = parse_domain(domain)
    end = math.inf if time_limit is None else clock.now() + parse_seconds(time_limit)
    check_loss(loss)
    x, y = check_samples(x, y, domain)
    graph, run = _executed(model, graph_of(model, x), arithmetic, domain, x.dtype)
    x = x.to(graph.device)
    y = y.to(graph.device)
    check_labels(graph, y)
    radii = sorted({*grid_of(grid, x, r, domain), *(b for b in map(budget_of, eps) if b > 0)})
    weights = sample_weights(mu, len(x))
    price, share = parse_label_cost(label_cost), parse_subpopulation(subpopulation)
    if price < math.inf or share < 1:
        if certificate is not None:
            raise InputError(
                "the lines of a certificate are for inputs that move and all people: give no "
                "certificate with label_cost or subpopulation."
            )
        rows = (weights, graph.outputs, price)
        found_pairs = loss_curve(
            graph if run is None else model,
            *pairs_of(x, y, *rows)[:2],
            norm=r,
            order=p,
            loss=loss,
            domain=domain,
            arithmetic=graph.arithmetic,
            points=[pairs_of(part, y, *rows)[0] for part in points],
            grid=grid,
            eps=eps,
            steps=steps,
            time_limit=None if end == math.inf else max(end - clock.now(), 1e-3),
            progress=progress,
        )
        return OthersLossCurve.of(found_pairs, y.cpu(), weights, price, share)
    if certificate is not None:
        _check_certificate(certificate, x.cpu(), y.cpu(), r, loss, domain, weights)
    with progress_bar(progress, "loss curve") as report, clock.limited(end - clock.now()):
        found = _Points(graph, x, y, r, loss, domain, run)
        cut = _evaluated(found, _beyond(radii, x, r, domain), points, report)
        with clock.limited(clock.seconds_left() / 2):
            lift = _lift(graph, y, domain)
            cut |= clock.out_of_time()
        rest = (radii, r, loss, domain, steps, lift)
        above, slope, late = _above(graph, x, y, *rest, lambda part: report(0.3 + 0.7 * part))
        cut |= late or clock.out_of_time()
    slope, line = _with_certificate(slope, certificate)
    info = {"versions": versions(), "steps": steps, "cut": cut}
    known = (x.cpu(), y.cpu(), weights, r, p, loss, domain)
    clean = (found.clean.cpu(), found.clean_predicted.cpu())
    sides = (*clean, *found.columns(), *above)
    return LossCurve(*known, *sides, slope, info, line, graph.arithmetic, lift)


def _evaluated(
    found: _Points, radii: list[float], points: Sequence[Tensor], report: Callable[[float], None]
) -> bool:
    """Look for points at these distances, in a quarter of the time, and add those that are given;
    whether the clock stopped that.
    """
    with clock.limited(clock.seconds_left() / 4):
        for place, radius in enumerate(radii):
            found.climb(radius)
            report(0.3 * (place + 1) / len(radii))
        cut = clock.out_of_time()
    for more in points:
        found.add(torch.as_tensor(more).detach(), None)
    return cut


def _with_certificate(
    slope: float, certificate: Certificate | None
) -> tuple[float, tuple[float, float] | None]:
    """The least slope that is known, and the line of a certificate."""
    if certificate is None:
        return slope, None
    slopes = (certificate.anchor, certificate.margin, certificate.paper)
    return min([slope, *(bound.upper for bound in slopes if bound is not None)]), certificate.line


def _check_certificate(
    certificate: Certificate,
    x: Tensor,
    y: Tensor,
    norm: float,
    loss: str,
    domain: Domain,
    mu: Tensor,
) -> None:
    """Refuse a certificate for something else: it must be about the same samples, and about all
    of the domain.
    """
    same = (
        torch.equal(certificate.x, x)
        and torch.equal(certificate.y, y)
        and torch.equal(certificate.mu, mu)
    )
    if not same or certificate.norm != norm or certificate.loss != loss:
        raise InputError(
            "the certificate is about other samples, weights, another norm or loss: make one for "
            "these."
        )
    if certificate.domain is not None and certificate.domain != domain:
        raise InputError(
            f"the certificate is about {certificate.domain}, the curve about {domain}: certify "
            "there or on R^n."
        )


def _executed(
    model: Model | Graph, graph: Graph, arithmetic: str, domain: Domain, dtype: torch.dtype
) -> tuple[Graph, Model | None]:
    """The graph in its arithmetic, and the model that evaluates points if it is the executed
    one.
    """
    missing = (
        "the model itself"
        if isinstance(model, Graph)
        else "a box as its domain"
        if domain is None
        else ""
    )
    if missing and arithmetic == "executed":
        raise InputError(
            f"a loss curve in executed arithmetic needs {missing}: give it, or use "
            "arithmetic='exact'."
        )
    graph = arithmetic_of(graph, "exact" if missing and arithmetic == "auto" else arithmetic, dtype)
    return graph, None if graph.arithmetic == "exact" or isinstance(model, Graph) else model


def _lift(graph: Graph, y: Tensor, domain: Domain) -> float:
    """How far the executed loss may be from the exact one in a box: as far as a margin, since
    both losses are 1-Lipschitz; inf if the time is up first.
    """
    if graph.arithmetic == "exact" or domain is None:
        return 0.0
    labels = torch.unique(y)
    with suppress(clock.Late):
        sweep = Sweep(graph, whole_box(graph, domain)).run()
        return max(float(margin_errors(sweep, label[None]).max()) for label in labels)
    return math.inf


class _Points:
    """Evaluated points of high loss, found by an ascent inside larger and larger balls."""

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        y: Tensor,
        norm: float,
        loss: str,
        domain: Domain,
        model: Model | None,
    ) -> None:
        """model: what evaluates the points that are kept, if it is not the graph."""
        self.graph = graph
        self.x = x
        self.y = y
        self.norm = norm
        self.domain = domain
        self.model = model
        self.value = LIPSCHITZ[loss]
        self.ascent = ASCENTS["ce" if loss == "cross_entropy" else loss]
        z = self._kept(x)
        self.clean = self.value(z, y)
        self.clean_predicted = predict(z, y)
        self.best = x.double()
        self.top = self.clean
        self.parts: list[tuple[Tensor, ...]] = []

    def climb(self, radius: float) -> None:
        """The highest points met within a radius, from the best so far on.

        In turn the maximiser over the whole ball of the loss linearised at the last point, which is
        exact for linear networks, and a step from the best point, half as long each time. When the
        time is up the best points so far are added once.
        """
        if self.parts and clock.out_of_time():
            return
        x = self.x.double()
        point = self.best
        with suppress(clock.Late):
            for k in range(CLIMB):
                g = self._gradient(point)
                if k % 2 == 0:
                    point = x + steepest(x, g, self.norm, radius, self.domain)
                else:
                    ahead = self.best + radius * 2.0 ** (-k // 2) * maximiser(g, self.norm)
                    point = project(ahead, x, self.norm, radius, self.domain)
                height = self.value(self._logits(point), self.y)
                better = height > self.top
                self.best = torch.where(column(better, x), point, self.best)
                self.top = torch.where(better, height, self.top)
        self.add(self.best.to(self.x.dtype), radius)

    def add(self, points: Tensor, radius: float | None) -> None:
        """Points `(N, *shape)`, one a sample, pulled into the box and a radius as they are
        stored, and evaluated there.
        """
        if points.shape != self.x.shape:
            raise InputError(
                f"the points have shape {tuple(points.shape)} but the samples "
                f"{tuple(self.x.shape)}: give one point a sample."
            )
        points = points.to(self.x)
        if radius is not None:
            points = pull_inside(points, self.x, self.norm, radius, self.domain)
        inside = torch.isfinite(points).flatten(1).all(1)
        if self.domain is not None:
            inside &= ((points >= self.domain[0]) & (points <= self.domain[1])).flatten(1).all(1)
        points = torch.where(column(inside, points), points, self.x)
        z = self._kept(points)
        value = self.value(z, self.y)
        distance = distances_between(points, self.x, self.norm).to(z.device)
        keep = (value > self.clean) & (distance > 0)
        self.parts.append(
            (
                points[keep],
                keep.nonzero().flatten(),
                value[keep],
                distance[keep],
                predict(z, self.y)[keep],
            )
        )

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Points, root, value, distance and predicted class of all that are worth keeping, on
        the CPU.
        """
        points, root, value, distance, predicted = (torch.cat(c) for c in zip(*self.parts))
        order = sorted(zip(root.tolist(), distance.tolist(), (-value).tolist(), range(len(root))))
        keep: list[int] = []
        owner = -1
        high = math.inf
        for i, _, low, m in order:  # a point is of use if no nearer one of its sample is as high
            if i != owner or low < high:
                keep.append(m)
                owner = i
                high = low
        chosen = torch.tensor(keep, dtype=torch.int64, device=root.device)
        return (
            points[chosen].cpu(),
            root[chosen].cpu(),
            value[chosen].cpu(),
            distance[chosen].cpu(),
            predicted[chosen].cpu(),
        )

    def _kept(self, points: Tensor) -> Tensor:
        """Logits of points that are kept, in the arithmetic of the curve."""
        if self.model is None:
            return self._logits(points)
        device = device_of(self.model, points.device)
        with frozen(self.model), torch.no_grad():
            return torch.cat(
                [
                    self.model(part.to(device)).double().to(self.graph.device)
                    for part in torch.split(points, BATCH_SIZE)
                ]
            )

    def _logits(self, points: Tensor) -> Tensor:
        return torch.cat(
            [self.graph.logits(part.double()) for part in torch.split(points, BATCH_SIZE)]
        )

    def _gradient(self, points: Tensor) -> Tensor:
        found = []
        for part, labels in zip(torch.split(points, BATCH_SIZE), torch.split(self.y, BATCH_SIZE)):
            clock.look()
            with torch.enable_grad():
                here = part.detach().requires_grad_(True)
                z = self.graph.logits(here)
                found.append(torch.autograd.grad(z, here, self.ascent(z.detach(), labels)[1])[0])
        return torch.cat(found)


def _above(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    radii: list[float],
    norm: float,
    loss: str,
    domain: Domain,
    steps: int,
    lift: float,
    report: Callable[[float], None],
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], float, bool]:
    """The certified side of a curve: start `(N,)`, grid `(T,)`, ceiling, left and rise `(N, T +
    1)`; the slope; and whether the clock stopped that.

    The first radius is a tiny one, within which the loss hardly changes; radii from which on
    nothing is known but the bound on the whole domain, or which the time does not reach, are left
    out. What is not known in time is infinite.
    """
    edges = [NEAR * radii[0], *radii]
    labels, which = (v.cpu() for v in torch.unique(y, return_inverse=True))
    most = torch.full(y.shape, math.inf, dtype=torch.float64, device=y.device)
    try:
        start = loss_above(each(graph, x, y, 0.0, norm, domain, steps), y, loss)
    except clock.Late:
        start = clean_above(graph, x, y, loss) + lift
        start = torch.nextafter(start, torch.full_like(start, math.inf))
    with suppress(clock.Late):
        most = highest_loss(graph, labels.tolist(), loss, domain, steps)[which].to(y.device)
    slope, late = _slope(graph, norm, domain, labels.tolist())
    ceiling: list[Tensor] = []
    left: list[Tensor] = []
    rise: list[Tensor] = []
    for place, (before, radius) in enumerate(itertools.pairwise(edges)):
        try:
            ends = [
                ends_of(graph, a, b, before, radius, norm, domain, steps)
                for a, b in zip(torch.split(x, BATCH_SIZE), torch.split(y, BATCH_SIZE))
            ]
        except clock.Late:
            ceiling, left = ceiling or [most], left or [most]
            rise = rise or [torch.zeros_like(most)]
            break
        far, near, line = (loss_above(torch.cat(side), y, loss) for side in zip(*ends))
        if place == 0:
            ceiling = [near]
            left = [near]
            rise = [torch.zeros_like(near)]
        ceiling.append(torch.minimum(far, most))
        left.append(near)
        rise.append(((line - near) / (radius - before)).clamp(min=0) * (1 + 4 * UNIT))
        report((place + 1) / len(radii))
        if (ceiling[-1] == most).all():
            break
    edges = edges[: len(ceiling)]
    ceiling, left, rise = [*ceiling, most], [*left, most], [*rise, torch.zeros_like(most)]
    # A smaller ball knows at least what a larger one does.
    lowest = torch.stack(ceiling, 1).flip(1).cummin(1).values.flip(1)
    grid = torch.tensor(edges, dtype=torch.float64)
    sides = (start, grid, lowest, torch.stack(left, 1), torch.stack(rise, 1))
    a, b, c, d, e = (side.cpu() for side in sides)
    return (a, b, c, d, e), slope, late


def _slope(graph: Graph, norm: float, domain: Domain, labels: list[int]) -> tuple[float, bool]:
    """The Lipschitz constant of the margins, within half of the time: in a box a help, on R^n a
    must. A box is a part of R^n. And whether the clock stopped it.
    """
    exact = replace(graph, arithmetic="exact")
    places = list(dict.fromkeys((domain, None)))
    if domain is not None and graph.curved:  # in a box the slopes of attention are of no help
        return math.inf, False
    free = clock.seconds_left() < math.inf
    found = math.inf
    cut = False
    with clock.limited(clock.seconds_left() / 2):
        for done, where in enumerate(places):
            share = clock.seconds_left() / (len(places) - done)
            # In a box a help, which a jump takes away; on R^n a must.
            helpful = nullcontext() if domain is None else suppress(JumpError)
            with helpful, clock.limited(share, math.inf if free else WORK):
                bound = lipschitz(exact, norm, where, labels=labels)
                found = min(found, bound.upper)
                cut |= bool(bound.info["cut"])
    return found, cut


def ends_of(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    before: float,
    radius: float,
    norm: float,
    domain: Domain,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lower bounds on the margins `(N, K)` from the linear bounds of a ball: in it, in the smaller
    one, and by the line.

    The line is `base - rho(before) d / before`, here at `d = radius`; see the head of this file.
    """
    sweep = Sweep(
        graph,
        Balls.make(x, torch.full((len(x),), radius, dtype=torch.float64), norm, domain),
        steps,
    ).run()
    far, base, a = margins(sweep, y)
    inner = replace(sweep.inputs, radius=torch.full_like(sweep.inputs.radius, before))
    owner = torch.arange(len(y) * graph.outputs, device=y.device) // graph.outputs
    rho = inner.upper(-a.flatten(0, 1), owner).reshape_as(base)
    # Of the four units one each is for the quotient, the product and the difference.
    near, line = (base - r - 4 * UNIT * (base.abs() + r) for r in (rho, rho * (radius / before)))
    own = torch.zeros_like(base).scatter(1, y[:, None], 1.0) > 0
    return far, near.masked_fill(own, 0.0), line.masked_fill(own, 0.0)


def _beyond(radii: list[float], x: Tensor, norm: float, domain: Domain) -> list[float]:
    """The radii to look for points at: the grid, and beyond it to the far end of the domain, on
    R^n far out.
    """
    if domain is None:
        return [*radii, *(radii[-1] * 4.0**k for k in range(1, FAR + 1))]
    full = width(x, norm, domain)
    further = itertools.takewhile(
        lambda radius: radius < 2 * full, (radii[-1] * 2.0**k for k in itertools.count(1))
    )
    return [*radii, *further]
