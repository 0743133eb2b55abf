"""A run against the model it is about: what it states is computed again, and what was not is said.

A checksum shows damage. It does not show intent: whoever writes a run writes its checksums. The
reader of a run from elsewhere who has the model looks again (`Evaluation.verify`, `wassail
verify`).
"""

from __future__ import annotations

import json
import math
import secrets
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from wassail.errors import InputError, ModelWarning
from wassail.evaluation.chunks import CLEAN, holds, judged, moved, share_of, title_of, unpack
from wassail.evaluation.conditions import conditions, plain_sentence
from wassail.evaluation.criterion import OWN, Regression, outputs_of, right_of, stored_labels
from wassail.evaluation.landmarks import Landmark, changed, mean_cost, transport
from wassail.evaluation.notes import Notes, Verification, close, fields_of, plain_text
from wassail.evaluation.plan import Unit, data_hash
from wassail.evaluation.reading import Reading, readable
from wassail.evaluation.reproving import prove_again
from wassail.evaluation.store.encoding import unique
from wassail.evaluation.store.store import Store
from wassail.evaluation.summary import summary
from wassail.evaluation.tasks.attack import Attack
from wassail.evaluation.tasks.task import Place
from wassail.evaluation.work import Worker
from wassail.geometry import distances as distances_between
from wassail.losses import strongest_rival
from wassail.network import BATCH_SIZE, Model, frozen
from wassail.specification import labels_at
from wassail.threat import number
from wassail.transport.allocation import sample_weights
from wassail.zoo.datasets import open_data
from wassail.zoo.features import own_model
from wassail.zoo.files import Targets
from wassail.zoo.weights import fingerprint

if TYPE_CHECKING:
    from wassail.evaluation.run import Evaluation

STEPS = 1_000_000  # of an attack that is run again: the product of its options that count
# of a chunk: so many flips another processor may win or lose by rounding when an attack is run
# again
NOISE = 0.02
LOGITS = 1e-4  # relative: by so much the logits of another processor may differ
COSTS = 1e-5  # relative: by so much the cost of a shift, of float32 samples, may differ
# of a run in memory and its folder
COMPARED = (
    *("rows", "best", "ids", "threats", "others", "y", "predicted", "mu"),
    *("distances", "labels", "radii", "exact", "targets"),
)
# what is recorded of data and may differ where the same data are read
OTHERWISE = ("name", "samples", "shape", "versions", "low", "high", "scale", "fixed")


def verify(
    run: Evaluation,
    model: Model,
    data: Any = None,
    radii: bool | float = False,
    *,
    seed: int | None = None,
    batch_size: int = BATCH_SIZE,
    records: Sequence[Mapping[str, Any]] = (),
) -> Verification:
    """See `Evaluation.verify`; records: what the data say of themselves, where they are given."""
    share = _share(radii)
    drawn = secrets.randbits(32) if seed is None else int(seed)
    notes = Notes()
    notes.choices += conditions(run)
    with frozen(model), warnings.catch_warnings():
        # What a warning would say of the points of a run is counted, and is a problem.
        warnings.simplefilter("ignore", ModelWarning)
        _look_at_nearest(run, model, batch_size, notes)
        attacked = run.distances
        if run.folder is None:
            notes.unchecked.append(
                "everything but the samples' predictions and nearest flips: this run has no folder."
            )
        else:
            with readable(run.folder):
                reading = Reading(Store.open(run.folder))
                random = np.random.default_rng(drawn)
                _Folder(run, reading, model, data, batch_size, random, notes).look(records)
                attacked = reading.attacked
        notes.choices += plain_sentence(run, model)
    if run.radii is not None:
        prove_again(run, model, share, drawn, notes, attacked)
    notes.unchecked.append(
        "the passes and times, what the checks before the attacks said, and the names and versions "
        "in the configuration: only another run tells."
    )
    return notes.result(fields_of(run), drawn)


