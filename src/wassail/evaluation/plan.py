"""What an evaluation will do, decided before it does anything: units of work, cheapest first, and
the configuration of the run.

A unit is one attack over one threat, or over all of them where one search serves all. Its results
are kept in chunks of the samples; a chunk is the smallest piece of work, never done twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from wassail.attacks import catalogue
from wassail.errors import InputError, remedies
from wassail.network import Model
from wassail.specification import Labels, labels_at
from wassail.threat import (
    Groups,
    Number,
    Threat,
    box_text,
    parse_label_cost,
    parse_subpopulation,
    show,
)
from wassail.zoo.samples import Data
from wassail.zoo.source import Source

OTHERS = ("label_cost", "subpopulation", "groups")  # what may change besides inputs
OWN = ("state", "mu", "progress")  # arguments of attacks that are no options of a run
AUTO = "auto"  # passes that the evaluation chooses itself


@dataclass(frozen=True)
class Unit:
    """One attack over one threat: `key` names its folder in the run; a search for the nearest flip
    serves every threat.

    whole: it needs all samples at once. options: keyword arguments of the attack.
    """

    key: str
    attack: str
    threat: Threat
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> catalogue.Entry:
        """The attack itself."""
        return catalogue.find(self.attack)

    @property
    def every(self) -> bool:
        """Whether its flips answer every threat, by the allocation of the budget."""
        return self.entry.orders == "one"

    @property
    def whole(self) -> bool:
        """Whether all samples are one piece of work."""
        return self.entry.whole

    def __str__(self) -> str:
        return (
            self.entry.title
            if self.every
            else f"{self.entry.title} over Omega_{self.threat.order:g}({show(self.threat.eps)})"
        )


def plan(threats: Sequence[Threat], attacks: Mapping[str, Mapping[str, Any]]) -> tuple[Unit, ...]:
    """The units of the attacks over the threats, cheapest attack first. attacks: options by
    name.
    """
    if not attacks:
        raise InputError(
            "there is no attack to evaluate with: name at least one, for example nearest."
        )
    units: list[Unit] = []
    for name in sorted(attacks, key=lambda name: catalogue.find(name).passes):
        orders = catalogue.find(name).orders
        options = attacks[name]
        # The configuration of a run from elsewhere must not name a file to be written.
        taken = [key for key in OWN if key in options]
        if taken:
            raise InputError(
                f"the attack {name!r} is given {taken[0]}, which a run gives it: leave it out."
            )
        if orders == "one":
            units.append(Unit(f"attack@{name}", name, threats[0], options))
            continue
        fits = [
            t
            for t in threats
            if orders == "each" or (t.order == math.inf if orders == "inf" else t.order > 1)
        ]
        units += [
            Unit(f"attack@{name}@{exactly(t.order)}@{t.eps!r}", name, t, options) for t in fits
        ]
    if not units:
        orders_ = " or ".join(
            f"{order:g}" for order in dict.fromkeys(threat.order for threat in threats)
        )
        raise remedies(
            f"none of {', '.join(attacks)} answers order {orders_}",
            "add a threat of order inf",
            "add --order inf",
        )
    return tuple(units)


def exactly(value: float) -> str:
    """A number as people write it, 1 and not 1.0, with all of its digits."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def rehearse(units: Sequence[Unit], model: Model, x: Tensor, y: Labels) -> None:
    """Every attack on no sample at all: an option or norm that it does not have is told before
    hours of work.
    """
    for unit in units:
        tried = with_passes(unit, 1)
        try:
            none = labels_at(y, slice(0, 0))
            unit.entry.run(model, x[:0], none, unit.threat, **tried.options)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            word = str(error).rsplit("argument", 1)[1].strip()
            raise InputError(
                f"attack {unit.attack!r} has no option {word}; see help(wassail) for those it has."
            ) from None


def with_passes(unit: Unit, passes: int) -> Unit:
    """The unit with so many passes where they were left to the evaluation, else as it is."""
    if unit.options.get("passes") != AUTO:
        return unit
    return replace(unit, options={**unit.options, "passes": passes})


