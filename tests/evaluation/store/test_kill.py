"""A run that is killed at any moment goes on where it was and ends with the same bytes; a
changed question is refused.
"""

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wassail as ws
from support.processes import fork, wait
from wassail.cli import commands, parser
from wassail.errors import InputError
from wassail.evaluation.store.store import Store

KILLS = 20
THREATS = [ws.Threat("inf", order, 0.05) for order in (1, "inf")]
SETTINGS: dict[str, Any] = {"chunk": 3, "passes": 6}
ATTACKS = ("fgsm", "nearest")
Files = dict[str, bytes]


def network(first: float = 0.0) -> torch.nn.Module:
    """A network of the plane, three classes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    ).eval()
    with torch.no_grad():
        model[0].weight[0, 0] += first
    return model


def samples(first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Seven points of the unit square, most of them as the network has them."""
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(1))
    y = network()(x).argmax(1)
    y[3] = (y[3] + 1) % 3
    return x[first : first + 7], y[first : first + 7]


def evaluate(out: Path, attacks: Any = ATTACKS, **changes: Any) -> ws.Evaluation:
    """A small run: checks, two attacks, their transfer and the pool on seven samples in three
    chunks.
    """
    given = {"model": network(), "data": samples(), "threats": THREATS, **SETTINGS, **changes}
    return ws.evaluate(attacks=attacks, out=out, **given)


def files(run: Path) -> Files:
    """Everything under `results/`, to the byte."""
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in sorted((run / "results").rglob("*"))
        if path.is_file()
    }


