"""The paper's corollary for transformers: its table, and ours beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.graph import Graph, Node, Smooth
from wassail.certificates.graph.maps import Pick, Sum
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.planes import Span
from wassail.certificates.graph.region import Region, Where
from wassail.certificates.lipschitz.kinks import on_kinks
from wassail.certificates.lipschitz.steepest import (
    as_graph,
    ascend,
    jacobian_norms,
    jacobians,
    room_of,
)
from wassail.network import Model
from wassail.paper.attention_bounds import castin, spectral
from wassail.paper.attention_layout import Attention, find, normalised
from wassail.paper.transformer_constants import (
    ROOM,
    UP,
    TransformerConstants,
    everywhere,
    log,
    log_product,
    log_sum,
    radius,
)
from wassail.records import Record
from wassail.rounding import FLOOR
from wassail.threat import Number, dual, parse_norm, show

FLOAT32 = 38.5  # log10 of the largest number that float32 holds
# of the ascents
STARTS = 5
ROUNDS = 4
HOPELESS = 6.0  # a bound this many decades above what was found is called vacuous


class Row(NamedTuple):
    """One module: block 0 for embedding and head, else the number of the block; constants on R^n,
    and on the domain.

    Ours have gain and bias of a LayerNorm as a part of the module after it.
    """

    block: int
    kind: str
    place: str
    paper: float
    ours: float
    local: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Corollary(Record):
    """The paper's bound for transformers with its constants, ours beside it, and the steepest point
    that was found.

    Args:
        norm: ground norm r.
        domain: where `local` and `empirical` are taken.
        style: "pre-LN", "post-LN", "mixed" or "no LayerNorm".
        inputs: number of inputs n.
        outputs: number of classes K.
        rows: one for each module.
        paper: log10 of Lambda, a bound on `sup ||J||_{2 -> 2}`, with the paper's constants.
        ours: the same with our constants on R^n.
        local: the same with ours on the domain, or by a walk over all of it; None if that is R^n.
        empirical: `||J||_{2 -> 2}` at the steepest point found, a lower bound.
        slope: `2^(1/r) ||J||_{r -> s}` there, a lower bound.
        witness: that point, `(n,)`.
    """

    norm: float
    domain: str
    style: str
    inputs: int
    outputs: int
    rows: tuple[Row, ...]
    paper: float
    ours: float
    local: float | None
    empirical: float
    slope: float
    witness: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(Row(*row) for row in self.rows))

    @property
    def conversion(self) -> float:
        """What takes Lambda to the paper's L for the norm r: `2^(1/r) (n K)^((1/2 - 1/r)_+)`."""
        return float(
            2 ** (1 / self.norm) * (self.inputs * self.outputs) ** max(0.0, 0.5 - 1 / self.norm)
        )

    @property
    def best(self) -> float:
        """log10 of the least of the bounds that hold on the domain."""
        return self.ours if self.local is None else min(self.ours, self.local)

    @property
    def decades(self) -> float:
        """log10 of `looseness`."""
        return self.best - math.log10(self.empirical) if self.empirical > 0 else math.inf

    @property
    def looseness(self) -> float:
        """That bound over the steepest slope found, both Euclidean; inf above every float64."""
        return 10**self.decades if self.decades < 308 else math.inf

    @property
    def vacuous(self) -> bool:
        """Whether the bound says nothing: a million times what was found or more, or above
        every number of float32.
        """
        return self.decades >= HOPELESS or self.best >= FLOAT32

    @property
    def covered(self) -> bool:
        """Whether the corollary is about networks like this: Pre-LN only."""
        return self.style == "pre-LN"

    def __str__(self) -> str:
        domain = "" if self.local is None else f"{'on the domain':>15}"
        lines = [f"{'block':>5}  {'module':<13}{'paper':>11}{'ours':>11}{domain}"]
        for row in self.rows:
            local = "" if row.local is None else f"{row.local:>15.4g}"
            lines.append(
                f"{row.block or '':>5}  {row.kind:<13}{row.paper:>11.4g}{row.ours:>11.4g}{local} "
                f" {row.place}"
            )
        sides = [
            ("paper", self.paper),
            ("ours", self.ours),
            *([] if self.local is None else [("on the domain", self.local)]),
        ]
        lines.append("Lambda: " + ", ".join(f"{name} {_power(value)}" for name, value in sides))
        far = _power(self.decades)
        lines.append(
            f"steepest point found on {self.domain}: {self.empirical:.4g}, {far} times below the "
            "best of these"
        )
        extra = math.log10(self.conversion)
        lines.append(
            f"slope L for r = {show(self.norm)} (times {self.conversion:.4g}): at least "
            f"{self.slope:.4g}, "
            + ", ".join(f"{name} {_power(value + extra)}" for name, value in sides)
        )
        lines += [text for text, holds in self._remarks() if holds]
        return "\n".join(lines)

    def _remarks(self) -> list[tuple[str, bool]]:
        normed = any(row.kind == "LayerNorm" for row in self.rows)
        return [
            ("Ours have gain and bias of a LayerNorm as a part of the module after it.", normed),
            (
                "The bound is vacuous: a million times what was found, or above every number of "
                "float32.",
                self.vacuous,
            ),
            (
                f"The corollary is for Pre-LN, this network is {self.style}: a like product is "
                "shown.",
                not self.covered,
            ),
            (
                "Attention without a normalisation before it is not Lipschitz on R^n: bounds "
                "hold on boxes and balls only.",
                math.isinf(self.ours),
            ),
        ]


