"""Whether the guarantee of a pack still speaks about new data.

The shift between the samples of the pack and new ones is measured for each share of people that is
there. At that shift the pack's own radii give a guarantee, by arithmetic. Two samples of one
distribution are apart, too: how far is measured by random halves, and stands beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from wassail.errors import FAILS, HOLDS, UNKNOWN, InputError
from wassail.evaluation.run import Evaluation
from wassail.evidence.figures import of_samples
from wassail.evidence.pack import drawn
from wassail.evidence.question import own_boxes
from wassail.losses import predict
from wassail.network import BATCH_SIZE, Model, Network, device_of, frozen
from wassail.threat import floor_percent, show
from wassail.transport.between import ShiftBetween, shift_between
from wassail.transport.confidence import proportion_at_least
from wassail.transport.curve import RiskCurve
from wassail.zoo.datasets import open_data
from wassail.zoo.features import as_evaluated, features_of

SHARES = (1.0, 0.9, 0.8, 0.7, 0.5, 0.3)  # of people that are there
CHANCE = 0.02  # a shift that random halves reach more often is no more than chance
REPEATS = 99  # random halves of the inputs without labels
CONFIDENCE = 0.95
SLACK = 1e-6  # relative: of an eps that a linear program finds


@dataclass(frozen=True)
class AtShare:
    """The shift for one share of people, and what the pack guarantees there.

    Args:
        share: of people that are there.
        eps: that explains the new samples.
        baseline: the same between random halves.
        chance: how often random halves are as far apart.
        guarantee: certified accuracy at eps.
    """

    share: float
    eps: float
    baseline: float
    chance: float
    guarantee: float


@dataclass(frozen=True)
class Recheck:
    """The answer.

    Args:
        code: 0: the guarantee still speaks about the new data; 1: it does not; 3: these samples
            cannot tell.
        sentence: the answer in words.
        promised: certified accuracy at the threat of the pack.
        rows: one for each share.
        alone: the inputs without their labels, everyone there; its guarantee is that at eps less
            the baseline, the most that could hold.
        seen: how many of the new samples are classified correctly, and of how many; None without a
            model.
        caution: what the figures are not.
    """

    code: int
    sentence: str
    promised: float
    rows: tuple[AtShare, ...]
    alone: AtShare | None
    seen: tuple[int, int] | None
    caution: str

    def __str__(self) -> str:
        lines = [
            f"  share {row.share:g}: eps {show(row.eps)} (by chance {show(row.baseline)}, as far "
            f"in {100 * row.chance:.0f} % of random halves), guarantee "
            f"{floor_percent(row.guarantee)} %"
            for row in self.rows
        ]
        if self.alone is not None:
            lines.append(
                f"  inputs without labels: eps {show(self.alone.eps)} (by chance "
                f"{show(self.alone.baseline)}, as far in {100 * self.alone.chance:.0f} % of random "
                "halves)"
            )
        return "\n".join([self.sentence, *lines, *([self.caution] if lines else [])])


def recheck(run: Evaluation, data: Any, model: Model | None = None, seed: int = 0) -> Recheck:
    """Whether the guarantee of a run still speaks about new data.

    Args:
        run: of the pack, with radii.
        data: whatever `zoo.open_data` takes, in the units of the pack's data.
        model: that the pack is about; default None: the accuracy on the new data is not seen.
        seed: of the draws; default 0.
    """
    if run.radii is None:
        raise InputError("the pack proves nothing, so there is no guarantee: make one that does.")
    promised = _promise(run)
    new = open_data(data)
    outside = _outside(run, new.read(0, len(new))[0])
    if outside:
        text = (
            f"The guarantee does not speak about these data: {outside:,} of {len(new):,} samples "
            "lie outside the box that it is about."
        )
        return Recheck(FAILS, text, promised, (), None, None, "")
    rescaled, encoded = as_evaluated(run.info.get("data"), model or nn.Identity(), new)
    assert encoded is not None
    x, y = encoded.read(0, len(encoded))
    if tuple(x.shape[1:]) != tuple(run.images([])[0].shape[1:]):
        raise InputError(
            f"the new samples have shape {tuple(x.shape[1:])}, and those of the pack "
            f"{tuple(run.images([])[0].shape[1:])}: give data of the same kind."
        )
    right = None if model is None else _right(rescaled, x, y)
    mine, later = drawn(len(run), seed), drawn(len(x), seed + 1)
    shift = _shift(run, mine, (x[later], y[later]), seed)
    alone = _alone(run, mine, x[later], shift.order, seed)
    curve = run.curve(shift.order)
    rows = tuple(
        AtShare(*at, _curve(run, curve, at[0])(at[1])[0] if math.isfinite(at[1]) else 0.0)
        for at in zip(shift.shares, shift.eps, shift.baseline, shift.chance)
    )
    if right is not None:
        _agree(run, mine, rows, shift.order, float(right[later].double().mean()))
    seen = None if right is None else (int(right.sum()), len(right))
    strange = sorted(set(y.tolist()) - set(run.y.tolist()))
    whole = run.others.get("subpopulation", 1.0) == 1
    code, said = _answer(rows, promised, seen, alone, strange, whole, _fell(run, seen))
    text = _sentence(said, rows, promised, seen, shift.order)
    return Recheck(code, text, promised, rows, alone, seen, shift.caution)


def _promise(run: Evaluation) -> float:
    """The certified accuracy of the headline, with the other people that the run asked about."""
    curve = run.others_curve(run.threat.order) if run.others else run.curve(run.threat.order)
    return curve(run.threat.eps)[0]


def _outside(run: Evaluation, x: Tensor) -> int:
    """How many new samples lie outside the box of the pack."""
    domain = run.threat.domain
    if own_boxes(run):
        features = features_of(run.info["data"])
        if x.ndim != 2 or x.shape[1] != len(features.low):
            return 0  # refused later, with both shapes
        inside = (x.double() >= features.low) & (x.double() <= features.high)
        return int((~inside.all(1)).sum())
    if domain is None:
        return 0
    flat = x.flatten(1)
    return int(((flat < domain[0]) | (flat > domain[1])).any(1).sum())


def _right(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Which samples are classified correctly, a tie counted as an error."""
    with frozen(model):
        device = device_of(model, x.device)
        network = Network(model, torch.arange(len(x)), BATCH_SIZE, device)
        return predict(network.logits(x, network.rows).cpu(), y) == y


