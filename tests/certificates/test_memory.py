"""Memory that grows with the samples: their own, and a few numbers for each."""

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import wassail as ws
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.prove import radius_search
from wassail.certificates.prove.record import Verdicts
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins

BOX = (0.0, 1.0)
SIZE = 64  # numbers of a sample
Call = Callable[[Graph, Tensor, Tensor], object]


def verified(graph: Graph, x: Tensor, y: Tensor) -> Verdicts:
    return ws.verify(graph, x, y, ws.Threat(math.inf, math.inf, 0.01, BOX), "crown", batch_size=8)


def searched(graph: Graph, x: Tensor, y: Tensor) -> ws.Radii:
    return ws.radii(graph, x, y, math.inf, BOX, "crown", tolerance=0.3, batch_size=8)


CALLS: dict[str, Call] = {"verify": verified, "radii": searched}


def problem(count: int) -> tuple[Graph, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(SIZE, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4)
    )
    x = torch.rand(count, SIZE)
    return read(model.eval(), (SIZE,)), x, model(x).argmax(1)


class Watch(TorchDispatchMode):
    """The most bytes of one tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            value.untyped_storage().data_ptr()
            for value in tree_leaves((args, kwargs))
            if isinstance(value, Tensor)
        }
        for value in tree_leaves(out):
            fresh = isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given
            self.most = max(self.most, value.nbytes if fresh else 0)
        return out


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CALLS)
def test_no_tensor_is_larger_than_the_samples(name: str) -> None:
    """Copies in float64 of all samples would be twice as large."""
    graph, x, y = problem(1000)
    with Watch() as watch:
        CALLS[name](graph, x, y)
    assert 0 < watch.most <= x.nbytes


def alive() -> int:
    """Bytes of all tensors that live."""
    gc.collect()
    stores = {}
    for value in gc.get_objects():
        if type(value) is Tensor:  # not those that an export leaves, which have no memory
            store = value.untyped_storage()
            stores[store.data_ptr()] = store.nbytes()
    return sum(stores.values())


@pytest.mark.few(5)
@pytest.mark.parametrize("norm", [math.inf, 2.0, 1.0])
@pytest.mark.parametrize("polish", ["all", "open", "none"])
def test_a_sweep_is_freed_with_its_last_name(norm: float, polish: str) -> None:
    """Without the garbage collector: what lies in a circle would wait for it, sweep after sweep."""
    graph, x, y = problem(3)
    gc.collect()
    gc.disable()
    try:
        sweep = Sweep(graph, Balls.make(x, torch.full((3,), 0.1), norm, BOX)).run()
        margins(sweep, y, polish)
        watched = [weakref.ref(v) for v in (sweep, sweep.exact, sweep.fast, sweep.parallel)]
        del sweep
        assert [ref() for ref in watched] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.slow_cases("radii")
@pytest.mark.parametrize("name", CALLS)
def test_what_is_kept_is_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the samples, when a sweep begins; spans are kept for a number of samples at a time."""
    monkeypatch.setattr(radius_search, "KEPT", 2**10)
    run = Sweep.run
    found: list[int] = []

    def weighed(sweep: Sweep) -> Sweep:
        found.append(alive())
        return run(sweep)

    monkeypatch.setattr(Sweep, "run", weighed)
    most = []
    for count in (24, 72):
        graph, x, y = problem(count)
        before = alive()
        found.clear()
        CALLS[name](graph, x, y)
        most.append(max(found) - before)
    assert most[0] > 0
    assert (most[1] - most[0]) / 48 < 4 * SIZE  # a sample in float32
