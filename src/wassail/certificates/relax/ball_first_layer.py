"""The first layer: how far its inputs move, along one direction and in length, at once.

A bound on a network whose inputs fill an l2 ball ends with `<a, d> + (lam / 2) ||W d||^2`, d the
deviation of the input and W the first layer. By lengths alone this is at most `||a|| r +
(lam / 2) ||W||^2 r^2`; but a direction that W stretches by its norm is seldom that of `a`. For
every `mu > lam ||W||^2`, with `H = mu - lam W^T W`,

    <a, d> + (lam / 2) ||W d||^2  <=  <a, H^-1 a> / 2 + mu r^2 / 2        for ||d|| <= r,

and for every x, with `res = a - H x`,

    <a, H^-1 a>  <=  <x, a + res> + ||res||^2 / (mu - lam ||W||^2).

The ascent takes a step towards the best x beside its own; what is claimed takes x from conjugate
gradients in float64, and pays for all roundings.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Linear, laid_out
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.norms import map_norm
from wassail.certificates.relax.rows import Turned, flattened, of_owner, unflattened
from wassail.rounding import UNIT

ABOVE = 1.01  # the least `mu`, in units of `lam ||W||^2`
FIRST = 4  # steps towards x before the ascent begins
FAINT = 1e-60  # radii and multipliers below this are left to the plain bound
ROUNDS = 24  # of conjugate gradients


class FirstLayer:
    """The affine nodes between the input and the first layer of ReLUs.

    Args:
        graph: the network.
        path: the indices of the nodes, the first one reads the input.
        free: which entries of the last of them count, `(N, *shape)`.
        balls: of the input, in the order of coefficient vectors; the norm is 2.
        norm: `||W||_2` is at most this, `(N,)`.
    """

    def __init__(
        self, graph: Graph, path: list[int], free: Tensor, balls: Balls, norm: Tensor
    ) -> None:
        self.balls = balls
        self.free = free
        self.shape = graph.nodes[0].shape
        self.square = norm.square() * (1 + 2.0**-50)
        self.maps = [map_ for i in path if (map_ := graph.nodes[i].map) is not None]
        self.there: dict[torch.dtype, list[Linear]] = {}
        self.back: dict[torch.dtype, list[Turned]] = {}
        # `|| |W| ||_2` is at most the root of the product of the other two norms.
        size = 1.0
        terms = 16
        for k, i in zip([0, *path], path):
            map_ = graph.nodes[i].map
            assert map_ is not None
            given = graph.nodes[k].shape
            out = graph.nodes[i].shape
            one, most = (map_norm(map_, s, given, out) for s in (1.0, math.inf))
            size = size * math.sqrt(one * most) * (1 + 2.0**-20)
            terms = terms + 2 * map_.terms + 4
        self.rough = size * size
        self.unit = terms * UNIT + 4 * len(path) * graph.rounding

    def _maps(self, dtype: torch.dtype) -> tuple[list[Linear], list[Turned]]:
        if dtype not in self.there:
            self.there[dtype] = [
                map_ if map_.coefficients is None else map_.reweighted(map_.coefficients.to(dtype))
                for map_ in self.maps
            ]
            self.back[dtype] = [Turned(map_, dtype) for map_ in self.maps]
        return self.there[dtype], self.back[dtype]

    def _image(self, x: Tensor, owner: Tensor) -> Tensor:
        """`W x` for rows `(R, n)`, 0 where an entry does not count."""
        value = laid_out(unflattened(x, self.shape))
        for map_ in self._maps(x.dtype)[0]:
            value = map_.forward(value)
        return value * of_owner(self.free, owner)

    def _return(self, value: Tensor) -> Tensor:
        """`W^T v`, as rows `(R, n)`."""
        value = laid_out(value)
        for map_ in reversed(self._maps(value.dtype)[1]):
            value = map_.transpose(value)[0]
        return flattened(value)

    def _open(self, a: Tensor, owner: Tensor) -> Tensor:
        """The coefficients without those whose way the box closes."""
        up = of_owner(self.balls.above, owner) > 0
        down = of_owner(self.balls.below, owner) > 0
        return torch.where(torch.where(a > 0, up, down), a, 0.0)

    def start(
        self, a: Tensor, lam: Tensor, owner: Tensor, steps: int = FIRST
    ) -> tuple[Tensor, Tensor]:
        """Where an ascent begins: `(x, mu)`."""
        with torch.no_grad():
            r = self.balls.radius[owner].to(a.dtype)
            a = self._open(a, owner)
            x = a * (r / a.norm(dim=1).clamp(min=1e-30))[:, None]
            mu = torch.zeros_like(lam)
            for _ in range(steps):
                x, mu = self.step(a, lam, owner, self._image(x, owner))
        return x, mu

    def step(self, a: Tensor, lam: Tensor, owner: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """One step towards `H x = a`, given the image of x."""
        r = self.balls.radius[owner].to(a.dtype)
        pull = a + lam[:, None] * self._return(image)
        mu = torch.maximum(
            ABOVE * self.square[owner].to(a.dtype) * lam, pull.norm(dim=1) / r.clamp(min=1e-30)
        ).clamp(min=1e-30)
        return pull / mu[:, None], mu

    def value(
        self, a: Tensor, lam: Tensor, owner: Tensor, x: Tensor, mu: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What is to be minimised, `(R,)`, about the bound, with the gradients of it; and the next
        `(x, mu)`. Nothing is proved here.
        """
        r = self.balls.radius[owner].to(a.dtype)
        a = self._open(a, owner)
        with torch.no_grad():
            image = self._image(x, owner)
            square = image.flatten(1).square().sum(1)
            rest = r.square() - x.square().sum(1)
        mu = torch.maximum(ABOVE * self.square[owner].to(a.dtype) * lam, mu)
        found = (a * x).sum(1) + lam / 2 * square + mu / 2 * rest
        with torch.no_grad():
            following = self.step(a.detach(), lam.detach(), owner, image)
        return found, following

    def bound(self, a: Tensor, lam: Tensor, owner: Tensor) -> Tensor:
        """`<a, d> + (lam / 2) ||W d||^2` is at most this on the balls, `(R,)`, rounded up."""
        a = self._open(a.double(), owner)
        lam = lam.double()
        mu = self.start(a, lam, owner, ROUNDS)[1] * (1 + 2.0**-20)
        x = torch.zeros_like(a)
        res = a
        way = a
        size = res.square().sum(1)
        for _ in range(ROUNDS):
            curved = self._times(way, lam, mu, owner)
            step = size / (way * curved).sum(1).clamp(min=1e-300)
            x = x + step[:, None] * way
            res = res - step[:, None] * curved
            now = res.square().sum(1)
            way = res + (now / size.clamp(min=1e-300))[:, None] * way
            size = now
        return self.claimed(a, lam, mu, x, owner)

    def claimed(self, a: Tensor, lam: Tensor, mu: Tensor, x: Tensor, owner: Tensor) -> Tensor:
        """The bound of any mu and x, with all rounding errors; infinite if it is none."""
        r = self.balls.radius[owner].expand(len(a))
        res = a - self._times(x, lam, mu, owner)
        n = a.shape[1]
        long = x.norm(dim=1)
        gap = (mu - lam * self.square[owner] * (1 + 2.0**-20)) * (1 - 2.0**-20)
        # `H x` is off by this: its maps by their terms, in the length of their magnitudes.
        off = (self.unit * lam * self.rough + 8 * UNIT * mu) * long * 4
        off = off + 4 * UNIT * a.norm(dim=1)
        left = (res.norm(dim=1) * (1 + n * UNIT) + off).square() / gap
        sizes = (n + 16) * UNIT * long * (a.norm(dim=1) + res.norm(dim=1))
        first = (x * (a + res)).sum(1) + long * off + 2 * sizes
        found = (first + left + mu * r.square()) / 2
        found = found + 16 * UNIT * (first.abs() + left + mu * r.square())
        # Nothing that counts underflows: 2^-52 of the last term is more than what does.
        firm = (mu > FAINT) & (r > FAINT)
        good = (gap > 0) & torch.isfinite(found) & firm
        return torch.where(good, found, math.inf)

    def _times(self, x: Tensor, lam: Tensor, mu: Tensor, owner: Tensor) -> Tensor:
        """`H x`."""
        return mu[:, None] * x - lam[:, None] * self._return(self._image(x, owner))
