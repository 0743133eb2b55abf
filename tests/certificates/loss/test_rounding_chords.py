"""Steepest chords, slopes and limits of curves, in every rounding mode, against fractions."""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.exact import perceptron, scattered, uniform, values
from support.rounding import MODES, long, rounded
from wassail.certificates.loss import chords, curve, slopes
from wassail.certificates.loss.chords import Chords, ChordSearch, Tail

INF = math.inf
DOUBLE = torch.float64
OFF = 1e-3  # a rounding error that can be seen


@pytest.mark.parametrize("mode", MODES)
def test_errors_of_logits_hold_their_rounding(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ReLUs against sixty-four bits, of smooth networks as wide as their intervals."""
    graph = perceptron(
        [scattered(20, 5, seed=1), scattered(4, 20, seed=2)],
        [scattered(20, seed=3), scattered(4, seed=4)],
    )
    x = scattered(30, 5, seed=5)
    with rounded(mode):
        z = graph.logits(x)
        error = chords._errors(graph, x)
    exact = np.stack([values(graph, row)[-1] for row in long(x)])
    off = np.abs(long(z) - exact).max(1)
    assert (off <= long(error)).all() and (off > 0).any()
    low = scattered(1, 3, seed=6)
    high = low + scattered(1, 3, seed=7).abs()
    monkeypatch.setattr(chords, "spans", lambda *_: [(low, high)])
    smooth = SimpleNamespace(smooth=True, device="cpu")
    with rounded(mode):
        wide = float(chords._errors(smooth, low)[0])  # type: ignore[arg-type]
    ends = zip(low[0].tolist(), high[0].tolist())
    assert Fraction(wide) >= max(Fraction(b) - Fraction(a) for a, b in ends)


@pytest.mark.parametrize("mode", MODES)
def test_the_steepest_of_known_chords_is_rounded_down(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chords, "_errors", lambda _, points: torch.zeros(len(points)).double())
    x = torch.zeros(1, 1, dtype=DOUBLE)
    for seed in range(30):
        gain, distance = (0.1 + uniform(2, seed=seed)).reshape(2, 1)
        found = Chords(torch.tensor([0]), x, gain, distance, torch.tensor([0]))
        with rounded(mode):
            slope, _ = chords.steepest_of(None, x, found)  # type: ignore[arg-type]
        assert Fraction(slope) * Fraction(float(distance)) <= Fraction(float(gain))


@pytest.mark.parametrize("mode", MODES)
def test_losses_at_the_samples_are_rounded_up(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By magnitudes: a margin is a difference of logits that may be far larger."""
    monkeypatch.setattr(chords, "_errors", lambda _, points: torch.zeros(len(points)).double())
    x = torch.zeros(1, 2, dtype=DOUBLE)
    for seed in range(30):
        z = scattered(3, seed=seed)
        graph: Any = Fake(z[None])
        for label in range(3):
            y = torch.tensor([label])
            with rounded(mode):
                found = float(chords.clean_above(graph, x, y, "margin")[0])
            rivals = [Fraction(v) for k, v in enumerate(z.tolist()) if k != label]
            loss = max(rivals) - Fraction(float(z[label]))
            assert loss <= Fraction(found) <= loss + Fraction(float(z.abs().max())) / 2**46


class Fake:
    """A network of two outputs on the plane, whose logits are given."""

    smooth = True
    outputs = 2
    device = "cpu"

    def __init__(self, z: Tensor) -> None:
        self.z = z

    def logits(self, points: Tensor) -> Tensor:
        return self.z.expand(len(points), -1)


def search_of(
    monkeypatch: pytest.MonkeyPatch,
    x: Tensor,
    z: tuple[float, float] = (0.0, -1.0),
    error: float = 0.0,
    norm: float = INF,
    loss: str = "margin",
    tail: Tail | None = None,
) -> ChordSearch:
    """A search around samples of label 0."""
    monkeypatch.setattr(
        chords, "_errors", lambda _, points: torch.full((len(points),), error, dtype=DOUBLE)
    )
    graph: Any = Fake(torch.tensor([z], dtype=DOUBLE))
    y = torch.zeros(len(x), dtype=torch.int64)
    return ChordSearch(graph, x, y, norm, None, loss, INF, tail)


def test_chords_start_from_the_least_loss_that_rounding_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits that are off by so much move a loss by twice that, at either end of a chord."""
    search = search_of(monkeypatch, torch.zeros(1, 2, dtype=DOUBLE), error=OFF)
    assert float(search.clean) == -1 and float(search.least) <= -1 - 2 * OFF
    search.graph.z = torch.tensor([[0.0, 1.0]], dtype=DOUBLE)
    search._look(torch.tensor([0]), torch.ones(1, 2, dtype=DOUBLE))
    assert 1.9 < search.steepest <= 2 - 4 * OFF


@pytest.mark.parametrize("mode", MODES)
def test_chords_that_are_seen_are_rounded_down(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        gain, distance = (0.1 + uniform(2, seed=seed)).tolist()
        search = search_of(monkeypatch, torch.zeros(1, 2, dtype=DOUBLE), z=(0.0, 0.0))
        search.graph.z = torch.tensor([[0.0, gain]], dtype=DOUBLE)
        with rounded(mode):
            search._look(torch.tensor([0]), torch.full((1, 2), distance, dtype=DOUBLE))
        assert Fraction(search.steepest) * Fraction(distance) <= Fraction(gain)


@pytest.mark.parametrize("mode", MODES)
def test_chords_beyond_the_last_cell(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(30):
        lam, height, steep = (0.1 + uniform(3, seed=seed)).tolist()
        tail = Tail(lam, torch.tensor([height], dtype=DOUBLE))
        search = search_of(monkeypatch, torch.zeros(1, 2, dtype=DOUBLE), z=(0.0, 0.0), tail=tail)
        search.steepest = 1e3 * steep
        with rounded(mode):
            far, beyond = search._reach(1.0)
        assert Fraction(beyond) >= Fraction(lam) + Fraction(height) / Fraction(far)


def test_a_bound_that_is_no_number_counts_as_the_steepest_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python's `max` drops a NaN, and the cell with it."""
    search = search_of(monkeypatch, torch.zeros(1, 2, dtype=DOUBLE))
    search.ceiling = 7.0
    known = torch.tensor([2.0, math.nan, INF], dtype=DOUBLE)
    monkeypatch.setattr(search, "_cells", lambda *_: known)
    monkeypatch.setattr(search, "_inner", lambda *_: known)
    root, sides = torch.zeros(3, dtype=torch.int64), torch.ones(3, 2, dtype=DOUBLE)
    assert search._boxes(root, -sides, sides).bound.tolist() == [2, 7, 7]
    assert search._cubes(root, known).bound.tolist() == [2, 7, 7]
    search.graph.z = torch.tensor([[0.0, 1.0]], dtype=DOUBLE)
    search._look(root[:2], torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=DOUBLE))
    assert search.steepest > 0  # the first point is the sample


