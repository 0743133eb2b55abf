"""Models from anywhere: what is loaded computes what it should, and no file that is opened can
run code.
"""

import contextlib
import io
import json
import logging
import os
import pickle
import sys
import textwrap
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import wassail as ws
from wassail import zoo
from wassail.errors import InputError, ModelWarning
from wassail.zoo.datasets import open_data
from wassail.zoo.difference import forth_and_back
from wassail.zoo.exported import load_exported
from wassail.zoo.models import KINDS, open_model
from wassail.zoo.source import Logits, Normalized
from wassail.zoo.weights import fill, fingerprint, read_state, weights_only


def refused(call: Callable[[], Any]) -> str:
    """The one sentence with which something is refused."""
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text
    return text


class Payload:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What a payload would make; it must not be there when the test is over."""
    mark = tmp_path / "code-was-run"
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()  # the payload works
    mark.rmdir()
    yield mark
    assert not mark.exists()


def saved(thing: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 4)]
    return nn.Sequential(*layers).eval()


def batch(size: int, *shape: int) -> Tensor:
    return torch.rand(size, *(shape or (1, 8, 8)), generator=torch.Generator().manual_seed(size))


# ---- Built-in networks and factories
# -------------------------------------------------------------------------------------


def test_builtin() -> None:
    source = open_model("digits-cnn-adv")
    assert (source.name, source.kind) == ("digits-cnn-adv", "builtin")
    assert isinstance(source.model, nn.Module) and not source.model.training
    assert not any(parameter.requires_grad for parameter in source.model.parameters())
    x, _ = zoo.data()
    assert torch.equal(source.model(x[:5]), zoo.load("digits-cnn-adv")(x[:5]))
    (sha,) = source.info["files"].values()
    assert len(sha) == 64
    json.dumps(source.info)


def test_builtin_takes_other_weights(tmp_path: Path) -> None:
    save_file(
        {k: v.contiguous() for k, v in zoo.load("digits-mlp-adv").state_dict().items()},
        tmp_path / "w.safetensors",
    )
    source = open_model("digits-mlp", weights=str(tmp_path / "w.safetensors"))
    assert (
        source.info["weights"]
        == open_model("digits-mlp-adv").info["weights"]
        != open_model("digits-mlp").info["weights"]
    )
    assert list(source.info["files"]) == ["w.safetensors"]


def test_unknown_names() -> None:
    assert "did you mean 'digits-mlp'" in refused(lambda: open_model("digit-mlp"))
    assert "--weights net.pt" in refused(lambda: open_model("net.pt"))
    assert "module:factory" in refused(lambda: open_model("sys:(x"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own in the current folder."""
    name = f"nets_{tmp_path.name.replace('-', '_')}"
    text = """
        from torch import nn

        def net(width=3, bias=True, scale=1.0):
            layer = nn.Linear(width, 2, bias=bias)
            nn.init.constant_(layer.weight, scale)
            return nn.Sequential(nn.Flatten(), layer)

        def tagged(word):
            return net(), word

        def number():
            return 3

        def broken():
            raise KeyError("no such thing")

        class Nets:
            @staticmethod
            def wide():
                return net(5)

        ready = net()
    """
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    return name


def test_factory(module: str) -> None:
    before = list(sys.path)
    source = open_model(f"{module}:net")
    assert source.kind == "factory" and list(source.info["files"]) == [f"{module}.py"]
    assert isinstance(source.model, nn.Module) and not source.model.training
    assert isinstance(open_model(f"{module}:tagged(some-word)").model, nn.Sequential)
    assert open_model(f"{module}:Nets.wide").model(batch(2, 5)).shape == (2, 2)
    assert open_model(f"{module}:ready").model(batch(2, 3)).shape == (2, 2)
    assert sys.path == before


def test_arguments_of_a_factory_are_words_and_numbers(module: str) -> None:
    model = open_model(f"{module}:net(4, False, scale=2.5)").model
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 2), 10.0))
    assert torch.equal(
        open_model(f"{module}:net(4, bias=False)").model(torch.ones(1, 4)), torch.full((1, 2), 4.0)
    )


