"""Exact distances against closed forms, hand-made kinks, brute force over cells, mixed-integer
programs, and attacks.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

import wassail as ws
from support.programs import INF, mixed_integer
from wassail import zoo as digits
from wassail.certificates import clock
from wassail.certificates.exact import flip_problem
from wassail.certificates.exact import nearest_flip as nearest_flip_module
from wassail.certificates.exact.cells import enumerate_cells, inequalities
from wassail.certificates.exact.nearest_flip import Distances, nearest_flip
from wassail.certificates.exact.programs import nearest_point
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.relax.ranges import bounds_on
from wassail.errors import InputError
from wassail.geometry import distances
from wassail.testing import LinearClassifier, corpus, samples

NORMS = (1.0, 2.0, INF)


def network(*layers: tuple[Tensor, Tensor], slope: float = 0.0) -> Graph:
    """A (leaky) ReLU network from its `(W, b)`, as a graph."""
    nodes = [Node((), (layers[0][0].shape[1],), "input")]
    for k, (weight, bias) in enumerate(layers):
        if k > 0:
            nodes.append(
                Node(
                    (len(nodes) - 1,),
                    nodes[-1].shape,
                    "relu",
                    Relu(torch.full((1,), slope, dtype=torch.float64)),
                )
            )
        nodes.append(
            Node(
                (len(nodes) - 1,),
                (len(bias),),
                "linear",
                Affine(Matrix(weight.double()), bias.double()),
            )
        )
    return Graph(tuple(nodes))


def perceptron(*sizes: int, seed: int = 0, slope: float = 0.0) -> Graph:
    """A random one with weights and biases of order one."""
    g = torch.Generator().manual_seed(seed)
    return network(
        *(
            (
                (2 / a) ** 0.5 * torch.randn(b, a, dtype=torch.float64, generator=g),
                torch.randn(b, dtype=torch.float64, generator=g) / 2,
            )
            for a, b in itertools.pairwise(sizes)
        ),
        slope=slope,
    )


def points(count: int, n: int, seed: int = 0) -> Tensor:
    return torch.rand(count, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def program(rows: np.ndarray, limits: np.ndarray, centre: np.ndarray, norm: float) -> float:
    """The distance of the centre to `{x : rows x <= limits}`, by a program of its own; inf if
    that is empty.
    """
    n = len(centre)
    if norm == 2:
        at = nearest_point(rows, limits, centre)
        return INF if at is None else float(np.linalg.norm(at - centre))
    right = limits - rows @ centre
    ball = np.ones(n) if norm == INF else np.eye(n)
    sizes = 1 if norm == INF else n
    ball = ball.reshape(n, sizes)
    table = np.block(
        [[rows, np.zeros((len(rows), sizes))], [np.eye(n), -ball], [-np.eye(n), -ball]]
    )
    cost = np.concatenate([np.zeros(n), np.ones(sizes)])
    answer = linprog(
        cost,
        A_ub=table,
        b_ub=np.concatenate([right, np.zeros(2 * n)]),
        bounds=[(None, None)] * (n + sizes),
    )
    return float(answer.fun) if answer.status == 0 else INF


def pieces(
    net: Piecewise, domain: tuple[float, float] | None
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Every cell in the box, as rows and limits, with the affine piece there; R^n ends at 20."""
    n = net.inputs
    box = domain if domain is not None else (-20.0, 20.0)
    walls = np.vstack([np.eye(n), -np.eye(n)])
    ends = np.concatenate([np.full(n, box[1]), np.full(n, -box[0])])
    found = []
    for mask in enumerate_cells(net, Region.make(box, n)).masks:
        rows, limits = (part.numpy() for part in inequalities(net, mask))
        _, _, jacobian, shift = (part[0].numpy() for part in net.affine(mask[None]))
        found.append((np.vstack([rows, walls]), np.concatenate([limits, ends]), jacobian, shift))
    return found


