"""Points on the kinks of a network, where the Jacobian that a program computes proves nothing.

A Lipschitz constant on X is the largest norm of the Jacobians of pieces that meet X in a set with
an interior. At a kink torch takes one side for every neuron at once, and no piece need have these
sides. At the corner 0 of an image box every neuron without a bias is at its kink.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import rounding_map
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.ranges import gamma

BESIDE = 2.0**-20  # how far a point is moved off a kink, relative to the way to another point


def on_kinks(graph: Graph, x: Tensor) -> Tensor:
    """Which of the flat points `(m, n)` are on a kink up to rounding, bool `(m,)`.

    A neuron that does not move with the input has no sides. Whether all of those at a kink are
    such is asked at once, by the gradient of a random combination of them: it is exactly 0 then.
    """
    nothing = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    kinked = {i: node.act.kinks for i, node in enumerate(graph.nodes) if node.act is not None}
    kinked = {i: kinks for i, kinks in kinked.items() if kinks}
    if not kinked:
        return nothing
    error = gamma(graph)
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        points = x.reshape(-1, *graph.nodes[0].shape).clone().requires_grad_(True)
        values = graph.values(points)
        sizes = _sizes(graph, [v.detach() for v in values])
        total = points.new_zeros(())
        near = nothing
        for i, kinks in kinked.items():
            node = graph.nodes[i]
            v = values[node.inputs[0]]
            size = sizes[node.inputs[0]]
            sides = [(v.detach() - k).abs() <= error * (size + abs(k)) for k in kinks]
            tied = torch.stack(sides).any(0)
            factor = torch.rand(node.shape, dtype=v.dtype, generator=generator) + 0.5
            total = total + (torch.where(tied, v, 0.0) * factor.to(v.device)).sum()
            near = near | tied.flatten(1).any(1)
        if not bool(near.any()):
            return nothing
        (slope,) = torch.autograd.grad(total, points)
    return (slope != 0).flatten(1).any(1)


def off_kinks(
    graph: Graph, region: Region, x: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Points of a region `(m, n)` with those on a kink moved a little towards random points of it;
    and which of them, bool `(m,)`, are off all kinks now.
    """
    tied = on_kinks(graph, x)
    if bool(tied.any()):
        other = region.sample(len(x), generator)
        x = torch.where(tied[:, None], region.inside(x + BESIDE * (other - x)), x)
        tied = on_kinks(graph, x)
    return x, ~tied


def _sizes(graph: Graph, values: list[Tensor]) -> list[Tensor]:
    """What the values of every node are sums of, in size: a sum near 0 of larger terms is 0 up to
    rounding.

    Counted from the last nodes that are no sums: with all layers before them the sizes of a deep
    network are so large that every neuron is near 0 beside them.
    """
    found: list[Tensor] = []
    for node, value in zip(graph.nodes, values):
        if node.map is None:
            found.append(value.abs())
            continue
        given = [found[j] for j in node.inputs]
        found.append(rounding_map(node.map).forward(*given) + node.bias_size)
    return found
