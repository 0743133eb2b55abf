"""A run for papers and other people's tools: the table of results, figures, one line a sample,
RobustBench's entry and its tensor of adversarial images, NPZ, PNG.

Everything is read from the run in blocks of samples, so memory does not grow with their number;
only a `.pt` file is one tensor and has to be held. A file is there complete or not at all. Points
that leave as floats are exactly those that were verified; what is rounded to 8 bits is a flip only
if the model says so again.
"""

from __future__ import annotations

import csv
import json
import math
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wassail.errors import InputError, unknown
from wassail.evaluation.criterion import Regression
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import population_sentence
from wassail.geometry import distances as distances_between
from wassail.losses import flip_tolerance
from wassail.names import EXPORTS
from wassail.network import Model
from wassail.report import results
from wassail.report.card import model_card
from wassail.report.drawing import figure_of_runs
from wassail.report.machine import as_json
from wassail.report.png import encode, to_uint8
from wassail.specification import labels_at
from wassail.threat import Number, Threat, floor_percent, parse_eps, show
from wassail.transport.allocation import knapsack, threat_knapsack
from wassail.transport.flips import Flips
from wassail.writing import FilePath, cell, save, saving, saving_folder, visible
from wassail.zoo.features import feature_boxes, own_model

# Formats of whole runs: the file, whose ending says what it holds.
WHOLE = {"latex": "table.tex", "csv": "table.csv", "svg": "curves.svg", "pdf": "curves.pdf"}
BLOCK = 100  # samples read at once
ID_BYTES = 1 << 29  # that the ids may take as an array
# RobustBench's boards and the eps of each; how many samples its figures are for.
BOARDS = {
    ("cifar10", "Linf"): 8 / 255,
    ("cifar10", "L2"): 0.5,
    ("cifar100", "Linf"): 8 / 255,
    ("imagenet", "Linf"): 4 / 255,
}
SIZES = {"cifar10": 10_000, "cifar100": 10_000, "imagenet": 5_000}


@dataclass(frozen=True)
class Export:
    """What was written: where, for how many samples, with how many flips, and how many flips
    could not be kept.
    """

    path: Path
    samples: int
    flips: int
    lost: int = 0
    note: str = ""

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return f"{self.path} ({self.samples} samples, {self.flips} flips{note})"


def write(
    run: Evaluation,
    name: str,
    folder: FilePath,
    model: Model | None = None,
    dataset: str | None = None,
) -> Export:
    """One of the formats in `names.EXPORTS`, under its usual name in a folder.

    model: looks at the flips again; dataset: RobustBench's name of the data.
    """
    place = Path(folder)
    if name in WHOLE:
        return Export(write_runs([run], place / WHOLE[name]), len(run), _count(run))
    if name == "samples":
        return to_samples(run, place / "samples.csv")
    if name == "robustbench":
        return to_robustbench(run, place / "robustbench.json", dataset=dataset)
    if name == "pt":
        return to_pt(run, place / "adversarial.pt", model=model)
    if name == "npz":
        return to_npz(run, place / "flips.npz")
    if name == "png":
        return to_png(run, place / "png", model)
    if name not in ("json", "card"):
        raise unknown("format", name, EXPORTS)
    text = model_card(run) if name == "card" else json.dumps(as_json(run), indent=1) + "\n"
    path = save(place / ("card.md" if name == "card" else "evaluation.json"), text)
    return Export(path, len(run), _count(run))


def write_runs(runs: Sequence[Evaluation], path: Path) -> Path:
    """The table of some runs (.tex, .csv, .json) or their curves (.svg, .pdf), by the ending of the
    file; its path is returned.
    """
    tables = {".tex": results.to_latex, ".csv": results.to_csv, ".json": results.to_json}
    if path.suffix in tables:
        return save(path, tables[path.suffix](runs))
    if path.suffix == ".svg":
        return save(path, figure_of_runs(runs).svg())
    with saving(path) as file:
        figure_of_runs(runs).paint(file, "pdf")
    return path


