"""Bounds on the entries of a convolution of the input, or of one that sees the input through one
activation and one more convolution: each of them reads a window.

A substitution through whole images multiplies zeros: an entry of the second convolution of a
network reads some 4 x 4 pixels of the first one, and those some 10 x 10 pixels of the input. Here
a row of coefficients holds its window only. The lines of the activation and the box of the input
are cut into the windows of all places once, and the first convolution is one matrix for all
windows. What a window would read beyond the rim is 0, as in the convolutions themselves.

The same numbers are added as in the whole images, but for products that are 0: so the errors that
`Sweep` has charged for whole images cover those of windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.device import plain
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Linear, Window
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.lines import Arithmetic, Lines
from wassail.certificates.relax.rows import Span, room_of, unflattened
from wassail.certificates.relax.slope_cone_layer import Bent, Pulled

Pair = tuple[int, ...]  # down and across


@dataclass(frozen=True)
class Cut:
    """Windows of an image, one for each place of a grid: `grid` places, `step` apart, the first
    `before` its corner; of `size` pixels.
    """

    grid: Pair
    size: Pair
    step: Pair
    before: Pair

    def windows(self, image: Tensor) -> Tensor:
        """`(N, C, H, W) -> (N places, C size)`, 0 beyond the rim."""
        rim: list[int] = []
        for axis in (1, 0):  # as `pad` takes them: the last axis first
            end = (self.grid[axis] - 1) * self.step[axis] + self.size[axis] - self.before[axis]
            rim += [self.before[axis], max(end - image.shape[2 + axis], 0)]
        wide = F.pad(image, rim)
        cut = wide.unfold(2, self.size[0], self.step[0]).unfold(3, self.size[1], self.step[1])
        cut = cut[:, :, : self.grid[0], : self.grid[1]].permute(0, 2, 3, 1, 4, 5)
        return cut.reshape(len(image) * self.grid[0] * self.grid[1], -1)


@dataclass(frozen=True, eq=False)
class InputWindows:
    """A convolution of the input: an entry reads a window of it.

    kernel: `(out, C0 h w)`, what a row becomes, for each channel; outer: how the input is cut;
    shape: of the input.
    """

    kernel: Tensor
    outer: Cut
    shape: tuple[int, ...]

    @classmethod
    def at(cls, graph: Graph, j: int) -> InputWindows | None:
        """For node j; None where it is no such convolution, or where a window is no smaller than
        half of the image.
        """
        node = graph.nodes[j]
        first = None if node.map is None else node.map.window
        if node.map is None or first is None or node.inputs != (0,):
            return None
        grid = (node.shape[1], node.shape[2])
        found = node.map.kept(("input windows", grid), lambda: cls._of_input(grid, first))
        return None if 2 * math.prod(found.outer.size) > math.prod(first.shape[1:]) else found

    @classmethod
    def _of_input(cls, grid: Pair, first: Window) -> InputWindows:
        count = len(first.weight)
        eye = torch.eye(count, dtype=torch.float64, device=first.weight.device)
        with plain(eye.device):  # of unit vectors: nothing is rounded
            image = F.conv_transpose2d(
                eye.reshape(count, count, 1, 1), first.weight, None, dilation=first.dilation
            )
        size = (image.shape[2], image.shape[3])
        return cls(image.flatten(1), Cut(grid, size, first.stride, first.padding), first.shape)

    @property
    def width(self) -> int:
        """Numbers of one row."""
        return self.kernel.shape[1]

    @property
    def places(self) -> int:
        """Windows of one sample."""
        return self.outer.grid[0] * self.outer.grid[1]

    def looks(self, last: int, kind: Arithmetic, balls: Balls, some: slice) -> InputLooks:
        """What rows of node `last` see of some samples: see `InputLooks`."""
        return InputLooks(self, last, kind, balls, some)

    def balls(self, balls: Balls, some: slice) -> Balls:
        """What the windows see of some samples' balls, one after the other: beyond the rim nothing
        can move.
        """
        x, below, above = (
            self.outer.windows(v[some].reshape(-1, *self.shape))
            for v in (balls.x, balls.below, balls.above)
        )
        radius = balls.radius[some].repeat_interleave(self.places)
        return Balls(x, radius, balls.norm, below, above)

    def groups(self, wanted: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """The true entries of `(N, size)`: some neighbouring samples, and owner and place of their
        entries, as many as memory holds. The host waits for a device once.
        """
        counts = wanted.sum(1).tolist()
        where = torch.nonzero_static(wanted, size=sum(counts))
        room = room_of(wanted.device)
        samples = max(room // (self.places * self.width), 1)
        rows = max(room // (2 * self.width), 1)
        start = 0
        for first in range(0, len(counts), samples):
            end = start + sum(counts[first : first + samples])
            while start < end:
                clock.check()
                part = where[start : min(start + rows, end)]
                yield slice(first, first + samples), part[:, 0], part[:, 1]
                start += len(part)


@dataclass(frozen=True, eq=False)
class Windows(InputWindows):
    """What is known of node j before any sample is: its kernel and the matrix of the convolution
    before it.

    kernel: `(out, C kh kw)`; matrix: `(C kh kw, C0 h w)`, of the transpose of the first
    convolution on a window; inner, outer: how the activation and the input are cut; around: how the
    activation is cut for all that an outer window is read by; forward: `(C0 h w, C eh ew)`, the
    first convolution from an outer window to that; act: the activation between both; shape: of the
    input.
    """

    act: int
    matrix: Tensor
    inner: Cut
    around: Cut
    forward: Tensor

    @classmethod
    def of(cls, graph: Graph, j: int) -> Windows | None:
        """For node j; None where it is no such convolution, or where a window is no smaller than
        half of the image.
        """
        pair = _pair(graph, j)
        if pair is None:
            return None
        i, before, map_ = pair
        first, second = before.window, map_.window
        assert first is not None and second is not None
        tall, wide = second.weight.shape[2:]
        if 2 * tall * wide > math.prod(graph.nodes[i].shape[1:]):
            return None
        grid = (graph.nodes[j].shape[1], graph.nodes[j].shape[2])
        return map_.kept(("windows", before, i, grid), lambda: cls._made(i, grid, first, second))

    @classmethod
    def _made(cls, act: int, grid: Pair, first: Window, second: Window) -> Windows:
        kernel = second.weight.flatten(1)
        eye = torch.eye(kernel.shape[1], dtype=torch.float64, device=kernel.device)
        eye = eye.reshape(-1, *second.weight.shape[1:])
        with plain(kernel.device):  # of unit vectors: nothing is rounded
            image = F.conv_transpose2d(
                eye, first.weight, None, first.stride, dilation=first.dilation
            )
        tall, wide = second.weight.shape[2:]
        (down, across), (below, beside) = first.stride, second.stride
        (top, left), (rim, side) = first.padding, second.padding
        # A pixel is read from up to so many places before that of the window's corner.
        spans = [d * (k - 1) for d, k in zip(first.dilation, first.weight.shape[2:])]
        early, left_of = (far // step for far, step in zip(spans, first.stride))
        size = image[0].numel()
        one = torch.eye(size, dtype=torch.float64, device=kernel.device)
        one = one.reshape(-1, *image.shape[1:])
        late = [(n - 1) // step for n, step in zip(image.shape[2:], first.stride)]
        after = [
            step * far + span + 1 - n
            for step, far, span, n in zip(first.stride, late, spans, image.shape[2:])
        ]
        one = F.pad(one, (left_of * across, after[1], early * down, after[0]))
        with plain(kernel.device):
            seen = F.conv2d(one, first.weight, None, first.stride, dilation=first.dilation)
        steps = (down * below, across * beside)
        outer = Cut(
            grid, (image.shape[2], image.shape[3]), steps, (rim * down + top, side * across + left)
        )
        inner = Cut(grid, (tall, wide), second.stride, second.padding)
        far = (rim + early, side + left_of)
        around = Cut(grid, (seen.shape[2], seen.shape[3]), second.stride, far)
        given = (act, image.flatten(1), inner, around, seen.flatten(1))
        return cls(kernel, outer, first.shape, *given)

    @property
    def width(self) -> int:
        """Numbers of one row."""
        return max(self.matrix.shape)

    def looks(self, last: int, kind: Arithmetic, balls: Balls, some: slice) -> Looks:
        """What rows of node `last` see of some samples: see `Looks`."""
        return Looks(self, last, kind, balls, some)


class InputLooks:
    """The balls of some samples, cut into windows.

    Args:
        windows: of node `last`.
        kind: the arithmetic of the rows.
        balls: the balls, as the samples are laid out.
        some: which samples.
    """

    def __init__(
        self,
        windows: InputWindows,
        last: int,
        kind: Arithmetic,
        balls: Balls,
        some: slice,
    ) -> None:
        self.places = windows.places
        self.first: int = some.start
        self.floor = kind.floors[last]
        error = kind.errors[last]
        self.error = error.reshape(len(error), -1)
        self.kernel = windows.kernel.to(kind.dtype)
        self.balls = windows.balls(balls, some)

    def between(self, owner: Tensor, place: Tensor) -> Span:
        """Bounds on `d` for entries `place`, `(R,)` each."""
        window = self.window(owner, place)
        middle, reach = self.balls.across(self.kernel[place // self.places], window)
        reach = reach + self._lost(owner, place)
        return middle - reach, middle + reach

    def above(self, owner: Tensor, place: Tensor) -> Tensor:
        """Upper bounds on `d` for entries `place`, then on their negatives, `(2 R,)`."""
        window = self.window(owner, place).repeat(2)
        w = self.kernel[place // self.places]
        reach = self.balls.upper(torch.cat([w, -w]), window, spent=True)
        return self._lost(owner, place).repeat(2) + reach

    def _lost(self, owner: Tensor, place: Tensor) -> Tensor:
        """The errors of the entries themselves, `(R,)`."""
        return self.floor[owner] + self.error[owner, place].double()

    def window(self, owner: Tensor, place: Tensor) -> Tensor:
        """The window that each entry reads."""
        return (owner - self.first) * self.places + place % self.places


class Looks(InputLooks):
    """The lines of an activation, too: of `windows` between two convolutions."""

    def __init__(
        self,
        windows: Windows,
        last: int,
        kind: Arithmetic,
        balls: Balls,
        some: slice,
    ) -> None:
        super().__init__(windows, last, kind, balls, some)
        line = kind.lines[windows.act]
        cut = windows.inner.windows
        self.lines = Lines(*(cut(v[some]) for v in (line.mid, line.rad, line.off, line.far)))
        self.matrix = windows.matrix.to(kind.dtype)

    def between(self, owner: Tensor, place: Tensor) -> Span:
        """Bounds on `d` for entries `place`, `(R,)` each, with parallel lines."""
        window = self.window(owner, place)
        w = self.kernel[place // self.places]
        shift = (w * self.lines.off[window]).sum(1).double()
        far = (w.abs() * self.lines.far[window]).sum(1).double()
        spread = self._lost(owner, place) + far
        a = (w * self.lines.mid[window]) @ self.matrix
        middle, reach = self.balls.across(a, window, spent=True)
        return shift + middle - (spread + reach), shift + middle + (spread + reach)

    def above(self, owner: Tensor, place: Tensor) -> Tensor:
        """Upper bounds on `d` for entries `place`, then on their negatives, `(2 R,)`."""
        window = self.window(owner, place).repeat(2)
        w = self.kernel[place // self.places]
        w = torch.cat([w, -w])
        size = w.abs()
        shift = (w * self.lines.off[window] + size * self.lines.far[window]).sum(1).double()
        slope = torch.addcmul(w * self.lines.mid[window], size, self.lines.rad[window])
        reach = self.balls.upper(slope @ self.matrix, window, spent=True)
        return self._lost(owner, place).repeat(2) + shift + reach


class ConeWindows(InputLooks):
    """The slope cones of an activation, too (`slope_cones.py`)."""

    def __init__(
        self, windows: Windows, last: int, kind: Arithmetic, bent: Bent, balls: Balls, some: slice
    ) -> None:
        super().__init__(windows, last, kind, balls, some)
        self.windows = windows
        self.act = windows.act
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
        self.matrix = windows.matrix.to(kind.dtype)
        self.free = (self.balls.below > 0) | (self.balls.above > 0)

    @property
    def together(self) -> int:
        """Rows of one batch."""
        width: int = max(*self.windows.matrix.shape, self.windows.forward.shape[1])
        return max(room_of(self.mid.device) // width, 1)

    def pull(self, owner: Tensor, place: Tensor) -> Pulled:
        """Unit vectors for entries `place` of the node backward to the input, as windows."""
        window = self.window(owner, place)
        w = self.kernel[place // self.places]
        shift = (w * self.off[window]).sum(1).double()
        spread = self._lost(owner, place)
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
        return full.scatter_(1, where[place % self.places], values)[:, 1:]


def windows_of(graph: Graph, j: int) -> InputWindows | None:
    """What the entries of node j read of the input, where that is a window; None elsewhere."""
    return Windows.of(graph, j) or InputWindows.at(graph, j)


def _pair(graph: Graph, j: int) -> tuple[int, Linear, Linear] | None:
    """Node j as a convolution of an activation of a convolution of the input, the first of
    which nothing else reads: that activation, the first and the second.
    """
    second = graph.nodes[j].map
    if second is None or second.window is None or second.window.dilation != (1, 1):
        return None
    i = graph.nodes[j].inputs[0]
    if graph.nodes[i].act is None:
        return None
    k = graph.nodes[i].inputs[0]
    first = graph.nodes[k].map
    if first is None or first.window is None:
        return None
    alone = graph.nodes[k].inputs == (0,) and graph.users[k] == [i]
    return (i, first, second) if alone else None
