"""One run as one HTML page: the number to report, both curves, every attack, the samples that break
first.

The page needs no network and runs no script but its own, whose hash its Content-Security-Policy
names. All of it is in the HTML, drawn here; the script adds switching and sorting. Every string of
a run may be hostile: `tag` escapes whatever is not `Html`. The same run gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wassail import writing
from wassail.errors import InputError
from wassail.report.png import encode
from wassail.threat import Threat, ceil_percent, floor_percent, show
from wassail.transport import RiskCurve, knapsack

if TYPE_CHECKING:
    from wassail.evaluation.result import Evaluation, Row
    from wassail.evaluation.verifying import Verification

LONG = 90  # characters of a name that are shown; the rest is in its title
TITLE = 1000  # characters of a title
# of all pictures together before they are compressed, so that a page stays below two megabytes
BYTES = 1_250_000
FOLDED = 64  # numbers from which a square number of them is shown as a square
STRIP = 1024  # numbers that still make a readable strip
TALL = 20  # rows from which a table scrolls on its own
BINS = 40

MEANING = {
    1.0: "Order 1: the mean distance over all samples is at most eps. Few samples may move far.",
    2.0: "Order 2: the root mean square distance over all samples is at most eps.",
    math.inf: "Order ∞: every sample may move by eps, the point-wise threat of AutoAttack and "
    "RobustBench.",
}

# What would move or hide text around it: controls, bidirectional overrides, line and paragraph
# separators.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]"
)


# ---- markup


class Html(str):
    """Text that is HTML already; every other string is escaped when it is put into a tag."""


def tag(element: str, /, *children: object, **attributes: object) -> Html:
    """`<element attribute="...">children</element>`, everything escaped that is not `Html`.

    Attributes: a trailing `_` is dropped and `_` becomes `-`; None and False leave it out, True
    leaves it empty. Children: lists are taken apart, None is nothing.
    """
    inside = "".join(_text(child) for child in children)
    end = "" if element in {"img", "input", "meta"} else f"</{element}>"
    return Html(f"<{element}{_attributes(attributes)}>{inside}{end}")


def _text(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, (list, tuple)):
        return "".join(_text(one) for one in child)
    return child if isinstance(child, Html) else escape(visible(str(child)))


def _attributes(attributes: Mapping[str, object]) -> str:
    kept = {
        name.rstrip("_").replace("_", "-"): value
        for name, value in attributes.items()
        if value not in (None, False)
    }
    return "".join(
        f" {name}" + ("" if value is True else f'="{escape(visible(str(value)))}"')
        for name, value in kept.items()
    )


def visible(text: str) -> str:
    """The text with everything in it shown: controls and direction overrides as `⟨U+202E⟩`,
    lone surrogates as `?`.
    """
    return (
        _UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)
        .encode("utf-8", "replace")
        .decode()
    )


def name(text: object, length: int = LONG) -> Html:
    """A name out of a run: isolated, so that its direction stays its own, and shortened with
    the whole of it as a title.
    """
    full = visible(str(text))
    if len(full) <= length:
        return tag("bdi", full)
    return tag(
        "bdi", full[: length - 1] + "…", title=full[:TITLE] + ("…" if len(full) > TITLE else "")
    )


def data_block(identifier: str, data: object) -> Html:
    """JSON for the script; `<`, `>`, `&` and the line separators of JavaScript are written as
    escapes.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII only
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Html(text), type="application/json", id=identifier)


