"""Masks and cells: the polyhedra on which a piecewise-linear network is affine.

A mask says which neurons are active, and `C_D = {x : v_h(x) > 0 where D_h = 1, v_h(x) < 0 where D_h
= 0}` is its cell (paper, Definition of mask and cell). Given the masks of the neurons before it a
neuron is affine, so cells are found by a tree search over neurons in topological order: a cell is
split where the next neuron takes both signs in it. One sign is known from a point of the cell; the
other takes one least-distance problem, which non-negative least squares solves in microseconds.

"Nonempty interior" means: holds a Euclidean ball of radius 1e-9 or, in an unbounded region and
beyond distance 1 from its centre, of 1e-9 times that distance. Thinner cells are not listed. A
branch is left out where multipliers, evaluated here, prove that it holds no such ball; where they
do not, the list is not complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.exact.programs import Array, least_distance
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region
from wassail.errors import InputError
from wassail.rounding import UNIT

Forms: TypeAlias = Callable[[NDArray[np.bool_]], tuple[Array, Array]]
TIED = 1e-9  # relative: values of a neuron that are 0 but for rounding
THIN = 1e-9  # the smallest inner radius that counts as an interior
# how far from its walls a cell's point should lie, if there is room
MARGINS = (1.0, 1e-2, 1e-4, 1e-6)
# relative to the magnitudes that make up a value: nearer to 0 than this its sign is not known
ROUNDING = 64 * UNIT
UNSURE = np.empty(0)  # in place of a point: neither found nor proved not to exist


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells of a network: masks bool `(m, H)` and a point inside each, `(m, n)`.

    complete: no cell was left out because its sign pattern could not be told from rounding errors.
    """

    masks: Tensor
    points: Tensor
    complete: bool

    def __len__(self) -> int:
        return len(self.masks)


