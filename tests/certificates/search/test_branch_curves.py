"""Branching in networks with products and softmaxes: it proves what is true and nothing else."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from support.networks import Net
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.search.margins import Tree, branched
from wassail.certificates.search.subproblems import Subproblems

INF = math.inf
BOX = (-1.0, 2.0)
WIDE = (-4.0, 4.0)


def attention() -> nn.Module:
    """Attention of three tokens of width 2, a residual ReLU layer after it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = x + F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))
        return m.head((y + m.down(m.up(y).relu())).mean(1))

    layers = {name: nn.Linear(2, 2) for name in ("q", "k", "v")}
    return Net(forward, **layers, up=nn.Linear(2, 3), down=nn.Linear(3, 2), head=nn.Linear(2, 3))


def normed() -> nn.Module:
    """A LayerNorm before attention, GELUs after it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        z = m.norm(x)
        y = x + F.scaled_dot_product_attention(m.q(z), m.k(z), m.v(z))
        return m.head((y + m.down(F.gelu(m.up(y)))).mean(1))

    layers = {name: nn.Linear(2, 2) for name in ("q", "k", "v")}
    rest = {"norm": nn.LayerNorm(2, eps=0.1), "up": nn.Linear(2, 3), "down": nn.Linear(3, 2)}
    return Net(forward, **layers, **rest, head=nn.Linear(2, 3))


def gate() -> nn.Module:
    """A SiLU that a product reads, and a factor that is the input itself."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return m.head(F.silu(m.a(x)) * m.b(x)) + m.other(x * x)

    layers = {"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)}
    return Net(forward, **layers, head=nn.Linear(4, 3), other=nn.Linear(6, 3))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "attention": attention,
    "normed": normed,
    "gate": gate,
}


def case(kind: str, seed: int, samples: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    """A random network of three classes on three tokens of width 2, with steep weights."""
    torch.manual_seed(seed)
    model = KINDS[kind]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    x = torch.rand(samples, 3, 2, dtype=torch.float64)
    return model, x, model(x).argmax(1)


def swept(graph: Graph, x: Tensor, radius: Tensor, norm: float = INF) -> Sweep:
    return Sweep(graph, Balls.make(x, radius, norm, BOX)).run()


def grown(tree: Tree, rivals: list[list[int]], rounds: int) -> Subproblems:
    """Subproblems after some rounds of splitting all of them."""
    tree.tilt(rivals)
    domains = tree.bounded(tree.roots(rivals), 8)
    for _ in range(rounds):
        domains = tree.bounded(tree.split(domains), 4)
    return domains


def others(y: Tensor) -> list[list[int]]:
    return [[j for j in range(3) if j != label] for label in y.tolist()]


@pytest.mark.few(4)
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_of_a_domain_holds_at_every_point_of_it(kind: str, norm: float) -> None:
    """Thousands of points of the ball: each lies in a domain of every rival, and its margin is not
    below the bound of any that it lies in.
    """
    model, x, y = case(kind, 5)
    graph = read(model, (3, 2), smooth=True)
    radius = {1.0: 1.2, 2.0: 0.6, INF: 0.3}[norm]
    tree = Tree(swept(graph, x, torch.tensor([radius]), norm), [0], y.tolist())
    rivals = others(y)
    domains = grown(tree, rivals, 5)
    cuts = domains.cuts
    generator = torch.Generator().manual_seed(0)
    step = 2 * torch.rand(20000, 3, 2, dtype=torch.float64, generator=generator) - 1
    if norm < INF:
        length = torch.linalg.vector_norm(step.flatten(1), norm, dim=1)
        step = step / length[:, None, None] * torch.rand(20000, 1, 1, generator=generator)
    values = graph.values((x + radius * step).clamp(*BOX))
    margin = values[-1][:, y] - values[-1]
    inputs = {
        i: values[node.inputs[0]].flatten(1) for i, node in enumerate(graph.nodes) if node.inputs
    }
    none = values[0].new_zeros(len(margin), 0)
    parts = tree.intervals.parts if tree.intervals is not None else ()
    columns = torch.cat([none, *(inputs[i] for i in parts)], 1)
    relus = [inputs[i][:, tree.places[i][0]] for i in tree.places]
    covered = torch.zeros(len(margin), 3, dtype=torch.int64)
    for k in range(len(domains)):
        inside = torch.ones(len(margin), dtype=torch.bool)
        if relus:
            inside &= (torch.cat(relus, 1) * domains.sign[k].double() >= 0).all(1)
        for column, low, high in zip(cuts.column[k].tolist(), cuts.low[k], cuts.high[k]):
            if column >= 0:
                inside &= (columns[:, column] >= low) & (columns[:, column] <= high)
        rival = int(domains.rival[k])
        covered[inside, rival] += 1
        assert not inside.any() or domains.bound[k] <= margin[inside, rival].min()
    assert (covered[:, rivals[0]] >= 1).all()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "norm"),
    [("attention", "1"), ("attention", "2"), ("attention", "inf"), ("normed", "inf")],
)
def test_radii_lie_between_linear_bounds_and_flips(kind: str, norm: str) -> None:
    """Not below CROWN's, not above the flips of an attack; and above CROWN's for some sample."""
    model, x, y = case(kind, 1, 2)
    crown = ws.radii(model, x, y, norm, BOX, "crown").values
    flips = ws.nearest(model, x, y, float(norm), BOX, passes=300, warn=False).distances
    found = ws.radii(model, x, y, norm, BOX, "branch")
    assert (found.values >= crown).all() and (found.values <= flips).all()
    assert (found.values > 1.01 * crown).any()
    assert found.proved_by is not None and "branch" in found.proved_by


