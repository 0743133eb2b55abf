"""Runs on several workers are the runs of one process, to the byte, whoever dies meanwhile.

Most of it needs no cluster: `Office` is a runner whose workers are objects in this process that die
and hang on command. The rest starts Ray on this machine and is skipped where ray is not installed.
"""

import copy
import hashlib
import importlib.util
import logging
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail import progress
from wassail.connection import Link
from wassail.errors import InputError
from wassail.evaluation import meter, pieces
from wassail.evaluation.cluster import Ray, WorkerError
from wassail.evaluation.jobs import Job, Queue
from wassail.evaluation.ray import runner as runner_module
from wassail.evaluation.ray import worker as worker_module
from wassail.evaluation.store.store import Store
from wassail.evaluation.tasks.attack import Attack
from wassail.evaluation.tasks.clean import Clean
from wassail.evaluation.tasks.looks import Checks, Convergence
from wassail.evaluation.tasks.pool import Pool
from wassail.evaluation.tasks.radii import Certify, Close
from wassail.evaluation.tasks.task import Place
from wassail.evaluation.work import Handed, Local, Worker

Digits = tuple[nn.Module, tuple[Tensor, Tensor]]
THREATS = [ws.Threat("inf", p, "0.05") for p in (1, "inf")]
ATTACKS = {"wda++": {}, "nearest": {"passes": 20}, "w-pgd": {"steps": 5}, "apgd-ce": {"steps": 5}}
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)


