import math
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.evaluation.indicators import check, converged, indicators, mode, transfer
from wassail.evaluation.plan import plan
from wassail.evaluation.result import Finding, Row
from wassail.testing import LinearClassifier

INF = math.inf
X, Y = ws.zoo.data("digits")
MLP = ws.zoo.load("digits-mlp")
FEW = 40


class Wrapped(nn.Module):
    """A network with something before and after it."""

    def __init__(
        self,
        before: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor], Tensor] = lambda z: z,
    ) -> None:
        super().__init__()
        self.inner = MLP
        self.before = before
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.inner(self.before(x)))


ROUNDED = Wrapped(before=lambda x: (4 * x).round() / 4)  # the gradient of round is zero
CLAMPED = Wrapped(after=lambda z: (1e4 * z).clamp(-2e4, 2e4))
SHUFFLED = torch.where(
    torch.arange(500) < 6, Y, (Y + 3) % 10
)  # 15 % of the first 40 are right: chance could do that
SATURATED = Wrapped(after=lambda z: 10 * torch.sigmoid(4 * z))


def levels(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in found}


def test_an_honest_network_passes_every_check() -> None:
    found = check(ws.zoo.load("digits-cnn-adv"), X, Y, (0, 1))
    names = [
        "range",
        "labels",
        "determinism",
        "precision",
        "accuracy",
        "saturation",
        "zero-gradients",
    ]
    assert levels(found) == dict.fromkeys(names, "ok")
    assert all(finding.text.endswith(".") for finding in found)
    assert "100 of the first 100" in found[4].text and "10 of 10 classes" in found[1].text
    assert check(MLP, X[:0], Y[:0], (0, 1)) == []


@pytest.mark.parametrize(
    ("name", "level", "say", "model", "x", "y"),
    [
        (
            "range",
            "warning",
            "1 of the first 40 samples are constant",
            MLP,
            X * (Y.cumsum(0) != 1)[:, None, None, None],
            Y,
        ),
        ("range", "warning", "divided by 255 twice", MLP, X / 255, Y),
        ("range", "warning", "less than half", MLP, X / 3, Y),
        ("labels", "note", "the data are sorted", MLP, X[Y == 3], Y[Y == 3]),
        (
            "determinism",
            "warning",
            "asked twice",
            Wrapped(after=lambda z: z + torch.randn_like(z)),
            X,
            Y,
        ),
        (
            "determinism",
            "warning",
            "other samples beside",
            Wrapped(after=lambda z: z - z.mean(0)),
            X,
            Y,
        ),
        ("precision", "warning", "bfloat16", Wrapped(after=lambda z: z.bfloat16()), X, Y),
        (
            "accuracy",
            "warning",
            "6 of the .* chance .10 %.: the usual cause is a normalisation",
            MLP,
            X,
            SHUFFLED,
        ),
        (
            "accuracy",
            "warning",
            r"the predictions are the labels \+1",
            Wrapped(after=lambda z: z.roll(1, 1)),
            X,
            Y,
        ),
        (
            "saturation",
            "note",
            "40 of 40 samples lie more than 100 apart",
            Wrapped(after=lambda z: 1e4 * z),
            X,
            Y,
        ),
        ("zero-gradients", "warning", "at 39 correct samples 39 are zero", ROUNDED, X, Y),
        (
            "zero-gradients",
            "warning",
            "are zero",
            Wrapped(after=lambda z: z.clamp(-1e-3, 1e-3) + z.detach()),
            X,
            Y,
        ),
        (
            "zero-gradients",
            "warning",
            "no gradients to attack with",
            Wrapped(after=lambda z: z.detach()),
            X,
            Y,
        ),
        (
            "zero-gradients",
            "warning",
            "39 are not finite",
            Wrapped(before=lambda x: x + 0 * (x - x.detach()).sqrt()),
            X,
            Y,
        ),
    ],
)
def test_every_check_fires(
    name: str, level: str, say: str, model: nn.Module, x: Tensor, y: Tensor
) -> None:
    torch.manual_seed(0)
    (finding,) = (found for found in check(model, x[:FEW], y[:FEW], (0, 1)) if found.name == name)
    assert finding.level == level
    assert re.search(say, finding.text), finding.text


