"""Branching on the inputs of products and softmaxes: it proves what is true and nothing else."""

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from support.networks import Net
from wassail.certificates import radius_search
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep, margins
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.reader import read
from wassail.certificates.radius_search import branched
from wassail.certificates.search import sheets
from wassail.certificates.search.cuts import Cuts
from wassail.certificates.search.domains import Domains
from wassail.certificates.search.tree import Tree

INF = math.inf
BOX = (-1.0, 2.0)
WIDE = (-4.0, 4.0)


@pytest.fixture(autouse=True)
def few_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that these small networks do not need more of."""
    monkeypatch.setattr(radius_search, "MOST", 400)


def attention() -> nn.Module:
    """Attention of three tokens of width 2, a residual ReLU layer after it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = x + F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x))
        return m.head((y + m.down(m.up(y).relu())).mean(1))

    layers = {name: nn.Linear(2, 2) for name in ("q", "k", "v")}
    return Net(forward, **layers, up=nn.Linear(2, 3), down=nn.Linear(3, 2), head=nn.Linear(2, 3))


def bare() -> nn.Module:
    """Attention without any activation."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)).flatten(1))

    layers = {name: nn.Linear(2, 2) for name in ("q", "k", "v")}
    return Net(forward, **layers, head=nn.Linear(6, 3))


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
    "bare": bare,
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


def grown(tree: Tree, rivals: list[list[int]], rounds: int) -> Domains:
    """Domains after some rounds of splitting all of them."""
    tree.tilt(rivals)
    domains = tree.bounded(tree.roots(rivals), 8)
    for _ in range(rounds):
        domains = tree.bounded(tree.split(domains), 4)
    return domains


def others(y: Tensor) -> list[list[int]]:
    return [[j for j in range(3) if j != label] for label in y.tolist()]


class Square(nn.Module):
    """Two classes on R with the margin `x^2 - 2.5 x + 1`: from 0 the first root is at 0.5."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * x - 2.5 * x + 1, 0 * x], 1)


class Saddle(nn.Module):
    """Two classes on R^2 with the margin `1 + (x + y) (x - y)`: from 0 the distance is 1."""

    def forward(self, x: Tensor) -> Tensor:
        a = x[:, :1] + x[:, 1:]
        b = x[:, :1] - x[:, 1:]
        return torch.cat([1 + a * b, 0 * a], 1)


class Pair(nn.Module):
    """Two classes on R with the margin `0.1 - p(8 (x - 1)) + p(8 (x - 1.3)) - p(8 (x - 2.5)) / 2`,
    p the first of two entries of a softmax: it falls to 0.01 at 1.15, and below 0 near 2.35.
    """

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for place in (1.0, 1.3, 2.5):
            logits = torch.stack([8 * (x - place), 0 * x], 2)
            parts.append(torch.softmax(logits, 2)[:, :, 0])
        margin = 0.1 - 0.15 * (parts[0] - parts[1]) - 0.5 * parts[2]
        return torch.cat([margin, 0 * x], 1)


def first_root(model: nn.Module, start: float, end: float) -> float:
    """Where the margin of a network on R is first below 0, by a grid and bisection."""
    grid = torch.linspace(start, end, 100001, dtype=torch.float64)
    z = model(grid[:, None])
    first = int((z[:, 0] <= z[:, 1]).to(torch.int8).argmax())
    assert first > 0
    good = float(grid[first - 1])
    bad = float(grid[first])
    for _ in range(60):
        middle = (good + bad) / 2
        z = model(torch.tensor([[middle]], dtype=torch.float64))
        good, bad = (middle, bad) if bool(z[0, 0] > z[0, 1]) else (good, middle)
    return good


@pytest.mark.parametrize(
    ("model", "start", "distance", "least"),
    [
        (Square(), [0.0], 0.5, 0.49),
        (Saddle(), [0.0, 0.0], 1.0, 0.8),
        (Pair(), [0.5], None, 0.7),
    ],
)
def test_a_distance_that_is_known(
    model: nn.Module, start: list[float], distance: float | None, least: float
) -> None:
    """Closed forms: linear bounds stop far below the distance, branching comes near to it, and
    nothing is proved beyond it.
    """
    x = torch.tensor([start], dtype=torch.float64)
    y = torch.tensor([0])
    if distance is None:
        distance = first_root(model, start[0], 3.0) - start[0]
    crown = float(ws.radii(model, x, y, "inf", WIDE, "crown").values[0])
    found = float(ws.radii(model, x, y, "inf", WIDE, "branch").values[0])
    assert crown < 0.75 * distance
    assert least * distance < found <= distance
    near = ws.Threat(norm=INF, order=INF, eps=least * distance, domain=WIDE)
    assert bool(ws.verify(model, x, y, near, "branch")[0])
    beyond = ws.Threat(norm=INF, order=INF, eps=1.0001 * distance, domain=WIDE)
    assert not bool(ws.verify(model, x, y, beyond, "branch")[0])


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
    curves = tree.intervals.sheets
    cuts = domains.cuts
    assert (cuts.column >= tree.intervals.count - sum_of(curves.parts)).any()
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
    smooth = [inputs[i] for i in tree.intervals.parts]
    smooth += [values[j].flatten(1) for j in curves.parts]
    columns = torch.cat(smooth, 1)
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


