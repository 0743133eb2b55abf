"""The paper's figures of its attacks, each as data and a drawing of them; `figures.write` makes the
files.

`inclusion`: Omega_inf in Omega_2 in Omega_1, and what splitting samples adds (N against 2N points),
in closed form. `step`: one step of WDA beside PGD's and DeepFool's, on a network of the plane. The
others need a network and its data: `runtime` (and passes) against N, `curve` (accuracy against eps
for every order from one search), `kappa` and `steps` (WDA's two parameters).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from wassail.attacks import catalogue
from wassail.attacks.nearest import nearest
from wassail.attacks.walk import default_step
from wassail.attacks.wda import wda
from wassail.attacks.wda_pp import flips_wda_pp, wda_pp
from wassail.certificates.distance import nearest_flip
from wassail.certificates.piecewise import Piecewise
from wassail.certificates.structure import Graph, Matrix, Node
from wassail.errors import InputError
from wassail.evaluation.result import Evaluation
from wassail.geometry import maximiser, vector_norm
from wassail.losses import ce_ascent, predict
from wassail.network import Model
from wassail.report.figures import DASHES, INK, Columns, _figure
from wassail.threat import Number, Threat, dual, parse_eps, parse_norm, show
from wassail.transport import Flips, allocate, knapsack, risk_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wassail.evaluation.table import Line, Table
    from wassail.report.page import Html

Curves: TypeAlias = "dict[tuple[str, float], Tensor]"  # by method and order

ORDERS = (1.0, 2.0, math.inf)
TITLES = {name: entry.title for name, entry in catalogue.ATTACKS.items()}
PASSES = 100  # of `nearest` in these figures
RACE = ("wda", "wda++", "nearest", "pgd", "w-pgd", "apgd-ce", "a3", "autoattack")
KAPPAS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
SHARES = tuple(2.0**k for k in range(-6, 4))  # step sizes swept, in units of eps
EARLY = 5  # steps after which the sweep looks, besides the paper's 20
SETS = {
    1.0: "#CFE3F3",
    2.0: "#8DBCE0",
    math.inf: "#3D87BF",
}  # one hue, darker inside: sets, not methods
REGIONS = ("#FFFFFF", "#ECECEC", "#DCE9F2", "#F6E8DA")  # of the classes in the plane
ORDER_DASH: dict[float, Any] = {1.0: "-", 2.0: (0, (5, 2)), math.inf: (0, (1, 1.2))}


# --------------------------------------------------------------------------------------------------
# inclusion


@dataclass(frozen=True, eq=False)
class Inclusion:
    """Two samples on a line, with different labels, whose nearest flips lie at two distances, and
    every way to attack them.

    No mass can change its label, so the one coupling with finite cost pairs each sample with its
    own mass, and a distribution that moves the share a_i of sample i by t_i is at distance `(sum_i
    a_i |t_i|^p / 2)^(1/p)`, order inf: `max |t_i|`, exactly.

    eps: the budget of the sets drawn; distances `(2,)`; angles `(T,)`; whole, half `{order: (T,
    2)}`: the boundary of Omega_order(eps) among the moves t of whole samples (N points) and of half
    of each sample (2N points, kappa = 2); budgets `(B,)`; points_n, points_2n `{order: (B,)}`: the
    lowest accuracy with whole samples moved, and with any shares.
    """

    eps: float
    distances: Tensor
    whole: dict[float, Tensor]
    half: dict[float, Tensor]
    budgets: Tensor
    points_n: dict[float, Tensor]
    points_2n: dict[float, Tensor]


def inclusion(
    eps: float = 1.0, distances: Sequence[float] = (1.2, 2.2), *, points: int = 241
) -> Inclusion:
    """The paper's inclusion of the Wasserstein balls, on the smallest example that has all of
    it: N = 2.
    """
    d = torch.tensor(distances, dtype=torch.float64)
    budgets = torch.linspace(0, 1.1 * float(d.max()), points, dtype=torch.float64)
    bends = torch.stack(
        [_moved(d, chosen, order) for order in ORDERS for chosen in _subsets(len(d))]
    )
    before = torch.nextafter(bends, torch.zeros_like(bends))  # so that drops are drawn upright
    budgets = torch.tensor(
        sorted({float(eps), *budgets.tolist(), *bends.tolist(), *before.tolist()}),
        dtype=torch.float64,
    )
    return Inclusion(
        eps=float(eps),
        distances=d,
        whole={order: ball(eps, order, 1.0) for order in ORDERS},
        half={order: ball(eps, order, 0.5) for order in ORDERS},
        budgets=budgets,
        points_n={order: _undivided(d, budgets, order) for order in ORDERS},
        points_2n={
            order: torch.stack([1 - _shares(d, e, order).mean() for e in budgets])
            for order in ORDERS
        },
    )


def ball(eps: float, order: float, share: float, points: int = 361) -> Tensor:
    """The boundary of `{(t_1, t_2) : moving the share of each of two samples by t_i stays in
    Omega_order(eps)}`: `(T, 2)`.
    """
    angle = torch.linspace(0, 2 * math.pi, points, dtype=torch.float64)
    u = torch.stack([angle.cos(), angle.sin()], 1)
    return u * (eps / _moved(u.abs(), torch.full((2,), share, dtype=torch.float64), order))[:, None]


def _moved(t: Tensor, shares: Tensor, order: float) -> Tensor:
    """The Wasserstein distance of moves t `(..., N)` of shares `(N,)` from the samples."""
    if order == math.inf:
        return torch.where(shares > 0, t, 0.0).amax(-1)
    return (shares * t**order).mean(-1) ** (1 / order)


def _shares(d: Tensor, eps: Tensor, order: float) -> Tensor:
    return knapsack(d, float(eps), order) if eps > 0 else torch.zeros_like(d)


def _undivided(d: Tensor, budgets: Tensor, order: float) -> Tensor:
    """The lowest accuracy when samples move whole or not at all, by trying every subset: `(B,)`."""
    choices = _subsets(len(d))
    prices = torch.stack([_moved(d, chosen, order) for chosen in choices])
    return 1 - torch.where(prices <= budgets[:, None], choices.mean(1), 0.0).amax(1)


def _subsets(n: int) -> Tensor:
    return torch.tensor(list(itertools.product((0.0, 1.0), repeat=n)), dtype=torch.float64)


def draw_inclusion(data: Inclusion) -> Figure:
    """Three panels: the sets for N points, for 2N points, and the accuracy that each of them
    reaches against eps.
    """
    figure = _figure(13.2, 5.2)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    reach = 1.12 * max(float(sets[1.0].abs().max()) for sets in (data.whole, data.half))
    _draw_sets(left, data, data.whole, reach)
    left.set_title("N points: both samples move whole", fontsize=10)
    _draw_sets(middle, data, data.half, reach)
    middle.set_title("2N points: half of each moves (kappa = 2)", fontsize=10)
    for order, ink in zip(ORDERS, ("#56B4E9", "#0072B2", "#000000")):
        name = f"Omega_{order:g}"
        right.plot(
            data.budgets, 100 * data.points_2n[order], color=ink, lw=2.2, label=f"{name}, 2N points"
        )
        right.step(
            data.budgets,
            100 * data.points_n[order],
            where="post",
            color=ink,
            lw=1.3,
            ls=(0, (4, 2)),
            label=f"{name}, N points",
        )
    right.axvline(data.eps, color="0.5", lw=0.9, ls=(0, (2, 2)), zorder=0)
    right.annotate(
        f"eps = {show(data.eps)}",
        (data.eps, 2),
        (4, 0),
        textcoords="offset points",
        fontsize=9,
        color="0.35",
    )
    right.set(
        xlabel="budget eps",
        ylabel="lowest accuracy %",
        xlim=(0, float(data.budgets[-1])),
        ylim=(-2, 103),
    )
    right.set_title("What the sets reach", fontsize=10)
    right.legend(fontsize=8.5, frameon=False, loc="upper right")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=5, fontsize=9, frameon=False)
    figure.suptitle(
        "Two samples on a line, of different classes, whose nearest flips are "
        f"{show(float(data.distances[0]))} and "
        f"{show(float(data.distances[1]))} away.\n"
        "Omega_inf lies in Omega_2 in Omega_1; a share of a sample may go farther than the whole "
        "of it, except at order inf.",
        fontsize=10,
    )
    return figure


def _draw_sets(axes: Axes, data: Inclusion, sets: Mapping[float, Tensor], reach: float) -> None:
    for order in ORDERS:
        edge = sets[order]
        axes.fill(
            edge[:, 0],
            edge[:, 1],
            facecolor=SETS[order],
            edgecolor="0.25",
            lw=0.8,
            label=f"Omega_{order:g}({show(data.eps)})",
        )
    first, second = data.distances.tolist()
    for side in (-1, 1):  # a flip on either side of each sample
        axes.axvline(
            side * first,
            color=INK["paper"],
            lw=1.3,
            label="sample 1 flips beyond" if side > 0 else None,
        )
        axes.axhline(
            side * second,
            color=INK["margin"],
            lw=1.3,
            ls="--",
            label="sample 2 flips beyond" if side > 0 else None,
        )
    axes.set(xlabel="$t_1$, move of sample 1", ylabel="$t_2$, move of sample 2", aspect="equal")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach))


def inclusion_tables(data: Inclusion) -> dict[str, Columns]:
    """The sets' boundaries and the accuracies, as columns."""
    d = ", ".join(f"{v!r}" for v in data.distances.tolist())
    about = (
        f"two samples on a line, of different classes, nearest flips at {d}; sets for eps "
        f"{data.eps!r}"
    )
    edges = {
        f"{kind}_{order:g}_t{i + 1}": sets[order][:, i].tolist()
        for kind, sets in (("whole", data.whole), ("half", data.half))
        for order in ORDERS
        for i in range(2)
    }
    lows = {
        f"{kind}_{order:g}": values[order].tolist()
        for kind, values in (("n_points", data.points_n), ("2n_points", data.points_2n))
        for order in ORDERS
    }
    return {
        "inclusion-sets": (about, edges),
        "inclusion-accuracy": (about, {"eps": data.budgets.tolist(), **lows}),
    }


