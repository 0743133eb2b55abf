"""Certified radii: for each sample a distance within which nothing flips, proved (THEORY 6).

Long because the parameters of two public functions are listed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from wassail import names
from wassail.certificates import clock
from wassail.certificates.ball_radii import proved_by_balls
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep, margin_bounds, margins
from wassail.certificates.bounds.executed import arithmetic_of
from wassail.certificates.bounds.norms import pair_products
from wassail.certificates.bounds.quadratic import QUADRATIC, has_quadratics, proved_samples
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.product_radii import beyond_a_ball
from wassail.certificates.radius_search import (
    BATCH,
    Radii,
    RadiusSearch,
    batch_of,
    branched,
    domains,
    is_small,
    least_value,
    sample_groups,
    slack_of,
)
from wassail.certificates.search.nearest_flip import nearest_flip
from wassail.certificates.search.workers import Pool, Workers, crew
from wassail.checks import check_data
from wassail.errors import InputError, unknown
from wassail.losses import predict
from wassail.network import BATCH_SIZE, Model, check_model, device_of, frozen, versions
from wassail.progress import Progress, progress_bar
from wassail.threat import (
    Domain,
    Number,
    Threat,
    number,
    parse_domain,
    parse_eps,
    parse_norm,
    parse_order,
    parse_seconds,
    parse_threat,
    whole,
)
from wassail.transport.allocation import sample_weights

METHODS = tuple(names.RADIUS_METHODS)
STEPS = 20  # of the ascent on the slopes, for "alpha-crown"
TOLERANCE = 0.01  # a radius is searched until it is known to this relative precision
PAIR = clock.SECOND
CLOSING = 5 * clock.SECOND  # operations for the exact distance of a sample under "auto"


def radii(
    model: Model | Graph,
    x: Tensor,
    y: Tensor,
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
    steps: int = STEPS,
    time_limit: float | None = None,
    batch_size: int | None = None,
    workers: Workers = None,
    progress: Progress = False,
) -> Radii:
    """For each sample the largest radius proved: no point of the domain that near to it is
    classified other than y.

    Long because its parameters are listed, and most are checked before the search begins.

    A radius is only ever rounded down; misclassified samples and ties have 0. eps and order steer:
    samples whose radius cannot change the certified accuracy over `Omega_order(eps)` any more are
    left as they are.

    Linear bounds are those of CROWN (Zhang et al. 2018), optimised slopes those of alpha-CROWN (Xu
    et al. 2021), branching that of beta-CROWN (Wang et al. 2021) and GenBaB (Shi et al. 2025).

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        norm: ground norm r, 1, 2 or inf; default "inf".
        domain: box `(low, high)`, or None for all of R^n; default (0, 1).
        method: "lipschitz" (margins over global Lipschitz constants), "crown" (linear bounds on
            balls, searched over the radius), "alpha-crown" (with `steps` of an ascent on the
            slopes), "branch" (branch and bound on neurons, ReLU or smooth, networks of any size),
            "ball" (crown and products of norms, then bounds that know how far all neurons of a
            layer move at once, for l1 and l2), "exact" (the distance itself, for small ReLU
            networks; larger ones are branched), or "auto" (the default): exact for small ReLU
            networks, with a limit on its work; else crown, products of norms, and for l1 and l2
            ball (`Radii.proved_by`).
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
        tolerance: relative precision of the search; default 0.01.
        steps: int, ascent steps of "alpha-crown"; default 20.
        time_limit: seconds for all samples, shared evenly; what is proved by then is kept, and
            `info["cut"]` says whether the clock stopped something; default None, a budget of work,
            so that nothing depends on the clock.
        batch_size: int, samples bounded at once; default None, 16, and 64 on small networks.
        workers: processes that share the search for ONE sample under "exact" and "branch", a number
            or a pool of `certificates.search.workers`: for a few hard samples; many are faster side
            by side (`evaluate` with a runner); default None.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Radii`: values, and which of them are exact.
    """
    r = parse_norm(norm)
    box = parse_domain(domain)
    began = time.monotonic()
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if (eps is None) != (order is None):
        raise InputError("eps and order steer together: give both or neither.")
    precision = number(tolerance, "tolerance")
    if precision <= 0:
        raise InputError(f"tolerance is {tolerance!r}: give a positive number, for example 0.01.")
    if batch_size is not None:
        whole(batch_size, "batch_size")
    whole(steps, "steps", 0)
    if start is not None and not isinstance(start, Radii):
        raise InputError(f"start is a {type(start).__name__}: give the Radii to go on with.")
    budget = None if time_limit is None else parse_seconds(time_limit)
    goal = None if eps is None or order is None else (parse_eps(eps), parse_order(order))
    graph, x, y, wrong, logits = prepared(model, x, y, box, arithmetic)
    chosen = _cheap(graph, r) if method == "auto" else method
    chosen = "branch" if chosen == "exact" and not is_small(graph) else chosen
    aim = None if goal is None else (*goal, sample_weights(mu, len(x)))
    limit = None
    if budget is not None:
        limit = budget - (time.monotonic() - began)
    with (
        progress_bar(progress, "certified radii") as report,
        crew(workers) as pool,
        clock.limited(limit),
    ):
        size = batch_size or batch_of(graph)
        search = RadiusSearch(graph, x, y, r, box, upper, aim, precision, size, report)
        search.settle(wrong)
        with clock.unlimited():  # on points, where nothing is left to substitute
            seen = search.sift(logits)
        if start is not None:
            search.resume(start)
        _run(search, chosen, start is not None, steps, pool, method == "auto")
    info = {
        "seconds": time.monotonic() - began,
        "sweeps": search.sweeps,
        "rows": search.rows,
        "tolerance": search.tolerance,
        "cut": search.cut,
        "domains": search.domains,
        "versions": versions(),
        **({"steps": steps} if chosen == "alpha-crown" else {}),
        **({"eps": aim[0], "order": aim[1]} if aim else {}),
        **({} if seen is None else {"errors": seen}),
    }
    known = (search.lower, search.exact, chosen, r, box, search.points)
    return Radii(*known, info, graph.arithmetic, search.errors, tuple(search.proved_by))


def _run(
    search: RadiusSearch, method: str, resumed: bool, steps: int, pool: Pool | None, all_: bool
) -> None:
    """The search by one method; the better ones start from linear bounds. all_: for "auto", which
    tries the products of norms, too, as "ball" does.
    """
    if method == "lipschitz":
        where = (search.graph, search.x, search.y, search.norm, search.domain)
        found, search.cut = _by_lipschitz(*where)
        search.raise_to(found)
    elif not resumed or method == "crown":
        parts = 1 if method == "crown" else 2  # a better method comes after it
        with clock.limited(clock.seconds_left() / parts):
            search.run(0)
    search.note("lipschitz" if method == "lipschitz" else "crown")
    if (all_ or method == "ball") and method != "exact" and has_products(search.graph):
        where = (search.graph, search.x, search.y, search.norm, search.domain)
        alone = by_products(*where)
        search.raise_to(alone)
        search.raise_to(beyond_a_ball(*where, alone, search.lower))
        search.note("lipschitz")
    if method == "alpha-crown":
        search.run(steps)
    if method == "ball":
        search.spheres()
    if method == "branch":
        search.branch(pool)
    if method == "exact":
        search.exactly(pool, CLOSING * len(search.x) if all_ else math.inf)
    search.note(method)


def has_products(graph: Graph) -> bool:
    """Whether "auto" tries the products of norms: they are finite."""
    return not graph.curved


def _cheap(graph: Graph, norm: float) -> str:
    """What "auto" is: exact on small networks, else the best of the linear bounds."""
    if is_small(graph):
        return "exact"
    return "ball" if norm in (1, 2) and not graph.smooth and not graph.curved else "crown"


def verify(
    model: Model | Graph,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str = "auto",
    *,
    arithmetic: str = "auto",
    steps: int = STEPS,
    time_limit: float | None = None,
    batch_size: int = BATCH,
    progress: Progress = False,
    at: Tensor | None = None,
) -> Tensor:
    """Which samples are proved at one fixed eps: nothing in the closed ball, cut by the box, flips.
    Bool `(N,)`.

    Long because each method tries other bounds, the cheap ones first.

    Its mean is the verified accuracy, for about a tenth of the work of radii. The order of the
    threat plays no part.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        threat: `Threat`: norm, eps and domain.
        method: as in `radii`; "auto" (the default) is products of norms, "crown", then
            "ball" (l1 and l2), then "branch" for what is left, or "exact" on small networks.
        arithmetic: as in `radii`; default "auto".
        steps: int, ascent steps of "alpha-crown"; default 20.
        time_limit: seconds; what was reached by then is kept; default None, a budget of work.
        batch_size: int, samples bounded at once; default 16.
        progress: bool, or a callable that is given the share done; default False, no bar.
        at: a radius of each sample to prove, float64 `(N,)`, in place of the threat's eps; default
            None.

    Returns:
        Bool tensor `(N,)`.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    threat = parse_threat(threat)
    whole(batch_size, "batch_size")
    whole(steps, "steps", 0)
    limit = None if time_limit is None else parse_seconds(time_limit)
    graph, x, y, wrong, _ = prepared(model, x, y, threat.domain, arithmetic)
    wanted = (
        torch.full((len(x),), threat.eps, dtype=torch.float64)
        if at is None
        else at.detach().cpu().double()
    )
    if method == "lipschitz":
        with clock.limited(limit):
            values = _by_lipschitz(graph, x, y, threat.norm, threat.domain)[0]
        return (values.cpu() >= wanted) & ~wrong
    exact = method in ("exact", "auto") and is_small(graph)
    branching = method in ("branch", "exact", "auto") and not exact
    most = (domains(graph) if limit is None else 10**6) if branching else 0
    cheap = _cheap(graph, threat.norm) if method == "auto" else method
    task = _Fixed(graph, x, y, threat, wanted, batch_size, most, cheap == "ball")
    if method in ("auto", "ball") and not exact and has_products(graph):
        with clock.limited(limit):
            where = (graph, x, y, threat.norm, threat.domain)
            # They are a hair inside: there is room for the roundings of another batch.
            values = by_products(*where) * (1 + 2.0**-40)
            open_ = torch.where((values >= wanted) | wrong, 0.0, wanted)
            values = torch.maximum(values, beyond_a_ball(*where, values, open_) * (1 + 2.0**-40))
        task.proved = (values >= wanted) & ~wrong
    with progress_bar(progress, "verification") as report, clock.limited(limit):
        for turn, inner in enumerate((0, steps) if method == "alpha-crown" else (0,)):
            try:
                task.sweep((~wrong & ~task.proved).nonzero()[:, 0], inner, turn, report)
            except clock.Late:
                return task.proved
        if exact:
            each = CLOSING if method == "auto" else math.inf
            task.close((~wrong & ~task.proved).nonzero()[:, 0], each)
    return task.proved


class _Fixed:
    """Samples to prove at fixed radii.

    wanted `(N,)`: the radii; most: domains of a branch and bound for each sample, 0 for none;
    spheres: whether the bounds of "ball" come after crown's; proved `(N,)`: what is proved so far.
    """

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        y: Tensor,
        threat: Threat,
        wanted: Tensor,
        batch_size: int,
        most: int,
        spheres: bool,
    ) -> None:
        self.graph = graph
        self.x = x
        self.y = y
        self.labels = y.cpu()
        self.threat = threat
        self.wanted = wanted
        self.batch_size = batch_size
        self.most = most
        self.spheres = spheres
        self.proved = torch.zeros(len(x), dtype=torch.bool)

    def sweep(self, left: Tensor, steps: int, turn: int, report: Callable[[float], None]) -> None:
        """Linear bounds for samples, in batches, and branching for those that they do not prove."""
        norm = self.threat.norm
        domain = self.threat.domain
        for done, part in enumerate(torch.split(left, self.batch_size) if len(left) else ()):
            report((turn + done * self.batch_size / max(len(left), 1)) / 2)
            some = part.to(self.x.device)
            balls = Balls.make(self.x[some], self.wanted[part], norm, domain)
            bounds = Sweep(self.graph, balls, steps).run()
            lower = margins(bounds, self.y[some], "open")[0].cpu()
            self.proved[part] = least_value(lower, self.labels[part]) > 0
            self._balls(part[~self.proved[part]])
            self._quadratics(part, bounds, lower)
            open_ = (~self.proved[part]).nonzero()[:, 0].tolist() if self.most else []
            for group in sample_groups(open_, self.graph):
                rest = len(left) - done * self.batch_size - group[0]
                share = clock.seconds_left() / rest * len(group)
                counts = [self.most] * len(group)
                decided = branched(bounds, lower, group, self.labels[part], counts, share)
                self.proved[part[group]] = torch.tensor([good for good, _ in decided])
            del bounds  # before the next one takes as much memory

    def _balls(self, rest: Tensor) -> None:
        """The bounds of "ball" for what crown left, if they are wanted."""
        if self.spheres and len(rest):
            x = self.x[rest.to(self.x.device)]
            y = self.y[rest.to(self.y.device)]
            where = (self.wanted[rest], self.threat.norm, self.threat.domain)
            with suppress(clock.Late):
                self.proved[rest] = proved_by_balls(self.graph, x, y, *where)

    def _quadratics(self, part: Tensor, bounds: Sweep, lower: Tensor) -> None:
        """Quadratic bounds for what is left, before any branching."""
        if not self.most or not has_quadratics(self.graph, self.threat.norm):
            return
        for steps in QUADRATIC:
            left = (~self.proved[part]).nonzero()[:, 0]
            with suppress(clock.Late):
                good, _ = proved_samples(bounds, left.tolist(), self.labels[part], lower, steps)
                self.proved[part[left]] = torch.tensor(good, dtype=torch.bool)

    def close(self, left: Tensor, each: float) -> None:
        """Exact distances of samples, as far as needed; those with one radius together. each:
        operations for a sample.
        """
        norm = self.threat.norm
        domain = self.threat.domain
        shared = len(left)
        for eps in torch.unique(self.wanted[left]).tolist():
            mine = left[self.wanted[left] == eps]
            x = self.x[mine.to(self.x.device)]
            y = self.y[mine.to(self.y.device)]
            seconds = clock.seconds_left() * len(mine) / shared
            with clock.limited(seconds, each * len(mine)), suppress(clock.Late):
                slack = slack_of(self.graph, x, y, self.wanted[mine], norm, domain)
                distances = nearest_flip(self.graph, x, y, norm, domain, slack=slack, within=eps)
                self.proved[mine] = distances.lower >= eps
            shared -= len(mine)


def prepared(
    model: Model | Graph, x: Tensor, y: Tensor, domain: Domain, arithmetic: str
) -> tuple[Graph, Tensor, Tensor, Tensor, Tensor | None]:
    """The structure, samples and labels on its device; which samples the model itself gets wrong,
    and its logits, on the CPU.

    What a search knows of each sample, a few numbers, is kept on the CPU. Bounds are computed where
    the structure is.
    """
    x, y = check_data(x, y, domain, None if isinstance(model, Graph) else model)
    logits = None
    if isinstance(model, Graph):
        graph = model
        wrong = torch.zeros(len(x), dtype=torch.bool)
    else:
        with frozen(model), torch.no_grad():
            check_model(model, x, y)
            device = device_of(model, x.device)
            pairs = zip(torch.split(x, BATCH_SIZE), torch.split(y, BATCH_SIZE))
            parts = [model(a.to(device)).cpu() for a, _ in pairs]
        logits = torch.cat(parts) if parts else None
        wrong = (
            torch.zeros(0, dtype=torch.bool)
            if logits is None
            else predict(logits, y.cpu()) != y.cpu()
        )
        graph = read(model, x.shape[1:], smooth=True, device=x.device)
    return (
        arithmetic_of(graph, arithmetic, x.dtype),
        x.to(graph.device),
        y.to(graph.device),
        wrong,
        logits,
    )


def _by_lipschitz(
    graph: Graph, x: Tensor, y: Tensor, norm: float, domain: Domain
) -> tuple[Tensor, bool]:
    """`min_j (theta_y - theta_j)(x) / Lip(theta_y - theta_j)` with the best constants over the
    whole domain that the time allows, `(N,)`, rounded down.

    Second: whether the clock stopped a constant early, or left a sample without margins, which then
    has 0.
    """
    exact = replace(graph, arithmetic="exact")
    rung = "auto" if is_small(graph) else "propagate" if graph.smooth else "product"
    cut = False
    classes = graph.outputs
    labels = set(y.tolist())
    pairs = sorted({(min(j, k), max(j, k)) for k in labels for j in range(classes) if j != k})
    steep = torch.full((classes, classes), math.inf, dtype=torch.float64)  # nothing asked at y
    here, late = _clean_margins(exact, x, y, norm, domain)
    for done, (k, j) in enumerate(pairs):
        row = torch.zeros(1, classes, dtype=torch.float64)
        row[0, k], row[0, j] = 1.0, -1.0
        work = PAIR if clock.seconds_left() == math.inf else math.inf
        with clock.limited(clock.seconds_left() / (len(pairs) - done), work):
            bound = lipschitz(
                exact.head(row), norm, domain, outputs="logits", norm_out=math.inf, method=rung
            )
        cut |= bool(bound.info["cut"])
        steep[k, j] = steep[j, k] = max(bound.upper, 1e-300)
    found, more = _over_slopes(graph, x, y, norm, domain, here, steep[y.cpu()])
    return found, cut or late or more


def by_products(graph: Graph, x: Tensor, y: Tensor, norm: float, domain: Domain) -> Tensor:
    """The same with the products of the layers' norms: cheap, and 0 where the clock stopped it."""
    exact = replace(graph, arithmetic="exact")
    here, _ = _clean_margins(exact, x, y, norm, domain)
    steep = {k: pair_products(exact, norm, k).clamp(min=1e-300) for k in sorted(set(y.tolist()))}
    rows = [steep[k] for k in y.tolist()]
    slopes = torch.stack(rows) if rows else torch.ones_like(here)
    return _over_slopes(graph, x, y, norm, domain, here, slopes)[0]


def _clean_margins(
    exact: Graph, x: Tensor, y: Tensor, norm: float, domain: Domain
) -> tuple[Tensor, bool]:
    """The margins at the samples from below, `(N, K)` on the CPU, and whether the clock left some
    out, which have 0.
    """
    late = False
    parts = [torch.zeros(0, exact.outputs, dtype=torch.float64)]
    for a, b in zip(torch.split(x, BATCH), torch.split(y, BATCH)) if len(x) else ():
        try:
            parts.append(margin_bounds(exact, a, b, 0.0, norm, domain).cpu())
        except clock.Late:
            parts.append(torch.zeros(len(a), exact.outputs, dtype=torch.float64))
            late = True
    return torch.cat(parts), late


def _over_slopes(
    graph: Graph, x: Tensor, y: Tensor, norm: float, domain: Domain, here: Tensor, steep: Tensor
) -> tuple[Tensor, bool]:
    """`min_j here_j / steep_j`, `(N,)`, and whether the clock stopped it, which leaves 0.

    Ties count as errors: at the radius itself the margin may be 0, so it is taken a hair inside.
    The constants are those of the exact function; in executed arithmetic the margins also lose what
    rounding may take within that radius.
    """
    own = y.cpu()[:, None]

    def radius(slack: Tensor | float) -> Tensor:
        left = (here - slack).clamp(min=0) / steep
        return left.scatter(1, own, math.inf).amin(1) * (1 - 1e-9)

    found = radius(0.0)
    try:
        slack = slack_of(graph, x, y.to(x.device), found, norm, domain)
    except clock.Late:
        return torch.zeros_like(found), True
    return found if slack is None else torch.minimum(found, radius(slack.cpu())), False
