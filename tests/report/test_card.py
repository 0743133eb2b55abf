"""What a model card, a title and a picture make of strings out of a run: nothing is obeyed."""

import dataclasses
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.cli.parser import main
from wassail.report.board import entry
from wassail.report.card import model_card
from wassail.report.machine import as_json
from wassail.report.page import report
from wassail.writing import without_folders

HOSTILE = "<script>alert(1)</script> [x](http://evil) ![i](y) `c` **b** www.evil.org a|b # h"


@pytest.fixture(scope="module")
def run() -> ws.Evaluation:
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    threat = ws.Threat("inf", "inf", 0.1)
    return ws.evaluate(model, (x, model(x).argmax(1)), threat, ["fgsm"], look=False)


def read(markdown: str) -> str:
    """The text that a reader of Markdown sees: escapes taken away."""
    return unescape(re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown))


@pytest.mark.parametrize("place", ["versions", "version", "seed", "name", "data", "classes"])
def test_a_card_obeys_nothing(run: ws.Evaluation, place: str) -> None:
    info: dict[str, Any] = dict(run.info)
    changed: dict[str, Any] = {}
    if place == "versions":
        info["versions"] = {HOSTILE: "1"}
    elif place == "version":
        info["versions"] = {"torch": HOSTILE + "\n\n# Mine"}
    elif place == "seed":
        info["seed"] = HOSTILE
    elif place == "classes":
        info["data"] = {**info["data"], "class names": "in alphabetical order"}
        changed["classes"] = (HOSTILE, "b", "c")
    else:
        changed[place] = HOSTILE
    card = model_card(dataclasses.replace(run, info=info, **changed))
    assert "<script" not in card and "\n# Mine" not in card
    ours = card.replace("box [0, 1]", "")
    assert not re.search(r"(?<!\\)[\[\]`]", ours)
    assert not re.search(r"(?<!\\)://|www(?!\\)\.", card)
    bold = [line.count("**") % 2 for line in card.splitlines()]
    assert not any(bold)
    if place in ("seed", "name", "data"):
        assert HOSTILE in read(card)  # nothing is lost


def test_underscores_stay(run: ws.Evaluation) -> None:
    card = model_card(dataclasses.replace(run, name="my_net_v2"))
    assert r"my\_net\_v2" in card and "my?net" not in card and "my_net_v2" in read(card)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/my secret data/x.npz", "…/x.npz"),
        ("C:\\Users\\me too\\x.npz", "…/x.npz"),
        ("~/my data/x.npz", "…/x.npz"),
        ("--data=/home/me/my data/x.npz", "--data=…/x.npz"),
        ("file:///home/me/x.npz", "…/x.npz"),
        ("/home/me/", "…/me"),
        ("digits:train", "digits:train"),
        ("accuracy at eps 8/255", "accuracy at eps 8/255"),
        ("read from '/home/me/x.npz' today", "read from '…/x.npz' today"),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_no_folder_leaves_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "my secret data"
    place.mkdir()
    x, y = ws.zoo.data()
    np.savez(place / "x.npz", x=x[:4].numpy(), y=y[:4].numpy())
    words = "evaluate digits-mlp --eps 0.05 --order inf --attacks fgsm --no-look --quiet --data"
    out = tmp_path / "run"
    card = tmp_path / "card.md"
    assert (
        main([*words.split(), str(place / "x.npz"), "--out", str(out), "--write", str(card)]) == 0
    )
    run = ws.Evaluation.load(out)
    assert run.data == "…/x.npz"
    for text in (report(run), card.read_text(), str(as_json(run)), str(entry(run))):
        assert "secret" not in text and str(tmp_path) not in text
    capsys.readouterr()


@pytest.mark.slow
def test_a_style_of_the_current_folder_is_not_obeyed(tmp_path: Path) -> None:
    """`text.usetex` starts LaTeX: here a program of that name that leaves a trace."""
    program = tmp_path / "latex"
    program.write_text("#!/bin/sh\ntouch hurt\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: agg\n")
    words = "evaluate digits-mlp -n 3 --eps 0.05 --order inf --attacks fgsm --no-look --quiet"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "wassail", *words.split(), "--out", "run"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "sandwich.svg").exists() and not (tmp_path / "hurt").exists()
