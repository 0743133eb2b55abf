"""What is said of an evaluation under way, by a clock of the test's own."""

import re
from types import SimpleNamespace

import pytest
import torch

import wassail as ws
from wassail import progress
from wassail.evaluation import meter
from wassail.evaluation.work import Local

EACH = 6.0  # seconds of a task, more than the pause between two lines
LINE = re.compile(
    r"evaluation, (?P<phase>.+): (?P<percent>\d+) % after (?P<now>\d+) s"
    r"(, about (?P<left>\d+) s left in this phase)?"
)


PHASES = {"clean accuracy": "clean", "WDA++": "attack@wda++", "certified radii": "radii@crown"}


class Clocked(Local):
    """A worker that needs some seconds to start, then `EACH` for a task."""

    def __init__(self, clock, start=0.0, most=1000) -> None:
        self.clock = clock
        self.start = start
        self.left = most
        self.ended: dict[str, float] = {}  # by folder: when its last task was done

    def run(self, worker, tasks, tick):
        for task in tasks:
            self.clock.now += self.start
            self.start = 0.0
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            tick(task, 0.0)
            self.clock.now += EACH
            tick(task, 1.0)
            self.ended[task.place.key] = self.clock.now
            yield task, worker.run(task), EACH


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now=0.0)
    for module in (progress, meter):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def evaluate(out, runner, **options):
    x, y = ws.zoo.data()
    torch.set_num_threads(1)
    threat = ws.Threat("inf", 1, "0.05")
    model = ws.zoo.load("digits-mlp-adv")
    options = {"out": out, "runner": runner, "chunk": 2, "certify": "crown", **options}
    return ws.evaluate(model, (x[:16], y[:16]), threat, ("wda++",), **options)


def lines(capsys):
    """Phase, per cent, now and left of every line."""
    found = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
    assert found and all(found)
    return [
        (
            m["phase"],
            int(m["percent"]),
            int(m["now"]),
            None if m["left"] is None else int(m["left"]),
        )
        for m in found
    ]


@pytest.mark.parametrize("start", [0.0, 40.0])
def test_the_time_left_is_that_of_the_phase(start, clock, capsys, tmp_path) -> None:
    """A worker that starts slowly is no measure of its pace."""
    runner = Clocked(clock, start)
    evaluate(tmp_path / "run", runner, progress=True)
    told = 0
    for phase, percent, now, left in lines(capsys):
        assert left is not None or percent in (0, 100)
        if left is not None and phase in PHASES:
            told += 1
            assert now + left == runner.ended[PHASES[phase]]
    assert told > 20


@pytest.mark.slow
def test_a_resumed_run_counts_what_is_left(clock, capsys, tmp_path) -> None:
    """Nothing is at 100 % before it is done, and what was done needs no time."""
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "run", Clocked(clock, most=29))
    seen: list[float] = []
    runner = Clocked(clock)
    evaluate(tmp_path / "run", runner, resume=True, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0 and seen.count(1.0) == 1
    assert seen[0] > 0 and len(runner.ended) == 2  # the last radii, and the last look

    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path / "again", Clocked(clock, most=29))
    clock.now = 0.0
    evaluate(tmp_path / "again", Clocked(clock), resume=True, progress=True)
    said = lines(capsys)
    assert {phase for phase, *_ in said} <= {
        "certified radii",
        "a last look at all flips",
        "figures",
    }
    for phase, percent, now, _ in said:
        if percent == 100:
            assert now >= max(at for name, _, at, _ in said if name == phase)


def test_a_terminal_shows_the_phase(clock, monkeypatch) -> None:
    from io import StringIO

    screen = StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(progress.sys, "stderr", screen)
    with progress.progress_bar(True, "evaluation") as report:
        report.begin("certified radii")
        for part in (0.0, 0.25, 0.5):
            report(0.9, part)
            clock.now += 10
    assert "evaluation, certified radii" in screen.getvalue()
