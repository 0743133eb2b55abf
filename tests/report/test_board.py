"""`wassail board`: a site from stored runs, whose rows can be computed again."""

import json
import shlex
from pathlib import Path

import pytest

import wassail as ws
from wassail.cli.parser import main
from wassail.paper.published import PUBLISHED
from wassail.report.board import verify_command, write_board
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
        words = shlex.split(verify_command(ws.Evaluation.load(folder)))
        assert words[:3] == ["wassail", "verify", folder.name]
        assert main(words[1:]) == 0, capsys.readouterr()
    assert words[-4:] == ["--mean", "0.1", "--std", "0.9"]


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ws.InputError, match="there is no run for the board"):
        write_board([], tmp_path)
