"""Figure: one step of WDA++ in a plane."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu
from wassail.certificates.graph.maps import Matrix
from wassail.geometry import maximiser, vector_norm
from wassail.losses import ce_ascent, predict
from wassail.paper.inclusion import REGIONS
from wassail.paper.tables import Columns
from wassail.plots import INK, figure_of, legend_below, square_around
from wassail.threat import Number, dual, parse_norm, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    # Cosines between the directions to two rivals, and zeros.
    pairs = (ways @ ways.mT).triu(1).flatten(1)
    score = around + (1 - pairs.amax(1)) / 2
    unfit = (near < 0.4) | (near > 0.8) | (grid.abs().amax(1) > 1.2) | (size.amin(1) < 0.1)
    score = score.masked_fill(unfit, -1.0)
    best = int(score.argmax())
    return float(score[best]), network, grid[best]


def _graph(network: Piecewise) -> Graph:
    """The same network with one hidden layer in the form that distances are computed of."""
    hidden = Node((0,), (network.neurons,), "hidden", Affine(Matrix(network.A), network.c))
    relu = Node((1,), (network.neurons,), "relu", Relu(network.slope))
    head = Node((2,), (network.outputs,), "head", Affine(Matrix(network.D), network.e))
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
    figure = figure_of(11.6, 5.8)
    left, right = figure.subplots(1, 2)
    _draw_first(left, data)
    _draw_walks(right, data)
    legend_below(figure, [right, left], 2, "left")
    figure.suptitle(
        f"{data.about}; ground norm l{data.norm:g}. Shades: classes. Thin lines: walls of the "
        "cells.",
        fontsize=10,
    )
    return figure


def _draw_first(axes: Axes, data: Step) -> None:
    """The candidates with their gaps, and the first steps of the others."""
    far = 1.5 * data.distance
    ends = torch.stack([data.x - far, data.x + far, data.pgd, data.deepfool])
    _plane(axes, data, torch.cat([ends, data.candidates]), 0.52)
    each = zip(data.rivals.tolist(), data.candidates, data.gaps.tolist())
    for k, (j, phi, gap) in enumerate(each):
        taken = k == data.chosen
        _arrow(axes, data.x, phi, INK["wda"], 4.5 if taken else 1.3, solid=taken)
        across, up = (float(v) for v in phi - data.x)
        # beside a flat arrow, not on top of it
        right_of = across > 0
        above = (up > 0) != (abs(up) < abs(across) / 2)
        axes.annotate(
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
    _arrow(axes, data.x, data.pgd, INK["pgd"], 1.8)
    _arrow(axes, data.x, data.deepfool, INK["deepfool"], 1.8)
    axes.plot([], [], color=INK["wda"], lw=1.1, ls=(0, (3, 2)), label="WDA's other candidates")
    title = f"One step from a sample of class {data.y}, alpha = {show(data.alpha)}"
    axes.set_title(title, fontsize=10)


def _draw_walks(axes: Axes, data: Step) -> None:
    """Each method up to its first flip, and the nearest flip."""
    names = {
        "wda": "WDA: the candidate with the largest gap",
        "pgd": "PGD: gradient of cross entropy",
        "deepfool": "DeepFool: nearest linearised boundary",
    }
    _plane(axes, data, torch.cat([*data.walks.values(), data.flip[None]]), 0.62)
    for name, path in data.walks.items():
        far = float(vector_norm(path[-1:] - data.x, data.norm))
        flips = int(data.network.logits(path[-1:]).argmax()) != data.y
        told = f"{len(path) - 1} steps, " + (f"flip at {far:.3f}" if flips else "no flip")
        label = f"{names[name]}; {told}"
        axes.plot(*path.T, "o-", color=INK[name], lw=1.8, ms=3.5, label=label, zorder=4)
    label = f"nearest flip, exact: at {data.distance:.3f}"
    axes.plot(*data.flip, "*", color="black", ms=13, label=label, zorder=6)
    axes.set_title("Walks to the first flip, before any line search", fontsize=10)


def _arrow(
    axes: Axes, start: Tensor, end: Tensor, ink: str, width: float, solid: bool = True
) -> None:
    dash = "-" if solid else (0, (3, 2))
    style = {"arrowstyle": "-|>", "color": ink, "lw": width, "ls": dash, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", _xy(end), _xy(start), zorder=5, arrowprops=style)


def _xy(point: Tensor) -> tuple[float, float]:
    return float(point[0]), float(point[1])


def _plane(axes: Axes, data: Step, seen: Tensor, room: float) -> None:
    """The classes as shades, their boundaries, the cells' walls and the sample, around the
    points to be seen.
    """
    across, up, grid = square_around(seen, room)
    shape = len(up), len(across)
    z = data.network.logits(grid)
    classes = z.argmax(1).reshape(shape)
    kinds = range(data.network.outputs)
    edges = [k - 0.5 for k in range(len(REGIONS) + 1)]
    axes.contourf(across, up, classes.double(), levels=edges, colors=REGIONS, zorder=0)
    walls: dict[str, Any] = {"levels": [0], "zorder": 1}
    for k in kinds:
        lead = (z[:, k] - z[:, [j for j in kinds if j != k]].amax(1)).reshape(shape)
        axes.contour(across, up, lead, colors="black", linewidths=1.2, **walls)
    for v in data.network.preactivations(grid).T:
        axes.contour(across, up, v.reshape(shape), colors="0.72", linewidths=0.6, **walls)
    axes.plot(*data.x, "o", mfc="white", mec="black", mew=1.6, ms=8, zorder=6)
    half = float(across[-1] - across[0]) / 2
    near = torch.cdist(grid, torch.cat([seen, data.x[None]])).amin(1) < 0.3 * half
    for k in kinds:
        spot = _widest(((classes == k) & ~near.reshape(shape)).numpy())
        if spot is not None:
            place = float(across[spot[1]]), float(up[spot[0]])
            axes.annotate(f"class {k}", place, fontsize=9, color="0.3", ha="center", zorder=2)
    axes.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    axes.set(xlim=(float(across[0]), float(across[-1])), ylim=(float(up[0]), float(up[-1])))


def _widest(region: Any) -> tuple[int, int] | None:
    """The point of a bool image with the most room around it, or None where there is too little
    for a word.
    """
    from scipy.ndimage import distance_transform_edt

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
