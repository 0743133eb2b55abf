"""The command line. Heavy imports happen inside the commands, so that `wassail --help` answers at once."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.errors import InputError, unknown
from wassail.threat import Domain, Threat, number, parse_domain, parse_eps, parse_norm, parse_order, show

if TYPE_CHECKING:
    from torch import Tensor

    from wassail.certificates.bound import Bound
    from wassail.certificates.certify import Certificate
    from wassail.certificates.radii import Radii
    from wassail.certificates.transformer import Corollary
    from wassail.network import Model
    from wassail.transport import Distribution, Flips, RiskCurve

SUMMARY = "How badly can a classifier fail under every distribution within a Wasserstein ball of your data?"
# The names of attacks.catalogue, spelt out here because that module needs torch.
ATTACKS = (
    "wda", "wda++", "nearest", "w-pgd", "w-fgsm", "fgsm", "pgd", "apgd-ce", "apgd-dlr", "apgd-t", "square", "autoattack",
    "a3", "a3-wda", "fab", "fab-t", "deepfool", "cw",
)  # fmt: skip
DEFAULT = ("wda", "wda++", "nearest")
SANDWICH_FILES = "flips.safetensors, radii.safetensors, results.json and sandwich.png"
SLOPES = {"infinity": "l", "anchor": "S", "margin": "Lm", "paper": "L"}  # of certificates.certify, with their symbols
LOSSES = ("cross_entropy", "margin")
METHODS = ("auto", "lipschitz", "crown", "alpha-crown", "branch", "exact")  # of certificates.radii
FIGURES = ("convergence", "witness")  # of report.figures
DEMO_SECONDS = "40"  # for the certificates of the demo, which takes a minute altogether
CHUNK = 32  # samples that are certified between two looks at the clock
DEFINITIONS = """\
Omega_p: all distributions within Wasserstein-p distance eps of the data; Omega_inf: every sample may move by eps.
accuracy: mass of the adversarial distribution that is classified correctly; a tie is an error. Lower = stronger attack.
WDA moves the share 1/kappa of every sample by up to kappa^(1/p) eps. WDA++, nearest and other attacks for the nearest
flip spend the budget on the nearest flips first; nearest is our engine, WDA++ the paper's. W-PGD moves all samples at
once. Attacks with a ball for every sample (APGD, AutoAttack, A3, ...) answer Omega_inf; pooled, their flips serve all.
spent: share of the budget eps. F + B: forward and backward passes, mean per sample that was correct
to begin with. 95 %: bootstrap interval over the samples."""
SANDWICH_DEFINITIONS = """\
certified: proved. Every distribution in Omega_p(eps) has at least this accuracy, because no point within a sample's radius is
misclassified; rounded down. attacked: all attacks pooled. The truth lies between the two. gap: what is not known, in
percentage points; largest: over all eps. 50 % at eps: accuracy falls to one half somewhere between these two budgets."""
SLOPE_DEFINITIONS = """\
slope: growth of the worst expected loss per unit of eps, over distributions within Wasserstein-1 distance eps of the data.
l: at infinity, for large eps (0 in a box). S: steepest chord from a sample, for small eps. Lm: Lipschitz constant of the
logit differences. L: the paper's, 2^(1/r) times that of the logits. l <= S <= Lm <= L; all digits are rounded outward.
at most: the lowest upper line at eps. at least: the highest lower one. witnessed: the share of the growth
at least - E that a distribution built from evaluated points attains; the rest is approached along a ray and not attained."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for bad input (one sentence on stderr), 130 for Ctrl-C."""
    options = _parser().parse_args(argv)
    try:
        code: int = options.run(options)
        return code
    except InputError as error:
        print(f"wassail: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("wassail: interrupted.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wassail", description=SUMMARY)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="attack and certify the embedded model on the embedded data: a minute")
    demo.add_argument("model", nargs="?", default="digits-cnn-adv", help="a built-in model (default: %(default)s)")
    files = f"{SANDWICH_FILES} (default: wassail-demo)"
    _threat_options(demo, eps="0.05", attacks=DEFAULT, threads=1, out=files)  # a tiny network gains nothing from more threads
    _radius_options(demo, seconds=DEMO_SECONDS)
    demo.set_defaults(run=_evaluate, data="digits", weights=None, out="wassail-demo")

    evaluate = commands.add_parser("evaluate", help="robust accuracy from both sides: attacked and certified")
    _model_options(evaluate)
    _threat_options(evaluate, eps=None, attacks=("nearest",), threads=None, out=SANDWICH_FILES)
    _radius_options(evaluate, seconds=None)
    evaluate.set_defaults(run=_evaluate)

    attack = commands.add_parser("attack", help="attack a model on data")
    _model_options(attack)
    _threat_options(attack, eps=None, attacks=DEFAULT, threads=None, out="flips.safetensors and results.json")
    attack.set_defaults(run=_attack)

    certify = commands.add_parser("certify", help="bound the worst expected loss from both sides")
    _model_options(certify)
    certify.add_argument("--loss", default="cross_entropy", help="cross_entropy or margin (default: %(default)s)")
    certify.add_argument("--eps", nargs="+", default=["0.01", "0.1", "1"], help="budgets (default: 0.01 0.1 1)")
    certify.add_argument("--slopes", nargs="+", default=list(SLOPES), metavar="S",
                         help=f"any of {', '.join(SLOPES)} (default: all)")  # fmt: skip
    certify.add_argument("--radius", default="0.01",
                         help="transformers: module constants on a ball of this radius around the first sample, too "
                         "(default: %(default)s)")  # fmt: skip
    certify.add_argument("--time-limit", default="60", metavar="SECONDS", help="for all slopes (default: %(default)s)")
    _common_options(certify, norm="2", threads=None, out="certificate.safetensors and certificate.json")
    certify.set_defaults(run=_certify)

    paper = commands.add_parser("paper", help="the paper's figures, made again").add_subparsers(required=True, metavar="WHAT")
    figures = paper.add_parser("figures", help="PNG and CSV files of the figures, on networks of the plane")
    figures.add_argument("names", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)} (default: all)")
    figures.add_argument("--norm", default="2", help="ground norm: 1, 2 or inf (default: %(default)s)")
    figures.add_argument("--seed", type=int, default=0, help="of the networks and samples (default: 0)")
    figures.add_argument("--out", default="figures", help="directory to write to (default: %(default)s)")
    figures.set_defaults(run=_figures)

    models = commands.add_parser("models", help="list the built-in models")
    models.set_defaults(run=_models)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a built-in name (see `wassail models`), or module:factory with --weights")
    parser.add_argument("--weights", help="state dict for module:factory: .safetensors, or .pt (weights only)")
    parser.add_argument("--data", default="digits", help="'digits', or an .npz file with arrays x and y")


