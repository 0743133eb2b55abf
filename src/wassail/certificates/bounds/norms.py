"""Operator norms of the linear maps in a graph, rounded up, and the product bound they give for a
whole network.

Every map knows its own norm (`Linear.norm`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeAlias, assert_never
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.graph.contract import contractions
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Relu, Smooth
from wassail.certificates.graph.maps import Concat, Linear, Matrix, Pick
from wassail.certificates.graph.matrix_norms import UP, change, matrix_norm
from wassail.rounding import UNIT, length, times
from wassail.threat import dual


def map_norm(map_: Linear, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
    """An upper bound on `||map||_{r -> r}` for one sample of shape `shape -> output`; kept for
    as long as the map lives.
    """
    known = _KNOWN.setdefault(map_, {})
    # Most maps keep their shapes themselves, but nothing obliges one to.
    key = (norm, shape, output)
    if key not in known:
        known[key] = map_.norm(norm, shape, output)
    return known[key]


_Key: TypeAlias = "tuple[float, tuple[int, ...], tuple[int, ...]]"
_KNOWN: WeakKeyDictionary[Linear, dict[_Key, float]] = WeakKeyDictionary()


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
    slopes = {
        i: steepest_slope(node.op)
        for i, node in enumerate(graph.nodes)
        if isinstance(node.op, Smooth)
    }
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
    if graph.curved or not isinstance(last.op, Affine) or not isinstance(last.op.map, Matrix):
        found = [product(graph.head(row[None]), norm, math.inf) for row in rows]
        return torch.tensor(found, dtype=torch.float64)
    before = Graph(graph.nodes[: last.inputs[0] + 1])
    weight = last.op.map.weight.to(HOST)
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
        isinstance(node.op, Smooth) and node.op.seen and i not in steepest
        for i, node in enumerate(graph.nodes)
    )


def steepest_slope(activation: Smooth) -> float:
    """`max |f'|` on R, beside a jump, rounded up: GELU 1.128905 (erf form), 1.128994 (tanh form),
    SiLU 1.099840 to six decimals.
    """
    far = torch.tensor(math.inf, dtype=torch.float64)
    least, top = activation.function.derivative_range(-far, far)
    return max(-float(least), float(top))


# long: it is one match over the kinds of nodes, and norms change on the way in and out
def _walk(
    graph: Graph, norm_in: float, inner: float, norm_out: float, steepest: Mapping[int, float]
) -> float:
    """The product of norms, node by node."""
    last = len(graph.nodes) - 1
    enter = change(graph.inputs, norm_in, inner)
    sorted_ = contractions(graph)
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
            case Affine(Pick(None)):
                plain = True
                found.append(given[0])
            case Affine(Matrix(weight)) if len(node.shape) == 1:
                source = norm_in if flat[0] else inner
                target = norm_out if i == last else inner
                found.append(times(given[0], matrix_norm(weight, source, target)))
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
    if isinstance(final.op, Affine) and isinstance(final.op.map, Matrix) and len(final.shape) == 1:
        return found[-1]
    if raw[-1]:
        return found[-1] * change(graph.outputs, norm_in, norm_out)
    return found[-1] * change(graph.outputs, inner, norm_out)


def _combined(graph: Graph, i: int, map_: Linear, given: list[float], norm: float) -> float:
    if isinstance(map_, Concat):
        return float(torch.linalg.vector_norm(torch.tensor(given, dtype=torch.float64), norm)) * UP
    if len(given) > 1:
        return math.fsum(given) * UP
    node = graph.nodes[i]
    return times(given[0], map_norm(map_, norm, graph.nodes[node.inputs[0]].shape, node.shape))
