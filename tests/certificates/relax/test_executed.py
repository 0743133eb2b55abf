"""Certificates for the network as it is executed: bounds on its rounding errors, and what is
proved above them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from wassail import losses
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.reader import read
from wassail.certificates.prove.record import Radii
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import ahead, arithmetic_of, gamma, margin_errors, refusal
from wassail.errors import InputError


def cancelling(spread: float = 0.5) -> nn.Sequential:
    """Weights of 1e6 that are nearly the same for all classes: logits of 1e6 with margins of
    about `spread`.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        model[2].weight.copy_(1e6 * torch.rand(1, 16) + spread * torch.randn(3, 16))
        model[2].bias.copy_(0.3 * torch.randn(3))
    return model


def flipped(
    model: nn.Module, x: Tensor, y: Tensor, radius: Tensor, norm: float = math.inf, tries: int = 60
) -> int:
    """How many samples random points inside their balls misclassify, in the model's own
    arithmetic.
    """
    generator = torch.Generator().manual_seed(0)
    bad = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(tries):
        step = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
        reach = radius.clamp(max=1.0) / torch.linalg.vector_norm(step.flatten(1), norm, dim=1)
        points = (
            (x.double() + step * reach.reshape(-1, *[1] * (x.ndim - 1))).clamp(0, 1).to(x.dtype)
        )
        away = torch.linalg.vector_norm((points.double() - x.double()).flatten(1), norm, dim=1)
        bad |= (radius > 0) & (away <= radius) & (model(points).argmax(1) != y)
    return int(bad.sum())


@pytest.mark.slow_cases("exact", "auto")
@pytest.mark.parametrize("method", ["crown", "auto", "exact"])
def test_a_ball_of_an_executed_certificate_holds_no_point_that_the_float32_network_misclassifies(
    method: str,
) -> None:
    model = cancelling()
    x = torch.rand(16, 8, generator=torch.Generator().manual_seed(2))
    graph = read(model, (8,))
    y = graph.logits(x).argmax(1)
    exact = ws.radii(model, x, y, "inf", (0.0, 1.0), method, arithmetic="exact")
    executed = ws.radii(model, x, y, "inf", (0.0, 1.0), method, arithmetic="executed")
    assert (exact.arithmetic, executed.arithmetic) == ("exact", "executed")
    assert flipped(model, x, y, exact.values) > 0  # the hole
    assert flipped(model, x, y, executed.values) == 0
    assert "executed arithmetic" in repr(executed)


@pytest.mark.slow
def test_branching_and_verification_above_the_rounding_error() -> None:
    model = cancelling(spread=4.0)  # so that something is left to prove
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(2))
    y = read(model, (8,)).logits(x).argmax(1)
    crown = ws.radii(model, x, y, "2", (0.0, 1.0), "crown", arithmetic="executed")
    branch = ws.radii(model, x, y, "2", (0.0, 1.0), "branch", arithmetic="executed")
    assert (branch.values >= crown.values * (1 - 1e-9)).all() and (crown.values > 0).any()
    assert flipped(model, x, y, branch.values, 2) == 0
    middle = float(crown.values[crown.values > 0].median())
    for method in ("crown", "ball", "branch", "exact", "auto"):
        threat = ws.Threat("2", "inf", middle, (0.0, 1.0))
        proved = ws.verify(model, x, y, threat, method, arithmetic="executed").proved
        assert flipped(model, x, y, proved * middle, 2) == 0
        if method != "exact":
            assert proved[crown.values >= middle].all()
    with pytest.raises(InputError, match="differ in arithmetic"):
        ws.radii(model, x, y, "2", (0.0, 1.0), "branch", arithmetic="exact", start=crown)


