"""A network with the inequalities of a property behind it: one function to attack and to bound."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.executed import arithmetic_of
from wassail.errors import InputError
from wassail.vnnlib.clauses import Clause, Part, UnsafeSet
from wassail.vnnlib.reader import compressed, content
from wassail.vnnlib.runtime import outputs_of
from wassail.zoo.onnx import load_onnx

LARGEST = 1 << 31  # bytes of a network: what protobuf holds
ASKED = 8  # points given to onnxruntime in one call
CALLS = 16  # of onnxruntime for one property


class Network:
    """A model in float32 and float64, with the file it comes from, if it does.

    Args:
        model: a module, or an ONNX file (also `.gz`).
        property_: whose inputs and outputs it must have.
    """

    def __init__(self, model: nn.Module | str | Path, property_: UnsafeSet) -> None:
        self.property = property_
        self.file: Path | None = None
        self.calls = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if isinstance(model, nn.Module):
            own = model
            self.shape: tuple[int, ...] = tuple(getattr(model, "shape", (property_.inputs,)))
        elif isinstance(model, (str, Path)):
            own = self._loaded(Path(model))
        else:
            raise InputError("the model is no torch module and no ONNX file: give one of these.")
        self.own = copy.deepcopy(own).eval()
        self.wide = copy.deepcopy(own).double().eval()
        self._check()

    def _loaded(self, path: Path) -> nn.Module:
        """The module in a file, which is unpacked for onnxruntime."""
        self.file = path
        if compressed(path):
            data = content(path, LARGEST)
            self._folder = tempfile.TemporaryDirectory()
            self.file = Path(self._folder.name) / "network.onnx"
            self.file.write_bytes(data)
        try:
            model = load_onnx(self.file)
        except InputError as error:
            raise InputError(str(error).replace(str(self.file), str(path))) from None
        self.shape = tuple(model.shape)
        return model

    def close(self) -> None:
        """Remove the unpacked file."""
        if self._folder is not None:
            self._folder.cleanup()

    def _check(self) -> None:
        """Refuse a network that the property is not about."""
        count = torch.Size(self.shape).numel()
        if count != self.property.inputs:
            raise InputError(
                f"the network takes {count} numbers, the property has {self.property.inputs} "
                "inputs: give files that belong together."
            )
        with torch.no_grad():
            found = self.wide(torch.zeros(1, *self.shape, dtype=torch.float64))
        if found.shape != (1, self.property.outputs):
            raise InputError(
                f"the network gives outputs of shape {tuple(found.shape[1:])}, the property has "
                f"{self.property.outputs}: give files that belong together."
            )

    def counterexample(self, points: Tensor) -> tuple[Tensor, Tensor, tuple[str, ...]] | None:
        """The first of some points that is a counterexample in every arithmetic, with the outputs
        there and the arithmetics; None if none is.

        Args:
            points: float64 `(P, n)`, in the boxes.
        """
        # A point that float32 holds is the same one for every runtime.
        points = torch.cat([points.float().double(), points])[: 2 * CALLS * ASKED]
        shaped = points.reshape(-1, *self.shape)
        kind = next((p.dtype for p in self.own.parameters()), torch.float32)
        with torch.no_grad():
            wide = self.wide(shaped)
            own = self.own(shaped.to(kind)).double()
        good = self.property.violated(points, wide) & self.property.violated(points, own)
        names = ("float64", str(kind).removeprefix("torch."))
        for rows in torch.split(good.nonzero()[:, 0], ASKED):
            if not len(rows):
                break
            if self.calls == CALLS:  # it has contradicted every point so far
                return None
            third = None
            if self.file is not None:
                third = outputs_of(self.file, points[rows].tolist())
                self.calls += 1
            if third is None:
                return points[rows[0]], own[rows[0]], names
            runtime = torch.tensor(third, dtype=torch.float64)
            sure = self.property.violated(points[rows], runtime).nonzero()[:, 0]
            if len(sure):
                k = sure[0]
                return points[rows[k]], runtime[k], (*names, "onnxruntime")
        return None


class Unsafe(nn.Module):
    """`(0, -g_1, ..., -g_R)` at points of the free inputs; the inequalities of a clause hold where
    all its `g <= 0`.

    worst: one output for each clause instead, minus the largest `g` of the clause. A maximum is
    made of ReLUs, `max(a, b) = a + relu(b - a)`, and a slope below its kink is a combination of
    both inequalities: branching on neurons finds the multipliers of a clause by itself.
    """

    base: Tensor
    spread: Tensor
    rows: Tensor
    offsets: Tensor
    signs: Tensor

    def __init__(self, network: nn.Module, shape: tuple[int, ...], group: Group) -> None:
        super().__init__()
        self.network = network
        self.shape = shape
        self.whole = bool(group.free.all())
        self.count = len(group.clauses) if group.worst else 0
        rows, offsets = group.rows_and_offsets()
        if not self.count:  # with the signs in the rows
            rows, offsets = (torch.cat([v[:1] * 0, -v]) for v in (rows, offsets))
        self.register_buffer("base", torch.where(group.free, 0.0, group.parts[0].low))
        none = torch.zeros(0, 0, dtype=torch.float64)
        spread = none if self.whole else torch.eye(len(self.base)).double()[group.free]
        self.register_buffer("spread", spread)
        self.register_buffer("rows", rows)
        self.register_buffer("offsets", offsets)
        signs = torch.cat([torch.zeros(1, self.count), -torch.eye(self.count)])
        self.register_buffer("signs", signs.double())

    def forward(self, u: Tensor) -> Tensor:
        """Outputs at points of the free inputs, `(m, f) -> (m, 1 + R)`."""
        x = u if self.whole else u @ self.spread + self.base
        z = self.network(x.reshape(x.shape[0], *self.shape))
        over = F.linear(z, self.rows, -self.offsets)
        if not self.count:
            return over
        # The inequalities of all clauses, the first of each, then the second, ...: a power of 2.
        while over.shape[1] > self.count:
            half = over.shape[1] // 2
            over = torch.maximum(over[:, :half], over[:, half:])
        return F.linear(over, self.signs)


class Group:
    """The boxes that share their clauses, as functions of their free inputs.

    Args:
        network: the model.
        parts: the boxes.
        worst: see `Unsafe`.
    """

    def __init__(self, network: Network, parts: list[Part], worst: bool) -> None:
        self.parts = parts
        self.clauses: tuple[Clause, ...] = parts[0].clauses
        self.worst = worst
        low = torch.stack([part.low for part in parts])
        high = torch.stack([part.high for part in parts])
        self.free = (low < high).any(0) | (low != low[:1]).any(0)
        if not bool(self.free.any()):
            self.free[0] = True  # a single point
        self.low = low[:, self.free]
        self.high = high[:, self.free]
        self.module = Unsafe(network.wide, network.shape, self).eval()

    def rows_and_offsets(self) -> tuple[Tensor, Tensor]:
        """All inequalities; for `worst` as many for each clause, a power of 2, the last ones
        repeated.
        """
        if not self.worst:
            rows = torch.cat([clause.rows for clause in self.clauses])
            return rows, torch.cat([clause.offsets for clause in self.clauses])
        most = max(len(clause.offsets) for clause in self.clauses)
        most = 1 << (most - 1).bit_length()
        places = [
            (clause, min(m, len(clause.offsets) - 1))
            for m in range(most)
            for clause in self.clauses
        ]
        rows = torch.stack([clause.rows[m] for clause, m in places])
        return rows, torch.stack([clause.offsets[m] for clause, m in places])

    @property
    def places(self) -> list[list[int]]:
        """Of each clause, where its inequalities are among the outputs."""
        found: list[list[int]] = []
        start = 1
        for clause in self.clauses:
            found.append(list(range(start, start + len(clause.offsets))))
            start += len(clause.offsets)
        return found

    def graph(self) -> Graph:
        """The structure, for bounds on the function of real numbers."""
        shape = (int(self.free.sum()),)
        return arithmetic_of(read(self.module, shape, smooth=True), "exact", torch.float64)

    def full(self, points: Tensor) -> Tensor:
        """Points of the free inputs as points of all inputs, exactly."""
        found = self.parts[0].low.repeat(len(points), 1)
        found[:, self.free] = points
        return found
