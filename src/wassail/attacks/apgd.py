"""APGD, the step-size free PGD (Croce & Hein 2020, arXiv 2003.01690; for l1 2021, arXiv
2103.01208).

What differs from the reference: a coordinate that already stands at the wall it is pushed against
takes no share of the step, cross entropy cannot saturate (`losses.ce_ascent`), and a sample that
flips stops at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wassail.attacks.best import Best
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import Objective, objective, pointwise, random_start
from wassail.attacks.walk import top_rivals
from wassail.device import host_waits, write
from wassail.errors import InputError, unknown
from wassail.geometry import blocked, clip, column, maximiser, project, vector_norm
from wassail.losses import targeted_dlr_ascent
from wassail.network import Model
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Domain, Threat
from wassail.transport.distribution import Distribution

LOSSES = ("ce", "dlr", "margin", "targeted")
# Large balls at l1: how many times the radius, and the share of the steps.
LARGE = ((3, 0.3), (2, 0.3), (1, 0.4))


def apgd(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    loss: str = "ce",
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    eot: int = 1,
    large: bool | None = None,
    target: Tensor | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """APGD in every sample's ball of radius eps: AutoAttack's APGD-CE, APGD-DLR and, with
    loss="targeted", APGD-T.

    Croce and Hein (2020, 2021). APGD-T, despite its name, is not a targeted attack: any error
    counts.

    Per run and sample `steps + 1` F and `steps` B at most (times `eot`, and then one more B); a
    flip ends it.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        loss: "ce" (the default), "dlr", "margin", or "targeted": a run for each of the `targets`
            classes with the largest logits at the sample, each raising the targeted DLR of its
            class.
        steps: int, gradient steps of each run; default 100.
        restarts: int, runs from other random points, for samples still right; default 1.
        targets: int, rival classes of loss="targeted"; default 9.
        eot: int, draws averaged for a randomised model; default 1.
        large: bool, l1 only: begin in balls of 3 and 2 times the radius (30, 30, 40 % of the steps)
            as AutoAttack does; default None, on for l1.
        target: classes to be reached, integer tensor `(N,)`; default None, any wrong class; not
            with loss="targeted".
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, keys the random draws together with each sample's content; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
    """
    options = {
        "loss": loss,
        "steps": steps,
        "restarts": restarts,
        "targets": targets,
        "eot": eot,
        "large": large,
    }
    return pointwise(
        apgd_attack,
        f"apgd-{'t' if loss == 'targeted' else loss}",
        model,
        x,
        y,
        threat,
        target=target,
        mu=mu,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        options={**options, "seed": seed},
    )


def apgd_attack(
    tracker: Tracker,
    tick: Tick,
    *,
    loss: str = "ce",
    steps: int = 100,
    restarts: int = 1,
    targets: int = 9,
    eot: int = 1,
    large: bool | None = None,
    seed: int = 0,
) -> None:
    """`restarts` runs of APGD for each objective on the samples that still stand; see `apgd`."""
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    if min(steps, restarts, targets, eot) < 1:
        raise InputError(
            f"steps={steps}, restarts={restarts}, targets={targets}, eot={eot}: all must be at "
            "least 1."
        )
    if loss == "targeted" and tracker.target is not None:
        raise InputError(
            'loss="targeted" is APGD-T, which is not a targeted attack: with target= use '
            'loss="ce" or "dlr".'
        )
    if loss == "targeted":
        goals = [
            _toward(tracker, rivals)
            for rivals in top_rivals(tracker.clean, tracker.y, targets).unbind(1)
        ]
    else:
        goals = [objective(tracker, loss)]
    runs = [(turn, goal) for turn in range(restarts) for goal in goals]
    for number, (_, goal) in enumerate(runs):
        rows = tracker.rows
        if not len(rows):
            break
        _run(
            tracker,
            rows,
            goal,
            steps,
            eot,
            tracker.norm == 1 if large is None else large,
            seed,
            number,
        )
        tick((number + 1) / len(runs))


def _run(
    tracker: Tracker,
    rows: Tensor,
    goal: Objective,
    steps: int,
    eot: int,
    large: bool,
    seed: int,
    number: int,
) -> None:
    """One run from a random start; its best point by loss is left as the answer where no flip
    is known.
    """
    wide = large and tracker.norm == 1
    balls = LARGE if wide else ((1, 1.0),)
    point = random_start(tracker, rows, balls[0][0] * tracker.radius, seed, number)
    for times, share in balls:
        radius = tracker.distance.new_full((len(rows),), times * tracker.radius)
        if wide:
            point = project(point, tracker.x[rows], 1, radius, tracker.box(rows))
        # A flip in a larger ball is no reason to stop, only one in the ball itself.
        point, _ = climb(tracker, rows, point, radius, max(int(share * steps), 1), goal, eot)
    tracker.guess(rows, point)


def _toward(tracker: Tracker, rivals: Tensor) -> Objective:
    return lambda z, rows: targeted_dlr_ascent(z, tracker.y[rows], rivals[rows])


@dataclass
class _Climb:
    """The samples still climbing: every field is `(m,)` or `(m, *shape)`."""

    index: Tensor  # their places among the samples of the call
    center: Tensor  # the samples
    radius: Tensor
    point: Tensor
    previous: Tensor
    best: Best  # by loss
    slope: Tensor  # gradient at `best`
    last: Tensor  # loss at `previous`
    size: Tensor  # step size
    rises: Tensor  # how often the loss rose since the last checkpoint
    # at the last checkpoint: loss at `best`, or for l1 the number of coordinates that it moves
    seen: Tensor
    halved: Tensor  # whether the last checkpoint cut the step size
    share: Tensor  # l1: share of the coordinates that a step moves

    @classmethod
    def begin(cls, start: Tensor, center: Tensor, radius: Tensor, norm: float) -> _Climb:
        """All samples at their starts."""
        zero = torch.zeros_like(radius)
        never = torch.full_like(radius, -math.inf)
        found = cls(
            torch.arange(len(radius), device=start.device),
            center,
            radius,
            start,
            start,
            Best(start, never),
            torch.zeros_like(start),
            -never,
            2 * radius,
            zero,
            seen=never,
            halved=torch.ones_like(radius, dtype=torch.bool),
            share=zero,
        )
        if norm == 1:
            moved = _support(start, center)
            everything = max(center[:1].numel(), 1)
            found.size = radius
            found.seen = torch.where(moved > 0, moved, everything)
            found.share = torch.where(moved > 0, moved / (1.5 * everything), 0.2)
        return found

    def take(self, keep: Tensor) -> _Climb:
        if len(keep) == len(self.index):
            return self  # none leaves: no copy is needed
        return _Climb(*(getattr(self, field.name)[keep] for field in fields(self)))


def climb(
    tracker: Tracker,
    rows: Tensor,
    start: Tensor,
    radius: Tensor,
    steps: int,
    goal: Objective,
    eot: int = 1,
) -> tuple[Tensor, Tensor]:
    """APGD in balls of fixed radius: the best point by loss `(m, *shape)`, and which samples
    flipped, bool `(m,)`.

        u = Proj(x_k + size M_r(g_k)),   x_{k+1} = Proj(x_k + 0.75 (u - x_k) + 0.25 (x_k -
        x_{k-1})),

    size from `2 radius`. At checkpoints it is halved and the climb goes back to its best point, if
    at most 3/4 of the steps since the last checkpoint raised the loss, or if the last one did not
    halve it and the best loss has not risen since. For l1 there is no momentum and the step follows
    the signs of the largest entries of `g`: two thirds as many as the coordinates that the best
    point moves (a fifth of all if the start is the sample). Its size starts at `radius`, is reset
    to it, back at the best point, when the best point became sparser by 5 %, else cut by 1.5, down
    to a tenth.

    rows: samples `(m,)`; start `(m, *shape)` and radius `(m,)`: the start must lie in the ball. A
    sample that flips, within the tracker's limit if it has one, stops at once; the tracker has the
    flip. eot: loss and gradient are means over so many calls of the model. `steps + 1` F and
    `steps` B at most; a sample without passes stops.
    """
    x = tracker.x[rows]
    norm = tracker.norm
    best = start.clone()
    flipped = torch.zeros(len(rows), dtype=torch.bool, device=x.device)
    s = _Climb.begin(start, x, radius, norm)
    periods = _checkpoints(steps, norm)
    for step in range(steps + 1):
        s = s.take(tracker.affordable(rows[s.index], 1))
        if not len(s.index):
            break
        mine = rows[s.index]
        # A gradient here and a look at where it leads, or only a look without a graph.
        last = step == steps
        going = mine.new_zeros(0) if last else tracker.affordable(mine, 3)
        value, flip, gradient = _look(tracker, mine, s.point, goal, eot, going)
        better = s.best.offer(s.point, value)
        s.rises = s.rises + (value > s.last)
        s.last = value
        done = flip if tracker.limit < 0 else ~tracker.unflipped(mine)
        keep = going[(~done[going]).nonzero()[:, 0]]
        if len(keep) < len(mine):  # some end here; the others write again when they do
            best[s.index] = s.best.points
            flipped[s.index] = flip
        if not len(keep):
            break
        gradient = gradient[keep]
        if step == 0:
            tracker.flat[mine[keep]] |= ~gradient.flatten(1).any(1)
        s = s.take(keep)
        better = better[keep]
        write(s.slope, better, gradient)
        if step in periods:
            back = _check_l1(s) if norm == 1 else _check(s, periods[step])
            return_to = column(back, s.point)
            s.point = torch.where(return_to, s.best.points, s.point)
            gradient = torch.where(return_to, s.slope, gradient)
        ahead = _ahead(s, gradient, norm, tracker.box(rows[s.index]), step > 0)
        s.previous = s.point
        s.point = ahead
    return best, flipped


def _ahead(s: _Climb, g: Tensor, norm: float, domain: Domain, momentum: bool) -> Tensor:
    """The next points: a step along the gradients `g`, in ball and box; none has momentum at l1."""
    move = _direction(s.point, g, norm, domain, s.share)
    further = torch.addcmul(s.point, move, column(s.size, s.point))
    ahead = _into(further, s.center, norm, s.radius, domain)
    if norm == 1 or not momentum:
        return ahead
    ahead = s.point.lerp(ahead, 0.75).add(s.point - s.previous, alpha=0.25)
    return _into(ahead, s.center, norm, s.radius, domain)


def _look(
    tracker: Tracker, rows: Tensor, point: Tensor, goal: Objective, eot: int, on: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss `(m,)` and flips `(m,)` at points of these samples, and gradients `(m, *shape)` of those
    that go on, at the places `on` `(k,)`; 0 elsewhere.

    `eot` F each, and as many B where it goes on.
    """
    ends = torch.ones_like(rows, dtype=torch.bool).index_fill_(0, on, False)
    # Ascending places without a wait: their number is known.
    off = ends.int().argsort(descending=True, stable=True)[: len(rows) - len(on)]
    values = torch.zeros(len(rows), dtype=point.dtype, device=point.device)
    gradient = torch.zeros_like(point)
    z = torch.zeros_like(tracker.clean[rows])
    for _ in range(eot):
        # One draw at a time: `eot` graphs at once would need `eot` times the memory.
        if len(on):
            tape = tracker.network.tape(point[on], rows[on])
            value, weight = goal(tape.logits, rows[on])
            values[on] += value / eot
            z[on] += tape.logits / eot
            gradient[on] += tape.pull(weight)
        if len(off):
            logits = tracker.network.logits(point[off], rows[off])
            values[off] += goal(logits, rows[off])[0] / eot
            z[off] += logits / eot
    return values, tracker.offer(point, rows, z), gradient


