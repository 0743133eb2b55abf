"""The paper's Table 1, made again for any models: every column is an attack over one Wasserstein
ball, ours beside them.

One (model, norm) is one evaluation in a run directory of its own, so a table that was killed goes
on where it was, and one that is finished can be read again without the models. Published figures
stand beside ours where a model is one of the paper's.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wassail.errors import InputError, unknown
from wassail.evaluation.plan import read_threats
from wassail.evaluation.protocol import evaluate
from wassail.evaluation.result import Evaluation, Row
from wassail.evaluation.store import Store
from wassail.network import Progress
from wassail.threat import Number, Threat, number, parse_eps, parse_norm, show
from wassail.writing import cell, make, save
from wassail.zoo import MODELS
from wassail.zoo.datasets import open_data
from wassail.zoo.models import open_model

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


@dataclass(frozen=True)
class Entry:
    """A model as it stands on the command line:
    `NAME@inf=2/255@2=0.25@data=D@weights=W@mean=M,M,M@std=S,S,S`.

    Only the name is needed. name: what `open_model` takes; eps: budgets by norm; data: in the place
    of the table's; options: keyword arguments of `open_model`.
    """

    name: str
    eps: Mapping[float, float] = field(default_factory=dict)
    data: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Read the form above. An `@` that is followed by nothing like `key=` belongs to the
        name.
        """
        parts = text.split("@")
        words = []
        while len(parts) > 1 and (match := re.match(r"(\w+)=(.+)", parts[-1])) is not None:
            words.append((match[1], match[2]))
            parts.pop()
        eps: dict[float, float] = {}
        data = None
        options = {}
        for key, value in words:
            if key in NORMS:
                eps[NORMS[key]] = parse_eps(value)
            elif key == "data":
                data = value
            elif key == "weights":
                options[key] = value
            elif key in {"mean", "std"}:
                options[key] = [number(part, key) for part in value.split(",")]
            else:
                raise unknown(
                    "option of a model", key, ("1", "2", "inf", "data", "weights", "mean", "std")
                )
        return cls("@".join(parts), eps, data, options)

    @property
    def robustbench(self) -> str | None:
        """The name on RobustBench's leaderboard, if it is one."""
        prefix, _, rest = self.name.partition(":")
        return rest if prefix == "robustbench" and rest else None


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


@dataclass(frozen=True)
class Cell:
    """One figure of the table: accuracy as a share, its 95 % interval, mean passes per attacked
    sample, seconds if known.
    """

    accuracy: float
    interval: tuple[float, float]
    forwards: float = 0.0
    backwards: float = 0.0
    seconds: float | None = None


@dataclass(frozen=True)
class Line:
    """One model at one norm: figures by column key, the paper's in % if there are any.

    problem: why there are no figures; finished: false while the run lacks something that it was
    asked for.
    """

    model: str
    data: str
    norm: float
    eps: float
    samples: int = 0
    folder: Path | None = None
    figures: Mapping[str, Cell] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None
    finished: bool = True

    @property
    def accuracies(self) -> dict[str, float]:
        """The accuracies as shares, by column key."""
        return {key: figure.accuracy for key, figure in self.figures.items()}

    def __str__(self) -> str:
        return f"{self.model}, l{self.norm:g} {show(self.eps)}" + (
            "" if self.finished else ", unfinished"
        )


