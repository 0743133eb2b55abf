import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from wassail import Threat
from wassail.errors import InputError
from wassail.evaluation.intervals import _widened, compare
from wassail.transport.allocation import knapsack
from wassail.transport.bootstrap import Rule, accuracy, draws, interval
from wassail.transport.distribution import Distribution

INF = math.inf


def some(n: int, seed: int, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances with wrong samples, missing flips and, if wanted, many equal ones."""
    generator = torch.Generator().manual_seed(seed)
    d = torch.rand(n, dtype=torch.float64, generator=generator)
    d = (8 * d).round() / 8 if ties else d
    chance = torch.rand(n, generator=generator)
    d = torch.where(chance < 0.1, 0.0, torch.where(chance > 0.9, INF, d))
    return d == 0, d


def run(d: torch.Tensor, y: torch.Tensor | None = None, **other: Any) -> Any:
    """What `compare` reads of an evaluation."""
    n = len(d)
    y = torch.zeros(n, dtype=torch.int64) if y is None else y
    given = {
        "name": "m",
        "ids": tuple(map(str, range(n))),
        "y": y,
        "predicted": y + (d == 0),
        "distances": d,
        "mu": torch.full((n,), 1 / max(n, 1), dtype=torch.float64),
        "threats": (Threat(2, 1, 0.1),),
        "criterion": None,
        "targets": None,
        "curve": lambda order: SimpleNamespace(radii=None),
    }
    return SimpleNamespace(**(given | other))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("order", [1, 2, 7.5, 500, INF])
def test_every_resample_is_the_knapsacks_answer(order: float, ties: bool) -> None:
    for seed, eps in enumerate([1e-3, 0.1, 0.4, 2.0]):
        wrong, d = some(40, seed, ties)
        threat = Threat(2, order, eps)
        rule = Rule.of(wrong, d, threat, None)
        (counts,) = draws(torch.full((40,), 1 / 40, dtype=torch.float64), 40, 30, seed)
        found = rule.accuracies(counts[:, rule.order])
        for row, value in zip(counts, found.tolist()):
            mu = row / 40
            weights = knapsack(d, eps, order, mu)
            assert abs(1 - float((mu * weights).sum()) - value) < 1e-12


def test_the_mean_of_the_contributions_is_the_accuracy() -> None:
    for seed in range(20):
        wrong, d = some(30, seed, ties=seed % 2 == 0)
        mu = torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for order, eps in [(1.0, 0.1), (2.0, 0.3), (3.0, 5.0), (INF, 0.2)]:
            threat = Threat(2, order, eps)
            rule = Rule.of(wrong, d, threat, None)
            share = mu / mu.sum()
            assert (
                abs(
                    float((share * rule.contributions(share)).sum())
                    - accuracy(mu, wrong, d, threat)
                )
                < 1e-12
            )


def test_a_fixed_share_is_linear() -> None:
    wrong = torch.tensor([True, False, False, False])
    d = torch.tensor([0.0, 5.0, INF, 5.0])
    assert accuracy(None, wrong, d, Threat(2, 1, 0.1), share=0.5) == 0.5
    assert (
        accuracy(torch.tensor([0.0, 1.0, 1.0, 0.0]), wrong, d, Threat(2, 1, 0.1), share=0.25)
        == 0.875
    )
    assert accuracy(None, wrong[:0], d[:0], Threat(2, 1, 0.1)) != accuracy(
        None, wrong[:0], d[:0], Threat(2, 1, 0.1)
    )  # NaN


@pytest.mark.parametrize(("order", "share"), [(1.0, None), (2.0, None), (INF, None), (1.0, 0.5)])
def test_agrees_with_the_distributions_own_bootstrap(order: float, share: float | None) -> None:
    wrong, d = some(150, 3)
    threat = Threat(2, order, 0.2)
    weights = knapsack(d, 0.2, order) if share is None else torch.isfinite(d) * share
    y = torch.zeros(150, dtype=torch.int64)
    none = torch.zeros(150, dtype=torch.int64)
    x = torch.zeros(150, 1)
    old = Distribution(
        x,
        y,
        x,
        weights,
        d,
        wrong.long(),
        torch.isfinite(d).long(),
        torch.full((150,), 1 / 150, dtype=torch.float64),
        none,
        none,
        none,
        threat,
        "test",
        "knapsack" if share is None else "fixed",
    )
    assert accuracy(None, wrong, d, threat, share) == pytest.approx(old.accuracy, abs=1e-12)
    low, high = interval(None, wrong, d, threat, share)
    assert low < old.accuracy < high
    assert old.interval() == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize("share", [None, 0.5])
def test_a_distribution_with_no_flip_has_the_binomial_end(share: float | None) -> None:
    """All 500 samples correct: 1.0 .. 1.0 would claim that no flip can exist."""
    n = 500
    x = torch.zeros(n, 1)
    none = torch.zeros(n, dtype=torch.int64)
    found = Distribution(
        x,
        none,
        x,
        torch.zeros(n, dtype=torch.float64),
        torch.full((n,), INF, dtype=torch.float64),
        none,
        none,
        torch.full((n,), 1 / n, dtype=torch.float64),
        none,
        none,
        none,
        Threat(2, 1, 0.2),
        "test",
        "knapsack" if share is None else "fixed",
    )
    low, high = found.interval()
    assert high == 1 and low == pytest.approx(stats.binomtest(n, n).proportion_ci().low, abs=1e-9)


def test_plain_accuracy_has_binomial_percentiles() -> None:
    d = torch.where(torch.arange(200) < 60, 0.05, INF).double()
    low, high = interval(None, d == 0, d, Threat(2, INF, 0.1), resamples=20_000)
    want = [1 - stats.binom.ppf(q, 200, 0.3) / 200 for q in (0.975, 0.025)]
    assert abs(low - want[0]) <= 0.005 and abs(high - want[1]) <= 0.005  # one sample


def test_sample_weights_matter() -> None:
    d = torch.tensor([0.0, INF] * 50, dtype=torch.float64)
    mu = torch.tensor([3.0, 1.0] * 50)
    low, high = interval(mu, d == 0, d, Threat(2, 1, 0.1))
    assert low < 0.25 < high < 0.4
    assert accuracy(mu, d == 0, d, Threat(2, 1, 0.1)) == pytest.approx(0.25, abs=1e-14)


@pytest.mark.parametrize("order", [1.0, INF])
def test_a_wrong_sample_is_lost_whatever_its_distance(order: float) -> None:
    wrong = torch.tensor([True, True, False])
    d = torch.tensor([INF, 0.5, INF])
    assert accuracy(None, wrong, d, Threat(2, order, 0.1)) == 1 / 3


@pytest.mark.parametrize("order", [1.0, INF])
def test_counts_are_exact(order: float) -> None:
    for wrong in range(101):
        d = torch.where(torch.arange(100) < wrong, 0.0, INF).double()
        assert accuracy(None, d == 0, d, Threat(2, order, 0.1)) == (100 - wrong) / 100


def test_no_flip_among_n_samples_is_no_proof() -> None:
    none = torch.full((100,), INF, dtype=torch.float64)
    every = torch.full((100,), 1e-4, dtype=torch.float64)
    right = torch.zeros(100, dtype=torch.bool)
    for order in (1.0, INF):
        low, high = interval(None, right, none, Threat(2, order, 0.1))
        assert high == 1 and low == pytest.approx(
            stats.beta.ppf(0.025, 100, 1), abs=1e-12
        )  # Clopper and Pearson
        low, high = interval(None, right, every, Threat(2, order, 0.1))
        assert low == 0 and high == pytest.approx(1 - stats.beta.ppf(0.025, 100, 1), abs=1e-12)


def test_same_seed_same_interval_and_narrower_for_a_lower_level() -> None:
    wrong, d = some(100, 1)
    threat = Threat(2, 1, 0.1)
    assert interval(None, wrong, d, threat, seed=3) == interval(None, wrong, d, threat, seed=3)
    assert interval(None, wrong, d, threat, seed=3) != interval(None, wrong, d, threat, seed=4)
    wide = interval(None, wrong, d, threat)
    narrow = interval(None, wrong, d, threat, level=0.5)
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_coverage_of_the_interval() -> None:
    """About 95 of 100 intervals hold the accuracy of the population, which is known in closed
    form.
    """
    threat = Threat(2, 1, 0.1)
    truth = 1 - math.sqrt(
        0.2
    )  # uniform distances: the budget buys those below u with u^2 / 2 = 0.1
    hits = 0
    for seed in range(200):
        d = torch.rand(80, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        low, high = interval(None, d < 0, d, threat, resamples=200, seed=seed)
        hits += low <= truth <= high
    assert (
        0.89 <= hits / 200 <= 0.99
    )  # 95 % within four standard errors, and the percentile bootstrap is a little short


def test_two_models_on_the_same_samples() -> None:
    rng = np.random.default_rng(0)
    hard = torch.from_numpy(rng.random(300))  # how hard a sample is, for both
    a = run(hard * 1.02)
    b = run(hard)
    threat = Threat(2, 1, 0.1)
    found = compare(a, b, threat)
    assert found.difference == pytest.approx(
        accuracy(None, hard < 0, hard * 1.02, threat) - accuracy(None, hard < 0, hard, threat)
    )
    assert (
        found.interval[0] <= found.difference <= found.interval[1]
        and found.n == 300
        and found.threat == threat
    )
    alone = interval(None, hard < 0, hard, threat)
    assert found.interval[1] - found.interval[0] < 0.2 * (
        alone[1] - alone[0]
    )  # that is what pairing is for
    assert found.p_value < 0.01 and compare(b, a, threat).difference == -found.difference
    same = compare(a, a, threat)
    assert (same.difference, same.interval, same.p_value) == (0.0, (0.0, 0.0), 1.0)
    assert "300 samples" in str(found)


@pytest.mark.parametrize("resamples", [1, 9, 99])
def test_the_p_value_is_never_zero(resamples: int) -> None:
    """The observed signs are one of the draws: with B others the p-value is at least 1 / (B +
    1).
    """
    found = compare(
        run(torch.full((60,), 1.0).double()),
        run(torch.full((60,), 0.01).double()),
        Threat(2, INF, 0.1),
        resamples=resamples,
    )
    assert found.difference == 1.0 and found.p_value == 1 / (
        resamples + 1
    )  # no draw of 60 signs comes near


def test_at_order_inf_the_test_is_mcnemars() -> None:
    """12 samples only the first gets right, 3 only the second, 85 alike."""
    a = torch.cat([torch.full((12,), 1.0), torch.full((3,), 0.01), torch.full((85,), 0.5)]).double()
    b = torch.cat([torch.full((12,), 0.01), torch.full((3,), 1.0), torch.full((85,), 0.5)]).double()
    found = compare(run(a), run(b), Threat(2, INF, 0.1), resamples=20_000)
    assert found.difference == pytest.approx(0.09)
    assert found.p_value == pytest.approx(
        stats.binomtest(3, 15).pvalue, abs=4 * math.sqrt(0.035 / 20_000)
    )


@pytest.mark.parametrize("shape", ["alike", "other"])
def test_size_and_power_of_the_test(shape: str) -> None:
    """Two models of equal accuracy: 5 % false alarms at 5 %, also if their distances are
    distributed quite differently.

    Uniform distances on [0, 1] lose u = sqrt(0.2) of their mass at eps = 0.1, order 1: u^2 / 2 =
    0.1. The other model has 30 % wrong already and the rest uniform on [c, c + 1]: it loses as much
    where 0.7 (u - c) = sqrt(0.2) - 0.3 and 0.7 (u^2 - c^2) / 2 = 0.1, at quite another price u.
    """
    threat = Threat(2, 1, 0.1)
    rng = np.random.default_rng(1)
    width = (math.sqrt(0.2) - 0.3) / 0.7
    c = (0.2 / (0.7 * width) - width) / 2

    def draw(scale: float) -> tuple[Any, Any]:
        common = rng.random(100)
        own = rng.random(100)
        a = torch.from_numpy(np.where(rng.random(100) < 0.5, common, own))
        b = torch.from_numpy(np.where(rng.random(100) < 0.5, common, rng.random(100)))
        if shape == "other":
            b = torch.where(b < 0.3, 0.0, c + (b - 0.3) / 0.7)
        return run(a * scale), run(b)

    rejected = np.mean(
        [compare(*draw(1.0), threat, resamples=99).p_value <= 0.05 for _ in range(300)]
    )
    assert 0.01 <= rejected <= 0.10  # 5 % within four standard errors
    power = np.mean([compare(*draw(2.0), threat, resamples=99).p_value <= 0.05 for _ in range(80)])
    assert power > 0.6


def test_refuses_what_cannot_be_compared() -> None:
    d = torch.rand(4, dtype=torch.float64)
    threat = Threat(2, 1, 0.1)
    with pytest.raises(InputError, match="different samples"):
        compare(run(d), run(d, ids=("0", "1", "3", "2")), threat)
    with pytest.raises(InputError, match="different samples"):
        compare(run(d), run(d, torch.tensor([0, 1, 0, 0])), threat)
    with pytest.raises(InputError, match="weigh"):
        compare(run(d), run(d, mu=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)), threat)
    with pytest.raises(InputError, match="norm and domain"):
        compare(run(d), run(d, threats=(Threat("inf", 1, 0.1),)), threat)
    with pytest.raises(InputError, match="norm and domain"):
        compare(run(d), run(d), Threat(2, 1, 0.1, None))
    with pytest.raises(InputError, match="resamples"):
        compare(run(d), run(d), threat, resamples=0)
    with pytest.raises(InputError, match="one number >= 0 a sample"):
        interval(None, d == 0, -d, threat)
    assert math.isnan(compare(run(d[:0]), run(d[:0]), threat).difference)


def test_the_interval_of_a_difference_covers_as_often_as_it_says() -> None:
    """Few samples, where bare percentiles cover too rarely: two runs of a known population."""
    rng = np.random.default_rng(3)
    threat = Threat(2, math.inf, 0.5)
    true = 0.5 - 0.6  # a sample outlasts eps with probability 0.5 in a, and 0.6 in b
    covered = 0
    repeats = 200
    for seed in range(repeats):
        hard = rng.random(40)
        a = torch.from_numpy(np.where(hard < 0.5, 1.0, 0.1))
        b = torch.from_numpy(np.where((hard < 0.45) | (hard > 0.85), 1.0, 0.1))
        low, high = compare(run(a), run(b), threat, resamples=300, seed=seed).interval
        covered += low <= true <= high
    assert covered >= 0.95 * repeats - 3 * math.sqrt(repeats * 0.95 * 0.05)
    assert covered < repeats or high - low < 0.7


def test_widening_never_narrows() -> None:
    """Percentiles on one side of the center, and levels that round to 0 or 1."""
    for center, low, high in ((0.0, 0.2, 0.4), (0.0, -0.4, -0.2), (0.1, 0.0, 0.3)):
        for level in (1e-20, 0.5, 0.95, 1 - 1e-9, 1 - 2.0**-53):
            wide = _widened(center, low, high, level, 4.0)
            assert -1 <= wide[0] <= low and high <= wide[1] <= 1
