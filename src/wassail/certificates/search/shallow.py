"""Branch and bound for networks with one layer of ReLUs: whether an output can be 0 or less.

For `g(x) = c0 + sum_k c_k relu(z_k)`, `z = W x + b`, on a box only neurons with `c_k < 0` are worth
a split: the others are convex, and linear bounds with the best slopes are exact for them. A split
`z_j >= 0` or `z_j <= 0` is a half-space of inputs. It fixes one neuron, and it bounds all others
better: the range of every `z_k` on the box with that half-space is a table of the root, one entry
for each pair of neurons (cf. Clip-and-Verify, Zhou et al. 2025). On the 30 inputs of `safenlp` this
leaves a twentieth of the domains. Bounds are those of beta-CROWN (Wang et al. 2021): a multiplier
for each half-space and a slope for each convex neuron, by steps along the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.search.frontier import Frontier, Table, TensorRows
from wassail.rounding import FAINT, FLOOR, UNIT

WIDTH = 512  # domains split at once
ROOT = 100  # steps at the root
STEPS = 16  # at every other domain, which starts where its parent stopped
LAST = 300  # at a domain with nothing left to split
RATE = 0.2  # the first step, relative to the size of a coefficient
TIES = 0.05  # of what is left: splits that are as good otherwise are told apart by urgency
CANDIDATES = 12  # neurons whose split is looked at
# Operations of a step beside its products, measured: once, and for each number of a domain.
OVERHEAD = 3e5
EACH = 30
PAIRS = 1 << 22  # numbers of a part of the table that is made at once
WIDEST = 2000  # neurons: the table has four numbers for each pair


@dataclass(frozen=True, eq=False)
class Shallow:
    """`c0 + c relu(w x + b)`, with what rounding of its parts may be off by.

    Args:
        w: `(u, n)`.
        b: `(u,)`.
        c: `(R, u)`, a row for each output.
        c0: `(R,)`.
        size: magnitudes that the entries of c are sums of, at least `FAINT`, `(R, u)`.
        size0: those of c0, `(R,)`.
        terms: how many terms those sums have.
    """

    w: Tensor
    b: Tensor
    c: Tensor
    c0: Tensor
    size: Tensor
    size0: Tensor
    terms: int

    def combined(self, factors: Tensor) -> Shallow:
        """One output: the sum of all with these factors, `(R,)`."""
        sizes = factors.abs()[None]
        return replace(
            self,
            c=factors[None] @ self.c,
            c0=factors[None] @ self.c0,
            size=(sizes @ self.size).clamp(min=FAINT),
            size0=sizes @ self.size0,  # a search adds `FAINT` to it
            terms=self.terms + len(factors),
        )


def shallow_of(graph: Graph) -> Shallow | None:
    """The network as one layer of ReLUs, None if it is none.

    Args:
        graph: the network.
    """
    chain = all(node.inputs == (k,) for k, node in enumerate(graph.nodes[1:]))
    if len(graph.nodes) < 4 or not chain or graph.arithmetic != "exact":
        return None
    first, relu, *rest = graph.nodes[1:]
    if relu.slope is None or bool((relu.slope != 0).any()):
        return None
    layers = [node.layer for node in (first, *rest) if node.layer is not None]
    if any(node.exponent for node in graph.nodes) or len(layers) <= len(rest):
        return None
    (w, b), *above = [(weight.double(), bias.double()) for weight, bias in layers]
    if len(b) > WIDEST:
        return None
    c = torch.eye(len(b), dtype=torch.float64)
    c0 = torch.zeros(len(b), dtype=torch.float64)
    size, size0 = c, c0
    terms = 0
    for matrix, bias in above:
        terms += matrix.shape[1] + 1
        c, c0 = matrix @ c, matrix @ c0 + bias
        size = (matrix.abs() @ size).clamp(min=FAINT)
        size0 = (matrix.abs() @ size0 + bias.abs()).clamp(min=FAINT)
    return Shallow(w, b, c, c0, size, size0, terms)


@dataclass(frozen=True, eq=False)
class Domains(TensorRows):
    """D domains: left, right `(D, n)`, the box around it; sign `(D, u)`, 1 or -1 where a half-space
    is chosen, else 0; low, high `(D, u)`, bounds on z; tilt `(D, u)`, the coefficients of z that
    steps have found; bound `(D,)`.
    """

    left: Tensor
    right: Tensor
    sign: Tensor
    low: Tensor
    high: Tensor
    tilt: Tensor
    bound: Tensor


class ShallowSearch(Frontier[Domains]):
    """The domains of one box on which the output may still be 0 or less.

    net: with one output, whose sign it is about; low, high: the box `(n,)`; accept: given points
    `(P, n)` where the output seems to be 0 or less, one that is a counterexample, or None. found:
    that point; stuck: whether a domain has nothing left to split; count: domains that were bounded.
    """

    def __init__(
        self,
        net: Shallow,
        low: Tensor,
        high: Tensor,
        accept: Callable[[Tensor], Tensor | None],
    ) -> None:
        self.net = net
        self.c = net.c[0]
        self.c0 = float(net.c0[0])
        middle, half = _halves(low, high)
        self.low, self.high = low, high
        self.accept = accept
        self.found: Tensor | None = None
        self.stuck = False
        self.count = 0
        self.scaled = net.w * half  # z = centre + scaled t, t in [-1, 1]^n
        self.centre = net.w @ middle + net.b
        span = middle.abs() + half
        # Products may underflow, unless there are none.
        used = (net.w != 0).any(1) | (net.b != 0)
        most = torch.where(used, (net.w.abs() @ span + net.b.abs()).clamp(min=FAINT), 0.0)
        terms = len(low) + len(self.c) + net.terms + 16
        self.error = 4 * terms * UNIT * most  # of a z, of a bound on it, and of sums of them
        reach = self.scaled.abs().sum(1)
        # What the sums of a bound lose: over inputs and neurons, and in the numbers of c. Bounds on
        # z exceed `most` by a part of it that the factor 8, where 3 would do, has plenty of.
        # Coefficients of inputs may underflow.
        known = (net.size[0] + self.c.abs()) @ most + FAINT * (1 + span.sum())
        self.lost = 8 * terms * UNIT * float(known + net.size0[0])
        self.root_low = self.centre - reach - self.error
        self.root_high = self.centre + reach + self.error
        self.filled = [False] * len(self.c)
        self.table_low = self.root_low.repeat(2, len(self.c), 1)
        self.table_high = self.root_high.repeat(2, len(self.c), 1)
        self.rate = RATE * self.c.abs().clamp(min=1e-3 * float(self.c.abs().max()) + 1e-300)
        none = torch.zeros(0, len(self.c), dtype=torch.float64)
        box = torch.zeros(0, len(low), dtype=torch.float64)
        self.open: Table[Domains] = Table(Domains(box, box, none, none, none, none, none[:, 0]))

    def begin(self) -> None:
        """The bound of the root."""
        low, high = self.root_low[None], self.root_high[None]
        zero = torch.zeros_like(low)
        start = torch.where(self.c > 0, self.c / 2, 0.0)[None]
        box = self.low[None], self.high[None]
        self._add(Domains(*box, zero, low, high, start, zero[:, 0]), ROOT)

    @property
    def done(self) -> bool:
        """Whether the output is above 0 on every domain."""
        return not len(self.open) and not self.stuck and self.found is None

    @property
    def over(self) -> bool:
        """Whether a counterexample is known, or a limit is reached."""
        return self.found is not None or self.stuck or clock.late()

    def step(self) -> None:
        """Split the domains with the least bounds."""
        with self.taken(self.open.first(WIDTH)) as domains:
            self._add(self._children(domains), STEPS)

    def fill_table(self, neurons: Tensor) -> None:
        """The ranges of every z_k on the root's box with `s z_j >= 0`, for some neurons j: rows of
        `table_low` and `table_high`, `(2, u, u)`, s = 1 first.

        The largest `v t` with `a t <= r` is at most `beta r + sum |v - beta a|` for every
        `beta >= 0`, least where an entry of `v - beta a` is 0.
        """
        for j in torch.unique(neurons).tolist():
            if self.filled[j]:
                continue
            clock.look()
            self.filled[j] = True
            for place, s in enumerate((1.0, -1.0)):
                a = -s * self.scaled[j]
                room = float(s * self.centre[j] + self.error[j])
                for side in (1.0, -1.0):
                    top = self._highest(side * self.scaled, a, room)
                    if side > 0:
                        bound = self.centre + top + self.error
                        self.table_high[place, j] = torch.minimum(self.root_high, bound)
                    else:
                        bound = self.centre - top - self.error
                        self.table_low[place, j] = torch.maximum(self.root_low, bound)
            self.table_low[0, j, j] = 0.0
            self.table_high[1, j, j] = 0.0

    def _highest(self, v: Tensor, a: Tensor, room: float) -> Tensor:
        """At least the largest `v_k t` in the cube with `a t <= room`, for all rows k."""
        usable = a != 0
        beta = (v[:, usable] / a[usable]).clamp(min=0)  # (u, those that are not 0)
        best = v.abs().sum(1)
        if not bool(usable.any()):
            return best
        part = max(1, PAIRS // (v.numel()))
        for some in torch.split(beta.T, part):  # (p, u)
            worth = some * room + (v - some[:, :, None] * a).abs().sum(2)
            # A multiplier may be large, and so may what its products are rounded by.
            worth = worth + 8 * len(a) * UNIT * some * (abs(room) + a.abs().sum())
            # One that overflows says nothing: where it is infinite, the sum may be no number.
            worth = torch.where(worth.isnan(), math.inf, worth)
            best = torch.minimum(best, worth.amin(0))
        return best

    def _children(self, domains: Domains) -> Domains:
        """Two children for each domain, split where they are expected to be bounded best."""
        axis = self._axis(domains)
        rows = torch.arange(len(domains))
        parts = []
        for place, s in enumerate((1.0, -1.0)):
            sign = domains.sign.clone()
            sign[rows, axis] = s
            low = torch.maximum(domains.low, self.table_low[place, axis])
            high = torch.minimum(domains.high, self.table_high[place, axis])
            # s z_j >= 0 on the box: -s w_j x is at most s b_j.
            row = -s * self.net.w[axis]
            least = torch.where(row > 0, row * domains.left, row * domains.right).sum(1)
            room = s * self.net.b[axis] - least + self.error[axis]
            box = _cut(domains.left, domains.right, row, room)
            parts.append(Domains(*box, sign, low, high, domains.tilt, domains.bound))
        both = parts[0].join(parts[1])
        full = ~_empty(both.low, both.high) & ~_empty(both.left, both.right)
        return self._ranged(both.take(full.nonzero()[:, 0]))

    def _ranged(self, domains: Domains) -> Domains:
        """Domains with what their boxes say of z."""
        middle, half = _halves(domains.left, domains.right)
        z = middle @ self.net.w.T + self.net.b
        reach = half @ self.net.w.abs().T + self.error
        low = torch.maximum(domains.low, z - reach)
        high = torch.minimum(domains.high, z + reach)
        full = (~_empty(low, high)).nonzero()[:, 0]
        return replace(domains, low=low, high=high).take(full)

    def _gaps(self, low: Tensor, high: Tensor) -> Tensor:
        """How far the relaxations of concave neurons are from them at most, `(..., u)`."""
        free = (low < 0) & (high > 0) & (self.c < 0)
        gap = self.c * high * low / torch.where(free, high - low, 1.0)
        return torch.where(free, gap, 0.0)

    def _axis(self, domains: Domains) -> Tensor:
        """The neuron to split: of those with the largest gaps the one whose split leaves least."""
        gaps = self._gaps(domains.low, domains.high)
        urgent = self._urgency(domains)
        some = min(CANDIDATES, gaps.shape[1])
        chosen = (gaps * (1 + urgent)).topk(some, 1).indices  # (D, some)
        self.fill_table(chosen[gaps.gather(1, chosen) > 0])
        left = torch.zeros(chosen.shape, dtype=torch.float64)
        for place in range(2):
            for k in range(some):
                axis = chosen[:, k]
                low = torch.maximum(domains.low, self.table_low[place, axis])
                high = torch.minimum(domains.high, self.table_high[place, axis])
                total = self._gaps(low, high).sum(1)
                total = torch.where((low <= high).all(1), total, 0.0)
                left[:, k] = torch.maximum(left[:, k], total) + 0.1 * torch.minimum(
                    left[:, k], total
                )
        left = left * (1 - TIES * urgent.gather(1, chosen))
        left = torch.where(gaps.gather(1, chosen) > 0, left, math.inf)
        return chosen.gather(1, left.argmin(1, keepdim=True))[:, 0]

    def _urgency(self, domains: Domains) -> Tensor:
        """How much a split of each neuron moves inputs that convex neurons depend on which are
        likely to be above 0, relative to the largest, `(D, u)`.
        """
        low, high = domains.low, domains.high
        free = (low < 0) & (high > 0)
        share = torch.where(free, high / torch.where(free, high - low, 1.0), 0.0)
        half = (domains.right - domains.left) / 2
        weight = (self.c.clamp(min=0) * share**2) @ self.net.w.abs() * half  # (D, n)
        found = (weight * half) @ self.net.w.abs().T
        found = found / (half @ self.net.w.abs().T).clamp(min=1e-300)
        return found / found.amax(1, keepdim=True).clamp(min=1e-300)

    def _add(self, domains: Domains, steps: int) -> None:
        """Bound domains and keep the open ones."""
        if not len(domains):
            return
        domains = self._bounded(domains, steps)
        domains = domains.take((~(domains.bound > 0)).nonzero()[:, 0])
        ended = ~(self._gaps(domains.low, domains.high) > 0).any(1)
        if bool(ended.any()) and self.found is None:
            last = self._bounded(domains.take(ended.nonzero()[:, 0]), LAST)
            self.stuck |= bool((~(last.bound > 0)).any())
        self.open.add(domains.take((~ended).nonzero()[:, 0]))

    def _bounded(self, domains: Domains, steps: int) -> Domains:
        """Domains with better coefficients and their bounds.

        The bound of a coefficient vector q of z is `base + q z` at its least over the box. q_k is
        c_k or 0 where the sign of z_k is known, between 0 and c_k where it is convex, c_k times
        the slope of the chord where it is concave; a chosen half-space may add to it what lowers
        the bound inside it.
        """
        clock.look()
        w, b = self.net.w, self.net.b
        middle, half = _halves(domains.left, domains.right)
        low, high, sign = domains.low, domains.high, domains.sign
        on, off = low >= 0, high <= 0
        convex = ~on & ~off & (self.c >= 0)
        chord = high / torch.where(on | off, 1.0, high - low)
        fixed = torch.where(on, self.c, torch.where(off, 0.0, self.c * chord))
        base = torch.where(on | off | convex, 0.0, -self.c * chord * low).sum(1) + self.c0
        # Allowed coefficients: an interval for each neuron.
        least = torch.where(convex, 0.0, fixed)
        most = torch.where(convex, self.c, fixed)
        least = torch.where(sign > 0, -math.inf, least)  # q - beta with z >= 0
        most = torch.where(sign < 0, math.inf, most)
        tilt = domains.tilt.clamp(least, most)
        best = torch.full_like(base, -math.inf)
        kept = tilt
        slope = torch.zeros_like(tilt)
        square = torch.zeros_like(tilt)
        lowest, where = math.inf, None
        for k in range(steps + 1):
            q = tilt @ w
            value = base + tilt @ b + (q * middle - q.abs() * half).sum(1)
            better = value > best
            best = torch.where(better, value, best)
            kept = torch.where(better[:, None], tilt, kept)
            point = middle - q.sign() * half
            z = point @ w.T + b
            seen = z.clamp(min=0) @ self.c + self.c0
            if float(seen.min()) < lowest:
                lowest, where = float(seen.min()), point[seen.argmin()]
            if k == steps:
                break
            slope = 0.7 * slope + 0.3 * z
            square = 0.9 * square + 0.1 * z**2
            rate = self.rate * (0.05 ** (k / max(steps, 1)))
            tilt = (tilt + rate * slope / (square.sqrt() + 1e-12)).clamp(least, most)
        if lowest <= 0 and where is not None and self.found is None:
            self.found = self.accept(where.clamp(self.low, self.high)[None])
        self.count += len(domains)
        beside = OVERHEAD + EACH * len(domains) * sum(w.shape)
        clock.spend((steps + 2) * (4 * len(domains) * w.numel() + beside))
        q = kept @ w
        value = base + kept @ b + (q * middle - q.abs() * half).sum(1)
        # Less all that rounding may add.
        bound = value - self.lost - kept.abs() @ (2 * self.error)
        # A point with a value of 0 or less lies where this line is 0 or less.
        left, right = _cut(domains.left, domains.right, q, (-bound).clamp(min=0))
        bound = torch.where(_empty(left, right), math.inf, bound)
        return Domains(left, right, sign, low, high, kept, bound)


def _empty(low: Tensor, high: Tensor) -> Tensor:
    """Which intervals `(D, k)` hold nothing in one of their places; an end that overflowed to no
    number excludes nothing.
    """
    return (low > high).any(1)


def _halves(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The middles of boxes and half their widths, rounded up: the box around the middle holds the
    box itself.
    """
    middle = low + (high - low) / 2
    wide = torch.maximum(middle - low, high - middle)
    return middle, wide + 4 * UNIT * (middle.abs() + wide)


def _cut(left: Tensor, right: Tensor, row: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest boxes, rounded outward, around the points at which `row x` is at most so much
    above its least on each box; room: that much, `(D,)`, negative where there is none.
    """
    size = row.abs()
    used = size > 0
    reach = torch.where(used, room[:, None] / torch.where(used, size, 1.0), math.inf)
    slack = 8 * UNIT * (left.abs() + right.abs()) + FLOOR[torch.float64]
    top = torch.where(row > 0, left + reach + slack, math.inf)
    bottom = torch.where(row < 0, right - reach - slack, -math.inf)
    return torch.maximum(left, bottom), torch.minimum(right, top)
