"""Both sides of a risk curve at one threat, closed together as far as the work allows.

Certified accuracy grows with radii and attacked accuracy falls with distances, but not with all of
them alike: the budget of the threat buys the smallest first (THEORY 2a). So the next piece of work
is the one that promises most for its price: a proof of one sample at a radius a step larger, or an
attack on one sample. What a step is worth is read off the knapsack's dual: with u the radius at
which the budget runs out, a radius r counts `mu (1 - (r / u)^p)` of lost accuracy, 0 from u on.

A proof that fails leaves the point where its bound is lowest, and an attack starts there. Nothing
depends on the clock unless a time limit is given: prices are operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.prove.ladder import Ladder, parse_effort
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.radii import TOLERANCE, radii
from wassail.certificates.prove.radius_search import Growth
from wassail.certificates.prove.record import EXACT, Radii, flips_behind
from wassail.certificates.prove.verify import attacked
from wassail.errors import InputError, instance
from wassail.network import Model, versions
from wassail.progress import Progress, progress_bar
from wassail.records import Record, check_equal
from wassail.specification import Labels
from wassail.threat import Number, Threat, ceil_percent, floor_percent, number, parse_threat, whole
from wassail.transport.allocation import sample_weights
from wassail.transport.curve import RiskCurve, risk_curve
from wassail.transport.flips import Flips

FIRST = 300  # passes of the first attack on a sample
ATTACKED = 16  # samples at once, with a time limit
PASSES = 200  # of every other one, twice as many each time
ATTACKS = 4  # on one sample, beyond the first
COARSE = 0.08  # relative precision of the first radii: attempts go on from there
# What the first attempt and the first attack are taken to keep of what they promise: later ones by
# what the earlier ones of their kind have kept.
PROOFS_KEEP = 0.5
ATTACKS_KEEP = 0.05
ATTACKED_TOGETHER = 64  # in one attack
AHEAD = 1.15  # of the price: how far beyond it a radius counts
LATER = 0.05  # of what it would count below
FAILING = 0.7  # of what an attempt promises, for each that failed before it
CLOSE = 0.7  # of the best ratio of value and price: attempts that go along with it
SAME = 1e-12  # accuracies that differ by less are one: only rounding tells them apart
PUSHES = (0.0, 0.1, 0.25, 0.5)  # relative, beyond a candidate, to meet a flip


@contextmanager
def bracket_bar(progress: Any) -> Iterator[Callable[[float, float], None]]:
    """What is told the bracket whenever it moves: the caller's own function, or a bar that shows
    how much of the first gap is closed.
    """
    if callable(progress):
        yield progress
        return
    with progress_bar(progress, "closing the bracket") as tick:
        first = 0.0

        def told(certified: float, attacked: float) -> None:
            nonlocal first
            gap = attacked - certified
            first = max(first, gap)
            tick(1 - gap / first if first > 0 else 1.0)

        yield told


class ExpectedGain:
    """What pieces of work of one kind promised, and what they kept of it.

    It begins with a piece as large as the first one, that kept what is usual.
    """

    def __init__(self, usual: float) -> None:
        self.usual = usual
        self.promised = 0.0
        self.kept = 0.0

    def add(self, promised: Tensor, kept: Tensor) -> None:
        """One more piece."""
        if not self.promised:
            self.promised = float(promised.sum())
            self.kept = self.usual * self.promised
        self.promised += float(promised.sum())
        self.kept += float(kept.sum())

    @property
    def share(self) -> float:
        """Of what is promised, so much is kept."""
        return self.kept / self.promised if self.promised > 0 else self.usual


def kept_share(records: Mapping[int, ExpectedGain], kind: int, usual: float) -> float:
    """The share that work of a kind keeps; before the first piece, that of the kind before it."""
    known = [records[k].share for k in range(kind + 1) if k in records]
    return known[-1] if known else usual


@dataclass(frozen=True, eq=False, repr=False)
class Sandwich(Record):
    """Both sides at one threat: `sandwich` makes it.

    Args:
        flips: `Flips`, the attacked side.
        radii: `Radii`, the certified side.
        threat: `Threat` they were closed for.
        mu: sample weights, float64 `(N,)`.
        history: rows (operations, certified, attacked), from the first bracket to the last.
        info: time, operations, attempts, settings.
    """

    flips: Flips
    radii: Radii
    threat: Threat
    mu: Tensor
    history: tuple[tuple[float, float, float], ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def curve(self) -> RiskCurve:
        """Accuracy against eps, for the order of the threat."""
        return risk_curve(self.flips, self.radii, self.threat.order, self.mu)

    @property
    def certified(self) -> float:
        """Accuracy over all distributions of the threat: at least this."""
        return self.curve(self.threat.eps)[0]

    @property
    def attacked(self) -> float:
        """At most this."""
        return self.curve(self.threat.eps)[1]

    @property
    def gap(self) -> float:
        """`attacked - certified`, a fraction."""
        return self.curve.gap(self.threat.eps)

    @property
    def exact(self) -> bool:
        """Whether every radius is the distance itself, as `Radii` says: the curve is one line."""
        return bool(self.radii.exact.all())

    def __repr__(self) -> str:
        return (
            f"Sandwich({self.threat}, {len(self.flips)} samples: accuracy at least "
            f"{floor_percent(self.certified)} %, at most {ceil_percent(self.attacked)} %)"
        )


def sandwich(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    gap: Number | None = None,
    time_limit: float | None = None,
    effort: Number | None = None,
    mu: Tensor | None = None,
    arithmetic: str = "auto",
    flips: Flips | None = None,
    start: Radii | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    provers: int = 1,
    progress: Progress | Callable[[float, float], None] = False,
) -> Sandwich:
    """Attack and certify together until the bracket on the accuracy is as tight as asked.

    Time goes where it is worth most: see the page "closing" of the documentation. Stops when the
    gap is reached, when the time or the work is spent, or when nothing promises anything any more.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        gap: stop when attacked and certified accuracy differ by at most this, a fraction in [0, 1);
            default None, 0.
        time_limit: seconds for everything; what was reached by then is kept; default None, a budget
            of work, so that nothing depends on the clock.
        effort: seconds of one core for each sample, roughly, counted in operations and shared by
            all samples; default None, 2, and no limit with a time limit.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        arithmetic: as in `radii`; default "auto".
        flips: `Flips` of the same samples that are known already: the first attack is only on
            samples without one; default None.
        start: `Radii` of the same samples that are proved already: the search goes on from there,
            without the first linear bounds; default None.
        seed: int, keys the random draws of attacks; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        provers: int, threads that prove samples side by side, where quadratic bounds are used; give
            torch one thread then (`torch.set_num_threads(1)`); default 1.
        progress: bool, or a callable that is given the certified and the attacked accuracy whenever
            one of them moves; default False.

    Returns:
        `Sandwich`: curve, flips, radii, and how the bracket shrank.
    """
    began = time.monotonic()
    threat = parse_threat(threat, own=True)
    wanted = 0.0 if gap is None else number(gap, "gap")
    if not 0 <= wanted < 1:
        raise InputError(f"gap is {gap!r}: give a fraction from 0 to below 1, as 0.02.")
    limit = None if time_limit is None else number(time_limit, "time_limit")
    if limit is not None and limit <= 0:
        raise InputError(f"time_limit is {time_limit!r}: give seconds above 0.")
    each = parse_effort(effort, limit)
    if flips is not None:
        instance(flips, Flips, "flips is", "as ws.nearest returns them")
    if start is not None:
        instance(start, Radii, "start is", "as ws.radii returns them")
    weights = sample_weights(mu, len(x))
    with bracket_bar(progress) as report, clock.limited(limit):
        task = _Closing(model, x, y, threat, weights, arithmetic, seed, batch_size, report)
        task.begin(flips, start, whole(provers, "provers"))
        task.close(wanted, each * len(x))
    return task.result(time.monotonic() - began, wanted, each)


class _Closing:
    """The samples of one problem with what is known of each, on the CPU.

    growth: of the radii; tries: attacks so far; cost: operations that the last attempt of each
    level took.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        y: Labels,
        threat: Threat,
        mu: Tensor,
        arithmetic: str,
        seed: int,
        batch_size: int | None,
        report: Callable[[float, float], None],
    ) -> None:
        self.model = model
        self.x = x
        self.task = y
        self.threat = threat
        self.mu = mu
        self.arithmetic = arithmetic
        self.seed = seed
        self.batch_size = batch_size
        self.report = report
        n = len(x)
        self.tries = torch.zeros(n, dtype=torch.int64)
        self.work = 0.0
        self.attempts = 0
        self.domains = 0
        self.cut = False
        self.history: list[tuple[float, float, float]] = []
        self.cost: dict[int, float] = {}
        self.proofs: dict[int, ExpectedGain] = {}
        self.attacks: dict[int, ExpectedGain] = {}

    def begin(self, flips: Flips | None, start: Radii | None, provers: int) -> None:
        """The first bracket: a short attack and the cheap radii, unless they are known."""
        aim = self.threat
        where = (self.model, self.x, self.task, aim.norm, aim.domain, self.arithmetic)
        self.problem = Problem.of(*where)
        self.task = self.problem.task
        self.ladder = Ladder(self.problem, "auto", provers)
        self.flips = self._first_flips(flips)
        self.radii = self._first_radii(start)
        met = self.radii.flips(self.model, self.x, self.task)
        if met is not None:
            self.flips = self.flips.merge(met)
        self.proved_by = list(self.radii.proved_by or [""] * len(self.x))
        self.cut = bool(self.radii.info["cut"])
        single = aim.eps if aim.order == math.inf else None
        self.growth = Growth(self.ladder, self.radii.values, self.distances, single)
        self._note()

    @property
    def lower(self) -> Tensor:
        """The radii that are proved."""
        return self.growth.lower

    def _first_flips(self, known: Flips | None) -> Flips:
        """A short attack on the samples without a flip."""
        aim = self.threat
        common: dict[str, Any] = {
            "passes": FIRST,
            "warn": False,
            "seed": self.seed,
            "batch_size": self.batch_size,
        }
        if known is None and clock.seconds_left() < math.inf:
            return self._flips_in_time(common)
        if known is None:
            where = (self.model, self.x, self.task, aim.norm, aim.domain)
            return attacked(*where, eps=aim.eps, order=aim.order, **common)
        mine = {"x": self.x, "task": self.task, "norm": aim.norm, "domain": aim.domain}
        for name, own in mine.items():
            check_equal("y" if name == "task" else name, getattr(known, name), own)
        rows = (~known.success).nonzero()[:, 0]
        if not len(rows):
            return known
        some = known.take(rows)
        with suppress(clock.Late):
            found = attacked(self.model, some.x, some.task, aim.norm, some.domain, **common)
            return known.merge(known.put(rows, found))
        return known

    def _flips_in_time(self, common: dict[str, Any]) -> Flips:
        """The same within a third of the time, some samples after the others."""
        aim = self.threat
        flips = Flips.from_points(self.model, self.x, self.task, self.x, aim.norm, aim.domain)
        with clock.limited(clock.seconds_left() / 3), suppress(clock.Late):
            for rows in torch.split(torch.arange(len(self.x)), ATTACKED):
                some = self.problem.take(rows)
                where = (self.model, self.x[rows], some.task, aim.norm, some.domain)
                flips = flips.merge(flips.put(rows, attacked(*where, **common)))
        return flips

    def _first_radii(self, known: Radii | None) -> Radii:
        """The cheap radii, roughly: what is known needs none, attempts go on from there. Which
        samples are worth more is left to them, but for the exact search of small networks.
        """
        aim = self.threat
        graph = self.problem.graph
        if known is not None:
            check_equal("arithmetic", known.arithmetic, graph.arithmetic)
            check_equal("norm", known.norm, aim.norm)
            check_equal("domain", known.domain, aim.domain)
            check_equal("number of samples", len(known), len(self.x))
            return known
        half = clock.seconds_left() / 2
        return radii(
            self.model,
            self.x,
            self.task,
            aim.norm,
            aim.domain,
            "auto",
            effort=None if self.problem.small else 0.0,  # linear bounds and products only
            arithmetic=self.arithmetic,
            upper=self.flips.distances,
            eps=aim.eps,
            order=aim.order,
            mu=self.mu,
            tolerance=COARSE,
            time_limit=None if half == math.inf else max(half, 1e-3),
            batch_size=self.ladder.batch,
        )

    def close(self, gap: float, budget: float) -> None:
        """Attempts and attacks, the most promising first, until the gap is reached."""
        while self._gap() > gap and self.work < budget:
            if clock.late():
                self.cut = True
                return
            proofs, radius = self._proofs()
            attacks = self._attacks()
            best = float(torch.cat([proofs, attacks]).max()) if len(proofs) else 0.0
            if best <= 0:
                return
            try:
                if float(proofs.max()) >= float(attacks.max()):
                    self._prove(proofs, radius, best)
                else:
                    self._attack(attacks, best)
            except clock.Late:
                self.cut = True
                return
            self._note()

    @property
    def distances(self) -> Tensor:
        """Of the flips."""
        return self.flips.distances

    def _curve(self) -> RiskCurve:
        return RiskCurve(
            self.distances, torch.minimum(self.lower, self.distances), self.mu, self.threat.order
        )

    def _gap(self) -> float:
        return self._curve().gap(self.threat.eps)

    def _note(self) -> None:
        """The bracket as it is, for the caller and for the history."""
        certified, attacked = self._curve()(self.threat.eps)
        last = self.history[-1][1:] if self.history else (-1.0, -1.0)
        if max(abs(certified - last[0]), abs(attacked - last[1])) > SAME:
            self.history.append((self.work, certified, attacked))
            self.report(certified, attacked)

    def _lost(self, values: Tensor, unit: float) -> Tensor:
        """What each sample counts of lost accuracy at a radius: `mu (1 - (r / u)^p)`."""
        if self.threat.order == math.inf:
            return self.mu * (values < self.threat.eps)
        share = (values / unit).clamp(max=1) ** self.threat.order
        return self.mu * (1 - share)

    def _won(self, lower: Tensor, radius: Tensor) -> Tensor:
        """What each sample would count less of lost accuracy at a larger radius, `(N,)`.

        Radii that have grown up to the price u pay only together: to raise one of many that are
        alike raises nothing, to raise all of them does. So a radius a little beyond u counts, too,
        for a part of what it would below.
        """
        unit = self._price(lower)
        now = self._lost(lower, unit) - self._lost(radius, unit)
        if self.threat.order == math.inf:
            return now
        beyond = max(unit, min(AHEAD * unit, self._price(self.distances)))
        later = self._lost(lower, beyond) - self._lost(radius, beyond)
        return torch.maximum(now, LATER * later)

    def _price(self, values: Tensor) -> float:
        """The radius at which the budget runs out: the dearest that is bought.

        Radii that do not add up to the budget buy nothing yet. What counts is then how far they
        grow in all, the largest as much as the others, up to the price of the distances.
        """
        if self.threat.order == math.inf:
            return self.threat.eps
        paid = self._paid(values)
        if paid is None and values is not self.distances:
            paid = self._paid(self.distances)
        if paid is not None:
            return paid
        some = values[torch.isfinite(values)]
        return max(float(some.max()) if len(some) else 0.0, self.threat.eps)

    def _paid(self, values: Tensor) -> float | None:
        """The dearest of some radii that the budget buys; None if it buys all of them."""
        known, where = values.sort()
        bill = (self.mu[where] * known**self.threat.order).cumsum(0)
        paid = bill >= self.threat.eps**self.threat.order
        last = float(known[paid][0]) if bool(paid.any()) else math.inf
        return last if math.isfinite(last) and last > 0 else None

    def _proofs(self) -> tuple[Tensor, Tensor]:
        """What an attempt on each sample promises for its price, and at which radius, `(N,)`."""
        growth = self.growth
        start = self.distances.clamp(max=10 * self.threat.eps) * (1 - 1e-6) / 4
        radius = growth.radius(self.distances, start)
        open_ = growth.open(self.distances, radius) & ~self.radii.exact
        gain = self._won(torch.minimum(self.lower, self.distances), radius)
        levels = len(self.ladder.levels)
        prices = [self.cost.get(k, self.ladder.price(k)) for k in range(levels)]
        cost = torch.tensor([*prices, math.inf], dtype=torch.float64)[growth.level]
        self.promised = torch.where(open_, gain, 0.0)
        shares = [kept_share(self.proofs, k, PROOFS_KEEP) for k in range(levels + 1)]
        likely = torch.tensor(shares, dtype=torch.float64)[growth.level]
        likely = likely * FAILING ** growth.failures.double()
        return torch.where(open_, gain * likely / cost, 0.0), radius

    def _attacks(self) -> Tensor:
        """What more passes on each sample promise for their price, `(N,)`."""
        far = self.distances
        known = torch.where(torch.isfinite(far), far, 2 * self.lower.clamp(min=self.threat.eps))
        nearer = (known + self.lower) / 2
        if self.threat.order == math.inf:
            open_ = (far > self.threat.eps) & (self.lower < self.threat.eps)
            nearer = torch.full_like(far, self.threat.eps * (1 - 1e-9))
        else:
            open_ = (self.lower < far * (1 - TOLERANCE)) & (far > 0)
        open_ &= (self.tries < ATTACKS) & ~self.radii.exact
        unit = self._price(far)
        gain = self._lost(nearer, unit) - self._lost(far, unit)
        cost = 2 * PASSES * self.problem.unit * 2.0 ** self.tries.double()
        self.hoped = torch.where(open_, gain, 0.0)
        shares = [kept_share(self.attacks, k, ATTACKS_KEEP) for k in range(ATTACKS + 1)]
        likely = torch.tensor(shares, dtype=torch.float64)[self.tries.clamp(max=ATTACKS)]
        return torch.where(open_, gain * likely / cost, 0.0)

    def _chosen(self, ratio: Tensor, best: float, like: Tensor, most: int) -> Tensor:
        """Samples that are about as promising as the best one, at its level; the best first."""
        order = ratio.argsort(descending=True, stable=True)
        same = like[order] == like[order[0]]
        near = ratio[order] >= CLOSE * best
        return order[same & near][:most]

    def _prove(self, ratio: Tensor, radius: Tensor, best: float) -> None:
        """One attempt, and what its failures point at."""
        levels = self.growth.level
        rows = self._chosen(ratio, best, levels, self.ladder.batch)
        level = int(levels[rows[0]])
        record = self.proofs.setdefault(level, ExpectedGain(PROOFS_KEEP))
        found = self.ladder.attempt(rows, radius[rows], level)
        spent = float(found.work.sum())
        self.work += spent
        self.attempts += len(rows)
        self.domains += found.domains
        self.cost[level] = spent / len(rows)
        record.add(self.promised[rows], self.promised[rows] * found.proved)
        for k, i in enumerate(rows.tolist()):
            good = bool(found.proved[k])
            if good:
                self.proved_by[i] = found.by[k]
            self.growth.told(i, float(radius[i]), good, float(self.distances[i]))
        failed = (~found.proved).nonzero()[:, 0]
        if len(failed):
            self._follow(rows[failed], found.points[failed])

    def _follow(self, rows: Tensor, points: Tensor) -> None:
        """Flips on the rays through the points where bounds are lowest."""
        some = self.problem.take(rows)
        where = (self.model, self.x[rows.to(self.x.device)], some.task, points, PUSHES)
        found = flips_behind(*where, some.norm, some.domain, "proof", batch_size=self.batch_size)
        self.work += 2 * len(PUSHES) * len(rows) * self.problem.unit
        # A flip that is much farther than the one that is known starts nothing new.
        useful = (found.distances < 1.3 * self.distances[rows]).nonzero()[:, 0]
        useful = useful[self.tries[rows[useful]] < ATTACKS]
        self.flips = self.flips.merge(self.flips.put(rows, found))
        if len(useful):
            self._search(rows[useful], found.take(useful), PASSES // 2)

    def _attack(self, ratio: Tensor, best: float) -> None:
        """More passes for some samples, from other random points."""
        rows = self._chosen(ratio, best, self.tries, ATTACKED_TOGETHER)
        tries = int(self.tries[rows[0]])
        unit = self._price(self.distances)
        old = self._lost(self.distances, unit)[rows]
        self._search(rows, self.flips.take(rows), PASSES * 2**tries)
        won = self._lost(self.distances, unit)[rows] - old
        self.attacks.setdefault(tries, ExpectedGain(ATTACKS_KEEP)).add(self.hoped[rows], won)

    def _search(self, rows: Tensor, start: Flips, passes: int) -> None:
        """An attack on samples from flips of theirs."""
        found = attacked(
            self.model,
            start.x,
            start.task,
            start.norm,
            start.domain,
            passes=passes,
            start=start,
            seed=self.seed + 1 + int(self.tries[rows[0]]),
            batch_size=self.batch_size,
        )
        self.tries[rows] += 1
        self.work += 2 * passes * len(rows) * self.problem.unit
        self.flips = self.flips.merge(self.flips.put(rows, found))

    def _method(self) -> str:
        """The dearest method that proved a radius; that of the first radii if none did more."""
        dearer = [name for name in ("branch", "quadratic") if name in self.proved_by]
        return dearer[0] if dearer else "branch" if self.attempts else self.radii.method

    def result(self, seconds: float, gap: float, each: float) -> Sandwich:
        """Everything that is known now."""
        info = {
            "seconds": seconds,
            "work": self.work,
            "attempts": self.attempts,
            "domains": self.domains,
            "cut": self.cut,
            "gap": gap,
            "effort": each / clock.SECOND,
            "versions": versions(),
        }
        almost = self.distances * (1 - EXACT) * (1 - 1e-9)  # rounding does not decide
        # Flips are those of the executed network: they say nothing about the exact function.
        met = (self.lower >= almost) & torch.isfinite(self.distances)
        met &= self.radii.arithmetic == "executed" and not self.problem.small
        known = replace(
            self.radii,
            values=self.lower,
            exact=self.radii.exact | met,
            method=self._method(),
            proved_by=tuple(self.proved_by),
        )
        return Sandwich(self.flips, known, self.threat, self.mu, tuple(self.history), info)
