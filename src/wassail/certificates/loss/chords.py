"""Steepest chords from the samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.region import Region
from wassail.certificates.loss.labels import loss_above
from wassail.certificates.loss.recession import spans
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.jacobian import adjoint
from wassail.certificates.relax.ranges import boxed, gamma, magnitudes, ranges
from wassail.certificates.relax.rows import rounded_up
from wassail.certificates.search.frontier import Frontier, Table, TensorRows
from wassail.certificates.search.input_boxes import OVERHEAD
from wassail.geometry import maximiser, steepest, vector_norm
from wassail.losses import LIPSCHITZ
from wassail.rounding import UNIT, outward
from wassail.threat import Domain, dual

# rays per pair of classes, steps each
STARTS = 6
CLIMB = 25
# cells that are bounded at once; relative gap at which the search for the steepest chord stops
CELLS = 512
CLOSE = 1e-4
LISTED = 300  # operations that a cell or a point on the lists costs in every step


@dataclass(frozen=True, eq=False)
class Chords(TensorRows):
    """Evaluated points, each with the sample it is reached from.

    root `(M,)`; points `(M, *shape)` in the samples' dtype; gain in loss, distance and predicted
    class `(M,)`, in float64 and computed from the stored points.
    """

    root: Tensor
    points: Tensor
    gain: Tensor
    distance: Tensor
    predicted: Tensor


def chords(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: Domain,
    loss: str,
    rays: Sequence[tuple[int, Tensor]] = (),
    seen: tuple[Tensor, Tensor] | None = None,
) -> Chords:
    """Points near and far that make steep chords `(loss(x', y_i) - loss(x_i, y_i)) / ||x' -
    x_i||_r`.

    For a range of distances an ascent on the loss in balls of that radius; for each ray `(label,
    u)` points out on it; and those that others have seen already: samples `(M,)` and flat points
    `(M, n)`. Points are looked for where the graph is; what is returned is on the CPU.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    device = graph.device
    every = torch.arange(len(x), device=device)
    wide = x.detach().to(device).double()
    y = y.to(device)
    spread = 1.0 if domain is None else domain[1] - domain[0]
    full = change_of_scale(wide[0].numel(), norm) * spread
    radii = [1e-4, 1e-3, 1e-2, 0.05, 0.2, 1.0]
    if graph.smooth:  # nothing is known of the pieces
        radii += [2.0**k for k in range(-6, 0)] + (
            [] if domain is not None else [2.0**k for k in range(1, 7)]
        )
    for radius in (share * full for share in radii):
        if parts and clock.out_of_time():
            break
        point = wide.clone()
        for _ in range(3):  # the maximiser over the ball of the loss linearised at the last point
            with torch.enable_grad():
                here = point.detach().requires_grad_(True)
                (g,) = torch.autograd.grad(LIPSCHITZ[loss](graph.logits(here), y).sum(), here)
            point = wide + steepest(wide, g, norm, radius, domain)
        parts.append((every, point))
    size = max(1.0, float(wide.abs().max()))
    for label, u in rays:
        mine = (y == label).nonzero().flatten()
        # up to about 10^7, where float64 still has nine digits of the slope
        for far in (4.0**k for k in range(-4, 13)):
            parts.append((mine, wide[mine] + far * size * u.to(device).reshape(1, *wide.shape[1:])))
    if seen is not None:
        parts.append((seen[0].to(device), seen[1].to(device).reshape(-1, *wide.shape[1:])))
    root = torch.cat([p[0] for p in parts])
    points = torch.cat([p[1] for p in parts]).to(x.dtype)
    if domain is not None:
        points = points.clamp(*domain)
    clean = LIPSCHITZ[loss](graph.logits(wide), y)
    logits = torch.cat([graph.logits(part) for part in torch.split(points.double(), 256)])
    gain = LIPSCHITZ[loss](logits, y[root]) - clean[root]
    distance = vector_norm(points.double() - wide[root], norm)
    keep = (gain > 0) & (distance > 0)
    return Chords(*(v[keep].cpu() for v in (root, points, gain, distance, logits.argmax(1))))


def change_of_scale(n: int, norm: float) -> float:
    """The length in norm r of a vector of n entries of size 1: what distances in a unit box are
    compared with.
    """
    return float(n ** (1 / norm)) if norm < math.inf else 1.0


