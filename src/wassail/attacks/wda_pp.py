"""WDA++, the Wasserstein Distributional Attack with adaptive weights: Algorithm 2 of the paper."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.attacks.walk import candidates, check_walk, default_step, pick, top_rivals, winner
from wassail.checks import check_task
from wassail.device import write
from wassail.errors import InputError
from wassail.geometry import clip, column
from wassail.network import Batch, Model, Network
from wassail.network import search as run
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import (
    Domain,
    Number,
    Threat,
    box_at,
    check_seed,
    number,
    parse_domain,
    parse_eps,
    parse_norm,
    parse_threat,
    whole,
)
from wassail.transport.distribution import Distribution, allocate
from wassail.transport.flips import Flips


def wda_pp(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    step: Number | None = None,
    steps: int = 20,
    topk: int | None = None,
    search: int = 10,
    select: str = "margin",
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """Walk every sample to its first flip, measure the distances, spend the budget on the nearest
    flips.

    The paper's Algorithm 2: a walk without a ball to the first flip, a bisection of the last step,
    then the exact knapsack on the distances found. The result lies in `Omega_p(eps)`. One search
    serves every order: `allocate(result.flips, eps, order)`.

    Per step and sample: 1 forward and topk backward passes at the iterate, topk forward at the
    candidates; `search` forward at the end.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        step: alpha, a length in units of x; default None, the paper's for its eps, else 0.64 eps
            for linf, 0.4 eps for l2 and a measured share for l1.
        steps: int, `maxiter`, exactly that many; default 20.
        topk: int, rivals with the largest clean logits; default None, 5 up to 10 classes, 10 up to
            100, else 20, as in the paper.
        search: int, `srchiter`, bisections of the last step; default 10.
        select: candidates by "margin" as printed (the default), or by raw "logit" as in the
            authors' code.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, recorded only, since nothing here is random; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` whose weights come from the knapsack; its `flips` serve every other order and
        eps.
    """
    threat = parse_threat(threat, own=True)
    walk = Walk.of(
        threat.norm,
        threat.eps,
        step=step,
        steps=steps,
        topk=topk,
        search=search,
        select=select,
    )
    flips = walk.flips(
        model, x, y, threat.domain, seed=seed, batch_size=batch_size, progress=progress
    )
    # With d_i = flips.distances and p = threat.order (Omega_1 for p = 1, Omega_2 for p = 2):
    #
    #     B = eps ** p
    #     for i in argsort(d):
    #         if B <= 0: break
    #         kappa[i] = 1 / min(1, B / (mu[i] * d[i] ** p))
    #         B -= mu[i] * d[i] ** p / kappa[i]
    #
    # `allocate` does that for all samples at once (`knapsack`); its weights are 1 / kappa_i.
    return allocate(flips, threat.eps, threat.order, mu)


@dataclass(frozen=True)
class Walk:
    """The search of Algorithm 2 with its hyper-parameters, in the paper's symbols.

    Args:
        norm: ground norm r.
        alpha: step size.
        maxiter: steps, exactly that many.
        topk: rivals with the largest clean logits; None: 5 up to 10 classes, 10 up to 100, else 20.
        srchiter: bisections of the last step.
        select: candidates by "margin" as printed, by raw "logit" as the authors' code does.
    """

    norm: float
    alpha: float
    maxiter: int
    topk: int | None
    srchiter: int
    select: str

    @classmethod
    def of(
        cls,
        norm: Number,
        eps: Number | None,
        *,
        step: Number | None = None,
        steps: int = 20,
        topk: int | None = None,
        search: int = 10,
        select: str = "margin",
    ) -> Walk:
        """The walk with these options of `wda_pp`; without a step that of the paper for eps."""
        norm = parse_norm(norm)
        if step is None and eps is None:
            raise InputError(
                "WDA++ needs a step size: give step, or eps to take the paper's step for it."
            )
        if step is None and eps is not None:
            alpha = default_step(norm, parse_eps(eps))
        else:
            alpha = number(step or 0, "step")
        check_walk(alpha, steps, topk, select)
        whole(search, "search", 0)
        return cls(norm, alpha, steps, topk, search, select)

    def flips(
        self,
        model: Model,
        x: Tensor,
        y: Labels,
        domain: Domain = (0.0, 1.0),
        *,
        seed: int = 0,
        batch_size: int | None = None,
        progress: Progress = False,
    ) -> Flips:
        """The flips of Algorithm 2, whose distances are the paper's d_i.

        seed: recorded only, nothing here is random. The winning candidate's forward pass is
        repeated with its graph in the next step: to keep the graphs of all topk candidates instead
        would cost topk - 1 wasted backward passes for each useful one.
        """
        domain = parse_domain(domain, own=True)
        check_seed(seed)
        x, y = check_task(x, y, domain, model)

        def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
            return algorithm_2(network, x, y, tick, self, network.boxes(domain, x))

        found = run(chunk, model, x, y, batch_size, progress, "WDA++")
        options = {
            "step": self.alpha,
            "steps": self.maxiter,
            "topk": self.topk,
            "search": self.srchiter,
            "select": self.select,
        }
        info = {"method": "wda++", "options": options, "seed": seed}
        return Flips.from_search(x, y, found, self.norm, domain, "wda++", info)


def algorithm_2(
    network: Network, x: Tensor, y: Tensor, tick: Tick, walk: Walk, domain: Domain
) -> tuple[Tensor, Tensor]:
    """The first loop of Algorithm 2 for all samples at once: `X_adv` `(N, *shape)`, where no flip
    is found the sample, and theta at the samples `(N, K)`.

    Symbols: theta, the network; x, y, the samples X and their classes k; J, the topK rivals; d_i is
    the distance from X to X_adv. `Batch` leaves out the samples that are wrong or have flipped.
    """
    batch = Batch(network, x, y)
    theta = batch.clean
    J = top_rivals(theta, y, walk.topk or paper_topk(theta.shape[1]))[batch.rows]
    x_pre, x_flip = x.clone(), x.clone()
    broke = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for it in range(walk.maxiter):
        g = batch.gradients(J)  # g_j = grad (theta_j - theta_k)(x_it)
        if not len(batch):
            break
        box = box_at(domain, batch.rows.repeat_interleave(J.shape[1]))
        phi = candidates(batch, g, walk.norm, walk.alpha, box)  # phi_j = x_it + alpha M_r(g_j)
        phi = clip(phi, box).reshape(g.shape)
        theta = batch.logits(phi, J, last=it + 1 == walk.maxiter)
        flips = batch.flipped(theta)
        # j* = argmax_j theta_j(phi_j) - theta_k(phi_j)
        j = winner(theta, J, batch.y, flips, walk.select)
        x_next, flipped = pick(phi, j), pick(flips, j)  # x_{it+1} = phi_{j*}
        write(x_pre, flipped, batch.x, batch.rows)
        write(x_flip, flipped, x_next, batch.rows)
        broke[batch.rows] = flipped
        J = batch.move(x_next, flipped, J)
        tick(0.9 * max((it + 1) / walk.maxiter, batch.done))
    rows = broke.nonzero()[:, 0]
    X_adv = x.clone()
    X_adv[rows] = bisect(network, x_pre[rows], x_flip[rows], y[rows], rows, walk.srchiter)
    return X_adv, batch.clean


def bisect(
    network: Network, x_pre: Tensor, x_flip: Tensor, k: Tensor, rows: Tensor, srchiter: int
) -> Tensor:
    """`x_pre + t_u Delta`: each flip moved back along its last step as far as it stays one.

    One forward pass a bisection. What is returned is always a point whose logits were seen.
    """
    X_adv = x_flip
    Delta = x_flip - x_pre
    t_l, t_u = Delta.new_zeros(len(rows)), Delta.new_ones(len(rows))
    for _ in range(srchiter if len(rows) else 0):
        t = (t_l + t_u) / 2
        trial = x_pre + column(t, Delta) * Delta
        wrong = network.predict(network.logits(trial, rows), k, rows) != k
        X_adv = trial.where(column(wrong, Delta), X_adv)
        t_l, t_u = t.where(~wrong, t_l), t.where(wrong, t_u)
    return X_adv


def paper_topk(classes: int) -> int:
    """The paper's number of rivals: 5 for CIFAR-10, 10 for CIFAR-100, 20 for ImageNet."""
    return 5 if classes <= 10 else 10 if classes <= 100 else 20