def test_missing_classes_and_steps_and_no_box() -> None:
    some = Y != 7
    found = {finding.name: finding for finding in check(MLP, X[some], Y[some], (0, 1))}
    assert found["labels"].level == "note" and "1 of 10 classes never occur" in found["labels"].text
    assert "steps" not in found["range"].text  # sixteenths
    eight = check(MLP, (255 * X).round() / 255, Y, (0, 1))[0]
    assert eight.level == "ok" and "steps of 1/255" in eight.text
    assert "no box" in check(MLP, X, Y, None)[0].text


def test_train_mode_is_seen_and_left_alone() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout())
    assert (
        mode(model).level == "note"
        and mode(model.eval()).level == "ok"
        and mode(lambda x: x).level == "ok"
    )
    model.train()
    assert levels(check(model, X[:9], Y[:9], (0, 1)))["determinism"] == "ok" and model.training


@pytest.mark.parametrize("norm", [1, 2, INF])
def test_transfer_finds_where_the_way_to_another_sample_crosses_the_boundary(norm: float) -> None:
    """Two classes, `z_1 - z_0 = 2 x_0 - 0.6`: the boundary is at x_0 = 0.3."""
    exact = torch.float64
    model = LinearClassifier(
        torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=exact), torch.tensor([0.0, -0.6], dtype=exact)
    )
    x = torch.tensor([[0.1, 0.5], [0.9, 0.5], [1.0, 1.0], [0.2, 0.5]], dtype=exact)
    y = torch.tensor([0, 1, 1, 1])  # the last is wrong already
    flips = transfer(model, x, y, norm)
    # 0 goes to 1, straight along x_0; 1 to 3; 2 to 3 by (0.8, 0.5), of which x_0 has to go 0.7
    way = {1: 0.7 + 0.4, 2: 0.7 * math.hypot(0.8, 0.5) / 0.8, INF: 0.7}[
        norm
    ]  # l1: both parts lose 0.1
    want = torch.tensor([0.2, 0.6, way, 0.0], dtype=exact)
    assert (flips.distances >= want - 1e-12).all() and (flips.distances - want < 2**-12 * 2).all()
    assert ws.allocate(flips, 0.5, 1).verify(model)
    assert (
        flips.forwards.tolist() == [13, 13, 13, 1]
        and flips.backwards.sum() == 0
        and flips.methods == ("transfer",)
    )


def test_transfer_needs_another_class() -> None:
    some = (Y == 0) & (MLP(X).argmax(1) == 0)
    x = X[some][:5]
    y = Y[some][:5]
    assert transfer(MLP, x, y, 2).distances.isinf().all()


def test_transfer_does_not_depend_on_the_batch_size() -> None:
    first = transfer(MLP, X[:30], Y[:30], INF)
    assert torch.equal(first.distances, transfer(MLP, X[:30], Y[:30], INF, batch_size=7).distances)


def test_convergence() -> None:
    assert converged(MLP, X[:FEW], Y[:FEW], INF).level == "ok"
    short = converged(ws.zoo.load("digits-cnn-adv"), X[:20], Y[:20], 2)
    assert short.level == "note" and "from 25 to 100 passes" in short.text
    slow = converged(SATURATED, X[:FEW], Y[:FEW], INF)
    assert slow.level == "warning" and "give it --passes 400" in slow.text
    late = converged(ROUNDED, X[:FEW], Y[:FEW], INF, passes=40)
    assert late.level == "warning" and "No sample has a flip after 10 passes" in late.text
    constant = Wrapped(before=lambda x: 0 * x + X[:1])  # no flip anywhere
    label = constant(X[:1]).argmax(1).expand(FEW)
    stuck = converged(constant, X[:FEW], label, INF, passes=40)
    assert stuck.level == "warning" and f"{FEW} of {FEW} samples have no flip" in stuck.text


