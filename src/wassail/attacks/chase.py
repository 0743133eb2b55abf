"""Our own engine: linearise the boundary, aim between the nearest point of it and the clean sample,
learn how boldly.

The nearest misclassified point solves `min ||z - x||_r` over the box subject to `theta_j(z) >=
theta_y(z)` for some rival j. Around an iterate `x_k` a rival's boundary is the plane `<w, z> = <w,
x_k> - f`, with `f = (theta_j - theta_y)(x_k)` and `w` its gradient, and the shortest step to a
plane inside a box is known exactly for every norm (`plane_step`). Two such steps matter (Croce &
Hein 2020, FAB): `d1` from the iterate, which keeps to where the linearisation is true, and `d2`
from the clean sample, which is where the answer would be if it were true everywhere (HLRF of
structural reliability). We move to

    x_{k+1} = (1 - a)(base + eta d1) + a (x + eta d2),        base = x + beta (x_k - x) where x_k is
    a flip, else x_k.

FAB caps `a` at 0.1, lets it vanish near the boundary, and keeps `eta`; here each sample learns
both: a flip makes the next step bolder (`a` up, `eta` down), a miss makes it more careful and
pushes harder. One forward and one backward pass serve an iteration: flip test, linearisation and
the next step.

Rivals are ordered by the exact length of their first step from the clean sample, not by their
logits. On a linear classifier that first step is the answer: one forward pass and K - 1 gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.attacks.anneal import anneal
from wassail.attacks.blind import blind_search, far_starts
from wassail.attacks.hunt import Hunt
from wassail.attacks.pdpgd import duel
from wassail.attacks.squeeze import SLACK, climb, squeeze
from wassail.attacks.starts import LOOKS, scatter, shortest, steepness
from wassail.device import take
from wassail.geometry import (
    clip,
    clip_,
    column,
    inner,
    plane_steps,
    steepest,
    vector_norm,
    walls,
)
from wassail.progress import Tick
from wassail.ties import LOGITS, in_order, largest

# Whose steps to follow, and how often, where those of l1 lead to no flip.
SPREAD = ((2.0, 4), (math.inf, 5))
# Gradients at the sample: all rivals up to 11 classes, else those with the largest logits.
RIVALS = 10
# A sample that flips after this share of its first step is not chased but walked (`creep`).
EARLY = {1.0: 0.4, 2.0: 0.4, math.inf: 0.7}
# With more than 11 classes: how many more rivals get a gradient later.
WIDE = 50
# The rounds after the opening (see `play`), and what is repeated after them: docs/attacks.md says
# how they were chosen.
PLAN = {
    1.0: (
        *("duel", "anneal", "squeeze", "stir", "duel", "anneal"),
        *("sparse", "fresh", "anneal", "stir", "half", "rivals"),
    ),
    2.0: ("anneal", "anneal", "afar", "anneal", "squeeze", "anneal", "afar", "rivals"),
    math.inf: ("straight", "anneal", "fresh", "anneal", "stir", "fresh", "rivals", "half"),
}
LATER = {
    1.0: ("anneal", "sparse", "stir", "duel", "anneal", "half"),
    2.0: ("anneal", "half", "anneal", "afar", "anneal", "stir"),
    math.inf: ("straight", "anneal", "stir", "fresh", "half", "anneal"),
}
# First radius, in distances of the best flip, and first step, in radii, of the anneals.
ANNEALS = {
    1.0: ((2.0, 1.0), (2.0, 2.0), (3.0, 1.0)),
    2.0: ((2.0, 1.0), (2.0, 2.0), (3.0, 1.0)),
    math.inf: ((1.3, 1.0),),
}
DUELS = (10.0, 30.0, 3.0)  # what the logits are scaled to in the duels


@dataclass
class Lead:
    """What the gradients at m samples say, and what was learned of them.

    Args:
        hunt: the search.
        rows: the samples `(m,)`.
        rivals: classes by the length of their first step, nearest first, `(m, J)`.
        steps: first steps `(m, J, *shape)`.
        slack: see `squeeze`; for every sample of the hunt.
        blind: places `(k,)` of samples whose gradients lead nowhere.
    """

    hunt: Hunt
    rows: Tensor
    rivals: Tensor
    steps: Tensor
    slack: Tensor
    blind: Tensor

    def ahead(self, rank: int, factor: float) -> Tensor:
        """Points on the way to a rival, `(m, *shape)`, `factor` first steps from the samples."""
        ahead = self.hunt.x[self.rows] + factor * self.steps[:, rank]
        return clip(ahead, self.hunt.box(self.rows))

    def misled(self) -> Tensor:
        """Whether, for l2, the flip known is much nearer or farther than the first step said, or
        there is none; bool `(m,)`.
        """
        length = vector_norm(self.steps[:, 0], self.hunt.norm)
        ratio = self.hunt.distance[self.rows] / length.clamp(min=1e-30)
        return ((ratio < 0.75) | (ratio > 1.5)) & (self.hunt.norm == 2)


def chase_engine(
    hunt: Hunt, tick: Tick, *, rounds: int = 4, seed: int = 0, begin: int = -1, topk: int = RIVALS
) -> None:
    """Hunt for the nearest flip by rounds; every round adds to what is known, so more passes never
    hurt.

    Opening: the first-order step of every rival, the nearest one chased, then what the first result
    calls for, the second rival, a polish of the best flip (about 100 passes for ten classes). Then
    rounds (`PLAN`, `LATER`), each from somewhere else: squeezes of the best flip, from the sample
    or from a random point, balls that shrink from far outside, starts far beyond a boundary, the
    other rivals, a game for l1. The schedule never looks at the budget: a smaller one only cuts it
    short.

    Gradients at a sample mislead where the flip is not nearly as far as they promise. Networks
    trained for linf hide their l2 and l1 flips behind saturated units: such samples are chased by
    the steps of another norm (l1: `SPREAD`), which spread over more coordinates, and shortened in
    their own. Samples that flip early on the way are walked in small steps (`creep`). Samples whose
    gradient is zero, or that have no flip after the opening, are searched without gradients
    (`blind_search`).

    Args:
        hunt: the search.
        tick: told the share that is done.
        rounds: rounds at most, the opening included.
        seed: keys random starts, together with each sample.
        begin: round to go on with, for a hunt that has flips of its own; negative: the opening
            comes first.
        topk: rivals whose gradient is taken at the sample, those with the largest logits; K - 1
            makes linear classifiers exact.
    """
    hunt.anytime = True
    rows, rivals, steps = first_steps(hunt, topk)
    if not len(rows):
        return
    slack = torch.full_like(hunt.distance, SLACK)
    blind = (vector_norm(steps[:, 0], hunt.norm) == 0).nonzero()[:, 0]
    lead = Lead(hunt, rows, rivals, steps, slack, blind)
    if begin < 0:
        opening(hunt, lead, seed)
    for number in range(max(begin, 0), rounds - 1):
        if not len(hunt.able(rows, 1)):
            return
        tick(number / rounds)
        if len(lead.blind):
            blind_search(hunt, rows[lead.blind], 60, seed, 103 + number)
        if number == 2:
            wide_rivals(hunt, lead, seed)
        play(lead, *scheduled(hunt.norm, number), seed, number)


def scheduled(norm: float, number: int) -> tuple[str, int]:
    """The round of this number, by name, and how many of that name come before it."""
    plan = PLAN[norm]
    while len(plan) <= number:
        plan = plan + LATER[norm]
    return plan[number], plan[:number].count(plan[number])


def play(lead: Lead, name: str, turn: int, seed: int, number: int) -> None:
    """One round of the schedule.

    Args:
        lead: what is known of the samples.
        name: of the round.
        turn: how many rounds of this name were played before.
        seed: keys random starts, together with each sample.
        number: which round it is; keys them too.
    """
    hunt = lead.hunt
    rows = lead.rows
    if name == "squeeze":
        squeeze(hunt, rows, 40, lead.slack)
    elif name == "sparse":
        slack = torch.full_like(lead.slack, SLACK)
        squeeze(hunt, rows, 40, slack, length=1.0, sparse=True)
    elif name == "straight":
        squeeze(hunt, rows, 40, lead.slack, straight=1.0, length=1.0)
    elif name == "fresh":  # from the sample: to the strongest rival, to the second, ...
        slack = torch.full_like(lead.slack, SLACK)
        rivals = lead.rivals[:, turn % lead.rivals.shape[1]] if turn else None
        squeeze(hunt, rows, 40, slack, start=hunt.x[rows], rivals=rivals)
    elif name in ("stir", "half"):  # from near the sphere of the best flip, from half-way to it
        slack = torch.full_like(lead.slack, SLACK)
        between = (hunt.points[rows] + hunt.x[rows]) / 2
        start = between if name == "half" else scatter(hunt, rows, seed, number)
        squeeze(hunt, rows, 40, slack, start=start)
    elif name == "anneal":  # from near that sphere, then from the sample to the second rival, ...
        start = hunt.x[rows] if turn % 2 else scatter(hunt, rows, seed, number)
        rank = (turn + 1) // 2 % lead.rivals.shape[1]
        rivals = lead.rivals[:, rank] if turn % 2 else None
        settings = ANNEALS[hunt.norm]
        wide, length = settings[turn % len(settings)]
        anneal(hunt, rows, 40, start, wide=wide, length=length, rivals=rivals)
    elif name == "duel":
        duel(hunt, rows, 80, DUELS[turn % len(DUELS)])
        hunt.shorten(rows, 4)
    else:
        if name == "rivals":
            for rank in range(2, lead.rivals.shape[1]):
                chase(hunt, rows, lead.ahead(rank, 1.02), 10, lead.rivals[:, rank])
        elif name == "afar":
            from_afar(hunt, lead, turn)
        else:
            chase(hunt, rows, scatter(hunt, rows, seed, number), 15)
        polish(hunt, rows, 6)


def opening(hunt: Hunt, lead: Lead, seed: int) -> None:
    """The nearest rival, what the first result calls for, the second rival, a polish."""
    rows = lead.rows
    hunt.guess(rows, lead.ahead(0, 1.0))
    if len(lead.blind):
        far_starts(hunt, rows[lead.blind], seed)
        blind_search(hunt, rows[lead.blind], 40, seed, 102)
    honest = creep(hunt, lead)
    if hunt.norm == 1:
        open_sparse(hunt, lead, honest)
    else:
        open_dense(hunt, lead, honest)
    lost = torch.isinf(hunt.distance[rows])
    if lost.any():
        lost[lead.blind] = False
        fresh = lost.nonzero()[:, 0]
        far_starts(hunt, rows[fresh], seed)
        squeeze(hunt, rows[fresh], 10, lead.slack)
        blind_search(hunt, rows[fresh], 20, seed, 102)
        lead.blind = torch.cat([lead.blind, fresh])


def open_dense(hunt: Hunt, lead: Lead, honest: Tensor) -> None:
    """The opening for l2 and linf; honest: places `(k,)` of the samples whose nearest rival is
    chased.
    """
    rows = lead.rows
    rivals = lead.rivals
    some = rows[honest]
    chase(hunt, some, lead.ahead(0, 1.0)[honest], 6 if hunt.norm == 2 else 18, rivals[honest, 0])
    hunt.shorten(some, 3, 0.5 if hunt.norm == 2 else 0.85)
    wrongly = lead.misled()[honest]
    led = honest[wrongly.nonzero()[:, 0]]
    kept = honest[(~wrongly).nonzero()[:, 0]]
    if len(led):
        some = rows[led]
        chase(hunt, some, lead.ahead(0, 1.02)[led], 14, rivals[led, 0], aim=math.inf)
        hunt.shorten(some, 5)
        chase(hunt, some, hunt.points[some], 12)
        polish(hunt, some, 8)
    if hunt.norm == 2:  # the others go on from where they are: each has a flip
        some = rows[kept]
        chase(hunt, some, hunt.points[some], 12, rivals[kept, 0])
    if rivals.shape[1] > 1:
        chase(hunt, rows, lead.ahead(1, 1.02), 8, rivals[:, 1])
    polish(hunt, rows, 8)


def open_sparse(hunt: Hunt, lead: Lead, honest: Tensor) -> None:
    """The opening for l1: its steps move few coordinates and often lead to no flip. There the steps
    of other norms follow; then a squeeze brings back what is far beyond the boundary.
    """
    rows = lead.rows
    rivals = lead.rivals
    some = rows[honest]
    chase(hunt, some, lead.ahead(0, 1.0)[honest], 6, rivals[honest, 0])
    for aim, times in SPREAD:
        led = honest[torch.isinf(hunt.distance[some]).nonzero()[:, 0]]
        chase(hunt, rows[led], lead.ahead(0, 1.02)[led], times, rivals[led, 0], aim=aim)
    hunt.shorten(some, 4)
    squeeze(hunt, some, 20, lead.slack)
    if rivals.shape[1] > 1:
        chase(hunt, rows, lead.ahead(1, 1.02), 8, rivals[:, 1])


def creep(hunt: Hunt, lead: Lead) -> Tensor:
    """Another opening for samples that flip early on the way of their first step: for them
    gradients promise a boundary that is much too far, as in k-winners networks. The others are
    returned, as places `(k,)` among the rows.

    Small steps from the sample, as WDA++ makes them, see the gradient change on the way; then a
    squeeze. 1 F for every sample; for those that flip up to 15 F + 14 B, 3 F and 16 F + 16 B.
    """
    rows = lead.rows
    places = hunt.able(rows, 1)
    if not len(places):
        return places
    _, flipped = hunt.logits(lead.ahead(0, EARLY[hunt.norm])[places], rows[places])
    early = torch.zeros_like(rows, dtype=torch.bool)
    early[places] = flipped
    chosen = early.nonzero()[:, 0]
    if len(chosen):
        length = vector_norm(lead.steps[chosen, 0], hunt.norm)
        march(hunt, rows[chosen], length / 32, 14)
        hunt.shorten(rows[chosen], 3, 0.8)
        squeeze(hunt, rows[chosen], 16, lead.slack)
    return (~early).nonzero()[:, 0]


def march(hunt: Hunt, rows: Tensor, size: Tensor, times: int, growth: float = 1.2) -> None:
    """Steepest steps from the sample until it flips, of sizes that grow by a factor from `size`
    `(m,)`. 1 F + 1 B each, and 1 F.
    """
    current = hunt.x[rows]
    for _ in range(times):
        rows, current, size = take(hunt.able(rows, 2), rows, current, size)
        if not rows.shape[0]:
            return
        tape, flip = hunt.tape(current, rows)
        w = climb(hunt, tape, rows, None)
        rows, current, size, w = take((~flip).nonzero()[:, 0], rows, current, size, w)
        box = hunt.box(rows)
        current = clip(current + steepest(current, w, hunt.norm, size, box), box)
        size = growth * size
    rows, current = take(hunt.able(rows, 1), rows, current)
    if len(rows):
        hunt.logits(current, rows)


def from_afar(hunt: Hunt, lead: Lead, turn: int) -> None:
    """Chase from a point far beyond a rival's boundary."""
    # Every second time the steps of linf: they only help to get going.
    wrongly = lead.misled() & (turn % 2 == 1)
    led = wrongly.nonzero()[:, 0]
    kept = (~wrongly).nonzero()[:, 0]
    far = lead.ahead(turn % lead.rivals.shape[1], 2.5)
    chase(hunt, lead.rows[kept], far[kept], 20)
    if len(led):
        chase(hunt, lead.rows[led], far[led], 20, aim=math.inf)
        hunt.shorten(lead.rows[led], 4)


