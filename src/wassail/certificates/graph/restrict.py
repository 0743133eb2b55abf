"""The same network as a function of some of its inputs, the others held at their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix, Pick
from wassail.certificates.graph.region import Region


def restricted(graph: Graph, region: Region) -> tuple[Graph, Region]:
    """A network and a region without the inputs that the region holds, `low == high`.

    A bound on the result has no direction for them in any of its factors. At least one input must
    be free.
    """
    free = region.low < region.high
    if bool(free.all()):
        return graph, region
    low, high, centre = (side[free] for side in (region.low, region.high, region.centre))
    held = torch.where(free, 0.0, region.low)
    return _without(graph, free, held), replace(region, low=low, high=high, centre=centre)


def _without(graph: Graph, free: Tensor, held: Tensor) -> Graph:
    """The network on its free inputs: matrices that read the input lose columns, everything else
    reads the input put together again.
    """
    start = graph.nodes[0]
    count = int(free.sum())
    source = torch.full_like(free, -1, dtype=torch.int64)
    source[free] = torch.arange(count, device=free.device)
    joined = Affine(Pick(source, (count,), start.shape), held.reshape(start.shape))
    nodes = [Node((), (count,), start.place), Node((0,), start.shape, start.place, joined)]
    plain = {0}  # the input itself, perhaps in another shape
    for i, node in enumerate(graph.nodes[1:], 1):
        op = node.op
        first = node.inputs[0]
        same = isinstance(op, Affine) and isinstance(op.map, Pick) and op.map.source is None
        if same and node.bias is None and first in plain:
            plain.add(i)
        if (
            isinstance(op, Affine)
            and isinstance(op.map, Matrix)
            and len(node.shape) == 1
            and first in plain
        ):
            nodes.append(replace(node, inputs=(0,), op=_columns(op, op.map, free, held)))
        else:
            nodes.append(replace(node, inputs=tuple(j + 1 for j in node.inputs)))
    return replace(graph, nodes=reached(nodes, len(nodes) - 1))


def _columns(op: Affine, map_: Matrix, free: Tensor, held: Tensor) -> Affine:
    """`W x + b` as a function of the free entries of x.

    The bias is a sum now; one rounding for each term is more than a sum of the rest is charged.
    """
    moved = map_.weight @ held
    terms = int((~free).sum()) + 2
    size = terms * (map_.weight.abs() @ held.abs()) + op.bias_size
    bias = moved if op.bias is None else op.bias + moved
    most = None if map_.most is None else map_.most[:, free]
    return Affine(Matrix(map_.weight[:, free], most), bias, size)


def reached(nodes: Sequence[Node], last: int) -> tuple[Node, ...]:
    """Only the input and the nodes that `last` depends on, renumbered."""
    order = sorted(ancestors(nodes, last))
    number = {old: new for new, old in enumerate(order)}
    return tuple(replace(nodes[i], inputs=tuple(number[j] for j in nodes[i].inputs)) for i in order)


def ancestors(nodes: Sequence[Node], last: int) -> set[int]:
    """The input, a node, and every node it depends on."""
    needed = {0, last}
    for i in range(last, 0, -1):
        if i in needed:
            needed.update(nodes[i].inputs)
    return needed
