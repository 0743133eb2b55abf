"""What is left of a smooth network far away: its recession function, and the piecewise-linear
network that shadows it.

On R^n every node is of one of two kinds. Its range is finite: a sigmoid, a softmax, a
normalisation, and whatever is built of them alone. Or it grows: then it is the input, an affine
map, a ReLU, or an activation that stays within a fixed distance of the ReLU (GELU, SiLU, Softplus,
ELU). With the middle of its range in place of the first kind and ReLUs in place of the activations,
the network is piecewise linear and nowhere farther from the true one than a number that one pass
computes. So both have one recession function, `theta0(u) = lim theta(x + t u) / t`, which is the
shadow without its biases (THEORY 3).

A product of two quantities of which one grows, such as attention without a normalisation before it,
has no such shadow, and is not Lipschitz on R^n. It may come before a normalisation, as in a Post-LN
transformer, which is bounded all the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Affine, Curved, Graph, Input, Node, Relu, Smooth
from wassail.certificates.graph.maps import Pick, rounding_map
from wassail.certificates.graph.restrict import ancestors, reached
from wassail.certificates.relax.ranges import gamma
from wassail.errors import remedies
from wassail.rounding import UNIT

Span: TypeAlias = "tuple[Tensor, Tensor]"


@dataclass(frozen=True, eq=False)
class Shadow:
    """A piecewise-linear network that a smooth one never leaves; on the CPU, where its cells are
    counted.

    graph: its nodes are those of the smooth network, one for one; own: for each node that was
    replaced, how far the smooth one is from it at the same input, of the node's shape.
    """

    graph: Graph
    own: dict[int, Tensor]

    def margin_error(self, label: int) -> Tensor:
        """Upper bounds on `|(theta_j - theta_k)(x) - (shadow_j - shadow_k)(x)|` for all x, k
        the label: `(K,)`.
        """
        return self._far(label, biases=False)

    def drift(self, label: int) -> Tensor:
        """Upper bounds on `|(theta_j - theta_k)(x) - (theta0_j - theta0_k)(x)|` for all x, k
        the label: `(K,)`.
        """
        return self._far(label, biases=True)

    def _far(self, label: int, biases: bool) -> Tensor:
        """No node is steeper than 1, so that an error passes affine maps in absolute values and
        ReLUs as it is.
        """
        rows = torch.eye(self.graph.outputs, dtype=torch.float64)
        graph = self.graph.head(rows - rows[label])
        error: list[Tensor] = []
        for i, node in enumerate(graph.nodes):
            if node.map is not None:
                far = node.map.magnitude().forward(*[error[j] for j in node.inputs])
                if biases and node.bias is not None:
                    far = far + node.bias.abs() + gamma(graph) * node.bias_size
            else:
                far = (
                    error[node.inputs[0]]
                    if node.inputs
                    else torch.zeros(1, *node.shape, dtype=torch.float64)
                )
            error.append(far + self.own[i] if i in self.own else far)
        # Sums of numbers >= 0; the head's rows are differences, rounded once, and so is what is in
        # `own`.
        return error[-1][0] * (1 + 2 * gamma(graph))


def shadow(graph: Graph) -> Shadow:
    """The piecewise-linear network within a fixed distance of a smooth one on all of R^n."""
    graph = graph.to(HOST)
    ranges = spans(graph)
    nodes: list[Node] = []
    own: dict[int, Tensor] = {}
    for i, node in enumerate(graph.nodes):
        low, high = (side[0] for side in ranges[i])
        if node.map is not None or not node.inputs:
            nodes.append(node)
        elif bool((torch.isfinite(low) & torch.isfinite(high)).all()):
            middle = (low + high) / 2
            own[i] = torch.maximum(high - middle, middle - low)  # rounded, which `_far` pays for
            nodes.append(_nothing(graph, node, middle))
        else:
            match node.op:
                case Smooth(function=function):
                    far = function.distance_to_relu
                    own[i] = torch.full(node.shape, far, dtype=torch.float64)
                    nodes.append(replace(node, op=Relu(torch.zeros((), dtype=torch.float64))))
                case _:
                    nodes.append(node)
    needed = ancestors(nodes, len(nodes) - 1)
    for i, node in enumerate(nodes):
        if node.curve is not None and i in needed:
            raise remedies(
                f"{node.place} multiplies by a quantity that grows without bound, as attention "
                "does without a normalisation before it, so the network is not Lipschitz on R^n",
                "give a domain",
                "leave --no-box out",
            )
        if node.curve is not None:  # what grows here is bounded later
            nodes[i] = _nothing(graph, node)
    return Shadow(replace(graph, nodes=tuple(nodes)), own)


def recession(graph: Graph) -> Graph | None:
    """`theta0(u) = lim_{t -> inf} theta(x + t u) / t` as a piecewise-linear graph without biases;
    None if it is 0 everywhere.

    The network itself where it is piecewise linear, with its biases zero; the linear part of head
    after embedding for a Pre-LN transformer without a final norm; None for one whose head follows a
    LayerNorm, and for sigmoids without a way around them.
    """
    return without_zeros(shadow(graph).graph.homogeneous())


def spans(graph: Graph, start: Span | None = None) -> list[Span]:
    """The range of every node by interval arithmetic, `(N, *shape)` each, rounded outward; infinite
    where it grows.

    start: the range of the input, `(N, *shape)` each; R^n (N = 1) if there is none.
    """
    if start is None:
        ends = torch.full(
            (1, *graph.nodes[0].shape), math.inf, dtype=torch.float64, device=graph.device
        )
        start = -ends, ends
    found: list[Span] = []
    for node in graph.nodes:
        given = [found[j] for j in node.inputs]
        match node.op:
            case Curved(curve):
                found.append(curve.span(*given))
            case Smooth():
                found.append(node.op.function.span(*given[0]))
            case Relu(slope):
                found.append((_relu(given[0][0], slope), _relu(given[0][1], slope)))
            case Affine():
                found.append(node.span(given, graph.rounding))
            case Input():
                found.append(start)
            case _:
                assert_never(node.op)
    return found


def highest(graph: Graph, labels: Sequence[int]) -> Tensor:
    """Upper bounds on `theta_j - theta_k` over R^n for the labels k: `(L, K)`; inf where it
    grows.
    """
    ranges = spans(graph)
    eye = torch.eye(graph.outputs, dtype=torch.float64, device=graph.device)
    return torch.stack([_substituted(graph, ranges, eye - eye[k]) for k in labels])


def _substituted(graph: Graph, ranges: Sequence[Span], rows: Tensor) -> Tensor:
    """Upper bounds on `<row, theta>` by substitution back to what is not affine, `(m, K) -> (m,)`.

    There every entry counts with its own range, and the values of a curve with their length too,
    where that is known. A coefficient w is known up to gamma times the sum of magnitudes
    behind it.
    """
    last = len(graph.nodes) - 1
    error = gamma(graph)
    head = rows.reshape(-1, *graph.nodes[last].shape)
    weight = {last: head}
    size = {last: head.abs()}
    top = rows.new_zeros(len(rows))
    for i in range(last, -1, -1):
        if i not in weight:
            continue
        node = graph.nodes[i]
        w = weight.pop(i)
        most = size.pop(i)
        if node.map is not None:
            if node.bias is not None:
                top = top + (w * node.bias + error * most * node.bias_size).flatten(1).sum(1)
            for parts, pulled in (
                (weight, node.map.transpose(w)),
                (size, rounding_map(node.map).transpose(most)),
            ):
                for j, part in zip(node.inputs, pulled):
                    parts[j] = parts[j] + part if j in parts else part
            continue
        ends = [v * side for v in (w - error * most, w + error * most) for side in ranges[i]]
        # 0 inf is 0 here
        value = (
            torch.stack(ends)
            .nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
            .amax(0)
            .flatten(1)
        )
        reach = value.sum(1)
        longest = math.inf if node.curve is None else node.curve.longest(node.shape)
        if longest < math.inf:
            length = (w.abs() + error * most).square().sum(-1).sqrt().reshape(len(w), -1).sum(1)
            reach = torch.minimum(reach, longest * length)
        top = (
            top
            + reach
            + (node.size + 8) * UNIT * torch.where(reach.isfinite(), value.abs().sum(1), 0.0)
        )
    return top


def _relu(v: Tensor, slope: Tensor) -> Tensor:
    return torch.where(v > 0, v, torch.where(slope > 0, slope * v, 0.0))  # 0 times -inf is 0 here


def _nothing(graph: Graph, node: Node, value: Tensor | None = None) -> Node:
    """A node that does not depend on the input."""
    none = torch.full((node.size,), -1)
    return Node(
        (0,), node.shape, node.place, Affine(Pick(none, graph.nodes[0].shape, node.shape), value)
    )


def without_zeros(graph: Graph) -> Graph | None:
    """A piecewise-linear graph without biases, without its nodes that are 0 everywhere; None if
    the last one is.
    """
    nodes: list[Node] = []
    place: list[int | None] = []  # where a node has gone, None if it is 0
    feeds: list[Tensor] = []  # which entries depend on the input
    for node in graph.nodes:
        given = [feeds[j] for j in node.inputs]
        if not node.inputs:
            feeds.append(torch.ones(1, *node.shape, dtype=torch.float64))
        else:
            feeds.append(
                given[0]
                if node.map is None
                else (node.map.magnitude().forward(*given) > 0).double()
            )
        if not feeds[-1].any():
            place.append(None)
            continue
        live = [place[j] for j in node.inputs]
        known = [j for j in live if j is not None]
        match node.op:
            case Affine(linear) if len(known) < len(live) and (fewer := linear.fewer(len(known))):
                node = replace(node, op=replace(node.op, map=fewer))
                if len(known) == 1:
                    place.append(known[0])
                    continue
            case _:  # an input that is 0 has a place of its own
                for k, j in enumerate(live):
                    if j is None:
                        nodes.append(_nothing(graph, graph.nodes[node.inputs[k]]))
                        live[k] = len(nodes) - 1
                known = [j for j in live if j is not None]
        nodes.append(replace(node, inputs=tuple(known)))
        place.append(len(nodes) - 1)
    return None if place[-1] is None else replace(graph, nodes=reached(nodes, place[-1]))