def _checkpoints(steps: int, norm: float) -> dict[int, int]:
    """After which steps the step size is looked at, and how many steps that is after the last
    time.
    """
    if norm == 1:
        period = max(int(0.04 * steps), 1)
        return dict.fromkeys(range(period, steps, period), period)
    period, shrink, least = (max(int(share * steps), 1) for share in (0.22, 0.03, 0.06))
    at = period
    found = {}
    while at < steps:
        found[at] = period
        period = max(period - shrink, least)
        at += period
    return found


def _check(s: _Climb, period: int) -> Tensor:
    """Halve the step sizes that are too large; which samples go back to their best point, bool
    `(m,)`.
    """
    back = (s.rises <= 0.75 * period) | (~s.halved & (s.seen >= s.best.value))
    s.size = torch.where(back, s.size / 2, s.size)
    s.halved = back
    s.seen = s.best.value.clone()
    s.rises = torch.zeros_like(s.rises)
    return back


def _check_l1(s: _Climb) -> Tensor:
    """The l1 rule for step size and sparsity; which samples go back to their best point, bool
    `(m,)`.
    """
    moved = _support(s.best.points, s.center)
    back = moved < 0.95 * s.seen
    s.size = torch.where(back, s.radius, torch.maximum(s.size / 1.5, s.radius / 10))
    s.seen = moved
    s.share = moved / (1.5 * s.center[0].numel())
    return back


