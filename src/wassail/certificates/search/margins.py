"""Branch and bound on undecided neurons: a proof that nothing flips in the balls of some samples.

A domain fixes the signs of some ReLUs and the intervals of some smooth neurons (`tree`). The
domains of a sample cover its ball: if all are proved, the sample is.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bounds.crown import Sweep
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph
from wassail.certificates.search.domains import Domains
from wassail.certificates.search.frontier import Part, SharedFrontier
from wassail.certificates.search.leaves import Leaves
from wassail.certificates.search.opened import Table
from wassail.certificates.search.tree import Tree
from wassail.certificates.search.workers import Pool

ROOT = 30  # steps of the ascent at the root of a rival
STEPS = 4  # at every other domain, which starts where its parent stopped
# At a domain with a quarter of its sample's undecided neurons fixed: relaxations add little there,
# and the multipliers have to be good.
THOROUGH = 12
LAST = 200  # at a domain with nothing left to split
WIDTH = 32  # domains of a sample split at once
MIXED = 10**6  # operations of a network whose samples share a batch on the CPU


def branch_margins(
    sweep: Sweep,
    sample: int,
    y: int,
    rivals: Tensor,
    most: int = 10**6,
    pool: Pool | None = None,
    width: int = WIDTH,
) -> tuple[bool, int]:
    """Whether `theta_y - theta_j > 0` on the ball of one sample of a sweep for all rivals j, and
    how many domains it took.

    False when the time (`clock`) or the number of domains runs out first. sweep: with `bends` kept.
    most: domains that may be bounded, the batch under way is finished. pool: shares the open
    domains. width: domains that are split at once.
    """
    rows = ([sample], [y], [rivals.tolist()], [most])
    proved, count, _ = _branched(sweep, *rows, pool=pool, width=width)[0]
    return proved, count


def branch_samples(
    sweep: Sweep, samples: list[int], y: list[int], rivals: list[list[int]], most: list[int]
) -> list[tuple[bool, int]]:
    """The same for several samples of a sweep: whether each is proved, and how many domains it
    took (see `branch_leaves`).
    """
    known: list[Leaves | None] = [None] * len(samples)
    return [found[:2] for found in branch_leaves(sweep, samples, y, rivals, most, known)]


def branch_leaves(
    sweep: Sweep,
    samples: list[int],
    y: list[int],
    rivals: list[list[int]],
    most: list[int],
    known: list[Leaves | None],
) -> list[tuple[bool, int, Leaves | None]]:
    """Whether each of several samples of a sweep is proved, how many domains it took, and what
    is left to prove where they ran out.

    The open domains of all samples are bounded in one batch, the `WIDTH` worst of each: enough work
    for a GPU. Every sample has its own tree and its own budget, so no verdict depends on the
    others. On the CPU the samples of larger networks come one after the other: there a mixed batch
    would be slower, as it has to copy lines for each of its domains.

    Args:
        sweep: of the samples' balls.
        samples: their places in the sweep.
        y: their labels.
        rivals: of each, the classes that are left to exclude.
        most: domains bounded for each sample; the batch under way is finished.
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
    """Whether a network is so small that domains of many samples in one batch pay on a CPU."""
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
) -> list[tuple[bool, int, Leaves | None]]:
    """One tree for all samples; pool: for a single one; width: domains of each split at once."""
    tree = Tree(sweep, samples, y)
    proof = _Proof(tree, torch.tensor(most), width)
    proof.failed = ~torch.tensor(tree.open)  # nothing to split: the bound is what it is
    known = known or [None] * len(samples)
    new = [some if tree.open[k] and known[k] is None else [] for k, some in enumerate(rivals)]
    old = {k: left for k, left in enumerate(known) if left is not None and tree.open[k]}
    begun = False
    with suppress(clock.Late):
        tree.tilt([some if tree.open[k] else [] for k, some in enumerate(rivals)])
        proof.begun(tree.roots(new), ROOT)
        proof.begun(tree.regrown(old, rivals), STEPS)
        begun = True
        proof.proceed(pool)
    if not begun:  # some domains were never opened: no sample is proved by having none
        proof.failed = torch.ones_like(proof.failed)
    proof.failed[proof.open.everything().owner] = True
    left = {} if pool is not None else proof.leaves()
    verdicts = zip((~proof.failed).tolist(), proof.count.tolist())
    return [(good, count, left.get(k)) for k, (good, count) in enumerate(verdicts)]


