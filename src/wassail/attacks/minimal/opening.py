"""How a search begins: the nearest rival, what the first result calls for, the second rival.

Gradients at a sample mislead where the flip is not nearly as far as they promise. Networks trained
for linf hide their l2 and l1 flips behind saturated units: such samples are searched by the steps
of another norm, which spread over more coordinates, and shortened in their own. Samples that flip
early on the way of their first step are walked in small steps. Samples without a flip after that
are searched without gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.minimal.boundary_search import boundary_search, refine
from wassail.attacks.minimal.first_steps import FirstSteps
from wassail.attacks.minimal.gradient_free import far_starts, gradient_free
from wassail.attacks.minimal.polish import climb, polish
from wassail.attacks.minimal.tracker import Tracker
from wassail.device import take
from wassail.geometry import clip, steepest, vector_norm

# Whose steps to follow, and how often, where those of l1 lead to no flip.
OTHER_NORMS = ((2.0, 4), (math.inf, 5))
# A sample that flips after this share of its first step is walked in small steps.
EARLY = {1.0: 0.4, 2.0: 0.4, math.inf: 0.7}

# At l1 a flip is far beyond the boundary at so many lengths of the first step; by which share the
# ball of the first polish is smaller than such flips'.
FAR = 1.5
FAR_SLACK = 0.2


def opening(first: FirstSteps, seed: int) -> None:
    """About 100 passes for ten classes; afterwards `first.flat` has the samples without a flip,
    too.
    """
    tracker, rows = first.tracker, first.rows
    tracker.guess(rows, first.toward(0, 1.0))
    if len(first.flat):
        far_starts(tracker, rows[first.flat], seed)
        gradient_free(tracker, rows[first.flat], 40, seed, 102)
    others = small_steps(first)
    if tracker.norm == 1:
        _open_sparse(first, others)
    else:
        _open_dense(first, others)
    lost = torch.isinf(tracker.distance[rows])
    if lost.any():
        lost[first.flat] = False
        new = lost.nonzero()[:, 0]
        far_starts(tracker, rows[new], seed)
        polish(tracker, rows[new], 10, first.slack)
        gradient_free(tracker, rows[new], 20, seed, 102)
        first.flat = torch.cat([first.flat, new])


def _open_dense(first: FirstSteps, chosen: Tensor) -> None:
    """The opening for l2 and linf; chosen: places `(k,)` of the samples whose nearest rival is
    searched.
    """
    tracker, rows, rivals = first.tracker, first.rows, first.rivals
    some = rows[chosen]
    times = 6 if tracker.norm == 2 else 18
    boundary_search(tracker, some, first.toward(0, 1.0)[chosen], times, rivals[chosen, 0])
    tracker.shorten(some, 3, 0.5 if tracker.norm == 2 else 0.85)
    wrongly = first.misled()[chosen]
    led = chosen[wrongly.nonzero()[:, 0]]
    kept = chosen[(~wrongly).nonzero()[:, 0]]
    if len(led):
        some = rows[led]
        ahead = first.toward(0, 1.02)[led]
        boundary_search(tracker, some, ahead, 14, rivals[led, 0], aim=math.inf)
        tracker.shorten(some, 5)
        boundary_search(tracker, some, tracker.points[some], 12)
        refine(tracker, some, 8)
    if tracker.norm == 2:  # the others go on from where they are: each has a flip
        some = rows[kept]
        boundary_search(tracker, some, tracker.points[some], 12, rivals[kept, 0])
    if rivals.shape[1] > 1:
        boundary_search(tracker, rows, first.toward(1, 1.02), 8, rivals[:, 1])
    refine(tracker, rows, 8)


def _open_sparse(first: FirstSteps, chosen: Tensor) -> None:
    """The opening for l1: its steps move few coordinates and often lead to no flip. There the steps
    of other norms follow; then a polish brings back what is far beyond the boundary. Such samples
    gain more by a longer polish than by a second rival.
    """
    tracker, rows, rivals = first.tracker, first.rows, first.rivals
    some = rows[chosen]
    boundary_search(tracker, some, first.toward(0, 1.0)[chosen], 6, rivals[chosen, 0])
    far = torch.zeros_like(rows, dtype=torch.bool)
    for aim, times in OTHER_NORMS:
        led = chosen[torch.isinf(tracker.distance[some]).nonzero()[:, 0]]
        far[led] = True
        ahead = first.toward(0, 1.02)[led]
        boundary_search(tracker, rows[led], ahead, times, rivals[led, 0], aim=aim)
    tracker.shorten(some, 4)
    first.slack.index_fill_(0, some, FAR_SLACK)
    polish(tracker, some, 20, first.slack)
    far |= tracker.distance[rows] > FAR * vector_norm(first.steps[:, 0], 1.0)
    polish(tracker, rows[far], 8, first.slack)
    if rivals.shape[1] > 1:
        near = (~far).nonzero()[:, 0]
        boundary_search(tracker, rows[near], first.toward(1, 1.02)[near], 8, rivals[near, 1])


def small_steps(first: FirstSteps) -> Tensor:
    """Another opening for samples that flip early on the way of their first step: for them
    gradients promise a boundary that is much too far, as in k-winners networks. The others are
    returned, as places `(k,)` among the rows.

    Small steps from the sample, as WDA++ makes them, see the gradient change on the way; then a
    polish. 1 F for every sample; for those that flip up to 15 F + 14 B, 3 F and 16 F + 16 B.
    """
    tracker, rows = first.tracker, first.rows
    places = tracker.affordable(rows, 1)
    if not len(places):
        return places
    _, flipped = tracker.logits(first.toward(0, EARLY[tracker.norm])[places], rows[places])
    early = torch.zeros_like(rows, dtype=torch.bool)
    early[places] = flipped
    chosen = early.nonzero()[:, 0]
    if len(chosen):
        length = vector_norm(first.steps[chosen, 0], tracker.norm)
        walk_to_flip(tracker, rows[chosen], length / 32, 14)
        tracker.shorten(rows[chosen], 3, 0.8)
        polish(tracker, rows[chosen], 16, first.slack)
    return (~early).nonzero()[:, 0]


def walk_to_flip(
    tracker: Tracker, rows: Tensor, size: Tensor, times: int, growth: float = 1.2
) -> None:
    """Steepest steps from the sample until it flips, of sizes that grow by a factor from `size`
    `(m,)`. 1 F + 1 B each, and 1 F.
    """
    current = tracker.x[rows]
    for _ in range(times):
        rows, current, size = take(tracker.affordable(rows, 2), rows, current, size)
        if not rows.shape[0]:
            return
        tape, flip = tracker.tape(current, rows)
        w = climb(tracker, tape, rows)
        rows, current, size, w = take((~flip).nonzero()[:, 0], rows, current, size, w)
        box = tracker.box(rows)
        current = clip(current + steepest(current, w, tracker.norm, size, box), box)
        size = growth * size
    rows, current = take(tracker.affordable(rows, 1), rows, current)
    if len(rows):
        tracker.logits(current, rows)
