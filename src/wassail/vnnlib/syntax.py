"""The text of a VNN-LIB file, 1.0 or 2.0, as declarations and formulas.

One grammar serves both versions of the standard (vnnlib.org): 1.0 declares one constant for each
number (`X_0`, `Y_1`), 2.0 a network with tensors (`X[0,1]`). What is valid in one and meant for the
other is read all the same. Formulas are AND and OR of linear inequalities; numbers are exact until
all inequalities are collected.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from threading import Lock
from typing import Any, TypeAlias

from wassail.errors import InputError, reason_of

GRAMMAR = r"""
start: item*
item: "(" "vnnlib-version" VERSION ")"               -> version
    | "(" "declare-const" NAME NAME ")"              -> constant
    | "(" "declare-fun" NAME "(" ")" NAME ")"        -> constant
    | "(" "declare-network" NAME tensor* ")"         -> network
    | "(" "assert" formula ")"                       -> assertion
tensor: "(" "declare-input" NAME NAME shape ")"      -> input
    | "(" "declare-output" NAME NAME shape ")"       -> output
    | "(" OTHER (NAME | STRING | shape)* ")"         -> other
    | "(" "declare-input" NAME NAME shape NAME ")"   -> initialised
shape: "[" [NUMBER ("," NUMBER)*] "]"
?formula: "(" COMPARISON term term ")"               -> comparison
    | "(" "and" formula+ ")"                         -> conjunction
    | "(" "or" formula+ ")"                          -> disjunction
?term: NUMBER                                        -> number
    | NAME                                           -> scalar
    | NAME "[" NUMBER ("," NUMBER)* "]"              -> element
    | "(" "+" term+ ")"                              -> plus
    | "(" "-" term+ ")"                              -> minus
    | "(" "*" term+ ")"                              -> times
