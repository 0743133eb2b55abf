"""Verdicts at one radius for each sample: attacked first, then proved by the ladder."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wassail.attacks.nearest import nearest
from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.prove.exact import EXACT_UP_TO_UNSTABLE, decided_exactly
from wassail.certificates.prove.ladder import Attempt, Ladder, check_method, parse_effort
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.products import product_radii
from wassail.certificates.prove.record import Verdicts
from wassail.errors import InputError, instance
from wassail.network import Model, versions
from wassail.progress import Progress, progress_bar
from wassail.specification import Labels
from wassail.threat import Domain, Number, Threat, parse_seconds, parse_threat, whole
from wassail.transport.flips import Flips

FIRST_PASSES = 40  # of the attack on every sample
MORE_PASSES = 260  # on those that linear bounds do not prove
ATTACK_SHARE = 0.25  # of the effort, at most
ATTACKED = 256  # samples attacked between two looks at the clock


def attacked(
    model: Model, x: Tensor, y: Labels, norm: float, domain: Domain, **options: Any
) -> Flips:
    """The nearest flips (`nearest`), until the time is up: `Late` then.

    An attack knows no clock: its model looks at every pass, a model without hooks after a batch.
    """
    hook = None
    if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        hook = model.register_forward_pre_hook(lambda *_: clock.look())
    try:
        return nearest(model, x, y, norm, domain, progress=lambda _: clock.look(), **options)
    except InputError as error:  # what a model raises is told as a mistake of its own
        if isinstance(error.__cause__, clock.Late):
            raise clock.Late from None
        raise
    finally:
        if hook is not None:
            hook.remove()


def verify(
    model: Model | Graph,
    x: Tensor,
    y: Labels,
    threat: Threat,
    method: str = "auto",
    *,
    arithmetic: str = "auto",
    effort: Number | None = None,
    time_limit: float | None = None,
    at: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Verdicts:
    """What holds for each sample at one fixed eps: proved that nothing in the closed ball, cut by
    the box, flips; falsified by a point of it; wrong already; or open, with the reason.

    The mean of `proved` is the verified accuracy, for about a tenth of the work of `radii`. The
    order of the threat plays no part. Samples are attacked first, since one with a flip needs no
    proof; a graph has no model to attack.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, eps and domain.
        method: as in `radii`; default "auto", the whole ladder.
        arithmetic: as in `radii`; default "auto".
        effort: as in `radii`; default None, 2, and no limit with a time limit. More effort never
            proves less.
        time_limit: seconds; what was reached by then is kept; default None.
        at: a radius of each sample to prove, float64 `(N,)`, in place of the threat's eps; default
            None.
        seed: int, keys the random draws of the attack; default 0.
        batch_size: int, samples bounded at once; default None, 16, and 64 on small networks.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Verdicts`: `proved`, `status`, `points`, `reasons`.
    """
    began = clock.now()
    check_method(method)
    threat = parse_threat(threat, own=True)
    if batch_size is not None:
        whole(batch_size, "batch_size")
    limit = None if time_limit is None else parse_seconds(time_limit)
    each = parse_effort(effort, limit)
    problem = Problem.of(model, x, y, threat.norm, threat.domain, arithmetic)
    wanted = torch.full((len(problem),), threat.eps, dtype=torch.float64)
    if at is not None:
        instance(at, Tensor, "at is", "a radius of each sample")
        wanted = at.detach().cpu().double()
    if wanted.shape != (len(problem),) or not (wanted >= 0).all():
        raise InputError(f"at must hold {len(problem)} radii >= 0, one for each sample.")
    rest = None if limit is None else limit - (clock.now() - began)
    with progress_bar(progress, "verification") as report, clock.limited(rest):
        task = _Verification(problem, wanted, method, each, seed, batch_size, report)
        task.run()
    return task.result(clock.now() - began)


class _Verification:
    """The samples of one problem at a radius each, with what is known of them on the CPU."""

    def __init__(
        self,
        problem: Problem,
        wanted: Tensor,
        method: str,
        effort: float,
        seed: int,
        batch_size: int | None,
        report: Callable[[float], None],
    ) -> None:
        self.problem = problem
        self.wanted = wanted
        self.method = method
        self.effort = effort
        self.seed = seed
        self.ladder = Ladder(problem, method)
        self.batch = batch_size or self.ladder.batch
        self.report = report
        n = len(problem)
        self.proved = torch.zeros(n, dtype=torch.bool)
        self.falsified = torch.zeros(n, dtype=torch.bool)
        self.by = [""] * n
        self.tried = torch.zeros(n, dtype=torch.bool)  # whether its effort was spent
        self.flips: dict[int, Tensor] = {}  # the points of falsified samples
        self.work = 0.0
        self.passes = 0
        self.domains = 0
        self.small = problem.small and method in ("auto", "exact")

    @property
    def open(self) -> Tensor:
        """Which samples are undecided, bool `(N,)`."""
        return ~(self.problem.wrong | self.proved | self.falsified)

    def run(self) -> None:
        """Attack, then batch by batch up the ladder; what is known at a limit is kept."""
        try:
            everything = torch.arange(len(self.problem))
            for rows in torch.split(everything, ATTACKED) if len(everything) else ():
                clock.check()
                self._attack(rows, FIRST_PASSES)
            left = self.open.nonzero()[:, 0]
            for rows in torch.split(left, self.batch) if len(left) else ():
                self.report(float(1 - self.open[left].double().mean()))
                clock.check()
                self._prove(rows)
        except clock.Late:
            return

    def _attack(self, rows: Tensor, passes: int) -> None:
        """Flips of the model itself in the balls of some samples."""
        rows = rows[self.open[rows]]
        model = self.problem.model
        if model is None or not len(rows):
            return
        most = ATTACK_SHARE * self.effort / (2 * self.problem.unit)
        passes = int(min(passes, max(most, FIRST_PASSES / 2)))
        some = self.problem.take(rows)
        where = (model, some.x, some.task, some.norm, some.domain)
        self._keep(rows, attacked(*where, passes=passes, seed=self.seed, warn=False))

    def _keep(self, rows: Tensor, flips: Flips) -> None:
        """What an attack found."""
        self.passes += int((flips.forwards + flips.backwards).sum())
        near = (flips.distances <= self.wanted[rows]) & (flips.distances < math.inf)
        self.falsified[rows[near]] = True
        for k in near.nonzero()[:, 0].tolist():
            self.flips[int(rows[k])] = flips.points[k].clone()

    def _products(self, attempt: Attempt) -> None:
        """Proofs by the products of norms, of what linear bounds leave open."""
        left = (~attempt.proved).nonzero()[:, 0]
        some = attempt.radius[left]
        found = product_radii(attempt.problem.take(left), some, some)
        attempt.note(left, found >= some, "products")

    def _proved(self, rows: Tensor, by: str) -> None:
        for i in rows.tolist():
            self.proved[i] = True
            self.by[i] = by

    def _prove(self, rows: Tensor) -> None:
        """One batch: linear bounds and products, a longer attack on what they leave, the levels."""
        attempt = self.ladder.begin(rows, self.wanted[rows])
        try:
            if self.method in ("auto", "ball"):
                self._products(attempt)
            self._note(rows, attempt)
            self._attack(rows, MORE_PASSES)
            # A sample with a flip has nothing to prove: no rung looks at it.
            attempt.proved |= self.falsified[rows]
            if self.small:
                self._exactly(rows, attempt)
            purse = torch.full((len(rows),), self.effort, dtype=torch.float64)
            for level in range(len(self.ladder.levels)):
                self.ladder.climb(attempt, level, purse)
            self.tried[rows] = True
        finally:
            self._note(rows, attempt)
            self.work += float(attempt.work.sum())
            self.domains += attempt.domains

    def _note(self, rows: Tensor, attempt: Attempt) -> None:
        """What an attempt has proved so far."""
        for k, i in enumerate(rows.tolist()):
            if attempt.by[k]:
                self._proved(torch.tensor([i]), attempt.by[k])

    def _exactly(self, rows: Tensor, attempt: Attempt) -> None:
        """The exact search for what is open, under "auto" where it is likely to end."""
        open_ = ~attempt.proved
        share = math.inf
        if self.method == "auto":
            open_ = open_ & (attempt.unstable <= EXACT_UP_TO_UNSTABLE)
            share = self.effort
        left = open_.nonzero()[:, 0]
        good, spent = decided_exactly(attempt.problem.take(left), self.wanted[rows[left]], share)
        attempt.note(left, good, "exact")
        attempt.work[left] += spent

    def result(self, seconds: float) -> Verdicts:
        """Everything that is known now."""
        problem = self.problem
        status = []
        reasons = []
        for i in range(len(problem)):
            named = (("wrong", problem.wrong), ("falsified", self.falsified))
            found = [name for name, which in named if which[i]]
            status.append(found[0] if found else "proved" if self.proved[i] else "open")
            why = "its effort was spent" if self.tried[i] else "the time was up"
            reasons.append(why if status[-1] == "open" else "")
        points = problem.x.detach().cpu().clone()
        for i, point in self.flips.items():
            points[i] = point.to(points)
        info = {
            "seconds": seconds,
            "effort": self.effort / clock.SECOND,
            "work": self.work,
            "passes": self.passes,
            "domains": self.domains,
            "method": self.method,
            "versions": versions(),
        }
        return Verdicts(
            tuple(status),
            self.wanted,
            points,
            tuple(reasons),
            tuple(self.by),
            problem.norm,
            problem.domain,
            problem.graph.arithmetic,
            info,
        )
