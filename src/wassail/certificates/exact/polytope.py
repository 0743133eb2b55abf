"""The inputs with given activations: a polytope, and whether it is empty."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wassail.certificates.exact.multipliers import Reduced
from wassail.certificates.exact.paths import feeding
from wassail.certificates.exact.programs import farkas, widest
from wassail.certificates.exact.relaxation import Triangle
from wassail.certificates.graph.region import Region
from wassail.rounding import UNIT

# cells thinner than the rounding error of a proof of their emptiness, and than this, count as empty
THIN = 1e-11
# how far from the sides of neurons a point of a node is looked for, relative to the scale
MARGIN = 1e-7


@dataclass(frozen=True, eq=False)
class _Polytope:
    """`{y : g y >= h}` with rows of length 1, y = (x - centre, relaxed z, ...) / scale; sides:
    which rows are sides of neurons.

    ball: radius of the l2 ball that cuts `y[:n]`, in the same units; inf if there is none.
    """

    g: np.ndarray
    h: np.ndarray
    sides: np.ndarray
    n: int
    ball: float

    def empty(self, u: np.ndarray) -> bool:
        """Whether multipliers `u >= 0` of the rows prove that no point keeps a distance from all
        sides that float64 can see.

        `sum_sides u_i (g_i y - h_i) <= (g^T u) y - h u` for every feasible y. If the right side is
        at most `(1 + |y|)` times the rounding error of computing it, no y is farther from all of
        its sides than that error over `sum_sides u_i`.
        """
        weight = float(u[self.sides].sum())
        rounding = (sum(self.g.shape) + 4) * UNIT * float(u @ (1 + np.abs(self.h)))
        drift = self.g.T @ u
        value = float(self.h @ u)
        if self.ball < math.inf:
            value -= self.ball * float(np.linalg.norm(drift[: self.n]))
            drift = drift[self.n :]
        return (
            0 < rounding <= THIN * weight
            and float(np.linalg.norm(drift)) <= rounding
            and -value <= rounding
        )


def feasible(polytope: _Polytope) -> tuple[np.ndarray | None, bool]:
    """A point y of the polytope, off its sides, or None; and whether it is proved empty.

    The point of least norm, or a proof that there is none, comes from `programs.farkas`; the linear
    program of the widest point settles what it leaves open.
    """
    margin = polytope.h + MARGIN * polytope.sides
    try:
        u, _, residual = farkas(polytope.g, margin)
    except RuntimeError:  # too many iterations
        return widest_point(polytope)
    if polytope.empty(u):
        return None, True
    y = -residual[:-1] / min(residual[-1], -1e-300)
    if (polytope.g @ y - polytope.h >= MARGIN / 2 * polytope.sides - 1e-9).all() and np.linalg.norm(
        y[: polytope.n]
    ) <= polytope.ball:
        return y, False
    return widest_point(polytope)


def widest_point(polytope: _Polytope) -> tuple[np.ndarray | None, bool]:
    """The point farthest from all sides, up to distance 1, by a linear program without the l2
    ball; whether all is empty.
    """
    answer = widest(polytope.g, polytope.h, polytope.sides)
    if answer is None:
        return None, False
    point, multipliers = answer
    return (None, True) if polytope.empty(multipliers) else (point, False)


def polytope_of(
    reduced: Reduced,
    row: int,
    state: np.ndarray,
    region: Region,
    scale: float,
    lines: Triangle | None,
) -> _Polytope | None:
    """Where the fixed neurons of network `row` are on their sides; None if a constant neuron is on
    the wrong one.

    Free neurons that fixed ones depend on are relaxed to `z >= 0`, `z >= v` and, on bounded
    regions, z below its chord.
    """
    n = reduced.A.shape[2]
    a = reduced.A[row].numpy()
    b = reduced.B[row].numpy()
    c = reduced.c[row].numpy()
    fixed = np.flatnonzero(state >= 0)
    relaxed = feeding(b, fixed, state)
    sign = np.where(state[fixed] == 1, 1.0, -1.0)
    k = len(relaxed)
    sides = np.concatenate([sign[:, None] * a[fixed], sign[:, None] * b[np.ix_(fixed, relaxed)]], 1)
    above = np.concatenate([-a[relaxed], np.eye(k) - b[np.ix_(relaxed, relaxed)]], 1)
    positive = np.concatenate([np.zeros((k, n)), np.eye(k)], 1)
    g = np.concatenate([sides, above, positive])
    h = np.concatenate([-sign * c[fixed], c[relaxed], np.zeros(k)])
    if lines is not None:
        slope = lines.upper[row].numpy()[relaxed]
        shift = lines.shift[row].numpy()[relaxed]
        chord = np.concatenate(
            [slope[:, None] * a[relaxed], slope[:, None] * b[np.ix_(relaxed, relaxed)] - np.eye(k)],
            1,
        )
        g = np.concatenate([g, chord])
        h = np.concatenate([h, -slope * c[relaxed] - shift])
    g, h = _with_region(g, h - g[:, :n] @ region.centre.numpy(), region)
    length = np.sqrt((g * g).sum(1))
    if ((length == 0) & (h > 0)).any():
        return None
    some = length > 0
    ball = region.radius / scale if region.norm == 2 else math.inf
    return _Polytope(
        g[some] / length[some, None],
        h[some] / length[some] / scale,
        (np.arange(len(g)) < len(fixed))[some],
        n,
        ball,
    )


def _with_region(g: np.ndarray, h: np.ndarray, region: Region) -> tuple[np.ndarray, np.ndarray]:
    """The rows of the region below those of the neurons, in y: its box, and for an l1 ball
    `|y_i| <= a_i, sum a <= radius`.
    """
    n = len(region.low)
    low = (region.low - region.centre).numpy()
    high = (region.high - region.centre).numpy()
    eye = np.eye(n)
    width = g.shape[1]
    below = np.isfinite(low)
    over = np.isfinite(high)
    box = np.concatenate([eye[below], -eye[over]])
    g = np.concatenate([g, np.concatenate([box, np.zeros((len(box), width - n))], 1)])
    h = np.concatenate([h, low[below], -high[over]])
    if region.norm == 1 and region.radius < math.inf:
        zero = np.zeros((n, width - n))
        g = np.concatenate([g, np.zeros((len(g), n))], 1)
        sides = np.concatenate(
            [np.concatenate([-eye, zero, eye], 1), np.concatenate([eye, zero, eye], 1)]
        )
        total = np.concatenate([np.zeros(width), -np.ones(n)])[None]
        g = np.concatenate([g, sides, total])
        h = np.concatenate([h, np.zeros(2 * n), [-region.radius]])
    return g, h