def _radius_options(parser: argparse.ArgumentParser, seconds: str | None) -> None:
    parser.add_argument("--method", default="auto", help=f"of the certified radii: {', '.join(METHODS)} (default: auto)")
    parser.add_argument("--time-limit", default=seconds, metavar="SECONDS",
                        help="for the radii; samples not reached by then are on neither side (default: %s)"
                        % (seconds or "none"))  # fmt: skip


def _threat_options(
    parser: argparse.ArgumentParser, eps: str | None, attacks: Sequence[str], threads: int | None, out: str
) -> None:
    parser.add_argument("--eps", default=eps, required=eps is None, help="budget, for example 8/255")
    parser.add_argument("--order", nargs="+", default=["1", "2", "inf"], metavar="P",
                        help="Wasserstein orders: any of 1, 2, any p >= 1, inf (default: 1 2 inf)")  # fmt: skip
    parser.add_argument("--attacks", nargs="+", default=list(attacks), metavar="A",
                        help=f"any of {', '.join(ATTACKS)} (default: {' '.join(attacks)})")  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=None, help="most samples in one model call (default: 250)")
    parser.add_argument("--step", default=None, help="step size alpha (default: the paper's for its eps, else a share)")
    parser.add_argument("--passes", type=int, default=100, help="passes a sample for `nearest` (default: %(default)s)")
    _common_options(parser, norm="inf", threads=threads, out=out)


