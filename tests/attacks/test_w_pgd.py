"""W-PGD and W-FGSM: closed forms, a direct transcription of the paper, invariants, passes, real
networks, broken variants.
"""

import functools
import math

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.attacks import w_pgd as module
from wassail.attacks.w_pgd import (
    SLOPES,
    ce_slope,
    dlr_slope,
    margin_slope,
    mean_norm,
    w_fgsm,
    w_pgd,
)
from wassail.errors import InputError
from wassail.losses import cross_entropy, dlr, margin
from wassail.network import Tape
from wassail.testing import LinearClassifier, check_attack, samples
from wassail.transport.allocation import transport_cost

INF = math.inf
LOSSES = {"redlr": dlr, "dlr": dlr, "ce": cross_entropy, "margin": margin}
WRONG = {"redlr": margin_slope, "dlr": margin_slope, "ce": dlr_slope, "margin": ce_slope}


# --- closed forms: sample 0 climbs toward class 1 with a gradient (1, 0), sample 1 toward class 2
# with (0, 2) -----------------
def two_samples(margins=(1.0, 1.0)):
    model = LinearClassifier(
        torch.tensor([[0.0, 0], [1, 0], [0, 2]]).double(), torch.zeros(3).double()
    )
    x = torch.tensor([[-margins[0], -9.0], [-9.0, -margins[1] / 2]]).double()
    return model, x, torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize("norm", [2.0, INF])
@pytest.mark.parametrize("order", [2.0, 3.0, 1.2])
@pytest.mark.parametrize("mu", [(0.5, 0.5), (0.25, 0.75)])
def test_a_step_is_shared_by_the_lengths_of_the_gradients(norm: float, order: float, mu) -> None:
    check_shares(norm, order, mu)


def check_shares(norm: float, order: float, mu) -> None:
    eps = 1.5
    q = order / (order - 1)
    mean = (mu[0] * 1**q + mu[1] * 2**q) ** (1 / q)
    shares = [eps * (1 / mean) ** (q - 1), eps * (2 / mean) ** (q - 1)]
    assert math.isclose(
        (mu[0] * shares[0] ** order + mu[1] * shares[1] ** order) ** (1 / order), eps
    )
    model, x, y = two_samples(
        (3 * eps, 2 * shares[1] * 0.99)
    )  # sample 1 flips at 0.99 of its share, sample 0 does not
    found = w_fgsm(
        model, x, y, ws.Threat(norm, order, eps, None), loss="margin", mu=torch.tensor(mu)
    )
    moved = found.points - x
    assert torch.allclose(moved[0], torch.tensor([shares[0], 0]).double(), atol=1e-12)
    assert torch.allclose(moved[1], torch.tensor([0, shares[1]]).double(), atol=1e-12)
    assert found.predicted.tolist() == [0, 2]
    assert found.accuracy == mu[0] and found.method == "w-fgsm"
    assert found.cost <= eps and math.isclose(found.cost, eps) and found.verify(model)


@pytest.mark.parametrize("norm", [2.0, INF])
def test_twice_the_gradient_gets_twice_the_way_at_order_2_and_the_same_at_order_inf(
    norm: float,
) -> None:
    model, x, y = two_samples((0.1, 0.1))
    two = w_fgsm(model, x, y, ws.Threat(norm, 2, 1, None)).distances
    assert math.isclose(two[1], 2 * two[0]) and math.isclose(two[1], 2 / math.sqrt(2.5))
    assert torch.allclose(
        w_fgsm(model, x, y, ws.Threat(norm, INF, 1, None)).distances, torch.ones(2).double()
    )


def check_contraction(norm: float) -> None:
    share = torch.tensor([1.0, 2.0]).double() / math.sqrt(2.5)  # of a step of length 1
    # Sample 1 flips at the first step, sample 0 only at the second, at which W is 1.6 eps before
    # the contraction.
    model, x, y = two_samples((0.9 * float(share[0]), 0.1))
    found = w_pgd(model, x, y, ws.Threat(norm, 2, 1, None), loss="margin", steps=3, step=0.8)
    assert torch.allclose(found.distances, share, rtol=1e-12) and found.accuracy == 0
    assert (found.forwards == 3).all() and (
        found.backwards == 3
    ).all()  # nothing is left to gain, so no third step


@pytest.mark.parametrize("norm", [2.0, INF])
def test_all_samples_shrink_by_the_same_factor(norm: float) -> None:
    check_contraction(norm)


