"""`wassail init`, `evaluate --config`, `wassail completion`, and lines without a terminal."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import wassail as ws
from wassail import progress
from wassail.cli.parser import SHELLS, main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = (t.numpy()[:6] for t in ws.zoo.data())
    np.savez("data.npz", x=x, y=y)


def test_a_file_of_init_runs_as_it_is_and_says_the_same_as_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init"]) == 0
    text = Path("wassail.toml").read_text()
    assert 'model = "digits-cnn-adv"' in text and "# order = [" in text
    changes = {
        'model = "digits-cnn-adv"': 'model = "digits-mlp"',
        'eps = ["8/255"]': 'eps = ["0.1"]',
        "# no-look = false": "no-look = true",
        '# order = ["1", "2", "inf"]': 'order = [1, "inf"]',
        '# data = "digits"': 'data = "data.npz"',
        '# attacks = ["wda", "wda++", "nearest"]': 'attacks = ["fgsm"]',
        '# out = ""': 'out = "one"',
        "# seed = 0": "seed = 3",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    Path("mine.toml").write_text(text)
    assert main(["evaluate", "--config", "mine.toml"]) == 0
    words = "evaluate digits-mlp --eps 0.1 --no-look --order 1 inf --data data.npz"
    assert main(f"{words} --attacks fgsm --seed 3 --out two".split()) == 0
    first = ws.Evaluation.load("one")
    second = ws.Evaluation.load("two")
    assert first.rows[0].accuracy == second.rows[0].accuracy and first.info["seed"] == 3
    # the command line goes first
    assert main(["evaluate", "--config=mine.toml", "--out", "three", "--seed", "4"]) == 0
    assert ws.Evaluation.load("three").info["seed"] == 4
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epsilon = 3", "unknown option of 'bad.toml', 'epsilon'"),
        ("seed = 2.5", "seed in 'bad.toml' is 2.5: write a whole number"),
        ("resume = 1", "resume in 'bad.toml' is 1: write true or false"),
        ("norm = [1, 2]", "norm in 'bad.toml' is [1, 2]"),
        ("norm = ", "'bad.toml' is no TOML file"),
        ("seed = 1", "required: model, --eps"),
        ('model = "digits-mlp"\neps = "-1"', "eps is '-1'"),
    ],
)
def test_a_bad_file_is_one_sentence(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.toml").write_text(text)
    try:
        code = main(["evaluate", "--config", "bad.toml"])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code == 2 and words in said and said.count("\n") == 1, said


HARM = "import pathlib\npathlib.Path('hurt').touch()\ndef make():\n    pass\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('model = "payload:make"', "which runs code: if the file is your own, add --trust"),
        ('model = "os:system(./payload)"', "which runs code"),
        ('data = "payload:make"', "data in 'bad.toml' is 'payload:make', which runs code"),
        ("trust = true", "trust in 'bad.toml' asks for trust"),
        ('ray = "ray://far:10001"', "ray in 'bad.toml' asks for trust"),
        ('out = "../elsewhere"', "which is not below the current folder: give --out"),
        ('write = ["/tmp/card.md"]', "which is not below the current folder: give --write"),
        ('write = ["link/j.xml"]', "which is not below the current folder: give --write"),
        ('out = "."', "which is not below the current folder"),
        ("a" + ".a" * 20_000 + " = 1", "nests its keys"),
        ("x" * 70_000, "a configuration has at most 65,536"),
    ],
    ids=lambda text: text[:24],
)
def test_a_file_of_a_stranger_runs_and_overwrites_nothing(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("payload.py").write_text(HARM)
    Path("link").symlink_to("/tmp")
    good = 'eps = "0.1"\nn = 3\nattacks = ["fgsm"]\norder = ["inf"]\n'
    good += "" if "model" in text else 'model = "digits-mlp"\n'
    Path("bad.toml").write_text(good + text + "\n")
    assert main(["evaluate", "--config", "bad.toml"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1, said
    assert not Path("hurt").exists()


def test_code_in_a_file_needs_trust_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("payload.py").write_text(HARM)
    Path("mine.toml").write_text('model = "payload:make"\neps = "0.1"\ntrust = true\n')
    assert main(["evaluate", "--config", "mine.toml"]) == 2 and not Path("hurt").exists()
    assert main(["evaluate", "--config", "mine.toml", "--trust"]) == 2 and Path("hurt").exists()
    assert "must return the model" in capsys.readouterr().err


def test_a_pipe_is_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe.toml")
    assert main(["evaluate", "--config", "pipe.toml"]) == 2
    assert "it is a pipe or a device" in capsys.readouterr().err


def test_init_writes_over_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "data.npz"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["evaluate", "--config", "none.toml"]) == 2
    assert "`wassail init none.toml` writes a file" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_names_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("evaluate", "compare", "figures", "landmarks", "completion"):
        assert word in script


def test_completion_without_shtab_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "wassail[completion]" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("eval",), ["evaluate"]),
        (("paper", "fi"), ["figures"]),
        (("evaluate", "digits-mlp", "--grad"), ["--gradients"]),
        (("evaluate", "da"), ["data.npz"]),
    ],
)
def test_bash_completes(
    words: tuple[str, ...], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    main(["completion", "bash"])
    Path("script").write_text(capsys.readouterr().out)
    typed = " ".join(f"'{word}'" for word in ("wassail", *words))
    ask = f". ./script; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _shtab_wassail; "
    ask += 'echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected and not done.stderr


def test_lines_every_few_seconds_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.progress_bar(True, "evaluation") as report:
        for share in (0.0, 0.1, 0.2, 0.4, 0.8):
            report(share)
            now[0] += 3
    assert capsys.readouterr().err == (
        "evaluation: 20 % after 6 s, about 24 s left\nevaluation: 80 % after 12 s, about 3 s left\n"
    )
