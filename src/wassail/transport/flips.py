"""The nearest flips known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wassail.checks import check_task
from wassail.device import write
from wassail.errors import InputError, instance, numbers
from wassail.geometry import column, project
from wassail.geometry import distances as distances_between
from wassail.losses import flip_tolerance
from wassail.network import ChunkAttack, Model, Network, Search, search, versions
from wassail.notebook import card, pairs, picture
from wassail.progress import Progress, Tick
from wassail.records import Record, check_equal
from wassail.specification import Labels, Specification, labels_of, specification_of
from wassail.threat import (
    Domain,
    Number,
    box_at,
    box_text,
    fitted,
    parse_domain,
    parse_eps,
    parse_norm,
)
from wassail.transport.allocation import mean_of, sample_weights
from wassail.transport.given import Inward, in_box, into_box, replay
from wassail.transport.picture import draw_distances

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

    `labels` is the class predicted at the point; the true labels are `y`. With a specification
    class 0 is right, which is `y` everywhere, and class j is its row j, counted from 1.

    Args:
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`.
        points: the flips, `(N, *shape)`; the sample itself where none is known.
        distances: float64 `(N,)`, 0 where the sample is wrong already, inf where no flip is known.
        labels: class predicted at the point, `(N,)`.
        forwards: forward passes spent on each sample, `(N,)`.
        backwards: backward passes spent on each sample, `(N,)`.
        checks: passes of the final verification, `(N,)`.
        found_by: index into `methods`, `(N,)`.
        norm: ground norm of the distances.
        domain: box `(low, high)`, or None.
        methods: names of the methods that found flips.
        info: options, seed and versions.
        specification: what right means; default None, the labels.
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
    specification: Specification | None = None

    @property
    def task(self) -> Labels:
        """What right means: the specification, or the labels."""
        return self.y if self.specification is None else self.specification

    @classmethod
    def from_search(
        cls,
        x: Tensor,
        y: Labels,
        found: Search,
        norm: float,
        domain: Domain,
        method: str,
        info: Mapping[str, Any],
        length: Tensor | None = None,
    ) -> Flips:
        """Flips from verified points: a point counts if it is misclassified and inside the box.

        Args:
            x: samples, float tensor `(N, *shape)`, inside the domain.
            y: true labels, integer tensor `(N,)`, or a `Specification`.
            found: what the search returned.
            norm: ground norm of the distances.
            domain: box `(low, high)`, or None.
            method: name of the method.
            info: options and seed, kept with the result.
            length: distance of each point from its sample, float64 `(N,)`; default None, computed.
        """
        if length is None:
            length = distances_between(found.points, x, norm)
        goal, y = specification_of(y), labels_of(y, x.device)
        domain = fitted(domain, x)
        wrong = (found.clean != y).cpu()
        flipped = (found.predicted != y).cpu() & in_box(found.points, domain)
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
            goal,
        )

    @classmethod
    def from_points(
        cls,
        model: Model,
        x: Tensor,
        y: Labels,
        x_adv: Tensor,
        norm: Number,
        domain: Domain = (0.0, 1.0),
        *,
        eps: Number | Sequence[Number] | None = None,
        pull_in: bool = True,
        method: str = "points",
        tolerance: float = 0.0,
        batch_size: int | None = None,
        progress: Progress = False,
    ) -> Flips:
        """Anyone's adversarial examples as flips, for about three forward passes: at the samples,
        at the points and a little nearer.

        Points that are not misclassified are no flips: their distance is inf. Somebody else's point
        counts however narrowly it is wrong; our own engines keep a margin (`tolerance`), so that a
        flip survives another batch size.

        An attack that stops at eps in float32 leaves points up to 1e-7 beyond it. So each flip is
        pulled toward its sample by the rounding of its coordinates, eight units in the last place,
        and kept there if it still flips; with `eps` those that are beyond it by rounding, or by
        at most 0.1 %, are moved to it, and a warning says how many are flips only beyond it.

        A point that leaves the box by rounding, at most 0.1 % of its width, is moved to the
        nearest point of the box and judged there; one that is farther outside is no flip. A
        warning says how many there are of both.

        Args:
            model: callable from a batch `(n, *shape)` to logits `(n, K)`.
            x: samples, float tensor `(N, *shape)`, inside the domain.
            y: true labels, integer tensor `(N,)`, or a `Specification`.
            x_adv: one point for each sample, `(N, *shape)`.
            norm: ground norm r, 1, 2 or inf.
            domain: box `(low, high)`, or None for all of R^n; default (0, 1).
            eps: the budget of their attack, or several; default None, not known.
            pull_in: bool, keep flips nearer by their rounding; default True. False judges the
                points as they are.
            method: what to call their origin; default "points".
            tolerance: float, by how much a logit must lead to count, relative to their size;
                default 0.
            batch_size: int, most samples in one call of the model; default None, 250.
            progress: bool, or a callable that is given the share done; default False, no bar.
        """
        norm = parse_norm(norm)
        domain = parse_domain(domain, own=True)
        x, y = check_task(x, y, domain, model)
        budgets = _budgets(eps)
        try:
            given = torch.as_tensor(x_adv).detach()
            x_adv = given.to(x)
        except (TypeError, ValueError, RuntimeError):
            raise numbers(x_adv, "the points") from None
        if x_adv.shape != x.shape:
            raise InputError(
                f"the points have shape {tuple(x_adv.shape)} but the samples {tuple(x.shape)}: "
                "give one point a sample."
            )
        if not torch.isfinite(x_adv).all():
            raise InputError(
                "the points contain NaN or infinity: remove them or put the sample itself there."
            )
        x_adv = into_box(x_adv, domain)
        dtype = given.dtype if given.is_floating_point() else x.dtype
        inward = Inward(x_adv, x, norm, domain, dtype, budgets) if pull_in else None
        attack = replay(x_adv) if inward is None else inward.chunk_attack(tolerance)
        found = search(attack, model, x, y, batch_size, progress, "checking points", tolerance)
        flips = cls.from_search(x, y, found, norm, domain, method, {"method": method})
        if inward is not None:
            inward.warn(flips.distances)
        return flips

    def shorten(self, model: Model, passes: int = 10, batch_size: int | None = None) -> Flips:
        """The flips pulled toward their samples until the model is about to be right: anyone's
        points brought to the boundary.

        Bisection along norm-aware points (scaled for l2, clipped for linf, soft-thresholded for
        l1), of which the last flip is kept. No distance grows.

        Args:
            model: from a batch to logits.
            passes: bisections, one forward pass a sample each, 10 by default; the pass at the
                sample comes on top.
            batch_size: rows of one call of the model.
        """
        if passes < 1:
            raise InputError(f"passes is {passes}: give the number of bisections, at least 1.")
        found = search(
            _pull(self, passes), model, self.x, self.task, batch_size, description="shortening"
        )
        info = {"method": "shortened", "passes": passes}
        args = (self.norm, self.domain, "shortened", info)
        return self.merge(Flips.from_search(self.x, self.task, found, *args))

    def merge(self, *others: Flips) -> Flips:
        """The nearest flip of each sample over several results for the same samples; passes add up.

        Args:
            *others: `Flips` of the same samples, norm and domain.
        """
        best = self
        for other in others:
            instance(other, Flips, "what is merged is", "as ws.nearest returns them")
            for name in ("x", "y", "specification", "norm", "domain"):
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
                best.specification,
            )
        return best

    def take(self, chosen: Tensor) -> Flips:
        """The flips of some of the samples: a bool mask or an index.

        Args:
            chosen: bool mask `(N,)` or index.
        """
        some: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _PER_SAMPLE}
        goal = self.specification
        some |= {"domain": box_at(self.domain, chosen)}
        return replace(self, **some, specification=None if goal is None else goal.take(chosen))

    def put(self, chosen: Tensor, part: Flips) -> Flips:
        """Flips for all samples that hold `part` at the chosen ones and nothing, at no pass,
        elsewhere; for `merge`.

        Args:
            chosen: bool mask `(N,)` or index of the samples of `part`.
            part: their `Flips`.
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

        Args:
            model: callable from a batch `(n, *shape)` to logits `(n, K)`.
            levels: int, grid steps over the box; default 255, 8-bit images.
            batch_size: int, most samples in one call of the model; default None, 250.
        """
        if self.domain is None:
            raise InputError(
                "rounding to an image grid needs a box: these flips were found without one."
            )
        parse_domain(self.domain)  # one box for all: a grid has one unit
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
                self.task,
                (low + unit * grid.clamp(0, levels)).clamp(low, high),  # type: ignore[arg-type]
                self.norm,
                self.domain,
                pull_in=False,
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
        """Accuracy on the samples themselves (a tie counts as an error).

        Args:
            mu: sample weights, tensor `(N,)`; default None, 1/N each.
        """
        mu = sample_weights(mu, len(self.distances))
        return float((mu * (self.distances > 0)).sum() / mu.sum()) if len(self.y) else math.nan

    def passes(self) -> tuple[float, float]:
        """Mean forward and backward passes over the samples that had to be attacked."""
        attacked = self.distances > 0
        return mean_of(self.forwards[attacked]), mean_of(self.backwards[attacked])

    def __len__(self) -> int:
        return len(self.distances)

    def __repr__(self) -> str:
        moved = self.distances[self.success & (self.distances > 0)]
        forwards, backwards = self.passes()
        return (
            f"Flips({len(self)} samples, l{self.norm:g}, {box_text(self.domain)}, by "
            f"{' + '.join(self.methods)}: "
            f"{int((self.distances == 0).sum())} wrong already, {len(moved)} flipped at mean "
            f"distance {mean_of(moved):.4g}, "
            f"{int((~self.success).sum())} not flipped; {forwards:.1f} F + {backwards:.1f} B per "
            "attacked sample)"
        )

    def _repr_html_(self) -> str:
        moved = self.distances[self.success & (self.distances > 0)]
        forwards, backwards = self.passes()
        rows = [
            ("threat", f"l{self.norm:g}, {box_text(self.domain)}"),
            ("found by", " + ".join(self.methods)),
            ("wrong already", int((self.distances == 0).sum())),
            ("flipped", f"{len(moved)}, at mean distance {mean_of(moved):.4g}"),
            ("not flipped", int((~self.success).sum())),
            ("passes a sample", f"{forwards:.1f} forward, {backwards:.1f} backward"),
        ]
        drawn = picture(
            lambda: draw_distances(self.distances, norm=self.norm),
            "histogram of the distances of the nearest flips",
        )
        return card(f"Nearest flips of {len(self)} samples", pairs(rows), drawn)


def _budgets(eps: Number | Sequence[Number] | None) -> list[float]:
    """None, one eps or several, as a list."""
    if eps is None:
        return []
    if isinstance(eps, str) or not isinstance(eps, Sequence):
        return [parse_eps(eps)]
    return [parse_eps(value) for value in eps]


def _pull(flips: Flips, times: int) -> ChunkAttack:
    """A chunk attack that bisects from each flip toward its sample, `times` forward passes."""

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        clean = network.logits(x, network.rows)
        network.measure(clean)
        domain = network.boxes(flips.domain, x)
        start = flips.points[network.ids.to(flips.points.device)].to(x.device)
        length = flips.distances[network.ids].to(x)
        rows = (torch.isfinite(length) & (length > 0)).nonzero()[:, 0]
        best = start.clone()
        low = torch.zeros_like(length[rows])
        high = torch.ones_like(low)
        for k in range(times if len(rows) else 0):
            middle = (low + high) / 2
            radius = middle * length[rows]
            trial = project(start[rows], x[rows], flips.norm, radius, box_at(domain, rows))
            z = network.logits(trial, rows)
            flipped = network.predict(z, y[rows], rows) != y[rows]
            write(best, flipped, trial, rows)
            low = torch.where(flipped, low, middle)
            high = torch.where(flipped, middle, high)
            tick((k + 1) / times)
        return best, clean

    return chunk
