"""What results look like in a notebook: well-formed, escaped, with the figures they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail import notebook
from wassail.records import Record
from wassail.threat import ceil_percent, floor_percent

HOSTILE = '<script>alert("x")</script> & "co"'
VOID = {"img"}


class Reader(HTMLParser):
    """Every element is closed, in order; what is text is collected."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


@cache
def results() -> dict[str, Any]:
    """One of each."""
    model = ws.zoo.load("digits-mlp-adv")
    x, y = ws.zoo.data("digits")
    x = x[:12]
    y = y[:12]
    flips = ws.nearest(model, x, y, norm="inf", passes=20)
    radii = ws.radii(model, x, y, norm="inf", method="crown")
    curve = ws.risk_curve(flips, radii, order=1)
    threat = ws.Threat("inf", 1, "0.05")
    run = ws.evaluate(model, (x, y), [threat], ("nearest",), passes=20, certify="crown")
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    z = torch.rand(5, 3, dtype=torch.float64)
    t = small(z).argmax(1)
    certificate = ws.certify(small, z, t, norm=2, loss="margin", domain=None)
    return {
        "Flips": flips,
        "Radii": radii,
        "RiskCurve": curve,
        "PopulationCurve": curve.population(),
        "Distribution": ws.allocate(flips, 0.05, 1),
        "Certificate": certificate,
        "Bound": certificate.paper,
        "LossCurve": ws.loss_curve(small, z, t, norm=2, order=1, loss="margin"),
        "Evaluation": run,
        "Comparison": ws.compare(run, run, threat),
        "Verdict": run.require("accuracy>=0.2 at eps 0.05 order 1 proved"),
    }


PICTURED = ("Flips", "Radii", "RiskCurve", "PopulationCurve", "LossCurve", "Evaluation")
NAMES = (*PICTURED, "Distribution", "Certificate", "Bound", "Comparison", "Verdict")


@pytest.mark.few(7)
@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_well_formed_and_has_no_script(name: str) -> None:
    made = Reader(results()[name]._repr_html_())
    assert not {"script", "style", "link"} & set(made.seen)
    assert made.seen.count("img") == (1 if name in PICTURED else 0)


@pytest.mark.parametrize("name", PICTURED)
def test_without_matplotlib_there_is_a_table_and_no_picture(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "find_spec", lambda _: None)
    made = Reader(results()[name]._repr_html_())
    assert "img" not in made.seen
    assert "table" in made.seen


def test_the_figures_are_those_of_the_result() -> None:
    curve = results()["RiskCurve"]
    text = Reader(curve._repr_html_()).text
    half = curve.inverse(0.5 * curve(0)[1])
    certified, attacked = curve(half)
    assert (
        f"{half:.4g} at least {floor_percent(certified)} % at most {ceil_percent(attacked)} %"
        in (text)
    )
    run = results()["Evaluation"]
    assert run.headline in Reader(run._repr_html_()).text
    bound = results()["Bound"]
    assert f"{bound.upper:.10g}" in Reader(bound._repr_html_()).text


def test_a_curve_without_radii_says_so() -> None:
    curve = replace(results()["RiskCurve"], radii=None)
    assert "nothing" in Reader(curve._repr_html_()).text


def test_no_samples() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    assert Reader(ws.RiskCurve(none, none, none, 1.0)._repr_html_()).seen
    empty = ws.Radii(none, none.bool(), "crown", 2.0, None)
    assert "0 samples" in Reader(empty._repr_html_()).text


def test_names_are_escaped() -> None:
    run = replace(results()["Evaluation"], name=HOSTILE, data=HOSTILE)
    source = run._repr_html_()
    assert "script" not in Reader(source).seen
    assert HOSTILE in Reader(source).text
    assert HOSTILE not in re.sub(r'src="[^"]*"', "", source)
    flips = replace(results()["Flips"], methods=(HOSTILE,))
    assert "script" not in Reader(flips._repr_html_()).seen


def test_every_public_record_has_a_card() -> None:
    """One of its own, or the text that it prints as."""
    classes = [getattr(ws, name) for name in ws.__all__ if isinstance(getattr(ws, name), type)]
    made = {type(result) for result in results().values()}
    records = [kind for kind in (*classes, *made) if issubclass(kind, Record)]
    own = {kind.__name__ for kind in records if "_repr_html_" in vars(kind)}
    assert own | {"PopulationCurve"} >= set(NAMES) - {"Verdict", "Comparison", "Evaluation"}
    assert all(hasattr(kind, "_repr_html_") for kind in records)


def test_a_record_without_a_card_of_its_own_shows_its_text() -> None:
    @dataclass(frozen=True)
    class Note(Record):
        text: str

        def __str__(self) -> str:
            return f"{self.text}\n  second line"

    made = Reader(Note(HOSTILE)._repr_html_())
    assert made.seen == ["div", "p", "b", "pre"]
    assert f"{HOSTILE}\n  second line" in made.text
    del Record.kinds["Note"]
