"""Which tests guard which file, which places of a file are no rounding terms, and mutants that
no pattern finds.
"""

from __future__ import annotations

from collections.abc import Mapping

from find import Mutant


def _tests(*names: str) -> tuple[str, ...]:
    """Test files of the certificates; `file::word ...` for the tests of that file that have one
    of the words in their name.
    """
    return tuple(
        f"certificates/test_{name.replace('::', '.py::')}" + ("" if "::" in name else ".py")
        for name in names
    )


# The tests for rounding come first: they are quick. Then what the file has of its own.
GUARDS: dict[str, tuple[str, ...]] = {
    "certificates/activations.py": _tests("rounding_parts::shifts", "activations"),
    "certificates/attention.py": _tests("rounding_certificates::norms attention", "attention"),
    "certificates/certify.py": _tests("rounding_certificates::certificate"),
    "certificates/curves.py": _tests("rounding_certificates::curves step", "curves"),
    "certificates/distance.py": _tests("rounding_parts::distances room", "distance"),
    "certificates/infinity.py": _tests("rounding_certificates::cuts infinity", "infinity"),
    "certificates/jacobian.py": _tests(
        "rounding_certificates::norms step rays", "rounding_linear::relative", "jacobian"
    ),
    "certificates/linear.py": _tests("rounding_parts", "rounding_linear", "linear"),
    "certificates/loss_curve.py": _tests(
        "rounding_certificates::one_sample losses lines plan radii dual", "loss_curve"
    ),
    "certificates/multipliers.py": _tests("rounding_certificates::semidefinite"),
    "certificates/norms.py": _tests("rounding_certificates::norms", "norms"),
    "certificates/propagate.py": _tests("rounding_linear", "propagate"),
    "certificates/recession.py": _tests(
        "rounding_certificates::bounded shadow", "rounding_linear::relative", "recession"
    ),
    "certificates/region.py": _tests("rounding_linear", "region"),
    "certificates/semidefinite.py": _tests("rounding_certificates::semidefinite", "semidefinite"),
    "certificates/slopes.py": _tests("rounding_certificates::losses", "smooth_certify"),
    "certificates/split.py": _tests("rounding_parts::split", "split"),
    "certificates/tangents.py": _tests(
        "rounding_certificates::step tangents", "rounding_linear::relative", "jacobian"
    ),
    "certificates/transformer.py": _tests("rounding_certificates::transformer", "transformer"),
    "transport.py": ("test_transport.py",),
    "network.py": ("test_network.py::tolerance",),
    "evaluation/intervals.py": ("evaluation/test_intervals.py::p_value",),
}

ONLY_NAMED = (
    "network.py",
    "evaluation/intervals.py",
)  # files without rounding terms of a certificate
# Files whose terms are not all guarded yet: what survives there is printed and counted, but does
# not fail the run.
OPEN = (
    *(
        f"certificates/{name}.py"
        for name in (
            "attention", "curves", "jacobian", "linear",
            "slopes", "tangents", "transformer",
        )
    ),
    "transport.py",
)  # fmt: skip
STEERS = "steers a search: no claim rests on it"
EXCUSED: dict[tuple[str, str, str], str] = {
    # (file, end of the function's name, text): why no test has to miss it
    ("", "_ascend", "1e-12"): STEERS,
    ("", "_optimised", "1e-12"): STEERS,
    ("", "bounded", "1e-12"): STEERS,
    ("", "", "BAND"): "a dead band for ties: either side is sound",
    ("", "", "FAINT"): "an absolute term for underflow, which its own tests guard",
    ("", "_close", "1e-12"): "tells two maps apart at random points",
    (
        "certificates/activations.py",
        "",
        "_up(math.log(2))",
    ): "not in a function; tested against log 2",
    (
        "certificates/distance.py",
        "_Search.run",
        "gamma(self.graph)",
    ): "prefers flips that outlast another order of summation",
    (
        "certificates/distance.py",
        "nearest_flip",
        "slack",
    ): "a margin that is asked for, not a rounding term",
    (
        "certificates/distance.py",
        "_least_distance",
        "residual",
    ): "the residual of a program, whose answer is checked",
    (
        "certificates/distance.py",
        "reach",
        "1e-12",
    ): "chooses p: every p between 0 and |a| gives a bound",
    ("certificates/infinity.py", "", "CLOSED"): STEERS,
    (
        "certificates/infinity.py",
        "cutoff",
        "self.rounding",
    ): "when a node is done: its bound counts whatever it is",
    (
        "certificates/infinity.py",
        "_values",
        "rounding.network",
    ): "a network, not a number: `rounding.relative` times its value",
    ("certificates/infinity.py", "solve", "error"): "an error of the relaxation, not of rounding",
    ("certificates/lipschitz.py", "_closed", "1e-12"): STEERS,
    (
        "certificates/loss_curve.py",
        "_grown",
        "1e-12",
    ): "every multiplier gives a bound",
    ("certificates/loss_curve.py", "_above", "NEAR"): "the first radius, which may be any",
    (
        "certificates/multipliers.py",
        "prove",
        "INFLATE",
    ): "what is proved and returned is the larger weight",
    ("certificates/recession.py", "_far", "error"): "a list; what is in it is no rounding",
    (
        "certificates/region.py",
        "inside",
        "1e-12",
    ): "moves sample points inside: no claim rests on it",
    ("certificates/semidefinite.py", "start", "1e-12"): STEERS,
    ("certificates/semidefinite.py", "_with", "1e-300"): STEERS,
    (
        "certificates/transformer.py",
        "_slope",
        "2.0**-50",
    ): "`UP` in `stretch` is more than 4000 terms lose",
    (
        "certificates/norms.py",
        "product",
        "UP",
    ): "each factor is rounded up by more than its product loses",
    (
        "certificates/linear.py",
        "_total",
        "2.0**-20",
    ): "of an absolute term for underflow, which is itself an upper estimate",
    (
        "certificates/linear.py",
        "_affine",
        "_up(",
    ): "second order: four of the terms in `count` are spare",
    (
        "certificates/linear.py",
        "_affine",
        "_rounding(",
    ): "second order: four of the terms in `count` are spare",
}


def excused(mutant: Mutant) -> bool:
    """Whether no test has to miss a place, and why is in the table."""
    for (file, where, old), reason in EXCUSED.items():
        if file in mutant.file and mutant.where.endswith(where) and mutant.old.startswith(old):
            return bool(reason)
    return False


NAMED: tuple[tuple[str, str, str, str], ...] = (
    # file, function, text, what it becomes
    (
        "transport.py",
        "Distribution.verify",
        "cost > self.threat.eps",
        "cost > self.threat.eps * (1 + 1e-6)",
    ),
    (
        "network.py",
        "search",
        "at_clean = predict(clean, labels)",
        "at_clean = predict(clean, labels, tolerance)",
    ),
    (
        "evaluation/intervals.py",
        "_sign_flips",
        "(1 + reached) / (1 + resamples)",
        "reached / resamples",
    ),
)


def named(sources: Mapping[str, str]) -> list[Mutant]:
    """Mutants given by their text, which must stand in the file once."""
    found = []
    for file, where, old, new in NAMED:
        source = sources[file]
        assert source.count(old) == 1, (
            f"{old!r} stands in {file} {source.count(old)} times: the table is out of date"
        )
        start = source.index(old)
        found.append(
            Mutant(file, where, source[:start].count("\n") + 1, start, start + len(old), old, new)
        )
    return found
