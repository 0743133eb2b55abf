"""How fast the errors of a regression can grow around each sample, from both sides: what a
`ResidualCurve` is made of (THEORY 2, 6 and 11).

As in `loss_curve`, for the network with outputs `(0, f - y, y - f)`, whose margin loss the losses
are rising, convex functions of (`residuals.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Where
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss.recession import highest
from wassail.certificates.loss.residuals import Residuals
from wassail.certificates.loss.slopes import whole_box
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import margin_errors
from wassail.errors import InputError, JumpError
from wassail.geometry import column, maximiser, project, pull_inside, sides, steepest
from wassail.geometry import distances as distances_between
from wassail.network import BATCH_SIZE, Model, device_of, frozen
from wassail.rounding import UNIT
from wassail.threat import Domain, box_at, boxes_of

WORK = 4 * clock.SECOND  # operations for the Lipschitz constant when there is no time limit
CLIMB = 8  # evaluations a sample and radius of the search for points of high loss
NEAR = 2.0**-40  # of the first radius: a ball so small that the loss hardly changes in it


@dataclass(frozen=True, eq=False)
class Errors:
    """N samples of a regression.

    Args:
        graph: the network with outputs `(0, f, -f)`, and its inputs, where targets move, `(x, t)`.
        x: samples `(N, *shape)`, where the network is.
        residuals: their targets and the loss.
        norm: ground norm, 1, 2 or inf.
        domain: the box, fitted boxes, or None.
        model: what evaluates the points that are kept; None for the graph.
    """

    graph: Graph
    x: Tensor
    residuals: Residuals
    norm: float
    domain: Domain
    model: Model | None = None

    def parts(self) -> Iterator[Errors]:
        """The samples in batches."""
        for rows in torch.split(torch.arange(len(self.x)), BATCH_SIZE):
            yield replace(
                self,
                x=self.x[rows.to(self.x.device)],
                residuals=self.residuals.take(rows),
                domain=box_at(self.domain, rows),
            )

    def balls(self, radius: float, norm: float | None = None) -> Balls:
        """Balls of one radius around all samples.

        Args:
            radius: of all of them.
            norm: theirs; default None, the ground norm.
        """
        size = torch.full((len(self.x),), radius, dtype=torch.float64)
        targets = self.residuals.targets(self.graph.device)
        return Balls.make(self.x, size, norm or self.norm, self.domain, targets)

    def lowest(self, radius: float, steps: int, norm: float | None = None) -> Tensor:
        """Lower bounds on the margins over balls, `(N, 2K + 1)`.

        Args:
            radius: of the balls.
            steps: of the optimisation of the linear bounds.
            norm: of the balls; default None, the ground norm.
        """
        found = []
        for part in self.parts():
            sweep = Sweep(part.graph, part.balls(radius, norm), steps).run()
            found.append(margins(sweep, part.labels)[0])
        return torch.cat(found)

    @property
    def labels(self) -> Tensor:
        """0 for each sample."""
        return torch.zeros(len(self.x), dtype=torch.int64, device=self.graph.device)

    def signed(self, points: Tensor) -> Tensor:
        """Errors with both signs at one point for each sample, by the graph, `(N, 2K)`.

        Args:
            points: `(N, *shape)`.
        """
        offsets = self.residuals.offsets.to(self.graph.device)
        parts = torch.split(points.double(), BATCH_SIZE)
        return (torch.cat([self.graph.logits(part) for part in parts]) + offsets)[:, 1:]

    def evaluated(self, points: Tensor) -> Tensor:
        """The same in the arithmetic of the curve.

        Args:
            points: `(N, *shape)`.
        """
        if self.model is None:
            return self.signed(points)
        device = device_of(self.model, points.device)
        with frozen(self.model), torch.no_grad():
            parts = [self.model(part.to(device)) for part in torch.split(points, BATCH_SIZE)]
        outputs = torch.cat(parts).double().to(self.graph.device)
        apart = outputs - self.residuals.y.to(outputs.device)
        return torch.cat([apart, -apart], 1)

    @property
    def place(self) -> Where:
        """A box around all boxes, or None for R^n."""
        own = boxes_of(self.domain)
        if own is None:
            return self.domain
        return own.low.amin(0).flatten(), own.high.amax(0).flatten()

    @property
    def bounded(self) -> bool:
        """Whether the domain is."""
        if self.domain is None:
            return False
        return all(
            bool(torch.as_tensor(side, dtype=torch.float64).isfinite().all())
            for side in self.domain
        )

    @property
    def reach(self) -> float:
        """The largest side of a box."""
        low, high = (torch.as_tensor(side, dtype=torch.float64) for side in self.domain or ())
        return float((high - low).max()) * (1 + 4 * UNIT)


class Points:
    """Evaluated points of high loss, found by an ascent inside larger and larger balls."""

    def __init__(self, errors: Errors) -> None:
        self.errors = errors
        self.x = errors.x
        self.clean, self.clean_side = self._judged(errors.evaluated(self.x))
        self.best = self.x.double()
        self.top = self._largest(self.best)
        self.parts: list[tuple[Tensor, ...]] = []

    def climb(self, radius: float) -> None:
        """The highest points met within a radius, from the best so far on.

        In turn the maximiser over the whole ball of the error linearised at the last point, which
        is exact for linear networks, and a step from the best point, half as long each time. From
        each sample both signs of the error are climbed.
        """
        if self.parts and clock.out_of_time():
            return
        errors = self.errors
        x = self.x.double()
        where = (errors.norm, radius, errors.domain)
        with suppress(clock.Late):
            for sign in (0, 1):
                point = self.best
                for k in range(CLIMB):
                    g = self._gradient(point, None if k else sign)
                    if k % 2 == 0:
                        point = x + steepest(x, g, *where)
                    else:
                        ahead = radius * 2.0 ** (-k // 2) * maximiser(g, errors.norm)
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
        errors = self.errors
        points = points.to(self.x)
        if radius is not None:
            points = pull_inside(points, self.x, errors.norm, radius, errors.domain)
        inside = torch.isfinite(points).flatten(1).all(1)
        if errors.domain is not None:
            low, high = sides(errors.domain, points)
            inside &= ((points >= low) & (points <= high)).flatten(1).all(1)
        points = torch.where(column(inside, points), points, self.x)
        value, side = self._judged(errors.evaluated(points))
        distance = distances_between(points, self.x, errors.norm).to(value.device)
        keep = (value > self.clean) & (distance > 0)
        root = keep.nonzero().flatten()
        self.parts.append((points[keep], root, value[keep], distance[keep], side[keep]))

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Points, root, value, distance and side of all that are worth keeping, on the CPU: no
        nearer point of the same sample is as high.
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
        points, root, value, distance, side = (part[chosen] for part in found)
        return points, root, value, distance, side

    def _judged(self, signed: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the side of the largest error, counted from 1, `(N,)` each."""
        residuals = self.errors.residuals
        side = signed.argmax(1) + 1
        return residuals.value(residuals.largest(signed)), side

    def _largest(self, points: Tensor) -> Tensor:
        return self.errors.residuals.largest(self.errors.signed(points))

    def _keep(self, points: Tensor) -> None:
        height = self._largest(points)
        better = height > self.top
        self.best = torch.where(column(better, points), points, self.best)
        self.top = torch.where(better, height, self.top)

    def _gradient(self, points: Tensor, sign: int | None) -> Tensor:
        """Of the largest error; of the first output, too high or too low, if a sign is given."""
        clock.look()
        with torch.enable_grad():
            here = points.detach().requires_grad_(True)
            signed = self.errors.signed(here)
            half = signed.shape[1] // 2
            u = self.errors.residuals.largest(signed) if sign is None else signed[:, sign * half]
            return torch.autograd.grad(u.sum(), here)[0]


