"""A conformance kit for attacks: what every attack of this library must satisfy, callable by anyone who writes one.

    from wassail.testing import check_attack
    check_attack(my_attack)          # my_attack(model, x, y, threat, *, batch_size=None, ...) -> Distribution

It needs no test framework: a failed check raises AssertionError with what was expected and what came. The cases are linear
classifiers in float64, where the nearest flip is known in closed form, so a claim that is too good is caught as surely as one
that is too weak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from wassail.geometry import plane_step, vector_norm
from wassail.threat import Domain, Threat
from wassail.transport import Distribution, knapsack

Attack: TypeAlias = Callable[..., Distribution]


class LinearClassifier(nn.Module):
    """`theta(x) = W x + b` on flattened inputs, with sums whose rounding does not depend on the batch size."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    @classmethod
    def random(cls, classes: int, features: int, seed: int = 0) -> LinearClassifier:
        """A classifier whose regions all meet near the middle of the unit box."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(classes, features, dtype=torch.float64, generator=generator)
        return cls(weight, -weight.sum(1) / 2 + 0.1 * torch.randn(classes, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(n, K)` of a batch `(n, *shape)`."""
        # matmul picks another kernel, with other rounding, for other batch sizes; a product and a sum do not.
        return (x.flatten(1)[:, None, :] * self.weight).sum(-1) + self.bias

    def distances(self, x: Tensor, y: Tensor, norm: float, domain: Domain) -> Tensor:
        """The exact distance of every sample to its nearest misclassified point, float64 `(N,)`; inf if there is none."""
        z = self(x).detach()
        best = torch.full((len(x),), math.inf, dtype=torch.float64)
        for j in range(z.shape[1]):
            gap = (z.gather(1, y[:, None])[:, 0] - z[:, j]).clamp(min=0)
            w = (self.weight[j] - self.weight[y]).detach().reshape(x.shape)
            step = plane_step(x, w, gap, norm, domain)
            reached = (w * step).flatten(1).sum(1) >= gap - 1e-9
            best = torch.where((y != j) & reached, torch.minimum(best, vector_norm(step, norm)), best)
        return best


