"""One activation over its spans: how far its neurons bend beside their middle slopes
(`slope_cones.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import laid_out
from wassail.certificates.relax.balls import Balls, filling_step
from wassail.certificates.relax.lines import Arithmetic, Shape, rounding_of
from wassail.certificates.relax.norms import Gram, map_norm
from wassail.certificates.relax.rows import Span, flattened, of_owner
from wassail.rounding import UNIT


@dataclass(frozen=True, eq=False)
class Pulled:
    """`<row, d>` lies in `shift +- spread + <a, d_0> + sum_k <bent_k, e_k / root_k>`; a is 0 for
    inputs that cannot move. gram: of a, where it is known.
    """

    shift: Tensor
    spread: Tensor
    a: Tensor
    bent: dict[int, Tensor]
    gram: Gram | None = None


@dataclass(frozen=True, eq=False)
class Slanted:
    """An activation as rows go through it: slopes mid, and off +- far, paid for every neuron, `(N,
    *shape)` each.
    """

    mid: Tensor
    off: Tensor
    far: Tensor


@dataclass(frozen=True, eq=False)
class Bent(Slanted):
    """The neurons of one activation node for N samples, flat in the order of coefficient vectors.

    root: sqrt(k),
    `(N, size)` in float64, 0 where a neuron is not in the ball. down, up: `e / root` lies between
    `-down` and `up`. box: the length of `sqrt(k) t` is at most this, by the spans, `(N,)`. columns:
    the neurons in the ball of each sample; None on a device, which would have to be asked.
    """

    root: Tensor
    down: Tensor
    up: Tensor
    box: Tensor
    columns: list[Tensor] | None

    @classmethod
    def make(cls, shape: Shape, error: Tensor, open_: Tensor, kind: Arithmetic) -> Bent:
        """Of an activation with its final spans.

        Args:
            shape: the spans.
            error: what rounding may add to the deviation of the input, `(N, *shape)`.
            open_: the neurons that may be in the ball, `(N, *shape)`.
            kind: the arithmetic of the slopes.
        """
        slope, bend = shape.cone(kind)
        line = shape.lines(slope, slope, error, kind)
        bend = torch.where(open_, bend, 0.0)
        root = flattened(laid_out(bend)).sqrt() * (1 + 4 * UNIT)
        far = flattened(line.far).double()
        off = flattened(line.off).double()
        safe = torch.where(root > 0, root, 1.0)
        down = torch.where(root > 0, (far - off).clamp(min=0) / safe, 0.0)
        up = torch.where(root > 0, (far + off).clamp(min=0) / safe, 0.0)
        most = flattened(laid_out(torch.maximum(-shape.low, shape.high)))
        box = rounding.length(most * root, 2, 1) * (1 + (root.shape[1] + 16) * UNIT)
        inside = laid_out(bend > 0)
        small = always(shape, line.mid, error, kind)
        return cls(
            line.mid,
            torch.where(inside, 0.0, line.off),
            torch.where(inside, small, line.far),
            root,
            down,
            up,
            box,
            [row.nonzero()[:, 0] for row in root] if root.device == HOST else None,
        )

    def coefficients(self, w: Tensor, owner: Tensor) -> Tensor:
        """`sqrt(k) b`, the coefficients of `e / sqrt k`, in float64: `(R, columns)`."""
        flat = flattened(w)
        if self.columns is not None and len(owner) == 1:
            kept = self.columns[int(owner)]
            return flat[:, kept].double() * self.root[owner][:, kept]
        return flat.double() * of_owner(self.root, owner)


@dataclass(frozen=True, eq=False)
class Layer:
    """An activation, and how long `e / root` is at most.

    eps: that length, `(N, 1)`; for r = 1 at each vertex of the ball, `(N, n)`. direct: whether it
    comes from linear maps of the input and of the layers before, so that a forward pass along one
    direction says more, `(N,)`; else it is one number for all directions. links: layer before ->
    `||B sqrt k||_2`, `(N,)`. rest: what rounding adds to a length, `(N,)`.
    """

    bent: Bent
    eps: Tensor
    direct: Tensor
    links: dict[int, Tensor]
    rest: Tensor

    def reach(self, bent: Tensor, owner: Tensor, box: Span | None = None) -> Span:
        """`<b, e>` is at most `fixed + rate N`, for every length N of `e / root`: `(R,)` each,
        rounded up, the best for N = eps; any level gives such a pair.

        A coefficient is the sum of two, at least 0 both: one is paid by the ball, the other by the
        box. box: down and up of the coefficients, where they are no whole rows.
        """
        down, up = box or self._box(owner)
        # A little less, so that where ball and box are equally large the ball is taken.
        eps = self.eps.amax(1)[owner].expand(len(bent)) * (1 - 2.0**-20)
        size = bent.abs()
        room = torch.where(bent > 0, up, down)
        free = torch.where(room > 0, size, 0.0)
        level = filling_step(free, room, torch.zeros_like(eps), eps)
        ball = torch.minimum(size, room * (1 / level)[:, None])
        slack = 1 + (size.shape[1] + 32) * UNIT
        # Where the ball and the box do not add up to the coefficient: by a rounding of it.
        rest = (size - ball).clamp_(min=0).add_(size, alpha=4 * UNIT)
        fixed = rest.mul_(room).sum(1)
        return fixed * slack, rounding.length(ball, 2, 1) * slack

    def _box(self, owner: Tensor) -> Span:
        """Down and up of whole rows."""
        down = of_owner(self.bent.down, owner)
        up = of_owner(self.bent.up, owner)
        if self.bent.columns is None or len(owner) > 1:
            return down, up
        kept = self.bent.columns[int(owner)]
        return down[:, kept], up[:, kept]


@dataclass(frozen=True, eq=False)
class Lengths:
    """What is known of the lengths of a layer before its activation: see `Layer`; open: the
    neurons that may be in them; plain: the length of t itself, `(N,)`, over the neurons `those`.
    """

    open: Tensor
    eps: Tensor
    links: dict[int, Tensor]
    rest: Tensor
    plain: Tensor
    those: Tensor

    @classmethod
    def nothing(cls, open_: Tensor, balls: Balls) -> Lengths:
        """Before anything is measured."""
        wide = balls.x.shape[1] if balls.norm == 1 else 1
        eps = torch.full((len(open_), wide), math.inf, dtype=torch.float64, device=open_.device)
        return cls(
            open_, eps, {}, torch.zeros_like(eps[:, 0]), eps[:, 0].clone(), torch.zeros_like(open_)
        )


def flattened_root(shape: Shape, kind: Arithmetic) -> Tensor:
    """The root of the bend of every neuron, `(N, size)`, in the order of the node's entries."""
    return shape.cone(kind)[1].flatten(1).sqrt() * (1 + 4 * UNIT)


