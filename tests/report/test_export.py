import csv
import json
import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wassail as ws
from wassail.evaluation.result import Finding, Row
from wassail.evaluation.run import Evaluation
from wassail.report.export import Export, to_npz, to_png, to_pt, to_robustbench, to_samples, write
from wassail.report.png import encode, to_uint8
from wassail.transport.bootstrap import accuracy, interval

INF = math.inf
HOSTILE = [
    "../../etc/passwd",
    "/absolute",
    "a\x00b",
    "x" * 300,
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2",
    "@SUM(A1)",
    "\t=1",
    'a,b"c\nd',
    "..",
    "CON",
    "",
    "same",
    "same",
    "\udcff",
    "\u202egnp.exe",
    "<script>",
    "a\\b",
    "  =2",
]
N = 24
MODEL = ws.zoo.load("digits-mlp")
X, Y = ws.zoo.data("digits")


@pytest.fixture(scope="module")
def run() -> Evaluation:
    """Samples 0 to 23 of the digits (11 is wrong already), flips of a short search, two of
    which are taken away.
    """
    x = X[:N]
    y = Y[:N]
    flips = ws.nearest(MODEL, x, y, "inf", passes=40)
    distances = flips.distances.clone()
    points = flips.points.clone()
    for i in (20, 21):
        distances[i], points[i] = INF, x[i]
    return evaluation(x, y, points, distances, flips.labels)


def evaluation(
    x: Tensor, y: Tensor, points: Tensor, distances: Tensor, labels: Tensor
) -> Evaluation:
    n = len(x)
    threats = tuple(ws.Threat("inf", p, "8/255") for p in (1, 2, INF))
    wrong = distances == 0
    mu = torch.full((n,), 1 / n, dtype=torch.float64)
    rows = [
        Row(
            "all",
            "all",
            t,
            accuracy(mu, wrong, distances, t),
            interval(mu, wrong, distances, t, resamples=20),
            t.eps,
            1,
            1,
            1,
        )
        for t in threats
    ]
    return Evaluation(
        name="</script>../m",
        data="CIFAR-10",
        threats=threats,
        ids=tuple((HOSTILE + [str(i) for i in range(20, 40)])[:n]),
        classes=tuple("=<b>../\x00" + str(k) for k in range(10)),
        y=y,
        predicted=torch.where(wrong, labels, y),
        mu=mu,
        distances=distances,
        labels=labels,
        found_by=torch.arange(n) % 2,
        methods=("nearest", "=wda"),
        radii=distances.nan_to_num(posinf=0.5) / 3,
        exact=torch.arange(n) % 3 == 0,
        certificate={"method": "test"},
        rows=tuple(rows),
        best=tuple(rows),
        clean=float((~wrong).double().mean()),
        clean_interval=(0.5, 1.0),
        findings=(),
        info={"data": {"shape": list(x.shape[1:])}},
        images=lambda chosen: (x[list(chosen)], points[list(chosen)]),
    )


def test_csv_holds_every_number_exactly(run: Evaluation, tmp_path: Path) -> None:
    done = to_samples(run, tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == N and done == Export(
        tmp_path / "s.csv", N, int((run.distances > 0).sum()) - 2
    )
    assert [float(row["distance"]) for row in rows] == run.distances.tolist()
    assert [float(row["weight"]) for row in rows] == run.mu.tolist()
    assert run.radii is not None and [float(row["radius"]) for row in rows] == run.radii.tolist()
    assert [row["exact"] for row in rows[:4]] == ["true", "false", "false", "true"]
    assert [int(row["label"]) for row in rows] == run.y.tolist()
    for i, row in enumerate(rows):
        found = 0 < float(row["distance"]) < INF
        assert row["flip_label"] == (str(int(run.labels[i])) if found else "")
        assert row["method"] == (["nearest", "'=wda"][i % 2] if found else "")
    for p, name in (
        (1, "share p=1 eps=8/255"),
        (2, "share p=2 eps=8/255"),
        (INF, "share p=inf eps=8/255"),
    ):
        share = torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)
        assert 1 - float((run.mu * share).sum()) == pytest.approx(
            run.curve(p)(8 / 255)[1], abs=1e-12
        )
    plain = replace(run, radii=None, exact=None)
    to_samples(plain, tmp_path / "s.csv")
    with (tmp_path / "s.csv").open(newline="", encoding="utf-8") as file:
        assert {(row["radius"], row["exact"]) for row in csv.DictReader(file)} == {("", "")}


