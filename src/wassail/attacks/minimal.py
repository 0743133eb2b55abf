"""Minimum-norm engines as attacks on a threat: the flips they find, bought by the allocation.

An engine of `nearest` looks for the nearest flip and knows no radius, so what it finds serves every
order and every eps: the knapsack buys the nearest flips first, and at order inf it takes those
within eps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wassail.attacks.hunt import Engine, Hunt, run_engine
from wassail.attacks.pointwise import check_target
from wassail.checks import check_task
from wassail.network import Model, Network
from wassail.progress import Progress
from wassail.specification import Labels
from wassail.threat import Threat, check_seed, parse_threat
from wassail.transport.distribution import Distribution, allocate
from wassail.transport.flips import Flips


def minimal(
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
    options: Mapping[str, Any] | None = None,
) -> Distribution:
    """Run a minimum-norm engine on x `(N, *shape)`, y `(N,)` and allocate the budget of the threat
    to its verified flips.

    target: classes `(N,)` that a flip must reach; a sample with no such flip stays where it is.
    options: the engine's.
    """
    threat = parse_threat(threat, own=True)
    check_seed(seed)
    x, y = check_task(x, y, threat.domain, model)
    target = check_target(target, y)
    options = dict(options or {})

    def begin(network: Network, x: Tensor, y: Tensor) -> Hunt:
        return Hunt(network, x, y, threat.norm, threat.domain, None, target=target)

    found = run_engine(engine, name, model, x, y, begin, options, batch_size, progress)
    info = {"method": name, "options": options, "seed": seed, "targeted": target is not None}
    flips = Flips.from_search(x, y, found, threat.norm, threat.domain, name, info)
    return allocate(flips, threat.eps, threat.order, mu)
