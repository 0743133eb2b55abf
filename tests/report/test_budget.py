"""What the budget buys, all orders in one picture, and runs told apart."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import wassail as ws
from wassail.report.budget import budget_panel
from wassail.report.compare import comparison
from wassail.report.page import report
from wassail.report.panels import orders_panel


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ws.Evaluation:
    x, y = (t[:20] for t in ws.zoo.data())
    threat = ws.Threat("inf", 1, 0.03)
    out = tmp_path_factory.mktemp("runs") / "folder-of-the-run"
    return ws.evaluate(
        ws.zoo.load("digits-mlp"), (x, y), threat, "nearest", passes=40, out=out, certify="crown"
    )


def test_shares_of_the_budget_sum_to_all_of_it(run: ws.Evaluation) -> None:
    panel = str(budget_panel(run))
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", panel.split("Flips: mass")[0])
    shares, masses = (
        [float(re.findall(r"data-sort=\"([^\"]+)\"", row)[k]) for row in rows] for k in (0, 1)
    )
    assert sum(shares) == pytest.approx(1)
    lost = run.clean - run.curve(1)(0.03)[1]
    assert sum(masses) == pytest.approx(lost) and lost > 0
    flips = re.findall(r"data-sort=\"([^\"]+)\"", panel.split("Flips: mass")[-1])
    assert sum(map(float, flips)) == pytest.approx(lost)


def test_classes_have_their_names_and_hostile_ones_are_text(run: ws.Evaluation) -> None:
    names = tuple(f"<b>digit {k}" for k in range(10))
    panel = str(budget_panel(replace(run, classes=names)))
    assert "&lt;b&gt;digit 1" in panel and "<b>" not in panel


def test_nothing_bought_is_no_panel(run: ws.Evaluation) -> None:
    none = torch.full_like(run.distances, math.inf)
    assert budget_panel(replace(run, distances=none)) is None


def test_three_orders_in_one_picture_both_sides(run: ws.Evaluation) -> None:
    panel = str(orders_panel(run))
    assert panel.count("<path") == 6
    ends = [line.split()[-1] for line in re.findall(r' d="([^"]+)"', panel)]
    attacked, certified = ends[0::2], ends[1::2]
    assert all(float(low) >= float(high) for low, high in zip(certified, attacked))  # y is down
    assert str(orders_panel(replace(run, radii=None))).count("<path") == 3


def test_the_page_has_the_point_wise_figure_and_no_absolute_path(
    run: ws.Evaluation, tmp_path: Path
) -> None:
    home = "/home/someone/secret/data.npz"
    info = {**run.info, "command": ["evaluate", "m", "--data", home, "--out=/var/x/run"]}
    text = report(replace(run, info=info, images=run.images))
    assert "Point-wise, p = ∞" in text and "<details><summary>" in text
    assert "/home/someone" not in text and "/var/x" not in text and "…/data.npz" in text


def test_runs_with_one_name_are_told_apart_and_drawn(run: ws.Evaluation) -> None:
    other = replace(run, folder=str(Path(str(run.folder)).parent / "other"))
    text = comparison([run, other])
    assert "folder-of-the-run" in text and " · other" in text
    assert str(run.info["model"]["weights"])[:8] in text
    assert text.count("<circle") == 2
    assert "folder-of-the-run" not in comparison([run, replace(run, name="another")])
