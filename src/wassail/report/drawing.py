"""Pictures of the pages and of exported figures, drawn once as marks.

A page shows a picture as SVG that its style colours, so that both themes fit. A file has the
colours inside: SVG without any library, PDF and PNG by matplotlib from the same marks. `page.js`
draws the curves that move.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from wassail.errors import InputError
from wassail.plots import figure_of, own_style
from wassail.report.html import LONG, data_block, percent, render, spell, visible
from wassail.threat import Groups, Threat, show
from wassail.transport.curve import RiskCurve

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

Point: TypeAlias = tuple[float, float]
USUAL = (1.0, 2.0, math.inf)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
LABEL_ROOM = 12  # pixels between the names of two landmarks
STRIP = 88  # pixels above the axes for the names of landmarks
LETTER, LINE_HEIGHT = 7.5, 15.0  # size of a letter beside a dot, in pixels, with some room
MEANING = {
    1.0: "Order 1: the mean distance over all samples is at most eps. Few samples may move far.",
    2.0: "Order 2: the root mean square distance over all samples is at most eps.",
    math.inf: "Order ∞: every sample may move by eps, the point-wise threat of AutoAttack and "
    "RobustBench.",
}
# Okabe and Ito's colours as in the light theme of page.css.
INK = {
    "certified": "#0072b2",
    "attacked": "#d55e00",
    "band": "#d9d6cf",
    "rule": "#ece8e1",
    "axis": "#585d66",
    "cursor": "#1c1e22",
    "strong": "#1c1e22",
    "landmark": "#1c1e22",
    "run-0": "#0072b2",
    "run-1": "#d55e00",
    "run-2": "#007a5a",
    "run-3": "#a84f80",
    "run-4": "#8a6200",
    "run-5": "#1c1e22",
}
SOFT = "#585d66"
DASHES = {"cursor": (3, 3), "dash-1": (8, 4), "dash-2": (2, 3), "dash-3": (10, 3, 2, 3)}
GRID = 180  # parts of the axis of a curve
MOST_GROUPS = 40  # that a page recomputes


@dataclass(frozen=True)
class Mark:
    """A line, path, rectangle, circle or text of a picture.

    Args:
        element: of SVG.
        kind: classes, which the style colours.
        at: attributes.
        text: of a text.
        title: what is shown where the pointer rests.
    """

    element: str
    kind: str
    at: Mapping[str, object]
    text: str = ""
    title: str = ""

    @property
    def look(self) -> dict[str, object]:
        """Colours and widths for a file, which has no style of a page."""
        words = self.kind.split()
        colour = next((INK[word] for word in words if word in INK), SOFT)
        if self.element == "text":
            weight = 700 if "strong" in words else 400
            size = 10 if "landmark" in words else 12
            return {"fill": colour, "font-size": size, "font-weight": weight}
        if "area" in words:
            return {"fill": colour, "fill-opacity": 0.75 if "band" in words else 0.17}
        if "landmark" in words and self.element == "path":
            return {"fill": colour}
        width = {"proved": 1.3, "line": 2.2}
        thick = next((width[word] for word in width if word in words), 1.0)
        found: dict[str, object] = {"fill": "none", "stroke": colour, "stroke-width": thick}
        dash = next((DASHES[word] for word in words if word in DASHES), None)
        return found if dash is None else found | {"stroke-dasharray": " ".join(map(str, dash))}


@dataclass(frozen=True)
class Picture:
    """Marks on a ground of a size in pixels.

    Args:
        width: in pixels.
        height: in pixels.
        label: what a screen reader says.
        marks: in the order in which they are drawn.
    """

    width: float
    height: float
    label: str
    marks: Sequence[Mark]

    def __html__(self) -> Markup:
        return render("picture.svg.j2", it=self, alone=False)

    def svg(self) -> str:
        """A file of its own, in the colours of the light theme."""
        return render("picture.svg.j2", it=self, alone=True)

    def paint(self, file: IO[bytes], kind: str) -> None:
        """Write the picture as "pdf" or "png", by matplotlib."""
        with own_style():
            made = figure_of(self.width / 72, self.height / 72)
            made.set_layout_engine("none")
            axes = made.add_axes((0, 0, 1, 1))
            axes.set(xlim=(0, self.width), ylim=(self.height, 0))
            axes.set_axis_off()
            for mark in self.marks:
                _paint(axes, mark)
            metadata = {"CreationDate": None} if kind == "pdf" else {}
            made.savefig(file, format=kind, dpi=200, metadata=metadata)


def _paint(axes: Any, mark: Mark) -> None:
    """One mark on matplotlib's axes, whose unit is a pixel of the picture."""
    look = mark.look
    at = mark.at
    place = {key: float(str(at[key])) for key in ("x", "y", "x1", "x2", "y1", "y2") if key in at}
    stroke: dict[str, Any] = {"color": look.get("stroke"), "lw": look.get("stroke-width")}
    dash = str(look.get("stroke-dasharray", ""))
    if dash:
        lengths = tuple(float(part) / float(stroke["lw"]) for part in dash.split())
        stroke["ls"] = (0, lengths)
    if mark.element == "text":
        anchor = {"end": "right", "middle": "center"}.get(str(at.get("text-anchor")), "left")
        axes.text(
            place["x"],
            place["y"],
            mark.text.replace("$", r"\$"),
            color=look["fill"],
            fontsize=look["font-size"],
            weight=look["font-weight"],
            ha=anchor,
            va="baseline",
            rotation=90 if "transform" in at else 0,
            rotation_mode="anchor",
        )
    elif mark.element == "line":
        axes.plot([place["x1"], place["x2"]], [place["y1"], place["y2"]], **stroke)
    else:
        corners = [part.split() for part in str(at["d"]).strip("MZ").split("L")]
        x, y = zip(*((float(a), float(b)) for a, b in corners))
        if look["fill"] == "none":
            axes.plot(x, y, **stroke)
        else:
            axes.fill(x, y, color=look["fill"], alpha=look.get("fill-opacity", 1.0), lw=0)


