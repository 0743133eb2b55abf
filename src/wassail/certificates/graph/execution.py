"""The operations that a model executes for a node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wassail.certificates.graph.maps import Linear

# Roundings of an operation with a constant, entry by entry: of it, of its inverse, of the result,
# and one more.
FEW = 4
NORM = 16  # roundings of a frozen batch norm, whichever way it is computed


@dataclass(frozen=True, eq=False)
class Call:
    """One executed operation, `map(inputs) + bias`, in which every term is rounded at most
    `roundings` times; 0: it is exact.

    bias: magnitudes of what is added, broadcasts against one sample; noise: how far constants are
    from the type's own numbers.
    """

    map: Linear
    bias: Tensor | None = None
    roundings: int = 0
    noise: Tensor | None = None

    @property
    def sliding(self) -> bool:
        """As of the map."""
        return self.map.sliding

    def to(self, device: torch.device) -> Call:
        """The same with its tensors on a device."""
        bias, noise = (None if v is None else v.to(device) for v in (self.bias, self.noise))
        return replace(self, map=self.map.to(device), bias=bias, noise=noise)


@dataclass(frozen=True)
class Execution:
    """Where a graph was read from: the type and the kind of device that the model runs in;
    refusal: why it is not covered.
    """

    dtype: torch.dtype
    device: str = "cpu"
    refusal: str = ""
