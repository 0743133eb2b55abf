"""What eps means: in plain words, and for each feature of a table in its own unit; and which
features change on the way to a flip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.units import units_text
from wassail.report.html import Cell, Panel, Table, name
from wassail.threat import show
from wassail.zoo.features import Features, feature_boxes

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

SHOWN = 5  # features of one sample, those that change most
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
    found = boxes_in(run.info.get("data"))
    if found is None:
        return []
    units = torch.where(found.fixed, 0.0, found.scale)
    sides = (values.tolist() for values in (found.low, found.high, units))
    return list(zip(map(str, found.names), *sides))


def boxes_in(about: Any) -> Features | None:
    """The boxes and units that a run records of its data, None where it records none that make
    sense.
    """
    try:
        return feature_boxes(about)
    except InputError:
        return None


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


def changes(about: Mapping[str, Any], sample: Tensor, flip: Tensor) -> list[tuple[str, str, str]]:
    """Feature, before and after for the features that change most, in original units.

    about: what a run records of its data: `features`, perhaps `low` and `scale`; sample: `(F,)`, as
    the model gets it; flip: `(F,)`.
    """
    names = about.get("features")
    size = sample.numel()
    if sample.ndim != 1 or not isinstance(names, Sequence) or len(names) != size:
        return []
    before, after = sample.double(), flip.double()
    boxes = boxes_in(about)
    if boxes is not None and len(boxes.low) == size:
        before, after = boxes.decode(before), boxes.decode(after)
    step = (flip.double() - sample.double()).abs()
    order = step.sort(descending=True, stable=True).indices[:SHOWN].tolist()
    return [
        (str(names[i]), f"{float(before[i]):.4g}", f"{float(after[i]):.4g}")
        for i in order
        if float(step[i]) > 0
    ]


def feature_ranges(about: Any, sample: Tensor) -> Tensor | None:
    """The range of each feature as the model gets it, `(F,)`, to draw all of them on one scale;
    None where they have no boxes of their own.

    about: what a run records of its data; sample: `(F,)`.
    """
    boxes = boxes_in(about)
    if boxes is None or sample.shape != boxes.top.shape:
        return None
    return torch.where(boxes.top > 0, boxes.top, 1.0).to(sample.dtype)
