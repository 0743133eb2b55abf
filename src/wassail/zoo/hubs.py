"""Models of RobustBench, timm and Hugging Face."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from wassail.errors import InputError, unknown
from wassail.zoo.source import first_line
from wassail.zoo.weights import fill, load_tensors, refuse_html, sha256, weights_only

_BOARDS = ("cifar10", "cifar100", "imagenet")
_THREATS = ("Linf", "L2", "corruptions")


def open_robustbench(
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
                f"({first_line(error)}): put the file at {path}."
            ) from error
        raise InputError(
            f"RobustBench could not load {str(path)!r}: {first_line(error)}; download it again."
        ) from error
    files = files or ([path] if path.is_file() else sorted(path.parent.glob(f"{path.name}_m*.pt")))
    info = {
        **files_of(*files),
        "versions": library_versions("robustbench", "timm"),
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
            f"{str(path)!r} holds more than tensors ({first_line(error)}): code in a file is never "
            "run, so download it again."
        ) from None


def open_timm(
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
            f"timm could not load pretrained weights for {rest!r} ({first_line(error)}): give a "
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
        **(files_of(weights) if weights is not None else {"files": {}}),
        "versions": library_versions("timm"),
        "config": shown,
    }
    return model, "timm", info, mean, std


def open_huggingface(
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
            f"transformers could not load the image classifier {rest!r} ({first_line(error)}): "
            "give a local folder that save_pretrained wrote, or a name that is in the cache or can "
            "be downloaded."
        ) from error
    if mean is None and std is None:
        mean, std = _processor(name, rest)
    folder = Path(rest)
    files = [*folder.glob("*.safetensors"), *folder.glob("*config.json")] if folder.is_dir() else []
    classes = getattr(model.config, "id2label", None) or {}
    info = {
        **files_of(*sorted(files)),
        "versions": library_versions("transformers"),
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
            f"{name!r} has no preprocessor_config.json ({first_line(error)}): give --mean and "
            "--std (0 and 1 for none)."
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


def _library(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as error:  # a broken library of theirs raises more than ImportError
        raise InputError(
            f"{name!r} needs the package {package} ({first_line(error)}): install it with pip "
            f"install {package}."
        ) from error


def no_weights(name: str, weights: str | Path | None) -> None:
    """Refuse weights for a model that brings its own."""
    if weights is not None:
        raise InputError(f"{name!r} brings its own weights: leave out --weights {str(weights)!r}.")


def files_of(*paths: str | Path) -> dict[str, Any]:
    """The files by name with their SHA-256; names only, as folders differ between machines."""
    return {"files": {Path(path).name: sha256(path) for path in paths}}


def library_versions(*packages: str) -> dict[str, str]:
    """The versions of these packages."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # A library that was put on the path without its metadata.
            found[package] = str(
                getattr(importlib.import_module(package), "__version__", "unknown")
            )
    return found