def always(shape: Shape, mid: Tensor, error: Tensor, kind: Arithmetic) -> Tensor:
    """What is paid for a neuron in the ball in any case: the error of its input, that of its value
    at the sample, and the jump of a function that has one.
    """
    found = mid.abs().double() * laid_out(error)
    found = found + kind.floor * (1 + 2 * laid_out(shape.high - shape.low))
    found = found + laid_out(shape.arc.off(shape.c))
    return rounding.up(found * (1 + rounding_of(shape.node, kind)), kind.dtype)


def losses_of(graph: Graph, tiny: float) -> dict[int, float]:
    """Node -> the most that rounding changes the image of a unit vector by when it goes there, or a
    row when it comes from there: a length.

    `|| |W| ||_2` is at most the root of the product of the other two norms.
    """
    size: dict[int, float] = {0: 1.0}
    lost: dict[int, float] = {0: 8 * tiny}
    for i, node in enumerate(graph.nodes):
        if not node.inputs:
            continue
        wide = math.inf
        terms = 16
        if node.map is not None:
            terms = terms + 2 * node.map.terms
            shape = graph.nodes[node.inputs[0]].shape
            both = (map_norm(node.map, s, shape, node.shape) for s in (1.0, math.inf))
            wide = math.sqrt(math.prod(both)) * (1 + 2.0**-20)
        elif node.act is not None:
            wide = node.act.steepest
        before = sum(size[j] for j in node.inputs)
        size[i] = wide * before
        lost[i] = wide * (sum(lost[j] for j in node.inputs) + 2 * terms * tiny * before)
    return lost