# --------------------------------------------------------------------------------------------------
# step


@dataclass(frozen=True, eq=False)
class Step:
    """One step of WDA from a sample of the plane, beside PGD's and DeepFool's, and where each of
    them ends.

    network `R^2 -> R^K`; x `(2,)`, label y; norm r; alpha: WDA's and PGD's step size. rivals
    `(K-1,)`; candidates `(K-1, 2)`: `phi_j = x + alpha M_r(grad(theta_j - theta_y))`; gaps
    `(K-1,)`: `(theta_j - theta_y)(phi_j)`; chosen: index of the largest gap. pgd, deepfool `(2,)`:
    the others' first step. walks: `{method: (T, 2)}`, each from the sample to its first flip, or
    for 30 steps; flip `(2,)`: the nearest flip there is, at distance, which is exact.
    """

    network: Piecewise
    about: str
    x: Tensor
    y: int
    norm: float
    alpha: float
    rivals: Tensor
    candidates: Tensor
    gaps: Tensor
    chosen: int
    pgd: Tensor
    deepfool: Tensor
    walks: dict[str, Tensor]
    flip: Tensor
    distance: float


def plane_network(generator: torch.Generator, classes: int = 4, neurons: int = 12) -> Piecewise:
    """A network `2-neurons-classes` with normal weights."""
    shapes = (neurons, 2), (neurons,), (classes, neurons), (classes,)
    first, bias, head, shift = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes
    )
    return Piecewise.from_layers([(first, bias), (head / math.sqrt(neurons), 0.3 * shift)])


