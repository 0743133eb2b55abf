"""The loss curve: closed forms, the exact worst case of small networks between its sides, and
every piece it is made of.
"""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wassail.certificates import clock
from wassail.certificates.graph.reader import read
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss import certify as certify_module
from wassail.certificates.loss import growth
from wassail.certificates.loss.certify import certify
from wassail.certificates.loss.curve import LossCurve
from wassail.certificates.loss.loss_curve import loss_curve
from wassail.certificates.loss.worst_case import worst_case
from wassail.errors import InputError
from wassail.losses import LIPSCHITZ
from wassail.testing import corpus
from wassail.threat import Threat
from wassail.zoo import data, load

INF = math.inf
NORMS = (1.0, 2.0, INF)
ORDERS = (1.0, 2.0, 3.0, INF)
LOSSES = ("cross_entropy", "margin")
DOMAINS = (None, (0.0, 1.0))
GRID = [2.0 ** (-k / 2) for k in range(13, -1, -1)]


def line(slope: float, shift: float = 0.0) -> nn.Module:
    """`theta = (0, slope x + shift)` on the line: the margin loss of label 0 is that number."""
    model = nn.Sequential(nn.Linear(1, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.0], [slope]]))
        model[0].bias.copy_(torch.tensor([0.0, shift]))
    return model


def kink() -> nn.Module:
    """`theta = (0, relu(x) - 3 relu(-x))`: coming from the left the margin loss of label 0 has
    slope 3, then 1.
    """
    model = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    for parameter, values in zip(
        model.parameters(), ([[1.0], [-1.0]], [0.0, 0.0], [[0.0, 0.0], [1.0, -3.0]], [0.0, 0.0])
    ):
        parameter.data.copy_(torch.tensor(values))
    return model


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("order", ORDERS)
def test_linear_classifier_on_the_line(order: float) -> None:
    """Every sample moves by eps: V = E + |w| eps, for every order, and both sides say so at an
    eps of the grid.
    """
    x = tensor([[0.2], [-0.4], [1.3]])
    y = torch.tensor([0, 1, 0])
    curve = loss_curve(line(-2.5, 0.3), x, y, 2, order, "margin", None, grid=[0.05, 0.2, 0.8])
    clean = LIPSCHITZ["margin"](line(-2.5, 0.3)(x).detach(), y).mean()
    assert curve.empirical == pytest.approx(float(clean)) and curve(0) == pytest.approx(
        (float(clean),) * 2
    )
    for eps in (0.05, 0.2, 0.8):
        low, high = curve(eps)
        truth = float(clean) + 2.5 * eps
        assert low == pytest.approx(truth, rel=1e-9) and high == pytest.approx(truth, rel=1e-9)
        assert truth <= high * (1 + 1e-15)
    for eps in (0.01, 0.37, 30.0):
        low, high = curve(eps)
        assert low <= float(clean) + 2.5 * eps + 1e-12 and high == pytest.approx(
            float(clean) + 2.5 * eps, rel=1e-6
        )


@pytest.mark.parametrize("loss", LOSSES)
def test_linear_classifier_in_a_box(loss: str) -> None:
    """One sample at 1/4, slope 2, wall at 1: the margin loss is -0.5 + 2 min(d, 3/4); cross
    entropy is softplus of it.
    """
    curve = loss_curve(
        line(2.0, -1.0),
        tensor([[0.25]]),
        torch.tensor([0]),
        INF,
        INF,
        loss,
        grid=[0.1, 0.2, 0.4, 0.75],
    )

    def height(d: float) -> float:
        t = -0.5 + 2 * min(d, 0.75)
        return t if loss == "margin" else math.log1p(math.exp(t))

    for eps in (0.1, 0.2, 0.4, 0.75, 5.0):
        assert curve(eps) == pytest.approx((height(eps), height(eps)), rel=1e-6), eps
    for order in (1.0, 2.0, 4.0):  # one sample: the concave envelope in d^p of that function
        other = curve.of_order(order)
        grid = torch.linspace(0, 1, 4001, dtype=torch.float64)
        values = tensor([height(float(d)) for d in grid])
        for eps in (0.05, 0.3, 0.75, 2.0):
            # Either nothing is split, or two points a and b with mean cost eps^p are: brute force
            # over all pairs.
            cost = grid**order
            a = grid <= eps
            b = grid > eps
            share = (eps**order - cost[a])[:, None] / (cost[b][None] - cost[a][:, None])
            pairs = (
                (values[a][:, None] * (1 - share) + values[b][None] * share).max()
                if b.any()
                else values.max()
            )
            truth = max(float(values[a].max()), float(pairs))
            low, high = other(eps)
            assert low <= truth + 1e-6 and truth <= high + 1e-9 and (high < truth + 0.02), (
                order,
                eps,
                low,
                truth,
                high,
            )


