"""Certificates: the four slopes, both sides of the worst-case loss, witnesses, and the
conformance kit that attacks them.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.graph.reader import read
from wassail.certificates.loss.certificate import Certificate
from wassail.certificates.loss.chords import Chords
from wassail.certificates.loss.slopes import allocate_gains, ray_slope
from wassail.testing import check_certificate, corpus

NORMS = (1.0, 2.0, math.inf)


def quick(*args: Any, seconds: float = 4.0, **options: Any) -> Certificate:
    """With a budget of work that is worth so many seconds: no test here depends on the clock."""
    with clock.limited(work=seconds * clock.SECOND):
        return ws.certify(*args, **options)


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Module:
    layer = nn.Linear(len(weight[0]), len(weight)).double()
    layer.weight.data = torch.tensor(weight, dtype=torch.float64)
    layer.bias.data = (
        torch.zeros(len(weight), dtype=torch.float64)
        if bias is None
        else torch.tensor(bias).double()
    )
    return nn.Sequential(layer)


def two_layer(first: list[list[float]], bias: list[float], second: list[list[float]]) -> nn.Module:
    return nn.Sequential(*linear(first, bias), nn.ReLU(), *linear(second))


@pytest.mark.parametrize("norm", NORMS)
def test_two_linear_classes_are_tight(norm: float) -> None:
    model = linear([[1.0, 2.0], [-1.0, 0.5]])
    x = torch.tensor([[0.3, 0.1], [-0.2, 0.4]]).double()
    found = ws.certify(model, x, torch.tensor([0, 1]), norm, "margin")
    gap = torch.tensor([2.0, 1.5]).double()
    slope = float(torch.linalg.vector_norm(gap, {1.0: math.inf, 2.0: 2.0, math.inf: 1.0}[norm]))
    for bound in (found.infinity, found.anchor, found.margin):
        assert bound is not None and bound.lower == pytest.approx(slope, rel=1e-9) == bound.upper
    for eps in (0.01, 1.0, 50.0):
        low, high = found.bounds(eps)
        assert low == pytest.approx(
            found.empirical + slope * eps, rel=1e-9
        ) and high == pytest.approx(low, rel=1e-9)


def test_linear_three_classes_paper_slope_is_not_tight() -> None:
    model = linear([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    found = ws.certify(model, torch.zeros(3, 2).double(), torch.arange(3), 2, "margin")
    assert found.tight is False
    assert found.infinity is not None and found.paper is not None
    assert found.infinity.upper == pytest.approx(math.sqrt(5))  # the longest difference of two rows
    assert found.paper.lower == pytest.approx(
        math.sqrt(2) * math.sqrt(3)
    )  # sqrt(2) times the largest singular value


def test_paper_slope_tight_case() -> None:
    # theta = (-s, s) with s = relu(x): J = (-1, 1)^T, sqrt(2) ||J|| = 2 = the gap's slope, attained
    # on the ray x -> inf.
    model = two_layer([[1.0]], [0.0], [[-1.0], [1.0]])
    found = ws.certify(model, torch.tensor([[1.0]]).double(), torch.tensor([0]), 2, "cross_entropy")
    assert found.tight is True
    assert found.infinity is not None and found.paper is not None
    assert found.infinity.lower == pytest.approx(
        2.0, rel=1e-9
    ) and found.paper.upper == pytest.approx(2.0, rel=1e-9)


def test_label_absent_does_not_count() -> None:
    # theta_2 - theta_1 = relu(x) - 3 relu(-x): with only the first label present the slope is 1,
    # with both it is 3 (THEORY 3).
    model = two_layer([[1.0], [-1.0]], [0.0, 0.0], [[0.0, 0.0], [1.0, -3.0]])
    x = torch.tensor([[0.5], [-0.5]]).double()
    only = ws.certify(model, x, torch.tensor([0, 0]), 2, "margin")
    both = ws.certify(model, x, torch.tensor([0, 1]), 2, "margin")
    assert only.infinity is not None and both.infinity is not None
    assert only.infinity.upper == pytest.approx(
        1.0, abs=1e-9
    ) and both.infinity.lower == pytest.approx(3.0, abs=1e-9)


def test_negative_slopes_are_clipped() -> None:
    model = two_layer([[1.0], [-1.0]], [0.0, 0.0], [[0.0, 0.0], [-1.0, -1.0]])  # the gap is -|x|
    found = ws.certify(
        model,
        torch.tensor([[0.0]]).double(),
        torch.tensor([0]),
        2,
        "margin",
        slopes=("infinity", "margin"),
    )
    assert (
        found.infinity is not None and found.infinity.lower == 0.0 and found.infinity.upper <= 1e-9
    )
    assert found.bounds(3.0)[0] == found.empirical == 0.0


@pytest.mark.slow_cases("margin")
@pytest.mark.parametrize("loss", ["margin", "cross_entropy"])
def test_limits_of_the_growth(loss: str) -> None:
    """The Lemma's limits: (V - E) / eps falls to l as eps grows and rises to S as it shrinks."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    x = torch.randn(3, 2).double()
    y = torch.tensor([0, 1, 0])
    found = ws.certify(model, x, y, 2, loss)
    assert found.infinity is not None and found.anchor is not None
    rates = []
    for eps in (1e-4, 0.1, 10.0, 1e5):
        value = ws.worst_case(model, x, y, ws.Threat(2, 1, eps, None), loss, tolerance=1e-7).bound
        low, high = found.bounds(eps)
        assert low <= value.upper + 1e-6 * max(
            1, abs(value.upper)
        ) and value.lower <= high + 1e-6 * max(1, abs(high))
        rates.append((value.lower - found.empirical) / eps)
    assert rates[-1] == pytest.approx(found.infinity.upper, rel=1e-3)
    assert rates[0] <= found.anchor.upper + 1e-2
    assert all(b <= a * (1 + 1e-2) + 1e-2 for a, b in pairwise(rates))


