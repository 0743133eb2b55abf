"""The paper's figures: those of its bounds, with the exact values beside them, and the files of all
of them.

`convergence`: the bounds on the worst-case loss as more masks are visited, and against the budget.
`witness`: the distribution that the lower bound is made of. Both are of networks of the plane,
computed here to the last digit; the figures of the attacks are in `report.paper`. Each is data and
a drawing of them; `write` makes the files of any.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from wassail.certificates.bound import Bound
from wassail.certificates.cells import enumerate_cells
from wassail.certificates.certify import worst_case
from wassail.certificates.infinity import infinity, infinity_at
from wassail.certificates.lipschitz import margin_rows
from wassail.certificates.piecewise import Piecewise
from wassail.certificates.region import Region
from wassail.certificates.worst_case import anchor
from wassail.errors import InputError, unknown
from wassail.geometry import maximiser, operator_norm, project
from wassail.losses import ASCENTS, cross_entropy, margin
from wassail.network import versions
from wassail.threat import Number, Threat, dual, parse_eps, parse_norm, show
from wassail.writing import cell, make, save, saving, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wassail.report.paper import Case

Columns: TypeAlias = (
    "tuple[str, Mapping[str, Sequence[Any]]]"  # what a CSV file is about, and its columns
)
Made: TypeAlias = "tuple[dict[str, Figure], dict[str, Columns]]"  # drawings and tables by file name

FIGURES = ("convergence", "witness", "inclusion", "step", "runtime", "curve", "kappa", "steps")
# what the figures of a network are drawn of, unless told
MODEL = "digits-cnn-adv"
SAMPLES = 200
LOSSES = {"cross_entropy": (cross_entropy, ASCENTS["ce"]), "margin": (margin, ASCENTS["margin"])}
BUDGETS = tuple(k / 24 for k in range(1, 13))  # of the curve against eps; 1/4 is among them
# Okabe and Ito's colours, told apart by everyone; one quantity has one colour in all figures.
INK = {
    "infinity": "#0072B2",
    "anchor": "#009E73",
    "margin": "#E69F00",
    "paper": "#D55E00",
    "pgd": "#CC79A7",
    "exact": "black",
    "wda": "#D55E00",
    "wda++": "#E69F00",
    "nearest": "#0072B2",
    "w-pgd": "#009E73",
    "deepfool": "#56B4E9",
    "apgd-ce": "#56B4E9",
    "a3": "#7F7F7F",
    "autoattack": "black",
}
DASHES: dict[str, Any] = {
    "infinity": "--",
    "anchor": "-.",
    "margin": (0, (5, 1)),
    "paper": (0, (3, 1, 1, 1, 1, 1)),
    "pgd": ":",
    "exact": "-",
    "wda": "-",
    "wda++": (0, (5, 1)),
    "nearest": "-",
    "w-pgd": "-.",
    "apgd-ce": "--",
    "a3": (0, (3, 1, 1, 1, 1, 1)),
    "autoattack": "-",
}

WIDTH = {
    **dict.fromkeys(INK, 1.6),
    "exact": 3.2,
}  # the exact line lies under the others, which may coincide with it


@dataclass(frozen=True, eq=False)
class Instance:
    """A network of the plane, `R^2 -> R^2` with one hidden layer, and samples x `(N, 2)` with
    labels y `(N,)`.
    """

    network: Piecewise
    x: Tensor
    y: Tensor
    about: str

    @property
    def labels(self) -> list[int]:
        """The labels that occur."""
        return sorted(set(self.y.tolist()))


def instance(
    seed: int = 0, *, tight: bool = False, neurons: int = 8, samples: int = 12
) -> Instance:
    """Normal weights and samples, each sample with the label that the network gives it: nothing is
    wrong to begin with.

    tight: the kind of network for which the paper's bounds match. Its logits are `(-f, f)`, f a sum
    of neurons with positive weights and so convex: f is steepest at infinity, and `e_2 - e_1` is
    the direction in which the logits grow most, l = L.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    first = (normal(neurons, 2), normal(neurons))
    head = normal(2, neurons) / math.sqrt(neurons)
    bias = 0.3 * normal(2)
    x = normal(samples, 2)
    if tight:
        rise = head[1].abs() / 2
        head = torch.stack([-rise, rise])
        middle = (x @ first[0].T + first[1]).clamp(min=0) @ rise
        bias = torch.stack([middle.median(), -middle.median()])  # so that both labels occur
    network = Piecewise.from_layers([first, (head, bias)])
    kind = "convex logit gap, for which the paper's bounds match" if tight else "normal weights"
    return Instance(
        network,
        x,
        network.logits(x).argmax(1),
        f"network 2-{neurons}-2 ({kind}), {samples} samples, seed {seed}",
    )


