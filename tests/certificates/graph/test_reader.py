"""A program is read as it was exported, and rewritten by torch first where it has to be."""

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from support.networks import Net, one_sentence, seeded
from support.transformers import linear
from wassail.certificates.graph import reader
from wassail.certificates.graph.builder import WAY_OUT
from wassail.certificates.graph.graph import Graph
from wassail.errors import InputError

HALF = torch.zeros(1, dtype=torch.half)
SCORES = torch.tensor([0.0, 5e9], dtype=torch.float64)
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
    "precision": lambda: Net(lambda m, x: m.a((2 * x).to(HALF).double()), a=linear(4)),
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


def branching(x: Tensor) -> Tensor:
    return 2 * x if x.sum() > 1 else x


def counting(x: Tensor) -> Tensor:
    return x * int((x > 0.5).sum())


@pytest.mark.parametrize("body", [branching, counting])
def test_a_branch_on_data_is_one_sentence(
    body: Callable[[Tensor], Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch prints the program so far, and warns in its log."""
    model = seeded(Net(lambda m, x: m.a(body(x)), a=linear(4)))
    with pytest.raises(InputError, match="branches on values of the data") as error:
        reader.read(model, (4,))
    one_sentence(str(error.value))
    assert WAY_OUT in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_what_a_model_says_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    def speaking(x: Tensor) -> Tensor:
        print("hello", file=sys.stderr)
        return x

    reader.read(seeded(Net(lambda m, x: m.a(speaking(x)), a=linear(4))), (4,))
    assert "hello" in capfd.readouterr().err


@pytest.mark.parametrize(
    "layer", [torch.sin, torch.cumsum, torch.argsort], ids=lambda f: f.__name__
)
def test_a_refusal_names_the_way_out(layer: Callable[..., Tensor]) -> None:
    model = seeded(
        Net(
            lambda m, x: m.a(layer(x, **({"dim": 1} if layer is torch.cumsum else {})) * 1.0),
            a=linear(4),
        )
    )
    with pytest.raises(InputError) as error:
        reader.read(model, (4,), smooth=True)
    one_sentence(str(error.value))
    assert WAY_OUT in str(error.value)


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "eye": lambda x: x @ torch.eye(4),
    "eye as a layer": lambda x: F.linear(x, torch.eye(4)),
    "ones, computed with": lambda x: x @ (torch.ones(4, 4) / 3),
    "literal": lambda x: x @ torch.tensor([[1.0, 0.1, 0.0, 0.0]] * 4),
    "linspace": lambda x: x * torch.linspace(0, 1, 4),
    "whole numbers": lambda x: x + torch.arange(4),
    "kernel": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3) / 3, padding=1)[:, 0],
    "of the type of x": lambda x: x * torch.full_like(x, 0.3) + x.new_ones(4),
    "in float64": lambda x: (x @ torch.eye(4, dtype=torch.float64).float()) * 0.1,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_made_on_the_way(name: str) -> None:
    """In the numbers that the model has: 1 / 3 and 0.1 are not the same in float32."""
    model = Net(lambda m, x: m.a(torch.relu(CONSTANTS[name](x))), a=linear(4)).eval().float()
    graph = reader.read(model, (4,))
    x = torch.rand(20, 4, generator=torch.Generator().manual_seed(1))
    truth = model(x).detach().double()
    assert torch.allclose(graph.logits(x), truth, rtol=0, atol=1e-6)
    assert ws.radii(model, x[:2], truth[:2].argmax(1), "inf", (0, 1), "crown").values.min() >= 0


def test_a_constant_in_float32_is_that_number() -> None:
    """`torch.linspace` in float32 is not the one in float64, nor the nearest numbers to it."""
    steps = torch.linspace(0, 1, 8)
    assert (steps.double() - torch.linspace(0, 1, 8, dtype=torch.float64)).abs().max() > 1e-9
    graph = reader.read(lambda x: x * torch.linspace(0, 1, 8), (8,))
    assert torch.equal(graph.logits(torch.ones(1, 8))[0], steps.double())


@pytest.mark.few(4)
@pytest.mark.parametrize("norm", ["inf", 2, 1])
@pytest.mark.parametrize("method", ["crown", "ball", "branch", "exact", "auto"])
def test_one_number_for_each_sample(method: str, norm: Any) -> None:
    """Closed form: the logits are lines in `relu(sum(x) - 1)`, so a flip is a change of the sum."""
    model = Net(lambda m, x: m.a(torch.relu(x.sum((1, 2, 3)) - 1)[:, None]), a=nn.Linear(1, 2))
    model.a.weight.data = torch.tensor([[1.0], [-1.0]])
    model.a.bias.data = torch.tensor([-1.0, 1.0])
    x = torch.full((1, 1, 2, 2), 0.8)  # the sum is 3.2, and classes meet where it is 2
    found = ws.radii(model, x, torch.tensor([0]), norm, (0, 1), method).values
    exact = {"inf": 0.3, 2: 0.6, 1: 1.2}[norm]
    assert float(found) <= exact * (1 + 1e-6)
    assert float(found) >= 0.99 * exact


def test_an_operation_across_the_batch_is_refused() -> None:
    total = lambda x: x.sum(1)  # noqa: E731
    for body in (
        lambda x: x - total(x).mean(),
        lambda x: x * total(x).softmax(0)[:, None],
        lambda x: x + torch.cat([total(x), total(x)]).sum(),
        lambda x: x + F.linear(total(x), torch.ones(1, 1))[:, None],
    ):
        with pytest.raises(InputError):
            reader.read(lambda x, body=body: body(x), (4,), smooth=True)


def masked(fill: float, added: bool) -> nn.Module:
    hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)

    def forward(m: Any, x: Tensor) -> Tensor:
        scores = m.b(x) @ x.mT
        scores = (
            scores + torch.zeros(3, 3).masked_fill(hidden, fill).to(x)
            if added
            else scores.masked_fill(hidden, fill)
        )
        return m.a((scores.softmax(-1) @ x).flatten(1))

    return seeded(Net(forward, a=linear(12), b=nn.Linear(4, 4)))


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("added", [True, False])
def test_masks_that_are_finite_cost_nothing(added: bool) -> None:
    x = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = masked(-math.inf, added)(x).argmax(1)
    best, *others = (
        ws.radii(masked(fill, added), x, y, "inf", None, "crown").values
        for fill in (-math.inf, -1e9, -1e30, torch.finfo(torch.float32).min)
    )
    for found in others:
        assert torch.allclose(found, best, rtol=1e-4)


def test_a_score_as_large_as_a_mask_is_no_mask() -> None:
    """Radius inf was claimed with a flip at 0.3."""

    def forward(m: Any, x: Tensor) -> Tensor:
        p = torch.softmax(x * torch.tensor([0.0, 1e10]).to(x) - SCORES, 1)[:, :1] - 0.5
        return torch.cat([p, -p], 1) + m.offset

    x = torch.tensor([[0.2]], dtype=torch.float64)
    for offset in (0.0, 1e4):
        model: Any = Net(forward)
        model.offset = offset
        found = float(ws.radii(model, x, model(x).argmax(1), "inf", (0, 1)).values)
        assert 0.29 <= found <= 0.3


def test_scores_below_every_mask() -> None:
    """What is not masked counts, however low it is."""
    model = Net(
        lambda m, x: (x - 5e9).masked_fill(torch.tensor([True, False, False]), -math.inf).softmax(1)
    )
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    graph = reader.read(lambda x: model(x.double()), (3,), smooth=True)
    assert torch.allclose(graph.logits(x), model(x), rtol=0, atol=1e-12)
