"""DeepFool, FAB, FMN and DDN against closed forms, their budgets of passes, and WDA++ on a real
network.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.attacks.ddn import ddn_engine
from wassail.attacks.deepfool import deepfool_engine, gaps, nearest_plane
from wassail.attacks.fab import fab_engine
from wassail.attacks.fmn import fmn_engine
from wassail.attacks.minimal.run import find_flips
from wassail.attacks.minimal.tracker import Tracker
from wassail.geometry import plane_step, vector_norm
from wassail.network import Network
from wassail.testing import LinearClassifier, check_attack, samples

INF = math.inf
NORMS = (1.0, 2.0, INF)
BOX = (0.0, 1.0)


class Case(NamedTuple):
    engine: Callable[..., None]
    options: dict[str, Any]
    # How far above the exact distance of a linear classifier a flip may be, as a factor: two
    # classes without a box, two classes with one, ten classes (the furthest sample), ten classes
    # (on average).
    free: float
    box: float
    worst: float
    mean: float


ENGINES = {
    "deepfool": Case(deepfool_engine, {}, 1.001, 1.005, 1.005, 1.001),
    "fab": Case(fab_engine, {"steps": 4}, 1.001, 1.005, 1.005, 1.001),
    "fab-t": Case(fab_engine, {"steps": 4, "targets": 9}, 1.001, 1.005, 1.005, 1.001),
    # These two climb the margin, so with ten classes they settle on one rival, which need not be
    # the nearest.
    "fmn": Case(fmn_engine, {"steps": 30}, 1.002, 1.002, 2.0, 1.05),
    "ddn": Case(ddn_engine, {"steps": 30}, 1.001, 1.005, 2.0, 1.05),
}
PAIRS = [(name, norm) for name in ENGINES for norm in NORMS if name != "ddn" or norm == 2]
each_pair = pytest.mark.parametrize(
    ("name", "norm"), PAIRS, ids=lambda v: v if isinstance(v, str) else f"l{v:g}"
)
each_domain = pytest.mark.parametrize("domain", [None, BOX], ids=["free", "box"])


def run(name, model, x, y, norm, domain=BOX, **keywords):
    engine, options = ENGINES[name][:2]
    return find_flips(engine, name, model, x, y, norm, domain, options=options, **keywords)


def problem(classes, n=60, seed=0, shape=(3, 2, 2)):
    """A linear classifier and samples of which four in five are classified rightly, in float64."""
    model = LinearClassifier.random(classes, math.prod(shape), seed)
    x, y = samples(n, shape, classes, seed)
    return model, x, torch.where(torch.arange(n) % 5 > 0, model(x).argmax(1), y)


def mlp(classes, features=12):
    """A small network that is far from linear, in float32."""
    generator = torch.Generator().manual_seed(classes)
    model = nn.Sequential(nn.Flatten(), nn.Linear(features, 30), nn.ReLU(), nn.Linear(30, classes))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


def check_linear(name, norm, domain, classes):
    case = ENGINES[name]
    model, x, y = problem(classes)
    exact = model.distances(x, y, norm, domain)
    found = run(name, model, x, y, norm, domain).distances
    assert (found >= exact - 1e-9).all()
    assert torch.equal(found == 0, exact == 0)
    assert torch.equal(torch.isfinite(found), torch.isfinite(exact))
    far = (found / exact)[torch.isfinite(exact) & (exact > 0)]
    if classes == 2:
        assert far.max() <= (case.free if domain is None else case.box)
    else:
        assert far.max() <= case.worst and far.mean() <= case.mean


@pytest.mark.few(13)
@pytest.mark.parametrize("classes", [2, 10])
@each_domain
@each_pair
def test_linear_distances_are_near_the_exact_ones_and_never_below(
    name, norm, domain, classes
) -> None:
    check_linear(name, norm, domain, classes)


CONFORMING = [(name, norm) for name, norm in PAIRS if name in ("deepfool", "fab") or norm == 2]


@pytest.mark.slow_cases("*-l1", "fab-l2", "deepfool-l2")
@pytest.mark.parametrize(
    ("name", "norm"), CONFORMING, ids=lambda v: v if isinstance(v, str) else f"l{v:g}"
)
def test_conformance(name, norm) -> None:
    fewer: dict[str, dict[str, Any]] = {
        "fab": {"steps": 3},
        "fab-t": {"steps": 3, "targets": 3},
        "fmn": {"steps": 15},
        "ddn": {"steps": 15},
    }

    def attack(model, x, y, threat, batch_size=None):
        engine = ENGINES[name].engine
        flips = find_flips(
            engine,
            name,
            model,
            x,
            y,
            threat.norm,
            threat.domain,
            batch_size=batch_size,
            options=fewer.get(name),
        )
        return ws.allocate(flips, threat.eps, threat.order)

    domain = None if name in ("fmn", "fab-t") else BOX
    check_attack(
        attack, norms=(norm,), domains=(domain,), orders=(1.0,), classes=(4,) if norm == 2 else (2,)
    )


WRONG_SIGNS = {
    "deepfool": ("deepfool.plane_step", lambda *arguments: -plane_step(*arguments)),
    "fab": ("fab.plane_step", lambda *arguments: -plane_step(*arguments)),
    "fab-t": ("fab.gaps", lambda *arguments: -gaps(*arguments)),
    "fmn": ("fmn.maximiser", lambda g, norm: -ws.geometry.maximiser(g, norm)),
    "ddn": ("ddn.maximiser", lambda g, norm: -ws.geometry.maximiser(g, norm)),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_wrong_sign_is_caught(name, monkeypatch) -> None:
    place, broken = WRONG_SIGNS[name]
    monkeypatch.setattr(f"wassail.attacks.{place}", broken)
    with pytest.raises(AssertionError):
        check_linear(name, 2.0, None, 2)


class Ellipse(nn.Module):
    """Two classes in the plane; the boundary is the ellipse (2 u)^2 + v^2 = 1 around the origin."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = (2 * x[:, 0]) ** 2 + x[:, 1] ** 2 - 1
        return torch.stack([torch.zeros_like(f), f], 1)


