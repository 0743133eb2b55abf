"""The penalised loss of one sample on the cells of a network."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.exact.cells import enumerate_cells
from wassail.certificates.exact.programs import LIFT, Array, cell_programs, recessions
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region
from wassail.errors import InputError
from wassail.rounding import UNIT, sized
from wassail.threat import dual

Plan: TypeAlias = "list[tuple[int, int, float]]"  # sample, its evaluated point, mass
# how far a point "at infinity" is; its mass is eps / FAR, so what is lost is of the order of 1 /
# FAR
FAR = 2.0**40
BATCH = 32  # pieces handed to the solver at once
CELLS = 2048  # cells written as affine functions at once


class TooManyCells(InputError):
    """A network has more cells than were to be listed."""


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


class Table:
    """Rows of fixed width that are appended one by one, kept in one array."""

    def __init__(self, width: int) -> None:
        self._data = np.zeros((64, width))
        self.size = 0

    def append(self, row: Array) -> int:
        """Add a row; its index."""
        if self.size == len(self._data):
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
        self._data[self.size] = row
        self.size += 1
        return self.size - 1

    @property
    def rows(self) -> Array:
        """The rows so far."""
        return self._data[: self.size]


@dataclass(frozen=True, eq=False)
class Atlas:
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
    def make(cls, network: Piecewise, region: Region, norm: float, limit: int) -> Atlas:
        """List the cells of a network in a region."""
        try:
            cells = enumerate_cells(network, region, limit)
        except InputError as error:
            if not bool((region.low < region.high).all()):
                raise
            raise TooManyCells(str(error)) from None
        if not cells.complete:
            raise InputError(
                "rounding hides some cells of this network: use bounds that branch instead of "
                "listing cells."
            )
        n = network.inputs
        m = len(cells)
        P, p, J, q = _affine(network, cells.masks)
        P_size, p_size, J_size, q_size = _affine(magnitudes(network), cells.masks)
        rounding = (2 + len(network.blocks())) * (network.neurons + n + network.outputs + 8) * UNIT
        # a constant neuron bounds nothing, and to drop a row is sound
        dead = (np.abs(P) <= rounding * P_size).all(2)
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
        # a linear network on R^n: one cell, and the solvers want a row
        if not P.shape[1] + len(walls):
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


class Family:
    """The affine pieces of the loss of one label k, with their certificates.

    A vertex is a pair (cell, q) with `f = <a, x> + b`, `a = J^T (q - e_k)`. A cut `(w, constant,
    nu, vertex)` is a certificate. A leaf is a part of the simplex over one cell: the vertices at
    its corners, with the offsets of the entropy's tangent.

    Leaves are not on a `Frontier`: the samples of a label share them, and each bounds them by its
    own penalty, so that no leaf has one bound to be ordered by.
    """

    def __init__(self, atlas: Atlas, label: int, splits: bool, reach: float) -> None:
        n = atlas.J.shape[2]
        k = atlas.J.shape[1]
        self.atlas = atlas
        self.label = label
        self.splits = splits
        # the largest coordinate of a sample: rounding errors of w cost that much
        self.reach = reach
        self.ids: dict[tuple[int, bytes], int] = {}
        self.cells: list[int] = []
        self.weights = Table(k)
        self.forms = Table(n + 1)
        self.cuts = Table(n + 3)
        self.flat: list[
            int
        ] = []  # of each vertex the cut of smallest nu: a constant where the cell is bounded
        self.plain: list[int] = []  # the one with u = 0
        self.last: list[int] = []  # and the newest
        self.rays: list[
            Array | None
        ] = []  # the direction in which a piece on an unbounded cell grows at that rate
        # the vertices whose `flat` is the flattest there is, and not only a mean
        self.flattened: set[int] = set()
        rivals = [j for j in range(k) if splits or j != label]
        corners = np.array(
            [[self._vertex(c, q) for q in np.eye(k)[rivals]] for c in range(len(atlas.J))]
        )
        with suppress(clock.Late):  # a piece without its flattest certificate has the plain one
            for start in range(0, self.forms.size, BATCH):
                clock.look()
                self._flatten(list(range(start, min(start + BATCH, self.forms.size))))
        leaves = corners if splits else corners.reshape(-1, 1)
        self.leaves = Table(leaves.shape[1])
        self.offsets = Table(leaves.shape[1])
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
        # certificates may be mixed: one too steep for lam with the flattest one, until it fits
        if penalty.order == 1:
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
        # the mean of two certificates is one of the mid-point
        if self.flat[new] == self.plain[new]:
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
            clock.look()
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
            slopes = recessions(pieces, self.atlas.norm)
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
        for v, solution in zip(vertices, cell_programs(tasks, self.atlas.norm)):
            found.append(None if solution is None else solution[0])
            if solution is not None:
                self.last[v] = self._cut(v, solution[1])
        return found

    def _search(self, vertex: int, x: Array, penalty: Penalty, tolerance: float) -> list[Array]:
        """Maximise `<a, d> - phi(||d||)` along the concave curve `t -> max { <a, d> : ||d|| <= t
        }`, slope by slope.
        """
        low = self._smallest(vertex)
        steep = float(self.cuts.rows[self.plain, -2].max())
        # What is rounding only is 0, unless that leaves the program unbounded.
        far = self._at(vertex, x, 0.0) if low <= 1e-9 * steep else None
        far = self._at(vertex, x, low) if far is None else far
        if far is None:
            return []
        if self._length(far) <= penalty.reach(low):
            if vertex not in self.flattened:
                self._flatten([vertex])
                return self._search(vertex, x, penalty, tolerance)
            return [self._followed(vertex, far, penalty.reach(low))]
        high = 2 * steep
        near = None
        for _ in range(6):
            near = self._at(vertex, x, high)
            if near is None or self._length(near) <= penalty.reach(high):
                break
            high *= 16
        if near is None or self._length(near) > penalty.reach(high):
            return []  # order inf and a cell out of reach: the certificates at steep slopes say so
        return [self._between(vertex, x, (near, far), penalty, tolerance)]

    def _at(self, vertex: int, x: Array, nu: float) -> Array | None:
        """The maximiser of `<a, d> - nu ||d||`."""
        return self._maximise([vertex], [x], [nu])[0]

    def _length(self, d: Array) -> float:
        return float(np.linalg.norm(d, self.atlas.norm))

    def _followed(self, vertex: int, far: Array, reach: float) -> Array:
        """A point at this distance on the ray of a piece that goes on growing; else the point."""
        ray = self.rays[vertex]
        if ray is None:
            return far
        step = 0.0
        for _ in range(8):
            step += reach - self._length(far + step * ray)
        return far + step * ray

    def _between(
        self,
        vertex: int,
        x: Array,
        ends: tuple[Array, Array],
        penalty: Penalty,
        tolerance: float,
    ) -> Array:
        """The maximiser between a point too near and one too far.

        The next slope is that of their chord; when the curve does not rise above the chord, the
        best mixture of the two is the maximiser.
        """
        a = self.forms.rows[vertex, :-1].copy()
        low = self._smallest(vertex)
        near, far = ends
        upper = math.inf
        best = -math.inf
        answer = near
        for _ in range(60):
            t_far = self._length(far)
            t_near = self._length(near)
            if t_far <= t_near:  # one point, whatever the slope
                self._at(vertex, x, max(penalty.slope(t_near), low))
                break
            chord = max(float(a @ (far - near)) / (t_far - t_near), low)
            t = min(max(penalty.reach(chord), t_near), t_far)
            mixed = near + (t - t_near) / (t_far - t_near) * (far - near)
            value = float(a @ mixed - penalty.cost(np.array(min(self._length(mixed), t))))
            if value > best:
                best = value
                answer = mixed
            inner = t_near < t < t_far or penalty.order == math.inf
            nu = chord if inner else max(penalty.slope(t), low)
            point = self._at(vertex, x, nu)
            if point is None:
                break
            conjugate = float(penalty.conjugate(np.array(nu)))
            upper = min(upper, float(a @ point) - nu * self._length(point) + conjugate)
            if upper - best <= max(tolerance / 4, 1e-14 * abs(best)):
                break
            if self._length(point) > penalty.reach(nu):
                far = point
            else:
                near = point
        return answer


def _affine(network: Piecewise, masks: Tensor) -> list[Array]:
    """`Piecewise.affine` of many masks, as arrays: not all of them at once."""
    parts = []
    for some in torch.split(masks, CELLS):
        clock.look()
        parts.append(network.affine(some))
    return [torch.cat(side).numpy() for side in zip(*parts)]


def magnitudes(network: Piecewise) -> Piecewise:
    """The network of absolute values: what it adds up bounds what the rounding errors of the
    network are relative to.
    """
    parts = {
        name: sized(getattr(network, name).abs())
        for name in ("A", "B", "c", "C", "D", "e", "slope")
    }
    return replace(network, **parts)
