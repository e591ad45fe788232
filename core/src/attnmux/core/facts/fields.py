"""Fields of facts, which check themselves: the types of a dataclass say what its constructor takes.

`Annotated` adds what a type cannot say. A `Check` is one more condition, with words for both. A
function (name, value) → the value to keep reads the field in place of the type's own check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from inspect import get_annotations
from itertools import compress
from operator import attrgetter, is_not
from types import UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
)

from attnmux.core.facts.checks import refusal
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.frozen import FrozenMapping

Reader = Callable[[str, Any], Any]
"""(a field's name, the given value) → the value to keep; raises InvalidInput."""


class Check(NamedTuple):
    """A condition on a value."""

    expected: str
    """In words, for the error."""
    holds: Callable[[Any], bool] = lambda _: True
    """In `Annotated`, called only for a value of the type."""


def whole(least: int) -> Check:
    return Check(f"a whole number, {least} or more", lambda number: bool(number >= least))


Name = Annotated[str, Check("a name", bool)]
Whole = Annotated[int, whole(0)]
Positive = Annotated[int, whole(1)]


class Plan(NamedTuple):
    """How the fields of a class are read."""

    names: tuple[str, ...]
    readers: tuple[Reader, ...]
    defaults: tuple[object, ...]
    """`MISSING` for a field without one, which no field holds."""
    values: Callable[[object], tuple[object, ...]]


def read_fields(fact: Any, owner: str = "") -> list[str]:  # noqa: ANN401  # any dataclass
    """Check each field of a frozen dataclass and freeze its mappings: for `__post_init__`.

    owner: precedes the field's name in the error. Returns the fields that do not hold the object
    that is their default. Raises InvalidInput for the first value that its field cannot hold.
    """
    plan: Plan = plan_of(fact.__class__)
    values = plan.values(fact)
    is_given = map(is_not, values, plan.defaults)  # in C: the search makes many requests
    stated_names = []
    try:
        rows = zip(plan.names, plan.readers, values, strict=True)
        for name, read, value in compress(rows, is_given):
            kept = read(name, value)
            if kept is not value:
                object.__setattr__(fact, name, kept)
            stated_names.append(name)
    except InvalidInput as error:
        if not owner:
            raise
        argument = f"{owner}, {error.argument}"
        raise InvalidInput(argument, got=error.got, expected=error.expected) from None
    return stated_names


@cache
def plan_of(kind: type) -> Plan:
    """The plan of a dataclass of two fields or more."""
    types = types_of(kind)
    initial = [field for field in fields(kind) if field.init]
    return Plan(
        names=tuple(field.name for field in initial),
        readers=tuple(_reader(types[field.name]) for field in initial),
        defaults=tuple(field.default for field in initial),
        values=attrgetter(*(field.name for field in initial)),
    )


@cache
def types_of(kind: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name, with what `Annotated` adds.

    `typing.get_type_hints` looks names up in the class, where a field called `type` hides the type,
    and leaves quotes within a type of `collections.abc` in Python 3.10.
    """
    known = {field.name for field in fields(kind)}
    types: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        scope = vars(sys.modules[base.__module__])
        written = {name: text for name, text in get_annotations(base).items() if name in known}
        resolved = {text: _unquoted(text, scope) for text in set(written.values())}
        types |= {name: resolved[text] for name, text in written.items()}
    return types


def _unquoted(kind: Any, scope: dict[str, Any]) -> Any:  # noqa: ANN401  # any type
    """A type whose parts are types too, not their names in quotes."""
    if isinstance(kind, ForwardRef):
        return _unquoted(kind.__forward_arg__, scope)
    if isinstance(kind, str):
        return _unquoted(eval(kind, scope, {}), scope)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[(_unquoted(args[0], scope), *args[1:])]
    parts = args if origin is Literal else tuple(_unquoted(arg, scope) for arg in args)
    if parts == args:
        return kind
    return Union[parts] if origin in (Union, UnionType) else origin[parts]  # noqa: UP007  # of any number


def readers_of(kind: type) -> dict[str, Reader]:
    """The reader of each field by name."""
    plan = plan_of(kind)
    return dict(zip(plan.names, plan.readers, strict=True))


def parted(hint: Any) -> tuple[Any, Check | Reader | None]:  # noqa: ANN401  # any type
    """A type, and what `Annotated` adds to it."""
    if get_origin(hint) is not Annotated:
        return hint, None
    kind, mark = get_args(hint)
    return kind, mark


@cache
def _reader(hint: Any) -> Reader:  # noqa: ANN401  # any type
    kind, mark = parted(hint)
    if mark is not None and not isinstance(mark, Check):
        return mark
    if get_origin(kind) is Mapping:
        keys, values = map(_reader, get_args(kind))
        return _mapping_reader(keys, values, mark)
    expected, holds = check_of(hint)

    def read(name: str, value: Any) -> Any:  # noqa: ANN401  # reads any value
        if not holds(value):
            raise refusal(name, value, expected)
        return value

    return read


def _mapping_reader(keys: Reader, values: Reader, mark: Check | None) -> Reader:
    """Refuses one value by its key, and the whole if the mark has words for it."""

    def read(name: str, value: Any) -> Any:  # noqa: ANN401  # reads any value
        expected, holds = mark or Check("a mapping")
        if not isinstance(value, Mapping) or not holds(value):
            raise refusal(name, value, expected)
        try:
            kept = {key: values(f"{name} of {key}", item) for key, item in value.items()}
            for key in kept:
                keys(f"{name}, a key", key)
        except InvalidInput:
            if mark is None:
                raise
            raise refusal(name, value, expected) from None
        same = isinstance(value, FrozenMapping) and all(kept[key] is value[key] for key in kept)
        return value if same else FrozenMapping(kept)

    return read


@cache
def check_of(hint: Any) -> Check:  # noqa: ANN401  # any type
    """The check of a type and of the elements that it names.

    It reads no elements of a `Sequence`, which may be made when they are first read.
    """
    kind, mark = parted(hint)
    if mark is not None and not isinstance(mark, Check):
        raise TypeError(f"{hint}: a function reads a whole field, and no part of one")
    if mark is not None:
        base = check_of(kind).holds
        return Check(mark.expected, lambda value: base(value) and mark.holds(value))
    if kind in SCALARS:
        return SCALARS[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (tuple, frozenset):
        return _collection(kind, origin, args)
    if origin in (Union, UnionType):
        some = [check_of(arg).holds for arg in args]
        return Check(_named(kind), lambda value: any(holds(value) for holds in some))
    if origin is Literal:
        return Check(f"one of {', '.join(map(str, args))}", lambda value: value in args)
    if origin is type:
        return Check(_named(kind), lambda value: value is args[0])
    return Check(_named(kind), (origin or kind).__instancecheck__)


def _collection(kind: Any, origin: type[Any], args: tuple[Any, ...]) -> Check:  # noqa: ANN401  # any type
    if origin is tuple and args[-1] is not Ellipsis:
        places = [check_of(arg).holds for arg in args]
        return Check(
            _named(kind),
            lambda value: (
                isinstance(value, tuple)
                and len(value) == len(places)
                and all(holds(item) for holds, item in zip(places, value, strict=True))
            ),
        )
    element = check_of(args[0]).holds
    expected = f"a {origin.__name__} of {_named(args[0])}"
    return Check(expected, lambda value: isinstance(value, origin) and all(map(element, value)))


SCALARS: Mapping[Any, Check] = {
    str: Check("text", str.__instancecheck__),
    bool: Check("true or false", bool.__instancecheck__),
    # A bool is an int of Python, and of no field
    int: Check("a whole number", lambda value: isinstance(value, int) and type(value) is not bool),
    float: Check(
        "a number", lambda value: isinstance(value, (int, float)) and type(value) is not bool
    ),
    Any: Check("anything"),
}


def _named(hint: Any) -> str:  # noqa: ANN401  # any type
    """A type, as the element of a container is named."""
    kind = parted(hint)[0]
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_named, get_args(kind)))
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))
