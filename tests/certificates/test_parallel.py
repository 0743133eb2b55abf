"""Branch and bound on several workers: the same answers as on one, and valid brackets whoever
dies.
"""

import itertools
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from conftest import ZOO
from wassail.certificates.exact import constants, flip_problem
from wassail.certificates.exact import nearest_flip as nearest_flip_module
from wassail.certificates.exact.constants import Bracket, branch
from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.search import frontier
from wassail.certificates.search.frontier import Heap, Pool, Report, SharedFrontier, crew
from wassail.certificates.search.margins import branched
from wassail.certificates.search.workers import Processes
from wassail.errors import InputError
from wassail.geometry import operator_norm

INF = math.inf
IRIS = {
    2.0: 6.771454513402937,
    1.0: 5.958048912394726,
    INF: 12.605085581416922,
}  # LipBaB's, on [0, 1]
SD = {2.0: 9.530716922306004, 1.0: 10.41286850374477, INF: 16.274810805318676}  # on [0, 0.1]


class Dead(Exception):
    """What the future of a worker that died says."""


class Here:
    """Calls are made at once, in this process; `fate` may end one: its future fails."""

    def __init__(self, workers: int = 3, fate: Callable[[int], bool] = lambda call: False) -> None:
        self.workers = workers
        self.fate = fate
        self.calls = 0

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        if self.fate(self.calls):
            future.set_exception(Dead("gone"))
        else:
            future.set_result(function(*args))
        return future


class Silent(Here):
    """Workers that hang."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        return Future()


class Counting:
    """Another pool, and how often it was called; the first `deaths` calls end their worker."""

    def __init__(self, pool: Pool, deaths: int = 0) -> None:
        self.pool = pool
        self.workers = pool.workers
        self.calls = 0
        self.deaths = deaths

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        self.calls += 1
        return (
            self.pool.submit(os._exit, 1)
            if self.calls <= self.deaths
            else self.pool.submit(function, *args)
        )


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are handed out too."""
    monkeypatch.setattr(frontier, "ENOUGH", 0)


