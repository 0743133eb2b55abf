"""The unstable neurons of some samples, and bounds of subproblems over them.

A subproblem fixes the signs of some ReLUs, and intervals of the inputs of some smooth neurons. A
ReLU with a sign is linear, and the constraint enters the bound with a multiplier >= 0, in the same
backward pass (beta-CROWN, Wang et al. 2021): any multipliers and any slopes give a sound bound.
They are chosen by Adam in float32; what is claimed is evaluated in float64 with all rounding
errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.relax.backward import Ascent, Backward
from wassail.certificates.relax.lines import Arithmetic, Lines
from wassail.certificates.relax.rows import DEVICE_CHUNK, flattened, of_owner, row_dot, unflattened
from wassail.certificates.search.intervals import Cuts, Held, SmoothBackward
from wassail.certificates.search.neurons import Neurons, ReluGradient, Rows
from wassail.certificates.search.subproblems import Leaves, Margin, Subproblems, Unknowns, largest
from wassail.rounding import FAINT, UNIT
from wassail.ties import firm, first_largest

# A subproblem whose bound in float32 is below 0 by this much of the largest logit is not proved:
# what float32 rounds is far less.
CLEAR = 2.0**-10


class Tree(Neurons):
    """The bounds of subproblems over the unstable neurons of some samples."""

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
        if not self.intervals.count:
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
            cuts, empty = self.intervals.regrown(leaves.cuts.take(there), k)
            depth = ((sign != 0).sum(1) + (cuts.column >= 0).sum(1)).cpu()
            none = torch.full((len(owner), self.look), -1)
            rest = (sign, alpha, beta, cuts)
            grown = Subproblems(owner, rival, depth, bound, none, *rest)
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
        if not self.intervals.count:
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
        relus = bool(self.parts) and not self.sweep.graph.smooth
        ascend = self._climbed if relus else self._ascended
        found = []
        for some in torch.split(torch.arange(len(subproblems)), part):
            few = subproblems.take(some) if part < len(subproblems) else subproblems
            found.append(ascend(few, steps))
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
        """
        rows = Rows.make(self, subproblems)
        held = self._held(subproblems, rows)
        exact = of_owner(self.slope, rows.own)
        slope = exact.float()
        unknowns = Unknowns.of(subproblems)
        ascent = Ascent(unknowns.values)
        scales = [torch.ones_like(v) for v in unknowns.values]
        for step in range(1, (steps if unknowns.values else 0) + 1):
            clock.check()
            with torch.enable_grad():
                unknowns = unknowns.leaves()
                found = self._margin(
                    self.sweep.fast, rows, held, subproblems.sign, *unknowns.parts(subproblems)
                )
                if not found.value.requires_grad:  # its bounds are infinite: nothing to climb
                    break
                pulls = torch.autograd.grad(
                    found.value.sum(), unknowns.values, allow_unused=unknowns.cut
                )
            ascent.keep(found.value.detach(), unknowns.values)
            if step == 1:  # multipliers are about as large as coefficients
                scales = unknowns.scales(self.joined(found.sizes, subproblems.alpha), found.smooth)
            rate = 0.3 * 0.1 ** (step / steps)
            unknowns = unknowns.moved(ascent.moves(pulls), scales, rate, subproblems.sign, slope)
        alpha, beta, cuts = replace(unknowns, values=ascent.kept).parts(subproblems)
        # float32 may have rounded a slope out of its range
        slopes = torch.minimum(torch.maximum(alpha.double(), exact), torch.ones_like(exact))
        found = self._margin(
            self.sweep.exact, rows, held, subproblems.sign, slopes, beta.double(), cuts, scored=True
        )
        free = torch.where(subproblems.sign == 0, self.joined(found.scores, slopes).float(), 0.0)
        curved = [] if found.smooth is None else found.smooth.in_order()
        scores = torch.cat([free, *(v.float() for v in curved)], 1)
        pick = largest(scores, self.look)
        return alpha, beta, found.value, pick, cuts

    def _climbed(
        self, subproblems: Subproblems, steps: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Cuts]:
        """The same in a network of ReLUs.

        What is above 0 was evaluated in float64 with all rounding errors. A subproblem that float32
        leaves clearly below 0 is not evaluated again: its bound is that of float32, which proves
        nothing and orders the open subproblems. What the relaxations add, by which the next neuron
        is chosen, is known from the ascent.
        """
        rows = Rows.make(self, subproblems)
        climb = ReluGradient(self, rows, subproblems.sign)
        slope = of_owner(self.slope, rows.own).float()
        unknowns = Unknowns.of(subproblems)
        ascent = Ascent(unknowns.values)
        scales: list[Tensor] = []
        scores = torch.zeros_like(subproblems.alpha)
        for step in range(1, steps + 1):
            clock.check()
            alpha, beta = unknowns.values
            value, gains, sizes, pulls = climb.value(alpha, beta, step < steps)
            scores = torch.where((value > ascent.best)[:, None], gains, scores)
            ascent.keep(value, unknowns.values)
            if step == steps:
                break
            if step == 1:  # multipliers are about as large as coefficients
                scales = unknowns.scales(sizes, None)
            rate = 0.3 * 0.1 ** (step / steps)
            unknowns = unknowns.moved(ascent.moves(pulls), scales, rate, subproblems.sign, slope)
        alpha, beta = ascent.kept
        bound = ascent.best
        reached = replace(subproblems, alpha=alpha, beta=beta)
        clear = bound.isfinite() & (bound < -CLEAR * climb.size)
        if self.sweep.graph.device != HOST:  # it is not asked which are left
            value, gains = self._proved(reached)
            bound = torch.where(clear, bound, value)
            scores = torch.where(clear[:, None], scores, gains)
        elif not bool(clear.all()):
            left = (~clear).nonzero()[:, 0]
            bound[left], scores[left] = self._proved(reached.take(left))
        return alpha, beta, bound, largest(scores, self.look), subproblems.cuts

    def _proved(self, subproblems: Subproblems) -> tuple[Tensor, Tensor]:
        """Bounds in float64 with all rounding errors, `(R,)`, and what the relaxation of each
        free neuron takes from them, `(R, U)` in float32; at the slopes and multipliers there are.
        """
        rows = Rows.make(self, subproblems)
        exact = of_owner(self.slope, rows.own)
        # float32 may have rounded a slope out of its range
        slopes = torch.minimum(
            torch.maximum(subproblems.alpha.double(), exact), torch.ones_like(exact)
        )
        beta = subproblems.beta.double()
        own = (subproblems.sign, slopes, beta, subproblems.cuts)
        found = self._margin(self.sweep.exact, rows, None, *own)
        scores = self.joined(found.scores, slopes).float()
        return found.value, torch.where(subproblems.sign == 0, scores, 0.0)

    def _held(self, subproblems: Subproblems, rows: Rows) -> Held | None:
        """What the bounds of subproblems need of the smooth neurons; None where there are none."""
        if not self.intervals.count:
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
        smooth = SmoothBackward.make(self.intervals, held, cuts, kind)
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
