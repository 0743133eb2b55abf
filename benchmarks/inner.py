"""What limits a linear bound below splits: the spans of inner neurons.

    python benchmarks/inner.py [--first 1000] [--images 5] [--factor 1.3] [NETWORK ...]

Prints docs/inner.md. The ball of a sample is `factor` times CROWN's radius, linf. A search goes
down 16 splits, each time into the child with the lower bound. There the bound on the worst rival's
margin is compared for several spans of the inner neurons. Nothing here is a certificate: the bounds
are not rounded outward.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

import wassail as ws
import zoo_path
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Relu, Smooth
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.ascent import Ascent
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.ranges import Bounds, Span
from wassail.certificates.relax.rows import flattened
from wassail.certificates.search.margins import ASCENT_STEPS, ROOT_STEPS
from wassail.certificates.search.tree import Tree
from wassail.ties import firm, steep_below

BOX = (0.0, 1.0)
NETWORKS = ("vnn_resnet2b", "cifar_base_kw")
DEPTH = 16  # splits
ROWS = 2**24  # numbers in one tensor of a pass
ASCENT = 20  # steps on slopes
CLIPPING = 60  # steps on the multipliers of the splits' half-spaces
CLIMB = 40  # steps of the attack on a neuron
Signs = dict[int, list[tuple[int, int]]]  # ReLU node -> entries and their signs


def open_entries(span: Span) -> Tensor:
    """The places of undecided neurons."""
    low, high = span
    return ((low < 0) & (high > 0)).flatten().nonzero()[:, 0]


def rows_of(places: Tensor, size: int) -> Tensor:
    """Unit vectors."""
    return torch.zeros(len(places), size, dtype=torch.float64).scatter(1, places[:, None], 1.0)


def substitute(bounds: Bounds, node: int, rows: Tensor, steps: int = 0) -> Tensor:
    """Upper bounds on `<row, value of the node>` over the region, `(m, size) -> (m,)`; the caller
    adds the rounding slack.

    Substituted backward to the input: a positive coefficient takes the neuron's upper line, a
    negative one its lower line.
    """
    graph = bounds.graph
    widest = max(n.size for n in graph.nodes[: node + 1])
    part = max(1, ROWS // widest)
    return torch.cat(
        [_optimised(bounds, node, rows[k : k + part], steps) for k in range(0, len(rows), part)]
    )


def _optimised(bounds: Bounds, last: int, rows: Tensor, steps: int) -> Tensor:
    """The best of `steps` choices of the lower lines: any slope between the neuron's two gives
    a bound, so all of them do.
    """
    alpha: dict[int, Tensor] = {}
    for i in bounds.spans:
        if i < last and bounds.unstable(i).any():
            start = _value_lines(bounds.spans[i], _slope(bounds, i))[1][0]
            alpha[i] = start.expand(len(rows), *start.shape).clone()
    best = _substitute(bounds, last, rows)
    ascent = Ascent(list(alpha.values()))
    for step in range(1, steps + 1 if alpha else 1):
        with torch.enable_grad():
            leaves = {i: a.detach().requires_grad_(True) for i, a in alpha.items()}
            value = _substitute(bounds, last, rows, leaves)
            if not value.requires_grad:  # no undecided neuron feeds this node
                break
            pulls = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
        for i, move in zip(alpha, ascent.moves(pulls)):
            if move is not None:
                least = torch.maximum(alpha[i] - 0.2 * 0.95**step * move, _slope(bounds, i))
                alpha[i] = torch.minimum(least, alpha[i].new_ones(()))
        best = torch.minimum(best, _substitute(bounds, last, rows, alpha))
    return best


def _substitute(
    bounds: Bounds, last: int, rows: Tensor, alpha: Mapping[int, Tensor] | None = None
) -> Tensor:
    """alpha: slopes of the lower lines of undecided neurons, `(m, *shape)` for each ReLU node,
    instead of CROWN's choice.
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
                if alpha is not None and i in alpha:
                    down = torch.where(bounds.unstable(i), alpha[i], down)
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
    return constant + bounds.region.upper(firm(_rows(weight[0])), cut=not weight[0].requires_grad)


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


