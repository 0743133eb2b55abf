"""Sums, products and choices, of two quantities or with a constant."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index, sample_of, tensor_of
from wassail.certificates.graph.operators.linear import linear
from wassail.certificates.graph.operators.products import matmul, product
from wassail.certificates.graph.operators.registry import spelled


@spelled("add")
def add(net: Builder, a: Any, b: Any, alpha: float = 1) -> Index:
    """`a + alpha b`, of two quantities or with a constant, which may be a mask."""
    one = torch.tensor(1.0, dtype=torch.float64)
    if isinstance(a, Index) and isinstance(b, Index):
        return net.sum([a, b if alpha == 1 else net.scaled(b, alpha * one, None)])
    (x, factor), constant = (
        ((a, one), alpha * tensor_of(b))
        if isinstance(a, Index)
        else ((b, alpha * one), tensor_of(a))
    )
    x = net.wide_as(x, constant)
    shift = sample_of(constant, net.nodes[x].shape, x.lead)
    hidden = shift == -math.inf  # a mask: nothing of x is left
    if net.masks and hidden.any():
        factor = torch.where(hidden, 0.0, factor)
    return net.scaled(x, factor, net.masked(shift))


@spelled("sub", "subtract")
def subtract(net: Builder, a: Any, b: Any, alpha: float = 1) -> Index:
    """`a - alpha b`."""
    return add(net, a, b, -alpha)


@spelled("rsub")
def rsub(net: Builder, a: Any, b: Any, alpha: float = 1) -> Index:
    """`b - alpha a`."""
    return add(net, b, a, -alpha)


@spelled("mul", "multiply")
def mul(net: Builder, a: Any, b: Any) -> Index:
    """A product of two quantities, or a scale."""
    if isinstance(a, Index) and isinstance(b, Index):
        a, b = net.alike(a, b)
        if not net.full(a):
            a, b = (net.move(torch.unsqueeze, part, [0], {}) for part in (a, b))
            return net.move(torch.squeeze, mul(net, a, b), [0], {})  # type: ignore[no-any-return]
        axes = "abcdefgh"[: len(net.full(a))]
        return product(net, f"{axes},{axes}->{axes}", a, b, net.full(a))
    x, constant = (a, tensor_of(b)) if isinstance(a, Index) else (b, tensor_of(a))
    x = net.wide_as(x, constant)
    return net.scaled(x, sample_of(constant, net.nodes[x].shape, x.lead), None)


@spelled("pow")
def power(net: Builder, x: Any, exponent: Any) -> Index:
    """Only the square."""
    if not isinstance(x, Index) or isinstance(exponent, Index) or exponent != 2:
        raise net.refuse("a power other than the square")
    return mul(net, x, x)


@spelled("square")
def square(net: Builder, x: Index) -> Index:
    """`x x`."""
    return mul(net, x, x)


@spelled("div", "divide", "true_divide")
def div(net: Builder, a: Any, b: Any) -> Index:
    """By a constant."""
    if not isinstance(a, Index) or isinstance(b, Index):
        raise net.refuse("a division by a quantity that depends on the input")
    return mul(net, a, 1 / tensor_of(b))


@spelled("neg", "negative")
def negative(net: Builder, x: Index) -> Index:
    """`-x`, exactly."""
    return net.negative(x)


@spelled("where")
def where(net: Builder, mask: Tensor, a: Any, b: Any) -> Index:
    """`a` where the mask is set, else `b`; constants or not."""
    if isinstance(a, Index) and isinstance(b, Index):
        a, b = net.alike(a, b)
        return net.sum(
            [masked_fill(net, a, ~mask, 0.0), masked_fill(net, b, mask, 0.0)], exact=True
        )
    x, other, hidden = (a, b, ~mask) if isinstance(a, Index) else (b, a, mask)
    wide, _ = torch.broadcast_tensors(mask, torch.as_tensor(other))  # type: ignore[no-untyped-call]
    x = net.wide_as(x, torch.zeros(wide.shape))
    return masked_fill(net, x, hidden, other)


@spelled("masked_fill")
def masked_fill(net: Builder, x: Index, mask: Tensor, value: Any) -> Index:
    """Where the mask is set, the value, a constant too."""
    full = net.full(x)
    hidden = mask.expand(full)
    there = tensor_of(net.fixed(value)).expand(full)
    there = torch.where(hidden, net.masked(there), 0.0)
    shape = net.nodes[x].shape
    return net.exactly(
        x, sample_of((~hidden).double(), shape, x.lead), sample_of(there, shape, x.lead)
    )


@spelled("addmm", "baddbmm")
def add_product(
    net: Builder, start: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1
) -> Index:
    """`beta start + alpha a b`; a linear layer where b and the start are constants."""
    whole = alpha == 1 and isinstance(b, Tensor) and isinstance(start, Tensor) and b.ndim == 2
    if whole and isinstance(a, Index) and start.numel() in (1, b.shape[1]):
        return linear(net, a, b.T, beta * start.flatten())
    product = mul(net, matmul(net, a, b), alpha)
    return add(net, mul(net, start, beta) if isinstance(start, Index) else beta * start, product)
