"""The structure of a network, piecewise linear or smooth, read from the model itself.

`read` exports the model (`torch.export`) and keeps a graph of a few kinds of node: affine maps with
their exact transposes, sums, concatenations, ReLUs, and on request smooth activations, products,
softmax and normalised tokens, which is what transformers are made of. Input scalings and frozen
batch norms are folded into their neighbours; a maximum is written `max(a, b) = a + relu(b - a)`, so
that max pooling, clamps and absolute values are ReLUs too. Everything is float64. What is none of
this is refused in one sentence that names its place in the model.
"""

from __future__ import annotations

import importlib
import io
import logging
import operator
import pkgutil
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from wassail.certificates.device import HOST, place
from wassail.certificates.graph import operators
from wassail.certificates.graph.agreement import check, probes
from wassail.certificates.graph.builder import WAY_OUT, Builder, Index
from wassail.certificates.graph.equilibrate import equilibrated
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.operators.moves import MOVES, SAME
from wassail.certificates.graph.operators.registry import RULES, fits
from wassail.certificates.graph.program import (
    constant_of,
    has_reals,
    operation,
    owners,
    program_print,
    wide_copy,
    widened,
)
from wassail.errors import InputError, JumpError, remedies
from wassail.network import Model, frozen

# Operations that return a tensor of their own, which shares no memory with their inputs.
FRESH = ("linear", "conv1d", "conv2d", "conv3d", "batch_norm", "add", "sub", "mul", "matmul")

# Loggers of torch that tell of an export that fails, which is told in one sentence here.
LOUD = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch.export._trace")

for _file in pkgutil.iter_modules(operators.__path__):
    importlib.import_module(f"{operators.__name__}.{_file.name}")  # fills RULES


def read(
    model: Model,
    shape: Sequence[int],
    smooth: bool = False,
    device: torch.device = HOST,
    samples: Tensor | None = None,
) -> Graph:
    """The structure of a model for samples of this shape, or an `InputError` that names what is not
    piecewise linear.

    smooth: take smooth activations, attention and LayerNorm too, as nodes with an `activation` or a
    `curve`. The model is exported for one sample, so that what it does with the batch axis on the
    way (`nn.MultiheadAttention` moves it, and merges it with the heads) is no matter; the graph is
    then compared with the model at random points, and at some of the samples if they are given
    (`agreement.py`). device: where the model takes its
    input, if it has no parameters that tell. The structure is read on the CPU; the graph that is
    returned is on the model's device, or on the CPU if that device has no float64.

    What was read is kept for as long as the model lives. The model is exported at every call, and
    read again where the program is not the one before, whatever changed it.
    """
    module = model if isinstance(model, nn.Module) else _Module(model)
    parameter = next(module.parameters(), None)
    like = torch.zeros(0, device=device) if parameter is None else parameter.detach().new_zeros(0)
    points = probes(tuple(shape), like)
    case = (tuple(shape), smooth, like.dtype, like.device)
    with _ONE_AT_A_TIME, frozen(module), torch.no_grad():
        program = _exported(module, points[0][:1])
        own = program_print(program)
        key = None if own is None else (*case, own)
        graph = None if key is None else _kept(model, key, torch.cat(points))
        if graph is not None:
            return graph
        graph, truth = _translated(model, program, smooth, points, samples)
    if key is not None:
        _keep(model, key, truth, graph)
    return graph


