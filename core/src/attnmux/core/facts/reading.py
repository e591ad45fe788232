"""Facts from plain data, such as JSON: read by the types of their fields, and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

from attnmux.core.facts.checks import refusal
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.fields import check_of, parted, read_fields, types_of
from attnmux.core.facts.frozen import Plain

P = TypeVar("P", bound=Plain)
F = TypeVar("F", bound="Fact")


def read_fact(kind: type[P], data: Any, noun: str = "") -> P:  # noqa: ANN401  # reads any value
    """The inverse of `plain_fields`; absent fields keep their defaults.

    noun: the name of the fact in errors; empty: that of its class. Raises InvalidInput for an
    unknown or a missing field, since another version may have written the data, and for a value
    that its field cannot hold, of a class without checks too.
    """
    noun = noun or kind.__name__.lower()
    if not isinstance(data, Mapping):
        raise refusal(noun, data, "its fields by name")
    types, known = types_of(kind), {field.name: field for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    for name in data:
        if name not in known:
            expected = f"the fields {', '.join(known)}"
            raise InvalidInput(noun, got=f"a field {name!r}", expected=expected)
    for name, field in known.items():
        if name not in data and field.default is field.default_factory is MISSING:
            expected = check_of(types[name]).expected
            raise InvalidInput(f"{noun}, {name}", got="nothing", expected=expected)
    try:
        typed = {name: _typed(name, types[name], value) for name, value in data.items()}
    except InvalidInput as error:
        argument = f"{noun}, {error.argument}"
        raise InvalidInput(argument, got=error.got, expected=error.expected) from None
    fact = kind(**typed)
    read_fields(fact, noun)
    return fact


class Fact(Plain):
    """A dataclass that is written as plain data and read from it."""

    __slots__ = ()
    noun: ClassVar[str]
    """Its name in errors."""

    @classmethod
    def from_dict(cls: type[F], data: Mapping[str, Any]) -> F:
        """The inverse of `to_dict`. Raises InvalidInput as `read_fact`."""
        return read_fact(cls, data, cls.noun)


def _typed(name: str, hint: Any, value: Any) -> Any:  # noqa: ANN401  # any type and value
    """A value as its type has it, as far as plain data cannot say it: tuples come as lists."""
    kind, _ = parted(hint)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        is_clear = len(kinds) == 1 and value is not None
        return _typed(name, kinds[0], value) if is_clear else value
    if origin in (tuple, frozenset, Sequence):
        if not isinstance(value, list):
            raise refusal(name, value, "a list")
        return (frozenset if origin is frozenset else tuple)(
            _typed(name, args[0], item) for item in value
        )
    if origin is Mapping and isinstance(value, Mapping):
        return {key: _typed(name, args[1], item) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Fact):
        return kind.from_dict(value)
    if isinstance(kind, type) and issubclass(kind, Plain):
        return read_fact(kind, value)
    if kind is datetime and isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            return value
    return value
