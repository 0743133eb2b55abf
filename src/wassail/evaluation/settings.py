"""What an evaluation is asked for: one record, which every worker gets.

Nothing here needs torch: the command line refuses what cannot be before it loads a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wassail.errors import InputError, remedies, unknown
from wassail.names import ARITHMETICS, GONE_METHODS, PRECISIONS, RADIUS_METHODS
from wassail.threat import Boxes, Domain, Threat, check_seed, number, parse_seconds, whole

if TYPE_CHECKING:
    from torch import Tensor

    from wassail.evaluation.criterion import Criterion
    from wassail.evaluation.plan import Unit

CHUNK = 100  # samples that are computed, and stored, in one go


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What is asked for beside model, data, threats and attacks: keyword arguments of `evaluate`,
    which says what each is. What cannot be is refused.
    """

    certify: str | None = None
    effort: float | None = None
    arithmetic: str = "auto"
    gap: float | None = None
    closing: int | None = None
    provers: int = 1
    time_limit: float | None = None
    seed: int = 0
    chunk: int = CHUNK
    batch_size: int | None = None
    gradients: str = "float32"
    look: bool = True

    def __post_init__(self) -> None:
        check_seed(self.seed)
        whole(self.chunk, "chunk")
        whole(self.provers, "provers")
        if self.batch_size is not None:
            whole(self.batch_size, "batch_size")
        if self.closing is not None:
            whole(self.closing, "closing")
        if self.time_limit is not None:
            parse_seconds(self.time_limit)
        if self.certify in GONE_METHODS:
            raise InputError(f"method {self.certify!r} is gone: {GONE_METHODS[self.certify]}.")
        if self.certify is not None and self.certify not in RADIUS_METHODS:
            raise unknown("method", self.certify, RADIUS_METHODS)
        if self.arithmetic not in ARITHMETICS:
            raise unknown("arithmetic", self.arithmetic, ARITHMETICS)
        if self.gradients not in PRECISIONS:
            raise unknown("precision", self.gradients, PRECISIONS)
        if self.gap is not None:
            gap = number(self.gap, "gap")
            object.__setattr__(self, "gap", gap)
            if self.certify is None or not 0 <= gap < 1:
                raise remedies(
                    f"gap is {gap:g}, {100 * gap:g} points",
                    "give a fraction from 0 to below 1, together with certify",
                    "give points from 0 to below 100, together with --certify",
                )
        if self.effort is not None:
            effort = number(self.effort, "effort")
            object.__setattr__(self, "effort", effort)
            if self.certify is None or not effort >= 0:
                seconds = "give seconds for each sample, at least 0, together with"
                cause = f"effort is {effort:g}"
                raise remedies(cause, f"{seconds} certify", f"{seconds} --certify")


@dataclass(frozen=True)
class Settings(Choices):
    """All of it, with what an evaluation finds out first: the threats in the variable of the run,
    the attacks with their options, what right means, boxes of the samples.
    """

    threats: tuple[Threat, ...]
    attacks: Mapping[str, Mapping[str, Any]]
    points: Tensor | None = None
    criterion: Criterion | None = None
    boxes: Boxes | None = None

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The attacks to run, cheapest first."""
        from wassail.evaluation.plan import plan

        return plan(self.threats, self.attacks)

    @property
    def norm(self) -> float:
        """The ground norm of every threat."""
        return self.threats[0].norm

    @property
    def domain(self) -> Domain:
        """The box of every threat."""
        return self.threats[0].domain
