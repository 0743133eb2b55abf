"""A model from anywhere: one name in, one eval-mode classifier out that takes samples in the box
and returns logits.

>>> from wassail.zoo.models import open_model
>>> source = open_model("digits-cnn-adv")
>>> source.kind
'builtin'

Names are those of the command line: a built-in name, an `.onnx` or `.pt2` file, `module:factory` or
`module:factory(word)`, `robustbench:NAME`, `timm:NAME`, `hf:NAME`. Normalisation belongs inside the
model, so that every budget is in units of the samples: `mean` and `std` put it there. No file that
is opened here can run code.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wassail.errors import InputError, ModelWarning, unknown
from wassail.network import Model
from wassail.zoo import MODELS, factory, load, weight_file
from wassail.zoo.weights import (
    fill,
    fingerprint,
    load_tensors,
    refuse_html,
    regular,
    sha256,
    weights_only,
)

__all__ = ["KINDS", "Logits", "Normalized", "Source", "open_model"]

KINDS = ("builtin", "factory", "pt2", "onnx", "robustbench", "timm", "huggingface", "module")
_PREFIXES = ("robustbench", "timm", "hf", "huggingface")
_BOARDS = ("cifar10", "cifar100", "imagenet")
_THREATS = ("Linf", "L2", "corruptions")
# agreement with onnxruntime, relative to the largest logit: fine below, refused above
_CLOSE = 1e-4
_FAR = 1e-2


@dataclass(frozen=True, eq=False)
class Source:
    """A model, and where it came from.

    model: eval mode, normalisation inside, a batch `(n, *shape)` in the box -> logits `(n, K)`;
    name: what the person typed; kind: one of `KINDS`; info: what a run records, ready for JSON:
    files with their SHA-256, the weights' own, mean, std, versions of the libraries that loaded it.
    """

    model: Model
    name: str
    kind: str
    info: Mapping[str, Any]


class Normalized(nn.Module):
    """`model((x - mean) / std)`: a classifier that was trained on normalised samples, for samples
    in the box.

    mean, std: a number, or one for each channel (the first axis of a sample).
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, model: Model, mean: float | Sequence[float], std: float | Sequence[float]
    ) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", _statistic("mean", mean))
        self.register_buffer("std", _statistic("std", std))
        if self.mean.ndim and self.std.ndim and len(self.mean) != len(self.std):
            raise InputError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}: give one for each "
                "channel."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of samples in the box, `(n, C, ...) -> (n, K)`."""
        return self.model((x - self._shaped(self.mean, x)) / self._shaped(self.std, x))

    def _shaped(self, statistic: Tensor, x: Tensor) -> Tensor:
        if not statistic.ndim:
            return statistic
        if x.ndim < 2 or x.shape[1] != len(
            statistic
        ):  # broadcasting would make three channels out of one
            raise InputError(
                f"mean and std have {len(statistic)} numbers but the samples have shape "
                f"{tuple(x.shape[1:])}: "
                "give one number, or one for each channel."
            )
        return statistic.reshape(-1, *[1] * (x.ndim - 2))


class Logits(nn.Module):
    """The logits out of a model that returns more: the attribute or key of that name, or the
    entry at that place.
    """

    def __init__(self, model: Model, key: str | int = "logits") -> None:
        super().__init__()
        self.model = model
        self.key = key

    def forward(self, x: Tensor) -> Tensor:
        """`(n, *shape) -> (n, K)`."""
        z: Any = self.model(x)
        try:
            if isinstance(self.key, int) or (isinstance(z, Mapping) and self.key in z):
                found = z[self.key]
            else:
                found = getattr(z, self.key)
        except (AttributeError, KeyError, IndexError, TypeError):
            has = f" with {', '.join(map(str, z))}" if isinstance(z, Mapping) else ""
            raise InputError(
                f"the model returns a {type(z).__name__}{has}, which has no {self.key!r}: name "
                "its logits."
            ) from None
        return found  # type: ignore[no-any-return]


def open_model(
    name: str,
    *,
    weights: str | Path | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    logits: str | int | None = None,
    models: str | Path = "models",
    dataset: str = "cifar10",
    threat: str = "Linf",
    trust: bool = False,
) -> Source:
    """The model of that name, in eval mode.

    name: see the top of this page. weights: a `.safetensors` or `.pt` state dict for a built-in
    network, a factory or a timm model. mean, std: normalisation `(x - mean) / std` to put inside;
    for timm and Hugging Face models in place of their own. logits: the key, attribute or place of
    the logits in what the model returns, if that is not a tensor (Hugging Face models need none).
    models, dataset, threat: RobustBench's folder, data set and threat model, as its `load_model`
    takes them: checkpoints are looked for at `<models>/<dataset>/<threat>/<NAME>.pt`. trust:
    whether an `.onnx` or `.pt2` file is read without a first pass in a process of its own (see
    `wassail.zoo.trial`); only files of your own making deserve it.
    """
    if isinstance(logits, str) and logits.isdigit():  # as a command line has it
        logits = int(logits)
    model: Model
    prefix, _, rest = name.partition(":")
    if prefix in _PREFIXES and rest:
        if prefix == "robustbench":
            _no_weights(name, weights)
            model, kind, info = _robustbench(name, rest, Path(models), dataset, threat)
        elif prefix == "timm":
            model, kind, info, mean, std = _timm(name, rest, weights, mean, std)
        else:
            _no_weights(name, weights)
            model, kind, info, mean, std = _huggingface(name, rest, mean, std)
            logits = "logits" if logits is None else logits
    elif name.endswith((".onnx", ".pt2")):
        _no_weights(name, weights)
        model, kind, info = _onnx(name, trust) if name.endswith(".onnx") else _exported(name, trust)
    elif name in MODELS or not factory.is_call(name):
        model, kind, info = _builtin(name, weights)
    else:
        model, kind, info = _factory(name, weights)
    if logits is not None:
        model, info["logits"] = Logits(model, logits), logits
    if mean is not None or std is not None:
        mean = 0.0 if mean is None else mean
        std = 1.0 if std is None else std
        model = Normalized(model, mean, std)
        info["mean"], info["std"] = (
            float(s) if isinstance(s, (int, float)) else [float(v) for v in s] for s in (mean, std)
        )
    if isinstance(model, nn.Module):
        model = model.eval().requires_grad_(False)
    return Source(model, name, kind, {**info, "weights": fingerprint(model)})


# ---- One function for each kind
# ------------------------------------------------------------------------------------------


def _builtin(name: str, weights: str | Path | None) -> tuple[nn.Module, str, dict[str, Any]]:
    if name not in MODELS:
        if name.endswith((".pt", ".pth", ".safetensors", ".bin", ".ckpt")):
            raise InputError(
                f"{name!r} holds weights but no architecture: give the network as module:factory "
                f"and add --weights {name}."
            )
        raise unknown(
            "model",
            name,
            [*MODELS, "module:factory", *(f"{p}:NAME" for p in _PREFIXES[:3]), "*.onnx", "*.pt2"],
        )
    model = load(name)
    if weights is not None:
        fill(model, weights, name)
    return model, "builtin", _files(weight_file(name) if weights is None else weights)


def _factory(name: str, weights: str | Path | None) -> tuple[Model, str, dict[str, Any]]:
    made = factory.call(name, "model")
    model = made.value[0] if isinstance(made.value, tuple) and made.value else made.value
    if not callable(model):
        raise InputError(
            f"{name!r} returned a {type(made.value).__name__}: it must return the model, or a "
            "tuple that starts with it."
        )
    if weights is not None:
        fill(model, weights, name)
    return model, "factory", _files(*(path for path in (made.file, weights) if path is not None))


def _exported(name: str, trust: bool) -> tuple[nn.Module, str, dict[str, Any]]:
    from wassail.zoo.exported import load_exported

    _tried(name, "pt2", trust)
    model = load_exported(name)
    return (
        model,
        "pt2",
        {
            **_files(name),
            "batch": model.batch or "any",
            "versions": {"torch at export": model.version},
        },
    )


def _onnx(name: str, trust: bool) -> tuple[nn.Module, str, dict[str, Any]]:
    from wassail.zoo.onnx import load_onnx

    found = _tried(name, "onnx", trust)
    model = load_onnx(name)
    if trust:
        found = runtime_difference(name, model)
    return (
        model,
        "onnx",
        {**_files(name), "versions": _versions("onnx"), "check": _verdict(name, found)},
    )


def _tried(name: str, kind: str, trust: bool) -> Mapping[str, Any]:
    """What a first pass over the file in a process of its own found; nothing where the file is
    trusted.
    """
    regular(name, "a model")
    if trust:
        return {}
    from wassail.zoo.trial import attempt

    return attempt(name, kind, sha256(name))


def forth_and_back(model: Any) -> None:
    """Run a model from a file on two samples, with the gradient: what attacks will do."""
    x = torch.full((2, *model.shape), 0.5, dtype=getattr(model, "kind", torch.float32))
    if x.is_floating_point():
        logits = model(x.requires_grad_())
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), x, allow_unused=True)


def import_onnx() -> None:
    """Load the libraries that read ONNX files, those that are there."""
    for library in ("onnx", "onnx.numpy_helper", "onnxruntime"):
        with contextlib.suppress(ImportError):
            importlib.import_module(library)


def runtime_difference(name: str, model: Any) -> dict[str, Any]:
    """Compare with onnxruntime on four random samples, if it is installed: an independent reading
    of the same file.

    Returns:
        Its version and the largest difference of the logits relative to the largest, or why there
        is none.
    """
    try:
        runtime: Any = importlib.import_module("onnxruntime")
    except ImportError:
        return {"onnxruntime": "not installed"}
    version = {"onnxruntime": metadata.version("onnxruntime")}
    x = torch.rand(4, *model.shape, generator=torch.Generator().manual_seed(0))
    try:
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = runtime.InferenceSession(str(name), options, providers=["CPUExecutionProvider"])
        shape = [
            size if isinstance(size, int) and size > 0 else 1
            for size in session.get_inputs()[0].shape
        ]
        feed = [{session.get_inputs()[0].name: row.reshape(shape).numpy()} for row in x]
        expected = torch.cat(
            [torch.from_numpy(session.run([model.logits], row)[0]) for row in feed]
        ).double()
    # its errors have no common class; a file that it cannot run is no error of the model's
    except Exception as error:
        return {
            **version,
            "result": f"could not run the file: {(str(error).splitlines() or [''])[0][:200]}",
        }
    with torch.no_grad():
        found = model(x).double()
    if found.shape != expected.shape:
        return {**version, "difference": math.inf}
    return {
        **version,
        "difference": float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)),
    }


def _verdict(name: str, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is recorded about the comparison; a model that is misread is refused."""
    known = {key: str(found[key]) for key in ("onnxruntime", "result") if key in found}
    if "difference" not in found:
        return known
    difference = float(found["difference"])
    if not difference <= _FAR:
        raise InputError(
            f"{name!r} gives logits that differ from onnxruntime's by {difference:.1e} of the "
            "largest: "
            "this loader misreads the file, so export the model with other operators and report it."
        )
    if difference > _CLOSE:
        warnings.warn(
            f"{name!r} gives logits that differ from onnxruntime's by {difference:.1e} of the "
            "largest.",
            ModelWarning,
            stacklevel=2,
        )
    return {**known, "agrees_within": _CLOSE if difference <= _CLOSE else _FAR}