@dataclass(frozen=True, eq=False)
class PaperWalk(TransformerConstants):
    """The paper's constants on R^n: norms of the layers one by one, LayerNorm `max|g| / sqrt(eps)`,
    attention by Castin et al.

    Heads add as `sum_h |W_h| Lip_h` (their Lemma 3.8). Tokens are those after the LayerNorm, with
    `R = sqrt(d) max|g| + |b|`.
    """

    @classmethod
    def make(
        cls, graph: Graph, region: Region, known: Mapping[int, Span] | None = None
    ) -> PaperWalk:
        """The same for every region."""
        graph = graph.to(HOST)
        return cls(
            graph, everywhere(graph, Region.make(None, graph.inputs)), find(graph, outer=True)
        )

    def either(self, steps: float, module: float) -> float:
        """Attention as one module."""
        return module

    def linear(self, i: int) -> Iterator[tuple[int, float]]:
        """The norm of the layer alone."""
        return iter([next(super().linear(i))])

    def slope(self, i: int) -> float:
        """The largest slope on R^n."""
        node = self.graph.nodes[i]
        if isinstance(node.curve, Normalise):
            return -0.5 * math.log(node.curve.eps) if node.curve.eps > 0 else math.inf
        if isinstance(node.op, Smooth):
            return math.inf if node.op.seen else log(node.op.steepest)
        return super().slope(i)

    def attention_bound(self, attention: Attention) -> float:
        """By Castin et al., summed over the heads."""
        reach = radius(self.graph, attention.source)
        return math.fsum(
            float(spectral(w)) * castin(attention.tokens, a, v, reach, u)
            for w, a, v, u in zip(attention.out, attention.a, attention.value, attention.bias)
        )


def _power(value: float) -> str:
    """Ten to this power, as people write it."""
    if math.isinf(value):
        return "inf"
    return f"{10**value:.4g}" if -4 < value < 6 else f"10^{value:.2f}"


class _Module(NamedTuple):
    """From where to where a constant is taken, in our walk and in the paper's; branch: of which
    residual sum, 0 for none.
    """

    branch: int
    block: int
    kind: str
    ours: tuple[int, int]
    paper: tuple[int, int]