@dataclass(frozen=True, eq=False)
class Growth:
    """The certified side of a curve, the fields of a `LossCurve` of the same names; cut: whether
    the clock stopped something; margin: the Lipschitz constant of the outputs.
    """

    start: Tensor
    grid: Tensor
    ceiling: Tensor
    left: Tensor
    rise: Tensor
    slope: float
    margin: float
    lift: float
    cut: bool


def growth_above(
    errors: Errors, radii: list[float], steps: int, lift: float, report: Callable[[float], None]
) -> Growth:
    """Bounds on the loss by linear bounds on balls, between two radii by the line of the farther
    one, and by the Lipschitz constant of the outputs.

    Args:
        errors: the samples.
        radii: of the balls, in rising order.
        steps: of the optimisation of the linear bounds.
        lift: how far executed outputs may be from exact ones.
        report: is given the share done.
    """
    residuals = errors.residuals
    edges = [NEAR * radii[0], *radii]
    with clock.unlimited():  # without it nothing is known
        start = residuals.above(errors.lowest(0.0, steps))
    top = torch.full_like(start, -math.inf)[:, None].expand(-1, 2 * residuals.y.shape[1] + 1)
    with suppress(clock.Late):
        top = highest_errors(errors, steps)
    most = residuals.above(top)
    margin, cut = output_slope(errors)
    # The slope is one of the exact function, whose errors may be larger than those executed. What
    # is used of this sum is rounded up by more than its rounding.
    largest = max(float(residuals.largest(-top[:, 1:]).max()) + lift, 0.0)
    factor = residuals.steepest * residuals.slope(largest)
    slope = margin * factor * (1 + 4 * UNIT) if margin and factor else 0.0
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for place, (before, radius) in enumerate(itertools.pairwise(edges)):
            ends = [_ends(part, before, radius, steps) for part in errors.parts()]
            far, near, line = (residuals.above(torch.cat(side)) for side in zip(*ends))
            flat = torch.zeros_like(near)
            if place == 0:
                parts.append((near, near, flat))
            climb = ((line - near) / (radius - before)).clamp(min=0) * (1 + 4 * UNIT)
            parts.append((torch.minimum(far, most), near, climb))
            report((place + 1) / len(radii))
            if bool((parts[-1][0] == most).all()):
                break
    except clock.Late:
        cut = True
    parts = parts or [(most, most, torch.zeros_like(most))]
    grid = torch.tensor(edges[: len(parts)], dtype=torch.float64)
    parts.append((most, most, torch.zeros_like(most)))
    ceiling, left, rise = (torch.stack(side, 1).cpu() for side in zip(*parts))
    # A smaller ball knows at least what a larger one does.
    ceiling = ceiling.flip(1).cummin(1).values.flip(1)
    above = lift * factor * (1 + 4 * UNIT) if lift else 0.0
    return Growth(start.cpu(), grid, ceiling, left, rise, slope, margin, above, cut)


