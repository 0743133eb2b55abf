"""Properties of distributions (`wassail omega`): ten instances, decided and checked."""

from __future__ import annotations

import hashlib
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import rooms
from benchmarks.measure import spent
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import Row, Stage, Unit, here

SAMPLES = 20
# network, threat, claim
INSTANCES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (
        "digits-mlp",
        {"norm": "inf", "order": 1, "eps": "1/50"},
        {"measure": "accuracy", "at_least": 0.5},
    ),
    (
        "digits-cnn-adv",
        {"norm": "inf", "order": 1, "eps": "1/20", "label_cost": 0.5, "subpopulation": 0.8},
        {"measure": "accuracy", "at_least": 0.4},
    ),
    (
        "digits-cnn-cert",
        {"norm": "inf", "order": "inf", "eps": "1/10"},
        {"measure": "accuracy", "at_least": 0.6},
    ),
    (
        "digits-gelu-adv",
        {"norm": 2, "order": 2, "eps": "1/5"},
        {"measure": "cross_entropy", "at_most": 0.8},
    ),
    (
        "mnist_kw_01",
        {"norm": "inf", "order": 1, "eps": "1/20"},
        {"measure": "accuracy", "at_least": 0.6},
    ),
    (
        "mnist_mlp_toy20",
        {"norm": 2, "order": 2, "eps": "1/5"},
        {"measure": "accuracy", "at_least": 0.9},
    ),
    (
        "fashion_kw_01",
        {"norm": "inf", "order": 2, "eps": "1/20", "subpopulation": 0.9},
        {"measure": "accuracy", "at_least": 0.4},
    ),
    (
        "sdp_mnist_mlp",
        {"norm": 2, "order": 1, "eps": "1/2", "label_cost": 4},
        {"measure": "accuracy", "at_least": 0.7},
    ),
    (
        "cifar_base_kw",
        {"norm": "inf", "order": 1, "eps": "2/255"},
        {"measure": "accuracy", "at_least": 0.3},
    ),
    (
        "vnn_resnet2b",
        {"norm": "inf", "order": 1, "eps": "2/255"},
        {"measure": "accuracy", "at_least": 0.4},
    ),
)


def units() -> list[Unit]:
    """One instance each."""
    return [
        Unit(
            name,
            partial(decided, name, threat, claim),
            networks=() if name.startswith("digits") else (name, data_of(name)),
        )
        for name, threat, claim in INSTANCES
    ]


def decided(name: str, threat: dict[str, Any], claim: dict[str, Any]) -> Row:
    """Write the files of the instance, decide it with the default effort, check the answer."""
    from wassail.omega.answer import read_answer
    from wassail.omega.check import check_answer
    from wassail.omega.decide import decide_omega
    from wassail.omega.property import read_omega

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_instance(folder, name, threat, claim)
        with spent() as used:
            property_ = read_omega(folder / "omega.json")
            answer = decide_omega(property_)
        path = folder / "answer.json"
        path.write_text(json.dumps(answer.as_json(property_)))
        found = check_answer(property_, read_answer(path, property_), again=None)
    low, high = answer.bounds
    return {
        "threat": f"Omega_{property_.threat.order:g}({threat['eps']}), "
        f"l{property_.threat.norm:g}{property_.threat.others}",
        "claim": property_.sense,
        "answer": answer.status,
        "low": low,
        "high": high,
        "check": "confirmed" if found.confirmed else "; ".join((*found.problems, *found.open)),
        "samples": SAMPLES,
        "seconds": used.seconds,
    }


def write_instance(folder: Path, name: str, threat: dict[str, Any], claim: dict[str, Any]) -> None:
    from wassail.omega.property import FORMAT

    model = load(name)
    x, y = images(data_of(name), SAMPLES)
    network, samples = folder / "net.onnx", folder / "samples.safetensors"
    with spent():
        torch.onnx.export(model, (x[:1],), network, dynamo=False)
    save_file({"x": x.contiguous(), "y": y.contiguous()}, samples)
    content = {
        "format": FORMAT,
        "network": {"onnx": network.name, "sha256": digest(network)},
        "samples": {"file": samples.name, "sha256": digest(samples)},
        "threat": threat,
        "claim": claim,
    }
    (folder / "omega.json").write_text(json.dumps(content))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each instance."""
    rows = [{"id": name, "network": name} | done[name] for name, *_ in INSTANCES if name in done]
    return {"properties": rows}


STAGE = Stage(
    name="distributions",
    about="Properties of distributions, decided and checked.",
    depends=rooms.PROPERTIES,
    units=units,
    tables=tables,
    source=here(),
)