def _common_options(parser: argparse.ArgumentParser, norm: str, threads: int | None, out: str) -> None:
    parser.add_argument("--norm", default=norm, help="ground norm: 1, 2 or inf (default: %(default)s)")
    parser.add_argument("--domain", nargs=2, default=["0", "1"], metavar=("LOW", "HIGH"), help="box (default: 0 1)")
    parser.add_argument("--no-box", action="store_true", help="let points leave the box: all of R^n")
    parser.add_argument("-n", type=int, default=None, help="use the first N samples only")
    parser.add_argument("--seed", type=int, default=0, help="keys the random starts (default: 0)")
    parser.add_argument("--out", default=None, help=f"directory for {out}")
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads (default: %s)" % (threads or "torch's own"))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _models(options: argparse.Namespace) -> int:
    from wassail import zoo

    for name, description in zoo.models().items():
        print(f"{name:16} {description}")
    return 0


def _attack(options: argparse.Namespace) -> int:
    eps, orders, norm, domain = _checked_threat(options)
    folder = _folder(options)
    model, x, y = _load(options)
    run = _Run(options, len(y), eps, orders, norm, domain)
    rows, pooled = _attacked(options, run, model, x, y)
    best = run.allocated(pooled)
    _print_attacks(run, rows, best)
    _print_attack_headline(run, rows, best)
    if folder is not None:
        _save(folder, pooled, run.about | {"results": _results(rows, best)})
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    eps, orders, norm, domain = _checked_threat(options)
    _known("method", [options.method], METHODS)
    seconds = math.inf if options.time_limit is None else _seconds(options.time_limit)
    folder = _folder(options)
    import torch

    import wassail as ws
    from wassail.certificates.structure import read

    model, x, y = _load(options)
    read(model, x.shape[1:], smooth=True)  # a model that cannot be certified is told before the attacks
    run = _Run(options, len(y), eps, orders, norm, domain)
    rows, pooled = _attacked(options, run, model, x, y)
    best = run.allocated(pooled)
    _print_attacks(run, rows, best)
    start = time.perf_counter()
    radii = _certified(options, model, pooled, seconds)
    flips = pooled.take(torch.arange(len(radii.values)))
    nearer = radii.flips(model, flips.x, flips.y)
    flips = flips if nearer is None else flips.merge(nearer)
    curves = [ws.risk_curve(flips, radii, order) for order in orders]
    headline = _print_sandwich(run, flips, curves, radii, time.perf_counter() - start)
    if folder is not None:
        results = {"results": _results(rows, best), **_sandwich_results(curves, radii, eps)}
        _save(folder, pooled, run.about | results, radii)
        _draw(folder, curves, f"{replace(run, samples=len(flips)).where}\n{headline}", eps)
    return 0


@dataclass(frozen=True)
class _Run:
    """What every table and file of one command says about it."""

    options: argparse.Namespace
    samples: int
    eps: float
    orders: list[float]
    norm: float
    domain: Domain

    @property
    def where(self) -> str:
        """Model, data and threat."""
        data = f"{self.options.model} on {self.samples} samples of {self.options.data}"
        return f"{data}, l{self.norm:g}, eps {show(self.eps)}, {_box(self.domain)}"

    @property
    def about(self) -> dict[str, Any]:
        """The same, with the versions, for a file."""
        return {"run": self.where, "made_with": _made(self.options)}

    def allocated(self, pooled: Flips) -> list[Distribution]:
        """The distribution that the pooled flips allow, for each order."""
        from wassail.transport import allocate

        return [allocate(pooled, self.eps, order) for order in self.orders]


