import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from support.graphs import MAKE, NORMS, PAIRS, layers, mlp, network
from support.networks import dense, jacobian
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Concat, Linear, Matrix, Pick, Scale, Sum
from wassail.certificates.graph.matrix_norms import (
    change,
    matrix_norm,
    positive_norm,
    positive_norms,
)
from wassail.certificates.graph.operators import convolution
from wassail.certificates.graph.operators.conv_transpose import Transposed
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.operators.pooling import Average
from wassail.certificates.relax.norms import map_norm, product
from wassail.geometry import operator_norm


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def signs(k: int) -> Tensor:
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=k)), dtype=torch.float64)


def brute(matrix: Tensor, r: float, s: float) -> float:
    """`||A||_{r -> s}` by the corners of the ball it is attained at: of r = 1 and inf, or of
    the dual of s.
    """
    m, n = matrix.shape
    if r == 1:
        return float(
            torch.linalg.vector_norm(torch.eye(n, dtype=torch.float64) @ matrix.T, s, dim=1).max()
        )
    if r == math.inf:
        return float(torch.linalg.vector_norm(signs(n) @ matrix.T, s, dim=1).max())
    if s == 2:
        return math.sqrt(float(torch.linalg.eigvalsh(matrix.T @ matrix)[-1]))
    corners = signs(m) if s == 1 else torch.eye(m, dtype=torch.float64)
    return float((corners @ matrix).norm(dim=1).max())


@pytest.mark.parametrize(("r", "s"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (3, 5), (6, 2), (5, 5)])
def test_matrix_norms_are_those_of_the_corners(shape: tuple[int, int], r: float, s: float) -> None:
    for seed in range(4):
        matrix = draw(*shape, seed=seed)
        truth = brute(matrix, r, s)
        assert truth * (1 - 1e-15) <= matrix_norm(matrix, r, s) <= truth * (1 + 1e-11)
        assert positive_norm(matrix.abs(), r, s) >= truth * (1 - 1e-15)
        assert positive_norm(matrix.abs(), r, s) == pytest.approx(
            brute(matrix.abs(), r, s), rel=1e-12
        )


@pytest.mark.parametrize(("r", "s"), PAIRS)
def test_norms_of_many_matrices_are_those_of_each(r: float, s: float) -> None:
    many = draw(2, 3, 4, 5).abs()
    for i, j in itertools.product(range(2), range(3)):
        assert float(positive_norms(many, r, s)[i, j]) == pytest.approx(
            positive_norm(many[i, j], r, s), rel=1e-13
        )


@pytest.mark.parametrize(("r", "s"), PAIRS)
@pytest.mark.parametrize("shape", [(15, 16), (20, 15), (16, 30)])
def test_norms_of_large_matrices_are_bounded_from_above(
    shape: tuple[int, int], r: float, s: float
) -> None:
    matrix = draw(*shape)
    bound = matrix_norm(matrix, r, s)
    u = torch.cat(
        [
            draw(2000, shape[1], seed=1),
            draw(2000, shape[1], seed=2).sign(),
            torch.eye(shape[1]).double(),
        ]
    )
    u = u / torch.linalg.vector_norm(u, r, dim=1, keepdim=True)
    assert float(torch.linalg.vector_norm(u @ matrix.T, s, dim=1).max()) <= bound * (1 + 1e-14)
    if min(shape) <= 16 and (r, s) == (math.inf, 1.0):  # enumerated by geometry, bounded here
        assert float(operator_norm(matrix, r, s)) <= bound


def test_the_cost_of_changing_norms() -> None:
    assert [change(9, r, s) for r, s in PAIRS] == pytest.approx([1, 1, 1, 3, 1, 1, 9, 3, 1])


CONVOLUTIONS = {
    "plain": (Conv(draw(3, 2, 3, 3), (2, 5, 6), (1, 1), (0, 0), (1, 1), 1)),
    "padded": (Conv(draw(3, 2, 3, 3), (2, 4, 5), (1, 1), (1, 1), (1, 1), 1)),
    "padded far": (Conv(draw(2, 1, 3, 3), (1, 3, 3), (1, 1), (4, 3), (1, 1), 1)),
    "strided": (Conv(draw(3, 2, 3, 3), (2, 7, 6), (2, 2), (1, 1), (1, 1), 1)),
    "stride longer than the kernel": (Conv(draw(3, 2, 2, 1), (2, 7, 6), (3, 2), (1, 0), (1, 1), 1)),
    "uneven": (Conv(draw(2, 2, 4, 2), (2, 6, 7), (2, 3), (2, 1), (1, 1), 1)),
    "dilated": (Conv(draw(2, 2, 3, 2), (2, 7, 6), (1, 1), (2, 1), (2, 3), 1)),
    "dilated and strided": (Conv(draw(2, 2, 3, 2), (2, 7, 6), (2, 3), (2, 1), (3, 2), 1)),
    "grouped": (Conv(draw(4, 1, 3, 3), (2, 4, 4), (1, 1), (1, 1), (1, 1), 2)),
    "depthwise, strided": (Conv(draw(3, 1, 2, 2), (3, 5, 5), (2, 2), (0, 0), (1, 1), 3)),
    "one by one": (Conv(draw(4, 3, 1, 1), (3, 4, 4), (1, 1), (0, 0), (1, 1), 1)),
}


