"""WDA, the Wasserstein Distributional Attack with one kappa for all samples: Algorithm 1 of the
paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wassail.attacks.best import Best
from wassail.attacks.walk import candidates, check_walk, default_step, pick, top_rivals, winner
from wassail.checks import check_task
from wassail.errors import InputError
from wassail.geometry import project, pull_inside
from wassail.losses import margin
from wassail.network import Batch, Model, Network, search
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Domain, Number, Threat, box_at, check_seed, number, parse_threat
from wassail.transport.distribution import Distribution


def wda(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    kappa: Number | None = None,
    step: Number | None = None,
    steps: int = 20,
    probe: int = 10,
    topk: int | None = None,
    select: str = "margin",
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """Move the share 1/kappa of every sample inside its ball of radius `kappa^(1/p) eps`; the rest
    stays.

    The result lies in `Omega_p(eps)` (Corollary wda-feasible; THEORY 2b) and its accuracy is
    `(1 - 1/kappa) clean + (1/kappa) adversarial`. kappa = 1 is a point-wise attack.

    The paper's Algorithm 1. Where the paper returns the last iterate, the flip, or else the best
    iterate, is kept.

    Per sample that never flips: `1 + 10 (K - 1) + 9 + 1 + 10` forward and `10 (K - 1) + 10`
    backward passes; a sample that flips stops there.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        kappa: number >= 1, 1/kappa of every sample moves; default None, 2, or 1 at order inf, where
            splitting mass gains nothing.
        step: alpha, a length in units of x, never scaled by kappa; default None, the paper's for
            its eps, else 0.64 eps for linf, 0.4 eps for l2 and a measured share for l1.
        steps: int, `maxiter`, exactly that many; default 20.
        probe: int, steps during which all rivals are tried before the winning one is fixed; default
            10.
        topk: int, rivals tried; default None, all of up to 100 classes, else 20.
        select: candidates by "margin" as printed (the default), or by "logit" as in the authors'
            code.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, recorded only, since nothing here is random; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1/kappa.
    """
    threat = parse_threat(threat, own=True)
    check_seed(seed)
    kappa = _kappa(kappa, threat.order)
    alpha = default_step(threat.norm, threat.eps) if step is None else number(step, "step")
    check_walk(alpha, steps, topk, select)
    if not 0 < probe <= steps:
        raise InputError(f"probe is {probe}: it must be between 1 and steps, which is {steps}.")
    x, y = check_task(x, y, threat.domain, model)
    radius = threat.radius(kappa) * (1 - 1e-12)  # room for the rounding of a sum of N costs
    walk = Walk(threat.norm, radius, alpha, steps, probe, topk, select)

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        domain = network.boxes(threat.domain, x)
        found, clean = algorithm_1(network, x, y, tick, walk, domain)
        return pull_inside(found, x, threat.norm, radius, domain), clean

    found = search(chunk, model, x, y, batch_size, progress, "WDA")
    options: dict[str, Any] = {"kappa": kappa, "step": alpha, "steps": steps, "probe": probe}
    options |= {"topk": topk, "select": select}
    info = {"method": "wda", "options": options, "seed": seed}
    return Distribution.from_search(x, y, found, threat, 1 / kappa, "wda", info, mu)


def _kappa(kappa: Number | None, order: float) -> float:
    """Kappa as a number; by default 2, or 1 at order inf."""
    found = (1.0 if order == math.inf else 2.0) if kappa is None else number(kappa, "kappa")
    if not 1 <= found < math.inf:
        raise InputError(
            f"kappa is {found:g}: it must be at least 1, and 1/kappa is the share of each sample "
            "that moves."
        )
    return found


@dataclass(frozen=True)
class Walk:
    """The hyper-parameters of Algorithm 1, in the paper's symbols.

    Args:
        norm: ground norm r.
        radius: of the balls, `kappa^(1/p) eps`.
        alpha: step size.
        maxiter: steps, exactly that many.
        probe: steps during which all rivals are tried.
        topk: rivals with the largest clean logits; None: all of up to 100 classes, else 20.
        select: candidates by "margin" as printed, by raw "logit" as the authors' code does.
    """

    norm: float
    radius: float
    alpha: float
    maxiter: int
    probe: int
    topk: int | None
    select: str


def algorithm_1(
    network: Network, x: Tensor, y: Tensor, tick: Tick, walk: Walk, domain: Domain
) -> tuple[Tensor, Tensor]:
    """The inner loop of Algorithm 1 for all samples at once: `X_adv` `(N, *shape)`, and theta at
    the samples `(N, K)`.

    Symbols: theta, the network; x, y, the samples X and their classes k; J, the rivals in the race;
    walk.radius, `kappa^(1/p) eps`. `Batch` leaves out the samples that are wrong or have flipped.
    """
    batch = Batch(network, x, y)
    theta = batch.clean
    J = top_rivals(theta, y, walk.topk or _rivals(theta.shape[1]))[batch.rows]
    X_adv = Best(x, margin(theta, y))
    for it in range(walk.maxiter):
        g = batch.gradients(J)  # g_j = grad (theta_j - theta_k)(x_it)
        if not len(batch):
            break
        owner = batch.rows.repeat_interleave(J.shape[1])
        box = box_at(domain, owner)
        phi = candidates(batch, g, walk.norm, walk.alpha, box)  # phi_j = x_it + alpha M_r(g_j)
        phi = project(phi, x[owner], walk.norm, walk.radius, box).reshape(g.shape)
        theta = batch.logits(phi, J, last=it + 1 == walk.maxiter)
        flips = batch.flipped(theta)
        # j* = argmax_j theta_j(phi_j) - theta_k(phi_j)
        j = winner(theta, J, batch.y, flips, walk.select)
        x_next, theta, flipped = pick(phi, j), pick(theta, j), pick(flips, j)  # x_next = phi_{j*}
        X_adv.offer(x_next, margin(theta, batch.y), batch.rows, sure=flipped)
        if it + 1 == walk.probe:
            J = J.gather(1, j[:, None])
        J = batch.move(x_next, flipped, J)
        tick(max((it + 1) / walk.maxiter, batch.done))
    return X_adv.points, batch.clean


def _rivals(classes: int) -> int:
    return classes - 1 if classes <= 100 else 20
