"""Attention: the bounds against exact Jacobians, closed forms and Castin's constant."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from support.attention import attend, jacobian_norm, local_bound, steepest
from wassail.errors import InputError
from wassail.paper import attention_bounds as at


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def case(
    seed: int,
    n: int,
    d: int,
    steep: float,
    o: int | None = None,
    bias: float = 0.0,
    hidden: bool = False,
):
    """Tokens on the unit sphere, `|A| = steep`, a random value matrix, a query bias and a mask."""
    x = normal(seed, n, d)
    a = normal(seed + 1, d, d)
    v = normal(seed + 2, o or d, d)
    x = x / x.norm(dim=1, keepdim=True)
    a = a * steep / torch.linalg.matrix_norm(a, 2)
    mask = torch.zeros(n, n, dtype=torch.float64)
    if hidden:
        mask[normal(seed + 3, n, n) > 0.5] = -math.inf
        mask.fill_diagonal_(0.0)
    return x, a, v, bias * normal(seed + 4, d) if bias else None, mask if hidden else None


def true_norm(x: Tensor, *head: Any) -> float:
    jacobian = torch.autograd.functional.jacobian(lambda t: attend(t, *head), x)
    return float(torch.linalg.matrix_norm(jacobian.flatten(0, 1).flatten(1), 2))


CASES = [
    (seed, n, d, steep, o, bias, hidden)
    for seed, (n, d, o) in enumerate([(2, 3, 3), (5, 4, 2), (9, 3, 5), (12, 6, 6), (4, 8, 3)])
    for steep in (1e-3, 0.3, 3.0, 30.0)
    for bias in (0.0, 2.0)
    for hidden in (False, True)
]


def test_attend_is_torch_attention_with_all_its_biases():
    n = 5
    d = 6
    h = 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mha = torch.nn.MultiheadAttention(d, h, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        mha.in_proj_bias.copy_(normal(1, 3 * d))
    x = normal(2, n, d)
    q, k, v = mha.in_proj_weight.detach().reshape(3, h, d // h, d)
    b_q, _, b_v = mha.in_proj_bias.detach().reshape(3, h, d // h)
    out = mha.out_proj.weight.detach().reshape(d, h, d // h).transpose(0, 1)
    scale = math.sqrt(d // h)
    a = k.mT @ q / scale
    u = (k.mT @ b_q[..., None])[..., 0] / scale
    ours = (
        attend(x, a, out @ v, u) + (out @ b_v[..., None]).sum(0)[:, 0] + mha.out_proj.bias.detach()
    )
    theirs = mha(x[None], x[None], x[None])[0][0].detach()
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_no_scores_or_one_token_is_the_value_matrix():
    v = normal(0, 4, 3)
    size = float(torch.linalg.matrix_norm(v, 2))
    zero = torch.zeros(3, 3, dtype=torch.float64)
    a = normal(1, 3, 3)
    for n in (1, 2, 7):
        x = normal(2, n, 3)
        assert float(local_bound(x, zero, v)) == pytest.approx(size, rel=1e-10)
        assert at.global_bound(n, zero, v, 5.0) == pytest.approx(size, rel=1e-12)
    x = normal(3, 1, 3)
    assert float(local_bound(x, a, v)) == pytest.approx(size, rel=1e-10)
    assert at.global_bound(1, a, v, 5.0) == pytest.approx(size, rel=1e-12)
    assert at.global_bound(1, a, v, 5.0) >= size


def test_two_tokens_in_one_dimension():
    # x = (1, -1), A = a: y = (a, -a), P_11 = sigmoid(2 a); d m_1 = p (1 + (1 - m) y_1 + var a) d_1
    # + ... by hand.
    a = torch.tensor([[0.7]], dtype=torch.float64)
    v = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    p = 1 / (1 + math.exp(-1.4))
    m = 2 * p - 1
    var = 4 * p * (1 - p)
    same = p * (1 + (1 - m) * 0.7) + var * 0.7
    other = (1 - p) * (1 + (-1 - m) * 0.7)
    truth = max(abs(same + other), abs(same - other))  # [[same, other], [other, same]]
    assert true_norm(x, a, v) == pytest.approx(truth, rel=1e-12)
    assert truth <= float(local_bound(x, a, v)) <= 1.5 * truth
    assert jacobian_norm(lambda t: attend(t, a, v), x) == pytest.approx(truth, rel=1e-8)


def test_global_above_region_above_local_above_truth():
    for parameters in CASES:
        x, a, v, bias, mask = case(*parameters[:5], bias=parameters[5], hidden=parameters[6])
        truth = true_norm(x, a, v, bias, mask)
        local = float(local_bound(x, a, v, bias, mask))
        ball = at.global_bound(len(x), a, v, float(x.norm(dim=1).max()) * (1 + 1e-15), bias, mask)
        assert truth <= local <= ball, parameters
        assert local <= 4.5 * truth, parameters
        previous = local
        for radius in (1e-9, 1e-3, 0.1, 1.0):
            low = x - radius
            high = x + radius
            region = float(at.region_bound(low, high, a, v, bias, mask))
            reach = float(torch.maximum(low.abs(), high.abs()).norm(dim=1).max()) * (1 + 1e-12)
            assert (
                previous * (1 - 1e-12)
                <= region
                <= at.global_bound(len(x), a, v, reach, bias, mask) * (1 + 1e-12)
            ), parameters
            previous = region
            if radius == 1e-9:
                assert region <= local * (1 + 1e-5 * max(1, parameters[3])), parameters


@pytest.mark.slow
def test_no_point_of_a_box_is_steeper_than_its_bound():
    for parameters in CASES[::2] + CASES[1::4]:
        x, a, v, bias, mask = case(*parameters[:5], bias=parameters[5], hidden=parameters[6])
        for radius in (1e-3, 0.03, 0.3):
            region = float(at.region_bound(x - radius, x + radius, a, v, bias, mask))
            for k in range(3):
                step = normal(100 + k, *x.shape)
                step = radius * step.sign() if k else radius * step.clamp(-1, 1)
                assert true_norm(x + step, a, v, bias, mask) <= region, parameters


def terms(x: Tensor, a: Tensor, v: Tensor, state: at._State) -> tuple[Tensor, Tensor, Tensor]:
    """The three terms of the derivative as matrices `(n o, n d)`."""
    n, d = x.shape
    first = torch.einsum("ij,oa->ioja", state.p, v)
    second = torch.einsum("ij,ijo,ia->ioja", state.p, state.deviation @ v.T, state.y)
    third = torch.einsum(
        "ij,ioa->ioja", torch.eye(n, dtype=torch.float64), v @ state.covariance @ a
    )
    parts = [t.reshape(n * len(v), n * d) for t in (first, second, third)]
    return tuple(parts)  # type: ignore[return-value]


def norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


def test_everything_moves_no_further_than_said():
    tight = torch.zeros(8, dtype=torch.float64)
    for parameters in CASES:
        x, a, v, bias, mask = case(*parameters[:5], bias=parameters[5], hidden=parameters[6])
        state = at._State.make(x, a, bias, mask)
        parts = terms(x, a, v, state)
        jacobian = torch.autograd.functional.jacobian(
            lambda t, h=(a, v, bias, mask): attend(t, *h), x
        )
        assert torch.allclose(
            torch.stack(parts).sum(0), jacobian.flatten(0, 1).flatten(1), atol=1e-10
        )
        g = normal(8, len(x), len(v))
        assert torch.allclose(
            at._pull(state, g[None], a, v)[0], torch.einsum("ioja,io->ja", jacobian, g)
        )
        for radius in (1e-4, 0.1):
            r = radius * normal(7, *x.shape).abs().clamp(max=1)
            move = at._moves(state, r, a, 1e-13)
            width = at.spectral((state.p[..., None] * state.deviation) @ v.T)
            drift = at._drift(state, move, width, norm(a), norm(v))
            for k in range(4):
                moved = x + r * normal(200 + k, *x.shape).sign()
                there = at._State.make(moved, a, bias, mask)
                weights = (
                    there.p[..., None] * there.deviation - state.p[..., None] * state.deviation
                )
                now = terms(moved, a, v, there)
                found = [
                    (there.p - state.p).abs() / move.p.clamp(min=1e-300),
                    (there.y - state.y).abs() / move.y,
                    norm(weights) / move.weights,
                    norm(there.covariance - state.covariance) / move.covariance,
                    norm(there.covariance) / move.largest,
                    norm(now[0] - parts[0]) / drift[0],
                    norm(now[1] - parts[1]) / drift[1],
                    norm(now[2] - parts[2]) / drift[2].max(),
                ]
                found = [t.nan_to_num().max() for t in found]
                assert max(found) <= 1 + 1e-6, (parameters, found)
                assert (there.p <= move.most).all() and (there.y.norm(dim=1) <= move.steep).all()
                assert norm(now[1]) <= at._second(move, norm(v))
                tight = torch.maximum(tight, torch.stack(found))
    assert (tight > torch.tensor([0.9, 0.99, 0.4, 0.5, 0.9, 0.5, 0.2, 0.3])).all(), (
        tight
    )  # nothing is far too large


def test_probabilities_move_as_far_as_corners_of_the_box_of_scores():
    for seed in range(30):
        scores = 3 * normal(seed, 1, 4)
        e = 2 * normal(seed + 1, 1, 4).abs()
        log = torch.log_softmax(scores, -1)
        corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 4)
        reached = torch.softmax(scores + corners * e, -1)
        least, most = at._probabilities(log, e, 0.0)
        assert torch.allclose(most[0], reached.amax(0), rtol=1e-12)
        assert torch.allclose(least[0], reached.amin(0), rtol=1e-9)


def test_no_probability_is_above_the_likeliest():
    for b in (0.0, 0.1, 2.0):
        mask = normal(1, 3, 3)
        scores = torch.tensor([b, -b, -b], dtype=torch.float64)
        assert at._likeliest(3, b, None) == pytest.approx(
            float(torch.softmax(scores, 0)[0]), rel=1e-12
        )
        most = max(
            float(torch.softmax(mask[i] + scores.roll(j), 0)[j]) for i in range(3) for j in range(3)
        )
        assert at._likeliest(3, b, mask) == pytest.approx(most, rel=1e-10)
    assert (
        at._likeliest(2, 1.0, torch.tensor([[0.0, -math.inf], [0.0, 0.0]], dtype=torch.float64))
        == 1.0
    )


def test_global_bound_is_the_maximum_of_its_proof():
    # |V| (sqrt(n) max (sqrt(pi) + B sqrt(w)) + |A| R^2) over pi <= top, w <= min(top, 1/2, 1 - pi),
    # on a grid.
    one = torch.ones(1, 1, dtype=torch.float64)
    for n in (2, 3, 50):
        for steep in (0.05, 0.6, 1.0, 1.7, 4.0):
            for bias in (0.0, 0.3):
                b = steep + bias
                top = 1 / (1 + (n - 1) * math.exp(-2 * b))
                grid = torch.linspace(0, top, 20001, dtype=torch.float64)
                h = float((grid.sqrt() + b * (1 - grid).clamp(max=min(top, 0.5)).sqrt()).max())
                ours = at.global_bound(n, steep * one, 2 * one, 1.0, bias * one[0])
                proof = 2 * (math.sqrt(n) * h + steep)
                assert proof <= ours <= proof * (1 + 1e-4), (
                    n,
                    steep,
                    bias,
                )  # the grid misses the maximum by its mesh


def test_a_box_far_from_the_origin_uses_the_ball_around_its_middle():
    x, a, v, _, _ = case(0, 6, 4, 1e-3)
    far = x + 40.0
    region = float(at.region_bound(far - 3, far + 3, a, v))
    assert region < at.global_bound(6, a, v, 90.0) / 3
    assert true_norm(far, a, v) <= region
    sharp = case(1, 6, 4, 20.0)[1]
    assert true_norm(far, sharp, v) <= float(at.region_bound(far - 1, far + 1, sharp, v))
    balls = at._global_balls(
        x + 4,
        0 * x,
        sharp,
        20.0,
        float(norm(v)),
        torch.zeros(4, dtype=torch.float64),
        0.0,
        None,
        math.inf,
    )
    expected = at.global_bound(
        6, sharp, v, float((x - x.mean(0)).norm(dim=1).max()), sharp @ (x.mean(0) + 4)
    )
    assert balls == pytest.approx(expected, rel=1e-9)


def test_ascent_stays_below_the_global_bound_and_climbs():
    for parameters in CASES[::5]:
        x, a, v, bias, mask = case(*parameters[:5], bias=parameters[5], hidden=parameters[6])

        def function(t: Tensor, head=(a, v, bias, mask)) -> Tensor:
            return attend(t, *head)

        def project(t: Tensor) -> Tensor:
            return t / t.norm(dim=1, keepdim=True).clamp(min=1)

        found, point = steepest(function, x, project, steps=15)
        assert jacobian_norm(function, x) <= found * (1 + 1e-6)
        assert found <= true_norm(point, a, v, bias, mask) * (1 + 1e-9)
        assert found <= at.global_bound(len(x), a, v, 1.0 + 1e-12, bias, mask), parameters


def test_tokens_around_a_centre():
    # A ball around c with the bias u + A c: the output moves by V c, the derivative not at all.
    for seed in range(20):
        x, a, v, bias, _ = case(seed, 6, 4, 2.0, bias=1.0)
        assert bias is not None
        c = 3 * normal(seed + 50, 4)
        assert torch.allclose(
            attend(x + c, a, v, bias), attend(x, a, v, bias + a @ c) + v @ c, atol=1e-10
        )
        assert true_norm(x + c, a, v, bias) <= at.global_bound(6, a, v, 1 + 1e-12, bias + a @ c)


def theory(n: int, steep: float) -> float:
    return math.sqrt(n) + (math.sqrt(n) + 1) * steep


def test_never_above_theory_nor_castin():
    v = torch.eye(2, dtype=torch.float64)
    for n in range(1, 301):
        for k in range(-6, 7):
            steep = 10.0**k
            a = torch.diag(torch.tensor([steep / 4, steep / 8], dtype=torch.float64))
            ours = at.global_bound(n, a, v, 2.0)
            theirs = at.castin(n, a, v, 2.0)
            assert ours <= theory(n, steep) * (1 + 1e-12) and ours <= theirs
            if 16 <= n <= 197:
                assert 1.47 <= theirs / theory(n, steep) <= 3.24
                assert theirs / ours >= 1.47


def test_the_steepest_rows_attain_fact_3():
    # Two tokens at +-R, evenly likely: |W|^2 = R^2 / 2, sum p^2 = 1 / 2, so row i of the first
    # terms is (1 + B) / sqrt 2.
    steep = 5.0
    a = torch.tensor([[steep]], dtype=torch.float64)
    v = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    mask = torch.tensor(
        [[0.0, 0, -math.inf], [-math.inf, 0, -math.inf], [0, 0, -math.inf]], dtype=torch.float64
    )
    mask[0, 0] = -2 * steep  # balances the scores of the first row, <1, 5> against <-1, 5>
    jacobian = torch.autograd.functional.jacobian(lambda t: attend(t, a, v, None, mask), x)[
        0, 0, :, 0
    ]
    without_third = jacobian - torch.tensor([steep, 0, 0], dtype=torch.float64)
    assert float(without_third.norm()) == pytest.approx(
        math.hypot(0.5 * (1 + steep), 0.5 * (1 - steep)), rel=1e-12
    )
    assert float(without_third.norm()) <= (1 + steep) / math.sqrt(2)


def test_heads_add_or_stack():
    for seed in range(20):
        n = 5
        d = 6
        h = 3
        x = normal(seed, n, d)
        a = 0.3 * normal(seed + 1, h, d, d)
        v = normal(seed + 2, h, 2, d)
        out = normal(seed + 3, h, 4, 2)
        bias = normal(seed + 4, h, d)
        joint = [float(local_bound(x, a[k], out[k] @ v[k], bias[k])) for k in range(h)]
        single = [float(local_bound(x, a[k], v[k], bias[k])) for k in range(h)]
        bound = at.heads(joint, single, out.transpose(0, 1).flatten(1))
        assert true_norm(x, a, out @ v, bias) <= bound
        assert bound <= sum(joint) * (1 + 1e-12)
    assert at.heads([3.0, 4.0], [3.0, 4.0], torch.eye(2, dtype=torch.float64)) == pytest.approx(
        5.0, rel=1e-12
    )
    assert at.heads([3.0, 4.0], [3.0, 4.0], 2 * torch.eye(2, dtype=torch.float64)) == pytest.approx(
        7.0, rel=1e-12
    )


def test_batches_of_inputs():
    _, a, v, bias, mask = case(0, 5, 4, 2.0, bias=1.0, hidden=True)
    x = normal(7, 2, 3, 5, 4)
    found = local_bound(x, a, v, bias, mask)
    assert found.shape == (2, 3)
    assert float(found[1, 2]) == float(local_bound(x[1, 2], a, v, bias, mask))


def test_a_large_score_is_no_overflow():
    x, a, v, bias, mask = case(3, 6, 4, 1e6, bias=1e4, hidden=True)
    for radius in (0.0, 1e-3, 10.0):
        assert math.isfinite(float(at.region_bound(x - radius, x + radius, a, v, bias, mask)))
    assert true_norm(x, a, v, bias, mask) <= float(local_bound(x, a, v, bias, mask))


def test_unbounded_tokens_are_refused():
    x, a, v, _, _ = case(0, 3, 2, 1.0)
    with pytest.raises(InputError, match="bounded sets"):
        at.global_bound(3, a, v, math.inf)
    with pytest.raises(InputError, match="box of tokens"):
        at.region_bound(x, x + math.inf, a, v)


def test_local_bound_is_within_a_factor_two():
    logs = []
    for n in (16, 64):
        for steep in (0.1, 1.0, 10.0):
            for seed in range(2):
                x, a, v, _, _ = case(10 * seed, n, 16, steep)
                exact = jacobian_norm(lambda t, a=a, v=v: attend(t, a, v), x)
                ratio = float(local_bound(x, a, v)) / exact
                assert 1 - 1e-9 <= ratio <= 2
                logs.append(math.log(ratio))
    assert math.exp(sum(logs) / len(logs)) <= 1.35


def test_the_second_term_moves_with_its_query():
    # Token 0 sits at 0 and looks at tokens at -1 and 1, which do not move: W_0 = [-1/2, 1/2] is
    # stationary, y_0 = a x_0 is not.
    a = torch.tensor([[2.0]], dtype=torch.float64)
    v = torch.ones(1, 1, dtype=torch.float64)
    x = torch.tensor([[0.0], [-1.0], [1.0]], dtype=torch.float64)
    mask = torch.zeros(3, 3, dtype=torch.float64)
    mask[:, 0] = mask[1, 2] = mask[2, 1] = -math.inf
    r = torch.tensor([[1e-3], [0.0], [0.0]], dtype=torch.float64)
    state = at._State.make(x, a, None, mask)
    width = at.spectral(state.p[..., None] * state.deviation)
    move = at._moves(state, r, a, 1e-13)
    there = at._State.make(x + r, a, None, mask)
    moved = float(norm(terms(x + r, a, v, there)[1] - terms(x, a, v, state)[1]))
    assert moved == pytest.approx(2e-3 / math.sqrt(2), rel=1e-4)
    assert moved <= float(at._drift(state, move, width, norm(a), norm(v))[1]) <= 1.1 * moved


@pytest.mark.parametrize("k", [0, 1, 2])
def test_what_a_term_moves_is_added(k: int, monkeypatch: pytest.MonkeyPatch):
    x, a, v, bias, _ = case(3, 9, 5, 3.0, bias=1.0)
    none = [torch.zeros(()).double(), torch.zeros(()).double(), torch.zeros(9).double()]
    some = [t + 1e-3 if j == k else t for j, t in enumerate(none)]
    monkeypatch.setattr(at, "_drift", lambda *_: none)
    before = float(local_bound(x, a, v, bias))
    monkeypatch.setattr(at, "_drift", lambda *_: some)
    assert float(local_bound(x, a, v, bias)) == pytest.approx(before + 1e-3, rel=1e-10)


def test_known_probabilities_help():
    x, a, v, bias, _ = case(1, 8, 5, 3.0, bias=1.0)
    low = x - 0.03
    high = x + 0.03
    p = torch.softmax((x @ a.T + bias) @ x.T, -1)
    points = [x + 0.03 * normal(k, 8, 5).clamp(-1, 1) for k in range(50)]
    spread = (
        torch.stack([(torch.softmax((t @ a.T + bias) @ t.T, -1) - p).abs() for t in points]).amax(0)
        * 1.5
    )
    plain = at.region_bound(low, high, a, v, bias)
    helped = at.region_bound(low, high, a, v, bias, p=(p - spread, p + spread))
    assert max(true_norm(t, a, v, bias) for t in points[:9]) <= float(helped) < float(plain)


def test_castin_with_a_bias_is_above_ours():
    for seed in range(20):
        x, a, v, bias, _ = case(seed, 7, 4, 2.0, bias=1.0)
        ours = at.global_bound(7, a, v, 1.0 + 1e-12, bias)
        assert true_norm(x, a, v, bias) <= ours <= at.castin(7, a, v, 1.0, bias)
        assert at.castin(7, a, v, 1.0) <= at.castin(7, a, v, 1.0, bias)
        assert at.castin(7, a, v, 1.0, 0 * bias) == at.castin(7, a, v, 1.0)