def _robustbench(
    name: str, rest: str, models: Path, dataset: str, threat: str
) -> tuple[nn.Module, str, dict[str, Any]]:
    """RobustBench's own loader, which builds the architecture; the checkpoint is looked at
    before it may touch it.
    """
    if dataset not in _BOARDS:
        raise unknown("RobustBench data set", dataset, _BOARDS)
    if threat not in _THREATS:
        raise unknown("RobustBench threat model", threat, _THREATS)
    if "/" in rest or "\\" in rest:
        raise InputError(f"unknown model {name!r}: RobustBench names are like Sehwag2021Proxy_R18.")
    path = models / dataset / threat / f"{rest}.pt"
    parts = sorted(path.parent.glob(f"{path.name}_m*.pt"))  # ensembles
    files = [path] if path.is_file() else parts
    for file in files:
        _safe_checkpoint(file)
    try:
        library: Any = importlib.import_module("robustbench.utils")
    except Exception as error:  # a broken library of theirs raises more than ImportError
        missing = "" if files else f" and {path} is not there"
        raise InputError(
            f"{name!r} needs the package robustbench for its architecture{missing}: install it "
            "and put the checkpoint at "
            f"{path}, or give the architecture as module:factory with --weights {path}."
        ) from error
    try:
        with weights_only():
            model = library.load_model(
                rest, model_dir=str(models), dataset=dataset, threat_model=threat
            )
    except KeyError:
        raise InputError(
            f"RobustBench knows no model {rest!r} for {dataset} and {threat}: see its leaderboard."
        ) from None
    except Exception as error:  # no network, a quota page, a checkpoint of another version
        if not files:
            if path.is_file():  # what came down
                refuse_html(path)
            raise InputError(
                f"the checkpoint of {name!r} is missing and could not be downloaded "
                f"({_first(error)}): put the file at {path}."
            ) from error
        raise InputError(
            f"RobustBench could not load {str(path)!r}: {_first(error)}; download it again."
        ) from error
    files = files or ([path] if path.is_file() else sorted(path.parent.glob(f"{path.name}_m*.pt")))
    info = {
        **_files(*files),
        "versions": _versions("robustbench", "timm"),
        "dataset": dataset,
        "threat": threat,
    }
    return model, "robustbench", info


