"""A graph without the neurons that keep their side on a region: what is left is small, so bounds on
it cost next to nothing.

Stable neurons are linear there, and products of linear maps are formed once, for all rows and
entries. Sums of products cancel, so each matrix also carries the same sum of magnitudes
(`Matrix.most`): what the rounding errors of both are relative to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Matrix, Sum
from wassail.certificates.relax.ranges import Bounds, bounds_on, gamma

NEURONS = 1500  # undecided neurons up to which it pays
SLOPE_STEPS = 12  # on the slopes of the lower lines, which cost little on what is left
MEMORY = 2**26  # numbers in the largest node while it is built


def condensed(bounds: Bounds) -> Bounds:
    """The same region and network with the stable neurons gone, or `bounds` itself where that would
    not pay.

    What is left is bounded again with optimised slopes, so some of it may turn out stable too.
    """
    graph = bounds.graph
    columns = graph.inputs + bounds.open + 1
    if (
        bounds.open > min(NEURONS, 0.7 * graph.neurons)
        or columns * max(node.size for node in graph.nodes) > MEMORY
    ):
        return bounds
    states = bounds.states()
    exact = graph.piecewise(states)
    size = graph.absolute().piecewise(states)
    # Every coefficient is off by at most gamma times its magnitude, like any other sum over paths
    # of the graph.
    small = replace(layered(exact, size), rounding=gamma(graph)).to(graph.device)
    return bounds_on(small, bounds.region, SLOPE_STEPS)


def layered(network: Piecewise, size: Piecewise) -> Graph:
    """A dense form as a graph: a matrix from the input and from every earlier layer into each
    layer and into the output.
    """
    nodes = [Node((), (network.inputs,), "the input")]
    blocks = network.blocks() if network.neurons else []
    active: list[int] = []

    def join(rows: Callable[[Piecewise], tuple[Tensor, Tensor, Tensor]]) -> int:
        """Add the sum of all maps into one layer; `rows` picks its rows of the coefficients of
        x and z, and its bias.
        """
        (x, z, bias), (x_size, z_size, bias_size) = rows(network), rows(size)
        sources = [
            (0, Matrix(x, x_size)),
            *((i, Matrix(z[:, b], z_size[:, b])) for i, b in zip(active, blocks)),
        ]
        parts = []
        for source, matrix in sources:
            if source == 0 or matrix.weight.any():
                nodes.append(Node((source,), (len(bias),), "the condensed network", Affine(matrix)))
                parts.append(len(nodes) - 1)
        nodes.append(
            Node(
                tuple(parts),
                (len(bias),),
                "the condensed network",
                Affine(Sum(len(parts)), bias, bias_most=bias_size),
            )
        )
        return len(nodes) - 1

    for block in blocks:
        before = join(lambda p, b=block: (p.A[b], p.B[b], p.c[b]))  # type: ignore[misc]
        nodes.append(
            Node(
                (before,), nodes[before].shape, "the condensed network", Relu(network.slope[block])
            )
        )
        active.append(len(nodes) - 1)
    join(lambda p: (p.C, p.D, p.e))
    return Graph(tuple(nodes))
