import itertools
import math
from functools import cache

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.graphs import PAIRS, layers, mlp, network, where
from support.networks import Net, seeded
from wassail.certificates.exact.multipliers import forms, prove, reduce, split, start
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.matrix_norms import matrix_norm
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.lipschitz import semidefinite as module
from wassail.certificates.lipschitz.semidefinite import segmented, semidefinite
from wassail.certificates.relax.norms import product
from wassail.certificates.relax.ranges import Bounds, bounds_on
from wassail.geometry import operator_norm

ABOUT = 5e-3  # the iteration stops within one per cent of the best squared bound
NETWORKS = ["mlp", "leaky", "blocks"]


def everywhere(name: str) -> Piecewise:
    return network(name).piecewise()


def steepest(net: Piecewise, r: float, s: float) -> float:
    """The largest norm among the Jacobians of many points."""
    g = torch.Generator().manual_seed(0)
    x = torch.cat(
        [
            scale * torch.randn(700, net.inputs, dtype=torch.float64, generator=g)
            for scale in (0.3, 1.0, 30.0)
        ]
    )
    return float(operator_norm(net.jacobian(net.mask(x)), r, s).max())


def lipsdp(net: Piecewise, spread: bool) -> float:
    """LipSDP-Neuron written down for a solver: `|J|_{2 -> 2}`, or `|J|_{inf -> 2}` with one
    weight for each input.
    """
    n = net.inputs
    h = net.neurons
    a, b, c, d = (v.numpy() for v in (net.A, net.B, net.C, net.D))
    w = cvxpy.Variable(n) if spread else cvxpy.Variable() * np.ones(n)
    t = cvxpy.Variable(h)
    cross = -cvxpy.diag(t) @ a - d.T @ c
    inner = cvxpy.diag(2 * t) - cvxpy.diag(t) @ b - (cvxpy.diag(t) @ b).T - d.T @ d
    s = cvxpy.bmat([[cvxpy.diag(w) - c.T @ c, cross.T], [cross, inner]])
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum(w) if spread else w[0]), [s >> 0])
    problem.solve(solver=cvxpy.CLARABEL)
    return math.sqrt(problem.value)


@pytest.mark.parametrize(("a", "w"), [(2.0, [3.0, -4.0]), (-0.5, [1.0, 0.0])])
def test_one_neuron_in_closed_form(a: float, w: list[float]) -> None:
    net = layers([w], [[a]]).piecewise()
    size = torch.tensor(w).abs()
    # S >= 0 with t = a^2: rho = a^2 |w|^2.
    assert semidefinite(net, 2, 2) == pytest.approx(abs(a) * float(size.norm()), rel=ABOUT)
    assert semidefinite(net, math.inf, 2) == pytest.approx(abs(a) * float(size.sum()), rel=ABOUT)
    assert semidefinite(net, 1, math.inf) == pytest.approx(abs(a) * float(size.max()), rel=ABOUT)


def test_without_neurons_it_is_the_norm_of_the_matrix() -> None:
    net = layers([[1.0, -2.0], [0.5, 3.0]]).piecewise()
    for r, s in PAIRS:
        assert semidefinite(net, r, s) == matrix_norm(net.C, r, s)


