"""Lipschitz constants of piecewise-linear networks: a ladder of sound upper bounds, each above a real Jacobian's norm.

From cheap to exact (THEORY 4): the product of the layers' norms; bound propagation of the Jacobian with the neurons that are
stable on the domain fixed; a semidefinite bound; branch and bound, which closes the bracket on small networks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wassail.certificates.bound import Bound, below
from wassail.certificates.branch import branch
from wassail.certificates.condense import condensed
from wassail.certificates.norms import FEW_SIGNS, positive_norm, product
from wassail.certificates.piecewise import Piecewise
from wassail.certificates.propagate import Bounds, crown, gradients
from wassail.certificates.region import Ball, Region, Where
from wassail.certificates.semidefinite import MEMORY, segmented
from wassail.certificates.structure import Graph, read
from wassail.errors import InputError, unknown
from wassail.geometry import maximiser, operator_norm
from wassail.network import Model, Progress, _bar, versions
from wassail.threat import Number, dual, number, parse_norm

METHODS = ("auto", "product", "propagate", "sdp", "exact")
OUTPUTS = ("margins", "logits")
AUTO_SECONDS = 60.0  # what `auto` and `sdp` take at most when no time limit is given
STEPS = (0.1, 0.3, 1.0, 1.0)  # of the search for steep points, in parts of the domain's width or of the scale
SMALL = 150  # undecided neurons up to which `auto` tries to close the bracket
NARROW = 64  # inputs
DENSE = 5000  # undecided neurons up to which the dense form is built


def lipschitz(
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
    progress: Progress = False,
) -> Bound:
    """How fast a network's outputs can change over a domain, from both sides.

    outputs: "margins", `max_{k, j != k} sup_x ||J(x)^T (e_j - e_k)||_s` over labels k (`labels`, default all), which is the
    slope Lm of THEORY 3; or "logits", `sup_x ||J(x)||_{norm -> norm_out}` (norm_out: default `norm`). norm: the input norm r.
    domain: None for all of R^n, a box `(low, high)` of numbers or tensors, or a `Ball`.
    method: "product", "propagate", "sdp", "exact", or "auto", which climbs the ladder until the bracket is closed or the time
    limit (default 60 s) is reached; every method returns the best of the cheaper ones too. time_limit: in seconds; nodes: of
    branch and bound, which without either runs until it is exact. An interrupt (Ctrl-C) returns the bracket so far.
    shape: of one sample, where neither the domain nor the first layer tells it.
    The lower side is the norm of the Jacobian at `witness`, a real point of the domain, and rounded down by 1e-12.
    """
    r = parse_norm(norm)
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if outputs not in OUTPUTS:
        raise unknown("outputs", outputs, OUTPUTS)
    if outputs == "margins" and norm_out is not None:
        raise InputError("norm_out belongs to outputs='logits': margins are single numbers, leave it out.")
    limit = None if time_limit is None else number(time_limit, "time_limit")
    most = None if nodes is None else int(number(nodes, "nodes"))
    graph = as_graph(model, domain, shape)
    region = Region.make(domain, graph.inputs)
    if outputs == "margins":
        graph, q = graph.head(margin_rows(graph.outputs, labels)), math.inf
    else:
        q = r if norm_out is None else parse_norm(norm_out)
    with _bar(progress, "Lipschitz constant") as report:
        ladder = Ladder(graph, region, r, q, limit, most, seed, report)
        bound = ladder.climb(method)
    info = {
        "norm": r, "norm_out": q, "outputs": outputs, "domain": str(region), "seed": seed, "versions": versions(),
        "neurons": graph.neurons, **bound.info,
    }  # fmt: skip
    return Bound(bound.lower, bound.upper, bound.method, bound.witness, info)


@dataclass
class Ladder:
    """One climb: what is known so far is kept whatever happens next."""

    graph: Graph
    region: Region
    norm_in: float
    norm_out: float
    time_limit: float | None = None
    nodes: int | None = None
    seed: int = 0
    report: Callable[[float], None] = lambda share: None
    lower: float = 0.0
    upper: float = math.inf
    method: str = "product"
    witness: Tensor | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def climb(self, method: str) -> Bound:
        """Rung by rung up to `method`."""
        self.began = time.monotonic()
        try:
            self._sample()
            self._improve(product(self.graph, self.norm_in, self.norm_out), "product")
            if method != "product":
                self._local(method)
        except KeyboardInterrupt:  # the bracket so far is an answer
            self.info["interrupted"] = True
        return Bound(self.lower, self.upper, self.method, self.witness, {**self.info, "seconds": self._spent()})

    def _local(self, method: str) -> None:
        bounds = condensed(crown(self.graph, self.region))
        self.info["undecided"] = bounds.open
        self.report(0.1)
        self._improve(propagated(bounds, self.norm_in, self.norm_out, tighten=False), "propagate")
        patient = method == "propagate" and self.time_limit is None
        if not self._closed() and (patient or self._price(bounds) < self._left() / (1 if method == "propagate" else 2)):
            self._improve(propagated(bounds, self.norm_in, self.norm_out), "propagate")
        self.report(0.2)
        branches = method == "exact" or (method == "auto" and bounds.open <= SMALL and self._dense(bounds))
        narrow = branches and self.graph.inputs <= NARROW  # there branch and bound starts with the same bound at once
        if not self._closed() and method in ("sdp", "auto") and not narrow:
            self._improve(segmented(bounds, self.norm_in, self.norm_out, self._left() / (2 if branches else 1)), "sdp")
        self.report(0.3)
        if not self._closed() and branches:
            network = bounds.graph.piecewise(bounds.states(), DENSE)
            self._branch(network, None if method == "exact" and self.time_limit is None else self._left())

    def _dense(self, bounds: Bounds) -> bool:
        """Whether the dense form fits."""
        return (self.graph.inputs + bounds.open) * max(node.size for node in bounds.graph.nodes) <= MEMORY

    def _price(self, bounds: Bounds) -> float:
        """About how many seconds it takes to substitute every undecided neuron's gradient and every entry, both sides."""
        count = max(1, min(256, 2**22 // max(node.size for node in bounds.graph.nodes)))
        x = torch.zeros(count, *bounds.graph.nodes[0].shape, dtype=torch.float64)
        start = time.monotonic()
        bounds.graph.values(x)
        return (time.monotonic() - start) / count * 2 * self.graph.outputs * (bounds.open + self.graph.inputs)

    def _branch(self, network: Piecewise, limit: float | None) -> None:
        def tick(lower: float, upper: float, nodes: int) -> None:
            self.info["nodes"] = nodes
            self.report(0.3 + 0.7 * lower / max(upper, 1e-300) if math.isfinite(upper) else 0.3)

        found = branch(
            network, self.region, self.norm_in, self.norm_out, time_limit=limit, nodes=self.nodes, seed=self.seed, tick=tick
        )
        self.info["nodes"] = found.nodes
        if found.lower > self.lower and found.witness is not None:
            self.lower, self.witness = found.lower, found.witness
        self._improve(found.upper, "branch")

    def _sample(self, count: int = 64) -> None:
        """The lower side: the Jacobian's norm at random points, on R^n at several scales, and along its steepest rows.

        A gap that grows along its gradient tends to meet steeper pieces there.
        """
        generator = torch.Generator().manual_seed(self.seed)
        low, high = self.region.box
        spreads = (float((high - low).amax()),) if self.region.bounded else (0.1, 1.0, 10.0, 1000.0)
        few = max(4, min(count, 2**24 // max(node.size for node in self.graph.nodes)) // len(spreads))
        for spread in spreads:
            x = self.region.sample(few, generator, spread)
            for step in (*STEPS, 0.0):
                jacobian = jacobians(self.graph, x)
                value, best = jacobian_norms(jacobian, self.norm_in, self.norm_out).max(0)
                if self.witness is None or float(value) * (1 - 1e-12) > self.lower:
                    self.lower, self.witness = max(0.0, float(value) * (1 - 1e-12)), x[best]
                steepest = torch.linalg.vector_norm(jacobian, dual(self.norm_in), dim=2).argmax(1)
                row = maximiser(jacobian[torch.arange(len(x)), steepest], self.norm_in)
                # Steps are measured entry by entry, whatever the norm.
                x = self.region.inside(x + step * spread * row / row.abs().amax().clamp(min=1e-300))

    def _improve(self, upper: float, method: str) -> None:
        if upper < self.upper:
            self.upper, self.method = upper, method
        if math.isinf(self.lower):
            raise InputError("the network's Jacobian overflows float64: rescale its weights.")
        self.lower = below(self.lower, self.upper, f"Jacobian norm, by {method}")

    def _closed(self) -> bool:
        return self.upper - self.lower <= 1e-12 * self.upper

    def _spent(self) -> float:
        return time.monotonic() - self.began

    def _left(self) -> float:
        return max(1.0, (AUTO_SECONDS if self.time_limit is None else self.time_limit) - self._spent())


def propagated(bounds: Bounds, norm_in: float, norm_out: float, tighten: bool = True) -> float:
    """`||J||_{r -> s}` by bound propagation of the Jacobian, with `tighten` by substitution, else by intervals.

    Entries no larger than those of M bound the norm by that of M; so do the norms of the rows, each in the dual norm of r.
    """
    found = gradients(bounds, torch.eye(bounds.graph.outputs, dtype=torch.float64), tighten)
    low, high = entries = found.entries(tighten)
    best = positive_norm(torch.maximum(low.abs(), high.abs()), norm_in, norm_out)
    if norm_in != 1:
        best = min(best, float(torch.linalg.vector_norm(found.norm(dual(norm_in), entries), norm_out)))
    return best * (1 + 1e-12)


def jacobians(graph: Graph, x: Tensor) -> Tensor:
    """`J` at flat points `(m, n)`: `(m, K, n)`."""
    with torch.enable_grad():
        points = x.reshape(-1, *graph.nodes[0].shape).clone().requires_grad_(True)
        z = graph.logits(points)
        rows = [torch.autograd.grad(z[:, k].sum(), points, retain_graph=True)[0].flatten(1) for k in range(graph.outputs)]
    return torch.stack(rows, 1).detach()


def jacobian_norms(jacobian: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """`||J||_{r -> s}` of `(m, K, n)`: `(m,)`; a lower bound of it where the norm is NP-hard and large."""
    _, outputs, inputs = jacobian.shape
    signs = outputs if norm_out == 1 and (norm_in == 2 or outputs <= inputs) else inputs  # what operator_norm enumerates
    if norm_in != 1 and norm_out != math.inf and not norm_in == norm_out == 2 and signs > FEW_SIGNS:
        rows: Tensor = torch.linalg.vector_norm(jacobian, dual(norm_in), dim=2)
        return rows.amax(1)  # the longest row is no longer than the norm
    return operator_norm(jacobian, norm_in, norm_out)


def margin_rows(classes: int, labels: Iterable[int] | None) -> Tensor:
    """`e_j - e_k` for every pair of classes, at least one of them among the labels, `(J, K)`; the norm ignores signs."""
    if classes < 2:
        raise InputError("the model has one output: margins need two classes, use outputs='logits'.")
    try:
        wanted = set(range(classes)) if labels is None else {int(k) for k in labels}
    except (TypeError, ValueError):
        wanted = set()
    if not wanted or not wanted <= set(range(classes)):
        raise InputError(f"labels {labels!r} are not among the classes: give a list of some of 0..{classes - 1}.")
    eye = torch.eye(classes, dtype=torch.float64)
    return torch.stack([eye[j] - eye[k] for k in range(classes) for j in range(k) if {j, k} & wanted])


def as_graph(model: Model | Graph, domain: Where = None, shape: Sequence[int] | None = None) -> Graph:
    """The structure of a model, its input shape taken from `shape`, the domain's tensors, or its first layer."""
    if isinstance(model, Graph):
        return model
    if shape is None and isinstance(domain, Ball):
        shape = tuple(domain.centre.shape)
    if shape is None and isinstance(domain, tuple | list):
        shape = next((tuple(side.shape) for side in domain if isinstance(side, Tensor) and side.ndim), None)
    if shape is None and isinstance(model, nn.Module):
        first = next((m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)), None)
        shape = (first.in_features,) if isinstance(first, nn.Linear) else None
    if shape is None:
        raise InputError("the shape of a sample is not known: give shape=(3, 32, 32), or a domain with tensors of that shape.")
    return read(model, shape)