def document(
    title: str,
    head: object,
    contents: Sequence[tuple[str, str]],
    *sections: object,
    wide: bool = False,
) -> str:
    """A whole page: the policy that forbids the network, the style, the head line, the
    sections, the script.
    """
    style, script = (
        files("wassail.report").joinpath(file).read_text("utf-8")
        for file in ("page.css", "page.js")
    )
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    links = [tag("li", tag("a", text, href=f"#{anchor}")) for anchor, text in contents]
    theme = tag("button", "Dark theme", class_="theme", type="button", hidden=True)
    body = [
        tag("a", "Skip to the results", class_="skip", href="#main"),
        tag(
            "header",
            tag("div", "wassail", tag("span", " report"), class_="mark"),
            theme,
            class_="top",
        ),
        tag("nav", tag("ul", links), class_="contents", aria_label="Sections"),
        tag("main", head, sections, id="main", tabindex="-1"),
        tag("footer", "One file, no network. The same run writes the same bytes."),
    ]
    html = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="referrer", content="no-referrer"),
            tag("title", title),
            tag("style", Html(style)),
        ),
        tag(
            "body",
            tag("div", body, class_="page wide" if wide else "page"),
            tag("script", Html(script)),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{html}\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def save(text: str, path: str | PathLike[str]) -> Path:
    """Write a page in one piece: it is there complete, or as it was before."""
    return writing.save(path, text)


def section(identifier: str, title: str, *children: object, lead: object = None) -> Html:
    """A part of the page with its heading."""
    heading = tag("h2", title, id=f"{identifier}-title")
    inside = tag("p", lead, class_="lead") if lead is not None else None
    return tag(
        "section", heading, inside, children, id=identifier, aria_labelledby=f"{identifier}-title"
    )


# ---- figures as text


def attacked_percent(share: float) -> str:
    """An accuracy that an attack leaves, rounded up."""
    return "–" if math.isnan(share) else f"{ceil_percent(share)}\u00a0%"


def percent(share: float) -> str:
    """A share as a percentage with two digits."""
    return "–" if math.isnan(share) else f"{100 * share:.2f}\u00a0%"


def proved(share: float) -> str:
    """A certified share as a percentage, rounded down."""
    return "–" if math.isnan(share) else f"{floor_percent(share)}\u00a0%"


def spell(order: float) -> str:
    """An order as it is written on the page."""
    return "∞" if order == math.inf else f"{order:g}"


def length(value: float) -> str:
    """A distance: four digits, and words where there is none."""
    return "no flip known" if value == math.inf else "–" if math.isnan(value) else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Seconds as people read them."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def setting(threat: Threat) -> str:
    """What every threat of a run shares, in words."""
    box = "no box" if threat.domain is None else f"box [{threat.domain[0]:g}, {threat.domain[1]:g}]"
    return f"ground norm l{threat.norm:g}, {box}"


def number_cell(text: object, value: float | None, **attributes: object) -> Html:
    """A cell of a table with the number it is sorted by; nothing to sort by comes last."""
    known = value is not None and not math.isnan(value)
    return tag(
        "td",
        text,
        data_sort=repr(float(value)) if known and value is not None else "",
        **attributes,
    )


def table(caption: str, heads: Sequence[object], rows: Sequence[Html], label: str) -> Html:
    """A sortable table in a frame of its own, which scrolls where the page is too narrow. A
    head may be a ready cell.
    """
    cells = [head if isinstance(head, Html) else tag("th", head, scope="col") for head in heads]
    inside = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", cells)),
        tag("tbody", list(rows)),
        class_="sortable",
    )
    classes = "scroll tall" if len(rows) > TALL else "scroll"
    return tag("div", inside, class_=classes, tabindex="0", role="region", aria_label=label)


