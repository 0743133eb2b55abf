"""Inner boxes by balls: they hold all values, are never wider than CROWN's, and are tight where the
optimum is known.
"""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from support.rescaled import PIECEWISE, case, inside, random_graph, rescaled
from support.rounding import MODES, rounded
from wassail.certificates.graph.graph import Affine, Graph
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.ball_margins import BallSweep, ball_margins
from wassail.certificates.relax.ball_relaxation import BallLayer, BallRelaxation
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Lines
from wassail.certificates.relax.norms import Reach
from wassail.certificates.relax.rows import Length

BOX = (0.0, 1.0)
KINDS = list(PIECEWISE)


def both(graph: Graph, balls: Balls, rows: bool = True) -> tuple[Sweep, BallSweep]:
    """CROWN's sweep and the one with balls on top of it; rows: begun with the norms of rows."""
    reach = Reach(graph, balls).run()
    begun = reach.ranges if rows else {}
    moved: dict[int, Length] = {}
    crown = Sweep(graph, balls, 0, begun, moved).run()
    found = BallSweep(graph, balls, {**begun, **crown.proved()}, moved)
    found.run()
    return crown, found


@pytest.mark.few(8)
@pytest.mark.parametrize("most", [0, 66])  # layers times 2^-66 to 2^66: 1e-20 to 1e20
@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_hold_all_values_and_are_never_wider(kind: str, norm: float, most: int) -> None:
    graph = random_graph(kind, 5)
    graph = rescaled(graph, 5, most) if most else graph
    given = case(graph, 5, norm)
    radius = torch.tensor([0.15, 0.6], dtype=torch.float64)
    balls = Balls.make(given.x, radius, norm, BOX)
    crown, found = both(graph, balls)
    for j in crown.spans:
        slack = 1e-9 * (crown.centre[j].abs() + 1e-300)
        for old, new in zip(crown.spans[j], found.spans[j]):
            assert (new.abs() <= old.abs() * (1 + 1e-9) + slack).all()
    for points in inside(given.x, radius, norm, 60, 1):
        values = graph.values(points)
        for j, (low, high) in found.proved().items():
            slack = 1e-9 * (values[j].abs() + torch.where(high.isinf(), 0.0, high.abs()))
            assert ((values[j] >= low - slack) & (values[j] <= high + slack)).all()


def test_a_layer_of_known_optimum_is_met() -> None:
    """`<w, relu(d)>` with `w > 0` on an l2 ball is `r ||w||`; by boxes it is `r ||w||_1`.
    Slope cones meet it, too.
    """
    n = 48
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 3), nn.ReLU(), nn.Linear(3, 2)
    ).double()
    weight = torch.rand(3, n, generator=generator, dtype=torch.float64) + 0.1
    with torch.no_grad():
        for layer in model[::2]:
            layer.bias.zero_()
        model[0].weight.copy_(torch.eye(n))
        model[2].weight.copy_(weight)
        model[2].bias.fill_(-0.1)
    graph = read(model, (n,))
    radius = torch.tensor([0.5], dtype=torch.float64)
    balls = Balls.make(torch.zeros(1, n, dtype=torch.float64), radius, 2.0, None)
    crown, found = both(graph, balls, False)
    true = 0.5 * weight.norm(dim=1)
    high = found.spans[3][1][0]
    assert (high >= true).all()
    assert (high <= 1.02 * true).all()
    assert (crown.spans[3][1][0] >= true).all()
    assert (crown.spans[3][1][0] <= 1.02 * true).all()
    assert (0.5 * weight.sum(1) > 1.5 * true).all()


class _Plain(Sweep):
    """A sweep that takes no ascent for inner boxes."""

    passes = 0.0