@dataclass(frozen=True, eq=False)
class Convergence:
    """The slopes of an instance, found mask by mask and exactly, and the worst expected loss
    against the budget.

    masks bool `(m, H)` in the order visited; cell_slopes `(m,)`: the steepest recession slope of
    each cell, 0 where it is bounded; cell_norms `(m,)`: `2^(1/r) ||J_D||_{r -> s}`; infinity (l),
    anchor (S): brackets; margin (Lm), paper (L); empirical: the loss on the samples; eps `(T,)`;
    lower, upper `(T,)`: the exact worst case over Omega_1(eps), between its two sides; pgd `(T,)`:
    the loss that PGD reaches, every sample moved by eps; budget: the eps of the first panel.
    """

    case: Instance
    norm: float
    loss: str
    masks: Tensor
    cell_slopes: Tensor
    cell_norms: Tensor
    infinity: Bound
    anchor: Bound
    margin: float
    paper: float
    empirical: float
    eps: Tensor
    lower: Tensor
    upper: Tensor
    pgd: Tensor
    budget: float

    @property
    def slopes(self) -> dict[str, float]:
        """The four slopes: l from below, the others from above."""
        return {
            "infinity": self.infinity.lower,
            "anchor": self.anchor.upper,
            "margin": self.margin,
            "paper": self.paper,
        }

    @property
    def infinity_so_far(self) -> Tensor:
        """The paper's l over the masks visited so far, `(m,)`."""
        return self.cell_slopes.cummax(0).values

    @property
    def paper_so_far(self) -> Tensor:
        """The paper's L over the masks visited so far, `(m,)`: an upper bound only when all
        have been.
        """
        return self.cell_norms.cummax(0).values

    def growth(self, losses: Tensor) -> float:
        """`(loss - E) / eps` at the budget."""
        return (float(losses[self.eps == self.budget]) - self.empirical) / self.budget


def convergence(
    case: Instance,
    norm: Number = 2,
    loss: str = "cross_entropy",
    *,
    eps: Sequence[float] = BUDGETS,
    budget: float = 0.25,
    seed: int = 0,
) -> Convergence:
    """The paper's figure of l and L over more and more masks (n = K = 2), with what it lacks: S, Lm
    and the exact worst case.

    The masks of all cells are visited in a random order (seed). The slope of a cell is the paper's
    `l_N` at a point inside it, for every label that occurs.
    """
    r = parse_norm(norm)
    network = case.network
    labels = case.labels
    value = _losses(loss)[0]
    cells = enumerate_cells(network, Region.make(None, network.inputs))
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(seed))
    jacobians = network.jacobian(cells.masks[order])
    slopes = [
        infinity_at(network, point.expand(len(labels), -1), torch.tensor(labels), r).lower
        for point in cells.points[order]
    ]
    gaps = margin_rows(network.outputs, labels) @ jacobians
    budgets = sorted({parse_eps(e) for e in (budget, *eps)})
    exact = [
        worst_case(network, case.x, case.y, Threat(r, 1.0, e, None), loss).bound for e in budgets
    ]
    return Convergence(
        case=case,
        norm=r,
        loss=loss,
        masks=cells.masks[order],
        cell_slopes=torch.tensor(slopes, dtype=torch.float64),
        cell_norms=2 ** (1 / r) * operator_norm(jacobians, r, dual(r)),
        infinity=infinity(network, r, labels),
        anchor=anchor(network, case.x, case.y, norm=r, loss=loss),
        margin=float(operator_norm(gaps, r, math.inf).max()),
        paper=2 ** (1 / r) * float(operator_norm(jacobians, r, dual(r)).max()),
        empirical=float(value(network.logits(case.x), case.y).mean()),
        eps=torch.tensor(budgets, dtype=torch.float64),
        lower=torch.tensor([bound.lower for bound in exact], dtype=torch.float64),
        upper=torch.tensor([bound.upper for bound in exact], dtype=torch.float64),
        pgd=torch.tensor([pgd_loss(case, r, loss, e) for e in budgets], dtype=torch.float64),
        budget=float(budget),
    )


