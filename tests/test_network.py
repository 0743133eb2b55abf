import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import wassail as ws
from wassail.checks import check_data
from wassail.network import Batch, Network, Tape, frozen, mixed, search
from wassail.testing import LinearClassifier, samples


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5)
    ).double()


def test_several_gradients_from_one_forward_equal_autograd() -> None:
    model = small_net().eval()
    x = torch.rand(6, 3, 4, dtype=torch.float64)
    y = torch.arange(6) % 5
    rivals = torch.stack([(y + 1) % 5, (y + 3) % 5], 1)
    network = Network(model, torch.arange(6))
    tape = network.tape(x, network.rows)
    keep = torch.tensor([0, 2, 5])
    found = tape.gradients(y[keep], rivals[keep], keep)
    assert found.shape == (3, 2, 3, 4)
    for a, i in enumerate(keep.tolist()):
        for j in range(2):
            one = x[i : i + 1].clone().requires_grad_(True)
            z = model(one)[0]
            (expected,) = torch.autograd.grad(z[rivals[i, j]] - z[y[i]], one)
            assert torch.allclose(found[a, j], expected[0], atol=1e-14)
    assert network.forwards.tolist() == [1] * 6
    assert network.backwards.tolist() == [2] * 6  # a backward pass goes through the whole batch


