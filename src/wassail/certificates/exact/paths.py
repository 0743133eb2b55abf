"""Bounds on Jacobians by the paths through a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from wassail.certificates.exact.multipliers import Reduced
from wassail.certificates.exact.relaxation import Triangle, substitute, triangle
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region
from wassail.rounding import FAINT, UNIT

CLOSE = 5e-10  # relative: a node this close to the lower bound is closed


def _steepest(network: Piecewise) -> Tensor:
    """`|z_h| <= steepest_h |v_h|`, however z is split into `slope v + (1 - slope) relu(v)`:
    `(H,)`.
    """
    return network.slope.abs() + (1 - network.slope).abs()


def _through(network: Piecewise, inputs: Tensor) -> Tensor:
    """Magnitudes `(H, m)` of neurons, the sum over all paths from those of their inputs: `V =
    inputs + |B| |z|`.
    """
    eye = torch.eye(network.neurons, dtype=torch.float64)
    paths: Tensor = torch.linalg.solve_triangular(
        eye - network.B.abs() * _steepest(network), inputs, upper=False, unitriangular=True
    )
    return paths


def paths_of(network: Piecewise) -> Tensor:
    """The sum of the magnitudes of all paths from input i to output k, `(K, n)`: no entry of
    any J is larger.
    """
    return network.C.abs() + (network.D.abs() * _steepest(network)) @ _through(
        network, network.A.abs()
    )


def brief(values: Tensor) -> np.ndarray:
    """A starting point in float32: nothing is claimed of it, so what overflows is cut."""
    most = torch.finfo(torch.float32).max
    return values.clamp(-most, most).float().numpy()


def connected(network: Piecewise) -> bool:
    """Whether a path of weights that are not 0 leads from some input to some output."""
    parts = {name: (getattr(network, name) != 0).double() for name in ("A", "B", "C", "D")}
    found = replace(network, **parts, slope=torch.zeros_like(network.slope))
    return not bool((paths_of(found) == 0).all())


def strict(network: Piecewise, points: Tensor, v: Tensor) -> Tensor:
    """Which points have no neuron at zero, beyond rounding; a neuron that is zero on a whole
    cell has no sides. Bool `(m,)`.
    """
    size = _through(network, network.A.abs() @ points.abs().T + network.c.abs()[:, None]).T
    near = v.abs() <= (3 * network.neurons + network.inputs + 4) * UNIT * size
    if near.any():
        near &= (network.affine(v > 0)[0] != 0).any(2)
    return ~near.any(1)


def _spans(a: Tensor, b: Tensor, free: Tensor, blocks: Iterable[slice]) -> tuple[Tensor, Tensor]:
    """Bounds on Z, `(m, H, k)` each, where `V = a + b Z` and Z is between 0 and V at free
    neurons and 0 at the others.
    """
    low = torch.zeros_like(a)
    high = torch.zeros_like(a)
    plus = b.clamp(min=0)
    minus = b.clamp(max=0)
    for rows in blocks:
        up = a[:, rows] + plus[:, rows] @ high + minus[:, rows] @ low
        down = a[:, rows] + plus[:, rows] @ low + minus[:, rows] @ high
        high[:, rows], low[:, rows] = (
            v * free[:, rows, None] for v in (up.clamp(min=0), down.clamp(max=0))
        )
    return low, high


def path_entries(reduced: Reduced, network: Piecewise) -> Tensor:
    """The largest `|J_ki|` that any masks of the free neurons give, `(m, K, n)`, by intervals
    through the network.

    From the side with fewer numbers: `V = A + B Z` forward, or `V = D^T + B^T Z` backward.
    """
    back = reduced.D.shape[1] < reduced.A.shape[2]
    if back:
        low, high = _spans(reduced.D.mT, reduced.B.mT, reduced.free, reversed(network.blocks()))
        c = reduced.C.mT
        d = reduced.A.mT
    else:
        low, high = _spans(reduced.A, reduced.B, reduced.free, network.blocks())
        c = reduced.C
        d = reduced.D
    plus = d.clamp(min=0)
    minus = d.clamp(max=0)
    sizes = torch.maximum(c + plus @ high + minus @ low, -(c + plus @ low + minus @ high))
    return sizes.mT if back else sizes


def influence(reduced: Reduced, network: Piecewise, sizes: Tensor) -> Tensor:
    """How much of the largest entry of J may pass through each free neuron, `(m, H)`: what
    comes in times what goes out.
    """
    rows = torch.arange(len(sizes))
    largest = sizes.flatten(1).argmax(1)
    k = largest // sizes.shape[2]
    i = largest % sizes.shape[2]
    ahead = _spans(reduced.A[rows, :, i][..., None], reduced.B, reduced.free, network.blocks())
    behind = _spans(
        reduced.D[rows, k][..., None], reduced.B.mT, reduced.free, reversed(network.blocks())
    )
    return (torch.maximum(-ahead[0], ahead[1]) * torch.maximum(-behind[0], behind[1]))[..., 0]


def preactivations(reduced: Reduced, network: Piecewise, region: Region) -> tuple[Tensor, Tensor]:
    """Bounds on `v` over the region, `(m, H)` each, rounded outward: by intervals, and on bounded
    regions by linear bounds.

    Linear bounds (CROWN, Zhang et al. 2018): a free neuron between l < 0 < u lies above `alpha v`,
    alpha = [u > -l], and below the chord `u (v - l) / (u - l)`; substituting backward through the
    layers leaves one linear function of x.
    """
    high = region.upper(reduced.A) + reduced.c
    low = reduced.c - region.upper(-reduced.A)
    top = torch.zeros_like(high)
    unit = (3 * network.neurons + network.inputs + 4) * UNIT
    blocks = network.blocks()
    for i, rows in enumerate(blocks):
        b = reduced.B[:, rows]
        # free neurons lie between 0 and their upper bound; where B is zero an infinite bound must
        # not turn into NaN
        rise = torch.where(b == 0, 0.0, b.clamp(min=0) * top[:, None, :]).sum(2)
        fall = torch.where(b == 0, 0.0, b.clamp(max=0) * top[:, None, :]).sum(2)
        wide = unit * (
            reduced.c[:, rows].abs()
            + high[:, rows].abs()
            + low[:, rows].abs()
            + rise
            - fall
            + FAINT
        )
        constant = (reduced.A[:, rows] == 0).all(2) & (b == 0).all(2)
        wide = torch.where(constant, 0.0, wide)
        high[:, rows], low[:, rows] = high[:, rows] + rise + wide, low[:, rows] + fall - wide
        if region.bounded and i and (b != 0).any():
            lines = triangle(low, high)
            above, below = (
                _above(reduced, blocks, rows, sign, lines, top, region, unit)
                for sign in (1.0, -1.0)
            )
            high[:, rows] = torch.where(
                constant, high[:, rows], torch.minimum(high[:, rows], above)
            )
            low[:, rows] = torch.where(constant, low[:, rows], torch.maximum(low[:, rows], -below))
        top[:, rows] = torch.where(reduced.free[:, rows], high[:, rows].clamp(min=0), 0.0)
    return low, high


def _above(
    reduced: Reduced,
    blocks: list[slice],
    rows: slice,
    sign: float,
    lines: Triangle,
    top: Tensor,
    region: Region,
    unit: float,
) -> Tensor:
    """An upper bound on `sign v[rows]` over the region by the lines of the neurons before it, `(m,
    rows)`.

    top: upper bounds on z; the magnitudes of all terms times `unit` and the depth cover the
    rounding.
    """
    before = slice(0, rows.start)
    reach = torch.maximum(*(side.abs() for side in region.box))  # of |x|
    start = sign * reduced.A[:, rows]
    rest = sign * reduced.c[:, rows]
    sides = (lines.upper[:, None], lines.lower[:, None])
    z = sign * reduced.B[:, rows, before]
    x, met, v = substitute(blocks, (reduced.A, reduced.B), start, z, sides)
    shift = lines.shift[:, before, None]
    raised = met.clamp(min=0) @ shift
    value = rest + (raised + v @ reduced.c[:, before, None])[..., 0]
    inner = (
        reduced.c[:, before].abs()
        + reduced.A[:, before].abs() @ reach
        + (reduced.B[:, before].abs() @ top[..., None])[..., 0]
    )
    size = rest.abs() + start.abs() @ reach + FAINT
    size = size + (raised + v.abs() @ inner[..., None])[..., 0]
    depth = sum(block.stop <= rows.start for block in blocks)
    found: Tensor = region.upper(x) + value + (depth + 1) * unit * size
    return found


def feeding(b: np.ndarray, fixed: np.ndarray, state: np.ndarray) -> np.ndarray:
    """The free neurons that fixed ones depend on, directly or through others."""
    found = np.zeros(len(state), dtype=bool)
    rows = fixed
    while len(rows):
        new = (b[rows] != 0).any(0) & ~found
        found |= new
        rows = np.flatnonzero(new)
    return np.flatnonzero(found)
