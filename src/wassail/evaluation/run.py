"""A run: what an evaluation found, with the two things that need more than arithmetic.

`Outcome` holds the figures. `Evaluation` reads them from a run directory and checks them against a
model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from wassail.errors import InputError
from wassail.evaluation.chunks import plain
from wassail.evaluation.criterion import recorded_targets
from wassail.evaluation.notes import Verification
from wassail.evaluation.reading import load
from wassail.evaluation.result import Outcome
from wassail.evaluation.signoff import Verdict, check, of_class
from wassail.network import BATCH_SIZE, Model
from wassail.threat import Number, parse_order
from wassail.transport.curve import PopulationCurve
from wassail.zoo.datasets import Data, open_data
from wassail.zoo.features import as_evaluated


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Outcome):
    """An `Outcome` that is read from a run directory and can be checked against a model.

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

    @classmethod
    def of(cls, outcome: Outcome) -> Evaluation:
        """The figures of an outcome.

        Args:
            outcome: an `Outcome`.
        """
        return cls(**{field.name: getattr(outcome, field.name) for field in fields(outcome)})

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Evaluation:
        """The evaluation in a run directory, finished or not: what is there counts. Runs no code
        from it.

        Args:
            folder: path of the run directory.
        """
        return cls.of(load(folder))

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
