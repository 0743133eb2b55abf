"""Values and gradients of domains, written out: those of autograd. Proofs stay proofs."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.search import margins as trees
from wassail.certificates.search.margins import Tree
from wassail.certificates.search.subproblems import ReluGradient, Rows, Subproblems, largest
from wassail.threat import Domain


class Blocks(nn.Module):
    """Strided convolutions with a way around them, a leaky ReLU, a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, 2, 1)
        self.way = nn.Conv2d(4, 4, 3, 1, 1)
        self.short = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        z = self.first(x).relu()
        z = nn.functional.leaky_relu(self.way(z) + self.short(z), 0.1)
        z = nn.functional.avg_pool2d(z, 2, 1)
        return self.head(z.flatten(1))


NETWORKS = {
    "blocks": (Blocks, (2, 8, 8)),
    "pool": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
        ),
        (1, 6, 6),
    ),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4)
        ),
        (5,),
    ),
}


def _grown(
    name: str,
    norm: float,
    samples: int,
    least: float = 1.0,
    domain: Domain = (0.0, 1.0),
) -> tuple[Tree, Subproblems]:
    """Subproblems with some signs fixed at random, slopes and multipliers at random; of samples of
    a sweep that has one more and another order.
    """
    torch.manual_seed(3)
    make, shape = NETWORKS[name]
    model = make()
    x = torch.rand(samples, *shape)
    y = model(x).argmax(1)
    y[1:2] = (y[1:2] + 1) % 4  # another label than the others
    radius = {1.0: 1.5, 2.0: 0.35, math.inf: 0.12}[norm] * (3 if name == "mlp" else 1)
    # Balls of different sizes: their samples have different numbers of undecided neurons.
    size = radius * torch.linspace(least, 1.4, samples, dtype=torch.float64)
    others = torch.cat([x[:1] / 2, x.flip(0)])
    balls = Balls.make(others, torch.cat([size[:1], size.flip(0)]), norm, domain)
    sweep = Sweep(read(model, shape), balls).run()
    tree = Tree(sweep, list(range(samples, 0, -1)), y.tolist())
    roots = tree.roots([[j for j in range(4) if j != int(label)] for label in y])
    generator = torch.Generator().manual_seed(1)
    chance = torch.rand(roots.alpha.shape, generator=generator)
    real = tree.down.abs()[roots.owner] + tree.up[roots.owner] > 0  # a place that is no padding
    sign = ((chance < 0.2).float() - (chance > 0.8).float()) * real
    alpha = torch.rand(roots.alpha.shape, generator=generator) * 0.9 + 0.1
    beta = torch.rand(roots.alpha.shape, generator=generator) * sign.abs()
    return tree, replace(roots, sign=sign, alpha=alpha, beta=beta)


@pytest.mark.few(6)
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize(
    ("name", "domain"), [*((name, (0.0, 1.0)) for name in NETWORKS), ("mlp", None)]
)
def test_values_and_gradients_are_those_of_autograd(
    name: str, domain: Domain, norm: float, samples: int
) -> None:
    tree, domains = _grown(name, norm, samples, domain=domain)
    rows = Rows.make(tree, domains)
    alpha = domains.alpha.clone().requires_grad_(True)
    beta = domains.beta.clone().requires_grad_(True)
    other = tree._margin(tree.sweep.fast, rows, None, domains.sign, alpha, beta, domains.cuts)
    by_alpha, by_beta = torch.autograd.grad(other.value.sum(), [alpha, beta])
    climb = ReluGradient(tree, rows, domains.sign)
    value, gains, sizes, pulls = climb.value(domains.alpha, domains.beta, True)
    alone = climb.value(domains.alpha, domains.beta, False)
    assert not tree.sweep.graph.smooth and len(tree.parts) > 0
    scale = float(other.value.detach().abs().max())
    assert (value - other.value.detach()).abs().max() < 1e-5 * scale
    assert (alone[0] - value).abs().max() < 1e-5 * scale and not alone[3]
    assert torch.allclose(sizes, tree.joined(other.sizes, domains.alpha), atol=1e-5)
    for own, theirs in zip(pulls, (by_alpha, by_beta * domains.sign.abs())):
        assert own is not None and bool(own.isfinite().all())
        # Autograd loses its way in l2 where a ball holds the whole box.
        known = theirs.isfinite().all(1)
        assert bool(known.any()) and float(theirs[known].abs().max()) > 0
        assert (own - theirs)[known].abs().max() < 1e-4 * theirs[known].abs().max()
    proved, scores = tree._proved(domains)
    assert (proved <= value + 1e-5 * scale).all()
    assert (gains - scores).abs().max() < 1e-4 * scores.abs().max()