def brute_force(
    cells: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    x: Tensor,
    y: int,
    norm: float,
) -> float:
    """The nearest flip of every cell: a projection onto the part of it where a rival is at
    least as large.
    """
    centre = x.flatten().numpy()
    best = INF
    for rows, limits, jacobian, shift in cells:
        for j in set(range(len(shift))) - {y}:
            table = np.vstack([rows, jacobian[y] - jacobian[j]])
            ends = np.append(limits, shift[j] - shift[y])
            away = program(table, ends, centre, 2.0)
            if norm != 2 and away / (1 if norm == 1 else math.sqrt(len(centre))) < best * (
                1 + 1e-9
            ):
                away = program(
                    table, ends, centre, norm
                )  # no need to where the 2-norm already says that it is farther
                best = min(best, away)
            elif norm == 2:
                best = min(best, away)
    return best


def check(
    found: Distances,
    graph: Graph,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: tuple[float, float] | None,
) -> None:
    """What holds for every answer: the order of the sides, and points that flip, in the box, at
    the distance claimed.
    """
    assert (found.lower <= found.upper).all()
    some = torch.isfinite(found.upper)
    logits = graph.logits(found.points[some])
    own = logits.gather(1, y[some, None])[:, 0]
    rivals = logits.scatter(1, y[some, None], -INF).amax(1)
    assert (rivals >= own).all()
    assert torch.equal(distances(found.points[some], x[some], norm), found.upper[some])
    if domain is not None:
        assert ((found.points >= domain[0]) & (found.points <= domain[1])).all()
    right = graph.logits(x).gather(1, y[:, None])[:, 0] > graph.logits(x).scatter(
        1, y[:, None], -INF
    ).amax(1)
    assert (found.lower[right] < found.upper[right])[
        some[right]
    ].all()  # the closed ball: just below


def solve(
    graph: Graph, x: Tensor, y: Tensor, norm: float, domain: tuple[float, float] | None
) -> Distances:
    found = nearest_flip(graph, x, y, norm, domain)
    check(found, graph, x, y, norm, domain)
    return found


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [(0.0, 1.0), None])
def test_linear_classifiers(norm: float, domain: tuple[float, float] | None) -> None:
    for classes in (2, 5):
        model = LinearClassifier.random(classes, 12, seed=classes)
        x, y = samples(6, (12,), classes, seed=classes)
        y = torch.where(torch.arange(6) % 4 > 0, model(x).argmax(1), y)
        truth = model.distances(x, y, norm, domain)
        found = solve(network((model.weight.detach(), model.bias.detach())), x, y, norm, domain)
        assert found.exact.all()
        torch.testing.assert_close(found.upper, truth, rtol=2e-9, atol=0)
        assert (found.lower <= truth).all()


def kinked(kind: str) -> Graph:
    """theta = (0, f(x)) on R: a tent with its top at x = 1, above 0, at 0 (a tie at one point)
    or below.
    """
    top = {"tent": 0.5, "spike": 0.0, "low": -0.5}[kind]
    first = (
        torch.tensor([[1.0], [-1.0]]),
        torch.tensor([-1.0, 1.0]),
    )  # relu(x - 1) + relu(1 - x) = |x - 1|
    return network(first, (torch.tensor([[0.0, 0.0], [-1.0, -1.0]]), torch.tensor([0.0, top])))


@pytest.mark.parametrize("norm", NORMS)
def test_one_dimension(norm: float) -> None:
    x = torch.tensor([[0.0], [0.5], [0.6], [3.0]]).double()
    y = torch.zeros(4, dtype=torch.int64)
    found = nearest_flip(kinked("tent"), x, y, norm, None)  # |x - 1| <= 0.5
    assert found.upper.tolist() == pytest.approx([0.5, 0.0, 0.0, 1.5], rel=1e-9)
    assert found.exact.all() and (found.lower[[0, 3]] < torch.tensor([0.5, 1.5])).all()
    low = nearest_flip(kinked("low"), x, y, norm, (0.0, 3.0))
    assert (low.lower == INF).all() and (low.upper == INF).all() and low.exact.all()
    far = nearest_flip(
        kinked("low"), x, y, norm, None
    )  # nowhere on R: proved as far as it was looked
    assert (far.upper == INF).all() and (far.lower > 1e5).all()


