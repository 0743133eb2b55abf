"""Figures: accuracy against kappa and against steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail.attacks.walk import default_step
from wassail.paper.inclusion import SHARES
from wassail.paper.runtime import EARLY, ORDER_DASH, ORDERS, TITLES, Case
from wassail.paper.tables import Columns
from wassail.plots import INK, figure_of, legend_below, mark_budget, note
from wassail.threat import show
from wassail.transport.distribution import allocate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KAPPAS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


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
        found = case.run("wda++", 1.0, step=alpha, steps=count)
        point = case.run("wda", math.inf, step=alpha, steps=count, probe=min(10, count))
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
    figure, panels = _panels(sweeps, 5.2, 6)
    for axes, data in zip(panels, sweeps):
        for order in ORDERS[:2]:
            ink, dash = INK["wda"], ORDER_DASH[order]
            line = 100 * data.lines[f"wda_{order:g}"]
            label = f"WDA, Omega_{order:g}"
            axes.plot(data.values, line, "o", ls=dash, color=ink, lw=1.8, ms=4, label=label)
            low = int(line.argmin())
            place = float(data.values[low]), float(line[low])
            axes.plot(*place, "o", mfc="none", mec=ink, mew=1.5, ms=11)
            note(
                axes,
                f"{place[1]:.1f} at kappa {place[0]:g}",
                place,
                (8, -13) if order == 1 else (4, 9),
            )
            for name in ("wda++", "nearest"):
                level = 100 * data.levels[f"{name}_{order:g}"]
                label = f"{TITLES[name]}, Omega_{order:g}"
                axes.axhline(level, color=INK[name], ls=dash, lw=1.4, label=label)
        axes.axhline(100 * data.clean, color="0.6", lw=1, zorder=0, label="clean")
        floor = 100 * data.clean * (1 - 1 / data.values)
        label = "(1 - 1/kappa) clean: no WDA is lower"
        axes.plot(data.values, floor, color="0.6", lw=1, ls=":", zorder=0, label=label)
        axes.set(xlabel="kappa: the share 1/kappa of every sample moves", ylim=(0, 103))
    legend_below(figure, panels[:1], 4 if len(sweeps) > 1 else 2)
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
    figure, panels = _panels(sweeps, 5.4, 6.4)
    for axes, data in zip(panels, sweeps):
        share = data.values / data.case.eps
        for name, order in (("wda++", 1.0), ("wda++", 2.0), ("wda", math.inf)):
            ink, dash = INK[name], ORDER_DASH[order]
            what = f"{TITLES[name]}{', kappa 1' if name == 'wda' else ''}, Omega_{order:g}"
            for count, lw in ((20, 2.0), (EARLY, 0.9)):
                line = 100 * data.lines[f"{name}_{order:g}_{count}"]
                label = f"{what}, {count} steps"
                axes.plot(share, line, "o", ls=dash, color=ink, lw=lw, ms=2 * lw, label=label)
        for order in ORDERS:
            level = 100 * data.levels[f"nearest_{order:g}"]
            label = f"nearest, Omega_{order:g}"
            axes.axhline(level, color=INK["nearest"], ls=ORDER_DASH[order], lw=1.2, label=label)
        usual = default_step(data.case.norm, data.case.eps) / data.case.eps
        mark_budget(axes, usual)
        note(axes, f"default {usual:.2g} eps", (usual, 1), (4, 2))
        axes.set(xscale="log", xlabel="step size alpha / eps", ylim=(0, 103))
        places = share.tolist()
        axes.set_xticks(places, [f"{s:g}" if s >= 1 else f"1/{1 / s:g}" for s in places])
        axes.minorticks_off()
    legend_below(figure, panels[:1], 3 if len(sweeps) > 1 else 2)
    about = f"{sweeps[0].case.name}, {len(sweeps[0].case.y)} samples"
    figure.suptitle(f"Sensitivity to the step size. {about}", fontsize=10)
    return figure


def _panels(sweeps: Sequence[Sweep], height: float, alone: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a panel for each norm, and the panels; alone: the height of a single one."""
    figure = figure_of(5.6 * len(sweeps) + 0.8, height if len(sweeps) > 1 else alone)
    panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
    for axes, data in zip(panels, sweeps):
        axes.set_title(f"l{data.case.norm:g}, eps {show(data.case.eps)}", fontsize=10)
    panels[0].set_ylabel("accuracy %")
    return figure, panels


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
