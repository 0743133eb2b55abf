"""`wassail smooth`."""

import json
from pathlib import Path

import pytest

from wassail.cli import main

ARGS = ["smooth", "digits-mlp", "--sigma", "0.1", "-n", "6", "--quiet", "--threads", "1"]


def test_votes_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    assert main([*ARGS, "--draws", "100", "--passes", "10", *out]) == 0
    shown = capsys.readouterr().out
    assert "SMOOTHED" in shown and "Kumar" in shown
    assert main([*ARGS, "--draws", "200", "--passes", "0", *out]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*ARGS, "--draws", "200", "--passes", "0", "--resume", *out]) == 0
    rows = json.loads((tmp_path / "smoothing.json").read_text())
    assert rows["draws"] == 200
    assert all(row["random certified"] >= row["Kumar"] for row in rows["rows"])
    changed = ["smooth", "digits-cnn", *ARGS[2:]]
    assert main([*changed, "--draws", "200", "--passes", "0", "--resume", *out]) == 2
    assert "another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--norm", "inf"], ["--draws", "150"], ["--confidence", "2"], ["--resume"], ["--sigma", "-1"]],
)
def test_bad_input_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGS, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wassail: ") and error.count("\n") == 1
