"""Lipschitz constants of networks: a ladder of sound upper bounds, each above a real Jacobian's
norm.

From cheap to exact (THEORY 4): the product of the layers' norms; bound propagation of the Jacobian
with the neurons that are stable on the domain fixed, or with the slopes that a smooth activation
takes there; a semidefinite bound; branch and bound, on the neurons of a ReLU network and on the
inputs of a smooth one, which closes the bracket on small networks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from wassail import names
from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.device import HOST
from wassail.certificates.exact.constants import branch
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.matrix_norms import positive_norm
from wassail.certificates.graph.region import Region, Where
from wassail.certificates.graph.restrict import restricted
from wassail.certificates.lipschitz.kinks import off_kinks, on_kinks
from wassail.certificates.lipschitz.semidefinite import MEMORY, segmented
from wassail.certificates.lipschitz.steepest import (
    as_graph,
    ascend,
    jacobian_norms,
    jacobians,
    margin_rows,
    room_of,
)
from wassail.certificates.relax.jacobian import entries, entry_norms, gradients, secants
from wassail.certificates.relax.norms import product
from wassail.certificates.relax.ranges import (
    Bounds,
    Span,
    bounds_on,
    condensed,
    one_region,
    ranges,
    smooth_bounds,
)
from wassail.certificates.search.frontier import Workers
from wassail.certificates.search.input_boxes import InputSearch
from wassail.errors import InputError, remedies, unknown
from wassail.geometry import maximiser
from wassail.network import Model, versions
from wassail.progress import Progress, progress_bar
from wassail.threat import Number, dual, number, parse_norm
from wassail.ties import first_largest, largest

METHODS = tuple(names.LIPSCHITZ_METHODS)
OUTPUTS = ("margins", "logits")
# operations that `auto` and `sdp` take at most when no time limit is given
AUTO = 60 * clock.SECOND
POINT = clock.SECOND / 30  # operations of the Jacobian at a point that is looked at in any case
# steps of the search for steep points, in parts of the domain's width or of the scale
SAMPLE_STEPS = (0.1, 0.3, 1.0, 1.0)
BRANCH_UP_TO_UNSTABLE = 150  # unstable neurons up to which `auto` tries to close the bracket
# Up to so many inputs branch and bound starts with the semidefinite bound itself.
NO_SDP_UP_TO_INPUTS = 64
DENSE_UP_TO_UNSTABLE = 5000  # unstable neurons up to which the dense form is built
SDP_UP_TO_NEURONS = 1000  # smooth neurons up to which the semidefinite bound is tried
BOXES_UP_TO_INPUTS = 6  # inputs of a smooth network up to which `auto` branches on them


def lipschitz(  # noqa: PLR0913
    model: Model | Graph,
    norm: Number,
    domain: Where = None,
    *,
    outputs: str = "margins",
    norm_out: Number | None = None,
    labels: Iterable[int] | None = None,
    method: str = "auto",
    time_limit: float | None = None,
    nodes: int | None = None,
    shape: Sequence[int] | None = None,
    seed: int = 0,
    workers: Workers = None,
    progress: Progress = False,
) -> Bound:
    """How fast a network's outputs can change over a domain, from both sides.

    Every method returns the best of the cheaper ones too. The lower side is the norm of the
    Jacobian at `Bound.witness`, a point of the domain off all kinks, and rounded down by 1e-12.
    Inputs with `low == high` do not move and have no direction. "exact"
    branches on the neurons of a ReLU network, and on the inputs of a smooth one until the gap is
    1e-6. An interrupt (Ctrl-C) returns the bracket so far.

    The semidefinite rung is LipSDP (Fazlyab et al. 2019). The domain is all of R^n by default,
    since a Lipschitz constant is a property of the function.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        norm: input norm r, 1, 2 or inf.
        domain: None (the default) for all of R^n, a box `(low, high)` of numbers or tensors, or a
            `Ball`.
        outputs: "margins" (the default), `max_{k, j != k} sup_x ||J(x)^T (e_j - e_k)||_s` over
            labels k, the slope Lm of THEORY 3; or "logits", `sup_x ||J(x)||_{norm -> norm_out}`.
        norm_out: output norm of "logits"; default None, `norm`.
        labels: the labels k; default None, all.
        method: "product" (infinite for transformers: see `corollary`), "propagate", "sdp" (ReLUs
            and activations), "exact", or "auto" (the default), which climbs the ladder until the
            bracket is closed or its limit is reached.
        time_limit: seconds; `info["cut"]` says whether it stopped a rung; default None, a budget of
            work (about a minute) for "auto" and "sdp", so that the answer never depends on the
            clock.
        nodes: int, most nodes of branch and bound; default None, until it is exact.
        shape: of one sample, where neither the domain nor the first layer tells it; default None.
        seed: int of the random starts; default 0.
        workers: processes that share the branch and bound of a ReLU network, a number or a pool of
            `certificates.search.workers`; default None.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Bound`.
    """
    r = parse_norm(norm)
    began = clock.now()
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if outputs not in OUTPUTS:
        raise unknown("outputs", outputs, OUTPUTS)
    if outputs == "margins" and norm_out is not None:
        raise InputError(
            "norm_out belongs to outputs='logits': margins are single numbers, leave it out."
        )
    limit = None if time_limit is None else number(time_limit, "time_limit")
    most = None if nodes is None else int(number(nodes, "nodes"))
    graph = as_graph(model, domain, shape)
    region = Region.make(domain, graph.inputs, graph.device)
    graph, q = _with_outputs(graph, outputs, labels, r, norm_out)
    moving = region.low < region.high
    if not bool(moving.any()):
        return Bound(0.0, 0.0, "product", region.centre.cpu(), {"cut": False, "seconds": 0.0})
    point = region.centre.cpu().clone()
    graph, region = restricted(graph, region)
    with progress_bar(progress, "Lipschitz constant") as report:
        ladder = Ladder(graph, region, r, q, most, seed, report, workers)
        free = (
            limit is not None
            or clock.seconds_left() < math.inf
            or method in ("product", "propagate", "exact")
        )
        left = None if limit is None else limit - (clock.now() - began)
        with clock.limited(left, math.inf if free else AUTO):
            bound = ladder.climb(method)
    neurons = sum(node.size for node in graph.nodes if node.slope is not None or node.activation)
    info = {
        "norm": r,
        "norm_out": q,
        "outputs": outputs,
        "domain": str(region),
        "seed": seed,
        "versions": versions(),
        "neurons": neurons,
        **bound.info,
    }
    if bound.witness is not None:
        point[moving.cpu()] = bound.witness.cpu()
    witness = None if bound.witness is None else point
    return Bound(bound.lower, bound.upper, bound.method, witness, info)


def _with_outputs(
    graph: Graph, outputs: str, labels: Iterable[int] | None, r: float, norm_out: Number | None
) -> tuple[Graph, float]:
    """The network with the outputs that are asked for, and their norm."""
    if outputs == "margins":
        return graph.head(margin_rows(graph.outputs, labels)), math.inf
    if graph.common:
        raise remedies(
            "the model ends in a log-softmax, and only its margins are known",
            "use outputs='margins', or leave the log-softmax out",
            "leave the slope 'paper' out with --slopes infinity anchor margin",
        )
    return graph, r if norm_out is None else parse_norm(norm_out)


@dataclass
class Ladder:
    """One climb: what is known so far is kept whatever happens next."""

    graph: Graph
    region: Region
    norm_in: float
    norm_out: float
    nodes: int | None = None
    seed: int = 0
    report: Callable[[float], None] = lambda share: None
    workers: Workers = None
    lower: float = 0.0
    upper: float = math.inf
    method: str = "product"
    witness: Tensor | None = None
    info: dict[str, Any] = field(default_factory=dict)
    cut: bool = False  # whether the clock stopped a rung

    def climb(self, method: str) -> Bound:
        """Rung by rung up to `method`."""
        began = time.monotonic()
        try:
            self._improve(product(self.graph, self.norm_in, self.norm_out), "product")
            self._sample()
            self._improve(self.upper, "product")
            if method != "product":
                (self._smooth if self.graph.smooth else self._local)(method)
        except KeyboardInterrupt:  # the bracket so far is an answer
            self.info["interrupted"] = True
        except clock.Late:
            self.cut |= clock.out_of_time()
            self._one_point()
        info = {**self.info, "cut": self.cut, "seconds": time.monotonic() - began}
        return Bound(self.lower, self.upper, self.method, self.witness, info)

    def _one_point(self) -> None:
        """A lower side in any case, where a point costs next to nothing."""
        if self.witness is None and self.graph.outputs * self.graph.operations <= POINT:
            with clock.unlimited():
                self._keep(self.region.sample(1, torch.Generator().manual_seed(self.seed), 1.0))
            self._improve(self.upper, self.method)

    @contextmanager
    def _share(self, parts: int = 1) -> Iterator[None]:
        """A part of what is left for one rung; what it has not reached then is left to the
        others.
        """
        with clock.limited(clock.seconds_left() / parts, clock.work_left() / parts):
            with suppress(clock.Late):
                yield
            self.cut |= clock.out_of_time()

    def _local(self, method: str) -> None:
        bounds = condensed(bounds_on(self.graph, self.region))
        self.info["undecided"] = bounds.open
        self.report(0.1)
        self._improve(propagated(bounds, self.norm_in, self.norm_out, tighten=False), "propagate")
        if not self._closed() and self._affordable(bounds, 1 if method == "propagate" else 2):
            with self._share(1 if method == "propagate" else 2):
                self._improve(propagated(bounds, self.norm_in, self.norm_out), "propagate")
        self.report(0.2)
        branches = method == "exact" or (
            method == "auto" and bounds.open <= BRANCH_UP_TO_UNSTABLE and self._dense(bounds)
        )
        # there branch and bound starts with the same bound at once
        narrow = branches and self.graph.inputs <= NO_SDP_UP_TO_INPUTS
        if not self._closed() and method in ("sdp", "auto") and not narrow:
            with self._share(2 if branches else 1):
                self._improve(segmented(bounds, self.norm_in, self.norm_out), "sdp")
        self.report(0.3)
        if not self._closed() and branches:
            network = bounds.graph.piecewise(bounds.states(), DENSE_UP_TO_UNSTABLE)
            self._branch(network)

    @cached_property
    def _spans(self) -> Mapping[int, Span]:
        """Where the values of a smooth network lie."""
        return ranges(self.graph, one_region(self.region))

    def _smooth(self, method: str) -> None:
        """The rungs of a network with smooth parts."""
        spans = self._spans
        self._improve(
            float(entry_norms(*entries(self.graph, spans), self.norm_in, self.norm_out)),
            "propagate",
        )
        self.report(0.1)
        # of the time left: is there a rung after it?
        share = 2 if self.graph.inputs <= BOXES_UP_TO_INPUTS or not self.graph.curved else 1
        # a tangent from each of them
        neurons = sum(node.size for node in self.graph.nodes if node.map is None)
        price = 2 * self.graph.operations * neurons
        if not self._closed() and self.region.bounded and price < clock.work_left() / share:
            with self._share(share):
                self._improve(
                    float(
                        entry_norms(*entries(self.graph, spans, True), self.norm_in, self.norm_out)
                    ),
                    "propagate",
                )
        if not self.graph.curved:
            self._elementwise(method, spans)
        self.report(0.3)
        few = self.graph.inputs <= BOXES_UP_TO_INPUTS
        # cutting infinity in two leaves it infinite
        hopeless = math.isinf(self.upper) and not self.region.bounded
        if (
            not self._closed()
            and not hopeless
            and (method == "exact" or (method == "auto" and few))
        ):
            self._search()

    def _elementwise(self, method: str, spans: Mapping[int, Span]) -> None:
        """What holds for ReLUs and for every function with a range of slopes."""
        bounds = smooth_bounds(self.graph, self.region, spans)
        steepest = {
            i: max(float(side.abs().max()) for side in bounds.derivative(i)) for i in bounds.spans
        }
        self._improve(product(self.graph, self.norm_in, self.norm_out, steepest), "product")
        if not self._closed() and self._affordable(bounds, 1 if method == "propagate" else 2):
            with self._share(1 if method == "propagate" else 2):
                self._improve(propagated(bounds, self.norm_in, self.norm_out), "propagate")
        self.report(0.2)
        # With few inputs the search does better.
        narrow = self.graph.inputs <= BOXES_UP_TO_INPUTS and method != "sdp"
        fits = bounds.open <= SDP_UP_TO_NEURONS  # no neuron is decided here
        if not self._closed() and method in ("sdp", "auto") and not narrow and fits:
            with self._share():
                self._improve(segmented(secants(bounds), self.norm_in, self.norm_out), "sdp")

    def _search(self) -> None:
        def value(x: Tensor) -> Tensor:
            norms = jacobian_norms(jacobians(self.graph, x), self.norm_in, self.norm_out)
            norms = torch.where(on_kinks(self.graph, x), 0.0, norms)
            return norms * (1 - room_of(self.graph.outputs, self.graph.inputs))

        def climb(x: Tensor) -> Tensor:
            return ascend(self.graph, self.region, x, self.norm_in, self.norm_out)

        def tick(search: InputSearch) -> None:
            self.info["nodes"] = search.nodes
            if search.lower > self.lower and search.witness is not None:
                self.lower = search.lower
                self.witness = search.witness
            self._improve(search.upper, "branch")
            self.report(
                0.3 + 0.7 * self.lower / max(self.upper, 1e-300)
                if math.isfinite(self.upper)
                else 0.3
            )

        search = InputSearch(
            self.graph,
            self.region,
            self.norm_in,
            self.norm_out,
            value,
            climb,
            self.lower,
            self.witness,
            best=self.upper,
            most=math.inf if self.nodes is None else self.nodes,
            tick=tick,
        )
        search.proceed()
        self.cut |= clock.out_of_time() and search.upper > search.lower * (1 + 1e-6)

    def _dense(self, bounds: Bounds) -> bool:
        """Whether the dense form fits."""
        return (self.graph.inputs + bounds.open) * max(
            node.size for node in bounds.graph.nodes
        ) <= MEMORY

    def _affordable(self, bounds: Bounds, parts: int) -> bool:
        """Whether a part of the budget pays for the gradient of every unstable neuron and
        every entry, both sides.
        """
        price = 4 * bounds.graph.operations * self.graph.outputs * (bounds.open + self.graph.inputs)
        return price < clock.work_left() / parts

    def _branch(self, network: Piecewise) -> None:
        def tick(lower: float, upper: float, nodes: int) -> None:
            self.info["nodes"] = nodes
            self.report(0.3 + 0.7 * lower / max(upper, 1e-300) if math.isfinite(upper) else 0.3)

        found = branch(  # on the CPU, where the dense form is and programs are solved
            network,
            self.region.to(HOST),
            self.norm_in,
            self.norm_out,
            nodes=self.nodes,
            seed=self.seed,
            tick=tick,
            workers=self.workers,
        )
        self.info["nodes"] = found.nodes
        self.cut |= clock.out_of_time() and not found.complete
        if found.lower > self.lower and found.witness is not None:
            self.lower = found.lower
            self.witness = found.witness
        self._improve(found.upper, "branch")

    def _sample(self, count: int = 64) -> None:
        """The lower side: the Jacobian's norm at random points, on R^n at several scales, and along
        its steepest rows.

        A gap that grows along its gradient tends to meet steeper pieces there.
        """
        generator = torch.Generator().manual_seed(self.seed)
        low, high = self.region.box
        spreads = (float((high - low).amax()),) if self.region.bounded else (0.1, 1.0, 10.0, 1000.0)
        few = max(
            4, min(count, 2**24 // max(node.size for node in self.graph.nodes)) // len(spreads)
        )
        for spread in spreads:
            x = self.region.sample(few, generator, spread)
            seen: list[tuple[Tensor, Tensor]] = []
            for step in (*SAMPLE_STEPS, 0.0):
                x, jacobian, norms = self._keep(x)
                clock.check()
                seen.append((x, norms))
                steepest = first_largest(
                    torch.linalg.vector_norm(jacobian, dual(self.norm_in), dim=2)
                )
                row = maximiser(
                    jacobian.take_along_dim(steepest[:, None, None], 1)[:, 0], self.norm_in
                )
                # Steps are measured entry by entry, whatever the norm.
                x = self.region.inside(x + step * spread * row / row.abs().amax().clamp(min=1e-300))
            if self.graph.smooth:
                x, norms = (torch.cat(parts) for parts in zip(*seen))
                steep = largest(norms, max(4, few // 2))
                self._keep(
                    ascend(self.graph, self.region, x[steep], self.norm_in, self.norm_out, spread)
                )

    def _keep(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Points `(m, n)` off the kinks of the network, the Jacobians there and their norms `(m,)`,
        the largest of which is kept as the lower side.
        """
        generator = torch.Generator().manual_seed(self.seed)
        x, counts = off_kinks(self.graph, self.region, x, generator)
        jacobian = jacobians(self.graph, x)
        norms = jacobian_norms(jacobian, self.norm_in, self.norm_out)
        norms = torch.where(counts, norms, 0.0)
        value, best = norms.max(0)
        lower = float(value) * (1 - room_of(self.graph.outputs, self.graph.inputs))
        if self.witness is None or lower > self.lower:
            self.lower = max(0.0, lower)
            self.witness = x[best]
        return x, jacobian, norms

    def _improve(self, upper: float, method: str) -> None:
        if upper < self.upper:
            self.upper = upper
            self.method = method
        if math.isinf(self.lower):
            raise InputError("the network's Jacobian overflows float64: rescale its weights.")
        self.lower = below(self.lower, self.upper, f"Jacobian norm, by {method}")

    def _closed(self) -> bool:
        return self.upper - self.lower <= 1e-12 * self.upper


def propagated(bounds: Bounds, norm_in: float, norm_out: float, tighten: bool = True) -> float:
    """`||J||_{r -> s}` by bound propagation of the Jacobian, with `tighten` by substitution, else
    by intervals.

    Entries no larger than those of M bound the norm by that of M; so do the norms of the rows, each
    in the dual norm of r.
    """
    found = gradients(bounds, torch.eye(bounds.graph.outputs, dtype=torch.float64), tighten)
    low, high = entries = found.entries(tighten)
    best = positive_norm(torch.maximum(low.abs(), high.abs()), norm_in, norm_out)
    if norm_in != 1:
        best = min(
            best, float(torch.linalg.vector_norm(found.norm(dual(norm_in), entries), norm_out))
        )
    return best * (1 + room_of(*low.shape))