class Mixed(nn.Module):
    """All that is covered: scaled inputs, padding, batch norm, leaky and plain ReLU, max and
    average pooling, sums, a clamp.
    """

    def __init__(self, scale: Callable[[int], float]) -> None:
        super().__init__()
        self.register_buffer("mean", 3.3 * torch.ones(1, 2, 1, 1) * scale(0))
        self.register_buffer("std", 0.37 * torch.ones(1, 2, 1, 1) * scale(0))
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.third = nn.Conv2d(4, 3, 1, stride=2)
        self.last = nn.Linear(3 * 3 * 3 + 12, 3)
        with torch.no_grad():
            for k, layer in enumerate((self.first, self.second, self.third)):
                layer.weight.mul_(scale(k + 1))
            self.norm.running_mean.copy_(torch.randn(4) * scale(1))
            self.norm.running_var.copy_((torch.rand(4) + 0.1) * scale(1) ** 2)
            self.norm.weight.copy_(torch.randn(4) * scale(4))
            self.norm.bias.copy_(torch.randn(4) * scale(4))

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.first((x - self.mean) / self.std)), 0.1)
        h = h + 0.3 * self.second(h)
        side = F.avg_pool2d(F.max_pool2d(h, 3, 1, 1), 3).abs().flatten(1)[:, :12]
        h = self.third(F.relu(h)).clamp(min=-0.7)
        return self.last(torch.cat([h.flatten(1), side], 1))


def wild(seed: int) -> Callable[[int], float]:
    """Scales of layers over many orders of magnitude."""
    exponents = torch.randint(-6, 7, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    return lambda k: 10.0 ** exponents[k]


def in_other_orders(model: nn.Module, points: Tensor) -> list[Tensor]:
    """The same network under other kernels and other orders of summation."""
    found = [model(points), torch.cat([model(point[None]) for point in points])]
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
        found.append(model(points))
    found.append(
        model(
            points.to(memory_format=torch.channels_last)
            if points.ndim == 4
            else points.T.contiguous().T
        )
    )
    return found


@pytest.mark.few(2)
@pytest.mark.slow_cases("2-*", "3-*", "4-*")
@pytest.mark.parametrize(
    ("seed", "dtype"), [*((seed, torch.float32) for seed in range(5)), (5, torch.float64)]
)
def test_no_executed_margin_is_farther_from_the_exact_one_than_the_bound(
    seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    model = Mixed(wild(seed) if seed else lambda k: 1.0).eval().to(dtype)
    graph = arithmetic_of(read(model, (2, 6, 6)), "executed")
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 2, 6, 6, generator=generator, dtype=dtype)
    y = torch.tensor([0, 1, 2])
    for norm, radius in ((math.inf, 0.0), (math.inf, 0.05), (2.0, 0.2)):
        sweep = Sweep(graph, Balls.make(x, torch.full((3,), radius), norm, (0.0, 1.0))).run()
        lower = margins(sweep, y)[0]
        error = margin_errors(sweep, y)
        for k in range(3):
            step = radius * (2 * torch.rand(40, 2, 6, 6, generator=generator, dtype=dtype) - 1)
            step = step / 72 ** (0.5 if norm == 2 else 0.0)  # a cube in the ball
            points = (x[k] + step).clamp(0, 1)
            far = torch.linalg.vector_norm((points.double() - x[k].double()).flatten(1), norm, 1)
            points = points[far <= radius]
            points = torch.cat([x[k : k + 1], points])
            with torch.no_grad():
                runs = in_other_orders(model, points)
            precise = graph.logits(points)
            for z in runs:
                margin = z[:, k, None].double() - z.double()
                if dtype == torch.float32:  # float64 has no finer reference here
                    assert (
                        (margin - (precise[:, k, None] - precise)).abs()
                        <= error[k] + 1e-12 * precise.abs().max()
                    ).all()
                assert (margin >= lower[k] - 1e-300).all()


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "transposed conv": (nn.ConvTranspose2d(2, 3, 3, 2, 1, 1), (2, 3, 3)),
    "conv of a line": (nn.Conv1d(2, 3, 3, padding=1), (2, 6)),
    "conv of a volume": (nn.Conv3d(2, 3, 2), (2, 2, 3, 3)),
    "negative slope": (nn.LeakyReLU(-0.3), (2, 6)),
    "steep slope": (nn.PReLU(init=2.7), (2, 6)),
    "hardsigmoid": (nn.Hardsigmoid(), (2, 6)),
    "instance norm": (
        nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        (2, 3, 3),
    ),
    "nearest": (nn.Upsample(scale_factor=2), (2, 3, 3)),
    "shuffle": (nn.PixelShuffle(2), (4, 2, 2)),
    "adaptive max": (nn.AdaptiveMaxPool2d(2), (2, 3, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_executed_layer_is_farther_from_the_exact_one_than_the_bound(name: str) -> None:
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    size = layer.eval()(torch.zeros(1, *shape)).numel()
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(size, 3)).eval()
    graph = arithmetic_of(read(model, shape), "executed")
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.rand(1, *shape, generator=generator) - 1
    radius = 0.25
    sweep = Sweep(graph, Balls.make(x, torch.full((1,), radius), math.inf, None)).run()
    error = margin_errors(sweep, torch.tensor([0]))[0]
    assert torch.isfinite(error).all() and float(error.max()) < 1e-3
    points = x + radius * (2 * torch.rand(400, *shape, generator=generator) - 1)
    points = points[((points.double() - x.double()).abs() <= radius).flatten(1).all(1)]
    with torch.no_grad():
        z = model(points).double()
    precise = graph.logits(points)
    apart = (z[:, :1] - z) - (precise[:, :1] - precise)
    assert (apart.abs() <= error + 1e-12).all()
    assert float(apart.abs().max()) > 0  # it rounds


def test_interpolation_and_a_log_softmax_are_not_covered() -> None:
    head = (nn.Flatten(), nn.Linear(16, 3))
    model = nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), *head).eval()
    assert "Upsample" in refusal(read(model, (1, 2, 2)))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.LogSoftmax(1)).eval()
    assert "log-softmax" in refusal(read(model, (1, 2, 2)))


