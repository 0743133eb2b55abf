"""Scalings and shifts folded into the linear map beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.execution import Call
from wassail.certificates.graph.graph import Affine, Node
from wassail.certificates.graph.maps import Linear, Scale


def several(value: Any, axes: int) -> tuple[int, ...]:
    """A number for all axes, or one for each."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return tuple(int(v) for v in (values * axes if len(values) == 1 else values))


def fold_call(map_: Linear, bias: Tensor | None) -> Call:
    """What is executed for an affine map and its bias: a sum of products for each entry, or one
    product.
    """
    return Call(map_, None if bias is None else bias.abs(), map_.roundings)


def added_bias(moved: Tensor, bias: Tensor | None, most: Tensor | None) -> Tensor:
    """The magnitudes of a bias that was moved through a map, and of one that is added to it.

    Twice: the factors of the map were rounded before, and the sum is rounded after.
    """
    size = most if most is not None else torch.zeros_like(moved) if bias is None else bias.abs()
    return 2 * (moved + size)


def fold_calls(node: Node) -> tuple[Call, ...]:
    """What is executed for an affine node, to be followed by more: an exact one is a call, too."""
    if node.calls or not isinstance(node.op, Affine):
        return node.calls or ()
    return (Call(node.op.map, None if node.op.bias is None else node.op.bias.abs()),)


def moved_call(call: Call, entries: Callable[[Tensor], Tensor]) -> Call:
    """The same operation, entry by entry, after the entries have moved."""
    assert isinstance(call.map, Scale)
    parts = (call.map.factor, call.bias, call.noise)
    factor, bias, noise = (
        v if v is None else v.reshape(()) if v.numel() == 1 else entries(v) for v in parts
    )
    assert factor is not None
    return replace(call, map=Scale(factor), bias=bias, noise=noise)


def window_of(
    name: str,
    full: Sequence[int],
    output: Sequence[int],
    args: list[Any],
    options: Mapping[str, Any],
) -> int:
    """How many entries an average or a sum takes at most."""
    if name in ("mean", "sum"):
        return math.prod(full) // math.prod(output)
    if name.startswith("adaptive"):
        return math.prod(-(-n // m) + 1 for n, m in zip(full[-2:], output[-2:]))
    tall, wide = several(args[0] if args else options["kernel_size"], 2)
    return wide if name.endswith("1d") else tall * wide
