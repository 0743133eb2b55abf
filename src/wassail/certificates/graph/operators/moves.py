"""Entries that are moved, dropped, repeated or joined, and what does nothing."""

from __future__ import annotations

from typing import Any

import torch

from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.graph import Affine
from wassail.certificates.graph.maps import Concat
from wassail.certificates.graph.operators.registry import spelled

_MOVES = """
view reshape unsafe_view flatten unflatten permute transpose slice select squeeze unsqueeze
expand pad constant_pad_nd contiguous clone alias narrow flip roll index_select split
split_with_sizes chunk unbind movedim t numpy_T expand_as index gather take_along_dim repeat
repeat_interleave tile diagonal diag_embed rot90 im2col unfold tril triu reflection_pad1d
reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
view_as unsafe_split unsafe_chunk dropout feature_dropout alpha_dropout
"""
MOVES = tuple(_MOVES.split())

SAME = ("detach", "to", "to_copy", "lift_fresh_copy")


@spelled(*MOVES)
def moved(net: Builder, x: Index, *args: Any, **options: Any) -> Any:
    """Run the operation on the numbers 1, 2, 3, ... and see where they went."""
    net.fixed([*args, *options.values()])
    return net.move(net.target, x, list(args), options)


@spelled(*SAME)
def same(net: Builder, x: Any, *args: Any, **options: Any) -> Any:
    """What does nothing to a trained network."""
    return x


@spelled("full_like", "ones_like", "zeros_like", "new_full", "new_ones", "new_zeros")
def constant_like(net: Builder, x: Index, *args: Any, **options: Any) -> Any:
    """A constant that has only its shape and type from the value."""
    net.fixed([*args, *options.values()])
    options = {key: value for key, value in options.items() if key not in ("device", "pin_memory")}
    return net.target(torch.zeros(net.full(x), dtype=net.dtype), *args, **options).double()


@spelled("cat", "concat", "concatenate")
def cat(net: Builder, parts: list[Any], dim: int = 0) -> Index:
    """Constants among the parts (a class token) become nodes of their own."""
    nodes = [
        p if isinstance(p, Index) else net.constant(p)
        for p in parts
        if isinstance(p, Index) or p.numel()
    ]
    full = net.full(nodes[0])
    axis = dim % max(len(full), 1)
    if any(net.single(p) for p in nodes):
        raise net.refuse("a concatenation along the batch axis")
    if axis == 0 and len(full) > 1:
        # a leading axis of length 1 would not stay one: the others move up
        parts = [net.move(torch.movedim, p, [0, -1], {}) for p in nodes]
        joined = cat(net, parts, -1)
        return net.move(torch.movedim, joined, [-1, 0], {})  # type: ignore[no-any-return]
    axis -= nodes[0].lead
    sizes = tuple(net.nodes[p].shape[axis] for p in nodes)
    shape = net.nodes[nodes[0]].shape
    shape = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
    return net.add(Affine(Concat(axis + 1, sizes)), *nodes, shape=shape, calls=())


@spelled("stack")
def stack(net: Builder, parts: list[Any], dim: int = 0) -> Index:
    """A concatenation along a new axis."""
    whole = next(p for p in parts if isinstance(p, Index))
    axis = dim % (len(net.full(whole)) + 1)
    wide = [
        net.move(torch.unsqueeze, p, [axis], {}) if isinstance(p, Index) else p.unsqueeze(axis)
        for p in parts
    ]
    return cat(net, wide, axis)


@spelled("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")
def shuffled(net: Builder, x: Index, factor: int) -> Any:
    """Run the operation on the numbers 1, 2, 3, ... and see where they went."""
    return net.move(net.target, x, [factor], {})
