"""The examples run, and say what they promise."""

from __future__ import annotations

from support.examples import example


def test_a_table_from_csv_to_a_signed_off_figure(capsys) -> None:
    assert example("tabular").main() == 0
    said = capsys.readouterr().out
    assert said.startswith("holds: accuracy>=0.5 at eps 0.005 order 1 confidence 0.95 proved")
    assert "179 samples" in said
    for part in ("**Definition.**", "**Units.**", "**Conditions.**", "**Not checked.**"):
        assert part in said
    assert "ink in row 0" in said
