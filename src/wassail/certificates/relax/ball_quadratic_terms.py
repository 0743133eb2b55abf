"""The balls of all layers, and how they hang together.

A layer of ReLUs moves by at most `||W||_2` times what the layer before it moves, after its ReLUs.
That is a radius. It is more than a radius where a quadratic term is handed on: `(lam / 2) ||d||^2`
is at most `(lam / 2) ||W||^2` times the square of the OUTPUTS of the layer before, and these are
shorter than its inputs where ReLUs cut them off.

At the first layer a bound ends with `<a, d> + (lam / 2) ||W d||^2`, d the deviation of the input
and W the first layer. By lengths alone this is at most `||a|| r + (lam / 2) ||W||^2 r^2`; but a
direction that W stretches by its norm is seldom that of `a`. For every `mu > lam ||W||^2`, with `H
= mu - lam W^T W`,

    <a, d> + (lam / 2) ||W d||^2  <=  <a, H^-1 a> / 2 + mu r^2 / 2        for ||d|| <= r,

and for every x, with `res = a - H x`,

    <a, H^-1 a>  <=  <x, a + res> + ||res||^2 / (mu - lam ||W||^2).

The ascent takes a step towards the best x beside its own; what is claimed takes x from conjugate
gradients in float64, and pays for all roundings (`FirstLayer`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Linear, laid_out
from wassail.certificates.graph.matrix_norms import UP
from wassail.certificates.graph.nonexpansive_sort import nonexpansive_sorts
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.norms import length_above, map_norm
from wassail.certificates.relax.rows import Length, Turned, flattened, of_owner, unflattened
from wassail.rounding import UNIT

ABOVE = 1.01  # the least `mu`, in units of `lam ||W||^2`
FIRST = 4  # steps towards x before the ascent begins
ROUNDS = 24  # of conjugate gradients
NORM_UP_TO_ROWS = 512  # rows of a matrix whose norm is computed for each sample
SMALLER = 0.8  # of the radius that a term gives: a smaller ball takes its place
# Radii and multipliers below this are left to the plain bound, and hand no term on: squares might
# underflow.
FAINT = 1e-60


class FirstLayer:
    """The affine nodes between the input and the first layer of ReLUs.

    Args:
        graph: the network.
        path: the indices of the nodes, the first one reads the input.
        free: which entries of the last of them count, `(N, *shape)`.
        balls: of the input, in the order of coefficient vectors; the norm is 2.
        norm: `||W||_2` is at most this, `(N,)`.
    """

    def __init__(
        self, graph: Graph, path: list[int], free: Tensor, balls: Balls, norm: Tensor
    ) -> None:
        self.balls = balls
        self.free = free
        self.shape = graph.nodes[0].shape
        self.square = norm.square() * (1 + 2.0**-50)
        self.maps = [map_ for i in path if (map_ := graph.nodes[i].map) is not None]
        self.there: dict[torch.dtype, list[Linear]] = {}
        self.back: dict[torch.dtype, list[Turned]] = {}
        # `|| |W| ||_2` is at most the root of the product of the other two norms.
        size = 1.0
        terms = 16
        for k, i in zip([0, *path], path):
            map_ = graph.nodes[i].map
            assert map_ is not None
            given = graph.nodes[k].shape
            out = graph.nodes[i].shape
            one, most = (map_norm(map_, s, given, out) for s in (1.0, math.inf))
            size = size * math.sqrt(one * most) * (1 + 2.0**-20)
            terms = terms + 2 * map_.terms + 4
        self.rough = size * size
        self.unit = terms * UNIT + 4 * len(path) * graph.rounding

    def _maps(self, dtype: torch.dtype) -> tuple[list[Linear], list[Turned]]:
        if dtype not in self.there:
            self.there[dtype] = [
                map_ if map_.coefficients is None else map_.reweighted(map_.coefficients.to(dtype))
                for map_ in self.maps
            ]
            self.back[dtype] = [Turned(map_, dtype) for map_ in self.maps]
        return self.there[dtype], self.back[dtype]

    def _image(self, x: Tensor, owner: Tensor) -> Tensor:
        """`W x` for rows `(R, n)`, 0 where an entry does not count."""
        value = laid_out(unflattened(x, self.shape))
        for map_ in self._maps(x.dtype)[0]:
            value = map_.forward(value)
        return value * of_owner(self.free, owner)

    def _return(self, value: Tensor) -> Tensor:
        """`W^T v`, as rows `(R, n)`."""
        value = laid_out(value)
        for map_ in reversed(self._maps(value.dtype)[1]):
            value = map_.transpose(value)[0]
        return flattened(value)

    def _open(self, a: Tensor, owner: Tensor) -> Tensor:
        """The coefficients without those whose way the box closes."""
        up = of_owner(self.balls.above, owner) > 0
        down = of_owner(self.balls.below, owner) > 0
        return torch.where(torch.where(a > 0, up, down), a, 0.0)

    def start(
        self, a: Tensor, lam: Tensor, owner: Tensor, steps: int = FIRST
    ) -> tuple[Tensor, Tensor]:
        """Where an ascent begins: `(x, mu)`."""
        with torch.no_grad():
            r = self.balls.radius[owner].to(a.dtype)
            a = self._open(a, owner)
            x = a * (r / a.norm(dim=1).clamp(min=1e-30))[:, None]
            mu = torch.zeros_like(lam)
            for _ in range(steps):
                x, mu = self.step(a, lam, owner, self._image(x, owner))
        return x, mu

    def step(self, a: Tensor, lam: Tensor, owner: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """One step towards `H x = a`, given the image of x."""
        r = self.balls.radius[owner].to(a.dtype)
        pull = a + lam[:, None] * self._return(image)
        mu = torch.maximum(
            ABOVE * self.square[owner].to(a.dtype) * lam, pull.norm(dim=1) / r.clamp(min=1e-30)
        ).clamp(min=1e-30)
        return pull / mu[:, None], mu

    def value(
        self, a: Tensor, lam: Tensor, owner: Tensor, x: Tensor, mu: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What is to be minimised, `(R,)`, about the bound, with the gradients of it; and the next
        `(x, mu)`. Nothing is proved here.
        """
        r = self.balls.radius[owner].to(a.dtype)
        a = self._open(a, owner)
        with torch.no_grad():
            image = self._image(x, owner)
            square = image.flatten(1).square().sum(1)
            rest = r.square() - x.square().sum(1)
        mu = torch.maximum(ABOVE * self.square[owner].to(a.dtype) * lam, mu)
        found = (a * x).sum(1) + lam / 2 * square + mu / 2 * rest
        with torch.no_grad():
            following = self.step(a.detach(), lam.detach(), owner, image)
        return found, following

    def bound(self, a: Tensor, lam: Tensor, owner: Tensor) -> Tensor:
        """`<a, d> + (lam / 2) ||W d||^2` is at most this on the balls, `(R,)`, rounded up."""
        a = self._open(a.double(), owner)
        lam = lam.double()
        mu = self.start(a, lam, owner, ROUNDS)[1] * (1 + 2.0**-20)
        x = torch.zeros_like(a)
        res = a
        way = a
        size = res.square().sum(1)
        for _ in range(ROUNDS):
            curved = self._times(way, lam, mu, owner)
            step = size / (way * curved).sum(1).clamp(min=1e-300)
            x = x + step[:, None] * way
            res = res - step[:, None] * curved
            now = res.square().sum(1)
            way = res + (now / size.clamp(min=1e-300))[:, None] * way
            size = now
        return self.claimed(a, lam, mu, x, owner)

    def claimed(self, a: Tensor, lam: Tensor, mu: Tensor, x: Tensor, owner: Tensor) -> Tensor:
        """The bound of any mu and x, with all rounding errors; infinite if it is none."""
        r = self.balls.radius[owner].expand(len(a))
        res = a - self._times(x, lam, mu, owner)
        n = a.shape[1]
        long = x.norm(dim=1)
        gap = (mu - lam * self.square[owner] * (1 + 2.0**-20)) * (1 - 2.0**-20)
        # `H x` is off by this: its maps by their terms, in the length of their magnitudes.
        off = (self.unit * lam * self.rough + 8 * UNIT * mu) * long * 4
        off = off + 4 * UNIT * a.norm(dim=1)
        left = (res.norm(dim=1) * (1 + n * UNIT) + off).square() / gap
        sizes = (n + 16) * UNIT * long * (a.norm(dim=1) + res.norm(dim=1))
        first = (x * (a + res)).sum(1) + long * off + 2 * sizes
        found = (first + left + mu * r.square()) / 2
        found = found + 16 * UNIT * (first.abs() + left + mu * r.square())
        # Nothing that counts underflows: 2^-52 of the last term is more than what does.
        firm = (mu > FAINT) & (r > FAINT)
        good = (gap > 0) & torch.isfinite(found) & firm
        return torch.where(good, found, math.inf)

    def _times(self, x: Tensor, lam: Tensor, mu: Tensor, owner: Tensor) -> Tensor:
        """`H x`."""
        return mu[:, None] * x - lam[:, None] * self._return(self._image(x, owner))