def _bought(run: Evaluation) -> tuple[list[str], list[list[float]]]:
    """Titles and columns of what the budget of each threat buys."""
    titles = []
    columns = []
    for threat in run.threats:
        titles.append(f"share p={threat.order:g} eps={show(threat.eps)}")
        columns.append(knapsack(run.distances, threat.eps, threat.order, run.mu).tolist())
    for threat in run.others_threats:
        found = threat_knapsack(run.distances, threat, run.mu)
        for side, values in zip(("density", "share"), found):
            titles.append(f"others {side} p={threat.order:g} eps={show(threat.eps)}")
            columns.append(values.tolist())
    return titles, columns


def _own_columns(run: Evaluation) -> tuple[list[str], list[list[float]]]:
    """Targets, tolerances and outputs of a run without classes, with their titles."""
    if run.criterion is None or run.targets is None or run.outputs is None:
        return [], []
    kinds = {"target": run.criterion.wanted(run.targets), "output": run.outputs}
    if isinstance(run.criterion, Regression):
        kinds["tolerance"] = run.targets[:, run.criterion.outputs :]
    titles, columns = [], []
    for kind, values in kinds.items():
        for place in range(values.shape[1]):
            titles.append(kind if values.shape[1] == 1 else f"{kind} {place}")
            columns.append(values[:, place].tolist())
    return titles, columns


def to_samples(run: Evaluation, path: FilePath) -> Export:
    """One line a sample: id, weight, classes, nearest flip, radius, and the share of it that the
    budget of each threat buys.

    Numbers are exact (`repr`), `inf` where no flip is known; a flip's class and finder are empty
    where there is none. Ids are text even if they look like a formula to a spreadsheet: `'` stands
    before =, +, - and @. Without classes the label is 0, predicted and flip_label are 0 where the
    sample is right and else the inequality that fails, counted from 1, and targets, outputs and
    tolerances follow. With others, each threat has two more columns: how often a sample is there
    beside its weight, and what of it moves or changes its label.
    """
    titles, bought = _bought(run)
    own, numbers = _own_columns(run)
    titles, bought = [*own, *titles], [*numbers, *bought]
    header = ["id", "weight", "label", "predicted", "distance", "flip_label", "method", "radius"]
    none = [None] * len(run)
    radii = none if run.radii is None else run.radii.tolist()
    exact = none if run.exact is None else run.exact.tolist()
    known = (run.mu, run.y, run.predicted, run.distances, run.labels, run.found_by)
    columns = zip(run.ids, *(values.tolist() for values in known), radii, exact, *bought)
    with saving(path) as file, _table(file) as table:
        table.writerow([*header, "exact", *titles])
        for name, weight, label, predicted, distance, flip, by, radius, sure, *shares in columns:
            found = 0 < distance < math.inf
            row = [cell(name), repr(weight), label, predicted, repr(distance)]
            row += [flip, cell(run.methods[by])] if found else ["", ""]
            row.append("" if radius is None else repr(radius))
            row.append("" if sure is None else str(bool(sure)).lower())
            table.writerow([*row, *map(repr, shares)])
    return Export(Path(path), len(run), _count(run))