def test_a_tie_at_one_point() -> None:
    graph = kinked("spike")
    x = torch.tensor([[0.25], [3.0]]).double()
    y = torch.zeros(2, dtype=torch.int64)
    for norm in NORMS:
        found = nearest_flip(graph, x, y, norm, (0.0, 3.0))
        assert (found.lower < torch.tensor([0.75, 2.0])).all()
        torch.testing.assert_close(
            found.lower, torch.tensor([0.75, 2.0]).double(), rtol=2e-9, atol=0
        )


@pytest.mark.parametrize("norm", NORMS)
def test_a_tie_on_an_open_set(norm: float) -> None:
    # theta = (relu(1 - x_0), 0): from x_0 = 1 on the logits are equal, and nowhere is the first
    # below the second.
    net = network(
        (torch.tensor([[-1.0, 0.0]]), torch.ones(1)), (torch.tensor([[1.0], [0.0]]), torch.zeros(2))
    )
    x = torch.tensor([[0.25, 0.5], [0.5, 0.0]]).double()
    y = torch.zeros(2, dtype=torch.int64)
    for domain in ((0.0, 2.0), (0.0, 1.0), None):
        found = solve(net, x, y, norm, domain)
        assert found.exact.all() and found.upper.tolist() == pytest.approx([0.75, 0.5], rel=1e-9)


def test_the_wall_between_sample_and_flip() -> None:
    # theta_1 - theta_0 = x_0 + 2 x_1 - 2.2: the near corner is past the wall, so both coordinates
    # have to move.
    model = network(
        (torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.tensor([0.0, -2.2], dtype=torch.float64))
    )
    x = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]).double()
    y = torch.zeros(3, dtype=torch.int64)
    for norm, truth in (
        (1.0, [0.2, 1.2, 0.6]),
        (2.0, [0.2, math.hypot(0.44, 0.88), 0.6]),
        (INF, [0.2, 2.2 / 3, 0.6]),
    ):
        assert solve(model, x, y, norm, (0.0, 1.0)).upper.tolist() == pytest.approx(truth, rel=1e-9)
    wide = solve(model, x[:1], y[:1], 2.0, None)
    assert float(wide.upper[0]) == pytest.approx(0.2 / math.sqrt(5), rel=1e-9)


def test_the_farthest_corner_is_reached_and_not_passed() -> None:
    y = torch.zeros(1, dtype=torch.int64)
    x = torch.zeros(1, 2).double()
    for shift, reachable in ((-2.0, True), (-2.0 - 1e-9, False)):
        model = network(
            (
                torch.tensor([[0.0, 0.0], [1.0, 1.0]]),
                torch.tensor([0.0, shift], dtype=torch.float64),
            )
        )
        for norm, corner in ((1.0, 2.0), (2.0, math.sqrt(2)), (INF, 1.0)):
            found = solve(model, x, y, norm, (0.0, 1.0))
            if reachable:
                assert float(found.lower) <= corner and float(found.upper) == pytest.approx(
                    corner, rel=1e-12
                )
            else:
                assert float(found.lower) == INF and bool(found.exact)


def test_a_flip_that_is_not_found_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_flip_module.Search, "offer", lambda *_: None)
    y = torch.zeros(1, dtype=torch.int64)
    x = torch.zeros(1, 2).double()
    model = network(
        (torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([0.0, -2.0]))
    )  # the far corner ties
    for norm, corner in ((1.0, 2.0), (2.0, math.sqrt(2)), (INF, 1.0)):
        found = nearest_flip(model, x, y, norm, (0.0, 1.0))
        assert (
            corner * (1 - 1e-9) < float(found.lower) < corner
            and float(found.upper) == INF
            and not bool(found.exact)
        )


