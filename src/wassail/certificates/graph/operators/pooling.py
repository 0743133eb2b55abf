"""Average and max poolings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates.graph.maps import Linear


@dataclass(frozen=True, eq=False)
class Average(Linear):
    """An average pooling or a mean or sum over axes: a linear function with weights >= 0."""

    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def forward(self, *x: Tensor) -> Tensor:
        """Whatever the function does."""
        return self.function(x[0])

    def transpose(self, g: Tensor) -> tuple[Tensor, ...]:
        """By automatic differentiation: the derivative of a linear function does not depend on
        the point.
        """
        with torch.enable_grad():
            x = g.new_zeros(len(g), *self.shape, requires_grad=True)
            return torch.autograd.grad(self.function(x), x, g, create_graph=g.requires_grad)

    @property
    def terms(self) -> int:
        """All entries of the input, at most."""
        return 4 + math.prod(self.shape)
