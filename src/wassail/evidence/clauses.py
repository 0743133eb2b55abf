"""Clauses of laws, standards and frameworks beside the figures that answer them.

`clauses.json` is the list: each line names the kinds of figures that answer a clause. What a pack
does not have answers nothing. `compared` says what the numbers of a text were compared with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from wassail.evidence.figures import Figure

NOT_COVERED = "not covered"
SHOWN = 3  # figures of one kind that a line names
# Parts of every pack that are no figures, and where a reader finds them.
PARTS = {
    "question": "the question",
    "data": "the data",
    "checked": "what was checked",
    "limits": "the limits",
    "environment": "the environment",
    "commands": "the commands",
    "recheck": "the command wassail recheck",
}


def clauses() -> dict[str, Any]:
    """The list: a notice, and frameworks with their lines."""
    text = (resources.files("wassail.evidence") / "clauses.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def mapped(figures: Sequence[Figure]) -> list[dict[str, str]]:
    """One line for each clause: what it asks, and what answers it.

    Args:
        figures: of the pack.
    """
    kinds: dict[str, list[str]] = {}
    for figure in figures:
        kinds.setdefault(figure.kind, []).append(figure.id)
    lines = []
    for framework in clauses()["frameworks"]:
        for line in framework["lines"]:
            answers = [text for kind in line["answers"] for text in _answer(kind, kinds)]
            lines.append(
                {
                    "framework": framework["title"],
                    "clause": line["clause"],
                    "asks": line["asks"],
                    "answer": ", ".join(answers) or NOT_COVERED,
                    "note": line["note"],
                    "compared": framework["compared"],
                }
            )
    return lines


def _answer(kind: str, kinds: dict[str, list[str]]) -> list[str]:
    """The figures of a kind, or the part of the pack; none if the pack has none."""
    if kind in PARTS:
        return [PARTS[kind]]
    known = kinds.get(kind, [])
    more = [f"{len(known) - SHOWN} more of kind {kind}"] if len(known) > SHOWN else []
    return known[:SHOWN] + more
