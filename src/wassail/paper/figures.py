"""All figures of the paper, by name."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from wassail.errors import InputError, unknown
from wassail.names import FIGURES
from wassail.network import versions
from wassail.paper import inclusion, runtime, step, sweeps
from wassail.paper.convergence import convergence, draw_convergence
from wassail.paper.instance import MODEL, SAMPLES, instance
from wassail.paper.tables import Columns, eps_table, mask_table, witness_table, write_csv
from wassail.paper.witness import draw_witness, witness
from wassail.plots import figure_of
from wassail.threat import Number, parse_eps, parse_norm
from wassail.writing import make, saving

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Made: TypeAlias = "tuple[dict[str, Figure], dict[str, Columns]]"  # drawings and tables by file name


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
    figure_of(1, 1)  # a missing matplotlib and a bad folder are told before the work, not after
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
            write_csv(paths[-1], [about, f"made by: {made}"], columns)
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

    def __call__(self, norm: float) -> runtime.Case:
        from wassail import zoo
        from wassail.paper.published import usual_eps

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
        return runtime.Case(model, x, y, f"{self.model} on {source}", norm, eps, self.seed)


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
    return {"witness": draw_witness(ray)}, {"witness": witness_table(ray)}


def _make_convergence(seed: int, norm: float | None, cases: _Cases) -> Made:
    drawings: dict[str, Figure] = {}
    tables: dict[str, Columns] = {}
    for name, network in (
        ("convergence", instance(seed)),
        ("convergence-tight", instance(seed, tight=True)),
    ):
        found = convergence(network, norm or 2, seed=seed)
        drawings[name] = draw_convergence(found)
        tables |= {f"{name}-masks": mask_table(found), f"{name}-eps": eps_table(found)}
    return drawings, tables


def _make_inclusion(seed: int, norm: float | None, cases: _Cases) -> Made:
    found = inclusion.inclusion()
    return {"inclusion": inclusion.draw_inclusion(found)}, inclusion.inclusion_tables(found)


def _make_step(seed: int, norm: float | None, cases: _Cases) -> Made:
    found = step.step(seed, norm or 2)
    return {"step": step.draw_step(found)}, step.step_tables(found)


def _make_runtime(seed: int, norm: float | None, cases: _Cases) -> Made:
    found = runtime.runtime(cases(norm or math.inf))
    return {"runtime": runtime.draw_runtime(found)}, runtime.runtime_tables(found)


def _make_curve(seed: int, norm: float | None, cases: _Cases) -> Made:
    found = runtime.curve(cases(norm or math.inf))
    return {"curve": runtime.draw_curve(found)}, runtime.curve_tables(found)


def _make_kappa(seed: int, norm: float | None, cases: _Cases) -> Made:
    found = [sweeps.kappa(cases(r)) for r in _both(norm)]
    return {"kappa": sweeps.draw_kappa(found)}, sweeps.sweep_tables("kappa", "kappa", found)


def _make_steps(seed: int, norm: float | None, cases: _Cases) -> Made:
    found = [sweeps.steps(cases(r)) for r in _both(norm)]
    return {"steps": sweeps.draw_steps(found)}, sweeps.sweep_tables("steps", "alpha", found)


def _both(norm: float | None) -> list[float]:
    return [2.0, math.inf] if norm is None else [norm]


_MAKERS: dict[str, Callable[[int, float | None, _Cases], Made]] = {
    "convergence": _make_convergence,
    "witness": _make_witness,
    "inclusion": _make_inclusion,
    "step": _make_step,
    "runtime": _make_runtime,
    "curve": _make_curve,
    "kappa": _make_kappa,
    "steps": _make_steps,
}
