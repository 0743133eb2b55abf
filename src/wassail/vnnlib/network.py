"""A network of properties: in two arithmetics, and in that of the file it comes from."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from wassail.certificates.graph.graph import Graph
from wassail.errors import InputError
from wassail.vnnlib.clauses import UnsafeSet
from wassail.vnnlib.reader import compressed, content
from wassail.zoo.onnx import load_onnx
from wassail.zoo.runtime import Runtime

LARGEST = 1 << 31  # bytes of a network: what protobuf holds
ASKED = 8  # points given to onnxruntime in one call
CALLS = 16  # of onnxruntime for one property


class Network:
    """A model in its own arithmetic and in float64, with the file it comes from, if it does.

    It serves any number of properties, one after the other; `graphs` keeps the structures that
    were read for them.

    Args:
        model: a module, or an ONNX file (also `.gz`).
        inputs: how many numbers a module takes that does not say its shape.
    """

    def __init__(self, model: nn.Module | str | Path, inputs: int = 0) -> None:
        self.graphs: dict[tuple[object, ...], Graph] = {}
        self.shape: tuple[int, ...] = (inputs,)
        self.runtime: Runtime | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if isinstance(model, nn.Module):
            own = model
            self.shape = tuple(getattr(model, "shape", self.shape))
        elif isinstance(model, (str, Path)):
            own = self._loaded(Path(model))
        else:
            raise InputError("the model is no torch module and no ONNX file: give one of these.")
        self.own = copy.deepcopy(own).eval()
        self.wide = copy.deepcopy(own).double().eval()

    def _loaded(self, path: Path) -> nn.Module:
        """The module in a file, which is unpacked for onnxruntime."""
        file = path
        if compressed(path):
            data = content(path, LARGEST)
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "network.onnx"
            file.write_bytes(data)
        self.runtime = Runtime(file)
        try:
            model = load_onnx(file)
        except InputError as error:
            self.close()
            raise InputError(str(error).replace(str(file), str(path))) from None
        self.shape = tuple(model.shape)
        return model

    def close(self) -> None:
        """End what runs beside it, and remove the unpacked file."""
        if self.runtime is not None:
            self.runtime.close()
        if self._folder is not None:
            self._folder.cleanup()

    def check(self, property_: UnsafeSet) -> None:
        """Refuse a property that is not about this network.

        property_: with its inputs and outputs.
        """
        count = torch.Size(self.shape).numel()
        if count != property_.inputs:
            raise InputError(
                f"the network takes {count} numbers, the property has {property_.inputs} "
                "inputs: give files that belong together."
            )
        with torch.no_grad():
            found = self.wide(torch.zeros(1, *self.shape, dtype=torch.float64))
        if found.shape != (1, property_.outputs):
            raise InputError(
                f"the network gives outputs of shape {tuple(found.shape[1:])}, the property has "
                f"{property_.outputs}: give files that belong together."
            )


class Judge:
    """Says which points are counterexamples, in every arithmetic that there is.

    Args:
        network: the model.
        property_: what they are counterexamples of.
    """

    def __init__(self, network: Network, property_: UnsafeSet) -> None:
        self.network = network
        self.property = property_
        self.calls = 0

    def first(self, points: Tensor) -> tuple[Tensor, Tensor, tuple[str, ...]] | None:
        """The first of some points that is a counterexample in every arithmetic, with the outputs
        there and the arithmetics; None if none is.

        points: float64 `(P, n)`, in the boxes.
        """
        # A point that float32 holds is the same one for every runtime.
        points = torch.cat([points.float().double(), points])[: 2 * CALLS * ASKED]
        shaped = points.reshape(-1, *self.network.shape)
        kind = next((p.dtype for p in self.network.own.parameters()), torch.float32)
        with torch.no_grad():
            wide = self.network.wide(shaped)
            own = self.network.own(shaped.to(kind)).double()
        good = self.property.violated(points, wide) & self.property.violated(points, own)
        names = ("float64", str(kind).removeprefix("torch."))
        for rows in torch.split(good.nonzero()[:, 0], ASKED):
            if not len(rows):
                break
            if self.calls == CALLS:  # it has contradicted every point so far
                return None
            third = None
            if self.network.runtime is not None:
                third = self.network.runtime.outputs(points[rows].tolist())
                self.calls += 1
            if third is None:
                return points[rows[0]], own[rows[0]], names
            runtime = torch.tensor(third, dtype=torch.float64)
            sure = self.property.violated(points[rows], runtime).nonzero()[:, 0]
            if len(sure):
                k = sure[0]
                return points[rows[k]], runtime[k], (*names, "onnxruntime")
        return None
