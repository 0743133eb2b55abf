"""Which tests guard which file, which places of a file are no rounding terms, and mutants that no pattern finds."""

from __future__ import annotations

from pathlib import Path

from find import Mutant


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"certificates/test_{name}.py" for name in names)


GUARDS: dict[str, tuple[str, ...]] = {
    "certificates/activations.py": _tests("rounding_parts", "activations"),
    "certificates/attention.py": _tests("rounding_certificates", "attention"),
    "certificates/certify.py": _tests("rounding_certificates"),
    "certificates/curves.py": _tests("rounding_certificates", "curves"),
    "certificates/distance.py": _tests("distance"),
    "certificates/infinity.py": _tests("rounding_certificates", "infinity"),
    "certificates/jacobian.py": _tests("rounding_certificates", "jacobian"),
    "certificates/linear.py": _tests("rounding_parts", "rounding_linear", "linear"),
    "certificates/loss_curve.py": _tests("rounding_certificates", "loss_curve"),
    "certificates/multipliers.py": _tests("rounding_certificates"),
    "certificates/norms.py": _tests("rounding_certificates", "norms"),
    "certificates/propagate.py": _tests("rounding_linear", "propagate"),
    "certificates/recession.py": _tests("rounding_certificates", "recession"),
    "certificates/region.py": _tests("rounding_linear", "region"),
    "certificates/semidefinite.py": _tests("rounding_certificates", "semidefinite"),
    "certificates/slopes.py": _tests("rounding_certificates", "smooth_certify"),
    "certificates/split.py": _tests("rounding_parts", "split"),
    "certificates/tangents.py": _tests("rounding_certificates", "jacobian"),
    "certificates/transformer.py": _tests("rounding_certificates", "transformer"),
    "transport.py": ("test_transport.py",),
}

EXCUSED: dict[tuple[str, str, str], str] = {}


def excused(mutant: Mutant) -> bool:
    """Whether the place is no rounding term: a tolerance that steers a search, for example."""
    return any(
        mutant.file == file and mutant.where.endswith(where) and old in mutant.old for file, where, old in EXCUSED
    )


def named(package: Path) -> list[Mutant]:
    """Mutants given by their text."""
    return []