@pytest.mark.parametrize("norm", [2.0, INF])
def test_the_way_back_scales_l2_and_clips_linf(norm: float) -> None:
    x = torch.tensor([[0.1, 0.5], [0.5, 0.5], [0.5, 0.5]])
    points = x + torch.tensor([[-0.3, 0.4], [0.1, 0.0], [0.2, -0.2]])
    distance = torch.tensor([0.5, 0.1, 0.4]).double()
    radius = torch.tensor([0.25, 0.1, 0.1]).double()
    back = module._back(points.clone(), x, ws.Threat(norm, 2, 1), distance, radius)
    scaled = [[0.0, 0.7], [0.6, 0.5], [0.55, 0.45]]  # the first coordinate ends at the wall
    clipped = [[0.0, 0.75], [0.6, 0.5], [0.6, 0.4]]
    assert torch.allclose(back, torch.tensor(clipped if norm == INF else scaled))
    assert torch.equal(back[1], points[1])  # who is not too far keeps every bit


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_slopes_are_the_gradients_of_the_losses_in_full_length(classes: int) -> None:
    z = 3 * torch.randn(
        200, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    y = torch.arange(200)
    z.requires_grad_(True)
    for name, loss in LOSSES.items():
        (gradient,) = torch.autograd.grad(loss(z, y % classes).sum(), z)
        assert torch.allclose(SLOPES[name](z.detach(), y % classes), gradient, atol=1e-12), name


def test_a_sure_model_still_has_a_gradient_of_cross_entropy() -> None:
    slope = ce_slope(
        torch.tensor([[60.0, 0.0, 0.0]]), torch.tensor([0])
    )  # softmax rounds to one-hot in float32
    assert torch.allclose(slope / math.exp(-60), torch.tensor([[-2.0, 1.0, 1.0]]))


def test_the_mean_norm_neither_overflows_nor_depends_on_order() -> None:
    values = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mu = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for power in (1.0, 2.0, 101.0):
        direct = float((mu * values**power).sum() ** (1 / power))
        assert math.isclose(mean_norm(values, mu, power), direct, rel_tol=1e-12)
        assert math.isclose(mean_norm(values * 1e200, mu, power), direct * 1e200, rel_tol=1e-12)
        assert mean_norm(values.flip(0), mu.flip(0), power) == mean_norm(values, mu, power)
    assert mean_norm(torch.zeros(3).double(), torch.ones(3).double(), 2.0) == 0


# --- beside a direct transcription of the paper, with autograd on the losses themselves
# ---------------------------------------
class Net(nn.Module):
    """A small smooth network in float64."""

    def __init__(self, classes: int = 5, shape=(2, 3, 3), wide: float = 3.0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(math.prod(shape), 16, dtype=torch.float64, generator=g))
        self.b = nn.Parameter(wide * torch.randn(16, classes, dtype=torch.float64, generator=g))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x - 0.5).flatten(1) @ self.a / 2) @ self.b


def problem(n: int = 24):
    model = Net()
    x, y = samples(n, (2, 3, 3), 5)
    y[3:] = model(x).argmax(1)[3:]  # mostly right
    return model, x, y


