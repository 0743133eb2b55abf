"""Branch and bound over cones of directions."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound
from wassail.certificates.exact.cells import inequalities
from wassail.certificates.exact.programs import Array, nearest_point, support
from wassail.certificates.exact.relaxation import Substituted, substitute, triangle
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.relax.backward import Ascent
from wassail.certificates.search.frontier import Frontier, Heap
from wassail.errors import InputError
from wassail.geometry import maximiser, vector_norm
from wassail.rounding import UNIT, sized
from wassail.threat import dual
from wassail.ties import BAND, first_largest, steep_below

CLOSED = 1e-11  # a node this close to the incumbent, relative to it, is not split again
INSIDE = 1e-8  # how far outside a cone, relative to its rows, a solver's direction may lie
SAME = 1e-9  # relative tolerance of the tightness test
STARTS = 512  # directions that the ascent starts from, over all pairs
ASCENT = 20  # steps it takes
POLISHED = 3  # of its best ends, how many are polished
BATCH = 64  # nodes split at a time
MULTIPLIER_STEPS = 14  # on the multipliers of a node
RATE = 0.1  # of these steps, in units of the multipliers' natural size
CUTS = 20  # steps on the multipliers of walls
SHARE = 1e-3  # of the largest loss, for a neuron of an earlier layer to be split first


def pairs_of(network: Piecewise, labels: Sequence[int]) -> list[tuple[int, int]]:
    """All `(k, j)`, k a label that occurs and j a rival."""
    present = sorted({int(k) for k in labels})
    if not present or not 0 <= present[0] <= present[-1] < network.outputs:
        raise InputError(
            f"labels {present} do not fit {network.outputs} outputs: give labels from 0 to "
            f"{network.outputs - 1}."
        )
    if network.outputs < 2:
        raise InputError(
            "the network has one output, so there is no rival class: stack a second logit, for "
            "example 0."
        )
    return [(k, j) for k in present for j in range(network.outputs) if j != k]


def gaps_of(network: Piecewise, pairs: Sequence[tuple[int, int]]) -> Piecewise:
    """The bias-free network with one output `theta0_j - theta0_k` per pair."""
    head = torch.zeros(len(pairs), network.outputs, dtype=torch.float64)
    for row, (k, j) in zip(head, pairs):
        row[j], row[k] = 1, -1
    return network.homogeneous().head(head)


@dataclass(frozen=True, eq=False)
class Rounding:
    """What rounding errors of a network are relative to: the same paths with absolute values, all
    neurons open.

    preactivation `(H,)`, output `(T,)`: over the unit ball, the error of a linear bound on either
    by back-substitution; ends `(T, n)`: the absolute slopes of the outputs.
    """

    network: Piecewise
    relative: float
    ends: Tensor
    preactivation: Tensor
    output: Tensor

    @classmethod
    def of(cls, network: Piecewise, norm: float) -> Rounding:
        """The rounding errors of a network, by magnitudes."""
        steep = network.slope.abs().clamp(min=1)  # no neuron is steeper, on either side
        a, b, c, d = (
            sized(v.abs()) for v in (network.A, network.B * steep, network.C, network.D * steep)
        )
        zero = torch.zeros_like
        s = dual(norm)
        ones = torch.ones_like(network.slope)
        size = Piecewise(a, b, zero(network.c), c, d, zero(network.e), ones, network.layer)
        # one long sum a layer
        relative = (len(network.blocks()) + 2) * (network.neurons + network.inputs + 8) * UNIT
        paths = torch.linalg.inv(torch.eye(network.neurons, dtype=torch.float64) - b)
        # |v_h| <= reach_h on the unit ball, and intercepts are at most that
        reach = vector_norm(paths @ a, s)
        ends = c + d @ paths @ a
        output = vector_norm(ends, s) + d @ paths @ reach
        return cls(
            size, relative, ends, relative * sized(reach + paths @ reach), relative * sized(output)
        )


def values_at(gaps: Piecewise, rounding: Rounding, u: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """Directions `(m, n)` shrunk to length at most 1, and a lower bound on each gap there, `(m,
    T)`, rounded down.
    """
    length = vector_norm(u, norm)
    u = u / torch.where(length > 0, length, 1)[:, None] * (1 - (u.shape[1] + 4) * UNIT)
    return u, gaps.logits(u) - rounding.relative * rounding.network.logits(u.abs())


def unit_rows(rows: Array) -> Array:
    """The rows that are not zero, scaled to length one."""
    length = np.linalg.norm(rows, axis=1)
    return np.asarray(rows[length > 0] / length[length > 0, None])


def opens(network: Piecewise, mask: Tensor) -> bool:
    """Whether the recession cone of a cell has a nonempty interior."""
    cone = unit_rows(inequalities(network, mask)[0].numpy())
    return nearest_point(cone, np.full(len(cone), -1.0), np.zeros(network.inputs)) is not None


@dataclass(frozen=True, eq=False)
class _Node:
    """An open node: its upper bound, which output, state int8 `(H,)` (-1 free, 0 and 1 held),
    multipliers float32 `(H,)`, neuron to split.
    """

    bound: float
    output: int
    state: Tensor
    alpha: Tensor
    beta: Tensor
    split: int


class ConeSearch(Frontier[list[_Node]]):
    """Branch and bound on the neurons of the bias-free network, over the unit r-ball.

    A node is a pair and the sides that some neurons are held on. Its upper bound is linear bound
    propagation with the split constraints as multipliers (alpha, beta-CROWN; Zhang et al. 2018,
    Wang et al. 2021): a free neuron lies between `alpha v` and its chord, a held one is linear and
    adds `+-beta v >= 0`, and the linear function of u that is left is bounded by its dual norm.
    Every alpha in `[slope, 1]` and `beta >= 0` is sound. Where nothing nonlinear is left, (*) is
    solved exactly.
    """

    def __init__(self, network: Piecewise, norm: float, labels: Sequence[int], seed: int) -> None:
        self.pairs = pairs_of(network, labels)
        self.gaps = gaps_of(network, self.pairs)
        self.norm = norm
        self.rounding = Rounding.of(self.gaps, norm)
        self.generator = torch.Generator().manual_seed(seed)
        self.lower = 0.0
        self.witness = torch.zeros(network.inputs, dtype=torch.float64)
        self.pair = self.pairs[0]
        # the largest upper bound among the nodes that are done; before the roots are bounded, a
        # bound on everything
        most = vector_norm(self.rounding.ends, dual(norm)) + self.rounding.output
        self.ceiling = float(most.max())
        self.closed = self.ceiling
        self.open: Heap[_Node] = Heap()
        self.count = 0
        self.most = math.inf

    def run(self, nodes: int | None) -> Bound:
        """Ascent, the root, then the search; the bracket is valid whenever it stops."""
        start = time.monotonic()
        cut = False
        self.most = math.inf if nodes is None else nodes
        try:
            clock.check()
            self.ascend()
            self.begun()
            self.proceed()
            cut = not self.done and self.count < self.most and clock.out_of_time()
        except KeyboardInterrupt:
            pass
        except clock.Late:
            cut = clock.out_of_time()
        top = self.open.loosest if len(self.open) else 0.0
        upper = max(self.closed, top, self.lower)
        info = {"norm": self.norm, "label": self.pair[0], "rival": self.pair[1]}
        info |= {"nodes": self.count, "seconds": time.monotonic() - start, "cut": cut}
        info |= {"seed": self.generator.initial_seed()}
        method = "ascent and relaxation" if nodes == 0 else "branch"
        return Bound(self.lower, upper, method, self.witness, info)

    def begun(self) -> None:
        """One root for each pair."""
        free = torch.full((len(self.pairs), self.gaps.neurons), -1, dtype=torch.int8)
        half = torch.full(free.shape, 0.5, dtype=torch.float64)
        zero = torch.zeros(free.shape, dtype=torch.float64)
        known = [self.ceiling] * len(free)
        closed = self.bound(free, torch.arange(len(free)), half, zero, known)
        self.closed = closed

    @property
    def over(self) -> bool:
        """Whether no open node can raise the answer, or time or nodes have run out."""
        return self.done or self.count >= self.most or clock.late()

    @property
    def done(self) -> bool:
        """Whether no open node can raise the answer."""
        return not len(self.open) or self.open.loosest <= self.cutoff

    @property
    def cutoff(self) -> float:
        """Nodes up to here are done: they cannot raise the answer by more than rounding errors."""
        return self.lower * (1 + CLOSED) + 16 * float(self.rounding.output.max())

    def offer(self, u: Tensor) -> Tensor:
        """Evaluate all gaps at directions `(m, n)`, keep the best; returns the values `(m, T)`."""
        u, values = values_at(self.gaps, self.rounding, u, self.norm)
        row, output = divmod(int(values.argmax()), values.shape[1])
        if float(values[row, output]) > self.lower:
            self.lower = float(values[row, output])
            self.witness = u[row].clone()
            self.pair = self.pairs[output]
        return values

    def gradient(self, u: Tensor, output: Tensor) -> Tensor:
        """The gradients of the gaps `output` `(m,)` at u `(m, n)`: `(m, n)`."""
        slope = torch.where(self.gaps.mask(u), 1.0, self.gaps.slope)
        return self.pulled(output, (slope, slope)).x

    def pulled(
        self, output: Tensor, lines: tuple[Tensor, Tensor], extra: Tensor | None = None
    ) -> Substituted:
        """The gaps `output` `(m,)` as linear functions of u, by slopes of the neurons."""
        gaps = self.gaps
        weights = (gaps.A, gaps.B)
        return substitute(gaps.blocks(), weights, gaps.C[output], gaps.D[output], lines, extra)

    def ascend(self) -> None:
        """Power steps `u <- M_r(J(u)^T (e_j - e_k))`, shorter where the full one overshoots;
        then the best cells' maxima.
        """
        n = self.gaps.inputs
        pairs = len(self.pairs)
        axes = torch.eye(n, dtype=torch.float64)
        random = torch.randn(
            max(STARTS // pairs, 16), n, dtype=torch.float64, generator=self.generator
        )
        u = torch.cat([random, axes, -axes])
        output = torch.arange(pairs).repeat_interleave(len(u))
        u = u.repeat(pairs, 1)
        value = torch.full((len(u),), -math.inf, dtype=torch.float64)
        with suppress(clock.Late):
            for _ in range(ASCENT):
                target = maximiser(self.gradient(u, output), self.norm)
                for step in (1.0, 0.3, 0.1, 0.03):
                    clock.look()
                    trial = u + step * (target - u)
                    trial = trial / vector_norm(trial, self.norm).clamp(min=1e-300)[:, None]
                    new = self.gaps.logits(trial).gather(1, output[:, None])[:, 0]
                    better = new > value
                    u = torch.where(better[:, None], trial, u)
                    value = torch.where(better, new, value)
        self.offer(u)
        # many starts end in the same place
        rounded = (value / max(self.ceiling, 1e-300)).numpy().round(9)
        different = np.unique(rounded, return_index=True)[1]
        for index in different[-POLISHED:].tolist():
            clock.check()
            self.polish(u[index], int(output[index]))

    def polish(self, u: Tensor, output: int) -> None:
        """From cell to better cell: the maximum over the cell's cone, then the steepest cell
        around it.
        """
        value = -math.inf
        for _ in range(ASCENT):
            g = self.gradient(u[None], torch.tensor([output]))[0]
            cone = inequalities(self.gaps, self.gaps.mask(u[None])[0])[0]
            best = torch.from_numpy(support(g.numpy(), unit_rows(cone.numpy()), self.norm)[0])[None]
            new = float(self.offer(best)[0, output])
            if new <= value * (1 + CLOSED):
                return
            value = new
            around = best + 1e-4 * torch.randn(
                64, len(u), dtype=torch.float64, generator=self.generator
            )
            u = around[self.offer(around)[:, output].argmax()]

    def step(self) -> None:
        """Bound the two children of every node, each with its parent's multipliers."""
        with self.taken(self.open.first(BATCH)) as nodes:
            rows = torch.arange(len(nodes))
            state = torch.stack([node.state for node in nodes]).repeat(2, 1)
            split = torch.tensor([node.split for node in nodes])
            state[rows, split] = 0
            state[rows + len(nodes), split] = 1
            output = torch.tensor([node.output for node in nodes]).repeat(2)
            alpha = torch.stack([node.alpha for node in nodes]).double().repeat(2, 1)
            beta = torch.stack([node.beta for node in nodes]).double().repeat(2, 1)
            known = [node.bound for node in nodes] * 2
            self.closed = max(self.closed, self.bound(state, output, alpha, beta, known))

    def bound(
        self, state: Tensor, output: Tensor, alpha: Tensor, beta: Tensor, known: list[float]
    ) -> float:
        """Bound nodes given as rows, `known` being upper bounds so far. Those that stay open go on
        the heap; the largest bound of the others is returned.
        """
        closed = 0.0
        self.count += len(state)
        size = self.gaps.neurons * (self.gaps.neurons + self.gaps.inputs)
        steps = 4 * MULTIPLIER_STEPS
        clock.spend(len(state) * (steps + 8 * self.gaps.neurons) * size + steps * clock.STEP)
        low, high = self.intervals(state)
        value, alpha, beta, loss = self.relax(state, output, low, high, alpha, beta)
        for i in range(len(state)):
            upper = min(float(value[i]), known[i])
            split = _choose(loss[i], self.gaps.layer)
            if upper > self.cutoff and float(loss[i].sum()) <= CLOSED / 10 * upper:
                upper, split = self.solve(state[i], int(output[i]), low[i], high[i], upper)
            if upper <= self.cutoff or split < 0:
                closed = max(closed, upper)
            else:
                multipliers = (alpha[i].float(), beta[i].float())
                self.open.push(_Node(upper, int(output[i]), state[i], *multipliers, split))
        return closed

    def intervals(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds on every preactivation over the nodes, `(m, H)` each, layer by layer; held neurons
        keep their side.

        A held neuron leaves a constraint `wall . u + rest >= 0` behind (the linear bound on its own
        side), which tightens the bounds of the layers after it.
        """
        m = len(state)
        network = self.gaps
        low, high, rest = (torch.zeros(state.shape, dtype=torch.float64) for _ in range(3))
        walls = torch.zeros(*state.shape, network.inputs, dtype=torch.float64)
        for rows in network.blocks():
            clock.look()
            before = slice(0, rows.start)
            ends = (low[:, before], high[:, before])
            lines = triangle(*ends, network.slope[before], state[:, before])
            line, chord, offset = (v[:, None] for v in lines)
            sides = []
            for sign in (1, -1):
                t, x = (sign * v[rows].expand(m, -1, -1) for v in (network.B[:, before], network.A))
                weights = (network.A, network.B)
                a, c, _ = substitute(network.blocks(), weights, x, t, (chord, line))
                b = (c.clamp(min=0) * offset).sum(-1) + self.rounding.preactivation[rows]
                sides.append((a, b, _cut(a, b, walls[:, before], rest[:, before], self.norm)))
            active = state[:, rows] == 1
            inactive = state[:, rows] == 0
            high[:, rows] = torch.where(inactive, 0.0, sides[0][2])
            low[:, rows] = torch.where(active, 0.0, -sides[1][2])
            walls[:, rows] = active[..., None] * sides[0][0] + inactive[..., None] * sides[1][0]
            rest[:, rows] = active * sides[0][1] + inactive * sides[1][1]
        return low, high

    def relax(
        self, state: Tensor, output: Tensor, low: Tensor, high: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Minimise the upper bounds over alpha and beta: the bounds `(m,)`, both, and what each
        free neuron loses, `(m, H)`.
        """
        slope = self.gaps.slope
        rounding = self.rounding
        line, chord, offset = triangle(low, high, slope, state)
        free = state < 0
        side = (state == 1).double() - (state == 0).double()
        width = torch.maximum(high, -low).clamp(min=1e-300)
        # multipliers of this size move the bound by the answer's size
        unit = max(self.lower, 1e-3 * self.ceiling) / width
        # on one side almost everywhere: start from the line of that side
        nearly = torch.minimum(high, -low) < 1e-6 * width
        alpha = torch.where(nearly, line, alpha).requires_grad_()
        beta = (beta / unit).requires_grad_()
        ascent = Ascent((alpha, beta, torch.zeros_like(beta)), 0.001, 1e-8 * self.ceiling)
        for step in range(MULTIPLIER_STEPS):
            if step and clock.out_of_time():
                break
            with torch.no_grad():
                alpha.copy_(torch.maximum(alpha, slope).clamp(max=1))
                beta.clamp_(min=0)
            lower_line = torch.where(free, alpha, line)
            a, c, _ = self.pulled(output, (chord, lower_line), side * unit * beta)
            raised = (c.clamp(min=0) * offset).sum(-1)
            value = torch.linalg.vector_norm(a, dual(self.norm), dim=-1) + raised
            with torch.no_grad():
                pushed = (side.abs() * unit * beta) @ rounding.preactivation
                sound = value + rounding.output[output] + pushed
                below = torch.maximum((1 - alpha) * high, (slope - alpha) * low)
                loss = torch.where(free, c.clamp(min=0) * offset - c.clamp(max=0) * below, 0.0)
                ascent.keep(-sound, (alpha, unit * beta, loss))
                if step % 5 == 0:
                    self.offer(maximiser(a, self.norm))
            best = -ascent.best
            if (best <= self.cutoff).all():
                break
            moves = ascent.moves(torch.autograd.grad(value.sum(), (alpha, beta)))
            with torch.no_grad():
                for variable, move in zip((alpha, beta), moves):
                    assert move is not None
                    variable -= RATE * move
        alpha, beta, loss = ascent.kept
        return best, alpha, beta, loss

    def solve(
        self, state: Tensor, output: int, low: Tensor, high: Tensor, upper: float
    ) -> tuple[float, int]:
        """(*) at a node where the gap is linear up to rounding: its upper bound, and the next
        neuron to split or -1.

        A free neuron errs by at most `min(high, -low)`; the error travels along the paths that held
        neurons leave open. Constraints that it reaches are left out, and if that costs something
        the neuron is split.
        """
        gaps = self.gaps
        mask = (state == 1) | ((state < 0) & steep_below(low, high))
        error = torch.where(state < 0, torch.minimum(high, -low) * (1 - gaps.slope), 0.0)
        through = torch.where(state == 0, gaps.slope.abs(), gaps.slope.abs().clamp(min=1))
        spread = torch.linalg.solve(
            torch.eye(gaps.neurons, dtype=torch.float64) - through[:, None] * gaps.B.abs(), error
        )
        wrong = gaps.B.abs() @ spread
        rows = inequalities(gaps, mask)[0]
        length = torch.linalg.vector_norm(rows, 2, dim=1)
        lost = (state >= 0) & (wrong > CLOSED * length)
        used = (state >= 0) & (length > 0) & ~lost
        g = gaps.jacobian(mask[None])[0, output]
        u, y = support(g.numpy(), (rows[used] / length[used, None]).numpy(), self.norm)
        self.offer(torch.from_numpy(u)[None])
        weight = torch.from_numpy(y) / length[used]
        value = torch.linalg.vector_norm(g - rows[used].T @ weight, dual(self.norm))
        value = value + self.rounding.output[output]
        off = (wrong + self.rounding.preactivation)[used]
        value = value + (gaps.D[output].abs() @ spread + weight @ off)
        return min(upper, float(value)), int(first_largest(error)) if lost.any() else -1


def _cut(a: Tensor, b: Tensor, walls: Tensor, rest: Tensor, norm: float) -> Tensor:
    """An upper bound on `max(0, a . u + b)` over the unit ball cut by `walls u + rest >= 0`: `(m,
    k)`, rounded up.

    a `(m, k, n)`, b `(m, k)`, walls `(m, h, n)`, rest `(m, h)`. By weak duality it is `||a + y
    walls||_s + b + y . rest` for any `y >= 0`; accelerated projected gradient steps on the 2-norm
    choose y, the better of that and 0 counts.
    """
    s = dual(norm)
    plain: Tensor = torch.linalg.vector_norm(a, s, dim=-1) + b
    if not walls.any():
        return plain
    length = torch.linalg.vector_norm(walls, 2, dim=-1)
    scale = torch.where(length > 0, 1 / length.clamp(min=1e-300), 0.0)
    walls = walls * scale[..., None]
    rest = rest * scale
    gram = walls @ walls.mT
    cross = a @ walls.mT
    step = 1 / gram.abs().sum(-1).amax(-1).clamp(min=1)[:, None, None]
    y = point = torch.zeros_like(cross)
    for i in range(CUTS):
        size = torch.linalg.vector_norm(a + point @ walls, 2, dim=-1, keepdim=True)
        new = (point - step * (cross + point @ gram + size * rest[:, None])).clamp(min=0)
        point = new + i / (i + 3) * (new - y)
        y = new
    # With h walls: h + 2 roundings in `a + y walls`, n + 2 in its length, h + 1 in `y . rest` and 2
    # in the sum of all. `y . rest` needs no term of its own for its share c: at the best u, with `q
    # = walls u + rest >= 0`, the value is too large by `y . q + error . |u|` at least, and `c y .
    # rest = c (y . q - y walls u) <= y . q + error . |u|`.
    error = (2 * walls.shape[1] + walls.shape[2] + 8) * UNIT * (a.abs() + y @ walls.abs())
    length = torch.linalg.vector_norm((a + y @ walls).abs() + error, s, dim=-1)
    return torch.minimum(plain, length + b + (y @ rest[..., None])[..., 0]).clamp(min=0)


def _choose(loss: Tensor, layer: Tensor) -> int:
    """The neuron to split: of the first layer where one loses a fair share of the largest loss, the
    worst; -1 if none loses.

    Early layers first: their walls are exact, and what they settle tightens all later layers.
    """
    if not (loss > 0).any():
        return -1
    fair = loss >= SHARE * (1 - BAND) * loss.max()
    return int(first_largest(torch.where(layer == layer[fair].min(), loss, -math.inf)))
