"""Conditions of a clause on one value: data that can be checked, said and hinted at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from attnmux.core.choosing.offer.libraries import parsed_requirement, satisfies, specifiers, within
from attnmux.core.errors import InvalidInput

Value = str | int | float | bool | frozenset[str]


class Condition(ABC):
    """A set of values that a backend serves. Equal conditions compare equal.

    Comparing, hashing and showing are written here for all kinds: code generated for each kind
    would be paid for at every cold start.
    """

    __slots__ = ()

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

    @abstractmethod
    def admits(self, value: Value) -> bool:
        """Whether the backend serves `value`."""

    @abstractmethod
    def __str__(self) -> str:
        """What is served, as a person would say it: "16, 32 or 64"."""

    def nearest(self, value: Value) -> Value | None:
        """The served value that is the smallest change from `value`; None where there is none."""
        return None

    def examples(self) -> Sequence[Value]:
        """Served values worth trying where nothing was asked, the preferred one first."""
        return ()


class Anything(Condition):
    """No condition at all."""

    __slots__ = ()

    def admits(self, value: Value) -> bool:
        return True

    def __str__(self) -> str:
        return "any"

    def __repr__(self) -> str:
        return "ANY"

    def __reduce__(self) -> str:
        return "ANY"


class Nothing(Condition):
    """What no value meets: the feature is not offered."""

    __slots__ = ()

    def admits(self, value: Value) -> bool:
        return False

    def __str__(self) -> str:
        return "none"

    def __repr__(self) -> str:
        return "NONE"

    def __reduce__(self) -> str:
        return "NONE"


ANY = Anything()
NONE = Nothing()

VALUES = (str, int, float, bool, frozenset)
TEXT = (str,)


def _check(condition: str, given: Iterable[object], types: Sequence[type], expected: str) -> None:
    """A condition that cannot be asked is the fault of the plugin that states it, not of whoever
    asks all plugins."""
    for value in given:
        if type(value) not in types:
            raise InvalidInput(condition, came=repr(value), expected=expected)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class OneOf(Condition):
    """Exactly these values, the preferred one first."""

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        _check("one_of", self.values, VALUES, "words or numbers, each as an argument")

    def admits(self, value: Value) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return " or ".join(
            filter(None, (", ".join(map(str, self.values[:-1])), str(self.values[-1])))
        )

    def nearest(self, value: Value) -> Value | None:
        numbers = [served for served in self.values if isinstance(served, (int, float))]
        if numbers and isinstance(value, (int, float)):
            return min(numbers, key=lambda served: abs(served - value))
        return self.values[0]

    def examples(self) -> Sequence[Value]:
        return self.values


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Excluding(Condition):
    """Any value but these."""

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        _check("anything_but", self.values, VALUES, "words or numbers, each as an argument")

    def admits(self, value: Value) -> bool:
        return value not in self.values

    def __str__(self) -> str:
        return f"any but {' and '.join(map(str, self.values))}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Range(Condition):
    """Multiples of `step` from `least` to `most`, both included; no `most`, no upper end."""

    least: int = 0
    most: int | None = None
    step: int = 1

    def __post_init__(self) -> None:
        ends = (self.least, self.step) if self.most is None else (self.least, self.most, self.step)
        _check("range", ends, (int, float), "numbers")
        if self.step < 1 or (self.most is not None and self.most < self.least):
            came = f"{self.least} to {self.most} in steps of {self.step}"
            expected = "a range that some number is in, in steps from 1"
            raise InvalidInput("range", came=came, expected=expected)

    def admits(self, value: Value) -> bool:
        if not isinstance(value, (int, float)):
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
        if not isinstance(value, (int, float)):
            return None
        up = ceil(max(value, self.least) / self.step) * self.step
        if self.most is None or up <= self.most:
            return up
        down = self.most // self.step * self.step
        return down if self.admits(down) else None

    def examples(self) -> Sequence[Value]:
        first = self.nearest(max(self.least, 1))
        return () if first is None else (first,)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Emulated(Condition):
    """Any page size: `native` ones by the kernel, the others by handing it token indices."""

    native: Condition

    def admits(self, value: Value) -> bool:
        return True

    def __str__(self) -> str:
        return f"any ({self.native} natively)"

    def examples(self) -> Sequence[Value]:
        return self.native.examples()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Includes(Condition):
    """A set of features that holds all of `members`."""

    members: tuple[str, ...]

    def __post_init__(self) -> None:
        _check("includes", self.members, TEXT, "names of features, each as an argument")

    def admits(self, value: Value) -> bool:
        return isinstance(value, frozenset) and value.issuperset(self.members)

    def __str__(self) -> str:
        return " and ".join(self.members)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Versions(Condition):
    """A version range in PEP 440's words, for a bare version: ">=9.0,<10"."""

    specifier: str

    def __post_init__(self) -> None:
        _check("versions", (self.specifier,), TEXT, 'a range in text, such as ">=9.0,<10"')
        specifiers(self.specifier)

    def admits(self, value: Value) -> bool:
        known = isinstance(value, str) and value != ""
        return known and within(str(value), self.specifier)

    def __str__(self) -> str:
        return self.specifier


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Runtimes(Condition):
    """Any one of several runtimes, each with a range: ("cuda>=12.3", "rocm>=6").

    The value is a name and a version: "cuda 13.0".
    """

    requirements: tuple[str, ...]

    def __post_init__(self) -> None:
        _check("runtimes", self.requirements, TEXT, 'names with ranges, such as "cuda>=12.3"')
        for requirement in self.requirements:
            parsed_requirement(requirement)

    def admits(self, value: Value) -> bool:
        return satisfies(self.requirements, str(value))

    def __str__(self) -> str:
        return " or ".join(self.requirements)


def one_of(*values: Value) -> Condition:
    """Exactly these, the preferred one first."""
    return OneOf(values) if values else NONE


def anything_but(*values: Value) -> Condition:
    """Everything except these: for what is portable, with known exceptions."""
    return Excluding(values)


def at_most(number: int) -> Condition:
    return Range(most=number)


def at_least(number: int) -> Condition:
    return Range(least=number)


def between(least: int, most: int) -> Condition:
    return Range(least=least, most=most)


def multiple_of(step: int, *, most: int | None = None) -> Condition:
    """Positive multiples of `step`."""
    return Range(least=step, most=most, step=step)


def emulated(*native: int) -> Condition:
    """Any page size: `native` ones by the kernel, the others by token indices."""
    _check("emulated", native, (int,), "page sizes, each as an argument")
    return Emulated(one_of(*native))


def includes(*features: str) -> Condition:
    return Includes(features)


def versions(specifier: str) -> Condition:
    return Versions(specifier)


def runtimes(*requirements: str) -> Condition:
    return Runtimes(requirements)
