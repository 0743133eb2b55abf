"""WDA and WDA++ against closed forms, and the conformance kit against attacks that are broken
on purpose.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.attacks import walk as walk_module
from wassail.attacks.walk import default_step
from wassail.testing import LinearClassifier, check_attack, samples

INF = math.inf
NORMS = (1.0, 2.0, INF)


@pytest.mark.slow_cases("wda-inf", "wda-1.0", "wda_pp-2.0", "wda_pp-1.0")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["wda", "wda_pp"])
def test_conformance(name: str, norm: float) -> None:
    check_attack(getattr(ws, name), norms=(norm,))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
def test_wda_pp_is_exact_for_two_classes_without_a_box(norm: float, domain) -> None:
    model = LinearClassifier.random(2, 12)
    x, y = samples(40, (3, 4), 2)
    exact = model.distances(x, y, norm, domain)
    step = float(exact[torch.isfinite(exact)].max()) / 15
    found = ws.nearest(model, x, y, norm, domain, "wda++", step=step, steps=40, search=10).distances
    assert (found >= exact - 1e-12).all()
    assert torch.equal(found == 0, exact == 0)
    if (
        domain is None
        # every step goes straight to the boundary, so only the bisection of the last one is left
        # over
    ):
        assert torch.isfinite(found).all()
        assert (found - exact <= step / 2**10 + 1e-8).all()
    finer = ws.nearest(model, x, y, norm, domain, "wda++", step=step, steps=40, search=40).distances
    assert (finer <= found + 1e-15).all()
    if domain is None:
        assert torch.allclose(finer, exact, atol=1e-7)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
@pytest.mark.parametrize("classes", [3, 6])
def test_wda_pp_never_beats_the_exact_distance(norm: float, domain, classes: int) -> None:
    model = LinearClassifier.random(classes, 8, seed=classes)
    x, y = samples(40, (8,), classes)
    y[5:] = model(x).argmax(1)[5:]  # mostly right
    exact = model.distances(x, y, norm, domain)
    flips = ws.nearest(
        model, x, y, norm, domain, "wda++", step=0.3 * float(exact.median()), steps=60
    )
    assert torch.equal(torch.isfinite(flips.distances), torch.isfinite(exact))
    assert (flips.distances >= exact - 1e-12).all()
    for order in (1, 2, INF):
        eps = float(exact[exact > 0].median()) / 2
        adversary = ws.allocate(flips, eps, order)
        weights = ws.knapsack(flips.distances, eps, order)
        assert adversary.accuracy == pytest.approx(1 - float(weights.mean()), abs=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_wda_flips_exactly_the_samples_within_its_radius(norm: float) -> None:
    """K = 2, no box: the worst point of a ball is known, so kappa^(1/p) eps decides who flips."""
    model = LinearClassifier.random(2, 6)
    x, y = samples(60, (6,), 2)
    exact = model.distances(x, y, norm, None)
    eps = float(exact.median())
    for order in (1.0, 2.0, INF):
        for kappa in (1.0, 2.0, 3.0):
            adversary = ws.wda(model, x, y, ws.Threat(norm, order, eps, None), kappa=kappa)
            radius = kappa ** (1 / order) * eps
            flipped = exact < radius * (1 - 1e-6)
            assert torch.equal(adversary.flips.success, flipped)
            expected = float(
                ((exact > 0).double() * (1 - 1 / kappa) + (~flipped).double() / kappa).mean()
            )
            assert adversary.accuracy == pytest.approx(expected, abs=1e-12)
            assert adversary.cost <= eps and (adversary.distances <= radius).all()


def test_default_steps_are_the_papers() -> None:
    assert (
        default_step(INF, 8 / 255) == 0.02
        and default_step(INF, 4 / 255) == 0.01
        and default_step(2.0, 0.5) == 0.2
    )
    assert default_step(INF, 2 / 255) == pytest.approx(0.64 * 2 / 255) and default_step(
        2.0, 0.25
    ) == pytest.approx(0.1)
    x, y = samples(3, (4,), 2)
    result = ws.wda(LinearClassifier.random(2, 4), x, y, ws.Threat(INF, 1, "8/255"), kappa=4)
    assert result.info["options"]["step"] == 0.02, "the step is never scaled by kappa"


class Plain(nn.Module):
    """Ten classes, far from flipping: every sample takes all the steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = 0.01 * torch.stack([x.flatten(1).sum(1) * c for c in range(10)], 1)
        return z + 100 * nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), 10)


def test_passes_are_those_of_the_algorithms() -> None:
    x = torch.rand(3, 4)
    y = torch.zeros(3, dtype=torch.int64)
    result = ws.wda(Plain(), x, y, ws.Threat(INF, 1, 0.1))
    # the clean pass and one more for each later probe step, 9 candidates in each; then ten steps,
    # one pass each, plus the winner's pass with its graph when the rival is fixed
    assert (
        result.forwards.tolist() == [10 + 90 + 1 + 10] * 3
        and result.backwards.tolist() == [90 + 10] * 3
    )
    assert result.checks.tolist() == [1, 1, 1]
    flips = ws.nearest(Plain(), x, y, method="wda++", eps=0.1)
    assert flips.forwards.tolist() == [20 + 100] * 3 and flips.backwards.tolist() == [100] * 3
    assert torch.isinf(flips.distances).all() and torch.equal(flips.points, x)
    assert ws.nearest(Plain(), x, y, method="wda++", eps=0.1, topk=1).forwards.tolist() == [21] * 3


