"""The board: a static site from stored runs.

An index with one sortable table for each norm, a page for each model, a page for each run with its
sandwich and known shifts, and `board.json` with the same figures. Every row has the command that
computes it again from the stored points, see `again.py`. Strings of runs may be hostile: `tag`
escapes them, and file names are made of letters and digits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.errors import InputError
from wassail.evaluation.conditions import conditions
from wassail.report.again import again
from wassail.report.html import (
    Html,
    attacked_percent,
    document,
    name,
    number_cell,
    percent,
    proved,
    save,
    section,
    spell,
    table,
    tag,
)
from wassail.report.others import feed as others_feed
from wassail.report.page import write_report
from wassail.report.standing import CLAIM, KINDS, SEALED, UNKNOWN, VERIFIED, Standing
from wassail.threat import box_text, ceil_percent, floor_percent, show
from wassail.writing import make

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


@dataclass(frozen=True)
class Published:
    """A line of a paper whose model is not at hand.

    Args:
        name: of the model.
        architecture: of the model.
        data: name of the data set.
        norm: ground norm.
        eps: budget.
        clean: accuracy on the data, in %.
        attacked: published accuracy in % by order.
    """

    name: str
    architecture: str
    data: str
    norm: float
    eps: float
    clean: float
    attacked: Mapping[float, float]


def write_board(
    runs: Sequence[Evaluation],
    folder: str | PathLike[str],
    published: Sequence[Published] = (),
    standings: Sequence[Standing] | None = None,
) -> Path:
    """Write the site and return its index.

    Args:
        runs: evaluations that were loaded from their folders.
        folder: where the site goes; made if it is not there.
        published: lines of a paper, listed apart.
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
        save(_model_page(model, mine), target / file)
    entries = [entry(run, known) for run, known in zip(runs, stand)]
    feed = {"format": FORMAT, "runs": entries, "published": [vars_of(line) for line in published]}
    save(json.dumps(feed, indent=1, allow_nan=False) + "\n", target / "board.json")
    return save(_index(runs, pages, links, published, stand), target / "index.html")


def vars_of(line: Published) -> dict[str, Any]:
    """A published line for the feed."""
    return {
        "model": line.name,
        "architecture": line.architecture,
        "data": line.data,
        "norm": f"{line.norm:g}",
        "eps": line.eps,
        "clean": line.clean,
        "attacked": {f"{order:g}": value for order, value in line.attacked.items()},
        "note": "checkpoint not available here",
    }


def entry(run: Evaluation, known: Standing = UNKNOWN) -> dict[str, Any]:
    """One run for the feed; certified figures are rounded down and attacked ones up, in %.

    Args:
        run: the evaluation.
        known: how it stands.
    """
    model = run.info.get("model", {})
    way = again(run)
    figures = {}
    for order in ORDERS:
        certified, attacked = run.curve(order)(run.threat.eps)
        figures[f"{order:g}"] = {
            "certified": None if run.radii is None else float(floor_percent(certified)),
            "attacked": None if math.isnan(attacked) else float(ceil_percent(attacked)),
        }
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


def _heads(first: Sequence[object]) -> list[object]:
    heads = [
        tag("th", head, scope="col", class_="text") if head == "Data" else head for head in first
    ]
    for order in ORDERS:
        above = tag("small", f"p = {spell(order)}")
        heads += [tag("th", above, side, scope="col") for side in ("Certified", "Attacked")]
    return heads


def _figures(run: Evaluation) -> list[Html]:
    cells = []
    for order in ORDERS:
        certified, attacked = run.curve(order)(run.threat.eps)
        known = run.radii is not None
        cells += [
            number_cell(proved(certified) if known else "–", certified if known else None),
            number_cell(attacked_percent(attacked), attacked),
        ]
    return cells


def _index(
    runs: Sequence[Evaluation],
    pages: Sequence[str],
    links: Mapping[str, str],
    published: Sequence[Published],
    stand: Sequence[Standing],
) -> str:
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, run in enumerate(runs):
        task = "" if run.criterion is None else f", {run.words.kept}"
        box = box_text(run.threat.domain) if run.boxes is None else "own boxes of samples"
        where = box + task
        groups.setdefault((run.threat.norm, where), []).append(place)
    parts = []
    contents = []
    for number, (key, places) in enumerate(
        sorted(groups.items(), key=lambda item: -float(str(item[0][0]))), 1
    ):
        title = f"l{key[0]:g}, {key[1]}"
        contents.append((f"group-{number}", title))
        tables = []
        for kind in KINDS:
            mine = [k for k in places if stand[k].kind == kind]
            if mine:
                tables.append(tag("p", STANDS[kind], class_="note"))
                tables.append(_table(runs, pages, links, mine, f"{title}, {kind}"))
        parts.append(section(f"group-{number}", title, tables))
    if published:
        contents.append(("published", "Published"))
        parts.append(_published(published))
    models = len(links)
    head = Html(
        tag("h1", f"{models} network{'s' if models != 1 else ''}, {len(runs)} runs")
        + tag("p", LEAD, class_="lead")
        + tag(
            "p",
            "The figures as data: ",
            tag("a", "board.json", href="board.json"),
            ". Every row can be computed again from its stored points: see the model's page.",
        )
    )
    return document(
        "Board of distributional robustness · wassail", head, contents, *parts, wide=True
    )


