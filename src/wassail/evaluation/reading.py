"""A run directory read as numbers: per-sample columns, rows of the table, the pool of flips,
images when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wassail.errors import InputError, reason_of
from wassail.evaluation.boxes import read_boxes
from wassail.evaluation.chunks import CLEAN, TRANSFER, unpack
from wassail.evaluation.criterion import Criterion, read_criterion
from wassail.evaluation.findings import findings, was_sought
from wassail.evaluation.ladder import DRAWN, Ladder, key_of, looks
from wassail.evaluation.landmarks import Landmark, plain, read_plain
from wassail.evaluation.plan import (
    AUTO,
    Unit,
    attacks_of,
    plan,
    read_others,
    read_threats,
    with_passes,
)
from wassail.evaluation.result import Outcome, Row
from wassail.evaluation.store.encoding import parsed
from wassail.evaluation.store.store import Store
from wassail.threat import Threat
from wassail.transport.allocation import knapsack, transport_cost
from wassail.transport.bootstrap import accuracy
from wassail.transport.guarantee import guaranteed_interval
from wassail.writing import without_folders

FORMAT = 1  # of the run directory; a reader refuses what it does not know
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


def load(folder: str | PathLike[str]) -> Outcome:
    """The evaluation in a run directory: see `Evaluation.load`."""
    if not isinstance(folder, (str, PathLike)):
        raise InputError(f"the run is {folder!r}: give the path of its directory.")
    store = Store.open(folder)
    if os.path.lexists(Path(folder) / SMOOTHED):
        raise two_kinds(folder)
    try:
        return Reading(store).result
    except ODD as error:
        if isinstance(error, InputError):
            raise
        raise unreadable(folder, error) from None


def two_kinds(folder: str | PathLike[str]) -> InputError:
    """One sentence for a folder with a run and the results of a smoothed model."""
    return InputError(
        f"{str(folder)!r} has a run and a {SMOOTHED} of a smoothed model: a folder holds one kind "
        "of result, so move one of them away."
    )


def unreadable(folder: str | PathLike[str], error: Exception) -> InputError:
    """One sentence for a run whose files are intact and make no sense."""
    reason = reason_of(error)
    return InputError(
        f"the run in {str(folder)!r} was not written by this program, or was changed since: "
        f"{reason}."
    )


def _check_landmarks(result: Outcome) -> None:
    """A known shift under which fewer are correct than is certified stops everything."""
    for landmark in result.landmarks:
        for order in landmark.eps:
            landmark.check(result.curve(order))


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

    def __init__(self, store: Store) -> None:
        self.store = store
        self.config = store.config
        try:
            if self.config["format"] != FORMAT:
                raise InputError(
                    f"the run in {str(store.folder)!r} has format {self.config['format']}: this "
                    f"version reads {FORMAT}."
                )
            self.threats = read_threats(self.config)
            self.chunks = Chunks(int(self.config["data"]["samples"]), int(self.config["chunk"]))
            if not self.threats or self.chunks.size < 1 or self.chunks.n < 0:
                raise ValueError("no threats, or chunks of no samples")
            if not isinstance(self.config.get("versions") or {}, Mapping):
                raise ValueError("versions without names")
            self.shape = tuple(self.config["data"]["shape"])
            if len(self.shape) > 8 or not all(
                isinstance(d, int) and 0 <= d < 2**31 for d in self.shape
            ):
                raise ValueError(f"samples of shape {self.shape}")
            self.attacks = attacks_of(self.config)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{str(store.folder)!r} holds no run that can be read: {error!r} in its "
                "config.json."
            ) from None
        self._asked = plan(self.threats, self.attacks)

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
        rows: dict[int, list[int]] = {}
        for place in self.drawn:
            rows.setdefault(place // self.chunks.size, []).append(place % self.chunks.size)
        none = torch.zeros(0, dtype=torch.float64)
        known: dict[int, Tensor] = {}
        for passes in looks():
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
        key = None if chosen is None else key_of(2 * chosen)
        return [key] if key is not None and len(self.chunks) and self.complete(key) else []

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
    def result(self) -> Outcome:
        """Everything that can be said from what is there."""
        if not self.complete(CLEAN):
            raise InputError(
                f"the run in {str(self.store.folder)!r} has not seen all samples yet: go on with "
                "it (--resume)."
            )
        y = self.column(CLEAN, "y")
        predicted = self.column(CLEAN, "predicted")
        mu = self.column(CLEAN, "mu")
        wrong = predicted != y
        widths = {
            self.store.get(CLEAN, chunk, ("logits",))[0]["logits"].shape[-1]
            for chunk, _, _ in self.chunks
        } - {0}
        criterion = read_criterion(self.config)
        targets = None if criterion is None else self._targets(criterion, y)
        known = min(widths, default=None) if criterion is None else criterion.rows + 1
        if len(widths) > 1 or (
            widths and known and max(int(labels.max()) for labels in (y, predicted)) >= known
        ):
            raise ValueError("classes beyond those of the model")
        distances, labels, found_by, methods = self._pool(predicted, wrong)
        if widths and known and int(labels.max()) >= known:
            raise ValueError("classes beyond those of the model")
        certified = self.certified
        rows = [row for unit in self.finished for row in self._rows(unit, mu, wrong)]
        first = self.threats[0]
        base = (mu, wrong, torch.where(wrong, 0.0, math.inf).double(), first)
        result = Outcome(
            name=without_folders(str(self.config["model"]["name"])),
            data=without_folders(str(self.config["data"]["name"])),
            threats=self.threats,
            ids=self._ids(),
            classes=None
            if self.config["classes"] is None
            else tuple(map(str, self.config["classes"])),
            y=y,
            predicted=predicted,
            mu=mu,
            distances=distances,
            labels=labels,
            found_by=found_by,
            methods=methods,
            radii=None if certified is None else self.column(certified, "values"),
            exact=None if certified is None else self.column(certified, "exact"),
            certificate={} if certified is None else self._certificate(certified),
            rows=tuple(rows),
            best=tuple(self._best(mu, wrong, distances, threat) for threat in self.threats),
            clean=accuracy(*base, share=0.0),
            clean_interval=guaranteed_interval(*base, share=0.0),
            findings=(),
            info=self.config,
            images=self._images,
            folder=str(self.store.folder),
            landmarks=self._landmarks(),
            searched={} if self.ladder is None else dict(self.ladder.known),
            others=read_others(self.config, self.chunks.n),
            criterion=criterion,
            targets=targets,
            outputs=None if criterion is None else self._outputs(criterion),
            boxes=read_boxes(self.store, range(len(self.chunks)), (self.chunks.n, *self.shape)),
        )
        _check_landmarks(result)
        return replace(result, findings=tuple(findings(self, result)))

    def _targets(self, criterion: Criterion, y: Tensor) -> Tensor:
        """What the criterion needs of each sample, `(N, W)`; none that cannot be."""
        none = torch.zeros(0, criterion.width, dtype=torch.float64)
        found = torch.cat([none, *(part["targets"] for part in self._clean("targets"))])
        if found.shape != (len(y), criterion.width) or found.dtype != torch.float64:
            raise ValueError("targets of another kind")
        if bool(y.any()) or not bool(torch.isfinite(found).all()):
            raise ValueError("targets that are not finite, or classes beside them")
        criterion.check(found)
        return found

    def _outputs(self, criterion: Criterion) -> Tensor:
        """What the model gave at the samples, `(N, K)`; NaN where a cluster had given up."""
        parts = [torch.zeros(0, criterion.outputs, dtype=torch.float64)]
        for part in self._clean("logits", "y"):
            z = part["logits"]
            blank = z.new_full((len(part["y"]), criterion.outputs), math.nan)
            parts.append((z if z.shape[1] else blank).double())
        return torch.cat(parts)

    def _clean(self, *names: str) -> Iterator[dict[str, Tensor]]:
        """Some tensors of the samples, chunk by chunk."""
        for chunk, _, _ in self.chunks:
            yield self.store.get(CLEAN, chunk, names)[0]

    def _landmarks(self) -> tuple[Landmark, ...]:
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

    def _ids(self) -> tuple[str, ...]:
        ids = tuple(str(name) for fields in self.fields(CLEAN) for name in fields["ids"])
        if len(ids) != self.chunks.n:
            raise ValueError(f"{len(ids)} ids for {self.chunks.n} samples")
        return ids

    def _pool(
        self, predicted: Tensor, wrong: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
        """Distances, labels, finders and their names, from the pool, or from the attacks while
        there is none yet.
        """
        if not self.sources:
            return (
                torch.where(wrong, 0.0, math.inf).double(),
                predicted,
                torch.zeros_like(predicted),
                ("none",),
            )
        if self.is_pooled:
            distances, labels, found_by = (
                self.column(self.pooled, name) for name in ("distances", "labels", "found_by")
            )
            if not torch.equal(
                torch.stack([self._standing(key) for key in self.sources]).amin(0), distances
            ):
                raise InputError(
                    f"the pooled distances in {str(self.store.folder)!r} are not those of the "
                    "attacks: the run was changed, so trust none of it."
                )
        else:
            known, classes = (
                torch.stack([self.column(key, name) for key in self.sources])
                for name in ("distances", "labels")
            )
            distances, found_by = known.min(0)
            labels = classes.gather(0, found_by[None])[0]
        names = [self._method(key) for key in self.sources]
        methods = tuple(dict.fromkeys(names))
        finders = torch.tensor([methods.index(name) for name in names])[found_by]
        return distances, labels, finders, methods

    def _method(self, key: str) -> str:
        if key in self.looked:
            return "nearest"
        return {unit.key: unit.attack for unit in self.units}.get(key) or key.partition("@")[0]

    def _standing(self, key: str) -> Tensor:
        """The distances of one folder, inf where the final look found that a flip is none."""
        distances = self.distances(key)
        if not self.is_pooled:
            return distances
        place = self.sources.index(key)
        parts = [
            self.store.get(self.pooled, chunk, ("refuted",))[0]["refuted"][:, place]
            for chunk, _, _ in self.chunks
        ]
        return distances.masked_fill(torch.cat(parts), math.inf) if parts else distances

    def _rows(self, unit: Unit, mu: Tensor, wrong: Tensor) -> Iterator[Row]:
        distances = self._standing(unit.key)
        fields = self.fields(unit.key)
        said = next((item for item in fields if "share" in item), None)
        # Nothing could be computed: no row is better than one that says the clean accuracy.
        if fields and said is None:
            return
        share, title = (said["share"], str(said["title"])) if said else (None, unit.entry.title)
        attacked = ~wrong
        forwards, backwards = (
            _mean(self.column(unit.key, name)[attacked]) for name in ("forwards", "backwards")
        )
        base = (mu, wrong, distances)
        for k, threat in enumerate(self.threats if share is None else (unit.threat,)):
            seconds = self.seconds.get(unit.key) if k == 0 else None
            yield _row(unit.attack, title, threat, base, share, (forwards, backwards), seconds)

    def _best(self, mu: Tensor, wrong: Tensor, distances: Tensor, threat: Threat) -> Row:
        forwards, backwards = (
            sum(_mean(self.column(unit.key, name)[~wrong]) for unit in self.finished)
            for name in ("forwards", "backwards")
        )
        base = (mu, wrong, distances)
        return _row("all", "all, pooled", threat, base, None, (forwards, backwards), None)

    def _certificate(self, key: str) -> dict[str, Any]:
        methods = sorted({str(fields["method"]) for fields in self.fields(key)})
        kinds = sorted(
            {
                str(fields.get("arithmetic", "exact"))
                for fields in self.fields(key)
                if was_sought(fields)
            }
        )
        found = {
            "method": " and ".join(methods),
            "arithmetic": " and ".join(kinds),
            "seconds": self.seconds.get(key),
        }
        return {**dict(self.config["certify"]), **found}

    def _images(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Samples and their flips `(n, *shape)`, read from the disk: only the rows that are
        asked for.
        """
        rows: dict[int, list[int]] = {}
        for i in chosen:
            rows.setdefault(int(i) // self.chunks.size, []).append(int(i) % self.chunks.size)
        none = torch.zeros(0, *self.shape)
        x: dict[tuple[int, int], Tensor] = {}
        points: dict[tuple[int, int], Tensor] = {}
        for chunk, mine in rows.items():
            samples = self._pictures(CLEAN, chunk, "x", mine)
            moved = samples.clone()
            found_by = self._finders(chunk)
            for source in set(found_by[mine].tolist()) if self.sources else ():
                key = self.sources[source]
                stored = self.store.get(key, chunk, ("index", "distances"))[0]
                place = {row: k for k, row in enumerate(stored["index"].tolist())}
                flips = [
                    k
                    for k, row in enumerate(mine)
                    if found_by[row] == source and 0 < stored["distances"][row] < math.inf
                ]
                if any(mine[k] not in place for k in flips):
                    raise InputError(
                        f"{key!r} in {str(self.store.folder)!r} has flips without points: the "
                        "run was changed."
                    )
                if flips:
                    moved[flips] = self._pictures(
                        key, chunk, "points", [place[mine[k]] for k in flips]
                    ).to(moved.dtype)
            x |= {(chunk, row): samples[k] for k, row in enumerate(mine)}
            points |= {(chunk, row): moved[k] for k, row in enumerate(mine)}
        order = [divmod(int(i), self.chunks.size) for i in chosen]
        return (
            (torch.stack([x[k] for k in order]), torch.stack([points[k] for k in order]))
            if order
            else (none, none.clone())
        )

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

    def _finders(self, chunk: int) -> Tensor:
        """Which of the sources has the nearest flip of each sample of a chunk."""
        if self.is_pooled:
            return self.store.get(self.pooled, chunk, ("found_by",))[0]["found_by"]
        known = [self.store.get(key, chunk, ("distances",))[0]["distances"] for key in self.sources]
        return (
            torch.stack(known).argmin(0)
            if known
            else torch.zeros(self.chunks.size, dtype=torch.int64)
        )


def _row(
    attack: str,
    title: str,
    threat: Threat,
    base: tuple[Tensor, Tensor, Tensor],
    share: float | None,
    spent: tuple[float, float],
    seconds: float | None,
) -> Row:
    """One attack over one threat; base: weights, which samples are wrong, and distances."""
    mu, wrong, distances = base
    level = accuracy(*base, threat, share)
    interval = guaranteed_interval(*base, threat, share)
    cost = _cost(mu, distances, threat, share)
    flipped = _mean(torch.isfinite(distances)[~wrong])
    return Row(attack, title, threat, level, interval, cost, *spent, flipped, seconds)


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
