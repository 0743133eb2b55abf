"""Evaluated points of high loss: the lower side of a curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.loss.samples import Samples
from wassail.errors import InputError
from wassail.geometry import column, maximiser, project, pull_inside, sides, steepest
from wassail.geometry import distances as distances_between
from wassail.network import BATCH_SIZE

CLIMB = 8  # evaluations a sample and radius of the search for points of high loss
# radii on R^n beyond the grid, each 4 times the one before: where the slope at infinity shows
FAR = 10


class Points:
    """Evaluated points, found by an ascent inside larger and larger balls."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.x = samples.x
        self.clean, self.clean_predicted = samples.loss.judged(samples.evaluated(self.x))
        self.best = self.x.double()
        self.top = samples.loss.height(samples.scores(self.best))
        self.parts: list[tuple[Tensor, ...]] = []

    def climb(self, radius: float) -> None:
        """The highest points met within a radius, from the best so far on.

        In turn the maximiser over the whole ball of the loss linearised at the last point, which is
        exact for linear networks, and a step from the best point, half as long each time; of errors
        once with each sign. When the time is up the best points so far are added once.

        Args:
            radius: around every sample.
        """
        if self.parts and clock.out_of_time():
            return
        samples = self.samples
        x = self.x.double()
        where = (samples.norm, radius, samples.domain)
        with suppress(clock.Late):
            for start in samples.loss.starts:
                point = self.best
                for k in range(CLIMB):
                    g = self._gradient(point, None if k else start)
                    if k % 2 == 0:
                        point = x + steepest(x, g, *where)
                    else:
                        ahead = radius * 2.0 ** (-k // 2) * maximiser(g, samples.norm)
                        point = project(self.best + ahead, x, *where)
                    self._keep(point)
        self.add(self.best.to(self.x.dtype), radius)

    def add(self, points: Tensor, radius: float | None) -> None:
        """Points `(N, *shape)`, one a sample, pulled into the box and a radius as they are stored,
        and evaluated there.

        Args:
            points: where the samples go.
            radius: how far at most; None for any.
        """
        if points.shape != self.x.shape:
            raise InputError(
                f"the points have shape {tuple(points.shape)} but the samples "
                f"{tuple(self.x.shape)}: give one point a sample."
            )
        samples = self.samples
        points = points.to(self.x)
        if radius is not None:
            points = pull_inside(points, self.x, samples.norm, radius, samples.domain)
        inside = torch.isfinite(points).flatten(1).all(1)
        if samples.domain is not None:
            low, high = sides(samples.domain, points)
            inside &= ((points >= low) & (points <= high)).flatten(1).all(1)
        points = torch.where(column(inside, points), points, self.x)
        value, predicted = samples.loss.judged(samples.evaluated(points))
        distance = distances_between(points, self.x, samples.norm).to(value.device)
        keep = (value > self.clean) & (distance > 0)
        root = keep.nonzero().flatten()
        self.parts.append((points[keep], root, value[keep], distance[keep], predicted[keep]))

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Points, root, value, distance and predicted class of all that are worth keeping, on the
        CPU: no nearer point of the same sample is as high.
        """
        found = [torch.cat(part).cpu() for part in zip(*self.parts)]
        _, root, value, distance, _ = found
        order = sorted(zip(root.tolist(), distance.tolist(), (-value).tolist(), range(len(root))))
        keep: list[int] = []
        owner, high = -1, math.inf
        for i, _, low, m in order:
            if i != owner or low < high:
                keep.append(m)
                owner, high = i, low
        chosen = torch.tensor(keep, dtype=torch.int64)
        points, root, value, distance, predicted = (part[chosen] for part in found)
        return points, root, value, distance, predicted

    def _keep(self, points: Tensor) -> None:
        height = self.samples.loss.height(self.samples.scores(points))
        better = height > self.top
        self.best = torch.where(column(better, points), points, self.best)
        self.top = torch.where(better, height, self.top)

    def _gradient(self, points: Tensor, start: int | None) -> Tensor:
        found = []
        for rows in torch.split(torch.arange(len(points), device=points.device), BATCH_SIZE):
            clock.look()
            loss = self.samples.loss.take(rows)
            with torch.enable_grad():
                here = points[rows].detach().requires_grad_(True)
                scores = loss.scores(self.samples.graph.logits(here))
                found.append(torch.autograd.grad(loss.climbed(scores, start), here)[0])
        return torch.cat(found)


def points_of_high_loss(
    samples: Samples,
    radii: list[float],
    more: Sequence[Tensor],
    report: Callable[[float], None],
) -> tuple[Points, bool]:
    """Points within the radii and beyond, found in a quarter of the time, and those that are given;
    whether the clock stopped that.

    Args:
        samples: where they start.
        radii: of the grid.
        more: tensors of points, one a sample each.
        report: is given the share done.
    """
    found = Points(samples)
    reach = [*radii, *beyond(samples, radii[-1])]
    with clock.limited(clock.seconds_left() / 4):
        for place, radius in enumerate(reach):
            found.climb(radius)
            report(0.3 * (place + 1) / len(reach))
        cut = clock.out_of_time()
    for points in more:
        found.add(torch.as_tensor(points).detach(), None)
    return found, cut


def beyond(samples: Samples, last: float) -> list[float]:
    """Radii beyond the grid: to the far end of the boxes; on R^n far out.

    Args:
        samples: with their domain.
        last: the largest radius of the grid.
    """
    if not samples.bounded:
        return [last * 4.0**k for k in range(1, FAR + 1)]
    further = (last * 2.0**k for k in itertools.count(1))
    # A grid that ends at the diagonal, up to rounding, is enough.
    far = 2 * samples.diagonal * (1 - 1e-9)
    return list(itertools.takewhile(lambda radius: radius < far, further))
