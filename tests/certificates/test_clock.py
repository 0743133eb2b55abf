"""The clock decides nothing without a time limit, and a limit is kept with one: with clocks
that are made here.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.work import counted
from wassail.certificates import clock
from wassail.certificates.exact.infinity import infinity
from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.lipschitz.semidefinite import semidefinite
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep

INF = math.inf
METHODS = ("crown", "ball", "branch", "exact", "auto")


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
    for method in ("branch", "auto"):
        found = ws.verify(SMALL, x, y, ws.Threat("inf", "inf", 0.05), method=method)
        yield found.proved.double().tolist()
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


@pytest.mark.slow
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


@pytest.mark.few(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_limit_ends_every_method_and_keeps_what_is_proved(method: str, ticks: Ticks) -> None:
    graph = network(6, 20, 20, 20, 3)
    x, y = data(graph, 4)
    full = ws.radii(graph, x, y, 2.0, method="crown")
    flips = ws.nearest(graph.logits, x, y, 2.0).distances
    looks = []
    whole = True
    last = torch.zeros(4).double()
    for limit in (1, 300, 3000):
        begun = ticks.asked
        found = ws.radii(graph, x, y, 2.0, method=method, time_limit=limit)
        looks.append(ticks.asked - begun)
        whole &= not found.info["cut"]
        assert (found.values >= 0).all() and (found.values <= flips).all()
        assert found.info["cut"] or (found.values >= 0.99 * full.values).all()
        last = found.values
    assert not whole, "the least of the limits cuts"
    assert looks[0] <= 40, f"{looks}: once the time is up, what follows ends at its first look"
    assert (last > 0).any()


def test_a_sweep_looks_between_nodes_and_chunks(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = network(6, 30, 30, 30, 4)
    x, _ = data(graph, 4)
    balls = Balls.make(x, torch.full((4,), 0.5).double(), 2.0, (0.0, 1.0))
    with clock.limited(1e9):
        Sweep(graph, balls).run()
        coarse = ticks.asked
        monkeypatch.setattr("wassail.certificates.relax.rows.CHUNK", 64)
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


WIDE = network(20, 40, 40, 40, 5)
CELLS = network(4, 12, 12, 3)
CONV = read(
    nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 4),
    ),
    (3, 8, 8),
)


def images(count: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return x, CONV.logits(x).argmax(1)


def limited_radii(method: str, graph: Graph, norm: float) -> Callable[[float], object]:
    x, y = images(20) if graph is CONV else data(graph, 30)
    return lambda seconds: ws.radii(graph, x, y, norm, method=method, time_limit=seconds)


def limited_verify(method: str, norm: float) -> Callable[[float], object]:
    x, y = images(30)
    threat = ws.Threat(norm, INF, 0.2)
    return lambda seconds: ws.verify(CONV, x, y, threat, method=method, time_limit=seconds)


def limited_constant(method: str, graph: Graph, norm: float) -> Callable[[float], object]:
    box = (0.0, 1.0)
    return lambda seconds: ws.lipschitz(graph, norm, box, method=method, time_limit=seconds)


def limited_worst(norm: float, order: float, loss: str) -> Callable[[float], object]:
    x, y = data(CELLS, 20)
    threat = ws.Threat(norm, order, 0.1)
    return lambda seconds: ws.worst_case(CELLS, x, y, threat, loss, time_limit=seconds)


def limited_loss(
    name: str, graph: Graph, domain: tuple[float, float] | None
) -> Callable[[float], object]:
    x, y = data(graph, 20)
    certify = getattr(ws, name)
    return lambda seconds: certify(graph, x, y, 2, domain=domain, time_limit=seconds)


def limited_sandwich(seconds: float) -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    x = torch.rand(20, 8, dtype=torch.float64)
    return ws.sandwich(model, x, model(x).argmax(1), ws.Threat(INF, 1, 0.05), time_limit=seconds)


BOX = (0.0, 1.0)
FAST = {
    "crown l2": limited_radii("crown", WIDE, 2.0),
    "branch linf": limited_radii("branch", CONV, INF),
    "ball l2": limited_radii("ball", CONV, 2.0),
    "verify linf": limited_verify("auto", INF),
    "sdp l2": limited_constant("sdp", WIDE, 2),
    "exact constant l2": limited_constant("exact", WIDE, 2),
    "smooth constant": limited_constant("auto", SMOOTH, INF),
    "worst case l2": limited_worst(2, 1, "margin"),
    "worst case linf": limited_worst(INF, 2, "cross_entropy"),
    "certify": limited_loss("certify", CELLS, None),
    "loss curve": limited_loss("loss_curve", CELLS, BOX),
    "infinity": lambda seconds: infinity(WIDE.piecewise(), 2.0, range(5), time_limit=seconds),
    "nearest flip": lambda seconds: nearest_flip(
        SMALL, *data(SMALL, 30), 2.0, BOX, time_limit=seconds
    ),
}
SLOW = {
    **{
        f"radii {method} {graph.inputs} l{norm}": limited_radii(method, graph, norm)
        for method in METHODS
        for graph in (WIDE, CONV)
        for norm in (1.0, 2.0, INF)
    },
    **{
        f"verify {method} l{norm}": limited_verify(method, norm)
        for method in ("crown", "branch", "ball", "auto")
        for norm in (2.0, INF)
    },
    **{
        f"constant {method} {graph.inputs} l{norm}": limited_constant(method, graph, norm)
        for method in ("auto", "sdp", "exact", "propagate")
        for graph in (WIDE, SMOOTH, SMALL)
        for norm in (2.0, INF)
    },
    **{
        f"worst case {loss} l{norm} W{order}": limited_worst(norm, order, loss)
        for loss in ("margin", "cross_entropy")
        for norm, order in ((2, 1), (1, 1), (INF, 2), (2, INF))
    },
    **{
        f"{name} {graph.inputs} {domain}": limited_loss(name, graph, domain)
        for name in ("certify", "loss_curve")
        for graph, domain in ((SMALL, None), (SMOOTH, BOX), (WIDE, BOX))
    },
    "radii exact small": limited_radii("exact", SMALL, INF),
    "semidefinite": lambda seconds: semidefinite(WIDE.piecewise(), INF, INF, seconds),
    "sandwich": limited_sandwich,
}


SHORT = 0.3


def check_in_time(run: Callable[[float], object], patch: pytest.MonkeyPatch) -> None:
    """The work between two looks is short, and so is what comes after the limit: less than a tenth
    of a second of one core.
    """
    limit = 1.0
    with counted(patch) as work:
        run(limit)
    assert work.seconds() > 0.1 * limit and work.looks > 10, "there is something to stop"
    assert work.longest <= SHORT, f"{work.longest:.3f} at {work.where}"
    assert work.seconds() <= limit + SHORT


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FAST)
def test_the_work_between_two_looks_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_time(FAST[name], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_work_between_two_looks_is_short_everywhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_in_time(SLOW[name], monkeypatch)


TINY = network(2, 6, 3)


@pytest.mark.parametrize(("norm", "order"), [(INF, 2), (2, INF)])
def test_a_worst_case_that_is_cut_holds_the_whole_one(
    norm: float, order: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(TINY, 4)
    threat = ws.Threat(norm, order, 0.2)
    with counted(monkeypatch) as work:
        whole = ws.worst_case(TINY, x, y, threat, tolerance=1e-3, time_limit=1e9).bound
    assert not whole.info["cut"]
    cuts = 0
    for share in (0.3, 0.6, 0.8, 0.95):
        limit = share * work.seconds()
        with suppress(ws.InputError), counted(monkeypatch):  # before the cells are listed
            bound = ws.worst_case(TINY, x, y, threat, tolerance=1e-3, time_limit=limit).bound
            cuts += bound.info["cut"]
            assert bound.lower <= whole.upper and whole.lower <= bound.upper < INF
    assert cuts, "some limit falls into the search"


@pytest.mark.parametrize("domain", [BOX, None])
def test_curves_and_certificates_that_are_cut_are_above_the_whole_ones(
    domain: tuple[float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(TINY, 4)
    with clock.limited(work=clock.SECOND / 4):
        whole = ws.loss_curve(TINY, x, y, 2, domain=domain, grid=[0.05, 0.2])
    for limit in (0.01, 0.1):
        with counted(monkeypatch):
            curve = ws.loss_curve(TINY, x, y, 2, domain=domain, grid=[0.05, 0.2], time_limit=limit)
        with counted(monkeypatch):
            sure = ws.certify(TINY, x, y, 2, domain=domain, time_limit=limit)
        assert curve.info["cut"] and sure.info["cut"]
        for eps in (0.0, 0.05, 0.3):
            low, high = curve(eps)
            assert low <= whole(eps)[1] and whole(eps)[0] <= high < INF
            assert whole(eps)[0] <= sure.upper(eps)


@pytest.mark.parametrize("name", FAST)
def test_a_limit_in_real_seconds(name: str) -> None:
    """By the processor's time, which is no more than that of the wall, and does not grow with the
    load of the machine.
    """
    begun = time.process_time()
    with suppress(ws.InputError):  # of a worst case whose cells are not listed by then
        FAST[name](0.1)
    assert time.process_time() - begun <= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "certify", "semidefinite"])
def test_a_limit_is_kept_on_a_large_network(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processor's time, so that the load of the machine has no part in it."""
    monkeypatch.setattr(clock, "now", time.process_time)
    graph = network(400, 800, 800, 800, 800, 10)
    x, y = data(graph, 24)
    limit = 5.0
    begun = time.process_time()
    if method == "certify":
        assert ws.certify(graph, x, y, INF, domain=(0.0, 1.0), time_limit=limit).info["cut"]
    elif method == "semidefinite":
        semidefinite(network(100, 500, 500, 10).piecewise(), INF, 2.0, limit)
        assert time.process_time() - begun > limit, "there is something to stop"
    else:
        assert ws.radii(graph, x, y, INF, method=method, time_limit=limit).info["cut"]
    assert time.process_time() - begun <= limit + 1.0
