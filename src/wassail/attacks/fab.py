"""FAB, the Fast Adaptive Boundary attack, untargeted and targeted (Croce & Hein, ICML 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.attacks.deepfool import gaps, nearest_plane, rival_count
from wassail.attacks.minimal.run import find_flips
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import random_start
from wassail.attacks.walk import top_rivals
from wassail.device import fetch, send, take
from wassail.errors import InputError
from wassail.geometry import clip, column, inner, plane_step, wide_norm
from wassail.network import Model
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Domain, Threat, box_at, parse_threat
from wassail.transport.distribution import Distribution, allocate

BISECTIONS = 10


def fab_engine(
    tracker: Tracker,
    tick: Tick,
    *,
    steps: int = 100,
    alpha_max: float = 0.1,
    eta: float = 1.05,
    beta: float = 0.9,
    topk: int | None = None,
    targets: int | None = None,
    restarts: int = 1,
    shorten: int = BISECTIONS,
    seed: int = 0,
) -> None:
    """Project the iterate and the sample onto the nearest linearised boundary, mix the two, step
    back after each flip.

    With `f_j = theta_j - theta_y` and `w_j = grad f_j(x_k)`, for `k < steps`:

    1. the plane `f_j(x_k) + <w_j, . - x_k> = 0` of the rival `j` that is nearest to `x_k` inside
       the box;
    2. `d`, `d_0`: the shortest steps inside the box onto it from `x_k` and from the sample x
       (`geometry.plane_step`);
    3. `a = min(||d|| / (||d|| + ||d_0||), alpha_max)`, `x_{k+1} = clip((1 - a)(x_k + eta d) + a (x
       + eta d_0))`;
    4. if `x_{k+1}` is a flip, keep it if it is the nearest, and go on from `x + beta (x_{k+1} -
       x)`.

    topk: rivals with the largest clean logits (None: all of up to 10 classes, else 10). targets:
    FAB-T, a run of its own for each of this many rivals (at most 9) with the largest clean logits.
    Limited passes are shared evenly among the runs, and there are fewer of them where they would
    get less than 10 each. restarts: the first begins at the sample, the others at a random point
    keyed by the seed. shorten: bisections of the nearest flip at the end.

    Passes: the clean one, then for each step 2 forward (FAB-T: 1, and 1 more after a flip), and
    topk backward (FAB-T: 1); `shorten` forward.
    """
    if targets is not None and targets < 1:
        raise InputError(
            f"targets is {targets}: give the number of rivals to run FAB-T on, 1 to 9, or None "
            "for all at once."
        )
    count = rival_count(
        tracker, topk if targets is None else int(min(targets, 9, max(tracker.passes / 10, 1)))
    )
    rows = tracker.rows
    rows = rows[tracker.affordable(rows, count + 1)]
    if len(rows):
        rivals = top_rivals(tracker.clean, tracker.y, count)
        columns = [slice(None)] if targets is None else [slice(j, j + 1) for j in range(count)]
        runs = [(turn, part) for turn in range(restarts) for part in columns]
        share = (tracker.passes - 1 - count) / len(runs) if math.isfinite(tracker.passes) else 0.0
        gradients = tracker.start.gradients(tracker.y[rows], rivals[rows], rows)
        for i, (turn, part) in enumerate(runs):

            def report(done: float, i: int = i, total: int = len(runs)) -> None:
                tick((i + done) / total)

            if i:
                rows, gradients = take(tracker.unflipped(rows).nonzero()[:, 0], rows, gradients)
            later = share * (len(runs) - 1 - i)
            begin = (
                rows,
                rivals[rows, part],
                tracker.x[rows],
                tracker.clean[rows],
                gradients[:, part],
            )
            if turn:
                begin = _elsewhere(tracker, rows, rivals[:, part], later, seed, i)
            if len(begin[0]):
                _descend(tracker, report, *begin, later, steps, Mix(alpha_max, eta, beta))
    else:
        tracker.execute_gradients(count, count + 1)
    tracker.shorten(tracker.rows, shorten)


def _elsewhere(
    tracker: Tracker, rows: Tensor, rivals: Tensor, later: float, seed: int, number: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A restart: samples, rivals, a random point half as far as the nearest flip (or the
    limit), logits and gradients there.
    """
    rows = rows[(_left(tracker, rows, later) >= rivals.shape[1] + 2).nonzero()[:, 0]]
    far = (
        tracker.distance[rows]
        if tracker.limit < 0
        else tracker.distance[rows].clamp(max=tracker.limit)
    )
    point = random_start(
        tracker, rows, torch.where(torch.isfinite(far), far, 1.0) / 2, seed, number
    )
    if not len(rows):
        return rows, rivals[rows], point, tracker.clean[rows], point
    tape, _ = tracker.tape(point, rows)
    return rows, rivals[rows], point, tape.logits, tape.gradients(tracker.y[rows], rivals[rows])