def _exported(module: nn.Module, x: Tensor) -> Any:
    """The program of a module for one sample `(1, *shape)`.

    A dropout that does nothing returns its argument itself, and what is written into the one is
    written into the other. Torch's rewriting does not know that, so such dropouts are left out.
    """
    try:
        with _silence():
            program = torch.export.export(module, (x,), strict=False)
    except Exception as error:  # whatever the exporter stumbles over
        raise _unreadable(x, error) from None
    for node in list(program.graph.nodes):
        nothing = node.args[1:2] == (0.0,) or node.args[2:] == (False,)
        if "dropout" in operation(node) and nothing:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _unreadable(x: Tensor, error: Exception) -> InputError:
    reason = (
        (str(error).strip().splitlines() or [type(error).__name__])[0].split(". ")[0].rstrip(". ")
    )
    if "data-dependent" in reason:
        reason = "its forward pass branches on values of the data"
    return InputError(
        f"the model's structure cannot be read for samples of shape {tuple(x.shape[1:])}: {reason} "
        f"({WAY_OUT})."
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Without the programs and warnings that torch prints where an export fails; what is written
    meanwhile comes out in the end if it does not.
    """
    sources = [logging.getLogger(name) for name in LOUD]
    mute = logging.Filter("wassail")  # nothing of torch has this name
    text = io.StringIO()
    for source in sources:
        source.addFilter(mute)
    try:
        with warnings.catch_warnings(), redirect_stderr(text):
            warnings.simplefilter("ignore")
            yield
        print(text.getvalue(), end="", file=sys.stderr)
    finally:
        for source in sources:
            source.removeFilter(mute)


def _rewritten(program: Any, x: Tensor) -> Any:
    """The program without operations that write into their arguments."""
    try:
        with _silence():
            return program.run_decompositions({})
    except Exception as error:
        raise _unreadable(x, error) from None


def _translated(
    model: Model, program: Any, smooth: bool, points: list[Tensor], samples: Tensor | None
) -> tuple[Graph, Tensor]:
    """The graph of a program, compared with the model at points, and the model's logits there."""
    like = points[0]
    shape = tuple(like.shape[1:])
    graph = _directly(program, shape, smooth, like.dtype)
    if graph is None:
        program = _rewritten(program, like)
        graph = Reader(program, shape, smooth, like.dtype).graph()
    assert graph.execution is not None, "`partial` writes down the type"
    graph = replace(graph, execution=replace(graph.execution, device=like.device.type))
    graph = equilibrated(graph, torch.cat(points[:3]).cpu())
    truth = check(model, program, graph, points, samples)
    return graph.to(place(like.device)), truth


# For each model that lives: what it was when it was read, its logits at the points of the test, and
# its graph.
_READ: WeakKeyDictionary[Any, OrderedDict[Any, tuple[Tensor, Graph]]] = WeakKeyDictionary()
KEPT = 2  # structures for each model
_ONE_AT_A_TIME = threading.RLock()  # an export changes the state of torch as a whole


def _kept(model: Model, key: Any, probe: Tensor) -> Graph | None:
    """The graph that was read before under this key, if the model's logits at `probe` are still
    the same numbers.
    """
    try:
        found = _READ.get(model, {}).get(key)
    except TypeError:  # it has no hash, or cannot be watched
        return None
    if found is None:
        return None
    truth, graph = found
    now = model(probe).cpu().double()
    return graph if torch.equal(now, truth) else None


def _keep(model: Model, key: Any, truth: Tensor, graph: Graph) -> None:
    try:
        mine = _READ.setdefault(model, OrderedDict())
    except TypeError:
        return
    mine[key] = (truth, graph)
    mine.move_to_end(key)
    while len(mine) > KEPT:
        mine.popitem(last=False)


def _directly(
    program: Any, shape: tuple[int, ...], smooth: bool, dtype: torch.dtype
) -> Graph | None:
    """The graph of a program as it was exported, or None where torch has to rewrite it first.

    Rewriting takes five times as long as all the rest of reading. It is for programs that write
    into their values, and for operations that have no rule of their own.
    """
    if not all(_writes_nothing(node) for node in program.graph.nodes):
        return None
    try:
        return Reader(program, shape, smooth, dtype).graph()
    except JumpError:
        raise
    except InputError:
        return None


def _writes_nothing(node: Any) -> bool:
    """Whether a node of a program computes a value of its inputs and nothing else.

    That is so for an operation in place, too, if nothing else sees what it writes into.
    """
    if node.op != "call_function":
        return bool(node.op in ("placeholder", "output"))
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = operation(node)
    if "dropout" in name:  # it is active, so it is random: those that do nothing are left out
        return False
    if name == "to":  # not to the type of another tensor
        return any(isinstance(v, torch.dtype) for v in (*node.args, *node.kwargs.values()))
    if not node.target._schema.is_mutable:
        return True
    source: Any = node.args[0] if node.args else None
    return (
        isinstance(source, torch.fx.Node)
        and source.op == "call_function"
        and isinstance(source.target, torch._ops.OpOverload)
        and source.target._schema.name.split("::")[-1] in FRESH
        and len(source.users) == 1
        and not node.kwargs
    )


class _Module(nn.Module):
    def __init__(self, function: Model) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Reader(Builder):
    """Translates a program exported for one sample, node by node.

    A value is a constant tensor, the index of a node, or a list of them.
    """

    def __init__(
        self, program: Any, shape: tuple[int, ...], smooth: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, smooth, dtype)
        self.program = program
        self.scores = _scores(program)

    def graph(self) -> Graph:
        """The whole program."""
        constants = owners(self.program)
        values: dict[Any, Any] = {}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                owner, own = constants.get(node.name, ("", None))
                values[node] = Index(0, 1) if own is None else wide_copy(own)
                if own is not None and own.ndim and own.is_floating_point():
                    self._same_type(own.dtype, owner)
            elif node.op == "output":
                result = values[node.args[0][0]]
                if len(node.args[0]) != 1 or not isinstance(result, Index):
                    raise remedies(
                        "the model does not return one tensor of logits that depends on its input",
                        "wrap it so that it does",
                        "name the logits by their key, attribute or place, for example --logits 0",
                    )
                if self.single(result):
                    raise InputError(
                        "the model does not map a batch of samples to logits of shape (N, K)."
                    )
                return self._trim(result)
            else:
                values[node] = self._node(node, values)
        raise InputError("the model returns nothing: it must return logits.")

    def _node(self, node: Any, values: dict[Any, Any]) -> Any:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, kind = (
            (stack[-1][0], str(stack[-1][1]).rsplit(".", 1)[-1]) if stack else ("", "the model")
        )
        self.place = f"{path!r} ({kind})" if path else f"the model itself ({kind})"
        args = torch.fx.node.map_arg(node.args, lambda n: values[n])
        options = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
        flat, _ = tree_flatten((args, options))
        if "assert" in operation(node):  # the exporter's checks of dtypes, which we have widened
            return None
        if not any(isinstance(v, Index) for v in flat):
            return self._constant(node, args, options)
        if "getitem" in str(node.target):
            if args[0][args[1]] is None and node.users:
                raise self.refuse(
                    "the second output of an operation, such as the indices of a sort"
                )
            return args[0][args[1]]
        self.masks = node in self.scores
        self.final = all(user.op == "output" for user in node.users)
        found = self._translate(operation(node), node.target, list(args), dict(options))
        return tree_map_only(Index, self._filled, found)

    def _constant(self, node: Any, args: Any, options: Any) -> Any:
        """What an operation makes of constants, in float64."""
        moved = operation(node) in (*MOVES, *SAME) or "getitem" in operation(node)
        computed = has_reals((args, options))
        if computed and not moved:
            self.mixed = self.mixed or f"weights that the model computes, as at {self.place}"
        made = constant_of(node.target, args, options, self.dtype)
        if not computed and has_reals(made) and made.ndim:
            self._same_type(made.dtype, self.place)
        return widened(made)

    def _filled(self, x: Index) -> Any:
        """A value, or where it has no entries the empty tensor: no node is empty."""
        if self.nodes[x].size:
            return x
        return torch.zeros(self.full(x), dtype=torch.float64)

    def _translate(self, name: str, target: Any, args: list[Any], options: dict[str, Any]) -> Any:
        types = [v for v in (*args, *options.values()) if isinstance(v, torch.dtype)]
        if any(t not in (torch.float32, torch.float64) for t in types):
            raise self.refuse("a conversion to integers or to half precision")
        for t in types:
            self._same_type(t, self.place)
        rule = RULES.get(name)
        if rule is None or not fits(rule, self, args, options):
            raise self.refuse(name)
        self.name = name
        self.target = target
        try:
            return rule(self, *args, **options)
        except InputError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            # Shapes that torch does not take. A mistake of ours is another exception.
            raise self.refuse(name) from error

    def _same_type(self, dtype: torch.dtype, place: str) -> None:
        """Remember where a model mixes floating-point types: what it executes is then not
        covered.
        """
        if dtype != self.dtype:
            self.mixed = self.mixed or f"a model in {self.dtype} with {dtype} at {place}"

    def _trim(self, last: int) -> Graph:
        """Only the nodes that the logits depend on, renumbered."""
        graph = self.partial(last)
        if len(graph.nodes[-1].shape) != 1:
            raise InputError("the model does not map a batch of samples to logits of shape (N, K).")
        return graph


def _scores(program: Any) -> set[Any]:
    """The nodes of a program that go nowhere but into a softmax, by additions, masks and moves."""
    found: set[Any] = set()
    keep = {*MOVES, *SAME, "add", "sub", "where", "masked_fill"}
    for node in reversed(list(program.graph.nodes)):
        ways = [operation(user) for user in node.users]
        good = [
            way == "softmax" or (way in keep and user in found)
            for way, user in zip(ways, node.users)
        ]
        if good and all(good):
            found.add(node)
    return found
