"""Our engine and the door to all engines: closed forms, exact budgets, monotone in passes,
steering, rounding.
"""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.attacks.nearest import METHODS, undecided
from wassail.names import ENGINES
from wassail.testing import LinearClassifier, check_attack, samples

INF = math.inf
NORMS = (1.0, 2.0, INF)


def relu_net(seed: int = 0, classes: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(12, 24),
        nn.ReLU(),
        nn.Linear(24, 24),
        nn.ReLU(),
        nn.Linear(24, classes),
    ).double()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
@pytest.mark.parametrize("classes", [2, 3, 10, 25])
def test_linear_classifiers_are_solved_by_one_forward_and_the_gradients(
    norm: float, domain, classes: int
) -> None:
    model = LinearClassifier.random(classes, 12, seed=classes)
    x, y = samples(50, (3, 4), classes)
    y[10:] = model(x).argmax(1)[10:]
    exact = model.distances(x, y, norm, domain)
    flips = ws.nearest(
        model, x, y, norm, domain, passes=classes, topk=classes - 1
    )  # 1 forward + K - 1 gradients; the check comes on top
    assert torch.equal(torch.isinf(flips.distances), torch.isinf(exact))
    reached = torch.isfinite(exact)
    assert (flips.distances[reached] >= exact[reached] - 1e-12).all()
    assert torch.allclose(flips.distances[reached], exact[reached], rtol=1e-6, atol=1e-8)
    assert (flips.forwards == 1).all() and (flips.backwards[exact > 0] == classes - 1).all()


def test_conformance() -> None:
    def attack(model, x, y, threat, batch_size=None):
        flips = ws.nearest(
            model, x, y, threat.norm, threat.domain, passes=60, batch_size=batch_size
        )
        return ws.allocate(flips, threat.eps, threat.order)

    check_attack(attack)


@pytest.mark.parametrize("method", ["auto", *ENGINES])
def test_a_budget_that_does_not_pay_for_the_first_step_is_told(method: str) -> None:
    model = LinearClassifier.random(20, 6)
    x, y = samples(8, (6,), 20)
    y[2:] = model(x).argmax(1)[2:]
    right = int((model(x).argmax(1) == y).sum())
    many: dict[str, Any] = (
        {"topk": 19} if method in ("auto", "boundary-search", "deepfool", "fab") else {}
    )
    with pytest.warns(
        ws.ModelWarning,
        match=f"{right} of {right} samples were not searched: passes is 2, .* give at least ",
    ) as told:
        flips = ws.nearest(model, x, y, 2, method=method, passes=2, **many)
    assert not flips.success[2:].any() and len(told) == 1
    need = int(str(told[0].message).split("give at least ")[1].split()[0])
    assert need > 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flips = ws.nearest(model, x, y, 2, method=method, passes=need, **many)
        assert ((flips.forwards + flips.backwards)[2:] > 1).all()


def test_a_steered_search_pays_for_the_first_step_of_many_rivals() -> None:
    model = LinearClassifier.random(150, 6)
    x, _ = samples(4, (6,), 150)
    y = model(x).argmax(1)
    flips = ws.nearest(model, x, y, 2, passes=400, topk=149, eps=0.5, order=1)
    assert flips.success.all()


@pytest.mark.slow_cases("1.0", "2.0")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.filterwarnings("ignore:.*were not searched:wassail.ModelWarning")
def test_budgets_are_kept_exactly_and_more_passes_never_hurt(norm: float) -> None:
    model = relu_net()
    x, _ = samples(20, (3, 4), 5)
    y = model(x).argmax(1)
    y[:2] = (y[:2] + 1) % 5
    last = torch.full((20,), INF, dtype=torch.float64)
    for passes in (1, 4, 5, 6, 7, 16, 17, 18, 19, 40, 41, 42, 43, 44, 90, 91, 150, 151, 152, 400):
        flips = ws.nearest(model, x, y, norm, passes=passes, seed=3)
        spent = flips.forwards + flips.backwards
        # Samples that are wrong already have the gradients at the samples and nothing else.
        assert (spent <= passes).all() and (spent[:2] == (5 if passes > 4 else 1)).all()
        assert (flips.distances <= last * (1 + 1e-12)).all()
        last = flips.distances
    assert torch.isfinite(last).all()
    again = ws.nearest(model, x, y, norm, passes=400, seed=3)
    assert torch.equal(again.distances, last) and torch.equal(again.points, flips.points), (
        "deterministic"
    )
    assert ws.allocate(again, 0.1, 1).verify(model)


