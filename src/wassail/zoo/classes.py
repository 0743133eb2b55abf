"""Which number a class has: names of classes are numbered in alphabetical order, over all of the
data, or in the order that is given. Only the person knows the order of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wassail.errors import InputError, remedies
from wassail.losses import predict
from wassail.network import BATCH_SIZE, Model, Network, as_taken, device_of, first_logits, frozen
from wassail.specification import Specification
from wassail.zoo.files import ALPHABETICAL, CLASS_NAMES
from wassail.zoo.samples import Data, Wrapped

GIVEN = "as given"
FIRST = 8  # samples that tell whether the model takes them
LOOKED_AT = 1000  # samples that tell whether the order can be the model's
SHOWN = 12  # names in a sentence
LONGEST = 40  # characters of a name in a sentence


class InOrder(Wrapped):
    """Other data with the classes in a given order.

    Args:
        whole: the data.
        classes: names of all classes of the model, in its order.
    """

    def __init__(self, whole: Data, classes: Sequence[str]) -> None:
        names = tuple(map(str, classes))
        if not names or len(set(names)) < len(names) or "" in names:
            raise InputError(
                f"the classes are {', '.join(map(repr, names)) or 'none'}: give each name once, in "
                "the order of the model."
            )
        missing = [name for name in whole.classes or () if name not in names]
        if missing:
            raise InputError(
                f"{whole.name!r} has a class {missing[0]!r}, which is none of "
                f"{', '.join(names[:SHOWN])}: give the names of all classes, in the order of the "
                "model."
            )
        super().__init__(whole, {CLASS_NAMES: GIVEN})
        self.classes = names
        old = range(len(names)) if whole.classes is None else map(names.index, whole.classes)
        self._number = torch.tensor(list(old))

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """As the data do, with the labels in the given order."""
        x, y = super().read(start, stop)
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self._number):
            raise InputError(
                f"{self.name!r} has a label {int(y.max())} and {len(self._number)} classes are "
                "named: give the names of all."
            )
        return x, self._number[y]


def classes_text(
    classes: Sequence[str] | None, about: Mapping[str, Any], most: int = SHOWN
) -> str | None:
    """The number of each name in words; None where the names are the numbers, or there are none.

    classes: names of classes, each at its number; about: what is recorded of the data, among it
    where the order comes from; most: so many are named.
    """
    if not classes or all(name == str(number) for number, name in enumerate(classes)):
        return None
    short = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in classes[:most]]
    listed = [f"{name} = {number}" for number, name in enumerate(short)]
    more = f", ... ({len(classes)} in all)" if len(classes) > most else ""
    order = about.get(CLASS_NAMES)
    why = f" ({order})" if order in (ALPHABETICAL, GIVEN) else ""
    return f"Class names and their numbers{why}: {', '.join(listed)}{more}."


def numbers_of(classes: Sequence[str] | None) -> dict[str, int] | None:
    """The number of each name, for a record; None where there are no names.

    classes: names of classes, each at its number.
    """
    return None if classes is None else {name: number for number, name in enumerate(classes)}


def check_match(model: Model, data: Data, numbers: bool = False) -> None:
    """Refuse samples that a model does not take, and names of classes that cannot be the model's:
    given ones that are more or fewer than its classes, and alphabetical ones that are, or by which
    it is right less often than by chance.

    Args:
        model: a callable from a batch to logits.
        data: with labels of any kind.
        numbers: whether they are numbers, and one output of the model is enough; default False.
    """
    if not len(data):
        return
    first = as_taken(model, data.read(0, FIRST)[0])
    goal = Specification(torch.ones(1, 1)) if numbers else None
    with frozen(model):
        z = first_logits(model, first.to(device_of(model, first.device)), goal)
    told = data.info.get(CLASS_NAMES) == GIVEN and data.classes is not None
    if told and not numbers and len(data.classes or ()) != z.shape[1]:
        raise remedies(
            f"there are {len(data.classes or ())} names of classes, and the model has {z.shape[1]} "
            "classes",
            "give the names of all classes, in the order of the model",
            "give --classes the names of all classes, in the order of the model",
        )
    if data.info.get(CLASS_NAMES) == ALPHABETICAL and data.classes:
        _check_order(model, data, data.classes)


def _check_order(model: Model, data: Data, classes: tuple[str, ...]) -> None:
    """Compare what the model predicts with labels that are names in alphabetical order."""
    places = range(0, len(data), -(-len(data) // LOOKED_AT))
    read = [data.read(place, place + 1) for place in places]
    x = as_taken(model, torch.cat([sample for sample, _ in read]))
    y = torch.cat([label for _, label in read])
    with frozen(model):
        device = device_of(model, x.device)
        network = Network(model, torch.arange(len(x)), BATCH_SIZE, device)
        z = network.logits(x, network.rows)
    names = ", ".join(classes[:SHOWN]) + (", ..." if len(classes) > SHOWN else "")
    if len(classes) != z.shape[1]:
        cause = (
            f"the labels of {data.name!r} are {len(classes)} names ({names}) and the model "
            f"has {z.shape[1]} classes, so which is which cannot be known"
        )
    else:
        right = int((predict(z, y) == y).sum())
        if right * z.shape[1] >= len(y):
            return
        cause = (
            f"the labels of {data.name!r} are names, numbered {ALPHABETICAL} ({names}), and the "
            f"model is right on {right} of {len(y)} samples, less often than by chance, so its "
            "classes may stand in another order"
        )
    raise remedies(
        cause,
        "say which with zoo.open_data(..., classes=[...]), the names in the order of the model",
        "say which with --classes a,b,c, the names in the order of the model",
    )
