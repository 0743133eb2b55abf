"""`wassail board`: a site from stored runs, whose rows can be computed again."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

import wassail as ws
from wassail.cli.parser import main
from wassail.paper.published import PUBLISHED
from wassail.report.again import again
from wassail.report.board import write_board
from wassail.threat import ceil_percent, floor_percent

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One network in two norms, certified in one, and one with a hostile name."""
    folder = tmp_path_factory.mktemp("runs")
    words = "-n 8 --order 1 inf --attacks fgsm --no-look --quiet --threads 1"
    for name, norm, more in (
        ("good", "inf", ["--certify", "crown", "--landmarks"]),
        ("good", "2", []),
        (HOSTILE, "inf", ["--mean", "0.1", "--std", "0.9"]),
    ):
        out = folder / f"{len(list(folder.iterdir()))}-run"
        command = f"evaluate digits-mlp --eps 0.1 --norm {norm} {words} --out {out}".split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["wassail", *command, *more])
            assert main([*command, "--name", name, *more]) == 0
    return folder


def test_a_site_with_a_row_for_each_run(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = sorted(map(str, runs.iterdir()))
    assert main(["board", *folders, "-o", str(tmp_path / "site")]) == 0
    assert "index.html" in capsys.readouterr().out
    index = (tmp_path / "site" / "index.html").read_text()
    assert HOSTILE not in index and "2 networks, 3 runs" in index
    assert index.count("checkpoint not available here") == len(PUBLISHED)
    feed = json.loads((tmp_path / "site" / "board.json").read_text(), parse_constant=pytest.fail)
    assert len(feed["runs"]) == 3 and len(feed["published"]) == len(PUBLISHED)
    for entry, folder in zip(feed["runs"], folders):
        run = ws.Evaluation.load(folder)
        for order, figures in entry["orders"].items():
            certified, attacked = run.curve(order)(0.1)
            assert figures["attacked"] == float(ceil_percent(attacked))
            proved = None if run.radii is None else float(floor_percent(certified))
            assert figures["certified"] == proved
    assert feed["runs"][0]["landmarks"] and str(runs) not in json.dumps(feed)
    for link in [*(tmp_path / "site" / "models").iterdir()]:
        text = link.read_text()
        assert f'href="models/{link.name}"' in index and "wassail verify" in text
        assert HOSTILE not in text
    assert len(list((tmp_path / "site" / "runs").iterdir())) == 3
    again = tmp_path / "again"
    assert main(["board", *folders, "-o", str(again)]) == 0
    assert (again / "index.html").read_text() == index


def test_the_printed_command_computes_a_row_again(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs)
    for folder in sorted(runs.iterdir()):
        way = again(ws.Evaluation.load(folder))
        words = shlex.split(way.command)
        assert words[:3] == ["wassail", "verify", folder.name] and not way.supply
        assert main(words[1:]) == 0, capsys.readouterr()
    assert words[-4:] == ["--mean", "0.1", "--std", "0.9"]


SPELLINGS = {
    "equals": ["--mean=0.5", "--std=0.5", "-n", "6"],
    "before -n": ["--std", "0.5", "--mean", "0.5", "-n", "6"],
    "config": ["--config", "run.toml"],
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_the_command_has_the_options_however_they_were_given(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("mean = [0.5]\nstd = [0.5]\nn = 6\n")
    words = ["evaluate", "digits-mlp", "--eps", "0.1", "--order", "inf", "--attacks", "fgsm"]
    words += ["--no-look", "--quiet", "--out", "run", *SPELLINGS[case]]
    monkeypatch.setattr("sys.argv", ["wassail", *words])
    assert main(words) == 0
    way = again(ws.Evaluation.load("run"))
    assert way.command == "wassail verify run digits-mlp --data digits --mean 0.5 --std 0.5"
    assert main(shlex.split(way.command)[1:]) == 0, capsys.readouterr()


DIGEST = "ab" * 32
FORGED = {
    "code": {"model": {"source": "os:system(./stranger/log/payload)"}},
    "code as a name": {"model": {"source": None, "name": "os:system(touch hurt)"}},
    "trust": {"model": {"source": "net.onnx --trust"}},
    "file": {"model": {"source": "../stranger/net.onnx", "files": {"net.onnx": DIGEST}}},
    "weights": {"model": {"files": {"theirs.pt": DIGEST}}},
    "path of robustbench": {"model": {"source": "robustbench:../../theirs"}},
    "robustbench elsewhere": {
        "model": {"source": "robustbench:Good", "kind": "robustbench", "dataset": "x;touch hurt"}
    },
    "hub of timm": {"model": {"source": "timm:hf_hub:stranger/net", "files": {}}},
    "shell": {"model": {"source": "digits-mlp; touch hurt"}},
    "mean": {"model": {"mean": "0.5 --trust"}},
    "means": {"model": {"mean": [0.5, "$(touch hurt)"]}},
    "endless mean": {"model": {"mean": [float("inf")]}},
    "key": {"model": {"logits": "--models-dir=stranger"}},
    "dunder": {"model": {"logits": "__reduce__"}},
    "not a record": {"model": ["digits-mlp"]},
    "data of code": {"data": "os:system(./stranger/payload)"},
    "data in a file": {"data": "/home/stranger/secret/x.npz"},
    "data as a split": {"data": "digits:$(touch hurt)"},
    "another folder": {"folder": "--trust"},
    "folder with spaces": {"folder": "a; touch hurt"},
    "old command": {"command": ["evaluate", "m:f", "--trust", "--models-dir", "stranger"]},
}


@pytest.mark.parametrize("case", FORGED)
def test_nothing_that_a_run_says_becomes_code_or_a_path(case: str, runs: Path) -> None:
    run = ws.Evaluation.load(sorted(runs.iterdir())[0])
    forged = FORGED[case]
    info = dict(run.info)
    model = forged.get("model", {})
    info["model"] = {**info["model"], **model} if isinstance(model, dict) else model
    info["command"] = forged.get("command", [])
    changed = {"info": info, "data": forged.get("data", run.data)}
    if "folder" in forged:
        changed["folder"] = str(runs / forged["folder"])
    way = again(dataclasses.replace(run, **changed))
    words = shlex.split(way.command)
    folder = sorted(runs.iterdir())[0].name
    known = {"wassail", "verify", folder, "RUN", "MODEL", "DATA", "--data", "digits", "digits-mlp"}
    assert set(words) <= known, words
    assert words[3] == "MODEL" or "model" not in forged
    assert words[5] == "DATA" or "data" not in forged
    for word in ("MODEL", "DATA", "RUN"):
        assert (word in words) == any(text.startswith(f"{word}:") for text in way.supply)
    assert "/home" not in " ".join(way.supply)
    if case == "file":
        assert f"the file 'net.onnx' has SHA-256 {DIGEST}" in way.supply[0]


def test_what_the_reader_supplies_is_on_the_page_and_in_the_feed(
    runs: Path, tmp_path: Path
) -> None:
    run = ws.Evaluation.load(sorted(runs.iterdir())[0])
    model = {**run.info["model"], "source": "<b>m:f</b>", "weights": DIGEST}
    forged = dataclasses.replace(run, info={**run.info, "model": model})
    write_board([forged], tmp_path)
    (page,) = (tmp_path / "models").iterdir()
    text = page.read_text()
    assert "MODEL: the model, from a source that you trust" in text and DIGEST in text
    assert "m:f" not in text and "<b>m" not in text
    (entry,) = json.loads((tmp_path / "board.json").read_text())["runs"]
    assert entry["verify"].split()[3] == "MODEL" and DIGEST in entry["supply"][0]


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ws.InputError, match="there is no run for the board"):
        write_board([], tmp_path)
