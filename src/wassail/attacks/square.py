"""Square attack: random search with square-shaped changes, no gradients (Andriushchenko et al.
2020, arXiv 1912.00049).

The l1 variant is AutoAttack's (Croce & Hein 2021, arXiv 2103.01208). What differs from the
reference: every sample draws squares of its own; they reach the last row and column too; and
samples need not be square images, nor images at all.

A sample `(..., h, w)` is an image of h x w pixels whose other dimensions are channels; a vector
`(n,)` is one of 1 x n pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wassail.attacks.best import Best
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import Objective, objective, pointwise
from wassail.device import blend, rows_to_compute, take
from wassail.errors import InputError
from wassail.geometry import clip, column, project, vector_norm
from wassail.network import Model, generators
from wassail.progress import Progress, Tick
from wassail.specification import Labels
from wassail.threat import Boxes, Domain, Threat, box_at, boxes_of
from wassail.transport.distribution import Distribution

HALVINGS = (
    10,
    50,
    200,
    500,
    1000,
    2000,
    4000,
    6000,
    8000,
)  # the last queries before the squares' area is halved
# queries whose random numbers are drawn at once: a call for every sample and query would take too
# long
BLOCK = 250


def square(
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    queries: int = 5000,
    share: float = 0.8,
    restarts: int = 1,
    target: Tensor | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
) -> Distribution:
    """The Square attack in every sample's ball of radius eps: it needs logits only, so no gradient
    can mislead it.

    Andriushchenko et al. (2020); the loss is the margin. 1 F at the sample, then per restart
    `queries + 1` F at most, no B; a flip ends it.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        queries: int, squares tried after the start; default 5000.
        share: float, p, the part of the image that the first squares cover, halved after 10, 50,
            200, 500, 1000, 2000, 4000, 6000 and 8000 queries; default 0.8.
        restarts: int, runs with other random numbers, for samples still right; default 1.
        target: classes to be reached, integer tensor `(N,)`; default None, any wrong class.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, keys the random draws together with each sample's content; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
    """
    options = {"queries": queries, "share": share, "restarts": restarts, "seed": seed}
    return pointwise(
        square_attack,
        "square",
        model,
        x,
        y,
        threat,
        target=target,
        mu=mu,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
        graph=False,
        options=options,
    )


def square_attack(
    tracker: Tracker,
    tick: Tick,
    *,
    queries: int = 5000,
    share: float = 0.8,
    restarts: int = 1,
    seed: int = 0,
) -> None:
    """`restarts` runs of the Square attack on the samples that still stand, each from the
    sample itself; see `square`.
    """
    if min(queries, restarts) < 1:
        raise InputError(f"queries={queries}, restarts={restarts}: both must be at least 1.")
    if not 0 < share <= 1:
        raise InputError(
            f"share is {share}: give the part of an image that the first squares cover, above 0 "
            "and at most 1."
        )
    goal = objective(tracker, "margin")
    for number in range(restarts):
        for done in _run(tracker, goal, queries, share, seed, number):
            tick((number + done / queries) / restarts)


@dataclass
class _Search:
    """The samples still searched: every field is `(m,)` or `(m, c, h, w)`."""

    rows: Tensor
    place: Tensor  # among the samples of the run
    reach: Tensor  # how far they may move
    x: Tensor
    best: Best  # the best image so far, by loss
    length: Tensor  # how far `best` is from `x`

    def take(self, keep: Tensor) -> _Search:
        return _Search(*(getattr(self, field.name)[keep] for field in fields(self)))


def _run(
    tracker: Tracker, goal: Objective, queries: int, share: float, seed: int, number: int
) -> Iterator[int]:
    """One run, yielding the number of queries done now and then; what stands at the end leaves
    its best point.
    """
    rows = tracker.rows
    norm = tracker.norm
    if not len(rows):
        return
    x = _images(tracker.x[rows])
    domain = _image_box(tracker.box(rows), tracker.x[rows])
    dice = generators(tracker.x[rows], seed, number)
    reach = torch.full((len(rows),), tracker.radius, dtype=x.dtype, device=x.device)
    best = _start(x, reach, norm, domain, dice)
    value, stands = _look(tracker, rows, best, goal)
    place = torch.arange(len(rows), device=x.device)
    length = vector_norm(best - x, norm)
    s = _Search(rows, place, reach, x, Best(best, value), length).take(stands)
    for first, end, part in _blocks(queries, share):
        if not len(s.rows):
            return
        sides = _sides(part, x.shape[2], x.shape[3], norm)
        bumps = None if norm == math.inf else _bumps(*sides, norm, x)
        moves = _Moves.draw([dice[i] for i in s.place.tolist()], end - first, sides, s.x)
        for k in range(end - first):
            point = (
                _recolour(s, moves, k, box_at(domain, s.place))
                if bumps is None
                else _shift(s, moves, k, bumps, norm, box_at(domain, s.place))
            )
            value, stands = _look(tracker, s.rows, point, goal)
            better = s.best.offer(point, value)
            if norm != math.inf:
                some = rows_to_compute(better)
                mine, theirs = take(some, point, s.x)
                s.length = blend(better, some, vector_norm(mine - theirs, norm), s.length)
            if len(stands) < len(s.rows):
                s = s.take(stands)
                moves = moves.take(stands)
            if not len(stands):
                return
        yield end
    tracker.guess(s.rows, s.best.points.reshape(-1, *tracker.x.shape[1:]))


def _look(tracker: Tracker, rows: Tensor, images: Tensor, goal: Objective) -> tuple[Tensor, Tensor]:
    """Loss `(m,)` at images of these samples, and the places `(k,)` of those that still stand.
    1 F.
    """
    z, _ = tracker.logits(images.reshape(-1, *tracker.x.shape[1:]), rows)
    value, _ = goal(z, rows)
    return value, tracker.unflipped(rows).nonzero()[:, 0]


def _images(x: Tensor) -> Tensor:
    """Samples `(m, *shape)` as images `(m, c, h, w)`: the last two dimensions are the pixels, a
    vector is a row of them.
    """
    return x.reshape(len(x), -1, *(1, *x.shape[1:])[-2:]).contiguous()


def _image_box(domain: Domain, x: Tensor) -> Domain:
    """Own boxes of samples `(m, *shape)` as images; one box, or none, as it is."""
    own = boxes_of(domain)
    if own is None:
        return domain
    low, high = (_images(side.expand_as(x)) for side in own)
    return Boxes(low, high)  # type: ignore[return-value]


def _blocks(queries: int, share: float) -> list[tuple[int, int, float]]:
    """`(first, end, p)`: the queries `first <= i < end` change a part p of the image; at most
    `BLOCK` of them.

    p is `share` halved once for each of the `HALVINGS` below i.
    """
    cuts = {0, queries, *(i + 1 for i in HALVINGS if i + 1 < queries), *range(0, queries, BLOCK)}
    return [
        (i, j, share / 2 ** sum(i > halving for halving in HALVINGS))
        for i, j in itertools.pairwise(sorted(cuts))
    ]


def _sides(part: float, h: int, w: int, norm: float) -> tuple[int, int]:
    """Height and width of the windows that cover a part of an h x w image; squares of l2 and l1
    are odd, from 3 on.
    """
    area = part * h * w
    least = 1 if norm == math.inf else 3
    side = max(round(math.sqrt(area)), least)
    if norm != math.inf and side % 2 == 0:
        side += 1
    return _fit(side, max(round(area / min(h, w)), least), h, w)


def _fit(side: int, length: int, h: int, w: int) -> tuple[int, int]:
    """A square, or where it is too wide for an h x w image, a rectangle of this length across
    the image's short side.
    """
    if side <= min(h, w):
        return side, side
    return (h, min(length, w)) if h <= w else (min(length, h), w)


def _draw(dice: list[torch.Generator], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uniform numbers of [0, 1) from each generator, `(m, *shape)`."""
    return torch.stack([torch.rand(shape, dtype=torch.float32, generator=die) for die in dice]).to(
        like.device
    )


