"""A model beside onnxruntime, and forwards and backwards."""

from __future__ import annotations

import contextlib
import importlib
import math
from importlib import metadata
from typing import Any

import torch

from wassail.errors import InputError
from wassail.zoo.runtime import evaluator

# agreement with onnxruntime, relative to the largest logit: fine below, refused above
CLOSE = 1e-4
FAR = 1e-2


def forth_and_back(model: Any) -> None:
    """Run a model from a file on two samples, with the gradient: what attacks will do."""
    x = torch.full((2, *model.shape), 0.5, dtype=getattr(model, "kind", torch.float32))
    if not x.is_floating_point():
        return
    try:
        logits = model(x.requires_grad_())
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), x, allow_unused=True)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise InputError(
            f"the model runs, but not with its gradient ({reason}): export it again."
        ) from None


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
        importlib.import_module("onnxruntime")
    except ImportError:
        return {"onnxruntime": "not installed"}
    version = {"onnxruntime": metadata.version("onnxruntime")}
    x = torch.rand(4, *model.shape, generator=torch.Generator().manual_seed(0))
    try:
        outputs = evaluator(str(name), [model.logits])
        expected = torch.cat([torch.from_numpy(outputs(row)) for row in x.numpy()])
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