def steepest_of(graph: Graph, x: Tensor, found: Chords) -> tuple[float, int]:
    """The steepest chord from the samples `(N, *shape)`, rounded down, and its place; 0 and -1 if
    no point gains anything.

    Either loss moves by at most twice what the logits do; those are rounded by what `_errors` says.
    """
    if not len(found.gain):
        return 0.0, -1
    error = 2 * (_errors(graph, found.points).cpu() + _errors(graph, x).cpu()[found.root])
    slope = ((found.gain - error) / found.distance).clamp(min=0) * (1 - 1e-12)
    best = int(slope.argmax())
    return float(slope[best]), best


def _errors(graph: Graph, points: Tensor) -> Tensor:
    """By how much rounding may have changed the logits at points `(m, *shape)`: `(m,)`.

    Piecewise linear: gamma times the network of magnitudes. Smooth: the width of the intervals that
    start from the points. They hold the true values and, as their sums are widened by twice the
    rounding error of one, the computed ones.
    """
    found = []
    for part in torch.split(points.to(graph.device).double(), 256):
        if graph.smooth:
            low, high = spans(graph, (part, part))[-1]
            found.append((high - low).amax(1) * (1 + 4 * UNIT))
        else:
            found.append(gamma(graph) * magnitudes(graph, part)[-1].amax(1))
    return torch.cat(found)


def clean_above(graph: Graph, x: Tensor, y: Tensor, loss: str) -> Tensor:
    """No less than the loss of the exact function at samples, `(N,)`: by magnitudes, which take no
    more than a pass. Bounds on points are nearer, where there is time for them.
    """
    z = torch.cat([graph.logits(part.double()) for part in torch.split(x.to(graph.device), 256)])
    error = 2 * _errors(graph, x) + 8 * UNIT * z.abs().amax(1)
    lowest = z.gather(1, y.to(z.device)[:, None]) - z - error[:, None]
    return loss_above(lowest.scatter(1, y.to(z.device)[:, None], 0.0), y.to(z.device), loss)


@dataclass(frozen=True, eq=False)
class Tail:
    """How a loss grows far away: `loss(x, y_i) <= lam ||x - x_i||_r + height_i` for all x;
    height `(N,)`.
    """

    lam: float
    height: Tensor


@dataclass(frozen=True, eq=False)
class Cells(TensorRows):
    """Boxes around samples: root `(M,)`; low, high `(M, n)`; bound `(M,)`, on the chords into
    each; radius `(M,)`: of a cube around its sample, 0 for a box that does not hold it.
    """

    root: Tensor
    low: Tensor
    high: Tensor
    bound: Tensor
    radius: Tensor


