"""The slope at infinity: closed forms, the recession identity, the bracket's soundness, l_N,
the theorem's condition.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from conftest import ZOO
from support.cells import infinity_by_cells
from wassail.certificates.exact import cones
from wassail.certificates.exact.cells import enumerate_cells
from wassail.certificates.exact.cones import ConeSearch, Rounding
from wassail.certificates.exact.infinity import infinity, infinity_at, tightness
from wassail.certificates.exact.programs import support
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region
from wassail.errors import InputError
from wassail.geometry import operator_norm, vector_norm
from wassail.threat import dual

INF = math.inf
NORMS = (1.0, 2.0, INF)
METHODS = (infinity, infinity_by_cells)
SIZES = ((2, 7, 3), (3, 5, 3), (2, 4, 4, 2), (3, 4, 4, 3), (2, 3, 3, 3, 2))


def random_net(sizes: tuple[int, ...], seed: int, slope: float = 0.0) -> Piecewise:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Piecewise.from_layers(
        [(draw(b, a) / a**0.5, draw(b)) for a, b in itertools.pairwise(sizes)], slope
    )


def kinked(right: float, left: float, bias: float = 0.0) -> Piecewise:
    """`theta_1 - theta_0 = right relu(x + bias) + left relu(-x - bias)` on the line."""
    hidden = (torch.tensor([[1.0], [-1.0]]), torch.tensor([bias, -bias]))
    return Piecewise.from_layers(
        [hidden, (torch.tensor([[0.0, 0.0], [right, left]]), torch.zeros(2))]
    )


def directions(n: int, count: int, seed: int, norm: float) -> torch.Tensor:
    u = torch.randn(count, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return u / vector_norm(u, norm)[:, None]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_only_labels_that_occur_count(method, norm: float) -> None:
    net = kinked(1.0, -3.0, bias=0.7)
    assert method(net, norm, [0]).upper == pytest.approx(1.0, rel=1e-12)
    assert method(net, norm, [1]).upper == pytest.approx(3.0, rel=1e-12)
    both = method(net, norm, [0, 1, 1])
    assert (
        both.exact
        and both.lower == pytest.approx(3.0, rel=1e-12)
        and both.lower <= 3.0 <= both.upper
    )
    assert (both.info["label"], both.info["rival"]) == (1, 0) and float(
        both.witness
    ) == pytest.approx(-1.0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_negative_slopes_are_clipped_at_zero(method, norm: float) -> None:
    bound = method(kinked(-1.0, -1.0), norm, [0])  # the gap is -|x|
    assert bound.lower == 0 and 0 <= bound.upper < 1e-13


@pytest.mark.parametrize("norm", NORMS)
def test_the_papers_remark_grows_at_half_its_lipschitz_constant(norm: float) -> None:
    # |x| for |x| <= 1, (|x| + 1) / 2 beyond.
    hidden = (torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([0.0, 0.0, -1.0, -1.0]))
    net = Piecewise.from_layers(
        [hidden, (torch.tensor([[0.0] * 4, [1.0, 1.0, -0.5, -0.5]]), torch.zeros(2))]
    )
    for method in METHODS:
        assert method(net, norm, [0]).upper == pytest.approx(0.5, rel=1e-12)
    at = partial(infinity_at, net, y=torch.tensor([0]), norm=norm)
    assert at(torch.tensor([[2.0]])).upper == pytest.approx(0.5, rel=1e-12)
    assert at(torch.tensor([[0.5]])).upper == 0  # a bounded cell
    assert at(torch.tensor([[1.0]])).upper == pytest.approx(
        0.5, rel=1e-12
    )  # the kink belongs to both


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_a_linear_network_in_closed_form(method, norm: float) -> None:
    g = torch.Generator().manual_seed(5)
    weight = torch.randn(3, 4, generator=g, dtype=torch.float64)
    net = Piecewise.from_layers([(weight, torch.ones(3))])
    for labels in ([0], [1, 2], [0, 1, 2]):
        gaps = torch.stack([weight[j] - weight[k] for k in labels for j in range(3) if j != k])
        bound = method(net, norm, labels)
        assert bound.exact and bound.upper == pytest.approx(
            float(vector_norm(gaps, dual(norm)).max()), rel=1e-12
        )


def check_recession_identity(seeds: range) -> None:
    for seed in seeds:
        net = random_net(SIZES[seed % len(SIZES)], seed, slope=0.1 if seed % 7 == 0 else 0.0)
        labels = range(net.outputs) if seed % 2 else [0]
        for norm in NORMS:
            bias_free = infinity(net, norm, labels)
            cells = infinity_by_cells(net, norm, labels)
            scale = max(cells.upper, 1e-3)  # l may be zero
            assert bias_free.upper == pytest.approx(cells.upper, rel=1e-9, abs=1e-11)
            for bound in (bias_free, cells):
                assert bound.upper - bound.lower <= 1e-9 * scale
                assert float(vector_norm(bound.witness[None], norm)) <= 1
            assert bias_free.upper >= float(
                largest_gap(net, labels, directions(net.inputs, 2000, seed, norm))
            )


def largest_gap(net: Piecewise, labels, u: torch.Tensor) -> torch.Tensor:
    z = net.homogeneous().logits(u)
    return torch.stack(
        [z[:, j] - z[:, k] for k in labels for j in range(net.outputs) if j != k]
    ).max()


@pytest.mark.slow
def test_recession_identity() -> None:
    check_recession_identity(range(8))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(8, 50, 6))
def test_recession_identity_on_more_networks(first: int) -> None:
    check_recession_identity(range(first, first + 6))


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", NORMS)
def test_a_search_that_closes_at_zero_holds_each_neuron_once(norm: float) -> None:
    # Nothing grows here, so nodes are split until what their neurons lose is rounding noise.
    net = random_net((2, 4, 4, 2), seed=22)
    tree = 2 ** (net.neurons + 1) - 1
    bound = infinity(net, norm, [0], nodes=4 * tree)
    assert bound.lower == 0 and bound.upper <= 1e-11 and bound.info["nodes"] <= tree


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", NORMS)
def test_outputs_of_any_unit_take_the_same_search(norm: float) -> None:
    net = random_net((3, 6, 6, 3), seed=1)
    plain = infinity(net, norm, [0, 1, 2])
    for scale in (2.0**-60, 2.0**40):
        unit = infinity(
            net.head(scale * torch.eye(3, dtype=torch.float64)), norm, [0, 1, 2], nodes=2000
        )
        assert unit.lower == pytest.approx(scale * plain.lower, rel=1e-12)
        assert unit.upper == pytest.approx(scale * plain.upper, rel=1e-12)
        assert unit.info["nodes"] <= 1.5 * plain.info["nodes"] + 4


@pytest.mark.slow_cases("inf")
@pytest.mark.parametrize("norm", NORMS)
def test_stopped_early_the_bracket_still_holds(
    norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = random_net((4, 8, 8, 3), seed=1)
    exact = infinity(net, norm, [0, 1, 2], seed=3)
    assert exact.exact and exact.info["nodes"] > 40
    stopped = [infinity(net, norm, [0, 1, 2], nodes=nodes) for nodes in (0, 7, 20)]
    stopped += [
        infinity(net, norm, [0, 1, 2], nodes=0),
        infinity(net, norm, [0, 1, 2], time_limit=0.0),
    ]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("solve", "relax", "step", "ascend"):
        with monkeypatch.context() as patch:
            patch.setattr(ConeSearch, name, interrupted)
            stopped.append(infinity(net, norm, [0, 1, 2]))
    for bound in stopped:
        assert bound.lower <= exact.upper and bound.upper >= exact.lower
    assert all(
        bound.upper > 1.001 * exact.upper for bound in stopped[:2] + stopped[-3:]
    )  # these really did stop
    assert stopped[3].lower == pytest.approx(
        exact.lower, rel=1e-9
    )  # the ascent alone finds it here


def test_the_same_seed_gives_the_same_bound() -> None:
    net = random_net((3, 6, 6, 3), seed=2)
    one = infinity(net, 2.0, [0], seed=4)
    two = infinity(net, 2.0, [0], seed=4)
    assert (one.lower, one.upper, one.info["nodes"]) == (two.lower, two.upper, two.info["nodes"])


@pytest.mark.few(4)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("slope", [0.0, 0.2, -1.0])
def test_node_bounds_hold_at_sampled_directions(norm: float, slope: float) -> None:
    """For random held sides and random multipliers: preactivations and gaps of every direction
    that respects the sides.
    """
    net = random_net((3, 4, 4, 4, 3), seed=8, slope=slope)
    search = ConeSearch(net, norm, [0, 1, 2], seed=0)
    g = torch.Generator().manual_seed(9)
    search.ceiling = 1.0
    u = directions(3, 5_000, 1, norm)
    u = torch.cat([u, 0.5 * u])
    v = search.gaps.preactivations(u)
    gaps = search.gaps.logits(u)
    seen = 0
    for row in range(20):
        mask = (v[int(torch.randint(len(u), (1,), generator=g))] > 0).to(torch.int8)
        held = torch.rand(12, generator=g) < 0.1 * (row % 10)
        state = torch.where(held, mask, -1).to(torch.int8)
        inside = (((v >= 0) == (state == 1)) | (state < 0)).all(1)
        low, high = search.intervals(state[None])
        assert (v[inside] >= low).all() and (v[inside] <= high).all()
        alpha = torch.rand(6, 12, generator=g, dtype=torch.float64)
        beta = torch.rand(6, 12, generator=g, dtype=torch.float64)
        value, *_ = search.relax(
            state.repeat(6, 1), torch.arange(6), low.repeat(6, 1), high.repeat(6, 1), alpha, beta
        )
        assert (gaps[inside] <= value).all()
        seen += int(inside.sum())
    assert seen > 5_000


@pytest.mark.parametrize("norm", NORMS)
def test_held_neurons_tighten_the_bounds_after_them(norm: float) -> None:
    # The second layer is relu(u_0) - relu(u_1), with u_0 held down and u_1 held up: it cannot be
    # positive.
    layers = [torch.eye(2), torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0], [0.0]])]
    net = Piecewise.from_layers([(weight, torch.zeros(len(weight))) for weight in layers])
    low, high = ConeSearch(net, norm, [0], seed=0).intervals(
        torch.tensor([[0, 1, -1]], dtype=torch.int8)
    )
    assert high[0, 2] <= 1e-6 and low[0, 2] == pytest.approx(-1.0)


@pytest.mark.parametrize("norm", NORMS)
def test_support_of_a_cone_is_certified_on_both_sides(norm: float) -> None:
    g = torch.Generator().manual_seed(3)
    for n, walls in [(1, 1), (2, 3), (3, 2), (4, 6), (5, 12)]:
        for _ in range(10):
            a = torch.randn(n, generator=g, dtype=torch.float64).numpy()
            rows = torch.randn(walls, n, generator=g, dtype=torch.float64)
            cone = (rows / vector_norm(rows, 2)[:, None]).numpy()
            u, y = support(a, cone, norm)
            length = np.linalg.norm(u, norm)
            u = u / length if length > 1e-9 else 0 * u
            assert (y >= 0).all() and (cone @ u <= 1e-8).all()
            assert a @ u == pytest.approx(np.linalg.norm(a - cone.T @ y, dual(norm)), abs=1e-8)


def test_support_uses_the_whole_set_of_maximisers() -> None:
    # r = inf: sign(0) is free, u = (1, t); r = 1: at a tie the hull of both axes.
    u, _ = support(np.array([1.0, 0.0]), np.array([[0.5, -1.0]]) / math.sqrt(1.25), INF)
    assert u[0] == pytest.approx(1) and 0.5 - 1e-9 <= u[1] <= 1
    u, _ = support(np.array([1.0, 1.0]), np.array([[1.0, -1.0]]) / math.sqrt(2), 1.0)
    assert u.sum() == pytest.approx(1) and u[1] >= u[0] - 1e-9


@pytest.mark.few(8)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(4))
def test_practical_slope_is_below_and_reaches_it_with_samples_everywhere(
    norm: float, seed: int
) -> None:
    net = random_net((2, 5, 4, 3), seed)
    cells = enumerate_cells(net, Region.make(None, 2))
    labels = torch.arange(3)
    exact = infinity_by_cells(net, norm, labels.tolist())
    x = cells.points[:3]
    some = infinity_at(net, x, torch.zeros(3, dtype=torch.int64), norm)
    assert some.lower <= some.upper <= exact.upper * (1 + 1e-12)
    points = cells.points.repeat_interleave(3, 0)
    every = labels.repeat(len(cells))
    assert infinity_at(net, points, every, norm).upper == pytest.approx(exact.upper, rel=1e-9)


def test_practical_slope_of_boundary_samples_and_of_samples_without_rays() -> None:
    net = kinked(2.0, 0.5)
    at = partial(infinity_at, net, norm=2.0)
    assert at(torch.tensor([[1.0]]), torch.tensor([0])).upper == pytest.approx(2.0)
    assert at(torch.tensor([[-1.0]]), torch.tensor([0])).upper == pytest.approx(0.5)
    assert at(torch.tensor([[0.0]]), torch.tensor([0])).upper == pytest.approx(2.0)
    assert at(torch.tensor([[0.0]]), torch.tensor([1])).upper < 1e-13  # that gap only falls
    # A square: the cell |x_0|, |x_1| < 1 is bounded, and a strip has rays but no open recession
    # cone.
    walls = (torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]]), torch.full((4,), -1.0))
    net = Piecewise.from_layers([walls, (torch.tensor([[0.0] * 4, [1.0] * 4]), torch.zeros(2))])
    for x, value in [
        ((0.0, 0.0), 0.0),
        ((0.0, 5.0), 0.0),
        ((3.0, 5.0), math.sqrt(2)),
        ((1.0, 1.0), math.sqrt(2)),
    ]:
        assert infinity_at(net, torch.tensor([x]), torch.tensor([0]), 2.0).upper == pytest.approx(
            value, rel=1e-12
        )


@pytest.mark.parametrize("norm", NORMS)
def test_tightness_holds_for_two_opposite_logits(norm: float) -> None:
    # theta = (-f, f), f = relu(w . x - 1): the only slope is (-w, w), on a half-space that recedes
    # along w.
    weight = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    net = Piecewise.from_layers(
        [(weight, torch.tensor([-1.0])), (torch.tensor([[-1.0], [1.0]]), torch.zeros(2))]
    )
    result = tightness(net, norm, [0, 1])
    slope = 2 * float(vector_norm(weight, dual(norm)))
    assert result.tight and result.pair == (0, 1) and result.slope == pytest.approx(slope)
    assert infinity(net, norm, [0, 1]).upper == pytest.approx(slope, rel=1e-9)
    absent = tightness(net, norm, [1])  # from label 1 the gap is -2 f
    assert not absent.tight and (absent.present, absent.recedes) in {(False, True), (True, False)}
    assert infinity(net, norm, [1]).upper < 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_tightness_fails_at_the_increment_for_three_linear_logits(norm: float) -> None:
    weight = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = tightness(Piecewise.from_layers([(weight, torch.zeros(3))]), norm, [0, 1, 2])
    assert result.present and result.recedes and not result.largest and not result.tight
    assert result.slope == pytest.approx(
        2 ** (1 / norm) * float(operator_norm(weight, norm, dual(norm)))
    )
    assert result.increment < result.slope


@pytest.mark.parametrize("norm", NORMS)
def test_tightness_fails_where_the_steepest_cell_is_bounded(norm: float) -> None:
    # A ramp from 0 to 1: steep between, flat outside.
    ramp = (torch.ones(2, 1), torch.tensor([0.0, -1.0]))
    net = Piecewise.from_layers([ramp, (torch.tensor([[-1.0, 1.0], [1.0, -1.0]]), torch.zeros(2))])
    result = tightness(net, norm, [0, 1])
    assert result.largest and not result.recedes and not result.tight
    assert result.mask.tolist() == [True, False] and infinity(net, norm, [0, 1]).upper < 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_tight_means_equal_slopes(norm: float) -> None:
    tight = 0
    for seed in range(12):
        base = random_net((2, 3, 1), seed)
        net = base.head(torch.tensor([[-1.0], [1.0]]))
        result = tightness(net, norm, [0, 1])
        bound = infinity_by_cells(net, norm, [0, 1])
        assert bound.upper <= result.slope * (1 + 1e-9)
        assert result.tight == (
            bound.upper >= result.slope * (1 - 1e-9)
        )  # K = 2 with opposite logits: also necessary
        tight += result.tight
    assert 0 < tight < 12


def test_what_cannot_be_answered_is_refused() -> None:
    net = random_net((2, 3, 2), seed=0)
    with pytest.raises(InputError, match="labels"):
        infinity(net, 2.0, [])
    with pytest.raises(InputError, match="labels"):
        infinity(net, 2.0, [2])
    with pytest.raises(InputError, match="norm"):
        infinity(net, 3.0, [0])
    with pytest.raises(InputError, match="one output"):
        infinity(random_net((2, 3, 1), seed=0), 2.0, [0])


def test_rounding_slack_is_small_and_covers_another_order_of_summation() -> None:
    net = random_net((3, 5, 5, 2), seed=6).homogeneous()
    slack = Rounding.of(net, 2.0)
    u = directions(3, 1000, 2, 2.0)
    turned = replace(net, A=net.A.flip(1), C=net.C.flip(1)).logits(u.flip(1))
    assert ((turned - net.logits(u)).abs() <= slack.output).all() and (slack.output < 1e-10).all()


def load(name: str) -> Piecewise:
    file = np.load(ZOO / "lipschitz" / f"{name}.npz")
    layers = [
        (torch.from_numpy(file[f"W{i}"]), torch.from_numpy(file[f"b{i}"]))
        for i in range(len(file.files) // 2)
    ]
    net = Piecewise.from_layers(layers)
    return (
        net if net.outputs > 1 else net.head(torch.tensor([[1.0], [0.0]]))
    )  # a regression net against a zero logit


@pytest.mark.few(3)
@pytest.mark.slow_cases("exlipbab_iris_4-6-6-3-inf", "exlipbab_wine_11-12-12-1-2.0")
@pytest.mark.skipif(not (ZOO / "lipschitz").exists(), reason="no real networks")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "name", ["exlipbab_iris_4-6-6-3", "exlipbab_wine_11-12-12-1", "exlipbab_abalone_9-16-16-1"]
)
def test_real_networks_are_closed_in_seconds(name: str, norm: float) -> None:
    net = load(name)
    bound = infinity(net, norm, range(net.outputs))
    assert bound.exact and bound.info["nodes"] < 5000
    gap = net.homogeneous().logits(bound.witness[None])[0]
    assert float(gap[bound.info["rival"]] - gap[bound.info["label"]]) >= bound.lower
    if "iris" in name:
        assert infinity_by_cells(net, norm, range(3)).upper == pytest.approx(bound.upper, rel=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_a_wall_cuts_the_ball_where_it_stands(norm: float) -> None:
    a, b, wall, rest = (
        torch.tensor(v, dtype=torch.float64) for v in ([[[2.0]]], [[0.5]], [[[-3.0]]], [[0.9]])
    )
    cut = float(cones._cut(a, b, wall, rest, norm))  # 2 u + 0.5 with u <= 0.3
    assert 1.1 <= cut <= 1.11
    assert float(cones._cut(-a, b, wall, rest, norm)) == pytest.approx(
        2.5
    )  # downwards the wall is not in the way


@pytest.mark.parametrize("norm", NORMS)
def test_a_linear_node_is_solved_with_the_held_constraints_only(norm: float) -> None:
    # The gap is relu(u), held active. A second neuron of the same sign is free and does not matter:
    # u <= 0 is not implied.
    net = Piecewise.from_layers(
        [
            (torch.ones(2, 1), torch.zeros(2)),
            (torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.zeros(2)),
        ]
    )
    low = torch.tensor([0.0, -1.0]).double()
    high = torch.ones(2).double()
    value, split = ConeSearch(net, norm, [0], seed=0).solve(
        torch.tensor([1, -1], dtype=torch.int8), 0, low, high, INF
    )
    assert value == pytest.approx(1.0, rel=1e-12) and value >= 1 and split == -1
    # A held neuron behind a free one: its constraint is not linear yet, so the free one is next.
    net = Piecewise.from_layers(
        [(torch.ones(1, 1), torch.zeros(1))] * 2 + [(torch.tensor([[0.0], [1.0]]), torch.zeros(2))]
    )
    low = torch.tensor([-1.0, -1.0]).double()
    high = torch.tensor([1.0, 0.0]).double()
    assert (
        ConeSearch(net, norm, [0], seed=0).solve(
            torch.tensor([-1, 0], dtype=torch.int8), 0, low, high, INF
        )[1]
        == 0
    )


def test_node_choice_prefers_early_layers() -> None:
    layer = torch.tensor([0, 0, 1, 1])
    assert cones._choose(torch.tensor([0.1, 0.2, 5.0, 1.0]), layer) == 1
    assert cones._choose(torch.tensor([1e-9, 0.0, 5.0, 1.0]), layer) == 2
    assert cones._choose(torch.zeros(4), layer) == -1