def wide_rivals(hunt: Hunt, lead: Lead, seed: int) -> None:
    """With many classes: the exact first step of `WIDE` more rivals, of which the `CHASED` nearest
    are chased. `LOOKS` + 1 F and `WIDE` B, and 20 passes for each that is chased.

    Half of them are those with the next largest logits, the others those that are nearest by an
    estimate of their gradients (`steepness`).
    """
    count = min(WIDE, hunt.clean.shape[1] - 1 - lead.rivals.shape[1])
    places = hunt.able(lead.rows, count + LOOKS + 1) if count > 0 else lead.rows[:0]
    if not len(places):
        return
    rows = lead.rows[places]
    y = hunt.y[rows, None]
    z = hunt.clean[rows]
    gap = z.gather(1, y) - z
    taken = torch.cat([lead.rivals[places], y], 1)
    by_logit = largest((-gap).scatter(1, taken, -math.inf), (count + 1) // 2, band=LOGITS)
    taken = torch.cat([taken, by_logit], 1)
    near = steepness(hunt, rows, seed) / gap.clamp(min=torch.finfo(gap.dtype).tiny)
    by_slope = largest(near.scatter(1, taken, -math.inf), count // 2, band=LOGITS)
    rivals = torch.cat([by_logit, by_slope], 1)
    chased, starts = shortest(hunt, rows, rivals)
    for k in range(chased.shape[1]):
        chase(hunt, rows, clip(starts[:, k], hunt.box(rows)), 10, chased[:, k])


def first_steps(hunt: Hunt, topk: int = RIVALS) -> tuple[Tensor, Tensor, Tensor]:
    """Rivals by the length of the exact step to their linearised boundary, nearest first, and those
    steps.

    Returns rows `(m,)`, rivals `(m, J)`, steps `(m, J, *shape)`. One backward pass a rival, on the
    clean pass's graph.
    """
    count = min(topk, hunt.clean.shape[1] - 1)
    rows = hunt.rows
    rows = rows[hunt.able(rows, count)]
    z = hunt.clean[rows]
    y = hunt.y[rows, None]
    x = hunt.x[rows]
    rivals = largest(z.scatter(1, y, -math.inf), count, band=LOGITS)
    if not len(rows):
        hunt.ride(count, count)
        return rows, rivals, x[:, None]
    need = hunt.network.need(z, rows, 4)  # a flip must be wrong by the tolerance
    gaps = z.gather(1, y) - z.gather(1, rivals)
    room = walls(x[None], hunt.box(rows))
    found = []
    lengths = []
    # One rival at a time: what belongs to all of them does not fit into the cache.
    for j, gap in enumerate(gaps.unbind(1)):
        w = hunt.start.gradients(y[:, 0], rivals[:, j : j + 1], rows, again=j < count - 1)[:, 0]
        step = plane_steps(room, w, (gap + need)[None], hunt.norm)[0]
        unreached = inner(w, step) < gap * (1 - 1e-4)  # the box ends before the plane: comes last
        lengths.append(torch.where(unreached, math.inf, vector_norm(step, hunt.norm)))
        found.append(step)
    order = in_order(torch.stack(lengths, 1), band=LOGITS)
    every = torch.arange(len(rows), device=rows.device)[:, None]
    steps = torch.cat(found).index_select(0, (order * len(rows) + every).flatten())
    return rows, rivals.gather(1, order), steps.reshape(-1, count, *x.shape[1:])


def chase(
    hunt: Hunt,
    rows: Tensor,
    start: Tensor,
    times: int,
    rivals: Tensor | None = None,
    beta: float = 0.85,
    eta: float = 1.05,
    aim: float | None = None,
) -> None:
    """`times` iterations from `start`, on one rival each `(m,)`, or on the strongest at the
    iterate. 1 F + 1 B each.
    """
    aim = hunt.norm if aim is None else aim
    current = start
    bold = torch.full((len(rows),), 0.3, dtype=start.dtype, device=start.device)
    push = torch.full_like(bold, eta - 1)  # by which share a step goes beyond its plane
    for k in range(times):
        keep = hunt.able(rows, 2)
        rivals = None if rivals is None else take(keep, rivals)[0]
        rows, current, bold, push = take(keep, rows, current, bold, push)
        if not rows.shape[0]:
            return
        part = hunt.part(rows)
        away = current - part.x
        tape, flip = hunt.tape(current, rows, away)
        z = tape.logits
        rival = (tape.strongest(part.y) if rivals is None else rivals)[:, None]
        w = tape.gradients(part.y, rival)[:, 0]
        f = (z.gather(1, rival) - z.gather(1, part.y[:, None]))[:, 0]
        hit = flip.to(away)
        if k:
            bold = (bold * (0.8 + 0.35 * hit)).clamp_(0.1, 0.5)
            push = (push * (1.5 - 0.7 * hit)).clamp_(max=1.0)
        # From x + beta (current - x) where the iterate is a flip, else from the iterate.
        back = 1 - (1 - beta) * hit
        ahead = inner(w, away)
        gap = ahead - f
        gaps = torch.stack([torch.addcmul(gap, back, ahead, value=-1), gap])
        d1, d2 = plane_steps(part.rooms(away, back), w, gaps, aim)
        far = bold * (1 + push)
        near = torch.addcmul(part.x, away, column((1 - bold) * back, away))
        near.addcmul_(d1, column(1 + push - far, away)).addcmul_(d2, column(far, away))
        current = clip_(near, part.domain)


def polish(hunt: Hunt, rows: Tensor, times: int) -> None:
    """Shorten the best flip, chase on from it with small pushes, shorten again."""
    rows = rows[torch.isfinite(hunt.distance[rows]).nonzero()[:, 0]]
    hunt.shorten(rows, 3, 0.9)
    chase(hunt, rows, hunt.points[rows], times, None, 0.95, 1.02)
    hunt.shorten(rows, 4, 0.96)
