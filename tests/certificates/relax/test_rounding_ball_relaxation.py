"""Ball and box together: every part pays for its own rounding, in every rounding mode."""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, fractions, rounded, serial
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Call, Concat, Execution, Matrix, Scale, Sum
from wassail.certificates.graph.matrix_norms import matrix_norm
from wassail.certificates.graph.reader import read
from wassail.certificates.relax import ball_margins as margins_of
from wassail.certificates.relax import ball_quadratic_terms, norms
from wassail.certificates.relax.ball_quadratic_terms import LayerBalls
from wassail.certificates.relax.ball_relaxation import BallLayer, BallRelaxation
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.executed import arithmetic_of, call_error, gamma
from wassail.certificates.relax.lines import Lines
from wassail.certificates.relax.norms import Reach, length_above, map_norm

INF = math.inf
DOUBLE = torch.float64
ONE = torch.zeros(1).long()


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def start(n: int) -> Node:
    return Node((), (n,), "the input")


def relu(n: int, slope: float) -> Node:
    return Node((0,), (n,), "", Relu(torch.tensor(slope, dtype=DOUBLE)))


def forward(graph: Graph, x: Tensor, radius: float, norm: float = INF) -> Reach:
    balls = Balls.make(x, torch.full((len(x),), radius, dtype=DOUBLE), norm, None)
    return Reach(graph, balls).run()


def square(values: list[Fraction]) -> Fraction:
    return sum((v * v for v in values), Fraction(0))


@pytest.mark.parametrize("mode", MODES)
def test_lengths(mode: str) -> None:
    values = 1 + uniform(2, 300, seed=1)
    with rounded(mode):
        found = length_above(values)
        box = forward(Graph((start(5),)), torch.zeros(1, 5, dtype=DOUBLE), 1 / 3)
    for row, size in zip(fractions(values), found.tolist()):
        assert Fraction(size) ** 2 >= square(row)
    assert Fraction(float(box.radius[0])) ** 2 >= 5 * Fraction(1 / 3) ** 2


@pytest.mark.parametrize("mode", MODES)
def test_activations_at_a_point_and_around_0(mode: str) -> None:
    """A product with the slope is rounded: at the sample, and where the sample is 0."""
    slope = 1.7
    graph = Graph((start(1), relu(1, slope)))
    for k in range(30):
        x = -uniform(1, 1, seed=k)
        size = float(uniform(1, seed=k + 50))
        with rounded(mode):
            point = forward(graph, x, 0.0)
            around = forward(graph, torch.zeros_like(x), size)
        off = abs(Fraction(float(x)) * Fraction(slope) - Fraction(float(point.centre[1])))
        assert Fraction(float(point.most[1])) >= off and Fraction(float(point.radius[1])) >= off
        far = Fraction(float(around.most[0])) * Fraction(slope)
        assert Fraction(float(around.most[1])) >= far
        assert Fraction(float(around.radius[1])) >= Fraction(float(around.radius[0])) * Fraction(
            slope
        )


@pytest.mark.parametrize("mode", MODES)
def test_lengths_of_errors_after_an_activation(mode: str) -> None:
    """Those before it times the steepest slope."""
    slope = 1.7
    node = relu(1, slope)
    assert isinstance(node.op, Relu)
    for k in range(30):
        given = object.__new__(Reach)
        given.graph = Graph((start(1), node))
        given.centre = {0: torch.zeros(1, 1, dtype=DOUBLE)}
        given.lost = {}
        length = 1 + uniform(1, seed=k)
        given.off = {0: length}
        given.radius = {0: length}
        given.most = {0: length[:, None]}
        with rounded(mode):
            given._activation(1, node.op)
        assert Fraction(float(given.off[1])) >= Fraction(float(length)) * Fraction(slope)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("off", [0.0, 1e-7])
