"""Exact worst-case loss of small networks: `sup E_P[loss]` over a Wasserstein ball, from both sides
(THEORY 2 and 3).

    V(eps) = min_{lam >= 0} lam eps^p + sum_i mu_i h_i(lam),      h_i(lam) = sup_{x in X} [loss(x,
    y_i) - lam ||x - x_i||_r^p].

Pieces. On a cell `{G x <= g}` the logits are affine. The margin loss is the largest of `<q, theta>
- theta_k` over the corners q of the simplex of classes (without k). Cross entropy is the largest of
`<q, theta> - theta_k + H(q)` over all of the simplex (Gibbs), and H lies below its tangent at any
q0, `H(q) <= -<q, log q0>`. So on a part of the simplex with corners q_v it is at most `max_v <q_v,
theta> - theta_k - <q_v, log q0>`: affine pieces again, and better ones when the part is halved.

Certificates. For `f = <a, x> + b` on a cell any `u >= 0` gives, with `w = a - G^T u`, for EVERY
sample and every penalty phi

    sup_{x in cell} f(x) - phi(||x - x_i||_r) <= <w, x_i> + b + <u, g> + phi*(||w||_s),
    phi*(nu) = sup_t [nu t - phi(t)],

so one solved piece prunes for all samples and multipliers. The best u is the multiplier of a small
concave program, solved by HiGHS (r = 1, inf) or by projections (r = 2); whatever it returns, the
inequality is evaluated with outward rounding.

Outer problem. Each maximiser x found is a line `loss(x, y_i) - lam ||x - x_i||^p` below `h_i`. The
smallest value of the lines' upper envelope is a linear program whose solution is a distribution:
the lower side; the certificates at its multiplier are the upper side. For r = 1, inf, p = 1 and the
margin loss both meet after finitely many steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog, nnls  # type: ignore[import-untyped]
from scipy.sparse import block_diag  # type: ignore[import-untyped]
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.cells import enumerate_cells, nearest_point
from wassail.certificates.piecewise import Piecewise
from wassail.certificates.region import Region, Where
from wassail.errors import InputError
from wassail.geometry import distances, maximiser, pull_inside
from wassail.losses import LIPSCHITZ, cross_entropy, strongest_rival
from wassail.rounding import sized
from wassail.threat import dual, parse_norm, parse_order
from wassail.transport import sample_weights, transport_cost

Array: TypeAlias = NDArray[np.float64]
Task: TypeAlias = "tuple[Array, Array, Array, float]"  # a (n,), G (R, n), h (R,), nu
Solution: TypeAlias = "tuple[Array, Array]"  # a maximiser d (n,) and multipliers u (R,) of G d <= h
Plan: TypeAlias = "list[tuple[int, int, float]]"  # sample, its evaluated point, mass

# a certificate for a multiplier this much larger, relatively, is accepted; the dual value pays for
# it
LIFT = 1e-11
FAR = (
    2.0**40
    # how far a point "at infinity" is; its mass is eps / FAR, so what is lost is of the order of 1
    # / FAR
)
BATCH = 32  # pieces handed to the solver at once
TIGHT = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


@dataclass(frozen=True, eq=False)
class WorstCase:
    """The worst expected loss over `Omega_p(eps)` and a distribution that attains the lower side.

    bound: the bracket; lam: the dual multiplier behind the upper side (NaN for order inf, or where
    the upper side is a slope); atoms `(M, n)`, atom_labels `(M,)`, masses `(M,)` summing to 1, and
    root `(M,)`, the sample each atom comes from: at most one sample has two atoms, all others have
    one; cost: `(sum_m masses_m ||atom_m - x_root||_r^p)^(1/p)`, for order inf the largest distance,
    recomputed in float64 and at most eps; far: an atom stands for a point at infinity, where the
    supremum is approached and not attained.
    """

    bound: Bound
    lam: float
    atoms: Tensor
    atom_labels: Tensor
    masses: Tensor
    root: Tensor
    cost: float
    far: bool


def worst_case_network(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    *,
    norm: float,
    order: float,
    eps: float,
    domain: Where = None,
    loss: str = "margin",
    mu: Tensor | None = None,
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells_limit: int = 100_000,
) -> WorstCase:
    """The worst expected loss within Wasserstein-`order` distance `eps` of samples x `(N, n)`,
    labels y and weights mu `(N,)`.

    norm: ground norm r; domain: a box `(low, high)` or None for R^n; loss: "margin" or
    "cross_entropy". Stops when the bracket is narrower than `tolerance * max(1, |upper|)`, or at
    the time limit (seconds) with the bracket so far; a limit that ends before the cells are listed
    is an `InputError`. The upper side rests on that list (`enumerate_cells`: all cells that hold a
    ball of radius 1e-9).
    """
    p = parse_order(order)
    if not 0 <= eps < math.inf:
        raise InputError(f"eps is {eps!r}, but a budget must be finite and not negative.")
    with _limited(time_limit):
        problem = _Problem(network, x, y, norm, domain, loss, mu, cells_limit)
        # X is convex and Omega_p lies in Omega_1, so the margin slope holds for every order (THEORY
        # 3).
        clean = problem.average(problem.clean + problem.errors)
        upper = clean + problem.steepest * eps * (1 + LIFT)
        lam = math.nan
        if p == math.inf or eps == 0 or problem.steepest == 0:
            penalty = Penalty(math.inf, eps)
            upper = min(upper, problem.dual(penalty, tolerance * max(1.0, abs(clean)) / 4))
            plan = problem.best(penalty)
        else:
            upper, lam, plan = _descend(problem, eps, p, upper, tolerance)
        return problem.report(plan, upper, lam, p)


@contextmanager
def _limited(time_limit: float | None) -> Iterator[None]:
    """A time limit; before the cells are listed nothing is known, so that there is nothing to
    keep.
    """
    with clock.limited(time_limit):
        try:
            yield
        except clock.Late:
            if time_limit is None:  # the limit of somebody else
                raise
            raise InputError(
                f"the cells were not listed within the time limit of {time_limit:g} s: give more "
                "time, or use loss_curve."
            ) from None


def _descend(
    problem: _Problem, eps: float, p: float, upper: float, tolerance: float
) -> tuple[float, float, Plan]:
    """Cutting planes in the multiplier, from the first upper bound on: the final one, its
    multiplier, the distribution.
    """
    if p == 1 and problem.unbounded:
        problem.add_far_points()
    # No certificates below the slope at infinity if p = 1, and in a box none below rounding: that
    # costs next to nothing there.
    least = max(
        1e-13 * problem.steepest, problem.flattest if p == 1 or not problem.unbounded else 0.0
    )
    floor = least * eps ** (1 - p)
    steep = problem.steepest * eps ** (1 - p) / p
    # the bound to start from is the dual value at `steep`
    lam = floor if p == 1 else steep
    best = steep
    tried = [lam]
    gap = math.inf
    plan = problem.allocate(eps**p, p)[0]
    while True:
        goal = tolerance * max(1.0, abs(upper))
        fine = (
            max(goal, (upper - problem.value(plan)) / 2) / 4
        )  # no finer than the bracket has use for
        value = (1 + 2 * LIFT) * lam * eps**p + problem.dual(Penalty(p, lam), fine)
        if value < upper:
            upper = value
            best = (1 + 2 * LIFT) * lam
        plan, lam = problem.allocate(eps**p, p)
        gap, before = upper - problem.value(plan), gap
        if gap <= goal or problem.late():
            return upper, best, plan
        if (
            lam == 0 and p > 1 and problem.unbounded
        ):  # the points known do not use up the budget: look farther out
            lam = min(tried) / 4
        lam = max(lam, floor)
        if gap > 0.9 * before and any(math.isclose(lam, other, rel_tol=1e-13) for other in tried):
            return upper, best, plan
        tried.append(lam)


def growth(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    radii: Sequence[float],
    *,
    norm: float,
    domain: Where = None,
    loss: str = "margin",
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells_limit: int = 100_000,
) -> tuple[Tensor, Tensor]:
    """`sup { loss(x', y_i) - loss(x_i, y_i) : x' in X, ||x' - x_i||_r <= radius }`, both sides,
    `(N, len(radii))` each.
    """
    with _limited(time_limit):
        problem = _Problem(network, x, y, norm, domain, loss, None, cells_limit)
        lower, upper = np.zeros((2, len(problem.clean), len(radii)))
        for i, (place, radius) in itertools.product(range(len(lower)), enumerate(radii)):
            penalty = Penalty(math.inf, float(radius))
            upper[i, place] = (
                problem.evaluate(i, penalty, tolerance) - problem.clean[i] + problem.errors[i]
            )
            lower[i, place] = problem.highest(i, penalty) - problem.clean[i]
        return torch.from_numpy(np.minimum(lower, upper)), torch.from_numpy(upper)


def anchor(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    *,
    norm: float,
    domain: Where = None,
    loss: str = "margin",
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells_limit: int = 100_000,
) -> Bound:
    """The steepest chord `S = max(0, max_i sup_x [loss(x, y_i) - loss(x_i, y_i)] / ||x - x_i||_r)`
    (THEORY 3).

    By Dinkelbach's iteration: maximise `loss(x, y_i) - lam ||x - x_i||`, take the chord of the
    maximiser as the next lam, until no sample has a steeper one. The lower side is a chord between
    evaluated points. Above, a chord to a point at distance t is at most `lam + (h_i(lam) -
    loss(x_i)) / t`; nearer than that the loss is at most as steep as the pieces that lie so near.
    """
    with _limited(time_limit):
        return _steepest_chord(
            _Problem(network, x, y, norm, domain, loss, None, cells_limit), tolerance
        )


def anchor_and_offset(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    lam: float,
    *,
    norm: float,
    domain: Where = None,
    loss: str = "margin",
    mu: Tensor | None = None,
    tolerance: float = 1e-6,
    time_limit: float | None = None,
    cells_limit: int = 100_000,
) -> tuple[Bound, float, tuple[Tensor, Tensor]]:
    """`anchor`, and an upper bound on `C(lam) = sum_i mu_i sup_x [loss(x, y_i) - lam ||x -
    x_i||_r]` from the same cells.

    On R^n `lam` must not be below the slope at infinity, where the supremum is infinite (THEORY 3).
    Last, the points evaluated on the way: the sample each belongs to `(M,)`, and the point `(M,
    n)`.
    """
    with _limited(time_limit):
        problem = _Problem(network, x, y, norm, domain, loss, mu, cells_limit)
        chord = _steepest_chord(problem, tolerance)
        offset = problem.dual(Penalty(1.0, lam), tolerance)
        roots = [torch.full((pool.size,), i) for i, pool in enumerate(problem.pools)]
        points = [torch.from_numpy(pool.rows[:, 2:].copy()) for pool in problem.pools]
        return chord, offset, (torch.cat(roots), torch.cat(points))


def _steepest_chord(problem: _Problem, tolerance: float) -> Bound:
    problem.add_near_points()
    if problem.unbounded:
        problem.add_far_points()
    count = len(problem.clean)
    lam = max(problem.flattest, 1e-12 * problem.steepest)
    for i in range(count):
        lam = max(lam, problem.steepest_chord(i)[0])
        while not problem.late():
            problem.evaluate(i, Penalty(1.0, lam), problem.resolution(i, tolerance))
            chord = problem.steepest_chord(i)[0]
            if chord <= lam * (1 + 1e-13):
                break
            lam = chord
    heights = [
        problem.evaluate(i, Penalty(1.0, lam), problem.resolution(i, tolerance))
        for i in range(count)
    ]
    upper = max(problem.chord_above(i, lam, height) for i, height in enumerate(heights))
    chords = [problem.steepest_chord(i) for i in range(count)]
    sample = max(range(count), key=lambda i: chords[i][0])
    lower = chords[sample][0]
    witness = torch.from_numpy(chords[sample][1].copy())
    rival = int(
        strongest_rival(problem.network.logits(witness[None]), problem.y[sample : sample + 1])[1]
    )
    return Bound(
        below(lower, upper, "steepest chord"),
        upper,
        "cells",
        witness,
        {**problem.info, "cut": clock.out_of_time(), "sample": sample, "rival": rival},
    )


@dataclass(frozen=True)
class Penalty:
    """`phi(t) = lam t^order`, or for order inf the wall `phi = 0` up to the radius `lam` and
    infinite beyond.
    """

    order: float
    lam: float

    def cost(self, t: Array) -> Array:
        """`phi(t)`."""
        if self.order == math.inf:
            return np.where(t <= self.lam, 0.0, math.inf)
        return self.lam * t**self.order

    def conjugate(self, nu: Array) -> Array:
        """`sup_{t >= 0} nu t - phi(t)`, rounded up; for order 1 with the multiplier lifted."""
        if self.order == math.inf:
            return nu * self.lam * (1 + 1e-15)
        if self.order == 1:
            return np.where(nu <= self.lam * (1 + LIFT), 0.0, math.inf)
        power = self.order / (self.order - 1)
        with np.errstate(over="ignore"):  # infinite is right: orders just above 1
            return (
                (self.order - 1)
                * self.lam
                * (nu / (self.lam * self.order)) ** power
                * (1 + 1e-14 * power)
            )

    def reach(self, nu: float) -> float:
        """The t where `nu t - phi(t)` is largest (order above 1)."""
        if self.order == math.inf:
            return self.lam
        with np.errstate(over="ignore"):
            return float(np.float64(nu / (self.lam * self.order)) ** (1 / (self.order - 1)))

    def slope(self, t: float) -> float:
        """`phi'(t)` within the radius."""
        if self.order == math.inf:
            return 0.0
        return float(self.lam * self.order * t ** (self.order - 1))


class _Table:
    """Rows of fixed width that are appended one by one, kept in one array."""

    def __init__(self, width: int) -> None:
        self._data = np.zeros((64, width))
        self.size = 0

    def append(self, row: Array) -> int:
        if self.size == len(self._data):
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
        self._data[self.size] = row
        self.size += 1
        return self.size - 1

    @property
    def rows(self) -> Array:
        return self._data[: self.size]


@dataclass(frozen=True, eq=False)
class _Atlas:
    """The cells as arrays: `theta = J x + q` on `{G x <= g}` with rows of length one, and
    magnitudes for the rounding errors.

    J `(m, K, n)`, q `(m, K)`, G `(m, R, n)`, g `(m, R)`, a point of each cell `(m, n)`. What was
    computed is off by at most `rounding` times the same quantity of the network of absolute values,
    `*_size`.
    """

    J: Array
    q: Array
    G: Array
    g: Array
    J_size: Array
    q_size: Array
    G_size: Array
    g_size: Array
    points: Array
    rounding: float
    norm: float
    unbounded: bool

    @classmethod
    def make(cls, network: Piecewise, region: Region, norm: float, limit: int) -> _Atlas:
        cells = enumerate_cells(network, region, limit)
        if not cells.complete:
            raise InputError(
                "rounding hides some cells of this network: use bounds that branch instead of "
                "listing cells."
            )
        n = network.inputs
        m = len(cells)
        P, p, J, q = (v.numpy() for v in network.affine(cells.masks))
        P_size, p_size, J_size, q_size = (
            v.numpy() for v in _magnitudes(network).affine(cells.masks)
        )
        rounding = (
            (2 + len(network.blocks())) * (network.neurons + n + network.outputs + 8) * 2.0**-52
        )
        dead = (np.abs(P) <= rounding * P_size).all(
            2
        )  # a constant neuron bounds nothing, and to drop a row is sound
        scale = np.where(
            dead,
            0.0,
            np.where(cells.masks.numpy(), -1.0, 1.0)
            / np.where(dead, 1.0, np.linalg.norm(P, axis=2)),
        )
        walls = np.vstack([np.eye(n), -np.eye(n)])
        limits = np.concatenate([region.high.numpy(), -region.low.numpy()])
        walls = walls[np.isfinite(limits)]
        limits = limits[np.isfinite(limits)]
        if not P.shape[1] + len(
            walls
        ):  # a linear network on R^n: one cell, and the solvers want a row
            walls = np.zeros((1, n))
            limits = np.ones(1)
        return cls(
            J=J,
            q=q,
            G=np.concatenate([scale[..., None] * P, np.broadcast_to(walls, (m, *walls.shape))], 1),
            g=np.concatenate(
                [np.where(dead, 1.0, -scale * p), np.broadcast_to(limits, (m, len(limits)))], 1
            ),
            J_size=J_size,
            q_size=q_size,
            G_size=np.concatenate(
                [np.abs(scale)[..., None] * P_size, np.zeros((m, *walls.shape))], 1
            ),
            g_size=np.concatenate([np.abs(scale) * p_size, np.zeros((m, len(limits)))], 1),
            points=cells.points.numpy(),
            rounding=rounding,
            norm=norm,
            unbounded=not region.bounded,
        )

    def away(self, x: Array) -> Array:
        """Lower bounds on the distances of the cells from a point x `(n,)`: `(m,)`."""
        excess = (
            self.G @ x
            - self.g
            - self.rounding
            * ((self.G_size + np.abs(self.G)) @ np.abs(x) + self.g_size + np.abs(self.g))
        )
        lengths = np.linalg.norm(self.G, dual(self.norm), axis=2) + self.rounding * self.G_size.sum(
            2
        )
        return np.asarray(
            (excess / np.where(lengths > 0, lengths, 1.0)).clip(min=0).max(1, initial=0.0)
        )


class _Family:
    """The affine pieces of the loss of one label k, with their certificates.

    A vertex is a pair (cell, q) with `f = <a, x> + b`, `a = J^T (q - e_k)`. A cut `(w, constant,
    nu, vertex)` is a certificate. A leaf is a part of the simplex over one cell: the vertices at
    its corners, with the offsets of the entropy's tangent.
    """

    def __init__(self, atlas: _Atlas, label: int, splits: bool, reach: float) -> None:
        n = atlas.J.shape[2]
        k = atlas.J.shape[1]
        self.atlas = atlas
        self.label = label
        self.splits = splits
        self.reach = (
            reach  # the largest coordinate of a sample: rounding errors of w cost that much
        )
        self.ids: dict[tuple[int, bytes], int] = {}
        self.cells: list[int] = []
        self.weights = _Table(k)
        self.forms = _Table(n + 1)
        self.cuts = _Table(n + 3)
        self.flat: list[
            int
        ] = []  # of each vertex the cut of smallest nu: a constant where the cell is bounded
        self.plain: list[int] = []  # the one with u = 0
        self.last: list[int] = []  # and the newest
        self.rays: list[
            Array | None
        ] = []  # the direction in which a piece on an unbounded cell grows at that rate
        self.flattened: set[int] = (
            set()
        )  # the vertices whose `flat` is the flattest there is, and not only a mean
        rivals = [j for j in range(k) if splits or j != label]
        corners = np.array(
            [[self._vertex(c, q) for q in np.eye(k)[rivals]] for c in range(len(atlas.J))]
        )
        for start in range(0, self.forms.size, BATCH):
            self._flatten(list(range(start, min(start + BATCH, self.forms.size))))
        leaves = corners if splits else corners.reshape(-1, 1)
        self.leaves = _Table(leaves.shape[1])
        self.offsets = _Table(leaves.shape[1])
        for leaf in leaves:
            self._leaf(leaf)

    def bounds(self, x: Array, penalty: Penalty) -> Array:
        """Upper bounds on every vertex for a sample x `(n,)`: `(V,)`."""
        n = len(x)
        cuts = self.cuts.rows
        height = cuts[:, :n] @ x + cuts[:, n]
        nu = cuts[:, n + 1]
        vertex = cuts[:, n + 2].astype(np.int64)
        value = height + penalty.conjugate(nu)
        if (
            penalty.order == 1
        ):  # certificates may be mixed: one too steep for lam with the flattest one, until it fits
            flat = np.array(self.flat)[vertex]
            mix = (nu > penalty.lam * (1 + LIFT)) & (nu[flat] <= penalty.lam)
            share = (penalty.lam - nu[flat][mix]) / (nu - nu[flat])[mix]
            value[mix] = height[flat][mix] + share * (height - height[flat])[mix]
        best = np.full(self.forms.size, math.inf)
        np.minimum.at(best, vertex, value)
        return best

    def solve(
        self, vertices: list[int], x: Array, penalty: Penalty, tolerance: float
    ) -> list[Array]:
        """Find the best certificates of vertices for the sample x; returns the points where
        they are attained.
        """
        if penalty.order == 1:
            nus = [max(penalty.lam, self._smallest(v)) for v in vertices]
            return [
                x + d for d in self._maximise(vertices, [x] * len(vertices), nus) if d is not None
            ]
        return [x + d for v in vertices for d in self._search(v, x, penalty, tolerance)]

    def excess(self, leaf: int) -> float:
        """By how much the entropy's tangent overshoots at the corners of a leaf: `max_v KL(q_v,
        q0)`.
        """
        q = self.weights.rows[self.leaves.rows[leaf].astype(np.int64)]
        return float(
            (
                self.offsets.rows[leaf]
                + np.where(q > 0, q * np.log(np.where(q > 0, q, 1.0)), 0.0).sum(1)
            ).max()
        )

    def split(self, leaf: int) -> None:
        """Halve a part of the simplex at its longest edge."""
        ids = self.leaves.rows[leaf].astype(np.int64)
        q = self.weights.rows[ids]
        edges = np.linalg.norm(q[:, None] - q[None], axis=2)
        first, second = (int(v) for v in np.unravel_index(edges.argmax(), edges.shape))
        new = self._vertex(self.cells[ids[0]], (q[first] + q[second]) / 2)
        if (
            self.flat[new] == self.plain[new]
        ):  # the mean of two certificates is one of the mid-point
            self.flat[new] = self._mean_cut(new, self.flat[ids[first]], self.flat[ids[second]])
            self.last[new] = self._mean_cut(new, self.last[ids[first]], self.last[ids[second]])
        one = ids.copy()
        other = ids.copy()
        one[first], other[second] = new, new
        self._leaf(one, leaf)
        self._leaf(other)

    def _vertex(self, cell: int, q: Array) -> int:
        key = (cell, q.tobytes())
        if key not in self.ids:
            turn = q.copy()
            turn[self.label] -= 1
            self.ids[key] = self.forms.append(
                np.append(turn @ self.atlas.J[cell], turn @ self.atlas.q[cell])
            )
            self.weights.append(q)
            self.cells.append(cell)
            self.plain.append(self._cut(self.ids[key], np.zeros(self.atlas.G.shape[1])))
            for cuts in (self.flat, self.last):
                cuts.append(self.plain[-1])
            self.rays.append(None)
        return self.ids[key]

    def _leaf(self, ids: NDArray[np.int64], place: int | None = None) -> None:
        """A new leaf, or one in the place of another; for cross entropy with `H(q) <= -<q, log
        q0>` at its barycentre q0.
        """
        offsets = np.zeros(len(ids))
        if self.splits:
            q = self.weights.rows[ids]
            offsets = -q @ np.log(q.mean(0)) * (1 + 1e-14) + 1e-15  # rounded up
        if place is None:
            self.leaves.append(ids.astype(np.float64))
            self.offsets.append(offsets)
        else:
            self.leaves.rows[place], self.offsets.rows[place] = ids, offsets

    def _smallest(self, vertex: int) -> float:
        """The smallest nu that has a certificate."""
        return float(self.cuts.rows[self.flat[vertex], -2])

    def _cut(self, vertex: int, u: Array) -> int:
        """Store the certificate of multipliers u >= 0, rounded outward: w, `b + <u, g>` and `nu
        >= ||w||_s`.
        """
        cell = self.cells[vertex]
        atlas = self.atlas
        a = self.forms.rows[vertex, :-1]
        b = self.forms.rows[vertex, -1]
        turn = self.weights.rows[vertex].copy()
        turn[self.label] += 1
        w = a - u @ atlas.G[cell]
        constant = b + u @ atlas.g[cell]
        error = atlas.rounding * (
            turn @ atlas.J_size[cell] + u @ (atlas.G_size[cell] + np.abs(atlas.G[cell]))
        )
        size = (
            turn @ atlas.q_size[cell]
            + u @ (atlas.g_size[cell] + np.abs(atlas.g[cell]))
            + np.abs(w).sum() * self.reach
        )
        nu = np.linalg.norm(w, dual(atlas.norm)) * (1 + atlas.rounding) + np.linalg.norm(
            error, dual(atlas.norm)
        )
        return self.cuts.append(
            np.concatenate(
                [w, [constant + atlas.rounding * size + error.sum() * self.reach, nu, vertex]]
            )
        )

    def _mean_cut(self, vertex: int, first: int, second: int) -> int:
        mean = (self.cuts.rows[first] + self.cuts.rows[second]) / 2
        mean[-1] = vertex
        return self.cuts.append(mean)

    def _flatten(self, vertices: list[int]) -> None:
        """The flattest certificates of new vertices, best at a point of the cell."""
        slopes: list[tuple[float, Array, Array | None]] = [
            (0.0, np.zeros(self.atlas.G.shape[1]), None)
        ] * len(vertices)
        if self.atlas.unbounded:
            pieces = [(self.forms.rows[v, :-1], self.atlas.G[self.cells[v]]) for v in vertices]
            slopes = _recessions(pieces, self.atlas.norm)
        for v, (_, u, ray) in zip(vertices, slopes):
            self.flat[v], self.rays[v] = self._cut(v, u), ray
        self._maximise(
            vertices,
            [self.atlas.points[self.cells[v]] for v in vertices],
            [nu for nu, _, _ in slopes],
        )
        for v in vertices:
            tiny = 1e-13 * float(np.linalg.norm(self.forms.rows[v, :-1]))  # as flat, up to rounding
            if self.cuts.rows[self.last[v], -2] <= self._smallest(v) * (1 + LIFT / 2) + tiny:
                self.flat[v] = self.last[v]
        self.flattened.update(vertices)

    def _maximise(
        self, vertices: list[int], centres: list[Array], nus: list[float]
    ) -> list[Array | None]:
        """`argmax <a, d> - nu ||d||_r` over the cells seen from the centres, one for each
        vertex; keeps the certificates.
        """
        tasks = []
        for v, centre, nu in zip(vertices, centres, nus):
            rows = self.atlas.G[self.cells[v]]
            tasks.append(
                (
                    self.forms.rows[v, :-1].copy(),
                    rows,
                    self.atlas.g[self.cells[v]] - rows @ centre,
                    nu,
                )
            )
        found: list[Array | None] = []
        for v, solution in zip(vertices, _programs(tasks, self.atlas.norm)):
            found.append(None if solution is None else solution[0])
            if solution is not None:
                self.last[v] = self._cut(v, solution[1])
        return found

    def _search(self, vertex: int, x: Array, penalty: Penalty, tolerance: float) -> list[Array]:
        """Maximise `<a, d> - phi(||d||)` along the concave curve `t -> max { <a, d> : ||d|| <= t
        }`, slope by slope.

        Between a point too far and one too near the next slope is that of their chord; when the
        curve does not rise above the chord, the best mixture of the two is the maximiser.
        """
        a = self.forms.rows[vertex, :-1].copy()
        norm = self.atlas.norm
        low = self._smallest(vertex)
        steep = float(self.cuts.rows[self.plain, -2].max())

        def at(nu: float) -> Array | None:
            return self._maximise([vertex], [x], [nu])[0]

        def length(d: Array) -> float:
            return float(np.linalg.norm(d, norm))

        far = (
            at(0.0) if low <= 1e-9 * steep else None
        )  # what is rounding only is 0, unless that leaves the program unbounded
        far = at(low) if far is None else far
        if far is None:
            return []
        if length(far) <= penalty.reach(low):
            if vertex not in self.flattened:
                self._flatten([vertex])
                return self._search(vertex, x, penalty, tolerance)
            ray = self.rays[vertex]
            if ray is not None:  # the piece goes on growing at this rate: follow it
                step = 0.0
                for _ in range(8):
                    step += penalty.reach(low) - length(far + step * ray)
                far = far + step * ray
            return [far]
        high = 2 * steep
        near = None
        for _ in range(6):
            near = at(high)
            if near is None or length(near) <= penalty.reach(high):
                break
            high *= 16
        if near is None or length(near) > penalty.reach(high):
            return []  # order inf and a cell out of reach: the certificates at steep slopes say so
        upper = math.inf
        best = -math.inf
        answer = near
        for _ in range(60):
            t_far = length(far)
            t_near = length(near)
            if t_far <= t_near:  # one point, whatever the slope
                at(max(penalty.slope(t_near), low))
                break
            chord = max(float(a @ (far - near)) / (t_far - t_near), low)
            t = min(max(penalty.reach(chord), t_near), t_far)
            mixed = near + (t - t_near) / (t_far - t_near) * (far - near)
            value = float(a @ mixed - penalty.cost(np.array(min(length(mixed), t))))
            if value > best:
                best = value
                answer = mixed
            nu = (
                chord
                if t_near < t < t_far or penalty.order == math.inf
                else max(penalty.slope(t), low)
            )
            point = at(nu)
            if point is None:
                break
            upper = min(
                upper,
                float(a @ point) - nu * length(point) + float(penalty.conjugate(np.array(nu))),
            )
            if upper - best <= max(tolerance / 4, 1e-14 * abs(best)):
                break
            if length(point) > penalty.reach(nu):
                far = point
            else:
                near = point
        return [answer]


class _Problem:
    """Samples, cells, and everything evaluated or proved so far."""

    def __init__(
        self,
        network: Piecewise,
        x: Tensor,
        y: Tensor,
        norm: float,
        domain: Where,
        loss: str,
        mu: Tensor | None,
        limit: int,
    ) -> None:
        if loss == "dlr":
            raise InputError(
                "the DLR loss is a ratio, neither Lipschitz nor affine on cells: use 'margin' or "
                "'cross_entropy'."
            )
        if loss not in LIPSCHITZ:
            raise InputError(
                f"loss {loss!r} is not known here: choose 'margin' or 'cross_entropy'."
            )
        self.network = network
        self.loss = LIPSCHITZ[loss]
        self.norm = parse_norm(norm)
        self.x = x.detach().cpu().double().flatten(1)
        self.y = y.detach().cpu().long()
        self.region = Region.make(domain, network.inputs)
        if self.region.radius < math.inf:
            raise InputError(
                "the domain of a worst case is a box or None: for a ball use order inf with eps "
                "as its radius."
            )
        if self.x.shape != (len(self.y), network.inputs) or not len(self.y):
            raise InputError(
                f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit a network of "
                f"{network.inputs} inputs."
            )
        if not self.region.contains(self.x).all() or not torch.isfinite(self.x).all():
            raise InputError(
                "a sample lies outside the domain: clamp the samples or give the box they live in."
            )
        self.unbounded = not self.region.bounded
        self.points = self.x.numpy()
        self.mu = sample_weights(mu, len(self.y)).numpy()
        self.clean = self.loss(network.logits(self.x), self.y).numpy()
        self.pools = [
            _Table(2 + network.inputs) for _ in self.points
        ]  # evaluated points: loss, distance, point
        for pool, value, point in zip(self.pools, self.clean, self.points):
            pool.append(np.concatenate([[value, 0.0], point]))
        self.atlas = _Atlas.make(network, self.region, self.norm, limit)
        reach = float(np.abs(self.points).max())
        splits = loss == "cross_entropy"
        self.families = {
            k: _Family(self.atlas, k, splits, reach) for k in sorted(set(self.y.tolist()))
        }
        self.info: dict[str, Any] = {
            "norm": self.norm,
            "domain": str(self.region),
            "loss": loss,
            "cells": len(self.atlas.J),
        }
        # The longest gradient of a piece: Lm over the cells, rounded up.
        self.steepest = max(float(f.cuts.rows[f.plain, -2].max()) for f in self.families.values())
        # The smallest multiplier every piece has a certificate for: the slope at infinity; in a box
        # nothing but rounding.
        self.flattest = max(float(f.cuts.rows[f.flat, -2].max()) for f in self.families.values())

        self.errors = self._error(self.points)

    def late(self) -> bool:
        return clock.late()

    def average(self, values: Array) -> float:
        """`sum_i mu_i values_i`, rounded up."""
        return float(self.mu @ values + (len(values) + 4) * 2.0**-52 * (self.mu @ np.abs(values)))

    def highest(self, i: int, penalty: Penalty) -> float:
        """The best evaluated point of sample i."""
        rows = self.pools[i].rows
        return float((rows[:, 0] - penalty.cost(rows[:, 1])).max())

    def add(self, i: int, points: list[Array], radius: float = math.inf) -> None:
        """Evaluate points, pulled into the domain and the radius, and keep them for sample i."""
        if not points:
            return
        x = torch.from_numpy(np.array(points)).clamp(self.region.low, self.region.high)
        centre = self.x[i].expand(len(points), -1)
        if radius < math.inf:
            x = pull_inside(x, centre, self.norm, radius).clamp(self.region.low, self.region.high)
        losses = self.loss(self.network.logits(x), self.y[i].expand(len(x)))
        for loss, distance, point in zip(
            losses.tolist(), distances(x, centre, self.norm).tolist(), x.numpy()
        ):
            self.pools[i].append(np.concatenate([[loss, distance], point]))

    def add_far_points(self) -> None:
        """On R^n the slope at infinity is approached along a ray: a point far out on the
        steepest one of each label.
        """
        scale = FAR * max(1.0, float(np.abs(self.points).max()))
        for k, family in self.families.items():
            ray = family.rays[int(family.cuts.rows[family.flat, -2].argmax())]
            for i in np.flatnonzero(self.y.numpy() == k).tolist():
                self.add(i, [] if ray is None else [self.points[i] + scale * ray])

    def add_near_points(self) -> None:
        """Steps from each sample along the gradients of the pieces that meet there, to the wall
        of their cell.
        """
        for i, x in enumerate(self.points):
            for c in np.flatnonzero(self.atlas.away(x) == 0).tolist():
                for a in self._turns(i) @ self.atlas.J[c]:
                    d = maximiser(torch.from_numpy(a)[None], self.norm)[0].numpy()
                    speed = self.atlas.G[c] @ d
                    room = self.atlas.g[c] - self.atlas.G[c] @ x
                    step = float((room[speed > 1e-12] / speed[speed > 1e-12]).min(initial=1.0))
                    self.add(i, [x + step * d, x + 2.0**-12 * step * d] if step > 0 else [])

    def evaluate(self, i: int, penalty: Penalty, tolerance: float) -> float:
        """An upper bound on `sup_x loss(x, y_i) - phi(||x - x_i||)`, within the tolerance of a
        point found, unless it is late.

        Best first: the leaves with the highest bounds are solved, and what is solved already is
        split.
        """
        family = self.families[int(self.y[i])]
        x = self.points[i]
        solved = np.zeros(family.forms.size, bool)
        while True:
            best = self.highest(i, penalty)
            leaves = family.leaves.rows.astype(np.int64)
            heights = family.bounds(x, penalty)[leaves] + family.offsets.rows
            tops = heights.max(1)
            busy = np.argsort(-tops, kind="stable")[:BATCH]
            busy = busy[tops[busy] > best + tolerance]
            vertices = leaves[busy, heights[busy].argmax(1)]
            todo = sorted(set(vertices[~solved[vertices]].tolist()))
            ripe = [
                leaf
                for leaf in busy[solved[vertices]].tolist()
                if family.splits and family.excess(leaf) > tolerance / 8
            ]
            if self.late() or not (todo or ripe):
                return float(max(tops.max(), best))
            for leaf in ripe:
                family.split(leaf)
            clock.spend(len(todo) * clock.STEP)
            points = family.solve(todo, x, penalty, tolerance)
            self.add(i, points, penalty.lam if penalty.order == math.inf else math.inf)
            solved[todo] = True
            solved = np.append(solved, np.zeros(family.forms.size - len(solved), bool))

    def dual(self, penalty: Penalty, tolerance: float) -> float:
        """`sum_i mu_i sup_x [loss(x, y_i) - phi(||x - x_i||)]` from above."""
        return self.average(
            np.array([self.evaluate(i, penalty, tolerance) for i in range(len(self.clean))])
        )

    def resolution(self, i: int, tolerance: float) -> float:
        """How finely a chord of sample i is resolved: the margin loss down to rounding, it
        takes finitely many steps.
        """
        return (
            tolerance * max(1.0, abs(self.clean[i]))
            if self.loss is cross_entropy
            else float(self.errors[i])
        )

    def best(self, penalty: Penalty) -> Plan:
        """The best point of every sample."""
        found = [pool.rows[:, 0] - penalty.cost(pool.rows[:, 1]) for pool in self.pools]
        return [(i, int(value.argmax()), float(self.mu[i])) for i, value in enumerate(found)]

    def allocate(self, budget: float, order: float) -> tuple[Plan, float]:
        """The best distribution on the evaluated points, `max sum m_ij loss_ij : sum m_ij d_ij^p <=
        budget`; its multiplier.

        The steps of each sample's concave envelope are taken in the order of their slopes until the
        budget is spent; the last one in part. That is the whole linear program (THEORY 2).
        """
        # so that no rounding overspends it
        steps = []
        place = [0] * len(self.pools)
        budget = budget * (1 - 1e-14)
        for i, pool in enumerate(self.pools):
            cost = pool.rows[:, 1] ** order
            loss = pool.rows[:, 0]
            hull = _envelope(cost, loss)
            place[i] = hull[0]
            for m, k in itertools.pairwise(hull):
                steps.append(
                    (
                        float((loss[k] - loss[m]) / (cost[k] - cost[m])),
                        i,
                        m,
                        k,
                        float(cost[k] - cost[m]),
                    )
                )
        for slope, i, m, k, length in sorted(steps, key=lambda step: -step[0]):
            if self.mu[i] * length <= budget:
                place[i], budget = k, budget - self.mu[i] * length
                continue
            share = budget / (self.mu[i] * length)
            plan = [(j, at, float(self.mu[j])) for j, at in enumerate(place) if j != i]
            return [
                *plan,
                (i, m, float(self.mu[i] * (1 - share))),
                (i, k, float(self.mu[i] * share)),
            ], slope
        return [(j, at, float(self.mu[j])) for j, at in enumerate(place)], 0.0

    def value(self, plan: Plan) -> float:
        """The expected loss of a plan."""
        return math.fsum(mass * self.pools[i].rows[at, 0] for i, at, mass in plan)

    def report(self, plan: Plan, upper: float, lam: float, order: float) -> WorstCase:
        """The plan as tensors, everything recomputed from them."""
        plan = sorted(entry for entry in plan if entry[2] > 0)
        root = torch.tensor([i for i, _, _ in plan])
        masses = torch.tensor([mass for _, _, mass in plan], dtype=torch.float64)
        atoms = torch.from_numpy(np.array([self.pools[i].rows[at, 2:] for i, at, _ in plan]))
        losses = self.loss(self.network.logits(atoms), self.y[root])
        moved = distances(atoms, self.x[root], self.norm)
        lower = below(math.fsum((masses * losses).tolist()), upper, "worst-case loss")
        info = {
            **self.info,
            "cut": clock.out_of_time(),
            "order": order,
            "points": sum(pool.size for pool in self.pools),
        }
        cost = transport_cost(masses, torch.ones_like(masses), moved, order)
        far = bool((moved >= FAR).any())
        return WorstCase(
            Bound(lower, upper, "cells", None, info),
            lam,
            atoms,
            self.y[root],
            masses,
            root,
            cost,
            far,
        )

    def steepest_chord(self, i: int) -> tuple[float, Array]:
        """The steepest chord from sample i to an evaluated point, rounded down, and that point."""
        rows = self.pools[i].rows
        error = self._error(rows[:, 2:])
        rise = rows[:, 0] - self.clean[i] - error - self.errors[i]
        chord = np.where(rows[:, 1] > 0, rise / np.where(rows[:, 1] > 0, rows[:, 1], 1.0), 0.0)
        return float(chord.max()) * (1 - self.atlas.rounding), rows[chord.argmax(), 2:]

    def chord_above(self, i: int, lam: float, height: float) -> float:
        """An upper bound on the chords of sample i, given `height >= h_i(lam)` and the
        certificates behind it.
        """
        bound = (
            self._smooth_chord(i, lam, height)
            if self.loss is cross_entropy
            else self._margin_chord(i, lam)
        )
        return min(self.steepest, bound)

    def _margin_chord(self, i: int, lam: float) -> float:
        """Piece by piece: a chord to a point x at distance t, where the piece is the loss, is at
        most

        - `lam + (bound - loss(x_i)) / t`, for any t up to the distance of the cell, or up to where
          a piece that is lower by `gap` at x_i overtakes the cone `loss(x_i) + lam t`, that is `gap
          / (||a|| - lam)`;
        - `||a||` if the cell meets x_i, or the slope of a chord to the point where the segment from
          x_i to x enters the cell.
        """
        family = self.families[int(self.y[i])]
        x = self.points[i]
        top = lam * (1 + LIFT)
        least = self.clean[i] - self.errors[i]
        plain = family.cuts.rows[family.plain]
        steep = plain[:, -2]
        gap = least - plain[:, :-3] @ x - plain[:, -3]
        overtakes = np.where(
            (steep > top) & (gap > 0), gap / np.where(steep > top, steep - top, 1.0), 0.0
        )
        away = self.atlas.away(x)[family.cells]
        t = np.maximum(away, overtakes)
        rest = (family.bounds(x, Penalty(1.0, lam)) - least).clip(min=0)
        chord = top + np.where(
            t > 0, rest / np.where(t > 0, t, 1.0), np.where(rest > 0, math.inf, 0.0)
        )
        return float(np.where(away == 0, np.minimum(chord, np.maximum(steep, top)), chord).max())

    def _smooth_chord(self, i: int, lam: float, height: float) -> float:
        """Cross entropy: beyond t a chord is at most `lam + (height - loss(x_i)) / t`. Within t it
        is at most the gradient

        `||J^T (q_i - e_k)||_s` of a cell that near, `q_i` the softmax at x_i, and `c^2 t / 8` more,
        where c is the longest `J^T (e_j - e_l)`: the softmax moves by at most `c t / 2` in the
        1-norm, and the gradient by c times half of that.
        """
        x = self.points[i]
        s = dual(self.norm)
        top = lam * (1 + LIFT)
        rest = max(height - float(self.clean[i] - self.errors[i]), 0.0)
        q = (
            torch.softmax(self.network.logits(self.x[i : i + 1]), 1).numpy()[0]
            - np.eye(self.network.outputs)[int(self.y[i])]
        )
        slack = self.atlas.rounding * self.atlas.J_size.sum((1, 2))
        gradients = np.linalg.norm(q @ self.atlas.J, s, axis=1) + slack
        pairs = (
            np.linalg.norm(self.atlas.J[:, :, None] - self.atlas.J[:, None], s, axis=3).max((1, 2))
            + slack
        )
        away = self.atlas.away(x)
        best = math.inf
        for t in 2.0 ** np.arange(-30.0, 10.0):
            near = away <= t
            best = min(
                best,
                max(top + rest / t, float(gradients[near].max() + pairs[near].max() ** 2 * t / 8)),
            )
        return best

    def _turns(self, i: int) -> Array:
        """The directions in logit space in which the loss of sample i can rise: a rival, or the
        softmax, less the label.
        """
        k = self.network.outputs
        label = int(self.y[i])
        if self.loss is cross_entropy:
            return np.asarray(
                torch.softmax(self.network.logits(self.x[i : i + 1]), 1).numpy() - np.eye(k)[label]
            )
        return np.asarray(np.eye(k)[[j for j in range(k) if j != label]] - np.eye(k)[label])

    def _error(self, points: Array) -> Array:
        """By how much rounding may have changed the losses at points `(m, n)`: `(m,)`."""
        sizes = _magnitudes(self.network).logits(torch.from_numpy(np.abs(points))).amax(1).numpy()
        return np.asarray(2 * self.atlas.rounding * sizes)


def _magnitudes(network: Piecewise) -> Piecewise:
    """The network of absolute values: what it adds up bounds what the rounding errors of the
    network are relative to.
    """
    parts = {
        name: sized(getattr(network, name).abs())
        for name in ("A", "B", "c", "C", "D", "e", "slope")
    }
    return replace(network, **parts)


def _envelope(cost: Array, value: Array) -> list[int]:
    """The corners of the least concave non-decreasing function above the points, from the
    cheapest point on.
    """
    hull: list[int] = []
    for k in np.lexsort((-value, cost)).tolist():
        if hull and value[k] <= value[hull[-1]]:
            continue
        while len(hull) > 1 and _rise(cost, value, hull[-2], hull[-1]) <= _rise(
            cost, value, hull[-2], k
        ):
            hull.pop()
        hull.append(k)
    return hull


def _rise(cost: Array, value: Array, first: int, second: int) -> float:
    return float((value[second] - value[first]) / (cost[second] - cost[first]))


def _programs(tasks: list[Task], norm: float) -> list[Solution | None]:
    """`max <a, d> - nu ||d||_r : G d <= h` for tasks `(a, G, h, nu)`: maximisers and
    multipliers, None where there is none.
    """
    answers: list[Solution | None] = [None] * len(tasks)
    linear = []
    for k, (a, rows, room, nu) in enumerate(tasks):
        size = float(np.linalg.norm(a, dual(norm)))
        if room.min(initial=0.0) >= 0 and size <= nu:
            answers[k] = (np.zeros_like(a), np.zeros(len(room)))
        elif (
            norm == 2 and nu > 1e-9 * size
        ):  # below that the norm has no say, and tau a / nu no digits
            answers[k] = _euclidean(a, rows, room, nu)
        else:
            linear.append(k)
    for k, solution in zip(linear, _linear([tasks[k] for k in linear], norm)):
        answers[k] = (
            _euclidean(*tasks[k])
            if solution is None and norm == 2 and tasks[k][3] > 0
            else solution
        )
    return answers


def _linear(tasks: list[Task], norm: float) -> list[Solution | None]:
    """The programs for r = 1 and inf, or without a norm."""
    programs = []
    for a, rows, room, nu in tasks:
        n = len(a)
        if norm == 1:  # d = d+ - d-
            programs.append((np.concatenate([nu - a, nu + a]), np.hstack([rows, -rows]), room))
        elif norm == math.inf:  # |d_i| <= t
            sides = np.hstack([np.vstack([np.eye(n), -np.eye(n)]), -np.ones((2 * n, 1))])
            matrix = np.vstack([np.hstack([rows, np.zeros((len(rows), 1))]), sides])
            programs.append((np.append(-a, nu), matrix, np.concatenate([room, np.zeros(2 * n)])))
        else:
            programs.append((-a, rows, room))
    solved = _minimise(programs, (0.0, None) if norm == 1 else (None, None))
    return [
        s and (_difference(s[0], len(t[0]), norm), s[1][: len(t[2])]) for s, t in zip(solved, tasks)
    ]


def _recessions(
    pieces: list[tuple[Array, Array]], norm: float
) -> list[tuple[float, Array, Array | None]]:
    """`nu = max { <a, d> : G d <= 0, ||d||_r <= 1 } = min_{u >= 0} ||a - G^T u||_s`: how fast
    pieces `(a, G)` grow at infinity.

    Returns nu, u, and the direction d if the piece grows at all.
    """
    solutions: list[Solution | None]
    if norm == 2:  # the projection of a onto the cone is what the one onto its polar leaves
        multipliers = [_nonnegative(rows, a) for a, rows in pieces]
        solutions = [(a - u @ rows, u) for (a, rows), u in zip(pieces, multipliers)]
    elif norm == 1:
        ball = [
            np.vstack([np.hstack([rows, -rows]), np.ones((1, 2 * len(a)))]) for a, rows in pieces
        ]
        programs = [
            (np.concatenate([-a, a]), m, np.append(np.zeros(len(m) - 1), 1.0))
            for (a, _), m in zip(pieces, ball)
        ]
        solutions = _minimise(programs, (0.0, None))
    else:
        solutions = _minimise([(-a, rows, np.zeros(len(rows))) for a, rows in pieces], (-1.0, 1.0))
    answers: list[tuple[float, Array, Array | None]] = []
    for (a, rows), solution in zip(pieces, solutions):
        u = np.zeros(len(rows)) if solution is None else solution[1][: len(rows)]
        nu = float(np.linalg.norm(a - u @ rows, dual(norm)))
        if nu <= 1e-12 * float(np.linalg.norm(a)) or solution is None:
            answers.append((0.0 if solution else nu, u, None))
        else:
            d = _difference(solution[0], len(a), norm)
            size = float(
                np.linalg.norm(d, norm)
            )  # 0 where nu is nothing but the solver's tolerance
            answers.append((nu, u, d / size if size > 0 else None))
    return answers


def _difference(point: Array, n: int, norm: float) -> Array:
    """The displacement d `(n,)` in the variables of a linear program: `d+ - d-` for r = 1."""
    return point[:n] - point[n:] if norm == 1 else point[:n]


def _minimise(
    programs: list[tuple[Array, Array, Array]], bounds: tuple[float | None, float | None]
) -> list[Solution | None]:
    """`min <c, v> : M v <= m` for programs `(c, M, m)` in one block-diagonal call: solutions
    and multipliers of the rows.
    """
    if not programs:
        return []
    costs, matrices, limits = zip(*programs)
    result = linprog(
        np.concatenate(costs),
        block_diag(matrices, "csr"),
        np.concatenate(limits),
        bounds=bounds,
        method="highs",
        options=TIGHT,
    )
    if result.status != 0:  # one program without a solution spoils the block
        return (
            [_minimise([program], bounds)[0] for program in programs]
            if len(programs) > 1
            else [None]
        )
    points = np.split(result.x, np.cumsum([len(c) for c in costs])[:-1])
    multipliers = np.split(
        np.maximum(-result.ineqlin.marginals, 0.0), np.cumsum([len(m) for m in limits])[:-1]
    )
    return list(zip(points, multipliers))


def _nonnegative(rows: Array, target: Array) -> Array:
    """`argmin_{u >= 0} ||target - rows^T u||_2`; any u >= 0 is sound, so 0 if the solver gives
    up.
    """
    try:
        return np.asarray(nnls(rows.T, target, maxiter=100 * len(rows))[0])
    except RuntimeError:
        return np.zeros(len(rows))


def _euclidean(a: Array, rows: Array, room: Array, nu: float) -> Solution | None:
    """The program for r = 2, by projections.

    Since `||d|| = min_tau (||d||^2 / tau + tau) / 2`, the solution is the projection of `tau a /
    nu` onto the cell for the tau at which `||d|| = tau`, and `||d|| / tau` falls in tau. While the
    same rows G_A are tight, `d = p + tau q` with `p = G_A^+ h_A` orthogonal to `q = (1 - G_A^+ G_A)
    a / nu`, so `tau = ||p|| / (1 - ||q||^2)^(1/2)`.
    """
    if room.min(initial=0.0) >= 0:  # the sample is in the cell: is it the maximiser?
        u = np.zeros(len(room))
        tight = np.flatnonzero(room <= 1e-13)
        if len(tight):
            u[tight] = _nonnegative(rows[tight], a)
        if np.linalg.norm(a - u @ rows) <= nu * (1 + LIFT / 2):
            return np.zeros_like(a), u
    low = 0.0
    high = math.inf
    scale = max(1.0, float(-room.min(initial=0.0)))
    tau = scale
    answer = None
    for _ in range(100):
        d = nearest_point(rows, room, tau * a / nu)
        if d is None:
            break
        tight = np.flatnonzero(room - rows @ d <= 1e-9 * (1 + np.linalg.norm(d)))
        u = np.zeros(len(room))
        if len(tight):
            u[tight] = _nonnegative(rows[tight], a - nu / tau * d)
        if np.linalg.norm(d) <= tau:
            high = tau
            answer = (d, u)
        else:
            low = tau
        active = np.flatnonzero(u > 0)
        inverse = np.linalg.pinv(rows[active]) if len(active) else np.zeros((len(a), 0))
        p = inverse @ room[active]
        q = (a - inverse @ (rows[active] @ a)) / nu
        left = 1 - float(q @ q)
        guess = float(np.linalg.norm(p)) / math.sqrt(left) if left > 0 else math.inf
        if 0 < guess < 1e8 * scale:
            d = p + guess * q
            multipliers = inverse.T @ (a - nu / guess * d)
            if (rows @ d <= room + 1e-12 * (1 + np.abs(room))).all() and (multipliers >= 0).all():
                u = np.zeros(len(room))
                u[active] = multipliers
                return d, u
        if tau > 1e8 * scale or high <= low * (1 + 1e-15):
            break
        if not low < guess < high:
            guess = (
                math.sqrt(low * high)
                if low > 0 and high < math.inf
                else (8 * tau if low > 0 or tau < high else tau / 8)
            )
        tau = guess
    return answer if answer is not None else ((d, u) if d is not None else None)
