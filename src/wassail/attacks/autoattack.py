"""AutoAttack (Croce & Hein, ICML 2020, arXiv 2003.01690; for l1 2021, arXiv 2103.01208): four
attacks, one after the other.

`autoattack` is the ensemble, `AutoAttack` a drop-in for scripts written for the authors' class. A
stage only sees the samples that still stand, packed into full batches; a sample leaves the moment
it falls; the logits at the samples are computed once for all stages (FAB looks at them a second
time, for its gradients there).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from wassail.attacks.apgd import apgd_attack
from wassail.attacks.fab import fab_engine
from wassail.attacks.minimal.run import Engine
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import balls
from wassail.attacks.square import square_attack
from wassail.checks import check_data, check_task
from wassail.device import write
from wassail.errors import InputError, ModelWarning, unknown
from wassail.geometry import pull_inside
from wassail.losses import predict
from wassail.network import Model, Network, search
from wassail.progress import Progress, Tick
from wassail.records import Record, check_equal
from wassail.specification import Labels, Specification
from wassail.threat import Number, Threat, check_seed, parse_eps, parse_threat
from wassail.transport.distribution import Distribution

VERSIONS = ("standard", "plus", "rand")
ATTACKS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
# share of the samples that Square may fell after the gradient attacks before it is a warning
SUSPICIOUS = 0.002

Log = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """One attack of the ensemble: its name, the engine, the engine's options."""

    name: str
    engine: Engine
    options: Mapping[str, Any]


def stages(version: str, norm: float) -> tuple[Stage, ...]:
    """The published line-up of a version for a norm.

    standard: APGD-CE, APGD-T on 9 targets, FAB-T on 9, Square with 5000 queries (l1: 5 restarts of
    APGD-CE, 5 targets of APGD-T, both from larger balls). plus: 5 restarts each of APGD-CE,
    APGD-DLR and FAB, then Square, APGD-T, FAB-T. rand: APGD-CE and APGD-DLR with gradients averaged
    over 20 draws.
    """
    if version not in VERSIONS:
        raise unknown("version", version, VERSIONS)
    sparse = norm == 1
    if version == "standard":
        return (
            stage("apgd-ce", restarts=5 if sparse else 1, large=sparse),
            stage("apgd-t", targets=5 if sparse else 9, large=sparse),
            stage("fab-t"),
            stage("square"),
        )
    if version == "plus":
        return (
            stage("apgd-ce", restarts=5, large=False),
            stage("apgd-dlr", restarts=5, large=False),
            stage("fab", restarts=5),
            stage("square"),
            stage("apgd-t", large=False),
            stage("fab-t"),
        )
    return stage("apgd-ce", eot=20, large=False), stage("apgd-dlr", eot=20, large=False)


def stage(name: str, **options: Any) -> Stage:
    """One of `ATTACKS` with AutoAttack's options, changed as given."""
    if name not in ATTACKS:
        raise unknown("attack", name, ATTACKS)
    if name == "square":
        return Stage(name, square_attack, {"queries": 5000, **options})
    if name.startswith("fab"):
        return Stage(
            name,
            fab_engine,
            {"steps": 100, "targets": 9 if name == "fab-t" else None, "shorten": 0, **options},
        )
    loss = {"apgd-ce": "ce", "apgd-dlr": "dlr", "apgd-t": "targeted"}[name]
    return Stage(name, apgd_attack, {"loss": loss, "steps": 100, **options})


