"""The network as it is executed: what rounding may do to each of its operations, in its own
floating-point type.

A certificate about exact arithmetic says nothing of a point whose margin is below the rounding
error of the network that runs. An executed operation is the exact one plus an error: a sum of n
products in type t, in any order, fused or not, is off by

    |e| <= gamma_m (|W| |v| + |b|) + m s,    gamma_m = m u / (1 - m u),  m = n + 2,

with u the unit roundoff of t and s its smallest positive number (underflow; Higham 2002, chapter
3). Where the signs of the terms are known the bound is up to half of that (`dot_error`). `|v|` is
what the executed values are at most: the linear bounds know it for every node. So each node of a
graph keeps the operations that are executed for it (`Call`), which is more than one where a batch
norm or an input scaling was folded into a layer, and a sweep over a ball adds their error to the
node's own. From there it goes the way of every other error: through the lines, into the
margins. Nothing is multiplied through the network in absolute values.

Exact in floating point, so without a call: ReLU, maxima, max pooling, clamps to numbers of the
type, signs, moves, joins. Not covered, and refused: smooth activations and attention; half
precision, mixed types and weights computed by the model; settings of torch that allow products of
fewer digits or flush subnormal numbers; convolutions that may be done by another formula
(Winograd's or Fourier's, by NNPACK or cuDNN). A model that was compiled or fused is another
program: certify that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassail import names
from wassail.certificates import clock
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Call, Execution, Scale, magnitude_map
from wassail.certificates.relax.backward import Walk
from wassail.errors import remedies, unknown
from wassail.rounding import TINY, UNIT, shifted

if TYPE_CHECKING:
    from wassail.certificates.relax.crown import Sweep

ARITHMETICS = tuple(names.ARITHMETICS)


LEAST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}


UNKNOWN = ("mps",)  # kinds of device whose arithmetic is not that of IEEE 754, or not known to be


SLACK = (
    1 + 2.0**-24
    # of the float64 sums in which errors are computed, here and on their way to the margins: 2^27
    # terms
)


SORTED_UP_TO = 2**19  # products of one sample that are sorted for a bound on their sum at a point
SORTED_AT_ONCE = 2**22


def gamma(roundings: int, dtype: torch.dtype) -> float:
    """`gamma_m`; inf for sums so long that nothing is known.

    The graph is itself computed in float64, its folded weights and biases too: that is a part of
    it.
    """
    part = roundings * (TINY[dtype] + 2 * TINY[torch.float64])
    return part / (1 - part) if part < 0.5 else float("inf")


def call_error(
    node: Node,
    sizes: Sequence[Tensor],
    dtype: torch.dtype,
    sources: Sequence[Node],
    ranges: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """How far an affine node is from its exact map of the executed inputs, which are at most
    `sizes` `(N, *shape)` each.

    sources: the nodes they come from; ranges: of the inputs, where they are known. Calls are those
    of the model, so sizes change to its scale and the error back from it. The product of a leaky
    ReLU is rounded, too, and charged to its readers. Where a sum may overflow the error is
    infinite.
    """
    assert node.calls is not None and node.map is not None
    sizes = [shifted(size, -j.exponent) for j, size in zip(sources, sizes)]
    off = [_off(j.late, [v], [torch.zeros_like(v)], dtype) for j, v in zip(sources, sizes)]
    sizes = [size + late for size, late in zip(sizes, off)]
    within = None
    if ranges is not None:
        within = [_executed_range(*given) for given in zip(sources, ranges, off)]
    calls = node.calls or (Call(node.map),)
    return shifted(_off(calls, sizes, off, dtype, within) * SLACK, node.exponent)


def _executed_range(
    source: Node, around: tuple[Tensor, Tensor], late: Tensor
) -> tuple[Tensor, Tensor]:
    """The range of a node's values in the model's own scale, with what the product of a leaky ReLU
    is off by; a point stays a point.
    """
    low, high = (shifted(side, -source.exponent) for side in around)
    if source.late:
        return low - late, high + late
    return (low, low) if around[0] is around[1] else (low, high)


def _off(
    calls: Sequence[Call],
    sizes: Sequence[Tensor],
    off: Sequence[Tensor],
    dtype: torch.dtype,
    ranges: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """The error after some calls, of inputs that are at most `sizes` and are off by at most
    `off`; ranges: of those inputs, where they are known.
    """
    for call in calls:
        rough = magnitude_map(call.map)
        size = rough.forward(*sizes)
        size = size if call.bias is None else size + call.bias
        error = rough.forward(*off)
        if call.roundings:
            rate = gamma(call.roundings, dtype)
            lost = rate * size
            if ranges is not None and is_dot(call):
                lost = torch.fmin(lost, dot_error(call, *ranges[0], dtype))  # NaN is no bound
            error = error + lost + call.roundings * LEAST[dtype]
            error = torch.where(size * (1 + 2 * rate) < torch.finfo(dtype).max, error, torch.inf)
        if call.noise is not None:
            error = error + call.noise
        off = [error]
        sizes = [size + error]
        ranges = None  # the signs of what follows are not known
    return off[0]


def is_dot(call: Call) -> bool:
    """Whether each of its entries is one sum of products and a bias."""
    return call.map.coefficients is not None and call.roundings == call.map.fan_in + 2


def dot_error(call: Call, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """What a sum of products and a bias in any order may lose, for inputs in a range; without
    underflow.

    With P the sum of the positive terms and N that of the negative ones, in size, every partial sum
    is at most M = max(P, N): its terms of one sign take from those of the other. Each addition is
    off by u of the sum of its two computed numbers, which is off from a partial sum by at most
    `gamma (P + N)`. So n additions, and the products before them, lose at most

        u (P + N) + n u (M + gamma (P + N)),

    about half of `gamma (P + N)` where both signs weigh the same. Where the inputs of a matrix are
    one point (`low is high`) its products are known, and short partial sums are smaller. `P + N =
    |W| (v+ + v-)` and `P - N = W (v+ - v-)`. The sign of the bias is not known: it is in both.
    """
    plus = high.clamp(min=0)
    minus = (-low).clamp(min=0)
    both = magnitude_map(call.map).forward(plus + minus)
    apart = call.map.forward(plus - minus).abs()
    bias = 0.0 if call.bias is None else call.bias
    most = (both + apart) / 2 + call.map.terms * UNIT * both + bias
    partial = (call.roundings - 2) * most
    weight = call.map.matrix
    known = low is high and low.ndim == 2 and len(low) > 0
    if known and weight is not None and weight.numel() <= SORTED_UP_TO:
        some = torch.split(low, max(1, SORTED_AT_ONCE // weight.numel()))
        parts = torch.cat([_largest_parts(weight * v[:, None]) for v in some])
        partial = torch.fmin(partial, parts + call.map.fan_in * bias)
    return _summed(call, both + bias, partial, dtype)


def _largest_parts(terms: Tensor) -> Tensor:
    """At least the sum of all partial sums in size, whatever the order of the additions, `(..., n)
    -> (...)`, for n terms and a bias, which is not counted.

    By count: the k-th addition that is done adds up at most k + 1 of the terms, since those before
    it made at most k - 1 of its parts. So its sum is at most that of the k + 1 largest terms of one
    sign. By sign: a sum of terms of both signs is smaller than that (`_by_sign`). The bias is one
    more addition, to a sum that counts twice then.
    """
    above, below = (side.clamp(min=0).sort(-1, descending=True).values for side in (terms, -terms))
    most = torch.maximum(above.cumsum(-1), below.cumsum(-1))
    by_count = most[..., 1:].sum(-1)
    return torch.fmin(by_count, _by_sign(above, below, (terms < 0).sum(-1))) + most[..., -1]


def _by_sign(above: Tensor, below: Tensor, negative: Tensor) -> Tensor:
    """At least the sum of all partial sums in size, `(..., n) -> (...)`: with P and N the sums of
    the positive and of the negative terms in size,

        A(P) + A(N) + m |P - N|,

    where A adds up the sums of the k largest terms of one sign, for every k, and m counts the terms
    of the sign that weighs less. It is enough to count k from 2 on, as follows by induction for
    every tree of additions (one term: nothing is added, and A is 0): two trees, with `D = P - N` of
    each, are put together, and |D1 + D2| is to be paid. `A(P1 and P2)` is more than
    `A(P1) + A(P2)` by at least `P1 + P2`, if neither is empty, and by at least `p2 P1`, with p2 the
    count of P2, since one may add the terms of P2 to P1 one by one.

    Both D of one sign: `P1 + P2` or `N1 + N2` pays. D1 >= 0 > D2 and D >= 0: `p2 P1` pays for
    `p2 |D2|`, since `|D2| <= D1 <= P1`; `q1 N2 + q1 D` pays for `q1 D1`, since `|D2| <= N2`; and
    `q2 D` for D. D < 0 likewise. Terms that are 0 count as positive.

    Args:
        above: the positive terms, the largest first, then zeros.
        below: the negative ones in size, likewise.
        negative: how many there are of them.
    """
    n = above.shape[-1]
    place = torch.arange(n, device=above.device)
    positive = n - negative
    left = above.sum(-1)
    right = below.sum(-1)
    total = torch.zeros_like(left)
    for side, count in ((above, positive), (below, negative)):
        total = total + (side * (count[..., None] - place).clamp(min=0)).sum(-1)
    minor = torch.where(left >= right, negative, positive)
    off = 2 * n * UNIT * (left + right)  # of the difference
    return total + minor * (left - right).abs() + n * off


def _summed(call: Call, total: Tensor, partial: Tensor, dtype: torch.dtype) -> Tensor:
    """From the sum of all terms in size, and of all partial sums in size."""
    unit = TINY[dtype] + 2 * TINY[torch.float64]
    rate = gamma(call.roundings, dtype)
    return unit * (total + partial + (call.roundings - 2) * rate * total)


@torch.no_grad()
def margin_errors(sweep: Sweep, y: Tensor) -> Tensor:
    """How far the executed margins `theta_y - theta_j` are from the exact ones on each ball, `(N,
    K)`, rounded up, on the CPU.

    sweep: of the executed network. The errors of all nodes go to the margins through the same
    network: both values of a neuron lie in its span, so it passes the difference on with one of its
    slopes, or with one between them if it is undecided. Or their lengths go there through the norms
    of the layers (`Reach.margin_errors`).
    """
    found = []
    for k, label in enumerate(y.tolist()):
        clock.look()
        found.append(_margin_error(sweep, k, label))
    if not found:
        return torch.zeros(0, sweep.graph.outputs, dtype=torch.float64)
    entries = torch.stack(found)
    if sweep.cones is not None:
        entries = torch.fmin(entries, sweep.cones.reach.margin_errors(y))
    return entries.cpu()


def _margin_error(sweep: Sweep, k: int, y: int) -> Tensor:
    """For one sample, `(K,)`: coefficients go backward as intervals, `middle +- reach`."""
    last = len(sweep.graph.nodes) - 1
    eye = torch.eye(sweep.graph.outputs, dtype=torch.float64).to(sweep.centre[last])
    total = torch.zeros_like(eye[0])
    walk = Walk(sweep.graph, {last: (eye[y] - eye, torch.zeros_like(eye))}, _both_added)
    for i, node, (w, r) in walk.nodes(last):
        if node.map is not None:
            total = total + ((w.abs() + r) * sweep.executed[i][k]).flatten(1).sum(1)
            r = r + (4 + node.size) * UNIT * w.abs()  # of the products themselves
            parts = zip(node.map.transpose(w), magnitude_map(node.map).transpose(r))
            walk.give(node, parts)
            continue
        c, (low, high) = (known[node.inputs[0]] for known in (sweep.centre, sweep.spans))
        least, most = node.derivative_range(c[k] + low[k], c[k] + high[k])
        rest = r * most + w.abs() * (most - least) / 2
        walk.give(node, ((w * (least + most) / 2, rest),))
    total = torch.where(torch.isnan(total), torch.inf, total)
    total[y] = 0.0
    return total


def _both_added(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return a[0] + b[0], a[1] + b[1]


def arithmetic_of(graph: Graph, arithmetic: str, dtype: torch.dtype | None = None) -> Graph:
    """The graph for certificates in an arithmetic, or an `InputError` that says what "executed"
    does not cover.

    "auto": "executed" where the network is covered, else "exact". dtype: of the samples.
    """
    if arithmetic not in ARITHMETICS:
        raise unknown("arithmetic", arithmetic, ARITHMETICS)
    reason = "" if arithmetic == "exact" else refusal(graph)
    if (
        not reason
        and arithmetic != "exact"
        and dtype is not None
        and graph.execution
        and dtype != graph.execution.dtype
    ):
        reason = f"samples in {dtype} for a network in {graph.execution.dtype}"
    if reason and arithmetic == "executed":
        raise remedies(
            f"executed arithmetic does not cover {reason}",
            "use arithmetic='exact'",
            "use --certify METHOD:arithmetic=exact",
        )
    return replace(graph, arithmetic="exact" if reason or arithmetic == "exact" else "executed")


def ahead(graph: Graph, slack: Tensor) -> Graph:
    """The exact network with `slack` `(K,)`, none below 0, added to its logits, rounded up: its
    margins are smaller by that.
    """
    last = graph.nodes[-1]
    if last.map is None:  # logits that are ReLUs: a layer that adds to them
        op = Affine(Scale(torch.ones((), dtype=torch.float64, device=graph.device)))
        last = Node((len(graph.nodes) - 1,), last.shape, last.place, op)
        graph = replace(graph, nodes=(*graph.nodes, last))
    assert last.map is not None
    bias = torch.zeros_like(slack) if last.bias is None else last.bias.expand(last.shape)
    moved = bias + slack + torch.where(slack > 0, 2 * UNIT * (bias.abs() + slack), 0.0)
    most = None if last.bias_most is None else last.bias_most + moved.abs()
    last = replace(last, op=Affine(last.map, moved, most))
    return replace(graph, nodes=(*graph.nodes[:-1], last), arithmetic="exact")


def refusal(graph: Graph) -> str:
    """What of this network, or of torch's settings, the bound on rounding errors does not
    cover; nothing: it covers all.
    """
    run = graph.execution
    if run is None:
        return "a network whose operations are not known, which was not read from a model"
    if run.refusal:
        return run.refusal
    if run.dtype not in TINY:
        return f"a network in {run.dtype}"
    for i, node in enumerate(graph.nodes):
        if node.smooth:
            return f"{node.name!r} at {node.place}, which is not piecewise linear"
        if node.inputs and node.calls is None:
            return f"the operation at {node.place}"
        if node.act is None:
            continue
        last = i == len(graph.nodes) - 1
        before = graph.nodes[node.inputs[0]]
        # A product that is rounded here or right before has no layer to be charged to.
        if (last or before.act is not None) and (node.late or before.late):
            return f"a leaky ReLU at {node.place} with no layer after it"
    return _settings(graph, run)


def _nnpack() -> bool:
    available: bool = torch.backends.nnpack.is_available()  # type: ignore[no-untyped-call]
    return available and torch._C._get_nnpack_enabled()


def _settings(graph: Graph, run: Execution) -> str:
    """The settings of torch under which the bound does not hold."""
    if run.device in UNKNOWN:
        return f"the device {run.device!r}, whose arithmetic is not known"
    if run.device in ("cpu", "cuda") and torch.is_autocast_enabled(run.device):
        return "autocast"
    if run.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return (
            "float32 products of fewer digits (set torch.set_float32_matmul_precision('highest'))"
        )
    least = torch.tensor(LEAST[run.dtype], dtype=run.dtype)
    if run.device == "cpu" and float(least * 1.0) == 0:
        return "subnormal numbers flushed to zero (torch.set_flush_denormal)"
    tools = [
        torch.backends,
        *(getattr(torch.backends.mkldnn, name, None) for name in ("conv", "matmul")),
    ]
    if any(getattr(tool, "fp32_precision", "none") not in ("none", "ieee") for tool in tools):
        return "float32 products of fewer digits (set torch.backends.fp32_precision = 'ieee')"
    wide = [node for node in graph.nodes if any(call.sliding for call in node.calls or ())]
    nnpack = (
        run.device == "cpu" and run.dtype == torch.float32 and not torch.backends.mkldnn.enabled
    )
    if wide and nnpack and _nnpack():
        return (
            f"convolutions by NNPACK, as at {wide[0].place} (set "
            "torch.backends.mkldnn.enabled = True)"
        )
    if run.device == "cuda":
        if torch.backends.cuda.matmul.allow_tf32:
            return "TF32 products (set torch.backends.cuda.matmul.allow_tf32 = False)"
        if wide and torch.backends.cudnn.enabled:
            return (
                f"convolutions by cuDNN, as at {wide[0].place} (set "
                "torch.backends.cudnn.enabled = False)"
            )
    return ""
