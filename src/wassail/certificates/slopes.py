"""The slopes of networks of any size: rays and chords that are evaluated, and bounds by propagation above them.

Small networks have exact slopes (`infinity`, `worst_case`, `branch`). Here is what images allow: the slope at infinity by an
ascent on the bias-free network from below and its linear bounds on the unit ball from above (THEORY 3, recession identity),
and the steepest chord from below by evaluated points near and far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.bound import Bound, below
from wassail.certificates.propagate import crown, gamma, linear_upper, magnitudes
from wassail.certificates.region import Ball, Region
from wassail.certificates.structure import Graph
from wassail.geometry import maximiser, steepest, vector_norm
from wassail.losses import LIPSCHITZ
from wassail.threat import Domain

STARTS, CLIMB = 6, 25  # rays per pair of classes, steps each


def ray_slope(graph: Graph, norm: float, labels: Sequence[int], seed: int = 0) -> Bound:
    """`l = max_{k in labels, j} max_{||u||_r <= 1} theta0_j(u) - theta0_k(u)`, clipped at 0; witness u `(n,)`.

    Below: the step `u <- M_r(gradient of the gap at u)` from random rays, the best evaluated gap kept. Above: linear bounds of
    the bias-free network on the unit ball.
    """
    flat = graph.homogeneous()
    shape, classes = flat.nodes[0].shape, graph.outputs
    pairs = [(k, j) for k in labels for j in range(classes) if j != k]
    generator = torch.Generator().manual_seed(seed)
    best, ray, pair = 0.0, torch.zeros(graph.inputs, dtype=torch.float64), pairs[0]
    for start in range(0, len(pairs), 32):
        some = [p for p in pairs[start : start + 32] for _ in range(STARTS)]
        k, j = (torch.tensor(side)[:, None] for side in zip(*some))
        u = maximiser(torch.randn(len(some), *shape, dtype=torch.float64, generator=generator), norm)
        for _ in range(CLIMB):
            with torch.enable_grad():
                u = u.detach().requires_grad_(True)
                z = flat.logits(u)
                gap = (z.gather(1, j) - z.gather(1, k))[:, 0]
                (g,) = torch.autograd.grad(gap.sum(), u)
            gap = gap.detach()
            top = int(gap.argmax())
            if float(gap[top]) > best:
                best, ray, pair = float(gap[top]), u[top].detach().flatten(), some[top]
            u = maximiser(g, norm)
    length = float(vector_norm(ray[None], norm)[0])
    lower = max(0.0, best / max(length, 1.0) * (1 - 1e-12) - gamma(graph) * float(magnitudes(flat, ray)[-1].max()))
    ball = Region.make(Ball(torch.zeros(graph.inputs), 1.0, norm), graph.inputs)
    bounds = crown(flat, ball)
    rows = torch.zeros(len(pairs), classes, dtype=torch.float64)
    for row, (k_, j_) in zip(rows, pairs):
        row[k_], row[j_] = -1.0, 1.0
    above = max(0.0, float(linear_upper(bounds, len(flat.nodes) - 1, rows).max()))
    return Bound(
        below(lower, above, "slope at infinity"),
        above,
        "propagate",
        ray / max(length, 1.0),
        {"label": pair[0], "rival": pair[1]},
    )


@dataclass(frozen=True, eq=False)
class Chords:
    """Evaluated points, each with the sample it is reached from.

    root `(M,)`; points `(M, *shape)` in the samples' dtype; gain in loss, distance and predicted class `(M,)`, in float64 and
    computed from the stored points.
    """

    root: Tensor
    points: Tensor
    gain: Tensor
    distance: Tensor
    predicted: Tensor


def chords(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: Domain,
    loss: str,
    rays: Sequence[tuple[int, Tensor]] = (),
    seen: tuple[Tensor, Tensor] | None = None,
) -> Chords:
    """Points near and far that make steep chords `(loss(x', y_i) - loss(x_i, y_i)) / ||x' - x_i||_r`.

    For a range of distances an ascent on the loss in balls of that radius; for each ray `(label, u)` points out on it; and
    those that others have seen already: samples `(M,)` and flat points `(M, n)`.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    every, wide = torch.arange(len(x)), x.detach().cpu().double()
    spread = 1.0 if domain is None else domain[1] - domain[0]
    full = change_of_scale(wide[0].numel(), norm) * spread
    for radius in (1e-4 * full, 1e-3 * full, 1e-2 * full, 0.05 * full, 0.2 * full, full):
        point = wide.clone()
        for _ in range(3):  # the maximiser over the ball of the loss linearised at the last point
            with torch.enable_grad():
                here = point.detach().requires_grad_(True)
                (g,) = torch.autograd.grad(LIPSCHITZ[loss](graph.logits(here), y).sum(), here)
            point = wide + steepest(wide, g, norm, radius, domain)
        parts.append((every, point))
    size = max(1.0, float(wide.abs().max()))
    for label, u in rays:
        mine = (y == label).nonzero().flatten()
        for far in (4.0**k for k in range(-4, 13)):  # up to about 10^7, where float64 still has nine digits of the slope
            parts.append((mine, wide[mine] + far * size * u.reshape(1, *wide.shape[1:])))
    if seen is not None:
        parts.append((seen[0], seen[1].reshape(-1, *wide.shape[1:])))
    root, points = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).to(x.dtype)
    if domain is not None:
        points = points.clamp(*domain)
    clean = LIPSCHITZ[loss](graph.logits(wide), y)
    logits = torch.cat([graph.logits(part) for part in torch.split(points.double(), 256)])
    gain = LIPSCHITZ[loss](logits, y[root]) - clean[root]
    distance = vector_norm(points.double() - wide[root], norm)
    keep = (gain > 0) & (distance > 0)
    return Chords(root[keep], points[keep], gain[keep], distance[keep], logits.argmax(1)[keep])