def test_kink_on_the_line() -> None:
    """V(eps) = -1.5 + min(3 eps, 1 + eps) at order 1, exactly where the grid knows the kink."""
    curve = loss_curve(
        kink(), tensor([[-0.5]]), torch.tensor([0]), INF, 1, "margin", None, grid=[0.25, 0.5, 1, 2]
    )
    for eps in (0.1, 0.25, 0.5, 1.0, 2.0, 100.0):
        low, high = curve(eps)
        truth = -1.5 + min(3 * eps, 1 + eps)
        assert low == pytest.approx(truth, abs=1e-9) and truth <= high + 1e-12, eps
    assert curve(0.4)[1] == pytest.approx(-0.3, abs=1e-9)  # up to the kink the slope is certified
    assert curve(50.0)[1] <= -1.5 + 3 * 50 + 1e-9


@functools.cache
def nets() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Random networks of the line and of the plane, with three samples each."""
    found: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
    for name, n, hidden, seed in (("line", 1, 4, 3), ("plane", 2, 4, 1)):
        generator = torch.Generator().manual_seed(seed)
        net = (
            nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, 3))
            .double()
            .requires_grad_(False)
        )
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        x = torch.rand(3, n, dtype=torch.float64, generator=generator)
        found[name] = (net, x, torch.tensor([0, 1, 1]))
    return found


@pytest.fixture(scope="module")
def curves() -> dict[tuple[str, float, str, bool], LossCurve]:
    found = {}
    for name, (model, x, y) in nets().items():
        graph = read(model, x.shape[1:])
        for norm in NORMS if name == "plane" else (2.0,):  # on the line all norms are the same
            for loss in LOSSES:
                for domain in DOMAINS:
                    found[name, norm, loss, domain is None] = loss_curve(
                        graph, x, y, norm, 1, loss, domain, grid=GRID
                    )
    return found


@pytest.mark.slow_cases("2.0", "3.0", "inf")
@pytest.mark.parametrize("order", ORDERS)
def test_the_exact_worst_case_lies_between_the_sides(order: float, curves) -> None:
    wide = []
    for (name, norm, loss, free), curve in curves.items():
        if (
            name == "plane"
            and (NORMS.index(norm) + 2 * LOSSES.index(loss) + free + ORDERS.index(order)) % 4
        ):
            continue  # a quarter of the cases: the exact answer takes its time
        model = nets()[name][0]
        curve = curve.of_order(order)
        for eps in (0.03, 0.4) if name == "line" and order == 1 else (0.3,):
            exact = worst_case(
                model,
                curve.x,
                curve.y,
                Threat(norm, order, eps, curve.domain),
                loss,
                tolerance=0.01,
            ).bound
            low, high = curve(eps)
            assert low <= exact.upper + 1e-12 and exact.lower <= high, (
                name,
                norm,
                loss,
                free,
                eps,
                low,
                exact,
                high,
            )
            wide.append((high - low) / (exact.upper - curve.empirical))
    assert sorted(wide)[len(wide) // 2] < 0.5, "the sides are far apart"


def test_nothing_sampled_is_above_the_growth_bounds(curves) -> None:
    """`min(ceiling, left + rise (d - radius before), start + slope d)` bounds the loss at
    distance d, on every interval.
    """
    generator = torch.Generator().manual_seed(0)
    for (name, norm, loss, free), curve in curves.items():
        model = nets()[name][0]
        n = curve.x[0].numel()
        edge = torch.cat([torch.zeros(1), curve.grid])
        for i in range(len(curve.x)):
            far = torch.rand(4000, generator=generator, dtype=torch.float64) * (
                2 if not free else 40
            )
            far = far * torch.rand(4000, generator=generator, dtype=torch.float64) ** 6
            step = torch.randn(4000, n, generator=generator, dtype=torch.float64)
            point = (
                curve.x[i]
                + far[:, None] * step / torch.linalg.vector_norm(step, norm, dim=1)[:, None]
            )
            point = point if free else point.clamp(0, 1)
            d = torch.linalg.vector_norm(point - curve.x[i], norm, dim=1)
            t = torch.searchsorted(curve.grid, d)
            lines = (
                curve.left[i, t] + curve.rise[i, t] * (d - edge[t]),
                curve.start[i] + curve.slope * d,
            )
            most = torch.minimum(curve.ceiling[i, t], torch.minimum(*lines))
            value = LIPSCHITZ[loss](model(point), curve.y[i].expand(len(point)))
            assert (value <= most + 1e-12).all(), (
                name,
                norm,
                loss,
                free,
                float((value - most).max()),
            )
            assert ((most - value).min() < 0.05).all(), "and somewhere they are close to it"


@pytest.mark.slow_cases("2.0", "3.0")
@pytest.mark.parametrize("order", ORDERS)
def test_monotone_concave_and_nested(order: float, curves) -> None:
    budgets = torch.linspace(0, 1.5, 9, dtype=torch.float64)
    for curve in list(curves.values())[::5]:
        curve = curve.of_order(order)
        low, high = (tensor(side) for side in zip(*(curve(float(eps)) for eps in budgets)))
        for side in (low, high):
            assert (side.diff() >= -1e-9).all()
        assert (low <= high).all() and float(low[0]) == pytest.approx(curve.empirical)
        if order < INF:  # concave in eps^p: slopes between neighbours fall
            for side, first in (
                (low, 0),
                (high, 1),
            ):  # the upper side jumps by the width of its first interval
                slopes = side.diff() / (budgets**order).diff()
                assert (slopes[first:].diff() <= 1e-7 * slopes[first].abs()).all()
        larger = curve.of_order(1 if order == INF else order + 1)
        for eps in (0.05, 0.3, 1.0):  # the ball of a smaller order is larger
            a, b = (curve, larger) if order < INF else (larger, curve)
            assert all(one >= two - 1e-9 for one, two in zip(a(eps), b(eps)))


@pytest.mark.parametrize("order", ORDERS)
def test_the_witness_is_what_the_lower_side_claims(order: float, curves) -> None:
    for (name, _, loss, free), curve in curves.items():
        model = nets()[name][0]
        curve = curve.of_order(order)
        for eps in (0.02, 0.3)[free:]:
            found = curve.witness(eps)
            assert found.cost <= eps and found.verify(model), found.verify(model).problems
            points, masses = found.atoms()
            assert float(masses.sum()) == pytest.approx(1, abs=1e-14) and (masses >= 0).all()
            assert free or ((points >= 0) & (points <= 1)).all()
            losses = LIPSCHITZ[loss](model(points), torch.cat([found.y, found.y]))
            assert (
                float((masses * losses).sum())
                == pytest.approx(curve(eps)[0], abs=1e-12)
                == found.info["loss"]
            )
            share = torch.zeros(3, dtype=torch.float64)
            for row, mass in zip(found.x, found.mu):
                share[int((curve.x == row).all(1).nonzero()[0])] += mass
            assert torch.allclose(share, curve.mu, atol=1e-15), "every sample keeps its weight"
            assert len(found) <= len(curve.y) + (order < INF)


def test_weights_are_repetitions() -> None:
    model, x, y = corpus()["shallow"]
    once = loss_curve(model, x[:3], y[:3], 2, 2, mu=tensor([2.0, 1.0, 1.0]), grid=[0.1, 0.5])
    twice = loss_curve(model, x[[0, 0, 1, 2]], y[[0, 0, 1, 2]], 2, 2, grid=[0.1, 0.5])
    for eps in (0.0, 0.05, 0.2, 2.0):
        assert once(eps) == pytest.approx(twice(eps), rel=1e-9)
    nobody = loss_curve(model, x[:3], y[:3], 2, 1, mu=tensor([1.0, 1.0, 0.0]), grid=[0.1, 0.5])
    pair = loss_curve(model, x[:2], y[:2], 2, 1, grid=[0.1, 0.5])
    assert nobody(0.1) == pytest.approx(pair(0.1), rel=1e-9)


def test_points_of_others_count() -> None:
    model, x, y = corpus()["deep"]
    plain = loss_curve(model, x, y, INF, INF, "margin", grid=[0.3])
    generator = torch.Generator().manual_seed(1)
    better = x.clone()
    for _ in range(300):
        trial = (
            x + 0.25 * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
        ).clamp(0, 1)
        up = LIPSCHITZ["margin"](model(trial), y) > LIPSCHITZ["margin"](model(better), y)
        better = torch.where(up[:, None], trial, better)
    more = loss_curve(model, x, y, INF, INF, "margin", grid=[0.3], points=[better, x + 50])
    assert more(0.29)[0] > plain(0.29)[0], "hardly anything was looked at below 0.3"
    assert more(0.29)[0] >= float(LIPSCHITZ["margin"](model(better).detach(), y).mean()) - 1e-12
    assert more(0.29)[1] == plain(0.29)[1] and ((more.points >= 0) & (more.points <= 1)).all()
    with pytest.raises(InputError, match="one point a sample"):
        loss_curve(model, x, y, grid=[0.3], points=[x[:2]])


@pytest.mark.slow
def test_a_real_network_and_its_files(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the slopes of `certify`, which know nothing of distances, and against the flips
    that an attack finds.
    """
    model, (x, y) = load("digits-mlp-adv"), data("digits")
    x = x[:8]
    y = y[:8]
    monkeypatch.setattr(certify_module, "WORK", clock.SECOND / 4)
    monkeypatch.setattr(growth, "WORK", clock.SECOND / 4)
    slopes = certify(model, x, y, INF, domain=(0.0, 1.0), slopes=["margin"])
    grid = [2.0**-k for k in range(9, -1, -1)]
    # Slopes are of the exact function: so is the curve that knows them.
    curve = loss_curve(model, x, y, INF, 1, grid=grid, arithmetic="exact", certificate=slopes)
    for eps in (0.005, 0.02, 0.1):
        (low, high), two = curve(eps), curve.of_order(2)
        assert curve.empirical < low <= high <= slopes.upper(eps) * (1 + 1e-9)
        assert curve.empirical < two(eps)[0] <= two(eps)[1] < 0.7 * slopes.upper(eps)
        assert curve.witness(eps).verify(model)
    curve.save(tmp_path / "c.safetensors")
    again = LossCurve.load(tmp_path / "c.safetensors")
    assert (
        again(0.02) == curve(0.02)
        and again.loss == "cross_entropy"
        and "8 samples, order 1, linf" in repr(again)
    )
    assert loss_curve(read(model, (1, 8, 8)), x[:2], y[:2], grid=[0.1]).x.shape == (
        2,
        1,
        8,
        8,
    )


