"""What a budget means where a table is evaluated: a share of the range of each feature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wassail.threat import Domain, Threat, show

SAME = 1e-9  # relative: units that differ by less are the same share of their ranges


def units_text(about: Any, threat: Threat) -> str | None:
    """An eps in words, "2 % of each feature's range on average"; None where there is no table.

    about: what a run records of its data; threat: norm, order, eps and box.
    """
    if not isinstance(about, Mapping) or not isinstance(about.get("features"), list):
        return None
    try:
        share = _share(about, threat)
    except (TypeError, ValueError):  # a run from elsewhere may record anything
        return None
    if share is None:
        return None
    if math.isnan(share):
        return f"{show(threat.eps)} in the unit of {_over(threat.norm)}{_mean(threat.order)}"
    own = isinstance(about.get("scale"), list)
    what = _ranges(threat.norm, None if own else threat.domain)
    return f"{100 * share * threat.eps:.4g} % of {what}{_mean(threat.order)}"


def _ranges(norm: float, box: Domain) -> str:
    """What a share is of; with one box for all features that box."""
    if norm == math.inf:
        one = "" if box is None else f" [{box[0]:g}, {box[1]:g}]"
        return f"each feature's range{one}"
    many = "their ranges" if box is None else f"the range [{box[0]:g}, {box[1]:g}]"
    how = "Euclidean" if norm == 2 else "summed"
    return f"{many}, {how} over the features,"


def _over(norm: float) -> str:
    return "each feature" if norm == math.inf else "the features"


def _mean(order: float) -> str:
    known = {1.0: " on average", 2.0: " in the root mean square", math.inf: " at most"}
    return known.get(order, f" in the mean of order {order:g}")


def _share(about: Mapping[str, Any], threat: Threat) -> float | None:
    """The unit of the features as a share of their ranges; NaN where they differ, None without."""
    kept = [about.get(key) for key in ("low", "high", "scale")]
    domain = threat.domain
    if any(not isinstance(part, list) for part in kept):
        plain = domain is not None and all(isinstance(end, float) for end in domain)
        width = domain[1] - domain[0] if plain and domain is not None else math.inf
        return 1 / width if math.isfinite(width) else None  # type: ignore[return-value]
    held = set(map(str, about.get("fixed") or ()))
    low, high, scale = (list(map(float, part or ())) for part in kept)
    shares = [
        unit / (most - least)
        for name, least, most, unit in zip(about["features"], low, high, scale)
        if str(name) not in held and most > least
    ]
    if not shares:
        return None
    same = max(shares) - min(shares) <= SAME * max(shares)
    return shares[0] if same else math.nan
