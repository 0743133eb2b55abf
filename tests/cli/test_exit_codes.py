"""What a command ends with: requirements, bad input, internal errors and signals are told apart."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import wassail as ws
from wassail import errors
from wassail.cli import parser
from wassail.cli.parser import main

QUICK = ["digits-mlp", "-n", "4", "--eps", "0.3", "--order", "inf", "--attacks", "fgsm", "--quiet"]


def test_a_requirement_bad_input_and_an_internal_error_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require = "accuracy>={} at eps 0.3 order inf attacked"
    assert main(["evaluate", *QUICK, "--require", require.format(0)]) == errors.HOLDS
    assert main(["evaluate", *QUICK, "--require", require.format(1)]) == errors.FAILS
    assert main(["evaluate", *QUICK, "--require", "more"]) == errors.BAD_INPUT
    capsys.readouterr()

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr(ws, "evaluate", broken)
    assert main(["evaluate", *QUICK, "--require", require.format(0)]) == errors.INTERNAL == 70
    said = capsys.readouterr().err
    assert "Traceback" in said and "nothing to divide" in said
    last = said.splitlines()[-1]
    assert last.startswith("wassail: ZeroDivisionError inside, which says nothing about the model")


OUT = ["--out", "run"]
COMMANDS = {
    "evaluate": (["evaluate", *QUICK, *OUT], "go on with --resume."),
    "evaluate, nothing kept": (["evaluate", *QUICK], "interrupted."),
    "certify": (["certify", "digits-mlp", "-n", "2", "--eps", "0.1", *OUT], "interrupted."),
    "demo": (["demo"], "start it again to go on."),
    "table": (["paper", "table", "digits-mlp", "-n", "2", *OUT], "go on with --resume."),
    "models": (["models"], "interrupted."),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_only_a_command_that_can_go_on_says_so(
    case: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    words, end = COMMANDS[case]

    def stopped(options: object) -> int:
        raise KeyboardInterrupt

    for name in ("evaluate", "certify", "table", "demo", "models"):
        monkeypatch.setattr(parser, f"{name}_command", stopped, raising=False)
    assert main(words) == 130
    said = capsys.readouterr().err
    assert said.startswith("wassail: interrupted.") and said.rstrip().endswith(end)
    assert ("--resume" in said) == ("--resume" in end)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_with_a_sentence(sent: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from wassail.cli import parser\n"
        "def wait(options):\n"
        "    ready, say = os.pipe()\n"
        "    child = os.fork()\n"
        "    if not child: os.write(say, b'!'); time.sleep(60); os._exit(0)\n"
        "    os.read(ready, 1)\n"
        f"    os.kill(child, {int(sent)})\n"  # a child ends by the signal, without a sentence
        "    print(os.waitpid(child, 0)[1], flush=True)\n"
        "    time.sleep(60)\n"
        "parser.evaluate_command = wait\n"
        "sys.exit(parser.main(['evaluate', 'digits-mlp', '--eps', '0.1', '--out', 'run']))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),
    )
    assert child.stdout is not None
    assert int(child.stdout.readline()) == sent
    time.sleep(0.1)
    child.send_signal(sent)
    _, said = child.communicate(timeout=30)
    assert child.returncode == errors.SIGNALLED + sent
    assert said == (f"wassail: ended by {sent.name}. What was done is kept: go on with --resume.\n")


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with parser._ending():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_with_two_remedies_keeps_both_on_its_way() -> None:
    error = errors.remedies("it is red", "paint(it)", "add --paint")
    again = pickle.loads(pickle.dumps(error)).within("sample 3")
    assert str(again) == "sample 3: it is red: paint(it)."
    assert again.command == "sample 3: it is red: add --paint."
    assert errors.InputError("it is red.").command == "it is red."
