"""The command line. Heavy imports happen inside the commands, so that `wassail --help` answers at once."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wassail.errors import InputError, unknown
from wassail.threat import parse_domain, parse_eps, parse_norm, parse_order, show

if TYPE_CHECKING:
    from torch import Tensor

    from wassail.network import Model
    from wassail.transport import Distribution, Flips

SUMMARY = "How badly can a classifier fail under every distribution within a Wasserstein ball of your data?"
# The names of attacks.catalogue, spelt out here because that module needs torch.
ATTACKS = (
    "wda", "wda++", "nearest", "w-pgd", "w-fgsm", "fgsm", "pgd", "apgd-ce", "apgd-dlr", "apgd-t", "square", "autoattack",
    "a3", "a3-wda", "fab", "fab-t", "deepfool", "cw",
)  # fmt: skip
DEFAULT = ("wda", "wda++", "nearest")
DEFINITIONS = """\
Omega_p: all distributions within Wasserstein-p distance eps of the data; Omega_inf: every sample may move by eps.
accuracy: mass of the adversarial distribution that is classified correctly; a tie is an error. Lower = stronger attack.
WDA moves the share 1/kappa of every sample by up to kappa^(1/p) eps. WDA++, nearest and other attacks for the nearest
flip spend the budget on the nearest flips first; nearest is our engine, WDA++ the paper's. W-PGD moves all samples at
once. Attacks with a ball for every sample (APGD, AutoAttack, A3, ...) answer Omega_inf; pooled, their flips serve all.
spent: share of the budget eps. F + B: forward and backward passes, mean per sample that was correct
to begin with. 95 %: bootstrap interval over the samples."""


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

    models = commands.add_parser("models", help="list the built-in models")
    models.set_defaults(run=_models)
    return parser


def _threat_options(parser: argparse.ArgumentParser, eps: str | None, threads: int | None) -> None:
    parser.add_argument("--norm", default="inf", help="ground norm: 1, 2 or inf (default: %(default)s)")
    parser.add_argument("--eps", default=eps, required=eps is None, help="budget, for example 8/255")
    parser.add_argument("--order", nargs="+", default=["1", "2", "inf"], metavar="P",
                        help="Wasserstein orders: any of 1, 2, any p >= 1, inf (default: 1 2 inf)")  # fmt: skip
    parser.add_argument("--attacks", nargs="+", default=list(DEFAULT), metavar="A",
                        help=f"any of {', '.join(ATTACKS)} (default: {' '.join(DEFAULT)})")  # fmt: skip
    parser.add_argument("--domain", nargs=2, default=["0", "1"], metavar=("LOW", "HIGH"), help="box (default: 0 1)")
    parser.add_argument("--no-box", action="store_true", help="let points leave the box: all of R^n")
    parser.add_argument("-n", type=int, default=None, help="use the first N samples only")
    parser.add_argument("--batch-size", type=int, default=None, help="most samples in one model call (default: 250)")
    parser.add_argument("--step", default=None, help="step size alpha (default: the paper's for its eps, else a share)")
    parser.add_argument("--passes", type=int, default=100, help="passes a sample for `nearest` (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="keys the random starts (default: 0)")
    parser.add_argument("--out", default=None, help="directory for flips.safetensors and results.json")
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads (default: %s)" % (threads or "torch's own"))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _models(options: argparse.Namespace) -> int:
    from wassail import zoo

    for name, description in zoo.models().items():
        print(f"{name:16} {description}")
    return 0


def _attack(options: argparse.Namespace) -> int:
    # Everything that can be wrong without a model is checked before torch is even imported.
    eps, norm = parse_eps(options.eps), parse_norm(options.norm)
    orders = list(dict.fromkeys(parse_order(p) for p in options.order))
    domain = None if options.no_box else parse_domain(tuple(options.domain))
    for name in options.attacks:
        if name not in ATTACKS:
            raise unknown("attack", name, ATTACKS)
    if options.n is not None and options.n < 1:
        raise InputError(f"-n is {options.n}: give a positive number of samples.")
    import torch

    import wassail as ws
    from wassail.attacks import catalogue
    from wassail.network import versions

    if options.threads is not None:
        torch.set_num_threads(max(options.threads, 1))
    model = load_model(options.model, options.weights)
    x, y = load_data(options.data, options.n)
    quiet = options.quiet or not sys.stderr.isatty()
    common: dict[str, Any] = {"batch_size": options.batch_size, "seed": options.seed, "progress": not quiet}
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
    where = f"{options.model} on {len(y)} samples of {options.data}, l{norm:g}, eps {show(eps)}, " + (
        "no box" if domain is None else f"box [{domain[0]:g}, {domain[1]:g}]"
    )
    made = f"seed {options.seed}, " + ", ".join(f"{k} {v}" for k, v in versions().items())
    _print_table(where, made, rows, best)
    if options.out is not None:
        _save(Path(options.out), pooled, rows, best, {"run": where, "made_with": made})
    return 0


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

    try:
        folder.mkdir(parents=True, exist_ok=True)
        pooled.save(folder / "flips.safetensors")
        results = [entry(name, result) for name, result, _ in rows] + [entry("best of all", result) for result in best]
        (folder / "results.json").write_text(json.dumps({**run, "results": results}, indent=1))
    except OSError as error:
        raise InputError(f"cannot write to {str(folder)!r}: {error.strerror}; choose another --out.") from None
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