def tree(folder) -> dict[str, str]:
    files = sorted(path for path in (Path(folder) / "results").rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def evaluate(model, data, out, runner=None, chunk=7, **options):
    return ws.evaluate(
        model, data, THREATS, ATTACKS, out=out, runner=runner, chunk=chunk, **options
    )


@pytest.fixture(scope="module")
def digits():
    x, y = ws.zoo.data()
    return ws.zoo.load("digits-mlp-adv"), (x[:24], y[:24])


@pytest.fixture(scope="module")
def alone(digits: Digits, tmp_path_factory):
    """The run in one process, and its files."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("alone") / "run"
    return evaluate(*digits, out, certify="crown"), tree(out)


@pytest.fixture(scope="module")
def plain(digits: Digits, tmp_path_factory):
    """The same without radii."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("plain") / "run"
    return evaluate(*digits, out), tree(out)


# ---- Workers that die on command
# -----------------------------------------------------------------------------------------


class Died(Exception):
    pass


class Hung(Exception):
    pass


class TaskError(Exception):
    """What Ray raises here for an exception there."""

    def __init__(self, cause) -> None:
        super().__init__(f"in a worker: {cause!r}")
        self.cause = cause


class Dead(Exception):
    """What Ray raises for a worker that died at every try."""


class Ref:
    """A result on its way; `call` is done when it is waited for."""

    def __init__(self, end=0.0, call=lambda: None) -> None:
        self.end = end
        self.call = call
        self.value = self.error = None

    def hex(self):
        return str(id(self))


class FakeActor:
    """A worker in this process: it knows what it was sent, and nothing else."""

    def __init__(self, fake) -> None:
        self.fake = fake
        ready = SimpleNamespace(remote=lambda: Ref(fake.now + 30))
        self.__ray_ready__ = ready
        self.work = SimpleNamespace(options=self._options)

    def _options(self, max_task_retries):
        assert max_task_retries == 0
        return SimpleNamespace(remote=lambda *sent: self.fake.sent(self, *sent))


class Fake:
    """What the runner needs of Ray: a worker that died is started again. `fate(task)` may raise
    Died. Results come in any order.
    """

    exceptions = SimpleNamespace(RayError=Dead, RayTaskError=TaskError)

    def __init__(self, fate, seed=0, spread=0.5) -> None:
        self.fate = fate
        self.random = random.Random(seed)
        self.spread = spread
        self.now = 0.0
        self.deaths = 0
        self.hired = 0
        self.killed = 0
        self.ended: dict[str, float] = {}  # by folder: when its last task was done

    def remote(self, **options):
        assert options["max_restarts"] == -1 == options["max_task_retries"]
        return lambda kind: SimpleNamespace(remote=self._hired)

    def _hired(self, threads, gpu):
        self.hired += 1
        return FakeActor(self)

    def put(self, value):
        ref = Ref()
        ref.value = value
        return ref

    def sent(self, actor, recipe, task, samples):
        def call():
            self.fate(task)
            there = worker_module.Actor(1, False)
            there.worker = copy.copy(recipe[0].value)
            there.worker.data = Handed("data", (1, 8, 8), 0, *NOTHING)
            there.known = recipe[0].hex()
            self.ended[task.place.key] = self.now
            try:
                return there.work(recipe, task, samples)[0], 10.0
            except Exception as error:
                raise TaskError(error) from None

        actor.ref = Ref(self.now + 10 * self.random.uniform(1 - self.spread, 1 + self.spread), call)
        return actor.ref

    def wait(self, refs, num_returns=1, timeout=None):
        """The first that ends, if that is within the time."""
        first = min(refs, key=lambda ref: ref.end)
        self.now = min(max(self.now, first.end), self.now + timeout)
        if first.end > self.now:
            return [], refs
        try:
            first.value = first.call()
        except Died:
            self.deaths += 1
            first.error = Dead("the actor died")
        except Hung:
            first.end = math.inf
            return [], refs
        except (TaskError, Dead) as error:
            first.error = error
        return [first], [ref for ref in refs if ref is not first]

    def get(self, ref):
        if ref.error is not None:
            raise ref.error
        return ref.value

    def kill(self, actor, no_restart=True):
        self.killed += 1
        if not no_restart:
            self.deaths += 1
            actor.ref.end = self.now
            actor.ref.call = partial(self._raise, Dead("the actor was killed"))

    def _raise(self, error):
        raise error


NOTHING: tuple[Tensor, Tensor, list[str]] = (torch.zeros(0, 1, 8, 8), torch.zeros(0).long(), [])


@pytest.fixture
def office(monkeypatch):
    """A maker of runners whose workers meet the given fate."""
    monkeypatch.setattr(runner_module, "packed", lambda worker: worker)

    def make(fate, workers=3, seed=0, spread=0.5, **options):
        runner: Any = Ray(workers=workers, **options)
        runner.fake = Fake(fate, seed, spread)
        clock = SimpleNamespace(monotonic=lambda: runner.fake.now)
        monkeypatch.setattr(runner_module, "time", clock)
        runner._link = SimpleNamespace(ray=runner.fake, close=lambda: None)
        return runner

    return make


def lives(task) -> None:
    """Nobody dies."""


@pytest.mark.parametrize("workers", [1, 3])
def test_results_in_any_order_are_the_same_files(
    workers, alone, digits: Digits, office, tmp_path
) -> None:
    again = evaluate(
        *digits, tmp_path / "run", office(lives, workers, seed=workers), certify="crown"
    )
    assert tree(tmp_path / "run") == alone[1]
    assert again.headline == alone[0].headline and again.curve(1)("0.03") == alone[0].curve(1)(
        "0.03"
    )


def test_who_dies_once_changes_nothing(plain, digits: Digits, office, tmp_path) -> None:
    """Every chunk of every kind kills its first worker."""
    seen = set()

    def once(task) -> None:
        if (task.place.key, task.place.chunk) not in seen:
            seen.add((task.place.key, task.place.chunk))
            raise Died

    runner = office(once)
    evaluate(*digits, tmp_path / "run", runner)
    assert tree(tmp_path / "run") == plain[1] and runner.fake.deaths == len(seen) > 20


def deadly(*samples, kinds=object, error=Died):
    def fate(task) -> None:
        inside = any(task.place.start <= i < task.place.stop for i in samples)
        if inside and isinstance(task, kinds):
            raise error

    return fate


def test_a_sample_that_kills_every_worker_is_named_and_the_rest_is_whole(
    alone, digits: Digits, office, tmp_path, caplog
) -> None:
    once, files = alone
    runner = office(deadly(9))
    attacks = {name: ATTACKS[name] for name in ("wda++", "nearest")}
    with caplog.at_level(logging.WARNING, "wassail"):
        run = ws.evaluate(
            *digits, THREATS, attacks, out=tmp_path / "run", chunk=7, certify="crown", runner=runner
        )
    others = torch.arange(24) != 9
    assert (
        run.distances[9] == math.inf
        and run.radii is not None
        and run.radii[9] == 0
        and not run.exact[9]
    )
    assert torch.allclose(run.distances[others], once.distances[others], rtol=0.1)
    assert run.predicted[9] == run.y[9] and torch.equal(
        run.predicted[others], once.predicted[others]
    )
    assert (
        torch.allclose(run.radii[others], once.radii[others], rtol=0.1)
        and (run.radii[others] > 0).sum() > 10
    )
    assert "sample 9" in caplog.text
    # all other chunks are the same to the byte: they carry the run's name, which has no attacks in
    # it
    store = Store.open(tmp_path / "run")
    mine = tree(tmp_path / "run")
    for unit in ("clean", "attack@wda++", "attack@nearest", "transfer"):
        names = [f"results/{unit}/00000{k}.safetensors" for k in (0, 2, 3)]
        assert [mine[name] for name in names] == [files[name] for name in names]
    for unit in ("clean", "attack@wda++", "attack@nearest", "transfer", "radii@crown"):
        fields = store.get(unit, 1, ())[1]
        assert (
            fields[pieces.UNKNOWN] == ["9"]
            and sum(fields[pieces.PIECES]) == 7
            and "2 times" in fields[pieces.REASON]
        )
        assert pieces.UNKNOWN not in store.get(unit, 0, ())[1]
    said = [
        finding
        for finding in ws.Evaluation.load(tmp_path / "run").warnings
        if finding.name == "unknown"
    ]
    assert len(said) == 6 and all("about 9 (" in finding.text for finding in said)
    # three times as a whole, once as a piece of three and of two, twice alone, then never again
    assert runner.fake.deaths == 7 and runner.fake.hired == 3


def test_a_sample_that_hangs_costs_its_worker(digits: Digits, office, tmp_path) -> None:
    runner = office(deadly(9, kinds=Attack, error=Hung), timeout=20)
    run = ws.evaluate(
        *digits, THREATS, ("wda++",), out=tmp_path / "run", chunk=7, look=False, runner=runner
    )
    unknown = [k for k, value in enumerate(run.distances.tolist()) if value == math.inf]
    assert unknown == [9] and runner.fake.deaths == 7
    reason = Store.open(tmp_path / "run").get("attack@wda++", 1, ())[1][pieces.REASON]
    assert reason == "it took more than 20 s 2 times"
    assert runner.fake.killed == 7


def test_a_flip_that_nobody_lived_to_look_at_again_does_not_count(
    digits: Digits, office, tmp_path
) -> None:
    model, (x, y) = digits
    y = y.clone()
    y[5] = (model(x[5:6]).argmax() + 1) % 10  # wrong as it is
    runner = office(deadly(5, 9, kinds=Pool))
    run = ws.evaluate(
        model, (x, y), THREATS, ("wda++",), out=tmp_path / "run", chunk=7, look=False, runner=runner
    )
    assert run.distances[5] == 0 and run.labels[5] == run.predicted[5] != y[5]
    assert run.distances[9] == math.inf and torch.isfinite(run.distances).sum() == 23
    assert torch.isfinite(Store.open(tmp_path / "run").get("attack@wda++", 1)[0]["distances"]).all()


def test_many_deaths_are_no_reason_to_stop_while_something_gets_done(
    digits: Digits, office
) -> None:
    seen = set()

    def once(task) -> None:
        if task.place.start not in seen:
            seen.add(task.place.start)
            raise Died

    runner = office(once, workers=1)
    tasks = [Clean(Place("clean", k, k, k + 1)) for k in range(24)]
    found = list(runner.run(Worker(*_parts(digits)), tasks, lambda task, share: None))
    assert (
        sorted(task.place.start for task, _, _ in found) == list(range(24))
        and runner.fake.deaths == 24
    )


def test_a_chunk_is_cut_only_as_far_as_it_must(digits: Digits, office, tmp_path) -> None:
    """Too much memory for seven samples at once, enough for four: nothing is lost."""

    def fate(task) -> None:
        if isinstance(task, Attack) and len(task.place) > 4 and task.unit.attack == "nearest":
            raise Died

    run = evaluate(*digits, tmp_path / "run", office(fate))
    store = Store.open(tmp_path / "run")
    assert [store.get("attack@nearest", k, ())[1].get(pieces.PIECES) for k in range(4)] == [
        [3, 4]
    ] * 3 + [None]
    assert (
        not any(f.name == "unknown" for f in run.findings) and torch.isfinite(run.distances).all()
    )
    flips = run.flips()
    again = ws.Flips.from_points(digits[0], *digits[1], flips.points, "inf", pull_in=False)
    assert torch.equal(again.distances, run.distances)


def test_what_cannot_be_cut_is_given_up_and_has_no_row(
    plain, digits: Digits, office, tmp_path
) -> None:
    def fate(task) -> None:
        if isinstance(task, (Checks, Convergence)) or (
            isinstance(task, Attack) and task.unit.whole
        ):
            raise Died

    run = evaluate(*digits, tmp_path / "run", office(fate))
    assert {row.attack for row in plain[0].rows} - {row.attack for row in run.rows} == {"w-pgd"}
    assert {"checks", "convergence"} <= {f.name for f in run.warnings} and "mode" in {
        f.name for f in run.findings
    }
    assert run.best[0].accuracy == pytest.approx(plain[0].best[0].accuracy, abs=0.02)


def test_a_bracket_that_kills_its_worker_certifies_nothing(
    digits: Digits, office, tmp_path
) -> None:
    """It is one task of all samples: it has no pieces."""
    model, (x, y) = digits
    runner = office(deadly(0, kinds=Close))
    options = {"chunk": 3, "certify": "crown", "gap": 0.5, "look": False, "runner": runner}
    run = ws.evaluate(
        model, (x[:8], y[:8]), THREATS[:1], ("wda++",), out=tmp_path / "run", **options
    )
    assert run.radii is not None and not run.radii.any() and not run.exact.any()
    assert runner.fake.deaths == 3 and torch.isfinite(run.distances).all()
    assert [f.name for f in run.warnings if f.name == "unknown"]


def test_memory_that_runs_out_without_a_death_is_treated_alike(
    digits: Digits, office, tmp_path, monkeypatch
) -> None:
    runner = office(lives)
    real = Worker.run

    def run(self, task, tick=False):
        if isinstance(task, Attack) and len(task.place) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        return real(self, task, tick)

    monkeypatch.setattr(Worker, "run", run)
    ws.evaluate(
        *digits, THREATS[:1], ("wda++",), out=tmp_path / "run", chunk=7, look=False, runner=runner
    )
    fields = Store.open(tmp_path / "run").get("attack@wda++", 0, ())[1]
    assert fields[pieces.PIECES] == [3, 4] and runner.fake.deaths == 0


def test_when_everybody_dies_the_run_stops_with_a_sentence(
    digits: Digits, office, tmp_path
) -> None:
    runner = office(deadly(*range(24)), workers=1)
    with pytest.raises(InputError, match=r"14 tasks in a row failed, .* killed its worker: give"):
        evaluate(*digits, tmp_path / "run", runner)
    assert runner.fake.killed == 1 and not runner._actors


def test_an_error_in_a_worker_is_the_error_here(digits: Digits, office, tmp_path) -> None:
    model, (x, y) = digits
    with pytest.raises(
        InputError, match=r"samples 0 to 6 of .*: the samples range over .* divide them by 255"
    ):
        evaluate(model, (x * 255, y), tmp_path / "run", office(lives, workers=1))


def test_tasks_are_made_when_a_worker_is_free_for_them(digits: Digits, office) -> None:
    made = []
    done = 0
    most = 0
    worker = Worker(*_parts(digits))

    def tasks():
        for k in range(24):
            made.append(k)
            yield Clean(Place("clean", k, k, k + 1))

    for _ in office(lives, workers=3).run(worker, tasks(), lambda task, share: None):
        done += 1
        most = max(most, len(made) - done)
    assert done == 24 and 3 <= most <= 4  # one a worker, and the one that is done


def test_the_time_left_counts_the_tasks_of_all_workers(
    digits: Digits, office, tmp_path, monkeypatch, capsys
) -> None:
    """Not the start of the workers, nor a first result while all others are nearly done."""
    runner = office(lives, workers=4, spread=0.1)
    for module in (progress, meter):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: runner.fake.now))
    evaluate(*digits, tmp_path / "run", runner, chunk=1, progress=True)
    told = 0
    for line in capsys.readouterr().err.splitlines():
        said = re.fullmatch(r"evaluation, (\S+): \d+ % after (\d+) s, about (\d+) s left .*", line)
        if said is not None and f"attack@{said[1].lower()}" in runner.fake.ended:
            truth = runner.fake.ended[f"attack@{said[1].lower()}"] - float(said[2])
            assert float(said[3]) == pytest.approx(truth, rel=0.25, abs=5), line
            told += 1
    assert told > 5