@pytest.mark.parametrize("seed", [10, 12, 13])
def test_nothing_is_proved_beyond_a_flip(seed: int) -> None:
    """Just beyond the nearest flip known, with hundreds of domains."""
    model, x, y = case("attention", seed)
    flips = ws.nearest(model, x, y, INF, BOX, passes=300).distances
    assert bool(flips.isfinite())
    threat = ws.Threat(norm=INF, order=INF, eps=1.0001 * float(flips[0]), domain=BOX)
    assert not bool(ws.verify(model, x, y, threat, "branch").proved[0])


def test_the_same_answer_alone_and_in_a_batch() -> None:
    """Verdicts and domains of three samples together, in another order, and one by one."""
    model, x, y = case("attention", 3, 3)
    graph = read(model, (3, 2), smooth=True)
    radius = 1.3 * ws.radii(graph, x, y, "inf", BOX, "crown").values

    def tried(rows: list[int]) -> list[tuple[bool, int]]:
        sweep = swept(graph, x[rows], radius[rows])
        lower = margins(sweep, y[rows])[0]
        found = branched(sweep, lower, list(range(len(rows))), y[rows], [100] * len(rows))
        return [(one.proved, one.count) for one in found]

    together = tried([0, 1, 2])
    assert max(count for _, count in together) > 10
    assert tried([2, 0, 1]) == [together[k] for k in (2, 0, 1)]
    assert [tried([k])[0] for k in range(3)] == together


def test_cuts_come_back_from_leaves_and_travel() -> None:
    """On the same ball as they were, on a smaller one within what is left of their intervals; and
    a tree can be sent to a worker.
    """
    model, x, y = case("gate", 4, 2)
    graph = read(model, (3, 2), smooth=True)
    radius = torch.tensor([0.3, 0.35], dtype=torch.float64)
    tree = Tree(swept(graph, x, radius), [0, 1], y.tolist())
    rivals = others(y)
    domains = grown(tree, rivals, 4)
    leaves = {k: tree.leaves(k, domains.where(domains.owner == k)) for k in (0, 1)}
    back = tree.regrown(leaves, rivals)
    same = domains.take(domains.owner.argsort(stable=True))
    for name in ("column", "low", "high", "under", "over"):
        assert torch.equal(getattr(back.cuts, name), getattr(same.cuts, name)), name
    small = Tree(swept(graph, x, 0.7 * radius), [0, 1], y.tolist())
    small.tilt(rivals)
    again = small.bounded(small.regrown(leaves, rivals), 4)
    assert (again.cuts.low <= again.cuts.high).all()
    there = pickle.loads(pickle.dumps((tree, domains)))
    assert torch.equal(there[0].bounded(there[1], 4).bound, tree.bounded(domains, 4).bound)


@pytest.mark.slow
def test_a_network_whose_bounds_are_infinite_is_no_error() -> None:
    """On R^n at linf the ascent of this one had nothing to climb, and raised torch's error."""
    first, last = nn.Linear(4, 2), nn.Linear(2, 3)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[0.01, -0.65, -0.99, 0.14], [0.41, 0.3, -0.37, 0.45]]))
        first.bias.copy_(torch.tensor([-0.76, 0.31]))
        last.weight.copy_(torch.tensor([[-41.7, -171.4], [18.3, 131.0], [126.1, 88.3]]))
        last.bias.copy_(torch.tensor([-160.6, -46.3, 183.8]))
    net = nn.Sequential(first, nn.CELU(0.6), last).eval()
    x = torch.tensor([[0.02, 1.08, -3.32, 2.16], [1.72, 0.03, 3.39, 3.86]])
    for norm in (1, 2, "inf"):
        found = ws.radii(net, x, net(x).argmax(1), norm, None, method="branch", effort=0.2)
        assert bool((found.values > 0).all())