# ---- curves


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
    unit = _unit(threat, max(ends.values()))
    block = {
        "norm": f"{threat.norm:g}",
        "order": _javascript(threat.order),
        "eps": threat.eps,
        "unit": unit,
        "overlay": overlay,
        "orders": [(_javascript(order), end) for order, end in ends.items()],
        "runs": [_packed(run.curve(threat.order)) for run in runs],
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
        class_="controls",
    )
    meanings = [
        tag("p", _meaning(order), class_="meaning", data_meaning=_javascript(order), hidden=True)
        for order in orders
    ]
    canvas = tag("div", class_="canvas", data_label=label)
    hint = (
        "p is the order of the Wasserstein ball. Move eps with the slider, in the picture, or "
        "by typing: 8/255 is understood."
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
    still = tag(
        "div",
        [_still(runs, order, end, unit, overlay) for order, end in ends.items()],
        class_="static",
    )
    figure = tag("figure", live, still, legend, class_="plot", data_plot=f"{identifier}-data")
    return Html(figure + data_block(f"{identifier}-data", block))


def _javascript(order: float) -> str:
    return "Infinity" if order == math.inf else repr(order)


def _meaning(order: float) -> str:
    return MEANING.get(
        order, f"Order {order:g}: the Wasserstein-{order:g} distance to the data is at most eps."
    )


def _packed(curve: RiskCurve) -> dict[str, Any]:
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


def _floats(values: Tensor) -> str:
    return base64.b64encode(values.numpy().astype("<f8").tobytes()).decode()


def _still(
    runs: Sequence[Evaluation], order: float, end: float, unit: int | None, overlay: bool
) -> Html:
    """The same picture without the script: one panel for an order."""
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
        parts.append(_line("rule", left, py(share), right, py(share)))
        parts.append(_label(left - 6, py(share) + 4, f"{100 * share:g}", "end"))
    for eps, text in _ticks(end, unit, 4):
        parts.append(_line("axis", px(eps), bottom, px(eps), bottom + 5))
        parts.append(_label(px(eps), bottom + 18, text, "middle"))
    parts.append(_line("axis", left, bottom, right, bottom))
    parts.append(_label((left + right) / 2, height - 4, "accuracy in % against eps", "middle"))
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
    head = f"Order {spell(order)}"
    picture = tag(
        "svg",
        parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=f"{head}: accuracy against eps",
    )
    return tag("div", tag("h3", head), picture)


def _unit(threat: Threat, end: float) -> int | None:
    """Budgets of images are read in steps of 8 bits where they were given so, as long as they
    are small ones.
    """
    return 255 if show(threat.eps).endswith("/255") and end <= 0.6 else None


def _ticks(end: float, unit: int | None, most: int) -> list[tuple[float, str]]:
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


def _line(kind: str, x1: object, y1: object, x2: object, y2: object) -> Html:
    return tag("line", class_=kind, x1=_short(x1), y1=_short(y1), x2=_short(x2), y2=_short(y2))


def _label(x: object, y: object, text: str, anchor: str, kind: str | None = None) -> Html:
    return tag("text", text, x=_short(x), y=_short(y), text_anchor=anchor, class_=kind)


def _rect(kind: str, x: object, y: object, width: object, height: object, **more: object) -> Html:
    return tag(
        "rect",
        class_=kind,
        x=_short(x),
        y=_short(y),
        width=_short(width),
        height=_short(height),
        **more,
    )


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


# ---- the page of one run


def write_report(
    run: Evaluation,
    path: str | PathLike[str],
    *,
    fragile: int = 24,
    verified: Verification | None = None,
) -> Path:
    """Write the page of a run to `path`, which is returned.

    fragile: how many of the samples with the nearest flips are shown as images; verified: what
    `Evaluation.verify` found, which the page then says; without it the page says that nobody
    looked. The page holds no date and no path of its own: the same run gives the same bytes.
    """
    if fragile < 0:
        raise InputError(f"fragile is {fragile}: give the number of samples to show, 0 or more.")
    return save(report(run, fragile=fragile, verified=verified), path)


def report(run: Evaluation, *, fragile: int = 24, verified: Verification | None = None) -> str:
    """The page of `write_report` as text."""
    parts = [
        ("verified", "Verified", _verified(verified)),
        ("findings", "Findings", _findings(run)),
        ("curve", "Both curves", _curve(run)),
        ("attacks", "Attacks", _attacks(run)),
        ("distances", "Distances", _distances(run)),
        ("certificate", "Certificate", _certificate(run)),
        ("fragile", "Fragile samples", _fragile(run, fragile)),
        ("classes", "Classes", _classes(run)),
        ("provenance", "Provenance", _provenance(run)),
    ]
    shown = [part for part in parts if part[2] is not None]
    attacked = run.curve(run.threat.order)(run.threat.eps)[1]
    title = f"{attacked_percent(attacked)} · {run.name[:LONG]} on {run.data[:LONG]} · wassail"
    return document(
        title, _head(run, verified), [part[:2] for part in shown], *(part[2] for part in shown)
    )


def unverified(verified: Verification | None) -> Html:
    """Whether somebody who reads the run has looked at it with the model in hand."""
    if verified is None:
        text = (
            "Not verified by its reader: these are the figures that the run states. Anyone can "
            "write a run; with the model, "
            "wassail verify RUN MODEL computes them again."
        )
    elif verified:
        text = (
            "Verified by its reader: nothing that was checked against the model is false. "
            "What was not checked is listed below."
        )
    else:
        text = (
            f"FALSE: {len(verified.problems)} statements of this run do not hold for the "
            "model. They are listed below."
        )
    return tag(
        "p",
        text,
        class_="note",
        data_verified="no" if verified is None else "yes" if verified else "false",
    )


def _verified(verified: Verification | None) -> Html | None:
    """What was compared with the model, and what was not."""
    if verified is None:
        return None
    kinds = (
        ("⚠ False", verified.problems),
        ("✓ Checked", verified.checked),
        ("Not checked", verified.unchecked),
    )
    items = [
        tag(
            "li",
            tag("span", word, class_="level"),
            tag("span", name(text, TITLE)),
            class_="warned" if "False" in word else None,
        )
        for word, texts in kinds
        for text in texts
    ]
    lead = (
        "What the reader of the run computed again with the model at hand; random choices "
        f"with seed {verified.seed}."
    )
    return section("verified", "Verified", tag("ul", items, class_="findings"), lead=lead)


def _head(run: Evaluation, verified: Verification | None) -> Html:
    """The headline: one number, what it means, and the bracket it belongs to."""
    threat = run.threat
    certified, attacked = run.curve(threat.order)(threat.eps)
    value = "–" if math.isnan(attacked) else ceil_percent(attacked)
    big = tag(
        "p",
        tag("span", "robust accuracy is at most", class_="most"),
        tag("span", value, tag("span", " %", class_="unit"), class_="number"),
        class_="big",
    )
    facts: list[tuple[str, object, str]] = [
        ("Clean accuracy", percent(run.clean), _interval(run.clean_interval))
    ]
    pooled = next((row for row in run.best if row.threat == threat), None)
    if pooled is not None:
        facts.append(("Attacked", attacked_percent(attacked), _interval(pooled.interval)))
    if run.radii is not None:
        facts.append(("Certified", proved(certified), "at least, rounded down"))
    facts.append(("Samples", f"{len(run):,}", ""))
    return Html(
        tag("h1", name(run.name), tag("span", " on ", class_="quiet"), name(run.data))
        + tag("div", big, _facts(facts), class_="hero")
        + tag("p", run.headline + ".", class_="headline")
        + tag("p", run.definition)
        + unverified(verified)
        + _bracket(run, certified, attacked)
    )


def _facts(facts: Sequence[tuple[str, object, str]]) -> Html:
    """A few figures side by side: what, how much, and a remark."""
    listed = [
        tag("div", tag("dt", what), tag("dd", figure, tag("small", more) if more else None))
        for what, figure, more in facts
    ]
    return tag("dl", listed, class_="facts")


def _interval(interval: tuple[float, float]) -> str:
    low, high = interval
    return "" if math.isnan(low) else f"{100 * low:.2f} – {100 * high:.2f} % (95 %)"


def _bracket(run: Evaluation, certified: float, attacked: float) -> Html:
    """All samples as one bar: proved, not known, broken by an attack, wrong to begin with."""
    if not len(run):
        return Html("")
    certified = certified if run.radii is not None else 0.0
    clean = max(run.clean, attacked)
    at = [0.0, certified, attacked, clean, 1.0]
    kinds = ("certified", "band", "attacked", "wrong")
    bars = [
        _rect(f"fill {kind}", _share(a), 0, _share(b - a), 22)
        for kind, a, b in zip(kinds, at, at[1:])
        if b > a
    ]
    ends = {0.0: "start", 1.0: "end"}
    scale = [
        _label(
            _share(share),
            40,
            f"{100 * share:g}{' %' if share == 1 else ''}",
            ends.get(share, "middle"),
        )
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    words = (
        (
            "certified",
            proved(certified),
            "proved: every distribution in the ball keeps this much correct",
        ),
        ("band", percent(attacked - certified), "not known: neither proved nor attacked"),
        (
            "attacked",
            percent(clean - attacked),
            "lost to a distribution in the ball that was built and verified",
        ),
        ("wrong", percent(1 - clean), "wrong to begin with"),
    )
    kept = [word for word in words if word[0] != "certified" or run.radii is not None]
    items = [
        tag("li", tag("span", class_=f"swatch {kind}"), tag("span", tag("b", figure), " ", text))
        for kind, figure, text in kept
    ]
    label = f"of all mass: {'; '.join(f'{figure} {text}' for _, figure, text in kept)}"
    picture = tag("svg", bars, scale, role="img", aria_label=label)
    note = (
        None
        if run.radii is not None
        else "Nothing was certified in this run: the truth lies between 0 and the attacked "
        "accuracy."
    )
    caption = (
        "What the bracket means: an attack gives an upper bound on robust accuracy, a "
        "certificate a lower one, and the truth "
        f"lies between the two, for this threat ({run.threat}) and these samples."
    )
    return tag(
        "figure", picture, tag("ul", items), tag("figcaption", caption, " ", note), class_="bracket"
    )


def _share(value: float) -> str:
    return f"{100 * value:.3f}".rstrip("0").rstrip(".") + "%"


def _findings(run: Evaluation) -> Html | None:
    """What the checks and the indicators of attack failure say, warnings first."""
    if not run.findings:
        return None
    loud = [
        finding
        for level in ("warning", "note")
        for finding in run.findings
        if finding.level == level
    ]
    fine = [finding for finding in run.findings if finding.level == "ok"]
    items = [
        tag(
            "li",
            tag("span", "⚠ Warning" if finding.level == "warning" else "Note", class_="level"),
            tag("span", name(finding.text, TITLE), tag("span", name(finding.name), class_="name")),
            class_="warned" if finding.level == "warning" else None,
        )
        for finding in loud
    ]
    if fine:
        told = [
            tag(
                "li", name(finding.text, TITLE), " ", tag("span", name(finding.name), class_="name")
            )
            for finding in fine
        ]
        word = tag("span", "✓ In order", class_="level")
        items.append(tag("li", word, tag("ul", told, class_="fine", aria_label="In order")))
    count = len(run.warnings)
    lead = (
        "No check and no indicator of attack failure raised a warning."
        if not count
        else f"{count} warning{'s' if count > 1 else ''}: explain "
        f"{'them' if count > 1 else 'it'} before trusting the figures."
    )
    return section("findings", "Findings", tag("ul", items, class_="findings"), lead=lead)


def _curve(run: Evaluation) -> Html | None:
    """The sandwich: certified and attacked accuracy for every eps."""
    if not len(run):
        return None
    certified = run.radii is not None
    keys = [("attacked", "attacked: some distribution is this bad")]
    if certified:
        keys = [
            ("certified", "certified: proved, never below"),
            ("band", "not known: between the two"),
            *keys,
        ]
    legend = tag(
        "ul",
        [tag("li", tag("span", class_=f"swatch {kind}"), text) for kind, text in keys],
        class_="legend",
    )
    tiles = [("attacked", "attacked, at most")]
    if certified:
        tiles = [("certified", "certified, at least"), *tiles, ("gap", "not known")]
    tones = [
        tag("data", value="", data_read=f"0:{side}", class_=f"tone-{side}") for side, _ in tiles
    ]
    words = [tag("span", text, " at eps ", tag("b", data_eps=True)) for _, text in tiles]
    figures = [tag("span", word, tone) for word, tone in zip(words, tones)]
    reading = tag("output", figures, class_="reading", for_="sandwich-slider")
    orders = sorted({*run.orders, 1.0, 2.0, math.inf})
    noscript = tag(
        "noscript",
        tag("p", "Scripts are off: every order is drawn, and nothing moves.", class_="note"),
    )
    lead = "Robust accuracy over every budget eps, from one set of distances."
    shown = plot(
        "sandwich", [run], orders, "certified and attacked accuracy against eps", legend, reading
    )
    return section("curve", "Both curves", noscript, shown, lead=lead)


def _attacks(run: Evaluation) -> Html | None:
    """Every attack over every threat, and all of them pooled."""
    rows = [_attack(row, pooled=True) for row in run.best] + [
        _attack(row, pooled=False) for row in run.rows
    ]
    if not rows:
        return None
    heads = [
        "Attack",
        "p",
        "eps",
        "Accuracy",
        "95 % interval",
        tag("th", "0 to 100 %", scope="col", data_fixed=True),
        "Spent",
        "Passes F + B",
        "Flipped",
        "Time",
    ]
    lead = (
        "A lower accuracy is a stronger attack. Spent: what the flips cost, as a share of eps; "
        "points that moved and flipped "
        "nothing are left out, the accuracy is the same without them. Passes: forward and "
        "backward, the mean over samples "
        "that were correct to begin with. Flipped: of those. A search that serves several "
        "threats shows its time once. All "
        "attacks: for every sample the nearest flip of all of them."
    )
    return section(
        "attacks",
        "Attacks",
        table(f"All threats: {setting(run.threat)}", heads, rows, "Table of attacks"),
        lead=lead,
    )


def _attack(row: Row, *, pooled: bool) -> Html:
    low, high = row.interval
    spent = row.cost / row.threat.eps
    return tag(
        "tr",
        tag("th", name("all attacks" if pooled else row.title, 40), scope="row"),
        number_cell(
            spell(row.threat.order), 1e300 if row.threat.order == math.inf else row.threat.order
        ),
        number_cell(show(row.threat.eps), row.threat.eps),
        number_cell(attacked_percent(row.accuracy), row.accuracy),
        number_cell("–" if math.isnan(low) else f"{100 * low:.2f} – {100 * high:.2f}", low),
        tag("td", _whisker(row.accuracy, low, high), class_="picture"),
        number_cell(f"{100 * spent:.1f} %", spent),
        number_cell(f"{row.forwards:,.1f} + {row.backwards:,.1f}", row.forwards + row.backwards),
        number_cell(f"{100 * row.flipped:.1f} %", row.flipped),
        number_cell(duration(row.seconds), row.seconds),
        class_="pooled" if pooled else None,
    )


def _whisker(value: float, low: float, high: float) -> Html | None:
    """An accuracy on the scale from 0 to 1 with its interval."""
    if math.isnan(value):
        return None
    track = _rect("fill track", 0, 7, "100%", 4, rx=2)
    span = None if math.isnan(low) else _line("whisker", _share(low), 9, _share(high), 9)
    return tag(
        "svg",
        track,
        span,
        tag("circle", class_="fill attacked", cx=_share(value), cy=9, r=4.5),
        aria_hidden="true",
    )


def _distances(run: Evaluation) -> Html | None:
    """How far away the flips are, and mirrored below how far is proved to be safe."""
    flips = run.distances[(run.distances > 0) & torch.isfinite(run.distances)]
    radii = None if run.radii is None else run.radii[(run.radii > 0) & torch.isfinite(run.radii)]
    if not len(flips) and (radii is None or not len(radii)):
        return None
    known = flips if radii is None else torch.cat([flips, radii])
    end = max(1.05 * float(np.quantile(known.numpy(), 0.98)), 1.3 * run.threat.eps)
    above, below = (_counts(values, end) for values in (flips, radii))
    most = max([*above, *below, 1])
    width = 760
    left = 40
    zero = 126
    up = 112
    bar = (width - 8 - left) / BINS
    down = up if radii is not None else 0
    height = zero + down + 44
    parts = [_line("rule", left, zero - up, width - 8, zero - up)]
    for counts, kind, sign in ((above, "attacked", -1), (below, "certified", 1)):
        for place, count in enumerate(counts):
            size = up * count / most
            if count:
                parts.append(
                    _rect(
                        f"bar {kind}",
                        left + place * bar + 0.5,
                        zero - size if sign < 0 else float(zero),
                        bar - 1,
                        size,
                    )
                )
    parts.append(_line("axis", left, zero, width - 8, zero))
    base = zero + down
    for value, text in _ticks(end, _unit(run.threat, end), 6):
        x = left + value / end * (width - 8 - left)
        parts += [_line("axis", x, base, x, base + 4), _label(x, base + 17, text, "middle")]
    mark = left + run.threat.eps / end * (width - 8 - left)
    parts += [
        _line("cursor", mark, zero - up, mark, base),
        _label(mark + 5, zero - up + 10, f"eps {show(run.threat.eps)}", "start", "strong"),
    ]
    parts += [
        _label(left - 6, zero - up + 8, str(most), "end"),
        _label(left - 6, zero + 4, "0", "end"),
    ]
    parts.append(
        _label(
            (left + width) / 2,
            height - 6,
            f"distance from the sample (l{run.threat.norm:g})",
            "middle",
        )
    )
    wrong = int((run.distances == 0).sum())
    none = int((run.distances == math.inf).sum())
    beyond = int((known > end).sum())
    told = [
        f"{len(flips):,} samples with a flip",
        f"{wrong:,} wrong to begin with (distance 0)",
        f"{none:,} with no flip known",
    ]
    if beyond:
        told.append(f"{beyond:,} beyond the axis, in its last bar")
    middle = f"Median distance of the flips {length(float(flips.median()))}." if len(flips) else ""
    picture = tag(
        "svg",
        parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label="histogram of distances",
    )
    keys = [("attacked", "nearest flips found, upwards")] + (
        [("certified", "certified radii, downwards")] if radii is not None else []
    )
    legend = tag(
        "ul",
        [tag("li", tag("span", class_=f"swatch {kind}"), words) for kind, words in keys],
        class_="legend",
    )
    figure = tag(
        "figure", picture, legend, tag("figcaption", "; ".join(told) + ". ", middle), class_="card"
    )
    return section(
        "distances", "Distances", figure, lead="How far each sample is from its nearest known flip."
    )


def _counts(values: Tensor | None, end: float) -> list[int]:
    if values is None:
        return []
    found: list[int] = np.histogram(values.clamp(max=end).numpy(), bins=BINS, range=(0, end))[
        0
    ].tolist()
    return found


def _certificate(run: Evaluation) -> Html | None:
    """What is proved: by which method, for how many samples exactly, and the certified accuracy
    at every threat.
    """
    if run.radii is None:
        return None
    right = run.radii[run.distances > 0]
    exact = int(run.exact.sum()) if run.exact is not None else 0
    facts: list[tuple[str, object, str]] = [
        ("Method", name(run.certificate.get("method", "not recorded")), ""),
        ("Arithmetic", name(run.certificate.get("arithmetic", "exact")), "that the radii hold for"),
        ("Exact radii", f"{exact:,}", f"of {len(run):,}"),
        (
            "Median radius",
            length(float(right.median())) if len(right) else "–",
            "of the correct samples",
        ),
        ("Positive radii", f"{int((right > 0).sum()):,}", f"of {len(right):,} correct samples"),
    ]
    if run.certificate.get("seconds") is not None:
        facts.append(("Time", duration(float(run.certificate["seconds"])), ""))
    rows = []
    for threat in run.threats:
        certified, attacked = run.curve(threat.order)(threat.eps)
        cells = [
            tag("th", f"p = {spell(threat.order)}, eps = {show(threat.eps)}", scope="row"),
            number_cell(proved(certified), certified),
            number_cell(attacked_percent(attacked), attacked),
            number_cell(percent(attacked - certified), attacked - certified),
        ]
        rows.append(tag("tr", cells))
    heads = ["Threat", "Certified, at least", "Attacked, at most", "Not known"]
    lead = "A radius is a proof that nothing within it flips. Certified figures are rounded down."
    panel = tag("div", _facts(facts), class_="card")
    return section(
        "certificate",
        "Certificate",
        panel,
        table("Both sides at each threat", heads, rows, "Certified and attacked"),
        lead=lead,
    )


# ---- samples as images


def _fragile(run: Evaluation, count: int) -> Html | None:
    """The samples with the nearest flips: sample, flip and their difference, enlarged."""
    order = run.distances.sort(stable=True)[1]
    chosen = [i for i in order.tolist() if 0 < float(run.distances[i]) < math.inf][:count]
    if not chosen:
        return None
    samples, flips = run.images(chosen)
    fold, note = _layout(tuple(samples.shape[1:]), len(chosen))
    low, high = run.threat.domain or _range(samples, flips)
    items = []
    for place, i in enumerate(chosen):
        pictures = None
        if fold is not None:
            pictures = _triple(fold(samples[place]), fold(flips[place]), low, high)
        change = (_class(run, int(run.y[i])), " → ", _class(run, int(run.labels[i])))
        method = run.methods[int(run.found_by[i])] if run.methods else "unknown"
        found = (f"distance {length(float(run.distances[i]))}, by ", name(method, 30))
        lines = [
            tag("p", found, class_="detail"),
            tag("p", "id ", name(run.ids[i], 40), class_="detail"),
        ]
        items.append(tag("li", pictures, tag("p", change, class_="change"), lines))
    lead = (
        f"The {len(chosen)} correct samples with the nearest flips, the nearest first: label, "
        "then the class predicted at the "
        "flip. In the third picture grey is no change, and the change is enlarged by the factor "
        f"below it. {note}"
    )
    return section("fragile", "Most fragile samples", tag("ol", items, class_="samples"), lead=lead)


def _class(run: Evaluation, label: int) -> Html:
    known = run.classes is not None and 0 <= label < len(run.classes)
    return name(run.classes[label] if known and run.classes is not None else f"class {label}", 40)


def _range(*tensors: Tensor) -> tuple[float, float]:
    """Without a box: from the least to the greatest value there is."""
    low = min(float(t.min()) for t in tensors)
    high = max(float(t.max()) for t in tensors)
    return (low, high) if high > low else (low, low + 1)


def _layout(shape: tuple[int, ...], count: int) -> tuple[Any, str]:
    """How samples of a shape become pictures `(H, W)` or `(C, H, W)`: a function, or None, and
    a sentence where it matters.
    """
    size = math.prod(shape)
    if len(shape) == 1 and math.isqrt(size) ** 2 == size and size >= FOLDED:
        side = math.isqrt(size)
        return (
            lambda x: x.reshape(side, side)
        ), f"Samples are {size} numbers, shown folded into {side} × {side}."
    if len(shape) == 1 and size <= STRIP:
        return (
            lambda x: x.reshape(1, size)
        ), f"Samples are {size} numbers, shown as strips from left to right."
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)):
        return None, f"Samples of shape {shape} are no pictures, so only their figures are listed."
    step = max(1, math.ceil(math.sqrt(3 * count * size / BYTES)))
    if step == 1:
        return (lambda x: x), ""
    note = f"Pictures show every {_ordinal(step)} pixel of {shape[-2]} × {shape[-1]}."
    return (lambda x: x[..., ::step, ::step]), note