def test_affine_maps_at_a_point(off: float, mode: str) -> None:
    """off: by how much the weights and biases may be wrong, here all of them one way."""
    weight = uniform(8, 20, seed=2)
    bias = uniform(8, seed=3)
    x = uniform(1, 20, seed=4)
    graph = Graph((start(20), Node((0,), (8,), "", Affine(Matrix(weight), bias))))
    graph = replace(graph, rounding=off)
    with rounded(mode):
        found = forward(graph, x, 0.0)
    more = 1 + Fraction(off)
    rows = zip(fractions(weight), fractions(bias))
    values = [
        (sum(a * b for a, b in zip(row, fractions(x)[0])) + shift) * more for row, shift in rows
    ]
    centre = fractions(found.centre[1])[0]
    apart = [v - c for v, c in zip(values, centre)]
    assert all(Fraction(m) >= abs(v) for m, v in zip(found.most[1][0].tolist(), apart))
    assert Fraction(float(found.radius[1])) ** 2 >= square(apart)


@pytest.mark.parametrize("mode", MODES)
def test_ranges_are_as_wide_as_they_say(mode: str) -> None:
    weight = uniform(50, 3, seed=5) - 0.5
    graph = Graph((start(3), Node((0,), (50,), "", Affine(Matrix(weight)))))
    with rounded(mode):
        found = forward(graph, 1 + uniform(1, 3, seed=6), 0.01)
    low, high = found.ranges[1]
    parts = (found.centre[1], found.most[1], low, high)
    for centre, most, bottom, top in zip(*(fractions(v)[0] for v in parts)):
        assert bottom <= centre - most and top >= centre + most


@pytest.mark.parametrize("mode", MODES)
def test_what_is_executed_without_rounding_is_still_rounded_in_the_graph(mode: str) -> None:
    """A clamp is exact; the graph computes `c - relu(c - x)`."""
    model = nn.Sequential(nn.Hardtanh(-1 / 3, 1e9), nn.Linear(30, 2)).double().eval()
    graph = arithmetic_of(read(model, (30,)), "executed")
    x = uniform(1, 30, seed=8) * 1e-3
    with rounded(mode):
        found = forward(graph, x, 0.0)
    node = graph.nodes[1]
    assert isinstance(node.op, Affine) and node.bias is not None
    sign = 1 if float(node.op.map.forward(torch.ones(1, 30, dtype=DOUBLE))[0, 0]) > 0 else -1
    bias = fractions(node.bias.expand(30))
    for k in range(30):
        exact = sign * Fraction(float(x[0, k])) + bias[k]
        off = abs(exact - Fraction(float(found.centre[1][0, k])))
        assert Fraction(float(found.most[1][0, k])) >= off


def test_executed_errors_of_a_ball_have_a_length() -> None:
    """Whatever deviation of the ball: the errors at its magnitudes are no longer. The direction of
    the largest gain of the magnitudes of the weights attains it.
    """
    torch.manual_seed(0)
    layer = nn.Linear(300, 40)
    graph = arithmetic_of(
        read(nn.Sequential(layer, nn.ReLU(), nn.Linear(40, 2)), (300,)), "executed"
    )
    x = uniform(1, 300, seed=20)
    found = forward(graph, x, 0.7, 2.0)
    node = graph.nodes[1]
    top = torch.linalg.svd(layer.weight.detach().double().abs()).Vh[0].abs()
    ways = [top, *(uniform(300, seed=k) for k in range(5)), torch.eye(300, dtype=DOUBLE)[0]]
    longest = 0.0
    for way in ways:
        moved = x.abs() + 0.7 * way / way.norm()  # nothing here is negative: it is a point, too
        at = [(moved, moved)]
        error = call_error(node, [moved], torch.float32, [graph.nodes[0]], at)
        longest = max(longest, float(error.norm()))
    lost = float(found.lost[1])
    assert longest <= lost <= 1.4 * longest
    far = x.abs() + found.most[0]
    assert lost < 0.5 * float(call_error(node, [far], torch.float32, [graph.nodes[0]]).norm())