THREATS = (ws.Threat(2, 1, 0.1), ws.Threat(2, INF, 0.1))


def said(
    known: dict[str, list[float]], found: list[float] | None = None, rows: tuple[Row, ...] = ()
) -> dict[str, Finding]:
    """The findings for attacks with these distances; sample 0 is wrong already."""
    units = plan(THREATS, {name: {} for name in known})
    n = len(next(iter(known.values())))
    run: Any = SimpleNamespace(
        y=torch.zeros(n),
        predicted=(torch.arange(n) == 0).float(),
        threats=THREATS,
        rows=rows,
        criterion=None,
        told=str,
    )
    tensors = {unit.key: torch.tensor(known[unit.attack], dtype=torch.float64) for unit in units}
    every = list(
        indicators(
            run, units, tensors, None if found is None else torch.tensor(found, dtype=torch.float64)
        )
    )
    assert len({finding.name for finding in every}) == len(every)
    return {finding.name: finding for finding in every}


def test_attacks_that_agree_raise_no_alarm() -> None:
    found = said(
        {"nearest": [0, 0.05, 0.3], "apgd-ce": [0, 0.1, INF], "square": [0, INF, INF]},
        [0, 0.4, 0.9],
    )
    assert levels(list(found.values())) == dict.fromkeys(
        ["unbounded-failure", "black-box", "transfer"], "ok"
    )
    assert said({"apgd-ce": [0, INF]}) == {}  # alone, and bounded: nothing to hold against it


def test_a_search_without_a_limit_must_arrive() -> None:
    found = said({"nearest": [0, INF, INF, 0.1], "deepfool": [0, INF, INF, INF]})[
        "unbounded-failure"
    ]
    assert (
        found.level == "warning"
        and "2 of 3 correct samples" in found.text
        and "raise --passes" in found.text
    )
    assert said({"nearest": [0, INF, 0.2]})["unbounded-failure"].level == "note"  # a single one
    rare = said({"nearest": [0, INF, INF] + [0.1] * 300})["unbounded-failure"]
    assert rare.level == "note" and "2 of 302" in rare.text
    assert "add the attack nearest" in said({"wda++": [0, INF, INF]})["unbounded-failure"].text


def test_an_attack_beaten_within_eps() -> None:
    found = said(
        {
            "apgd-ce": [0, INF, INF, 0.1],
            "nearest": [0, 0.08, 0.2, 0.3],
            "square": [0, INF, INF, INF],
        }
    )["beaten"]
    assert (
        found.level == "note"
        and "(nearest 1 at 0.1, APGD-CE 1 at 0.1)" in found.text
        and "3 correct" in found.text
    )


def row(attack: str, accuracy: float, threat: ws.Threat = THREATS[0]) -> Row:
    return Row(attack, attack.upper(), threat, accuracy, (0.0, 1.0), 0.05, 1.0, 1.0, 1.0)


def test_an_attack_below_nearest_on_the_headline() -> None:
    known = {"nearest": [0, 0.1, 0.2], "wda++": [0, 0.1, 0.1]}
    rows = (row("wda", 0.5), row("wda++", 0.3), row("nearest", 0.4))
    found = said(known, rows=rows)["behind"]
    assert found.level == "warning"
    assert "WDA++ leaves 30.00 %" in found.text and "nearest 40.00 %" in found.text
    assert "--passes auto" in found.text
    assert said(known, rows=(*rows[::2], row("wda++", 0.4)))["behind"].level == "ok"
    elsewhere = (row("wda++", 0.3, THREATS[1]), row("nearest", 0.4))  # not the headline's threat
    assert "behind" not in said(known, rows=elsewhere)
    assert "behind" not in said(known, rows=rows[:2])  # nearest was not run


