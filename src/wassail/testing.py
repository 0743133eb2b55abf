"""A conformance kit: what every attack and every certificate of this library must satisfy, for
anyone who writes one.

    from wassail.testing import check_attack, check_certificate check_attack(my_attack)          #
    my_attack(model, x, y, threat, *, batch_size=None, ...) -> Distribution
    check_certificate(my_certify)    # my_certify(model, x, y, norm, loss, domain) -> Certificate

It needs no test framework: a failed check raises AssertionError with what was expected and what
came. The cases are linear classifiers in float64, where the nearest flip is known in closed form,
so a claim that is too good is caught as surely as one that is too weak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from wassail.geometry import clip, maximiser, operator_norm, plane_step, vector_norm
from wassail.losses import cross_entropy, margin
from wassail.threat import Domain, Threat, dual
from wassail.transport.allocation import knapsack
from wassail.transport.distribution import Distribution

if TYPE_CHECKING:
    from wassail.certificates.loss.certificate import Certificate

Attack: TypeAlias = Callable[..., Distribution]


class LinearClassifier(nn.Module):
    """`theta(x) = W x + b` on flattened inputs, with sums whose rounding does not depend on the
    batch size.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)

    @classmethod
    def random(cls, classes: int, features: int, seed: int = 0) -> LinearClassifier:
        """A classifier whose regions all meet near the middle of the unit box."""
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(classes, features, dtype=torch.float64, generator=generator)
        return cls(
            weight,
            -weight.sum(1) / 2
            + 0.1 * torch.randn(classes, dtype=torch.float64, generator=generator),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(n, K)` of a batch `(n, *shape)`."""
        # matmul picks another kernel, with other rounding, for other batch sizes; a product and a
        # sum do not.
        return (x.flatten(1)[:, None, :] * self.weight).sum(-1) + self.bias

    def distances(self, x: Tensor, y: Tensor, norm: float, domain: Domain) -> Tensor:
        """The exact distance of every sample to its nearest misclassified point, float64
        `(N,)`; inf if there is none.
        """
        z = self(x).detach()
        best = torch.full((len(x),), math.inf, dtype=torch.float64)
        for j in range(z.shape[1]):
            gap = (z.gather(1, y[:, None])[:, 0] - z[:, j]).clamp(min=0)
            w = (self.weight[j] - self.weight[y]).detach().reshape(x.shape)
            step = plane_step(x, w, gap, norm, domain)
            reached = (w * step).flatten(1).sum(1) >= gap - 1e-9
            best = torch.where(
                (y != j) & reached, torch.minimum(best, vector_norm(step, norm)), best
            )
        return best


def samples(n: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random samples in the unit box, float64 `(n, *shape)`, some of them on its faces, and
    random labels `(n,)`.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.rand(n, *shape, dtype=torch.float64, generator=generator)
    # Saturated pixels.
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.15, x.round(), x)
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
    """Check an attack `attack(model, x, y, threat, *, batch_size=None) -> Distribution` on closed
    forms.

    - Nothing it claims beats the exact answer: no flip nearer than the nearest, no accuracy below
      the true worst case.
    - It is feasible and true: `verify` recomputes predictions, distances, box, cost and accuracy
      from its tensors.
    - It attacks: given twice the room the hardest sample needs, point-wise, it flips everything
      that can be flipped.
    - Batch sizes 1, 7 and N, a permutation of the samples and a channels_last layout do not change
      the answer.
    - No samples, one sample, only wrong samples, and a model that cannot be flipped give right
      answers.
    - The model's mode and the caller's tensors are left as they were.
    """
    for norm in norms:
        for domain in domains:
            for count in classes:
                model = LinearClassifier.random(count, math.prod(shape))
                x, y = samples(15, shape, count)
                # Mostly right, some wrong.
                y = torch.where(torch.arange(15) % 5 > 0, model(x).argmax(1), y)
                exact = model.distances(x, y, norm, domain)
                typical = float(exact[(exact > 0) & torch.isfinite(exact)].median())
                for order in orders:
                    _check_claims(attack, model, x, y, Threat(norm, order, typical, domain), exact)
                reach = 2 * float(exact[torch.isfinite(exact)].max())
                _check_power(attack, model, x, y, Threat(norm, math.inf, reach, domain), exact)
            _check_same(
                attack,
                model,
                x,
                y,
                Threat(norm, 1.0 if 1.0 in orders else math.inf, typical, domain),
            )
            _check_corners(attack, model, x, Threat(norm, math.inf, typical, domain))


def _check_claims(
    attack: Attack, model: LinearClassifier, x: Tensor, y: Tensor, threat: Threat, exact: Tensor
) -> None:
    before = x.clone()
    training = model.train().training
    result = attack(model, x, y, threat)
    assert isinstance(result, Distribution), (
        f"an attack returns a Distribution, not a {type(result).__name__}"
    )
    assert model.training == training and model.weight.requires_grad, (
        "the attack changed the model's mode or parameters"
    )
    assert torch.equal(x, before), "the attack wrote into the caller's samples"
    report = result.verify(model)
    assert report, f"{threat}: verification fails: {', '.join(report.problems)}"
    assert abs(report.accuracy - result.accuracy) < 1e-12, (
        f"{threat}: accuracy is {report.accuracy}, not {result.accuracy}"
    )
    assert result.cost <= threat.eps, f"{threat}: cost {result.cost} above the budget"
    assert abs(float(result.atoms()[1].sum()) - 1) < 1e-12, (
        f"{threat}: the masses do not sum to one"
    )
    found = result.flips.distances
    short = (found < exact - 1e-9).nonzero().flatten().tolist()
    assert not short, f"{threat}: samples {short} flip nearer than the exact distance"
    weights = knapsack(exact, threat.eps, threat.order)
    least = float((1 - weights).mean())
    assert result.accuracy >= least - 1e-9, (
        f"{threat}: accuracy {result.accuracy} is below the exact worst case {least}"
    )
    clean = float((exact > 0).double().mean())
    assert abs(result.clean_accuracy - clean) < 1e-12, (
        f"{threat}: clean accuracy {result.clean_accuracy}, exact {clean}"
    )
    assert result.accuracy <= clean + 1e-12, (
        f"{threat}: accuracy {result.accuracy} is above the clean accuracy {clean}"
    )


def _check_power(
    attack: Attack, model: LinearClassifier, x: Tensor, y: Tensor, threat: Threat, exact: Tensor
) -> None:
    left = float((~torch.isfinite(exact)).double().mean())
    accuracy = attack(model, x, y, threat).accuracy
    assert accuracy <= left + 1e-12, (
        f"{threat}: accuracy {accuracy} stays where the exact worst case is {left}"
    )


def _check_same(
    attack: Attack, model: LinearClassifier, x: Tensor, y: Tensor, threat: Threat
) -> None:
    reference = attack(model, x, y, threat)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    others = {
        f"batch size {size}": attack(model, x, y, threat, batch_size=size)
        for size in (1, 7, len(x))
    }
    if x.ndim == 4:
        others["channels_last"] = attack(
            model, x.contiguous(memory_format=torch.channels_last), y, threat
        )
    for name, other in others.items():
        assert torch.equal(other.distances, reference.distances), (
            f"{threat}: {name} changes the distances"
        )
        assert torch.equal(other.weights, reference.weights), (
            f"{threat}: {name} changes the weights"
        )
        assert torch.equal(other.points, reference.points), f"{threat}: {name} changes the points"
    mixed = attack(model, x[order], y[order], threat)
    assert torch.equal(mixed.points, reference.points[order]), (
        f"{threat}: the order of the samples changes the points"
    )
    assert torch.equal(mixed.distances, reference.distances[order]), (
        f"{threat}: the order of the samples matters"
    )
    assert abs(mixed.accuracy - reference.accuracy) < 1e-12, (
        f"{threat}: the order of the samples changes the accuracy"
    )


def _check_corners(attack: Attack, model: LinearClassifier, x: Tensor, threat: Threat) -> None:
    right = model(x).argmax(1)
    none = attack(model, x[:0], right[:0], threat)
    assert len(none) == 0 and math.isnan(none.accuracy) and none.cost == 0, (
        "no samples: nan accuracy at no cost expected"
    )
    one = attack(model, x[:1], right[:1], threat)
    single = attack(model, x, right, threat)
    assert torch.equal(one.points[0], single.points[0]), (
        "a sample alone gives another answer than among others"
    )
    wrong = attack(model, x, (right + 1) % len(model.weight), threat)
    assert wrong.accuracy == 0 and wrong.cost == 0, (
        "samples that are wrong already cost nothing and stay wrong"
    )
    fixed = LinearClassifier(
        torch.zeros_like(model.weight), torch.arange(len(model.weight)).double()
    )
    stuck = attack(fixed, x, torch.full_like(right, len(model.weight) - 1), threat)
    assert stuck.accuracy == 1, (
        f"a constant model cannot be flipped, but accuracy is {stuck.accuracy}"
    )
    assert not stuck.flips.success.any(), (
        "a constant model cannot be flipped, but flips were reported"
    )


def corpus() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """A frozen corpus of small networks in float64 with eight samples in the unit box and their
    labels.

    Depths 1 to 3, leaky, residual, convolutional with pooling, a linear one, one with dead neurons,
    one whose labels leave a class out: what certificates have to get right before they may be
    trusted with anything larger.
    """
    lrelu = nn.LeakyReLU(0.1)
    flat = nn.Flatten()
    nets: dict[str, nn.Module] = {
        "linear": nn.Sequential(nn.Linear(3, 3)),
        "shallow": nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)),
        "deep": nn.Sequential(
            nn.Linear(3, 5),
            nn.ReLU(),
            nn.Linear(5, 4),
            nn.ReLU(),
            nn.Linear(4, 4),
            nn.ReLU(),
            nn.Linear(4, 3),
        ),
        "leaky": nn.Sequential(nn.Linear(2, 6), lrelu, nn.Linear(6, 4), lrelu, nn.Linear(4, 2)),
        "residual": nn.Sequential(nn.Linear(2, 4), _Residual(4), nn.Linear(4, 3)),
        "conv": nn.Sequential(
            nn.Conv2d(1, 2, 2, padding=1), nn.ReLU(), nn.AvgPool2d(2), flat, nn.Linear(2, 3)
        ),
        "pool": nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, 1), flat, nn.Linear(2, 3)
        ),
        "dead": nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)),
    }
    found: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
    for number, (name, net) in enumerate(nets.items()):
        generator = torch.Generator().manual_seed(1000 + number)
        net = net.double().eval()
        with torch.no_grad():
            for parameter in net.parameters():
                scale = (2.0 / max(parameter[0].numel(), 1)) ** 0.5 if parameter.ndim > 1 else 0.5
                parameter.copy_(
                    scale * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
                )
            if name == "dead":
                net[0].bias[:2] = -100.0  # type: ignore[index]
        shape = {"conv": (1, 2, 2), "pool": (1, 3, 3)}.get(
            name, (3,) if name in ("linear", "deep") else (2,)
        )
        x = torch.rand(8, *shape, dtype=torch.float64, generator=generator)
        classes = net(x[:1]).shape[1]
        # One network has a class without samples.
        labels = torch.randint(classes - (name == "shallow"), (8,), generator=generator)
        found[name] = (net, x, labels)
    return found


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def check_certificate(
    certify: Callable[..., Certificate],
    *,
    norms: Iterable[float] = (1.0, 2.0, math.inf),
    losses: Iterable[str] = ("cross_entropy", "margin"),
    domains: Iterable[Domain] = (None, (0.0, 1.0)),
    names: Iterable[str] | None = None,
    draws: int = 2000,
) -> None:
    """Attack a certifier `certify(model, x, y, norm, loss, domain) -> Certificate` on the frozen
    corpus of small networks.

    - No distribution that an attack finds inside the budget has a loss above the certified one, at
      any eps.
    - No Jacobian at a point is longer than the margin and paper slopes, no chord steeper than the
      anchor, no ray than infinity.
    - The slopes are in order, `l <= S <= Lm <= L`, and each bracket's lower side is below its upper
      side.
    - The witness is inside the box and the budget, its loss is what the lower side claims up to
      1e-5 of the growth, and its growth per unit of eps never rises with eps.
    """
    networks = corpus()
    for name in networks if names is None else names:
        model, x, y = networks[name]
        for norm in norms:
            for loss in losses:
                for domain in domains:
                    where = f"{name}, l{norm:g}, {loss}, {'R^n' if domain is None else 'box'}"
                    _check_slopes(certify(model, x, y, norm, loss, domain), model, where, draws)


def _check_slopes(found: Certificate, model: nn.Module, where: str, draws: int) -> None:
    """The slopes of a certificate."""
    x = found.x
    y = found.y
    norm = found.norm
    domain = found.domain
    measure = {"cross_entropy": cross_entropy, "margin": margin}[found.loss]
    clean = measure(model(x).detach(), y)
    empirical = math.fsum((found.mu * clean).tolist())
    assert abs(found.empirical - empirical) <= 1e-9 * max(1, abs(empirical)), (
        f"{where}: loss {found.empirical} is {empirical}"
    )
    slopes = [found.infinity, found.anchor, found.margin, found.paper]
    known = [slope for slope in slopes if slope is not None]
    for flatter, steeper in pairwise(known):
        most = steeper.upper * (1 + 1e-9) + 1e-12
        assert flatter.lower <= most and flatter.upper <= most, (
            f"{where}: slopes out of order, {flatter} before {steeper}"
        )
    points, gain, length, root = _attacked(model, x, y, norm, domain, measure, draws)
    chord = float((gain / length).max())
    for slope, title in (
        (found.anchor, "anchor"),
        (found.margin, "margin"),
        (found.paper, "paper"),
    ):
        if slope is not None:
            assert chord <= slope.upper * (1 + 1e-7) + 1e-9, (
                f"{where}: a chord of slope {chord} beats {title} {slope}"
            )
    for slope, value in zip(
        (found.margin, found.paper), _jacobians(model, points, set(y.tolist()), norm)
    ):
        if slope is not None:
            assert value <= slope.upper * (1 + 1e-9) + 1e-12, (
                f"{where}: a Jacobian of norm {value} beats {slope}"
            )
    before = math.inf
    for eps in (1e-3, 0.03, 0.3, 3.0, 300.0):
        low, high = found.bounds(eps)
        assert low <= high, f"{where}: the bounds at {eps} are {low} > {high}"
        best = _allocated(found.mu, root, gain, length, eps)
        assert empirical + best <= high + 1e-9 * max(1, abs(high)), (
            f"{where}: an attack reaches {empirical + best} > {high}"
        )
        rate = (low - empirical) / eps
        assert rate <= before * (1 + 1e-5) + 1e-9, (
            f"{where}: the growth per unit rises from {before} to {rate} at {eps}"
        )
        before = rate
        witness = found.witness(eps)
        report = witness.verify(model)
        assert report, f"{where}: the witness at {eps} fails: {', '.join(report.problems)}"
        at = measure(model(witness.points).detach(), y)
        value = math.fsum(
            (found.mu * ((1 - witness.weights) * clean + witness.weights * at)).tolist()
        )
        assert value >= low - 1e-5 * max(low - empirical, 1e-6), (
            f"{where}: the witness at {eps} has loss {value}, claimed {low}"
        )


def _attacked(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: Domain,
    measure: Callable[[Tensor, Tensor], Tensor],
    draws: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points by chance and by ascent, near and far; their gain in loss, their distance, and
    their sample.
    """
    generator = torch.Generator().manual_seed(7)
    every = torch.arange(len(x))
    parts: list[tuple[Tensor, Tensor]] = []
    for scale in (1e-3, 0.05, 0.5, 5.0, 1e4):
        root = every.repeat(max(1, draws // (5 * len(x))))
        noise = torch.randn(len(root), *x.shape[1:], dtype=torch.float64, generator=generator)
        parts.append((root, x[root] + scale * noise))
        walk = x[root[: 4 * len(x)]] + scale * noise[: 4 * len(x)]
        for _ in range(5):
            with torch.enable_grad():
                walk = walk.detach().requires_grad_(True)
                (g,) = torch.autograd.grad(measure(model(walk), y[root[: 4 * len(x)]]).sum(), walk)
            walk = x[root[: 4 * len(x)]] + scale * maximiser(g, norm)
        parts.append((root[: 4 * len(x)], walk))
    root = torch.cat([p[0] for p in parts])
    points = clip(torch.cat([p[1] for p in parts]).detach(), domain)
    with torch.no_grad():
        gain = measure(model(points), y[root]) - measure(model(x), y)[root]
    length = vector_norm(points - x[root], norm)
    keep = length > 0
    return points[keep], gain[keep], length[keep], root[keep]


def _jacobians(
    model: nn.Module, points: Tensor, labels: set[int], norm: float
) -> tuple[float, float]:
    """The largest margin gradient and `2^(1/r) ||J||_{r -> s}` at the points."""
    with torch.enable_grad():
        at = points.clone().requires_grad_(True)
        z = model(at)
        rows = [
            torch.autograd.grad(z[:, k].sum(), at, retain_graph=True)[0].flatten(1)
            for k in range(z.shape[1])
        ]
    jacobian = torch.stack(rows, 1)
    gaps = [
        vector_norm(jacobian[:, j] - jacobian[:, k], dual(norm))
        for k in labels
        for j in range(z.shape[1])
        if j != k
    ]
    paper = 2 ** (1 / norm) * operator_norm(jacobian, norm, dual(norm))
    return float(torch.stack(gaps).max()), float(paper.max())


def _allocated(mu: Tensor, root: Tensor, gain: Tensor, length: Tensor, eps: float) -> float:
    """What a simple adversary gains within the budget: the steepest chord of each sample,
    steepest samples first.
    """
    rate = gain / length
    total = 0.0
    left = eps
    best = [(float(rate[root == i].max()), i) for i in sorted(set(root.tolist()))]
    for slope, i in sorted(best, reverse=True):
        if slope <= 0 or left <= 0:
            break
        mine = (root == i).nonzero().flatten()
        top = int(mine[rate[mine].argmax()])
        spent = min(left, float(mu[i] * length[top]))
        total = total + slope * spent
        left = left - spent
    return total
