"""Worst-case loss, growth and steepest chord by cells: closed forms, brute force on grids, and
the distribution behind it.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import wassail as ws
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball
from wassail.certificates.loss import worst_case as worst_case_file
from wassail.certificates.loss.penalty import Penalty
from wassail.certificates.loss.problem import Problem, WorstCase
from wassail.certificates.loss.worst_case import anchor, worst_case_network
from wassail.errors import InputError
from wassail.losses import LIPSCHITZ
from wassail.threat import dual

NORMS = (1.0, 2.0, math.inf)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def remark(scale: float = 1.0) -> Piecewise:
    """K = 2 and margin loss of label 0 equal to `|x|` in [-1, 1] and `|x|/2 + 1/2` outside
    (paper, Remark).
    """
    first = (tensor([[1.0], [-1.0], [1.0], [-1.0]]), tensor([0.0, 0.0, -1.0, -1.0]))
    return Piecewise.from_layers(
        [first, (scale * tensor([[0.0, 0, 0, 0], [1, 1, -0.5, -0.5]]), tensor([0.0, 0.0]))]
    )


def random_case(
    seed: int, n: int, hidden: list[int], k: int, count: int = 3
) -> tuple[Piecewise, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    sizes = [n, *hidden, k]
    layers = [
        (
            torch.randn(b, a, generator=g, dtype=torch.float64) / math.sqrt(a),
            torch.randn(b, generator=g, dtype=torch.float64) / 2,
        )
        for a, b in itertools.pairwise(sizes)
    ]
    x = 2 * torch.rand(count, n, generator=g, dtype=torch.float64) - 1
    return Piecewise.from_layers(layers), x, torch.randint(k, (count,), generator=g)


def mean_loss(network: Piecewise, x: Tensor, y: Tensor, loss: str = "margin") -> float:
    return float(LIPSCHITZ[loss](network.logits(x), y).mean())


def check(
    result: WorstCase,
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    norm: float,
    order: float,
    eps: float,
    loss: str,
) -> None:
    """Everything a result claims about its distribution, recomputed here."""
    assert result.masses.dtype == torch.float64 and (result.masses > 0).all()
    assert float(result.masses.sum()) == pytest.approx(1, abs=1e-14)
    per_sample = torch.zeros(len(x), dtype=torch.float64).index_add(0, result.root, result.masses)
    assert torch.allclose(per_sample, torch.full_like(per_sample, 1 / len(x)), atol=1e-14)
    assert int((torch.bincount(result.root) > 1).sum()) <= 1 and len(result.root) <= len(x) + 1
    assert torch.equal(result.atom_labels, y[result.root])
    losses = LIPSCHITZ[loss](network.logits(result.atoms), result.atom_labels)
    assert float(result.masses @ losses) == pytest.approx(result.bound.lower, rel=1e-12, abs=1e-12)
    moved = torch.linalg.vector_norm(result.atoms - x[result.root], norm, dim=1)
    cost = (
        float(moved.max())
        if order == math.inf
        else float(result.masses @ moved**order) ** (1 / order)
    )
    assert cost == pytest.approx(result.cost, rel=1e-12)
    assert result.cost <= eps
    assert result.bound.lower <= result.bound.upper


def grid_points(low: float, high: float, steps: int, n: int) -> Tensor:
    axis = torch.linspace(low, high, steps, dtype=torch.float64)
    return torch.stack([v.flatten() for v in torch.meshgrid(*[axis] * n, indexing="ij")], 1)


def grid_worst(
    network: Piecewise,
    x: Tensor,
    y: Tensor,
    norm: float,
    order: float,
    eps: float,
    loss: str,
    grid: Tensor,
) -> float:
    """The worst expected loss over distributions on a grid (and the samples): the linear
    program itself.
    """
    points = torch.cat([x, grid])
    value = torch.stack(
        [LIPSCHITZ[loss](network.logits(points), k.expand(len(points))) for k in y]
    ).numpy() / len(x)
    length = torch.stack([torch.linalg.vector_norm(points - row, norm, dim=1) for row in x]).numpy()
    if order == math.inf:
        return float(np.where(length <= eps, value, -math.inf).max(1).sum())
    rows = np.kron(np.eye(len(x)), np.ones(len(points)))
    result = linprog(
        -value.flatten(),
        (length**order / len(x)).flatten()[None],
        [eps**order],
        rows,
        np.ones(len(x)),
        method="highs",
    )
    return -float(result.fun)


# Closed forms


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [0.1, 3.0, 40.0])
def test_remark_of_the_paper(norm: float, eps: float) -> None:
    y = torch.tensor([0])
    outside = worst_case_network(
        remark(), tensor([[2.0]]), y, norm=norm, order=1, eps=eps, tolerance=1e-10
    )
    inside = worst_case_network(
        remark(), tensor([[0.0]]), y, norm=norm, order=1, eps=eps, tolerance=1e-10
    )
    for result, x, value in ((outside, 2.0, 1.5 + eps / 2), (inside, 0.0, min(eps, (1 + eps) / 2))):
        assert result.bound.lower == pytest.approx(value, rel=1e-9)
        assert result.bound.upper == pytest.approx(value, rel=1e-9)
        assert result.bound.upper >= value * (1 - 1e-15)
        check(result, remark(), tensor([[x]]), y, norm, 1, eps, "margin")
    assert outside.lam == pytest.approx(0.5, rel=1e-9) and outside.far
    assert inside.lam == pytest.approx(1.0 if eps < 1 else 0.5, rel=1e-9)


def test_remark_in_a_box_and_other_orders() -> None:
    y = torch.tensor([0])
    x = tensor([[0.0]])
    for eps in (0.5, 2.0, 50.0):  # in a box V is constant from the diameter on
        result = worst_case_network(
            remark(), x, y, norm=2, order=1, eps=eps, domain=(-3, 3), tolerance=1e-10
        )
        assert result.bound.lower == pytest.approx(min(eps, (1 + eps) / 2, 2.0), rel=1e-9)
        assert result.bound.exact and not result.far
    # p = 2: the growth min(sqrt c, (1 + sqrt c)/2) is concave in c, so all mass moves by eps; and
    # so for p = inf.
    for order in (1.5, 2, math.inf):
        for eps in (0.5, 2.0):
            result = worst_case_network(
                remark(), x, y, norm=1, order=order, eps=eps, tolerance=1e-10
            )
            assert result.bound.lower == pytest.approx(min(eps, (1 + eps) / 2), rel=1e-8)
            assert result.bound.upper == pytest.approx(min(eps, (1 + eps) / 2), rel=1e-8)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("order", [1, 2, math.inf])
def test_linear_classifier(norm: float, order: float) -> None:
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(2, 3, generator=g, dtype=torch.float64)
    bias = tensor([0.3, -0.2])
    network = Piecewise.from_layers([(weight, bias)])
    x = torch.randn(4, 3, generator=g, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0])
    slope = float(torch.linalg.vector_norm(weight[1] - weight[0], dual(norm)))
    result = worst_case_network(network, x, y, norm=norm, order=order, eps=0.7, tolerance=1e-10)
    assert result.bound.lower == pytest.approx(mean_loss(network, x, y) + 0.7 * slope, rel=1e-9)
    assert result.bound.upper == pytest.approx(mean_loss(network, x, y) + 0.7 * slope, rel=1e-9)
    check(result, network, x, y, norm, order, 0.7, "margin")
    assert anchor(network, x, y, norm=norm).upper == pytest.approx(slope, rel=1e-9)
    assert anchor(network, x, y, norm=norm).exact


def test_constant_network_and_no_budget() -> None:
    network, x, y = random_case(0, 2, [4], 3)
    still = worst_case_network(network, x, y, norm=2, order=1, eps=0.0)
    assert (
        still.bound.lower == pytest.approx(mean_loss(network, x, y))
        and still.bound.exact
        and still.cost == 0
    )
    flat = network.head(torch.zeros(3, 3))
    assert worst_case_network(flat, x, y, norm=2, order=1, eps=1.0).bound.upper == pytest.approx(
        0, abs=1e-12
    )
    assert anchor(flat, x, y, norm=2).upper == pytest.approx(0, abs=1e-12)


# THEORY 3: slopes


@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
def test_slope_at_infinity(loss: str) -> None:
    """The paper's Lemma on the asymptotics of the loss: `V(eps) / eps -> l`, by the bias-free
    network on the circle.
    """
    network, x, _ = random_case(5, 2, [6], 3)
    y = torch.tensor([0, 1, 2])
    angle = torch.linspace(0, 2 * math.pi, 200_001, dtype=torch.float64)
    z = network.homogeneous().logits(torch.stack([angle.cos(), angle.sin()], 1))
    slope = max(float((z[:, j] - z[:, k]).max()) for j in range(3) for k in range(3))
    clean = mean_loss(network, x, y, loss)
    before = math.inf
    for eps in (1.0, 100.0, 1e4):
        bound = worst_case_network(
            network, x, y, norm=2, order=1, eps=eps, loss=loss, tolerance=1e-4
        ).bound
        assert bound.upper >= clean + slope * eps * (1 - 1e-9)
        assert (bound.lower - clean) / eps <= before * (1 + 1e-9)  # never increases
        before = (bound.upper - clean) / eps
    assert before == pytest.approx(slope, rel=2e-3)


def test_quotients_lie_between_the_slopes() -> None:
    network, x, y = random_case(11, 2, [5], 2)
    clean = mean_loss(network, x, y)
    steep = anchor(network, x, y, norm=math.inf)
    assert steep.exact
    quotients = []
    for eps in (1e-3, 0.1, 0.5, 2.0, 1e5):
        bound = worst_case_network(
            network, x, y, norm=math.inf, order=1, eps=eps, tolerance=1e-11
        ).bound
        quotients.append((bound.lower - clean) / eps)
        assert (
            bound.upper <= clean + steep.upper * eps * (1 + 1e-10) + 1e-12
        )  # the outward rounding of both
    assert all(a >= b - 1e-7 for a, b in itertools.pairwise(quotients))
    assert quotients[0] == pytest.approx(steep.lower, rel=1e-6)  # V(eps) = E + S eps for small eps


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("point", "slope"), [(2.0, 0.5), (0.0, 1.0), (0.5, 1.0), (-3.0, 0.5)])
def test_anchor_of_the_remark(norm: float, point: float, slope: float) -> None:
    bound = anchor(remark(), tensor([[point]]), torch.tensor([0]), norm=norm)
    assert bound.lower == pytest.approx(slope, rel=1e-9) and bound.upper == pytest.approx(
        slope, rel=1e-9
    )
    assert bound.info["sample"] == 0 and bound.info["rival"] == 1


def test_anchor_at_a_downward_kink() -> None:
    """Loss `-|x|`: no chord rises from 0, and every one does from elsewhere. At 0 itself only
    rounding separates the two.
    """
    network = remark(-1.0)
    y = torch.tensor([0])
    assert anchor(network, tensor([[0.3]]), y, norm=2).exact
    assert anchor(network, tensor([[0.3]]), y, norm=2).upper == pytest.approx(1, rel=1e-9)
    kink = anchor(network, tensor([[0.0]]), y, norm=2)
    assert kink.lower == 0 and kink.upper >= 0


@pytest.mark.few(4)
@pytest.mark.parametrize(("loss", "gap"), [("margin", 1e-9), ("cross_entropy", 5e-3)])
@pytest.mark.parametrize("domain", [(-1.0, 1.0), None])
@pytest.mark.parametrize("norm", NORMS)
def test_anchor_against_a_grid(
    loss: str, gap: float, domain: tuple[float, float] | None, norm: float
) -> None:
    network, x, y = random_case(21, 2, [4], 2, count=2)
    bound = anchor(network, x, y, norm=norm, domain=domain, loss=loss, tolerance=1e-5)
    grid = grid_points(-1, 1, 201, 2) if domain else grid_points(-6, 6, 601, 2)
    steepest = 0.0
    for row, k in zip(x, y):
        rise = LIPSCHITZ[loss](network.logits(grid), k.expand(len(grid))) - LIPSCHITZ[loss](
            network.logits(row[None]), k[None]
        )
        steepest = max(
            steepest, float((rise / torch.linalg.vector_norm(grid - row, norm, dim=1)).max())
        )
    assert steepest <= bound.upper + 1e-12
    assert bound.lower >= steepest - 1e-12 - (0.02 if domain is None else 0)
    assert bound.gap <= gap
    sample = bound.info["sample"]
    k = y[sample : sample + 1]
    assert bound.witness is not None
    ends = LIPSCHITZ[loss](network.logits(torch.stack([bound.witness, x[sample]])), k.expand(2))
    chord = float((ends[0] - ends[1]) / torch.linalg.vector_norm(bound.witness - x[sample], norm))
    assert chord == pytest.approx(bound.lower, rel=1e-6)


@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
@pytest.mark.parametrize("norm", NORMS)
def test_chords_are_bounded_at_any_multiplier(loss: str, norm: float) -> None:
    """Dinkelbach's iteration ends at the right multiplier; the bound on the chords may not rely
    on that.
    """
    network, x, y = random_case(43, 2, [4], 2, count=3)
    grid = grid_points(-1, 1, 201, 2)
    problem = Problem(network, x, y, norm, (-1.0, 1.0), loss, None, 1000)
    for i, (row, k) in enumerate(zip(x, y)):
        rise = LIPSCHITZ[loss](network.logits(grid), k.expand(len(grid))) - LIPSCHITZ[loss](
            network.logits(row[None]), k[None]
        )
        steepest = float((rise / torch.linalg.vector_norm(grid - row, norm, dim=1)).max())
        for share in (0.05, 0.5, 0.9, 1.0):
            lam = share * max(steepest, 1e-3)
            assert (
                problem.chord_above(i, lam, problem.evaluate(i, Penalty(1.0, lam), 1e-2))
                >= steepest
            )


# Brute force


@pytest.mark.few(8)
@pytest.mark.parametrize("domain", [(-1.0, 1.0), None])
@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize(("loss", "tolerance"), [("margin", 1e-9), ("cross_entropy", 1e-3)])
def test_against_a_grid_in_one_dimension(
    domain: tuple[float, float] | None, order: float, loss: str, tolerance: float
) -> None:
    grid = grid_points(-1, 1, 1001, 1) if domain else grid_points(-20, 20, 2001, 1)
    for seed, k in ((1, 2), (3, 3)):
        network, x, y = random_case(seed, 1, [5], k)
        result = worst_case_network(
            network,
            x,
            y,
            norm=2,
            order=order,
            eps=0.4,
            domain=domain,
            loss=loss,
            tolerance=tolerance,
        )
        check(result, network, x, y, 2, order, 0.4, loss)
        brute = grid_worst(network, x, y, 2, order, 0.4, loss, grid)
        assert brute <= result.bound.upper + 1e-12
        assert brute >= result.bound.lower - (0.03 if domain is None else 1e-3) or result.far
        assert result.bound.upper - result.bound.lower <= tolerance * max(
            1.0, abs(result.bound.upper)
        )


@pytest.mark.few(8)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("hidden", [[4], [3, 3]])
@pytest.mark.parametrize("order", [1, 2])
def test_against_a_grid_in_two_dimensions(norm: float, hidden: list[int], order: float) -> None:
    network, x, y = random_case(7, 2, hidden, 3, count=2)
    result = worst_case_network(
        network, x, y, norm=norm, order=order, eps=0.3, domain=(-1, 1), tolerance=1e-9
    )
    check(result, network, x, y, norm, order, 0.3, "margin")
    brute = grid_worst(network, x, y, norm, order, 0.3, "margin", grid_points(-1, 1, 81, 2))
    assert result.bound.lower - 0.05 <= brute <= result.bound.upper + 1e-12
    assert result.bound.exact or result.bound.upper - result.bound.lower <= 1e-9


@pytest.mark.parametrize(("seed", "n"), [(8, 1), (13, 2)])
def test_cross_entropy_far_out(seed: int, n: int) -> None:
    """Order 2 on R^n: the points that count lie where the loss has long become affine."""
    network, x, y = random_case(seed, n, [3], 2, count=2)
    result = worst_case_network(
        network, x, y, norm=math.inf, order=2, eps=1.0, loss="cross_entropy", tolerance=1e-3
    )
    check(result, network, x, y, math.inf, 2, 1.0, "cross_entropy")
    assert result.bound.upper - result.bound.lower <= 1e-3 * max(1.0, result.bound.upper)
    brute = grid_worst(
        network,
        x,
        y,
        math.inf,
        2,
        1.0,
        "cross_entropy",
        grid_points(-6, 6, 1001 if n == 1 else 61, n),
    )
    assert brute <= result.bound.upper + 1e-12


def test_orders_are_nested() -> None:
    network, x, y = random_case(13, 2, [4], 3, count=2)
    values = [
        worst_case_network(network, x, y, norm=2, order=p, eps=0.3).bound
        for p in (1, 1.5, 2, math.inf)
    ]
    assert all(a.upper >= b.lower for a, b in itertools.pairwise(values))
    lower, upper = growth(network, x, y, [0.3], norm=2)
    clean = mean_loss(network, x, y)
    assert float(lower.mean()) + clean == pytest.approx(values[-1].lower, abs=1e-6)
    assert float(upper.mean()) + clean == pytest.approx(values[-1].upper, abs=1e-6)


# Growth


def growth(
    network: Piecewise, x: Tensor, y: Tensor, radii: list[float], **options: Any
) -> tuple[Tensor, Tensor]:
    """How much the loss of each sample can grow within each radius, from both sides."""
    found = torch.zeros(2, len(x), len(radii), dtype=torch.float64)
    for i, c in itertools.product(range(len(x)), range(len(radii))):
        one = (x[i : i + 1], y[i : i + 1])
        bound = worst_case_network(network, *one, order=math.inf, eps=radii[c], **options).bound
        clean = mean_loss(network, *one, options.get("loss", "margin"))
        found[:, i, c] = torch.tensor([bound.lower, bound.upper], dtype=torch.float64) - clean
    return found[0], found[1]


def test_growth_of_the_remark() -> None:
    radii = [0.0, 0.25, 1.0, 2.0, 7.0]
    for norm in NORMS:
        lower, upper = growth(
            remark(), tensor([[0.0], [2.0]]), torch.tensor([0, 0]), radii, norm=norm
        )
        expected = tensor([[min(c, (1 + c) / 2) for c in radii], [c / 2 for c in radii]])
        assert torch.allclose(lower, expected, atol=1e-9) and torch.allclose(
            upper, expected, atol=1e-9
        )
        assert (upper >= expected - 1e-15).all()


@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
def test_growth_against_a_grid(loss: str) -> None:
    network, x, y = random_case(17, 2, [3], 2, count=2)
    grid = grid_points(-1, 1, 401, 2)
    radii = [0.1, 0.6]
    for norm in NORMS:
        lower, upper = growth(
            network, x, y, radii, norm=norm, domain=(-1, 1), loss=loss, tolerance=1e-3
        )
        for i, (row, k) in enumerate(zip(x, y)):
            measure = LIPSCHITZ[loss]
            rise = measure(network.logits(grid), k.expand(len(grid))) - measure(
                network.logits(row[None]), k[None]
            )
            for c, radius in enumerate(radii):
                brute = float(
                    rise[torch.linalg.vector_norm(grid - row, norm, dim=1) <= radius].max()
                )
                assert lower[i, c] - 0.03 <= brute <= upper[i, c] + 1e-12
        assert ((upper - lower) <= 1.001e-3).all()


# The distribution


def test_optimal_transport_confirms_the_cost() -> None:
    """W_1 between the data and the returned distribution, by the transport linear program
    itself, labels kept apart.
    """
    network, x, y = random_case(23, 2, [6], 3, count=4)
    for norm in NORMS:
        result = worst_case_network(network, x, y, norm=norm, order=1, eps=0.25, domain=(-1, 1))
        m = len(result.masses)
        cost = torch.cdist(x, result.atoms, p=norm) + 1e6 * (y[:, None] != result.atom_labels[None])
        rows = np.vstack([np.kron(np.eye(4), np.ones(m)), np.kron(np.ones(4), np.eye(m))])
        marginals = np.concatenate([np.full(4, 0.25), result.masses.numpy()])
        plan = linprog(cost.numpy().flatten(), A_eq=rows, b_eq=marginals, method="highs")
        assert plan.fun <= 0.25 + 1e-12
        assert ((result.atoms >= -1) & (result.atoms <= 1)).all()


def test_weights_are_repetitions() -> None:
    network, x, y = random_case(29, 2, [5], 3)
    twice = worst_case_network(
        network, x[[0, 0, 1]], y[[0, 0, 1]], norm=1, order=1, eps=0.3, tolerance=1e-10
    )
    mu = tensor([2.0, 1.0])
    weighted = worst_case_network(
        network, x[:2], y[:2], norm=1, order=1, eps=0.3, mu=mu, tolerance=1e-10
    )
    assert weighted.bound.upper == pytest.approx(twice.bound.upper, rel=1e-9)
    assert weighted.bound.lower == pytest.approx(twice.bound.lower, rel=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_samples_on_cell_boundaries(norm: float) -> None:
    """V is Lipschitz in the samples, so a sample on one or two hyperplanes gives what its
    neighbours give.
    """
    network, _, _ = random_case(31, 2, [4], 3)
    corner = torch.linalg.solve(network.A[:2], -network.c[:2])
    wall = network.A[2] * (-network.c[2] / network.A[2].square().sum())
    x = torch.stack([corner, wall])
    y = torch.tensor([0, 2])
    values = [
        worst_case_network(
            network, x + shift, y, norm=norm, order=1, eps=0.3, tolerance=1e-10
        ).bound
        for shift in (0.0, 1e-9, -1e-9)
    ]
    for bound in values[1:]:
        assert bound.upper == pytest.approx(values[0].upper, abs=1e-7)
        assert bound.lower == pytest.approx(values[0].lower, abs=1e-7)
    assert values[0].upper - values[0].lower <= 1e-9


# Certificates


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [(-1.0, 1.0), None])
def test_any_multipliers_give_an_upper_bound(
    norm: float, domain: tuple[float, float] | None
) -> None:
    """The inequality behind every upper side, at random u >= 0, against points of the cells,
    for three penalties.
    """
    network, x, y = random_case(37, 2, [4], 3)
    problem = Problem(network, x, y, norm, domain, "margin", None, 1000)
    g = np.random.default_rng(0)
    points = grid_points(-1, 1, 101, 2).numpy() * (1 if domain else 5)
    for i, k in enumerate(y.tolist()):
        family = problem.families[k]
        for v in range(family.forms.size):
            cell = family.cells[v]
            inside = points[(points @ problem.atlas.G[cell].T <= problem.atlas.g[cell]).all(1)]
            if not len(inside):
                continue
            count = (problem.atlas.G.shape[1],)
            u = g.exponential(size=count) * (g.random(count) < 0.4)
            place = family._cut(v, u)
            cut = family.cuts.rows[place]
            value = inside @ family.forms.rows[v, :-1] + family.forms.rows[v, -1]
            length = np.linalg.norm(inside - problem.points[i], norm, axis=1)
            for penalty in (
                Penalty(1.0, float(cut[-2])),
                Penalty(2.0, 0.7),
                Penalty(math.inf, 0.8),
            ):
                bound = (
                    cut[:2] @ problem.points[i]
                    + cut[2]
                    + float(penalty.conjugate(np.array(cut[-2])))
                )
                assert (value - penalty.cost(length)).max() <= bound


@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
def test_no_time_after_the_cells(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = random_case(41, 2, [3], 3, count=2)
    with pytest.raises(InputError, match="more time"):
        worst_case_network(network, x, y, norm=2, order=1, eps=0.3, loss=loss, time_limit=0)
    for order in (1, 2, math.inf):
        with monkeypatch.context() as patch:
            patch.setattr(Problem, "late", lambda self: True)
            hurried = worst_case_network(
                network, x, y, norm=2, order=order, eps=0.3, loss=loss
            ).bound
        exact = worst_case_network(
            network, x, y, norm=2, order=order, eps=0.3, loss=loss, tolerance=1e-2
        ).bound
        assert hurried.lower <= exact.upper and exact.lower <= hurried.upper < math.inf


# Refusals


def test_refusals() -> None:
    network, x, y = random_case(0, 2, [4], 3)
    with pytest.raises(InputError, match="DLR"):
        worst_case_network(network, x, y, norm=2, order=1, eps=0.1, loss="dlr")
    with pytest.raises(InputError, match="hinge"):
        anchor(network, x, y, norm=2, loss="hinge")
    with pytest.raises(InputError, match="outside"):
        worst_case_network(network, x + 5, y, norm=2, order=1, eps=0.1, domain=(-1, 1))
    with pytest.raises(InputError, match="ball"):
        worst_case_network(network, x, y, norm=2, order=1, eps=0.1, domain=Ball(x[0], 1, 2))
    with pytest.raises(InputError, match="eps"):
        worst_case_network(network, x, y, norm=2, order=1, eps=-0.1)
    with pytest.raises(InputError, match="inputs"):
        worst_case_network(network, x[:, :1], y, norm=2, order=1, eps=0.1)
    with pytest.raises(InputError, match="cells"):
        worst_case_network(network, x, y, norm=2, order=1, eps=0.1, cells_limit=2)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_a_direction_of_length_zero_is_no_ray(norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that stops at d = 0 with multipliers a little off leaves nu above 0: nothing may
    be divided by |d|.
    """
    from wassail.certificates.exact import programs as programs_module

    a = np.array([1.0, 0.0])
    rows = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    still = np.zeros(4 if norm == 1 else 2)
    off = np.array([1.0 - 1e-9, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(programs_module, "_minimise", lambda programs, bounds: [(still, off)])
    nu, _, ray = programs_module.recessions([(a, rows)], norm)[0]
    assert ray is None and 0 <= nu < 1e-8


@pytest.mark.parametrize("seed", [11, 0, 1, 2])
def test_points_an_ulp_apart_cost_what_they_cost(seed: int) -> None:
    """Seed 11 has two evaluated points that differ by rounding: the step between them looked
    steeper than the step that leads there, and was taken first and alone.
    """
    torch.manual_seed(seed)
    small = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x = torch.rand(5, 3, dtype=torch.float64)
    y = small(x).argmax(1)
    for eps in (0.01, 0.3):
        found = ws.worst_case(small, x, y, ws.Threat(2, 1, eps, None), loss="margin")
        assert found.bound.lower <= found.bound.upper
        assert found.cost <= eps


def relu_network(loss: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, its samples, and labels or targets."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1 if loss == "huber" else 3))
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(torch.randn(values.shape, generator=generator))
    x = torch.rand(4, 2, generator=generator)
    y = torch.randint(0, 3, (4,), generator=generator)
    return model.eval(), x, y.double() if loss == "huber" else y


@pytest.mark.parametrize("loss", ["margin", "huber"])
@pytest.mark.parametrize("others", [{}, {"subpopulation": 0.7, "label_cost": 0.2}])
def test_more_cells_than_the_budget_pays_for_leave_an_open_bracket(
    loss: str, others: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the exact value, has its distribution, and says how to get more."""
    model, x, y = relu_network(loss)
    threat = ws.Threat(2, 1, 0.2, (0, 1), **others)  # type: ignore[arg-type]
    exact = ws.worst_case(model, x, y, threat, loss)
    monkeypatch.setattr(worst_case_file, "_affordable", lambda _: 1)
    found = ws.worst_case(model, x, y, threat, loss)
    low, high = found.bound.lower, found.bound.upper
    assert low <= exact.bound.upper + 1e-9 and exact.bound.lower <= high + 1e-9
    assert "time_limit" in found.bound.info["note"] and "note" not in exact.bound.info
    assert found.cost <= 0.2 * (1 + 1e-12)
    assert float(found.masses.sum()) == pytest.approx(1)
    with pytest.raises(InputError, match="cells"):  # what was asked for, not the budget
        ws.worst_case(model, x, y, threat, loss, cells=1)
    whole = ws.worst_case(model, x, y, threat, loss, time_limit=math.inf)
    assert whole.bound.upper == exact.bound.upper


def test_a_network_of_many_neurons_is_left_to_linear_bounds() -> None:
    """The budget counts operations: no clock, and the same cells on every machine."""
    few, many = (
        read(nn.Sequential(nn.Linear(2, h), nn.ReLU(), nn.Linear(h, 2)).eval(), (2,)).piecewise()
        for h in (8, 160)
    )
    assert worst_case_file._affordable(many) < 10_000 < 50_000 < worst_case_file._affordable(few)


@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
def test_a_budget_that_ends_after_the_cells_leaves_an_open_bracket(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, y = relu_network(loss)
    threat = ws.Threat(2, 1, 0.2, None)
    shares: list[float] = []
    exact = ws.worst_case(model, x, y, threat, loss, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1 and len(shares) > len(x)
    monkeypatch.setattr(worst_case_file, "WORK", worst_case_file.clock.STEP)
    monkeypatch.setattr(worst_case_file, "_affordable", lambda _: 1000)
    found = [ws.worst_case(model, x, y, threat, loss).bound for _ in range(2)]
    assert found[0].upper == found[1].upper and "note" in found[0].info
    assert found[0].lower <= exact.bound.upper + 1e-9
    assert found[0].upper >= exact.bound.lower - 1e-9
