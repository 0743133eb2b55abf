"""The passes that are counted are those that the model executes."""

import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail import names
from wassail.attacks import catalogue
from wassail.network import Network

INF = math.inf
EPS = {INF: 0.1, 2.0: 0.5, 1.0: 1.5}
N = 6
SHORT = {
    "cw": {"searches": 3, "steps": 30},
    "fab": {"steps": 20},
    "fab-t": {"steps": 10},
    "apgd-ce": {"steps": 20},
    "apgd-dlr": {"steps": 20},
    "apgd-t": {"steps": 10},
    "nearest": {"passes": 150},
    "a3": {"restarts": 2},
    "a3-wda": {"restarts": 2},
}
LEFT_OUT = ("square", "autoattack")  # no gradients; nothing but others of this list in turn


class _Counting(torch.autograd.Function):
    """The identity, which tells a model how many rows a backward pass goes through."""

    @staticmethod
    def forward(ctx, x: Tensor, model: "Counted") -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.model.backwards += len(gradient)
        return gradient, None


class Counted(nn.Module):
    """A network that counts the rows of its forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ws.zoo.load("digits-mlp")
        self.forwards = 0
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        return self.network(_Counting.apply(x, self))


def data() -> tuple[Tensor, Tensor]:
    """Samples of which some are wrong already."""
    x, y = (part[:N].clone() for part in ws.zoo.data("digits"))
    y[::4] = (y[::4] + 1) % 10
    return x, y


def compare(model: Counted, found: ws.Flips | ws.Distribution) -> None:
    looked = 2 * min(8, len(found.x))  # `check_model` looks at the first samples twice
    assert model.forwards == int(found.forwards.sum() + found.checks.sum()) + looked
    assert model.backwards == int(found.backwards.sum())


@pytest.mark.few(8)
@pytest.mark.parametrize("norm", [INF, 2.0, 1.0])
@pytest.mark.parametrize("engine", list(names.ENGINES))
def test_engines_count_what_is_executed_and_keep_to_the_budget(engine: str, norm: float) -> None:
    if norm != 2 and engine in ("ddn", "cw"):
        pytest.skip(f"{engine} is for l2")
    x, y = data()
    for passes in (13, 60):
        model = Counted()
        found = ws.nearest(model, x, y, norm, method=engine, passes=passes)
        compare(model, found)
        assert (found.forwards + found.backwards <= passes).all()
        # A batch in which every sample is wrong already costs what the sample would elsewhere.
        alone = ws.nearest(Counted(), x, y, norm, method=engine, passes=passes, batch_size=1)
        assert torch.equal(alone.forwards, found.forwards)
        assert torch.equal(alone.backwards, found.backwards)


@pytest.mark.slow_cases("*-1.0", "*-2.0")
@pytest.mark.parametrize("norm", [INF, 2.0, 1.0])
@pytest.mark.parametrize("attack", [name for name in names.ATTACKS if name not in LEFT_OUT])
def test_attacks_count_what_is_executed(attack: str, norm: float) -> None:
    if attack == "cw" and norm != 2:
        pytest.skip("cw is for l2")
    if attack in ("w-pgd", "w-fgsm") and norm == 1:
        pytest.skip("W-PGD has no l1 form")
    x, y = data()
    options = SHORT.get(attack, {})
    for order in (1, 2, INF):
        entry = catalogue.find(attack)
        if order not in {"each": (1, 2, INF), "above 1": (2, INF)}.get(entry.orders, (INF,)):
            continue
        model = Counted()
        threat = ws.Threat(norm, order, EPS[norm])
        found = entry.run(model, x, y, threat, **options)
        compare(model, found)
        model = Counted()  # on nothing but samples that are wrong already
        compare(model, entry.run(model, x[:1], y[:1], threat, **options))


def test_rows_that_are_not_kept_are_counted() -> None:
    """A backward pass goes through the whole batch, whatever the weights of its rows."""
    model = Counted()
    x, y = data()
    network = Network(model, torch.arange(N))
    tape = network.tape(x, network.rows)
    keep = torch.tensor([1, 4])
    rivals = (y[keep, None] + 1) % 10
    tape.gradients(y[keep], rivals, keep, again=True)
    assert network.backwards.tolist() == [1] * N and model.backwards == N
    none = tape.pull(torch.zeros(0, 10), keep[:0])
    assert none.shape == (0, *x.shape[1:]) and network.backwards.tolist() == [2] * N
    assert model.backwards == 2 * N
