"""The search for the largest radius that linear bounds prove.

Long because the ways to search for a radius share one state of brackets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.ball_radii import enlarged
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep, margin_bounds, margins
from wassail.certificates.bounds.executed import margin_errors, refusal
from wassail.certificates.bounds.rows import Span
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph
from wassail.certificates.lipschitz.steepest import jacobians
from wassail.certificates.search.leaves import Forest
from wassail.certificates.search.margins import STEPS as ASCENT
from wassail.certificates.search.margins import (
    WIDTH,
    branch_leaves,
    branch_margins,
    branch_samples,
    mixes,
)
from wassail.certificates.search.nearest_flip import nearest_flip
from wassail.certificates.search.workers import Pool
from wassail.errors import InputError, instance
from wassail.geometry import column
from wassail.losses import flip_tolerance, predict
from wassail.network import Model
from wassail.notebook import card, pairs, picture
from wassail.records import Record, check_equal
from wassail.rounding import UNIT
from wassail.threat import Domain, box_text, dual
from wassail.ties import BAND
from wassail.transport.flips import Flips
from wassail.transport.picture import draw_distances

BATCH = 16  # samples in one sweep; a sweep holds every node's values and spans for each
MANY = 64  # the same on a small network, where overhead is most of the time


ROUNDS = 30


PUSHES = (
    0.0,
    1e-8,
    1e-7,
    1e-6,
    1e-5,
    1e-4,
    3e-4,
    1e-3,
)  # relative, to move a boundary point to the other side


POWER = 3.5  # how the margin falls below its tangent, before two radii are known


HASTE = 6  # rounds after which the bracket is halved


# the ball of an exact search in executed arithmetic: beyond what is proved, and how often it may
# grow
WIDER = 4.0


GROWTH = 8


SMALL = 300  # ReLUs up to which distances are sought exactly


# Without a time limit: domains bounded for a sample by branching, radii tried, and operations for
# the constants of a pair.
PATIENCE = 2 * clock.SECOND


FEWEST = 192


MOST = 6144


TRIES = 24


KEPT = 2**25  # numbers of spans kept from one radius to the next, 256 MB


@dataclass(frozen=True, eq=False, repr=False)
class Radii(Record):
    """Certified radii of N samples: no point of the domain within `values[i]` of sample i is
    classified other than y_i.

    An executed radius is exact where a flip is known at most 0.1 % farther away: no proof gets past
    the bound on the rounding error.

    Args:
        values: float64 `(N,)`, rounded down; 0 where the sample is misclassified, inf where nothing
            in the domain flips.
        exact: bool `(N,)`, whether it is the distance itself (to 1e-9).
        method: name of the method.
        norm: ground norm r.
        domain: box `(low, high)`, or None for R^n.
        points: where the nearest flips were found on the way, the sample itself where none was,
            `(N, *shape)`, or None.
        info: time, versions, settings.
        arithmetic: whether the radii hold for the network as it is "executed", in its own
            floating-point type, or for the "exact" function.
        errors: how far rounding may move the smallest margin at each sample, `(N,)`, by a bound;
            where the network is not covered what was seen there (`info["errors"]` says which); or
            None.
        proved_by: of each sample the method that proved its radius, "" where it is 0; None in
            records of earlier versions.
    """

    values: Tensor
    exact: Tensor
    method: str
    norm: float
    domain: Domain
    points: Tensor | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    arithmetic: str = "exact"
    errors: Tensor | None = None
    proved_by: tuple[str, ...] | None = None

    def flips(self, model: Model, x: Tensor, y: Tensor) -> Flips | None:
        """The points as flips of the model itself, which close the sandwich where radii are exact;
        None without points.

        They lie on the boundary: each is moved outward until the model, in its own arithmetic, is
        clearly wrong there.

        Args:
            model: callable from a batch `(n, *shape)` to logits `(n, K)`.
            x: the samples of the radii, `(N, *shape)`.
            y: true labels, integer tensor `(N,)`.
        """
        if self.points is None:
            return None
        flat = self.points.to(x.device)
        start = x.detach().double()
        pool = []
        for push in PUSHES:
            moved = start + (1 + push) * (flat - start)
            moved = moved if self.domain is None else moved.clamp(*self.domain)
            tolerance = flip_tolerance(x.dtype)
            pool.append(
                Flips.from_points(
                    model,
                    x,
                    y,
                    moved.to(x.dtype),
                    self.norm,
                    self.domain,
                    method=self.method,
                    tolerance=tolerance,
                )
            )
        return pool[0].merge(*pool[1:])

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        sure = self.values > 0
        middle = float(self.values[sure].median()) if sure.any() else 0.0
        box = box_text(self.domain)
        return (
            f"Radii({len(self)} samples by {self.method}, l{self.norm:g}, {box}: "
            f"{int(sure.sum())} above 0, median of those "
            f"{middle:.4g}, {int(self.exact.sum())} exact; {self.arithmetic} arithmetic)"
        )

    def _repr_html_(self) -> str:
        sure = self.values > 0
        middle = float(self.values[sure].median()) if sure.any() else 0.0
        rows = [
            ("threat", f"l{self.norm:g}, {box_text(self.domain)}"),
            ("method", f"{self.method}, {self.arithmetic} arithmetic"),
            ("above 0", f"{int(sure.sum())}, median {middle:.4g}"),
            ("exact", int(self.exact.sum())),
        ]
        drawn = picture(
            lambda: draw_distances(None, self.values, self.norm),
            "histogram of the certified radii",
        )
        return card(f"Certified radii of {len(self)} samples", pairs(rows), drawn)


def batch_of(graph: Graph) -> int:
    """Samples that are bounded at once, unless told."""
    return MANY if mixes(graph) else BATCH


def sample_groups(rows: list[int], graph: Graph) -> list[list[int]]:
    """Samples whose domains are bounded in one batch: all of them on a device and of a small
    network, else one after the other on the CPU.
    """
    if graph.device == HOST and not mixes(graph):
        return [[k] for k in rows]
    return [rows] if rows else []


def branched(
    sweep: Sweep,
    lower: Tensor,
    rows: list[int],
    y: Tensor,
    most: list[int],
    seconds: float,
    pool: Pool | None = None,
    forest: Forest | None = None,
    names: list[int] | None = None,
) -> list[tuple[bool, int]]:
    """Whether branching proves samples `rows` of a sweep, whose margins are bounded by `lower` `(N,
    K)`; by how many domains.

    lower and the labels y `(N,)` are on the CPU. most: domains for each; seconds: for all, inf for
    no limit. pool: for a single sample. forest: what earlier proofs of the samples left, under
    these names; what this one leaves is kept there.
    """
    label = [int(y[k]) for k in rows]
    rivals = [
        [j for j in range(lower.shape[1]) if j != c and not lower[k, j] > 0]
        for k, c in zip(rows, label)
    ]
    with clock.limited(seconds):
        if pool is not None:
            return [
                branch_margins(sweep, rows[0], label[0], torch.tensor(rivals[0]), most[0], pool)
            ]
        if forest is None or names is None:
            return branch_samples(sweep, rows, label, rivals, most)
        every = sweep.balls.radius.tolist()
        radius = [every[k] for k in rows]
        known = [forest.within(i, r) for i, r in zip(names, radius)]
        decided = branch_leaves(sweep, rows, label, rivals, most, known)
    for i, r, (_, _, leaves) in zip(names, radius, decided):
        forest.keep(i, r, leaves)
    return [found[:2] for found in decided]


def domains(graph: Graph) -> int:
    """How many domains branching may bound for a sample when there is no time limit: fewer for
    large networks.

    A step of the ascent in a domain is a pass backward and one forward through the bound, node by
    node.
    """
    each = 3 * ASCENT * (graph.operations + 10**4 * len(graph.nodes))
    return int(min(max(PATIENCE / each, FEWEST), MOST))


def slack_of(
    graph: Graph, x: Tensor, y: Tensor, radius: Tensor, norm: float, domain: Domain
) -> Tensor | None:
    """How far executed margins may be from exact ones on balls around the samples, `(N, K)`;
    None in exact arithmetic.
    """
    if graph.arithmetic == "exact":
        return None
    parts = (
        zip(torch.split(x, BATCH), torch.split(y, BATCH), torch.split(radius, BATCH))
        if len(x)
        else ()
    )
    found = [
        margin_errors(Sweep(graph, Balls.make(a, r, norm, domain)).run(), b) for a, b, r in parts
    ]
    return torch.cat(found) if found else torch.zeros(0, graph.outputs, dtype=torch.float64)


class RadiusSearch:
    """The search for the largest radius of every sample: brackets `lower` (proved) and `upper`
    (no use to look beyond).
    """

    stopped = False  # whether a limit has stopped the exact search

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        y: Tensor,
        norm: float,
        domain: Domain,
        upper: Tensor | None,
        aim: tuple[float, float, Tensor] | None,
        tolerance: float,
        batch_size: int,
        report: Callable[[float], None],
    ) -> None:
        n = len(x)
        self.graph = graph
        self.x = x
        self.y = y
        self.norm = norm
        self.domain = domain
        self.aim = aim
        self.tolerance = tolerance
        self.batch_size = batch_size
        self.report = report
        self.sweeps = self.rows = 0  # sweeps, and the coefficient vectors they substituted backward
        self.domains = 0  # bounded by branching
        self.cut = False  # whether the clock has stopped something
        self.proved_by = [""] * n
        parts = [
            graph.logits(part) for part in torch.split(x, 64) if n
        ]  # not all nodes of all samples at once
        self.here = (
            torch.cat(parts).cpu() if n else torch.zeros(0, graph.outputs, dtype=torch.float64)
        )
        self.labels = y.cpu()
        if upper is not None:
            instance(upper, Tensor, "upper is", "the distances of known flips (Flips.distances)")
        self.flip = (
            torch.full((n,), math.inf, dtype=torch.float64)
            if upper is None
            else upper.detach().cpu().double()
        )
        if self.flip.shape != (n,) or not (self.flip >= 0).all():
            raise InputError(f"upper must hold {n} distances >= 0, one for each sample.")
        self.points: Tensor | None = None
        self.errors: Tensor | None = None
        self.lower = torch.zeros(n, dtype=torch.float64)
        self.exact = torch.zeros(n, dtype=torch.bool)
        self.upper = self.flip.clone()
        # The least margin at the two ends of the bracket: at 0 it is the sample's own.
        self.clean = least_value(self.here.gather(1, self.labels[:, None]) - self.here, self.labels)
        self.height = self.clean.clone()
        self.depth = torch.full_like(self.height, math.nan)
        self.proved_last = torch.zeros(n, dtype=torch.bool)
        self.first = self._first_guess()
        self.known: dict[int, Span] = {}  # of the samples from `start` to `stop`
        self.start = 0
        self.stop = n
        self.open = self.height > 0
        self.caution = 12.0 if graph.curved else 3.0  # a transformer's bounds reach less far
        self._noted = self.lower.clone()

    def settle(self, wrong: Tensor) -> None:
        """Misclassified samples and ties have radius 0."""
        self.open &= ~wrong
        self.exact |= ~self.open

    def note(self, method: str) -> None:
        """What has grown since the last time was proved by this method."""
        for i in (self.lower > self._noted).nonzero()[:, 0].tolist():
            self.proved_by[i] = method
        self._noted = self.lower.clone()

    def raise_to(self, found: Tensor) -> None:
        """Radii that were proved elsewhere, `(N,)`."""
        best = torch.maximum(self.lower, found.cpu())
        self.lower = torch.where(self.open, best, self.lower)

    def sift(self, logits: Tensor | None) -> str | None:
        """What rounding may do to the smallest margin at the samples; where it may be all of it,
        executed radii are 0.

        logits: of the model itself, to see it where no bound is known. Returns which of the two it
        is, None for neither.
        """
        if refusal(self.graph):
            if logits is None:
                return None
            seen = least_value(
                logits.double().gather(1, self.labels[:, None]) - logits.double(), self.labels
            )
            self.errors = torch.where(self.open, (self.clean - seen).abs(), 0.0)
            return "seen"
        graph = replace(self.graph, arithmetic="executed")
        self.errors = torch.zeros_like(self.clean)
        left = self.open.nonzero()[:, 0]
        for part in torch.split(left, self.batch_size) if len(left) else ():
            x, y = (v[part.to(v.device)] for v in (self.x, self.y))
            least = least_value(
                margin_bounds(graph, x, y, 0.0, self.norm, self.domain).cpu(), self.labels[part]
            )
            self.errors[part] = (self.clean[part] - least).clamp(min=0)
            if self.graph.arithmetic == "executed":
                self.open[part] = least > 0
        return "bound"

    def resume(self, start: Radii) -> None:
        """Go on from radii that are proved."""
        check_equal("arithmetic", start.arithmetic, self.graph.arithmetic)
        check_equal("norm", start.norm, self.norm)
        check_equal("domain", start.domain, self.domain)
        if len(start) != len(self.x):
            raise InputError(
                f"start holds {len(start)} radii but there are {len(self.x)} samples: give those "
                "of the same samples."
            )
        self.lower = torch.where(self.open, start.values, 0.0)
        self.exact |= start.exact
        self.open &= ~start.exact & torch.isfinite(start.values)
        self.points = start.points
        if start.proved_by is not None:
            self.proved_by = list(start.proved_by)
        self._noted = self.lower.clone()

    def _first_guess(self) -> Tensor:
        """The distance at which the margins, continued as straight lines, meet 0; an
        over-estimate for most networks.
        """
        if not len(self.x):
            return torch.zeros(0, dtype=torch.float64)
        # Not all samples at once: what is made of them takes several times their own memory.
        pairs = zip(torch.split(self.x, 64), torch.split(self.y, 64))
        return torch.cat([self._guessed(part, y) for part, y in pairs]).cpu()

    def _guessed(self, part: Tensor, y: Tensor) -> Tensor:
        """`_first_guess` of some samples, `(m,)`."""
        if clock.late():  # nothing will be tried
            return torch.zeros(len(y), dtype=torch.float64, device=part.device)
        flat = part.double().flatten(1)
        slopes = jacobians(self.graph, flat)
        rows = slopes.take_along_dim(y[:, None, None], 1) - slopes
        length = torch.linalg.vector_norm(rows, dual(self.norm), dim=2)
        z = self.graph.logits(part)
        ratio = (z.gather(1, y[:, None]) - z) / length.clamp(min=1e-300)
        found = ratio.scatter(1, y[:, None], math.inf).amin(1)
        # Where the margin is flat that may be anywhere: not beyond the domain, on R^n not beyond
        # the sample's own size.
        if self.domain is None:
            size = torch.linalg.vector_norm(flat, self.norm, dim=1)
            return torch.minimum(found, 10 * size.clamp(min=1))
        reach = torch.maximum(flat - self.domain[0], self.domain[1] - flat)
        return torch.minimum(found, torch.linalg.vector_norm(reach, self.norm, dim=1))

    def run(self, steps: int) -> None:
        """Rounds of one sweep for every open sample, each at a radius of its own, until the
        brackets are closed.
        """
        again = bool((self.lower > 0).any())
        if again:  # a better method: what was too far for the other may not be for this one
            self.upper = self.flip.clone()
            self.depth = torch.full_like(self.height, math.nan)
            self.known = {}
        n = len(self.x)
        for start in range(0, n, self._together()):
            stop = min(start + self._together(), n)
            self.start = start
            self.stop = stop
            with clock.limited(clock.seconds_left() * (stop - start) / (n - start)):
                self._rounds(steps, again)
            self.known = {}

    def _together(self) -> int:
        """Samples whose spans are kept at a time: as many as memory is given for them."""
        sizes = [self.graph.nodes[j].size for j in self.graph.read_by_others]
        return max(KEPT // max(2 * sum(sizes), 1), self.batch_size)

    def _rounds(self, steps: int, again: bool) -> None:
        """The rounds for the samples from `start` to `stop`."""
        mine = torch.arange(len(self.x))
        mine = (mine >= self.start) & (mine < self.stop)
        later = len(self.x) - self.stop
        for round_ in range(ROUNDS):
            wide = self.lower * (1 + self.tolerance) < self.upper * (
                1 - BAND
            )  # not by rounding alone
            active = (mine & self.open & wide & ~self._idle()).nonzero()[:, 0]
            self.report(1 - (len(active) + later) / max(len(self.x), 1))
            if not len(active):
                return
            radius = self._next(round_)
            if again and round_ == 0:
                radius = torch.where(self.lower > 0, 1.15 * self.lower, radius)
            try:
                for part in self._parts(active, first=round_ == 0):
                    self._try(part, radius[part], steps)
            except clock.Late:  # the brackets are what is proved
                self.cut = True
                return

    def _parts(self, active: Tensor, first: bool) -> Iterator[Tensor]:
        """The samples in batches; with a time limit the first are small, so that some are done
        whatever a batch takes.
        """
        size = 1 if first and clock.seconds_left() < math.inf else self.batch_size
        while len(active):
            yield active[:size]
            active = active[size:]
            size = min(2 * size, self.batch_size)

    def _idle(self) -> Tensor:
        """Samples whose radius cannot change the certified accuracy at the aim, whatever the
        brackets become.

        The samples that are bought are those with the smallest radii, so one matters only below the
        price of the last that is bought, and that is at most the least t with `sum { mu_i lower_i^p
        : upper_i <= t } >= eps^p`.
        """
        if self.aim is None:
            return torch.zeros_like(self.open)
        eps, order, mu = self.aim
        if order == math.inf:
            return (self.lower >= eps) | (self.upper < eps)
        high, where = torch.where(self.open, self.upper, self.lower).sort()
        paid = (mu[where] * self.lower[where] ** order).cumsum(0) >= eps**order
        last = float(high[paid][0]) if paid.any() else math.inf
        return self.lower >= last

    def _next(self, round_: int) -> Tensor:
        """The next radius to try, inside the bracket: where the least margin is expected to meet 0.

        It falls along its tangent at the sample, and below it by about `b r^q`; b and q are fitted
        to the ends of the bracket.
        """
        low = self.lower
        high = self.upper
        tolerance = self.tolerance
        failed = ~torch.isnan(self.depth)
        tiny = 1e-300

        def tangent(r: Tensor) -> Tensor:
            return self.clean * (1 - r / self.first.clamp(min=tiny))

        far = torch.where(failed, high, low)
        value = torch.where(failed, self.depth, self.height)
        drop = (tangent(far) - value).clamp(min=tiny)
        near = (tangent(low) - self.height).clamp(min=tiny)
        both = failed & (low > 0)
        power = torch.where(
            both, (drop / near).log() / (high / low.clamp(min=tiny)).log().clamp(min=1e-9), POWER
        )
        power = power.nan_to_num(POWER).clamp(1, 50)
        left = low.clone()
        right = torch.where(torch.isfinite(high), high, torch.maximum(4 * low, self.first))
        for _ in range(40):
            middle = (left + right) / 2
            above = tangent(middle) > drop * (middle / far.clamp(min=tiny)) ** power
            left = torch.where(above, middle, left)
            right = torch.where(above, right, middle)
        # A hair to the other side than last time, so that the bracket closes from both.
        nudge = torch.where(self.proved_last, 1 + tolerance / 3, 1 - tolerance / 3)
        guess = torch.where(far > 0, left * nudge, self.first / self.caution)
        # Beyond the tangent's zero, which walls may move outward, it says nothing.
        stuck = (left <= low) & (low > 0)
        guess = torch.where(stuck, torch.where(failed, (low * high).sqrt(), 2 * low), guess)
        if round_ >= HASTE:
            guess = torch.where(both, (low * high).sqrt(), guess)
        guess = torch.maximum(guess, low * (1 + tolerance))
        top = torch.where(failed, torch.maximum(high / (1 + tolerance), (low + high) / 2), high)
        return torch.minimum(guess, torch.minimum(top, torch.where(low > 0, 4 * low, math.inf)))

    def _try(self, part: Tensor, radius: Tensor, steps: int) -> None:
        """One sweep: proved or not, and if not, what its own linear bounds prove on a smaller
        ball.
        """
        here = part.to(self.x.device, non_blocking=True)
        x = self.x[here]
        y = self.y[here]
        kept = here - self.start
        known = {j: (low[kept], high[kept]) for j, (low, high) in self.known.items()}
        sweep = Sweep(self.graph, Balls.make(x, radius, self.norm, self.domain), steps, known).run()
        lower, base, a = margins(sweep, y)
        self.sweeps = self.sweeps + 1
        self.rows = self.rows + sweep.rows
        # theta_y - theta_j >= base + <a, d> on the ball tried, so on every smaller one too.
        tried = sweep.balls.radius
        # The radius is taken 1e-9 smaller, which alone is more than n units of any input.
        length = rounding.length(a, dual(self.norm), 2) * (1 + a.shape[2] * UNIT)
        free = (base / length.clamp(min=1e-300)).scatter(1, y[:, None], math.inf).amin(1) * (
            1 - 1e-9
        )
        free = torch.minimum(free, tried * 0.999)
        rest = (base - length * free[:, None]).scatter(1, y[:, None], math.inf).amin(1).clamp(min=0)
        corner = torch.linalg.vector_norm(
            torch.maximum(sweep.balls.below, sweep.balls.above), self.norm, dim=1
        )
        sides = sweep.proved()
        least, free, rest, corner = torch.stack([least_value(lower, y), free, rest, corner]).cpu()
        good = least > 0
        if self.domain is not None:  # the ball holds the whole domain
            whole = corner <= radius * (1 - 2 * (a.shape[2] + 8) * UNIT)
            self.lower[part[good & whole]] = math.inf
            good, done = good & ~whole, good & whole
            self.open[part[done]] = False
        bad = ~(least > 0)
        rows = part[good]
        self.proved_last[part] = good
        self.lower[rows], self.height[rows] = radius[good], least[good]
        self.upper[part[bad]], self.depth[part[bad]] = radius[bad], least[bad]
        better = bad & (free > self.lower[part])
        self.lower[part[better]], self.height[part[better]] = free[better], rest[better]
        wide = bad.nonzero()[:, 0].to(self.x.device, non_blocking=True)
        for j, span in sides.items():
            if j not in self.known:
                count = self.stop - self.start
                full = span[0].new_full((count, *span[0].shape[1:]), math.inf)
                self.known[j] = (-full, full)
            for old, side in zip(self.known[j], span):
                old[kept[wide]] = side[wide]

    def spheres(self) -> None:
        """Larger radii by balls and boxes together, where they are sought."""
        wider = self.flip > self.lower * (1 + self.tolerance)
        left = ((self.clean > 0) & ~self.exact & wider).nonzero()[:, 0]
        if not len(left):
            return
        there = left.to(self.x.device)
        found, late = enlarged(
            self.graph,
            self.x[there],
            self.y[there],
            self.norm,
            self.domain,
            self.lower[left],
            self.flip[left],
            self.tolerance,
        )
        self.lower[left] = found
        self.cut = self.cut or (late and clock.out_of_time())

    def branch(self, pool: Pool | None) -> None:
        """Larger radii by branching, sample by sample: steps that grow with success and shrink
        with failure.
        """
        self.upper = self.flip.clone()  # what was too far for linear bounds may not be for this
        worth = self.open & (self.lower > 0) & ~self._idle() & ~self.exact
        left = worth.nonzero()[:, 0].tolist()
        goal = self.aim[0] if self.aim and self.aim[1] == math.inf else None
        most = domains(self.graph) if clock.seconds_left() == math.inf else 10**6
        together = mixes(self.graph) and clock.seconds_left() == math.inf
        if (self.graph.device != HOST or together) and pool is None:
            with suppress(clock.Late):
                self._climb(left, goal, most)
            self.cut |= clock.out_of_time()
            return
        for done, i in enumerate(left):
            self.report(done / len(left))
            with clock.limited(clock.seconds_left() / (len(left) - done)):
                with suppress(clock.Late):
                    self._climb([i], goal, most, pool)
                self.cut |= clock.out_of_time()

    def _climb(
        self, left: list[int], goal: float | None, most: int, pool: Pool | None = None
    ) -> None:
        """Some samples in step: a sweep and a batch of domains for a round of radii.

        Every radius that is tried may take a third of the domains, or of the time, that are left.
        """
        climbs = {i: _Climb(float(self.lower[i]), float(self.flip[i]), most) for i in left}
        forest = Forest()
        while climbs:
            clock.check()
            radius = torch.zeros(len(self.x), dtype=torch.float64)
            for i, climb in list(climbs.items()):
                tried = climb.next(goal, self.tolerance)
                if tried is None:
                    del climbs[i]
                else:
                    radius[i] = tried
            for part in (
                torch.split(torch.tensor(list(climbs), dtype=torch.int64), self.batch_size)
                if climbs
                else ()
            ):
                here = part.to(self.x.device, non_blocking=True)
                sweep = Sweep(
                    self.graph, Balls.make(self.x[here], radius[part], self.norm, self.domain)
                ).run()
                self.sweeps += 1
                lower = margins(sweep, self.y[here], "open")[0].cpu()
                label = self.labels[part]
                proved = least_value(lower, label) > 0
                rows = (~proved).nonzero()[:, 0].tolist()
                spent = [0] * len(part)
                if rows:
                    share = clock.seconds_left() / 3 / max(len(climbs) / len(part), 1)
                    each = [max(climbs[int(part[k])].rest // 3, WIDTH) for k in rows]
                    names = part[rows].tolist()
                    for k, (good, count) in zip(
                        rows,
                        branched(sweep, lower, rows, label, each, share, pool, forest, names),
                    ):
                        proved[k], spent[k] = good, count
                self.domains += sum(spent)
                for k, i in enumerate(part.tolist()):
                    climbs[i].told(bool(proved[k]), spent[k])
                    self.lower[i] = climbs[i].low
                    if proved[k] and self._whole(i, climbs[i].low):
                        self.lower[i], self.open[i] = math.inf, False
                        del climbs[i]

    def _whole(self, i: int, radius: float) -> bool:
        """Whether the ball of sample i holds the whole domain."""
        if self.domain is None:
            return False
        x = self.x[i].double().cpu()
        far = torch.maximum(x - self.domain[0], self.domain[1] - x)
        return float(torch.linalg.vector_norm(far.flatten(), self.norm)) * (1 + 1e-9) <= radius

    def exactly(self, pool: Pool | None, work: float) -> None:
        """The exact search, with so many operations at most and half of the time. What it does not
        close gets what larger networks get.
        """
        with clock.limited(clock.seconds_left() / 2, work):
            self.close(pool)
        self.note("exact")
        if not self.stopped:
            return
        if self.norm in (1, 2) and not self.graph.smooth and not self.graph.curved:
            self.spheres()
            self.note("ball")
        self.branch(pool)
        self.note("branch")

    def close(self, pool: Pool | None) -> None:
        """By branch and bound, from what is proved and the flips that are known."""
        self.upper = self.flip.clone()  # what was too far for linear bounds may not be for this
        left = (self.open & ~self._idle()).nonzero()[:, 0]
        self.points = self.x.double().cpu().clone()  # never the caller's own tensor
        if self.graph.arithmetic == "executed":
            with suppress(clock.Late):
                self._close_executed(left, pool)
            self.cut |= clock.out_of_time()
            return
        some = left.to(self.x.device)
        found = nearest_flip(
            self.graph,
            self.x[some],
            self.y[some],
            self.norm,
            self.domain,
            upper=self.flip[left],
            lower=self.lower[left],
            workers=pool,
        )
        self.lower[left] = torch.maximum(self.lower[left], found.lower)
        self.exact[left] = found.exact
        self._stop(found.cut)
        self.points[left] = found.points

    def _stop(self, stopped: bool) -> None:
        """Whether a search was stopped by a limit."""
        self.stopped |= stopped
        self.cut |= stopped and clock.out_of_time()

    def _close_executed(self, left: Tensor, pool: Pool | None) -> None:
        """The distance at which exact margins meet the bound on the rounding error, which holds for
        one ball only.

        The ball is a few times what is proved, so that it holds the distance, and larger where it
        does not.
        """
        assert self.points is not None
        whole = torch.full((len(self.x),), math.inf, dtype=torch.float64)
        if self.domain is not None:
            flat = self.x.cpu().double().flatten(1)
            most = torch.maximum(flat - self.domain[0], self.domain[1] - flat)
            whole = 1.01 * torch.linalg.vector_norm(most, self.norm, dim=1)
        ball = torch.minimum(WIDER * torch.maximum(self.lower, 1e-3 * self.first), whole)
        ball = torch.minimum(ball, self.flip * (1 + 1e-6)).clamp(min=1e-300)
        for _ in range(GROWTH):
            if not len(left):
                return
            x, y = (v[left.to(v.device)] for v in (self.x, self.y))
            radius = ball[left]
            slack = slack_of(self.graph, x, y, radius, self.norm, self.domain)
            found = nearest_flip(
                self.graph,
                x,
                y,
                self.norm,
                self.domain,
                upper=self.flip[left],
                slack=slack,
                workers=pool,
            )
            self._stop(found.cut)
            all_ = (radius >= whole[left]) & (found.lower == math.inf)
            self.lower[left] = torch.maximum(
                self.lower[left], torch.where(all_, math.inf, torch.minimum(found.lower, radius))
            )
            inside = found.upper < radius
            points, near = self._flipped(left, found.points)
            self.exact[left] = all_ | (inside & found.exact & near)
            self.points[left] = torch.where(column(inside & near, points), points, x.cpu().double())
            out = (found.lower >= radius) & ~all_ & (radius < torch.minimum(whole, self.flip)[left])
            left = left[out]
            ball[left] = torch.minimum(WIDER * ball[left], whole[left])

    def _flipped(self, rows: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Points moved outward until the exact network flips, and whether that took at most the
        last of `PUSHES`.
        """
        x = self.x.cpu()[rows].double()
        y = self.labels[rows]
        best = points
        known = torch.zeros(len(rows), dtype=torch.bool)
        for push in PUSHES:
            moved = x + (1 + push) * (points - x)
            moved = moved if self.domain is None else moved.clamp(*self.domain)
            wrong = predict(self.graph.logits(moved).cpu(), y) != y
            best = torch.where(column(wrong & ~known, moved), moved, best)
            known = known | wrong
        return best, known


