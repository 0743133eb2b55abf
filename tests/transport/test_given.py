"""Points of attacks that stop at eps in float32: they must count at that eps."""

import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import wassail as ws
from wassail.transport.given import STRAY

INF = math.inf
SIZES = {INF: 0.1, 2.0: 0.6, 1.0: 2.0}


def per_sample(v: Tensor) -> Tensor:
    return v.reshape(-1, *[1] * 3)


def one_step(model, x: Tensor, y: Tensor, norm: float, eps: float, box: float) -> Tensor:
    """The fast gradient method in three norms, as it is written everywhere."""
    z = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(z), y), z)
    if norm == INF:
        return (x + eps * g.sign()).clamp(0, box)
    room = torch.where(g > 0, box - x, x)
    g = torch.where(room > box / 2, g, 0.0)  # so that few steps end at a wall, below eps
    if norm == 2:
        return (x + eps * g / per_sample(g.flatten(1).norm(dim=1))).clamp(0, box)
    top = g.abs().flatten(1).topk(5, 1).values[:, -1]
    sparse = torch.where(g.abs() >= per_sample(top), g.sign(), 0.0)
    return (x + eps * sparse / per_sample(sparse.abs().flatten(1).sum(1))).clamp(0, box)


def many_steps(model, x: Tensor, y: Tensor, norm: float, eps: float, box: float) -> Tensor:
    """Projected gradients, projected by clipping and rescaling in float32."""
    point = x.clone()
    for _ in range(5):
        point = one_step(model, point, y, norm, eps / 2, box)
        move = point - x
        if norm == INF:
            move = move.clamp(-eps, eps)
        else:
            length = torch.linalg.vector_norm(move.flatten(1), norm, dim=1)
            move = move * per_sample((eps / length).clamp(max=1))
        point = (x + move).clamp(0, box)
    return point


def both(model, x: Tensor, y: Tensor, points: Tensor) -> float:
    """Robust accuracy by prediction: of the samples and their points."""
    with torch.no_grad():
        right = (model(x).argmax(1) == y) & (model(points).argmax(1) == y)
    return float(right.double().mean())


@pytest.mark.few(4)
@pytest.mark.parametrize("norm", [INF, 2.0, 1.0])
@pytest.mark.parametrize("attack", [one_step, many_steps])
@pytest.mark.parametrize("box", [1.0, 255.0])
def test_the_curve_at_eps_is_the_accuracy_by_prediction(norm: float, attack, box: float) -> None:
    embedded = ws.zoo.load("digits-mlp")

    def model(v: Tensor) -> Tensor:
        return embedded(v / box)

    x, y = (t[:100] for t in ws.zoo.data("digits"))
    x = x * box
    lost = 0
    for share in (0.7, 0.8, 0.9, 1.0):
        eps = share * SIZES[norm] * box
        points = attack(model, x, y, norm, eps, box)
        expected = both(model, x, y, points)
        flips = ws.Flips.from_points(model, x, y, points, norm, (0, box))
        assert ws.risk_curve(flips, order="inf")(eps)[1] == pytest.approx(expected, abs=1e-12)
        moved = flips.distances > 0
        given = ws.Flips.from_points(model, x, y, points, norm, (0, box), pull_in=False)
        assert (flips.distances <= given.distances).all()
        assert (flips.distances >= (1 - 1e-4) * given.distances)[moved].all()
        assert ws.allocate(flips, eps, INF).verify(embedded if box == 1 else model)
        lost += int(((given.distances > eps) & given.success).sum())
        other = ws.Flips.from_points(model, x, y, points, norm, (0, box), eps=eps, batch_size=7)
        assert ws.risk_curve(other, order="inf")(eps)[1] == pytest.approx(expected, abs=1e-12)
    assert lost > 0, "the case that this test is about"


def test_autoattack_counts_as_it_is_reported() -> None:
    """Points as the reference implementation returns them: clipped at x +- eps in float32."""
    model = ws.zoo.load("digits-mlp")
    x, y = (t[:40] for t in ws.zoo.data("digits"))
    attack = ws.AutoAttack(
        model, norm="Linf", eps=0.1, version="custom", attacks_to_run=["apgd-ce"], verbose=False
    )
    points = attack.run_standard_evaluation(x, y, bs=40)
    assert isinstance(points, Tensor)
    step = torch.where(points == x, 0.0, 0.1 * (points - x).sign())
    full = (x + step).clamp(0, 1)
    for given in (points, full):
        flips = ws.Flips.from_points(model, x, y, given, "inf")
        expected = both(model, x, y, given)
        assert ws.risk_curve(flips, order="inf")(0.1)[1] == pytest.approx(expected, abs=1e-12)


class Edge(torch.nn.Module):
    """Right below a threshold of the first coordinate, wrong from there on: any smaller float is
    right.
    """

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, v: Tensor) -> Tensor:
        wrong = (v.flatten(1)[:, :1] >= self.threshold).to(v)
        return torch.cat([1 - wrong, wrong], 1) + 0 * v.flatten(1)[:, :1]


def edge(n: int = 3, eps: float = 0.1) -> tuple[Edge, Tensor, Tensor, Tensor]:
    """Samples whose only flip is beyond eps, in float32, by the rounding of x + eps."""
    x = torch.full((n, 2), 0.6)
    y = torch.zeros(n, dtype=torch.int64)
    points = x + torch.tensor([eps, 0.0])
    excess = float(points[0, 0].double() - x[0, 0].double()) - eps
    assert excess > 0
    return Edge(float(points[0, 0])), x, y, points


