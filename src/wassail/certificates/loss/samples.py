"""Samples of a network and their loss, of classes or of errors: what a curve is about."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates.graph.batches import batch_logits, check_batches
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Where
from wassail.certificates.loss.checks import check_labels, check_loss, check_samples, graph_of
from wassail.certificates.loss.grid import grid_of
from wassail.certificates.loss.labels import Labels, Loss
from wassail.certificates.loss.residuals import (
    Residuals,
    beside_targets,
    signed_network,
    with_targets,
)
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import arithmetic_of
from wassail.checks import check_data
from wassail.errors import InputError
from wassail.network import BATCH_SIZE, Model, device_of, frozen
from wassail.progress import Progress
from wassail.rounding import UNIT
from wassail.threat import (
    Domain,
    Number,
    box_at,
    boxes_of,
    fitted,
    parse_domain,
    parse_norm,
)

DEFAULT_QUANTILE = 0.5
DEFAULT_DELTA = 1.0


@dataclass(frozen=True)
class Asked:
    """How a loss is to be bounded: the parameters of `loss_curve` of the same names."""

    norm: Number
    order: Number
    loss: str
    domain: Domain
    quantile: Number = DEFAULT_QUANTILE
    delta: Number = DEFAULT_DELTA
    arithmetic: str = "auto"
    points: Sequence[Tensor] = ()
    grid: Sequence[Number] | None = None
    mu: Tensor | None = None
    steps: int = 0
    time_limit: float | None = None
    label_cost: Number = math.inf
    subpopulation: Number = 1
    progress: Progress = False
    eps: Sequence[Number] = ()


@dataclass(frozen=True, eq=False)
class Samples:
    """N samples.

    Args:
        graph: the network; for regression with outputs `(0, f, -f)`, and with inputs `(x, t)` where
            targets move.
        x: samples `(N, *shape)`, where the network is.
        loss: their labels or targets, and the loss.
        norm: ground norm, 1, 2 or inf.
        domain: the box, fitted boxes, or None.
        model: what evaluates the points that are kept; None for the graph.
    """

    graph: Graph
    x: Tensor
    loss: Loss
    norm: float
    domain: Domain
    model: Model | None = None

    def parts(self) -> Iterator[Samples]:
        """The samples in batches."""
        for rows in torch.split(torch.arange(len(self.x)), BATCH_SIZE):
            yield replace(
                self,
                x=self.x[rows.to(self.x.device)],
                loss=self.loss.take(rows),
                domain=box_at(self.domain, rows),
            )

    @property
    def rows(self) -> Tensor:
        """The output that is to win for each sample, `(N,)`, where the network is."""
        return self.loss.rows.to(self.graph.device)

    @property
    def residuals(self) -> Residuals:
        """The targets, where the loss is one of errors."""
        assert isinstance(self.loss, Residuals)
        return self.loss

    def balls(self, radius: float, norm: float | None = None) -> Balls:
        """Balls of one radius around all samples.

        Args:
            radius: of all of them.
            norm: theirs; default None, the ground norm.
        """
        size = torch.full((len(self.x),), radius, dtype=torch.float64, device=self.x.device)
        targets = self.loss.targets(self.graph.device)
        return Balls.make(self.x, size, norm or self.norm, self.domain, targets)

    def lowest(self, radius: float, steps: int = 0, norm: float | None = None) -> Tensor:
        """Lower bounds on the margins over balls, `(N, K)`.

        Args:
            radius: of the balls.
            steps: of the optimisation of the linear bounds.
            norm: of the balls; default None, the ground norm.
        """
        found = []
        for part in self.parts():
            sweep = Sweep(part.graph, part.balls(radius, norm), steps).run()
            found.append(margins(sweep, part.rows)[0])
        return torch.cat(found)

    def scores(self, points: Tensor) -> Tensor:
        """What the loss is a function of at one point for each sample, by the graph.

        Args:
            points: `(N, *shape)`.
        """
        parts = torch.split(points, BATCH_SIZE)
        return self.loss.scores(torch.cat([self.graph.logits(part.double()) for part in parts]))

    def evaluated(self, points: Tensor) -> Tensor:
        """The same in the arithmetic of the curve.

        Args:
            points: `(N, *shape)`.
        """
        if self.model is None:
            return self.scores(points)
        device = device_of(self.model, points.device)
        with frozen(self.model), torch.no_grad():
            parts = [
                self.model(part.to(device)).double().to(self.graph.device)
                for part in torch.split(points, BATCH_SIZE)
            ]
        return self.loss.scores_of_model(torch.cat(parts))

    @property
    def place(self) -> Where:
        """A box around all boxes, or None for R^n."""
        own = boxes_of(self.domain)
        if own is None:
            return self.domain
        return own.low.amin(0).flatten(), own.high.amax(0).flatten()

    @property
    def bounded(self) -> bool:
        """Whether the domain is."""
        if self.domain is None:
            return False
        return all(
            bool(torch.as_tensor(side, dtype=torch.float64).isfinite().all())
            for side in self.domain
        )

    @property
    def reach(self) -> float:
        """The largest side of a box."""
        low, high = (torch.as_tensor(side, dtype=torch.float64) for side in self.domain or ())
        return float((high - low).max()) * (1 + 4 * UNIT)

    @property
    def diagonal(self) -> float:
        """No less than the distance of two points of a box."""
        n = self.x[0].numel()
        return self.reach * (n ** (1 / self.norm) if self.norm < math.inf else 1.0)


def labelled(model: Model | Graph, x: Tensor, y: Tensor, asked: Asked) -> Samples:
    """Samples with labels.

    Args:
        model: callable, or a graph that was read.
        x: samples.
        y: labels.
        asked: how.
    """
    norm = parse_norm(asked.norm)
    domain = parse_domain(asked.domain)
    check_loss(asked.loss)
    x, y = check_samples(x, y, domain)
    missing = _missing(model, domain)
    graph, run = _in_arithmetic(model, graph_of(model, x), asked.arithmetic, missing, x.dtype)
    check_labels(graph, y)
    return Samples(
        graph, x.to(graph.device), Labels(asked.loss, y.to(graph.device)), norm, domain, run
    )


def with_errors(
    model: Model | Graph, x: Tensor, y: Any, asked: Asked, price: float
) -> tuple[Samples, list[float]]:
    """Samples with targets, and the radii to look at.

    Args:
        model: callable, or a graph that was read.
        x: samples.
        y: targets, `(N,)` or `(N, K)`.
        asked: how.
        price: of moving a target by one unit; inf where they stay.
    """
    norm = parse_norm(asked.norm)
    domain = parse_domain(asked.domain, own=True)
    count = len(x) if isinstance(x, Tensor) and x.ndim else 0
    x, _ = check_data(x, torch.zeros(count, dtype=torch.int64), domain)
    if not count:
        raise InputError(
            "there are no samples: a curve is about the loss on data, give at least one."
        )
    residuals = Residuals.of(asked.loss, y, asked.quantile, asked.delta, count)
    graph = _signed_graph(model, x, residuals, price)
    missing = _missing(model, domain) or ("targets that stay" if price < math.inf else "")
    graph, run = _in_arithmetic(model, graph, asked.arithmetic, missing, x.dtype)
    domain = fitted(domain, x)
    radii = grid_of(asked.grid, x, norm, _around(domain))
    if price < math.inf:
        graph = with_targets(graph, price)
        x, domain = beside_targets(x, domain)
    return Samples(graph, x.to(graph.device), residuals, norm, domain, run), radii


def _signed_graph(model: Model | Graph, x: Tensor, residuals: Residuals, price: float) -> Graph:
    """The network with outputs `(0, f, -f)`."""
    if isinstance(model, Graph):
        graph = model
    else:
        graph = read(model, tuple(x.shape[1:]), smooth=True, device=x.device, samples=x)
        check_batches(graph, x, batch_logits(model, x), True)
    outputs = residuals.y.shape[1]
    if graph.outputs != outputs:
        raise InputError(
            f"there are targets for {outputs} outputs and the model has {graph.outputs}: give one "
            "number for each output of each sample."
        )
    if price < math.inf and outputs > 1:
        raise InputError(
            f"targets move at a price for models of one output, and this one has {outputs}: leave "
            "label_cost out."
        )
    return signed_network(graph)


def _missing(model: Model | Graph, domain: Domain) -> str:
    """What executed arithmetic needs and is not there."""
    if isinstance(model, Graph):
        return "the model itself"
    return "a box as its domain" if domain is None else ""


def _in_arithmetic(
    model: Model | Graph, graph: Graph, arithmetic: str, missing: str, dtype: torch.dtype
) -> tuple[Graph, Model | None]:
    """The graph in its arithmetic, and the model that evaluates points if it is the executed
    one.
    """
    if missing and arithmetic == "executed":
        raise InputError(
            f"a loss curve in executed arithmetic needs {missing}: give it, or use "
            "arithmetic='exact'."
        )
    graph = arithmetic_of(graph, "exact" if missing and arithmetic == "auto" else arithmetic, dtype)
    return graph, None if graph.arithmetic == "exact" or isinstance(model, Graph) else model


def _around(domain: Domain) -> Domain:
    """One box of numbers around all boxes."""
    own = boxes_of(domain)
    return domain if own is None else (float(own.low.min()), float(own.high.max()))
