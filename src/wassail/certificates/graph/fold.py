"""Scalings and shifts folded into the linear map beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.execution import FEW, Step
from wassail.certificates.graph.graph import Node
from wassail.certificates.graph.maps import Conv, Linear, Matrix, Scale


def pair_of(value: Any) -> tuple[int, int]:
    """A number for both axes, or one for each."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return (int(values[0]), int(values[-1]))


def fold_step(map_: Linear, bias: Tensor | None) -> Step:
    """What is executed for an affine map and its bias: a sum of products for each entry, or one
    product.
    """
    size = None if bias is None else bias.abs()
    if isinstance(map_, Matrix):
        return Step(map_, size, map_.weight.shape[1] + 2)
    if isinstance(map_, Conv):
        terms = math.prod(map_.weight.shape[1:])
        return Step(map_, size, terms + 2, sliding=max(map_.weight.shape[2:]) > 1)
    return Step(map_, size, FEW)


def added_bias(moved: Tensor, bias: Tensor | None, most: Tensor | None) -> Tensor:
    """The magnitudes of a bias that was moved through a map, and of one that is added to it.

    Twice: the factors of the map were rounded before, and the sum is rounded after.
    """
    size = most if most is not None else torch.zeros_like(moved) if bias is None else bias.abs()
    return 2 * (moved + size)


def fold_steps(node: Node) -> tuple[Step, ...]:
    """What is executed for an affine node, to be followed by more: an exact one is a step, too."""
    return node.steps or (
        ()
        if node.map is None
        else (Step(node.map, None if node.bias is None else node.bias.abs()),)
    )


def moved_step(step: Step, entries: Callable[[Tensor], Tensor]) -> Step:
    """The same operation, entry by entry, after the entries have moved."""
    assert isinstance(step.map, Scale)
    parts = (step.map.factor, step.bias, step.noise)
    factor, bias, noise = (
        v if v is None else v.reshape(()) if v.numel() == 1 else entries(v) for v in parts
    )
    assert factor is not None
    return replace(step, map=Scale(factor), bias=bias, noise=noise)


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
    tall, wide = pair_of(args[0] if args else options["kernel_size"])
    return wide if name.endswith("1d") else tall * wide


def fold_before(
    factor: Tensor, map_: Matrix | Conv | Scale, shape: tuple[int, ...]
) -> Linear | None:
    """`map(factor x)` as one map, if it is one of the same kind."""
    if isinstance(map_, Scale):
        return Scale(map_.factor * factor)
    factor = factor.expand(shape)
    if isinstance(map_, Matrix):
        same = len(shape) == 1 or all(
            torch.equal(row, factor[(0,) * (len(shape) - 1)])
            for row in factor.reshape(-1, shape[-1])
        )
        return Matrix(map_.weight * factor.reshape(-1, shape[-1])[0]) if same else None
    flat = factor.flatten(1)
    if not torch.equal(flat, flat[:, :1].expand_as(flat)):
        return None
    per_group = (
        flat[:, 0].reshape(map_.groups, -1).repeat_interleave(len(map_.weight) // map_.groups, 0)
    )
    return replace(map_, weight=map_.weight * per_group[:, :, None, None])


def fold_after(map_: Matrix | Conv, factor: Tensor, shape: tuple[int, ...]) -> Linear | None:
    """`factor map(x)` as one map, if it is one of the same kind."""
    factor = factor.expand(shape)
    if isinstance(map_, Matrix):
        rows = factor.reshape(-1, shape[-1])
        return (
            Matrix(rows[0][:, None] * map_.weight)
            if torch.equal(rows, rows[:1].expand_as(rows))
            else None
        )
    flat = factor.flatten(1)
    if not torch.equal(flat, flat[:, :1].expand_as(flat)):
        return None
    return replace(map_, weight=flat[:, 0, None, None, None] * map_.weight)
