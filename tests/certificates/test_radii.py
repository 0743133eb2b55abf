import importlib
import math
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.graphs import layers, mlp
from support.networks import seeded
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix, Pick
from wassail.certificates.graph.reader import read
from wassail.certificates.prove import radius_search
from wassail.certificates.prove.ladder import Ladder
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.products import product_radii
from wassail.certificates.prove.radii import radii
from wassail.certificates.prove.radius_search import RadiusSearch
from wassail.certificates.prove.record import Radii
from wassail.certificates.prove.verify import verify
from wassail.certificates.relax.crown import margin_bounds
from wassail.testing import LinearClassifier, samples
from wassail.threat import Domain
from wassail.transport.flips import Flips

INF = math.inf
NORMS = [1.0, 2.0, INF]
BOX: Domain = (0.0, 1.0)
DOMAINS: list[Domain] = [BOX, None]


@cache
def model(name: str) -> nn.Module:
    return ws.zoo.load(f"digits-{name}").double()


@cache
def digits(name: str, count: int) -> tuple[Graph, Tensor, Tensor]:
    """A built-in network, read once, and the first samples."""
    x, y = ws.zoo.data("digits")
    graph = digits(name, 1)[0] if count > 1 else read(model(name), x.shape[1:], smooth=True)
    return graph, x[:count].double(), y[:count]


@cache
def flips(name: str, count: int, norm: float) -> Flips:
    _, x, y = digits(name, count)
    return ws.nearest(model(name), x, y, norm, passes=400)


@cache
def found(name: str, count: int, norm: float, method: str) -> Radii:
    return radii(*digits(name, count), norm, method=method)


def proved(
    graph: Graph, x: Tensor, y: Tensor, radius: Tensor, norm: float, domain: Domain, steps: int = 0
) -> Tensor:
    lower = margin_bounds(graph, x, y, radius, norm, domain, steps).scatter(1, y[:, None], INF)
    return lower.amin(1) > 0


