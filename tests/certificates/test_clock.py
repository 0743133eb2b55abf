"""The clock decides nothing without a time limit, and a limit is kept with one: with clocks
that are made here.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates import clock
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.lipschitz.semidefinite import semidefinite
from wassail.certificates.search.infinity import infinity

INF = math.inf
METHODS = ("crown", "alpha-crown", "branch", "exact", "lipschitz")


def network(*sizes: int, seed: int = 0) -> Graph:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return read(nn.Sequential(*layers[:-1]).double(), (sizes[0],))


def data(graph: Graph, count: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(
        count, graph.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return x, graph.logits(x).argmax(1)


SMALL = network(3, 8, 8, 3)
SMOOTH = read(
    nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double(), (2,), smooth=True
)


def wild() -> Callable[[], float]:
    """A clock that jumps by anything from nothing to a year, whoever looks at it."""
    steps = itertools.cycle((0.0, 1e-9, 3.0, 0.2, 3e7, 1e-3))
    now = itertools.accumulate(steps)
    return lambda: next(now)


def answers() -> Iterator[list[float]]:
    """Of everything that has a time limit."""
    x, y = data(SMALL, 1)
    for method in METHODS:
        yield ws.radii(SMALL, x, y, 2.0, method=method).values.tolist()
    for method in ("branch", "lipschitz"):
        yield ws.verify(SMALL, x, y, ws.Threat("inf", "inf", 0.05), method=method).double().tolist()
    for method in ("sdp", "exact"):
        bound = ws.lipschitz(SMALL, 2, (0.0, 1.0), method=method)
        yield [bound.lower, bound.upper]
    bound = ws.lipschitz(SMOOTH, 2, (0.0, 1.0), nodes=40)
    yield [bound.lower, bound.upper]
    bound = infinity(SMALL.piecewise(), 2.0, [0, 1, 2])
    yield [bound.lower, bound.upper]
    with clock.limited(work=clock.SECOND / 2):
        yield list(ws.certify(SMALL, x, y, 2, domain=(0.0, 1.0)).bounds(0.1))
    with clock.limited(work=clock.SECOND / 2):
        yield list(ws.loss_curve(SMALL, x, y, grid=[0.1])(0.05))


def test_without_a_limit_the_clock_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = list(answers())
    monkeypatch.setattr(time, "monotonic", wild())
    assert list(answers()) == plain


@pytest.mark.parametrize("graph", [SMALL, SMOOTH], ids=["relu", "tanh"])
def test_a_budget_of_work_is_kept_and_repeats(graph: Graph) -> None:
    def bracket(work: float) -> tuple[float, float]:
        with clock.limited(work=work):
            bound = ws.lipschitz(graph, 2, (0.0, 1.0))
        assert not bound.info["cut"], "the clock had no part in it"
        return bound.lower, bound.upper

    small = bracket(3e6)
    large = bracket(3e9)
    assert small == bracket(3e6)
    assert small[1] > large[1] and large[0] <= large[1] < INF


class Ticks:
    """A clock that goes on by a second whenever it is looked at; `asked`: how often it was."""

    asked = 0

    def monotonic(self) -> float:
        self.asked += 1
        return float(self.asked)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """For limits only: a limit of n seconds is one of n looks, so that what a test cuts does
    not depend on the machine.
    """
    made = Ticks()
    monkeypatch.setattr(clock, "time", made)
    return made


@pytest.mark.parametrize("method", METHODS)
def test_a_limit_ends_every_method_and_keeps_what_is_proved(method: str, ticks: Ticks) -> None:
    graph = SMALL if method == "lipschitz" else network(6, 20, 20, 20, 3)
    x, y = data(graph, 4)
    full = ws.radii(graph, x, y, 2.0, method="crown")
    flips = ws.nearest(graph.logits, x, y, 2.0).distances
    looks = []
    whole = True
    last = torch.zeros(4).double()
    for limit in (1, 30, 120):
        begun = ticks.asked
        found = ws.radii(graph, x, y, 2.0, method=method, time_limit=limit)
        looks.append(ticks.asked - begun)
        whole &= not found.info["cut"]
        assert (found.values >= 0).all() and (found.values <= flips).all()
        assert (
            found.info["cut"] or method == "lipschitz" or (found.values >= 0.99 * full.values).all()
        )
        last = found.values
    assert not whole, "the least of the limits cuts"
    assert looks[0] <= 40, f"{looks}: once the time is up, what follows ends at its first look"
    assert method == "lipschitz" or (last > 0).any()


def test_a_sweep_looks_between_nodes_and_chunks(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(6, 30, 30, 30, 4)
    x, _ = data(graph, 4)
    balls = Balls.make(x, torch.full((4,), 0.5).double(), 2.0, (0.0, 1.0))
    with clock.limited(1e9):
        Sweep(graph, balls).run()
        coarse = ticks.asked
        monkeypatch.setattr("wassail.certificates.bounds.chunks.CHUNK", 64)
        Sweep(graph, balls).run()
    assert coarse > len(graph.nodes)
    assert ticks.asked - coarse > 4 * coarse
    with clock.limited(3), pytest.raises(clock.Late):
        Sweep(graph, balls).run()


def test_a_certificate_that_is_cut_says_so(ticks: Ticks) -> None:
    x, y = data(SMALL, 2)
    found = ws.certify(SMALL, x, y, 2, domain=(0.0, 1.0), time_limit=5)
    assert found.info["cut"] and found.margin.lower <= found.margin.upper
    assert ws.lipschitz(SMALL, 2, (0.0, 1.0), time_limit=2).info["cut"]
    assert not ws.lipschitz(SMALL, 2, (0.0, 1.0), time_limit=1e9).info["cut"]
    assert infinity(SMALL.piecewise(), 2.0, [0, 1, 2], time_limit=1).info["cut"]
    with pytest.raises(ws.InputError, match="more time"):
        ws.worst_case(SMALL, x, y, ws.Threat(2, 1, 0.1, (0.0, 1.0)), time_limit=1)


def test_limits_inside_limits() -> None:
    assert clock.seconds_left() == clock.work_left() == INF and not clock.late()
    with clock.limited(100.0, 1e9):
        with clock.limited(None, 5e8):
            clock.spend(3e8)
            assert 0 < clock.work_left() < 2e8 and clock.seconds_left() <= 100
            clock.spend(3e8)
            assert clock.late() and not clock.out_of_time()
        assert 0 < clock.work_left() < 5e8 and not clock.late(), (
            "what was spent inside is gone, no more"
        )
        with clock.limited(1000.0):
            assert clock.seconds_left() <= 100
    with clock.limited(0.0):
        assert clock.out_of_time()
    assert not clock.late()


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "certify"])
def test_a_limit_is_kept_on_a_large_network(method: str) -> None:
    graph = network(400, 800, 800, 800, 800, 10)
    x, y = data(graph, 24)
    begun = time.monotonic()
    limit = 5.0
    if method == "certify":
        assert ws.certify(graph, x, y, INF, domain=(0.0, 1.0), time_limit=limit).info["cut"]
    else:
        assert ws.radii(graph, x, y, INF, method=method, time_limit=limit).info["cut"]
    assert time.monotonic() - begun <= limit + 1.0
    if method == "exact":
        begun = time.monotonic()
        semidefinite(network(40, 150, 150, 10).piecewise(), INF, 2.0, limit)
        assert time.monotonic() - begun <= limit + 1.0