def _round(value: object) -> object:
    """A number with at most two digits after the point."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def line_mark(kind: str, x1: float, y1: float, x2: float, y2: float) -> Mark:
    """A straight line."""
    ends = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
    return Mark("line", kind, {key: _round(value) for key, value in ends.items()})


def label_mark(
    x: float, y: float, text: str, anchor: str, kind: str = "", turned: bool = False
) -> Mark:
    """A text; turned: it is read upwards."""
    at = {"x": _round(x), "y": _round(y), "text-anchor": anchor}
    if turned:
        at["transform"] = f"rotate(-90 {_round(x)} {_round(y)})"
    return Mark("text", kind, at, visible(text))


def rect_mark(kind: str, x: float, y: float, width: float, height: float) -> Mark:
    """A rectangle."""
    size = {"x": x, "y": y, "width": width, "height": height}
    return Mark("rect", kind, {key: _round(value) for key, value in size.items()})


def path_mark(kind: str, points: Iterable[Point], closed: bool = False, title: str = "") -> Mark:
    """Straight lines from point to point."""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + ("Z" if closed else "")
    return Mark("path", kind, {"d": d}, title=visible(title))


def dot_mark(kind: str, x: float, y: float, title: str) -> Mark:
    """A dot that says what it is."""
    return Mark("circle", kind, {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": 4}, title=visible(title))


@dataclass(frozen=True)
class Axes:
    """Accuracies from 0 to 100 % upward against something to the right.

    Args:
        end: where the axis to the right ends.
        width: of the picture, in pixels; and so on.
        height: of the picture.
        left: of the axes.
        right: of the axes.
        top: of the axes.
        bottom: of the axes.
    """

    end: float
    width: float = 480
    height: float = 300
    left: float = 44
    right: float = 464
    top: float = 12
    bottom: float = 256

    def at(self, value: float, share: float) -> Point:
        """The place of a value and an accuracy."""
        x = self.left + (self.right - self.left) * value / self.end
        return x, self.bottom - (self.bottom - self.top) * share

    def frame(self, marks: Sequence[tuple[float, str]], below: str) -> list[Mark]:
        """Rules for accuracies, and the axis below with marks and what it is."""
        parts = []
        for share in SHARES:
            y = self.at(0, share)[1]
            parts.append(line_mark("rule", self.left, y, self.right, y))
            parts.append(label_mark(self.left - 6, y + 4, f"{100 * share:g}", "end"))
        for place, (value, text) in enumerate(marks):
            x = self.at(value, 0)[0]
            parts.append(line_mark("axis", x, self.bottom, x, self.bottom + 5))
            minor = "minor" if place % 2 else ""  # not shown on a phone
            parts.append(label_mark(x, self.bottom + 18, text, "middle", minor))
        parts.append(line_mark("axis", self.left, self.bottom, self.right, self.bottom))
        middle = (self.left + self.right) / 2
        return [*parts, label_mark(middle, self.height - 6, below, "middle")]

    def labels(self, dots: Sequence[tuple[float, float, str]]) -> list[Mark]:
        """Names beside dots, none over another; one that finds no room is left to its title.

        dots: place to the right, place downward, name.
        """
        taken = [(x - 6, y - 6, x + 6, y + 6) for x, y, _ in dots]
        parts = []
        for x, y, text in sorted(dots, key=lambda dot: (dot[1], dot[0])):
            size = LETTER * len(text)
            for step in (0, 1, -1, 2, -2, 3, -3, 4, -4):
                for side in (1, -1) if x < (self.left + self.right) / 2 else (-1, 1):
                    start = x + 8 if side > 0 else x - 8 - size
                    low = y + LINE_HEIGHT * step - LINE_HEIGHT / 2
                    box = (start, low, start + size, low + LINE_HEIGHT)
                    inside = start > self.left and box[2] < self.width and low > 0
                    if inside and box[3] < self.bottom and not any(_meet(box, o) for o in taken):
                        break
                else:
                    continue
                taken.append(box)
                at = y + LINE_HEIGHT * step + 4
                parts.append(label_mark(x + 8 * side, at, text, "start" if side > 0 else "end"))
                break
        return parts


def _meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def axis_end(curves: Iterable[RiskCurve], mark: float) -> float:
    """Where the axis of eps ends: where nearly every known flip is paid for, and well past the
    budget that is pointed out.
    """
    ends = [1.6 * mark]
    for curve in curves:
        bends = curve.breakpoints()[0]
        ends.append(1.05 * float(bends[int(0.97 * (len(bends) - 1))]))
    return max(ends) or 1.0


def unit_of(threat: Threat, end: float) -> int | None:
    """Budgets of images are read in steps of 8 bits where they were given so, as long as they
    are small ones.
    """
    return _unit(threat.eps, end)


def _unit(eps: float, end: float) -> int | None:
    return 255 if show(eps).endswith("/255") and end <= 0.6 else None


def ticks(end: float, unit: int | None, most: int) -> list[tuple[float, str]]:
    """Places and texts of the ticks of an axis."""
    span = end * (unit or 1)
    if unit:
        step = next(
            (float(step) for step in (1, 2, 4, 8, 16, 32, 64) if span / step <= most), 128.0
        )
    else:
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(step * power for step in (1, 2, 5, 10) if span / (step * power) <= most)
    places = [place * step for place in range(int(span / step + 1e-9) + 1)]
    return [
        (value / (unit or 1), f"{value:g}/{unit}" if unit and value else f"{value:.6g}")
        for value in places
    ]


# The curves of runs.


def still(
    runs: Sequence[Evaluation], order: float, end: float, unit: int | None, overlay: bool
) -> Markup:
    """The curves without the script: one panel for an order, with its title.

    Args:
        runs: of one norm and domain.
        order: Wasserstein order.
        end: of the axis of eps.
        unit: 255 where budgets are read in steps of 8 bits, else None.
        overlay: every run has its own colour for both sides.
    """
    curves = [run.curve(order) for run in runs]
    landmarks = () if overlay else runs[0].landmarks
    share = runs[0].words.share
    height, marks = _curves(curves, end, unit, overlay, landmarks, share)
    head = f"Order {spell(order)}"
    drawn = Picture(360, height, f"{head}: {share} against eps", marks)
    return Markup("<div><h3>{}</h3>{}</div>").format(head, drawn)


def figure_of_runs(runs: Sequence[Evaluation]) -> Picture:
    """The curves of runs as a figure for a paper: see `figure`.

    runs: one, or several of one norm and box.
    """
    first = runs[0]
    if len({(run.threat.norm, run.threat.domain) for run in runs}) > 1:
        raise InputError(
            "the runs are for different norms or boxes, whose budgets cannot share an axis: draw "
            "those of one norm and box."
        )
    shown = [run for run in runs if len(run)]
    if not shown:
        raise InputError("the run has no samples: there is nothing to draw.")
    orders = sorted({order for run in shown for order in run.orders})
    return figure(
        [[run.curve(order) for run in shown] for order in orders],
        [run.name for run in shown],
        first.threat.eps,
        () if len(shown) > 1 else first.landmarks,
        first.words.share,
    )


def figure(
    panels: Sequence[Sequence[RiskCurve]],
    names: Sequence[str],
    eps: float,
    landmarks: Sequence[Any] = (),
    share: str = "accuracy",
) -> Picture:
    """Curves as a figure for a paper: a panel for each order, and the key of the lines.

    Args:
        panels: the curves of one order each: one, with both sides in their colours, or several,
            each with its own.
        names: of the curves of a panel.
        eps: a budget to point out.
        landmarks: known shifts.
        share: what is drawn, in words.
    """
    overlay = len(names) > 1
    ends = [axis_end(curves, eps) for curves in panels]
    unit = _unit(eps, max(ends))
    marks: list[Mark] = []
    bottom = 0.0
    for place, (curves, end) in enumerate(zip(panels, ends)):
        at = 360.0 * place
        bottom, drawn = _curves(curves, end, unit, overlay, landmarks, share, at, eps)
        order = "inf" if curves[0].order == math.inf else f"{curves[0].order:g}"
        marks += [label_mark(at + 194, 16, f"order {order}", "middle", "strong"), *drawn]
    keys = [("line attacked", "attacked: at most")]
    if overlay:
        keys = [(_tone(place), name[:50]) for place, name in enumerate(names)]
        keys.append(("line proved", "thin: certified"))
    elif panels[0][0].radii is not None:
        keys.append(("line certified", "certified: at least"))
    keys.append(("cursor", f"eps {show(eps)}"))
    across = len(panels)
    for place, (kind, text) in enumerate(keys):
        x, y = 40 + 360.0 * (place % across), bottom + 16 + 18 * (place // across)
        marks += [line_mark(kind, x, y - 4, x + 30, y - 4), label_mark(x + 38, y, text, "start")]
    height = bottom + 14 + 18 * math.ceil(len(keys) / across)
    return Picture(360.0 * across, height, f"{share} against eps", marks)


def _tone(place: int) -> str:
    return f"line run run-{place % 6} dash-{place // 6 % 4}"


def _curves(
    curves: Sequence[RiskCurve],
    end: float,
    unit: int | None,
    overlay: bool,
    landmarks: Sequence[Any],
    share: str,
    left: float = 0.0,
    eps: float | None = None,
) -> tuple[float, list[Mark]]:
    """The height and the marks of the curves of one order; in a figure `left` pixels to the right,
    with room for a title and an eps that is pointed out.
    """
    order = curves[0].order
    named = [mark for mark in landmarks if mark.eps.get(order, math.inf) <= end]
    top = 10 + (STRIP if named else 0) + (0 if eps is None else 22)
    axes = Axes(end, left + 360, top + 240, left + 40, left + 348, top, top + 202)
    parts = axes.frame(ticks(end, unit, 4), f"{share} in % against eps")
    for place, curve in enumerate(curves):
        below, above = (_trace(axes, curve, side) for side in ("certified", "attacked"))
        tone = _tone(place)
        if curve.radii is not None and not overlay:
            floor = [(axes.right, axes.bottom), (axes.left, axes.bottom)]
            parts.append(path_mark("area certified", [*below, *floor], closed=True))
            parts.append(path_mark("area band", [*above, *below[::-1]], closed=True))
        if curve.radii is not None:
            kind = tone.replace("line", "line proved") if overlay else "line certified"
            parts.append(path_mark(kind, below))
        parts.append(path_mark(tone if overlay else "line attacked", above))
    if eps is not None:
        x = axes.at(eps, 0)[0]
        parts.append(line_mark("cursor", x, axes.top, x, axes.bottom))
    return axes.height, parts + _landmark_marks(axes, order, named)


def _trace(axes: Axes, curve: RiskCurve, side: str) -> list[Point]:
    """The line of one side from eps 0 to the end of the axis, read off its bends: between two of
    them the accuracy is linear in `eps^p`, at order inf it is constant.
    """
    if side == "certified" and curve.radii is None:
        return []
    where = np.linspace(0, axes.end, GRID + 1)
    bends, heights = (part.numpy() for part in curve.breakpoints(side))
    if curve.order == math.inf:
        shares = heights[np.searchsorted(bends, where, "right") - 1]
    else:
        with np.errstate(over="ignore"):  # far beyond the axis
            costs = (bends / axes.end) ** curve.order
        shares = np.interp((where / axes.end) ** curve.order, costs, heights)
    return [axes.at(eps, share) for eps, share in zip(where.tolist(), shares.tolist())]


def _landmark_marks(axes: Axes, order: float, landmarks: Sequence[Any]) -> list[Mark]:
    """A mark for each known shift; its name stands above the axes, where no curve is."""
    inside = sorted(landmarks, key=lambda mark: (mark.eps[order], mark.name))
    most = int((axes.right - axes.left) / LABEL_ROOM)
    places = [axes.at(mark.eps[order], mark.accuracy) for mark in inside]
    names = spread([x for x, _ in places[:most]], axes.right, LABEL_ROOM)
    parts = []
    for mark, (x, y), label in zip(inside, places, [*names, *[None] * len(inside)]):
        text = f"{mark.name[:LONG]}: {percent(mark.accuracy)} at eps {show(mark.eps[order])}"
        corners = [(x, y - 4), (x + 4, y), (x, y + 4), (x - 4, y)]
        if label is not None:
            parts.append(line_mark("rule", label, axes.top - 4, x, y - 4))
            place = (label + 3, axes.top - 7)
            parts.append(label_mark(*place, mark.name[:16], "start", "landmark", turned=True))
        parts.append(path_mark("landmark", corners, closed=True, title=text))
    return parts


def spread(places: Sequence[float], end: float, room: float) -> list[float]:
    """Places in their order, moved so that any two have room between them and none is past the
    end.

    end: the last place there is; room: between two of them.
    """
    found: list[float] = []
    for x in places:
        found.append(max(x, found[-1] + room) if found else x)
    limit = end
    for k in reversed(range(len(found))):
        found[k] = min(found[k], limit)
        limit = found[k] - room
    return found


def orders_picture(run: Evaluation) -> Picture:
    """All three orders in one picture, both sides."""
    end = max(axis_end([run.curve(order)], run.threat.eps) for order in USUAL)
    axes = Axes(end, top=26)
    below = f"{run.words.share} in % against eps"
    parts = axes.frame(ticks(end, unit_of(run.threat, end), 6), below)
    for place, order in enumerate(USUAL):
        tone = f"run run-{place} dash-{place}"
        curve = run.curve(order)
        parts.append(path_mark(f"line {tone}", _trace(axes, curve, "attacked")))
        if run.radii is not None:
            parts.append(path_mark(f"line proved {tone}", _trace(axes, curve, "certified")))
    at = axes.at(run.threat.eps, 0)[0]
    parts.append(line_mark("axis", at, axes.top, at, axes.bottom))
    parts.append(label_mark(at, axes.top - 4, f"eps {show(run.threat.eps)}", "middle"))
    label = f"{run.words.share} against eps for orders 1, 2 and infinity"
    return Picture(axes.width, axes.height, label, parts)


# The curves that move: data for the script.


def plot(
    identifier: str,
    runs: Sequence[Evaluation],
    orders: Sequence[float],
    label: str,
    legend: object,
    reading: object,
    *,
    overlay: bool = False,
) -> Markup:
    """The curves of runs with one norm and domain: drawn here for every order, switchable with the
    script.

    legend, reading: the key of the lines, and where the script writes the figures at an eps;
    overlay: every run has its own colour for both sides, and no band is filled; otherwise there is
    one run, and each side has its colour.
    """
    threat = runs[0].threat
    ends = {order: axis_end([run.curve(order) for run in runs], threat.eps) for order in orders}
    unit = unit_of(threat, max(ends.values()))
    groups = None if overlay else _groups(runs[0])
    block = {
        "norm": f"{threat.norm:g}",
        "order": javascript(threat.order),
        "eps": threat.eps,
        "unit": unit,
        "overlay": overlay,
        "orders": [(javascript(order), end) for order, end in ends.items()],
        "runs": [packed(run.curve(threat.order), groups) for run in runs],
        "landmarks": [] if overlay else _landmarks(runs[0]),
    }
    return render(
        "plot.html.j2",
        id=identifier,
        order=threat.order,
        orders=[(order, javascript(order), _meaning(order)) for order in orders],
        label=label,
        legend=legend,
        reading=reading,
        stills=[still(runs, order, end, unit, overlay) for order, end in ends.items()],
        grouped=groups is not None,
        data=data_block(f"{identifier}-data", block),
    )


def javascript(order: float) -> str:
    """An order as JavaScript spells it."""
    return "Infinity" if order == math.inf else repr(order)


def _meaning(order: float) -> str:
    return MEANING.get(
        order, f"Order {order:g}: the Wasserstein-{order:g} distance to the data is at most eps."
    )


def _groups(run: Evaluation) -> Groups | None:
    """The groups of a run whose weights the page lets change."""
    groups: Groups | None = run.others.get("groups")
    few = groups is not None and len(groups.names) <= MOST_GROUPS
    return groups if few else None


def packed(curve: RiskCurve, groups: Groups | None = None) -> dict[str, Any]:
    """Both sides of a curve for the script: finite distances, sorted, and their masses unless
    all are 1/N; with groups, the group of each of them.
    """
    even = bool((curve.mu == curve.mu[:1]).all())
    places = None if groups is None else torch.tensor(groups.places, dtype=torch.float64)

    def side(distances: Tensor) -> dict[str, str | None]:
        keep = torch.isfinite(distances) & (curve.mu > 0)
        ordered, where = distances[keep].sort(stable=True)
        found = {"d": _floats(ordered), "w": None if even else _floats(curve.mu[keep][where])}
        return found if places is None else found | {"g": _floats(places[keep][where])}

    certified = None if curve.radii is None else side(curve.radii)
    found: dict[str, Any] = {
        "n": len(curve.mu),
        "total": 1.0 if even else float(curve.mu.sum()),
        "attacked": side(curve.distances),
        "certified": certified,
    }
    if groups is not None and places is not None:
        held = [curve.mu[places == place] for place in range(len(groups.names))]
        masses = [math.fsum(mass.tolist()) for mass in held]
        found["groups"] = {"low": groups.low, "high": groups.high, "mass": masses}
        found["groups"]["size"] = [len(mass) for mass in held]
    return found


def _landmarks(run: Evaluation) -> list[dict[str, Any]]:
    """The known shifts for the script: name, accuracy, eps by order, in the order of their eps."""
    return [
        {
            "name": mark.name[:LONG],
            "accuracy": mark.accuracy,
            "eps": {javascript(order): eps for order, eps in mark.eps.items()},
        }
        for mark in run.landmarks
    ]


def _floats(values: Tensor) -> str:
    return base64.b64encode(values.numpy().astype("<f8").tobytes()).decode()
