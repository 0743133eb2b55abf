"""Branch and bound on undecided neurons, with linear bounds that know the signs already chosen (beta-CROWN, Wang et al. 2021).

A domain fixes the signs of some neurons. There the neuron is linear, and the constraint on its sign enters the bound with a
multiplier >= 0, in the same backward pass: any multipliers and any slopes of the lower lines give a sound bound. They are
chosen by Adam in float32; what is claimed is evaluated in float64 with all rounding errors.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wassail.certificates import parallel
from wassail.certificates.linear import Arithmetic, Sweep, _accumulate, _dot, _flat, _unflat
from wassail.rounding import FAINT

ROOT = 30  # steps of the ascent at the root of a rival
STEPS = 12  # at every other domain, which starts where its parent stopped
LAST = 200  # at a domain with nothing left to split
WIDTH = 32  # domains split at once


@dataclass(frozen=True, eq=False)
class _Domains:
    """R domains: the row `e_rival - e_y` of each, signs (1 on, -1 off, 0 free), slopes and multipliers of its U neurons.

    bound `(R,)`: on the margin, from below; score `(R, U)`: what each free neuron's relaxation adds.
    """

    rival: Tensor
    sign: Tensor
    alpha: Tensor
    beta: Tensor
    bound: Tensor
    score: Tensor

    def take(self, rows: Tensor) -> _Domains:
        """Some of them."""
        return _Domains(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def unproved(self) -> _Domains:
        """Those whose bound is not above 0, NaN among them."""
        return self.take((~(self.bound > 0)).nonzero()[:, 0])

    @staticmethod
    def join(parts: list[_Domains]) -> _Domains:
        """One after the other."""
        return _Domains(*(torch.cat([getattr(p, name) for p in parts]) for name in _Domains.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.rival)


def branch_margins(
    sweep: Sweep,
    sample: int,
    y: int,
    rivals: Tensor,
    deadline: float,
    most: int = 10**6,
    pool: parallel.Pool | None = None,
) -> tuple[bool, int]:
    """Whether `theta_y - theta_j > 0` on the ball of one sample of a sweep for all rivals j, and how many domains it took.

    False when the deadline (of `time.monotonic`) or the number of domains runs out first. sweep: with `bends` kept. pool: who
    shares the open domains.
    """
    if not any(bool(bend.crossing[sample].any()) for bend in sweep.bends.values()):
        return False, 0  # nothing to split: the bound is what it is
    tree = _Tree(sweep, sample, y)
    domains = tree.bounded(tree.roots(rivals), ROOT)
    count, open_ = len(domains), domains.unproved()
    while len(open_):
        if time.monotonic() > deadline or count > most:
            return False, count
        if pool is not None and len(open_) >= parallel.ENOUGH * pool.workers:
            shared = _Shared(open_, count, deadline, most)
            parallel.share(shared, tree, pool)
            if shared.failed:
                return False, shared.count
            open_, count = shared.open, shared.count
            continue
        left, made = tree.grown(open_)
        count += made
        if left is None:
            return False, count
        open_ = left
    return True, count


@dataclass(frozen=True, eq=False)
class _Part:
    """Domains for somebody else to go on with; left: seconds."""

    domains: _Domains
    left: float


@dataclass(frozen=True, eq=False)
class _Report:
    """What became of a part: the domains that are open now (None: one of them cannot be proved), and how many it took."""

    domains: _Domains | None
    count: int


@dataclass(eq=False)
class _Shared:
    """Domains that others work on (`parallel.Shared`); out: the parts that they have; failed: one of them cannot be proved."""

    open: _Domains
    count: int
    deadline: float
    most: int
    failed: bool = False
    out: list[_Part] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether all is proved, or nothing ever will be, or time or domains have run out."""
        done = not (len(self.open) or self.out)
        return done or self.failed or time.monotonic() > self.deadline or self.count > self.most

    def __len__(self) -> int:
        return len(self.open)

    def take(self, shares: int) -> _Part | None:
        """Every so many-th of the domains with the least bounds."""
        if not len(self.open):
            return None
        chosen = torch.zeros_like(self.open.bound, dtype=torch.bool)
        chosen[self.open.bound.argsort()[::shares][: parallel.MOST]] = True
        part = _Part(self.open.take(chosen), self.deadline - time.monotonic())
        self.open = self.open.take(~chosen)
        self.out.append(part)
        return part

    def merge(self, part: _Part, report: _Report) -> None:
        """Its open domains are open here."""
        self.count += report.count
        if report.domains is None:
            self.failed = True
        else:
            self.open = _Domains.join([self.open, report.domains])
        self.out.remove(part)

    def back(self, part: _Part, lost: bool) -> None:
        """As it was handed out; if lost, it is not proved."""
        self.failed = self.failed or lost
        self.open = _Domains.join([self.open, part.domains])
        self.out.remove(part)


