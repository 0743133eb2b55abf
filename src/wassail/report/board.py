"""The board: a static site from stored runs.

An index with one sortable table for each norm, a page for each model, a page for each run with its
sandwich and known shifts, and `board.json` with the same figures. Every row has the command that
computes it again from the stored points, see `again.py`. Strings of runs may be hostile: jinja2
escapes them, and file names are made of letters and digits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from wassail.errors import InputError
from wassail.evaluation.conditions import conditions
from wassail.report.again import again
from wassail.report.html import (
    Cell,
    Head,
    Panel,
    Table,
    document,
    name,
    percent,
    render,
    said,
    spell,
)
from wassail.report.others import fed
from wassail.report.others import feed as others_feed
from wassail.report.page import write_report
from wassail.report.sides import sides_at
from wassail.report.standing import CLAIM, KINDS, SEALED, UNKNOWN, VERIFIED, Standing
from wassail.threat import box_text, show
from wassail.writing import make, save

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

FORMAT = 1  # of board.json
STANDS = {
    VERIFIED: "Verified again by the maker of this board, radii included.",
    SEALED: "Sealed with a key that the maker of this board trusts, and not verified here.",
    CLAIM: "Claims: what the runs state. Nobody who made this board has looked.",
}
ORDERS = (1.0, 2.0, math.inf)
LEAD = (
    "Accuracy under the worst distribution within Wasserstein distance eps of the test images. "
    "Attacked: at most this, a distribution that bad was built and verified. Certified: at least "
    "this, no distribution of the set is worse. p = ∞ is the point-wise threat of other boards."
)
VERIFY = (
    "In the folder that holds the run: samples, predictions, flips, budgets and curves are "
    "computed again from the stored points. --radii proves the radii again, too, which takes "
    "as long as the run. Words in capital letters are yours to supply: a command that names a "
    "stranger's code or files would run them."
)
MISSING = "checkpoint not available here"


def write_board(
    runs: Sequence[Evaluation],
    folder: str | PathLike[str],
    published: Sequence[Mapping[str, Any]] = (),
    standings: Sequence[Standing] | None = None,
) -> Path:
    """Write the site and return its index.

    Args:
        runs: evaluations that were loaded from their folders.
        folder: where the site goes; made if it is not there.
        published: lines of a paper, listed apart, as `paper.published.Published.record` has them.
        standings: of the runs; default None, all are claims.
    """
    if not runs:
        raise InputError("there is no run for the board: give at least one.")
    stand = [UNKNOWN] * len(runs) if standings is None else list(standings)
    target = Path(folder)
    for part in (target, target / "runs", target / "models"):
        make(part)
    pages = _slugs(runs)
    for run, slug in zip(runs, pages):
        write_report(run, target / "runs" / f"{slug}.html")
    models: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        models.setdefault(run.name, []).append(place)
    links: dict[str, str] = {}
    for model, places in models.items():
        file = f"models/{_slug(model)}-{len(links) + 1}.html"
        links[model] = file
        mine = [(runs[k], pages[k], stand[k]) for k in places]
        save(target / file, _model_page(model, mine))
    entries = [entry(run, known) for run, known in zip(runs, stand)]
    feed = {
        "format": FORMAT,
        "runs": entries,
        "published": [{**line, "note": MISSING} for line in published],
    }
    save(target / "board.json", json.dumps(feed, indent=1, allow_nan=False) + "\n")
    return save(target / "index.html", _index(runs, pages, links, published, stand))


def entry(run: Evaluation, known: Standing = UNKNOWN) -> dict[str, Any]:
    """One run for the feed; certified figures are rounded down and attacked ones up, in %."""
    model = run.info.get("model", {})
    way = again(run)
    figures = {}
    for order in ORDERS:
        figures[f"{order:g}"] = fed(sides_at(run, replace(run.threat, order=order)))
    return {
        "model": run.name,
        "weights": model.get("weights"),
        "data": run.data,
        "samples": len(run),
        "norm": f"{run.threat.norm:g}",
        "domain": run.threat.domain,
        "eps": run.threat.eps,
        "clean": None if math.isnan(run.clean) else round(100 * run.clean, 2),
        "orders": figures,
        **({} if run.criterion is None else {"task": run.words.kept}),
        **({"others": others_feed(run)} if run.others else {}),
        "standing": known.kind,
        "standing_text": known.text,
        "conditions": list(conditions(run)),
        "attacks": sorted({row.attack for row in run.rows}),
        "certified_by": None if run.certificate is None else run.certificate.get("method"),
        "landmarks": [
            {
                "name": landmark.name,
                "accuracy": round(100 * landmark.accuracy, 2),
                "eps": {f"{order:g}": value for order, value in landmark.eps.items()},
            }
            for landmark in run.landmarks
        ],
        "versions": run.info.get("versions"),
        "verify": way.command,
        "supply": list(way.supply),
    }


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:60] or "model"


def _slugs(runs: Sequence[Evaluation]) -> list[str]:
    return [f"{_slug(run.name)}-l{run.threat.norm:g}-{place}" for place, run in enumerate(runs, 1)]


def _heads(first: Sequence[str]) -> list[str | Head]:
    heads: list[str | Head] = [Head(head, text=True) if head == "Data" else head for head in first]
    for order in ORDERS:
        heads += [Head(side, f"p = {spell(order)}") for side in ("Certified", "Attacked")]
    return heads


def _figures(run: Evaluation) -> list[Cell]:
    cells = []
    for order in ORDERS:
        cells += sides_at(run, replace(run.threat, order=order)).cells[1:]
    return cells


def _link(href: str, text: object) -> Markup:
    return Markup('<a href="{}">{}</a>').format(href, text)


def _index(
    runs: Sequence[Evaluation],
    pages: Sequence[str],
    links: Mapping[str, str],
    published: Sequence[Mapping[str, Any]],
    stand: Sequence[Standing],
) -> str:
    groups: dict[tuple[float, str], list[int]] = {}
    for place, run in enumerate(runs):
        task = "" if run.criterion is None else f", {run.words.kept}"
        box = box_text(run.threat.domain) if run.boxes is None else "own boxes of samples"
        groups.setdefault((run.threat.norm, box + task), []).append(place)
    sections = []
    ordered = sorted(groups.items(), key=lambda item: -item[0][0])
    for number, ((norm, where), places) in enumerate(ordered, 1):
        title = f"l{norm:g}, {where}"
        tables: list[object] = []
        for kind in KINDS:
            mine = [k for k in places if stand[k].kind == kind]
            if mine:
                tables.append(said(STANDS[kind], "note"))
                tables.append(_table(runs, pages, links, mine, f"{title}, {kind}"))
        sections.append((f"group-{number}", title, Panel(tables)))
    if published:
        sections.append(("published", "Published, not measured here", _published(published)))
    models = len(links)
    title = f"{models} network{'s' if models != 1 else ''}, {len(runs)} runs"
    head = render("board.html.j2", title=title, lead=LEAD)
    return document("Board of distributional robustness · wassail", head, sections, wide=True)


def _table(
    runs: Sequence[Evaluation],
    pages: Sequence[str],
    links: Mapping[str, str],
    places: Sequence[int],
    title: str,
) -> Table:
    """The rows of one norm and box, those that lose least over Omega_1 first."""
    ranked = sorted(places, key=lambda k: -_rank(runs[k]))
    rows = []
    for k in ranked:
        run = runs[k]
        own = " ".join(conditions(run))
        mark = Markup('<span title="{}">own choice of weights, boxes or units</span>').format(own)
        cells = [
            Cell(_link(links[run.name], name(run.name, 40)), None, [mark if own else ""], "head"),
            Cell(name(run.data, 30), kind="text"),
            Cell(f"{len(run):,}", float(len(run))),
            Cell(_link(f"runs/{pages[k]}.html", show(run.threat.eps)), run.threat.eps),
            Cell(percent(run.clean), run.clean),
        ]
        rows.append([*cells, *_figures(run)])
    heads = _heads(["Model", "Data", "N", "eps", "Clean"])
    return Table(f"Ranked by attacked accuracy over Omega_1; {title}", heads, rows, title)


def _rank(run: Evaluation) -> float:
    value = run.curve(1.0)(run.threat.eps)[1]
    return -1.0 if math.isnan(value) else value


def _model_page(model: str, runs: Sequence[tuple[Evaluation, str, Standing]]) -> str:
    """Its figures in every norm, the way to its sandwiches, and the commands."""
    rows = []
    commands = []
    for run, slug, known in runs:
        threat = f"l{run.threat.norm:g}, eps {show(run.threat.eps)}"
        cells = [
            Cell(_link(f"../runs/{slug}.html", threat), kind="head"),
            Cell(name(run.data, 30), kind="text"),
            Cell(f"{len(run):,}", float(len(run))),
            Cell(percent(run.clean), run.clean),
        ]
        rows.append([*cells, *_figures(run)])
        commands.append(((known.text, *conditions(run)), again(run)))
    figures = Table("Both sides in every norm", _heads(["Norm", "Data", "N", "Clean"]), rows)
    weights = next(
        (run.info["model"].get("weights") for run, _, _ in runs if "model" in run.info), None
    )
    verify = render("verify.html.j2", commands=commands, weights=weights or "unknown")
    norms = "A norm leads to its sandwich, its known shifts and its samples."
    head = Markup("<h1>{}</h1>{}").format(
        name(model), said(_link("../index.html", "All networks"), "lead")
    )
    sections = [
        ("figures", "Figures", Panel([figures], norms)),
        ("verify", "Verify it yourself", Panel([verify], VERIFY)),
    ]
    return document(f"{model[:60]} · wassail", head, sections, wide=True)


def _published(lines: Sequence[Mapping[str, Any]]) -> Panel:
    rows = []
    for line in lines:
        cells = [
            Cell(name(line["model"], 50), kind="head"),
            Cell(name(line["architecture"], 30), kind="text"),
            Cell(line["data"], kind="text"),
            Cell(f"l{line['norm']}, {show(line['eps'])}", kind="text"),
            Cell(f"{line['clean']:.2f}", line["clean"]),
        ]
        for order in ORDERS:
            value = line["attacked"].get(f"{order:g}")
            cells.append(Cell("–" if value is None else f"{value:.2f}", value))
        rows.append([*cells, Cell(MISSING, kind="text")])
    heads = ["Model", "Architecture", "Data", "Threat", "Clean"]
    heads += [f"Attacked, p = {spell(order)}" for order in ORDERS]
    lead = (
        "The models of the paper's Table 1 with the figures that it publishes, in %: WDA++ over "
        "Omega_1 and Omega_2, AutoAttack over Omega_inf. Nothing of them was measured or certified "
        "here."
    )
    return Panel([Table("The paper's Table 1", [*heads, "Measured here"], rows)], lead)
