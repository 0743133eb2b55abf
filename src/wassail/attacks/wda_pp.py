"""WDA++, the Wasserstein Distributional Attack with adaptive weights: Algorithm 2 of the paper."""

from __future__ import annotations

from torch import Tensor

from wassail.attacks.walk import Walk, check_walk, default_step, walk
from wassail.checks import check_data
from wassail.errors import InputError
from wassail.network import Model, Network
from wassail.network import search as run
from wassail.progress import Progress, Tick
from wassail.threat import (
    Domain,
    Number,
    Threat,
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


def wda_pp(
    model: Model,
    x: Tensor,
    y: Tensor,
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
        y: true labels, integer tensor `(N,)`.
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
    threat = parse_threat(threat)
    flips = flips_wda_pp(
        model,
        x,
        y,
        threat.norm,
        threat.domain,
        eps=threat.eps,
        step=step,
        steps=steps,
        topk=topk,
        search=search,
        select=select,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )
    return allocate(flips, threat.eps, threat.order, mu)


def flips_wda_pp(
    model: Model,
    x: Tensor,
    y: Tensor,
    norm: Number,
    domain: Domain = (0.0, 1.0),
    *,
    eps: Number | None = None,
    step: Number | None = None,
    steps: int = 20,
    topk: int | None = None,
    search: int = 10,
    select: str = "margin",
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Flips:
    """The distances of Algorithm 2: a walk without a ball to the first flip, then a bisection of
    the last step.

    model: batch `(n, *shape)` -> logits `(n, K)`; x `(N, *shape)`, y `(N,)`. step: alpha; by
    default `default_step` of eps, which must then be given. steps: `maxiter`, exactly that many.
    topk: rivals with the largest clean logits, by default the paper's 5 up to 10 classes, 10 up to
    100, else 20. search: `srchiter` bisections. select: candidates by "margin" as printed, by raw
    "logit" as the authors' code does. seed: recorded only, nothing here is random.

    Per step and sample: 1 forward and topk backward passes at the iterate, topk forward at the
    candidates; `search` at the end. The winning candidate's forward pass is repeated with its graph
    in the next step: to keep the graphs of all topk candidates instead would cost topk - 1 wasted
    backward passes for each useful one.
    """
    norm = parse_norm(norm)
    domain = parse_domain(domain)
    if step is None and eps is None:
        raise InputError(
            "WDA++ needs a step size: give step, or eps to take the paper's step for it."
        )
    alpha = (
        default_step(norm, parse_eps(eps))
        if step is None and eps is not None
        else number(step or 0, "step")
    )
    check_walk(alpha, steps, topk, select)
    whole(search, "search", 0)
    check_seed(seed)
    x, y = check_data(x, y, domain, model)

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        found = walk(
            network,
            x,
            y,
            lambda share: tick(0.9 * share),
            norm=norm,
            domain=domain,
            step=alpha,
            steps=steps,
            topk=topk or paper_topk,
            select=select,
        )
        return bisect(network, y, found, search), found.clean

    found = run(chunk, model, x, y, batch_size, progress, "WDA++")
    options = {"step": alpha, "steps": steps, "topk": topk, "search": search, "select": select}
    return Flips.from_search(
        x, y, found, norm, domain, "wda++", {"method": "wda++", "options": options, "seed": seed}
    )


def paper_topk(classes: int) -> int:
    """The paper's number of rivals: 5 for CIFAR-10, 10 for CIFAR-100, 20 for ImageNet."""
    return 5 if classes <= 10 else 10 if classes <= 100 else 20


def bisect(network: Network, y: Tensor, walked: Walk, times: int) -> Tensor:
    """The flipped points, each moved back along its last step as far as it stays flipped. One
    forward a bisection.

    Samples that did not flip keep the walk's best iterate. A returned point is always one whose
    logits were seen.
    """
    points = walked.after.clone()
    rows = walked.flipped.nonzero()[:, 0]
    before = walked.before[rows]
    labels = y[rows]
    found = points[rows]
    step = found - before
    low = step.new_zeros(len(rows))
    high = step.new_ones(len(rows))
    shape = (-1, *[1] * (step.ndim - 1))
    for _ in range(times if len(rows) else 0):
        middle = (low + high) / 2
        trial = before + middle.reshape(shape) * step
        wrong = network.predict(network.logits(trial, rows), labels, rows) != labels
        found = trial.where(wrong.reshape(shape), found)
        low = middle.where(~wrong, low)
        high = middle.where(wrong, high)
    points[rows] = found
    return points