def test_wrong_and_tied_samples_and_one_class() -> None:
    model = perceptron(2, 4, 3)
    x = points(4, 2)
    wrong = (model.logits(x).argmax(1) + 1) % 3
    found = solve(model, x, wrong, 2.0, (0.0, 1.0))
    assert (
        (found.lower == 0).all()
        and (found.upper == 0).all()
        and found.exact.all()
        and torch.equal(found.points, x)
    )
    assert (
        solve(
            network((torch.zeros(2, 2), torch.zeros(2))),
            x,
            torch.zeros(4, dtype=torch.int64),
            INF,
            None,
        ).upper
        == 0
    ).all()
    alone = nearest_flip(perceptron(2, 3, 1), x, torch.zeros(4, dtype=torch.int64), 1.0, None)
    assert (alone.lower == INF).all() and alone.exact.all()
    none = nearest_flip(model, x[:0], wrong[:0], 2.0, None)
    assert len(none.lower) == len(none.points) == len(none.exact) == 0


# ---------------------------------------------------------------- brute force


@pytest.mark.few(4)
@pytest.mark.parametrize("sizes", [(2, 8, 3), (3, 6, 6, 3), (4, 10, 3)])
@pytest.mark.parametrize("norm", NORMS)
def test_brute_force_over_cells(sizes: tuple[int, ...], norm: float) -> None:
    model = perceptron(*sizes, seed=sum(sizes))
    x = points(3, sizes[0], seed=3)
    y = model.logits(x).argmax(1)
    for domain in ((0.0, 1.0), None) if sizes[0] == 2 else ((0.0, 1.0),):
        found = solve(model, x, y, norm, domain)
        cells = pieces(model.piecewise(), domain)
        truth = torch.tensor(
            [brute_force(cells, x[i], int(y[i]), norm) for i in range(len(x))], dtype=torch.float64
        )
        assert found.exact.all()
        torch.testing.assert_close(found.upper, truth, rtol=3e-9, atol=1e-12)
        assert (found.lower <= truth * (1 + 1e-12)).all()


@pytest.mark.parametrize("norm", [1.0, INF])
def test_mixed_integer_programs(norm: float) -> None:
    for seed, sizes in enumerate([(4, 10, 3), (3, 6, 6, 3)]):
        model = perceptron(*sizes, seed=40 + seed)
        x = points(3, sizes[0], seed=seed)
        y = model.logits(x).argmax(1)
        found = solve(model, x, y, norm, (0.0, 1.0))
        net = model.piecewise()
        truth = [mixed_integer(net, x[i], int(y[i]), norm) for i in range(len(x))]
        assert found.exact.all() and found.upper.tolist() == pytest.approx(truth, rel=2e-6)


@pytest.mark.slow_cases("deep")
@pytest.mark.parametrize("name", ["leaky", "residual", "deep", "conv", "pool", "dead"])
def test_the_corpus(name: str) -> None:
    """Leaky, residual, convolutional, pooled and dead networks: against brute force over cells,
    which are few here.
    """
    net, samples_, _ = corpus()[name]
    model = read(net, samples_.shape[1:])
    cells = pieces(model.piecewise(), (0.0, 1.0))
    for norm, x in zip(NORMS, samples_):
        y = model.logits(x[None]).argmax(1)
        found = solve(model, x[None], y, norm, (0.0, 1.0))
        assert found.exact.all()
        assert float(found.upper) == pytest.approx(brute_force(cells, x, int(y), norm), rel=3e-9)


# ---------------------------------------------------------------- what a bracket promises