def _descend(
    tracker: Tracker,
    tick: Tick,
    rows: Tensor,
    rivals: Tensor,
    point: Tensor,
    z: Tensor,
    gradients: Tensor,
    later: float,
    steps: int,
    mix: Mix,
) -> None:
    """One run from points of these samples: rivals `(n, J)`, gradients there `(n, J, *shape)`;
    `later`: passes to leave.
    """
    # Which flipped in the last step, and are likely to again; kept on the CPU.
    wild = torch.zeros(len(rows), dtype=torch.bool)
    for k in range(steps):
        need = gaps(tracker, z, rows, rivals)
        x, box = tracker.x[rows], tracker.box(rows)
        point, length = mix.step(tracker.norm, box, point, x, gradients, need)
        # A step of length 0 would be repeated for ever; at a fixed radius, a sample flipped within
        # it is done.
        moving = (length > 0).to(rows.device) & tracker.unflipped(rows)
        (can,) = fetch(moving & (_left(tracker, rows, later) >= 1))
        keep = can.nonzero()[:, 0]
        rows, rivals, point = take(send(keep, rows.device), rows, rivals, point)
        (wild,) = take(keep, wild)
        if not len(rows):
            return
        # The gradients are wanted at the new point, or after a flip where it steps back to: those
        # of a pass that flips are of no use. So where there are many, and where the last step
        # flipped, the point is looked at without a graph first.
        (enough,) = fetch(_left(tracker, rows, later) >= 3)
        last = k + 1 == steps
        wild = wild | ~enough | (last or rivals.shape[1] > 1)
        calm, rash = (send(mask.nonzero()[:, 0], rows.device) for mask in (~wild, wild))
        flipped = torch.zeros_like(rows, dtype=torch.bool)
        order = torch.arange(len(calm), device=rows.device)
        place = torch.zeros_like(rows).index_copy(0, calm, order)
        if len(calm):
            tape, flipped[calm] = tracker.tape(point[calm], rows[calm])
            ahead = tape.gradients(tracker.y[rows[calm]], rivals[calm])
        if len(rash):
            _, flipped[rash] = tracker.logits(point[rash], rows[rash])
        tick((k + 1) / steps)
        again = flipped.index_fill(0, rash, True)
        least = torch.where(again, rivals.shape[1] + 2, 1)
        can = tracker.unflipped(rows) & (_left(tracker, rows, later) >= least)
        can, again, wild = fetch(can, again, flipped)
        chosen = (can & ~again).nonzero()[:, 0], (can & again).nonzero()[:, 0]
        on, off = (send(index, rows.device) for index in chosen)
        if last or not len(on) + len(off):
            return
        returned = mix.back(point[off], tracker.x[rows[off]], flipped[off])
        found = [(ahead[place[on]], tape.logits[place[on]])] if len(on) else []
        if len(off):
            tape, _ = tracker.tape(returned, rows[off])
            found.append((tape.gradients(tracker.y[rows[off]], rivals[off]), tape.logits))
        gradients, z = (torch.cat(parts) for parts in zip(*found))
        rows, rivals = (v[torch.cat([on, off])] for v in (rows, rivals))
        point = torch.cat([point[on], returned])
        wild = wild[torch.cat(chosen)]


