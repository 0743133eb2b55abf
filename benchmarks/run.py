"""Run every benchmark and write what it prints to docs/: `make bench`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "nearest_plot.py": "nearest-passes.txt",
    "foundations.py": "foundations.md",
    "l1_step.py": "l1-step.md",
    "nearest.py": "nearest.md",
    "overhead.py": "overhead.md",
    "baselines.py": "baselines.md",
    "branch.py": "exact-lipschitz.md",
    "certificates.py": "lipschitz.md",
    "attention.py": "attention.md",
    "growth.py": "growth.md",
    "scale.py": "scale.md",
    "parallel.py": "parallel.md",
    "population.py": "population.md",
    "landmarks.py": "landmarks.md",
    "spheres.py": "spheres.md",
}

for script, page in PAGES.items():
    print(f"{script} -> docs/{page}", flush=True)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    (ROOT / "docs" / page).write_text(done.stdout)