def pgd_loss(case: Instance, norm: float, loss: str, eps: float, steps: int = 40) -> float:
    """The mean of the largest losses that PGD (Madry et al. 2018) meets within eps of each sample;
    steps of `2.5 eps / steps`.

    Unlike `ws.pgd`, which is after misclassified points, it goes on climbing behind the decision
    boundary.
    """
    value, ascent = _losses(loss)
    network = case.network
    y = case.y
    point = case.x
    best = value(network.logits(point), y)
    for _ in range(steps):
        weight = ascent(network.logits(point), y)[1]
        g = torch.einsum("ik,ikn->in", weight, network.jacobian(network.mask(point)))
        point = project(point + 2.5 * eps / steps * maximiser(g, norm), case.x, norm, eps, None)
        best = torch.maximum(best, value(network.logits(point), y))
    return float(best.mean())


@dataclass(frozen=True, eq=False)
class Witness:
    """The distribution behind the lower bound: `(1 - eta) delta(x_i) + eta delta(x_i + alpha u)` in
    the place of one sample.

    slope: l, with its ray u `(2,)`; root: the sample i, whose label is the ray's; alpha `(T,)`: how
    far out; points `(T, 2)`; eta `(T,)`: the share of the sample that moves, `eps / (mu_i alpha)`,
    so that the transport cost is eps; expected `(T,)`: the expected loss, evaluated; worst: the
    exact worst case over Omega_1(eps); shown: which alpha is drawn in the plane.
    """

    case: Instance
    norm: float
    loss: str
    eps: float
    slope: Bound
    root: int
    alpha: Tensor
    points: Tensor
    eta: Tensor
    expected: Tensor
    empirical: float
    worst: Bound
    shown: int

    @property
    def limit(self) -> float:
        """What the expected loss tends to: `E + l eps`."""
        return self.empirical + self.slope.lower * self.eps


def witness(
    case: Instance,
    norm: Number = 2,
    loss: str = "cross_entropy",
    *,
    eps: float = 0.1,
    points: int = 61,
) -> Witness:
    """The paper's construction of its lower bound, from a whole sample moved (eta = 1) to a far
    point of hardly any mass.

    Of the samples with the ray's label the root is the one whose loss has grown most, far out.
    """
    r = parse_norm(norm)
    network = case.network
    value = _losses(loss)[0]
    slope = infinity(network, r, case.labels)
    if slope.witness is None or slope.lower == 0:
        raise InputError(
            "this network has slope 0 at infinity, so no ray to draw: choose another seed."
        )
    u = slope.witness / torch.linalg.vector_norm(slope.witness, r)
    mu = 1 / len(case.y)
    clean = value(network.logits(case.x), case.y)
    alpha = eps / mu * torch.logspace(0, 4, points, dtype=torch.float64)
    rays = case.x[:, None] + alpha[:, None] * u  # (N, T, 2)
    gains = (
        value(network.logits(rays.flatten(0, 1)), case.y.repeat_interleave(points)).unflatten(
            0, (-1, points)
        )
        - clean[:, None]
    )
    root = int(torch.where(case.y == int(slope.info["label"]), gains[:, -1], -math.inf).argmax())
    eta = eps / (mu * alpha)
    return Witness(
        case=case,
        norm=r,
        loss=loss,
        eps=float(eps),
        slope=slope,
        root=root,
        alpha=alpha,
        points=rays[root],
        eta=eta,
        expected=clean.mean() + mu * eta * gains[root],
        empirical=float(clean.mean()),
        worst=worst_case(network, case.x, case.y, Threat(r, 1.0, eps, None), loss).bound,
        shown=int((eta - 0.25).abs().argmin()),
    )


