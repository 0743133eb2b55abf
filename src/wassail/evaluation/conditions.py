"""What a claim of a run rests on beside the model and the samples: its own choice of weights, boxes
and units.

Such a choice is no error, and it can make a figure look better than it is. So it stands beside
every headline, and `verify` adds the figures without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wassail.attacks.nearest import nearest
from wassail.errors import InputError
from wassail.evaluation.criterion import CLASSES, OWN, Regression
from wassail.network import Model
from wassail.specification import labels_at
from wassail.threat import ceil_percent, floor_percent, show
from wassail.transport.allocation import sample_weights
from wassail.transport.curve import RiskCurve
from wassail.writing import printable
from wassail.zoo.features import Features, Rescaled, features_of

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

PLAIN = (0.0, 1.0)  # the box that is usual, of images
SAMPLES = 100  # that the figure for the plain box is computed on
PASSES = 100  # of its attack
NAMED = 3  # features that a sentence names


def conditions(run: Evaluation) -> tuple[str, ...]:
    """What the run chose for itself, one sentence each; none for equal weights and the usual box.

    Args:
        run: the evaluation.
    """
    told = (_weights(run), _tolerances(run), _boxes(run))
    return tuple(text for text in told if text is not None)


def plain_sentence(run: Evaluation, model: Model) -> tuple[str, ...]:
    """The figures of a run with a box of its own for the plain box, computed here; none for others.

    model: that it is about, in the variable of the run.
    """
    domain = run.threat.domain
    n = min(len(run), SAMPLES)
    own = isinstance(model, Rescaled)
    boxed = run.boxes is not None
    if not n or not (own or boxed or (domain is not None and tuple(domain) != PLAIN)):
        return ()
    x = run.images(range(n))[0]
    y = labels_at(run.right, slice(n))
    words = f"the box [{PLAIN[0]:g}, {PLAIN[1]:g}], or what holds the run's own"
    try:
        if isinstance(model, Rescaled):
            features = features_of(_about(run))
            plain = Features(features.low, features.high, None, features.names)
            x = plain.encode(features.decode(x).clamp(plain.low, plain.high), dtype=x.dtype)
            model, domain = plain.model(model.inner), plain.domain
            words = "every feature may move, in units of its range"
        elif domain is not None:
            least, most = domain
            domain = (min(least, PLAIN[0]), max(most, PLAIN[1]))  # type: ignore[assignment]
        norm, order, eps = run.threat.norm, run.threat.order, run.threat.eps
        flips = nearest(model, x, y, norm, domain, passes=PASSES, warn=False)
        try:
            from wassail.certificates.prove.radii import radii  # half a second

            proved = radii(model, x, y, norm, domain, "crown", upper=flips.distances).values
        except InputError:
            proved = None
        curve = RiskCurve(flips.distances, proved, sample_weights(None, n), order)
    except InputError as error:
        return (f"the figure for the plain box cannot be computed: {error}",)
    figures = bracket(curve, eps, run.words.stay)
    return (
        f"in the plain box ({words}) {figures} at eps {show(eps)}, order {order:g}, with equal "
        f"weights (computed here on the first {n} samples, by crown and {PASSES} passes of "
        "nearest).",
    )


def bracket(curve: RiskCurve, eps: float, stay: str = CLASSES.stay) -> str:
    """Both sides of a curve at one budget, in words.

    Args:
        curve: of any order.
        eps: budget.
        stay: what the samples do; default "stay correct".
    """
    certified, attacked = curve(eps)
    if curve.radii is None:
        return f"at most {ceil_percent(attacked)} % {stay}"
    return f"between {floor_percent(certified)} % and {ceil_percent(attacked)} % {stay}"


def _about(run: Evaluation) -> Mapping[str, Any]:
    about = run.info.get("data")
    return about if isinstance(about, Mapping) else {}


def _weights(run: Evaluation) -> str | None:
    """Unequal weights of the samples, with the figures for equal ones."""
    n = len(run)
    if not n or bool((run.mu == run.mu[0]).all()):
        return None
    curve = run.curve(run.threat.order)
    even = RiskCurve(curve.distances, curve.radii, sample_weights(None, n), run.threat.order)
    return (
        "The samples have unequal weights, of the run's own choice: the heaviest of "
        f"{n:,} has {100 * float(run.mu.max()):.2f} % of the mass. With equal weights "
        f"{bracket(even, run.threat.eps, run.words.stay)}."
    )


def _tolerances(run: Evaluation) -> str | None:
    """Tolerances of each sample."""
    criterion = run.criterion
    if not isinstance(criterion, Regression) or criterion.tolerance != OWN or not len(run):
        return None
    assert run.targets is not None
    own = run.targets[:, criterion.outputs :]
    return (
        f"Each sample has a tolerance of the run's own choice: from {float(own.min()):.4g} to "
        f"{float(own.max()):.4g}, median {float(own.median()):.4g}, in the unit of the targets."
    )


def _boxes(run: Evaluation) -> str | None:
    """Boxes and units of the features, or a box that is not the usual one."""
    if run.boxes is not None:
        low, high = run.boxes.low, run.boxes.high
        share = float((low == high).double().mean()) if low.numel() else 0.0
        frozen = f", and {100 * share:.3g} % of the numbers may not move" if share else ""
        return (
            f"Each of {len(run):,} samples has a box of the run's own choice{frozen}. `wassail "
            "verify` adds the figures for the plain box."
        )
    about = _about(run)
    kept = [about.get(key) for key in ("low", "high", "scale")]
    if all(isinstance(part, list) for part in kept):
        held = about.get("fixed")
        fixed = [_short(name) for name in held] if isinstance(held, list) else []
        text = f"Each of {len(kept[0] or ()):,} features has a box and a unit of the run's own"
        text += " choice"
        if fixed:
            more = f" and {len(fixed) - NAMED} more" if len(fixed) > NAMED else ""
            text += f", and {len(fixed):,} may not move ({', '.join(fixed[:NAMED])}{more})"
        return f"{text}. `wassail verify` adds the figures for the plain box."
    domain = run.threat.domain
    if domain is None or tuple(domain) == PLAIN or not all(map(math.isfinite, domain)):
        return None
    return (
        f"Points stay in the box [{domain[0]:g}, {domain[1]:g}], of the run's own choice. "
        "`wassail verify` adds the figures for the plain box."
    )


def _short(name: object) -> str:
    return printable(str(name))[:40]