def _shift(run: Evaluation, mine: Tensor, later: tuple[Tensor, Tensor], seed: int) -> ShiftBetween:
    """The shift from some samples of the pack to new ones, for each share of people."""
    return shift_between(
        (run.images(mine.tolist())[0], run.y[mine]),
        later,
        run.threat.norm,
        run.threat.order if run.threat.order != math.inf else 1.0,
        label_cost=run.others.get("label_cost", math.inf),
        shares=sorted({*SHARES, run.others.get("subpopulation", 1.0)}),
        seed=seed,
    )


def _alone(run: Evaluation, mine: Tensor, later: Tensor, order: float, seed: int) -> AtShare:
    """The shift of the inputs without their labels, equally many of each: labels only add to it.

    What is guaranteed at eps less the baseline is the most that could hold, if chance were all of
    the baseline.
    """
    n = min(len(mine), len(later))
    before = run.images(mine.tolist()[:n])[0]
    found = shift_between(
        before, later[:n], run.threat.norm, order, shares=[1], repeats=REPEATS, seed=seed
    )
    eps, usual = found.eps[0], found.baseline[0]
    at_best = _curve(run, run.curve(order), 1.0)(max(eps - usual, 0.0))[0]
    return AtShare(1.0, eps, usual, found.chance[0], at_best)


def _curve(run: Evaluation, curve: RiskCurve, share: float) -> RiskCurve:
    price = run.others.get("label_cost", math.inf)
    return replace(curve, subpopulation=share, label_cost=price)