def _ends(part: Errors, before: float, radius: float, steps: int) -> tuple[Tensor, ...]:
    """Lower bounds on the margins from the linear bounds of a ball: in it, in the smaller one, and
    by the line `base - rho(before) d / before` at `d = radius` (see the head of `loss_curve.py`).
    """
    sweep = Sweep(part.graph, part.balls(radius), steps).run()
    far, base, a = margins(sweep, part.labels)
    inner = replace(sweep.inputs, radius=torch.full_like(sweep.inputs.radius, before))
    outputs = part.graph.outputs
    owner = torch.arange(len(part.x) * outputs, device=part.graph.device) // outputs
    rho = inner.upper(-a.flatten(0, 1), owner).reshape_as(base)
    # Of the four units one each is for the quotient, the product and the difference.
    near, line = (base - r - 4 * UNIT * (base.abs() + r) for r in (rho, rho * (radius / before)))
    return far, near, line


def highest_errors(errors: Errors, steps: int) -> Tensor:
    """Lower bounds on the margins over the whole domain, `(N, 2K + 1)`.

    Args:
        errors: the samples.
        steps: of the optimisation of the linear bounds.
    """
    found = torch.full_like(errors.residuals.offsets, -math.inf).to(errors.graph.device)
    if errors.graph.arithmetic == "exact":  # what the outputs can be on R^n is about that one
        offsets = errors.residuals.offsets.to(errors.graph.device)
        most = highest(errors.graph, [0])
        found = -(most + offsets) - 4 * UNIT * (most.abs() + offsets.abs())
        found = torch.where(most.isfinite(), found, -math.inf)
    if errors.bounded:
        found = torch.maximum(found, errors.lowest(errors.reach, steps, math.inf))
    return found


def output_slope(errors: Errors) -> tuple[float, bool]:
    """The largest Lipschitz constant of an output, within half of the time, and whether the clock
    stopped it: in a box a help, on R^n a must.

    Args:
        errors: the samples.
    """
    graph = replace(errors.graph, arithmetic="exact")
    if errors.bounded and graph.curved:  # in a box the slopes of attention are of no help
        return math.inf, False
    half = graph.outputs // 2
    graph = graph.head(torch.eye(graph.outputs, dtype=torch.float64)[1 : 1 + half])
    places = [None] if errors.domain is None else [errors.place, None]
    free = clock.seconds_left() < math.inf
    found = math.inf
    cut = False
    with clock.limited(clock.seconds_left() / 2):
        for done, where in enumerate(places):
            share = clock.seconds_left() / (len(places) - done)
            helpful = suppress(JumpError) if errors.bounded else nullcontext()
            with helpful, clock.limited(share, math.inf if free else WORK):
                bound = lipschitz(graph, errors.norm, where, outputs="logits", norm_out=math.inf)
                found = min(found, bound.upper)
                cut |= bool(bound.info["cut"])
    return found, cut


def executed_lift(errors: Errors) -> float:
    """How far an executed output may be from the exact one in the domain; inf if the time is up.

    Args:
        errors: the samples.
    """
    graph = errors.graph
    if graph.arithmetic == "exact":
        return 0.0
    with suppress(clock.Late):
        sweep = Sweep(graph, whole_box(graph, errors.place)).run()  # type: ignore[arg-type]
        return float(margin_errors(sweep, errors.labels[:1]).max())
    return math.inf
