"""Signs that a figure cannot be trusted: checks before the attacks, and indicators of attack
failure after them.

An attack that fails makes a model look robust. Most failures leave traces (Pintor et al. 2022,
"Indicators of Attack Failure"; Carlini et al. 2019, "On Evaluating Adversarial Robustness"):
gradients that vanish, distances that passes do not shorten, flips that a search without gradients
finds and one with gradients does not. Each function here looks for one kind of trace and says in a
sentence what it saw and what to do; none of them changes a figure, but the flips of `transfer` are
flips like any other.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from wassail.attacks.convergence import AT_REST, FAR_FROM_REST, quarter, shrinkage
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.nearest import nearest
from wassail.checks import check_task
from wassail.errors import InputError, ModelWarning
from wassail.evaluation.criterion import Criterion, Regression
from wassail.evaluation.result import Finding
from wassail.losses import margin_ascent, predict
from wassail.network import BATCH_SIZE, Model, Network, device_of, frozen, search
from wassail.progress import Tick
from wassail.specification import Labels, Specification, labels_at, labels_of, specification_of
from wassail.threat import Domain, Number, ceil_percent, parse_domain, parse_norm, show
from wassail.transport.flips import Flips

if TYPE_CHECKING:
    from wassail.evaluation.plan import Unit
    from wassail.evaluation.run import Evaluation

LOOKED_AT = 100  # samples that a check spends passes on
# a trace on at most one sample, or on less than this share of them, is noted; more is a warning
FEW = 0.01
POOL = 1000  # samples among which `transfer` looks for one of another class
BISECTIONS = 12
# a logit this far below another has probability 0 in float32, and cross entropy no gradient
SATURATED = 100.0
BEHIND = 1e-9  # shares that differ by less are equal


def mode(model: Model) -> Finding:
    """Whether the model was given in eval mode. Ask before anything puts it there."""
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        text = (
            "The model was given in train mode: it is evaluated in eval mode, so call "
            "model.eval() to compare by hand."
        )
        return Finding("mode", "note", text)
    return Finding("mode", "ok", "The model is in eval mode.")


def check(
    model: Model,
    x: Tensor,
    y: Labels,
    domain: Domain,
    batch_size: int | None = None,
    criterion: Criterion | None = None,
) -> list[Finding]:
    """What the first samples tell before any attack: range, labels, determinism, precision,
    accuracy, saturation, gradients.

    x `(N, *shape)`, y `(N,)`: samples of the data, of which the first 100 are looked at. About four
    forwards and one backward each. criterion: that y is the specification of, None for classes.
    """
    domain = parse_domain(domain)
    x, y = check_task(x[:LOOKED_AT], labels_at(y, slice(LOOKED_AT)), domain)
    if not len(x):
        return []
    device = device_of(model, x.device)
    x = x.to(device)
    goal, right = specification_of(y), labels_of(y, device)
    goal = None if goal is None else goal.to(device)
    with frozen(model):
        ids = torch.arange(len(x))
        network = Network(model, ids, batch_size or BATCH_SIZE, device, specification=goal)
        z = network.logits(x, network.rows)
        of_classes = (_labels(right, z.shape[1]), _saturation(z)) if criterion is None else ()
        return [
            _range(x, domain),
            *of_classes[:1],
            _determinism(network, x, z),
            _precision(model, x),
            _accuracy(z, right) if criterion is None else _kept(z, right, criterion),
            *of_classes[1:],
            _gradients(network, x, right, z),
        ]


def _kept(z: Tensor, y: Tensor, criterion: Criterion) -> Finding:
    """How many samples are right before anything moves, where there are no classes."""
    right = int((predict(z, y) == y).sum())
    text = f"{right} of the first {len(z)} samples are {criterion.words.kept}"
    if 2 * right > len(z):
        return Finding("accuracy", "ok", f"{text}.")
    level = "note" if right else "warning"
    advice = "check the units of the targets, the normalisation of the samples and the "
    asked = "tolerance" if isinstance(criterion, Regression) else "threshold"
    return Finding("accuracy", level, f"{text}: {advice}{asked}.")


def _range(x: Tensor, domain: Domain) -> Finding:
    low = float(x.min())
    high = float(x.max())
    seen = f"The samples range over [{low:.4g}, {high:.4g}]"
    flat = int((x.flatten(1).amax(1) == x.flatten(1).amin(1)).sum())
    if flat:
        text = (
            f"{flat} of the first {len(x)} samples are constant, the same value in every "
            "coordinate: check how they are read."
        )
        return Finding("range", "warning", text)
    if domain is None:
        return Finding("range", "ok", f"{seen} and may move anywhere: there is no box.")
    size = domain[1] - domain[0]
    box = f"[{domain[0]:g}, {domain[1]:g}]"
    if high - low < 0.5 * size:
        why = (
            "were they divided by 255 twice?"
            if high <= 2 * size / 255
            else "check their preprocessing and the domain."
        )
        return Finding("range", "warning", f"{seen}, less than half of the domain {box}: {why}")
    unit = 255 * (x - domain[0]) / size
    eight = ", in steps of 1/255" if bool(((unit - unit.round()).abs() < 1e-3).all()) else ""
    return Finding("range", "ok", f"{seen}{eight}; the domain is {box}.")


def _labels(y: Tensor, classes: int) -> Finding:
    present = torch.bincount(y, minlength=classes) > 0
    if len(y) >= 20 and int(present.sum()) == 1:
        text = (
            f"The first {len(y)} samples all have class {int(y[0])}: the data are sorted, so a "
            "part of them from the front says nothing about the other classes."
        )
        return Finding("labels", "note", text)
    missing = (~present).nonzero()[:, 0].tolist()
    if missing and len(y) >= 10 * classes:
        names = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        text = (
            f"{len(missing)} of {classes} classes never occur among the first {len(y)} labels "
            f"({names}): is that the data?"
        )
        return Finding("labels", "note", text)
    text = f"The first {len(y)} samples have {int(present.sum())} of {classes} classes."
    return Finding("labels", "ok", text)


def _determinism(network: Network, x: Tensor, z: Tensor) -> Finding:
    """The same batch again, and the same samples in batches of another size."""
    again = network.logits(x, network.rows)
    half = (len(x) + 1) // 2
    rows = network.rows
    split = torch.cat(
        [
            network.logits(x[part], rows[part])
            for part in (slice(half), slice(half, len(x)))
            if len(x[part])
        ]
    )
    scale = z.abs().amax(1)
    for other, what in ((again, "is asked twice"), (split, "is given other samples beside them")):
        moved = int(((other - z).abs().amax(1) > 1e-4 * scale).sum())
        if moved:
            text = (
                f"The logits of {moved} of {len(x)} samples change if the model {what}: a flip may "
                "be a lucky draw, so fix its randomness or its batch statistics."
            )
            return Finding("determinism", "warning", text)
    text = "The logits do not change if the model is asked twice, or in other batches."
    return Finding("determinism", "ok", text)


def _precision(model: Model, x: Tensor) -> Finding:
    with torch.no_grad():
        dtype = str(model(x[:1]).dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64"):
        text = (
            f"The logits are {dtype}: ties and rounding decide samples, so load the model in "
            "float32 and use mixed gradients."
        )
        return Finding("precision", "warning", text)
    return Finding("precision", "ok", f"The logits are {dtype}.")


def _accuracy(z: Tensor, y: Tensor) -> Finding:
    n, classes = z.shape
    predicted = predict(z, y)
    right = int((predicted == y).sum())
    chance = 1 / classes
    text = f"{right} of the first {n} samples are classified correctly"
    if right > n * (chance + 3 * math.sqrt(chance * (1 - chance) / n)):
        return Finding("accuracy", "ok", f"{text}.")
    shift = next(
        (s for s in (1, -1) if n >= 10 and ((z.argmax(1) - y) == s).float().mean() > 0.5), 0
    )
    cause = (
        f"the predictions are the labels {shift:+d}, so the labels are numbered from another "
        "class on"
        if shift
        else "the usual cause is a normalisation that the model expects and does not get "
        "(--mean, --std), then labels in "
        "another order or from other data"
    )
    return Finding(
        "accuracy", "warning", f"{text}, no more than by chance ({100 * chance:.2g} %): {cause}."
    )


def _saturation(z: Tensor) -> Finding:
    top = z.topk(2, dim=1).values
    gap = top[:, 0] - top[:, 1]
    sure = int((gap > SATURATED).sum())
    if sure:
        text = (
            f"The logits of {sure} of {len(z)} samples lie more than {SATURATED:g} apart (up to "
            f"{float(gap.max()):.3g}): softmax rounds to 0 and 1, and other tools' attacks on the "
            "cross entropy lose their gradient; the attacks here do not."
        )
        return Finding("saturation", "note", text)
    text = f"The two largest logits of a sample are at most {float(gap.max()):.3g} apart."
    return Finding("saturation", "ok", text)


def _gradients(network: Network, x: Tensor, y: Tensor, z: Tensor) -> Finding:
    """Gradients of the margin at the samples that are correct."""
    rows = (predict(z, y) == y).nonzero()[:, 0]
    dead = 0
    broken = 0
    try:
        for some in torch.split(rows, network.batch_size):
            tape = network.tape(x[some], some)
            weight = margin_ascent(tape.logits, y[some])[1]
            gradient = tape.pull(weight, torch.arange(len(some), device=x.device)).flatten(1)
            finite = torch.isfinite(gradient).all(1)
            broken += int((~finite).sum())
            dead += int((finite & (gradient == 0).all(1)).sum())
    except InputError as error:
        return Finding(
            "zero-gradients", "warning", f"There are no gradients to attack with: {error}"
        )
    if dead or broken:
        kinds = [f"{dead} are zero"] * bool(dead) + [f"{broken} are not finite"] * bool(broken)
        text = (
            f"Of the margin's gradients at {len(rows)} correct samples {' and '.join(kinds)}: "
            "gradients are masked there (rounding, clamping, saturation), so take the masking "
            "layer out or trust attacks without gradients only (square)."
        )
        return Finding("zero-gradients", "warning", text)
    return Finding(
        "zero-gradients", "ok", f"The margin has a gradient at each of {len(rows)} correct samples."
    )


def transfer(
    model: Model,
    x: Tensor,
    y: Labels,
    norm: Number,
    domain: Domain = (0.0, 1.0),
    batch_size: int | None = None,
    *,
    among: tuple[Tensor, Tensor] | None = None,
) -> Flips:
    """Flips that need no gradient: from each sample toward the nearest one that the model puts into
    another class.

    That sample is a flip already; the way to it is bisected, 12 forwards, along points that are as
    near as the norm allows (`Tracker.shorten`). x `(N, *shape)`, y `(N,)`. among: the samples to go
    to, `(M, *shape)`, with their logits `(M, K)`, by default the first 1000 of x. The flips are as
    good as anyone's and belong into the pool.
    """
    norm = parse_norm(norm)
    domain = parse_domain(domain)
    x, y = check_task(x, y, domain)

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        tracker = Tracker(network, x, y, norm, domain, None, graph=False)
        rows = tracker.rows
        goal = network.specification
        if among is None:
            there = x[:POOL]
            z = tracker.clean[:POOL] if goal is None else network.outputs(there, rows[:POOL])
        else:
            there, z = (part.to(x.device) for part in among)
        for some in torch.split(rows, network.batch_size) if len(there) else ():
            own = None if goal is None else goal.take(some)
            same = z.argmax(1)[None] == y[some][:, None] if own is None else _holds(own, z)
            near, known = _nearest_other(x[some], there.to(x.dtype), z, same, norm)
            found = z[near[known]]
            found = found if own is None else own.take(known).logits(found)
            tracker.offer(there[near[known]].to(x.dtype), some[known], found)
        tracker.shorten(rows, BISECTIONS)
        return tracker.points, tracker.clean

    found = search(chunk, model, x, y, batch_size, whole=True, description="transfer")
    return Flips.from_search(x, y, found, norm, domain, "transfer", {"method": "transfer"})


def _holds(goal: Specification, z: Tensor) -> Tensor:
    """Whether the specification of each of m samples holds at each of the outputs `(M, K)`: bool
    `(m, M)`.
    """
    each = [goal.margins(row.expand(len(goal.constants), -1)).amin(1) > 0 for row in z]
    return torch.stack(each, 1)


def _nearest_other(
    x: Tensor, there: Tensor, z: Tensor, same: Tensor, norm: float
) -> tuple[Tensor, Tensor]:
    """For each of the samples x `(m,)` the nearest of `there` that is not the same, bool `(m, M)`,
    and whether there is one.
    """
    length = torch.cdist(x.flatten(1), there.flatten(1), p=norm)
    length = length.masked_fill(same | ~torch.isfinite(z).all(1)[None], math.inf)
    best = length.min(1)
    return best.indices, torch.isfinite(best.values)


def converged(
    model: Model,
    x: Tensor,
    y: Labels,
    norm: Number,
    domain: Domain = (0.0, 1.0),
    passes: int = 100,
    seed: int = 0,
    batch_size: int | None = None,
    late: Tensor | None = None,
) -> Finding:
    """Whether `nearest` has come to rest: its distances on the first 100 samples after all passes,
    and after a quarter of them.

    late: the distances after all passes `(N,)`, where they are known already.

    Distances that still shrink by more than 2 % ask for more passes, by more than 10 % it is a
    warning: networks whose gradients lie were seen to give that and no other sign. Samples without
    any flip that more passes do not help say that gradients mislead.
    """
    x = x[:LOOKED_AT]
    y = labels_at(y, slice(LOOKED_AT))
    few = quarter(passes)

    def search(budget: int) -> Tensor:
        return nearest(
            model, x, y, norm, domain, passes=budget, seed=seed, batch_size=batch_size, warn=False
        ).distances

    with warnings.catch_warnings():
        # A quarter of the passes may be none at all, and is our own choice.
        warnings.simplefilter("ignore", ModelWarning)
        early = search(few)
    late = search(passes) if late is None else late[:LOOKED_AT]
    attacked = late > 0
    both = attacked & torch.isfinite(early)
    none_early, none = (
        int((attacked & torch.isinf(distances)).sum()) for distances in (early, late)
    )
    if none:
        text = (
            f"{none} of {int(attacked.sum())} samples have no flip at any distance after "
            f"{passes} passes"
        )
        text += f", {none_early} after {few}"
        if none == none_early and specification_of(y) is not None:
            return Finding("convergence", "note", f"{text}: there may be none in the box.")
        if none == none_early:
            advice = (
                "gradients mislead there, so look for masked ones and add an attack without "
                "them (square)"
            )
            return Finding("convergence", "warning", f"{text}: {advice}.")
        return Finding("convergence", "note", f"{text}: raise --passes.")
    if not attacked.any():
        return Finding("convergence", "ok", "No sample had to be attacked.")
    if not both.any():
        text = f"No sample has a flip after {few} passes, all have one after {passes}"
        return Finding("convergence", "warning", f"{text}: raise --passes.")
    return _shrinking(shrinkage(early, late), few, passes)


def _shrinking(gain: float, few: int, passes: int) -> Finding:
    """What a mean distance says that is smaller by this share after all passes than after few."""
    text = f"The mean distance shrinks by {100 * gain:.1f} % from {few} to {passes} passes"
    if gain > FAR_FROM_REST:
        advice = (
            f"the search is far from its end, so give it --passes {4 * passes} or auto and add an "
            "attack without gradients (square)"
        )
        return Finding("convergence", "warning", f"{text}: {advice}.")
    if gain > AT_REST:
        more = "more (--passes auto) may find nearer flips"
        return Finding("convergence", "note", f"{text}: {more}.")
    return Finding("convergence", "ok", f"{text}.")


def indicators(
    run: Evaluation, units: Sequence[Unit], known: Mapping[str, Tensor], found: Tensor | None = None
) -> Iterator[Finding]:
    """What the attacks of a finished evaluation say about each other.

    units: the attacks; known: by the key of each the distances of its flips, `(N,)`, inf where it
    has none; found: distances of flips that needed no gradient, from `transfer`, or None.
    """
    right = run.predicted == run.y
    if not bool(right.any()) or not units:
        return
    kept = {unit.key: known[unit.key][right] for unit in units}
    yield from _unbounded(units, kept, run.criterion is None)
    yield from _behind(run)
    yield from _beaten(run, units, kept)
    yield from _black_box(units, kept)
    if found is not None:
        yield from _transfer(units, kept, found[right])


def _unbounded(units: Sequence[Unit], known: Mapping[str, Tensor], must: bool) -> Iterator[Finding]:
    """A search for the nearest flip may go anywhere: it must arrive somewhere.

    must: whether every sample has a flip somewhere, as a classifier that knows several classes has.
    """
    free = [unit for unit in units if unit.every]
    if not free:
        return
    best = torch.stack([known[unit.key] for unit in free]).amin(0)
    none = int(torch.isinf(best).sum())
    n = len(best)
    who = _names(free)
    if none and not must:
        text = f"{who} found no flip of {none} of {n} correct samples at any distance"
        yield Finding("unbounded-failure", "note", f"{text}: there may be none in the box.")
    elif none:
        text = (
            f"{who} found no flip of {none} of {n} correct samples at any distance, though there "
            f"must be one: {_advice(units)}, and if that does not help look for masked gradients."
        )
        yield Finding("unbounded-failure", _level(none, n), text)
    else:
        text = f"{who} flipped every one of {n} correct samples at some distance."
        yield Finding("unbounded-failure", "ok", text)


def _behind(run: Evaluation) -> Iterator[Finding]:
    """`nearest` must not be above any other attack over the threat of the headline."""
    rows = [row for row in run.rows if row.threat == run.threats[0]]
    ours = [row.accuracy for row in rows if row.attack == "nearest"]
    if not ours or len(rows) == len(ours):
        return
    best = min(rows, key=lambda row: row.accuracy)
    told = run.told(best.threat)
    if best.accuracy >= ours[0] - BEHIND:
        yield Finding("behind", "ok", f"No attack is below nearest over the headline's {told}.")
        return
    text = (
        f"{best.title} leaves {ceil_percent(best.accuracy)} % over the headline's {told} "
        f"and nearest {ceil_percent(ours[0])} %: the search for the nearest flip is not at its "
        "end or is misled, so give it more passes (--passes auto) and look for masked gradients; "
        "the headline is that of all attacks together"
    )
    yield Finding("behind", "warning", f"{text}.")


def _beaten(
    run: Evaluation, units: Sequence[Unit], known: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Samples that an attack leaves standing at eps, and another one flips within it."""
    eps_asked = sorted({threat.eps for threat in run.threats if threat.order == math.inf})
    best = torch.stack(list(known.values())).amin(0)
    missed: dict[str, tuple[int, float]] = {}
    for unit in units:
        if unit.attack == "square" or (not unit.every and unit.threat.order != math.inf):
            # Square is too weak for this test, and an attack that shares a budget need not flip
            # everything within eps.
            continue
        for eps in eps_asked if unit.every else [unit.threat.eps]:
            count = int(((known[unit.key] > eps) & (best <= eps)).sum())
            if count > missed.get(unit.entry.title, (0, eps))[0]:
                missed[unit.entry.title] = count, eps
    if missed:
        parts = ", ".join(
            f"{title} {count} at {show(eps)}" for title, (count, eps) in missed.items()
        )
        text = (
            f"Of {len(best)} correct samples some stand against one attack and fall to another "
            f"within eps ({parts}): report the pooled figure."
        )
        yield Finding("beaten", "note", text)