def write(
    folder: str | Path,
    names: Sequence[str] = FIGURES,
    *,
    seed: int = 0,
    norm: Number | None = None,
    model: str = MODEL,
    data: str | None = None,
    n: int = SAMPLES,
    eps: Number | None = None,
) -> list[Path]:
    """Compute and write figures by name, PNG and CSV: the paths written, for each figure its
    drawings first.

    norm: by default l2 in the plane, linf for a network, and both where the paper draws both.
    model, data, n, eps: what the figures of a network are drawn of: any model and data that the
    command line opens, the first n samples, and the budget, by default RobustBench's, for embedded
    networks one of their own.
    """
    for name in names:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    r = None if norm is None else parse_norm(norm)
    if eps is not None and r is None:
        raise InputError(f"eps {eps!r} is for one norm: give it too, for example norm 'inf'.")
    _figure(1, 1)  # a missing matplotlib and a bad folder are told before the work, not after
    folder = Path(folder)
    make(folder)
    cases = _Cases(model, data, n, eps, seed)
    made = (
        _command(names, seed, r, cases)
        + "; "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
    )
    paths = []
    for name in names:
        drawings, tables = _MAKERS[name](seed, r, cases)
        for file, drawing in drawings.items():
            paths.append(folder / f"{file}.png")
            with saving(paths[-1]) as picture:
                drawing.savefig(picture, format="png", dpi=160)
        for file, (about, columns) in tables.items():
            paths.append(folder / f"{file}.csv")
            _write_csv(paths[-1], [about, f"made by: {made}"], columns)
    return paths


class _Cases:
    """The network and data that figures are drawn of, opened when the first of them needs it."""

    def __init__(self, model: str, data: str | None, n: int, eps: Number | None, seed: int) -> None:
        self.model = model
        self.data = data
        self.n = n
        self.eps = eps
        self.seed = seed
        self.opened: tuple[Any, Tensor, Tensor] | None = None
        if n < 1:
            raise InputError(f"n is {n}: give a positive number of samples.")

    def __call__(self, norm: float) -> Case:
        from wassail import zoo
        from wassail.evaluation.table import usual_eps
        from wassail.report.paper import Case

        source = "digits" if self.data is None and self.model in zoo.MODELS else self.data
        if source is None:
            raise InputError(
                f"the model {self.model!r} has no data of its own: name some, for example an "
                ".npz file."
            )
        eps = usual_eps(self.model, norm) if self.eps is None else parse_eps(self.eps)
        if self.opened is None:
            from wassail.zoo.datasets import open_data
            from wassail.zoo.models import open_model

            samples = open_data(source, self.n)
            x, y = samples.read(0, len(samples))
            self.opened = open_model(self.model).model, x, y
        model, x, y = self.opened
        return Case(model, x, y, f"{self.model} on {source}", norm, eps, self.seed)


def _command(names: Sequence[str], seed: int, norm: float | None, cases: _Cases) -> str:
    words = ["--seed", str(seed), *([] if norm is None else ["--norm", f"{norm:g}"])]
    if not set(names) <= {"convergence", "witness", "inclusion", "step"}:
        words += ["--model", cases.model, "-n", str(cases.n)]
        words += [
            word
            for key, value in (("--data", cases.data), ("--eps", cases.eps))
            if value
            for word in (key, str(value))
        ]
    return shlex.join(["wassail", "paper", "figures", *names, *words])


def _make_witness(seed: int, norm: float | None, cases: _Cases) -> Made:
    ray = witness(instance(seed), norm or 2)
    return {"witness": draw_witness(ray)}, {"witness": _witness_table(ray)}


def _make_convergence(seed: int, norm: float | None, cases: _Cases) -> Made:
    drawings: dict[str, Figure] = {}
    tables: dict[str, Columns] = {}
    for name, network in (
        ("convergence", instance(seed)),
        ("convergence-tight", instance(seed, tight=True)),
    ):
        found = convergence(network, norm or 2, seed=seed)
        drawings[name] = draw_convergence(found)
        tables |= {f"{name}-masks": _mask_table(found), f"{name}-eps": _eps_table(found)}
    return drawings, tables


