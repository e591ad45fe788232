"""Checks of values from users and plugins: each error names the expected value."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

from attnmux.core.facts.errors import InvalidInput

TRUE = ("true", "yes", "on", "1")
UNSET = ("none", "null", "unset", "auto")
FALSE = ("false", "no", "off", "0", *UNSET)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def refusal(argument: str, got: object, expected: str) -> InvalidInput:
    """The error for a value, which is shortened if it is long."""
    return InvalidInput(argument, got=_SHORT.repr(got), expected=expected)


def is_whole(value: object, least: int = 0) -> bool:
    """Whether `value` is an integer of at least `least`. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def read_flag(argument: str, value: object) -> bool:
    """True or false, as it is or as a word. Raises InvalidInput."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else None
    if word not in TRUE and word not in FALSE:
        raise InvalidInput(argument, got=repr(value), expected="true or false")
    return word in TRUE


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of `known` that is most like `word`, in any case; empty if none is."""
    import difflib  # noqa: PLC0415  # off the path of answers: only errors guess

    by_letters = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), by_letters, n=1)
    return by_letters[matches[0]] if matches else ""