def _checked_threat(options: argparse.Namespace) -> tuple[float, list[float], float, Domain]:
    """Budget, orders, norm and domain: what can be wrong without a model is checked before torch is even imported."""
    eps, (norm, domain) = parse_eps(options.eps), _checked(options)
    orders = list(dict.fromkeys(parse_order(p) for p in options.order))
    _known("attack", options.attacks, ATTACKS)
    return eps, orders, norm, domain


def _attacked(
    options: argparse.Namespace, run: _Run, model: Model, x: Tensor, y: Tensor
) -> tuple[list[tuple[str, Distribution, float]], Flips]:
    """Every attack asked for, as rows (title, distribution, seconds), and the nearest flips of all of them."""
    from wassail.attacks import catalogue

    common: dict[str, Any] = {"batch_size": options.batch_size, "seed": options.seed, "progress": _progress(options)}
    own: dict[str, dict[str, Any]] = {"nearest": {"passes": options.passes}}
    if options.step is not None:
        own |= {name: {"step": options.step} for name in ("wda", "wda++")}
    rows: list[tuple[str, Distribution, float]] = []
    pool: list[Flips] = []
    for name in dict.fromkeys(options.attacks):
        entry = catalogue.find(name)
        start = time.perf_counter()
        found = catalogue.results(entry, model, x, y, run.norm, run.eps, run.orders, run.domain, **common, **own.get(name, {}))
        for result in found:
            kappa = result.info.get("options", {}).get("kappa")
            title = entry.title if kappa is None else f"{entry.title}, kappa {kappa:g}"
            rows.append((title, result, time.perf_counter() - start))
            if entry.orders != "one" or result.threat.order == run.orders[0]:  # one search, one count of its passes
                pool.append(result.flips)
            start = time.perf_counter()
    if not rows:
        raise InputError(f"none of {', '.join(options.attacks)} answers order {' or '.join(options.order)}: add --order inf.")
    return rows, pool[0].merge(*pool[1:])


def _certified(options: argparse.Namespace, model: Model, flips: Flips, seconds: float) -> Radii:
    """Certified radii of the samples, or with a time limit of as many of the first ones as it allows.

    Nothing is sought beyond a known flip.
    """
    import torch

    from wassail.certificates.radii import radii

    size = max(len(flips), 1) if seconds == math.inf else CHUNK
    end, parts = time.monotonic() + seconds, []
    for start in range(0, max(len(flips), 1), size):
        some = flips.take(torch.arange(start, min(start + size, len(flips))))
        share = max(end - time.monotonic(), 0.1) * len(some) / (len(flips) - start) if seconds < math.inf else None
        parts.append(
            radii(
                model, some.x, some.y, flips.norm, flips.domain, options.method,
                upper=some.distances, time_limit=share, progress=_progress(options),
            )
        )  # fmt: skip
        if time.monotonic() > end:
            break
    points = [part.points for part in parts if part.points is not None]
    return replace(
        parts[0], values=torch.cat([part.values for part in parts]), exact=torch.cat([part.exact for part in parts]),
        points=torch.cat(points) if len(points) == len(parts) else None,
        info={**parts[0].info, "seconds": sum(part.info["seconds"] for part in parts)},
    )  # fmt: skip


def _certify(options: argparse.Namespace) -> int:
    budgets, (norm, domain) = sorted({parse_eps(e) for e in options.eps}), _checked(options)
    _known("slope", options.slopes, SLOPES)
    if options.loss == "dlr":
        raise InputError("the DLR loss is a ratio of logit differences and not Lipschitz: use --loss margin or cross_entropy.")
    _known("loss", [options.loss], LOSSES)
    seconds, radius = _seconds(options.time_limit), parse_eps(options.radius)
    folder = _folder(options)
    import wassail as ws
    from wassail.certificates.structure import read

    model, x, y = _load(options)
    graph = read(model, x.shape[1:], smooth=True)
    certificate = ws.certify(
        graph, x, y, norm, options.loss, domain,
        slopes=options.slopes, time_limit=seconds, seed=options.seed, progress=_progress(options),
    )  # fmt: skip
    rows = [(eps, *certificate.bounds(eps), certificate.witness(eps).info["loss"]) for eps in budgets]
    loss = options.loss.replace("_", " ")
    where = f"{options.model} on {len(y)} samples of {options.data}, {loss}, l{norm:g}, {_box(domain)}"
    made = _made(options)
    modules = None
    if graph.curved:
        modules = ws.corollary(graph, norm, ws.Ball(x[0], radius, norm, domain), seed=options.seed)
    _print_certificate(where, made, certificate, rows, modules)
    if folder is not None:
        _save_certificate(folder, certificate, rows, {"run": where, "made_with": made}, modules)
    return 0


