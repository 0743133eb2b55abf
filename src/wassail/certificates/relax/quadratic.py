"""Quadratic bounds on the margins of one sample: the dual of a semidefinite relaxation.

Linear bounds replace every undecided ReLU by lines, and lose what its neighbours have in common.
Here the neurons stay variables (Raghunathan et al. 2018, Dathathri et al. 2020). With `v = relu(z)`
the output of an undecided neuron and `z` its input, an affine function of the variables before it,
the following are at least 0 on the ball, the third for multipliers of any sign:

    a v,   b (v - z),   c v (z - v),   e (slope (z - low) - v),   d (1 - s^2)

The last is for every variable, the inputs too, written as `middle + half s` with `|s| <= 1`. Their
sum is added to `theta_rival - theta_y`. The result is a quadratic function of the variables, and if
it is concave its maximum is one system of linear equations. That bounds the margin for any
multipliers >= 0. They are chosen by Adam on their logarithms. A barrier, `log det`, keeps the
function concave on the way. a, b and e alone are CROWN: there it begins.

What is claimed is evaluated once more with all rounding errors (`Relaxation.claimed`). It does not
rely on the factorisation: `A - L L'` is computed, and what it lacks to be 0 is charged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph, Node
from wassail.certificates.graph.maps import rounding_map
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.executed import margin_errors
from wassail.certificates.relax.rows import Span
from wassail.rounding import FAINT, UNIT

VARIABLES = 800  # at most: the operations of a step grow with their third power
CUBE = 0.08  # operations of a step, of the third power of the number of variables
QUADRATIC = (200, 800)  # steps for a rival, the least effort first
NUMBERS = 2**25  # of all affine functions of one node, at most
SURE = 1 + 2.0**-20  # covers the rounding of sums of errors
LARGE = 2.0**300  # magnitudes stay below this, so that underflow is below `FAINT`

# The ascent. Steps on logarithms shrink from the first rate to the last. The weight of the barrier
# is told in units of the margin at the sample, shared among the variables.
RATES = (0.2, 0.05)
BARRIER = (0.5, 0.1)
BELOW = 0.03  # multipliers that CROWN leaves at 0, relative to the coefficients of their neurons
CURVATURE = 0.05  # the first c, relative to the coefficients
SPREAD = 0.05  # the least d of the inputs, relative to their mean
BACK = 0.3  # of a step that left the concave functions


def has_quadratics(graph: Graph, norm: float) -> bool:
    """Whether quadratic bounds are tried: a network of ReLUs that is not too large, balls that are
    boxes.
    """
    plain = all(
        node.act is None or (node.slope is not None and not bool(node.slope.any()))
        for node in graph.nodes
    )
    if not plain or graph.curved or norm != math.inf:
        return False
    return 0 < graph.neurons <= 2 * VARIABLES - graph.inputs  # about half are undecided


@dataclass(frozen=True, eq=False)
class Forms:
    """The undecided neurons of one sample as affine functions of n variables `s`, all in [-1, 1].

    The first n - m variables are inputs, the others the outputs of m undecided neurons, `half (1 +
    s)`. rows `(m, n)` and base `(m,)`: of the inputs of these neurons; error `(m,)`: how far they
    are from the exact ones; low, high `(m,)`: their range; half `(m,)`; parts: of each node, its
    neurons. logits `(K, n)`, logit_base and logit_error `(K,)`: the same of the logits.
    """

    rows: Tensor
    base: Tensor
    error: Tensor
    low: Tensor
    high: Tensor
    half: Tensor
    parts: tuple[slice, ...]
    logits: Tensor
    logit_base: Tensor
    logit_error: Tensor

    def single(self) -> Forms:
        """The same in float32, for an ascent."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in found.items():
            if isinstance(value, Tensor):
                found[name] = value.float()
        return Forms(**found)

    @property
    def variables(self) -> int:
        """N."""
        return self.logits.shape[1]

    @property
    def operations(self) -> float:
        """Of one step."""
        return CUBE * self.variables**3 + clock.STEP