def test_sums_in_any_order_stay_within_the_error_of_their_step() -> None:
    """One layer: every order of summation by hand, chunked, permuted and one term after the
    other.
    """
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(300, 4)
    with torch.no_grad():
        layer.weight.copy_(
            torch.randn(4, 300, generator=generator)
            * 10.0 ** torch.randint(-5, 6, (4, 300), generator=generator)
        )
    x = torch.rand(8, 300, generator=generator)
    graph = arithmetic_of(read(layer, (300,)), "executed")
    bounds = []
    for norm in (math.inf, 2.0):
        sweep = Sweep(graph, Balls.make(x, torch.zeros(8), norm, (0.0, 1.0))).run()
        bounds.append(sweep.executed[len(graph.nodes) - 1])
    bound, short = bounds
    exact = graph.logits(x)
    with torch.no_grad():
        terms = x.double()[:, None] * layer.weight.double()
        bias = layer.bias.double().abs()
    most = torch.maximum(terms.clamp(min=0).sum(2), (-terms).clamp(min=0).sum(2)) + bias
    size = terms.abs().sum(2) + bias
    assert torch.allclose(bound, 2.0**-24 * (size + 300 * most), rtol=1e-3)
    assert (bound < 0.85 * gamma(302, torch.float32) * size).all()
    assert (short < 0.99 * bound).all()  # which knows the products, one by one
    for seed in range(20):
        order = torch.randperm(300, generator=generator)
        terms = (layer.weight[:, order] * x[:, None, order]).detach()
        rising = torch.zeros(8, 4)
        for k in range(300):
            rising = rising + terms[:, :, k]
        chunks = torch.stack([part.sum(2) for part in terms.split(7 + seed, 2)]).sum(0)
        for total in (
            rising + layer.bias,
            chunks + layer.bias,
            layer.bias + terms.flip(2).cumsum(2)[:, :, -1],
        ):
            assert ((total.detach().double() - exact).abs() <= short).all()


def test_underflow_and_overflow_are_part_of_the_error() -> None:
    small = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        small[0].weight.copy_(torch.eye(4) * 1e-30)
        small[0].bias.zero_()
        small[2].weight.copy_(
            torch.tensor([[3e-13] * 4, [1e-13] * 4])
        )  # products of 1e-43: subnormal, a few digits
        small[2].bias.zero_()
    x = torch.full((1, 4), 0.7)
    graph = arithmetic_of(read(small, (4,)), "executed")
    sweep = Sweep(graph, Balls.make(x, torch.zeros(1), 2.0, (0.0, 1.0))).run()
    error = margin_errors(sweep, torch.tensor([0]))
    seen = (small(x).double() - graph.logits(x)).abs().max()
    assert 0 < seen <= error.max() < 1e-43
    large = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        large[0].weight.copy_(torch.tensor([[1e20], [1e20]]))
        large[0].bias.zero_()
        large[2].weight.copy_(
            torch.tensor([[1e17, 0.0], [0.0, 5e16]])
        )  # both infinite, a tie, from 68 on
        large[2].bias.zero_()
    assert large(torch.tensor([[70.0]])).isinf().all()
    graph = read(large, (1,))
    y = torch.zeros(1, dtype=torch.long)
    assert (
        ws.radii(graph, x[:, :1], y, "inf", (0.5, 100.0), "crown", arithmetic="exact").values
        == math.inf
    )
    assert (
        10
        < ws.radii(graph, x[:, :1], y, "inf", (0.5, 100.0), "crown", arithmetic="executed").values
        < 34
    )


