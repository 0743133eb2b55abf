"""APGD at a fixed radius: closed forms, conformance, targets, draws, pass counts, broken parts."""

import math

import pytest
import torch
from torch import Tensor, nn

from wassail.attacks import apgd as module
from wassail.attacks.apgd import apgd
from wassail.errors import InputError
from wassail.losses import ASCENTS, cross_entropy, dlr, margin, targeted_dlr_ascent
from wassail.network import Tape
from wassail.testing import LinearClassifier, check_attack, samples
from wassail.threat import Threat

INF = math.inf
NORMS = (1.0, 2.0, INF)


def right(
    classes: int, n: int = 30, shape: tuple[int, ...] = (3, 2, 2)
) -> tuple[LinearClassifier, Tensor, Tensor]:
    """A linear model and samples that it gets right."""
    model = LinearClassifier.random(classes, math.prod(shape), seed=classes)
    x, _ = samples(n, shape, classes)
    return model, x, model(x).argmax(1)


@pytest.mark.slow_cases("ce-norms0", "targeted-norms3", "margin-norms2")
@pytest.mark.parametrize(
    ("loss", "norms"), [("ce", NORMS), ("dlr", (2.0,)), ("margin", (INF,)), ("targeted", (1.0,))]
)
def test_apgd_conforms(loss: str, norms: tuple[float, ...]) -> None:
    def attack(model, x, y, threat, **options):
        return apgd(model, x, y, threat, loss=loss, steps=15, **options)

    check_attack(attack, norms=norms, orders=(1.0, INF))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
def test_two_classes_fall_exactly_where_the_closed_form_says(norm: float, domain) -> None:
    model, x, y = right(2)
    exact = model.distances(x, y, norm, domain)
    eps = float(exact.median())
    result = apgd(model, x, y, Threat(norm, INF, eps, domain), loss="margin", steps=60)
    fell = result.predicted != y
    assert fell[exact < 0.97 * eps].all() and not fell[exact > eps].any()


def test_targeted_dlr_runs_reach_every_rival() -> None:
    """APGD-T falls where any rival can be reached, even when the loudest cannot."""
    weight = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 5.0]], dtype=torch.float64)
    model = LinearClassifier(weight, torch.tensor([1.0, 0.9, -1.0], dtype=torch.float64))
    x = torch.zeros(1, 2, dtype=torch.float64)
    y = torch.tensor([0])
    threat = Threat(INF, INF, 0.5, None)  # class 1 needs 1.0, class 2 only 0.4
    assert apgd(model, x, y, threat, loss="targeted", targets=2).accuracy == 0
    assert apgd(model, x, y, threat, loss="targeted", targets=1).accuracy == 1


