import itertools
import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support import values
from support.drawn import drawn, flips
from support.graphs import NORMS, PAIRS, crowd, layers, mlp, network, where
from support.networks import jacobian, one_sentence, seeded
from wassail.certificates.exact.cells import enumerate_cells
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Region, Where
from wassail.certificates.lipschitz import ladder
from wassail.certificates.lipschitz.ladder import Ladder, lipschitz, propagated
from wassail.certificates.lipschitz.semidefinite import segmented, semidefinite
from wassail.certificates.lipschitz.steepest import jacobian_norms, jacobians, margin_rows
from wassail.certificates.relax.norms import product
from wassail.certificates.relax.ranges import bounds_on
from wassail.errors import InputError
from wassail.geometry import operator_norm
from wassail.threat import dual

METHODS = ["product", "propagate", "sdp", "exact"]
inf = math.inf


def brute(graph: Graph, domain: Where, r: float, q: float) -> float:
    """The constant by the cells of a small network, one by one."""
    net = graph.piecewise()
    cells = enumerate_cells(net, Region.make(domain, graph.inputs))
    assert cells.complete
    return float(operator_norm(net.jacobian(cells.masks), r, q).max())


def margins(graph: Graph, labels: list[int] | None = None) -> Graph:
    return graph.head(margin_rows(graph.outputs, labels))


@pytest.mark.parametrize("r", NORMS)
@pytest.mark.parametrize("method", [*METHODS, "auto"])
def test_a_linear_model_is_exact_by_every_method(method: str, r: float) -> None:
    weight = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [3.0, 0.0]], dtype=torch.float64)
    graph = layers(weight.tolist())
    truth = max(
        float(torch.linalg.vector_norm(weight[j] - weight[k], dual(r)))
        for j in range(3)
        for k in range(j)
    )
    bound = lipschitz(graph, r, method=method)
    assert bound.exact and bound.upper == pytest.approx(truth, rel=1e-11)
    for q in NORMS:
        bound = lipschitz(graph, r, outputs="logits", norm_out=q, method=method)
        assert bound.exact and bound.upper == pytest.approx(
            float(operator_norm(weight, r, q)), rel=1e-11
        )


def test_the_absolute_value_and_its_box() -> None:
    graph = layers(
        [[1.0], [-3.0]], [[1.0, 1.0], [0.0, 0.0]]
    )  # relu x + relu(-3 x): slopes 1 and -3
    assert lipschitz(graph, 2).upper == pytest.approx(3.0, rel=1e-8)
    right = lipschitz(graph, 2, (0.5, 1.0))
    assert (
        right.exact
        and right.upper == pytest.approx(1.0, rel=1e-11)
        and right.info["undecided"] == 0
    )
    assert lipschitz(graph, 2, (-1.0, 1.0), method="exact").exact


@pytest.mark.few(4)
@pytest.mark.slow_cases("sizes3-0.2-2.0-*")
@pytest.mark.parametrize("kind", ["R^n", "box", "l2 in a box"])
@pytest.mark.parametrize(
    ("sizes", "slope", "r"),
    [
        ([2, 6, 3], 0.0, 1.0),
        ([2, 5, 4, 2], 0.0, 2.0),
        ([2, 5, 4, 2], 0.0, inf),
        ([3, 4, 4, 3], 0.2, 2.0),
    ],
)
def test_every_rung_is_above_the_truth_and_below_the_rung_before(
    sizes: list[int], slope: float, kind: str, r: float
) -> None:
    graph = mlp(sizes, sum(sizes), slope)
    domain = where(kind, sizes[0])
    truth = brute(margins(graph), domain, r, inf)
    before = inf
    for method in METHODS:
        bound = lipschitz(graph, r, domain, method=method)
        assert bound.lower <= truth * (1 + 1e-12) and truth <= bound.upper * (1 + 1e-12)
        assert bound.upper <= before
        before = bound.upper
        assert (
            bound.info["norm"] == r
            and bound.info["norm_out"] == inf
            and bound.info["outputs"] == "margins"
        )
        assert method == "product" or bound.info["undecided"] <= graph.neurons
    assert bound.exact and bound.upper == pytest.approx(truth, rel=1e-8)
    assert lipschitz(graph, r, domain).upper == pytest.approx(
        truth, rel=1e-8
    )  # auto closes small brackets