@dataclass(frozen=True)
class Table:
    """The lines, in the order they were asked for."""

    rows: tuple[Line, ...]

    @property
    def done(self) -> tuple[Line, ...]:
        """The lines that have figures."""
        return tuple(line for line in self.rows if line.problem is None)

    def __str__(self) -> str:
        """Three blocks, one for each order, so that a terminal can hold them; the paper's
        figure below ours.
        """
        wide = max([len(str(line)) for line in self.rows] + [20])
        blocks = []
        for order in ORDERS:
            columns = [CLEAN] + [column for column in COLUMNS if column.order == order]
            head = f"{f'Omega_{order:g}':<{wide}}  " + "  ".join(
                f"{column.title:>8}" for column in columns
            )
            lines = [head, "-" * len(head)]
            for line in self.done:
                lines.append(
                    f"{line!s:<{wide}}  "
                    + "  ".join(f"{_percent(line, column):>8}" for column in columns)
                )
                if line.published:
                    paper = [
                        f"{line.published[c.key]:.2f}" if c.key in line.published else ""
                        for c in columns
                    ]
                    lines.append(
                        f"{'  published':<{wide}}  "
                        + "  ".join(f"{value:>8}" for value in paper).rstrip()
                    )
            blocks.append("\n".join(lines))
        problems = [f"{line}: {line.problem}" for line in self.rows if line.problem is not None]
        return "\n\n".join(
            [*blocks, "\n".join(self.verdicts()), *(["\n".join(problems)] if problems else [])]
        )

    def verdicts(self) -> list[str]:
        """The paper's claims about its table, and ours about it, each with the number of lines
        on which they hold.
        """
        lines = [line.accuracies for line in self.done]
        paper = [line.figures for line in PUBLISHED]
        said = []
        for claim in CLAIMS:
            told = f"{'ours: ' if claim.ours else ''}{claim.text}: {_counted(claim.count(lines))}"
            said.append(
                told
                if claim.ours
                else f"{told}; in the paper's table {_counted(claim.count(paper))}"
            )
        return said

    def csv(self) -> str:
        """One line for each figure: model, norm, eps, column, accuracy and interval in %,
        passes, seconds, the paper's in %.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            (
                "model",
                "data",
                "samples",
                "norm",
                "eps",
                "column",
                "order",
                "attack",
                "accuracy",
                "low",
                "high",
                "forwards",
                "backwards",
                "seconds",
                "published",
                "problem",
            )
        )
        for line in self.rows:
            about = (
                cell(line.model),
                cell(line.data),
                line.samples,
                f"{line.norm:g}",
                repr(line.eps),
            )
            if line.problem is not None:
                writer.writerow((*about, *[""] * 10, cell(line.problem)))
            for column in COLUMNS:
                figure = line.figures.get(column.key)
                if figure is None:
                    continue
                values = (100 * value for value in (figure.accuracy, *figure.interval))
                order = "" if column is CLEAN else f"{column.order:g}"
                passes = (
                    (f"{figure.forwards:.1f}", f"{figure.backwards:.1f}")
                    if figure.forwards
                    else ("", "")
                )
                seconds = "" if figure.seconds is None else f"{figure.seconds:.2f}"
                writer.writerow(
                    (
                        *about,
                        column.key,
                        order,
                        column.attack,
                        *(f"{value:.4f}" for value in values),
                        *passes,
                        seconds,
                        line.published.get(column.key, ""),
                        "",
                    )
                )
        return text.getvalue()

    def markdown(self) -> str:
        """One wide table in Markdown, accuracies in %, the lowest single figure of each order
        in bold, then the claims.
        """
        columns = [CLEAN] + [
            column for order in ORDERS for column in COLUMNS if column.order == order
        ]
        titles = [c.title if c is CLEAN else f"O{c.order:g} {c.title}" for c in columns]
        lines = [
            "| model | norm, eps | " + " | ".join(titles) + " |",
            "|---" * (len(columns) + 2) + "|",
        ]
        for line in self.done:
            cells = [_bold(line, column) for column in columns]
            where = f"l{line.norm:g} {show(line.eps)}" + ("" if line.finished else ", unfinished")
            lines.append(f"| `{_escaped(line.model)}` | {where} | " + " | ".join(cells) + " |")
            if line.published:
                paper = [
                    f"{line.published[c.key]:.2f}" if c.key in line.published else ""
                    for c in columns
                ]
                lines.append("| *published* | | " + " | ".join(paper) + " |")
        problems = [
            f"- `{_escaped(line.model)}`, l{line.norm:g} {show(line.eps)}: {line.problem}"
            for line in self.rows
            if line.problem
        ]
        claims = [f"- {_escaped(text)}" for text in self.verdicts()]
        return "\n".join([*lines, "", *claims, *([""] if problems else []), *problems]) + "\n"

    def write(self, folder: str | Path) -> list[Path]:
        """`table.csv` and `table.md` in a folder."""
        paths = [Path(folder) / "table.csv", Path(folder) / "table.md"]
        for path, text in zip(paths, (self.csv(), self.markdown())):
            save(path, text)
        return paths


def table(
    models: Sequence[str],
    data: str | None = None,
    norms: Sequence[Number] = ("inf", "2"),
    *,
    folder: str | Path,
    eps: Mapping[float, float] | None = None,
    n: int = SAMPLES,
    attacks: Sequence[str] = ATTACKS,
    passes: int = PASSES,
    resume: bool = False,
    dataset: str | None = None,
    models_dir: str | Path = "models",
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
    begin: Callable[[str], None] = lambda text: None,
    after: Callable[[Table], None] = lambda table: None,
) -> Table:
    """Every column of Table 1 for each model and norm, each of them one run in its own directory
    below `folder`.

    models: see `Entry`; data: whatever `open_data` takes, by default "digits" for the embedded
    models; eps: by norm, in the place of RobustBench's; n: the first n samples; attacks: the
    columns that are run; passes: of `nearest`; resume: go on with the runs that are there, perhaps
    with more attacks; dataset, models_dir: RobustBench's, as `open_model` takes them; by default
    the data set that the paper has the model for. begin: called with a line before each run; after:
    called with the table so far after each. `table.csv` and `table.md` are written after each run
    too.

    A model that cannot be opened or evaluated gets a line that says why, and the others are run all
    the same.
    """
    wanted = [parse_norm(norm) for norm in norms]
    jobs = [
        _Job.make(Entry.parse(model), norm, data, dataset, eps or {})
        for model in models
        for norm in wanted
    ]
    if len({job.folder for job in jobs}) < len(jobs):
        raise InputError("a model is given twice at the same norm and budget: once is enough.")
    for attack in attacks:
        if attack not in ATTACKS:
            raise unknown("attack of the table", attack, ATTACKS)
    home = Path(folder)
    taken = [job.folder for job in jobs if (home / job.folder / "config.json").exists()]
    if taken and not resume:
        raise InputError(
            f"{str(home)!r} holds runs already ({taken[0]} and the like): add --resume, or "
            "choose another folder."
        )
    make(home)
    lines: list[Line] = []
    for k, job in enumerate(jobs):
        begin(f"[{k + 1}/{len(jobs)}] {job.entry.name}, l{job.norm:g} {show(job.eps)}")
        try:
            chosen: dict[str, dict[str, Any]] = {
                name: {} for name in attacks if not (name == "w-pgd" and job.norm == 1)
            }  # W-PGD has no l1 form
            source = open_model(
                job.entry.name,
                models=models_dir,
                dataset=job.dataset,
                threat=THREATS.get(job.norm, "Linf"),
                **job.entry.options,
            )
            evaluate(
                source,
                open_data(job.data, n),
                [Threat(job.norm, order, job.eps) for order in ORDERS],
                chosen,
                out=home / job.folder,
                resume=resume,
                add=resume,
                passes=passes,
                seed=seed,
                batch_size=batch_size,
                progress=progress,
            )
            lines.append(
                _line(Evaluation.load(home / job.folder), home / job.folder, job.entry, job.dataset)
            )
        except InputError as error:
            lines.append(Line(job.entry.name, job.data, job.norm, job.eps, problem=str(error)))
        found = Table(tuple(lines))
        found.write(home)
        after(found)
    return Table(tuple(lines))


def load_table(folder: str | Path) -> Table:
    """The table of the runs below a folder, finished or not, without their models; in the order
    of their folders' names.
    """
    places = sorted(path.parent for path in Path(folder).glob("*/config.json"))
    if not places:
        raise InputError(
            f"{str(folder)!r} holds no run: give the folder that `wassail paper table` wrote to."
        )
    return Table(tuple(_read(place) for place in places))


def _read(place: Path) -> Line:
    """The line of a run directory; of one that has hardly begun, what is missing."""
    config = Store.open(place).config
    model = config["model"]
    threat = read_threats(config)[0]
    try:
        return _line(
            Evaluation.load(place),
            place,
            Entry(str(model["name"])),
            str(model.get("dataset", "cifar10")),
        )
    except InputError as error:
        return Line(
            str(model["name"]),
            str(config["data"]["name"]),
            threat.norm,
            threat.eps,
            problem=str(error),
            finished=False,
        )


@dataclass(frozen=True)
class _Job:
    """One run: the model, the norm, the budget, the data, RobustBench's data set, and the
    folder's name.
    """

    entry: Entry
    norm: float
    eps: float
    data: str
    dataset: str
    folder: str

    @classmethod
    def make(
        cls,
        entry: Entry,
        norm: float,
        data: str | None,
        dataset: str | None,
        eps: Mapping[float, float],
    ) -> _Job:
        known = [
            line.dataset
            for line in PUBLISHED
            if (line.name, line.norm) == (entry.robustbench, norm)
        ]
        where = dataset or (known[0] if known else "cifar10")
        budget = entry.eps.get(norm, eps.get(norm)) or usual_eps(entry.name, norm, where)
        source = entry.data or data or ("digits" if entry.name in MODELS else None)
        if source is None:
            raise InputError(
                f"the model {entry.name!r} has no data of its own: add --data, or @data=... "
                "behind its name."
            )
        return cls(
            entry,
            norm,
            budget,
            source,
            where,
            f"{safe_name(entry.name)}-l{norm:g}-{show(budget).replace('/', '-')}",
        )


def safe_name(name: str) -> str:
    """A folder's name for any text: what is unusual becomes a dash, and a few digits of a hash
    keep two of them apart.
    """
    plain = re.sub(r"[^A-Za-z0-9_.+-]+", "-", name).strip("-.")[:60]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _line(run: Evaluation, folder: Path, entry: Entry, dataset: str) -> Line:
    norm = run.threat.norm
    eps = run.threat.eps
    figures = {"clean": Cell(run.clean, run.clean_interval)}
    for column in COLUMNS[1:]:
        row = _row(run, column)
        if row is not None:
            figures[column.key] = Cell(
                row.accuracy, row.interval, row.forwards, row.backwards, row.seconds
            )
    paper = published(entry.robustbench, dataset, norm, eps)
    asked = {attack["name"] for attack in run.info["attacks"]}
    finished = all(column.key in figures for column in COLUMNS if column.attack in asked)
    return Line(
        run.name,
        run.data,
        norm,
        eps,
        len(run),
        folder,
        figures,
        {} if paper is None else paper.figures,
        finished=finished,
    )


def _row(run: Evaluation, column: Column) -> Row | None:
    for row in run.best if column.attack == "all" else run.rows:
        if (
            column.attack in {row.attack, "all"}
            and row.threat.order == column.order
            and row.threat.eps == run.threat.eps
        ):
            return row
    return None


def _percent(line: Line, column: Column) -> str:
    figure = line.figures.get(column.key)
    return "-" if figure is None else f"{100 * figure.accuracy:.2f}"


def _bold(line: Line, column: Column) -> str:
    """The figure in %, in bold if no single attack of the same order is lower."""
    text = _percent(line, column)
    rivals = [
        c.key
        for c in COLUMNS
        if c.order == column.order and c.attack not in {"all", "clean"} and c.key in line.figures
    ]
    if column.key not in rivals:
        return text
    low = min(line.accuracies[key] for key in rivals)
    return f"**{text}**" if line.accuracies[column.key] <= low + 1e-9 else text


def _counted(counts: tuple[int, int, int]) -> str:
    below, equal, above = counts
    total = sum(counts)
    return (
        f"below on {below}, equal on {equal}, above on {above} of {total} lines"
        if total
        else "no line has these columns"
    )


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'").replace("\n", " ")
