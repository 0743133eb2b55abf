"""One run as one HTML page: the number to report, both curves, every attack, the samples that break
first.

The page needs no network and runs no script but its own, whose hash its Content-Security-Policy
names. All of it is in the HTML; the script adds switching and sorting. Every string of a run may be
hostile: jinja2 escapes it. The same run gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from wassail.errors import InputError
from wassail.report.budget import budget_panel
from wassail.report.fragile import fragile_panel
from wassail.report.html import LONG, Panel, attacked_percent, document
from wassail.report.landmarks import landmarks_panel
from wassail.report.others import others_panel
from wassail.report.panels import (
    attacks_panel,
    certificate_panel,
    classes_panel,
    curve_panel,
    distances_panel,
    findings_panel,
    head,
    orders_panel,
    provenance_panel,
    verified_panel,
)
from wassail.report.passes import passes_panel
from wassail.report.population import population_panel
from wassail.report.units import units_panel
from wassail.writing import save

if TYPE_CHECKING:
    from wassail.evaluation.notes import Verification
    from wassail.evaluation.run import Evaluation
    from wassail.evaluation.signoff import Verdict


@dataclass(frozen=True)
class View:
    """What a page is asked to show: see `write_report`."""

    fragile: int
    verified: Verification | None
    verdicts: Sequence[Verdict]


PANELS: list[tuple[str, str, Callable[[Evaluation, View], Panel | None]]] = [
    ("verified", "Verified", lambda run, view: verified_panel(view.verified)),
    ("findings", "Findings", lambda run, view: findings_panel(run)),
    ("curve", "Both curves", lambda run, view: curve_panel(run)),
    ("orders", "All orders", lambda run, view: orders_panel(run)),
    ("population", "All inputs", lambda run, view: population_panel(run)),
    ("others", "Other people and labels", lambda run, view: others_panel(run)),
    ("landmarks", "Known shifts", lambda run, view: landmarks_panel(run)),
    ("units", "Units of the features", lambda run, view: units_panel(run)),
    ("attacks", "Attacks", lambda run, view: attacks_panel(run)),
    ("distances", "Distances", lambda run, view: distances_panel(run)),
    ("certificate", "Certificate", lambda run, view: certificate_panel(run)),
    ("fragile", "Most fragile samples", lambda run, view: fragile_panel(run, view.fragile)),
    ("classes", "Classes", lambda run, view: classes_panel(run)),
    ("budget", "What the budget buys", lambda run, view: budget_panel(run)),
    ("passes", "What passes buy", lambda run, view: passes_panel(run)),
    ("provenance", "Provenance", lambda run, view: provenance_panel(run)),
]
"""The panels of the page in their order: key, title, and what makes its inside; None leaves it
out.
"""
TITLES = {"classes": "Targets"}  # of panels of a run without classes


def write_report(
    run: Evaluation,
    path: str | PathLike[str],
    *,
    fragile: int = 24,
    verified: Verification | None = None,
    verdicts: Sequence[Verdict] = (),
) -> Path:
    """Write the page of a run to `path`, which is returned.

    fragile: how many of the samples with the nearest flips are shown as images; verified: what
    `Evaluation.verify` found, which the page then says; without it the page says that the
    run was not verified; verdicts: of requirements, with which the page then opens. The page holds
    no date and no path of its own: the same run gives the same bytes.
    """
    if fragile < 0:
        raise InputError(f"fragile is {fragile}: give the number of samples to show, 0 or more.")
    return save(path, report(run, fragile=fragile, verified=verified, verdicts=verdicts))


def report(
    run: Evaluation,
    *,
    fragile: int = 24,
    verified: Verification | None = None,
    verdicts: Sequence[Verdict] = (),
) -> str:
    """The page of `write_report` as text."""
    view = View(fragile, verified, verdicts)
    sections = []
    for key, title, make in PANELS:
        panel = make(run, view)
        if panel is not None:
            own = title if run.criterion is None else TITLES.get(key, title)
            sections.append((key, own, panel))
    attacked = run.curve(run.threat.order)(run.threat.eps)[1]
    title = f"{attacked_percent(attacked)} · {run.name[:LONG]} on {run.data[:LONG]} · wassail"
    if verdicts:
        title = f"{'HOLDS' if all(verdicts) else 'FAILS'} · {title}"
    return document(title, head(run, verified, verdicts), sections)
