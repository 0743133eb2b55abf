"""Lipschitz constants of a transformer, module by module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph, Node
from wassail.certificates.graph.maps import Concat, Matrix, Pick, Scale, Sum
from wassail.certificates.graph.matrix_norms import matrix_norm
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.planes import Span
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.norms import map_norm
from wassail.certificates.relax.ranges import one_region, ranges
from wassail.paper.attention_bounds import global_bound, heads, region_bound, spectral
from wassail.paper.attention_layout import Attention, axes_of, find, letters_of
from wassail.rounding import UNIT, sized

UP = 1e-12  # added to a logarithm at every step, which is off by less
# matrices of up to this many rows and columns are multiplied to see how they act together
WIDEST = 1024
MATRICES = 2**22  # numbers in the derivatives of all tokens of a node
# numbers in the largest tensor of a region's attention bound; above it the bound on the ball is
# taken
ROOM = 2**25


def radius(graph: Graph, i: int) -> float:
    """How long a normalised token can be: `sqrt(d)`, and `sqrt(d) max|g| + |b|` after gain and
    bias; inf for other nodes.
    """
    node = graph.nodes[i]
    if node.curve is not None:
        return node.curve.longest(node.shape) * (1 + UP)
    before = graph.nodes[node.inputs[0]].curve if node.inputs else None
    if not isinstance(node.map, Scale) or before is None:
        return math.inf
    longest = before.longest(node.shape) * float(node.map.factor.abs().max())
    bias = torch.zeros(1) if node.bias is None else node.bias.expand(node.shape)
    return (longest + float(bias.norm(dim=-1).max())) * (1 + UP)


def everywhere(
    graph: Graph, region: Region, known: Mapping[int, Span] | None = None
) -> dict[int, Span]:
    """The range of every node over the region, `(1, *shape)` each, rounded outward; sides may be
    infinite.

    known: what `ranges.ranges` found there, if it has been called already.
    """
    known = ranges(graph, one_region(region)) if known is None else known
    low, high = (side.reshape(1, *graph.nodes[0].shape) for side in region.box)
    found: dict[int, Span] = {0: (low, high)}  # a region's box is rounded outward
    for i, node in enumerate(graph.nodes[1:], 1):
        low, high = node.span([found[j] for j in node.inputs], graph.rounding)
        if i in known:
            low = torch.maximum(low, known[i][0])
            high = torch.minimum(high, known[i][1])
        found[i] = low, high
    return found


@dataclass(frozen=True, eq=False)
class _Tokens:
    """The derivative of a node by an earlier one, base, token by token: within centre +-
    radius, `(n, p, d)` each.
    """

    base: int
    centre: Tensor
    radius: Tensor

    @classmethod
    def start(cls, i: int, node: Node) -> _Tokens:
        """Of a node by itself."""
        n = math.prod(node.shape[:-1])
        d = node.shape[-1]
        return cls(
            i,
            torch.eye(d, dtype=torch.float64).expand(n, d, d),
            torch.zeros(n, d, d, dtype=torch.float64),
        )

    def norm(self) -> float:
        """An upper bound on its norm, the largest of the tokens'."""
        return float((spectral(self.centre) + spectral(self.radius)).max())

    def times(self, centre: Tensor, radius: Tensor) -> _Tokens:
        """Rows multiplied with numbers within centre +- radius, `(n, p)` each."""
        centre = centre[..., None]
        radius = radius[..., None]
        size = self.centre.abs() + self.radius
        return self.to(
            centre * self.centre,
            centre.abs() * self.radius + radius * size,
            (centre.abs() + radius) * size,
            1,
        )

    def to(self, centre: Tensor, radius: Tensor, size: Tensor, terms: int) -> _Tokens:
        """Another derivative by the same node; size: the magnitudes that sums of so many terms
        were made of.
        """
        return _Tokens(self.base, centre, radius + (terms + 8) * UNIT * size)


