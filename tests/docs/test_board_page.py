"""The page of the board and its feed say the same, and hold what they promise."""

import json
import re
from pathlib import Path

from wassail.paper.published import PUBLISHED

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "results" / "board.md").read_text()
FEED = json.loads((DOCS / "results" / "board.json").read_text())


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "model"]


def test_at_least_25_networks_with_their_eps_and_a_command_each() -> None:
    models = {run["model"] for run in FEED["runs"]}
    assert len(models) > 25  # two of them are one network
    for run in FEED["runs"]:
        assert run["verify"].startswith("wassail verify ") and "/tmp" not in run["verify"]
        assert run["eps"] > 0 and run["samples"] >= 20 and run["weights"]
    many = {run["model"] for run in FEED["runs"] if run["samples"] >= 200}
    assert len(many) >= 25


def test_certified_is_never_above_attacked_and_orders_are_nested() -> None:
    for run in FEED["runs"]:
        for side in ("certified", "attacked"):
            found = [run["orders"][order][side] for order in ("1", "2", "inf")]
            if side == "attacked" or found[0] is not None:
                assert found == sorted(found) and found[-1] <= run["clean"]
        for figures in run["orders"].values():
            assert figures["certified"] is None or figures["certified"] <= figures["attacked"]


def test_the_page_has_every_row_of_the_feed() -> None:
    measured, published = PAGE.split("## The paper's Table 1")
    rows = rows_of(measured)
    assert len(rows) == len(FEED["runs"])
    told = {(row[0], row[2], row[5]) for row in rows}
    marked = {True: " †", False: ""}  # older than the code
    for run in FEED["runs"]:
        figures = run["orders"]["1"]
        low = "–" if figures["certified"] is None else figures["certified"]
        pair = f"{low} .. {figures['attacked']}"
        name = run["model"] + marked[run["older"]]
        assert (name, str(run["samples"]), pair) in told
    lines = rows_of(published)
    assert len(lines) == len(PUBLISHED) == len(FEED["published"])
    assert all(line[-1] == "checkpoint not available here" for line in lines)


def test_the_count_in_the_text_is_the_count_of_the_rows() -> None:
    networks, runs = map(int, re.findall(r"\*\*(\d+) networks, (\d+) runs", PAGE)[0])
    models = {run["model"] for run in FEED["runs"]}
    assert networks == len(models - {"cifar_resnet_2b"}) and runs == len(FEED["runs"])
