"""Branch and bound on unstable neurons: a proof that nothing flips in the balls of some samples.

A subproblem fixes the signs of some ReLUs, and intervals of the inputs of some smooth neurons. A
ReLU with a sign is linear, and the constraint enters the bound with a multiplier >= 0, in the same
backward pass (beta-CROWN, Wang et al. 2021): any multipliers and any slopes give a sound bound.
They are chosen by Adam in float32; what is claimed is evaluated in float64 with all rounding
errors. The subproblems of a sample cover its ball: if all are proved, the sample is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph
from wassail.certificates.relax.backward import Ascent, Backward
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Arithmetic, Lines
from wassail.certificates.relax.rows import DEVICE_CHUNK, flattened, of_owner, row_dot, unflattened
from wassail.certificates.search.frontier import Part, Pool, SharedFrontier, Table
from wassail.certificates.search.intervals import Held, Intervals, SmoothBackward
from wassail.certificates.search.subproblems import (
    Cuts,
    Forest,
    Leaves,
    Neurons,
    ReluGradient,
    Rows,
    Subproblems,
    Unknowns,
    largest,
)
from wassail.rounding import FAINT, UNIT
from wassail.ties import firm, first_largest

# A subproblem whose bound in float32 is below 0 by this much of the largest logit is not proved:
# what float32 rounds is far less.
CLEAR = 2.0**-10
ROOT_STEPS = 30  # steps of the ascent at the root of a rival
ASCENT_STEPS = 4  # at every other subproblem, which starts where its parent stopped
# At a subproblem with a quarter of its sample's unstable neurons fixed: relaxations add little
# there, and the multipliers have to be good.
DEEP_STEPS = 12
LAST_STEPS = 200  # at a subproblem with nothing left to split
WIDTH = 32  # subproblems of a sample split at once
MIXED = 10**6  # operations of a network whose samples share a batch on the CPU


@dataclass(frozen=True, eq=False)
class Margin:
    """Lower bounds on the margins of R subproblems.

    value `(R,)`; scores: of each node, what the relaxation of its unstable neurons adds, `(R, u)`,
    if asked; sizes: of each node, their coefficients; smooth: the same for smooth neurons.
    """

    value: Tensor
    scores: Mapping[int, Tensor]
    sizes: Mapping[int, Tensor]
    smooth: SmoothBackward | None


class Tree(Neurons):
    """The bounds of subproblems over the unstable neurons of some samples; intervals: their smooth
    neurons, None in a network without any.
    """

    def __init__(self, sweep: Sweep, samples: list[int], y: list[int]) -> None:
        super().__init__(sweep, samples, y)
        self.intervals = Intervals(sweep, self.samples) if sweep.smooth else None

    def roots(self, rivals: list[list[int]]) -> Subproblems:
        """One subproblem for each rival of each sample, all neurons free."""
        owner = torch.tensor([k for k, some in enumerate(rivals) for _ in some], dtype=torch.int64)
        rival = torch.tensor([j for some in rivals for j in some], dtype=torch.int64)
        alpha = of_owner(self.down.float(), owner.to(self.down.device))
        zero = torch.zeros_like(alpha)
        bound = torch.zeros(len(owner), dtype=torch.float64)
        none = torch.full((len(owner), self.look), -1)
        depth = torch.zeros_like(owner)
        cuts = Cuts.none(len(owner), zero.device)
        return Subproblems(owner, rival, depth, bound, none, zero, alpha, zero.clone(), cuts)

    def tilt(self, rivals: list[list[int]]) -> None:
        """The lines of the smooth neurons on the whole ball, for each rival of each sample.

        In parts that memory holds, as in `bounded`.
        """
        if self.intervals is None:
            return
        whole = self.roots(rivals)
        for some in torch.split(torch.arange(len(whole)), self._together(len(whole))):
            roots = whole.take(some) if len(some) < len(whole) else whole
            known = int(self.root.max()) + 1
            self.root[roots.owner, roots.rival] = torch.arange(known, known + len(roots))
            rows = Rows.make(self, roots)
            alone = torch.zeros(0, dtype=torch.int64, device=rows.own.device)
            empty = self.intervals.held(alone, rows.own, roots.cuts, False)
            bound = partial(self._tilted, roots, rows, empty)
            self.intervals.tilt(rows.own.expand(len(roots)), bound)

    def _tilted(
        self, roots: Subproblems, rows: Rows, held: Held, lines: Mapping[int, Lines]
    ) -> Tensor:
        """Bounds of roots in float32 with other lines of the smooth neurons."""
        own = replace(held, lines={torch.float32: lines})
        kept = (roots.sign, roots.alpha, roots.beta, roots.cuts)
        return self._margin(self.sweep.fast, rows, own, *kept).value

    def _together(self, count: int) -> int:
        """How many of so many subproblems are bounded at once."""
        device = self.sweep.graph.device
        widest = max(n.size for n in self.sweep.graph.nodes)
        return max(1, count if device == HOST else DEVICE_CHUNK // widest)

    def deep(self, subproblems: Subproblems) -> Tensor:
        """Subproblems with a quarter of their unstable neurons fixed, bool `(R,)` on the CPU."""
        return 4 * subproblems.depth > self.unstable[subproblems.owner]

    def leaves(self, k: int, subproblems: Subproblems) -> Leaves:
        """Subproblems of the k-th sample, apart from this tree."""
        places = {i: every[k] for i, every in self.places.items()}
        real = {i: own < self.sweep.graph.nodes[i].size for i, own in places.items()}
        none = torch.zeros(0, dtype=torch.bool, device=subproblems.sign.device)
        columns = torch.cat([none, *real.values()])
        sign, alpha, beta = (
            v[:, columns] for v in (subproblems.sign, subproblems.alpha, subproblems.beta)
        )
        own = {i: places[i][real[i]] for i in places}
        return Leaves(subproblems.rival, own, sign.to(torch.int8), alpha, beta, subproblems.cuts)

    def regrown(self, known: dict[int, Leaves], rivals: list[list[int]]) -> Subproblems:
        """Leaves of larger balls over the neurons that are unstable here, by samples; those
        of rivals that are excluded here are done.
        """
        every = range(len(self.open))
        found = self.roots([[] for _ in every])
        for k, leaves in known.items():
            some = torch.isin(leaves.rival, torch.tensor(rivals[k], dtype=torch.int64)).nonzero()[
                :, 0
            ]
            if not len(some):
                continue
            there = some.to(self.samples.device)
            alpha = self.down[k].float().expand(len(some), -1).clone()
            sign = torch.zeros_like(alpha)
            beta = torch.zeros_like(alpha)
            for i, part in self.parts.items():
                here, column = leaves.on(i, self.places[i][k], self.sweep.graph.nodes[i].size)
                where = here.nonzero()[:, 0] + part.start
                sign[:, where] = leaves.sign[there][:, column].to(sign.dtype)
                alpha[:, where] = leaves.alpha[there][:, column]
                beta[:, where] = leaves.beta[there][:, column]
            cuts = leaves.cuts.take(there)
            empty = torch.zeros(len(some), dtype=torch.bool)
            if self.intervals is not None:
                cuts, empty = self.intervals.regrown(cuts, k)
            depth = ((sign != 0).sum(1) + (cuts.column >= 0).sum(1)).cpu()
            fresh = self.roots([leaves.rival[some].tolist() if i == k else [] for i in every])
            grown = replace(fresh, depth=depth, sign=sign, alpha=alpha, beta=beta, cuts=cuts)
            found = found.join(grown.where(~empty.cpu()))
        return found

    def split(self, parents: Subproblems) -> Subproblems:
        """Two children for each: the free neuron whose relaxation adds most is on, or off, or the
        smooth neuron whose cut gains most has the upper, or the lower, part of its interval.
        """
        return self._children(
            parents, self._ahead(parents) if self.look > 1 else parents.pick[:, 0]
        )

    def _ahead(self, parents: Subproblems) -> Tensor:
        """Of the neurons that may gain most, the one whose two children have the best bounds
        before any ascent, `(R,)` on the CPU.
        """
        count = len(parents)
        each = torch.arange(count).repeat(self.look)
        tried = parents.pick.T.reshape(-1)
        children = self._children(parents.take(each), tried.clamp(min=0))
        rows = Rows.make(self, children)
        held = self._held(children, rows)
        kept = (children.sign, children.alpha, children.beta, children.cuts)
        value = self._margin(self.sweep.fast, rows, held, *kept).value
        known = parents.bound.to(value.device, non_blocking=True)  # holds for the children, too
        pair = torch.maximum(value.reshape(2, self.look, count), known).clamp(max=0)
        gain = (pair.amin(0) + pair.sum(0)).cpu()
        gain = torch.where(tried.reshape(self.look, count) >= 0, gain, -math.inf)
        best = first_largest(gain.float(), 0)
        return parents.pick.gather(1, best[:, None])[:, 0]

    def _children(self, parents: Subproblems, chosen: Tensor) -> Subproblems:
        """Two children for each subproblem at chosen neurons, `(R,)` on the CPU."""
        children = parents.join(parents)
        depth = children.depth + 1
        pick = chosen.repeat(2).to(children.sign.device, non_blocking=True)
        on = parents.sign.new_ones(len(parents), 1)
        side = torch.cat([on, -on])
        if self.intervals is None:
            sign = children.sign.scatter(1, pick.clamp(min=0)[:, None], side)
            return replace(children, depth=depth, sign=sign)
        relus = children.sign.shape[1]
        place = torch.where(pick < relus, pick, relus)[:, None]
        sign = F.pad(children.sign, (0, 1)).scatter(1, place, side)[:, :-1]
        own = Rows.make(self, parents).own
        column = (pick[: len(parents)] - relus).clamp(min=-1)
        lower, upper = self.intervals.split(parents.cuts, own, column)
        return replace(children, depth=depth, sign=sign, cuts=upper.join(lower))

    def bounded(self, subproblems: Subproblems, steps: int) -> Subproblems:
        """The subproblems with bounds proved in float64 at the best slopes and multipliers that
        Adam finds.

        In parts that memory holds; the host waits for the bounds of all of them once.
        """
        part = self._together(len(subproblems))
        found = []
        for some in torch.split(torch.arange(len(subproblems)), part):
            few = subproblems.take(some) if part < len(subproblems) else subproblems
            found.append(self._ascended(few, steps))
        alpha, beta, value, pick = (torch.cat(v) for v in zip(*[parts[:4] for parts in found]))
        cuts = found[0][4]
        for parts in found[1:]:
            cuts = cuts.join(parts[4])
        bound, *place = torch.cat([value[None], pick.T.double()]).cpu()
        order = torch.stack(place, 1).long()
        return replace(subproblems, bound=bound, pick=order, alpha=alpha, beta=beta, cuts=cuts)

    def _ascended(
        self, subproblems: Subproblems, steps: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Cuts]:
        """Slopes, multipliers, the bound, the neuron to split on, and the cuts with their slopes
        and multipliers; all where the network is.

        What is above 0 was evaluated in float64 with all rounding errors. In a network of ReLUs a
        subproblem that float32 leaves clearly below 0 is not evaluated again: its bound is that of
        float32, which proves nothing and orders the open subproblems. What the relaxations add, by
        which the next neuron is chosen, is known from the ascent.
        """
        rows = Rows.make(self, subproblems)
        held = self._held(subproblems, rows)
        slope = of_owner(self.slope, rows.own).float()
        sign = subproblems.sign
        relus = bool(self.parts) and not self.sweep.graph.smooth
        climb = ReluGradient(self, rows, sign) if relus else None
        unknowns = Unknowns.of(subproblems)
        ascent = Ascent(unknowns.values)
        scales: list[Tensor] = []
        scores = torch.zeros_like(subproblems.alpha)
        for step in range(1, (steps if unknowns.values else 0) + 1):
            clock.check()
            cut: list[Tensor] = []
            if climb is not None:
                alpha, beta = unknowns.values
                value, gains, sizes, pulls = climb.value(alpha, beta, step < steps)
                scores = torch.where((value > ascent.best)[:, None], gains, scores)
            else:
                value, sizes, cut, pulls = self._gradient(subproblems, unknowns, rows, held)
            ascent.keep(value, unknowns.values)
            if step == steps or not pulls:
                break
            if step == 1:  # multipliers are about as large as coefficients
                scales = unknowns.scales(sizes, cut)
            rate = 0.3 * 0.1 ** (step / steps)
            unknowns = unknowns.moved(ascent.moves(pulls), scales, rate, sign, slope)
        alpha, beta, cuts = replace(unknowns, values=ascent.kept).parts(subproblems)
        reached = replace(subproblems, alpha=alpha, beta=beta, cuts=cuts)
        if climb is None:
            bound, scores = self._proved(reached)
        else:
            bound = ascent.best
            clear = bound.isfinite() & (bound < -CLEAR * climb.size)
            if self.sweep.graph.device != HOST:  # it is not asked which are left
                value, gains = self._proved(reached)
                bound = torch.where(clear, bound, value)
                scores = torch.where(clear[:, None], scores, gains)
            elif not bool(clear.all()):
                left = (~clear).nonzero()[:, 0]
                bound[left], scores[left] = self._proved(reached.take(left))
        return alpha, beta, bound, largest(scores, self.look), cuts

    def _gradient(
        self, subproblems: Subproblems, unknowns: Unknowns, rows: Rows, held: Held | None
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor | None]]:
        """Bounds in float32 `(R,)`, the coefficients of the ReLUs `(R, U)`, units for the unknowns
        of cut neurons, and gradients by the unknowns: none where the bounds are infinite.
        """
        with torch.enable_grad():
            leaves = unknowns.leaves()
            found = self._margin(
                self.sweep.fast, rows, held, subproblems.sign, *leaves.parts(subproblems)
            )
            pulls: list[Tensor | None] = []
            if found.value.requires_grad:
                some = torch.autograd.grad(
                    found.value.sum(), leaves.values, allow_unused=leaves.cut
                )
                pulls = list(some)
        sizes = self.joined(found.sizes, subproblems.alpha)
        cut = [] if found.smooth is None or not unknowns.cut else found.smooth.scales()
        return found.value.detach(), sizes, cut, pulls

    def _proved(self, subproblems: Subproblems) -> tuple[Tensor, Tensor]:
        """Bounds in float64 with all rounding errors, `(R,)`, and in float32 what the relaxation of
        each free neuron takes from them and what a cut of each smooth one may gain, `(R, .)`; at
        the slopes and multipliers there are.
        """
        rows = Rows.make(self, subproblems)
        held = self._held(subproblems, rows)
        exact = of_owner(self.slope, rows.own)
        # float32 may have rounded a slope out of its range
        slopes = torch.minimum(
            torch.maximum(subproblems.alpha.double(), exact), torch.ones_like(exact)
        )
        own = (subproblems.sign, slopes, subproblems.beta.double(), subproblems.cuts)
        found = self._margin(self.sweep.exact, rows, held, *own, scored=True)
        scores = self.joined(found.scores, slopes).float()
        scores = torch.where(subproblems.sign == 0, scores, 0.0)
        curved = [] if found.smooth is None else found.smooth.in_order()
        return found.value, torch.cat([scores, *(v.float() for v in curved)], 1)

    def _held(self, subproblems: Subproblems, rows: Rows) -> Held | None:
        """What the bounds of subproblems need of the smooth neurons; None where there are none."""
        if self.intervals is None:
            return None
        root = self.root[subproblems.owner, subproblems.rival]
        assert bool((root >= 0).all()), "lines of another sample would prove nothing"
        if bool((root == root[:1]).all()):
            root = root[:1]
        there = root.to(rows.own.device, non_blocking=True)
        ascend = bool(subproblems.cuts.width) or bool(subproblems.sign.shape[1])
        return self.intervals.held(there, rows.own, subproblems.cuts, ascend)

    def _margin(
        self,
        kind: Arithmetic,
        rows: Rows,
        held: Held | None,
        sign: Tensor,
        alpha: Tensor,
        beta: Tensor,
        cuts: Cuts,
        scored: bool = False,
    ) -> Margin:
        """Lower bounds on the margins and what they come from.

        scored: whether it is asked what cuts of smooth neurons may gain.
        """
        sweep = self.sweep
        last = len(sweep.graph.nodes) - 1
        sure = kind is sweep.exact  # an ascent needs no rounding errors, and no scores
        eye = torch.eye(sweep.graph.outputs, dtype=kind.dtype, device=alpha.device)
        y = self.y[rows.own]
        start = {last: eye[rows.rival] - eye[y]}
        floor = of_owner(kind.floors[last], rows.owner).expand(len(alpha))
        scores: dict[int, Tensor] = {}
        sizes: dict[int, Tensor] = {}
        smooth = None
        if self.intervals is not None and held is not None:
            smooth = SmoothBackward(self.intervals, held, cuts, kind)
        back = Backward(sweep.graph, kind, start, floor, rows.owner, sure=sure, tidy=firm)
        for i, node, w in back.neurons(last):
            if node.slope is None:  # a smooth activation
                assert smooth is not None
                flat, added = smooth.pull(kind, i, flattened(firm(w)), scored)
                back.take(node, unflattened(flat, node.shape), added)
                continue
            flat = flattened(w)
            line = self.others(kind, i, rows)
            if sure:
                back.constant = back.constant + row_dot(flat, line.off)
                back.constant = back.constant + row_dot(flat.abs(), line.far)
            through = flat * line.mid  # a ReLU with a side has one line
            if i in self.parts:
                part = self.parts[i]
                place = of_owner(self.places[i], rows.own)
                chosen = firm(self.gathered(i, flat, place))
                own = sign[:, part], alpha[:, part], beta[:, part]
                coefficient, added, gain = self._neurons(chosen, rows, i, *own, sure)
                back.constant = back.constant + added.double().sum(1)
                if gain is not None:
                    scores[i] = gain
                sizes[i] = chosen.detach()
                through = self.replaced(i, through, place, coefficient)
            back.take(node, unflattened(through, node.shape))
        a = firm(back.inputs())
        z = of_owner(sweep.centre[last], rows.owner)
        here = (
            z.gather(1, y[:, None])[:, 0]
            - z.expand(len(a), -1).gather(1, rows.rival[:, None])[:, 0]
        )
        total = back.constant + sweep.inputs.upper(a, rows.owner)
        value = here - total - 4 * UNIT * (z.abs().amax(1) + total.abs())
        return Margin(value, scores, sizes, smooth)

    def _neurons(
        self,
        w: Tensor,
        rows: Rows,
        i: int,
        sign: Tensor,
        alpha: Tensor,
        beta: Tensor,
        sure: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """For coefficients w `(R, u)` of unstable neurons of node i: the coefficients of their
        inputs, what the bound grows by, and, if it has to be sure, what each relaxation adds.

        sure: with all rounding errors.
        """
        up, above, c, here, error, slope, most = self.known(w.dtype, i, rows)
        free = sign == 0
        plus = w.clamp(min=0)
        minus = w - plus
        relaxed = plus * above + minus * (alpha * c - here)
        side = torch.where(sign > 0, 1.0, slope)  # the neuron's slope where its sign is chosen
        push = beta * sign
        coefficient = torch.where(free, plus * up + minus * alpha, w * side + push)
        added = torch.where(free, relaxed, w * (side * c - here) + push * c)
        if not sure:
            return coefficient, added, None
        # most: a multiplier may cancel the coefficient, but not what the product with the slope was
        # rounded by.
        size = w.abs() * (above.abs() + c.abs() + here.abs() + most + FAINT) + beta * c.abs()
        # Of the products and of their sum. Not w.shape[1], which depends on the samples that share
        # the tree.
        terms = self.sweep.graph.nodes[i].size
        slack = coefficient.abs() * error + (terms + 64) * UNIT * size
        return coefficient, added + slack, torch.where(free, relaxed, 0.0)


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