def forms_of(sweep: Sweep, ranges: dict[int, Span], k: int) -> Forms | None:
    """The forms of sample k of a sweep, on the CPU; None if they are too many, or not finite.

    ranges: what `sweep.proved` returns.
    """
    nodes = sweep.graph.nodes
    relus = [(i, node.inputs[0]) for i, node in enumerate(nodes) if node.act is not None]
    sides = {j: (ranges[j][0][k].flatten(), ranges[j][1][k].flatten()) for _, j in relus}
    open_ = {i: ((sides[j][0] < 0) & (sides[j][1] > 0)).nonzero()[:, 0] for i, j in relus}
    inputs = sweep.graph.inputs
    n = inputs + sum(len(own) for own in open_.values())
    if n > VARIABLES or (n + 1) * max(node.size for node in nodes) > NUMBERS:
        return None
    # Row 0 is the constant, then one row for each variable.
    forms: dict[int, Tensor] = {0: _input_rows(sweep, k, n)}
    errors: dict[int, Tensor] = {0: forms[0].new_zeros(1, *nodes[0].shape)}
    found: list[tuple[Tensor, ...]] = []
    start = inputs
    for i, node in enumerate(nodes):
        if node.map is not None:
            given = [forms[j] for j in node.inputs]
            forms[i] = node.map.forward(*given)
            if node.bias is not None:
                # Not in place: a reshape returns a view of its input's form.
                forms[i] = torch.cat([forms[i][:1] + node.bias, forms[i][1:]])
            errors[i] = _affine_error(sweep.graph, node, given, [errors[j] for j in node.inputs])
        elif node.inputs:
            j = node.inputs[0]
            low, high = sides[j]
            places = open_[i]
            flat = forms[j].flatten(1)
            error = errors[j].flatten()
            own = flat[:, places]
            found.append((own[1:].T, own[0], error[places], low[places], high[places]))
            on = (low >= 0).double()
            after = flat * on
            after[0, places] = high[places] / 2
            variable = 1 + start + torch.arange(len(places), device=places.device)
            after[variable, places] = high[places] / 2
            start += len(places)
            forms[i] = after.reshape(-1, *node.shape)
            errors[i] = (error * on).reshape(1, *node.shape)
    last = len(nodes) - 1
    rows, base, error, low, high = (torch.cat(v).cpu() for v in zip(*found))
    ends = torch.tensor([0, *(len(own[1]) for own in found)]).cumsum(0).tolist()
    parts = tuple(slice(a, b) for a, b in itertools.pairwise(ends))
    out = forms[last].flatten(1).cpu()
    base_, off = out[0], errors[last].flatten().cpu()
    if sweep.balls.targets is not None:
        more = sweep.balls.targets.offsets[k].cpu()
        base_, off = base_ + more, (off + 2 * UNIT * (base_.abs() + more.abs())) * SURE
    logits = (out[1:].T.contiguous(), base_, off)
    every = (rows.contiguous(), base, error, low, high)
    if not all(bool((v.abs() < LARGE).all()) for v in (*every, *logits)):
        return None
    return Forms(*every, high / 2, parts, *logits)


def _input_rows(sweep: Sweep, k: int, n: int) -> Tensor:
    """The inputs as functions of the variables, `(n + 1, *shape)`: a box around the ball."""
    shape = sweep.graph.nodes[0].shape
    x = sweep.centre[0][k].flatten().double()
    low, high = (side[k].flatten() for side in sweep.spans[0])
    size = x.abs() + torch.maximum(-low, high)
    rows = x.new_zeros(n + 1, len(x))
    rows[0] = x + (low + high) / 2
    place = torch.arange(len(x), device=x.device)
    rows[1 + place, place] = (high - low) / 2 + 8 * UNIT * size
    return rows.reshape(-1, *shape)


def _affine_error(graph: Graph, node: Node, given: list[Tensor], errors: list[Tensor]) -> Tensor:
    """How far the form of an affine node is from its exact value, for all variables in [-1, 1]."""
    assert node.map is not None
    rough = rounding_map(node.map)
    unit = graph.rounding + (node.map.terms + 4) * UNIT
    sizes = [v.abs().sum(0, keepdim=True) * SURE + old for v, old in zip(given, errors)]
    passed = node.map.magnitude().forward(*errors)
    return (passed + unit * (rough.forward(*sizes) + node.bias_size + FAINT)) * SURE