def test_what_is_not_covered_is_refused_in_one_sentence() -> None:
    x = torch.rand(2, 4)
    y = torch.zeros(2, dtype=torch.long)

    def refused(model: nn.Module | Graph, match: str) -> None:
        with pytest.raises(InputError, match=match) as error:
            ws.radii(model, x, y, "inf", (0.0, 1.0), "crown", arithmetic="executed")
        assert str(error.value).count(". ") == 0

    refused(
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        "'tanh' at '1' .Tanh., which is not piecewise linear",
    )
    refused(
        nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU()), "leaky ReLU at '1'.* with no layer after it"
    )
    refused(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), "weights that the model computes"
    )
    plain = nn.Sequential(nn.Linear(4, 3))
    graph = read(plain, (4,))
    layer = graph.nodes[1].map
    assert layer is not None
    bare = Graph((Node((), (4,), "the input"), Node((0,), (3,), "a layer", Affine(layer))))
    refused(bare, "not read from a model")
    with pytest.raises(InputError, match="unknown arithmetic 'float'"):
        ws.radii(plain, x, y, arithmetic="float")
    if torch.set_flush_denormal(True):
        try:
            refused(plain, "subnormal numbers flushed to zero")
        finally:
            torch.set_flush_denormal(False)
    assert refusal(graph) == ""
    slow = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    with torch.backends.mkldnn.flags(enabled=False):
        assert (
            "NNPACK" in refusal(read(slow, (1, 4, 4))) or not torch.backends.nnpack.is_available()
        )
    half = Mixed(lambda k: 1.0).eval()
    half.mean = half.mean.double()
    assert "torch.float64" in refusal(read(_Cast(half), (2, 6, 6)))


class _Cast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.last.weight.new_zeros(1) + self.model.last(
            torch.cat([(x - self.model.mean).float().flatten(1)[:, :27], x.flatten(1)[:, :12]], 1)
        )