def to_robustbench(run: Evaluation, path: FilePath, *, dataset: str | None = None) -> Export:
    """RobustBench's `model_info` entry of the model, numbers as strings in per cent, with our
    figures added.

    `autoattack_acc` is there if AutoAttack was run at the headline's eps, `external` is the lowest
    point-wise accuracy of all attacks if it is lower; ours are `wda_acc`, over Omega_p for each
    finite order p, and `certified_acc`, rounded down. What differs from the board's own evaluation,
    its eps or the number of samples, is said in the footnote. dataset: cifar10, cifar100 or
    imagenet, by default read off the name of the data. The fields about the paper are empty, to be
    filled by hand.
    """
    board = {math.inf: "Linf", 2.0: "L2"}.get(run.threat.norm)
    known = dataset or _dataset(run.data)
    if (
        board is None
        or known is None
        or (known, board) not in BOARDS
        or run.threat.domain != (0.0, 1.0)
    ):
        boards = ", ".join(f"{data} {norm}" for data, norm in BOARDS)
        raise InputError(
            f"RobustBench has no board for {known or run.data!r} and {run.threat}: it has "
            f"{boards}, images in [0, 1]; give its name of the data set if it is another here."
        )
    eps = run.threat.eps
    here = {order: run.curve(order)(eps) for order in run.orders}
    auto = [
        row.accuracy for row in run.rows if row.attack == "autoattack" and row.threat.eps == eps
    ]
    remarks = []
    if not math.isclose(eps, BOARDS[known, board], rel_tol=1e-9):
        remarks.append(f"evaluated at eps {show(eps)}, the board's is {show(BOARDS[known, board])}")
    if len(run) != SIZES[known]:
        remarks.append(
            f"evaluated on {len(run)} samples, the board's figures are for {SIZES[known]}"
        )
    entry: dict[str, Any] = {"link": "", "name": "", "authors": "", "additional_data": None}
    entry |= {"number_forward_passes": 1, "dataset": known, "venue": "", "architecture": ""}
    entry |= {"eps": show(eps), "clean_acc": _percent(run.clean), "reported": ""}
    if auto:
        entry["autoattack_acc"] = _percent(min(auto))
    if math.inf in here and here[math.inf][1] < min(auto, default=math.inf):
        entry["external"] = _percent(here[math.inf][1])
    entry |= {"footnote": "; ".join(remarks), "unreliable": bool(run.warnings)}
    finite = {
        f"p{order:g}": _percent(attacked)
        for order, (_, attacked) in here.items()
        if order < math.inf
    }
    entry |= {"wda_acc": finite} if finite else {}
    if run.radii is not None:
        entry["certified_acc"] = {
            f"p{order:g}": floor_percent(certified) for order, (certified, _) in here.items()
        }
        entry["certified_arithmetic"] = run.certificate.get("arithmetic", "exact")
    sentence = population_sentence(run)
    if sentence is not None:
        entry["population"] = sentence
    save(path, json.dumps(entry, indent=2) + "\n")
    return Export(Path(path), len(run), _count(run), note="; ".join(remarks))


def to_pt(
    run: Evaluation, path: FilePath, *, eps: Number | None = None, model: Model | None = None
) -> Export:
    """A tensor of adversarial images as RobustBench's template for external evaluations asks for
    it: float32 `(N, *shape)`.

    Same number and order as the samples: the flip where one within eps is known, else the sample
    itself. eps: by default the one of the point-wise threat, else the headline's. Every point is
    looked at again: in the box, within eps and, if there is a model, misclassified; otherwise the
    sample takes its place. Written with `torch.save` as a plain tensor, and read back.
    """
    radius = _radius(run) if eps is None else parse_eps(eps)
    points, lost = torch.empty(len(run), *_shape(run), dtype=torch.float32), 0
    near = (run.distances > 0) & (run.distances <= radius)
    for index, x, moved in _blocks(run):
        # rounding from float64 may cost a flip: better seen here than by others
        x = x.float()
        moved = moved.float()
        use = near[index] & _honest(run.threat, x, moved, radius)
        own, written = _outward(run, x), _outward_toward(run, x, moved)
        use &= _distance(run, own, written) <= radius
        if model is not None and bool(use.any()):
            honest = torch.where(use.reshape(-1, *[1] * (x.ndim - 1)), written, own)
            use &= _looked(run, own_model(model), index, own, honest).success
        lost += int((near[index] & ~use).sum())
        points[index] = torch.where(use.reshape(-1, *[1] * (x.ndim - 1)), written, own)
    with saving(path) as file:
        torch.save(points, file)
    kept = torch.load(path, weights_only=True)
    if not torch.equal(kept, points):
        raise InputError(
            f"{str(path)!r} does not hold what was written to it: check the disk and write it "
            "again."
        )
    note = f"{lost} flips were none when looked at again" if lost else ""
    return Export(
        Path(path),
        len(run),
        int(near.sum()) - lost,
        lost,
        f"eps {show(radius)}" + (f"; {note}" if note else ""),
    )


