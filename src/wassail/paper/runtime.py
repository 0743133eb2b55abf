"""Figures: accuracy against passes and against the budget."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from wassail import names
from wassail.attacks import catalogue
from wassail.attacks.nearest import nearest
from wassail.errors import InputError
from wassail.network import Model
from wassail.paper.tables import Columns
from wassail.plots import DASHES, INK, figure_of, legend_below, mark_budget, note
from wassail.threat import Threat, parse_eps, parse_norm, show
from wassail.transport.curve import risk_curve
from wassail.transport.flips import Flips

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves: TypeAlias = "dict[tuple[str, float], Tensor]"  # by method and order
ORDERS = (1.0, 2.0, math.inf)
TITLES = {name: entry.title for name, entry in names.ATTACKS.items()}
PASSES = 100  # of `nearest` in these figures
RACE = ("wda", "wda++", "nearest", "pgd", "w-pgd", "apgd-ce", "a3", "autoattack")
EARLY = 5  # steps after which the sweep looks, besides the paper's 20
ORDER_DASH: dict[float, Any] = {1.0: "-", 2.0: (0, (5, 2)), math.inf: (0, (1, 1.2))}


@dataclass(frozen=True, eq=False)
class Case:
    """A network on N samples with one norm and budget: model, x `(N, *shape)`, y `(N,)`, name:
    which they are.
    """

    model: Model
    x: Tensor
    y: Tensor
    name: str
    norm: float
    eps: float
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", parse_norm(self.norm))
        object.__setattr__(self, "eps", parse_eps(self.eps))
        if not len(self.y):
            raise InputError("there is no sample to draw a figure of: give at least one.")

    @property
    def about(self) -> str:
        """What every drawing and file says about it."""
        return f"{self.name}, {len(self.y)} samples, l{self.norm:g}, box [0, 1]"

    def threat(self, order: float, eps: float | None = None) -> Threat:
        """The threat of this norm at one order."""
        return Threat(self.norm, order, self.eps if eps is None else eps)

    def run(
        self,
        attack: str,
        order: float,
        eps: float | None = None,
        n: int | None = None,
        **options: Any,
    ) -> Any:
        """The distribution that an attack of the catalogue finds on the first n samples."""
        own = {"passes": PASSES} if attack == "nearest" else {}
        task = self.model, self.x[:n], self.y[:n], self.threat(order, eps)
        return catalogue.find(attack).run(*task, seed=self.seed, **own | options)

    def searches(self) -> dict[str, Flips]:
        """The two searches that serve every order: the paper's and ours."""
        task = self.model, self.x, self.y, self.norm
        return {
            "wda++": nearest(*task, method="wda++", eps=self.eps, seed=self.seed),
            "nearest": nearest(*task, passes=PASSES, warn=False, seed=self.seed),
        }


@dataclass(frozen=True, eq=False)
class Runtime:
    """How long attacks take and how many passes they make, against the number of samples.

    sizes `(T,)`; seconds, forwards, backwards: `{attack: (T,)}`, totals over the samples. Passes do
    not depend on the machine.
    """

    case: Case
    sizes: list[int]
    seconds: dict[str, list[float]]
    forwards: dict[str, list[int]]
    backwards: dict[str, list[int]]

    def passes(self, attack: str) -> list[int]:
        """Forward plus backward passes of all samples, for each size."""
        return [f + b for f, b in zip(self.forwards[attack], self.backwards[attack])]

    def growth(self, values: Sequence[float]) -> float:
        """The exponent q of `values ~ N^q` between the fewest and the most samples."""
        return (
            math.log(values[-1] / values[0]) / math.log(self.sizes[-1] / self.sizes[0])
            if len(self.sizes) > 1
            else math.nan
        )