def test_no_call_exceeds_the_batch_size_and_every_row_is_counted() -> None:
    seen = []

    def model(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return torch.stack([x.flatten(1).sum(1), -x.flatten(1).sum(1)], 1)

    network = Network(model, torch.arange(4), batch_size=3)
    rows = torch.tensor([0, 0, 1, 3, 3, 3, 2])
    z = network.logits(torch.rand(7, 2), rows)
    assert z.shape == (7, 2) and max(seen) == 3 and sum(seen) == 7
    assert network.forwards.tolist() == [2, 1, 1, 3]


def test_counts_equal_what_the_model_saw() -> None:
    """Rows that went through the model: the attack's own count, plus its checks, plus the look
    at 8 samples, twice.
    """
    inner = small_net()
    rows = [0]
    gradients = [0]

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows[0] += len(x)
            return inner(x)

    x, _ = samples(30, (3, 4), 5)
    model = Counted()
    inner.eval()  # hidden from the attack inside another module, so nobody else can do it
    y = inner(x).argmax(1)
    true_pull = Tape.pull

    def pull(tape, weight, *others, **options):
        gradients[0] += int((weight != 0).any(1).sum())
        return true_pull(tape, weight, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "pull", pull)
        for attack in (ws.wda, ws.wda_pp):
            rows[0] = gradients[0] = 0
            result = attack(model, x, y, ws.Threat("inf", 1, 0.1), batch_size=11)
            assert rows[0] == int(result.forwards.sum() + result.checks.sum()) + 16
            assert gradients[0] == int(result.backwards.sum())


@pytest.mark.slow
def test_a_gradient_does_not_load_sympy() -> None:
    """It takes 0.7 s, and torch loads it for gradients with weights."""
    code = """
import sys, torch, wassail as ws
model = torch.nn.Linear(4, 3)
x = torch.rand(5, 4)
ws.pgd(model, x, model(x).argmax(1), ws.Threat("inf", "inf", 0.1), steps=2)
assert "torch" in sys.modules and "sympy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_mode_and_parameters_are_restored_even_after_an_error() -> None:
    model = small_net()
    model.train()
    model[4].eval()
    model[1].weight.requires_grad_(False)

    def state() -> tuple[list[bool], list[bool]]:
        return [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]

    before = state()
    with frozen(model):
        assert not any(m.training for m in model.modules()) and not any(
            p.requires_grad for p in model.parameters()
        )
    assert state() == before
    with pytest.raises(RuntimeError, match="boom"), frozen(model):
        raise RuntimeError("boom")
    assert state() == before
    x, y = samples(4, (3, 4), 5)
    ws.wda_pp(model, x, y, ws.Threat("inf", 1, 0.1))
    assert state() == before, (
        "dropout in train mode is switched off for the attack and back on after it"
    )


def test_a_sample_that_is_wrong_as_it_stands_needs_no_tolerance() -> None:
    """Wrong by less than a stored flip has to be: an error all the same, if nothing moved; no
    flip, if something did.
    """
    hair = 1e-12  # the tolerance of a flip is 1e-9 of the logits, which are about 1 here

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([1 + 0 * x[:, 0], x[:, 0] + 0.5], 1)

    x = torch.tensor([[0.5 + hair], [0.5], [0.4]], dtype=torch.float64)
    y = torch.zeros(3, dtype=torch.int64)
    moved = torch.tensor([[0.5 + hair], [0.5], [0.5 + hair]], dtype=torch.float64)
    found = search(
        lambda network, x, y, tick: (moved, network.logits(x, network.rows)), model, x, y
    )
    assert found.clean.tolist() == [1, 1, 0], "a tie is an error"
    assert found.predicted.tolist() == [1, 1, 0]
    for attack in (ws.wda, ws.wda_pp):
        assert attack(model, x, y, ws.Threat("inf", 1, 0.01)).clean_accuracy == pytest.approx(1 / 3)
    assert ws.nearest(model, x, y, "inf", passes=9).distances[:2].tolist() == [0.0, 0.0]


X = torch.rand(6, 3, dtype=torch.float64)
Y = torch.tensor([0, 1, 0, 1, 0, 1])
GOOD = LinearClassifier.random(2, 3)


def attack(model=GOOD, x=X, y=Y, domain=(0.0, 1.0), **options):
    return ws.wda_pp(model, x, y, ws.Threat("inf", 1, 0.1, domain), **options)


BAD = {
    "NaN": (lambda: attack(x=X.clone().fill_(math.nan)), "sample 0 contains NaN"),
    "inf": (lambda: attack(x=X / 0, domain=None), "NaN or infinity"),
    "0..255": (lambda: attack(x=X * 200 + 3), "or give their domain"),
    "uint8": (lambda: attack(x=(X * 255).to(torch.uint8)), "uint8.*divide by 255"),
    "half": (lambda: attack(x=X.half()), "float16"),
    "range": (lambda: attack(x=X - 0.5), "range over"),
    "labels high": (lambda: attack(y=Y + 1), "labels range over 1..2 but the model has 2 classes"),
    "labels negative": (lambda: attack(y=Y - 1), "labels range over -1..0"),
    "labels float": (lambda: attack(y=Y.float()), "labels are float32"),
    "labels one-hot": (lambda: attack(y=nn.functional.one_hot(Y)), "class indices"),
    "lengths": (lambda: attack(y=Y[:4]), "6 samples but 4 labels"),
    "no batch dimension": (lambda: attack(x=X[0], y=Y[:1]), "shape"),
    "probabilities": (lambda: attack(lambda x: GOOD(x).softmax(1)), "probabilities"),
    "tuple": (lambda: attack(lambda x: (GOOD(x), None)), "returns a tuple"),
    "one class": (lambda: attack(lambda x: x[:, :1]), "at least two"),
    "wrong shape": (lambda: attack(lambda x: x.sum()), r"logits have shape"),
    "NaN logits": (lambda: attack(lambda x: GOOD(x) * math.nan), "NaN or infinity at sample 0"),
    "no gradient": (lambda: attack(lambda x: GOOD(x.detach()).detach()), "differentiably"),
    "image model, vectors": (
        lambda: attack(nn.Conv2d(3, 4, 1)),
        "does not accept samples of shape",
    ),
    "batch size": (lambda: attack(batch_size=0), "batch_size is 0"),
    "eps zero": (lambda: ws.Threat("inf", 1, 0), "eps is 0"),
    "steps": (lambda: attack(steps=0), "steps is 0"),
    "step": (lambda: attack(step=-1), "step is -1"),
    "search": (lambda: attack(search=-1), "search is -1"),
    "select": (lambda: attack(select="margins"), "did you mean 'margin'"),
    "kappa": (lambda: ws.wda(GOOD, X, Y, ws.Threat("inf", 1, 1), kappa=0.5), "kappa is 0.5"),
    "probe": (lambda: ws.wda(GOOD, X, Y, ws.Threat("inf", 1, 1), probe=30), "probe is 30"),
    "method": (lambda: ws.nearest(GOOD, X, Y, method="wda+", eps=1), r"did you mean 'wda\+\+'"),
    "no step": (lambda: ws.nearest(GOOD, X, Y, method="wda++"), "needs a step size"),
    "option": (lambda: ws.nearest(GOOD, X, Y, method="wda++", eps=1, topkk=3), "topkk"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_sentence(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(ws.InputError, match=words) as error:
        call()
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_one_hot_logits_are_not_mistaken_for_probabilities() -> None:
    constant = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    result = attack(lambda x: constant + 0 * x[:, :2], y=torch.zeros(6, dtype=torch.int64))
    assert result.accuracy == 1


def test_randomness_is_reported() -> None:
    with pytest.warns(ws.ModelWarning, match="different logits for the same input"):
        attack(lambda x: GOOD(x) + torch.randn(len(x), 2))


def test_a_tie_is_an_error() -> None:
    result = attack(lambda x: torch.zeros(len(x), 2, dtype=x.dtype) + 0 * x[:, :2])
    assert result.clean_accuracy == 0 and result.accuracy == 0


def test_non_contiguous_numpy_and_integer_labels() -> None:
    points: Any = X.numpy()
    labels: Any = Y.int().numpy()
    x, y = check_data(points, labels, (0, 1))
    assert x.dtype == torch.float64 and y.dtype == torch.int64
    a = attack(x=X.t().contiguous().t())
    assert torch.equal(a.distances, attack().distances)


def test_inside_no_grad_and_inference_mode() -> None:
    expected = attack().distances
    with torch.no_grad():
        assert torch.equal(attack().distances, expected)
    with torch.inference_mode():
        x = X.clone()
    assert torch.equal(attack(x=x).distances, expected)


def test_progress_callback_rises_to_one() -> None:
    seen: list[float] = []
    attack(batch_size=2, progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_rounds_gradients_and_nothing_else(dtype: torch.dtype) -> None:
    model = ws.zoo.load(
        "digits-gelu-adv"
    )  # smooth: at a kink of a ReLU the gradient of a rounded input is another one
    x, y = ws.zoo.data("digits")
    x = x[:20]
    y = y[:20]
    rough = mixed(model, dtype)
    with torch.no_grad():
        assert torch.equal(rough(x), model(x))
    keep = torch.arange(20)
    tapes = [Network(m, keep).tape(x, keep) for m in (model, rough)]
    assert torch.equal(tapes[0].logits, tapes[1].logits) and tapes[1].z.dtype == torch.float32
    exact, found = (tape.gradients(y, (y[:, None] + 1) % 10, keep).flatten(1) for tape in tapes)
    assert not torch.equal(exact, found)
    # both keep 8 significant bits or more, and three layers add up
    assert ((found - exact).norm(dim=1) < 2**-5 * exact.norm(dim=1)).all()


def test_mixed_precision_finds_flips_of_the_plain_model() -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    x = x[:40]
    y = y[:40]
    flips = ws.nearest(mixed(model), x, y, "inf", passes=100)
    assert ws.allocate(flips, 0.1, 1).verify(model)
    plain = ws.nearest(model, x, y, "inf", passes=100)
    assert flips.success.all() and flips.distances.mean() < 1.02 * plain.distances.mean()
    assert flips.forwards.sum() < 1.2 * plain.forwards.sum()  # the second call is not counted


def test_mixed_precision_of_any_callable_survives_an_overflow() -> None:
    rough = mixed(
        lambda x: 1e5 * torch.mm(x, torch.eye(2)), torch.float16
    )  # 1e5 is infinite in float16
    x = torch.tensor([[1.0, -2.0]], requires_grad=True)
    assert torch.equal(rough(x), torch.tensor([[1e5, -2e5]]))
    with frozen(rough):
        rough(x).sum().backward()
    assert x.grad is not None


def test_mixed_precision_needs_a_lower_one() -> None:
    with pytest.raises(ws.InputError, match="choose bfloat16 or float16"):
        mixed(GOOD, torch.float32)


def test_a_batch_pays_for_the_samples_that_are_in_it() -> None:
    """One is wrong and never in it, one leaves after a step, one candidate serves two purposes."""
    model = LinearClassifier.random(3, 4)
    x, _ = samples(4, (4,), 3)
    y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 3
    network = Network(model, torch.arange(4))
    batch = Batch(network, x, y)
    assert batch.rows.tolist() == [1, 2, 3] and batch.done == 0.25
    rivals = ((y + 1) % 3)[batch.rows, None]
    first = batch.gradients(rivals)
    phi = batch.x[:, None] + 0.01 * first
    z = batch.logits(phi, rivals, last=False)
    assert torch.equal(z[:, 0], model(phi[:, 0]))
    rivals = batch.move(phi[:, 0], torch.tensor([False, True, False]), rivals)
    assert batch.rows.tolist() == [1, 3] and torch.equal(batch.x, phi[[0, 2], 0])
    assert network.forwards.tolist() == [1, 2, 2, 2] and network.backwards[1:].tolist() == [2, 2, 2]
    assert torch.allclose(batch.gradients(rivals), first[[0, 2]])
    batch.logits(batch.x[:, None], rivals, last=True)
    assert network.forwards.tolist() == [1, 3, 2, 3] and network.backwards[1:].tolist() == [2, 2, 2]
