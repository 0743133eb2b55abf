"""What all attacks at a fixed radius share: every sample moves inside its own ball of radius eps,
with all of its mass.

Such an attack is a function `engine(tracker, tick, **options)` that looks, through its `Tracker`,
for a flip of `tracker.rows` within `tracker.radius`; the tracker counts the passes and keeps the
nearest flip, and a sample that has one is no longer among the rows. The result lies in
`Omega_p(eps)` for every order p, and is the worst it can be only at order inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.attacks.minimal.run import Engine, check_target, run_engine
from wassail.attacks.minimal.tracker import Tracker
from wassail.checks import check_task
from wassail.errors import unknown
from wassail.geometry import column, project, pull_inside, vector_norm
from wassail.losses import ASCENTS
from wassail.network import Model, Network, generators
from wassail.progress import Progress
from wassail.specification import Labels
from wassail.threat import Threat, check_seed, parse_threat
from wassail.transport.distribution import Distribution

# Logits `(m, K)` at points of the samples `rows` `(m,)` -> the loss to raise `(m,)`, and the
# direction of its gradient with respect to the logits `(m, K)`, for `Tape.pull`. Steps are
# normalised, so its length does not matter.
Objective: TypeAlias = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]


def pointwise(  # noqa: PLR0913
    engine: Engine,
    name: str,
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    target: Tensor | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
    graph: bool = False,
    options: Mapping[str, Any] | None = None,
    info: Mapping[str, Any] | None = None,
) -> Distribution:
    """Run an engine on every sample's ball of radius eps and return the verified distribution, all
    weights 1.

    target: classes `(N,)` to be reached; the accuracy still counts every error, `predicted ==
    target` tells which arrived. graph: the engine takes gradients at the samples themselves.
    options: the engine's, recorded in the result with `info`.
    """
    threat = parse_threat(threat, own=True)
    check_seed(seed)
    x, y = check_task(x, y, threat.domain, model)
    target = check_target(target, y)
    ball = balls(x, threat)
    options = dict(options or {})

    def begin(network: Network, x: Tensor, y: Tensor) -> Tracker:
        return Tracker(
            network, x, y, threat.norm, threat.domain, None, ball=ball, target=target, graph=graph
        )

    def finish(tracker: Tracker) -> Tensor:
        x = tracker.x
        # A flip beyond the limit (FAB leaves such) is none here; a sample without a flip has its
        # best point, or itself.
        far = torch.isfinite(tracker.distance) & tracker.unflipped(
            tracker.network.rows.to(x.device)
        )
        points = torch.where(column(far, x), x, tracker.points)
        return pull_inside(points, x, threat.norm, tracker.limit, tracker.domain)

    found = run_engine(engine, name, model, x, y, begin, options, batch_size, progress, finish)
    record = {
        "method": name,
        "options": options,
        "seed": seed,
        "targeted": target is not None,
        **(info or {}),
    }
    return Distribution.from_search(x, y, found, threat, 1.0, name, record, mu)


def balls(x: Tensor, threat: Threat) -> tuple[float, float]:
    """How far a point may be moved, and the radius of the balls to search.

    The first is eps with room for the rounding of a sum of N costs; the second is so much smaller
    that the rounding of its coordinates does not carry a point outside, where it would be no flip.
    """
    limit = threat.eps * (1 - 1e-12)
    ulp = torch.finfo(x.dtype).eps * (float(x.abs().max()) + limit if x.numel() else 0.0)
    return limit, max(limit - ulp * max(x[:1].numel(), 1) ** (1 / threat.norm), limit * (1 - 1e-4))


def objective(tracker: Tracker, loss: str) -> Objective:
    """The loss to climb for this tracker's labels; with targets, the same loss of the target to
    descend.
    """
    if loss not in ASCENTS:
        raise unknown("loss", loss, tuple(ASCENTS))
    ascent = ASCENTS[loss]
    y = tracker.y
    target = tracker.target
    if target is None:
        return lambda z, rows: ascent(z, y[rows])

    def toward(z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ascent(z, target[rows])
        return -value, -weight

    return toward


def random_start(
    tracker: Tracker, rows: Tensor, radius: float | Tensor, seed: int, number: int
) -> Tensor:
    """A random point of each ball and the box, keyed by (seed, the sample, number): the starts of
    APGD, `(m, *shape)`.

    linf: uniform in the cube, stretched to its surface; l2: uniform on the sphere; l1: a Gaussian
    point projected.
    """
    x = tracker.x[rows]
    norm = tracker.norm
    if not len(rows):
        return x
    draw = torch.rand if norm == math.inf else torch.randn
    draws = [
        draw(x.shape[1:], dtype=x.dtype, generator=generator)
        for generator in generators(x, seed, number)
    ]
    v = torch.stack(draws).to(x.device)
    v = 2 * v - 1 if norm == math.inf else v
    if norm != 1:
        v = v * column(radius / vector_norm(v, norm).clamp(min=1e-12), v)
    return project(x + v, x, norm, radius, tracker.box(rows))