@pytest.mark.parametrize("mode", MODES)
def test_executed_errors_of_a_ball_entry_by_entry(mode: str) -> None:
    """Those at the sample, and what a deviation of known length adds: the length of a row times its
    own. Short balls, where that is below the last digit, and rows of a million entries.
    """
    units = torch.randint(2**26, 2**27, (1, 2**20), generator=torch.Generator().manual_seed(21))
    wide = units.double() * 2.0**-26
    narrow = uniform(3, 300, seed=22) - 0.5
    for weight, size, radius in ((wide, 0.0, 0.5), (narrow, 1.0, 1e-16), (narrow, 0.0, 0.5)):
        n = weight.shape[1]
        call = Call(Matrix(weight), None, n + 2)
        node = Node((0,), (len(weight),), "", Affine(Matrix(weight)), calls=(call,))
        graph = Graph((start(n), node), arithmetic="executed", execution=Execution(torch.float32))
        x = torch.full((1, n), size, dtype=DOUBLE)
        with rounded(mode):
            found = forward(graph, x, radius, 2.0).executed[1]
            here = call_error(node, [x], torch.float32, [graph.nodes[0]], [(x, x)])
        rate = Fraction(gamma(n + 2, torch.float32)) * Fraction(radius)
        for k, row in enumerate(weight):
            if n > 300:  # fractions take too long
                exact = Fraction(sum(int(v * 2**26) ** 2 for v in row.tolist()), 2**52)
            else:
                exact = square(fractions(row))
            more = Fraction(float(found[0, k])) - Fraction(float(here[0, k]))
            assert more > 0 and more**2 >= rate**2 * exact
    with rounded(mode):  # where a sum may overflow nothing is known
        far = forward(graph, x + 1e38, 1.0, 2.0)
    assert far.executed[1].isinf().all() and far.lost[1].isinf().all()


@pytest.mark.parametrize("mode", MODES)
def test_errors_before_the_last_matrix_and_its_own_are_those_of_the_margins(mode: str) -> None:
    """The length of a difference of two rows times that before it, and both errors; each of them
    alone, and logits that are no matrix.
    """
    n = 2**20
    units = torch.randint(2**26, 2**27, (1, n), generator=torch.Generator().manual_seed(23))
    row = units.double() * 2.0**-26
    weight = torch.cat([row, 0 * row])
    off = 1 + uniform(1, seed=24)
    error = 1 + uniform(1, 2, seed=25)
    y = torch.tensor([0])
    graph = Graph((start(n), Node((0,), (2,), "", Affine(Matrix(weight)))))
    plain = Graph((start(2),))
    nothing = Balls.make(torch.zeros(1, n), torch.zeros(1), INF, None)

    def found(off: Tensor, error: Tensor, graph: Graph = graph) -> Fraction:
        with rounded(mode):
            reach = Reach(graph, nothing)
            reach.executed[1] = error
            reach.off[0] = off
            return Fraction(float(reach.margin_errors(y)[0, 1]))

    long = Fraction(sum(v * v for v in units[0].tolist()), 2**52)
    before = Fraction(float(off))
    own = sum(fractions(error)[0])
    assert found(off, 0 * error) ** 2 >= long * before**2
    assert found(0 * off, error) >= own
    assert (found(off, error) - own) ** 2 >= long * before**2
    assert found(off, error, plain) ** 2 >= 2 * before**2
    assert float(found(off, error)) < 1.001 * (float(long) ** 0.5 * float(off) + float(own))