# Closed forms.


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("norm", NORMS)
def test_linear_classifiers_have_known_distances(norm: float, domain: Domain) -> None:
    for classes, tolerance in ((2, 0.01), (4, 0.01), (4, 1e-4)):
        line = LinearClassifier.random(classes, 12)
        x, y = samples(15, (3, 2, 2), classes)
        y = torch.where(torch.arange(15) % 5 > 0, line(x).argmax(1), y)
        exact = line.distances(x, y, norm, domain)
        start = Node((), (3, 2, 2), "the input")
        flat = Node((0,), (12,), "", Affine(Pick(None, (3, 2, 2), (12,))))
        head = Node((1,), (classes,), "", Affine(Matrix(line.weight.detach()), line.bias.detach()))
        result = radii(Graph((start, flat, head)), x, y, norm, domain, "crown", tolerance=tolerance)
        some = torch.isfinite(exact)
        assert (result.values[some] <= exact[some] * (1 + 1e-12)).all(), (
            "a radius above the distance of a flip"
        )
        assert (result.values[some] >= exact[some] * (1 - 1.1 * tolerance)).all(), (
            "a linear network is bounded exactly"
        )
        assert (result.values[~some] == INF).all()
        wrong = exact == 0
        assert wrong.any() and result.exact[wrong].all() and not result.exact[~wrong & some].any()
        assert (
            result.norm == norm
            and result.domain == domain
            and result.method == "crown"
            and len(result) == 15
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", NORMS)
def test_one_neuron_in_closed_form(norm: float) -> None:
    # theta = (1/2, relu(x1 - 1) + relu(x2 - 1)) at (0.2, 0.2): the nearest tie is at (1.5, 0.2),
    # for r = inf at (1.25, 1.25).
    graph = layers(
        [[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]], bias=[[-1.0, -1.0], [0.5, 0.0]]
    )
    x = torch.full((1, 2), 0.2, dtype=torch.float64)
    y = torch.zeros(1, dtype=torch.int64)
    exact = 1.05 if norm == INF else 1.3
    for domain in (None, (0.0, 5.0)):
        for method in ("crown", "branch", "exact"):
            value = float(radii(graph, x, y, norm, domain, method).values)
            # The margin is flat at the sample, so that its tangent says nothing about where to
            # look.
            assert 0.8 * exact < value < exact, (domain, method, value)
            assert method != "exact" or value > exact * (1 - 1e-6)


def test_misclassified_samples_and_ties_have_radius_zero() -> None:
    graph = layers([[1.0, 0.0], [0.0, 1.0]])
    x = torch.tensor([[0.2, 0.2], [0.2, 0.3], [0.3, 0.2]], dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.int64)
    for method in ("crown", "ball", "branch", "exact", "auto"):
        for norm, distance in ((1.0, 0.1), (2.0, 0.1 / 2**0.5), (INF, 0.05)):
            result = radii(graph, x, y, norm, BOX, method)
            assert result.values[:2].tolist() == [0.0, 0.0] and result.exact[:2].all()
            assert 0.98 * distance <= float(result.values[2]) < distance


def test_a_tie_of_the_model_itself_is_an_error_too() -> None:
    net = nn.Linear(1, 2)  # in its own single precision both logits are 1, in float64 they are not
    with torch.no_grad():
        net.weight.copy_(torch.ones(2, 1))
        net.bias.copy_(torch.tensor([1e-9, 0.0]))
    x = torch.ones(1, 1)
    y = torch.zeros(1, dtype=torch.int64)
    graph = read(net, (1,))
    assert float(radii(graph, x, y, INF, BOX, "crown", arithmetic="exact").values) > 0
    assert float(radii(graph, x, y, INF, BOX, "crown").values) == 0  # as it is executed
    for method in ("crown", "auto"):
        assert float(radii(net, x, y, INF, BOX, method, arithmetic="exact").values) == 0
        assert not verify(net, x, y, ws.Threat(INF, INF, 1e-12, BOX), method).proved.any()


@pytest.mark.parametrize("norm", NORMS)
def test_nothing_flips_where_the_box_leaves_no_room(norm: float) -> None:
    # theta = (x1 + 2, x2 + relu(x1 - x2)): within the unit box the margin is at least 1; outside it
    # falls without end.
    graph = layers(
        [[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]],
        [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]],
        bias=[[9.0, 9.0, 0.0], [2.0, 0.0]],
    )
    x = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.int64)
    for method in ("crown", "exact"):
        assert (radii(graph, x, y, norm, BOX, method).values == INF).all()
        assert torch.isfinite(radii(graph, x, y, norm, None, method).values).all()
    assert verify(graph, x, y, ws.Threat(norm, INF, 100.0, BOX), "crown").proved.all()


@pytest.mark.parametrize("norm", NORMS)
def test_a_flat_margin_does_not_stop_the_search(norm: float) -> None:
    # A saturated sigmoid has no gradient at the sample in float64, and on R^n no wall either.
    net = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid(), nn.Linear(2, 2)).double()
    for parameter, values in zip(
        net.parameters(), ([[1e3, 0], [0, 1e3]], [-5e3, -5e3], [[0.0, 0], [1, 1]], [0.25, 0])
    ):
        parameter.data.copy_(torch.tensor(values))
    graph = read(net, (2,), smooth=True)
    x = torch.full((1, 2), 0.2, dtype=torch.float64)
    y = torch.zeros(1, dtype=torch.int64)
    for domain in (None, (0.0, 6.0)):
        value = float(radii(graph, x, y, norm, domain, "crown").values)
        assert 4.5 < value < 4.8  # sigma(1000 x - 5000) = 1/4 at 4.9989, 4.7989 away


# On real networks, against flips.


@pytest.mark.few(3)
@pytest.mark.slow_cases("cnn-adv-1.0")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "cnn-adv", "gelu"])
def test_no_flip_lies_within_a_radius(name: str, norm: float) -> None:
    near = flips(name, 4, norm).distances
    result = found(name, 4, norm, "crown")
    assert (result.values < near).all() and (result.values > 0.15 * near).all()
    # Just inside, the bound itself says so again; and by the tolerance of the search, it says
    # nothing beyond.
    graph, x, y = digits(name, 4)
    assert proved(graph, x, y, result.values * (1 - 1e-6), norm, BOX).all()
    assert not proved(graph, x, y, result.values * 1.03, norm, BOX).any()