@pytest.mark.parametrize(
    "call",
    ["net(__import__('os').mkdir('x'))", "net([1, 2])", "net(1; 2)", "net(a b)", "net(width=`x`)"],
)
def test_arguments_are_never_evaluated(module: str, call: str) -> None:
    text = refused(lambda: open_model(f"{module}:{call}"))
    assert (
        "plain words and numbers" in text or "(" in call[4:]
    )  # brackets inside brackets are no call at all
    assert not Path("x").exists()


def test_factories_that_fail(module: str) -> None:
    assert "No module named 'nowhere'" in refused(lambda: open_model("nowhere:net"))
    assert "no attribute 'nett'" in refused(lambda: open_model(f"{module}:nett"))
    assert "KeyError: 'no such thing'" in refused(lambda: open_model(f"{module}:broken"))
    assert "returned a int" in refused(lambda: open_model(f"{module}:number"))
    assert "unexpected keyword argument 'depth'" in refused(
        lambda: open_model(f"{module}:net(depth=2)")
    )


# ---- Weights
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "module.model."])
@pytest.mark.parametrize("holder", [None, "state_dict", "model", "last"])
def test_weights_are_found_and_prefixes_taken_off(
    tmp_path: Path, prefix: str, holder: str | None
) -> None:
    state = {f"{prefix}{key}": value for key, value in small(1).state_dict().items()}
    torch.save(state if holder is None else {holder: state, "epoch": 3}, tmp_path / "w.pt")
    model = small()
    fill(model, tmp_path / "w.pt", "net")
    assert fingerprint(model) == fingerprint(small(1)) != fingerprint(small())


def test_a_prefix_that_is_the_models_own_stays(tmp_path: Path) -> None:
    outer = nn.Module()
    outer.model = nn.Linear(2, 2)
    torch.save(outer.state_dict(), tmp_path / "w.pt")
    other = nn.Module()
    other.model = nn.Linear(2, 2)
    fill(other, tmp_path / "w.pt", "net")
    assert torch.equal(other.model.weight, outer.model.weight)


def test_a_counter_may_be_missing_and_nothing_else(tmp_path: Path) -> None:
    state = small(1).state_dict()
    del state["1.num_batches_tracked"]
    torch.save(state, tmp_path / "w.pt")
    fill(small(), tmp_path / "w.pt", "net")
    del state["4.bias"]
    torch.save({**state, "5.bias": state["4.weight"]}, tmp_path / "w.pt")
    text = refused(lambda: fill(small(), tmp_path / "w.pt", "net"))
    assert "they lack '4.bias' and they have '5.bias'" in text
    torch.save(state, tmp_path / "w.pt")
    assert "they lack '4.bias';" in refused(lambda: fill(small(), tmp_path / "w.pt", "net"))
    torch.save({**small().state_dict(), "5.bias": torch.zeros(1)}, tmp_path / "w.pt")
    assert "they have '5.bias';" in refused(lambda: fill(small(), tmp_path / "w.pt", "net"))
    torch.save({**small().state_dict(), "4.bias": torch.zeros(7)}, tmp_path / "w.pt")
    assert "size mismatch for 4.bias" in refused(lambda: fill(small(), tmp_path / "w.pt", "net"))


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "page.pt").write_text("\n<!DOCTYPE html><html><head><title>Quota exceeded</title>")
    assert "is a web page" in refused(lambda: read_state(tmp_path / "page.pt"))
    (tmp_path / "junk.pt").write_bytes(b"PK\x03\x04 and no more")
    assert "cannot read weights" in refused(lambda: read_state(tmp_path / "junk.pt"))
    assert "No such file" in refused(lambda: read_state(tmp_path / "none.pt"))
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds no state dict" in refused(lambda: read_state(tmp_path / "list.pt"))
    torch.save({}, tmp_path / "empty.pt")
    assert "holds no state dict" in refused(lambda: read_state(tmp_path / "empty.pt"))


def test_a_malicious_checkpoint_runs_nothing(tmp_path: Path, mark: Path, module: str) -> None:
    for place, thing in enumerate(({"state_dict": {"0.weight": Payload(mark)}}, Payload(mark))):
        path = tmp_path / f"{place}.pt"
        path.write_bytes(saved(thing))
        assert "code in a file is never run" in refused(
            lambda path=path: open_model(f"{module}:net", weights=str(path))
        )
    (tmp_path / "old.pt").write_bytes(
        pickle.dumps(Payload(mark))
    )  # a pickle that is not in torch's archive
    refused(lambda: open_model("digits-mlp", weights=str(tmp_path / "old.pt")))


