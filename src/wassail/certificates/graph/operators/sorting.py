"""Maxima and minima along an axis, and sorting: comparators of two entries, one ReLU each."""

from __future__ import annotations

from typing import Any

import torch

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.operators.moves import cat
from wassail.certificates.graph.operators.registry import spelled

LONGEST = 64  # entries that are sorted


@spelled("sort")
def sort(
    net: Builder, x: Index, dim: int = -1, descending: bool = False, stable: Any = None
) -> list[Any]:
    """The values: a network of comparators, `d = relu(b - a)`, `max = a + d`, `min = b - d`.

    Odd and even neighbours in turn. GroupSort and MaxMin are this over a short axis.
    """
    net.axis(x, dim)
    parts = list(net.move(torch.split, x, [1, dim], {}))
    if len(parts) > LONGEST:
        raise net.refuse(f"a sort of more than {LONGEST} entries")
    for turn in range(len(parts)):
        for k in range(turn % 2, len(parts) - 1, 2):
            larger = net.larger(parts[k], parts[k + 1])
            smaller = net.smaller(parts[k], parts[k + 1])
            pair = (larger, smaller) if descending else (smaller, larger)
            parts[k], parts[k + 1] = pair
    return [cat(net, parts, dim), None]


@spelled("topk")
def topk(
    net: Builder, x: Index, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> list[Any]:
    """The k largest or least entries, in order."""
    if not sorted and k > 1:
        raise net.refuse("a topk in no order")
    whole = sort(net, x, dim, largest)[0]
    return [net.move(torch.narrow, whole, [dim, 0, k], {}), None]


@spelled("kthvalue")
def kthvalue(net: Builder, x: Index, k: int, dim: int = -1, keepdim: bool = False) -> list[Any]:
    """The k-th entry from below."""
    whole = sort(net, x, dim)[0]
    found = net.move(torch.narrow, whole, [dim, k - 1, 1], {})
    return [found if keepdim else net.move(torch.squeeze, found, [dim], {}), None]


@spelled("median")
def median(net: Builder, x: Index, dim: Any = None, keepdim: bool = False) -> list[Any]:
    """Of an even number of entries the lower one, as in torch."""
    if dim is None:
        raise net.refuse("a median over the batch axis")
    return kthvalue(net, x, (net.full(x)[dim] + 1) // 2, dim, keepdim)


@spelled("amax", "max", "amin", "min")
def extreme(net: Builder, x: Index, dim: Any = None, keepdim: bool = False) -> Any:
    """The largest or least entry along axes: a tree of comparators."""
    name = net.name
    if isinstance(dim, Index):  # of two quantities
        return net.larger(*net.alike(x, dim)) if name == "max" else net.smaller(*net.alike(x, dim))
    full = net.full(x)
    axes = list(dim) if isinstance(dim, list | tuple) else [] if dim is None else [dim]
    if not axes:
        raise net.refuse("a maximum over the batch axis")
    compare = net.larger if "max" in name else net.smaller
    for axis in sorted((a % len(full) for a in axes), reverse=True):
        net.axis(x, axis)
        parts = list(net.move(torch.split, x, [1, axis], {}))
        while len(parts) > 1:
            pairs = [compare(a, b) for a, b in zip(parts[::2], parts[1::2])]
            parts = pairs + parts[2 * len(pairs) :]
        x = parts[0] if keepdim else net.move(torch.squeeze, parts[0], [axis], {})
    return x if name.startswith("a") else [x, None]