@dataclass(frozen=True, eq=False)
class _Found:
    """For each sample: whether one of its domains cannot be proved, and how many were bounded."""

    failed: Tensor
    count: Tensor


class _Proof(SharedFrontier[Domains, _Found]):
    """The domains of some samples that are not proved.

    failed `(S,)`: samples with a domain that cannot be proved, or that took too many; count `(S,)`:
    domains bounded, one with patience by its steps; most `(S,)`: how many may be; width: of each
    sample, how many are split at once.
    """

    def __init__(self, tree: Tree, most: Tensor, width: int = WIDTH) -> None:
        self.tree = tree
        self.most = most
        self.width = width
        self.count = torch.zeros_like(most)
        self.failed = torch.zeros_like(most, dtype=torch.bool)
        self.open: Table[Domains] = Table(tree.roots([[] for _ in tree.open]), order=_in_order)
        self.out = []
        self.spent: list[Domains] = []  # what was open of samples when their domains ran out

    @property
    def over(self) -> bool:
        """Whether the time is up, or no sample can be proved any more."""
        return clock.late() or bool(self.failed.all())

    def begun(self, first: Domains, steps: int) -> None:
        """The domains that it begins with, bounded."""
        if not len(first):
            return
        with self.taken(first):
            self._add(self.tree.bounded(first, steps))
        self.sift()

    def leaves(self) -> dict[int, Leaves]:
        """What is left of the samples whose domains ran out, by their places in the tree."""
        found = {}
        for domains in self.spent:
            for k in sorted(set(domains.owner.tolist())):
                found[k] = self.tree.leaves(k, domains.where(domains.owner == k))
        return found

    def sift(self) -> None:
        """A sample with too many domains has failed, and one that has failed needs no more."""
        domains = self.open.everything()
        over = self.count > self.most
        fresh = (over & ~self.failed)[domains.owner]
        if bool(fresh.any()):
            self.spent.append(domains.where(fresh))
        self.failed[domains.owner] |= over[domains.owner]
        for part in self.out:
            self.failed[part.nodes.owner] |= over[part.nodes.owner]
        self.open.rows = domains.where(~self.failed[domains.owner])

    def step(self) -> None:
        """The worst domains of each sample replaced by their unproved children."""
        with self.taken(self._worst()) as worst:
            ended = worst.pick[:, 0] < 0  # no relaxation is left to remove
            if bool(ended.any()):  # only the multipliers can be wrong: once more, with patience
                last = worst.where(ended)
                self._bill(last, LAST // STEPS)
                self.failed[self.tree.bounded(last, LAST).unproved().owner] = True
            parents = worst.where(~ended & ~self.failed[worst.owner])
            if len(parents):
                children = self.tree.split(parents)
                deep = self.tree.deep(children)
                for some, steps in (
                    (children.where(~deep), STEPS),
                    (children.where(deep), THOROUGH),
                ):
                    if len(some):
                        self._add(self.tree.bounded(some, steps), steps // STEPS)

    def _worst(self) -> Domains:
        """Take out the `width` domains of each sample with the least bounds."""
        domains = self.open.everything()
        order = self.open.order()
        order = order[domains.owner[order].argsort(stable=True)]
        owner = domains.owner[order]
        first = torch.searchsorted(owner, owner)  # where the sample's own begin
        near = torch.arange(len(order)) - first < self.width
        self.open.rows = domains.take(order[~near])
        return domains.take(order[near])

    def _add(self, domains: Domains, price: int = 1) -> None:
        """Count domains that were bounded; those that are not proved are open."""
        self._bill(domains, price)
        self.open.add(domains.unproved())

    def _bill(self, domains: Domains, price: int) -> None:
        self.count = self.count + price * torch.bincount(domains.owner, minlength=len(self.count))

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
        """A domain that cannot be proved there cannot be proved here."""
        self.failed |= found.failed
        self.count = self.count + found.count

    def stand(self, part: Part[Domains, _Found]) -> None:
        """Nothing is proved of it."""
        self.failed[part.nodes.owner] = True


def _in_order(bound: Tensor) -> Tensor:
    """The places of bounds from the least on; those that are equal in float32 keep their order,
    whatever else is there.
    """
    return bound.float().argsort(stable=True)
