"""From distances to distributions: flips, the budget's allocation, the adversarial distribution,
the risk curve.

For the 0-1 loss the worst distribution of `Omega_p(eps)` solves a fractional knapsack over the
samples (THEORY 2a),

    robust error = max { sum_i mu_i a_i : 0 <= a_i <= 1, sum_i mu_i a_i d_i^p <= eps^p },

where `d_i` is the distance from sample i to its nearest misclassified point: buy the nearest first.
With the distances of an attack this is a lower bound on the error, witnessed by a distribution on
2N points; with certified radii it is an upper one. All of it is arithmetic in float64 on per-sample
numbers that are kept, so one search answers every `eps` and every order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.geometry import column
from wassail.geometry import distances as distances_between
from wassail.losses import flip_tolerance
from wassail.network import (
    ChunkAttack,
    Model,
    Network,
    Progress,
    Search,
    Tick,
    check_data,
    search,
    versions,
)
from wassail.records import Record, check_equal
from wassail.threat import (
    Domain,
    Number,
    Threat,
    number,
    parse_domain,
    parse_eps,
    parse_level,
    parse_norm,
    parse_order,
)

_PER_SAMPLE = (
    "x",
    "y",
    "points",
    "distances",
    "labels",
    "forwards",
    "backwards",
    "checks",
    "found_by",
)


@dataclass(frozen=True, eq=False, repr=False)
class Flips(Record):
    """The nearest misclassified point known for each of N samples.

    x, y: samples `(N, *shape)` and labels `(N,)`; points: the flips, the sample itself where none
    is known; distances: float64 `(N,)`, 0 where the sample is wrong already, inf where no flip is
    known; labels: class predicted at the point; forwards, backwards: passes spent, checks: passes
    of the final verification; found_by: index into `methods`.
    """

    x: Tensor
    y: Tensor
    points: Tensor
    distances: Tensor
    labels: Tensor
    forwards: Tensor
    backwards: Tensor
    checks: Tensor
    found_by: Tensor
    norm: float
    domain: Domain
    methods: tuple[str, ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_search(
        cls,
        x: Tensor,
        y: Tensor,
        found: Search,
        norm: float,
        domain: Domain,
        method: str,
        info: Mapping[str, Any],
    ) -> Flips:
        """Flips from verified points: a point counts if it is misclassified and inside the box."""
        length = distances_between(found.points, x, norm)
        wrong = (found.clean != y).cpu()
        flipped = (found.predicted != y).cpu() & _in_box(found.points, domain)
        distance = torch.where(wrong, 0.0, torch.where(flipped, length, math.inf))
        use = torch.isfinite(distance) & ~wrong
        points = torch.where(column(use, x), found.points, x)
        labels = torch.where(use.to(y.device), found.predicted, found.clean)
        return cls(
            x,
            y,
            points,
            distance,
            labels,
            found.forwards,
            found.backwards,
            found.checks,
            torch.zeros(len(x), dtype=torch.int64),
            norm,
            domain,
            (method,),
            {"versions": versions(), "dtype": str(x.dtype), **info},
        )

    @classmethod
    def from_points(
        cls,
        model: Model,
        x: Tensor,
        y: Tensor,
        x_adv: Tensor,
        norm: Number,
        domain: Domain = (0.0, 1.0),
        *,
        method: str = "points",
        tolerance: float = 0.0,
        batch_size: int | None = None,
        progress: Progress = False,
    ) -> Flips:
        """Anyone's adversarial examples as flips, for two forward passes: at the samples and at the
        points.

        Points that are not misclassified, or lie outside the box, are no flips: their distance is
        inf. Somebody else's point counts however narrowly it is wrong; our own engines keep a
        margin (`tolerance`), so that a flip survives another batch size.
        """
        norm = parse_norm(norm)
        domain = parse_domain(domain)
        x, y = check_data(x, y, domain)
        x_adv = torch.as_tensor(x_adv).detach().to(x)
        if x_adv.shape != x.shape:
            raise InputError(
                f"the points have shape {tuple(x_adv.shape)} but the samples {tuple(x.shape)}: "
                "give one point a sample."
            )
        if not torch.isfinite(x_adv).all():
            raise InputError(
                "the points contain NaN or infinity: remove them or put the sample itself there."
            )

        found = search(
            _replay(x_adv), model, x, y, batch_size, progress, "checking points", tolerance
        )
        return cls.from_search(x, y, found, norm, domain, method, {"method": method})

    def merge(self, *others: Flips) -> Flips:
        """The nearest flip of each sample over several results for the same samples; passes add
        up.
        """
        best = self
        for other in others:
            for name in ("x", "y", "norm", "domain"):
                check_equal(name, getattr(best, name), getattr(other, name))
            methods = tuple(dict.fromkeys(best.methods + other.methods))
            nearer = other.distances < best.distances  # strictly: of equals the earlier one stays
            local = nearer.to(best.x.device)
            renamed = [
                torch.tensor([methods.index(name) for name in flips.methods])[flips.found_by]
                for flips in (best, other)
            ]
            best = Flips(
                best.x,
                best.y,
                torch.where(column(nearer, best.x), other.points.to(best.x.device), best.points),
                torch.minimum(best.distances, other.distances),
                torch.where(local, other.labels.to(best.x.device), best.labels),
                best.forwards + other.forwards,
                best.backwards + other.backwards,
                best.checks + other.checks,
                torch.where(nearer, renamed[1], renamed[0]),
                best.norm,
                best.domain,
                methods,
                {"merged": [dict(best.info), dict(other.info)], "versions": versions()},
            )
        return best

    def take(self, chosen: Tensor) -> Flips:
        """The flips of some of the samples: a bool mask or an index."""
        some: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _PER_SAMPLE}
        return replace(self, **some)

    def put(self, chosen: Tensor, part: Flips) -> Flips:
        """Flips for all samples that hold `part` at the chosen ones and nothing, at no pass,
        elsewhere; for `merge`.
        """
        none = torch.zeros_like(self.distances).masked_fill(self.distances > 0, math.inf)
        full: dict[str, Any] = {
            "points": self.x.clone(),
            "distances": none,
            "labels": self.y.clone(),
        }
        full |= {
            name: torch.zeros_like(getattr(self, name))
            for name in ("forwards", "backwards", "checks", "found_by")
        }
        for name in full:
            full[name][chosen] = getattr(part, name)
        full |= {"methods": part.methods, "info": part.info}
        return replace(self, **full)

    def rounded(self, model: Model, levels: int = 255, batch_size: int | None = None) -> Flips:
        """The flips that survive saving as images with `levels` + 1 values a channel, with their
        true distances.

        Each point is rounded to the nearest grid value and, as a second chance, away from its
        sample; the nearer of the two that is still a flip is kept, and a sample with neither has no
        flip any more (distance inf).
        """
        if self.domain is None:
            raise InputError(
                "rounding to an image grid needs a box: these flips were found without one."
            )
        low, high = self.domain
        unit = (high - low) / levels
        index = (self.points - low) / unit
        outward = torch.where(
            self.points > self.x,
            index.ceil(),
            torch.where(self.points < self.x, index.floor(), index.round()),
        )
        tries = [
            Flips.from_points(
                model,
                self.x,
                self.y,
                (low + unit * grid.clamp(0, levels)).clamp(low, high),
                self.norm,
                self.domain,
                method="rounded",
                tolerance=flip_tolerance(self.x.dtype),
                batch_size=batch_size,
            )
            for grid in (index.round(), outward)
        ]
        return tries[0].merge(tries[1])

    @property
    def success(self) -> Tensor:
        """Whether a misclassified point is known, bool `(N,)`."""
        return torch.isfinite(self.distances)

    @property
    def provenance(self) -> list[str]:
        """The method that found each flip: N names."""
        return [self.methods[i] for i in self.found_by.tolist()]

    def clean_accuracy(self, mu: Tensor | None = None) -> float:
        """Accuracy on the samples themselves (a tie counts as an error)."""
        mu = sample_weights(mu, len(self.distances))
        return float((mu * (self.distances > 0)).sum() / mu.sum()) if len(self.y) else math.nan

    def passes(self) -> tuple[float, float]:
        """Mean forward and backward passes over the samples that had to be attacked."""
        attacked = self.distances > 0
        return _mean(self.forwards[attacked]), _mean(self.backwards[attacked])

    def __len__(self) -> int:
        return len(self.distances)

    def __repr__(self) -> str:
        moved = self.distances[self.success & (self.distances > 0)]
        forwards, backwards = self.passes()
        return (
            f"Flips({len(self)} samples, l{self.norm:g}, {_box(self.domain)}, by "
            f"{' + '.join(self.methods)}: "
            f"{int((self.distances == 0).sum())} wrong already, {len(moved)} flipped at mean "
            f"distance {_mean(moved):.4g}, "
            f"{int((~self.success).sum())} not flipped; {forwards:.1f} F + {backwards:.1f} B per "
            "attacked sample)"
        )


def sample_weights(mu: Tensor | None, n: int) -> Tensor:
    """The weights `mu_i` of N samples, float64, scaled to sum to one unless they do already;
    `1/N` each if none are given.
    """
    if mu is None:
        return torch.full((n,), 1 / n if n else 0.0, dtype=torch.float64)
    mu = torch.as_tensor(mu, dtype=torch.float64).cpu()
    if (
        mu.shape != (n,)
        or not (mu >= 0).all()
        or not torch.isfinite(mu).all()
        or (n and mu.sum() <= 0)
    ):
        raise InputError(
            f"mu must hold {n} finite sample weights >= 0 that are not all zero, one for each "
            "sample."
        )
    total = math.fsum(mu.tolist())  # exact, so that the order of the samples cannot matter
    # The budget of a sum of N costs has room for 1e-12: weights that are off by more are put right.
    return mu if not n or abs(total - 1) < 1e-13 else mu / total


def transport_cost(mu: Tensor, weights: Tensor, distances: Tensor, order: float) -> float:
    """`(sum_i mu_i a_i d_i^p)^(1/p)`, for order inf the largest distance that carries mass; all
    `(N,)` float64.
    """
    used = (mu > 0) & (weights > 0) & (distances > 0)
    d = distances[used]
    if not len(d) or order == math.inf:
        return float(d.max()) if len(d) else 0.0
    scale = d.max()  # keeps d^p from overflowing for large orders
    return float(scale * (mu[used] * weights[used] * (d / scale) ** order).sum() ** (1 / order))


def knapsack(distances: Tensor, eps: Number, order: Number, mu: Tensor | None = None) -> Tensor:
    """The weights `a_i`, float64 `(N,)`, that maximise `sum_i mu_i a_i` within the budget: nearest
    samples first.

    Samples at exactly the same distance get the same weight, so the answer does not depend on the
    order of the samples. The cost of the answer, as `transport_cost` computes it, never exceeds
    `eps`, not even by rounding.
    """
    eps = parse_eps(eps)
    order = parse_order(order)
    distances = torch.as_tensor(distances, dtype=torch.float64).cpu()
    if not (distances >= 0).all():  # NaN fails too
        raise InputError("distances must be numbers >= 0, with inf where no flip is known.")
    mu = sample_weights(mu, len(distances))
    if order == math.inf:
        return (distances <= eps).double()
    level, group = torch.unique(distances, return_inverse=True)  # sorted
    price = (
        level / eps
    ) ** order  # in units of eps^p, so nothing near the threshold can over- or underflow
    mass = torch.zeros_like(level).index_add(0, group, mu)
    bill = torch.where(mass > 0, mass * price, 0.0)
    left = 1 - (bill.cumsum(0).roll(1).index_fill(0, torch.tensor([0]), 0.0) if len(bill) else bill)
    share = torch.where(left > 0, (left / torch.where(bill > 0, bill, 1)).clamp(max=1), 0.0)
    share = torch.where((bill == 0) & (left > 0), 1.0, share)
    share = torch.where(torch.isfinite(level), share, 0.0)
    weights = share[group]
    bought = (share > 0).nonzero()
    for tries in range(
        60
    ):  # rounding: take an ulp or two from the dearest group until the promise holds
        if transport_cost(mu, weights, distances, order) <= eps or not len(bought):
            break
        share[bought[-1]] *= 1 - 2.0 ** (tries - 52)
        weights = share[group]
    return weights


@dataclass(frozen=True, eq=False, repr=False)
class Distribution(Record):
    """An adversarial distribution on up to 2N points, `sum_i mu_i [(1 - a_i) delta(x_i) + a_i
    delta(point_i)]`.

    x, y: samples and labels; points `(N, *shape)`; weights: the `a_i = 1/kappa_i`, float64 `(N,)`;
    distances: how far each point lies from its sample, float64 `(N,)`; clean_predicted, predicted:
    class at the sample and at the point, `(N,)`; mu: sample weights, float64 `(N,)`; forwards,
    backwards, checks: passes `(N,)`; threat: what it was built for; allocation: "knapsack" if the
    weights come from it, "fixed" if the method gave them.
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

    @classmethod
    def from_search(
        cls,
        x: Tensor,
        y: Tensor,
        found: Search,
        threat: Threat,
        weight: float,
        method: str,
        info: Mapping[str, Any],
        mu: Tensor | None = None,
    ) -> Distribution:
        """The distribution that moves the share `weight` of every sample to its verified point."""
        return cls(
            x,
            y,
            found.points,
            torch.full((len(x),), weight, dtype=torch.float64),
            distances_between(found.points, x, threat.norm),
            found.clean,
            found.predicted,
            sample_weights(mu, len(x)),
            found.forwards,
            found.backwards,
            found.checks,
            threat,
            method,
            "fixed",
            {"versions": versions(), "dtype": str(x.dtype), **info},
        )

    @property
    def labels(self) -> Tensor:
        """The labels of the samples; the adversary cannot change them."""
        return self.y

    @property
    def accuracy(self) -> float:
        """`sum_i mu_i ((1 - a_i) 1[sample correct] + a_i 1[point correct])`: the robust
        accuracy this witnesses.
        """
        return self._accuracy(self.mu, self.weights)

    @property
    def clean_accuracy(self) -> float:
        """Accuracy on the samples themselves."""
        return self._accuracy(self.mu, torch.zeros_like(self.weights))

    @property
    def cost(self) -> float:
        """The transport cost, in units of eps and at most eps: `(sum_i mu_i a_i d_i^p)^(1/p)`;
        order inf: the largest.

        Of every point that moved, flipped or not; `spent` is the share of eps that the flips took.
        """
        return transport_cost(self.mu, self.weights, self.distances, self.threat.order)

    @property
    def spent(self) -> float:
        """The share of eps that its flips cost: the transport cost of the misclassified points
        alone, over eps.

        Reports say this. `cost` counts every point that moved. An attack that moves all samples,
        such as WDA, pays for points that are still classified correctly, too: without them the
        accuracy is the same, and the budget they took is free.
        """
        flipped = (self.predicted != self.y).cpu() & (self.clean_predicted == self.y).cpu()
        price = transport_cost(
            self.mu, torch.where(flipped, self.weights, 0.0), self.distances, self.threat.order
        )
        return price / self.threat.eps

    @property
    def flips(self) -> Flips:
        """The misclassified points of this distribution, for `Flips.merge` and every other
        order and eps.
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
            self.y,
            found,
            self.threat.norm,
            self.threat.domain,
            self.method,
            dict(self.info),
        )

    def atoms(self) -> tuple[Tensor, Tensor]:
        """The 2N points `(2N, *shape)`, samples first, and their masses, float64 `(2N,)`,
        summing to one.
        """
        return torch.cat([self.x, self.points]), torch.cat(
            [self.mu * (1 - self.weights), self.mu * self.weights]
        )

    def verify(self, model: Model, batch_size: int | None = None) -> Verification:
        """Recompute from the stored tensors everything the distribution claims. True if all of
        it holds.
        """
        x, y = check_data(self.x, self.y, self.threat.domain)
        found = search(_replay(self.points), model, x, y, batch_size, tolerance=0.0)
        predicted = torch.where(
            self.predicted == y, y, found.predicted
        )  # a point wrong by less than claimed is no lie
        length = distances_between(self.points, x, self.threat.norm)
        wrong = {
            "samples predicted differently": int((found.clean != self.clean_predicted).sum()),
            "points predicted differently": int((predicted != self.predicted).sum()),
            "points outside the box": int((~_in_box(self.points, self.threat.domain)).sum()),
            "distances misstated": int((length != self.distances).sum()),
            "weights outside [0, 1]": int(((self.weights < 0) | (self.weights > 1)).sum()),
        }
        again = self._accuracy(self.mu, self.weights, found.clean, predicted)
        cost = transport_cost(self.mu, self.weights, length, self.threat.order)
        problems = [f"{count} {name}" for name, count in wrong.items() if count]
        if cost > self.threat.eps:
            problems.append(f"cost {cost:.9g} above eps {self.threat.eps:.9g}")
        return Verification(tuple(problems), again, cost)

    def interval(
        self, level: float = 0.95, resamples: int = 1000, seed: int = 0
    ) -> tuple[float, float]:
        """Bootstrap confidence interval of the accuracy over samples (percentile).

        Each resample of the N samples re-runs the knapsack where the weights came from it;
        otherwise the weights stay.
        """
        level = parse_level(level, "level")
        n = len(self.y)
        if n == 0:
            return math.nan, math.nan
        generator = torch.Generator().manual_seed(seed)
        stats = []
        for _ in range(resamples):
            drawn = torch.multinomial(self.mu, n, replacement=True, generator=generator)
            mu = torch.bincount(drawn, minlength=n) / n
            weights = self.weights
            if self.allocation == "knapsack":
                weights = knapsack(self._priced, self.threat.eps, self.threat.order, mu.double())
            stats.append(self._accuracy(mu.double(), weights))
        tail = (1 - level) / 2
        low, high = (
            torch.tensor(stats, dtype=torch.float64)
            .quantile(torch.tensor([tail, 1 - tail]).double())
            .tolist()
        )
        return low, high

    @cached_property
    def _priced(self) -> Tensor:
        flipped = (self.predicted != self.y).cpu()
        return torch.where(flipped, self.distances, math.inf)

    @cached_property
    def _right(self) -> tuple[Tensor, Tensor]:
        """Where the class is right, at the samples and at the points, bool `(N,)`, on the CPU."""
        return (self.clean_predicted == self.y).cpu(), (self.predicted == self.y).cpu()

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
        at_point = self._right[1] if predicted is None else (predicted == self.y).cpu()
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


@dataclass(frozen=True)
class Verification:
    """What `Distribution.verify` found: true if nothing was wrong; accuracy and cost as
    recomputed.
    """

    problems: tuple[str, ...]
    accuracy: float
    cost: float

    def __bool__(self) -> bool:
        return not self.problems


def allocate(flips: Flips, eps: Number, order: Number, mu: Tensor | None = None) -> Distribution:
    """The distribution of `Omega_order(eps)` that the flips allow: the budget buys the nearest
    flips first (WDA++).

    This is the allocation of Algorithm 2 with `a_i = 1/kappa_i`, exact for these distances (THEORY
    2a).
    """
    threat = Threat(flips.norm, parse_order(order), parse_eps(eps), flips.domain)
    mu = sample_weights(mu, len(flips))
    weights = knapsack(flips.distances, threat.eps, threat.order, mu)
    correct = flips.distances > 0
    return Distribution(
        flips.x,
        flips.y,
        flips.points,
        weights,
        distances_between(flips.points, flips.x, flips.norm),
        torch.where(correct.to(flips.y.device), flips.y, flips.labels),
        flips.labels,
        mu,
        flips.forwards,
        flips.backwards,
        flips.checks,
        threat,
        " + ".join(flips.methods),
        "knapsack",
        flips.info,
    )


@dataclass(frozen=True, eq=False, repr=False)
class RiskCurve(Record):
    """Robust accuracy over `Omega_order(eps)` as a function of eps, exact for the distances and
    radii it is made from.

    `curve(eps)` is the pair (certified, attacked): at least the first, at most the second. The
    error is piecewise linear in `eps^p`, with breakpoints at the sorted cumulative sums; nothing is
    attacked or certified again to draw it. Certified accuracy is rounded down: for the radii and
    weights as stored it is never above the true value, not even by rounding. distances, radii, mu:
    float64 `(N,)`; radii None if nothing is certified; order: p.
    """

    distances: Tensor
    radii: Tensor | None
    mu: Tensor
    order: float

    def __call__(self, eps: Number) -> tuple[float, float]:
        """`(certified, attacked)` accuracy at `eps >= 0`; certified is 0 when no radii were given.

        Sets are closed (THEORY 2a): at order inf a flip at exactly eps counts, and a radius of
        exactly eps protects.
        """
        value = self._budget(eps)
        attacked = self._attacked.accuracy(value)
        certified = self._certified.proved(value) if self._certified else 0.0
        return min(certified, attacked), attacked

    def gap(self, eps: Number) -> float:
        """`attacked - certified` at `eps >= 0`: how much is not known there."""
        certified, attacked = self(eps)
        return attacked - certified

    def largest_gap(self) -> tuple[float, float]:
        """The largest gap over all eps, and an eps where it is: a bend of one of the sides."""
        if not len(self.mu):
            return math.nan, math.nan
        sides = [self._attacked] + ([self._certified] if self._certified else [])
        bends = torch.cat([side.breakpoints()[0] for side in sides])
        if (
            self.order == math.inf
        ):  # a radius of exactly eps still protects: certified accuracy drops right after it
            bends = torch.cat([bends, torch.nextafter(bends, torch.full_like(bends, math.inf))])
        gaps = self._attacked.accuracies(bends)
        if self._certified:
            gaps = gaps - self._certified.accuracies(bends)
        eps = float(bends[gaps.argmax()])
        return self.gap(eps), eps

    def area(self, eps: Number) -> float:
        """The area between the two sides over [0, eps], `int_0^eps attacked - certified`, to
        rounding.
        """
        value = self._budget(eps)
        return self._attacked.area(value) - (
            self._certified.area(value) if self._certified else 0.0
        )

    def breakpoints(self, side: str = "attacked") -> tuple[Tensor, Tensor]:
        """The eps at which the curve bends, and the accuracy there; order inf: drops, and what to.
        float64 `(B,)` each.

        On the certified side both are rounded down: the accuracy is at least that much up to that
        eps.
        """
        return self._side(side).breakpoints()

    def inverse(self, accuracy: Number, side: str = "attacked") -> float:
        """The smallest eps at which the accuracy falls to a level, inf if it never does;
        certified: rounded down.
        """
        return self._side(side).inverse(parse_level(accuracy, "accuracy"))

    def plot(self, ax: Any = None, eps: Number | None = None, mark: Number | None = None) -> Any:
        """Both sides against eps from 0 to `eps`, the band between them filled, on matplotlib axes,
        which are returned.

        ax: where to draw (default: a new figure, `ax.figure.savefig(...)` writes it); mark: an eps
        to point out.
        """
        from wassail.report.sandwich import plot_curve

        return plot_curve(
            self,
            ax,
            None if eps is None else self._budget(eps),
            None if mark is None else self._budget(mark),
        )

    @cached_property
    def _attacked(self) -> _Side:
        return _Side(self.distances, self.mu, self.order)

    @cached_property
    def _certified(self) -> _Side | None:
        return (
            None if self.radii is None else _Side(self.radii, self.mu, self.order, certified=True)
        )

    def _side(self, side: str) -> _Side:
        chosen = {"attacked": self._attacked, "certified": self._certified}.get(side)
        if chosen is None:
            raise InputError(
                f"the curve has no side {side!r}: choose 'attacked', or 'certified' if radii "
                "were given."
            )
        return chosen

    def _budget(self, eps: Number) -> float:
        value = number(eps, "eps")
        if value < 0:
            raise InputError(f"eps is {eps!r}: a curve is defined for eps >= 0.")
        return value

    def __repr__(self) -> str:
        head = (
            f"RiskCurve(order {self.order:g}, {len(self.mu)} samples: accuracy "
            f"{self(0)[1]:.4f} at eps 0; "
        )
        half = self.inverse(0.5)
        if self.radii is None:
            return head + f"attacked: at most 0.5 from eps {half:.4g} on; nothing certified)"
        gap, where = self.largest_gap()
        return head + (
            f"certified: at least 0.5 up to eps {self.inverse(0.5, 'certified'):.4g}, attacked: "
            "at most 0.5 from eps "
            f"{half:.4g} on; largest gap {gap:.4f} at eps {where:.4g})"
        )


class CertifiedRadii(Protocol):
    """What a risk curve needs of certified radii: `Radii` has it."""

    @property
    def values(self) -> Tensor:
        """The radii, float64 `(N,)`."""

    @property
    def norm(self) -> float:
        """The ground norm r they were certified for."""

    @property
    def domain(self) -> Domain:
        """The box they were certified in, or None."""


def risk_curve(
    flips: Flips,
    radii: CertifiedRadii | Tensor | None = None,
    order: Number = 1,
    mu: Tensor | None = None,
) -> RiskCurve:
    """The whole accuracy curve over eps for one order, from one set of flips and, if given,
    certified radii.

    radii: `Radii` for the same samples, norm and domain, or a tensor `(N,)` that is trusted to be.
    A radius above the distance of a flip of the same sample is a contradiction between an evaluated
    point and a proof, and an error.
    """
    values = None
    if radii is not None:
        if not isinstance(radii, Tensor):
            for name in ("norm", "domain"):
                check_equal(name, getattr(flips, name), getattr(radii, name))
            radii = radii.values
        values = torch.as_tensor(radii, dtype=torch.float64).cpu()
        if values.shape != flips.distances.shape or not (values >= 0).all():
            raise InputError(f"radii must hold {len(flips)} numbers >= 0, one for each sample.")
        values = below(values, flips.distances, flips.x[:1].numel())
    return RiskCurve(flips.distances, values, sample_weights(mu, len(flips)), parse_order(order))


def below(radii: Tensor, distances: Tensor, size: int) -> Tensor:
    """The radii, at most the distances: what rounding may take from a distance is clipped, more
    than that is an error.

    radii, distances: float64 `(N,)`; size: coordinates of a sample, which bound the rounding of a
    distance.
    """
    slack = (size + 4) * 2.0**-52
    wrong = (radii > distances * (1 + slack)).nonzero().flatten().tolist()
    if wrong:
        i = wrong[0]
        raise InputError(
            f"sample {i} has a certified radius {float(radii[i])!r} above the distance "
            f"{float(distances[i])!r} of its "
            f"evaluated flip ({len(wrong)} such samples): one of the two is wrong, so trust "
            "neither; check that both are for "
            "the same model, samples and precision, and report it if they are."
        )
    return torch.minimum(radii, distances)


class _Side:
    """One side of a risk curve: sorted distances, cumulative mass, and the eps at which each is
    paid in full.

    Cumulative costs are kept as logarithms, `log sum_i mu_i d_i^p`, so that no order over- or
    underflows. certified: the distances are radii, whose curve may be rounded down only.
    """

    def __init__(
        self, distances: Tensor, mu: Tensor, order: float, certified: bool = False
    ) -> None:
        keep = torch.isfinite(distances) & (mu > 0)
        self.d, where = distances[keep].sort(stable=True)
        self.mu = mu[keep][where]
        self.mass = torch.cat([torch.zeros(1, dtype=torch.float64), self.mu.cumsum(0)])
        self.order = order
        self.certified = certified
        self.total = float(mu.sum())
        self.least = -_sum_up((-mu).tolist())  # the total, rounded down
        self.empty = len(mu) == 0
        self.slack = (len(self.d) + 16) * 2.0**-52  # of a sum of all masses
        if order == math.inf or not len(self.d):
            self.paid = self.d
        else:
            bill = self.mu.log() + order * self.d.log()
            total = bill.logcumsumexp(0)
            self.paid = (total / order).exp()
            # each term and each partial sum is off by its own size times 2^-52, and exp makes that
            # relative
            if certified:
                size = max(float(v.abs().nan_to_num(posinf=0.0).max()) for v in (bill, total))
                self.paid = self.paid * (1 - self.slack * (2 * size / order + 4))

    def accuracy(self, eps: float) -> float:
        """The accuracy at eps, to rounding."""
        return float(self.accuracies(torch.tensor([eps], dtype=torch.float64))[0])

    def accuracies(self, eps: Tensor) -> Tensor:
        """The accuracy at several eps, `(T,)`, to rounding."""
        if self.empty:
            return torch.full_like(eps, math.nan)
        if self.order == math.inf:
            bought = self.mass[torch.searchsorted(self.d, eps, right=True)]
            if self.certified:
                bought = torch.where(eps > 0, self.mass[torch.searchsorted(self.d, eps)], bought)
        else:
            k = torch.searchsorted(self.paid, eps, right=True)
            bought = self.mass[k]
            if len(self.d):
                next_ = k.clamp(max=len(self.d) - 1)
                spent = torch.where(k > 0, self.paid[(k - 1).clamp(min=0)], 0.0)
                unit = self.d[next_]
                part = (eps / unit) ** self.order - (spent / unit) ** self.order
                bought = bought + torch.where(
                    k < len(self.d), torch.minimum(part, self.mu[next_]), 0.0
                )
        return (self.total - bought).clamp(min=0) / self.total

    def proved(self, eps: float) -> float:
        """The accuracy at eps, rounded down, so that it holds for the radii and masses as they
        are stored.
        """
        if self.empty:
            return math.nan
        return _floor(1 - Fraction(self._most(eps)) / Fraction(self.least))

    def _most(self, eps: float) -> float:
        """An upper bound on the mass that can leave its radius.

        For finite p by weak duality, which no rounding of the multiplier can make false: for every
        u

            max { sum_i mu_i a_i : sum_i mu_i a_i r_i^p <= eps^p }  <=  (eps/u)^p + sum_{r_i < u}
            mu_i (1 - (r_i/u)^p),

        with equality where u is the radius at which the budget runs out.
        """
        if self.order == math.inf or eps == 0:
            return _sum_up(self.mu[: int(torch.searchsorted(self.d, eps, right=eps == 0))].tolist())
        k = int(torch.searchsorted(self.paid, eps, right=True))
        everything = _sum_up(self.mu.tolist())
        if k == len(self.d):
            return everything
        unit = float(self.d[k])
        part = float((eps / unit) ** self.order) + float(
            (self.mu[:k] * (1 - (self.d[:k] / unit) ** self.order)).sum()
        )
        slack = self.slack + 2 * self.order * 2.0**-52  # a rounded quotient, to the power p
        return min(part * (1 + slack) + slack * float(self.mass[k]) + 2.0**-1000, everything)

    def breakpoints(self) -> tuple[Tensor, Tensor]:
        accuracy = (self.total - self.mass).clamp(min=0) / self.total
        if self.certified:
            accuracy = (accuracy - self.slack).clamp(min=0)
        eps = torch.cat([torch.zeros(1, dtype=torch.float64), self.paid])
        last = torch.cat(
            [eps[1:] > eps[:-1], torch.ones(1, dtype=torch.bool)]
        )  # of equal eps the lowest accuracy holds
        return eps[last], accuracy[last]

    def inverse(self, level: float) -> float:
        if self.empty:
            return math.nan
        need = self.total * (1 - level)  # the error to be bought
        k = int(
            torch.searchsorted(self.mass, need - max(1e-12, self.slack), side="left")
        )  # first k samples that suffice
        if k == 0 or k > len(self.d):
            return 0.0 if k == 0 else math.inf
        if self.order == math.inf:
            return float(self.d[k - 1])
        spent = float(self.paid[k - 2]) if k > 1 else 0.0
        unit = float(self.d[k - 1])
        if unit == 0:
            return 0.0
        part = max(need - float(self.mass[k - 1]) - (self.slack if self.certified else 0.0), 0.0)
        eps = float(unit * ((spent / unit) ** self.order + part) ** (1 / self.order))
        return eps * (1 - self.slack) if self.certified else eps

    def area(self, eps: float) -> float:
        """`int_0^eps accuracy`: between two bends it is linear in `eps^p`, for order inf
        constant.
        """
        if self.empty or eps == 0:
            return math.nan if self.empty else 0.0
        ends = torch.tensor([0.0, eps], dtype=torch.float64)
        knots = torch.unique(torch.cat([ends, self.paid[(self.paid > 0) & (self.paid < eps)]]))
        a = knots[:-1]
        b = knots[1:]
        if self.order == math.inf:
            return float(((b - a) * self.accuracies((a + b) / 2)).sum())
        p = self.order
        t = a / b
        at = self.accuracies(knots)
        # int_a^b (e^p - a^p) / (b^p - a^p) de = b mean, between 0 and b - a
        mean = (1 - t ** (p + 1)) / (p + 1) - t**p * (1 - t)
        mean = torch.minimum((mean / (1 - t**p)).nan_to_num(0.0).clamp(min=0), 1 - t)
        return float(((b - a) * at[:-1] + (at[1:] - at[:-1]) * b * mean).sum())


def _sum_up(values: list[float]) -> float:
    """The sum, rounded up: `fsum` is the nearest number, and of what it leaves out it gives the
    sign exactly.
    """
    total = math.fsum(values)
    return total if math.fsum([*values, -total]) <= 0 else math.nextafter(total, math.inf)


def _floor(value: Fraction) -> float:
    """The largest float64 that is not above a number, and not below 0."""
    near = max(float(value), 0.0)
    return near if near == 0 or Fraction(near) <= value else math.nextafter(near, 0.0)


def _replay(points: Tensor) -> ChunkAttack:
    """A chunk attack that only hands out points made elsewhere: one forward at the samples, the
    check at the points.
    """

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        return points[network.ids].to(x.device), network.logits(x, network.rows)

    return chunk


def _in_box(points: Tensor, domain: Domain) -> Tensor:
    flat = points.detach().cpu().flatten(1)
    if domain is None:
        return torch.ones(len(points), dtype=torch.bool)
    return ((flat >= domain[0]) & (flat <= domain[1])).all(1)


def _box(domain: Domain) -> str:
    return "no box" if domain is None else f"box [{domain[0]:g}, {domain[1]:g}]"


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
