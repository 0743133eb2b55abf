"""The settings of a pack as a file for `wassail evidence --config`: the evaluation can be made
again from it, with the model and the data at hand.

It is written from what the run records and from the author's words, so a reader of the run writes
the same file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

from wassail.attacks.catalogue import GIVEN
from wassail.evaluation.run import Evaluation
from wassail.evidence.question import own_boxes
from wassail.evidence.statement import Statement
from wassail.writing import visible
from wassail.zoo.features import features_of

HEAD = """\
# The settings of this pack: wassail evidence MODEL --data DATA --config settings.toml --out AGAIN
# Written from what the run records. MODEL and DATA are yours to supply, by their digests.
"""
OWN = ("step", "topk", "kappa")  # options of the paper's attacks


def settings_text(run: Evaluation, statement: Statement) -> str:
    """The file.

    Args:
        run: the evaluation.
        statement: the author's words.
    """
    lines = [*_threats(run), *_attacks(run.info), *_certificates(run.info), *_rest(run)]
    lines += [
        (name, getattr(statement, name))
        for name in ("purpose", "drawn", "why", "unit")
        if getattr(statement, name)
    ]
    lines += [("limit", list(statement.limits))] if statement.limits else []
    lines += [("require", list(statement.require))] if statement.require else []
    text = HEAD + "".join(f"{key} = {_toml(value)}\n" for key, value in lines)
    return text + "".join(f"# {visible(note)}\n" for note in _beside(run))


def box_text(run: Evaluation) -> str:
    """The file for `--box` of a run with a box for each feature.

    Args:
        run: the evaluation.
    """
    features = features_of(run.info["data"])
    made = io.StringIO()
    lines = csv.writer(made, lineterminator="\n")
    lines.writerow(["feature", "low", "high", "scale"])
    scale = features.scale.masked_fill(features.fixed, 0.0)
    sides = (features.low.tolist(), features.high.tolist(), scale.tolist())
    for name, *numbers in zip(features.names, *sides):
        lines.writerow([visible(name), *map(repr, numbers)])
    return made.getvalue()


def _threats(run: Evaluation) -> Iterator[tuple[str, Any]]:
    """Norm, orders, budgets and box; budgets of a known shift differ by order and are a note."""
    yield "norm", f"{run.threat.norm:g}"
    yield "order", [f"{order:.17g}" for order in run.orders]
    budgets = list(dict.fromkeys(threat.eps for threat in run.threats))
    if _is_product(run):
        yield "eps", [repr(eps) for eps in budgets]
    domain = run.threat.domain
    if domain is None:
        yield "no-box", True
    elif not own_boxes(run):
        yield "domain", [repr(float(end)) for end in domain]


def _is_product(run: Evaluation) -> bool:
    budgets = list(dict.fromkeys(threat.eps for threat in run.threats))
    pairs = [(threat.eps, threat.order) for threat in run.threats]
    return pairs == [(eps, order) for eps in budgets for order in run.orders]


def _attacks(info: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    entries = [entry for entry in info["attacks"] if entry["name"] != GIVEN]
    yield "attacks", [str(entry["name"]) for entry in entries]
    for entry in entries:
        if entry["name"] == "nearest" and "passes" in entry:
            yield "passes", str(entry["passes"])
    for name in OWN:
        known = [entry[name] for entry in entries if name in entry]
        if known:
            yield name, known[0] if name == "topk" else str(known[0])


def _certificates(info: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    certify = info.get("certify")
    if certify is None:
        return
    yield "certify", f"{certify['method']}:arithmetic={certify['arithmetic']}"
    if certify.get("time_limit") is not None:
        yield "time-limit", repr(certify["time_limit"])
    if certify.get("gap") is not None:
        yield "gap", repr(100 * certify["gap"])
    if certify.get("effort") is not None:
        yield "effort", repr(certify["effort"])


def _rest(run: Evaluation) -> Iterator[tuple[str, Any]]:
    info = run.info
    yield "n", len(run)
    yield "seed", int(info["seed"])
    yield "chunk", int(info["chunk"])
    yield "gradients", str(info["gradients"])
    if info.get("batch_size") is not None:
        yield "batch-size", int(info["batch_size"])
    if not info["look"]:
        yield "no-look", True
    if run.landmarks:
        yield "landmarks", True
    if run.others:
        yield "label-cost", repr(run.others["label_cost"])
        yield "subpopulation", repr(run.others["subpopulation"])


def _beside(run: Evaluation) -> Iterator[str]:
    """What the file cannot say."""
    if not _is_product(run):
        listed = ", ".join(f"order {t.order:g}: {t.eps!r}" for t in run.threats)
        yield f"eps differs by order, as with a known shift: {listed}."
    if own_boxes(run):
        yield "--box: the boxes and units of the features are in box.csv."
    if run.others.get("groups") is not None:
        yield "--groups: the group of each sample is in run/config.json, config.others."
    if any(entry["name"] == GIVEN for entry in run.info["attacks"]):
        yield "--points: adversarial examples that were given are in run/results."


def _toml(value: Any) -> str:
    """Strings, whole numbers, truth values and lists of strings, as TOML writes them."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=True)
        # JSON writes characters beyond 16 bits as two halves, which TOML does not have.
        return (
            text if all(ord(c) < 0x10000 for c in value) else json.dumps(value, ensure_ascii=False)
        )
    return json.dumps(value)
