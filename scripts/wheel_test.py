"""Build the packages and try them as a new user would, in a clean environment without constraints.

    python scripts/wheel_test.py [--out FOLDER] [--tag vX.Y.Z] [--with REQUIREMENT ...]

The sdist is built from the repository and the wheel from the sdist. The wheel is installed into a
new environment, together with whatever versions pip finds. Then, in an empty folder: the command
line, the blocks of the README and the notebooks. `--with "torch==2.13.0"` limits a version where
downloads are slow; `--tag` must be the version with a v; `--out` keeps the packages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WANTED = ("wassail/py.typed", "wassail/zoo/DIGITS.md", "/LICENSE")


def python_of(folder: Path) -> Path:
    """The interpreter of a new environment."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def run(*command: object, cwd: Path | None = None) -> str:
    """What a command prints; the end of everything if it fails."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    print("+", *(str(word).partition("\n")[0] for word in command), flush=True)
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}")
    return done.stdout


def build(folder: Path, out: Path) -> Path:
    """Both packages; the wheel is made from the sdist."""
    python = python_of(folder)
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", out, ROOT)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    held = run(python, "-m", "zipfile", "--list", wheel)
    missing = [name for name in WANTED if name not in held]
    if missing or "tests/" in held:
        sys.exit(f"the wheel lacks {missing}, or holds tests.")
    for package in (sdist, wheel):
        print(f"{package.name}: {package.stat().st_size >> 10} kB")
    return wheel


def programs() -> dict[str, str]:
    """What the README and the notebooks hold: one program each."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    found = {"README.md": "\n".join(blocks)}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        found[path.name] = "\n".join(code)
    return found


def use(python: Path, folder: Path, version: str) -> None:
    """The installed package, from an empty folder."""
    command = python.parent / "wassail"
    for words in ((command, "--version"), (python, "-m", "wassail", "--version")):
        if version not in run(*words, cwd=folder):
            sys.exit(f"{words} does not say {version}.")
    where = run(python, "-c", "import wassail; print(wassail.__file__)", cwd=folder)
    if "site-packages" not in where:
        sys.exit(f"this is not the installed package: {where}")
    if "usage" not in run(command, cwd=folder):
        sys.exit("bare wassail prints no help.")
    small = ("--eps", "0.05", "-n", "10", "--passes", "20", "--certify", "crown", "--out", "RUN")
    run(command, "evaluate", "digits-mlp-adv", *small, cwd=folder)
    for name, program in programs().items():
        print(name, flush=True)
        run(python, "-c", program, cwd=folder)


def main() -> None:
    """Build, install, use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tag")
    parser.add_argument("--with", dest="limits", nargs="*", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = (options.out or folder / "dist").resolve()
        wheel = build(folder / "build", out)
        version = wheel.name.split("-")[1]
        if options.tag not in (None, "", f"v{version}"):
            sys.exit(f"the tag is {options.tag}, and the version {version}.")
        python = python_of(folder / "clean")
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[plot]", *options.limits)
        (folder / "empty").mkdir()
        use(python, folder / "empty", version)
    print(f"wassail {version} installs and runs.")


if __name__ == "__main__":
    main()