@pytest.mark.slow_cases("digits-mlp")
@pytest.mark.parametrize("name", ["digits-gelu", "digits-mlp"])
def test_never_above_what_is_known_on_all_of_space(name: str) -> None:
    """A box is a part of R^n: what `certify` proves there holds in the box, for every order."""
    model, (x, y) = load(name), data("digits")
    x = x[:6]
    y = y[:6]
    slopes = certify(model, x, y, 2, "cross_entropy", None, slopes=["margin"], time_limit=1)
    curve = loss_curve(
        model,
        x,
        y,
        2,
        1,
        "cross_entropy",
        grid=[0.05, 0.2, 1.0, 4.0],
        time_limit=1,
        certificate=slopes,
        arithmetic="exact",
    )
    assert curve.slope <= slopes.margin.upper < INF
    for eps in (0.01, 0.1, 0.3, 1.0, 3.0):
        for order in (1.0, 2.0, INF):
            low, high = curve.of_order(order)(eps)
            assert low <= high <= slopes.upper(eps) * (1 + 1e-9), (eps, order)


def test_a_smooth_network_in_a_box_knows_its_slope() -> None:
    model, (x, y) = load("digits-gelu"), data("digits")
    curve = loss_curve(model, x[:2], y[:2], 2, 1, grid=[0.5], time_limit=1)
    product = lipschitz(
        model, 2, None, labels=y[:2].tolist(), method="product", shape=(1, 8, 8)
    ).upper
    assert curve.slope <= product < INF