def test_a_curved_boundary() -> None:
    """FAB, FMN and DDN come to the nearest point of a curve; DeepFool, which never looks back
    at the sample, does not.
    """
    t = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
    curve = torch.stack([t.cos() / 2, t.sin()], 1)
    x = torch.stack(
        [
            0.1 + 0.25 * torch.rand(40, generator=torch.Generator().manual_seed(0)),
            torch.linspace(0.1, 0.6, 40),
        ],
        1,
    )
    y = torch.zeros(40, dtype=torch.int64)
    exact = torch.linalg.vector_norm(x.double()[:, None] - curve, dim=2).min(1).values
    loose, *tight = (
        find_flips(engine, "curve", Ellipse(), x, y, 2, None, options={"steps": 60}).distances
        / exact
        for engine in (deepfool_engine, fab_engine, fmn_engine, ddn_engine)
    )
    assert all(far.min() > 1 - 1e-6 and far.max() < 1.01 for far in tight)
    assert 1.01 < loose.mean() < 1.05 and loose.min() > 1 - 1e-6


@pytest.mark.slow_cases("*-l1-*")
@pytest.mark.filterwarnings("ignore:.*samples were not searched:wassail.errors.ModelWarning")
@pytest.mark.parametrize("passes", [1, 2, 5, 13, 60])
@pytest.mark.parametrize("classes", [2, 10])
@each_pair
def test_budgets_are_kept_exactly(name, norm, classes, passes) -> None:
    for model in (mlp(classes), LinearClassifier.random(classes, 12).float()):
        x, y = samples(40, (4, 3), classes)
        x, y = x.float(), torch.where(torch.arange(40) % 4 > 0, model(x.float()).argmax(1), y)
        seen: list[int] = []

        def counted(x, model=model, seen=seen):
            seen.append(len(x))
            return model(x)

        flips = run(name, counted, x, y, norm, passes=passes)
        spent = flips.forwards + flips.backwards
        assert spent.max() <= passes
        wrong = flips.distances == 0
        assert wrong.any() and not wrong.all()
        # Wrong samples ride along through the gradients at the samples, and are left alone then.
        assert (flips.forwards[wrong] == 1).all() and len(flips.backwards[wrong].unique()) == 1
        assert (flips.backwards[wrong][0] <= flips.backwards[~wrong]).all()
        assert (
            sum(seen) == int(flips.forwards.sum() + flips.checks.sum()) + 2 * 8
        )  # the model's check looks at 8 samples twice
        if passes >= 5:  # a gradient of every likely rival, one look, and something is found
            assert flips.success[~wrong].any()
            assert spent[~wrong].max() > 1


@each_pair
def test_unlimited_passes_are_those_of_the_docstrings(name, norm) -> None:
    model, x, y = problem(10, 40)
    flips = run(name, model, x, y, norm)
    right = flips.distances > 0
    forwards = flips.forwards[right]
    backwards = flips.backwards[right]
    steps = ENGINES[name].options.get("steps")
    if name == "deepfool":  # linear: most flip at the first step
        assert int(backwards.median()) == 9 and int(forwards.median()) == 1 + 1 + 10
        assert torch.equal(backwards, 9 * (forwards - 11))
    elif (
        name == "fab"
    ):  # gradients before each step, a forward pass more after each flip but the last
        assert (backwards == 9 * steps).all()
        assert (forwards >= 1 + steps + 10).all() and (forwards <= 1 + steps + steps - 1 + 10).all()
    elif name == "fab-t":
        # a look that flips has a gradient of no use, so there may be one more after each
        most = 9 * (2 * steps - 1)
        assert (backwards <= most).all() and (forwards <= 1 + most + 10).all()
    else:
        assert (backwards == steps).all() and (forwards == 1 + steps + 10).all()


@each_pair
def test_the_batch_size_does_not_matter(name, norm) -> None:
    dtype = torch.float64 if norm == 2 else torch.float32
    model, x, y = problem(10, 6, shape=(2, 7))
    model = model.to(dtype)
    x = x.to(dtype)
    whole = run(name, model, x, y, norm, passes=40)
    for size in (1, 4) if norm == 2 else (1,):
        other = run(name, model, x, y, norm, passes=40, batch_size=size)
        assert torch.equal(other.points, whole.points) and torch.equal(
            other.distances, whole.distances
        )
        assert torch.equal(other.forwards, whole.forwards) and torch.equal(
            other.backwards, whole.backwards
        )
    assert whole.points.dtype == dtype


