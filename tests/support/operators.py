"""Every operation that certificates read, with the values of its arguments that matter: one line
for each.

A line is a name, the shape of a sample, and what the network does with a batch before a random
linear head. `smooth` tells those that are not piecewise linear. `refused` are values that cannot be
certified, and must not be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INF = math.inf
IMAGE = (2, 3, 3)
CUBE = (2, 2, 3, 2)
Body = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Operator:
    """One line of the table; scale: what its outputs are multiplied by, to be of order one."""

    name: str
    shape: tuple[int, ...]
    body: Body
    smooth: bool = False
    scale: float = 1.0


@cache
def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Fixed weights of order one; made once, so that an exported program holds them as
    constants.
    """
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    )


def conv(**options: Any) -> Body:
    groups = int(options.get("groups", 1))
    weight = (2, 2 // groups, 2, 2)
    return lambda x: F.conv2d(x, numbers(*weight), numbers(2), **options)


def norm(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Body:
    return lambda x: F.batch_norm(x, mean, var, weight, bias, eps=eps)


TWO = numbers(2)
ONES = torch.ones(2, dtype=torch.float64)
FROZEN = (numbers(2), 1 + numbers(2).abs(), numbers(2), numbers(2))
RISE = torch.tensor([0.0, 4e9, 0.0]).double()
LOW = 0.1 * numbers(4)
ORDER = torch.tensor([[3, 1, 1, 0]])
MASK = torch.tensor([[True, False, True], [False, False, True], [True, True, False]])
TABLE = [
    # Linear layers.
    Operator("linear", (4,), lambda x: F.linear(x, numbers(3, 4), numbers(3))),
    Operator("linear without bias", (4,), lambda x: F.linear(x, numbers(3, 4))),
    Operator(
        "linear with zero weights",
        (4,),
        lambda x: F.linear(x, 0 * numbers(3, 4), numbers(3)) + x[:, :3],
    ),
    Operator("linear of tokens", (3, 4), lambda x: F.linear(x, numbers(3, 4), numbers(3))),
    Operator(
        "linear, huge weights",
        (4,),
        lambda x: F.linear(x, 1e30 * numbers(3, 4), 1e30 * numbers(3)),
        scale=1e-30,
    ),
    Operator(
        "linear, tiny weights",
        (4,),
        lambda x: F.linear(x, 1e-30 * numbers(3, 4), 1e-30 * numbers(3)),
        scale=1e30,
    ),
    Operator(
        "linear, one subnormal weight",
        (2,),
        lambda x: F.linear(x, torch.tensor([[1e-310, 1.0], [1.0, 0.0]]).double()),
    ),
    Operator("matmul", (4,), lambda x: x @ numbers(4, 3)),
    Operator("matmul from the left", (4, 2), lambda x: numbers(3, 4) @ x),
    Operator("matmul with a vector", (4,), lambda x: (x @ numbers(4))[:, None]),
    Operator("matmul made on the way", (4,), lambda x: x @ torch.eye(4, dtype=x.dtype).roll(1, 0)),
    Operator(
        "addmm",
        (4,),
        lambda x: torch.addmm(numbers(3)[None], x, numbers(4, 3), beta=0.5, alpha=-2.0),
    ),
    Operator("addmm as a layer", (4,), lambda x: torch.addmm(numbers(3), x, numbers(4, 3))),
    Operator("conv", IMAGE, conv()),
    Operator("conv, stride", IMAGE, conv(stride=2)),
    Operator("conv, stride and padding", IMAGE, conv(stride=(2, 1), padding=(1, 2))),
    Operator("conv, dilation", IMAGE, conv(dilation=2)),
    Operator("conv, groups", IMAGE, conv(groups=2)),
    Operator("conv, everything", IMAGE, conv(groups=2, stride=2, padding=2, dilation=2)),
    Operator(
        "conv, same padding", IMAGE, lambda x: F.conv2d(x, numbers(2, 2, 3, 3), padding="same")
    ),
    Operator("conv, same padding, uneven", IMAGE, conv(padding="same")),
    Operator(
        "conv, same padding, uneven and wide",
        IMAGE,
        lambda x: F.conv2d(x, numbers(2, 2, 4, 3), numbers(2), padding="same", dilation=(1, 2)),
    ),
    Operator(
        "conv of a line, same padding, uneven",
        (2, 4),
        lambda x: F.conv1d(x, numbers(3, 2, 2), numbers(3), padding="same"),
    ),
    Operator(
        "conv of a volume, same padding, uneven",
        CUBE,
        lambda x: F.conv3d(x, numbers(3, 2, 2, 3, 2), padding="same"),
    ),
    Operator(
        "conv with a kernel made on the way",
        (2, 4),
        lambda x: F.conv1d(x, torch.ones(1, 2, 3, dtype=x.dtype) / 6, padding=1),
    ),
    Operator("conv, valid padding", IMAGE, conv(padding="valid")),
    Operator("conv of a line", (2, 4), lambda x: F.conv1d(x, numbers(3, 2, 2), numbers(3))),
    Operator(
        "conv of a line, everything",
        (2, 5),
        lambda x: F.conv1d(x, numbers(4, 1, 2), numbers(4), 2, 1, 2, 2),
    ),
    Operator("conv of a volume", CUBE, lambda x: F.conv3d(x, numbers(3, 2, 2, 2, 2), numbers(3))),
    Operator(
        "conv of a volume, everything",
        CUBE,
        lambda x: F.conv3d(x, numbers(2, 1, 2, 2, 2), numbers(2), (1, 2, 1), (1, 0, 1), 1, 2),
    ),
    Operator(
        "transposed conv", IMAGE, lambda x: F.conv_transpose2d(x, numbers(2, 3, 2, 2), numbers(3))
    ),
    Operator(
        "transposed conv, everything",
        IMAGE,
        lambda x: F.conv_transpose2d(x, numbers(2, 1, 2, 3), numbers(2), (2, 3), 1, (1, 0), 2, 2),
    ),
    Operator(
        "transposed conv, scaled on both sides",
        IMAGE,
        lambda x: F.conv_transpose2d(x * TWO[:, None, None], numbers(2, 3, 2, 2)) * 0.7,
    ),
    Operator(
        "transposed conv of a line",
        (2, 4),
        lambda x: F.conv_transpose1d(x, numbers(2, 3, 2), numbers(3), 2, 0, 1),
    ),
    Operator(
        "transposed conv of a volume",
        CUBE,
        lambda x: F.conv_transpose3d(x, numbers(2, 2, 2, 2, 2), numbers(2), 2, 1),
    ),
    Operator("instance norm, frozen", IMAGE, lambda x: F.instance_norm(x, *FROZEN, False)),
    Operator("batch norm", IMAGE, norm(TWO, ONES, TWO, TWO)),
    Operator("batch norm, no gain", IMAGE, norm(TWO, 0.1 * ONES, None, None)),
    Operator("batch norm, zero variance", IMAGE, norm(TWO, 0 * ONES, 0.01 * ONES, None)),
    Operator("batch norm, negative gain", IMAGE, norm(0 * TWO, ONES, -ONES, TWO, eps=1e-3)),
    # Activations.
    Operator("relu", (4,), torch.relu),
    Operator("leaky relu, slope 0", (4,), lambda x: F.leaky_relu(x, 0.0)),
    Operator("leaky relu", (4,), lambda x: F.leaky_relu(x, 0.2)),
    Operator("leaky relu, slope 1", (4,), lambda x: F.leaky_relu(x, 1.0)),
    Operator("leaky relu, tiny slope", (4,), lambda x: F.leaky_relu(x, 1e-40)),
    Operator("leaky relu, negative slope", (4,), lambda x: F.leaky_relu(x, -0.1)),
    Operator("leaky relu, steep", (4,), lambda x: F.leaky_relu(x, 1.5)),
    Operator("leaky relu, steep, inside", (4,), lambda x: torch.relu(F.leaky_relu(x - 0.1, 3.0))),
    Operator("prelu, any slopes", IMAGE, lambda x: F.prelu(x, torch.tensor([-0.7, 1.9]).double())),
    Operator("hardsigmoid", (4,), lambda x: F.hardsigmoid(5 * x)),
    Operator("prelu", IMAGE, lambda x: F.prelu(x, torch.tensor([0.1, 0.9]).double())),
    Operator("relu6", (4,), lambda x: F.relu6(9 * x)),
    Operator("hardtanh", (4,), lambda x: F.hardtanh(x, -0.3, 0.4)),
    Operator("threshold", (4,), lambda x: F.threshold(x, 0.0, 0.0)),
    Operator("threshold, elsewhere", (4,), lambda x: F.threshold(x, -0.3, -0.3)),
    Operator("soft shrinkage", (4,), lambda x: F.softshrink(x, 0.3)),
    Operator("hard shrinkage by nothing", (4,), lambda x: F.hardshrink(x, 0.0)),
    Operator("clamp", (4,), lambda x: x.clamp(-0.2, 0.3)),
    Operator("clamp, upside down", (4,), lambda x: x.clamp(0.3, 0.1) + x),
    Operator("clip", (4,), lambda x: torch.clip(x, -0.2, 0.3)),
    Operator("clamp by tensors", (4,), lambda x: x.clamp(LOW[None], LOW + 0.5)),
    Operator("clamp from below", (4,), lambda x: x.clamp(min=0.1)),
    Operator("clamp from above", (4,), lambda x: x.clamp(max=0.1)),
    Operator("clamp, infinite", (4,), lambda x: x.clamp(-INF, INF)),
    Operator("clamp, one point", (4,), lambda x: x.clamp(0.2, 0.2) + x),
    Operator("abs", (4,), torch.abs),
    Operator("maximum", (4,), lambda x: torch.maximum(x[:, :2], x[:, 2:])),
    Operator("minimum", (4,), lambda x: torch.minimum(x[:, :2], x[:, 2:])),
    Operator("maximum with a constant", (4,), lambda x: torch.maximum(x, numbers(4))),
    Operator("minimum with a constant", (4,), lambda x: torch.minimum(x, numbers(4))),
    Operator("sort", (4,), lambda x: x.sort(1)[0]),
    Operator("sort, descending", (2, 3), lambda x: x.sort(1, descending=True)[0]),
    Operator("groups sorted", (4,), lambda x: x.reshape(len(x), 2, 2).sort(2)[0].flatten(1)),
    Operator(
        "maxima and minima",
        (4,),
        lambda x: torch.cat([torch.maximum(*x.chunk(2, 1)), torch.minimum(*x.chunk(2, 1))], 1),
    ),
    Operator("topk", (4,), lambda x: x.topk(2)[0]),
    Operator("topk of the least", (3, 2), lambda x: x.topk(2, 1, largest=False)[0]),
    Operator("median", (5,), lambda x: x.median(1, keepdim=True)[0]),
    Operator("median of four", (4, 2), lambda x: x.median(1)[0]),
    Operator("kthvalue", (4,), lambda x: x.kthvalue(3, 1)[0][:, None]),
    Operator("maximum of an axis", IMAGE, lambda x: x.max(2)[0]),
    Operator("maximum of axes", IMAGE, lambda x: x.amax((2, 3))),
    Operator("minimum of an axis", IMAGE, lambda x: x.amin(1, keepdim=True)),
    # Poolings and sums.
    Operator("adaptive max pool", IMAGE, lambda x: F.adaptive_max_pool2d(x, 2)),
    Operator("adaptive max pool, uneven", (2, 5, 3), lambda x: F.adaptive_max_pool2d(x, (3, 2))),
    Operator("adaptive max pool of a line", (2, 5), lambda x: F.adaptive_max_pool1d(x, 2)),
    Operator("max pool of a line", (2, 5), lambda x: F.max_pool1d(x, 2, 2, 1)),
    Operator("max pool of a volume", CUBE, lambda x: F.max_pool3d(x, 2, 1)),
    Operator("max pool", IMAGE, lambda x: F.max_pool2d(x, 2)),
    Operator("max pool, stride", IMAGE, lambda x: F.max_pool2d(x, 2, 1)),
    Operator("max pool, padding", IMAGE, lambda x: F.max_pool2d(x, 2, 2, 1)),
    Operator("max pool, ceil mode", IMAGE, lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True)),
    Operator("max pool, dilation", IMAGE, lambda x: F.max_pool2d(x, 2, 1, 0, 2)),
    Operator("average pool", IMAGE, lambda x: F.avg_pool2d(x, 2)),
    Operator("average pool, padding", IMAGE, lambda x: F.avg_pool2d(x, 2, 1, 1)),
    Operator(
        "average pool, padding not counted",
        IMAGE,
        lambda x: F.avg_pool2d(x, 2, 1, 1, count_include_pad=False),
    ),
    Operator("average pool, ceil mode", IMAGE, lambda x: F.avg_pool2d(x, 2, 2, ceil_mode=True)),
    Operator("average pool, divisor", IMAGE, lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
    Operator(
        "average pool, negative divisor", IMAGE, lambda x: F.avg_pool2d(x, 2, divisor_override=-4)
    ),
    Operator(
        "average pool, negative divisor, relu",
        IMAGE,
        lambda x: torch.relu(F.avg_pool2d(x, 2, 1, divisor_override=-4)),
    ),
    Operator(
        "average pool, negative divisor and padding",
        IMAGE,
        lambda x: F.avg_pool2d(x, 2, 1, 1, divisor_override=-1),
    ),
    Operator(
        "average pool, huge divisor",
        IMAGE,
        lambda x: F.avg_pool2d(x, 2, divisor_override=2**60),
        scale=2.0**60,
    ),
    Operator("adaptive average pool", IMAGE, lambda x: F.adaptive_avg_pool2d(x, 2)),
    Operator("average pool in one dimension", (2, 4), lambda x: F.avg_pool1d(x, 2)),
    Operator("mean", IMAGE, lambda x: x.mean((2, 3))),
    Operator("mean in float32", IMAGE, lambda x: x.mean((2, 3), dtype=torch.float32).double()),
    Operator("sum", IMAGE, lambda x: x.sum(1)),
    Operator("negative sum", IMAGE, lambda x: -x.sum(1) * 1.5),
    # Arithmetic with constants, and preprocessing of every shape.
    *(
        Operator(
            f"normalised by {shape}",
            (1, 3, 3),
            lambda x, s=shape: (x - torch.full(s, 0.3)) / torch.full(s, 0.4),
        )
        for shape in ((), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1))
    ),
    *(
        Operator(
            f"normalised by {s}",
            IMAGE,
            lambda x, s=s: (x - numbers(*s)) / (0.5 + numbers(*s).abs()),
        )
        for s in ((2, 1, 1), (1, 2, 1, 1), (2, 3, 3), (3,))
    ),
    Operator("shift far down", (4,), lambda x: torch.relu(x * 1e10 - 2e9), scale=1e-10),
    Operator("shift far up", (4,), lambda x: torch.relu(3e9 - x * 1e10), scale=1e-10),
    Operator("shift out of sight", (4,), lambda x: torch.relu(x - 1e12) + x),
    Operator(
        "scaled there and back",
        (4,),
        lambda x: torch.relu(torch.relu(x * 1e-200 - 2e-201) * 1e300),
        scale=1e-100,
    ),
    Operator("scaled by 0", (4,), lambda x: x * torch.tensor([0.0, 1.0, -1.0, 0.0]).double()),
    Operator("division by a negative number", (4,), lambda x: x / -0.7),
    Operator("true_divide", (4,), lambda x: torch.true_divide(x, numbers(4))),
    Operator("one minus", (4,), lambda x: 1 - x),
    Operator("add with a factor", (4,), lambda x: torch.add(x, numbers(4), alpha=-2.5)),
    Operator("add two with a factor", (4,), lambda x: torch.sub(x, x.flip(1), alpha=0.5)),
    Operator("where", (3, 3), lambda x: torch.where(MASK, x, -2e9) * 1e-3),
    Operator("where of two", (3, 3), lambda x: torch.where(MASK, x, -2 * x)),
    Operator("masked fill", (3, 3), lambda x: x.masked_fill(MASK, 0.7)),
    Operator("masked fill far down", (3, 3), lambda x: torch.relu(x.masked_fill(MASK, -1e12))),
    # Moves.
    Operator("reshape", IMAGE, lambda x: x.reshape(len(x), 3, 6)),
    Operator("permute", IMAGE, lambda x: x.permute(0, 2, 3, 1)),
    Operator("slice", IMAGE, lambda x: x[:, :, 1:, ::2]),
    Operator("flip", IMAGE, lambda x: x.flip(2)),
    Operator("roll", IMAGE, lambda x: x.roll(1, 3)),
    Operator("pad", IMAGE, lambda x: F.pad(x, (1, 0, 0, 2))),
    Operator("expand", (1, 4), lambda x: x.expand(-1, 3, -1)),
    Operator("concatenation", (4,), lambda x: torch.cat([x, torch.relu(x), x.flip(1)], 1)),
    Operator("stack", (4,), lambda x: torch.stack([x, -x], 2)),
    Operator("index by a list", (4,), lambda x: x[:, [2, 0, 1, 1]]),
    Operator("index by two lists", IMAGE, lambda x: x[:, 1, [0, 2], [1, 1]]),
    Operator("gather", (4,), lambda x: x.gather(1, ORDER.expand(len(x), -1))),
    Operator("repeat", (4,), lambda x: x.repeat(1, 3)),
    Operator("repeat_interleave", (2, 2), lambda x: x.repeat_interleave(3, 1)),
    Operator("tile", (2, 2), lambda x: x.tile((2, 3))),
    Operator("diagonal", (3, 3), lambda x: x.diagonal(1, 1, 2)),
    Operator("rot90", IMAGE, lambda x: x.rot90(1, (2, 3))),
    Operator("triangle", (3, 3), lambda x: x.tril() - 2 * x.triu(1)),
    Operator("unfold", IMAGE, lambda x: F.unfold(x, 2, padding=1, stride=2)),
    Operator("unfold of an axis", (5,), lambda x: x.unfold(1, 3, 2)),
    Operator("pad with a constant", IMAGE, lambda x: F.pad(x, (1, 0, 0, 2), value=0.7)),
    Operator("pad with one", (4,), lambda x: torch.relu(1e-5 * F.pad(x, (0, 1), value=1.0))),
    Operator("pad by reflection", IMAGE, lambda x: F.pad(x, (1, 1, 2, 0), mode="reflect")),
    Operator("pad by replication", IMAGE, lambda x: F.pad(x, (1, 0, 0, 2), mode="replicate")),
    Operator("pad in a circle", IMAGE, lambda x: F.pad(x, (1, 0, 0, 2), mode="circular")),
    Operator("all of a sample in one number", IMAGE, lambda x: x.sum((1, 2, 3))[:, None]),
    Operator(
        "one number for each sample",
        (4,),
        lambda x: (torch.relu(x.sum(1) - 0.2).clamp(max=1.5) / 3 + x[:, 0]).unsqueeze(1),
    ),
    Operator("nothing joined", (4,), lambda x: torch.cat([x[:, 4:], x, x[:, :0]], 1)),
    Operator("a sum of nothing", (4,), lambda x: x + x[:, :0].sum(1, keepdim=True)),
    Operator("chunk", (4,), lambda x: x.chunk(2, 1)[1] - x.chunk(2, 1)[0]),
    Operator("pixel shuffle", (4, 2, 2), lambda x: F.pixel_shuffle(x, 2)),
    Operator("pixel unshuffle", (1, 4, 2), lambda x: F.pixel_unshuffle(x, 2)),
    Operator("channel shuffle", (4, 2, 1), lambda x: F.channel_shuffle(x, 2)),
    Operator("upsampled, nearest", IMAGE, lambda x: F.interpolate(x, scale_factor=2)),
    Operator("upsampled, nearest, to a size", IMAGE, lambda x: F.interpolate(x, (4, 5))),
    Operator(
        "upsampled, bilinear", IMAGE, lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")
    ),
    Operator(
        "upsampled, bilinear, corners",
        IMAGE,
        lambda x: F.interpolate(x, (5, 4), mode="bilinear", align_corners=True),
    ),
    Operator(
        "upsampled, uneven factors",
        IMAGE,
        lambda x: F.interpolate(x, scale_factor=(1.3, 2.7), mode="bilinear"),
    ),
    Operator("upsampled line", (2, 3), lambda x: F.interpolate(x, 5, mode="linear")),
    # Smooth ones.
    *(
        Operator(f.__name__, (4,), f, smooth=True)
        for f in (torch.sigmoid, torch.tanh, F.gelu, F.silu, F.softplus, F.elu, F.selu, F.celu)
    ),
    Operator("hardswish", (4,), lambda x: F.hardswish(4 * x), smooth=True),
    Operator("mish", (4,), lambda x: F.mish(3 * x), smooth=True),
    Operator(
        "instance norm",
        (2, 2, 2),
        lambda x: F.instance_norm(x, None, None, numbers(2), numbers(2)),
        smooth=True,
    ),
    Operator("gelu by tanh", (4,), lambda x: F.gelu(x, approximate="tanh"), smooth=True),
    Operator("softplus, beta", (4,), lambda x: F.softplus(x, 3.0, 20.0), smooth=True),
    Operator("softplus, negative beta", (4,), lambda x: F.softplus(x, -2.0), smooth=True),
    Operator("log sigmoid", (4,), lambda x: F.logsigmoid(3 * x), smooth=True),
    Operator("tanh shrinkage", (4,), lambda x: F.tanhshrink(3 * x), smooth=True),
    Operator("elu, negative alpha", (4,), lambda x: F.elu(x, -0.7), smooth=True),
    Operator("celu, small alpha", (4,), lambda x: F.celu(x, 0.1), smooth=True),
    Operator("elu, alpha", (4,), lambda x: F.elu(x, 0.4), smooth=True),
    Operator("sigmoid, steep", (4,), lambda x: torch.sigmoid(200 * (x - 0.4)), smooth=True),
    Operator("tanh, saturated", (4,), lambda x: torch.tanh(1e4 * (x - 0.4)), smooth=True),
    Operator("square", (4,), torch.square, smooth=True),
    Operator("product", (4,), lambda x: x * x.flip(1), smooth=True),
    Operator(
        "layer norm", (3, 4), lambda x: F.layer_norm(x, (4,), numbers(4), numbers(4)), smooth=True
    ),
    Operator("softmax", (3, 3), lambda x: torch.softmax(x, -1), smooth=True),
    Operator("softmax, another axis", (3, 3), lambda x: torch.softmax(3 * x, 1), smooth=True),
    Operator(
        "softmax, masked by -inf",
        (3, 3),
        lambda x: torch.softmax(x.masked_fill(MASK, -INF), -1),
        smooth=True,
    ),
    Operator(
        "softmax, masked by adding",
        (3, 3),
        lambda x: torch.softmax(x + torch.where(MASK, -1e30, 0.0), 2),
        smooth=True,
    ),
    Operator(
        "softmax, masked by the least number",
        (3, 3),
        lambda x: torch.softmax(x.masked_fill(MASK, torch.finfo(torch.float32).min), -1),
        smooth=True,
    ),
    Operator("softmax, far down", (3, 3), lambda x: torch.softmax(3 * x - 1e10, -1), smooth=True),
    Operator(
        "softmax, scores as large as the mask",
        (3, 3),
        lambda x: torch.softmax(x * torch.tensor([1.0, 1e10, 1.0]).double() - RISE, -1),
        smooth=True,
    ),
    Operator(
        "softmax, scores below the mask",
        (3, 3),
        lambda x: torch.softmax((3 * x - 2e10).masked_fill(MASK, -INF), -1),
        smooth=True,
    ),
    Operator("a product of samples", (4,), lambda x: (x * x.flip(1)).sum(1)[:, None], smooth=True),
    Operator(
        "einsum of samples",
        (4,),
        lambda x: torch.einsum("bi,bi->b", x, x.flip(1))[:, None],
        smooth=True,
    ),
    Operator(
        "product of single numbers", (4,), lambda x: (x.sum(1) * x[:, 0])[:, None], smooth=True
    ),
    Operator("glu", (4,), lambda x: F.glu(x, 1), smooth=True),
]
REFUSED = [
    Operator("plus infinity", (4,), lambda x: torch.relu(x - INF) + x),
    Operator("where, infinite", (3, 3), lambda x: torch.relu(torch.where(MASK, x, -INF))),
    Operator("leaky relu, infinite slope", (4,), lambda x: F.leaky_relu(x, INF)),
    Operator("log-softmax on the way", (4,), lambda x: torch.log_softmax(x, 1)),
    Operator("maximum over the batch", (4,), lambda x: x + x.amax(0, keepdim=True)),
    Operator("celu, negative alpha", (4,), lambda x: F.celu(x, -1.0), smooth=True),
    Operator("softplus, beta 0", (4,), lambda x: F.softplus(x, 0.0), smooth=True),
    Operator("threshold, a jump", (4,), lambda x: F.threshold(x, 0.1, 0.0)),
    Operator("hard shrinkage", (4,), lambda x: F.hardshrink(x, 0.2)),
    Operator("softmax, all masked", (3, 3), lambda x: torch.softmax(x - INF, -1), smooth=True),
    Operator("indices of a sort", (4,), lambda x: x.gather(1, x.sort(1)[1])),
    Operator("topk in no order", (4,), lambda x: x.topk(2, sorted=False)[0]),
    Operator("median of everything", (4,), lambda x: x - x.median()),
    Operator("clamp, so far that x is lost", (4,), lambda x: x.clamp(-1e30, 1e30)),
    Operator("sine", (4,), torch.sin, smooth=True),
]


class Headed(nn.Module):
    """An operation between fixed layers, with three logits; float64."""

    def __init__(self, operator: Operator, seed: int = 0) -> None:
        super().__init__()
        self.operator = operator
        x = torch.rand(
            2, *operator.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        with torch.no_grad():
            size = operator.body(x).flatten(1).shape[1]
        weight = numbers(3, size, seed=seed) * operator.scale / math.sqrt(size)
        self.head = nn.Parameter(weight)
        with torch.no_grad():
            self.bias = nn.Parameter(-F.linear(operator.body(x).flatten(1), weight).mean(0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.operator.body(x).flatten(1), self.head, self.bias)
