"""Frozen dataclasses with shared methods, which `dataclasses` would compile at every start.

A class of the command's short answers imports `dataclass`, `field` and `replace` from here. Type
checkers see the standard library's. At runtime the class gets slots and functions that loop over
its fields. What else a dataclass has (its fields, its signature, the errors for wrong arguments) is
that of a standard dataclass of the same body, which is made when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

T = TypeVar("T")


class Field(NamedTuple):
    """The arguments of `dataclasses.field`."""

    given: Mapping[str, Any]


class Body(NamedTuple):
    """What a decorated class consists of."""

    setters: tuple[tuple[str, Callable[[object, Any], None]], ...]
    """Of the arguments. A slot's setter is faster than `object.__setattr__`."""
    defaults: Mapping[str, Any]
    factories: Mapping[str, Callable[[], Any]]
    checks: bool
    """Whether there is a `__post_init__`."""


class Introspected:
    """An attribute that the standard dataclass has, looked up there."""

    def __init__(self, name: str, owner: type, standard: Callable[[], type]) -> None:
        self.name = name
        self.owner = owner
        self.standard = standard

    def __get__(self, _: object, owner: type) -> Any:  # noqa: ANN401  # as in the standard class
        if self.name != "__signature__":
            return getattr(self.standard(), self.name)
        if owner is not self.owner:  # a subclass has a signature of its own
            raise AttributeError(self.name)
        from inspect import signature  # noqa: PLC0415  # slow to import

        return signature(self.standard())


def _field(**given: Any) -> Any:  # noqa: ANN401  # as dataclasses.field
    return Field(given)


def _dataclass(*, frozen: bool, slots: bool, **flags: bool) -> Callable[[type[T]], type[T]]:
    """`dataclasses.dataclass`, of frozen classes with slots and without a base of their own."""
    assert frozen, "facts do not change"
    assert slots, "the setters are those of slots"
    return lambda cls: _made(cls, flags)


def _made(cls: type[T], flags: Mapping[str, bool]) -> type[T]:
    body = dict(vars(cls))
    fields = {
        name: given if isinstance(given := body.pop(name, None), Field) else Field({})
        for name in body["__annotations__"]
    }
    plain = {n: v for n, v in vars(cls).items() if n in fields and not isinstance(v, Field)}
    for leftover in ("__dict__", "__weakref__"):
        body.pop(leftover, None)
    body["__qualname__"] = cls.__qualname__
    given = {name: each.given for name, each in fields.items()}
    compared = [n for n, each in given.items() if each.get("compare", True)]
    shown = [n for n, each in given.items() if each.get("repr", True)]
    asked = tuple(name for name, each in given.items() if each.get("init", True))
    own = {"__slots__": tuple(fields), "__match_args__": () if flags.get("kw_only") else asked}
    made: Any = type(cls.__name__, cls.__bases__, body | own)
    shape = Body(
        tuple((name, vars(made)[name].__set__) for name in asked),
        plain | {n: each["default"] for n, each in given.items() if "default" in each},
        {n: each["default_factory"] for n, each in given.items() if "default_factory" in each},
        "__post_init__" in body,
    )
    make = _standard(cls, {**body, **plain}, given, flags)
    for name in ("__dataclass_fields__", "__dataclass_params__", "__signature__"):
        setattr(made, name, Introspected(name, made, make))
    made._fact = shape
    made.__init__ = _initialiser(shape, make)
    made.__setattr__ = _refuse_to_assign
    made.__delattr__ = _refuse_to_delete
    made.__getstate__ = lambda self: [getattr(self, name) for name in fields]
    made.__setstate__ = _set_state
    made.__replace__ = _replace
    if flags.get("eq", True):
        _compare_by(made, compared)
    if flags.get("repr", True) and "__repr__" not in body:
        made.__repr__ = lambda self: (
            f"{type(self).__qualname__}"
            f"({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
        )
    return made  # type: ignore[no-any-return]  # a class of the same body


def _standard(
    cls: type,
    body: Mapping[str, Any],
    given: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, bool],
) -> Callable[[], type]:
    """Makes the standard dataclass of the same body, compiled once."""
    made: list[type] = []

    def make() -> type:
        if not made:
            import dataclasses  # noqa: PLC0415  # slow to import

            markers = {n: dataclasses.field(**each) for n, each in given.items() if each}
            same = type(cls.__name__, cls.__bases__, {**body, **markers})
            made.append(dataclasses.dataclass(frozen=True, **flags)(same))
        return made[0]

    return make


def _initialiser(shape: Body, standard: Callable[[], type]) -> Callable[..., None]:
    setters, defaults, factories, checks = shape
    arguments = len(setters)

    def __init__(self: Any, /, *args: Any, **given: Any) -> None:  # noqa: ANN401  # a method
        values = given
        if len(given) != arguments:
            values = {**defaults, **given}
            for name, factory in factories.items():
                if name not in given:
                    values[name] = factory()
        if args or len(values) != arguments:
            standard().__init__(self, *args, **given)  # type: ignore[misc]  # raises its errors
            return
        try:
            for name, put in setters:
                put(self, values[name])
        except KeyError:
            standard().__init__(self, **given)  # type: ignore[misc]  # as above
            return
        if checks:
            self.__post_init__()

    return __init__


def _compare_by(made: Any, names: list[str]) -> None:  # noqa: ANN401  # a class that is changed
    """Two of a class are equal where these fields are; equal ones have the same hash."""
    values = attrgetter(*names)
    single = len(names) == 1

    def __eq__(self: object, other: object) -> bool:  # a method
        if other.__class__ is not self.__class__:
            return NotImplemented
        return bool(values(self) == values(other))

    def __hash__(self: object) -> int:  # a method
        return hash((values(self),) if single else values(self))

    made.__eq__ = __eq__
    made.__hash__ = __hash__


def _refuse_to_assign(self: object, name: str, value: object) -> NoReturn:
    from dataclasses import FrozenInstanceError  # noqa: PLC0415  # slow to import

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: object, name: str) -> NoReturn:
    from dataclasses import FrozenInstanceError  # noqa: PLC0415  # as above

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _set_state(self: object, state: list[Any]) -> None:
    for name, value in zip(self.__slots__, state, strict=True):  # type: ignore[attr-defined]  # made here
        object.__setattr__(self, name, value)


def unchecked(kind: type[T], given: Mapping[str, Any]) -> T:
    """An instance of a class of this module that was checked before: `__post_init__` is skipped,
    and a field without a value is None. The class has no factories."""
    made = object.__new__(kind)
    shape: Body = kind._fact  # type: ignore[attr-defined]  # made here
    defaults = shape.defaults
    for name, put in shape.setters:
        put(made, given[name] if name in given else defaults.get(name))
    return made


def defaults(kind: type) -> Mapping[str, Any]:
    """The fields of a class of this module that have a default, in their order."""
    return kind._fact.defaults  # type: ignore[attr-defined, no-any-return]  # made here


def _replace(record: T, /, **changes: Any) -> T:  # noqa: ANN401  # fields of any type
    """`dataclasses.replace` of a class of this module."""
    shape: Body = record._fact  # type: ignore[attr-defined]  # made here
    kept = {name: getattr(record, name) for name, _ in shape.setters if name not in changes}
    return type(record)(**kept, **changes)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:
    dataclass, field, replace = _dataclass, _field, _replace