@pytest.mark.slow_cases("1.0-None", "1.0-domain1", "2.0-None", "2.0-domain1", "inf-None")
@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
@pytest.mark.parametrize("norm", NORMS)
def test_kit_accepts_ours(norm: float, domain: tuple[float, float] | None) -> None:
    names = {
        1.0: ("shallow", "leaky"),
        2.0: ("linear", "residual", "conv"),
        math.inf: ("dead", "pool"),
    }[norm]
    check_certificate(
        quick,
        norms=(norm,),
        losses=("margin" if norm == 2 else "cross_entropy",),
        domains=(domain,),
        names=names,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(corpus()))
def test_kit_accepts_ours_everywhere(name: str) -> None:
    check_certificate(partial(quick, seconds=20.0), names=(name,))


@pytest.mark.slow_cases("anchor", "margin", "paper")
@pytest.mark.parametrize("slope", ["infinity", "anchor", "margin", "paper"])
def test_kit_refuses_a_slope_that_is_too_small(slope: str) -> None:
    def broken(*args: object) -> Certificate:
        found = quick(*args)
        bound = getattr(found, slope)
        less: dict[str, Any] = {slope: Bound(bound.lower / 2, bound.upper / 2, bound.method)}
        return replace(found, **less, line=None)

    # Infinity alone only carries the lower line: its lie is out of order, or a witness that cannot
    # be kept.
    def inflated(*args: object) -> Certificate:
        found = quick(*args)
        assert found.infinity is not None
        return replace(
            found,
            infinity=Bound(
                found.infinity.lower * 1.5,
                found.infinity.upper * 1.5,
                "lie",
                found.infinity.witness,
            ),
        )

    kit = inflated if slope == "infinity" else broken
    with pytest.raises(AssertionError):
        check_certificate(kit, norms=(2.0,), losses=("margin",), domains=(None,), names=("leaky",))


def test_kit_refuses_a_witness_outside_the_budget() -> None:
    def broken(*args: object) -> Certificate:
        found = quick(*args)
        return replace(found, distance=found.distance / 2)

    with pytest.raises(AssertionError):
        check_certificate(
            broken, norms=(2.0,), losses=("margin",), domains=(None,), names=("leaky",)
        )


