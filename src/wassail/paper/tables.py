"""The tables behind the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from wassail.paper.convergence import Convergence
from wassail.paper.instance import spoken
from wassail.paper.witness import Witness
from wassail.writing import cell, save, visible

Columns: TypeAlias = (
    "tuple[str, Mapping[str, Sequence[Any]]]"  # what a CSV file is about, and its columns
)


def mask_table(data: Convergence) -> Columns:
    """The columns for the cells that were visited."""
    masks = ["".join("1" if on else "0" for on in mask) for mask in data.masks.tolist()]
    return _about(data), {
        "visited": range(1, len(masks) + 1),
        "mask": masks,
        "cell_slope": data.cell_slopes.tolist(),
        "cell_norm": data.cell_norms.tolist(),
        "l_so_far": data.infinity_so_far.tolist(),
        "L_so_far": data.paper_so_far.tolist(),
    }


def eps_table(data: Convergence) -> Columns:
    """The columns for the budgets."""
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
    start = f"{spoken(data.loss)} {data.empirical!r} on the samples"
    return f"{data.case.about}, ground norm l{data.norm:g}, {start}; slopes: {slopes}"


def witness_table(data: Witness) -> Columns:
    """The columns for the witness."""
    about = (
        f"{data.case.about}, ground norm l{data.norm:g}, {spoken(data.loss)} {data.empirical!r} on "
        f"the samples; sample {data.root} (counted from 0) moves, eps {data.eps!r}, slope "
        f"{data.slope.lower!r}, E + l eps {data.limit!r}, exact worst case {data.worst.upper!r}"
    )
    columns: dict[str, Sequence[Any]] = {
        "alpha": data.alpha.tolist(),
        "eta": data.eta.tolist(),
        "expected": data.expected.tolist(),
    }
    return about, {**columns, "x1": data.points[:, 0].tolist(), "x2": data.points[:, 1].tolist()}


def write_csv(path: Path, comments: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
    """Write columns below their comments."""
    lines = [f"# {visible(comment)}" for comment in comments] + [",".join(columns)]
    rows = zip(*columns.values())
    lines += [
        ",".join(cell(value) if isinstance(value, str) else str(value) for value in row)
        for row in rows
    ]
    save(path, "\n".join(lines) + "\n")