def test_csv_has_no_formula_and_no_hidden_character(run: Evaluation, tmp_path: Path) -> None:
    to_samples(run, tmp_path / "s.csv")
    text = (tmp_path / "s.csv").read_text("utf-8")
    assert all(c.isprintable() or c == "\n" for c in text)
    with (tmp_path / "s.csv").open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.lstrip()[:1] in ("=", "+", "-", "@")]
    ids = [cell for cell in cells if "1+1" in cell or cell.startswith("'-2")]
    assert ids == ["'=1+1", "'-2"] and "a\\x00b" in cells and 'a,b"c\\nd' in cells


def test_robustbench_entry(run: Evaluation, tmp_path: Path) -> None:
    done = to_robustbench(run, tmp_path / "m.json")
    entry = json.loads((tmp_path / "m.json").read_text())
    known = {
        "link",
        "name",
        "authors",
        "additional_data",
        "number_forward_passes",
        "dataset",
        "venue",
        "architecture",
        "eps",
        "clean_acc",
        "reported",
        "footnote",
        "unreliable",
        "external",
    }
    assert set(entry) == known | {"wda_acc", "certified_acc", "certified_arithmetic", "population"}
    assert entry["dataset"] == "cifar10" and entry["eps"] == "8/255" and entry["authors"] == ""
    assert entry["clean_acc"] == f"{100 * run.clean:.2f}" and entry["unreliable"] is False
    assert entry["external"] == f"{100 * run.curve(INF)(8 / 255)[1]:.2f}"
    assert entry["wda_acc"] == {f"p{p}": f"{100 * run.curve(p)(8 / 255)[1]:.2f}" for p in (1, 2)}
    assert set(entry["certified_acc"]) == {"p1", "p2", "pinf"}
    for order, text in entry["certified_acc"].items():
        certified = run.curve(order[1:])(8 / 255)[0]
        assert 100 * certified - 0.01 <= float(text) <= 100 * certified + 1e-9
    assert (
        "24 samples" in entry["footnote"]
        and "eps" not in entry["footnote"]
        and "24 samples" in str(done)
    )


def test_robustbench_with_autoattack_and_another_eps(run: Evaluation, tmp_path: Path) -> None:
    pooled = run.curve(INF)(8 / 255)[1]
    row = replace(run.rows[2], attack="autoattack", accuracy=pooled)
    beaten = replace(run, rows=(row,), findings=(Finding("x", "warning", "x"),), radii=None)
    to_robustbench(beaten, tmp_path / "m.json")
    entry = json.loads((tmp_path / "m.json").read_text())
    assert (
        entry["autoattack_acc"] == f"{100 * pooled:.2f}"
        and "external" not in entry
        and entry["unreliable"] is True
    )
    assert "certified_acc" not in entry
    to_robustbench(replace(beaten, rows=(replace(row, accuracy=0.999),)), tmp_path / "m.json")
    entry = json.loads((tmp_path / "m.json").read_text())
    assert entry["autoattack_acc"] == "99.90" and entry["external"] == f"{100 * pooled:.2f}"
    other = replace(run, threats=(ws.Threat("inf", 1, "2/255"),))
    to_robustbench(other, tmp_path / "m.json")
    entry = json.loads((tmp_path / "m.json").read_text())
    assert (
        entry["eps"] == "2/255"
        and "the board's is 8/255" in entry["footnote"]
        and "external" not in entry
    )