def test_weights_for_models_that_bring_their_own() -> None:
    for name in ("net.onnx", "net.pt2", "robustbench:Net", "hf:net"):
        assert "brings its own weights" in refused(
            lambda name=name: open_model(name, weights="w.pt")
        )


def test_other_libraries_load_weights_only_too(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (tmp_path / "w.pt").write_bytes(saved(Payload(mark)))
    with weights_only(), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "w.pt", weights_only=False)
    assert (
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
        and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    )


# ---- Normalisation and logits
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "std"),
    [(0.5, 0.25), ((0.5,), (0.25,)), ((0.1, 0.2, 0.3), (0.5, 1.0, 2.0)), ((0.1, 0.2, 0.3), 2)],
)
def test_normalised(mean: Any, std: Any) -> None:
    x = batch(4, 3, 5, 5)
    shape = (1, -1, 1, 1)
    expected = (x - torch.tensor(mean).reshape(shape)) / torch.tensor(std).reshape(shape)
    torch.testing.assert_close(
        Normalized(lambda x: x.flatten(1), mean, std)(x), expected.flatten(1)
    )


def test_normalised_takes_flat_samples_and_moves_with_the_model() -> None:
    model = Normalized(nn.Linear(2, 2), (1.0, 2.0), (1.0, 2.0)).double()
    assert torch.equal(model(torch.tensor([[1.0, 2.0]]).double()), model.model.bias[None])


def test_a_normalisation_that_does_not_fit_is_refused() -> None:
    model = Normalized(nn.Flatten(), (0.1, 0.2, 0.3), 1.0)
    assert "have 3 numbers but the samples have shape (1, 8, 8)" in refused(lambda: model(batch(2)))
    for mean, std in ((0.0, 0.0), (0.0, -1.0), (float("nan"), 1.0), ((), 1.0), ([[0.0]], 1.0)):
        refused(lambda mean=mean, std=std: Normalized(nn.Flatten(), mean, std))
    assert "2 numbers and std 3" in refused(
        lambda: Normalized(nn.Flatten(), (0.0, 0.0), (1.0, 1.0, 1.0))
    )


def test_mean_and_std_for_any_kind() -> None:
    x, _ = zoo.data()
    source = open_model("digits-mlp", mean=[0.5], std=0.5)
    torch.testing.assert_close(source.model(x[:5]), zoo.load("digits-mlp")((x[:5] - 0.5) / 0.5))
    assert (source.info["mean"], source.info["std"]) == ([0.5], 0.5)
    torch.testing.assert_close(
        open_model("digits-mlp", std=0.5).model(x[:5]), zoo.load("digits-mlp")(x[:5] / 0.5)
    )
    assert open_model("digits-mlp", std=0.5).info["weights"] != source.info["weights"]


def test_logits_out_of_what_a_model_returns() -> None:
    z = batch(2, 3)

    def logits(model: Callable[..., Any], *key: str | int) -> Tensor:
        return Logits(model, *key)(z)

    assert logits(lambda x: {"logits": x, "loss": 0}) is z
    assert logits(lambda x: types.SimpleNamespace(logits=x)) is z
    assert logits(lambda x: (0, x), 1) is z
    assert logits(lambda x: {"scores": x}, "scores") is z
    assert "a dict with scores, which has no 'logits'" in refused(
        lambda: logits(lambda x: {"scores": x})
    )
    assert "which has no 2" in refused(lambda: logits(lambda x: (0, x), 2))


def test_logits_of_a_factory(module: str) -> None:
    Path(f"{module}.py").write_text(
        "from torch import nn\n\ndef net():\n    return lambda x: {'scores': x.flatten(1)}\n"
    )
    source = open_model(f"{module}:net", logits="scores")
    assert torch.equal(source.model(batch(2, 3)), batch(2, 3))
    assert source.info["logits"] == "scores"
    Path(f"{module}.py").write_text("def net():\n    return lambda x: ('more', x.flatten(1))\n")
    sys.modules.pop(module)
    assert torch.equal(open_model(f"{module}:net", logits="1").model(batch(2, 3)), batch(2, 3))