def step(seed: int = 0, norm: Number = 2, *, share: float = 0.4, tries: int = 30) -> Step:
    """The paper's figure of a WDA step: a candidate for every rival class, of which the one with
    the largest gap is taken.

    Of the networks tried the one is drawn that has a sample with the most rivals around it. alpha
    is the share of the distance to the nearest flip.
    """
    r = parse_norm(norm)
    generator = torch.Generator().manual_seed(seed)
    network, x = max(
        (_surrounded(plane_network(generator), r) for _ in range(tries)), key=lambda found: found[0]
    )[1:]
    y = int(network.logits(x[None]).argmax())
    exact = nearest_flip(_graph(network), x[None], torch.tensor([y]), r, None)
    alpha = share * float(exact.upper[0])
    candidates, gaps = _candidates(network, x, y, r, alpha)
    walks = {name: _walk(network, x, y, r, alpha, name) for name in ("wda", "pgd", "deepfool")}
    return Step(
        network=network,
        about=f"network 2-{network.neurons}-{network.outputs} (normal weights), seed {seed}",
        x=x,
        y=y,
        norm=r,
        alpha=alpha,
        rivals=torch.tensor([j for j in range(network.outputs) if j != y]),
        candidates=candidates,
        gaps=gaps,
        chosen=int(gaps.argmax()),
        pgd=walks["pgd"][1],
        deepfool=walks["deepfool"][1],
        walks=walks,
        flip=exact.points[0],
        distance=float(exact.upper[0]),
    )


def _surrounded(network: Piecewise, norm: float) -> tuple[float, Piecewise, Tensor]:
    """The point of a grid with the most rival classes around it, in the most different directions,
    and how many and different.

    Distances are to grid points of the other classes: good enough to choose what to draw.
    """
    side = torch.linspace(-2, 2, 33, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).flatten(0, 1)
    classes = network.logits(grid).argmax(1)
    apart = torch.cdist(grid, grid, p=norm)
    far = torch.stack(
        [apart.masked_fill(classes != k, math.inf).amin(1) for k in range(network.outputs)], 1
    )
    far = far.scatter(1, classes[:, None], math.inf)
    near = far.amin(1)
    around = (far <= 1.8 * near[:, None]).sum(1)
    jacobian = network.jacobian(network.mask(grid))
    others = torch.stack(
        [torch.cat([j[:k], j[k + 1 :]]) - j[k] for j, k in zip(jacobian, classes.tolist())]
    )
    size = others.norm(dim=-1)
    ways = others / size.clamp(min=1e-12)[..., None]
    pairs = (
        (ways @ ways.mT).triu(1).flatten(1)
    )  # cosines between the directions to two rivals, and zeros
    score = around + (1 - pairs.amax(1)) / 2
    unfit = (near < 0.4) | (near > 0.8) | (grid.abs().amax(1) > 1.2) | (size.amin(1) < 0.1)
    score = score.masked_fill(unfit, -1.0)
    best = int(score.argmax())
    return float(score[best]), network, grid[best]


def _graph(network: Piecewise) -> Graph:
    """The same network with one hidden layer in the form that distances are computed of."""
    hidden = Node((0,), (network.neurons,), "hidden", Matrix(network.A), network.c)
    relu = Node((1,), (network.neurons,), "relu", slope=network.slope)
    head = Node((2,), (network.outputs,), "head", Matrix(network.D), network.e)
    return Graph((Node((), (network.inputs,), "input"), hidden, relu, head))


def _margins(network: Piecewise, x: Tensor, y: int) -> tuple[Tensor, Tensor]:
    """`theta_j - theta_y` for the rivals j, `(K-1,)`, and their gradients `(K-1, 2)` at x
    `(2,)`.
    """
    others = [j for j in range(network.outputs) if j != y]
    z = network.logits(x[None])[0]
    jacobian = network.jacobian(network.mask(x[None]))[0]
    return z[others] - z[y], jacobian[others] - jacobian[y]


