"""Pixel and channel shuffles: entries that move."""

from __future__ import annotations

from typing import Any

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.operators.registry import spelled


@spelled("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def shuffled(net: Builder, x: Index, factor: int) -> Any:
    """Run the operation on the numbers 1, 2, 3, ... and see where they went."""
    return net.move(net.target, x, [factor], {})