def _safe_checkpoint(path: Path) -> None:
    """Raise unless torch's restricted unpickler can read the file: the loader of another
    library will read it next.
    """
    refuse_html(path)
    try:
        load_tensors(path)
    except Exception as error:
        raise InputError(
            f"{str(path)!r} holds more than tensors ({_first(error)}): code in a file is never "
            "run, so download it again."
        ) from None


def _timm(
    name: str, rest: str, weights: str | Path | None, mean: Any, std: Any
) -> tuple[nn.Module, str, dict[str, Any], Any, Any]:
    """A network of timm's with pretrained weights (a local file, its cache or its download) and
    its own normalisation.
    """
    timm: Any = _library("timm", name)
    try:
        with weights_only():
            model: nn.Module = timm.create_model(rest, pretrained=weights is None)
    except Exception as error:
        if hasattr(timm, "is_model") and not timm.is_model(rest):
            raise InputError(
                f"timm {timm.__version__} knows no model {rest!r}: see timm.list_models()."
            ) from None
        raise InputError(
            f"timm could not load pretrained weights for {rest!r} ({_first(error)}): give a "
            "local file with --weights."
        ) from error
    if weights is not None:
        fill(model, weights, name)
    config: Mapping[str, Any] = (
        getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    )
    if mean is None and std is None:
        mean = config.get("mean")
        std = config.get("std")
        if mean is None or std is None:
            raise InputError(
                f"timm says nothing about the normalisation of {rest!r}: give --mean and --std "
                "(0 and 1 for none)."
            )
    shown = {
        key: config[key]
        for key in ("input_size", "interpolation", "crop_pct", "tag", "hf_hub_id")
        if config.get(key)
    }
    info = {
        **(_files(weights) if weights is not None else {"files": {}}),
        "versions": _versions("timm"),
        "config": shown,
    }
    return model, "timm", info, mean, std


