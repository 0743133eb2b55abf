"""Losses of logits `z`, shape `(N, K)`, and labels `y`, shape `(N,)`. All are larger where the
model is more wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """`-z_y + log sum_j exp z_j`, shape `(N,)`."""
    return F.cross_entropy(z, y, reduction="none")


def margin(z: Tensor, y: Tensor) -> Tensor:
    """`max_{j != y} z_j - z_y`, shape `(N,)`: positive where the prediction is wrong, 0 at a tie.

    The paper's proofs call this the DLR loss; its Lipschitz statements hold for it and not for
    `dlr` below.
    """
    return strongest_rival(z, y)[0] - z.gather(1, y[:, None])[:, 0]


def dlr(z: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio (Croce & Hein 2020): `margin / (z_(1) - z_(3))`, shape
    `(N,)`.

    With K = 2 there is no third logit and with K = 3 the ratio is constant in many directions:
    there it is the margin.
    """
    if z.shape[1] <= 3:
        return margin(z, y)
    top = z.topk(3, dim=1).values
    return margin(z, y) / spread_of(top[:, 0] - top[:, 2])


def spread_of(gap: Tensor) -> Tensor:
    """A gap between logits to divide by: 1 where it is 0, where the paper adds 1e-12.

    That constant would change what is climbed where all logits are small.
    """
    return torch.where(gap > 0, gap, 1.0)


def ce_ascent(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What an ascent on cross entropy needs: `t = log sum_{j != y} exp z_j - z_y`, `(N,)`, and its
    gradient, `(N, K)`.

    Cross entropy is `log(1 + exp t)`: the same order and the same direction, but neither the value
    nor the gradient vanishes where the model is so sure that its softmax rounds to 0 and 1.
    """
    rivals = z.scatter(1, y[:, None], -math.inf)
    value = rivals.logsumexp(1) - z.gather(1, y[:, None])[:, 0]
    return value, rivals.softmax(1).scatter(1, y[:, None], -1.0)


def margin_ascent(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The margin `(N,)` and its gradient with respect to the logits `(N, K)`."""
    best, rival = strongest_rival(z, y)
    weight = torch.zeros_like(z).scatter(1, rival[:, None], 1.0).scatter(1, y[:, None], -1.0)
    return best - z.gather(1, y[:, None])[:, 0], weight


def dlr_ascent(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """DLR `(N,)` and the direction of its gradient with respect to the logits `(N, K)`: the
    gradient times its denominator.

    Where `y` is third DLR is 1 whatever the logits and has no gradient: there the direction is the
    margin's.
    """
    value, plain = margin_ascent(z, y)
    if z.shape[1] <= 3:
        return value, plain
    top = z.topk(3, dim=1)
    value = value / spread_of(top.values[:, 0] - top.values[:, 2])
    turn = torch.stack([-value, 0 * value, value], 1)
    third = (top.indices[:, 2] == y)[:, None]
    return value, torch.where(third, plain, plain.scatter_add(1, top.indices, turn))


def targeted_dlr_ascent(z: Tensor, y: Tensor, rival: Tensor) -> tuple[Tensor, Tensor]:
    """`(z_j - z_y) / (z_(1) - (z_(3) + z_(4)) / 2)` for rivals j `(N,)`, and the direction
    of its gradient `(N, K)`.

    With fewer than four classes there is no fourth logit: there it is `z_j - z_y`.
    """
    value = (z.gather(1, rival[:, None]) - z.gather(1, y[:, None]))[:, 0]
    weight = torch.zeros_like(z).scatter(1, rival[:, None], 1.0).scatter(1, y[:, None], -1.0)
    if z.shape[1] < 4:
        return value, weight
    top = z.topk(4, dim=1)
    value = value / spread_of(top.values[:, 0] - (top.values[:, 2] + top.values[:, 3]) / 2)
    turn = torch.stack([-value, 0 * value, 0.5 * value, 0.5 * value], 1)
    return value, weight.scatter_add(1, top.indices, turn)


# Losses an ascent can climb: `(z, y) -> (value (N,), direction of its gradient with respect to the
# logits (N, K))`.
ASCENTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "ce": ce_ascent,
    "dlr": dlr_ascent,
    "margin": margin_ascent,
}


# Losses that are Lipschitz in the logits, `(z, y) -> (N,)`: what certificates can be about. DLR is
# a ratio and is not.
LIPSCHITZ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "margin": margin,
}


def strongest_rival(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit among the classes other than `y`, and that class; both `(N,)`."""
    best = z.scatter(1, y[:, None], -math.inf).max(1)
    return best.values, best.indices


def predict(z: Tensor, y: Tensor, tolerance: float = 0.0, scale: Tensor | None = None) -> Tensor:
    """The predicted class, shape `(N,)`, where a tie counts as an error (THEORY 2a): `y` only if it
    wins outright.

    With a tolerance a wrong class must win by `need(z, tolerance, scale)`, so that a stored flip
    survives another batch size; without that much it is no flip.

    Args:
        z: logits `(N, K)`.
        y: labels `(N,)`.
        tolerance: share of the logits' size, 0 by default.
        scale: size of the logits at the samples, `(N,)`; by default that of `z` alone counts.
    """
    best, rival = strongest_rival(z, y)
    lead = best - z.gather(1, y[:, None])[:, 0]
    return torch.where(lead >= (need(z, tolerance, scale) if tolerance else 0.0), rival, y)


def magnitude(z: Tensor) -> Tensor:
    """The size of the logits: the largest absolute value of each row, `(N, K) -> (N,)`."""
    return z.detach().abs().amax(1)


def need(z: Tensor, tolerance: float, scale: Tensor | None = None) -> Tensor:
    """The lead that a wrong class needs at logits `z` `(N, K)` to count as a flip, `(N,)`.

    It is relative to the size of the logits, here or at the sample (`scale`), whichever is larger:
    rounding errors grow with that size. So a positive factor on the logits changes no flip. The
    size here alone would not do: two logits `(-f, f)` both vanish at the boundary.
    """
    size = magnitude(z)
    return tolerance * (size if scale is None else torch.maximum(size, scale))


def flip_tolerance(dtype: torch.dtype) -> float:
    """By how much a stored flip must be wrong: 1e-9 in float64, 1e-5 in float32."""
    return 1e-9 if dtype == torch.float64 else 1e-5
