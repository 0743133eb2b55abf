"""Properties from VNN-LIB files: formulas as an OR of boxes and clauses."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import assert_never

import torch

from wassail.errors import InputError
from wassail.vnnlib.clauses import Clause, Part, UnsafeSet
from wassail.vnnlib.syntax import All, Any_, Atom, Formula, Query, parse
from wassail.zoo.weights import regular

LARGEST = 1 << 26  # bytes of a file, unpacked
MOST_CASES = 50_000  # boxes with clauses, once AND and OR are multiplied out
MOST_NUMBERS = 10**8  # of all boxes and rows together


def compressed(path: Path) -> bool:
    """Whether a file is one of gzip."""
    regular(path, "a file")
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def content(path: str | Path, largest: int = LARGEST) -> bytes:
    """The bytes of a file, unpacked if it is compressed.

    largest: bytes that are taken.
    """
    path = Path(path)
    try:
        with gzip.open(path) if compressed(path) else path.open("rb") as file:
            data = file.read(largest + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}; write it again.") from None
    if len(data) > largest:
        raise InputError(f"{str(path)!r} has more than {largest} bytes unpacked: split it.")
    return data


def read_property(path: str | Path) -> UnsafeSet:
    """The property in a VNN-LIB file, version 1.0 or 2.0, also compressed."""
    try:
        return property_of(parse(content(path).decode("ascii", "replace")))
    except InputError as error:
        raise error if str(path) in str(error) else error.within(str(path)) from None


def property_of(query: Query) -> UnsafeSet:
    """The property that a file's formulas describe."""
    if _count(All(tuple(query.formulas))) > MOST_CASES:
        raise InputError(
            f"AND and OR multiply to more than {MOST_CASES} cases: split the property."
        )
    reader = _Cases(query)
    singles = [atom for formula in query.formulas for atom in _singles(formula)]
    choices = [list(_cases(part)) for formula in query.formulas for part in _choices(formula)]
    bounds, rows = reader.sorted(singles)
    cases: dict[tuple[tuple[int, float, float], ...], list[list[Atom]]] = {}
    numbers = 0
    for chosen in itertools.product(*choices):
        own, more = reader.sorted([atom for atoms in chosen for atom in atoms])
        if not own.possible or not bounds.possible:
            continue
        key = own.key
        if key not in cases:
            cases[key] = []
            numbers += query.inputs
        cases[key].append(rows + more)
        numbers += query.outputs * (len(rows) + len(more))
        if numbers > MOST_NUMBERS:
            raise InputError("all boxes together do not fit into memory: split the property.")
    parts = (reader.part(bounds, key, clauses) for key, clauses in cases.items())
    found = tuple(part for part in parts if part is not None)
    return UnsafeSet(query.inputs, query.outputs, found, query.names)


def _count(formula: Formula) -> int:
    """Cases of a formula, at most a few more than are read."""
    match formula:
        case Atom():
            return 1
        case All(parts):
            count = 1
            for part in parts:
                count = min(count * _count(part), MOST_CASES + 1)
            return count
        case Any_(parts):
            return min(sum(_count(part) for part in parts), MOST_CASES + 1)
        case _:
            assert_never(formula)


def _singles(formula: Formula) -> Iterator[Atom]:
    """The inequalities that hold in every case."""
    match formula:
        case Atom():
            yield formula
        case All(parts):
            for part in parts:
                yield from _singles(part)
        case Any_():
            return
        case _:
            assert_never(formula)


def _choices(formula: Formula) -> Iterator[Any_]:
    """The choices that are made together."""
    match formula:
        case Atom():
            return
        case All(parts):
            for part in parts:
                yield from _choices(part)
        case Any_():
            yield formula
        case _:
            assert_never(formula)


def _cases(formula: Formula) -> Iterator[tuple[Atom, ...]]:
    """The ways in which a formula can hold: inequalities that hold together."""
    match formula:
        case Atom():
            yield (formula,)
        case All(parts):
            for chosen in itertools.product(*[list(_cases(part)) for part in parts]):
                yield tuple(atom for atoms in chosen for atom in atoms)
        case Any_(parts):
            for part in parts:
                yield from _cases(part)
        case _:
            assert_never(formula)