def test_witness_is_the_lower_side() -> None:
    model, x, y = corpus()["shallow"]
    found = ws.certify(model, x, y, 2, "cross_entropy")
    for eps in (0.05, 2.0):
        witness = found.witness(eps)
        assert witness.cost <= eps and bool(witness.verify(model))
        z = torch.cat([model(x), model(witness.points)]).detach()
        losses = torch.nn.functional.cross_entropy(z, torch.cat([y, y]), reduction="none")
        value = float((witness.atoms()[1] * losses).sum())
        assert value == pytest.approx(witness.info["loss"], rel=1e-9)
        low = found.bounds(eps)[0]
        assert low - value == pytest.approx(
            witness.info["shortfall"], abs=1e-9
        ) and low - value < 1e-5 * max(1.0, low)


def test_interrupt_keeps_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = corpus()["shallow"]

    def stop(*args: object, **options: object) -> Bound:
        raise KeyboardInterrupt

    monkeypatch.setattr("wassail.certificates.loss.slope_search.infinity", stop)
    found = ws.certify(model, x, y, 2, "margin")
    assert (
        found.margin is not None
        and found.paper is not None
        and found.infinity is None
        and found.info["interrupted"]
    )
    low, high = found.bounds(0.1)
    assert found.empirical <= low <= high < math.inf


def test_saves_and_loads(tmp_path: object) -> None:
    model, x, y = corpus()["leaky"]
    found = ws.certify(model, x, y, 2, "margin")
    found.save(f"{tmp_path}/certificate.safetensors")
    again = Certificate.load(f"{tmp_path}/certificate.safetensors")
    assert again.bounds(0.3) == found.bounds(0.3) and isinstance(again.margin, Bound)
    assert again.margin.upper == found.margin.upper and torch.equal(
        again.witness(0.3).points, found.witness(0.3).points
    )


def test_part_of_the_slopes() -> None:
    model, x, y = corpus()["shallow"]
    found = ws.certify(model, x, y, 2, slopes=("margin",))
    assert found.infinity is None and found.anchor is None and found.paper is None
    assert found.margin is not None and found.bounds(1.0)[1] == pytest.approx(
        found.empirical + found.margin.upper, rel=1e-9
    )


def test_weights_of_the_samples() -> None:
    model, x, y = corpus()["leaky"]
    heavy = ws.certify(model, x, y, 2, "margin", mu=torch.tensor([1.0] + [0.0] * 7))
    one = ws.certify(model, x[:1], y[:1], 2, "margin")
    assert heavy.empirical == pytest.approx(one.empirical)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": "dlr"}, "not Lipschitz"),
        ({"loss": "hinge"}, "hinge"),
        ({"slopes": ("steep",)}, "steep"),
        ({"x": torch.zeros(0, 2).double(), "y": torch.zeros(0, dtype=torch.int64)}, "no samples"),
        ({"y": torch.full((8,), 7)}, "classes"),
        ({"domain": (0.4, 0.6)}, "domain"),
        ({"norm": 3}, "norm"),
    ],
)
def test_bad_input_is_one_sentence(change: dict[str, Any], words: str) -> None:
    model, x, y = corpus()["shallow"]
    arguments = {"x": x, "y": y, "norm": 2, "loss": "margin", **change}
    with pytest.raises(ws.InputError, match=words) as caught:
        ws.certify(model, **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_large_networks_get_brackets() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 4),
    )
    x = torch.rand(5, 1, 16, 16)
    y = torch.tensor([0, 1, 2, 3, 0])
    for domain in (None, (0.0, 1.0)):
        found = quick(model, x, y, math.inf, "cross_entropy", domain, seconds=6.0)
        assert (
            found.infinity is not None
            and found.anchor is not None
            and found.margin is not None
            and found.paper is not None
        )
        assert (
            found.infinity.upper
            <= found.anchor.upper
            <= found.margin.upper
            <= found.paper.upper
            < math.inf
        )
        if domain is None:
            assert 0 < found.infinity.lower <= found.anchor.lower <= found.margin.upper
        low, high = found.bounds(0.05)
        assert found.empirical < low < high
        assert bool(found.witness(0.05).verify(model))
        if domain is not None:  # in a box the loss cannot rise for ever
            assert found.bounds(1e6)[1] < 1e4


