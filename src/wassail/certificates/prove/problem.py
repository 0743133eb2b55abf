"""What every proof is about: a network, samples, what right means for them, balls and the box."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.batches import batch_logits, check_batches
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.specified import settled, specified
from wassail.certificates.relax.balls import Balls, Targets
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import arithmetic_of, margin_errors
from wassail.checks import check_task
from wassail.geometry import sides
from wassail.losses import predict
from wassail.network import Model, check_model, frozen
from wassail.specification import Labels, Specification, labels_of, specification_of
from wassail.threat import Domain, box_at, fitted

BATCH = 16  # samples in one sweep; a sweep holds every node's values and spans for each
NODE = 10**4  # operations that a node costs beside its arithmetic
SMALL = 300  # ReLUs up to which distances are sought exactly


@dataclass(frozen=True, eq=False)
class Problem:
    """N samples of one network. Samples and labels are where the network is, the rest on the CPU.

    Args:
        graph: the network, with the arithmetic that proofs are for.
        x: samples `(N, *shape)`.
        y: labels `(N,)`; 0 with a specification, whose rows are the rivals.
        norm: ground norm, 1, 2 or inf.
        domain: the box, those of the samples, or None.
        wrong: which samples the model itself, or the graph if only that is known, gets wrong, bool
            `(N,)`.
        logits: of the model itself `(N, K)`, or those of the specification; None if only the graph
            is known.
        model: the model itself; None if only the graph is known.
        specification: what right means; None for labels.
    """

    graph: Graph
    x: Tensor
    y: Tensor
    norm: float
    domain: Domain
    wrong: Tensor
    logits: Tensor | None = None
    model: Model | None = None
    specification: Specification | None = None

    @classmethod
    def of(
        cls,
        model: Model | Graph,
        x: Tensor,
        y: Labels,
        norm: float,
        domain: Domain,
        arithmetic: str = "auto",
    ) -> Problem:
        """Read a model and judge the samples by it.

        Args:
            model: callable from a batch to logits, or a graph that was read.
            x: samples, inside the domain.
            y: labels, or a specification.
            norm: ground norm, 1, 2 or inf.
            domain: the box, or None.
            arithmetic: "executed", "exact" or "auto".
        """
        x, y = check_task(x, y, domain, None if isinstance(model, Graph) else model)
        goal = specification_of(y)
        logits = None
        if isinstance(model, Graph):
            graph = model
            said = _graph_logits(graph, x)
        else:
            with frozen(model):
                check_model(model, x, y)
            logits = said = batch_logits(model, x)
            graph = read(model, x.shape[1:], smooth=True, device=x.device, samples=x)
            check_batches(graph, x, logits, goal is not None)
        right = labels_of(y, HOST)
        if goal is not None:
            goal.check_outputs(graph.outputs)
            graph = specified(graph, goal.table)
            said = None if said is None else goal.to(HOST).logits(said)
            logits = None if logits is None else said
        wrong = torch.zeros(len(x), dtype=torch.bool)
        if said is not None:
            wrong = predict(said, right) != right
        return cls(
            arithmetic_of(graph, arithmetic, x.dtype),
            x.to(graph.device),
            right.to(graph.device),
            norm,
            fitted(domain, x),
            wrong,
            logits,
            None if isinstance(model, Graph) else model,
            goal,
        )

    def __len__(self) -> int:
        return len(self.x)

    @cached_property
    def labels(self) -> Tensor:
        """The labels on the CPU."""
        return self.y.cpu()

    @property
    def task(self) -> Labels:
        """What right means: the specification, or the labels."""
        return self.y if self.specification is None else self.specification

    @property
    def exact(self) -> Problem:
        """The same about the exact function."""
        return replace(self, graph=replace(self.graph, arithmetic="exact"))

    @property
    def unit(self) -> float:
        """Operations of one pass of one sample."""
        return self.graph.operations + NODE * len(self.graph.nodes)

    @property
    def small(self) -> bool:
        """Whether an exact search is worth its time."""
        return not self.graph.smooth and self.graph.neurons <= SMALL

    def take(self, rows: Tensor) -> Problem:
        """Some of the samples.

        Args:
            rows: places `(M,)`, on the CPU.
        """
        there = rows.to(self.x.device)
        goal = self.specification
        return replace(
            self,
            x=self.x[there],
            y=self.y[there],
            domain=box_at(self.domain, rows),
            wrong=self.wrong[rows],
            logits=None if self.logits is None else self.logits[rows],
            specification=None if goal is None else goal.take(rows),
        )

    def balls(self, radius: Tensor) -> Balls:
        """The balls of all samples.

        Args:
            radius: float64 `(N,)`.
        """
        return Balls.make(self.x, radius, self.norm, self.domain, self.targets)

    @cached_property
    def farthest(self) -> Tensor:
        """The distance of the farthest point of the domain from each sample, `(N,)` on the CPU, inf
        without a box.
        """
        x = self.x.cpu().double()
        if self.domain is None:
            return torch.full((len(x),), math.inf, dtype=torch.float64)
        low, high = sides(self.domain, x)
        far = torch.maximum(x - low, high - x).flatten(1)
        length: Tensor = torch.linalg.vector_norm(far, self.norm, dim=1)
        return length

    def bounds(self, radius: Tensor) -> Tensor:
        """Linear bounds on the margins over the balls, `(N, K)`.

        Args:
            radius: float64 `(N,)`.
        """
        return margins(Sweep(self.graph, self.balls(radius)).run(), self.y)[0]

    def slack(self, radius: Tensor) -> Tensor | None:
        """How far executed margins may be from exact ones on the balls, `(N, K)` on the CPU; None
        in exact arithmetic.

        Args:
            radius: float64 `(N,)`.
        """
        if self.graph.arithmetic == "exact":
            return None
        found = [torch.zeros(0, self.graph.outputs, dtype=torch.float64)]
        for rows in torch.split(torch.arange(len(self)), BATCH) if len(self) else ():
            part = self.take(rows)
            sweep = Sweep(self.graph, part.balls(radius[rows])).run()
            found.append(margin_errors(sweep, part.y).cpu())
        return torch.cat(found)

    def outputs(self, points: Tensor) -> Tensor:
        """Outputs of the graph at one point for each sample, `(N, K)` in float64; minus infinity
        where one is no rival.

        Args:
            points: `(N, *shape)`.
        """
        z = self.graph.logits(points)
        if self.targets is None:
            return z
        rivals = self.targets.matters.clone()
        rivals[:, 0] = True
        return torch.where(rivals, z + self.targets.offsets, -math.inf)

    @cached_property
    def targets(self) -> Targets | None:
        """Constants and rivals of a specification, where the network is: output 1 + r is minus row
        r of its table, and the smallest offset counts where a sample has a row twice.
        """
        goal = self.specification
        if goal is None:
            return None
        count = len(goal.table)
        shape = goal.constants.shape
        place = torch.arange(count).expand(shape) if goal.chosen is None else goal.chosen.cpu()
        least = torch.full((shape[0], count), math.inf, dtype=torch.float64)
        least = least.scatter_reduce(1, place, goal.constants.cpu(), "amin")
        own = torch.zeros(shape[0], 1, dtype=torch.float64)
        matters = torch.cat([own > 0, torch.isfinite(least)], 1)
        offsets = torch.cat([own, torch.where(torch.isfinite(least), -least, 0.0)], 1)
        return Targets(offsets.to(self.graph.device), matters.to(self.graph.device))

    def alone(self) -> tuple[Graph, Tensor]:
        """The network of a problem of one sample, with the outputs that matter to it and their
        constants, and which of all outputs these are, `(J,)`.
        """
        if self.targets is None:
            return self.graph, torch.arange(self.graph.outputs)
        rivals = self.targets.matters[0].clone()
        rivals[0] = True
        columns = rivals.nonzero()[:, 0]
        return settled(self.graph, columns, self.targets.offsets[0, columns]), columns.cpu()


def _graph_logits(graph: Graph, x: Tensor) -> Tensor | None:
    """What a graph says of the samples, on the CPU; None without samples."""
    parts = [graph.logits(part.to(graph.device)).cpu() for part in torch.split(x, 64) if len(x)]
    return torch.cat(parts) if parts else None