@pytest.mark.slow
@pytest.mark.slow_cases("1.0", "2.0")
@pytest.mark.parametrize("norm", NORMS)
def test_the_methods_are_ordered(norm: float) -> None:
    near = flips("mlp", 2, norm).distances
    plain, best, exact = (found("mlp", 2, norm, method) for method in ("crown", "branch", "exact"))
    assert (best.values >= plain.values).all()
    if norm != 1:  # where branching knows less than linear bounds do
        assert (best.values > 1.005 * plain.values).any()
    assert (exact.values >= best.values).all() and (exact.values < near).all()
    assert exact.exact.all() and (exact.values > 0.99 * near).all() and not best.exact.any()
    assert set(found("mlp", 2, norm, "auto").proved_by or ()) == {"exact"}
    large = found("cnn-adv", 4, norm, "auto")
    assert (large.values >= found("cnn-adv", 4, norm, "crown").values).all()
    assert (large.values <= flips("cnn-adv", 4, norm).distances).all()


@pytest.mark.slow
def test_what_is_not_closed_exactly_goes_up_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact search that finds nothing still leaves radii above those of linear bounds."""
    graph = mlp([6, 12, 12, 3], 3)
    x = torch.rand(1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = graph.logits(x).argmax(1)
    crown = radii(graph, x, y, "inf", BOX, "crown").values
    exact = radii(graph, x, y, "inf", BOX, "exact").values
    monkeypatch.setattr("wassail.certificates.prove.radii.search_exactly", lambda *_: None)
    left = radii(graph, x, y, "inf", BOX, "auto")
    assert (left.values > 1.1 * crown).all() and (left.values <= exact).all()
    assert left.proved_by is not None and set(left.proved_by) <= {"quadratic", "branch"}


def test_auto_ends_where_the_exact_search_would_not() -> None:
    """The exact search has no more than its sample's effort under "auto"."""
    graph = mlp([6, 12, 12, 3], 3)
    x = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = graph.logits(x).argmax(1)
    crown = radii(graph, x, y, 2, BOX, "crown").values
    left = radii(graph, x, y, 2, BOX, "auto", effort=1e-3)
    assert (left.values >= crown).all() and not left.exact.any() and not left.info["cut"]
    exact = radii(graph, x, y, 2, BOX, "exact").values
    beyond = 0.99 * exact  # only the exact search proves that much
    threat = ws.Threat(2, INF, 1.0)
    assert not verify(graph, x, y, threat, "auto", at=beyond, effort=1e-3).proved.any()
    assert verify(graph, x, y, threat, "exact", at=beyond).proved.all()


@pytest.mark.few(1)
@pytest.mark.slow_cases("cnn-adv-1.0", "cnn-adv-inf", "gelu-1.0", "gelu-inf")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["mlp", "cnn-adv", "gelu"])
def test_more_effort_never_proves_less(name: str, norm: float) -> None:
    graph, x, y = digits(name, 3)
    near = flips(name, 3, norm).distances
    last = crown = radii(graph, x, y, norm, method="crown", upper=near).values
    threat = ws.Threat(norm, INF, 1.0)
    wanted = 0.5 * (crown + near)
    proved = torch.zeros(3, dtype=torch.bool)
    for effort in (0, 0.02, 0.1, 0.3):
        now = radii(graph, x, y, norm, effort=effort, upper=near).values
        assert (now >= last).all() and (now < near).all()
        last = now
        held = verify(graph, x, y, threat, at=wanted, effort=effort).proved
        assert (held | ~proved).all()
        proved = held


@pytest.mark.parametrize("method", ["alpha-crown", "lipschitz"])
def test_a_method_that_is_gone_names_what_replaces_it(method: str) -> None:
    graph, x, y = digits("mlp", 1)
    with pytest.raises(ws.InputError, match=r"is gone: .*auto"):
        radii(graph, x, y, method=method)
    with pytest.raises(ws.InputError, match=r"is gone: .*auto"):
        verify(graph, x, y, ws.Threat(INF, INF, 0.1), method)


@pytest.mark.few(1)
@pytest.mark.slow_cases("1.0")
@pytest.mark.parametrize("norm", NORMS)
def test_radii_on_random_networks_are_below_the_exact_distances(norm: float) -> None:
    for seed, domain in enumerate(((-2.0, 2.0), None)[: 1 if norm == 2 else 2]):
        graph = mlp([3, 4, 4, 3], 21 + seed, slope=0.1 * seed)
        x = torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        y = graph.logits(x).argmax(1)
        exact = radii(graph, x, y, norm, domain, "exact")
        assert exact.exact.any() and (exact.exact | (exact.values == INF)).all()
        for method in ("crown", "ball", "branch", "auto"):
            values = radii(graph, x, y, norm, domain, method).values
            assert (values <= exact.values).all() and (values > 0).all()