def test_robustbench_has_no_other_boards(run: Evaluation, tmp_path: Path) -> None:
    for change in (
        {"threats": (ws.Threat(1, 1, 12),)},
        {"data": "digits"},
        {"threats": (ws.Threat("inf", 1, 0.1, None),)},
    ):
        with pytest.raises(ws.InputError, match="no board") as error:
            to_robustbench(replace(run, **change), tmp_path / "m.json")
        assert "\n" not in str(error.value)
    to_robustbench(replace(run, data="digits"), tmp_path / "m.json", dataset="cifar100")
    assert json.loads((tmp_path / "m.json").read_text())["dataset"] == "cifar100"
    with pytest.raises(ws.InputError, match="no board for 'mnist'"):
        to_robustbench(run, tmp_path / "m.json", dataset="mnist")


def test_pt_holds_the_flips_within_eps_and_samples_elsewhere(
    run: Evaluation, tmp_path: Path
) -> None:
    done = to_pt(run, tmp_path / "a.pt", eps="0.08", model=MODEL)
    points = torch.load(tmp_path / "a.pt", weights_only=True)
    assert type(points) is Tensor and points.shape == (N, 1, 8, 8) and points.dtype == torch.float32
    near = (run.distances > 0) & (run.distances <= 0.08)
    assert 0 < near.sum() < N - 4 and done.flips == int(near.sum()) and done.lost == 0
    x = X[:N]
    assert torch.equal((points != x).flatten(1).any(1), near)
    assert torch.equal(points[near], run.images(range(N))[1][near])
    assert float((MODEL(points).argmax(1) == Y[:N]).double().mean()) == pytest.approx(
        run.curve(INF)(0.08)[1]
    )
    assert "8/255" in to_pt(run, tmp_path / "a.pt").note  # the point-wise threat's eps


def test_pt_does_not_pass_on_what_is_no_flip(run: Evaluation, tmp_path: Path) -> None:
    x, points = run.images(range(N))
    bad = points.clone()
    first, second, third = ((run.distances > 0) & (run.distances <= 0.08)).nonzero()[:3, 0].tolist()
    bad[first] = x[first] + 0.09 * (1 - 2 * x[first].round())  # further than it says
    bad[second] = x[second]  # classified correctly
    bad[third, 0, 0, 0] = -0.01  # outside the box
    lying = replace(run, images=lambda chosen: (x[list(chosen)], bad[list(chosen)]))
    done = to_pt(lying, tmp_path / "a.pt", eps=0.08, model=MODEL)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert done.lost == 3 and "3 flips were none" in str(done)
    assert torch.equal(found[[first, second, third]], x[[first, second, third]])
    blind = to_pt(lying, tmp_path / "a.pt", eps=0.08)  # distance and box need no model
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert blind.lost == 2 and torch.equal(found[[first, third]], x[[first, third]])


def test_npz_needs_no_pickle(run: Evaluation, tmp_path: Path) -> None:
    to_npz(run, tmp_path / "f.npz")
    with zipfile.ZipFile(tmp_path / "f.npz") as archive:
        assert {info.date_time for info in archive.infolist()} == {
            (1980, 1, 1, 0, 0, 0)
        }  # the same bytes tomorrow
    with np.load(tmp_path / "f.npz", allow_pickle=False) as arrays:
        assert set(arrays) == {"x_adv", "distances", "labels", "y", "predicted", "ids"}
        assert np.array_equal(arrays["x_adv"], run.images(range(N))[1].numpy())
        assert np.array_equal(arrays["distances"], run.distances.numpy()) and np.array_equal(
            arrays["labels"], run.labels.numpy()
        )
        assert (
            arrays["ids"].shape == (N,)
            and arrays["ids"][2] == "a\\x00b"
            and len(arrays["ids"][3]) == 300
        )


