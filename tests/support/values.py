"""Linear bounds (CROWN) of a piecewise-linear network over one region, in values: written apart
from `wassail.certificates.relax.crown`, which works in deviations, to compare with it.
"""

import math
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Relu, Smooth
from wassail.certificates.graph.maps import magnitude_map, rounding_map
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.ranges import Bounds, Span, gamma, magnitudes
from wassail.ties import firm, steep_below


def intervals(graph: Graph, region: Region) -> Bounds:
    """Interval arithmetic, one pass."""
    graph.refuse_smooth()
    low, high = region.box
    shape = graph.nodes[0].shape
    span: list[Span] = []
    spans: dict[int, Span] = {}
    slack = gamma(graph)
    for i, node in enumerate(graph.nodes):
        given = [span[j] for j in node.inputs]
        match node.op:
            case Relu(slope):
                spans[i] = (given[0][0][0], given[0][1][0])
                # 0 times -inf is 0 here
                off = [torch.where(slope > 0, slope * s.clamp(max=0), 0.0) for s in given[0]]
                span.append((given[0][0].clamp(min=0) + off[0], given[0][1].clamp(min=0) + off[1]))
            case Affine() if region.bounded:
                span.append(_affine(node.op, given, slack))
            case Affine():  # nothing is bounded on R^n
                unknown = low.new_full((1, *node.shape), math.inf)
                span.append((-unknown, unknown))
            case Input():
                span.append((low.reshape(1, *shape), high.reshape(1, *shape)))
            case Smooth() | Curved():
                raise AssertionError("refused above")
            case _:
                assert_never(node.op)
    return Bounds(graph, region, spans)


def _affine(op: Affine, given: list[Span], slack: float) -> Span:
    """The range of an affine map of boxes; slack: relative rounding error."""
    middle = [(a + b) / 2 for a, b in given]
    radius = [(b - a) / 2 for a, b in given]
    centre = op.map.forward(*middle)
    reach = magnitude_map(op.map).forward(*radius)
    sizes = [torch.maximum(a.abs(), b.abs()) for a, b in given]
    error = slack * rounding_map(op.map).forward(*sizes)
    if op.bias is not None:
        centre = centre + op.bias
        error = error + slack * op.bias_size
    return centre - reach - error, centre + reach + error


def crown(graph: Graph, region: Region) -> Bounds:
    """Linear bounds on every neuron that intervals leave undecided, layer by layer, each with those
    before it.
    """
    bounds = intervals(graph, region)
    if not region.bounded:
        return bounds
    size = magnitudes(graph, _farthest(region))
    error = gamma(graph) * (len(bounds.spans) + 2)
    for i in graph.relus:
        source = graph.nodes[i].inputs[0]
        low, high = (side.flatten() for side in bounds.spans[i])
        rows = ((low < 0) & (high > 0)).nonzero().flatten()
        if not len(rows) or source == 0:
            continue
        slack = error * size[source].flatten()[rows]
        unit = low.new_zeros(len(rows), len(low)).scatter(1, rows[:, None], 1.0)
        upper = substitute(bounds, source, unit) + slack
        lower = -substitute(bounds, source, -unit) - slack
        low = low.clone()
        high = high.clone()
        low[rows], high[rows] = torch.maximum(low[rows], lower), torch.minimum(high[rows], upper)
        shape = graph.nodes[i].shape
        bounds = replace(
            bounds, spans={**bounds.spans, i: (low.reshape(shape), high.reshape(shape))}
        )
    return bounds


def linear_upper(bounds: Bounds, node: int, rows: Tensor) -> Tensor:
    """Upper bounds on `<row, value of the node>` over the region, rounded outward: `(m, size)
    -> (m,)`.
    """
    size = magnitudes(bounds.graph, _farthest(bounds.region))[node].reshape(-1)
    error = gamma(bounds.graph) * (len(bounds.spans) + 2)
    return substitute(bounds, node, rows) + error * (rows.abs() @ size)


def substitute(bounds: Bounds, last: int, rows: Tensor) -> Tensor:
    """Upper bounds on `<row, value of the node>` over the region, `(m, size) -> (m,)`, before
    rounding.
    """
    graph = bounds.graph
    weight: dict[int, Tensor] = {last: rows.reshape(-1, *graph.nodes[last].shape)}
    constant = rows.new_zeros(len(rows), dtype=torch.float64)
    for i in range(last, 0, -1):
        if i not in weight:
            continue
        node = graph.nodes[i]
        w = weight.pop(i)
        match node.op:
            case Relu(slope):
                (up, up_shift), (down, _) = _value_lines(bounds.spans[i], slope)
                w = firm(w)
                plus = w.clamp(min=0)
                constant = constant + _rows(plus * up_shift).sum(1)
                _accumulate(weight, node.inputs[0], plus * up + (w - plus) * down)
            case Affine(map_, bias):
                if bias is not None:
                    constant = constant + _rows(w * bias).sum(1)
                for j, part in zip(node.inputs, map_.transpose(w)):
                    _accumulate(weight, j, part)
            case Input() | Smooth() | Curved():
                raise AssertionError("bounds are of piecewise-linear networks")
            case _:
                assert_never(node.op)
    if 0 not in weight:
        return constant
    return constant + bounds.region.upper(firm(_rows(weight[0])))


def _value_lines(span: Span, slope: Tensor) -> tuple[Span, Span]:
    """The lines above and below `max(v, slope v)` on a span, each as (factor, shift); the lower
    one passes through 0.
    """
    low, high = span
    crossing = (low < 0) & (high > 0)
    width = torch.where(crossing, high - low, 1.0)
    up = torch.where(
        crossing, (high - slope * low) / width, torch.where((low >= 0) & (high > 0), 1.0, slope)
    )
    shift = torch.where(crossing, (slope * low - up * low).clamp(min=0), 0.0)
    down = torch.where(crossing, torch.where(steep_below(low, high), 1.0, slope), up)
    return (up, shift), (down, torch.zeros_like(down))


def _farthest(region: Region) -> Tensor:
    low, high = region.box
    return torch.maximum(low.abs(), high.abs())


def _rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)  # unlike flatten(1) also for single numbers


def _accumulate(store: dict[int, Tensor], key: int, value: Tensor) -> None:
    store[key] = store[key] + value if key in store else value