def _black_box(units: Sequence[Unit], known: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Square needs no gradient: what only it can flip has gradients that mislead."""
    for unit in units:
        others = [known[other.key] for other in units if other.attack != "square"]
        if unit.attack != "square" or not others:
            continue
        eps = unit.threat.eps
        count = int(((known[unit.key] <= eps) & (torch.stack(others).amin(0) > eps)).sum())
        n = len(known[unit.key])
        if count:
            text = (
                f"Square, which needs no gradient, flips {count} of {n} correct samples within "
                f"{show(eps)} that no attack with "
                "gradients does: gradients mislead there, so look for masked ones."
            )
            yield Finding("black-box", _level(count, n), text)
        else:
            text = f"Square flips no sample within {show(eps)} that attacks with gradients miss."
            yield Finding("black-box", "ok", text)


def _transfer(
    units: Sequence[Unit], known: Mapping[str, Tensor], found: Tensor
) -> Iterator[Finding]:
    """Steps straight toward another sample are the weakest search there is: they should beat
    no attack.
    """
    beaten = torch.zeros_like(found, dtype=torch.bool)
    free = [known[unit.key] for unit in units if unit.every]
    if free:
        beaten |= found < (1 - 1e-3) * torch.stack(free).amin(0)
    for eps in {
        unit.threat.eps for unit in units if not unit.every and unit.threat.order == math.inf
    }:
        best = torch.stack(
            [known[unit.key] for unit in units if unit.every or unit.threat.eps <= eps]
        ).amin(0)
        beaten |= (found <= eps) & (best > eps)
    count = int(beaten.sum())
    n = len(found)
    if count:
        text = (
            "A bisection toward the nearest sample of another class, which needs no gradient, is "
            f"nearer than every attack for {count} of {n} correct samples: {_advice(units)}, and "
            "if that does not help look for masked gradients; these flips are in the pool."
        )
        yield Finding("transfer", _level(count, n), text)
    else:
        text = (
            f"The attacks are nearer than a bisection toward another sample for each of {n} "
            "correct samples."
        )
        yield Finding("transfer", "ok", text)


def _advice(units: Sequence[Unit]) -> str:
    return (
        "raise --passes"
        if any(unit.attack == "nearest" for unit in units)
        else "add the attack nearest"
    )


def _level(count: int, n: int) -> str:
    return "warning" if count > 1 and count > FEW * n else "note"


def _names(units: Sequence[Unit]) -> str:
    titles = list(dict.fromkeys(unit.entry.title for unit in units))
    return titles[0] if len(titles) == 1 else ", ".join(titles[:-1]) + " and " + titles[-1]