def _into(point: Tensor, center: Tensor, norm: float, radius: Tensor, domain: Domain) -> Tensor:
    """Bring points into the ball and the box: by `geometry.project`, but for l2 as the authors do,
    by scaling and clipping.

    That is not the projection onto their intersection, but much less work. On CIFAR networks the
    climb ends no lower for it; on an MNIST network whose gradients mislead the exact projection
    fells about one sample more in a hundred.
    """
    if norm != 2:
        return project(point, center, norm, radius, domain)
    v = point - center
    length = vector_norm(v, 2)
    return clip(
        torch.addcmul(center, v, column(torch.where(length > radius, radius / length, 1), v)),
        domain,
    )


def _support(point: Tensor, center: Tensor) -> Tensor:
    """The number of coordinates that differ, `(m,)`."""
    return (point != center).flatten(1).sum(1).to(point.dtype)


def _direction(point: Tensor, g: Tensor, norm: float, domain: Domain, share: Tensor) -> Tensor:
    """A step of norm 1, shape of `point`: `M_r(g)`, for l1 the signs of the largest `share`
    `(m,)` of the entries of `g`.
    """
    if norm != math.inf and domain is not None:
        g = g.masked_fill(blocked(point, g, domain), 0)
    if norm != 1:
        return maximiser(g, norm)
    size = g.abs().flatten(1)
    count = (share * size.shape[1]).long().clamp(1, size.shape[1])
    most = size.shape[1] if host_waits(size) else int(count.max())
    least = size.topk(most, dim=1).values.gather(1, count[:, None] - 1)
    sign = torch.where(size >= least, g.sign().flatten(1), 0)
    return (sign / sign.abs().sum(1, keepdim=True).clamp(min=1)).reshape(g.shape)