@pytest.mark.slow
def test_arithmetics_agree_where_rounding_is_small() -> None:
    """A float64 network loses nothing; a float32 one next to nothing; exact distances stay
    exact up to rounding.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.rand(3, 6)
    for dtype, loss in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        net = model.to(dtype)
        points = x.to(dtype)
        y = net(points).argmax(1)
        for method in ("crown", "exact"):
            exact, executed = (
                ws.radii(net, points, y, "2", (0.0, 1.0), method, arithmetic=kind, tolerance=1e-3)
                for kind in ("exact", "executed")
            )
            finite = torch.isfinite(exact.values)
            assert torch.equal(finite, torch.isfinite(executed.values))
            search = 2e-3 if method == "crown" else 1e-8
            assert (executed.values <= exact.values * (1 + search)).all()
            assert (executed.values[finite] >= exact.values[finite] * (1 - loss - search)).all()
            if method == "exact":
                assert torch.equal(exact.exact, executed.exact)
                flips = executed.flips(net, points, y)
                assert flips is not None
                near = flips.distances[finite & executed.exact]
                assert (near <= executed.values[finite & executed.exact] * 1.002).all()


@pytest.mark.slow_cases("margin")
@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
def test_a_loss_curve_of_the_executed_network(loss: str) -> None:
    """Its upper side is above every loss that the float32 network has in the ball; that of the
    exact function is not.
    """
    model = cancelling()
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(2))
    y = read(model, (8,)).logits(x).argmax(1)
    grid = [1e-4, 1e-2]
    options: dict[str, Any] = {"norm": "inf", "order": "inf", "loss": loss, "grid": grid}
    exact, executed = (
        ws.loss_curve(model, x, y, arithmetic=kind, **options) for kind in ("exact", "executed")
    )
    assert (exact.arithmetic, executed.arithmetic) == ("exact", "executed")
    assert exact.lift == 0 < executed.lift
    value = {
        "cross_entropy": lambda z: F.cross_entropy(z, y),
        "margin": lambda z: losses.margin(z, y).mean(),
    }[loss]
    highest = 0.0
    for seed in range(300):
        step = grid[0] * (
            2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) - 1
        )
        with torch.no_grad():
            highest = max(highest, float(value(model((x + 0.99 * step).clamp(0, 1)).double())))
    assert exact(grid[0])[1] < highest <= executed(grid[0])[1]
    lower, upper = executed.of_order(1)(grid[1])
    assert lower <= upper
    with torch.no_grad():  # the lower side is what the model itself says
        assert executed.empirical == pytest.approx(float(value(model(x).double())), abs=1e-12)
    with pytest.raises(InputError, match="needs a box"):
        ws.loss_curve(model, x, y, domain=None, arithmetic="executed")


def test_results_say_their_arithmetic_and_older_ones_were_exact(tmp_path: Path) -> None:
    model = cancelling(4.0)
    x = torch.rand(2, 8)
    y = read(model, (8,)).logits(x).argmax(1)
    found = ws.radii(model, x, y, method="crown", arithmetic="executed")
    found.save(tmp_path / "radii")
    assert ws.Radii.load(tmp_path / "radii").arithmetic == "executed"
    before = Radii(found.values, found.exact, "crown", math.inf, (0.0, 1.0))
    assert before.arithmetic == "exact"


def test_an_evaluation_says_which_arithmetic_its_radii_hold_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.rand(4, 6)
    data = (x, model(x).argmax(1))
    threat = ws.Threat("inf", "inf", 0.01, (0.0, 1.0))
    options: dict[str, Any] = {"certify": "crown", "look": False}
    found = {}
    for arithmetic in ("executed", "exact"):
        run = ws.evaluate(
            model,
            data,
            threat,
            ["fgsm"],
            out=tmp_path / arithmetic,
            arithmetic=arithmetic,
            **options,
        )
        again = ws.Evaluation.load(tmp_path / arithmetic)
        assert run.certificate["arithmetic"] == again.certificate["arithmetic"] == arithmetic
        (found[arithmetic],) = (item for item in again.findings if item.name == "arithmetic")
    assert found["executed"].level == "ok" and "as it is executed" in found["executed"].text
    assert found["exact"].level == "note" and "rounding is at most" in found["exact"].text
    smooth = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    data = (x, smooth(x).argmax(1))
    run = ws.evaluate(smooth, data, threat, ["fgsm"], **options)
    (finding,) = (item for item in run.findings if item.name == "arithmetic")
    assert (
        run.certificate["arithmetic"] == "exact"
        and "'tanh'" in finding.text
        and "was seen" in finding.text
    )
    with pytest.raises(InputError, match="does not cover 'tanh'"):
        ws.evaluate(smooth, data, threat, ["fgsm"], arithmetic="executed", **options)


def test_margins_are_moved_by_no_less_than_the_slack() -> None:
    """In exact fractions, also where the slack is below the last digit of the bias."""
    generator = torch.Generator().manual_seed(0)
    graph = read(nn.Linear(3, 40), (3,))
    for scale in (1e-12, 1.0, 1e17):
        bias = scale * torch.randn(40, generator=generator, dtype=torch.float64)
        slack = torch.rand(40, generator=generator, dtype=torch.float64)
        slack[0] = 0.0
        last = graph.nodes[-1]
        assert isinstance(last.op, Affine)
        op = replace(last.op, bias=bias)
        before = replace(graph, nodes=(*graph.nodes[:-1], replace(last, op=op)))
        moved = ahead(before, slack).nodes[-1].bias
        assert moved is not None and moved[0] == bias[0]
        gained = [Fraction(a) - Fraction(b) for a, b in zip(moved.tolist(), bias.tolist())]
        assert all(gain >= Fraction(wanted) for gain, wanted in zip(gained, slack.tolist()))
        assert max(gained) <= 1.01 + 2e-15 * scale


def test_logits_that_are_relus_have_radii() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).eval()
    x = torch.rand(4, 2)
    y = model(x).argmax(1)
    found = ws.radii(model, x, y)
    assert (found.method, found.arithmetic) == ("auto", "executed")
    assert (
        (found.values > 0).all()
        and found.values.isfinite().all()
        and not flipped(model, x, y, found.values)
    )
    distance = ws.radii(model, x, y, arithmetic="exact").values
    assert (found.values <= distance).all() and torch.allclose(found.values, distance, rtol=1e-3)