def test_a_time_limit_counts_for_every_worker_and_for_no_more(
    digits: Digits, office, tmp_path
) -> None:
    limits: dict[int, Any] = {}

    def note(task) -> None:
        if isinstance(task, Certify):
            limits[task.place.chunk] = task.limit

    options: dict[str, Any] = {
        "chunk": 7,
        "certify": "crown",
        "time_limit": 1000,
        "look": False,
    }
    ws.evaluate(
        *digits,
        THREATS,
        ("wda++",),
        out=tmp_path / "run",
        runner=office(note, workers=3),
        **options,
    )
    share = (
        3 * 1000 * 7 / 24
    )  # three workers begin at once: what each was given is gone for the next
    assert [limits[k] for k in range(3)] == [pytest.approx(share)] * 3
    assert sum(limits.values()) == pytest.approx(
        3 * 1000
    )  # the last is made while none of the others is done


def _parts(digits: Digits):
    from wassail.evaluation.settings import Settings
    from wassail.zoo.datasets import open_data

    model, data = digits
    settings = Settings(tuple(THREATS), {"wda++": {}}, chunk=7, look=False)
    return model, open_data(data), settings, torch.full((24,), 1 / 24, dtype=torch.float64)


def test_pieces_joined_are_the_whole(digits: Digits) -> None:
    """A task cut anywhere and joined again: the same tensors where the batch does not matter,
    the same fields.
    """
    worker = Worker(*_parts(digits))
    task = Clean(Place("clean", 0, 0, 7))
    whole = worker.run(task)
    parts = [(part, worker.run(part)) for part in (task.cut(0, 3), task.cut(3, 4), task.cut(4, 7))]
    tensors, fields = pieces.join(parts)
    assert fields == {**whole[1], pieces.PIECES: [3, 1, 3]}
    for name, value in whole[0].items():
        assert value.dtype == tensors[name].dtype
        assert (
            torch.allclose(value, tensors[name], atol=1e-5)
            if name == "logits"
            else torch.equal(value, tensors[name])
        )
    # with a flip in places: the index counts from the beginning of the chunk
    unit = worker.settings.units[0]
    attack = Attack(Place(unit.key, 0, 0, 7), unit)
    whole = worker.run(attack)
    parts = [(part, worker.run(part)) for part in (attack.cut(0, 3), attack.cut(3, 7))]
    tensors, _ = pieces.join(parts)
    assert torch.equal(tensors["index"], whole[0]["index"]) and len(tensors["index"]) > 4
    assert torch.allclose(tensors["points"], whole[0]["points"], atol=0.05)
    part = Certify(Place("r", 0, 10, 14), 8.0, torch.arange(4.0)).cut(11, 12)
    assert (
        part.upper.tolist() == [1.0]
        and part.limit == 2.0
        and (part.place.start, part.place.stop) == (11, 12)
    )


