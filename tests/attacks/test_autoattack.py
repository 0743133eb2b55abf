"""AutoAttack: its line-up, who is attacked by what, its warnings, a run that is interrupted,
the drop-in class.
"""

import math

import pytest
import torch
from torch import Tensor

from wassail.attacks import autoattack as module
from wassail.attacks.autoattack import ATTACKS, AutoAttack, autoattack, stage, stages
from wassail.errors import InputError, ModelWarning
from wassail.testing import LinearClassifier, check_attack, samples
from wassail.threat import Threat

INF = math.inf
QUICK = (
    stage("apgd-ce", steps=8),
    stage("apgd-t", steps=8, targets=2),
    stage("fab-t", steps=4, targets=2),
    stage("square", queries=20),
)


def right(classes: int = 4, n: int = 20) -> tuple[LinearClassifier, Tensor, Tensor]:
    """A linear model and samples that it gets right, images of one channel."""
    model = LinearClassifier.random(classes, 12, seed=classes)
    x, _ = samples(n, (1, 4, 3), classes)
    return model, x, model(x).argmax(1)


@pytest.mark.filterwarnings(
    "ignore::wassail.errors.ModelWarning"
)  # the kit's constant model has no gradients
def test_autoattack_conforms() -> None:
    def attack(model, x, y, threat, **options):
        return autoattack(model, x, y, threat, attacks=QUICK, **options)

    check_attack(attack, orders=(INF,), domains=((0.0, 1.0),))


def test_the_line_up_is_the_published_one() -> None:
    def line(version: str, norm: float) -> list[str]:
        return [part.name for part in stages(version, norm)]

    assert (
        line("standard", INF) == line("standard", 1.0) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    )
    assert line("plus", 2.0) == ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"]
    assert line("rand", 2.0) == ["apgd-ce", "apgd-dlr"]
    ce, t, fab, square = (part.options for part in stages("standard", INF))
    assert (ce["restarts"], ce["steps"], t["targets"], fab["targets"], square["queries"]) == (
        1,
        100,
        9,
        9,
        5000,
    )
    ce, t, _, _ = (part.options for part in stages("standard", 1.0))
    assert (ce["restarts"], ce["large"], t["targets"], t["large"]) == (5, True, 5, True)
    assert [part.options.get("restarts", 1) for part in stages("plus", INF)] == [5, 5, 5, 1, 1, 1]
    assert all(part.options["eot"] == 20 for part in stages("rand", INF))
    with pytest.raises(InputError, match="version"):
        stages("best", INF)
    with pytest.raises(InputError, match="attack"):
        stage("pgd")


def test_a_stage_sees_only_those_who_stand() -> None:
    model, x, y = right()
    y[:3] = (y[:3] + 1) % 4  # wrong before anything moves
    seen = []

    def spy(tracker, tick, **options) -> None:
        seen.append(len(tracker.rows))
        module.apgd_attack(tracker, tick, **options)

    weak = module.Stage("weak", spy, {"loss": "ce", "steps": 1})
    strong = module.Stage("strong", spy, {"loss": "ce", "steps": 30})
    exact = model.distances(x, y, INF, (0.0, 1.0))
    eps = float(exact[exact > 0].median())
    result = autoattack(model, x, y, Threat(INF, INF, eps), attacks=[weak, strong, strong])
    table = list(result.info["stages"].values())
    assert seen[0] == table[0]["attacked"] == 17
    for before, after, count in zip(table, table[1:], seen[1:]):
        assert (
            count == after["attacked"] == round(20 * before["accuracy"])
            and after["accuracy"] <= before["accuracy"]
        )
    assert (
        result.accuracy == pytest.approx(table[-1]["accuracy"], abs=1e-12)
        and result.accuracy < 17 / 20
    )
    assert sum(row["passes"] for row in table) + 20 == int(
        result.forwards.sum() + result.backwards.sum()
    )
    assert result.forwards[:3].tolist() == [1, 1, 1]  # the clean pass, once for all stages


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path, monkeypatch) -> None:
    model, x, y = right()
    threat = Threat(2.0, INF, 0.15)
    whole = autoattack(model, x, y, threat, attacks=QUICK)

    path = tmp_path / "state"
    with monkeypatch.context() as patch:
        patch.setattr(module, "Tracker", _stop_after(module.Tracker, 2))
        with pytest.raises(KeyboardInterrupt):
            autoattack(model, x, y, threat, attacks=QUICK, state=path)
    lines: list[str] = []
    resumed = autoattack(model, x, y, threat, attacks=QUICK, state=path, log=lines.append)
    assert "restored 2 attacks" in lines[0] and len(lines) == 3
    for name in ("points", "predicted", "forwards", "backwards", "distances"):
        assert torch.equal(getattr(resumed, name), getattr(whole, name)), name
    assert resumed.info["stages"] == whole.info["stages"]
    with pytest.raises(InputError, match="differ in threat"):
        autoattack(model, x, y, Threat(2.0, INF, 0.2), attacks=QUICK, state=path)
    with pytest.raises(InputError, match="differ in attacks"):
        autoattack(model, x, y, threat, attacks=QUICK[:2], state=path)
    with pytest.raises(InputError, match="differ in x"):
        autoattack(model, x.flip(0), y.flip(0), threat, attacks=QUICK, state=path)


