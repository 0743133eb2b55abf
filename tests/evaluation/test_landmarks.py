"""Known shifts: closed forms of their eps, exact transport, contradictions, command line."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import wassail as ws
from wassail.cli.parser import main
from wassail.evaluation.landmarks import mean_cost, transport
from wassail.evaluation.shifts import FEATURES, IMAGES, shift_of, standard
from wassail.report.page import report
from wassail.testing import LinearClassifier, samples
from wassail.transport.curve import RiskCurve

INF = math.inf


def brute(x: torch.Tensor, moved: torch.Tensor, norm: float, order: float) -> float:
    """The Wasserstein distance of a few samples of one class, over all permutations."""
    best = INF
    for places in itertools.permutations(range(len(x))):
        distance = torch.linalg.vector_norm(moved[list(places)] - x, norm, dim=1)
        cost = distance.max() if order == INF else (distance**order).mean() ** (1 / order)
        best = min(best, float(cost))
    return best


def test_the_eps_of_a_constant_step_is_its_length() -> None:
    x = torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.5
    y = torch.arange(20) % 2
    model = LinearClassifier.random(2, 16).float()
    for norm, length in ((1, 1.6), (2, 0.4), ("inf", 0.1)):
        (mark,) = ws.landmarks(model, x, y, norm, shifts="brightness-10")
        for order in (1, 2, INF):
            assert mark.eps[order] == pytest.approx(length, rel=1e-5)
        assert mark.accuracy == float((model(x + 0.1).argmax(1) == y).double().mean())


def test_pairings_and_functions_and_orders_in_closed_form() -> None:
    x = torch.zeros(4, 1, dtype=torch.float64) + 0.25
    moved = x + torch.tensor([[0.0], [0.0], [0.25], [0.5]])
    y = torch.zeros(4, dtype=torch.int64)
    model = LinearClassifier(torch.tensor([[-1.0], [1.0]]).double(), torch.tensor([0.6, -0.6]))
    first, second = ws.landmarks(
        model, x, y, 2, shifts={"camera": moved, "twice": lambda t: t + (moved - x)}
    )
    assert first.eps == second.eps and first.name == "camera"
    assert first.eps[1] == pytest.approx(0.75 / 4)
    assert first.eps[2] == pytest.approx(math.sqrt((0.25**2 + 0.5**2) / 4))
    assert first.eps[INF] == 0.5
    assert first.accuracy == 0.75  # only the last one has crossed 0.6


def test_a_second_data_set_is_paired_with_the_first(tmp_path) -> None:
    model = LinearClassifier.random(2, 3)
    x = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
    y = torch.arange(6) % 2
    path = tmp_path / "camera.npz"
    np.savez(path, x=(x + 0.25).numpy(), y=y.numpy())
    pair = (x + 0.25, y)
    shifts = {"file": path, "pair": pair, "tensor": x + 0.25}
    found = ws.landmarks(model, x, y, "inf", shifts=shifts)
    assert [mark.eps[1] for mark in found] == [pytest.approx(0.25)] * 3
    assert len({mark.accuracy for mark in found}) == 1
    for other in ((x, 1 - y), (x[:4], y[:4])):
        with pytest.raises(ws.InputError, match="sample by sample"):
            ws.landmarks(model, x, y, "inf", shifts={"other": other})


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_exact_transport_is_the_best_permutation_within_classes(norm: float, order: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(5, 2, dtype=torch.float64, generator=generator)
    moved = torch.rand(5, 2, dtype=torch.float64, generator=generator)
    one = torch.zeros(5, dtype=torch.int64)
    assert transport(x, moved, one, norm, order) == pytest.approx(brute(x, moved, norm, order))
    distance = torch.linalg.vector_norm(moved - x, norm, dim=1)
    each = torch.arange(5)  # a class each: the pairing is the only coupling
    assert transport(x, moved, each, norm, order) == pytest.approx(mean_cost(distance, order))
    assert transport(x, moved, one, norm, order) <= mean_cost(distance, order) * (1 + 1e-9)


def test_an_accuracy_below_the_certified_curve_raises() -> None:
    model = LinearClassifier.random(3, 4, seed=1)
    x, _ = samples(40, (4,), 3)
    y = model(x).argmax(1)
    distance = model.distances(x, y, 2.0, (0.0, 1.0))
    mu = torch.full((40,), 1 / 40, dtype=torch.float64)
    honest = [RiskCurve(distance, distance * (1 - 1e-9), mu, p) for p in (1.0, 2.0, INF)]
    found = ws.landmarks(model, x, y, 2, curves=honest, exact=True)
    assert [mark.name for mark in found] == list(FEATURES)
    assert all(mark.exact[1] <= mark.eps[1] * (1 + 1e-9) for mark in found)
    far = torch.full_like(distance, 9.0)
    with pytest.raises(ws.InputError, match="trust neither"):
        ws.landmarks(model, x, y, 2, shifts=["dropout-80"], curves=[RiskCurve(far, far, mu, 1.0)])


@pytest.mark.parametrize("name", IMAGES)
def test_every_shift_of_images_moves_them_a_little_and_repeats(name: str) -> None:
    if name.startswith("jpeg"):
        pytest.importorskip("PIL")
    x = torch.rand(3, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    moved = shift_of(name, 0)(x)
    assert moved.shape == x.shape and torch.isfinite(moved).all()
    assert 0 < float((moved - x).abs().mean()) < 0.4
    alone = shift_of(name, 0)(x[1:2])
    assert torch.allclose(moved[1:2], alone, atol=1e-6)  # any batch, any order
    grey = shift_of(name, 0)(x[:, 0])
    assert grey.shape == x[:, 0].shape


def test_shifts_in_closed_form() -> None:
    ramp = torch.arange(4.0).reshape(1, 1, 1, 4).expand(1, 1, 2, 4) / 4
    assert shift_of("translate-1")(ramp)[0, 0, 0].tolist() == [0, 0, 0.25, 0.5]
    assert shift_of("pixelate-2")(ramp)[0, 0, 0].tolist() == [0.125, 0.125, 0.625, 0.625]
    assert shift_of("contrast-50")(ramp).mean() == pytest.approx(float(ramp.mean()))
    flat = torch.full((1, 1, 5, 5), 0.5)
    for name in ("blur-1", "defocus-2", "rotate-5"):
        assert torch.allclose(shift_of(name)(flat), flat, atol=1e-6)
    quarter = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    turned = shift_of("rotate-90")(quarter)
    either = (quarter.rot90(1, (2, 3)), quarter.rot90(-1, (2, 3)))
    assert any(torch.allclose(turned, one, atol=1e-5) for one in either)


def test_noise_of_features_is_in_units_of_their_spread() -> None:
    x = torch.randn(4000, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 9.0])
    step = shift_of("spread-20")(x) - x
    assert (step.std(0) / x.std(0)).tolist() == pytest.approx([0.2, 0.2], rel=0.05)
    gone = shift_of("dropout-20")(x) != x
    assert float(gone.float().mean()) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("name", ["jpeg", "jpeg-x", "fog-3", "jpeg--3", ""])
def test_unknown_shifts_are_refused(name: str) -> None:
    with pytest.raises(ws.InputError, match="shift"):
        shift_of(name)
    assert standard((3, 8, 8)) == IMAGES and standard((7,)) == FEATURES


def test_landmarks_on_the_command_line(tmp_path, capsys) -> None:
    base = ["evaluate", "digits-mlp-adv", "-n", "12", "--order", "1", "inf", "--quiet"]
    base += ["--attacks", "nearest", "--passes", "10", "--no-look", "--certify", "crown"]
    code = main([*base, "--eps", "pixelate-2", "--landmarks", "--json", "--out", str(tmp_path)])
    assert code == 0
    found = json.loads(capsys.readouterr().out)
    marks = {mark["name"]: mark for mark in found["landmarks"]}
    assert set(marks) == set(IMAGES)
    for threat in found["threats"]:
        key = threat["order"] if threat["order"] == "inf" else f"{threat['order']:g}"
        assert threat["eps"] == marks["pixelate-2"]["eps"][key]
    page = (tmp_path / "report.html").read_text()
    assert "Known shifts" in page
    again = tmp_path / "again.html"
    assert main(["report", str(tmp_path), "-o", str(again)]) == 0
    assert again.read_text() == page  # stored with the run
    stored = ws.Evaluation.load(tmp_path)
    assert [mark.name for mark in stored.landmarks] == list(IMAGES)
    capsys.readouterr()
    assert main([*base, "--eps", "fog-2"]) == 2
    assert "unknown shift" in capsys.readouterr().err


def test_stored_landmarks_are_marks_on_both_curves(tmp_path) -> None:
    model = ws.zoo.load("digits-mlp-adv")
    x, y = (part[:12] for part in ws.zoo.data("digits"))
    threat = ws.Threat("inf", 1, "0.05")
    options: dict[str, Any] = {"passes": 10, "look": False, "certify": "crown"}
    plain = ws.evaluate(model, (x, y), threat, ("nearest",), **options)
    assert plain.landmarks == () and 'class="landmark"' not in report(plain)
    run = ws.evaluate(
        model,
        (x, y),
        threat,
        ("nearest",),
        out=tmp_path,
        landmarks={"jpeg": "jpeg-90", "dim": lambda t: 0.9 * t},
        **options,
    )
    assert [mark.name for mark in run.landmarks] == ["jpeg", "dim"]
    assert set(run.landmarks[1].eps) == {1.0, 2.0, INF}
    assert run.landmarks[1].eps[INF] == pytest.approx(0.1)
    page = report(run)
    assert ">dim</text>" in page and "jpeg: " in page  # a name and a title of the still pictures
    assert '"landmarks":[{' in page.replace(" ", "")  # and the data of the moving one
    assert ws.Evaluation.load(tmp_path).landmarks == run.landmarks
    with pytest.raises(ws.InputError, match="equal weight"):
        ws.evaluate(model, (x, y), threat, mu=torch.ones(12), landmarks="standard")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accuracy": 2.0}, "cannot be"),
        ({"norm": "2"}, "norm or order"),
        ({"eps": {"1": 0.1}}, "norm or order"),
        ({"eps": {"7": 0.1}, "exact": {"7": None}}, "orders of the run"),
        ({"accuracy": 0.0, "eps": {"1": 1e-9}, "exact": {"1": None}}, "trust neither"),
    ],
)
def test_landmarks_that_somebody_changed_are_refused(tmp_path, change, words: str) -> None:
    model = LinearClassifier.random(3, 4, seed=1)
    x, _ = samples(10, (4,), 3)
    y = model(x).argmax(1)
    threat = ws.Threat("inf", 1, "0.05")
    options: dict[str, Any] = {
        "passes": 5,
        "look": False,
        "certify": "crown",
        "landmarks": "spread-1",
    }
    ws.evaluate(model, (x, y), threat, ("nearest",), out=tmp_path, **options)
    path = tmp_path / "results" / "landmarks.json"
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([entry | change]))
    with pytest.raises(ws.InputError, match=words):
        ws.Evaluation.load(tmp_path)