def to_npz(run: Evaluation, path: FilePath) -> Export:
    """The nearest flips as NumPy arrays: x_adv `(N, *shape)` float32, the sample where there is
    none; distances, labels, y, predicted, ids `(N,)`; without classes targets (and tolerances) and
    outputs, `(N, W)` and `(N, K)`.

    Written block by block: memory does not grow with the number of samples. Needs no pickle to
    read.
    """
    names = [visible(name) for name in run.ids]
    # Each is as long as the longest in an array.
    if 4 * len(names) * max(map(len, names), default=0) > ID_BYTES:
        raise InputError(
            f"an id of {max(map(len, names))} characters is too long for an array: export the "
            "run as CSV."
        )
    small = {
        "distances": run.distances.numpy(),
        "labels": run.labels.numpy(),
        "y": run.y.numpy(),
        "predicted": run.predicted.numpy(),
        **({} if run.targets is None else {"targets": run.targets.numpy()}),
        **({} if run.outputs is None else {"outputs": run.outputs.numpy()}),
        "ids": np.array(names, dtype=np.str_),
    }
    with saving(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open("x_adv.npy", "w", force_zip64=True) as member:
            shape = (len(run), *_shape(run))
            np.lib.format.write_array_header_2_0(
                member, {"descr": "<f4", "fortran_order": False, "shape": shape}
            )
            for _, _, moved in _blocks(run):
                outward = _outward(run, moved.float()).contiguous()
                member.write(outward.numpy().astype("<f4", copy=False).tobytes())
        for name, array in small.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return Export(Path(path), len(run), _count(run))


def to_png(run: Evaluation, folder: FilePath, model: Model | None = None) -> Export:
    """The flips as 8-bit images, one PNG file each, and `index.csv`, which says what each of them
    is.

    With a model every image is looked at again as it will be read, and a flip that 8 bits do not
    keep, whether rounded to the nearest value or away from its sample, is not written but listed as
    lost. Without one this is unknown, and the index says so. File names begin with the number of
    the sample; of its id only what is harmless is kept.
    """
    shape = _shape(run)
    place = Path(folder)
    if not (len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))):
        raise InputError(f"samples of shape {tuple(shape)} are no images: export them as NPZ.")
    if run.threat.domain is None:
        raise InputError(
            "images have a range of values, and this run has no box: export it as NPZ."
        )
    written = 0
    lost = 0
    with saving_folder(place) as half, saving(half / "index.csv") as file, _table(file) as table:
        table.writerow(["file", "id", "label", "flip_label", "distance", "state"])
        for index, image, label, distance, state in _images(run, model):
            name = _file_name(index, run.ids[index]) if state != "lost" else ""
            if name:
                save(half / name, encode(image))
            written = written + bool(name)
            lost = lost + (not name)
            table.writerow(
                [name, cell(run.ids[index]), int(run.y[index]), label, repr(distance), state]
            )
    unsure = (
        ""
        if model is not None
        else "not looked at again after rounding, for which a model is needed"
    )
    note = f"{lost} flips do not survive 8 bits and are not among them" if lost else unsure
    return Export(place, len(run), written, lost, note)


@contextmanager
def _table(file: IO[bytes]) -> Iterator[Any]:
    """A CSV writer on a file of bytes, which stays open."""
    text = TextIOWrapper(file, "utf-8", "backslashreplace", newline="")
    try:
        yield csv.writer(text, lineterminator="\n")
    finally:
        text.detach()  # what it holds is written, and the file is not closed


def _images(
    run: Evaluation, model: Model | None
) -> Iterator[tuple[int, NDArray[np.uint8], int, float, str]]:
    """Number of the sample, image, its class, its distance, and whether it is a flip: "flip",
    "lost", "unchecked".
    """
    assert run.threat.domain is not None
    low, high = run.threat.domain
    wanted = (run.distances > 0) & torch.isfinite(run.distances)
    for index, x, moved in _blocks(run, wanted):
        labels = run.labels[index]
        state = ["unchecked"] * len(index)
        if model is not None:
            moved = _looked(run, model, index, x, moved).rounded(model).points
        eight = np.stack([to_uint8(point, low, high) for point in moved])  # type: ignore[arg-type]
        seen = _read_back(eight, x, low, high)  # type: ignore[arg-type]
        distance = distances_between(seen, x, run.threat.norm)
        if model is not None:
            again = _looked(run, model, index, x, seen, flip_tolerance(x.dtype))
            labels = again.labels
            state = ["flip" if kept else "lost" for kept in again.success.tolist()]
            distance = torch.where(again.success, distance, run.distances[index])
        yield from zip(index.tolist(), eight, labels.tolist(), distance.tolist(), state)