def inequalities(network: Piecewise, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The closed cell of a mask, bool `(H,)`, as `{x : G x <= g}`: G `(H, n)`, g `(H,)`.

    Its recession cone is `{u : G u <= 0}`.
    """
    weight, bias, _, _ = network.affine(mask[None])
    sign = torch.where(mask, -1.0, 1.0).double()
    return sign[:, None] * weight[0], -sign * bias[0]


def masks_at(network: Piecewise, x: Tensor) -> Tensor:
    """The masks of all cells whose closure holds the point x `(n,)`: bool `(m, H)`, one row at a
    generic point.

    A neuron is on its boundary when `|v_h|` is at most `TIED` times the magnitudes that make it
    up. Near x only those neurons matter, and they are linear in `x' - x`: the cells there are
    the cells of that linear arrangement.
    """
    point = x.detach().cpu().double().numpy()
    forms = _affine_forms(network)

    def local(mask: NDArray[np.bool_]) -> tuple[Array, Array]:
        weight, bias = forms(mask)
        value = weight @ point + bias
        tied = np.abs(value) <= TIED * (np.abs(weight) @ np.abs(point) + np.abs(bias))
        return np.where(tied[:, None], weight, 0.0), np.where(tied, 0.0, value)

    found = _walk(network, local, Region.make(None, network.inputs))
    return torch.from_numpy(np.array([mask for mask, at in found if at is not None]))


def enumerate_cells(network: Piecewise, region: Region, limit: int = 100_000) -> Cells:
    """All cells with a nonempty interior in the region, by the tree search above, in depth-first
    order.

    There are at most `sum_{i <= n} C(H, i)` for one layer of H neurons (Zaslavsky 1975), and many
    fewer in a small region. On R^n the points may be far away. More than `limit` cells are an
    `InputError`.
    """
    masks = []
    points = []
    complete = True
    for mask, point in _walk(network, _affine_forms(network), region):
        clock.check()
        clock.spend(network.neurons * (network.neurons + network.inputs) * network.inputs)
        if point is None:
            complete = False
            continue
        masks.append(mask)
        points.append(point)
        if len(masks) > limit:
            raise InputError(
                f"the network has more than {limit} cells here: raise the limit, or use a bound "
                "by branching."
            )
    return Cells(torch.from_numpy(np.array(masks)), torch.from_numpy(np.array(points)), complete)


def _affine_forms(network: Piecewise) -> Forms:
    """From a mask `(H,)` to `v = P x + p`, right where the masks of the predecessors are; 0
    where all of it cancels.
    """
    start = torch.cat([network.A, network.c[:, None]], 1).abs().numpy()
    square = network.B.abs().numpy()

    def forms(mask: NDArray[np.bool_]) -> tuple[Array, Array]:
        weight, bias, _, _ = network.affine(torch.from_numpy(mask)[None])
        form = torch.cat([weight, bias[..., None]], 2)[0].numpy()
        after = np.where(mask, 1.0, np.abs(network.slope.numpy()))[:, None] * np.abs(form)
        form[np.abs(form) <= ROUNDING * (start + square @ after)] = 0.0
        return form[:, :-1], form[:, -1]

    return forms


def _walk(
    network: Piecewise, forms: Forms, region: Region
) -> Iterator[tuple[NDArray[np.bool_], Array | None]]:
    """Every cell as `(mask, point inside)`; a None for the point stands for branches given up
    because of rounding.
    """
    starts = {rows.start for rows in network.blocks()}
    rows, limits = _walls(region)
    first = _interior(rows, limits, region)
    if first is None or first is UNSURE:
        raise InputError(
            "the region has an empty interior, so it holds no cells: give a box with low below "
            "high."
        )
    nothing = (np.zeros((0, network.inputs)), np.zeros(0))
    stack = [(0, np.zeros(network.neurons, dtype=bool), rows, limits, first, nothing)]
    while stack:
        h, mask, rows, limits, point, form = stack.pop()
        if h == network.neurons:
            yield mask, point
            continue
        if h in starts:
            form = forms(mask)
        weight = form[0][h]
        bias = form[1][h]
        top = float(np.abs(weight).max(initial=0.0))
        # squares would underflow
        size = top * float(np.linalg.norm(weight / top)) if top > 0 else 0.0
        if size == 0:  # the neuron is constant here
            mask[h] = bias > 0
            stack.append((h + 1, mask, rows, limits, point, form))
            continue
        weight = weight / size
        bias = bias / size
        height = weight @ point + bias
        unclear = abs(height) <= ROUNDING * (np.abs(weight) @ np.abs(point) + abs(bias))
        for side in (True, False):
            sign = -1.0 if side else 1.0
            more = np.vstack([rows, sign * weight])
            most = np.append(limits, -sign * bias)
            inside: Array | None = point
            if unclear or sign * height > 0:
                inside = _interior(more, most, region)
            if inside is UNSURE:
                yield mask, None
            elif inside is not None:
                child = mask.copy()
                child[h] = side
                stack.append((h + 1, child, more, most, inside, form))


def _interior(rows: Array, limits: Array, region: Region) -> Array | None:
    """A point well inside `{x in region : rows x <= limits}` (unit rows); None if it is proved
    empty, UNSURE if rounding decides.
    """
    thin, empty = _inside(rows, limits, region, THIN)
    if thin is None:
        return None if empty else UNSURE
    for margin in MARGINS:
        point, _ = _inside(rows, limits, region, margin)
        if point is not None and _clear(rows, limits, region, point):
            return point
    return thin if _clear(rows, limits, region, thin) else UNSURE


def _clear(rows: Array, limits: Array, region: Region, point: Array) -> bool:
    """Whether the point is on the right side of every wall by more than rounding errors."""
    if region.radius < math.inf and not _distance(region, point) < region.radius * (1 - ROUNDING):
        return False
    return bool(
        (limits - rows @ point > ROUNDING * (np.abs(rows) @ np.abs(point) + np.abs(limits))).all()
    )


def _distance(region: Region, point: Array) -> float:
    return float(np.linalg.norm(point - region.centre.numpy(), region.norm))


def _inside(rows: Array, limits: Array, region: Region, margin: float) -> tuple[Array | None, bool]:
    """A point of `{x in region : rows x <= limits - margin}`, the nearest to the region's centre;
    None if none was found, and then whether it is proved that there is none.
    """
    centre = region.centre.numpy()
    limits = limits - margin
    if region.radius == math.inf or region.norm == 2:
        point, multipliers = least_distance(rows, limits, centre)
        if point is not None and _distance(region, point) + margin <= region.radius:
            return point, False
        far = _farthest(region)
        return None, _proved_empty(rows, limits, centre, multipliers, far, margin)
    # The l1 ball as x = centre + a - b with a, b >= 0 and sum(a + b) <= radius.
    n = len(centre)
    lifted = np.vstack([np.hstack([rows, -rows]), -np.eye(2 * n), np.ones((1, 2 * n))])
    most = np.concatenate([limits - rows @ centre, np.zeros(2 * n), [region.radius - margin]])
    nothing = np.zeros(2 * n)
    parts, multipliers = least_distance(lifted, most, nothing)
    if parts is not None:
        return centre + parts[:n] - parts[n:], False
    return None, _proved_empty(lifted, most, nothing, multipliers, region.radius, margin)


def _farthest(region: Region) -> float:
    """No point of the region is farther from its centre than this, in the 2-norm."""
    if region.radius < math.inf:
        return region.radius
    sides = torch.maximum(region.high - region.centre, region.centre - region.low)
    return float(np.linalg.norm(sides.numpy())) * (1 + 2.0**-40)


def _proved_empty(
    rows: Array, limits: Array, centre: Array, multipliers: Array, far: float, margin: float
) -> bool:
    """Whether multipliers y >= 0 prove that no point of `{x : rows x <= limits}` is within `far`
    of the centre.

    `<rows^T y, u> <= -<y, need>` with `need = rows centre - limits` for every such point `centre +
    u`, so `|u| >= <y, need> / |rows^T y|`. On an unbounded region also: whether none of them has a
    ball of radius `margin max(1, |u|)` around it, `margin` being taken from the limits already:
    the ball's radius times `sum y` is at most `|rows^T y| |u| + margin sum y - <y, need>`.
    """
    terms = (sum(rows.shape) + 8) * UNIT
    need = float(multipliers @ (rows @ centre - limits))
    sizes = np.abs(rows) @ np.abs(centre) + np.abs(limits)
    need -= terms * float(multipliers @ sizes)
    drift = float(np.linalg.norm(multipliers @ rows)) * (1 + terms)
    drift += terms * float(np.linalg.norm(multipliers @ np.abs(rows)))
    if far < math.inf:
        return need > far * drift * (1 + terms)
    half = margin * float(multipliers.sum()) / 2 * (1 - terms)
    return drift <= half and need >= half


def _walls(region: Region) -> tuple[Array, Array]:
    """The finite sides of the region's box as rows of length one and limits."""
    n = len(region.low)
    low = region.low.numpy()
    high = region.high.numpy()
    rows = np.vstack([np.eye(n), -np.eye(n)])
    limits = np.concatenate([high, -low])
    return rows[np.isfinite(limits)], limits[np.isfinite(limits)]
