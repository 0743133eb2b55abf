"""How a run stands on the board: verified again here, sealed with a known key, or a claim."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wassail.errors import InputError
from wassail.evaluation.sealing import SEAL, check_seal, fingerprint_of
from wassail.report.again import again
from wassail.zoo import MODELS
from wassail.zoo.models import open_model

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

CLAIM = "claim"
SEALED = "sealed"
VERIFIED = "verified again"
KINDS = (VERIFIED, SEALED, CLAIM)


@dataclass(frozen=True)
class Standing:
    """One of `KINDS`, and why.

    Args:
        kind: one of `KINDS`.
        text: a sentence.
    """

    kind: str
    text: str


UNKNOWN = Standing(CLAIM, "Stated by the run, and not verified by the makers of this board.")


def standing(run: Evaluation, signers: Sequence[str] = (), verify: bool = False) -> Standing:
    """How a run stands.

    Args:
        run: the evaluation, loaded from its folder.
        signers: keys whose seals count: files with public keys, or fingerprints.
        verify: whether runs of built-in models on built-in data are verified here, radii included;
            one that does not hold is refused.
    """
    if verify:
        found = _verified(run)
        if found is not None:
            return found
    if run.folder is None or not os.path.lexists(Path(run.folder) / SEAL):
        return UNKNOWN
    trusted = {fingerprint_of(signer) for signer in signers}
    try:
        known = check_seal(run.folder)
    except InputError as error:
        return Standing(CLAIM, f"Its seal was not checked: {error}")
    if not known:
        return Standing(CLAIM, f"A claim, and {known}")
    if known.signer in trusted and known.signer is not None:
        return Standing(SEALED, f"Sealed, with the key {known.signer}, and not verified here.")
    by = "without a signature" if known.signer is None else f"with the unknown key {known.signer}"
    return Standing(CLAIM, f"A claim; sealed {by}.")


def _verified(run: Evaluation) -> Standing | None:
    """The run verified, where the model and the data come with the library; else None."""
    way = again(run)
    words = way.command.split()
    name = words[3]
    if way.supply or name not in MODELS:
        return None
    model = run.info["model"]
    scale = {key: model[key] for key in ("mean", "std") if model.get(key) is not None}
    source = open_model(name, logits=model.get("logits"), **scale)
    found = run.verify(source.model, run.data, radii=run.radii is not None)
    if not found:
        raise InputError(f"the run {words[2]!r} does not hold: {found.problems[0]}")
    return Standing(VERIFIED, "Verified again by the maker of this board, radii included.")