@pytest.mark.few(7)
@pytest.mark.slow_cases("*-1.0", "[!cd]*-2.0", "deepfool-2.0", "pdpgd-inf")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_flips_a_small_network_and_ours_is_nearest(norm: float, method: str) -> None:
    if method in ("ddn", "cw") and norm != 2:
        with pytest.raises(ws.InputError, match="l2"):
            ws.nearest(relu_net(), *samples(3, (3, 4), 5), norm, method=method)
        return
    model = relu_net()
    x, _ = samples(40, (3, 4), 5)
    y = model(x).argmax(1)
    options = {"eps": 0.2} if method == "wda++" else {"passes": 200}
    flips = ws.nearest(model, x, y, norm, method=method, **options)
    ours = ws.nearest(model, x, y, norm, passes=200)
    assert flips.success.double().mean() > 0.5 and ws.allocate(flips, 0.1, 1).verify(model)
    both = flips.success & ours.success
    assert ours.success.sum() >= flips.success.sum()
    assert ours.distances[both].mean() <= 1.001 * flips.distances[both].mean()


def test_steering_spends_less_and_answers_alike() -> None:
    model = relu_net()
    x, _ = samples(60, (3, 4), 5)
    y = model(x).argmax(1)
    plain = ws.nearest(model, x, y, INF, passes=400)
    eps = 0.1 * float(plain.distances[plain.success].mean())
    steered = ws.nearest(model, x, y, INF, passes=400, eps=eps, order=1)
    first = ws.nearest(model, x, y, INF, passes=100)
    assert (
        sum(steered.passes()) < 0.8 * sum(plain.passes())
        and (steered.forwards + steered.backwards <= 400).all()
    )
    assert (steered.distances <= first.distances).all() and ws.allocate(steered, eps, 1).verify(
        model
    )
    accuracy = [ws.allocate(f, eps, 1).accuracy for f in (plain, steered, first)]
    assert accuracy[1] <= accuracy[2] + 1e-12 and accuracy[1] <= accuracy[0] + 0.002


def test_undecided_samples() -> None:
    d = torch.tensor([0.0, 0.01, 0.5, 1.0, 1.4, 5.0, INF], dtype=torch.float64)
    picked = undecided(d, eps=0.15, order=1)  # buys 0, 0.01, 0.5 and part of 1.0
    assert picked.tolist() == [False, False, True, True, True, False, True]
    assert undecided(d, eps=100.0, order=1).tolist() == [False] * 6 + [True], (
        "all is bought: only a new flip matters"
    )
    assert undecided(d, eps=0.4, order=INF).tolist() == [
        False,
        False,
        True,
        False,
        False,
        False,
        True,
    ]


def test_rounded_flips_survive_eight_bits() -> None:
    model = relu_net(2)
    x, _ = samples(40, (3, 4), 5)
    x = (x * 255).round() / 255
    y = model(x).argmax(1)
    flips = ws.nearest(model, x, y, INF, passes=60)
    eight = flips.rounded(model)
    moved = eight.success & (eight.distances > 0)
    grid = eight.points[moved] * 255
    assert moved.sum() >= 0.9 * flips.success.sum() and torch.allclose(
        grid, grid.round(), atol=1e-9
    )
    assert (ws.losses.predict(model(eight.points), y, 0.9e-9) != y)[moved].all(), (
        "wrong by the tolerance, not by a hair"
    )
    assert (eight.distances[moved] >= flips.distances[moved] - 1 / 255).all()
    with pytest.raises(ws.InputError, match="box"):
        ws.nearest(model, x, y, INF, None, passes=10).rounded(model)


