"""What eps means: in plain words, and for each feature of a table in its own unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wassail.evaluation.units import units_text
from wassail.report.html import Cell, Panel, Table, name
from wassail.threat import show

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

MEANS = {
    1.0: "on average over the samples",
    2.0: "in the root mean square over the samples",
    math.inf: "for each sample at most",
}


def eps_text(run: Evaluation) -> str:
    """The budget of the headline in one sentence, without symbols."""
    threat = run.threat
    known = units_text(run.info.get("data"), threat)
    if known is not None:
        return f"eps {show(threat.eps)} is {known}."
    mean = MEANS.get(threat.order, f"in the mean of order {threat.order:g} over the samples")
    size = _size(run.info.get("data"))
    box = threat.domain if run.boxes is None else None
    width = 1.0 if box is None else box[1] - box[0]
    levels = show(threat.eps).removesuffix("/255")
    if threat.norm == math.inf:
        share = f"{threat.eps:.4g} in the unit of the inputs"
        if box is not None and math.isfinite(width):
            share = f"{100 * threat.eps / width:.3g} % of the range [{box[0]:g}, {box[1]:g}]"
        steps = f" ({levels} of 255 levels)" if levels != show(threat.eps) else ""
        what = f"every number of a sample may move by {share}{steps}"
    else:
        how = "Euclidean length" if threat.norm == 2 else "sum of all changes"
        what = f"a sample may move by {threat.eps:.4g}, {how}"
        if size:
            each = threat.eps / (math.sqrt(size) if threat.norm == 2 else size)
            what += f", as much as {each:.2g} in each of its {size:,} numbers"
    return f"eps {show(threat.eps)}: {what}, {mean}."


def _size(about: Any) -> int:
    """How many numbers a sample has; 0 where a run does not say."""
    shape = about.get("shape") if isinstance(about, Mapping) else None
    plain = isinstance(shape, (list, tuple)) and all(isinstance(n, int) for n in shape)
    return math.prod(shape) if plain and shape else 0


def features_of(run: Evaluation) -> list[tuple[str, float, float, float]]:
    """Name, least, greatest and unit of each feature of a table; unit 0: it may not move. None
    where features have no boxes of their own.
    """
    about = run.info.get("data")
    if not isinstance(about, Mapping):
        return []
    kept = [about.get(key) for key in ("features", "low", "high", "scale")]
    if not all(isinstance(part, list) and len(part) == len(kept[0] or ()) for part in kept):
        return []
    held = set(map(str, about.get("fixed") or ()))
    found = []
    for title, *numbers in zip(*kept):
        if not all(isinstance(v, (int, float)) for v in numbers):
            return []
        low, high, scale = map(float, numbers)
        found.append((str(title), low, high, 0.0 if str(title) in held else scale))
    return found


def units_panel(run: Evaluation) -> Panel | None:
    """The features with their boxes and units, and what eps is in each."""
    features = features_of(run)
    if not features:
        return None
    eps = run.threat.eps
    rows = []
    for title, low, high, unit in features:
        cells = [Cell(name(title, 40), kind="head")]
        cells += [Cell(f"{value:.4g}", value) for value in (low, high)]
        cells.append(Cell(f"{unit:.4g}" if unit else "may not move", unit))
        cells.append(Cell(f"{unit * eps:.4g}" if unit else "–", unit * eps))
        rows.append(cells)
    heads = ["Feature", "Least", "Greatest", "Unit", f"eps {show(eps)} moves it by"]
    lead = (
        "Each feature stays in its own box and is measured in its own unit. Last column: how far "
        "eps moves the feature if it moves alone" + _together(run.threat.norm)
    )
    return Panel([Table(f"{len(rows)} features", heads, rows, "Units of the features")], lead)


def _together(norm: float) -> str:
    if norm == math.inf:
        return "; all of them may move so far at once."
    return "; the more features move, the less is left for each."
