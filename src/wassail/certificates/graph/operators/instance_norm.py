"""Instance norm: with running statistics a frozen batch norm, without them a normalisation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.operators.batch_norm import batch_norm
from wassail.certificates.graph.operators.normalise import group_norm
from wassail.certificates.graph.operators.registry import spelled


@spelled("instance_norm")
def instance_norm(
    net: Builder,
    x: Index,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *rest: Any,
) -> Index:
    """Without running statistics each channel is a group of its own."""
    if use_input_stats or mean is None or var is None:
        return group_norm(net, x, net.full(x)[1], weight, bias, eps)
    return batch_norm(net, x, weight, bias, mean, var, False, momentum, eps)