@pytest.mark.parametrize("norm", [INF, 2.0, 1.0])
def test_a_sentence_says_what_flips_only_beyond_eps(norm: float) -> None:
    model, x, y, points = edge()
    points[2] = x[2]
    said = r"^2 of 3 points lie up to 2\.4e-08 beyond eps 0\.1 and are no flips inside it"
    with pytest.warns(ws.ModelWarning, match=said) as told:
        flips = ws.Flips.from_points(model, x, y, points, norm, eps=0.1)
    assert len(told) == 1
    assert torch.equal(flips.points, points) and flips.success.tolist() == [True, True, False]
    assert ws.risk_curve(flips, order="inf")(0.1)[1] == 1
    # Without an eps it can only be seen that both stop at one distance.
    with pytest.warns(ws.ModelWarning, match="2 of the 2 flips at the largest distance, 0.1,"):
        ws.Flips.from_points(model, x, y, points, norm)
    with pytest.warns(ws.ModelWarning, match="beyond eps 0.1 "):
        ws.Flips.from_points(model, x, y, points, norm, eps=["8/255", "0.1", 0.3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ws.Flips.from_points(model, x, y, points, norm, eps=0.05)  # meant for another eps
        ws.Flips.from_points(model, x, y, points, norm, pull_in=False)
        ws.Flips.from_points(model, x[:1], y[:1], points[:1], norm)  # the nearest flip, as it seems


def test_a_small_eps_is_missed_by_the_rounding_of_the_coordinates() -> None:
    """It is more than a thousandth of this eps, and all the same no other distance."""
    model, x, y, points = edge(eps=2e-5)
    excess = float((points.double() - x.double())[0, 0]) - 2e-5
    assert excess > STRAY * 2e-5
    with pytest.warns(ws.ModelWarning, match=r"^3 of 3 points lie up to 2\.7e-08 beyond eps 2e-05"):
        ws.Flips.from_points(model, x, y, points, INF, eps=2e-5)


def test_flips_of_one_eps_differ_by_rounding() -> None:
    """At 0.2 and at 0.6 the same step of 0.1 rounds to two lengths: both are the largest one."""
    x = torch.tensor([[0.2, 0.2], [0.6, 0.6]])
    points = x + torch.tensor([0.1, 0.0])
    lengths = (points.double() - x.double())[:, 0]
    assert lengths[0] < lengths[1]

    def model(v: Tensor) -> Tensor:
        wrong = (v[:, :1] >= torch.where(v[:, 1:] < 0.4, points[0, 0], points[1, 0])).to(v)
        return torch.cat([1 - wrong, wrong], 1) + 0 * v

    y = torch.zeros(2, dtype=torch.int64)
    with pytest.warns(ws.ModelWarning, match="2 of the 2 flips at the largest distance, 0.1,"):
        ws.Flips.from_points(model, x, y, points, INF)


def test_a_larger_eps_of_the_attack_is_pulled_to_the_one_that_is_given() -> None:
    """0.0314 is what 8/255 is in many scripts."""
    model = ws.zoo.load("digits-cnn")
    x, y = (t[:60] for t in ws.zoo.data("digits"))
    points = one_step(model, x, y, INF, 0.10008, 1.0)
    assert ws.risk_curve(ws.Flips.from_points(model, x, y, points, INF), order="inf")(0.1)[1] > 0.9
    flips = ws.Flips.from_points(model, x, y, points, INF, eps=0.1)
    curve = ws.risk_curve(flips, order="inf")
    assert curve(0.1)[1] == pytest.approx(both(model, x, y, points), abs=1e-12)


def test_points_of_half_precision_count_at_their_eps() -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = (t[:100] for t in ws.zoo.data("digits"))
    points = one_step(model, x, y, INF, 0.1, 1.0).half()
    assert ((points.double() - x.double()).abs().flatten(1).amax(1) > 0.1 + 1e-6).any()
    flips = ws.Flips.from_points(model, x, y, points, INF, eps=0.1)
    expected = both(model, x, y, points.float())
    assert ws.risk_curve(flips, order="inf")(0.1)[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("norm", [INF, 2.0, 1.0])
def test_points_of_torchattacks_and_foolbox_count_at_their_eps(norm: float) -> None:
    torchattacks = pytest.importorskip("torchattacks", reason="torchattacks is not installed")
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed")
    model = ws.zoo.load("digits-mlp")
    x, y = (t[:40] for t in ws.zoo.data("digits"))
    eps = SIZES[norm]
    theirs = foolbox.PyTorchModel(model, bounds=(0, 1))
    attack = {
        INF: foolbox.attacks.LinfPGD,
        2.0: foolbox.attacks.L2PGD,
        1.0: foolbox.attacks.SparseL1DescentAttack,
    }[norm]
    given = [attack()(theirs, x, y, epsilons=eps)[1].detach()]
    if norm > 1:
        name = "Linf" if norm == INF else "L2"
        run = torchattacks.AutoAttack(model, norm=name, eps=eps, n_classes=10, seed=0)
        given.append(run(x, y))
    for points in given:
        flips = ws.Flips.from_points(model, x, y, points, norm)
        expected = both(model, x, y, points)
        assert ws.risk_curve(flips, order="inf")(eps)[1] == pytest.approx(expected, abs=1e-12)