def test_what_is_wrong_with_the_options_is_said() -> None:
    bad: list[dict[str, Any]] = [{"workers": 0}, {"gpus": -1}, {"threads": 0}, {"timeout": 0}]
    for options in bad:
        with pytest.raises(InputError, match=next(iter(options))):
            Ray(**options)


def test_without_ray_one_sentence_says_what_to_install(
    digits: Digits, tmp_path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"needs the package ray .*pip install \"wassail\[ray\]\""):
        evaluate(*digits, tmp_path / "run", Ray(workers=1))


@needs_ray
@pytest.mark.slow
def test_ray_that_was_imported_before_must_not_listen_to_the_network() -> None:
    script = textwrap.dedent("""
        import ray
        from wassail.connection import Link
        from wassail.errors import InputError
        try:
            link = Link(None, 1)
        except InputError as error:
            assert "imported before" in str(error), error
        else:
            assert ray.util.get_node_ip_address().startswith("127.")
            link.close()
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=120)


# ---- A real cluster on this machine
# --------------------------------------------------------------------------------------


class Trap(nn.Module):
    """A model that ends or stops its process at one sample, but not the process it was made in."""

    def __init__(self, model, sample, hang) -> None:
        super().__init__()
        self.model = model
        self.hang = hang
        self.home = os.getpid()
        self.register_buffer("sample", sample)

    def forward(self, x):
        if (
            os.getpid() != self.home
            and len(x)
            and ((x.detach() - self.sample).flatten(1).abs().amax(1) < 1e-6).any()
        ):
            time.sleep(1000) if self.hang else os._exit(1)
        return self.model(x)


def listening() -> list[str]:
    """The addresses at which this process and its descendants listen, `address:port` in
    hexadecimal, from /proc.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    mine = [os.getpid()]
    sockets = set()
    for pid in mine:
        mine += children.get(pid, [])
        try:
            sockets |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in sockets and (words[3] == "0A" or table.startswith("udp")):
                found.append(words[1])
    return found


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


@needs_ray
@pytest.mark.slow
def test_on_a_real_cluster(alone, plain, digits: Digits, tmp_path) -> None:
    """One cluster for all of it: the same files, resumed both ways, a worker killed, no port
    but on loopback.
    """
    with Ray(workers=2) as runner:
        evaluate(*digits, tmp_path / "two", runner, certify="crown")
        assert tree(tmp_path / "two") == alone[1]
        first = workers_of(os.getpid())
        assert len(first) == 2
        assert runner._link is not None and (folder := runner._link._folder) is not None
        sessions = set(Path("/tmp/ray").glob("*")) if Path("/tmp/ray").exists() else set()
        if Path("/proc/net/tcp").exists():
            ports = listening()
            assert len(ports) > 2 and {port.partition(":")[0] for port in ports} <= set(LOOPBACK)
        # begun here and ended there, and the reverse; a worker killed on the way
        for name, begin, end in (("a", Local(), runner), ("b", runner, Local())):
            with pytest.raises(KeyboardInterrupt):
                evaluate(*digits, tmp_path / name, Interrupted(begin, 9))
            if end is runner:
                os.kill(first[0], signal.SIGKILL)
            evaluate(*digits, tmp_path / name, end, resume=True)
            assert tree(tmp_path / name) == plain[1]
    assert (
        not importlib.import_module("ray").is_initialized() and "RAY_AUTH_TOKEN" not in os.environ
    )
    assert not Path(folder).exists() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not any(str(os.getpid()) in path.name for path in sessions)


class Interrupted:
    """A runner, until so many results have come."""

    workers = 1
    about: ClassVar[dict[str, str]] = {}

    def __init__(self, runner, results) -> None:
        self.runner = runner
        self.left = results

    def run(self, worker, tasks, tick):
        for result in self.runner.run(worker, tasks, tick):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            yield result


@pytest.fixture(scope="module")
def link():
    link = Link(None, 4)
    yield link
    link.close()


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_real_workers_write_the_same_files(workers, link, alone, digits: Digits, tmp_path) -> None:
    with Ray(workers=workers) as runner:
        evaluate(*digits, tmp_path / "run", runner, certify="crown")
    assert tree(tmp_path / "run") == alone[1]


@needs_ray
@pytest.mark.slow
def test_a_real_error_is_the_error_here(link, digits: Digits, tmp_path) -> None:
    model, (x, y) = digits
    with Ray(workers=1) as runner:
        with pytest.raises(InputError, match=r"samples 0 to 6 of .*: the samples range over"):
            evaluate(model, (x * 255, y), tmp_path / "a", runner)
        said = r"samples 0 to 6 of .*: the model fails on .* with ZeroDivisionError"
        with pytest.raises(InputError, match=said):
            evaluate(Broken(model, ZeroDivisionError()), (x, y), tmp_path / "b", runner)
        broken = Broken(model, RuntimeError("no kernel"), late=True)
        with pytest.raises(RuntimeError, match="no kernel") as error:
            evaluate(broken, (x, y), tmp_path / "c", runner)
        assert isinstance(error.value.__cause__, WorkerError) and "in forward" in str(
            error.value.__cause__
        )


class Broken(Trap):
    """A model that fails in any process but the one it was made in; late: not before a gradient
    is asked for.
    """

    def __init__(self, model, error: Exception, late: bool = False) -> None:
        super().__init__(model, torch.zeros(1), False)
        self.error = error
        self.late = late

    def forward(self, x):
        if os.getpid() == self.home or not len(x) or (self.late and not x.requires_grad):
            return self.model(x)
        raise self.error


@needs_ray
@pytest.mark.slow
def test_a_real_worker_that_is_stopped(link, digits: Digits, tmp_path) -> None:
    """A stopped process answers nobody, not even ray."""
    model, (x, y) = digits
    data = (x.repeat(4, 1, 1, 1), y.repeat(4))
    evaluate(model, data, tmp_path / "alone")
    with Ray(workers=1, timeout=20) as runner:

        def stop() -> None:
            while not workers_of(os.getpid(), "work"):
                time.sleep(0.02)
            os.kill(workers_of(os.getpid())[0], signal.SIGSTOP)

        thread = threading.Thread(target=stop)
        thread.start()
        evaluate(model, data, tmp_path / "run", runner)
        thread.join()
    assert tree(tmp_path / "run") == tree(tmp_path / "alone")


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("hang", [False, True])
def test_a_real_sample_that_kills_or_hangs(hang, link, digits: Digits, tmp_path) -> None:
    model, (x, y) = digits
    with Ray(workers=2, timeout=15 if hang else None) as runner:
        run = ws.evaluate(
            Trap(model, x[9], hang),
            (x, y),
            THREATS,
            ("wda++",),
            out=tmp_path / "run",
            chunk=3,
            runner=runner,
        )
    assert [k for k, value in enumerate(run.distances.tolist()) if value == math.inf] == [9]
    assert Store.open(tmp_path / "run").get("clean", 3, ())[1][pieces.UNKNOWN] == ["9"]


@needs_ray
@pytest.mark.slow
def test_real_workers_killed_after_every_few_tasks(
    link, digits: Digits, tmp_path, monkeypatch
) -> None:
    """No task is killed at each of its tries: that would cut it, and cut chunks round otherwise."""
    model, (x, y) = digits
    data = (x.repeat(10, 1, 1, 1), y.repeat(10))
    kills = results = 0
    over = threading.Event()
    retried: set[Job] = set()

    def failed(queue, job, why) -> None:
        retried.add(job)
        really_failed(queue, job, why)

    def done(queue, job, result, seconds) -> None:
        nonlocal results
        results += 1
        retried.discard(job)
        really_done(queue, job, result, seconds)

    really_failed, really_done = Queue.failed, Queue.done
    evaluate(model, data, tmp_path / "alone")
    monkeypatch.setattr(Queue, "failed", failed)
    monkeypatch.setattr(Queue, "done", done)
    with Ray(workers=3) as runner:

        def killer() -> None:
            nonlocal kills
            draw = random.Random(0)
            while kills < 5 and not over.wait(0.02):
                alive = workers_of(os.getpid(), "work")
                if results > 8 * kills and len(alive) > 1 and not retried:
                    os.kill(draw.choice(alive), signal.SIGKILL)
                    kills += 1

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            evaluate(model, data, tmp_path / "run", runner)
        finally:
            over.set()
            thread.join()
    assert kills > 2 and tree(tmp_path / "run") == tree(tmp_path / "alone")


@needs_ray
@pytest.mark.slow
def test_another_chunk_size_changes_nothing_but_rounding(
    link, plain, digits: Digits, tmp_path
) -> None:
    with Ray(workers=2) as runner:
        other = evaluate(*digits, tmp_path / "run", runner, chunk=5)
    assert torch.allclose(other.distances, plain[0].distances, rtol=1e-3)
    for a, b in zip(plain[0].rows, other.rows):
        assert (a.attack, a.threat) == (b.attack, b.threat) and a.accuracy == pytest.approx(
            b.accuracy, abs=1e-3
        )


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_driver_that_is_killed_leaves_nothing_behind_and_is_resumed(
    sent, plain, digits: Digits, tmp_path
) -> None:
    script = textwrap.dedent("""
        import signal, sys, torch
        # A shell's background process ignores it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        import wassail as ws
        from wassail.evaluation.cluster import Ray
        from test_cluster import evaluate
        x, y = ws.zoo.data()
        with Ray(workers=2) as runner:
            evaluate(ws.zoo.load("digits-mlp-adv"), (x[:24], y[:24]), sys.argv[1], runner)
    """)
    out = tmp_path / "run"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    before = set(Path("/tmp").glob("wassail-ray-*"))
    with (tmp_path / "said").open("wb") as said:
        child = subprocess.Popen([sys.executable, "-c", script, str(out)], env=env, stderr=said)
    end = time.monotonic() + 120
    while not list(out.glob("results/attack@nearest/*.safetensors")):
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.05)
    tied = descendants(child.pid)
    assert len(tied) > 4
    end = time.monotonic() + 180  # two of ray's processes take a minute to notice
    child.send_signal(sent)
    assert child.wait(60) != 0
    while any(running(pid) for pid in tied):
        assert time.monotonic() < end, "processes of the cluster are still there"
        time.sleep(0.2)
    if sent == signal.SIGTERM:  # no stack of machine code, no exception, no files
        assert child.returncode == 128 + sent and (tmp_path / "said").read_text() == ""
        assert not any(
            str(child.pid) in session.name
            for folder in {*Path("/tmp").glob("wassail-ray-*")} - before
            for session in folder.iterdir()
        )
    evaluate(*digits, out, resume=True)
    assert tree(out) == plain[1]


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found[1:]