def sum_of(parts: dict[int, slice]) -> int:
    return sum(part.stop - part.start for part in parts.values())


@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_planes_hold_on_the_parts_of_a_box(norm: float) -> None:
    """A few entries of every curve cut at random places: points of the ball that lie in all parts
    have values between the planes there. Some parts lie beside the sample.
    """
    model, x, y = case("attention", 3)
    graph = read(model, (3, 2), smooth=True)
    radius = {1.0: 1.0, 2.0: 0.5, INF: 0.25}[norm]
    sweep = swept(graph, x, torch.tensor([radius]), norm)
    tree = Tree(sweep, [0], y.tolist())
    tree.tilt(others(y))
    table = tree.intervals
    generator = torch.Generator().manual_seed(1)
    step = torch.randn(4000, 3, 2, dtype=torch.float64, generator=generator)
    length = torch.linalg.vector_norm(step.flatten(1), norm, dim=1)
    values = graph.values((x + radius * step / length[:, None, None]).clamp(*BOX))
    columns = torch.cat([values[j].flatten(1) for j in table.sheets.parts], 1)
    apart = 0
    checked = 0
    for _ in range(60):
        column = torch.randperm(table.count, generator=generator)[None, :3]
        low = table.low[:, column[0]]
        high = table.high[:, column[0]]
        middle = low + (high - low) * torch.rand(1, 3, dtype=torch.float64, generator=generator)
        left = torch.rand(1, 3, generator=generator) < 0.5
        low = torch.where(left, low, middle)
        high = torch.where(left, middle, high)
        zero = torch.zeros(1, 3)
        cuts = Cuts(column, low, high, zero, zero, zero, zero)
        own = torch.zeros(1, dtype=torch.int64)
        held = table.held(own, own, cuts, True)
        assert held.sheets
        c = table.c[:, column[0]]
        apart += int(((c < low) | (c > high)).sum())
        chosen = columns[:, column[0]]
        inside = ((chosen >= low) & (chosen <= high)).all(1).nonzero()[:, 0]
        for i, sheet in held.sheets.items():
            node = graph.nodes[i]
            plane = sheet.planes[torch.float64].plane
            steps = [values[j][inside] - sweep.centre[j] for j in node.inputs]
            rise = values[i][inside] - sweep.centre[i]
            rest = rise - plane.forward(*steps) - sheet.planes[torch.float64].off
            assert (rest.abs() <= sheet.planes[torch.float64].far).all()
            whole = sweep.exact.planes[i].far
            assert (sheet.planes[torch.float64].far <= 1.5 * whole + 1e-12).all()
            checked += len(inside)
    assert apart > 20 and checked > 1000


def test_a_cut_logit_makes_the_planes_of_the_product_tighter() -> None:
    """One logit cut in the middle: the planes of the softmax's row and of the product that reads
    it are tighter in one half at least, and other rows stay what they are.
    """
    model, x, y = case("bare", 3)
    graph = read(model, (3, 2), smooth=True)
    sweep = swept(graph, x, torch.tensor([0.25]))
    tree = Tree(sweep, [0], y.tolist())
    tree.tilt(others(y))
    table = tree.intervals
    soft = next(i for i, v in table.sheets.surfaces.items() if v.curve == Softmax())
    after = next(i for i, v in table.sheets.surfaces.items() if soft in v.node.inputs)
    start = table.sheets.parts[graph.nodes[soft].inputs[0]].start
    column = torch.tensor([start + 4])  # of the second row
    both = table.split(Cuts.none(1, column.device), torch.zeros(1, dtype=torch.int64), column)
    own = torch.zeros(1, dtype=torch.int64)
    for i in (soft, after):
        whole = sweep.exact.planes[i].far[0]
        parts = [table.held(own, own, cuts, True).sheets[i] for cuts in both]
        far = torch.stack([sheet.planes[torch.float64].far[0] for sheet in parts])
        assert torch.allclose(far[:, [0, 2]], whole[[0, 2]].expand(2, -1, -1), rtol=1e-9)
        assert (far[:, 1].sum(1) < 0.98 * whole[1].sum()).any()


