"""What an evaluation is asked for: one record, which every worker gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wassail.errors import InputError, unknown
from wassail.evaluation.criterion import Criterion
from wassail.evaluation.plan import Unit, plan
from wassail.names import ARITHMETICS, GONE_METHODS, RADIUS_METHODS
from wassail.threat import Boxes, Domain, Threat, check_seed, parse_seconds, whole

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What was asked for, beside model and data: see `evaluate`. What cannot be is refused."""

    threats: tuple[Threat, ...]
    attacks: Mapping[str, Mapping[str, Any]]
    certify: str | None
    time_limit: float | None
    seed: int
    chunk: int
    batch_size: int | None
    gradients: str
    look: bool
    arithmetic: str = "auto"
    points: Tensor | None = None
    gap: float | None = None
    closing: int | None = None
    provers: int = 1
    effort: float | None = None
    criterion: Criterion | None = None
    boxes: Boxes | None = None

    def __post_init__(self) -> None:
        whole(self.chunk, "chunk")
        check_seed(self.seed)
        if self.batch_size is not None:
            whole(self.batch_size, "batch_size")
        if self.time_limit is not None:
            parse_seconds(self.time_limit)
        if self.certify in GONE_METHODS:
            raise InputError(f"method {self.certify!r} is gone: {GONE_METHODS[self.certify]}.")
        if self.certify is not None and self.certify not in RADIUS_METHODS:
            raise unknown("method", self.certify, RADIUS_METHODS)
        if self.arithmetic not in ARITHMETICS:
            raise unknown("arithmetic", self.arithmetic, ARITHMETICS)
        if self.gap is not None and (self.certify is None or not 0 <= self.gap < 1):
            raise InputError(
                f"gap is {self.gap}: give a fraction from 0 to below 1, together with certify."
            )
        if self.closing is not None:
            whole(self.closing, "closing")
        if self.effort is not None and (self.certify is None or not self.effort >= 0):
            raise InputError(
                f"effort is {self.effort}: give seconds for each sample, at least 0, together with "
                "certify."
            )
        if self.gradients not in PRECISIONS:
            raise unknown("precision", self.gradients, PRECISIONS)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The attacks to run, cheapest first."""
        return plan(self.threats, self.attacks)

    @property
    def norm(self) -> float:
        """The ground norm of every threat."""
        return self.threats[0].norm

    @property
    def domain(self) -> Domain:
        """The box of every threat."""
        return self.threats[0].domain