def printed(model, x, y, norm, order, eps, loss, steps, mu, domain):
    """All iterates and their accuracies, by the formulas of the paper as they stand."""
    s = 1 if norm == INF else 2
    q = 1 if order == INF else order / (order - 1)
    now = x.clone()
    iterates = []
    accuracies = []

    def size(v: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(v.flatten(1), norm, dim=1)[:, None, None, None]

    for _ in range(steps + 1):
        now.requires_grad_(True)
        z = model(now)
        right = z.argmax(1) == y
        iterates.append(now.detach())
        accuracies.append(float((mu * right).sum()))
        total = (LOSSES[loss](z, y) * (right if loss == "redlr" or order == INF else 1)).sum()
        (g,) = torch.autograd.grad(total, now)
        length = torch.linalg.vector_norm(g.flatten(1), s, dim=1)[:, None, None, None]
        h = g.sign() * g.abs() ** (s - 1) * length.clamp(min=1e-300) ** (q - s)
        weight = mu[:, None, None, None]
        if order < INF:
            h = h / (weight * size(h) ** order).sum() ** (1 / order)
        ahead = iterates[-1] + 1.875 * eps / steps * h - x
        ratio = (
            eps / size(ahead)
            if order == INF
            else eps / (weight * size(ahead) ** order).sum() ** (1 / order)
        )
        ratio = ratio.clamp(max=1)
        ahead = (
            torch.minimum(ahead.abs(), ratio * size(ahead)) * ahead.sign()
            if norm == INF
            else ratio * ahead
        )
        now = (x + ahead) if domain is None else (x + ahead).clamp(*domain)
    return iterates, accuracies


def check_printed(
    norm: float, order: float, loss: str, domain=(0.0, 1.0), steps: int = 12, weighted: bool = True
) -> None:
    model, x, y = problem()
    mu = (
        torch.rand(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        if weighted
        else torch.ones(len(x))
    )
    mu = mu.double() / mu.sum()
    eps = 0.03 if norm == INF else 0.12
    iterates, accuracies = printed(model, x, y, norm, order, eps, loss, steps, mu, domain)
    found = w_pgd(model, x, y, ws.Threat(norm, order, eps, domain), loss=loss, steps=steps, mu=mu)
    best = (
        steps if order == INF else min(range(steps + 1), key=lambda k: (round(accuracies[k], 9), k))
    )
    assert best > 0 and 0 < accuracies[best] < accuracies[0]  # the case tells something
    assert torch.allclose(found.points, iterates[best], atol=1e-10)
    assert math.isclose(found.accuracy, accuracies[best], abs_tol=1e-12)
    assert found.cost <= eps and found.verify(model) and (found.weights == 1).all()


@pytest.mark.parametrize("norm", [2.0, INF])
@pytest.mark.parametrize("order", [2.0, 3.0, INF])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_iterates_are_those_of_the_paper(norm: float, order: float, loss: str) -> None:
    check_printed(norm, order, loss)


@pytest.mark.parametrize("norm", [2.0, INF])
@pytest.mark.parametrize("order", [2.0, INF])
def test_the_iterates_are_those_of_the_paper_without_a_box(norm: float, order: float) -> None:
    check_printed(norm, order, "redlr", None, weighted=False)


# --- broken variants must be noticed
# ------------------------------------------------------------------------------------------
def fails(check, *arguments) -> None:
    with pytest.raises(AssertionError):
        check(*arguments)


@pytest.mark.parametrize("norm", [2.0, INF])
def test_a_wrong_sign_is_caught(norm: float, monkeypatch) -> None:
    pull = Tape.pull
    monkeypatch.setattr(Tape, "pull", lambda *arguments, **options: -pull(*arguments, **options))
    fails(check_shares, norm, 2.0, (0.5, 0.5))
    fails(check_printed, norm, 2.0, "redlr")
    fails(conformance, norm, INF)


@pytest.mark.parametrize("norm", [2.0, INF])
def test_a_broken_projection_is_caught(norm: float, monkeypatch) -> None:
    right = module._radii
    broken = {
        "none": lambda distance, *rest: distance,
        "each by itself": lambda distance, mu, threat, budget: distance.clamp(max=budget),
        "to the sphere": lambda distance, mu, threat, budget: torch.where(
            distance > 0, budget, 0.0
        ).double(),
        "half": lambda *arguments: right(*arguments) / 2,
    }
    for name, radii in broken.items():
        monkeypatch.setattr(module, "_radii", radii)
        fails(check_printed, norm, 2.0, "redlr")
        if (
            name != "none"
        ):  # where the gradient is constant, to come back once in the end is as good
            fails(check_contraction, norm)
    monkeypatch.setattr(module, "_radii", right)
    monkeypatch.setattr(module, "clip", lambda point, domain: point)
    fails(check_printed, norm, 2.0, "redlr")


@pytest.mark.parametrize(("loss", "broken"), WRONG.items())
def test_a_wrong_loss_is_caught(loss: str, broken, monkeypatch) -> None:
    monkeypatch.setitem(SLOPES, loss, broken)
    fails(check_printed, 2.0, 2.0, loss)
    fails(test_slopes_are_the_gradients_of_the_losses_in_full_length, 10)


def test_a_direction_without_the_lengths_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(module, "inner", lambda a, b: (a.flatten(1) != 0).any(1).double())
    fails(check_shares, 2.0, 2.0, (0.5, 0.5))
    fails(check_printed, 2.0, 2.0, "redlr")


# --- invariants
# --------------------------------------------------------------------------------------------------
def conformance(norm: float, order: float) -> None:
    check_attack(functools.partial(w_pgd, steps=20), norms=(norm,), orders=(order,))


@pytest.mark.slow_cases("inf-2.0", "2.0-2.0", "2.0-inf")
@pytest.mark.parametrize("norm", [2.0, INF])
@pytest.mark.parametrize("order", [2.0, INF])
def test_conformance(norm: float, order: float) -> None:
    conformance(norm, order)


@pytest.mark.slow_cases("*-2.0")
@pytest.mark.parametrize("norm", [2.0, INF])
@pytest.mark.parametrize("loss", LOSSES)
def test_batches_order_and_layout_do_not_matter(norm: float, loss: str) -> None:
    model = LinearClassifier.random(5, 12)  # its own rounding does not depend on the batch
    x, y = samples(23, (3, 2, 2), 5)
    y[3:] = model(x).argmax(1)[3:]
    mu = torch.rand(23, generator=torch.Generator().manual_seed(0)).double()
    mu = mu / mu.sum()
    threat = ws.Threat(norm, 2, 0.1)

    def run(order: torch.Tensor, **options) -> torch.Tensor:
        data = x[order].contiguous(memory_format=options.pop("layout", torch.contiguous_format))
        found = w_pgd(model, data, y[order], threat, loss=loss, steps=15, mu=mu[order], **options)
        points = torch.empty_like(x)
        points[order] = found.points
        accuracies.append(found.accuracy)
        return points

    accuracies: list[float] = []
    same = torch.arange(23)
    mixed = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    reference = run(same)
    assert not torch.equal(reference, x)
    layout = run(same, layout=torch.channels_last)
    for points in (
        run(same, batch_size=1),
        run(same, batch_size=7),
        run(mixed),
        run(mixed, batch_size=4),
        layout,
    ):
        # The softmax weighs all classes, and in which order the model's own backward pass adds them
        # depends on the batch.
        assert (
            torch.allclose(points, reference, rtol=0, atol=1e-12)
            if loss == "ce"
            else torch.equal(points, reference)
        )
    assert max(accuracies) - min(accuracies) < 1e-12


@pytest.mark.parametrize("norm", [2.0, INF])
@pytest.mark.parametrize("order", [2.0, 7.0, INF])
def test_the_cost_is_within_eps_to_the_last_bit(norm: float, order: float) -> None:
    model = Net().float()
    for seed in range(0, 5, 2):
        x, _ = samples(20, (2, 3, 3), 5, seed)
        x = x.float()
        mu = torch.rand(20, generator=torch.Generator().manual_seed(seed)).double()
        for attack in (w_pgd, w_fgsm):
            found = attack(
                model,
                x,
                model(x).argmax(1),
                ws.Threat(norm, order, 0.003 * 10**seed),
                loss="ce",
                mu=mu,
            )
            assert found.cost <= found.threat.eps and found.verify(model)


@pytest.mark.parametrize("order", [2.0, INF])
def test_what_rounding_adds_is_taken_out(order: float) -> None:
    x = torch.zeros(2, 3)
    mu = torch.tensor([0.5, 0.5]).double()
    threat = ws.Threat(2, order, 1)
    points = torch.full((2, 3), 1.000001 / math.sqrt(3))
    inside = module._afford(points, x, threat, mu)
    assert torch.allclose(inside, points, rtol=1e-5)
    length = torch.linalg.vector_norm(inside.double(), dim=1)
    assert 0.99999 < transport_cost(mu, torch.ones(2).double(), length, order) <= 1
    assert torch.equal(module._afford(inside, x, threat, mu), inside)


def test_redlr_leaves_wrong_samples_alone_and_the_others_spend_on_them() -> None:
    model, x, y = problem()
    wrong = model(x).argmax(1) != y
    threat = ws.Threat(2, 2, 0.4)
    assert wrong.any()
    assert (w_pgd(model, x, y, threat).distances[wrong] == 0).all()
    assert (w_pgd(model, x, y, threat, loss="margin").distances[wrong] > 0).all()


def test_a_sample_of_no_weight_does_not_count() -> None:
    model, x, y = problem()
    mu = (torch.arange(len(x)) % 2).double()
    for order in (2.0, INF):
        threat = ws.Threat(2, order, 0.4)
        found = w_pgd(model, x, y, threat, mu=mu)
        half = w_pgd(model, x[1::2], y[1::2], threat)
        assert torch.allclose(found.points[1::2], half.points, atol=1e-12) and torch.equal(
            found.points[::2], x[::2]
        )
        assert math.isclose(found.accuracy, half.accuracy) and (found.backwards[::2] == 0).all()


def test_a_gradient_that_is_not_finite_does_not_spoil_the_others() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([2 * x[:, 0].sqrt() + 0.5, 4 * x[:, 1]], 1)  # no derivative at 0

    x = torch.tensor([[0.0, 0.1], [0.3, 0.35]]).double()
    y = torch.zeros(2, dtype=torch.int64)
    found = w_pgd(Root(), x, y, ws.Threat(2, 2, 0.2))
    assert found.accuracy == 0 and found.verify(Root())


class Ridge(nn.Module):
    """One pixel, and the second class wins only within 0.05 of 0.31."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.zeros_like(x[:, 0]), 0.0025 - (x[:, 0] - 0.31) ** 2], 1)


def check_best() -> None:
    # Steps of 0.3 from 0: at 0.3 it is fooled, at 0.6 not, and then the climb comes back.
    x = torch.zeros(1, 1).double()
    y = torch.zeros(1, dtype=torch.int64)
    found = w_pgd(Ridge(), x, y, ws.Threat(2, 2, 1), loss="margin", steps=2, step=0.3)
    assert math.isclose(found.points.item(), 0.3) and found.accuracy == 0


def test_the_best_iterate_is_kept(monkeypatch) -> None:
    check_best()

    def newest(self) -> None:
        self.best = self.points

    monkeypatch.setattr(module._Ascent, "keep_best", newest)
    fails(check_best)


def test_best_is_by_weighted_accuracy() -> None:
    # Sample 0 is fooled by the first step and lost again with the second, which fools sample 1.
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ridge = 0.0025 - (x[:, 0] - 0.31) ** 2
            ramp = x[:, 1] - 0.5
            return torch.stack(
                [torch.zeros_like(ramp), torch.where(x[:, 2] > 0, ramp, 5 * ridge)], 1
            )

    x = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).double()
    for heavy, predicted in ((0.8, [1, 0]), (0.2, [0, 1])):
        mu = torch.tensor([heavy, 1 - heavy])
        threat = ws.Threat(INF, 64, 5)  # at a large order all steps are nearly as long
        found = w_pgd(
            Two(), x, torch.zeros(2).long(), threat, loss="margin", steps=2, step=0.3, mu=mu
        )
        assert found.predicted.tolist() == predicted and math.isclose(
            found.accuracy, 0.2, rel_tol=1e-6
        )


# --- passes
# --------------------------------------------------------------------------------------------------
class Counting(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.rows = 0
        self.largest = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = self.rows + len(x)
        self.largest = max(self.largest, len(x))
        return self.model(x)


@pytest.mark.parametrize(("order", "forwards"), [(2.0, 51), (INF, 50)])
def test_passes(order: float, forwards: int) -> None:
    model, x, _ = problem()
    right = model(x).argmax(1)
    hard = w_pgd(model, x, right, ws.Threat(2, order, 1e-6))  # nothing flips so near
    assert (
        (hard.forwards == forwards).all()
        and (hard.backwards == 50).all()
        and (hard.checks == 1).all()
    )
    step = w_fgsm(model, x, right, ws.Threat(2, order, 1e-6))
    assert (step.forwards == forwards - 49).all() and (step.backwards == 1).all()
    wrong = w_pgd(model, x, (right + 1) % 5, ws.Threat(2, order, 1))
    # A gradient is executed before it is known that they are wrong.
    assert (wrong.forwards == 1).all() and (wrong.backwards == 1).all()


@pytest.mark.parametrize("order", [2.0, INF])
def test_every_call_is_counted_and_a_sample_that_rests_is_not_called(order: float) -> None:
    model, x, y = problem()
    counting = Counting(model)
    found = w_pgd(counting, x, y, ws.Threat(2, order, 0.15), batch_size=5)
    looks = 2 * 8  # at the model itself, before the attack
    assert (
        counting.rows == int((found.forwards + found.checks).sum()) + looks
        and counting.largest <= 8
    )
    fooled = found.predicted != y
    assert found.forwards[fooled].double().mean() < 0.8 * found.forwards[~fooled].double().mean()
    assert (found.backwards <= found.forwards).all()
    assert found.backwards.max() == 50


def test_progress_is_told() -> None:
    model, x, y = problem()
    told: list[float] = []
    w_pgd(model, x, y, ws.Threat(2, 2, 1e-6), steps=4, progress=told.append)
    assert told[:4] == [0.25, 0.5, 0.75, 1.0]


# --- bad input
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("threat", "options", "message"),
    [
        (ws.Threat(2, 1, 0.1), {}, "order 1"),
        (ws.Threat(1, 2, 0.1), {}, "l1"),
        (ws.Threat(2, 2, 0.1), {"loss": "redl"}, "'redlr'"),
        (ws.Threat(2, 2, 0.1), {"steps": 0}, "steps is 0"),
        (ws.Threat(2, 2, 0.1), {"step": 0}, "step is 0"),
        (ws.Threat(2, 2, 0.1), {"step": "inf"}, "positive and finite"),
        (ws.Threat(2, 2, 0.1), {"mu": torch.ones(3)}, "mu must hold"),
        (ws.Threat(2, 2, 0.1), {"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_input(threat, options, message: str) -> None:
    model, x, y = problem()
    with pytest.raises(InputError, match=message):
        w_pgd(model, x, y, threat, **options)
    if not {"steps", "step"} & set(options):
        with pytest.raises(InputError, match=message):
            w_fgsm(model, x, y, threat, **options)


def test_options_are_recorded_and_text_is_read() -> None:
    model, x, y = problem()
    found = w_pgd(model, x, y, ws.Threat(INF, 2, "8/255"), steps=3, step="1/255", seed=4)
    assert (
        found.info["options"] == {"loss": "redlr", "steps": 3, "step": 1 / 255}
        and found.info["seed"] == 4
    )
    assert (
        w_pgd(model, x, y, ws.Threat(2, 2, 0.4), steps=30).info["options"]["step"]
        == 1.875 * 0.4 / 30
    )
    assert w_fgsm(model, x, y, ws.Threat(2, 2, 0.4)).info["options"] == {
        "loss": "redlr",
        "steps": 1,
        "step": 0.4,
    }


# --- real networks: accuracy in % of the authors' code with the same settings (ReDLR) over Omega_2
# and Omega_inf -------------- Their l2 projection at order inf always goes to the sphere; with that
# repaired it gives 91.0 where the star is.
THEIRS = {
    ("mnist_madry_tiny", 200, INF, 0.3): (57.5, 91.5),
    ("mnist_madry_tiny", 200, 2.0, 1.5): (91.5, 91.0),  # *
    ("mnist_trades", 100, INF, 0.3): (77.0, 96.0),
    ("mnist_trades", 100, 2.0, 1.5): (97.0, 98.0),
    ("cifar_cnn_a_adv", 200, INF, 2 / 255): (34.0, 46.0),
    ("cifar_cnn_a_adv", 200, 2.0, 0.25): (34.5, 47.5),
    ("vnn_resnet4b", 200, INF, 1 / 255): (66.5, None),
    ("vnn_resnet4b", 200, 2.0, 0.25): (53.0, None),
}
FAST = [("mnist_madry_tiny", 200, INF, 0.3), ("cifar_cnn_a_adv", 200, 2.0, 0.25)]


def check_real(zoo, case) -> None:
    name, n, norm, eps = case
    model, dataset = zoo.load(name)
    x, y = zoo.images(dataset, n)
    for order, theirs in zip((2, INF), THEIRS[case]):
        if theirs is not None:
            found = w_pgd(model, x, y, ws.Threat(norm, order, eps))
            assert 100 * found.accuracy <= theirs + 0.5 + 1e-9
            assert found.cost <= eps and found.verify(model, batch_size=64)
            assert found.forwards.max() <= 51 and found.backwards.max() <= 50
            again = ws.allocate(found.flips, eps, order)  # without the points that moved in vain
            assert math.isclose(again.accuracy, found.accuracy) and again.cost <= found.cost


@pytest.mark.slow_cases("cifar_cnn_a_adv-l2")
@pytest.mark.parametrize("case", FAST, ids=lambda c: f"{c[0]}-l{c[2]:g}")
def test_matches_the_authors_with_half_the_forward_passes(zoo, case) -> None:
    check_real(zoo, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in THEIRS if c not in FAST], ids=lambda c: f"{c[0]}-l{c[2]:g}"
)
def test_matches_the_authors_on_more_networks(zoo, case) -> None:
    check_real(zoo, case)
