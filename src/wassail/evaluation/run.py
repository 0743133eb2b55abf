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
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.boxes import inside
from wassail.evaluation.chunks import plain
from wassail.evaluation.configuration import read_others
from wassail.evaluation.criterion import (
    CLASSES,
    Criterion,
    Regression,
    Words,
    recorded_targets,
    right_of,
)
from wassail.evaluation.findings import findings
from wassail.evaluation.landmarks import Landmark
from wassail.evaluation.notes import Verification
from wassail.evaluation.reading import Reading, readable
from wassail.evaluation.result import Finding, Row
from wassail.evaluation.signoff import Verdict, check, of_class
from wassail.evaluation.units import units_text
from wassail.network import BATCH_SIZE, Model
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
    show,
)
from wassail.transport.curve import PopulationCurve, RiskCurve, below
from wassail.transport.flips import Flips
from wassail.transport.picture import draw_sandwich
from wassail.writing import without_folders
from wassail.zoo.datasets import Data, open_data
from wassail.zoo.features import as_evaluated


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What an evaluation found, read from a run directory.

    A model on N samples against several threats of one norm and domain: attacked from above,
    perhaps certified from below. `labels` is the class predicted at the flip; the true labels are
    `y`.

    Args:
        name: of the model.
        data: name of the data.
        threats: `Threat`s; the first is the headline's.
        ids: names of the samples.
        classes: names of the classes.
        y: true labels, integer tensor `(N,)`.
        predicted: class predicted at the sample, `(N,)`.
        mu: sample weights, float64 `(N,)`.
        distances: to the nearest flip of all attacks, float64 `(N,)`; 0 where the sample is wrong
            already, inf where none is known.
        labels: class predicted at that flip, `(N,)`.
        found_by: index into `methods`, `(N,)`.
        methods: names of the attacks.
        radii: certified radii, float64 `(N,)`, or None.
        exact: whether a radius is the distance itself, bool `(N,)`, or None.
        certificate: how the radii were found, or None.
        rows: one for each attack and threat.
        best: all attacks pooled, one for each threat.
        clean: accuracy on the samples, a fraction.
        clean_interval: its 95 % interval.
        findings: what the checks and indicators found.
        info: the configuration of the run.
        images: `images([i, ...])` reads samples and their flips, `(n, *shape)` each.
        folder: the run directory, or None.
        landmarks: known shifts with their eps and accuracy, if they were asked for.
        searched: distances of the samples that the passes of `nearest` were chosen on, float64
            `(n,)` by passes; empty where the passes were given.
        others: `label_cost`, `subpopulation` and `groups` of the run; empty where inputs move and
            nothing else. `others_curve(order)` is the curve with them.
        criterion: what right means where there are no classes, a tolerance or a threshold, or None.
            Then `y` is 0, and `predicted` and `labels` are 0 where a sample is right and else the
            row of its specification that fails most, counted from 1.
        targets: what the criterion needs of each sample, float64 `(N, W)`, or None: targets and
            then tolerances of a regression.
        outputs: of the model at the samples, float64 `(N, K)`, or None.
        boxes: of each sample, where they have their own, or None; the threats then have the one box
            that holds them all.
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
    images: Callable[[Sequence[int]], tuple[Tensor, Tensor]]
    folder: str | None = None
    landmarks: tuple[Landmark, ...] = ()
    searched: Mapping[int, Tensor] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    criterion: Criterion | None = None
    targets: Tensor | None = None
    outputs: Tensor | None = None
    boxes: Boxes | None = None

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Evaluation:
        """The evaluation in a run directory, finished or not: what is there counts. Runs no code
        from it.

        Args:
            folder: path of the run directory.
        """
        with readable(folder):
            return cls.of(Reading.open(folder))

    @classmethod
    def of(cls, reading: Reading) -> Evaluation:
        """Everything that can be said from what is there.

        Args:
            reading: the run directory.
        """
        reading.check_classes()
        distances, labels, _ = reading.nearest
        methods, found_by = reading.found_by
        classes, certified, clean = reading.config["classes"], reading.certified, reading.clean
        found = cls(
            name=without_folders(str(reading.config["model"]["name"])),
            data=without_folders(str(reading.config["data"]["name"])),
            threats=reading.threats,
            ids=reading.ids,
            classes=None if classes is None else tuple(map(str, classes)),
            y=reading.y,
            predicted=reading.predicted,
            mu=reading.mu,
            distances=distances,
            labels=labels,
            found_by=found_by,
            methods=methods,
            radii=None if certified is None else reading.column(certified, "values"),
            exact=None if certified is None else reading.column(certified, "exact"),
            certificate=reading.certificate,
            rows=reading.rows,
            best=reading.best,
            clean=clean.accuracy,
            clean_interval=clean.interval,
            findings=(),
            info=reading.config,
            images=reading.images,
            folder=str(reading.store.folder),
            landmarks=reading.landmarks,
            searched={} if reading.ladder is None else dict(reading.ladder.known),
            others=read_others(reading.config, reading.chunks.n),
            criterion=reading.settings.criterion,
            targets=reading.targets,
            outputs=reading.outputs,
            boxes=reading.boxes,
        )
        # A known shift under which fewer are correct than is certified stops everything.
        for landmark in found.landmarks:
            for order in landmark.eps:
                landmark.check(found.curve(order))
        return replace(found, findings=tuple(findings(reading, found)))

    def inside(self, model: Model, rows: Tensor, x: Tensor) -> Domain:
        """Where some samples may move.

        Args:
            model: that the run is about.
            rows: places of the samples.
            x: the samples, in the variable of the run.
        """
        return inside(model, self.boxes, self.threat.domain, rows, x)

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
        """Both sides of the accuracy over `Omega_order(eps)`, for every eps.

        Args:
            order: Wasserstein order.
        """
        return self._curve(parse_order(order), {})

    def others_curve(self, order: Number) -> RiskCurve:
        """The same with labels that change and other people, as the run was asked.

        Args:
            order: Wasserstein order.
        """
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
        return self._figure(self.others_curve(threat.order), threat)

    @property
    def headline(self) -> str:
        """The figure to report, with the threat it is for."""
        if not len(self):
            return "No samples were evaluated"
        return self._figure(self.curve(self.threat.order), self.threat)

    def _figure(self, curve: RiskCurve, threat: Threat) -> str:
        """Both sides of the accuracy over a threat."""
        certified, attacked = curve(threat.eps)
        most = f"{ceil_percent(attacked)} % {self.words.stay} over {self.told(threat)}"
        if self.radii is not None:
            return f"Between {floor_percent(certified)} % and {most}"
        if self.criterion is None:
            return f"Accuracy is at most {ceil_percent(attacked)} % over {self.told(threat)}"
        return f"At most {most}"

    def told(self, threat: Threat) -> str:
        """A threat in words; of a table in shares of the features' ranges.

        Args:
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

    def population(
        self,
        order: Number,
        confidence: Number = 0.95,
        label: int | None = None,
        *,
        others: bool = False,
    ) -> PopulationCurve:
        """Both sides of the accuracy of the population over `Omega_order(eps)`, for every eps.

        Args:
            order: Wasserstein order.
            confidence: of each side, between 0 and 1 (default 0.95). For statements about all of K
                classes at once give `1 - 0.05 / K`.
            label: a class, whose samples then have a budget of their own; None for all samples.
            others: with the labels that change and the other people of the run; default False.
        """
        if others:
            if label is not None:
                raise InputError("others are for all samples: leave out the label.")
            return self.others_curve(order).population(confidence)
        return of_class(self, parse_order(order), label).population(confidence)

    def require(self, requirement: str) -> Verdict:
        """Whether a requirement holds: a verdict that is true if it does, with a sentence.

        Args:
            requirement: for example
                "accuracy>=0.5 at eps 2/255 order 1 confidence 0.95 proved"; `attacked` instead of
                `proved` asks about the attacks that were run, `clean` about the data; without
                `confidence` it is about the samples; `class 3` for one class; `subpopulation 0.8`,
                `label-cost 0.3` and `groups` (those of the run) for other people and labels that
                change.
        """
        return check(self, requirement)

    def verify(
        self,
        model: Model,
        data: Any = None,
        radii: bool | float = False,
        *,
        seed: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Verification:
        """What of a run does not hold for a model, what was looked at, and what was not. True if
        nothing is false.

        For runs from elsewhere: a run directory is checked for damage when it is read, but anyone
        can write one.

        Args:
            model: the model that the run is about.
            data: whatever `zoo.open_data` takes: the samples are compared with them.
            radii: True proves every certified radius again; 0.1 a tenth of them, drawn at random.
            seed: of the random choices. By default a new one, which the author of a forged run
                cannot know.
            batch_size: int, most samples in one call of the model; default 250.
        """
        records = list[dict[str, Any]]()
        targets = recorded_targets(self.info.get("data"), self.criterion)
        opened = None if data is None else open_data(data, targets=targets)
        if opened is not None:
            records.append(_record(opened, len(self)))
        model, opened = as_evaluated(self.info.get("data"), model, opened)
        if opened is not None:
            records.append(_record(opened, len(self)))
        options: dict[str, Any] = {"seed": seed, "batch_size": batch_size}
        from wassail.evaluation.verifying import verify  # with all certificates

        return verify(self, model, opened, radii, records=records, **options)


def _record(data: Data, samples: int) -> dict[str, Any]:
    """What data say of themselves; `partial` where a run has fewer samples than they."""
    classes = None if data.classes is None else list(data.classes)
    return {**plain(dict(data.info)), "classes": classes, "partial": len(data) != samples}
