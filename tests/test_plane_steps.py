"""Steps between walls against bisections and loops in float64, which share no code with them."""

import math

import pytest
import torch

import wassail.plane_steps as plane_steps_module
from wassail.device import host_waits
from wassail.plane_steps import FIRST, clamped_step, greedy_step, largest_places, soft_threshold


def case(dtype=torch.float64, rows=23, n=64, seed=0):
    """Directions `(rows, n)`, walls `(2, rows, n)` and targets `(2, rows)` of either sign; some
    coordinates stand at a wall, some directions are 0, some targets are out of reach.
    """
    generator = torch.Generator().manual_seed(seed)
    way = torch.rand(rows, n, generator=generator, dtype=dtype) * 2 - 1
    way[torch.rand(rows, n, generator=generator) < 0.2] = 0
    low = -torch.rand(2, rows, n, generator=generator, dtype=dtype)
    high = torch.rand(2, rows, n, generator=generator, dtype=dtype)
    low[torch.rand(2, rows, n, generator=generator) < 0.3] = 0
    high[torch.rand(2, rows, n, generator=generator) < 0.3] = 0
    target = torch.randn(2, rows, generator=generator, dtype=dtype) * 4
    target[:, 0] = 1e3
    target[:, 1] = -1e3
    target[:, 2] = 0
    return way, low, high, target


def bisected(pays, way, low, high, target):
    """`clamp(t way, low, high)` by bisection of `t`."""
    small = torch.zeros_like(target)
    large = torch.full_like(target, 1e9) * target.sign()
    for _ in range(120):
        t = (small + large) / 2
        short = pays(torch.clamp(t[..., None] * way, low, high)).abs() < target.abs()
        small = torch.where(short, t, small)
        large = torch.where(short, large, t)
    return torch.clamp(small[..., None] * way, low, high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["linf", "l2"])
def test_a_stretched_step_pays_its_target(kind, dtype):
    price, low, high, target = case(dtype)
    way = price.sign() if kind == "linf" else price
    t = target / (way * price).sum(-1)
    found = clamped_step(way, low, high, target, t, price)
    wide = [value.double() for value in (way, low, high, target)]
    truth = bisected(lambda step: (price.double() * step).sum(-1), *wide)
    atol = 3e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=atol)
    assert not found[:, 2].any()
    assert (found[:, :2] == truth[:, :2].to(dtype)).all()  # at their walls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stretched_step_has_its_length(dtype):
    way, low, high, target = case(dtype)
    target = target.abs()
    t = target / way.norm(dim=-1)
    found = clamped_step(way, low, high, target, t)
    wide = [value.double() for value in (way, low, high, target)]
    truth = bisected(lambda step: step.norm(dim=-1), *wide)
    atol = 3e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=atol)


def test_many_rounds_and_rows_that_go_on_alone_change_no_row():
    # Walls at distances of many sizes: one row needs many rounds, its neighbours one.
    way = torch.ones(40, 60)
    high = torch.full((1, 40, 60), 9.0)
    high[0, 7] = torch.logspace(-6, 0, 60)
    target = torch.full((1, 40), 3.0)
    target[0, 7] = 0.97 * high[0, 7].sum()
    t = target / 60
    together = clamped_step(way, -high, high, target, t, way)
    alone = [
        clamped_step(way[i : i + 1], -high[:, i : i + 1], high[:, i : i + 1], target[:, i : i + 1],
                t[:, i : i + 1], way[i : i + 1])
        for i in range(40)
    ]  # fmt: skip
    assert torch.equal(together, torch.cat(alone, 1))
    torch.testing.assert_close(together.sum(-1), target, rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [7, 100, 784, 3072])
def test_the_largest_entries_are_found_by_blocks(n):
    size = torch.rand(9, n, generator=torch.Generator().manual_seed(n))
    size[3] = size[3].sort().values
    size[4] = 0
    count = min(FIRST, n)
    values = size.gather(1, largest_places(size, count))
    assert torch.equal(values, size.topk(count, dim=1).values)
    assert all(len(set(row.tolist())) == count for row in largest_places(size, count))


@pytest.mark.parametrize("priced", [True, False])
def test_a_greedy_step_spends_its_budget_on_the_largest_entries(priced):
    way, low, high, budget = case(n=96)
    found = greedy_step(way, low, high, budget, priced)
    for j in range(2):
        for i in range(len(way)):
            money = float(budget[j, i].abs())
            sign = math.copysign(1.0, float(budget[j, i]))
            truth = torch.zeros(96, dtype=torch.float64)
            for k in way[i].abs().argsort(descending=True).tolist():
                side = float(way[i, k].sign()) * sign
                free = float(high[j, i, k] if side > 0 else -low[j, i, k])
                unit = float(way[i, k].abs()) if priced else 1.0
                if side and money > 1e-12:
                    truth[k] = side * min(free, money / unit)
                    money -= abs(float(truth[k])) * unit
            torch.testing.assert_close(found[j, i], truth, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capped", [True, False])
def test_shrunk_sizes_sum_to_the_radius(capped, dtype):
    generator = torch.Generator().manual_seed(3)
    size = torch.rand(31, 80, generator=generator, dtype=dtype) ** 4
    cap = size * torch.rand(31, 80, generator=generator, dtype=dtype) if capped else size
    radius = cap.sum(1) * torch.linspace(0.0, 0.99, 31, dtype=dtype)
    found = soft_threshold(size, cap, radius)
    low = torch.zeros(31, dtype=torch.float64)
    high = torch.ones_like(low)
    for _ in range(100):
        tau = (low + high) / 2
        kept = torch.minimum((size.double() - tau[:, None]).clamp(min=0), cap.double())
        over = kept.sum(1) > radius
        low = torch.where(over, tau, low)
        high = torch.where(over, high, tau)
    atol = 3e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.double(), kept, rtol=0, atol=atol)


def test_a_shrinkage_ends_between_two_neighbouring_numbers(monkeypatch):
    """The sum of one tau is above the radius by more than the noise, and that of the next number
    below it: the search went to and fro for ever.
    """
    rounds = 0

    def counted(v):
        nonlocal rounds
        rounds += 1
        assert rounds < 10_000, "no end"
        return host_waits(v)

    monkeypatch.setattr(plane_steps_module, "host_waits", counted)
    generator = torch.Generator().manual_seed(0)
    size = 0.25 + 0.06 * torch.rand(2000, 64, generator=generator)
    radius = torch.linspace(0.3, 0.9, 2000)
    found = soft_threshold(size, size, radius)
    # The root lies between two floats, 2^-25 apart, for 64 coordinates; and their sum rounds.
    off = (found.double().sum(1) - radius.double()).abs()
    assert (off <= 64 * 2.0**-25 + 64 * 2.0**-24 * radius).all()