# One fixed eps.


@pytest.mark.parametrize("name", ["mlp", "gelu"])
def test_verify_says_what_radii_say(name: str) -> None:
    graph, x, y = digits(name, 4)
    for norm in NORMS:
        values = found(name, 4, norm, "crown").values
        for i in (0,):
            at = float(values[i])
            threat = ws.Threat(norm, INF, at * 0.999, BOX)
            held = verify(graph, x, y, threat, "crown", batch_size=3).proved
            assert held[i] and torch.equal(
                held[values > at * 1.03], torch.ones_like(held[values > at * 1.03])
            )
            beyond = verify(graph, x, y, ws.Threat(norm, INF, at * 1.03, BOX), "crown").proved
            assert not beyond[i] and not beyond[values < at].any()


@pytest.mark.slow
def test_verify_by_better_methods_proves_more() -> None:
    graph, x, y = digits("mlp", 4)
    exact = found("mlp", 4, INF, "exact").values
    best = found("mlp", 4, INF, "branch").values
    eps = float(exact.median())
    held = verify(graph, x, y, ws.Threat(INF, INF, eps, BOX), "exact").proved
    assert torch.equal(held, exact >= eps)
    assert torch.equal(verify(graph, x, y, ws.Threat(INF, INF, eps, BOX)).proved, held)
    most = int((best / found("mlp", 4, INF, "crown").values).argmax())
    middle = float(best[most]) * 0.999
    plain = verify(graph, x, y, ws.Threat(INF, INF, middle, BOX), "crown").proved
    split = verify(graph, x, y, ws.Threat(INF, INF, middle, BOX), "branch").proved
    assert split[most] and not plain[most] and (split | ~plain).all()


def test_verdicts_say_what_is_known(tmp_path: Path) -> None:
    """Falsified with the point, wrong, proved, and open with the reason; saved and loaded."""
    net = model("mlp")
    _, x, y = digits("mlp", 4)
    near = flips("mlp", 4, INF).distances
    low = found("mlp", 4, INF, "crown").values
    at = torch.stack([low[0], 1.2 * near[1], low[2], 0.5 * (low[3] + near[3])])
    labels = y.clone()
    labels[2] = (y[2] + 1) % 10
    threat = ws.Threat(INF, INF, 0.1)
    said = verify(net, x, labels, threat, "crown", at=at)
    assert said.status == ("proved", "falsified", "wrong", "open")
    assert said.reasons == ("", "", "", "its effort was spent")
    assert said.counts == {"proved": 1, "falsified": 1, "wrong": 1, "open": 1}
    point = said.points[1:2]
    assert float((point - x[1:2]).abs().max()) <= float(at[1])
    assert (net(point).argmax(1) != y[1]).all()
    assert torch.equal(said.points[[0, 2, 3]], x[[0, 2, 3]])
    said.save(tmp_path / "v.safetensors")
    kept = type(said).load(tmp_path / "v.safetensors")
    assert kept.status == said.status and torch.equal(kept.points, said.points)
    assert "1 falsified" in repr(kept) and "falsified" in kept._repr_html_()
    late = verify(net, x, labels, threat, "branch", at=at, time_limit=1e-9)
    assert late.status[3] == "open" and late.reasons[3] == "the time was up"


def test_verdicts_do_not_depend_on_batches() -> None:
    net = model("cnn-adv")
    _, x, y = digits("cnn-adv", 4)
    at = 0.5 * (found("cnn-adv", 4, INF, "crown").values + flips("cnn-adv", 4, INF).distances)
    threat = ws.Threat(INF, INF, 0.1)
    whole = verify(net, x, y, threat, at=at, effort=0.2)
    parts = verify(net, x.flip(0), y.flip(0), threat, at=at.flip(0), effort=0.2, batch_size=1)
    assert whole.status == parts.status[::-1] and whole.proved_by == parts.proved_by[::-1]


