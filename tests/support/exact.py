"""Random numbers and perceptrons for tests of rounding, with exact values."""

import numpy as np
import torch
from torch import Tensor

from support.rounding import Array, long
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Matrix


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def perceptron(weights: list[Tensor], biases: list[Tensor], slope: float = 0.0) -> Graph:
    nodes = [Node((), (weights[0].shape[1],), "the input")]
    for i, (weight, bias) in enumerate(zip(weights, biases)):
        if i:
            nodes.append(
                Node(
                    (len(nodes) - 1,),
                    nodes[-1].shape,
                    "",
                    Relu(torch.tensor(slope, dtype=torch.float64)),
                )
            )
        nodes.append(Node((len(nodes) - 1,), (len(weight),), "", Affine(Matrix(weight), bias)))
    return Graph(tuple(nodes))


def values(graph: Graph, x: Array) -> list[Array]:
    """Every node at one point, with 64 bits."""
    found: list[Array] = []
    for node in graph.nodes:
        if node.map is not None:
            assert isinstance(node.map, Matrix) and node.bias is not None
            found.append(long(node.map.weight) @ found[node.inputs[0]] + long(node.bias))
        elif node.inputs:
            assert node.slope is not None
            before = found[node.inputs[0]]
            found.append(np.where(before > 0, before, before * np.longdouble(float(node.slope))))
        else:
            found.append(x)
    return found


def scattered(*shape: int, seed: int) -> Tensor:
    """Numbers of many sizes and both signs."""
    return normal(*shape, seed=seed) * 2.0 ** torch.randint(
        -6, 7, shape, generator=torch.Generator().manual_seed(seed)
    )
