"""The radii at which a loss curve bounds the margins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from wassail.certificates.loss.chords import change_of_scale
from wassail.errors import InputError
from wassail.threat import Domain, Number, number

# of the default grid, each the square root of 2 times the one before, up to the width of the domain
RADII = 22


def grid_of(grid: Sequence[Number] | None, x: Tensor, norm: float, domain: Domain) -> list[float]:
    """The radii at which margins are bounded, in rising order."""
    if grid is None:
        full = width(x, norm, domain)
        return [full * 2 ** (-k / 2) for k in reversed(range(RADII))]
    radii = sorted({number(radius, "radius of the grid") for radius in grid})
    if not radii or radii[0] <= 0 or radii[-1] == math.inf:
        raise InputError(
            f"the grid {grid!r} needs positive and finite radii: give for example [0.01, 0.02, "
            "0.05, 0.1]."
        )
    return radii


def width(x: Tensor, norm: float, domain: Domain) -> float:
    """The length of the domain's diagonal in norm r, on R^n of the box around the data."""
    low, high = (float(x.min()), float(x.max())) if domain is None else domain
    return change_of_scale(x[0].numel(), norm) * ((high - low) or 1.0)  # type: ignore[return-value]
