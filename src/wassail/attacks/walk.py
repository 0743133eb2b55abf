"""What Algorithm 1 (WDA) and Algorithm 2 (WDA++) share: the candidates of a step, the choice among
them, the step size alpha.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.errors import InputError, unknown
from wassail.geometry import steepest
from wassail.network import Batch
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
    paper does not run, the share was measured: docs/lab-notes/l1-step.md.
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


def candidates(batch: Batch, g: Tensor, norm: float, alpha: float, box: Domain) -> Tensor:
    """`phi_j = x_iter + alpha M_r(g_j)` for every rival j, one sample's after the other's:
    `(n, J, *shape) -> (n J, *shape)`.

    In a box the step is the steepest one of length alpha that stays inside.
    """
    x = batch.x.repeat_interleave(g.shape[1], 0)
    return x + steepest(x, g.flatten(0, 1), norm, alpha, box)


def winner(z: Tensor, rivals: Tensor, y: Tensor, flips: Tensor, select: str) -> Tensor:
    """`j* = argmax_j theta_j(phi_j) - theta_y(phi_j)`, as a place among the rivals: `(n,)`.

    A candidate that flips wins over any that does not, even when it flips to a class that is not
    its rival.

    Args:
        z: theta at the candidates, `(n, J, K)`.
        rivals: their classes j, `(n, J)`.
        y: labels, `(n,)`.
        flips: which candidates flip, bool `(n, J)`.
        select: "margin", as both algorithms say, or the raw "logit" `theta_j`, as the authors'
            code does.
    """
    gap = z.gather(2, rivals[:, :, None])[:, :, 0]
    if select == "margin":
        gap = gap - z.gather(2, y[:, None, None].expand(-1, z.shape[1], 1))[:, :, 0]
    return gap.masked_fill(flips.any(1, keepdim=True) & ~flips, -math.inf).argmax(1)


def pick(values: Tensor, j: Tensor) -> Tensor:
    """The entry of each row that `j` `(n,)` names: `(n, J, ...) -> (n, ...)`."""
    return values.flatten(0, 1)[torch.arange(len(j), device=j.device) * values.shape[1] + j]
