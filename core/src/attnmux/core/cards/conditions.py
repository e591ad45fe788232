"""Conditions of a clause on one value: they check it, describe themselves and suggest others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import ceil
from typing import NoReturn

from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.libraries import parsed_requirement, satisfies, specifiers, within
from attnmux.core.facts.values import Value


class Condition(ABC):
    """A set of values that a backend serves. Read-only; equal parts make equal conditions.

    The kinds in this module are all there are: a card is data, so it brings no code to run. The
    functions below make them, and say what they admit. They are not dataclasses: generating their
    code would slow every start of the command.
    """

    __slots__ = ()

    def __init__(self, *parts: object) -> None:
        names: tuple[str, ...] = self.__slots__
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(self, name, part)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: conditions are read-only")

    def _parts(self) -> tuple[object, ...]:
        names: tuple[str, ...] = self.__slots__
        return tuple(getattr(self, name) for name in names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Condition):
            return NotImplemented
        return type(self) is type(other) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((type(self), self._parts()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._parts()))})"

    def __reduce__(self) -> str | tuple[object, ...]:
        return type(self), self._parts()

    @property
    def listed(self) -> tuple[Value, ...]:
        """The served values, if the condition lists them."""
        return ()

    @abstractmethod
    def admits(self, value: Value) -> bool:
        """Whether the backend serves `value`."""

    @abstractmethod
    def __str__(self) -> str:
        """The served values for a reader: "16, 32 or 64"."""

    def nearest(self, value: Value) -> Value | None:
        """The served value closest to `value`; None if there is none."""
        return None

    def examples(self) -> Sequence[Value]:
        """Served values to try if the request leaves the value open, the preferred one first."""
        return ()


class Constant(Condition):
    """The same answer to every value: ANY and NONE."""

    __slots__ = ("name", "served")
    name: str
    served: bool

    def admits(self, value: Value) -> bool:
        return self.served

    def __str__(self) -> str:
        return self.name.lower()

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name


ANY = Constant("ANY", True)
NONE = Constant("NONE", False)

VALUES = (str, int, float, bool, frozenset)
NUMBERS = (int, float)
TEXT = (str,)
EACH = "each as an argument"


def _check(condition: str, given: Iterable[object], types: Sequence[type], expected: str) -> None:
    """Refuse a condition when a plugin writes it: later it would fail everybody's questions."""
    for value in given:
        if type(value) not in types:
            raise InvalidInput(condition, got=repr(value), expected=expected)


class OneOf(Condition):
    __slots__ = ("values",)
    values: tuple[Value, ...]

    @property
    def listed(self) -> tuple[Value, ...]:
        return self.values

    def admits(self, value: Value) -> bool:
        return value in self.values

    def __str__(self) -> str:
        *most, last = map(str, self.values)
        return f"{', '.join(most)} or {last}" if most else last

    def nearest(self, value: Value) -> Value | None:
        numbers = [served for served in self.values if isinstance(served, NUMBERS)]
        if numbers and isinstance(value, NUMBERS):
            return min(numbers, key=lambda served: abs(served - value))
        return self.values[0]

    def examples(self) -> Sequence[Value]:
        return self.values


class Excluding(Condition):
    """Any value but these."""

    __slots__ = ("values",)
    values: tuple[Value, ...]

    def admits(self, value: Value) -> bool:
        return value not in self.values

    def __str__(self) -> str:
        return f"any but {' and '.join(map(str, self.values))}"


class Range(Condition):
    """Multiples of `step` from `least` to `most`, both included; no `most`, no upper end."""

    __slots__ = ("least", "most", "step")
    least: int
    most: int | None
    step: int

    def admits(self, value: Value) -> bool:
        if not isinstance(value, NUMBERS):
            return False
        small = self.most is not None and value > self.most
        return value >= self.least and not small and value % self.step == 0

    def __str__(self) -> str:
        parts = [f"a multiple of {self.step}"] if self.step > 1 else []
        if self.least > self.step:
            parts.append(f"at least {self.least}")
        if self.most is not None:
            parts.append(f"at most {self.most}")
        return ", ".join(parts) or "any"

    def nearest(self, value: Value) -> Value | None:
        if not isinstance(value, NUMBERS):
            return None
        up = ceil(max(value, self.least) / self.step) * self.step
        if self.most is None or up <= self.most:
            return up
        down = self.most // self.step * self.step
        return down if self.admits(down) else None

    def examples(self) -> Sequence[Value]:
        first = self.nearest(max(self.least, 1))
        return () if first is None else (first,)


