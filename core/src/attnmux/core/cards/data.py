"""Cards as plain data, for the file that keeps the offers of examined plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from attnmux.core.cards.card import BackendCard, Build, Caveat, Option, Prior
from attnmux.core.cards.clause import Clause
from attnmux.core.cards.conditions import (
    ANY,
    NONE,
    Condition,
    Emulated,
    Excluding,
    Includes,
    OneOf,
    Range,
    Runtimes,
    Versions,
)
from attnmux.core.cards.proof import ErrorBound, Verified
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.frozen import FrozenMapping, defaults

KINDS = {kind.__name__: kind for kind in (OneOf, Excluding, Range, Includes, Versions, Runtimes)}
TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}
"""Of options."""

RECORDS: Mapping[str, type[Any]] = {
    **{"clauses": Clause, "priors": Prior, "options": Option, "builds": Build},
    **{"verified_on": Verified, "error_bounds": ErrorBound, "caveats": Caveat},
}
"""What the tuples of a card hold, by field."""

DEFAULTS: Mapping[type, Mapping[str, Any]] = {
    BackendCard: defaults(BackendCard),
    **{kind: defaults(kind) for kind in RECORDS.values()},
}

T = TypeVar("T")
MISSING = object()


def to_data(cards: Sequence[BackendCard]) -> dict[str, Any]:
    """Lists, mappings, texts, numbers and flags. Each distinct condition is written once, and of a
    record the fields that differ from their defaults."""
    conditions: dict[Condition, int] = {ANY: 0, NONE: 1}

    def data(value: Any) -> Any:  # noqa: ANN401  # any value of a card
        if isinstance(value, Condition):
            return conditions.setdefault(value, len(conditions))
        usual = DEFAULTS.get(type(value))
        if usual is not None:
            given = ((name, getattr(value, name)) for name in value.__slots__)
            return {name: data(each) for name, each in given if each != usual.get(name, MISSING)}
        if isinstance(value, tuple):
            return [data(each) for each in value]
        if isinstance(value, Mapping):
            return dict(value)
        return value.__name__ if isinstance(value, type) else value

    rows = [data(card) for card in cards]
    return {"conditions": [_condition_data(each) for each in conditions], "cards": rows}


def _condition_data(condition: Condition) -> list[Any]:
    if isinstance(condition, Emulated):
        return ["Emulated", _condition_data(condition.native)]
    return [type(condition).__name__, *condition._parts()]


def _condition(data: Sequence[Any]) -> Condition:
    kind, *parts = data
    if kind == "Constant":
        return ANY if parts[1] else NONE
    if kind == "Emulated":
        return Emulated(_condition(parts[0]))
    return KINDS[kind](*map(_tuples, parts))


def _tuples(value: Any) -> Any:  # noqa: ANN401  # any plain value
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def from_data(data: Mapping[str, Any], *, checked: bool) -> tuple[BackendCard, ...]:
    """The inverse of `to_data`. With `checked`, the checks that ran before `data` was kept are
    skipped.

    Raises InvalidInput for a card that a check refuses and for text with control characters; other
    exceptions for data that are not those of cards.
    """
    if not checked:
        _check_text(data)
    conditions = [_condition(row) for row in data["conditions"]]

    def made(kind: type[T], row: Mapping[str, Any]) -> T:
        if kind is Clause:
            given = {name: conditions[number] for name, number in row.items()}
        else:
            given = {name: value(name, each) for name, each in row.items()}
        return _unchecked(kind, given) if checked else kind(**given)

    def value(name: str, given: Any) -> Any:  # noqa: ANN401  # any value of a card
        if name in RECORDS:
            return tuple(made(RECORDS[name], row) for row in given)
        if name == "when":
            return made(Clause, given)
        if name == "kv_dtype":
            return conditions[given]
        if name == "type":
            return TYPES[given]
        return FrozenMapping(given) if name == "sources" else _tuples(given)

    return tuple(made(BackendCard, row) for row in data["cards"])


def _unchecked(kind: type[T], given: Mapping[str, Any]) -> T:
    """An instance without `__post_init__`; a field with neither a value nor a default is None."""
    made = object.__new__(kind)
    values = {**DEFAULTS[kind], **given}
    for name in kind.__slots__:  # type: ignore[attr-defined]  # a dataclass with slots
        object.__setattr__(made, name, values.get(name))
    return made


def _check_text(data: object) -> None:
    """Terminals obey control characters, also those in a backend's summary."""
    if isinstance(data, str) and not data.isprintable():
        raise InvalidInput("card", got=repr(data), expected="text without control characters")
    if isinstance(data, dict):
        data = [*data, *data.values()]
    if isinstance(data, list):
        for each in data:
            _check_text(each)
