"""FGSM, the fast gradient sign method, for every norm (Goodfellow et al., ICLR 2015, arXiv
1412.6572).
"""

from __future__ import annotations

from torch import Tensor

from wassail.attacks.hunt import Hunt
from wassail.attacks.pointwise import objective, pointwise
from wassail.geometry import clip, steepest
from wassail.network import Model
from wassail.progress import Progress, Tick
from wassail.threat import Threat
from wassail.transport.distribution import Distribution


def fgsm(
    model: Model,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    loss: str = "ce",
    target: Tensor | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """One steepest step of full length from every sample: the worst point of its ball for the
    linearised loss.

        x' = x + argmax { <g, d> : ||d||_r <= eps, x + d in the box },   g = grad L(theta(x), y),

    which for linf without a box is `x + eps sign(g)`. For a linear classifier of two classes it is
    exact, in every norm.

    model: batch `(n, *shape)` -> logits `(n, K)`; x `(N, *shape)`, y `(N,)`; threat: norm, eps,
    domain. loss: "ce", "dlr" or "margin". target: classes `(N,)` to be reached; their loss is
    lowered instead. Nothing is random: the seed is only noted.

    Per sample 1 F and 1 B; whether the point is a flip, the final check tells.
    """
    return pointwise(
        fgsm_attack,
        "fgsm",
        model,
        x,
        y,
        threat,
        target=target,
        mu=mu,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        graph=True,
        options={"loss": loss},
    )


def fgsm_attack(hunt: Hunt, tick: Tick, *, loss: str = "ce") -> None:
    """The step, from the gradient of the pass at the samples; see `fgsm`."""
    goal = objective(hunt, loss)
    rows = hunt.rows
    if not len(rows):
        return
    _, weight = goal(hunt.clean[rows], rows)
    x = hunt.x[rows]
    gradient = hunt.start.pull(weight, rows)
    hunt.guess(
        rows, clip(x + steepest(x, gradient, hunt.norm, hunt.radius, hunt.domain), hunt.domain)
    )
    tick(1.0)
