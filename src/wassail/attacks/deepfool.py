"""DeepFool: walk to the nearest linearised boundary until the class changes (Moosavi-Dezfooli
et al., CVPR 2016).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.minimal.run import find_flips
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.walk import top_rivals
from wassail.device import host_waits, take
from wassail.errors import InputError
from wassail.geometry import clip, inner, plane_step, vector_norm, wide_norm
from wassail.network import Model
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Domain, Threat, box_at, dual, number, parse_threat
from wassail.transport.distribution import Distribution, allocate


def deepfool_engine(
    tracker: Tracker,
    tick: Tick,
    *,
    steps: int = 50,
    overshoot: float = 0.02,
    topk: int | None = None,
) -> None:
    """Step to the nearest of the linearised boundaries of all rivals, a little beyond it, until the
    first flip.

        x_{k+1} = x_k + (1 + overshoot) argmin { ||d||_r : f_j(x_k) + <w_j, d> = 0 for some rival j,
        x_k + d in the box },

    `f_j = theta_j - theta_y`, `w_j = grad f_j(x_k)`. steps: most steps; topk: rivals with the
    largest clean logits that are looked at (None: all of up to 10 classes, else 10). It never looks
    back at the sample, so it is cheap and loose.

    Passes: the clean one, then for each step topk backward and 2 forward, of which the second, with
    a graph, is only made where the first has found no flip; 10 forward to shorten.
    """
    if not number(overshoot, "overshoot") >= 0:
        raise InputError(f"overshoot is {overshoot!r}: give 0 or more, for example 0.02.")
    rivals = top_rivals(tracker.clean, tracker.y, rival_count(tracker, topk))
    count = rivals.shape[1]
    tape = tracker.start
    rows = tracker.rows
    # `keep`: where the tape holds these samples
    keep = rows
    point = tracker.x[rows]
    # For the gradients and the look at the next point.
    rows, keep, point = take(tracker.affordable(rows, count + 1), rows, keep, point)
    if not len(rows):
        tracker.execute_gradients(count, count + 1)
    for k in range(steps):
        if not len(rows):
            break
        gradients = tape.gradients(tracker.y[rows], rivals[rows], keep)
        need = gaps(tracker, tape.logits[keep], rows, rivals[rows])
        box = tracker.box(rows)
        step, _ = nearest_plane(point, gradients, need, tracker.norm, box)
        # Without a gradient or without room a sample does not move again.
        moves = (vector_norm(step, math.inf) > 0).nonzero()[:, 0]
        ahead = clip(point + (1 + overshoot) * step, box)
        rows, point = take(moves, rows, ahead)
        if not len(rows):
            break
        # A look without a graph first: gradients of those that flip would be of no use.
        _, flipped = tracker.logits(point, rows)
        left = (~flipped & tracker.can_afford(rows, count + 2)).nonzero()[:, 0]
        rows, point = take(left, rows, point)
        if len(rows) and k + 1 < steps:
            tape, _ = tracker.tape(point, rows)
            keep = torch.arange(len(rows), device=rows.device)
        tick(max((k + 1) / steps, 1 - len(rows) / len(tracker.x)))
    tracker.shorten(tracker.rows, 10)


def rival_count(tracker: Tracker, topk: int | None) -> int:
    """How many rivals to look at: `topk`, by default all of up to 10 classes, else 10.

    Fewer where the passes do not reach for a gradient of each and a look at the first step: the
    likeliest have to do.
    """
    classes = tracker.clean.shape[1]
    wanted = topk if topk is not None else classes - 1 if classes <= 10 else 10
    return int(max(min(wanted, classes - 1, tracker.passes - 2), 1))


def gaps(tracker: Tracker, z: Tensor, rows: Tensor, rivals: Tensor) -> Tensor:
    """By how much `theta_j - theta_y` has to rise for a flip: logits `(n, K)`, rivals `(n, J)` of
    these samples -> `(n, J)`.

    The boundary is put at twice the flip tolerance: at a tie, where the theory has it, nothing
    counts as a flip yet.
    """
    lead = tracker.network.need(z, rows, 2)[:, None]
    return lead - (z.gather(1, rivals) - z.gather(1, tracker.y[rows, None]))


def nearest_plane(
    point: Tensor, gradients: Tensor, gap: Tensor, norm: float, domain: Domain
) -> tuple[Tensor, Tensor]:
    """The shortest step inside the box that reaches one of J planes `<w_j, d> = gap_j`, and which
    one, `(n,)`.

    point `(n, *shape)`, gradients `(n, J, *shape)`, gap `(n, J)`. If the box lets it reach none,
    the step goes as far as it can toward the plane that would be nearest without a box.
    """
    slope = wide_norm(gradients.flatten(2), dual(norm))
    # The lengths without the box: never longer than those with it.
    free = torch.where(slope > 0, gap.abs().to(slope) / slope, math.inf)
    if host_waits(point):
        return _nearest_of_all(point, gradients, gap, free, norm, domain)
    order = free.argsort(dim=1, stable=True)
    every = torch.arange(len(point), device=point.device)
    best = torch.full_like(free[:, 0], math.inf)
    which = order[:, 0].clone()
    step = torch.zeros_like(point)
    for rank in range(gap.shape[1]):
        j = order[:, rank]
        # The others cannot get any shorter.
        open_ = (free[every, j] < best).nonzero()[:, 0] if rank else every
        if not len(open_):
            break
        w = gradients[open_, j[open_]]
        need = gap[open_, j[open_]]
        trial = plane_step(point[open_], w, need, norm, box_at(domain, open_))
        reached = inner(w, trial).abs() >= need.abs() * (1 - 1e-5)
        length = torch.where(reached, vector_norm(trial, norm).double(), math.inf)
        better = (length < best[open_]) | (rank == 0)
        mine = open_[better]
        best[mine], which[mine], step[mine] = length[better], j[mine], trial[better]
    return step, which


def _nearest_of_all(
    point: Tensor, gradients: Tensor, gap: Tensor, free: Tensor, norm: float, domain: Domain
) -> tuple[Tensor, Tensor]:
    """`nearest_plane` without a look in between: all steps at once, then the same choice among
    them by masks.
    """
    count = gap.shape[1]
    w = gradients.flatten(0, 1)
    need = gap.flatten()
    every = torch.arange(len(point), device=point.device)
    each = every.repeat_interleave(count)
    trial = plane_step(point[each], w, need, norm, box_at(domain, each))
    reached = inner(w, trial).abs() >= need.abs() * (1 - 1e-5)
    length = torch.where(reached, vector_norm(trial, norm), math.inf).reshape(-1, count).to(free)
    order = free.argsort(dim=1, stable=True)
    lengths = length.gather(1, order)
    bounds = free.gather(1, order)
    best = lengths[:, 0]
    which = order[:, 0]
    for rank in range(1, count):
        better = (bounds[:, rank] < best) & (lengths[:, rank] < best)
        best = torch.where(better, lengths[:, rank], best)
        which = torch.where(better, order[:, rank], which)
    which = which.to(point.device)
    return trial.reshape(-1, count, *point.shape[1:])[every, which], which


def deepfool(
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    steps: int = 50,
    overshoot: float = 0.02,
    topk: int | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """The near flips that DeepFool finds, and the budget of the threat allocated to them.

    Moosavi-Dezfooli et al. (2016). It steps to the nearest linearised boundary until the first
    flip, whatever eps is, so its flips serve every order and eps. It never looks back at the
    sample, so it is cheap and loose.

    Passes: the clean one, then for each step topk backward and 1 forward; 10 forward to shorten.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        steps: int, most steps; default 50.
        overshoot: float, how far beyond the boundary a step goes, as a share of it; default 0.02.
        topk: int, rivals with the largest clean logits that are looked at; default None, all of up
            to 10 classes, else 10.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, recorded only, since nothing here is random; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` whose weights come from the knapsack; its `flips` serve every other order and
        eps.
    """
    threat = parse_threat(threat, own=True)
    flips = find_flips(
        deepfool_engine,
        "deepfool",
        model,
        x,
        y,
        threat.norm,
        threat.domain,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        options={"steps": steps, "overshoot": overshoot, "topk": topk},
    )
    return allocate(flips, threat.eps, threat.order, mu)