def _ordinal(count: int) -> str:
    return {2: "second", 3: "third"}.get(count, f"{count}th")


def _triple(sample: Tensor, flip: Tensor, low: float, high: float) -> Html:
    """Sample, flip and amplified difference as pictures side by side."""
    change = (flip - sample).double()
    largest = float(change.abs().max())
    factor = _factor(0.5 * (high - low) / largest) if largest > 0 else 1
    middle = (low + high) / 2 + factor * change
    strips = sample.shape[-2] == 1
    pictures = (
        ("sample", sample),
        ("flip", flip),
        (f"change ×{factor if factor < 1000 else f'{factor / 1000:g}k'}", middle),
    )
    figures = []
    for word, picture in pictures:
        height, width = picture.shape[-2:]
        image = tag("img", src=_uri(picture, low, high), alt=word, width=width, height=height)
        figures.append(tag("figure", image, tag("figcaption", word)))
    return tag("div", figures, class_="triple strips" if strips else "triple")


def _factor(most: float) -> int:
    """The largest whole factor of two digits and zeros that is not above `most`, and at least 1."""
    whole = max(1, math.floor(most))
    unit = int(10 ** max(0, len(str(whole)) - 2))
    return whole // unit * unit


def _uri(picture: Tensor, low: float, high: float) -> str:
    grey = picture.ndim == 2 or picture.shape[0] == 1
    scaled = (
        (255 * (picture.double() - low) / (high - low))
        .nan_to_num(0.0)
        .clamp(0, 255)
        .round()
        .to(torch.uint8)
    )
    pixels = scaled.reshape(scaled.shape[-2:]) if grey else scaled.permute(1, 2, 0)
    return "data:image/png;base64," + base64.b64encode(encode(pixels.contiguous().numpy())).decode()


