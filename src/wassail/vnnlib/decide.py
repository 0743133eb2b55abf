"""Whether a network has a property: attacked first, then bounded, then split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from wassail.certificates import clock
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.search.boxes import BoxSearch, box_balls
from wassail.certificates.search.margins import branched
from wassail.certificates.search.shallow import ShallowSearch, shallow_of
from wassail.errors import InputError
from wassail.network import versions
from wassail.threat import parse_seconds
from wassail.vnnlib.answer import Answer
from wassail.vnnlib.attack import SHARE, attack
from wassail.vnnlib.clauses import Part, UnsafeSet
from wassail.vnnlib.network import Judge, Network
from wassail.vnnlib.unsafe import Group

EFFORT = 60.0  # seconds of one core, counted in operations, without a limit
FEW = 20  # free inputs up to which boxes are split and nothing else
FIRST = 0.03  # of the effort: boxes, where there are more inputs
SHALLOW = 0.95  # of the effort, for networks of one layer, before all that
NEURONS = 0.9  # and then neurons; the rest is for boxes again
MOST = 10**9  # domains: the effort runs out first
WIDE = 1024  # domains of neurons split at once, at most
NARROW = 32  # at least
TOGETHER = 10**7  # operations of one pass of all of them
DOMAIN = 12  # passes that a domain of neurons costs
NODE = 10**4  # operations that a node costs beside its arithmetic
POSITIONS = 100  # times that a weight is used in a pass, where the structure is not known


def decide(
    property_: UnsafeSet,
    model: nn.Module | str | Path | Network,
    *,
    time_limit: float | None = None,
    effort: float | None = None,
    seed: int = 0,
) -> Answer:
    """The verdict on a property, as `Property.decide` describes it.

    model: module, ONNX file, or a network that was opened before and stays open; time_limit:
    seconds, or None; effort: seconds of one core, counted in operations, or None.
    """
    began = clock.now()
    limit = None if time_limit is None else parse_seconds(time_limit)
    if effort is None:
        work = math.inf if limit is not None else EFFORT * clock.SECOND
    else:
        work = parse_seconds(effort, "effort") * clock.SECOND
    own = not isinstance(model, Network)
    network = Network(model, property_.inputs) if not isinstance(model, Network) else model
    with closing(network) if own else nullcontext():
        network.check(property_)
        rest = None if limit is None else max(limit - (clock.now() - began), 1e-9)
        task = _Decision(property_, network, limit, work, seed)
        with clock.limited(rest, work):
            try:
                task.run()
            except clock.Late:
                task.late()
            except InputError as error:
                task.reason = str(error)  # a structure that bounds do not know
    return task.answer(clock.now() - began)


class _Decision:
    """One property of one network, and what is known so far."""

    def __init__(
        self, property_: UnsafeSet, network: Network, limit: float | None, work: float, seed: int
    ) -> None:
        self.property = property_
        self.seed = seed
        self.network = network
        self.judge = Judge(network, property_)
        self.found: tuple[Tensor, Tensor, tuple[str, ...]] | None = None
        self.refused = False  # a point that is one in float64, but not in every arithmetic
        self.reason = ""
        self.proved = False
        self.by = ""
        self.boxes = 0
        self.domains = 0
        self.searches: dict[int, BoxSearch] = {}
        self.seconds = limit if work == math.inf else None
        self.work = work if work < math.inf else (limit or 0.0) * clock.SECOND

    def run(self) -> None:
        """Attack every box, then prove them one after the other."""
        groups = self.property.groups  # with empty boxes only there is none
        for parts in groups:
            if any(not len(clause.offsets) for clause in parts[0].clauses):
                self._accept(torch.stack([part.low for part in parts]))
                self.by = "attack"
                return
        for parts in groups:
            if self._attacked(parts, self.work * SHARE / len(groups)):
                return
        for parts in groups:
            if not self._proved(parts):
                return
        self.proved = True

    def _accept(self, points: Tensor) -> Tensor | None:
        """One of some full points that is a counterexample; it is kept."""
        found = self.judge.first(points)
        if found is None:
            self.refused = True
            return None
        self.found = found
        return found[0]

    def _attacked(self, parts: list[Part], work: float) -> bool:
        """Whether a gradient finds a counterexample."""
        group = Group(self.network, parts, worst=True)
        if attack(group, self._accept, work, self.seed, self._operations(parts)) is None:
            return False
        self.by = "attack"
        return True

    def _operations(self, parts: list[Part]) -> float:
        """Of one pass of one point: counted where the structure is known, else guessed."""
        try:
            return self._search(parts).graph.operations + NODE * len(
                self._search(parts).graph.nodes
            )
        except InputError:
            weights = sum(p.numel() for p in self.network.own.parameters())
            return float(POSITIONS * max(weights, 1))

    def _search(self, parts: list[Part]) -> BoxSearch:
        """The search on the boxes of a group, made once."""
        key = id(parts)
        if key not in self.searches:
            group = Group(self.network, parts, worst=False)
            self.searches[key] = BoxSearch(
                group.graph(),
                group.low,
                group.high,
                group.places,
                lambda u: self._accept(group.full(u)),
            )
        return self.searches[key]

    def _proved(self, parts: list[Part]) -> bool:
        """Whether every clause is excluded on every box of a group."""
        search = self._search(parts)
        many = search.roots[0].shape[1] > FEW
        if many and self._shallow(parts, search):
            return self.found is None
        for share in (FIRST, 1.0) if many else (1.0,):
            if share == 1.0 and many and self._branched(parts):
                return True
            with self._part(share), suppress(clock.Late):
                search.begin()
                search.proceed()
            self.boxes += search.count
            if search.found is not None or search.done:
                self.by = "input split" if search.count > len(parts) else "crown"
                return search.done
        clock.check()
        self.reason = "a box could not be split any further"
        return False

    def _shallow(self, parts: list[Part], search: BoxSearch) -> bool:
        """Whether splits of the one layer of a network decide every clause on every box."""
        net = shallow_of(search.graph)
        group = Group(self.network, parts, worst=False)
        if net is None:
            return False
        with self._part(SHALLOW), suppress(clock.Late):
            for low, high in zip(group.low, group.high):
                for places in group.places:
                    # Where all inequalities of a clause hold their mean is not above 0.
                    mean = torch.zeros(len(net.c0), dtype=torch.float64)
                    mean[torch.tensor(places)] = -1 / len(places)
                    task = ShallowSearch(
                        net.combined(mean), low, high, lambda u: self._accept(group.full(u))
                    )
                    task.begin()
                    task.proceed()
                    self.domains += task.count
                    self.by = "neuron split" if task.count > 1 else "crown"
                    if not task.done:
                        return task.found is not None
            return True
        return False

    def _branched(self, parts: list[Part]) -> bool:
        """Whether splits of neurons exclude every clause on every box of a group."""
        group = Group(self.network, parts, worst=True)
        with self._part(NEURONS), suppress(clock.Late):
            graph = group.graph()
            label = torch.zeros(1, dtype=torch.int64)
            for low, high in zip(group.low[:, None], group.high[:, None]):
                sweep = Sweep(graph, box_balls(low, high)).run()
                lower = margins(sweep, label, "open")[0]
                clock.spend(sweep.rows * graph.operations)
                if not bool((lower[0, 1:] > 0).all()):
                    most = int(min(clock.work_left() / (DOMAIN * graph.operations), MOST))
                    width = int(min(max(TOGETHER / graph.operations, NARROW), WIDE))
                    found = branched(sweep, lower, [0], label, [most], width=width)[0]
                    clock.spend(found.count * DOMAIN * graph.operations)
                    self.domains += found.count
                    if not found.proved:
                        return False
            self.by = "neuron split"
            return True
        return False

    @contextmanager
    def _part(self, share: float) -> Iterator[None]:
        """A share of the limit."""
        seconds = None if self.seconds is None else share * self.seconds
        with clock.limited(seconds, share * self.work if self.seconds is None else math.inf):
            yield

    def late(self) -> None:
        """A limit was reached."""
        self.reason = "the time was up" if clock.out_of_time() else "its effort was spent"

    def answer(self, seconds: float) -> Answer:
        """Everything that is known now."""
        info = {"boxes": self.boxes, "domains": self.domains, **versions()}
        if self.found is not None:
            point, outputs, checked = self.found
            return Answer("sat", "", point, outputs, checked, self.by, seconds, info)
        if self.proved:
            return Answer("unsat", by=self.by, seconds=seconds, info=info)
        reason = self.reason
        if self.refused:
            reason += "; a point is a counterexample in one arithmetic only"
        return Answer("unknown", reason, seconds=seconds, info=info)
