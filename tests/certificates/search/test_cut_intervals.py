"""Branching on the input intervals of smooth neurons: it proves what is true and nothing else."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.search.margins import Tree, branched
from wassail.certificates.search.subproblems import Forest, Subproblems

INF = math.inf
BOX = (-1.0, 2.0)
KINDS = {
    "sigmoid": (nn.Sigmoid(), nn.Sigmoid()),
    "tanh": (nn.Tanh(), nn.Tanh()),
    "gelu": (nn.GELU(), nn.GELU()),
    "silu": (nn.SiLU(), nn.SiLU()),
    "softplus": (nn.Softplus(), nn.Softplus()),
    "relu and tanh": (nn.ReLU(), nn.Tanh()),
    "sigmoid and gelu": (nn.Sigmoid(), nn.GELU()),
}


def case(kind: str, seed: int, samples: int = 2) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A random network of three classes on R^3, with steep weights."""
    torch.manual_seed(seed)
    first, second = (copy.deepcopy(part) for part in KINDS[kind])
    layers = (nn.Linear(3, 10), first, nn.Linear(10, 8), second, nn.Linear(8, 3))
    model = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if "sigmoid" in kind or "tanh" in kind else 1.5)
        model[-1].bias -= model(torch.rand(200, 3, dtype=torch.float64)).mean(0)
    x = torch.rand(samples, 3, dtype=torch.float64)
    return model, x, model(x).argmax(1)


def swept(graph: Graph, x: Tensor, radius: Tensor, norm: float = INF) -> Sweep:
    return Sweep(graph, Balls.make(x, radius, norm, BOX)).run()


def wave(x: Tensor) -> Tensor:
    """The margin of `Wave` at points `(m,)`: it falls to 0.06 near 1.15 and rises again before it
    falls below 0 at 2.55.
    """
    bump = torch.sigmoid(8 * (x - 1)) - torch.sigmoid(8 * (x - 1.3))
    return 0.1 - bump - 0.5 * torch.tanh(4 * x - 10)


class Wave(nn.Module):
    """Two classes on R with the margin of `wave`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 2).double()
        self.b = nn.Linear(1, 1).double()
        self.out = nn.Linear(3, 2).double()
        with torch.no_grad():
            self.a.weight.copy_(torch.tensor([[8.0], [8.0]]))
            self.a.bias.copy_(torch.tensor([-8.0, -10.4], dtype=torch.float64))
            self.b.weight.copy_(torch.tensor([[4.0]]))
            self.b.bias.copy_(torch.tensor([-10.0]))
            self.out.weight.copy_(torch.tensor([[-1.0, 1.0, -0.5], [0.0, 0.0, 0.0]]))
            self.out.bias.copy_(torch.tensor([0.1, 0.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        parts = [torch.sigmoid(self.a(x)), torch.tanh(self.b(x))]
        return self.out(torch.cat(parts, 1))


@pytest.mark.slow
def test_a_distance_that_is_known() -> None:
    """On a line: the distance to the first root of the margin, by a grid and bisection; here linear
    bounds stop far below it.
    """
    model = Wave()
    start = 0.5
    grid = torch.linspace(start, 3.0, 300001, dtype=torch.float64)
    assert torch.allclose(model(grid[:5, None])[:, 0], wave(grid[:5]))
    first = int((wave(grid) <= 0).to(torch.int8).argmax())
    assert first > 0
    good = float(grid[first - 1])
    bad = float(grid[first])
    for _ in range(60):
        middle = (good + bad) / 2
        if float(wave(torch.tensor(middle, dtype=torch.float64))) > 0:
            good = middle
        else:
            bad = middle
    distance = good - start
    x = torch.tensor([[start]], dtype=torch.float64)
    y = torch.tensor([0])
    crown = float(ws.radii(model, x, y, "inf", (0.0, 3.0), "crown").values[0])
    found = float(ws.radii(model, x, y, "inf", (0.0, 3.0), "branch").values[0])
    assert crown < 0.3 * distance
    assert 1.2 * crown < found <= distance
    threat = ws.Threat(norm=INF, order=INF, eps=0.8, domain=(0.0, 3.0))
    assert bool(ws.verify(model, x, y, threat).proved[0])
    assert not bool(ws.verify(model, x, y, threat, "crown").proved[0])
    beyond = ws.Threat(norm=INF, order=INF, eps=1.0001 * distance, domain=(0.0, 3.0))
    assert not bool(ws.verify(model, x, y, beyond).proved[0])


@pytest.mark.slow_cases("gelu", "sigmoid")
@pytest.mark.parametrize("kind", ["sigmoid", "gelu", "relu and tanh"])
def test_radii_lie_between_linear_bounds_and_flips(kind: str) -> None:
    """Above CROWN's, below the flips of an attack; and closer than a third of the way."""
    model, x, y = case(kind, 1)
    crown = ws.radii(model, x, y, "inf", BOX, "crown").values
    flips = ws.nearest(model, x, y, INF, BOX, passes=300).distances
    found = ws.radii(model, x, y, "inf", BOX, "branch")
    assert (found.values >= crown).all() and (found.values <= flips).all()
    assert ((found.values - crown) > (flips - crown) / 3).any()
    assert found.proved_by is not None and "branch" in found.proved_by


