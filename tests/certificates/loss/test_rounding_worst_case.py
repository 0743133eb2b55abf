"""The exact worst case and what it is made of, in every rounding mode, against fractions."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import mpmath  # comes with torch, through sympy
import numpy as np
import pytest
import torch

from support.exact import scattered, uniform
from support.rounding import MODES, rounded
from wassail.certificates.exact.programs import LIFT
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region
from wassail.certificates.loss import problem as problem_file
from wassail.certificates.loss import worst_case
from wassail.certificates.loss.penalty import Atlas, Family, Penalty, Table
from wassail.certificates.loss.problem import Problem
from wassail.losses import cross_entropy

INF = math.inf
DOUBLE = torch.float64
OFF = 1e-6  # a rounding error that can be seen


def numbers(*shape: int, seed: int) -> Any:
    return scattered(*shape, seed=seed).numpy()


def fraction(values: Any) -> Any:
    """Arrays of exact fractions."""
    return np.vectorize(Fraction, otypes=[object])(values)


def atlas_of(seed: int, rounding: float, sizes: bool, norm: float = INF) -> Atlas:
    """One cell in two dimensions, three outputs and two walls; whether its parts are off."""
    parts = {
        "J": numbers(1, 3, 2, seed=seed),
        "q": numbers(1, 3, seed=seed + 100),
        "G": numbers(1, 2, 2, seed=seed + 200),
        "g": numbers(1, 2, seed=seed + 300),
    }
    size = {f"{name}_size": np.abs(v) * (2.0 if sizes else 0.0) for name, v in parts.items()}
    return Atlas(
        **parts, **size, points=np.zeros((1, 2)), rounding=rounding, norm=norm, unbounded=False
    )


def family_of(atlas: Atlas, reach: float) -> Family:
    """The pieces of label 0, before any program is solved."""
    family = object.__new__(Family)
    family.atlas = atlas
    family.label = 0
    family.reach = reach
    family.splits = False
    family.cells = [0]
    family.weights = Table(3)
    family.forms = Table(3)
    family.cuts = Table(5)
    q = np.eye(3)[1]
    turn = q - np.eye(3)[0]
    family.weights.append(q)
    family.forms.append(np.append(turn @ atlas.J[0], turn @ atlas.q[0]))
    return family


@pytest.mark.parametrize("norm", [1.0, INF])
def test_certificates_hold_for_what_the_parts_of_a_cell_really_are(norm: float) -> None:
    """Every part is off by as much as it may be: `f - <u, G x - g>` is still below the cut, and
    no steeper.
    """
    reach = 3.0
    signs = [-1, 1]
    for seed in range(10):
        atlas = atlas_of(seed, OFF, sizes=True, norm=norm)
        family = family_of(atlas, reach)
        u = np.abs(numbers(2, seed=seed + 400))
        place = family._cut(0, u)
        row = family.cuts.rows[place]
        w, constant, nu = fraction(row[:2]), Fraction(row[2]), Fraction(row[3])
        off = Fraction(OFF)
        for s in signs:
            for t in signs:
                J = fraction(atlas.J[0]) + off * np.array([[-s], [s], [0]]) * fraction(
                    atlas.J_size[0]
                )
                q = fraction(atlas.q[0]) + off * np.array([-t, t, 0]) * fraction(atlas.q_size[0])
                G = fraction(atlas.G[0]) - s * off * fraction(atlas.G_size[0])
                g = fraction(atlas.g[0]) + t * off * fraction(atlas.g_size[0])
                slope = J[1] - J[0] - fraction(u) @ G
                start = q[1] - q[0] + fraction(u) @ g
                length = np.abs(slope).max() if norm == 1 else np.abs(slope).sum()
                assert nu >= length
                for x in ((a * Fraction(reach), b * Fraction(reach)) for a in signs for b in signs):
                    assert w @ np.array(x) + constant >= slope @ np.array(x) + start
        assert float(nu) < float(np.abs(w).sum()) * (1 + 1e-2) + 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_lengths_of_certificates_are_rounded_up(mode: str) -> None:
    """Nothing is off but the sum itself."""
    wrong = 0
    for seed in range(20):
        n = 300
        atlas = Atlas(
            J=np.stack([np.zeros(n), numbers(n, seed=seed), np.zeros(n)])[None],
            q=np.zeros((1, 3)),
            G=np.zeros((1, 1, n)),
            g=np.zeros((1, 1)),
            J_size=np.zeros((1, 3, n)),
            q_size=np.zeros((1, 3)),
            G_size=np.zeros((1, 1, n)),
            g_size=np.zeros((1, 1)),
            points=np.zeros((1, n)),
            rounding=(n + 8) * 2.0**-52,
            norm=INF,
            unbounded=False,
        )
        family = family_of(atlas_of(0, 0.0, sizes=False), 1.0)
        family.atlas = atlas
        family.forms = Table(n + 1)
        family.cuts = Table(n + 3)
        family.forms.append(np.append(atlas.J[0, 1], 0.0))
        with rounded(mode):
            place = family._cut(0, np.zeros(1))
            row = family.cuts.rows[place]
            plain = float(np.linalg.norm(atlas.J[0, 1], 1))
        exact = sum(abs(Fraction(v)) for v in atlas.J[0, 1].tolist())
        wrong += Fraction(plain) < exact
        assert Fraction(row[-2]) >= exact
    assert wrong or mode == "up"


def test_cells_are_not_farther_away_than_their_walls_really_are() -> None:
    """Walls that are off by as much as they may be, toward the point."""
    seen = 0
    for norm in (1.0, INF):
        for seed in range(30):
            atlas = atlas_of(seed, OFF, sizes=True, norm=norm)
            x = 100 * numbers(2, seed=seed + 500)
            found = Fraction(float(atlas.away(x)[0]))
            off = Fraction(OFF)
            point = fraction(x)
            real = Fraction(0)
            for k in range(2):
                toward = np.where(x > 0, 1, -1)
                row = fraction(atlas.G[0, k]) - off * toward * fraction(atlas.G_size[0, k])
                wall = Fraction(atlas.g[0, k]) + off * Fraction(atlas.g_size[0, k])
                excess = row @ point - wall
                length = np.abs(row).max() if norm == 1 else np.abs(row).sum()
                # And one whose row is longer than was computed.
                longer = fraction(np.abs(atlas.G[0, k])) + off * fraction(atlas.G_size[0, k])
                reach = longer.max() if norm == 1 else longer.sum()
                moved = point @ fraction(atlas.G[0, k]) - Fraction(atlas.g[0, k])
                least = min(excess / length, moved / reach)
                real = max(real, least)
            seen += real > 0
            assert found <= real
    assert seen


def layered(seed: int) -> Piecewise:
    """Three layers, all of whose neurons are active in the unit box."""
    sizes = [3, 6, 6, 2]
    layers = [
        (uniform(b, a, seed=seed + a + 10 * b + i), 0.1 + uniform(b, seed=seed + i + 50))
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    return Piecewise.from_layers(layers)


@pytest.mark.parametrize("mode", MODES)
def test_an_atlas_knows_how_far_off_its_maps_are(mode: str) -> None:
    wrong = 0
    for seed in range(4):
        network = layered(seed)
        region = Region.make((0.0, 1.0), 3)
        with rounded(mode):
            atlas = Atlas.make(network, region, INF, 10)
        assert len(atlas.J) == 1
        a, b, c, d = (fraction(getattr(network, name).numpy()) for name in "ABCD")
        v = a
        for _ in range(2):
            v = a + b @ v
        exact = c + d @ v
        gap = np.abs(fraction(atlas.J[0]) - exact)
        wrong += (gap > 0).any()
        assert (gap <= Fraction(atlas.rounding) * fraction(atlas.J_size[0])).all()
        # By how much a loss may be off: that of logits that cancel.
        problem = SimpleNamespace(network=network, atlas=atlas)
        points = uniform(20, 3, seed=seed).numpy()
        error = Problem.error_at(problem, points)  # type: ignore[arg-type]
        with rounded(mode):
            z = network.logits(torch.from_numpy(points)).numpy()
        w = fraction(network.c.numpy())
        for _ in range(2):
            w = fraction(network.c.numpy()) + b @ w
        truth = fraction(points) @ exact.T + (d @ w + fraction(network.e.numpy()))
        lost = np.abs((fraction(z) - truth) @ np.array([1, -1]))
        assert (lost <= fraction(error)).all() and (lost > 0).any()
    assert wrong


@pytest.mark.parametrize("mode", ["down", "up"])
def test_a_wall_that_is_nothing_but_rounding_is_left_out(mode: str) -> None:
    """`b (a x) - a (b x)` is 0: scaled to length one its rounding would cut the cell in two."""
    noise = 0
    for seed in range(10):
        a, b = (0.5 + uniform(2, seed=seed)).tolist()
        network = Piecewise(
            torch.tensor([[a], [b], [0.0]], dtype=DOUBLE),
            torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [b, -a, 0.0]], dtype=DOUBLE),
            torch.tensor([0.0, 0.0, 1.0], dtype=DOUBLE),
            torch.zeros(2, 1, dtype=DOUBLE),
            torch.ones(2, 3, dtype=DOUBLE),
            torch.zeros(2, dtype=DOUBLE),
            torch.zeros(3, dtype=DOUBLE),
            torch.tensor([0, 0, 1]),
        )
        with rounded(mode):
            atlas = Atlas.make(network, Region.make((0.1, 1.0), 1), INF, 10)
            noise += float(network.affine(torch.ones(1, 3, dtype=torch.bool))[0][0, 2, 0]) != 0
        assert (atlas.G[:, 2] == 0).all() and (atlas.g[:, 2] > 0).all()
    assert noise


@pytest.mark.parametrize("mode", MODES)
def test_conjugates_are_rounded_up(mode: str) -> None:
    for seed in range(30):
        nu, lam = (0.5 + uniform(2, seed=seed)).tolist()
        with rounded(mode):
            wall = float(Penalty(INF, lam).conjugate(np.array(nu)))
            square = float(Penalty(2.0, lam).conjugate(np.array(nu)))
        assert Fraction(wall) >= Fraction(nu) * Fraction(lam)
        assert Fraction(square) >= Fraction(nu) ** 2 / (4 * Fraction(lam))
    # A certificate that is steeper than the multiplier by rounding only is one.
    assert Penalty(1.0, lam).conjugate(np.array(lam * (1 + LIFT / 2))) == 0


@pytest.mark.parametrize("mode", MODES)
def test_tangents_of_the_entropy_lie_above_it(mode: str) -> None:
    """At the barycentre, where they touch it: of many classes, and of nearly one only."""
    family = object.__new__(Family)
    family.splits = True
    for seed in range(10):
        many = uniform(4, 200, seed=seed).numpy()
        few = np.array([[1 - d, d] for d in (1e-10 * uniform(2, seed=seed)).tolist()])
        for q in (many / many.sum(1, keepdims=True), few):
            family.weights = Table(q.shape[1])
            for row in q:
                family.weights.append(row)
            family.leaves = Table(len(q))
            family.offsets = Table(len(q))
            with rounded(mode):
                family._leaf(np.arange(len(q)))
            with mpmath.workdps(40):
                mean = [sum(map(mpmath.mpf, column)) / len(q) for column in q.T.tolist()]
                total = sum(mean)
                entropy = -sum(m * mpmath.log(m / total) for m in mean)
                above = sum(map(mpmath.mpf, family.offsets.rows[0].tolist())) / len(q)
                assert above >= entropy and above < entropy * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_averages_and_plans(mode: str) -> None:
    """An average from above; a plan that costs no more than its budget, to the last digit."""
    for seed in range(20):
        n = 40
        mu = (uniform(n, seed=seed) / uniform(n, seed=seed).sum()).numpy()
        values = numbers(n, seed=seed + 20)
        pools = []
        for i in range(n):
            pool = Table(3)
            pool.append(np.array([0.0, 0.0, 0.0]))
            pool.append(np.append(uniform(2, seed=100 * seed + i).numpy() + 0.1, 0.0))
            pools.append(pool)
        problem = SimpleNamespace(mu=mu, pools=pools)
        budget = 0.3
        with rounded(mode):
            mean = Problem.average(problem, values)  # type: ignore[arg-type]
            plan, _ = Problem.allocate(problem, budget, 1.0)  # type: ignore[arg-type]
        assert Fraction(mean) >= sum(map(lambda a, b: Fraction(a) * Fraction(b), mu, values))
        cost = sum(Fraction(mass) * Fraction(pools[i].rows[at, 1]) for i, at, mass in plan)
        assert Fraction(budget) * (1 - Fraction(1, 10**9)) < cost <= Fraction(budget)


@pytest.mark.parametrize("mode", MODES)
def test_the_steepest_chord_to_a_known_point_is_rounded_down(mode: str) -> None:
    for seed in range(30):
        pool = Table(3)
        pool.append(np.array([0.0, 0.0, 0.0]))
        gain, distance = (0.1 + uniform(2, seed=seed)).tolist()
        pool.append(np.array([gain, distance, 0.0]))
        problem = SimpleNamespace(
            pools=[pool],
            clean=np.zeros(1),
            errors=np.zeros(1),
            atlas=SimpleNamespace(rounding=2.0**-46),
            error_at=lambda points: np.zeros(len(points)),
        )
        with rounded(mode):
            found, _ = Problem.steepest_chord(problem, 0)  # type: ignore[arg-type]
        assert Fraction(found) * Fraction(distance) <= Fraction(gain)


@pytest.mark.parametrize("mode", MODES)
def test_samples_that_are_not_reached_in_time_cost_what_the_steepest_piece_says(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem_file.clock, "out_of_time", lambda: True)
    for seed in range(30):
        clean, error, steep, lam = (0.1 + uniform(4, seed=seed)).tolist()
        for sign in (1, -1):
            problem: Any = SimpleNamespace(
                clean=np.array([sign * clean]),
                errors=np.array([error]),
                steepest=steep,
                highest=lambda *_: -INF,
            )
            with rounded(mode):
                found = Problem.evaluate(problem, 0, Penalty(INF, lam), 0.0)
            truth = Fraction(sign * clean) + Fraction(error) + Fraction(steep) * Fraction(lam)
            assert truth <= Fraction(found) < truth + Fraction(1, 10**9)


def test_chords_of_pieces_pay_for_multipliers_that_were_lifted() -> None:
    """Certificates hold for a multiplier that is larger by `LIFT`."""
    for lam in (0.3, 0.7, 1.1):
        family = SimpleNamespace(
            cuts=SimpleNamespace(rows=np.array([[0.0, -1.0, 2.0, 0.0]])),
            plain=[0],
            cells=[0],
            bounds=lambda *_: np.array([-5.0]),
        )
        problem = SimpleNamespace(
            families={0: family},
            y=torch.tensor([0]),
            points=np.zeros((1, 1)),
            clean=np.zeros(1),
            errors=np.zeros(1),
            atlas=SimpleNamespace(away=lambda _: np.ones(1)),
        )
        assert Problem._margin_chord(problem, 0, lam) >= lam * (1 + LIFT)  # type: ignore[arg-type]


def smooth_problem(J: Any, rounding: float) -> SimpleNamespace:
    """Cross entropy at a sample whose first two logits are equal, a third one far below."""
    logits = torch.tensor([[0.0, 0.0, -2000.0]], dtype=DOUBLE)
    return SimpleNamespace(
        points=np.zeros((1, 2)),
        norm=INF,
        clean=np.zeros(1),
        errors=np.zeros(1),
        network=SimpleNamespace(logits=lambda _: logits, outputs=3),
        x=torch.zeros(1, 2, dtype=DOUBLE),
        y=torch.tensor([0]),
        loss=cross_entropy,
        atlas=SimpleNamespace(
            rounding=rounding, J=J, J_size=np.abs(J), away=lambda _: np.zeros(len(J))
        ),
    )


def test_chords_of_cross_entropy_hold_for_what_gradients_really_are() -> None:
    for seed in range(10):
        J = numbers(1, 3, 2, seed=seed)
        problem = smooth_problem(J, OFF)
        found = Problem._smooth_chord(problem, 0, 0.0, 0.0)  # type: ignore[arg-type]
        step = fraction(J[0, 1]) - fraction(J[0, 0])
        off = Fraction(OFF) * (np.abs(fraction(J[0, 1])) + np.abs(fraction(J[0, 0])))
        assert Fraction(found) >= (np.abs(step) + off).sum() / 2
        for lam in (1e3, 1.7e3):
            chord = Problem._smooth_chord(problem, 0, lam, 0.0)  # type: ignore[arg-type]
            assert chord >= lam * (1 + LIFT)
        # No gradient, and rows that are far apart: it turns quickly.
        far = 1e12 * np.abs(J)
        far[0, 1] = far[0, 0]
        problem = smooth_problem(far, OFF)
        found = Problem._smooth_chord(problem, 0, 0.0, 0.0)  # type: ignore[arg-type]
        apart = np.abs(fraction(far[0, 2]) - fraction(far[0, 0]))
        off = Fraction(OFF) * (np.abs(fraction(far[0, 2])) + np.abs(fraction(far[0, 0])))
        assert Fraction(found) >= (apart + off).sum() ** 2 * Fraction(2.0**-30) / 8


@pytest.mark.parametrize("mode", MODES)
def test_upper_sides_of_the_outer_problem(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the steepest piece, and by a multiplier: both products are rounded up, and the
    multiplier is lifted.
    """
    seen: list[float] = []

    def report(plan: Any, upper: float, lam: float, order: float) -> Any:
        seen.append(upper)
        return SimpleNamespace(cost=0.0)

    for seed in range(20):
        steep, eps = (0.1 + uniform(2, seed=seed)).tolist()
        fake = SimpleNamespace(
            average=lambda values: 0.0,
            clean=np.zeros(1),
            errors=np.zeros(1),
            steepest=steep,
            flattest=steep,
            unbounded=False,
            dual=lambda penalty, _: INF if penalty.order == INF else 0.0,
            best=lambda _: [],
            report=report,
            allocate=lambda *_: ([], 0.0),
            value=lambda _: 0.0,
            late=lambda: True,
            tell=lambda share: None,
        )
        monkeypatch.setattr(worst_case, "Problem", lambda *_, fake=fake: fake)
        with rounded(mode):
            worst_case.worst_case_network(
                None,  # type: ignore[arg-type]
                torch.zeros(1, 1),
                torch.zeros(1),
                norm=2.0,
                order=INF,
                eps=eps,
            )
            upper, lam, _ = worst_case._descend(fake, eps, 1.0, INF, 1e-6)  # type: ignore[arg-type]
        assert Fraction(seen[-1]) >= Fraction(steep) * Fraction(eps)
        lifted = Fraction(steep) * (1 + Fraction(LIFT))
        assert Fraction(upper) >= lifted * Fraction(eps) and Fraction(lam) >= lifted
