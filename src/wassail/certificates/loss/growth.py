"""How fast a loss can grow around each sample: the upper side of a curve (THEORY 2, 6 and 11).

Between two radii, `before < d <= radius`, the smaller of two bounds counts: the one on the ball of
the farther radius, and what the linear bounds of that ball, `margin_j >= base_j + <a_j, v>`, say
nearer to the sample. With `rho_j(d) = sup { -<a_j, v> : ||v||_r <= d, x + v in X }`, which is
concave in d and 0 at 0,

    margin_j >= base_j - rho_j(d) >= base_j - rho_j(before) d / before        for d >= before,

and all losses are convex in d where the margins are linear in it: they lie below their chord.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss.chords import clean_above
from wassail.certificates.loss.labels import Labels
from wassail.certificates.loss.recession import highest
from wassail.certificates.loss.samples import Samples
from wassail.certificates.loss.slopes import lowest_margins, whole_box
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import margin_errors
from wassail.errors import JumpError
from wassail.rounding import UNIT

WORK = 4 * clock.SECOND  # operations for the Lipschitz constant when there is no time limit
NEAR = 2.0**-40  # of the first radius: a ball so small that the loss hardly changes in it


@dataclass(frozen=True, eq=False)
class Growth:
    """The certified side of a curve, the fields of a `LossCurve` of the same names; cut: whether
    the clock stopped something; margin: the Lipschitz constant of the margins, or the outputs.
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
    samples: Samples,
    radii: list[float],
    steps: int,
    lift: float,
    report: Callable[[float], None],
) -> Growth:
    """Bounds on the loss by linear bounds on balls, between two radii by the line of the farther
    one, and by the Lipschitz constant.

    The first radius is a tiny one, within which the loss hardly changes; radii from which on
    nothing is known but the bound on the whole domain, or which the time does not reach, are left
    out. What is not known in time is infinite.

    Args:
        samples: with their loss.
        radii: of the balls, in rising order.
        steps: of the optimisation of the linear bounds.
        lift: how far executed margins may be from exact ones.
        report: is given the share done.
    """
    loss = samples.loss
    start = _start(samples, steps, lift)
    top = torch.full_like(start, -math.inf)[:, None].expand(-1, samples.graph.outputs)
    with suppress(clock.Late):
        top = lowest_anywhere(samples, steps)
    most = loss.above(top)
    margin, cut = steepest_margin(samples)
    # The slope is one of the exact function, whose errors may be larger than those executed.
    slope, above = loss.steepness(margin, lift, top)
    edges = [NEAR * radii[0], *radii]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    try:
        for place, (before, radius) in enumerate(itertools.pairwise(edges)):
            ends = [ends_of(part, before, radius, steps) for part in samples.parts()]
            far, near, line = (loss.above(torch.cat(side)) for side in zip(*ends))
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
    return Growth(start.cpu(), grid, ceiling, left, rise, slope, margin, above, cut)


def _start(samples: Samples, steps: int, lift: float) -> Tensor:
    """The loss at the samples, rounded up, `(N,)`."""
    loss = samples.loss
    with suppress(clock.Late):
        return loss.above(samples.lowest(0.0, steps))
    if isinstance(loss, Labels):  # a pass knows it
        start = clean_above(samples.graph, samples.x, loss.y, loss.loss) + lift
        return torch.nextafter(start, torch.full_like(start, math.inf))
    with clock.unlimited():  # without it nothing is known
        return loss.above(samples.lowest(0.0, steps))


def ends_of(part: Samples, before: float, radius: float, steps: int) -> tuple[Tensor, ...]:
    """Lower bounds on the margins `(N, K)` from the linear bounds of a ball: in it, in the smaller
    one, and by the line.

    The line is `base - rho(before) d / before`, here at `d = radius`; see the head of this file.

    Args:
        part: samples, a batch of them.
        before: radius of the smaller ball.
        radius: of the ball.
        steps: of the optimisation of the linear bounds.
    """
    sweep = Sweep(part.graph, part.balls(radius), steps).run()
    rows = part.rows
    far, base, a = margins(sweep, rows)
    inner = replace(sweep.inputs, radius=torch.full_like(sweep.inputs.radius, before))
    owner = torch.arange(base.numel(), device=base.device) // base.shape[1]
    rho = inner.upper(-a.flatten(0, 1), owner).reshape_as(base)
    # Of the four units one each is for the quotient, the product and the difference.
    near, line = (base - r - 4 * UNIT * (base.abs() + r) for r in (rho, rho * (radius / before)))
    own = torch.zeros_like(base).scatter(1, rows[:, None], 1.0) > 0
    return far, near.masked_fill(own, 0.0), line.masked_fill(own, 0.0)


def lowest_anywhere(samples: Samples, steps: int) -> Tensor:
    """Lower bounds on the margins over the whole domain, `(N, K)`.

    Args:
        samples: of classes or errors.
        steps: of the optimisation of the linear bounds.
    """
    loss, graph = samples.loss, samples.graph
    if isinstance(loss, Labels):  # one bound for each label
        labels, which = torch.unique(loss.y, return_inverse=True)
        return lowest_margins(graph, labels.tolist(), samples.domain, steps)[which]
    offsets = samples.residuals.offsets.to(graph.device)
    found = torch.full_like(offsets, -math.inf)
    if graph.arithmetic == "exact":  # what the outputs can be on R^n is about that one
        most = highest(graph, [0])
        found = -(most + offsets) - 4 * UNIT * (most.abs() + offsets.abs())
        found = torch.where(most.isfinite(), found, -math.inf)
    if samples.bounded:
        found = torch.maximum(found, samples.lowest(samples.reach, steps, math.inf))
    return found


def steepest_margin(samples: Samples) -> tuple[float, bool]:
    """The largest Lipschitz constant of a margin, or of an output of a regression, within half of
    the time, and whether the clock stopped it: in a box a help, on R^n a must. A box is a part of
    R^n.

    Args:
        samples: of classes or errors.
    """
    graph, loss = replace(samples.graph, arithmetic="exact"), samples.loss
    if samples.bounded and graph.curved:  # in a box the slopes of attention are of no help
        return math.inf, False
    places = [None] if samples.domain is None else [samples.place, None]
    free = clock.seconds_left() < math.inf
    found = math.inf
    cut = False
    with clock.limited(clock.seconds_left() / 2):
        for done, where in enumerate(places):
            share = clock.seconds_left() / (len(places) - done)
            # In a box a help, which a jump takes away; on R^n a must.
            helpful = suppress(JumpError) if samples.bounded else nullcontext()
            with helpful, clock.limited(share, math.inf if free else WORK):
                if isinstance(loss, Labels):
                    labels = torch.unique(loss.y).tolist()
                    bound = lipschitz(graph, samples.norm, where, labels=labels)
                else:
                    head = graph.head(samples.residuals.too_high)
                    bound = lipschitz(
                        head, samples.norm, where, outputs="logits", norm_out=math.inf
                    )
                found = min(found, bound.upper)
                cut |= bool(bound.info["cut"])
    return found, cut


def executed_lift(samples: Samples) -> float:
    """How far an executed margin may be from the exact one in the domain; inf if the time is up.

    Args:
        samples: of classes or errors.
    """
    graph = samples.graph
    if graph.arithmetic == "exact":
        return 0.0
    with suppress(clock.Late):
        sweep = Sweep(graph, whole_box(graph, samples.place)).run()  # type: ignore[arg-type]
        rows = torch.unique(samples.rows)
        return max(float(margin_errors(sweep, row[None]).max()) for row in rows)
    return math.inf
