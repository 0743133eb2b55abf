"""A run: what an evaluation found, with the two things that need more than arithmetic.

`Outcome` holds the figures. `Evaluation` reads them from a run directory and checks them against a
model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from wassail.evaluation.reading import load
from wassail.evaluation.result import Outcome
from wassail.evaluation.verifying import Verification, verify
from wassail.network import BATCH_SIZE, Model


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Outcome):
    """An `Outcome` that is read from a run directory and can be checked against a model."""

    @classmethod
    def of(cls, outcome: Outcome) -> Evaluation:
        """The figures of an outcome."""
        return cls(**{field.name: getattr(outcome, field.name) for field in fields(outcome)})

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Evaluation:
        """The evaluation in a run directory, finished or not: what is there counts. Runs no
        code from it.
        """
        return cls.of(load(folder))

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
            seed: of the random choices. By default a new one, which nobody who forged a run could
                know.
            batch_size: most samples in one model call.
        """
        return verify(self, model, data, radii, seed=seed, batch_size=batch_size)
