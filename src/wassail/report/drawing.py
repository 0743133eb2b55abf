"""Plots for the page: data for the script, a still picture without it."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from wassail.report.html import LONG, Html, data_block, percent, short, spell, tag
from wassail.threat import Threat, show
from wassail.transport.curve import RiskCurve

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

Place: TypeAlias = "Callable[[float, float], tuple[float, float]]"  # of eps and accuracy
LABEL_ROOM = 12  # pixels between the names of two landmarks; the others are marks only
MEANING = {
    1.0: "Order 1: the mean distance over all samples is at most eps. Few samples may move far.",
    2.0: "Order 2: the root mean square distance over all samples is at most eps.",
    math.inf: "Order ∞: every sample may move by eps, the point-wise threat of AutoAttack and "
    "RobustBench.",
}


def axis_end(curves: Iterable[RiskCurve], mark: float) -> float:
    """Where the axis of eps ends: where nearly every known flip is paid for, and well past the
    budget that is pointed out.
    """
    ends = [1.6 * mark]
    for curve in curves:
        bends = curve.breakpoints()[0]
        ends.append(1.05 * float(bends[int(0.97 * (len(bends) - 1))]))
    return max(ends)


def plot(
    identifier: str,
    runs: Sequence[Evaluation],
    orders: Sequence[float],
    label: str,
    legend: Html,
    reading: Html,
    *,
    overlay: bool = False,
) -> Html:
    """The curves of runs with one norm and domain: drawn here for every order, switchable with the
    script.

    legend, reading: the key of the lines, and where the script writes the figures at an eps;
    overlay: every run has its own colour for both sides, and no band is filled; otherwise there is
    one run, and each side has its colour.
    """
    threat = runs[0].threat
    ends = {order: axis_end([run.curve(order) for run in runs], threat.eps) for order in orders}
    unit = unit_of(threat, max(ends.values()))
    block = {
        "norm": f"{threat.norm:g}",
        "order": _javascript(threat.order),
        "eps": threat.eps,
        "unit": unit,
        "overlay": overlay,
        "orders": [(_javascript(order), end) for order, end in ends.items()],
        "runs": [packed(run.curve(threat.order)) for run in runs],
        "landmarks": [] if overlay else _landmarks(runs[0]),
    }
    radios = [
        (
            tag(
                "input",
                type="radio",
                name=f"{identifier}-order",
                id=f"{identifier}-order-{place}",
                value=_javascript(order),
                checked=order == threat.order,
            ),
            tag("label", spell(order), for_=f"{identifier}-order-{place}"),
        )
        for place, order in enumerate(orders)
    ]
    controls = tag(
        "div",
        tag("fieldset", tag("legend", "order p"), radios, class_="choice"),
        tag(
            "div",
            tag("label", "eps", for_=f"{identifier}-slider"),
            tag(
                "input",
                type="range",
                id=f"{identifier}-slider",
                min="0",
                max="1000",
                step="1",
                value="0",
            ),
            tag(
                "input",
                type="text",
                inputmode="decimal",
                aria_label="eps as a number",
                autocomplete="off",
                spellcheck="false",
            ),
            class_="budget",
        ),
        _others_controls(identifier),
        class_="controls",
    )
    meanings = [
        tag("p", _meaning(order), class_="meaning", data_meaning=_javascript(order), hidden=True)
        for order in orders
    ]
    canvas = tag("div", class_="canvas", data_label=label)
    hint = (
        "p is the order of the Wasserstein ball. Move eps with the slider, in the picture, or "
        "by typing: 8/255 is understood. Labels may change, too, at a price each, and people be "
        "missing, as long as the stated share is there."
    )
    live = tag(
        "div",
        controls,
        tag("p", hint, class_="hint"),
        meanings,
        canvas,
        reading,
        class_="live",
        hidden=True,
    )
    static = tag(
        "div",
        [still(runs, order, end, unit, overlay) for order, end in ends.items()],
        class_="static",
    )
    figure = tag("figure", live, static, legend, class_="plot", data_plot=f"{identifier}-data")
    return Html(figure + data_block(f"{identifier}-data", block))


def _others_controls(identifier: str) -> list[Html]:
    """The price of a changed label and the least share of people, each a slider and a field."""
    parts = []
    for name, words, spoken in (
        ("kappa", "label cost", "price of a changed label, or never"),
        ("share", "share of people", "least share of people, in (0, 1]"),
    ):
        place = f"{identifier}-{name}"
        slider = {"type": "range", "id": place, "min": "0", "max": "1000", "step": "1"}
        parts.append(
            tag(
                "div",
                tag("label", words, for_=place),
                tag("input", **slider, value="1000", data_others=name),
                tag(
                    "input",
                    type="text",
                    aria_label=spoken,
                    autocomplete="off",
                    spellcheck="false",
                    data_others=f"{name}-text",
                ),
                class_="budget",
            )
        )
    return parts


def _javascript(order: float) -> str:
    return "Infinity" if order == math.inf else repr(order)


def _meaning(order: float) -> str:
    return MEANING.get(
        order, f"Order {order:g}: the Wasserstein-{order:g} distance to the data is at most eps."
    )


def packed(curve: RiskCurve) -> dict[str, Any]:
    """Both sides of a curve for the script: finite distances, sorted, and their masses unless
    all are 1/N.
    """
    even = bool((curve.mu == curve.mu[:1]).all())

    def side(distances: Tensor) -> dict[str, str | None]:
        keep = torch.isfinite(distances) & (curve.mu > 0)
        ordered, where = distances[keep].sort(stable=True)
        return {"d": _floats(ordered), "w": None if even else _floats(curve.mu[keep][where])}

    certified = None if curve.radii is None else side(curve.radii)
    return {
        "n": len(curve.mu),
        "total": 1.0 if even else float(curve.mu.sum()),
        "attacked": side(curve.distances),
        "certified": certified,
    }


def _landmarks(run: Evaluation) -> list[dict[str, Any]]:
    """The known shifts for the script: name, accuracy, eps by order, in the order of their eps."""
    return [
        {
            "name": mark.name[:LONG],
            "accuracy": mark.accuracy,
            "eps": {_javascript(order): eps for order, eps in mark.eps.items()},
        }
        for mark in run.landmarks
    ]


def _still_landmarks(run: Evaluation, order: float, end: float, place: Place) -> list[Html]:
    """A labelled mark for each known shift within the axes; names where there is room."""
    inside = [mark for mark in run.landmarks if mark.eps.get(order, math.inf) <= end]
    inside.sort(key=lambda mark: (mark.eps[order], mark.name))
    parts = []
    last = -math.inf
    for mark in inside:
        x, y = place(mark.eps[order], mark.accuracy)
        text = f"{mark.name[:LONG]}: {percent(mark.accuracy)} at eps {show(mark.eps[order])}"
        sides = f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4Z"
        parts.append(tag("path", tag("title", text), class_="landmark", d=sides))
        if x - last >= LABEL_ROOM:
            last = x
            turned = f"translate({x + 3:.1f} {y + 8:.1f}) rotate(90)"
            parts.append(tag("text", mark.name[:24], class_="landmark", transform=turned))
    return parts


def _floats(values: Tensor) -> str:
    return base64.b64encode(values.numpy().astype("<f8").tobytes()).decode()


def still(
    runs: Sequence[Evaluation], order: float, end: float, unit: int | None, overlay: bool
) -> Html:
    """The same picture without the script: one panel for an order.

    Args:
        runs: of one norm and domain.
        order: Wasserstein order.
        end: of the axis of eps.
        unit: 255 where budgets are read in steps of 8 bits, else None.
        overlay: every run has its own colour for both sides.
    """
    width = 360
    height = 250
    left = 40
    top = 10
    bottom = 212
    right = width - 12

    def px(eps: float) -> float:
        return left + (right - left) * eps / end

    def py(share: float) -> float:
        return bottom - (bottom - top) * share

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(line_mark("rule", left, py(share), right, py(share)))
        parts.append(label_mark(left - 6, py(share) + 4, f"{100 * share:g}", "end"))
    for eps, text in ticks(end, unit, 4):
        parts.append(line_mark("axis", px(eps), bottom, px(eps), bottom + 5))
        parts.append(label_mark(px(eps), bottom + 18, text, "middle"))
    parts.append(line_mark("axis", left, bottom, right, bottom))
    below_axis = f"{runs[0].words.share} in % against eps"
    parts.append(label_mark((left + right) / 2, height - 4, below_axis, "middle"))
    where = np.linspace(0, end, 181).tolist()
    for place, run in enumerate(runs):
        curve = run.curve(order)
        alone = not overlay
        sides = list(zip(*(curve(eps) for eps in where)))
        above, below = (
            [(px(eps), py(share)) for eps, share in zip(where, side)] for side in reversed(sides)
        )
        tone = "" if alone else f" run run-{place % 6} dash-{place // 6 % 4}"
        if curve.radii is not None:
            if alone:
                floor = [(float(right), float(bottom)), (float(left), float(bottom))]
                parts.append(tag("path", class_="area certified", d=_path(below + floor)))
                parts.append(tag("path", class_="area band", d=_path(above + below[::-1])))
            parts.append(
                tag(
                    "path",
                    class_="line certified" if alone else f"line proved{tone}",
                    d=_path(below),
                )
            )
        parts.append(
            tag("path", class_="line attacked" if alone else f"line{tone}", d=_path(above))
        )
        if alone:
            parts += _still_landmarks(run, order, end, lambda eps, share: (px(eps), py(share)))
    head = f"Order {spell(order)}"
    picture = tag(
        "svg",
        parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{head}: {runs[0].words.share} against eps",
    )
    return tag("div", tag("h3", head), picture)


def unit_of(threat: Threat, end: float) -> int | None:
    """Budgets of images are read in steps of 8 bits where they were given so, as long as they
    are small ones.
    """
    return 255 if show(threat.eps).endswith("/255") and end <= 0.6 else None


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


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def line_mark(kind: str, x1: object, y1: object, x2: object, y2: object) -> Html:
    """A line of the picture."""
    return tag("line", class_=kind, x1=short(x1), y1=short(y1), x2=short(x2), y2=short(y2))


def label_mark(x: object, y: object, text: str, anchor: str, kind: str | None = None) -> Html:
    """A text of the picture."""
    return tag("text", text, x=short(x), y=short(y), text_anchor=anchor, class_=kind)


def rect_mark(
    kind: str, x: object, y: object, width: object, height: object, **more: object
) -> Html:
    """A rectangle of the picture."""
    return tag(
        "rect",
        class_=kind,
        x=short(x),
        y=short(y),
        width=short(width),
        height=short(height),
        **more,
    )
