"""The reader's own check: wrong translations are found behind any constant that all logits share,
right ones are not refused.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.networks import Net, one_sentence, seeded
from support.operators import TABLE, Headed, Operator, numbers
from wassail.certificates.graph import agreement
from wassail.certificates.graph.builder import Builder, Index
from wassail.certificates.graph.graph import Relu
from wassail.certificates.graph.operators import registry
from wassail.certificates.graph.operators.arithmetic import add
from wassail.certificates.graph.operators.linear import linear
from wassail.certificates.graph.operators.relu import clamp
from wassail.certificates.graph.operators.softmax import softmax
from wassail.certificates.graph.reader import read
from wassail.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

NAMES = {operator.name: operator for operator in TABLE}
HAT = 1e-3
SIX = numbers(6)
OFFSETS = (0.0, 1e4, 1e6)


class Shifted(nn.Module):
    """Logits times a factor, plus a constant that all of them share."""

    def __init__(self, inner: nn.Module, offset: float, factor: float = 1.0) -> None:
        super().__init__()
        self.inner = inner
        self.offset = offset
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.inner(x) + self.offset


def wrong_slope(net: Builder, x: Index, slope: float = 0.01) -> Index:
    return net.relu(x, slope + 1e-4)


def wrong_constant(net: Builder, a: Any, b: Any, alpha: float = 1) -> Index:
    moved = b + 1e-4 if isinstance(b, Tensor) and b.ndim else b
    return add(net, a, moved, alpha)


def wrong_limit(net: Builder, x: Index, low: float = -1.0, high: float = 1.0) -> Index:
    return clamp(net, x, low, high + 1e-4)


def wrong_axis(net: Builder, x: Index, dim: int, dtype: Any = None) -> Index:
    return softmax(net, x, 1 if dim != 1 else 2)


def wrong_order(net: Builder, x: Index, weight: Tensor, bias: Tensor | None = None) -> Index:
    return linear(net, x, weight.flip(1), bias)


def wrong_late(net: Builder, x: Index) -> Index:
    """Right up to a million."""
    return clamp(net, net.relu(x), None, 1e6)


def wrong_side(net: Builder, x: Index) -> Index:
    """Right but near 0, where it has a hat."""
    one = torch.tensor(1.0, dtype=torch.float64)
    kinks = [net.relu(net.scaled(x, one, k * HAT * one)) for k in (-1.0, 0.0, 1.0)]
    hat = [net.scaled(kink, w * one, None) for kink, w in zip(kinks, (1.0, -2.0, 1.0))]
    return net.sum([net.relu(x), *hat])


MUTANTS: dict[str, tuple[str, Any, nn.Module, tuple[int, ...]]] = {
    "wrong slope": (
        "leaky_relu",
        wrong_slope,
        nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(0.2), nn.Linear(6, 3)),
        (4,),
    ),
    "wrong constant": (
        "add",
        wrong_constant,
        nn.Sequential(
            nn.Linear(4, 6), Net(lambda m, x: torch.relu(x + SIX.to(x))), nn.Linear(6, 3)
        ),
        (4,),
    ),
    "wrong limit": (
        "hardtanh",
        wrong_limit,
        nn.Sequential(nn.Linear(4, 6), nn.Hardtanh(-0.3, 0.4), nn.Linear(6, 3)),
        (4,),
    ),
    "wrong axis": (
        "softmax",
        wrong_axis,
        nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.Flatten(), nn.Linear(9, 3)),
        (3, 3),
    ),
    "wrong order": (
        "linear",
        wrong_order,
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
        (4,),
    ),
    "wrong near 0": (
        "relu",
        wrong_side,
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
        (4,),
    ),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_translations_are_found(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spelling, rule, model, shape = MUTANTS[name]
    model = seeded(copy.deepcopy(model)).to(dtype)
    for offset in OFFSETS:
        read(Shifted(model, offset), shape, smooth=True)
    monkeypatch.setitem(registry.RULES, spelling, rule)
    for offset in OFFSETS:
        with pytest.raises(InputError, match="translated wrongly") as error:
            read(Shifted(model, offset), shape, smooth=True)
        one_sentence(str(error.value))


def test_a_model_that_is_not_its_program_is_found() -> None:
    """The program is exported for one sample, and the model does something else with several."""
    inner = seeded(nn.Linear(4, 3))
    other = Net(lambda m, x: m.a(x) * (1 + 1e-3 * (len(x) > 1)), a=inner)
    for offset in (0.0, 1e3):
        with pytest.raises(InputError, match="depends on the batch") as error:
            read(Shifted(other, offset), (4,))
        one_sentence(str(error.value))


def test_a_model_whose_rounding_hides_its_margins_is_refused() -> None:
    """Unless certificates charge its rounding, which leaves a radius of 0."""
    model = seeded(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))).float()
    with pytest.raises(InputError, match=r"rounding in torch\.float32 hides the margins") as error:
        read(Shifted(model, 1e9), (4,), smooth=True)
    one_sentence(str(error.value))
    assert read(Shifted(copy.deepcopy(model).double(), 1e9), (4,), smooth=True).outputs == 3
    model[1] = nn.ReLU()
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    hidden = Shifted(model, 1e9)
    assert (ws.radii(hidden, x, hidden(x).argmax(1), "inf", (0, 1), "crown").values == 0).all()


def test_samples_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A translation that is wrong only far from the random points."""
    model = seeded(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    monkeypatch.setitem(registry.RULES, "relu", wrong_late)
    read(model, (4,))
    with pytest.raises(InputError, match="translated wrongly"):
        read(copy.deepcopy(model), (4,), samples=1e9 * torch.rand(2, 4))


@pytest.mark.parametrize(("layers", "most"), [(1, 2e-3), (3, 0.5)])
def test_crossings_are_on_both_sides_of_an_activation(layers: int, most: float) -> None:
    """Exactly one line between the ends, or several."""
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(6, 6), nn.ReLU())]
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), *hidden, nn.Linear(6, 3))
    graph = read(seeded(model), (4,))
    points = agreement.probes((4,), torch.zeros(0, dtype=torch.float64))
    found = agreement.crossings(graph, points[0], torch.cat(points[2:]))
    sides = found.chunk(2)
    first, second = (graph.values(side) for side in sides)
    entered = [node.inputs[0] for node in graph.nodes if isinstance(node.op, Relu)]
    for k in range(len(sides[0])):
        assert any(((first[i][k] > 0) != (second[i][k] > 0)).any() for i in entered)
    assert (sides[0] - sides[1]).abs().max() <= most  # of segments up to 65 long


