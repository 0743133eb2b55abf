"""The adversarial distribution, which checks itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wassail.checks import check_task
from wassail.errors import InputError, instance
from wassail.geometry import column
from wassail.geometry import distances as distances_between
from wassail.network import Model, Search, search, versions
from wassail.notebook import card, pairs
from wassail.records import Record
from wassail.specification import Labels, Specification, labels_of, specification_of
from wassail.threat import (
    ROUNDING,
    Groups,
    Number,
    Threat,
    ceil_percent,
    fitted,
    parse_eps,
    parse_label_cost,
    parse_order,
    parse_subpopulation,
)
from wassail.transport.allocation import (
    groups_of,
    sample_weights,
    threat_knapsack,
    transport_cost,
)
from wassail.transport.bootstrap import fixed_interval, interval
from wassail.transport.flips import Flips
from wassail.transport.given import in_box, replay


@dataclass(frozen=True, eq=False, repr=False)
class Distribution(Record):
    """An adversarial distribution on up to 2N points, `sum_i q_i [(1 - a_i) delta(x_i, y_i) + a_i
    delta(point_i, label_i)]`, with `q_i = mu_i` unless people may be missing and `label_i = y_i`
    unless labels may change.

    Args:
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        points: where the moved share of each sample goes, `(N, *shape)`.
        weights: that share, `a_i = 1/kappa_i`, float64 `(N,)`.
        distances: how far each point lies from its sample, float64 `(N,)`.
        clean_predicted: class predicted at the sample, `(N,)`.
        predicted: class predicted at the point, `(N,)`.
        mu: sample weights, float64 `(N,)`.
        forwards: forward passes spent on each sample, `(N,)`.
        backwards: backward passes spent on each sample, `(N,)`.
        checks: passes of the final verification, `(N,)`.
        threat: `Threat` it was built for.
        method: name of the attack.
        allocation: "knapsack" if the weights come from it, "fixed" if the method gave them.
        info: options, seed and versions.
        changed: labels of the moved shares, `(N,)`; default None, those of the samples.
        density: `q_i / mu_i` of the subpopulation, float64 `(N,)`; default None, 1 each.
        specification: what right means, where class 0 is right (see `Flips`); default None, the
            labels.
    """

    x: Tensor
    y: Tensor
    points: Tensor
    weights: Tensor
    distances: Tensor
    clean_predicted: Tensor
    predicted: Tensor
    mu: Tensor
    forwards: Tensor
    backwards: Tensor
    checks: Tensor
    threat: Threat
    method: str
    allocation: str
    info: Mapping[str, Any] = field(default_factory=dict)
    changed: Tensor | None = None
    density: Tensor | None = None
    specification: Specification | None = None

    @classmethod
    def from_search(
        cls,
        x: Tensor,
        y: Labels,
        found: Search,
        threat: Threat,
        weight: float,
        method: str,
        info: Mapping[str, Any],
        mu: Tensor | None = None,
    ) -> Distribution:
        """The distribution that moves the share `weight` of every sample to its verified point.

        Args:
            x: samples, float tensor `(N, *shape)`, inside the domain.
            y: true labels, integer tensor `(N,)`, or a `Specification`.
            found: what the search returned.
            threat: `Threat` it was made for.
            weight: share of every sample that moves, in [0, 1].
            method: name of the attack.
            info: options and seed, kept with the result.
            mu: sample weights, tensor `(N,)`; default None, 1/N each.
        """
        return cls(
            x,
            labels_of(y, x.device),
            found.points,
            torch.full((len(x),), weight, dtype=torch.float64),
            distances_between(found.points, x, threat.norm),
            found.clean,
            found.predicted,
            sample_weights(mu, len(x)),
            found.forwards,
            found.backwards,
            found.checks,
            replace(threat, domain=fitted(threat.domain, x)),
            method,
            "fixed",
            {"versions": versions(), "dtype": str(x.dtype), **info},
            specification=specification_of(y),
        )

    @property
    def task(self) -> Labels:
        """What right means: the specification, or the labels."""
        return self.y if self.specification is None else self.specification

    @property
    def labels(self) -> Tensor:
        """The labels of the moved shares, `(N,)`: those of the samples unless labels may change."""
        return self.y if self.changed is None else self.changed

    @property
    def mass(self) -> Tensor:
        """The weights `q_i` of the samples that are there, float64 `(N,)`."""
        return self.mu if self.density is None else self.mu * self.density

    @property
    def prices(self) -> Tensor:
        """What it costs to move each sample: its distance, and the price of its label if that
        changes, float64 `(N,)`.
        """
        return self._prices(self.distances)

    def _prices(self, distances: Tensor) -> Tensor:
        if self.changed is None:
            return distances
        other = (self.changed != self.y).cpu().double()
        return distances + other * self.threat.label_cost

    @property
    def accuracy(self) -> float:
        """`sum_i mu_i ((1 - a_i) 1[sample correct] + a_i 1[point correct])`: the robust
        accuracy this witnesses.
        """
        return self._accuracy(self.mass, self.weights)

    @property
    def clean_accuracy(self) -> float:
        """Accuracy on the samples themselves."""
        return self._accuracy(self.mu, torch.zeros_like(self.weights))

    @property
    def cost(self) -> float:
        """The transport cost, in units of eps and at most eps: `(sum_i q_i a_i c_i^p)^(1/p)` with
        the prices c_i; order inf: the largest.

        Of every point that moved, flipped or not; `spent` is the share of eps that the flips took.
        """
        return transport_cost(self.mass, self.weights, self.prices, self.threat.order)

    @property
    def spent(self) -> float:
        """The share of eps that its flips cost: the transport cost of the misclassified points
        alone, over eps.

        Reports say this. `cost` counts every point that moved. An attack that moves all samples,
        such as WDA, pays for points that are still classified correctly, too: without them the
        accuracy is the same, and the budget they took is free.
        """
        flipped = (self.predicted != self.labels).cpu() & (self.clean_predicted == self.y).cpu()
        weights = torch.where(flipped, self.weights, 0.0)
        price = transport_cost(self.mass, weights, self.prices, self.threat.order)
        return price / self.threat.eps

    @cached_property
    def flips(self) -> Flips:
        """The misclassified points of this distribution, for `Flips.merge` and every other order
        and eps; those that it was allocated from, if it was and is not read from a file.
        """
        found = Search(
            self.points,
            self.clean_predicted,
            self.predicted,
            self.forwards,
            self.backwards,
            self.checks,
        )
        return Flips.from_search(
            self.x,
            self.task,
            found,
            self.threat.norm,
            self.threat.domain,
            self.method,
            dict(self.info),
            self.distances,
        )

    def atoms(self) -> tuple[Tensor, Tensor]:
        """The 2N points `(2N, *shape)`, samples first, and their masses, float64 `(2N,)`,
        summing to one.
        """
        return torch.cat([self.x, self.points]), torch.cat(
            [self.mass * (1 - self.weights), self.mass * self.weights]
        )

    def verify(self, model: Model, batch_size: int | None = None) -> Verification:
        """Recompute from the stored tensors everything the distribution claims. True if all of it
        holds.

        Args:
            model: callable from a batch `(n, *shape)` to logits `(n, K)`.
            batch_size: int, most samples in one call of the model; default None, 250.
        """
        x, task = check_task(self.x, self.task, self.threat.domain)
        y = labels_of(task, x.device)
        found = search(replay(self.points), model, x, task, batch_size, tolerance=0.0)
        # A point that is claimed to be right may be wrong by less than the tolerance.
        predicted = torch.where(self.predicted == y, y, found.predicted)
        length = distances_between(self.points, x, self.threat.norm)
        wrong = {
            "samples predicted differently": int((found.clean != self.clean_predicted).sum()),
            "points predicted differently": int((predicted != self.predicted).sum()),
            "points outside the box": int((~in_box(self.points, self.threat.domain)).sum()),
            "distances misstated": int((length != self.distances).sum()),
            "weights outside [0, 1]": int((~((self.weights >= 0) & (self.weights <= 1))).sum()),
            "shares of samples below 0": int((~(self.mu >= 0)).sum()),
        }
        again = self._accuracy(self.mass, self.weights, found.clean, predicted)
        cost = transport_cost(self.mass, self.weights, self._prices(length), self.threat.order)
        problems = [f"{count} {name}" for name, count in wrong.items() if count]
        total = math.fsum(self.mu.tolist())
        if not abs(total - 1) <= ROUNDING:
            problems.append(f"the samples have mass {total:.12g}, not 1")
        problems += self._crowded()
        if not cost <= self.threat.eps:
            problems.append(f"cost {cost:.9g} above eps {self.threat.eps:.9g}")
        return Verification(tuple(problems), again, cost)

    def _crowded(self) -> list[str]:
        """What is wrong with the weights of the samples."""
        groups = self.threat.groups
        if self.density is None:
            return []
        most = torch.full_like(self.mu, 1 / self.threat.subpopulation)
        problems = []
        if groups is not None:
            group = torch.tensor(groups.places, dtype=torch.int64)
            none = torch.zeros(len(groups.names), dtype=torch.float64)
            weights = none.index_add(0, group, self.mass)
            low = torch.tensor(groups.low, dtype=torch.float64) - ROUNDING
            high = torch.tensor(groups.high, dtype=torch.float64) + ROUNDING
            off = (weights < low) | (weights > high)
            if off.any():
                problems.append(f"{int(off.sum())} groups with weights outside their ranges")
            usual = none.index_add(0, group, self.mu)
            most = most * (weights / usual)[group] * (1 + ROUNDING)
        outside = int((~((self.density >= 0) & (self.density <= most))).sum())
        if outside:
            limit = f" [0, {float(most[0]):.9g}]" if groups is None else " what their group allows"
            problems.append(f"{outside} densities outside{limit}")
        total = math.fsum(self.mass.tolist())
        if not abs(total - 1) <= ROUNDING:
            problems.append(f"the subpopulation has mass {total:.12g}, not 1")
        return problems

    def interval(
        self, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[float, float]:
        """Bootstrap confidence interval of the accuracy over samples (percentile).

        Each resample of the N samples runs the knapsack again where the weights came from it;
        otherwise the weights stay. Where every resample is 0, or every one 1, the other end is the
        exact binomial one: see `transport.bootstrap.interval`.

        Args:
            level: float, probability that the interval covers the accuracy; default 0.95.
            resamples: int, draws; default 1000.
            seed: int of the draws; default 0.
        """
        if self.threat.others:
            raise InputError(
                "the bootstrap knows neither changed labels nor missing people: for limits that "
                "hold for the population use ws.risk_curve(...).population()."
            )
        at_sample, at_point = self._right
        if self.allocation == "knapsack":
            return interval(
                self.mu, ~at_sample, self._priced, self.threat, None, level, resamples, seed
            )
        right = (1 - self.weights) * at_sample + self.weights * at_point
        return fixed_interval(self.mu, 1 - right, self.threat, level, resamples, seed)

    @cached_property
    def _priced(self) -> Tensor:
        flipped = (self.predicted != self.y).cpu()
        return torch.where(flipped, self.distances, math.inf)

    @cached_property
    def _right(self) -> tuple[Tensor, Tensor]:
        """Where the class is right, at the samples and at the points, bool `(N,)`, on the CPU."""
        return (self.clean_predicted == self.y).cpu(), (self.predicted == self.labels).cpu()

    def _accuracy(
        self,
        mu: Tensor,
        weights: Tensor,
        clean: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> float:
        if not len(self.y):
            return math.nan
        at_sample = self._right[0] if clean is None else (clean == self.y).cpu()
        at_point = self._right[1] if predicted is None else (predicted == self.labels).cpu()
        # Divided by the sum: N times 1/N may round below one, and all correct is 1 exactly.
        return float((mu * ((1 - weights) * at_sample + weights * at_point)).sum() / mu.sum())

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        return (
            f"Distribution({self.method} over {self.threat}: accuracy {100 * self.accuracy:.2f} % "
            f"(clean {100 * self.clean_accuracy:.2f} %), cost {self.cost:.4g} of "
            f"{self.threat.eps:.4g}, "
            f"{len(self)} samples, {int(((self.weights > 0) & (self.distances > 0)).sum())} of "
            "them moved)"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("threat", str(self.threat)),
            ("accuracy", f"{ceil_percent(self.accuracy)} %"),
            ("clean accuracy", f"{100 * self.clean_accuracy:.2f} %"),
            ("cost", f"{self.cost:.4g} of {self.threat.eps:.4g}"),
            ("moved", int(((self.weights > 0) & (self.distances > 0)).sum())),
        ]
        title = f"A distribution on {2 * len(self)} points, by {self.method}"
        return card(title, pairs(rows))


@dataclass(frozen=True)
class Verification:
    """What `Distribution.verify` found: true if nothing was wrong; accuracy and cost as recomputed.

    Args:
        problems: one text for each claim that does not hold.
        accuracy: as recomputed.
        cost: as recomputed, in units of eps.
    """

    problems: tuple[str, ...]
    accuracy: float
    cost: float

    def __bool__(self) -> bool:
        return not self.problems


def allocate(
    flips: Flips,
    eps: Number,
    order: Number,
    mu: Tensor | None = None,
    *,
    label_cost: Number = math.inf,
    subpopulation: Number = 1,
    groups: Groups | None = None,
) -> Distribution:
    """The distribution of `Omega_order(eps)` that the flips allow: the budget buys the nearest
    flips first (WDA++).

    This is the allocation of Algorithm 2 with `a_i = 1/kappa_i`, exact for these distances (THEORY
    2a). A label is changed where that is cheaper than the flip, and the samples that are dear are
    left out as far as the subpopulation allows (THEORY 12).

    Args:
        flips: `Flips` to buy.
        eps: the budget, in the units of the distances.
        order: Wasserstein order p, 1 to inf.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        label_cost: price of a changed label, in the units of the distances; default inf.
        subpopulation: least share of the population that is there; default 1.
        groups: `Groups` of the samples, whose weights may be any in their ranges; default None.
    """
    instance(flips, Flips, "the flips are", "as ws.nearest returns them")
    threat = Threat(
        flips.norm,
        parse_order(order),
        parse_eps(eps),
        flips.domain,
        label_cost=parse_label_cost(label_cost),
        subpopulation=parse_subpopulation(subpopulation),
        groups=groups_of(groups, len(flips)),
    )
    if threat.label_cost < math.inf and flips.specification is not None:
        raise InputError(
            "label_cost is the price of another class, and these flips have a specification: leave "
            "it out."
        )
    mu = sample_weights(mu, len(flips))
    density, weights = threat_knapsack(flips.distances, threat, mu)
    correct = (flips.distances > 0).to(flips.y.device)
    points, predicted, changed = flips.points, flips.labels, None
    # A point without a flip is its sample.
    distances = torch.where(flips.success, flips.distances, 0.0)
    if threat.label_cost < math.inf:
        relabel = (threat.label_cost < flips.distances).to(flips.y.device)
        # Any other label is wrong where the model says the right one.
        other = (flips.y == 0).to(flips.y.dtype)
        changed = torch.where(relabel, other, flips.y)
        predicted = torch.where(relabel, flips.y, predicted)
        points = torch.where(column(relabel.to(points.device), points), flips.x, points)
        distances = torch.where(relabel.to(distances.device), 0.0, distances)
    answer = Distribution(
        flips.x,
        flips.y,
        points,
        weights,
        distances,
        torch.where(correct, flips.y, flips.labels),
        predicted,
        mu,
        flips.forwards,
        flips.backwards,
        flips.checks,
        threat,
        " + ".join(flips.methods),
        "knapsack",
        flips.info,
        changed,
        density if threat.subpopulation < 1 or threat.groups is not None else None,
        flips.specification,
    )
    answer.__dict__["flips"] = flips  # what `flips` would look for in the points
    return answer
