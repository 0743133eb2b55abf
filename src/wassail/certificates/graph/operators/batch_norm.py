"""Frozen batch norm, a scale and a shift; instance norm: with running statistics the same, without
them a normalisation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.maps import NORM, Call, Scale
from wassail.certificates.graph.operators.normalise import group_norm
from wassail.certificates.graph.operators.registry import spelled


@spelled("batch_norm")
def batch_norm(
    net: Builder,
    x: Index,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    _: float,
    eps: float,
    *rest: Any,
) -> Index:
    """`(x - mean) gain / sqrt(var + eps) + bias`."""
    if training:
        raise net.refuse("a batch norm in training mode")
    factor = (var + eps).rsqrt() if weight is None else weight * (var + eps).rsqrt()
    shift = -mean * factor if bias is None else bias - mean * factor
    ones = net.along(x, 1)
    most = (mean * factor).abs() if bias is None else bias.abs() + (mean * factor).abs()
    call = Call(Scale(factor.reshape(ones)), most.reshape(ones), NORM)
    return net.scaled(x, factor.reshape(ones), shift.reshape(ones), call, 2 * most.reshape(ones))


@spelled("native_batch_norm_legit_no_training")
def native_batch_norm_legit_no_training(net: Builder, *args: Any) -> list[Any]:
    """The same, with what a backward pass would need."""
    x, weight, bias, mean, var, momentum, eps = args
    return [batch_norm(net, x, weight, bias, mean, var, False, momentum, eps), None, None]


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