@pytest.mark.parametrize("domain", [(0.0, 1.0), None])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_the_worst_deviation_reaches_the_supremum(norm: float, domain: Domain) -> None:
    """Small balls, balls cut by walls, a ball that holds the box, and a corner of the box; and
    without walls.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(5, 12, generator=generator)
    x[3] = 1.0
    radius = torch.tensor([1e-3, 0.3, 0.9, 0.5, 20.0], dtype=torch.float64)
    balls = Balls.make(x, radius, norm, domain)
    a = torch.randn(5, 12, generator=generator)
    owner = torch.arange(5)
    value, point = balls.worst(a, owner)
    upper = balls.upper(a.double(), owner)
    assert torch.allclose(value, upper, rtol=1e-5, atol=1e-7)
    assert torch.allclose(balls.support(a, owner).double(), upper, rtol=1e-5, atol=1e-7)
    assert torch.allclose((a * point).sum(1).double(), upper, rtol=1e-5, atol=1e-6)
    if domain is not None:
        assert bool((x + point >= -1e-6).all()) and bool((x + point <= 1 + 1e-6).all())
    assert bool((point.norm(norm, 1) <= radius * (1 + 1e-5)).all())


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_what_is_above_0_was_evaluated_in_float64(
    norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far float32 may be off, here by a margin added to all that it finds."""
    tree, domains = _grown("blocks", norm, 4, 0.3)
    right = tree.bounded(domains, 4)
    again, _ = tree._proved(right)
    sure = right.bound > 0
    below = (right.bound < 0) & (right.bound != again)  # as float32 had them
    assert bool(sure.any()) and bool(below.any())
    # Fewer rows may be summed in another order; float32 is off by 1e-9.
    assert bool(((right.bound[sure] - again[sure]).abs() < 1e-14).all())
    value = ReluGradient.value

    def flattered(self: ReluGradient, *args: Any) -> object:
        found, *rest = value(self, *args)
        return (found + 100.0, *rest)

    monkeypatch.setattr(trees.ReluGradient, "value", flattered)
    fooled = tree.bounded(domains, 4)
    again, _ = tree._proved(fooled)
    assert bool(((fooled.bound - again).abs() < 1e-14).all())
    assert torch.equal(fooled.bound > 0, right.bound > 0)


@pytest.mark.parametrize("share", [-0.5, math.nan])
def test_what_float32_nearly_proves_or_cannot_tell_is_evaluated_in_float64(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what is clear below 0, and a number that is none."""
    tree, domains = _grown("mlp", math.inf, 3, 0.3)
    value = ReluGradient.value

    def blurred(self: ReluGradient, *args: Any) -> object:
        found, *rest = value(self, *args)
        return (0 * found + share * trees.CLEAR * self.size, *rest)

    monkeypatch.setattr(trees.ReluGradient, "value", blurred)
    unsure = tree.bounded(domains, 3)
    again, _ = tree._proved(unsure)
    assert torch.equal(unsure.bound, again) and bool((again > 0).any())


def test_the_next_neuron_is_chosen_where_the_bound_was_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where the ascent ended: here its second of six steps is the best."""
    tree, domains = _grown("mlp", 1.0, 3)
    value = ReluGradient.value
    calls = itertools.count(1)

    def worse(self: ReluGradient, *args: Any) -> object:
        found, *rest = value(self, *args)
        return (found - (900.0 if next(calls) == 2 else 1000.0), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(trees.ReluGradient, "value", worse)
        found = tree.bounded(domains, 6)
    rows = Rows.make(tree, found)
    gains = ReluGradient(tree, rows, found.sign).value(found.alpha, found.beta, False)[1]
    assert bool((found.bound < -800).all())
    assert torch.equal(largest(gains, tree.look), found.pick)