def test_flips_stay_inside_an_odd_box_after_shortening() -> None:
    """Walls that do not round nicely: a shortened point an ulp outside would silently lose its
    flip.
    """
    model = LinearClassifier.random(3, 12).float()
    low = -0.4242
    high = 2.8214
    x = (samples(60, (12,), 3)[0].float().round() * (high - low) + low).clamp(low, high)
    y = model(x).argmax(1)
    for norm in NORMS:
        flips = ws.nearest(model, x, y, norm, (low, high), passes=80)
        reachable = torch.isfinite(
            LinearClassifier.distances(model.double(), x.double(), y, norm, (low, high))
        )
        model.float()
        assert torch.equal(flips.success, reachable)


def test_bad_options() -> None:
    model = relu_net()
    x, y = samples(3, (3, 4), 5)
    for options, words in (
        ({"passes": 0}, "passes is 0"),
        ({"method": "wda++", "passes": 9, "eps": 1}, "schedule of its own"),
        ({"roundz": 2}, "no option 'roundz'"),
        ({"method": "fabb"}, "did you mean 'fab'"),
        ({"method": "chase"}, 'it is "boundary-search" now'),
    ):
        with pytest.raises(ws.InputError, match=words):
            ws.nearest(model, x, y, **options)


def test_random_starts_belong_to_the_sample_not_to_its_place() -> None:
    from wassail.attacks.minimal.restarts import near_best
    from wassail.attacks.minimal.tracker import Tracker
    from wassail.network import Network

    model = relu_net()
    x, y = samples(8, (3, 4), 5)
    order = torch.tensor([5, 2, 7, 0])
    whole = Tracker(Network(model, torch.arange(8)), x, y, 2.0, (0.0, 1.0), None)
    part = Tracker(Network(model, torch.arange(4)), x[order], y[order], 2.0, (0.0, 1.0), None)
    starts = near_best(whole, torch.arange(8), seed=1, number=7)
    assert torch.equal(starts[order], near_best(part, torch.arange(4), seed=1, number=7))
    assert not torch.equal(starts, near_best(whole, torch.arange(8), seed=2, number=7))
    assert not torch.equal(starts, near_best(whole, torch.arange(8), seed=1, number=11))


@pytest.mark.slow_cases("2.0", "1.0")
@pytest.mark.parametrize("norm", NORMS)
def test_a_search_goes_on_from_points_of_others(norm: float) -> None:
    model = relu_net()
    x, _ = samples(20, (3, 4), 5)
    y = model(x).argmax(1)
    alone = ws.nearest(model, x, y, norm, passes=60)
    others = ws.nearest(model, x, y, norm, passes=400, seed=5)
    start = ws.Flips.from_points(model, x, y, others.points, norm, method="others")
    found = ws.nearest(model, x, y, norm, passes=60, start=start)
    assert (found.distances <= start.distances).all()
    assert found.distances.mean() < alone.distances.mean()
    assert (found.forwards + found.backwards <= 60 + start.forwards).all()
    assert set(found.methods) == {"others", "boundary-search"}
    steered = ws.nearest(model, x, y, norm, passes=120, start=start, eps=0.05, order=1)
    assert (steered.distances <= start.distances).all()
    with pytest.raises(ws.InputError, match="differ in x"):
        ws.nearest(model, x[:3], y[:3], norm, start=start)
    with pytest.raises(ws.InputError, match="no use for start"):
        ws.nearest(model, x, y, norm, method="wda++", eps=0.1, start=start)


