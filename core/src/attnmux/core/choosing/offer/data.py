"""Cards as plain data, for the file that keeps the offers of examined plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from attnmux.core.choosing.common.frozen import FrozenMapping, defaults
from attnmux.core.choosing.offer.accuracy import ErrorBound
from attnmux.core.choosing.offer.card import BackendCard, Build, Option, Prior
from attnmux.core.choosing.offer.clause import ALWAYS, Clause
from attnmux.core.choosing.offer.conditions import (
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
from attnmux.core.choosing.offer.verified import Verified
from attnmux.core.errors import InvalidInput

KINDS = {kind.__name__: kind for kind in (OneOf, Excluding, Range, Includes, Versions, Runtimes)}
TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}
"""Of options."""

DEFAULTS: Mapping[type, Mapping[str, Any]] = {
    kind: defaults(kind)
    for kind in (BackendCard, Build, Clause, ErrorBound, Option, Prior, Verified)
}

T = TypeVar("T")
MISSING = object()


def to_data(cards: Sequence[BackendCard]) -> dict[str, Any]:
    """Lists, mappings, texts, numbers and flags. Each distinct condition is written once."""
    conditions: dict[Condition, int] = {ANY: 0, NONE: 1}

    def number(condition: Condition) -> int:
        return conditions.setdefault(condition, len(conditions))

    def clause(given: Clause) -> dict[str, int]:
        return {name: number(condition) for name, condition in _changed(given).items()}

    def prior(given: Prior) -> dict[str, Any]:
        return {**_changed(given), **({} if given.when == ALWAYS else {"when": clause(given.when)})}

    rows = [
        {
            **_changed(card),
            "sources": dict(card.sources),
            "clauses": [clause(each) for each in card.clauses],
            "priors": [prior(each) for each in card.priors],
            "options": [{**_changed(o), "type": o.type.__name__} for o in card.options],
            "builds": [_changed(each) for each in card.builds],
            "verified_on": [_changed(each) for each in card.verified_on],
            "error_bounds": [
                {**_changed(each), "kv_dtype": number(each.kv_dtype)} for each in card.error_bounds
            ],
        }
        for card in cards
    ]
    return {"conditions": [_condition_data(each) for each in conditions], "cards": rows}


def _changed(record: Any) -> dict[str, Any]:  # noqa: ANN401  # any of the dataclasses
    """The fields that differ from their defaults."""
    usual = DEFAULTS[type(record)]
    return {
        name: value
        for name in record.__slots__
        if (value := getattr(record, name)) != usual.get(name, MISSING)
    }


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
    made = _unchecked if checked else _made
    conditions = [_condition(row) for row in data["conditions"]]

    def clause(row: Mapping[str, int]) -> Clause:
        return made(Clause, {name: conditions[i] for name, i in row.items()})

    def prior(row: Mapping[str, Any]) -> Prior:
        when = {"when": clause(row["when"])} if "when" in row else {}
        return made(Prior, {**row, **when})

    def card(row: Mapping[str, Any]) -> BackendCard:
        options = ({**_tupled(each), "type": TYPES[each["type"]]} for each in row["options"])
        given = {
            **_tupled(row),
            "sources": FrozenMapping(row["sources"]),
            "clauses": tuple(map(clause, row["clauses"])),
            "priors": tuple(map(prior, row["priors"])),
            "options": tuple(made(Option, each) for each in options),
            "builds": tuple(made(Build, _tupled(each)) for each in row["builds"]),
            "verified_on": tuple(made(Verified, _tupled(each)) for each in row["verified_on"]),
            "error_bounds": tuple(
                made(ErrorBound, {**each, "kv_dtype": conditions[each["kv_dtype"]]})
                for each in row["error_bounds"]
            ),
        }
        return made(BackendCard, given)

    return tuple(map(card, data["cards"]))


def _tupled(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in row.items()}


def _made(kind: type[T], given: Mapping[str, Any]) -> T:
    return kind(**given)


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