@pytest.mark.slow_cases("margin")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_cells_of_a_certificate_count(loss: str) -> None:
    """Small networks have exact slopes and a second line: with the certificate the curve is at
    least as good, and as sound.
    """
    for name, (model, x, y) in nets().items():
        for norm, domain in ((2.0, None), (INF, (0.0, 1.0))):
            known = certify(
                model, x, y, norm, loss, None if name == "line" else domain, time_limit=1
            )
            curve = loss_curve(
                model,
                x,
                y,
                norm,
                1,
                loss,
                domain,
                grid=GRID[::3],
                time_limit=0.2,
                certificate=known,
                arithmetic="exact",
            )
            for eps in (0.03, 0.6):
                low, high = curve(eps)
                assert low <= high <= known.upper(eps) * (1 + 1e-9) + 1e-12
                if loss == "cross_entropy" or name == "plane":
                    continue  # the exact worst case takes seconds
                truth = worst_case(model, x, y, Threat(norm, 1, eps, domain), loss).bound
                assert low <= truth.upper + 1e-9 and high >= truth.lower - 1e-9


def test_a_certificate_for_something_else_is_refused() -> None:
    model, x, y = nets()["line"]
    known = certify(model, x, y, 2, "margin", (0.0, 1.0), slopes=["margin"], time_limit=1)
    given: dict[str, Any] = {"x": x, "y": y, "norm": 2, "loss": "margin", "grid": [0.1]}
    changes: list[dict[str, Any]] = [
        {"x": x[:2], "y": y[:2]},
        {"loss": "cross_entropy"},
        {"norm": 1},
        {"mu": tensor([0.5, 0.25, 0.25])},
    ]
    for change in changes:
        with pytest.raises(InputError, match="about other samples"):
            loss_curve(model, **{**given, **change}, certificate=known)
    with pytest.raises(InputError, match="certify there or on R"):
        loss_curve(model, x, y, 2, 1, "margin", (-1.0, 2.0), grid=[0.1], certificate=known)


