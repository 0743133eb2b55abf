"""The paper's table: what a model's name may say, the columns against the attacks themselves,
and runs that go on.
"""

import csv
import io
import math
from typing import Any

import pytest

from wassail import zoo
from wassail.attacks.apgd import apgd
from wassail.attacks.nearest import nearest
from wassail.attacks.wda import wda
from wassail.cli.parser import main
from wassail.errors import InputError
from wassail.paper import table as table_module
from wassail.paper.published import (
    CLAIMS,
    COLUMNS,
    PUBLISHED,
    Claim,
    parse_budgets,
    published,
    usual_eps,
)
from wassail.paper.table import Cell, Entry, Line, Table, safe_name, table
from wassail.threat import Threat
from wassail.transport.distribution import allocate
from wassail.zoo.source import Source

ATTACKS = ("wda", "wda++", "nearest", "w-pgd", "apgd-ce")


def test_the_papers_figures() -> None:
    assert len(PUBLISHED) == 20 and all(len(line.figures) == 12 for line in PUBLISHED)
    linf, l2 = (
        published("Sehwag2021Proxy_R18", "cifar10", norm, eps)
        for norm, eps in ((math.inf, 8 / 255), (2.0, 0.5))
    )
    assert linf is not None and l2 is not None
    assert list(linf.figures.values()) == [
        84.59,
        54.65,
        15.23,
        46.58,
        63.86,
        27.38,
        58.40,
        57.66,
        56.30,
        55.54,
        55.50,
        55.50,
    ]
    assert list(l2.figures.values()) == [
        89.76,
        69.75,
        48.40,
        65.02,
        77.68,
        58.64,
        75.24,
        75.32,
        74.69,
        74.41,
        74.41,
        74.40,
    ]
    assert (
        published("Sehwag2021Proxy_R18", "cifar10", math.inf, 4 / 255) is None
        and published(None, "cifar10", 2.0, 0.5) is None
    )
    hundred = published("Wang2023Better_WRN-28-10", "cifar100", math.inf, 8 / 255)
    assert hundred is not None and hundred.figures["wda++-1"] == 7.45
    # WDA with kappa = 2 is a mixture of clean and moved points, and so never below half of clean.
    assert all(line.figures["wda-1"] >= line.figures["clean"] / 2 for line in PUBLISHED)


def test_claims_are_counted() -> None:
    paper = [line.figures for line in PUBLISHED]
    first, second, third = CLAIMS[:3]
    assert first.count(paper) == (20, 0, 0) and second.count(paper) == (20, 0, 0)
    assert third.count(paper) == (19, 0, 1)  # Rony2019Decoupling: 66.59 against 66.58
    claim = Claim("a is below b and c", "a", ("b", "c"))
    lines = [
        {"a": 1.0, "b": 2.0, "c": 3.0},
        {"a": 2.0, "b": 2.0, "c": 3.0},
        {"a": 2.5, "b": 3.0, "c": 2.0},
        {"a": 1.0, "b": 2.0},
    ]
    assert [claim.verdict(line) for line in lines] == [-1, 0, 1, None] and claim.count(lines) == (
        1,
        1,
        1,
    )


def test_what_a_models_name_may_say() -> None:
    entry = Entry.parse(
        "zoo:load(net)@inf=2/255@2=0.25@data=zoo:images(cifar10)@mean=0.5,1/2@weights=a@b.pt"
    )
    assert (
        entry.name
        == "zoo:load(net)@inf=2/255@2=0.25@data=zoo:images(cifar10)@mean=0.5,1/2@weights=a@b.pt"
    )  # b.pt is no option
    entry = Entry.parse(
        "zoo:load(net)@inf=2/255@l2=0.25@data=zoo:images(cifar10)@mean=0.5,1/2@std=1@weights=b.pt"
    )
    assert (
        entry.name == "zoo:load(net)"
        and entry.eps == {math.inf: 2 / 255, 2.0: 0.25}
        and entry.data == "zoo:images(cifar10)"
    )
    assert (
        entry.options == {"mean": [0.5, 0.5], "std": [1.0], "weights": "b.pt"}
        and entry.robustbench is None
    )
    assert Entry.parse("robustbench:Ding2020MMA").robustbench == "Ding2020MMA"
    assert Entry.parse("hf:someone/net@main").name == "hf:someone/net@main"
    with pytest.raises(InputError, match="unknown option of a model 'ep'"):
        Entry.parse("digits-mlp@ep=1")
    with pytest.raises(InputError, match="eps 'x'"):
        Entry.parse("digits-mlp@inf=x")


