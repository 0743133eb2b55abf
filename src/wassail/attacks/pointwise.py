"""What all attacks at a fixed radius share: every sample moves inside its own ball of radius eps,
with all of its mass.

Such an attack is a function `engine(hunt, tick, **options)` that looks, through its `Hunt`, for a
flip of `hunt.rows` within `hunt.radius`; the hunt counts the passes and keeps the nearest flip, and
a sample that has one is no longer among the rows. The result lies in `Omega_p(eps)` for every order
p, and is the worst it can be only at order inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.attacks.hunt import Engine, Hunt, run_engine
from wassail.checks import check_task
from wassail.errors import InputError, unknown
from wassail.geometry import column, project, pull_inside, vector_norm
from wassail.losses import ASCENTS
from wassail.network import Model, Network, generators
from wassail.progress import Progress
from wassail.specification import Labels, Specification
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
    target` tells who arrived. graph: the engine takes gradients at the samples themselves. options:
    the engine's, recorded in the result with `info`.
    """
    threat = parse_threat(threat, own=True)
    check_seed(seed)
    x, y = check_task(x, y, threat.domain, model)
    target = check_target(target, y)
    ball = balls(x, threat)
    options = dict(options or {})

    def begin(network: Network, x: Tensor, y: Tensor) -> Hunt:
        return Hunt(
            network, x, y, threat.norm, threat.domain, None, ball=ball, target=target, graph=graph
        )

    def finish(hunt: Hunt) -> Tensor:
        x = hunt.x
        # A flip beyond the limit (FAB leaves such) is none here; a sample without a flip has its
        # best point, or itself.
        far = torch.isfinite(hunt.distance) & hunt.standing(hunt.network.rows.to(x.device))
        points = torch.where(column(far, x), x, hunt.points)
        return pull_inside(points, x, threat.norm, hunt.limit, hunt.domain)

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


def check_target(target: Tensor | None, y: Labels) -> Tensor | None:
    """The classes to be reached, `(N,)`, or one sentence that says what is wrong with them."""
    if target is None:
        return None
    if isinstance(y, Specification):
        raise InputError(
            "a target is a class, and a specification has none: give a specification with the one "
            "row that is to fail."
        )
    target = torch.as_tensor(target, device=y.device)
    if target.shape != y.shape or target.dtype.is_floating_point:
        raise InputError(
            f"the targets are {tuple(target.shape)}: give one class index for each of the "
            f"{len(y)} samples."
        )
    if (target == y).any():
        bad = int((target == y).nonzero()[0])
        raise InputError(
            f"the target of sample {bad} is its own label: a targeted attack needs another class."
        )
    return target.long()


def objective(hunt: Hunt, loss: str) -> Objective:
    """The loss to climb for this hunt's labels; with targets, the same loss of the target to
    descend.
    """
    if loss not in ASCENTS:
        raise unknown("loss", loss, tuple(ASCENTS))
    ascent = ASCENTS[loss]
    y = hunt.y
    target = hunt.target
    if target is None:
        return lambda z, rows: ascent(z, y[rows])

    def toward(z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ascent(z, target[rows])
        return -value, -weight

    return toward


def random_start(
    hunt: Hunt, rows: Tensor, radius: float | Tensor, seed: int, number: int
) -> Tensor:
    """A random point of each ball and the box, keyed by (seed, the sample, number): the starts of
    APGD, `(m, *shape)`.

    linf: uniform in the cube, stretched to its surface; l2: uniform on the sphere; l1: a Gaussian
    point projected.
    """
    x = hunt.x[rows]
    norm = hunt.norm
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
    return project(x + v, x, norm, radius, hunt.box(rows))