@dataclass(frozen=True)
class Mix:
    """How FAB mixes its two steps, in the paper's symbols."""

    alpha_max: float
    eta: float
    beta: float

    def step(
        self, norm: float, box: Domain, point: Tensor, x: Tensor, gradients: Tensor, need: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next points, and how far the nearest planes were, float64 `(n,)`."""
        near, home, length, back = _two_steps(norm, box, point, x, gradients, need)
        share = length / torch.where(length > 0, length + back, 1)
        a = column(share.clamp(max=self.alpha_max), x)
        mixed = (1 - a) * (point + self.eta * near) + a * (x + self.eta * home)
        return clip(mixed, box), length

    def back(self, point: Tensor, x: Tensor, flipped: Tensor) -> Tensor:
        """Where a run goes on: on the way back to the sample after a flip, else at the point."""
        return torch.where(column(flipped, x), x + self.beta * (point - x), point)


def _two_steps(
    norm: float, domain: Domain, point: Tensor, x: Tensor, gradients: Tensor, need: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The steps from the point and from the sample to the plane nearest to the point, and their
    lengths, float64 `(n,)`.
    """
    many = gradients.shape[1] > 1
    w = gradients[:, 0]
    gap = need[:, 0]
    if many:
        near, j = nearest_plane(point, gradients, need, norm, domain)
        every = torch.arange(len(point), device=point.device)
        w = gradients[every, j]
        gap = need[every, j]
    home_gap = gap + inner(w, point - x)  # the same plane, seen from x
    if many:
        home = plane_step(x, w, home_gap, norm, domain)
    else:  # both in one go
        both = plane_step(
            torch.cat([point, x]),
            torch.cat([w, w]),
            torch.cat([gap, home_gap]),
            norm,
            box_at(domain, torch.arange(len(x), device=x.device).repeat(2)),
        )
        near = both[: len(x)]
        home = both[len(x) :]
    return near, home, wide_norm(near.flatten(1), norm), wide_norm(home.flatten(1), norm)


def _left(tracker: Tracker, rows: Tensor, later: float) -> Tensor:
    """Passes left to this run: those of later runs are theirs, and a sample that has a flip
    keeps enough to shorten it.
    """
    return tracker.passes_left(rows) - torch.where(
        torch.isfinite(tracker.distance[rows]), max(later, BISECTIONS), later
    )


def fab(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    steps: int = 100,
    alpha_max: float = 0.1,
    eta: float = 1.05,
    beta: float = 0.9,
    topk: int | None = None,
    targets: int | None = None,
    restarts: int = 1,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """The nearest flips that FAB finds, or FAB-T with `targets=9`, and the budget of the threat
    allocated to them.

    Croce and Hein (2020). It looks for the nearest flip whatever eps is, so its flips serve every
    order and eps. Each step projects the iterate and the sample onto the nearest linearised
    boundary inside the box, mixes the two and steps back after each flip.

    Passes: the clean one, then for each step 2 forward (FAB-T: 1, and 1 more after a flip), and
    topk backward (FAB-T: 1).

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        steps: int, steps of each run; default 100.
        alpha_max: float, largest share of the step from the sample in the mix; default 0.1.
        eta: float, overshoot of a projection as a factor; default 1.05.
        beta: float, share of the way to a flip from which the run goes on; default 0.9.
        topk: int, rivals with the largest clean logits; default None, all of up to 10 classes, else
            10.
        targets: int, FAB-T: a run of its own for each of this many rivals, at most 9; default None,
            one run for all.
        restarts: int; the first begins at the sample, the others at a random point; default 1.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, keys the random draws together with each sample's content; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` whose weights come from the knapsack; its `flips` serve every other order and
        eps.
    """
    options = {
        "steps": steps,
        "alpha_max": alpha_max,
        "eta": eta,
        "beta": beta,
        "topk": topk,
        "targets": targets,
    }
    threat = parse_threat(threat, own=True)
    flips = find_flips(
        fab_engine,
        "fab" if targets is None else "fab-t",
        model,
        x,
        y,
        threat.norm,
        threat.domain,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        options={**options, "restarts": restarts, "seed": seed},
    )
    return allocate(flips, threat.eps, threat.order, mu)
