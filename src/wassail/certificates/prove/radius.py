"""How a radius grows: the one search over radii on top of the ladder.

A sample grows by a step after a proof. A failure halves the step, and from the least step on asks
for the next level, at the same radius, where branching goes on from the leaves that are open. What
a sample does depends on its own verdicts only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.certificates.prove.ladder import Ladder
from wassail.certificates.prove.rungs import BallRung, BranchRung, QuadraticRung

STEP = 0.08  # a radius grows by this much at first, relative
LEAST_STEP = 0.02  # from here on a failure asks for more effort instead of a smaller step
LONGEST_STEP = 0.5
LEAST_GAIN = 0.01  # relative: branching that is expected to bring less is left out
# With balls: a proof takes seconds, so that the next effort comes earlier.
BALL_STEP = 0.2
LEAST_BALL_STEP = 0.05
# Quadratic bounds take a sample much farther than the least branching does, so that radii grow by a
# share of the way to the flip, and the next effort comes once that is short.
WAY = 0.35
SHORT_WAY = 0.1
# Better slopes of inner bounds let radii grow by a step at once.
SLOPES_STEP = 0.06
LEAST_SLOPES_STEP = 0.03
# An executed radius is taken to be the distance itself where a flip is known at most this much
# farther away (see `Radii`). It is tried for from a little below.
EXACT = 1e-3
NEAR = 0.01


class Growth:
    """The next radius and level of every sample, on the CPU.

    Args:
        ladder: what proves.
        lower: radii that are proved, float64 `(N,)`.
        far: distances of known flips, float64 `(N,)`, inf where none is known.
        single: the only radius that is asked for, or None.
    """

    def __init__(
        self, ladder: Ladder, lower: Tensor, far: Tensor, single: float | None = None
    ) -> None:
        n = len(lower)
        self.ladder = ladder
        self.single = single
        self.lower = lower.clone()
        self.linear = lower.clone()  # what linear bounds prove
        self.level = torch.zeros(n, dtype=torch.int64)
        self.ceiling = torch.full((n,), math.inf, dtype=torch.float64)  # failed at this level
        self.failures = torch.zeros(n, dtype=torch.int64)  # in a row
        self.first = BALL_STEP if ladder.balls else STEP
        self.step = self._first_step(self.level, self.lower, far, self.first)

    def radius(self, far: Tensor, start: Tensor) -> Tensor:
        """The radius to try next, `(N,)`.

        Args:
            far: distances of known flips.
            start: where to begin for samples without a radius.
        """
        if self.single is not None:
            return torch.full_like(self.lower, self.single)
        far = far * (1 - 1e-6)
        grown = self.lower * (1 + self.step)
        radius = torch.where(self.lower > 0, grown, start)
        radius = torch.where(radius < far, radius, (self.lower + far) / 2)
        last = self.lower >= far * (1 - NEAR)
        return torch.where(last, far * (1 - EXACT / 2), radius)

    def open(self, far: Tensor, radius: Tensor) -> Tensor:
        """Which samples have something left to try, bool `(N,)`."""
        far = far * (1 - 1e-6)
        below = (self.lower < far * (1 - EXACT)) & (radius < far) & (far > 0)
        if self.single is not None:
            below = below & (self.lower < self.single)
        return below & torch.isfinite(self.lower) & (self.level < len(self.ladder.levels))

    def told(self, i: int, radius: float, proved: bool, far: float, gain: float = math.inf) -> None:
        """What an attempt found for one sample.

        Args:
            i: the sample.
            radius: that was tried.
            proved: whether it is.
            far: distance of its known flip.
            gain: as in `Attempt`.
        """
        least = self._least_step(int(self.level[i]))
        if proved:
            self.lower[i] = radius
            self.failures[i] = 0
            self._grow(i, least, far)
        elif self._hopeless(i, radius, gain):
            while self._branches(int(self.level[i])):
                self._next_level(i, torch.tensor(far, dtype=torch.float64))
        elif self.step[i] > least and self.single is None:
            self.ceiling[i] = radius
            self.step[i] = self.step[i] / 2
            self.failures[i] += 1
        else:
            self._next_level(i, torch.tensor(far, dtype=torch.float64))

    def _grow(self, i: int, least: float, far: float) -> None:
        """The next step of a sample after a proof.

        Not to a radius that has failed at this level: half of the way there. Where that is short
        there is more effort instead.
        """
        step = float(self.step[i])
        if not self.ladder.balls:  # with balls, which are dear, a step is as long as the last one
            step = min(2 * step, LONGEST_STEP)
        flip = torch.tensor(far, dtype=torch.float64)
        self.step[i] = self._first_step(self.level[i], self.lower[i], flip, step)
        if self._has(int(self.level[i]), QuadraticRung) or self.single is not None:
            return
        way = float(self.ceiling[i] / self.lower[i]) - 1
        if way > 2 * least or self.level[i] == len(self.ladder.levels) - 1:
            self.step[i] = min(float(self.step[i]), way / 2)
        else:
            self._next_level(i, flip)
            if self._has(int(self.level[i]), QuadraticRung):
                return
            slopes = self._has(int(self.level[i]), BranchRung, slopes=True)
            self.step[i] = SLOPES_STEP if slopes else min(way, least)

    def _next_level(self, i: int, far: Tensor) -> None:
        """More effort for a sample, at the same radius unless quadratic bounds come or go."""
        before = self._has(int(self.level[i]), QuadraticRung)
        self.level[i] += 1
        self.failures[i] = 0
        self.ceiling[i] = math.inf
        if before or self._has(int(self.level[i]), QuadraticRung):
            self.step[i] = self._first_step(self.level[i], self.lower[i], far, self.first)

    def _first_step(self, level: Tensor, lower: Tensor, far: Tensor, step: float) -> Tensor:
        """How much radii grow by at first and after a proof, relative.

        Args:
            level: of the samples.
            lower: their radii.
            far: distances of their flips.
            step: where that does not depend on the flip.
        """
        kinds = [self._has(k, QuadraticRung) for k in range(len(self.ladder.levels) + 1)]
        quadratic = torch.tensor(kinds)[level]
        way = WAY * (far / lower.clamp(min=1e-300) - 1)
        way = torch.where((lower > 0) & far.isfinite(), way, 2 * step)
        return torch.where(quadratic, way, torch.full_like(lower, step))

    def _least_step(self, level: int) -> float:
        """From here on a failure asks for more effort."""
        if self._has(level, QuadraticRung):
            return SHORT_WAY
        if self._has(level, BallRung):
            return LEAST_BALL_STEP
        return LEAST_SLOPES_STEP if self._has(level, BranchRung, slopes=True) else LEAST_STEP

    def _hopeless(self, i: int, radius: float, gain: float) -> bool:
        """Whether more branching is not expected to bring a sample a larger radius."""
        begun = float(self.linear[i])
        expected = begun + gain * (radius - begun)
        near = expected <= float(self.lower[i]) * (1 + LEAST_GAIN)
        return near and begun > 0 and self._branches(int(self.level[i]))

    def _branches(self, level: int) -> bool:
        """Whether a level has rungs of branching only."""
        if level >= len(self.ladder.levels):
            return False
        return all(isinstance(rung, BranchRung) for rung in self.ladder.levels[level])

    def _has(self, level: int, kind: type, slopes: bool = False) -> bool:
        """Whether a level has a rung of a kind, with better slopes if that is asked."""
        if level >= len(self.ladder.levels):
            return False
        some = [rung for rung in self.ladder.levels[level] if isinstance(rung, kind)]
        return any(not slopes or getattr(rung, "slopes", False) for rung in some)
