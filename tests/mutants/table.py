"""Which tests guard which file, which places of a file are no rounding terms, and mutants that
no pattern finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from find import Mutant

TESTS = Path(__file__).parents[1]
WHERE = {path.stem: str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}


def _tests(*names: str) -> tuple[str, ...]:
    """Test files by the subject in their name, wherever they stand; `file::word ...` for the tests
    of that file that have one of the words in their name.
    """
    guards = []
    for name in names:
        subject, cut, words = name.partition("::")
        guards.append(WHERE[f"test_{subject}"] + cut + words)
    return tuple(guards)


_SWEEP = _tests("rounding_sweeps", "rounding_parts", "rounding_linear")
_CURVED = _tests("rounding_planes", "rounding_certificates::curves step")
_TANGENTS = _tests(
    "rounding_smooth::tangents", "rounding_certificates::step", "rounding_linear::relative"
)
_CURVE = _tests("rounding_certificates::one_sample losses lines plan radii dual")
_CHORDS = _tests("rounding_certificates::losses", "rounding_chords")
_CONES = _tests("rounding_certificates::cuts infinity")
_LADDER = _tests("rounding_ladder")
_EXACT = _tests("rounding_exact")
_DISTANCE = _tests("rounding_parts::distances room")

# The tests for rounding come first: they are quick. Then what the file has of its own.
GUARDS: dict[str, tuple[str, ...]] = {
    "certificates/relax/balls.py": _SWEEP,
    "certificates/relax/crown.py": (
        *_SWEEP,
        *_tests("rounding_slope_cones::sweep", "rounding_executed::sweep"),
    ),
    "certificates/relax/backward.py": _SWEEP,
    "certificates/relax/lines.py": (*_SWEEP, *_tests("rounding_planes")),
    "certificates/relax/executed.py": _tests("rounding_executed"),
    "certificates/relax/jacobian.py": _tests(
        "rounding_smooth",
        "rounding_certificates::norms step",
        "rounding_linear",
        "propagate",
    ),
    "certificates/relax/norms.py": _tests(
        "rounding_spectral", "rounding_certificates::norms", "norms", "rounding_ball_relaxation"
    ),
    "certificates/relax/ranges.py": _tests(
        "rounding_linear", "rounding_smooth", "rounding_sweeps::condensed", "propagate"
    ),
    "certificates/relax/rows.py": _SWEEP,
    "certificates/graph/tangent.py": _TANGENTS,
    "certificates/graph/arc.py": (
        *_tests("rounding_parts::shifts", "rounding_slope_cones", "rounding_sweeps"),
    ),
    "certificates/graph/graph.py": _tests(
        "rounding_certificates::norms step",
        "rounding_smooth",
        "rounding_linear",
        "jacobian::steepest",
    ),
    "certificates/graph/activations.py": _tests("rounding_parts::shifts", "activations"),
    "certificates/graph/maps.py": _tests(
        "rounding_certificates::norms", "norms", "rounding_ball_relaxation"
    ),
    "certificates/graph/matrix_norms.py": _tests("rounding_certificates::norms", "norms"),
    "certificates/graph/operators/convolution.py": _tests(
        "rounding_certificates::norms", "norms", "ball_sweep::column"
    ),
    "certificates/graph/operators/normalise.py": (*_CURVED, *_TANGENTS),
    "certificates/graph/operators/products.py": (*_CURVED, *_TANGENTS),
    "certificates/graph/operators/softmax.py": (*_CURVED, *_TANGENTS),
    "certificates/graph/planes.py": (*_CURVED, *_tests("rounding_parts")),
    "certificates/graph/region.py": _tests("rounding_linear", "region"),
    "paper/attention_bounds.py": _tests(
        "rounding_smooth::attention", "rounding_certificates::norms", "rounding_transformer"
    ),
    "paper/corollary.py": _tests("rounding_transformer"),
    "certificates/lipschitz/ladder.py": _LADDER,
    "certificates/lipschitz/steepest.py": _LADDER,
    "certificates/lipschitz/semidefinite.py": _tests(
        "rounding_certificates::semidefinite", "semidefinite"
    ),
    "paper/transformer_constants.py": (
        *_tests(
            "rounding_transformer",
            "rounding_linear::weights",
            "rounding_smooth::walk",
            "rounding_certificates::transformer",
        ),
    ),
    "certificates/loss/certificate.py": _tests("rounding_certificates::certificate"),
    "certificates/loss/certify.py": _tests("rounding_certificates::certificate"),
    "certificates/loss/chords.py": _CHORDS,
    "certificates/loss/curve.py": (*_CURVE, *_tests("rounding_chords::population")),
    "certificates/loss/growth.py": (*_CURVE, *_tests("rounding_residuals")),
    "certificates/loss/points.py": _CURVE,
    "certificates/loss/labels.py": (*_CURVE, *_CHORDS),
    "certificates/loss/samples.py": _tests("rounding_residuals"),
    "certificates/loss/penalty.py": _tests("rounding_worst_case"),
    "certificates/loss/descent.py": _tests("rounding_others", "rounding_worst_case"),
    "certificates/loss/problem.py": _tests("rounding_worst_case"),
    "certificates/loss/recession.py": _tests(
        "rounding_certificates::bounded shadow", "rounding_linear::relative", "recession"
    ),
    "certificates/loss/slopes.py": _tests("rounding_chords::ray gains"),
    "certificates/loss/residual_cells.py": _tests("rounding_residuals"),
    "certificates/loss/residual_certificate.py": _tests("rounding_residuals"),
    "certificates/loss/residual_curve.py": _tests("rounding_residuals"),
    "certificates/loss/residual_cones.py": _tests("residual_cones"),
    "certificates/exact/penalised.py": _tests("residual_cones"),
    "certificates/loss/residual_stairs.py": _tests("residual_stairs::rounded charged"),
    "certificates/loss/residuals.py": _tests("rounding_residuals"),
    "certificates/loss/worst_case.py": _tests("rounding_worst_case"),
    "certificates/prove/radius_search.py": _tests("rounding_radii"),
    "certificates/exact/cells.py": _EXACT,
    "certificates/exact/cones.py": _CONES,
    "certificates/exact/constants.py": _EXACT,
    "certificates/exact/infinity.py": _CONES,
    "certificates/search/intervals.py": _tests("rounding_parts::split_intervals"),
    "certificates/search/margins.py": _tests("rounding_parts::split"),
    "certificates/exact/multipliers.py": _tests("rounding_certificates::semidefinite"),
    "certificates/exact/nearest_flip.py": _DISTANCE,
    "certificates/exact/paths.py": _EXACT,
    "certificates/search/input_boxes.py": _tests("rounding_search"),
    "certificates/exact/polytope.py": _EXACT,
    "certificates/exact/flip_problem.py": _DISTANCE,
    "rounding.py": _tests("rounding"),
    "certificates/relax/ball_relaxation.py": _tests(
        "rounding_ball_relaxation", "ball_sweep::packed"
    ),
    "certificates/relax/ball_margins.py": _tests("rounding_ball_relaxation", "ball_sweep"),
    "certificates/relax/ball_quadratic_terms.py": _tests(
        "rounding_ball_relaxation::links norms", "ball_first_layer::norms rounding"
    ),
    "certificates/relax/quadratic.py": _tests("rounding_quadratic"),
    "certificates/relax/l1_vertices.py": _tests("rounding_l1_vertices"),
    "certificates/relax/slope_cones.py": _tests("rounding_slope_cones"),
    "certificates/relax/slope_cone_layer.py": _tests("rounding_slope_cones"),
    "certificates/relax/windows.py": _tests("windows::pay"),
    "certificates/lipschitz/kinks.py": _tests("kinks::kink"),
    "certificates/prove/products.py": _tests("product_radii::rounding linear", "rounding_radii"),
    "certificates/search/boxes.py": _tests("boxes::rounding", "rounding_search::boxes"),
    "certificates/search/products.py": _tests("box_products"),
    "certificates/search/shallow.py": _tests("rounding_shallow", "shallow"),
    "certificates/search/subproblems.py": _tests("rounding_parts::split_neurons"),
    "certificates/graph/operators/hardswish.py": _tests("rounding_activations"),
    "certificates/graph/operators/mish.py": _tests("rounding_activations"),
    "certificates/graph/operators/smooth.py": _tests("rounding_activations"),
    "certificates/graph/switched.py": _tests("switched::rounding rounded"),
    "transport/confidence.py": _tests("rounding_transport", "confidence::powers_lose"),
    "transport/curve.py": _tests("rounding_transport"),
    "transport/given.py": _tests("given"),
    "transport/grouped.py": _tests("grouped::certified"),
    "certificates/loss/others.py": _tests("rounding_others"),
    "certificates/loss/pairs.py": _tests("rounding_others", "loss_others::rounded"),
    "certificates/loss/worst_others.py": _tests("rounding_others", "loss_others::flat"),
    "transport/side.py": _tests("rounding_transport"),
    "transport/distribution.py": _tests("transport::verify"),
    "network.py": _tests("network::tolerance"),
    "evaluation/intervals.py": _tests("intervals::p_value"),
}

# Files without rounding terms of a certificate.
ONLY_NAMED = ("transport/distribution.py", "network.py", "evaluation/intervals.py")
WITHOUT: dict[str, str] = {
    "certificates/bound.py": "1e-12 of a comparison that says which bound is shown",
    "certificates/graph/agreement.py": "compares a graph with its model at points",
    "certificates/graph/reader.py": "`error` is an exception there",
    "certificates/search/frontier.py": "`error` is an exception there",
    "paper/attention_layout.py": "tells two maps apart at random points",
    "transport/picture.py": "where a curve is drawn",
    "transport/mixture.py": "what it returns is a proposal, checked where it is used",
    "certificates/prove/verify.py": "its error is an exception",
    "certificates/prove/sandwich.py": "1e-12 of a comparison that says what is noted in a history",
    "certificates/exact/programs.py": "what it returns is a proposal, checked where it is used",
}
# Files whose terms are not all guarded yet, and why: what survives there is printed and counted,
# but does not fail the run.
OPEN: dict[str, str] = {}
STEERS = "steers a search: no claim rests on it"
EXCUSED: dict[tuple[str, str, str], str] = {
    # (end of the file's name, end of the function's name, what stands there): why no test must
    # miss it
    (
        "graph/activations.py",
        "",
        "rounded_up(math.log(2))",
    ): "not in a function; tested against log 2",
    ("", "", "BAND"): "a dead band for ties: either side is sound",
    (
        "transport/confidence.py",
        "error_at_most",
        "slack",
    ): "of the cost: the sum beside it is raised by as much",
    (
        "transport/confidence.py",
        "lead_at_least",
        "slack",
    ): "each of three terms pays for all of them",
    (
        "transport/confidence.py",
        "lead_at_least",
        "SLACK",
    ): "beside the slack of the powers, which is no less",
    (
        "transport/confidence.py",
        "slack_of",
        "SLACK",
    ): "far more than rounding at low orders, where nothing is lost by a power",
    ("", "", "FAINT"): "an absolute term for underflow, which its own tests guard",
    (
        "exact/nearest_flip.py",
        "Search.run",
        "gamma(self.graph)",
    ): "prefers flips that outlast another order of summation",
    (
        "exact/flip_problem.py",
        "moving",
        "1e-12",
    ): "chooses p: every p between 0 and |a| gives a bound",
    (
        "exact/penalised.py",
        "worthwhile",
        "1e-12",
    ): "chooses a step and p: every p between 0 and |a| gives a bound",
    (
        "exact/nearest_flip.py",
        "nearest_flip",
        "slack",
    ): "a margin that is asked for, not a rounding term",
    (
        "relax/jacobian.py",
        "entry_norms",
        "1e-12",
    ): "for a constant of LAPACK: no input is known that needs it beside 2^-50 (m + n)",
    (
        "relax/jacobian.py",
        "entry_norms",
        "UNIT * most",
    ): "relative to |middle|, whose norm is at most m + n times that of middle: in 2^-50 (m + n)",
    (
        "attention_bounds.py",
        "spectral",
        "UP",
    ): "the root loses 2^-53: one of the eight units that `p + q + 8` has to spare",
    (
        "attention_bounds.py",
        "region_bound",
        "UNIT * (low.abs() + high.abs())",
    ): "a box that is off by a unit of its numbers moves each term by less than `error`",
    (
        "graph/planes.py",
        "middle_of",
        "UNIT * m.abs()",
    ): "its docstring: `1 + UNIT` covers it where 0 lies in the span, as it does in a plane's",
    (
        "operators/normalise.py",
        "_around",
        "UNIT * math.sqrt(n)",
    ): "less than 2^-53 (q + excess), which `error` covers besides the rest",
    (
        "operators/softmax.py",
        "plane",
        "UNIT\n        rest = all_but_own",
    ): "`delta`: below 8 units of the sums where r is small, below the bend elsewhere (docstring)",
    (
        "operators/softmax.py",
        "plane",
        "SMALL) & (top",
    ): "says where a plane is of use: with any rest above 0 it holds",
    (
        "operators/softmax.py",
        "plane",
        "SMALL * r.sum",
    ): "what is dropped counts less than 70 SMALL an entry: far below the 8 units (docstring)",
    ("relax/executed.py", "ahead", "slack) if last.bias"): "its shape, for zeros",
    ("relax/crown.py", "", "room_of("): "how many rows go at a time, not a number of a bound",
    ("relax/lines.py", "", "room_of("): "how many rows go at a time, not a number of a bound",
    (
        "relax/ball_margins.py",
        "",
        "room_of(",
    ): "how many rows go at a time, not a number of a bound",
    (
        "relax/slope_cones.py",
        "",
        "room_of(",
    ): "how many rows go at a time, not a number of a bound",
    **dict.fromkeys(
        (("relax/slope_cones.py", "_units", term) for term in ("2.0**-1000", "2.0**-500")),
        "for a row of zeros, which is NaN without it: then `fmin` takes eps",
    ),
    (
        "relax/slope_cones.py",
        "_moved",
        "UNIT) + self.sizes",
    ): "one line below the length grows by 2^-20 of itself, which is more for 2^31 neurons",
    (
        "relax/slope_cones.py",
        "add",
        "UP\n            linear",
    ): "`whole` has been rounded up by 2^12 units, and the two operations lose two",
    **dict.fromkeys(
        (
            ("relax/slope_cones.py", "_widest", f"2.0**-40){end}")
            for end in ("\n        best", "\n        cut")
        ),
        "the value loses n / 2 + 3 units of itself, and `slack` in `upper` has n + 64",
    ),
    (
        "relax/slope_cone_layer.py",
        "Layer.reach",
        "2.0**-20",
    ): "chooses the level: every level gives a bound",
    (
        "relax/slope_cone_layer.py",
        "Layer.reach",
        "UNIT)\n        fixed",
    ): "`box` is off by a unit of itself, in `slack`; more only where a kernel flushes it to 0",
    (
        "relax/slope_cone_layer.py",
        "losses_of",
        "tiny}",
    ): "at the input rows are unit vectors; every other node counts 32 units to spare",
    (
        "relax/slope_cone_layer.py",
        "losses_of",
        "2.0**-20",
    ): "`terms` counts every rounding twice: more than 2^-20 of it is to spare",
    ("relax/windows.py", "", "room_of("): "how many rows go at a time, not a number of a bound",
    ("relax/windows.py", "Looks.__init__", "error), -1)"): "its shape",
    ("relax/quadratic.py", "Relaxation.begun", "1e-30"): STEERS,
    (
        "relax/quadratic.py",
        "Relaxation.claimed",
        "UNIT * solid",
    ): "`solid.sum()` is at most `sizes + pulls.sum()`, whose 4 n + 64 units are 3 n to spare",
    ("relax/backward.py", "unit_rows", "error), -1)"): "its shape",
    (
        "relax/lines.py",
        "open_entries",
        "STILL",
    ): "what is not tightened keeps the bounds that it has",
    (
        "relax/ball_relaxation.py",
        "",
        "LEAST",
    ): "a multiplier, not a rounding: any above 0 gives a bound, and with 0 there is none",
    (
        "relax/ball_relaxation.py",
        "BallLayer._best",
        "layer.error)",
    ): "second order: `error` counts 1.01 units for one",
    ("relax/ball_relaxation.py", "BallLayer.rows", "self.error"): STEERS,
    ("relax/ball_margins.py", "", "2.0**-20"): STEERS,
    ("exact/cones.py", "", "CLOSED"): STEERS,
    (
        "exact/cones.py",
        "cutoff",
        "self.rounding",
    ): "when a node is done: its bound counts whatever it is",
    (
        "exact/cones.py",
        "values_at",
        "rounding.network",
    ): "a network, not a number: `rounding.relative` times its value",
    ("exact/cones.py", "solve", "error"): "an error of the relaxation, not of rounding",
    ("lipschitz/ladder.py", "_closed", "1e-12"): STEERS,
    ("loss/curve.py", "_grown", "1e-12"): "every multiplier gives a bound",
    ("loss/worst_others.py", "best", "UNIT"): "which points a plan may use: its cost is recomputed",
    ("transport/grouped.py", "_vertices", "1e-13"): "0 asks for more bends",
    ("transport/grouped.py", "_vertices", "1e-14"): "0 asks for more bends",
    (
        "transport/grouped.py",
        "inverse",
        "self.slack",
    ): "whether an accuracy is a level: both are rounded down before",
    ("loss/growth.py", "growth_above", "NEAR"): "the first radius, which may be any",
    (
        "loss/residual_certificate.py",
        "find_line",
        "UNIT)\n        self.line = lam",
    ): "`lam` is 1e-9 above the slope: more than n units for n < 2^21",
    (
        "exact/multipliers.py",
        "prove",
        "INFLATE",
    ): "what is proved and returned is the larger weight",
    ("loss/recession.py", "_far", "error"): "a list; what is in it is no rounding",
    ("graph/region.py", "inside", "1e-12"): "moves sample points inside: no claim rests on it",
    ("exact/multipliers.py", "start", "1e-12"): STEERS,
    ("lipschitz/semidefinite.py", "_with", "1e-300"): STEERS,
    (
        "transformer_constants.py",
        "_carry",
        "UP",
    ): "`times` adds nine units of all magnitudes, of which four are used (see there)",
    **dict.fromkeys(
        (("transformer_constants.py", "_normalise", term) for term in ("UP", "UNIT", "slack)")),
        "`to` and `times` add more units of all magnitudes than everything loses (see there)",
    ),
    ("paper/corollary.py", "_flattest", "2.0**-24"): STEERS,
    (
        "paper/attention_bounds.py",
        "castin",
        "UP",
    ): "`spectral` has been rounded up by 128 units, and ten operations lose ten",
    ("radius_search.py", "_next", "tiny"): STEERS,
    (
        "loss/chords.py",
        "_some",
        "UNIT),\n        )\n        return",
    ): "two inputs lose less than two units, and `_quotient` has three to spare (see there)",
    ("loss/chords.py", "run", "2.0**-30"): "how small the cubes become: every size gives a bound",
    (
        "loss/penalty.py",
        "Family.bounds",
        "LIFT",
    ): "which certificates are mixed: they hold mixed or not",
    ("loss/penalty.py", "_flatten", "1e-13"): "which certificate is kept as the flattest: all hold",
    ("loss/penalty.py", "_flatten", "LIFT"): "which certificate is kept as the flattest: all hold",
    ("loss/penalty.py", "_between", "1e-14"): STEERS,
    (
        "loss/worst_case.py",
        "_paid",
        "1e-12",
    ): "checks our own plan, which `allocate` keeps within the budget: no claim rests on it",
    ("loss/descent.py", "descend", "1e-13"): "every multiplier gives a bound",
    ("loss/worst_case.py", "_steepest_chord", "1e-1"): "every multiplier gives a bound",
    (
        "radius_search.py",
        "_try",
        "UNIT)\n        free",
    ): "the radius is taken 1e-9 smaller, which is more than n units",
    ("products.py", "product_radii", "slack is not None"): "a question, not a number",
    ("exact/constants.py", "cut", "CLOSE"): "when a node is done: its bound counts whatever it is",
    (
        "exact/constants.py",
        "goal",
        "self.slack",
    ): "when a proof may stop: its bound counts whatever it is",
    ("exact/constants.py", "walk", "1e-12"): STEERS,
    ("search/shallow.py", "ShallowSearch.__init__", "1e-300"): STEERS,
    ("search/shallow.py", "ShallowSearch._bounded", "1e-12"): STEERS,
    (
        "search/input_boxes.py",
        "__post_init__",
        "rounded_up(",
    ): "the four units of `room` and of the directions cover it (see there)",
    ("search/input_boxes.py", "_smear", "1e-300"): STEERS,
    (
        "search/products.py",
        "ProductSweep._remainders",
        "slack) + TINY\n        apart",
    ): "`2 slack (size + rest)` is more than the entries need by what the last four sums need",
    (
        "transport/confidence.py",
        "proportions",
        "np.nextafter(high, 1.0)",
    ): "`_binomial` has been rounded up",
    ("transport/confidence.py", "price_of", "error"): "every price gives a limit: no rounding term",
    (
        "transport/side.py",
        "_most",
        "slack * float(self.mass[k])",
    ): "the slack of `part` is enough, which is at least the mass (see there)",
    (
        "transformer_constants.py",
        "slope",
        "UNIT",
    ): "`UP` in `stretch` is more than 4000 terms lose",
    (
        "relax/executed.py",
        "dot_error",
        "UNIT * both",
    ): "`unit` in `_summed` is larger than that of the type by 2^-52, which is more for 2^24 terms",
    **dict.fromkeys(
        (
            ("relax/lines.py", "Slopes.of", term)
            for term in ("UNIT * size", "UNIT)\n        crossing", "rounded_up(here + lost)")
        ),
        "`rate` counts `size + lost` n + 10 times, for n + 7 roundings with those of `drop` itself",
    ),
    (
        "relax/executed.py",
        "_by_sign",
        "UNIT * (left + right)",
    ): "`total` is at least half of p P + q N, of which `SLACK` takes more for 2^19 terms",
    (
        "relax/norms.py",
        "_executed",
        "error), torch.fmin(",
    ): "a question, not a number",
    ("relax/ball_quadratic_terms.py", "FirstLayer.bound", "2.0**-20"): "every mu gives a bound",
    **dict.fromkeys(
        (
            ("relax/ball_quadratic_terms.py", "FirstLayer.claimed", f"2.0**-20){end}")
            for end in (")", "\n")
        ),
        "mu is at least 1.01 lam ||W||^2: the other factor is more than 200 roundings",
    ),
    **dict.fromkeys(
        (
            ("relax/ball_quadratic_terms.py", "FirstLayer.claimed", term)
            for term in ("UNIT * mu)", "UNIT * a.norm(dim=1)\n")
        ),
        "|mu x| <= |a| + |res| + lam ||W||^2 |x|: in `sizes`, n + 29 units to spare, and in `unit`",
    ),
    (
        "relax/ball_quadratic_terms.py",
        "FirstLayer.claimed",
        "UNIT) + off",
    ): "`gap` is smaller by 2^-20, and the quotient larger: more than n units for n < 2^32",
    (
        "relax/norms.py",
        "_affine",
        "UP\n        self.radius",
    ): "both lengths have room for a sum (`length_above`)",
    (
        "relax/norms.py",
        "_executed",
        "2.0**-20)\n        # It holds",
    ): "`apart` is rounded up by 2^12 units, and `rate` loses four",
    (
        "relax/norms.py",
        "_executed",
        "UP\n        length",
    ): "`rate` is larger by 2^-20, and `length_above` has room for a sum",
    (
        "relax/ball_quadratic_terms.py",
        "_join",
        "UP\n        share",
    ): "what is made of `inner` is rounded up by 2^12 units after it: more than it loses",
    (
        "relax/ball_quadratic_terms.py",
        "restricted_norm",
        "UP\n",
    ): "`slack` is more than 64 units of the square, of which the root takes two",
    (
        "relax/balls.py",
        "CutBalls.upper",
        "SHORT_SQUARE",
    ): "`filling_step` takes no norm below 1e-150: shorter rows have a looser bound, no wrong one",
    (
        "relax/balls.py",
        "CutBalls.upper",
        "SHORT_RADIUS",
    ): "with smaller radii t may be 0, and the bound is infinite or no number: nothing is proved",
    (
        "relax/norms.py",
        "gram_norms",
        "UNIT)\n    return",
    ): "the 64 units in `off` are 128 of the root, which loses one and its product two",
    (
        "relax/norms.py",
        "product",
        "UP",
    ): "each factor is rounded up by more than its product loses",
    (
        "relax/crown.py",
        "_total",
        "2.0**-20",
    ): "of an absolute term for underflow, which is itself an upper estimate",
    (
        "relax/crown.py",
        "_charge",
        "rounding.up(",
    ): "second order: four of the terms in `count` are spare",
    (
        "relax/crown.py",
        "_charge",
        "rounding_of(",
    ): "second order: four of the terms in `count` are spare",
}


def excused(mutant: Mutant) -> tuple[str, str, str] | None:
    """The entry of the table that says why no test has to miss a place."""
    for file, where, old in EXCUSED:
        ours = mutant.file.endswith(file) and mutant.where.endswith(where)
        if ours and mutant.rest.startswith(old):
            return file, where, old
    return None


NAMED: tuple[tuple[str, str, str, str], ...] = (
    # file, function, text, what it becomes
    (
        "transport/distribution.py",
        "Distribution.verify",
        "not cost <= self.threat.eps",
        "not cost <= self.threat.eps * (1 + 1e-6)",
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
            Mutant(
                file, where, source[:start].count("\n") + 1, start, start + len(old), old, new, old
            )
        )
    return found