class Split:
    """The matrix of a quadratic function, taken apart: neurons of one node are no product with each
    other, so that their block is diagonal and costs little to eliminate.

    out: the variables of the node with most undecided neurons; kept: all others. own: the neurons
    that are eliminated; other: those that are not, at the places from `first` on of `kept`.
    """

    def __init__(self, forms: Forms) -> None:
        m = len(forms.base)
        self.first = forms.variables - m
        part = max(forms.parts, key=lambda p: p.stop - p.start)
        self.own = torch.arange(part.start, part.stop)
        self.other = torch.cat([torch.arange(part.start), torch.arange(part.stop, m)])
        self.out = self.first + self.own
        self.kept = torch.cat([torch.arange(self.first), self.first + self.other])
        self.half = forms.half
        rows = forms.rows
        self.own_kept = rows[self.own][:, self.kept]
        self.other_kept = rows[self.other][:, self.kept]
        self.out_other = rows[self.other][:, self.out].T.contiguous()

    def peak(
        self, values: tuple[Tensor, ...], pull: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the function is largest, `(n,)`, and the derivatives of `log det` of its matrix by
        d, `(n,)`, and by c, `(m,)`; None if it is not concave.

        Args:
            values: a, b, c, e, d.
            pull: its linear coefficients.
        """
        _, _, c, _, d = values
        bent = -0.5 * c * self.half
        own_bent = bent[self.own]
        other_bent = bent[self.other]
        square = c * self.half**2
        own = d[self.out] + square[self.own]
        across = own_bent[:, None] * self.own_kept
        across[:, self.first :].addcmul_(self.out_other, other_bent)
        inner = torch.zeros(len(self.kept), len(self.kept), dtype=c.dtype)
        torch.mul(self.other_kept, other_bent[:, None], out=inner[self.first :])
        inner = inner + inner.T
        inner.diagonal().add_(d[self.kept])
        inner.diagonal()[self.first :] += square[self.other]
        scaled = across / own[:, None]
        factor, info = torch.linalg.cholesky_ex(inner.addmm_(across.T, scaled, alpha=-1))
        if int(info) or not bool(own.min() > 0):
            return None
        inverse = torch.cholesky_inverse(factor)
        mixed = scaled @ inverse  # minus the block of the inverse between the two
        s = torch.empty_like(pull)
        spread = torch.empty_like(pull)
        products = torch.empty_like(c)
        alone = pull[self.out] / own
        inside = 0.5 * (inverse @ (pull[self.kept] - across.T @ alone))
        s[self.kept] = inside
        s[self.out] = 0.5 * alone - scaled @ inside
        spread[self.kept] = inverse.diagonal()
        spread[self.out] = 1 / own + (mixed * scaled).sum(1)
        products[self.own] = -(self.own_kept * mixed).sum(1)
        products[self.other] = (self.other_kept * inverse[self.first :]).sum(1) - (
            self.out_other * mixed[:, self.first :]
        ).sum(0)
        bend = self.half * (self.half * spread[self.first :] - products)
        return s, spread, bend


class Relaxation:
    """The bound on one margin, `theta_y - theta_rival`, as a function of its multipliers.

    forms: of the sample; y, rival: classes.
    """

    def __init__(self, forms: Forms, y: int, rival: int) -> None:
        self.forms = forms
        self.m = len(forms.base)
        self.n = forms.variables
        self.first = self.n - self.m  # where the neurons begin
        self.pull = forms.logits[rival] - forms.logits[y]
        self.base = forms.logit_base[rival] - forms.logit_base[y]
        self.size = forms.logits[rival].abs() + forms.logits[y].abs()
        self.base_size = forms.logit_base[rival].abs() + forms.logit_base[y].abs()
        self.error = forms.logit_error[rival] + forms.logit_error[y]
        # Rounded up, so that the line is above the neuron.
        self.slope = forms.high / (forms.high - forms.low) * (1 + 4 * UNIT)

    def begun(self) -> Tensor:
        """Logarithms of the first multipliers, near those of CROWN: a, b, c, e, then d."""
        forms = self.forms
        pull = self.pull.clone()
        weight = torch.zeros_like(forms.base)
        steep = self.slope > 0.5
        for part in reversed(forms.parts):
            columns = slice(self.first + part.start, self.first + part.stop)
            w = pull[columns] / forms.half[part]
            weight[part] = w
            pull[columns] = 0.0
            below = torch.where(steep[part], w.clamp(max=0), 0.0)
            pull = pull + (w.clamp(min=0) * self.slope[part] + below) @ forms.rows[part]
        size = weight.abs()
        mean = size.mean() + 1e-30
        least = BELOW * (mean + size)
        minus = -weight.clamp(max=0)
        a = torch.where(steep, 0.0, minus) + least
        b = torch.where(steep, minus, 0.0) + least
        e = weight.clamp(min=0) + least
        c = CURVATURE * size.clamp(min=0.1 * mean) / forms.half
        d = pull.abs() / 2 + SPREAD * pull.abs().mean() / 2 + 1e-30
        d[self.first :] += 2 * c * forms.half**2
        return torch.cat([a, b, c, e, d]).log()

    def parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """a, b, c, e and d."""
        return torch.split(values, [self.m] * 4 + [self.n])

    def linear(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The constant and the coefficients of the function `constant + <pull, s> - <s, matrix s>`,
        which is at least the difference of the logits for all s of the ball.
        """
        f = self.forms
        a, b, c, e, d = self.parts(values)
        outer = a + b - e  # coefficients of v
        inner = e * self.slope - b  # and of z
        bent = c * f.half
        constant = self.base + outer @ f.half + inner @ f.base - (e * self.slope) @ f.low
        constant = constant + bent @ (f.base - f.half) + d.sum()
        pull = self.pull + (inner + bent) @ f.rows
        pull[self.first :] += f.half * outer + bent * (f.base - 2 * f.half)
        return constant, pull

    def matrix(self, values: Tensor) -> Tensor:
        """The matrix of that function, `(n, n)`."""
        f = self.forms
        _, _, c, _, d = self.parts(values)
        bent = c * f.half
        matrix = torch.zeros(self.n, self.n, dtype=values.dtype)
        matrix[self.first :] = (-0.5 * bent)[:, None] * f.rows
        matrix = matrix + matrix.T
        matrix.diagonal().copy_(d)
        matrix.diagonal()[self.first :] += bent * f.half
        return matrix

    def climbed(
        self, claimed: Callable[[Tensor], float], scale: float, steps: int, goal: float
    ) -> tuple[bool, int]:
        """Whether a lower bound on the margin above the goal is found, and the steps it took.

        Args:
            claimed: the bound at some multipliers, with all rounding errors.
            scale: the margin at the sample, from which the weight of the barrier is taken.
            steps: at most.
            goal: what the bound is to exceed.
        """
        f = self.forms
        split = Split(f)
        logs = self.begun()
        first = torch.zeros_like(logs)
        second = torch.zeros_like(logs)
        last = logs
        moved = 0
        for step in range(steps):
            clock.check()
            share = step / steps
            rate = RATES[0] * (RATES[1] / RATES[0]) ** share
            barrier = scale / self.n * BARRIER[0] * (BARRIER[1] / BARRIER[0]) ** share
            values = logs.exp()
            constant, pull = self.linear(values)
            peak = split.peak(self.parts(values), pull)
            if peak is None:
                if moved:
                    logs = last + BACK * (logs - last)
                    first = first * BACK
                else:  # more of d: in the end the diagonal dominates
                    logs = logs.clone()
                    logs[4 * self.m :] += math.log(2)
                continue
            s, spread, bend = peak
            # float32 says that it may be proved: only then is it evaluated in float64.
            if -float(constant + 0.5 * (pull @ s)) > goal and claimed(values) > goal:
                return True, step + 1
            z = f.base + f.rows @ s
            v = f.half * (1 + s[self.first :])
            bent = v * (z - v) - barrier * bend
            above = self.slope * (z - f.low) - v
            gradient = torch.cat([v, v - z, bent, above, 1 - s * s - barrier * spread]) * values
            last = logs
            moved += 1
            first = 0.9 * first + 0.1 * gradient
            second = 0.98 * second + 0.02 * gradient**2
            size = (second / (1 - 0.98**moved)).sqrt() + 1e-9 * scale
            logs = last - rate * first / (1 - 0.9**moved) / size
        return False, steps

    def claimed(self, multipliers: Tensor) -> float:
        """The bound at some multipliers with all rounding errors; -inf if it is none.

        Any factor and any point s give a bound. It is good if the one is a Cholesky factor of the
        matrix, and the other where the function is largest.
        """
        f = self.forms
        n = self.n
        values = multipliers.double()
        constant, pull = self.linear(values)
        matrix = self.matrix(values)
        factor, info = torch.linalg.cholesky_ex(matrix)
        if int(info) or not bool((values >= 0).all()):
            return -math.inf
        s = 0.5 * torch.cholesky_solve(pull[:, None], factor)[:, 0]
        a, b, c, e, d = self.parts(values)
        outer = a + b + e
        inner = e * self.slope + b
        bent = c * f.half
        # What the coefficients were rounded by.
        sizes = self.base_size + outer @ f.half + inner @ f.base.abs() + inner @ f.low.abs()
        sizes = sizes + bent @ (f.base.abs() + 2 * f.half) + d.sum()
        pulls = self.size + (inner + bent) @ f.rows.abs()
        pulls[self.first :] += f.half * outer + bent * (f.base.abs() + 2 * f.half)
        solid = matrix.abs()
        rounded = (4 * n + 64) * UNIT * (sizes + pulls.sum()) + 16 * UNIT * solid.sum()
        # What the forms are off by: z has the coefficient `inner + c v`, with v <= 2 half.
        off = self.error + (inner + 2 * bent) @ f.error
        # The function around s: its height, its slope there, and what it may lack to be concave.
        height, slope = height_at(constant, pull, matrix, s)
        lack, lost = lack_of(matrix, factor)
        reach = s.abs()
        room = slope @ (1 + reach) + lack * ((1 + reach) ** 2).sum()
        upper = height + (rounded + off + room) * SURE + FAINT
        largest = torch.stack([sizes, pulls.sum(), solid.sum(), reach.sum(), lost]).max()
        if not bool((largest < LARGE) & upper.isfinite()):
            return -math.inf
        return -float(upper)


def height_at(constant: Tensor, pull: Tensor, matrix: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """`constant + <pull, s> - <s, matrix s>`, and the magnitudes of its derivatives by s, `(n,)`;
    both rounded up.
    """
    n = len(s)
    image = matrix @ s
    reach = s.abs()
    far = matrix.abs() @ reach
    slope = (pull - 2 * image).abs() + (2 * n + 16) * UNIT * (pull.abs() + 2 * far)
    terms = (4 * n + 64) * UNIT * (constant.abs() + pull.abs() @ reach + reach @ far)
    return constant + pull @ s - s @ image + terms, slope


def lack_of(matrix: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """How far the least eigenvalue of a matrix may be below 0, rounded up: the largest row sum of
    `|matrix - factor factor'|`. And the sum of the magnitudes that went into it.
    """
    lack = (matrix - factor @ factor.T).abs().sum(1)
    lost = factor.abs() @ factor.abs().sum(0) + matrix.abs().sum(1)
    return (lack + (4 * len(matrix) + 16) * UNIT * lost).max(), lost.sum()


def proves(
    forms: Forms, y: int, clean: Tensor, lower: Tensor, slack: Tensor, steps: int
) -> tuple[bool, float]:
    """Whether all margins of a sample are above what rounding may take, and the operations it took.

    Args:
        forms: of the sample.
        y: its label.
        clean: its margins, `(K,)`.
        lower: bounds on them that are known on the ball, `(K,)`; rivals above 0 are done.
        slack: how far executed margins may be below exact ones, `(K,)`.
        steps: for each rival; the first that is not proved in as many ends it.
    """
    work = 0.0
    single = forms.single()
    for rival in lower.argsort(stable=True).tolist():
        if rival == y or bool(lower[rival] > 0):
            continue
        scale = float(clean[rival])
        if not 0 < scale < math.inf or not len(forms.base):
            return False, work
        goal = float(slack[rival])
        exact = Relaxation(forms, y, rival)
        quick = Relaxation(single, y, rival)
        found, taken = quick.climbed(exact.claimed, scale, steps, goal)
        work += taken * forms.operations
        if not found:
            return False, work
    return True, work


def proved_samples(
    sweep: Sweep, rows: list[int], y: Tensor, lower: Tensor, steps: int, provers: int = 1
) -> tuple[list[bool], list[float]]:
    """Which samples of a sweep are proved, and the operations it took for each.

    Every sample is a problem of its own, so that nothing depends on the others.

    Args:
        sweep: of a network that `has_quadratics`.
        rows: places of the samples in the sweep.
        y: labels of all samples of the sweep, `(N,)` on the CPU.
        lower: bounds on all their margins, `(N, K)` on the CPU.
        steps: for each rival.
        provers: threads, each with samples of its own; matrices are too small to be shared.
    """
    if not rows:
        return [], []
    clock.look()
    ranges = sweep.proved()
    slack = torch.zeros_like(lower)
    if sweep.graph.arithmetic == "executed":
        slack = margin_errors(sweep, y)
    z = sweep.centre[len(sweep.graph.nodes) - 1].cpu()
    clean = z.gather(1, y[:, None]) - z

    def one(k: int) -> tuple[bool, float]:
        clock.look()
        with torch.no_grad():
            forms = forms_of(sweep, ranges, k)
            if forms is None:
                return False, 0.0
            return proves(forms, int(y[k]), clean[k], lower[k], slack[k], steps)

    if provers == 1 or len(rows) == 1:
        found = [one(k) for k in rows]
    else:
        with ThreadPoolExecutor(provers) as pool:  # with the limits of the caller
            jobs = [pool.submit(copy_context().run, one, k) for k in rows]
            found = [job.result() for job in jobs]
    return [good for good, _ in found], [work for _, work in found]
