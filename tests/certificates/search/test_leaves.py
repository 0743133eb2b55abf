"""A tree that goes on from the leaves it left: the same verdicts, for fewer domains."""

import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates import clock
from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.prove.ladder import least_value
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.search.margins import Tree, branched
from wassail.certificates.search.subproblems import Forest

BOX = (-1.0, 2.0)


def case(seed: int, samples: int = 3) -> tuple[Graph, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 3)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        model[-1].bias -= model(torch.rand(200, 4, dtype=torch.float64)).mean(0)  # no class wins
    x = torch.rand(samples, 4, dtype=torch.float64)
    return read(model, (4,)), x, model(x).argmax(1)


def swept(graph: Graph, x: Tensor, y: Tensor, radius: Tensor) -> tuple[Sweep, Tensor]:
    sweep = Sweep(graph, Balls.make(x, radius, math.inf, BOX)).run()
    return sweep, margins(sweep, y)[0]


def tried(
    graph: Graph, x: Tensor, y: Tensor, radius: Tensor, most: int, forest: Forest
) -> list[tuple[bool, int]]:
    """Verdict and domains of each sample; (True, 0) where linear bounds are enough."""
    sweep, lower = swept(graph, x, y, radius)
    rows = (~(least_value(lower, y) > 0)).nonzero()[:, 0].tolist()
    found = branched(sweep, lower, rows, y, [most] * len(rows), None, forest, rows)
    known = {k: (one.proved, one.count) for k, one in zip(rows, found)}
    return [known.get(k, (True, 0)) for k in range(len(x))]


def test_a_tree_goes_on_from_its_leaves() -> None:
    """Against the exact distances: proved below them, never above, for fewer domains than anew."""
    anew = 0
    kept = 0
    for seed in (1, 3):
        graph, x, y = case(seed)
        distance = nearest_flip(graph, x, y, math.inf, BOX).lower
        assert distance.isfinite().all()
        wide = Forest()
        assert not any(good for good, _ in tried(graph, x, y, 1.0001 * distance, 6, wide))
        assert not any(good for good, _ in tried(graph, x, y, 1.0001 * distance, 40, wide))
        assert wide.trees
        assert all(good for good, _ in tried(graph, x, y, 0.9 * distance, 4000, wide))
        near = 0.97 * distance
        forest = Forest()
        tried(graph, x, y, near, 6, forest)
        names = list(forest.trees)
        again = tried(graph, x, y, near, 4000, forest)
        fresh = tried(graph, x, y, near, 4000, Forest())
        assert again == fresh or all(good for good, _ in again)
        kept += sum(again[k][1] for k in names)
        anew += sum(fresh[k][1] for k in names)
    assert 0 < kept < anew


def test_leaves_of_a_smaller_ball_are_not_used_for_a_larger_one() -> None:
    """What is proved on a ball is not proved on a larger one."""
    graph, x, y = case(0)
    forest = Forest()
    distance = nearest_flip(graph, x, y, math.inf, BOX).lower
    tried(graph, x, y, 0.97 * distance, 1, forest)
    sample, (radius, leaves) = next(iter(forest.trees.items()))
    assert forest.within(sample, radius, 10**6) is leaves
    assert forest.within(sample, 0.5 * radius, 10**6) is leaves
    assert forest.within(sample, math.nextafter(radius, math.inf), 10**6) is None
    assert forest.within(sample + 100, radius, 10**6) is None


def test_leaves_come_back_as_they_were() -> None:
    """Signs, slopes and multipliers of two samples of one tree, over the same balls."""
    graph, x, y = case(1)
    sweep, _ = swept(graph, x, y, torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64))
    samples = [0, 2]
    labels = [int(y[k]) for k in samples]
    tree = Tree(sweep, samples, labels)
    assert tree.ragged  # samples with different numbers of undecided neurons
    rivals = [[j for j in range(3) if j != label] for label in labels]
    domains = tree.bounded(tree.roots(rivals), 6)
    domains = tree.bounded(tree.split(domains), 6)
    assert (domains.beta > 0).any() and (domains.sign != 0).any()
    parts = {k: tree.leaves(k, domains.where(domains.owner == k)) for k in (0, 1)}
    back = tree.regrown(parts, rivals)
    order = domains.owner.argsort(stable=True)
    same = domains.take(order)
    assert torch.equal(back.owner, same.owner) and torch.equal(back.rival, same.rival)
    for k in (0, 1):
        real = torch.cat([p[k] < graph.nodes[i].size for i, p in tree.places.items()])
        mine = same.owner == k
        for name in ("sign", "alpha", "beta"):
            there = getattr(same, name)[mine][:, real]
            assert torch.equal(getattr(back, name)[mine][:, real], there), name
    fewer = tree.regrown(parts, [rivals[0][:1], rivals[1]])
    assert set(fewer.rival[fewer.owner == 0].tolist()) == {rivals[0][0]}


@pytest.mark.slow
def test_radii_by_branching_stay_below_the_distances() -> None:
    """The whole search with trees that are kept, a sample alone and in a batch."""
    graph, x, y = case(2)
    distance = nearest_flip(graph, x, y, math.inf, BOX).lower
    found = ws.radii(graph, x, y, "inf", BOX, "branch")
    assert (found.values <= distance).all() and (found.values > 0.9 * distance).all()
    alone = torch.cat(
        [ws.radii(graph, x[k : k + 1], y[k : k + 1], "inf", BOX, "branch").values for k in range(3)]
    )
    assert torch.allclose(alone, found.values, rtol=1e-9)


def test_leaves_that_were_never_opened_prove_nothing() -> None:
    """The time is up while the roots of another sample are bounded."""
    torch.manual_seed(0)
    wide = (nn.Linear(2, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2))
    model = nn.Sequential(*wide).double()
    x = torch.rand(2, 2, dtype=torch.float64)
    y = model(x).argmax(1)
    radius = 1.5 * ws.nearest(model, x, y, 2.0, None, passes=100, warn=False).distances
    assert radius.isfinite().all()
    graph = read(model, (2,))
    forest = Forest()

    def attempt(rows: list[int], most: int, seconds: float) -> list[bool]:
        sweep = Sweep(graph, Balls.make(x[rows], radius[rows], 2.0, None)).run()
        lower = margins(sweep, y[rows])[0]
        places = list(range(len(rows)))
        counts = [most] * len(rows)
        with clock.limited(seconds):
            found = branched(sweep, lower, places, y[rows], counts, None, forest, rows)
        return [one.proved for one in found]

    assert attempt([0], 1, math.inf) == [False] and list(forest.trees) == [0]
    assert attempt([0, 1], 1000, 1e-9) == [False, False]
