"""Labels that change and other people in an evaluation: figures beside those of the threats."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import wassail as ws
from wassail.cli import main
from wassail.evaluation.requirement import parse_requirement
from wassail.evaluation.summary import summary
from wassail.report.board import entry
from wassail.report.card import model_card
from wassail.report.export import to_samples
from wassail.report.machine import as_json, schema_text
from wassail.report.page import report
from wassail.report.terminal import print_evaluation
from wassail.zoo.tables import read_column

INF = math.inf
N = 24
PLAIN = ws.Threat(INF, 1, 0.05)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ws.Evaluation:
    folder = tmp_path_factory.mktemp("others") / "run"
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    groups = ws.Groups(y[:N], 0.02, 0.4)
    threats = [ws.Threat(INF, order, 0.05) for order in (1, 2, INF)]
    return ws.evaluate(
        model,
        (x[:N], y[:N]),
        threats,
        ["nearest"],
        passes=30,
        certify="crown",
        label_cost=0.1,
        subpopulation="0.8",
        groups=groups,
        look=False,
        out=folder,
    )


def test_the_figures_are_those_of_the_curves(run: ws.Evaluation) -> None:
    flips, also = run.flips(), dict(run.others)
    assert set(also) == {"label_cost", "subpopulation", "groups"}
    for threat, other in zip(run.threats, run.others_threats):
        expected = ws.risk_curve(flips, run.radii, threat.order, run.mu, **also)(threat.eps)
        assert run.others_curve(threat.order)(threat.eps) == expected
        assert expected[0] <= run.curve(threat.order)(threat.eps)[0]
        found = ws.allocate(flips, threat.eps, threat.order, run.mu, **also)
        assert found.threat == other and found.verify(ws.zoo.load("digits-mlp"))
        assert math.isclose(found.accuracy, expected[1], abs_tol=1e-9)
    assert "a changed label costs 0.1" in (run.others_sentence or "")
    assert "80 % or more of each group" in (run.others_sentence or "")
    assert "changed label" not in run.headline
    low, high = run.population(1, others=True)(0.05)
    assert (low, high) == run.others_curve(1).population()(0.05)


def test_a_run_is_read_back(run: ws.Evaluation) -> None:
    assert run.folder is not None
    again = ws.Evaluation.load(run.folder)
    assert again.others == run.others
    assert again.others_sentence == run.others_sentence
    kept = summary(again)["others"]
    assert kept["headline"] == run.others_sentence and len(kept["threats"]) == 3
    x, y = ws.zoo.data("digits")
    assert run.verify(ws.zoo.load("digits-mlp"), (x[:N], y[:N])).problems == ()
    lie = replace(run, others={**run.others, "subpopulation": 1.0})
    assert any("in memory" in text for text in lie.verify(ws.zoo.load("digits-mlp")).problems)


def test_a_plain_run_keeps_no_word_of_it() -> None:
    x, y = ws.zoo.data("digits")
    plain = ws.evaluate(
        ws.zoo.load("digits-mlp"),
        (x[:4], y[:4]),
        ws.Threat(INF, 1, 0.05),
        ["nearest"],
        passes=5,
        look=False,
    )
    assert not plain.others and "others" not in plain.info and plain.others_sentence is None
    assert as_json(plain)["others"] is None and "Other people" not in model_card(plain)
    assert "others" not in entry(plain)


def test_every_report_speaks_of_it(
    run: ws.Evaluation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_evaluation(run)
    shown = capsys.readouterr().out
    certified, attacked = run.others_curve(1)(0.05)
    for text in (shown, model_card(run), report(run)):
        assert "a changed label costs 0.1" in text
        assert f"{100 * attacked:.1f}" in text
    found = as_json(run)["others"]
    assert (found["label_cost"], found["subpopulation"]) == (0.1, 0.8)
    assert found["threats"][0]["certified"] == certified
    assert sum(group["samples"] for group in found["groups"]) == N
    feed = entry(run)["others"]
    assert set(feed["orders"]) == {"1", "2", "inf"}
    assert feed["orders"]["1"]["certified"] <= 100 * certified
    to_samples(run, tmp_path / "samples.csv")
    with open(tmp_path / "samples.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    mass = sum(float(r["weight"]) * float(r["others density p=1 eps=0.05"]) for r in rows)
    assert math.isclose(mass, 1.0, abs_tol=1e-9)
    error = sum(
        float(r["weight"])
        * float(r["others density p=1 eps=0.05"])
        * (1.0 if r["label"] != r["predicted"] else float(r["others share p=1 eps=0.05"]))
        for r in rows
    )
    assert math.isclose(1 - error, attacked, abs_tol=1e-9)


def test_the_schema_knows_it(run: ws.Evaluation) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    verdict = run.require("accuracy>=0 at eps 0.05 subpopulation 0.8 label-cost 0.3 groups proved")
    text = json.dumps(as_json(run, [verdict]))
    jsonschema.validate(json.loads(text), json.loads(schema_text()))


def test_requirements_may_speak_of_it(run: ws.Evaluation) -> None:
    at = "at eps 0.05 order 1"
    both = f"accuracy>=0.1 {at} subpopulation 0.8 label-cost 0.3 proved"
    curve = replace(run.curve(1), subpopulation=0.8, label_cost=0.3)
    assert run.require(both).value == curve(0.05)[0]
    assert "a changed label costs 0.3" in run.require(both).sentence
    grouped = run.require(f"accuracy>=0.1 {at} groups proved")
    expected = replace(run.curve(1), groups=run.others["groups"])
    assert grouped.value == expected(0.05)[0]
    sure = run.require(f"accuracy>=0 {at} subpopulation 0.8 confidence 0.9 proved")
    part = replace(run.curve(1), subpopulation=0.8)
    assert sure.value == part.population_at(ws.Threat(INF, 1, 0.05), 0.9)[0]
    attacked = run.require(f"accuracy>=0 {at} label-cost 0.3 attacked").value
    noisy = replace(run.curve(1), label_cost=0.3)
    assert math.isclose(attacked, noisy(0.05)[1], abs_tol=1e-9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("accuracy>=0.5 subpopulation 0.8 clean", "is for an accuracy with an eps"),
        ("accuracy>=0.5 at eps 0.1 groups class 3 proved", "groups are for all classes"),
        ("accuracy>=0.5 at eps 0.1 subpopulation 2 proved", "subpopulation is '2'"),
        ("accuracy>=0.5 at eps 0.1 label-cost 0 proved", "label_cost is '0'"),
    ],
)
def test_requirements_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ws.InputError, match=words):
        parse_requirement(text)


def test_a_run_without_groups_cannot_answer_for_them(run: ws.Evaluation) -> None:
    plain = replace(run, others={})
    with pytest.raises(ws.InputError, match="needs groups"):
        plain.require("accuracy>=0.5 at eps 0.1 groups proved")


def test_threats_may_say_it_themselves() -> None:
    x, y = ws.zoo.data("digits")
    model = ws.zoo.load("digits-mlp")
    options: dict[str, Any] = {"passes": 5, "look": False}
    threat = ws.Threat(INF, 1, 0.05, label_cost=0.2)
    found = ws.evaluate(model, (x[:4], y[:4]), threat, ["nearest"], **options)
    assert found.others["label_cost"] == 0.2 and found.threat == ws.Threat(INF, 1, 0.05)
    both = [threat, ws.Threat(INF, 2, 0.05, label_cost=0.3)]
    with pytest.raises(ws.InputError, match="differ in label_cost"):
        ws.evaluate(model, (x[:4], y[:4]), both, ["nearest"], **options)
    groups = ws.Groups([0, 1, 1])
    with pytest.raises(ws.InputError, match="3 entries for 4 samples"):
        ws.evaluate(model, (x[:4], y[:4]), PLAIN, groups=groups, **options)


def command(tmp_path: Path, *words: str) -> int:
    options = ["--eps", "0.05", "--order", "1", "--attacks", "nearest", "--passes", "5"]
    place = ["-n", "12", "--no-look", "--quiet", "--out", str(tmp_path / "run")]
    return main(["evaluate", "digits-mlp", *options, *place, *words])


def test_the_command_line_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--label-cost", "0.1", "--subpopulation", "4/5", "--groups", "classes"]
    asked = "accuracy>=0 at eps 0.05 subpopulation 0.8 label-cost 0.3 groups attacked"
    ranges = ["--group-weights", "0.01:0.5", "5=0.1:0.2", "--require", asked]
    assert command(tmp_path, *words, *ranges) == 0
    found = ws.Evaluation.load(tmp_path / "run")
    groups = found.others["groups"]
    assert isinstance(groups, ws.Groups)
    place = groups.names.index("5")
    assert (groups.low[place], groups.high[place]) == (0.1, 0.2)
    assert groups.low[place - 1] == 0.01
    assert "with others" in capsys.readouterr().out


def test_groups_come_from_files(tmp_path: Path) -> None:
    ids = ["a", "b", "c"] * 4
    (tmp_path / "groups.txt").write_text("\n".join(ids) + "\n")
    assert command(tmp_path, "--groups", str(tmp_path / "groups.txt")) == 0
    groups = ws.Evaluation.load(tmp_path / "run").others["groups"]
    assert list(groups.ids) == ids


def test_groups_come_from_a_column(tmp_path: Path) -> None:
    x, y = ws.zoo.data("digits")
    table = tmp_path / "table.csv"
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"p{i}" for i in range(64)), "y"])
        writer.writerows([*row, int(label)] for row, label in zip(x[:12].flatten(1).tolist(), y))

    assert read_column(table, "y") == [str(int(label)) for label in y[:12]]
    with pytest.raises(ws.InputError, match="unknown column"):
        read_column(table, "hospital")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--label-cost", "0"], "label_cost is '0'"),
        (["--subpopulation", "1.5"], "subpopulation is '1.5'"),
        (["--group-weights", "0.1:0.5"], "--group-weights needs --groups"),
        (["--groups", "classes", "--group-weights", "0.1:0.2:0.3"], "LOW:HIGH"),
        (["--groups", "classes", "--group-weights", "77=0:1"], "no samples"),
        (["--groups", "classes", "--group-weights", "0:0.01"], "below 1"),
        (["--groups", "hospital"], "no file"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *words) == 2
    assert said in capsys.readouterr().err


def test_a_column_of_words_is_no_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With -n, too; a file of groups is for the samples that are asked for, or for all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("two.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(2, 2)\n")
    rows = [f"{i / 10},{'red' if i % 3 else 'blue'},{i / 20},{i % 2}" for i in range(10)]
    Path("t.csv").write_text("a,colour,b,label\n" + "\n".join(rows) + "\n")
    words = "evaluate two:net --data t.csv --eps 0.1 --order 1 --attacks wda --no-look --quiet"

    def run(*more: str) -> int:
        return main([*words.split(), *more])

    assert run("--groups", "colour", "-n", "5", "--out", "run") == 0
    groups = ws.Evaluation.load("run").others["groups"]
    assert list(groups.ids) == ["blue", "red", "red", "blue", "red"]
    Path("t.csv").write_text("a,b,label\n" + "\n".join(f"{i / 10},0,{i % 2}" for i in range(10)))
    for lines, code in ((5, 0), (10, 0), (11, 2), (7, 2)):
        Path("groups.txt").write_text("\n".join("ab"[i % 2] for i in range(lines)))
        assert run("--groups", "groups.txt", "-n", "5") == code