class ChordSearch(Frontier[Cells]):
    """The steepest chord `S` of a smooth network with one or two inputs from above, by cutting the
    space around each sample.

    Cells are boxes around a sample. In one that does not contain it every margin lies above a plane
    (`crown.margins`), so that the loss lies below a convex function, and the distance above a
    linear one, `<g, x - x_i>` with `||g||_s = 1`. A quotient of the two is quasiconvex: a chord
    into the cell is at most as steep as the one to its steepest corner. A chord into the cube
    around the sample is at most as steep as a gradient in it (`jacobian.adjoint`). Beyond the last
    cell the tail tells.
    """

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        y: Tensor,
        norm: float,
        domain: Domain,
        loss: str,
        ceiling: float,
        tail: Tail | None,
    ) -> None:
        self.graph = graph
        self.x = x.double().flatten(1)
        self.y = y
        self.norm = norm
        self.loss = loss
        region = Region.make(domain, self.x.shape[1])
        self.low, self.high = region.low, region.high
        self.free = self.low < self.high  # inputs that can move
        self.ceiling = ceiling
        self.tail = tail
        z = graph.logits(x.double())
        self.gaps = z - z.gather(1, y[:, None])
        self.clean = LIPSCHITZ[loss](z, y)
        self.error = 2 * _errors(graph, x)
        self.least = self.clean - self.error
        self.steepest = 0.0
        self.settled = 0.0
        self.thinnest = 0.0
        self.found = Chords(y[:0], self.x[:0], self.clean[:0], self.clean[:0], y[:0])

    def run(self) -> float:
        """An upper bound on S, within `CLOSE` of the steepest chord known unless a limit
        (`clock`) is reached.
        """
        if not self.free.any():
            return 0.0
        scale = float((self.high - self.low).amax())
        if scale == math.inf:
            scale = max(1.0, float(self.x.abs().max()))
        self.thinnest = 2.0**-30 * scale
        radius = torch.full((len(self.x),), scale * 2.0**-5, dtype=torch.float64)
        every = torch.arange(len(self.x))
        for k in range(5):
            self._scatter(*self._ring(every, radius * 2.0**k))
        far, self.settled = self._reach(scale)
        rings = [
            self._ring(every, radius * 2.0**k) for k in range(math.ceil(math.log2(far / scale)) + 5)
        ]
        root, low, high = (torch.cat(part) for part in zip(*rings))
        self._scatter(root, low, high)
        cells = self._boxes(root, low, high)
        self.open: Table[Cells] = Table(cells.join(self._cubes(every, radius)), descending=True)
        self.sift()
        with suppress(clock.Late):  # the bounds of before hold
            self.proceed()
        return max(self.settled, self.open.loosest if len(self.open) else 0.0)

    @property
    def over(self) -> bool:
        """Whether a limit (`clock`) is reached."""
        return clock.late()

    def sift(self) -> None:
        """Close the cells that hold no much steeper chord, and the cubes that are too small."""
        cells = self.open.rows
        small = (cells.radius > 0) & (cells.radius <= self.thinnest)
        closed = self.open.split((cells.bound <= self.steepest * (1 + CLOSE)) | small)
        self.settled = max([self.settled, *closed.bound.tolist()])
        listed = len(self.open) + len(self.found.root)
        work = 8 * CELLS * self.graph.operations + OVERHEAD * len(self.graph.nodes)
        clock.spend(work + LISTED * listed)

    def step(self) -> None:
        """The cells with the largest bounds cut in two, and every cube halved: a ring of cells
        around a smaller one.
        """
        with self.taken(self.open.split(self.open.rows.radius > 0)) as cubes:
            with self.taken(self.open.first(CELLS)) as cells:
                root, low, high, bound = _halves(cells.root, cells.low, cells.high, cells.bound)
                ring = self._ring(cubes.root, cubes.radius / 2)
                inner = self._cubes(cubes.root, cubes.radius / 2)
                parts = zip((root, low, high), ring)
                found = self._boxes(*(torch.cat(part) for part in parts))
                known = torch.cat([bound, bound.new_full((len(ring[0]),), self.ceiling)])
            self.open.add(replace(found, bound=torch.minimum(found.bound, known)))
            self.open.add(replace(inner, bound=torch.minimum(inner.bound, cubes.bound)))

    def _boxes(self, root: Tensor, low: Tensor, high: Tensor) -> Cells:
        """Cells that do not hold their samples, bounded."""
        bound = self._no_steeper(self._cells(root, low, high))
        return Cells(root, low, high, bound, torch.zeros_like(bound))

    def _cubes(self, root: Tensor, radius: Tensor) -> Cells:
        """The cubes around some samples, bounded."""
        x = self.x[root]
        bound = self._inner(root, radius) if len(root) else radius
        return Cells(root, x, x, self._no_steeper(bound), radius)

    def _no_steeper(self, bound: Tensor) -> Tensor:
        """Bounds on chords: none is above the steepest margin, and a NaN says nothing. Python's
        `max` would drop it.
        """
        return torch.where(bound.isnan(), self.ceiling, bound).clamp(max=self.ceiling)

    def _reach(self, scale: float) -> tuple[float, float]:
        """How far the cells go, and the steepest chord beyond them."""
        if self.tail is None:
            return scale, 0.0
        rest = float((self.tail.height - self.least).max().clamp(min=0))
        far = min(max(scale, rest / (CLOSE / 4 * max(self.steepest, 1e-9))), 2.0**40 * scale)
        return far, (self.tail.lam + rest / far) * (1 + 4 * UNIT)

    def _ring(self, root: Tensor, radius: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The cubes between `||x - x_i||_inf = radius` and twice that, cut by the box: root
        `(M,)`, low and high `(M, n)`.
        """
        n = self.x.shape[1]
        places = torch.arange(-2.0, 2.0, dtype=torch.float64)
        sides = [places if free else torch.zeros_like(places[:1]) for free in self.free]
        corner = torch.cartesian_prod(*sides).reshape(-1, n)
        corner = corner[((corner < -1) | (corner > 0)).any(1)]
        start = self.x[root][:, None] + radius[:, None, None] * corner
        stop = self.x[root][:, None] + radius[:, None, None] * (corner + 1)
        low, high = (side.clamp(self.low, self.high).flatten(0, 1) for side in (start, stop))
        real = ((high > low) | ~self.free).all(1)
        return root.repeat_interleave(len(corner))[real], low[real], high[real]

    def _cells(self, root: Tensor, low: Tensor, high: Tensor) -> Tensor:
        parts = zip(*(torch.split(v, CELLS) for v in (root, low, high)))
        return (
            torch.cat([self._some(*part) for part in parts])
            if len(root)
            else torch.zeros(0, dtype=torch.float64)
        )

    def _some(self, root: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Upper bounds on the chords into cells: by their corners, and by their highest loss
        over their distance.
        """
        middle = (low + high) / 2
        self._look(root, middle)
        sides = [rounded_up(side) for side in (middle - low, high - middle)]
        far, base, a = margins(Sweep(self.graph, boxed(middle, *sides)).run(), self.y[root])
        n = low.shape[1]
        away = middle - self.x[root]
        signs = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * n).reshape(-1, 1, n)
        corners = torch.where(signs > 0, sides[1], -sides[0])  # (2^n, M, n)
        tilt = torch.einsum("mkn,cmn->cmk", a, corners)
        planes = (
            base
            + tilt
            - (n + 8) * UNIT * (base.abs() + torch.einsum("mkn,cmn->cmk", a.abs(), corners.abs()))
        )
        own = torch.arange(base.shape[1]) == self.y[root][:, None]
        height = torch.stack(
            [loss_above(p.masked_fill(own, 0.0), self.y[root], self.loss) for p in planes]
        )
        unit = maximiser(away, dual(self.norm))
        length = ((away + corners) * unit).sum(2) - (n + 8) * UNIT * (
            away.abs() + corners.abs()
        ).sum(2)
        rise = height - self.least[root]
        # else the quotient may have a pole in the cell
        fits = (length > 0).all(0) | (rise <= 0).all(0)
        by_corners = torch.where(fits, _quotient(rise, length).amax(0), math.inf)
        nearest = vector_norm(
            torch.maximum(low - self.x[root], self.x[root] - high).clamp(min=0), self.norm
        )
        # With two inputs it loses less than two units, and `_quotient` has three to spare.
        by_top = _quotient(
            loss_above(far, self.y[root], self.loss) - self.least[root],
            nearest * (1 - n * 4 * UNIT),
        )
        return torch.minimum(by_corners, by_top)

    def _scatter(self, root: Tensor, low: Tensor, high: Tensor) -> None:
        """Look at a lattice of 16 points in every cell."""
        n = low.shape[1]
        count = round(16 ** (1 / n))
        share = (
            torch.cartesian_prod(*[torch.arange(count, dtype=torch.float64)] * n).reshape(-1, n)
            + 0.5
        ) / count
        points = low[:, None] + (high - low)[:, None] * share
        self._look(root.repeat_interleave(len(share)), points.flatten(0, 1))

    def _look(self, root: Tensor, points: Tensor) -> None:
        """Evaluate points: keep the steepest chord, rounded down, and those that no nearer
        point of their sample reaches.
        """
        z = self.graph.logits(points)
        gain = LIPSCHITZ[self.loss](z, self.y[root]) - self.clean[root]
        length = vector_norm(points - self.x[root], self.norm)
        # A point that is its sample, or a loss that is no number, is no chord.
        top = int((gain / length).nan_to_num(nan=-math.inf).argmax())
        if float(gain[top] / length[top]) > self.steepest:
            error = self.error[root[top]] + 2 * _errors(self.graph, points[top : top + 1])[0]
            self.steepest = max(
                self.steepest, float((gain[top] - error) / length[top]) * (1 - 1e-12)
            )
        new = Chords(root, points, gain, length, z.argmax(1))
        self.found = _front(self.found.join(new))

    def _inner(self, root: Tensor, radius: Tensor) -> Tensor:
        """Upper bounds on the chords into the cubes around some samples, `(M,)` each: no steeper
        than a gradient of the loss there.

        Margin loss: a rival that is behind at the sample catches up at its own slope only. Cross
        entropy: the gradient is `sum_j p_j J^T (e_j - e_k)`, the probabilities and the Jacobian
        anywhere in their ranges.
        """
        x = self.x[root]
        y = self.y[root]
        # To where the first ring begins, which is rounded.
        low, high = (
            (x + side * radius[:, None]).clamp(self.low, self.high) for side in (-1.0, 1.0)
        )
        room = [rounded_up(side) for side in (x - low, high - x)]
        reach, within = torch.cat(room, 1).amax(1), ranges(self.graph, boxed(x, *room))
        eye = torch.eye(self.graph.outputs, dtype=torch.float64)
        found = torch.zeros_like(radius)
        for k in sorted(set(y.tolist())):
            mine = (y == k).nonzero().flatten()
            part = {i: (low[mine], high[mine]) for i, (low, high) in within.items()}
            low, high = (
                torch.where(self.free, side, 0.0)
                for side in adjoint(self.graph, part, eye - eye[k])
            )
            most = torch.maximum(low.abs(), high.abs())
            gap = self.gaps[root[mine]]
            error = self.error[root[mine]][:, None]
            if self.loss == "margin":
                behind = (self.least[root[mine]][:, None] - gap - error).clamp(min=0)
                across = change_of_scale(self.x.shape[1], self.norm) * reach[mine][:, None]
                slope = vector_norm(most.flatten(0, 1), dual(self.norm)).reshape(
                    gap.shape
                ) - behind / across * (1 - 1e-12)
                slope[:, k] = 0.0
                found[mine] = slope.amax(1).clamp(min=0)
                continue
            move = most.sum(2) * reach[mine][:, None] * (1 + 1e-12) + error
            least, top = Softmax().span(outward(gap - move, gap + move))
            gradient = [_sum_of_products(least, top, low, high, side) for side in (-1.0, 1.0)]
            found[mine] = vector_norm(
                torch.maximum(gradient[0].abs(), gradient[1].abs()), dual(self.norm)
            )
        return found * (1 + 1e-12)