@dataclass(frozen=True, eq=False)
class QuadraticTerm:
    """`||d||^2 <= square ||d'||^2 + rest`, d' the deviations of another node.

    source: that node; square, rest: `(N,)`; good: samples for which this is used.
    """

    source: int
    square: Tensor
    rest: Tensor
    good: Tensor


class LayerBalls:
    """For every layer of ReLUs that a sweep leaves undecided: its ball and its quadratic term.

    free: layer -> the neurons in the ball, `(N, *shape)`; the others are dead. radius: layer -> of
    the ball, `(N,)`. quadratic: layer -> what its term is handed on as. first_layer, first,
    first_quadratic: the layer that reads the input, its node, and what its term is handed on as.
    """

    def __init__(self, sweep: Sweep, lengths: Mapping[int, Length] | None = None) -> None:
        self.sweep = sweep
        self.graph = sweep.graph
        self.reach = sweep.reach
        self.sorted = nonexpansive_sorts(self.graph)
        self.radius: dict[int, Tensor] = {}
        self.free: dict[int, Tensor] = {}
        self.quadratic: dict[int, QuadraticTerm] = {}
        self.first_layer: FirstLayer | None = None
        self.first_quadratic: QuadraticTerm | None = None
        self.first = -1
        sources = {self._path(i)[0] for i in sweep.bends}
        for i, bend in sweep.bends.items():
            node = self.graph.nodes[i]
            assert node.slope is not None
            j = node.inputs[0]
            low, high = sweep.spans[j]
            self.free[i] = bend.crossing | (bend.shape.ends[0] >= 0)
            if i in sources:  # the outputs of all others do not move
                self.free[i] = self.free[i] | (node.slope != 0)
            box = length_above(torch.where(self.free[i], torch.maximum(-low, high), 0.0))
            self.radius[i] = torch.minimum(self.reach.radius[j], box)
            self._join(i)
        for i, (length, those) in (lengths or {}).items():
            if i in self.quadratic:
                self._part(i, length, those)

    def handed_on(self, i: int) -> QuadraticTerm | None:
        """What the term of layer i is handed on as, to the layer before or to the input."""
        return self.first_quadratic if i == self.first else self.quadratic.get(i)

    def _part(self, i: int, length: Tensor, those: Tensor) -> None:
        """Where a ball around the undecided neurons alone is smaller, it takes the place of the
        term: what others hand on to node i would need all of its neurons.
        """
        better = length < SMALLER * self.radius[i]
        mask = better.reshape(-1, *[1] * (self.free[i].ndim - 1))
        self.free[i] = torch.where(mask, self.sweep.bends[i].crossing & those, self.free[i])
        self.radius[i] = torch.where(better, length, self.radius[i])
        for k, term in self.quadratic.items():
            if k == i or term.source == i:
                self.quadratic[k] = replace(term, good=term.good & ~better)

    def _join(self, i: int) -> None:
        """QuadraticTerm node i to the layer before, or to the input."""
        source, *path = self._path(i)
        first = source == 0 and self.sweep.balls.norm == 2 and self.first_layer is None
        if not path or not (first or source in self.radius):
            return
        norm, lost = self._norm(i)
        inner = norm * (self.reach.radius[0] if first else self.radius[source]) * UP
        share = lost / inner.clamp(min=FAINT)
        total = (inner + lost) * UP
        good = (total <= 1.001 * self.radius[i]) & (inner > FAINT)
        square = norm.square() * (1 + share) * UP
        # (s + e)^2 <= s^2 (1 + share) + e^2 (1 + 1 / share)
        term = QuadraticTerm(source, square, lost * (lost + inner) * UP, good)
        self.radius[i] = torch.minimum(self.radius[i], total)
        if first:
            self.first = i
            self.first_layer = FirstLayer(self.graph, path, self.free[i], self.sweep.inputs, norm)
            # The first layer knows the norm itself.
            self.first_quadratic = QuadraticTerm(0, (1 + share) * UP, term.rest, good)
        else:
            self.quadratic[i] = term

    def _path(self, i: int) -> list[int]:
        """The node that the inputs of node i are an affine function of, then the affine nodes."""
        nodes = self.graph.nodes
        j = nodes[i].inputs[0]
        found: list[int] = []
        while nodes[j].map is not None and len(nodes[j].inputs) == 1 and j not in self.sorted:
            found.insert(0, j)
            j = nodes[j].inputs[0]
        return [j, *found]

    def _norm(self, i: int) -> tuple[Tensor, Tensor]:
        """`||W||_2` of the affine nodes before node i, and the length of what rounding adds, `(N,)`
        each. Small matrices count with the rows and columns that move.
        """
        nodes = self.graph.nodes
        source, *path = self._path(i)
        norm = torch.ones_like(self.reach.radius[0])
        lost = torch.zeros_like(norm)
        columns = self.free.get(source)
        for k, j in zip([source, *path], path):
            map_ = nodes[j].map
            assert map_ is not None
            most = map_norm(map_, 2.0, nodes[k].shape, nodes[j].shape)
            lost = (most * lost + self.reach.lost[j]) * UP
            own = torch.full_like(norm, most)
            matrix = nodes[j].matrix
            if matrix is not None and nodes[j].size <= NORM_UP_TO_ROWS:
                rows = self.free[i] if j == path[-1] else None
                own = torch.minimum(own, restricted_norm(matrix, rows, columns, len(norm)))
            norm = norm * own * UP
            moved = columns is not None and map_.moves
            columns = map_.forward(columns.double()) > 0 if moved and columns is not None else None
        return norm, lost


def restricted_norm(weight: Tensor, rows: Tensor | None, columns: Tensor | None, n: int) -> Tensor:
    """`||W||_2` of the rows and columns wanted of each of n samples, `(n,)`, from above."""
    part = weight.expand(n, *weight.shape)
    part = part if columns is None else part * columns[:, None]
    part = part if rows is None else part * rows[:, :, None]
    gram = part @ part.mT
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)
    top = torch.linalg.eigvalsh((gram + gram.mT) / 2)[:, -1].clamp(min=0)
    slack = (sum(weight.shape) + 16) * 2.0**-50
    found: Tensor = (top + slack * trace).sqrt() * UP
    # Products that underflow are as long as this at most.
    return found + math.sqrt(weight.numel()) * 2.0**-500