def workers_of(pid: int, doing: str = "") -> list[int]:
    """The workers among the processes below one; Ray gives them a title. doing: with this method
    at work.
    """
    found = []
    for one in descendants(pid):
        try:
            title = Path(f"/proc/{one}/cmdline").read_bytes().decode()
        except OSError:
            continue
        if title.startswith("ray::Actor") and doing in title:
            found.append(one)
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@needs_ray
@pytest.mark.slow
def test_models_and_data_of_every_kind_travel(link, digits: Digits, tmp_path) -> None:
    """A plain function, an exported program, an ONNX file; arrays, a mapped file, a folder of
    images.
    """
    import numpy as np
    from PIL import Image

    model, (x, y) = digits
    np.savez(tmp_path / "digits.npz", x=x.numpy(), y=y.numpy())
    for k in range(6):
        folder = tmp_path / "images" / str(int(y[k]))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((x[k, 0] * 255).byte().numpy()).save(folder / f"{k}.png")
    torch.export.save(
        torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("n")},)),
        tmp_path / "model.pt2",
    )
    large = x.repeat(600, 1, 1, 1), y.repeat(600)  # too large to be sent as a whole
    names = [str(k) for k in range(10)]
    cases: list[tuple[Any, Any]] = [
        (lambda batch: model(batch), (x, y)),
        (ws.zoo.open_model(str(tmp_path / "model.pt2"), trust=True), str(tmp_path / "digits.npz")),
        (model, ws.zoo.open_data(large, n=24)),
        (model, ws.zoo.open_data(tmp_path / "images", preprocessing="Gray", classes=names)),
    ]
    with Ray(workers=2) as runner:
        for k, (one, data) in enumerate(cases):
            for name, who in (("here", None), ("there", runner)):
                ws.evaluate(
                    one, data, THREATS, ("wda++",), out=tmp_path / f"{name}{k}", chunk=7, runner=who
                )
            assert tree(tmp_path / f"here{k}") == tree(tmp_path / f"there{k}"), k
            assert runner.sends == (k == 2)


