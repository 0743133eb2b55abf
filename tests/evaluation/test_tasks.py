"""Evaluations of tasks that are no classification: regression within a tolerance, several labels,
one output and a threshold, features that may not move.
"""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.evaluation.criterion import (
    ManyLabels,
    Regression,
    read_criterion,
    stored_labels,
)
from wassail.evaluation.pieces import join
from wassail.evaluation.tasks.clean import Clean
from wassail.evaluation.tasks.task import Place, no_flips
from wassail.evaluation.units import units_text
from wassail.report.page import report
from wassail.transport.curve import RiskCurve

INF = math.inf
WIDTH = 4
MODULE = """
import torch
def net(outputs=1):
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, outputs))
"""


def linear(outputs: int = 1, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, outputs).double().eval()


def samples(n: int = 23, seed: int = 0) -> Tensor:
    return torch.rand(n, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def noise(shape: tuple[int, ...], size: float) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).double()
    return size * drawn


def rescaled(rows: Tensor, norm: float) -> Tensor:
    """The norm of each row that is dual to a ground norm."""
    dual = {1.0: INF, 2.0: 2.0, INF: 1.0}[norm]
    return torch.linalg.vector_norm(rows, dual, dim=-1)


def evaluated(model: Any, data: Any, norm: Any = INF, **more: Any) -> ws.Evaluation:
    domain = more.pop("domain", None)
    threats = [ws.Threat(norm, order, 0.05, domain) for order in (1, INF)]
    options = {"certify": "crown", "passes": 60, **more}
    return ws.evaluate(model, data, threats, ["nearest"], **options)


@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_regression_of_a_linear_model_is_known_in_closed_form(norm: float) -> None:
    model, x = linear(2), samples()
    targets = model(x).detach() + noise((23, 2), 0.05)
    tolerance = torch.rand(23, 2, generator=torch.Generator().manual_seed(2)).double() / 5 + 0.01
    run = evaluated(model, (x, targets), norm, tolerance=tolerance)
    error = model(x).detach() - targets
    slack = tolerance - error.abs()  # the nearer of both sides, output by output
    true = (slack / rescaled(model.weight.detach(), norm)).amin(1).clamp(min=0)
    wrong = (slack <= 0).any(1)
    assert bool(wrong.any()) and not bool(wrong.all())
    assert run.radii is not None
    assert bool((run.radii <= true * (1 + 1e-9)).all())
    assert bool((run.distances >= true * (1 - 1e-9)).all())
    assert torch.allclose(run.distances[~wrong], true[~wrong], rtol=1e-3)
    assert torch.allclose(run.radii[~wrong], true[~wrong], rtol=1e-3)
    assert torch.equal(run.predicted > 0, wrong)
    assert run.clean == pytest.approx(1 - float(wrong.double().mean()))
    assert run.mean_error == pytest.approx(float(error.abs().mean()))
    expected = RiskCurve(true, true, run.mu, 1.0)(0.05)
    assert run.curve(1)(0.05)[0] == pytest.approx(expected[0], abs=2e-3)
    assert "own tolerance of the target in all 2 outputs" in run.headline
    found = run.verify(model, (x, targets), radii=True, seed=0)
    assert found, str(found)
    assert any("own choice: from" in text for text in found.choices)


def test_relative_tolerances_and_words() -> None:
    model, x = linear(), samples()
    y = model(x).detach()[:, 0] + 3
    shifted = nn.Sequential(model, Plus(3.0)).eval()
    run = evaluated(shifted, (x, y), tolerance="5%", domain=(0, 1))
    assert "stay within 5 % of the target over" in run.headline
    assert run.targets is not None
    assert torch.equal(run.targets[:, 1], 5.0 / 100 * y.abs())
    assert "classif" not in run.definition
    words = report(run)
    for text in ("Mean absolute error", "too high", "too low", "Targets", "share within tolerance"):
        assert text in words
    for text in ("misclassified", "class predicted", "robust accuracy", "Table of classes</"):
        assert text not in words
    half = evaluated(shifted, (x, y), tolerance=0.5, certify=None)
    assert half.headline.startswith("At most ") and "stay within 0.5 of the target" in half.headline
    assert half.require("accuracy>=0.1 clean").sentence.startswith(
        "at least 100.00 % of the samples is within 0.5 of the target"
    )
    with pytest.raises(InputError, match="this run has no classes"):
        half.require("accuracy>=0.1 at eps 0.05 order 1 class 0 attacked")