def test_verify_with_nothing_to_do() -> None:
    graph, x, y = digits("mlp", 4)
    threat = ws.Threat(INF, INF, 1e-6, BOX)
    for method in ("crown", "ball", "branch", "auto", "exact"):
        assert verify(graph, x, y, threat, method).proved.all()
        assert verify(graph, x, (y + 1) % 10, threat, method).counts["wrong"] == 4
        assert len(verify(graph, x[:0], y[:0], threat, method)) == 0
    assert not verify(model("mlp"), x, (y + 1) % 10, threat, "crown").proved.any()


# Steering.


@cache
def whole(method: str, count: int) -> Radii:
    return radii(*digits("mlp", count), INF, BOX, method, batch_size=2)


@pytest.mark.few(1)
@pytest.mark.slow_cases("crown-1.0", "crown-2.0")
@pytest.mark.parametrize(
    ("method", "order"), [("crown", 1.0), ("crown", 2.0), ("crown", INF), ("exact", INF)]
)
def test_steering_changes_the_work_but_not_the_certified_accuracy(
    method: str, order: float
) -> None:
    count = 12 if method == "crown" else 8
    graph, x, y = digits("mlp", count)
    near = flips("mlp", count, INF)
    full = whole(method, count)
    middle = float(full.values[full.values > 0].median())
    for share in (0.1, 0.5) if order < INF else (0.95,):
        eps = share * middle
        some = radii(graph, x, y, INF, BOX, method, eps=eps, order=order, batch_size=2)
        got, want = (ws.risk_curve(near, part, order)(eps)[0] for part in (some, full))
        assert got == pytest.approx(want, abs=1e-9 if order == INF or method == "exact" else 1e-3)
        assert some.info["sweeps"] < full.info["sweeps"]
        assert (some.values <= full.values * 1.01).all()
        assert some.info["eps"] == eps and some.info["order"] == order


def test_weights_steer_too() -> None:
    graph, x, y = digits("mlp", 12)
    near = flips("mlp", 12, INF)
    full = whole("crown", 12)
    mu = torch.arange(12).double()  # the first sample does not count
    eps = 0.5 * float(full.values.median())
    some = radii(graph, x, y, INF, BOX, "crown", eps=eps, order=1, mu=mu)
    got, want = (ws.risk_curve(near, part, 1, mu)(eps)[0] for part in (some, full))
    assert got == pytest.approx(want, abs=1e-3)


# What radii must not depend on, and what they keep.