def _agree(
    run: Evaluation, places: Tensor, rows: tuple[AtShare, ...], order: float, seen: float
) -> None:
    """Refuse new samples that contradict the radii: on the samples that were drawn, the accuracy
    seen is at or above what is certified at their distance.
    """
    mine = torch.zeros(len(run), dtype=torch.bool)
    mine[places] = True
    curve = replace(of_samples(run, mine), order=order)
    for row in rows:
        if not math.isfinite(row.eps):
            continue
        least = _curve(run, curve, row.share)(row.eps * (1 + SLACK) + SLACK**2)[0]
        if seen < least - SLACK:
            raise InputError(
                f"{100 * seen:.2f} % of the new samples are correct, but {100 * least:.2f} % is "
                f"certified at their distance {show(row.eps)}: one of the two is wrong, so trust "
                "neither; check that the model is the one of the pack."
            )


def _answer(
    rows: tuple[AtShare, ...],
    promised: float,
    seen: tuple[int, int] | None,
    alone: AtShare,
    strange: list[int],
    whole: bool = True,
    fell: bool = False,
) -> tuple[int, str]:
    """The exit code, and what the sentence begins with; whole: the promise is for everyone; fell:
    the accuracy is lower than in the pack, beyond chance.
    """
    if seen is not None:
        right, n = seen
        at_most = 1 - proportion_at_least(n - right, n, CONFIDENCE)
        if at_most < promised:
            return FAILS, "The guarantee does not hold on these data: less was seen"
    if strange:
        named = ", ".join(map(str, strange[:3]))
        return FAILS, f"The guarantee does not speak about these data: class {named} is new"
    finite = [row for row in rows if math.isfinite(row.eps)]
    if any(row.guarantee >= promised for row in finite):
        return HOLDS, "The guarantee still speaks about these data"
    if alone.chance > CHANCE and fell:
        return UNKNOWN, "These samples cannot tell: only the accuracy shows a shift"
    if alone.chance > CHANCE and seen and proportion_at_least(*seen, CONFIDENCE) < promised:
        return UNKNOWN, "These samples are too few to tell"
    if alone.chance > CHANCE:
        return (
            HOLDS,
            "The guarantee still speaks as far as these samples tell: no shift beyond chance",
        )
    if alone.guarantee < promised and whole:
        return FAILS, "The guarantee does not speak about these data any more"
    return UNKNOWN, "These samples cannot tell whether the guarantee still speaks"


def _fell(run: Evaluation, seen: tuple[int, int] | None) -> bool:
    """Whether the accuracy seen is below that of the pack, beyond chance: two exact limits that
    share the level.
    """
    if seen is None or not torch.allclose(run.mu, run.mu[0]):
        return False
    sure = 1 - CHANCE / 2
    right = int((run.predicted == run.y).sum())
    at_most = 1 - proportion_at_least(seen[1] - seen[0], seen[1], sure)
    return at_most < proportion_at_least(right, len(run), sure)


def _sentence(
    said: str,
    rows: tuple[AtShare, ...],
    promised: float,
    seen: tuple[int, int] | None,
    order: float,
) -> str:
    """One sentence with the shift, the guarantee at that shift, and the accuracy seen."""
    finite = [row for row in rows if math.isfinite(row.eps)]
    parts = [f"{said}; the pack promises {floor_percent(promised)} %"]
    if finite:
        best = max(finite, key=lambda row: row.guarantee)
        parts.append(
            f"at the measured shift (share {best.share:g}, eps {show(best.eps)}, order "
            f"{order:g}) at least {floor_percent(best.guarantee)} % is guaranteed"
        )
    if seen is None:
        parts.append("and no model was given, so the accuracy on the new data was not seen")
    else:
        parts.append(f"and {100 * seen[0] / seen[1]:.2f} % of {seen[1]:,} new samples are correct")
    return ", ".join(parts) + "."
