"""Evaluations, flips, distributions and the command line on a second device: the figures of the
CPU to the last bit.
"""

import math

import pytest
import torch
from safetensors.torch import load_file

import wassail as ws
from support.devices import WAYS, differences, network, samples, there
from support.second_device import second_device
from wassail.attacks.autoattack import stage
from wassail.cli.parser import main
from wassail.evaluation import indicators

pytestmark = pytest.mark.device

THREATS = [ws.Threat(2, order, 0.3) for order in (1, 2, math.inf)]
ATTACKS = {
    "wda++": {"steps": 2, "search": 1},
    "nearest": {"passes": 20},
    "apgd-ce": {"steps": 2},
    "w-pgd": {"steps": 1},
}


@pytest.fixture(scope="module")
def data():
    model = network()
    return model, *samples(model, 7)


def stored(folder):
    """Every tensor of a run."""
    return {
        str(file.relative_to(folder)): load_file(file)
        for file in sorted(folder.rglob("*.safetensors"))
    }


def told(run):
    """What a run says: its findings, distances and accuracies."""
    return (
        [str(finding) for finding in run.findings],
        run.distances,
        [run.curve(order)(0.1) for order in run.orders],
    )


@pytest.mark.parametrize("way", WAYS)
def test_evaluations_and_their_files(way, data, tmp_path):
    def call(folder):
        return lambda model, x, y: told(
            ws.evaluate(model, (x, y), THREATS, ATTACKS, out=folder, chunk=4)
        )

    here = call(tmp_path / "here")(*data)
    found, second = there(call(tmp_path / "there"), *data, way=way, float64=way != "labels here")
    assert differences(here, found) == []
    assert not second.draws
    assert len(stored(tmp_path / "here")) > 10
    assert differences(stored(tmp_path / "here"), stored(tmp_path / "there")) == []


def test_an_evaluation_is_resumed_on_its_device(data, tmp_path):
    model, x, y = data

    class Stop(Exception):
        pass

    def call(model, x, y):
        calls = []

        def interrupt(share):
            calls.append(share)
            if share > 0.5:
                raise Stop

        with pytest.raises(Stop):
            ws.evaluate(
                model, (x, y), THREATS, ATTACKS, out=tmp_path / "run", chunk=4, progress=interrupt
            )
        begun = len(stored(tmp_path / "run"))
        whole = ws.evaluate(
            model, (x, y), THREATS, ATTACKS, out=tmp_path / "run", chunk=4, resume=True
        )
        return begun, told(whole)

    (begun, found), _ = there(call, model, x, y, WAYS[1])
    assert 0 < begun < len(stored(tmp_path / "run"))
    assert differences(told(ws.evaluate(model, (x, y), THREATS, ATTACKS, chunk=4)), found) == []


def test_flips_and_distributions(data):
    model, x, y = data
    points = (x + 0.4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))).clamp(
        0, 1
    )

    def call(model, x, y):
        flips = ws.Flips.from_points(model, x, y, points, 2)
        more = ws.nearest(model, x, y, 2, passes=15)
        both = more.merge(flips)
        adversary = ws.allocate(both, 0.2, 1)
        check = adversary.verify(model)
        assert check, check.problems
        assert adversary.weights.dtype == torch.float64 and adversary.weights.device.type == "cpu"
        atoms = adversary.atoms()
        return (
            flips,
            both,
            adversary,
            check,
            atoms,
            ws.risk_curve(both, order=2)(0.1),
            repr(adversary),
        )

    for way in WAYS:
        assert differences(call(model, x, y), there(call, model, x, y, way, float64=False)[0]) == []


def test_flips_of_two_devices_are_merged(data):
    model, x, y = data
    first, second = (
        ws.nearest(model, x, y, 2, method=name, passes=15) for name in ("deepfool", "fmn")
    )

    def call(model, x, y):
        elsewhere = ws.nearest(model, x, y, 2, method="fmn", passes=15)
        return first.merge(elsewhere), elsewhere.merge(first)

    (one, other), _ = there(call, model, x, y)
    assert one.points.device.type == "cpu" and other.points.device.type == "elsewhere"
    assert differences((first.merge(second), second.merge(first)), (one, other)) == []


def test_results_are_saved_and_loaded(data, tmp_path):
    def call(model, x, y):
        flips = ws.nearest(model, x, y, 2, passes=12)
        flips.save(tmp_path / "flips")
        return ws.Flips.load(tmp_path / "flips")

    found, _ = there(call, *data)
    assert found.points.device.type == "cpu"  # a file belongs to no device
    assert differences(call(*data), found) == []


def test_autoattack_for_old_scripts_and_its_state(data, tmp_path):
    def call(model, x, y):
        adversary = ws.AutoAttack(
            model, "L2", 0.3, verbose=False, version="custom", attacks_to_run=["apgd-ce", "square"]
        )
        adversary.apgd.n_restarts, adversary.apgd.n_iter, adversary.square.n_queries = 1, 2, 2
        points, labels = adversary.run_standard_evaluation(x, y, bs=4, return_labels=True)
        kept = tmp_path / str(x.device.type)
        line = [stage("apgd-ce", steps=2), stage("square", queries=2)]
        for _ in range(2):  # the second time from its state
            found = ws.autoattack(model, x, y, THREATS[2], attacks=line, state=kept)
        return points, labels, adversary.clean_accuracy(x, y), found.points, found.forwards

    assert differences(call(*data), there(call, *data)[0]) == []


def test_indicators(data):
    def call(model, x, y):
        looks = indicators.check(model, x, y, (0, 1))
        return (
            looks,
            indicators.transfer(model, x, y, 2),
            indicators.converged(model, x, y, math.inf, (0, 1), 20),
        )

    for way in WAYS[:2]:
        assert differences(call(*data), there(call, *data, way=way)[0]) == []


def test_the_command_line_takes_a_device(tmp_path):
    options = [
        "digits-mlp",
        "--data",
        "digits",
        "-n",
        "4",
        "--norm",
        "2",
        "--eps",
        "0.3",
        "--order",
        "1",
        "inf",
        "--quiet",
    ]
    options += ["--attacks", "wda++", "fgsm"]
    command = ["evaluate", "--no-look", *options]
    assert main([*command, "--out", str(tmp_path / "here")]) == 0
    with second_device() as second:
        assert main([*command, "--device", "elsewhere", "--out", str(tmp_path / "there")]) == 0
        assert (
            main(
                [
                    "evaluate",
                    *options,
                    "--device",
                    "elsewhere",
                    "--out",
                    str(tmp_path / "more"),
                    "--no-look",
                ]
            )
            == 0
        )
    assert second.total > 0  # it was used
    assert len(stored(tmp_path / "here")) >= 4
    assert differences(stored(tmp_path / "here"), stored(tmp_path / "there")) == []
    assert differences(stored(tmp_path / "here"), stored(tmp_path / "more")) == []