def _looked(
    run: Evaluation, model: Model, index: Tensor, x: Tensor, points: Tensor, tolerance: float = 0.0
) -> Flips:
    """Points of some samples as the model sees them now."""
    domain = None if feature_boxes(run.info.get("data")) else run.threat.domain
    given = (model, x, labels_at(run.right, index), points, run.threat.norm, domain)
    return Flips.from_points(*given, pull_in=False, tolerance=tolerance)


def _read_back(images: NDArray[np.uint8], x: Tensor, low: float, high: float) -> Tensor:
    """8-bit images `(b, H, W)` or `(b, H, W, 3)` as samples like x: what is read from the
    files.
    """
    seen = (low + (high - low) * (torch.from_numpy(images).to(x.dtype) / 255)).clamp(low, high)
    return (seen.movedim(-1, 1) if seen.ndim == 4 else seen).reshape(x.shape)


def _blocks(
    run: Evaluation, wanted: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Numbers `(b,)` of some samples, the samples and their flips `(b, *shape)`, a block at a
    time.
    """
    rows = torch.arange(len(run)) if wanted is None else wanted.nonzero()[:, 0]
    for start in range(0, len(rows), BLOCK):
        index = rows[start : start + BLOCK]
        yield index, *run.images(index.tolist())


def _outward(run: Evaluation, points: Tensor) -> Tensor:
    """Points float32 in the units of the data, of a run in which each feature has its own box."""
    features = feature_boxes(run.info.get("data"))
    return points if features is None else features.decode(points).float()


def _outward_toward(run: Evaluation, x: Tensor, points: Tensor) -> Tensor:
    """Points as `_outward` gives them, rounded toward their samples: none gets farther away."""
    features = feature_boxes(run.info.get("data"))
    outward, own = _outward(run, points), _outward(run, x)
    if features is None:
        return outward
    farther = (outward.double() - own).abs() > (features.decode(points) - features.decode(x)).abs()
    return torch.where(farther, outward.nextafter(own), outward)


def _distance(run: Evaluation, own: Tensor, outward: Tensor) -> Tensor:
    """The distances of samples from points, both in the units of the data, float64 `(b,)`."""
    features = feature_boxes(run.info.get("data"))
    if features is not None:
        own, outward = features.rescaled(own), features.rescaled(outward)
    return distances_between(outward, own, run.threat.norm)


def _honest(threat: Threat, x: Tensor, points: Tensor, radius: float) -> Tensor:
    """Which points lie in the box and within the radius, bool `(b,)`."""
    good = distances_between(points, x, threat.norm) <= radius
    if threat.domain is not None:
        good &= ((points >= threat.domain[0]) & (points <= threat.domain[1])).flatten(1).all(1)
    return good


def _radius(run: Evaluation) -> float:
    return next((threat.eps for threat in run.threats if threat.order == math.inf), run.threat.eps)


def _shape(run: Evaluation) -> tuple[int, ...]:
    return tuple(run.images(range(min(len(run), 1)))[0].shape[1:])


def _count(run: Evaluation) -> int:
    return int(((run.distances > 0) & torch.isfinite(run.distances)).sum())


def _dataset(name: str) -> str | None:
    """RobustBench's name of a data set with a name like `CIFAR-10`, `cifar10_test.npz` and
    so on.
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((known for known in ("cifar100", "cifar10", "imagenet") if known in plain), None)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _file_name(index: int, name: str) -> str:
    """A file name that is unique by its number and harmless whatever the id is."""
    harmless = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:60].strip("_")
    return (
        f"{index:06d}-{harmless}.png" if harmless and harmless != str(index) else f"{index:06d}.png"
    )