def _candidates(
    network: Piecewise, x: Tensor, y: int, norm: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """WDA's candidates `(K-1, 2)` from x and their gaps `(K-1,)`."""
    phi = x + alpha * maximiser(_margins(network, x, y)[1], norm)
    z = network.logits(phi)
    others = torch.tensor([j for j in range(network.outputs) if j != y])
    return phi, z.gather(1, others[:, None])[:, 0] - z[:, y]


def _walk(
    network: Piecewise, x: Tensor, y: int, norm: float, alpha: float, name: str, steps: int = 30
) -> Tensor:
    """The iterates `(T, 2)` of WDA without a ball, PGD without one (cross entropy) or DeepFool,
    up to the first flip.
    """
    path = [x]
    label = torch.tensor([y])
    while len(path) <= steps and int(predict(network.logits(path[-1][None]), label)[0]) == y:
        point = path[-1]
        if name == "wda":
            phi, gaps = _candidates(network, point, y, norm, alpha)
            path.append(phi[gaps.argmax()])
        elif name == "pgd":
            weight = ce_ascent(network.logits(point[None]), label)[1]
            path.append(
                point
                + alpha
                * maximiser(weight @ network.jacobian(network.mask(point[None]))[0], norm)[0]
            )
        else:
            f, g = _margins(network, point, y)
            far = -f / vector_norm(g, dual(norm)).clamp(min=1e-12)
            j = int(far.argmin())
            path.append(point + 1.02 * far[j] * maximiser(g[j : j + 1], norm)[0])
    return torch.stack(path)


def draw_step(data: Step) -> Figure:
    """Two panels of the plane: the first step of each method, enlarged, and their walks to the
    first flip.
    """
    figure = _figure(11.6, 5.8)
    left, right = figure.subplots(1, 2)
    names = {
        "wda": "WDA: the candidate with the largest gap",
        "pgd": "PGD: gradient of cross entropy",
        "deepfool": "DeepFool: nearest linearised boundary",
    }
    corners = data.x + 1.5 * data.distance * torch.tensor(
        [[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64
    )
    _plane(
        left, data, torch.cat([corners, data.candidates, data.pgd[None], data.deepfool[None]]), 0.52
    )
    for k, (j, phi, gap) in enumerate(
        zip(data.rivals.tolist(), data.candidates, data.gaps.tolist())
    ):
        taken = k == data.chosen
        _arrow(left, data.x, phi, INK["wda"], 4.5 if taken else 1.3, solid=taken)
        across, up = (float(v) for v in phi - data.x)
        # beside a flat arrow, not on top of it
        right_of = across > 0
        above = (up > 0) != (abs(up) < abs(across) / 2)
        left.annotate(
            f"$\\varphi_{{{j}}}$, gap {gap:+.2f}",
            _xy(phi),
            (4 if right_of else -4, 11 if above else -11),
            textcoords="offset points",
            fontsize=9,
            ha="left" if right_of else "right",
            va="center",
            fontweight="bold" if taken else "normal",
            bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1},
            zorder=6,
        )
    _arrow(left, data.x, data.pgd, INK["pgd"], 1.8)
    _arrow(left, data.x, data.deepfool, INK["deepfool"], 1.8)
    left.set_title(
        f"One step from a sample of class {data.y}, alpha = {show(data.alpha)}", fontsize=10
    )
    paths = torch.cat([*data.walks.values(), data.flip[None]])
    _plane(right, data, paths, 0.62)
    for name, path in data.walks.items():
        far = float(vector_norm(path[-1:] - data.x, data.norm))
        flips = int(data.network.logits(path[-1:]).argmax()) != data.y
        told = f"{len(path) - 1} steps, " + (f"flip at {far:.3f}" if flips else "no flip")
        right.plot(
            path[:, 0],
            path[:, 1],
            "o-",
            color=INK[name],
            lw=1.8,
            ms=3.5,
            label=f"{names[name]}; {told}",
            zorder=4,
        )
    right.plot(
        *data.flip,
        "*",
        color="black",
        ms=13,
        label=f"nearest flip, exact: at {data.distance:.3f}",
        zorder=6,
    )
    right.set_title("Walks to the first flip, before any line search", fontsize=10)
    left.plot([], [], color=INK["wda"], lw=1.1, ls=(0, (3, 2)), label="WDA's other candidates")
    handles = [h for axes in (right, left) for h in axes.get_legend_handles_labels()[0]]
    figure.legend(
        handles,
        [h.get_label() for h in handles],
        loc="outside lower left",
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(
        f"{data.about}; ground norm l{data.norm:g}. Shades: classes. Thin lines: walls of the "
        "cells.",
        fontsize=10,
    )
    return figure


def _arrow(
    axes: Axes, start: Tensor, end: Tensor, ink: str, width: float, solid: bool = True
) -> None:
    style = {
        "arrowstyle": "-|>",
        "color": ink,
        "lw": width,
        "ls": "-" if solid else (0, (3, 2)),
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", _xy(end), _xy(start), zorder=5, arrowprops=style)


def _xy(point: Tensor) -> tuple[float, float]:
    return float(point[0]), float(point[1])


def _plane(axes: Axes, data: Step, seen: Tensor, room: float) -> None:
    """The classes as shades, their boundaries, the cells' walls and the sample, around the
    points to be seen.
    """
    middle = (seen.amax(0) + seen.amin(0)) / 2
    half = room * float((seen.amax(0) - seen.amin(0)).max())
    side = torch.linspace(-half, half, 400, dtype=torch.float64)
    across = middle[0] + side
    up = middle[1] + side
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1).flatten(0, 1)
    z = data.network.logits(grid)
    classes = z.argmax(1).reshape(400, 400)
    axes.contourf(
        across,
        up,
        classes.double(),
        levels=[k - 0.5 for k in range(len(REGIONS) + 1)],
        colors=REGIONS,
        zorder=0,
    )
    for k in range(data.network.outputs):
        lead = z[:, k] - z[:, [j for j in range(data.network.outputs) if j != k]].amax(1)
        axes.contour(
            across, up, lead.reshape(400, 400), levels=[0], colors="black", linewidths=1.2, zorder=1
        )
    for v in data.network.preactivations(grid).T:
        axes.contour(
            across, up, v.reshape(400, 400), levels=[0], colors="0.72", linewidths=0.6, zorder=1
        )
    axes.plot(*data.x, "o", mfc="white", mec="black", mew=1.6, ms=8, zorder=6)
    taken = (torch.cdist(grid, torch.cat([seen, data.x[None]])).amin(1) < 0.3 * half).reshape(
        400, 400
    )
    for k in range(data.network.outputs):
        spot = _widest(((classes == k) & ~taken).numpy())
        if spot is not None:
            axes.annotate(
                f"class {k}",
                (float(across[spot[1]]), float(up[spot[0]])),
                fontsize=9,
                color="0.3",
                ha="center",
                zorder=2,
            )
    axes.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    axes.set(xlim=(float(across[0]), float(across[-1])), ylim=(float(up[0]), float(up[-1])))


def _widest(region: Any) -> tuple[int, int] | None:
    """The point of a bool image with the most room around it, or None where there is too little
    for a word.
    """
    from scipy.ndimage import distance_transform_edt  # type: ignore[import-untyped]

    room = distance_transform_edt(np.pad(region, 1))[1:-1, 1:-1]
    row, column = np.unravel_index(int(room.argmax()), room.shape)
    return (int(row), int(column)) if room.max() > 18 else None


def step_tables(data: Step) -> dict[str, Columns]:
    """Candidates, and the walks point by point, as columns."""
    place = f"sample {data.x.tolist()} of class {data.y}"
    about = (
        f"{data.about}, ground norm l{data.norm:g}, {place}, alpha {data.alpha!r}; nearest "
        f"flip at {data.distance!r}"
    )
    chosen = [k == data.chosen for k in range(len(data.rivals))]
    first = {
        "rival": data.rivals.tolist(),
        "x1": data.candidates[:, 0].tolist(),
        "x2": data.candidates[:, 1].tolist(),
        "gap": data.gaps.tolist(),
        "chosen": [int(c) for c in chosen],
    }
    rows = [
        (name, k, *point)
        for name, path in data.walks.items()
        for k, point in enumerate(path.tolist())
    ]
    walks = dict(zip(("method", "step", "x1", "x2"), (list(column) for column in zip(*rows))))
    return {"step-candidates": (about, first), "step-walks": (about, walks)}


# --------------------------------------------------------------------------------------------------
# a network and its data


@dataclass(frozen=True, eq=False)
class Case:
    """A network on N samples with one norm and budget: model, x `(N, *shape)`, y `(N,)`, name:
    which they are.
    """

    model: Model
    x: Tensor
    y: Tensor
    name: str
    norm: float
    eps: float
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", parse_norm(self.norm))
        object.__setattr__(self, "eps", parse_eps(self.eps))
        if not len(self.y):
            raise InputError("there is no sample to draw a figure of: give at least one.")

    @property
    def about(self) -> str:
        """What every drawing and file says about it."""
        return f"{self.name}, {len(self.y)} samples, l{self.norm:g}, box [0, 1]"

    def threat(self, order: float, eps: float | None = None) -> Threat:
        """The threat of this norm at one order."""
        return Threat(self.norm, order, self.eps if eps is None else eps)

    def run(
        self,
        attack: str,
        order: float,
        eps: float | None = None,
        n: int | None = None,
        **options: Any,
    ) -> Any:
        """The distribution that an attack of the catalogue finds on the first n samples."""
        own = {"passes": PASSES} if attack == "nearest" else {}
        run = catalogue.find(attack).run
        return run(
            self.model,
            self.x[:n],
            self.y[:n],
            self.threat(order, eps),
            seed=self.seed,
            **own | options,
        )

    def searches(self) -> dict[str, Flips]:
        """The two searches that serve every order: the paper's and ours."""
        common: dict[str, Any] = {"seed": self.seed}
        return {
            "wda++": flips_wda_pp(self.model, self.x, self.y, self.norm, eps=self.eps, **common),
            "nearest": nearest(self.model, self.x, self.y, self.norm, passes=PASSES, **common),
        }


@dataclass(frozen=True, eq=False)
class Runtime:
    """How long attacks take and how many passes they make, against the number of samples.

    sizes `(T,)`; seconds, forwards, backwards: `{attack: (T,)}`, totals over the samples. Passes do
    not depend on the machine.
    """

    case: Case
    sizes: list[int]
    seconds: dict[str, list[float]]
    forwards: dict[str, list[int]]
    backwards: dict[str, list[int]]

    def passes(self, attack: str) -> list[int]:
        """Forward plus backward passes of all samples, for each size."""
        return [f + b for f, b in zip(self.forwards[attack], self.backwards[attack])]

    def growth(self, values: Sequence[float]) -> float:
        """The exponent q of `values ~ N^q` between the fewest and the most samples."""
        return (
            math.log(values[-1] / values[0]) / math.log(self.sizes[-1] / self.sizes[0])
            if len(self.sizes) > 1
            else math.nan
        )


def runtime(case: Case, attacks: Sequence[str] = RACE) -> Runtime:
    """Every attack on a quarter, half and all of the samples, at the order it is for, on the clock.

    W-PGD has no l1 form and is left out there.
    """
    n = len(case.y)
    sizes = sorted({max(1, n // k) for k in (4, 2, 1)})
    chosen = [name for name in attacks if not (name == "w-pgd" and case.norm == 1)]
    data = Runtime(
        case,
        sizes,
        {name: [] for name in chosen},
        {name: [] for name in chosen},
        {name: [] for name in chosen},
    )
    case.run("wda++", 1.0, n=1)  # what torch sets up at its first call is nobody's time
    for name in chosen:
        for size in sizes:
            start = time.perf_counter()
            found = case.run(name, _own_order(name), n=size)
            data.seconds[name].append(time.perf_counter() - start)
            data.forwards[name].append(int(found.forwards.sum()))
            data.backwards[name].append(int(found.backwards.sum()))
    return data


def _own_order(attack: str) -> float:
    return {"inf": math.inf, "above 1": 2.0}.get(catalogue.find(attack).orders, 1.0)


def draw_runtime(data: Runtime) -> Figure:
    """Two panels, seconds and passes against the number of samples; both axes are logarithmic,
    so linear growth has slope 1.
    """
    figure = _figure(11, 5.4)
    left, right = figure.subplots(1, 2)
    for name in data.seconds:
        style: dict[str, Any] = {
            "color": INK[name],
            "ls": DASHES[name],
            "marker": "o",
            "ms": 4,
            "lw": 1.8,
        }
        each = data.seconds[name], data.passes(name)
        told = (
            f"{each[0][-1]:.3g} s, {each[1][-1] / data.sizes[-1]:.0f} passes a sample, in all "
            f"~ N^{data.growth(each[1]):.2f}"
        )
        left.plot(data.sizes, each[0], **style)
        right.plot(data.sizes, each[1], label=f"{TITLES[name]}: {told}", **style)
    for axes, what in (
        (left, "seconds (this machine)"),
        (right, "forward + backward passes (any machine)"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="samples N", ylabel=what)
        axes.set_xticks(data.sizes, [str(size) for size in data.sizes])
        axes.minorticks_off()
        axes.grid(color="0.9", lw=0.6)
    left.set_title("Time", fontsize=10)
    right.set_title("Passes", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    figure.suptitle(
        f"{data.case.about}, eps {show(data.case.eps)}.\n"
        f"Legend: at N = {data.sizes[-1]}, and how the passes grow from N = {data.sizes[0]} on.",
        fontsize=10,
    )
    return figure


def runtime_tables(data: Runtime) -> dict[str, Columns]:
    """One row for each attack and size."""
    rows = [
        (name, size, data.seconds[name][t], data.forwards[name][t], data.backwards[name][t])
        for name in data.seconds
        for t, size in enumerate(data.sizes)
    ]
    head = ("attack", "samples", "seconds", "forwards", "backwards")
    about = (
        f"{data.case.about}, eps {data.case.eps!r}; seconds on {torch.get_num_threads()} CPU "
        "threads"
    )
    return {"runtime": (about, dict(zip(head, (list(column) for column in zip(*rows)))))}


@dataclass(frozen=True, eq=False)
class Curve:
    """Robust accuracy against eps for every order.

    eps `(T,)`; lines `{(method, order): (T,)}`: from one search of WDA++ and one of ours; dots:
    what attacks that must be run again for each budget reach, `{(attack, order): (B,)}` at budgets
    `(B,)`.
    """

    case: Case
    clean: float
    eps: Tensor
    lines: Curves
    budgets: Tensor
    dots: Curves


def curve(case: Case, *, points: int = 121, budgets: int = 6) -> Curve:
    """The paper's figure of accuracy against eps, for every order from one run, with WDA and
    W-PGD run again at each budget.
    """
    flips = case.searches()
    known = flips["nearest"].distances
    known = known[torch.isfinite(known)]
    end = 1.05 * float(known.quantile(0.98)) if len(known) and known.max() > 0 else 2 * case.eps
    eps = torch.linspace(0, end, points, dtype=torch.float64)
    places = torch.linspace(0, end, budgets + 2, dtype=torch.float64)[1:-1]
    asked = [("wda", order) for order in ORDERS] + [
        ("w-pgd", order) for order in ORDERS[1:] if case.norm != 1
    ]
    return Curve(
        case=case,
        clean=flips["nearest"].clean_accuracy(),
        eps=eps,
        lines={
            (name, order): _accuracies(found, order, eps)
            for name, found in flips.items()
            for order in ORDERS
        },
        budgets=places,
        dots={(name, order): _rerun(case, name, order, places) for name, order in asked},
    )


def _accuracies(flips: Flips, order: float, eps: Tensor) -> Tensor:
    line = risk_curve(flips, order=order)
    return torch.tensor([line(float(e))[1] for e in eps], dtype=torch.float64)


def _rerun(case: Case, attack: str, order: float, budgets: Tensor) -> Tensor:
    return torch.tensor(
        [case.run(attack, order, float(e)).accuracy for e in budgets], dtype=torch.float64
    )


def draw_curve(data: Curve) -> Figure:
    """One panel for each order; lines from one search, dots from one run each."""
    figure = _figure(13, 4.8)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, order in zip(panels, ORDERS):
        for name in ("nearest", "wda++"):
            axes.plot(
                data.eps,
                100 * data.lines[name, order],
                color=INK[name],
                ls=DASHES[name],
                lw=2,
                label=f"{TITLES[name]}, one search",
            )
        for name, marker in (("wda", "s"), ("w-pgd", "^")):
            if (name, order) in data.dots:
                kind = f"{TITLES[name]}, a run for each eps" + (
                    " (kappa 2; 1 at order inf)" if name == "wda" else ""
                )
                axes.plot(
                    data.budgets,
                    100 * data.dots[name, order],
                    marker,
                    color=INK[name],
                    ms=6,
                    label=kind,
                )
        axes.axvline(data.case.eps, color="0.5", lw=0.9, ls=(0, (2, 2)), zorder=0)
        axes.set(xlabel="budget eps", xlim=(0, float(data.eps[-1])), ylim=(0, 103))
        axes.set_title(f"Omega_{order:g}", fontsize=10)
    panels[0].set_ylabel("accuracy %")
    panels[0].annotate(
        f"eps = {show(data.case.eps)}",
        (data.case.eps, 96),
        (4, 0),
        textcoords="offset points",
        fontsize=9,
        color="0.35",
    )
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(f"{data.case.about}; lower = stronger attack.", fontsize=10)
    return figure


def curve_tables(data: Curve) -> dict[str, Columns]:
    """The lines and the dots, as columns."""
    about = f"{data.case.about}, clean accuracy {data.clean!r}"
    lines = {f"{name}_{order:g}": values.tolist() for (name, order), values in data.lines.items()}
    dots = {f"{name}_{order:g}": values.tolist() for (name, order), values in data.dots.items()}
    return {
        "curve": (about, {"eps": data.eps.tolist(), **lines}),
        "curve-runs": (about, {"eps": data.budgets.tolist(), **dots}),
    }


@dataclass(frozen=True, eq=False)
class Sweep:
    """Accuracies against one parameter of WDA: values `(T,)`, lines `{name: (T,)}`; levels:
    what does not depend on it.
    """

    case: Case
    clean: float
    values: Tensor
    lines: dict[str, Tensor]
    levels: dict[str, float]


def kappa(case: Case, kappas: Sequence[float] = KAPPAS) -> Sweep:
    """WDA over Omega_1 and Omega_2 for many kappa, beside WDA++, which chooses a kappa for each
    sample.
    """
    found = case.searches()
    runs = {order: [case.run("wda", order, kappa=k) for k in kappas] for order in ORDERS[:2]}
    return Sweep(
        case=case,
        clean=found["nearest"].clean_accuracy(),
        values=torch.tensor(kappas, dtype=torch.float64),
        lines={
            f"wda_{order:g}": torch.tensor([r.accuracy for r in row], dtype=torch.float64)
            for order, row in runs.items()
        },
        levels={
            f"{name}_{order:g}": allocate(flips, case.eps, order).accuracy
            for name, flips in found.items()
            for order in ORDERS[:2]
        },
    )


def steps(case: Case, shares: Sequence[float] = SHARES) -> Sweep:
    """WDA (kappa 1, order inf) and WDA++ (orders 1 and 2) for many step sizes, after 20 steps and
    after the first few.

    values: the step sizes alpha; levels: `nearest`, which has none.
    """
    sizes = [share * case.eps for share in shares]
    lines: dict[str, list[float]] = {}
    for count, alpha in itertools.product((EARLY, 20), sizes):
        found = wda_pp(
            case.model, case.x, case.y, case.threat(1.0), step=alpha, steps=count, seed=case.seed
        )
        point = wda(
            case.model,
            case.x,
            case.y,
            case.threat(math.inf),
            step=alpha,
            steps=count,
            probe=min(10, count),
            seed=case.seed,
        )
        each = {
            "wda++_1": found.accuracy,
            "wda++_2": allocate(found.flips, case.eps, 2.0).accuracy,
            "wda_inf": point.accuracy,
        }
        for name, value in each.items():
            lines.setdefault(f"{name}_{count}", []).append(value)
    ours = case.searches()["nearest"]
    return Sweep(
        case=case,
        clean=ours.clean_accuracy(),
        values=torch.tensor(sizes, dtype=torch.float64),
        lines={name: torch.tensor(values, dtype=torch.float64) for name, values in lines.items()},
        levels={f"nearest_{order:g}": allocate(ours, case.eps, order).accuracy for order in ORDERS},
    )


def draw_kappa(sweeps: Sequence[Sweep]) -> Figure:
    """A panel for each norm: WDA's lines, and what WDA++ and ours reach as levels."""
    figure = _figure(5.6 * len(sweeps) + 0.8, 5.2 if len(sweeps) > 1 else 6)
    panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
    for axes, data in zip(panels, sweeps):
        for order in ORDERS[:2]:
            line = 100 * data.lines[f"wda_{order:g}"]
            axes.plot(
                data.values,
                line,
                "o",
                ls=ORDER_DASH[order],
                color=INK["wda"],
                lw=1.8,
                ms=4,
                label=f"WDA, Omega_{order:g}",
            )
            low = int(line.argmin())
            axes.plot(data.values[low], line[low], "o", mfc="none", mec=INK["wda"], mew=1.5, ms=11)
            place = float(data.values[low]), float(line[low])
            off = (8, -13) if order == 1 else (4, 9)
            axes.annotate(
                f"{place[1]:.1f} at kappa {place[0]:g}",
                place,
                off,
                textcoords="offset points",
                fontsize=8.5,
            )
            for name in ("wda++", "nearest"):
                axes.axhline(
                    100 * data.levels[f"{name}_{order:g}"],
                    color=INK[name],
                    ls=ORDER_DASH[order],
                    lw=1.4,
                    label=f"{TITLES[name]}, Omega_{order:g}",
                )
        axes.axhline(100 * data.clean, color="0.6", lw=1, zorder=0, label="clean")
        floor = 100 * data.clean * (1 - 1 / data.values)
        axes.plot(
            data.values,
            floor,
            color="0.6",
            lw=1,
            ls=":",
            zorder=0,
            label="(1 - 1/kappa) clean: no WDA is lower",
        )
        axes.set(xlabel="kappa: the share 1/kappa of every sample moves", ylim=(0, 103))
        axes.set_title(f"l{data.case.norm:g}, eps {show(data.case.eps)}", fontsize=10)
    panels[0].set_ylabel("accuracy %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4 if len(sweeps) > 1 else 2,
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(
        "One kappa for all samples (WDA) against one for each (WDA++, nearest).\n"
        f"{sweeps[0].case.name}, {len(sweeps[0].case.y)} samples",
        fontsize=10,
    )
    return figure


def draw_steps(sweeps: Sequence[Sweep]) -> Figure:
    """A panel for each norm: accuracy against the step size in units of eps; the paper's choice
    marked.
    """
    figure = _figure(5.6 * len(sweeps) + 0.8, 5.4 if len(sweeps) > 1 else 6.4)
    panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
    for axes, data in zip(panels, sweeps):
        share = data.values / data.case.eps
        for name, order in (("wda++", 1.0), ("wda++", 2.0), ("wda", math.inf)):
            what = f"{TITLES[name]}{', kappa 1' if name == 'wda' else ''}, Omega_{order:g}"
            for count, width in ((20, 2.0), (EARLY, 0.9)):
                line = 100 * data.lines[f"{name}_{order:g}_{count}"]
                label = f"{what}, {count} steps"
                axes.plot(
                    share,
                    line,
                    "o",
                    ls=ORDER_DASH[order],
                    color=INK[name],
                    lw=width,
                    ms=2 * width,
                    label=label,
                )
        for order in ORDERS:
            axes.axhline(
                100 * data.levels[f"nearest_{order:g}"],
                color=INK["nearest"],
                ls=ORDER_DASH[order],
                lw=1.2,
                label=f"nearest, Omega_{order:g}",
            )
        usual = default_step(data.case.norm, data.case.eps) / data.case.eps
        axes.axvline(usual, color="0.5", lw=0.9, ls=(0, (2, 2)), zorder=0)
        axes.annotate(
            f"default {usual:.2g} eps",
            (usual, 1),
            (4, 2),
            textcoords="offset points",
            fontsize=8.5,
            color="0.35",
        )
        axes.set(xscale="log", xlabel="step size alpha / eps", ylim=(0, 103))
        axes.set_xticks(
            share.tolist(), [f"{s:g}" if s >= 1 else f"1/{1 / s:g}" for s in share.tolist()]
        )
        axes.minorticks_off()
        axes.set_title(f"l{data.case.norm:g}, eps {show(data.case.eps)}", fontsize=10)
    panels[0].set_ylabel("accuracy %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=3 if len(sweeps) > 1 else 2,
        fontsize=9,
        frameon=False,
    )
    figure.suptitle(
        f"Sensitivity to the step size. {sweeps[0].case.name}, {len(sweeps[0].case.y)} samples",
        fontsize=10,
    )
    return figure


def sweep_tables(name: str, column: str, sweeps: Sequence[Sweep]) -> dict[str, Columns]:
    """One file for each norm: the parameter and the lines as columns, the levels in the head."""
    return {
        f"{name}-l{data.case.norm:g}": (
            f"{data.case.about}, eps {data.case.eps!r}, clean accuracy {data.clean!r}; "
            + ", ".join(f"{level} {value!r}" for level, value in data.levels.items()),
            {
                column: data.values.tolist(),
                **{line: values.tolist() for line, values in data.lines.items()},
            },
        )
        for data in sweeps
    }


# --------------------------------------------------------------------------------------------------
# table


def write_pages(table: Table, folder: str | Path) -> list[Path]:
    """The table as pages: `index.html`, `comparison.html` with all curves beside it, and
    `report.html` in each run's folder.
    """
    from wassail.report.compare import write_comparison
    from wassail.report.page import save, write_report

    runs = {
        line.folder: Evaluation.load(line.folder) for line in table.done if line.folder is not None
    }
    pages = [write_report(run, place / "report.html") for place, run in runs.items()]
    if runs:
        pages.append(write_comparison(list(runs.values()), Path(folder) / "comparison.html"))
    return [save(index(table), Path(folder) / "index.html"), *pages]


def index(table: Table) -> str:
    """The page that opens the others: the paper's table by order, its claims counted, and what
    could not be run.
    """
    from wassail.evaluation.table import CLEAN, COLUMNS
    from wassail.report import page

    parts = []
    for order in ORDERS:
        columns = [CLEAN] + [column for column in COLUMNS if column.order == order]
        what = f"Robust accuracy over Omega_{order:g}, in %; lower is the stronger attack"
        heads = [
            page.tag("th", "Model", scope="col", class_="text"),
            *(column.title for column in columns),
        ]
        rows = [
            page.tag(
                "tr", _model_cell(line), [_figure_cell(line, column.key) for column in columns]
            )
            for line in table.done
        ]
        parts.append(
            page.section(
                f"omega-{order:g}", f"Omega_{order:g}", page.table(what, heads, rows, what)
            )
        )
    said = page.tag("ul", [page.tag("li", text) for text in table.verdicts()])
    parts.append(page.section("claims", "What is claimed of it", said))
    problems = [
        page.tag("li", page.name(line), ": ", line.problem)
        for line in table.rows
        if line.problem is not None
    ]
    if problems:
        parts.append(page.section("problems", "Not run", page.tag("ul", problems)))
    contents = [(f"omega-{order:g}", f"Omega_{order:g}") for order in ORDERS] + [
        ("claims", "Claims")
    ]
    lead = (
        "Every column of the paper's Table 1, and ours: nearest, and the nearest flips of all "
        "attacks pooled. "
    )
    more = page.tag("a", "All curves on one page", href="comparison.html") if table.done else None
    head = [
        page.tag("h1", "The paper's table, made again"),
        page.tag("p", lead, more, class_="lead"),
    ]
    shown = contents + ([("problems", "Not run")] if problems else [])
    return page.document("The paper's table · wassail", head, shown, *parts, wide=True)


def _model_cell(line: Line) -> Html:
    from wassail.report import page

    model = page.name(line.model)
    link = (
        model
        if line.folder is None
        else page.tag("a", model, href=f"{line.folder.name}/report.html")
    )
    about = f"l{line.norm:g} {show(line.eps)}, {line.samples} of {line.data}" + (
        "" if line.finished else ", unfinished"
    )
    return page.tag("th", link, page.tag("small", about), scope="row")


def _figure_cell(line: Line, key: str) -> Html:
    from wassail.report import page

    cell = line.figures.get(key)
    paper = line.published.get(key)
    beside = None if paper is None else page.tag("small", f"published {paper:.2f}")
    if cell is None:
        return page.number_cell(("–", beside), None)
    low, high = (100 * side for side in cell.interval)
    return page.number_cell(
        (f"{100 * cell.accuracy:.2f}", page.tag("small", f"{low:.1f} to {high:.1f}"), beside),
        cell.accuracy,
    )
