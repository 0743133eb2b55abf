"""Worst-case errors of regressions: closed forms, exact values, bounds above attacks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph.reader import read
from wassail.certificates.loss.residuals import Residuals
from wassail.errors import InputError
from wassail.threat import dual

INF = math.inf
DOUBLE = torch.float64
NORMS = (1.0, 2.0, INF)
LOSSES = ("absolute", "pinball", "huber", "squared")
SETTINGS: dict[str, Any] = {"quantile": 0.8, "delta": 0.3}


def linear(seed: int = 0, n: int = 3, count: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    net = nn.Linear(n, 1).double()
    x = torch.rand(count, n, dtype=DOUBLE)
    return net, x, net(x).detach()[:, 0] + 0.3 * torch.randn(count, dtype=DOUBLE)


def small(seed: int = 1, outputs: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, outputs)).double()
    x = torch.rand(5, 2, dtype=DOUBLE)
    return net, x, net(x).detach() + 0.3 * torch.randn(5, outputs, dtype=DOUBLE)


def losses(e: Tensor, loss: str) -> Tensor:
    """By their definitions, of errors `(M, K)`: the largest of the outputs."""
    q, delta = SETTINGS["quantile"], SETTINGS["delta"]
    found = {
        "absolute": e.abs(),
        "pinball": torch.where(e < 0, -q * e, (1 - q) * e),
        "huber": nn.functional.huber_loss(e, torch.zeros_like(e), reduction="none", delta=delta),
        "squared": e * e,
    }
    return found[loss].amax(1)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", NORMS)
def test_linear_models_at_order_one_without_a_box(norm: float) -> None:
    """`E + ||w||_s eps`, times the steeper side of the pinball loss, with Huber's delta."""
    net, x, y = linear()
    length = float(torch.linalg.vector_norm(net.weight.detach()[0], dual(norm)))
    e = (net(x).detach()[:, 0] - y)[:, None]
    factor = {"absolute": 1.0, "pinball": 0.8, "huber": 0.3}
    for loss, steep in factor.items():
        truth = float(losses(e, loss).mean()) + steep * length * 0.2
        curve = ws.loss_curve(net, x, y, norm, 1, loss, None, **SETTINGS)
        low, high = curve(0.2)
        assert truth * (1 - 1e-6) <= low <= truth * (1 + 1e-13) and truth <= high * (1 + 1e-15)
        assert high <= truth * (1 + 1e-12)
        found = ws.certify(net, x, y, norm, loss, **SETTINGS).bounds(0.2)
        assert found == pytest.approx((truth, truth), rel=1e-9)
        exact = ws.worst_case(net, x, y, ws.Threat(norm, 1, 0.2, None), loss, **SETTINGS).bound
        assert exact.lower == pytest.approx(truth, rel=1e-4) and exact.upper >= truth * (1 - 1e-15)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", NORMS)
def test_squared_errors_of_linear_models_at_order_two(norm: float) -> None:
    """`(sqrt(E e^2) + ||w||_s eps)^2`, which Minkowski's bound meets; infinite at order 1."""
    net, x, y = linear()
    length = float(torch.linalg.vector_norm(net.weight.detach()[0], dual(norm)))
    e = net(x).detach()[:, 0] - y
    truth = (float((e * e).mean()) ** 0.5 + length * 0.2) ** 2
    curve = ws.loss_curve(net, x, y, norm, 2, "squared", None)
    low, high = curve(0.2)
    assert truth * (1 - 1e-15) <= high <= truth * (1 + 1e-12) and low >= 0.99 * truth
    assert curve.of_order(1)(0.2) == (INF, INF) and curve.of_order(1.5)(1e-9) == (INF, INF)
    assert curve.of_order(1)(0.0)[1] < INF
    boxed = ws.loss_curve(net, x, y, norm, 1, "squared", (0, 1))
    assert boxed(0.2)[0] <= boxed(0.2)[1] < INF
    flat = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 1)).double()
    assert ws.loss_curve(flat, x, y, norm, 1, "squared", None)(0.2)[1] < INF