def samples(n: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random samples in the unit box, float64 `(n, *shape)`, some of them on its faces, and random labels `(n,)`."""
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.rand(n, *shape, dtype=torch.float64, generator=generator)
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.15, x.round(), x)  # saturated pixels
    return x, torch.randint(classes, (n,), generator=generator)


def check_attack(
    attack: Attack,
    *,
    norms: Iterable[float] = (1.0, 2.0, math.inf),
    orders: Iterable[float] = (1.0, 2.0, math.inf),
    domains: Iterable[Domain] = ((0.0, 1.0), None),
    classes: Iterable[int] = (2, 4),
    shape: tuple[int, ...] = (3, 2, 2),
) -> None:
    """Check an attack `attack(model, x, y, threat, *, batch_size=None) -> Distribution` on closed forms.

    - Nothing it claims beats the exact answer: no flip nearer than the nearest, no accuracy below the true worst case.
    - It is feasible and true: `verify` recomputes predictions, distances, box, cost and accuracy from its tensors.
    - It attacks: given twice the room the hardest sample needs, point-wise, it flips everything that can be flipped.
    - Batch sizes 1, 7 and N, a permutation of the samples and a channels_last layout do not change the answer.
    - No samples, one sample, only wrong samples, and a model that cannot be flipped give right answers.
    - The model's mode and the caller's tensors are left as they were.
    """
    for norm in norms:
        for domain in domains:
            for count in classes:
                model = LinearClassifier.random(count, math.prod(shape))
                x, y = samples(15, shape, count)
                y = torch.where(torch.arange(15) % 5 > 0, model(x).argmax(1), y)  # mostly right, some wrong
                exact = model.distances(x, y, norm, domain)
                typical = float(exact[(exact > 0) & torch.isfinite(exact)].median())
                for order in orders:
                    _check_claims(attack, model, x, y, Threat(norm, order, typical, domain), exact)
                reach = 2 * float(exact[torch.isfinite(exact)].max())
                _check_power(attack, model, x, y, Threat(norm, math.inf, reach, domain), exact)
            _check_same(attack, model, x, y, Threat(norm, 1.0 if 1.0 in orders else math.inf, typical, domain))
            _check_corners(attack, model, x, Threat(norm, math.inf, typical, domain))


def _check_claims(attack: Attack, model: LinearClassifier, x: Tensor, y: Tensor, threat: Threat, exact: Tensor) -> None:
    before, training = x.clone(), model.train().training
    result = attack(model, x, y, threat)
    assert isinstance(result, Distribution), f"an attack returns a Distribution, not a {type(result).__name__}"
    assert model.training == training and model.weight.requires_grad, "the attack changed the model's mode or parameters"
    assert torch.equal(x, before), "the attack wrote into the caller's samples"
    report = result.verify(model)
    assert report, f"{threat}: verification fails: {', '.join(report.problems)}"
    assert abs(report.accuracy - result.accuracy) < 1e-12, f"{threat}: accuracy is {report.accuracy}, not {result.accuracy}"
    assert result.cost <= threat.eps, f"{threat}: cost {result.cost} above the budget"
    assert abs(float(result.atoms()[1].sum()) - 1) < 1e-12, f"{threat}: the masses do not sum to one"
    found = result.flips.distances
    short = (found < exact - 1e-9).nonzero().flatten().tolist()
    assert not short, f"{threat}: samples {short} flip nearer than the exact distance"
    weights = knapsack(exact, threat.eps, threat.order)
    least = float((1 - weights).mean())
    assert result.accuracy >= least - 1e-9, f"{threat}: accuracy {result.accuracy} is below the exact worst case {least}"
    clean = float((exact > 0).double().mean())
    assert abs(result.clean_accuracy - clean) < 1e-12, f"{threat}: clean accuracy {result.clean_accuracy}, exact {clean}"
    assert result.accuracy <= clean + 1e-12, f"{threat}: accuracy {result.accuracy} is above the clean accuracy {clean}"


def _check_power(attack: Attack, model: LinearClassifier, x: Tensor, y: Tensor, threat: Threat, exact: Tensor) -> None:
    left = float((~torch.isfinite(exact)).double().mean())
    accuracy = attack(model, x, y, threat).accuracy
    assert accuracy <= left + 1e-12, f"{threat}: accuracy {accuracy} stays where the exact worst case is {left}"


def _check_same(attack: Attack, model: LinearClassifier, x: Tensor, y: Tensor, threat: Threat) -> None:
    reference = attack(model, x, y, threat)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    others = {f"batch size {size}": attack(model, x, y, threat, batch_size=size) for size in (1, 7, len(x))}
    if x.ndim == 4:
        others["channels_last"] = attack(model, x.contiguous(memory_format=torch.channels_last), y, threat)
    for name, other in others.items():
        assert torch.equal(other.distances, reference.distances), f"{threat}: {name} changes the distances"
        assert torch.equal(other.weights, reference.weights), f"{threat}: {name} changes the weights"
        assert torch.equal(other.points, reference.points), f"{threat}: {name} changes the points"
    mixed = attack(model, x[order], y[order], threat)
    assert torch.equal(mixed.points, reference.points[order]), f"{threat}: the order of the samples changes the points"
    assert torch.equal(mixed.distances, reference.distances[order]), f"{threat}: the order of the samples matters"
    assert abs(mixed.accuracy - reference.accuracy) < 1e-12, f"{threat}: the order of the samples changes the accuracy"


def _check_corners(attack: Attack, model: LinearClassifier, x: Tensor, threat: Threat) -> None:
    right = model(x).argmax(1)
    none = attack(model, x[:0], right[:0], threat)
    assert len(none) == 0 and math.isnan(none.accuracy) and none.cost == 0, "no samples: nan accuracy at no cost expected"
    one, single = attack(model, x[:1], right[:1], threat), attack(model, x, right, threat)
    assert torch.equal(one.points[0], single.points[0]), "a sample alone gives another answer than among others"
    wrong = attack(model, x, (right + 1) % len(model.weight), threat)
    assert wrong.accuracy == 0 and wrong.cost == 0, "samples that are wrong already cost nothing and stay wrong"
    fixed = LinearClassifier(torch.zeros_like(model.weight), torch.arange(len(model.weight)).double())
    stuck = attack(fixed, x, torch.full_like(right, len(model.weight) - 1), threat)
    assert stuck.accuracy == 1, f"a constant model cannot be flipped, but accuracy is {stuck.accuracy}"
    assert not stuck.flips.success.any(), "a constant model cannot be flipped, but flips were reported"
