"""`certify`: bounds on the worst-case loss over `Omega_1(eps)`, with the distribution behind
the lower side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bound import Bound, below
from wassail.certificates.device import HOST
from wassail.certificates.exact.infinity import tightness
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Region
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.loss.certificate import SLOPES, Certificate
from wassail.certificates.loss.chords import (
    ChordSearch,
    Tail,
    chords,
    clean_above,
)
from wassail.certificates.loss.curve import total_of
from wassail.certificates.loss.labels import Labels, loss_above
from wassail.certificates.loss.others import OthersCertificate
from wassail.certificates.loss.pairs import pairs_of
from wassail.certificates.loss.recession import Shadow, recession, shadow
from wassail.certificates.loss.residual_certificate import certify_errors
from wassail.certificates.loss.samples import (
    DEFAULT_DELTA,
    DEFAULT_QUANTILE,
    Asked,
    Samples,
    labelled,
)
from wassail.certificates.loss.slope_search import WORK, SlopeSearch
from wassail.certificates.loss.slopes import highest_loss
from wassail.certificates.loss.worst_case import anchor_and_offset
from wassail.certificates.relax.crown import margin_bounds
from wassail.errors import InputError, unknown
from wassail.geometry import vector_norm
from wassail.losses import LIPSCHITZ, predict
from wassail.names import ERRORS
from wassail.network import Model
from wassail.progress import Progress, progress_bar
from wassail.rounding import UNIT
from wassail.threat import (
    Domain,
    Number,
    dual,
    number,
    parse_label_cost,
    parse_subpopulation,
)
from wassail.transport.allocation import sample_weights

# networks whose cells are all looked at
CELLS_INPUTS = 6
CELLS_NEURONS = 40
CELLS = 1500
# smooth networks whose steepest chord is closed in by boxes
FEW_INPUTS = 2
FEW_SAMPLES = 50
POINTS = 1 / 8  # of the time, for the points after the slopes


def certify(  # noqa: PLR0913
    model: Model | Graph,
    x: Tensor,
    y: Tensor,
    norm: Number = 2,
    loss: str = "cross_entropy",
    domain: Domain = None,
    *,
    slopes: Iterable[str] = SLOPES,
    mu: Tensor | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    label_cost: Number = math.inf,
    subpopulation: Number = 1,
    quantile: Number = DEFAULT_QUANTILE,
    delta: Number = DEFAULT_DELTA,
    progress: Progress = False,
) -> Certificate:
    """Bounds on the worst expected loss over `Omega_1(eps)` for every eps, from both sides (THEORY
    3).

    Small networks get exact slopes by their cells and by branch and bound, large ones brackets by
    propagation and points. For smooth networks (GELU, SiLU, Softplus, ELU, sigmoid, tanh,
    LayerNorm, attention) the slope at infinity is that of their recession function, and the upper
    slopes are those of `lipschitz`. An interrupt keeps the slopes that are done.

    The defaults are those of the paper's theorem, the l2 norm on all of R^n; `radii`, `nearest` and
    `loss_curve` have linf on the box [0, 1], the threat of the benchmarks.

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`; for the losses of regression targets, `(N,)` or
            `(N, K)`.
        norm: ground norm r, 1, 2 or inf; default 2.
        loss: "cross_entropy" (the default) or "margin"; not DLR, which is not Lipschitz. For
            regression "absolute", "pinball" or "huber".
        domain: box `(low, high)`, or None (the default) for R^n.
        slopes: which of "infinity", "anchor", "margin", "paper" to compute; default all. Regression
            has no "paper".
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        time_limit: seconds for all slopes, shared evenly; `info["cut"]` says whether it stopped
            something; default None, a budget of work (about a minute), so that the answer does not
            depend on the clock.
        seed: int of the random starts; default 0.
        label_cost: price of a changed label, in the units of eps; default inf. Slopes are then
            those of all K labels. For regression the price of moving a target by one unit.
        subpopulation: least share of the population that is there; default 1.
        quantile: of the pinball loss; default 0.5.
        delta: of the Huber loss; default 1.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Certificate`: `bounds(eps)`, `witness(eps)` and the slopes.
    """
    wanted = tuple(slopes)
    if loss in ERRORS:
        asked = Asked(norm, 1, loss, domain, quantile, delta, mu=mu, time_limit=time_limit)
        others = replace(asked, label_cost=label_cost, subpopulation=subpopulation)
        return certify_errors(model, x, y, others, wanted, seed)
    for name in wanted:
        if name not in SLOPES:
            raise unknown("slope", name, SLOPES)
    limit = None if time_limit is None else clock.now() + number(time_limit, "time_limit")
    asked = Asked(norm, 1, loss, domain, arithmetic="exact")
    samples = labelled(model, x, y, asked)
    with progress_bar(progress, "certificate") as report:
        own = samples.loss.rows.cpu()
        weights = sample_weights(mu, len(own))
        price, share = parse_label_cost(label_cost), parse_subpopulation(subpopulation)
        rows = pairs_of(samples.x.cpu(), own, weights, samples.graph.outputs, price)
        pairs = replace(samples, x=rows[0], loss=Labels(loss, rows[1]))
        left = None if limit is None else limit - clock.now()
        with clock.limited(left, WORK if left is None else math.inf):
            found = ClassSlopes(pairs, rows[2], seed).run(wanted, report)
        if price == math.inf and share == 1:
            return found
        return _with_others(found, samples.graph, own, weights, price, share)


def _with_others(
    pairs: Certificate, graph: Graph, y: Tensor, mu: Tensor, label_cost: float, share: float
) -> OthersCertificate:
    """The certificate of samples from that of their pairs with labels."""
    parts = torch.split(pairs.x, 256)
    z = torch.cat([graph.logits(part.to(graph.device).double()).cpu() for part in parts])
    clean = LIPSCHITZ[pairs.loss](z, pairs.y)
    start = clean_above(graph, pairs.x, pairs.y, pairs.loss).cpu()
    return OthersCertificate.of(pairs, y, mu, clean, start, label_cost, share)


class ClassSlopes(SlopeSearch):
    """The slopes of a loss of classes."""

    names = ("margin", "paper", "infinity", "anchor")

    def __init__(self, samples: Samples, mu: Tensor, seed: int) -> None:
        super().__init__(samples, mu, seed)
        graph = samples.graph
        self.x, self.y = samples.x, samples.loss.rows
        self.loss, self.domain = samples.loss.loss, samples.domain
        self.labels = sorted(set(self.y.tolist()))
        # the CPU's, like samples and cells; propagation has its own
        self.region = Region.make(self.domain, graph.inputs)
        self.tight: bool | None = None
        self.seen: tuple[Tensor, Tensor] | None = None
        # On R^n a smooth network is within a fixed distance of a piecewise-linear one; in a box
        # that one is of no use.
        self.shadow = (
            Shadow(graph.to(HOST), {})
            if not graph.smooth
            else None
            if self.region.bounded
            else shadow(graph)
        )
        flat = None if self.shadow is None else self.shadow.graph
        small = flat is not None and flat.neurons <= CELLS_NEURONS and graph.inputs <= CELLS_INPUTS
        with clock.unlimited():  # a small one
            self.small: Piecewise | None = flat.piecewise() if flat is not None and small else None

    def run(self, wanted: tuple[str, ...], report: Any) -> Certificate:
        """Every slope asked for, then the chords and the losses at the samples."""
        interrupted = False
        try:
            with clock.limited(clock.seconds_left() * (1 - POINTS)):
                self.search(self._todo(wanted), report)
        except KeyboardInterrupt:  # what is computed stays
            interrupted = True
        found = chords(
            self.graph, self.x, self.y, self.norm, self.domain, self.loss, self._rays(), self.seen
        )
        self.settle(found)
        parts = torch.split(self.x.double(), 256)
        z = torch.cat([self.graph.logits(part.to(self.graph.device)).cpu() for part in parts])
        clean = LIPSCHITZ[self.loss](z, self.y)
        above = self._loss_above()
        known = self.fields(wanted, found, clean, predict(z, self.y), above)
        more: dict[str, Any] = {"labels": self.labels}
        if not self.graph.smooth:
            more["neurons"] = self.graph.neurons
        if interrupted:
            more["interrupted"] = True
        return Certificate(**{**known, "info": {**known["info"], **more}}, tight=self.tight)

    def _todo(self, wanted: tuple[str, ...]) -> tuple[str, ...]:
        """A chord is at most as steep as the margins: without cells, S has no upper side but
        theirs.
        """
        cells = self.small is not None and not self.graph.smooth
        return (*wanted, "margin") if "anchor" in wanted and not cells else wanted

    def _loss_above(self) -> float:
        """No less than the mean loss at the samples. It is computed, too: what rounding may have
        taken from it belongs to the upper side.
        """
        parts = zip(*(torch.split(v.to(self.graph.device), 256) for v in (self.x, self.y)))
        where = (0.0, self.norm, self.domain)
        try:
            with clock.timed():
                found = [margin_bounds(self.graph, x, y, *where).cpu() for x, y in parts]
        except clock.Late:
            self.cut = True
            return total_of(self.mu, clean_above(self.graph, self.x, self.y, self.loss).cpu())
        margin = torch.cat(found)
        return total_of(self.mu, loss_above(margin, self.y, self.loss))

    def _rays(self) -> list[tuple[int, Tensor]]:
        """The steepest ray and its label, on R^n."""
        steepest = self.found.get("infinity")
        if self.domain is not None or steepest is None or "label" not in steepest.info:
            return []
        assert steepest.witness is not None
        return [(int(steepest.info["label"]), steepest.witness)]

    def _margin(self) -> None:
        self.found["margin"] = lipschitz(
            self.graph, self.norm, self.domain, labels=self.labels, seed=self.seed
        )

    def _paper(self) -> None:
        factor = 2 ** (1 / self.norm)
        bound = lipschitz(
            self.graph,
            self.norm,
            self.domain,
            outputs="logits",
            norm_out=dual(self.norm),
            seed=self.seed,
        )
        low = factor * bound.lower * (1 - 4 * UNIT)
        high = factor * bound.upper * (1 + 4 * UNIT)
        self.found["paper"] = Bound(low, high, bound.method, bound.witness, bound.info)

    def _infinity(self) -> None:
        far = None if self.region.bounded else recession(self.graph)
        if far is None:
            self.found["infinity"] = Bound(
                0.0, 0.0, "bounded domain" if self.region.bounded else "bounded"
            )
        else:
            self.found["infinity"] = self.at_infinity(far, self.labels)

    def _anchor(self) -> None:
        # filled from its neighbours and the chords
        self.found["anchor"] = Bound(0.0, math.inf, "margin")
        if self.small is not None:
            parts = 2 if self.graph.smooth else 1
            with clock.limited(clock.seconds_left() / parts, clock.work_left() / parts):
                self._cells(self.small)
        few = (
            self.graph.inputs <= FEW_INPUTS
            and len(self.x) <= FEW_SAMPLES
            and len(self.graph.nodes[0].shape) == 1
        )
        if self.graph.smooth and few:
            self._boxes()

    def _cells(self, network: Piecewise) -> None:
        """From the cells of a small network, S and the second line; of a smooth one's shadow,
        the line and points to try.
        """
        assert self.shadow is not None
        x = self.x.double().flatten(1)
        fine = 1e-4 if self.loss == "cross_entropy" else 1e-6
        # In a box a line that hardly rises caps the loss; on R^n nothing is finite below the slope
        # at infinity.
        known = self.found.get("infinity")
        lam = (
            1e-9
            if self.domain is not None
            else math.inf
            if known is None
            else known.upper * (1 + 1e-9)
        )
        try:
            chord, offset, self.seen = anchor_and_offset(
                network,
                x,
                self.y,
                lam,
                norm=self.norm,
                domain=self.domain,
                loss=self.loss,
                mu=self.mu,
                tolerance=fine,
                cells_limit=CELLS,
            )
        except (InputError, clock.Late):  # too many cells
            return
        if math.isfinite(offset) and math.isfinite(lam):
            # Either loss changes by no more than the margin that changes most.
            error = {k: self.shadow.margin_error(k).max() for k in self.labels}
            self.line = (
                lam,
                offset + total_of(self.mu, torch.stack([error[k] for k in self.y.tolist()])),
            )
        if not self.graph.smooth:
            self.found["anchor"] = chord
            if self.domain is None:
                self.tight = tightness(network, self.norm, self.labels).tight

    def _tail(self) -> Tail | None:
        """`loss(x, y_i) <= lam ||x - x_i|| + height_i` on the whole domain, for networks of any
        size.

        A loss that is bounded has lam = 0. On R^n the margins differ from those of the recession
        function by at most their drift, so that `loss(x, k) <= l ||x|| + loss of the drift`, and
        `||x|| <= ||x_i|| + ||x - x_i||`.
        """
        most = highest_loss(self.graph, self.labels, self.loss, self.domain)
        which = torch.searchsorted(torch.tensor(self.labels), self.y)
        if bool(torch.isfinite(most).all()):
            return Tail(0.0, most[which])
        known = self.found.get("infinity")
        if known is None or self.shadow is None:
            return None
        drift = torch.stack([self.shadow.drift(k) for k in self.labels])
        start = loss_above(-drift, torch.tensor(self.labels), self.loss)[which]
        lam = known.upper * (1 + 1e-9)
        size = lam * vector_norm(self.x.double(), self.norm) * (1 + (self.graph.inputs + 4) * UNIT)
        return Tail(lam, start + size + UNIT * (start.abs() + size))

    def find_line(self) -> None:
        """The second line from the tail, where the cells have not found one; of two with the
        same slope the lower one.
        """
        if not self.found.keys() & {"infinity", "anchor"}:
            return
        if self.line is None or self.graph.smooth:
            tail = self._tail()
            lines = [] if self.line is None else [self.line]
            if tail is not None:
                lines.append((tail.lam, total_of(self.mu, tail.height)))
            self.line = min(lines, default=None)

    def _boxes(self) -> None:
        """S of a smooth network with one or two inputs."""
        tail = None if self.region.bounded else self._tail()
        if tail is None and not self.region.bounded:  # nothing is known far away
            return
        search = ChordSearch(
            self.graph.to(HOST),
            self.x,
            self.y,
            self.norm,
            self.domain,
            self.loss,
            self.found["margin"].upper,
            tail,
        )
        upper = search.run()
        self.found["anchor"] = Bound(below(search.steepest, upper, "anchor"), upper, "boxes")
        parts = [
            (search.found.root, search.found.points),
            *([] if self.seen is None else [self.seen]),
        ]
        self.seen = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
