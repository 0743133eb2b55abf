"""Operator norms of the linear maps in a graph, rounded up, and the product bound they give for a
whole network.

Convolutions by their true operator norm: for r = 1 and inf the longest column and row, for r = 2
the largest singular value over the frequencies of a torus large enough that the zero-padded
convolution is a part of the circular one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from wassail.certificates.device import HOST
from wassail.certificates.graph.activations import ACTIVATIONS
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.maps import Average, Concat, Conv, Linear, Matrix, Pick, Scale
from wassail.geometry import operator_norm
from wassail.rounding import FLOOR, length, times

FEW_SIGNS = 14  # the NP-hard norms are enumerated up to here
# the spectral norm of a convolution is computed from its matrix up to this many inputs or outputs
DENSE = 1024
UP = (
    1 + 1e-12
    # room for the rounding errors of sums and of singular values, which are backward stable to
    # about n 2^-52
)


def matrix_norm(matrix: Tensor, norm_in: float, norm_out: float) -> float:
    """An upper bound on `||A||_{r -> s}`, exact up to rounding but for the NP-hard pairs of large
    matrices.

    Those are bounded by the norm of `|A|`, attained by ones, and by the spectral norm times the
    cost of changing norms.
    """
    m, n = matrix.shape
    hard = norm_in != 1 and norm_out != math.inf and not norm_in == norm_out == 2
    signs = m if norm_out == 1 and (norm_in == 2 or m <= n) else n
    if not hard or signs <= FEW_SIGNS:
        return float(operator_norm(matrix, norm_in, norm_out)) * (1 + (m + n + 16) * 2.0**-50)
    spectral = (
        float(torch.linalg.matrix_norm(matrix, 2)) * change(n, norm_in, 2) * change(m, 2, norm_out)
    )
    return min(positive_norm(matrix.abs(), norm_in, norm_out), spectral) * (
        1 + (m + n + 16) * 2.0**-50
    )


def positive_norm(matrix: Tensor, norm_in: float, norm_out: float) -> float:
    """`||M||_{r -> s}` of a matrix with entries >= 0, hence an upper bound for every matrix
    whose entries are no larger.
    """
    return float(positive_norms(matrix, norm_in, norm_out))


def positive_norms(matrix: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """The same for many matrices, `(..., m, n) -> (...)`."""
    if norm_in == 1:
        return length(matrix, norm_out, -2).amax(-1)
    if norm_in == math.inf:  # attained at the vector of ones
        return length(matrix.sum(-1), norm_out, -1)
    if norm_out == 2:
        return torch.linalg.matrix_norm(matrix, 2)  # type: ignore[no-any-return]
    if norm_out == math.inf:
        return length(matrix, 2, -1).amax(-1)
    return length(matrix.sum(-2), 2, -1)


def change(n: int, norm_in: float, norm_out: float) -> float:
    """`max ||u||_s / ||u||_r` over R^n: `n^(1/s - 1/r)` if that is above 1."""
    return float(n ** max(0.0, 1 / norm_out - 1 / norm_in))


def map_norm(map_: Linear, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
    """An upper bound on `||map||_{r -> r}` for one sample of shape `shape -> output`; kept for
    as long as the map lives.
    """
    known = _KNOWN.setdefault(map_, {})
    if norm not in known:
        known[norm] = _map_norm(map_, norm, shape, output)
    return known[norm]


_KNOWN: WeakKeyDictionary[Linear, dict[float, float]] = WeakKeyDictionary()


def _map_norm(map_: Linear, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
    if isinstance(map_, Matrix):
        return matrix_norm(map_.weight, norm, norm)
    if isinstance(map_, Scale):
        return float(map_.factor.abs().max())
    size = map_.magnitude()
    held = (
        map_.weight if isinstance(map_, Conv) else map_.source if isinstance(map_, Pick) else None
    )
    one = torch.ones(1, dtype=torch.float64, device=HOST if held is None else held.device)
    rows = float(size.forward(one.expand(1, *shape).clone()).max())
    columns = float(size.transpose(one.expand(1, *output).clone())[0].max())
    if norm != 2:
        return (rows if norm == math.inf else columns) * (
            UP if isinstance(map_, Conv | Average) else 1
        )
    schur = (
        math.sqrt(rows * columns) * UP
    )  # ||A||_2^2 <= ||A||_1 ||A||_inf, exact for moved entries and poolings without overlap
    if not isinstance(map_, Conv):
        return schur
    if min(math.prod(shape), math.prod(output)) <= DENSE:
        return min(schur, _dense(map_, shape, output))
    return min(schur, _spectral(map_, output))


def _dense(conv: Conv, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
    """The spectral norm by the eigenvalues of `A A^T` or `A^T A`, whichever is smaller."""
    if math.prod(shape) <= math.prod(output):
        eye = torch.eye(math.prod(shape), dtype=torch.float64, device=conv.weight.device)
        matrix = conv.forward(eye.reshape(-1, *shape)).flatten(1)
    else:
        eye = torch.eye(math.prod(output), dtype=torch.float64, device=conv.weight.device)
        matrix = conv.transpose(eye.reshape(-1, *output))[0].flatten(1)
    lost = matrix.numel() * FLOOR[torch.float64]  # squares that underflow
    top = float(torch.linalg.eigvalsh(matrix @ matrix.T)[-1])
    return math.sqrt(top * (1 + 4 * (sum(matrix.shape) + 16) * 2.0**-52) + lost)


def _spectral(conv: Conv, output: tuple[int, ...]) -> float:
    """An upper bound on the spectral norm of a zero-padded strided convolution (Sedghi et al. 2019
    for stride 1).

    A stride s makes s x s phases of the input channels of their own, so what is left is a
    convolution of stride 1. On a torus of the output's size plus the kernel's it is circular, block
    diagonal in the frequencies, and contains the padded one.
    """
    out, per_group, height, width = conv.weight.shape
    tall, wide = ((k - 1) * d + 1 for k, d in zip((height, width), conv.dilation))
    spread = conv.weight.new_zeros(out, per_group, tall, wide)
    spread[:, :, :: conv.dilation[0], :: conv.dilation[1]] = conv.weight
    down, across = conv.stride
    rows = -(-tall // down)
    cols = -(-wide // across)
    padded = conv.weight.new_zeros(out, per_group, rows * down, cols * across)
    padded[:, :, :tall, :wide] = spread
    phases = (
        padded.reshape(out, per_group, rows, down, cols, across)
        .permute(0, 1, 3, 5, 2, 4)
        .flatten(1, 3)
    )
    torus = (output[1] + rows, output[2] + cols)
    best = 0.0
    for group in torch.split(
        phases, out // conv.groups
    ):  # groups do not mix: the norm is the largest of theirs
        # Real kernels: half of the frequencies are enough. The smaller Gram matrix has the squares
        # of the singular values.
        spectrum = torch.fft.rfft2(group, torus).permute(2, 3, 0, 1).flatten(0, 1)
        spectrum = spectrum if spectrum.shape[1] <= spectrum.shape[2] else spectrum.mT
        top = float(torch.linalg.eigvalsh(spectrum @ spectrum.mH)[:, -1].max())
        lost = (
            8 * group.numel() ** 2 * FLOOR[torch.float64] if bool(group.any()) else 0.0
        )  # squares that underflow
        best = max(
            best,
            math.sqrt(
                top * (1 + 8 * (spectrum.shape[1] + spectrum.shape[2] + 16) * 2.0**-52) + lost
            ),
        )
    return best


def product(
    graph: Graph, norm_in: float, norm_out: float, steepest: Mapping[int, float] | None = None
) -> float:
    """`||J||_{r -> s}` on all of R^n by the norms of the layers: the best of walking through in
    norm 1, 2 or inf.

    Additions add, concatenations combine in the norm, a ReLU does not stretch, a smooth activation
    stretches by its steepest slope (`steepest`: on the region, by node; else on R). The first
    matrix changes from r to the norm of the walk and the last one from that to s, each in one piece
    where it is a matrix. Infinite where a product, a softmax or a normalisation is in the way:
    their norms depend on where they are.
    """
    if graph.curved:
        return math.inf
    slopes = {
        i: steepest_slope(node.activation)
        for i, node in enumerate(graph.nodes)
        if node.activation is not None
    }
    return (
        min(
            _walk(graph, norm_in, inner, norm_out, {**slopes, **(steepest or {})})
            for inner in (1.0, 2.0, math.inf)
        )
        * UP
    )


def steepest_slope(activation: str) -> float:
    """`max |f'|` on R, rounded up: GELU 1.128905 (erf form), 1.128994 (tanh form), SiLU
    1.099840 to six decimals.
    """
    far = torch.tensor(math.inf, dtype=torch.float64)
    least, top = ACTIVATIONS[activation].derivative_range(-far, far)
    return max(-float(least), float(top))


def _walk(
    graph: Graph, norm_in: float, inner: float, norm_out: float, steepest: Mapping[int, float]
) -> float:
    last = len(graph.nodes) - 1
    enter = change(graph.inputs, norm_in, inner)
    found: list[float] = []
    raw: list[
        bool
    ] = []  # whether a node is the input itself, its entries moved: still measured in norm r
    for i, node in enumerate(graph.nodes):
        given = [found[j] for j in node.inputs]
        flat = [raw[j] for j in node.inputs]
        plain = isinstance(node.map, Pick) and node.map.source is None
        if not node.inputs:
            found.append(1.0)
        elif node.map is None:
            found.append(times(given[0] * (enter if flat[0] else 1.0), steepest.get(i, 1.0)))
        elif plain:
            found.append(given[0])
        elif isinstance(node.map, Matrix) and len(node.shape) == 1:
            source = norm_in if flat[0] else inner
            target = norm_out if i == last else inner
            found.append(times(given[0], matrix_norm(node.map.weight, source, target)))
        else:
            given = [g * (enter if f else 1.0) for g, f in zip(given, flat)]
            found.append(_combined(graph, i, given, inner))
        raw.append(not node.inputs or (plain and flat[0]))
    if isinstance(graph.nodes[last].map, Matrix) and len(graph.nodes[last].shape) == 1:
        return found[-1]
    return found[-1] * (
        change(graph.outputs, norm_in, norm_out)
        if raw[-1]
        else change(graph.outputs, inner, norm_out)
    )


def _combined(graph: Graph, i: int, given: list[float], norm: float) -> float:
    node = graph.nodes[i]
    assert node.map is not None
    if isinstance(node.map, Concat):
        return float(torch.linalg.vector_norm(torch.tensor(given, dtype=torch.float64), norm)) * UP
    if len(given) > 1:
        return math.fsum(given) * UP
    return times(given[0], map_norm(node.map, norm, graph.nodes[node.inputs[0]].shape, node.shape))
