"""Minimal perturbations: `nearest` beside the attacks of adversarial-library."""

from __future__ import annotations

from functools import partial

import torch

import wassail as ws
from benchmarks import peers, rooms
from benchmarks.measure import NORMS, minimal, numbers, spent, tensor
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here
from wassail.transport.allocation import knapsack

IMAGES = 1000
PASSES = (100, 300, 1000)
# network and norm -> eps of the accuracies
CASES = {
    ("cifar_cnn_a_adv", "linf"): "2/255",
    ("cifar_cnn_a_adv", "l2"): "0.25",
    ("mnist_madry_tiny", "linf"): "0.3",
    ("mnist_madry_tiny", "l2"): "1.5",
    ("vnn_resnet2b", "linf"): "2/255",
    ("vnn_resnet2b", "l2"): "0.25",
    ("mnist_madry_tiny", "l1"): "5",
    ("cifar_cnn_a_adv", "l1"): "3",
    ("mnist_kw_01", "linf"): "0.1",
    ("cifar_conv_small_sigmoid", "linf"): "2/255",
    ("cifar_conv_small_sigmoid", "l2"): "0.25",
    ("cifar_vit_pgd_2_3_16", "linf"): "1/255",
}


def units() -> list[Unit]:
    """Every network, norm and attack; the dearest attack of the others last."""
    found: list[Unit] = []
    last: list[Unit] = []  # what the tables can do without
    for name, norm in CASES:
        files = (name, data_of(name))
        for passes in PASSES:
            run = partial(ours, name, norm, passes)
            unit = Unit(f"{name}/{norm}/nearest-{passes}", run, networks=files)
            (last if passes == 100 else found).append(unit)
        for attack in peers.MINIMAL[NORMS[norm]]:
            run = partial(theirs, name, norm, attack)
            unit = Unit(f"{name}/{norm}/{attack}", run, "adv-lib", files)
            (last if attack == "FAB" else found).append(unit)
    return found + last


def ours(name: str, norm: str, passes: int) -> Row:
    """Distances of `nearest`."""
    model = load(name)
    x, y = images(data_of(name), IMAGES)
    with spent() as used:
        flips = ws.nearest(model, x, y, NORMS[norm], passes=passes, seed=SEED)
    return {
        "distances": numbers(flips.distances),
        "passes": float(sum(flips.passes())),
        "seconds": used.seconds,
    }


def theirs(name: str, norm: str, attack: str) -> Row:
    """Distances of an attack of adversarial-library."""
    model = load(name).requires_grad_(False)
    x, y = images(data_of(name), IMAGES)
    with spent() as used:
        found, passes = minimal(model, x, y, NORMS[norm], peers.adv_lib(attack, NORMS[norm]))
    return {"distances": numbers(found), "passes": passes, "seconds": used.seconds}


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network and norm that ours has run on."""
    rows = []
    for (name, norm), eps in CASES.items():
        own = {p: done.get(f"{name}/{norm}/nearest-{p}") for p in PASSES}
        if own[1000] is None:
            continue
        others = {
            attack: done[f"{name}/{norm}/{attack}"]
            for attack in peers.MINIMAL[NORMS[norm]]
            if f"{name}/{norm}/{attack}" in done
        }
        rows.append(row(name, norm, eps, own, others))
    return {"minimal": rows}


def row(name: str, norm: str, eps: str, own: dict[int, Row | None], others: dict[str, Row]) -> Row:
    """Mean distances over the samples that the network gets right, and accuracies."""
    found: Row = {"id": f"{name}-{norm}", "network": name, "norm": norm, "eps": eps}
    best = tensor(own[1000]["distances"])  # type: ignore[index]
    right = best > 0
    found |= {"images": len(best), "clean": 100 * float(right.double().mean())}
    budget = ws.Threat(NORMS[norm], 1, eps).eps
    for passes, answer in own.items():
        if answer is None:
            continue
        values = tensor(answer["distances"])
        found[f"mean_{passes}"] = float(values[right].mean())
        found[f"omega1_{passes}"] = accuracy(values, budget, 1)
        found[f"omega2_{passes}"] = accuracy(values, budget, 2)
        found[f"seconds_{passes}"] = answer["seconds"]
    peers_found = {attack: tensor(answer["distances"]) for attack, answer in others.items()}
    complete = {a: d for a, d in peers_found.items() if bool(torch.isfinite(d).all())}
    found["peers"] = {
        attack: {
            "flipped": 100 * float(torch.isfinite(d[right]).double().mean()),
            "mean": float(d[right & torch.isfinite(d)].mean()),
            "omega1": accuracy(d, budget, 1),
            "passes": others[attack]["passes"],
            "seconds": others[attack]["seconds"],
        }
        for attack, d in peers_found.items()
    }
    if peers_found:
        union = torch.stack(list(peers_found.values())).amin(0)
        found["union"] = float(union[right].mean())
        found["union_omega1"] = accuracy(union, budget, 1)
        found["union_omega2"] = accuracy(union, budget, 2)
    if complete:
        means = {attack: float(d[right].mean()) for attack, d in complete.items()}
        found["best_peer"] = min(means, key=means.__getitem__)
        found["best_peer_mean"] = means[found["best_peer"]]
    return found


def accuracy(values: torch.Tensor, eps: float, order: int) -> float:
    """Attacked accuracy in percent: what these distances leave."""
    return 100 * float((1 - knapsack(values, eps, order)).mean())


STAGE = Stage(
    name="attacks",
    about="Minimal perturbations: mean distance of adversarial examples beside other attacks.",
    depends=rooms.ATTACKS,
    units=units,
    tables=tables,
    source=here(),
)
