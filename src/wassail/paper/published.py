"""What the paper and RobustBench publish."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wassail.errors import InputError
from wassail.threat import parse_eps, parse_norm
from wassail.zoo import MODELS

ORDERS = (1.0, 2.0, math.inf)


SAMPLES = 200


PASSES = 1000  # of `nearest`: far fewer than AutoAttack's


THREATS = {math.inf: "Linf", 2.0: "L2"}  # RobustBench's names


EMBEDDED = {
    math.inf: 0.1,
    2.0: 0.5,
    1.0: 2.0,
}  # budgets of the embedded networks; linf: what they were trained for


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


def _published() -> tuple[Published, ...]:
    """The published figures."""
    keys = [column.key for column in PAPER]
    linf = (math.inf, 8 / 255)
    l2 = (2.0, 0.5)
    lines: list[tuple[str, str, str, tuple[float, float], str]] = [
        (
            "Bartoldson2024Adversarial_WRN-94-16",
            "WRN-94-16",
            "cifar10",
            linf,
            "93.68 65.25 32.90 58.71 77.09 46.46 76.15 74.31 74.05 73.71 73.55 73.54",
        ),
        (
            "Bartoldson2024Adversarial_WRN-82-8",
            "WRN-82-8",
            "cifar10",
            linf,
            "93.11 62.06 27.79 56.81 75.33 41.60 74.17 72.54 71.85 71.59 71.46 71.46",
        ),
        (
            "Cui2023Decoupled_WRN-28-10",
            "WRN-28-10",
            "cifar10",
            linf,
            "92.16 60.01 26.39 50.97 72.61 39.18 70.60 68.62 68.07 67.73 67.58 67.57",
        ),
        (
            "Wang2023Better_WRN-70-16",
            "WRN-70-16",
            "cifar10",
            linf,
            "93.25 63.08 28.60 55.17 74.80 41.80 73.46 71.68 71.02 70.69 70.53 70.52",
        ),
        (
            "Wang2023Better_WRN-28-10",
            "WRN-28-10",
            "cifar10",
            linf,
            "92.44 60.96 23.81 52.03 72.67 36.91 70.24 68.24 67.60 67.31 67.17 67.17",
        ),
        (
            "Xu2023Exploring_WRN-28-10",
            "WRN-28-10",
            "cifar10",
            linf,
            "93.69 63.25 36.27 52.48 73.98 46.04 67.08 69.00 66.39 63.89 63.93 63.84",
        ),
        (
            "Sehwag2021Proxy_R18",
            "RN-18",
            "cifar10",
            linf,
            "84.59 54.65 15.23 46.58 63.86 27.38 58.40 57.66 56.30 55.54 55.50 55.50",
        ),
        (
            "Wang2023Better_WRN-70-16",
            "WRN-70-16",
            "cifar10",
            l2,
            "95.54 77.63 55.57 70.09 86.37 66.73 85.66 85.30 85.00 84.97 84.96 84.97",
        ),
        (
            "Wang2023Better_WRN-28-10",
            "WRN-28-10",
            "cifar10",
            l2,
            "95.16 76.31 57.42 68.65 85.33 68.10 84.52 83.89 83.71 83.68 83.68 83.68",
        ),
        (
            "Sehwag2021Proxy",
            "WRN-34-10",
            "cifar10",
            l2,
            "90.93 72.01 39.25 67.96 79.87 53.13 78.23 78.16 77.51 77.24 77.22 77.25",
        ),
        (
            "Sehwag2021Proxy_R18",
            "RN-18",
            "cifar10",
            l2,
            "89.76 69.75 48.40 65.02 77.68 58.64 75.24 75.32 74.69 74.41 74.41 74.40",
        ),
        (
            "Ding2020MMA",
            "WRN-28-4",
            "cifar10",
            l2,
            "88.02 63.04 31.35 53.47 71.61 42.89 66.62 66.62 66.22 66.09 66.05 66.06",
        ),
        (
            "Rony2019Decoupling",
            "WRN-28-10",
            "cifar10",
            l2,
            "89.05 64.19 27.79 51.15 72.30 39.94 66.58 67.08 66.59 66.44 66.41 66.42",
        ),
        (
            "Cui2023Decoupled_WRN-28-10",
            "WRN-28-10",
            "cifar100",
            linf,
            "73.85 43.68 6.71 24.64 50.42 10.85 43.82 40.37 39.57 39.18 39.17 39.14",
        ),
        (
            "Wang2023Better_WRN-28-10",
            "WRN-28-10",
            "cifar100",
            linf,
            "72.58 43.61 7.45 24.90 49.81 10.88 44.09 39.66 39.12 38.77 38.70 38.71",
        ),
        (
            "Addepalli2022Efficient_RN18",
            "RN-18",
            "cifar100",
            linf,
            "65.45 37.64 3.07 14.52 42.01 7.80 33.47 28.82 28.26 27.67 27.65 27.63",
        ),
        (
            "Xu2024MIMIR_Swin-L",
            "Swin-L",
            "imagenet",
            (math.inf, 4 / 255),
            "78.62 54.86 17.96 48.68 62.09 30.96 59.96 60.30 58.00 59.68 58.32 58.30",
        ),
        (
            "Amini2024MeanSparse_Swin-L",
            "MeanSparse Swin-L",
            "imagenet",
            (math.inf, 4 / 255),
            "78.80 59.83 25.25 54.56 65.28 38.35 62.12 62.54 61.14 58.92 58.76 58.76",
        ),
        (
            "Liu2023Comprehensive_ConvNeXt-B",
            "ConvNeXt-B",
            "imagenet",
            (math.inf, 4 / 255),
            "76.02 52.95 16.23 45.84 59.79 28.46 55.90 56.78 54.38 55.82 53.19 53.18",
        ),
        (
            "Singh2023Revisiting_ConvNeXt-S-ConvStem",
            "ConvNeXt-S-ConvStem",
            "imagenet",
            (math.inf, 4 / 255),
            "74.10 50.31 12.06 41.40 56.35 23.97 52.82 53.20 51.04 52.42 49.92 49.90",
        ),
    ]
    return tuple(
        Published(
            name,
            architecture,
            dataset,
            norm,
            eps,
            dict(zip(keys, map(float, figures.split()), strict=True)),
        )
        for name, architecture, dataset, (norm, eps), figures in lines
    )


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
