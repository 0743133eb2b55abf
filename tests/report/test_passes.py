"""Accuracy against passes."""

import math
import re
from dataclasses import replace

import pytest
import torch

import wassail as ws
from support.pages import made_up
from wassail.report.page import report
from wassail.report.passes import drawn_accuracy, passes_panel

INF = math.inf


def test_a_dot_for_each_attack_where_its_row_says() -> None:
    run = made_up(60)
    panel = str(passes_panel(run))
    rows = [row for row in run.rows if row.threat == run.threat]
    assert len(rows) > 1
    found = re.findall(r'<circle[^>]* cx="([\d.]+)" cy="([\d.]+)"', panel)
    places = [(float(x), float(y)) for x, y in found]
    assert len(places) == 1 + len(rows)  # the first is the clean accuracy
    heights = [run.clean, *(row.accuracy for row in rows)]
    spent = [1.0, *(row.forwards + row.backwards for row in rows)]
    for (_, y), share in zip(places, heights):
        assert y == pytest.approx(256 - 244 * share, abs=0.06)
    assert sorted(range(len(spent)), key=lambda k: spent[k]) == sorted(
        range(len(places)), key=lambda k: places[k][0]
    )
    assert "Dashed" not in panel and "<path" not in panel
    assert 'id="passes"' in report(run)


def test_the_line_of_the_samples_that_passes_were_chosen_on() -> None:
    run = made_up(60)
    far = torch.full((10,), 10 * run.threat.eps, dtype=torch.float64)
    near = torch.full((10,), run.threat.eps / 10, dtype=torch.float64)
    panel = str(passes_panel(replace(run, searched={25: far, 400: near})))
    assert "Dashed" in panel and "the 10 samples" in panel
    ends = re.search(r'<path[^>]* d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', panel)
    assert ends is not None
    left, high, right, low = map(float, ends.groups())
    assert left < right
    assert high == pytest.approx(256 - 244 * (run.clean - 0.1), abs=0.06)  # a tenth can be paid
    assert low == pytest.approx(256)  # all of them can


def test_the_accuracy_of_drawn_samples() -> None:
    d = torch.tensor([0.1, 0.3, INF, 0.5], dtype=torch.float64)
    assert drawn_accuracy(d, 0.8, ws.Threat("inf", INF, 0.3)) == pytest.approx(0.4)
    # Order 1, eps 0.05: the first costs 0.2 * 0.1, half of the second 0.2 * 0.3 / 2.
    assert drawn_accuracy(d, 0.8, ws.Threat("inf", 1, 0.05)) == pytest.approx(0.8 - 0.2 - 0.1)
    assert drawn_accuracy(d, 0.0, ws.Threat("inf", 1, 0.05)) == 0


def test_no_attack_is_no_panel() -> None:
    assert passes_panel(replace(made_up(30), rows=())) is None


def test_a_run_keeps_what_its_passes_were_chosen_on() -> None:
    x, y = (t[:12] for t in ws.zoo.data())
    threat = ws.Threat("inf", 1, 0.03)
    run = ws.evaluate(ws.zoo.load("digits-mlp"), (x, y), threat, "nearest", passes="auto")
    assert {25, 100} <= set(run.searched)
    drawn = run.searched[100]
    known = run.distances[run.distances > 0]
    assert len(drawn) == len(known)
    assert (drawn >= known - 1e-12).all()  # the pool holds these flips or nearer ones
    assert "Dashed" in str(passes_panel(run))