def _slope(bounds: Bounds, i: int) -> Tensor:
    op = bounds.graph.nodes[i].op
    assert isinstance(op, Relu)
    return op.slope


def _rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)  # unlike flatten(1) also for single numbers


def _accumulate(store: dict[int, Tensor], key: int, value: Tensor) -> None:
    store[key] = store[key] + value if key in store else value


def with_span(bounds: Bounds, node: int, low: Tensor, high: Tensor) -> Bounds:
    """The same bounds with another span of one node."""
    shape = bounds.graph.nodes[node].shape
    return replace(bounds, spans={**bounds.spans, node: (low.reshape(shape), high.reshape(shape))})


def narrowed(bounds: Bounds, node: int, places: Tensor, low: Tensor, high: Tensor) -> Bounds:
    """Some entries of a node between further limits."""
    below, above = (side.flatten().clone() for side in bounds.spans[node])
    below[places] = torch.maximum(below[places], low)
    above[places] = torch.minimum(above[places], high)
    return with_span(bounds, node, below, above)


def signed(bounds: Bounds, signs: Signs, refresh: bool) -> Bounds:
    """The bounds with some signs fixed; refresh: the layers after the first of them again."""
    graph = bounds.graph
    below_a_split = False
    for i in graph.relus:
        source = graph.nodes[i].inputs[0]
        places = open_entries(bounds.spans[i])
        if refresh and below_a_split and len(places):
            unit = rows_of(places, graph.nodes[i].size)
            high = substitute(bounds, source, unit)
            low = -substitute(bounds, source, -unit)
            bounds = narrowed(bounds, i, places, low, high)
        below, above = (side.flatten().clone() for side in bounds.spans[i])
        for entry, sign in signs.get(i, []):
            below_a_split = True
            if sign > 0:
                below[entry] = below[entry].clamp(min=0)
            else:
                above[entry] = above[entry].clamp(max=0)
        bounds = with_span(bounds, i, below, above)
    return bounds


