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
from wassail.certificates.search.subproblems import Forest, Leaves, Subproblems
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


def branched(
    sweep: Sweep,
    lower: Tensor,
    rows: list[int],
    y: Tensor,
    most: list[int],
    pool: Pool | None = None,
    forest: Forest | None = None,
    names: list[int] | None = None,
    width: int = WIDTH,
) -> list[Decided]:
    """What branching says of some samples of a sweep.

    The open subproblems of all samples are bounded in one batch, the `width` worst of each: enough
    work for a GPU. Every sample has its own tree and its own budget, so no verdict depends on the
    others. On the CPU the samples of larger networks come one after the other: there a mixed batch
    would be slower, as it has to copy lines for each of its subproblems.

    Args:
        sweep: of the samples' balls.
        lower: bounds on their margins, `(N, K)` on the CPU: rivals above 0 are excluded already.
        rows: places of the samples in the sweep.
        y: labels of all samples of the sweep, `(N,)` on the CPU.
        most: subproblems that may be bounded for each sample; the batch under way is finished.
        pool: shares the subproblems of one sample; the samples come one after the other then, and
            begin anew.
        forest: what earlier proofs of the samples left; what this one leaves is kept there.
        names: of the samples in the forest.
        width: subproblems of a sample that are split at once.
    """
    apart = pool is not None or (sweep.graph.device == HOST and not mixes(sweep.graph))
    every = list(range(len(rows)))
    radius = sweep.balls.radius.tolist()
    found: list[Decided] = []
    for group in ([k] for k in every) if apart else [every] if rows else ():
        own = [rows[k] for k in group]
        rivals = [_rivals(lower[k], int(y[k])) for k in own]
        left: list[Leaves | None] = [None] * len(group)
        if forest is not None and names is not None and pool is None:
            left = [forest.within(names[k], radius[rows[k]], most[k]) for k in group]
        tree = Tree(sweep, own, [int(y[k]) for k in own])
        proof = _Proof(tree, torch.tensor([most[k] for k in group]), width)
        with suppress(clock.Late):
            proof.enter(rivals, left)
            proof.proceed(pool)
        decided = proof.verdicts(keeps=pool is None)
        found += decided
        for k, one in zip(group, decided):
            if forest is not None and names is not None:
                forest.keep(names[k], radius[rows[k]], one.leaves)
    return found


def _rivals(lower: Tensor, y: int) -> list[int]:
    """The classes that bounds `(K,)` on the margins of a sample leave open."""
    return [j for j, bound in enumerate(lower.tolist()) if j != y and not bound > 0]


def mixes(graph: Graph) -> bool:
    """Whether a network is so small that subproblems of many samples in one batch pay on a CPU."""
    return graph.operations <= MIXED


@dataclass(frozen=True, eq=False)
class _Found:
    """For each sample: whether a subproblem cannot be proved, and how many were bounded."""

    failed: Tensor
    count: Tensor


class _Proof(SharedFrontier[Subproblems, _Found]):
    """The subproblems of some samples that are not proved.

    failed `(S,)`: samples with a subproblem that cannot be proved, or that took too many; count
    `(S,)`: subproblems bounded, one with patience by its steps; most `(S,)`: how many may be;
    width: of each sample, how many are split at once; first `(S,)`: the worst bound before the
    first split; entered: whether all subproblems that it begins with were bounded.
    """

    def __init__(self, tree: Tree, most: Tensor, width: int = WIDTH) -> None:
        self.tree = tree
        self.most = most
        self.width = width
        self.count = torch.zeros_like(most)
        self.failed = ~torch.tensor(tree.open)  # nothing to split: the bound is what it is
        self.entered = False
        self.open: Table[Subproblems] = Table(tree.roots([[] for _ in tree.open]), order=_in_order)
        self.out = []
        self.spent: list[Subproblems] = []  # open when the subproblems of a sample ran out
        self.first = self.worst([])

    @property
    def over(self) -> bool:
        """Whether the time is up, or no sample can be proved any more."""
        return clock.late() or bool(self.failed.all())

    def enter(self, rivals: list[list[int]], known: list[Leaves | None]) -> None:
        """Bound what it begins with: the rivals of each sample, or what was left of it, known, of a
        ball at least as large.
        """
        tree = self.tree
        open_ = [some if tree.open[k] else [] for k, some in enumerate(rivals)]
        tree.tilt(open_)
        new = [some if left is None else [] for some, left in zip(open_, known)]
        self._enter(tree.roots(new), ROOT_STEPS)
        self.first = self.worst([self.open.everything()])
        old = {k: left for k, left in enumerate(known) if left is not None and tree.open[k]}
        self._enter(tree.regrown(old, rivals), ASCENT_STEPS)
        self.entered = True

    def _enter(self, first: Subproblems, steps: int) -> None:
        """Some of them, bounded."""
        if not len(first):
            return
        with self.taken(first):
            self._add(self.tree.bounded(first, steps))
        self.sift()

    def verdicts(self, keeps: bool) -> list[Decided]:
        """What is known of each sample; keeps: whether what is left of it is asked for."""
        if not self.entered:  # some subproblems were never opened: none is proved by having none
            self.failed = torch.ones_like(self.failed)
        self.failed[self.open.everything().owner] = True
        left = self.leaves() if keeps else {}
        last = self.worst([self.open.everything(), *self.spent])
        proved, count = (~self.failed).tolist(), self.count.tolist()
        each = zip(proved, count, self.first.tolist(), last.tolist())
        return [Decided(*verdict, left.get(k)) for k, verdict in enumerate(each)]

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