@pytest.mark.parametrize("mode", MODES)
def test_radii_after_a_map(mode: str) -> None:
    """Given those before it: joined, added, and times a norm."""
    matrix = Matrix(uniform(4, 3, seed=9))
    for k in range(20):
        a, b = (1 + uniform(1, seed=k + 100 * j) for j in (1, 2))
        nodes = (
            start(3),
            start(3),
            Node((0,), (4,), "", Affine(matrix)),
            Node((0, 1), (6,), "", Affine(Concat(0, (3, 3)))),
            Node((0, 1), (3,), "", Affine(Sum(2))),
            Node((2,), (4,), "", Affine(matrix)),
        )
        balls = SimpleNamespace(norm=1, radius=a)
        given = object.__new__(Reach)
        given.graph = Graph(nodes)
        given.radius = {0: a, 1: b, 2: b}
        given.balls = balls  # type: ignore[assignment]

        def found(i: int, given: Reach = given) -> Fraction:
            op = given.graph.nodes[i].op
            assert isinstance(op, Affine)
            return Fraction(float(given._stretched(i, op)))

        with rounded(mode):
            columns = found(2)
            joined = found(3)
            added = found(4)
            stretched = found(5)
        one, two = Fraction(float(a)), Fraction(float(b))
        assert joined**2 >= one**2 + two**2 and added >= one + two
        assert columns >= one * Fraction(matrix_norm(matrix.weight, 1.0, 2.0))
        assert stretched >= two * Fraction(map_norm(matrix, 2.0, (4,), (4,)))


def test_radii_that_are_joined_may_be_small() -> None:
    """The squares of 1e-200 underflow."""
    small = torch.full((1,), 1e-200, dtype=DOUBLE)
    graph = Graph((start(3), start(3), Node((0, 1), (6,), "", Affine(Concat(0, (3, 3))))))
    given = object.__new__(Reach)
    given.graph = graph
    op = graph.nodes[2].op
    assert isinstance(op, Affine)
    found = given._by_norms(2, op, {0: small, 1: small})
    assert float(found) >= 1.4e-200


@pytest.mark.parametrize("mode", MODES)
def test_what_only_sorts_moves_as_far_as_what_it_sorts(mode: str) -> None:
    """And by four times what rounding moves the nodes between them by."""
    for k in range(20):
        base = 1 + uniform(1, seed=k)
        lost = [1e-9 * uniform(1, seed=k + 50 * j) for j in (1, 2)]
        given = SimpleNamespace(
            sorted={3: SimpleNamespace(base=0, between=(1, 2))},
            lost={1: lost[0], 2: lost[1]},
            radius={0: base, 3: base + INF},
            off={0: base, 3: base + INF},
        )
        with rounded(mode):
            Reach._contracted(given, 3)  # type: ignore[arg-type]
        exact = Fraction(float(base)) + 4 * sum(Fraction(float(v)) for v in lost)
        assert Fraction(float(given.radius[3])) >= exact
        assert Fraction(float(given.off[3])) >= exact


