"""Which number a class name gets: over all of the data, shown, in the order that is given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_tables import Frame
from torch import nn

import wassail as ws
from wassail.cli.parser import main
from wassail.report.card import model_card
from wassail.report.page import report
from wassail.zoo.datasets import open_data

NAMES = ("ant", "bee", "cat")
MINE = """
import torch
def thirds(order="012"):
    '''Class order[k] where v lies in the k-th third of [0, 1].'''
    def logits(x):
        v = x[:, :1]
        z = torch.cat([1 - 3 * v, 1 - (6 * v - 3).abs(), 3 * v - 2], 1)
        return z[:, [order.index(c) for c in "012"]]
    return logits
def turned(): return thirds("201")
"""


def rows() -> list[tuple[float, str]]:
    """The last class first: a part from the front knows no other."""
    return [((i + 0.5) / 60, NAMES[i // 20]) for i in reversed(range(60))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = ["v,label", *(f"{value},{name}" for value, name in rows())]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "ours.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluate(model: str, *more: str, n: int = 60) -> int:
    options = ["--eps", "0.01", "--order", "inf", "--attacks", "fgsm", "--quiet", "--no-box"]
    return main(["evaluate", model, "--data", "t.csv", "-n", str(n), *options, *more])


def test_a_cut_changes_no_number(folder: Path) -> None:
    whole = open_data("t.csv")
    assert whole.classes == NAMES
    for n in (1, 20, 21, 40, 59):
        part = open_data("t.csv", n)
        assert part.classes == NAMES and len(part) == n
        assert part.read(0, n)[1].tolist() == whole.read(0, n)[1].tolist()


def test_a_cut_frame_and_a_cut_parquet_file_change_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = Frame(
        {
            "v": np.array([value for value, _ in rows()]),
            "label": np.array([name for _, name in rows()], dtype=object),
        }
    )
    assert open_data(values, 5).read(0, 5)[1].tolist() == [2] * 5
    pandas = type("pandas", (), {"read_parquet": staticmethod(lambda path: values)})
    monkeypatch.setitem(__import__("sys").modules, "pandas", pandas)
    monkeypatch.setattr("wassail.zoo.tables._refuse_swollen", lambda path: None)
    (tmp_path / "t.parquet").write_bytes(b"")
    assert open_data(tmp_path / "t.parquet", 5).read(0, 5)[1].tolist() == [2] * 5


def test_a_name_further_down_makes_all_labels_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("v,label\n0.1,1\n0.2,0\n0.3,none\n")
    data = open_data(tmp_path / "t.csv", 2)
    assert data.classes == ("0", "1", "none") and data.read(0, 2)[1].tolist() == [1, 0]


def test_the_same_accuracy_at_every_n_and_the_numbers_on_every_page(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "Class names and their numbers (in alphabetical order): ant = 0, bee = 1, cat = 2."
    for n in (10, 40, 60):
        out = folder / f"run{n}"
        assert evaluate("ours:thirds", "--out", str(out), "--write", "card.md", n=n) == 0
        assert said in capsys.readouterr().out
        run = ws.Evaluation.load(out)
        assert run.clean == 1
        assert said in report(run) and f"**Classes.** {said}" in model_card(run)
        assert run.info["classes"] == list(NAMES)
    assert evaluate("ours:thirds", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["classes"] == {"ant": 0, "bee": 1, "cat": 2}


def test_an_order_that_cannot_be_the_models_is_refused_until_it_is_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("ours:turned") == 2
    said = capsys.readouterr().err
    assert "right on 0 of 60 samples" in said and "--classes a,b,c" in said
    assert said.count("\n") == 1
    assert evaluate("ours:turned", "--classes", "bee,cat,ant,dog") == 2
    assert "4 names of classes, and the model has 3" in capsys.readouterr().err
    assert evaluate("ours:turned", "--classes", "bee,cat,ant", "--out", "run") == 0
    text = capsys.readouterr().out
    assert "(as given): bee = 0, cat = 1, ant = 2." in text
    assert ws.Evaluation.load("run").clean == 1
    assert main(["verify", "run", "ours:turned", "--data", "t.csv"]) == 1
    words = ["verify", "run", "ours:turned", "--data", "t.csv"]
    assert main([*words, "--classes", "bee,cat,ant"]) == 0


def test_fewer_names_than_classes_are_refused_whatever_the_accuracy(folder: Path) -> None:
    data = open_data("t.csv")
    x, y = data.read(20, 60)
    values = [["ant", "bee"][label] for label in y.tolist()]
    frame = Frame({"v": x[:, 0].numpy(), "label": np.array(values, dtype=object)})
    model = nn.Sequential(nn.Linear(1, 3))
    with pytest.raises(ws.InputError, match="and the model has 3 classes"):
        ws.evaluate(model, frame, ws.Threat(2, 1, 0.01, None), ["fgsm"])


def test_class_folders_are_numbered_in_the_order_that_is_given(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in NAMES:
        (tmp_path / name).mkdir()
        image.new("L", (4, 4)).save(tmp_path / name / "0.png")
    assert open_data(tmp_path, 2).read(0, 2)[1].tolist() == [0, 1]
    turned = open_data(tmp_path, classes=["cat", "ant", "bee"])
    assert turned.read(0, 3)[1].tolist() == [1, 2, 0] and turned.ids(0, 1) == ["ant/0.png"]


def test_names_for_numbers_and_names_that_do_not_fit() -> None:
    pair = (torch.rand(3, 2), torch.tensor([0, 2, 1]))
    named = open_data(pair, classes=NAMES)
    assert named.classes == NAMES and named.read(0, 3)[1].tolist() == [0, 2, 1]
    with pytest.raises(ws.InputError, match="label 2 and 2 classes are named"):
        open_data(pair, classes=NAMES[:2]).read(0, 3)
    with pytest.raises(ws.InputError, match="each name once"):
        open_data(pair, classes=["ant", "ant", "bee"])
    with pytest.raises(ws.InputError, match="has a class 'cat', which is none of ant, bee"):
        open_data(named, classes=["ant", "bee"])
