"""A structure that is kept: the same object while nothing changes, read again after any change."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph import reader
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read

CAP = 9.0


class Capped(nn.Module):
    """Its cap is an attribute, far above what is reached at random points, or a global."""

    def __init__(self) -> None:
        super().__init__()
        self.cap = 9.0
        self.table = [torch.ones(3)]
        self.register_buffer("shift", torch.zeros(3))
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x)) + self.shift
        return x.clamp(max=self.cap).clamp(max=CAP) * self.table[0]


def network() -> Capped:
    torch.manual_seed(0)
    return Capped().eval()


def same(model: nn.Module, x: Tensor) -> None:
    """The graph is the model as it is now."""
    graph = read(model, (3,))
    with torch.no_grad():
        assert torch.allclose(graph.logits(x), model.eval()(x).double(), atol=1e-5)


def in_place(model: Capped) -> None:
    with torch.no_grad():
        model.layer.weight[0, 0] += 1


def by_data(model: Capped) -> None:
    model.layer.weight.data.copy_(2 * model.layer.weight.data)


def by_memory(model: Capped) -> None:
    model.layer.bias.detach().numpy()[1] = 3.0


def by_buffer(model: Capped) -> None:
    model.shift.data[0] = 1.0


def by_statistics(model: Capped) -> None:
    model.norm.running_var.data.mul_(2)


def by_submodule(model: Capped) -> None:
    model.layer = nn.Linear(3, 3, bias=False)


def by_attribute(model: Capped) -> None:
    model.cap = 0.1


def by_list(model: Capped) -> None:
    model.table[0] = torch.full((3,), 2.0)


def by_hook(model: Capped) -> None:
    model.layer.register_forward_hook(lambda module, given, out: 3 * out)


def by_pre_hook(model: Capped) -> None:
    model.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def by_forward(model: Capped) -> None:
    old = model.layer.forward
    model.layer.forward = lambda x: -old(x)  # type: ignore[method-assign, assignment]


CHANGES: list[Callable[[Capped], None]] = [
    in_place,
    by_data,
    by_memory,
    by_buffer,
    by_statistics,
    by_submodule,
    by_attribute,
    by_list,
    by_hook,
    by_pre_hook,
    by_forward,
]


@pytest.mark.few(6)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: Callable[[Capped], None]) -> None:
    model = network()
    x = 3 * torch.randn(20, 3)
    first = read(model, (3,))
    assert read(model, (3,)) is first
    change(model)
    same(model, x)
    assert read(model, (3,)) is not first


def test_globals_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap is not active at the random points: only the code tells of it."""
    model = network()
    first = read(model, (3,))
    monkeypatch.setitem(globals(), "CAP", 0.2)
    assert read(model, (3,)) is not first
    same(model, 3 * torch.randn(20, 3))


def test_classes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    first = read(model, (3,))
    monkeypatch.setattr(Capped, "forward", lambda self, x: 2 * self.layer(x))
    assert read(model, (3,)) is not first
    same(model, torch.randn(20, 3))
    other = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    read(other, (3,))
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: torch.relu(x) * 2)
    same(other, torch.randn(20, 3))


def test_mode_and_shape_and_options() -> None:
    """A model in training mode is read as in eval mode; another shape is another graph."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    first = read(model.eval(), (3,))
    model.train()
    same(model, torch.randn(5, 3))
    assert model.eval() is not None and read(model, (3,)) is first
    wide = read(model, (3,), smooth=True)
    assert wide is not first and wide.inputs == 3


def test_a_kept_graph_shares_no_memory_with_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    graph = read(model, (3,))
    before = graph.logits(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(graph.logits(x), before)


class Table:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.factor = 1.0


class Strange(nn.Module):
    """Part of it runs under another mode of autograd, so it is a program inside the program."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.rest = Table()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with torch.enable_grad():
            return x + torch.relu(x - 50) * self.rest.factor  # 0 at the random points


def test_state_anywhere_is_seen() -> None:
    model = Strange()
    first = read(model, (3,))
    assert read(model, (3,)) is first
    model.rest.factor = 2.0
    assert read(model, (3,)) is not first
    same(model, 100 * torch.randn(5, 3))
    model.layer.weight.data.mul_(2)
    same(model, 100 * torch.randn(5, 3))


class Aliased(nn.Module):
    """A dropout that does nothing returns its argument: the ReLU in place changes that, too."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        h = self.drop(x[:, : self.part] if self.part < 3 else x).relu_()
        return torch.cat([h - 3 * (x[:, : self.part] - h), x[:, self.part :]], 1)


def test_what_is_written_through_a_dropout_is_seen() -> None:
    whole = Aliased(3).eval()
    same(whole, 3 * torch.randn(20, 3))
    with pytest.raises(ws.errors.InputError, match="not supported"):
        read(Aliased(1).eval(), (3,))


def test_an_operation_that_takes_a_list_and_writes_elsewhere() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x], 1, out=torch.empty(len(x), 6))

    same(Joined(), torch.randn(5, 3))


def test_functions_are_read_anew_or_by_their_program() -> None:
    scale = [1.0]
    layer = nn.Linear(3, 2)

    def model(x: Tensor) -> Tensor:
        out: Tensor = layer(x) * scale[0]
        return out

    x = torch.randn(5, 3)
    for factor in (1.0, 1.0, 2.0):
        scale[0] = factor
        with torch.no_grad():
            truth = model(x).double()
        assert torch.allclose(read(model, (3,)).logits(x), truth, atol=1e-5)


def test_models_are_not_kept_alive_and_few_structures_are_kept() -> None:
    model = network()
    for k in range(6):
        model.cap = 1.0 + k
        read(model, (3,))
    assert 0 < len(reader._READ[model]) <= reader.KEPT
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_one_reading_serves_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.rand(4, 3)
    y = model(x).argmax(1)
    threat = ws.Threat("inf", 1, 0.01, (0, 1))
    translate = reader._translated
    read_anew: list[int] = []

    def counted(*args: Any) -> tuple[Graph, Tensor]:
        read_anew.append(1)
        return translate(*args)

    monkeypatch.setattr(reader, "_translated", counted)

    def everything() -> None:
        ws.radii(model, x, y, "inf", (0, 1), "crown")
        ws.verify(model, x, y, threat, "crown")
        ws.loss_curve(model, x, y, "inf", grid=[0.01], time_limit=1)
        ws.sandwich(model, x, y, threat, time_limit=1)

    everything()
    assert len(read_anew) == 1
    with torch.no_grad():
        model[2].weight[0, 0] += 0.5
    everything()
    assert len(read_anew) == 2


def test_radii_after_a_change() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.rand(4, 3)
    lead = torch.sub(*model(x).detach().T)
    model[2].bias.data[0] -= lead.mean()  # both classes are there, so every sample has a flip
    y = model(x).argmax(1)
    before = ws.radii(model, x, y, 2).values
    assert before.isfinite().all()
    assert torch.equal(ws.radii(model, x, y, 2).values, before)
    model[2].bias.data[0] += 0.05
    after = ws.radii(model, x, y, 2).values
    fresh = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(after, ws.radii(fresh, x, y, 2).values)
    assert not torch.equal(after, before)