def _print_certificate(
    where: str,
    made: str,
    certificate: Certificate,
    rows: list[tuple[float, float, float, float]],
    modules: Corollary | None,
) -> None:
    from rich import box
    from rich.table import Table

    console = _console()
    slopes = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    slopes.add_column("slope", no_wrap=True)
    for name in ("at least", "at most", "gap"):
        slopes.add_column(name, justify="right", no_wrap=True)
    slopes.add_column("upper side by", no_wrap=True)
    slopes.add_column("time s", justify="right", no_wrap=True)
    for name, symbol in SLOPES.items():
        bound: Bound | None = getattr(certificate, name)
        if bound is not None:
            gap = "exact" if bound.exact else f"{100 * bound.gap:.2g} %"
            spent = bound.info.get("seconds")
            time_spent = "" if spent is None else f"{spent:.1f}"
            slopes.add_row(f"{symbol:2} {name}", _down(bound.lower), _up(bound.upper), gap, bound.method, time_spent)
    losses = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("eps", "E on the data", "worst: at least", "at most", "witnessed"):
        losses.add_column(name, justify="right", no_wrap=True)
    start = certificate.empirical
    for eps, lower, upper, reached in rows:
        share = f"{_down(100 * (reached - start) / (lower - start))} %" if lower > start else ""
        losses.add_row(show(eps), f"{start:.6g}", _down(lower), _up(upper), share)
    console.print(f"[bold]{where}[/bold]")
    console.print(slopes)
    console.print(losses)
    console.print(SLOPE_DEFINITIONS)
    if modules is not None:
        console.print("\n[bold]Constants of the modules, for the paper's bound on transformers[/bold]")
        console.print(str(modules), soft_wrap=True, highlight=False, markup=False)
    if certificate.tight is not None:
        console.print(
            f"The condition of the paper's theorem for l = L {'holds' if certificate.tight else 'does not hold'} here."
        )
    eps, lower, upper, reached = rows[-1]
    low, high, threat = _down(lower), _up(upper), Threat(certificate.norm, 1.0, eps, certificate.domain)
    above = f"no distribution within that Wasserstein distance of the data is worse than {high}"
    if math.isinf(upper):
        above = "the slopes asked for bound nothing above (give a box, or add infinity to --slopes)"
    console.print(
        f"[bold]The worst expected loss is between {low} and {high} over {threat}[/bold] (on the data {start:.6g}):\n"
        f"{above}, and one that reaches {_down(reached)} was built and evaluated."
    )
    console.print(f"[dim]{made}[/dim]")


def _modules_entry(modules: Corollary) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity

    sides = {name: plain(getattr(modules, name)) for name in ("paper", "ours", "local")}
    rows = [{name: plain(value) for name, value in row._asdict().items()} for row in modules.rows]
    return {
        "style": modules.style, "domain": modules.domain, "log10_lambda": sides, "empirical": modules.empirical,
        "slope_at_least": modules.slope, "vacuous": modules.vacuous, "rows": rows,
    }  # fmt: skip


