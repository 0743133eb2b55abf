"""Everything that a pack says, as plain values: `evidence.json`.

It follows from the run, the author's words and the samples of a measured shift. So a reader builds
it again and compares.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from wassail.evaluation.conditions import conditions
from wassail.evaluation.run import Evaluation
from wassail.evaluation.signoff import CONDITIONS, NOT_CHECKED, Verdict, check
from wassail.evidence.clauses import clauses, mapped
from wassail.evidence.figures import figures
from wassail.evidence.question import own_boxes, question, recorded
from wassail.evidence.statement import Statement
from wassail.report.again import again
from wassail.report.machine import as_json
from wassail.transport.between import ShiftBetween
from wassail.writing import visible, without_folders

SCHEMA = "wassail/evidence/1"
NOT_DRAWN = (
    "The author does not say how the samples were drawn. Every figure about all inputs rests on "
    "independent draws."
)
NO_PROOF = "Nothing is proved: the figures are what the attacks found."


def document(
    run: Evaluation,
    statement: Statement,
    shift: ShiftBetween | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """The record of a pack.

    Args:
        run: the evaluation, with samples.
        statement: the author's words.
        shift: between the samples and later data, if it was measured.
        model: name of the model's file in the pack, if it is there.
    """
    verdicts = [check(run, text) for text in statement.require]
    found = figures(run, verdicts)
    return {
        "schema": SCHEMA,
        "notice": clauses()["notice"],
        "model": _model(run),
        "headline": f"{run.headline}.",
        "holds": all(verdicts),
        "question": question(run, statement, shift),
        "data": _data(run, statement),
        "figures": [asdict(figure) for figure in found],
        "checked": _checked(run),
        "not_checked": _not_checked(run),
        "limits": _limits(run, statement),
        "environment": _environment(run),
        "commands": commands(run, model),
        "supply": _supply(run, model),
        "clauses": mapped(found),
        "statement": statement.plain,
        "included_model": model,
        "evaluation": _evaluation(run, verdicts),
    }


def schema_text() -> str:
    """The JSON schema of `document`, the file `evidence.schema.json` of this package."""
    return (resources.files("wassail.evidence") / "evidence.schema.json").read_text("utf-8")


def commands(run: Evaluation, model: str | None) -> dict[str, dict[str, str]]:
    """The commands that the figures point to, by key, each with what it does.

    Args:
        run: the evaluation.
        model: name of the model's file in the pack, or None.
    """
    words = shlex.split(again(run).command)[3:]
    name, rest = words[0], words[1:]
    mine = [] if model is not None else [name]
    data = rest[rest.index("--data") + 1]
    look = shlex.join(["wassail", "verify", "PACK", *mine, *rest])
    options = [word for word in rest if word not in ("--data", data)]
    box = ["--box", "PACK/box.csv"] if own_boxes(run) else []
    own = ["--include-model"] if model is not None else []
    make = ["wassail", "evidence", name, "--data", data, *options, *box, *own]
    return {
        "make": {
            "words": shlex.join([*make, "--config", "PACK/settings.toml", "--out", "AGAIN"]),
            "does": "makes the evaluation and the pack again, from the model and the data",
        },
        "verify": {
            "words": look,
            "does": "evaluates every flip again, proves a tenth of the radii again, and computes "
            "every other figure and page anew",
        },
        "prove": {"words": f"{look} --radii 1", "does": "the same, and proves every radius again"},
        "recheck": {
            "words": shlex.join(["wassail", "recheck", "PACK", *mine, *options, "--data", "NEW"]),
            "does": "says whether the figures still speak about new data",
        },
        "page": {
            "words": "wassail report PACK/run -o report.html",
            "does": "makes the page of the run, with its curves and fragile samples",
        },
    }


def _supply(run: Evaluation, model: str | None) -> list[str]:
    """What the reader supplies for the commands."""
    told = ["PACK: this folder, or the zip file of it."]
    told += [text for text in again(run).supply if not text.startswith("RUN")]
    if model is not None:
        told.append(
            f"The pack holds a model, {model}: what is verified with it is about that file. "
            "Compare its digest with that of the model that you use."
        )
    return told


def _model(run: Evaluation) -> dict[str, Any]:
    about = recorded(run.info, "model")
    return {
        "name": without_folders(run.name),
        "kind": str(about.get("kind")),
        "weights": about.get("weights"),
        "files": _texts(recorded(about, "files")),
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}


def _data(run: Evaluation, statement: Statement) -> dict[str, Any]:
    about = recorded(run.info, "data")
    names = run.classes
    counted = Counter(run.y.tolist())
    return {
        "name": without_folders(run.data),
        "source": str(about.get("source")),
        "samples": len(run),
        "shape": list(about.get("shape") or []),
        "files": _texts(recorded(about, "files")),
        "drawn": statement.drawn or NOT_DRAWN,
        "drawn_by": "stated by the author" if statement.drawn else "not stated",
        "classes": [
            {
                "name": names[label] if names is not None and label < len(names) else str(label),
                "samples": counted[label],
            }
            for label in sorted(counted)
        ],
    }


def _checked(run: Evaluation) -> list[dict[str, str]]:
    """What the evaluation itself looked at: its checks, and what its figures went through."""
    told = [
        {
            "level": "ok",
            "text": "Every flip behind an attacked figure was evaluated once more, apart from the "
            "attack that found it.",
            "command": "verify",
        }
    ]
    if run.radii is not None:
        way = run.certificate.get("arithmetic", "exact")
        told.append(
            {
                "level": "ok",
                "text": f"Certified radii were compared with every known flip, and hold in {way} "
                "arithmetic.",
                "command": "prove",
            }
        )
    told += [
        {"level": finding.level, "text": visible(without_folders(finding.text)), "command": "make"}
        for finding in run.findings
    ]
    return told


def _not_checked(run: Evaluation) -> list[str]:
    missing = [NO_PROOF] if run.radii is None else []
    if not run.landmarks:
        missing.append("Known shifts (noise, blur and the like) were not measured.")
    if run.others.get("groups") is None:
        missing.append("Groups of people were not told apart.")
    return missing + list(NOT_CHECKED)


def _limits(run: Evaluation, statement: Statement) -> list[str]:
    own = [f"Stated by the author: {text}" for text in statement.limits]
    return [*own, *conditions(run), *CONDITIONS]


def _environment(run: Evaluation) -> dict[str, Any]:
    info = run.info
    return {
        "versions": _texts(recorded(info, "versions")),
        "seed": info.get("seed"),
        "device": str(info.get("device")),
        "threads": info.get("threads"),
        "gradients": str(info.get("gradients")),
        "arithmetic": str(run.certificate.get("arithmetic")) if run.radii is not None else None,
    }


def _evaluation(run: Evaluation, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The figures under the names of `wassail evaluate --json`."""
    found = as_json(run, verdicts)
    names = {"model": without_folders(run.name), "data": without_folders(run.data)}
    return {key: value for key, value in (found | names).items() if key != "verification"}
