"""Which tests guard which file, which places of a file are no rounding terms, and mutants that no pattern finds."""

from __future__ import annotations

from collections.abc import Mapping

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
    "network.py": ("test_network.py::tolerance",),
    "evaluation/intervals.py": ("evaluation/test_intervals.py::p_value",),
}

EXCUSED: dict[tuple[str, str, str], str] = {}


def excused(mutant: Mutant) -> bool:
    """Whether the place is no rounding term: a tolerance that steers a search, for example."""
    return any(mutant.file == file and mutant.where.endswith(where) and old in mutant.old for file, where, old in EXCUSED)


NAMED: tuple[tuple[str, str, str, str], ...] = (
    # file, function, text, what it becomes
    ("transport.py", "Distribution.verify", "cost > self.threat.eps", "cost > self.threat.eps * (1 + 1e-6)"),
    ("network.py", "search", "at_clean = predict(clean, labels)", "at_clean = predict(clean, labels, tolerance)"),
    ("evaluation/intervals.py", "_sign_flips", "(1 + reached) / (1 + resamples)", "reached / resamples"),
)


def named(sources: Mapping[str, str]) -> list[Mutant]:
    """Mutants given by their text, which must stand in the file once."""
    found = []
    for file, where, old, new in NAMED:
        source = sources[file]
        assert source.count(old) == 1, f"{old!r} stands in {file} {source.count(old)} times: the table is out of date"
        start = source.index(old)
        found.append(Mutant(file, where, source[:start].count("\n") + 1, start, start + len(old), old, new))
    return found
