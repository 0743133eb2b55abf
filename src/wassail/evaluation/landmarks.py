"""What an eps is worth: shifts that people know, each with its eps and the accuracy under it.

The pairing of a sample with its changed version is a coupling, so its cost is an upper bound on the
Wasserstein distance between the data and the changed data (THEORY 9).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from wassail.checks import check_data
from wassail.errors import InputError
from wassail.evaluation.shifts import shift_of, standard
from wassail.geometry import clip
from wassail.geometry import distances as distances_between
from wassail.losses import predict
from wassail.network import BATCH_SIZE, Model, Network, device_of, frozen
from wassail.threat import Domain, Number, parse_domain, parse_norm, parse_order, show
from wassail.transport.curve import RiskCurve
from wassail.zoo.datasets import open_data

Shifts: TypeAlias = "str | Sequence[str] | Mapping[str, Any]"
EXACT_UP_TO = 400  # samples of one class for which the assignment problem is solved
ROUND_UP = 1 + 1e-12  # of an eps, for the sum of N costs


@dataclass(frozen=True)
class Landmark:
    """A known shift of the data.

    Args:
        name: for example `jpeg-50`.
        norm: ground norm of the costs.
        eps: for every order the cost of the pairing, rounded up, an upper bound on the Wasserstein
            distance.
        exact: for every order the distance itself, by an assignment problem within each class, None
            where that was not asked for or too large.
        accuracy: measured on the changed samples, a tie counts as an error.
    """

    name: str
    norm: float
    eps: Mapping[float, float]
    exact: Mapping[float, float | None]
    accuracy: float

    def check(self, curve: RiskCurve) -> None:
        """Raise if the measured accuracy is below what a curve of the same samples certifies.

        Args:
            curve: of the same model, samples, norm and domain, of any order that `eps` has.
        """
        known = self.exact.get(curve.order)
        eps = self.eps[curve.order] if known is None else known
        certified = curve(eps)[0]
        if self.accuracy < certified - 1e-12:
            raise InputError(
                f"the accuracy under {self.name} is {self.accuracy!r}, but {certified!r} is "
                f"certified at its eps {show(eps)} (order {curve.order:g}): one of the two is "
                "wrong, so trust neither; check that both are for the same model and samples, and "
                "report it if they are."
            )


def landmarks(
    model: Model,
    x: Tensor,
    y: Tensor,
    norm: Number,
    orders: Sequence[Number] = (1, 2, math.inf),
    shifts: Shifts = "standard",
    *,
    domain: Domain = (0.0, 1.0),
    curves: Sequence[RiskCurve] = (),
    exact: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
) -> tuple[Landmark, ...]:
    """The eps of known shifts in every order, and the accuracy measured under them.

    Args:
        model: a callable from a batch to logits.
        x: samples `(N, *shape)`, of equal weight.
        y: labels `(N,)`.
        norm: ground norm: 1, 2 or inf.
        orders: Wasserstein orders (default 1, 2 and inf).
        shifts: "standard" for all known shifts of images or features, names such as ["jpeg-50"],
            or a mapping from names to names, functions of the samples, or tensors `(N, *shape)`
            that are paired with the samples, for example the same scenes from another camera; also
            anything but a name that `zoo.open_data` takes, such as a `Path` or a pair `(x, y)`.
        domain: box; changed samples are clipped to it. Known shifts work in units of the box,
            without one in units of the range of the samples.
        curves: risk curves of the same samples. A measured accuracy below the certified side is
            a contradiction, and raises.
        exact: also the exact transport distance within classes of up to 400 samples.
        seed: int of the random shifts, which are keyed by sample; default 0.
        batch_size: most samples in one model call (default 250).
    """
    norm = parse_norm(norm)
    domain = parse_domain(domain)
    x, y = check_data(x, y, domain, model)
    if not len(x):
        raise InputError("there are no samples: landmarks need some.")
    wanted = [parse_order(order) for order in orders]
    found = []
    for name, change in _named(shifts, tuple(x.shape[1:])).items():
        moved = changed(x, _paired(change, y, name), domain, seed, name)
        distance = distances_between(moved, x, norm)
        eps = {order: mean_cost(distance, order) for order in wanted}
        known = {order: transport(x, moved, y, norm, order) if exact else None for order in wanted}
        landmark = Landmark(
            name, norm, eps, known, _accuracy(model, moved, y, batch_size or BATCH_SIZE)
        )
        for curve in curves:
            if curve.order in eps:
                landmark.check(curve)
        found.append(landmark)
    return tuple(found)


def changed(
    x: Tensor,
    change: str | Tensor | Callable[[Tensor], Tensor],
    domain: Domain,
    seed: int = 0,
    name: str = "the shift",
) -> Tensor:
    """The samples after a shift, clipped to the box.

    Args:
        x: samples `(N, *shape)`.
        change: a known name, a function of the samples, or samples that are paired with x.
        domain: box, or None for the range of the samples.
        seed: of random shifts.
        name: what an error calls it.
    """
    if isinstance(change, str):
        low, high = (float(x.min()), float(x.max())) if domain is None else domain
        width = (high - low) or 1.0
        moved = low + width * shift_of(change, seed)((x - low) / width)
    else:
        moved = change if isinstance(change, Tensor) else change(x)
    moved = torch.as_tensor(moved).detach().to(x)
    if moved.shape != x.shape or not bool(torch.isfinite(moved).all()):
        raise InputError(
            f"{name} gives samples of shape {tuple(moved.shape)}, or values that are not finite: "
            f"give one sample for each of the {len(x)}, of shape {tuple(x.shape[1:])}."
        )
    return clip(moved, domain)


def mean_cost(distances: Tensor, order: float) -> float:
    """The cost of a pairing, `(mean_i d_i^p)^(1/p)` or the largest distance, rounded up.

    distances: of N pairs of equal weight, `(N,)`.
    """
    largest = float(distances.max())
    if order == math.inf or largest == 0:
        return largest
    share = math.fsum(((distances / largest) ** order).tolist()) / len(distances)
    return min(float(largest * share ** (1 / order)) * ROUND_UP, largest)


def transport(x: Tensor, moved: Tensor, y: Tensor, norm: float, order: float) -> float | None:
    """The Wasserstein distance between two labelled samples of equal weights and equal labels.

    Within each class it is an assignment problem, which scipy solves exactly: a general transport
    solver is not needed. None if a class is too large.

    x: samples `(N, *shape)`; moved: as many samples, with the same labels; y: labels `(N,)`.
    """
    from scipy.optimize import linear_sum_assignment

    labels, counts = torch.unique(y.cpu(), return_counts=True)
    if int(counts.max()) > EXACT_UP_TO:
        return None
    parts = []
    for label in labels.tolist():
        mine = (y == label).cpu()
        a = x.cpu()[mine].flatten(1).double()
        b = moved.cpu()[mine].flatten(1).double()
        cost = torch.cdist(a, b, p=norm, compute_mode="donot_use_mm_for_euclid_dist").numpy()
        if order == math.inf:
            rows, columns = _bottleneck(cost)
        else:
            rows, columns = linear_sum_assignment((cost / (cost.max() or 1.0)) ** order)
        parts.append(torch.from_numpy(cost[rows, columns]))
    return mean_cost(torch.cat(parts), order)


def plain(found: Sequence[Landmark]) -> list[dict[str, Any]]:
    """The landmarks as values for JSON; orders are keys, "inf" among them."""
    return [
        {
            "name": landmark.name,
            "norm": f"{landmark.norm:g}",
            "accuracy": landmark.accuracy,
            "eps": {f"{order:.17g}": eps for order, eps in landmark.eps.items()},
            "exact": {f"{order:.17g}": eps for order, eps in landmark.exact.items()},
        }
        for landmark in found
    ]


def read_plain(values: Any) -> tuple[Landmark, ...]:
    """The reverse of `plain`, of any origin; ValueError for what it cannot have written.

    values: a list of objects.
    """
    found = []
    for entry in values:
        eps = {parse_order(key): float(value) for key, value in entry["eps"].items()}
        exact = {
            parse_order(key): None if value is None else float(value)
            for key, value in entry["exact"].items()
        }
        share = float(entry["accuracy"])
        known = [*eps.values(), *(value for value in exact.values() if value is not None)]
        if not (0 <= share <= 1 and all(0 <= value < math.inf for value in known)):
            raise ValueError("a landmark with numbers that cannot be")
        found.append(Landmark(str(entry["name"]), parse_norm(entry["norm"]), eps, exact, share))
    return tuple(found)


def _bottleneck(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The assignment whose dearest pair is cheapest: bisection over the costs."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_bipartite_matching

    levels = np.unique(cost)
    low = 0
    high = len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        match = maximum_bipartite_matching(csr_matrix(cost <= levels[middle]), perm_type="column")
        if (match >= 0).all():
            high = middle
        else:
            low = middle + 1
    match = maximum_bipartite_matching(csr_matrix(cost <= levels[low]), perm_type="column")
    return np.arange(len(cost)), match


def _named(shifts: Shifts, shape: tuple[int, ...]) -> dict[str, Any]:
    if isinstance(shifts, str):
        names: Sequence[str] = standard(shape) if shifts == "standard" else [shifts]
        return {name: name for name in names}
    if isinstance(shifts, Mapping):
        return dict(shifts)
    return {name: name for name in shifts}


def _paired(change: Any, y: Tensor, name: str) -> Any:
    """A change as it is, or the samples of other data, whose labels must be the same."""
    if isinstance(change, (str, Tensor)) or callable(change):
        return change
    x, labels = open_data(change).read(0, len(y))
    if not torch.equal(labels, y.cpu()):
        raise InputError(
            f"{name} has other labels than the data, or fewer samples: a second data set is paired "
            "with the first, sample by sample."
        )
    return x


def _accuracy(model: Model, x: Tensor, y: Tensor, batch_size: int) -> float:
    rows = torch.arange(len(x))
    with frozen(model):
        network = Network(model, rows, batch_size, device_of(model, x.device))
        z = network.logits(x, network.rows)
    return float((predict(z, y) == y).sum()) / len(y)
