"""Every attack by the name that a person types: how to call it, and which orders it answers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from wassail import names
from wassail.attacks.nearest import nearest
from wassail.errors import unknown
from wassail.threat import Threat
from wassail.transport.distribution import Distribution, allocate
from wassail.transport.flips import Flips

Attack = Callable[..., Distribution]


@dataclass(frozen=True)
class Entry(names.Attack):
    """One attack of `names.ATTACKS` with its function."""

    @property
    def run(self) -> Attack:
        """The function, `run(model, x, y, threat, **options)`."""
        return _function(self.home, tuple(self.options.items()))


@cache
def _function(home: str, options: tuple[tuple[str, Any], ...]) -> Attack:
    module, function = home.split(":")
    found: Attack = getattr(importlib.import_module(f"wassail.attacks.{module}"), function)
    return partial(found, **dict(options)) if options else found


def nearest_and_allocate(
    model: Any, x: Any, y: Any, threat: Threat, **options: Any
) -> Distribution:
    """`nearest` as an attack on a threat: its flips, bought by the allocation."""
    flips = nearest(model, x, y, threat.norm, threat.domain, warn=False, **options)
    return allocate(flips, threat.eps, threat.order)


def points_and_allocate(
    model: Any, x: Any, y: Any, threat: Threat, *, points: Any = None, sha256: str = "", **rest: Any
) -> Distribution:
    """Anyone's points as an attack on a threat: looked at once more, bought by the allocation.

    Args:
        model: batch to logits.
        x: samples.
        y: labels.
        threat: norm and domain that the distances are for.
        points: one for each sample; None, as in a rehearsal, stands for the samples themselves.
        sha256: of the points, for the record.
        rest: `batch_size` and `progress`.
    """
    rest.pop("seed", None)  # nothing here is random
    where = (threat.norm, threat.domain)
    flips = Flips.from_points(
        model, x, y, x if points is None else points, *where, method=GIVEN, **rest
    )
    return allocate(flips, threat.eps, threat.order)


GIVEN = "points"
# What `evaluate(points=...)` adds. No attack that a person names, so `names.ATTACKS` lacks it.
_GIVEN = Entry("points", "catalogue:points_and_allocate", "anyone's points", "one", 1)


def find(name: str) -> Entry:
    """The attack of this name, or one sentence with the names there are."""
    if name == GIVEN:
        return _GIVEN
    if name not in names.ATTACKS:
        raise unknown("attack", name, tuple(names.ATTACKS))
    return Entry(**vars(names.ATTACKS[name]))
