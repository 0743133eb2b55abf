"""What there is to say about a run: one sentence for each thing that its reader should know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from wassail.evaluation import indicators
from wassail.evaluation.chunks import CHECKS, CLEAN, CONVERGENCE, TRANSFER
from wassail.evaluation.reading import Reading, was_sought
from wassail.evaluation.result import Finding

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation


def findings(reading: Reading, result: Evaluation) -> Iterator[Finding]:
    """All of it.

    reading: the run directory; result: its figures, without findings.
    """
    yield from _idle(reading)
    yield from _unfinished(reading)
    for key in (CHECKS, CONVERGENCE):
        if reading.store.has(key, 0):
            yield from (Finding(**item) for item in reading.store.get(key, 0, ())[1]["findings"])
    yield from () if reading.ladder is None else reading.ladder.findings()
    known = {unit.key: reading.distances(unit.key) for unit in reading.finished}
    yield from _warned(reading)
    yield from _unknown(reading)
    transfer = reading.distances(TRANSFER) if TRANSFER in reading.sources else None
    yield from indicators.indicators(result, reading.finished, known, transfer)
    yield from _verified(reading, result)
    yield from _rounding(reading, result)
    yield from _certificates(reading)


def _idle(reading: Reading) -> Iterator[Finding]:
    """Attacks that were asked for and answer no threat."""
    idle = [
        entry["name"]
        for entry in reading.config["attacks"]
        if entry["name"] not in {unit.attack for unit in reading.units}
    ]
    if idle:
        text = (
            f"No threat has an order that {' and '.join(idle)} answers, so there is no row: "
            "add one."
        )
        yield Finding("idle", "note", text)


def _unfinished(reading: Reading) -> Iterator[Finding]:
    """What is not there: not computed yet, or damaged since."""
    missing = [str(unit) for unit in reading.units if unit not in reading.finished]
    missing += (
        ["the certificates"]
        if reading.config["certify"] and reading.certified is None and reading.chunks.n
        else []
    )
    missing += ["the transfer"] if reading.config["look"] and not reading.complete(TRANSFER) else []
    missing += ["the last look at the flips"] if reading.sources and not reading.is_pooled else []
    if missing:
        damaged = reading.store.read("manifest.json") is not None
        state = "was finished and is damaged" if damaged else "is not finished"
        text = f"The run {state}; missing are {', '.join(missing)}: go on with it (--resume)."
        yield Finding("unfinished", "warning" if damaged else "note", text)


def _warned(reading: Reading) -> Iterator[Finding]:
    """What the attacks warned of."""
    said = {
        (unit.attack, text)
        for unit in reading.finished
        for fields in reading.fields(unit.key)
        for text in fields["warnings"]
    }
    yield from (
        Finding(f"attack-{attack}", "warning", f"{attack}: {text}") for attack, text in sorted(said)
    )


def _unknown(reading: Reading) -> Iterator[Finding]:
    """Samples that a cluster gave up on: their numbers are what is true of any sample."""
    folders = [CLEAN, *reading.sources, *([reading.pooled] if reading.is_pooled else [])]
    for key in folders:
        fields = [item for item in reading.fields(key) if item.get("unknown")]
        if fields:
            ids = [str(name) for item in fields for name in item["unknown"]]
            shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
            text = (
                f"{key}: nothing is known about {shown} ({fields[0]['reason']}): counted "
                "as unbroken and uncertified."
            )
            yield Finding("unknown", "warning", text)


def _verified(reading: Reading, result: Evaluation) -> Iterator[Finding]:
    """What the last look at the flips found."""
    if not reading.is_pooled:
        return
    lost = sum(int(fields["lost"]) for fields in reading.fields(reading.pooled))
    if lost:
        text = (
            f"{lost} stored flips were not {result.words.wrong}, in the box or as near as "
            "stated when they were looked at again, and do not count: the model's answers "
            "depend on the batch or on chance."
        )
        yield Finding("unstable", "warning", text)
    else:
        text = (
            f"Every flip was read back from disk and is {result.words.wrong}, in the box "
            "and as near as stated."
        )
        yield Finding("verified", "ok", text)


def _rounding(reading: Reading, result: Evaluation) -> Iterator[Finding]:
    """What the radii say of the network that runs: how large its rounding errors are beside
    its margins.
    """
    key = reading.certified
    kept = [] if key is None else [fields for fields in reading.fields(key) if was_sought(fields)]
    # An older run.
    if key is None or not kept or not all("arithmetic" in fields for fields in kept):
        return
    right = reading.column(key, "values") > 0
    if not right.any():
        return
    error, size = (
        float(reading.column(key, name)[right].median()) for name in ("errors", "margins")
    )
    beside = f"{error:.2g} beside margins of {size:.2g} at the samples (medians)"
    if result.certificate["arithmetic"] == "executed":
        text = (
            "Radii hold for the network as it is executed, in any order of summation: "
            f"rounding is at most {beside}."
        )
        yield Finding("arithmetic", "ok", text)
        return
    why = next((str(fields["uncovered"]) for fields in kept if fields.get("uncovered")), "")
    text = "Radii hold for the network in exact arithmetic, not as it is executed"
    text += (
        f", which does not cover {why}: rounding was seen to move margins by "
        if why
        else ": rounding is at most "
    )
    yield Finding("arithmetic", "note", f"{text}{beside}.")


def _certificates(reading: Reading) -> Iterator[Finding]:
    """Where radii were computed, and whether the clock stopped them."""
    parts = [] if reading.certified is None else reading.fields(reading.certified)
    for name in sorted({str(fields["no_float64"]) for fields in parts if "no_float64" in fields}):
        text = f"The device {name} has no float64: radii were computed on the CPU."
        yield Finding("device", "note", text)
    # Before `cut` was stored, only samples that nothing was tried for were told.
    if reading.certified is not None and any(
        fields.get("cut") or "out of time" in str(fields["method"]) for fields in parts
    ):
        left = int((reading.column(reading.certified, "values") == 0).sum())
        text = (
            "The time limit cut the certificates: radii are smaller than without it, and "
            "depend on the machine"
        )
        if left:
            text = f"The time limit left samples without a certificate ({left} radii are 0)"
        yield Finding("time-limit", "note", f"{text}: raise --time-limit.")
