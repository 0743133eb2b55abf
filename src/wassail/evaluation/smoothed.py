"""The results of a smoothed model in a folder: read with no trust, and verified against the model.

A folder holds one kind of result: `smoothing.json` with its votes, or a run. The votes of some
samples are drawn again, and every limit follows from the votes by arithmetic that is done again.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassail.checks import fingerprint
from wassail.errors import InputError
from wassail.evaluation.notes import Notes, Verification
from wassail.evaluation.reading import SMOOTHED, readable, two_kinds
from wassail.evaluation.reproving import CONFIDENCE, most_false
from wassail.evaluation.store.encoding import parsed, read_bytes
from wassail.geometry import distances as distances_between
from wassail.network import BATCH_SIZE, Model, frozen
from wassail.smoothing.attack import SmoothedAttack
from wassail.smoothing.certificate import Smoothing
from wassail.smoothing.draws import BLOCK, Draws, keys_of
from wassail.smoothing.model import Votes, sample_digest
from wassail.threat import parse_domain, parse_order, show
from wassail.transport import confidence as limits
from wassail.writing import MAX_TEXT, check_links
from wassail.zoo.datasets import Data

VOTES = "votes.safetensors"
ATTACK = "attack.safetensors"
SIDES = ("vote certified", "vote attacked", "random certified", "random attacked", "Kumar")
ROWS = 10_000  # budgets of one file
DRAWS = 10_000_000  # of a sample: more would keep the reader of a forged file waiting
SOME = 10  # samples whose votes are drawn again, at least
LOGITS = 1e-4  # relative: by so much the logits of another processor may differ
CLOSE = 1e-9  # of a limit


def row_of(
    proof: Smoothing, found: SmoothedAttack | None, eps: float, order: float
) -> dict[str, Any]:
    """Both sides of both classifiers at one budget.

    proof: what the votes prove; found: the attack, or None.
    """
    reached = None if found is None else found.flips
    certified, attacked = proof.curve(order, reached)(eps)
    return {
        "order": show(order),
        "eps": eps,
        "vote certified": certified,
        "vote attacked": attacked,
        "random certified": proof.accuracy(eps, order),
        "random attacked": 1.0 if found is None else found.accuracy(eps, order),
        "Kumar": proof.kumar(eps),
    }


def is_smoothed(folder: str | PathLike[str]) -> bool:
    """Whether a folder holds the results of a smoothed model; refused if it holds a run, too."""
    place = Path(folder)
    if not os.path.lexists(place / SMOOTHED):
        return False
    if os.path.lexists(place / "config.json"):
        raise two_kinds(folder)
    return True


def read_smoothing(folder: str | PathLike[str]) -> dict[str, Any]:
    """What `smoothing.json` says, with every number that a page shows checked for sense.

    Args:
        folder: of any origin; no link in it is followed.
    """
    is_smoothed(folder)
    file = Path(folder) / SMOOTHED
    check_links(file, folder)
    try:
        about = parsed(read_bytes(file, MAX_TEXT, whole=True).decode())
        _check(about)
    except OSError as error:
        raise InputError(f"cannot read {str(file)!r}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise InputError(
            f"{str(file)!r} is not what `evaluate --smooth` writes: run it again with --resume."
        ) from None
    return dict(about)


def _check(about: Any) -> None:
    """ValueError unless all figures can be: shares are shares, budgets are budgets."""
    rows = about["rows"]
    if not isinstance(about["model"], str) or not isinstance(rows, list):
        raise ValueError("no name, or no rows")
    if not 0 < len(rows) <= ROWS:
        raise ValueError(f"{len(rows)} rows")
    for row in rows:
        order = row["order"]
        shares = [row[side] for side in SIDES]
        if not isinstance(order, str) or parse_order(order) < 1 or not _is_number(row["eps"]):
            raise ValueError("no budget")
        if not all(_is_number(share) and share <= 1 for share in shares):
            raise ValueError("no share")
    if not (_is_number(about["sigma"]) and about["sigma"] > 0):
        raise ValueError("no noise")
    if not (_is_number(about["confidence"]) and 0 < about["confidence"] < 1):
        raise ValueError("no confidence")


def _is_number(value: Any) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and 0 <= value < 1e300


def verify_smoothed(
    folder: str | PathLike[str],
    model: Model,
    data: Data,
    share: float = 0.0,
    *,
    seed: int | None = None,
) -> Verification:
    """What of the results of a smoothed model does not hold, what was looked at and what was not.

    Args:
        folder: with `smoothing.json` and `votes.safetensors`.
        model: the model inside.
        data: the samples: the folder has none.
        share: of the samples whose votes are drawn again, between 0 and 1; at least ten are.
        seed: of the choice of these samples; by default a new one.
    """
    about = read_smoothing(folder)
    drawn = secrets.randbits(32) if seed is None else int(seed)
    notes = Notes()
    with readable(folder), frozen(model), torch.no_grad():
        names = _Look(Path(folder), about, model, data, notes).look(share, drawn)
    notes.unchecked.append(
        "names, versions, the command and how the points of the attack were found: only another "
        "run tells."
    )
    return notes.result(names, drawn)


class _Look:
    """One look at a folder."""

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        model: Model,
        data: Data,
        notes: Notes,
    ) -> None:
        self.folder = folder
        self.about = about
        self.model = model
        self.notes = notes
        self.x, self.y = data.read(0, len(data))
        for name in (VOTES, ATTACK):
            check_links(folder / name, folder)
        self.votes = Votes.load(folder / VOTES)
        self.attack = None
        if about.get("attack") is not None:
            self.attack = SmoothedAttack.load(folder / ATTACK)

    def look(self, share: float, seed: int) -> list[str]:
        """All checks; returns the names of all fields."""
        names = [f"smoothing.{key}" for key in self.about]
        names += [f"votes.{name}" for name in ("hits", "draws", "sigma", "seed", "info", "first")]
        parts = ("distances", "high", "points", "draws", "confidence")
        names += [] if self.attack is None else [f"attack.{name}" for name in parts]
        read = {SMOOTHED, VOTES, *(() if self.attack is None else (ATTACK,))}
        others = sorted(path.name for path in self.folder.iterdir() if path.name not in read)
        names += [f"file {name}" for name in others]
        if not self._same():
            return names
        drawn = [self.votes.draws, 0 if self.attack is None else self.attack.draws]
        if max(drawn) > DRAWS:
            self.notes.unchecked.append(f"the votes: there are more than {DRAWS:,} of a sample.")
            return names
        random = np.random.default_rng(seed)
        n = len(self.y)
        count = min(n, max(math.ceil(share * n), SOME))
        chosen = np.sort(random.permutation(n)[:count])
        index = torch.from_numpy(chosen)
        self._votes(index)
        if self.attack is not None:
            self._attack(self.attack, index)
        self._rows()
        return names

    def _same(self) -> bool:
        """Whether the samples, the model and the noise are those of the votes."""
        votes = self.votes
        n = len(self.y)
        if len(votes.hits) != n:
            self.notes.problems.append(
                f"the votes are of {len(votes.hits)} samples and the data have {n}."
            )
            return False
        stated = [self.about.get(key) for key in ("samples", "sigma", "draws", "norm")]
        first = votes.draws if votes.first is None else votes.first
        same = stated == [n, votes.sigma, votes.draws, 2]
        self.notes.expect(
            same and self.about.get("first draws") == first,
            f"{SMOOTHED} names other samples, noise or draws than the votes.",
            "noise, draws and the number of samples are those of the votes.",
        )
        keys = ("samples", "sigma", "draws", "norm", "first draws")
        self.notes.cover(*(f"smoothing.{key}" for key in keys))
        self.notes.cover("votes.sigma", "votes.draws", "votes.first", "votes.info")
        self.notes.expect(
            votes.info.get("samples") == sample_digest(self.x, self.y, votes.seed),
            "the votes are of other samples or labels than the data.",
            "the samples and labels are those of the data.",
        )
        weights = fingerprint(self.model)
        if weights is None or votes.info.get("weights") is None:
            self.notes.unchecked.append("whether the model is the run's own: it has no weights.")
        else:
            self.notes.expect(
                votes.info["weights"] == weights,
                "the model's weights are not those that the votes name.",
                "the model has the weights that the votes name.",
            )
        return True

    def _range(
        self, x: Tensor, y: Tensor, seed: int, index: Tensor, draws: int
    ) -> tuple[Tensor, Tensor]:
        """The least and the most hits that the draws of some samples can give, by rounding."""
        keys = keys_of(x, seed)
        mine = tuple(keys[i] for i in index.tolist())
        asked = Draws(self.votes.sigma, mine, 0, draws // BLOCK, BATCH_SIZE)
        some = x[index], y[index]
        least = asked.hits(self.model, *some, slack=LOGITS)
        return least, asked.hits(self.model, *some, slack=-LOGITS)

    def _votes(self, index: Tensor) -> None:
        """The votes of some samples, drawn again."""
        votes = self.votes
        least, most = self._range(self.x, self.y, votes.seed, index, votes.draws)
        hits = votes.hits[index]
        wrong = int(((hits < least) | (hits > most)).sum())
        n = len(self.y)
        count = len(index)
        told = f"the votes of {count} of {n} samples, drawn at random, are those stated"
        if count < n:
            told += f": at {100 * CONFIDENCE:g} % confidence at most {most_false(n, count)} of {n}"
            told += " are false"
            self.notes.unchecked.append(f"the votes of the other {n - count} samples.")
        else:
            self.notes.cover("votes.hits", "votes.seed")
        self.notes.count({f"of {count} samples have other votes than stated.": wrong}, f"{told}.")

    def _attack(self, found: SmoothedAttack, index: Tensor) -> None:
        """The points of the attack: where they are, and the votes at some of them."""
        n = len(self.y)
        ways = found.distances.shape[1] if found.distances.ndim == 2 else 0
        shapes = found.distances.shape == found.high.shape == (n, ways)
        stated = self.about["attack"]
        if (
            not ways
            or not shapes
            or found.points.shape != (n, ways, *self.x.shape[1:])
            or not found.points.is_floating_point()
            or not isinstance(stated, Mapping)
        ):
            self.notes.problems.append(f"{ATTACK} holds no points of these samples.")
            return
        box = parse_domain(None if stated.get("domain") is None else tuple(stated["domain"]))
        away = torch.stack(
            [distances_between(found.points[:, k], self.x, 2.0).double() for k in range(ways)], 1
        )
        outside = torch.zeros(n, ways, dtype=torch.bool)
        if box is not None:
            flat = found.points.flatten(2)
            outside = ((flat < box[0]) | (flat > box[1])).any(2)
        wrong = ~((away - found.distances).abs() <= CLOSE * (1 + away))
        limited = 0
        each = (1 - found.confidence) / max(n * ways, 1)
        for k in range(ways):
            points = found.points[:, k]
            least, most = self._range(points, self.y, self.votes.seed + 1, index, found.draws)
            low, high = (
                torch.from_numpy(
                    limits.proportions(hits.numpy().astype(np.float64), found.draws, each)[1]
                )
                for hits in (least, most)
            )
            said = found.high[index, k]
            limited += int((~((said >= low - CLOSE) & (said <= high + CLOSE))).sum())
        self.notes.count(
            {
                "points of the attack are outside the box.": int(outside.sum()),
                "points of the attack are not as far away as stated.": int(wrong.sum()),
                "points of the attack have other votes than stated.": limited,
                f"settings of the attack in {SMOOTHED} are not those of its file.": int(
                    stated.get("draws") != found.draws
                    or stated.get("confidence") != found.confidence
                ),
            },
            f"all points of the attack are where they are said to be, and the votes at "
            f"{ways * len(index)} of them are those stated.",
        )
        self.notes.cover("attack.distances", "attack.points", "attack.draws", "attack.confidence")
        if len(index) == n:
            self.notes.cover("attack.high")

    def _rows(self) -> None:
        """Every figure, from the votes."""
        about = self.about
        proof = self.votes.certificate(float(about["confidence"]))
        wrong = 0
        for stated in about["rows"]:
            found = row_of(proof, self.attack, float(stated["eps"]), parse_order(stated["order"]))
            wrong += any(not abs(stated[side] - found[side]) <= CLOSE for side in SIDES)
        self.notes.cover("smoothing.rows", "smoothing.confidence")
        self.notes.count(
            {"rows do not follow from the votes.": wrong},
            f"all {len(about['rows'])} rows follow from the votes and the points of the attack.",
        )