def data_hash(x: Tensor, y: Tensor) -> str:
    """sha256 of samples and labels."""
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode())
    for part in (x, y):
        digest.update(part.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def others_of(
    threats: Sequence[Threat], label_cost: Number, subpopulation: Number, groups: Groups | None
) -> tuple[tuple[Threat, ...], dict[str, Any]]:
    """The threats without what no attack needs to know, and that: `label_cost`, `subpopulation` and
    `groups` for a `RiskCurve`; empty where inputs move and nothing else.

    Args:
        threats: as they were given; all of them may hold these, the same ones.
        label_cost: given beside them.
        subpopulation: given beside them.
        groups: given beside them.
    """
    if not all(isinstance(threat, Threat) for threat in threats):
        return tuple(threats), {}  # refused with a sentence of its own
    asked = Threat(
        eps=1.0,
        label_cost=parse_label_cost(label_cost),
        subpopulation=parse_subpopulation(subpopulation),
        groups=groups,
    )
    found = {_others(threat) for threat in threats} | {_others(asked)}
    found.discard(_others(Threat(eps=1.0)))
    if len(found) > 1:
        raise InputError(
            "the threats differ in label_cost, subpopulation or groups: one evaluation has one of "
            "each; the curves of its result answer all others."
        )
    plain = tuple(
        replace(threat, label_cost=math.inf, subpopulation=1.0, groups=None) for threat in threats
    )
    return plain, dict(zip(OTHERS, found.pop())) if found else {}


def _others(threat: Threat) -> tuple[Any, ...]:
    return tuple(getattr(threat, name) for name in OTHERS)


def named(model: Model | Source, name: str | None) -> Source:
    """The model with its origin; a name of its own leaves what it was opened by on record."""
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise InputError(f"name is {name!r}: give a word or two, or None.")
    if not isinstance(model, Source):
        return Source(model, name or type(model).__name__, "module", {})
    if name is None or name == model.name:
        return model
    return replace(model, name=name, info={**model.info, "source": model.name})


def options_by_attack(
    attacks: Sequence[str] | Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Options by attack; one name alone is taken as a list of one."""
    if isinstance(attacks, str):
        attacks = [attacks]
    if isinstance(attacks, Mapping):
        for name, options in attacks.items():
            if not isinstance(options, Mapping):
                raise InputError(
                    f"the options of attack {name!r} are {options!r}: give a dict, for example "
                    "{'nearest': {'passes': 200}}."
                )
        return {name: dict(options) for name, options in attacks.items()}
    if not isinstance(attacks, Sequence):
        raise InputError(f"attacks is {attacks!r}: give a list of names, for example ['nearest'].")
    return {name: {} for name in attacks}


def check_budgets(threats: Sequence[Threat], shape: Sequence[int]) -> None:
    """Refuse an eps beyond which nothing lies: as a rule 8/255 was meant and 8 was written."""
    norm = threats[0].norm
    box = threats[0].domain
    if box is None or not math.isfinite(box[1] - box[0]):
        return
    diameter = (box[1] - box[0]) * math.prod(shape) ** (1 / norm)
    for threat in threats:
        if threat.eps > diameter:
            smaller = "give a smaller eps (8/255, not 8), or"
            raise remedies(
                f"eps is {show(threat.eps)}, but no two points of the {box_text(box)} are further "
                f"apart than {diameter:.4g} in l{norm:g}",
                f"{smaller} the domain that the samples live in",
                f"{smaller} the box that the samples live in with --domain LOW HIGH (for features "
                "with boxes of their own, evaluate has --box FILE)",
            )


def checked_points(points: Tensor | None, data: Data) -> Tensor:
    """Points given with an evaluation, one for each sample."""
    if not isinstance(points, Tensor):
        raise remedies(
            f"the points are a {type(points).__name__}",
            "give a tensor with one point for each sample",
            "give one point for each sample with --points FILE.pt or FILE.npz",
        )
    if tuple(points.shape) != (len(data), *data.shape):
        raise InputError(
            f"the points have shape {tuple(points.shape)}, but the data have "
            f"{(len(data), *data.shape)}: give one point for each sample, in the same order."
        )
    return points.detach().cpu()