def layer(n: int, error: float) -> BallLayer:
    """Neurons at 0 with spans of both signs."""
    zero = torch.zeros(1, n, dtype=DOUBLE)
    high = 1 + uniform(1, n, seed=10)
    return BallLayer(
        Lines(zero, zero, zero, zero),
        zero == 0,
        zero,
        zero,
        -high,
        high,
        torch.tensor(0.0, dtype=DOUBLE),
        torch.full_like(zero, error),
        torch.full((1,), 1 / 3, dtype=DOUBLE),
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_pays_for_the_ball_and_for_the_error_of_its_input(mode: str) -> None:
    half = torch.full((1, 1), 0.5, dtype=DOUBLE)
    log_lam = torch.tensor([1 / 3], dtype=DOUBLE)
    for error in (0.0, 1e-6):
        part = layer(1, error)
        with rounded(mode):
            lam = float(log_lam.exp())
            none = part.pull(0 * half, half, half, log_lam, 1e-14)[1]
            g, total = part.pull(2 * half, half, half, log_lam, 1e-14)
        ball = Fraction(lam) / 2 * Fraction(1 / 3) ** 2
        assert Fraction(float(none)) >= ball
        assert g == 0.5
        # The maximum of `relu(t) - t / 2 - lam t^2 / 2`.
        t = min(Fraction(0.5) / Fraction(lam), Fraction(float(part.high)))
        best = t / 2 - Fraction(lam) * t * t / 2
        assert Fraction(float(total)) >= ball + best + Fraction(0.5) * Fraction(error)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_pays_for_the_product_of_its_ball(mode: str) -> None:
    """Half of a multiplier times the square of the length, where no neuron counts."""
    part = layer(1, 0.0)
    zero = torch.zeros(1, 1, dtype=DOUBLE)
    for k in range(20):
        log_lam = uniform(1, seed=k + 30)
        with rounded(mode):
            lam = float(log_lam.exp())
            found = part.pull(zero, zero, zero, log_lam, 0.0)[1]
        assert Fraction(float(found)) >= Fraction(lam) / 2 * Fraction(1 / 3) ** 2


def crossing(n: int) -> Graph:
    """Neurons at 0, added up."""
    nodes = (start(n), Node((0,), (n,), "", Affine(Scale(1 + uniform(n, seed=11)))))
    last = Node((2,), (1,), "", Affine(Matrix(torch.ones(1, n, dtype=DOUBLE))))
    return Graph((*nodes, replace(relu(n, 0.0), inputs=(1,)), last))


@pytest.mark.parametrize("mode", MODES)
def test_layers_pay_for_long_sums(mode: str) -> None:
    """A thousand maxima, each of them half of the width, added up one after the other."""
    n = 1000
    graph = crossing(n)
    balls = Balls.make(torch.zeros(1, n, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE), INF, None)
    sweep = Sweep(graph, balls).run()
    found = BallRelaxation(sweep)
    layers = found._layers(sweep.exact, 3, ONE, {})
    assert torch.equal(layers[2].error, sweep.bends[2].error) and layers[2].error.all()
    half = torch.full((1, n), 0.5, dtype=DOUBLE)
    slopes = {2: (half, half, torch.full((1,), -200.0, dtype=DOUBLE))}
    rows = torch.ones(1, n, dtype=DOUBLE)
    with rounded(mode), serial():
        constant, _, lam = found._substitute(sweep.exact, 2, rows, ONE, layers, slopes)
    assert lam is None
    high = sweep.spans[1][1]
    assert Fraction(float(constant)) >= sum(fractions(high)[0]) / 2


@pytest.mark.parametrize("mode", MODES)
def test_margins_pay_for_their_own_sums(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and what a bound takes from them given: the margin is at least their difference."""
    n = 30
    k = 4
    z = 100 * uniform(n, k, seed=12)
    taken = 100 * uniform(n * (k - 1), seed=13)
    graph = Graph((start(k),))
    balls = SimpleNamespace(norm=2.0, take=lambda rows: None)
    sweep = SimpleNamespace(graph=graph, balls=balls, centre={0: z}, bends={0: 0}, proved=dict)
    settled = SimpleNamespace(bends={}, passes=0.0)  # the second sweep proves nothing more
    settled.run = lambda: settled
    monkeypatch.setattr(margins_of, "BallSweep", lambda *rest: settled)
    monkeypatch.setattr(
        margins_of, "margins", lambda _, own: (torch.full((len(own), k), -INF).double(),)
    )
    bound = SimpleNamespace(bound=lambda *rest: (taken, {}))
    monkeypatch.setattr(margins_of, "BallRelaxation", lambda *rest: bound)
    y = torch.arange(n) % k
    with rounded(mode):
        lower = torch.full((n, k), -INF).double()
        effort = margins_of.BallEffort(depth=0)
        found = margins_of.raised_margins(sweep, {}, y, lower, effort)[0]  # type: ignore[arg-type]
    given = iter(fractions(taken))
    for i in range(n):
        for j in range(k):
            if j != int(y[i]):
                exact = Fraction(float(z[i, int(y[i])])) - Fraction(float(z[i, j])) - next(given)
                assert Fraction(float(found[i, j])) <= exact


def links_of(sizes: int, source: float) -> LayerBalls:
    """Of a chain of maps between two layers of ReLUs, without a sweep; source: how far the first
    one moves.
    """
    given = object.__new__(LayerBalls)
    one = torch.ones(1, dtype=DOUBLE)
    maps = [Node((k + 1,), (1,), "", Affine(Matrix(0.7 * one[:, None]))) for k in range(sizes)]
    last = replace(relu(1, 0.0), inputs=(sizes + 1,))
    given.graph = Graph((start(1), relu(1, 0.0), *maps, last))
    given.sorted = {}
    given.quadratic = {}
    given.first_layer = None
    given.free = {}
    given.radius = {1: one * source, sizes + 2: one * INF}
    return given


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_links_pay_for_their_products(
    size: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`||d||^2 <= square ||d'||^2 + rest` where both are as long as can be, and what rounding adds
    is far smaller than that, or far larger.
    """
    one = torch.ones(1, dtype=DOUBLE)
    for k in range(20):
        norm, radius, lost = (float(v) for v in 1 + uniform(3, seed=k + 40))
        lost = lost * size
        monkeypatch.setattr(
            LayerBalls, "_norm", lambda self, i, norm=norm, lost=lost: (one * norm, one * lost)
        )
        given = links_of(1, radius)
        given.sweep = SimpleNamespace(balls=SimpleNamespace(norm=1))  # type: ignore[assignment]
        first = links_of(1, radius)
        map_, last = first.graph.nodes[2:]
        first.graph = Graph((start(1), replace(map_, inputs=(0,)), replace(last, inputs=(1,))))
        first.radius = {2: one * INF}
        first.free = {2: one > 0}
        sweep = SimpleNamespace(balls=SimpleNamespace(norm=2), inputs=None)
        first.sweep = sweep  # type: ignore[assignment]
        first.reach = SimpleNamespace(radius={0: one * radius})  # type: ignore[assignment]
        monkeypatch.setattr(ball_quadratic_terms, "FirstLayer", lambda *rest: rest)
        with rounded(mode):
            given._join(3)
            first._join(2)
        inner = Fraction(norm) * Fraction(radius)
        whole = inner + Fraction(lost)
        assert Fraction(float(given.radius[3])) >= whole
        assert Fraction(float(first.radius[2])) >= whole
        link = given.quadratic[3]
        square, rest = Fraction(float(link.square)), Fraction(float(link.rest))
        assert square * Fraction(radius) ** 2 + rest >= whole**2
        assert first.first_quadratic is not None
        square, rest = (
            Fraction(float(first.first_quadratic.square)),
            Fraction(float(first.first_quadratic.rest)),
        )
        assert square * inner**2 + rest >= whole**2


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_two_maps(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their product, and what both lose."""
    monkeypatch.setattr(
        ball_quadratic_terms, "restricted_norm", lambda *rest: torch.full((1,), INF).double()
    )
    for k in range(20):
        given = links_of(2, 1.0)
        own, *each = (float(v) for v in 1 + uniform(3, seed=k + 60))
        monkeypatch.setattr(ball_quadratic_terms, "map_norm", lambda *rest, own=own: own)
        lost = {j + 2: torch.full((1,), v, dtype=DOUBLE) for j, v in enumerate(each)}
        given.reach = SimpleNamespace(radius={0: lost[2]}, lost=lost)  # type: ignore[assignment]
        given.free = {4: torch.ones(1, 1) > 0}
        with rounded(mode):
            norm, total = given._norm(4)
        assert Fraction(float(norm)) >= Fraction(own) ** 2
        assert Fraction(float(total)) >= Fraction(own) * Fraction(each[0]) + Fraction(each[1])


def test_norms_of_matrices_whose_squares_underflow() -> None:
    small = torch.full((3, 4), 1e-200, dtype=DOUBLE)
    assert float(ball_quadratic_terms.restricted_norm(small, None, None, 1)) >= 1e-200 * math.sqrt(
        12
    )


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_long_rows(mode: str) -> None:
    """A million entries: their squares are added up."""
    units = torch.randint(2**25, 2**26, (2**10, 2**10), generator=torch.Generator().manual_seed(26))
    square = sum(units.square().sum(1).tolist())
    with rounded(mode):
        found = ball_quadratic_terms.restricted_norm(units.reshape(1, -1).double(), None, None, 1)
    assert Fraction(float(found)) ** 2 >= square


# --- the executed network, cuts and claims -----------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_values_around_a_sample_reach_as_far_as_they_say(mode: str) -> None:
    c = uniform(100, seed=80) / 3
    most = uniform(100, seed=81) / 7
    with rounded(mode):
        (far,) = norms._wider([c.abs()], [most])
        low = c - far
        high = c + far
    for bottom, top, centre, size in zip(*map(fractions, (low, high, c, most))):
        assert bottom <= centre - size and top >= centre + size


def test_executed_errors_of_several_calls() -> None:
    """Those of one call after the other, entry by entry."""
    factor = torch.tensor(0.7, dtype=DOUBLE)
    calls = tuple(Call(Scale(factor), None, 1) for _ in range(2))
    node = Node((0,), (5,), "", Affine(Scale(factor * factor)), calls=calls)
    graph = Graph((start(5), node), arithmetic="executed", execution=Execution(torch.float32))
    x = 1 + uniform(1, 5, seed=82)
    found = forward(graph, x, 0.1, 2.0).executed[1]
    here = call_error(node, [x], torch.float32, [graph.nodes[0]], [(x, x)])
    assert (found >= here).all() and (here > 2.0**-26).all()


def test_executed_errors_know_that_lengths_of_rows_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel may lose n / 2 roundings."""
    n = 2**20
    lost = 1 - (n // 2) * 2.0**-53
    monkeypatch.setattr(Matrix, "row_norms", lambda self, s: self.weight.norm(dim=1) * lost)
    weight = torch.ones(1, n, dtype=DOUBLE)  # of length 2^10
    call = Call(Matrix(weight), None, n + 2)
    node = Node((0,), (1,), "", Affine(Matrix(weight)), calls=(call,))
    graph = Graph((start(n), node), arithmetic="executed", execution=Execution(torch.float32))
    found = forward(graph, torch.zeros(1, n, dtype=DOUBLE), 0.5, 2.0).executed[1]
    rate = Fraction(gamma(n + 2, torch.float32))
    assert Fraction(float(found)) >= rate * Fraction(2**10) / 2


@pytest.mark.parametrize("mode", MODES)
def test_cuts_and_claims_pay_for_their_sums(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left to be paid by radii alone; and a constant that nearly cancels the rest."""
    one = torch.ones(1, dtype=DOUBLE)
    for k in range(20):
        q, radius, apart, upper = (float(v) for v in 1 + uniform(4, seed=k + 90))
        given = object.__new__(BallRelaxation)
        given.reach = SimpleNamespace(radius={1: one * radius})  # type: ignore[assignment]
        handed = SimpleNamespace(square=one, good=one > 0)
        layer = SimpleNamespace(bound=lambda *rest: one * INF)
        given.balls = SimpleNamespace(  # type: ignore[assignment]
            radius={1: one * radius}, first=1, first_quadratic=handed, first_layer=layer
        )
        inputs = SimpleNamespace(upper=lambda a, owner, upper=upper: one * upper)
        given.sweep = SimpleNamespace(exact=None, inputs=inputs)  # type: ignore[assignment]
        exact = Fraction(q) / 2 * Fraction(radius) ** 2
        constant = -float(exact + Fraction(upper)) * (1 + 1e-9 * apart)
        parts: list[Tensor | None] = [one * constant, one, one * q]
        monkeypatch.setattr(BallRelaxation, "_layers", lambda *rest: {})
        monkeypatch.setattr(BallRelaxation, "_substitute", lambda *rest, parts=parts: parts)
        zero = 0 * one[:, None]
        with rounded(mode):
            cuts = (
                given._cut(1, zero, ONE, {1: one * q}, None),
                given._cut(1, zero, ONE, {}, one * q),
            )
            claim = given._claim(1, zero, ONE, {}, {})
            parts[2] = None
            plain = given._claim(1, zero, ONE, {}, {})
        assert all(Fraction(float(v)) >= exact for v in cuts)
        assert Fraction(float(claim)) >= exact + Fraction(upper) + Fraction(constant)
        assert Fraction(float(plain)) >= Fraction(upper) + Fraction(constant)