def _save_certificate(
    folder: Path,
    certificate: Certificate,
    rows: list[tuple[float, float, float, float]],
    run: dict[str, str],
    modules: Corollary | None,
) -> None:
    def entry(bound: Bound) -> dict[str, Any]:
        upper = bound.upper if math.isfinite(bound.upper) else None  # JSON has no infinity
        seconds = bound.info.get("seconds")
        return {"lower": bound.lower, "upper": upper, "exact": bound.exact, "method": bound.method, "seconds": seconds}

    slopes = {name: entry(bound) for name in SLOPES if (bound := getattr(certificate, name)) is not None}
    names = ("eps", "lower", "upper", "witnessed")
    results = {
        **run, "norm": str(certificate.norm), "domain": certificate.domain, "loss": certificate.loss,
        "empirical": certificate.empirical, "slopes": slopes,
        "line": certificate.line, "tight": certificate.tight,
        **({} if modules is None else {"modules": _modules_entry(modules)}),
        "bounds": [dict(zip(names, (v if math.isfinite(v) else None for v in row))) for row in rows],
    }  # fmt: skip
    with _writing(folder):
        certificate.save(folder / "certificate.safetensors")
        (folder / "certificate.json").write_text(json.dumps(results, indent=1))
    print(f"wrote {folder / 'certificate.safetensors'} and {folder / 'certificate.json'}")


def _figures(options: argparse.Namespace) -> int:
    norm, names = parse_norm(options.norm), list(dict.fromkeys(options.names)) or list(FIGURES)
    _known("figure", names, FIGURES)
    from wassail.report.figures import write

    with _writing(Path(options.out)):
        paths = write(options.out, names, seed=options.seed, norm=norm)
    for path in paths:
        print(f"wrote {path}")
    return 0


def _seconds(text: str) -> float:
    seconds = number(text, "time limit")
    if not 0 < seconds < math.inf:
        raise InputError(f"the time limit is {text!r}: give a positive number of seconds.")
    return seconds


def _known(kind: str, names: Sequence[str], valid: Sequence[str] | dict[str, str]) -> None:
    for name in names:
        if name not in valid:
            raise unknown(kind, name, valid)


def _checked(options: argparse.Namespace) -> tuple[float, Domain]:
    """The norm and the domain, and everything else that commands on data share and that can be wrong without torch."""
    if options.n is not None and options.n < 1:
        raise InputError(f"-n is {options.n}: give a positive number of samples.")
    return parse_norm(options.norm), None if options.no_box else parse_domain(tuple(options.domain))


def _folder(options: argparse.Namespace) -> Path | None:
    """The --out directory, made before the work: one that cannot be written to should not cost a run."""
    if options.out is None:
        return None
    folder = Path(options.out)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write to {str(folder)!r}: {error.strerror}; choose another --out.") from None