# ---- torch.export
# --------------------------------------------------------------------------------------------------


class Token(nn.Module):
    """The batch of the export is written into its graph: a class token is expanded to it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.layer = nn.Linear(4, 3)
        self.register_buffer("place", torch.randn(3, 4), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A feature map, then the logits."""
        t = (
            torch.cat([self.token.expand(x.shape[0], -1, -1), x.reshape(x.shape[0], 2, 4)], 1)
            + self.place
        )
        first, rest = t.split([1, 2], 1)
        t = nn.functional.scaled_dot_product_attention(first, rest, rest)
        return t, self.layer(t[:, 0])


class Relative(nn.Module):
    """Divides by the sum of all it is given: right for one sample, and for several without an
    error but wrong.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("exports")
    torch.manual_seed(0)
    token = Token().eval()
    made: dict[str, Path] = {}
    for name, model, x, dynamic in (
        ("any", small(), batch(2), True),
        ("one", small(), batch(1), False),
        ("token", token, batch(1, 8), False),
        ("tokens", token, batch(3, 8), False),
        ("inplace", nn.Sequential(nn.ReLU(inplace=True), nn.Flatten()).eval(), batch(2, 4), True),
        ("training", small().train(), batch(2), False),
        ("relative", Relative(), batch(1, 4), False),
    ):
        shapes = ({0: torch.export.Dim("n")},) if dynamic else None
        made[name] = folder / f"{name}.pt2"
        torch.export.save(torch.export.export(model, (x,), dynamic_shapes=shapes), made[name])
    torch.save(token.state_dict() | {"place": token.place}, folder / "token.pt")
    made["state"] = folder / "token.pt"
    return made


def token_logits(exports: Mapping[str, Path], x: Tensor) -> Tensor:
    model = Token()
    state = torch.load(exports["state"])
    model.place = state.pop("place")
    model.load_state_dict(state)
    return model(x)[1]


@pytest.mark.few(4)
@pytest.mark.parametrize("size", [0, 1, 2, 7])
@pytest.mark.parametrize("name", ["any", "one"])
def test_exported(exports: Mapping[str, Path], name: str, size: int) -> None:
    model = load_exported(exports[name])
    assert (model.batch, model.rows) == ((None, "together") if name == "any" else (1, "vmap"))
    assert model.shape == (1, 8, 8)
    x = batch(size).requires_grad_()
    torch.testing.assert_close(model(x), small()(x))
    if size:
        gradients = [torch.autograd.grad(m(x)[:, 1].sum(), x)[0] for m in (model, small())]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
@pytest.mark.parametrize(("name", "how"), [("token", "vmap"), ("tokens", "in groups")])
def test_a_fixed_batch_takes_any(
    exports: Mapping[str, Path], name: str, how: str, size: int
) -> None:
    model = load_exported(exports[name])
    assert model.rows == how
    x = batch(size, 8).requires_grad_()
    torch.testing.assert_close(model(x), token_logits(exports, x).reshape(size, 3))
    if size:
        gradients = [
            torch.autograd.grad(z[:, 1].sum(), x)[0] for z in (model(x), token_logits(exports, x))
        ]
        torch.testing.assert_close(*gradients)


def test_rows_that_would_see_each_other_run_alone(exports: Mapping[str, Path]) -> None:
    model = load_exported(exports["relative"])
    assert model.rows == "vmap"
    torch.testing.assert_close(model(batch(5, 4)), batch(5, 4) / batch(5, 4).sum(1, keepdim=True))


def test_exported_source(exports: Mapping[str, Path]) -> None:
    source = open_model(str(exports["any"]), mean=0.5, std=0.5, trust=True)
    assert source.kind == "pt2" and source.kind in KINDS
    torch.testing.assert_close(source.model(batch(3)), small()((batch(3) - 0.5) / 0.5))
    json.dumps(source.info)
    assert source.info["batch"] == "any"


def test_the_samples_are_not_written_to(exports: Mapping[str, Path]) -> None:
    x = batch(3, 4) - 0.5
    before = x.clone()
    assert torch.equal(load_exported(exports["inplace"])(x), before.relu())
    assert torch.equal(x, before)


def test_half_a_sample_does_not_pass_for_one(exports: Mapping[str, Path]) -> None:
    with pytest.raises(RuntimeError):
        load_exported(exports["any"])(batch(4, 1, 4, 8))


def test_an_export_in_training_mode_is_refused(exports: Mapping[str, Path]) -> None:
    assert "eval mode" in refused(lambda: load_exported(exports["training"]))


def test_a_program_is_read_only_where_it_is_trusted(
    exports: Mapping[str, Path], tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample inputs are a pickle, which torch's own reader loads."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # a log line of torch's is malformed
    path = tmp_path / "evil.pt2"
    with zipfile.ZipFile(exports["any"]) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            inputs = "data/sample_inputs/" in name
            new.writestr(name, saved(Payload(mark)) if inputs else old.read(name))
    text = refused(lambda: open_model(str(path)))
    assert "--trust" in text and "ONNX" in text
    assert not mark.exists()
    with contextlib.suppress(InputError):
        load_exported(path)
    mark.rmdir()  # what the sentence says is true


def test_programs_that_are_no_classifiers(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return x + z

    anything = {0: torch.export.Dim("n"), 1: torch.export.Dim("wide")}
    for k, (model, inputs, shapes, words) in enumerate(
        (
            (Two(), (batch(2, 3), batch(2, 3)), None, "takes 2 inputs"),
            (nn.ReLU(), (batch(2, 3, 3),), None, "no output of two dimensions"),
            (nn.ReLU(), (batch(2, 3),), (anything,), "only the batch dynamic"),
            (nn.Dropout(), (batch(2, 30),), None, "draws random numbers"),
        )
    ):
        path = tmp_path / f"{k}.pt2"
        torch.export.save(torch.export.export(model, inputs, dynamic_shapes=shapes), path)
        assert words in refused(lambda path=path: load_exported(path))


def test_files_that_are_no_programs(exports: Mapping[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    assert "No such file" in refused(lambda: load_exported(path))
    path.write_text("<html>")
    assert "torch.export.save" in refused(lambda: load_exported(path))
    path.write_bytes(exports["any"].read_bytes()[:-200])
    assert "torch.export.save" in refused(lambda: load_exported(path))


@pytest.mark.parametrize("least", [2, 3])
def test_a_batch_within_limits_takes_any(tmp_path: Path, least: int) -> None:
    size = torch.export.Dim("n", min=least, max=4)
    program = torch.export.export(small(), (batch(3),), dynamic_shapes=({0: size},))
    torch.export.save(program, tmp_path / "net.pt2")
    model = load_exported(tmp_path / "net.pt2")
    for n in (0, 1, 4, 9):
        torch.testing.assert_close(model(batch(n)), small()(batch(n)))


@pytest.mark.parametrize("name", ["any", "token"])
def test_a_copy_is_the_same_in_its_type(exports: Mapping[str, Path], name: str) -> None:
    model = load_exported(exports[name]).double().eval()
    copied = pickle.loads(pickle.dumps(model))
    x = batch(3, *model.shape).double()
    assert copied(x).dtype == torch.float64 and torch.equal(copied(x), model(x))
    assert copied.rows == model.rows and not copied.training


def test_conversions_do_not_hold_a_program_to_its_type(tmp_path: Path) -> None:
    class Converts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32).flatten(1)

    program = torch.export.export(Converts(), (batch(2),))
    torch.export.save(program, tmp_path / "net.pt2")
    x = batch(2).double()
    assert torch.equal(load_exported(tmp_path / "net.pt2")(x), x.float().flatten(1))


@pytest.mark.parametrize("name", ["any", "one"])
def test_certificates_read_programs(exports: Mapping[str, Path], name: str) -> None:
    x = batch(2)
    y = small()(x).argmax(1)
    expected, found = (
        ws.radii(model, x, y, norm=2, method="crown").values
        for model in (small(), load_exported(exports[name]))
    )
    torch.testing.assert_close(found, expected)


# ---- ONNX
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(torch.arange(12.0).reshape(4, 3).numpy(), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"])]
    sizes = ((name, [1, width]) for name, width in (("x", 4), ("z", 3)))
    x, z = (helper.make_tensor_value_info(name, kind, size) for name, size in sizes)
    graph = helper.make_graph(nodes, "g", [x], [z], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(tmp_path / "net.onnx"))
    return tmp_path / "net.onnx"


def test_onnx_is_checked_against_onnxruntime(onnx_file: Path) -> None:
    pytest.importorskip("onnxruntime")
    source = open_model(str(onnx_file), mean=0.5, std=2.0, trust=True)
    assert source.kind == "onnx" and source.info["check"]["agrees_within"] == 1e-4
    torch.testing.assert_close(
        source.model(batch(5, 4)), (batch(5, 4) - 0.5) / 2 @ torch.arange(12.0).reshape(4, 3)
    )
    json.dumps(source.info)


@pytest.mark.slow
def test_onnx_weights_are_not_taken_from_elsewhere(onnx_file: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "inside").mkdir()
    (tmp_path / "secret.bin").write_bytes(torch.arange(12.0).numpy().tobytes())
    model = onnx.load(str(onnx_file))
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    place = weight.external_data.add(key="location")
    for place.value in ("../secret.bin", str(tmp_path / "secret.bin")):
        (tmp_path / "inside" / "net.onnx").write_bytes(model.SerializeToString())
        refused(lambda: open_model(str(tmp_path / "inside" / "net.onnx")))
    place.value = "secret.bin"
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    assert open_model(str(tmp_path / "net.onnx")).model(batch(2, 4)).shape == (
        2,
        3,
    )  # beside the file is where they belong


class Runtime(types.ModuleType):
    """Stands in for onnxruntime: the answers of `x @ w`, off by a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__("onnxruntime")
        self.factor = factor

    SessionOptions = types.SimpleNamespace

    def InferenceSession(self, path: str, options: Any, providers: list[str]) -> Any:
        answer = torch.arange(12.0).reshape(4, 3) * self.factor
        image = types.SimpleNamespace(name="x", shape=[1, 4], type="tensor(float)")
        return types.SimpleNamespace(
            get_inputs=lambda: [image],
            run=lambda names, feed: [(torch.from_numpy(feed["x"]) @ answer).numpy()],
        )


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.0, "fine"), (1.001, "warned"), (1.1, "refused"), (float("nan"), "refused")],
)
def test_a_disagreement_with_onnxruntime(
    onnx_file: Path, monkeypatch: pytest.MonkeyPatch, factor: float, verdict: str
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", Runtime(factor))
    monkeypatch.setattr("wassail.zoo.difference.metadata.version", lambda name: "1.0")
    if verdict == "refused":
        assert "differ from onnxruntime's" in refused(
            lambda: open_model(str(onnx_file), trust=True)
        )
    elif verdict == "warned":
        with pytest.warns(ModelWarning, match="differ from onnxruntime's by 1.0e-03"):
            assert open_model(str(onnx_file), trust=True).info["check"]["agrees_within"] == 1e-2
    else:
        assert open_model(str(onnx_file), trust=True).info["check"]["agrees_within"] == 1e-4


def test_without_onnxruntime(onnx_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert open_model(str(onnx_file), trust=True).info["check"] == {"onnxruntime": "not installed"}


# ---- Other people's zoos: their loaders are replaced by ones that write down how they are called
# -------------------------


def test_robustbench(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_model(name: str, model_dir: str, dataset: str, threat_model: str) -> nn.Module:
        calls.append((name, model_dir, dataset, threat_model))
        model = small()
        state = torch.load(Path(model_dir, dataset, threat_model, f"{name}.pt"), weights_only=False)
        model.load_state_dict(state)
        return model.train()

    library = types.ModuleType("robustbench.utils")
    library.load_model = load_model
    monkeypatch.setitem(sys.modules, "robustbench", types.ModuleType("robustbench"))
    monkeypatch.setitem(sys.modules, "robustbench.utils", library)
    monkeypatch.setattr(
        "wassail.zoo.hubs.library_versions", lambda *names: dict.fromkeys(names, "1")
    )
    folder = tmp_path / "models" / "cifar100" / "L2"
    folder.mkdir(parents=True)
    torch.save(small(1).state_dict(), folder / "Net2024.pt")
    where: dict[str, Any] = {"models": tmp_path / "models", "dataset": "cifar100", "threat": "L2"}
    source = open_model("robustbench:Net2024", **where)
    assert calls == [("Net2024", str(tmp_path / "models"), "cifar100", "L2")]
    assert source.kind == "robustbench" and list(source.info["files"]) == ["Net2024.pt"]
    torch.testing.assert_close(
        source.model(batch(3)), small(1)(batch(3))
    )  # in eval mode whatever its loader does
    calls.clear()
    (folder / "Evil.pt").write_bytes(saved(Payload(mark)))
    assert "code in a file is never run" in refused(lambda: open_model("robustbench:Evil", **where))
    (folder / "Page.pt").write_text("<!DOCTYPE html>")
    assert "is a web page" in refused(lambda: open_model("robustbench:Page", **where))
    assert not calls  # nothing of this reached the other loader
    text = refused(lambda: open_model("robustbench:None2024", **where))
    assert f"put the file at {folder / 'None2024.pt'}" in text
    assert "did you mean 'cifar10'" in refused(
        lambda: open_model("robustbench:Net", dataset="cifar-10")
    )
    assert "unknown RobustBench threat model 'linf'" in refused(
        lambda: open_model("robustbench:Net", threat="linf")
    )
    refused(lambda: open_model("robustbench:../../etc/passwd"))


def test_without_robustbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "robustbench", None)
    path = tmp_path / "cifar10" / "Linf" / "Net.pt"
    text = refused(lambda: open_model("robustbench:Net", models=tmp_path))
    assert (
        f"{path} is not there" in text
        and "needs the package robustbench" in text
        and f"--weights {path}" in text
    )


def test_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def create_model(name: str, pretrained: bool) -> nn.Module:
        calls.append((name, pretrained, os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]))
        if pretrained and name != "cached":
            raise RuntimeError("no connection\nand a long trace")
        model: Any = small()
        model.pretrained_cfg = {
            "mean": (0.25,),
            "std": (0.5,),
            "input_size": (1, 8, 8),
            "crop_pct": 0.95,
        }
        return model

    timm = types.ModuleType("timm")
    timm.create_model = create_model
    timm.is_model = lambda name: name != "nett"
    timm.__version__ = "1"
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setattr(
        "wassail.zoo.hubs.library_versions", lambda *names: dict.fromkeys(names, "1")
    )
    source = open_model("timm:cached")
    torch.testing.assert_close(source.model(batch(3)), small()((batch(3) - 0.25) / 0.5))
    assert (
        source.kind == "timm"
        and source.info["mean"] == [0.25]
        and source.info["config"]["crop_pct"] == 0.95
    )
    json.dumps(source.info)
    torch.save(small(1).state_dict(), tmp_path / "w.pt")
    source = open_model("timm:net", weights=tmp_path / "w.pt", mean=0.0, std=1.0)
    torch.testing.assert_close(source.model(batch(3)), small(1)(batch(3)))
    assert calls == [("cached", True, "1"), ("net", False, "1")]
    assert "(no connection): give a local file with --weights" in refused(
        lambda: open_model("timm:net")
    )
    assert "knows no model 'nett'" in refused(lambda: open_model("timm:nett"))
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "install it with pip install timm" in refused(lambda: open_model("timm:net"))


class HuggingFaceNet(nn.Module):
    config = types.SimpleNamespace(id2label={1: "dog", 0: "cat"}, _commit_hash=None)

    def forward(self, x: Tensor) -> Any:
        return types.SimpleNamespace(loss=None, logits=x.flatten(1))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"image_mean": [0.25], "image_std": [0.5], "rescale_factor": 1 / 255},
            lambda x: (x - 0.25) / 0.5,
        ),
        ({"image_mean": [0.25], "image_std": [0.5], "do_normalize": False}, lambda x: x),
        (
            {
                "image_mean": 0.5,
                "image_std": 0.5,
                "rescale_factor": 1 / 127.5,
                "rescale_offset": True,
            },
            lambda x: (2 * x - 1.5) / 0.5,
        ),
        (
            {"image_mean": [100.0], "image_std": [50.0], "do_rescale": False},
            lambda x: (255 * x - 100) / 50,
        ),
    ],
)
def test_huggingface(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], expected: Callable[[Tensor], Tensor]
) -> None:
    transformers = types.ModuleType("transformers")
    base = types.ModuleType("transformers.image_processing_base")
    calls: list[Any] = []

    def from_pretrained(name: str, **options: Any) -> nn.Module:
        calls.append((name, options, os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]))
        return HuggingFaceNet()

    transformers.AutoModelForImageClassification = types.SimpleNamespace(
        from_pretrained=from_pretrained
    )
    base.ImageProcessingMixin = types.SimpleNamespace(
        get_image_processor_dict=lambda name: (config, {})
    )
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "transformers.image_processing_base", base)
    monkeypatch.setattr(
        "wassail.zoo.hubs.library_versions", lambda *names: dict.fromkeys(names, "1")
    )
    source = open_model("hf:people/net")
    assert calls == [
        ("people/net", {"trust_remote_code": False, "attn_implementation": "eager"}, "1")
    ]
    torch.testing.assert_close(
        source.model(batch(3)), expected(batch(3)).flatten(1), rtol=1e-5, atol=1e-5
    )
    assert source.kind == "huggingface" and source.info["classes"] == ["cat", "dog"]
    json.dumps(source.info)
    config["include_top"] = True
    assert "normalises twice" in refused(lambda: open_model("hf:people/net"))
    torch.testing.assert_close(
        open_model("hf:people/net", std=2.0).model(batch(3)), batch(3).flatten(1) / 2
    )


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "install it with pip install transformers" in refused(lambda: open_model("hf:net"))