class Emulated(Condition):
    __slots__ = ("native",)
    native: Condition

    def admits(self, value: Value) -> bool:
        return True

    def __str__(self) -> str:
        return f"any ({self.native} natively)"

    def examples(self) -> Sequence[Value]:
        return self.native.examples()


class Includes(Condition):
    """A set of features that holds all of `members`."""

    __slots__ = ("members",)
    members: tuple[str, ...]

    def admits(self, value: Value) -> bool:
        return isinstance(value, frozenset) and value.issuperset(self.members)

    def __str__(self) -> str:
        return " and ".join(self.members)


class Versions(Condition):
    __slots__ = ("specifier",)
    specifier: str

    def admits(self, value: Value) -> bool:
        known = isinstance(value, str) and value != ""
        return known and within(str(value), self.specifier)

    def __str__(self) -> str:
        return self.specifier


class Runtimes(Condition):
    __slots__ = ("requirements",)
    requirements: tuple[str, ...]

    def admits(self, value: Value) -> bool:
        return satisfies(self.requirements, str(value))

    def __str__(self) -> str:
        return " or ".join(self.requirements)


def one_of(*values: Value) -> Condition:
    """Exactly these values, the preferred one first."""
    _check("one_of", values, VALUES, f"words or numbers, {EACH}")
    return OneOf(values) if values else NONE


def anything_but(*values: Value) -> Condition:
    """Any value except these: for portable backends with known exceptions."""
    _check("anything_but", values, VALUES, f"words or numbers, {EACH}")
    return Excluding(values)


def at_most(number: int) -> Condition:
    return _range(0, number)


def at_least(number: int) -> Condition:
    return _range(number, None)


def between(least: int, most: int) -> Condition:
    return _range(least, most)


def multiple_of(step: int, *, most: int | None = None) -> Condition:
    """Positive multiples of `step`."""
    return _range(step, most, step)


def _range(least: int, most: int | None, step: int = 1) -> Condition:
    ends = (least, step) if most is None else (least, most, step)
    _check("range", ends, NUMBERS, "numbers")
    if step < 1 or (most is not None and most < least):
        expected = "a range that some number is in, in steps from 1"
        got = f"{least} to {most} in steps of {step}"
        raise InvalidInput("range", got=got, expected=expected)
    return Range(least, most, step)


def emulated(*native: int) -> Condition:
    """Any page size: the kernel reads `native` ones, and token indices for the others."""
    _check("emulated", native, (int,), f"page sizes, {EACH}")
    return Emulated(one_of(*native))


def includes(*features: str) -> Condition:
    """A set with all of these features."""
    _check("includes", features, TEXT, f"names of features, {EACH}")
    return Includes(features)


def versions(specifier: str) -> Condition:
    """A PEP 440 range that a bare version meets: ">=9.0,<10"."""
    _check("versions", (specifier,), TEXT, 'a range in text, such as ">=9.0,<10"')
    specifiers(specifier)
    return Versions(specifier)


def runtimes(*requirements: str) -> Condition:
    """One of several runtimes with a range, ("cuda>=12.3", "rocm>=6"), met by "cuda 13.0"."""
    _check("runtimes", requirements, TEXT, 'names with ranges, such as "cuda>=12.3"')
    for requirement in requirements:
        try:
            parsed_requirement(requirement)
        except ValueError:
            expected = 'a name with a range, such as "cuda>=12.3"'
            raise InvalidInput("runtimes", got=repr(requirement), expected=expected) from None
    return Runtimes(requirements)