def _signs(u: Tensor, like: Tensor) -> Tensor:
    """-1 or 1 for each of the uniform numbers."""
    return (u < 0.5).to(like.dtype) * 2 - 1


@dataclass(frozen=True)
class _Moves:
    """What is random in `count` queries. linf needs the first window and the signs only."""

    sides: tuple[int, int]  # of the windows, the same for all
    corners: Tensor  # of two windows, top and left: `(count, m, 4)`
    turned: Tensor  # which of two bumps: `(count, m)`
    signs: Tensor  # of the channels: `(count, m, c)`

    @classmethod
    def draw(
        cls, dice: list[torch.Generator], count: int, sides: tuple[int, int], x: Tensor
    ) -> _Moves:
        """The next `count` queries with windows of these sides in images `(m, c, h, w)`."""
        u = _draw(dice, (count, 5 + x.shape[1]), x).transpose(0, 1)
        down = x.shape[2] - sides[0] + 1
        across = x.shape[3] - sides[1] + 1
        places = torch.stack(
            [u[..., 0] * down, u[..., 1] * across, u[..., 2] * down, u[..., 3] * across], -1
        )
        return cls(sides, places.long(), u[..., 4] < 0.5, _signs(u[..., 5:], x))

    def take(self, keep: Tensor) -> _Moves:
        return _Moves(self.sides, self.corners[:, keep], self.turned[:, keep], self.signs[:, keep])

    def windows(self, k: int) -> tuple[_Window, _Window]:
        every = torch.arange(self.corners.shape[1], device=self.corners.device)
        top, left, top2, left2 = self.corners[k].unbind(1)
        return _Window(every, top, left, *self.sides), _Window(every, top2, left2, *self.sides)


