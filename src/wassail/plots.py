"""Figures by matplotlib: colours, dashes, widths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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


WIDTH = {
    **dict.fromkeys(INK, 1.6),
    "exact": 3.2,
}  # the exact line lies under the others, which may coincide with it


def draw_level(axes: Axes, name: str, height: float, label: str) -> None:
    """A horizontal line in the style of its name."""
    axes.axhline(
        height,
        color=INK[name],
        ls=DASHES[name],
        lw=WIDTH[name],
        zorder=1 if name == "exact" else 2,
        label=label,
    )


def draw_line(axes: Axes, name: str, eps: Tensor, losses: Tensor) -> None:
    """A curve in the style of its name."""
    axes.plot(
        eps,
        losses,
        color=INK[name],
        ls=DASHES[name],
        lw=WIDTH[name],
        zorder=1 if name == "exact" else 2,
    )


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
