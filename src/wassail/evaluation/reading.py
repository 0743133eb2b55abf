"""A run directory read as numbers: per-sample columns, rows of the table, the pool of flips,
images when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from wassail.errors import InputError, reason_of
from wassail.evaluation.boxes import read_boxes
from wassail.evaluation.chunks import CLEAN, TRANSFER, unpack
from wassail.evaluation.configuration import FORMAT, read_settings
from wassail.evaluation.ladder import DRAWN, LOOKS, Ladder, key_of
from wassail.evaluation.landmarks import Landmark, plain, read_plain
from wassail.evaluation.plan import AUTO, Unit, with_passes
from wassail.evaluation.result import Row
from wassail.evaluation.store.encoding import parsed
from wassail.evaluation.store.store import Store
from wassail.threat import Boxes, Threat
from wassail.transport.allocation import knapsack, transport_cost
from wassail.transport.bootstrap import accuracy
from wassail.transport.guarantee import guaranteed_interval

SMOOTHED = "smoothing.json"  # of another kind of result, which has a folder of its own
LANDMARKS = "landmarks.json"  # known shifts, if they were asked for
REAL = ("distances", "values", "mu", "margins", "errors")
KINDS = {**dict.fromkeys(REAL, torch.float64), "exact": torch.bool}  # others: int64
AGES = 1e10  # seconds, three hundred years: what took longer was not written by us
# What files that make no sense make us stumble over.
ODD = (
    *(KeyError, TypeError, ValueError, IndexError),
    *(AttributeError, RuntimeError, OverflowError, RecursionError),
)


@contextmanager
def readable(folder: str | PathLike[str]) -> Iterator[None]:
    """One sentence for a run whose files are intact and make no sense."""
    try:
        yield
    except ODD as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the run in {str(folder)!r} was not written by this program, or was changed since: "
            f"{reason_of(error)}."
        ) from None


def two_kinds(folder: str | PathLike[str]) -> InputError:
    """One sentence for a folder with a run and the results of a smoothed model."""
    return InputError(
        f"{str(folder)!r} has a run and a {SMOOTHED} of a smoothed model: a folder holds one kind "
        "of result, so move one of them away."
    )


@dataclass(frozen=True)
class Chunks:
    """How N samples fall into chunks."""

    n: int
    size: int

    def __len__(self) -> int:
        return -(-self.n // self.size)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """`(chunk, start, stop)`."""
        for k in range(len(self)):
            yield k, k * self.size, min((k + 1) * self.size, self.n)


class Reading:
    """A run directory as numbers."""

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Self:
        """The run in a folder, finished or not.

        folder: of any origin.
        """
        if not isinstance(folder, (str, PathLike)):
            raise InputError(f"the run is {folder!r}: give the path of its directory.")
        store = Store.open(folder)
        if os.path.lexists(Path(folder) / SMOOTHED):
            raise two_kinds(folder)
        return cls(store)

    def __init__(self, store: Store) -> None:
        self.store = store
        self.config = store.config
        try:
            if self.config["format"] != FORMAT:
                raise InputError(
                    f"the run in {str(store.folder)!r} has format {self.config['format']}: this "
                    f"version reads {FORMAT}."
                )
            self.settings = read_settings(self.config)
            self.threats = self.settings.threats
            self.chunks = Chunks(int(self.config["data"]["samples"]), self.settings.chunk)
            if not self.threats or self.chunks.n < 0:
                raise ValueError("no threats, or fewer samples than none")
            if not isinstance(self.config.get("versions") or {}, Mapping):
                raise ValueError("versions without names")
            self.shape = tuple(self.config["data"]["shape"])
            if len(self.shape) > 8 or not all(
                isinstance(d, int) and 0 <= d < 2**31 for d in self.shape
            ):
                raise ValueError(f"samples of shape {self.shape}")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{str(store.folder)!r} holds no run that can be read: {error!r} in its "
                "config.json."
            ) from None
        self._asked = self.settings.units

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The attacks, with the passes that were chosen where they were left to the run."""
        chosen = None if self.ladder is None else self.ladder.passes
        if chosen is None:
            return self._asked
        return tuple(with_passes(unit, chosen) for unit in self._asked)

    @cached_property
    def drawn(self) -> list[int]:
        """The samples that passes are chosen on: places, in ascending order."""
        places = [int(place) for place in json.loads(self.store.read(DRAWN) or "[]")]
        if any(not 0 <= place < self.chunks.n for place in places) or sorted(places) != places:
            raise ValueError(f"{DRAWN} names no samples of the run")
        return places

    @cached_property
    def ladder(self) -> Ladder | None:
        """What the drawn samples say of the passes, None where they are given."""
        asked = any(unit.options.get("passes") == AUTO for unit in self._asked)
        if not asked or self.store.read(DRAWN) is None:
            return Ladder({}) if asked else None
        rows = self._rows_by_chunk(self.drawn)
        none = torch.zeros(0, dtype=torch.float64)
        known: dict[int, Tensor] = {}
        for passes in LOOKS:
            key = key_of(passes)
            if all(self.store.has(key, chunk) for chunk in rows):
                parts = [self._part(key, "distances", k)[mine] for k, mine in rows.items()]
                known[passes] = torch.cat([none, *parts])
        return Ladder(known)

    def complete(self, key: str) -> bool:
        """Whether a folder has every chunk, intact."""
        return all(self.store.has(key, chunk) for chunk, _, _ in self.chunks)

    @cached_property
    def finished(self) -> tuple[Unit, ...]:
        """The attacks whose results are all there."""
        return tuple(unit for unit in self.units if self.complete(unit.key))

    @cached_property
    def certified(self) -> str | None:
        """The folder of the radii, if they are all there."""
        key = f"radii@{(self.config['certify'] or {}).get('method', 'none')}"
        return key if self.complete(key) and len(self.chunks) else None

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Every folder with flips for the pool, attacks first."""
        keys = [unit.key for unit in self.finished]
        keys += [TRANSFER] if self.config["look"] and self.complete(TRANSFER) else []
        keys += self.looked
        keys += [] if self.certified is None else [self.certified]
        return tuple(keys)

    @cached_property
    def attacked(self) -> Tensor:
        """Distances of the nearest flips that were known before radii were sought, `(N,)`."""
        known = [self.distances(key) for key in self.sources if key != self.certified]
        none = torch.full((self.chunks.n,), math.inf, dtype=torch.float64)
        return torch.stack([none, *known]).amin(0)

    @property
    def looked(self) -> list[str]:
        """The folder of the last look at the drawn samples, if passes were chosen on them."""
        chosen = None if self.ladder is None else self.ladder.passes
        keys = [] if chosen is None or not len(self.chunks) else [key_of(2 * chosen)]
        return [key for key in keys if self.complete(key)]

    @cached_property
    def pooled(self) -> str:
        """The folder of the pool over these sources: another set of attacks has another."""
        return "pool@" + hashlib.sha256("\n".join(self.sources).encode()).hexdigest()[:12]

    @cached_property
    def is_pooled(self) -> bool:
        """Whether the pool is there; asked once, for every block of images needs to know."""
        return bool(self.sources) and self.complete(self.pooled)

    def column(self, key: str, name: str) -> Tensor:
        """One number for each sample, `(N,)`; none that cannot be."""
        none = torch.zeros(0, dtype=KINDS.get(name, torch.int64))
        return torch.cat([none, *(self._part(key, name, chunk) for chunk, _, _ in self.chunks)])

    def _part(self, key: str, name: str, chunk: int) -> Tensor:
        """The same of one chunk."""
        part = self.store.get(key, chunk, (name,))[0][name]
        size = min(self.chunks.size, self.chunks.n - chunk * self.chunks.size)
        kind = KINDS.get(name, torch.int64)
        # NaN fails the last comparison too.
        if part.shape != (size,) or part.dtype != kind or not (part >= 0).all():
            raise InputError(
                f"{name!r} of chunk {chunk} of {key!r} in {str(self.store.folder)!r} is not what "
                "this program writes: the run was changed, so trust none of it."
            )
        return part

    def distances(self, key: str) -> Tensor:
        """The distances of one folder, float64 `(N,)`."""
        return self.column(key, "distances")

    def fields(self, key: str) -> list[dict[str, Any]]:
        """The plain values of every chunk of a folder."""
        return [self.store.get(key, chunk, ())[1] for chunk, _, _ in self.chunks]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The time each folder took, from the log; a chunk that was done again counts once."""
        last: dict[tuple[str, int], float] = {}
        for event in self.store.events():
            unit, chunk, seconds = (event.get(name) for name in ("unit", "chunk", "seconds"))
            if not (
                isinstance(unit, str)
                and isinstance(chunk, int)
                and isinstance(seconds, (int, float))
            ):
                continue
            if 0 <= seconds < AGES:
                last[unit, chunk] = float(seconds)
        total: dict[str, float] = {}
        for (unit, _), seconds in last.items():
            total[unit] = total.get(unit, 0.0) + seconds
        return total

    @cached_property
    def y(self) -> Tensor:
        """The classes of the samples, 0 where there is a criterion, `(N,)`."""
        if not self.complete(CLEAN):
            raise InputError(
                f"the run in {str(self.store.folder)!r} has not seen all samples yet: go on with "
                "it (--resume)."
            )
        return self.column(CLEAN, "y")

    @cached_property
    def predicted(self) -> Tensor:
        """The classes predicted at the samples, `(N,)`."""
        return self.column(CLEAN, "predicted")

    @cached_property
    def mu(self) -> Tensor:
        """The weights of the samples, `(N,)`."""
        return self.column(CLEAN, "mu")

    @cached_property
    def wrong(self) -> Tensor:
        """Which samples are wrong as they are, bool `(N,)`."""
        return self.predicted != self.y

    def check_classes(self) -> None:
        """Refuse classes that the model does not have, and outputs of different models."""
        widths = {part["logits"].shape[-1] for part in self._parts(CLEAN, "logits")} - {0}
        known = (
            min(widths, default=0)
            if self.settings.criterion is None
            else self.settings.criterion.rows + 1
        )
        stated = (self.y, self.predicted, self.nearest[1])
        if len(widths) > 1 or (widths and max(int(part.max()) for part in stated) >= known):
            raise ValueError("classes beyond those of the model")

    @cached_property
    def targets(self) -> Tensor | None:
        """What the criterion needs of each sample, `(N, W)`, or None; none that cannot be."""
        criterion = self.settings.criterion
        if criterion is None:
            return None
        none = torch.zeros(0, criterion.width, dtype=torch.float64)
        found = torch.cat([none, *(part["targets"] for part in self._parts(CLEAN, "targets"))])
        if found.shape != (len(self.y), criterion.width) or found.dtype != torch.float64:
            raise ValueError("targets of another kind")
        if bool(self.y.any()) or not bool(torch.isfinite(found).all()):
            raise ValueError("targets that are not finite, or classes beside them")
        criterion.check(found)
        return found

    @property
    def outputs(self) -> Tensor | None:
        """What the model gave at the samples, `(N, K)`; NaN where a cluster had given up. None for
        classes.
        """
        if self.settings.criterion is None:
            return None
        parts = [torch.zeros(0, self.settings.criterion.outputs, dtype=torch.float64)]
        for part in self._parts(CLEAN, "logits", "y"):
            z = part["logits"]
            blank = z.new_full((len(part["y"]), self.settings.criterion.outputs), math.nan)
            parts.append((z if z.shape[1] else blank).double())
        return torch.cat(parts)

    def _parts(self, key: str, *names: str) -> Iterator[dict[str, Tensor]]:
        """Some tensors of a folder, chunk by chunk."""
        for chunk, _, _ in self.chunks:
            yield self.store.get(key, chunk, names)[0]

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the samples."""
        ids = tuple(str(name) for fields in self.fields(CLEAN) for name in fields["ids"])
        if len(ids) != self.chunks.n:
            raise ValueError(f"{len(ids)} ids for {self.chunks.n} samples")
        return ids

    @property
    def boxes(self) -> Boxes | None:
        """The boxes of the samples, where they have their own."""
        return read_boxes(self.store, range(len(self.chunks)), (self.chunks.n, *self.shape))

    @property
    def landmarks(self) -> tuple[Landmark, ...]:
        """The known shifts that were stored: none in most runs."""
        text = self.store.read(LANDMARKS)
        if text is None:
            return ()
        stated = parsed(text)
        found = read_plain(stated)
        if plain(found) != stated:
            raise ValueError("landmarks with parts that are not known")
        orders = {threat.order for threat in self.threats}
        for landmark in found:
            known = set(landmark.eps)
            if landmark.norm != self.threats[0].norm or known != set(landmark.exact):
                raise ValueError("landmarks of another norm or order")
            if not orders <= known:
                raise ValueError("landmarks without the orders of the run")
        return found

    @cached_property
    def nearest(self) -> tuple[Tensor, Tensor, Tensor]:
        """The nearest flips `(N,)`: distances, labels, and which of the sources has them. From the
        pool, or from the attacks while there is none yet.
        """
        if not self.sources:
            none = torch.where(self.wrong, 0.0, math.inf).double()
            return none, self.predicted, torch.zeros_like(self.predicted)
        standing, found_by = torch.stack([self.standing(key) for key in self.sources]).min(0)
        if not self.is_pooled:
            labels = torch.stack([self.column(key, "labels") for key in self.sources])
            return standing, labels.gather(0, found_by[None])[0], found_by
        names = ("distances", "labels", "found_by")
        distances, labels, found_by = (self.column(self.pooled, name) for name in names)
        if not torch.equal(standing, distances):
            raise InputError(
                f"the pooled distances in {str(self.store.folder)!r} are not those of the "
                "attacks: the run was changed, so trust none of it."
            )
        return distances, labels, found_by

    @property
    def found_by(self) -> tuple[tuple[str, ...], Tensor]:
        """Names of the methods, and which of them found the nearest flip of each sample, `(N,)`."""
        if not self.sources:
            return ("none",), self.nearest[2]
        attacks = {unit.key: unit.attack for unit in self.units}
        attacks |= dict.fromkeys(self.looked, "nearest")
        names = [attacks.get(key) or key.partition("@")[0] for key in self.sources]
        methods = tuple(dict.fromkeys(names))
        return methods, torch.tensor([methods.index(name) for name in names])[self.nearest[2]]

    def standing(self, key: str) -> Tensor:
        """The distances of one folder, inf where the final look found that a flip is none."""
        distances = self.distances(key)
        if not self.is_pooled or not len(self.chunks):
            return distances
        return distances.masked_fill(self.refuted(key), math.inf)

    def refuted(self, key: str) -> Tensor:
        """Which flips of one folder the final look found to be none, bool `(N,)`."""
        place = self.sources.index(key)
        parts = [part["refuted"][:, place] for part in self._parts(self.pooled, "refuted")]
        return torch.cat(parts)

    @property
    def rows(self) -> tuple[Row, ...]:
        """One for each attack and threat."""
        return tuple(row for unit in self.finished for row in self._rows(unit))

    @property
    def best(self) -> tuple[Row, ...]:
        """All attacks pooled, one row for each threat."""
        spent = [sum(each) for each in zip((0.0, 0.0), *map(self._spent, self.finished))]
        found = self.nearest[0], (spent[0], spent[1])
        return tuple(self._row("all", "all, pooled", threat, *found) for threat in self.threats)

    @property
    def clean(self) -> Row:
        """No attack at all: the accuracy on the samples."""
        unmoved = torch.where(self.wrong, 0.0, math.inf).double()
        return self._row("clean", "clean", self.threats[0], unmoved, (0.0, 0.0), 0.0)

    def _rows(self, unit: Unit) -> Iterator[Row]:
        distances = self.standing(unit.key)
        fields = self.fields(unit.key)
        said = next((item for item in fields if "share" in item), None)
        # Nothing could be computed: no row is better than one that says the clean accuracy.
        if fields and said is None:
            return
        share, title = (said["share"], str(said["title"])) if said else (None, unit.entry.title)
        found = distances, self._spent(unit), share
        for k, threat in enumerate(self.threats if share is None else (unit.threat,)):
            seconds = self.seconds.get(unit.key) if k == 0 else None
            yield self._row(unit.attack, title, threat, *found, seconds)

    def _row(
        self,
        attack: str,
        title: str,
        threat: Threat,
        distances: Tensor,
        spent: tuple[float, float],
        share: float | None = None,
        seconds: float | None = None,
    ) -> Row:
        """One attack over one threat. spent: forwards and backwards."""
        base = (self.mu, self.wrong, distances, threat, share)
        level, interval = accuracy(*base), guaranteed_interval(*base)
        cost = _cost(self.mu, distances, threat, share)
        flipped = _mean(torch.isfinite(distances)[~self.wrong])
        return Row(attack, title, threat, level, interval, cost, *spent, flipped, seconds)

    def _spent(self, unit: Unit) -> tuple[float, float]:
        """Mean passes of the samples that are right: forwards and backwards."""
        names = ("forwards", "backwards")
        forwards, backwards = (_mean(self.column(unit.key, name)[~self.wrong]) for name in names)
        return forwards, backwards

    @property
    def certificate(self) -> dict[str, Any]:
        """How the radii were found; nothing without."""
        if self.certified is None:
            return {}
        fields = self.fields(self.certified)
        methods = sorted({str(item["method"]) for item in fields})
        kinds = sorted(
            {str(item.get("arithmetic", "exact")) for item in fields if was_sought(item)}
        )
        return {
            **dict(self.config["certify"]),
            "method": " and ".join(methods),
            "arithmetic": " and ".join(kinds),
            "seconds": self.seconds.get(self.certified),
        }

    def images(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples and their flips `(n, *shape)`, read from the disk: only the rows that are
        asked for.
        """
        distances, _, found_by = self.nearest
        x: dict[int, Tensor] = {}
        points: dict[int, Tensor] = {}
        for chunk, rows in self._rows_by_chunk(chosen).items():
            first = chunk * self.chunks.size
            x |= {first + row: at for row, at in zip(rows, self._pictures(CLEAN, chunk, "x", rows))}
            flipped: dict[str, list[int]] = {}
            for row in rows:
                if 0 < distances[first + row] < math.inf:
                    flipped.setdefault(self.sources[found_by[first + row]], []).append(row)
            for key, mine in flipped.items():
                index = self.store.get(key, chunk, ("index",))[0]["index"].tolist()
                if not set(mine) <= set(index):
                    raise InputError(
                        f"{key!r} in {str(self.store.folder)!r} has flips without points: the "
                        "run was changed."
                    )
                found = self._pictures(key, chunk, "points", [index.index(row) for row in mine])
                points |= {first + row: at for row, at in zip(mine, found)}
        if not x:
            return torch.zeros(0, *self.shape), torch.zeros(0, *self.shape)
        places = [int(i) for i in chosen]
        moved = [points.get(i, x[i]).to(x[i].dtype) for i in places]
        return torch.stack([x[i] for i in places]), torch.stack(moved)

    def _rows_by_chunk(self, places: Sequence[int]) -> dict[int, list[int]]:
        """Places of samples as rows of their chunks."""
        rows: dict[int, list[int]] = {}
        for place in places:
            rows.setdefault(int(place) // self.chunks.size, []).append(
                int(place) % self.chunks.size
            )
        return rows

    def _pictures(self, key: str, chunk: int, name: str, rows: Sequence[int]) -> Tensor:
        """Some samples or points of a chunk, `(n, *shape)`."""
        found = unpack(self.store.rows(key, chunk, name, rows))
        is_sample = found.is_floating_point() and tuple(found.shape[1:]) == self.shape
        if not is_sample or not torch.isfinite(found).all():
            raise InputError(
                f"{name!r} of {key!r} in {str(self.store.folder)!r} are no samples: the run was "
                "changed."
            )
        return found


def _cost(mu: Tensor, distances: Tensor, threat: Threat, share: float | None) -> float:
    """The transport cost of an allocation; more than the budget is a bug that stops everything."""
    moved_ = torch.isfinite(distances) & (distances > 0)
    weights = (
        knapsack(distances, threat.eps, threat.order, mu)
        if share is None
        else torch.where(moved_, share, 0.0).double()
    )
    cost = transport_cost(mu, weights, distances, threat.order)
    if cost > threat.eps:
        raise InputError(
            f"the flips cost {cost!r} of {threat}: the run's files contradict each other, so "
            "trust none of them."
        )
    return cost


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def was_sought(fields: Mapping[str, Any]) -> bool:
    """Whether radii were sought in a chunk: not if time had run out, or a cluster had given
    up on it.
    """
    return not str(fields["method"]).startswith("none")