def test_a_large_run_is_read_in_blocks(tmp_path: Path) -> None:
    x = X[:250]
    y = Y[:250]
    asked = []

    def images(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        asked.append(len(list(chosen)))
        return x[list(chosen)], x[list(chosen)]

    none = torch.full((250,), INF, dtype=torch.float64)
    big = replace(
        evaluation(x[:1], y[:1], x[:1], none[:1], y[:1]),
        y=y,
        predicted=y,
        distances=none,
        labels=y,
        images=images,
        ids=tuple(map(str, range(250))),
        mu=torch.full((250,), 1 / 250, dtype=torch.float64),
    )
    to_npz(big, tmp_path / "f.npz")
    assert max(asked) == 100 and sum(asked) == 251


def test_png_survives_8_bits_or_is_not_written(run: Evaluation, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    done = to_png(run, tmp_path / "png", MODEL)
    with (tmp_path / "png" / "index.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == int((run.distances > 0).sum()) - 2 == done.flips + done.lost
    for row in rows:
        assert row["state"] == "flip"
        index = int(row["file"][:6])
        pixels = np.rint(255 * image.imread(tmp_path / "png" / row["file"]))
        x = torch.from_numpy(pixels).float()[None, None] / 255
        assert int(MODEL(x).argmax()) == int(row["flip_label"]) != int(run.y[index])
        assert float((x - X[index]).double().abs().max()) == pytest.approx(
            float(row["distance"]), abs=1e-12
        )


def _band(x: Tensor) -> Tensor:
    """Class 1 where the first pixel lies in a band around 0.503 that holds no multiple of 1/255."""
    inside = 0.0005 - (x[:, 0, 0, 0] - 0.503).abs()
    return torch.stack([torch.zeros_like(inside), inside], 1)


def test_a_flip_that_8_bits_lose_is_listed_and_not_written(tmp_path: Path) -> None:
    x = torch.full((2, 3, 2, 2), 0.5)
    points = x.clone()
    points[:, 0, 0, 0] = 0.503
    y = torch.zeros(2, dtype=torch.int64)
    distance = torch.tensor([0.003, 0.003], dtype=torch.float64)
    run = evaluation(x, y, points, distance, y + 1)
    done = to_png(run, tmp_path / "a", _band)
    assert (done.flips, done.lost) == (0, 2) and "2 flips do not survive" in str(done)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["index.csv"]
    assert (tmp_path / "a" / "index.csv").read_text().count(",0.003,lost") == 2
    blind = to_png(run, tmp_path / "b")
    assert blind.flips == 2 and "not looked at again" in str(blind)
    assert (tmp_path / "b" / "index.csv").read_text().count(",unchecked") == 2


def test_colours_keep_their_channels(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    x = torch.zeros(1, 3, 2, 4) + torch.tensor([0.4, 0.2, 0.0])[:, None, None]
    points = x.clone()
    points[0, 0, 1, 3] = 0.55

    def red(x: Tensor) -> Tensor:
        return torch.stack([0.5 - x[:, 0, 1, 3], x[:, 0, 1, 3] - 0.5], 1)

    y = torch.zeros(1, dtype=torch.int64)
    done = to_png(
        evaluation(x, y, points, torch.tensor([0.15]).double(), y + 1), tmp_path / "png", red
    )
    assert (done.flips, done.lost) == (1, 0)
    (file,) = (tmp_path / "png").glob("*.png")
    pixels = np.asarray(pillow.open(file))
    assert (
        pixels.shape == (2, 4, 3)
        and pixels[0, 0].tolist() == [102, 51, 0]
        and pixels[1, 3].tolist() == [140, 51, 0]
    )


def test_no_id_leaves_the_folder(run: Evaluation, tmp_path: Path) -> None:
    done = to_png(run, tmp_path / "deep" / "png")
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert {path.parent for path in files} == {tmp_path / "deep" / "png"}
    names = [path.name for path in files]
    assert len(names) == done.flips + 1 and len({name.lower() for name in names}) == len(
        names
    )  # same ids, other files
    assert all(len(name) < 80 and name.isascii() and name.count(".") == 1 for name in names)
    assert (
        "000000-etc_passwd.png" in names
        and "000013-same.png" in names
        and "000014-same.png" in names
    )
    with pytest.raises(ws.InputError, match="not empty"):
        to_png(run, tmp_path / "deep" / "png")


def test_what_cannot_be_an_image(run: Evaluation, tmp_path: Path) -> None:
    flat = X[:2].flatten(1)
    vector = evaluation(flat, Y[:2], flat, torch.tensor([INF, INF]).double(), Y[:2])
    with pytest.raises(ws.InputError, match="no images"):
        to_png(vector, tmp_path / "a")
    with pytest.raises(ws.InputError, match="no box"):
        to_png(replace(run, threats=(ws.Threat("inf", 1, 0.1, None),)), tmp_path / "a")


@pytest.mark.parametrize("name", ["samples", "robustbench", "pt", "npz", "png"])
def test_every_format_by_its_name(run: Evaluation, tmp_path: Path, name: str) -> None:
    done = write(run, name, tmp_path, MODEL)
    assert (
        done.path.parent == tmp_path and done.path.exists() and str(done).startswith(str(done.path))
    )
    assert not list(tmp_path.glob("*.part"))


def test_a_place_that_cannot_be_written(run: Evaluation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("samples", "robustbench", "pt", "npz", "png"):
        with pytest.raises(ws.InputError, match="cannot write") as error:
            write(run, name, tmp_path / "file")
        assert "\n" not in str(error.value)
    with pytest.raises(ws.InputError, match="unknown format 'xls'"):
        write(run, "xls", tmp_path)


def test_a_failed_export_leaves_nothing(run: Evaluation, tmp_path: Path) -> None:
    def images(chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        if len(list(chosen)) > 1:
            raise RuntimeError("disk gone")
        return run.images(chosen)

    (tmp_path / "f.npz").write_text("older")
    with pytest.raises(RuntimeError, match="disk gone"):
        to_npz(replace(run, images=images), tmp_path / "f.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["f.npz"] and (
        tmp_path / "f.npz"
    ).read_text() == "older"


def test_no_samples(tmp_path: Path) -> None:
    x = X[:0]
    y = Y[:0]
    empty = evaluation(X[:1], Y[:1], X[:1], torch.tensor([INF]).double(), Y[:1])
    empty = replace(
        empty,
        ids=(),
        y=y,
        predicted=y,
        mu=torch.zeros(0).double(),
        distances=torch.zeros(0).double(),
        labels=y,
        found_by=y,
        radii=None,
        exact=None,
        images=lambda chosen: (x, x),
    )
    for name in ("samples", "pt", "npz", "png"):
        assert write(empty, name, tmp_path).samples == 0
    with np.load(tmp_path / "flips.npz") as arrays:
        assert arrays["x_adv"].shape == (0, 1, 8, 8)


def test_png_files_are_what_others_read() -> None:
    pillow = pytest.importorskip("PIL.Image")
    import io

    rng = np.random.default_rng(0)
    for shape in ((1, 1), (7, 5), (5, 7, 3), (1, 300, 3), (4, 4, 1)):
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        read = pillow.open(io.BytesIO(encode(pixels)))
        assert read.mode == ("RGB" if shape[-1] == 3 and len(shape) == 3 else "L")
        assert np.array_equal(np.asarray(read).reshape(shape), pixels)
    data = encode(np.zeros((2, 2), np.uint8))
    assert data[-8:-4] == b"IEND" and int.from_bytes(data[-4:], "big") == zlib.crc32(b"IEND")
    refused: tuple[Any, ...] = (
        np.zeros((2, 2)),
        np.zeros((2, 2, 2), np.uint8),
        np.zeros((0, 2), np.uint8),
        np.zeros(3, np.uint8),
    )
    for bad in refused:
        with pytest.raises(ws.InputError, match="cannot be a PNG"):
            encode(bad)


def test_8_bit_images_are_rounded_to_the_nearest() -> None:
    assert to_uint8([[0.0, 1.0], [0.4 / 255, 0.6 / 255]]).tolist() == [[0, 255], [0, 1]]
    assert to_uint8([[[-1.0, 3.0, 1.0]]], -1, 1).tolist() == [[0, 255, 255]]
    colour = torch.rand(3, 4, 5)
    assert to_uint8(colour).shape == (4, 5, 3) and to_uint8(colour)[1, 2, 0] == round(
        255 * float(colour[0, 1, 2])
    )
