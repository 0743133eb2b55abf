"""The panels of the page of a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from wassail.evaluation.conditions import conditions
from wassail.evaluation.criterion import Regression
from wassail.evaluation.signoff import independent, of_rows
from wassail.report.budget import class_name
from wassail.report.drawing import (
    SHARES,
    USUAL,
    Picture,
    label_mark,
    line_mark,
    orders_picture,
    plot,
    rect_mark,
    ticks,
    unit_of,
)
from wassail.report.html import (
    Cell,
    Head,
    Panel,
    Table,
    attacked_percent,
    duration,
    flat,
    interval_text,
    length,
    name,
    percent,
    proved,
    proved_cell,
    render,
    said,
    share_text,
    spell,
)
from wassail.report.sides import sides_at
from wassail.report.units import eps_text
from wassail.threat import ceil_percent, show
from wassail.transport.allocation import knapsack
from wassail.writing import without_folders
from wassail.zoo.classes import classes_text

if TYPE_CHECKING:
    from wassail.evaluation.notes import Verification
    from wassail.evaluation.result import Row
    from wassail.evaluation.run import Evaluation
    from wassail.evaluation.signoff import Verdict
    from wassail.threat import Threat

BINS = 40
QUARTERS = 4  # parts of the targets of a regression


def unverified(verified: Verification | None) -> Markup:
    """Whether the run was verified with the model in hand."""
    if verified is None:
        state = "no"
        text = (
            "Not verified by its reader: these are the figures that the run states. Anyone can "
            "write a run; with the model, wassail verify RUN MODEL computes them again."
        )
    elif verified:
        state = "yes"
        text = (
            "Verified by its reader: nothing that was checked against the model is false. "
            "What was not checked is listed below."
        )
    else:
        state = "false"
        text = (
            f"FALSE: {len(verified.problems)} statements of this run do not hold for the "
            "model. They are listed below."
        )
    return Markup('<p class="note" data-verified="{}">{}</p>').format(state, text)


def verified_panel(verified: Verification | None) -> Panel | None:
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
    listed = [(word, text, "") for word, texts in kinds for text in texts]
    lead = (
        "What the reader of the run computed again with the model at hand; random choices "
        f"with seed {verified.seed}."
    )
    return Panel([render("findings.html.j2", loud=listed, fine=())], lead)


def head(
    run: Evaluation, verified: Verification | None, verdicts: Sequence[Verdict] = ()
) -> Markup:
    """What was required of it, the headline, what it means, and the bracket it belongs to."""
    threat = run.threat
    certified, attacked = run.curve(threat.order)(threat.eps)
    return render(
        "head.html.j2",
        run=run,
        most=_most(run),
        number="–" if math.isnan(attacked) else ceil_percent(attacked),
        facts=_facts(_head_facts(run, certified, attacked)),
        verdicts=verdicts,
        holds=all(verdicts),
        eps=eps_text(run),
        conditions=conditions(run),
        unverified=unverified(verified),
        certified=run.radii is not None,
        **_bracket(run, certified if run.radii is not None else 0.0, attacked),
    )


def _head_facts(
    run: Evaluation, certified: float, attacked: float
) -> list[tuple[str, object, str]]:
    """The figures beside the large number."""
    threat = run.threat
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
    return [*facts, ("Samples", f"{len(run):,}", "")]


def _most(run: Evaluation) -> str:
    """What the large number is."""
    if run.criterion is None:
        return "robust accuracy is at most"
    return f"under the worst shift {run.words.kept}: at most"


def _facts(facts: Sequence[tuple[str, object, str]]) -> Markup:
    """A few figures side by side: what, how much, and a remark."""
    return render("facts.html.j2", facts=facts)


def _interval(interval: tuple[float, float]) -> str:
    text = interval_text(interval)
    return f"{text} % (95 %)" if text else ""


def _bracket(run: Evaluation, certified: float, attacked: float) -> dict[str, object]:
    """All samples as one bar: proved, not known, broken by an attack, wrong to begin with."""
    if not len(run):
        return {"bars": (), "words": (), "scale": (), "caption": ""}
    clean = max(run.clean, attacked)
    at = [0.0, certified, attacked, clean, 1.0]
    kinds = ("certified", "band", "attacked", "wrong")
    kept = "every distribution in the ball keeps this much correct"
    if run.criterion is not None:
        kept = f"in every distribution of the ball so much {run.words.stays}"
    words = [
        ("certified", proved(certified), f"proved: {kept}"),
        ("band", percent(attacked - certified), "not known: neither proved nor attacked"),
        (
            "attacked",
            percent(clean - attacked),
            "lost to a distribution in the ball that was built and verified",
        ),
        ("wrong", percent(1 - clean), "wrong to begin with"),
    ]
    figure = "robust accuracy" if run.criterion is None else f"the {run.words.share}"
    caption = (
        f"What the bracket means: an attack gives an upper bound on {figure}, a "
        "certificate a lower one, and the truth "
        f"lies between the two, for this threat ({run.told(run.threat)}) and these samples."
    )
    ends = {0.0: "start", 1.0: "end"}
    return {
        "bars": list(zip(kinds, at, at[1:])),
        "words": words if run.radii is not None else words[1:],
        "scale": [(share, ends.get(share, "middle")) for share in SHARES],
        "caption": caption,
    }


def findings_panel(run: Evaluation) -> Panel | None:
    """What the checks and the indicators of attack failure say, warnings first."""
    if not run.findings:
        return None
    words = {"warning": "⚠ Warning", "note": "Note"}
    loud = [
        (word, finding.text, finding.name)
        for level, word in words.items()
        for finding in run.findings
        if finding.level == level
    ]
    fine = [finding for finding in run.findings if finding.level == "ok"]
    count = len(run.warnings)
    lead = (
        "No check and no indicator of attack failure raised a warning."
        if not count
        else f"{count} warning{'s' if count > 1 else ''}: explain "
        f"{'them' if count > 1 else 'it'} before trusting the figures."
    )
    return Panel([render("findings.html.j2", loud=loud, fine=fine)], lead)


def curve_panel(run: Evaluation) -> Panel | None:
    """The sandwich: certified and attacked accuracy for every eps."""
    if not len(run):
        return None
    keys = [("attacked", "attacked: some distribution is this bad")]
    tiles = [("attacked", "attacked, at most")]
    if run.radii is not None:
        keys.insert(0, ("certified", "certified: proved, never below"))
        keys.insert(1, ("band", "not known: between the two"))
        tiles = [("certified", "certified, at least"), *tiles, ("gap", "not known")]
    if run.landmarks:
        keys.append(("landmark", "known shifts: accuracy measured, at their eps"))
    share = run.words.share
    shown = plot(
        "sandwich",
        [run],
        sorted({*run.orders, *USUAL}),
        f"certified and attacked {share} against eps",
        render("legend.html.j2", keys=keys),
        render("reading.html.j2", id="sandwich", tiles=tiles),
    )
    still = said("Scripts are off: every order is drawn, and nothing moves.", "note")
    noscript = Markup("<noscript>{}</noscript>").format(still)
    lead = f"Robust {share} over every budget eps, from one set of distances."
    return Panel([noscript, shown], lead)


def orders_panel(run: Evaluation) -> Panel | None:
    """All three orders in one picture, both sides."""
    if not len(run):
        return None
    eps = run.threat.eps
    most = {order: attacked_percent(run.curve(order)(eps)[1]) for order in USUAL}
    keys = [f"p = {spell(p)}: at most {figure} at eps {show(eps)}" for p, figure in most.items()]
    lead = (
        "Thick: attacked. Thin: certified. A larger order is a smaller set of distributions, so "
        "its curves lie higher: what a budget buys if few samples may take all of it (p = 1), and "
        "if every sample has its own (p = ∞, the point-wise threat)."
    )
    return Panel([render("orders.html.j2", picture=orders_picture(run), keys=keys)], lead)


def attacks_panel(run: Evaluation) -> Panel | None:
    """Every attack over every threat, and all of them pooled."""
    rows = [_attack(row, "all attacks") for row in run.best]
    rows += [_attack(row, row.title) for row in run.rows]
    if not rows:
        return None
    right = "Accuracy" if run.criterion is None else "Right"
    heads: list[str | Head] = ["Attack", "p", "eps", right, "95 % interval"]
    heads += [Head("0 to 100 %", fixed=True), "Spent", "Passes F + B", "Flipped", "Time"]
    lead = (
        f"A lower {run.words.share} is a stronger attack. Spent: what the flips cost, as a share "
        "of eps; points that moved and flipped nothing are left out, the figure is the same "
        "without them. Passes: forward and backward, the mean over samples that were correct to "
        "begin with. Flipped: of those. A search that serves several threats shows its time once. "
        "All attacks: for every sample the nearest flip of all of them."
    )
    caption = f"All threats: {run.setting}"
    return Panel([Table(caption, heads, rows, "Table of attacks", strong=len(run.best))], lead)


def _attack(row: Row, title: str) -> list[Cell]:
    low, high = row.interval
    spent = row.cost / row.threat.eps
    order = 1e300 if row.threat.order == math.inf else row.threat.order
    return [
        Cell(name(title, 40), kind="head"),
        Cell(spell(row.threat.order), order),
        Cell(show(row.threat.eps), row.threat.eps),
        Cell(attacked_percent(row.accuracy), row.accuracy),
        Cell(interval_text(row.interval) or "–", low),
        Cell(_whisker(row.accuracy, low, high), kind="picture"),
        Cell(f"{100 * spent:.1f} %", spent),
        Cell(f"{row.forwards:,.1f} + {row.backwards:,.1f}", row.forwards + row.backwards),
        Cell(f"{100 * row.flipped:.1f} %", row.flipped),
        Cell(duration(row.seconds), row.seconds),
    ]


def _whisker(value: float, low: float, high: float) -> Markup | None:
    """An accuracy on the scale from 0 to 1 with its interval."""
    if math.isnan(value):
        return None
    ends = None if math.isnan(low) else (share_text(low), share_text(high))
    return render("whisker.html.j2", ends=ends, value=share_text(value))


def distances_panel(run: Evaluation) -> Panel | None:
    """How far away the flips are, and mirrored below how far is proved to be safe."""
    flips = run.distances[(run.distances > 0) & torch.isfinite(run.distances)]
    radii = None if run.radii is None else run.radii[(run.radii > 0) & torch.isfinite(run.radii)]
    if not len(flips) and (radii is None or not len(radii)):
        return None
    known = flips if radii is None else torch.cat([flips, radii])
    end = max(1.05 * float(np.quantile(known.numpy(), 0.98)), 1.3 * run.threat.eps)
    keys = [("attacked", "nearest flips found, upwards")]
    if radii is not None:
        keys.append(("certified", "certified radii, downwards"))
    shown = render(
        "distances.html.j2",
        picture=_histogram(run.threat, flips, radii, end),
        legend=render("legend.html.j2", keys=keys),
        caption=_told_of_distances(run, flips, beyond=int((known > end).sum())),
    )
    return Panel([shown], "How far each sample is from its nearest known flip.")


def _histogram(threat: Threat, flips: Tensor, radii: Tensor | None, end: float) -> Picture:
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
    width, left, zero, up = 760, 40, 126, 112
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
    for place, (value, text) in enumerate(ticks(end, unit_of(threat, end), 6)):
        x = left + value / end * (width - 8 - left)
        minor = "minor" if place % 2 else ""
        parts += [line_mark("axis", x, base, x, base + 4)]
        parts += [label_mark(x, base + 17, text, "middle", minor)]
    mark = left + threat.eps / end * (width - 8 - left)
    what = f"distance from the sample (l{threat.norm:g})"
    parts += [
        line_mark("cursor", mark, zero - up, mark, base),
        label_mark(mark + 5, zero - up + 10, f"eps {show(threat.eps)}", "start", "strong"),
        label_mark(left - 6, zero - up + 8, str(most), "end"),
        label_mark(left - 6, zero + 4, "0", "end"),
        label_mark((left + width) / 2, height - 6, what, "middle"),
    ]
    return Picture(width, height, "histogram of distances", parts)


def _told_of_distances(run: Evaluation, flips: Tensor, beyond: int) -> str:
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
    return "; ".join(told) + ". " + middle


def _counts(values: Tensor | None, end: float) -> list[int]:
    if values is None:
        return []
    counts, _ = np.histogram(values.clamp(max=end).numpy(), bins=BINS, range=(0, end))
    found: list[int] = counts.tolist()
    return found


def certificate_panel(run: Evaluation) -> Panel | None:
    """What is proved: by which method, for how many samples exactly, and the certified accuracy
    at every threat.
    """
    if run.radii is None:
        return None
    right = run.radii[run.distances > 0]
    exact = int(run.exact.sum()) if run.exact is not None else 0
    middle = length(float(right.median())) if len(right) else "–"
    facts: list[tuple[str, object, str]] = [
        ("Method", name(run.certificate.get("method", "not recorded")), ""),
        ("Arithmetic", name(run.certificate.get("arithmetic", "exact")), "that the radii hold for"),
        ("Exact radii", f"{exact:,}", f"of {len(run):,}"),
        ("Median radius", middle, "of the correct samples"),
        ("Positive radii", f"{int((right > 0).sum()):,}", f"of {len(right):,} correct samples"),
    ]
    if run.certificate.get("seconds") is not None:
        facts.append(("Time", duration(float(run.certificate["seconds"])), ""))
    rows = []
    for found in (sides_at(run, threat) for threat in run.threats):
        gap = found.attacked - (found.certified or 0.0)
        rows.append([*found.cells, Cell(percent(gap), gap)])
    heads = ["Threat", "Certified, at least", "Attacked, at most", "Not known"]
    lead = "A radius is a proof that nothing within it flips. Certified figures are rounded down."
    card = Markup('<div class="card">{}</div>').format(_facts(facts))
    sides = Table("Both sides at each threat", heads, rows, "Certified and attacked")
    return Panel([card, sides], lead)


def parts_of(run: Evaluation) -> list[tuple[Markup, Tensor]]:
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


def classes_panel(run: Evaluation) -> Panel | None:
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
            Cell(title, kind="head"),
            Cell(f"{int(mine.sum()):,}", float(mine.sum())),
            Cell(percent(clean), clean),
            Cell(attacked_percent(robust), robust),
            Cell(_bars(clean, robust), kind="picture"),
            Cell(length(middle), 1e300 if middle == math.inf else middle),
        ]
        if sure:
            cells.append(_all_of_part(run, mine, len(parts)))
        rows.append(cells)
    kind = "Class" if run.criterion is None else "Target"
    heads: list[str | Head] = [kind, "N", "Clean", "Robust"]
    heads += [Head("robust within clean", fixed=True), "Median distance"]
    heads += ["All inputs, at least"] if sure else []
    named = classes_text(run.classes, run.info.get("data") or {}, len(run.classes or ()))
    caption = f"{len(rows)} classes occur" if run.criterion is None else "By the target"
    shown = Table(caption, heads, rows, "Table of classes")
    return Panel([named, shown], _parts_text(run, sure))


def _parts_text(run: Evaluation, sure: bool) -> str:
    """What the table of classes, or of targets, shows."""
    one, many = ("class", "classes") if run.criterion is None else ("part", "parts")
    correct = "correct" if run.criterion is None else run.words.kept
    lead = (
        f"Robust: the share of the {one} that the worst distribution found for "
        f"{run.told(run.threat)} leaves {correct}. The budget is spent where flips are near, so "
        f"{many} pay unequally; over all samples it is the headline. Median distance: of the "
        "samples that are correct to begin with."
    )
    if sure:
        lead += (
            f" All inputs: with 95 % confidence for all {many} together, so much of each {one} is "
            f"certified at the headline's eps, which each {one} may then spend on its own."
        )
    return lead


def _all_of_part(run: Evaluation, mine: Tensor, parts: int) -> Cell:
    """What is certified of all inputs of one part; the confidence is shared among the parts."""
    curve = of_rows(run, run.threat.order, mine)
    return proved_cell(curve.population(1 - 0.05 / parts)(run.threat.eps)[0])


def _bars(clean: float, robust: float) -> Markup | None:
    if math.isnan(clean):
        return None
    return render("bars.html.j2", clean=share_text(clean), robust=share_text(robust))


def shown(value: object) -> object:
    """Plain values with absolute paths cut to their last parts.

    value: text, a number, a list or a mapping.
    """
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, Mapping):
        return {key: shown(inner) for key, inner in value.items()}
    return [shown(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def provenance_panel(run: Evaluation) -> Panel:
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
    listed = render("provenance.html.j2", facts=[*facts, *flat(info)])
    return Panel([listed], "What was evaluated, with what, and how to do it again.")
