"""Checks of what users and plugins hand over: each error says what was expected instead."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from attnmux.core.facts.errors import InvalidInput

TRUE = ("true", "yes", "on", "1")
UNSET = ("none", "null", "unset", "auto")
FALSE = ("false", "no", "off", "0", *UNSET)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class Check(NamedTuple):
    """What a field must hold."""

    expected: str
    """In words, for the error."""
    holds: Callable[[Any], bool]


def check_fields(owner: str, record: object, checks: Mapping[str, Check]) -> None:
    """Raise InvalidInput for the first field of `record` that its check refuses."""
    for name, check in checks.items():
        value = getattr(record, name)
        if not check.holds(value):
            raise refusal(f"{owner}, {name}", value, check.expected)


def refusal(argument: str, got: object, expected: str) -> InvalidInput:
    """The error for a value, which is shortened where it is long."""
    return InvalidInput(argument, got=_SHORT.repr(got), expected=expected)


def is_whole(value: object, least: int = 0) -> bool:
    """Whether `value` is an integer of at least `least`. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def whole(least: int) -> Check:
    return Check(f"a whole number, {least} or more", lambda value: is_whole(value, least))


def several(expected: str, container: type, *kinds: type) -> Check:
    """A container of values of these types."""
    return Check(
        expected,
        lambda value: isinstance(value, container) and all(isinstance(x, kinds) for x in value),  # type: ignore[attr-defined]  # containers iterate
    )


def tuple_of(*kinds: type) -> Check:
    return several(f"a tuple of {' or '.join(kind.__name__ for kind in kinds)}", tuple, *kinds)


def by_name(expected: str, *kinds: type) -> Check:
    """A mapping from text to values of these types."""
    return Check(
        expected,
        lambda value: (
            isinstance(value, Mapping)
            and all(isinstance(k, str) and isinstance(v, kinds) for k, v in value.items())
        ),
    )


TEXT = Check("text", lambda value: isinstance(value, str))
NAME = Check("a name", lambda value: isinstance(value, str) and bool(value))


def read_flag(argument: str, value: object) -> bool:
    """True or false, as it is or as a word. Raises InvalidInput."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else None
    if word not in TRUE and word not in FALSE:
        raise InvalidInput(argument, got=repr(value), expected="true or false")
    return word in TRUE


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known` that is most like `word`, in any case; empty where none is."""
    import difflib  # noqa: PLC0415  # off the path of answers: only errors guess

    by_letters = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), by_letters, n=1)
    return by_letters[found[0]] if found else ""
