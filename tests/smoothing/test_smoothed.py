"""Smoothed models: linear ones in closed form, coverage, the same votes always, errors."""

import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import betainc, ndtr
from torch import Tensor, nn

import wassail as ws
from wassail.errors import InputError
from wassail.smoothing.certificate import Smoothing, certificate, share
from wassail.smoothing.draws import generator
from wassail.smoothing.growth import Array
from wassail.smoothing.model import Votes

SIGMA = 0.5


def linear() -> nn.Module:
    """Class 1 where the first coordinate is above 0."""
    model = nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]]))
    return model


def samples(n: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.linspace(-0.2, 1.5, n, dtype=torch.float64)
    return x, torch.ones(n, dtype=torch.int64)


def test_a_linear_model() -> None:
    """The vote flips at distance x_0, and the model is right with probability Phi(x_0 / sigma)."""
    x, y = samples()
    proof = ws.smoothed(linear(), SIGMA, draws=2000).certify(x, y)
    p = torch.from_numpy(ndtr(x[:, 0].numpy() / SIGMA))
    assert bool(((proof.low <= p) & (p <= proof.high)).all())
    assert proof.mean <= float(p.mean())
    true = x[:, 0].clamp(min=0)
    assert bool((proof.radii <= true).all())
    near = true < 2 * SIGMA  # farther out 2000 draws are too few
    assert float((true - proof.radii)[near].max()) < 0.15
    assert bool((proof.radii[2:] > 0).any()) and float(proof.radii[0]) == 0
    certified, attacked = proof.curve(1, true)(0.1)
    assert 0 < certified <= attacked < 1


def test_both_sides_of_a_linear_model() -> None:
    x, y = samples()
    model = ws.smoothed(linear(), SIGMA, draws=1000)
    proof = model.certify(x, y)
    found = ws.attack_smoothed(model, x, y, None, passes=30)
    true = torch.where(x[:, 0] > 0, x[:, 0], 0.0)
    assert bool((found.flips >= true - 1e-9).all())
    assert bool(torch.isfinite(found.flips).any())
    for order in (1, 2, math.inf):
        for eps in (0.0, 0.1, 0.4):
            assert proof.accuracy(eps, order) <= found.accuracy(eps, order)
    exact = float(ndtr((x[:, 0].numpy() - 0.4) / SIGMA).mean())
    assert proof.accuracy(0.4, math.inf) <= exact <= found.accuracy(0.4, math.inf) + 0.05


def test_point_wise_threats_are_climbed() -> None:
    """A corner: the nearest flip of a sample is not where most is lost at a given distance."""

    class Corner(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            inside = torch.minimum(z[:, 0], z[:, 1])
            return torch.stack([-20 * inside, 20 * inside], 1)

    x = torch.tensor([[0.5, 0.6], [0.6, 0.6], [0.7, 0.3]], dtype=torch.float64)
    y = torch.ones(3, dtype=torch.int64)
    model = ws.smoothed(Corner(), 0.3, draws=1000)
    line = ws.attack_smoothed(model, x, y, passes=20)
    both = ws.attack_smoothed(model, x, y, passes=20, eps=[0, "1/10", 0.2])
    assert both.distances.shape[1] == line.distances.shape[1] + 2
    assert torch.equal(both.distances[:, :-2], line.distances)
    sizes = torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert torch.allclose(both.distances[:, -2:], sizes.expand(3, 2), rtol=1e-5)
    proof = model.certify(x, y)
    for eps in (0.1, 0.2):
        assert proof.accuracy(eps, math.inf) <= both.accuracy(eps, math.inf)
        assert both.accuracy(eps, math.inf) < line.accuracy(eps, math.inf) - 0.01
    with pytest.raises(InputError):
        ws.attack_smoothed(model, x, y, passes=20, eps=[-1])


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_coverage(confidence: float) -> None:
    """Known probabilities, many experiments: how often is anything that is said false?"""
    rng = np.random.default_rng(1)
    p = np.array([0.02, 0.3, 0.5, 0.6, 0.9, 0.99, 0.999, 1.0])
    draws = 100
    repeats = 1000
    false = 0
    for hits in rng.binomial(draws, p, size=(repeats, len(p))):
        proof = certificate(torch.from_numpy(hits), draws, 1.0, confidence)
        inside = (proof.low.numpy() <= p) & (p <= proof.high.numpy())
        false += not (inside.all() and proof.mean <= p.mean())
    allowed = 1 - confidence
    assert false / repeats <= allowed + 3 * math.sqrt(allowed * confidence / repeats)
    assert false > 0  # else the limits say less than they could


def test_coverage_when_one_looks_and_draws_more() -> None:
    """The worst rule: look after every 100 draws, and stop where what is said is false."""
    rng = np.random.default_rng(3)
    p = 0.7
    confidence = 0.8
    repeats = 300
    false = 0
    for _ in range(repeats):
        hits = np.cumsum(rng.binomial(100, p, size=20))
        for times, count in enumerate(hits.tolist(), 1):
            proof = certificate(torch.tensor([count]), 100 * times, 1.0, confidence, first=100)
            if not float(proof.low[0]) <= p <= float(proof.high[0]) or proof.mean > p:
                false += 1
                break
    allowed = 1 - confidence
    assert false / repeats <= allowed + 3 * math.sqrt(allowed * confidence / repeats)
    assert false > 0


def test_the_parts_of_all_counts_add_up_to_one() -> None:
    total = sum(share(100 * times, 100) for times in range(1, 10_000))
    assert 0.9999 < total < 1
    assert share(700, None) == share(700, 700) == share(100, 100)


def test_coverage_of_the_population() -> None:
    """Samples from a known population: the least accuracy is below the true one."""
    rng = np.random.default_rng(2)
    low = 0
    for _ in range(200):
        p = rng.choice([0.1, 0.7, 0.95], size=60)
        hits = torch.from_numpy(rng.binomial(200, p))
        proof = certificate(hits, 200, 0.25, 0.99)
        # at eps 0 the population's accuracy is its mean
        low += proof.population(0.0, confidence=0.9) > (0.1 + 0.7 + 0.95) / 3
    assert low <= 20


def test_votes_are_the_same_always() -> None:
    x, y = samples(5)
    model = ws.smoothed(linear(), SIGMA, draws=300)
    votes = model.votes(x, y)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(model.votes(x[order], y[order], batch_size=7).hits, votes.hits[order])
    begun = model.votes(x, y, draws=100)
    assert torch.equal(model.votes(x, y, start=begun).hits, votes.hits)
    with pytest.raises(InputError, match="samples"):
        model.votes(x[order], y[order], start=begun)
    assert not torch.equal(ws.smoothed(linear(), SIGMA, 300, seed=1).votes(x, y).hits, votes.hits)
    twice = model.votes(x[[3, 3]], y[:2])
    assert int(twice.hits[0]) == int(votes.hits[3]) != int(twice.hits[1])


def test_votes_grow_on_the_same_ground_only() -> None:
    x, y = samples(5)
    model = ws.smoothed(linear(), SIGMA, draws=400)
    begun = model.votes(x, y, draws=200)
    grown = model.votes(x, y, start=begun)
    planned = model.votes(x, y)
    assert torch.equal(grown.hits, planned.hits) and (grown.first, planned.first) == (200, 400)
    # whoever may have looked at 200 draws pays for it
    assert bool((grown.certificate().low < planned.certificate().low).all())
    assert model.votes(x, y, draws=100, start=begun).draws == 200
    with pytest.raises(InputError, match="multiple"):
        model.votes(x, y, draws=300, start=begun)
    with pytest.raises(InputError, match="samples"):
        model.votes(x, 1 - y, start=begun)
    other = linear()
    with torch.no_grad():
        other.weight.mul_(2)
    with pytest.raises(InputError, match="weights"):
        ws.smoothed(other, SIGMA, draws=400).votes(x, y, start=begun)


def test_an_interrupted_count_goes_on(tmp_path: Path) -> None:
    class Tired(nn.Module):
        """Ends after so many passes."""

        left = 5

        def forward(self, z: Tensor) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return torch.stack([-z[:, 0], z[:, 0]], 1)

    x, y = samples(6)
    file = tmp_path / "counts"
    whole = ws.smoothed(linear(), SIGMA, draws=100).votes(x, y)
    tired = Tired()
    model = ws.smoothed(tired, SIGMA, draws=100)
    with pytest.raises(KeyboardInterrupt):
        model.votes(x, y, keep=file)
    tired.left = 5  # two of them look at the model, three are left to do
    assert torch.equal(model.votes(x, y, keep=file).hits, whole.hits)
    assert tired.left == 0 and not file.exists()
    tired.left = 5
    with pytest.raises(KeyboardInterrupt):
        model.votes(x, y, keep=file)
    tired.left = 8  # what was counted for other labels is not used
    assert torch.equal(model.votes(x, 1 - y, keep=file).hits, 100 - whole.hits)


def test_no_two_blocks_share_their_draws() -> None:
    """Two keys whose digests agree in the 32 bits that a generator of torch looks at."""
    seen: dict[bytes, int] = {}
    block = 0
    while True:
        digest = hashlib.sha256(f"key {block}".encode()).digest()[:4]
        if digest in seen:
            break
        seen[digest] = block
        block += 1
    one = generator("key", seen[digest]).standard_normal(4)
    assert not np.array_equal(one, generator("key", block).standard_normal(4))


def test_a_tie_is_an_error() -> None:
    x = torch.randn(3, 4)
    always = ws.smoothed(lambda z: torch.zeros(len(z), 2), 0.1, draws=100)
    assert always.votes(x, torch.zeros(3, dtype=torch.int64)).hits.tolist() == [0, 0, 0]


def test_a_vote_without_a_majority_abstains_which_is_an_error() -> None:
    """Three sectors of a plane: right with probability 0.4, more than each of the others."""

    class Sectors(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            turn = torch.atan2(z[:, 1], z[:, 0]) / (2 * math.pi) % 1
            ends = torch.tensor([0.0, 0.4, 0.7, 1.0], dtype=z.dtype)
            return torch.stack(
                [(turn >= a) & (turn < b) for a, b in itertools.pairwise(ends)], 1
            ).to(z.dtype)

    x = torch.zeros(1, 2)
    votes = ws.smoothed(Sectors(), 1.0, draws=2000).votes(x, torch.zeros(1, dtype=torch.int64))
    assert 0.35 < int(votes.hits[0]) / 2000 < 0.45
    assert votes.certificate().curve(1)(0.0) == (0.0, 0.0)


@pytest.mark.parametrize("shape", ["strip", "corner"])
def test_radii_end_before_the_exact_vote_flips(shape: str) -> None:
    """Classifiers of a plane whose probability is a product of normal distribution functions."""

    def exact(z: Array) -> Array:
        if shape == "strip":
            return np.asarray(ndtr((1 - z[:, 0]) / SIGMA) - ndtr((-1 - z[:, 0]) / SIGMA))
        return np.asarray(ndtr(z[:, 0] / SIGMA) * ndtr(z[:, 1] / SIGMA))

    class Inside(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            inside = z[:, 0].abs() < 1 if shape == "strip" else (z > 0).all(1)
            return torch.stack([(~inside).double(), inside.double()], 1)

    x = torch.rand(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    model = ws.smoothed(Inside(), SIGMA, draws=1000)
    proof = model.certify(x, torch.ones(12, dtype=torch.int64))
    angles = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    ways = np.stack([np.cos(angles), np.sin(angles)], 1)
    for sample, radius in zip(x.numpy(), proof.radii.tolist(), strict=True):
        if radius > 0:  # nowhere in the closed ball is the exact vote wrong
            assert exact(sample + radius * ways).min() > 0.5
    p = exact(x.numpy())
    assert bool((proof.radii.numpy()[p > 0.7] > 0).all()) and bool((p > 0.7).any())
    moved = x.numpy() - 0.2 * np.sign(x.numpy()) * np.array([1.0, 0.0])
    assert proof.accuracy(0.2, math.inf) <= exact(moved).mean()


def test_the_averaged_logits_are_a_function_with_gradients() -> None:
    x = samples(4)[0]
    model = ws.smoothed(linear(), SIGMA)
    x = x.requires_grad_(True)
    logits = model(x)
    assert torch.equal(logits, model(x)) and torch.allclose(logits[1:2], model(x[1:2]))
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), x)
    assert bool((gradient[:, 0] > 0).all())
    assert torch.allclose(logits.exp().sum(1), torch.ones(4, dtype=torch.float64))


def test_a_model_that_answers_with_nan_is_wrong() -> None:
    class Torn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = x[:, :2].clone()
            out[x[:, 2] > 0.3] = math.nan
            return out

    x = torch.tensor([[1.0, 0.0, 0.0]]).repeat(8, 1)
    votes = ws.smoothed(Torn(), 0.1).votes(x, torch.zeros(8, dtype=torch.int64), draws=100)
    assert bool((votes.hits <= 100).all())


def test_records(tmp_path: Path) -> None:
    x, y = samples(6)
    model = ws.smoothed(linear(), SIGMA, draws=100)
    votes = model.votes(x, y)
    votes.save(tmp_path / "votes")
    assert torch.equal(Votes.load(tmp_path / "votes").hits, votes.hits)
    proof = votes.certificate()
    proof.save(tmp_path / "proof")
    again = Smoothing.load(tmp_path / "proof")
    assert again.accuracy(0.1) == proof.accuracy(0.1) and "smoothed model" in repr(again)


@pytest.mark.parametrize(
    ("hits", "draws", "sigma", "first"),
    [
        (101, 100, 1.0, 100),
        (-1, 100, 1.0, 100),
        (5, 0, 1.0, None),
        (5, 100, math.nan, None),
        (5, 300, 1.0, 200),
        (5, 300, 1.0, 0),
    ],
)
def test_counts_that_no_vote_can_give(
    hits: int, draws: int, sigma: float, first: int | None, tmp_path: Path
) -> None:
    """They may come from a file that somebody changed."""
    with pytest.raises(InputError):
        certificate(torch.tensor([hits]), draws, sigma, 0.99, first)
    votes = ws.smoothed(linear(), SIGMA, draws=100).votes(*samples(1))
    for name, value in {"hits": torch.tensor([hits]), "draws": draws, "sigma": sigma}.items():
        object.__setattr__(votes, name, value)
    object.__setattr__(votes, "first", first)
    votes.save(tmp_path / "votes")
    with pytest.raises(InputError):
        Votes.load(tmp_path / "votes")


def test_confidences_near_one_keep_their_digits() -> None:
    """100,000 samples share a part of 1e-13: `1 - part` would be 1."""
    hits = torch.full((100_000,), 900)
    proof = certificate(hits, 1000, 1.0, 1 - 1e-13)
    alpha = (1 - (1 - 1e-13)) * 0.9 / 4e5
    p = float(proof.low[0])
    assert 0.6 < p < 0.9
    assert float(betainc(900, 101, p)) <= alpha <= float(betainc(900, 101, p * (1 + 1e-6)))


def test_no_budget_breaks_the_attacked_side() -> None:
    x, y = samples(3)
    found = ws.attack_smoothed(
        ws.smoothed(linear(), SIGMA, draws=100, average=1), x, y, None, passes=5, stretches=(1.0,)
    )
    for order in (1, 2, 300, math.inf):
        for eps in (0.0, 1e-300, 1e-3, 1e300):
            assert 0 <= found.accuracy(eps, order) <= 1


@pytest.mark.parametrize(
    ("sigma", "draws", "average"), [(0, 100, 1), ("x", 100, 1), (1, 150, 1), (1, 100, 0)]
)
def test_bad_settings(sigma: object, draws: int, average: int) -> None:
    with pytest.raises(InputError):
        ws.smoothed(linear(), sigma, draws, average=average)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="seed"):
        ws.smoothed(linear(), 1, 100, seed=0.5)  # type: ignore[arg-type]


def test_bad_questions() -> None:
    x, y = samples(3)
    proof = ws.smoothed(linear(), SIGMA, draws=100).certify(x, y, confidence=0.9)
    for ask in (
        lambda: proof.accuracy(-1),
        lambda: proof.accuracy(1, 0.5),
        lambda: proof.population(0.1, confidence=0.95),
        lambda: ws.smoothed(linear(), SIGMA).votes(x, y[:2]),
    ):
        with pytest.raises(InputError):
            ask()
