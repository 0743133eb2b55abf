"""Whole sets of properties: `instances.csv` of a competition, answered one after the other."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from wassail.errors import InputError
from wassail.threat import parse_seconds
from wassail.vnnlib.answer import Answer
from wassail.vnnlib.decide import decide
from wassail.vnnlib.network import Network
from wassail.vnnlib.property import Property
from wassail.vnnlib.reader import content
from wassail.writing import save, saving

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATUS = ("sat", "unsat", "unknown")
RESULTS = "results.csv"
NETWORKS = 3  # kept open


@dataclass(frozen=True)
class Instance:
    """One line of `instances.csv`: a network, a property, and seconds."""

    network: str
    question: str
    seconds: float

    @property
    def name(self) -> str:
        """Of its files, for a counterexample."""
        parts = (Path(text).name.split(".onnx")[0] for text in (self.network, self.question))
        return "_".join(part.removesuffix(".gz").removesuffix(".vnnlib") for part in parts)


@dataclass(frozen=True)
class Result:
    """What became of an instance."""

    network: str
    question: str
    status: str
    seconds: float
    by: str
    reason: str

    @property
    def key(self) -> tuple[str, str]:
        """What names it."""
        return self.network, self.question


def read_instances(path: str | Path) -> list[Instance]:
    """The lines of an `instances.csv`.

    Args:
        path: of the file; networks and properties are beside it, perhaps with `.gz` at the end.
    """
    found = []
    for line, row in enumerate(csv.reader(io.StringIO(content(path).decode(errors="replace"))), 1):
        if not row:
            continue
        if len(row) != 3:
            raise InputError(
                f"line {line} of {str(path)!r} is no instance: write network,property,seconds."
            )
        network, property_, seconds = (word.strip() for word in row)
        found.append(Instance(network, property_, parse_seconds(seconds, f"line {line}: time")))
    return found


def read_results(folder: Path) -> list[Result]:
    """What is done already in a folder."""
    path = folder / RESULTS
    if not path.exists():
        return []
    names = [f.name for f in fields(Result)]
    found = []
    for row in csv.DictReader(io.StringIO(content(path).decode(errors="replace"))):
        if list(row) != names or row["status"] not in STATUS:
            raise InputError(f"{str(path)!r} holds no results: choose another folder.")
        seconds = parse_seconds(row["seconds"], "seconds")
        words = (row["network"], row["question"], row["status"])
        found.append(Result(*words, seconds, row["by"], row["reason"]))
    return found


def run_instances(
    wanted: Sequence[Instance],
    root: Path,
    folder: Path,
    limit: float | None = None,
    tell: Callable[[Result], None] = lambda result: None,
) -> Iterator[Result]:
    """Answer some instances; a network is read once for those that follow each other.

    Args:
        wanted: the instances.
        root: the folder that their names begin in.
        folder: where `results.csv` and counterexamples are kept.
        limit: seconds for one instance, if its own are more.
        tell: is given each new result.
    """
    done = {result.key: result for result in read_results(folder)}
    with closing(_Networks()) as networks:
        for instance in wanted:
            key = (instance.network, instance.question)
            if key not in done:
                seconds = min(instance.seconds, limit or instance.seconds)
                done[key] = _answered(instance, root, folder, seconds, networks)
                _write(folder, list(done.values()))
                tell(done[key])
            yield done[key]


class _Networks:
    """The networks of the last instances, which are read once."""

    def __init__(self) -> None:
        self.known: dict[Path, Network] = {}

    def read(self, path: Path) -> Network:
        """The network in a file."""
        if path not in self.known:
            if len(self.known) >= NETWORKS:
                self.known.pop(next(iter(self.known))).close()
            self.known[path] = Network(path)
        return self.known[path]

    def close(self) -> None:
        """All of them."""
        for network in self.known.values():
            network.close()


def _answered(
    instance: Instance, root: Path, folder: Path, seconds: float, networks: _Networks
) -> Result:
    """One instance; what cannot be read is unknown, with the sentence that says why."""
    key = (instance.network, instance.question)
    try:
        property_ = Property.read(_beside(root / instance.question))
        network = networks.read(_beside(root / instance.network))
        answer = decide(property_, network, time_limit=seconds)
    except InputError as error:
        return Result(*key, "unknown", 1e-3, "", " ".join(str(error).split()))
    if answer.status == "sat":
        save(folder / f"{instance.name}.counterexample", answer.counterexample(property_) + "\n")
    return Result(*key, answer.status, round(answer.seconds, 3), answer.by, answer.reason)


def _beside(path: Path) -> Path:
    """The file itself, or its compressed form."""
    packed = path.with_name(path.name + ".gz")
    return packed if packed.exists() and not path.exists() else path


def _write(folder: Path, results: Sequence[Result]) -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, [f.name for f in fields(Result)], lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(result) for result in results)
    save(folder / RESULTS, text.getvalue())


def summary(results: Sequence[Result]) -> str:
    """How many were decided, by what, and in how many seconds."""
    counts = Counter(result.status for result in results)
    solved = [result for result in results if result.status != "unknown"]
    by = Counter(result.by for result in solved)
    seconds = sum(result.seconds for result in solved)
    lines = [
        f"{len(solved)} of {len(results)} decided: {counts['unsat']} unsat, {counts['sat']} sat, "
        f"{counts['unknown']} unknown",
        f"{seconds:.1f} s for those that were decided; by "
        + (", ".join(f"{name} {count}" for name, count in by.most_common()) or "nothing"),
    ]
    return "\n".join(lines)


def draw_solved(results: Sequence[Result]) -> Figure:
    """Solved instances against the seconds for one of them."""
    from wassail.plots import figure_of

    figure = figure_of(6.0, 3.6)
    axes = figure.subplots()
    for status, colour in (("unsat", "#0072B2"), ("sat", "#D55E00")):
        seconds = sorted(result.seconds for result in results if result.status == status)
        axes.step(
            [*seconds, *seconds[-1:]],
            [*range(len(seconds)), *([len(seconds)] if seconds else [])],
            where="post",
            color=colour,
            label=f"{status}: {len(seconds)}",
        )
    axes.set_xscale("log")
    axes.set_xlabel("seconds for one instance")
    axes.set_ylabel(f"solved, of {len(results)}")
    axes.legend(frameon=False)
    return figure


def write_plot(folder: Path, results: Sequence[Result]) -> Path:
    """`solved.png` in a folder."""
    figure = draw_solved(results)
    path = folder / "solved.png"
    with saving(path) as picture:
        figure.savefig(picture, format="png", dpi=160)
    return path


def status_line(answer: Answer | Result) -> str:
    """The verdict and the time, in one line."""
    reason = f" ({answer.reason})" if answer.reason else ""
    return f"{answer.status} {answer.seconds:.1f} s{reason}"