def grown(tree: Tree, rivals: list[list[int]], rounds: int) -> Subproblems:
    """Subproblems after some rounds of splitting all of them."""
    tree.tilt(rivals)
    domains = tree.bounded(tree.roots(rivals), 8)
    for _ in range(rounds):
        domains = tree.bounded(tree.split(domains), 4)
    return domains


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "norm"), [("gelu", 2.0), *((kind, INF) for kind in KINDS)])
def test_a_bound_of_a_domain_holds_at_every_point_of_it(kind: str, norm: float) -> None:
    """Thousands of points of the ball: each lies in a domain of every rival, and its margin is not
    below the bound of any that it lies in.
    """
    model, x, y = case(kind, 5, 1)
    graph = read(model, (3,), smooth=True)
    sweep = swept(graph, x, torch.tensor([0.4]), norm)
    tree = Tree(sweep, [0], y.tolist())
    rivals = [j for j in range(3) if j != int(y[0])]
    domains = grown(tree, [rivals], 4)
    assert (domains.cuts.column >= 0).any()
    assert (domains.cuts.under > 0).any() or (domains.cuts.over > 0).any()
    generator = torch.Generator().manual_seed(0)
    step = 2 * torch.rand(20000, 3, dtype=torch.float64, generator=generator) - 1
    if norm == 2:
        step = step[step.norm(dim=1) <= 1]
    values = graph.values((x + 0.4 * step).clamp(*BOX))
    margin = values[-1][:, y] - values[-1]
    inputs = {i: values[graph.nodes[i].inputs[0]].flatten(1) for i in graph_nodes(graph)}
    assert tree.intervals is not None
    smooth = torch.cat([inputs[i] for i in tree.intervals.parts], 1)
    relus = [inputs[i][:, tree.places[i][0]] for i in tree.places]
    covered = torch.zeros(len(margin), 3, dtype=torch.int64)
    for k in range(len(domains)):
        inside = torch.ones(len(margin), dtype=torch.bool)
        if relus:
            inside &= (torch.cat(relus, 1) * domains.sign[k].double() >= 0).all(1)
        cuts = domains.cuts
        for column, low, high in zip(cuts.column[k].tolist(), cuts.low[k], cuts.high[k]):
            if column >= 0:
                inside &= (smooth[:, column] >= low) & (smooth[:, column] <= high)
        rival = int(domains.rival[k])
        covered[inside, rival] += 1
        assert not inside.any() or domains.bound[k] <= margin[inside, rival].min()
    assert (covered[:, rivals] >= 1).all()


def graph_nodes(graph: Graph) -> list[int]:
    return [i for i, node in enumerate(graph.nodes) if node.slope is not None or node.activation]


def test_children_share_the_point_of_the_cut() -> None:
    """The two intervals of a cut neuron meet in one number and are the parent's; others stay."""
    model, x, y = case("sigmoid", 2, 1)
    tree = Tree(swept(read(model, (3,), smooth=True), x, torch.tensor([0.3])), [0], y.tolist())
    rivals = [[j for j in range(3) if j != int(y[0])]]
    parents = grown(tree, rivals, 3)
    children = tree.split(parents)
    half = len(parents)
    own = torch.zeros(1, dtype=torch.int64)
    changed = 0
    for k in range(half):
        upper = children.cuts.take(torch.tensor([k]))
        lower = children.cuts.take(torch.tensor([half + k]))
        assert torch.equal(upper.column, lower.column)
        moved = (upper.low != lower.low).nonzero()
        assert len(moved) == 1
        slot = int(moved[0, 1])
        assert upper.low[0, slot] == lower.high[0, slot]
        column = upper.column[:, slot : slot + 1]
        before = (parents.cuts.column[k] == column[0]).nonzero()
        if len(before):
            low, high = (v[k, before[0]] for v in (parents.cuts.low, parents.cuts.high))
        else:
            assert tree.intervals is not None
            table = (tree.intervals.low, tree.intervals.high)
            low, high = (tree.intervals.at(v, own, column)[0] for v in table)
        assert lower.low[0, slot] == low and upper.high[0, slot] == high
        assert low < upper.low[0, slot] < high
        changed += len(before)
    assert changed, "no neuron was cut twice"