# ---- classes and provenance


def _classes(run: Evaluation) -> Html | None:
    """Each class on its own: how many samples, clean, and what the pooled allocation leaves of
    it at the headline's threat.
    """
    if not len(run):
        return None
    bought = knapsack(run.distances, run.threat.eps, run.threat.order, run.mu)
    correct = run.distances > 0
    kept = correct * (1 - bought)
    rows = []
    for label in torch.unique(run.y).tolist():
        mine = run.y == label
        mass = float(run.mu[mine].sum())
        clean, robust = (
            float((run.mu[mine] * share[mine]).sum()) / mass if mass else math.nan
            for share in (correct, kept)
        )
        reached = run.distances[mine & correct]
        middle = float(reached.quantile(0.5, interpolation="higher")) if len(reached) else math.nan
        cells = [
            tag("th", _class(run, label), scope="row"),
            number_cell(f"{int(mine.sum()):,}", float(mine.sum())),
            number_cell(percent(clean), clean),
            number_cell(attacked_percent(robust), robust),
            tag("td", _bars(clean, robust), class_="picture"),
            number_cell(length(middle), 1e300 if middle == math.inf else middle),
        ]
        rows.append(tag("tr", cells))
    heads = [
        "Class",
        "N",
        "Clean",
        "Robust",
        tag("th", "robust within clean", scope="col", data_fixed=True),
        "Median distance",
    ]
    lead = (
        f"Robust: the share of the class that the worst distribution found for {run.threat} "
        "leaves correct. The budget is "
        "spent where flips are near, so classes pay unequally; over all samples it is the "
        "headline. Median distance: of the "
        "samples that are correct to begin with."
    )
    return section(
        "classes",
        "Classes",
        table(f"{len(rows)} classes occur", heads, rows, "Table of classes"),
        lead=lead,
    )


