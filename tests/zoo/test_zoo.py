from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from wassail import zoo
from wassail.errors import InputError

NAMES = [
    f"digits-{kind}{suffix}" for kind in ("mlp", "cnn", "gelu", "vit") for suffix in ("", "-adv")
] + ["digits-cnn-cert", "digits-cnn-noise"]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Networks this small only lose time to threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("split", "size"), [("train", 1297), ("test", 500)])
def test_data_shapes_ranges_and_labels(split: str, size: int) -> None:
    x, y = zoo.data("digits", split)
    assert x.shape == (size, 1, 8, 8)
    assert x.dtype == torch.float32
    assert x.min() == 0
    assert x.max() == 1
    assert torch.equal((16 * x).round(), 16 * x)  # sixteenths, exactly
    assert y.shape == (size,)
    assert y.dtype == torch.int64
    counts = torch.bincount(y, minlength=10)
    assert len(counts) == 10
    assert counts.min() >= 0.07 * size
    assert counts.max() <= 0.13 * size


def test_data_defaults_to_the_test_split() -> None:
    assert torch.equal(zoo.data()[0], zoo.data("digits", "test")[0])


def test_splits_share_no_image_and_make_up_the_whole_set() -> None:
    (x_train, y_train), (x_test, y_test) = zoo.data(split="train"), zoo.data(split="test")
    assert len(torch.unique(torch.cat([x_train, x_test]), dim=0)) == 1797
    # The class counts of the 1,797 images as they were published.
    counts = torch.bincount(torch.cat([y_train, y_test]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_models_are_the_ten_networks() -> None:
    assert list(zoo.builtin()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_model_is_as_described(name: str) -> None:
    x, y = zoo.data()
    model = zoo.load(name)
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        logits = model(x)
    assert logits.shape == (500, 10)
    assert logits.dtype == torch.float32
    assert logits.min() < 0  # probabilities would be neither negative
    assert logits.max() > 1  # nor above one
    accuracy = 100 * (logits.argmax(1) == y).double().mean().item()
    stated = zoo._figures(name)
    assert accuracy == pytest.approx(stated["clean_accuracy"], abs=0.05)
    assert accuracy >= (95 if name.endswith("-cert") else 96)
    line = zoo.builtin()[name]
    assert "\n" not in line
    assert f"{accuracy:.1f} %" in line
    strengths = {"standard": 0, "adversarial": stated["pgd_eps"], "certified": 0.05, "noise": 0.25}
    assert stated["train_eps"] == strengths[zoo.MODELS[name].training]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-adv")])
def test_adversarial_training_helped(name: str) -> None:
    robust = zoo._figures(name)
    standard = zoo._figures(name.removesuffix("-adv"))
    assert robust["pgd_eps"] == standard["pgd_eps"]
    assert robust["pgd_accuracy"] > standard["pgd_accuracy"] + 20


@pytest.mark.parametrize("name", NAMES)
def test_input_gradients_flow(name: str) -> None:
    x, y = zoo.data()
    x = x[:20].requires_grad_()
    y = y[:20]
    loss = torch.nn.functional.cross_entropy(zoo.load(name)(x), y, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.isfinite().all()
    assert (gradient.flatten(1).abs().amax(1) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_traced_graph_computes_the_same_for_any_batch(name: str) -> None:
    x, _ = zoo.data()
    model = zoo.load(name)
    traced = fx.symbolic_trace(model)
    for batch in (x[:1], x[:7]):
        assert torch.equal(traced(batch), model(batch))


def test_loads_are_independent() -> None:
    first = zoo.load("digits-mlp")
    second = zoo.load("digits-mlp")
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"unknown model 'digit-mlp': did you mean 'digits-mlp'.*digits-vit-adv"
    ):
        zoo.load("digit-mlp")
    with pytest.raises(InputError, match=r"unknown data set 'digit': did you mean 'digits'"):
        zoo.data("digit")
    with pytest.raises(InputError, match=r"unknown split 'tests': did you mean 'test'"):
        zoo.data("digits", "tests")
    with pytest.raises(InputError, match=r"unknown model 'resnet'"):
        zoo.load("resnet")