def test_spans_are_kept_for_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded for any number of samples, and the radii are the same."""
    graph, x, y = digits("mlp", 4)
    values = found("mlp", 4, 2, "crown").values
    longest: list[int] = []
    original = RadiusSearch._try

    def watched(self: RadiusSearch, *given: Any) -> None:
        original(self, *given)
        longest.extend(len(low) for low, _ in self.known.values())

    monkeypatch.setattr(RadiusSearch, "_try", watched)
    neurons = sum(graph.nodes[j].size for j in graph.read_by_others)
    monkeypatch.setattr(radius_search, "KEPT", 4 * neurons)
    few = radii(graph, x, y, 2, method="crown", batch_size=1).values
    assert torch.allclose(few, values, rtol=1e-7, atol=0)
    assert longest and max(longest) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", NORMS)
def test_batches_and_order_do_not_matter(norm: float) -> None:
    graph, x, y = digits("mlp", 4)
    values = found("mlp", 4, norm, "crown").values
    # Screening is in single precision, and a batch adds up in another order than a sample alone.
    for size in (1, 3):
        assert torch.allclose(
            radii(graph, x, y, norm, method="crown", batch_size=size).values,
            values,
            rtol=1e-7,
            atol=0,
        )
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(
        radii(graph, x[order], y[order], norm, method="crown").values,
        values[order],
        rtol=1e-7,
        atol=0,
    )
    assert torch.allclose(
        radii(graph, x[[2]], y[[2]], norm, method="crown").values, values[[2]], rtol=1e-7, atol=0
    )


def test_known_flips_are_a_cap_and_save_sweeps() -> None:
    graph, x, y = digits("cnn-adv", 4)
    free = found("cnn-adv", 4, INF, "crown")
    cap = 0.5 * free.values
    for method in ("crown", "branch"):
        capped = radii(graph, x[:3], y[:3], INF, method=method, upper=cap[:3], effort=0.05)
        assert (capped.values <= cap[:3]).all() and (capped.values >= 0.98 * cap[:3]).all()
    assert (
        radii(graph, x, y, INF, method="crown", upper=torch.zeros(4)).values.tolist() == [0.0] * 4
    )
    near = radii(graph, x, y, INF, method="crown", upper=flips("cnn-adv", 4, INF).distances)
    assert torch.allclose(near.values, free.values, rtol=0.02)


def test_radii_save_load_and_show_themselves(tmp_path: Path) -> None:
    result = found("mlp", 4, INF, "crown")
    result.save(tmp_path / "radii.safetensors")
    again = Radii.load(tmp_path / "radii.safetensors")
    assert torch.equal(again.values, result.values) and torch.equal(again.exact, result.exact)
    assert (again.method, again.norm, again.domain) == ("crown", INF, BOX)
    assert again.info["sweeps"] == result.info["sweeps"] and again.info["tolerance"] == 0.01
    assert repr(again).startswith(
        "Radii(4 samples by crown, linf, box [0, 1]: 4 above 0, median of those 0.0"
    )
    curve = ws.risk_curve(flips("mlp", 4, INF), again, 1)
    low, high = curve(0.03)
    assert 0 < low < high < 1


def test_one_class_one_sample_and_none() -> None:
    graph, x, y = digits("mlp", 4)
    assert radii(graph, x[:0], y[:0]).values.shape == (0,)
    same = radii(graph, x[y == y[0]], y[y == y[0]], method="crown")
    assert torch.allclose(
        same.values, found("mlp", 4, INF, "crown").values[y == y[0]], rtol=1e-9, atol=0
    )
    none = radii(graph, x, (y + 1) % 10, method="crown")
    assert (none.values == 0).all() and none.exact.all() and none.info["sweeps"] == 0


def test_the_model_and_the_samples_are_left_alone() -> None:
    _, x, y = digits("mlp", 4)
    net = ws.zoo.load("digits-mlp").double().train()
    before = x.clone()
    result = radii(net, x, y, method="branch", effort=0.01, batch_size=3)
    assert (
        net.training and all(p.requires_grad for p in net.parameters()) and torch.equal(x, before)
    )
    assert (result.values >= 0.98 * found("mlp", 4, INF, "crown").values).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "magic"}, "method"),
        ({"x": torch.full((4, 1, 8, 8), math.nan).double()}, "NaN"),
        ({"x": torch.full((4, 1, 8, 8), 3.0).double()}, "domain"),
        ({"y": torch.full((4,), 11)}, "labels"),
        ({"y": torch.zeros(5, dtype=torch.int64)}, "labels"),
        ({"eps": 0.1}, "order"),
        ({"order": 1}, "eps"),
        ({"eps": -0.1, "order": 1}, "eps"),
        ({"norm": 3}, "norm"),
        ({"upper": torch.ones(5)}, "upper"),
        ({"upper": torch.full((4,), math.nan)}, "upper"),
        ({"upper": -torch.ones(4)}, "upper"),
        ({"batch_size": 0}, "batch_size"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"mu": torch.ones(3), "eps": 0.1, "order": 1}, "mu"),
    ],
)
def test_one_sentence_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    graph, x, y = digits("mlp", 4)
    with pytest.raises(ws.InputError, match=words) as error:
        radii(
            **{
                "model": model("mlp") if "y" in changes else graph,
                "x": x,
                "y": y,
                "method": "crown",
                **changes,
            }
        )
    text = str(error.value)
    assert text.count(". ") == 0 and text.endswith(".") and "\n" not in text


def test_probabilities_and_unknown_methods_are_refused() -> None:
    graph, x, y = digits("mlp", 4)
    with pytest.raises(ws.InputError, match="softmax"):
        radii(nn.Sequential(model("mlp"), nn.Softmax(1)), x, y)
    with pytest.raises(ws.InputError, match="method"):
        verify(graph, x, y, ws.Threat(INF, INF, 0.1), "magic")


def test_products_of_norms_are_sound_and_smaller() -> None:
    for norm in (2.0, INF):
        graph, x, y = digits("cnn-adv", 4)
        problem = Problem.of(graph, x, y, norm, BOX)
        values = product_radii(problem, torch.zeros(4, dtype=torch.float64))
        assert (values > 0).all() and (values < found("cnn-adv", 4, norm, "crown").values).all()
    graph = layers([[3.0, 4.0], [0.0, 0.0]])  # the margin is 3 x1 + 4 x2
    x = torch.tensor([[0.5, 0.5], [0.1, 0.0]], dtype=torch.float64)
    y = torch.zeros(2, dtype=torch.int64)
    for norm, size in ((1.0, 4.0), (2.0, 5.0), (INF, 7.0)):
        problem = Problem.of(graph, x, y, norm, None)
        value = product_radii(problem, torch.zeros(2, dtype=torch.float64))
        exact = torch.tensor([3.5, 0.3], dtype=torch.float64) / size
        assert (value < exact).all() and torch.allclose(value, exact, rtol=1e-6)


def test_a_larger_network_keeps_its_margins(zoo: ModuleType) -> None:
    net, data = zoo.load("vnn_resnet2b")
    x, y = zoo.images(data, 4)
    graph = read(net, x.shape[1:])
    lower = margin_bounds(graph, x, y, 1 / 255, INF, BOX)
    least = lower.scatter(1, y[:, None], INF).amin(1)
    assert least.tolist() == pytest.approx(RESNET, abs=1e-4)
    worst = [graph.logits(p) for p in (x, (x + 1 / 255).clamp(0, 1), (x - 1 / 255).clamp(0, 1))]
    for z in worst:
        assert (lower <= z.gather(1, y[:, None]) - z + 1e-9).all()


RESNET = [-0.394660, 1.524352, 0.934255, 0.700709]


@pytest.mark.slow
def test_a_small_network_of_every_kind_of_layer() -> None:
    net = seeded(
        nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2, padding=1),
            nn.LeakyReLU(0.1),
            nn.Conv2d(3, 4, 2),
            nn.Tanh(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        3,
    )
    x = torch.rand(2, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = net(x).argmax(1)
    graph = read(net, (1, 5, 5), smooth=True)
    for norm in NORMS:
        result = radii(graph, x, y, norm, method="crown")
        near = ws.nearest(net, x, y, norm, passes=200)
        assert (result.values > 0).all() and (result.values < near.distances).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_auto_takes_the_best_of_all_that_is_cheap(
    norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never below what it is made of; and products of norms are asked in every norm."""
    model = seeded(nn.Sequential(nn.Linear(5, 310), nn.ReLU(), nn.Linear(310, 3)))
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = model(x).argmax(1)
    where = (model, x, y, norm)
    auto = radii(*where, tolerance=0.1)
    assert auto.proved_by is not None and all(auto.proved_by)
    for method in ("crown", "ball", "branch"):
        alone = radii(*where, method=method, tolerance=0.1)
        assert (auto.values >= alone.values * (1 - 0.1)).all()
    far = torch.full((3,), 50.0).double()
    monkeypatch.setattr(
        importlib.import_module("wassail.certificates.prove.radii"), "product_radii", lambda *_: far
    )
    auto = radii(*where, tolerance=0.1, upper=torch.full((3,), 50.0))
    assert (auto.values >= 50 * (1 - 1e-8)).all()
    assert auto.proved_by is not None and "products" in auto.proved_by


def test_a_sample_within_rounding_of_a_tie_is_not_enlarged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its margin, 2^-12, is positive and below what rounding may take from logits of 2^10: it has
    radius 0, and no method is asked for more.
    """
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.fill_(2.0**10)
    x = torch.tensor([[0.5, 0.5 - 2.0**-12], [0.9, 0.1]])
    y = torch.tensor([0, 0])
    asked: list[Tensor] = []
    begin = Ladder.begin

    def watched(self: Ladder, rows: Tensor, *rest: Any) -> Any:
        asked.append(rows)
        return begin(self, rows, *rest)

    monkeypatch.setattr(Ladder, "begin", watched)
    near = torch.full((2,), 1.0, dtype=torch.float64)
    for method in ("ball", "branch", "auto"):
        found = radii(model, x, y, 2, None, method, arithmetic="executed", upper=near).values
        assert found[0] == 0 and found[1] >= 0.25
    assert not any((rows == 0).any() for rows in asked)