def _bars(clean: float, robust: float) -> Html | None:
    if math.isnan(clean):
        return None
    bars = [
        _rect("fill track", 0, 4, "100%", 10, rx=2),
        _rect("fill band", 0, 4, _share(clean), 10, rx=2),
    ]
    return tag(
        "svg", bars, _rect("fill attacked", 0, 4, _share(robust), 10, rx=2), aria_hidden="true"
    )


def _provenance(run: Evaluation) -> Html:
    """Everything that is needed to run it again."""
    orders = ", ".join(
        f"p = {spell(threat.order)} at eps {show(threat.eps)}" for threat in run.threats
    )
    facts = [
        ("model", run.name),
        ("data", f"{run.data}, {len(run):,} samples"),
        ("threats", f"{orders}; {setting(run.threat)}"),
    ]
    command = run.info.get("command")
    facts += flat(
        {
            **run.info,
            "command": shlex.join(map(str, command))
            if isinstance(command, (list, tuple))
            else command,
        }
    )
    listed = [(tag("dt", name(what, 60)), tag("dd", name(text, 400))) for what, text in facts]
    lead = "What was evaluated, with what, and how to do it again."
    return section("provenance", "Provenance", tag("dl", listed, class_="provenance"), lead=lead)


def flat(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested plain values as lines: `model · sha256` and its value as text; an entry of a list
    of mappings is one line.
    """
    lines: list[tuple[str, str]] = []
    for key, value in info.items():
        if isinstance(value, Mapping):
            lines += [(f"{key} · {inner}", text) for inner, text in flat(value)]
        elif isinstance(value, (list, tuple)) and any(isinstance(one, Mapping) for one in value):
            lines += [(f"{key} {place}", _one_line(one)) for place, one in enumerate(value, 1)]
        elif value not in (None, "", [], ()):
            lines.append((str(key), _one_line(value)))
    return lines


def _one_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text}" for key, text in flat(value))
    return ", ".join(str(one) for one in value) if isinstance(value, (list, tuple)) else str(value)