def autoattack(
    model: Model,
    x: Tensor,
    y: Labels,
    threat: Threat,
    *,
    version: str = "standard",
    attacks: Sequence[str | Stage] | None = None,
    state: str | PathLike[str] | None = None,
    mu: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
    log: Log | None = None,
) -> Distribution:
    """AutoAttack in every sample's ball of radius eps.

    Croce and Hein (2020). `info["stages"]` of the result has the accuracy after each stage, and its
    passes.

    Warns where the figure may not be trusted: randomised logits (use "rand"), zero gradients, and
    Square felling more than 0.2 % of the samples after the gradient attacks. Probabilities instead
    of logits are an error.

    Per sample that never falls, standard, linf and l2: 1 + 101 + 909 + about 1,300 + 5,001 F and
    1,000 + about 900 B.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        threat: `Threat`: norm, order, eps and domain.
        version: "standard" (the default), "plus", or "rand" for randomised models.
        attacks: other attacks instead, by name, in this order; default None, those of the version.
        state: path of a file that is kept after every stage; if it is there, its stages are not run
            again; default None, no file.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        seed: int, keys the random draws together with each sample's content; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.
        log: callable that is given a line after each stage; default None.

    Returns:
        `Distribution` with every weight 1: all of each sample's mass moves.
    """
    threat = parse_threat(threat, own=True)
    check_seed(seed)
    x, y = check_task(x, y, threat.domain, model)
    chosen = (
        stages(version, threat.norm)
        if attacks is None
        else tuple(_as_stage(attack) for attack in attacks)
    )
    if not chosen:
        raise InputError(f"attacks is empty: name at least one of {', '.join(ATTACKS)}.")
    run = _Run(
        threat, chosen, seed, None if state is None else Path(state), log or (lambda line: None)
    )
    with warnings.catch_warnings():
        if any(part.options.get("eot", 1) > 1 for part in chosen):
            # An average over draws is asked for because the model is randomised.
            warnings.simplefilter("ignore", ModelWarning)
        found = search(run.attack, model, x, y, batch_size, progress, "AutoAttack", whole=True)
    run.warn(len(x))
    names = [part.name for part in chosen]
    options = {"version": version if attacks is None else "custom", "attacks": names}
    info = {"method": "autoattack", "options": options, "seed": seed, "stages": run.table}
    return Distribution.from_search(x, y, found, threat, 1.0, "autoattack", info, mu)


@dataclass(frozen=True, eq=False)
class _State(Record):
    """What is known after some of the stages: all of it, so that a resumed run ends where an
    uninterrupted one does.
    """

    x: Tensor
    y: Tensor
    clean: Tensor
    points: Tensor
    standing: Tensor
    forwards: Tensor
    backwards: Tensor
    threat: Threat
    seed: int
    attacks: tuple[str, ...]
    table: Mapping[str, Mapping[str, float]]
    specification: Specification | None = None


