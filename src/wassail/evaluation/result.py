"""What an evaluation found, sample by sample and attack by attack, with the one number to report.

Everything here is arithmetic on per-sample distances and radii that a run directory keeps:
`Evaluation.load` reads them, and nothing of the model is needed for it. Images stay on disk until
they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.criterion import CLASSES, Criterion, Regression, Words, right_of
from wassail.evaluation.landmarks import Landmark
from wassail.evaluation.units import units_text
from wassail.network import Model
from wassail.notebook import card, lines, picture, table
from wassail.specification import Labels, specification_of
from wassail.threat import (
    Boxes,
    Domain,
    Number,
    Threat,
    box_text,
    ceil_percent,
    floor_percent,
    parse_order,
    parse_threat,
    show,
)
from wassail.transport.curve import RiskCurve, below
from wassail.transport.flips import Flips
from wassail.transport.picture import draw_sandwich
from wassail.zoo.features import own_boxes

Images: TypeAlias = Callable[[Sequence[int]], "tuple[Tensor, Tensor]"]
LEVELS = ("ok", "note", "warning")


@dataclass(frozen=True)
class Row:
    """One attack over one threat.

    attack: its name in the catalogue, "all" where all of them are pooled; interval: of the
    accuracy of this attack on all inputs, with 95 % confidence; cost: the transport cost of its
    flips, at most the threat's eps (points that moved and flipped nothing are left out); forwards,
    backwards: mean passes per attacked sample, one that is correct to begin with; flipped: the
    share of those with a flip; seconds: from the log, None where another row's search served this
    one too.
    """

    attack: str
    title: str
    threat: Threat
    accuracy: float
    interval: tuple[float, float]
    cost: float
    forwards: float
    backwards: float
    flipped: float
    seconds: float | None = None


@dataclass(frozen=True)
class Finding:
    """What a check before the attacks, or an indicator of attack failure after them, has to say:
    one sentence.

    level: "ok", "note" (worth knowing) or "warning" (do not trust the figures before this is
    explained).
    """

    name: str
    level: str
    text: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level {self.level!r} is none of {', '.join(LEVELS)}")


@dataclass(frozen=True, eq=False, repr=False)
class Outcome:
    """The figures of an `Evaluation`, which says what each field is: arithmetic on what was found
    for each sample.
    """

    name: str
    data: str
    threats: tuple[Threat, ...]
    ids: tuple[str, ...]
    classes: tuple[str, ...] | None
    y: Tensor
    predicted: Tensor
    mu: Tensor
    distances: Tensor
    labels: Tensor
    found_by: Tensor
    methods: tuple[str, ...]
    radii: Tensor | None
    exact: Tensor | None
    certificate: Mapping[str, Any]
    rows: tuple[Row, ...]
    best: tuple[Row, ...]
    clean: float
    clean_interval: tuple[float, float]
    findings: tuple[Finding, ...]
    info: Mapping[str, Any]
    images: Images
    folder: str | None = None
    landmarks: tuple[Landmark, ...] = ()
    searched: Mapping[int, Tensor] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    criterion: Criterion | None = None
    targets: Tensor | None = None
    outputs: Tensor | None = None
    boxes: Boxes | None = None

    def inside(self, model: Model, rows: Tensor, x: Tensor) -> Domain:
        """Where some samples may move: in boxes of their own, with features frozen that may not
        move, or in the one box of all.

        model: that the run is about; rows: places of the samples.
        """
        if self.boxes is None:
            return own_boxes(model, x, self.threat.domain)
        return self.boxes.take(rows)  # type: ignore[return-value]

    @property
    def words(self) -> Words:
        """How to speak of samples that are right."""
        return CLASSES if self.criterion is None else self.criterion.words

    @property
    def right(self) -> Labels:
        """What right means for each sample: its class, or its specification."""
        return self.y if self.targets is None else right_of(self.criterion, self.targets)

    @cached_property
    def mean_error(self) -> float | None:
        """The mean absolute error of a regression on the samples, in the unit of the targets; None
        for other tasks.
        """
        if not isinstance(self.criterion, Regression) or not len(self):
            return None
        assert self.targets is not None and self.outputs is not None
        errors = (self.outputs - self.criterion.wanted(self.targets)).abs().mean(1)
        return float((self.mu * errors).sum() / self.mu.sum())

    @property
    def threat(self) -> Threat:
        """The threat of the headline."""
        return self.threats[0]

    @property
    def orders(self) -> tuple[float, ...]:
        """The Wasserstein orders of the threats, each once, as they were asked for."""
        return tuple(dict.fromkeys(threat.order for threat in self.threats))

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that should be explained before the figures are trusted."""
        return tuple(finding for finding in self.findings if finding.level == "warning")

    def curve(self, order: Number) -> RiskCurve:
        """Both sides of the accuracy over `Omega_order(eps)`, for every eps."""
        return self._curve(parse_order(order), {})

    def others_curve(self, order: Number) -> RiskCurve:
        """The same with labels that change and other people, as the run was asked."""
        return self._curve(parse_order(order), self.others)

    @cached_property
    def others_threats(self) -> tuple[Threat, ...]:
        """The threats with labels that change and other people; none for a run without them."""
        if not self.others:
            return ()
        return tuple(replace(threat, **self.others) for threat in self.threats)

    @property
    def others_sentence(self) -> str | None:
        """The figure of the headline's threat with labels that change and other people, or None."""
        if not self.others or not len(self):
            return None
        threat = self.others_threats[0]
        certified, attacked = self.others_curve(threat.order)(threat.eps)
        if self.radii is None:
            return self._at_most(attacked, threat)
        return (
            f"Between {floor_percent(certified)} % and {ceil_percent(attacked)} % "
            f"{self.words.stay} over {self.told(threat)}"
        )

    def _at_most(self, attacked: float, threat: Threat) -> str:
        if self.criterion is None:
            return f"Accuracy is at most {ceil_percent(attacked)} % over {self.told(threat)}"
        return f"At most {ceil_percent(attacked)} % {self.words.stay} over {self.told(threat)}"

    def told(self, threat: Threat) -> str:
        """A threat in words; of a table in shares of the features' ranges.

        threat: norm, order, eps and what else may change.
        """
        if self.boxes is not None:
            return str(replace(threat, domain=self.boxes))  # type: ignore[arg-type]
        units = units_text(self.info.get("data"), threat)
        if units is None:
            return str(threat)
        ball = f"Omega_{threat.order:g}({show(threat.eps)}), ground norm l{threat.norm:g}"
        return f"{ball}, {units}{threat.others}"

    @property
    def setting(self) -> str:
        """What every threat of the run shares, in words: the norm and where points may be."""
        units = units_text(self.info.get("data"), self.threat)
        if self.boxes is not None:
            return f"ground norm l{self.threat.norm:g}, own boxes of {len(self)} samples"
        where = box_text(self.threat.domain)
        where = where if units is None else f"eps {show(self.threat.eps)} = {units}"
        return f"ground norm l{self.threat.norm:g}, {where}"

    @cached_property
    def _certified(self) -> Tensor | None:
        # A radius above the distance of an evaluated flip is an error that stops everything: see
        # `transport.below`.
        return None if self.radii is None else below(self.radii, self.distances, self._size)

    @property
    def _size(self) -> int:
        return math.prod(self.info.get("data", {}).get("shape", [])) or 1

    @cached_property
    def _curves(self) -> dict[tuple[float, bool], RiskCurve]:
        """The curves that were asked for: each sorts its samples once."""
        return {}

    def _curve(self, order: float, others: Mapping[str, Any]) -> RiskCurve:
        key = (order, bool(others))
        if key not in self._curves:
            made = RiskCurve(self.distances, self._certified, self.mu, order, **others)
            self._curves[key] = made
        return self._curves[key]

    @property
    def headline(self) -> str:
        """The figure to report, with the threat it is for."""
        certified, attacked = self.curve(self.threat.order)(self.threat.eps)
        if not len(self):
            return "No samples were evaluated"
        if self.radii is None:
            return self._at_most(attacked, self.threat)
        return (
            f"Between {floor_percent(certified)} % and {ceil_percent(attacked)} % "
            f"{self.words.stay} over {self.told(self.threat)}"
        )

    @property
    def definition(self) -> str:
        """What the headline's figure means, in one or two sentences."""
        order = self.threat.order
        eps = self.threat.eps
        where = (
            f"every sample may move by {eps:.4g}"
            if order == math.inf
            else f"Wasserstein-{order:g} distance {eps:.4g}"
        )
        ball = where if order == math.inf else f"within {where} of the data"
        below_ = (
            ""
            if self.radii is None
            else " The lower figure is proved: no distribution of that set does worse."
        )
        return (
            f"The share of the data's mass that is still {self.words.kept} under the worst "
            f"distribution found ({ball}, ground norm l{self.threat.norm:g}); it was built and "
            f"re-verified, and {self.words.tie}.{below_}"
        )

    def flips(self) -> Flips:
        """All samples with their nearest flips, in memory: for `merge`, `allocate` and
        everything else that takes flips.
        """
        x, points = self.images(range(len(self)))
        none = torch.zeros(len(self), dtype=torch.int64)
        return Flips(
            x,
            self.y,
            points,
            self.distances,
            self.labels,
            none,
            none,
            none,
            self.found_by,
            self.threat.norm,
            self.threat.domain,
            self.methods,
            {"run": f"{self.name} on {self.data}"},
            specification_of(self.right),
        )

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        attacks = ", ".join(dict.fromkeys(row.attack for row in self.rows)) or "no attack"
        warned = f"; {len(self.warnings)} warnings" if self.warnings else ""
        return (
            f"{type(self).__name__}({self.name} on {len(self)} samples of {self.data}, {attacks}: "
            f"{self.headline}{warned})"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                row.title,
                str(row.threat),
                f"{ceil_percent(row.accuracy)} %",
                f"{100 * row.interval[0]:.1f} to {100 * row.interval[1]:.1f} %",
            )
            for row in (*self.best, *self.rows)
        ]
        said = [f"Warning: {finding.text}" for finding in self.warnings]
        drawn = picture(
            lambda: draw_sandwich([self.curve(p) for p in self.orders], mark=self.threat.eps),
            "certified and attacked accuracy against eps, for every order of the run",
        )
        about = (
            f"{self.name} on {len(self)} samples of {self.data}, clean {self.words.share} "
            f"{100 * self.clean:.2f} %. {self.definition}"
        )
        head = ("attack", "threat", f"{self.words.share} at most", "95 % interval")
        return card(self.headline, lines(about, *said), table(head, rows), drawn)


def same_norm(threats: Sequence[Threat]) -> tuple[Threat, ...]:
    """The threats of one evaluation, each once, or one sentence that says why they cannot be
    evaluated together.
    """
    if not threats:
        raise InputError(
            "there is no threat to evaluate: give at least one, for example Threat('inf', 1, "
            "'8/255')."
        )
    for threat in (parse_threat(threat, own=True) for threat in threats):
        if (threat.norm, threat.domain) != (threats[0].norm, threats[0].domain):
            raise InputError(
                f"the threats {threats[0]} and {threat} differ in norm or domain: one evaluation "
                "has one of each, since its distances are measured in it; make two."
            )
    return tuple(dict.fromkeys(threats))