def output(map_: Linear, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map_.forward(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_have_the_norm_of_their_matrix(
    name: str, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = CONVOLUTIONS[name]
    out = output(conv, conv.shape)
    truth = float(operator_norm(dense(conv, [conv.shape], 0).T, norm, norm))
    near = conv.norm(norm, conv.shape, out)
    assert truth * (1 - 1e-14) <= near <= truth * (1 + 1e-10)
    monkeypatch.setattr(
        convolution, "DENSE", 0
    )  # the torus: larger, and on images as small as these by a third
    far = conv.norm(norm, conv.shape, out)
    assert truth * (1 - 1e-14) <= far <= truth * (1.5 if norm == 2 else 1 + 1e-10)
    assert map_norm(conv, norm, conv.shape, out) == map_norm(conv, norm, conv.shape, out)


def test_the_torus_is_exact_where_the_convolution_does_not_see_the_border() -> None:
    conv = CONVOLUTIONS["one by one"]
    assert convolution._spectral(conv, conv.shape) == pytest.approx(
        float(torch.linalg.matrix_norm(conv.weight[:, :, 0, 0], 2)), rel=1e-11
    )
    # The mean of 3 x 3 pixels has norm 1 on the torus, and nearly so on a large image.
    mean = Conv(
        torch.full((1, 1, 3, 3), 1 / 9, dtype=torch.float64), (1, 40, 40), (1, 1), (1, 1), (1, 1), 1
    )
    assert 1 <= convolution._spectral(mean, (1, 40, 40)) <= 1 + 1e-11


@pytest.mark.parametrize("norm", NORMS)
def test_other_maps_are_bounded_by_their_matrix(norm: float) -> None:
    source = torch.tensor([0, 0, 3, -1, 2, 0])
    maps: list[tuple[Linear, tuple[int, ...]]] = [
        (Matrix(draw(3, 4)), (2, 4)),
        (Scale(draw(3, 1)), (3, 2)),
        (Pick(source, (4,), (6,)), (4,)),
        (Average(lambda x: F.avg_pool2d(x, 2), (1, 4, 4)), (1, 4, 4)),
        (Average(lambda x: x.sum(1), (3, 2)), (3, 2)),
    ]
    for map_, shape in maps:
        truth = float(operator_norm(dense(map_, [shape], 0).T, norm, norm))
        found = map_norm(map_, norm, shape, output(map_, shape))
        assert truth * (1 - 1e-14) <= found <= truth * (1 + 1e-10)
    overlapping = Average(lambda x: F.avg_pool2d(x, 2, 1), (1, 3, 3))
    assert map_norm(overlapping, norm, (1, 3, 3), (1, 2, 2)) >= float(
        operator_norm(dense(overlapping, [(1, 3, 3)], 0).T, norm, norm)
    )


@pytest.mark.parametrize(("r", "s"), PAIRS)
@pytest.mark.parametrize("name", MAKE)
def test_the_product_is_above_the_jacobians_of_many_points(name: str, r: float, s: float) -> None:
    graph = network(name)
    bound = product(graph, r, s)
    x = torch.cat([scale * draw(40, *graph.nodes[0].shape, seed=3) for scale in (0.1, 1.0, 100.0)])
    slopes = jacobian(graph.logits, x)
    if r == 1 or s == math.inf or r == s or graph.inputs < 14:
        found = operator_norm(slopes, r, s)
    else:  # any direction gives a lower bound
        u = torch.cat([draw(500, graph.inputs, seed=4).sign(), draw(500, graph.inputs, seed=5)])
        found = torch.linalg.vector_norm(
            slopes @ (u / torch.linalg.vector_norm(u, r, dim=1, keepdim=True)).T, s, dim=1
        ).amax(1)
    assert 0 < float(found.max()) <= bound * (1 + 1e-14) < math.inf


def test_products_in_closed_form() -> None:
    assert product(layers([[3.0, -4.0]]), 2, 2) == pytest.approx(5)
    assert product(layers([[3.0, -4.0]]), math.inf, 1) == pytest.approx(7)
    assert product(layers([[3.0, -4.0]], [[2.0], [-2.0]]), 1, math.inf) == pytest.approx(8)
    # Two layers of ones: 1 -> 1 through norm 1 is 2 * 2, 1 -> inf needs no more than 2 through any
    # norm.
    ones = [[1.0, 1.0], [1.0, 1.0]]
    assert product(layers(ones, ones), 1, 1) == pytest.approx(4)
    assert product(layers(ones, ones), 1, math.inf) == pytest.approx(2)
    assert product(layers(ones, ones), 2, 2) == pytest.approx(4)


def test_products_of_sums_concatenations_and_of_nothing() -> None:
    start = Node((), (3,), "the input")
    for r, s in PAIRS:
        assert product(
            Graph((start, Node((0,), (3,), "", Affine(Scale(torch.tensor(2.0).double()))))), r, s
        ) >= 2 * change(3, r, s) * (1 - 1e-15)
        twice = Graph((start, Node((0, 0), (3,), "", Affine(Sum(2)))))
        assert product(twice, r, s) >= 2 * change(3, r, s) * (1 - 1e-15)
        both = Graph((start, Node((0, 0), (6,), "", Affine(Concat(1, (3, 3))))))
        assert product(both, r, s) >= brute(torch.eye(3).double().repeat(2, 1), r, s) * (1 - 1e-15)
    both = Graph((start, Node((0, 0), (6,), "", Affine(Concat(1, (3, 3))))))
    assert [product(both, r, r) for r in NORMS] == pytest.approx([2.0, math.sqrt(2), 1.0])


@pytest.mark.parametrize("norm", NORMS)
def test_inactive_weights_do_not_lower_the_product(norm: float) -> None:
    graph = mlp(
        [4, 6, 5, 3], 7, slope=0.9
    )  # nearly linear: the product of the weights is nearly attained or below
    matrices = [node.map.weight for node in graph.nodes if isinstance(node.map, Matrix)]
    whole = matrices[2] @ matrices[1] @ matrices[0]
    assert float(operator_norm(whole, norm, norm)) <= product(graph, norm, norm)


MAPS: dict[str, tuple[Linear, tuple[int, ...]]] = {
    "transposed": (
        Transposed(Conv(draw(4, 1, 2, 3), (2, 5, 6), (2, 2), (1, 0), (1, 1), 2)),
        (4, 3, 2),
    ),
    "transposed, dilated": (
        Transposed(Conv(draw(3, 2, 2, 2), (2, 4, 4), (1, 1), (0, 0), (2, 2), 1)),
        (3, 2, 2),
    ),
    "volume": (Conv(draw(4, 1, 2, 2, 2), (2, 3, 2, 3), (1, 2, 1), (1, 0, 0), (1, 1, 2), 2), ()),
    "transposed volume": (
        Transposed(Conv(draw(2, 2, 1, 2, 2), (2, 2, 3, 3), (1, 1, 2), (0, 1, 0), (1, 1, 1), 1)),
        (2, 2, 4, 1),
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_tells_the_truth_of_itself(name: str) -> None:
    """Transpose, magnitude, norms of the map and of its rows, terms: against its matrix."""
    map_, shape = MAPS[name]
    shape = shape or map_.shape
    count = math.prod(shape)
    eye = torch.eye(count, dtype=torch.float64).reshape(-1, *shape)
    out = map_.forward(eye)
    output = tuple(out.shape[1:])
    matrix = out.reshape(count, -1).T
    back = map_.transpose(torch.eye(len(matrix), dtype=torch.float64).reshape(-1, *output))[0]
    assert torch.allclose(back.reshape(len(matrix), -1), matrix, rtol=1e-14, atol=1e-14)
    size = map_.magnitude().forward(eye).reshape(count, -1).T
    assert torch.allclose(size, matrix.abs(), rtol=1e-14, atol=1e-14)
    plus, minus = map_.signed()
    assert minus is not None
    assert torch.allclose(plus.forward(eye) - minus.forward(eye), out, rtol=1e-14, atol=1e-14)
    for r in (1.0, 2.0, math.inf):
        truth = float(torch.linalg.matrix_norm(matrix, r))
        assert truth * (1 - 1e-12) <= map_.norm(r, shape, output) <= truth * (1 + 1e-9)
    for s in (2.0, math.inf):
        rows = map_.row_norms(s)
        assert rows is not None
        length = torch.linalg.vector_norm(matrix, s, dim=1).reshape(output)
        assert (rows.expand(output) >= length * (1 - 1e-14)).all()
    used = int((matrix != 0).sum(1).max())
    assert map_.fan_in >= used and map_.roundings >= used + 1
    assert map_.terms >= 4 + max(used, int((matrix != 0).sum(0).max()))
    for factor in (draw(*shape[:1], *[1] * (len(shape) - 1)), torch.tensor(0.3).double()):
        folded = map_.fold_before(factor, shape)
        assert folded is not None
        assert torch.allclose(folded.forward(eye), map_.forward(eye * factor), atol=1e-14)
    for factor in (draw(*output[:1], *[1] * (len(shape) - 1)), torch.tensor(0.3).double()):
        folded = map_.fold_after(factor, output)
        assert folded is not None
        assert torch.allclose(folded.forward(eye), out * factor, atol=1e-14)
    turned = map_.turned(torch.float32).transpose(out.float())[0]
    assert torch.allclose(turned.double(), map_.transpose(out)[0], rtol=1e-4, atol=1e-4)


class Windows(Scale):
    """A map that knows its shape from its caller: windows that overlap, more of them on larger
    images.
    """

    def norm(self, norm: float, shape: tuple[int, ...], output: tuple[int, ...]) -> float:
        return float(math.prod(shape) + math.prod(output))


def test_one_map_on_images_of_two_sizes() -> None:
    map_ = Windows(torch.ones(()))
    assert [map_norm(map_, 2.0, (n,), (1,)) for n in (3, 5, 3)] == [4.0, 6.0, 4.0]