def test_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 30 samples go through the model and through its program, and no error is simulated
    for a network of ordinary size.
    """
    seen = {"model": 0, "program": 0, "simulated": 0}
    whole = agreement.Exact.logits

    def counted(self: Any, x: Tensor, noise: float = 0.0) -> Tensor:
        seen["simulated" if noise else "program"] += len(x)
        return whole(self, x, noise)

    monkeypatch.setattr(agreement.Exact, "logits", counted)
    model = seeded(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))).float()
    model.register_forward_hook(
        lambda module, given, out: seen.update(model=seen["model"] + len(given[0]))
    )
    read(model, (4,), samples=torch.rand(50, 4))
    assert seen["model"] <= 30 and seen["program"] <= 30 and not seen["simulated"]


# One scale, offset and type for every third operator, in turn; all for all in the slow suite.
CASES = [
    (factor, offset, dtype)
    for factor in (1.0, 2.0**-20, 2.0**20)
    for offset in (1e4, 0.0, -1e6)
    for dtype in (torch.float64, torch.float32)
]


def compare(operator: Operator, factor: float, offset: float, dtype: torch.dtype) -> None:
    """The graph against the model itself, at points of several scales, with batches of 1."""
    model = Headed(operator).eval()
    if dtype == torch.float32 and not lives_in_float32(model, operator):
        return
    relative = offset if factor >= 1 else offset * factor
    whole = Shifted(model, relative, factor).to(dtype)
    try:
        graph = read(whole, operator.shape, smooth=True)
    except InputError as error:
        if dtype == torch.float32 and "hides the margins" in str(error):
            return  # no digit of the margins is left behind this offset
        raise
    draw = torch.Generator().manual_seed(3)
    x = 2 * torch.rand(12, *operator.shape, generator=draw, dtype=torch.float64) - 1
    x = torch.cat([x, 2.0**-20 * x[:2], 4 * x[:2]]).to(dtype)
    exact = copy.deepcopy(whole).double()
    with torch.no_grad():
        truth = torch.cat([exact(v[None].double()) for v in x])
    ours = graph.logits(x)
    apart = (ours - truth) - (ours - truth).mean(1, keepdim=True)
    spread = (truth - truth.mean(1, keepdim=True)).abs().max()
    # The last term: of the operations that are far from 0 on the way.
    assert (apart.abs() <= 2.0**-20 * spread + 2.0**-45 * truth.abs().max()).all()


def lives_in_float32(model: nn.Module, operator: Operator) -> bool:
    """Not those whose constants are float64 or beyond its range."""
    try:
        with torch.no_grad():
            found = copy.deepcopy(model).float()(torch.rand(2, *operator.shape))
    except RuntimeError:
        return False
    return bool(torch.isfinite(found).all())


@pytest.mark.few(17)
@pytest.mark.parametrize("name", list(NAMES)[::3])
def test_operators_behind_an_offset(name: str) -> None:
    k = list(NAMES).index(name)
    compare(NAMES[name], *CASES[k % len(CASES)])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_operator_behind_every_offset(case: tuple[float, float, torch.dtype]) -> None:
    for operator in TABLE:
        compare(operator, *case)
