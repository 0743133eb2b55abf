"""Every benchmark is run by `make bench`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
HELPERS = {"run.py", "zoo_path.py"}


def test_the_list_names_every_benchmark() -> None:
    listed = (ROOT / "benchmarks" / "run.py").read_text()
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert path.name in HELPERS or f'"{path.name}": ' in listed, path.name