def _huggingface(
    name: str, rest: str, mean: Any, std: Any
) -> tuple[nn.Module, str, dict[str, Any], Any, Any]:
    """A Hugging Face image classifier from a local folder or the cache; the normalisation of
    its image processor.
    """
    transformers: Any = _library("transformers", name)
    try:
        with weights_only():
            model = transformers.AutoModelForImageClassification.from_pretrained(
                rest, trust_remote_code=False, attn_implementation="eager"
            )
    except Exception as error:
        raise InputError(
            f"transformers could not load the image classifier {rest!r} ({_first(error)}): give "
            "a local folder that "
            "save_pretrained wrote, or a name that is in the cache or can be downloaded."
        ) from error
    if mean is None and std is None:
        mean, std = _processor(name, rest)
    folder = Path(rest)
    files = [*folder.glob("*.safetensors"), *folder.glob("*config.json")] if folder.is_dir() else []
    classes = getattr(model.config, "id2label", None) or {}
    info = {
        **_files(*sorted(files)),
        "versions": _versions("transformers"),
        "classes": [str(classes[k]) for k in sorted(classes)],
    }
    commit = getattr(model.config, "_commit_hash", None)
    return model, "huggingface", {**info, **({"commit": commit} if commit else {})}, mean, std


def _processor(name: str, rest: str) -> tuple[Any, Any]:
    """Mean and std for samples in [0, 1] that do what the image processor does to 8-bit images."""
    base: Any = importlib.import_module("transformers.image_processing_base")
    try:
        config, _ = base.ImageProcessingMixin.get_image_processor_dict(rest)
    except Exception as error:
        raise InputError(
            f"{name!r} has no preprocessor_config.json ({_first(error)}): give --mean and --std "
            "(0 and 1 for none)."
        ) from error
    if config.get("include_top"):  # EfficientNet's processor divides by the deviation twice
        raise InputError(
            f"the image processor of {name!r} normalises twice (include_top): give --mean and "
            "--std."
        )
    # The processor computes (r * 255 x - offset - mean) / std.
    scale = (
        255.0 * float(config.get("rescale_factor", 1 / 255))
        if config.get("do_rescale", True)
        else 255.0
    )
    offset = 1.0 if config.get("rescale_offset") else 0.0
    normal = config.get("do_normalize", "image_mean" in config)
    mean, std = (config.get("image_mean"), config.get("image_std")) if normal else (0.0, 1.0)
    if mean is None or std is None:
        raise InputError(
            f"the image processor of {name!r} does not say its mean and std: give --mean and --std."
        )
    means, stds = ([v] if isinstance(v, (int, float)) else list(v) for v in (mean, std))
    if abs(scale - 1) < 1e-6:
        scale = 1.0
    return [(m + offset) / scale for m in means], [s / scale for s in stds]


