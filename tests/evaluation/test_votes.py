"""Votes of a smoothed model by several workers are those of one process."""

import importlib.util
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.cli import main
from wassail.errors import InputError
from wassail.evaluation import pieces
from wassail.evaluation.cluster import Ray, counter
from wassail.evaluation.tasks.looks import Votes
from wassail.evaluation.tasks.task import Place, Result, Task
from wassail.evaluation.work import Handed, Worker
from wassail.smoothing.draws import Draws

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)


class Backwards:
    """A runner that has the last task's result first, and works with nothing but what is sent.

    Every second task is done in pieces of one sample.
    """

    workers = 2
    about: Mapping[str, Any] = {}
    done = 0

    def run(
        self, worker: Worker, tasks: Iterable[Task], tick: Callable[[Task, float], None]
    ) -> Iterator[tuple[Task, Result, float]]:
        for task in reversed(list(tasks)):
            self.done += 1
            if task.place.chunk % 2:
                yield task, sent(worker, task), 0.0
                continue
            place = task.place
            cuts = [task.cut(i, i + 1) for i in range(place.start, place.stop)]
            yield task, pieces.join([(part, sent(worker, part)) for part in cuts]), 0.0


def sent(worker: Worker, task: Task) -> Result:
    place = task.place
    x, y = worker.data.read(place.start, place.stop)
    ids = worker.data.ids(place.start, place.stop)
    data = Handed("samples", tuple(x.shape[1:]), place.start, x, y, ids)
    other = Worker(worker.model, data, worker.settings, worker.mu)
    return other.run(pickle.loads(pickle.dumps(task)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def samples(n: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 6, generator=torch.Generator().manual_seed(1))
    x[-1] = x[0]  # equal samples have draws of their own, wherever they are counted
    return x, torch.arange(n) % 3


def test_the_votes_of_any_runner_are_the_same(tmp_path: Path) -> None:
    x, y = samples(250)  # parts of two
    model = ws.smoothed(network(), 0.3, draws=200)
    runner = Backwards()
    votes = model.votes(x, y)
    found = model.votes(x, y, counter=counter(runner))
    assert runner.done == 125
    assert torch.equal(found.hits, votes.hits) and len(votes.hits.unique()) > 20
    for name, record in (("here", votes), ("there", found)):
        record.save(tmp_path / name)
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    begun = model.votes(x, y, draws=100)
    assert torch.equal(model.votes(x, y, start=begun, counter=counter(runner)).hits, votes.hits)
    assert torch.equal(model.votes(x, y, start=votes, counter=counter(runner)).hits, votes.hits)
    assert runner.done == 250  # nothing is left to count for the last


def test_an_interrupted_count_goes_on_elsewhere(tmp_path: Path) -> None:
    """The parts that came in order are kept."""
    x, y = samples(12)
    model = ws.smoothed(network(), 0.3, draws=100)
    whole = model.votes(x, y)

    class Tired(Backwards):
        def run(self, worker: Worker, tasks: Iterable[Task], tick: Any) -> Any:
            for task in tasks:
                if task.place.chunk == 7:
                    raise KeyboardInterrupt
                yield task, sent(worker, task), 0.0

    file = tmp_path / "counts"
    with pytest.raises(KeyboardInterrupt):
        model.votes(x, y, keep=file, counter=counter(Tired()))
    runner = Backwards()
    assert torch.equal(model.votes(x, y, keep=file, counter=counter(runner)).hits, whole.hits)
    assert runner.done == 12 - 7


def test_the_attack_is_the_same() -> None:
    x, y = samples(4)
    model = ws.smoothed(network(), 0.3, draws=100, average=2)
    runner = Backwards()
    one = ws.attack_smoothed(model, x, y, passes=6)
    two = ws.attack_smoothed(model, x, y, passes=6, counter=counter(runner))
    assert torch.equal(one.high, two.high) and torch.equal(one.distances, two.distances)
    assert runner.done == 8 * 4


def test_a_sample_without_votes_is_an_error() -> None:
    x, y = samples(1)
    task = Votes(Place("votes", 0, 0, 1), Draws(0.3, ("",), 0, 1, 10))
    with pytest.raises(InputError, match="no votes of sample 7"):
        task.empty((x, y, ["7"]), torch.ones(1), "it died")


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_real_workers_write_the_same_votes(workers: int, tmp_path: Path) -> None:
    """From the command line; then with more draws, begun there and gone on with here."""
    words = ["evaluate", "digits-cnn-noise", "--smooth", "0.25", "--eps", "0.1", "-n", "12"]
    words += ["--order", "1", "--passes", "12", "--threads", "1", "--quiet"]
    ray = ["--ray", f"workers={workers}"]
    for name, more in (("here", []), ("there", ray)):
        out = ["--out", str(tmp_path / name)]
        assert main([*words, *out, "--draws", "200", *more]) == 0
    files = ("votes.safetensors", "attack.safetensors")

    def same() -> bool:
        read = [[(tmp_path / folder / f).read_bytes() for f in files] for folder in FOLDERS]
        return read[0] == read[1]

    assert same()
    for name, more in (("here", ray), ("there", [])):
        out = ["--out", str(tmp_path / name), "--resume"]
        assert main([*words, *out, "--draws", "400", *more]) == 0
    rows = [json.loads((tmp_path / name / "smoothing.json").read_text()) for name in FOLDERS]
    assert same() and rows[0]["rows"] == rows[1]["rows"] and rows[0]["draws"] == 400


@needs_ray
@pytest.mark.slow
def test_real_workers_count_for_python() -> None:
    x, y = samples(30)
    model = ws.smoothed(network(), 0.3, draws=100)
    with Ray(workers=2) as runner:
        assert torch.equal(model.votes(x, y, counter=counter(runner)).hits, model.votes(x, y).hits)


FOLDERS = ("here", "there")
