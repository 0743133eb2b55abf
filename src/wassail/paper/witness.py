"""Figure: the witness at infinity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.certificates.bound import Bound
from wassail.certificates.exact.infinity import infinity
from wassail.certificates.loss.worst_case import worst_case
from wassail.errors import InputError
from wassail.paper.instance import Instance, losses_at, spoken
from wassail.plots import DASHES, INK, figure_of, square_around
from wassail.threat import Number, Threat, parse_norm, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class Witness:
    """The distribution behind the lower bound: `(1 - eta) delta(x_i) + eta delta(x_i + alpha u)` in
    the place of one sample.

    slope: l, with its ray u `(2,)`; root: the sample i, whose label is the ray's; alpha `(T,)`: how
    far out; points `(T, 2)`; eta `(T,)`: the share of the sample that moves, `eps / (mu_i alpha)`,
    so that the transport cost is eps; expected `(T,)`: the expected loss, evaluated; worst: the
    exact worst case over Omega_1(eps); shown: which alpha is drawn in the plane.
    """

    case: Instance
    norm: float
    loss: str
    eps: float
    slope: Bound
    root: int
    alpha: Tensor
    points: Tensor
    eta: Tensor
    expected: Tensor
    empirical: float
    worst: Bound
    shown: int

    @property
    def limit(self) -> float:
        """What the expected loss tends to: `E + l eps`."""
        return self.empirical + self.slope.lower * self.eps


def witness(
    case: Instance,
    norm: Number = 2,
    loss: str = "cross_entropy",
    *,
    eps: float = 0.1,
    points: int = 61,
) -> Witness:
    """The paper's construction of its lower bound, from a whole sample moved (eta = 1) to a far
    point of hardly any mass.

    Of the samples with the ray's label the root is the one whose loss has grown most, far out.
    """
    r = parse_norm(norm)
    network = case.network
    value = losses_at(loss)[0]
    slope = infinity(network, r, case.labels)
    if slope.witness is None or slope.lower == 0:
        raise InputError(
            "this network has slope 0 at infinity, so no ray to draw: choose another seed."
        )
    u = slope.witness / torch.linalg.vector_norm(slope.witness, r)
    mu = 1 / len(case.y)
    clean = value(network.logits(case.x), case.y)
    alpha = eps / mu * torch.logspace(0, 4, points, dtype=torch.float64)
    rays = case.x[:, None] + alpha[:, None] * u  # (N, T, 2)
    gains = (
        value(network.logits(rays.flatten(0, 1)), case.y.repeat_interleave(points)).unflatten(
            0, (-1, points)
        )
        - clean[:, None]
    )
    root = int(torch.where(case.y == int(slope.info["label"]), gains[:, -1], -math.inf).argmax())
    eta = eps / (mu * alpha)
    return Witness(
        case=case,
        norm=r,
        loss=loss,
        eps=float(eps),
        slope=slope,
        root=root,
        alpha=alpha,
        points=rays[root],
        eta=eta,
        expected=clean.mean() + mu * eta * gains[root],
        empirical=float(clean.mean()),
        worst=worst_case(network, case.x, case.y, Threat(r, 1.0, eps, None), loss).bound,
        shown=int((eta - 0.25).abs().argmin()),
    )


def draw_witness(data: Witness) -> Figure:
    """Two panels: the plane with cells, samples and the steepest ray, and the expected loss
    against alpha.
    """
    figure = figure_of(11, 5.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_plane(left, data)
    ink = INK["infinity"]
    right.plot(data.alpha, data.expected, color=ink, lw=2.2, label="expected loss of the witness")
    drawn = data.alpha[data.shown], data.expected[data.shown]
    right.plot(*drawn, "*", color=ink, ms=14, label="the one drawn", zorder=4)
    limit = f"E + l eps = {data.limit:.4f}"
    right.axhline(data.limit, color=ink, ls=DASHES["infinity"], label=limit)
    worst = f"V(eps) = {data.worst.upper:.4f}, exact worst case"
    right.axhline(data.worst.upper, color=INK["exact"], label=worst)
    start = f"E = {data.empirical:.4f}, on the samples"
    right.axhline(data.empirical, color="0.55", lw=1, label=start)
    right.set(xscale="log", xlabel="alpha, distance of the far point from its sample")
    right.set(ylabel=f"expected loss ({spoken(data.loss)})")
    right.set_xlim(float(data.alpha[0]), float(data.alpha[-1]))
    share = f"{data.eps * len(data.case.y):.3g} / alpha"
    right.set_title(f"At alpha the share eta = {share} of the sample moves", fontsize=10)
    right.legend(fontsize=9, frameon=False, loc="center right")
    figure.suptitle(
        f"{data.case.about}; ground norm l{data.norm:g}.\n"
        f"Every witness is within eps = {show(data.eps)} of the samples; far out its loss tends "
        "to E + l eps.",
        fontsize=10,
    )
    return figure


def _draw_plane(axes: Axes, data: Witness) -> None:
    """The plane of the witness."""
    case = data.case
    far, start = data.points[data.shown], case.x[data.root]
    across, up, grid = square_around(torch.cat([case.x, far[None]]), 0.58)
    shape = len(up), len(across), -1
    logits = case.network.logits(grid).reshape(shape)
    gap = (logits[..., 1] - logits[..., 0]).numpy()
    shades = ("#FFFFFF", "#E4E4E4")
    axes.contourf(across, up, gap, levels=[-math.inf, 0, math.inf], colors=shades, zorder=0)
    axes.contour(across, up, gap, levels=[0], colors="black", linewidths=1.4, zorder=1)
    for v in case.network.preactivations(grid).reshape(shape).unbind(-1):
        axes.contour(across, up, v.numpy(), levels=[0], colors="0.6", linewidths=0.7, zorder=1)
    for label, marker, face in ((0, "o", "white"), (1, "^", "black")):
        style: dict[str, Any] = {"mfc": face, "mec": "black", "ms": 6, "zorder": 3}
        axes.plot(*case.x[case.y == label].T, marker, label=f"sample of class {label}", **style)
    share = float(data.eta[data.shown])
    ink = INK["infinity"]
    ray = torch.stack([start, far], 1)
    axes.plot(*ray, color=ink, lw=2.2, label="steepest ray u from its sample", zorder=2)
    ring: dict[str, Any] = {"mfc": "none", "mec": ink, "mew": 2, "ms": 12, "zorder": 4}
    axes.plot(*start, "o", label=f"{1 - share:.2g} of that sample stays", **ring)
    goes = f"{share:.2g} of it goes to the far point"
    axes.plot(*far, "*", color=ink, ms=14, label=goes, zorder=4)
    axes.plot([], [], color="black", lw=1.4, label="decision boundary (class 1 is grey)")
    axes.plot([], [], color="0.6", lw=0.7, label="walls of the cells")
    axes.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    axes.set_xlim(float(across[0]), float(across[-1]))
    axes.set_ylim(float(up[0]), float(up[-1]))
    axes.set_title("One sample splits: most of it stays, a share goes far", fontsize=10)
    axes.figure.legend(loc="outside lower left", ncols=3, fontsize=9, frameon=False)