def _look_at_nearest(run: Evaluation, model: Model, batch_size: int, notes: Notes) -> None:
    """Every sample and its nearest flip, as the run has them in memory."""
    counts = Counter[str]()
    for start in range(0, len(run), batch_size):
        some = slice(start, start + batch_size)
        x, points = run.images(range(len(run))[some])
        inside = run.inside(model, torch.arange(len(run))[some], x)
        found = judged(model, x, labels_at(run.right, some), points, run.threat.norm, inside)
        stated = run.distances[some]
        wrong = (run.predicted != run.y)[some]
        flip = torch.isfinite(stated) & ~wrong
        held = flip & found.success
        other = wrong & found.success & (found.labels != run.predicted[some])
        bad = {
            "samples are not predicted as stated": ((found.distances == 0) != wrong) | other,
            "flips are not misclassified": flip & ~found.success,
            "distances are not as stated": held & (found.distances != stated),
            "flips are not of the class stated": held & (found.labels != run.labels[some]),
        }
        counts.update({name: int(which.sum()) for name, which in bad.items()})
    flips = int((torch.isfinite(run.distances) & (run.distances > 0)).sum())
    notes.cover("predicted", "distances", "labels", "found_by")
    notes.count(
        counts,
        f"{len(run)} samples are predicted as stated, and {flips} nearest flips are what they "
        "claim.",
    )