def test_a_start_that_is_narrowly_wrong_is_not_lost() -> None:
    """Points on the very boundary fail our own check; the caller's flips are kept all the same."""
    model = relu_net()
    x, _ = samples(20, (3, 4), 5)
    y = model(x).argmax(1)
    near = ws.nearest(model, x, y, 2, passes=600)
    low = x.clone()
    high = near.points.clone()
    for _ in range(60):
        middle = (low + high) / 2
        wrong = (model(middle).argmax(1) != y)[:, None, None]
        high = torch.where(wrong, middle, high)
        low = torch.where(wrong, low, middle)
    start = ws.Flips.from_points(model, x, y, high, 2)
    assert start.success.all()
    found = ws.nearest(model, x, y, 2, passes=20, start=start)
    assert (found.distances <= start.distances).all()


@pytest.mark.slow_cases("1000")
@pytest.mark.parametrize("classes", [100, 1000])
def test_many_classes_get_more_rivals_within_the_budget(classes: int) -> None:
    """Half of the classes have large logits and flat planes, the others small ones and steep
    planes, which are nearest: no gradient of the ten first is of these.
    """
    generator = torch.Generator().manual_seed(classes)
    half = classes // 2
    flat = torch.arange(classes) < half
    weight = torch.randn(classes, 12, generator=generator, dtype=torch.float64)
    weight = torch.where(flat[:, None], 0.002 * weight, weight)
    high = 1 + 0.1 * torch.randn(classes, generator=generator, dtype=torch.float64)
    bias = torch.where(flat, high, -4 - 0.5 * weight.sum(1))
    model = LinearClassifier(weight, bias)
    x, _ = samples(16, (3, 4), classes)
    y = model(x).argmax(1)
    assert (y < half).all()
    exact = model.distances(x, y, 2.0, (0.0, 1.0))
    said = r"^16 of 16 samples got their first flip from 112 to 450 passes"
    with pytest.warns(ws.ModelWarning, match=said):
        found = ws.nearest(model, x, y, 2, passes=450)
    assert (found.forwards + found.backwards <= 450).all()
    assert (found.distances >= exact - 1e-9).all()
    ratio = found.distances / exact
    assert ratio.mean() < 1.01  # without the wide look: infinite, and 2.6


def test_few_classes_pay_nothing_for_many() -> None:
    from wassail.attacks.minimal.first_steps import FirstSteps
    from wassail.attacks.minimal.restarts import more_rivals
    from wassail.attacks.minimal.tracker import Tracker
    from wassail.network import Network

    model = relu_net()
    x, _ = samples(6, (3, 4), 5)
    y = model(x).argmax(1)
    network = Network(model, torch.arange(6))
    tracker = Tracker(network, x, y, 2.0, (0.0, 1.0), None)
    first = FirstSteps.of(tracker)
    spent = network.forwards + network.backwards
    more_rivals(first, 0)
    assert torch.equal(network.forwards + network.backwards, spent)


class OtherBatch(nn.Module):
    """Takes a little lead from every class but 0 in batches of one size."""

    def __init__(self, size: int, less: float) -> None:
        super().__init__()
        self.inner = LinearClassifier.random(3, 12, seed=2).float()
        self.size = size
        self.less = less

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.inner(x)
        if len(x) != self.size:
            return z
        return z - self.less * z.new_tensor([0.0, 1.0, 1.0])


@pytest.mark.parametrize("norm", NORMS)
def test_a_flip_that_the_batch_of_the_check_takes_back_goes_on_a_little(norm: float) -> None:
    x = samples(40, (12,), 3, seed=4)[0].float()
    plain = OtherBatch(0, 0.0)
    y = plain(x).argmax(1)
    x, y = torch.cat([x[y == 0][:3], x[y != 0][:1]]), torch.tensor([0, 0, 0, 0])
    assert len(x) == 4  # three samples are attacked, and four are checked
    expected = ws.nearest(plain, x, y, norm, None, passes=30)
    found = ws.nearest(OtherBatch(4, 3e-3), x, y, norm, None, passes=30)
    assert found.success.all()
    torch.testing.assert_close(found.distances, expected.distances, rtol=2e-2, atol=0)
    assert (found.distances >= expected.distances).all()
