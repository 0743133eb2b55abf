"""One door to every engine that looks for the nearest flip, and the search steered by the
allocation.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from wassail import names
from wassail.attacks.minimal.run import Engine, find_flips
from wassail.attacks.wda_pp import Walk
from wassail.checks import check_task
from wassail.errors import InputError, unknown
from wassail.network import Model
from wassail.progress import Progress
from wassail.records import check_equal
from wassail.specification import Labels
from wassail.threat import Domain, Number, parse_domain, parse_eps, parse_norm, parse_order
from wassail.transport.allocation import knapsack
from wassail.transport.flips import Flips

METHODS = tuple(names.NEAREST_METHODS)
OURS = "boundary-search"  # what "auto" is
Found = TypeVar("Found")
# The allocation has a say after so many passes: (passes, how far above the price a sample may be
# and still go on, next round at l1, l2 and linf). Early distances can be several times too long
# where gradients mislead, so the first cut is generous.
STAGES = ((100, 4.0, {1.0: 0, 2.0: 0, math.inf: 0}), (300, 1.5, {1.0: 2, 2.0: 2, math.inf: 3}))


def nearest(  # noqa: PLR0913
    model: Model,
    x: Tensor,
    y: Labels,
    norm: Number = "inf",
    domain: Domain = (0.0, 1.0),
    method: str = "auto",
    *,
    passes: int | None = None,
    eps: Number | None = None,
    order: Number | None = None,
    start: Flips | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress = False,
    warn: bool = True,
    **options: Any,
) -> Flips:
    """The nearest flip that an engine finds for each sample, re-verified.

    With both eps and order the allocation steers the search: after 100 passes and again after 300,
    only samples whose distance can still change the knapsack's answer are refined.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        norm: ground norm r, 1, 2 or inf; default "inf".
        domain: box `(low, high)` that x lives in, or None for all of R^n; default (0, 1).
        method: "auto" (the default) is "boundary-search", ours; "fab", "deepfool", "fmn", "ddn",
            "apgd", "pdpgd" and "cw" are from their papers ("ddn" and "cw": l2 only); "wda++" is
            the paper's Algorithm 2, which needs `step` or `eps`.
        passes: int, most forward plus backward passes of a sample, kept exactly; with "auto" more
            passes never give a larger distance; default None, the engine's own schedule.
        eps: budget of the distribution the flips are for; default None, no steering.
        order: Wasserstein order of that distribution; default None, no steering.
        start: `Flips` of the same samples, by whatever method (see `Flips.from_points`), that the
            search goes on from; no answer is farther, and their passes are added; default None.
        seed: int, keys the random draws together with each sample's content; default 0.
        batch_size: int, most samples in one call of the model; default None, 250.
        progress: bool, or a callable that is given the share done; default False, no bar.
        warn: bool, whether "auto" with 100 passes or more warns if the mean distance fell by more
            than 10 % after the first quarter of them, or so many samples got their first flip
            there; default True. A search with a start, or steered by eps and order, does not.
        **options: keyword arguments of the engine; for "auto": `topk`, the rivals tried at the
            sample, 10 by default (K - 1 makes linear classifiers of any K exact).

    Returns:
        `Flips`: distances, points and passes of each sample.
    """
    if isinstance(method, str) and method in names.GONE_ENGINES:
        raise InputError(f"method {method!r} is gone: {names.GONE_ENGINES[method]}.")
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if start is not None:
        _check_start(start, x, y, norm, domain, method)
    common: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "progress": progress}
    if method == "wda++":
        if passes is not None:
            raise InputError(
                "WDA++ has a schedule of its own: limit it with steps, topk and search instead "
                "of passes."
            )
        walk = _named(Walk.of, method)(norm, eps, **options)
        return walk.flips(model, x, y, domain, **common)
    name = OURS if method == "auto" else method
    steered = name == OURS and eps is not None and order is not None
    if name == OURS:
        options = {"rounds": 4 if passes is None else 1000, **options, "seed": seed}
    run = _Run(model, method, name, norm, options, common, warn and name == OURS and not steered)
    if steered and eps is not None and order is not None:
        return _steered(run, x, y, domain, passes, start, parse_eps(eps), parse_order(order))
    found = run(x, y, domain, passes, start)
    return found if start is None else start.merge(found)


@dataclass(frozen=True)
class _Run:
    """An engine with its options, to be run on some samples."""

    model: Model
    method: str
    name: str
    norm: Number
    options: Mapping[str, Any]
    common: Mapping[str, Any]
    warn: bool

    def __call__(
        self,
        x: Tensor,
        y: Labels,
        domain: Domain,
        passes: int | None,
        known: Flips | None = None,
        begin: int | None = None,
    ) -> Flips:
        """The flips of these samples; begin: the round to go on with."""
        options = self.options if begin is None else {**self.options, "begin": begin}
        return _named(find_flips, self.method)(
            engine(self.name),
            self.name,
            self.model,
            x,
            y,
            self.norm,
            domain,
            passes=passes,
            options=options,
            known=known,
            warn=self.warn,
            **self.common,
        )


def _steered(
    run: _Run,
    x: Tensor,
    y: Labels,
    domain: Domain,
    passes: int | None,
    start: Flips | None,
    eps: float,
    order: float,
) -> Flips:
    """The search in stages: after each of them only samples that matter to the allocation go on."""
    limit = math.inf if passes is None else passes
    # Many rivals at the sample take many passes: the allocation has its say after them.
    later = max(0, 2 * int(run.options.get("topk", 0)) - STAGES[0][0])
    norm = parse_norm(run.norm)
    stages = [(after + later, reach, begin[norm]) for after, reach, begin in STAGES]
    flips = run(x, y, domain, int(min(stages[0][0], limit)), start)
    flips = flips if start is None else start.merge(flips)
    for (after, reach, begin), end in zip(stages, (*(s for s, _, _ in stages[1:]), limit)):
        budget = min(end, limit) - after
        chosen = undecided(flips.distances, eps, order, reach)
        if budget < 1 or not chosen.any():
            break
        part = flips.take(chosen)
        left = None if budget == math.inf else int(budget)
        again = run(part.x, part.task, part.domain, left, part, begin)
        flips = flips.merge(flips.put(chosen, again))
    return flips


def _check_start(
    start: Flips, x: Tensor, y: Labels, norm: Number, domain: Domain, method: str
) -> None:
    """One sentence if the flips to start from are not flips of this problem."""
    if method == "wda++":
        raise InputError("WDA++ walks from the samples: it has no use for start.")
    check_equal("x", start.x, x)
    check_equal("y", start.task, check_task(x, y, None)[1])
    check_equal("norm", start.norm, parse_norm(norm))
    check_equal("domain", start.domain, parse_domain(domain, own=True))


def engine(name: str) -> Engine:
    """The engine of this name in `names.ENGINES`."""
    module, function = names.ENGINES[name].home.split(":")
    found: Engine = getattr(importlib.import_module(f"wassail.attacks.{module}"), function)
    return found


def undecided(distances: Tensor, eps: float, order: float, reach: float = 1.5) -> Tensor:
    """Which samples can still change the allocation's answer, bool `(N,)`.

    The dearest flip the budget buys has some price. A sample far above that price stays out, and
    one far below it is bought whatever happens, and saves next to nothing by coming nearer: both
    are left alone. `reach`: what far above means.
    """
    weights = knapsack(distances, eps, order)
    unknown_flip = torch.isinf(distances)
    bought = weights > 0
    if order < math.inf and (weights == 1)[~unknown_flip].all():
        # The budget buys every flip there is: only new ones can change the answer.
        return unknown_flip
    price = eps if order == math.inf else float(distances[bought].max())
    return unknown_flip | ((distances > 0.2 * price) & (distances < reach * price))


def _named(function: Callable[..., Found], method: str) -> Callable[..., Found]:
    """The function, with one sentence for an option that it does not have."""

    def call(*args: Any, **kwargs: Any) -> Found:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if "unexpected keyword argument" in str(error):
                word = str(error).rsplit("argument", 1)[1].strip()
                raise InputError(
                    f"method {method!r} has no option {word}; see help(wassail.nearest)."
                ) from None
            raise

    return call