def _stop_after(tracker: type, calls: int):
    count = []

    def make(*data, **options):
        count.append(1)
        if len(count) > calls:
            raise KeyboardInterrupt
        return tracker(*data, **options)

    return make


def test_zero_gradients_are_a_warning() -> None:
    model, x, y = right()

    def steps(
        x: Tensor,
    ) -> Tensor:  # rounded inputs: a staircase, flat wherever it is differentiable
        return model((8 * x).round() / 8 + 0 * x)

    y = steps(x).argmax(1)
    with pytest.warns(ModelWarning, match="exactly zero at 20 of 20"):
        autoattack(steps, x, y, Threat(INF, INF, 1e-3), attacks=QUICK[:1])


def test_square_felling_what_gradients_could_not_is_a_warning() -> None:
    model, x, y = right()

    def backwards(x: Tensor) -> Tensor:  # right values, gradients that point the wrong way
        z = model(x)
        return 2 * z.detach() - z

    eps = 2 * float(model.distances(x, y, INF, (0.0, 1.0)).max())
    with pytest.warns(ModelWarning, match="Square"):
        result = autoattack(
            backwards,
            x,
            y,
            Threat(INF, INF, min(eps, 1.0)),
            attacks=[stage("apgd-ce", steps=3), stage("square", queries=300)],
        )
    before, after = (row["accuracy"] for row in result.info["stages"].values())
    assert after < before


def test_randomised_models() -> None:
    model, x, y = right()
    generator = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        return model(x) + 0.01 * torch.randn(len(x), 4, dtype=x.dtype, generator=generator)

    with pytest.warns(ModelWarning, match="different logits"):
        autoattack(noisy, x, y, Threat(INF, INF, 0.1), attacks=QUICK[:1])
    result = autoattack(
        noisy, x, y, Threat(INF, INF, 0.1), attacks=[stage("apgd-ce", steps=5, eot=3)]
    )  # no warning
    assert result.accuracy < 1


def test_probabilities_are_an_error() -> None:
    model, x, y = right()
    with pytest.raises(InputError, match="probabilities"):
        autoattack(lambda x: model(x).softmax(1), x, y, Threat(INF, INF, 0.1), attacks=QUICK)
    with pytest.raises(InputError, match="attacks is empty"):
        autoattack(model, x, y, Threat(INF, INF, 0.1), attacks=[])