def test_a_curve_of_squared_errors_without_time_is_none_the_less_a_bracket() -> None:
    """Whether errors grow without bound is not known then: the upper side is infinite still."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    x, y = torch.rand(3, 2), torch.rand(3, 1)
    low, high = ws.loss_curve(net, x, y, 2, 1, "squared", None, time_limit=1e-9)(0.1)
    assert low < INF and high == INF


def test_a_certificate_of_errors_without_time_knows_the_loss_itself() -> None:
    """A linear model: `E e + ||w||_2 eps`, between the bounds; the first term is known."""
    net, x, y = linear()
    here = float((net(x).detach()[:, 0] - y).abs().mean())
    truth = here + float(net.weight.detach().norm()) * 0.1
    low, high = ws.certify(net, x, y, 2, "absolute", time_limit=1e-9).bounds(0.1)
    assert here * (1 - 1e-12) <= low <= truth * (1 + 1e-12)
    assert truth * (1 - 1e-15) <= high


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", NORMS)
def test_targets_that_move_are_one_more_input(norm: float) -> None:
    """A linear model: the dual norm of `(w, 1 / kappa)`. The atoms cost what the budget allows."""
    net, x, y = linear()
    kappa = 0.7
    row = torch.cat([net.weight.detach()[0], torch.tensor([1 / kappa], dtype=DOUBLE)])
    length = float(torch.linalg.vector_norm(row, dual(norm)))
    clean = float((net(x).detach()[:, 0] - y).abs().mean())
    truth = clean + 0.2 * length
    curve = ws.loss_curve(net, x, y, norm, 1, "absolute", None, label_cost=kappa)
    assert curve(0.2) == pytest.approx((truth, truth), rel=1e-6) and curve(0.2)[1] >= truth
    assert curve(0.2)[1] <= truth * (1 + 1e-12)
    found = ws.certify(net, x, y, norm, "absolute", label_cost=kappa).bounds(0.2)
    assert found == pytest.approx((truth, truth), rel=1e-6)
    exact = ws.worst_case(net, x, y, ws.Threat(norm, 1, 0.2, None, label_cost=kappa), "absolute")
    assert exact.bound.lower == pytest.approx(truth, rel=1e-4) and exact.bound.upper >= truth * (
        1 - 1e-15
    )
    points, targets, masses, root = curve.atoms(0.2)
    moved = torch.cat([points - x[root], kappa * (targets - y[root, None])], 1)
    cost = (masses * torch.linalg.vector_norm(moved, norm, dim=1)).sum()
    loss = (masses * (net(points).detach() - targets).abs()[:, 0]).sum()
    assert float(cost) <= 0.2 * (1 + 1e-9)
    assert float(loss) == pytest.approx(curve(0.2)[0], rel=1e-9)
    with pytest.raises(InputError, match=r"curve\.atoms"):
        curve.witness(0.2)


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", NORMS)
def test_moving_targets_in_a_box(norm: float) -> None:
    """Inputs have walls, targets have none; dear targets stay."""
    net, x, y = small()
    with_cells = [
        ws.worst_case(
            net, x, y, ws.Threat(norm, 1, 0.1, (0, 1), label_cost=kappa), "absolute"
        ).bound
        for kappa in (0.5, 1e6)
    ]
    curves = [
        ws.loss_curve(net, x, y, norm, 1, "absolute", (0, 1), label_cost=kappa)(0.1)
        for kappa in (0.5, 1e6)
    ]
    still = ws.worst_case(net, x, y, ws.Threat(norm, 1, 0.1, (0, 1)), "absolute").bound
    for exact, (low, high) in zip(with_cells, curves):
        assert low <= exact.upper and exact.lower <= high
    assert with_cells[0].lower > still.upper
    assert with_cells[1].upper == pytest.approx(still.upper, abs=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("domain", [(0, 1), None])
@pytest.mark.parametrize(
    "norm", [2.0, *(pytest.param(r, marks=pytest.mark.slow) for r in (1.0, INF))]
)
@pytest.mark.parametrize("loss", LOSSES[:3])
def test_curves_hold_exact_worst_cases(loss: str, norm: float, domain: Any) -> None:
    """Cells at orders 1, 2 and inf lie between both sides of a curve, and below slopes."""
    net, x, y = small()
    curve = ws.loss_curve(net, x, y, norm, 1, loss, domain, **SETTINGS)
    slopes = ws.certify(net, x, y, norm, loss, domain, **SETTINGS)
    gap = 1e-6 + (0.3 / 128) ** 2 / 4
    for order in (1, 2, INF) if norm == 2 else (1, INF):
        threat = ws.Threat(norm, order, 0.15, domain)
        exact = ws.worst_case(net, x, y, threat, loss, **SETTINGS)
        low, high = curve.of_order(order)(0.15)
        assert low <= exact.bound.upper and exact.bound.lower <= high
        assert exact.bound.upper - exact.bound.lower <= gap
        assert exact.cost <= 0.15 * (1 + 1e-12)
        again = losses(net(exact.atoms).detach() - y[exact.root], loss)
        assert float((exact.masses * again).sum()) == pytest.approx(exact.bound.lower, rel=1e-9)
        assert exact.bound.lower <= slopes.bounds(0.15)[1]
    assert slopes.bounds(0.15)[0] <= curve(0.15)[1]
    found = slopes.witness(0.15)
    assert found.verify(net) and found.cost <= 0.15


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_witnesses_are_evaluated(loss: str) -> None:
    net, x, y = small(2, outputs=2)
    for norm in NORMS:
        curve = ws.loss_curve(net, x, y, norm, 2, loss, (0, 1), **SETTINGS)
        assert curve.empirical == pytest.approx(float(losses(net(x).detach() - y, loss).mean()))
        for order in (1, 2, INF):
            one = curve.of_order(order)
            found = one.witness(0.1)
            assert found.verify(net) and found.cost <= 0.1
            points, targets, masses, _ = one.atoms(0.1)
            again = float((masses * losses(net(points).detach() - targets, loss)).sum())
            low, high = one(0.1)
            assert again == pytest.approx(low, rel=1e-9) and again <= high


@pytest.mark.slow
def test_the_largest_of_several_outputs_counts() -> None:
    """With equal outputs it is the loss of one of them."""
    net, x, y = small()
    two = nn.Sequential(*net[:2], nn.Linear(5, 2).double())
    with torch.no_grad():
        two[2].weight.copy_(net[2].weight.expand(2, -1))
        two[2].bias.copy_(net[2].bias.expand(2))
    for loss in LOSSES:
        one = ws.loss_curve(net, x, y, 2, 2, loss, (0, 1), **SETTINGS)(0.1)
        both = ws.loss_curve(two, x, y.expand(-1, 2), 2, 2, loss, (0, 1), **SETTINGS)(0.1)
        assert one == pytest.approx(both, rel=1e-9)


@pytest.mark.slow
def test_subpopulations() -> None:
    """The mean of the worst half at eps 0; above that cells lie between the sides."""
    net, x, y = small()
    e = net(x).detach() - y
    for loss in LOSSES[:3]:
        curve = ws.loss_curve(net, x, y, 2, 1, loss, (0, 1), subpopulation=0.4, **SETTINGS)
        worst = losses(e, loss).sort(descending=True).values[:2].mean()
        assert curve(0.0) == pytest.approx((float(worst), float(worst)), rel=1e-9)
        threat = ws.Threat(2, 1, 0.1, (0, 1), subpopulation=0.4)
        exact = ws.worst_case(net, x, y, threat, loss, **SETTINGS).bound
        low, high = curve(0.1)
        assert low <= exact.upper and exact.lower <= high
        assert exact.upper - exact.lower <= 1e-5
        slopes = ws.certify(net, x, y, 2, loss, (0, 1), subpopulation=0.4, **SETTINGS)
        assert slopes.bounds(0.1)[0] <= exact.upper and exact.lower <= slopes.bounds(0.1)[1]


def test_boxes_of_samples_and_frozen_inputs() -> None:
    """What may not move has no part in the growth: a network of the free input alone."""
    net, x, y = small()
    low, high = torch.zeros_like(x), torch.ones_like(x)
    low[:, 0] = high[:, 0] = x[:, 0]
    curve = ws.loss_curve(net, x, y, INF, INF, "absolute", (low, high))
    for i in range(len(x)):
        line = torch.linspace(0, 1, 4001, dtype=DOUBLE)
        line = line[(line - x[i, 1]).abs() <= 0.1]
        points = torch.stack([x[i, 0].expand(len(line)), line], 1)
        truth = float((net(points).detach() - y[i]).abs().max())
        one = ws.loss_curve(
            net,
            x[i : i + 1],
            y[i : i + 1],
            INF,
            INF,
            "absolute",
            (low[i], high[i]),
            grid=[0.05, 0.1],
        )
        found = one(0.1)
        assert truth <= found[1] and found[0] <= found[1] <= truth * 1.2 + 0.05
    assert (curve.points[:, 0] == x[curve.root, 0]).all()


@pytest.mark.slow
def test_executed_arithmetic() -> None:
    """Points are evaluated by the model in float32; bounds pay for its rounding."""
    net, x, y = small()
    net, x = net.float(), x.float()
    for loss in LOSSES:
        curve = ws.loss_curve(net, x, y, 2, 2, loss, (0, 1), **SETTINGS)
        assert curve.arithmetic == "executed" and curve.lift > 0
        e = net(x).detach().double() - y
        assert curve.empirical == pytest.approx(float(losses(e, loss).mean()), rel=1e-12)
        assert curve(0.0)[1] >= curve.empirical and curve(0.1)[0] <= curve(0.1)[1]


def test_records_and_populations() -> None:
    net, x, y = small()
    curve = ws.loss_curve(net, x, y, 2, 1, "absolute", (0, 1))
    with pytest.raises(InputError, match="give high"):
        curve.population_at(0.1)
    low, high = curve.population_at(0.1, high=5.0)
    assert low <= high <= 5.0
    assert curve.population(high=5.0).upper[0] <= 5.0


def test_a_graph_serves_as_well() -> None:
    net, x, y = small()
    graph = read(net, (2,))
    assert ws.loss_curve(graph, x, y, 2, 1, "absolute", (0, 1))(0.1)[1] == pytest.approx(
        ws.loss_curve(net, x, y, 2, 1, "absolute", (0, 1), arithmetic="exact")(0.1)[1]
    )


BAD = [
    ({"loss": "pinball", "quantile": 1.0}, "between 0 and 1"),
    ({"loss": "pinball", "quantile": 0}, "between 0 and 1"),
    ({"loss": "huber", "delta": 0.0}, "give a positive number"),
    ({"loss": "huber", "delta": INF}, "give a positive number"),
    ({"y": torch.zeros(4)}, r"shape \(4,\) for 5 samples"),
    ({"y": torch.zeros(5, 2)}, "targets for 2 outputs and the model has 1"),
    ({"y": torch.full((5,), math.nan)}, "NaN or infinity"),
    ({"arithmetic": "executed", "domain": None}, "needs a box"),
    ({"arithmetic": "executed", "label_cost": 1.0}, "needs targets that stay"),
    ({"certificate": "any"}, "give no certificate"),
    ({"loss": "mae"}, "absolute"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_bad_input(given: dict[str, Any], said: str) -> None:
    net, x, y = small()
    settings = {"x": x, "y": y, "loss": "absolute", "domain": (0, 1), **given}
    with pytest.raises(InputError, match=said):
        ws.loss_curve(net, **settings)


def test_what_has_no_slope_is_refused() -> None:
    net, x, y = small()
    with pytest.raises(InputError, match="faster than any slope"):
        ws.certify(net, x, y, loss="squared")
    with pytest.raises(InputError, match="no largest slope"):
        ws.worst_case(net, x, y, ws.Threat(2, 1, 0.1), "squared")
    smooth = nn.Sequential(net[0], nn.Tanh(), net[2])
    with pytest.raises(InputError, match="a smooth one has none"):
        ws.worst_case(smooth, x, y, ws.Threat(2, 1, 0.1), "absolute")
    two = nn.Linear(2, 2).double()
    with pytest.raises(InputError, match="models of one output"):
        ws.loss_curve(two, x, y.expand(-1, 2), 2, 1, "absolute", (0, 1), label_cost=1.0)


def test_losses_by_their_definitions() -> None:
    e = torch.randn(50, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    for loss in LOSSES:
        task = Residuals.of(loss, torch.zeros(50, 3), 0.8, 0.3, 50)
        found = task.value(task.largest(torch.cat([e, -e], 1)))
        assert torch.allclose(found, losses(e, loss), rtol=1e-14, atol=0)


@pytest.mark.parametrize("high", [0.7, 100.03, 10000.3])
def test_walls_are_not_rounded_where_targets_move_too(high: float) -> None:
    """Beside a price for targets, walls that are two numbers were once rounded to float32."""
    low, width = high - 1.0, high - (high - 1.0)
    net = nn.Linear(1, 1).double().eval()
    with torch.no_grad():
        net.weight.fill_(1.0)
        net.bias.fill_(-low)
    x = torch.tensor([[low + 0.2]], dtype=torch.float64)
    y = net(x).detach()[:, 0]
    wall = float(width - y[0])
    options: dict[str, Any] = {"label_cost": 1e12, "eps": [5.0]}
    curve = ws.loss_curve(net, x, y, "inf", "inf", "absolute", (low, high), **options)
    least, most = curve(5.0)
    assert wall <= most <= wall + 1e-9 and least <= most
    assert bool(((curve.points[..., :1] >= low) & (curve.points[..., :1] <= high)).all())
