"""FGSM, the fast gradient sign method, for every norm (Goodfellow et al., ICLR 2015, arXiv
1412.6572).
"""

from __future__ import annotations

from torch import Tensor

from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import objective, pointwise
from wassail.geometry import clip, steepest
from wassail.network import Model
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Threat
from wassail.transport.distribution import Distribution


def fgsm(
    model: Model,
    x: Tensor,
    y: Labels,
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

    Goodfellow et al. (2015). Per sample 1 F and 1 B; the final check tells whether the point is a
    flip.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        loss: "ce" (the default), "dlr" or "margin".
        target: classes to be reached, integer tensor `(N,)`; default None, any wrong class; with
            targets their loss is lowered instead.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, recorded only, since nothing here is random; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
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


def fgsm_attack(tracker: Tracker, tick: Tick, *, loss: str = "ce") -> None:
    """The step, from the gradient of the pass at the samples; see `fgsm`."""
    goal = objective(tracker, loss)
    rows = tracker.rows
    if not len(rows):
        tracker.execute_gradients(1, 1)
        return
    _, weight = goal(tracker.clean[rows], rows)
    x = tracker.x[rows]
    box = tracker.box(rows)
    gradient = tracker.start.pull(weight, rows)
    tracker.guess(rows, clip(x + steepest(x, gradient, tracker.norm, tracker.radius, box), box))
    tick(1.0)