@dataclass
class _Run:
    threat: Threat
    stages: tuple[Stage, ...]
    seed: int
    path: Path | None
    log: Log
    # A stage's name -> what it did.
    table: dict[str, Mapping[str, float]] = field(default_factory=dict)

    def attack(self, network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        """All stages over all samples: `search` with `whole=True` calls this once."""
        state = self._begin(network, x, y)
        network.forwards, network.backwards = (
            count.to(x.device, copy=True) for count in (state.forwards, state.backwards)
        )
        points = state.points.clone()
        standing = state.standing.clone()
        ball = balls(x, self.threat)
        self.table = dict(state.table)
        begun = time.time()
        for number, part in enumerate(self.stages):
            key = f"{number + 1} {part.name}"
            if key in self.table:
                continue
            rows = standing.nonzero()[:, 0]
            before = network.forwards.sum() + network.backwards.sum()
            flat = 0
            for batch in torch.split(rows, network.batch_size) if len(rows) else ():
                fell, moved, zero = self._batch(part, network, x, y, batch, state.clean, ball)
                write(points, fell, moved, batch)
                standing[batch] = ~fell
                flat += zero
                tick((number + float((batch[-1] + 1) / len(x))) / len(self.stages))
            spent = int(network.forwards.sum() + network.backwards.sum() - before)
            accuracy = float(standing.cpu().double().mean()) if len(x) else math.nan
            self.table[key] = {
                "accuracy": accuracy,
                "attacked": len(rows),
                "passes": spent,
                "zero gradients": flat,
            }
            self.log(
                f"robust accuracy after {part.name.upper()}: {accuracy:.2%} (total time "
                f"{time.time() - begun:.1f} s)"
            )
            state = replace(
                state,
                points=points,
                standing=standing,
                forwards=network.forwards,
                backwards=network.backwards,
                table=self.table,
            )
            if self.path is not None:
                state.save(self.path)
        return points, state.clean

    def _begin(self, network: Network, x: Tensor, y: Tensor) -> _State:
        """The saved state if there is one for the same samples, threat, seed and attacks; else
        the clean forward pass.
        """
        attacks = tuple(f"{part.name} {dict(sorted(part.options.items()))}" for part in self.stages)
        if self.path is not None and self.path.exists():
            state = _State.load(self.path)
            for name, value in (
                ("x", x.cpu()),
                ("y", y.cpu()),
                ("specification", network.specification),
                ("threat", self.threat),
                ("seed", self.seed),
                ("attacks", attacks),
            ):
                check_equal(name, getattr(state, name), value)
            home = {
                name: getattr(state, name).to(x.device) for name in ("clean", "points", "standing")
            }
            self.log(f"restored {len(state.table)} attacks from {self.path}")
            return replace(state, **home)
        clean = network.logits(x, network.rows)
        standing = predict(clean, y) == y
        self.log(f"initial accuracy: {float(standing.cpu().double().mean()):.2%}")
        return _State(
            x,
            y,
            clean,
            x.clone(),
            standing,
            network.forwards,
            network.backwards,
            self.threat,
            self.seed,
            attacks,
            {},
            network.specification,
        )

    def _batch(
        self,
        part: Stage,
        network: Network,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        clean: Tensor,
        ball: tuple[float, float],
    ) -> tuple[Tensor, Tensor, int]:
        """One stage on samples that still stand: which fell, bool, their points, and how many
        had no gradient.
        """
        sub = network.part(rows)
        device = network.device or x.device
        norm = self.threat.norm
        domain = self.threat.domain
        graph = part.engine is fab_engine
        tracker = Tracker(
            sub,
            x[rows].to(device),
            y[rows].to(device),
            norm,
            domain,
            None,
            ball=ball,
            graph=graph,
            clean=clean[rows].to(device),
        )
        part.engine(tracker, lambda share: None, seed=self.seed, **part.options)
        network.forwards[rows] += sub.forwards.to(rows.device)
        network.backwards[rows] += sub.backwards.to(rows.device)
        fell = ~tracker.unflipped(torch.arange(len(rows), device=device))
        points = pull_inside(
            tracker.points,
            tracker.x,
            norm,
            torch.where(fell.cpu(), ball[0], math.inf),
            tracker.domain,
        )
        return fell.to(x.device), points.to(x.device), int(tracker.flat.sum())

    def warn(self, samples: int) -> None:
        """Say where the figure may not be trusted."""
        flat = max((int(row["zero gradients"]) for row in self.table.values()), default=0)
        if flat:
            warnings.warn(
                f"the gradient is exactly zero at {flat} of {samples} samples: gradient attacks "
                "cannot move there, so the "
                "accuracy may be overstated; attack a differentiable version of the model.",
                ModelWarning,
                stacklevel=3,
            )
        last = 1.0
        fallen = 0.0
        for number, (key, row) in enumerate(self.table.items()):
            fallen = (
                max(fallen, last - row["accuracy"]) if key.endswith("square") and number else fallen
            )
            last = row["accuracy"]
        if fallen > SUSPICIOUS:
            warnings.warn(
                f"Square, which uses no gradients, lowered the accuracy by {fallen:.2%} after "
                "the gradient attacks: the "
                "gradients of this model mislead; run ws.nearest, more queries, or an attack "
                "made for the model.",
                ModelWarning,
                stacklevel=3,
            )


def _as_stage(attack: str | Stage) -> Stage:
    return attack if isinstance(attack, Stage) else stage(attack)


class AutoAttack:
    """For scripts written for the authors' class: the same names, with this library's `autoattack`
    behind them.

        adversary = AutoAttack(model, norm="Linf", eps=8 / 255)
        x_adv = adversary.run_standard_evaluation(x_test, y_test, bs=250)

    `attacks_to_run` with `version="custom"`, and the settings `apgd.n_restarts`, `apgd.n_iter`,
    `apgd.eot_iter`, `apgd.use_largereps`, `apgd_targeted.n_target_classes`, `fab.n_restarts`,
    `fab.n_target_classes`, `square.n_queries` and the like work as they did. What differs: the seed
    is 0 unless given (the authors take the clock), so that a figure can be repeated; `device` is
    where the model already is; probabilities instead of logits are an error; a restored state
    brings its adversarial points back. `result` holds the `Distribution` of the last evaluation.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        norm: "Linf" (the default), "L2" or "L1".
        eps: radius of the balls in units of x; default 0.3.
        seed: int of the random draws; default None, 0.
        verbose: bool, print a line after each stage; default True.
        attacks_to_run: names of attacks for version="custom"; default none.
        version: "standard" (the default), "plus", "rand" or "custom".
        is_tf_model: bool, must be False: PyTorch models only.
        device: accepted and not needed.
        log_path: path of a file that the lines are written to as well; default None.
    """

    def __init__(
        self,
        model: Model,
        norm: str = "Linf",
        eps: Number = 0.3,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: Sequence[str] = (),
        version: str = "standard",
        is_tf_model: bool = False,
        device: Any = None,
        log_path: str | PathLike[str] | None = None,
    ) -> None:
        """Arguments as in the authors' class; `device` is accepted and not needed."""
        if is_tf_model:
            raise InputError("is_tf_model=True: wassail attacks PyTorch models only.")
        names = {"Linf": math.inf, "L2": 2.0, "L1": 1.0}
        if norm not in names:
            raise unknown("norm", norm, tuple(names))
        if version != "custom" and version not in VERSIONS:
            raise unknown("version", version, (*VERSIONS, "custom"))
        if version != "custom" and attacks_to_run:
            raise InputError(
                'attacks_to_run is only used with version="custom": add that, or leave '
                "attacks_to_run out."
            )
        self.model = model
        self.norm = norm
        self.epsilon = eps
        self.seed = seed
        self.verbose = verbose
        self.version = version
        self.log_path = log_path
        self.device = device
        self.threat = Threat(names[norm], math.inf, parse_eps(eps))
        self.attacks_to_run: list[str] = list(attacks_to_run)
        self.apgd = SimpleNamespace(n_restarts=5, n_iter=100, eot_iter=1, use_largereps=False)
        self.apgd_targeted = SimpleNamespace(
            n_restarts=1, n_iter=100, eot_iter=1, use_largereps=False, n_target_classes=9
        )
        self.fab = SimpleNamespace(n_restarts=5, n_iter=100, n_target_classes=9)
        self.square = SimpleNamespace(n_queries=5000, n_restarts=1, p_init=0.8)
        self.result: Distribution | None = None
        if version != "custom":
            self.set_version(version)

    def set_version(self, version: str = "standard") -> None:
        """Take the published settings of "standard", "plus" or "rand".

        Args:
            version: "standard" (the default), "plus" or "rand".
        """
        line = stages(version, self.threat.norm)
        self.version = version
        self.attacks_to_run = [part.name for part in line]
        self.apgd.eot_iter = self.apgd.n_restarts = 1
        for part in line:
            settings = self._settings(part.name)
            for theirs, ours in _NAMES.items():
                if ours in part.options and hasattr(settings, theirs):
                    setattr(settings, theirs, part.options[ours])

    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int = 250,
        return_labels: bool = False,
        state_path: str | PathLike[str] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The attacks in turn: points `(N, *shape)`, the sample itself where none was found, and
        their classes if asked.

        Args:
            x_orig: samples, float tensor `(N, *shape)`, inside the domain.
            y_orig: true labels, integer tensor `(N,)`.
            bs: int, most samples in one call of the model; default 250.
            return_labels: bool, return the predicted classes too; default False.
            state_path: path of a file that is kept after every stage, and gone on with; default
                None.
        """
        log = self._log
        log(f"using {self.version} version including {', '.join(self.attacks_to_run)}.")
        self.result = result = self._evaluate(
            x_orig, y_orig, self.attacks_to_run, bs, state_path, log
        )
        fooled = (result.predicted != result.y) & (result.clean_predicted == result.y)
        points = result.x.clone()
        points[fooled] = result.points[fooled]
        log(f"robust accuracy: {result.accuracy:.2%}")
        labels = torch.where(fooled, result.predicted, result.clean_predicted)
        return (points, labels) if return_labels else points

    def run_standard_evaluation_individual(
        self, x_orig: Tensor, y_orig: Tensor, bs: int = 250, return_labels: bool = False
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Every attack alone on all samples: its name -> what `run_standard_evaluation` returns.

        Args:
            x_orig: samples, float tensor `(N, *shape)`, inside the domain.
            y_orig: true labels, integer tensor `(N,)`.
            bs: int, most samples in one call of the model; default 250.
            return_labels: bool, return the predicted classes too; default False.
        """
        wanted = list(self.attacks_to_run)
        found = {}
        try:
            for name in wanted:
                self.attacks_to_run = [name]
                found[name] = self.run_standard_evaluation(x_orig, y_orig, bs, return_labels)
        finally:
            self.attacks_to_run = wanted
        return found

    def clean_accuracy(self, x_orig: Tensor, y_orig: Tensor, bs: int = 250) -> float:
        """Accuracy at the points given, in one forward pass.

        Args:
            x_orig: samples, float tensor `(N, *shape)`, inside the domain.
            y_orig: true labels, integer tensor `(N,)`.
            bs: int, most samples in one call of the model; default 250.
        """
        x, y = check_data(x_orig, y_orig, None, self.model)
        found = search(lambda net, x, y, tick: (x, net.logits(x, net.rows)), self.model, x, y, bs)
        return float((found.clean == y).cpu().double().mean())

    def _evaluate(
        self,
        x: Tensor,
        y: Tensor,
        names: Sequence[str],
        bs: int,
        state: str | PathLike[str] | None,
        log: Log,
    ) -> Distribution:
        chosen = []
        for name in names:
            blank = stage(name)
            settings = vars(self._settings(name))
            options = {
                ours: settings[theirs] for theirs, ours in _NAMES.items() if theirs in settings
            }
            if name != "apgd-t":
                options.pop("targets", None)
            if name == "fab-t":
                options |= {"targets": self.fab.n_target_classes, "restarts": 1}
            chosen.append(Stage(name, blank.engine, {**blank.options, **options}))
        return autoattack(
            self.model,
            x,
            y,
            self.threat,
            attacks=chosen,
            state=state,
            seed=self.seed or 0,
            batch_size=bs,
            log=log,
        )

    def _settings(self, name: str) -> SimpleNamespace:
        if name == "apgd-t":
            return self.apgd_targeted
        return {"apgd": self.apgd, "fab": self.fab}.get(name.split("-")[0], self.square)

    def _log(self, line: str) -> None:
        if self.verbose:
            print(line)
        if self.log_path is not None:
            with Path(self.log_path).open("a") as file:
                file.write(line + "\n")


# The authors' settings -> our engines' options.
_NAMES = {
    "n_restarts": "restarts",
    "n_iter": "steps",
    "eot_iter": "eot",
    "use_largereps": "large",
    "n_target_classes": "targets",
    "n_queries": "queries",
    "p_init": "share",
}
