"""The table of results for papers, and the eps that tells runs apart."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.pages import made_up, samples
from wassail.cli.parser import main
from wassail.report.compare import comparison
from wassail.report.export import write
from wassail.report.results import half_text, records, suggestions, to_csv, to_json, to_latex
from wassail.report.terminal import print_comparison, print_evaluation
from wassail.threat import Threat, ceil_percent, floor_percent
from wassail.writing import rounded_down, rounded_up

INF = math.inf


def test_records_are_the_curves_of_the_runs() -> None:
    runs = [made_up(60), made_up(60, certified=False, name="bare")]
    found = json.loads(to_json(runs))
    assert [(one["model"], one["order"]) for one in found] == [
        (run.name, f"{threat.order:g}") for run in runs for threat in run.threats
    ]
    for run, mine in zip(runs, (found[:3], found[3:])):
        for threat, one in zip(run.threats, mine):
            certified, attacked = run.curve(threat.order)(threat.eps)
            assert one["attacked"] == attacked and one["clean"] == run.clean
            assert one["certified"] == (certified if run.radii is not None else None)
            half = run.curve(threat.order).inverse(0.5)
            assert one["half_attacked"] == half and 0 < half < INF
            row = next(row for row in run.rows if row.threat == threat)
            assert one[f"attack {row.title}"] == row.accuracy


def test_csv_gives_the_records_again() -> None:
    runs = [made_up(40), made_up(30, hostile=True)]
    lines = list(csv.DictReader(io.StringIO(to_csv(runs))))
    for line, record in zip(lines, records(runs), strict=True):
        assert float(line["attacked"]) == record["attacked"] and line["eps"] == repr(8 / 255)
    assert not any(line["model"].lstrip()[:1] in "=+-@" for line in lines)


def test_latex_has_a_row_for_each_run_and_is_rounded_outward() -> None:
    runs = [made_up(60), made_up(60, certified=False, name=r"50%_of \net{}$&#^~")]
    text = to_latex(runs)
    body = text.partition("\\midrule\n")[2].splitlines()[:2]
    first = [part.strip(" \\") for part in body[0].split("&")]
    figures = []
    for threat in runs[0].threats:
        certified, attacked = runs[0].curve(threat.order)(threat.eps)
        figures += [floor_percent(certified), ceil_percent(attacked)]
    assert first == [runs[0].name, f"{100 * runs[0].clean:.2f}", *figures]
    assert body[1].startswith(
        r"50\%\_of \textbackslash{}net\{\}\$\&\#\textasciicircum{}\textasciitilde{} & "
    )
    assert body[1].count(" -- ") == 3
    assert text.count("{") == text.count("}") and r"\varepsilon = 8/255" in text
    lines = [line for line in to_latex([made_up(9, hostile=True)]).splitlines() if line]
    assert all(line.startswith(("%", "\\", " &", "Model", '"')) for line in lines)


def test_a_threat_that_leaves_nothing_has_an_eps_that_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [
        replace(run, threats=(Threat(INF, 1, 1.0), Threat(INF, INF, 1.0)))
        for run in (made_up(80), made_up(80, shift=1.5, name="sturdier"))
    ]
    runs = [replace(run, distances=run.distances.clamp(max=0.9)) for run in runs]
    told = suggestions(runs, runs[0].threats)
    assert len(told) == 2 and "eps 1 nothing is left" in told[0]
    eps = float(told[0].partition("try eps ")[2].partition(",")[0])
    best = max(run.curve(1)(eps)[1] for run in runs)
    assert 0.3 < best < 0.6 and f"{ceil_percent(best)} % of sturdier" in told[0]
    assert told[0] in comparison(runs).replace("&#39;", "'")
    print_evaluation(runs[1])
    assert capsys.readouterr().out.count("nothing is left, which tells little: try eps") == 2
    usual = [made_up(80), made_up(80, shift=1.5)]
    print_evaluation(usual[0])
    assert "nothing is left" not in capsys.readouterr().out
    assert suggestions(usual, usual[0].threats) == []


def test_one_half_is_told_without_radii() -> None:
    both, bare = made_up(60), made_up(60, certified=False)
    most = rounded_up(bare.curve(1).inverse(0.5), 3)
    assert half_text(bare, 1.0) == f"≤ {most}"
    assert (
        half_text(both, 1.0)
        == f"{rounded_down(both.curve(1).inverse(0.5, 'certified'), 3)}..{most}"
    )
    never = torch.full_like(bare.distances, INF)
    assert half_text(replace(bare, distances=never), 1.0) == "never"


def test_compare_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made_up(60), made_up(60, certified=False, name="bare"), made_up(30, norm=2.0, eps=0.5)]
    print_comparison(runs)
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.startswith("bare"))
    attacked = [ceil_percent(runs[1].curve(order)(8 / 255)[1]) for order in (1, 2, INF)]
    assert row == ["bare", "60", f"{100 * runs[1].clean:.2f}", *attacked, *row[6:]]
    assert out.count("certified..attacked in %") == 2  # a table for each norm
    certified, most = runs[0].curve(1)(8 / 255)
    assert f"{floor_percent(certified)}..{ceil_percent(most)}" in out
    assert "\x1b" not in out


def test_every_ending_of_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "evaluate digits-mlp -n 4 --eps 0.05 --order 1 inf --attacks fgsm --no-look --quiet"
    run = str(tmp_path / "run")
    assert main([*words.split(), "--out", run]) == 0
    starts = {
        "c.html": b"<!DOCTYPE html>",
        "c.tex": b"% Accuracy",
        "c.csv": b"model,",
        "c.json": b"[",
        "c.svg": b"<svg ",
        "c.pdf": b"%PDF",
    }
    named = [word for name in starts for word in ("-o", str(tmp_path / name))]
    assert main(["compare", run, run, *named]) == 0
    for name, start in starts.items():
        assert (tmp_path / name).read_bytes().startswith(start), name
    assert main(["compare", run, "-o", "c.xls"]) == 2
    assert "unknown ending of a file '.xls'" in capsys.readouterr().err
    table = (tmp_path / "c.csv").read_text()
    assert main(["export", run, "latex", "csv", "svg", "pdf", "-o", str(tmp_path / "e")]) == 0
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == [
        *("curves.pdf", "curves.svg", "table.csv", "table.tex")
    ]
    assert table.count("\n") == 5 and (tmp_path / "e/table.csv").read_text().count("\n") == 3
    first = (tmp_path / "e/curves.pdf").read_bytes()
    assert main(["export", run, "pdf", "-o", str(tmp_path / "e")]) == 0
    assert (tmp_path / "e/curves.pdf").read_bytes() == first


def test_hostile_names_in_figures_stay_text(tmp_path: Path) -> None:
    import xml.etree.ElementTree as tree

    run = made_up(30, hostile=True)
    path = write(run, "svg", tmp_path).path
    root = tree.fromstring(path.read_text())
    assert not [part for part in root.iter() if "script" in part.tag]
    assert samples.HOSTILE[0] not in path.read_text()
