"""Limits for the population: how often they hold, by simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.random import Generator

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, share
from benchmarks.stage import SEED, Row, Stage, Unit, here

REPETITIONS = 1000
CONFIDENCE = 0.95
EPS = 0.08  # of the limit for one threat; the band is read at all of BUDGETS
BUDGETS = (0.0, 0.01, 0.03, 0.08, 0.2, 0.5)
FINE = 20_000  # quantiles that stand for the population
# Shares of the population that are wrong already and that never flip; the others are uniform.
WRONG, NEVER = 0.1, 0.05
SCALES = (1.0, 2.0)  # distances of the second group are twice as large
RANGES = (0.2, 0.7)  # of the weights of both groups


@dataclass(frozen=True)
class Case:
    """A shift of people, and how many samples are drawn."""

    name: str
    samples: int
    order: float
    label_cost: float = INF
    subpopulation: float = 1.0
    groups: bool = False

    def curve(self, distances: np.ndarray, groups: int) -> ws.RiskCurve:
        """The curve of these distances, of which the first `groups` are of the first group."""
        n = len(distances)
        ids = [0] * groups + [1] * (n - groups)
        d = torch.from_numpy(distances)
        also: dict[str, Any] = {"groups": ws.Groups(ids, *RANGES)} if self.groups else {}
        also |= {"label_cost": self.label_cost, "subpopulation": self.subpopulation}
        return ws.RiskCurve(d, d, torch.full_like(d, 1 / n), self.order, **also)


SHIFTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("inputs", {}),
    ("labels", {"label_cost": 0.3}),
    ("others", {"subpopulation": 0.8}),
    ("labels and others", {"label_cost": 0.3, "subpopulation": 0.8}),
    ("groups", {"groups": True}),
)
CASES = [
    Case(f"{shift}/order {order:g}/{n}", n, order, **given)
    for n in (100, 1000)
    for shift, given in SHIFTS
    for order in (1.0, 2.0, INF)
]


def units() -> list[Unit]:
    """One for each shift, order and number of samples."""
    return [Unit(case.name, partial(simulated, case)) for case in CASES]


def of_level(level: np.ndarray) -> np.ndarray:
    """The distance that this share of the population is below."""
    uniform = (level - WRONG) / (1 - WRONG - NEVER)
    return np.where(level < WRONG, 0.0, np.where(level > 1 - NEVER, INF, uniform))


def population(case: Case) -> ws.RiskCurve:
    """The true curve, from a fine grid of quantiles."""
    level = (np.arange(FINE) + 0.5) / FINE
    return case.curve(np.concatenate([scale * of_level(level) for scale in SCALES]), FINE)


def drawn(case: Case, rng: Generator) -> ws.RiskCurve:
    """The curve of samples from the population; half of them are of each group."""
    first = case.samples // 2
    sizes = (first, case.samples - first)
    parts = [s * of_level(rng.uniform(size=n)) for s, n in zip(SCALES, sizes, strict=True)]
    if not case.groups:  # the group is drawn, too
        scale = np.where(rng.uniform(size=case.samples) < 0.5, SCALES[0], SCALES[1])
        parts = [scale * of_level(rng.uniform(size=case.samples))]
    return case.curve(np.concatenate(parts), first)


def simulated(case: Case) -> Row:
    """How often the true curve is outside of the limits, each side for itself."""
    true = population(case)
    exact = [true(eps) for eps in BUDGETS]
    at_eps = true(EPS)
    threat = ws.Threat(INF, case.order, EPS)
    rng = np.random.default_rng(SEED)
    missed = np.zeros((2, 2), dtype=int)
    width = np.zeros(2)
    for _ in range(REPETITIONS):
        curve = drawn(case, rng)
        band = curve.population(CONFIDENCE)
        limits = [band(eps) for eps in BUDGETS]
        pairs = list(zip(limits, exact, strict=True))
        missed[0] += [
            any(low > t[0] for (low, _), t in pairs),
            any(h < t[1] for (_, h), t in pairs),
        ]
        low, high = curve.population_at(threat, CONFIDENCE)
        missed[1] += [low > at_eps[0], high < at_eps[1]]
        least, most = band(EPS)
        width += [most - least, high - low]
    return {
        kind: {
            "certified": share(REPETITIONS - int(missed[k, 0]), REPETITIONS),
            "attacked": share(REPETITIONS - int(missed[k, 1]), REPETITIONS),
            "width": 100 * float(width[k]) / REPETITIONS,
        }
        for k, kind in enumerate(("band", "threat"))
    }


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each case."""
    rows = []
    for case in CASES:
        if case.name in done:
            about = {"shift": case.name.split("/")[0], "order": f"{case.order:g}"}
            rows.append({"id": case.name, "samples": case.samples} | about | done[case.name])
    return {"limits": rows}


STAGE = Stage(
    name="coverage",
    about="How often limits for the population hold, of 1,000 simulated data sets each.",
    depends=(*rooms.BASE, *rooms.CURVES),
    units=units,
    tables=tables,
    source=here(),
)
