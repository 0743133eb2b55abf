"""The loop that everything goes backward by."""

import torch

from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Scale, Sum
from wassail.certificates.relax.backward import Walk


def scale(factor: float) -> Affine:
    return Affine(Scale(torch.tensor(factor, dtype=torch.float64)))


def test_a_walk_adds_up_what_reaches_a_node_on_several_ways() -> None:
    """Paths of a network, counted: `x + 2 x` twice, and a node that leads nowhere."""
    nodes = (
        Node((), (1,), "the input"),
        Node((0,), (1,), "", scale(2.0)),
        Node((0, 1), (1,), "", Affine(Sum(2))),
        Node((2,), (1,), "", Relu(torch.zeros((), dtype=torch.float64))),  # read by nothing
        Node((2, 2), (1,), "", Affine(Sum(2))),
    )
    walk: Walk[int] = Walk(Graph(nodes), {4: 1}, int.__add__)
    met = []
    for i, node, ways in walk.nodes(4):
        met.append((i, ways))
        walk.give(node, [ways] * len(node.inputs))
    assert met == [(4, 1), (2, 2), (1, 2)]
    assert walk.weight == {0: 4}


def test_a_walk_stops_before_a_node() -> None:
    """What has come down to it, and to nodes before it, is left there."""
    nodes = (
        Node((), (1,), "the input"),
        Node((0,), (1,), "", scale(2.0)),
        Node((1,), (1,), "", scale(3.0)),
        Node((2, 0), (1,), "", Affine(Sum(2))),
    )
    walk: Walk[int] = Walk(Graph(nodes), {3: 1}, int.__add__)
    for _, node, ways in walk.nodes(3, 1):
        walk.give(node, [ways] * len(node.inputs))
    assert walk.weight == {1: 1, 0: 1}