class Plus(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value).double())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.value


@pytest.mark.parametrize("label", [None, 1])
def test_labels_of_a_linear_model_are_known_in_closed_form(label: int | None) -> None:
    model, x = linear(3), samples()
    z = model(x).detach()
    y = (z + noise((23, 3), 0.4) > 0.1).long()
    run = evaluated(model, (x, y), 2, threshold=0.1, label=label)
    margins = torch.where(y == 1, z - 0.1, 0.1 - z)
    each = margins / rescaled(model.weight.detach(), 2.0)
    true = (each.amin(1) if label is None else each[:, label]).clamp(min=0)
    right = true > 0
    assert bool(right.any()) and not bool(right.all())
    assert run.radii is not None
    assert bool((run.radii <= true * (1 + 1e-9)).all())
    assert bool((run.distances >= true * (1 - 1e-9)).all())
    assert torch.allclose(run.distances[right], true[right], rtol=1e-3)
    told = "keep all 3 labels right" if label is None else "keep label 1 right"
    assert told in run.headline and "(threshold 0.1)" in run.headline
    assert run.mean_error is None
    assert run.verify(model, (x, y), radii=True, seed=0)
    assert "Clean accuracy" not in report(run)


def test_one_output_and_a_threshold() -> None:
    model, x = linear(), samples()
    z = model(x).detach()[:, 0]
    middle = float(z.median()) + 1e-3
    y = (z > middle).long()
    run = evaluated(model, (x, y), threshold=middle)
    true = (z - middle).abs() / rescaled(model.weight.detach(), INF)
    assert torch.allclose(run.distances, true, rtol=1e-3)
    assert "on the right side of the threshold" in run.headline
    assert "label 0" in report(run) and "label 1" in report(run)


def test_chunks_interruptions_and_forgeries(tmp_path: Path) -> None:
    model, x = linear(), samples()
    y = model(x).detach()[:, 0] + noise((23,), 0.02)
    whole = evaluated(model, (x, y), tolerance=0.1, out=tmp_path / "a")
    parts = evaluated(model, (x, y), tolerance=0.1, out=tmp_path / "b", chunk=5)
    assert torch.equal(whole.distances, parts.distances)
    assert whole.targets is not None and parts.targets is not None
    assert torch.equal(whole.targets, parts.targets)
    assert ws.compare(whole, parts, whole.threat).difference == 0
    lost = next((tmp_path / "b" / "results").glob("*/*2.safetensors"))
    kept = lost.read_bytes()
    lost.unlink()
    again = evaluated(model, (x, y), tolerance=0.1, out=tmp_path / "b", chunk=5, resume=True)
    assert lost.read_bytes() == kept and torch.equal(again.distances, whole.distances)
    with pytest.raises(InputError, match="tolerance"):
        evaluated(model, (x, y), tolerance=0.2, out=tmp_path / "b", chunk=5, resume=True)
    other = evaluated(model, (x, y), tolerance=0.2)
    with pytest.raises(InputError, match="different samples"):
        ws.compare(whole, other, whole.threat)
    found = whole.verify(model, (x, y + 1), seed=0)
    assert not found and any("other samples than the data" in text for text in found.problems)
    stated = json.loads((tmp_path / "a" / "config.json").read_text())["config"]
    criterion = read_criterion(stated)
    assert isinstance(criterion, Regression) and criterion == whole.criterion
    criterion.check(whole.targets)
    with pytest.raises(ValueError, match="not those of its configuration"):
        replace(criterion, tolerance=0.05).check(whole.targets)  # a stricter claim than was made


def test_pieces_of_a_chunk_keep_their_targets() -> None:
    x, rows = samples(6), torch.rand(6, 2).double() + 0.1
    task = Clean(Place("clean", 0, 0, 6))
    ids, mu = [str(i) for i in range(6)], torch.full((6,), 1 / 6).double()
    parts = []
    for start, stop in ((0, 2), (2, 6)):
        some = slice(start, stop)
        piece = task.cut(start, stop)
        parts.append((piece, piece.empty((x[some], rows[some], ids[some]), mu[some], "why")))
    tensors, fields = join(parts)
    full, told = task.empty((x, rows, ids), mu, "why")
    assert torch.equal(stored_labels(tensors), rows) and fields["sha256"] == told["sha256"]
    assert torch.equal(tensors["y"], torch.zeros(6, dtype=torch.int64))
    assert torch.equal(full["predicted"], tensors["predicted"])
    none = no_flips(x, rows)
    assert torch.equal(none["labels"], torch.zeros(6, dtype=torch.int64))


