"""Equal scales for all layers, by powers of two, so that nothing underflows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.graph import Graph, Node
from wassail.certificates.graph.maps import Average, Concat, Conv, Linear, Matrix, Pick, Scale, Sum
from wassail.rounding import shifted


def equilibrated(graph: Graph, x: Tensor) -> Graph:
    """The same function with values of order one on the way, at samples `(m, *shape)`: powers of
    two move between layers.

    Nodes that scale together (a ReLU, a sum, moved entries and what they come from) are a group
    with one exponent; a matrix, a convolution or a scale takes the difference between two groups.
    The input, the logits and what touches a smooth function keep their scale, and so does a group
    within 2^16 of order one. Powers of two are exact; if they were not, for weights at both ends of
    float64, the network stays as it is.
    """
    group = _groups(graph)
    fixed = {group[0], group[len(graph.nodes) - 1]}
    for i, node in enumerate(graph.nodes):
        if node.activation is not None or node.curve is not None:
            fixed |= {group[i], *(group[j] for j in node.inputs)}
    sizes: dict[int, list[int]] = {g: [] for g in group}
    for g, size in zip(group, _exponents(graph, x)):
        if g not in fixed and size is not None:
            sizes[g].append(size)
    exponent = {g: -max(found, default=0) for g, found in sizes.items()}
    exponent = {g: e if abs(e) > _NEAR_ONE else 0 for g, e in exponent.items()}
    if not any(exponent.values()):
        return graph
    nodes = []
    for i, node in enumerate(graph.nodes):
        after = exponent[group[i]]
        before = exponent[group[node.inputs[0]]] if node.inputs else 0
        try:
            nodes.append(_moved_by(node, after - before, after))
        except ArithmeticError:
            return graph
    return replace(graph, nodes=tuple(nodes))


_NEAR_ONE = 16  # exponents up to which a group is left as it is


def _groups(graph: Graph) -> list[int]:
    """For each node the first of those that scale together with it."""
    group = list(range(len(graph.nodes)))
    for i, node in enumerate(graph.nodes):
        if node.slope is None and not isinstance(node.map, Pick | Average | Sum | Concat):
            continue
        joined = {group[i], *(group[j] for j in node.inputs)}
        group = [min(joined) if g in joined else g for g in group]
    return group


def _exponents(graph: Graph, x: Tensor) -> list[int | None]:
    """The exponent of the largest value of each node at samples, None if all are 0; nothing
    overflows or underflows here.
    """
    found: list[tuple[Tensor, int]] = []  # values, at most 1, and the exponent that was taken out

    def scaled(values: Tensor, exponent: int) -> tuple[Tensor, int]:
        own = _exponent(values) or 0
        return shifted(values, -own), exponent + own

    for node in graph.nodes:
        given = [found[j] for j in node.inputs]
        top = max((e for _, e in given), default=0)
        values = [shifted(v, max(e - top, -2000)) for v, e in given]  # the largest decides
        match node.map:
            case Matrix(weight) | Conv(weight) | Scale(weight):
                own = _exponent(weight) or 0
                match node.map:
                    case Matrix():
                        small: Linear = Matrix(shifted(weight, -own))
                    case Conv() as conv:
                        small = replace(conv, weight=shifted(weight, -own))
                    case _:
                        small = Scale(shifted(weight, -own))
                out, top = small.forward(*values), top + own
            case None if not node.inputs:
                out = x.double()
            case None if node.slope is not None:
                out = torch.where(values[0] > 0, values[0], node.slope * values[0])
            case None:  # smooth: at its own scale
                plain = [shifted(v, max(min(top, 1000), -2000)) for v in values]
                smooth = ACTIVATIONS[node.activation].value if node.activation else node.curve.value  # type: ignore[union-attr]
                out, top = smooth(*plain).nan_to_num(), 0
            case _:
                out = node.map.forward(*values)
        out, top = scaled(out, top)
        if node.bias is not None:
            bias, high = scaled(node.bias, 0)
            most = max(top, high) if bool(out.any()) else high
            out = shifted(out, max(top - most, -2000)) + shifted(bias, max(high - most, -2000))
            out, top = scaled(out, most)
        found.append((out, top))
    return [top if bool(values.any()) else None for values, top in found]


def _exponent(values: Tensor) -> int | None:
    """The exponent of the largest of finite values; None if all are 0."""
    top = float(values.abs().amax()) if values.numel() else 0.0
    return math.frexp(top)[1] if 0 < top < math.inf else None


def _moved_by(node: Node, exponent: int, bias_exponent: int) -> Node:
    """The node with its weights times a power of two and its bias times another, or an
    `ArithmeticError`: not exact.
    """
    match node.map:
        case Matrix(weight, most):
            map_: Linear | None = Matrix(
                _exactly(weight, exponent), None if most is None else shifted(most, exponent)
            )
        case Conv(weight):
            map_ = replace(node.map, weight=_exactly(weight, exponent))
        case Scale(factor):
            map_ = Scale(_exactly(factor, exponent))
        case _:
            map_ = node.map
    bias = None if node.bias is None else _exactly(node.bias, bias_exponent)
    most = None if node.bias_most is None else shifted(node.bias_most, bias_exponent)
    return replace(node, map=map_, bias=bias, bias_most=most, exponent=bias_exponent)


def _exactly(values: Tensor, exponent: int) -> Tensor:
    moved = shifted(values, exponent)
    if not torch.equal(shifted(moved, -exponent), values):
        raise ArithmeticError
    return moved
