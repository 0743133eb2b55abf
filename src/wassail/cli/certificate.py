"""`wassail certify`."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.cli.shared import (
    checked,
    folder_of,
    known,
    loaded,
    made_by,
    progress,
    seconds_text,
    writing,
)
from wassail.errors import InputError
from wassail.names import LOSSES, SLOPES
from wassail.report.results import finite_or_none
from wassail.threat import Threat, box_text, parse_eps, show
from wassail.writing import printable, rounded_down, rounded_up, save

if TYPE_CHECKING:
    from wassail.certificates.bound import Bound
    from wassail.certificates.loss.certificate import Certificate
    from wassail.paper.corollary import Corollary

SLOPE_DEFINITIONS = """\
slope: growth of the worst expected loss per unit of eps, over distributions within Wasserstein-1
distance eps of the data.
l: at infinity, for large eps (0 in a box).
S: steepest chord from a sample, for small eps.
Lm: Lipschitz constant of the logit differences.
L: the paper's, 2^(1/r) times that of the logits. l <= S <= Lm <= L; all digits are rounded outward.
at most: the lowest upper line at eps. at least: the highest lower one.
witnessed: the share of the growth at least - E that a distribution built from evaluated points
attains; the rest is approached along a ray and not attained."""


def certify_command(options: argparse.Namespace) -> int:
    """`wassail certify`."""
    budgets, (norm, domain) = sorted({parse_eps(e) for e in options.eps}), checked(options)
    known("slope", options.slopes, SLOPES)
    if options.loss == "dlr":
        raise InputError(
            "the DLR loss is a ratio of logit differences and not Lipschitz: use --loss margin "
            "or cross_entropy."
        )
    known("loss", [options.loss], LOSSES)
    seconds = None if options.time_limit is None else seconds_text(options.time_limit)
    radius = parse_eps(options.radius)
    folder = folder_of(options)
    import wassail as ws
    from wassail.certificates.graph.reader import read
    from wassail.zoo.classes import check_match, classes_text, numbers_of

    source, data = loaded(options)
    check_match(source.model, data)
    (x, y), graph = data.read(0, len(data)), read(source.model, tuple(data.shape), smooth=True)
    certificate = ws.certify(
        graph,
        x,
        y,
        norm,
        options.loss,
        domain,
        slopes=options.slopes,
        time_limit=seconds,
        seed=options.seed,
        progress=progress(options),
    )
    rows = [
        (eps, *certificate.bounds(eps), certificate.witness(eps).info["loss"]) for eps in budgets
    ]
    loss = options.loss.replace("_", " ")
    where = f"{options.model} on {len(y)} samples of {options.data}, {loss}, l{norm:g}, "
    where += box_text(domain)
    made = made_by(options)
    modules = None
    if graph.curved:
        modules = ws.corollary(graph, norm, ws.Ball(x[0], radius, norm, domain), seed=options.seed)
    named = classes_text(data.classes, data.info)
    if named is not None:
        print(printable(named))
    _print_certificate(where, made, certificate, rows, modules)
    if folder is not None:
        about = {"run": where, "made_with": made, "classes": numbers_of(data.classes)}
        _save_certificate(folder, certificate, rows, about, modules)
    return 0


def _print_certificate(
    where: str,
    made: str,
    certificate: Certificate,
    rows: list[tuple[float, float, float, float]],
    modules: Corollary | None,
) -> None:
    """The certificate as text."""
    from wassail.report.terminal import console as screen
    from wassail.report.terminal import table_of

    console = screen()
    figures = ("at least", "at most", "gap", "upper side by", "time s")
    slopes = table_of("slope", None, figures)
    for name, (symbol, _) in SLOPES.items():
        bound: Bound | None = getattr(certificate, name)
        if bound is not None:
            gap = "exact" if bound.exact else f"{100 * bound.gap:.2g} %"
            spent = bound.info.get("seconds")
            time_spent = "" if spent is None else f"{spent:.1f}"
            slopes.add_row(
                f"{symbol:2} {name}",
                rounded_down(bound.lower),
                rounded_up(bound.upper),
                gap,
                bound.method,
                time_spent,
            )
    sides = ("E on the data", "worst: at least", "at most", "witnessed")
    losses = table_of("eps", None, sides)
    start = certificate.empirical
    for eps, lower, upper, reached in rows:
        share = (
            f"{rounded_down(100 * (reached - start) / (lower - start))} %" if lower > start else ""
        )
        losses.add_row(show(eps), f"{start:.6g}", rounded_down(lower), rounded_up(upper), share)
    console.print(f"[bold]{where}[/bold]")
    console.print(slopes)
    console.print(losses)
    console.print(SLOPE_DEFINITIONS)
    if modules is not None:
        console.print(
            "\n[bold]Constants of the modules, for the paper's bound on transformers[/bold]"
        )
        console.print(str(modules), soft_wrap=True, highlight=False, markup=False)
    if certificate.tight is not None:
        console.print(
            "The condition of the paper's theorem for l = L "
            f"{'holds' if certificate.tight else 'does not hold'} here."
        )
    eps, lower, upper, reached = rows[-1]
    low = rounded_down(lower)
    high = rounded_up(upper)
    threat = Threat(certificate.norm, 1.0, eps, certificate.domain)
    above = f"no distribution within that Wasserstein distance of the data is worse than {high}"
    if math.isinf(upper):
        above = "the slopes asked for bound nothing above (give a box, or add infinity to --slopes)"
    console.print(
        f"[bold]The worst expected loss is between {low} and {high} over {threat}[/bold] (on the "
        f"data {start:.6g}):\n"
        f"{above}, and one that reaches {rounded_down(reached)} was built and evaluated."
    )
    console.print(f"[dim]{made}[/dim]")


def _modules_entry(modules: Corollary) -> dict[str, Any]:
    sides = {name: finite_or_none(getattr(modules, name)) for name in ("paper", "ours", "local")}
    rows = [
        {name: finite_or_none(value) for name, value in row._asdict().items()}
        for row in modules.rows
    ]
    return {
        "style": modules.style,
        "domain": modules.domain,
        "log10_lambda": sides,
        "empirical": modules.empirical,
        "slope_at_least": modules.slope,
        "vacuous": modules.vacuous,
        "rows": rows,
    }


def _save_certificate(
    folder: Path,
    certificate: Certificate,
    rows: list[tuple[float, float, float, float]],
    run: dict[str, Any],
    modules: Corollary | None,
) -> None:
    def entry(bound: Bound) -> dict[str, Any]:
        kept = {"lower": bound.lower, "upper": finite_or_none(bound.upper), "exact": bound.exact}
        return {**kept, "method": bound.method, "seconds": bound.info.get("seconds")}

    slopes = {
        name: entry(bound) for name in SLOPES if (bound := getattr(certificate, name)) is not None
    }
    names = ("eps", "lower", "upper", "witnessed")
    results = {
        **run,
        "norm": str(certificate.norm),
        "domain": certificate.domain,
        "loss": certificate.loss,
        "empirical": certificate.empirical,
        "slopes": slopes,
        "line": certificate.line,
        "tight": certificate.tight,
        **({} if modules is None else {"modules": _modules_entry(modules)}),
        "bounds": [dict(zip(names, map(finite_or_none, row))) for row in rows],
    }
    with writing(folder):
        certificate.save(folder / "certificate.safetensors")
        save(folder / "certificate.json", json.dumps(results, indent=1))
    print(f"wrote {folder / 'certificate.safetensors'} and {folder / 'certificate.json'}")
