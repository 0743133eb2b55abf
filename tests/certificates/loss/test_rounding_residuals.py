"""Bounds on the losses of regression in every rounding mode, against fractions."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.exact import perceptron, scattered, uniform
from support.rounding import MODES, long, rounded
from wassail.certificates.bound import Bound
from wassail.certificates.loss import growth, residual_cells, residual_certificate
from wassail.certificates.loss.penalty import Penalty, Table
from wassail.certificates.loss.residual_cells import ResidualProblem
from wassail.certificates.loss.residual_certificate import ErrorSlopes
from wassail.certificates.loss.residual_curve import ResidualCurve
from wassail.certificates.loss.residuals import Residuals, signed_network, with_targets
from wassail.certificates.loss.samples import Samples
from wassail.certificates.relax.balls import Balls

INF = math.inf
DOUBLE = torch.float64


def task(loss: str, seed: int = 0, n: int = 40, quantile: float = 0.7) -> Residuals:
    return Residuals(loss, scattered(n, 1, seed=seed), quantile, 0.37)


def exact(loss: Residuals, high: Fraction, low: Fraction) -> Fraction:
    """The loss of errors that are at most so large on either side."""
    a, b = map(Fraction, loss.weights)
    u = max(a * high, b * low, Fraction(0))
    delta = Fraction(loss.delta)
    if loss.loss == "huber":
        return u * u / 2 if u <= delta else delta * (u - delta / 2)
    return u * u if loss.loss == "squared" else u


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["absolute", "pinball", "huber", "squared"])
def test_losses_from_margins_are_rounded_up(loss: str, mode: str) -> None:
    """Small and large errors, those that underflow when squared, and those of delta."""
    one = task(loss)
    lowest = torch.cat([torch.zeros(300, 1, dtype=DOUBLE), -scattered(300, 2, seed=3).abs()], 1)
    lowest[::3] *= 0.3
    lowest[1] = torch.tensor([0.0, -(2.0**-600), 2.0**-600], dtype=DOUBLE)
    lowest[2] = torch.tensor([0.0, -one.delta, one.delta], dtype=DOUBLE)
    with rounded(mode):
        found = one.above(lowest)
    wrong = 0
    for row, value in zip(lowest.tolist(), found.tolist()):
        truth = exact(one, -Fraction(row[1]), -Fraction(row[2]))
        assert truth <= Fraction(value) <= truth * (1 + Fraction(2) ** -44) + Fraction(2) ** -1000
        wrong += Fraction(value) != truth
    assert wrong or loss == "absolute"


@pytest.mark.parametrize("mode", MODES)
def test_targets_cost_no_more_than_they_should(mode: str) -> None:
    graph = signed_network(perceptron([uniform(1, 2, seed=0)], [torch.zeros(1, dtype=DOUBLE)]))
    below = 0
    for k in range(30):
        cost = 0.1 + float(uniform(1, seed=k))
        with rounded(mode):
            moved = with_targets(graph, cost).logits(torch.tensor([[0.0, 0.0, 1.0]], dtype=DOUBLE))
            below += Fraction(1 / cost) * Fraction(cost) < 1
        assert Fraction(float(moved[0, 2])) * Fraction(cost) >= 1
        assert Fraction(float(-moved[0, 1])) * Fraction(cost) >= 1
    assert below or mode == "up"


@pytest.mark.parametrize("mode", MODES)
def test_lines_between_two_radii(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base and reach given: each line holds at both of its ends."""
    n, before, radius = 50, 0.1, 1 / 3
    base = scattered(n, 3, seed=60)
    rho = scattered(n, 3, seed=61).abs()
    base[::2] = rho[::2] * (1 + 1e-15)
    inputs = Balls.make(
        torch.zeros(n, 1, dtype=DOUBLE), torch.full((n,), radius, dtype=DOUBLE), INF, None
    )
    swept = SimpleNamespace(inputs=inputs)
    none = torch.zeros(n, 3, 1, dtype=DOUBLE)
    monkeypatch.setattr(growth, "Sweep", lambda *_: SimpleNamespace(run=lambda: swept))
    monkeypatch.setattr(growth, "margins", lambda *_: (base, base, none))
    monkeypatch.setattr(Balls, "upper", lambda *_: rho.flatten())
    part: Any = SimpleNamespace(
        graph=SimpleNamespace(outputs=3, device=torch.device("cpu")),
        balls=lambda _: inputs,
        rows=torch.zeros(n).long(),
        x=inputs.x,
    )
    with rounded(mode):
        _, near, line = growth.ends_of(part, before, radius, 0)
    ratio = np.longdouble(radius) / np.longdouble(before)
    reach = long(rho)[:, 1:]  # output 0 is no rival of its own
    assert (long(near)[:, 1:] <= long(base)[:, 1:] - reach).all()
    reach = reach * ratio * (1 - np.longdouble(2) ** -60)
    assert (long(line)[:, 1:] <= long(base)[:, 1:] - reach).all()