@pytest.mark.parametrize("loss", sorted(ASCENTS))
def test_ascents_have_the_direction_of_the_true_gradient(loss: str) -> None:
    z = torch.randn(
        40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    y = torch.arange(40) % 6
    true = {"ce": cross_entropy, "dlr": dlr, "margin": margin}[loss](z, y)
    (gradient,) = torch.autograd.grad(true.sum(), z)
    value, weight = ASCENTS[loss](z.detach(), y)
    assert (weight.abs().amax(1) > 0).all()
    keep = torch.ones(40, dtype=torch.bool)
    if (
        loss == "dlr"
        # constant, with no gradient at all, where the label is third: there the ascent follows the
        # margin
    ):
        keep = z.topk(3, dim=1).indices[:, 2] != y
        assert (
            torch.equal(weight[~keep], ASCENTS["margin"](z.detach(), y)[1][~keep])
            and not keep.all()
        )
    cosine = torch.cosine_similarity(gradient, weight, dim=1)[keep]
    assert torch.allclose(cosine, torch.ones_like(cosine))
    order = true[keep].argsort()  # the same order, which is all that an ascent looks at
    assert (value[keep][order].diff() >= 0).all()


def test_targeted_dlr_has_the_true_gradient() -> None:
    z = torch.randn(
        40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    y = torch.arange(40) % 6
    rival = (torch.arange(40) + 1 + torch.arange(40) % 5) % 6
    order = z.sort(1).values
    every = torch.arange(40)
    true = (z[every, rival] - z[every, y]) / (
        order[:, -1] - (order[:, -3] + order[:, -4]) / 2 + 1e-12
    )
    (gradient,) = torch.autograd.grad(true.sum(), z)
    value, weight = targeted_dlr_ascent(z.detach(), y, rival)
    cosine = torch.cosine_similarity(gradient, weight, dim=1)
    assert torch.allclose(value, true) and torch.allclose(cosine, torch.ones_like(cosine))


def test_a_softmax_that_rounds_to_one_does_not_stop_cross_entropy() -> None:
    """Logits scaled by 1e4: the reference's cross entropy has no gradient left in float32."""
    model, x, y = right(4)

    def loud(x: Tensor) -> Tensor:
        return 1e4 * model(x.double()).float()

    x = x.float()
    assert (torch.softmax(loud(x), 1).max(1).values == 1).float().mean() > 0.9
    exact = model.distances(x.double(), y, INF, (0.0, 1.0))
    result = apgd(loud, x, y, Threat(INF, INF, 1.2 * float(exact.max())), loss="ce")
    assert result.accuracy == 0


@pytest.mark.parametrize("norm", NORMS)
def test_a_target_is_reached_or_it_is_no_success(norm: float) -> None:
    model, x, y = right(4)
    target = (y + 1) % 4
    result = apgd(
        model,
        x,
        y,
        Threat(norm, INF, {1.0: 4.0, 2.0: 1.5, INF: 0.6}[norm]),
        loss="ce",
        target=target,
    )
    untargeted = apgd(
        model, x, y, Threat(norm, INF, {1.0: 4.0, 2.0: 1.5, INF: 0.6}[norm]), loss="ce"
    )
    arrived = result.predicted == target
    assert arrived.float().mean() > 0.5
    assert (untargeted.predicted == target).float().mean() < arrived.float().mean()
    assert result.info["targeted"] and not untargeted.info["targeted"]


def test_targets_that_make_no_sense() -> None:
    model, x, y = right(4)
    threat = Threat(INF, INF, 0.1)
    with pytest.raises(InputError, match="own label"):
        apgd(model, x, y, threat, target=y)
    with pytest.raises(InputError, match="one class index"):
        apgd(model, x, y, threat, target=y[:3])
    with pytest.raises(InputError, match="not a targeted attack"):
        apgd(model, x, y, threat, loss="targeted", target=(y + 1) % 4)
    with pytest.raises(InputError, match="loss 'cross'"):
        apgd(model, x, y, threat, loss="cross")
    with pytest.raises(InputError, match="at least 1"):
        apgd(model, x, y, threat, restarts=0)


def test_passes_are_what_the_docstring_says() -> None:
    model, x, y = right(4, n=6)
    stand = Threat(2.0, INF, 1e-3)  # nothing falls
    once = apgd(model, x, y, stand, steps=10)
    assert once.forwards.tolist() == [1 + 11] * 6 and once.backwards.tolist() == [10] * 6
    again = apgd(model, x, y, stand, steps=10, restarts=3)
    assert again.forwards.tolist() == [1 + 33] * 6 and again.backwards.tolist() == [30] * 6
    rivals = apgd(model, x, y, stand, steps=10, loss="targeted")
    assert rivals.forwards.tolist() == [1 + 3 * 11] * 6  # only three rivals exist
    drawn = apgd(model, x, y, stand, steps=10, eot=4)
    assert drawn.forwards.tolist() == [1 + 44] * 6 and drawn.backwards.tolist() == [40] * 6
    fallen = apgd(model, x, y, Threat(2.0, INF, 50.0), steps=10, restarts=3)
    assert fallen.accuracy == 0 and int(fallen.forwards.max()) < 1 + 2 * 11


def test_draws_are_averaged_for_a_randomised_model() -> None:
    """Noise hides the gradient's sign in one draw; the mean of 30 shows it."""
    model, x, y = right(2, n=20)
    generator = torch.Generator().manual_seed(0)
    noise = 30 * float(model.weight.detach().abs().mean())

    def noisy(x: Tensor) -> Tensor:
        tilt = noise * torch.randn(x.shape, dtype=x.dtype, generator=generator)
        return model(x) + ((x - x.detach()) * tilt).flatten(1).sum(1, keepdim=True) * torch.tensor(
            [1.0, -1.0]
        )

    threat = Threat(2.0, INF, 0.8 * float(model.distances(x, y, 2.0, (0.0, 1.0)).max()))
    few = apgd(noisy, x, y, threat, steps=10, loss="margin")
    many = apgd(noisy, x, y, threat, steps=10, loss="margin", eot=100)
    assert many.accuracy < few.accuracy


def test_large_balls_are_used_for_l1_only() -> None:
    model, x, y = right(4, n=5)
    assert not torch.equal(
        apgd(model, x, y, Threat(1.0, INF, 0.05), steps=20).points,
        apgd(model, x, y, Threat(1.0, INF, 0.05), steps=20, large=False).points,
    )
    assert torch.equal(
        apgd(model, x, y, Threat(2.0, INF, 0.05), steps=20).points,
        apgd(model, x, y, Threat(2.0, INF, 0.05), steps=20, large=True).points,
    )


def test_a_thousand_classes() -> None:
    model, x, y = right(1000, n=4, shape=(40,))
    result = apgd(model, x, y, Threat(2.0, INF, 1.0), loss="targeted", steps=10)
    assert bool(result.verify(model)) and result.accuracy < 1


def test_points_stay_inside_a_small_ball_in_float32() -> None:
    """2/255 around 0.9: one rounding of a coordinate is 4e-6 of the radius, enough to leave the
    ball and lose the flip.
    """
    generator = torch.Generator().manual_seed(0)
    x = 0.8 + 0.2 * torch.rand(20, 3, 8, 8, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    y = model(x).argmax(1)
    for norm, eps in ((INF, 20 / 255), (2.0, 1.0), (1.0, 12.0)):
        result = apgd(model, x, y, Threat(norm, INF, eps))
        assert result.accuracy < 0.2 and result.cost <= eps and bool(result.verify(model))


# Each mutation must be noticed by the conformance kit.
@pytest.mark.parametrize("broken", ["sign", "projection", "loss", "step"])
def test_broken_parts_are_caught(broken: str, monkeypatch) -> None:
    if broken == "sign":
        pull = Tape.pull
        monkeypatch.setattr(
            Tape, "pull", lambda *arguments, **options: -pull(*arguments, **options)
        )
    elif broken == "projection":
        monkeypatch.setattr(module, "_into", lambda point, center, norm, radius, domain: center)
    elif broken == "loss":

        def wrong(z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(len(z), dtype=z.dtype), torch.ones_like(z)

        monkeypatch.setattr(module, "objective", lambda tracker, loss: wrong)
    else:
        monkeypatch.setattr(module, "maximiser", lambda g, norm: torch.zeros_like(g))
    with pytest.raises(AssertionError):
        check_attack(
            lambda *data, **options: apgd(*data, steps=20, **options), norms=(2.0,), orders=(INF,)
        )


def test_one_network_of_real_images(zoo) -> None:
    """The reference's APGD-CE and -DLR leave 88.0 and 88.5 % on these images (published with
    the data).
    """
    model, _ = zoo.load("mnist_madry_tiny")
    x, y = zoo.images("mnist", 200)
    result = apgd(model, x, y, Threat(INF, INF, 0.3), loss="ce", steps=100)
    assert result.accuracy <= 0.885 and bool(result.verify(model))