@pytest.mark.slow
def test_a_smooth_network() -> None:
    model, (x, y) = load("digits-gelu-adv"), data("digits")
    curve = loss_curve(model, x[:4], y[:4], INF, INF, "margin", grid=[0.02, 0.05, 0.1])
    for eps in (0.02, 0.05, 0.1):
        low, high = curve(eps)
        assert curve.empirical < low < high < 20 and low - curve.empirical > 0.3 * (
            high - curve.empirical
        )
    low, high = loss_curve(model, x[:2], y[:2], domain=None, grid=[0.1])(0.1)
    assert low < high < math.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": "dlr"}, "not Lipschitz"),
        ({"loss": "crossentropy"}, "did you mean 'cross_entropy'"),
        ({"grid": []}, "positive and finite radii"),
        ({"grid": [0.1, -1]}, "positive and finite radii"),
        ({"grid": ["x"]}, "radius of the grid 'x'"),
        ({"order": 0.5}, "order"),
        ({"norm": 3}, "norm"),
        ({"x": torch.zeros(0, 2).double(), "y": torch.zeros(0).long()}, "no samples"),
        ({"y": torch.tensor([0, 7])}, "the model has 3 classes"),
    ],
)
def test_bad_input_is_one_sentence(change, words) -> None:
    model, x, y = corpus()["shallow"]
    with pytest.raises(InputError, match=words) as error:
        loss_curve(model, **{"x": x[:2], "y": y[:2], "grid": [0.1], **change})
    assert "\n" not in str(error.value)


def test_a_budget_is_finite_and_not_negative() -> None:
    curve = loss_curve(line(1.0), tensor([[0.5]]), torch.tensor([0]), grid=[0.1])
    for eps in (-1, "inf"):
        with pytest.raises(InputError, match="finite eps >= 0"):
            curve(eps)


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_limits_on_the_loss_of_the_population(order: float) -> None:
    """The margin loss 2 x of label 0, samples even on [0.2, 0.4]: the worst case is 0.6 + 2 eps."""
    x = 0.2 + 0.2 * (torch.arange(400, dtype=torch.float64)[:, None] + 0.5) / 400
    y = torch.zeros(400, dtype=torch.int64)
    curve = loss_curve(line(2.0), x, y, INF, order, "margin", (0.0, 1.0))
    low, high = curve.population_at(0.1, 0.95, low=0.0)
    assert 0.6 < low < 0.8  # above the loss without a shift: the evaluated points count
    assert 0.45 < curve.population_at(0, low=0.0)[0] < 0.6
    assert 0.8 < high < 0.8 + 0.25  # the loss lies in [0, 2]: no point is farther than its ceiling
    assert curve.population_at(0.1, 0.5, low=0.0)[1] < high
    assert curve.population_at(0, low=0.0)[1] < high
    assert curve.population_at(0.1, low=0.0, high=50.0)[1] > high
    with pytest.raises(InputError, match="least value"):
        curve.population_at(0.1)
    free = loss_curve(line(2.0), x[:4], y[:4], INF, order, "margin", None, grid=[0.1, 0.5])
    with pytest.raises(InputError, match="no known maximum"):
        free.population_at(0.1, low=0.0)


