"""Points that were made elsewhere: put back into the box and into the ball that rounding took them
out of.

An attack that stops at eps computes in float32, so its points lie at eps up to rounding: some of
them beyond it, where they would count as no flips at order inf. A point that is pulled toward its
sample by no more than that rounding, and flips there, is a flip at a smaller distance.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from wassail.device import write
from wassail.errors import ModelWarning
from wassail.geometry import clip, column, project, pull_inside, sides
from wassail.geometry import distances as distances_between
from wassail.losses import flip_tolerance, predict
from wassail.network import ChunkAttack, Network
from wassail.progress import Tick
from wassail.threat import Domain, box_at, boxes_of, show

STRAY = 1e-3  # of the width of the box, or of eps: what is that far outside is taken for rounded
ROUNDINGS = 8  # of each moved coordinate: an attack adds, clips and scales a few times
SHARES = (1.0, 1 / 4, 1 / 16)  # of that rounding, tried in turn until a point still flips


def replay(points: Tensor) -> ChunkAttack:
    """A chunk attack that only hands out points made elsewhere: one forward at the samples, the
    check at the points.
    """

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        return points[network.ids].to(x.device), network.logits(x, network.rows)

    return chunk


def rounding(points: Tensor, x: Tensor, norm: float, dtype: torch.dtype) -> Tensor:
    """By how much rounding may have moved each point away from its sample, float64 `(N,)`.

    Args:
        points: `(N, *shape)`.
        x: samples `(N, *shape)`.
        norm: ground norm.
        dtype: of the points as they were given. Points in float64 that fit into float32 were
            computed there.
    """
    if dtype == torch.float64 and torch.equal(points.float().double(), points.double()):
        dtype = torch.float32
    size = torch.where(points == x, 0.0, torch.maximum(points.abs(), x.abs()))
    unit = torch.finfo(dtype).eps / 2
    return ROUNDINGS * unit * distances_between(size, torch.zeros_like(size), norm)


class Inward:
    """Given points on their way back into the ball."""

    def __init__(
        self,
        points: Tensor,
        x: Tensor,
        norm: float,
        domain: Domain,
        dtype: torch.dtype,
        budgets: Sequence[float],
    ) -> None:
        """Measure the points.

        Args:
            points: `(N, *shape)`, in the box.
            x: samples `(N, *shape)`.
            norm: ground norm.
            domain: box or None.
            dtype: of the points as they were given.
            budgets: every eps that the points are meant for, none if that is not known.
        """
        self.points = points
        self.norm = norm
        self.domain = domain
        self.budgets = budgets
        self.lengths = distances_between(points, x, norm)
        self.slack = rounding(points, x, norm, dtype)
        self.inside = in_box(points, domain)

    def chunk_attack(self, tolerance: float) -> ChunkAttack:
        """A chunk attack that hands out each point where it is, or nearer if it flips there.

        A forward at the sample and one at the point; at points that flip one more, and two others
        where that fails. A nearer point must be wrong by the tolerance for flips that this library
        stores.

        Args:
            tolerance: by how much a given point must be wrong.
        """
        tries = self._limits()

        def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
            domain = network.boxes(self.domain, x)
            clean = network.logits(x, network.rows)
            network.measure(clean)
            points = self.points[network.ids.to(self.points.device)].to(x.device)
            z = network.logits(points, network.rows)
            flipped = network.predict(z, y, network.rows, tolerance) != y
            rows = (flipped & (predict(clean, y) == y)).nonzero()[:, 0]
            best = points.clone()
            least = max(tolerance, flip_tolerance(x.dtype))
            for limits in tries:
                limit = limits[network.ids]
                rows = rows[(limit > 0).to(rows.device)[rows]]
                if not len(rows):
                    break
                near = limit[rows.cpu()]
                box = box_at(domain, rows)
                trial = project(points[rows], x[rows], self.norm, near.to(x), box)
                trial = pull_inside(trial, x[rows], self.norm, near, box)
                z = network.logits(trial, rows)
                wrong = network.predict(z, y[rows], rows, least) != y[rows]
                write(best, wrong, trial, rows)
                rows = rows[~wrong]
            return best, clean

        return chunk

    def warn(self, distances: Tensor) -> None:
        """Say which flips are still beyond the budget of the attack.

        Without a budget it can only be seen: two flips or more at the same largest distance are
        those of an attack that stops there.

        Args:
            distances: of the flips that are kept, `(N,)`.
        """
        flips = torch.isfinite(distances) & (distances > 0)
        for eps in self.budgets:
            stuck = flips & self._astray(eps) & (distances > eps)
            if stuck.any():
                excess = float((distances[stuck] - eps).max())
                warnings.warn(
                    f"{int(stuck.sum())} of {len(distances)} points lie up to {excess:.2g} beyond "
                    f"eps {show(eps)} and are no flips inside it: they count at their own "
                    "distance, and at order inf not at this eps.",
                    ModelWarning,
                    stacklevel=3,
                )
        if self.budgets or not flips.any():
            return
        most = float(self.lengths[flips].max())
        last = flips & (self.lengths >= most - self.slack)
        stuck = last & (distances > self.lengths - self.slack)
        if int(last.sum()) > 1 and stuck.any():
            warnings.warn(
                f"{int(stuck.sum())} of the {int(last.sum())} flips at the largest distance, "
                f"{most:.4g}, are none when they are pulled in by the rounding of their "
                "coordinates: at order inf they may be beyond the eps of their attack; give it as "
                "eps=.",
                ModelWarning,
                stacklevel=3,
            )

    def _limits(self) -> list[Tensor]:
        """The distances that each point is pulled to in turn, `(N,)` each, 0 for no try."""
        lengths = torch.where(self.inside, self.lengths, 0.0)  # others are no flips anywhere
        tries = [lengths - share * self.slack for share in SHARES]
        for eps in self.budgets:
            astray = self._astray(eps)
            for i, limit in enumerate(tries):
                tries[i] = torch.where(astray, eps if i == 0 else 0.0, limit)
        return tries

    def _astray(self, eps: float) -> Tensor:
        """Which points lie beyond eps by no more than rounding, bool `(N,)`."""
        beyond = self.lengths - eps
        return self.inside & (beyond > 0) & (beyond <= self.slack.clamp(min=STRAY * eps))


def into_box(points: Tensor, domain: Domain) -> Tensor:
    """The points with what leaves the box by rounding (`STRAY` of its width) moved back to it; a
    warning tells how many, and how many are left where they are, farther outside.
    """
    if domain is None or not points.numel():
        return points
    low, high = sides(domain, points)
    inside = clip(points, domain)
    excess = (points - inside).abs().flatten(1).amax(1)
    width = high - low
    if boxes_of(domain) is not None:  # the widest side of each sample
        width = width.expand(len(points), *points.shape[1:]).flatten(1).amax(1)
    near = (excess > 0) & (excess <= STRAY * width)
    far = excess > STRAY * width
    count, lost, most = torch.stack([near.sum(), far.sum(), excess.amax()]).tolist()
    if count or lost:
        moved = f"{count:.0f} of {len(points)} points left the box by rounding and were moved to it"
        dropped = f"{lost:.0f} lie up to {most:.3g} outside and count as no flips"
        told = "; ".join(([moved] if count else []) + ([dropped] if lost else []))
        advice = "; give points in the units of the samples" if lost else ""
        warnings.warn(f"{told}{advice}.", ModelWarning, stacklevel=3)
    return torch.where(column(near, points), inside, points)


def in_box(points: Tensor, domain: Domain) -> Tensor:
    """Whether each point lies in the domain."""
    if domain is None:
        return torch.ones(len(points), dtype=torch.bool)
    points = points.detach().cpu()
    low, high = domain
    return ((points >= low) & (points <= high)).flatten(1).all(1)
