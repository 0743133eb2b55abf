"""Figures by matplotlib: colours, dashes, widths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wassail.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by everyone; one quantity has one colour in all figures.
INK = {
    "infinity": "#0072B2",
    "anchor": "#009E73",
    "margin": "#E69F00",
    "paper": "#D55E00",
    "pgd": "#CC79A7",
    "exact": "black",
    "wda": "#D55E00",
    "wda++": "#E69F00",
    "nearest": "#0072B2",
    "w-pgd": "#009E73",
    "deepfool": "#56B4E9",
    "apgd-ce": "#56B4E9",
    "a3": "#7F7F7F",
    "autoattack": "black",
}

DASHES: dict[str, Any] = {
    "infinity": "--",
    "anchor": "-.",
    "margin": (0, (5, 1)),
    "paper": (0, (3, 1, 1, 1, 1, 1)),
    "pgd": ":",
    "exact": "-",
    "wda": "-",
    "wda++": (0, (5, 1)),
    "nearest": "-",
    "w-pgd": "-.",
    "apgd-ce": "--",
    "a3": (0, (3, 1, 1, 1, 1, 1)),
    "autoattack": "-",
}

# The exact line lies under the others, which may coincide with it.
WIDTH = {**dict.fromkeys(INK, 1.6), "exact": 3.2}


def look(name: str) -> dict[str, Any]:
    """Colour, dashes and width of a quantity; the exact one lies under the others."""
    order = 1 if name == "exact" else 2
    return {"color": INK[name], "ls": DASHES[name], "lw": WIDTH[name], "zorder": order}


def legend_below(
    figure: Figure, panels: Sequence[Axes], columns: int, place: str = "center"
) -> None:
    """One legend for some panels, below all of them."""
    handles = [handle for axes in panels for handle in axes.get_legend_handles_labels()[0]]
    labels = [str(handle.get_label()) for handle in handles]
    where: Any = f"outside lower {place}"
    figure.legend(handles, labels, loc=where, ncols=columns, fontsize=9, frameon=False)


def note(axes: Axes, text: str, place: tuple[float, float], off: tuple[float, float]) -> None:
    """A small text beside a place, off by so many points."""
    axes.annotate(text, place, off, textcoords="offset points", fontsize=8.5, color="0.35")


def mark_budget(axes: Axes, eps: float) -> None:
    """A dotted line upward at a budget."""
    axes.axvline(eps, color="0.5", lw=0.9, ls=(0, (2, 2)), zorder=0)


def square_around(points: Tensor, room: float, count: int = 400) -> tuple[Tensor, Tensor, Tensor]:
    """A square grid around points of the plane: its places across, upward, and all of them.

    points: `(n, 2)`; room: half of its side, in widths of the points; count: places on a side.
    """
    middle = (points.amax(0) + points.amin(0)) / 2
    half = room * float((points.amax(0) - points.amin(0)).max())
    side = torch.linspace(-half, half, count, dtype=torch.float64)
    across, up = middle[0] + side, middle[1] + side
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1).flatten(0, 1)
    return across, up, grid


@contextmanager
def own_style() -> Iterator[None]:
    """Matplotlib's own settings while figures are made and saved.

    Matplotlib obeys a `matplotlibrc` in the current folder, which may come from a stranger and can
    have every text set by LaTeX. Nothing is done where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        yield
        return
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def figure_of(width: float, height: float) -> Figure:
    """An empty figure, drawn by Agg when saved: no window, no state shared with the caller's
    own figures.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('figures need matplotlib: pip install "wassail[plot]".') from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