@dataclass(frozen=True)
class _Window:
    """A window of every image of a batch `(m, c, h, w)`, all of one size, each at its own place
    `(m,)`.
    """

    every: Tensor
    top: Tensor
    left: Tensor
    height: int
    width: int

    def read(self, images: Tensor) -> Tensor:
        """The content, `(m, c, height, width)`."""
        return self._all(images)[self.every, :, self.top, self.left]

    def box(self, domain: Domain, images: Tensor) -> Domain:
        """The part of own boxes that is in the window; one box, or none, as it is."""
        own = boxes_of(domain)
        if own is None:
            return domain
        low, high = (self.read(side.expand_as(images).contiguous()) for side in own)
        return Boxes(low, high)  # type: ignore[return-value]

    def write(self, images: Tensor, content: Tensor) -> None:
        """Replace the content, in place."""
        self._all(images)[self.every, :, self.top, self.left] = content

    def _all(self, images: Tensor) -> Tensor:
        """A view of all windows of this size: `(m, c, h - height + 1, w - width + 1, height,
        width)`.
        """
        return images.unfold(2, self.height, 1).unfold(3, self.width, 1)


def _start(
    x: Tensor, reach: Tensor, norm: float, domain: Domain, dice: list[torch.Generator]
) -> Tensor:
    """Where the search begins: vertical stripes of +-reach for linf, else a grid of bumps, 5 x
    5 of them in a square image.
    """
    c, h, w = x.shape[1:]
    if norm == math.inf:
        return clip(x + column(reach, x) * _signs(_draw(dice, (c, 1, w), x), x), domain)
    area = h * w // 25
    height, width = _fit(max(math.isqrt(area), 1), max(area // min(h, w), 1), h, w)
    down = h // height
    across = w // width
    u = _draw(dice, (1 + c, down, across, 1, 1), x)
    tiles = torch.where(u[:, :1] < 0.5, *_bumps(height, width, norm, x)) * _signs(u[:, 1:], x)
    top = (h - down * height) // 2
    left = (w - across * width) // 2
    delta = torch.zeros_like(x)
    delta[:, :, top : top + down * height, left : left + across * width] = (
        tiles.transpose(3, 4).flatten(4).flatten(2, 3)
    )
    if norm == 2:
        return clip(x + delta * column(reach / vector_norm(delta, 2), x), domain)
    return project(x + delta, x, norm, reach, domain)


def _recolour(s: _Search, moves: _Moves, k: int, domain: Domain) -> Tensor:
    """Query k for linf, `(m, c, h, w)`: in a window every pixel goes as far as it may, the same
    way throughout a channel.
    """
    window, _ = moves.windows(k)
    point = s.best.points.clone()
    step = column(s.reach, s.x) * moves.signs[k][:, :, None, None]
    window.write(point, clip(window.read(s.x) + step, window.box(domain, s.x)))
    return point


def _shift(
    s: _Search, moves: _Moves, k: int, bumps: tuple[Tensor, Tensor], norm: float, domain: Domain
) -> Tensor:
    """Query k for l2 and l1, `(m, c, h, w)`: empty a window, and fill another with what both held,
    shaped anew.

    With `delta_j` the change in that other window of channel j, out of c, and `m_j` the mass
    `||.||_r^r` of both, it becomes

        v_j (m_j + (reach^r - length^r) / c)^(1/r),   v_j = delta_j / ||delta_j||_r + sign_j bump,
        scaled to norm 1,

    so that the change has its full length again, until it is clipped. For l1 it is made c times
    that, and projected.
    """
    first, second = moves.windows(k)
    point = s.best.points.clone()
    here = first.read(s.x)
    there = second.read(s.x)
    delta = first.read(point) - here
    size = _size(delta, norm)
    first.write(point, here)  # emptied too for now, so that the mass in both windows counts once
    mass = size**norm + _size(second.read(point) - there, norm) ** norm
    second.write(point, there)
    bump = torch.where(moves.turned[k][:, None, None], *bumps)[:, None]
    v = delta / (size + 1e-12) + moves.signs[k][:, :, None, None] * bump
    wanted = (mass + column(s.reach**norm - s.length**norm, s.x) / s.x.shape[1]).clamp(min=0) ** (
        1 / norm
    )
    v = v * (wanted / (_size(v, norm) + 1e-12))
    if norm == 2:
        first.write(point, clip(here + v, first.box(domain, s.x)))
        return point
    first.write(point, here + s.x.shape[1] * v)
    return project(point, s.x, norm, s.reach, domain)


def _size(v: Tensor, norm: float) -> Tensor:
    """The norm of each channel, `(m, c, a, b) -> (m, c, 1, 1)`."""
    size: Tensor = torch.linalg.vector_norm(v, norm, dim=(2, 3), keepdim=True)
    return size


def _bumps(height: int, width: int, norm: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Two hills, one positive and one negative, above each other and side by side: both
    `(height, width)` and of norm 1.
    """

    def pair(a: int, b: int) -> Tensor:
        both = torch.cat([_hill(a // 2, b, norm), -_hill(a - a // 2, b, norm)])[None]
        return (both / vector_norm(both, norm))[0].to(like)

    return pair(height, width), pair(width, height).T


def _hill(a: int, b: int, norm: float) -> Tensor:
    """`(a, b)`, of norm 1: `sum_{k >= d} 1 / (k + 1)^(2 or 4)` at distance d from the middle,
    counted in square rings.
    """
    ring = torch.maximum(
        (torch.arange(a) - a // 2).abs()[:, None], (torch.arange(b) - b // 2).abs()
    )
    steps = torch.arange(1, max(a, b) // 2 + 2, dtype=torch.float64) ** (-2 if norm == 2 else -4)
    hill = steps.flip(0).cumsum(0).flip(0)[ring][None]
    return (hill / vector_norm(hill, norm))[0]
