"""Whether a property of a distribution holds: attacked and certified together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from typing import Any

import torch

from wassail.certificates import clock
from wassail.certificates.prove.radii import radii
from wassail.certificates.prove.record import Radii
from wassail.certificates.prove.sandwich import sandwich
from wassail.certificates.prove.verify import attacked
from wassail.errors import InputError
from wassail.network import versions
from wassail.omega.answer import Certificate, OmegaAnswer
from wassail.omega.exact import float_above
from wassail.omega.judge import Judge
from wassail.omega.losses import certificate_of, curve_of, grid_for
from wassail.omega.plan import plan_of
from wassail.omega.property import Omega
from wassail.threat import Threat, parse_seconds
from wassail.transport.distribution import Distribution, allocate
from wassail.transport.flips import Flips
from wassail.writing import rounded_down, rounded_up

EFFORT = 2.0  # seconds of one core for each sample, counted in operations, without a limit
ROUNDS = (0.02, 0.1, 0.5, 1.0)  # shares of the effort: after each the sides are looked at
FIRST_SECONDS = 0.1  # for each sample in the first round, with a time limit
GROWTH = 4.0  # of the seconds, from round to round
ATTACK = 0.3  # of the time, for the first attack
PASSES = 300  # of the first attack on a sample
PROVED_AGAIN = 1 - 1e-9  # of a radius: another batch's rounding proves it, too
STEPS = (0, 20)  # of the optimisation of bounds on a loss


def decide_omega(
    property_: Omega, *, time_limit: float | None = None, effort: float | None = None, seed: int = 0
) -> OmegaAnswer:
    """Whether every distribution of the threat keeps the bound.

    "holds" is a proof, for the network as it is executed in float32 where its operations are
    covered, else for the function of real numbers (`certificate.arithmetic` says which). "fails"
    comes with a distribution, which was evaluated in float64, in float32, and by onnxruntime where
    that is installed.

    Args:
        property_: as `read_omega` returns it.
        time_limit: seconds; default None.
        effort: seconds of one core for each sample, counted in operations, so that the answer does
            not depend on the machine; default None: no limit with a time limit, else 2.
        seed: int, keys the random draws of the attack; default 0.
    """
    limit = None if time_limit is None else parse_seconds(time_limit)
    each = None if effort is None else parse_seconds(effort, "effort")
    task = _Decision(property_, limit, each, seed)
    try:
        if property_.least:
            task.accuracy()
        else:
            task.loss()
    except clock.Late:
        task.late = True
    except InputError as error:
        task.reason = str(error).rstrip(".")  # a structure that bounds do not know
    return task.answer()


class _Decision:
    """One property, and what is known so far."""

    def __init__(
        self, property_: Omega, limit: float | None, effort: float | None, seed: int
    ) -> None:
        self.property = property_
        self.began = clock.now()
        self.limit = limit
        self.effort = effort
        self.seed = seed
        self.judge = Judge(property_)
        self.rounds = 0
        self.late = False
        self.reason = ""
        whole = property_.least
        self.low: Fraction | float = Fraction(0) if whole else -math.inf
        self.high: Fraction | float = Fraction(1) if whole else math.inf
        self.found: dict[str, Any] = {}

    def left(self) -> float | None:
        """Seconds that are left, None without a limit."""
        if self.limit is None:
            return None
        rest = self.limit - (clock.now() - self.began)
        if rest <= 0:
            raise clock.Late
        return rest

    def accuracy(self) -> None:
        """Flips and radii, with more and more work, until one side decides."""
        own, threat = self.property, self.property.threat
        given = (own.model, own.x, own.y)
        # A share alpha with the budget eps is all samples with a smaller one (THEORY 12).
        eps = threat.eps * threat.subpopulation ** (1 / threat.order)
        aim = Threat(threat.norm, threat.order, eps, threat.domain)
        flips = self._attacked(eps=eps, order=threat.order)
        if flips is not None and self._refuted(self._allocated(flips)):
            return
        upper = None if flips is None else flips.distances
        where = (*given, threat.norm, threat.domain)
        known = radii(*where, "crown", upper=upper, time_limit=self.left())
        if self._proved(self._radii(known)):
            return
        for seconds, effort in self._work():
            self.rounds += 1
            more: dict[str, Any] = {"time_limit": seconds, "effort": effort, "seed": self.seed}
            found = sandwich(*given, aim, mu=own.mu, flips=flips, start=known, **more)
            flips, known = found.flips, found.radii
            if self._refuted(self._allocated(flips)) or self._proved(self._radii(known)):
                return

    def loss(self) -> None:
        """A curve from points and linear bounds, then with better slopes."""
        own = self.property
        flips = self._attacked()
        points = [] if flips is None else [flips.points]
        grid = grid_for(own)
        for steps in STEPS:
            self.rounds += 1
            curve = curve_of(own, grid=grid, steps=steps, points=points, time_limit=self.left())
            if self._refuted(curve.witness(own.threat.eps)):
                return
            certificate = certificate_of(curve, own, steps)
            if certificate is not None and self._proved(certificate):
                return

    def _attacked(self, **steering: float) -> Flips | None:
        """The nearest flips, None where the time does not allow the first attack."""
        own, threat = self.property, self.property.threat
        rest = self.left()
        limit = clock.limited(None if rest is None else ATTACK * rest)
        more: dict[str, Any] = {"passes": PASSES, "seed": self.seed, "warn": False, **steering}
        with limit, suppress(clock.Late):
            return attacked(own.model, own.x, own.y, threat.norm, threat.domain, **more)
        return None

    def _work(self) -> Iterator[tuple[float | None, float | None]]:
        """Seconds and effort of each round."""
        if self.limit is None:
            each = EFFORT if self.effort is None else self.effort
            yield from ((None, each * share) for share in ROUNDS)
            return
        seconds = FIRST_SECONDS * len(self.property.y)
        while True:
            rest = self.left()
            assert rest is not None
            # A short last round is added to the one before it.
            yield (seconds if rest > 2 * seconds else rest), self.effort
            seconds *= GROWTH

    def _allocated(self, flips: Flips) -> Distribution:
        threat = self.property.threat
        return allocate(
            flips,
            threat.eps,
            threat.order,
            self.property.mu,
            label_cost=threat.label_cost,
            subpopulation=threat.subpopulation,
        )

    def _radii(self, known: Radii) -> Certificate:
        """Certified radii as a certificate, at a good multiplier."""
        threat = self.property.threat
        values = (known.values * PROVED_AGAIN).tolist()
        names = known.proved_by or ("",) * len(values)
        given = (tuple(values), None, tuple(names), known.arithmetic)
        if threat.order == math.inf:
            return Certificate(0.0, *given)
        # The dual bends where the budget buys exactly one radius.
        bends = known.values.clamp(max=threat.label_cost)
        bends = torch.unique(bends[(bends > 0) & torch.isfinite(bends)])
        tried = ((threat.eps / bends) ** threat.order).flip(0).clamp(max=1e300).tolist() or [0.0]
        low, high = 0, len(tried) - 1

        def value(place: int) -> Fraction:
            return Certificate(tried[place], *given).value(self.property)

        while low < high:  # convex in the multiplier
            middle = (low + high) // 2
            low, high = (low, middle) if value(middle) >= value(middle + 1) else (middle + 1, high)
        return Certificate(tried[low], *given)

    def _refuted(self, found: Distribution) -> bool:
        """Whether a distribution refutes the claim, in every arithmetic."""
        plan = plan_of(found, self.property)
        problems = plan.problems(self.property)
        if problems:
            self.reason = f"an attack's distribution is none of the threat: {problems[0]}"
            return False
        value = self.judge.value(plan)
        if self.property.least:
            self.high = min(self.high, value)
        else:
            self.low = max(self.low, value)
        failed = not self.property.kept_by(value)
        if failed:
            self.found = {"status": "fails", "plan": plan, "checked": self.judge.names}
        return failed

    def _proved(self, certificate: Certificate) -> bool:
        """Whether a certificate proves the claim."""
        value = certificate.value(self.property)
        if self.property.least:
            self.low = max(self.low, value)
        else:
            self.high = min(self.high, value)
        held = self.property.kept_by(value)
        if held:
            self.found = {"status": "holds", "certificate": certificate}
        return held

    def answer(self) -> OmegaAnswer:
        """Everything that is known now."""
        bounds = (0.0 - _above(-self.low), _above(self.high))
        info = {"rounds": self.rounds, "seed": self.seed, "versions": versions()}
        seconds = clock.now() - self.began
        if self.found:
            return OmegaAnswer(bounds=bounds, seconds=seconds, info=info, **self.found)
        ended = "the time was up" if self.late else "its effort was spent"
        reason = self.reason or ended
        between = f"{rounded_down(bounds[0])} and {rounded_up(bounds[1])}"
        reason += f"; {self.property.measure} is between {between}"
        return OmegaAnswer("unknown", bounds, reason, seconds=seconds, info=info)


def _above(value: Fraction | float) -> float:
    """The least float64 that is not below a number; 0 has no sign."""
    return (float_above(value) if isinstance(value, Fraction) else value) + 0.0