def _load(options: argparse.Namespace) -> tuple[Model, Tensor, Tensor]:
    """The model and the data, the number of threads set."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(max(options.threads, 1))
    return load_model(options.model, options.weights), *load_data(options.data, options.n)


def _progress(options: argparse.Namespace) -> bool:
    return not options.quiet and sys.stderr.isatty()


def _box(domain: Domain) -> str:
    return "no box" if domain is None else f"box [{domain[0]:g}, {domain[1]:g}]"


def _made(options: argparse.Namespace) -> str:
    from wassail.network import versions

    return f"seed {options.seed}, " + ", ".join(f"{k} {v}" for k, v in versions().items())


def _down(value: float) -> str:
    """Six digits, rounded down: a printed lower bound is still one."""
    return f"{Context(prec=6, rounding=ROUND_FLOOR).create_decimal_from_float(value):g}"


def _up(value: float) -> str:
    """Six digits, rounded up; inf where nothing is known."""
    return f"{Context(prec=6, rounding=ROUND_CEILING).create_decimal_from_float(value):g}".replace("Infinity", "inf")


def _print_attacks(run: _Run, rows: list[tuple[str, Distribution, float]], best: list[Distribution]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("attack", no_wrap=True)
    table.add_column("over", no_wrap=True)
    for name in ("accuracy %", "95 %", "spent", "F + B", "time s"):
        table.add_column(name, justify="right", no_wrap=True)
    clean = rows[0][1].clean_accuracy
    table.add_row("none (clean)", "data", f"{100 * clean:.2f}", "", "0", "1 + 0", "")
    searched = None
    for name, result, seconds in rows:
        forwards, backwards = result.flips.passes()
        effort = (f"{forwards:.0f} + {backwards:.0f}", f"{seconds:.1f}")
        if result.allocation == "knapsack":  # one search serves all orders
            effort, searched = ("same", "") if searched == name else effort, name
        spent = f"{100 * result.cost / result.threat.eps:.1f} %"
        table.add_row(name, f"Omega_{result.threat.order:g}", f"{100 * result.accuracy:.2f}", "", spent, *effort)
    table.add_section()
    for result in best:
        low, high = result.interval()
        spent = f"{100 * result.cost / result.threat.eps:.1f} %"
        span = f"{100 * low:.1f}..{100 * high:.1f}"
        name = f"Omega_{result.threat.order:g}"
        table.add_row("[bold]all, pooled", name, f"[bold]{100 * result.accuracy:.2f}", span, spent, "", "")
    _console().print(f"[bold]{run.where}[/bold]")
    _console().print(table)
    _console().print(DEFINITIONS)


def _print_attack_headline(run: _Run, rows: list[tuple[str, Distribution, float]], best: list[Distribution]) -> None:
    worst, clean = min(best, key=lambda d: d.accuracy), rows[0][1].clean_accuracy
    _console().print(
        f"[bold]Accuracy is at most {100 * worst.accuracy:.2f} % over {worst.threat}[/bold] (clean {100 * clean:.2f} %):\n"
        "some distribution within that Wasserstein distance of the data is this bad, and it was built and re-verified."
    )
    _console().print(f"[dim]{run.about['made_with']}[/dim]")


def _print_sandwich(run: _Run, flips: Flips, curves: list[RiskCurve], radii: Radii, seconds: float) -> str:
    """The table with both sides, and its headline, which is returned."""
    from rich import box
    from rich.table import Table

    from wassail.report.sandwich import floor_percent

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("over", no_wrap=True)
    for name in ("certified %", "attacked %", "gap", "largest gap", "50 % at eps"):
        table.add_column(name, justify="right", no_wrap=True)
    for curve in curves:
        (certified, attacked), (gap, where) = curve(run.eps), curve.largest_gap()
        table.add_row(
            f"Omega_{curve.order:g}", f"[bold]{floor_percent(certified)}", f"[bold]{100 * attacked:.2f}",
            f"{100 * (attacked - certified):.2f}", f"{100 * gap:.2f} at {where:.3g}",
            f"{curve.inverse(0.5, 'certified'):.3g}..{curve.inverse(0.5):.3g}",
        )  # fmt: skip
    some = f"{len(flips)} samples" if len(flips) == run.samples else f"the first {len(flips)} of {run.samples} samples"
    exact = f"{int(radii.exact.sum())} of {len(flips)} exact"
    _console().print(f"[bold]From both sides, on {some}[/bold] (radii by {radii.method}, {exact}, {seconds:.1f} s)")
    _console().print(table)
    _console().print(SANDWICH_DEFINITIONS)
    lowest = min(curves, key=lambda curve: curve(run.eps)[1])
    (certified, attacked), clean = lowest(run.eps), flips.clean_accuracy()
    threat = Threat(run.norm, lowest.order, run.eps, run.domain)
    headline = f"Between {floor_percent(certified)} % and {100 * attacked:.2f} % stay correct over {threat}"
    _console().print(
        f"[bold]{headline}[/bold] (clean {100 * clean:.2f} %):\nproved for every distribution within that Wasserstein distance "
        "of the data, and attacked by one that was built and re-verified."
    )
    _console().print(f"[dim]{run.about['made_with']}[/dim]")
    return headline


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _results(rows: list[tuple[str, Distribution, float]], best: list[Distribution]) -> list[dict[str, Any]]:
    def entry(name: str, result: Distribution) -> dict[str, Any]:
        threat = result.threat
        return {
            "attack": name, "norm": str(threat.norm), "order": str(threat.order), "eps": threat.eps,
            "domain": threat.domain, "accuracy": result.accuracy, "clean_accuracy": result.clean_accuracy,
            "cost": result.cost, "passes": result.flips.passes(), "info": result.info,
        }  # fmt: skip

    return [entry(name, result) for name, result, _ in rows] + [entry("best of all", result) for result in best]


def _sandwich_results(curves: list[RiskCurve], radii: Radii, eps: float) -> dict[str, Any]:
    def entry(curve: RiskCurve) -> dict[str, Any]:
        (certified, attacked), (gap, where) = curve(eps), curve.largest_gap()
        return {
            "order": str(curve.order), "eps": eps, "certified": certified, "attacked": attacked,
            "gap": attacked - certified, "largest_gap": gap, "largest_gap_eps": where,
        }  # fmt: skip

    about = {"method": radii.method, "exact": int(radii.exact.sum()), "samples": len(radii.values)}
    return {"radii": about, "sandwich": [entry(curve) for curve in curves]}


def _save(folder: Path, pooled: Flips, results: dict[str, Any], radii: Radii | None = None) -> None:
    records = {"flips": pooled} | ({} if radii is None else {"radii": radii})
    with _writing(folder):
        for name, record in records.items():
            record.save(folder / f"{name}.safetensors")
        (folder / "results.json").write_text(json.dumps(results, indent=1))
    names = [*(f"{name}.safetensors" for name in records), "results.json"]
    print("wrote " + " and ".join(str(folder / name) for name in names))


def _draw(folder: Path, curves: list[RiskCurve], title: str, eps: float) -> None:
    """The picture of the sandwich; without matplotlib one sentence instead, since all figures are in results.json."""
    from wassail.report.sandwich import draw_sandwich

    try:
        figure = draw_sandwich(curves, title, mark=eps)
    except InputError as error:
        print(f"no sandwich.png: {error}")
        return
    with _writing(folder):
        figure.savefig(folder / "sandwich.png", dpi=160)
    print(f"wrote {folder / 'sandwich.png'}")


def load_model(name: str, weights: str | None) -> Model:
    """A built-in model by name, or `module:factory` called and filled with a state dict."""
    from wassail import zoo

    if ":" not in name:
        return zoo.load(name)
    import importlib

    module, _, factory = name.partition(":")
    sys.path.insert(0, "")  # as `python -m` does, so that a file in the current folder can be named
    try:
        model = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot load model {name!r}: {error}; give module:factory that can be imported.") from None
    finally:
        sys.path.remove("")
    if weights is not None:
        try:
            model.load_state_dict(_state_dict(weights))
        except (RuntimeError, AttributeError) as error:
            reason = str(error).splitlines()[-1].strip().rstrip(".")
            raise InputError(f"the weights {weights!r} do not fit {name!r}: {reason}.") from None
    return model  # type: ignore[no-any-return]


def _state_dict(path: str) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load_file

    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    except Exception as error:  # the restricted unpickler raises whatever a broken file makes it stumble over
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise InputError(f"cannot read weights from {path!r}: {reason}.") from None


def load_data(name: str, n: int | None = None) -> tuple[Tensor, Tensor]:
    """Samples and labels: built-in data by name, or an .npz file with arrays x (or images) and y (or labels)."""
    from wassail import zoo

    if not name.endswith(".npz"):
        x, y = zoo.data(name)
        return x[:n], y[:n]
    import zipfile

    import numpy as np
    import torch

    try:
        with np.load(name, allow_pickle=False) as file:
            keys = [next((k for k in names if k in file.files), None) for names in (("x", "images"), ("y", "labels"))]
            if None in keys:
                raise InputError(f"{name!r} has arrays {', '.join(file.files)}: name the samples x and the labels y.")
            x, y = (torch.from_numpy(np.ascontiguousarray(file[k][:n])) for k in keys if k)
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0].rstrip(".")
        raise InputError(f"cannot read data from {name!r}: {reason}.") from None
    return x, y


if __name__ == "__main__":
    sys.exit(main())
