"""A task in pieces: cut when a worker dies of it, the results joined again, and what is stored
where nothing is known.

Most of a chunk can be saved when one of its samples kills whoever computes it: the chunk is halved,
and halved again. A sample that is left alone and kills even then gets what is true of any sample:
no flip is known, no radius is certified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.chunks import pack, take, unpack
from wassail.evaluation.criterion import kept_labels, stored_labels
from wassail.evaluation.plan import data_hash
from wassail.evaluation.work import Result, Task

# fields of a chunk: ids of the samples that nothing is known about, and why
UNKNOWN = "unknown"
REASON = "reason"
PIECES = "pieces"  # field of a chunk that was computed in pieces: their sizes
FINDINGS = ("checks", "convergence")  # kinds of tasks that say something of their samples together


def divisible(task: Task) -> bool:
    """Whether a task is the sum of its parts: findings are not, and no attack that looks at all
    samples between its steps.
    """
    unit = task.given.get("unit")
    return (
        task.kind not in FINDINGS
        and not (unit is not None and unit.whole)
        and task.stop - task.start > 1
    )


def cut(task: Task, start: int, stop: int) -> Task:
    """The part of a task for the samples start..stop - 1, which the caller has to check: hashes
    are of whole chunks.
    """
    a = start - task.start
    b = stop - task.start
    given = dict(task.given)
    if task.kind == "radii":
        share = (stop - start) / (task.stop - task.start)
        given["upper"] = given["upper"][a:b].clone()
        given["limit"] = None if given["limit"] is None else given["limit"] * share
    elif task.kind == "rung":
        given["chosen"] = given["chosen"][a:b].clone()
        given["predicted"] = given["predicted"][a:b].clone()
    elif task.kind == "votes":
        given["draws"] = given["draws"].part(a, b)
    elif task.kind == "pool":
        given["parts"] = [
            {name: value.clone() for name, value in take(part, a, b).items()}
            for part in given["parts"]
        ]
    return replace(task, start=start, stop=stop, hashes=(), given=given)


def nothing(
    task: Task, x: Tensor, y: Tensor, ids: Sequence[str], mu: Tensor, reason: str
) -> Result:
    """The result of a task that cannot be done, for its samples `(n, *shape)`, labels `(n,)` and
    weights `(n,)`.

    Distances are inf, radii 0, and the predictions are the labels: each errs on the side of its
    bound. Whoever reads the run finds the samples' ids in its fields.
    """
    if task.kind == "votes":  # no count errs on the side of both bounds
        raise InputError(
            f"there are no votes of sample {', '.join(ids)}: {reason}; give a smaller batch size, "
            "or leave the sample out."
        )
    n = len(y)
    kept = kept_labels(y)
    digest = data_hash(x, y)
    y = kept["y"]
    fields = {UNKNOWN: list(ids), REASON: reason}
    zeros = torch.zeros(n, dtype=torch.int64)
    inf = torch.full((n,), math.inf, dtype=torch.float64)
    if task.kind in FINDINGS:
        finding = {
            "name": task.kind,
            "level": "warning",
            "text": f"Nothing can be said of the {task.kind}: {reason}.",
        }
        return {}, {
            "findings": [*([task.given["mode"]] if "mode" in task.given else []), finding],
            **fields,
        }
    if task.kind == "clean":
        tensors = {
            "x": pack(x),
            **kept,
            "predicted": y.clone(),
            "logits": torch.zeros(n, 0),
            "mu": mu.clone(),
        }
        return tensors, {"ids": list(ids), "sha256": digest, **fields}
    if task.kind == "pool":
        known = torch.stack([part["distances"] for part in task.given["parts"]])
        wrong, found_by = known.min(
            0
        )  # a sample that is wrong as it is stays so; no flip beyond it was looked at again
        distances = torch.where(wrong == 0, 0.0, inf)
        labels = torch.stack([part["labels"] for part in task.given["parts"]])[
            found_by, torch.arange(n)
        ]
        labels = torch.where(wrong == 0, labels, y)
        refuted = ((known > 0) & torch.isfinite(known)).T.contiguous()
        return {
            "distances": distances,
            "labels": labels,
            "found_by": found_by,
            "refuted": refuted,
        }, {"lost": 0, **fields}
    flips = {
        "distances": inf,
        "labels": y.clone(),
        "forwards": zeros,
        "backwards": zeros.clone(),
        "checks": zeros.clone(),
    }
    flips |= {"index": torch.zeros(0, dtype=torch.int64), "points": x[:0].clone()}
    if task.kind == "radii":
        none = torch.zeros(n, dtype=torch.float64)
        tensors = {
            "values": none,
            "exact": zeros.bool(),
            "margins": none.clone(),
            "errors": none.clone(),
        }
        return {**tensors, **flips}, {"method": "none", **fields}
    return flips, {"warnings": [], **fields} if task.kind == "attack" else fields


def join(parts: Sequence[tuple[Task, Result]]) -> Result:
    """The results of the pieces of one task, in the order of the samples, as the result of the
    task.
    """
    base = parts[0][0].start
    results = [result for _, result in parts]
    names = results[0][0]
    tensors = {
        name: _joined(name, [(task.start - base, found[name]) for task, (found, _) in parts])
        for name in names
    }
    fields = _fields([fields for _, fields in results])
    if "sha256" in fields:
        fields["sha256"] = data_hash(unpack(tensors["x"]), stored_labels(tensors))
    return tensors, fields | {PIECES: [task.stop - task.start for task, _ in parts]}


def _joined(name: str, parts: list[tuple[int, Tensor]]) -> Tensor:
    values = [value for _, value in parts]
    if name == "index":  # places in the chunk
        return torch.cat([value + offset for offset, value in parts])
    if name == "x":  # a piece may be 8-bit and another not
        return pack(torch.cat([unpack(value) for value in values]))
    if name == "logits":  # of samples that killed their worker there are none
        width = max(value.shape[1] for value in values)
        values = [
            value if value.shape[1] else value.new_full((len(value), width), math.nan)
            for value in values
        ]
    return torch.cat(values)


def _fields(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists one after the other, warnings and methods once each; of the rest, which is the same
    in every piece, the first.
    """
    merged: dict[str, Any] = {}
    for fields in parts:
        for name, value in fields.items():
            if name in ("ids", UNKNOWN):
                merged[name] = merged.get(name, []) + value
            elif name == "warnings":
                merged[name] = sorted({*merged.get(name, []), *value})
            elif name == "lost":
                merged[name] = merged.get(name, 0) + value
            elif name == "cut":  # if any of them was
                merged[name] = bool(merged.get(name)) or value
            else:
                merged.setdefault(name, value)
    if "method" in merged:
        methods = {str(fields["method"]) for fields in parts if UNKNOWN not in fields}
        merged["method"] = " and ".join(sorted(methods)) or merged["method"]
    return merged
