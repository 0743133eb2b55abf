"""Classifiers exported with `torch.export.save`, read by `torch.export.load`.

>>> from wassail.zoo.exported import load_exported
>>> model = load_exported("network.pt2")  # doctest: +SKIP

`torch.export.load` runs code out of its file: it unpickles sample inputs and constants, and
evaluates the sizes that are written there. So `open_model` asks for `trust=True` (`--trust`) before
it calls this reader. ONNX is the format for files of others.

Exports have a batch of any size or of one that is fixed. A fixed batch of one takes more rows
through `torch.vmap`, where that gives the logits of the rows alone; else the rows run in groups of
the size that the export has.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from wassail.errors import InputError, reason_of
from wassail.zoo.weights import regular

__all__ = ["ExportedClassifier", "load_exported"]

ANY = 1 << 30  # rows: the largest batch of a program that sets no limit


def load_exported(path: str | Path) -> ExportedClassifier:
    """The classifier in a `.pt2` file of your own: a batch `(n, *shape)` of any size -> logits
    `(n, K)`.

    This runs code that the file holds. The graph must have one tensor as its input; the logits are
    its first output of two dimensions. Weights ask for no gradient.
    """
    path = Path(path)
    regular(path, "a model")
    try:
        return ExportedClassifier(path.read_bytes())
    except InputError as error:
        raise InputError(f"{str(path)!r} {error}") from None
    except Exception as error:  # torch's reader raises whatever a damaged file makes of it
        raise InputError(
            f"cannot read {str(path)!r}: {reason_of(error)}; write it with torch.export.save."
        ) from error


class ExportedClassifier(nn.Module):
    """The program of a `.pt2` file, `(n, *shape) -> (n, K)`.

    shape: of one sample; kind: its type of numbers; batch: the size the export was fixed to, None
    if it takes any; rows: how other sizes are run, "together", "vmap" or "in groups".

    Args:
        data: the bytes of the file. They are kept, because a copy is made by reading them again:
            the modules of torch.export cannot be pickled.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data
        program = torch.export.load(io.BytesIO(data))
        self.place = _logits(program)
        self.least, self.most, self.shape, self.kind = _sizes(program)
        self.batch = self.least if self.least == self.most else None
        self.program: Any = program.module()
        for node in list(self.program.graph.nodes):  # they hold for the export's type and device
            if "_assert_tensor_metadata" in str(node.target):
                self.program.graph.erase_node(node)
        self.program.recompile()
        self.requires_grad_(False)
        self.rows = "together" if self.batch is None else "in groups"
        self._try_out()

    def __reduce__(self) -> Any:
        like = next((p for p in self.parameters() if p.is_floating_point()), None)
        return _restore, (self.data, None if like is None else like.detach().flatten()[:0].clone())

    def train(self, mode: bool = True) -> ExportedClassifier:
        """Nothing to change: a program is exported for one mode."""
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the samples, `(n, *shape) -> (n, K)`."""
        # With the batch written out: half a sample must not pass for one.
        x = x.reshape(x.shape[0], *self.shape)
        if self.rows == "vmap" and len(x) not in (0, 1):
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
                logits: Tensor = torch.vmap(lambda row: self._run(row[None])[0])(x)
            return logits
        if self.least <= len(x) <= self.most:
            return self._run(x)
        # The last group is filled up with rows that are cut off again.
        groups = [self._run(_filled(part, self.least)) for part in torch.split(x, self.most)]
        return torch.cat(groups)[: len(x)]

    def _run(self, x: Tensor) -> Tensor:
        # A program may write into its argument, as nn.ReLU(inplace=True) does.
        logits: Tensor = tree_leaves(self.program(x.clone()))[self.place]
        return logits

    @torch.no_grad()
    def _try_out(self) -> None:
        """Run it, and find out whether a batch of one can go through vmap."""
        draw = torch.Generator().manual_seed(0)
        x = torch.rand(5, *self.shape, generator=draw).to(self.kind)
        held = {name: value.clone() for name, value in self.program.state_dict().items()}
        alone = self(x)
        if not torch.equal(alone, self(x)):
            raise InputError("draws random numbers: export the model in eval mode.")
        if not all(torch.equal(held[k], v) for k, v in self.program.state_dict().items()):
            raise InputError("changes its own weights: export the model in eval mode.")
        if self.batch != 1:
            return
        self.rows = "vmap"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it would be as slow as groups
                found = self(x)
        except Exception:  # an operator without a rule for vmap
            self.rows = "in groups"
            return
        if not (found - alone).abs().max() <= 1e-4 * alone.abs().max():
            self.rows = "in groups"


def _restore(data: bytes, like: Tensor | None) -> ExportedClassifier:
    """A copy of a classifier, on the device and in the type of another tensor."""
    model = ExportedClassifier(data).eval()
    return model if like is None else model.to(like)


def _filled(x: Tensor, least: int) -> Tensor:
    """A batch with rows of zeros at its end, so that it has `least` of them."""
    return torch.cat([x, x.new_zeros(max(least - len(x), 0), *x.shape[1:])])


def _logits(program: Any) -> int:
    """The place of the first output of two dimensions."""
    specs = program.graph_signature.output_specs
    changed = [spec.kind.name.lower() for spec in specs if spec.kind is not OutputKind.USER_OUTPUT]
    if changed:
        raise InputError(f"changes its own weights ({changed[0]}): export the model in eval mode.")
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    outputs = [values.get(getattr(spec.arg, "name", None)) for spec in specs]
    for place, value in enumerate(outputs):
        if isinstance(value, Tensor) and value.ndim == 2:
            return place
    raise InputError(
        "has no output of two dimensions: a classifier's logits have shape (N, classes)."
    )


def _sizes(program: Any) -> tuple[int, int, tuple[int, ...], torch.dtype]:
    """The least and the largest batch, the shape of a sample and its type of numbers."""
    specs = program.graph_signature.input_specs
    names = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    values = [node.meta.get("val") for node in program.graph.nodes if node.name in names]
    if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].ndim < 2:
        raise InputError(f"takes {len(names)} inputs: export a classifier of one tensor, a batch.")
    size: Any = values[0].shape
    batch, *shape = size
    if not all(isinstance(size, int) for size in shape):
        raise InputError("takes samples of any size: export it with only the batch dynamic.")
    if isinstance(batch, int):
        return batch, batch, tuple(shape), values[0].dtype
    limits = program.range_constraints[batch.node.expr]
    least, most = max(int(limits.lower), 1), int(min(limits.upper, ANY))
    return least, most, tuple(shape), values[0].dtype
