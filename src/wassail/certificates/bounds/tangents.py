"""The Jacobian over a small region as its value in the middle and a first-order error: tight where
intervals are not.

Every node's derivative is a fixed linear map M and a remainder, `J_i(x)^T g = M_i^T g + r_i`. So
the gradient of the output at the input is that of the linear network of the M's, and each remainder
comes to it through the maps before its node:

    g(x) = M_1^T ... M_L^T w + sum_i T_i^T r_i,      T_i = M_{i-1} ... M_1,      |r_i| <= e_i,

which is a product of the maps themselves, and not of their absolute values as in interval
arithmetic: for a transformer the difference is a factor of many thousands. `e_i` is the width of
the derivative times the size of the gradient there, whose own error is of first order too and is
bounded by absolute values. (The same telescoping gives RecurJac's bounds, Zhang, Zhang & Hsieh
2019; here the maps are those of the middle, shared by all outputs, so that one pass of tangents
serves all.)

Rounding. A computed gradient differs from `M^T g` by a remainder as well, at most `c |M|^T |g|`
with c the number of terms times 2^-52, and the error of a computed tangent meets that of the
gradient, `c <|T|, |M|^T |error|>`: both belong to `e_i`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, assert_never

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bounds.ranges import Span, derivative_span
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import (
    Affine,
    Curved,
    Graph,
    Input,
    Node,
    Op,
    Relu,
    Smooth,
)
from wassail.certificates.graph.maps import Linear, rounding_map
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.planes import Curve
from wassail.rounding import FAINT, UNIT, outward

NUMBERS = 2**24  # in one tensor of a pass


class Middle(Protocol):
    """The derivative of a node over N regions: a fixed linear map M and a bound on the rest."""

    @property
    def terms(self) -> int:
        """How many terms an entry of `M t` or `M^T g` is the sum of, and a few more."""

    def forward(self, *t: Tensor) -> Tensor:
        """`M t` of tangents `(N, k, *in)`: `(N, k, *out)`."""

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """`M^T g` of gradients `(N, m, *out)`: `(N, m, *in)` for each input."""

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        """`|M|^T g`, or more, of sizes >= 0."""

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        """At least `|J(x)^T h - M^T h|` for all x of the region and all h with `|h - g| <=
        error`.
        """


@dataclass(frozen=True, eq=False)
class _Affine:
    """An affine map, which is its own derivative. rounding: the relative error of its weights."""

    map: Linear
    terms: int
    rounding: float

    def forward(self, *t: Tensor) -> Tensor:
        found: Tensor = self.map.forward(*(v.flatten(0, 1) for v in t))
        return found.reshape(*t[0].shape[:2], *found.shape[1:])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return _back(self.map, g)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        return _back(rounding_map(self.map), g)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.rounding * part for part in self.reach(g.abs() + error))


def _back(map_: Linear, g: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        part.reshape(*g.shape[:2], *part.shape[1:]) for part in map_.transpose(g.flatten(0, 1))
    )


@dataclass(frozen=True, eq=False)
class _Entrywise:
    """A ReLU or an activation: the derivative lies in middle +- radius, `(N, 1, *shape)`."""

    middle: Tensor
    radius: Tensor
    terms: int = 4

    @classmethod
    def make(cls, op: Op, span: Span) -> _Entrywise:
        low, high = (side[:, None] for side in derivative_span(op, span))
        middle = (low + high) / 2
        return cls(middle, torch.maximum(high - middle, middle - low) * (1 + 4 * UNIT))

    def forward(self, *t: Tensor) -> Tensor:
        return t[0] * self.middle

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return (g * self.middle,)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        return (g * self.middle.abs(),)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        return ((g.abs() + error) * self.radius,)


@dataclass(frozen=True, eq=False)
class _Product:
    """The product rule, `M (s, t) = s b + a t`: factors a, b `(N, *shape)` and their half
    widths.
    """

    curve: Product
    factors: tuple[Tensor, Tensor]
    widths: tuple[Tensor, Tensor]
    terms: int

    @classmethod
    def make(cls, curve: Product, spans: tuple[Span, ...]) -> _Product:
        (a, da), (b, db) = (_halves(span) for span in spans)
        return cls(curve, (a, b), (da, db), 8 + max(a[0].numel(), b[0].numel()))

    def forward(self, *t: Tensor) -> Tensor:
        a, b, out = self._letters
        left = torch.einsum(f"YZ{a},Y{b}->YZ{out}", t[0], self.factors[1])
        return left + torch.einsum(f"Y{a},YZ{b}->YZ{out}", self.factors[0], t[1])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return self._pull(g, *self.factors)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        return self._pull(g, *(v.abs() for v in self.factors))

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        return self._pull(g.abs() + error, *self.widths)

    def _pull(self, g: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        a, b, out = self._letters
        return torch.einsum(f"YZ{out},Y{b}->YZ{a}", g, right), torch.einsum(
            f"YZ{out},Y{a}->YZ{b}", g, left
        )

    @property
    def _letters(self) -> tuple[str, str, str]:
        left, out = self.curve.equation.replace(" ", "").split("->")
        a, b = left.split(",")
        return a, b, out


@dataclass(frozen=True, eq=False)
class _Softmax:
    """`M t = p (t - <p, t>)`: p `(N, 1, *shape)`, its largest deviation and its largest value.

    `J^T h - M^T h = dp (h - <p, h>) - (p + dp) <dp, h>`, and `<dp, h> = <dp, g - <p, g>> + <p, g>
    sum(dp) + <dp, h - g>`. The entries of dp add up to 0 but for the rounding of the stored p. That
    takes one of the four times `terms U <p, |g|>` in `spread`; the rounding of `<p, g>` takes the
    others, one where it is multiplied by dp, which is at most p + dp, and two in the product with
    all of dp, whose entries add up to 2 at most.
    """

    p: Tensor
    width: Tensor
    most: Tensor
    terms: int

    @classmethod
    def make(cls, curve: Softmax, spans: tuple[Span, ...]) -> _Softmax:
        p = curve.value(_halves(spans[0])[0])[:, None]
        low, high = (side[:, None] for side in curve.span(spans[0]))
        return cls(
            p, torch.maximum(high - p, p - low).clamp(min=0) * (1 + 4 * UNIT), high, p.shape[-1] + 8
        )

    def forward(self, *t: Tensor) -> Tensor:
        return self.p * (t[0] - _sum(self.p * t[0]))

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return (self.forward(g),)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        return (self.p * (g + _sum(self.p * g)),)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        much = _sum(self.p * g.abs())
        off = (g - _sum(self.p * g)).abs() + error + _sum(self.p * error)
        return (
            self.width * off + self.most * (_sum(self.width * off) + 4 * self.terms * UNIT * much),
        )


@dataclass(frozen=True, eq=False)
class _Normalise:
    """`M t = rho (t - y <y, t> / n)`: rho `(N, 1, ..., 1)` and y `(N, 1, *shape)`, and their
    largest deviations.

    `J^T h - M^T h = drho (h - (y + dy) <y + dy, h> / n) - rho (dy <y + dy, h> + y <dy, h>) / n`.
    The rounding of `<y, g>` is below `much = (n + 8) U <|y|, |g|>`, and n of these units; of the
    others two are for the product with y and the quotient after it.
    """

    rho: Tensor
    y: Tensor
    rho_width: Tensor
    y_width: Tensor
    terms: int

    @classmethod
    def make(cls, curve: Normalise, spans: tuple[Span, ...]) -> _Normalise:
        low, high = spans[0]
        n = low.shape[-1]
        c = _halves(spans[0])[0]
        least = torch.where(
            (low < 0) & (high > 0), 0.0, torch.minimum(low.abs(), high.abs())
        ).square()
        most = torch.maximum(low.abs(), high.abs()).square()
        slack = (n + 16) * UNIT
        top = (least.mean(-1, keepdim=True) + curve.eps).rsqrt() * (1 + slack)
        bottom = (most.mean(-1, keepdim=True) + curve.eps).rsqrt() * (1 - slack)
        rho = (c.square().mean(-1, keepdim=True) + curve.eps).rsqrt()
        y, (first, last) = c * rho, curve.span(spans[0])
        turn = torch.maximum(top - rho, rho - bottom)
        slip = torch.maximum(last - y, y - first)
        turn, slip = (v.clamp(min=0) * (1 + 4 * UNIT) for v in (turn, slip))
        return cls(rho[:, None], y[:, None], turn[:, None], slip[:, None], n + 8)

    def forward(self, *t: Tensor) -> Tensor:
        return self.rho * (t[0] - self.y * _sum(self.y * t[0]) / self.y.shape[-1])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return (self.forward(g),)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        y = self.y.abs()
        return (self.rho * (g + y * _sum(y * g) / y.shape[-1]),)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        n = self.y.shape[-1]
        y = self.y.abs()
        dy = self.y_width
        size = g.abs() + error
        along = _sum(self.y * g)
        across = _sum(dy * size)
        slip = _sum(y * error)
        much = self.terms * UNIT * _sum(y * size)
        most = along.abs() + slip + across + much  # <y + dy, h>
        rest = (dy * most + y * (across + slip + much)) / n
        whole = (g - self.y * along / n).abs() + error + rest
        return (self.rho_width * whole + self.rho * (dy * most + y * across) / n,)


def _halves(span: Span) -> tuple[Tensor, Tensor]:
    low, high = span
    middle = (low + high) / 2
    return middle, torch.maximum(high - middle, middle - low) * (1 + 4 * UNIT)


def _sum(values: Tensor) -> Tensor:
    return values.sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class _Enclosed:
    """A curve of which only the range of `J^T g` is known: M is 0."""

    curve: Curve
    spans: tuple[Span, ...]
    terms: int = 4

    def forward(self, *t: Tensor) -> Tensor:
        shape = self.curve.output(*(tuple(v.shape[2:]) for v in t))
        return t[0].new_zeros(*t[0].shape[:2], *shape)

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.new_zeros(*g.shape[:2], *low.shape[1:]) for low, _ in self.spans)

    def reach(self, g: Tensor) -> tuple[Tensor, ...]:
        return self.transpose(g)

    def spread(self, g: Tensor, error: Tensor) -> tuple[Tensor, ...]:
        found = self.curve.adjoint(outward(g - error, g + error), self.spans)
        return tuple(torch.maximum(low.abs(), high.abs()) for low, high in found)


def middle(graph: Graph, node: Node, spans: Mapping[int, Span]) -> Middle:
    """The derivative of a node where its inputs have these ranges."""
    match node.op:
        case Affine(map_):
            return _Affine(map_, map_.terms + 4, graph.rounding)
        case Relu() | Smooth():
            return _Entrywise.make(node.op, spans[node.inputs[0]])
        case Curved(curve):
            given = tuple(spans[j] for j in node.inputs)
            if isinstance(curve, Product):
                return _Product.make(curve, given)
            if isinstance(curve, Softmax):
                return _Softmax.make(curve, given)
            if isinstance(curve, Normalise):
                return _Normalise.make(curve, given)
            return _Enclosed(curve, given)
        case Input():
            raise AssertionError("the input has no derivative of its own")
        case _:
            assert_never(node.op)


def centred(graph: Graph, spans: Mapping[int, Span], rows: Tensor, tighten: bool = False) -> Span:
    """Bounds on the gradients of the logit combinations `rows` `(m, K)` over N bounded regions,
    `(N, m, n)` each.

    spans: what `ranges.ranges` found, all finite. tighten: bound the error of the gradient at
    every curve and activation by tangents that start there as well, which is a pass for each of
    their entries.
    """
    count = len(next(iter(spans.values()))[0]) if spans else 1
    m = len(rows)
    last = len(graph.nodes) - 1
    users = [sum(node.inputs.count(j) for node in graph.nodes) for j in range(len(graph.nodes))]
    head = (
        rows.to(graph.device)
        .double()
        .expand(count, m, -1)
        .reshape(count, m, *graph.nodes[last].shape)
    )
    # At every node: the gradient of the linear network, the error of it, and the part of that which
    # arises there.
    g = {last: head}
    error = {last: torch.zeros_like(head)}
    rest = {last: torch.zeros_like(head)}
    maps: dict[int, Middle] = {}
    for i in range(last, 0, -1):
        if i not in g:
            continue
        clock.look()
        here = g.pop(i)
        off = error.pop(i) + rest[i]
        if tighten and not isinstance(graph.nodes[i].op, Affine) and i < last:
            off = torch.minimum(off, _gathered(graph, maps, rest, i).reshape(off.shape))
        maps[i] = by = middle(graph, graph.nodes[i], spans)
        wide = (by.terms + 8 + users[i]) * UNIT
        parts = zip(
            by.transpose(here), by.reach(here.abs() + off), by.reach(off), by.spread(here, off)
        )
        for j, (part, much, moved, spread) in zip(graph.nodes[i].inputs, parts):
            _add(g, j, part)
            _add(rest, j, (wide + users[j] * UNIT) * (much + FAINT) + spread * (1 + wide))
            _add(error, j, moved * (1 + wide))
    if 0 not in g:  # the logits do not depend on the input
        return (head.new_zeros(count, m, graph.inputs),) * 2
    centre, off = (v.reshape(count, m, -1) for v in (g[0], error[0] + rest[0]))
    # Each `wide` has 8 units to spare, two of which are for these differences.
    radius = torch.minimum(off, _gathered(graph, maps, rest, 0))
    return centre - radius, centre + radius


def _add(store: dict[int, Tensor], key: int, value: Tensor) -> None:
    store[key] = store[key] + value if key in store else value


def _gathered(
    graph: Graph, maps: Mapping[int, Middle], rest: Mapping[int, Tensor], start: int
) -> Tensor:
    """`sum_i |T_i|^T e_i` with the tangents T that start at a node, `(N, m, size)`."""
    size = graph.nodes[start].size
    most = max(node.size for node in graph.nodes[start:])
    parts = torch.split(
        torch.arange(size, device=graph.device), max(1, NUMBERS // (len(rest[start]) * most))
    )
    return torch.cat([_carried(graph, maps, rest, start, part) for part in parts], 2)


def _carried(
    graph: Graph, maps: Mapping[int, Middle], rest: Mapping[int, Tensor], start: int, where: Tensor
) -> Tensor:
    """The same for some entries of the node."""
    clock.check()
    clock.spend(2 * len(rest[start]) * len(where) * graph.operations)
    count = len(rest[start])
    k = len(where)
    unit = rest[start].new_zeros(k, graph.nodes[start].size).scatter(1, where[:, None], 1.0)
    tangent = {start: unit.expand(count, -1, -1).reshape(count, k, *graph.nodes[start].shape)}
    last_use = {j: i for i, node in enumerate(graph.nodes) for j in node.inputs}
    radius = _rows(rest[start])[:, :, where]
    for i in sorted(maps):
        clock.look()
        inputs = graph.nodes[i].inputs
        if not any(j in tangent for j in inputs):
            continue
        given = [
            tangent[j] if j in tangent else unit.new_zeros(count, k, *graph.nodes[j].shape)
            for j in inputs
        ]
        t = tangent[i] = maps[i].forward(*given)
        for j in inputs:
            if last_use[j] == i:
                tangent.pop(j, None)
        e = _rows(rest[i])
        if e.device != HOST or e.any():  # a device is not asked: nothing is added then
            radius = radius + e @ _rows(t).abs().mT * (1 + (e.shape[2] + 8 + len(maps)) * UNIT)
    return radius


def _rows(values: Tensor) -> Tensor:
    return values.reshape(*values.shape[:2], -1)  # unlike flatten(2) also for single numbers
