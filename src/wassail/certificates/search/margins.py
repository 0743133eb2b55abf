"""Branch and bound on undecided neurons, with linear bounds that know the signs already chosen
(beta-CROWN, Wang et al. 2021).

A domain fixes the signs of some neurons. There the neuron is linear, and the constraint on its sign
enters the bound with a multiplier >= 0, in the same backward pass: any multipliers and any slopes
of the lower lines give a sound bound. They are chosen by Adam in float32; what is claimed is
evaluated in float64 with all rounding errors.

Long because the domains and their bounds are over the same vector of undecided neurons.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates import clock
from wassail.certificates.bounds.ascent import Ascent
from wassail.certificates.bounds.chunks import LARGE
from wassail.certificates.bounds.crown import Sweep
from wassail.certificates.bounds.lines import Arithmetic, Lines
from wassail.certificates.bounds.rows import add_to, flattened, of_owner, row_dot, unflattened
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph
from wassail.certificates.search.frontier import Part, SharedFrontier
from wassail.certificates.search.leaves import Leaves
from wassail.certificates.search.opened import Table
from wassail.certificates.search.workers import Pool
from wassail.rounding import FAINT, UNIT
from wassail.ties import firm

ROOT = 30  # steps of the ascent at the root of a rival
STEPS = 4  # at every other domain, which starts where its parent stopped
# At a domain with a quarter of its sample's undecided neurons fixed: relaxations add little there,
# and the multipliers have to be good.
THOROUGH = 12
LAST = 200  # at a domain with nothing left to split
WIDTH = 32  # domains of a sample split at once
MIXED = 10**6  # operations of a network whose samples share a batch on the CPU
TIE = 2.0**-13  # scores that differ by less, relative to the largest, are equal


@dataclass(frozen=True, eq=False)
class _Domains:
    """R domains of a tree.

    On the CPU, where the next ones are chosen: owner `(R,)`, the place of its sample in the tree;
    rival `(R,)`, of the row `e_rival - e_y`; depth `(R,)`, how many signs are chosen; bound `(R,)`,
    on the margin, from below; pick `(R,)`, the neuron to split on next, -1 if none is left. Where
    the network is: signs (1 on, -1 off, 0 free), slopes and multipliers of the U neurons, `(R, U)`
    each.
    """

    owner: Tensor
    rival: Tensor
    depth: Tensor
    bound: Tensor
    pick: Tensor
    sign: Tensor
    alpha: Tensor
    beta: Tensor

    def take(self, rows: Tensor) -> _Domains:
        """Some of them, by indices on the CPU."""
        there = rows.to(self.sign.device, non_blocking=True)
        few = (v[rows] for v in (self.owner, self.rival, self.depth, self.bound, self.pick))
        return _Domains(*few, *(v[there] for v in (self.sign, self.alpha, self.beta)))

    def where(self, mask: Tensor) -> _Domains:
        """Some of them, by a mask on the CPU."""
        return self if bool(mask.all()) else self.take(mask.nonzero()[:, 0])

    def unproved(self) -> _Domains:
        """Those whose bound is not above 0, NaN among them."""
        return self.where(~(self.bound > 0))

    def join(self, other: _Domains) -> _Domains:
        """These, then the others."""
        return _Domains(
            *(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self))
        )

    def __len__(self) -> int:
        return len(self.rival)


def branch_margins(
    sweep: Sweep,
    sample: int,
    y: int,
    rivals: Tensor,
    most: int = 10**6,
    pool: Pool | None = None,
) -> tuple[bool, int]:
    """Whether `theta_y - theta_j > 0` on the ball of one sample of a sweep for all rivals j, and
    how many domains it took.

    False when the time (`clock`) or the number of domains runs out first. sweep: with `bends` kept.
    most: domains that may be bounded, the batch under way is finished. pool: who shares the open
    domains.
    """
    proved, count, _ = _branched(sweep, [sample], [y], [rivals.tolist()], [most], pool=pool)[0]
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
) -> list[tuple[bool, int, Leaves | None]]:
    """One tree for all samples; pool: for a single one."""
    tree = _Tree(sweep, samples, y)
    proof = _Proof(tree, torch.tensor(most))
    proof.failed = ~torch.tensor(tree.open)  # nothing to split: the bound is what it is
    known = known or [None] * len(samples)
    new = [some if tree.open[k] and known[k] is None else [] for k, some in enumerate(rivals)]
    old = {k: left for k, left in enumerate(known) if left is not None and tree.open[k]}
    begun = False
    with suppress(clock.Late):
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


class _Proof(SharedFrontier[_Domains, _Found]):
    """The domains of some samples that are not proved.

    failed `(S,)`: samples with a domain that cannot be proved, or that took too many; count `(S,)`:
    domains bounded, one with patience by its steps; most `(S,)`: how many may be.
    """

    def __init__(self, tree: _Tree, most: Tensor) -> None:
        self.tree = tree
        self.most = most
        self.count = torch.zeros_like(most)
        self.failed = torch.zeros_like(most, dtype=torch.bool)
        self.open: Table[_Domains] = Table(tree.roots([[] for _ in tree.open]), order=_in_order)
        self.out = []
        self.spent: list[_Domains] = []  # what was open of samples when their domains ran out

    @property
    def over(self) -> bool:
        """Whether the time is up, or no sample can be proved any more."""
        return clock.late() or bool(self.failed.all())

    def begun(self, first: _Domains, steps: int) -> None:
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
            ended = worst.pick < 0  # no relaxation is left to remove
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

    def _worst(self) -> _Domains:
        """Take out the `WIDTH` domains of each sample with the least bounds."""
        domains = self.open.everything()
        order = self.open.order()
        order = order[domains.owner[order].argsort(stable=True)]
        owner = domains.owner[order]
        first = torch.searchsorted(owner, owner)  # where the sample's own begin
        near = torch.arange(len(order)) - first < WIDTH
        self.open.rows = domains.take(order[~near])
        return domains.take(order[near])

    def _add(self, domains: _Domains, price: int = 1) -> None:
        """Count domains that were bounded; those that are not proved are open."""
        self._bill(domains, price)
        self.open.add(domains.unproved())

    def _bill(self, domains: _Domains, price: int) -> None:
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

    def stand(self, part: Part[_Domains, _Found]) -> None:
        """Nothing is proved of it."""
        self.failed[part.nodes.owner] = True


def _in_order(bound: Tensor) -> Tensor:
    """The places of bounds from the least on; those that are equal in float32 keep their order,
    whatever else is there.
    """
    return bound.float().argsort(stable=True)


class _Tree:
    """The undecided neurons of some samples, in one vector of length U for each, and the bounds of
    domains over them.

    Of every node with such neurons, places `(S, u)` tells where they are, u the largest number of
    any sample; the rest is the place after the last, where everything is 0. open: which samples
    have any.
    """

    def __init__(self, sweep: Sweep, samples: list[int], y: list[int]) -> None:
        device = sweep.graph.device
        self.sweep = sweep
        self.samples = torch.tensor(samples, device=device)
        self.y = torch.tensor(y, device=device)
        crossing = {
            i: flattened(of_owner(bend.crossing, self.samples)) for i, bend in sweep.bends.items()
        }
        counts = (
            torch.stack([mask.sum(1) for mask in crossing.values()]).tolist() if crossing else []
        )
        self.open = [any(own) for own in zip(*counts)] if counts else [False] * len(samples)
        self.undecided = torch.tensor([sum(own) for own in zip(*counts)] or [0] * len(samples))
        self.places: dict[int, Tensor] = {}
        self.parts: dict[int, slice] = {}
        self.ragged: set[int] = set()  # nodes with samples that have fewer neurons than others
        self.rest: dict[tuple[torch.dtype, int], Lines] = {}
        start = 0
        columns: list[list[Tensor]] = []
        for (i, mask), own in zip(crossing.items(), counts):
            width = max(own)
            size = mask.shape[1]
            if not width:
                continue
            if min(own) < width:
                self.ragged.add(i)
            places = (
                torch.where(mask, torch.arange(size, device=device), size).sort(1).values[:, :width]
            )
            self.places[i], self.parts[i] = places, slice(start, start + width)
            start += width
            one = sweep.bends[i].take(self.samples)
            shape = one.shape
            node = one.shape.node
            assert node.slope is not None
            up = shape.slopes()[0]
            values = (
                up,
                shape.shift(up, True),
                shape.c,
                shape.output()[0],
                one.error,
                node.slope.expand(shape.c.shape),
                one.down,
                torch.maximum(-shape.low, shape.high),
            )
            columns.append([self._gathered(i, flattened(v.double()), places) for v in values])
        none = torch.zeros(len(samples), 0, dtype=torch.float64, device=device)
        whole = (torch.cat([none, *v], 1) for v in (zip(*columns) if columns else [()] * 8))
        self.up, self.above, self.c, self.here, self.error, self.slope, self.down, self.most = whole

    def _gathered(self, i: int, flat: Tensor, places: Tensor) -> Tensor:
        """The entries of node i's neurons, `(R, size), (R, u) -> (R, u)`; 0 where there are
        fewer.
        """
        return (F.pad(flat, (0, 1)) if i in self.ragged else flat).gather(
            1, places.expand(len(flat), -1)
        )

    def _replaced(self, i: int, flat: Tensor, places: Tensor, values: Tensor | float) -> Tensor:
        """The rows with other entries at node i's neurons: what `_gathered` looks at."""
        places = places.expand(len(flat), -1)
        if isinstance(values, float):
            values = flat.new_full(places.shape, values)
        if i in self.ragged:
            return F.pad(flat, (0, 1)).scatter(1, places, values)[:, :-1]
        return flat.scatter(1, places, values)

    def _others(self, kind: Arithmetic, i: int) -> Lines:
        """The lines of node i with 0 at the undecided neurons, `(S, size)` each."""
        if (kind.dtype, i) not in self.rest:
            line = kind.lines[i].take(self.samples)
            flat = (flattened(v) for v in (line.mid, line.rad, line.off, line.far))
            self.rest[kind.dtype, i] = Lines(
                *(self._replaced(i, v, self.places[i], 0.0) for v in flat)
            )
        return self.rest[kind.dtype, i]

    def roots(self, rivals: list[list[int]]) -> _Domains:
        """One domain for each rival of each sample, all neurons free."""
        owner = torch.tensor([k for k, some in enumerate(rivals) for _ in some], dtype=torch.int64)
        rival = torch.tensor([j for some in rivals for j in some], dtype=torch.int64)
        alpha = of_owner(self.down.float(), owner.to(self.down.device))
        zero = torch.zeros_like(alpha)
        bound = torch.zeros(len(owner), dtype=torch.float64)
        none = torch.full_like(owner, -1)
        depth = torch.zeros_like(owner)
        return _Domains(owner, rival, depth, bound, none, zero, alpha, zero.clone())

    def deep(self, domains: _Domains) -> Tensor:
        """Domains with a quarter of their undecided neurons fixed, bool `(R,)` on the CPU."""
        return 4 * domains.depth > self.undecided[domains.owner]

    def leaves(self, k: int, domains: _Domains) -> Leaves:
        """Domains of the k-th sample, apart from this tree."""
        places = {i: every[k] for i, every in self.places.items()}
        real = {i: own < self.sweep.graph.nodes[i].size for i, own in places.items()}
        columns = torch.cat(list(real.values()))
        few = (v[:, columns] for v in (domains.sign.to(torch.int8), domains.alpha, domains.beta))
        return Leaves(domains.rival, {i: places[i][real[i]] for i in places}, *few)

    def regrown(self, known: dict[int, Leaves], rivals: list[list[int]]) -> _Domains:
        """Leaves of larger balls over the neurons that are undecided here, by samples; those
        of rivals that are excluded here are done.
        """
        found = self.roots([[] for _ in self.open])
        for k, leaves in known.items():
            some = torch.isin(leaves.rival, torch.tensor(rivals[k], dtype=torch.int64)).nonzero()[
                :, 0
            ]
            if not len(some):
                continue
            there = some.to(self.samples.device)
            owner = torch.full((len(some),), k, dtype=torch.int64)
            alpha = self.down[k].float().expand(len(some), -1).clone()
            sign = torch.zeros_like(alpha)
            beta = torch.zeros_like(alpha)
            for i, part in self.parts.items():
                here, column = leaves.on(i, self.places[i][k], self.sweep.graph.nodes[i].size)
                where = here.nonzero()[:, 0] + part.start
                sign[:, where] = leaves.sign[there][:, column].to(sign.dtype)
                alpha[:, where] = leaves.alpha[there][:, column]
                beta[:, where] = leaves.beta[there][:, column]
            bound = torch.zeros(len(some), dtype=torch.float64)
            rival = leaves.rival[some]
            depth = (sign != 0).sum(1).cpu()
            none = torch.full_like(owner, -1)
            found = found.join(_Domains(owner, rival, depth, bound, none, sign, alpha, beta))
        return found

    def split(self, parents: _Domains) -> _Domains:
        """Two children for each: the free neuron whose relaxation adds most is on, or off."""
        children = parents.join(parents)
        place = children.pick.clamp(min=0).to(children.sign.device, non_blocking=True)
        on = torch.ones_like(parents.sign[:, :1])
        sign = children.sign.scatter(1, place[:, None], torch.cat([on, -on]))
        return replace(children, depth=children.depth + 1, sign=sign)

    def bounded(self, domains: _Domains, steps: int) -> _Domains:
        """The domains with bounds proved in float64 at the best slopes and multipliers that Adam
        finds.

        In parts that memory holds; the host waits for the bounds of all of them once.
        """
        device = self.sweep.graph.device
        part = (
            len(domains)
            if device == HOST
            else max(1, LARGE // max(n.size for n in self.sweep.graph.nodes))
        )
        rows = torch.arange(len(domains))
        found = [
            self._bounded(domains.take(some) if part < len(domains) else domains, steps)
            for some in torch.split(rows, part)
        ]
        alpha, beta, value, pick = (torch.cat(v) for v in zip(*found))
        bound, place = torch.stack([value, pick.double()]).cpu()
        return replace(domains, bound=bound, pick=place.long(), alpha=alpha, beta=beta)

    def _bounded(self, domains: _Domains, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slopes, multipliers, the bound, and the neuron to split on; all where the network is."""
        rows = _Rows.make(self, domains)
        alpha = domains.alpha.clone()
        beta = domains.beta.clone()
        scale = torch.ones_like(alpha)
        ascent = Ascent((alpha, beta))
        exact = of_owner(self.slope, rows.own)
        slope = exact.float()
        for step in range(1, steps + 1):
            clock.check()
            with torch.enable_grad():
                alpha = alpha.detach().requires_grad_(True)
                beta = beta.detach().requires_grad_(True)
                value, _, size = self._margin(self.sweep.fast, rows, domains.sign, alpha, beta)
                pulls = torch.autograd.grad(value.sum(), (alpha, beta))
            ascent.keep(value.detach(), (alpha, beta))
            if step == 1:  # multipliers are about as large as coefficients
                scale = size.clamp(min=1e-6)
            slope_move, beta_move = ascent.moves(pulls)
            assert slope_move is not None and beta_move is not None
            rate = 0.3 * 0.1 ** (step / steps)
            alpha = torch.minimum(
                torch.maximum(alpha.detach() + rate * slope_move, slope), torch.ones_like(slope)
            )
            beta = ((beta.detach() + rate * scale * beta_move).clamp(min=0)) * (domains.sign != 0)
        alpha, beta = ascent.kept
        # float32 may have rounded a slope out of its range
        slopes = torch.minimum(torch.maximum(alpha.double(), exact), torch.ones_like(exact))
        value, score, _ = self._margin(self.sweep.exact, rows, domains.sign, slopes, beta.double())
        pick = _first_largest(torch.where(domains.sign == 0, score.float(), 0.0))
        return alpha, beta, value, pick

    def _margin(
        self, kind: Arithmetic, rows: _Rows, sign: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Lower bounds on the margins `(R,)`, what each free neuron's relaxation adds and its
        coefficient's size, `(R, U)`.
        """
        sweep = self.sweep
        nodes = self.sweep.graph.nodes
        last = len(nodes) - 1
        eye = torch.eye(sweep.graph.outputs, dtype=kind.dtype, device=alpha.device)
        y = self.y[rows.own]
        weight: dict[int, Tensor] = {last: eye[rows.rival] - eye[y]}
        constant = of_owner(kind.floors[last], rows.owner).expand(len(alpha))
        score = torch.zeros_like(alpha)
        size = torch.zeros_like(alpha)
        for i in range(last, 0, -1):
            if i not in weight:
                continue
            node = nodes[i]
            w = weight.pop(i)
            if node.map is not None:
                if i in kind.errors:
                    constant = constant + row_dot(w.abs(), of_owner(kind.errors[i], rows.owner))
                for j, back in zip(node.inputs, kind.maps[i].transpose(w)):
                    add_to(weight, j, back)
                continue
            w = firm(w)
            if i in kind.planes:
                off, far = kind.planes[i].pull(weight, node.inputs, w, rows.owner)
                constant = constant + off + far
                continue
            if i not in self.parts:
                line = kind.lines[i].take(rows.owner)
                constant = constant + row_dot(w, line.off) + row_dot(w.abs(), line.far)
                add_to(weight, node.inputs[0], torch.addcmul(w * line.mid, w.abs(), line.rad))
                continue
            part = self.parts[i]
            place = of_owner(self.places[i], rows.own)
            line = self._others(kind, i).take(rows.own)
            flat = flattened(w)
            constant = constant + row_dot(flat, line.off) + row_dot(flat.abs(), line.far)
            chosen = self._gathered(i, flat, place)
            own = sign[:, part], alpha[:, part], beta[:, part]
            coefficient, added, gain = self._neurons(chosen, rows, part, *own, node.size)
            constant = constant + added.double().sum(1)
            score[:, part], size[:, part] = gain.detach(), chosen.detach().abs()
            flat = self._replaced(i, flat * line.mid, place, coefficient)
            add_to(weight, node.inputs[0], unflattened(flat, node.shape))
        a = firm(flattened(weight[0]))
        z = of_owner(sweep.centre[last], rows.owner)
        here = (
            z.gather(1, y[:, None])[:, 0]
            - z.expand(len(a), -1).gather(1, rows.rival[:, None])[:, 0]
        )
        total = constant + sweep.inputs.upper(a, rows.owner)
        return here - total - 4 * UNIT * (z.abs().amax(1) + total.abs()), score, size

    def _neurons(
        self,
        w: Tensor,
        rows: _Rows,
        part: slice,
        sign: Tensor,
        alpha: Tensor,
        beta: Tensor,
        terms: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For coefficients w `(R, u)` of undecided neurons: the coefficients of their inputs, and
        what the bound grows by.

        terms: at most so many of them are added up.
        """
        kept = (self.up, self.above, self.c, self.here, self.error, self.slope, self.most)
        up, above, c, here, error, slope, most = (
            of_owner(v[:, part], rows.own).to(w.dtype) for v in kept
        )
        plus = w.clamp(min=0)
        minus = w - plus
        relaxed = plus * above + minus * (alpha * c - here)
        side = torch.where(sign > 0, 1.0, slope)  # the neuron's slope where its sign is chosen
        push = beta * sign
        coefficient = torch.where(sign == 0, plus * up + minus * alpha, w * side + push)
        added = torch.where(sign == 0, relaxed, w * (side * c - here) + push * c)
        # most: a multiplier may cancel the coefficient, but not what the product with the slope was
        # rounded by.
        size = w.abs() * (above.abs() + c.abs() + here.abs() + most + FAINT) + beta * c.abs()
        # Of the products and of their sum. Not w.shape[1], which depends on the samples that share
        # the tree.
        slack = coefficient.abs() * error + (terms + 64) * UNIT * size
        return coefficient, added + slack, torch.where(sign == 0, relaxed, 0.0)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Where the rows of a batch belong, where the network is: own, in the tree; owner, in the
    sweep; and their rivals.

    own and owner are `(R,)`, or `(1,)` in a tree of one sample.
    """

    own: Tensor
    owner: Tensor
    rival: Tensor

    @classmethod
    def make(cls, tree: _Tree, domains: _Domains) -> _Rows:
        """Of some domains."""
        single = len(tree.open) == 1
        own = (domains.owner[:1] if single else domains.owner).to(
            tree.samples.device, non_blocking=True
        )
        return cls(own, tree.samples[own], domains.rival.to(own.device, non_blocking=True))


def _first_largest(score: Tensor) -> Tensor:
    """The first of the largest scores of each row, up to the rounding of float32; -1 where none
    is above 0.
    """
    if not score.shape[1]:
        return score.new_full((len(score),), -1, dtype=torch.int64)
    most = score.amax(1, keepdim=True)
    level = (score / torch.where(most > 0, TIE * most, 1.0)).round()
    return torch.where(most[:, 0] > 0, level.argmax(1), -1)
