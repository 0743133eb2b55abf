"""Forged runs of all kinds: none passes `verify` with a figure that is false, or with conditions
that are not shown.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import wassail as ws
from support.forged import (
    RUNS,
    SMOOTHED,
    forge,
    good_run,
    good_votes,
    network,
    samples,
    seal_of_another,
)
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.evaluation.conditions import conditions
from wassail.evaluation.notes import Verification, fields_of
from wassail.evaluation.reading import ODD
from wassail.evaluation.sealing import check_seal
from wassail.evaluation.smoothed import verify_smoothed
from wassail.report.again import again
from wassail.report.board import entry
from wassail.report.card import model_card
from wassail.report.machine import as_json, as_junit
from wassail.report.page import report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return good_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def voted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return good_votes(tmp_path_factory.mktemp("voted") / "run")


def look(folder: Path) -> Verification:
    return ws.Evaluation.load(folder).verify(network(), samples(), True, seed=0)


def answer(ask: Callable[[], Verification]) -> Verification | str:
    """What was found, or the sentence that refuses to look."""
    try:
        return ask()
    except InputError as error:
        return str(error)


def test_there_are_fifty_and_more() -> None:
    assert len(RUNS) + len(SMOOTHED) >= 50


def test_the_good_ones_hold(made: Path, voted: Path) -> None:
    found = look(made)
    assert found, str(found)
    assert not found.choices and {"landmarks", "radii", "mu", "y"} <= set(found.fields)
    data = ws.zoo.open_data("digits", 4)
    found = verify_smoothed(voted, ws.zoo.load("digits-mlp"), data, seed=0)
    assert found and {"votes.hits", "attack.high", "smoothing.rows"} <= set(found.fields)


@pytest.mark.few(11)
@pytest.mark.parametrize("name", RUNS)
def test_a_forged_run_does_not_pass(name: str, made: Path, tmp_path: Path) -> None:
    change, expected = RUNS[name]
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    with suppress(*ODD):  # what makes no sense cannot be summarised either
        change(folder)
    found = answer(lambda: look(folder))
    if isinstance(found, str):
        assert "refused" in expected and "\n" not in found, found
        return
    if "false" in expected:
        assert not found, found
        return
    assert found, found
    assert expected in str(found)
    run = ws.Evaluation.load(folder)
    honest = ws.Evaluation.load(made)
    assert run.headline == honest.headline or found.choices  # the figures are true, or explained
    written = report(run, verified=found)
    for text in conditions(run):
        assert text in as_json(run)["conditions"] and text in entry(run)["conditions"]
        assert "may not move" not in text or "may not move" in written
        assert "data-condition" in written and "own choice" in model_card(run)
        assert "own choice" in as_junit(run, [])
    words = shlex.split(again(run).command)
    assert words[:2] == ["wassail", "verify"] and "rm" not in words


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SMOOTHED)
def test_forged_votes_do_not_pass(name: str, voted: Path, tmp_path: Path) -> None:
    change, expected = SMOOTHED[name]
    folder = Path(shutil.copytree(voted, tmp_path / "run"))
    change(folder)
    data = ws.zoo.open_data("digits", 4)
    found = answer(lambda: verify_smoothed(folder, ws.zoo.load("digits-mlp"), data, seed=0))
    assert expected == "refused" if isinstance(found, str) else expected == "false", found
    assert isinstance(found, str) or not found, found


def names_in(run: ws.Evaluation, folder: Path) -> set[str]:
    """Every field of a run, found without the code that lists them."""
    stated = json.loads((folder / "config.json").read_text())["config"]
    names = {f"config.{key}" for key, value in stated.items() if not isinstance(value, Mapping)}
    for key, value in stated.items():
        if isinstance(value, Mapping) and key in ("model", "data", "certify"):
            names |= {f"config.{key}.{inner}" for inner in value}
    names |= {entry.name for entry in fields(run)} - {"info", "folder", "rows", "best"}
    return names - {"certificate"}


def test_every_field_is_in_one_of_two_lists(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    (folder / "notes.txt").write_text("x")

    def more(config: dict[str, Any], kept: dict[str, Any]) -> None:
        config["new"] = 1
        config["data"]["newer"] = 2

    run = forge(folder, None, more)
    for data in (None, samples()):
        found = run.verify(network(), data, data is not None, seed=0)
        listed = [*found.fields, *found.unread]
        assert len(listed) == len(set(listed))
        assert names_in(run, folder) <= set(listed)
        assert {"config.new", "config.data.newer", "file notes.txt"} <= set(found.unread)
        assert set(fields_of(run)) == set(listed)
        assert ("y" in found.fields) == (data is not None)
        text = str(found).splitlines()
        assert text[-3].startswith("fields checked: ") and text[-2].startswith("fields not ")


def test_a_seal_of_another_state_does_not_fit(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "run"))
    seal_of_another(folder)
    found = check_seal(folder)
    assert not found and "since it was made these changed: " in str(found)


@pytest.mark.slow
def test_a_sign_off_looks_again_at_what_was_stored(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = "evaluate digits-mlp -n 6 --eps 0.05 --order 1 inf --attacks fgsm --no-look --quiet"
    words += f" --certify crown --out {out}"
    require = ["--require", "accuracy>=0.9 at eps 0.05 proved", "--resume", "--json"]
    assert main(words.split()) == 0

    def edit(unit: str, tensors: dict[str, Any], fields: dict[str, Any]) -> None:
        if unit.startswith("radii@"):
            tensors["values"] = torch.where(tensors["values"] > 0, 0.2, 0.0).double()
        if "distances" in tensors:
            flips = tensors["distances"]
            tensors["distances"] = torch.where(flips > 0, torch.inf, 0.0).double()
            if "index" in tensors:
                tensors["index"], tensors["points"] = tensors["index"][:0], tensors["points"][:0]

    forge(out, edit)
    capsys.readouterr()
    junit = tmp_path / "j.xml"
    assert main([*words.split(), *require, "--write", str(junit)]) == 1
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["verification"]["holds"] is False and answer["holds"] is False
    assert "stored before are false" in captured.err and "FALSE: " in junit.read_text()
    shutil.rmtree(out)
    assert main([*words.split(), "--require", "accuracy>=0.01 clean", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verification"] is None  # all of it was computed
    again = ["--require", "accuracy>=0.01 at eps 0.001 attacked", "--resume"]
    assert main([*words.split(), *again]) == 0
    assert "attacks were not run again" in capsys.readouterr().out