# ---- The published networks
# ----------------------------------------------------------------------------------------------

WIDE = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
NARROW = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
RAW = (None, None)
# file: normalisation, data, images and the share of correct ones that the folder's README gives for
# them
PUBLISHED = {
    "cifar_vit_pgd_2_3_16": (WIDE, "cifar10", 10000, 59.78),
    "cifar_vit_ibp_3_3_8": (WIDE, "cifar10", 10000, 62.21),
    "cifar_sri_resnet_a": (WIDE, "cifar10", 1000, 79.9),
    "cifar_resnet_2b": (NARROW, "cifar10", 1000, 70.3),
    "mnist_fc_256x2": (RAW, "mnist", 1000, 97.8),
    "mnist_fc_256x4": (RAW, "mnist", 1000, 97.4),
    "mnist_fc_256x6": (RAW, "mnist", 1000, 96.5),
    "mnist_convnet_maxpool": (RAW, "mnist", 1000, 97.6),
    "mnist_convnet_avgpool": (RAW, "mnist", 1000, 97.4),
}


def correct(zoo: Any, file: str, n: int) -> int:
    pytest.importorskip("onnx")
    (mean, std), data, _, _ = PUBLISHED[file]
    model = open_model(
        str(zoo.HERE / "models" / f"{file}.onnx"), mean=mean, std=std, trust=True
    ).model
    samples = open_data(str(zoo.HERE / "data" / f"{data}_test.npz"), n)
    found = 0
    with torch.no_grad():
        for start in range(0, n, 250):
            x, y = samples.read(start, start + 250)
            found += int((model(x).argmax(1) == y).sum())
    return found


