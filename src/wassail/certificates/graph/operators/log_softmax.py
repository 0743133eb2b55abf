"""A log-softmax at the end: it subtracts one number from all logits, so no margin changes."""

from __future__ import annotations

from typing import Any

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.operators.registry import spelled


@spelled("log_softmax")
def log_softmax(net: Builder, x: Index, dim: int, dtype: Any = None) -> Index:
    """Left out, and remembered: the graph's logits are the model's up to one number a sample."""
    last = len(net.full(x)) - 1
    if not net.final or last != 1 or dim % 2 != 1:
        raise net.refuse("a log-softmax that is not over the logits at the end")
    net.common = True
    return x