class _Tree:
    """The undecided neurons of one sample, in one vector of length U, and the bounds of domains over them."""

    def __init__(self, sweep: Sweep, sample: int, y: int) -> None:
        self.sweep, self.y = sweep, y
        self.owner = torch.tensor([sample], device=sweep.graph.device)
        self.places: dict[int, Tensor] = {}
        self.parts: dict[int, slice] = {}
        start = 0
        columns: list[list[Tensor]] = []
        for i, bend in sweep.bends.items():
            one = bend.take(self.owner)
            place = _flat(one.crossing)[0].nonzero()[:, 0]
            self.places[i], self.parts[i] = place, slice(start, start + len(place))
            start += len(place)
            shape, node = one.shape, one.shape.node
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
            )
            columns.append([_flat(v.double())[0, place] for v in values])
        self.up, self.above, self.c, self.here, self.error, self.slope, self.down = (torch.cat(v) for v in zip(*columns))

    def roots(self, rivals: Tensor) -> _Domains:
        """One domain for each rival, all neurons free."""
        size = (len(rivals), len(self.up))
        zero = self.up.new_zeros(size, dtype=torch.float32)
        return _Domains(
            rivals.to(zero.device),
            zero,
            self.down.float().expand(size).clone(),
            zero.clone(),
            zero[:, 0].double(),
            zero.clone(),
        )

    def work(self, part: _Part, seconds: float) -> _Report:
        """Go on with a part for so many seconds (`parallel.Problem`)."""
        begin, count, domains = time.monotonic(), 0, part.domains
        while len(domains) and time.monotonic() < begin + part.left:
            left, made = self.grown(domains)
            count += made
            if left is None:
                return _Report(None, count)
            domains = left
            if time.monotonic() > begin + seconds:
                break
        return _Report(domains, count)

    def grown(self, open_: _Domains) -> tuple[_Domains | None, int]:
        """The worst domains replaced by their unproved children (None: one cannot be proved), and how many were bounded."""
        order = open_.bound.argsort()
        worst, rest = open_.take(order[:WIDTH]), open_.take(order[WIDTH:])
        ended = ~(torch.where(worst.sign == 0, worst.score, 0.0) > 0).any(1)  # no relaxation is left to remove
        if ended.any():  # only the multipliers can be wrong: once more, with patience
            if len(self.bounded(worst.take(ended.nonzero()[:, 0]), LAST).unproved()):
                return None, 0
            worst = worst.take((~ended).nonzero()[:, 0])
        if not len(worst):
            return rest, 0
        children = self.bounded(self.split(worst), STEPS)
        return _Domains.join([rest, children.unproved()]), len(children)

    def split(self, parents: _Domains) -> _Domains:
        """Two children for each: the free neuron whose relaxation adds most is on, or off."""
        place = torch.where(parents.sign == 0, parents.score, -1.0).argmax(1)
        children = _Domains.join([parents, parents])
        signs = children.sign.clone()
        on = torch.ones_like(place, dtype=signs.dtype)
        signs = signs.scatter(1, place.repeat(2)[:, None], torch.cat([on, -on])[:, None])
        return _Domains(children.rival, signs, children.alpha, children.beta, children.bound, children.score)

    def bounded(self, domains: _Domains, steps: int) -> _Domains:
        """The domains with bounds proved in float64 at the best slopes and multipliers that Adam finds."""
        alpha, beta = domains.alpha.clone(), domains.beta.clone()
        scale = torch.ones_like(alpha)
        best = alpha.new_full((len(domains),), -math.inf, dtype=torch.float64)
        kept = [alpha.clone(), beta.clone()]
        moments = [[torch.zeros_like(alpha), torch.zeros_like(alpha)] for _ in range(2)]
        for step in range(1, steps + 1):
            with torch.enable_grad():
                alpha, beta = alpha.detach().requires_grad_(True), beta.detach().requires_grad_(True)
                value, _, size = self._margin(self.sweep.fast, domains, alpha, beta)
                pulls = torch.autograd.grad(value.sum(), (alpha, beta))
            better = value.detach() > best
            best = torch.where(better, value.detach(), best)
            for k, now in enumerate((alpha, beta)):
                kept[k][better] = now.detach()[better]
            if step == 1:  # multipliers are about as large as coefficients
                scale = size.clamp(min=1e-6)
            moves = []
            for (first, second), g in zip(moments, pulls):
                first.mul_(0.9).add_(g, alpha=0.1)
                second.mul_(0.99).addcmul_(g, g, value=0.01)
                moves.append((first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-12))
            rate = 0.3 * 0.1 ** (step / steps)
            slope = self.slope.float()
            alpha = torch.minimum(torch.maximum(alpha.detach() + rate * moves[0], slope), torch.ones_like(slope))
            beta = ((beta.detach() + rate * scale * moves[1]).clamp(min=0)) * (domains.sign != 0)
        # float32 may have rounded a slope out of its range
        slopes = torch.minimum(torch.maximum(kept[0].double(), self.slope), torch.ones_like(self.slope))
        value, score, _ = self._margin(self.sweep.exact, domains, slopes, kept[1].double())
        return _Domains(domains.rival, domains.sign, kept[0], kept[1], value, score.float())

    def _margin(self, kind: Arithmetic, domains: _Domains, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lower bounds on the margins `(R,)`, what each free neuron's relaxation adds and its coefficient's size, `(R, U)`."""
        sweep, nodes = self.sweep, self.sweep.graph.nodes
        last = len(nodes) - 1
        eye = torch.eye(sweep.graph.outputs, dtype=kind.dtype, device=alpha.device)
        weight: dict[int, Tensor] = {last: eye[domains.rival] - eye[self.y]}
        owner = self.owner
        constant = kind.floors[last][owner.expand(len(domains))]
        score, size = torch.zeros_like(alpha), torch.zeros_like(alpha)
        for i in range(last, 0, -1):
            if i not in weight:
                continue
            node, w = nodes[i], weight.pop(i)
            if node.map is not None:
                if i in kind.errors:
                    constant = constant + _dot(w.abs(), kind.errors[i][self.owner])
                for j, back in zip(node.inputs, kind.maps[i].transpose(w)):
                    _accumulate(weight, j, back)
                continue
            if i in kind.planes:
                off, far = kind.planes[i].pull(weight, node.inputs, w, owner)
                constant = constant + off + far
                continue
            line = kind.lines[i].take(self.owner)
            if i not in self.parts:
                constant = constant + _dot(w, line.off) + _dot(w.abs(), line.far)
                _accumulate(weight, node.inputs[0], torch.addcmul(w * line.mid, w.abs(), line.rad))
                continue
            place, part = self.places[i], self.parts[i]
            off, far, mid = (_flat(v)[0].clone() for v in (line.off, line.far, line.mid))
            off[place], far[place], mid[place] = 0.0, 0.0, 0.0
            flat = _flat(w)
            constant = constant + (flat @ off + flat.abs() @ far).double()
            coefficient, added, gain = self._neurons(flat[:, place], part, domains.sign[:, part], alpha[:, part], beta[:, part])
            constant = constant + added.double().sum(1)
            score[:, part], size[:, part] = gain.detach(), flat[:, place].detach().abs()
            flat = (flat * mid).index_copy(1, place, coefficient)
            _accumulate(weight, node.inputs[0], _unflat(flat, node.shape))
        a = _flat(weight[0])
        z = sweep.centre[last][self.owner[0]]
        here = z[self.y] - z[domains.rival]
        total = constant + sweep.inputs.upper(a, owner)
        return here - total - 2.0**-50 * (z.abs().max() + total.abs()), score, size

    def _neurons(self, w: Tensor, part: slice, sign: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For coefficients w `(R, u)` of undecided neurons: the coefficients of their inputs, and what the bound grows by."""
        up, above, c, here, error, slope = (
            v[part].to(w.dtype) for v in (self.up, self.above, self.c, self.here, self.error, self.slope)
        )
        plus = w.clamp(min=0)
        minus = w - plus
        relaxed = plus * above + minus * (alpha * c - here)
        side = torch.where(sign > 0, 1.0, slope)  # the neuron's slope where its sign is chosen
        push = beta * sign
        coefficient = torch.where(sign == 0, plus * up + minus * alpha, w * side + push)
        added = torch.where(sign == 0, relaxed, w * (side * c - here) + push * c)
        size = w.abs() * (above.abs() + c.abs() + here.abs() + FAINT) + beta * c.abs()
        slack = coefficient.abs() * error + (w.shape[1] + 64) * 2.0**-52 * size  # of the products and of their sum
        return coefficient, added + slack, torch.where(sign == 0, relaxed, 0.0)
