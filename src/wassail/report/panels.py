"""The panels of the page of a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from wassail.evaluation.conditions import conditions
from wassail.evaluation.criterion import Regression
from wassail.evaluation.signoff import independent, of_rows
from wassail.report.budget import class_name
from wassail.report.drawing import label_mark, line_mark, plot, rect_mark, ticks, unit_of
from wassail.report.html import (
    TITLE,
    Html,
    attacked_percent,
    duration,
    flat,
    length,
    name,
    number_cell,
    percent,
    proved,
    section,
    spell,
    table,
    tag,
)
from wassail.threat import ceil_percent, show
from wassail.transport.allocation import knapsack
from wassail.writing import without_folders
from wassail.zoo.classes import classes_text

if TYPE_CHECKING:
    from wassail.evaluation.notes import Verification
    from wassail.evaluation.result import Row
    from wassail.evaluation.run import Evaluation
    from wassail.threat import Threat

BINS = 40
QUARTERS = 4  # parts of the targets of a regression


def unverified(verified: Verification | None) -> Html:
    """Whether the run was verified with the model in hand."""
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


def verified_text(verified: Verification | None) -> Html | None:
    """What was compared with the model, and what was not."""
    if verified is None:
        return None
    kinds = (
        ("⚠ False", verified.problems),
        ("Own choice", verified.choices),
        ("✓ Checked", verified.checked),
        ("Not checked", verified.unchecked),
        ("Fields checked", (", ".join(verified.fields) or "none",)),
        ("Fields not checked", (", ".join(verified.unread) or "none",)),
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


def head_panel(run: Evaluation, verified: Verification | None) -> Html:
    """The headline: one number, what it means, and the bracket it belongs to."""
    threat = run.threat
    certified, attacked = run.curve(threat.order)(threat.eps)
    value = "–" if math.isnan(attacked) else ceil_percent(attacked)
    big = tag(
        "p",
        tag("span", _most(run), class_="most"),
        tag("span", value, tag("span", " %", class_="unit"), class_="number"),
        class_="big",
    )
    clean = "Clean accuracy" if run.criterion is None else "On the data as they are"
    facts: list[tuple[str, object, str]] = [
        (clean, percent(run.clean), _interval(run.clean_interval))
    ]
    if run.mean_error is not None:
        facts.append(("Mean absolute error", f"{run.mean_error:.4g}", "on the data as they are"))
    pooled = next((row for row in run.best if row.threat == threat), None)
    if pooled is not None:
        facts.append(("Attacked", attacked_percent(attacked), _interval(pooled.interval)))
    if run.radii is not None:
        facts.append(("Certified", proved(certified), "at least, rounded down"))
    if threat.order != math.inf:
        least, most = run.curve(math.inf)(threat.eps)
        note = f"certified {proved(least)}" if run.radii is not None else "the usual threat"
        facts.append(("Point-wise, p = ∞", attacked_percent(most), note))
    facts.append(("Samples", f"{len(run):,}", ""))
    return Html(
        tag("h1", name(run.name), tag("span", " on ", class_="quiet"), name(run.data))
        + tag("div", big, _facts(facts), class_="hero")
        + tag("p", run.headline + ".", class_="headline")
        + tag("p", run.definition)
        + "".join(tag("p", text, class_="note", data_condition=True) for text in conditions(run))
        + unverified(verified)
        + _bracket(run, certified, attacked)
    )


def _most(run: Evaluation) -> str:
    """What the large number is."""
    if run.criterion is None:
        return "robust accuracy is at most"
    return f"under the worst shift {run.words.kept}: at most"


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
        rect_mark(f"fill {kind}", _share(a), 0, _share(b - a), 22)
        for kind, a, b in zip(kinds, at, at[1:])
        if b > a
    ]
    ends = {0.0: "start", 1.0: "end"}
    scale = [
        label_mark(
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
            "proved: every distribution in the ball keeps this much correct"
            if run.criterion is None
            else f"proved: in every distribution of the ball so much {run.words.stays}",
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
        else "Nothing was certified in this run: the truth lies between 0 and the attacked figure."
    )
    figure = "robust accuracy" if run.criterion is None else f"the {run.words.share}"
    caption = (
        f"What the bracket means: an attack gives an upper bound on {figure}, a "
        "certificate a lower one, and the truth "
        f"lies between the two, for this threat ({run.told(run.threat)}) and these samples."
    )
    return tag(
        "figure", picture, tag("ul", items), tag("figcaption", caption, " ", note), class_="bracket"
    )


def _share(value: float) -> str:
    return f"{100 * value:.3f}".rstrip("0").rstrip(".") + "%"


def findings_panel(run: Evaluation) -> Html | None:
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
        more = tag("summary", f"{len(fine)} checks and indicators are in order")
        listed = tag("ul", told, class_="fine", aria_label="In order")
        items.append(tag("li", word, tag("details", more, listed)))
    count = len(run.warnings)
    lead = (
        "No check and no indicator of attack failure raised a warning."
        if not count
        else f"{count} warning{'s' if count > 1 else ''}: explain "
        f"{'them' if count > 1 else 'it'} before trusting the figures."
    )
    return section("findings", "Findings", tag("ul", items, class_="findings"), lead=lead)


def curve_panel(run: Evaluation) -> Html | None:
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
    if run.landmarks:
        keys.append(("landmark", "known shifts: accuracy measured, at their eps"))
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
    share = run.words.share
    lead = f"Robust {share} over every budget eps, from one set of distances."
    shown = plot(
        "sandwich", [run], orders, f"certified and attacked {share} against eps", legend, reading
    )
    return section("curve", "Both curves", noscript, shown, lead=lead)


def attacks_panel(run: Evaluation) -> Html | None:
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
        "Accuracy" if run.criterion is None else "Right",
        "95 % interval",
        tag("th", "0 to 100 %", scope="col", data_fixed=True),
        "Spent",
        "Passes F + B",
        "Flipped",
        "Time",
    ]
    lead = (
        f"A lower {run.words.share} is a stronger attack. Spent: what the flips cost, as a share "
        "of eps; points that moved and flipped "
        "nothing are left out, the figure is the same without them. Passes: forward and "
        "backward, the mean over samples "
        "that were correct to begin with. Flipped: of those. A search that serves several "
        "threats shows its time once. All "
        "attacks: for every sample the nearest flip of all of them."
    )
    return section(
        "attacks",
        "Attacks",
        table(f"All threats: {run.setting}", heads, rows, "Table of attacks"),
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
    track = rect_mark("fill track", 0, 7, "100%", 4, rx=2)
    span = None if math.isnan(low) else line_mark("whisker", _share(low), 9, _share(high), 9)
    return tag(
        "svg",
        track,
        span,
        tag("circle", class_="fill attacked", cx=_share(value), cy=9, r=4.5),
        aria_hidden="true",
    )


def distances_panel(run: Evaluation) -> Html | None:
    """How far away the flips are, and mirrored below how far is proved to be safe."""
    flips = run.distances[(run.distances > 0) & torch.isfinite(run.distances)]
    radii = None if run.radii is None else run.radii[(run.radii > 0) & torch.isfinite(run.radii)]
    if not len(flips) and (radii is None or not len(radii)):
        return None
    known = flips if radii is None else torch.cat([flips, radii])
    end = max(1.05 * float(np.quantile(known.numpy(), 0.98)), 1.3 * run.threat.eps)
    keys = [("attacked", "nearest flips found, upwards")] + (
        [("certified", "certified radii, downwards")] if radii is not None else []
    )
    legend = tag(
        "ul",
        [tag("li", tag("span", class_=f"swatch {kind}"), words) for kind, words in keys],
        class_="legend",
    )
    told = _told_of_distances(run, flips, beyond=int((known > end).sum()))
    figure = tag(
        "figure",
        _histogram(run.threat, flips, radii, end),
        legend,
        tag("figcaption", *told),
        class_="card",
    )
    return section(
        "distances", "Distances", figure, lead="How far each sample is from its nearest known flip."
    )


def _histogram(threat: Threat, flips: Tensor, radii: Tensor | None, end: float) -> Html:
    """Bars upwards for the distances of flips, downwards for radii.

    Args:
        threat: whose eps is marked on the axis.
        flips: distances, those that are positive and finite.
        radii: likewise, or None where nothing was certified.
        end: of the axis; what lies beyond counts in the last bar.
    """
    above = _counts(flips, end)
    below = _counts(radii, end)
    most = max([*above, *below, 1])
    width = 760
    left = 40
    zero = 126
    up = 112
    bar = (width - 8 - left) / BINS
    base = zero + (up if radii is not None else 0)
    height = base + 44
    parts = [line_mark("rule", left, zero - up, width - 8, zero - up)]
    for counts, kind, sign in ((above, "attacked", -1), (below, "certified", 1)):
        for place, count in enumerate(counts):
            size = up * count / most
            top = zero - size if sign < 0 else float(zero)
            if count:
                parts.append(rect_mark(f"bar {kind}", left + place * bar + 0.5, top, bar - 1, size))
    parts.append(line_mark("axis", left, zero, width - 8, zero))
    for value, text in ticks(end, unit_of(threat, end), 6):
        x = left + value / end * (width - 8 - left)
        parts += [line_mark("axis", x, base, x, base + 4), label_mark(x, base + 17, text, "middle")]
    mark = left + threat.eps / end * (width - 8 - left)
    what = f"distance from the sample (l{threat.norm:g})"
    parts += [
        line_mark("cursor", mark, zero - up, mark, base),
        label_mark(mark + 5, zero - up + 10, f"eps {show(threat.eps)}", "start", "strong"),
        label_mark(left - 6, zero - up + 8, str(most), "end"),
        label_mark(left - 6, zero + 4, "0", "end"),
        label_mark((left + width) / 2, height - 6, what, "middle"),
    ]
    return tag(
        "svg",
        parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label="histogram of distances",
    )


def _told_of_distances(run: Evaluation, flips: Tensor, beyond: int) -> tuple[str, str]:
    """The caption of the histogram: how many samples it shows and leaves out, and the median."""
    wrong = int((run.distances == 0).sum())
    none = int((run.distances == math.inf).sum())
    told = [
        f"{len(flips):,} samples with a flip",
        f"{wrong:,} wrong to begin with (distance 0)",
        f"{none:,} with no flip known",
    ]
    if beyond:
        told.append(f"{beyond:,} beyond the axis, in its last bar")
    middle = f"Median distance of the flips {length(float(flips.median()))}." if len(flips) else ""
    return "; ".join(told) + ". ", middle


def _counts(values: Tensor | None, end: float) -> list[int]:
    if values is None:
        return []
    found: list[int] = np.histogram(values.clamp(max=end).numpy(), bins=BINS, range=(0, end))[
        0
    ].tolist()
    return found


def certificate_panel(run: Evaluation) -> Html | None:
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


def parts_of(run: Evaluation) -> list[tuple[Html, Tensor]]:
    """The samples in parts that are looked at on their own, each with its name: classes, quarters
    of the targets of a regression, both values of one label; none for several outputs.
    """
    if run.criterion is None:
        labels = torch.unique(run.y).tolist()
        return [(class_name(run, label), run.y == label) for label in labels]
    if run.targets is None or run.criterion.outputs > 1 or not len(run):
        return []
    target = run.criterion.wanted(run.targets)[:, 0].contiguous()
    if not isinstance(run.criterion, Regression):
        return [(name(f"label {v:g}"), target == v) for v in torch.unique(target).tolist()]
    ends = torch.quantile(target, torch.linspace(0, 1, QUARTERS + 1, dtype=torch.float64))
    place = torch.bucketize(target, torch.unique(ends[1:-1]), right=True)
    found = [place == k for k in torch.unique(place).tolist()]
    return [
        (name(f"{float(target[mine].min()):.4g} to {float(target[mine].max()):.4g}"), mine)
        for mine in found
    ]


def classes_panel(run: Evaluation) -> Html | None:
    """Each class on its own: how many samples, clean, and what the pooled allocation leaves of
    it at the headline's threat. Of a regression, each quarter of the targets.
    """
    parts = parts_of(run) if len(run) else []
    if not parts:
        return None
    bought = knapsack(run.distances, run.threat.eps, run.threat.order, run.mu)
    correct = run.distances > 0
    kept = correct * (1 - bought)
    sure = run.radii is not None and independent(run)
    rows = []
    for title, mine in parts:
        mass = float(run.mu[mine].sum())
        clean, robust = (
            float((run.mu[mine] * share[mine]).sum()) / mass if mass else math.nan
            for share in (correct, kept)
        )
        reached = run.distances[mine & correct]
        middle = float(reached.quantile(0.5, interpolation="higher")) if len(reached) else math.nan
        cells = [
            tag("th", title, scope="row"),
            number_cell(f"{int(mine.sum()):,}", float(mine.sum())),
            number_cell(percent(clean), clean),
            number_cell(attacked_percent(robust), robust),
            tag("td", _bars(clean, robust), class_="picture"),
            number_cell(length(middle), 1e300 if middle == math.inf else middle),
        ]
        if sure:
            cells.append(_all_of_part(run, mine, len(parts)))
        rows.append(tag("tr", cells))
    word = "Class" if run.criterion is None else "Target"
    heads = [
        word,
        "N",
        "Clean",
        "Robust",
        tag("th", "robust within clean", scope="col", data_fixed=True),
        "Median distance",
        *(["All inputs, at least"] if sure else []),
    ]
    named = classes_text(run.classes, run.info.get("data") or {}, len(run.classes or ()))
    caption = f"{len(rows)} classes occur" if run.criterion is None else "By the target"
    shown = table(caption, heads, rows, "Table of classes")
    return section(
        "classes",
        "Classes" if run.criterion is None else "Targets",
        None if named is None else tag("p", named),
        shown,
        lead=_parts_text(run, sure),
    )


def _parts_text(run: Evaluation, sure: bool) -> str:
    """What the table of classes, or of targets, shows."""
    one, many = ("class", "classes") if run.criterion is None else ("part", "parts")
    correct = "correct" if run.criterion is None else run.words.kept
    lead = (
        f"Robust: the share of the {one} that the worst distribution found for "
        f"{run.told(run.threat)} leaves {correct}. The budget is "
        f"spent where flips are near, so {many} pay unequally; over all samples it is the "
        "headline. Median distance: of the "
        "samples that are correct to begin with."
    )
    if sure:
        lead += (
            f" All inputs: with 95 % confidence for all {many} together, so much of each {one} is "
            f"certified at the headline's eps, which each {one} may then spend on its own."
        )
    return lead


def _all_of_part(run: Evaluation, mine: Tensor, parts: int) -> Html:
    """What is certified of all inputs of one part; the confidence is shared among the parts."""
    curve = of_rows(run, run.threat.order, mine)
    low = curve.population(1 - 0.05 / parts)(run.threat.eps)[0]
    return number_cell(proved(low), low)


def _bars(clean: float, robust: float) -> Html | None:
    if math.isnan(clean):
        return None
    bars = [
        rect_mark("fill track", 0, 4, "100%", 10, rx=2),
        rect_mark("fill band", 0, 4, _share(clean), 10, rx=2),
    ]
    return tag(
        "svg", bars, rect_mark("fill attacked", 0, 4, _share(robust), 10, rx=2), aria_hidden="true"
    )


def shown(value: object) -> object:
    """Plain values with absolute paths cut to their last parts.

    Args:
        value: text, a number, a list or a mapping.
    """
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, Mapping):
        return {key: shown(inner) for key, inner in value.items()}
    return [shown(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def provenance_panel(run: Evaluation) -> Html:
    """Everything that is needed to run it again."""
    orders = ", ".join(
        f"p = {spell(threat.order)} at eps {show(threat.eps)}" for threat in run.threats
    )
    facts = [
        ("model", run.name),
        ("data", f"{run.data}, {len(run):,} samples"),
        ("threats", f"{orders}; {run.setting}"),
    ]
    info = {key: shown(value) for key, value in run.info.items()}
    command = info.get("command")
    if isinstance(command, list):
        info["command"] = shlex.join(map(str, command))
    facts += flat(info)
    listed = [(tag("dt", name(what, 60)), tag("dd", name(text, 400))) for what, text in facts]
    lead = "What was evaluated, with what, and how to do it again."
    return section("provenance", "Provenance", tag("dl", listed, class_="provenance"), lead=lead)