@pytest.mark.slow
def test_features_that_may_not_move() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    x = samples().float()
    y = model(x).detach()[:, 0]
    tolerance = 0.05
    free = evaluated(model, (x, y), tolerance=tolerance, domain=(0, 1))
    held = evaluated(model, (x, y), tolerance=tolerance, domain=(0, 1), immutable=[0, 2])
    start, moved = held.images(range(len(held)))
    assert torch.equal(start[:, [0, 2]], moved[:, [0, 2]])
    assert not torch.equal(start[:, [1, 3]], moved[:, [1, 3]])
    assert held.radii is not None and free.radii is not None
    assert bool((held.distances >= free.radii * (1 - 1e-6)).all())
    assert bool((held.radii <= held.distances).all())
    low, high = torch.zeros_like(x), torch.ones_like(x)
    low[:, [0, 2]] = high[:, [0, 2]] = x[:, [0, 2]]
    goal = ws.Specification.within(y, tolerance)
    exact = ws.radii(model, x, goal, INF, (low, high), "exact").values
    assert bool((held.radii <= exact * (1 + 1e-6)).all())
    assert bool((held.distances >= exact * (1 - 1e-6)).all())
    near = held.distances <= 1.05 * exact  # the search is about as good as with frozen boxes
    assert int(near.sum()) > 0.9 * int(torch.isfinite(exact).sum())
    assert "5 % of each feature's range on average" in held.headline
    from wassail.evaluation.conditions import conditions

    assert any("2 may not move (feature 0, feature 2)" in text for text in conditions(held))
    assert held.verify(model, (x, y), radii=True, seed=0)
    features = ws.Features([0.0] * 4, [1.0] * 4, [0.0, 1.0, 0.0, 1.0])
    far = start.clone()
    far[:, 0] = torch.where(start[:, 0] > features.top[0] / 2, 0.0, features.top[0].float())
    broken = (goal.margins(features.model(model)(far).detach()) <= 0).any(1)
    index = int(broken.nonzero()[0])  # a flip, if the first feature could move
    forged = moved.clone()
    forged[index] = far[index]
    chosen = lambda some: (start[list(some)], forged[list(some)])  # noqa: E731
    found = replace(held, images=chosen).verify(model, seed=0)
    assert "1 flips are not misclassified" in found.problems


def own_boxes(x: Tensor) -> tuple[Tensor, Tensor]:
    """A box around each sample, with a frozen number in every second."""
    room = 0.3 * torch.rand(x.shape, generator=torch.Generator().manual_seed(5)).to(x)
    low, high = (x - room).clamp(min=0), (x + 0.5 * room).clamp(max=1)
    low[::2, 1] = high[::2, 1] = x[::2, 1]
    return low, high


