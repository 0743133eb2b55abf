"""The slopes of networks of any size: rays and chords that are evaluated, and bounds by propagation
above them.

Small networks have exact slopes (`infinity`, `worst_case`, `branch`). Here is what images allow:
the slope at infinity by an ascent on the bias-free network from below and its linear bounds on the
unit ball from above (THEORY 3, recession identity), and the steepest chord from below by evaluated
points near and far. A smooth network with one or two inputs has no cells, but few dimensions to
cut: there `ChordSearch` closes in the steepest chord from above.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from wassail.certificates.bound import Bound, below
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Ball, Region, Where
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss.chords import CLIMB, STARTS, Chords
from wassail.certificates.loss.labels import loss_above
from wassail.certificates.loss.recession import highest
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.ranges import gamma, magnitudes, upper_on
from wassail.geometry import maximiser, vector_norm
from wassail.network import Model
from wassail.threat import Domain, Number
from wassail.transport.envelope import by_sample, envelope


def ray_slope(graph: Graph, norm: float, labels: Sequence[int], seed: int = 0) -> Bound:
    """`l = max_{k in labels, j} max_{||u||_r <= 1} theta0_j(u) - theta0_k(u)`, clipped at 0;
    witness u `(n,)`.

    Below: the step `u <- M_r(gradient of the gap at u)` from random rays, the best evaluated gap
    kept. Above: linear bounds of the bias-free network on the unit ball.
    """
    flat = graph.homogeneous()
    shape = flat.nodes[0].shape
    classes = graph.outputs
    pairs = [(k, j) for k in labels for j in range(classes) if j != k]
    generator = torch.Generator().manual_seed(seed)
    best = 0.0
    ray = torch.zeros(graph.inputs, dtype=torch.float64, device=graph.device)
    pair = pairs[0]
    for start in range(0, len(pairs), 32):
        some = [p for p in pairs[start : start + 32] for _ in range(STARTS)]
        k, j = (torch.tensor(side, device=graph.device)[:, None] for side in zip(*some))
        start_ = torch.randn(len(some), *shape, dtype=torch.float64, generator=generator)
        u = maximiser(start_.to(graph.device), norm)
        for _ in range(CLIMB):
            with torch.enable_grad():
                u = u.detach().requires_grad_(True)
                z = flat.logits(u)
                gap = (z.gather(1, j) - z.gather(1, k))[:, 0]
                (g,) = torch.autograd.grad(gap.sum(), u)
            gap = gap.detach()
            top = int(gap.argmax())
            if float(gap[top]) > best:
                best = float(gap[top])
                ray = u[top].detach().flatten()
                pair = some[top]
            u = maximiser(g, norm)
    length = float(vector_norm(ray[None], norm)[0])
    lower = max(
        0.0,
        best / max(length, 1.0) * (1 - 1e-12)
        - gamma(graph) * float(magnitudes(flat, ray)[-1].max()),
    )
    ball = Region.make(Ball(torch.zeros(graph.inputs), 1.0, norm), graph.inputs, graph.device)
    rows = torch.zeros(len(pairs), classes, dtype=torch.float64)
    for row, (k_, j_) in zip(rows, pairs):
        row[k_], row[j_] = -1.0, 1.0
    above = max(0.0, float(upper_on(flat, ball, rows).max()))
    return Bound(
        below(lower, above, "slope at infinity"),
        above,
        "propagate",
        (ray / max(length, 1.0)).cpu(),
        {"label": pair[0], "rival": pair[1]},
    )


def allocate_gains(found: Chords, mu: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Which point each of N samples moves to and with what weight: index into the chords `(N,)`
    (-1: none), weight `(N,)`.

    `max sum_i mu_i a_i gain_i : sum_i mu_i a_i distance_i <= eps` with one point a sample: the
    steps of the concave envelopes in order of steepness (THEORY 2), and a share of one point for
    what the budget cuts.
    """
    n = len(mu)
    choice = torch.full((n,), -1)
    weight = torch.zeros(n, dtype=torch.float64)
    if not len(found.root):
        return choice, weight
    near = found.distance.argsort()  # of equal slopes the nearest point comes first
    table, known = by_sample(found.root[near], n)
    place = near[table]
    gain = torch.where(known, found.gain[place], -math.inf)
    steps = envelope(gain, found.distance[place])
    left = eps * (1 - 1e-12)
    total = 0.0
    best = 0.0, choice.clone(), weight.clone()
    for i, m in zip(steps.sample.tolist(), place[steps.sample, steps.to].tolist()):
        before = int(choice[i])
        paid, kept = (
            (float(found.distance[before]), float(found.gain[before]))
            if before >= 0
            else (0.0, 0.0)
        )
        price = float(mu[i]) * (float(found.distance[m]) - paid)
        if price <= left:
            choice[i], weight[i], left = m, 1.0, left - price
            total += float(mu[i]) * (float(found.gain[m]) - kept)
            continue
        # The budget cuts this step: a share of its far end for all that is left, or what later
        # steps make of it.
        share = (left + float(mu[i]) * paid) / (float(mu[i]) * float(found.distance[m]))
        value = total + float(mu[i]) * (share * float(found.gain[m]) - kept)
        if value > best[0]:
            best = value, choice.clone(), weight.clone()
            best[1][i], best[2][i] = m, share
    return (choice, weight) if total >= best[0] else best[1:]


