"""The slope at infinity: how fast the worst-case loss grows once the budget is large (THEORY 3).

    l = max(0, max over labels k present, j != k, ||u||_r <= 1 of theta0_j(u) - theta0_k(u)),

theta0 being the network without its biases. On a cell `{u : G u <= 0}` of theta0 the gap is linear,
`g . u`, so

    g . u  <=  (g - G^T y) . u  <=  ||g - G^T y||_s        for every y >= 0,
    (*)

with equality at the best u and y. All upper sides here are (*), evaluated at whatever y a solver or
a gradient method proposed; all lower sides are the gap evaluated at a direction u of length at most
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.exact.cells import enumerate_cells, inequalities, masks_at
from wassail.certificates.exact.cones import (
    INSIDE,
    SAME,
    ConeSearch,
    Rounding,
    gaps_of,
    opens,
    pairs_of,
    unit_rows,
    values_at,
)
from wassail.certificates.exact.programs import support
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region
from wassail.geometry import maximiser, operator_norm, vector_norm
from wassail.threat import dual, parse_norm


def infinity(
    network: Piecewise,
    norm: float,
    labels: Sequence[int],
    *,
    time_limit: float | None = None,
    nodes: int | None = None,
    seed: int = 0,
) -> Bound:
    """The slope at infinity `l` over R^n for the labels that occur in the data.

    An ascent from many directions, and one relaxation as the upper side; then neurons are split
    until the bracket closes, or until `time_limit` seconds, `nodes` bounded nodes or an interrupt.
    The witness is u `(n,)`, `||u||_r <= 1`; info holds the pair `(label, rival)` it belongs to.
    """
    norm = parse_norm(norm)
    with clock.limited(time_limit):
        return ConeSearch(network, norm, labels, seed).run(nodes)


def infinity_at(network: Piecewise, x: Tensor, y: Tensor, norm: float) -> Bound:
    """The paper's practical slope `l_N`: only the cells at the samples x `(N, n)`, each with its
    own label y `(N,)`.

    `max over i, D in D_{x_i}, j of sup { (e_j - e_{y_i})^T J_D u : u in int rec(C_D), ||u||_r = 1
    }` (paper, eq. lNReLU), 0 if no cell at a sample has an unbounded interior or all slopes are
    negative. Never above `l`.
    """
    norm = parse_norm(norm)
    seen = set()
    tasks: list[tuple[Tensor, tuple[int, int]]] = []
    for point, label in zip(x, y.tolist()):
        for mask in masks_at(network, point):
            key = (label, *mask.tolist())
            if key not in seen and opens(network, mask):
                tasks += [(mask, pair) for pair in pairs_of(network, [label])]
            seen.add(key)
    return _over_cones(network, norm, tasks, "cells at the samples")


@dataclass(frozen=True, eq=False)
class Tightness:
    """The condition of the paper's theorem for `l = L`, part by part, for the mask and pair that
    come closest to it.

    slope: `L = 2^(1/r) max_D ||J_D||_{r -> s}`; mask `(H,)`: a maximiser `D*`; pair: `(k*, j*)`;
    increment: `||J_D*^T (e_j* - e_k*)||_s`; direction `(n,)`: the maximiser, or the best the cone
    allows.
    """

    slope: float
    mask: Tensor
    pair: tuple[int, int]
    increment: float
    direction: Tensor
    present: bool
    """k* occurs in the data."""
    largest: bool
    """`e_j* - e_k*` is the largest increment direction: the increment equals L."""
    recedes: bool
    """Some element of the dual maximisers `M_r(J_D*^T (e_j* - e_k*))` lies in `rec(C_D*)`."""

    @property
    def tight(self) -> bool:
        """All parts hold, so `l = L`."""
        return self.present and self.largest and self.recedes


def tightness(network: Piecewise, norm: float, labels: Sequence[int]) -> Tightness:
    """Test the condition under which the paper's theorem gives `l = L` on R^n, over all maximising
    masks and all pairs.

    An element of the set `M_r(g)` lies in the recession cone exactly when the steepest slope inside
    the cone reaches `||g||_s`, which also settles ties (r = 1) and zeros (r = inf). By enumeration
    of all cells, for small networks.
    """
    norm = parse_norm(norm)
    present = {k for k, _ in pairs_of(network, labels)}
    masks = enumerate_cells(network, Region.make(None, network.inputs)).masks
    jacobians = network.jacobian(masks)
    norms = operator_norm(jacobians, norm, dual(norm))
    top = float(norms.max())
    slope = 2 ** (1 / norm) * top
    best = None
    for index in (norms >= top * (1 - SAME)).nonzero().flatten().tolist():
        cone = unit_rows(inequalities(network, masks[index])[0].numpy())
        for k, j in pairs_of(network, range(network.outputs)):
            g = (jacobians[index, j] - jacobians[index, k]).numpy()
            increment = float(np.linalg.norm(g, dual(norm)))
            # At r = 2 the maximiser is one vector; the slope in the cone, quadratic in the angle to
            # it, would forgive too much.
            u = (
                maximiser(torch.from_numpy(g)[None], norm)[0].numpy()
                if norm == 2
                else support(g, cone, norm)[0]
            )
            recedes = bool(g @ u >= increment * (1 - SAME) and (cone @ u <= SAME).all())
            parts = (k in present, increment >= slope * (1 - SAME), recedes)
            found = Tightness(slope, masks[index], (k, j), increment, torch.from_numpy(u), *parts)
            if best is None or sum(parts) > sum((best.present, best.largest, best.recedes)):
                best = found
    assert best is not None
    return best


def _over_cones(
    network: Piecewise, norm: float, tasks: Sequence[tuple[Tensor, tuple[int, int]]], method: str
) -> Bound:
    """The steepest gap over the recession cones of (mask, pair) tasks; 0 if there are none or all
    are negative.

    The tasks are taken in falling order of `||J_D^T (e_j - e_k)||_s`, and the multipliers of r = 2,
    which are almost free, are tried in (*) first, so few need a linear program.
    """
    pairs = sorted({pair for _, pair in tasks})
    upper = 0.0
    lower = 0.0
    witness = torch.zeros(network.inputs, dtype=torch.float64)
    info = {"norm": norm, "cones": len(tasks)}
    if not tasks:
        return Bound(0.0, 0.0, method, witness, info)
    gaps = gaps_of(network, pairs)
    s = dual(norm)
    rounding = Rounding.of(gaps, norm)
    masks = torch.stack([mask for mask, _ in tasks])
    outputs = torch.tensor([pairs.index(pair) for _, pair in tasks])
    parts = [gaps.jacobian(masks[i : i + 4096]) for i in range(0, len(masks), 4096)]
    slopes = torch.cat(parts)[torch.arange(len(tasks)), outputs]
    lengths = vector_norm(slopes, s) + rounding.output[outputs]
    lengths = lengths.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for i in lengths.argsort(descending=True, stable=True).tolist():
        if float(lengths[i]) <= upper:
            break
        g = slopes[i]
        rows = inequalities(network, masks[i])[0]
        length = torch.linalg.vector_norm(rows, 2, dim=1)
        rows = rows[length > 0]
        error = rounding.preactivation[length > 0]
        length = length[length > 0]
        for chosen in dict.fromkeys((2.0, norm)):
            u, y = support(g.numpy(), (rows / length[:, None]).numpy(), chosen)
            weight = torch.from_numpy(y) / length
            value = (
                torch.linalg.vector_norm(g - rows.T @ weight, s)
                + rounding.output[outputs[i]]
                + weight @ error
            )
            ceiling = min(float(lengths[i]), float(value))
            if ceiling <= upper:
                break
        upper = max(upper, ceiling)
        direction, values = values_at(gaps, rounding, torch.from_numpy(u)[None], norm)
        # Where the maximum over the cone is 0, u is rounding noise and its direction may lie in
        # another cone.
        inside = bool((rows @ direction[0] <= INSIDE * length).all())
        if inside and float(values[0, outputs[i]]) > lower:
            lower = float(values[0, outputs[i]])
            witness = direction[0]
            info |= {"label": pairs[outputs[i]][0], "rival": pairs[outputs[i]][1]}
    return Bound(
        below(lower, upper, "slope at infinity", 100 * INSIDE), upper, method, witness, info
    )
