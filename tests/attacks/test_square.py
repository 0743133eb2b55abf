"""The Square attack: closed forms, a plain rewriting of the paper beside it, shapes, budgets,
broken parts.
"""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from wassail.attacks import pointwise as pointwise_module
from wassail.attacks import square as square_module
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.square import _blocks, _bumps, _images, _Moves, _sides, square, square_attack
from wassail.errors import InputError
from wassail.geometry import distances, inner, steepest
from wassail.losses import ASCENTS, margin
from wassail.network import Network, generators
from wassail.testing import LinearClassifier, check_attack, samples
from wassail.threat import Threat

INF = math.inf
NORMS = (1.0, 2.0, INF)
# On images of 2 x 2 pixels the bumps of l1 are always the whole image and cannot single out a
# pixel: there it gets vectors.
SHAPES = {1.0: (12,), 2.0: (3, 2, 2), INF: (3, 2, 2)}


def nothing(share: float) -> None:
    """No progress to report."""


def conform(norm: float, domain=(0.0, 1.0), queries: int = 80) -> None:
    attack = functools.partial(square, queries=queries)
    check_attack(
        attack, norms=(norm,), orders=(INF,), domains=(domain,), classes=(4,), shape=SHAPES[norm]
    )


@pytest.mark.slow_cases("None-1.0", "domain0-2.0", "None-2.0", "domain0-1.0", "None-inf")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [(0.0, 1.0), None])
def test_conformance(norm: float, domain) -> None:
    conform(norm, domain)


def test_conformance_two_classes_and_orders() -> None:
    check_attack(
        functools.partial(square, queries=60), norms=(INF,), domains=((0.0, 1.0),), classes=(2,)
    )


def test_a_one_sided_sign_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(
        square_module, "_signs", lambda u, like: torch.ones_like(u, dtype=like.dtype)
    )
    with pytest.raises(AssertionError, match="stays where"):
        conform(INF)


@pytest.mark.parametrize(("norm", "name"), [(INF, "clip"), (2.0, "clip"), (1.0, "project")])
def test_a_broken_projection_is_caught(norm: float, name: str, monkeypatch) -> None:
    monkeypatch.setattr(square_module, name, lambda point, *others: point)
    with pytest.raises(AssertionError):
        conform(norm)


def test_the_worst_corner_of_a_linear_classifier() -> None:
    """Once the intervals are single coordinates, linf search on a linear model ends at the best
    corner, box included.
    """
    for domain in (None, (0.0, 1.0)):
        model = LinearClassifier.random(2, 7, seed=1)
        x, _ = samples(20, (7,), 2)
        y = model(x).argmax(1)
        eps = 0.9 * float(model.distances(x, y, INF, domain).min())
        found = square(model, x, y, Threat(INF, INF, eps, domain), queries=600)
        assert found.accuracy == 1 and (found.forwards == 602).all()
        w = (model.weight[1 - y] - model.weight[y]).detach()
        gain = inner(w, steepest(x, w, INF, eps, domain))
        reached = (margin(model(found.points), y) - margin(model(x), y)).detach()
        assert torch.allclose(reached, gain, rtol=1e-9)


@pytest.mark.parametrize(
    "check",
    [
        functools.partial(conform, 1.0),
        functools.partial(conform, 2.0),
        test_the_worst_corner_of_a_linear_classifier,
    ],
)
def test_a_wrong_loss_is_caught(check, monkeypatch) -> None:
    right = ASCENTS["margin"]
    monkeypatch.setitem(ASCENTS, "margin", lambda z, y: (-right(z, y)[0], right(z, y)[1]))
    with pytest.raises(AssertionError):
        check()


