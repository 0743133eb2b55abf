"""Every attack and engine on a second device: the figures of the CPU to the last bit, no random
draws there, few waits.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from support.devices import WAYS, differences, network, samples, there
from wassail.attacks.autoattack import stage
from wassail.attacks.catalogue import find
from wassail.attacks.nearest import METHODS
from wassail.names import ATTACKS
from wassail.network import Network, mixed

pytestmark = pytest.mark.device

EPS = {1.0: 0.8, 2.0: 0.3, math.inf: 0.1}
NORMS = tuple(EPS)
STAGES = [
    stage("apgd-ce", steps=2),
    stage("apgd-t", steps=2, targets=1),
    stage("fab-t", steps=2, targets=1),
    stage("square", queries=2),
]
# Options that keep an attack short: the device is made of Python.
SHORT: dict[str, dict[str, Any]] = {
    "wda": {"steps": 3, "probe": 2},
    "wda++": {"steps": 3, "search": 2},
    "nearest": {"passes": 24},
    "w-pgd": {"steps": 2},
    "w-fgsm": {},
    "fgsm": {},
    "pgd": {"steps": 2, "restarts": 2},
    "apgd-ce": {"steps": 5},
    "apgd-dlr": {"steps": 3, "eot": 2},
    "apgd-t": {"steps": 2, "targets": 2},
    "square": {"queries": 4},
    "autoattack": {"attacks": STAGES},
    "a3": {"restarts": 1},
    "a3-wda": {"restarts": 2},
    "fab": {"steps": 3, "restarts": 2},
    "fab-t": {"steps": 2},
    "deepfool": {"steps": 3},
    "cw": {"steps": 4, "searches": 2},
}
ENGINES: dict[str, dict[str, Any]] = {
    name: {"passes": 20} for name in METHODS if name not in ("auto", "wda++")
}
ENGINES |= {
    "boundary-search": {"passes": 40},
    "pdpgd": {"passes": 12},
    "wda++": {"step": 0.1, "steps": 3},
}
ONLY_L2 = ("cw", "ddn")


def attack(name, norm):
    entry = find(name)
    order = {"inf": math.inf, "each": 1}.get(entry.orders, 2)
    threat = ws.Threat(norm, order, EPS[norm])
    return lambda model, x, y: entry.run(model, x, y, threat, **SHORT[name])


def engine(name, norm):
    return lambda model, x, y: ws.nearest(model, x, y, norm, method=name, **ENGINES[name])


CASES = {}
for name in ATTACKS:
    for norm in NORMS:
        if not (name in ONLY_L2 and norm != 2) and not (name.startswith("w-") and norm == 1):
            CASES[f"{name}-l{norm:g}"] = attack(name, norm)
for name in ENGINES:
    for norm in NORMS:
        if not (name in ONLY_L2 and norm != 2):
            CASES[f"engine {name}-l{norm:g}"] = engine(name, norm)
OTHERS = {  # the other places for the data, and a device without float64: one norm each is enough
    f"{case}, {way}": (CASES[case], way)
    for k, case in enumerate(
        case for case in CASES if case.endswith(("l1", "l2") if "square" in case else "l2")
    )
    for way in (WAYS[1 + k % 2],)
}


@pytest.fixture(scope="module")
def data():
    model = network()
    return model, *samples(model)


def test_the_lists_are_complete():
    assert set(SHORT) == set(ATTACKS)
    assert set(ENGINES) | {"auto"} == set(METHODS)


@pytest.mark.parametrize("case", CASES)
def test_the_figures_are_those_of_the_cpu(case, data):
    found, second = there(CASES[case], *data)
    assert differences(CASES[case](*data), found) == []
    assert not second.draws
    assert found.points.device == second.device  # where the samples are
    assert found.distances.device.type == "cpu" and found.distances.dtype == torch.float64
    assert found.forwards.device.type == "cpu"


@pytest.mark.parametrize("case", OTHERS)
def test_data_elsewhere_and_no_float64(case, data):
    call, way = OTHERS[case]
    found, second = there(call, *data, way=way, float64=False)
    assert differences(call(*data), found) == []
    assert found.points.device == (torch.device("cpu") if way == "samples here" else second.device)


@pytest.mark.parametrize("norm", [1.0, math.inf])
@pytest.mark.parametrize("name", ["boundary-search", "fab", "apgd"])
def test_engines_without_float64(name, norm, data):
    call = engine(name, norm)
    assert differences(call(*data), there(call, *data, float64=False)[0]) == []


def test_a_search_steered_by_the_allocation(data):
    def call(model, x, y):
        return ws.nearest(model, x[:3], y[:3], math.inf, eps=0.02, order=1, passes=115)

    assert differences(call(*data), there(call, *data)[0]) == []


def test_targets_weights_and_batches(data):
    model, x, y = data
    target = (y + 2) % 5
    mu = torch.arange(1.0, 1 + len(x))
    threat = ws.Threat(2, math.inf, 0.5)

    def call(model, x, y):
        return ws.pgd(
            model,
            x,
            y,
            threat,
            steps=2,
            target=target.to(y.device),
            mu=mu.to(y.device),
            batch_size=4,
        )

    assert differences(call(model, x, y), there(call, model, x, y)[0]) == []


def test_a_model_in_float64():
    model = network(torch.float64)
    x, y = samples(model, dtype=torch.float64)
    for name, norm in (("deepfool", 1.0), ("boundary-search", 2.0), ("apgd", math.inf)):
        call = engine(name, norm)
        assert differences(call(model, x, y), there(call, model, x, y)[0]) == []


def test_a_callable_goes_where_the_data_are(data):
    model, x, y = data
    weight = model[3].weight.detach()
    bias = model[3].bias.detach()
    first = model[1].weight.detach()

    def call(model, x, y):  # the tensors are no parameters of anything
        w, v, b = (t.to(x.device) for t in (first, weight, bias))
        plain = ws.nearest(lambda x: (x.flatten(1) @ w.T).relu() @ v.T + b, x, y, 2, passes=30)
        return plain, ws.apgd(
            lambda x: (x.flatten(1) @ w.T).relu() @ v.T + b,
            x,
            y,
            ws.Threat(2, math.inf, 0.2),
            steps=2,
        )

    assert differences(call(None, x, y), there(call, None, x, y)[0]) == []


def test_a_model_that_has_buffers_only(data):
    _, x, y = data

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer(
                "weight", torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
            )

        def forward(self, x):
            return x.flatten(1) @ self.weight.T

    call = engine("deepfool", 2.0)
    found, _ = there(call, Fixed(), x, y, "samples here")
    assert differences(call(Fixed(), x, y), found) == []


@pytest.mark.parametrize("name", ["digits-cnn", "digits-gelu", "digits-vit"])
def test_other_layers(name):
    x, y = (part[:3] for part in ws.zoo.data("digits"))
    model = ws.zoo.load(name)

    def call(model, x, y):
        return ws.wda_pp(model, x, y, ws.Threat(2, 1, 0.5), steps=1, search=1, topk=2)

    assert differences(call(model, x, y), there(call, model, x, y)[0]) == []


def test_mixed_precision_is_asked_of_the_device_of_the_batch(data):
    def call(model, x, y):
        return ws.fgsm(mixed(model), x, y, ws.Threat(2, math.inf, 0.3))

    model, x, y = data
    plain = ws.fgsm(model, x, y, ws.Threat(2, math.inf, 0.3))
    assert differences(plain, there(call, model, x, y)[0]) == []  # this device casts nothing


# Two waits an iteration at most: a longer run against a shorter one, so that what is done once does
# not count.
WAITS = {
    "apgd": (
        lambda norm, k: (
            lambda m, x, y: ws.apgd(m, x, y, ws.Threat(norm, math.inf, EPS[norm] / 20), steps=6 * k)
        )
    ),
    "wda_pp": (
        lambda norm, k: (
            lambda m, x, y: ws.wda_pp(m, x, y, ws.Threat(norm, 1, 1e-3), steps=5 * k, search=5 * k)
        )
    ),
    "nearest": (lambda norm, k: lambda m, x, y: ws.nearest(m, x, y, norm, passes=35 + 25 * k)),
    "engine apgd": (
        lambda norm, k: (
            lambda m, x, y: ws.nearest(m, x, y, norm, method="apgd", steps=4, rounds=3 * k)
        )
    ),
    "engine fmn": (
        lambda norm, k: lambda m, x, y: ws.nearest(m, x, y, norm, method="fmn", steps=5 * k)
    ),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", WAITS)
def test_the_host_waits_twice_an_iteration_at_most(case, norm, data, monkeypatch):
    calls = []
    forward = Network.forward
    monkeypatch.setattr(Network, "forward", lambda self, x: calls.append(1) or forward(self, x))
    seen = []
    for k in (1, 2):
        calls.clear()
        _, second = there(WAITS[case](norm, k), *data)
        seen.append((len(calls), second.total))
    more = seen[1][0] - seen[0][0]
    assert more >= 5, "the longer run is no longer"
    assert seen[1][1] - seen[0][1] <= 2 * more, second.worst()
    # What happens once is not much, either: 60 passes of 6 samples used to be 991 waits.
    assert seen[0][1] <= 2 * seen[0][0] + 45, second.worst()
