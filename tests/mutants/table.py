"""Which tests guard which file, which places of a file are no rounding terms, and mutants that no pattern finds."""

from __future__ import annotations

from pathlib import Path

from find import Mutant


def _tests(*names: str) -> tuple[str, ...]:
    """Test files of the certificates; `file::word ...` for the tests of that file that have one of the words in their name."""
    return tuple(f"certificates/test_{name.replace('::', '.py::')}" + ("" if "::" in name else ".py") for name in names)


# The tests for rounding come first: they are quick. Then what the file has of its own.
GUARDS: dict[str, tuple[str, ...]] = {
    "certificates/activations.py": _tests("rounding_parts::shifts", "activations"),
    "certificates/attention.py": _tests("rounding_certificates::norms attention", "attention"),
    "certificates/certify.py": _tests("rounding_certificates::certificate"),
    "certificates/curves.py": _tests("rounding_certificates::curves step", "curves"),
    "certificates/distance.py": _tests("rounding_parts::distances room", "distance"),
    "certificates/infinity.py": _tests("rounding_certificates::cuts infinity", "infinity"),
    "certificates/jacobian.py": _tests("rounding_certificates::norms step rays", "jacobian"),
    "certificates/linear.py": _tests("rounding_parts", "rounding_linear", "linear"),
    "certificates/loss_curve.py": _tests("rounding_certificates::one_sample losses lines plan radii", "loss_curve"),
    "certificates/multipliers.py": _tests("rounding_certificates::semidefinite"),
    "certificates/norms.py": _tests("rounding_certificates::norms", "norms"),
    "certificates/propagate.py": _tests("rounding_linear", "propagate"),
    "certificates/recession.py": _tests("rounding_certificates::bounded shadow", "recession"),
    "certificates/region.py": _tests("rounding_linear", "region"),
    "certificates/semidefinite.py": _tests("rounding_certificates::semidefinite", "semidefinite"),
    "certificates/slopes.py": _tests("rounding_certificates::losses", "smooth_certify"),
    "certificates/split.py": _tests("rounding_parts::split", "split"),
    "certificates/tangents.py": _tests("rounding_certificates::step tangents", "jacobian"),
    "certificates/transformer.py": _tests("rounding_certificates::transformer", "transformer"),
    "transport.py": ("test_transport.py",),
}

EXCUSED: dict[tuple[str, str, str], str] = {}


def excused(mutant: Mutant) -> bool:
    """Whether the place is no rounding term: a tolerance that steers a search, for example."""
    return any(mutant.file == file and mutant.where.endswith(where) and old in mutant.old for file, where, old in EXCUSED)


def named(package: Path) -> list[Mutant]:
    """Mutants given by their text."""
    return []