@pytest.mark.slow_cases("L1", "L2")
@pytest.mark.parametrize("name", ["Linf", "L2", "L1"])
def test_the_drop_in_class(name: str, capsys, tmp_path) -> None:
    model, x, y = right()
    x = x.float()
    norm = {"Linf": INF, "L2": 2.0, "L1": 1.0}[name]
    single = model.float()
    y[:2] = (y[:2] + 1) % 4
    eps = float(
        LinearClassifier.random(4, 12, seed=4).distances(x.double(), y, norm, (0.0, 1.0)).median()
    )
    adversary = AutoAttack(
        single, norm=name, eps=eps, version="standard", device="cpu", log_path=tmp_path / "log"
    )
    assert adversary.attacks_to_run == ["apgd-ce", "apgd-t", "fab-t", "square"]
    adversary.apgd.n_iter = adversary.apgd_targeted.n_iter = adversary.fab.n_iter = 10
    adversary.square.n_queries = 20
    x_adv, labels = adversary.run_standard_evaluation(x, y, bs=7, return_labels=True)
    assert adversary.result is not None
    moved = (x_adv != x).flatten(1).any(1)
    assert torch.equal(single(x_adv).argmax(1), labels)
    assert (
        torch.equal(moved, (labels != y) & (single(x).argmax(1) == y))
        and moved.any()
        and not moved.all()
    )
    accuracy = float((labels == y).double().mean())
    assert adversary.clean_accuracy(x_adv, y) == accuracy == adversary.result.accuracy
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "log").read_text()
    assert "initial accuracy: 90.00%" in printed and f"robust accuracy: {accuracy:.2%}" in printed
    again = adversary.run_standard_evaluation(x, y, bs=20)
    assert isinstance(again, torch.Tensor)
    assert torch.equal(again, x_adv)  # whatever the batch, and every time


def test_the_drop_in_class_with_attacks_of_ones_own(capsys, tmp_path) -> None:
    model, x, y = right()
    adversary = AutoAttack(
        model, "L2", "1/4", attacks_to_run=["apgd-dlr", "fab"], version="custom", verbose=False
    )
    (
        adversary.apgd.n_restarts,
        adversary.apgd.n_iter,
        adversary.fab.n_restarts,
        adversary.fab.n_iter,
    ) = 2, 5, 2, 3
    alone = adversary.run_standard_evaluation_individual(x, y)
    assert list(alone) == adversary.attacks_to_run == ["apgd-dlr", "fab"]
    together = adversary.run_standard_evaluation(x, y, state_path=tmp_path / "state")
    assert isinstance(together, torch.Tensor)
    assert capsys.readouterr().out == ""
    fooled = torch.stack([(points != x).flatten(1).any(1) for points in alone.values()]).any(0)
    assert torch.equal((together != x).flatten(1).any(1), fooled)
    restored = adversary.run_standard_evaluation(x, y, state_path=tmp_path / "state")
    assert isinstance(restored, torch.Tensor)
    assert torch.equal(restored, together)  # points too


def test_the_drop_in_class_refuses_what_it_cannot_do() -> None:
    model, _, _ = right()
    with pytest.raises(InputError, match="PyTorch"):
        AutoAttack(model, is_tf_model=True)
    with pytest.raises(InputError, match="norm"):
        AutoAttack(model, norm="linf")
    with pytest.raises(InputError, match="version"):
        AutoAttack(model, version="best")
    with pytest.raises(InputError, match="custom"):
        AutoAttack(model, attacks_to_run=["square"])
    settings = AutoAttack(model, version="rand")
    assert settings.apgd.eot_iter == 20 and settings.attacks_to_run == ["apgd-ce", "apgd-dlr"]
    assert set(AutoAttack(model, norm="L1", version="plus").attacks_to_run) == set(ATTACKS)


def test_every_attack_runs_on_two_classes_and_on_many() -> None:
    for classes in (2, 1000):
        model, x, y = right(classes, n=3)
        quick = [stage(name, steps=3) for name in ATTACKS if name != "square"] + [
            stage("square", queries=5)
        ]
        result = autoattack(model, x, y, Threat(INF, INF, 0.4), attacks=quick)
        assert bool(result.verify(model)) and len(result.info["stages"]) == 6


def test_a_broken_ball_is_caught(monkeypatch) -> None:
    """Stages that search a ball twice too large bring home points that must not count."""
    model, x, y = right()
    exact = model.distances(x, y, INF, (0.0, 1.0))
    eps = float(exact.median())
    honest = autoattack(model, x, y, Threat(INF, INF, eps), attacks=QUICK[:2])
    monkeypatch.setattr(module, "balls", lambda x, threat: (2 * threat.eps, 2 * threat.eps))
    broken = autoattack(model, x, y, Threat(INF, INF, eps), attacks=QUICK[:2])
    assert bool(honest.verify(model)) and not bool(broken.verify(model))