def test_any_multipliers_prove_only_what_is_true() -> None:
    """Random alpha and beta on random nodes: no point of the node nearer than the bound flips."""
    model = perceptron(3, 6, 5, 3, seed=11)
    graph = model
    x = points(1, 3, seed=5)[0]
    y = int(model.logits(x[None]).argmax())
    generator = torch.Generator().manual_seed(2)
    cloud = torch.rand(40_000, 3, dtype=torch.float64, generator=generator)
    logits = graph.logits(cloud)
    rivals = [j for j in range(3) if j != y]
    for norm in NORMS:
        away = torch.linalg.vector_norm(cloud - x, norm, dim=1)
        radius = 0.6
        net = flip_problem.Relaxed(graph, x, y, radius, norm, (0.0, 1.0))
        inside = away <= radius
        states = {
            i: (v[inside] > 0).reshape(int(inside.sum()), -1)
            for i, v in _inputs(graph, cloud).items()
        }
        active = torch.cat(list(states.values()), 1)
        free = torch.cat(
            [
                (s < 0).flatten()
                for s in bounds_on(graph, Region.make(Ball(x, radius, norm, (0.0, 1.0)), 3))
                .states()
                .values()
            ]
        )
        active = active[:, free]
        for _ in range(30):
            roots = net.roots()
            shape = roots.side.shape
            side = torch.randint(-1, 2, shape, generator=generator)
            side = torch.where(roots.side < 0, side, roots.side)
            alpha = torch.rand(shape, dtype=torch.float64, generator=generator)
            beta = torch.rand(shape, dtype=torch.float64, generator=generator) * (side >= 0)
            nodes = net.tighten(replace(roots, side=side, alpha=alpha, beta=beta))
            for k in range(len(nodes)):
                bound = float(net.reach(net.line(nodes.take(torch.tensor([k]))))[0])
                member = ((nodes.side[k] < 0) | (nodes.side[k] == active)).all(1)
                flips = logits[inside][:, rivals[int(nodes.rival[k])]] >= logits[inside][:, y]
                assert not (member & flips & (away[inside] < bound)).any()
            dropped = set(range(len(roots))) - set(nodes.rival.tolist())
            for j in dropped:
                assert not ((side[j] < 0) | (side[j] == active)).all(1).any()


@pytest.mark.parametrize("norm", NORMS)
def test_programs_have_no_gap(norm: float) -> None:
    """Strong duality: what the multipliers prove is the distance of the nearest point of the
    relaxed node.
    """
    plain = read(digits.load("digits-mlp-adv").double(), (1, 8, 8))
    x = digits.data()[0][8].double()
    for slope in (0.0, 0.2):
        own = torch.full((1,), slope, dtype=torch.float64)
        graph = Graph(
            tuple(
                replace(node, op=Relu(own)) if isinstance(node.op, Relu) else node
                for node in plain.nodes
            )
        )
        logits = graph.logits(x[None])[0]
        y = int(logits.argmax())
        upper = float(
            nearest_flip(graph, x[None], torch.tensor([y]), norm, (0.0, 1.0), time_limit=0.0).upper
        )
        net = flip_problem.Relaxed(graph, x, y, upper, norm, (0.0, 1.0))
        checked = 0
        nodes = net.roots()
        margin = logits[y] - logits[[j for j in range(10) if j != y]]
        forced = torch.where(
            torch.arange(len(net.c)) % 5 == 0, 1, nodes.side
        )  # some sides, for beta
        nodes = nodes.join(replace(nodes, side=forced))
        for i in range(len(nodes)):
            node = nodes.take(torch.tensor([i]))
            answer = flip_problem.solve_program(net, node, margin, 0.0, upper)
            assert answer is not None
            better = replace(node, alpha=answer.alpha[None], beta=answer.beta[None])
            proved = float(
                net.reach(net.line(better, torch.full((1, 1), answer.weight, dtype=torch.float64)))[
                    0
                ]
            )
            away = float(torch.linalg.vector_norm(answer.point - x.flatten(), norm))
            if 0 < away < upper:
                assert proved == pytest.approx(away, rel=1e-7)
                checked += int((node.side < 0).sum()) > 5
        assert checked


def _inputs(graph: Graph, x: Tensor) -> dict[int, Tensor]:
    values = graph.values(x)
    return {i: values[graph.nodes[i].inputs[0]] for i in graph.relus}