@pytest.mark.slow_cases("1.0-1.0", "1.0-inf", "inf-1.0", "inf-inf")
@pytest.mark.parametrize(("r", "q"), PAIRS)
def test_logits_in_all_pairs_of_norms(r: float, q: float) -> None:
    graph = mlp([2, 5, 4, 3], 9)
    truth = brute(graph, (0.0, 1.0), r, q)
    before = inf
    for method in METHODS:
        bound = lipschitz(graph, r, (0.0, 1.0), outputs="logits", norm_out=q, method=method)
        assert (
            bound.lower <= truth * (1 + 1e-12)
            and truth <= bound.upper * (1 + 1e-12)
            and bound.upper <= before
        )
        before = bound.upper
    assert bound.upper == pytest.approx(truth, rel=1e-8)
    assert bound.info["norm_out"] == q
    if q == r:
        assert (
            lipschitz(graph, r, (0.0, 1.0), outputs="logits", method="exact").upper == bound.upper
        )


@pytest.mark.parametrize("shape", [(30, 3), (3, 30)])
def test_norms_that_are_hard_on_large_matrices_have_brackets_too(shape: tuple[int, int]) -> None:
    graph = mlp([shape[0], 8, shape[1]], 1)
    x = torch.randn(50, shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u = torch.randn(
        500, shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).sign()
    for r, q in [(inf, 2.0), (2.0, 1.0), (inf, 1.0)]:
        bound = lipschitz(graph, r, (-3.0, 3.0), outputs="logits", norm_out=q, method="propagate")
        moved = (
            jacobian(graph.logits, x) @ (u / torch.linalg.vector_norm(u, r, dim=1, keepdim=True)).T
        )
        assert (
            0 < bound.lower <= bound.upper
            and float(torch.linalg.vector_norm(moved, q, dim=1).max()) <= bound.upper
        )


def test_labels() -> None:
    graph = mlp([2, 6, 4], 3)
    truth = {pair: brute(graph.head(rows[None]), None, 2, inf) for pair, rows in pairs(4).items()}
    for labels in ([0], [1, 3], [2, 2], range(4), torch.tensor([3])):
        wanted = {int(k) for k in labels}
        most = max(value for pair, value in truth.items() if wanted & set(pair))
        assert lipschitz(graph, 2, labels=labels, method="exact").upper == pytest.approx(
            most, rel=1e-8
        )
    assert margin_rows(4, None).shape == (6, 4) and margin_rows(4, [0]).shape == (3, 4)


def pairs(classes: int) -> dict[tuple[int, int], Tensor]:
    eye = torch.eye(classes, dtype=torch.float64)
    return {(j, k): eye[j] - eye[k] for j, k in itertools.combinations(range(classes), 2)}


@pytest.mark.slow_cases("*-1.0", "*-inf")
@pytest.mark.parametrize("r", NORMS)
@pytest.mark.parametrize("kind", ["R^n", "box", "l1"])
def test_the_lower_side_is_the_jacobian_at_the_witness(kind: str, r: float) -> None:
    for name, method in [("blocks", "exact"), ("mlp", "auto"), ("convolutions", "propagate")]:
        graph = network(name)
        domain = where(kind, graph.inputs)
        bound = lipschitz(graph, r, domain, method=method)
        assert bound.witness is not None and bound.witness.shape == (graph.inputs,)
        assert Region.make(domain, graph.inputs).contains(bound.witness[None], 1e-12).all()
        there = float(jacobian_norms(jacobians(margins(graph), bound.witness[None]), r, inf))
        assert bound.lower <= there <= bound.lower * (1 + 1e-9)


def same(a: Any, b: Any) -> bool:
    keep = [key for key in a.info if key != "seconds"]
    return (a.lower, a.upper, a.method) == (b.lower, b.upper, b.method) and all(
        a.info[k] == b.info[k] for k in keep
    )


def test_the_same_answer_twice() -> None:
    model = seeded(
        nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    ).train()
    for method in [*METHODS, "auto"]:
        given = model if method == "auto" else mlp([3, 6, 5, 3], 8)
        first, again = (lipschitz(given, inf, (0, 1), method=method, seed=4) for _ in range(2))
        assert same(first, again)
        assert (
            first.witness is not None
            and again.witness is not None
            and torch.equal(first.witness, again.witness)
        )
        assert first.info["seed"] == 4 and first.info["domain"] == "box [0, 1]"
    assert model.training


def test_little_time_and_few_nodes_leave_a_bracket() -> None:
    graph = mlp([6, 24, 24, 4], 5)
    x = torch.randn(500, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    most = float(jacobian_norms(jacobians(margins(graph), x), 2, inf).max())
    for method in METHODS:
        bound = lipschitz(graph, 2, method=method, time_limit=1e-3, nodes=1)
        assert 0 < bound.lower <= bound.upper and most <= bound.upper < inf and not bound.exact


@pytest.mark.parametrize(
    ("rung", "method"),
    [("jacobian_norms", "auto"), ("bounds_on", "auto"), ("segmented", "sdp"), ("branch", "exact")],
)
def test_an_interrupt_returns_the_bracket_so_far(
    rung: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    graph = mlp([3, 6, 5, 3], 6)
    truth = brute(margins(graph), None, 2, inf)
    monkeypatch.setattr(ladder, rung, interrupted)
    bound = lipschitz(graph, 2, method=method)
    assert bound.info["interrupted"] is True
    assert bound.lower <= truth <= bound.upper < inf
    monkeypatch.undo()
    assert "interrupted" not in lipschitz(graph, 2, method="product").info


def test_a_bound_below_a_jacobian_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "product", lambda *_: 1e-3)
    with pytest.raises(AssertionError, match="report this bug"):
        lipschitz(mlp([3, 6, 3], 6), 2)


def test_progress_is_reported() -> None:
    shares: list[float] = []
    lipschitz(mlp([4, 12, 12, 3], 2), 2, method="exact", progress=shares.append)
    assert shares and all(0 <= share <= 1 + 1e-12 for share in shares)


def test_shapes_are_found_where_they_are_told() -> None:
    image = seeded(nn.Sequential(nn.Conv2d(1, 2, 2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(8, 2)))
    flat = seeded(nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.LeakyReLU(), nn.Linear(4, 2)))
    x = torch.rand(1, 3, 3, generator=torch.Generator().manual_seed(0))
    for model, domain, shape in [
        (image, None, (1, 3, 3)),
        (image, ws.Ball(x, 0.1), None),
        (image, (torch.zeros(1, 3, 3), torch.ones(1, 3, 3)), None),
        (image, (0, torch.ones(1, 3, 3)), None),
        (flat, None, None),
        (flat, (0, 1), (1, 3, 3)),
    ]:
        bound = ws.lipschitz(model, 2, domain, shape=shape)
        assert 0 < bound.lower <= bound.upper
    with pytest.raises(InputError, match="shape") as error:
        lipschitz(image, 2)
    one_sentence(str(error.value))


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"norm": 3}, "norm 3"),
        ({"method": "exat"}, "did you mean 'exact'"),
        ({"outputs": "margin"}, "did you mean 'margins'"),
        ({"norm_out": 2}, "norm_out"),
        ({"outputs": "logits", "norm_out": 4}, "norm 4"),
        ({"labels": [3]}, "0..2"),
        ({"labels": []}, "0..2"),
        ({"labels": 1}, "labels 1"),
        ({"labels": ["a"]}, "labels"),
        ({"domain": (1, 0)}, "empty"),
        ({"domain": 0.5}, "not a box"),
        ({"domain": ws.Ball(torch.zeros(2), 1)}, "2"),
        ({"time_limit": "soon"}, "time_limit"),
        ({"time_limit": math.nan}, "time_limit"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(options: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError, match=part) as error:
        lipschitz(mlp([3, 4, 3], 0), **{"norm": 2, **options})
    one_sentence(
        str(error.value)
        .replace("0..2", "0-2")
        .replace("did you mean 'exact'? ", "")
        .replace("did you mean 'margins'? ", "")
    )


def test_one_output_has_no_margins() -> None:
    graph = mlp([2, 3, 1], 0)
    with pytest.raises(InputError, match="two classes"):
        lipschitz(graph, 2)
    assert lipschitz(graph, 2, outputs="logits").exact


@pytest.mark.slow_cases("0.01")
@pytest.mark.parametrize("patience", [0.01, pytest.param(inf, marks=pytest.mark.slow)])
def test_no_jacobian_of_300_random_networks_beats_a_bound(patience: float) -> None:
    for seed in range(300):
        g = torch.Generator().manual_seed(seed)
        depth, r, q, slope = (
            int(torch.randint(*span, (), generator=g)) for span in ((1, 4), (0, 3), (0, 3), (0, 3))
        )
        sizes = [int(v) for v in torch.randint(1, 7, (depth + 2,), generator=g)]
        graph = mlp(sizes, seed, slope=0.15 * slope)
        kind = ["box", "R^n", "l1", "l2 in a box", "linf"][seed % 5]
        region = Region.make(where(kind, sizes[0]), sizes[0])
        check_network(graph, region, NORMS[r], NORMS[q], patience)


def check_network(graph: Graph, region: Region, r: float, q: float, patience: float) -> None:
    """No Jacobian at many points is longer than any of the upper bounds."""
    found = float(jacobian_norms(jacobians(graph, crowd(region, 200)), r, q).max()) * (1 - 1e-12)
    sharp = bounds_on(graph, region)
    uppers = {
        "product": product(graph, r, q),
        "intervals": propagated(values.intervals(graph, region), r, q, tighten=False),
        "propagate": propagated(sharp, r, q),
        "sdp": semidefinite(graph.piecewise(sharp.states()), r, q, patience),
    }
    if patience == inf:
        uppers["sdp in pieces"] = segmented(sharp, r, q, most=3)
        bound = Ladder(graph, region, r, q).climb("sdp")
        assert (
            bound.lower <= bound.upper <= min(uppers["product"], uppers["propagate"]) * (1 + 1e-9)
        )
        uppers["ladder"] = bound.upper
    for name, upper in uppers.items():
        assert found <= upper, f"{name}: {found} above {upper}"


@pytest.mark.slow
def test_a_real_network_on_a_small_ball(zoo: ModuleType) -> None:
    model, dataset = zoo.load("mnist_mlp_6_100")
    x, _ = zoo.images(dataset, 1)
    ball = ws.Ball(x[0], 0.1, 2, (0, 1))
    bounds = [
        ws.lipschitz(model, 2, ball, method=method, time_limit=20)
        for method in ("product", "propagate", "sdp")
    ]
    assert 0 < bounds[2].lower <= bounds[2].upper < bounds[1].upper < bounds[0].upper
    assert len({bound.lower for bound in bounds}) == 1 and bounds[2].upper < 10 * bounds[2].lower
    assert bounds[2].witness is not None
    point = bounds[2].witness.reshape(1, 1, 28, 28)
    slopes = jacobian(model.double(), point)[0]
    steepest = max(float((slopes[j] - slopes[k]).norm()) for j in range(10) for k in range(j))
    assert bounds[2].lower <= steepest * (1 + 1e-9) <= bounds[2].upper


def test_multipliers_start_where_a_matrix_is_singular() -> None:
    """Sorted logits of a drawn network, on which the first multipliers have no inverse."""
    case = drawn(502)
    found = ws.radii(case.model, case.x, case.y, case.norm, case.domain, "auto").values
    assert (found <= flips(case, 502)).all()
    shape = tuple(case.x.shape[1:])
    constant = ws.lipschitz(case.model, 2, case.domain, shape=shape, nodes=20)
    assert 0 < constant.lower <= constant.upper < math.inf