@pytest.mark.parametrize("norm", NORMS)
def test_rays_of_a_graph_match_the_dense_form(norm: float) -> None:
    from wassail.certificates.exact.infinity import infinity

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    graph = read(model, (3,))
    rays = ray_slope(graph, norm, [0, 1, 2])
    exact = infinity(graph.piecewise(), norm, [0, 1, 2])
    assert rays.lower <= exact.upper * (1 + 1e-9) and exact.lower <= rays.upper * (1 + 1e-9)
    assert rays.lower >= 0.9 * exact.lower


def brute(found: Chords, mu: Tensor, eps: float) -> float:
    """The best value with one point a sample, by trying every choice of points and filling
    greedily.
    """
    import itertools

    best = 0.0
    options = [[-1, *(found.root == i).nonzero().flatten().tolist()] for i in range(len(mu))]
    for choice in itertools.product(*options):
        rows = [
            (float(found.gain[m] / found.distance[m]), i, m) for i, m in enumerate(choice) if m >= 0
        ]
        left = eps
        total = 0.0
        for slope, i, m in sorted(rows, reverse=True):
            spent = min(left, float(mu[i] * found.distance[m]))
            total = total + slope * spent
            left = left - spent
        best = max(best, total)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_allocation_of_gains_is_near_the_best(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    root = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    gain, distance = (torch.rand(7, dtype=torch.float64, generator=generator) for _ in range(2))
    found = Chords(root, torch.zeros(7, 1), gain, distance, torch.zeros(7, dtype=torch.int64))
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for eps in (0.02, 0.1, 0.3, 2.0):
        choice, weight = allocate_gains(found, mu, eps)
        used = choice >= 0
        cost = float((mu[used] * weight[used] * distance[choice[used]]).sum())
        value = float((mu[used] * weight[used] * gain[choice[used]]).sum())
        best = brute(found, mu, eps)
        assert cost <= eps and value <= best + 1e-12
        assert value >= best - float(mu.max() * gain.max()) * 0.5  # the last step only may be lost
        if eps == 2.0:
            assert value == pytest.approx(best)


def test_what_a_long_step_leaves_goes_to_another_sample() -> None:
    # After the near point half of the budget is left. The long step of the same sample would give
    # up what it has for less.
    gain, distance = (
        torch.tensor(v, dtype=torch.float64) for v in ([1.0, 100.0, 50.0], [1.0, 1000.0, 1000.0])
    )
    found = Chords(
        torch.tensor([0, 0, 1]),
        torch.zeros(3, 1),
        gain,
        distance,
        torch.zeros(3, dtype=torch.int64),
    )
    choice, weight = allocate_gains(found, torch.tensor([0.5, 0.5], dtype=torch.float64), 1.0)
    assert choice.tolist() == [0, 2] and weight.tolist() == pytest.approx([1.0, 1e-3])


def test_a_contradiction_is_not_clipped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certified slope below an evaluated chord stops the line; a difference in the last
    digits does not.
    """
    from wassail.certificates.loss import certify

    model, x, y = corpus()["leaky"]
    true = ws.lipschitz(model, 2, labels=y.tolist()).upper
    monkeypatch.setattr(
        certify, "lipschitz", lambda *args, **options: Bound(0.0, 0.3 * true, "lie")
    )
    with pytest.raises(AssertionError, match="report this bug"):
        ws.certify(model, x, y, 2, "margin")
    assert below(1.0 + 1e-15, 1.0, "rounding") == 1.0
    with pytest.raises(AssertionError, match="evaluated"):
        below(1.001, 1.0, "a lie")
