"""How much of each sample moves: the knapsack."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.errors import InputError, numbers
from wassail.threat import Groups, Number, Threat, parse_eps, parse_groups, parse_order
from wassail.transport.grouped import GroupedSide


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
    order of the samples. The cost of the answer, `(sum_i mu_i a_i d_i^p)^(1/p)` in float64, never
    exceeds `eps`, not even by rounding.

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
    # The loop of Algorithm 2, for all samples at once:
    #     B = eps ** p
    #     for i in argsort(d):
    #         if B <= 0: break
    #         kappa[i] = 1 / min(1, B / (mu[i] * d[i] ** p))
    #         B -= mu[i] * d[i] ** p / kappa[i]
    # Equal distances are bought together. B and d^p are in units of eps^p, so that nothing near the
    # threshold can over- or underflow.
    d, group = torch.unique(distances, return_inverse=True)  # sorted
    mass = torch.zeros_like(d).index_add(0, group, mu)
    cost = torch.where(mass > 0, mass * (d / eps) ** order, 0.0)
    share = torch.where(torch.isfinite(d), spend(cost, 1.0), 0.0)  # 1 / kappa at each distance
    weights = share[group]
    bought = (share > 0).nonzero()
    # Rounding: an ulp or two are taken from the dearest distance until the promise holds.
    for tries in range(60):
        if transport_cost(mu, weights, distances, order) <= eps or not len(bought):
            break
        share[bought[-1]] *= 1 - 2.0 ** (tries - 52)
        weights = share[group]
    return weights


def subpopulation_knapsack(
    distances: Tensor, eps: float, order: float, mu: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """The worst subpopulation of at least a share alpha, and what of it moves, float64 `(N,)` each.

    First the density `q_i / mu_i` of the subpopulation, at most 1 / alpha, then the share `a_i` of
    each of its samples that moves. They maximise `sum_i q_i a_i` within the budget `sum_i q_i a_i
    d_i^p <= eps^p`: the nearest samples first, up to the mass 1 (THEORY 12).

    Args:
        distances: finite, float64 `(N,)`.
        eps: the budget.
        order: Wasserstein order p, 1 to inf.
        mu: sample weights, float64 `(N,)`, that sum to 1.
        share: alpha, in (0, 1].
    """
    if share == 1:
        return torch.ones_like(mu), knapsack(distances, eps, order, mu)
    bought = mu * knapsack(distances, eps * share ** (1 / order), order, mu)
    level, group = torch.unique(distances, return_inverse=True)  # sorted
    mass = torch.zeros_like(level).index_add(0, group, bought)
    moved = bought * spend(mass, share)[group] / share
    total = float(moved.sum())
    most = mu / share
    # The rest of the subpopulation is filled evenly with what may still be there.
    rest = max(1 - total, 0.0) / max(float(most.sum()) - total, 1e-300)
    own = moved + rest * (most - moved)
    weights = torch.where(own > 0, moved / torch.where(own > 0, own, 1.0), 0.0).clamp(max=1.0)
    for tries in range(60):  # rounding: a few ulps less, until the promise holds
        if transport_cost(own, weights, distances, order) <= eps:
            break
        weights = weights * (1 - 2.0 ** (tries - 52))
    density = torch.where(mu > 0, own / torch.where(mu > 0, mu, 1.0), 0.0)
    return density.clamp(max=1 / share), weights


def groups_of(groups: Groups | None, n: int) -> Groups | None:
    """Groups of n samples, None for none.

    Args:
        groups: as they were given.
        n: how many samples there are.
    """
    known = parse_groups(groups)
    if known is not None and len(known) != n:
        raise InputError(
            f"groups has {len(known)} entries for {n} samples: give the group of each sample."
        )
    return known


def grouped_knapsack(
    distances: Tensor, eps: float, order: float, mu: Tensor, share: float, groups: Groups
) -> tuple[Tensor, Tensor]:
    """The worst weights of groups, and what moves: as `subpopulation_knapsack`, with a
    subpopulation of share alpha in each group.

    Args:
        distances: float64 `(N,)`.
        eps: the budget.
        order: Wasserstein order p, 1 to inf.
        mu: sample weights, float64 `(N,)`, that sum to 1.
        share: alpha, in (0, 1].
        groups: of the N samples.
    """
    moved_, weighed = GroupedSide(distances, mu, order, groups, share=share).masses(eps)
    moved = torch.from_numpy(moved_)
    group = torch.tensor(groups.places, dtype=torch.int64)
    none = torch.zeros(len(groups.names), dtype=torch.float64)
    most = mu / none.index_add(0, group, mu)[group] * torch.from_numpy(weighed)[group] / share
    moved = torch.minimum(moved, most)
    # The rest of each group is filled evenly with what may still be there.
    taken = none.index_add(0, group, moved)
    room = none.index_add(0, group, most) - taken
    rest = (torch.from_numpy(weighed) - taken).clamp(min=0) / room.clamp(min=1e-300)
    own = moved + rest.clamp(max=1.0)[group] * (most - moved)
    weights = torch.where(own > 0, moved / torch.where(own > 0, own, 1.0), 0.0).clamp(max=1.0)
    for tries in range(60):  # rounding: a few ulps less, until the promise holds
        if transport_cost(own, weights, distances, order) <= eps:
            break
        weights = weights * (1 - 2.0 ** (tries - 52))
    return torch.where(mu > 0, own / torch.where(mu > 0, mu, 1.0), 0.0), weights


def threat_knapsack(distances: Tensor, threat: Threat, mu: Tensor) -> tuple[Tensor, Tensor]:
    """The density of the samples that are there and the share of each that moves, float64 `(N,)`
    each, for a threat with its label cost, subpopulation and groups.

    Args:
        distances: of the flips, float64 `(N,)`.
        threat: what is allowed.
        mu: sample weights, float64 `(N,)`, that sum to 1.
    """
    where = (distances.clamp(max=threat.label_cost), threat.eps, threat.order, mu)
    if threat.groups is None:
        return subpopulation_knapsack(*where, threat.subpopulation)
    return grouped_knapsack(*where, threat.subpopulation, threat.groups)


def spend(cost: Tensor, budget: float) -> Tensor:
    """The share of each purchase that a budget pays for, one after the other, `(S,)`: 1 until it is
    spent, then a part, then 0.

    Args:
        cost: of each purchase, `(S,)` float64, >= 0.
        budget: in the same unit.
    """
    if not len(cost):
        return cost
    spent = cost.cumsum(0).roll(1).index_fill(0, torch.tensor([0]), 0.0)
    left = budget - spent  # B before each purchase
    share = torch.where(left > 0, (left / torch.where(cost > 0, cost, 1)).clamp(max=1), 0.0)
    return torch.where((cost == 0) & (left > 0), 1.0, share)


def mean_of(values: Tensor) -> float:
    """The mean, 0 for no values."""
    return float(values.double().mean()) if len(values) else 0.0
