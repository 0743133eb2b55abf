"""Branch and bound on unstable neurons: a proof that nothing flips in the balls of some samples.

A subproblem fixes the signs of some ReLUs and the intervals of some smooth neurons (`tree`). The
subproblems of a sample cover its ball: if all are proved, the sample is.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.search.frontier import Part, SharedFrontier, Table
from wassail.certificates.search.subproblems import Leaves, Subproblems
from wassail.certificates.search.tree import Tree
from wassail.certificates.search.workers import Pool

ROOT_STEPS = 30  # steps of the ascent at the root of a rival
ASCENT_STEPS = 4  # at every other subproblem, which starts where its parent stopped
# At a subproblem with a quarter of its sample's unstable neurons fixed: relaxations add little
# there, and the multipliers have to be good.
DEEP_STEPS = 12
LAST_STEPS = 200  # at a subproblem with nothing left to split
WIDTH = 32  # subproblems of a sample split at once
MIXED = 10**6  # operations of a network whose samples share a batch on the CPU


@dataclass(frozen=True, eq=False)
class Decided:
    """What branching says of one sample.

    proved: whether it is; count: of subproblems bounded; first: the worst bound before the first
    split; last: that of what is open now, minus infinity where one of the two is not known; leaves:
    what is left to prove.
    """

    proved: bool
    count: int
    first: float
    last: float
    leaves: Leaves | None


def branch_margins(
    sweep: Sweep,
    sample: int,
    y: int,
    rivals: Tensor,
    most: int = 10**6,
    width: int = WIDTH,
) -> tuple[bool, int]:
    """Whether `theta_y - theta_j > 0` on the ball of one sample of a sweep for all rivals j, and
    how many subproblems it took.

    False when the time (`clock`) or the number of subproblems runs out first.

    Args:
        sweep: of the sample's ball.
        sample: its place in the sweep.
        y: its label.
        rivals: classes that are left to exclude, `(J,)`.
        most: subproblems that may be bounded; the batch under way is finished.
        width: subproblems that are split at once.
    """
    found = branch_shared(sweep, sample, y, rivals.tolist(), most, None, width)
    return found.proved, found.count


def branch_shared(
    sweep: Sweep,
    sample: int,
    y: int,
    rivals: list[int],
    most: int,
    pool: Pool | None,
    width: int = WIDTH,
) -> Decided:
    """The same, with all that branching says of the sample; pool: shares the open subproblems."""
    return _branched(sweep, [sample], [y], [rivals], [most], pool=pool, width=width)[0]


def branch_leaves(
    sweep: Sweep,
    samples: list[int],
    y: list[int],
    rivals: list[list[int]],
    most: list[int],
    known: list[Leaves | None],
) -> list[Decided]:
    """Whether each of several samples of a sweep is proved, how many subproblems it took, and what
    is left to prove where they ran out.

    The open subproblems of all samples are bounded in one batch, the `WIDTH` worst of each: enough
    work for a GPU. Every sample has its own tree and its own budget, so no verdict depends on the
    others. On the CPU the samples of larger networks come one after the other: there a mixed batch
    would be slower, as it has to copy lines for each of its subproblems.

    Args:
        sweep: of the samples' balls.
        samples: their places in the sweep.
        y: their labels.
        rivals: of each, the classes that are left to exclude.
        most: subproblems bounded for each sample; the batch under way is finished.
        known: of each, what was left of a ball at least as large, or None.
    """
    if not samples:
        return []
    if sweep.graph.device == HOST and not mixes(sweep.graph):
        each = zip(samples, y, rivals, most, known)
        return [
            _branched(sweep, [k], [label], [some], [count], [left])[0]
            for k, label, some, count, left in each
        ]
    return _branched(sweep, samples, y, rivals, most, known)


def mixes(graph: Graph) -> bool:
    """Whether a network is so small that subproblems of many samples in one batch pay on a CPU."""
    return graph.operations <= MIXED


def _branched(
    sweep: Sweep,
    samples: list[int],
    y: list[int],
    rivals: list[list[int]],
    most: list[int],
    known: list[Leaves | None] | None = None,
    pool: Pool | None = None,
    width: int = WIDTH,
) -> list[Decided]:
    """One tree for all samples; pool: for a single one; width: how many of each are split."""
    tree = Tree(sweep, samples, y)
    proof = _Proof(tree, torch.tensor(most), width)
    proof.failed = ~torch.tensor(tree.open)  # nothing to split: the bound is what it is
    known = known or [None] * len(samples)
    new = [some if tree.open[k] and known[k] is None else [] for k, some in enumerate(rivals)]
    old = {k: left for k, left in enumerate(known) if left is not None and tree.open[k]}
    begun = False
    first = proof.worst([])
    with suppress(clock.Late):
        tree.tilt([some if tree.open[k] else [] for k, some in enumerate(rivals)])
        proof.begun(tree.roots(new), ROOT_STEPS)
        first = proof.worst([proof.open.everything()])
        proof.begun(tree.regrown(old, rivals), ASCENT_STEPS)
        begun = True
        proof.proceed(pool)
    if not begun:  # some subproblems were never opened: no sample is proved by having none
        proof.failed = torch.ones_like(proof.failed)
    proof.failed[proof.open.everything().owner] = True
    left = {} if pool is not None else proof.leaves()
    last = proof.worst([proof.open.everything(), *proof.spent])
    verdicts = zip((~proof.failed).tolist(), proof.count.tolist(), first.tolist(), last.tolist())
    return [Decided(*verdict, left.get(k)) for k, verdict in enumerate(verdicts)]


@dataclass(frozen=True, eq=False)
class _Found:
    """For each sample: whether a subproblem cannot be proved, and how many were bounded."""

    failed: Tensor
    count: Tensor


class _Proof(SharedFrontier[Subproblems, _Found]):
    """The subproblems of some samples that are not proved.

    failed `(S,)`: samples with a subproblem that cannot be proved, or that took too many; count
    `(S,)`: subproblems bounded, one with patience by its steps; most `(S,)`: how many may be;
    width: of each sample, how many are split at once.
    """

    def __init__(self, tree: Tree, most: Tensor, width: int = WIDTH) -> None:
        self.tree = tree
        self.most = most
        self.width = width
        self.count = torch.zeros_like(most)
        self.failed = torch.zeros_like(most, dtype=torch.bool)
        self.open: Table[Subproblems] = Table(tree.roots([[] for _ in tree.open]), order=_in_order)
        self.out = []
        self.spent: list[
            Subproblems
        ] = []  # what was open of samples when their subproblems ran out

    @property
    def over(self) -> bool:
        """Whether the time is up, or no sample can be proved any more."""
        return clock.late() or bool(self.failed.all())

    def begun(self, first: Subproblems, steps: int) -> None:
        """The subproblems that it begins with, bounded."""
        if not len(first):
            return
        with self.taken(first):
            self._add(self.tree.bounded(first, steps))
        self.sift()

    def leaves(self) -> dict[int, Leaves]:
        """What is left of the samples whose subproblems ran out, by their places in the tree."""
        found = {}
        for subproblems in self.spent:
            for k in sorted(set(subproblems.owner.tolist())):
                found[k] = self.tree.leaves(k, subproblems.where(subproblems.owner == k))
        return found

    def worst(self, some: list[Subproblems]) -> Tensor:
        """The least bound of some subproblems of each sample, `(S,)`; minus infinity where it has
        none.
        """
        least = torch.full(self.count.shape, math.inf, dtype=torch.float64)
        for part in some:
            least = least.scatter_reduce(0, part.owner, part.bound.double(), "amin")
        return torch.where(least < math.inf, least, -math.inf)

    def sift(self) -> None:
        """A sample with too many subproblems has failed, and one that has failed needs no more."""
        subproblems = self.open.everything()
        over = self.count > self.most
        fresh = (over & ~self.failed)[subproblems.owner]
        if bool(fresh.any()):
            self.spent.append(subproblems.where(fresh))
        self.failed[subproblems.owner] |= over[subproblems.owner]
        for part in self.out:
            self.failed[part.nodes.owner] |= over[part.nodes.owner]
        self.open.rows = subproblems.where(~self.failed[subproblems.owner])

    def step(self) -> None:
        """The worst subproblems of each sample replaced by their unproved children."""
        with self.taken(self._worst()) as worst:
            ended = worst.pick[:, 0] < 0  # no relaxation is left to remove
            if bool(ended.any()):  # only the multipliers can be wrong: once more, with patience
                last = worst.where(ended)
                self._bill(last, LAST_STEPS // ASCENT_STEPS)
                self.failed[self.tree.bounded(last, LAST_STEPS).unproved().owner] = True
            parents = worst.where(~ended & ~self.failed[worst.owner])
            if len(parents):
                children = self.tree.split(parents)
                deep = self.tree.deep(children)
                for some, steps in (
                    (children.where(~deep), ASCENT_STEPS),
                    (children.where(deep), DEEP_STEPS),
                ):
                    if len(some):
                        self._add(self.tree.bounded(some, steps), steps // ASCENT_STEPS)

    def _worst(self) -> Subproblems:
        """Take out the `width` subproblems of each sample with the least bounds."""
        subproblems = self.open.everything()
        order = self.open.order()
        order = order[subproblems.owner[order].argsort(stable=True)]
        owner = subproblems.owner[order]
        first = torch.searchsorted(owner, owner)  # where the sample's own begin
        near = torch.arange(len(order)) - first < self.width
        self.open.rows = subproblems.take(order[~near])
        return subproblems.take(order[near])

    def _add(self, subproblems: Subproblems, price: int = 1) -> None:
        """Count subproblems that were bounded; those that are not proved are open."""
        self._bill(subproblems, price)
        self.open.add(subproblems.unproved())

    def _bill(self, subproblems: Subproblems, price: int) -> None:
        self.count = self.count + price * torch.bincount(
            subproblems.owner, minlength=len(self.count)
        )

    def known(self, workers: int) -> _Found:
        """Nothing: a worker counts from 0, and has no limit of its own."""
        return _Found(torch.zeros_like(self.failed), torch.zeros_like(self.count))

    def begin(self, found: _Found) -> None:
        """Begin with nothing."""
        self.failed = found.failed.clone()
        self.count = found.count
        self.most = torch.full_like(self.most, torch.iinfo(self.most.dtype).max)

    def since(self, found: _Found) -> _Found:
        """What was found here."""
        return _Found(self.failed, self.count)

    def learn(self, found: _Found) -> None:
        """A subproblem that cannot be proved there cannot be proved here."""
        self.failed |= found.failed
        self.count = self.count + found.count

    def stand(self, part: Part[Subproblems, _Found]) -> None:
        """Nothing is proved of it."""
        self.failed[part.nodes.owner] = True


def _in_order(bound: Tensor) -> Tensor:
    """The places of bounds from the least on; those that are equal in float32 keep their order,
    whatever else is there.
    """
    return bound.float().argsort(stable=True)
