"""The exact worst case as one problem over all samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.exact.programs import LIFT, Array
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region, Where
from wassail.certificates.loss.checks import check_loss
from wassail.certificates.loss.penalty import (
    BATCH,
    FAR,
    Atlas,
    Family,
    Penalty,
    Plan,
    Table,
    magnitudes,
)
from wassail.errors import InputError
from wassail.geometry import distances, maximiser, pull_inside
from wassail.losses import LIPSCHITZ, cross_entropy
from wassail.rounding import UNIT
from wassail.threat import dual, parse_norm
from wassail.transport.allocation import sample_weights, spend, transport_cost
from wassail.transport.envelope import by_sample, envelope


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


def _check_samples(x: Tensor, y: Tensor, region: Region) -> None:
    """Refuse samples `(N, n)` that do not fit the network or its domain."""
    inputs = len(region.low)
    if region.radius < math.inf:
        raise InputError(
            "the domain of a worst case is a box or None: for a ball use order inf with eps "
            "as its radius."
        )
    if x.shape != (len(y), inputs) or not len(y):
        raise InputError(
            f"x {tuple(x.shape)} and y {tuple(y.shape)} do not fit a network of {inputs} inputs."
        )
    if not region.contains(x).all() or not torch.isfinite(x).all():
        raise InputError(
            "a sample lies outside the domain: clamp the samples or give the box they live in."
        )


class Problem:
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
        check_loss(loss)
        self.network = network
        self.loss = LIPSCHITZ[loss]
        self.norm = parse_norm(norm)
        self.x = x.detach().cpu().double().flatten(1)
        self.y = y.detach().cpu().long()
        self.region = Region.make(domain, network.inputs)
        _check_samples(self.x, self.y, self.region)
        self.unbounded = not self.region.bounded
        self.points = self.x.numpy()
        self.mu = sample_weights(mu, len(self.y)).numpy()
        self.clean = self.at(self.x, torch.arange(len(self.x))).numpy()
        # evaluated points: loss, distance, point
        self.pools = [Table(2 + network.inputs) for _ in self.points]
        for pool, value, point in zip(self.pools, self.clean, self.points):
            pool.append(np.concatenate([[value, 0.0], point]))
        self.atlas = Atlas.make(network, self.region, self.norm, limit)
        reach = float(np.abs(self.points).max())
        splits = loss == "cross_entropy"
        self.families = {
            k: Family(self.atlas, k, splits, reach) for k in sorted(set(self.y.tolist()))
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

        self.errors = self.error_at(self.points)
        self.tick: Callable[[float], None] = lambda share: None  # is told the share done
        self.told = 0.0

    def at(self, points: Tensor, rows: Tensor) -> Tensor:
        """The losses at points `(m, n)` of the samples `(m,)`."""
        return self.loss(self.network.logits(points), self.y[rows])

    def late(self) -> bool:
        """Whether the time is over."""
        return clock.late()

    def average(self, values: Array) -> float:
        """`sum_i mu_i values_i`, rounded up."""
        return float(self.mu @ values + (len(values) + 4) * UNIT * (self.mu @ np.abs(values)))

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
        losses = self.at(x, torch.full((len(x),), i))
        for loss, distance, point in zip(
            losses.tolist(), distances(x, centre, self.norm).tolist(), x.numpy()
        ):
            self.pools[i].append(np.concatenate([[loss, distance], point]))

    def add_far_points(self) -> None:
        """On R^n the slope at infinity is approached along a ray: a point far out on the
        steepest one of each label.
        """
        for k, family in self.families.items():
            self.far_along(k, family.rays[int(family.cuts.rows[family.flat, -2].argmax())])

    def far_along(self, label: int, ray: Array | None) -> None:
        """A point far out on a ray for each sample of a label."""
        scale = FAR * max(1.0, float(np.abs(self.points).max()))
        for i in np.flatnonzero(self.y.numpy() == label).tolist():
            self.add(i, [] if ray is None else [self.points[i] + scale * ray])

    def add_near_points(self) -> None:
        """Steps from each sample along the gradients of the pieces that meet there, to the wall
        of their cell.
        """
        for i, x in enumerate(self.points):
            if clock.out_of_time():
                return
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
        split. Of a sample that is not reached in time the steepest piece is all that is known.
        """
        if clock.out_of_time():
            start = float(self.clean[i] + self.errors[i])
            rise = float(penalty.conjugate(np.array(self.steepest)))
            return max(start + rise + LIFT * (abs(start) + rise), self.highest(i, penalty))
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
            clock.spend(len(todo) * clock.STEP)
            points: list[Array] = []
            with suppress(clock.Late):  # the certificates so far hold
                for leaf in ripe:
                    family.split(leaf)
                points = family.solve(todo, x, penalty, tolerance)
            self.add(i, points, penalty.lam if penalty.order == math.inf else math.inf)
            solved[todo] = True
            solved = np.append(solved, np.zeros(family.forms.size - len(solved), bool))

    def dual(self, penalty: Penalty, tolerance: float) -> float:
        """`sum_i mu_i sup_x [loss(x, y_i) - phi(||x - x_i||)]` from above."""
        found = []
        for i in range(len(self.clean)):
            found.append(self.evaluate(i, penalty, tolerance))
            self.tell(0.25 * len(found) / len(self.clean))
        return self.average(np.array(found))

    def tell(self, share: float) -> None:
        """Report the share done, which never falls: a quarter for the first pass over the samples,
        the rest as the bracket closes.
        """
        self.told = max(self.told, share)
        self.tick(self.told)

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
        root = torch.tensor([i for i, pool in enumerate(self.pools) for _ in range(pool.size)])
        rows = torch.from_numpy(np.concatenate([pool.rows[:, :2] for pool in self.pools]))
        table, known = by_sample(root, len(self.pools))
        loss = torch.where(known, rows[table, 0], -math.inf)
        steps = envelope(loss, rows[table, 1] ** order, loss[:, 0])
        mu = torch.from_numpy(self.mu)
        # A little less than the budget, so that no rounding overspends it.
        share = spend(mu[steps.sample] * steps.price, budget * (1 - 1e-14))
        done = int((share == 1).sum())
        place = [0] * len(self.pools)  # the sample itself comes first
        for i, k in zip(steps.sample[:done].tolist(), steps.to[:done].tolist()):
            place[i] = k
        plan = [(j, at, float(mass)) for j, (at, mass) in enumerate(zip(place, self.mu))]
        if done == len(share):
            return plan, 0.0
        i = int(steps.sample[done])
        part = float(share[done])
        plan[i] = (i, place[i], float(self.mu[i] * (1 - part)))
        return [*plan, (i, int(steps.to[done]), float(self.mu[i] * part))], float(steps.slope[done])

    def value(self, plan: Plan) -> float:
        """The expected loss of a plan."""
        return math.fsum(mass * self.pools[i].rows[at, 0] for i, at, mass in plan)

    def report(
        self,
        plan: Plan,
        upper: float,
        lam: float,
        order: float,
        pairs: tuple[Array, int] | None = None,
    ) -> WorstCase:
        """The plan as tensors, everything recomputed from them.

        Args:
            plan: the distribution.
            upper: the bound above it.
            lam: the multiplier behind that.
            order: Wasserstein order.
            pairs: what each row costs beside its distance `(M,)`, and how many rows a sample has,
                where rows are pairs of samples and labels; default None, nothing and one.
        """
        extra, size = (np.zeros(len(self.pools)), 1) if pairs is None else pairs
        plan = sorted(entry for entry in plan if entry[2] > 0)
        root = torch.tensor([i for i, _, _ in plan])
        masses = torch.tensor([mass for _, _, mass in plan], dtype=torch.float64)
        atoms = torch.from_numpy(np.array([self.pools[i].rows[at, 2:] for i, at, _ in plan]))
        losses = self.at(atoms, root)
        moved = distances(atoms, self.x[root], self.norm)
        lower = below(math.fsum((masses * losses).tolist()), upper, "worst-case loss")
        points = sum(pool.size for pool in self.pools)
        info = {**self.info, "cut": clock.out_of_time(), "order": order, "points": points}
        paid = moved + torch.from_numpy(extra)[root]
        cost = transport_cost(masses, torch.ones_like(masses), paid, order)
        bound = Bound(lower, upper, "cells", None, info)
        far = bool((moved >= FAR).any())
        return WorstCase(bound, lam, atoms, self.y[root], masses, root // size, cost, far)

    def steepest_chord(self, i: int) -> tuple[float, Array]:
        """The steepest chord from sample i to an evaluated point, rounded down, and that point."""
        rows = self.pools[i].rows
        error = self.error_at(rows[:, 2:])
        rise = rows[:, 0] - self.clean[i] - error - self.errors[i]
        chord = np.where(rows[:, 1] > 0, rise / np.where(rows[:, 1] > 0, rows[:, 1], 1.0), 0.0)
        return float(chord.max()) * (1 - self.atlas.rounding), rows[chord.argmax(), 2:]

    def chord_above(self, i: int, lam: float, height: float) -> float:
        """An upper bound on the chords of sample i, given `height >= h_i(lam)` and the
        certificates behind it.
        """
        if clock.out_of_time():
            return self.steepest
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

    def error_at(self, points: Array) -> Array:
        """By how much rounding may have changed the losses at points `(m, n)`: `(m,)`."""
        sizes = magnitudes(self.network).logits(torch.from_numpy(np.abs(points))).amax(1).numpy()
        return np.asarray(2 * self.atlas.rounding * sizes)