# ---- Small things
# --------------------------------------------------------------------------------------------------


def _library(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as error:  # a broken library of theirs raises more than ImportError
        raise InputError(
            f"{name!r} needs the package {package} ({_first(error)}): install it with pip "
            f"install {package}."
        ) from error


def _no_weights(name: str, weights: str | Path | None) -> None:
    if weights is not None:
        raise InputError(f"{name!r} brings its own weights: leave out --weights {str(weights)!r}.")


def _files(*paths: str | Path) -> dict[str, Any]:
    """The files by name with their SHA-256; names only, as folders differ between machines."""
    return {"files": {Path(path).name: sha256(path) for path in paths}}


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except (
            metadata.PackageNotFoundError
        ):  # a library that was put on the path without its metadata
            found[package] = str(
                getattr(importlib.import_module(package), "__version__", "unknown")
            )
    return found


def _first(error: BaseException) -> str:
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."


def _statistic(what: str, values: float | Sequence[float]) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float32).detach().clone()
    if tensor.ndim == 1 and len(tensor) == 1:
        tensor = tensor[0]
    if (
        tensor.ndim > 1
        or not tensor.numel()
        or not torch.isfinite(tensor).all()
        or (what == "std" and not (tensor > 0).all())
    ):
        raise InputError(
            f"{what} is {tensor.tolist()}: give finite "
            f"numbers{', all positive' if what == 'std' else ''}."
        )
    return tensor