def state(run: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written again, be it with the same bytes."""
    return {
        name: ((run / name).stat().st_mtime_ns, (run / name).stat().st_ino) for name in files(run)
    }


def alive(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def points(at: Callable[[int], None], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Call `at(k)` at the k-th moment at which a kill may hurt: around every sync and rename,
    and amid every write.
    """
    count = itertools.count(1)

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **how: Any) -> Any:
            at(next(count))
            result = call(*arguments, **how)
            at(next(count))
            return result

        return wrapped

    write = os.write

    def torn(number: int, data: Any) -> int:
        at(next(count))
        done = write(number, data[: len(data) // 2])
        at(next(count))
        return done + write(number, data[done:])

    patch(os, "fsync", around(os.fsync))
    patch(os, "replace", around(os.replace))
    patch(os, "write", torn)


def signal_at(k: int, number: signal.Signals) -> Callable[[int], None]:
    def at(now: int) -> None:
        if now == k:
            os.kill(os.getpid(), number)

    return at


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill, unlike a power cut, loses nothing that was written; hundreds of syncs would take
    most of the time.
    """
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Files]:
    """A run that nobody interrupted."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("whole") / "run"
    evaluate(run)
    return run, files(run)


@pytest.fixture
def run(whole: tuple[Path, Files], tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    shutil.copytree(whole[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("certify", [None, pytest.param("crown", marks=pytest.mark.slow)])
def test_killed_at_random_points_it_ends_with_the_same_bytes(
    certify: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[int] = []
    with monkeypatch.context() as patch:
        points(moments.append, patch.setattr)
        evaluate(tmp_path / "whole", certify=certify)
    whole = files(tmp_path / "whole")
    rng = random.Random(0)
    left = set()
    for i in range(KILLS):  # one in each twentieth of the run
        moment = rng.randint(len(moments) * i // KILLS + 1, len(moments) * (i + 1) // KILLS)
        out = tmp_path / f"killed-{i}"

        def work(moment: int = moment, out: Path = out) -> None:
            points(signal_at(moment, signal.SIGKILL))
            evaluate(out, certify=certify)

        assert wait(fork(work)) == -signal.SIGKILL, f"moment {moment} of {len(moments)}"
        found = files(out)
        left.add(len(found))
        assert all(
            found[name] == whole[name] for name in found if not name.endswith(".tmp")
        )  # all of a file or nothing
        evaluate(out, certify=certify, resume=True)
        assert files(out) == whole, f"moment {moment} of {len(moments)}"
        assert Store.open(out).verify() == []
    assert len(left) >= KILLS // 2  # they were killed at different stages


def test_killed_again_and_again_from_outside(whole: tuple[Path, Files], tmp_path: Path) -> None:
    """One run, killed wherever it happens to be once there are some more files."""
    rng = random.Random(1)
    out = tmp_path / "run"
    left = [0]
    while len(left) <= 5 and left[-1] < len(whole[1]):
        child = fork(lambda: evaluate(out, resume=True) and 0)
        enough = left[-1] + rng.randint(1, 3)
        while alive(child) and sum(len(names) for _, _, names in os.walk(out / "results")) < enough:
            time.sleep(0.0005)
        os.kill(child, signal.SIGKILL)
        assert wait(child) in (
            0,
            -signal.SIGKILL,
        )  # 0: a busy machine let it finish before we looked
        left.append(len(files(out)))
    assert sum(0 < count < len(whole[1]) for count in left) >= 2  # the kills came amid the work
    evaluate(out, resume=True)
    assert files(out) == whole[1]


def test_nothing_is_computed_twice(run: Path) -> None:
    before = state(run)
    log = len(Store.open(run).events())
    start = time.perf_counter()
    result = evaluate(run, resume=True)
    assert time.perf_counter() - start < 5
    assert state(run) == before
    assert {event["event"] for event in Store.open(run).events()[log:]} <= {
        "resumed",
        "start",
        "end",
    }
    assert len(result) == 7
    lost = [
        run / "results/attack@nearest/000001.safetensors",
        run / "results/clean/000002.safetensors",
    ]
    for path in lost:
        path.unlink()
    evaluate(run, resume=True)
    after = state(run)
    assert {run / name for name in after if after[name] != before[name]} == set(lost)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def test_damaged_chunks_are_computed_again(whole: tuple[Path, Files], run: Path) -> None:
    names = [name for name in whole[1] if name.endswith(".safetensors")]
    damaged = names[:: max(len(names) // 6, 1)]
    for name, damage in zip(damaged, itertools.cycle([_flip, _cut, _empty])):
        damage(run / name)
    (run / "results/summary.json").write_text("{}")
    assert len(Store.open(run).verify()) == len(damaged) + 1
    evaluate(run, resume=True)
    assert files(run) == whole[1]
    found = [event for event in Store.open(run).events() if event["event"] == "corrupt"]
    assert (
        sorted(f"results/{event['unit']}/{event['chunk']:06d}.safetensors" for event in found)
        == damaged
    )
    assert len(os.listdir(run / "log/corrupt")) == len(damaged)


CHANGES = [
    ({"model": lambda: network(1e-3)}, r"with model weights \w+\.\.\. and you ask for \w+\.\.\."),
    ({"data": lambda: samples(1)}, r"with data sha256 \w+\.\.\. and you ask for \w+\.\.\."),
    (
        {"threats": lambda: [ws.Threat("inf", p, "8/255") for p in (1, "inf")]},
        "with eps 0.05 and you ask for 8/255",
    ),
    (
        {"threats": lambda: [ws.Threat(2, p, 0.05) for p in (1, "inf")]},
        "with norm inf and you ask for 2",
    ),
    ({"seed": lambda: 1}, "with seed 0 and you ask for 1"),
    ({"chunk": lambda: 4}, "with chunk 3 and you ask for 4"),
    ({"passes": lambda: 7}, "with attack nearest passes 6 and you ask for 7"),
    ({"attacks": lambda: ["nearest"]}, "with attack fgsm and you leave it out"),
    (
        {"attacks": lambda: [*ATTACKS, "deepfool"]},
        "without attack deepfool: add it with --add-attack",
    ),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_another_question_is_refused(
    run: Path, change: dict[str, Callable[[], Any]], words: str
) -> None:
    before = state(run)
    with pytest.raises(InputError, match=rf"^the run in '.*' was made {words}"):
        evaluate(run, resume=True, **{name: make() for name, make in change.items()})
    assert state(run) == before


def test_an_attack_is_added_to_a_finished_run(
    whole: tuple[Path, Files], run: Path, tmp_path: Path
) -> None:
    more = (*ATTACKS, "deepfool")

    def work() -> None:
        points(signal_at(40, signal.SIGKILL))
        evaluate(run, more, resume=True, add=True)

    shutil.copytree(run, tmp_path / "straight")
    result = evaluate(tmp_path / "straight", more, resume=True, add=True)
    assert {row.attack for row in result.rows} == set(more)
    extended = files(tmp_path / "straight")
    changed = {name for name in whole[1] if extended.get(name) != whole[1][name]}
    assert changed == {"results/summary.json", "results/manifest.json"}
    assert {name.split("/")[1].split("@")[0] for name in extended.keys() - whole[1].keys()} <= {
        "attack",
        "pool",
    }
    assert wait(fork(work)) == -signal.SIGKILL
    evaluate(run, more, resume=True)  # once begun, it is what the run is
    assert files(run) == extended and Store.open(run).verify() == []


COMMAND = [
    "evaluate",
    "digits-mlp",
    "-n",
    "7",
    "--eps",
    "0.05",
    "--attacks",
    *ATTACKS,
    "--passes",
    "6",
    "--chunk",
    "3",
]


def test_an_interrupt_leaves_a_run_that_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def command(out: str, *options: str, stop: int = 0) -> int:
        def work() -> int:
            # Pages are not what is tested here, and slow.
            commands._write_pages = lambda *_: None
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # what a shell runs in the background ignores it
            points(signal_at(stop, signal.SIGINT))
            return parser.main(
                [*COMMAND, "--quiet", "--threads", "1", "--out", str(tmp_path / out), *options]
            )

        return wait(fork(work))

    assert command("whole") == 0
    assert command("run", stop=50) == 130
    assert "wassail: interrupted" in capfd.readouterr().err
    assert 0 < len(files(tmp_path / "run")) < len(files(tmp_path / "whole"))
    assert not list(tmp_path.rglob("*.tmp"))
    assert command("run") == 2
    assert "holds a run already: add --resume to go on with it" in capfd.readouterr().err
    assert command("run", "--resume") == 0
    assert files(tmp_path / "run") == files(tmp_path / "whole")


@pytest.mark.slow
def test_the_command_killed_from_outside(tmp_path: Path) -> None:
    """By the number of files that are there: most of the time of so small a run is spent before
    and after the work.
    """
    command = [
        sys.executable,
        "-m",
        "wassail.cli",
        *COMMAND,
        "--quiet",
        "--threads",
        "1",
        "--resume",
        "--out",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(tmp_path / "whole")], check=True, capture_output=True, env=environment
    )
    whole = files(tmp_path / "whole")
    rng = random.Random(2)
    partial = 0
    for i in range(KILLS // 2):
        out = tmp_path / f"run-{i}"
        enough = rng.randrange(1, len(whole) - 2)
        with subprocess.Popen(
            [*command, str(out)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as child:
            while (
                child.poll() is None
                and sum(len(names) for _, _, names in os.walk(out / "results")) < enough
            ):
                time.sleep(0.0005)
            child.kill()
        partial += len(files(out)) < len(whole)
        subprocess.run([*command, str(out)], check=True, capture_output=True, env=environment)
        assert files(out) == whole, f"killed with {enough} files"
    assert partial >= KILLS // 4  # else the kills came after the work
