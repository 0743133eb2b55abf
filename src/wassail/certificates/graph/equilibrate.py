"""Equal scales for all layers, by powers of two, so that nothing underflows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import assert_never

from torch import Tensor

from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Node, Relu, Smooth
from wassail.certificates.graph.maps import exactly_shifted
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
        if isinstance(node.op, Smooth | Curved):
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
        match node.op:
            case Relu():
                pass
            case Affine(map_) if map_.coefficients is None:
                pass
            case Input() | Affine() | Smooth() | Curved():
                continue
            case _:
                assert_never(node.op)
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
        match node.op:
            case Affine(map_):
                own = 0 if map_.coefficients is None else _exponent(map_.coefficients) or 0
                if map_.coefficients is not None:
                    map_ = map_.reweighted(shifted(map_.coefficients, -own))
                out, top = map_.forward(*values), top + own
            case Input():
                out = x.double()
            case Relu():
                out = node.op.value(*values)
            case Smooth() | Curved():  # at its own scale
                plain = [shifted(v, max(min(top, 1000), -2000)) for v in values]
                out, top = node.op.value(*plain).nan_to_num(), 0
            case _:
                assert_never(node.op)
        out, top = scaled(out, top)
        if isinstance(node.op, Affine) and node.op.bias is not None:
            bias, high = scaled(node.op.bias, 0)
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
    if not isinstance(node.op, Affine):
        return replace(node, exponent=bias_exponent)
    map_, bias, most = node.op.map, node.op.bias, node.op.bias_most
    op = Affine(
        map_ if map_.coefficients is None else map_.moved_by(exponent),
        None if bias is None else exactly_shifted(bias, bias_exponent),
        None if most is None else shifted(most, bias_exponent),
    )
    return replace(node, op=op, exponent=bias_exponent)