@needs_ray
@pytest.mark.slow
def test_targets_travel(tmp_path, monkeypatch) -> None:
    """`evaluate --ray` of a regression with two targets and an own tolerance for each sample writes
    the files of one process.
    """
    import numpy as np

    from wassail.cli.parser import main

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.rand(20, 4)
    with torch.no_grad():
        y = model(x) + 0.02 * torch.randn(20, 2)
    own = 0.05 + 0.1 * torch.rand(20)
    np.savez("data.npz", x=x.numpy(), y=y.numpy(), own=own.numpy())
    torch.save(model.state_dict(), "weights.pt")
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("two_targets.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))\n"
    )
    words = ["evaluate", "two_targets:net", "--weights", "weights.pt", "--data", "data.npz"]
    words += ["--tolerance", "own", "--eps", "0.02", "--order", "1", "inf", "--attacks", "nearest"]
    words += ["--passes", "30", "--certify", "crown", "--chunk", "6", "--quiet"]
    assert main([*words, "--out", "here"]) == 0
    assert main([*words, "--out", "there", "--ray"]) == 0
    assert tree(tmp_path / "here") == tree(tmp_path / "there")
    run = ws.Evaluation.load(tmp_path / "there")
    assert run.targets is not None
    assert torch.equal(run.targets.float(), torch.cat([y, own[:, None], own[:, None]], 1))
    assert "own tolerance of the target in all 2 outputs" in run.headline