OTHER: "declare-hidden" | "isomorphic-to" | "equal-to"
COMPARISON: "<=" | ">=" | "<" | ">" | "==" | "=" | "!="
VERSION: /<\d{1,4}\.\d{1,4}>/
NUMBER: /[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?/
NAME: /[A-Za-z_][A-Za-z0-9_.\-]*/
STRING: /"[^"\n]*"/
COMMENT: /;[^\n]*/
%ignore COMMENT
%ignore /[ \t\r\n\f]+/
"""

DEEPEST = 64  # formulas and terms inside each other
LONGEST = 400  # characters of one number
FARTHEST = 400  # exponent of ten of one number
WIDEST = 10**4  # bits of an exact number
MOST_VARIABLES = 10**7
READING = Lock()  # one file at a time
WAY_OUT = "write the property as AND and OR of linear inequalities"

Variable: TypeAlias = "tuple[str, int]"  # "X" or "Y", and its place


@dataclass(frozen=True)
class Linear:
    """A linear term: a constant and coefficients, exact; depth: of its brackets."""

    constant: Fraction
    parts: dict[Variable, Fraction]
    depth: int = 0


@dataclass(frozen=True)
class Atom:
    """`sum of parts + constant <= 0`, or `< 0` if strict, as it stands in one line of the file."""

    parts: dict[Variable, Fraction]
    constant: Fraction
    strict: bool
    line: int


@dataclass(frozen=True)
class All:
    """AND of formulas."""

    parts: tuple[Formula, ...]
    depth: int = 0


@dataclass(frozen=True)
class Any_:
    """OR of formulas."""

    parts: tuple[Formula, ...]
    depth: int = 0


Formula: TypeAlias = "Atom | All | Any_"


@dataclass
class Query:
    """What a file says: its numbers of inputs and outputs, and formulas that hold together.

    names: of the two tensors, as a counterexample writes them; None where every number has a name
    of its own, `X_0`.
    """

    inputs: int = 0
    outputs: int = 0
    formulas: list[Formula] = field(default_factory=list)
    names: tuple[str, str] | None = None


class _Reading:
    """Takes what the parser recognises, from left to right, and makes a `Query` of it: a method for
    each rule of the grammar.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the file before."""
        self.query = Query()
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.places: dict[str, set[int]] = {"X": set(), "Y": set()}

    def start(self, _: list[Any]) -> Query:
        """The whole file."""
        for side, places in self.places.items():
            if places != set(range(len(places))):
                missing = min(set(range(len(places))) - places)
                raise InputError(f"{side}_{missing} is not declared: declare every variable.")
        if self.tensors:
            kinds = {kind: name for name, (kind, _) in self.tensors.items()}
            if len(kinds) < 2:
                raise InputError("a network needs an input and an output: declare both.")
            self.query.names = (kinds["X"], kinds["Y"])
        else:
            self.query.inputs, self.query.outputs = (len(v) for v in self.places.values())
        if not self.query.inputs or not self.query.outputs:
            raise InputError("no inputs or no outputs are declared: begin with declarations.")
        return self.query

    def version(self, given: list[Any]) -> None:
        """`(vnnlib-version <2.0>)`."""
        if given[0] not in ("<1.0>", "<2.0>"):
            raise InputError(f"VNN-LIB version {given[0]} is not known: write <1.0> or <2.0>.")

    def constant(self, given: list[Any]) -> None:
        """`(declare-const X_0 Real)`."""
        name = given[0]
        found = re.fullmatch(r"([XY])_(\d{1,8})", name)
        if found is None:
            raise InputError(f"line {name.line}: {_short(name)} is neither X_i nor Y_i: rename it.")
        if self.tensors:
            raise InputError(f"line {name.line}: a network is declared already: choose one form.")
        self.places[found[1]].add(int(found[2]))

    def network(self, given: list[Any]) -> None:
        """`(declare-network N ...)`."""
        if any(self.places.values()) or len(self.tensors) != 2 or self.query.names is not None:
            raise InputError(
                f"line {given[0].line}: only one network with one input and one output is known: "
                "split the query."
            )
        self.query.names = ("X", "Y")

    def input(self, given: list[Any]) -> None:
        """`(declare-input X Real [1,5])`."""
        self._tensor("X", given)

    def output(self, given: list[Any]) -> None:
        """`(declare-output Y Real [5])`."""
        self._tensor("Y", given)

    def _tensor(self, kind: str, given: list[Any]) -> None:
        name, _, shape = given
        if name in self.tensors or kind in (known for known, _ in self.tensors.values()):
            raise InputError(
                f"line {name.line}: only one network with one input and one output is known: "
                "split the query."
            )
        size = math.prod(shape)
        if not 1 <= size <= MOST_VARIABLES:
            raise InputError(f"line {name.line}: a tensor of {size} numbers cannot be right.")
        self.tensors[name] = (kind, shape)
        if kind == "X":
            self.query.inputs = size
        else:
            self.query.outputs = size

    def initialised(self, given: list[Any]) -> None:
        """An input with a value of its own."""
        raise InputError(f"line {given[0].line}: {_short(given[-1])} inputs are not supported.")

    def other(self, given: list[Any]) -> None:
        """Hidden values and equal networks."""
        raise InputError(f"line {given[0].line}: {given[0]} is not supported: {WAY_OUT}.")

    def shape(self, given: list[Any]) -> tuple[int, ...]:
        """`[1,5]`."""
        return tuple(_index(token) for token in given if token is not None)

    def assertion(self, given: list[Any]) -> None:
        """`(assert ...)`."""
        self.query.formulas.append(given[0])

    def conjunction(self, given: list[Any]) -> All:
        """AND."""
        return All(tuple(given), _deeper(given))

    def disjunction(self, given: list[Any]) -> Any_:
        """OR."""
        return Any_(tuple(given), _deeper(given))

    def comparison(self, given: list[Any]) -> Formula:
        """One inequality, or two for an equation."""
        sign, left, right = given
        if sign == "!=":
            raise InputError(f"line {sign.line}: != is no linear inequality: {WAY_OUT}.")
        below = _atom(left, right, sign == "<", sign.line)
        above = _atom(right, left, sign == ">", sign.line)
        if sign in ("=", "=="):
            return All((below, above))
        return below if sign in ("<=", "<") else above

    def number(self, given: list[Any]) -> Linear:
        """A literal."""
        return Linear(_number(given[0]), {})

    def scalar(self, given: list[Any]) -> Linear:
        """`X_0`, or a tensor without axes."""
        name = given[0]
        if name in self.tensors:
            kind, shape = self.tensors[name]
            if shape:
                raise InputError(f"line {name.line}: {_short(name)} needs an index.")
            return Linear(Fraction(0), {(kind, 0): Fraction(1)})
        kind, _, place = name.partition("_")
        if kind in self.places and place.isdigit() and len(place) < 9:
            where = int(place)
            if where in self.places[kind]:
                return Linear(Fraction(0), {(kind, where): Fraction(1)})
        raise InputError(f"line {name.line}: {_short(name)} is not declared: declare it before.")

    def element(self, given: list[Any]) -> Linear:
        """`X[0,1]`, counted row by row."""
        name, *rest = given
        if name not in self.tensors:
            raise InputError(f"line {name.line}: {_short(name)} is not declared: declare it first.")
        kind, shape = self.tensors[name]
        index = [_index(token) for token in rest]
        if len(index) != len(shape) or any(i >= n for i, n in zip(index, shape)):
            raise InputError(
                f"line {name.line}: {_short(name)} has shape {list(shape)}, which {index} is not "
                "in: mend the index."
            )
        place = 0
        for i, n in zip(index, shape):
            place = place * n + i
        return Linear(Fraction(0), {(kind, place): Fraction(1)})

    def plus(self, given: list[Any]) -> Linear:
        """A sum."""
        return _sum(given, [Fraction(1)] * len(given))

    def minus(self, given: list[Any]) -> Linear:
        """A difference, or what follows a sign."""
        signs = [Fraction(1)] + [Fraction(-1)] * (len(given) - 1)
        return _sum(given, signs if len(given) > 1 else [Fraction(-1)])

    def times(self, given: list[Any]) -> Linear:
        """A product with at most one factor that is not a number."""
        factor = Fraction(1)
        rest = Linear(Fraction(1), {})
        for part in given:
            if part.parts and rest.parts:
                raise InputError(f"a product of two variables is not linear: {WAY_OUT}.")
            if part.parts:
                rest = part
            else:
                factor = _fits(factor * part.constant)
        found = _sum([rest], [factor])
        return Linear(found.constant, found.parts, _deeper(given))


def parse(text: str) -> Query:
    """The declarations and formulas of a file, or an `InputError` that names the line."""
    try:
        parser, reading = _parser()
        with READING:
            reading.begin()
            found: Query = parser.parse(text)
    except InputError:
        raise
    except Exception as error:  # of the parser library, whatever stands in the file
        line = getattr(error, "line", None)
        where = f"line {line}: " if isinstance(line, int) and line > 0 else ""
        token = getattr(error, "token", None)
        token = getattr(error, "char", None) if token is None else token
        what = f"{_short(token)} is not expected here" if token else reason_of(error)
        if getattr(token, "type", "") == "$END":
            what = "the file ends in the middle of something"
        raise InputError(f"{where}{what[:200]}: write it as VNN-LIB 1.0 or 2.0.") from None
    return found


@cache
def _parser() -> tuple[Any, _Reading]:
    """The parser, made once, and the reading that it fills."""
    lark = _library()
    reading = _Reading()
    return lark.Lark(GRAMMAR, parser="lalr", transformer=reading, cache=False), reading


def _library() -> Any:
    try:
        import lark
    except ImportError:
        raise InputError(
            "VNN-LIB files need the package lark: install it, or wassail[vnnlib]."
        ) from None
    return lark


def _short(token: object) -> str:
    """What a file says, short enough to be quoted."""
    text = str(token)
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _number(token: Any) -> Fraction:
    """A literal, exact; refused where that would not fit into memory."""
    _, _, power = token.lower().partition("e")
    if len(token) > LONGEST or (power and abs(int(power)) > FARTHEST):
        raise InputError(f"line {token.line}: {_short(token)} is no number that anyone needs.")
    return Fraction(str(token))


def _index(token: Any) -> int:
    if not str(token).isdigit() or len(token) > 8:
        raise InputError(f"line {token.line}: {_short(token)} is no index: give a whole number.")
    return int(token)


def _deeper(given: list[Any]) -> int:
    """How deep brackets are around these, refused where they are too deep to be read again."""
    depth = 1 + max(getattr(part, "depth", 0) for part in given)
    if depth > DEEPEST:
        raise InputError(f"formulas are more than {DEEPEST} deep: write them flatter.")
    return depth


def _sum(given: list[Any], factors: list[Fraction]) -> Linear:
    """A weighted sum of linear terms."""
    constant = Fraction(0)
    parts: dict[Variable, Fraction] = {}
    for part, factor in zip(given, factors):
        constant = _fits(constant + factor * part.constant)
        for variable, value in part.parts.items():
            parts[variable] = _fits(parts.get(variable, Fraction(0)) + factor * value)
    return Linear(constant, parts, _deeper(given))


def _fits(value: Fraction) -> Fraction:
    """The number, refused where exact arithmetic on it would take forever."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > WIDEST:
        raise InputError("a product of numbers has too many digits: write it out.")
    return value


def _atom(left: Linear, right: Linear, strict: bool, line: int) -> Atom:
    """`left <= right`."""
    found = _sum([left, right], [Fraction(1), Fraction(-1)])
    parts = {variable: value for variable, value in found.parts.items() if value}
    return Atom(parts, found.constant, strict, line)
