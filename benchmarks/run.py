"""Run every benchmark and write what it prints to docs/: `make bench`."""

import os
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
    "arithmetic.py": "arithmetic.md",
    "growth.py": "growth.md",
    "scale.py": "scale.md",
    "parallel.py": "parallel.md",
    "population.py": "population.md",
    "landmarks.py": "landmarks.md",
    "spheres.py": "spheres.md",
    "default.py": "default.md",
    "closing.py": "closing-measured.md",
    "domains.py": "domains.txt",
    "inner.py": "inner.md",
    "demo.py": "demo.txt",
    "smoothing.py": "smoothing.md",
    "hardening.py": "hardening.md",
    "omega.py": "omega.md",
}

# Benchmarks beside other tools or public verdicts, in parts that can be stopped and started.
# Without that tool their pages would lose its columns: they run only where the variable names it.
PARTS = {
    "radii.py": ("radii.md", "WASSAIL_LIRPA", ("peer", "alpha", "full", "soundness", "sandwich")),
    "smooth.py": ("transformers.md", "WASSAIL_LIRPA", ("peer", "verified", "lipschitz")),
    "board.py": ("board.md", "WASSAIL_BOARD", ()),  # the folder of the runs
    "attack_bench.py": ("attack-bench.md", "WASSAIL_ATTACKBENCH", ()),
    "hardening_cifar.py": ("hardening-cifar.md", "WASSAIL_CIFAR", ()),  # trained weights, measured
    "others.py": ("others.md", "WASSAIL_DRO", ()),  # dro and skwdro are installed
    "regression.py": ("regression.md", "WASSAIL_TABLES", ()),  # files of the UCI repository
    "vnncomp.py": ("vnncomp.md", "WASSAIL_VNNCOMP", ()),
    "vnnlib.py": ("vnnlib.md", "WASSAIL_VNNCOMP", ()),
}


def run(script: str, *options: str) -> str:
    """What a benchmark prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


for script, page in PAGES.items():
    print(f"{script} -> docs/{page}", flush=True)
    (ROOT / "docs" / page).write_text(run(script))
for script, (page, variable, parts) in PARTS.items():
    if variable not in os.environ:
        print(f"{script} -> docs/{page}: not run, since ${variable} is not set", flush=True)
        continue
    print(f"{script} -> docs/{page}", flush=True)
    for part in parts:
        run(script, "--part", part)
    (ROOT / "docs" / page).write_text(run(script))