def whole_box(graph: Graph, domain: tuple[float, float] | tuple[Tensor, Tensor]) -> Balls:
    """A ball, cut by the box, that is all of the box."""
    region = Region.make(domain, graph.inputs, graph.device)
    middle = (region.low + region.high)[None] / 2
    radius = (region.high - region.low).amax()[None]
    return Balls.make(middle, radius, math.inf, (region.low, region.high))


def lowest_margins(graph: Graph, labels: Sequence[int], domain: Domain, steps: int = 0) -> Tensor:
    """Lower bounds on the margins of each label wherever in the domain a sample goes, `(L, K)`.

    In a box by linear bounds; by what the margins can be on R^n, which is finite for bounded
    networks.
    """
    lowest = -highest(graph, labels)
    own = torch.tensor(labels, device=graph.device)
    if graph.arithmetic == "executed":  # that is about the exact function
        lowest = torch.full_like(lowest, -math.inf)
    if domain is not None:
        sweep = Sweep(graph, whole_box(graph, domain), steps).run()
        lowest = torch.maximum(lowest, torch.cat([margins(sweep, k)[0] for k in own[:, None]]))
    return lowest


def highest_loss(
    graph: Graph, labels: Sequence[int], loss: str, domain: Domain, steps: int = 0
) -> Tensor:
    """Upper bounds on the loss of each label wherever in the domain a sample goes, `(L,)`."""
    own = torch.tensor(labels, device=graph.device)
    return loss_above(lowest_margins(graph, labels, domain, steps), own, loss).cpu()


def paper_smooth_slope(
    model: Model | Graph,
    norm: Number = 2,
    domain: Where = None,
    *,
    labels: Iterable[int] | None = None,
    time_limit: float | None = None,
    shape: Sequence[int] | None = None,
    seed: int = 0,
) -> Bound:
    """The paper's `l` for smooth networks, `sup_x max_{j != k} ||J(x)^T (e_j - e_k)||_s`, as it
    defines it: an UPPER slope.

    The paper states `E_N + l eps <= V(eps)` with it. It is the margin slope Lm, and what holds is
    `V(eps) <= E_N + l eps`. For `theta = (0, tanh x)`, the sample x = 0 of the first class and
    cross entropy it is 1, so the paper claims `V(0.5) >= 1.1931`; the true value is 0.9507, and the
    loss never exceeds 1.3133 (THEORY 3). The lower slope of a smooth network is
    `certify(...).infinity`.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        norm: input norm r, 1, 2 or inf; default 2.
        domain: None (the default) for all of R^n, a box, or a `Ball`.
        labels: the labels k; default None, all.
        time_limit: seconds; what was reached by then is kept; default None, a budget of work.
        shape: of one sample, where neither the domain nor the first layer tells it; default None.
        seed: int of the random starts; default 0.

    Returns:
        `Bound`.
    """
    return lipschitz(
        model, norm, domain, labels=labels, time_limit=time_limit, shape=shape, seed=seed
    )
