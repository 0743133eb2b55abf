"""Smoothed models: linear ones in closed form, coverage, the same votes always, errors."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from torch import Tensor, nn

import wassail as ws
from wassail.errors import InputError
from wassail.smoothing.certificate import Smoothing, certificate

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
    assert torch.equal(ws.Votes.load(tmp_path / "votes").hits, votes.hits)
    proof = votes.certificate()
    proof.save(tmp_path / "proof")
    again = Smoothing.load(tmp_path / "proof")
    assert again.accuracy(0.1) == proof.accuracy(0.1) and "smoothed model" in repr(again)


@pytest.mark.parametrize(
    ("sigma", "draws", "average"), [(0, 100, 1), ("x", 100, 1), (1, 150, 1), (1, 100, 0)]
)
def test_bad_settings(sigma: object, draws: int, average: int) -> None:
    with pytest.raises(InputError):
        ws.smoothed(linear(), sigma, draws, average=average)  # type: ignore[arg-type]


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
