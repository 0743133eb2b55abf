"""The exact worst-case error of small ReLU regressions, by their cells (THEORY 2 and 11).

On a cell an error is affine, with either sign. Of every such piece `a` and every scale s, and for
every penalty phi,

    sup_x [s (a(x) - y_i) - phi(||x - x_i||)] = s (sup_x [a(x) - phi(||x - x_i||) / s] - y_i),

so that the certificates of `penalty.py` serve all targets and all scales. The absolute error has
the scale 1, the pinball loss one scale for each sign. Huber's loss is the largest of `s u - s^2 /
2` over s in [0, delta]. Between two neighbours of a list of scales, h apart, the first factor is
convex in s and the square lies above its tangent in the middle: the supremum is at most that of
`s u - s^2 / 2 + h^2 / 8` over the list.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.exact.programs import Array
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.loss.penalty import BATCH, Family, Penalty, magnitudes
from wassail.certificates.loss.problem import Problem
from wassail.certificates.loss.residuals import Residuals
from wassail.certificates.loss.samples import Samples
from wassail.rounding import UNIT

SCALES = 128  # of Huber's loss: it is known to (delta / SCALES)^2 / 8


class ResidualProblem(Problem):
    """Samples, their targets, cells, and everything evaluated or proved so far."""

    def __init__(self, samples: Samples, network: Piecewise, mu: Tensor | None, limit: int) -> None:
        self.residuals = samples.residuals
        self.raised = self.residuals.offsets.numpy()
        # The largest slope of the loss as a function of an output.
        delta = self.residuals.delta if self.residuals.loss == "huber" else 1.0
        self.factor = self.residuals.steepest * delta
        self.pieces = _pieces(self.residuals)
        # The scale 0 is a piece of its own, which no cell matters to.
        self.least = _middle(delta) if self.residuals.loss == "huber" else -math.inf
        given = (network, samples.x, samples.rows, samples.norm, samples.place)
        super().__init__(*given, "margin", mu, limit)
        self.info["loss"] = self.residuals.loss
        self.steepest = _multiplied(self.steepest, self.factor)
        # A loss may be steeper where an output is too high than where it is too low.
        family = self.families[0]
        flat = family.cuts.rows[family.flat, -2]
        scaled = [self._scales(family, piece) * flat for piece in range(len(self.pieces))]
        self.flattest = _multiplied(float(np.max(scaled)), 1.0)

    def at(self, points: Tensor, rows: Tensor) -> Tensor:
        """The losses at points `(m, n)` of the samples `(m,)`."""
        signed = (self.network.logits(points) + self.residuals.offsets[rows])[:, 1:]
        return self.residuals.value(self.residuals.largest(signed))

    def error_at(self, points: Array) -> Array:
        """By how much rounding may have changed the losses at points `(m, n)`: `(m,)`."""
        sizes = magnitudes(self.network).logits(torch.from_numpy(np.abs(points))).amax(1).numpy()
        own = 16 * UNIT * (sizes + np.abs(self.raised).max())
        return np.asarray(self.factor * (2 * self.atlas.rounding * sizes + own))

    def add_far_points(self) -> None:
        """A point far out on the steepest ray of either sign."""
        family = self.families[0]
        flat = family.cuts.rows[family.flat, -2]
        for side in range(1, self.network.outputs):
            mine = np.flatnonzero(family.weights.rows[:, side] > 0)
            ray = family.rays[int(mine[flat[mine].argmax()])]
            self.far_along(0, ray)

    def evaluate(self, i: int, penalty: Penalty, tolerance: float) -> float:
        """An upper bound on `sup_x loss(x, y_i) - phi(||x - x_i||)`, within the tolerance of a
        point found, unless it is late. The pieces with the highest bounds are solved first.
        """
        if clock.out_of_time():
            return super().evaluate(i, penalty, tolerance)
        family = self.families[0]
        x = self.points[i]
        done: set[tuple[int, int]] = set()
        while True:
            best = self.highest(i, penalty)
            heights = self._heights(family, i, penalty)
            order = np.argsort(-heights, axis=None, kind="stable")[:BATCH]
            places = [divmod(int(k), heights.shape[1]) for k in order]
            todo = [at for at in places if heights[at] > best + tolerance and at not in done]
            if self.late() or not todo:
                return float(max(heights.max(), best, self.least))
            clock.spend(len(todo) * clock.STEP)
            groups: dict[float, list[int]] = {}
            for piece, vertex in todo:
                groups.setdefault(float(self._scales(family, piece)[vertex]), []).append(vertex)
            points: list[Array] = []
            with suppress(clock.Late):  # the certificates so far hold
                for scale, some in groups.items():
                    part = sorted(set(some))
                    points += family.solve(part, x, _divided(penalty, scale), tolerance / scale)
            self.add(i, points, penalty.lam if penalty.order == math.inf else math.inf)
            done.update(todo)

    def chord_above(self, i: int, lam: float, height: float) -> float:
        """An upper bound on the chords of sample i: that of the steepest cell."""
        return self.steepest

    def _scales(self, family: Family, piece: int) -> Array:
        """The scale of every vertex in a piece, `(V,)`: outputs too high come first."""
        high, low, _ = self.pieces[piece]
        half = self.network.outputs // 2
        too_high = family.weights.rows[:, 1 : 1 + half].sum(1) > 0
        return np.where(too_high, high, low)

    def _heights(self, family: Family, i: int, penalty: Penalty) -> Array:
        """Upper bounds on every piece of sample i at every vertex, rounded up, `(P, V)`."""
        shift = family.weights.rows @ self.raised[i]  # one entry of 1 each: nothing is rounded
        found = []
        for piece, (high, low, offset) in enumerate(self.pieces):
            scale = self._scales(family, piece)
            bound = np.full(len(scale), math.inf)
            for value in {high, low}:
                mine = scale == value
                bound[mine] = family.bounds(self.points[i], _divided(penalty, value))[mine]
            size = scale * (np.abs(bound) + np.abs(shift)) + abs(offset)
            found.append(scale * (bound + shift) + offset + 8 * UNIT * size)
        return np.array(found)


def _pieces(residuals: Residuals) -> list[tuple[float, float, float]]:
    """Scales of outputs too high and too low, and what is added."""
    if residuals.loss != "huber":
        return [(*residuals.weights, 0.0)]
    h = residuals.delta / SCALES
    scales = [h * k for k in range(1, SCALES)] + [residuals.delta]
    more = _middle(residuals.delta)
    # The square and two sums are off by less than 9/8 of a unit of s^2: `more` is below s^2 / 8.
    return [(s, s, -s * s / 2 + (more + 2 * UNIT * s * s)) for s in scales]


def _multiplied(slope: float, factor: float) -> float:
    """The slope of an output as one of the loss, rounded up."""
    return slope * factor * (1 + 4 * UNIT)


def _middle(delta: float) -> float:
    """By how much a tangent in the middle overshoots at the ends, rounded up: `h^2 / 8`."""
    return (delta / SCALES) ** 2 / 8 * (1 + 8 * UNIT)


def _divided(penalty: Penalty, scale: float) -> Penalty:
    """`phi / scale`, rounded down."""
    if penalty.order == math.inf:
        return penalty
    return replace(penalty, lam=penalty.lam / scale * (1 - 2 * UNIT))