def test_budgets_and_folders() -> None:
    assert parse_budgets(["inf=2/255", "2=0.25"], [2.0]) == {math.inf: 2 / 255, 2.0: 0.25}
    assert (
        parse_budgets(["0.1", "1"], [math.inf, 2.0]) == {math.inf: 0.1, 2.0: 1.0}
        and parse_budgets([], [2.0]) == {}
    )
    with pytest.raises(InputError, match="1 budgets for 2 norms"):
        parse_budgets(["0.1"], [math.inf, 2.0])
    assert (
        usual_eps("digits-mlp", math.inf) == 0.1
        and usual_eps("other", math.inf, "imagenet") == 4 / 255
    )
    with pytest.raises(InputError, match="no usual budget"):
        usual_eps("other", 1.0)
    assert safe_name("digits-mlp") == "digits-mlp"
    names = {
        safe_name(name) for name in ("../../etc", "a/b", "a:b", "a b", "..", "x" * 300, "<script>")
    }
    assert len(names) == 7 and all(
        name.strip("-.") and "/" not in name and len(name) < 80 for name in names
    )
    assert not any(name.startswith(".") for name in names)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A table of one embedded network, with a RobustBench model that is not there in front of
    it.
    """
    folder = tmp_path_factory.mktemp("table")
    said: list[str] = []
    seen = []
    found = table(
        ["robustbench:Nobody2020Nothing@data=digits", "digits-mlp@inf=0.05"],
        None,
        ["inf"],
        folder=folder,
        n=12,
        attacks=ATTACKS,
        passes=60,
        models_dir="nowhere",
        begin=said.append,
        after=lambda so_far: seen.append(len(so_far.rows)),
    )
    return folder, found, said, seen


def test_columns_are_the_attacks_own(made) -> None:
    _, found, said, seen = made
    missing, line = found.rows
    assert (
        missing.problem is not None
        and "nowhere/cifar10/Linf/Nobody2020Nothing.pt" in missing.problem
    )
    assert found.done == (line,) and seen == [1, 2] and said[1] == "[2/2] digits-mlp, linf 0.05"
    model, (x, y) = zoo.load("digits-mlp"), zoo.data("digits")
    x = x[:12]
    y = y[:12]
    figures = line.accuracies
    flips = nearest(model, x, y, "inf", passes=60)
    own = {
        "wda-1": wda(model, x, y, Threat("inf", 1, 0.05), kappa=2),
        "wda-2": wda(model, x, y, Threat("inf", 2, 0.05), kappa=2),
        "wda-inf": wda(model, x, y, Threat("inf", "inf", 0.05), kappa=1),
        "apgd-ce": apgd(model, x, y, Threat("inf", "inf", 0.05), loss="ce"),
        **{f"nearest-{order}": allocate(flips, 0.05, order) for order in ("1", "2", "inf")},
    }
    for key, result in own.items():
        assert figures[key] == pytest.approx(result.accuracy, abs=1e-12), key
    assert figures["clean"] == pytest.approx(own["wda-1"].clean_accuracy, abs=1e-12)
    for order in ("1", "2", "inf"):
        rivals = [
            figures[c.key]
            for c in COLUMNS
            if f"{c.order:g}" == order and c.attack != "all" and c.key in figures
        ]
        assert figures[f"all-{order}"] <= min(rivals)
    assert "autoattack" not in figures


def test_files_of_the_table(made) -> None:
    folder, found, _, _ = made
    rows = list(csv.DictReader(io.StringIO((folder / "table.csv").read_text())))
    assert (
        rows[0]["problem"].startswith("'robustbench:Nobody2020Nothing'")
        and rows[0]["accuracy"] == ""
    )
    by_column = {row["column"]: row for row in rows[1:]}
    assert float(by_column["wda++-2"]["accuracy"]) == pytest.approx(
        100 * found.done[0].accuracies["wda++-2"], abs=1e-4
    )
    assert (
        float(by_column["wda++-2"]["low"])
        <= float(by_column["wda++-2"]["accuracy"])
        <= float(by_column["wda++-2"]["high"])
    )
    text = (folder / "table.md").read_text()
    assert (
        text == found.markdown()
        and text.count("\n| `digits-mlp`") == 1
        and "- `robustbench:Nobody2020Nothing`" in text
    )
    best = min(found.done[0].accuracies[k] for k in ("wda-1", "wda++-1", "nearest-1"))
    assert f"**{100 * best:.2f}**" in text
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines if line.startswith("Omega")] == [
        "Omega_1",
        "Omega_2",
        "Omega_inf",
    ]
    assert any(
        line.startswith("digits-mlp, linf 0.05") and " - " in line for line in lines
    )  # AA was not asked for


def test_a_table_goes_on(made) -> None:
    folder, found, _, _ = made
    with pytest.raises(InputError, match="add --resume"):
        table(
            ["digits-mlp@inf=0.05"], None, ["inf"], folder=folder, n=12, attacks=ATTACKS, passes=60
        )
    again = table(
        ["digits-mlp@inf=0.05"],
        None,
        ["inf"],
        folder=folder,
        n=12,
        attacks=(*ATTACKS, "apgd-dlr"),
        passes=60,
        resume=True,
    )
    assert again.done[0].accuracies.items() >= {
        (k, v) for k, v in found.done[0].accuracies.items() if not k.startswith("all")
    }
    assert "apgd-dlr" in again.done[0].accuracies
    other = table(
        ["digits-mlp@inf=0.05"],
        None,
        ["inf"],
        folder=folder,
        n=11,
        attacks=ATTACKS,
        passes=60,
        resume=True,
    )
    assert (
        other.rows[0].problem is not None and "samples" in other.rows[0].problem
    )  # other data: refused, and the line says so


def test_published_stands_beside_ours(tmp_path, monkeypatch) -> None:
    model = zoo.load("digits-mlp")
    asked = {}
    monkeypatch.setattr(
        table_module,
        "open_model",
        lambda name, **options: asked.update(options) or Source(model, name, "robustbench", {}),
    )
    name = "robustbench:Sehwag2021Proxy_R18"
    found = table([name], "digits", ["2"], folder=tmp_path, n=4, attacks=["wda++"])
    assert asked["threat"] == "L2" and asked["dataset"] == "cifar10" and found.rows[0].eps == 0.5
    assert (
        found.rows[0].published["wda++-1"] == 48.40
        and "48.40" in str(found)
        and "| *published* |" in found.markdown()
    )
    assert ",48.4," in found.csv()


def test_what_cannot_be_tabled_is_told(tmp_path) -> None:
    bad: dict[str, tuple[list[str], dict[str, Any]]] = {
        "given twice": (["digits-mlp", "digits-mlp"], {}),
        "has no data of its own": (["net.onnx"], {}),
        "unknown attack of the table 'pgd'": (["digits-mlp"], {"attacks": ["pgd"]}),
        "no usual budget": (["net.onnx@data=x.npz"], {"norms": ["1"]}),
    }
    for words, (models, options) in bad.items():
        with pytest.raises(InputError, match=words):
            table(models, folder=tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_names_cannot_break_the_markdown() -> None:
    line = Line("a|b`<script>\nx", "d", 2.0, 0.5, 1, None, {"clean": Cell(0.5, (0.0, 1.0))})
    text = Table((line,)).markdown()
    assert "`a\\|b'<script> x`" in text and len(
        text.splitlines()[2].replace("\\|", "").split("|")
    ) == len(text.splitlines()[0].split("|"))


def test_command_line(tmp_path, capsys) -> None:
    folder = tmp_path / "t"
    common = [
        "--norm",
        "inf",
        "-n",
        "4",
        "--attacks",
        "wda++",
        "--threads",
        "1",
        "--quiet",
        "--out",
        str(folder),
    ]
    missing = ["robustbench:Nobody2020Nothing@data=digits", "--models-dir", str(tmp_path)]
    assert main(["paper", "table", "digits-mlp@inf=0.05", *missing, *common]) == 0
    out = capsys.readouterr().out
    assert "digits-mlp, linf 0.05" in out and f"{tmp_path}/cifar10/Linf/Nobody2020Nothing.pt" in out
    assert {"table.csv", "table.md", "index.html"} <= {path.name for path in folder.iterdir()}
    assert (
        main(["paper", "table", "digits-mlp@inf=0.05", *common]) == 2
        and "add --resume" in capsys.readouterr().err
    )
    assert main(["paper", "table", *missing, *common, "--resume"]) == 2  # no line has a figure
    assert (
        main(["paper", "table", "digits-mlp", *common, "--eps", "2=1", "1=x"]) == 2
        and "eps 'x'" in capsys.readouterr().err
    )