def test_margins_gain_by_inner_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hidden layers: what the inner boxes win is more than what the last bounds win alone."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 4)
    ).double()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(1.8)
    graph = read(model, (40,))
    x = torch.rand(4, 40, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    where = (graph, x, y, 0.5, 2.0, BOX)
    narrow = ball_margins(*where, depth=0)
    monkeypatch.setattr(
        "wassail.certificates.relax.ball_margins.BallSweep",
        lambda graph, balls, known, moved: _Plain(graph, balls, 0, known),
    )
    wide = ball_margins(*where, depth=0)
    assert (narrow >= wide - 1e-9).all()
    open_ = wide < 0
    assert open_.any()
    assert (narrow - wide)[open_].mean() > 0.02 * wide[open_].abs().mean()


@pytest.mark.parametrize("mode", MODES)
def test_the_longest_column_of_a_convolution(mode: str) -> None:
    """From above in every rounding mode, times a radius, and exact up to that."""
    for stride, padding in ((1, 0), (2, 1), (1, 2)):
        torch.manual_seed(stride)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3, stride, padding), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
        )
        model(torch.zeros(1, 2, 6, 6))
        graph = read(model.double(), (2, 6, 6))
        op = graph.nodes[1].op
        assert isinstance(op, Affine) and isinstance(op.map, Conv)
        eye = torch.eye(72, dtype=torch.float64).reshape(72, 2, 6, 6)
        columns = op.map.forward(eye).flatten(1).tolist()
        true = max(sum(Fraction(v) ** 2 for v in column) for column in columns)
        with rounded(mode):
            found = torch.tensor(0.3, dtype=torch.float64)
            found = found * op.map.longest_column(graph.nodes[1].shape)
        square = Fraction(float(found)) ** 2 / Fraction(0.3) ** 2
        assert true <= square <= true * (1 + Fraction(1, 10**12))


def layer_of(rows: int, size: int) -> BallLayer:
    generator = torch.Generator().manual_seed(1)

    def some() -> Tensor:
        return torch.rand(rows, size, generator=generator, dtype=torch.float64)

    c = some() - 0.5
    zero = torch.zeros_like(c)
    free = some() < 0.7
    rho = torch.full((rows,), 0.4, dtype=torch.float64)
    slope = torch.full((size,), 0.1, dtype=torch.float64)
    lines = Lines(zero, zero, zero, zero)
    here = torch.where(c > 0, c, slope * c)
    return BallLayer(lines, free, c, here, -some(), some(), slope, 1e-3 * some(), rho)


def test_packed_rows_cost_the_same() -> None:
    """Rows with few coefficients, of different counts, one of them with none."""
    size = 60
    layer = layer_of(4, size)
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(4, size, generator=generator, dtype=torch.float64)
    w[0, 9:] = 0
    w[1, :50] = 0
    w[2, ::4] = 0
    w[2, 12:] = 0
    w[3] = 0
    up = torch.rand(4, size, generator=generator, dtype=torch.float64)
    log_lam = torch.tensor([-1.0, 0.3, 1.0, 0.0], dtype=torch.float64)
    packed, (few,) = layer.packed(w, w)
    assert few.shape[1] == 10 and packed.c.shape == few.shape
    with torch.no_grad():
        g, constant = layer.pull(w, up, up, log_lam, 0.0)
    with torch.enable_grad():  # nothing is packed where gradients are wanted
        same, other = layer.pull(w, up, up, log_lam, 0.0)
    assert torch.equal(g, same)
    assert torch.allclose(constant, other, rtol=1e-12, atol=0)


def test_both_starts_are_tried() -> None:
    """Far from their kinks tangents are exact, and CROWN's slopes are not."""
    n = 40
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(n))
        model[0].bias.fill_(-0.3)
        model[2].weight.copy_(torch.rand(2, n, generator=generator) + 0.5)
    graph = read(model, (n,))
    radius = torch.tensor([0.4], dtype=torch.float64)
    balls = Balls.make(torch.zeros(1, n, dtype=torch.float64), radius, 2.0, None)
    reach = Reach(graph, balls).run()
    sweep = Sweep(graph, balls, 0, reach.ranges).run()
    spheres = BallRelaxation(sweep)
    rows = torch.eye(2, dtype=torch.float64)
    owner = torch.zeros(2, dtype=torch.int64)
    goal = torch.zeros(2, dtype=torch.float64)
    found, slopes = spheres.bound(3, rows, owner, 0, goal)
    # One entry at a time passes its kink, by 0.1: that is the most there is.
    true = 0.1 * model[2].weight.detach().amax(1)
    assert (found >= true).all()
    assert math.isclose(float(slopes[2][0].abs().max()), 0.0)
    constant, a, _ = sweep.bound(3, rows, owner)
    assert (found < 0.5 * (constant + sweep.inputs.upper(a, owner))).all()
