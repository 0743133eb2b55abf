"""A pack against the model it is about: the run is verified, a share of the radii is proved again,
and every file that follows from the run is made anew and compared.

What was done is a record that can be signed: `wassail verify PACK --key FILE`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from wassail.errors import InputError
from wassail.evaluation.indicators import LOOKED_AT, check
from wassail.evaluation.notes import Verification, close
from wassail.evaluation.reading import ODD
from wassail.evaluation.reproving import few
from wassail.evaluation.run import Evaluation
from wassail.evaluation.sealing import SEAL, Seal, sealed
from wassail.evaluation.store.encoding import has_content
from wassail.evidence.pack import (
    GIVEN,
    MODEL,
    PAGE,
    RECORD,
    REPORT,
    RUN,
    SETTINGS,
    SHIFT,
    check_pack_seal,
    listed,
    measured,
    read_record,
    shift_bytes,
    statement_of,
    texts,
)
from wassail.evidence.question import recorded
from wassail.network import Model, frozen, versions
from wassail.report.page import report
from wassail.writing import MAX_TEXT, read_small
from wassail.zoo.features import as_evaluated
from wassail.zoo.weights import sha256

FORMAT = "wassail verification 1"
AUTHOR = (
    "what the author states: the purpose, how the samples were drawn, why this eps, the unit and "
    "the limits."
)
LATER = (
    f"whether the samples of {SHIFT} are later data: they are the author's choice (--later-data D "
    "compares them)."
)
SAME_LATER = f"the samples of {SHIFT} are those of the later data given."
OTHER_LATER = f"the samples of {SHIFT} are not those of the later data given."


def load(place: Path) -> Evaluation:
    """The run of a pack.

    Args:
        place: of the pack, as a folder.
    """
    listed(place)  # refuses links
    read_record(place)  # refuses what is no pack
    return Evaluation.load(place / RUN)


def verify_pack(
    place: Path,
    model: Model,
    data: Any = None,
    radii: float | None = None,
    *,
    signer: str | None = None,
    seed: int | None = None,
    run: Evaluation | None = None,
    files: Mapping[str, Any] | None = None,
    later: tuple[Tensor, Tensor] | None = None,
) -> tuple[Verification, Seal]:
    """What of a pack does not hold for a model, what was looked at, and what was not; and its seal.

    Args:
        place: of the pack, as a folder.
        model: that the pack is about.
        data: whatever `zoo.open_data` takes: the samples are compared with them; default None.
        radii: share of the radii that is proved again; default None, a tenth, at most 45 of them:
            so many true ones show that at most 6.5 % are false.
        signer: the key that must have signed the pack, as in `check_seal`; default None.
        seed: of the random choices; default None, a new one.
        run: of the pack, where it was loaded; default None.
        files: digests of the files of the model, where it is not the one in the pack; default None.
        later: samples and labels of the later data, as for `write_pack`: those in the pack are
            compared with them; default None.
    """
    run = load(place) if run is None else run
    known = check_pack_seal(place, run, signer)
    found = run.verify(model, data, few(run) if radii is None else radii, seed=seed)
    problems, checked = check_files(place, run)
    more, told = _findings(run, model)
    unchecked = [AUTHOR]
    if later is not None:
        same = has_content(place / SHIFT, shift_bytes(*later))
        (checked if same else problems).append(SAME_LATER if same else OTHER_LATER)
    elif (place / SHIFT).exists():
        unchecked.append(LATER)
    if files is not None and (place / MODEL).exists():
        if not any(name.endswith(".onnx") for name in files):
            unchecked.append(f"whether {MODEL} is the model that was given.")
        elif sha256(place / MODEL) not in files.values():
            problems.append(f"{MODEL} is not the file of the model that was given.")
    said = str(known)
    covered = [f"file {name}" for name in (RECORD, PAGE, SETTINGS, SEAL, Path(REPORT).name)]
    fields = dict.fromkeys([*found.fields, *covered])
    whole = replace(
        found,
        problems=(*found.problems, *problems, *more, *(() if known else (said,))),
        checked=(*found.checked, *checked, *told, *((said,) if known else ())),
        unchecked=(*found.unchecked, *unchecked),
        fields=tuple(fields),
        unread=tuple(name for name in found.unread if name not in fields),
    )
    return whole, known


def check_files(place: Path, run: Evaluation) -> tuple[list[str], list[str]]:
    """Every file that follows from the run and the author's words, made anew: what is false, and
    what was checked.

    Args:
        place: of the pack, as a folder.
        run: its run.
    """
    names = listed(place)
    try:
        made = texts(run, statement_of(place), measured(place, run), MODEL in names)
    except ODD as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the run of the pack {str(place)!r} makes no sense: it is damaged."
        ) from None
    made[REPORT] = report(run)
    known = GIVEN | made.keys()
    strange = [n for n in names if n not in known and not n.startswith(f"{RUN}/results/")]
    problems = [f"{name!r} is no part of a pack." for name in strange[:3]]
    stated = recorded(recorded(run.info, "model"), "files")
    if MODEL in names and sha256(place / MODEL) not in stated.values():
        problems.append(f"{MODEL} is not the file that the run names.")
    for name, text in made.items():
        found = read_small(place / name, MAX_TEXT, "a part of a pack") if name in names else None
        if found is None:
            problems.append(f"the pack has no {name}.")
        elif found != text.encode() and not (name == RECORD and _same(found, text)):
            problems.append(
                f"{name} does not say what the run says, as this version writes it{_made_by(run)}."
            )
    if problems:
        return problems, []
    return [], [
        f"{', '.join(made)} follow from the run and the author's words: all figures, limits for "
        "the population, classes, groups and clauses were computed anew.",
    ]


def _made_by(run: Evaluation) -> str:
    """Which version of the package to take instead; "" where the pack is of this one."""
    theirs = recorded(run.info, "versions").get("wassail")
    if theirs is None or theirs == versions()["wassail"]:
        return ""
    return f"; the pack says that wassail {theirs} made it: verify it with that version, too"


def _same(stated: bytes, text: str) -> bool:
    """Whether two JSON texts say the same, numbers to the rounding of another processor."""
    try:
        return close(json.loads(stated), json.loads(text))
    except (ValueError, RecursionError):
        return False


def _findings(run: Evaluation, model: Model) -> tuple[list[str], list[str]]:
    """The checks before the attacks, run again: a pack may have left a warning out."""
    if not run.info.get("look"):
        return [], []
    first = min(LOOKED_AT, len(run))
    x, _ = run.images(range(first))
    rescaled, _ = as_evaluated(run.info.get("data"), model, None)
    with frozen(rescaled):
        again = check(rescaled, x, run.y[:first], run.threat.domain, run.info.get("batch_size"))
    stated = {(finding.name, finding.level) for finding in run.findings}
    left_out = [one for one in again if one.level != "ok" and (one.name, one.level) not in stated]
    if left_out:
        return [f"a check says what the pack leaves out: {left_out[0].text}"], []
    return [], [f"{len(again)} checks before the attacks, run again, warn of nothing else."]


def record_text(
    found: Verification,
    known: Seal,
    radii: float,
    key: str | PathLike[str] | None = None,
) -> str:
    """What a verification did, as the text of a file, signed if there is a key.

    Args:
        found: what `verify_pack` found.
        known: the seal of the pack.
        radii: the share that was proved again.
        key: file with an Ed25519 private key; default None.
    """
    claim = {
        "format": FORMAT,
        "pack": known.digest,
        "signer_of_the_pack": known.signer,
        "holds": bool(found),
        "false": list(found.problems),
        "checked": list(found.checked),
        "not_checked": list(found.unchecked),
        "own_choices": list(found.choices),
        "fields_checked": list(found.fields),
        "fields_not_checked": list(found.unread),
        "share_of_radii": repr(float(radii)),
        "seed": found.seed,
        "versions": versions(),
    }
    return sealed(claim, key)
