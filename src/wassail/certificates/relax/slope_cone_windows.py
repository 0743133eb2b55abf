"""Slope cones for a convolution whose entries read windows of one activation (`windows.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.chunks import room_of
from wassail.certificates.relax.lines import Arithmetic
from wassail.certificates.relax.rows import Span, unflattened
from wassail.certificates.relax.slope_cone_layer import Bent, Pulled
from wassail.certificates.relax.windows import Cut, Windows


class ConeWindows:
    """The cones of an activation and the balls of some samples, cut into windows.

    The same numbers are added as in whole images, but for products that are 0.

    Args:
        windows: of node `last`.
        last: the node.
        kind: the arithmetic of the rows.
        bent: the activation.
        balls: the balls, as the samples are laid out.
        some: which samples.
    """

    def __init__(
        self, windows: Windows, last: int, kind: Arithmetic, bent: Bent, balls: Balls, some: slice
    ) -> None:
        self.windows = windows
        self.act = windows.act
        self.first: int = some.start
        self.images = bent.mid.shape[1:]
        cut = windows.inner.windows
        self.mid, self.off, self.far = (cut(v[some]) for v in (bent.mid, bent.off, bent.far))
        roots, down, up = (
            unflattened(v[some], self.images) for v in (bent.root, bent.down, bent.up)
        )
        self.root, self.down, self.up = cut(roots), cut(down), cut(up)
        self.around = windows.around.windows(roots)
        # The neurons in the ball, where there is one sample: the others' coefficients are 0.
        alone = len(roots) == 1
        self.columns = bent.columns[self.first] if bent.columns and alone else None
        self.floor = kind.floors[last]
        self.error = kind.errors[last].flatten(1)
        self.kernel = windows.kernel.to(kind.dtype)
        self.matrix = windows.matrix.to(kind.dtype)
        self.balls = windows.balls(balls, some)
        self.free = (self.balls.below > 0) | (self.balls.above > 0)

    @property
    def together(self) -> int:
        """Rows of one batch."""
        width: int = max(*self.windows.matrix.shape, self.windows.forward.shape[1])
        return max(room_of(self.mid.device) // width, 1)

    def window(self, owner: Tensor, place: Tensor) -> Tensor:
        """The window that each entry reads, `(R,)`."""
        return (owner - self.first) * self.windows.places + place % self.windows.places

    def pull(self, owner: Tensor, place: Tensor) -> Pulled:
        """Unit vectors for entries `place` of the node backward to the input, as windows."""
        window = self.window(owner, place)
        w = self.kernel[place // self.windows.places]
        shift = (w * self.off[window]).sum(1).double()
        spread = self.floor[owner] + self.error[owner, place].double()
        spread = spread + (w.abs() * self.far[window]).sum(1).double()
        # An input that cannot move has no part in any factor of a bound.
        a = torch.where(self.free[window], (w * self.mid[window]) @ self.matrix, 0.0)
        return Pulled(shift, spread, a, {self.act: w.double() * self.root[window]})

    def box(self, window: Tensor) -> Span:
        """Down and up of the coefficients of the activation, `(R, m)` each."""
        return self.down[window], self.up[window]

    def length(self, unit: Tensor, window: Tensor) -> Tensor:
        """`||sqrt(k) t||_2` for deviations `unit` `(R, n)` of windows of the input, `(R,)`."""
        return rounding.length((unit @ self.windows.forward) * self.around[window], 2, 1)

    def whole(self, pulled: Pulled, place: Tensor) -> Pulled:
        """The same rows as whole images."""
        a = self._spread(pulled.a, self.windows.outer, self.windows.shape, place)
        bent = self._spread(pulled.bent[self.act], self.windows.inner, self.images, place)
        if self.columns is not None:
            bent = bent.index_select(1, self.columns)
        return Pulled(pulled.shift, pulled.spread, a, {self.act: bent})

    def _spread(self, values: Tensor, cut: Cut, shape: tuple[int, ...], place: Tensor) -> Tensor:
        """Windows `(R, k)` as images, flat in the order of coefficient vectors."""
        size = math.prod(shape)
        count = torch.arange(1, size + 1, dtype=torch.float64, device=values.device)
        where = cut.windows(unflattened(count[None], shape)).long()  # 0 beyond the rim
        full = values.new_zeros(len(values), size + 1)
        return full.scatter_(1, where[place % self.windows.places], values)[:, 1:]
