"""Tables: Parquet files and data frames, names of features, types of numbers."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wassail as ws
from wassail.report.page import report
from wassail.zoo.datasets import open_data
from wassail.zoo.tables import read_box, read_csv, read_groups


class Frame:
    """What is used of a pandas data frame: columns in an order, `iloc` and `to_numpy`."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.columns = list(columns)
        self._values = list(columns.values())

    @property
    def iloc(self) -> Frame:
        return self

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._made(range(len(self.columns)), index)
        rows, wanted = index
        if isinstance(wanted, int):
            return types.SimpleNamespace(to_numpy=lambda: self._values[wanted][rows])
        return self._made(wanted, rows)

    def _made(self, places, rows) -> Frame:
        return Frame({self.columns[i]: self._values[i][rows] for i in places})

    def to_numpy(self) -> np.ndarray:
        return np.stack(self._values, 1)


def frame(**more: np.ndarray) -> Any:
    """Three patients."""
    columns = {
        "age": np.array([40, 50, 60]),
        "label": np.array(["ill", "well", "ill"], dtype=object),
        "dose": np.array([0.5, 1.5, 2.5]),
    }
    return Frame(columns | more)


def test_a_data_frame_is_data_with_names() -> None:
    data = open_data(frame())
    x, y = data.read(0, 3)
    assert x.dtype == torch.float64
    assert x.tolist() == [[40, 0.5], [50, 1.5], [60, 2.5]] and y.tolist() == [0, 1, 0]
    assert data.classes == ("ill", "well") and data.info["features"] == ["age", "dose"]
    pair = open_data((frame()[:, [0, 2]], np.array([1, 0, 1])))
    assert pair.info["features"] == ["age", "dose"] and pair.read(0, 3)[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: open_data(frame(dose=np.array([0.5, np.nan, 1.0]))), "'dose'.*missing"),
        (lambda: open_data(frame(dose=np.array(["a", "b", "c"], dtype=object))), "'dose'.*object"),
        (lambda: open_data(frame(label=np.array([0.1, 0.2, 0.3]))), "class indices or names"),
        (lambda: open_data(Frame({"a": np.zeros(2)})), "at least two columns"),  # type: ignore[arg-type]
        (lambda: ws.Features([0] * 3, [9] * 3, names="abc").encode(frame()), "same order"),
    ],
)
def test_frames_that_make_no_sense_are_refused(make, words: str) -> None:
    with pytest.raises(ws.InputError, match=words):
        make()


def test_parquet_files_are_read_by_pandas_or_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ws.InputError, match=r"wassail\[tables\]"):
        open_data(path)
    seen = []

    def read(place):
        seen.append(place)
        return frame()

    size = types.SimpleNamespace(num_rows=3, num_columns=3)
    stub = types.SimpleNamespace(ParquetFile=lambda place: types.SimpleNamespace(metadata=size))
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(read_parquet=read))
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(parquet=stub))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", stub)
    data = open_data(path, 2)
    assert seen == [path] and len(data) == 2
    assert data.info["source"] == "parquet" and set(data.info["files"]) == {"t.parquet"}
    assert data.read(0, 2)[0].tolist() == [[40, 0.5], [50, 1.5]]
    size.num_rows = 10**13
    with pytest.raises(ws.InputError, match="would unpack 4 bytes to"):
        open_data(path, 2)
    assert seen == [path]


def test_a_line_without_an_end_is_refused(tmp_path) -> None:
    """A file of holes takes no room on the disk and would take all of the memory."""
    path = tmp_path / "holes.csv"
    path.write_text("a,label\n")
    os.truncate(path, 1 << 34)
    with pytest.raises(ws.InputError, match=r"a line of '.*' has 16,777,216 characters or more"):
        open_data(path)


