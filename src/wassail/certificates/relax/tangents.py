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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.tangent import Tangent
from wassail.certificates.relax.backward import Walk
from wassail.certificates.relax.ranges import Span
from wassail.rounding import FAINT, UNIT

NUMBERS = 2**24  # in one tensor of a pass


@dataclass(frozen=True, eq=False)
class _Gradient:
    """What is known of a gradient at one node, `(N, m, *shape)` each: that of the linear network,
    the error of it that comes from the nodes above, and the part of the error that arises here.
    """

    value: Tensor
    error: Tensor
    rest: Tensor

    def plus(self, other: _Gradient) -> _Gradient:
        return _Gradient(self.value + other.value, self.error + other.error, self.rest + other.rest)


def head_rows(graph: Graph, spans: Mapping[int, Span], rows: Tensor) -> Tensor:
    """Combinations of the logits as gradients at the last node, for each of the N regions that
    spans has, `(m, K)` for all or `(N, m, K)`: `(N, m, *shape)`.
    """
    count = len(next(iter(spans.values()))[0]) if spans else 1
    if rows.ndim == 2:
        rows = rows.expand(count, len(rows), -1)
    head = rows.to(graph.device).double()
    return head.reshape(*head.shape[:2], *graph.nodes[-1].shape)


def centred(graph: Graph, spans: Mapping[int, Span], rows: Tensor, tighten: bool = False) -> Span:
    """Bounds on the gradients of the logit combinations `rows` `(m, K)` over N bounded regions,
    `(N, m, n)` each.

    spans: what `ranges.ranges` found, all finite. tighten: bound the error of the gradient at
    every curve and activation by tangents that start there as well, which is a pass for each of
    their entries.
    """
    last = len(graph.nodes) - 1
    head = head_rows(graph, spans, rows)
    none = torch.zeros_like(head)
    rest: dict[int, Tensor] = {}
    maps: dict[int, Tangent] = {}
    walk = Walk(graph, {last: _Gradient(head, none, none)}, _Gradient.plus)
    for i, node, g in walk.nodes(last):
        rest[i] = g.rest
        off = g.error + g.rest
        if tighten and node.map is None and i < last:
            off = torch.minimum(off, _gathered(graph, maps, rest, i).reshape(off.shape))
        given = [] if node.map is not None else [spans[j] for j in node.inputs]
        maps[i] = node.tangent(given, graph.rounding)
        walk.give(node, _through(graph, i, maps[i], g.value, off))
    if 0 not in walk.weight:  # the logits do not depend on the input
        return (head.new_zeros(*head.shape[:2], graph.inputs),) * 2
    start = walk.weight[0]
    rest[0] = start.rest
    centre = _rows(start.value)
    # Each `wide` has 8 units to spare, two of which are for these differences.
    radius = torch.minimum(_rows(start.error + start.rest), _gathered(graph, maps, rest, 0))
    return centre - radius, centre + radius


def _through(graph: Graph, i: int, by: Tangent, value: Tensor, off: Tensor) -> Iterator[_Gradient]:
    """What a gradient at node i, off by at most `off`, is at each of its inputs."""
    users = graph.users
    wide = (by.terms + 8 + len(users[i])) * UNIT
    parts = (by.transpose(value), by.reach(value.abs() + off), by.reach(off), by.spread(value, off))
    for j, part, much, moved, spread in zip(graph.nodes[i].inputs, *parts):
        rest = (wide + len(users[j]) * UNIT) * (much + FAINT) + spread * (1 + wide)
        yield _Gradient(part, moved * (1 + wide), rest)


def _gathered(
    graph: Graph, maps: Mapping[int, Tangent], rest: Mapping[int, Tensor], start: int
) -> Tensor:
    """`sum_i |T_i|^T e_i` with the tangents T that start at a node, `(N, m, size)`."""
    size = graph.nodes[start].size
    most = max(node.size for node in graph.nodes[start:])
    parts = torch.split(
        torch.arange(size, device=graph.device), max(1, NUMBERS // (len(rest[start]) * most))
    )
    return torch.cat([_carried(graph, maps, rest, start, part) for part in parts], 2)


def _carried(
    graph: Graph, maps: Mapping[int, Tangent], rest: Mapping[int, Tensor], start: int, where: Tensor
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