def test_square_against_gradients() -> None:
    found = said({"apgd-ce": [0, INF, INF], "square": [0, 0.1, 0.1]})["black-box"]
    assert found.level == "warning" and "flips 2 of 2" in found.text
    found = said({"nearest": [0, 0.05, 0.11], "square": [0, 0.1, 0.1]})["black-box"]
    assert found.level == "note" and "flips 1 of 2" in found.text
    assert "black-box" not in said({"square": [0, 0.1, 0.1]})


def test_transfer_against_gradients() -> None:
    found = said({"nearest": [0, 0.3, 0.2, INF]}, [0, 0.1, 0.2, 0.5])["transfer"]
    assert found.level == "warning" and "2 of 3" in found.text
    assert said({"nearest": [0, 0.3, 0.2, 0.1]}, [0, 0.1, 0.2, 0.5])["transfer"].level == "note"
    # an attack at a fixed eps need not be the nearest, but it must not miss what lies within eps
    assert said({"apgd-ce": [0, 0.1, INF]}, [0, 0.05, 0.2])["transfer"].level == "ok"
    assert said({"apgd-ce": [0, INF, INF]}, [0, 0.05, 0.1])["transfer"].level == "warning"


@pytest.mark.parametrize(
    ("model", "norm"),
    [(ROUNDED, 2), (ROUNDED, INF), (CLAMPED, 2), (CLAMPED, INF), (SATURATED, 2)],
)
def test_masked_gradients_raise_the_alarm(model: nn.Module, norm: float) -> None:
    found = _whole(model, X[:60], Y[:60], norm, 0.1 if norm == INF else 0.4)
    assert found["transfer"].level == "warning"


def test_a_saturated_network_is_seen_through() -> None:
    """Its classes are those of the network without the sigmoid, so its flips should be, too."""
    masked = ws.nearest(SATURATED, X[:60], Y[:60], INF, passes=100, warn=False).distances
    open_ = ws.nearest(MLP, X[:60], Y[:60], INF, passes=100).distances
    both = (masked > 0) & (open_ > 0)
    assert masked[both].mean() < 1.2 * open_[both].mean()


@pytest.mark.parametrize("norm", [2, INF])
def test_honest_networks_do_not(zoo: ModuleType, norm: float) -> None:
    adv = _whole(ws.zoo.load("digits-cnn-adv"), X[:FEW], Y[:FEW], norm, 0.1 if norm == INF else 0.4)
    x, y = zoo.images("cifar10", 20)
    real = _whole(
        zoo.load("cifar_cnn_a_adv")[0],
        x,
        y,
        norm,
        2 / 255 if norm == INF else 0.25,
    )
    for found in (adv, real):
        assert [finding.text for finding in found.values() if finding.level == "warning"] == []
        assert (
            found["transfer"].level
            == found["unbounded-failure"].level
            == found["black-box"].level
            == "ok"
        )


def _whole(model: nn.Module, x: Tensor, y: Tensor, norm: float, eps: float) -> dict[str, Finding]:
    """Checks, attacks and indicators, as an evaluation does them."""
    threats = (ws.Threat(norm, 1, eps), ws.Threat(norm, INF, eps))
    units = plan(threats, {"nearest": {"passes": 100}, "square": {"queries": 60}})
    known = {
        unit.key: unit.entry.run(model, x, y, unit.threat, **unit.options).flips.distances
        for unit in units
    }
    wrong = known[units[0].key] == 0
    run: Any = SimpleNamespace(
        y=y,
        predicted=torch.where(wrong, y + 1, y),
        threats=threats,
        rows=(),
        criterion=None,
        told=str,
    )
    every = [
        *check(model, x, y, (0, 1)),
        *indicators(run, units, known, transfer(model, x, y, norm).distances),
    ]
    return {finding.name: finding for finding in every}
