"""`wassail evaluate --smooth`."""

import json
from pathlib import Path

import pytest

from wassail.cli import main

ARGS = ["evaluate", "digits-mlp", "--order", "1", "-n", "6"]
ARGS += ["--quiet", "--threads", "1"]
NOISE = ["--smooth", "0.1"]


def test_votes_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    assert main([*ARGS, "--smooth", "0.1:draws=100", "--passes", "10", *out]) == 0
    shown = capsys.readouterr().out
    assert "SMOOTHED" in shown and "Kumar" in shown
    assert main([*ARGS, "--smooth", "0.1:draws=200", "--passes", "0", *out]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*ARGS, "--smooth", "0.1:draws=200", "--passes", "0", "--resume", *out]) == 0
    rows = json.loads((tmp_path / "smoothing.json").read_text())
    assert rows["draws"] == 200
    assert all(row["random certified"] >= row["Kumar"] for row in rows["rows"])
    changed = ["evaluate", "digits-cnn", *ARGS[2:]]
    assert main([*changed, "--smooth", "0.1:draws=200", "--passes", "0", "--resume", *out]) == 2
    assert "another model" in capsys.readouterr().err


EVALUATE = [
    *["evaluate", "digits-mlp", "--eps", "0.1", "-n", "6"],
    *["--quiet", "--threads", "1"],
]


def test_a_page_and_votes_that_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page that says what the figures are for, votes that grow."""
    small = ["--smooth", "0.1:draws=200", "--passes", "12"]
    out = ["--out", str(tmp_path / "b")]
    words = [*EVALUATE, "--certify", "smoothing", "--order", "1", *out]
    assert main([*words, *small]) == 0
    shown = capsys.readouterr().out
    page = tmp_path / "b" / "report.html"
    text = page.read_text()
    assert "smoothed" in text and "SMOOTHED" in shown and "SMOOTHED" in text
    assert (tmp_path / "b" / "sandwich.svg").exists()
    page.unlink()
    assert main(["report", str(tmp_path / "b")]) == 0
    assert page.read_text() == text
    before = (tmp_path / "b" / "attack.safetensors").read_bytes()
    assert (
        main([*words, "--certify", "--smooth", "0.1:draws=400", "--passes", "12", "--resume"]) == 0
    )
    grown = json.loads((tmp_path / "b" / "smoothing.json").read_text())
    assert (grown["draws"], grown["first draws"]) == (400, 200)
    assert (tmp_path / "b" / "attack.safetensors").read_bytes() == before
    capsys.readouterr()
    for more, reason in (
        (["--smooth", "0.1:draws=500", "--passes", "12"], "multiple"),
        (["--smooth", "0.1:draws=400", "--passes", "13"], "other settings"),
        (["--smooth", "0.1:draws=400", "--passes", "12", "--seed", "1"], "other noise"),
    ):
        assert main([*words, *more, "--resume"]) == 2
        assert reason in capsys.readouterr().err
    (tmp_path / "b" / "smoothing.json").write_text('{"rows": 3}')
    assert main(["report", str(tmp_path / "b")]) == 2
    assert "run it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--norm", "inf"],
        ["--certify", "crown"],
        ["--attacks", "apgd"],
        ["--gap", "1"],
        ["--effort", "1"],
        ["--json"],
        ["--workers", "2"],
        ["--passes", "-1"],
        ["--passes", "auto"],
        ["--smooth", "0"],
    ],
)
def test_evaluate_refuses_what_is_not_for_smoothing(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*EVALUATE, *NOISE, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wassail: ") and error.count("\n") == 1


def test_noise_has_budgets_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "digits-mlp", "-n", "3", "--passes", "0", "--quiet"]
    assert (
        main([*words, "--smooth", "0.25:draws=100", "--certify", "smoothing", "--order", "1"]) == 0
    )
    assert "  0.05 " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(words)
    assert "--eps" in capsys.readouterr().err


def test_smoothing_needs_noise(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "digits-mlp", "--eps", "0.1", "--certify", "smoothing"]
    assert main(words) == 2
    assert "--smooth" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--norm", "inf"],
        ["--smooth", "0.1:draws=150"],
        ["--smooth", "0.1:confidence=2"],
        ["--resume"],
        ["--smooth", "-1"],
    ],
)
def test_bad_input_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGS, *NOISE, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("wassail: ") and error.count("\n") == 1
