"""Whether a search for the nearest flip has come to rest: its distances after a quarter of the
passes beside those after all.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_REST = 0.02  # by which share a mean distance may shrink from a quarter of the passes to all
FAR_FROM_REST = 0.1  # more than this is a warning


def quarter(passes: int) -> int:
    """The passes that a search with so many is compared with."""
    return max(passes // 4, 1)


def shrinkage(early: Tensor, late: Tensor) -> float:
    """By which share the mean distance is smaller after all passes than after some.

    Only samples that have a flip in both count; without any it is 0.

    Args:
        early: distances after some passes `(n,)`, inf where there is no flip.
        late: distances of the same samples after more passes `(n,)`.
    """
    both = torch.isfinite(early) & torch.isfinite(late) & (late > 0)
    if not bool(both.any()):
        return 0.0
    return 1 - float(late[both].mean() / early[both].mean())


def first_flips(early: Tensor, late: Tensor) -> int:
    """How many samples have a flip after all passes and none after some."""
    return int((torch.isinf(early) & torch.isfinite(late)).sum())


def at_rest(early: Tensor, late: Tensor) -> bool:
    """Whether more passes bring next to nothing: no new flip, no shorter mean distance."""
    return not first_flips(early, late) and shrinkage(early, late) <= AT_REST


def far_from_rest(early: Tensor, late: Tensor) -> bool:
    """Whether more passes bring so much that the distances are worth a warning."""
    attacked = int((late > 0).sum())
    new = first_flips(early, late)
    return shrinkage(early, late) > FAR_FROM_REST or new > FAR_FROM_REST * attacked