@pytest.mark.parametrize("file", ["cifar_sri_resnet_a", "mnist_fc_256x2", "mnist_convnet_maxpool"])
def test_published_network(zoo: Any, file: str) -> None:
    *_, n, accuracy = PUBLISHED[file]
    assert 100 * correct(zoo, file, n) / n == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("file", list(PUBLISHED))
def test_every_published_network(zoo: Any, file: str) -> None:
    *_, n, accuracy = PUBLISHED[file]
    assert 100 * correct(zoo, file, n) / n == pytest.approx(accuracy, abs=1e-9)


def test_a_factory_of_the_published_networks(zoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "real_zoo", zoo)
    source = open_model("real_zoo:load(mnist_mlp_toy20)")
    x, _ = zoo.images("mnist", 1000)
    assert torch.equal(source.model(x), zoo.load("mnist_mlp_toy20")[0](x))
    assert source.info["weights"] == fingerprint(zoo.load("mnist_mlp_toy20")[0])


def test_a_model_that_runs_only_without_its_gradient_is_refused_in_one_sentence() -> None:
    class Whole(torch.nn.Module):
        shape = (3,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                raise RuntimeError("Autograd not support dtype: Long")
            return x

    with pytest.raises(InputError, match=r"not with its gradient \(Autograd .* Long\): export"):
        forth_and_back(Whole())