@pytest.fixture
def _crumbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of three nodes, one step each."""
    monkeypatch.setattr(frontier, "HANDED_OUT_NODES", 3)
    monkeypatch.setattr(frontier, "LONG", 0.0)
    monkeypatch.setattr(frontier, "SHORT", 0.0)


def load(name: str) -> Piecewise:
    path = Path(ZOO) / "lipschitz" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no networks at {path.parent}")
    arrays = np.load(path)
    layers = [
        (torch.tensor(arrays[f"W{i}"]), torch.tensor(arrays[f"b{i}"]))
        for i in range(len(arrays) // 2)
    ]
    return Piecewise.from_layers(layers)


def random_net(seed: int, sizes: tuple[int, ...] = (3, 8, 8, 2)) -> Piecewise:
    g = torch.Generator().manual_seed(seed)
    shapes = itertools.pairwise(sizes)
    return Piecewise.from_layers(
        [
            (torch.randn(b, a, generator=g).double(), torch.randn(b, generator=g).double())
            for a, b in shapes
        ]
    )


def check(net: Piecewise, region: Region, found: Bracket, norm: float) -> None:
    """The lower side is attained at the witness, a point of the region."""
    assert found.witness is not None and bool(region.contains(found.witness[None]))
    value = float(operator_norm(net.jacobian(net.mask(found.witness[None])), norm, norm)[0])
    assert value == pytest.approx(found.lower, rel=1e-10)


# ---- Lipschitz constants
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "high", "values"),
    [("lipbab_iris_4-5-5-3", 1.0, IRIS), ("lipbab_sd_10-15-10-3", 0.1, SD)],
)
def test_published_constants_on_processes(
    processes: Processes, name: str, high: float, values: dict[float, float]
) -> None:
    net = load(name)
    pool = Counting(processes)
    region = Region.make((0.0, high), net.inputs)
    for norm, value in values.items():
        one = branch(net, region, norm, norm)
        two = branch(net, region, norm, norm, workers=pool)
        assert one.complete and two.complete
        assert two.lower == pytest.approx(one.lower, rel=1e-9) and two.upper == pytest.approx(
            one.upper, rel=1e-9
        )
        assert two.lower * (1 - 1e-10) <= value * (1 + 1e-10) and value <= two.upper * (1 + 1e-10)
        check(net, region, two, norm)
    assert pool.calls >= len(values)


@pytest.mark.usefixtures("_crumbs")
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_many_small_parts_give_the_same_bracket(norm: float) -> None:
    net = random_net(3)
    pool = Here()
    seen = list[tuple[float, float, int]]()
    region = Region.make((-1.0, 1.0), 3)
    one = branch(net, region, norm, norm)
    two = branch(net, region, norm, norm, workers=pool, tick=lambda *now: seen.append(now))
    assert one.complete and two.complete and pool.calls >= 4
    assert two.lower == pytest.approx(one.lower, rel=1e-9)
    assert two.nodes >= one.nodes / 2
    check(net, region, two, norm)
    for lower, upper, _ in seen:  # nodes that are out count: no upper bound on the way is too low
        assert lower <= one.upper and upper >= one.lower
    assert all(a[1] >= b[1] and a[0] <= b[0] and a[2] <= b[2] for a, b in itertools.pairwise(seen))


@pytest.mark.usefixtures("_crumbs")
def test_whoever_dies_the_bracket_holds() -> None:
    net = random_net(3)
    region = Region.make((-1.0, 1.0), 3)
    value = branch(net, region, 2, 2)
    complete = 0
    for seed in range(4):
        dice = random.Random(seed)
        found = branch(
            net,
            region,
            2,
            2,
            workers=Here(3, lambda call, dice=dice: call > 1 and dice.random() < 0.3),
        )
        assert found.lower <= value.upper and value.lower <= found.upper
        assert found.complete == (found.upper - found.lower <= 1e-9 * found.upper)
        check(net, region, found, 2)
        complete += found.complete
    assert complete < 4


@pytest.mark.usefixtures("_crumbs")
def test_a_part_that_is_lost_once_is_handed_out_again(caplog: pytest.LogCaptureFixture) -> None:
    net = random_net(3)
    region = Region.make((-1.0, 1.0), 3)
    with caplog.at_level(logging.WARNING, "wassail"):
        found = branch(net, region, 2, 2, workers=Here(1, lambda call: call % 2 == 1))
    assert found.complete and not caplog.records


@pytest.mark.usefixtures("_crumbs")
def test_a_part_that_is_lost_twice_keeps_its_bound(caplog: pytest.LogCaptureFixture) -> None:
    net = random_net(3)
    region = Region.make((-1.0, 1.0), 3)
    value = branch(net, region, 2, 2)
    root = branch(net, region, 2, 2, nodes=1)
    with caplog.at_level(logging.WARNING, "wassail"):
        found = branch(
            net, region, 2, 2, workers=Here(1, lambda call: call > 1)
        )  # everything after the first step
    assert not found.complete and value.lower <= found.upper < root.upper
    assert "lost twice (Dead: gone)" in caplog.text
    with pytest.raises(InputError, match=r"no worker came back \(Dead: gone\)"):
        branch(net, region, 2, 2, workers=Here(1, lambda call: True))


def test_a_killed_process_is_replaced(processes: Processes) -> None:
    net = random_net(3)
    pool = Counting(processes, deaths=1)
    region = Region.make((-1.0, 1.0), 3)
    before = processes.submit(os.getpid).result()
    found = branch(net, region, 2, 2, workers=pool)
    assert found.complete and pool.calls > 1
    assert found.lower == pytest.approx(branch(net, region, 2, 2).lower, rel=1e-9)
    assert processes.submit(os.getpid).result() != before


@pytest.mark.usefixtures("_crumbs")
def test_limits_and_interrupts_leave_a_valid_bracket() -> None:
    net = random_net(3)
    region = Region.make((-1.0, 1.0), 3)
    value = branch(net, region, 2, 2)
    few = branch(net, region, 2, 2, workers=Here(), nodes=20)
    assert not few.complete and 20 <= few.nodes < value.nodes and value.lower <= few.upper

    def stop(lower: float, upper: float, nodes: int) -> None:
        if nodes > 20:
            raise KeyboardInterrupt

    broken = branch(net, region, 2, 2, workers=Here(), tick=stop)
    assert not broken.complete and broken.lower <= value.upper and value.lower <= broken.upper

    begun = time.monotonic()
    late = branch(net, region, 2, 2, workers=Silent(), time_limit=0.5)  # workers that hang
    assert time.monotonic() - begun < 5 and not late.complete and value.lower <= late.upper


def test_what_is_out_counts() -> None:
    net = random_net(3)
    region = Region.make((-1.0, 1.0), 3)
    search = constants._Search(net, region, 2.0, 2.0, torch.Generator().manual_seed(0))
    search.begun()
    while len(search.open) < 4:
        search.step()
        search.sift()
    first = search.take(2)
    second = search.take(1)
    assert first is not None and second is not None and search.take(1) is None and not search.over
    low = search.cut + 0.1 * (first.bound - search.cut)

    def closed(bound: float) -> Report[Any, Any]:
        return Report([], constants._Found(search.lower, search.witness, bound, 5, INF))

    search.merge(second, closed(low))
    assert search.upper == first.bound, "the first part is still out"
    search.back(first, lost=False)
    assert len(search.open) == len(first.nodes) and search.upper == first.bound
    again = search.take(1)
    assert again is not None
    search.merge(again, closed(0.0))
    assert search.over and search.upper == low, "the largest bound of a closed node"


def test_lipschitz_on_workers() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    pool = Here()
    one = ws.lipschitz(model, 2, (0.0, 1.0), method="exact")
    two = ws.lipschitz(model, 2, (0.0, 1.0), method="exact", workers=pool)
    assert pool.calls > 0 and two.method == one.method
    assert two.lower == pytest.approx(one.lower, rel=1e-9) and two.upper == pytest.approx(
        one.upper, rel=1e-9
    )


# ---- Radii
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Graph, Tensor, Tensor]:
    x, y = ws.zoo.data("digits")
    return read(ws.zoo.load("digits-mlp"), x.shape[1:]), x[:2], y[:2]


def test_exact_radii_on_processes(processes: Processes) -> None:
    (x, y), pool = ws.zoo.data("digits"), Counting(processes, deaths=1)
    model = ws.zoo.load("digits-mlp")
    few = slice(1, 3)
    one = ws.radii(model, x[few], y[few], "inf", method="exact")
    two = ws.radii(model, x[few], y[few], "inf", method="exact", workers=pool)
    assert pool.calls > 2 and one.exact.all() and two.exact.all()
    torch.testing.assert_close(two.values, one.values, rtol=2e-9, atol=0)


@pytest.mark.usefixtures("_crumbs")
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_distances_in_small_parts(digits: tuple[Graph, Tensor, Tensor], norm: float) -> None:
    graph, x, y = digits
    box = (0.0, 1.0)
    pool = Here()
    one = nearest_flip(graph, x, y, norm, box)
    two = nearest_flip(graph, x, y, norm, box, workers=pool)
    assert one.exact.all() and two.exact.all() and one.upper.isfinite().all() and pool.calls >= 4
    torch.testing.assert_close(two.lower, one.lower, rtol=2e-9, atol=0)
    torch.testing.assert_close(
        torch.linalg.vector_norm((two.points - x).flatten(1), norm, dim=1), two.upper
    )
    z = graph.logits(two.points)
    assert (z.gather(1, y[:, None])[:, 0] <= z.scatter(1, y[:, None], -INF).amax(1)).all()
    lossy = Here(2, lambda call: call % 5 in (2, 3))
    some = nearest_flip(graph, x, y, norm, box, workers=lossy)
    assert (some.lower <= one.upper * (1 + 1e-9)).all() and (
        some.upper >= one.lower * (1 - 1e-9)
    ).all()
    assert not some.exact.all()


def test_hanging_workers_prove_no_distance(digits: tuple[Graph, Tensor, Tensor]) -> None:
    graph, x, y = digits
    truth = nearest_flip(graph, x, y, INF, (0.0, 1.0))
    found = nearest_flip(graph, x, y, INF, (0.0, 1.0), workers=Silent(), time_limit=0.6)
    assert not found.exact.any() and (found.lower <= truth.upper).all()


def test_the_nearest_flip_of_all_counts(digits: tuple[Graph, Tensor, Tensor]) -> None:
    graph, x, y = digits
    search = nearest_flip_module.Search(
        graph, x[0].double(), int(y[0]), INF, (0.0, 1.0), None, 1e-9
    )
    search.upper = 0.5
    net = flip_problem.Relaxed(graph, x[0].double(), int(y[0]), 0.2, INF, (0.0, 1.0))
    ball = nearest_flip_module._Ball(search, net, 0.2)
    ball.open.add(net.roots())
    part = ball.take(1)
    assert part is not None and not len(ball.open)
    flip = part.found.point + 1
    found = nearest_flip_module._Found(0.19, flip, 0.15, 7)
    ball.merge(part, Report(part.nodes.take(torch.tensor([0])), found))
    assert (search.upper, ball.settled, search.nodes, len(ball.open)) == (0.19, 0.15, 7, 1)
    assert torch.equal(search.point, flip)


@pytest.mark.usefixtures("_crumbs")
def test_branching_on_margins_in_small_parts(digits: tuple[Graph, Tensor, Tensor]) -> None:
    graph, x, y = digits
    distance = float(nearest_flip(graph, x[:1], y[:1], INF, (0.0, 1.0)).lower)

    def proved(radius: float, pool: Pool | None) -> tuple[bool, int]:
        sweep = Sweep(graph, Balls.make(x[:1], torch.tensor([radius]), INF, (0.0, 1.0))).run()
        lower = margins(sweep, y[:1])[0]
        found = branched(sweep, lower, [0], y, [200], pool)[0]
        return found.proved, found.count

    near = 0.97 * distance
    far = 1.0001 * distance
    alone = proved(near, None)
    pool = Here()
    assert alone[0] and alone[1] > len(y)
    assert proved(near, pool)[0] and pool.calls > 1
    assert not proved(far, Here())[0]
    assert not proved(near, Here(2, lambda call: call > 1))[0], "what was lost is not proved"


# ---- Pools
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """A node."""

    bound: float


class Wrong(SharedFrontier[list[Number], None]):
    """A problem of one node that nothing can be done with."""

    over = False

    def __init__(self) -> None:
        self.open = Heap[Number]()
        self.open.push(Number(1.0))
        self.out = []

    def step(self) -> None:
        raise ValueError("no such thing")

    def known(self, workers: int) -> None:
        """Nothing."""

    def begin(self, found: None) -> None:
        """With nothing."""

    def since(self, found: None) -> None:
        """Nothing."""

    def learn(self, found: None) -> None:
        raise AssertionError("there is nothing to merge")

    def stand(self, part: Any) -> None:
        raise AssertionError("a mistake is no loss")


def test_a_mistake_in_a_worker_is_raised_here() -> None:
    wrong = Wrong()
    with pytest.raises(ValueError, match="no such thing") as caught:
        wrong.proceed(Here())
    assert "in work" in str(caught.value.__cause__)
    assert len(wrong.open) == 1 and not wrong.out, "its part is open again"


def test_crews() -> None:
    with crew(None) as nobody, crew(3) as some, Processes(1) as pool, crew(pool) as same:
        assert nobody is None and isinstance(some, Processes) and some.workers == 3 and same is pool
    with pytest.raises(InputError, match="0 workers"), crew(0):
        pass
    refused = pytest.raises(InputError, match="workers is 'many'")
    with refused, crew("many"):  # type: ignore[arg-type]
        pass