def _front(found: Chords) -> Chords:
    """The points that gain more than every nearer point of the same sample, and more than
    nothing.
    """
    order = torch.from_numpy(
        np.lexsort((-found.gain.numpy(), found.distance.numpy(), found.root.numpy()))
    )
    root = found.root[order].numpy()
    gain = found.gain[order].numpy()
    keep = np.zeros(len(gain), dtype=bool)
    begins = np.flatnonzero(root[1:] != root[:-1]) + 1
    for part in np.split(np.arange(len(gain)), begins):
        nearer = np.maximum.accumulate(np.append(0.0, gain[part]))[:-1]
        keep[part] = gain[part] > nearer
    kept = order[torch.from_numpy(keep)]
    return found.take(kept)


def _sum_of_products(least: Tensor, top: Tensor, low: Tensor, high: Tensor, side: float) -> Tensor:
    """One end of `sum_j p_j G_j`, p `(N, K)` in `[least, top]`, `least >= 0`, and G `(N, K, n)`
    in `[low, high]`: `(N, n)`.
    """
    edge = high if side > 0 else -low
    terms = edge * torch.where(edge > 0, top[:, :, None], least[:, :, None])
    return side * (terms.sum(1) + (terms.shape[1] + 4) * UNIT * terms.abs().sum(1))


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """`above / below`, rounded up: 0 where nothing is gained, infinite where the divisor is not
    known to be positive.
    """
    safe = torch.where(below > 0, below, 1.0)
    return torch.where(
        above <= 0, 0.0, torch.where(below > 0, above / safe * (1 + 4 * UNIT), math.inf)
    )


def _halves(
    root: Tensor, low: Tensor, high: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every cell cut in two across its longest side."""
    rows = torch.arange(len(root))
    widest = (high - low).argmax(1)
    middle = (low[rows, widest] + high[rows, widest]) / 2
    left = high.clone()
    right = low.clone()
    left[rows, widest], right[rows, widest] = middle, middle
    return root.repeat(2), torch.cat([low, right]), torch.cat([left, high]), bound.repeat(2)