def test_a_box_is_small(tmp_path) -> None:
    bomb = tmp_path / "box.npz"
    np.savez_compressed(bomb, low=np.zeros(1 << 21), high=np.ones(2))
    with pytest.raises(ws.InputError, match=r"low in '.*' has more than 8,388,608 bytes"):
        read_box(bomb, None)
    holes = tmp_path / "box.csv"
    holes.write_text("low,high\n0,1\n")
    os.truncate(holes, 1 << 34)
    with pytest.raises(ws.InputError, match="it is no box"):
        read_box(holes, None)
    good = tmp_path / "good.npz"
    np.savez(good, low=np.zeros(2), high=np.ones(2), feature=np.array(["a", "b"]))
    low, high = read_box(good, None)
    assert low.tolist() == [0.0, 0.0] and high.tolist() == [1.0, 1.0]


def test_npz_files_may_name_their_features(tmp_path) -> None:
    path = tmp_path / "t.npz"
    x = np.zeros((4, 2), dtype=np.float32)
    y = np.zeros(4, dtype=np.int64)
    for key in ("features", "feature_names", "names", "columns"):
        arrays: dict[str, Any] = {"x": x, "y": y, key: np.array(["age", "dose"])}
        np.savez(path, **arrays)
        assert open_data(path).info["features"] == ["age", "dose"]
    for odd in (np.array(["one"]), np.arange(2), np.array(["a", None], dtype=object)):
        np.savez(path, x=x, y=y, names=odd)
        assert "features" not in open_data(path).info


def test_numbers_get_the_type_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    x = torch.rand(8, 2, dtype=torch.float64)
    y = model(x.float()).argmax(1)
    flips = ws.nearest(model, x, y, "inf", passes=20)
    assert torch.equal(flips.points, ws.nearest(model, x.float(), y, "inf", passes=20).points)
    assert torch.equal(
        ws.radii(model, x, y, "inf", method="crown").values,
        ws.radii(model, x.float(), y, "inf", method="crown").values,
    )
    threat = ws.Threat("inf", 1, 0.1)
    named = Frame({"size": x[:, 0].numpy(), "<i>": x[:, 1].numpy()})
    run = ws.evaluate(
        model, (named, y), threat, ("nearest", "wda"), passes=10, look=False, landmarks="spread-1"
    )
    assert run.info["data"]["preprocessing"] == ["to float32, the type of the model"]
    page = report(run)
    assert "size" in page and "→" in page and "<i>" not in page
    wide = ws.nearest(model.double(), x.float(), y, "inf", passes=5)
    assert wide.x.dtype == torch.float64


def test_a_model_that_takes_float64_gets_float64() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.float())

    torch.manual_seed(0)
    model = Casts()
    x = torch.rand(4, 2, dtype=torch.float64)
    assert ws.nearest(model, x, model(x).argmax(1), "inf", passes=5).x.dtype == torch.float64


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    """Spreadsheets write one; the label stays the label."""
    text = "label,a,b\n0,1,5\n1,2,6\n"
    (tmp_path / "plain.csv").write_bytes(text.encode())
    (tmp_path / "marked.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    plain, marked = (read_csv(tmp_path / f"{name}.csv") for name in ("plain", "marked"))
    assert marked.info["features"] == plain.info["features"] == ["a", "b"]
    assert torch.equal(torch.as_tensor(marked.y), torch.as_tensor(plain.y))
    (tmp_path / "groups.txt").write_bytes(b"\xef\xbb\xbfa\nb\n\n")
    assert read_groups(tmp_path / "groups.txt") == ["a", "b"]


def test_other_separators_and_gaps_in_groups_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a;b;label\n1;2;0\n")
    with pytest.raises(ws.InputError, match="with commas between the values"):
        read_csv(tmp_path / "t.csv")
    (tmp_path / "groups.txt").write_text("a\n\nb\n")
    with pytest.raises(ws.InputError, match=r"line 2 of .* is empty"):
        read_groups(tmp_path / "groups.txt")