@dataclass
class _Climb:
    """The radii that branching is tried at for one sample: steps that grow with success and shrink
    with failure.

    rest: domains that may still be bounded.
    """

    low: float
    high: float
    rest: int
    step: float = 0.2
    radius: float = 0.0
    tries: int = 0

    def next(self, goal: float | None, tolerance: float) -> float | None:
        """Where to look; None at the end. goal: nothing but this radius matters."""
        self.radius = self.low * (1 + self.step)
        if goal is not None and self.low < goal < self.high:
            self.radius = goal
            self.step = goal / self.low - 1
        if self.radius >= self.high:
            self.radius = (self.low + self.high) / 2
            self.step = (self.high / self.low - 1) / 2
        self.tries += 1
        over = self.step <= tolerance or (goal is not None and not self.low < goal < self.high)
        return None if over or self.rest <= 0 or self.tries > TRIES else self.radius

    def told(self, proved: bool, count: int) -> None:
        """Whether that radius is proved, and by how many domains."""
        self.rest -= count
        if proved:
            self.low = self.radius
            self.step = 1.5 * self.step
        else:
            self.high = self.radius
            self.step = self.step / 2


def least_value(margin: Tensor, y: Tensor) -> Tensor:
    """The least margin over the rivals, `(N, K), (N,) -> (N,)`."""
    return margin.scatter(1, y[:, None], math.inf).amin(1)


def is_small(graph: Graph) -> bool:
    """Whether the exact search is worth its time."""
    return not graph.smooth and graph.neurons <= SMALL