def test_the_same_answer_alone_and_in_a_batch() -> None:
    """Verdicts and domains of three samples together, in another order, and one by one."""
    model, x, y = case("sigmoid and gelu", 3, 3)
    graph = read(model, (3,), smooth=True)
    radius = 1.5 * ws.radii(graph, x, y, "inf", BOX, "crown").values

    def tried(rows: list[int]) -> list[tuple[bool, int]]:
        sweep = swept(graph, x[rows], radius[rows])
        lower = margins(sweep, y[rows])[0]
        places = list(range(len(rows)))
        found = branched(sweep, lower, places, y[rows], [100] * len(rows))
        return [(one.proved, one.count) for one in found]

    together = tried([0, 1, 2])
    assert max(count for _, count in together) > 10
    assert tried([2, 0, 1]) == [together[k] for k in (2, 0, 1)]
    assert [tried([k])[0] for k in range(3)] == together


def test_cuts_come_back_from_leaves() -> None:
    """On the same ball as they were; on a smaller one within what is left of their intervals."""
    model, x, y = case("relu and tanh", 4)
    graph = read(model, (3,), smooth=True)
    radius = torch.tensor([0.3, 0.35], dtype=torch.float64)
    tree = Tree(swept(graph, x, radius), [0, 1], y.tolist())
    rivals = [[j for j in range(3) if j != label] for label in y.tolist()]
    domains = grown(tree, rivals, 4)
    leaves = {k: tree.leaves(k, domains.where(domains.owner == k)) for k in (0, 1)}
    back = tree.regrown(leaves, rivals)
    same = domains.take(domains.owner.argsort(stable=True))
    for name in ("column", "low", "high", "up", "down", "under", "over"):
        assert torch.equal(getattr(back.cuts, name), getattr(same.cuts, name)), name
    small = Tree(swept(graph, x, 0.7 * radius), [0, 1], y.tolist())
    small.tilt(rivals)
    again = small.bounded(small.regrown(leaves, rivals), 4)
    real = again.cuts.column >= 0
    own = again.owner
    assert small.intervals is not None
    for table, ends, sign in (("low", again.cuts.low, 1), ("high", again.cuts.high, -1)):
        whole = small.intervals.at(getattr(small.intervals, table), own, again.cuts.column)
        assert (sign * (ends - whole) >= 0)[real].all(), table
    assert (again.cuts.low <= again.cuts.high).all()


@pytest.mark.slow
def test_a_tree_goes_on_from_its_leaves() -> None:
    """For fewer domains than anew, with the same verdict; and beyond a flip nothing is proved."""
    model, x, y = case("tanh", 1, 1)
    graph = read(model, (3,), smooth=True)
    flip = ws.nearest(model, x, y, INF, BOX, passes=300).distances
    proved = ws.radii(model, x, y, "inf", BOX, "branch").values

    def tried(radius: Tensor, most: int, forest: Forest) -> tuple[bool, int]:
        sweep = swept(graph, x, radius)
        lower = margins(sweep, y)[0]
        found = branched(sweep, lower, [0], y, [most], None, forest, [0])[0]
        return found.proved, found.count

    forest = Forest()
    assert not tried(0.98 * proved, 6, forest)[0] and forest.trees
    again = tried(0.98 * proved, 10000, forest)
    fresh = tried(0.98 * proved, 10000, Forest())
    assert again[0] and fresh[0] and again[1] < fresh[1]
    assert not tried(1.0001 * flip, 300, Forest())[0]


def test_time_that_is_up_proves_nothing() -> None:
    """Before the slopes of the whole ball are known, too; and a search can be sent to a worker."""
    model, x, y = case("sigmoid", 1, 1)
    graph = read(model, (3,), smooth=True)
    flip = ws.nearest(model, x, y, INF, BOX, passes=300).distances
    sweep = swept(graph, x, 0.9 * flip)
    with clock.limited(0.0):
        found = branched(sweep, torch.full((1, 3), -1.0), [0], y, [100])[0]
    assert (found.proved, found.count) == (False, 0)
    tree = Tree(sweep, [0], y.tolist())
    domains = grown(tree, [[j for j in range(3) if j != int(y[0])]], 2)
    there = pickle.loads(pickle.dumps((tree, domains)))
    assert torch.equal(there[0].bounded(there[1], 4).bound, tree.bounded(domains, 4).bound)
