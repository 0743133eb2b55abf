"""An exported program, what it computes in float64, and its fingerprint: equal fingerprints, equal
functions.

The export runs the model's own code, so it sees every state that the code looks at: attributes,
globals, hooks, files. Constants count by their bytes, because `tensor.data.copy_` changes no
version number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from wassail.certificates.device import HOST

REAL = (torch.float32, torch.float64)


def operation(node: Any) -> str:
    """The name of an operation of a program; relu_ and relu are one."""
    name: str = getattr(getattr(node.target, "_schema", None), "name", str(node.target))
    return name.split("::")[-1].strip("_")


def wide_copy(constant: Tensor) -> Tensor:
    """In float64 on the CPU, as a copy: a graph that is kept shares no memory with the model."""
    constant = constant.detach().cpu()
    kind = torch.float64 if constant.is_floating_point() else constant.dtype
    return constant.to(kind, copy=True)


def owners(program: Any) -> dict[str, tuple[str, Tensor]]:
    """The constants of a program by their placeholders: what the model calls each, and its
    value.
    """
    signature = program.graph_signature
    constants = {**program.state_dict, **program.constants}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    return {name: (owner, constants[owner]) for name, owner in names.items()}


def has_reals(values: Any) -> bool:
    """Whether there is a tensor of real numbers among the arguments of an operation."""
    flat, _ = tree_flatten(values)
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in flat)


def constant_of(
    target: Any, args: Sequence[Any], options: Mapping[str, Any], dtype: torch.dtype
) -> Any:
    """What an operation makes of constants, on the CPU and in the type that it has there.

    One that is made from nothing (`torch.eye`) has its own type, as in the model. One that is
    computed from others, which are in float64, is computed in float64 where the model has `dtype`.
    """
    computed = has_reals((args, options))

    def ours(value: Any) -> Any:
        if isinstance(value, torch.device):
            return HOST
        return torch.float64 if computed and value is dtype else value

    args, options = tree_map(ours, (list(args), dict(options)))
    return target(*args, **options)


def widened(values: Any) -> Any:
    """Tensors of real numbers in float64, all others as they are."""
    return tree_map_only(Tensor, lambda v: v.double() if v.is_floating_point() else v, values)


class Exact:
    """A program in float64, one sample at a time: torch's own operations, none of ours.

    dtype: the type that the model computes in. Conversions between float32 and float64 are left
    out, and so they are in a graph.
    """

    def __init__(self, program: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # the coarsest type that something of the model is computed in
        self.coarsest = torch.float32 if "torch.float32" in str(program.graph) else dtype
        self.fixed: dict[Any, Any] = {}  # what does not depend on the input
        self.moving: list[Any] = []
        given = owners(program)
        for node in program.graph.nodes:
            needs = [n for n in node.all_input_nodes if n not in self.fixed]
            if node.op == "placeholder" and node.name in given:
                self.fixed[node] = wide_copy(given[node.name][1])
            elif node.op == "call_function" and not needs and "assert" not in operation(node):
                args, options = torch.fx.node.map_arg(
                    (node.args, node.kwargs), lambda n: self.fixed[n]
                )
                self.fixed[node] = widened(constant_of(node.target, args, options, dtype))
            else:
                self.moving.append(node)

    def logits(self, x: Tensor, noise: float = 0.0) -> Tensor:
        """At samples `(m, *shape)`: `(m, K)`.

        noise: every input, every constant and every result of an operation is multiplied by 1 +-
        noise, at random: what comes out differs from the exact value about as much as in an
        arithmetic of this precision, sums of products that cancel included.
        """
        draw = torch.Generator().manual_seed(0)
        return torch.cat([self._one(v[None], noise, draw) for v in x.double()])

    def _one(self, x: Tensor, noise: float, draw: torch.Generator) -> Tensor:
        found: dict[Any, Any] = {}

        def shaken(value: Any) -> Any:
            if not noise or not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            sign = 2 * torch.randint(2, value.shape, generator=draw).double() - 1
            return value * (1 + noise * sign)

        for node in self.moving:
            if node.op == "placeholder":
                found[node] = shaken(x.clone())
            elif node.op == "output":
                result: Tensor = found[node.args[0][0]]
                return result
            elif "assert" not in operation(node):
                args, options = torch.fx.node.map_arg(
                    (node.args, node.kwargs),
                    lambda n: found[n] if n in found else shaken(self.fixed[n]),
                )
                args, options = tree_map(self._ours, (list(args), dict(options)))
                if operation(node) == "rms_norm" and len(args) < 4 and options.get("eps") is None:
                    options["eps"] = torch.finfo(self.dtype).eps  # that of the model's own type
                found[node] = tree_map_only(Tensor, shaken, node.target(*args, **options))
        raise AssertionError("a program has an output")

    @staticmethod
    def _ours(value: Any) -> Any:
        if isinstance(value, torch.device):
            return HOST
        return torch.float64 if isinstance(value, torch.dtype) and value in REAL else value


def program_print(program: Any) -> bytes | None:
    """Of a program that `torch.export` returned: its operations, those of its parts, and its
    constants; None where a constant is of a kind that has no plain bytes.
    """
    found = hashlib.blake2b(digest_size=32)
    words = [(name, str(part.graph)) for name, part in _parts(program)]
    words.append(("signature", str(program.graph_signature)))
    constants = {**program.state_dict, **program.constants}
    for name, value in constants.items():
        if not isinstance(value, Tensor) or not _is_plain(value):
            return None
        words.append((name, f"{type(value)} {tuple(value.shape)} {value.dtype} {value.device}"))
    for pair in words:
        for text in pair:
            _add(found, text.encode("utf-8", "surrogatepass"))
    for value in constants.values():
        _add(found, _bytes(value))
    return found.digest()


def _parts(program: Any) -> list[tuple[str, Any]]:
    """The program and the programs inside it, such as those under another mode of autograd."""
    found = program.graph_module.named_modules()
    return [(name, part) for name, part in found if hasattr(part, "graph")]


def _is_plain(value: Tensor) -> bool:
    return (
        value.layout == torch.strided
        and not value.is_quantized
        and not value.is_conj()
        and not value.is_neg()
        and value.device.type != "meta"
    )


def _bytes(value: Tensor) -> bytes | memoryview:
    own = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return own.reshape(-1).view(torch.uint8).numpy().data if own.numel() else b""


def _add(found: Any, data: bytes | memoryview) -> None:
    found.update(len(data).to_bytes(8, "little"))
    found.update(data)
