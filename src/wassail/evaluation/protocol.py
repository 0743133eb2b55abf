"""The protocol: clean accuracy first, checks, attacks from the cheapest to the dearest,
certificates if asked, then one number.

Everything that is computed for a chunk of samples goes to the run directory at once and is read
back from there: a run that was killed goes on where it was, and a run on a million samples needs no
more memory than one on a hundred. What is global (budget, curves, intervals, indicators) is
arithmetic on the per-sample numbers, done when the run is read.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wassail.attacks.catalogue import GIVEN
from wassail.errors import InputError
from wassail.evaluation import indicators
from wassail.evaluation.boxes import BOXES, check_attacks, with_hull
from wassail.evaluation.chunks import (
    CHECKS,
    CLEAN,
    CONVERGENCE,
    TRANSFER,
    Tensors,
    nearest_of,
    take,
    unpack,
)
from wassail.evaluation.configuration import run_config
from wassail.evaluation.criterion import check_outputs, judged, outputs_of, right_of
from wassail.evaluation.ladder import DRAWN, draw, key_of
from wassail.evaluation.landmarks import Shifts
from wassail.evaluation.landmarks import landmarks as measure
from wassail.evaluation.landmarks import plain as in_plain
from wassail.evaluation.meter import Meter
from wassail.evaluation.plan import (
    AUTO,
    Unit,
    check_budgets,
    checked_points,
    data_hash,
    named,
    options_by_attack,
    others_of,
    rehearse,
    with_passes,
)
from wassail.evaluation.reading import LANDMARKS, Chunks, Reading
from wassail.evaluation.result import Finding, same_norm
from wassail.evaluation.run import Evaluation
from wassail.evaluation.settings import CHUNK, Settings
from wassail.evaluation.store.store import Store
from wassail.evaluation.summary import summary
from wassail.evaluation.tasks.attack import Attack, Rung, Transfer
from wassail.evaluation.tasks.clean import Clean
from wassail.evaluation.tasks.looks import Checks, Convergence
from wassail.evaluation.tasks.pool import Pool
from wassail.evaluation.tasks.radii import Certify, Close
from wassail.evaluation.tasks.task import Place, Task
from wassail.evaluation.work import Local, Runner, Worker
from wassail.network import Model, frozen
from wassail.progress import Progress, Report, progress_bar
from wassail.threat import Groups, Number, Threat, boxes_of, number, whole
from wassail.transport.allocation import groups_of, sample_weights
from wassail.zoo.classes import check_match
from wassail.zoo.datasets import open_data
from wassail.zoo.features import in_boxes, points_in_boxes, refuse_one_hot, with_held
from wassail.zoo.files import Targets
from wassail.zoo.samples import Data, for_model
from wassail.zoo.source import Source

DEFAULT = ("wda", "wda++", "nearest")
PASSES = 100  # a sample, for `nearest`
# the first samples that others are moved toward, and what they may weigh
ANCHORS = 500
ANCHOR_BYTES = 1 << 24
# what they count for in the progress, in passes of an attack: a radius, a look without gradients
CERTIFY_PASSES = 2000
LOOK_PASSES = 10

_log = logging.getLogger("wassail")


def evaluate(  # noqa: PLR0913
    model: Model | Source,
    data: Any,
    threats: Threat | Sequence[Threat],
    attacks: Sequence[str] | Mapping[str, Mapping[str, Any]] = DEFAULT,
    *,
    out: str | PathLike[str] | None = None,
    resume: bool = False,
    add: bool = False,
    certify: str | None = None,
    effort: float | None = None,
    arithmetic: str = "auto",
    gap: float | None = None,
    closing: int | None = None,
    provers: int = 1,
    time_limit: float | None = None,
    passes: int | str = PASSES,
    seed: int = 0,
    chunk: int = CHUNK,
    batch_size: int | None = None,
    mu: Tensor | None = None,
    label_cost: Number = math.inf,
    subpopulation: Number = 1,
    groups: Groups | None = None,
    gradients: str = "float32",
    look: bool = True,
    landmarks: Shifts | None = None,
    name: str | None = None,
    points: Tensor | None = None,
    tolerance: Number | Tensor | None = None,
    threshold: Number | None = None,
    label: int | str | None = None,
    immutable: Sequence[int | str] = (),
    command: Sequence[str] = (),
    runner: Runner | None = None,
    progress: Progress = False,
) -> Evaluation:
    """How badly a model can fail on data over every threat: attacked, and if asked certified,
    sample by sample.

    The result depends on model, data and settings, not on how often the run was interrupted: its
    files are the same to the byte, but for those in `log/`, with radii limited by the clock the one
    exception.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or what `zoo.open_model`
            found.
        data: whatever `zoo.open_data` takes: a pair `(x, y)`, a Dataset, a DataLoader, a file.
        threats: one `Threat`, or several of one norm and domain; the first is the headline's. A
            domain with a box for each feature is for samples `(N, F)`: the run is then made in the
            variable `(x - low) / scale`, with the model behind it. With boxes of each sample, low
            and high of the shape of the samples, each moves in its own.
        attacks: names of `wassail.names.ATTACKS`, perhaps with options, `{"wda": {"kappa": 4}}`;
            they run from the cheapest to the dearest, and their flips are pooled; default wda,
            wda++ and nearest.
        out: path of the run directory; default None, a temporary one that lives as long as the
            result.
        resume: bool, go on with the run in `out`; default False.
        add: bool, the run in `out` may be one with fewer attacks; default False.
        certify: a method of `radii`, "auto" as a rule; default None, no radii.
        effort: with certify, seconds of one core that a sample may take beyond linear bounds, as in
            `radii`; default None, 2, and no limit with a time limit.
        arithmetic: what the radii hold for, as in `radii`; default "auto".
        gap: with certify, all samples are attacked and certified together (`sandwich`) until the
            accuracies of every threat differ by at most this, a fraction; default None.
        closing: int, with gap, how many of the threats are closed, from the first on; the others
            are told by what that proves; default None, all.
        provers: int, with gap, threads that prove samples side by side (`sandwich`); default 1.
        time_limit: seconds for all radii; samples that are not reached have radius 0; default None,
            no limit.
        passes: int, passes of a sample for `nearest`, default 100; or "auto", which doubles them
            from 100 up to 3200 until 100 correct samples drawn at random have distances that
            shrink by at most 2 % from a quarter of the passes to all.
        seed: int, keys the random draws together with each sample's content; default 0.
        chunk: int, samples that are computed, and stored, in one go; default 100.
        batch_size: int, most samples in one call of the model; default None, 250.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        label_cost: price of a changed label, in the units of eps; default inf. With it, with
            `subpopulation` or with `groups` the result has a second figure for each threat, by
            arithmetic on the same distances: attacks and radii are those of the plain threat.
        subpopulation: least share of the population that is there; default 1.
        groups: `Groups` of the samples, whose weights may be any in their ranges; default None.
        gradients: "float32" (the default); "bfloat16" or "float16" computes the attacks' gradients
            in mixed precision, and every decision stays in float32.
        look: bool, run the checks and indicators that need passes of their own; default True.
        landmarks: known shifts to measure, "standard" or as in `landmarks`; default None. They are
            kept with the run, and one that is below the certified accuracy raises.
        name: what to call the model; default None, its class, or what it was opened by.
        points: anyone's adversarial examples, tensor `(N, *shape)`, one for each sample; each is
            looked at once more and joins the pool if it is a flip; default None.
        tolerance: for a regression, where y are targets `(N,)` or `(N, K)`: a sample is right while
            all outputs are nearer to their targets than this. A number in their unit, a share of
            the target as "5%", or a tensor with one for each sample; default None, y are classes.
        threshold: for labels that hold or do not, y of 0 and 1, `(N,)` for one output or `(N, K)`:
            an output above it says yes. 0 is for logits; default None, y are classes.
        label: with threshold, the one label that counts, its place or name; default None, all.
        immutable: features that may not move, names or places; default none.
        command: words recorded with the run; default none.
        runner: what does the work, for example `evaluation.cluster.Ray`; default None, this
            process.
        progress: bool, a bar with the time left, or a callable that is given the share done;
            default False.

    Returns:
        `Evaluation`.
    """
    asked, others = others_of(_listed(threats), label_cost, subpopulation, groups)
    source = named(model, name)
    numbers = Targets(numbers=tolerance is not None or threshold is not None)
    opened = open_data(data, targets=numbers)
    samples, criterion = judged(opened, tolerance, threshold, label)
    asked, own = with_hull(same_norm(asked), samples)
    if own is not None and (len(immutable) or landmarks is not None):
        raise InputError(
            "samples with boxes of their own have no immutable features and no landmarks: freeze "
            "a number with low = high."
        )
    source, samples, chosen, points = _opened(source, samples, asked, immutable, points)
    if criterion is not None and landmarks is not None:
        raise InputError("landmarks are for classes: leave them out with a tolerance or threshold.")
    groups_of(others.get("groups"), len(samples))
    wanted, points = _wanted(attacks, passes, points, samples)
    _check_folder(out, resume or add)
    settings = Settings(
        chosen,
        wanted,
        points,
        criterion,
        own,
        certify=certify,
        effort=effort,
        arithmetic=arithmetic,
        gap=gap,
        closing=closing,
        provers=provers,
        time_limit=time_limit,
        seed=seed,
        chunk=chunk,
        batch_size=batch_size,
        gradients=gradients,
        look=look,
    )
    check_attacks(wanted, own)
    if landmarks is not None and mu is not None:
        raise InputError("landmarks are for samples of equal weight: evaluate without mu.")
    worker = Worker(source.model, samples, settings, sample_weights(mu, len(samples)))
    mode = indicators.mode(source.model)
    _rehearse(worker)
    runner = runner or Local()
    config = {
        **run_config(settings, source, samples, mu, others),
        **runner.about,
        "command": list(command),
    }
    with _folder(out) as folder:
        grow = ("attacks",) if add else ()
        run = Store.resume(folder, config, grow) if resume else Store.create(folder, config)
        with run as store, progress_bar(progress, "evaluation") as report:
            reading = _Driver(store, worker, runner, report, landmarks).run(mode)
    if out is None:  # the folder lives as long as the result, which reads images from it
        weakref.finalize(reading, shutil.rmtree, folder, ignore_errors=True)
    return Evaluation.of(reading)


def _check_folder(out: object, goes_on: bool) -> None:
    if goes_on and out is None:
        raise InputError("resume and add need out: the folder of the run to go on with.")
    if out is not None and not isinstance(out, (str, PathLike)):
        raise InputError(f"out is {out!r}: give the path of a directory, or None.")


@contextmanager
def _folder(out: str | PathLike[str] | None) -> Iterator[Path]:
    """The run directory; a temporary one is removed if the run fails."""
    folder = Path(tempfile.mkdtemp(prefix="wassail-") if out is None else out)
    try:
        yield folder
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _listed(threats: Threat | Sequence[Threat]) -> Sequence[Threat]:
    """One threat, or several."""
    listed = isinstance(threats, Sequence) and not isinstance(threats, str)
    return threats if listed else [threats]  # type: ignore[return-value, list-item]


def _opened(
    source: Source,
    samples: Data,
    threats: Sequence[Threat],
    immutable: Sequence[int | str],
    points: Tensor | None,
) -> tuple[Source, Data, tuple[Threat, ...], Tensor | None]:
    """The model, the samples, the threats and the points, all in one variable."""
    chosen = same_norm(threats)
    boxes = boxes_of(chosen[0].domain)
    if len(immutable):
        boxes = with_held(samples, chosen[0].domain, immutable)
    if boxes is not None:
        source, samples, domain = in_boxes(source, samples, boxes)
        chosen = tuple(replace(threat, domain=domain) for threat in chosen)
        if isinstance(points, Tensor):
            points = points_in_boxes(points, samples)
    elif isinstance(samples.info.get("features"), list) and len(samples.shape) == 1:
        x = samples.read(0, len(samples))[0]
        refuse_one_hot(x, samples.info["features"], torch.ones(x.shape[1], dtype=torch.bool))
    check_budgets(chosen, samples.shape)
    return source, for_model(samples, source.model), chosen, points


def _wanted(
    attacks: Sequence[str] | Mapping[str, Mapping[str, Any]],
    passes: int | str,
    points: Tensor | None,
    samples: Data,
) -> tuple[dict[str, dict[str, Any]], Tensor | None]:
    """The attacks with their options, points that were given among them, and these points."""
    wanted = options_by_attack(attacks)
    if "nearest" in wanted:
        wanted["nearest"] = {"passes": passes, **wanted["nearest"]}
        if wanted["nearest"]["passes"] != AUTO:
            wanted["nearest"]["passes"] = _checked_passes(wanted["nearest"]["passes"])
    if points is not None or GIVEN in wanted:
        points = checked_points(points, samples)
        wanted = {**wanted, GIVEN: {"sha256": data_hash(points, points[:0])}}
    return wanted, points


def _rehearse(worker: Worker) -> None:
    """What a model cannot do is told before the attacks: they, and certificates, are tried."""
    settings = worker.settings
    criterion = settings.criterion
    check_match(worker.model, worker.data, criterion is not None)
    with frozen(worker.model):
        x, y = worker.data.read(0, min(1, len(worker.data)))
        if criterion is not None and len(x):
            check_outputs(criterion, outputs_of(worker.model, x, criterion))
        rehearse(settings.units, worker.model, x, right_of(criterion, y))
        if settings.certify is not None:
            from wassail.certificates.relax.executed import arithmetic_of

            arithmetic_of(worker.graph, settings.arithmetic)


def _checked_passes(passes: Any) -> int:
    """Passes as a number, or one sentence that says what may be given."""
    if isinstance(passes, str):
        raise InputError(f'passes is {passes!r}: give a whole number, 1 or more, or "auto".')
    return whole(passes, "passes")


class _Driver:
    """One evaluation: has the runner do what is missing in the store, stage by stage, and
    nothing else.
    """

    def __init__(
        self,
        store: Store,
        worker: Worker,
        runner: Runner,
        report: Report,
        shifts: Shifts | None = None,
    ) -> None:
        self.store = store
        self.shifts = shifts
        self.worker = worker
        self.runner = runner
        self.settings = worker.settings
        self.chunks = Chunks(len(worker.data), self.settings.chunk)
        self.took = dict[tuple[str, int], float]()
        units = sum(unit.entry.passes for unit in self.settings.units)
        each = units + 2 + (LOOK_PASSES if self.settings.look else 0)
        each += CERTIFY_PASSES if self.settings.certify else 0
        self.meter = Meter(report, each * len(worker.data) + 1)  # 1 for the end

    def run(self, mode: Finding) -> Reading:
        """The protocol; returns the run as it can be read from now on."""
        look = self.settings.look
        n = len(self.worker.data)
        self.store.log({"event": "start", **_machine()})
        self.meter.report.begin("what is there")
        self._same_model()
        self._same_data()
        self._boxes()
        self._stage("clean accuracy", 1, self._missing(CLEAN), Clean)
        if look and n:
            self._stage("checks", 0, self._once(CHECKS), partial(Checks, mode=asdict(mode)))
        for asked in self.settings.units:
            unit = self._settled(asked)
            places = self._missing(unit.key, unit.whole)
            make = partial(Attack, unit=unit)
            self._stage(str(unit), unit.entry.passes, places, make, unit.whole)
            _log.info("%s: done", unit)
        if look:
            self._convergence()
            move = partial(Transfer, among=self._anchors())
            self._stage("flips without gradients", LOOK_PASSES, self._missing(TRANSFER), move)
        if self.settings.certify is not None:
            self._certify(f"radii@{self.settings.certify}")
        self._pool()
        self._landmarks()
        self.meter.report.begin("figures")
        reading = Reading(Store.open(self.store.folder))
        self.store.write(
            "summary.json", json.dumps(summary(Evaluation.of(reading)), indent=1, sort_keys=True)
        )
        self.store.seal()
        self.store.log({"event": "end"})
        self.meter.report(1.0, 1.0)
        return reading

    def _settled(self, unit: Unit) -> Unit:
        """The unit with the passes that the drawn samples ask for, where they are left to us."""
        if unit.options.get("passes") != AUTO:
            return unit
        if self.store.read(DRAWN) is None:
            self.store.write(DRAWN, json.dumps(draw(self._right(), self.settings.seed)) + "\n")
        while True:
            reading = Reading(self.store)
            assert reading.ladder is not None
            chosen, missing = reading.ladder.top
            if missing is None:
                assert chosen is not None
                _log.info("nearest: %d passes, chosen on %d samples", chosen, len(reading.drawn))
                return with_passes(unit, chosen)
            every = chosen is not None  # the last look joins the pool, which has all chunks
            self._rung(with_passes(unit, missing), missing, reading.drawn, every)

    def _right(self) -> Iterator[tuple[int, Tensor]]:
        """The samples that are correct, with their places."""
        for chunk, start, _ in self.chunks:
            kept = self.store.get(CLEAN, chunk, ("x", "y", "predicted"))[0]
            x = unpack(kept["x"])
            for row in (kept["y"] == kept["predicted"]).nonzero()[:, 0].tolist():
                yield start + row, x[row]

    def _rung(self, unit: Unit, passes: int, drawn: Sequence[int], every: bool) -> None:
        """The drawn samples with so many passes, chunk by chunk; every: chunks without one, too."""
        mine = torch.zeros(self.chunks.n, dtype=torch.bool)
        mine[list(drawn)] = True

        def make(place: Place) -> Rung:
            predicted = self.store.get(CLEAN, place.chunk, ("predicted",))[0]["predicted"]
            return Rung(place, unit, mine[place.start : place.stop].clone(), predicted)

        missing = self._missing(key_of(passes))
        places = [p for p in missing if every or bool(mine[p.start : p.stop].any())]
        self._stage(f"{unit} with {passes} passes", 0, places, make)

    def _stage(
        self,
        name: str,
        passes: int,
        places: Sequence[Place],
        make: Callable[[Place], Task],
        whole: bool = False,
    ) -> None:
        """Do tasks of one kind, each of about so many passes a sample, and put what comes back
        on the disk as it comes. Tasks are made when they are asked for. whole: one for all samples.
        """
        with self.meter.phase(name, passes, self.chunks.n, places) as tick:
            tasks = map(make, places)
            for task, (tensors, fields), seconds in self.runner.run(self.worker, tasks, tick):
                key, chunk = task.place.key, task.place.chunk
                if whole:
                    for part, start, stop in self.chunks:
                        self.store.put(key, part, take(tensors, start, stop), fields)
                else:
                    self.store.put(key, chunk, tensors, fields)
                self.took[key, chunk] = seconds
                self.store.log({"event": "done", "unit": key, "chunk": chunk, "seconds": seconds})

    def _place(self, key: str, chunk: int, start: int, stop: int) -> Place:
        """Samples with their hashes, which the clean chunks keep."""
        mine = range(-(-start // self.chunks.size), -(-stop // self.chunks.size))
        seen = [self.store.get(CLEAN, k, ())[1]["sha256"] for k in mine]
        return Place(key, chunk, start, stop, tuple(seen))

    def _missing(self, key: str, whole: bool = False) -> list[Place]:
        """What is not in the store yet; whole: all samples are one place."""
        missing = [chunk for chunk in self.chunks if not self.store.has(key, chunk[0])]
        if key == CLEAN:  # there are no hashes yet
            return [Place(key, *chunk) for chunk in missing]
        if whole and missing:
            missing = [(0, 0, self.chunks.n)]
        return [self._place(key, *chunk) for chunk in missing]

    def _once(self, key: str) -> list[Place]:
        """The first samples, unless they were looked at already."""
        return [] if self.store.has(key, 0) else [self._place(key, 0, 0, self._first)]

    @property
    def _first(self) -> int:
        """How many samples are looked at for what is said of all of them: whole chunks, of at
        least so many together.
        """
        return min(-(-indicators.LOOKED_AT // self.chunks.size) * self.chunks.size, self.chunks.n)

    def _landmarks(self) -> None:
        """Known shifts, measured once all curves are known: they are compared with them."""
        if self.shifts is None or not len(self.worker.data):
            return
        self.meter.report.begin("known shifts")
        run = Evaluation.of(Reading(Store.open(self.store.folder)))
        x, y = self.worker.data.read(0, len(self.worker.data))
        orders = sorted({*run.orders, 1.0, 2.0, math.inf})  # those that the page draws
        found = measure(
            self.worker.model,
            x,
            y,
            run.threat.norm,
            orders,
            self.shifts,
            domain=run.threat.domain,
            curves=[run.curve(order) for order in orders],
            seed=self.settings.seed,
            batch_size=self.settings.batch_size,
        )
        self.store.write(LANDMARKS, json.dumps(in_plain(found), indent=1) + "\n")

    def _anchors(self) -> tuple[Tensor, Tensor]:
        """The first samples, with their logits: where the transfer goes to, whatever the
        chunks. They travel with the tasks.
        """
        x = list[Tensor]()
        z = list[Tensor]()
        left = ANCHORS
        room = ANCHOR_BYTES
        for chunk, _, _ in self.chunks:
            kept = self.store.get(CLEAN, chunk, ("x", "logits"))[0]
            samples = unpack(kept["x"])
            count = min(len(samples), left, room // max(samples[0].nbytes, 1))
            if count < 1:
                break
            if kept["logits"].shape[1]:  # a cluster may have given up on a chunk
                x.append(samples[:count])
                z.append(kept["logits"][:count])
            left = left - count
            room = room - count * samples[0].nbytes
        none = torch.zeros(0, *self.worker.data.shape), torch.zeros(0, 2)
        return (torch.cat(x), torch.cat(z)) if x else none

    def _convergence(self) -> None:
        """One look, on the first chunk, at the engine that has a budget of passes."""
        unit = next((unit for unit in self.settings.units if unit.attack == "nearest"), None)
        if unit is not None and unit.options.get("passes") == AUTO:
            return  # the drawn samples have told
        places = self._once(CONVERGENCE) if unit is not None and self.chunks.n else []
        if unit is not None and places:
            late = Reading(self.store).distances(unit.key)[: self._first]
            self._stage("convergence", 0, places, partial(Convergence, late=late))

    def _certify(self, key: str) -> None:
        """Radii chunk by chunk, or of all samples together where a bracket is to be closed."""
        whole = self.settings.gap is not None
        make = self._close if whole else self._limited(key)
        self._stage("certified radii", CERTIFY_PASSES, self._missing(key, whole), make, whole)

    def _close(self, place: Place) -> Task:
        return Close(place, self.settings.time_limit, self._known())

    def _known(self) -> Tensors | None:
        """The nearest flips of all samples so far, rows and points; None without an attack."""
        reading = Reading(self.store)
        if not reading.sources:
            return None
        found = [
            nearest_of([self.store.get(key, chunk)[0] for key in reading.sources], start)
            for chunk, start, _ in self.chunks
        ]
        return {name: torch.cat([part[name] for part in found]) for name in ("index", "points")}

    def _limited(self, key: str) -> Callable[[Place], Task]:
        """Radii up to the nearest flip known; a time limit, of every worker, is shared among
        the samples that are left.
        """
        limit = self.settings.time_limit
        reading = Reading(self.store)
        spent = reading.seconds.get(key, 0.0)
        budget = (
            math.inf if limit is None else number(limit, "time limit") * self.runner.workers - spent
        )
        given: dict[int, float] = {}

        def make(place: Place) -> Task:
            upper = reading.attacked[place.start : place.stop].clone()
            if limit is None:
                return Certify(place, None, upper)
            share = len(place) / (self.chunks.n - place.start)
            # What a chunk took, or what it was given if it is not done yet.
            used = sum(self.took.get((key, chunk), seconds) for chunk, seconds in given.items())
            given[place.chunk] = min((budget - used) * share, number(limit, "time limit"))
            return Certify(place, given[place.chunk], upper)

        return make

    def _pool(self) -> None:
        reading = Reading(self.store)

        def make(place: Place) -> Pool:
            return Pool(place, [self.store.get(key, place.chunk)[0] for key in reading.sources])

        self._stage("a last look at all flips", 1, self._missing(reading.pooled), make)

    def _boxes(self) -> None:
        """The boxes of the samples, beside them."""
        boxes = self.settings.boxes
        for chunk, start, stop in () if boxes is None else self.chunks:
            if boxes is not None and not self.store.has(BOXES, chunk):
                sides = {"low": boxes.low[start:stop], "high": boxes.high[start:stop]}
                kept = {name: side.contiguous().clone() for name, side in sides.items()}
                self.store.put(BOXES, chunk, kept, {})

    def _same_data(self) -> None:
        """Data of which the configuration knows a part only (a Dataset in Python) are looked at
        as a whole.
        """
        if "sha256 of some" in self.worker.data.info:
            for chunk, start, stop in self.chunks:
                if self.store.has(CLEAN, chunk):
                    self.worker.samples(self._place(CLEAN, chunk, start, stop))

    def _same_model(self) -> None:
        """A model whose weights have no fingerprint, or whose code has changed, shows itself by
        its logits.
        """
        if not self.chunks.n or not self.store.has(CLEAN, 0):
            return
        kept = self.store.get(CLEAN, 0, ("x", "logits"))[0]
        with frozen(self.worker.model):
            now = self.worker.logits(unpack(kept["x"][:8]))
            then = kept["logits"][:8]
        if now.shape != then.shape or (now - then).abs().max() > 1e-4 * then.abs().max().clamp(
            min=1
        ):
            raise InputError(
                "the model gives other logits than the one that the run in "
                f"{str(self.store.folder)!r} was begun with: give "
                "the same model, or choose another --out."
            )


def _machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "threads": torch.get_num_threads(),
    }