@dataclass(frozen=True, eq=False)
class TransformerConstants:
    """Euclidean constants of the steps of a graph over a region, and of what lies between two
    nodes.

    spans: the ranges of all nodes (`everywhere`); attentions: by their targets (`find`); close:
    whether the region is bounded, so that it pays to look at tokens one by one.
    """

    graph: Graph
    spans: Mapping[int, Span]
    attentions: Mapping[int, Attention]
    close: bool = False
    _known: dict[int, float] = field(default_factory=dict)

    @classmethod
    def make(
        cls, graph: Graph, region: Region, known: Mapping[int, Span] | None = None
    ) -> TransformerConstants:
        """Over a region; known: as in `everywhere`. The ranges come from the graph's device,
        the walk is on the CPU.
        """
        spans = {
            i: (low.to(HOST), high.to(HOST))
            for i, (low, high) in everywhere(graph, region, known).items()
        }
        graph = graph.to(HOST)
        return cls(graph, spans, find(graph), region.bounded)

    def stretch(self, source: int, target: int) -> float:
        """The logarithm of a bound on the norm of the derivative of one node by another, everything
        else held fixed.

        Where tokens do not mix, the derivative of a node by an earlier one is a matrix for each of
        them, `tokens`, and its norm may be less than the product of the norms on the way: on small
        regions it is almost exact.
        """
        steps = {source: 0.0}
        tokens = {source: self._start(source)}
        for i in range(source + 1, target + 1):
            inputs = [j for j in self.graph.nodes[i].inputs if j in steps]
            if not inputs:
                continue
            steps[i] = self._over(i, steps) + UP * (1 + len(inputs))
            known = [tokens[j] for j in inputs]
            first = known[0]
            carried = None
            if first is not None and all(t is not None and t.base == first.base for t in known):
                carried = self._carry(i, [t for t in known if t is not None])
            if carried is None or not torch.isfinite(carried.radius).all():
                tokens[i] = self._start(i)
            else:
                tokens[i], steps[i] = (
                    carried,
                    min(steps[i], steps[carried.base] + log(carried.norm()) + UP),
                )
        return steps.get(target, -math.inf)

    def _start(self, i: int) -> _Tokens | None:
        node = self.graph.nodes[i]
        few = len(node.shape) > 0 and node.size * node.shape[-1] <= MATRICES
        return _Tokens.start(i, node) if self.close and few else None

    def _carry(self, i: int, given: Sequence[_Tokens]) -> _Tokens | None:
        """The derivative of node i from those of its inputs by the same base; None if it mixes
        tokens.
        """
        node = self.graph.nodes[i]
        first = given[0]
        shape = node.shape
        before = self.graph.nodes[node.inputs[0]].shape
        n = len(first.centre)
        if not shape or math.prod(shape[:-1]) != n or node.size * first.centre.shape[-1] > MATRICES:
            return None
        if isinstance(node.map, Sum) and len(given) == len(node.inputs):
            centre, radius = (
                reduce(torch.add, parts) for parts in zip(*((g.centre, g.radius) for g in given))
            )
            return first.to(
                centre,
                radius,
                reduce(torch.add, [g.centre.abs() + g.radius for g in given]),
                len(given),
            )
        if isinstance(node.map, Matrix):
            w = node.map.weight
            most = sized(
                (w.abs() if node.map.most is None else node.map.most)
                @ sized(first.centre.abs() + first.radius)
            )
            return first.to(w @ first.centre, w.abs() @ first.radius, most, w.shape[1])
        if isinstance(node.map, Scale):
            factor = node.map.factor.expand(shape).reshape(n, -1)
            return first.times(factor, torch.zeros_like(factor))
        if isinstance(node.map, Pick):
            return first if node.map.source is None and before[-1] == shape[-1] else None
        if isinstance(node.curve, Normalise):
            return self._normalise(i, first)
        if node.map is not None or node.curve is not None:
            return None
        span = self.spans[node.inputs[0]]
        low, high = (side.reshape(n, -1) for side in node.derivative_range(*span))
        # The halves lose at most half a unit each, the products of `times` three: of its nine
        # units, relative to both magnitudes, five are left, so UP could be left out.
        return first.times((low + high) / 2, (high - low) / 2 * (1 + UP))

    def _normalise(self, i: int, given: _Tokens) -> _Tokens:
        """`rho (I - y y^T / d)`, y and rho in their ranges, times what is given."""
        node = self.graph.nodes[i]
        assert isinstance(node.curve, Normalise)
        n = len(given.centre)
        d = node.shape[-1]
        low, high = (side.reshape(n, d) for side in self.spans[node.inputs[0]])
        # A unit is twice the error of an operation. The sums of d terms below lose at most
        # `(d + 5) / 2` units of `much`, the halves y and room one and a half more, and the rates,
        # roots of such sums, `(d + 8) / 4`: the `d + 8` units of `much` in `given.to` and the nine
        # in `times` are more than all of them. So slack and UP could be left out here.
        slack = 4 * UNIT * (d + 8)
        most = torch.maximum(low.abs(), high.abs()).square().mean(1) + node.curve.eps
        least = _nearest(low, high).square().mean(1) + node.curve.eps
        bottom = most.rsqrt() * (1 - slack)
        top = least.rsqrt() * (1 + slack)
        below, above = (side.reshape(n, d) for side in self.spans[i])
        y = ((above + below) / 2)[..., None]
        room = ((above - below) / 2 * (1 + UP))[..., None]
        size = given.centre.abs() + given.radius
        inner = y.mT @ given.centre
        inner_room = y.abs().mT @ given.radius + room.mT @ size
        through = y * inner / d
        through_room = (y.abs() * inner_room + room * (inner.abs() + inner_room)) / d
        much = size + (y.abs() + room) * ((y.abs() + room).mT @ size) / d
        rest = given.to(given.centre - through, given.radius + through_room, much, d)
        return rest.times(
            ((top + bottom) / 2)[:, None].expand(n, d), ((top - bottom) / 2)[:, None].expand(n, d)
        )

    def _over(self, i: int, steps: Mapping[int, float]) -> float:
        node = self.graph.nodes[i]
        given = [steps.get(j, -math.inf) for j in node.inputs]
        if isinstance(node.map, Sum):
            value = log_sum(given)
        elif isinstance(node.map, Concat):
            value = log_sum([2 * g for g in given]) / 2
        elif node.map is not None:
            value = min(
                (log_product(steps[j], norm) for j, norm in self.linear(i) if j in steps),
                default=-math.inf,
            )
        elif isinstance(node.curve, Product):
            value = log_sum([log_product(g, self._factor(i, k)) for k, g in enumerate(given)])
        else:
            value = log_product(max(given), self.slope(i))
        attention = self.attentions.get(i)
        if attention is not None and attention.source in steps:
            value = self.either(
                value, log_product(steps[attention.source], self._attention(attention))
            )
        return value

    def either(self, steps: float, module: float) -> float:
        """Attention step by step or as one module: both hold."""
        return min(steps, module)

    def linear(self, i: int) -> Iterator[tuple[int, float]]:
        """The norm of an affine node from its input, and of it together with the matrices and
        scales before it.
        """
        node = self.graph.nodes[i]
        assert node.map is not None
        j = node.inputs[0]
        yield j, log(map_norm(node.map, 2, self.graph.nodes[j].shape, node.shape))
        matrix = _matrix(node)
        size = 0.0
        while matrix is not None:
            before = _matrix(self.graph.nodes[j])
            if before is None or max(*before.shape, *matrix.shape) > WIDEST:
                return
            size = float(
                torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(before)
            ) + size * float(before.norm())
            matrix = matrix @ before
            j = self.graph.nodes[j].inputs[0]
            yield j, log(matrix_norm(matrix, 2, 2) + 4 * UNIT * (len(before) + 8) * size)

    def _factor(self, i: int, k: int) -> float:
        """The norm of a product as a map of its input k: that of the matrices that the other
        input is made of.
        """
        node = self.graph.nodes[i]
        assert isinstance(node.curve, Product)
        letters, (low, high) = letters_of(node.curve), self.spans[node.inputs[1 - k]]
        mine = letters[k]
        other = letters[1 - k]
        out = letters[2]
        both = [c for c in other if c in mine and c in out]
        inner = [c for c in other if c not in out]
        axes = axes_of(other, both, inner, [c for c in other if c not in mine])
        most = axes.split(torch.maximum(low.abs(), high.abs()))
        return log(float(spectral(most).max())) if bool(torch.isfinite(most).all()) else math.inf

    def slope(self, i: int) -> float:
        """A ReLU, an activation, a softmax or a normalisation, by the range of its input."""
        node = self.graph.nodes[i]
        span = self.spans[node.inputs[0]]
        # diag(p) - p p^T <= diag(p), and its norm is 1/2 at most
        if isinstance(node.curve, Softmax):
            return log(min(0.5, float(self.spans[i][1].max())))
        if isinstance(node.curve, Normalise):
            low, high = span
            variance = float(_nearest(low, high).square().mean(-1).min()) * (
                1 - 4 * UNIT * (low.shape[-1] + 8)
            )
            return (
                -0.5 * math.log(node.curve.eps + variance)
                if node.curve.eps + variance > 0
                else math.inf
            )
        if node.curve is not None:  # of another curve nothing is known here
            return math.inf
        return log(max(float(side.abs().max()) for side in node.derivative_range(*span)))

    def _attention(self, attention: Attention) -> float:
        if attention.target not in self._known:
            self._known[attention.target] = log(self.attention_bound(attention))
        return self._known[attention.target]

    def attention_bound(self, attention: Attention) -> float:
        """The constant of an attention over the region, its heads together."""
        n = attention.tokens
        d = attention.a.shape[-1]
        reach = radius(self.graph, attention.source)
        low, high = (side.reshape(n, d) for side in self.spans[attention.source])
        chances = [attention.axes.split(side)[0] for side in self.spans[attention.scores]]
        wide = (
            not torch.isfinite(high - low).all()
            or n * n * d > ROOM
            or float((high - low).max()) >= reach
        )
        if not math.isfinite(reach):
            reach = float(
                torch.linalg.vector_norm(torch.maximum(low.abs(), high.abs()), dim=1).max()
            ) * (1 + UP)
        if not math.isfinite(reach):
            return math.inf

        def bound(h: int, v: Tensor, size: Tensor) -> float:
            a = attention.a[h]
            bias = attention.bias[h]
            mask = attention.mask[h]
            most = float(attention.most[0, h]), float(size[h]), float(attention.most[3, h])
            if wide:
                return global_bound(n, a, v, reach, bias, mask, most)
            return float(
                region_bound(
                    low, high, a, v, bias, mask, reach, (chances[0][h], chances[1][h]), most
                )
            )

        together = [
            bound(h, attention.out[h] @ v, attention.most[2]) for h, v in enumerate(attention.value)
        ]
        alone = [bound(h, v, attention.most[1]) for h, v in enumerate(attention.value)]
        most = float(attention.most[4].norm())
        return heads(together, alone, attention.out.transpose(0, 1).flatten(1), most)


def _nearest(low: Tensor, high: Tensor) -> Tensor:
    """The least magnitude between low and high."""
    return torch.where(low > 0, low, torch.where(high < 0, -high, 0.0))


def _matrix(node: Node) -> Tensor | None:
    """The matrix of a node that acts on the last axis; None for another."""
    if isinstance(node.map, Matrix):
        return node.map.weight
    if (
        isinstance(node.map, Scale)
        and math.prod(node.map.factor.shape[:-1]) == 1
        and node.shape[-1] <= WIDEST
    ):
        return torch.diag(node.map.factor.flatten().expand(node.shape[-1]))
    return None


def log(value: float) -> float:
    """The logarithm of a bound >= 0; what is not a number bounds nothing."""
    return math.inf if math.isnan(value) else math.log(value) if value > 0 else -math.inf


def log_product(a: float, b: float) -> float:
    """The logarithm of a product; 0 times infinity is 0: what does not depend on the input has
    no derivative.
    """
    return -math.inf if -math.inf in (a, b) else a + b


def log_sum(logs: Sequence[float]) -> float:
    """`log(exp(a) + exp(b) + ...)`."""
    top = max(logs)
    return top if math.isinf(top) else top + math.log(math.fsum(math.exp(t - top) for t in logs))
