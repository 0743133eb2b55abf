"""How an engine that looks for the nearest flip is run over the data.

An engine is a function `engine(tracker, tick, **options)` that proposes points. It knows no radius,
so what it finds serves every order and every eps: `allocate` buys the nearest flips first, and at
order inf it takes those within eps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wassail.attacks.convergence import far_from_rest, first_flips, quarter, shrinkage
from wassail.attacks.minimal.tracker import Tracker
from wassail.checks import check_task
from wassail.errors import InputError, ModelWarning
from wassail.network import Model, Network, Search, search
from wassail.progress import Progress, Tick
from wassail.specification import Labels, Specification, labels_of
from wassail.threat import Domain, Number, check_seed, parse_domain, parse_norm, whole
from wassail.transport.flips import Flips

Engine: TypeAlias = Callable[..., None]


WARNED_FROM = 100  # passes from which on distances that still fall are worth a warning
# options of engines that count something
COUNTS = {"steps", "restarts", "targets", "eot", "queries", "topk", "rounds"}


def run_engine(
    engine: Engine,
    name: str,
    model: Model,
    x: Tensor,
    y: Labels,
    begin: Callable[[Network, Tensor, Tensor], Tracker],
    options: Mapping[str, Any],
    batch_size: int | None,
    progress: Progress,
    finish: Callable[[Tracker], Tensor] = lambda tracker: tracker.points,
    free: bool = False,
) -> Search:
    """Run an engine over the data: the one way in which an engine becomes an attack.

    `find_flips` makes flips of what it returns, and `pointwise` keeps every point inside its ball.

    Args:
        engine: proposes points, `engine(tracker, tick, **options)`.
        name: of the attack, for the progress bar.
        model: batch `(n, *shape)` -> logits `(n, K)`.
        x: checked samples `(N, *shape)`.
        y: their labels `(N,)`.
        begin: the tracker of one chunk of the samples.
        options: keyword arguments of the engine.
        batch_size: most samples in one call of the model.
        progress: whether to show a bar.
        finish: the points of a finished tracker, `(n, *shape)`; by default its nearest flips.
        free: whether a flip that the verification takes back may go on beyond the boundary.
    """
    for count in COUNTS & options.keys():
        if options[count] is not None and not isinstance(options[count], int):
            whole(options[count], count)

    states: list[Tracker] = []

    def chunk(network: Network, x: Tensor, y: Tensor, tick: Tick) -> tuple[Tensor, Tensor]:
        states[:] = [begin(network, x, y)]
        engine(states[0], tick, **options)
        return finish(states[0]), states[0].clean

    def further(share: float) -> tuple[Tensor, Tensor]:
        return states[0].further(share)

    return search(chunk, model, x, y, batch_size, progress, name, further=further if free else None)


def find_flips(  # noqa: PLR0913
    engine: Engine,
    name: str,
    model: Model,
    x: Tensor,
    y: Labels,
    norm: Number,
    domain: Domain = (0.0, 1.0),
    *,
    passes: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
    options: Mapping[str, Any] | None = None,
    known: Flips | None = None,
    target: Tensor | None = None,
    warn: bool = False,
) -> Flips:
    """Run an engine over the data and return its verified flips.

    passes: most forward plus backward passes a sample; known: flips of the same samples to begin
    with; target: classes `(N,)` that a flip must reach; warn: whether to say that the distances
    still fall fast, for an engine whose schedule does not depend on the passes.
    """
    norm = parse_norm(norm)
    domain = parse_domain(domain, own=True)
    check_seed(seed)
    if passes is not None:  # at least 1, the pass at the sample itself
        passes = whole(passes, "passes")
    x, y = check_task(x, y, domain, model)
    target = check_target(target, y)
    options = dict(options or {})
    first: list[int] = []
    early: list[Tensor] = []
    enough = known is None and passes is not None and passes >= WARNED_FROM
    few = quarter(passes or 0) if warn and enough else 0

    def begin(network: Network, x: Tensor, y: Tensor) -> Tracker:
        return Tracker(network, x, y, norm, domain, passes, known, target=target, quarter=few)

    def finish(state: Tracker) -> Tensor:
        first.append(state.first)
        if few:
            early.append(state.early.cpu())
        return state.points

    found = run_engine(
        engine, name, model, x, y, begin, options, batch_size, progress, finish, free=True
    )
    if passes is not None and known is None:
        _warn_if_idle(found, labels_of(y, x.device), name, passes, first)
    info = {"method": name, "options": options, "passes": passes, "seed": seed}
    info["targeted"] = target is not None
    flips = Flips.from_search(x, y, found, norm, domain, name, info)
    if passes is not None and early:
        _warn_if_falling(torch.cat(early).to(flips.distances), flips.distances, few, passes)
    return flips


def check_target(target: Tensor | None, y: Labels) -> Tensor | None:
    """The classes to be reached, `(N,)`, or one sentence that says what is wrong with them."""
    if target is None:
        return None
    if isinstance(y, Specification):
        raise InputError(
            "a target is a class, and a specification has none: give a specification with the one "
            "row that is to fail."
        )
    target = torch.as_tensor(target, device=y.device)
    if target.shape != y.shape or target.dtype.is_floating_point:
        raise InputError(
            f"the targets are {tuple(target.shape)}: give one class index for each of the "
            f"{len(y)} samples."
        )
    if (target == y).any():
        bad = int((target == y).nonzero()[0])
        raise InputError(
            f"the target of sample {bad} is its own label: a targeted attack needs another class."
        )
    return target.long()


def _warn_if_idle(found: Search, y: Tensor, name: str, passes: int, first: list[int]) -> None:
    """Warn about samples that were never searched, because their passes did not pay for the
    first step.
    """
    right = (found.clean == y).cpu()
    idle = right & (found.forwards + found.backwards <= 1).cpu()
    if not idle.any():
        return
    need = 1 + max([*first, 2])  # a gradient, and a look at where it leads
    fewer = " or try fewer rivals (topk)" if need > 3 else ""
    warnings.warn(
        f"{int(idle.sum())} of {int(right.sum())} samples were not searched: passes is {passes}, "
        "and the first step of "
        f"{name!r} takes {need}; give at least {need} passes{fewer}.",
        ModelWarning,
        stacklevel=4,
    )


def _warn_if_falling(early: Tensor, late: Tensor, few: int, passes: int) -> None:
    """Warn about distances that fell so much after a quarter of the passes that more will help."""
    if not far_from_rest(early, late):
        return
    gain = shrinkage(early, late)
    new = first_flips(early, late)
    said = [f"the mean distance fell by {100 * gain:.0f} %"] if gain > 0 else []
    said += [f"{new} of {int((late > 0).sum())} samples got their first flip"] if new else []
    warnings.warn(
        f"{' and '.join(said)} from {few} to {passes} passes: the search is far from its "
        f"end, so give it more, for example passes={4 * passes}.",
        ModelWarning,
        stacklevel=6,
    )