@pytest.mark.slow
def test_boxes_of_each_sample(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    x = samples().float()
    y = model(x).detach()[:, 0]
    low, high = own_boxes(x)
    boxed: dict[str, Any] = {"tolerance": 0.04, "domain": (low, high)}
    run = evaluated(model, (x, y), out=tmp_path / "run", chunk=7, **boxed)
    goal = ws.Specification.within(y, 0.04)
    exact = ws.radii(model, x, goal, INF, (low, high), "exact").values
    free = ws.radii(model, x, goal, INF, (0, 1), "exact").values
    assert bool((exact > 1.01 * free).any())  # the boxes matter
    assert run.radii is not None
    assert bool((run.radii <= exact * (1 + 1e-6)).all())
    assert bool((run.distances >= exact * (1 - 1e-6)).all())
    found = torch.isfinite(run.distances)
    assert bool(found.any()) and int(found.sum()) >= 0.8 * int(torch.isfinite(exact).sum())
    start, moved = run.images(range(len(run)))
    assert bool(((moved >= low) & (moved <= high)).all())
    assert torch.equal(start[::2, 1], moved[::2, 1])
    assert "own boxes of 23 samples" in run.headline
    from wassail.evaluation.conditions import conditions

    assert any("has a box of the run's own choice" in text for text in conditions(run))
    looked = run.verify(model, (x, y), radii=True, seed=0)
    assert looked, str(looked)
    assert any("in the plain box" in text for text in looked.choices)
    again = ws.Evaluation.load(tmp_path / "run")
    assert again.boxes == run.boxes and again.headline == run.headline
    other = {**boxed, "domain": (low, (high + 0.01).clamp(max=1))}
    with pytest.raises(InputError, match="boxes"):
        evaluated(model, (x, y), out=tmp_path / "run", chunk=7, resume=True, **other)
    far = replace(run, images=lambda some: (start[list(some)], torch.rand(len(some), WIDTH)))
    assert not far.verify(model, seed=0)
    whole = evaluated(model, (x, y), **boxed)
    assert torch.equal(whole.distances, run.distances)


def test_boxes_of_images_with_classes() -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = (part[:8] for part in ws.zoo.data("digits"))
    low, high = (x - 0.1).clamp(min=0), (x + 0.1).clamp(max=1)
    low[:, :, 0] = high[:, :, 0] = x[:, :, 0]
    threat = ws.Threat(2, 1, 0.1, (low, high))
    run = ws.evaluate(model, (x, y), threat, ["nearest", "pgd"], passes=40, certify="crown")
    direct = ws.radii(model, x, y, 2, (low, high), "crown").values
    assert run.radii is not None and torch.allclose(run.radii, direct, rtol=0.05)
    _, moved = run.images(range(8))
    assert bool(((moved >= low) & (moved <= high)).all())
    assert run.verify(model, (x, y), seed=0)
    for wrong, said in (
        ({"attacks": ["a3"]}, "has one box for all samples"),
        ({"immutable": [0]}, "freeze a number with low = high"),
        ({"landmarks": "standard"}, "freeze a number with low = high"),
    ):
        with pytest.raises(InputError, match=said):
            ws.evaluate(model, (x, y), ws.Threat(INF, INF, 0.1, (low, high)), **wrong)
    with pytest.raises(InputError, match="of the shape of the samples"):
        ws.evaluate(model, (x, y), ws.Threat(2, 1, 0.1, (low[:4], high[:4])))
    with pytest.raises(InputError, match="outside its box"):
        ws.evaluate(model, (x, y), ws.Threat(2, 1, 0.1, (low + 0.3, high + 0.3)))


def test_a_one_hot_group_is_refused_unless_it_is_held() -> None:
    x = torch.rand(12, 6)
    x[:, 1:4] = nn.functional.one_hot(torch.arange(12) % 3, 3)
    x[:, 4:6] = nn.functional.one_hot(torch.arange(12) % 2, 2)
    torch.manual_seed(0)
    model = nn.Linear(6, 1).eval()
    names = ["age", "red", "green", "blue", "yes", "no"]
    features = ws.Features(torch.zeros(6), torch.ones(6), names=names)
    with pytest.raises(InputError, match=r"red, green, blue look like a one-hot group.*immutable"):
        features.encode(x)
    held = ws.Features(torch.zeros(6), torch.ones(6), [1.0, 0, 0, 0, 0, 0], names)
    assert held.encode(x).shape == (12, 6)
    y = model(x).detach()[:, 0]
    frame = Frame(x, names)
    with pytest.raises(InputError, match="one-hot"):
        evaluated(model, (frame, y), tolerance=0.1, domain=(0, 1))
    immutable = ["red", "green", "blue", "yes", "no"]
    run = evaluated(model, (frame, y), tolerance=0.1, domain=(0, 1), immutable=immutable)
    start, moved = run.images(range(12))
    assert torch.equal(start[:, 1:], moved[:, 1:])


class Frame:
    """As much of a pandas data frame as is read."""

    def __init__(self, values: Tensor, columns: list[str]) -> None:
        self.values, self.columns = values, columns
        self.iloc = self

    def __getitem__(self, place: tuple[Any, int]) -> "Frame":
        rows, column = place
        return Frame(self.values[rows, column], [])

    def to_numpy(self) -> np.ndarray:
        return self.values.numpy()


@pytest.mark.parametrize(
    "stated",
    [
        {"kind": "regression", "tolerance": [1.0], "outputs": 1, "names": []},
        {"kind": "regression", "tolerance": 0, "outputs": 1, "names": []},
        {"kind": "regression", "tolerance": "own", "outputs": 0, "names": []},
        {"kind": "regression", "tolerance": 1.0, "outputs": 2, "names": ["a"]},
        {"kind": "labels", "threshold": "a", "label": None, "outputs": 1, "names": []},
        {"kind": "labels", "threshold": 0.0, "label": 3, "outputs": 1, "names": []},
        {"kind": "ranking", "outputs": 1, "names": []},
    ],
)
def test_a_configuration_that_makes_no_sense(stated: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):  # InputError is one
        read_criterion({"criterion": stated})


def test_names_of_labels_are_plain_in_sentences() -> None:
    evil = "<script>*x*`\n[a](b)"
    words = ManyLabels(2, 0.0, 1, ("a", evil)).words
    assert not set("<>*`[]()\n") & set(words.stay.removesuffix("(threshold 0)"))


def test_units_in_words() -> None:
    table = {"features": ["a", "b"]}
    boxes = {**table, "low": [0.0, 10.0], "high": [2.0, 30.0], "scale": [2.0, 20.0], "fixed": []}
    one = ws.Threat(INF, 1, 0.02)
    assert units_text(boxes, one) == "2 % of each feature's range on average"
    assert units_text(table, one) == "2 % of each feature's range [0, 1] on average"
    assert units_text(table, ws.Threat(INF, INF, 2, (0, 100))) == (
        "2 % of each feature's range [0, 100] at most"
    )
    assert units_text(boxes, ws.Threat(2, 2, 0.5)) == (
        "50 % of their ranges, Euclidean over the features, in the root mean square"
    )
    assert units_text({**boxes, "scale": [1.0, 20.0]}, one) == (
        "0.02 in the unit of each feature on average"
    )
    half = {**boxes, "scale": [1.0, 10.0]}
    assert units_text(half, one) == "1 % of each feature's range on average"
    assert units_text({**boxes, "low": ["a", None]}, one) is None
    assert units_text({}, one) is None and units_text(None, one) is None
    assert units_text(table, ws.Threat(INF, 1, 0.02, None)) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV and an .npz file of a regression, and the network."""
    place = tmp_path_factory.mktemp("tasks")
    (place / "task_nets.py").write_text(MODULE)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    torch.save(net.state_dict(), place / "net.pt")
    x = samples(20).float()
    y = net(x).detach()[:, 0] + noise((20,), 0.01).float()
    with open(place / "table.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["age", "price", "sex", "dose", "mass", "allowed"])
        for row, target in zip(x.tolist(), y.tolist()):
            lines.writerow([row[0], target, *row[1:], 0.1 + row[0]])
    np.savez(place / "table.npz", x=x.numpy(), y=y.numpy(), allowed=0.1 + x[:, 0].numpy())
    return place


def command(*words: object) -> int:
    return main([str(word) for word in words])


def test_a_table_from_the_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    model = ("task_nets:net", "--weights", "net.pt")
    short = ("--eps", "0.03", "--order", "1", "--attacks", "nearest", "--passes", "40", "--quiet")
    task = ("--target", "price", "--tolerance", "allowed", "--immutable", "age,sex")
    asked = ("--certify", "crown", "--out", "run", "--require")
    level = "accuracy>=0.2 at eps 0.03 order 1 proved"
    data = ("--data", "table.csv")
    assert command("evaluate", *model, *data, *short, *task, *asked, level, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["task"]["kind"] == "regression" and told["task"]["names"] == ["price"]
    assert told["units"] == "3 % of each feature's range on average"
    assert told["task"]["mean_error"] < 0.05
    import jsonschema

    from wassail.report.machine import schema_text

    jsonschema.validate(told, json.loads(schema_text()))
    assert command("verify", "run", *model, *data, "--radii") == 0
    said = capsys.readouterr().out
    assert "tolerance of the run's own choice" in said and "2 may not move (age, sex)" in said
    assert command("evaluate", *model, *data, *short, *task, *asked, level, "--resume") == 0
    assert "were verified again" in capsys.readouterr().out
    assert command("seal", "run") == 0
    assert command("export", "run", "samples", "npz", "-o", "out") == 0
    header = (folder / "out" / "samples.csv").read_text().split("\n")[0].split(",")
    assert {"target", "output", "tolerance"} <= set(header)
    inputs = samples(20).float()
    low, high = own_boxes(inputs)
    np.savez("boxes.npz", low=low.numpy(), high=high.numpy())
    boxed = ("--data", "table.npz", "--tolerance", "0.1", "--box", "boxes.npz", "--out", "boxed")
    assert command("evaluate", *model, *short, *boxed) == 0
    assert "own boxes of 20 samples" in capsys.readouterr().out
    assert command("verify", "boxed", *model, "--data", "table.npz") == 0
    own = ("--data", "table.npz", "--tolerance", "allowed", "--out", "other")
    assert command("evaluate", *model, *short, *own) == 0
    assert command("compare", "run", "other") == 0
    assert command("board", "run", "other", "-o", "site") == 0
    feed = json.loads((folder / "site" / "board.json").read_text())
    assert "own tolerance" in json.dumps(feed)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--tolerance"),
        (("--target", "price"), "the labels of 'table.csv' are numbers with a fraction"),
        (("--target", "price", "--tolerance", "0"), "the tolerance is 0"),
        (("--target", "price", "--tolerance=-1%"), "the tolerance is -1%"),
        (("--target", "price", "--tolerance", "much"), "unknown column 'much'"),
        (("--target", "cost", "--tolerance", "1"), "unknown column 'cost'"),
        (("--target", "price,price", "--tolerance", "1"), "name each target once"),
        (
            ("--target", "price,mass", "--tolerance", "1"),
            "each sample has 2 targets and the model 1 outputs",
        ),
        (("--target", "price", "--threshold", "0"), "labels other than 0 and 1"),
        (("--tolerance", "1", "--threshold", "0"), "give one"),
        (("--target", "price", "--tolerance", "1", "--groups", "classes"), "give a file with"),
        (("--label", "1"), "give --threshold T:label=VALUE"),
        (("--threshold", "0", "--one-logit"), "leave it away"),
        (("--target", "price", "--tolerance", "1", "--immutable", "agee"), "feature 'agee'"),
        (
            ("--target", "price", "--tolerance", "1", "--immutable", "0,1,2,3,4"),
            "no feature may move",
        ),
        (("--target", "price", "--tolerance", "1", "--immutable", "0", "--no-box"), "need a box"),
    ],
)
def test_what_is_refused_on_the_command_line(
    words: tuple[str, ...],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    model = ("task_nets:net", "--weights", "net.pt", "--data", "table.csv")
    assert command("evaluate", *model, "--eps", "0.03", "--quiet", *words) == 2
    told = capsys.readouterr()
    assert said in told.err and told.err.count("\n") == 1 and not told.out


def forecaster() -> nn.Module:
    """A window of two channels and six steps -> the next value of each: convolutions over time."""
    torch.manual_seed(3)
    layers = (nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    return nn.Sequential(*layers).double().eval()


@pytest.mark.slow
def test_windows_of_a_time_series() -> None:
    """Inputs are windows `(channels, steps)`: both sides, and points that are off by the tolerance
    where they are called wrong.
    """
    model = forecaster()
    series = torch.cumsum(noise((2, 40), 0.1), 1)
    x = series.unfold(1, 6, 1).transpose(0, 1)[:12].contiguous()
    with torch.no_grad():
        y = model(x) + noise((12, 2), 0.02)
    run = evaluated(model, (x, y), tolerance=0.15, certify="branch")
    assert run.radii is not None and tuple(run.images([0])[0].shape[1:]) == (2, 6)
    right = run.predicted == run.y
    assert right.any() and (run.radii[right] > 0).all()
    assert (run.radii <= run.distances * (1 + 1e-9)).all()
    rows = (right & run.distances.isfinite()).nonzero()[:, 0]
    assert len(rows)
    _, points = run.images(rows.tolist())
    with torch.no_grad():
        off = (model(points.double()) - y[rows]).abs().amax(1)
    assert (off >= 0.15 - 1e-6).all()
    assert "within 0.15 of the target in all 2 outputs" in report(run)