def runtime(case: Case, attacks: Sequence[str] = RACE) -> Runtime:
    """Every attack on a quarter, half and all of the samples, at the order it is for, on the clock.

    W-PGD has no l1 form and is left out there.
    """
    n = len(case.y)
    sizes = sorted({max(1, n // k) for k in (4, 2, 1)})
    chosen = [name for name in attacks if not (name == "w-pgd" and case.norm == 1)]
    data = Runtime(case, sizes, {}, {}, {})
    case.run("wda++", 1.0, n=1)  # the set-up of torch at its first call is not timed
    for name in chosen:
        data.seconds[name], data.forwards[name], data.backwards[name] = [], [], []
        for size in sizes:
            start = time.perf_counter()
            found = case.run(name, _own_order(name), n=size)
            data.seconds[name].append(time.perf_counter() - start)
            data.forwards[name].append(int(found.forwards.sum()))
            data.backwards[name].append(int(found.backwards.sum()))
    return data


def _own_order(attack: str) -> float:
    return {"inf": math.inf, "above 1": 2.0}.get(catalogue.find(attack).orders, 1.0)


def draw_runtime(data: Runtime) -> Figure:
    """Two panels, seconds and passes against the number of samples; both axes are logarithmic,
    so linear growth has slope 1.
    """
    figure = figure_of(11, 5.4)
    left, right = figure.subplots(1, 2)
    for name, seconds in data.seconds.items():
        style: dict[str, Any] = {"color": INK[name], "ls": DASHES[name], "lw": 1.8}
        passes = data.passes(name)
        label = (
            f"{TITLES[name]}: {seconds[-1]:.3g} s, {passes[-1] / data.sizes[-1]:.0f} passes a "
            f"sample, in all ~ N^{data.growth(passes):.2f}"
        )
        left.plot(data.sizes, seconds, marker="o", ms=4, **style)
        right.plot(data.sizes, passes, marker="o", ms=4, label=label, **style)
    left.set(ylabel="seconds (this machine)")
    right.set(ylabel="forward + backward passes (any machine)")
    for axes, title in ((left, "Time"), (right, "Passes")):
        axes.set(xscale="log", yscale="log", xlabel="samples N")
        axes.set_xticks(data.sizes, [str(size) for size in data.sizes])
        axes.minorticks_off()
        axes.grid(color="0.9", lw=0.6)
        axes.set_title(title, fontsize=10)
    legend_below(figure, [right], 2)
    figure.suptitle(
        f"{data.case.about}, eps {show(data.case.eps)}.\n"
        f"Legend: at N = {data.sizes[-1]}, and how the passes grow from N = {data.sizes[0]} on.",
        fontsize=10,
    )
    return figure


def runtime_tables(data: Runtime) -> dict[str, Columns]:
    """One row for each attack and size."""
    rows = [
        (name, size, data.seconds[name][t], data.forwards[name][t], data.backwards[name][t])
        for name in data.seconds
        for t, size in enumerate(data.sizes)
    ]
    head = ("attack", "samples", "seconds", "forwards", "backwards")
    about = (
        f"{data.case.about}, eps {data.case.eps!r}; seconds on {torch.get_num_threads()} CPU "
        "threads"
    )
    return {"runtime": (about, dict(zip(head, (list(column) for column in zip(*rows)))))}


@dataclass(frozen=True, eq=False)
class Curve:
    """Robust accuracy against eps for every order.

    eps `(T,)`; lines `{(method, order): (T,)}`: from one search of WDA++ and one of ours; dots:
    what attacks that must be run again for each budget reach, `{(attack, order): (B,)}` at budgets
    `(B,)`.
    """

    case: Case
    clean: float
    eps: Tensor
    lines: Curves
    budgets: Tensor
    dots: Curves


def curve(case: Case, *, points: int = 121, budgets: int = 6) -> Curve:
    """The paper's figure of accuracy against eps, for every order from one run, with WDA and
    W-PGD run again at each budget.
    """
    flips = case.searches()
    known = flips["nearest"].distances
    known = known[torch.isfinite(known)]
    end = 1.05 * float(known.quantile(0.98)) if len(known) and known.max() > 0 else 2 * case.eps
    eps = torch.linspace(0, end, points, dtype=torch.float64)
    places = torch.linspace(0, end, budgets + 2, dtype=torch.float64)[1:-1]
    asked = [("wda", order) for order in ORDERS] + [
        ("w-pgd", order) for order in ORDERS[1:] if case.norm != 1
    ]
    return Curve(
        case=case,
        clean=flips["nearest"].clean_accuracy(),
        eps=eps,
        lines={
            (name, order): _accuracies(found, order, eps)
            for name, found in flips.items()
            for order in ORDERS
        },
        budgets=places,
        dots={(name, order): _rerun(case, name, order, places) for name, order in asked},
    )


def _accuracies(flips: Flips, order: float, eps: Tensor) -> Tensor:
    line = risk_curve(flips, order=order)
    return torch.tensor([line(float(e))[1] for e in eps], dtype=torch.float64)


def _rerun(case: Case, attack: str, order: float, budgets: Tensor) -> Tensor:
    return torch.tensor(
        [case.run(attack, order, float(e)).accuracy for e in budgets], dtype=torch.float64
    )


def draw_curve(data: Curve) -> Figure:
    """One panel for each order; lines from one search, dots from one run each."""
    figure = figure_of(13, 4.8)
    panels = figure.subplots(1, 3, sharey=True)
    eps = data.case.eps
    for axes, order in zip(panels, ORDERS):
        for name in ("nearest", "wda++"):
            line = 100 * data.lines[name, order]
            style: dict[str, Any] = {"color": INK[name], "ls": DASHES[name], "lw": 2}
            axes.plot(data.eps, line, label=f"{TITLES[name]}, one search", **style)
        for name, marker in (("wda", "s"), ("w-pgd", "^")):
            if (name, order) not in data.dots:
                continue
            kind = " (kappa 2; 1 at order inf)" if name == "wda" else ""
            label = f"{TITLES[name]}, a run for each eps{kind}"
            dots = 100 * data.dots[name, order]
            axes.plot(data.budgets, dots, marker, color=INK[name], ms=6, label=label)
        mark_budget(axes, eps)
        axes.set(xlabel="budget eps", xlim=(0, float(data.eps[-1])), ylim=(0, 103))
        axes.set_title(f"Omega_{order:g}", fontsize=10)
    panels[0].set_ylabel("accuracy %")
    note(panels[0], f"eps = {show(eps)}", (eps, 96), (4, 0))
    legend_below(figure, [panels[1]], 4)
    figure.suptitle(f"{data.case.about}; lower = stronger attack.", fontsize=10)
    return figure


def curve_tables(data: Curve) -> dict[str, Columns]:
    """The lines and the dots, as columns."""
    about = f"{data.case.about}, clean accuracy {data.clean!r}"
    lines = {f"{name}_{order:g}": values.tolist() for (name, order), values in data.lines.items()}
    dots = {f"{name}_{order:g}": values.tolist() for (name, order), values in data.dots.items()}
    return {
        "curve": (about, {"eps": data.eps.tolist(), **lines}),
        "curve-runs": (about, {"eps": data.budgets.tolist(), **dots}),
    }
