"""The first-order walk that Algorithm 1 (WDA) and Algorithm 2 (WDA++) share.

From `x_t`, for every rival class `j` still in the race: `g_j = grad (theta_j - theta_y)(x_t)`,
`phi_j = Proj(x_t + alpha M_r(g_j))`, and `x_{t+1} = phi_{j*}` for the candidate with the largest
gap. Two things differ from a literal reading, and neither can make the attack weaker: a sample
stops at its first flip and leaves the batch, and a sample that never flips keeps its best iterate
instead of its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.attacks.best import Best
from wassail.device import take, write
from wassail.errors import InputError, unknown
from wassail.geometry import clip, project, steepest
from wassail.losses import margin, predict
from wassail.network import Network, Tape
from wassail.progress import Tick
from wassail.threat import Domain, whole
from wassail.ties import LOGITS, largest

SELECT = ("margin", "logit")
# The paper's step sizes for its own (norm, eps) pairs.
PAPER_STEPS = {(math.inf, 4 / 255): 0.01, (math.inf, 8 / 255): 0.02, (2.0, 0.5): 0.2}
STEP_SHARES = {math.inf: 0.64, 2.0: 0.4, 1.0: 0.4}


def default_step(norm: float, eps: float) -> float:
    """The step size alpha: the paper's where it states one, else a share of eps (never scaled by
    kappa).

    0.64 eps for linf and 0.4 eps for l2 are what the paper's values come to. For l1, which the
    paper does not run, the share was measured: docs/l1-step.md.
    """
    for (paper_norm, paper_eps), step in PAPER_STEPS.items():
        if norm == paper_norm and math.isclose(eps, paper_eps, rel_tol=1e-6):
            return step
    return STEP_SHARES[norm] * eps


def top_rivals(z: Tensor, y: Tensor, count: int) -> Tensor:
    """The `count` classes with the largest logits other than the label, best first: `(n, K),
    (n,) -> (n, count)`.
    """
    return largest(z.scatter(1, y[:, None], -math.inf), min(count, z.shape[1] - 1), band=LOGITS)


def check_walk(step: float, steps: int, topk: int | None, select: str) -> None:
    """One sentence for each hyper-parameter of the walk that cannot be right."""
    if not 0 < step < math.inf:
        raise InputError(f"step is {step!r}: give a positive step size, for example 0.02.")
    whole(steps, "steps")
    if topk is not None:
        whole(topk, "topk")
    if select not in SELECT:
        raise unknown("selection", select, SELECT)


@dataclass
class Walk:
    """Where the walk left n samples.

    clean: logits at the samples `(n, K)`; before, after: last iterate before the flip and the flip,
    where there is one, else the sample and its best iterate; flipped: bool `(n,)`, false for
    samples that were wrong already.
    """

    clean: Tensor
    before: Tensor
    after: Tensor
    flipped: Tensor


def walk(
    network: Network,
    x: Tensor,
    y: Tensor,
    tick: Tick,
    *,
    norm: float,
    domain: Domain,
    step: float,
    steps: int,
    topk: int | Callable[[int], int],
    probe: int | None = None,
    radius: float | None = None,
    select: str = "margin",
) -> Walk:
    """Walk n samples `(n, *shape)` until they flip, `steps` times at most.

    Long because it is the loop of both of the paper's algorithms, to be read beside them on one
    screen.

    topk: rivals at the start, or a function of the number of classes; probe: steps after which the
    winning rival is fixed (None: never); radius: of the ball the iterates are projected onto (None:
    no ball); select: pick the candidate by its margin `theta_j - theta_y`, as both algorithms say,
    or by its raw "logit" `theta_j`, as the authors' code does.
    """
    tape: Tape | None = network.tape(x, network.rows)
    assert tape is not None
    clean = tape.logits
    network.measure(clean)
    before = x.clone()
    after = Best(x, margin(clean, y))
    flipped = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    rows = (predict(clean, y) == y).nonzero()[
        :, 0
    ]  # the samples still walking; the tape holds them at `keep`
    count = topk if isinstance(topk, int) else topk(clean.shape[1])
    keep = rows
    current = x[rows]
    rivals = top_rivals(clean, y, count)[rows]
    for t in range(steps):
        if not len(rows):
            break
        if tape is None:
            tape = network.tape(current, rows)
            keep = torch.arange(len(rows), device=x.device)
        many = rivals.shape[1]
        gradients = tape.gradients(y[rows], rivals, keep).flatten(0, 1)
        start = current.repeat_interleave(many, 0)
        owner = rows.repeat_interleave(many)
        phi = start + steepest(start, gradients, norm, step, domain)
        phi = clip(phi, domain) if radius is None else project(phi, x[owner], norm, radius, domain)
        if many == 1 and t + 1 < steps:
            tape = network.tape(
                phi, owner
            )  # a lone candidate is the next iterate: one forward pass serves both
            z = tape.logits
        else:
            tape = None
            z = network.logits(phi, owner)
        labels = y[owner]
        wrong = (network.predict(z, labels, owner) != labels).reshape(-1, many)
        score = z.gather(1, rivals.reshape(-1, 1))
        score = (score if select == "logit" else score - z.gather(1, labels[:, None])).reshape(
            -1, many
        )
        # A candidate that flips wins over any that does not, even when it flips to a class that is
        # not its rival.
        pick = score.masked_fill(wrong.any(1, keepdim=True) & ~wrong, -math.inf).argmax(1)
        chosen = torch.arange(len(rows), device=x.device) * many + pick
        following = phi[chosen]
        flip = wrong.flatten()[chosen]
        lead = margin(z, labels)[chosen]
        after.offer(following, lead, rows, sure=flip)
        write(before, flip, current, rows)
        flipped[rows] = flip
        if t + 1 == probe:
            rivals = rivals.gather(1, pick[:, None])
        keep = (~flip).nonzero()[:, 0]
        rows, current, rivals = take(keep, rows, following, rivals)
        tick(max((t + 1) / steps, 1 - len(rows) / len(x)))
    return Walk(clean, before, after.points, flipped)