def grown(one: Residuals, ends: Any, top: Any, margin: float, lift: float, patch: Any) -> Any:
    """The certified side from bounds on margins that are given."""
    n = len(one.y)
    patch.setattr(growth, "ends_of", lambda *_: ends)
    patch.setattr(growth, "lowest_anywhere", lambda *_: top)
    patch.setattr(growth, "steepest_margin", lambda *_: (margin, False))
    errors: Any = SimpleNamespace(
        loss=one,
        graph=SimpleNamespace(outputs=3),
        lowest=lambda *_: torch.zeros(n, 3, dtype=DOUBLE),
        parts=lambda: [None],
    )
    return growth.growth_above(errors, [0.1, 1 / 3], 0, lift, lambda _: None)


@pytest.mark.parametrize("mode", MODES)
def test_what_grows_between_two_radii(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 50
    one = task("absolute", n=n)
    near = -scattered(n, 3, seed=62).abs()
    line = near - scattered(n, 3, seed=63).abs()
    top = torch.full((n, 3), -1e9, dtype=DOUBLE)
    with rounded(mode):
        found = grown(one, (line, near, line), top, 1.0, 0.0, monkeypatch)
    for t in (1, 2):
        step = long(found.grid)[t] - long(found.grid)[t - 1]
        end = long(found.left)[:, t] + long(found.rise)[:, t] * step
        assert (end >= long(-line[:, 1:]).max(1) - np.longdouble(2) ** -58).all()


@pytest.mark.parametrize("mode", MODES)
def test_slopes_of_losses_are_rounded_up(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the square up to the largest error, of the pinball loss, and what executed ones add."""
    for k in range(30):
        largest, margin, lift, quantile = (0.1 + 0.8 * uniform(4, seed=k)).tolist()
        lift *= 2.0**-40
        ends = (torch.zeros(1, 3, dtype=DOUBLE),) * 3
        top = torch.full((1, 3), -largest, dtype=DOUBLE)
        for loss in ("squared", "pinball", "absolute"):
            one = task(loss, n=1, quantile=quantile)
            with rounded(mode):
                found = grown(one, ends, top, margin, lift, monkeypatch)
                steep = max(map(Fraction, one.weights))
            if loss == "squared":
                steep = 2 * (Fraction(largest) + Fraction(lift))
            assert Fraction(found.slope) >= Fraction(margin) * steep
            assert Fraction(found.lift) >= Fraction(lift) * steep
            assert found.slope <= margin * float(steep) * (1 + 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_errors_on_the_whole_domain(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the outputs can be, and targets that nearly cancel it."""
    one = task("absolute", seed=4)
    graph = SimpleNamespace(arithmetic="exact", device=torch.device("cpu"))
    errors: Any = SimpleNamespace(loss=one, residuals=one, graph=graph, bounded=False)
    for k in range(10):
        most = scattered(1, 3, seed=k)
        monkeypatch.setattr(growth, "highest", lambda *_, most=most: most)
        with rounded(mode):
            found = growth.lowest_anywhere(errors, 0)
        assert (long(found) <= -(long(most) + long(one.offsets))).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_ball_that_holds_a_box(mode: str) -> None:
    for k in range(40):
        low, high = (scattered(2, seed=k).sort().values).tolist()
        errors = Samples(None, None, None, INF, (low, high))  # type: ignore[arg-type]
        with rounded(mode):
            found = errors.reach
        assert Fraction(found) >= Fraction(high) - Fraction(low)


@pytest.mark.parametrize("mode", MODES)
def test_lengths_along_a_coupling(mode: str) -> None:
    """Minkowski's bound, of one sample whose squared error is known."""
    for k in range(40):
        root, margin, eps, shift = (0.1 + uniform(4, seed=k)).tolist()
        curve: Any = SimpleNamespace(
            loss="squared",
            order=2.0,
            margin=margin,
            shift=shift,
            mu=torch.ones(1, dtype=DOUBLE),
            start=torch.tensor([root * root], dtype=DOUBLE),
        )
        with rounded(mode):
            found = ResidualCurve.by_lengths(curve, eps)
        start = Fraction(root * root)
        more = Fraction(margin) * Fraction(eps) + Fraction(shift)
        # (sqrt(start) + more)^2 <= found, without a root: 2 more sqrt(start) <= found - the rest.
        rest = Fraction(found) - start - more * more
        assert rest >= 0 and rest * rest >= 4 * more * more * start
        assert found <= float((root + margin * eps + shift) ** 2) * (1 + 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_huber_lie_above_it(mode: str) -> None:
    """At all errors, between the scales, too; and not far above."""
    one = task("huber")
    with rounded(mode):
        pieces = residual_cells._pieces(one)
        least = residual_cells._middle(one.delta)
    h = Fraction(one.delta) / residual_cells.SCALES
    assert Fraction(least) >= h * h / 8
    ends = [(Fraction(0), Fraction(least)), *((Fraction(s), Fraction(c)) for s, _, c in pieces)]
    for (a, low), (b, high) in itertools.pairwise(ends):
        # Between two scales `s u - s^2 / 2` lies below the line through both ends.
        middle = (a + b) / 2
        assert low >= -a * middle + middle * middle / 2
        assert high >= -b * middle + middle * middle / 2
    for u in [k * one.delta / 37 for k in range(60)]:
        top = max(s * Fraction(u) + c for s, c in ends)
        truth = exact(one, Fraction(u), -Fraction(u))
        assert truth <= top <= truth + Fraction(least) * (1 + Fraction(1, 10**6))


@pytest.mark.parametrize("mode", MODES)
def test_multipliers_are_divided_downward(mode: str) -> None:
    for k in range(40):
        lam, scale = (0.1 + uniform(2, seed=k)).tolist()
        with rounded(mode):
            found = residual_cells._divided(Penalty(1.0, lam), scale)
            steep = residual_cells._multiplied(lam, scale)
            slope = ErrorSlopes._scaled(None, Bound(lam, lam, ""), scale)  # type: ignore[arg-type]
        assert Fraction(found.lam) * Fraction(scale) <= Fraction(lam)
        assert Fraction(steep) >= Fraction(lam) * Fraction(scale)
        assert Fraction(slope.lower) <= Fraction(lam) * Fraction(scale) <= Fraction(slope.upper)
    assert residual_cells._divided(Penalty(INF, lam), scale).lam == lam


@pytest.mark.parametrize("mode", MODES)
def test_heights_of_pieces_are_rounded_up(mode: str) -> None:
    """Bounds and targets that nearly cancel, in two scales."""
    for k in range(40):
        bound = float(scattered(1, seed=k))
        y = -bound * (1 + float(scattered(1, seed=k + 50)) * 1e-8)
        weights = Table(3)
        weights.append(np.array([0.0, 1.0, 0.0]))
        weights.append(np.array([0.0, 0.0, 1.0]))
        family: Any = SimpleNamespace(
            weights=weights, bounds=lambda *_, bound=bound: np.array([bound, bound])
        )
        high, low, offset = (float(v) for v in uniform(3, seed=k))
        problem: Any = SimpleNamespace(
            raised=np.array([[0.0, y, y]]),
            pieces=[(high, low, offset * 1e-8)],
            points=np.zeros((1, 1)),
            network=SimpleNamespace(outputs=3),
        )
        problem._scales = lambda *given, one=problem: ResidualProblem._scales(one, *given)
        with rounded(mode):
            found = ResidualProblem._heights(problem, family, 0, Penalty(INF, 1.0))
        for scale, value in zip((high, low), found[0].tolist()):
            truth = Fraction(scale) * (Fraction(bound) + Fraction(y)) + Fraction(offset * 1e-8)
            assert Fraction(value) >= truth


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_cells_know_their_rounding(mode: str) -> None:
    """A network of one layer and targets that nearly cancel its outputs."""
    for seed in range(5):
        graph = signed_network(perceptron([scattered(1, 3, seed=seed)], [scattered(1, seed=seed)]))
        network = graph.piecewise()
        points = uniform(20, 3, seed=seed).numpy()
        for loss in ("absolute", "pinball", "huber"):
            y = network.logits(torch.from_numpy(points))[:, 1:2] + 0.3
            one = Residuals(loss, y, 0.7, 0.37)
            problem: Any = SimpleNamespace(
                network=network,
                residuals=one,
                raised=one.offsets.numpy(),
                atlas=SimpleNamespace(rounding=16 * 2.0**-52),
                factor=one.steepest * (0.37 if loss == "huber" else 1.0),
            )
            problem.atlas.rounding = 1e-6  # one that can be seen
            sizes = np.abs(points) @ np.abs(network.C[1].numpy()) + abs(float(network.e[1]))
            assert (
                ResidualProblem.error_at(problem, points) >= problem.factor * 2e-6 * sizes
            ).all()
            problem.atlas.rounding = 16 * 2.0**-52
            error = ResidualProblem.error_at(problem, points)
            with rounded(mode):
                found = ResidualProblem.at(problem, torch.from_numpy(points), torch.arange(20))
            weight, bias = network.C[1].tolist(), float(network.e[1])
            for point, target, value, slack in zip(
                points.tolist(), y[:, 0].tolist(), found.tolist(), error.tolist()
            ):
                f = sum((Fraction(a) * Fraction(b) for a, b in zip(weight, point)), Fraction(bias))
                truth = exact(one, f - Fraction(target), Fraction(target) - f)
                assert abs(Fraction(value) - truth) <= Fraction(slack)


@pytest.mark.parametrize("mode", MODES)
def test_losses_of_cells_know_the_rounding_of_targets(mode: str) -> None:
    """A network that rounds nothing: what is off comes from the target and the loss."""
    one = torch.ones(1, 1, dtype=DOUBLE)
    network = signed_network(perceptron([one], [torch.zeros(1, dtype=DOUBLE)])).piecewise()
    points = uniform(50, 1, seed=1)
    for loss in ("absolute", "pinball", "huber"):
        rule = Residuals(loss, 3 * uniform(50, 1, seed=2), 0.7, 0.37)
        problem: Any = SimpleNamespace(
            network=network,
            residuals=rule,
            raised=rule.offsets.numpy(),
            atlas=SimpleNamespace(rounding=0.0),
            factor=rule.steepest * (0.37 if loss == "huber" else 1.0),
        )
        error = ResidualProblem.error_at(problem, points.numpy())
        with rounded(mode):
            found = ResidualProblem.at(problem, points, torch.arange(50))
        wrong = 0
        for x, y, value, slack in zip(
            points[:, 0].tolist(), rule.y[:, 0].tolist(), found.tolist(), error.tolist()
        ):
            apart = Fraction(x) - Fraction(y)
            lost = abs(Fraction(value) - exact(rule, apart, -apart))
            wrong += lost > 0
            assert lost <= Fraction(slack)
        assert wrong


def slopes(one: Residuals, **fields: Any) -> ErrorSlopes:
    """A certificate in the making, with these fields only."""
    found = object.__new__(ErrorSlopes)
    for name, value in {"residuals": one, "steep": 1.0, **fields}.items():
        setattr(found, name, value)
    return found


def test_heights_of_lines_pay_for_all_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four operations that each lose nearly a unit: drift and target, a weight, a length, mu."""
    unit = 2.0**-52
    y, length = unit * (1 - 2.0**-6), unit / 2 * (1 - 2.0**-6)
    for drift, weight, mu in (
        ("0x1.000003556219fp+0", "0x1.000001dfaf736p-1", "0x1.3987e1faaeb08p-1"),
        ("0x1.000001967d0cap+0", "0x1.0000023d97536p-1", "0x1.34705aeca1e36p-1"),
        ("0x1.000002f507980p+0", "0x1.0000016facdc4p-1", "0x1.36fb39a8c4b50p-1"),
    ):
        d, w, m = map(float.fromhex, (drift, weight, mu))
        one = Residuals("pinball", torch.tensor([[-y]], dtype=DOUBLE), 1 - w, 1.0)
        assert one.weights[0] == w
        far = torch.full((1, 3), -INF, dtype=DOUBLE)
        drifts = torch.tensor([0, d, 0], dtype=DOUBLE)
        monkeypatch.setattr(residual_certificate, "lowest_anywhere", lambda *_, far=far: far)
        monkeypatch.setattr(
            residual_certificate,
            "shadow",
            lambda _, drifts=drifts: SimpleNamespace(drift=lambda _: drifts),
        )
        errors = SimpleNamespace(
            domain=None,
            norm=2.0,
            x=torch.tensor([[length]], dtype=DOUBLE),
        )
        known = {"infinity": Bound(0.0, 1.0, "")}
        mu_, graph = torch.tensor([m], dtype=DOUBLE), SimpleNamespace(inputs=1)
        work = slopes(one, samples=errors, graph=graph, found=known, mu=mu_)
        with rounded("down"):
            work.find_line()
        line = work.line
        height = (Fraction(d) + Fraction(y)) * Fraction(w) + Fraction(length)
        assert line is not None and line[0] >= 1
        assert Fraction(m) * height <= Fraction(line[1]) <= Fraction(m) * height * (1 + 32 * unit)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", ["absolute", "pinball"])
def test_chords_of_losses_are_rounded_down(
    loss: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of nearly the same size: what they gain is as small as what they are rounded by."""

    def steepest(_: Any, __: Any, chords: Any) -> tuple[float, int]:
        return float((chords.gain / chords.distance).max()) * (1 - 1e-12), 0

    monkeypatch.setattr(residual_certificate, "steepest_of", steepest)
    for k in range(40):
        y = -uniform(1, 1, seed=k) / 3
        one = Residuals(loss, y, 0.3, 1.0)
        outputs = 1 + uniform(1, 1, seed=k + 50) * torch.ones(2, 1, dtype=DOUBLE)
        outputs[1] += 16 * (k % 4) * 2.0**-52
        with rounded(mode):
            apart = outputs - y
            clean, value = one.value(one.largest(torch.cat([apart, -apart], 1)))[:, None]
        columns = (outputs[1:], torch.zeros(1).long(), value, torch.ones_like(value), None)
        known = {"margin": Bound(0.0, 9.0, ""), "infinity": Bound(0.0, 9.0, "")}
        work = slopes(one, found=known, graph=None, samples=SimpleNamespace(x=None))
        with rounded(mode):
            low = work._anchor(clean, columns).lower  # type: ignore[arg-type]
        losses = [
            exact(one, Fraction(f) - Fraction(float(y)), Fraction(float(y)) - Fraction(f))
            for f in outputs[:, 0].tolist()
        ]
        assert Fraction(low) <= losses[1] - losses[0]