def _make_inclusion(seed: int, norm: float | None, cases: _Cases) -> Made:
    from wassail.report import paper

    found = paper.inclusion()
    return {"inclusion": paper.draw_inclusion(found)}, paper.inclusion_tables(found)


def _make_step(seed: int, norm: float | None, cases: _Cases) -> Made:
    from wassail.report import paper

    found = paper.step(seed, norm or 2)
    return {"step": paper.draw_step(found)}, paper.step_tables(found)


def _make_runtime(seed: int, norm: float | None, cases: _Cases) -> Made:
    from wassail.report import paper

    found = paper.runtime(cases(norm or math.inf))
    return {"runtime": paper.draw_runtime(found)}, paper.runtime_tables(found)


def _make_curve(seed: int, norm: float | None, cases: _Cases) -> Made:
    from wassail.report import paper

    found = paper.curve(cases(norm or math.inf))
    return {"curve": paper.draw_curve(found)}, paper.curve_tables(found)


def _make_kappa(seed: int, norm: float | None, cases: _Cases) -> Made:
    from wassail.report import paper

    found = [paper.kappa(cases(r)) for r in _both(norm)]
    return {"kappa": paper.draw_kappa(found)}, paper.sweep_tables("kappa", "kappa", found)


def _make_steps(seed: int, norm: float | None, cases: _Cases) -> Made:
    from wassail.report import paper

    found = [paper.steps(cases(r)) for r in _both(norm)]
    return {"steps": paper.draw_steps(found)}, paper.sweep_tables("steps", "alpha", found)


def _both(norm: float | None) -> list[float]:
    return [2.0, math.inf] if norm is None else [norm]


_MAKERS: dict[str, Callable[[int, float | None, _Cases], Made]] = dict(
    zip(
        FIGURES,
        (
            _make_convergence,
            _make_witness,
            _make_inclusion,
            _make_step,
            _make_runtime,
            _make_curve,
            _make_kappa,
            _make_steps,
        ),
    )
)


def draw_convergence(data: Convergence) -> Figure:
    """Two panels: slopes over the masks visited, and the loss against eps; one legend for both."""
    figure = _figure(11, 5.2)
    left, right = figure.subplots(1, 2)
    names = {
        "infinity": "l, slope at infinity",
        "anchor": "S, steepest chord",
        "margin": "Lm, margins",
        "paper": "L, the paper's",
    }
    growth = {"exact": data.growth(data.upper), "pgd": data.growth(data.pgd)}
    titles = {"exact": "V, exact worst case", "pgd": "PGD, each sample moved"}
    count = torch.arange(1, len(data.masks) + 1)
    left.step(
        count,
        data.infinity_so_far,
        where="post",
        color=INK["infinity"],
        lw=1.8,
        label="l so far, by masks visited",
        zorder=4,
    )
    left.step(
        count,
        data.paper_so_far,
        where="post",
        color=INK["paper"],
        lw=3.4,
        label="L so far, by masks visited",
        zorder=3,
    )
    for name, slope in data.slopes.items():
        _level(left, name, slope, f"{names[name]} = {slope:.4g}")
    for name, slope in growth.items():
        _level(left, name, slope, titles[name])
    left.set(
        xlabel="masks visited",
        ylabel="growth of the expected loss per unit of eps",
        xlim=(1, len(count)),
    )
    left.set_ylim(0, 1.08 * data.paper)
    left.set_title(f"Slopes; V and PGD at eps = {show(data.budget)}", fontsize=10)

    eps = torch.cat([torch.zeros(1, dtype=torch.float64), data.eps])
    for name, slope in data.slopes.items():
        _curve(right, name, eps, data.empirical + slope * eps)
    for name, losses in (("exact", data.upper), ("pgd", data.pgd)):
        _curve(
            right,
            name,
            eps,
            torch.cat([torch.tensor([data.empirical], dtype=torch.float64), losses]),
        )
    right.axvline(data.budget, color="0.75", lw=0.8, zorder=0)
    right.set(
        xlabel="budget eps (Wasserstein-1 distance from the samples)",
        ylabel=f"expected loss ({_spoken(data.loss)})",
    )
    right.set_xlim(0, float(eps[-1]))
    right.set_ylim(bottom=0)
    right.set_title("Worst expected loss: E + slope times eps, and exactly", fontsize=10)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    verdict = (
        "The exact worst case V lies between the lines of l and S; the paper's are those "
        "of l and L."
    )
    if data.paper - data.infinity.lower <= 1e-6 * data.paper:
        verdict = "l = S = Lm = L: all lines are the exact worst case V."
    figure.suptitle(f"{data.case.about}; ground norm l{data.norm:g}.\n{verdict}", fontsize=10)
    return figure