def cell(
    monkeypatch: pytest.MonkeyPatch, far: Tensor, base: Tensor, a: Tensor
) -> dict[str, tuple[Tensor, ...]]:
    """Bounds of a cell that are given; what box they were asked for."""
    seen: dict[str, tuple[Tensor, ...]] = {}

    def boxed(*box: Tensor) -> None:
        seen["box"] = box

    monkeypatch.setattr(chords, "boxed", boxed)
    monkeypatch.setattr(chords, "Sweep", lambda *_: SimpleNamespace(run=lambda: None))
    monkeypatch.setattr(chords, "margins", lambda *_: (far, base, a))
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_chords_into_a_cell(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its corners: the loss there is all that is left of large terms, and so is the distance."""
    for seed in range(40):
        x = scattered(1, 2, seed=seed)
        gap = 2.0**-20 * (1 + float(uniform(1, seed=seed + 40)))
        low = x + gap * torch.tensor([[1.0, -1.0]], dtype=DOUBLE)
        width = 0.1 + float(uniform(1, seed=seed + 80))
        if seed % 2:  # half of it is below a power of two, and half of it and the gap above
            x = 2.0**-6 * uniform(1, 2, seed=seed)
            low = x + gap * torch.tensor([[1.0, -1.0]], dtype=DOUBLE)
            width = 1 - gap
        high = low + width * torch.tensor([[1.0, 0.5]], dtype=DOUBLE)
        a = torch.zeros(1, 2, 2, dtype=DOUBLE)
        a[0, 1] = scattered(2, seed=seed + 120).abs()
        middle = (low + high) / 2
        # A margin that all but vanishes at the nearest corner, and is positive at the others.
        base = torch.zeros(1, 2, dtype=DOUBLE)
        base[0, 1] = -float(a[0, 1] @ (low - middle)[0]) - 2.0**-25
        if seed % 2:  # or the same margin everywhere, so that the distance alone counts
            a = 0 * a
            base[0, 1] = -1.0
        none = torch.full((1, 2), -INF, dtype=DOUBLE)
        seen = cell(monkeypatch, none, base, a)
        search = search_of(monkeypatch, x, z=(0.0, 0.0))
        with rounded(mode):
            found = float(search._some(torch.tensor([0]), low, high)[0])
            away = middle - x
            unit = chords.maximiser(away, chords.dual(INF))[0].tolist()
        centre, below, above = (v[0].tolist() for v in seen["box"])
        for c, s, t, v, w in zip(centre, below, above, low[0].tolist(), high[0].tolist()):
            assert Fraction(c) - Fraction(s) <= Fraction(v)
            assert Fraction(c) + Fraction(t) >= Fraction(w)
        for first in (low, high):
            for second in (low, high):
                corner = [Fraction(float(first[0, 0])), Fraction(float(second[0, 1]))]
                margin = Fraction(float(base[0, 1])) + sum(
                    Fraction(g) * (v - Fraction(c))
                    for g, v, c in zip(a[0, 1].tolist(), corner, centre)
                )
                length = sum(
                    Fraction(u) * (v - Fraction(w)) for u, v, w in zip(unit, corner, x[0].tolist())
                )
                if length > 0:
                    assert found == INF or Fraction(found) * length >= -margin


@pytest.mark.parametrize("mode", MODES)
def test_chords_to_the_highest_loss_of_a_cell(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the distance of its nearest point."""
    for seed in range(60):
        x = scattered(1, 2, seed=seed)
        low = x + 0.1 + uniform(1, 2, seed=seed + 60)
        far = torch.tensor([[0.0, -1.0 - float(uniform(1, seed=seed + 120))]], dtype=DOUBLE)
        cell(monkeypatch, far, 0 * far - 1e300, torch.zeros(1, 2, 2, dtype=DOUBLE))
        search = search_of(monkeypatch, x, z=(0.0, 0.0), norm=2.0)
        with rounded(mode):
            found = float(search._some(torch.tensor([0]), low, low + 1)[0])
        square = sum(
            (Fraction(a) - Fraction(b)) ** 2 for a, b in zip(low[0].tolist(), x[0].tolist())
        )
        assert Fraction(found) ** 2 * square >= Fraction(float(far[0, 1])) ** 2


def gradients(monkeypatch: pytest.MonkeyPatch, steep: Tensor) -> dict[str, Any]:
    """A Jacobian that is given, `(1, 2, 2)`; what box and what margins were asked for."""
    seen: dict[str, Any] = {}

    def boxed(*box: Tensor) -> None:
        seen["box"] = box

    class Shares:
        def span(self, ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            seen["ends"] = ends
            return torch.zeros_like(ends[0]), torch.ones_like(ends[0])

    monkeypatch.setattr(chords, "boxed", boxed)
    monkeypatch.setattr(chords, "ranges", lambda *_: {})
    monkeypatch.setattr(chords, "adjoint", lambda *_: (-steep, steep))
    monkeypatch.setattr(chords, "Softmax", Shares)
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_chords_into_the_cube_around_a_sample(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As steep as the gradient there, less what a rival is behind."""
    for seed in range(40):
        x = scattered(1, 2, seed=seed)
        steep = torch.zeros(1, 2, 2, dtype=DOUBLE)
        steep[0, 1] = 0.1 + uniform(2, seed=seed + 40)
        seen = gradients(monkeypatch, steep)
        total = sum(map(Fraction, steep[0, 1].tolist()))
        side = 2.0**-4 * (1 + float(uniform(1, seed=seed + 80)))
        for z in ((0.0, -1.0), (0.0, 0.0)):
            search = search_of(monkeypatch, x, z=z)
            radius = torch.tensor([side], dtype=DOUBLE)
            with rounded(mode):
                plain = float(search._inner(torch.arange(len(radius)), radius)[0])
            reach = torch.cat(seen["box"][1:], 1).amax()
            for centre, below, above in zip(*(v[0].tolist() for v in seen["box"])):
                with rounded(mode):
                    ends = centre - side, centre + side
                assert Fraction(centre) - Fraction(below) <= Fraction(ends[0])
                assert Fraction(centre) + Fraction(above) >= Fraction(ends[1])
            assert Fraction(plain) >= total
            # Almost as far behind as it can catch up in the cube: what is left is small.
            behind = float(total) * (1 - 1e-6) * float(reach)
            search.least = torch.tensor([behind + z[1]], dtype=DOUBLE)
            for error in (0.0, 0.1 * behind):
                search.error = torch.tensor([error], dtype=DOUBLE)
                with rounded(mode):
                    found = float(search._inner(torch.arange(len(radius)), radius)[0])
                gap = Fraction(float(search.gaps[0, 1]))
                lead = Fraction(float(search.least)) - gap - Fraction(error)
                assert Fraction(found) >= total - lead / Fraction(float(reach))
        # A margin that is large beside its move, and none.
        for error, rival, shrink in ((0.0, -9.7, 2.0**-40), (0.0, 0.0, 1.0), (0.25, -9.7, 1.0)):
            search = search_of(monkeypatch, x, z=(0.0, rival), loss="cross_entropy")
            radius = torch.tensor([side * shrink], dtype=DOUBLE)
            search.error = torch.tensor([error], dtype=DOUBLE)
            with rounded(mode):
                search._inner(torch.arange(len(radius)), radius)
            reach = torch.cat(seen["box"][1:], 1).amax()
            least, top = (float(v[0, 1]) for v in seen["ends"])
            gap = Fraction(float(search.gaps[0, 1]))
            move = total * Fraction(float(reach)) + Fraction(error)
            assert Fraction(least) <= gap - move and gap + move <= Fraction(top)


@pytest.mark.parametrize("mode", MODES)
def test_the_slope_along_a_ray_is_rounded_down(mode: str) -> None:
    """Rows that all but cancel, and rows of many terms that add up."""
    for n, seed in ((3, 1), (3, 2), (300, 3)):
        row = 1 + uniform(1, n, seed=seed)
        share = 1 - 1e-9 * uniform(1, n, seed=seed + 10) if n < 10 else 0 * row
        weight = torch.cat([row * share, row])
        graph = perceptron([weight], [torch.zeros(2, dtype=DOUBLE)])
        with rounded(mode):
            found = slopes.ray_slope(graph, INF, [0], 0)
        columns = zip(*weight.tolist())
        exact = sum(abs(Fraction(b) - Fraction(a)) for a, b in columns)
        assert Fraction(found.lower) <= exact <= Fraction(found.upper)


@pytest.mark.parametrize("mode", MODES)
def test_the_slope_along_a_ray_is_a_quotient_rounded_down(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ray is as long as it is, not 1: what is not the rounding of the network."""
    monkeypatch.setattr(slopes, "gamma", lambda _: 0.0)
    for seed in range(8):
        weight = torch.cat([torch.zeros(1, 3).double(), 0.1 + uniform(1, 3, seed=seed)])
        graph = perceptron([weight], [torch.zeros(2, dtype=DOUBLE)])
        with rounded(mode):
            found = slopes.ray_slope(graph, 2.0, [0], 0)
        square = sum(Fraction(v) ** 2 for v in weight[1].tolist())
        assert square * (1 - Fraction(1, 10**9)) < Fraction(found.lower) ** 2 <= square


@pytest.mark.parametrize("mode", MODES)
def test_gains_are_bought_within_the_budget(mode: str) -> None:
    for seed in range(20):
        n = 30
        mu = uniform(n, seed=seed)
        mu = mu / mu.sum()
        root = torch.arange(n)
        gain = 0.1 + uniform(n, seed=seed + 20)
        distance = 0.1 + uniform(n, seed=seed + 40)
        found = Chords(root, torch.zeros(n, 1).double(), gain, distance, root)
        eps = 0.2
        with rounded(mode):
            choice, weight = slopes.allocate_gains(found, mu, eps)
        cost = sum(
            (
                Fraction(float(mu[i])) * Fraction(float(weight[i])) * Fraction(float(distance[k]))
                for i, k in enumerate(choice.tolist())
                if k >= 0
            ),
            start=Fraction(0),
        )
        assert Fraction(eps) * (1 - Fraction(1, 10**9)) < cost <= Fraction(eps)


@pytest.mark.parametrize("mode", MODES)
def test_limits_for_a_population_whose_loss_has_a_large_offset(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cost + least + (top - least) share`: what is left is small beside its terms."""
    one = torch.zeros(1, dtype=DOUBLE)
    for k in range(20):
        least = -1e3 * (1 + float(uniform(1, seed=k)))
        top = 2.0 + float(uniform(1, seed=k + 20))
        share = 1 - 1e-3 * float(uniform(1, seed=k + 40))
        tried: list[float] = []

        def peaks(
            _: float, lam: float, edge: Tensor, tried: list[float] = tried
        ) -> tuple[Tensor, Tensor]:
            tried.append(lam)
            return one, one

        paid = float(uniform(1, seed=k + 60))
        monkeypatch.setattr(curve, "mean_at_least", lambda *_, share=share: np.array([share]))
        monkeypatch.setattr(curve, "mean_at_most", lambda *_, share=share: np.array([share]))
        step = 2.0**-14 * (1 + float(uniform(1, seed=k + 80)))
        monkeypatch.setattr(curve, "steps_down", lambda _, step=step: [step])
        fake: Any = SimpleNamespace(
            mu=one + 1,
            start=one,
            clean=one,
            grid=one,
            order=1.0,
            _evaluated=lambda *_, paid=paid: [(paid, one)],
            peaks=peaks,
        )
        for budget in (0.0, 0.5):
            tried.clear()
            with rounded(mode):
                lower, upper = curve.LossCurve._limits(fake, budget, 0.05, least, top)
            exact = Fraction(least) + (Fraction(top) - Fraction(least)) * Fraction(share)
            cost = Fraction(tried[0]) if budget else Fraction(0)
            assert exact + Fraction(paid) - Fraction(1, 10**6) < lower <= exact + Fraction(paid)
            if exact + cost < top:
                assert exact + cost <= Fraction(upper) < exact + cost + Fraction(1, 10**6)
