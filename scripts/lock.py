"""Write requirements-lock.txt: every version of constraints.txt with the SHA-256 of its packages,
for several platforms.

    python scripts/lock.py

pip is asked what it would install; nothing is installed. Torch is left out: its builds differ by
platform and index, so that no list of hashes fits all; the same holds for what only torch's builds
for accelerators need. Use:

    pip install --require-hashes --no-deps -r requirements-lock.txt
    pip install torch==VERSION     # the build of your platform
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ("torch",)
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = (
    (
        "manylinux_2_28_x86_64",
        "manylinux_2_27_x86_64",
        "manylinux_2_17_x86_64",
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ),
    (
        "manylinux_2_28_aarch64",
        "manylinux_2_27_aarch64",
        "manylinux_2_17_aarch64",
        "manylinux2014_aarch64",
    ),
    (
        "macosx_14_0_arm64",
        "macosx_12_0_arm64",
        "macosx_11_0_arm64",
        "macosx_10_13_universal2",
        "macosx_10_9_universal2",
    ),
    ("win_amd64",),
)


def pinned() -> dict[str, str]:
    """Names and versions of the constraints."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {
        name.strip(): version.strip()
        for name, version in pairs
        if name.strip().lower() not in LEFT_OUT
    }


def hashes(requirements: list[str], python: str, platforms: tuple[str, ...]) -> dict[str, str]:
    """The hash of each package that pip would take there; those that are not made for it are
    missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = [f"--platform={platform}" for platform in platforms]
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "--only-binary=:all:",
            f"--python-version={python}",
            "--implementation=cp",
            *options,
            f"--target={folder}/none",
            f"--report={report}",
            *requirements,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            installed = json.loads(report.read_text())["install"]
            return {
                entry["metadata"]["name"]: entry["download_info"]["archive_info"]["hashes"][
                    "sha256"
                ]
                for entry in installed
            }
    if len(requirements) == 1:
        return {}
    half = len(requirements) // 2  # one that is not made for this platform: find it by halves
    return {
        **hashes(requirements[:half], python, platforms),
        **hashes(requirements[half:], python, platforms),
    }


def normal(name: str) -> str:
    """A name as pip compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


def main() -> None:
    """Ask for every platform, and write the file."""
    versions = pinned()
    found: dict[str, set[str]] = {normal(name): set() for name in versions}
    for platforms in PLATFORMS:
        for python in PYTHONS:
            for name, digest in hashes(
                [f"{n}=={v}" for n, v in versions.items()], python, platforms
            ).items():
                found[normal(name)].add(digest)
            print(
                platforms[0],
                python,
                sum(map(bool, found.values())),
                "of",
                len(found),
                file=sys.stderr,
            )
    lines = [
        "# Every version of constraints.txt with the SHA-256 of its packages, written by "
        "scripts/lock.py.",
        "# pip install --require-hashes --no-deps -r requirements-lock.txt",
        "# Torch is not in it: its builds differ by platform. Linux, macOS and Windows, Python "
        + ", ".join(PYTHONS)
        + ".",
    ]
    for name, version in versions.items():
        digests = sorted(found[normal(name)])
        if digests:
            lines.append(
                " \\\n".join(
                    [f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in digests)]
                )
            )
        else:
            lines.append(f"# {name}=={version}: no package for these platforms")
    (ROOT / "requirements-lock.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
