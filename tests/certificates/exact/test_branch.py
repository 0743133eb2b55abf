"""Branch and bound against closed forms, brute force over all masks, and the published tables."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from conftest import ZOO
from wassail.certificates.exact import constants, multipliers, paths
from wassail.certificates.exact import polytope as polytope_module
from wassail.certificates.exact.constants import Bracket, branch
from wassail.certificates.exact.multipliers import (
    INFLATE,
    Form,
    forms,
    prove,
    reduce,
    split,
    start,
    tighten,
)
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Ball, Region
from wassail.errors import InputError
from wassail.geometry import operator_norm

INF = math.inf
NORMS = (1.0, 2.0, INF)
PAIRS = list(itertools.product(NORMS, NORMS))


def random_net(sizes: list[int], seed: int, slope: float = 0.0, bias: float = 1.0) -> Piecewise:
    g = torch.Generator().manual_seed(seed)
    pairs = itertools.pairwise(sizes)
    draw = [
        (
            torch.randn(b, a, generator=g, dtype=torch.float64),
            torch.randn(b, generator=g, dtype=torch.float64),
        )
        for a, b in pairs
    ]
    return Piecewise.from_layers([(w, bias * b) for w, b in draw], slope)


def all_masks(count: int) -> Tensor:
    return torch.tensor(
        list(itertools.product([False, True], repeat=count)), dtype=torch.bool
    ).reshape(-1, count)


def brute_force(net: Piecewise, region: Region) -> Tensor:
    """The Jacobians of all masks whose cell meets the interior of the region: the widest point
    of each, by its own program.
    """
    masks = all_masks(net.neurons)
    rows, shift, jacobian, _ = net.affine(masks)
    kept = [
        i
        for i in range(len(masks))
        if widest(rows[i].numpy(), shift[i].numpy(), masks[i].numpy(), region) > 1e-8
    ]
    return jacobian[kept]


def widest(rows: np.ndarray, shift: np.ndarray, mask: np.ndarray, region: Region) -> float:
    sign = np.where(mask, 1.0, -1.0)
    n = rows.shape[1]
    length = np.linalg.norm(rows, axis=1)
    if region.norm == 2 and region.radius < INF:
        import cvxpy as cp

        x = cp.Variable(n)
        t = cp.Variable()
        limits = [
            cp.multiply(sign, rows @ x + shift) >= t * length,
            t <= 1,
            cp.norm(x - region.centre.numpy()) <= region.radius,
        ]
        limits += (
            [x >= region.low.numpy(), x <= region.high.numpy()]
            if bool(torch.isfinite(region.low).all())
            else []
        )
        problem = cp.Problem(cp.Maximize(t), limits)
        problem.solve(solver=cp.CLARABEL)
        return float(problem.value)
    table = np.c_[-sign[:, None] * rows, length]
    right = sign * shift
    bounds = [(lo, hi) for lo, hi in zip(region.low.tolist(), region.high.tolist())] + [(None, 1.0)]
    if region.radius < INF:  # an l1 ball, all of its facets
        facets = np.array(list(itertools.product([-1.0, 1.0], repeat=n)))
        table = np.concatenate([table, np.c_[facets, np.zeros(len(facets))]])
        right = np.concatenate([right, region.radius + facets @ region.centre.numpy()])
    answer = linprog(np.r_[np.zeros(n), -1.0], A_ub=table, b_ub=right, bounds=bounds)
    return -answer.fun if answer.status == 0 else -1.0


def check_witness(
    net: Piecewise, region: Region, found: Bracket, norms: tuple[float, float]
) -> None:
    assert found.witness is not None and bool(region.contains(found.witness[None]))
    v = net.preactivations(found.witness[None])
    assert float(operator_norm(net.jacobian(v > 0), *norms)) == pytest.approx(
        found.lower, rel=1e-10
    )
    g = torch.Generator().manual_seed(0)
    near = found.witness + 1e-13 * torch.randn(50, net.inputs, dtype=torch.float64, generator=g)
    moving = (net.affine(v > 0)[0][0] != 0).any(
        1
    )  # a neuron that is constant on the cell has no side to be strictly on
    assert (net.mask(near) == (v > 0))[:, moving].all()


REGIONS = {
    "R^n": None,
    "box": (0.0, 1.0),
    "l2": Ball(torch.tensor([0.3, 0.6, 0.5]), 0.7, 2),
    "l1": Ball(torch.tensor([0.3, 0.6, 0.5]), 0.9, 1),
    "linf in box": Ball(torch.tensor([0.3, 0.6, 0.5]), 0.4, INF, (0.0, 1.0)),
    "l2 in box": Ball(torch.tensor([0.1, 0.9, 0.5]), 0.6, 2, (0.0, 1.0)),
}


# ---------------------------------------------------------------- the whole engine


@pytest.mark.few(2)
@pytest.mark.slow_cases("l2", "l1", "box")
@pytest.mark.parametrize("where", REGIONS)
def test_all_norms_equal_brute_force(where: str) -> None:
    net = random_net([3, 3, 2, 2], 5, slope=0.2 if where in ("R^n", "l1") else 0.0)
    region = Region.make(REGIONS[where], 3)
    jacobians = brute_force(net, region)
    for norms in PAIRS:
        value = float(operator_norm(jacobians, *norms).max())
        found = branch(net, region, *norms)
        assert found.complete
        assert found.lower == pytest.approx(value, rel=1e-9)
        assert found.lower <= value * (1 + 1e-14) and value <= found.upper * (1 + 1e-14)
        check_witness(net, region, found, norms)


def test_three_layers_and_negative_slopes() -> None:
    region = Region.make((-1.0, 1.0), 2)
    for slope in (0.0, -1.0):
        net = random_net([2, 2, 3, 2, 2], 8, slope)
        value = float(operator_norm(brute_force(net, region), 2, 2).max())
        assert branch(net, region, 2, 2).lower == pytest.approx(value, rel=1e-9)


def test_stretched_rows_equal_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipliers, "STRETCHED_FROM_INPUTS", 0)  # as for many inputs
    net = random_net([3, 4, 3, 3], 15)
    region = Region.make((-1.0, 1.0), 3)
    jacobians = brute_force(net, region)
    for norms in [(INF, INF), (INF, 1.0)]:
        value = float(operator_norm(jacobians, *norms).max())
        found = branch(net, region, *norms)
        assert found.complete and found.lower == pytest.approx(value, rel=1e-9)
        root = branch(net, region, *norms, nodes=1)
        assert value <= root.upper < 2 * value


def test_many_members() -> None:
    weight = torch.linspace(-1, 1, 600, dtype=torch.float64).reshape(15, 40) ** 3
    weight[14, 39] = -2  # the last of 600 entries is the largest
    net = Piecewise.from_layers([(weight, torch.zeros(15))])
    assert branch(net, Region.make(None, 40), 1, INF).upper == pytest.approx(2, rel=1e-12)


def test_closed_form_one_layer() -> None:
    # relu(x_h) - relu(-x_h) on all of R^n: each of the 2^n sign patterns is a cell and J is always
    # the identity times a row
    weight = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    head = torch.tensor([[3.0, 0.0, 1.0, 2.0, 5.0, 0.0]], dtype=torch.float64)
    net = Piecewise.from_layers([(weight, torch.zeros(6)), (head, torch.zeros(1))])
    everywhere = Region.make(None, 3)
    corner = Region.make((0.0, 1.0), 3)
    assert branch(net, everywhere, 2, 2).upper == pytest.approx(
        math.sqrt(9 + 25 + 1), rel=1e-9
    )  # |3 or -2|, |0 or -5|, |1 or 0|
    assert branch(net, everywhere, INF, INF).upper == pytest.approx(9, rel=1e-9)
    assert branch(net, everywhere, 1, INF).upper == pytest.approx(5, rel=1e-9)
    assert branch(net, corner, 2, 2).upper == pytest.approx(
        math.sqrt(10), rel=1e-9
    )  # all walls touch the box, none cuts it


@pytest.mark.parametrize("width", [1e-3, 1e-7, 1e-11, 1e-13])
def test_thin_cells_are_not_lost(width: float) -> None:
    # 5 relu(x) - 5 relu(width - x): slope 10 between 0 and width, 5 elsewhere
    weight = torch.tensor([[1.0], [-1.0]]).double()
    bias = torch.tensor([0.0, width]).double()
    net = Piecewise.from_layers(
        [(weight, bias), (torch.tensor([[5.0, -5.0]]).double(), torch.zeros(1))]
    )
    found = branch(net, Region.make((-1.0, 1.0), 1), 2, 2)
    assert found.complete and 10 <= found.upper <= 10 * (1 + 1e-9)
    assert found.witness is not None and 0 < float(found.witness) < width


def test_linear_network() -> None:
    weight = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64)
    net = Piecewise.from_layers([(weight, torch.zeros(2))])
    for norms in PAIRS:
        found = branch(net, Region.make(None, 2), *norms)
        assert found.complete and found.nodes == 1
        assert found.upper == pytest.approx(float(operator_norm(weight, *norms)), rel=1e-12)


def test_dead_constant_and_doubled_neurons() -> None:
    g = torch.Generator().manual_seed(2)
    w = torch.randn(3, 2, generator=g).double()
    out = torch.randn(2, 9, generator=g).double()
    stacked = torch.cat(
        [w, w, torch.zeros(3, 2)]
    )  # twice the same hyperplanes, then neurons without input
    bias = torch.tensor([0.5, -1.0, 0.0, 0.5, -1.0, 0.0, 1.0, -1.0, 0.0])
    region = Region.make(None, 2)
    double = Piecewise.from_layers([(stacked, bias), (out, torch.zeros(2))])
    single = Piecewise.from_layers([(w, bias[:3]), (out[:, :3] + out[:, 3:6], torch.zeros(2))])
    assert branch(double, region, 2, 2).upper == pytest.approx(
        branch(single, region, 2, 2).upper, rel=1e-9
    )
    nothing = Piecewise.from_layers([(w, bias[:3]), (torch.zeros(2, 3), torch.ones(2))])
    found = branch(nothing, region, INF, 2)
    assert found.lower == found.upper == 0 and found.complete


@pytest.mark.parametrize("where", [None, (0.0, 1.0)])
def test_zero_biases_make_flat_cells_and_still_close(where: tuple[float, float] | None) -> None:
    net = random_net([3, 4, 3, 2], 4, bias=0.0)
    region = Region.make(where, 3)
    value = float(operator_norm(brute_force(net, region), 2, 2).max())
    found = branch(net, region, 2, 2)
    assert found.complete and found.lower == pytest.approx(value, rel=1e-9)


def test_a_region_without_interior() -> None:
    net = random_net([3, 5, 2], 1)
    point = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64)
    value = float(operator_norm(net.jacobian(net.mask(point[None])), 2, 2))
    for region in (Region.make((point, point), 3), Region.make(Ball(point, 0.0, 2), 3)):
        assert branch(net, region, 2, 2).upper == pytest.approx(value, rel=1e-9)


def test_margins_are_the_longest_row() -> None:
    net = random_net([3, 5, 4, 3], 6)
    region = Region.make((-1.0, 2.0), 3)
    head = torch.tensor([[1.0, -1, 0], [1, 0, -1], [0, 1, -1]])
    together = branch(net.head(head), region, 2, INF)
    apart = [branch(net.head(row[None]), region, 2, 2) for row in head]
    assert together.lower == pytest.approx(max(b.lower for b in apart), rel=1e-9)


def test_scales_of_weights_inputs_and_outputs_do_not_matter() -> None:
    net = random_net([3, 6, 5, 2], 7)
    region = Region.make(None, 3)
    value = branch(net, region, 2, 2).upper
    for factor in (1e-6, 1e6):
        large = Piecewise(
            net.A, net.B, net.c * factor, net.C, net.D, net.e, net.slope, net.layer
        )  # x in other units
        assert branch(large, region, 2, 2).upper == pytest.approx(value, rel=1e-9)
        outputs = branch(net.head(factor**5 * torch.eye(2).double()), region, 2, 2)
        assert outputs.complete and outputs.upper == pytest.approx(factor**5 * value, rel=1e-9)


# ---------------------------------------------------------------- stopping early


def test_a_bracket_is_valid_whenever_it_stops() -> None:
    net = random_net([4, 8, 8, 2], 3)
    region = Region.make(None, 4)
    value = branch(net, region, 2, 2)
    assert value.complete and value.nodes > 20
    seen: list[tuple[float, float, int]] = []
    for nodes in (1, 2, 7, 20):
        found = branch(net, region, 2, 2, nodes=nodes, tick=lambda *a: seen.append(a))
        assert found.lower <= value.upper and value.lower <= found.upper
        assert nodes <= found.nodes <= 3 * nodes
        check_witness(net, region, found, (2, 2))
    assert not branch(net, region, 2, 2, nodes=1).complete
    late = branch(net, region, 2, 2, time_limit=0)
    assert late.nodes <= 1 and late.lower <= value.upper and value.lower <= late.upper
    assert all(low <= value.upper and value.lower <= high for low, high, _ in seen)


def test_interrupt_returns_what_is_known() -> None:
    net = random_net([4, 8, 8, 2], 3)
    region = Region.make(None, 4)
    last: list[tuple[float, float, int]] = []

    def stop(low: float, high: float, nodes: int) -> None:
        last.append((low, high, nodes))
        if len(last) == 3:
            raise KeyboardInterrupt

    found = branch(net, region, 2, 2, tick=stop)
    assert len(last) == 3 and (found.lower, found.upper, found.nodes) == last[-1]


@pytest.mark.parametrize("where", ["reach", "bound", "explore"])
def test_interrupt_inside_a_step(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    net = random_net([4, 8, 8, 2], 3)
    region = Region.make(None, 4)
    value = branch(net, region, 2, 2)
    method = getattr(constants._Search, where)
    calls = []

    def stop(*args: object) -> object:
        calls.append(1)
        if len(calls) == (1 if where == "explore" else 4):
            raise KeyboardInterrupt
        return method(*args)

    monkeypatch.setattr(constants._Search, where, stop)
    found = branch(net, region, 2, 2)
    assert not found.complete and found.lower <= value.upper and value.lower <= found.upper < INF


def test_nodes_closed_by_a_new_lower_bound_still_count_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = random_net([4, 8, 8, 2], 3)
    region = Region.make(None, 4)
    search = constants._Search(net, region, 2.0, 2.0, torch.Generator().manual_seed(0))
    search.begun()
    while len(search.open) < 5:
        search.step()
        search.sift()
    second = max(-entry[0] for entry in search.open.entries[1:])
    monkeypatch.setattr(
        search, "expand", lambda parents: setattr(search, "lower", second * (1 - 1e-10))
    )
    monkeypatch.setattr(search, "batch", 1)
    monkeypatch.setattr(search, "walk", lambda points: None)
    search.step()
    search.sift()
    assert not len(search.open) and search.upper >= second


def test_the_same_seed_gives_the_same_bracket() -> None:
    net = random_net([4, 6, 6, 2], 9)
    region = Region.make((-1.0, 1.0), 4)
    a, b, other = (branch(net, region, 2, INF, seed=seed) for seed in (0, 0, 1))
    assert (a.lower, a.upper, a.nodes) == (b.lower, b.upper, b.nodes)
    assert other.lower == pytest.approx(a.lower, rel=1e-9)


def test_unknown_norms_are_refused() -> None:
    with pytest.raises(InputError, match="choose each from 1, 2 and inf"):
        branch(random_net([2, 2, 1], 0), Region.make(None, 2), 3, 2)


# ---------------------------------------------------------------- its parts


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_reduced_networks_are_the_fixed_ones(slope: float) -> None:
    net = random_net([3, 4, 3, 2], 5, slope)
    g = torch.Generator().manual_seed(1)
    state = torch.randint(-1, 2, (6, net.neurons), generator=g).to(torch.int8)
    reduced = reduce(net, state)
    for i in range(len(state)):
        free = state[i] < 0
        masks = all_masks(int(free.sum()))
        d = masks.double()[:, None, :]
        a = reduced.A[i][free]
        b = reduced.B[i][free][:, free]
        inner = torch.linalg.solve(torch.eye(len(a)) - b * d, a.expand(len(masks), -1, -1))
        ours = reduced.C[i] + (reduced.D[i][:, free] * d) @ inner
        torch.testing.assert_close(ours, net.fix(state[i]).jacobian(masks), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norms", PAIRS)
def test_any_feasible_multipliers_are_sound(norms: tuple[float, float]) -> None:
    net = random_net([3, 4, 4, 2], 11)
    g = torch.Generator().manual_seed(0)
    value = float(operator_norm(net.jacobian(all_masks(8)), *norms).max())
    how, index = split(3, 2, *norms), torch.arange(8)[None]
    reduced = reduce(net, torch.full((1, 8), -1))
    form = forms(reduced, how, index)
    w, t = start(form, net.layer, how)
    assert prove(form, w, t).isfinite().all()
    for _ in range(40):
        trial_w, trial_t = (
            v * torch.exp(0.5 * torch.randn(v.shape, generator=g, dtype=v.dtype)) for v in (w, t)
        )
        assert how.factor * float(prove(form, trial_w, trial_t).max().sqrt()) >= value * (1 - 1e-12)
    bounds = []
    for gap in (1.0, 0.1, 0.01):
        proved, w, t, _ = tighten(form, w, t, torch.zeros(len(w), dtype=torch.float64), 12, gap)
        bounds.append(how.factor * float(proved.max().sqrt()))
        assert bounds[-1] >= value * (1 - 1e-12)
    assert bounds[-1] < 2.2 * value and bounds[-1] <= bounds[0]


def test_multipliers_that_prove_nothing_are_refused() -> None:
    net = random_net([3, 4, 4, 2], 11)
    how = split(3, 2, 2, 2)
    index = torch.arange(8)[None]
    reduced = reduce(net, torch.full((1, 8), -1))
    form = forms(reduced, how, index)
    w, t = start(form, net.layer, how)
    value = float(operator_norm(net.jacobian(all_masks(8)), 2, 2).max())
    low = torch.full_like(w, 0.999 * value**2)
    assert prove(form, low, t).item() == INF
    for share in torch.linspace(0, 1, 20).tolist():  # no multipliers may prove less than the value
        assert prove(form, low, share * t).item() == INF


def test_a_proof_within_rounding_is_refused() -> None:
    none = torch.zeros(1, 0, 1, dtype=torch.float64)
    form = Form(none, none[:, :, :0], torch.tensor([[[3.0]]], dtype=torch.float64), none.mT, False)
    edge = torch.tensor([[9.0 / (1 + INFLATE)]], dtype=torch.float64)
    assert (
        prove(form, edge * (1 + 4 * 2.0**-52), none[..., 0]).item() == INF
    )  # positive by less than S is rounded
    assert 9 <= prove(form, edge * (1 + 1e-13), none[..., 0]).item() <= 9 * (1 + 1e-9)


def test_tighten_reaches_the_semidefinite_optimum() -> None:
    import cvxpy as cp

    net = random_net([3, 5, 4, 2], 12)
    how = split(3, 2, 2, 2)
    index = torch.arange(9)[None]
    reduced = reduce(net, torch.full((1, 9), -1))
    form = forms(reduced, how, index)
    w, t = start(form, net.layer, how)
    for gap in (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4):
        proved, w, t, _ = tighten(form, w, t, torch.zeros(1, dtype=torch.float64), 10, gap)
    a, b, c, d = (
        v.numpy() for v in (net.A, net.B, net.C, net.D)
    )  # LipSDP-Neuron as published, not transposed
    rho = cp.Variable()
    multipliers = cp.Variable(9, nonneg=True)
    cross = cp.diag(multipliers) @ np.c_[a, b - np.eye(9)]
    lift = np.r_[np.zeros((3, 9)), np.eye(9)]
    out = np.c_[c, d]
    corner = np.diag(np.r_[np.ones(3), np.zeros(9)])
    matrix = rho * corner - out.T @ out - lift @ cross - (lift @ cross).T
    problem = cp.Problem(cp.Minimize(rho), [matrix >> 0])
    problem.solve(solver=cp.CLARABEL)
    assert float(proved) == pytest.approx(problem.value, rel=1e-4)
    assert float(proved) >= problem.value * (1 - 1e-6)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("norms", PAIRS)
def test_forms_are_parts_of_the_jacobian(norms: tuple[float, float], exact: bool) -> None:
    net = random_net([4, 3, 3, 2], 14)
    mask = torch.tensor([True, False, True, True, True, False])
    how = split(4, 2, *norms, exact=exact)
    form = forms(
        reduce(net, torch.full((1, 6), -1)), how, torch.tensor([[0, 1, 2, 3, 4, 5, -1]])
    )  # one neuron is padding
    d = torch.cat([mask, torch.ones(1)]).double()
    ours = form.C + (form.D * d) @ torch.linalg.solve(torch.eye(7) - form.B * d, form.A)
    jacobian = net.jacobian(mask[None])[0]
    parts = {
        "whole": jacobian[None],
        "rows": jacobian[:, None, :],
        "columns": jacobian.T[..., None],
        "entries": jacobian.T.reshape(-1, 1, 1),
        "signs": torch.stack([jacobian[:1] + jacobian[1:], jacobian[:1] - jacobian[1:]]),
    }[how.part]
    torch.testing.assert_close(ours, parts.mT if how.kind.endswith(".T") else parts)
    if exact and norms != (
        INF,
        2,
    ):  # the largest member is the norm; its dual norms are sums of one row or column
        lengths = operator_norm(parts, *norms)
        assert float(lengths.max()) == pytest.approx(
            float(operator_norm(jacobian, *norms)), rel=1e-12
        )


def test_certificates_of_emptiness() -> None:
    g = torch.Generator().manual_seed(6)
    region = Region.make(None, 3)
    counts = {True: 0, False: 0}
    for seed in range(60):
        net = random_net([3, 6, 2], seed)
        state = torch.randint(0, 2, (1, 6), generator=g).to(torch.int8)
        polytope = polytope_module.polytope_of(
            reduce(net, state), 0, state[0].numpy(), region, 1.0, None
        )
        assert polytope is not None
        y, empty = polytope_module.feasible(polytope)
        margin = widest(net.A.numpy(), net.c.numpy(), state[0].numpy() == 1, region)
        assert empty == (margin < 0) and (y is None) == empty
        assert polytope_module.widest_point(polytope)[1] == empty
        if y is not None:
            assert (net.mask(torch.from_numpy(y)[None]) == (state == 1)).all()
        counts[empty] += 1
    assert min(counts.values()) > 5


def test_points_on_a_wall_or_outside_are_no_witness() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    net = Piecewise(
        one, 0 * one, zero, one, -one, zero, zero, torch.zeros(1, dtype=torch.int64)
    )  # x - relu(x): flat for x > 0
    search = constants._Search(
        net, Region.make((0.0, 1.0), 1), 2.0, 2.0, torch.Generator().manual_seed(0)
    )
    assert search.visit(torch.tensor([[0.0], [-0.5]]).double()) == [None, None]
    assert search.lower == 0 and search.witness is None
    found = branch(net, Region.make((0.0, 1.0), 1), 2, 2)
    assert found.upper < 1e-14 and found.witness is not None and 0 < float(found.witness) <= 1


def test_linear_bounds_hold_and_beat_intervals() -> None:
    net = random_net([4, 6, 6, 6, 2], 13)
    region = Region.make((-0.3, 0.3), 4)
    state = torch.full((1, 18), -1, dtype=torch.int8)
    reduced = reduce(net, state)
    low, high = paths.preactivations(reduced, net, region)
    v = net.preactivations(region.sample(4000, torch.Generator().manual_seed(0)))
    assert (v >= low).all() and (v <= high).all()
    deep = slice(12, 18)
    intervals = (net.B[deep, 6:12].abs() @ (high[0, 6:12].clamp(min=0))).sum()
    assert (high - low)[0, deep].sum() < intervals


# ---------------------------------------------------------------- published tables (ANCHORS A and
# B)


def stored(folder: Path, name: str) -> Piecewise:
    arrays = np.load(folder / "lipschitz" / f"{name}.npz")
    return Piecewise.from_layers(
        [
            (torch.tensor(arrays[f"W{i}"]), torch.tensor(arrays[f"b{i}"]))
            for i in range(len(arrays) // 2)
        ]
    )


TABLE_A = {
    "lipbab_iris_4-5-5-3": (1.0, 6.771454513402937, 5.958048912394726, 12.605085581416922),
    "lipbab_sd_10-15-10-3": (0.1, 9.530716922306004, 10.41286850374477, 16.274810805318676),
    "lipbab_sd_10-20-15-10-3": (0.1, 40.05651016370293, 48.04897158493324, 72.28569774866806),
    "lipbab_sd_10-30-30-30-3": (0.1, 19.462799793264388, 19.369311332018757, 39.11036425646691),
}


@pytest.mark.slow_cases("lipbab_sd_10-30-30-30-3")
@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize("name", TABLE_A)
def test_table_a(name: str) -> None:
    net = stored(ZOO, name)
    high, *values = TABLE_A[name]
    for norm, value in zip((2.0, 1.0, INF), values):
        found = branch(net, Region.make((0.0, high), net.inputs), norm, norm)
        assert found.complete
        assert found.lower == pytest.approx(value, rel=1e-9) and found.upper == pytest.approx(
            value, rel=1e-9
        )


TABLE_B = [
    ("exlipbab_iris_4-6-6-3", 11.634355134114875, 48),
    ("exlipbab_wine_11-12-12-1", 1.7433699967107172, 2850),
    ("exlipbab_abalone_9-16-16-1", 11.121602332235268, 801),
    pytest.param("exlipbab_bike_13-20-16-8-3", 10802.403812748018, 763_290, marks=pytest.mark.slow),
    pytest.param(
        "exlipbab_wine_11-24-24-1", 1.99834589741825, 670_175, marks=pytest.mark.slow
    ),  # ours: open before
]


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize(("name", "value", "nodes"), TABLE_B)
def test_table_b(name: str, value: float, nodes: int) -> None:
    net = stored(ZOO, name)
    found = branch(net, Region.make(None, net.inputs), 2, 2)
    assert found.complete and found.nodes < nodes
    assert found.lower == pytest.approx(value, rel=1e-9) and found.upper == pytest.approx(
        value, rel=1e-9
    )


@pytest.mark.usefixtures("zoo")
def test_root_bound_is_lipsdp() -> None:
    net = stored(ZOO, "exlipbab_wine_11-12-12-1")
    root = branch(net, Region.make(None, 11), 2, 2, nodes=1)
    assert 1.846912 <= root.upper <= 1.846913 * 1.001


def test_a_bound_that_is_no_number_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an overflow: what else is known counts."""
    net = random_net([2, 8, 2], 3)
    region = Region.make((-1.0, 1.0), 2)
    assert not branch(net, region, 2.0, INF, nodes=1).complete
    monkeypatch.setattr(
        constants, "path_entries", lambda part, _: torch.full_like(part.C, math.nan)
    )
    assert not branch(net, region, 2.0, INF, nodes=1).complete
