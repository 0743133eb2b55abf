"""Matrix products with constants."""

from __future__ import annotations

from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.operators.registry import spelled


@spelled("linear")
def linear(net: Builder, x: Index, weight: Tensor, bias: Tensor | None = None) -> Index:
    """`W x + b` over the last axis."""
    shape = net.nodes[x].shape
    if net.single(x) or shape[-1] != weight.shape[1]:
        raise net.refuse("a matrix product over the batch axis")
    return net.affine(Matrix(weight), net.fixed(bias), x, (*shape[:-1], len(weight)))