@needs_ray
@pytest.mark.slow
def test_a_node_that_is_lost_takes_nothing_with_it(digits: Digits, tmp_path) -> None:
    """Two nodes on this machine, one of them killed with all its processes while it works."""
    script = textwrap.dedent("""
        import sys, threading, time, torch
        torch.set_num_threads(1)
        from pathlib import Path
        from ray.cluster_utils import Cluster
        import wassail as ws
        from wassail.evaluation.cluster import Ray
        from test_cluster import evaluate, tree
        x, y = ws.zoo.data()
        out = Path(sys.argv[1])
        model = ws.zoo.load("digits-mlp-adv")
        data = (x[:24].repeat(8, 1, 1, 1), y[:24].repeat(8))
        evaluate(model, data, out / "alone")
        head = {"num_cpus": 1, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        node = cluster.add_node(num_cpus=1)
        with Ray(cluster.address, workers=2) as runner:
            def kill():
                while not list(out.glob("run/results/attack@*/*")):
                    time.sleep(0.05)
                time.sleep(0.5)
                cluster.remove_node(node, allow_graceful=False)
            thread = threading.Thread(target=kill)
            thread.start()
            evaluate(model, data, out / "run", runner)
            alive = thread.is_alive()
            thread.join()
        cluster.shutdown()
        sys.exit(1 if alive or tree(out / "run") != tree(out / "alone") else 0)
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    env |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "0" * 64,
    }  # loopback here too
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
