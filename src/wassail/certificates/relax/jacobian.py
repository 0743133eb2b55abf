"""Bounds on the Jacobian of a network with smooth parts over a region.

Values go forward (`ranges`). Gradients go backward: `adjoint` multiplies the
gradient of the head by the derivative of one node after the other in interval arithmetic, `J^T w =
W_1^T D_1 W_2^T D_2 ... w` with every `D` anywhere in its range. On a point it is the Jacobian
itself up to rounding, and on a box its width shrinks like the box (`pieces` makes use of it).
`tangents` has the same with first-order errors that go through the maps themselves instead of their
absolute values.

Rounding: every step is an enclosure of the exact image of the enclosure before it. A sum of n terms
is off by at most `(n + 4) 2^-52` times the sum of their magnitudes, and that is added to every
side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Scale, Sum
from wassail.certificates.graph.matrix_norms import FEW_SIGNS, positive_norms
from wassail.certificates.relax.backward import Walk
from wassail.certificates.relax.ranges import Bounds, Span
from wassail.certificates.relax.tangents import centred, head_rows
from wassail.geometry import operator_norm
from wassail.rounding import UNIT

NUMBERS = 2**22  # in one tensor of a pass over many boxes


def adjoint(graph: Graph, spans: Mapping[int, Span], rows: Tensor) -> Span:
    """The gradients of the logit combinations `rows` `(m, K)` over N regions: `(N, m, n)` each,
    rounded outward.

    spans: what `ranges` found. Interval arithmetic from the head to the input; infinite where an
    infinite value is multiplied.
    """
    head = head_rows(graph, spans, rows)
    last = len(graph.nodes) - 1
    walk = Walk(graph, {last: (head, head)}, _sum)
    for _, node, g in walk.nodes(last):
        given = [] if node.map is not None else [spans[j] for j in node.inputs]
        walk.give(node, node.adjoint(g, given, graph.rounding))
    low, high = walk.weight.get(0, (head.new_zeros(*head.shape[:2], graph.inputs),) * 2)
    return low.reshape(*head.shape[:2], -1), high.reshape(*head.shape[:2], -1)


def _sum(a: Span, b: Span) -> Span:
    """The sum of two intervals, rounded outward; a sum of opposite infinities is no bound."""
    low = a[0] + b[0]
    high = a[1] + b[1]
    slack = UNIT * (low.abs() + high.abs())
    return (
        torch.nan_to_num(low - slack, nan=-math.inf, posinf=math.inf, neginf=-math.inf),
        torch.nan_to_num(high + slack, nan=math.inf, posinf=math.inf, neginf=-math.inf),
    )


def entry_norms(low: Tensor, high: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """Upper bounds on `||J||_{r -> s}` of the matrices between two, `(N, m, n) -> (N,)`; infinite
    where an entry is.

    By the largest magnitudes, `|| max(|low|, |high|) ||`, which is exact for s = inf, and by
    `||middle|| + ||radius||`.
    """
    most = torch.maximum(low.abs(), high.abs())
    good = torch.isfinite(most).flatten(1).all(1)
    most = torch.where(good[:, None, None], most, 0.0)
    slack = (
        1 + 1e-12 + 4 * UNIT * (most.shape[1] + most.shape[2])
    )  # sums, and singular values to backward stability
    best = positive_norms(most, norm_in, norm_out) * slack
    _, m, n = most.shape
    hard = norm_in != 1 and not norm_in == norm_out == 2
    if norm_out != math.inf and (
        not hard or (m if norm_out == 1 and (norm_in == 2 or m <= n) else n) <= FEW_SIGNS
    ):
        middle = torch.where(good[:, None, None], (low + high) / 2, 0.0)
        radius = torch.where(good[:, None, None], (high - low) / 2, 0.0) + UNIT * most
        split = operator_norm(middle, norm_in, norm_out) + positive_norms(radius, norm_in, norm_out)
        best = torch.minimum(best, split * slack)
    return torch.where(good, best, math.inf)


def entries(graph: Graph, spans: Mapping[int, Span], tighten: bool = False) -> Span:
    """Every partial derivative over N regions, `(N, K, n)` each: by intervals and, on bounded
    regions, by tangents.
    """
    eye = torch.eye(graph.outputs, dtype=torch.float64, device=graph.device)
    count = len(next(iter(spans.values()))[0]) if spans else 1
    part = max(1, NUMBERS // (count * max(node.size for node in graph.nodes)))
    found = [adjoint(graph, spans, rows) for rows in torch.split(eye, part)]
    low = torch.cat([low for low, _ in found], 1)
    high = torch.cat([high for _, high in found], 1)
    if all(torch.isfinite(side).all() for span in spans.values() for side in span):
        least, top = centred(graph, spans, eye, tighten)
        low = torch.fmax(low, least)
        high = torch.fmin(high, top)
    return low, high


def secants(bounds: Bounds) -> Bounds:
    """A ReLU network among whose Jacobians are all those of a smooth one: `f' in [a, b]` is `a v +
    (b - a) relu(v)`, free.

    So what knows of a ReLU only that its slope lies in [0, 1], as the semidefinite bound does,
    holds for the smooth network.
    """
    nodes: list[Node] = []
    moved: list[int] = []  # where each node is now
    spans: dict[int, Span] = {}

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    for i, node in enumerate(bounds.graph.nodes):
        inputs = tuple(moved[j] for j in node.inputs)
        if node.activation is None:
            moved.append(add(replace(node, inputs=inputs)))
            if i in bounds.spans:
                spans[moved[i]] = bounds.spans[i]
            continue
        least, top = bounds.derivative(i)
        zero = torch.zeros_like(least)
        one = torch.ones_like(least)
        bend = add(Node(inputs, node.shape, node.place, Relu(zero.new_zeros(()))))
        spans[bend] = -one, one
        width = torch.nextafter(top - least, one * math.inf)
        moved.append(add(Node((bend,), node.shape, node.place, Affine(Scale(width)))))
        if least.any():
            straight = add(Node(inputs, node.shape, node.place, Affine(Scale(least))))
            moved[i] = add(Node((moved[i], straight), node.shape, node.place, Affine(Sum(2))))
    return Bounds(Graph(tuple(nodes), bounds.graph.rounding), bounds.region, spans)
