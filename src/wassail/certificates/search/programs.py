"""Linear programs and least distances by norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog, nnls
from torch import Tensor

from wassail.certificates.search.relaxed import Nodes, Relaxed

WEIGHT = 1e-5  # of the undecided neurons in the least-distance program, relative to the inputs


# price of violating a side, in distances to the nearest flip: keeps linear programs feasible
ELASTIC = 1e4


@dataclass(frozen=True, eq=False)
class _Answer:
    """Multipliers of a node: weight of the margin, alpha and beta `(H,)`; the nearest point `(n,)`,
    and gap `(H,)`: what each neuron's relaxation costs there, its multiplier times how far it is
    from its value.
    """

    weight: float
    alpha: Tensor
    beta: Tensor
    point: Tensor
    gap: Tensor


def solve_program(
    net: Relaxed, node: Nodes, margin: Tensor, noise: float, reach: float
) -> _Answer | None:
    """The relaxed problem of one node, solved exactly; None if the solver gives up.

    Over `u = (x' - x) / reach` and the undecided `z / width`, rows `table (u, z) <= limit`: the
    margin, the sides, and the triangles, all of them of order one. The margin has to fall below 0
    by the noise of its evaluation, so that the point that comes out is seen as a flip.
    """
    side = node.side[0].numpy()
    slope = net.slope.numpy()
    low = node.low[0].numpy()
    high = node.high[0].numpy()
    width = np.maximum(high - low, 1e-12)
    free = np.flatnonzero(side < 0)
    walls = np.flatnonzero((side >= 0) & (low < 0) & (high > 0))
    n = len(net.x)
    k = len(free)
    j = int(node.rival[0])
    # Every neuron as an affine function of (u, z, 1).
    v = np.concatenate(
        [reach * net.A.numpy(), np.zeros((len(side), k)), (net.A @ net.x + net.c).numpy()[:, None]],
        1,
    )
    z = np.zeros_like(v)
    b = net.B.numpy()
    z[free, n + np.arange(k)] = width[free]
    for rows in net.blocks:
        v[rows] += b[rows, : rows.start] @ z[: rows.start]
        fixed = rows.start + np.flatnonzero(side[rows] >= 0)
        z[fixed] = np.where(side[fixed] == 1, 1.0, slope[fixed])[:, None] * v[fixed]
    _, up, shift = (part[0].numpy()[free] for part in net.chords(node))
    top = net.D[j].numpy() @ z
    top[:n] += reach * net.C[j].numpy()
    top[-1] += float(net.C[j] @ net.x + net.e[j])
    chord = z[free] - up[:, None] * v[free]
    chord[:, -1] -= shift
    sign = np.where(side[walls] == 1, -1.0, 1.0)[:, None]
    unit = np.concatenate([[float(margin[j])], width[walls], width[free], width[free], width[free]])
    lower = slope[free][:, None] * v[free] - z[free]
    table = (
        np.concatenate([top[None], sign * v[walls], v[free] - z[free], lower, chord])
        / unit[:, None]
    )
    limit = -table[:, -1]
    limit[0] -= noise / unit[0]
    if net.norm == 2:
        answer = _least_distance(net, table[:, :-1], limit, noise / unit[0], reach)
    else:
        answer = _linear_program(net, table[:, :-1], limit, 1 + len(walls), reach)
    if answer is None:
        return None
    y, u = answer
    y = np.maximum(y, 0.0) / unit
    beta = np.zeros(len(side))
    alpha = np.zeros(len(side))
    gap = np.zeros(len(side))
    beta[walls] = y[1 : 1 + len(walls)]
    one, two, three = y[1 + len(walls) :].reshape(3, k)
    mix = (one + slope[free] * two) / np.where(one + two > 0, one + two, 1.0)
    alpha[free] = np.where(one + two > 0, np.clip(mix, slope[free], 1.0), 1.0)
    at = v[free] @ np.append(u, 1.0)
    value = width[free] * u[n:]
    away = np.maximum(value - np.maximum(at, slope[free] * at), 0.0)
    gap[free] = (one + two + three) * away + 1e-9 * away
    point = net.x + reach * torch.from_numpy(u[:n])
    return _Answer(
        float(y[0]), torch.from_numpy(alpha), torch.from_numpy(beta), point, torch.from_numpy(gap)
    )


def _linear_program(
    net: Relaxed, table: np.ndarray, limit: np.ndarray, elastic: int, reach: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """`min ||u||_r` over `table (u, z) <= limit` in the box, r = 1 or inf, by HiGHS: multipliers of
    the rows, and (u, z).

    The first `elastic` rows may be violated at a price, so that a program always has an answer and
    its multipliers are finite.
    """
    n = len(net.x)
    k = table.shape[1] - len(net.x)
    low = -np.full(n, math.inf)
    high = np.full(n, math.inf)
    if net.domain is not None:
        low = (net.domain[0] - net.x.numpy()) / reach
        high = (net.domain[1] - net.x.numpy()) / reach
    price = -(np.arange(len(table)) < elastic).astype(float)[:, None]
    if net.norm == 1:  # u = p - q
        cost = np.concatenate([np.ones(2 * n), np.zeros(k), [ELASTIC]])
        rows = np.concatenate([table[:, :n], -table[:, :n], table[:, n:], price], 1)
        sizes = [*((0, h) for h in high), *((0, -a) for a in low), *[(None, None)] * k, (0, None)]
    else:  # |u_i| <= t
        cost = np.concatenate([np.zeros(n + k), [1.0, ELASTIC]])
        rows = np.concatenate([table, np.zeros((len(table), 1)), price], 1)
        ball = np.concatenate([np.eye(n), np.zeros((n, k)), -np.ones((n, 1)), np.zeros((n, 1))], 1)
        mirror = ball.copy()
        mirror[:, :n] *= -1
        rows = np.concatenate([rows, ball, mirror])
        limit = np.concatenate([limit, np.zeros(2 * n)])
        sizes = [*zip(low, high), *[(None, None)] * k, (0, None), (0, None)]
    answer = linprog(cost, A_ub=rows, b_ub=limit, bounds=sizes, method="highs-ds")
    if answer.status != 0:
        return None
    u = answer.x[:n] - answer.x[n : 2 * n] if net.norm == 1 else answer.x[:n]
    z = answer.x[2 * n : 2 * n + k] if net.norm == 1 else answer.x[n : n + k]
    return -answer.ineqlin.marginals[: len(table)], np.concatenate([u, z])


def _least_distance(
    net: Relaxed, table: np.ndarray, limit: np.ndarray, noise: float, reach: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """The same for r = 2 by least-distance programming (see `cells.nearest_point`); z counts as
    WEIGHT times its size.
    """
    n = len(net.x)
    k = table.shape[1] - len(net.x)
    rows = table.copy()
    rows[:, n:] /= WEIGHT
    if net.domain is not None:
        low = (net.x.numpy() - net.domain[0]) / reach
        high = (net.domain[1] - net.x.numpy()) / reach
        eye = np.eye(n, n + k)
        rows = np.concatenate([rows, -eye[low < 1], eye[high < 1]])
        limit = np.concatenate([limit, low[low < 1], high[high < 1]])
    target = np.zeros(n + k + 1)
    u = np.zeros(n + k)
    target[-1] = 1.0
    try:
        for extra in (0.0, noise):  # where the margin can be 0 but not negative
            limit[0] += extra
            system = np.vstack([-rows.T, -limit])
            y, length = nnls(system, target, maxiter=20 * len(limit))
            if length > 1e-9:
                break
    except RuntimeError:
        return None
    if length > 1e-9:
        residual = system @ y - target
        u = -residual[:-1] / residual[-1]
        u[n:] /= WEIGHT
    return y[: len(table)], u