def draw_witness(data: Witness) -> Figure:
    """Two panels: the plane with cells, samples and the steepest ray, and the expected loss
    against alpha.
    """
    figure = _figure(11, 5.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_plane(left, data)
    right.plot(
        data.alpha,
        data.expected,
        color=INK["infinity"],
        lw=2.2,
        label="expected loss of the witness",
    )
    right.plot(
        data.alpha[data.shown],
        data.expected[data.shown],
        "*",
        color=INK["infinity"],
        ms=14,
        label="the one drawn",
        zorder=4,
    )
    right.axhline(
        data.limit,
        color=INK["infinity"],
        ls=DASHES["infinity"],
        label=f"E + l eps = {data.limit:.4f}",
    )
    right.axhline(
        data.worst.upper,
        color=INK["exact"],
        label=f"V(eps) = {data.worst.upper:.4f}, exact worst case",
    )
    right.axhline(
        data.empirical, color="0.55", lw=1, label=f"E = {data.empirical:.4f}, on the samples"
    )
    right.set(
        xscale="log",
        xlabel="alpha, distance of the far point from its sample",
        ylabel=f"expected loss ({_spoken(data.loss)})",
    )
    right.set_xlim(float(data.alpha[0]), float(data.alpha[-1]))
    right.set_title(
        f"At alpha the share eta = {data.eps * len(data.case.y):.3g} / alpha of the sample moves",
        fontsize=10,
    )
    right.legend(fontsize=9, frameon=False, loc="center right")
    figure.suptitle(
        f"{data.case.about}; ground norm l{data.norm:g}.\n"
        f"Every witness is within eps = {show(data.eps)} of the samples; far out its loss tends "
        "to E + l eps.",
        fontsize=10,
    )
    return figure


def _draw_plane(axes: Axes, data: Witness) -> None:
    case = data.case
    far = data.points[data.shown]
    start = data.case.x[data.root]
    seen = torch.cat([case.x, far[None]])
    middle = (seen.amax(0) + seen.amin(0)) / 2
    half = 0.58 * float((seen.amax(0) - seen.amin(0)).max())
    side = torch.linspace(-half, half, 400, dtype=torch.float64)
    across = middle[0] + side
    up = middle[1] + side
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1).flatten(0, 1)
    logits, preactivations = (
        f(grid).reshape(len(up), len(across), -1)
        for f in (case.network.logits, case.network.preactivations)
    )
    gap = (logits[..., 1] - logits[..., 0]).numpy()
    axes.contourf(
        across, up, gap, levels=[-math.inf, 0, math.inf], colors=["#FFFFFF", "#E4E4E4"], zorder=0
    )
    axes.contour(across, up, gap, levels=[0], colors="black", linewidths=1.4, zorder=1)
    for v in preactivations.unbind(-1):
        axes.contour(across, up, v.numpy(), levels=[0], colors="0.6", linewidths=0.7, zorder=1)
    for label, marker, face in ((0, "o", "white"), (1, "^", "black")):
        mine = case.x[case.y == label]
        axes.plot(
            mine[:, 0],
            mine[:, 1],
            marker,
            mfc=face,
            mec="black",
            ms=6,
            label=f"sample of class {label}",
            zorder=3,
        )
    share = float(data.eta[data.shown])
    axes.plot(
        *torch.stack([start, far], 1),
        color=INK["infinity"],
        lw=2.2,
        label="steepest ray u from its sample",
        zorder=2,
    )
    axes.plot(
        *start,
        "o",
        mfc="none",
        mec=INK["infinity"],
        mew=2,
        ms=12,
        label=f"{1 - share:.2g} of that sample stays",
        zorder=4,
    )
    axes.plot(
        *far,
        "*",
        color=INK["infinity"],
        ms=14,
        label=f"{share:.2g} of it goes to the far point",
        zorder=4,
    )
    axes.plot([], [], color="black", lw=1.4, label="decision boundary (class 1 is grey)")
    axes.plot([], [], color="0.6", lw=0.7, label="walls of the cells")
    axes.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    axes.set_xlim(float(across[0]), float(across[-1]))
    axes.set_ylim(float(up[0]), float(up[-1]))
    axes.set_title("One sample splits: most of it stays, a share goes far", fontsize=10)
    axes.figure.legend(loc="outside lower left", ncols=3, fontsize=9, frameon=False)