class _Bounds:
    """Bounds of single inputs; possible: false once a constant inequality does not hold."""

    def __init__(self) -> None:
        self.low: dict[int, float] = {}
        self.high: dict[int, float] = {}
        self.possible = True

    @property
    def key(self) -> tuple[tuple[int, float, float], ...]:
        """The same for the same bounds."""
        places = sorted(self.low.keys() | self.high.keys())
        inf = float("inf")
        return tuple((i, self.low.get(i, -inf), self.high.get(i, inf)) for i in places)


class _Cases:
    """Makes boxes and clauses of inequalities."""

    def __init__(self, query: Query) -> None:
        self.inputs = query.inputs
        self.outputs = query.outputs

    def sorted(self, atoms: list[Atom]) -> tuple[_Bounds, list[Atom]]:
        """Bounds of inputs, and the inequalities of outputs."""
        bounds = _Bounds()
        rows = []
        for atom in atoms:
            sides = {side for side, _ in atom.parts}
            if not sides:
                bounds.possible &= atom.constant < 0 or (atom.constant == 0 and not atom.strict)
            elif sides == {"Y"}:
                rows.append(atom)
            else:
                self._bound(bounds, atom, sides)
        return bounds, rows

    def _bound(self, bounds: _Bounds, atom: Atom, sides: set[str]) -> None:
        """An inequality of one input."""
        where = f"line {atom.line}: "
        if sides != {"X"}:
            raise InputError(
                f"{where}an inequality mixes inputs and outputs: bound them in inequalities of "
                "their own."
            )
        if len(atom.parts) > 1:
            raise InputError(f"{where}inputs are not in a box: bound every input by itself.")
        if atom.strict:
            raise InputError(f"{where}a box is closed: write <= or >= for inputs.")
        (((_, place), factor),) = atom.parts.items()
        end = _real(-atom.constant / factor, atom.line)
        if factor > 0:
            bounds.high[place] = min(end, bounds.high.get(place, end))
        else:
            bounds.low[place] = max(end, bounds.low.get(place, end))

    def part(
        self, base: _Bounds, key: tuple[tuple[int, float, float], ...], clauses: list[list[Atom]]
    ) -> Part | None:
        """A box with its clauses; None where the box is empty."""
        low, high = (
            torch.full((self.inputs,), side, dtype=torch.float64)
            for side in (-torch.inf, torch.inf)
        )
        for side, known in ((low, base.low), (high, base.high)):
            if known:
                side[list(known)] = torch.tensor(list(known.values()), dtype=torch.float64)
        if key:
            places, bottom, top = (list(column) for column in zip(*key))
            low[places] = torch.maximum(low[places], torch.tensor(bottom, dtype=torch.float64))
            high[places] = torch.minimum(high[places], torch.tensor(top, dtype=torch.float64))
        for side, name in ((low, "lower"), (high, "upper")):
            if not bool(side.isfinite().all()):
                place = int((~side.isfinite()).nonzero()[0])
                raise InputError(f"input {place} has no {name} bound: bound every input.")
        if not bool((low <= high).all()):
            return None
        return Part(low, high, tuple(self._clause(atoms) for atoms in clauses))

    def _clause(self, atoms: list[Atom]) -> Clause:
        """Inequalities of outputs that hold together."""
        rows = torch.zeros(len(atoms), self.outputs, dtype=torch.float64)
        for k, atom in enumerate(atoms):
            for (_, place), factor in atom.parts.items():
                rows[k, place] = _real(factor, atom.line)
        offsets = [_real(-atom.constant, atom.line) for atom in atoms]
        strict = [atom.strict for atom in atoms]
        return Clause(
            rows, torch.tensor(offsets, dtype=torch.float64), torch.tensor(strict, dtype=torch.bool)
        )


def _real(value: Fraction, line: int) -> float:
    """The float64 next to an exact number."""
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"line {line}: a number is too large: give one below 1e308.") from None
