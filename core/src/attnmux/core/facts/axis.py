"""One axis of choosing: a value that a question demands, and that a card may limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.request import Request
from attnmux.core.facts.values import Value
from attnmux.core.facts.verdicts import Reason

PLATFORM = 100
SHAPE = 10

Sample = int | bool | tuple[int, int]
"""A value, or the ends of a range from which one is drawn."""


class Asked(Protocol):
    """One phase of a request on a platform: a `Question`."""

    @property
    def request(self) -> Request: ...

    @property
    def platform(self) -> Platform: ...

    @property
    def phase(self) -> str: ...


Wanted = Callable[[Asked], Value | None]


class Limit(Protocol):
    """A card's condition on one axis."""

    def admits(self, value: Value) -> bool: ...

    def nearest(self, value: Value) -> Value | None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Axis:
    """A row of `AXES`. Its name is the clause's field."""

    name: str
    values: Literal["words", "numbers", "flag", "own"]
    """The conditions that a clause can have: on words, on positive numbers, `ANY` or `NONE` for a
    feature, or of a class that limits this axis alone."""
    wanted: Wanted
    """The value that the question demands; None or False for no demand."""
    meaning: str
    """A refusal for this axis, as `attnmux explain` puts it."""
    is_feature: bool = False
    """Whether a clause that does not mention the axis refuses every value, and not admits it."""
    settable: bool = False
    """Whether a hint may suggest another value for the request's field of this name."""
    droppable: bool = False
    """Whether coercion may unset it: the engine works without it or with the solver's value."""
    decided: bool = False
    """Whether the solver sets it if the request does not."""
    weight: int = 1
    """The distance that a failure adds when the nearest clause is sought."""
    columns: Mapping[str, tuple[Value, ...]] = field(default_factory=FrozenMapping)
    """The support matrix's columns: by title, the values that fill its cell if one of them is
    served."""
    asked_by: str = ""
    """A request that asks for the axis, as `Request.parse` reads it; empty: one with a field of its
    name."""
    samples: tuple[Sample, ...] = ()
    """Values of the suite's sampled cases, if a card sets no limit; empty if they follow from other
    values of the case."""
    words: tuple[str, ...] = ()
    """All words that a request can have; empty: any."""
    tries: tuple[Value, ...] = ()
    """Numbers that the suite requests, in addition to the neighbours of a card's limits."""

    @property
    def tried(self) -> tuple[Value, ...]:
        """Values that the suite expects a card to refuse unless it serves them."""
        return (True,) if self.values == "flag" else (*self.words, *self.tries)

    @property
    def of_platform(self) -> bool:
        """Whether a machine or the kind of attention decides it."""
        return self.weight == PLATFORM

    @property
    def of_machine(self) -> bool:
        """Whether only another machine has another value."""
        return self.name in Platform.__slots__

    def condition(self, clause: object) -> Limit:
        """The condition of a `Clause` on this axis."""
        condition: Limit = getattr(clause, self.name)
        return condition

    def reason(self, clause: object, wanted: Value, hint: str = "") -> Reason:
        return Reason(
            code=self.name.upper(),
            axis=self.name,
            wanted=_said(wanted),
            offered=str(self.condition(clause)),
            hint=hint,
            by="machine" if self.of_machine else "request",
        )

    def remedy(self, clause: object, wanted: Value) -> str:
        """The value nearest to `wanted` that the clause serves."""
        near = self.condition(clause).nearest(wanted)
        return "none" if near is None else str(near)


Demand = tuple[Axis, Value]


def _said(value: Value) -> str:
    if value is True:
        return "yes"
    if isinstance(value, frozenset):
        return " and ".join(sorted(value)) or "none"
    return "unknown" if value == "" else str(value)