def corollary(
    model: Model | Graph,
    norm: Number = 2,
    domain: Where = None,
    shape: Sequence[int] | None = None,
    seed: int = 0,
) -> Corollary:
    """`Lambda` of the paper's corollary, module by module, with its constants and with ours, beside
    what an ascent finds.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        norm: ground norm r, 1, 2 or inf; default 2.
        domain: a box, a `Ball`, or None (the default) for R^n: where the local constants hold and
            the ascent searches.
        shape: of one sample; default None, what the first layer tells.
        seed: int of the ascent's random starts; default 0.

    Returns:
        `Corollary`.
    """
    graph = as_graph(model, domain, shape)
    r = parse_norm(norm)
    region, whole = (Region.make(where, graph.inputs, graph.device) for where in (domain, None))
    walks: list[TransformerConstants] = [
        PaperWalk.make(graph, whole),
        TransformerConstants.make(graph, whole),
    ]
    if region.low.isfinite().any() or region.high.isfinite().any() or region.bounded:
        walks.append(TransformerConstants.make(graph, region))
    style, parts = _modules(graph)
    logs = [
        [walk.stretch(*(part.paper if k == 0 else part.ours)) for part in parts]
        for k, walk in enumerate(walks)
    ]
    totals = [_lambda(parts, values) / math.log(10) + UP for values in logs]
    rows = tuple(
        Row(
            part.block,
            part.kind,
            graph.nodes[part.ours[1]].place,
            *map(_exp, values),
            *[None] * (3 - len(walks)),
        )
        for part, values in zip(parts, zip(*logs))
    )
    empirical, witness = _climb(graph, region, 2, seed)
    slope = 2 ** (1 / r) * (empirical if r == 2 else _climb(graph, region, r, seed)[0])
    local = (
        min(totals[2], walks[2].stretch(0, len(graph.nodes) - 1) / math.log(10) + UP)
        if len(walks) > 2
        else None
    )
    return Corollary(
        r,
        str(region),
        style,
        graph.inputs,
        graph.outputs,
        rows,
        totals[0],
        totals[1],
        local,
        empirical,
        slope,
        witness.cpu(),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf


def _lambda(parts: Sequence[_Module], logs: Sequence[float]) -> float:
    """`L_head L_emb prod_h (1 + ...)`, as a logarithm: modules outside of branches multiply, a
    branch is 1 plus its product.
    """
    branches: dict[int, float] = {}
    total = 0.0
    for part, value in zip(parts, logs):
        if part.branch:
            branches[part.branch] = log_product(branches.get(part.branch, 0.0), value)
        else:
            total = log_product(total, value)
    return log_product(total, math.fsum(log_sum([0.0, value]) for value in branches.values()))


def _modules(graph: Graph) -> tuple[str, list[_Module]]:
    """The style of the network, and its modules in order: residual blocks, what is before,
    between and after them.
    """
    found: list[_Module] = []
    styles: set[str] = set()
    last = len(graph.nodes) - 1
    at = 0
    count = 0
    block = 0
    for start, end in pairwise([0, *_cuts(graph, 0, last)]):
        branch = _branch(graph, start, end)
        if branch is None:
            continue
        if start > at or not count:
            normed = any(isinstance(graph.nodes[i].curve, Normalise) for i in range(at, start))
            kind = "embedding" if not count else "LayerNorm" if normed else "between"
            found.append(_Module(0, block, kind, (at, start), (at, start)))
        norm = _norm_of(graph, start, branch)
        styles.add("post-LN" if norm is None else "pre-LN")
        attention = any(isinstance(graph.nodes[i].curve, Softmax) for i in range(start, end))
        count = count + 1
        block = block + (attention or not block)
        inner, outer = (start, start) if norm is None else norm
        if norm is not None:
            found.append(_Module(count, block, "LayerNorm", (start, inner), (start, outer)))
        found.append(
            _Module(
                count,
                block,
                "attention" if attention else "feed-forward",
                (inner, branch),
                (outer, branch),
            )
        )
        at = end
    found.append(_Module(0, 0, "head" if count else "network", (at, last), (at, last)))
    if not any(isinstance(node.curve, Normalise) for node in graph.nodes):
        return "no LayerNorm", found
    return styles.pop() if len(styles) == 1 else "mixed", found


def _cuts(graph: Graph, source: int, target: int) -> list[int]:
    """The nodes after source that every path from source to target goes through, target among
    them.
    """
    reached = {source}
    for i in range(source + 1, target + 1):
        if not _constant(graph.nodes[i]) and any(j in reached for j in graph.nodes[i].inputs):
            reached.add(i)
    needed = {target}
    for i in range(target, source, -1):
        if i in needed and i in reached:
            needed |= set(graph.nodes[i].inputs) & reached
    edges = [(j, i) for i in needed if i > source for j in graph.nodes[i].inputs if j in needed]
    return [c for c in sorted(needed) if c > source and not any(j < c < i for j, i in edges)]


def _constant(node: Node) -> bool:
    """Whether it is a bias alone, such as a class token."""
    return (
        isinstance(node.map, Pick)
        and node.map.source is not None
        and bool((node.map.source < 0).all())
    )


def _branch(graph: Graph, start: int, end: int) -> int | None:
    """The end of the branch of a residual block `start + branch(start)`; None for another step."""
    node = graph.nodes[end]
    if (
        not isinstance(node.map, Sum)
        or len(node.inputs) != 2
        or start not in node.inputs
        or node.inputs[0] == node.inputs[1]
    ):
        return None
    return node.inputs[1] if node.inputs[0] == start else node.inputs[0]


def _norm_of(graph: Graph, start: int, branch: int) -> tuple[int, int] | None:
    """The `Normalise` that a branch begins with, and the node of its gain and bias; None if it
    begins with something else.
    """
    stops = _cuts(graph, start, branch)
    for k, i in enumerate(stops):
        if isinstance(graph.nodes[i].curve, Normalise):
            after = stops[k + 1] if k + 1 < len(stops) else i
            return i, after if normalised(graph, after) else i
        if graph.nodes[i].map is None:
            break
    return None


def _climb(graph: Graph, region: Region, r: float, seed: int) -> tuple[float, Tensor]:
    """The largest `||J||_{r -> s}` that ascents from random points find, and where; of several
    sizes if there is no end.
    """
    generator = torch.Generator().manual_seed(seed)
    best = -1.0
    witness = region.centre
    for spread in (1.0,) if region.bounded else (0.1, 1.0, 10.0):
        x = torch.cat(
            [region.sample(STARTS, generator, spread), region.inside(_flattest(graph, region))]
        )
        for _ in range(ROUNDS):  # the steepest combination of logits is chosen anew in each
            x = ascend(graph, region, x, r, dual(r), None if region.bounded else spread)
            values = jacobian_norms(jacobians(graph, x), r, dual(r))
            values = torch.where(on_kinks(graph, x), 0.0, values)
            top = int(values.argmax())
            if float(values[top]) > best:
                best = float(values[top])
                witness = x[top]
    return best * (1 - room_of(graph.outputs, graph.inputs)), witness


def _flattest(graph: Graph, region: Region) -> Tensor:
    """`(1, n)`: where the first normalised tokens vary least, by least squares, since LayerNorm is
    steepest there.

    The centre of the region if these tokens are no affine function of the input, or if there are
    too many.
    """
    first = next((node.inputs[0] for node in graph.nodes if isinstance(node.curve, Normalise)), 0)
    before = Graph(graph.nodes[: first + 1])
    if (
        before.smooth
        or any(node.slope is not None for node in before.nodes)
        or before.inputs * before.outputs > ROOM
    ):
        return region.centre[None]
    shape = graph.nodes[0].shape
    n = graph.inputs
    start = before.logits(region.centre.reshape(1, *shape)).flatten()
    moves = (
        before.logits(
            (region.centre + torch.eye(n, dtype=torch.float64, device=start.device)).reshape(
                n, *shape
            )
        ).flatten(1)
        - start
    )
    # On the CPU, which has the solver for matrices without full rank.
    least: Tensor = torch.linalg.lstsq(moves.T.to(HOST), -start[:, None].to(HOST)).solution.T
    # The last digits differ from run to run, and an ascent beside a LayerNorm's steepest place
    # would follow them.
    step = 2.0 ** math.ceil(math.log2(float(least.abs().amax()) + FLOOR[torch.float64])) * 2.0**-24
    least = (least / step).round() * step
    return region.centre + least.to(start.device)
