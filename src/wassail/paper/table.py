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
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wassail.errors import InputError, unknown
from wassail.evaluation.protocol import evaluate
from wassail.evaluation.result import Row
from wassail.evaluation.run import Evaluation
from wassail.paper.published import (
    ATTACKS,
    CLAIMS,
    CLEAN,
    COLUMNS,
    NORMS,
    ORDERS,
    PASSES,
    PUBLISHED,
    SAMPLES,
    THREATS,
    Column,
    published,
    usual_eps,
)
from wassail.progress import Progress
from wassail.threat import Number, Threat, number, parse_eps, parse_norm, show
from wassail.writing import cell, make, save
from wassail.zoo import MODELS
from wassail.zoo.datasets import open_data
from wassail.zoo.models import open_model

FIELDS = (
    *("model", "data", "samples", "norm", "eps", "column", "order", "attack"),
    *("accuracy", "low", "high", "forwards", "backwards", "seconds", "published", "problem"),
)  # of the table as CSV


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
                ours = "  ".join(f"{_percent(line, column):>8}" for column in columns)
                lines.append(f"{line!s:<{wide}}  {ours}")
                if line.published:
                    paper = "  ".join(f"{text:>8}" for text in _paper(line, columns)).rstrip()
                    lines.append(f"{'  published':<{wide}}  {paper}")
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
        writer = csv.DictWriter(text, FIELDS, restval="", lineterminator="\n")
        writer.writeheader()
        for line in self.rows:
            about = {
                "model": cell(line.model),
                "data": cell(line.data),
                "samples": line.samples,
                "norm": f"{line.norm:g}",
                "eps": repr(line.eps),
            }
            if line.problem is not None:
                writer.writerow({**about, "problem": cell(line.problem)})
            for column in COLUMNS:
                if column.key in line.figures:
                    writer.writerow({**about, **_record(line, column)})
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
                lines.append("| *published* | | " + " | ".join(_paper(line, columns)) + " |")
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


def table(  # noqa: PLR0913
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


def _paper(line: Line, columns: Sequence[Column]) -> list[str]:
    """The published figures, empty where there are none."""
    known = line.published
    return [f"{known[c.key]:.2f}" if c.key in known else "" for c in columns]


def _record(line: Line, column: Column) -> dict[str, str | float]:
    """One figure as a line of the CSV file."""
    figure = line.figures[column.key]
    accuracy, low, high = (f"{100 * value:.4f}" for value in (figure.accuracy, *figure.interval))
    return {
        "column": column.key,
        "order": "" if column is CLEAN else f"{column.order:g}",
        "attack": column.attack,
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "forwards": f"{figure.forwards:.1f}" if figure.forwards else "",
        "backwards": f"{figure.backwards:.1f}" if figure.forwards else "",
        "seconds": "" if figure.seconds is None else f"{figure.seconds:.2f}",
        "published": line.published.get(column.key, ""),
    }


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
