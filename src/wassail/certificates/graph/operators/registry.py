"""How an operation of torch becomes nodes: one rule for each name in torch's operator library.

To add an operator write one file in this folder. It holds

- its mathematics: for a linear layer a `Linear` (`graph/maps.py`: value, transpose, weights; norm
  and rounding follow from these), for an activation an `Activation` (`graph/activations.py`), for a
  function of several values a `Curve` (`graph/planes.py`); many operators need none of these, since
  they are made of others;
- its spelling: a function with the decorator `spelled` that takes a `Builder` and the arguments of
  the torch operator by their names there, and returns the `Index` of the node that it added.

Every file of this folder is read by `reader.py`; there is no list to add it to. A parameter that is
annotated `Index` has to depend on the input, one that is annotated `Any` may, all others must not;
what does not fit is refused by name, before the rule is called. An exception of a rule other than
`InputError` and those of torch is a mistake of ours, and is not caught.

The test is one line in the table `tests/support/operators.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from wassail.certificates.graph.builder import Builder, Index

Rule = TypeVar("Rule", bound=Callable[..., Any])

RULES: dict[str, Callable[..., Any]] = {}


def spelled(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under the names of its torch operators, without the underscore of those that
    work in place.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"two rules for {name!r}")
            RULES[name] = rule
        return rule

    return register


def fits(
    rule: Callable[..., Any], net: Builder, args: Sequence[Any], options: Mapping[str, Any]
) -> bool:
    """Whether the arguments are what the rule's annotations say."""
    signature = _signature(rule)
    try:
        given = signature.bind(net, *args, **options).arguments
    except TypeError:  # other arguments than the rule knows
        return False
    return all(_fit(signature.parameters[name].annotation, v) for name, v in given.items())


def _fit(annotation: Any, value: Any) -> bool:
    named = isinstance(annotation, str)  # as all annotations are with the import from __future__
    kind = annotation if named else getattr(annotation, "__name__", str(annotation))
    if kind == "Builder" or "Any" in kind:
        return True
    if kind == "Index":
        return isinstance(value, Index)
    if kind == "Tensor":
        return isinstance(value, Tensor)
    flat, _ = torch.utils._pytree.tree_flatten(value)
    return not any(isinstance(v, Index) for v in flat)


_signature = cache(inspect.signature)