def lines_above(bounds: Bounds, node: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """`<row, value> <= constant + <a, x>`, by CROWN's slopes: `(m,)` and `(m, n)`."""
    graph = bounds.graph
    weight = {node: rows.reshape(-1, *graph.nodes[node].shape)}
    constant = rows.new_zeros(len(rows))
    for i in range(node, 0, -1):
        if i not in weight:
            continue
        w = weight.pop(i)
        op = graph.nodes[i].op
        if isinstance(op, Affine):
            if op.bias is not None:
                constant = constant + (w * op.bias).flatten(1).sum(1)
            pieces = zip(graph.nodes[i].inputs, op.map.transpose(w))
        else:
            assert isinstance(op, Relu)
            low, high = bounds.spans[i]
            open_ = (low < 0) & (high > 0)
            chord = torch.where(open_, high / (high - low).clamp(min=1e-300), (low >= 0).double())
            lower = torch.where(open_, (high > -low).double(), chord)
            plus = w.clamp(min=0)
            shift = torch.where(open_, -chord * low, 0.0)
            constant = constant + (plus * shift).flatten(1).sum(1)
            pieces = zip(graph.nodes[i].inputs, [plus * chord + (w - plus) * lower])
        for j, piece in pieces:
            weight[j] = weight[j] + piece if j in weight else piece
    return constant, weight[0].flatten(1)


def clipped(lines: tuple[Tensor, Tensor], cuts: tuple[Tensor, Tensor], region: Region) -> Tensor:
    """The largest `constant + <a, x>` over the box where all cuts are at least 0, from above, by
    the multipliers that Adam finds: `(m,)`.
    """
    constant, a = lines
    shift, normal = cuts
    middle = (region.low + region.high) / 2
    half = (region.high - region.low) / 2
    unit = (a.abs() @ half)[:, None] / (normal.abs() @ half)
    weight = torch.zeros_like(unit, requires_grad=True)
    best = torch.full_like(constant, math.inf)
    adam = torch.optim.Adam([weight], lr=0.03)
    for _ in range(CLIPPING):
        multiplier = weight.clamp(min=0) * unit
        moved = a + multiplier @ normal
        value = constant + multiplier @ shift + moved @ middle + moved.abs() @ half
        best = torch.minimum(best, value.detach())
        weight.grad = torch.autograd.grad(value.sum(), weight)[0]
        adam.step()
    return best


def clipped_last(root: Bounds, signs: Signs) -> Bounds:
    """The spans of the last ReLU layer on the part of the ball that its own splits leave: where the
    line above a neuron that is on is at least 0, and likewise for those that are off.
    """
    node = root.graph.relus[-1]
    source = root.graph.nodes[node].inputs[0]
    places = open_entries(root.spans[node])
    unit = rows_of(places, root.graph.nodes[node].size)
    above = lines_above(root, source, unit)
    below = lines_above(root, source, -unit)
    own = [(places.tolist().index(entry), sign) for entry, sign in signs.get(node, [])]
    if not own:
        return root
    sides = [(above if sign > 0 else below, k) for k, sign in own]
    shift, normal = (torch.stack([side[part][k] for side, k in sides]) for part in (0, 1))
    high = clipped(above, (shift, normal), root.region)
    low = -clipped(below, (shift, normal), root.region)
    return narrowed(root, node, places, low, high)


def reached(root: Bounds, x: Tensor, step: float) -> Bounds:
    """The spans of the last ReLU layer that an attack on its neurons reaches: proves nothing."""
    graph = root.graph
    node = graph.relus[-1]
    source = graph.nodes[node].inputs[0]
    places = open_entries(root.spans[node])
    each = torch.arange(2 * len(places))
    sign = torch.ones(2 * len(places), dtype=torch.float64)
    sign[len(places) :] = -1.0
    points = x.double().reshape(1, -1).expand(len(each), -1).clone()
    for k in range(CLIMB + 1):
        points.requires_grad_(True)
        value = value_at(graph, points, source)[each, places.repeat(2)]
        if k == CLIMB:
            break
        pull = torch.autograd.grad((value * sign).sum(), points)[0]
        length = step * (0.25 if k < 0.6 * CLIMB else 0.05)
        points = (points.detach() + length * pull.sign()).clamp(root.region.low, root.region.high)
    high, low = torch.split(value.detach(), len(places))
    return narrowed(root, node, places, low, high)


def value_at(graph: Graph, points: Tensor, last: int) -> Tensor:
    """The values of a node, `(m, size)`."""
    value = {0: points.reshape(-1, *graph.nodes[0].shape)}
    for i, node in enumerate(graph.nodes[1 : last + 1], 1):
        given = [value[j] for j in node.inputs]
        if isinstance(node.op, Affine):
            value[i] = node.op.value(*given)
        else:
            assert isinstance(node.op, Relu)
            value[i] = torch.maximum(given[0], node.op.slope * given[0])
    return value[last].flatten(1)


def worst_path(sweep: Sweep, label: int, rival: int) -> tuple[Signs, float]:
    """The splits on the way down into the worse child, and the bound of the search there."""
    tree = Tree(sweep, [0], [label])
    domain = tree.bounded(tree.roots([[rival]]), ROOT_STEPS)
    signs: Signs = {}
    for _ in range(DEPTH):
        column = int(domain.pick[0, 0])
        if column < 0:
            break
        children = tree.bounded(tree.split(domain), ASCENT_STEPS)
        worse = int(children.bound.argmin())
        domain = children.take(torch.tensor([worse]))
        for i, part in tree.parts.items():
            if part.start <= column < part.stop:
                node = sweep.graph.nodes[i]
                order = flattened(torch.arange(node.size).reshape(1, *node.shape).contiguous())[0]
                entry = int(order[int(tree.places[i][0, column - part.start])])
                signs.setdefault(i, []).append((entry, 1 if worse == 0 else -1))
    return signs, float(domain.bound[0])


def measured(
    model: torch.nn.Module, graph: Graph, x: Tensor, y: Tensor, factor: float
) -> list[str]:
    """The cells of one image."""
    known = ws.radii(model, x, y, "inf", method="crown", tolerance=0.02)
    radius = factor * float(known.values)
    sweep = Sweep(graph, Balls.make(x, torch.tensor([radius]).double(), math.inf, BOX)).run()
    label = int(y)
    lower = margins(sweep, y)[0][0].clone()
    lower[label] = math.inf
    rival = int(lower.argmin())
    row = torch.zeros(1, graph.outputs, dtype=torch.float64)
    row[0, rival] = 1.0
    row[0, label] = -1.0
    centre = x[0].double().flatten()
    region = Region.make(
        ((centre - radius).clamp(*BOX), (centre + radius).clamp(*BOX)), len(centre)
    )
    root = Bounds(graph, region, spans_of(sweep))
    signs, searched = worst_path(sweep, label, rival)

    def margin(bounds: Bounds) -> str:
        return f"{-float(substitute(bounds, len(graph.nodes) - 1, row, ASCENT)):.3f}"

    last = graph.relus[-1]
    places = open_entries(root.spans[last])
    unit = rows_of(places, graph.nodes[last].size)
    source = graph.nodes[last].inputs[0]
    high = substitute(root, source, unit, ASCENT)
    low = -substitute(root, source, -unit, ASCENT)
    climbed = narrowed(root, last, places, low, high)
    seen = reached(root, x, radius)
    widths = [width(bounds, places) for bounds in (root, climbed, seen)]
    return [
        f"{len(places)} of {graph.nodes[last].size}",
        *(f"{value:.2f}" for value in widths),
        *(margin(bounds) for bounds in (root, climbed, seen)),
        f"{len(signs.get(last, []))}",
        f"{searched:.3f}",
        margin(signed(root, signs, False)),
        margin(signed(root, signs, True)),
        margin(signed(clipped_last(root, signs), signs, False)),
    ]


def width(bounds: Bounds, places: Tensor) -> float:
    """Mean width of some neurons of the last ReLU layer."""
    low, high = bounds.spans[bounds.graph.relus[-1]]
    return float((high - low).flatten()[places].mean())


def spans_of(sweep: Sweep) -> dict[int, Span]:
    """The spans of a sweep's ReLU nodes, as values."""
    found = {}
    for i in sweep.graph.relus:
        j = sweep.graph.nodes[i].inputs[0]
        low, high = sweep.spans[j]
        found[i] = (sweep.centre[j][0] + low[0], sweep.centre[j][0] + high[0])
    return found


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--factor", type=float, default=1.3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    print(TEXT.format(**vars(options), depth=DEPTH, ascent=ASCENT), flush=True)
    for name in options.networks:
        model, dataset = zoo_path.load(name)
        images, labels = zoo_path.images(dataset)[:2]
        graph = read(model, tuple(images.shape[1:]))
        done = 0
        k = options.first
        while done < options.images:
            x = images[k : k + 1]
            y = labels[k : k + 1]
            if int(graph.logits(x).argmax()) == int(y):
                cells = measured(model, graph, x, y, options.factor)
                print("| " + " | ".join([f"`{name}`", str(k), *cells]) + " |", flush=True)
                done += 1
            k += 1
    print(f"\nProcessor seconds in all: {time.process_time() - begun:.0f}.")


TEXT = """# Inner spans: what limits a proof at linf

Command: `python benchmarks/inner.py`. The first {images} images from {first} on that are right,
balls of {factor} times CROWN's radius, the rival with the lowest bound. A proof is above 0.

- `open`: undecided neurons of the last hidden layer. `width`: their mean width by CROWN; `climbed`:
  with {ascent} steps on the slopes of each of their bounds; `reached`: as far as an attack on each
  of them gets (no proof: what the best spans could be). Then the margins with these three spans.
- `splits`: of the {depth} on the way down into the worse child, those in the last hidden layer.
  `search`: its bound there, with multipliers. Then the margin without multipliers: with the spans
  of the whole ball (`kept`); with all layers after a split bounded again (`again`); and with the
  spans of the last hidden layer clipped to the half-spaces of its splits (`clipped`, as in
  Clip-and-Verify, with multipliers for all of them at once).

| network | image | open | width | climbed | reached | margin | climbed | reached | splits \
| search | kept | again | clipped |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""


if __name__ == "__main__":
    main()
