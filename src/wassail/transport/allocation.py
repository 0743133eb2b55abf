"""How much of each sample moves: the knapsack."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.errors import InputError, numbers
from wassail.threat import Number, parse_eps, parse_order


def sample_weights(mu: Tensor | None, n: int) -> Tensor:
    """The weights `mu_i` of N samples, float64, scaled to sum to one unless they do already;
    `1/N` each if none are given.
    """
    if mu is None:
        return torch.full((n,), 1 / n if n else 0.0, dtype=torch.float64)
    try:
        mu = torch.as_tensor(mu, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise numbers(mu, "the sample weights mu") from None
    if (
        mu.shape != (n,)
        or not (mu >= 0).all()
        or not torch.isfinite(mu).all()
        or (n and mu.sum() <= 0)
    ):
        raise InputError(
            f"mu must hold {n} finite sample weights >= 0 that are not all zero, one for each "
            "sample."
        )
    total = math.fsum(mu.tolist())  # exact, so that the order of the samples cannot matter
    # The budget of a sum of N costs has room for 1e-12: weights that are off by more are put right.
    return mu if not n or abs(total - 1) < 1e-13 else mu / total


def transport_cost(mu: Tensor, weights: Tensor, distances: Tensor, order: float) -> float:
    """`(sum_i mu_i a_i d_i^p)^(1/p)`, for order inf the largest distance that carries mass; all
    `(N,)` float64.

    Args:
        mu: sample weights, float64 `(N,)`.
        weights: the share `a_i` of each sample that moves, float64 `(N,)`.
        distances: how far it moves, float64 `(N,)`.
        order: Wasserstein order p, 1 to inf.
    """
    if not mu.shape == weights.shape == distances.shape:
        raise InputError(
            f"mu, weights and distances have shapes {tuple(mu.shape)}, {tuple(weights.shape)} and "
            f"{tuple(distances.shape)}: give one number for each sample."
        )
    used = (mu > 0) & (weights > 0) & (distances > 0)
    d = distances[used]
    if not len(d) or order == math.inf:
        return float(d.max()) if len(d) else 0.0
    scale = d.max()  # keeps d^p from overflowing for large orders
    return float(scale * (mu[used] * weights[used] * (d / scale) ** order).sum() ** (1 / order))


def knapsack(distances: Tensor, eps: Number, order: Number, mu: Tensor | None = None) -> Tensor:
    """The weights `a_i`, float64 `(N,)`, that maximise `sum_i mu_i a_i` within the budget: nearest
    samples first.

    Samples at exactly the same distance get the same weight, so the answer does not depend on the
    order of the samples. The cost of the answer, as `transport_cost` computes it, never exceeds
    `eps`, not even by rounding.

    Args:
        distances: of the flips, float64 `(N,)`; 0 for a sample that is wrong already, inf where no
            flip is known.
        eps: the budget, in the units of the distances.
        order: Wasserstein order p, 1 to inf.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
    """
    eps = parse_eps(eps)
    order = parse_order(order)
    try:
        distances = torch.as_tensor(distances, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise numbers(distances, "the distances") from None
    if not (distances >= 0).all():  # NaN fails too
        raise InputError("distances must be numbers >= 0, with inf where no flip is known.")
    mu = sample_weights(mu, len(distances))
    if order == math.inf:
        return (distances <= eps).double()
    level, group = torch.unique(distances, return_inverse=True)  # sorted
    price = (
        level / eps
    ) ** order  # in units of eps^p, so nothing near the threshold can over- or underflow
    mass = torch.zeros_like(level).index_add(0, group, mu)
    bill = torch.where(mass > 0, mass * price, 0.0)
    share = spend(bill, 1.0)
    share = torch.where(torch.isfinite(level), share, 0.0)
    weights = share[group]
    bought = (share > 0).nonzero()
    for tries in range(
        60
    ):  # rounding: take an ulp or two from the dearest group until the promise holds
        if transport_cost(mu, weights, distances, order) <= eps or not len(bought):
            break
        share[bought[-1]] *= 1 - 2.0 ** (tries - 52)
        weights = share[group]
    return weights


def spend(bill: Tensor, budget: float) -> Tensor:
    """The share of each purchase that a budget pays for, one after the other, `(S,)`: 1 until it is
    spent, then a part, then 0.

    Args:
        bill: what each purchase costs, `(S,)` float64, >= 0.
        budget: in the same unit.
    """
    if not len(bill):
        return bill
    left = budget - bill.cumsum(0).roll(1).index_fill(0, torch.tensor([0]), 0.0)
    share = torch.where(left > 0, (left / torch.where(bill > 0, bill, 1)).clamp(max=1), 0.0)
    return torch.where((bill == 0) & (left > 0), 1.0, share)


def mean_of(values: Tensor) -> float:
    """The mean, 0 for no values."""
    return float(values.double().mean()) if len(values) else 0.0
