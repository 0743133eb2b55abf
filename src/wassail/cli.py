"""The command line. Heavy imports happen inside the commands, so that `wassail --help` answers at once."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.errors import InputError, unknown
from wassail.threat import Domain, Threat, number, parse_domain, parse_eps, parse_norm, parse_order, show

if TYPE_CHECKING:
    from torch import Tensor

    from wassail.certificates.bound import Bound
    from wassail.certificates.certify import Certificate
    from wassail.network import Model
    from wassail.transport import Distribution, Flips

SUMMARY = "How badly can a classifier fail under every distribution within a Wasserstein ball of your data?"
# The names of attacks.catalogue, spelt out here because that module needs torch.
ATTACKS = (
    "wda", "wda++", "nearest", "w-pgd", "w-fgsm", "fgsm", "pgd", "apgd-ce", "apgd-dlr", "apgd-t", "square", "autoattack",
    "a3", "a3-wda", "fab", "fab-t", "deepfool", "cw",
)  # fmt: skip
DEFAULT = ("wda", "wda++", "nearest")
SLOPES = {"infinity": "l", "anchor": "S", "margin": "Lm", "paper": "L"}  # of certificates.certify, with their symbols
LOSSES = ("cross_entropy", "margin")
FIGURES = ("convergence", "witness")  # of report.figures
DEFINITIONS = """\
Omega_p: all distributions within Wasserstein-p distance eps of the data; Omega_inf: every sample may move by eps.
accuracy: mass of the adversarial distribution that is classified correctly; a tie is an error. Lower = stronger attack.
WDA moves the share 1/kappa of every sample by up to kappa^(1/p) eps. WDA++, nearest and other attacks for the nearest
flip spend the budget on the nearest flips first; nearest is our engine, WDA++ the paper's. W-PGD moves all samples at
once. Attacks with a ball for every sample (APGD, AutoAttack, A3, ...) answer Omega_inf; pooled, their flips serve all.
spent: share of the budget eps. F + B: forward and backward passes, mean per sample that was correct
to begin with. 95 %: bootstrap interval over the samples."""
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

    demo = commands.add_parser("demo", help="attack the embedded model on the embedded data: a minute, one table")
    demo.add_argument("model", nargs="?", default="digits-cnn-adv", help="a built-in model (default: %(default)s)")
    _threat_options(demo, eps="0.1", threads=1)  # a tiny network gains nothing from more
    demo.set_defaults(run=_attack, data="digits", weights=None)

    attack = commands.add_parser("attack", help="attack a model on data")
    attack.add_argument("model", help="a built-in name (see `wassail models`), or module:factory with --weights")
    attack.add_argument("--weights", help="state dict for module:factory: .safetensors, or .pt (weights only)")
    attack.add_argument("--data", default="digits", help="'digits', or an .npz file with arrays x and y")
    _threat_options(attack, eps=None, threads=None)
    attack.set_defaults(run=_attack)

    certify = commands.add_parser("certify", help="bound the worst expected loss of a ReLU network from both sides")
    certify.add_argument("model", help="a built-in name (see `wassail models`), or module:factory with --weights")
    certify.add_argument("--weights", help="state dict for module:factory: .safetensors, or .pt (weights only)")
    certify.add_argument("--data", default="digits", help="'digits', or an .npz file with arrays x and y")
    certify.add_argument("--loss", default="cross_entropy", help="cross_entropy or margin (default: %(default)s)")
    certify.add_argument("--eps", nargs="+", default=["0.01", "0.1", "1"], help="budgets (default: 0.01 0.1 1)")
    certify.add_argument("--slopes", nargs="+", default=list(SLOPES), metavar="S",
                         help=f"any of {', '.join(SLOPES)} (default: all)")  # fmt: skip
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


def _threat_options(parser: argparse.ArgumentParser, eps: str | None, threads: int | None) -> None:
    parser.add_argument("--eps", default=eps, required=eps is None, help="budget, for example 8/255")
    parser.add_argument("--order", nargs="+", default=["1", "2", "inf"], metavar="P",
                        help="Wasserstein orders: any of 1, 2, any p >= 1, inf (default: 1 2 inf)")  # fmt: skip
    parser.add_argument("--attacks", nargs="+", default=list(DEFAULT), metavar="A",
                        help=f"any of {', '.join(ATTACKS)} (default: {' '.join(DEFAULT)})")  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=None, help="most samples in one model call (default: 250)")
    parser.add_argument("--step", default=None, help="step size alpha (default: the paper's for its eps, else a share)")
    parser.add_argument("--passes", type=int, default=100, help="passes a sample for `nearest` (default: %(default)s)")
    _common_options(parser, norm="inf", threads=threads, out="flips.safetensors and results.json")


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
    # Everything that can be wrong without a model is checked before torch is even imported.
    eps, (norm, domain) = parse_eps(options.eps), _checked(options)
    orders = list(dict.fromkeys(parse_order(p) for p in options.order))
    _known("attack", options.attacks, ATTACKS)
    folder = _folder(options)
    import wassail as ws
    from wassail.attacks import catalogue

    model, x, y = _load(options)
    common: dict[str, Any] = {"batch_size": options.batch_size, "seed": options.seed, "progress": _progress(options)}
    own: dict[str, dict[str, Any]] = {"nearest": {"passes": options.passes}}
    if options.step is not None:
        own |= {name: {"step": options.step} for name in ("wda", "wda++")}
    rows: list[tuple[str, Distribution, float]] = []
    pool: list[Flips] = []
    for name in dict.fromkeys(options.attacks):
        entry = catalogue.find(name)
        start = time.perf_counter()
        for result in catalogue.results(entry, model, x, y, norm, eps, orders, domain, **common, **own.get(name, {})):
            kappa = result.info.get("options", {}).get("kappa")
            title = entry.title if kappa is None else f"{entry.title}, kappa {kappa:g}"
            rows.append((title, result, time.perf_counter() - start))
            if entry.orders != "one" or result.threat.order == orders[0]:  # one search, one count of its passes
                pool.append(result.flips)
            start = time.perf_counter()
    if not rows:
        raise InputError(f"none of {', '.join(options.attacks)} answers order {' or '.join(options.order)}: add --order inf.")
    pooled = pool[0].merge(*pool[1:])
    best = [ws.allocate(pooled, eps, order) for order in orders]
    where = f"{options.model} on {len(y)} samples of {options.data}, l{norm:g}, eps {show(eps)}, {_box(domain)}"
    made = _made(options)
    _print_table(where, made, rows, best)
    if folder is not None:
        _save(folder, pooled, rows, best, {"run": where, "made_with": made})
    return 0


def _certify(options: argparse.Namespace) -> int:
    budgets, (norm, domain) = sorted({parse_eps(e) for e in options.eps}), _checked(options)
    _known("slope", options.slopes, SLOPES)
    if options.loss == "dlr":
        raise InputError("the DLR loss is a ratio of logit differences and not Lipschitz: use --loss margin or cross_entropy.")
    _known("loss", [options.loss], LOSSES)
    seconds = number(options.time_limit, "time limit")
    if not 0 < seconds < math.inf:
        raise InputError(f"the time limit is {options.time_limit!r}: give a positive number of seconds.")
    folder = _folder(options)
    import wassail as ws

    model, x, y = _load(options)
    certificate = ws.certify(
        model, x, y, norm, options.loss, domain,
        slopes=options.slopes, time_limit=seconds, seed=options.seed, progress=_progress(options),
    )  # fmt: skip
    rows = [(eps, *certificate.bounds(eps), certificate.witness(eps).info["loss"]) for eps in budgets]
    loss = options.loss.replace("_", " ")
    where = f"{options.model} on {len(y)} samples of {options.data}, {loss}, l{norm:g}, {_box(domain)}"
    made = _made(options)
    _print_certificate(where, made, certificate, rows)
    if folder is not None:
        _save_certificate(folder, certificate, rows, {"run": where, "made_with": made})
    return 0


def _print_certificate(where: str, made: str, certificate: Certificate, rows: list[tuple[float, float, float, float]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
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
    if certificate.tight is not None:
        console.print(
            f"The condition of the paper's theorem for l = L {'holds' if certificate.tight else 'does not hold'} here."
        )
    eps, lower, upper, reached = rows[-1]
    low, high, threat = _down(lower), _up(upper), Threat(certificate.norm, 1.0, eps, certificate.domain)
    above = f"no distribution within that Wasserstein distance of the data is worse than {high}"
    if math.isinf(upper):
        above = "the slopes asked for bound nothing above (add margin to --slopes)"
    console.print(
        f"[bold]The worst expected loss is between {low} and {high} over {threat}[/bold] (on the data {start:.6g}):\n"
        f"{above}, and one that reaches {_down(reached)} was built and evaluated."
    )
    console.print(f"[dim]{made}[/dim]")


def _save_certificate(
    folder: Path, certificate: Certificate, rows: list[tuple[float, float, float, float]], run: dict[str, str]
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


def _print_table(where: str, made: str, rows: list[tuple[str, Distribution, float]], best: list[Distribution]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
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
    console.print(f"[bold]{where}[/bold]")
    console.print(table)
    console.print(DEFINITIONS)
    worst = min(best, key=lambda d: d.accuracy)
    console.print(
        f"[bold]Accuracy is at most {100 * worst.accuracy:.2f} % over {worst.threat}[/bold] (clean {100 * clean:.2f} %):\n"
        "some distribution within that Wasserstein distance of the data is this bad, and it was built and re-verified."
    )
    console.print(f"[dim]{made}[/dim]")


def _save(
    folder: Path, pooled: Flips, rows: list[tuple[str, Distribution, float]], best: list[Distribution], run: dict[str, str]
) -> None:
    def entry(name: str, result: Distribution) -> dict[str, Any]:
        threat = result.threat
        return {
            "attack": name, "norm": str(threat.norm), "order": str(threat.order), "eps": threat.eps,
            "domain": threat.domain, "accuracy": result.accuracy, "clean_accuracy": result.clean_accuracy,
            "cost": result.cost, "passes": result.flips.passes(), "info": result.info,
        }  # fmt: skip

    results = [entry(name, result) for name, result, _ in rows] + [entry("best of all", result) for result in best]
    with _writing(folder):
        pooled.save(folder / "flips.safetensors")
        (folder / "results.json").write_text(json.dumps({**run, "results": results}, indent=1))
    print(f"wrote {folder / 'flips.safetensors'} and {folder / 'results.json'}")


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