@pytest.mark.few(15)
@pytest.mark.parametrize(("r", "s"), PAIRS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_start_is_feasible_and_the_bound_above_the_jacobians_of_many_points(
    name: str, r: float, s: float
) -> None:
    net = everywhere(name)
    how = split(net.inputs, net.outputs, r, s)
    form = forms(
        reduce(net, torch.full((1, net.neurons), -1)), how, torch.arange(net.neurons)[None]
    )
    w, t = start(form, net.layer, how)
    assert w.shape == (how.members, how.weights) and t.shape == (how.members, net.neurons)
    assert torch.linalg.eigvalsh(form.matrix(w, t)).min() > 0
    first = prove(form, w, t)
    assert torch.isfinite(first).all()
    bound = semidefinite(net, r, s)
    assert steepest(net, r, s) <= bound <= how.factor * math.sqrt(float(first.max())) * (1 + 1e-12)


@pytest.mark.parametrize("name", ["mlp", "leaky"])
def test_it_is_below_the_product_of_the_layers(name: str) -> None:
    graph = network(name)
    assert semidefinite(graph.piecewise(), 2, 2) <= product(graph, 2, 2)


@pytest.mark.parametrize(("norm", "spread"), [(2.0, False), (math.inf, True)])
def test_it_agrees_with_a_semidefinite_solver(norm: float, spread: bool) -> None:
    for graph in (mlp([4, 7, 6, 3], 0), network("blocks")):
        net = graph.piecewise()
        truth = lipsdp(net, spread)
        assert truth * (1 - 1e-5) <= semidefinite(net, norm, 2) <= 1.01 * truth


def test_a_row_is_bounded_by_itself() -> None:
    net = everywhere("mlp")
    rows = [semidefinite(net.head(row[None]), 2, 2) for row in torch.eye(3)]
    assert semidefinite(net, 2, math.inf) == pytest.approx(max(rows), rel=0.02)


def test_no_time_at_all_and_too_many_neurons(monkeypatch: pytest.MonkeyPatch) -> None:
    net = everywhere("mlp")
    assert (
        steepest(net, 2, 2)
        <= semidefinite(net, 2, 2)
        <= semidefinite(net, 2, 2, time_limit=0.0)
        < math.inf
    )
    monkeypatch.setattr(module, "NEWTON_UP_TO_NEURONS", net.neurons - 1)
    assert semidefinite(net, 2, 2) == math.inf


def test_neurons_without_effect() -> None:
    for weights in (
        [[[1.0, 2.0], [0.0, 0.0]], [[1.0, 1.0]]],
        [[[1.0, 2.0], [3.0, 1.0]], [[1.0, 0.0]]],
    ):
        assert semidefinite(layers(*weights).piecewise(), 2, 2) == pytest.approx(
            math.sqrt(5), rel=ABOUT
        )
    assert semidefinite(layers([[1.0, 2.0]], [[0.0]]).piecewise(), 2, 2) < 1e-4


def largest_jacobian(bounds: Bounds, r: float, s: float) -> float:
    net = bounds.graph.piecewise()
    graph = bounds.graph
    x = bounds.region.sample(1500, torch.Generator().manual_seed(2))
    slopes = net.jacobian(net.mask(x))
    if r == 1 or s == math.inf or r == s == 2 or graph.inputs < 14:
        return float(operator_norm(slopes, r, s).max())
    u: Tensor = torch.randn(
        200, graph.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).sign()
    u = u / torch.linalg.vector_norm(u, r, dim=1, keepdim=True)
    return float(torch.linalg.vector_norm(slopes @ u.T, s, dim=1).max())


@cache
def stacked() -> Graph:
    """Residual blocks one after the other: a cut can stand between them, not inside."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        h = (h + m.b(h.mul(0.5).abs())).relu()
        return m.d((h + m.c(h).relu()).relu())

    return read(
        seeded(
            Net(
                forward, a=nn.Linear(4, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 5), d=nn.Linear(5, 3)
            ),
            6,
        ),
        (4,),
    )


@pytest.mark.few(7)
@pytest.mark.parametrize("most", [0, 1000])
@pytest.mark.parametrize("name", ["convolutions", "mlp", "blocks", "deep", "stacked"])
def test_cut_into_pieces_it_stays_above_the_jacobians(name: str, most: int) -> None:
    graph = stacked() if name == "stacked" else network(name)
    bounds = bounds_on(graph, Region.make(where("box", graph.inputs), graph.inputs))
    pieces = module._pieces(graph, bounds.states(), most)
    covers(graph, pieces)
    if most == 1000 or name == "blocks":  # its last layer looks at the input: nothing to cut
        assert len(pieces) == 1
    elif most == 0:
        assert len(pieces) > 1
    for r, s in [(2.0, 2.0), (math.inf, math.inf), (1.0, 2.0)]:
        assert largest_jacobian(bounds, r, s) <= segmented(bounds, r, s, most=most)


def covers(graph: Graph, pieces: list[tuple[int, int]]) -> None:
    """Pieces follow each other, cut at ReLUs, from the input to the logits."""
    assert pieces[0][0] == 0 and pieces[-1][1] == len(graph.nodes) - 1
    for (_, last), (cut, _) in itertools.pairwise(pieces):
        assert graph.nodes[cut].slope is not None and graph.nodes[cut].inputs == (last,)


def test_one_piece_is_the_whole_and_more_are_worse() -> None:
    graph = network("mlp")
    bounds = bounds_on(graph, Region.make(where("box", graph.inputs), graph.inputs))
    whole = segmented(bounds, 2, 2)
    assert whole == pytest.approx(semidefinite(graph.piecewise(bounds.states()), 2, 2), rel=1e-3)
    assert whole <= segmented(bounds, 2, 2, most=8) * (1 + 1e-3)
    assert segmented(bounds, 2, 2, most=0) <= product(graph, 2, 2) * (1 + 1e-9)


def test_neurons_that_are_never_active_are_dropped_at_a_cut() -> None:
    graph = layers(
        [[1.0], [1.0]], [[1.0, 1.0]], bias=[[5.0, -5.0], [0.0]]
    )  # on [-1, 1] one is on, the other off
    bounds = bounds_on(graph, Region.make((-1.0, 1.0), 1))
    assert segmented(bounds, 2, 2) == pytest.approx(1.0, rel=1e-9)
    assert module._pieces(graph, bounds.states(), -1) == [(0, 1), (2, 3)]
    assert segmented(bounds, 2, 2, most=-1) == pytest.approx(
        math.sqrt(2), rel=1e-9
    )  # |(1, 1)| times |(1, 0)|
