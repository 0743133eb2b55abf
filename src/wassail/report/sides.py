"""Both sides at one threat, for the terminal, the page, the model card, the board and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import independent
from wassail.report.html import Cell, attacked_percent, proved_cell, spell
from wassail.threat import Threat, ceil_percent, floor_percent, show
from wassail.transport.curve import RiskCurve

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Sides:
    """The accuracy at a threat, proved and found.

    Args:
        threat: order and eps.
        curve: whose value there it is.
        certified: at least so much; None where nothing was certified.
        attacked: at most so much.
        independent: whether the samples say something about all inputs like them.
    """

    threat: Threat
    curve: RiskCurve
    certified: float | None
    attacked: float
    independent: bool

    @cached_property
    def population(self) -> tuple[float | None, float] | None:
        """Both sides of all inputs, with `CONFIDENCE`; None where nothing is known of them."""
        if not self.independent:
            return None
        low, high = self.curve.population(CONFIDENCE)(self.threat.eps)
        return (None if self.certified is None else low), high

    @property
    def texts(self) -> tuple[str, str]:
        """The two figures in %, rounded to the safe side."""
        return percents(self.certified, self.attacked)

    @property
    def cells(self) -> list[Cell]:
        """The threat and its two figures, as a row of a table begins."""
        title = f"p = {spell(self.threat.order)}, eps {show(self.threat.eps)}"
        return [Cell(title, kind="head"), *side_cells(self.certified, self.attacked)]


def sides_at(run: Evaluation, threat: Threat) -> Sides:
    """Both sides of a run at a threat, which may be one with other people and labels."""
    others = threat in run.others_threats
    curve = (run.others_curve if others else run.curve)(threat.order)
    certified, attacked = curve(threat.eps)
    least = None if run.radii is None else certified
    return Sides(threat, curve, least, attacked, independent(run))


def side_cells(certified: float | None, attacked: float) -> list[Cell]:
    """Two cells of a table, of which the first is a dash where nothing was certified."""
    return [proved_cell(certified), Cell(attacked_percent(attacked), attacked)]


def percents(certified: float | None, attacked: float) -> tuple[str, str]:
    """Two figures in %, rounded down and up; "none" where nothing was certified."""
    least = "none" if certified is None else f"{floor_percent(certified)} %"
    return least, f"{ceil_percent(attacked)} %"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *others])