class Faint(nn.Module):
    """Three logits: nothing at all below 0.5, and above it a slope so small that its square
    vanishes in float32.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rise = (x.flatten(1) - 0.5).clamp(min=0).sum(1)
        return torch.stack([torch.full_like(rise, 2), 1e-25 * rise, 0 * rise], 1)


@each_domain
@each_pair
def test_zero_and_vanishing_gradients_give_no_nan(name, norm, domain) -> None:
    x = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(6, dtype=torch.int64)
    x[0] = 0.1
    seen = []

    def watched(x):
        seen.append(x.detach())
        return Faint()(x)

    flips = run(name, watched, x, y, norm, domain)
    assert all(torch.isfinite(points).all() for points in seen)
    assert not flips.distances.isnan().any() and torch.isfinite(flips.points).all()
    if domain is not None:
        assert torch.isinf(flips.distances).all()
    if name in ("deepfool", "fab", "fab-t"):
        assert flips.forwards[0] == 1, "without a gradient there is nothing to look at"


@each_domain
@pytest.mark.parametrize("norm", NORMS)
def test_nearest_plane_against_all_planes(norm, domain) -> None:
    generator = torch.Generator().manual_seed(2)
    point = torch.rand(80, 5, generator=generator)
    w = torch.randn(80, 4, 5, generator=generator)
    gap = torch.rand(80, 4, generator=generator) * 6 - 0.5
    gap[:9] = 50  # out of the box's reach
    w[:5, 1] = 0
    step, which = nearest_plane(point, w, gap, norm, domain)
    each = torch.stack([plane_step(point, w[:, j], gap[:, j], norm, domain) for j in range(4)], 1)
    reached = ((w * each).sum(2) - gap).abs() <= 1e-4
    length = torch.where(reached, vector_norm(each.flatten(0, 1), norm).reshape(80, 4), INF)
    some = reached.any(1)
    assert some.any() and (domain is None or not some.all())
    assert torch.allclose(vector_norm(step, norm)[some], length.min(1).values[some])
    assert torch.equal(step, each[torch.arange(80), which])


def test_fab_targets_and_ddn_norms_are_checked() -> None:
    model, x, y = problem(3, 6)
    with pytest.raises(ws.InputError, match="DDN is for l2"):
        run("ddn", model, x, y, INF)
    with pytest.raises(ws.InputError, match="targets is 0"):
        find_flips(fab_engine, "fab-t", model, x, y, 2, options={"targets": 0})


def test_fab_t_runs_on_every_rival() -> None:
    """A rival that is far by its logit and near by its slope: only its own run finds it."""
    weight = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 10.0]], dtype=torch.float64)
    model = LinearClassifier(weight, torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64))
    x = torch.zeros(1, 2, dtype=torch.float64)
    y = torch.tensor([0])
    one, two = (
        find_flips(
            fab_engine, "fab-t", model, x, y, 2, None, options={"targets": m}
        ).distances.item()
        for m in (1, 2)
    )
    assert one == pytest.approx(1, rel=1e-3) and two == pytest.approx(0.2, rel=1e-3)


def test_engines_report_their_progress() -> None:
    model, x, y = problem(4, 20)
    for name in ENGINES:
        shares: list[float] = []
        run(name, model, x, y, 2, progress=shares.append)
        assert len(shares) >= 2 and shares == sorted(shares) and 0 < shares[0] <= shares[-1] == 1


def test_a_start_that_is_wrong_is_left_alone() -> None:
    """But for the gradients at the samples, which it would ride through beside others."""
    model, x, _ = problem(4, 20)
    y = (model(x).argmax(1) + 1) % 4
    for name, case in ENGINES.items():
        state = Tracker(Network(model, torch.arange(20)), x, y, 2.0, BOX, None)
        case.engine(state, lambda share: None)
        rivals = 3 if name in ("deepfool", "fab", "fab-t") else 1
        assert (state.network.forwards == 1).all() and torch.equal(state.points, x)
        assert (state.network.backwards == rivals).all()


@pytest.mark.slow_cases("2.0-0.25")
@pytest.mark.parametrize(("norm", "eps"), [(INF, 2 / 255), (2.0, 0.25)])
def test_fab_is_nearer_than_wda_pp_on_a_real_network(zoo, norm, eps) -> None:
    model, dataset = zoo.load("cifar_cnn_a_adv")
    x, y = zoo.images(dataset, 30)
    ours = find_flips(fab_engine, "fab", model, x, y, norm, options={"steps": 10})
    theirs = ws.nearest(model, x, y, norm, method="wda++", eps=eps)
    both = theirs.success & (theirs.distances > 0)
    assert both.sum() >= 10 and ours.success.all()
    assert ours.distances[both].mean() <= theirs.distances[both].mean()
    assert ws.allocate(ours, eps, 1).verify(model)