def test_a_time_limit_returns_an_honest_bracket(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron(
        6, 20, 20, 4, seed=2
    )  # the first bounds on the whole ball prove nothing here
    graph = model
    x = points(2, 6, seed=8)
    y = model.logits(x).argmax(1)
    ticks = itertools.count()  # a clock that goes on by one second whenever somebody looks at it
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    for norm in NORMS:
        begun = next(ticks)
        full = nearest_flip(graph, x, y, norm, (0.0, 1.0), time_limit=1e9)
        cut = nearest_flip(graph, x, y, norm, (0.0, 1.0), time_limit=0.4 * (next(ticks) - begun))
        assert cut.cut and not full.cut
        none = nearest_flip(graph, x, y, norm, (0.0, 1.0), time_limit=0.0)
        assert none.cut and not none.lower.any()
        check(cut, graph, x, y, norm, (0.0, 1.0))
        # Each look at this clock costs a second, so that smaller balls may get none: what is proved
        # is a bracket, not its size.
        assert full.exact.all() and not cut.exact.any()
        assert (cut.lower <= full.upper).all() and (full.lower <= cut.upper).all()
        assert (cut.nodes < full.nodes).any()


def test_hints_help_and_cannot_lie() -> None:
    model = perceptron(3, 8, 8, 3, seed=7)
    graph = model
    x = points(2, 3, seed=2)
    y = model.logits(x).argmax(1)
    plain = nearest_flip(graph, x, y, 2.0, (0.0, 1.0))
    for factor in (0.3, 1.4):  # too near is not believed, too far does no harm
        hinted = nearest_flip(
            graph, x, y, 2.0, (0.0, 1.0), upper=factor * plain.upper, lower=0.5 * plain.lower
        )
        assert hinted.exact.all()
        torch.testing.assert_close(hinted.upper, plain.upper, rtol=3e-9, atol=0)
    with pytest.raises(InputError, match="check it"):
        nearest_flip(graph, x, y, 2.0, (0.0, 1.0), lower=100 * plain.upper)


def test_a_fixed_budget_is_decided_without_the_distance() -> None:
    model = perceptron(6, 20, 20, 4, seed=1)
    x = points(2, 6, seed=8)
    y = model.logits(x).argmax(1)
    for norm in NORMS:
        full = nearest_flip(model, x, y, norm, (0.0, 1.0))
        assert torch.isfinite(full.upper).all()
        near, far = (
            nearest_flip(model, x, y, norm, (0.0, 1.0), within=f * float(full.upper.min()))
            for f in (0.9, 1.1)
        )
        first = int(full.upper.argmin())
        least = float(full.upper.min())
        assert (near.lower >= 0.9 * least).all() and float(
            near.lower[first]
        ) < 0.91 * least  # proved, and no farther
        assert float(far.upper[first]) <= 1.1 * least and not bool(
            far.exact[first]
        )  # refuted, and that is enough


def test_errors() -> None:
    graph = perceptron(2, 4, 3)
    x = points(2, 2)
    y = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="labels: give one for each"):
        nearest_flip(graph, x, y[:1], 2.0, None)
    with pytest.raises(InputError, match="outside the domain"):
        nearest_flip(graph, x + 2, y, 2.0, (0.0, 1.0))
    with pytest.raises(InputError, match="real samples"):
        nearest_flip(graph, x * math.nan, y, 2.0, None)
    with pytest.raises(InputError, match="labels go from 0 to 2"):
        nearest_flip(graph, x, y + 3, 2.0, None)
    smooth = Graph(
        (
            *graph.nodes[:2],
            Node((1,), (4,), "gelu", Smooth("gelu")),
            replace(graph.nodes[3], inputs=(2,)),
        )
    )
    with pytest.raises(InputError, match="not piecewise linear"):
        nearest_flip(smooth, x, y, 2.0, None)


# ---------------------------------------------------------------- the built-in digits


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["digits-mlp", "digits-mlp-adv"])
@pytest.mark.parametrize("norm", NORMS)
def test_digits_close_and_no_attack_is_nearer(name: str, norm: float) -> None:
    model = digits.load(name).double()
    x, y = digits.data()
    x = x[8:10].double()
    y = y[8:10]
    found = solve(read(model, (1, 8, 8)), x, y, norm, (0.0, 1.0))
    assert found.exact.all()
    attack = ws.nearest(model, x, y, norm, (0.0, 1.0))
    assert (attack.distances > found.lower).logical_or(attack.distances == 0).all()
    assert (attack.distances < 1.2 * found.upper + 1e-12).all()