def _table(
    runs: Sequence[Evaluation],
    pages: Sequence[str],
    links: Mapping[str, str],
    places: Sequence[int],
    title: str,
) -> Html:
    """The rows of one norm and box, those that lose least over Omega_1 first."""
    ranked = sorted(places, key=lambda k: -_rank(runs[k]))
    rows = []
    for k in ranked:
        run = runs[k]
        model = tag("a", name(run.name, 40), href=links[run.name])
        own = conditions(run)
        mark = tag("small", " own choice of weights, boxes or units", title=" ".join(own))
        cells = [
            tag("th", model, mark if own else None, scope="row"),
            tag("td", name(run.data, 30), class_="text"),
            number_cell(f"{len(run):,}", float(len(run))),
            number_cell(
                tag("a", show(run.threat.eps), href=f"runs/{pages[k]}.html"), run.threat.eps
            ),
            number_cell(percent(run.clean), run.clean),
        ]
        rows.append(tag("tr", cells, _figures(run)))
    heads = _heads(["Model", "Data", "N", "eps", "Clean"])
    return table(f"Ranked by attacked accuracy over Omega_1; {title}", heads, rows, title)


def _rank(run: Evaluation) -> float:
    value = run.curve(1.0)(run.threat.eps)[1]
    return -1.0 if math.isnan(value) else value


def _model_page(model: str, runs: Sequence[tuple[Evaluation, str, Standing]]) -> str:
    """Its figures in every norm, the way to its sandwiches, and the commands."""
    rows = []
    commands = []
    for run, slug, known in runs:
        link = tag(
            "a", f"l{run.threat.norm:g}, eps {show(run.threat.eps)}", href=f"../runs/{slug}.html"
        )
        cells = [
            tag("th", link, scope="row"),
            tag("td", name(run.data, 30), class_="text"),
            number_cell(f"{len(run):,}", float(len(run))),
            number_cell(percent(run.clean), run.clean),
        ]
        rows.append(tag("tr", cells, _figures(run)))
        way = again(run)
        commands += [tag("p", text) for text in (known.text, *conditions(run))]
        commands.append(tag("pre", tag("code", way.command)))
        if way.supply:
            commands.append(tag("ul", [tag("li", text) for text in way.supply]))
    heads = _heads(["Norm", "Data", "N", "Clean"])
    figures = table("Both sides in every norm", heads, rows, "Both sides in every norm")
    weights = next(
        (run.info["model"].get("weights") for run, _, _ in runs if "model" in run.info), None
    )
    head = Html(
        tag("h1", name(model))
        + tag("p", tag("a", "All networks", href="../index.html"), class_="lead")
    )
    lead = (
        "In the folder that holds the run: samples, predictions, flips, budgets and curves are "
        "computed again from the stored points. --radii proves the radii again, too, which takes "
        "as long as the run. Words in capital letters are yours to supply: a command that names a "
        "stranger's code or files would run them."
    )
    return document(
        f"{model[:60]} · wassail",
        head,
        [("figures", "Figures"), ("verify", "Verify")],
        section(
            "figures",
            "Figures",
            figures,
            lead="A norm leads to its sandwich, its known shifts and its samples.",
        ),
        section(
            "verify",
            "Verify it yourself",
            commands,
            tag("p", "Weights: sha256 ", weights or "unknown"),
            lead=lead,
        ),
        wide=True,
    )


def _published(lines: Sequence[Published]) -> Html:
    rows = []
    for line in lines:
        cells = [
            tag("th", name(line.name, 50), scope="row"),
            tag("td", name(line.architecture, 30), class_="text"),
            tag("td", line.data, class_="text"),
            tag("td", f"l{line.norm:g}, {show(line.eps)}", class_="text"),
            number_cell(f"{line.clean:.2f}", line.clean),
        ]
        cells += [
            number_cell(f"{line.attacked[order]:.2f}", line.attacked[order])
            if order in line.attacked
            else number_cell("–", None)
            for order in ORDERS
        ]
        cells.append(tag("td", "checkpoint not available here", class_="text"))
        rows.append(tag("tr", cells))
    heads: list[object] = ["Model", "Architecture", "Data", "Threat", "Clean"]
    heads += [f"Attacked, p = {spell(order)}" for order in ORDERS]
    heads.append("Measured here")
    lead = (
        "The models of the paper's Table 1 with the figures that it publishes, in %: WDA++ over "
        "Omega_1 and Omega_2, AutoAttack over Omega_inf. Nothing of them was measured or certified "
        "here."
    )
    return section(
        "published",
        "Published, not measured here",
        table("The paper's Table 1", heads, rows, "The paper's Table 1"),
        lead=lead,
    )
