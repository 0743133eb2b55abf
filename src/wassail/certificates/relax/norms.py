"""Operator norms of the linear maps in a graph, rounded up, and the product bound they give for a
whole network.

Every map knows its own norm (`Linear.norm`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import assert_never

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Relu, Smooth
from wassail.certificates.graph.maps import Linear
from wassail.certificates.graph.matrix_norms import UP, change, matrix_norm
from wassail.certificates.graph.nonexpansive_sort import nonexpansive_sorts
from wassail.rounding import UNIT, length, times
from wassail.threat import dual


def map_norm(map_: Linear, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
    """An upper bound on `||map||_{r -> r}` for one sample of shape `shape -> output`; kept for
    as long as the map lives.
    """
    key = ("norm", norm, shape, output)
    return map_.kept(key, lambda: map_.norm(norm, shape, output), small=True)


def product(
    graph: Graph, norm_in: float, norm_out: float, steepest: Mapping[int, float] | None = None
) -> float:
    """`||J||_{r -> s}` on all of R^n by the norms of the layers: the best of walking through in
    norm 1, 2 or inf.

    Additions add, concatenations combine in the norm, ReLUs and sorting do not stretch, a smooth
    activation stretches by its steepest slope (`steepest`: on the region, by node; else on R). The
    first matrix changes from r to the norm of the walk and the last one from that to s, each in one
    piece where it is a matrix. Infinite where a product, a softmax or a normalisation is in the
    way, whose norms depend on where they are, and where an activation jumps.
    """
    if graph.curved or _jumps(graph, steepest or {}):
        return math.inf
    slopes = {i: node.act.steepest for i, node in enumerate(graph.nodes) if node.act is not None}
    found = math.inf
    for inner in (1.0, math.inf, 2.0):  # the dear one last: without it there is a bound in any case
        with suppress(clock.Late):
            walked = _walk(graph, norm_in, inner, norm_out, {**slopes, **(steepest or {})})
            found = min(found, walked)
    return found * UP


def pair_products(graph: Graph, norm: float, label: int) -> Tensor:
    """`||d(theta_label - theta_j)||` on all of R^n for every class j by norms, `(K,)` on the CPU.

    As `product` of each difference of two logits, but the layers before the last are walked once.
    """
    last = graph.nodes[-1]
    rows = torch.eye(graph.outputs, dtype=torch.float64)
    rows = rows[label] - rows
    if _jumps(graph, {}):
        return torch.full((graph.outputs,), math.inf, dtype=torch.float64)
    if graph.curved or last.matrix is None:
        found = [product(graph.head(row[None]), norm, math.inf) for row in rows]
        return torch.tensor(found, dtype=torch.float64)
    before = Graph(graph.nodes[: last.inputs[0] + 1])
    weight = last.matrix.to(HOST)
    ways = weight[label] - weight
    slack = 1 + (ways.shape[1] + 16) * UNIT
    lengths = [
        product(before, norm, inner) * length(ways, dual(inner), 1)
        for inner in (1.0, 2.0, math.inf)
    ]
    return torch.stack(lengths).amin(0) * slack


def _jumps(graph: Graph, steepest: Mapping[int, float]) -> bool:
    """Whether an activation jumps whose slopes on the region are not known."""
    return any(
        node.act is not None and node.act.seen and i not in steepest
        for i, node in enumerate(graph.nodes)
    )


def _walk(
    graph: Graph, norm_in: float, inner: float, norm_out: float, steepest: Mapping[int, float]
) -> float:
    """The product of norms, node by node."""
    last = len(graph.nodes) - 1
    enter = change(graph.inputs, norm_in, inner)
    sorted_ = nonexpansive_sorts(graph)
    found: list[float] = []
    raw: list[
        bool
    ] = []  # whether a node is the input itself, its entries moved: still measured in norm r
    for i, node in enumerate(graph.nodes):
        if inner == 2:
            clock.look()
        given = [found[j] for j in node.inputs]
        flat = [raw[j] for j in node.inputs]
        plain = False
        match node.op:
            case Input():
                found.append(1.0)
            case Relu() | Smooth() | Curved():
                found.append(times(given[0] * (enter if flat[0] else 1.0), steepest.get(i, 1.0)))
            case Affine(map_) if map_.in_place and len(given) == 1:
                plain = True
                found.append(given[0])
            case Affine() if node.matrix is not None:
                source = norm_in if flat[0] else inner
                target = norm_out if i == last else inner
                found.append(times(given[0], matrix_norm(node.matrix, source, target)))
            case Affine(map_):
                given = [g * (enter if f else 1.0) for g, f in zip(given, flat)]
                found.append(_combined(graph, i, map_, given, inner))
            case _:
                assert_never(node.op)
        if i in sorted_:
            base = sorted_[i].base
            found[i] = min(found[i], found[base] * (enter if raw[base] else 1.0))
        raw.append(not node.inputs or (plain and flat[0]))
    final = graph.nodes[last]
    if final.matrix is not None:
        return found[-1]
    if raw[-1]:
        return found[-1] * change(graph.outputs, norm_in, norm_out)
    return found[-1] * change(graph.outputs, inner, norm_out)


def _combined(graph: Graph, i: int, map_: Linear, given: list[float], norm: float) -> float:
    if map_.joins:
        return float(torch.linalg.vector_norm(torch.tensor(given, dtype=torch.float64), norm)) * UP
    if len(given) > 1:
        return math.fsum(given) * UP
    node = graph.nodes[i]
    return times(given[0], map_norm(map_, norm, graph.nodes[node.inputs[0]].shape, node.shape))