def test_finished_samples_stop_and_wrong_ones_cost_the_first_gradients() -> None:
    model = LinearClassifier.random(4, 6)
    x, y = samples(30, (6,), 4)
    flips = ws.nearest(model, x, y, 2, method="wda++", step=0.05, steps=30, topk=3)
    wrong = flips.distances == 0
    assert (
        wrong.any() and (flips.forwards[wrong] == 1).all() and (flips.backwards[wrong] == 3).all()
    )
    near = flips.backwards[~wrong] // 3  # steps taken
    assert near.min() < near.max() <= 30
    # one pass at each iterate, three candidates a step, ten bisections if it flipped
    assert torch.equal(
        flips.forwards[~wrong], near + 3 * near + 10 * torch.isfinite(flips.distances[~wrong])
    )


def test_raw_logit_selection_is_the_authors_switch() -> None:
    model = LinearClassifier.random(5, 6, seed=2)
    x, _ = samples(60, (6,), 5)
    y = model(x).argmax(1)
    by = {
        s: ws.nearest(model, x, y, 2, None, "wda++", step=0.05, steps=60, select=s)
        for s in ("margin", "logit")
    }
    assert not torch.equal(by["margin"].distances, by["logit"].distances)


def test_l1_walk_does_not_stick_at_a_saturated_pixel() -> None:
    """The steepest pixel has no room: the l1 walk has to use the next ones."""
    weight = torch.tensor([[0.0, 0.0, 0.0, 0.0], [10.0, 1.0, 0.9, 0.8]], dtype=torch.float64)
    model = LinearClassifier(weight, torch.tensor([0.0, -11.2], dtype=torch.float64))
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0])
    exact = model.distances(x, y, 1.0, (0.0, 1.0))
    assert exact.item() == pytest.approx(1 + 0.2 / 0.9)
    found = ws.nearest(model, x, y, 1, (0, 1), "wda++", step=0.1, steps=40, search=30)
    assert found.distances.item() == pytest.approx(exact.item(), abs=1e-6)


def test_stored_flips_clear_the_tolerance() -> None:
    model = LinearClassifier.random(3, 6).float()
    x = samples(50, (6,), 3)[0].float()
    y = samples(50, (6,), 3)[1]
    flips = ws.nearest(model, x, y, 2, method="wda++", step=0.05, search=30)
    moved = flips.success & (flips.distances > 0)
    lead = ws.losses.margin(model(flips.points), y)[moved]
    size = torch.maximum(model(x).abs().amax(1), model(flips.points).abs().amax(1))[moved]
    assert moved.any() and (lead >= 0.9e-5 * size).all()


def broken(change):
    """WDA with one of its parts replaced."""

    def attack(model, x, y, threat, **options):
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            return ws.wda(model, x, y, threat, **options)

    return attack


def wrong_sign(patch) -> None:
    steepest = walk_module.steepest
    patch.setattr(walk_module, "steepest", lambda x, g, *rest: steepest(x, -g, *rest))


def no_box(patch) -> None:
    patch.setattr(
        walk_module,
        "steepest",
        lambda x, g, norm, radius, domain: ws.geometry.steepest(x, g, norm, radius),
    )
    patch.setattr(
        "wassail.attacks.wda.project",
        lambda p, c, norm, radius, domain: ws.geometry.project(p, c, norm, radius, None),
    )
    patch.setattr("wassail.attacks.wda.pull_inside", lambda point, *rest: point)


def no_projection(patch) -> None:
    patch.setattr("wassail.attacks.wda.project", lambda p, c, norm, radius, domain: p)
    patch.setattr("wassail.attacks.wda.pull_inside", lambda point, *rest: point)


def first_sample_for_all(patch) -> None:
    patch.setattr(
        "wassail.attacks.wda.project",
        lambda p, c, *rest: ws.geometry.project(p, c[:1].expand_as(c), *rest),
    )


@pytest.mark.parametrize("change", [wrong_sign, no_box, no_projection, first_sample_for_all])
def test_the_kit_fails_a_broken_attack(change) -> None:
    with pytest.raises(AssertionError):
        check_attack(broken(change), norms=(2.0,))


def claims_less(model, x, y, threat, **options):
    result = ws.wda_pp(model, x, y, threat, **options)
    return replace(result, distances=result.distances / 2)


def claims_flips(model, x, y, threat, **options):
    result = ws.wda_pp(model, x, y, threat, **options)
    return replace(
        result, predicted=(y + 1) % len(model.weight), weights=torch.ones_like(result.weights)
    )


def depends_on_batch(model, x, y, threat, batch_size=None, **options):
    return ws.wda_pp(
        model, x, y, threat, step=threat.eps / (5 if batch_size == 7 else 3), batch_size=batch_size
    )


def depends_on_order(model, x, y, threat, **options):
    return ws.wda_pp(
        model, x, y, threat, step=threat.eps * (0.3 + 0.01 * float(x[:1].sum())), **options
    )


def does_nothing(model, x, y, threat, **options):
    return ws.allocate(
        ws.Flips.from_points(model, x, y, x, threat.norm, threat.domain), threat.eps, threat.order
    )


@pytest.mark.parametrize(
    "attack", [claims_less, claims_flips, depends_on_batch, depends_on_order, does_nothing]
)
def test_the_kit_fails_a_liar(attack) -> None:
    with pytest.raises(AssertionError):
        check_attack(attack, norms=(INF,))


def test_the_example_in_contributing_conforms() -> None:
    """The page that says how to add an attack is true: its example passes the kit (one step is
    exact for K = 2).
    """
    from pathlib import Path

    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    scope: dict[str, Any] = {}
    exec(text.split("```python")[1].split("```")[0], scope)
    check_attack(scope["one_step"], norms=(2.0,), classes=(2,), domains=(None,))
