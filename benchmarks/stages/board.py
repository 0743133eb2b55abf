"""The board: every network in the norm it was trained for, attacked and certified."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

import wassail as ws
from benchmarks import rooms
from benchmarks.measure import INF, NORMS, numbers, spent, tensor
from benchmarks.networks.load import data_of, images, load
from benchmarks.stage import SEED, Row, Stage, Unit, here
from wassail.transport.curve import RiskCurve, below

ATTACKED = 1000
CERTIFIED = 200
CHUNK = 50
PASSES = 100
METHOD = "crown"
LARGEST = 3072  # numbers in a sample


@dataclass(frozen=True)
class Network:
    """A network, the norm and eps it was trained for, and on how many images.

    Args:
        name: as in the list of networks.
        norm: that it was trained for.
        eps: its budget there.
        attacked: images that are attacked.
        certified: images that are certified; 0 where certificates take minutes an image.
    """

    name: str
    norm: str
    eps: str
    attacked: int = ATTACKED
    certified: int = CERTIFIED


NETWORKS = (
    Network("mnist_mlp_toy20", "linf", "0.02"),
    Network("mnist_mlp_6_100", "linf", "0.026"),
    Network("mnist_mlp_spectral", "linf", "0.1"),
    Network("mnist_madry_tiny", "linf", "0.3"),
    Network("sdp_mnist_mlp", "l2", "1", CERTIFIED),
    Network("mnist_kw_01", "linf", "0.1"),
    Network("fashion_kw_01", "linf", "0.1"),
    Network("cifar_base_kw", "linf", "2/255"),
    Network("mnist_conv_small", "linf", "0.12"),
    Network("mnist_cnn_a_adv", "linf", "0.3"),
    Network("cifar_cnn_a_adv", "linf", "2/255"),
    Network("cifar_cnn_a_mix", "linf", "2/255"),
    Network("cifar_cnn_a_adv4", "linf", "8/255"),
    Network("vnn_resnet2b", "linf", "2/255"),
    Network("cifar_conv_small_sigmoid", "linf", "2/255"),
    Network("sdp_mnist_convsmall", "l2", "0.3", CERTIFIED),
    Network("sdp_cifar_cnn_a", "l2", "24/255", CERTIFIED),
    Network("sdp_cifar_cnn_c", "l2", "24/255", CERTIFIED),
    Network("cifar_small_kw_l2_36px", "l2", "36/255"),
    Network("lip1_mnist_conv", "l2", "1"),
    Network("lip1_cifar_cnn_a", "l2", "36/255"),
    Network("mnist_convnet_avgpool", "linf", "0.1"),
    Network("mnist_convnet_maxpool", "linf", "0.1"),
    Network("mnist_fc_256x2", "linf", "0.03"),
    Network("cifar_vit_pgd_2_3_16", "linf", "2/255"),
    Network("cifar_vit_ibp_3_3_8", "linf", "2/255"),
    Network("vnn_resnet4b", "linf", "1/255"),
    Network("mnist_trades", "linf", "0.3", CERTIFIED, 0),
    Network("mnist_smallcnn_ddn", "l2", "1.5", CERTIFIED, 0),
    Network("cifar_resnet20", "linf", "1/255", CERTIFIED, 0),
    Network("cifar_sri_resnet_a", "linf", "4/255", CERTIFIED, 0),
)


def units() -> list[Unit]:
    """All attacks, then certificates in chunks of images."""
    found = []
    for network in NETWORKS:
        files = (network.name, data_of(network.name))
        run = partial(attacked, network)
        found.append(Unit(f"{network.name}/attack", run, networks=files))
    for network in NETWORKS:
        files = (network.name, data_of(network.name))
        for first in range(0, network.certified, CHUNK):
            run = partial(certified, network, first)
            found.append(Unit(f"{network.name}/radii/{first}", run, networks=files))
    return found


def samples(network: Network, count: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in the shape that the network takes."""
    x, y = images(data_of(network.name), count, first)
    return (x.reshape(len(x), 784, 1) if "mnist_fc" in network.name else x), y


def attacked(network: Network) -> Row:
    """Distances of adversarial examples."""
    model = load(network.name)
    x, y = samples(network, network.attacked)
    with spent() as used:
        flips = ws.nearest(model, x, y, NORMS[network.norm], passes=PASSES, seed=SEED)
    return {"distances": numbers(flips.distances), "seconds": used.seconds}


def certified(network: Network, first: int) -> Row:
    """Certified radii of some images."""
    model = load(network.name)
    x, y = samples(network, CHUNK, first)
    with spent() as used:
        found = ws.radii(model, x, y, NORMS[network.norm], method=METHOD)
    return {"radii": numbers(found.values), "seconds": used.seconds}


def tables(done: dict[str, Row]) -> dict[str, list[Row]]:
    """One row for each network."""
    rows = []
    for network in NETWORKS:
        if f"{network.name}/attack" not in done:
            continue
        answer = done[f"{network.name}/attack"]
        far = tensor(answer["distances"])
        starts = range(0, network.certified, CHUNK)
        parts = [done.get(f"{network.name}/radii/{first}") for first in starts]
        whole = parts[: parts.index(None)] if None in parts else parts  # the first images
        near = torch.cat([tensor(part["radii"]) for part in whole]) if whole else None  # type: ignore[index]
        rows.append(row(network, far, near))
    return {"board": rows}


def row(network: Network, far: torch.Tensor, near: torch.Tensor | None) -> Row:
    """Accuracies over Omega_1, Omega_2 and Omega_inf in percent: attacked on all images, and both
    sides on those that are certified.
    """
    eps = ws.Threat(NORMS[network.norm], 1, network.eps).eps
    found: Row = {"id": network.name, "network": network.name, "data": data_of(network.name)}
    found |= {"norm": network.norm, "eps": network.eps, "images": len(far)}
    found["clean"] = 100 * float((far > 0).double().mean())
    for order in (1, 2, INF):
        found[f"attacked_{order:g}"] = 100 * side(far, None, order, eps)[1]
    found["certified_images"] = 0 if near is None else len(near)
    if near is not None:
        for order in (1, 2, INF):
            low, high = side(far[: len(near)], near, order, eps)
            found[f"both_{order:g}"] = [100 * low, 100 * high]
    return found


def side(
    far: torch.Tensor, near: torch.Tensor | None, order: float, eps: float
) -> tuple[float, float]:
    """Certified and attacked accuracy."""
    proved = None if near is None else below(near, far, LARGEST)
    weights = torch.full((len(far),), 1 / len(far), dtype=torch.float64)
    return RiskCurve(far, proved, weights, order)(eps)


STAGE = Stage(
    name="board",
    about="Public networks in the norm they were trained for, attacked and certified.",
    depends=rooms.PROOFS,
    units=units,
    tables=tables,
    source=here(),
)