class Curved(nn.Module):
    """Three classes with curved gaps on flattened inputs; class 0 is so far ahead that nothing
    flips.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        k = torch.arange(x.shape[1], dtype=x.dtype)
        z = torch.stack(
            [0 * x[:, 0], (5 * x * (k + 1).sqrt()).sin().sum(1), (x * (2 * k).cos()).sum(1)], 1
        )
        return z + torch.tensor([500.0, 0.0, 0.0], dtype=x.dtype)


def curved_loss(points: torch.Tensor) -> torch.Tensor:
    return margin(Curved()(points), torch.zeros(len(points), dtype=torch.int64))


@functools.cache
def plain_hills(height: int, width: int, norm: float) -> torch.Tensor:
    """The paper's eta by adding up growing squares, the upper half positive."""

    def hills(a: int, b: int) -> torch.Tensor:
        v = torch.zeros(a, b, dtype=torch.float64)
        for k in range(max(a, b) // 2 + 1):
            for i in range(max(a // 2 - k, 0), min(a // 2 + k + 1, a)):
                for j in range(max(b // 2 - k, 0), min(b // 2 + k + 1, b)):
                    v[i, j] += 1 / (k + 1) ** (2 if norm == 2 else 4)
        return v / (v.abs() ** norm).sum() ** (1 / norm)

    half = height // 2
    v = (
        torch.cat([hills(half, width), -hills(height - half, width)])
        if half
        else -hills(height, width)
    )
    return v / (v.abs() ** norm).sum() ** (1 / norm)


def plain_project(delta: torch.Tensor, x: torch.Tensor, radius: float, domain) -> torch.Tensor:
    """Onto the l1 ball and the box, by bisection."""
    low, high = (0.0 * x - 1e9, 0.0 * x + 1e9) if domain is None else (domain[0] - x, domain[1] - x)

    def shrunk(tau):
        return (delta.sign() * (delta.abs() - tau).clamp(min=0)).clamp(low, high)

    if shrunk(0.0).abs().sum() <= radius:
        return shrunk(0.0)
    a = 0.0
    b = float(delta.abs().max())
    for _ in range(80):
        a, b = ((a + b) / 2, b) if shrunk((a + b) / 2).abs().sum() > radius else (a, (a + b) / 2)
    return shrunk(b)


def plain_square(
    x: torch.Tensor, die: torch.Generator, norm: float, radius: float, domain, loss, queries: int
):
    """One image `(c, h, w)` as the paper and its code read, whole images all the way: every
    point tried, and the last best.
    """
    c, h, w = x.shape

    def clamp(v):
        return v if domain is None else v.clamp(*domain)

    def flip(u):
        return 1.0 if u < 0.5 else -1.0

    delta = torch.zeros_like(x)
    if norm == INF:
        u = torch.rand(c, 1, w, generator=die)
        for channel in range(c):
            for j in range(w):
                delta[channel, :, j] = radius * flip(u[channel, 0, j])
    else:
        a, b = (h // 5, w // 5) if h == w else (1, w // 25) if h == 1 else (1, 1)
        u = torch.rand(1 + c, h // a, w // b, 1, 1, generator=die)
        top = h % a // 2
        left = w % b // 2
        for i in range(h // a):
            for j in range(w // b):
                tile = plain_hills(a, b, norm) if u[0, i, j] < 0.5 else plain_hills(b, a, norm).T
                for channel in range(c):
                    place = delta[
                        channel, top + i * a : top + (i + 1) * a, left + j * b : left + (j + 1) * b
                    ]
                    place += tile * flip(u[1 + channel, i, j])
        delta = (
            radius * delta / delta.norm() if norm == 2 else plain_project(delta, x, radius, domain)
        )
    best = clamp(x + delta)
    tried = [best]
    value = loss(best)
    for first, end, part in _blocks(queries, 0.8):
        height, width = _sides(part, h, w, norm)
        draws = torch.rand(end - first, 5 + c, generator=die)
        for u in draws:
            i, k = (int(float(v) * (h - height + 1)) for v in (u[0], u[2]))
            j, l = (int(float(v) * (w - width + 1)) for v in (u[1], u[3]))
            delta = best - x
            one = torch.zeros(h, w, dtype=torch.bool)
            two = torch.zeros(h, w, dtype=torch.bool)
            one[i : i + height, j : j + width] = True
            two[k : k + height, l : l + width] = True
            if norm == INF:
                for channel in range(c):
                    delta[channel, one] = (
                        delta[channel, one] + 2 * radius * flip(u[5 + channel])
                    ).clamp(-radius, radius)
                point = clamp(x + delta)
            else:
                bump = (
                    plain_hills(height, width, norm)
                    if u[4] < 0.5
                    else plain_hills(width, height, norm).T
                )
                free = max(radius**norm - float((delta.abs() ** norm).sum()), 0.0)
                for channel in range(c):
                    here = delta[channel, one].clone()
                    size = float((here.abs() ** norm).sum()) ** (1 / norm)
                    mass = float((delta[channel, one | two].abs() ** norm).sum())
                    new = bump.flatten() * flip(u[5 + channel]) + here / (size + 1e-12)
                    new = (
                        new
                        / (new.abs() ** norm).sum() ** (1 / norm)
                        * (free / c + mass) ** (1 / norm)
                    )
                    delta[channel, two] = 0
                    delta[channel, one] = new * (c if norm == 1 else 1)
                delta = (
                    radius * delta / delta.norm()
                    if norm == 2
                    else plain_project(delta, x, radius, domain)
                )
                point = clamp(x + delta)
            tried.append(point)
            if loss(point) > value:
                best = point
                value = loss(point)
    return torch.stack(tried), best


@pytest.mark.slow_cases(
    "1.0-shape7-domain7", "1.0-shape8-None", "2.0-shape3-domain3", "2.0-shape5-domain5"
)
@pytest.mark.parametrize(
    ("norm", "shape", "domain"),
    [
        (INF, (3, 6, 6), (0.0, 1.0)),
        (INF, (2, 4, 7), None),
        (2.0, (3, 11, 11), (0.0, 1.0)),
        (2.0, (1, 1, 110), (0.0, 1.0)),
        (2.0, (2, 9, 9), None),
        (2.0, (2, 4, 7), (0.0, 1.0)),
        (1.0, (3, 11, 11), (0.0, 1.0)),
        (1.0, (2, 7, 4), (0.0, 1.0)),
        (1.0, (1, 9, 9), None),
    ],
)
def test_the_search_is_the_papers(norm: float, shape: tuple[int, ...], domain, monkeypatch) -> None:
    """Point by point the algorithm of the paper, on a loss with many hills, through three sizes
    of squares.
    """
    monkeypatch.setattr(square_module, "BLOCK", 25)
    queries = 60
    eps = {INF: 0.2, 2.0: 0.8, 1.0: 4.0}[norm]
    x, _ = samples(3, shape, 3)
    zeros = torch.zeros(3, dtype=torch.int64)
    network = Network(Curved(), torch.arange(3))
    tracker = Tracker(
        network, x, zeros, norm, domain, None, ball=(eps, eps * (1 - 1e-9)), graph=False
    )
    visited = []
    logits = network.logits
    monkeypatch.setattr(
        network,
        "logits",
        lambda points, rows: (visited.append(points.clone()), logits(points, rows))[1],
    )
    square_attack(tracker, nothing, queries=queries, seed=5)
    assert len(visited) == queries + 1
    accepted = 0
    for i, die in enumerate(generators(x, 5, 0)):
        points, best = plain_square(
            x[i],
            die,
            norm,
            tracker.radius,
            domain,
            lambda point: float(curved_loss(point[None])),
            queries,
        )
        assert torch.allclose(torch.stack([p[i] for p in visited]), points, atol=1e-8)
        assert torch.allclose(tracker.points[i], best, atol=1e-8)
        assert (distances(points, x[i].expand_as(points), norm) <= eps).all()
        accepted += len(curved_loss(points).cummax(0).values.unique())
    assert accepted >= 3 * 3  # the search did move, so its acceptance was compared too


@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("sides", [(1, 1), (2, 2), (3, 3), (6, 6), (7, 7), (1, 8), (5, 2)])
def test_bumps_are_the_papers(norm: float, sides: tuple[int, int]) -> None:
    upright, lying = _bumps(*sides, norm, torch.zeros(1, dtype=torch.float64))
    assert (
        torch.allclose(upright, plain_hills(*sides, norm)) and upright.shape == lying.shape == sides
    )
    assert torch.allclose(lying, plain_hills(*sides[::-1], norm).T)


def test_the_schedule_is_the_papers() -> None:
    parts = {i: part for first, end, part in _blocks(12000, 0.8) for i in range(first, end)}
    assert sorted(parts) == list(range(12000))
    ends = [10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000]
    for level, (first, last) in enumerate(zip([0] + [end + 1 for end in ends], [*ends, 11999])):
        assert {parts[first], parts[last]} == {0.8 / 2**level}
    assert [first for first, _, _ in _blocks(60, 0.8)] == [0, 11, 51] and _blocks(60, 0.8)[-1][
        1
    ] == 60
    # sides at queries 0, 11, 51, 201, 501 and 1001 of MNIST and CIFAR-10 images
    at = (0, 11, 51, 201, 501, 1001)
    assert [_sides(parts[i], 28, 28, INF)[0] for i in at] == [25, 18, 13, 9, 6, 4]
    assert [_sides(parts[i], 32, 32, 2.0)[0] for i in at] == [29, 21, 15, 11, 7, 5]


def test_windows_of_rectangles_keep_their_area() -> None:
    assert (
        _sides(0.8, 4, 100, INF) == (4, 80)
        and _sides(0.8, 100, 4, INF) == (80, 4)
        and _sides(0.01, 4, 100, INF) == (2, 2)
    )
    assert _sides(0.8, 1, 784, INF) == (1, 627) and _sides(0.8 / 512, 1, 784, INF) == (1, 1)
    assert (
        _sides(0.8 / 512, 1, 784, 2.0) == (1, 3)
        and _sides(0.5, 1, 2, 1.0) == (1, 2)
        and _sides(0.8, 2, 2, 2.0) == (2, 2)
    )


def test_windows_reach_every_place_and_differ_between_samples() -> None:
    x = torch.rand(6, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    moves = _Moves.draw(generators(x, 0), 400, (3, 3), x)
    for sample in range(6):
        corners = moves.corners[:, sample]
        for pair in (corners[:, :2], corners[:, 2:]):
            assert {tuple(place) for place in pair.tolist()} == {
                (i, j) for i in range(3) for j in range(6)
            }
        assert (
            0.4 < moves.turned[:, sample].double().mean() < 0.6
            and moves.signs[:, sample].mean(0).abs().max() < 0.2
        )
    assert (
        len({tuple(c) for c in moves.corners.flatten(2).permute(1, 0, 2).flatten(1).tolist()}) == 6
    )
    largest = _Moves.draw(generators(x, 0), 50, (5, 8), x)
    assert (largest.corners == 0).all()


def test_the_largest_number_stays_inside(monkeypatch) -> None:
    """The largest float32 below 1, which is the largest that is drawn, times any count rounds
    to less than the count.
    """
    monkeypatch.setattr(
        square_module, "_draw", lambda dice, shape, like: torch.full((1, *shape), 1 - 2**-24)
    )
    for size in range(1, 1000):
        assert _Moves.draw([], 1, (1, 1), torch.zeros(1, 1, 3, size)).corners.tolist() == [
            [[2, size - 1, 2, size - 1]]
        ]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(9,), (4, 6), (2, 7, 3), (5, 1, 8), (2, 2, 3, 4), (6, 1), (1,)])
def test_any_shape(norm: float, shape: tuple[int, ...]) -> None:
    """Vectors, matrices, rectangles, volumes: flips with plenty of room, nothing outside, the
    same again with the same seed.
    """
    n = math.prod(shape)
    model = LinearClassifier.random(2, n, seed=n)
    x, _ = samples(6, shape, 2)
    y = model(x).argmax(1)
    room = 12 if norm == 1 else 4  # bumps are no single pixels
    threat = Threat(norm, INF, room * float(model.distances(x, y, norm, None).max()), None)
    found, again = (square(model, x, y, threat, queries=60) for _ in range(2))
    assert found.accuracy < 0.2 and found.points.shape == x.shape and found.verify(model)
    assert torch.equal(found.points, again.points)
    assert _images(x).shape == (6, math.prod(shape[:-2]), *(1, *shape)[-2:])
    assert torch.equal(_images(x).reshape(x.shape), x)


def test_seeds_and_restarts() -> None:
    x = samples(3, (2, 9, 9), 3)[0]
    zeros = torch.zeros(3, dtype=torch.int64)
    run = functools.partial(square, Curved(), x, zeros, Threat(INF, INF, 0.1))
    assert torch.equal(
        run(queries=9, seed=1).points, run(queries=9, seed=1).points
    ) and not torch.equal(run(queries=9, seed=1).points, run(queries=9, seed=2).points)
    twice = run(queries=9, seed=1, restarts=2)
    assert (twice.forwards == 1 + 2 * 10).all() and not torch.equal(
        twice.points, run(queries=9, seed=1).points
    )
    moved = (
        run(queries=1).points - x
    )  # the start is stripes: one sign a column and channel, others in other samples
    signs = {tuple(torch.sign(m).flatten().tolist()) for m in moved}
    assert len(signs) == 3


@pytest.mark.parametrize("norm", NORMS)
def test_passes_are_counted_exactly(norm: float) -> None:
    """One at the sample, one at the start, one for each square, none backward, and none again
    for a sample that flipped.
    """
    x = samples(5, (2, 4, 4), 3)[0]
    zeros = torch.zeros(5, dtype=torch.int64)
    for queries in (1, 10, 11, 12, 60):
        stuck = square(Curved(), x, zeros, Threat(norm, INF, 0.1), queries=queries)
        assert (
            stuck.accuracy == 1
            and (stuck.forwards == 2 + queries).all()
            and (stuck.backwards == 0).all()
        )
    calls = []

    class Recorded(LinearClassifier):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    plain = LinearClassifier.random(4, 32)
    model = Recorded(plain.weight.detach(), plain.bias.detach())
    y = plain(x).argmax(1)
    y[0] = (y[0] + 1) % 4
    threat = Threat(norm, INF, 1.5 * float(plain.distances(x, y, norm, (0.0, 1.0)).max()))
    found = square(model, x, y, threat, queries=200)
    flipped = found.flips.success & (found.distances > 0)
    assert flipped.any() and found.forwards[0] == 1 and (found.forwards[flipped] < 202).all()
    # two calls look at the model and one checks the answer; every other row of a call is a counted
    # pass
    assert sum(calls) == int(found.forwards.sum()) + 3 * len(x)


def test_a_stage_after_others() -> None:
    """Samples that other attacks have flipped cost nothing and keep their flips; the others
    start from the sample.
    """
    model = LinearClassifier.random(4, 32)
    x, _ = samples(8, (2, 4, 4), 4)
    y = model(x).argmax(1)
    eps = 1.5 * float(model.distances(x, y, INF, (0.0, 1.0)).max())
    tracker = Tracker(
        Network(model, torch.arange(8)),
        x,
        y,
        INF,
        (0.0, 1.0),
        None,
        ball=(eps, eps * (1 - 1e-9)),
        graph=False,
    )
    square_attack(tracker, nothing, queries=3)
    left = tracker.rows
    spent = tracker.network.forwards.clone()
    points = tracker.points.clone()
    assert 0 < len(left) < 8
    done = torch.ones(8, dtype=torch.bool)
    done[left] = False
    square_attack(tracker, nothing, queries=500)
    assert len(tracker.rows) == 0 and torch.equal(tracker.points[done], points[done])
    assert (
        torch.equal(tracker.network.forwards[done], spent[done])
        and (tracker.network.forwards[left] > spent[left]).all()
    )
    fresh = square(model, x[left], y[left], Threat(INF, INF, eps), queries=500)
    assert torch.allclose(tracker.points[left], fresh.points, atol=1e-8)
    spent = tracker.network.forwards.clone()
    square_attack(tracker, nothing)
    assert torch.equal(tracker.network.forwards, spent)


@pytest.mark.parametrize("norm", NORMS)
def test_targets_are_reached(norm: float) -> None:
    model = LinearClassifier.random(4, 12, seed=3)
    x, _ = samples(12, (12,), 4)
    y = model(x).argmax(1)
    target = (y + 1 + torch.arange(12) % 3) % 4
    threat = Threat(norm, INF, {1.0: 15.0, 2.0: 5.0, INF: 1.5}[norm], None)
    found = square(model, x, y, threat, queries=300, target=target)
    assert torch.equal(found.predicted, target) and found.verify(model)
    free = square(model, x, y, threat, queries=300)
    assert free.accuracy == 0 and free.forwards.sum() < found.forwards.sum()


@pytest.mark.parametrize(("norm", "eps"), [(INF, 1 / 255), (2.0, 0.02), (1.0, 0.3)])
def test_nothing_needs_to_be_pulled_inside(norm: float, eps: float, monkeypatch) -> None:
    """In float32, where a rounding error is a good part of the radius: what was evaluated is
    what is returned.
    """
    kept = []
    pull = pointwise_module.pull_inside
    monkeypatch.setattr(
        pointwise_module,
        "pull_inside",
        lambda p, *others: (kept.append(p.clone()), pull(p, *others))[1],
    )
    plain = LinearClassifier.random(2, 108)
    model = LinearClassifier(plain.weight.detach().float(), plain.bias.detach().float())
    x = samples(40, (3, 6, 6), 2)[0].float()
    found = square(model, x, model(x).argmax(1), Threat(norm, INF, eps), queries=40)
    assert torch.equal(torch.cat(kept), found.points) and found.points.dtype == torch.float32
    assert (distances(found.points, x, norm) <= eps).all() and (
        distances(found.points, x, norm) > 0.9 * eps
    ).any()
    assert found.points.min() >= 0 and found.points.max() <= 1 and found.verify(model)


def test_progress() -> None:
    seen: list[float] = []
    x = samples(3, (2, 4, 4), 3)[0]
    zeros = torch.zeros(3, dtype=torch.int64)
    square(Curved(), x, zeros, Threat(INF, INF, 0.1), queries=300, restarts=2, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1 and len(seen) > 8


def test_a_black_box() -> None:
    """No gradient is asked for, the batch size is kept, and the samples' weights count."""
    sizes: list[int] = []

    @torch.no_grad()
    def model(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return Curved()(x)

    x = samples(10, (2, 4, 4), 3)[0]
    y = torch.tensor([1, 0] * 5)
    found = square(
        model, x, y, Threat(INF, INF, 0.1), queries=5, batch_size=3, mu=torch.tensor([1.0, 3.0] * 5)
    )
    assert max(sizes[2:]) == 3  # the first two calls look at the model
    assert found.accuracy == 0.75 and found.flips.methods == ("square",) and found.verify(model)


@pytest.mark.parametrize(
    "options", [{"queries": 0}, {"restarts": 0}, {"share": 0.0}, {"share": 1.5}]
)
def test_bad_options(options: dict[str, Any]) -> None:
    x = samples(3, (2, 4, 4), 3)[0]
    zeros = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InputError, match=next(iter(options))):
        square(Curved(), x, zeros, Threat(INF, INF, 0.1), **options)


@pytest.mark.parametrize(("norm", "eps", "least"), [(INF, 0.35, 4), (2.0, 1.8, 10), (1.0, 9.0, 10)])
def test_a_robust_network(zoo, norm: float, eps: float, least: int) -> None:
    """MNIST, adversarially trained for linf: more queries never hurt, and most of l2 and l1
    falls to a few hundred.
    """
    model, data = zoo.load("mnist_madry_tiny")
    x, y = zoo.images(data, 30)
    few, many = (
        square(model, x, y, Threat(norm, INF, eps), queries=queries) for queries in (20, 200)
    )
    assert many.accuracy <= few.accuracy <= many.clean_accuracy and many.verify(model, batch_size=7)
    assert (many.clean_accuracy - many.accuracy) * 30 >= least
    assert (many.forwards[~many.flips.success] == 202).all()