def _level(axes: Axes, name: str, height: float, label: str) -> None:
    axes.axhline(
        height,
        color=INK[name],
        ls=DASHES[name],
        lw=WIDTH[name],
        zorder=1 if name == "exact" else 2,
        label=label,
    )


def _curve(axes: Axes, name: str, eps: Tensor, losses: Tensor) -> None:
    axes.plot(
        eps,
        losses,
        color=INK[name],
        ls=DASHES[name],
        lw=WIDTH[name],
        zorder=1 if name == "exact" else 2,
    )


def _figure(width: float, height: float) -> Figure:
    """An empty figure, drawn by Agg when saved: no window, no state shared with the caller's
    own figures.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError('figures need matplotlib: pip install "wassail[plot]".') from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _mask_table(data: Convergence) -> Columns:
    masks = ["".join("1" if on else "0" for on in mask) for mask in data.masks.tolist()]
    return _about(data), {
        "visited": range(1, len(masks) + 1),
        "mask": masks,
        "cell_slope": data.cell_slopes.tolist(),
        "cell_norm": data.cell_norms.tolist(),
        "l_so_far": data.infinity_so_far.tolist(),
        "L_so_far": data.paper_so_far.tolist(),
    }


def _eps_table(data: Convergence) -> Columns:
    lines = {
        f"E_plus_{name}_eps": (data.empirical + slope * data.eps).tolist()
        for name, slope in data.slopes.items()
    }
    exact = {
        "exact_lower": data.lower.tolist(),
        "exact_upper": data.upper.tolist(),
        "pgd": data.pgd.tolist(),
    }
    return _about(data), {"eps": data.eps.tolist(), **exact, **lines}


def _about(data: Convergence) -> str:
    slopes = ", ".join(f"{name} {slope!r}" for name, slope in data.slopes.items())
    start = f"{_spoken(data.loss)} {data.empirical!r} on the samples"
    return f"{data.case.about}, ground norm l{data.norm:g}, {start}; slopes: {slopes}"


def _witness_table(data: Witness) -> Columns:
    about = (
        f"{data.case.about}, ground norm l{data.norm:g}, {_spoken(data.loss)} {data.empirical!r} "
        "on the samples; sample "
        f"{data.root} (counted from 0) moves, eps {data.eps!r}, slope {data.slope.lower!r}, E + "
        f"l eps {data.limit!r}, "
        f"exact worst case {data.worst.upper!r}"
    )
    columns: dict[str, Sequence[Any]] = {
        "alpha": data.alpha.tolist(),
        "eta": data.eta.tolist(),
        "expected": data.expected.tolist(),
    }
    return about, {**columns, "x1": data.points[:, 0].tolist(), "x2": data.points[:, 1].tolist()}


def _write_csv(path: Path, comments: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
    lines = [f"# {visible(comment)}" for comment in comments] + [",".join(columns)]
    rows = zip(*columns.values())
    lines += [
        ",".join(cell(value) if isinstance(value, str) else str(value) for value in row)
        for row in rows
    ]
    save(path, "\n".join(lines) + "\n")


def _losses(name: str) -> tuple[Any, Any]:
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    return LOSSES[name]


def _spoken(loss: str) -> str:
    return loss.replace("_", " ")
