"""Pairs of samples and labels: where a sample can go when its label may change, and what of it is
there when people may be missing (THEORY 12).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from wassail.certificates.loss.curve import budget_of, total_of
from wassail.geometry import distances as distances_between
from wassail.network import versions
from wassail.rounding import UNIT
from wassail.threat import Domain, Number, Threat
from wassail.transport.distribution import Distribution
from wassail.transport.envelope import by_sample
from wassail.transport.mixture import Line, mixture

ROOM = 1e-12  # of the budget, so that no rounding overspends it
Chosen: TypeAlias = "tuple[Tensor, Tensor]"  # candidate of each sample, and its mass, (N,) each


class Pairs:
    """The lower side of a loss with others, for records whose rows are pairs: each of N samples
    with its own label, or with all K labels one after the other.

    x, y, clean, clean_predicted, start: of the M pairs, start being clean, rounded up; points,
    root, value, distance, predicted: of the evaluated points, root being a pair; true, weights: of
    the samples.
    """

    x: Tensor
    y: Tensor
    clean: Tensor
    clean_predicted: Tensor
    start: Tensor
    points: Tensor
    root: Tensor
    value: Tensor
    distance: Tensor
    predicted: Tensor
    true: Tensor
    weights: Tensor
    norm: float
    order: float
    domain: Domain
    label_cost: float
    subpopulation: float

    @cached_property
    def extra(self) -> Tensor:
        """What each pair costs to begin with, `(M,)`."""
        size = len(self.y) // len(self.true)
        other = self.y != self.true.repeat_interleave(size)
        return torch.zeros(len(self.y), dtype=torch.float64).masked_fill(other, self.label_cost)

    @cached_property
    def own(self) -> Tensor:
        """The pair of each sample with its own label, `(N,)`."""
        return (self.extra == 0).nonzero().flatten()

    def best(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of each sample's pairs, and which pair it is, `(N,)` each.

        Args:
            values: of the pairs, `(M,)`.
        """
        rows = values.reshape(len(self.true), -1)
        found = rows.max(1)
        return found.values, found.indices + torch.arange(len(rows)) * rows.shape[1]

    def reduced(self, lam: float) -> Tensor:
        """The loss of each pair where it is, less the price of its label, rounded up, `(M,)`.

        Args:
            lam: what a unit of the label cost counts.
        """
        price = torch.where(self.extra > 0, lam * self.extra.clamp(max=1e300), 0.0)
        return self.start - price + 2 * UNIT * (self.start.abs() + price)

    @cached_property
    def values(self) -> list[float]:
        """The losses of all candidates: pairs where they are, then the evaluated points."""
        return [*self.clean.tolist(), *self.value.tolist()]

    @cached_property
    def candidates(self) -> tuple[Tensor, Tensor, Tensor]:
        """A table `(N, P)` of candidates for each sample: which, their losses, their costs."""
        size = len(self.y) // len(self.true)
        owner = torch.arange(len(self.y)) // size
        sample = torch.cat([owner, owner[self.root]])
        place, known = by_sample(sample, len(self.true))
        losses = torch.where(known, torch.cat([self.clean, self.value])[place], -math.inf)
        costs = torch.cat([self.extra, self.distance + self.extra[self.root]])
        return place, losses, torch.where(known, costs[place], math.inf)

    def parts(self, eps: float) -> list[tuple[int, int, float]]:
        """The best distribution on the evaluated points: sample, candidate, mass.

        Args:
            eps: budget, 0 or more.
        """
        place, losses, costs = self.candidates
        rows = torch.arange(len(place))
        if eps == 0 or self.order == math.inf:
            best = torch.where(costs <= eps, losses, -math.inf).max(1)
            masses = worst_masses(self.weights, best.values, self.subpopulation)
            found = [(1.0, (place[rows, best.indices], masses))]
        else:
            price = (costs / eps) ** self.order * (1 + ROOM)

            def at(multiplier: float) -> Line[Chosen]:
                worth = torch.where(price < math.inf, losses - multiplier * price, -math.inf)
                best = worth.max(1)
                masses = worst_masses(self.weights, best.values, self.subpopulation)
                won = masses * losses[rows, best.indices]
                cost = masses * price[rows, best.indices]
                plan = (place[rows, best.indices], masses)
                return Line(math.fsum(won.tolist()), math.fsum(cost.tolist()), plan)

            gain = losses.amax() - self.clean[self.own].amin()
            least = price[price > 0].min() if bool((price > 0).any()) else torch.ones(())
            found = mixture(at, min(2 * float(gain / least) + 1.0, 1e300)).parts
        parts: dict[tuple[int, int], float] = {}
        for share, (chosen, masses) in found:
            for i, (c, mass) in enumerate(zip(chosen.tolist(), masses.tolist())):
                if share * mass > 0:
                    parts[i, c] = parts.get((i, c), 0.0) + share * mass
        return [(i, c, mass) for (i, c), mass in sorted(parts.items())]

    def plan(self, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """The same as pairs, where each moves (-1: nowhere) and masses, as `LossCurve.plan`.

        Args:
            eps: budget, 0 or more.
        """
        parts = self.parts(eps)
        chosen = torch.tensor([c for _, c, _ in parts])
        masses = torch.tensor([mass for _, _, mass in parts], dtype=torch.float64)
        moved = chosen >= len(self.y)
        choice = torch.where(moved, chosen - len(self.y), -1)
        row = chosen.clone()
        row[moved] = self.root[choice[moved]]
        return row, choice, masses

    def expected(self, eps: float) -> float:
        """The expected loss of the best distribution on the evaluated points.

        Args:
            eps: budget, 0 or more.
        """
        return math.fsum(mass * self.values[c] for _, c, mass in self.parts(eps))

    def witness(self, eps: Number) -> Distribution:
        """The distribution behind the lower side, with its changed labels and the weights of the
        subpopulation; its expected loss is `info["loss"]`.

        A sample that is split stands in it more than once, with the parts of its weight.

        Args:
            eps: budget > 0, in units of the norm.
        """
        threat = Threat(
            self.norm,
            self.order,
            budget_of(eps),
            self.domain,
            label_cost=self.label_cost,
            subpopulation=self.subpopulation,
        )
        parts = self.parts(threat.eps)
        there = torch.zeros(len(self.true), dtype=torch.float64)
        for i, _, mass in parts:
            there[i] += mass
        absent = [(i, int(self.own[i]), 0.0) for i in (there == 0).nonzero().flatten().tolist()]
        entries = sorted([*parts, *absent])
        sample, chosen = (torch.tensor([entry[k] for entry in entries]) for k in (0, 1))
        mass_ = torch.tensor([entry[2] for entry in entries], dtype=torch.float64)
        moved = chosen >= len(self.y)
        row = chosen.clone()
        row[moved] = self.root[chosen[moved] - len(self.y)]
        x, y, weight = self.x[row], self.true[sample], self.weights[sample]
        points, predicted = x.clone(), self.clean_predicted[row].clone()
        points[moved] = self.points[chosen[moved] - len(self.y)]
        predicted[moved] = self.predicted[chosen[moved] - len(self.y)]
        held = torch.where(there > 0, there, 1.0)[sample]
        zero = torch.zeros(len(row), dtype=torch.int64)
        density = (there / self.weights.clamp(min=1e-300))[sample].clamp(max=1 / self.subpopulation)
        loss = math.fsum(mass * self.values[c] for _, c, mass in parts)
        return Distribution(
            x,
            y,
            points,
            (moved | (self.y[row] != y)).double(),
            distances_between(points, x, self.norm),
            self.clean_predicted[self.own[sample]],
            predicted,
            torch.where(mass_ > 0, weight * mass_ / held, weight),
            zero,
            zero,
            zero,
            threat,
            "loss curve",
            "fixed",
            {"loss": loss, "versions": versions()},
            self.y[row],
            None if self.subpopulation == 1 else density,
        )


def worst_masses(mu: Tensor, values: Tensor, share: float) -> Tensor:
    """The weights `q_i <= mu_i / share` of sum 1 with the highest mean, float64 `(N,)`.

    Args:
        mu: sample weights, `(N,)`.
        values: `(N,)`.
        share: alpha, in (0, 1].
    """
    if share == 1:
        return mu
    order = values.argsort(descending=True, stable=True)
    most = mu[order] / share
    before = most.cumsum(0) - most
    masses = torch.minimum(most, (1 - before).clamp(min=0))
    return torch.empty_like(mu).scatter(0, order, masses)


def worst_share(mu: Tensor, values: Tensor, share: float) -> float:
    """The mean of the worst share of the values, rounded up: `t + sum_i mu_i (v_i - t)_+ / share`
    holds for any t.

    Args:
        mu: sample weights, `(N,)`.
        values: `(N,)`.
        share: alpha, in (0, 1].
    """
    if share == 1:
        return total_of(mu, values)
    used = values[mu > 0]
    if bool((used == math.inf).any()):
        return math.inf
    order = used.argsort(descending=True, stable=True)
    place = int(torch.searchsorted(mu[mu > 0][order].cumsum(0), share))
    t = float(used[order[min(place, len(order) - 1)]])
    if t == -math.inf:
        t = float(used[used > -math.inf].min()) if bool((used > -math.inf).any()) else 0.0
    # The difference is off by a unit of itself, for which `total_of` has room.
    above = torch.where(values > t, values - t, 0.0)
    mean = total_of(mu, above) / share
    return t + mean + 8 * UNIT * (abs(t) + mean)


def pairs_of(
    x: Tensor, y: Tensor, mu: Tensor, classes: int, label_cost: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample with the labels that it may have: samples, labels, weights.

    Args:
        x: samples `(N, *shape)`.
        y: labels `(N,)`.
        mu: weights `(N,)`.
        classes: K.
        label_cost: price of a changed label; inf for labels that stay.
    """
    if label_cost == math.inf:
        return x, y, mu
    labels = torch.arange(classes, device=y.device, dtype=y.dtype).repeat(len(y))
    return x.repeat_interleave(classes, 0), labels, mu.repeat_interleave(classes) / classes
