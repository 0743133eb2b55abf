"""A network followed by the rows of a specification (THEORY 11).

The outputs are 0 and minus the rows, so that output 0 is the label of a classifier whose rivals are
the rows that fail. Rows that pick one output, with either sign, are merged into the last matrix:
that rounds nothing, in exact arithmetic and as the network is executed. Others are one more layer,
which the model does not execute: a margin is the exact row of the outputs that it gives.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Call, Matrix
from wassail.errors import InputError


def specified(graph: Graph, rows: Tensor) -> Graph:
    """The network with outputs `(0, -rows f)`.

    Args:
        graph: the network f.
        rows: float64 `(R, K)`.
    """
    if graph.common and bool(rows.sum(1).any()):
        raise InputError(
            "the model ends in a log-softmax, of which certificates know differences only: give "
            "rows that sum to 0, or the model without it."
        )
    rows = rows.to(graph.device)
    merged = _merged(graph.nodes[-1], rows)
    if merged is not None:
        return replace(graph, nodes=(*graph.nodes[:-1], merged))
    weight = torch.cat([torch.zeros_like(rows[:1]), -rows])
    place = (len(graph.nodes) - 1,)
    node = Node(place, (len(weight),), "the specification", Affine(Matrix(weight)), ())
    return replace(graph, nodes=(*graph.nodes, node))


def settled(graph: Graph, columns: Tensor, offsets: Tensor) -> Graph:
    """The exact network with some of its outputs, and numbers added to them, for one sample.

    Args:
        graph: what `specified` returned.
        columns: which outputs, `(J,)`.
        offsets: float64 `(J,)`.
    """
    last = graph.nodes[-1]
    op = last.op
    assert isinstance(op, Affine) and isinstance(op.map, Matrix)
    most = None if op.map.most is None else op.map.most[columns]
    bias = torch.zeros_like(offsets)
    size = bias
    if op.bias is not None:
        bias = op.bias.expand(last.shape)[columns]
        size = bias.abs() if op.bias_most is None else op.bias_most.expand(last.shape)[columns]
    affine = Affine(Matrix(op.map.weight[columns], most), bias + offsets, size + offsets.abs())
    node = replace(last, op=affine, shape=(len(columns),), calls=None)
    return replace(graph, nodes=(*graph.nodes[:-1], node), arithmetic="exact")


def _merged(last: Node, rows: Tensor) -> Node | None:
    """The last layer with one row for each of the rows, and one of zeros before them; None where
    that would round something.
    """
    op = last.op
    single = ((rows != 0).sum(1) == 1) & (rows.abs().amax(1) == 1)
    if not bool(single.all()) or not isinstance(op, Affine) or not isinstance(op.map, Matrix):
        return None
    calls = last.calls
    known = calls is None or not calls or (len(calls) == 1 and isinstance(calls[0].map, Matrix))
    if not known or len(last.shape) != 1 or last.exponent:
        return None
    place = rows.abs().argmax(1)
    sign = -rows.sum(1)

    def sizes(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        chosen = values.expand(last.shape)[place]
        return torch.cat([torch.zeros_like(chosen[:1]), chosen])

    def matrix(map_: Matrix) -> Matrix:
        weight = sign[:, None] * map_.weight[place]
        most = None if map_.most is None else _padded(map_.most[place])
        return Matrix(_padded(weight), most)

    bias = sizes(op.bias)
    if bias is not None:
        bias[1:] *= sign
    affine = Affine(matrix(op.map), bias, sizes(op.bias_most))
    if calls:
        call = calls[0]
        assert isinstance(call.map, Matrix)
        calls = (Call(matrix(call.map), sizes(call.bias), call.roundings, sizes(call.noise)),)
    return replace(last, op=affine, shape=(len(rows) + 1,), calls=calls)


def _padded(rows: Tensor) -> Tensor:
    """A row of zeros, then these."""
    return torch.cat([torch.zeros_like(rows[:1]), rows])
