"""Ten properties of distributions, made from public networks and decided: `docs/omega.md`.

    python benchmarks/omega.py --out FOLDER

makes the instances in FOLDER, one folder each with `omega.json`, the network and the samples,
decides them and checks every answer. `--make` only makes them. Needs `wassail[onnx]`, and the
networks of the zoo (see `zoo_path.py`) for six of the ten.
"""

import argparse
import hashlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import wassail as ws
import zoo_path
from wassail.omega.answer import read_answer
from wassail.omega.check import check_answer
from wassail.omega.decide import decide_omega
from wassail.omega.property import FORMAT, read_omega

SAMPLES = 20
HEAD = """\
# Properties of distributions: ten instances

`wassail omega` ([how to use it](howto/omega.md)) on ten properties of public networks, 20 samples
each: four of the embedded digits networks, six of the zoo. `python benchmarks/omega.py` makes the
files, decides them with the default effort on one thread, and checks every answer: plans in every
arithmetic, all radii proved again. Seconds are of the processor and without the check.
"""
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


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(".omega"), help="a folder for instances")
    parser.add_argument("--make", action="store_true", help="decide nothing")
    parser.add_argument("--only", default="", help="instances whose name holds this")
    parser.add_argument("--timeout", type=float, default=None, help="seconds for each")
    options = parser.parse_args()
    wanted = [instance for instance in INSTANCES if options.only in instance[0]]
    for instance in wanted:
        make(options.out, *instance)
    if options.make:
        return
    print(HEAD)
    print("| network | threat | claim | answer | worst case, between | s | check |")
    print("|---|---|---|---|---|---|---|")
    for name, *_ in wanted:
        print(row(options.out / name, options.timeout), flush=True)


def make(out: Path, name: str, threat: dict[str, Any], claim: dict[str, Any]) -> None:
    """Write the three files of an instance; an export of the same network is kept."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model, x, y = opened(name)
    network, samples = folder / "net.onnx", folder / "samples.safetensors"
    if not network.exists():
        torch.onnx.export(model, (x[:1],), network, dynamo=False)
    save_file({"x": x.contiguous(), "y": y}, samples)
    content = {
        "format": FORMAT,
        "network": {"onnx": network.name, "sha256": digest(network)},
        "samples": {"file": samples.name, "sha256": digest(samples)},
        "threat": threat,
        "claim": claim,
    }
    (folder / "omega.json").write_text(json.dumps(content, indent=1) + "\n")


def opened(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network with the first samples of its data."""
    if name in ws.zoo.MODELS:
        x, y = ws.zoo.data("digits")
        return ws.zoo.load(name), x[:SAMPLES], y[:SAMPLES]
    model, data = zoo_path.load(name)
    x, y = zoo_path.images(data, SAMPLES)
    return model.eval(), x, y


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def row(folder: Path, limit: float | None) -> str:
    """One line of the table."""
    property_ = read_omega(folder / "omega.json")
    began = time.process_time()
    answer = decide_omega(property_, time_limit=limit)
    seconds = time.process_time() - began
    path = folder / "answer.json"
    path.write_text(json.dumps(answer.as_json(property_)) + "\n")
    found = check_answer(property_, read_answer(path, property_), again=None)
    said = "confirmed" if found.confirmed else "; ".join((*found.problems, *found.open))
    threat = property_.threat
    low, high = answer.bounds
    about = f"Omega_{threat.order:g}({threat.eps:.4g}), l{threat.norm:g}{threat.others}"
    return (
        f"| {folder.name} | {about} | {property_.sense} | {answer.status} | "
        f"{low:.4f} to {high:.4f} | {seconds:.1f} | {said} |"
    )


if __name__ == "__main__":
    main()
