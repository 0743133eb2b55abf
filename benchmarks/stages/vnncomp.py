"""Instances of the verification competitions of 2021 and 2022 beside the public verdicts.

$WASSAIL_VNNCOMP is a folder with checkouts of the public repositories `vnncomp2021`,
`vnncomp2021_results`, `vnncomp2022_benchmarks` and `vnncomp2022_results`; without it nothing is
run.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, processor_limits, spent
from benchmarks.stage import SEED, Row, Stage, Unit, here

COUNT = 10  # first instances of each network
LIMIT = 30.0  # processor seconds for one instance
# year, name in the competition, what the names of the networks that are taken have in them
BENCHMARKS = (
    (2022, "mnist_fc", "mnist"),
    (2022, "oval21", "cifar_base"),
    (2021, "cifar10_resnet", "resnet"),
    (2022, "sri_resnet_a", "resnet"),
)
PROVED = {"unsat", "holds"}
REFUTED = {"sat", "violated"}
WINNER = {2021: "a-b-CROWN", 2022: "alpha_beta_crown"}


@dataclass(frozen=True)
class Instance:
    """One question of the competition: does the network answer one label everywhere in the box?"""

    year: int
    benchmark: str
    network: Path
    question: Path

    @property
    def key(self) -> str:
        """What names it, without the folders of a machine."""
        return f"{self.year}/{self.benchmark}/{plain(self.network)}/{plain(self.question)}"


def plain(path: Path) -> str:
    """The name of a file without its endings."""
    return re.sub(r"(\.onnx|\.vnnlib)?(\.gz)?$", "", path.name)


def home() -> Path | None:
    """The folder of the checkouts."""
    folder = os.environ.get("WASSAIL_VNNCOMP")
    return Path(folder) if folder else None


def checkout(name: str) -> Path:
    """One of them, whatever its owner is called."""
    folder = home()
    assert folder is not None
    found = sorted(path for path in folder.iterdir() if path.name.endswith(name))
    if not found:
        raise FileNotFoundError(f"no checkout of {name} below WASSAIL_VNNCOMP.")
    return found[0]


@cache
def instances() -> tuple[Instance, ...]:
    """The first instances of every network, in the order of the competition."""
    if home() is None:
        return ()
    found = []
    taken: Counter[str] = Counter()
    for instance in listed():
        taken[str(instance.network)] += 1
        if taken[str(instance.network)] <= COUNT:
            found.append(instance)
    return tuple(found)


def listed() -> Iterator[Instance]:
    for year, name, words in BENCHMARKS:
        repository = "vnncomp2021" if year == 2021 else "vnncomp2022_benchmarks"
        root = checkout(repository) / "benchmarks" / name
        for network, question, _ in csv.reader(sorted(root.glob("*instances.csv"))[0].open()):
            if words in network:
                yield Instance(year, name, existing(root / network), existing(root / question))


def existing(path: Path) -> Path:
    """The file itself or its compressed form."""
    return path if path.exists() else path.with_name(path.name + ".gz")


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


@cache
def verdicts() -> dict[tuple[int, str, str], dict[str, str]]:
    """What each tool answered: (year, network, question) -> tool -> "proved" or "refuted"."""
    found: dict[tuple[int, str, str], dict[str, str]] = {}
    first = sorted((checkout("vnncomp2021_results") / "results_csv").glob("*.csv"))
    second = sorted(checkout("vnncomp2022_results").glob("*/results.csv"))
    files = [(2021, path, path.stem) for path in first]
    files += [(2022, path, path.parent.name) for path in second]
    for year, path, tool in files:
        for row in csv.reader(path.open()):
            word = row[4].lower()
            if word in PROVED | REFUTED:
                key = (year, plain(Path(row[1])), plain(Path(row[2])))
                found.setdefault(key, {})[tool] = "proved" if word in PROVED else "refuted"
    return found


def public(instance: Instance) -> tuple[str, str]:
    """The public verdict, and alpha-beta-CROWN's own.

    The public one is that of the winner of the year, which is alpha-beta-CROWN; else that of at
    least two tools with none against them; else "open".
    """
    key = (instance.year, plain(instance.network), plain(instance.question))
    tools = verdicts().get(key, {})
    own = tools.get(WINNER[instance.year], "open")
    answers = Counter(tools.values())
    agreed = next(iter(answers)) if len(answers) == 1 and len(tools) >= 2 else "open"
    return (own if own != "open" else agreed), own


def units() -> list[Unit]:
    """One instance each."""
    return [Unit(i.key, partial(decided, i)) for i in instances()]


def box_of(path: Path) -> tuple[Tensor, Tensor, int]:
    """The box and the label of a question that asks for one label everywhere."""
    text = content(path).decode()
    bounds: dict[str, dict[int, float]] = {"<=": {}, ">=": {}}
    for sign, index, value in re.findall(r"\((<=|>=)\s+X_(\d+)\s+([-+.\deE]+)\)", text):
        bounds[sign][int(index)] = float(value)
    n = len(bounds["<="])
    low, high = (
        torch.tensor([bounds[sign][i] for i in range(n)], dtype=torch.float64)
        for sign in (">=", "<=")
    )
    pairs = [(int(a), int(b)) for a, b in re.findall(r"\(>=\s+Y_(\d+)\s+Y_(\d+)\)", text)]
    pairs += [(int(b), int(a)) for a, b in re.findall(r"\(<=\s+Y_(\d+)\s+Y_(\d+)\)", text)]
    labels = {label for _, label in pairs}
    if len(labels) != 1:
        raise ValueError(f"{path.name} does not ask for one label everywhere")
    return low, high, labels.pop()


class InBox(nn.Module):
    """The network as a function of the place in the box: 0 is the lower corner, 1 the upper one."""

    low: Tensor
    width: Tensor

    def __init__(self, network: nn.Module, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("low", low)
        self.register_buffer("width", high - low)

    def forward(self, u: Tensor) -> Tensor:
        return self.network(self.low + self.width * u)


def decided(instance: Instance) -> Row:
    """Default `verify`, in float64 and about exact arithmetic, as the competition is."""
    low, high, label = box_of(instance.question)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        file.write_bytes(content(instance.network))
        network = ws.zoo.load_onnx(file).double()
    shape = tuple(map(int, network.shape))  # type: ignore[arg-type]
    model = InBox(network, low.reshape(shape), high.reshape(shape)).eval()
    u = torch.full((1, *shape), 0.5, dtype=torch.float64)
    threat = ws.Threat(INF, INF, 0.5, (0.0, 1.0))
    with spent() as used, processor_limits():
        found = ws.verify(
            model,
            u,
            torch.tensor([label]),
            threat,
            arithmetic="exact",
            time_limit=LIMIT,
            seed=SEED,
        )
    verdict, winner = public(instance)
    return {
        "status": found.status[0],
        "seconds": used.seconds,
        "public": verdict,
        "alpha_beta_crown": winner,
    }


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network, and one for all."""
    groups: dict[str, list[Row]] = {}
    for key, answer in done.items():
        groups.setdefault(key.rsplit("/", 1)[0], []).append(answer)
    rows = [summary(name, answers) for name, answers in groups.items()]
    return {"networks": rows + ([summary("all", list(done.values()))] if done else [])}


def summary(name: str, answers: list[Row]) -> Row:
    """Counts of one network."""
    ours = Counter(answer["status"] for answer in answers)
    theirs = Counter(answer["public"] for answer in answers)
    winner = Counter(answer["alpha_beta_crown"] for answer in answers)
    against = sum(
        (answer["status"] == "proved" and answer["public"] == "refuted")
        or (answer["status"] in ("falsified", "wrong") and answer["public"] == "proved")
        for answer in answers
    )
    return {
        "id": name.replace("/", "-"),
        "set": name,
        "instances": len(answers),
        "proved": ours["proved"],
        "falsified": ours["falsified"] + ours["wrong"],
        "public_proved": theirs["proved"],
        "public_refuted": theirs["refuted"],
        "winner_proved": winner["proved"],
        "winner_refuted": winner["refuted"],
        "contradictions": against,
        "seconds": sum(answer["seconds"] for answer in answers) / len(answers),
        "limit": LIMIT,
    }


STAGE = Stage(
    name="vnncomp",
    about="Instances of the verification competitions of 2021 and 2022.",
    depends=rooms.PROOFS,
    units=units,
    tables=tables,
    source=here(),
)