@pytest.mark.slow_cases("1.0")
@pytest.mark.parametrize("order", [1.0, INF])
def test_the_curve_of_the_loss_of_the_population(order: float) -> None:
    """As above: `0.6 + 2 eps` lies between the two sides at every eps, also between the places."""
    x = 0.2 + 0.2 * (torch.arange(400, dtype=torch.float64)[:, None] + 0.5) / 400
    y = torch.zeros(400, dtype=torch.int64)
    curve = loss_curve(line(2.0), x, y, INF, order, "margin", (0.0, 1.0))
    found = curve.population(0.95, [0.05, 0.1, 0.2], low=0.0)
    assert found.eps == (0.0, 0.05, 0.1, 0.2) and found.samples == 400
    for eps in (0.0, 0.02, 0.05, 0.07, 0.1, 0.15, 0.2, 5.0):
        low, high = found(eps)
        truth = min(0.6 + 2 * eps, 2.0)
        assert low <= truth <= high + 1e-12
        assert found.gap(eps) == high - low
    assert found(0.1)[1] > curve.population_at(0.1, 0.95, low=0.0)[1]  # one threat is sharper
    assert found(0.1)[0] > 0.6 and found(5.0)[1] == found.most
    assert found.inverse(found(0.1)[1]) == 0.1 and found.inverse(0.0) == 0.0
    assert found.inverse(9.0, "lower") == INF and found.inverse(0.0, "lower") == 0.0
    with pytest.raises(InputError, match="no side"):
        found.inverse(1.0, "left")
    every = curve.population(0.95, low=0.0)
    assert len(every.eps) == len(curve.grid) + 1
    assert list(every.lower) == sorted(every.lower) and list(every.upper) == sorted(every.upper)


def rows_of(curve: LossCurve, rows: torch.Tensor) -> LossCurve:
    """The curve of some of the samples, with their points and bounds."""
    parts = [(curve.root == row).nonzero()[:, 0] for row in rows.tolist()]
    points = torch.cat(parts)
    names = ("x", "y", "clean", "clean_predicted", "start", "ceiling", "left", "rise")
    of_points = ("points", "value", "distance", "predicted")
    return dataclasses.replace(
        curve,
        **{name: getattr(curve, name)[rows] for name in names},
        **{name: getattr(curve, name)[points] for name in of_points},
        root=torch.cat([torch.full((len(part),), i) for i, part in enumerate(parts)]),
        mu=torch.full((len(rows),), 1 / len(rows), dtype=torch.float64),
    )


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_the_limits_of_the_loss_cover_as_often_as_they_say(order: float) -> None:
    """Samples drawn from 80 points of [0.2, 0.4], whose worst loss at eps 0.1 is 0.8."""
    x = 0.2 + 0.2 * (torch.arange(80, dtype=torch.float64)[:, None] + 0.5) / 80
    y = torch.zeros(80, dtype=torch.int64)
    curve = loss_curve(line(2.0), x, y, INF, order, "margin", grid=[0.1, 1.0])
    generator = torch.Generator().manual_seed(0)
    held = torch.zeros(2)
    for _ in range(30):
        part = rows_of(curve, torch.randint(0, 80, (40,), generator=generator))
        low, high = part.population_at(0.1, 0.7, low=0.0)
        held += torch.tensor([low <= 0.8 + 1e-9, high >= 0.8 - 1e-9])
    assert (held >= 17).all()  # 0.7 of 30 minus one and a half standard deviations
