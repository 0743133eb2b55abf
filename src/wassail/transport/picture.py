"""The sandwich drawn: certified and attacked accuracy against eps, and between them what is not
known.

`certified(eps) <= accuracy over Omega_p(eps) <= attacked(eps)` for every eps and every order, from
one set of radii and one of flips (THEORY 2a).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.plots import figure_of
from wassail.threat import Number, floor_percent, parse_eps, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wassail.transport.curve import RiskCurve

# Okabe and Ito's colours, as in all figures.
INK = {"attacked": "#D55E00", "certified": "#0072B2"}


POINTS = 241  # of the grid a curve is drawn on, besides its bends


BENDS = 2000  # more bends than this are closer than a line is wide


def draw_sandwich(
    curves: Sequence[RiskCurve],
    title: str = "",
    *,
    eps: Number | None = None,
    mark: Number | None = None,
) -> Figure:
    """One panel for each curve, as a rule the orders 1, 2 and inf of the same flips and radii; one
    legend for all.

    eps: where the axes end (default: where nearly all known flips are paid for); mark: a budget to
    point out, with both accuracies there, as a rule the one the model was trained for.
    """
    if not curves:
        raise InputError(
            "there is no curve to draw: give at least one, for example [ws.risk_curve(flips, "
            "radii, order=1)]."
        )
    budget = None if mark is None else parse_eps(mark)
    end = max(_end(curve, budget) for curve in curves) if eps is None else parse_eps(eps)
    figure = figure_of(3.9 * len(curves) + 0.8, 4.4)
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, curve in zip(panels, curves):
        plot_curve(curve, axes, end, budget)
    for axes in panels[1:]:
        axes.set_ylabel("")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False
    )
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def draw_distances(
    distances: Tensor | None, radii: Tensor | None = None, norm: float = math.inf
) -> Figure:
    """How far the flips are, and how large the certified radii: two histograms on one axis.

    distances: of the nearest flips, `(N,)`; radii: certified radii, `(N,)`. What is 0 or infinite
    is not drawn: it is counted in the legend.
    """
    sides = {"attacked": ("nearest flip", distances), "certified": ("certified radius", radii)}
    given = {side: (name, values) for side, (name, values) in sides.items() if values is not None}
    drawn = {
        side: values[(values > 0) & torch.isfinite(values)] for side, (_, values) in given.items()
    }
    end = max((float(values.max()) for values in drawn.values() if len(values)), default=1.0)
    figure = figure_of(5.6, 3.0)
    axes = figure.subplots()
    for side, (name, values) in given.items():
        left_out = int((values == 0).sum()), int(torch.isinf(values).sum())
        label = f"{name} ({left_out[0]} at 0, {left_out[1]} infinite)"
        axes.hist(
            drawn[side].tolist(),
            bins=30,
            range=(0, 1.02 * end),
            color=INK[side],
            alpha=0.55,
            label=label,
        )
    axes.set(xlabel=f"l{norm:g} distance", ylabel="samples", xlim=(0, 1.02 * end))
    axes.locator_params(axis="x", nbins=6)
    axes.legend(fontsize=9, frameon=False)
    return figure


def plot_curve(
    curve: RiskCurve, axes: Axes | None = None, eps: float | None = None, mark: float | None = None
) -> Axes:
    """One panel: both sides of a curve over [0, eps], the band between them filled. Without
    axes on a new figure.
    """
    alone = axes is None
    axes = figure_of(5.6, 4.4).subplots() if axes is None else axes
    end = _end(curve, mark) if eps is None else eps
    where = _knots(curve, end)
    certified, attacked = (100 * torch.tensor(side) for side in zip(*(curve(e) for e in where)))
    if curve.radii is not None:
        axes.fill_between(where, 0, certified, color=INK["certified"], alpha=0.16, lw=0)
        axes.fill_between(
            where, certified, attacked, color="0.88", lw=0, label="not known: between the two"
        )
        axes.plot(
            where, certified, color=INK["certified"], lw=1.9, label="certified: proved, never below"
        )
    axes.plot(
        where,
        attacked,
        color=INK["attacked"],
        lw=1.9,
        label="attacked: some distribution is this bad",
    )
    if mark is not None:
        _point_out(axes, curve, mark, end)
    axes.set(xlabel="budget eps", ylabel="accuracy %", xlim=(0, end), ylim=(0, 103))
    axes.locator_params(axis="x", nbins=5)  # small budgets have long labels
    axes.set_title(_name(curve.order), fontsize=10)
    if alone:
        axes.legend(fontsize=9, frameon=False)
    return axes


def _point_out(axes: Axes, curve: RiskCurve, mark: float, end: float) -> None:
    """A line at a budget, and both accuracies there; the certified one is rounded down."""
    certified, attacked = curve(mark)
    axes.axvline(mark, color="0.35", lw=0.9, ls=(0, (2, 2)), label=f"eps = {show(mark)}", zorder=1)
    _label(
        axes,
        mark,
        attacked,
        f"{100 * attacked:.1f} %",
        "attacked",
        above=True,
        right=mark < 0.85 * end,
    )
    if curve.radii is not None:
        text = f"{floor_percent(certified, 1)} %"
        _label(
            axes,
            mark,
            certified,
            text,
            "certified",
            above=certified < 0.08,
            right=certified == 0 or mark < 0.15 * end,
        )


def _label(
    axes: Axes, eps: float, accuracy: float, text: str, side: str, *, above: bool, right: bool
) -> None:
    """A dot and its number: attacked to the upper right, certified to the lower left, where
    their falling curves are not.
    """
    axes.plot([eps], [100 * accuracy], "o", color=INK[side], ms=5, zorder=5)
    axes.annotate(
        text,
        (eps, 100 * accuracy),
        (5 if right else -5, 4 if above else -4),
        textcoords="offset points",
        fontsize=9,
        ha="left" if right else "right",
        va="bottom" if above else "top",
        color=INK[side],
        zorder=6,
    )


def _knots(curve: RiskCurve, end: float) -> list[float]:
    """Where a curve is evaluated: a grid, its bends, and for order inf right after each of
    them, where it has dropped.
    """
    places = [torch.linspace(0, end, POINTS, dtype=torch.float64)]
    for side in ("attacked", *(("certified",) if curve.radii is not None else ())):
        bends = curve.breakpoints(side)[0]
        bends = bends[bends <= end]
        if len(bends) > BENDS:
            continue
        places.append(bends)
        if curve.order == math.inf:
            near = torch.full_like(bends, -math.inf), torch.full_like(bends, math.inf)
            places += [torch.nextafter(bends, side).clamp(min=0) for side in near]
    found: list[float] = torch.unique(torch.cat(places)).tolist()
    return found


def _end(curve: RiskCurve, mark: float | None) -> float:
    """Past the distance of nearly every known flip, and past the budget pointed out."""
    known = curve.distances[torch.isfinite(curve.distances)]
    far = float(known.quantile(0.97)) if len(known) else 0.0
    return max(1.05 * far, 1.6 * (mark or 0.0)) or 1.0


def _name(order: float) -> str:
    if order == math.inf:
        return "Omega_inf: every sample moves by up to eps"
    kind = {1.0: "first", 2.0: "second"}.get(order)
    mean = (
        f"root of the {kind} moment"
        if order == 2
        else "mean distance moved"
        if order == 1
        else f"Wasserstein-{order:g}"
    )
    return f"Omega_{order:g}: {mean} up to eps"