def test_curves_of_large_networks_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of entries only activations are."""
    model, x, y = case("attention", 3)
    graph = read(model, (3, 2), smooth=True)
    sweep = swept(graph, x, torch.tensor([0.25]))
    assert Tree(sweep, [0], y.tolist()).intervals.count > 0
    monkeypatch.setattr(sheets, "MOST", 10)
    assert Tree(sweep, [0], y.tolist()).intervals.count == 0
    threat = ws.Threat(norm=INF, order=INF, eps=0.01, domain=BOX)
    assert bool(ws.verify(model, x, y, threat, "branch")[0])


def test_the_gain_of_a_product_is_what_a_cut_gains() -> None:
    """Without lengths: the widths of the planes of both halves shrink by it, for every entry."""
    curve = Product("ik,kj->ij")
    torch.manual_seed(0)
    centres = [torch.randn(1, 2, 3, dtype=torch.float64), torch.randn(1, 3, 2, dtype=torch.float64)]
    spans = [(-torch.rand_like(c), torch.rand_like(c)) for c in centres]
    w = torch.rand(1, 2, 2, dtype=torch.float64)
    far = curve.plane(centres, spans).far
    gains = curve.gains(w, centres, spans, far)
    for side, gain in enumerate(gains):
        for k in range(gain.numel()):
            low, high = (v.clone().flatten() for v in spans[side])
            high[k] = (low[k] + high[k]) / 2
            parts = list(spans)
            parts[side] = (low.reshape(gain.shape), high.reshape(gain.shape))
            less = curve.plane(centres, parts).far
            assert torch.allclose((w * (far - less)).sum(), gain.flatten()[k], rtol=1e-9)


@pytest.mark.parametrize(
    ("kind", "norm"),
    [("attention", "1"), ("attention", "2"), ("attention", "inf"), ("bare", "inf"), ("gate", "2")],
)
def test_radii_lie_between_linear_bounds_and_flips(kind: str, norm: str) -> None:
    """Not below CROWN's, not above the flips of an attack; and above CROWN's for some sample."""
    model, x, y = case(kind, 1, 2)
    crown = ws.radii(model, x, y, norm, BOX, "crown").values
    flips = ws.nearest(model, x, y, float(norm), BOX, passes=300).distances
    found = ws.radii(model, x, y, norm, BOX, "branch")
    assert (found.values >= crown).all() and (found.values <= flips).all()
    assert (found.values > 1.02 * crown).any()
    assert found.proved_by is not None and "branch" in found.proved_by


@pytest.mark.parametrize("seed", [10, 12, 13])
def test_nothing_is_proved_beyond_a_flip(seed: int) -> None:
    """Just beyond the nearest flip known, with hundreds of domains."""
    model, x, y = case("attention", seed)
    flips = ws.nearest(model, x, y, INF, BOX, passes=300).distances
    assert bool(flips.isfinite())
    threat = ws.Threat(norm=INF, order=INF, eps=1.0001 * float(flips[0]), domain=BOX)
    assert not bool(ws.verify(model, x, y, threat, "branch")[0])


def test_the_same_answer_alone_and_in_a_batch() -> None:
    """Verdicts and domains of three samples together, in another order, and one by one."""
    model, x, y = case("attention", 3, 3)
    graph = read(model, (3, 2), smooth=True)
    radius = 1.3 * ws.radii(graph, x, y, "inf", BOX, "crown").values

    def tried(rows: list[int]) -> list[tuple[bool, int]]:
        sweep = swept(graph, x[rows], radius[rows])
        lower = margins(sweep, y[rows])[0]
        return branched(sweep, lower, list(range(len(rows))), y[rows], [100] * len(rows), INF)

    together = tried([0, 1, 2])
    assert max(count for _, count in together) > 10
    assert tried([2, 0, 1]) == [together[k] for k in (2, 0, 1)]
    assert [tried([k])[0] for k in range(3)] == together


def test_cuts_come_back_from_leaves_and_travel() -> None:
    """On the same ball as they were, on a smaller one within what is left of their intervals; and
    a tree can be sent to a worker.
    """
    model, x, y = case("bare", 4, 2)
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