def change_of_scale(n: int, norm: float) -> float:
    """The length in norm r of a vector of n entries of size 1: what distances in a unit box are compared with."""
    return float(n ** (1 / norm)) if norm < math.inf else 1.0


def steepest_of(graph: Graph, x: Tensor, found: Chords) -> tuple[float, int]:
    """The steepest chord from the samples `(N, *shape)`, rounded down, and its place; 0 and -1 if no point gains anything.

    Either loss moves by at most twice what the logits do, and those are off by gamma times the network of magnitudes.
    """
    if not len(found.gain):
        return 0.0, -1
    ends = [torch.cat([magnitudes(graph, part)[-1].amax(1) for part in torch.split(end, 256)]) for end in (found.points, x)]
    error = 2 * gamma(graph) * (ends[0] + ends[1][found.root])
    slope = ((found.gain - error) / found.distance).clamp(min=0) * (1 - 1e-12)
    best = int(slope.argmax())
    return float(slope[best]), best


def allocate_gains(found: Chords, mu: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Which point each of N samples moves to and with what weight: index into the chords `(N,)` (-1: none), weight `(N,)`.

    `max sum_i mu_i a_i gain_i : sum_i mu_i a_i distance_i <= eps` with one point a sample: the steps of the concave envelopes
    in order of steepness (THEORY 2); the last step, which the budget cuts, is replaced by a share of its far end if that pays.
    """
    n = len(mu)
    choice, weight = torch.full((n,), -1), torch.zeros(n, dtype=torch.float64)
    steps: list[tuple[float, int, int]] = []
    for i in sorted(set(found.root.tolist())):
        mine = (found.root == i).nonzero().flatten()
        at_cost, at_gain = 0.0, 0.0
        rest = mine[torch.argsort(found.distance[mine])]
        while len(rest):
            slope = (found.gain[rest] - at_gain) / (found.distance[rest] - at_cost)
            top = int(slope.argmax())
            if slope[top] <= 0:
                break
            steps.append((-float(slope[top]), i, int(rest[top])))
            at_cost, at_gain = float(found.distance[rest[top]]), float(found.gain[rest[top]])
            rest = rest[top + 1 :]
            rest = rest[found.distance[rest] > at_cost]
    left = eps * (1 - 1e-12)
    for _, i, m in sorted(steps):
        before = int(choice[i])
        paid = float(found.distance[before]) if before >= 0 else 0.0
        price = float(mu[i]) * (float(found.distance[m]) - paid)
        if price <= left:
            choice[i], weight[i], left = m, 1.0, left - price
            continue
        share = (left + float(mu[i]) * paid) / (float(mu[i]) * float(found.distance[m]))
        kept = float(found.gain[before]) if before >= 0 else 0.0
        if share * float(found.gain[m]) > kept:
            choice[i], weight[i] = m, share
        break
    return choice, weight
