"""What the paper and RobustBench publish."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from wassail.errors import InputError
from wassail.threat import parse_eps, parse_norm
from wassail.zoo import MODELS

ORDERS = (1.0, 2.0, math.inf)
SAMPLES = 200
PASSES = 1000  # of `nearest`: far fewer than AutoAttack's
THREATS = {math.inf: "Linf", 2.0: "L2"}  # RobustBench's names

# Budgets of the embedded networks; linf: what they were trained for.
EMBEDDED = {math.inf: 0.1, 2.0: 0.5, 1.0: 2.0}

ROBUSTBENCH = {
    ("cifar10", math.inf): 8 / 255,
    ("cifar10", 2.0): 0.5,
    ("cifar100", math.inf): 8 / 255,
    ("imagenet", math.inf): 4 / 255,
}

NORMS = {"1": 1.0, "l1": 1.0, "2": 2.0, "l2": 2.0, "inf": math.inf, "linf": math.inf}


@dataclass(frozen=True)
class Column:
    """One column: its key, what stands above it, the attack of the catalogue ("clean" and "all"
    are no attacks), the order.
    """

    key: str
    title: str
    attack: str
    order: float


CLEAN = Column("clean", "clean", "clean", 0.0)

PAPER = (
    CLEAN,
    Column("wda-1", "WDA k=2", "wda", 1.0),
    Column("wda++-1", "WDA++", "wda++", 1.0),
    Column("w-pgd-2", "W-PGD", "w-pgd", 2.0),
    Column("wda-2", "WDA k=2", "wda", 2.0),
    Column("wda++-2", "WDA++", "wda++", 2.0),
    Column("apgd-ce", "APGD-CE", "apgd-ce", math.inf),
    Column("apgd-dlr", "APGD-DLR", "apgd-dlr", math.inf),
    Column("wda-inf", "WDA k=1", "wda", math.inf),
    Column("autoattack", "AA", "autoattack", math.inf),
    Column("a3", "A3", "a3", math.inf),
    Column("a3-wda", "A3-WDA", "a3-wda", math.inf),
)

OURS = tuple(
    Column(f"{attack}-{order:g}", title, attack, order)
    for attack, title in (("nearest", "nearest"), ("all", "pooled"))
    for order in ORDERS
)

COLUMNS = PAPER + OURS

ATTACKS = tuple(
    dict.fromkeys(column.attack for column in COLUMNS if column.attack not in {"clean", "all"})
)


@dataclass(frozen=True)
class Published:
    """A line of the paper's Table 1: RobustBench's name, architecture, data set, norm, eps;
    figures in % by column.
    """

    name: str
    architecture: str
    dataset: str
    norm: float
    eps: float
    figures: Mapping[str, float]

    @property
    def record(self) -> dict[str, Any]:
        """The line as a board lists it: WDA++ over Omega_1 and Omega_2, AutoAttack point-wise."""
        shown = zip(ORDERS, ("wda++-1", "wda++-2", "autoattack"))
        return {
            "model": self.name,
            "architecture": self.architecture,
            "data": self.dataset,
            "norm": f"{self.norm:g}",
            "eps": self.eps,
            "clean": self.figures["clean"],
            "attacked": {f"{order:g}": self.figures[column] for order, column in shown},
        }


def _published() -> tuple[Published, ...]:
    """The lines of `published.csv`."""
    text = (files("wassail.paper") / "published.csv").read_text("utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        figures = {column.key: float(row[column.key]) for column in PAPER}
        threat = parse_norm(row["norm"]), parse_eps(row["eps"])
        line = Published(row["name"], row["architecture"], row["dataset"], *threat, figures)
        found.append(line)
    return tuple(found)


PUBLISHED = _published()


@dataclass(frozen=True)
class Claim:
    """What the paper says of its table: the column is below each of the others, on every line.
    ours: of our columns instead.
    """

    text: str
    column: str
    others: tuple[str, ...]
    ours: bool = False

    def verdict(self, figures: Mapping[str, float]) -> int | None:
        """-1 below the lowest of the others, 0 equal to it, 1 above it; None where a column is
        missing.
        """
        if any(key not in figures for key in (self.column, *self.others)):
            return None
        gap = figures[self.column] - min(figures[key] for key in self.others)
        return 0 if abs(gap) < 1e-9 else int(math.copysign(1, gap))

    def count(self, lines: Sequence[Mapping[str, float]]) -> tuple[int, int, int]:
        """On how many lines the column is below, equal, above."""
        verdicts = [self.verdict(figures) for figures in lines]
        return verdicts.count(-1), verdicts.count(0), verdicts.count(1)


POINTWISE = ("apgd-ce", "apgd-dlr", "autoattack", "a3", "a3-wda")

CLAIMS = (
    Claim(
        "WDA++ over Omega_1 is below every other method",
        "wda++-1",
        ("wda-1", "w-pgd-2", "wda-2", "wda++-2", "wda-inf", *POINTWISE),
    ),
    Claim("over Omega_2, WDA++ is below W-PGD", "wda++-2", ("w-pgd-2",)),
    Claim("point-wise WDA is below APGD-CE", "wda-inf", ("apgd-ce",)),
    Claim("point-wise WDA is below APGD-DLR", "wda-inf", ("apgd-dlr",)),
    Claim("A3-WDA is the lowest ensemble: below AA and A3", "a3-wda", ("autoattack", "a3")),
    Claim(
        "WDA with kappa = 2 over Omega_1 is below every point-wise attack",
        "wda-1",
        (*POINTWISE, "wda-inf"),
    ),
    Claim("nearest over Omega_1 is below WDA++", "nearest-1", ("wda++-1",), ours=True),
    Claim(
        "nearest over Omega_2 is below WDA++ and W-PGD",
        "nearest-2",
        ("wda++-2", "w-pgd-2"),
        ours=True,
    ),
    Claim(
        "nearest is below every point-wise attack",
        "nearest-inf",
        (*POINTWISE, "wda-inf"),
        ours=True,
    ),
)


def parse_budgets(words: Sequence[str], norms: Sequence[float]) -> dict[float, float]:
    """Budgets by norm from `inf=8/255 2=0.5`, or from one number for each norm in their order."""
    if any("=" in word for word in words):
        budgets = {}
        for word in words:
            key, _, value = word.partition("=")
            budgets[parse_norm(key)] = parse_eps(value)
        return budgets
    if words and len(words) != len(norms):
        raise InputError(
            f"{len(words)} budgets for {len(norms)} norms: give one for each, or write them as "
            "inf=8/255 2=0.5."
        )
    return dict(zip(norms, map(parse_eps, words)))


def usual_eps(name: str, norm: float, dataset: str = "cifar10") -> float:
    """The budget a model is evaluated with unless told: RobustBench's, for the embedded
    networks one of their own.
    """
    found = EMBEDDED.get(norm) if name in MODELS else ROBUSTBENCH.get((dataset, norm))
    if found is None:
        raise InputError(f"there is no usual budget for {name!r} at l{norm:g}: give eps.")
    return found


def published(name: str | None, dataset: str, norm: float, eps: float) -> Published | None:
    """The paper's line for a RobustBench model at that data set, norm and budget, or None."""
    for line in PUBLISHED:
        if (line.name, line.dataset, line.norm) == (name, dataset, norm) and math.isclose(
            line.eps, eps, rel_tol=1e-6
        ):
            return line
    return None