@dataclass(eq=False)
class _Folder:
    """The files of a run: every attack's flips and row, the weights, the samples, the summary."""

    run: Evaluation
    reading: Reading
    model: Model
    data: Any
    batch_size: int
    random: np.random.Generator
    notes: Notes

    def look(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._files()
        self._model()
        self._weights()
        self._samples()
        if self.data is not None:
            self._records(records)
        self._landmarks()
        self._flips()
        if not any(map(_endless, self.reading.finished)):
            self.notes.cover("rows.title", "best.title")
        for unit in self.reading.finished:
            if _endless(unit):
                self.notes.unchecked.append(
                    f"the title and the share of {unit.key}: its options ask for too many steps."
                )
            else:
                self._title(unit)
        self._again()

    def _files(self) -> None:
        """What the manifest, the summary and the memory say beside the chunks."""
        run = self.run
        now = type(run).of(self.reading)
        if not all(_equal(getattr(run, name), getattr(now, name)) for name in COMPARED):
            self.notes.problems.append(
                "what is in memory is not what the run's folder holds: load it again."
            )
        if self.reading.store.read("manifest.json") is None:
            self.notes.unchecked.append("what is missing: the run is not finished.")
        else:
            self.notes.problems += self.reading.store.verify()
        missing = [finding.text for finding in now.findings if finding.name == "unfinished"]
        self.notes.unchecked += missing
        text = self.reading.store.read("summary.json")
        if text is not None:
            stated = _parsed(text)
            found = json.loads(json.dumps(summary(now)))
            told = "the rows of all attacks, the curves and the summary follow from the flips."
            self.notes.expect(
                close(stated, found),
                "results/summary.json does not say what the chunks say.",
                told,
            )
        kept = ("attack", "threat", "accuracy", "interval", "cost", "flipped")
        self.notes.cover(*(f"{name}.{part}" for name in ("rows", "best") for part in kept))
        self.notes.cover("threats", "clean", "clean_interval", "methods")
        self.notes.cover("config.format", "config.norm", "config.domain", "config.threats")
        self.notes.cover("config.chunk", "config.data.samples", "config.data.shape")

    def _model(self) -> None:
        stated = self.reading.config["model"].get("weights")
        found = fingerprint(own_model(self.model))
        if stated is None or found is None:
            self.notes.unchecked.append(
                "whether the model is the run's own: it has no weights to compare."
            )
        else:
            self.notes.cover("config.model.weights")
            told = "the model has the weights that the run names."
            # Runs before 0.3 with a box for each feature name those of the rescaled model.
            known = (found, fingerprint(self.model))
            self.notes.expect(
                stated in known, "the model's weights are not those that the run names.", told
            )

    def _weights(self) -> None:
        """The mass of each sample: 1/N unless the configuration names weights."""
        mu = self.reading.column(CLEAN, "mu")
        stated = self.reading.config["mu"]
        if stated is None or data_hash(mu, mu) == stated:
            self.notes.cover("mu", "config.mu")
        if abs(math.fsum(mu.tolist()) - 1) > 1e-12 and len(mu):
            self.notes.problems.append("the weights of the samples do not sum to 1.")
        elif stated is None:
            even = torch.equal(mu, sample_weights(None, len(mu)))
            told = "every sample weighs 1/N, as the configuration says."
            self.notes.expect(
                even, "the samples' weights are not equal, and the configuration names none.", told
            )
        elif data_hash(mu, mu) == stated:
            self.notes.checked.append("the samples weigh what the configuration says.")
        else:
            self.notes.unchecked.append(
                "the weights of the samples: the configuration has a checksum of what they were "
                "made from."
            )

    def _samples(self) -> None:
        """The samples of the run, and what the model says there, chunk by chunk; beside the
        data if there are any.
        """
        data = None if self.data is None else open_data(self.data, max(len(self.run), 1))
        if data is None:
            self.notes.unchecked.append(
                f"whether the samples are those of {self.run.data!r}: give data (--data)."
            )
        elif len(data) != len(self.run):
            self.notes.problems.append(
                f"the run has {len(self.run)} samples and the data have {len(data)}."
            )
        here = data is not None and len(data) == len(self.run)
        counts = Counter[str]()
        blank = 0
        for chunk, start, stop in self.reading.chunks:
            kept, fields = self.reading.store.get(CLEAN, chunk)
            x = unpack(kept["x"])
            y = stored_labels(kept)
            if data is not None and here:
                theirs, labels = data.read(start, stop)
                ours = y if self.run.criterion is None else self.run.criterion.wanted(y)
                same = torch.equal(theirs.to(x.dtype), x) and torch.equal(labels, ours)
                named = list(map(str, fields.get("ids", [])))
                counts["chunks hold other samples than the data"] += not same
                counts["chunks name their samples otherwise than the data"] += named != list(
                    map(str, data.ids(start, stop))
                )
            now, then = self._logits(x), kept["logits"]
            unknown = bool(fields.get("unknown"))
            off = now.shape != then.shape or _off(now, then)
            blank += unknown
            counts["chunks hold other logits than the model's"] += off and not unknown
            hashed = fields.get("sha256") == data_hash(x, y)
            counts["chunks have samples that are not those hashed"] += not hashed
        if blank:
            self.notes.unchecked.append(
                f"the logits of {blank} chunks: the run says that it does not know them."
            )
        told = "the logits"
        if data is not None:
            told = "the samples are those of the data, and the logits"
            self.notes.cover("images", "y", "ids")
        self._task(data is not None)
        self.notes.count(counts, f"{told} are the model's.")

    def _task(self, compared: bool) -> None:
        """What right means: read from the configuration, and compared with the rows of the samples
        when the run was read.
        """
        criterion = self.run.criterion
        self.notes.cover("outputs", "criterion", "config.criterion")
        if isinstance(criterion, Regression) and criterion.tolerance == OWN:
            self.notes.unchecked.append(
                "the tolerances of the samples: they are the run's own choice."
            )
        elif compared:
            self.notes.cover("targets")

    def _logits(self, x: Tensor) -> Tensor:
        return outputs_of(self.model, x, self.run.criterion, self.batch_size)

    def _records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What the run says of its data (digests, split, names of features and classes) beside
        what the data at hand say of themselves.
        """
        for key, stated in dict(self.reading.config["data"]).items():
            known = [record[key] for record in records if key in record]
            partial = key == "sha256" and any(record.get("partial") for record in records)
            if key in OTHERWISE or partial or not known:
                continue
            self.notes.cover(f"config.data.{key}")
            found = any(_same_record(key, stated, value) for value in known)
            about = f"the run's {plain_text(key)!r} of its data"
            self.notes.expect(
                found, f"{about} is not that of the data given.", f"{about} is that of the data."
            )
        classes = self.reading.config["classes"]
        known = [record["classes"] for record in records if record.get("classes") is not None]
        if known:
            self.notes.cover("classes", "config.classes")
            self.notes.expect(
                classes is not None and list(map(str, classes)) in known,
                "the names of the classes are not those of the data.",
                "the names of the classes are those of the data.",
            )

    def _landmarks(self) -> None:
        """Known shifts: their eps and the accuracy under them, computed again."""
        wrong = dict.fromkeys(
            ("known shifts have another eps", "known shifts leave another accuracy"), 0
        )
        if not self.run.landmarks:
            return
        own = list[str]()
        for landmark in self.run.landmarks:
            eps, accuracy = self._shifted(landmark, own)
            wrong["known shifts have another eps"] += not eps
            wrong["known shifts leave another accuracy"] += not accuracy
        if own:
            self.notes.unchecked.append(
                f"the shifts {', '.join(map(plain_text, own[:5]))}: they are no known ones, and "
                "only their maker has them."
            )
        else:
            self.notes.cover("landmarks")
        told = len(self.run.landmarks) - len(own)
        self.notes.count(wrong, f"{told} known shifts have the eps and the accuracy stated.")

    def _shifted(self, landmark: Landmark, own: list[str]) -> tuple[bool, bool]:
        """Whether the eps and the accuracy of a shift are as stated; own: names of unknown ones."""
        run = self.run
        x, _ = run.images(range(len(run)))
        try:
            moved = changed(x, landmark.name, run.threat.domain, int(self.reading.config["seed"]))
        except InputError:
            own.append(landmark.name)
            return True, True
        distance = distances_between(moved, x, run.threat.norm)
        near = True
        for order, stated in landmark.eps.items():
            near &= math.isclose(stated, mean_cost(distance, order), rel_tol=COSTS)
            exact = landmark.exact[order]
            if exact is not None:
                known = transport(x, moved, run.y, run.threat.norm, order)
                near &= known is not None and math.isclose(exact, known, rel_tol=COSTS)
        logits = self._logits(moved)
        lead = logits.gather(1, run.y[:, None])[:, 0] - strongest_rival(logits, run.y)[0]
        close = lead.abs() <= LOGITS * logits.abs().amax(1)
        right = int((lead > 0).sum())
        unsure = int(close.sum())
        return near, abs(landmark.accuracy * len(run) - right) <= unsure + 1e-6

    def _flips(self) -> None:
        """Every flip of every attack, not only the nearest."""
        for key in self.reading.sources:
            counts = Counter[str]()
            total = 0
            for chunk, start, stop in self.reading.chunks:
                found, flips = self._chunk(key, chunk, start, stop)
                counts.update(found)
                total += flips
            self.notes.count(counts, f"{key}: {total} flips are what they claim.")

    def _chunk(self, key: str, chunk: int, start: int, stop: int) -> tuple[dict[str, int], int]:
        """What does not hold of the flips of one chunk, and how many there are."""
        clean = self.reading.store.get(CLEAN, chunk)[0]
        tensors = self.reading.store.get(key, chunk)[0]
        x = unpack(clean["x"])
        y = right_of(self.run.criterion, stored_labels(clean))
        wrong = clean["predicted"] != clean["y"]
        stated = tensors["distances"]
        index = tensors["index"]
        flip = (stated > 0) & torch.isfinite(stated)
        placed, held, refuted = torch.zeros(3, len(x), dtype=torch.bool)
        valid = bool(((index >= 0) & (index < len(x))).all())
        if valid:
            placed[index] = True
        if valid and len(index) and bool(torch.isfinite(tensors["points"]).all()):
            points = moved(x, tensors)
            inside = self.run.inside(self.model, torch.arange(start, stop), x)
            about = self.run.threat.norm, inside, self.batch_size
            held = holds(judged(self.model, x, y, points, *about), points, stated)
        if self.reading.is_pooled:
            refuted = self.reading.refuted(key)[start:stop]
        free = (tensors["forwards"] == 0) & key.startswith("attack")
        found = {
            "flips are not misclassified, in the box and as near as stated": flip
            & ~held
            & ~refuted,
            "flips are called none and hold": flip & held & refuted,
            "distances have no point, or points no distance": (placed != flip) | (not valid),
            "flips cost no pass": flip & free & ~wrong,
            "distances are 0 where the sample is right, or above where it is wrong": (stated == 0)
            != wrong,
        }
        counts = {f"of {key}: {name}": int(which.sum()) for name, which in found.items()}
        return counts, int(flip.sum())

    def _title(self, unit: Unit) -> None:
        """What a row calls itself, and how it shares its budget, against the attack that the
        configuration names.
        """
        x = self.run.images([])[0]
        y = labels_at(self.run.right, slice(0, 0))
        found = unit.entry.run(self.model, x, y, unit.threat, **unit.options)
        kappa = found.info.get("options", {}).get("kappa")
        title = title_of(unit.entry, found)
        weight = 1.0 if kappa is None else 1 / float(kappa)
        expected = None if share_of(found.weights, found.allocation) is None else weight
        told = [fields for fields in self.reading.fields(unit.key) if "share" in fields]
        titles = sorted({str(fields["title"]) for fields in told} - {title})
        if titles:
            self.notes.problems.append(
                f"{unit.key} calls itself {titles[0][:60]!r}, and the attack that was asked for "
                f"is {title!r}."
            )
        if any(fields["share"] != expected for fields in told):
            self.notes.problems.append(
                f"{unit.key} moves another share of each sample than {title!r} does."
            )
        if unit.attack == "nearest" and "passes" in unit.options:
            spent = self.reading.column(unit.key, "forwards") + self.reading.column(
                unit.key, "backwards"
            )
            if len(spent) and int(spent.max()) > int(unit.options["passes"]):
                self.notes.problems.append(
                    f"{unit.key} spent more passes than the {unit.options['passes']} it was given."
                )

    def _again(self) -> None:
        """The cheapest attack once more on a chunk drawn at random: a run may have left flips
        out.
        """
        units = [unit for unit in self.reading.finished if not unit.whole and not _endless(unit)]
        if not units or not len(self.run):
            return
        unit = min(units, key=lambda unit: unit.entry.passes)
        chunk, start, stop = list(self.reading.chunks)[
            int(self.random.integers(len(self.reading.chunks)))
        ]
        kept = self.reading.store.get(CLEAN, chunk)[0]
        numbers = Targets(numbers=self.run.criterion is not None)
        given = open_data((unpack(kept["x"]), stored_labels(kept)), targets=numbers)
        boxes = self.run.boxes
        own = None if boxes is None else boxes.take(torch.arange(start, stop))
        settings = replace(self.reading.settings, boxes=own)
        worker = Worker(self.model, given, settings, self.run.mu[start:stop])
        tensors, _ = worker.run(Attack(Place(unit.key, 0, 0, stop - start), unit))
        stated = self.reading.distances(unit.key)[start:stop]
        now = tensors["distances"]
        more = int((torch.isinf(stated) & torch.isfinite(now)).sum())
        where = f"samples {start} to {stop - 1}"
        self.notes.expect(
            more <= NOISE * (stop - start),
            f"{unit.entry.title} finds {more} flips among {where} that the run does not have: "
            "flips were left out.",
            f"{unit.entry.title}, run again on {where}, finds no more than is stated.",
        )
        self.notes.unchecked.append(
            "the other attacks and samples, which were not attacked again: flips that were left "
            "out make the attacked figures weaker than they could be, never false."
        )


def _endless(unit: Unit) -> bool:
    """Whether the options of an attack, which the run names, would keep its reader waiting for
    ever.
    """
    counts = [
        value for key, value in unit.options.items() if isinstance(value, int) and key != "seed"
    ]
    return math.prod(max(value, 1) for value in counts) > STEPS


def _share(radii: bool | float) -> float:
    if isinstance(radii, bool):
        return float(radii)
    share = number(radii, "radii")
    if not 0 <= share <= 1:
        raise InputError(
            f"radii is {radii!r}: give True, False, or the share to prove again, between 0 and 1."
        )
    return share


def _equal(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return torch.equal(a, b) if tensors else type(a) is type(b) and bool(a == b)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return None


def _off(now: Tensor, then: Tensor) -> bool:
    return not bool(((now - then).abs() <= LOGITS * then.abs().max()).all())


def _same_record(key: str, stated: Any, known: Any) -> bool:
    """Whether the run and the data say the same; files may have other names, and samples may have
    been brought to another type for the model.
    """
    if key == "files" and isinstance(stated, Mapping) and isinstance(known, Mapping):
        return sorted(map(str, stated.values())) == sorted(map(str, known.values()))
    if key == "preprocessing" and isinstance(stated, list):
        return stated[: len(known)] == list(known)
    return json.dumps(stated, sort_keys=True) == json.dumps(known, sort_keys=True)
