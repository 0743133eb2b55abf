"""A program is read as it was exported, and rewritten by torch first where it has to be."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks import Net, one_sentence, seeded
from support.transformers import linear
from wassail.certificates.graph import reader
from wassail.certificates.graph.graph import Graph
from wassail.errors import InputError

Make = Callable[[], nn.Module]
DIRECT: dict[str, tuple[Make, tuple[int, ...]]] = {
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1),
            nn.BatchNorm2d(2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(8, 3),
        ),
        (1, 4, 4),
    ),
    "tokens": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True), nn.Flatten(), linear(12)
        ),
        (3, 4),
    ),
    "moves": (
        lambda: Net(lambda m, x: m.a(x.reshape(-1, 2, 2).movedim(1, 2).flatten(1)), a=linear(4)),
        (4,),
    ),
}
REWRITTEN: dict[str, Make] = {
    "a view is written into": lambda: Net(
        lambda m, x: m.a(activated(m.b(x))), a=linear(4), b=nn.Linear(4, 4)
    ),
    "what is written into is used again": lambda: Net(
        lambda m, x: m.a(twice_and_activated(m.b(x))), a=linear(4), b=nn.Linear(4, 4)
    ),
}
REFUSED: dict[str, Make] = {
    "dropout": lambda: Net(lambda m, x: m.a(F.dropout(x, 0.5, training=True)), a=linear(4)),
    "precision": lambda: Net(
        lambda m, x: m.a((x * x.new_ones(1)).to(m.b.weight).double()),
        a=linear(4),
        b=nn.Linear(4, 4).half(),
    ),
}


def activated(z: Tensor) -> Tensor:
    z.view(-1, 2, 2).relu_()
    return z


def twice_and_activated(z: Tensor) -> Tensor:
    return 2 * z + z.relu_()


def told(graph: Graph) -> list[Any]:
    """All that a graph consists of, as plain values."""
    return [
        (
            node.inputs,
            node.shape,
            node.place,
            type(node.op),
            node.exponent,
            len(node.calls or ()),
            [v.tolist() for v in node.tensors],
        )
        for node in graph.nodes
    ]


def directly(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each program that is read from now on was read as it was exported."""
    seen: list[bool] = []
    found = reader._directly

    def spied(*words: Any) -> Graph | None:
        graph = found(*words)
        seen.append(graph is not None)
        return graph

    monkeypatch.setattr(reader, "_directly", spied)
    return seen


@pytest.mark.parametrize("name", DIRECT)
def test_rewriting_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = DIRECT[name]
    model = seeded(make())
    seen = directly(monkeypatch)
    graph = reader.read(model, shape, smooth=True)
    monkeypatch.setattr(reader, "_directly", lambda *words: None)
    rewritten = reader.read(copy.deepcopy(model), shape, smooth=True)  # structures are kept
    assert seen == [True]
    assert told(graph) == told(rewritten)
    assert graph.execution == rewritten.execution


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_is_written_into_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(REWRITTEN[name]())
    seen = directly(monkeypatch)
    graph = reader.read(model, (4,))
    x = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert seen == [False]
    assert torch.allclose(graph.logits(x), model(x).detach(), rtol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_rewriting_shows_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = directly(monkeypatch)
    with pytest.raises(InputError) as error:
        reader.read(REFUSED[name]().eval().to(torch.float64), (4,))
    one_sentence(str(error.value))
    assert seen == [False]
