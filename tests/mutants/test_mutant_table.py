"""The table of the mutants knows the files as they are: a term without a guard is found here."""

import subprocess
import sys
from pathlib import Path


def test_the_table_of_the_mutants_is_up_to_date() -> None:
    run = Path(__file__).parent / "run.py"
    found = subprocess.run(
        [sys.executable, str(run), "--list", "no such file"], capture_output=True, text=True
    )
    assert "out of date" not in found.stdout, found.stdout
    assert "Traceback" not in found.stderr, found.stderr
